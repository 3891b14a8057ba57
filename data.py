"""Problems with verifiable answers, of the hub or of a local file, as prompts.

For train.py --data and eval_aime.py. The way of a problem: `load_rows` gives rows, `read_problems`
finds prompt and answer in them, `tokenize` writes the prompts as the model reads them. What they
leave out is printed.
"""

import glob
import json
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

import countdown
import reward
from reward import Problem
from rollout import load_without_weights

INSTRUCTION = r"Please reason step by step, and put your final answer within \boxed{}."
MAX_PROMPT_TOKENS = 1024  # longer prompts are not trained on
MAX_ANSWER_CHARACTERS = 200  # longer ones are solutions without a box, or programs

# Tried in this order; a.b is the field b inside the field a. In `solution` and in GSM8K's `answer`
# the answer is the end of a text.
PROMPT_FIELDS = ("prompt", "problem", "Problem", "question", "query", "instruction", "input")
ANSWER_FIELDS = (
    "answer",
    "Answer",
    "ground_truth",
    "reward_model.ground_truth",
    "final_answer",
    "target",
    "solution",
)

_FILES = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}  # how `datasets` calls them


class Task(NamedTuple):
    """Prompts and a grading function. The prompts are token ids."""

    train: list[Problem]
    held_out: list[Problem]
    # response, answer -> reward from 0 to 1. A function of a module, which runs side by side can
    # import: no lambda.
    grade: Callable[[str, str], float | bool]


# ---------------------------------------------------------------- rows
def load_rows(data: str, split: str) -> Sequence[dict]:
    """Rows of a local .jsonl, .json or .parquet file, or of a data set of the hub.

    data: a file; or NAME, NAME:SPLIT or NAME:CONFIGURATION/SPLIT, where NAME is an id of the hub or
    a folder in the hub's layout. split is taken where `data` names none, and the configuration
    "main" if there is one. A field b inside a field a is called a.b.

    Raises ValueError for what cannot be loaded or is empty.
    """
    name, _, named_split = data.rpartition(":")
    if name and not Path(data).exists():  # a file or folder may have a colon in its name
        data = name
        split = named_split
    try:
        import datasets  # slow, and not wanted by Countdown

        if kind := _FILES.get(Path(data).suffix):
            files = glob.escape(data)  # a * or [ in a file's name is no pattern
            load = partial(datasets.load_dataset, kind, data_files=files, split="train")
        else:
            configuration, _, part = split.rpartition("/")
            if not configuration and "main" in datasets.get_dataset_config_names(data):
                configuration = "main"
            load = partial(datasets.load_dataset, data, configuration or None, split=part)
        try:
            rows = load().flatten()
        except OSError:  # perhaps its cache cannot be written
            with tempfile.TemporaryDirectory() as folder:
                rows = load(cache_dir=folder, keep_in_memory=True).flatten()
        rows.data.validate(full=True)  # texts that are not UTF-8
        return rows
    except Exception as error:  # of many kinds: no network, no such split, a broken or empty file
        cause = error.__cause__ or error
        raise ValueError(
            f"data: cannot load {data!r} ({cause!r}): give a .jsonl, .json or .parquet file with "
            "an object a row, or a hub data set; for a gated one: `hf auth login`"
        ) from error


# ---------------------------------------------------------------- problems
def gold_answer(value, own_grader: bool = False) -> str:
    """The answer in an answer field; "" if there is none that can be graded.

    Of a text it is the last box, or what follows the last "####" (GSM8K), or else all of it. A list
    of one answer is this answer, also one of texts in JSON (SkyWork-OR1). The text "[0, 1]" is an
    interval. own_grader: it may be of any length, and other lists are given as JSON.
    """
    if isinstance(value, str) and value.startswith('["'):
        with suppress(ValueError):  # it is no JSON
            value = json.loads(value)
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    if isinstance(value, list):
        return json.dumps(value) if own_grader else ""
    if value is None or value != value:  # NaN is what pandas writes for a gap
        return ""
    text = str(value)
    answer = (reward.extract_boxed(text) or text.rpartition("####")[2]).strip()
    is_short = len(answer) <= MAX_ANSWER_CHARACTERS
    return answer if is_short or own_grader else ""


def read_problems(rows: Sequence[dict], *fields: str, own_grader: bool = False) -> list[Problem]:
    """Prompt and answer of every usable row. Prints how many rows are left out for which reason.

    fields: the names of the prompt's and the answer's field; without them PROMPT_FIELDS and
    ANSWER_FIELDS are tried. own_grader: see `gold_answer`. Every prompt is taken once. Raises
    ValueError for any other number of fields, and, naming those that there are, if no row can be
    used.
    """
    if len(fields) not in (0, 2):
        raise ValueError(f"fields takes two names, PROMPT ANSWER, got {list(fields)}")
    prompt_names = fields[:1] or PROMPT_FIELDS
    answer_names = fields[1:] or ANSWER_FIELDS
    problems: dict[str, Problem] = {}
    left_out: Counter[str] = Counter()
    for row in rows:
        prompt = first_field(row, prompt_names)
        answer = gold_answer(first_field(row, answer_names), own_grader)
        if not is_prompt(prompt):
            left_out["no prompt"] += 1
        elif not answer:
            left_out["no answer, or a long one, or several"] += 1
        elif str(prompt) in problems:
            left_out["the prompt was there before"] += 1
        else:
            problems[str(prompt)] = Problem(prompt, answer)
    print(f"{len(problems)} of {len(rows)} rows; left out: {dict(left_out)}")
    if not problems:
        raise ValueError(
            f"data: no row has a prompt in a field of {prompt_names} and an answer in one of "
            f"{answer_names}; the first has {list(rows[0])}: name them with --fields PROMPT ANSWER"
        )
    return list(problems.values())


def is_prompt(value) -> bool:
    """Whether a prompt's field holds a text, or messages that each have a role and a text."""
    texts = [value]
    if isinstance(value, list) and all(isinstance(message, dict) for message in value):
        texts = [message.get(name) for message in value for name in ("role", "content")]
    return all(isinstance(text, str) for text in texts) and bool("".join(texts).strip())


def first_field(row: dict, names: Sequence[str]):
    """The value of the first of `names` that the row has; "" without one."""
    for name in names:
        if row.get(name) is not None:
            return row[name]
    return ""


# ---------------------------------------------------------------- prompts
def tokenize(
    problems: list[Problem], tokenizer, max_prompt_tokens: int, instruction: str = INSTRUCTION
) -> list[Problem]:
    """Problems with token ids as prompts: all that the model reads, with the chat template.

    A text gets the instruction; messages bring their own. Without a template a single message is
    read as it is. Prints how many are too long and left out. Raises ValueError for messages that
    cannot be written, and if max_prompt_tokens is below 1.
    """
    if max_prompt_tokens < 1:
        raise ValueError(
            f"max_new_tokens leaves {max_prompt_tokens} of the model's positions for a prompt:"
            f" lower it by {1 - max_prompt_tokens} or more"
        )
    short = []
    for prompt, answer in problems:
        messages = prompt
        if isinstance(prompt, str):
            text = f"{prompt.strip()}\n{instruction}".strip()
            messages = [{"role": "user", "content": text}]
        if len(messages) == 1 and not tokenizer.chat_template:
            encoded = tokenizer(messages[0]["content"] + "\n")
        else:
            try:
                encoded = tokenizer.apply_chat_template(
                    messages, add_generation_prompt=True, return_dict=True
                )
            except Exception as error:  # whatever the template raises
                roles = [message["role"] for message in messages]
                raise ValueError(
                    f"data: the chat template of {tokenizer.name_or_path!r} cannot write a row with"
                    f" the roles {roles} ({error!r}): change the rows, or take another model"
                ) from error
        if len(encoded["input_ids"]) <= max_prompt_tokens:
            short.append(Problem(encoded["input_ids"], answer))
    print(f"{len(problems) - len(short)} prompts of more than {max_prompt_tokens} tokens left out")
    return short


def problems_of_step(problems: list[Problem], step: int, count: int, seed: int) -> list[Problem]:
    """The `count` problems of step 1, 2, ...: a new random order for every pass over the data.

    A function of its arguments alone, so that a resumed run needs no cursor.
    """
    epoch, position = divmod((step - 1) * count, len(problems))
    orders = []
    while len(orders) < position + count:
        orders += random.Random(f"{seed}/{epoch}").sample(problems, len(problems))
        epoch += 1
    return orders[position : position + count]


# ---------------------------------------------------------------- the task of train.py
def load_task(options) -> Task:
    """Training problems, held-out problems and grader of train.py: Countdown, or its --data.

    Checks all that can be checked without the weights: raises ValueError for what cannot be
    loaded or does not fit. Prints how many rows were left out, and why.
    """
    if not options.data:
        return countdown_task()
    config, tokenizer = load_without_weights(options.model)
    room = positions_of(config) - options.max_new_tokens
    room -= max(options.partial_budget - 1, 0)  # a partial rollout may get longer before it is cut
    rows = load_rows(options.data, split="train")
    problems = read_problems(rows, *options.fields, own_grader=bool(options.reward))
    problems = tokenize(problems, tokenizer, min(room, MAX_PROMPT_TOKENS))
    if len(problems) < options.held_out + options.prompts_per_step:
        raise ValueError(
            f"data: {len(problems)} problems are too few to hold out {options.held_out} and train "
            f"on {options.prompts_per_step} a step: lower held_out, prompts_per_step, or, where "
            "prompts are too long, max_new_tokens"
        )
    # What the grader lacks is said now rather than after minutes.
    if options.reward:
        grade = partial(reward.own_reward, options.reward)
        grade(problems[0].answer, problems[0].answer)
    else:
        grade = reward.grade_math
        reward.check_math_verify()
    random.Random(0).shuffle(problems)
    return Task(problems[options.held_out :], problems[: options.held_out], grade)


def countdown_task() -> Task:
    """Countdown: problems of three digits for a model that reads characters."""
    tokenizer = countdown.build_tokenizer()
    parts = []
    for problems in countdown.problems():
        parts.append([Problem(tokenizer(text)["input_ids"], answer) for text, answer in problems])
    return Task(*parts, countdown.grade)


def positions_of(config) -> int:
    """How many tokens a model can read, of its configuration; sys.maxsize where that has no end."""
    return getattr(config.get_text_config(), "max_position_embeddings", None) or sys.maxsize
