"""Load problems with verifiable answers, from the hub or a local file.

train.py --data and eval_aime.py use it: `load_rows` gives rows, `read_problems` finds prompt and
answer in them, and `tokenize` writes the prompts as the model reads them.
"""

import json
import random
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from decimal import Decimal
from functools import partial
from numbers import Integral, Real
from pathlib import Path
from typing import NamedTuple

import reward
from support.loading import load_without_weights

INSTRUCTION = r"Please reason step by step, and put your final answer within \boxed{}."
MAX_PROMPT_TOKENS = 1024  # longer prompts are not trained on
MAX_ANSWER_CHARACTERS = 200  # longer ones are solutions without a box, or programs

# Names that are tried in this order; a.b is the field b inside the field a. An `instruction` is
# followed by the row's `input`, as in Alpaca.
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

_FILES = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}  # the loaders of `datasets`


class Problem(NamedTuple):
    """A problem of a data set or of Countdown."""

    # text or the messages of a chat, as read; token ids after `tokenize`
    prompt: str | list[dict] | list[int]
    answer: str


class Task(NamedTuple):
    """Prompts and a grading function. The prompts are token ids."""

    train: list[Problem]
    held_out: list[Problem]
    # response, answer -> reward from 0 to 1; no lambda, because it is sent to worker processes
    grader: Callable[[str, str], float]


def problems_of_step(problems: list[Problem], step: int, count: int, seed: int) -> list[Problem]:
    """Return the `count` problems of a step; steps begin at 1.

    Every pass over the data has a new random order. The result depends on the arguments alone,
    so a resumed run needs no record of its position.
    """
    epoch, position = divmod((step - 1) * count, len(problems))
    order = []
    while len(order) < position + count:
        order += random.Random(f"{seed}/{epoch}").sample(problems, len(problems))
        epoch += 1
    return order[position : position + count]


# ---------------------------------------------------------------- rows
def load_rows(data: str, split: str) -> Sequence[dict]:
    """Load the rows of a local .jsonl, .json or .parquet file, or of a data set of the hub.

    data: a file, or NAME, NAME:SPLIT or NAME:CONFIGURATION/SPLIT, where NAME is a hub id or a
    folder in the hub's layout. NAME alone means `split` of the configuration "main", or of the
    default one. A field b inside a field a is called a.b. Raises ValueError for what cannot be
    loaded.
    """
    name, _, named_split = data.rpartition(":")
    if name and not Path(data).exists():
        if Path(name).suffix in _FILES:
            raise ValueError(
                f"data: {data!r} names a split, but a local file has none: give {name!r}"
            )
        data = name
        split = named_split
    try:
        import datasets  # slow, and Countdown does not need it

        if kind := _FILES.get(Path(data).suffix):
            return datasets.load_dataset(kind, data_files=data, split="train").flatten()
        configuration, _, split = split.rpartition("/")
        if not configuration and "main" in datasets.get_dataset_config_names(data):
            configuration = "main"
        return datasets.load_dataset(data, configuration or None, split=split).flatten()
    except Exception as error:  # of many kinds: no network, no such split, a broken or empty file
        raise ValueError(
            f"data: cannot load {data!r} ({error.__cause__ or error!r}). Give a .jsonl, .json or"
            " .parquet file or a hub data set; for a gated one, run `hf auth login`"
        ) from error


# ---------------------------------------------------------------- problems
def gold_answer(value, own_grader: bool = False) -> str:
    """Return the answer in an answer field, or "" if there is none that can be graded.

    In a text it is the last box, or what follows the last "####" (GSM8K), or else everything. A
    list of one answer, which may be JSON text (SkyWork-OR1), counts as that answer. Floats are
    written without an exponent. With own_grader any length is allowed, and longer lists are
    returned as JSON.
    """
    if isinstance(value, str) and value.startswith('["'):
        with suppress(ValueError):  # it may be no JSON
            value = json.loads(value)
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    if isinstance(value, list):
        return json.dumps(value) if own_grader else ""
    text = str(value)
    if isinstance(value, Real) and not isinstance(value, Integral):
        text = f"{Decimal(text):f}"  # 0.00001 instead of 1e-05
    answer = (reward.extract_boxed(text) or text.rpartition("####")[2]).strip()
    is_usable = own_grader or len(answer) <= MAX_ANSWER_CHARACTERS
    return answer if is_usable else ""


def read_problems(rows: Sequence[dict], *fields: str, own_grader: bool = False) -> list[Problem]:
    """Return prompt and answer of every usable row, each prompt once; print what is left out.

    fields: the names of the prompt's and the answer's field, by default found among PROMPT_FIELDS
    and ANSWER_FIELDS. own_grader: see `gold_answer`. Raises ValueError if no row can be used.
    """
    if len(fields) not in (0, 2):
        raise ValueError(f"fields must be two names, PROMPT ANSWER, got {list(fields)}")
    prompt_names = fields[:1] or PROMPT_FIELDS
    answer_names = fields[1:] or ANSWER_FIELDS
    problems = {}  # text of the prompt -> problem
    left_out = Counter()
    for row in rows:
        prompt = first_field(row, prompt_names)
        if row.get("input") and prompt == row.get("instruction"):
            prompt = f"{prompt}\n\n{row['input']}"
        answer = gold_answer(first_field(row, answer_names), own_grader)
        key = str(prompt).strip()
        if not prompt or not key:
            left_out["no prompt"] += 1
        elif not answer:
            left_out["no short answer"] += 1
        elif key in problems:
            left_out["repeated prompt"] += 1
        else:
            problems[key] = Problem(prompt, answer)
    print(f"{len(problems)} of {len(rows)} rows; left out: {dict(left_out)}")
    if not problems:
        raise ValueError(
            f"data: no row has both a prompt ({prompt_names}) and an answer ({answer_names}). The"
            f" first row has {list(rows[0])}: name the two with --fields PROMPT ANSWER"
        )
    return list(problems.values())


def first_field(row: dict, names: Sequence[str]):
    """Return the value of the first of `names` that the row has, or ""."""
    for name in names:
        if row.get(name) is not None:
            return row[name]
    return ""


# ---------------------------------------------------------------- prompts
def tokenize(
    problems: list[Problem], tokenizer, max_prompt_tokens: int, instruction: str = INSTRUCTION
) -> list[Problem]:
    """Return the problems with the token ids that the model reads as prompts.

    A text is followed by the instruction and becomes a user's message; messages are used as they
    are. The messages go through the chat template. Without a template, a single message is read as
    plain text. Prompts of more than max_prompt_tokens are left out, and how many is printed. Raises
    ValueError if there is no room for a prompt, or if the template refuses the messages.
    """
    if max_prompt_tokens < 1:
        too_many = 1 - max_prompt_tokens
        raise ValueError(f"max_new_tokens leaves no room for a prompt: lower it by {too_many}")
    short = []
    for prompt, answer in problems:
        messages = prompt
        if isinstance(prompt, str):
            text = f"{prompt.strip()}\n{instruction}".strip()
            messages = [{"role": "user", "content": text}]
        try:
            if tokenizer.chat_template or len(messages) > 1:
                encoded = tokenizer.apply_chat_template(
                    messages, add_generation_prompt=True, return_dict=True
                )
            else:
                encoded = tokenizer(messages[0]["content"] + "\n")
        except Exception as error:  # whatever the template raises
            raise ValueError(
                f"data: the chat template of {tokenizer.name_or_path!r} cannot write the messages"
                f" {messages!r:.200} ({error!r}). Change them, or use another model"
            ) from error
        if len(encoded.input_ids) <= max_prompt_tokens:
            short.append(Problem(encoded.input_ids, answer))
    print(f"{len(problems) - len(short)} prompts of more than {max_prompt_tokens} tokens left out")
    return short


# ---------------------------------------------------------------- the task of train.py --data
def load_task(options) -> Task:
    """Return the problems of --data and their grader.

    Raises ValueError for whatever can be checked before the model's weights are loaded.
    """
    config, tokenizer = load_without_weights(options.model)
    # A partial rollout may grow past max_new_tokens before it is cut.
    room = positions_of(config) - options.max_new_tokens - options.partial_budget
    rows = load_rows(options.data, split="train")
    problems = read_problems(rows, *options.fields, own_grader=bool(options.reward))
    problems = tokenize(problems, tokenizer, min(room, MAX_PROMPT_TOKENS))
    if len(problems) < options.held_out + options.prompts_per_step:
        raise ValueError(
            f"data: {len(problems)} problems are too few to hold out {options.held_out} and train"
            f" on {options.prompts_per_step} per step: lower held_out or prompts_per_step"
        )
    if options.reward:
        grader = partial(reward.own_reward, options.reward)
        grader(problems[0].answer, problems[0].answer)
    else:
        grader = reward.grade_math
        reward.check_math_verify()
    random.Random(0).shuffle(problems)
    return Task(problems[options.held_out :], problems[: options.held_out], grader)


def positions_of(config) -> int:
    """Return how many tokens a model can read, or sys.maxsize if there is no limit.

    With longrope it is the original length. A longer text rotates all its tokens by other angles,
    also those that were drawn and cached before it became longer.
    """
    config = config.get_text_config()
    limits = [getattr(config, "max_position_embeddings", None)]
    rope = getattr(config, "rope_parameters", None) or {}
    for settings in (rope, *rope.values()):  # of all layers, or of each kind of layer
        if isinstance(settings, dict) and settings.get("rope_type") == "longrope":
            limits.append(settings.get("original_max_position_embeddings"))
    return min(filter(None, limits), default=sys.maxsize)
