"""Evaluate a causal language model on AIME 2024 and 2025: avg@k with an interval, pass@k, maj@k. Can be killed and resumed.

    python eval_aime.py --model Qwen/Qwen2.5-Math-7B-Instruct --years 2024 2025 --samples 16
    python eval_aime.py --model runs/default/bapo@8-start0-seed0/model --data held_out.jsonl --grader countdown

output_dir gets samples.jsonl, a line per sample as soon as it is drawn, and summary.json. The same command again continues a
killed run; a larger --samples adds to what is there; any other change is refused. Conventions: docs/aime.md.
"""

import gc
import hashlib
import json
import random
import statistics
import sys
import time
from collections import defaultdict
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import datasets
import numpy as np
import scipy.stats
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

import countdown
import reward
import support.files
import support.options
import support.workers
from rollout import generate, response_texts
from support.data import INSTRUCTION, Problem, load_rows, prompt_text, prompt_token_ids, read_problems
from support.models import load_pretrained
from support.options import option
from support.workers import say

SOURCES = {2024: ("HuggingFaceH4/aime_2024", "train"), 2025: ("math-ai/aime25", "test")}  # year -> hub repository, split
PAPER = """The paper's Table 1, mean over 16 samples in %, AIME 2024 / 2025, for orientation:
BP-Math-7B   SFT 66.9 / 59.0   GRPO 69.2 / 59.2   BAPO 70.8 / 62.5
BP-Math-32B  SFT 84.4 / 78.1   GRPO 84.6 / 78.8   BAPO 87.1 / 80.0"""
# Options that may change when a run is continued: they say how much to draw and where, not from which distribution.
MAY_CHANGE = {"samples", "batch_tokens", "device", "output_dir"}


@dataclass
class ProblemOptions:
    _argument_group_name = "problems"
    years: list[int] = option([2024, 2025], "AIME of which years; unused with --data")
    data: str = option("", "instead of years: a .jsonl, .json or .parquet file, or a hub data set, with problems and answers")
    split: str = option("test", "SPLIT or CONFIGURATION/SPLIT of a hub data set")
    fields: list[str] = option([], "names of the problem's and the answer's field, as for train.py")
    grader: str = option("aime", "aime (boxed integers 0-999), math (as train.py --data), or countdown (problems as they are)")
    limit: int = option(0, "only the first problems of each set, for a quick look; 0: all")
    instruction: str = option(INSTRUCTION, "added to problems that are text")
    system: str = option("", "system prompt, for tokenizers with a chat template")


@dataclass(kw_only=True)
class SamplingOptions:
    _argument_group_name = "model and sampling"
    model: str = field(metadata={"help": "hub id or local folder of a causal language model and its tokenizer"})
    samples: int = option(16, "k: responses per problem")
    temperature: float = option(0.6, "of sampling")
    top_p: float = option(0.95, "of sampling; 1: off")
    top_k: int = option(0, "of sampling; 0: off")
    max_new_tokens: int = option(32768, "length limit of a response; lowered to what the model's positions have room for")
    seed: int = option(0, "every batch is seeded with this, and the problem and index of its first sample")


@dataclass
class MachineOptions:
    _argument_group_name = "machine"
    device: str = option("auto", "auto, cpu, cuda, cuda:1, ...; bfloat16 on a GPU, float32 on a CPU")
    # Eight responses of full length to prompts of up to 2048 tokens, so that 30 problems are four batches.
    batch_tokens: int = option(8 * (32768 + 2048), "most (prompt + max_new_tokens) * responses that are drawn together")
    output_dir: str = option("runs/aime", "folder of samples.jsonl and summary.json")


@dataclass
class Options(ProblemOptions, SamplingOptions, MachineOptions):
    """All options. Raises ValueError for what makes no sense, naming the option."""

    def __post_init__(self):
        support.options.check_numbers(
            self, {1: "samples max_new_tokens batch_tokens", 0: "limit top_k"}, positive="temperature top_p"
        )
        if self.top_p > 1:
            raise ValueError(f"top_p must be at most 1, got {self.top_p}")
        if len(self.fields) not in (0, 2):
            raise ValueError(f"fields takes 0 or 2 values, got {self.fields}")
        if self.grader not in GRADERS:
            raise ValueError(f"grader must be one of {', '.join(GRADERS)}, got {self.grader!r}")
        if self.grader == "countdown" and (self.system or not self.data):
            raise ValueError("grader countdown needs --data FILE.jsonl, whose problems are used as they are, without --system")
        if not self.years or len(set(self.years)) < len(self.years) or not set(self.years) <= SOURCES.keys():
            raise ValueError(f"years must be different ones of {', '.join(map(str, SOURCES))}, got {self.years}")
        self.device, _ = support.options.resolve_device(self.device, "auto")


class Prompt(NamedTuple):
    """A problem as the model reads it."""

    set: str  # "2024", "2025", or the name of the file
    number: int  # among the problems of its set, from 0
    answer: str
    text: str  # all that the model is given
    ids: list[int]


# ---------------------------------------------------------------- graders
def aime_answer(response: str) -> str | None:
    """The last boxed answer, integers without leading zeros and LaTeX."""
    boxed = (reward.extract_boxed(response) or "").strip()
    integer = reward.aime_integer(boxed)
    return (boxed or None) if integer is None else str(integer)


def countdown_answer(response: str) -> str | None:
    """The last attempt, if it is one."""
    last = response.rpartition(";")[2]
    return last if countdown.ATTEMPT.fullmatch(last) else None


def math_answer(response: str) -> str | None:
    """The final answer, numbers in one notation."""
    answer = reward.final_answer(response)
    value = reward.number(answer or "")
    return answer if value is None else str(value)


# Name -> response to final answer (None: it gives none; equal ones vote together), and (response, gold answer) to right or not.
GRADERS = {
    "aime": (aime_answer, reward.grade_aime),
    "math": (math_answer, reward.grade_math),
    "countdown": (countdown_answer, countdown.grade),
}


# ---------------------------------------------------------------- problems
def load_sets(options: Options) -> dict[str, list[Problem]]:
    """Name -> problems: those of --data, or a set for each year; AIME answers become the digits of their integer. Says how
    many rows cannot be used, and why. ValueError for too few problems, or answers that the grader cannot compare."""
    sources, sets = {str(year): SOURCES[year] for year in options.years}, {}
    if options.data:
        sources = {Path(options.data).stem: (options.data, options.split)}
    for name, (source, split) in sources.items():
        rows = load_rows(source, split)
        problems, skipped = read_problems(rows, *options.fields)
        found = f"{len(rows)} rows, {len(problems)} used" + "".join(f", {n} {reason}" for reason, n in skipped.items())
        if not problems or not options.data and len(problems) != 30:
            raise ValueError(f"data: {source} must have {'' if options.data else '30 '}problems, found {found}")
        say(f"{name}: {found}")
        if options.grader == "aime":
            if wrong := [answer for _, answer in problems if reward.aime_integer(answer) is None]:
                raise ValueError(f"data: {source}: AIME answers are integers from 0 to 999, found {wrong[0][:100]!r}")
            problems = [Problem(prompt, str(reward.aime_integer(answer))) for prompt, answer in problems]
        if options.grader == "math" and any(reward.number(answer) is None for _, answer in problems):
            reward.import_math_verify()
        sets[name] = problems[: options.limit or None]
    return sets


def prompt_of(tokenizer, problem: str | list[dict], options: Options) -> tuple[str, list[int]]:
    """As text and token ids: Countdown problems as they are; others with the instruction, in the chat template."""
    if options.grader == "countdown":
        return problem, tokenizer(problem)["input_ids"]
    text = prompt_text(tokenizer, problem, options.instruction, options.system)
    return text, prompt_token_ids(tokenizer, text)


# ---------------------------------------------------------------- model
def fingerprint(model) -> str:
    """Of the first values of every parameter: another checkpoint in the same folder is another model."""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        digest.update(name.encode() + parameter.detach().flatten()[:16].double().cpu().numpy().tobytes())
    return digest.hexdigest()[:16]


def draw(model, tokenizer, prompts: list[list[int]], options: Options) -> list[tuple[str, int, bool]] | None:
    """A response to each prompt: its text, its number of tokens (EOS included), and whether it was cut off. None if together
    they run out of memory, ValueError if a single one does."""
    sampling = {name: getattr(options, name) for name in ("max_new_tokens", "temperature", "top_p", "top_k")}
    try:
        rollouts = generate(model, tokenizer, prompts, **sampling, batch_tokens=sys.maxsize)  # sample_all has cut the batch
    except (torch.OutOfMemoryError, MemoryError) as error:
        if len(prompts) == 1:
            raise ValueError("max_new_tokens: a single response runs out of memory; lower it") from error
        return None
    return list(zip(response_texts(tokenizer, rollouts), rollouts.mask.sum(1).tolist(), rollouts.truncated.tolist()))


# ---------------------------------------------------------------- samples
def sample_all(
    model, tokenizer, sets: dict[str, list[Prompt]], options: Options, done: dict, file: support.files.Lines
) -> None:
    """Draw and write every sample that is not in `done`, (set, number, index) -> record, and add it there. The problems of one
    set and index are halved until they fit batch_tokens, so samples do not depend on where an earlier run was killed."""
    (final_answer, is_right), budget = GRADERS[options.grader], options.batch_tokens
    queue = [(prompts, index) for index in range(options.samples) for prompts in sets.values()][::-1]
    with support.workers.Progress(options.samples * sum(map(len, sets.values())), "samples", len(done)) as progress:
        while queue:
            batch, index = queue.pop()
            missing = [i for i, prompt in enumerate(batch) if (prompt.set, prompt.number, index) not in done]
            if not missing:
                continue
            tokens = len(batch) * (max(len(prompt.ids) for prompt in batch) + options.max_new_tokens)
            if tokens > budget and len(batch) > 1:
                middle = len(batch) // 2
                queue += [(batch[middle:], index), (batch[:middle], index)]
                continue
            # All of the batch again, even if an earlier run was killed while writing it: a part would get other samples.
            first, started = batch[0], time.perf_counter()
            torch.manual_seed(random.Random(f"{options.seed}/{first.set}/{first.number}/{index}").getrandbits(63))
            responses = draw(model, tokenizer, [prompt.ids for prompt in batch], options)
            if responses is None:
                gc.collect()  # here, without the error that kept the tensors alive
                torch.cuda.empty_cache()
                budget = tokens - 1  # a batch of this size is split from now on
                queue.append((batch, index))
                say(f"out of memory with {len(batch)} responses at a time: fewer from now on, as with --batch_tokens {budget}")
                continue
            seconds = (time.perf_counter() - started) / len(batch)
            prompts, (texts, lengths, truncated) = [batch[i] for i in missing], zip(*(responses[i] for i in missing))
            correct = reward.grade_all(is_right, texts, [prompt.answer for prompt in prompts], truncated)
            for prompt, text, length, cut_off, right in zip(prompts, texts, lengths, truncated, correct):
                record = {"set": prompt.set, "problem": prompt.number, "index": index, "prompt": prompt.text, "response": text}
                record |= {"answer": None if cut_off else final_answer(text), "correct": right, "tokens": length}
                record |= {"truncated": cut_off, "seconds": seconds, "memory_gib": peak_memory(options.device)}
                file.write(record)
                done[prompt.set, prompt.number, index] = record
            progress.update(len(missing), f"{statistics.fmean(r['correct'] for r in done.values()):.3f} right")


def peak_memory(device: str) -> float:
    """Of this process so far, in GiB: of the GPU's allocator, or resident on a CPU."""
    if device != "cpu":
        return torch.cuda.max_memory_allocated(device) / 2**30
    import resource  # not on Windows

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**30 if sys.platform == "darwin" else 2**20)


# ---------------------------------------------------------------- summary
def majority(records: list[dict]) -> float:
    """maj@k of one problem: whether the most frequent answer is right; the share of the tied ones that are."""
    tied = set(statistics.multimode(r["answer"] for r in records if r["answer"] is not None))
    right = {r["answer"] for r in records if r["correct"]}
    return len(tied & right) / len(tied) if tied else 0.0


def interval(means: list[float]) -> list[float] | None:
    """95 % percentile bootstrap interval of the mean over problems; None for a single problem."""
    if len(means) < 2:
        return None
    options = {"n_resamples": 10_000, "batch": 1000, "method": "percentile", "rng": np.random.default_rng(0)}
    return [float(bound) for bound in scipy.stats.bootstrap((means,), np.mean, **options).confidence_interval]


def summarize(records: list[dict]) -> dict:
    """The results of one set, from its samples alone; shares from 0 to 1. Every problem weighs the same."""
    problems = defaultdict(list)
    for record in records:
        problems[record["problem"]].append(record)
    counts = [(len(group), sum(r["correct"] for r in group)) for group in problems.values()]
    k = min(samples for samples, _ in counts)
    means = [correct / samples for samples, correct in counts]
    return {
        "problems": len(problems),
        "samples": k,
        f"avg@{k}": statistics.fmean(means),
        "interval_95": interval(means),
        "pass@k": {str(n): statistics.fmean(reward.pass_at_k(*count, n) for count in counts) for n in range(1, k + 1)},
        f"maj@{k}": statistics.fmean(majority(group) for group in problems.values()),
        "truncated": statistics.fmean(r["truncated"] for r in records),
        "answerless": statistics.fmean(r["answer"] is None and not r["truncated"] for r in records),
        "mean_tokens": statistics.fmean(r["tokens"] for r in records),
        "tokens_per_second": sum(r["tokens"] for r in records) / sum(r["seconds"] for r in records),
        "peak_memory_gib": max(r["memory_gib"] for r in records),
    }


def report(results: dict[str, dict]) -> list[str]:
    """Lines for the terminal: a table, pass@k, and the paper's numbers beside AIME years."""
    k = next(iter(results.values()))["samples"]
    lines = [f"| set | problems | avg@{k} (95 %) | maj@{k} | truncated | no answer | tokens | tokens/s | peak GiB |"]
    lines.append("| --- " * 9 + "|")
    for name, r in results.items():
        bounds = " ({:.3f} to {:.3f})".format(*r["interval_95"]) if r["interval_95"] else ""
        others = "{truncated:.3f} | {answerless:.3f} | {mean_tokens:.1f} | {tokens_per_second:.0f} | {peak_memory_gib:.2f}"
        accuracy = f"{r[f'avg@{k}']:.3f}{bounds} | {r[f'maj@{k}']:.3f}"
        lines.append(f"| {name} | {r['problems']} | {accuracy} | {others.format(**r)} |")
    lines += [f"{name}: pass@1...pass@{k}: {' '.join(f'{p:.3f}' for p in r['pass@k'].values())}" for name, r in results.items()]
    return lines + (PAPER.splitlines() if set(results) & set(map(str, SOURCES)) else [])


# ---------------------------------------------------------------- command
def prepare(options: Options, output: Path) -> tuple:
    """Model, tokenizer, prompts, and the settings that decide the samples. ValueError if they are not those of `output`."""
    sets = load_sets(options)  # first: it is quick to fail
    dtype = getattr(torch, support.options.resolve_device(options.device, "auto")[1])
    model = load_pretrained(AutoModelForCausalLM, options.model, dtype=dtype).to(options.device).eval()
    tokenizer = load_pretrained(AutoTokenizer, options.model)
    sets = {
        name: [Prompt(name, i, answer, *prompt_of(tokenizer, text, options)) for i, (text, answer) in enumerate(problems)]
        for name, problems in sets.items()
    }
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None) or sys.maxsize
    room = positions - max(len(prompt.ids) for prompts in sets.values() for prompt in prompts)
    if room < 1:
        raise ValueError(f"model: a prompt has {positions - room} tokens, its positions end at {positions}; use another model")
    if options.max_new_tokens > room:
        say(f"max_new_tokens lowered from {options.max_new_tokens} to {room}: the model has {positions} positions")
        options.max_new_tokens = room
    settings = {name: value for name, value in asdict(options).items() if name not in MAY_CHANGE}
    settings |= {"dtype": str(model.dtype), "weights": fingerprint(model)}
    settings["prompts"] = hashlib.sha256(json.dumps(sets).encode()).hexdigest()[:16]
    path = output / "summary.json"
    if not path.exists() and (output / "samples.jsonl").exists():
        raise ValueError(f"{path} is gone, which says how the samples there were drawn: choose another --output_dir")
    if changed := support.files.differences(json.loads(path.read_text())["settings"] if path.exists() else settings, settings):
        raise ValueError(f"{output} was made with other settings ({changed}): use the old ones, or another --output_dir")
    return model, tokenizer, sets, settings


def main(arguments: list[str] | None = None) -> int:
    """The command line. Returns the exit status, 0."""
    options = Options(**support.options.parse(Options, arguments, __doc__))
    datasets.disable_progress_bars()
    transformers.utils.logging.disable_progress_bar()
    output, path = Path(options.output_dir), Path(options.output_dir) / "samples.jsonl"
    output.mkdir(parents=True, exist_ok=True)
    with support.files.lock(output / "lock"):
        model, tokenizer, sets, settings = prepare(options, output)
        # A killed run may leave half a last line, and there may be more samples than are wanted.
        records = support.files.read_lines(path, unfinished=True) if path.exists() else []
        size = path.read_bytes().rfind(b"\n") + 1 if records else 0
        done = {(r["set"], r["problem"], r["index"]): r for r in records}
        if len(done) < len(records):
            raise ValueError(f"{path} has samples twice: two processes wrote it; choose another --output_dir")
        done = {key: record for key, record in done.items() if key[2] < options.samples}
        versions = {name: version(name) for name in ("torch", "transformers", "datasets", "scipy", "numpy")}
        summary = {"settings": settings, "options": asdict(options), "versions": {"python": sys.version.split()[0]} | versions}
        summary["device"] = "cpu" if options.device == "cpu" else torch.cuda.get_device_name(options.device)
        support.files.write_json(output / "summary.json", summary | {"results": None})
        sample_all(model, tokenizer, sets, options, done, support.files.Lines(path, size))
        results = {name: summarize([r for key, r in done.items() if key[0] == name]) for name in sets}
        support.files.write_json(output / "summary.json", summary | {"results": results})
    say("\n".join([*report(results), f"{path} and {output / 'summary.json'} written"]))
    return 0


if __name__ == "__main__":
    support.workers.command(
        "eval_aime.py", main, "Interrupted. The same command continues: samples so far are in its --output_dir"
    )
