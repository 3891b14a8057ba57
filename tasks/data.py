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
from datetime import date
from decimal import Decimal
from functools import partial

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
EMPTY = (None, "", [])
# Fields that hold a part of the question, in capitals or not. A alone may be the answer.
_PARTS_OF_QUESTIONS = re.compile(
    r"""(?:body|context|passage|input|endings|system(?:_prompt)?|history)s?
    | (?:option|choice|image|picture|video|audio)s?(?:[ _]?(?:[a-e]|[0-9]+))?
    | [b-e]""",
    re.VERBOSE | re.IGNORECASE,
)
_PICTURE = re.compile(r"<(?:image|video|audio)[ _]?[0-9]*>")
# What is no answer that can be compared
_NO_ANSWER = re.compile(
    r""".{201,}  # a solution without a box, or a program
    | [\W_]*(?:\\text\W*)?(?:proof|not\ ?found|no\ ?answer|unknown|none|null|nan|n/?a)[\W_]*
    | [\s.?_-]*
    | [\[{]["'].*  # JSON, or a list as Python prints it
    | (?:.*\s)?[a-z]+\ [a-z]{2,}\b.*[.!?](?:\s.*)?  # a sentence
    | (?:.*[\x00-\x08\x0b-\x1f]|.*\t[a-z]|\n[a-z]).*  # LaTeX, unescaped in JSON
    """,
    re.VERBOSE | re.IGNORECASE | re.DOTALL,
)

# Some chat templates write today's date. It is always this one, Llama 3.2's own default, because a
# resumed command must read the same prompts.
DATE = date(2024, 7, 26)
_TODAY = re.compile(r"""strftime_now\((["'])(.*?)\1\)""")


# ---------------------------------------------------------------- rows
def load_rows(data: str, split: str) -> Sequence[dict]:
    """Load the rows of a local .jsonl or .parquet file, or of a data set of the hub.

    data: FILE or FILE:train[:160] (the split of a file is `train`), or NAME, NAME:SPLIT or
    NAME:CONFIGURATION/SPLIT, where NAME is a hub id or a folder in the hub's layout. NAME alone
    means `split` of the configuration "main", or of the default one. Raises ValueError for what
    cannot be loaded.
    """
    local = re.fullmatch(r"(.+\.(jsonl|parquet|json|csv))(?::(.+))?", data)
    try:
        if local:
            return _read_file(*local.groups(default="train"))
        import datasets  # slow, and Countdown does not need it

        name, _, chosen = data.partition(":")
        configuration, _, split = (chosen or split).rpartition("/")
        if not configuration and "main" in datasets.get_dataset_config_names(name):
            configuration = "main"
        return datasets.load_dataset(name, configuration or None, split=split)
    except Exception as error:  # of many kinds: no network, no such split, a broken or empty file
        raise ValueError(
            f"data: cannot load {data!r} ({error.__cause__ or error!r}). Give a .jsonl or .parquet"
            " file or a hub data set; for a gated one, run `hf auth login`"
        ) from error


def _read_file(path: str, kind: str, split: str) -> Sequence[dict]:
    """Read a part of a local file, such as train[:160] or train[50%:]."""
    import datasets

    if kind in ("json", "csv"):  # `datasets` would change numbers and dates in them
        raise ValueError(f"write its rows as .jsonl, one JSON object a line: .{kind} is not read")
    if kind == "parquet":
        return datasets.load_dataset("parquet", data_files=path, split=split)
    # Not by `datasets`, which would round large numbers and turn dates into timestamps
    with open(path, encoding="utf-8-sig") as file:
        rows = [json.loads(line) for line in file if line.strip()]
    parts = datasets.ReadInstruction.from_spec(split).to_absolute({"train": len(rows)})
    return [row for part in parts for row in rows[part.from_ : part.to]]


# ---------------------------------------------------------------- problems
def gold_answer(value, own_grader: bool = False) -> str:
    """Return the answer in an answer field, or "" if there is none that can be compared.

    In a text it is the last box, or what follows the last "####" (GSM8K), or else everything. Long
    texts, sentences and words such as "proof" are no answers. A list of one answer, which may be
    JSON text (SkyWork-OR1), counts as that answer. Several are left out, because a list does not
    say whether one of them is enough. Floats are written without an exponent. With own_grader any
    text is an answer, and all lists and objects are returned as JSON, whole.
    """
    if own_grader:
        if isinstance(value, list | dict):
            return json.dumps(value)
        return _last_answer(value).strip()
    if isinstance(value, str) and value.startswith('["'):
        with suppress(ValueError):  # it may be no JSON
            value = json.loads(value)
    if isinstance(value, list) and len(value) == 1:
        (value,) = value
    if isinstance(value, list | dict):
        return ""
    answer = _last_answer(value).rstrip().lstrip(" ")
    return "" if _NO_ANSWER.fullmatch(answer) else answer.strip()


def _last_answer(value) -> str:
    text = str(value)
    if isinstance(value, float):
        text = f"{Decimal(text):f}"  # 0.00001 instead of 1e-05
    return reward.extract_boxed(text) or text.rpartition("####")[2]


def read_problems(rows: Sequence[dict], *fields: str, own_grader: bool = False) -> list[Problem]:
    """Return prompt and answer of every usable row, each prompt once; print how many there are.

    fields: the names of the prompt's and the answer's field, by default found among PROMPT_FIELDS
    and ANSWER_FIELDS. own_grader: see `gold_answer`; a row without an answer gets "", unless the
    answer's field is named. Raises ValueError if no row can be used, and for questions with
    pictures, or with a part, such as choices, in a field of its own.
    """
    prompt_names = fields[:1] or PROMPT_FIELDS
    answer_names = fields[1:] or ANSWER_FIELDS
    problems = {}  # text of the prompt -> problem
    unreadable = []  # answers
    for row in rows:
        prompt = first_value(row, prompt_names)
        value = first_value(row, answer_names)
        text = str(prompt).strip()
        if not text or (value == "" and (fields[1:] or not own_grader)):
            continue
        answer = gold_answer(value, own_grader)
        if not answer and not own_grader:
            unreadable.append(value)
            continue
        parts = [name for name in row if _PARTS_OF_QUESTIONS.fullmatch(name) and name not in fields]
        lost = [name for name in parts if str(row[name] or "").strip() not in text]
        if lost or _PICTURE.search(text):
            raise ValueError(
                f"data: the prompt {text!r:.100} has a picture, or lacks what the fields {lost}"
                " hold: write it into the prompt (no pictures), or remove it"
            )
        problems.setdefault(text, Problem(prompt, answer))
    print(f"{len(problems)} of {len(rows)} rows kept: without duplicates and missing answers")
    if unreadable:
        lost = f"{len(unreadable)} answers cannot be compared, such as {unreadable[0]!r:.200}"
        if not problems:
            raise ValueError(
                f"data: {lost}. Give a number, a formula or a name, alone or in \\boxed{{}}, or"
                " your own --reward"
            )
        print(lost)
    if not problems:
        raise ValueError(
            f"data: none of {len(rows)} rows has both a prompt ({prompt_names}) and an answer"
            f" ({answer_names}). The first has {list(next(iter(rows), {}))}: name the two with"
            " --fields PROMPT ANSWER"
        )
    return list(problems.values())


def first_value(row: dict, names: Sequence[str]):
    """Return the first value under `names` that is not empty in this row, or ""."""
    for name in names:
        value = row
        for part in name.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        if value not in EMPTY:
            return value
    return ""


# ---------------------------------------------------------------- prompts
def tokenize(
    problems: list[Problem], tokenizer, max_prompt_tokens: int, instruction: str = INSTRUCTION
) -> list[Problem]:
    """Return the problems with the token ids that the model reads as prompts.

    A text is followed by the instruction, unless it has a \\boxed, and becomes a user's message;
    messages are used as they are. The messages go through the chat template. Without one, a single
    message is read as plain text. Prompts of more than max_prompt_tokens are left out, and their
    number is printed. Raises ValueError if a message has no known role or no text, if the last one
    is not the user's, and if the template refuses messages or leaves one out.
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
    if len(fitting) < len(problems):
        count = len(problems) - len(fitting)
        print(f"{count} prompts of more than {max_prompt_tokens} tokens left out")
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
    roles = [message["role"] for message in messages]
    if not {"system", "user", "assistant"}.issuperset(roles) or roles[-1] != "user":
        raise ValueError(f"the roles are {roles}")
    if tokenizer.chat_template:
        template = tokenizer.get_chat_template()
        dated = _TODAY.sub(lambda call: repr(DATE.strftime(call[2])), template)
        if "strftime_now(" in dated:
            raise ValueError("it writes today's date in a format that is no plain text")
        text = tokenizer.apply_chat_template(
            messages, chat_template=dated, tokenize=False, add_generation_prompt=True
        )
        token_ids = tokenizer(text, add_special_tokens=False).input_ids
    else:
        (message,) = messages  # several need a template
        text = message["content"] + "\n"
        token_ids = tokenizer(text).input_ids
        # Some tokenizers add an EOS, after which a model would not continue the text.
        if token_ids[-1] == tokenizer.eos_token_id:
            token_ids.pop()
    for message in messages:
        if message["content"].strip() not in text:
            raise ValueError(f"it leaves out {message['content']!r:.100}")
    return token_ids


# ---------------------------------------------------------------- the task of train.py --data
def load_task(options) -> Task:
    """Return the problems of train.Options' --data and their grader.

    Raises ValueError for whatever can be checked before the model's weights are loaded.
    """
    config, tokenizer = load_config_and_tokenizer(options.model)
    # A partial rollout may grow past max_new_tokens before it is cut.
    response_tokens = options.max_new_tokens + options.partial_budget
    longest = longest_prompt(training_length(config), response_tokens)
    rows = load_rows(options.data, split="train")
    problems = read_problems(rows, *options.fields, own_grader=bool(options.reward))
    problems = tokenize(problems, tokenizer, min(longest, MAX_PROMPT_TOKENS))
    if len(problems) < options.held_out + options.prompts_per_step:
        raise ValueError(
            f"data: {len(problems)} problems are too few to hold out {options.held_out} and train"
            f" on {options.prompts_per_step} per step: lower held_out, prompts_per_step or"
            " max_new_tokens"
        )
    if options.reward:
        grader = partial(reward.own_reward, options.reward)
        grader(problems[0].answer, problems[0].answer)  # raises if the function fails
    else:
        grader = reward.grade_math
        reward.check_math_verify()
    random.Random(0).shuffle(problems)
    return Task(problems[options.held_out :], problems[: options.held_out], grader)


def longest_prompt(positions: int, response_tokens: int) -> int:
    """Return how many of a model's positions a response of response_tokens leaves for its prompt.

    Raises ValueError if there are none.
    """
    if positions <= response_tokens:
        raise ValueError(
            f"max_new_tokens: a prompt and a response of {response_tokens} tokens do not fit into"
            f" the {positions} positions that the model can use: lower it"
        )
    return positions - response_tokens


def context_length(config) -> int:
    """Return how many tokens a model can read, or sys.maxsize if there is no limit."""
    return getattr(config.get_text_config(), "max_position_embeddings", None) or sys.maxsize


def training_length(config) -> int:
    """Return up to which length a row has the same log-probs in sampling and in training.

    Beyond it LongRoPE (Phi-3) moves the positions of a whole batch, and attention to the largest
    scores alone (DeepSeek V3.2, Doge) chooses other tokens.
    """
    fields = config.get_text_config().to_dict()
    limits = [context_length(config), fields.get("index_topk"), fields.get("keep_window_size")]
    rope = fields.get("rope_parameters") or {}
    if rope.get("rope_type") == "longrope":
        limits.append(rope["original_max_position_embeddings"])
    return min(filter(None, limits))
