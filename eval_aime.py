"""Evaluate a causal language model on AIME 2024 and 2025: avg@k with an interval, pass@k, maj@k.

    python eval_aime.py --model deepseek-ai/DeepSeek-R1-Distill-Qwen-7B --years 2024 2025
    python eval_aime.py --model FOLDER --data my_problems.jsonl --grader math

--output_dir gets samples.jsonl, a line per sample as soon as it is drawn, and summary.json. The
same command continues one that was killed, and a larger --samples adds to what is there; any other
change is refused. Conventions: docs/aime.md.
"""

import hashlib
import itertools
import os
import random
import statistics
import sys
from collections import defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import scipy.stats
import torch
from tqdm import tqdm
from transformers.hf_argparser import HfArg

import reward
from data import (
    INSTRUCTION,
    load_rows,
    name_and_split,
    positions_of,
    read_problems,
    reasons,
    tokenize,
)
from reward import Problem
from rollout import autocast, generate, load_policy, response_texts
from runs import append_line, command, lock, parse, read_json, read_lines, write_json

# Year -> data set of the hub, split.
SOURCES = {2024: ("HuggingFaceH4/aime_2024", "train"), 2025: ("math-ai/aime25", "test")}
PROBLEMS_OF_A_YEAR = 30
# Options that may change when a run is continued: they say how much is drawn and where, not what.
MAY_CHANGE = {"samples", "batch_size", "device", "output_dir"}
LIMITS = {
    "samples": (1, 10**6),
    "temperature": (0.01, 100.0),
    "top_p": (0.01, 1.0),
    "max_new_tokens": (1, 10**9),
    "batch_size": (1, 10**6),
}
HAS_CUDA = torch.cuda.is_available()


@dataclass(kw_only=True)
class Options:
    """All options. Raises ValueError, naming the option, for what makes no sense."""

    model: str = HfArg(help="hub id or local folder of a model and its tokenizer")
    years: list[int] = HfArg(
        default_factory=lambda: list(SOURCES), help="AIME of which years; unused with --data"
    )
    data: str = HfArg(
        default="",
        help="instead of years: a .jsonl, .json or .parquet file, or a data set of the hub, whose "
        "split test is taken unless it is given as NAME:SPLIT or NAME:CONFIGURATION/SPLIT",
    )
    fields: list[str] = HfArg(
        default_factory=list, help="names of the problem's and the answer's field, if not found"
    )
    grader: Literal["aime", "math"] = HfArg(
        default="aime", help="aime: boxed integers 0-999; math: as in training on --data"
    )
    instruction: str = HfArg(default=INSTRUCTION, help="added to problems that are text")
    samples: int = HfArg(default=16, help="k: responses per problem")
    temperature: float = HfArg(default=0.6, help="of sampling")
    top_p: float = HfArg(default=0.95, help="of sampling; 1: off")
    max_new_tokens: int = HfArg(default=32768, help="length limit of a response")
    seed: int = HfArg(default=0, help="of sampling")
    batch_size: int = HfArg(default=8, help="responses drawn together; samples depend on it")
    device: str = HfArg(default="cuda" if HAS_CUDA else "cpu", help="cpu, cuda, cuda:1, ...")
    precision: Literal["float32", "bfloat16"] = HfArg(
        default="bfloat16" if HAS_CUDA else "float32", help="of weights and forward passes"
    )
    output_dir: str = HfArg(default="runs/aime", help="folder of samples.jsonl and summary.json")

    def __post_init__(self):
        for name, (least, most) in LIMITS.items():
            value = getattr(self, name)
            if not least <= value <= most:
                raise ValueError(f"{name} must be from {least} to {most}, got {value}")
        if not self.output_dir:
            raise ValueError("output_dir must name a folder, got ''")
        if not (self.device == "cpu" or (HAS_CUDA and self.device.startswith("cuda"))):
            raise ValueError(f"device must be cpu, or a CUDA device that is there: {self.device!r}")
        if unknown := set(self.years) - SOURCES.keys():
            raise ValueError(f"years must be among {list(SOURCES)}, got {unknown}")


# ---------------------------------------------------------------- problems
class Question(NamedTuple):
    """A problem as the model reads it."""

    set: str  # "2024", "2025", or the name of the file
    problem: int  # its number in the set, from 0
    prompt: str  # all that the model reads
    gold: str  # the right answer
    token_ids: list[int]  # of the prompt


def load_problems(options: Options) -> dict[str, list[Problem]]:
    """Name of a set -> its problems: those of --data, or a set for each year.

    Prints how many rows cannot be used, and why. Raises ValueError for a year that has not 30
    different problems, and for answers that the grader cannot compare.
    """
    if options.data:
        name, split = name_and_split(options.data, default="test")
        sources = {Path(name).stem: (name, split)}
    else:
        sources = {str(year): SOURCES[year] for year in options.years}
    sets = {}
    for name, (source, split) in sources.items():
        rows = load_rows(source, split)
        problems, skipped = read_problems(rows, *options.fields)
        print(f"{name}: {len(problems)} of {len(rows)} rows", *reasons(skipped), sep=", ")
        wanted = len(problems) if options.data else PROBLEMS_OF_A_YEAR
        if not problems or len(problems) != wanted:
            raise ValueError(
                f"data: {source} has {len(problems)} different problems with an answer, a year of "
                f"AIME has {PROBLEMS_OF_A_YEAR}"
            )
        for problem in problems:
            if options.grader == "aime" and reward.aime_integer(problem.answer) is None:
                raise ValueError(
                    f"data: {source}: the answer {problem.answer[:100]!r} is no integer from 0 to "
                    "999; for other answers: --grader math"
                )
            if reward.number(problem.answer) is None:
                reward.check_math_verify()  # fails now rather than after hours
        sets[name] = problems
    return sets


def ask(sets: dict[str, list[Problem]], model, tokenizer, options: Options) -> list[Question]:
    """All problems of all sets as the model reads them, in the chat template if there is one.

    Raises ValueError if a prompt and a response of full length have more tokens than the model has
    positions.
    """
    positions = positions_of(model.config)
    questions = []
    for name, problems in sets.items():
        tokenized, too_long = tokenize(
            problems,
            tokenizer,
            max_prompt_tokens=positions - options.max_new_tokens,
            instruction=options.instruction,
        )
        if too_long:
            raise ValueError(
                f"max_new_tokens: {too_long} prompts of {name} and {options.max_new_tokens} new "
                f"tokens do not fit into the {positions} positions of the model: lower it"
            )
        for number, (token_ids, gold) in enumerate(tokenized):
            prompt = tokenizer.decode(token_ids)
            questions.append(Question(name, number, prompt, gold, token_ids))
    return questions


# ---------------------------------------------------------------- samples
@dataclass
class Sample:
    """A line of samples.jsonl: what was asked, and what the model wrote."""

    set: str
    problem: int
    index: int  # of the sample, from 0 to k - 1
    prompt: str
    gold: str
    response: str
    answer: str | None  # that votes; None without one, and for truncated responses
    correct: bool
    truncated: bool  # it was cut off at max_new_tokens, and is wrong whatever it holds
    tokens: int  # EOS included

    def key(self) -> tuple[str, int, int]:
        """Of all samples one has it."""
        return self.set, self.problem, self.index


def final_answer(response: str, grader: str) -> str | None:
    """The answer that a response votes for, numbers in one notation; None without one."""
    if grader == "aime":
        text = reward.extract_boxed(response) or ""
        value = reward.aime_integer(text)
    else:
        text = reward.final_answer(response) or ""
        value = reward.number(text)
    if value is None:
        return text.strip() or None
    return str(value)


def draw(model, tokenizer, questions: list[Question], index: int, options: Options) -> list[Sample]:
    """The samples with this index of some questions, drawn together and graded."""
    try:
        with autocast(options.device, options.precision):
            rollouts = generate(
                model,
                [question.token_ids for question in questions],
                max_new_tokens=options.max_new_tokens,
                temperature=options.temperature,
                top_p=options.top_p,
                batch_tokens=sys.maxsize,  # all of them together
            )
    except torch.OutOfMemoryError as error:
        raise ValueError(
            f"batch_size: {len(questions)} responses at a time run out of memory: lower it, and "
            "the command continues"
        ) from error
    texts = response_texts(tokenizer, rollouts)
    truncated = rollouts.truncated.tolist()
    tokens = rollouts.mask.sum(1).tolist()
    grade = reward.grade_aime if options.grader == "aime" else reward.grade_math
    golds = [question.gold for question in questions]
    rewards = reward.grade_all(grade, texts, golds, truncated)
    samples = []
    for row, question in enumerate(questions):
        answer = None if truncated[row] else final_answer(texts[row], options.grader)
        sample = Sample(
            set=question.set,
            problem=question.problem,
            index=index,
            prompt=question.prompt,
            gold=question.gold,
            response=texts[row],
            answer=answer,
            correct=bool(rewards[row]),
            truncated=truncated[row],
            tokens=tokens[row],
        )
        samples.append(sample)
    return samples


def draw_missing(
    model, tokenizer, questions: list[Question], options: Options, path: Path, samples: dict
) -> None:
    """Draw every sample that is not in `samples`, by key; add it there and to the file `path`."""
    firsts = range(0, len(questions), options.batch_size)
    batches = list(itertools.product(range(options.samples), firsts))
    for index, first in tqdm(batches, unit="batch"):
        batch = questions[first : first + options.batch_size]
        if all((question.set, question.problem, index) in samples for question in batch):
            continue
        # The whole batch, even if some of its samples are there: alone the others would differ.
        torch.manual_seed(random.Random(f"{options.seed}/{index}/{first}").getrandbits(63))
        for sample in draw(model, tokenizer, batch, index, options):
            if sample.key() not in samples:
                samples[sample.key()] = sample
                append_line(path, asdict(sample))


def read_samples(path: Path, questions: list[Question]) -> dict[tuple[str, int, int], Sample]:
    """The samples of earlier commands by key. Half a last line, of a killed one, is cut off.

    Raises ValueError, naming file and line, for a line that is damaged or there twice, and for one
    that belongs to no question.
    """
    if not path.exists():
        return {}
    asked = {question[:4] for question in questions}
    samples = {}
    for number, record in enumerate(read_lines(path), 1):
        try:
            sample = Sample(**record)
            is_asked = (sample.set, sample.problem, sample.prompt, sample.gold) in asked
        except TypeError:  # it lacks a key, has another one, or a list where a number belongs
            is_asked = False
        if not is_asked or sample.key() in samples:
            raise ValueError(
                f"{path}, line {number} is damaged, there twice, or of another problem: remove "
                "the line, or choose another output_dir"
            )
        samples[sample.key()] = sample
    whole_lines = path.read_bytes().rfind(b"\n") + 1
    os.truncate(path, whole_lines)
    return samples


# ---------------------------------------------------------------- settings
def fingerprint(model) -> str:
    """Of the first values of every parameter: another checkpoint in a folder is another model."""
    values = [parameter.detach().flatten()[:16].cpu() for parameter in model.parameters()]
    return hashlib.sha256(torch.cat(values).double().numpy().tobytes()).hexdigest()[:16]


def check_settings(path: Path, settings: dict) -> None:
    """Raise ValueError, naming them, for settings that differ from those in the file `path`."""
    saved = read_json(path)
    names = sorted(saved.keys() | settings.keys())
    changed = [name for name in names if saved.get(name) != settings.get(name)]
    if changed:
        raise ValueError(
            f"{', '.join(changed)}: not as in {path}, with which the samples there were drawn: "
            "use the old values, or another output_dir"
        )


# ---------------------------------------------------------------- summary
def majority(samples: list[Sample]) -> float:
    """maj@k of one problem: whether the most frequent answer is right.

    Of several most frequent answers: the share that is right. Without any answer: 0.
    """
    votes = [sample.answer for sample in samples if sample.answer is not None]
    if not votes:
        return 0.0
    winners = set(statistics.multimode(votes))
    right = {sample.answer for sample in samples if sample.correct}
    return len(winners & right) / len(winners)


def interval(means: list[float]) -> tuple[float, float]:
    """95 % percentile bootstrap interval of the mean over problems.

    A single problem says nothing about others: 0 to 1.
    """
    if len(means) == 1:
        return 0.0, 1.0
    rng = np.random.default_rng(0)
    bootstrap = scipy.stats.bootstrap(
        (means,), np.mean, n_resamples=10_000, batch=1000, method="percentile", rng=rng
    )
    low, high = bootstrap.confidence_interval
    return float(low), float(high)


def summarize(samples: list[Sample]) -> dict[str, float]:
    """The results of one set, of k samples of each problem; shares from 0 to 1."""
    problems = defaultdict(list)
    for sample in samples:
        problems[sample.problem].append(sample)
    k = len(samples) // len(problems)
    correct = [sum(sample.correct for sample in group) for group in problems.values()]
    low, high = interval([count / k for count in correct])
    is_answerless = [sample.answer is None and not sample.truncated for sample in samples]
    result = {
        "problems": len(problems),
        "k": k,
        "avg@k": statistics.fmean(correct) / k,
        "95 % low": low,
        "95 % high": high,
        "maj@k": statistics.fmean(majority(group) for group in problems.values()),
        "truncated": statistics.fmean(sample.truncated for sample in samples),
        "answerless": statistics.fmean(is_answerless),
        "tokens": statistics.fmean(sample.tokens for sample in samples),
    }
    for n in sorted({2, 4, 8, 16, 32, 64, k}):
        if n <= k:
            chances = [reward.pass_at_k(k, count, n) for count in correct]
            result[f"pass@{n}"] = statistics.fmean(chances)
    return result


def report(results: dict[str, dict[str, float]]) -> str:
    """A table with a row for every set."""
    lines = []
    for name, result in results.items():
        numbers = [str(round(number, 3)) for number in result.values()]
        lines.append(" | ".join([name, *numbers]))
    header = " | ".join(["set", *result])
    return "\n".join([header, *lines])


# ---------------------------------------------------------------- command
def evaluate(options: Options) -> dict[str, dict[str, float]]:
    """Draw what is missing in options.output_dir. Returns the results of every set.

    Raises ValueError if the samples that are there have other settings, or if another process is
    writing there.
    """
    output = Path(options.output_dir)
    path = output / "samples.jsonl"
    with lock(output / "lock"):
        sets = load_problems(options)  # first: it is quick to fail
        model, tokenizer = load_policy(
            options.model, options.device, precision=options.precision, trainable=False
        )
        questions = ask(sets, model, tokenizer, options)
        settings = asdict(options) | {"weights": fingerprint(model)}
        for name in MAY_CHANGE:
            del settings[name]
        if path.exists():
            check_settings(output / "settings.json", settings)
        else:
            write_json(output / "settings.json", settings)
        samples = read_samples(path, questions)
        draw_missing(model, tokenizer, questions, options, path, samples)
        # Of an earlier command there may be more than are wanted now: they stay in the file.
        wanted = [sample for sample in samples.values() if sample.index < options.samples]
        results = {}
        for name in sets:
            results[name] = summarize([sample for sample in wanted if sample.set == name])
        write_json(output / "summary.json", {"results": results, "settings": settings})
    return results


def main(arguments: list[str] | None = None) -> int:
    """The command line. Returns the exit status, 0."""
    options = parse(Options, arguments, __doc__)
    print(report(evaluate(options)))
    print(f"samples.jsonl and summary.json are in {options.output_dir}")
    return 0


if __name__ == "__main__":
    command("eval_aime.py", main, "Interrupted. The same command continues.")
