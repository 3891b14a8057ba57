"""support/data.py on local files in the schemas of GSM8K, DAPO-Math-17k and SkyWork-OR1-RL-Data."""

import json
import sys
from importlib.util import find_spec

import pytest

import countdown
from reward import Problem
from support import data
from support.data import (
    gold_answer,
    load_rows,
    name_and_split,
    prompt_text,
    prompt_token_ids,
    read_problems,
    tokenize,
)

CHAT = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
GSM8K = {"question": "6 * 7?", "answer": "6 * 7 = <<6*7=42>>42\n#### 42"}
DAPO = {
    "data_source": "math_dapo",
    "prompt": [
        {"content": "What is 6 * 7? The last line should be Answer: $Answer", "role": "user"}
    ],
    "ability": "MATH",
    "reward_model": {"ground_truth": "42", "style": "rule-lighteval/MATH_v2"},
    "extra_info": {"index": "a"},
}
SKYWORK = {
    "data_source": "train-math-deepscaler",
    "prompt": [{"role": "user", "content": "What is 6 * 7?"}],
    "ability": "math",
    "reward_model": {"ground_truth": '["42"]', "style": "rule"},
    "extra_info": {"index": 0, "model_difficulty": {"DeepSeek-R1-Distill-Qwen-7B": 5}},
}
MATH = {"problem": "6 * 7?", "solution": r"It is \boxed{41}, no, \boxed{42}.", "level": "Level 1"}


@pytest.fixture(autouse=True)
def cache_of_its_own(tmp_path, monkeypatch):
    if find_spec("datasets"):
        monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.mark.parametrize("row", [GSM8K, DAPO, SKYWORK, MATH, {"Problem": "6 * 7?", "Answer": 42}])
def test_the_fields_of_well_known_data_sets_are_recognised(row, tmp_path):
    problems, skipped = read_problems(load_rows(write(tmp_path / "rows.jsonl", [row])))
    ((prompt, answer),) = problems
    assert answer == "42" and not skipped
    assert prompt == next(
        row[name] for name in ("question", "prompt", "problem", "Problem") if name in row
    )


def test_rows_that_cannot_be_used_are_counted_by_their_reason():
    rows = [
        {"prompt": "a", "answer": "1"},
        {"prompt": " ", "answer": "1"},
        {"prompt": None, "answer": "1"},
        {"prompt": "b", "answer": ""},
        {"prompt": "c", "answer": ["1", "2"]},
        {"prompt": "d", "answer": '["1", "2"]'},
        {"prompt": "a", "answer": "2"},
        {"prompt": 7, "answer": "1"},
        {"prompt": [{"role": "user"}], "answer": "1"},
        {"answer": "1"},
        {"prompt": "interval", "answer": "[0, 1)"},  # begins like a list, is none
        {"prompt": "closed interval", "answer": "[0, 1]"},  # a list in JSON, but of two numbers
        {"prompt": "zero", "answer": 0},
        {"prompt": "e", "answer": float("nan")},
        {"prompt": "f", "answer": "so " * 100},
        {"prompt": "g", "answer": "[" * 2000},  # too deep for a reader of JSON
        {"prompt": "half a pair: \ud800", "answer": "1"},  # no tokenizer takes it
        {"prompt": [{"role": "user", "content": "\udfff"}], "answer": "1"},
    ]
    problems, skipped = read_problems(rows)
    kept = [("a", "1"), ("interval", "[0, 1)"), ("closed interval", "[0, 1]"), ("zero", "0")]
    assert problems == [Problem(*row) for row in kept]
    assert skipped == {
        "without a prompt": 3,
        "without an answer": 2,
        "with an answer of more than 200 characters": 2,
        "with an answer that is a list": 2,
        "with a prompt that was there before": 1,
        "with a prompt that is neither text nor messages": 2,
        "with a prompt that is no valid Unicode": 2,
    }


def test_a_grader_of_ones_own_gets_answers_of_any_length_and_lists_as_json():
    rows = [
        {"prompt": "a", "answer": "so " * 100},
        {"prompt": "b", "answer": ["1", "2"]},
        {"prompt": "c", "answer": "[" * 2000},
    ]
    problems, skipped = read_problems(rows, own_grader=True)
    assert [problem.answer for problem in problems] == [
        ("so " * 100).strip(),
        '["1", "2"]',
        "[" * 2000,
    ]
    assert not skipped


def test_fields_may_be_named_and_a_missing_one_is_an_error_that_names_what_is_there():
    rows = [{"task": {"text": "a"}, "gold": "1", "answer": "2"}]
    assert read_problems(rows, "task.text", "gold")[0] == [Problem("a", "1")]
    with pytest.raises(
        ValueError, match="prompt or problem.*task, gold, answer.*--fields PROMPT ANSWER"
    ):
        read_problems(rows)
    with pytest.raises(ValueError, match="field Answers;.*--fields PROMPT ANSWER"):
        read_problems(rows, "task.text", "Answers")


def test_answers_at_the_end_of_a_text_are_found():
    assert gold_answer("so 5 - 2 = 3\n#### 1,003") == "1,003"
    assert gold_answer("#### Step 2\nso \\boxed{5}\n#### Done") == "5"  # headings of a solution
    assert gold_answer(r"thus \boxed{\frac{1}{2}}") == r"\frac{1}{2}"
    assert gold_answer(r"2\sqrt{3}") == r"2\sqrt{3}"
    assert gold_answer(["7"]) == "7"
    assert gold_answer(None) is None


@pytest.mark.parametrize(
    "field, answer",
    [
        ("[0, 1]", "[0, 1]"),
        (" [-2, 3.5] ", "[-2, 3.5]"),
        ("[0, 1)", "[0, 1)"),
        (r"[0, \infty)", r"[0, \infty)"),
        ('["[0, 1]"]', "[0, 1]"),  # SkyWork's list of one answer, an interval
        (["[0, 1]"], "[0, 1]"),
        ('["7"]', "7"),
        ("[7]", "7"),
        ('["1", "2"]', None),  # several answers
        ("[1, 2, 3]", None),
        ([0, 1], None),  # a list and no text
        ('["0", 1]', None),
        ("[]", None),
    ],
)
def test_an_interval_is_an_answer_and_a_list_of_several_answers_is_none(field, answer):
    if answer is None:
        assert isinstance(gold_answer(field), list)
    else:
        assert gold_answer(field) == answer


def test_a_byte_order_mark_is_no_part_of_a_file(tmp_path):
    (tmp_path / "rows.jsonl").write_bytes(b"\xef\xbb\xbf" + json.dumps(GSM8K).encode())
    assert load_rows(str(tmp_path / "rows.jsonl")) == [GSM8K]


@pytest.mark.parametrize(
    "source", ["x.jsonl", "x.json", "x.parquet", "./x", "/no/x", "../x", "~/x", "no/such/x"]
)
def test_a_missing_file_is_one_short_error(source):
    with pytest.raises(ValueError) as raised:
        load_rows(source)
    assert str(raised.value) == f"data: no file {source!r}"


def test_what_may_be_a_data_set_of_the_hub_is_looked_for_there(monkeypatch):
    datasets = pytest.importorskip("datasets")

    def refuse(name):
        raise RuntimeError(f"gated: {name}")

    monkeypatch.setattr(datasets, "get_dataset_config_names", refuse)
    for name in ("owner/name", "name"):
        with pytest.raises(ValueError, match=f"cannot load '{name}'.*gated: {name}.*hf auth login"):
            load_rows(name)


@pytest.mark.parametrize("name", ["rows", "a[1]", "*"])
def test_files_of_all_kinds_are_read_whatever_their_names(tmp_path, name):
    """Kills: a name that is taken for a pattern."""
    datasets = pytest.importorskip("datasets")
    parquet = tmp_path / f"{name}.parquet"
    datasets.Dataset.from_list([DAPO]).to_parquet(parquet)
    assert list(load_rows(str(parquet))) == [DAPO]
    whole = tmp_path / f"{name}.json"
    whole.write_text(json.dumps([GSM8K, MATH]))  # rows may differ in their fields
    assert list(load_rows(str(whole))) == [GSM8K, MATH]
    whole.write_text(json.dumps(GSM8K) + "\n" + json.dumps(MATH))
    assert list(load_rows(str(whole))) == [GSM8K, MATH]
    lines = write(tmp_path / f"{name}.jsonl", [GSM8K, MATH])
    assert list(load_rows(lines)) == [GSM8K, MATH]


def test_a_folder_in_the_layout_of_the_hub_is_read(tmp_path):
    datasets = pytest.importorskip("datasets")
    hub = tmp_path / "gsm8k"
    configs = ""
    for name in ("socratic", "main"):
        (hub / name).mkdir(parents=True)
        configs += f"- config_name: {name}\n  data_files:\n"
        for split in ("train", "test"):
            row = GSM8K | {"question": f"{name} {split}"}
            datasets.Dataset.from_list([row]).to_parquet(hub / name / f"{split}.parquet")
            configs += f"  - {{split: {split}, path: {name}/{split}.parquet}}\n"
    (hub / "README.md").write_text(f"---\nconfigs:\n{configs}---\n")
    rows = load_rows(str(hub))
    assert rows[0]["question"] == "main train"  # GSM8K has two configurations and no default
    rows = load_rows(str(hub), "socratic/test")
    assert rows[0]["question"] == "socratic test"
    with pytest.raises(ValueError, match="cannot load.*validation"):
        load_rows(str(hub), split="validation")


@pytest.mark.parametrize(
    "text, name, split",
    [
        ("openai/gsm8k", "openai/gsm8k", "train"),
        ("openai/gsm8k:test", "openai/gsm8k", "test"),
        ("openai/gsm8k:main/test", "openai/gsm8k", "main/test"),
        ("./folder:math", "./folder", "math"),
        ("a:b/c/d", "a:b/c/d", "train"),
        (":test", ":test", "train"),
        ("there:test", "there:test", "train"),
    ],
)
def test_a_split_is_named_behind_a_colon(tmp_path, monkeypatch, text, name, split):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there:test").mkdir()
    assert name_and_split(text, default="train") == (name, split)


def test_without_the_package_datasets_lines_are_read_and_the_rest_says_what_to_install(
    tmp_path, monkeypatch
):
    monkeypatch.setitem(sys.modules, "datasets", None)  # importing it would raise
    lines = write(tmp_path / "rows.jsonl", [GSM8K])
    assert list(load_rows(lines)) == [GSM8K]
    (tmp_path / "rows.parquet").write_bytes(b"")
    for source in ("owner/name", str(tmp_path / "rows.parquet")):
        with pytest.raises(ValueError) as raised:
            load_rows(source)
        assert str(raised.value) == "--data needs the package datasets: pip install datasets"


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("broken.jsonl", "", "is empty"),
        ("broken.jsonl", "{}\n[1]\n", "line 2 is damaged"),
        ("broken.jsonl", '{"a": 1}\n\n{"a"', "line 3 is damaged"),
        ("broken.json", "[]", "is empty"),
        ("broken.json", "[1]", "expected a list of objects"),
        ("broken.json", '[{"a": 1}, {"a"', "line 1 is damaged"),
        ("broken.json", "[" * 100_000, "RecursionError"),
        ("broken.parquet", "PAR1", "Parquet file size"),
    ],
)
def test_a_file_that_is_empty_or_broken_is_an_error_that_names_it(tmp_path, name, content, message):
    if name.endswith(".parquet"):
        pytest.importorskip("datasets")
    path = tmp_path / name
    path.write_text(content)
    with pytest.raises(ValueError, match=f"{name}.*{message}") as raised:
        load_rows(str(path))
    assert "hub" not in str(raised.value)


# ---------------------------------------------------------------- prompts
def test_the_chat_template_writes_the_prompt_and_the_bos_is_not_doubled():
    tokenizer = countdown.build_tokenizer()
    plain = prompt_text(tokenizer, "1+2= ", "")
    assert plain == "1+2=\n"
    assert tokenizer.decode(prompt_token_ids(tokenizer, plain)).startswith("<bos>1+2=")
    with pytest.raises(ValueError, match="chat template.*system, user"):
        prompt_text(tokenizer, "1+2=", system="be brief")
    tokenizer.chat_template = "<bos>" + CHAT
    text = prompt_text(tokenizer, "1+2=", "boxed", "brief")
    assert text == "<bos><system>brief<user>1+2=\nboxed<assistant>"
    tokenizer.chat_template = "{{ raise_exception('System role not supported') }}"
    with pytest.raises(
        ValueError, match="refuses messages of system, user .System role not supported"
    ):
        prompt_text(tokenizer, "1+2=", "boxed", "brief")
    tokenizer.chat_template = "<bos>" + CHAT
    messages = [{"role": "user", "content": "1+2="}]
    text = prompt_text(tokenizer, messages, "boxed")  # messages bring their own instruction
    assert text == "<bos><user>1+2=<assistant>"
    assert prompt_token_ids(tokenizer, text).count(tokenizer.bos_token_id) == 1


def test_prompts_beyond_the_limit_are_counted_and_token_ids_are_those_of_the_text(monkeypatch):
    tokenizer = countdown.build_tokenizer()
    problems = [Problem("1+2=", "3"), Problem("1+2+3=", "6")]
    # <bos>, four characters, a newline: six tokens
    short, too_long = tokenize(problems, tokenizer, 6, instruction="")
    assert too_long == 1
    assert short == [Problem(tokenizer("1+2=\n")["input_ids"], "3")]
    # What a tokenizer from a folder without its files does:
    monkeypatch.setattr(data, "prompt_token_ids", lambda tokenizer, text: [])
    with pytest.raises(ValueError, match="encodes nothing of '1.2='"):
        tokenize(problems, tokenizer, 6)
