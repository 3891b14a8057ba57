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
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, NamedTuple, TypedDict

import numpy as np
import pandas as pd
import scipy.stats
import torch
from tqdm import tqdm
from transformers.hf_argparser import HfArg

import reward
from data import INSTRUCTION, load_rows, positions_of, read_problems, tokenize
from rollout import autocast, generate, load_policy, response_texts
from runs import append_line, check_same, command, lock, parse, read_lines, write_json

SOURCES = {2024: "HuggingFaceH4/aime_2024:train", 2025: "math-ai/aime25:test"}  # of the hub
PROBLEMS_OF_A_YEAR = 30
# Options that may change when a run is continued: they say how much is drawn and where, not what.
MAY_DIFFER = {"samples", "batch_size", "device", "output_dir"}
AT_MOST = {  # and above 0
    "samples": 10**6,
    "temperature": 100.0,
    "top_p": 1.0,
    "max_new_tokens": 10**9,
    "batch_size": 10**6,
}
HAS_CUDA = torch.cuda.is_available()


@dataclass
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
        for name, most in AT_MOST.items():
            value = getattr(self, name)
            if not 0 < value <= most:
                raise ValueError(f"{name} must be above 0 and at most {most}, got {value}")
        if not self.output_dir:
            raise ValueError("output_dir must name a folder, got ''")
        if not (self.device == "cpu" or (HAS_CUDA and self.device.startswith("cuda"))):
            raise ValueError(
                f"device must be cpu, or a CUDA device that torch sees, got {self.device!r}"
            )
        if unknown := set(self.years) - SOURCES.keys():
            raise ValueError(f"years must be among {list(SOURCES)}, got {unknown}")


# ---------------------------------------------------------------- problems
class Sample(TypedDict):
    """A line of samples.jsonl: what was asked, and what the model wrote."""

    set: str  # "2024", "2025", or --data
    problem: int  # its number in the set, from 0
    prompt: str  # all that the model reads
    gold: str  # the right answer
    index: int  # of the sample, from 0 to k - 1
    response: str
    answer: str | None  # that votes; None without one, and for truncated responses
    correct: bool
    truncated: bool  # it was cut off at max_new_tokens, and is wrong whatever it holds
    tokens: int  # EOS included


class Question(NamedTuple):
    """A problem as the model reads it."""

    asked: dict  # what the samples say of it: set, problem, prompt, gold
    token_ids: list[int]  # of the prompt


def load_questions(options: Options, tokenizer, positions: int) -> list[Question]:
    """The problems of --data, or of every year, in the chat template if there is one.

    positions: tokens that the model can read. Prints how many rows cannot be used, and why. Raises
    ValueError for a year that has not 30 different problems, for answers that the grader cannot
    compare, and for prompts that leave too little room for a response.
    """
    sources = {options.data: options.data}
    if not options.data:
        sources = {str(year): SOURCES[year] for year in options.years}
    if options.grader == "math":
        reward.check_math_verify()  # fails now rather than after hours
    questions = []
    for name, source in sources.items():
        rows = load_rows(source, split="test")
        problems, left_out = read_problems(rows, *options.fields)
        print(f"{name}: {len(problems)} of {len(rows)} rows; left out: {dict(left_out)}")
        if not options.data and len(problems) != PROBLEMS_OF_A_YEAR:
            raise ValueError(
                f"data: {source} has {len(problems)} different problems with an answer, a year of "
                f"AIME has {PROBLEMS_OF_A_YEAR}"
            )
        room = positions - options.max_new_tokens
        problems, too_long = tokenize(problems, tokenizer, room, options.instruction)
        if too_long:
            raise ValueError(
                f"max_new_tokens: {too_long} prompts of {name} and {options.max_new_tokens} new "
                f"tokens do not fit into the {positions} positions of the model: lower it"
            )
        for number, (token_ids, gold) in enumerate(problems):
            if options.grader == "aime" and reward.aime_integer(gold) is None:
                raise ValueError(
                    f"data: {source}: the answer {gold!r} is no integer from 0 to 999; for other "
                    "answers: --grader math"
                )
            prompt = tokenizer.decode(token_ids)
            asked = {"set": name, "problem": number, "prompt": prompt, "gold": gold}
            questions.append(Question(asked, token_ids))
    return questions


# ---------------------------------------------------------------- samples
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


def draw(
    model, tokenizer, questions: list[Question], options: Options, done: int
) -> Iterator[Sample]:
    """Draw and grade in the order of the file: a sample of every question, then the next of each.

    The first `done` of them are there, and are left out.
    """
    grade = reward.grade_aime if options.grader == "aime" else reward.grade_math
    firsts = range(0, len(questions), options.batch_size)
    batches = list(itertools.product(range(options.samples), firsts))
    for index, first in tqdm(batches, unit="batch"):
        batch = questions[first : first + options.batch_size]
        there = max(0, done - index * len(questions) - first)
        if there >= len(batch):
            continue
        # The whole batch, even if some of its samples are there: alone the others would differ.
        torch.manual_seed(random.Random(f"{options.seed}/{index}/{first}").getrandbits(63))
        try:
            with autocast(options.device, options.precision):
                rollouts = generate(
                    model,
                    [question.token_ids for question in batch],
                    max_new_tokens=options.max_new_tokens,
                    temperature=options.temperature,
                    top_p=options.top_p,
                    batch_tokens=sys.maxsize,  # all of them together
                )
        except torch.OutOfMemoryError as error:
            raise ValueError(
                f"batch_size: {len(batch)} responses at a time run out of memory: lower it, and "
                "the command continues"
            ) from error
        texts = response_texts(tokenizer, rollouts)
        truncated = rollouts.truncated.tolist()
        tokens = rollouts.mask.sum(1).tolist()
        golds = [question.asked["gold"] for question in batch]
        correct = reward.grade_all(grade, texts, golds, truncated)
        for row in range(there, len(batch)):
            yield Sample(
                **batch[row].asked,
                index=index,
                response=texts[row],
                answer=None if truncated[row] else final_answer(texts[row], options.grader),
                correct=correct[row],
                truncated=truncated[row],
                tokens=tokens[row],
            )


def read_samples(path: Path, questions: list[Question]) -> list[Sample]:
    """The samples of earlier commands. Half a last line, of a killed one, is cut off.

    Raises ValueError, naming file and line, for a line that is damaged or not the next sample.
    """
    if not path.exists():
        return []
    samples = read_lines(path)
    for number, sample in enumerate(samples):
        index, position = divmod(number, len(questions))
        expected = questions[position].asked | {"index": index}
        is_whole = sample.keys() == Sample.__required_keys__
        if not (is_whole and expected.items() <= sample.items()):
            raise ValueError(
                f"{path}, line {number + 1} is damaged, or of another problem: remove it and all "
                "lines behind it, or choose another output_dir"
            )
    whole_lines = path.read_bytes().rfind(b"\n") + 1
    os.truncate(path, whole_lines)
    return samples


def fingerprint(model) -> str:
    """Of the first values of every parameter: another checkpoint in a folder is another model."""
    values = [parameter.detach().flatten()[:16].cpu() for parameter in model.parameters()]
    return hashlib.sha256(torch.cat(values).double().numpy().tobytes()).hexdigest()[:16]


# ---------------------------------------------------------------- summary
def majority(samples: pd.DataFrame) -> float:
    """maj@k of one problem: whether the most frequent answer is right.

    Of several most frequent answers: the share that is right. Without any answer: 0.
    """
    winners = samples["answer"].mode()
    right = samples["answer"][samples["correct"]]
    return winners.isin(right).sum() / max(1, len(winners))


def interval(means: pd.Series) -> tuple[float, float]:
    """95 % percentile bootstrap interval of the mean over problems.

    A single problem says nothing about others: 0 to 1.
    """
    if len(means) == 1:
        return 0.0, 1.0
    rng = np.random.default_rng(0)
    bootstrap = scipy.stats.bootstrap(
        (means,), np.mean, n_resamples=10_000, batch=1000, method="percentile", rng=rng
    )
    return bootstrap.confidence_interval


def summarize(samples: pd.DataFrame) -> dict[str, float]:
    """The results of one set, of k samples of each problem; shares from 0 to 1."""
    problems = samples.groupby("problem")
    correct = problems["correct"].sum()
    k = len(samples) // len(correct)
    low, high = interval(correct / k)
    is_answerless = samples["answer"].isna() & ~samples["truncated"]
    result = {
        "problems": len(correct),
        "k": k,
        "avg@k": correct.mean() / k,
        "95 % low": low,
        "95 % high": high,
        "maj@k": statistics.fmean(majority(group) for _, group in problems),
        "truncated": samples["truncated"].mean(),
        "answerless": is_answerless.mean(),
        "tokens": samples["tokens"].mean(),
    }
    for n in sorted({2, 4, 8, 16, 32, 64, k}):
        if n <= k:
            result[f"pass@{n}"] = statistics.fmean(
                reward.pass_at_k(k, count, n) for count in correct
            )
    return result


# ---------------------------------------------------------------- command
def evaluate(options: Options) -> dict[str, dict[str, float]]:
    """Draw what is missing in options.output_dir. Returns the results of every set.

    Raises ValueError if the samples that are there have other settings, or if another process is
    writing there.
    """
    output = Path(options.output_dir)
    path = output / "samples.jsonl"
    settings = asdict(options)
    with lock(output / "lock"):
        if path.exists():  # before the weights are loaded, which may take minutes
            check_same(output / "settings.json", settings, MAY_DIFFER | {"weights"})
        model, tokenizer = load_policy(
            options.model, options.device, precision=options.precision, trainable=False
        )
        questions = load_questions(options, tokenizer, positions_of(model.config))
        settings["weights"] = fingerprint(model)
        if path.exists():
            check_same(output / "settings.json", settings, MAY_DIFFER)
        write_json(output / "settings.json", settings)
        samples = read_samples(path, questions)
        for sample in draw(model, tokenizer, questions, options, done=len(samples)):
            samples.append(sample)
            append_line(path, sample)
        # Of an earlier command there may be more than are wanted now: they stay in the file.
        wanted = pd.DataFrame(samples[: options.samples * len(questions)])
        results = {}
        for name, of_set in wanted.groupby("set", sort=False):
            results[name] = summarize(of_set)
        write_json(output / "summary.json", results)
    return results


def main(arguments: list[str] | None = None) -> int:
    """The command line. Returns the exit status, 0."""
    options = parse(Options, arguments, __doc__)
    table = pd.DataFrame(evaluate(options))
    print(table.to_string(float_format="{:.4g}".format))
    print(f"samples.jsonl and summary.json are in {options.output_dir}")
    return 0


if __name__ == "__main__":
    command("eval_aime.py", main, "Interrupted. The same command continues.")
