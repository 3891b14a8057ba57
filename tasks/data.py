"""Load problems with verifiable answers, from the hub or a local file.

train.py --data and eval_aime.py use this file: `load_rows` gives rows, `read_problems` finds prompt
and answer in them, and `tokenize` writes the prompts as the model reads them.
"""

import json
import random
import re
import sys
from collections.abc import Sequence
from contextlib import suppress

import reward
from support.loading import load_config_and_tokenizer
from tasks import Problem, Task

INSTRUCTION = r"Please reason step by step, and put your final answer within \boxed{}."
MAX_PROMPT_TOKENS = 1024  # longer prompts are not trained on

# Names that are tried in this order; a.b is the field b inside the field a.
PROMPT_FIELDS = ("prompt", "problem", "Problem", "question", "Question", "query")
ANSWER_FIELDS = (
    "answer",
    "Answer",
    "ground_truth",
    "reward_model.ground_truth",
    "final_answer",
    "target",
    "solution",
)
# Fields that hold a part of the question, in capitals or not. A alone may be the answer.
_PART_OF_QUESTION = r"""(?xi)
    (?:body|context|passage|input|endings|system(?:_prompt)?|history)s?
    | (?:option|choice|image|picture|video|audio)s?(?:[ _]?(?:[a-e]|[0-9]+))?
    | [b-e]"""
_PICTURE = r"<(?:image|video|audio)[ _]?[0-9]*>"
# What is no answer that can be compared
_NO_ANSWER = r"""(?xis)
    .{201,}  # a solution without a box, or a program
    | [\W_]*(?:\\text\W*)?(?:proof|not\ ?found|no\ ?answer|unknown|none|null|nan|n/?a)[\W_]*
    | [\s.?_-]*
    | \s*[\[{]["'].*  # JSON, or a list as Python prints it
    | [-\s0-9.]+e[-+][0-9]+\s*  # a float with an exponent, which the grader does not read
    | (?:.*\s)?[a-z]+\ [a-z]{2,}\b.*[.!?](?:\s.*)?  # a sentence
    | (?:.*(?:[\x00-\x08\x0b\x0c\x0e-\x1f]|\r(?!\s*$)|\t[a-z])|\n[a-z]).*  # LaTeX, not escaped
    """

# Some chat templates write today's date. Before a template, this macro makes it Llama 3.2's own
# default, because a resumed command must read the same prompts.
_FIXED_DATE = (
    '{% macro strftime_now(format) %}{{ format | replace("%d", "26") | replace("%b", "Jul") |'
    ' replace("%B", "July") | replace("%m", "07") | replace("%Y", "2024") }}{% endmacro %}\n'
)


# ---------------------------------------------------------------- rows
def load_rows(data: str, split: str) -> Sequence[dict]:
    """Load the rows of a local .jsonl or .parquet file, or of a data set of the hub.

    data: FILE or FILE:train[:160] (the split of a file is `train`), or NAME, NAME:SPLIT or
    NAME:CONFIGURATION/SPLIT, where NAME is a hub id or a folder in the hub's layout. NAME alone
    means `split` of the configuration "main", or of the default one. Raises ValueError for what
    cannot be loaded.
    """
    file = re.fullmatch(r"(.+\.(?:jsonl|parquet))(?::(.+))?", data)
    try:
        import datasets  # slow, and Countdown does not need it

        if file:
            path, split = file.groups(default="train")
            if path.endswith("parquet"):
                return datasets.load_dataset("parquet", data_files=path, split=split)
            # As text: from JSON, `datasets` would round large numbers and make timestamps of dates.
            lines = datasets.load_dataset(
                "text", data_files=path, split=split, encoding="utf-8-sig"
            )["text"]
            return [json.loads(line) for line in lines if line.strip()]
        name, _, chosen = data.partition(":")
        configuration, _, split = (chosen or split).rpartition("/")
        if not configuration and "main" in datasets.get_dataset_config_names(name):
            configuration = "main"
        return datasets.load_dataset(name, configuration or None, split=split)
    except Exception as error:  # of many kinds: no network, no such split, a broken or empty file
        raise ValueError(
            f"data: cannot load {data!r} ({error!r}). Give a .parquet file,"
            " a .jsonl file of one JSON object a line, or a hub data set; for a gated one, run"
            " `hf auth login`"
        ) from error


# ---------------------------------------------------------------- problems
def gold_answer(value, own_grader: bool = False) -> str:
    """Return the answer in an answer field, or "" if there is none that can be compared.

    In a text it is the last box, or what follows the last "####" (GSM8K), or else everything. Long
    texts, sentences and words such as "proof" are no answers. A list of one answer, which may be
    JSON text (SkyWork-OR1), counts as that answer. Several are left out, because a list does not
    say whether one of them is enough. With own_grader any text is an answer, and all lists and
    objects are returned as JSON, whole.
    """
    if own_grader and isinstance(value, list | dict):
        return json.dumps(value)
    if isinstance(value, str) and value.startswith('["'):
        with suppress(ValueError):  # it may be no JSON
            value = json.loads(value)
    if isinstance(value, list) and len(value) == 1:
        (value,) = value
    text = str(value)
    answer = reward.extract_boxed(text) or text.rpartition("####")[2]
    is_answer = not (isinstance(value, list | dict) or re.fullmatch(_NO_ANSWER, answer))
    return answer.strip() if own_grader or is_answer else ""


def read_problems(rows: Sequence[dict], *fields: str, own_grader: bool = False) -> list[Problem]:
    """Return prompt and answer of every usable row, each prompt once; print how many there are.

    fields: the names of the prompt's and the answer's field, by default found among PROMPT_FIELDS
    and ANSWER_FIELDS. own_grader: see `gold_answer`; a row without an answer gets "", unless the
    answer's field is named. Raises ValueError if no row can be used, and for questions with
    pictures, or with a part, such as choices, in a field of its own.
    """
    prompt_names = fields[:1] or PROMPT_FIELDS
    answer_names = fields[1:] or ANSWER_FIELDS
    needs_answer = fields[1:] or not own_grader
    problems = {}  # text of the prompt -> problem
    unreadable = []  # answers
    for row in rows:
        prompt = first_value(row, prompt_names)
        value = first_value(row, answer_names)
        text = str(prompt).strip()
        if not text or (needs_answer and value == ""):
            continue
        answer = gold_answer(value, own_grader)
        if not answer and not own_grader:
            unreadable.append(value)
            continue
        lost = re.findall(_PICTURE, text)
        for name in filter(re.compile(_PART_OF_QUESTION).fullmatch, row):
            # Line by line, because the text of messages has no line breaks
            lines = str(row[name] or "").strip().splitlines()
            lost += [name for line in lines if line not in text]
        if lost:
            raise ValueError(
                f"data: the prompt {text!r:.100} lacks what {lost[0]!r} holds: write it into the"
                " prompt (no pictures), or remove it"
            )
        problems.setdefault(text, Problem(prompt, answer))
    found = f"{len(problems)} of {len(rows)} rows have a prompt of their own and an answer"
    if unreadable:
        found += f"; {len(unreadable)} answers cannot be compared, such as {unreadable[0]!r:.200}"
    if not problems:
        raise ValueError(
            f"data: {found}. The fields are {list(next(iter(rows), {}))}: name the two with"
            " --fields PROMPT ANSWER. An answer is a number, a formula or a name, alone or in"
            " \\boxed{}; for others give your own --reward"
        )
    print(found)
    return list(problems.values())


def first_value(row: dict, names: Sequence[str]):
    """Return the first value under `names` that is not empty in this row, or ""."""
    for name in names:
        value = row
        for part in name.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        if value not in (None, "", []):
            return value
    return ""


# ---------------------------------------------------------------- prompts
def tokenize(
    problems: list[Problem], tokenizer, max_prompt_tokens: int, instruction: str = INSTRUCTION
) -> list[Problem]:
    """Return the problems with the token ids that the model reads as prompts.

    A text is followed by the instruction, unless it has a \\boxed, and becomes a user's message;
    messages are used as they are. The messages go through the chat template. Without one, a single
    message is read as plain text. Prompts of more than max_prompt_tokens are left out, and the
    number of others is printed. Raises ValueError if a message has no role or no text, if the last
    one is not the user's, and if the template refuses messages or leaves one out.
    """
    fitting = []
    for prompt, answer in problems:
        try:
            token_ids = _encode(prompt, tokenizer, instruction)
        except Exception as error:  # of malformed messages, and whatever the template raises
            raise ValueError(
                f"data: the chat template of {tokenizer.name_or_path!r} cannot write the prompt"
                f" {prompt!r:.200} ({error!r}). Give a text, or messages with role (system, user,"
                " assistant; the last one user) and content (text), or use another model"
            ) from error
        if len(token_ids) <= max_prompt_tokens:
            fitting.append(Problem(token_ids, answer))
    print(f"{len(fitting)} of {len(problems)} prompts have at most {max_prompt_tokens} tokens")
    return fitting


def _encode(prompt: str | list[dict], tokenizer, instruction: str) -> list[int]:
    """Return the token ids of a prompt, and raise an exception if the model would miss something.

    Many templates write nothing of unknown roles, or of content that is a list.
    """
    messages = prompt
    if isinstance(prompt, str):
        text = prompt.strip()
        if r"\boxed" not in text:  # in many data sets every problem asks for a box
            text = f"{text}\n{instruction}".strip()
        messages = [{"role": "user", "content": text}]
    if tokenizer.chat_template:
        text = tokenizer.apply_chat_template(
            messages,
            chat_template=_FIXED_DATE + tokenizer.get_chat_template(),
            tokenize=False,
            add_generation_prompt=True,
        )
        token_ids = tokenizer(text, add_special_tokens=False).input_ids
    else:
        (message,) = messages  # several need a template
        text = message["content"] + "\n"
        token_ids = tokenizer(text).input_ids
        # Some tokenizers add an EOS, after which a model would not continue the text.
        if token_ids[-1] == tokenizer.eos_token_id:
            token_ids.pop()
    lost = [message for message in messages if message["content"].strip() not in text]
    if lost or messages[-1]["role"] != "user":
        raise ValueError(f"it leaves out {lost}, or the last message is not the user's")
    return token_ids


# ---------------------------------------------------------------- the task of train.py --data
def load_task(options) -> Task:
    """Return the problems of train.Options' --data and their grader.

    Raises ValueError for whatever can be checked before the model's weights are loaded.
    """
    config, tokenizer = load_config_and_tokenizer(options.model)
    # A partial rollout may grow past max_new_tokens before it is cut.
    response_tokens = options.max_new_tokens + options.partial_budget
    longest = longest_prompt(config, response_tokens)
    rows = load_rows(options.data, split="train")
    problems = read_problems(rows, *options.fields, own_grader=bool(options.reward))
    problems = tokenize(problems, tokenizer, min(longest, MAX_PROMPT_TOKENS))
    if len(problems) < options.held_out + options.prompts_per_step:
        raise ValueError(
            f"data: {len(problems)} problems are too few to hold out {options.held_out} and train"
            f" on {options.prompts_per_step} per step: lower held_out, prompts_per_step or"
            " max_new_tokens"
        )
    grader = reward.choose_grader(options.reward, problems[0].answer)
    random.Random(0).shuffle(problems)
    return Task(problems[options.held_out :], problems[: options.held_out], grader)


def longest_prompt(config, response_tokens: int) -> int:
    """Return how many of a model's positions a response of response_tokens leaves for its prompt.

    Raises ValueError if there are none.
    """
    positions = getattr(config.get_text_config(), "max_position_embeddings", None) or sys.maxsize
    if positions <= response_tokens:
        raise ValueError(
            f"max_new_tokens: the model has {positions} positions, too few for a prompt and a"
            f" response of {response_tokens} tokens: lower it"
        )
    return positions - response_tokens
