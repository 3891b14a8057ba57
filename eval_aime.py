"""Evaluate a causal language model on AIME: avg@k with an interval, and pass@k.

    python eval_aime.py --model deepseek-ai/DeepSeek-R1-Distill-Qwen-7B
    python eval_aime.py --model FOLDER --data 2024 2025 2026
    python eval_aime.py --model FOLDER --data my_problems.jsonl
    python eval_aime.py --model FOLDER --data openai/gsm8k --reward rewards.py:grade

--output_dir gets samples.jsonl, with a line per sample, and summary.json. The same command
continues after a kill, and a larger --samples adds to what is there. All other options but
--batch_size and --device must stay the same. docs/aime.md lists the conventions.
"""

import os
import random
import statistics
import sys
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Literal

import pandas as pd
import torch
from filelock import FileLock
from scipy.special import stdtrit  # scipy.stats is slow to load
from tqdm import tqdm

import reward
from rollout import generate, response_texts
from support.loading import load_config_and_tokenizer, load_policy
from support.runs import (
    append_line,
    check_options,
    check_same,
    command,
    option,
    parse,
    read_lines,
    write_json,
)
from tasks.data import (
    INSTRUCTION,
    load_rows,
    longest_prompt,
    read_problems,
    tokenize,
)

YEARS = {  # data sets of the hub
    "2024": "HuggingFaceH4/aime_2024:train",
    "2025": "math-ai/aime25",
    "2026": "math-ai/aime26",
}
HAS_CUDA = torch.cuda.is_available()


@dataclass
class Options:
    """All options. Raises ValueError that names a wrong option."""

    model: str = option(MISSING, "hub id or local folder of a model and its tokenizer")
    data: list[str] = option(
        ["2024", "2025"],
        "years of AIME (2024, 2025, 2026); .jsonl or .parquet files; or hub data sets: NAME (its"
        " split test), NAME:SPLIT or NAME:CONFIGURATION/SPLIT; of a file, FILE:train[:160]",
    )
    fields: list[str] = option([], "names of the problem's and the answer's field")
    reward: str = option("", "FILE.py:FUNCTION instead of the grader, as train.py --reward")
    instruction: str = option(INSTRUCTION, "added to problems that are text")
    samples: int = option(16, "k: responses per problem", least=1, may_change=True)
    temperature: float = option(0.6, "of sampling; 0: greedy, with --samples 1")
    top_p: float = option(0.95, "of sampling; 1 or more: off")
    max_new_tokens: int = option(32768, "length limit of a response", least=1)
    seed: int = option(0, "of sampling")
    batch_size: int = option(
        8, "responses drawn together; samples depend on it", least=1, may_change=True
    )
    device: str = option("cuda" if HAS_CUDA else "cpu", "cpu, cuda, cuda:1, ...", may_change=True)
    precision: Literal["float32", "bfloat16"] = option(
        "bfloat16" if HAS_CUDA else "float32", "of weights and forward passes"
    )
    output_dir: str = option(
        "runs/aime", "folder of samples.jsonl and summary.json", may_change=True
    )

    def __post_init__(self):
        check_options(self)


# ---------------------------------------------------------------- problems
def load_questions(options: Options) -> list[dict]:
    """Return the problems of every set of --data: set, prompt, gold and token_ids.

    Raises ValueError if the model has no positions for a prompt and its response.
    """
    config, tokenizer = load_config_and_tokenizer(options.model)
    longest = longest_prompt(config, options.max_new_tokens)
    questions = []
    for name in dict.fromkeys(options.data):  # each set once
        rows = load_rows(YEARS.get(name, name), split="test")
        problems = read_problems(rows, *options.fields, own_grader=bool(options.reward))
        tokenized = tokenize(problems, tokenizer, longest, options.instruction)
        if len(tokenized) < len(problems):
            raise ValueError(
                f"max_new_tokens: it leaves {longest} of the model's positions, too few for a"
                f" prompt of {name}: lower it"
            )
        for token_ids, gold in tokenized:
            prompt = tokenizer.decode(token_ids)
            questions.append({"set": name, "prompt": prompt, "gold": gold, "token_ids": token_ids})
    return questions


# ---------------------------------------------------------------- samples
def key(sample: dict) -> tuple:
    """Return what tells a sample from all others. In a file that changes, problems move.

    A sample of a problem whose answer was corrected is drawn again.
    """
    return sample["set"], sample["prompt"], sample["gold"], sample["index"]


def all_samples(options: Options) -> pd.DataFrame:
    """Return the samples that the options ask for; draw those that are missing in --output_dir.

    A sample has set, prompt and gold of its question, and these: index, which tells the samples of
    a question apart; response; truncated, if it was cut off at max_new_tokens, which makes it
    wrong; tokens, the length with EOS; and correct, which is the reward with --reward. Raises
    ValueError if earlier samples have other settings.
    """
    output = Path(options.output_dir)
    path = output / "samples.jsonl"
    drawn = {}  # key -> sample
    if path.exists():
        check_same(output / "settings.json", options)
        drawn = {key(sample): sample for sample in read_lines(path)}
        # A kill may have cut the last line in half, and the next sample must not follow that.
        os.truncate(path, path.read_bytes().rfind(b"\n") + 1)
    write_json(output / "settings.json", vars(options))

    questions = load_questions(options)
    grader = reward.choose_grader(options.reward, questions[0]["gold"])
    model, tokenizer = load_policy(
        options.model, options.device, precision=options.precision, trainable=False
    )
    indices = range(options.samples)
    wanted = [question | {"index": index} for index in indices for question in questions]
    missing = [question for question in wanted if key(question) not in drawn]
    for first in tqdm(range(0, len(missing), options.batch_size), unit="batch"):
        # A seed for each batch, so that a command that was stopped between two batches draws what
        # an uninterrupted one does
        torch.manual_seed(random.Random(f"{options.seed}/{len(drawn)}").getrandbits(63))
        batch = pd.DataFrame(missing[first : first + options.batch_size])
        rollouts = generate(
            model,
            batch.pop("token_ids").tolist(),
            max_new_tokens=options.max_new_tokens,
            temperature=options.temperature,
            top_p=options.top_p,
            batch_tokens=sys.maxsize,  # all of them together
        )
        batch["response"] = response_texts(tokenizer, rollouts)
        batch["truncated"] = rollouts.truncated.tolist()
        batch["tokens"] = rollouts.mask.sum(1).tolist()
        batch["correct"] = reward.grade_all(
            grader, batch["response"], batch["gold"], batch["truncated"]
        )
        for sample in batch.to_dict("records"):
            drawn[key(sample)] = sample
            append_line(path, sample)
    return pd.DataFrame([drawn[key(question)] for question in wanted])


# ---------------------------------------------------------------- summary
def summarize(samples: pd.DataFrame) -> dict[str, float]:
    """Return the results of one set, of k samples per problem; shares are from 0 to 1.

    The 95 % interval is Student's over problems, and 0 to 1 for a single problem. For pass@n a
    sample is right if its reward is above 0.
    """
    rewards = samples["correct"].astype(float)
    means = rewards.groupby(samples["prompt"]).mean()
    right_counts = (rewards > 0).groupby(samples["prompt"]).sum()
    k = len(samples) // len(means)
    mean = means.mean()
    # NaN for a single problem, which says nothing of others: `max` and `min` make it 0 and 1.
    margin = stdtrit(len(means) - 1, 0.975) * means.sem()
    result = {
        "problems": len(means),
        "k": k,
        "avg@k": mean,
        "95 % low": max(0.0, mean - margin),
        "95 % high": min(1.0, mean + margin),
        "truncated": samples["truncated"].mean(),
        "tokens": samples["tokens"].mean(),
    }
    n = k
    while n > 1:  # k, k/2, k/4, ...
        chances = [reward.pass_at_k(k, right, n) for right in right_counts]
        result[f"pass@{n}"] = statistics.fmean(chances)
        n //= 2
    return result


# ---------------------------------------------------------------- command
def main(arguments: list[str] | None = None) -> int:
    """Run the command line: print the results of every set, and write summary.json. Returns 0."""
    options = parse(Options, arguments, __doc__)
    output = Path(options.output_dir)
    with FileLock(output / ".lock", timeout=5):
        samples = all_samples(options)
        results = {name: summarize(group) for name, group in samples.groupby("set", sort=False)}
        write_json(output / "summary.json", results)
    print(pd.DataFrame(results).to_string(float_format="{:.4g}".format))
    return 0


if __name__ == "__main__":
    command("eval_aime.py", main, "Interrupted. The same command continues.")
