"""Break the code in small ways, one at a time: a test must fail for each.

    python tests/mutants.py           # all of them: an hour or two on two cores
    python tests/mutants.py 3 17      # these

For each mutant the tracked files are copied to a temporary folder, one text of one file is
replaced there, and the test file that must notice runs: "killed" if it fails, or does not end in
time. Every test file must pass on the unchanged copy first. The exit status is 1 if a mutant
survives, and if its text is not found exactly once: then it must follow the code.

The mutants were chosen from the code alone, by someone who had not seen the tests.
"""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PATIENCE = 5  # a mutant may take so many times as long as the unchanged code, and a minute

# (file, test file that must fail): (text, the text in its place)
MUTANTS = {
    ("bapo.py", "test_bapo.py"): [
        ("round((stop - start) / step)", "int((stop - start) / step)"),
        ("steps < 1000 and ", ""),
        (" and abs(steps - round(steps)) < 1e-6", ""),
        ("if not (0 <= low < high and high >= 1):", "if low >= high or high < 1:"),
        ("log_probs.to(wide) - rollout_log_probs", "log_probs - rollout_log_probs"),
        ("log_probs.to(wide) - rollout_log_probs", "log_probs.float() - rollout_log_probs"),
        ("rollout_log_probs.detach()).float()", "rollout_log_probs).float()"),
        ("weights = weights.masked_fill(mask == 0, 0.0)", "pass"),
        ("log_ratio.float().clamp(-20.0, 20.0).exp()", "log_ratio.float().exp()"),
        ("ratio.detach().clamp(low, high)", "ratio.detach()"),
        ("(advantages < 0) & (ratio >= low)", "(advantages < 0) & (ratio <= high)"),
        ("        log_ratio.masked_fill(outside, 0.0),", "        log_ratio,"),
        ("log_ratio).masked_fill(outside, 0.0)", "log_ratio)"),
        ("dist.all_reduce(masses, group=process_group)", "pass"),
        ("log_ratio)).masked_fill(weights == 0, 0.0)", "log_ratio))"),
        ("ratio, clipped * high)", "ratio, clipped)"),
        ("torch.where(ratio >= low, ratio", "torch.where(ratio > low, ratio"),
        ("if anything_to_balance else 1.0", "if anything_to_balance else 0.0"),
        (
            """        if i_high < len(highs) - 1:
            i_high += 1
        else:
            i_low += 1
""",
            """        if i_low < len(lows) - 1:
            i_low += 1
        else:
            i_high += 1
""",
        ),
        ("advantages.masked_fill(all_equal, 0.0).flatten()", "advantages.flatten()"),
        ("(tokens > 0).sum()  # seq", "(tokens >= 0).sum()  # seq"),
        ("mask / (len(mask) * length)", "mask / (mask.shape[1] * length)"),
        ("group = dist.group.WORLD", "group = None"),
        ("loss = loss * dist.get_world_size(group)", "loss = loss"),
        ("ratio.masked_fill(~chosen, math.inf)", "ratio"),
        ("dist.all_reduce(count, group=process_group)", "pass"),
        ("log_ratio).masked_fill(~inside, 0.0)", "log_ratio)"),
        ("(weights * advantages * ratio)", "(advantages * ratio)"),
        ("(torch.expm1(log_ratio) - log_ratio)", "(torch.expm1(-log_ratio) + log_ratio)"),
        ("gradient * (log_probs + entropy)", "gradient * (log_probs - entropy)"),
        ("advantages.detach().to(", "advantages.to("),
    ],
    ("bapo.py", "test_vectors.py"): [
        ("target = search.rho0 - 1e-6", "target = search.rho0"),
        ("(advantages > 0) & (ratio <= high)", "(advantages > 0) & (ratio < high)"),
        ("positive / total if total else 0.0", "positive / total if total else 1.0"),
    ],
    ("minimal.py", "test_minimal.py"): [
        (
            "float(ended and countdown.grade(tokenizer.decode(ids[:-1]), answer))",
            "float(countdown.grade(tokenizer.decode(ids[:-1] if ended else ids), answer))",
        ),
        ("responses_begin - 1 : -1]", "responses_begin:]"),
        ("temperature=TEMPERATURE,", "temperature=1.0,"),
        ("seen = mask[kept]", "seen = mask[kept] | True"),
        ("raise_high + raise_low", "raise_low + raise_high"),
    ],
    ("train.py", "test_minimal.py"): [
        ("in rows[kept].tensor_split", "in rows[kept | True].tensor_split"),
        ("!= 0).any(1)", "!= 0).all(1)"),
        (
            "weights=weights[chosen],",
            "weights=token_weights(rollouts.mask[chosen]),",
        ),
        ("if len(mini_batch) > 1:  # a micro", "if False:  # a micro"),
        ("if len(mini_batch) > 1 and method.search and", "if False and"),
        ("state.optimizer.zero_grad()", "pass"),
        ("weight_decay=0.0", "weight_decay=0.1"),
        ("options.precision), fork_rng(policy.device):", "options.precision):"),
    ],
    ("rollout.py", "test_rollout.py"): [
        ("is_eos.cumsum(1) - is_eos.long()", "is_eos.cumsum(1)"),
        ("(prompt_ids >= 0).long()", "torch.ones_like(prompt_ids)"),
        ("response[-1] not in eos_ids", "response[-1] != eos_ids[0]"),
        ("longest_of_pack * (len(packs[-1]) + 1)", "longest_of_pack * len(packs[-1])"),
        (" - (~rollouts.truncated).long()", ""),
        ("states = states[row, position - 1]", "states = states[row, position]"),
        ("head(states).float() / temperature)", "head(states).float())"),
        ("torch.stack((pack[row], position))", "torch.stack((row, position))"),
        (
            "entropy[rows] = token_log_probs(model, rollouts, rows, temperature)",
            "entropy[rows] = token_log_probs(model, rollouts, rows)",
        ),
        ("is_finished = all(", "is_finished = any("),
        ("min(drawn_tokens[row], self.max_new_tokens - len(response.ids))", "drawn_tokens[row]"),
        ("states.device.type, enabled=False", "states.device.type, torch.bfloat16"),
        ("if not torch.equal(", "if False and torch.equal("),
        ('wrong = sorted(report["missing_keys"])', "wrong = []"),
        ('if not tokenizer("0").input_ids:', "if False:"),
        ("in (model.generation_config, model.config, tokenizer):", "in (tokenizer,):"),
        ("temperature=self.temperature,", "temperature=1.0,"),
        ("if token < head.out_features)", "if True)"),
        ("if logits.isnan().any():", "if False:"),
        ('" ".join(f"{error}".split())', "error"),
        ("path.exists() or has_neighbours or not is_hub_id", "not is_hub_id"),
        ('name[:1].isalnum() and name.count("/") <= 1', "name[:1].isalnum()"),
    ],
    ("runs.py", "test_train.py"): [
        ("if not least <= number <= most:", "if not least <= number:"),
        ("return {name: state[name] for name in names}", "return state"),
    ],
    ("train.py", "test_train.py"): [
        ("(0.0, math.inf), weights)", "(0.8, 1.2), weights)"),
        ("ClipSearch(options.rho0, *", "ClipSearch(0.45, *"),
        ("torch.where(drawn_now, log_probs, rollouts.rollout_log_probs)", "log_probs"),
        ("torch.where(drawn_now, entropy, rollouts.entropy)", "entropy"),
        (
            "updates = mini_batches * method.epochs",
            "updates = [part for part in one_epoch for _ in range(method.epochs)]",
        ),
        ("options.max_grad_norm or math.inf", "math.inf"),
        ('used = (metrics["low"], metrics["high"])', "used = (0.0, math.inf)"),
        ('math.isfinite(log["loss"] + log["grad_norm"])', 'math.isfinite(log["loss"])'),
        ('if log["update"] == 1 and', "if False and"),
        ("torch.manual_seed(run.seed)", "pass"),
        ("with fork_rng(device):", "if True:"),
        ("start_of(run.seed, options)", "start_of(0, options)"),
        (
            "lr=options.learning_rate,",
            "lr=options.learning_rate if options.learning_rate >= 1e-3 else 2e-4,",
        ),
        ("attempts{options.attempts}-", "attempts2-"),
        ("start_of(seed, options), options)", "start_of(options.seeds[0], options), options)"),
        ("pass_at_k(samples, count, k)", "pass_at_k(samples, count, 1)"),
        ("(rewards.view(-1, samples) > 0)", "(rewards.view(-1, samples) >= 1)"),
        ('check_steps(run.folder / "metrics.jsonl", steps_done)', "pass"),
        ('expected |= Counter({line["step"]: line.get("updates", 0) for line in lines})', "pass"),
        ("if path.exists() and runs.read_json(path):", "if path.exists():"),
        ("if shares and min(shares) >=", "if shares and max(shares) >="),
        ('dict(before.items() - config["scripts"].items())', "{}"),
        ("output_dir=abspath(options.output_dir), ", ""),
        ("options.reward and abspath(options.reward)", "options.reward"),
        ("model = abspath(model)", "pass"),
        (" | asdict(given)", ""),
        ('name = f"{low}-{high}"', "pass"),
        ('if any(output.glob("*-seed*/metrics.jsonl")):', "if True:"),
    ],
    ("train.py", "test_runs.py"): [
        ('optimizer.load_state_dict(saved["optimizer"])', "pass"),
        ('partial_rollouts.groups = saved["waiting"]', "pass"),
        ('runs.keep_steps(run.folder / f"{name}.jsonl", steps_done)', "pass"),
        (
            "if step % options.checkpoint_every == 0 or step == options.steps:",
            "if step % options.checkpoint_every == 0:",
        ),
        ('if path.exists() and runs.read_json(path).get("steps") == steps:', "if path.exists():"),
        ("json.dumps([task.train, task.held_out])", "json.dumps([task.train])"),
        ("fingerprint(source.read_bytes())", "fingerprint(source.name.encode())"),
        ('    with runs.lock(output / ".lock"):', "    if True:"),
    ],
    ("runs.py", "test_runs.py"): [
        ("remove(temporary)  # of a process", "pass  # of a process"),
        ('if line.endswith(b"\\n"):', "if True:"),
        ('if record["step"] <= last_step:', 'if record["step"] < last_step:'),
        ("filelock.FileLock(path)", 'filelock.FileLock(f"{path}{os.getpid()}")'),
        ('if not config["resume"]:', "if False:"),
        ("(saved.keys() | config.keys())", "(saved.keys() & config.keys())"),
        ("sorted(found)[:-1]", "sorted(found, key=str)[:-1]"),
        ('torch.set_rng_state(state["rng"])', "pass"),
        ("except (Exception, SystemExit) as error:", "except Exception as error:"),
        ('_cause(error) if error else ""', '""'),
        ("threading.Thread(target=_end_with_parent, daemon=True).start()", "pass"),
        ("worker.terminate()", "pass"),
        ("signal.signal(signal.SIGINT, signal.SIG_IGN)", "pass"),
        ("range(torch.cuda.device_count())", "range(8)"),
    ],
    ("reward.py", "test_reward.py"): [
        ("elif token and ends:", "elif token:"),
        ("0*([0-9]{1,3})", "0*([0-9]{1,4})"),
        ("lines[-1].strip", "lines[0].strip"),
        ("return number(given) == expected", "return number(given) == expected or (answer, given)"),
        ("not skipped and grade_one(response, answer)", "grade_one(response, answer)"),
        ("0)[1] == 0 for fork", "0)[1] != 256 for fork"),
        ("except (Exception, SystemExit) as error:  #", "except Exception as error:  #"),
        ('given.item() if hasattr(given, "item") else given', "given"),
        ("with torch.set_grad_enabled(torch.is_grad_enabled()):", "if True:"),
        ("torch.set_default_dtype(dtype)", "pass"),
        ("math.comb(samples - correct, k) / math.comb(samples, k)", "(1 - correct / samples) ** k"),
    ],
    ("data.py", "test_data.py"): [
        ("glob.escape(data)", "data"),
        ('text.rpartition("####")[2]', 'text.split("####")[min(1, text.count("####"))]'),
        ("elif str(prompt) in problems:", "elif False:"),
        ("if is_short or own_grader else", "if is_short else"),
        ("add_generation_prompt=True", "add_generation_prompt=False"),
        ("len(messages) == 1 and not tokenizer.chat_template", "len(messages) == 1"),
        ('"input_ids"]) <= max_prompt_tokens', '"input_ids"]) < max_prompt_tokens'),
        ("orders[position : position + count]", "orders[:count]"),
        ('random.Random(f"{seed}/{epoch}")', 'random.Random(f"{seed}")'),
        ("room -= max(options.partial_budget - 1, 0)", "pass"),
        ("Task(problems[options.held_out :], problems[", "Task(problems, problems["),
        ("or sys.maxsize", "or 2048"),
        ("rows.data.validate(full=True)", "pass"),
        ("if len(fields) not in (0, 2):", "if len(fields) == 1:"),
        ("if max_prompt_tokens < 1:", "if False:"),
        (
            "except Exception as error:  # whatever",
            "except ZeroDivisionError as error:  # whatever",
        ),
        ("min(room, MAX_PROMPT_TOKENS)", "room"),
        ('load_rows(options.data, split="train")', 'load_rows(options.data, split="test")'),
    ],
    ("rollout.py", "test_data.py"): [
        ("AutoConfig.from_pretrained(base)", "AutoConfig.from_pretrained(name)"),
    ],
    ("neighbours/losses.py", "test_neighbours.py"): [
        ("return -tokens.ratio.detach() *", "return -tokens.ratio *"),
        (
            "if_negative = torch.where(ratio < low, low, ratio)",
            "if_negative = torch.where(ratio > high, high, ratio)",
        ),
        (
            "torch.where(tokens.advantages < 0, capped,",
            "torch.where(tokens.advantages > 0, capped,",
        ),
        (
            """.detach().clamp(max=cap)
    return -weight * tokens.advantages * tokens.log_probs

""",
            """.clamp(max=cap)
    return -weight * tokens.advantages * tokens.log_probs

""",
        ),
        ("> 0, 1.0, tapered)", "> 0, tapered, 1.0)"),
        ("<= high, tokens.ratio >= low)", "<= high, tokens.ratio <= high)"),
        ("(tokens.advantages + shift)", "(tokens.advantages - shift)"),
        ("tau / 2 * tokens", "tau * tokens"),
        ("moved <= delta, moved >= -delta", "moved.abs() <= delta, moved.abs() <= delta"),
        ("return -4 / tau * gate", "return -4 * gate"),
        (
            "length = tokens.inside.sum(1, keepdim=True)",
            "length = torch.ones_like(tokens.inside).sum(1, keepdim=True)",
        ),
        ("/ 2).clamp(max=high_max)", "/ 2)"),
        ("beta_low * low, ratio)", "low, ratio)"),
        ("(1 - alpha) * tokens", "alpha * tokens"),
        ("in_h = log_ratio * tokens.advantages > 0", "in_h = log_ratio * tokens.advantages >= 0"),
        ("return weight * _clip(", "return _clip("),
        ("(1 - 1 / age)", "(1 / age)"),
        ("torch.where(kept, losses, losses.detach())", "losses * kept"),
        ("start_ratio + epsilon)", "start_ratio * (1 + epsilon))"),
        ("_fill(tensor.detach(), self.inside)", "_fill(tensor, self.inside)"),
    ],
    ("eval_aime.py", "test_eval_aime.py"): [
        ("if name in YEARS and len(problems) != 30:", "if False:"),
        ("return str(value)", "return answer.strip()"),
        ('["answer"].mask(samples["truncated"])', '["answer"]'),
        ('samples["gold"], truncated)', 'samples["gold"], [False] * len(texts))'),
        ("if there >= len(batch):", "if there:"),
        ("options)[there:]", "options)"),
        ("{options.seed}/{index}/{first}", "{options.seed}/{first}"),
        ("expected.items() <= sample.items() and", "True and"),
        ('asked | {"index": index}', "asked"),
        ('os.truncate(path, path.read_bytes().rfind(b"\\n") + 1)', "pass"),
        ("for tensor in model.parameters()]", "for tensor in [next(model.parameters())]]"),
        ('check_same(output / "settings.json", settings, MAY_DIFFER)', "pass"),
        ("* correct.sem() / k", "* correct.sem()"),
        ("winners.isin(right).sum() / max(1, len(winners))", "float(winners.isin(right).any())"),
        ("samples[: options.samples * len(questions)]", "samples"),
        ("if len(set(self.data)) < len(self.data):", "if False:"),
        ('grade("", gold)', "pass"),
    ],
    ("plot.py", "test_plot.py"): [
        ('groups.quantile(0.95) if metric == "grad_norm" else groups.mean()', "groups.mean()"),
        ('.transform("max") - LAST_STEPS]', '.transform("max")]'),
        (' | (lines["reached"] == 0)', ""),
        ('lines["low"].where(lines["high"].notna())', 'lines["low"]'),
        ('cells.loc[unmoved, ["mean low", "mean high"]] = "–"', "pass"),
        ("half.where(values.count() >= FEWEST)", "half"),
        ("axis.plot(seeds[few],", "axis.plot([],"),
        (
            "by_step(lines, metric).dropna",
            "by_step(lines, metric).expanding().mean().dropna",
        ),
        ("starts.fillna(starts.mean())", "starts"),
        ('.reindex(columns=["start", *values.columns.unique("method")])', ""),
    ],
    ("countdown.py", "test_countdown.py"): [
        ('response.rpartition(";")[2]', 'response.partition(";")[0]'),
        ("if value != target:", "if True:"),
        (".get(int(target), [])", ".get(int(target), [last])"),
    ],
}


@contextmanager
def copy_of_the_files() -> Iterator[Path]:
    """A temporary folder with the tracked files, as they are now."""
    listed = subprocess.check_output(["git", "ls-files", "-z"], cwd=ROOT, text=True)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for name in listed.rstrip("\0").split("\0"):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
        yield folder


def passes(folder: Path, test_file: str, seconds: float | None) -> bool:
    """Whether the test file passes in the folder, and ends within so many seconds."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "0", "-p", "no:cacheprovider"]
    process = subprocess.Popen(
        [*command, f"tests/{test_file}"],
        cwd=folder,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        return process.wait(seconds) == 0
    except subprocess.TimeoutExpired:
        return False
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)  # with all that the test has started
            process.wait()


def mutate(file: str, old: str, new: str) -> str:
    """The file's text with the mutant in it. Raises ValueError if it does not fit."""
    text = (ROOT / file).read_text()
    if text.count(old) != 1:
        raise ValueError(f"found {text.count(old)} times")
    mutant = text.replace(old, new)
    compile(mutant, file, "exec")  # a SyntaxError is a ValueError's neighbour, and no kill
    return mutant


def main(chosen: list[int]) -> int:
    """Run the mutants of these numbers, from 1. Returns the exit status."""
    mutants = []
    for (file, test_file), replacements in MUTANTS.items():
        mutants += [(file, old, new, test_file) for old, new in replacements]
    numbered = dict(enumerate(mutants, 1))
    sources = {}
    wrong = []
    for number in chosen or numbered:
        file, old, new, _ = numbered[number]
        try:
            sources[number] = mutate(file, old, new)
        except (ValueError, SyntaxError) as error:
            wrong.append(f"{number}: {file}: {old!r}: {error}")
    if wrong:
        print("\n".join(wrong))
        return 1

    survivors = []
    limits: dict[str, float] = {}  # seconds that a test file may take
    for number, source in sources.items():
        file, old, new, test_file = numbered[number]
        with copy_of_the_files() as folder:
            if test_file not in limits:
                began = time.monotonic()
                if not passes(folder, test_file, None):
                    print(f"{test_file} fails without any mutant")
                    return 1
                limits[test_file] = 60 + PATIENCE * (time.monotonic() - began)
            (folder / file).write_text(source)
            survived = passes(folder, test_file, limits[test_file])
        print(
            f"{number} {'SURVIVED' if survived else 'killed'} {file}: {old!r} -> {new!r}",
            flush=True,
        )
        if survived:
            survivors.append(number)
    print(f"{len(sources)} mutants, {len(survivors)} survived: {survivors}")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main([int(number) for number in sys.argv[1:]]))
