"""Problems with verifiable answers, of the hub or of a local file, as prompts.

For train.py --data and eval_aime.py --data.
"""

import json
import random
import re
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import NamedTuple

from transformers import AutoConfig, AutoTokenizer, GenerationConfig

from reward import (
    Problem,
    extract_boxed,
    grade_math,
    import_math_verify,
    load_reward,
    number,
    own_reward,
)
from rollout import eos_token_ids
from support.files import read_lines
from support.models import load_pretrained
from support.workers import say

INSTRUCTION = r"Please reason step by step, and put your final answer within \boxed{}."
MAX_PROMPT_TOKENS = 1024  # longer prompts are not trained on

# Tried in this order; a dot looks inside a field. In `solution` and in GSM8K's `answer` the answer
# is the end of a text.
PROMPT_FIELDS = ("prompt", "problem", "question", "query", "instruction", "input")
ANSWER_FIELDS = (
    "answer",
    "ground_truth",
    "reward_model.ground_truth",
    "final_answer",
    "target",
    "solution",
)

_SPLIT = re.compile(r"[\w.-]+(/[\w.-]+)?")


class Task(NamedTuple):
    """Prompts and a grading function."""

    train: list[Problem]
    held_out: list[Problem]
    grade: Callable[[str, str], float | bool]  # response, answer -> reward


# ---------------------------------------------------------------- rows
def name_and_split(data: str, default: str) -> tuple[str, str]:
    """Take NAME:SPLIT or NAME:CONFIGURATION/SPLIT apart; any other text is a name: `default`.

    A file or folder may have such a name, too: what is there is not taken apart.
    """
    name, _, split = data.rpartition(":")
    has_split = name and _SPLIT.fullmatch(split)
    if has_split and not Path(data).exists():
        return name, split
    return data, default


def load_rows(source: str, split: str = "train") -> Sequence[dict]:
    """Rows of a local .jsonl, .json or .parquet file, or of a data set of the hub.

    split: SPLIT or CONFIGURATION/SPLIT of a data set of the hub, or of a local folder in the hub's
    layout. The configuration "main" is taken where none is named and there is one.

    Raises ValueError for what cannot be loaded or is empty.
    """
    path = Path(source)
    is_file = path.suffix in (".jsonl", ".json", ".parquet")
    is_path = source.startswith((".", "/", "~")) or source.count("/") > 1
    if (is_file or is_path) and not path.exists():
        raise ValueError(f"data: no file {source!r}")
    if path.suffix not in (".jsonl", ".json"):
        import_datasets()
    try:
        rows = _read_file(path) if is_file else _read_data_set(source, split)
    except Exception as error:  # of many kinds: no network, no such split, a broken file
        cause = f"{type(error).__name__}: {error}"
        remedy = ""
        if not is_file:
            remedy = (
                ". Give a .jsonl, .json or .parquet file, or a hub data set; for a gated one: "
                "`hf auth login`"
            )
        raise ValueError(f"data: cannot load {source!r} ({cause}){remedy}") from error
    if len(rows) == 0:
        raise ValueError(f"data: {source!r} is empty")
    return rows


def _read_file(path: Path) -> Sequence[dict]:
    """Rows of a file by its suffix. Its name may hold [, ] and *: they are no pattern."""
    if path.suffix == ".jsonl":  # row by row: rows may differ in their fields and types
        return read_lines(path)
    if path.suffix == ".json":
        return _read_json(path)
    datasets = import_datasets()
    from pyarrow import parquet  # comes with datasets

    return datasets.Dataset(parquet.read_table(path))


def _read_json(path: Path) -> list[dict]:
    """Rows of a file that is a JSON list of objects, or one object a line."""
    try:
        rows = json.loads(path.read_bytes())
    except ValueError:
        return read_lines(path)
    if isinstance(rows, dict):
        rows = [rows]
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ValueError("expected a list of objects, or one object a line")
    return rows


def _read_data_set(source: str, split: str) -> Sequence[dict]:
    """Rows of a data set of the hub, or of a local folder in its layout."""
    datasets = import_datasets()
    configuration, _, part = split.rpartition("/")
    if not configuration and "main" in datasets.get_dataset_config_names(source):
        configuration = "main"
    return datasets.load_dataset(source, configuration or None, split=part)


def import_datasets() -> ModuleType:
    """The package, imported where data are read with it: it is slow.

    Raises ValueError with the remedy if it is not installed.
    """
    try:
        import datasets
    except ImportError as error:
        raise ValueError("--data needs the package datasets: pip install datasets") from error
    datasets.disable_progress_bars()  # those of the download stay
    return datasets


def find_field(row: dict, names: Sequence[str]):
    """The value of the first of `names` that the row has, in any capitalisation; None without one.

    A name a.b is the field b inside the field a.
    """
    for name in names:
        value = row
        for part in name.lower().split("."):
            value = _field(value, part)
        if value is not None:
            return value
    return None


def _field(value, name: str):
    """The field with this name, in lower case, of what may be no dict, or not have it: None."""
    if isinstance(value, dict):
        for field, content in value.items():
            if field.lower() == name:
                return content
    return None


# ---------------------------------------------------------------- problems
def gold_answer(value) -> str | list | None:
    """The answer in an answer field; None if there is none.

    Of a text it is the last box, or what follows the last "####" (GSM8K), or else all of it. A list
    of one answer, also one written in JSON (SkyWork-OR1), is this answer; any other list or object
    is given as a list. But a text of two numbers such as "[0, 1]" is an interval, and stays a text
    as "[0, 1)" does, which is no JSON.
    """
    if isinstance(value, str) and value.lstrip().startswith("["):
        value = _list_or_interval(value)
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    if isinstance(value, (list, dict)):
        return [value]
    is_nan = value != value
    if value is None or is_nan:
        return None
    text = str(value)
    answer = extract_boxed(text) or text.rpartition("####")[2]
    return answer.strip()


def _list_or_interval(text: str) -> str | list:
    """The list that a text is in JSON; the text itself for two numbers, and for what is no JSON."""
    try:
        parts = json.loads(text)
    except (ValueError, RecursionError):  # RecursionError: thousands of brackets
        return text
    is_interval = len(parts) == 2 and all(isinstance(part, (int, float)) for part in parts)
    return text if is_interval else parts


def read_problems(
    rows: Sequence[dict], *fields: str, own_grader: bool = False
) -> tuple[list[Problem], Counter[str]]:
    """Prompt and answer of every usable row, and how many rows were skipped for which reason.

    fields: the names of the prompt's and the answer's field; without them PROMPT_FIELDS and
    ANSWER_FIELDS are tried. own_grader: answers may be of any length, and lists are given as JSON.
    Every prompt is taken once. Raises ValueError, naming the fields that there are, if no row has
    those that are wanted.
    """
    prompt_names = fields[:1] or PROMPT_FIELDS
    answer_names = fields[1:] or ANSWER_FIELDS
    _check_fields(rows, prompt_names)
    _check_fields(rows, answer_names)
    problems: dict[str, Problem] = {}  # by the prompt in JSON
    skipped: Counter[str] = Counter()
    for row in rows:
        prompt = find_field(row, prompt_names)
        value = find_field(row, answer_names)
        answer = gold_answer(value)
        if own_grader and isinstance(answer, list):
            answer = value if isinstance(value, str) else json.dumps(value, default=str)
        key = json.dumps(prompt, default=str)
        reason = _why_unusable(prompt, answer, own_grader)
        if not reason and key in problems:
            reason = "with a prompt that was there before"
        if reason:
            skipped[reason] += 1
        else:
            problems[key] = Problem(prompt, answer)
    return list(problems.values()), skipped


def _check_fields(rows: Sequence[dict], names: Sequence[str]) -> None:
    """Raise ValueError if no row has any of these fields."""
    if any(find_field(row, names) is not None for row in rows):
        return
    wanted = " or ".join(names)
    present = ", ".join(rows[0])
    raise ValueError(
        f"data: no row has a field {wanted}; the first has {present}: "
        "name them with --fields PROMPT ANSWER"
    )


def _why_unusable(prompt, answer: str | list | None, own_grader: bool) -> str:
    """Why a row cannot be used, in words that follow "3 rows"; "" if it can."""
    is_blank = isinstance(prompt, str) and not prompt.strip()
    if not prompt or is_blank:
        return "without a prompt"
    if not (isinstance(prompt, str) or _is_chat(prompt)):
        return "with a prompt that is neither text nor messages"
    if not _is_unicode(prompt):
        return "with a prompt that is no valid Unicode"
    if not answer:
        return "without an answer"
    if isinstance(answer, list):
        return "with an answer that is a list"
    if len(answer) > 200 and not own_grader:  # a text without a box, a program
        return "with an answer of more than 200 characters"
    return ""


def _is_chat(prompt) -> bool:
    """Whether a prompt is a list of messages, each with a role and a text."""
    if not isinstance(prompt, list):
        return False
    for message in prompt:
        if not isinstance(message, dict):
            return False
        if not isinstance(message.get("role"), str) or not isinstance(message.get("content"), str):
            return False
    return True


def _is_unicode(prompt: str | list[dict]) -> bool:
    """False for a text, or messages, with half of a surrogate pair: no tokenizer takes them."""
    texts = [prompt] if isinstance(prompt, str) else [message["content"] for message in prompt]
    try:
        for text in texts:
            text.encode()
    except UnicodeEncodeError:
        return False
    return True


# ---------------------------------------------------------------- prompts
def prompt_text(
    tokenizer, prompt: str | list[dict], instruction: str = INSTRUCTION, system: str = ""
) -> str:
    """All that the model reads, in the tokenizer's chat template if it has one.

    A text gets the instruction; messages bring their own. Without a template a single message is
    given as it is. Raises ValueError for several messages without a template, and where the
    template refuses them.
    """
    if isinstance(prompt, str):
        text = f"{prompt.strip()}\n{instruction}".strip()
        messages = [{"role": "user", "content": text}]
    else:
        messages = list(prompt)
    if system:
        messages.insert(0, {"role": "system", "content": system})
    roles = ", ".join(message["role"] for message in messages)
    if tokenizer.chat_template:
        try:
            return tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, tokenize=False
            )
        except Exception as error:  # whatever it raises: "System role not supported", ...
            raise ValueError(
                f"the tokenizer's chat template refuses messages of {roles} ({error})"
            ) from error
    if len(messages) > 1:
        raise ValueError(
            f"tokenizer has no chat template for messages of {roles}: take an instruct model, or "
            "no system prompt"
        )
    return messages[0]["content"] + "\n"


def prompt_token_ids(tokenizer, text: str) -> list[int]:
    """Token ids of what prompt_text gives. A chat template has written the BOS already."""
    encoded = tokenizer(text, add_special_tokens=not tokenizer.chat_template)
    return encoded["input_ids"]


def tokenize(
    problems: list[Problem], tokenizer, max_prompt_tokens: int, **prompt_options
) -> tuple[list[Problem], int]:
    """Problems with token ids as prompts, and how many are left out as they are too long.

    prompt_options: instruction and system of `prompt_text`. Raises ValueError for a tokenizer that
    encodes nothing.
    """
    short = []
    for prompt, answer in problems:
        text = prompt_text(tokenizer, prompt, **prompt_options)
        ids = prompt_token_ids(tokenizer, text)
        if not ids:  # a model's folder without tokenizer files gives such a tokenizer
            shown = str(prompt)[:100]
            raise ValueError(
                f"the tokenizer encodes nothing of {shown!r}: does the model's folder hold its "
                "own? If not, save it there: AutoTokenizer.from_pretrained(BASE)"
                ".save_pretrained(FOLDER)"
            )
        if len(ids) <= max_prompt_tokens:
            short.append(Problem(ids, answer))
    return short, len(problems) - len(short)


def prompts_of_step(problems: list[Problem], step: int, count: int, seed: int) -> list[Problem]:
    """The `count` problems of step 1, 2, ...: a new random order for every pass over the data.

    A function of its arguments alone, so that a resumed run needs no cursor.
    """
    chosen = []
    for index in range((step - 1) * count, step * count):
        epoch, position = divmod(index, len(problems))
        if not chosen or position == 0:
            rng = random.Random(f"{seed}/{epoch}")
            order = rng.sample(range(len(problems)), len(problems))
        chosen.append(problems[order[position]])
    return chosen


# ---------------------------------------------------------------- the task of train.py --data
def load_task(options) -> Task:
    """Training problems, held-out problems and grader of train.py's --data for its --model.

    Checks all that can be checked without the weights: raises ValueError for what cannot be loaded
    or does not fit. Says how many rows were left out, and why.
    """
    own_grader = bool(options.reward)
    if own_grader:
        load_reward(options.reward)  # first: it is quick to fail
        grade = partial(own_reward, options.reward)
    else:
        grade = grade_math
    tokenizer = load_pretrained(AutoTokenizer, options.model)
    config = load_pretrained(AutoConfig, options.model)
    _check_eos(options.model, config, tokenizer)
    max_prompt_tokens = _longest_prompt(options, config)

    source, split = name_and_split(options.data, default="train")
    rows = load_rows(source, split)
    problems, skipped = read_problems(rows, *options.fields, own_grader=own_grader)
    problems, too_long = tokenize(
        problems, tokenizer, max_prompt_tokens, instruction=options.instruction
    )
    if too_long:
        skipped[f"with a prompt of more than {max_prompt_tokens} tokens"] = too_long
    left_out = len(rows) - len(problems)
    summary = f"{len(rows)} rows, {len(problems)} used, {left_out} left out"
    say(", ".join([f"{options.data}: {summary}", *reasons(skipped)]))

    _check_vocabulary(problems, options.model, config)
    wanted = options.held_out + options.prompts_per_step
    if len(problems) < wanted:
        raise ValueError(
            f"data: {len(problems)} problems are too few to hold out {options.held_out} and train "
            f"on {options.prompts_per_step} a step: lower held_out or prompts_per_step"
        )
    if own_grader:
        grade(problems[0].answer, problems[0].answer)  # fails now rather than after minutes
    elif any(number(problem.answer) is None for problem in problems):
        import_math_verify()
    random.Random(0).shuffle(problems)
    held_out = problems[: options.held_out]
    return Task(problems[options.held_out :], held_out, grade)


def reasons(skipped: Counter[str]) -> list[str]:
    """What read_problems skipped, as ["2 without an answer", ...]."""
    return [f"{count} {reason}" for reason, count in skipped.items()]


def positions_of(config) -> int:
    """How many tokens a model can read, of its configuration; sys.maxsize where that has no end."""
    return getattr(config.get_text_config(), "max_position_embeddings", None) or sys.maxsize


def _check_eos(name: str, config, tokenizer) -> None:
    """Raise ValueError if neither model nor tokenizer says which token ends a response."""
    generation_config = None
    with suppress(OSError):  # there need not be one
        generation_config = GenerationConfig.from_pretrained(name)
    model = SimpleNamespace(config=config, generation_config=generation_config)
    eos_token_ids(model, tokenizer)


def _longest_prompt(options, config) -> int:
    """Most tokens of a prompt: MAX_PROMPT_TOKENS, or fewer if the model's positions end before.

    Raises ValueError if they leave no room for any prompt.
    """
    positions = positions_of(config)
    # A partial rollout may go beyond max_new_tokens before it is cut.
    beyond = max(options.partial_budget - 1, 0)
    room = positions - options.max_new_tokens - beyond
    if room < 1:
        raise ValueError(
            f"max_new_tokens {options.max_new_tokens} (+ partial_budget - 1) leaves no room for a "
            f"prompt in the {positions} positions of {options.model}: lower it"
        )
    if room < MAX_PROMPT_TOKENS:
        say(f"prompts may have {room} tokens: {options.model} has {positions} positions")
    return min(room, MAX_PROMPT_TOKENS)


def _check_vocabulary(problems: list[Problem], name: str, config) -> None:
    """Raise ValueError if a prompt holds a token that the model does not know."""
    largest = max((max(problem.prompt) for problem in problems), default=0)
    vocabulary = config.get_text_config().vocab_size
    if largest >= vocabulary:
        raise ValueError(
            f"model: the tokenizer writes token {largest}, but {name} has {vocabulary}: take the "
            "model's own tokenizer"
        )
