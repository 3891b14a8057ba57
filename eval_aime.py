"""Evaluate a causal language model on AIME 2024 and 2025: avg@k with an interval, pass@k, maj@k.

    python eval_aime.py --model deepseek-ai/DeepSeek-R1-Distill-Qwen-7B
    python eval_aime.py --model FOLDER --data my_problems.jsonl --grader math

--output_dir gets samples.jsonl, a line per sample as soon as it is drawn, and summary.json. The
same command continues one that was killed, and a larger --samples adds to what is there; any other
change is refused. Conventions: docs/aime.md.
"""

import itertools
import os
import random
import statistics
import sys
from dataclasses import MISSING, asdict, dataclass
from pathlib import Path
from typing import Literal

import pandas as pd
import torch
from scipy.special import stdtrit  # scipy.stats is slow to load
from tqdm import tqdm

import reward
from data import INSTRUCTION, load_rows, positions_of, read_problems, tokenize
from rollout import autocast, generate, load_policy, response_texts
from runs import (
    append_line,
    check_options,
    check_same,
    command,
    lock,
    option,
    parse,
    read_lines,
    write_json,
)

YEARS = {"2024": "HuggingFaceH4/aime_2024:train", "2025": "math-ai/aime25:test"}  # of the hub
GRADERS = {  # how the answer that votes is read, and whether it is right
    "aime": (reward.extract_boxed, reward.grade_aime),
    "math": (reward.final_answer, reward.grade_math),
}
# Options that may change when a run is continued: they say how much is drawn and where, not what.
MAY_DIFFER = {"samples", "batch_size", "device", "output_dir"}
HAS_CUDA = torch.cuda.is_available()
# A problem: what its samples say of it (set, problem, prompt, gold), and the prompt's token ids.
Question = tuple[dict, list[int]]


@dataclass
class Options:
    """All options. Raises ValueError, naming the option, for what makes no sense."""

    model: str = option(MISSING, "hub id or local folder of a model and its tokenizer")
    data: list[str] = option(
        list(YEARS),
        "years of AIME; .jsonl, .json or .parquet files; or data sets of the hub, whose split "
        "test is taken unless it is given as NAME:SPLIT or NAME:CONFIGURATION/SPLIT",
    )
    fields: list[str] = option([], "names of the problem's and the answer's field, if not found")
    grader: Literal["aime", "math"] = option(
        "aime", "aime: boxed integers 0-999; math: as in training on --data"
    )
    instruction: str = option(INSTRUCTION, "added to problems that are text")
    samples: int = option(16, "k: responses per problem", least=1)
    temperature: float = option(0.6, "of sampling", least=0.01, most=100.0)
    top_p: float = option(0.95, "of sampling; 1: off", least=0.01, most=1.0)
    max_new_tokens: int = option(32768, "length limit of a response", least=1)
    seed: int = option(0, "of sampling")
    batch_size: int = option(8, "responses drawn together; samples depend on it", least=1)
    device: str = option("cuda" if HAS_CUDA else "cpu", "cpu, cuda, cuda:1, ...")
    precision: Literal["float32", "bfloat16"] = option(
        "bfloat16" if HAS_CUDA else "float32", "of weights and forward passes"
    )
    output_dir: str = option("runs/aime", "folder of samples.jsonl and summary.json")

    def __post_init__(self):
        check_options(self)
        if len(set(self.data)) < len(self.data):
            raise ValueError(f"data must be different sets, got {self.data}")


# ---------------------------------------------------------------- problems
def load_questions(options: Options, tokenizer, positions: int) -> list[Question]:
    """The problems of every set of --data, numbered from 0.

    positions: tokens that the model can read. Prints how many rows cannot be used, and why. Raises
    ValueError for a year that has not 30 different problems, for answers that the grader cannot
    compare, and for prompts that leave too little room for a response.
    """
    _, grade = GRADERS[options.grader]
    room = positions - options.max_new_tokens
    questions = []
    for name in options.data:
        rows = load_rows(YEARS.get(name, name), split="test")
        problems = read_problems(rows, *options.fields)
        if name in YEARS and len(problems) != 30:
            raise ValueError(
                f"data: {YEARS[name]} has {len(problems)} different problems with an answer, not 30"
            )
        short = tokenize(problems, tokenizer, room, options.instruction)
        if len(short) < len(problems):
            raise ValueError(
                f"max_new_tokens: prompts of {name} and {options.max_new_tokens} new tokens do not "
                f"fit into the {positions} positions of the model: lower it"
            )
        for number, (token_ids, gold) in enumerate(short):
            grade("", gold)  # refuses a gold answer that it cannot compare
            prompt = tokenizer.decode(token_ids)
            asked = {"set": name, "problem": number, "prompt": prompt, "gold": gold}
            questions.append((asked, token_ids))
    return questions


# ---------------------------------------------------------------- samples
def vote(answer: str) -> str | None:
    """The answer as it is counted, numbers in one notation; None for an empty one."""
    value = reward.number(answer)
    if value is None:
        return answer.strip() or None
    return str(value)


def draw(model, tokenizer, batch: list[Question], options: Options) -> list[dict]:
    """Draw and grade one sample of each of these questions, with torch's generator.

    It adds to what was asked: response; answer, which votes: None without one, and for truncated
    responses; truncated: it was cut off at max_new_tokens, and is wrong whatever it holds; correct;
    tokens, EOS included.
    """
    asked, prompts = zip(*batch)
    with autocast(options.device, options.precision):
        rollouts = generate(
            model,
            prompts,
            max_new_tokens=options.max_new_tokens,
            temperature=options.temperature,
            top_p=options.top_p,
            batch_tokens=sys.maxsize,  # all of them together
        )
    read, grade = GRADERS[options.grader]
    texts = response_texts(tokenizer, rollouts)
    truncated = rollouts.truncated.tolist()
    samples = pd.DataFrame(asked)
    samples["response"] = texts
    samples["truncated"] = truncated
    samples["tokens"] = rollouts.mask.sum(1).tolist()
    samples["correct"] = reward.grade_all(grade, texts, samples["gold"], truncated)
    samples["answer"] = [vote(read(text) or "") for text in texts]
    samples["answer"] = samples["answer"].mask(samples["truncated"])
    return samples.to_dict("records")


def read_samples(path: Path, questions: list[Question]) -> list[dict]:
    """The samples of earlier commands. Half a last line, of a killed one, is cut off.

    Raises ValueError, naming file and line, for a line that is damaged or not the next sample.
    """
    samples = read_lines(path)
    for number, sample in enumerate(samples):
        index, position = divmod(number, len(questions))
        asked, _ = questions[position]
        expected = asked | {"index": index}
        if not (expected.items() <= sample.items() and sample.keys() == samples[0].keys()):
            raise ValueError(
                f"{path}, line {number + 1} is damaged, or of another problem: remove it and all "
                "lines behind it, or choose another output_dir"
            )
    os.truncate(path, path.read_bytes().rfind(b"\n") + 1)
    return samples


# ---------------------------------------------------------------- summary
def majority(samples: pd.DataFrame) -> float:
    """maj@k of one problem: whether the most frequent answer is right.

    Of several most frequent answers: the share that is right. Without any answer: 0.
    """
    winners = samples["answer"].mode()
    right = samples["answer"][samples["correct"]]
    return winners.isin(right).sum() / max(1, len(winners))


def summarize(samples: pd.DataFrame) -> dict[str, float]:
    """The results of one set, of k samples of each problem; shares from 0 to 1.

    The 95 % interval is Student's over problems; of a single one it is 0 to 1.
    """
    problems = samples.groupby("problem")
    correct = problems["correct"].sum()
    k = len(samples) // len(correct)
    mean = correct.mean() / k
    margin = stdtrit(len(correct) - 1, 0.975) * correct.sem() / k
    is_answerless = samples["answer"].isna() & ~samples["truncated"]
    result = {
        "problems": len(correct),
        "k": k,
        "avg@k": mean,
        "95 % low": max(0.0, mean - margin),
        "95 % high": min(1.0, mean + margin),
        "maj@k": statistics.fmean(majority(group) for _, group in problems),
        "truncated": samples["truncated"].mean(),
        "answerless": is_answerless.mean(),
        "tokens": samples["tokens"].mean(),
    }
    n = k
    while n > 1:
        passed = [reward.pass_at_k(k, count, n) for count in correct]
        result[f"pass@{n}"] = statistics.fmean(passed)
        n //= 2
    return result


# ---------------------------------------------------------------- command
def main(arguments: list[str] | None = None) -> int:
    """Draw what is missing in --output_dir, print the results of every set, and return 0.

    Samples are drawn, and lie in the file, in this order: one of every question, then the next of
    each. Raises ValueError if those that are there have other settings, or if another process is
    writing there.
    """
    options = parse(Options, arguments, __doc__)
    output = Path(options.output_dir)
    path = output / "samples.jsonl"
    with lock(output / "lock"):
        model, tokenizer = load_policy(
            options.model, options.device, precision=options.precision, trainable=False
        )
        questions = load_questions(options, tokenizer, positions_of(model.config))
        settings = asdict(options)
        # Another checkpoint in the same folder has another sum.
        firsts = [tensor.flatten()[:64].double().sum() for tensor in model.parameters()]
        settings["weights"] = round(torch.stack(firsts).sum().item(), 6)
        samples = []
        if path.exists():
            check_same(output / "settings.json", settings, MAY_DIFFER)
            samples = read_samples(path, questions)
        write_json(output / "settings.json", settings)
        firsts = range(0, len(questions), options.batch_size)
        batches = list(itertools.product(range(options.samples), firsts))
        for index, first in tqdm(batches, unit="batch"):
            batch = questions[first : first + options.batch_size]
            there = len(samples) - index * len(questions) - first
            if there >= len(batch):
                continue
            # The whole batch, even if some of its samples are there: alone the others would differ.
            torch.manual_seed(random.Random(f"{options.seed}/{index}/{first}").getrandbits(63))
            for sample in draw(model, tokenizer, batch, options)[there:]:
                sample["index"] = index
                append_line(path, sample)
                samples.append(sample)
        # Of an earlier command there may be more than are wanted now: they stay in the file.
        wanted = pd.DataFrame(samples[: options.samples * len(questions)])
        results = {}
        for name, of_set in wanted.groupby("set", sort=False):
            results[name] = summarize(of_set)
        write_json(output / "summary.json", results)
    print(pd.DataFrame(results).to_string(float_format="{:.4g}".format))
    print(f"samples.jsonl and summary.json are in {output}")
    return 0


if __name__ == "__main__":
    command("eval_aime.py", main, "Interrupted. The same command continues.")
