"""Problems with verifiable answers, of the hub or of a local file, as prompts.

For train.py --data and eval_aime.py.
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

from transformers import AutoConfig, AutoTokenizer

import countdown
import reward
from reward import Problem

INSTRUCTION = r"Please reason step by step, and put your final answer within \boxed{}."
MAX_PROMPT_TOKENS = 1024  # longer prompts are not trained on
MAX_ANSWER_CHARACTERS = 200  # longer ones are solutions without a box, or programs

# Tried in this order; a dot looks inside a field. In `solution` and in GSM8K's `answer` the answer
# is the end of a text.
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
    grade: Callable[[str, str], float | bool]  # response, answer -> reward from 0 to 1


# ---------------------------------------------------------------- rows
def name_and_split(data: str, default: str) -> tuple[str, str]:
    """Take NAME:SPLIT or NAME:CONFIGURATION/SPLIT apart; the split of any other text is `default`.

    A file or folder may have a colon in its name: what is there is not taken apart.
    """
    name, _, split = data.rpartition(":")
    if not name or Path(data).exists():
        return data, default
    return name, split


def load_rows(source: str, split: str = "train") -> Sequence[dict]:
    """Rows of a local .jsonl, .json or .parquet file, or of a data set of the hub.

    split: SPLIT or CONFIGURATION/SPLIT of a data set of the hub, or of a local folder in the hub's
    layout. The configuration "main" is taken where none is named and there is one.

    Raises ValueError for what cannot be loaded or is empty.
    """
    kind = _FILES.get(Path(source).suffix)
    try:
        import datasets  # slow, and not wanted by Countdown
    except ImportError as error:
        raise ValueError("data needs the package datasets: pip install datasets") from error
    datasets.disable_progress_bars()  # those of the download stay
    try:
        with tempfile.TemporaryDirectory() as temporary:
            options = {}
            if not _can_be_written(Path(datasets.config.HF_DATASETS_CACHE)):
                options = {"cache_dir": temporary, "keep_in_memory": True}
            if kind:
                files = glob.escape(source)  # a * or [ in a file's name is no pattern
                return datasets.load_dataset(kind, data_files=files, split="train", **options)
            configuration, _, part = split.rpartition("/")
            if not configuration and "main" in datasets.get_dataset_config_names(source):
                configuration = "main"
            return datasets.load_dataset(source, configuration or None, split=part, **options)
    except Exception as error:  # of many kinds: no network, no such split, a broken or empty file
        cause = error.__cause__ or error
        raise ValueError(
            f"data: cannot load {source!r} ({cause!r}): give a .jsonl, .json or .parquet file with "
            "an object a row, or a hub data set; for a gated one: `hf auth login`"
        ) from error


def _can_be_written(folder: Path) -> bool:
    """Whether a file can be made in a folder, which is made where it is not there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError:
        return False
    return True


def find_field(row: dict, names: Sequence[str]):
    """The value of the first of `names` that the row has; None without one.

    A name a.b is the field b inside the field a.
    """
    for name in names:
        value = row
        for part in name.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        if value is not None:
            return value
    return None


# ---------------------------------------------------------------- problems
def gold_answer(value) -> str | list | dict | None:
    """The answer in an answer field; None if there is none.

    Of a text it is the last box, or what follows the last "####" (GSM8K), or else all of it. A list
    of one answer is this answer, also one of texts in JSON (SkyWork-OR1); any other list or object
    is given as it is. The text "[0, 1]" is an interval.
    """
    if isinstance(value, str) and value.startswith('["'):
        with suppress(ValueError):  # it is no JSON
            value = json.loads(value)
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    if value is None or isinstance(value, (list, dict)):
        return value
    if value != value:  # NaN
        return None
    text = str(value)
    answer = reward.extract_boxed(text) or text.rpartition("####")[2]
    return answer.strip()


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
    for names in (prompt_names, answer_names):
        if all(find_field(row, names) is None for row in rows):
            wanted = " or ".join(names)
            present = ", ".join(rows[0])
            raise ValueError(
                f"data: no row has a field {wanted}; the first has {present}: "
                "name them with --fields PROMPT ANSWER"
            )
    problems: dict[str, Problem] = {}  # by the prompt in JSON
    skipped: Counter[str] = Counter()
    for row in rows:
        prompt = find_field(row, prompt_names)
        answer = gold_answer(find_field(row, answer_names))
        if own_grader and isinstance(answer, (list, dict)):
            answer = json.dumps(answer, default=str)
        key = json.dumps(prompt, default=str)
        reason = _why_unusable(prompt, answer, own_grader)
        if not reason and key in problems:
            reason = "with a prompt that was there before"
        if reason:
            skipped[reason] += 1
        else:
            problems[key] = Problem(prompt, answer)
    return list(problems.values()), skipped


def _why_unusable(prompt, answer: str | list | dict | None, own_grader: bool) -> str:
    """Why a row cannot be used, in words that follow "3 rows"; "" if it can."""
    is_blank = isinstance(prompt, str) and not prompt.strip()
    if not prompt or is_blank:
        return "without a prompt"
    if not (isinstance(prompt, str) or _is_chat(prompt)):
        return "with a prompt that is neither text nor messages"
    if not answer:
        return "without an answer"
    if not isinstance(answer, str):
        return "with an answer that is a list"
    if len(answer) > MAX_ANSWER_CHARACTERS and not own_grader:
        return f"with an answer of more than {MAX_ANSWER_CHARACTERS} characters"
    return ""


def _is_chat(prompt) -> bool:
    """Whether a prompt is a list of messages, each with a role and a text."""
    if not isinstance(prompt, list):
        return False
    contents = [find_field(message, ["content"]) for message in prompt]
    has_roles = all(find_field(message, ["role"]) for message in prompt)
    return has_roles and all(isinstance(content, str) for content in contents)


def reasons(skipped: Counter[str]) -> list[str]:
    """What read_problems skipped, as ["2 without an answer", ...]."""
    return [f"{count} {reason}" for reason, count in skipped.items()]


# ---------------------------------------------------------------- prompts
def prompt_text(
    tokenizer, prompt: str | list[dict], instruction: str = INSTRUCTION, system: str = ""
) -> str:
    """All that the model reads, in the tokenizer's chat template if it has one.

    A text gets the instruction; messages bring their own. Without a template a single message is
    given as it is. Raises ValueError for several messages without a template, and where the
    template refuses them.
    """
    messages = prompt
    if isinstance(prompt, str):
        text = f"{prompt.strip()}\n{instruction}".strip()
        messages = [{"role": "user", "content": text}]
    if system:
        messages = [{"role": "system", "content": system}, *messages]
    roles = ", ".join(message["role"] for message in messages)
    if tokenizer.chat_template:
        try:
            return tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, tokenize=False
            )
        except Exception as error:  # whatever it raises: "System role not supported", ...
            raise ValueError(
                f"model: its tokenizer's chat template refuses messages of {roles} ({error}): "
                "take a model whose template knows them"
            ) from error
    if len(messages) > 1:
        raise ValueError(
            f"model: its tokenizer has no chat template for messages of {roles}: take an instruct "
            "model, or no system prompt"
        )
    return messages[0]["content"] + "\n"


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
        # A chat template has written the BOS already.
        ids = tokenizer(text, add_special_tokens=not tokenizer.chat_template)["input_ids"]
        if not ids:  # a model's folder without tokenizer files gives such a tokenizer
            raise ValueError(
                f"model: its tokenizer encodes nothing of {str(prompt)[:100]!r}. Does the model's "
                "folder hold a tokenizer? If not, save that of the base model there"
            )
        if len(ids) <= max_prompt_tokens:
            short.append(Problem(ids, answer))
    return short, len(problems) - len(short)


def problems_of_step(problems: list[Problem], step: int, count: int, seed: int) -> list[Problem]:
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


# ---------------------------------------------------------------- the task of train.py
def load_task(options) -> Task:
    """Training problems, held-out problems and grader of train.py: of its --data, or Countdown."""
    return load_data_task(options) if options.data else countdown_task()


def countdown_task() -> Task:
    """Countdown: problems of three digits for a model that reads characters."""
    tokenizer = countdown.build_tokenizer()
    train, held_out = countdown.problems()
    train = [Problem(tokenizer(prompt)["input_ids"], answer) for prompt, answer in train]
    held_out = [Problem(tokenizer(prompt)["input_ids"], answer) for prompt, answer in held_out]
    return Task(train, held_out, countdown.grade)


def load_data_task(options) -> Task:
    """The task of train.py's --data for its --model.

    Checks all that can be checked without the weights: raises ValueError or OSError for what cannot
    be loaded or does not fit. Prints how many rows were left out, and why.
    """
    own_grader = bool(options.reward)
    grade = reward.grade_math
    if own_grader:
        reward.load_reward(options.reward)  # first: it is quick to fail
        grade = partial(reward.own_reward, options.reward)
    config = AutoConfig.from_pretrained(options.model)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    room = positions_of(config) - options.max_new_tokens
    room -= max(options.partial_budget - 1, 0)  # a partial rollout may get longer before it is cut
    if room < 1:
        raise ValueError(
            f"max_new_tokens {options.max_new_tokens} (+ partial_budget - 1) leaves no room for a "
            f"prompt in the {positions_of(config)} positions of {options.model}: lower it"
        )
    max_prompt_tokens = min(room, MAX_PROMPT_TOKENS)

    source, split = name_and_split(options.data, default="train")
    rows = load_rows(source, split)
    problems, skipped = read_problems(rows, *options.fields, own_grader=own_grader)
    problems, too_long = tokenize(problems, tokenizer, max_prompt_tokens)
    if too_long:
        skipped[f"with a prompt of more than {max_prompt_tokens} tokens"] = too_long
    left_out = len(rows) - len(problems)
    summary = f"{len(rows)} rows, {len(problems)} used, {left_out} left out"
    print(", ".join([f"{options.data}: {summary}", *reasons(skipped)]), flush=True)

    largest_token = max((max(problem.prompt) for problem in problems), default=0)
    vocabulary = config.get_text_config().vocab_size
    if largest_token >= vocabulary:
        raise ValueError(
            f"model: the tokenizer writes token {largest_token}, but {options.model} has "
            f"{vocabulary}: take the model's own tokenizer"
        )
    wanted = options.held_out + options.prompts_per_step
    if len(problems) < wanted:
        raise ValueError(
            f"data: {len(problems)} problems are too few to hold out {options.held_out} and train "
            f"on {options.prompts_per_step} a step: lower held_out or prompts_per_step"
        )
    if own_grader:
        grade(problems[0].answer, problems[0].answer)  # fails now rather than after minutes
    elif any(reward.number(problem.answer) is None for problem in problems):
        reward.check_math_verify()
    random.Random(0).shuffle(problems)
    held_out = problems[: options.held_out]
    return Task(problems[options.held_out :], held_out, grade)


def positions_of(config) -> int:
    """How many tokens a model can read, of its configuration; sys.maxsize where that has no end."""
    return getattr(config.get_text_config(), "max_position_embeddings", None) or sys.maxsize
