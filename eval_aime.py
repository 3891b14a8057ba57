"""Evaluate a causal language model on AIME 2024 and 2025: avg@k with an interval, pass@k, maj@k.

    python eval_aime.py --model Qwen/Qwen2.5-Math-7B-Instruct --years 2024 2025 --samples 16
    python eval_aime.py --model FOLDER --data held_out.jsonl --grader countdown

output_dir gets samples.jsonl, a line per sample as soon as it is drawn, and summary.json. It can be
killed: the same command again continues. A larger --samples adds to what is there; any other change
is refused. Conventions: docs/aime.md.
"""

import dataclasses
import gc
import hashlib
import json
import random
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

import numpy as np
import scipy.stats
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

import countdown
import reward
from rollout import generate, response_texts
from support.data import (
    INSTRUCTION,
    Problem,
    load_rows,
    name_and_split,
    positions_of,
    prompt_text,
    prompt_token_ids,
    read_problems,
    reasons,
)
from support.files import Lines, differences, lock, read_lines, write_json
from support.models import check_finite, load_pretrained
from support.options import check_limits, option, parse, resolve_device
from support.workers import Progress, command, say

# Year -> data set of the hub, split.
SOURCES = {2024: ("HuggingFaceH4/aime_2024", "train"), 2025: ("math-ai/aime25", "test")}
PROBLEMS_OF_A_YEAR = 30
PAPER = """The paper's Table 1, mean over 16 samples in %, AIME 2024 / 2025, for orientation:
BP-Math-7B   SFT 66.9 / 59.0   GRPO 69.2 / 59.2   BAPO 70.8 / 62.5
BP-Math-32B  SFT 84.4 / 78.1   GRPO 84.6 / 78.8   BAPO 87.1 / 80.0"""
# Options that may change when a run is continued: they say how much to draw and where, not from
# which distribution.
MAY_CHANGE = {"samples", "batch_tokens", "device", "output_dir"}
PACKAGES = ("torch", "transformers", "datasets", "scipy", "numpy")  # versions in summary.json


# ---------------------------------------------------------------- options
@dataclass
class ProblemOptions:
    """Which problems, how they are asked, and how answers are graded."""

    _argument_group_name = "problems"
    years: list[int] = option([2024, 2025], "AIME of which years; unused with --data")
    data: str = option(
        "",
        "instead of years: a .jsonl, .json or .parquet file, or a data set of the hub, whose split "
        "test is taken unless it is given as NAME:SPLIT or NAME:CONFIGURATION/SPLIT",
    )
    fields: list[str] = option(
        [], "names of the problem's and the answer's field, as for train.py", length=(0, 2)
    )
    grader: str = option(
        "aime",
        "aime (boxed integers 0-999), math (as train.py --data), or countdown (problems as they "
        "are)",
    )
    limit: int = option(
        0, "only the first problems of each set, for a quick look; 0: all", at_least=0
    )
    instruction: str = option(INSTRUCTION, "added to problems that are text")
    system: str = option("", "system prompt, for tokenizers with a chat template")


@dataclass(kw_only=True)
class SamplingOptions:
    """Which model, and how its responses are drawn."""

    _argument_group_name = "model and sampling"
    model: str = option(
        dataclasses.MISSING, "hub id or local folder of a causal language model and its tokenizer"
    )
    samples: int = option(16, "k: responses per problem", at_least=1)
    temperature: float = option(0.6, "of sampling", positive=True)
    top_p: float = option(0.95, "of sampling; 1: off", positive=True)
    top_k: int = option(0, "of sampling; 0: off", at_least=0)
    max_new_tokens: int = option(
        32768,
        "length limit of a response; lowered to what the model's positions have room for",
        at_least=1,
    )
    seed: int = option(
        0, "every batch is seeded with this, and the problem and index of its first sample"
    )


@dataclass
class MachineOptions:
    """Where it runs, how much is drawn at a time, and where the responses are kept."""

    _argument_group_name = "machine"
    device: str = option(
        "auto", "auto, cpu, cuda, cuda:1, ...; bfloat16 on a GPU, float32 on a CPU"
    )
    # Eight responses of full length to prompts of up to 2048 tokens, so that 30 problems are four
    # batches.
    batch_tokens: int = option(
        8 * (32768 + 2048),
        "most (prompt + max_new_tokens) * responses that are drawn together",
        at_least=1,
    )
    output_dir: str = option("runs/aime", "folder of samples.jsonl and summary.json")


@dataclass
class Options(ProblemOptions, SamplingOptions, MachineOptions):
    """All options. Raises ValueError for what makes no sense, naming the option."""

    def __post_init__(self):
        check_limits(self)
        if self.top_p > 1:
            raise ValueError(f"top_p must be at most 1, got {self.top_p}")
        if self.grader not in GRADERS:
            known = ", ".join(GRADERS)
            raise ValueError(f"grader must be one of {known}, got {self.grader!r}")
        if self.grader == "countdown" and (self.system or not self.data):
            raise ValueError(
                "grader countdown needs --data FILE.jsonl, whose problems are used as they are, "
                "without --system"
            )
        has_repeats = len(set(self.years)) < len(self.years)
        unknown = set(self.years) - SOURCES.keys()
        if not self.years or has_repeats or unknown:
            known = ", ".join(str(year) for year in SOURCES)
            raise ValueError(f"years must be different ones of {known}, got {self.years}")
        self.device, self.precision = resolve_device(self.device, "auto")

    def sources(self) -> dict[str, tuple[str, str]]:
        """Name of a set -> where its rows are, and their split."""
        if self.data:
            name, split = name_and_split(self.data, default="test")
            return {Path(name).stem: (name, split)}
        return {str(year): SOURCES[year] for year in self.years}


# ---------------------------------------------------------------- graders
class Grader(NamedTuple):
    """How responses are read and graded."""

    # Response -> its final answer, None without one; equal answers vote together.
    final_answer: Callable[[str], str | None]
    is_right: Callable[[str, str], bool]  # of response and gold answer


def aime_answer(response: str) -> str | None:
    """The last boxed answer: an integer without leading zeros, or LaTeX."""
    boxed = (reward.extract_boxed(response) or "").strip()
    integer = reward.aime_integer(boxed)
    if integer is not None:
        return str(integer)
    return boxed or None


def countdown_answer(response: str) -> str | None:
    """The last attempt, if it is one."""
    last = response.rpartition(";")[2]
    return last if countdown.ATTEMPT.fullmatch(last) else None


def math_answer(response: str) -> str | None:
    """The final answer, numbers in one notation."""
    answer = reward.final_answer(response)
    value = reward.number(answer or "")
    return answer if value is None else str(value)


GRADERS = {
    "aime": Grader(aime_answer, reward.grade_aime),
    "math": Grader(math_answer, reward.grade_math),
    "countdown": Grader(countdown_answer, countdown.grade),
}


# ---------------------------------------------------------------- problems
class Prompt(NamedTuple):
    """A problem as the model reads it."""

    set: str  # "2024", "2025", or the name of the file
    number: int  # among the problems of its set, from 0
    answer: str
    text: str  # all that the model is given
    ids: list[int]  # its tokens


def load_sets(options: Options) -> dict[str, list[Problem]]:
    """Name -> problems: those of --data, or a set for each year.

    Says how many rows cannot be used, and why. Raises ValueError for too few problems, and for
    answers that the grader cannot compare.
    """
    sets = {}
    for name, (source, split) in options.sources().items():
        rows = load_rows(source, split)
        problems, skipped = read_problems(rows, *options.fields)
        counts = ", ".join([f"{len(rows)} rows", f"{len(problems)} used", *reasons(skipped)])
        if not problems:
            raise ValueError(f"data: {source} must have problems, found {counts}")
        if not options.data and len(problems) != PROBLEMS_OF_A_YEAR:
            wanted = f"{PROBLEMS_OF_A_YEAR} problems"
            raise ValueError(f"data: {source} must have {wanted}, found {counts}")
        say(f"{name}: {counts}")
        if options.grader == "aime":
            problems = _with_integers(problems, source)
        if options.grader == "math" and any(reward.number(p.answer) is None for p in problems):
            reward.import_math_verify()
        sets[name] = problems[: options.limit or None]
    return sets


def _with_integers(problems: list[Problem], source: str) -> list[Problem]:
    """The same problems, their answers the digits of an AIME integer; ValueError for any other."""
    converted = []
    for prompt, answer in problems:
        integer = reward.aime_integer(answer)
        if integer is None:
            raise ValueError(
                f"data: {source}: AIME answers are integers from 0 to 999, found {answer[:100]!r}"
            )
        converted.append(Problem(prompt, str(integer)))
    return converted


def prompt_of(tokenizer, problem: str | list[dict], options: Options) -> tuple[str, list[int]]:
    """A problem as text and token ids, with the instruction and in the chat template.

    Countdown problems are given as they are.
    """
    if options.grader == "countdown":
        return problem, tokenizer(problem)["input_ids"]
    text = prompt_text(tokenizer, problem, options.instruction, options.system)
    return text, prompt_token_ids(tokenizer, text)


def make_prompts(
    tokenizer, sets: dict[str, list[Problem]], options: Options
) -> dict[str, list[Prompt]]:
    """All problems of all sets as the model reads them."""
    prompts = {}
    for name, problems in sets.items():
        prompts[name] = []
        for number, problem in enumerate(problems):
            text, ids = prompt_of(tokenizer, problem.prompt, options)
            prompts[name].append(Prompt(name, number, problem.answer, text, ids))
    return prompts


# ---------------------------------------------------------------- samples
class Response(NamedTuple):
    """What the model writes."""

    text: str
    tokens: int  # EOS included
    truncated: bool  # it was cut off at max_new_tokens


def draw(model, tokenizer, prompts: list[list[int]], options: Options) -> list[Response] | None:
    """A response to each prompt; None if together they run out of memory.

    Raises ValueError if a single one runs out of memory.
    """
    try:
        rollouts = generate(
            model,
            tokenizer,
            prompts,
            max_new_tokens=options.max_new_tokens,
            temperature=options.temperature,
            top_p=options.top_p,
            top_k=options.top_k,
            batch_tokens=sys.maxsize,  # sample_all has cut the batch
        )
    except (torch.OutOfMemoryError, MemoryError) as error:
        if len(prompts) == 1:
            raise ValueError(
                "max_new_tokens: a single response runs out of memory; lower it"
            ) from error
        return None
    texts = response_texts(tokenizer, rollouts)
    lengths = rollouts.mask.sum(1).tolist()
    truncated = rollouts.truncated.tolist()
    return [Response(*columns) for columns in zip(texts, lengths, truncated)]


def sample_all(
    model,
    tokenizer,
    sets: dict[str, list[Prompt]],
    options: Options,
    done: dict[tuple[str, int, int], dict],
    file: Lines,
) -> None:
    """Draw every sample that is not in `done`, write it to `file`, and add it to `done`.

    done: (set, number of the problem, index of the sample) -> record. The problems of one set and
    index are halved until they fit batch_tokens, so samples do not depend on where an earlier run
    was killed.
    """
    budget = options.batch_tokens
    # Batches still to be drawn, the next one last: prompts of one set, and the samples' index.
    queue: list[tuple[list[Prompt], int]] = []
    for index in range(options.samples):
        for prompts in sets.values():
            queue.append((prompts, index))
    queue.reverse()
    total = options.samples * sum(len(prompts) for prompts in sets.values())
    with Progress(total, "samples", len(done)) as progress:
        while queue:
            prompts, index = queue.pop()
            if all((prompt.set, prompt.number, index) in done for prompt in prompts):
                continue
            longest = max(len(prompt.ids) for prompt in prompts)
            tokens = len(prompts) * (longest + options.max_new_tokens)
            if tokens > budget and len(prompts) > 1:
                middle = len(prompts) // 2
                queue.append((prompts[middle:], index))
                queue.append((prompts[:middle], index))
                continue
            # The whole batch, even if an earlier run was killed while writing it: a part of it
            # would get other samples.
            started = time.perf_counter()
            torch.manual_seed(_seed_of_batch(options.seed, prompts[0], index))
            responses = draw(model, tokenizer, [prompt.ids for prompt in prompts], options)
            if responses is None:
                gc.collect()  # here, without the error that kept the tensors alive
                torch.cuda.empty_cache()
                budget = tokens - 1  # a batch of this size is halved from now on
                queue.append((prompts, index))
                say(
                    f"out of memory with {len(prompts)} responses at a time: fewer from now on, "
                    f"as with --batch_tokens {budget}"
                )
                continue
            seconds = (time.perf_counter() - started) / len(prompts)
            records = make_records(prompts, index, responses, seconds, options, done)
            for key, record in records.items():
                file.write(record)
                done[key] = record
            accuracy = statistics.fmean(record["correct"] for record in done.values())
            progress.update(len(records), f"{accuracy:.3f} right")


def _seed_of_batch(seed: int, first: Prompt, index: int) -> int:
    """The seed of the batch that begins with sample `index` of the prompt `first`."""
    return random.Random(f"{seed}/{first.set}/{first.number}/{index}").getrandbits(63)


def make_records(
    prompts: list[Prompt],
    index: int,
    responses: list[Response],
    seconds: float,
    options: Options,
    done: dict[tuple[str, int, int], dict],
) -> dict[tuple[str, int, int], dict]:
    """Lines of samples.jsonl by (set, number, index), graded, for what is not in `done`.

    seconds: that one response took.
    """
    grader = GRADERS[options.grader]
    new: list[tuple[Prompt, Response]] = []
    for prompt, response in zip(prompts, responses, strict=True):
        if (prompt.set, prompt.number, index) not in done:
            new.append((prompt, response))
    texts = [response.text for _, response in new]
    answers = [prompt.answer for prompt, _ in new]
    truncated = [response.truncated for _, response in new]
    correct = reward.grade_all(grader.is_right, texts, answers, truncated)
    memory = peak_memory(options.device)
    records = {}
    for (prompt, response), is_correct in zip(new, correct, strict=True):
        answer = None if response.truncated else grader.final_answer(response.text)
        records[prompt.set, prompt.number, index] = {
            "set": prompt.set,
            "problem": prompt.number,
            "index": index,
            "prompt": prompt.text,
            "response": response.text,
            "answer": answer,
            "correct": is_correct,
            "tokens": response.tokens,
            "truncated": response.truncated,
            "seconds": seconds,
            "memory_gib": memory,
        }
    return records


def peak_memory(device: str) -> float:
    """Of this process so far, in GiB: of the GPU's allocator, or resident on a CPU."""
    if device != "cpu":
        return torch.cuda.max_memory_allocated(device) / 2**30
    import resource  # not on Windows

    units_per_gib = 2**30 if sys.platform == "darwin" else 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / units_per_gib


# ---------------------------------------------------------------- summary
def majority(records: list[dict]) -> float:
    """maj@k of one problem: whether the most frequent answer is right.

    Of several most frequent answers: the share that is right. Without any answer: 0.
    """
    votes = [record["answer"] for record in records if record["answer"] is not None]
    winners = set(statistics.multimode(votes))
    right = {record["answer"] for record in records if record["correct"]}
    return len(winners & right) / len(winners) if winners else 0.0


def interval(means: list[float]) -> list[float] | None:
    """95 % percentile bootstrap interval of the mean over problems; None for a single problem."""
    if len(means) < 2:
        return None
    bootstrap = scipy.stats.bootstrap(
        (means,),
        np.mean,
        n_resamples=10_000,
        batch=1000,
        method="percentile",
        rng=np.random.default_rng(0),
    )
    low, high = bootstrap.confidence_interval
    return [float(low), float(high)]


def summarize(records: list[dict]) -> dict:
    """The results of one set, from its samples alone; shares from 0 to 1.

    Every problem weighs the same, whatever number of samples it has.
    """
    problems = defaultdict(list)
    for record in records:
        problems[record["problem"]].append(record)
    k = min(len(samples) for samples in problems.values())
    means = []
    votes = []
    pass_at = defaultdict(list)  # n -> pass@n of every problem
    for samples in problems.values():
        correct = sum(sample["correct"] for sample in samples)
        means.append(correct / len(samples))
        votes.append(majority(samples))
        for n in range(1, k + 1):
            pass_at[n].append(reward.pass_at_k(len(samples), correct, n))
    tokens = sum(record["tokens"] for record in records)
    seconds = sum(record["seconds"] for record in records)
    return {
        "problems": len(problems),
        "samples": k,
        f"avg@{k}": statistics.fmean(means),
        "interval_95": interval(means),
        "pass@k": {str(n): statistics.fmean(chances) for n, chances in pass_at.items()},
        f"maj@{k}": statistics.fmean(votes),
        "truncated": statistics.fmean(record["truncated"] for record in records),
        "answerless": statistics.fmean(_is_answerless(record) for record in records),
        "mean_tokens": tokens / len(records),
        "tokens_per_second": tokens / seconds,
        "peak_memory_gib": max(record["memory_gib"] for record in records),
    }


def _is_answerless(record: dict) -> bool:
    """Whether a response came to its end without an answer."""
    return record["answer"] is None and not record["truncated"]


def report(results: dict[str, dict]) -> list[str]:
    """Lines for the terminal: a table, pass@k, and the paper's numbers beside AIME years."""
    k = next(iter(results.values()))["samples"]
    lines = [
        f"| set | problems | avg@{k} (95 %) | maj@{k} | truncated | no answer | tokens | tokens/s "
        "| peak GiB |",
        "| --- " * 9 + "|",
    ]
    for name, result in results.items():
        average = f"{result[f'avg@{k}']:.3f}"
        if result["interval_95"]:
            low, high = result["interval_95"]
            average += f" ({low:.3f} to {high:.3f})"
        cells = [
            name,
            str(result["problems"]),
            average,
            f"{result[f'maj@{k}']:.3f}",
            f"{result['truncated']:.3f}",
            f"{result['answerless']:.3f}",
            f"{result['mean_tokens']:.1f}",
            f"{result['tokens_per_second']:.0f}",
            f"{result['peak_memory_gib']:.2f}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    for name, result in results.items():
        shares = " ".join(f"{share:.3f}" for share in result["pass@k"].values())
        lines.append(f"{name}: pass@1...pass@{k}: {shares}")
    years = {str(year) for year in SOURCES}
    if years & results.keys():
        lines += PAPER.splitlines()
    return lines


# ---------------------------------------------------------------- command
class Evaluation(NamedTuple):
    """What is needed to draw samples."""

    model: transformers.PreTrainedModel
    tokenizer: transformers.PreTrainedTokenizerBase
    prompts: dict[str, list[Prompt]]  # of every set
    settings: dict  # what decides the samples


def prepare(options: Options, output: Path) -> Evaluation:
    """Load problems and model. Raises ValueError if the samples in `output` have other settings.

    Lowers options.max_new_tokens to what the model has positions for.
    """
    sets = load_sets(options)  # first: it is quick to fail
    dtype = getattr(torch, options.precision)
    model = load_pretrained(AutoModelForCausalLM, options.model, dtype=dtype)
    model = model.to(options.device).eval()
    check_finite(model, options.model)
    tokenizer = load_pretrained(AutoTokenizer, options.model)
    prompts = make_prompts(tokenizer, sets, options)

    longest = 0
    for prompts_of_set in prompts.values():
        longest = max(longest, *(len(prompt.ids) for prompt in prompts_of_set))
    positions = positions_of(model.config)
    room = positions - longest
    if room < 1:
        raise ValueError(
            f"model: a prompt has {longest} tokens, its positions end at {positions}; use another "
            "model"
        )
    if options.max_new_tokens > room:
        say(
            f"max_new_tokens lowered from {options.max_new_tokens} to {room}: the model has "
            f"{positions} positions"
        )
        options.max_new_tokens = room

    settings = dataclasses.asdict(options)
    for name in MAY_CHANGE:
        del settings[name]
    settings["dtype"] = str(model.dtype)
    settings["weights"] = fingerprint(model)
    settings["prompts"] = hashlib.sha256(json.dumps(prompts).encode()).hexdigest()[:16]
    check_same_settings(output, settings)
    return Evaluation(model, tokenizer, prompts, settings)


def fingerprint(model) -> str:
    """Of the first values of every parameter: another checkpoint in a folder is another model."""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        values = parameter.detach().flatten()[:16].double().cpu()
        digest.update(name.encode())
        digest.update(values.numpy().tobytes())
    return digest.hexdigest()[:16]


def check_same_settings(output: Path, settings: dict) -> None:
    """Raise ValueError if `output` holds samples that were drawn with other settings."""
    path = output / "summary.json"
    if path.exists():
        saved = json.loads(path.read_text())["settings"]
        if changed := differences(saved, settings):
            raise ValueError(
                f"{output} was made with other settings ({changed}): use the old ones, or another "
                "--output_dir"
            )
    elif (output / "samples.jsonl").exists():
        raise ValueError(
            f"{path} is gone, which says how the samples there were drawn: choose another "
            "--output_dir"
        )


def read_samples(path: Path) -> tuple[dict[tuple[str, int, int], dict], int]:
    """Samples of earlier commands by (set, number, index), and the size of their lines in bytes.

    Half a last line, of a run that was killed, does not count. Raises ValueError for a damaged line
    and for a sample that is there twice.
    """
    if not path.exists():
        return {}, 0
    samples = {}
    for record in read_lines(path, unfinished=True):
        key = (record["set"], record["problem"], record["index"])
        if key in samples:
            raise ValueError(
                f"{path} has samples twice: two processes wrote it; choose another --output_dir"
            )
        samples[key] = record
    size = path.read_bytes().rfind(b"\n") + 1
    return samples, size


def versions() -> dict[str, str]:
    """Of Python, and of the packages that are installed."""
    found = {"python": sys.version.split()[0]}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:  # datasets, which a .jsonl file does without
            continue
    return found


def main(arguments: list[str] | None = None) -> int:
    """The command line. Returns the exit status, 0."""
    options = Options(**parse(Options, arguments, __doc__))
    transformers.utils.logging.disable_progress_bar()
    output = Path(options.output_dir)
    output.mkdir(parents=True, exist_ok=True)
    with lock(output / "lock"):
        evaluation = prepare(options, output)
        path = output / "samples.jsonl"
        samples, size = read_samples(path)
        # Of an earlier command there may be more than are wanted now: they stay in the file.
        done = {key: record for key, record in samples.items() if key[2] < options.samples}
        device = "cpu" if options.device == "cpu" else torch.cuda.get_device_name(options.device)
        summary = {
            "settings": evaluation.settings,
            "options": dataclasses.asdict(options),
            "versions": versions(),
            "device": device,
            "results": None,
        }
        write_json(output / "summary.json", summary)
        file = Lines(path, size)
        sample_all(evaluation.model, evaluation.tokenizer, evaluation.prompts, options, done, file)
        results = {}
        for name in evaluation.prompts:
            results[name] = summarize([r for r in done.values() if r["set"] == name])
        summary["results"] = results
        write_json(output / "summary.json", summary)
    lines = report(results)
    say("\n".join([*lines, f"{path} and {output / 'summary.json'} written"]))
    return 0


if __name__ == "__main__":
    INTERRUPTED = "Interrupted. The same command continues: samples so far are in its --output_dir"
    command("eval_aime.py", main, INTERRUPTED)
