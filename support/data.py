"""Problems with verifiable answers, of the hub or of a local file, as prompts: for train.py --data and eval_aime.py --data."""

import json
import random
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

from transformers import AutoConfig, AutoTokenizer, GenerationConfig

from reward import Problem, extract_boxed, grade_math, import_math_verify, load_reward, number, own_reward
from rollout import eos_token_ids
from support.files import read_lines
from support.models import load_pretrained

INSTRUCTION = r"Please reason step by step, and put your final answer within \boxed{}."
# Tried in this order; a dot looks inside a field. In `solution` and GSM8K's `answer` the answer is the end of a text.
PROMPT_FIELDS = ("prompt", "problem", "question", "query", "instruction", "input")
ANSWER_FIELDS = ("answer", "ground_truth", "reward_model.ground_truth", "final_answer", "target", "solution")


class Task(NamedTuple):
    """Prompts and a grading function."""

    train: list  # rows with .prompt (text, or token ids) and .answer
    held_out: list
    grade: Callable[[str, str], float | bool]  # response, answer -> reward


def load_rows(source: str, split: str = "train") -> Sequence[dict]:
    """Rows of a local .jsonl, .json or .parquet file, or of SPLIT or CONFIGURATION/SPLIT of a hub data set (a local folder in
    the hub's layout, too), whose default configuration may be "main". ValueError for what cannot be loaded or is empty."""
    kind = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}.get(Path(source).suffix)
    if (kind or source.startswith((".", "/", "~")) or source.count("/") > 1) and not Path(source).exists():
        raise ValueError(f"data: no file {source!r}")
    import datasets  # slow

    try:
        if source.endswith(".jsonl"):  # row by row: rows may differ in their fields and types
            rows = read_lines(Path(source))
        elif kind:
            rows = datasets.load_dataset(kind, data_files=source, split="train")
        else:
            configuration, _, split = split.rpartition("/")
            default = "main" if "main" in datasets.get_dataset_config_names(source) else None
            rows = datasets.load_dataset(source, configuration or default, split=split)
    except Exception as error:  # of many kinds: no network, no such repository, gated, no such split, a broken file
        hint = "" if kind else ". Give a .jsonl, .json or .parquet file, or a hub data set; for a gated one: `hf auth login`"
        raise ValueError(f"data: cannot load {source!r} ({type(error).__name__}: {error}){hint}") from error
    if not len(rows):
        raise ValueError(f"data: {source!r} is empty")
    return rows


def find_field(row: dict, names: tuple[str, ...]):
    """The value of the first of `names` that the row has, in any capitalisation; None if it has none."""
    for name in names:
        value = row
        for part in name.split("."):
            fields = {field.lower(): of_field for field, of_field in value.items()} if isinstance(value, dict) else {}
            value = fields.get(part.lower())
        if value is not None:
            return value
    return None


def gold_answer(value) -> str | list | None:
    """The answer in an answer field: a solution's last box, GSM8K's after "####", else all of it. None for NaN.

    A list of one answer, also as JSON (SkyWork-OR1), is this answer; a longer one stays a list. But a text of two numbers such
    as "[0, 1]" is an interval, and stays a text as "[0, 1)" does, which is no JSON.
    """
    if isinstance(value, str) and value.lstrip().startswith("["):
        with suppress(ValueError):
            parts = json.loads(value)
            value = value if len(parts) == 2 and all(isinstance(part, (int, float)) for part in parts) else parts
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    if isinstance(value, (list, dict)):
        return [value]
    if value is None or value != value:
        return None
    text = str(value)
    return (extract_boxed(text) or text.rpartition("####")[2]).strip()


def read_problems(rows: Sequence[dict], *fields: str, own_grader: bool = False) -> tuple[list[Problem], Counter]:
    """Prompt and answer of every usable row, each prompt once, and how many rows were skipped for which reason. fields: the
    prompt's and the answer's, else well-known ones. own_grader: answers may be of any length, and lists are given as JSON.
    ValueError if no row has the fields, naming those that there are."""
    problems, skipped = {}, Counter()
    prompts, answers = [[name] for name in fields] or (PROMPT_FIELDS, ANSWER_FIELDS)
    for names in (prompts, answers):
        if all(find_field(row, names) is None for row in rows):
            there = f"the first has {', '.join(rows[0])}: name them with --fields PROMPT ANSWER"
            raise ValueError(f"data: no row has a field {' or '.join(names)}; {there}")
    for row in rows:
        prompt, value = find_field(row, prompts), find_field(row, answers)
        answer = gold_answer(value)
        if own_grader and isinstance(answer, list):
            answer = value if isinstance(value, str) else json.dumps(value, default=str)
        text, is_text = json.dumps(prompt, default=str), isinstance(prompt, str)
        is_chat = isinstance(prompt, list) and all(
            isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str) for m in prompt
        )
        reasons = {
            "without a prompt": not (prompt.strip() if is_text else prompt),
            "with a prompt that is neither text nor messages": not (is_text or is_chat),
            "without an answer": not answer,
            "with an answer that is a list": isinstance(answer, list),
            "with an answer of more than 200 characters": len(answer or "") > 200 and not own_grader,  # no box, a program
            "with a prompt that was there before": text in problems,
        }
        if reason := next((reason for reason, applies in reasons.items() if applies), ""):
            skipped[reason] += 1
        else:
            problems[text] = Problem(prompt, answer)
    return list(problems.values()), skipped


def prompt_text(tokenizer, prompt: str | list[dict], instruction: str = INSTRUCTION, system: str = "") -> str:
    """All that the model reads. A text gets the instruction; messages bring their own. In the tokenizer's chat template, if
    there is one; else a single message as it is. ValueError for several messages without a template, or if it refuses them."""
    messages = prompt if isinstance(prompt, list) else [{"role": "user", "content": f"{prompt.strip()}\n{instruction}".strip()}]
    messages = [{"role": "system", "content": system}] * bool(system) + messages
    roles = ", ".join(message["role"] for message in messages)
    if tokenizer.chat_template:
        try:
            return tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        except Exception as error:  # whatever the template raises: "System role not supported", ...
            raise ValueError(f"the tokenizer's chat template refuses messages of {roles} ({error})") from error
    if len(messages) > 1:
        raise ValueError(f"tokenizer has no chat template for messages of {roles}: take an instruct model, or no system prompt")
    return messages[0]["content"] + "\n"


def prompt_token_ids(tokenizer, text: str) -> list[int]:
    """Token ids of prompt_text: a chat template has written the BOS already."""
    return tokenizer(text, add_special_tokens=not tokenizer.chat_template)["input_ids"]


def tokenize(problems: list[Problem], tokenizer, max_prompt_tokens: int, **prompt_options) -> tuple[list[Problem], int]:
    """Problems with token ids as prompts, and how many were left out because they have more than max_prompt_tokens."""
    short = []
    for prompt, answer in problems:
        ids = prompt_token_ids(tokenizer, prompt_text(tokenizer, prompt, **prompt_options))
        if not ids:  # a model's folder without tokenizer files gives such a tokenizer
            raise ValueError(f"the tokenizer encodes nothing of {str(prompt)[:100]!r}: does the model's folder hold its own?")
        if len(ids) <= max_prompt_tokens:
            short.append(Problem(ids, answer))
    return short, len(problems) - len(short)


def prompts_of_step(rows: list, step: int, count: int, seed: int) -> list:
    """The rows of step 1, 2, ...: a new random order for every pass over the data. A function of its arguments alone,
    so that a resumed run needs no cursor."""
    chosen = []
    for i in range((step - 1) * count, step * count):
        epoch, position = divmod(i, len(rows))
        if not chosen or position == 0:
            order = random.Random(f"{seed}/{epoch}").sample(range(len(rows)), len(rows))
        chosen.append(rows[order[position]])
    return chosen


def load_task(options) -> tuple[list[Problem], list[Problem], object]:
    """Training problems, held-out problems and grader of train.py's --data for its --model, after all that can be checked
    without the weights: ValueError for what cannot be loaded or does not fit. Prints what was left out, and lowers
    max_prompt_tokens to what the model has positions for."""
    own = options.reward and load_reward(options.reward)
    grade = partial(own_reward, options.reward) if own else grade_math
    tokenizer, model = load_pretrained(AutoTokenizer, options.model), load_pretrained(AutoConfig, options.model)
    generation = None
    with suppress(OSError):  # there need not be one
        generation = GenerationConfig.from_pretrained(options.model)
    eos_token_ids(SimpleNamespace(config=model, generation_config=generation), tokenizer)
    positions = getattr(model.get_text_config(), "max_position_embeddings", None) or sys.maxsize
    room = positions - options.max_new_tokens - max(options.partial_budget - 1, 0)
    if room < 1:
        taken = f"max_new_tokens {options.max_new_tokens} (+ partial_budget - 1)"
        raise ValueError(f"{taken} leaves no room for a prompt in the {positions} positions of {options.model}: lower it")
    if options.max_prompt_tokens > room:
        print(f"max_prompt_tokens lowered from {options.max_prompt_tokens} to {room}: the model has {positions} positions")
        options.max_prompt_tokens = room
    rows = load_rows(options.data, options.split)
    problems, skipped = read_problems(rows, *options.fields, own_grader=bool(own))
    problems, too_long = tokenize(problems, tokenizer, options.max_prompt_tokens, instruction=options.instruction)
    skipped[f"with a prompt of more than {options.max_prompt_tokens} tokens"] = too_long
    reasons = "".join(f", {count} {reason}" for reason, count in skipped.items() if count)
    print(f"{options.data}: {len(rows)} rows, {len(problems)} used, {len(rows) - len(problems)} left out{reasons}")
    unknown = max((max(problem.prompt) for problem in problems), default=0)
    vocabulary = model.get_text_config().vocab_size
    if unknown >= vocabulary:
        raise ValueError(f"model: the tokenizer writes token {unknown}, but {options.model} has {vocabulary}: take its own")
    if len(problems) < options.held_out + options.prompts_per_step:
        wanted = f"hold out {options.held_out} and train on {options.prompts_per_step} a step"
        raise ValueError(f"data: {len(problems)} problems are too few to {wanted}: lower held_out or prompts_per_step")
    if own:
        grade(problems[0].answer, problems[0].answer)  # fails now rather than after minutes
    elif any(number(problem.answer) is None for problem in problems):
        import_math_verify()
    random.Random(0).shuffle(problems)
    return problems[options.held_out :], problems[: options.held_out], grade
