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

# File, text, the text in its place, the test file that must fail.
MUTANTS = [
    # ------------------------------------------------------------ bapo.py
    ("bapo.py", "0 <= self.rho0 < 1:", "0 <= self.rho0 <= 1:", "test_bapo.py"),
    (
        "bapo.py",
        '_check_bounds("low_max and high_start", self.low_max, self.high_start)',
        "pass",
        "test_bapo.py",
    ),
    ("bapo.py", "if self.low_start < self.low_max and", "if False and", "test_bapo.py"),
    (
        "bapo.py",
        "self.low_start == self.low_max and self.high_start",
        "self.low_start == self.low_max or self.high_start",
        "test_bapo.py",
    ),
    ("bapo.py", "round((stop - start) / step)", "int((stop - start) / step)", "test_bapo.py"),
    ("bapo.py", "if steps >= MOST_CANDIDATES:", "if False:", "test_bapo.py"),
    ("bapo.py", "if abs(steps - round(steps)) > 1e-6:", "if False:", "test_bapo.py"),
    (  # epsilons, and NaN
        "bapo.py",
        "if not (0 <= low < high and high >= 1):",
        "if low >= high or high < 1:",
        "test_bapo.py",
    ),
    (  # the subtraction in bfloat16
        "bapo.py",
        "log_probs.float() - rollout_log_probs",
        "log_probs - rollout_log_probs",
        "test_bapo.py",
    ),
    ("bapo.py", "- rollout_log_probs.detach()\n", "- rollout_log_probs\n", "test_bapo.py"),
    ("bapo.py", "weights = weights.masked_fill(mask == 0, 0.0)", "pass", "test_bapo.py"),
    ("bapo.py", "elif not isinstance(bounds, tuple) or", "elif", "test_bapo.py"),
    (
        "bapo.py",
        "log_ratio.float().clamp(-20.0, 20.0).exp()",
        "log_ratio.float().exp()",
        "test_bapo.py",
    ),
    (
        "bapo.py",
        "torch.where(ratio > high, high,",
        "torch.where(ratio >= high, high,",
        "test_bapo.py",
    ),
    (  # the maximum for negative advantages
        "bapo.py",
        "if_negative = torch.where(ratio < low, low, ratio)",
        "if_negative = torch.where(ratio > high, high, ratio)",
        "test_bapo.py",
    ),
    ("bapo.py", '_check_bounds("low and high", low, high)', "pass", "test_bapo.py"),
    ("bapo.py", "log_ratio = log_ratio.masked_fill(outside, 0.0)", "pass", "test_bapo.py"),
    ("bapo.py", "weights.clone() * token_losses", "weights * token_losses", "test_bapo.py"),
    (
        "bapo.py",
        "(advantages > 0) & (ratio <= high)",
        "(advantages > 0) & (ratio < high)",
        "test_bapo.py",
    ),
    ("bapo.py", "dist.all_reduce(masses, group=process_group)", "pass", "test_bapo.py"),
    (  # NaN advantages outside the mask
        "bapo.py",
        "log_ratio)).masked_fill(weights == 0, 0.0)",
        "log_ratio))",
        "test_bapo.py",
    ),
    ("bapo.py", "ratio, clipped * high)", "ratio, clipped)", "test_bapo.py"),
    (
        "bapo.py",
        "torch.where(ratio >= low, ratio",
        "torch.where(ratio > low, ratio",
        "test_bapo.py",
    ),
    ("bapo.py", "if masses.shape != (len(highs) + len(lows),):", "if False:", "test_bapo.py"),
    ("bapo.py", "target = search.rho0 - 1e-6", "target = search.rho0", "test_bapo.py"),
    (
        "bapo.py",
        "if anything_to_balance else 1.0",
        "if anything_to_balance else 0.0",
        "test_bapo.py",
    ),
    (  # the lower bound first
        "bapo.py",
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
        "test_bapo.py",
    ),
    (
        "bapo.py",
        "positive / total if total else 0.0",
        "positive / total if total else 1.0",
        "test_bapo.py",
    ),
    (
        "bapo.py",
        "normalize_std and group_size > 1",
        "normalize_std and group_size > 2",
        "test_bapo.py",
    ),
    (
        "bapo.py",
        "groups.std(1, keepdim=True)",
        "groups.std(1, False, keepdim=True)",
        "test_bapo.py",
    ),
    (
        "bapo.py",
        "advantages.masked_fill(all_equal, 0.0).flatten()",
        "advantages.flatten()",
        "test_bapo.py",
    ),
    ("bapo.py", "count = (tokens > 0).sum()", "count = (tokens >= 0).sum()", "test_bapo.py"),
    ("bapo.py", "weights = inside / length", "weights = inside / mask.shape[1]", "test_bapo.py"),
    (
        "bapo.py",
        "if length is None or not 0 < length < math.inf:",
        "if length is None:",
        "test_bapo.py",
    ),
    ("bapo.py", "dist.all_reduce(count, group=process_group)", "pass", "test_bapo.py"),
    ("bapo.py", "log_ratio).masked_fill(~inside, 0.0)", "log_ratio)", "test_bapo.py"),
    ("bapo.py", "(1.0 if weights is None else weights)", "1.0", "test_bapo.py"),
    (
        "bapo.py",
        "(negative & ~has_gradient).sum() / tokens",
        "(negative & ~has_gradient).sum() / negative.sum()",
        "test_bapo.py",
    ),
    (  # KL(pi_theta || pi_rollout)
        "bapo.py",
        "(torch.expm1(log_ratio) - log_ratio)",
        "(torch.expm1(-log_ratio) + log_ratio)",
        "test_bapo.py",
    ),
    (
        "bapo.py",
        "gradient * (log_probs + entropy)",
        "gradient * (log_probs - entropy)",
        "test_bapo.py",
    ),
    ("bapo.py", "lost.masked_fill(mask == 0, 0.0).sum()", "lost.sum()", "test_bapo.py"),
    ("bapo.py", "advantages.detach().to(", "advantages.to(", "test_bapo.py"),
    # ------------------------------------------------------------ minimal.py, also for the loop
    (  # the reward ignores whether the response ended
        "minimal.py",
        "float(ended and countdown.grade(tokenizer.decode(ids[:-1]), answer))",
        "float(countdown.grade(tokenizer.decode(ids[:-1] if ended else ids), answer))",
        "test_minimal.py",
    ),
    ("minimal.py", "asked[row // GROUP_SIZE]", "asked[row % len(asked)]", "test_minimal.py"),
    ("minimal.py", "is_eos.cumsum(1) - is_eos.long()", "is_eos.cumsum(1)", "test_minimal.py"),
    ("minimal.py", "responses_begin - 1 : -1]", "responses_begin:]", "test_minimal.py"),
    ("minimal.py", "(logits / TEMPERATURE)", "logits", "test_minimal.py"),
    ("minimal.py", "temperature=TEMPERATURE,", "temperature=1.0,", "test_minimal.py"),
    ("minimal.py", "!= 0).any(1)  # [PROMPTS]", "!= 0).all(1)  # [PROMPTS]", "test_minimal.py"),
    ("minimal.py", "token_weights(mask[kept])", "token_weights(mask)[kept]", "test_minimal.py"),
    ("minimal.py", "optimizer.zero_grad()", "pass", "test_minimal.py"),
    (
        "train.py",
        "in rows[kept].tensor_split",
        "in rows[kept | True].tensor_split",
        "test_minimal.py",
    ),
    ("train.py", "!= 0).any(1)", "!= 0).all(1)", "test_minimal.py"),
    (  # a part's own number of tokens
        "train.py",
        "weights=weights[rows],\n            bounds=bounds",
        "weights=token_weights(rollouts.mask[rows]),\n            bounds=bounds",
        "test_minimal.py",
    ),
    (
        "train.py",
        "if len(parts) > 1:  # a part's own",
        "if False:  # a part's own",
        "test_minimal.py",
    ),
    ("train.py", "total_loss = total_loss + loss", "total_loss = loss", "test_minimal.py"),
    ("train.py", "if len(parts) > 1 and method.search and", "if False and", "test_minimal.py"),
    ("train.py", "state.optimizer.zero_grad()", "pass", "test_minimal.py"),
    ("train.py", "weight_decay=0.0", "weight_decay=0.1", "test_minimal.py"),
    ("train.py", '"temperature": options.temperature,', '"temperature": 1.0,', "test_minimal.py"),
    ("rollout.py", "is_eos.cumsum(1) - is_eos.long()", "is_eos.cumsum(1)", "test_minimal.py"),
    # ------------------------------------------------------------ rollout.py
    ("rollout.py", "is_eos.cumsum(1) - is_eos.long()", "is_eos.cumsum(1)", "test_rollout.py"),
    ("rollout.py", ', "top_k": top_k}', "}", "test_rollout.py"),
    (
        "rollout.py",
        "attended, True, 0, padding_side",
        "attended, True, 1, padding_side",
        "test_rollout.py",
    ),
    (
        "rollout.py",
        "zip(rows, drawn.tolist(), lengths)",
        "zip(rows[::-1], drawn.tolist(), lengths)",
        "test_rollout.py",
    ),
    ("rollout.py", "response[-1] not in eos_ids", "response[-1] != eos_ids[0]", "test_rollout.py"),
    (
        "rollout.py",
        "longest_of_pack * (len(packs[-1]) + 1)",
        "longest_of_pack * len(packs[-1])",
        "test_rollout.py",
    ),
    ("rollout.py", " - (~rollouts.truncated).long()", "", "test_rollout.py"),
    ("rollout.py", "skip_special_tokens=False", "skip_special_tokens=True", "test_rollout.py"),
    (
        "rollout.py",
        "states = states[row, position - 1]",
        "states = states[row, position]",
        "test_rollout.py",
    ),
    (
        "rollout.py",
        "head(states).float() / temperature)",
        "head(states).float())",
        "test_rollout.py",
    ),
    ("rollout.py", "in_order = read_order.argsort()", "in_order = read_order", "test_rollout.py"),
    ("rollout.py", "max_tokens) if pack]", "max_tokens)]", "test_rollout.py"),
    (
        "rollout.py",
        "entropy[rows] = token_log_probs(model, rollouts, rows, temperature)",
        "entropy[rows] = token_log_probs(model, rollouts, rows)",
        "test_rollout.py",
    ),
    (
        "rollout.py",
        "torch.bfloat16, enabled=enabled",
        "torch.bfloat16, enabled=True",
        "test_rollout.py",
    ),
    ("rollout.py", "is_finished = all(", "is_finished = any(", "test_rollout.py"),
    ("rollout.py", "[r for r in responses if not r.finished]", "responses", "test_rollout.py"),
    (
        "rollout.py",
        "pad_rows([response.entropy for",
        "pad_rows([response.log_probs for",
        "test_rollout.py",
    ),
    (
        "rollout.py",
        "min(drawn_tokens[row], self.max_new_tokens - len(response.ids))",
        "drawn_tokens[row]",
        "test_rollout.py",
    ),
    (  # an EOS that was drawn past the limit, and dropped
        "rollout.py",
        "used == drawn_tokens[row] and not",
        "not",
        "test_rollout.py",
    ),
    (
        "rollout.py",
        "step - response.versions[0]",
        "step - response.versions[-1]",
        "test_rollout.py",
    ),
    (
        "rollout.py",
        "states.device.type, enabled=False",
        "states.device.type, torch.bfloat16",
        "test_rollout.py",
    ),
    ("rollout.py", "if type(head) is nn.Linear:", "if False:", "test_rollout.py"),
    (
        "rollout.py",
        'precision == "bfloat16" and (lora_rank or',
        "(lora_rank or",
        "test_rollout.py",
    ),
    ("rollout.py", "is_trainable=True", "is_trainable=False", "test_rollout.py"),
    ("rollout.py", "if not torch.equal(", "if False and torch.equal(", "test_rollout.py"),
    ("rollout.py", 'wrong = sorted(report["missing_keys"])', "wrong = []", "test_rollout.py"),
    ("rollout.py", 'if not tokenizer("0").input_ids:', "if False:", "test_rollout.py"),
    ("rollout.py", "torch.default_generator.manual_seed(0)", "pass", "test_rollout.py"),
    (  # chat models list several
        "rollout.py",
        "in (model.generation_config, model.config, tokenizer):",
        "in (tokenizer,):",
        "test_rollout.py",
    ),
    ("rollout.py", "if not layers:", "if False:", "test_rollout.py"),
    # ------------------------------------------------------------ train.py
    ("train.py", "if self.reward and not with_data:", "if False:", "test_train.py"),
    (
        "train.py",
        "if not values or len(set(values)) < len(values):",
        "if not values:",
        "test_train.py",
    ),
    ("train.py", "if not least <= value < math.inf:", "if value < least - 1:", "test_train.py"),
    ("train.py", "if not 0 < value < math.inf:", "if not 0 <= value < math.inf:", "test_train.py"),
    ("train.py", "if not 0 <= seed < 2**32:", "if not 0 <= seed:", "test_train.py"),
    ("train.py", " < torch.cuda.device_count()", " >= 0", "test_train.py"),
    ("train.py", "del metrics[name]", "pass", "test_train.py"),
    ("train.py", "ClipSearch(options.rho0, *", "ClipSearch(0.45, *", "test_train.py"),
    ("train.py", "int(match[2] or 8)", "int(match[2] or 1)", "test_train.py"),
    (
        "train.py",
        "torch.where(drawn_now, log_probs, rollouts.log_probs)",
        "log_probs",
        "test_train.py",
    ),
    ("train.py", "torch.where(drawn_now, entropy, rollouts.entropy)", "entropy", "test_train.py"),
    (  # each mini-batch EPOCHS times in turn
        "train.py",
        "updates = updates * method.epochs",
        "updates = [part for part in updates for _ in range(method.epochs)]",
        "test_train.py",
    ),
    ("train.py", "options.max_grad_norm or math.inf", "math.inf", "test_train.py"),
    ("train.py", '(metrics["low"], metrics["high"]),', "(0.0, math.inf),", "test_train.py"),
    ("train.py", "entropy[rows].sum() / mask.sum()", "entropy[rows].mean()", "test_train.py"),
    (
        "train.py",
        'math.isfinite(log["loss"] + log["grad_norm"])',
        'math.isfinite(log["loss"])',
        "test_train.py",
    ),
    ("train.py", 'if log["update"] == 1 and', "if False and", "test_train.py"),
    ("train.py", "torch.manual_seed(run.seed)", "pass", "test_train.py"),
    ("train.py", 'optimizer.load_state_dict(saved["optimizer"])', "pass", "test_runs.py"),
    ("train.py", 'state.waiting.groups = saved["waiting"]', "pass", "test_runs.py"),
    (
        "train.py",
        'runs.keep_steps(run.folder / f"{name}.jsonl", state.steps_done)',
        "pass",
        "test_runs.py",
    ),
    ("train.py", "lora_rank=options.lora_rank,", "lora_rank=0,", "test_train.py"),
    (
        "train.py",
        "if step % options.checkpoint_every == 0 or step == options.steps:",
        "if step % options.checkpoint_every == 0:",
        "test_runs.py",
    ),
    ("train.py", "self.seconds.get(name, 0.0) + time", "time", "test_train.py"),
    (
        "train.py",
        "[problem.answer for problem in problems for _ in range(group_size)]",
        "[problem.answer for _ in range(group_size) for problem in problems]",
        "test_train.py",
    ),
    ("train.py", "with fork_rng(device):", "if True:", "test_train.py"),
    ("train.py", "lengths[rewards > 0].mean()", "lengths[rewards == 1].mean()", "test_train.py"),
    (
        "train.py",
        "(step - rollouts.versions)[rollouts.mask]",
        "(step - rollouts.versions)",
        "test_train.py",
    ),
    (
        "train.py",
        "options.precision), fork_rng(policy.device):",
        "options.precision):",
        "test_minimal.py",
    ),
    ("train.py", "groups.std(1).argmax()", "groups.std(1).argmin()", "test_train.py"),
    (  # a run that shall be longer
        "train.py",
        'if path.exists() and runs.read_json(path).get("steps") == steps:',
        "if path.exists():",
        "test_runs.py",
    ),
    (
        "train.py",
        "            seed,\n            options.attempts",
        "            0,\n            options.attempts",
        "test_train.py",
    ),
    (
        "train.py",
        "json.dumps([task.train, task.held_out])",
        "json.dumps([task.train])",
        "test_runs.py",
    ),
    (
        "train.py",
        "fingerprint(source.read_bytes())",
        "fingerprint(source.name.encode())",
        "test_runs.py",
    ),
    ("train.py", "return 1 if failed else 0", "return 0", "test_train.py"),
    (
        "train.py",
        "options.seeds[:1] if options.model else options.seeds",
        "options.seeds[:1]",
        "test_train.py",
    ),
    # ------------------------------------------------------------ runs.py
    ("runs.py", "remove(temporary)  # of a process", "pass  # of a process", "test_runs.py"),
    ("runs.py", "remove(temporary)  # a full disk", "pass  # a full disk", "test_runs.py"),
    ("runs.py", "if not isinstance(content, dict):", "if False:", "test_runs.py"),
    ("runs.py", 'float(f"{value:.6g}") if math.isfinite(value) else None', "value", "test_runs.py"),
    ("runs.py", 'if not line.endswith(b"\\n"):', "if False:", "test_runs.py"),
    (
        "runs.py",
        'if record["step"] > last_step:',
        'if record["step"] >= last_step:',
        "test_runs.py",
    ),
    (
        "runs.py",
        "filelock.FileLock(path)",
        'filelock.FileLock(f"{path}{os.getpid()}")',
        "test_runs.py",
    ),
    ("runs.py", 'if not config["resume"]:', "if False:", "test_runs.py"),
    ("runs.py", "(saved.keys() | config.keys())", "(saved.keys() & config.keys())", "test_runs.py"),
    ("runs.py", 'if saved.get("steps", 0) > config["steps"]:', "if False:", "test_runs.py"),
    ("runs.py", "write)\n    remove_older_checkpoints(folder)", "write)", "test_runs.py"),
    (
        "runs.py",
        "sorted(_checkpoints(folder), key=step_of)",
        "sorted(_checkpoints(folder))",
        "test_runs.py",
    ),
    (
        "runs.py",
        "max(_checkpoints(folder), key=step_of,",
        "max(_checkpoints(folder),",
        "test_runs.py",
    ),
    ("runs.py", 're.fullmatch(r"\\d+", path', 're.match(r"\\d+", path', "test_runs.py"),
    ("runs.py", 'torch.set_rng_state(state["rng"])', "pass", "test_runs.py"),
    (
        "runs.py",
        "except Exception as error:  # of many kinds: empty",
        "except EOFError as error:  # empty",
        "test_runs.py",
    ),
    ("runs.py", "failed.append(name)", "pass", "test_runs.py"),
    (
        "runs.py",
        "except (Exception, SystemExit) as error:",
        "except Exception as error:",
        "test_runs.py",
    ),
    ("runs.py", '_cause(error) if error else ""', '""', "test_runs.py"),
    (
        "runs.py",
        "threading.Thread(target=_end_with_parent, daemon=True).start()",
        "pass",
        "test_runs.py",
    ),
    ("runs.py", ".ru_maxrss * 1024", ".ru_maxrss", "test_runs.py"),
    ("runs.py", "if unknown:", "if False:", "test_train.py"),
    ("runs.py", "allow_abbrev=False", "allow_abbrev=True", "test_train.py"),
    ("runs.py", "sys.exit(130)", "sys.exit(0)", "test_runs.py"),
    # ------------------------------------------------------------ reward.py
    ("reward.py", "if opened > start:", "if opened >= 0:", "test_reward.py"),
    ("reward.py", "if len(text) > 200:", "if len(text) > 10**9:", "test_reward.py"),
    ("reward.py", "for _ in range(2):", "for _ in range(1):", "test_reward.py"),
    ("reward.py", "0*([0-9]{1,3})", "0*([0-9]{1,4})", "test_reward.py"),
    ("reward.py", "if denominator == 0:", "if False:", "test_reward.py"),
    ("reward.py", "if whole and not 0 <= numerator < denominator:", "if False:", "test_reward.py"),
    ("reward.py", "lines[-1].strip", "lines[0].strip", "test_reward.py"),
    ("reward.py", "if expected is None:", "if False:", "test_reward.py"),
    (  # what is no number goes to the library
        "reward.py",
        "return number(given) == expected",
        "return number(given) == expected or (answer, given)",
        "test_reward.py",
    ),
    (
        "reward.py",
        "not skipped and grade_one(response, answer)",
        "grade_one(response, answer)",
        "test_reward.py",
    ),
    ("reward.py", "skip, strict=True)", "skip)", "test_reward.py"),
    (  # a fork that was killed is right
        "reward.py",
        "[statuses[pair] == 0 for",
        "[statuses[pair] != 256 for",
        "test_reward.py",
    ),
    ("reward.py", 'if not find_spec("math_verify"):', "if False:", "test_reward.py"),
    ("reward.py", '.bind("response", "answer")', "", "test_reward.py"),
    (
        "reward.py",
        "except (Exception, SystemExit) as error:  #",
        "except Exception as error:  #",
        "test_reward.py",
    ),
    ("reward.py", "0 <= float(given) <= 1:", "0 <= float(given):", "test_reward.py"),
    (
        "reward.py",
        """    except (Exception, SystemExit) as error:
        raise ValueError(
            f"reward: {place}""",
        """    except Exception as error:
        raise ValueError(
            f"reward: {place}""",
        "test_reward.py",
    ),
    ("reward.py", "if not (1 <= k <= samples and", "if not (1 <= k and", "test_reward.py"),
    (  # biased
        "reward.py",
        "math.comb(samples - correct, k) / math.comb(samples, k)",
        "(1 - correct / samples) ** k",
        "test_reward.py",
    ),
    # ------------------------------------------------------------ data.py
    ("data.py", "if not name or Path(data).exists():", "if not name:", "test_data.py"),
    ("data.py", "glob.escape(source)", "source", "test_data.py"),
    ("data.py", 'if not configuration and "main" in', 'if False and "main" in', "test_data.py"),
    ("data.py", "if value is not None:", "if value:", "test_data.py"),
    (
        "data.py",
        'text.rpartition("####")[2]',
        'text.split("####")[min(1, text.count("####"))]',
        "test_data.py",
    ),
    ("data.py", "if value != value:", "if False:", "test_data.py"),
    ("data.py", "if not reason and key in problems:", "if False:", "test_data.py"),
    ("data.py", "if not prompt or is_blank:", "if not prompt:", "test_data.py"),
    (
        "data.py",
        "MAX_ANSWER_CHARACTERS and not own_grader:",
        "MAX_ANSWER_CHARACTERS:",
        "test_data.py",
    ),
    ("data.py", "add_generation_prompt=True", "add_generation_prompt=False", "test_data.py"),
    ("data.py", "if len(messages) > 1:", "if False:", "test_data.py"),
    (
        "data.py",
        "add_special_tokens=not tokenizer.chat_template",
        "add_special_tokens=True",
        "test_data.py",
    ),
    (
        "data.py",
        "if len(ids) <= max_prompt_tokens:",
        "if len(ids) < max_prompt_tokens:",
        "test_data.py",
    ),
    ("data.py", "if not chosen or position == 0:", "if not chosen:", "test_data.py"),
    ("data.py", 'random.Random(f"{seed}/{epoch}")', 'random.Random(f"{seed}")', "test_data.py"),
    (
        "data.py",
        "Task(train, held_out, countdown.grade)",
        "Task(train + held_out, held_out, countdown.grade)",
        "test_data.py",
    ),
    ("data.py", "room -= max(options.partial_budget - 1, 0)", "pass", "test_data.py"),
    (
        "data.py",
        "if largest_token >= vocabulary:",
        "if largest_token > vocabulary:",
        "test_data.py",
    ),
    ("data.py", "if len(problems) < wanted:", "if False:", "test_data.py"),
    (
        "data.py",
        "Task(problems[options.held_out :], held_out",
        "Task(problems, held_out",
        "test_data.py",
    ),
    ("data.py", "or sys.maxsize", "or 2048", "test_data.py"),
    # ------------------------------------------------------------ neighbours/losses.py
    (
        "neighbours/losses.py",
        "return -tokens.ratio.detach() *",
        "return -tokens.ratio *",
        "test_neighbours.py",
    ),
    (
        "neighbours/losses.py",
        "if_negative = torch.where(ratio < low, low, ratio)",
        "if_negative = torch.where(ratio > high, high, ratio)",
        "test_neighbours.py",
    ),
    (
        "neighbours/losses.py",
        "torch.where(tokens.advantages < 0, capped,",
        "torch.where(tokens.advantages > 0, capped,",
        "test_neighbours.py",
    ),
    (
        "neighbours/losses.py",
        ".detach().clamp(max=cap)\n    return -weight * tokens.advantages * tokens.log_probs\n\n",
        ".clamp(max=cap)\n    return -weight * tokens.advantages * tokens.log_probs\n\n",
        "test_neighbours.py",
    ),
    (
        "neighbours/losses.py",
        "advantages, mask, cap=cap)",
        "advantages, mask)",
        "test_neighbours.py",
    ),
    ("neighbours/losses.py", "> 0, 1.0, tapered)", "> 0, tapered, 1.0)", "test_neighbours.py"),
    (
        "neighbours/losses.py",
        "<= high, tokens.ratio >= low)",
        "<= high, tokens.ratio <= high)",
        "test_neighbours.py",
    ),
    (
        "neighbours/losses.py",
        "(tokens.advantages + shift)",
        "(tokens.advantages - shift)",
        "test_neighbours.py",
    ),
    ("neighbours/losses.py", "tau / 2 * tokens", "tau * tokens", "test_neighbours.py"),
    (
        "neighbours/losses.py",
        "moved <= delta, moved >= -delta",
        "moved.abs() <= delta, moved.abs() <= delta",
        "test_neighbours.py",
    ),
    ("neighbours/losses.py", "return -4 / tau * gate", "return -4 * gate", "test_neighbours.py"),
    (
        "neighbours/losses.py",
        "length = tokens.inside.sum(1, keepdim=True)",
        "length = torch.ones_like(tokens.inside).sum(1, keepdim=True)",
        "test_neighbours.py",
    ),
    ("neighbours/losses.py", "/ 2).clamp(max=high_max)", "/ 2)", "test_neighbours.py"),
    ("neighbours/losses.py", "beta_low * low, ratio)", "low, ratio)", "test_neighbours.py"),
    ("neighbours/losses.py", "(1 - alpha) * tokens", "alpha * tokens", "test_neighbours.py"),
    (  # tokens outside the mask in the mean
        "neighbours/losses.py",
        "in_h = log_ratio * tokens.advantages > 0",
        "in_h = log_ratio * tokens.advantages >= 0",
        "test_neighbours.py",
    ),
    ("neighbours/losses.py", "return weight * _clip(", "return _clip(", "test_neighbours.py"),
    ("neighbours/losses.py", "(1 - 1 / age)", "(1 / age)", "test_neighbours.py"),
    (
        "neighbours/losses.py",
        "torch.where(kept, losses, losses.detach())",
        "losses * kept",
        "test_neighbours.py",
    ),
    (
        "neighbours/losses.py",
        "start_ratio + epsilon)",
        "start_ratio * (1 + epsilon))",
        "test_neighbours.py",
    ),
    (
        "neighbours/losses.py",
        "tensor.masked_fill(~inside, 0).float()",
        "tensor.float() * inside",
        "test_neighbours.py",
    ),
    (
        "neighbours/losses.py",
        "_fill(tensor.detach(), self.inside)",
        "_fill(tensor, self.inside)",
        "test_neighbours.py",
    ),
    (
        "neighbours/losses.py",
        "if not (0 <= low < high and high >= 1):",
        "if False:",
        "test_neighbours.py",
    ),
    # ------------------------------------------------------------ eval_aime.py
    ("eval_aime.py", "if not least <= value <= most:", "if value > most:", "test_eval_aime.py"),
    (
        "eval_aime.py",
        "if options.data else PROBLEMS_OF_A_YEAR",
        "if True else 0",
        "test_eval_aime.py",
    ),
    (
        "eval_aime.py",
        'if options.grader == "aime" and reward',
        "if False and reward",
        "test_eval_aime.py",
    ),
    ("eval_aime.py", "if too_long:", "if False:", "test_eval_aime.py"),
    ("eval_aime.py", "return str(value)", "return text.strip()", "test_eval_aime.py"),
    ("eval_aime.py", "temperature=options.temperature,", "", "test_eval_aime.py"),
    (
        "eval_aime.py",
        "None if truncated[row] else final_answer",
        "final_answer",
        "test_eval_aime.py",
    ),
    (
        "eval_aime.py",
        "texts, golds, truncated)",
        "texts, golds, [False] * len(texts))",
        "test_eval_aime.py",
    ),
    ("eval_aime.py", "if all((question.set", "if any((question.set", "test_eval_aime.py"),
    (  # every sample of a problem the same
        "eval_aime.py",
        "{options.seed}/{index}/{first}",
        "{options.seed}/{first}",
        "test_eval_aime.py",
    ),
    (
        "eval_aime.py",
        "if not is_asked or sample.key() in samples:",
        "if not is_asked:",
        "test_eval_aime.py",
    ),
    ("eval_aime.py", "os.truncate(path, whole_lines)", "pass", "test_eval_aime.py"),
    (
        "eval_aime.py",
        "for parameter in model.parameters()]",
        "for parameter in [next(model.parameters())]]",
        "test_eval_aime.py",
    ),
    (
        "eval_aime.py",
        "saved.keys() | settings.keys()",
        "saved.keys() & settings.keys()",
        "test_eval_aime.py",
    ),
    ("eval_aime.py", " if sample.answer is not None]", "]", "test_eval_aime.py"),
    (
        "eval_aime.py",
        "len(winners & right) / len(winners)",
        "float(bool(winners & right))",
        "test_eval_aime.py",
    ),
    ("eval_aime.py", "return 0.0, 1.0", "return means[0], means[0]", "test_eval_aime.py"),
    (
        "eval_aime.py",
        "sample.answer is None and not sample.truncated",
        "sample.answer is None",
        "test_eval_aime.py",
    ),
    ("eval_aime.py", " if sample.index < options.samples]", "]", "test_eval_aime.py"),
    # ------------------------------------------------------------ plot.py
    (
        "plot.py",
        'groups.quantile(0.95) if metric == "grad_norm" else groups.mean()',
        "groups.mean()",
        "test_plot.py",
    ),
    ("plot.py", "stats.t.ppf(0.975,", "stats.t.ppf(0.95,", "test_plot.py"),
    ("plot.py", '.transform("max") - LAST_STEPS]', '.transform("max")]', "test_plot.py"),
]


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
    numbered = dict(enumerate(MUTANTS, 1))
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
