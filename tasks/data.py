"""Load problems with verifiable answers, from the hub or a local file.

train.py --data and eval_aime.py use this file: `load_rows` gives rows, `read_problems` finds prompt
and answer in them, and `tokenize` writes the prompts as the model reads them.
"""

import json
import random
import re
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from decimal import Decimal
from functools import partial
from pathlib import Path

import reward
from loading import load_without_weights
from tasks.task import Problem, Task

INSTRUCTION = r"Please reason step by step, and put your final answer within \boxed{}."
MAX_PROMPT_TOKENS = 1024  # longer prompts are not trained on
MAX_ANSWER_CHARACTERS = 200  # longer ones are solutions without a box, or programs

# Names that are tried in this order; a.b is the field b inside the field a.
PROMPT_FIELDS = (
    "prompt",
    "problem",
    "Problem",
    "question",
    "Question",
    "query",
    "instruction",
    "input",
)
ANSWER_FIELDS = (
    "answer",
    "Answer",
    "ground_truth",
    "reward_model.ground_truth",
    "final_answer",
    "target",
    "solution",
)
# What belongs to a question, by the names that public data sets give it, in capitals or not. Text
# in these fields comes before the question.
CONTEXT_FIELDS = (
    r"(?i)(body|context|passage|paragraph|article|story|background|premise|table)s?|choices|options"
)
# Whatever else would be left out of a prompt. A alone may be an answer, so B tells choices.
REFUSED_FIELDS = {
    "a context that is no text": CONTEXT_FIELDS,
    "choices": r"(?i)[b-e]|(op|opt|options?|choices?|ending|sol|(mc_)?answer)[ _]?([a-e]|\d+)"
    r"|endings|answer_(choices|options)|multiple_choice_targets|mc\d_targets|alternatives",
    "messages that come first": r"(?i)(system|developer)([ _]?(prompt|message|instruction)s?)?"
    r"|sys_prompt|history|tools",
}
# Pictures, sounds and films: their fields, and what stands for them in a prompt
PICTURE_FIELDS = (
    r"(?i)(decoded_)?(image|img|picture|figure|diagram|video|audio)s?([ _]?(\d+|path|url|bytes)s?)?"
    "|multi_modal_data"
)
_PLACEHOLDER = re.compile(r"(?i)<\|?(image|img|video|audio)[^<>]*>")
_LINKED_PICTURE = re.compile(r"!\[[^\]]*\]\(|\\includegraphics")

# What stands in an answer field that has no answer: a word for it, punctuation, JSON, sentences, or
# LaTeX that JSON has taken for control characters
_NO_ANSWER = re.compile(
    r"""[\W_]*(?:\\text\W*)?(?:proof|not\ ?found|no\ ?answer|unknown|none|null|nan|n/?a)[\W_]*
    | [\s.?_-]*
    | [\[{]".*
    | (?:.*\s)?[a-z]+\ [a-z]{2,}\b.*[.!?](?:\s.*)?
    | .*(?:[\x00-\x08\x0b-\x1f]|\t[a-z]).*""",
    re.VERBOSE | re.IGNORECASE | re.DOTALL,
)
# A backslash of LaTeX that JSON text should have twice: \frac and \%, but not \u00b0
_SINGLE_BACKSLASH = re.compile(r'(?<!\\)\\(?=[a-zA-Z]{2}|[^a-zA-Z\\/"])')

_FILES = (".jsonl", ".json", ".parquet")


# ---------------------------------------------------------------- rows
def load_rows(data: str, split: str) -> Sequence[dict]:
    """Load the rows of a local .jsonl, .json or .parquet file, or of a data set of the hub.

    data: a file, or NAME, NAME:SPLIT or NAME:CONFIGURATION/SPLIT, where NAME is a hub id or a
    folder in the hub's layout. NAME alone means `split` of the configuration "main", or of the
    default one. Raises ValueError for what cannot be loaded.
    """
    match = re.fullmatch(r"(.+?):((?:[^:\[]|\[.*?\])*)", data)  # a split may be train[:100]
    if match and not Path(data).exists() and Path(match[1]).suffix not in _FILES:
        data, split = match.groups()
    try:
        suffix = Path(data).suffix
        if suffix == ".jsonl":
            return _read_json_lines(data)
        import datasets  # slow, and Countdown does not need it

        if suffix in _FILES:  # without the dot, the suffix is the name of a loader
            return datasets.load_dataset(suffix[1:], data_files=data, split="train")
        configuration, _, split = split.rpartition("/")
        if not configuration and "main" in datasets.get_dataset_config_names(data):
            configuration = "main"
        return datasets.load_dataset(data, configuration or None, split=split)
    except Exception as error:  # of many kinds: no network, no such split, a broken or empty file
        raise ValueError(
            f"data: cannot load {data!r} ({error.__cause__ or error!r}). Give a .jsonl, .json or"
            " .parquet file or a hub data set; for a gated one, run `hf auth login`"
        ) from error


def _read_json_lines(path: str) -> list[dict]:
    """Read a .jsonl file. `datasets` would round large numbers and turn dates into timestamps."""
    rows = []
    with open(path, encoding="utf-8-sig") as file:
        for number, line in enumerate(file, 1):
            try:
                if line.strip():
                    rows.append(json.loads(line, parse_float=Decimal))
            except ValueError as error:
                raise ValueError(f"line {number} is no JSON: {error}") from error
    if not rows:
        raise ValueError("it is empty")
    return rows


# ---------------------------------------------------------------- problems
def gold_answer(value, own_grader: bool = False, is_solution: bool = False) -> str:
    """Return the answer in an answer field, or "" if there is none that can be graded.

    In a text it is the last box, or what follows the last "####" (GSM8K). Without these it is
    everything, but of a solution only if that is a number. Words such as "proof", and sentences,
    are no answers. A list of one answer, which may be JSON text (SkyWork-OR1), counts as that
    answer. Floats are written without an exponent. With own_grader any text is allowed, and longer
    lists are returned as JSON.
    """
    if isinstance(value, str) and value.startswith('["'):
        escaped = value if own_grader else _SINGLE_BACKSLASH.sub(r"\\\\", value)
        with suppress(ValueError):  # it may be no JSON
            value = json.loads(escaped)
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    if isinstance(value, list | dict):
        return json.dumps(value, default=float) if own_grader else ""
    text = str(value)
    if isinstance(value, float | Decimal):
        text = f"{Decimal(text):f}"  # 0.00001 instead of 1e-05
    found = reward.extract_boxed(text) or text.rpartition("####")[2]
    answer = found.strip(" \r\n")
    if own_grader:
        return answer
    is_unmarked = is_solution and found == text and reward.number(text) is None
    if is_unmarked or len(answer) > MAX_ANSWER_CHARACTERS or _NO_ANSWER.fullmatch(answer):
        return ""
    return answer


def read_problems(rows: Sequence[dict], *fields: str, own_grader: bool = False) -> list[Problem]:
    """Return prompt and answer of every usable row, each prompt once; print what is left out.

    fields: the names of the prompt's and the answer's field, by default found among PROMPT_FIELDS
    and ANSWER_FIELDS. own_grader: see `gold_answer`. Raises ValueError if no row can be used, or if
    a question would lose its context, its choices, a picture or a system message.
    """
    if len(fields) not in (0, 2):
        raise ValueError(f"fields must be two names, PROMPT ANSWER, got {list(fields)}")
    prompt_names = fields[:1] or PROMPT_FIELDS
    answer_names = fields[1:] or ANSWER_FIELDS
    problems = {}  # text of the prompt -> problem
    left_out = Counter()
    for row in rows:
        prompt_name, prompt = first_field(row, prompt_names)
        answer_name, value = first_field(row, answer_names)
        is_chat = not isinstance(prompt, str) or prompt.startswith("[{")
        if prompt and not is_chat:
            prompt = with_context(row, prompt, prompt_name, answer_name)
        refuse_pictures(row, prompt)
        answer = gold_answer(value, own_grader, is_solution=answer_name.endswith("solution"))
        key = str(prompt).strip()
        if not key:
            left_out["no prompt"] += 1
        elif not answer:
            left_out["no usable answer"] += 1
        elif _LINKED_PICTURE.search(key):
            left_out["picture"] += 1
        elif key in problems:
            left_out["repeated prompt"] += 1
        else:
            problems[key] = Problem(prompt, answer)
    print(f"{len(problems)} of {len(rows)} rows; left out: {dict(left_out)}")
    if not problems:
        raise ValueError(
            f"data: none of {len(rows)} rows has both a prompt ({prompt_names}) and an answer"
            f" ({answer_names}). The first has {[list(row) for row in rows[:1]]}: name the two with"
            " --fields PROMPT ANSWER"
        )
    return list(problems.values())


def with_context(row: dict, prompt: str, prompt_name: str, answer_name: str) -> str:
    """Return the prompt with its context, unless it holds that already.

    An `instruction` is followed by the row's `input`, as in Alpaca. Raises ValueError for other
    fields that the prompt would lack.
    """
    if prompt_name == "instruction" and row.get("input"):
        prompt = f"{prompt}\n\n{row['input']}"
    for name, value in row.items():
        if name in (prompt_name, answer_name):
            continue
        for content, names in REFUSED_FIELDS.items():
            if not re.fullmatch(names, name) or is_empty(value) or str(value).strip() in prompt:
                continue
            if names != CONTEXT_FIELDS or not isinstance(value, str):
                raise ValueError(
                    f"data: the field {name!r} holds {content}, and would be left out of the prompt"
                    f" {prompt!r:.100}: write it into the field {prompt_name!r}, or remove it"
                )
            prompt = f"{value.strip()}\n{prompt}"
    return prompt


def refuse_pictures(row: dict, prompt: str | list[dict]) -> None:
    """Raise ValueError if a picture, a sound or a film belongs to a prompt."""
    fields = []
    for name, value in row.items():
        if re.fullmatch(PICTURE_FIELDS, name) and not is_empty(value):
            fields.append(name)
    if fields or _PLACEHOLDER.search(str(prompt)):
        raise ValueError(
            f"data: the prompt {prompt!r:.100} has a picture, a sound or a film (fields {fields}),"
            " and models here read no pictures: remove such rows"
        )


def first_field(row: dict, names: Sequence[str]) -> tuple:
    """Return name and value of the first of `names` that is not empty in this row, or "" and ""."""
    for name in names:
        value = row
        for part in name.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        if not is_empty(value):
            return name, value
    return "", ""


def is_empty(value) -> bool:
    """Return whether a field holds nothing: no text, no items, or a missing number."""
    return str(value).strip() in ("", "None", "[]", "nan")


# ---------------------------------------------------------------- prompts
def tokenize(
    problems: list[Problem], tokenizer, max_prompt_tokens: int, instruction: str = INSTRUCTION
) -> list[Problem]:
    """Return the problems with the token ids that the model reads as prompts.

    A text is followed by the instruction, unless it asks for a box already, and becomes a user's
    message; messages, which may be JSON text, are used as they are. The messages go through the
    chat template. Without one, a single message is read as plain text. Prompts of more than
    max_prompt_tokens are left out, and their number is printed. Raises ValueError if there is no
    room for a prompt, if a message has no known role or no text, if the last one is not the user's,
    and if the template refuses messages or leaves one out.
    """
    if max_prompt_tokens < 1:
        raise ValueError(
            f"max_new_tokens leaves no room for a prompt: lower it by {1 - max_prompt_tokens}"
        )
    fitting = []
    for prompt, answer in problems:
        try:
            token_ids = _encode(as_messages(prompt, instruction), tokenizer)
        except Exception as error:  # of malformed messages, and whatever the template raises
            raise ValueError(
                f"data: the chat template of {tokenizer.name_or_path!r} cannot write the prompt"
                f" {prompt!r:.200} ({error!r}). Give a text, or messages with role (system, user,"
                " assistant; the last one user) and content (text), or use another model"
            ) from error
        if len(token_ids) <= max_prompt_tokens:
            fitting.append(Problem(token_ids, answer))
    print(
        f"{len(problems) - len(fitting)} prompts of more than {max_prompt_tokens} tokens left out"
    )
    return fitting


def as_messages(prompt: str | list[dict], instruction: str) -> list[dict]:
    """Return a prompt as the messages of a chat; JSON text may hold them."""
    if not isinstance(prompt, str):
        return prompt
    if prompt.startswith("[{"):
        return json.loads(prompt)
    text = prompt.strip()
    asks_for_box = r"\boxed" in text  # in many data sets every problem does
    if not (asks_for_box and r"\boxed" in instruction):
        text = f"{text}\n{instruction}".strip()
    return [{"role": "user", "content": text}]


def _encode(messages: list[dict], tokenizer) -> list[int]:
    """Return the token ids of messages, and raise an exception if the model would miss something.

    Many templates write nothing of unknown roles, or of content that is a list.
    """
    roles = [message["role"] for message in messages]
    question = messages[-1]["content"].strip()
    if not {"system", "user", "assistant"}.issuperset(roles) or roles[-1] != "user" or not question:
        raise ValueError(f"the roles are {roles} and the last text {question!r:.50}")
    if not tokenizer.chat_template and len(messages) == 1:
        token_ids = tokenizer(messages[0]["content"] + "\n").input_ids
        # Some tokenizers add an EOS, after which a model would not continue the text.
        return token_ids[:-1] if token_ids[-1] == tokenizer.eos_token_id else token_ids
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    for message in messages:
        # Many templates leave out the thoughts in earlier answers.
        _, _, content = message["content"].rpartition("</think>")
        if content.strip() not in text:
            raise ValueError(f"it leaves out {content!r:.100}")
    return tokenizer(text, add_special_tokens=False).input_ids


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
        grader(problems[0].answer, problems[0].answer)  # raises if the function fails
    else:
        grader = reward.grade_math
        reward.check_math_verify()
    random.Random(0).shuffle(problems)
    return Task(problems[options.held_out :], problems[: options.held_out], grader)


def positions_of(config) -> int:
    """Return how many tokens a model can read, or sys.maxsize if there is no limit."""
    return getattr(config.get_text_config(), "max_position_embeddings", None) or sys.maxsize
