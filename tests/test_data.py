"""data.py on local files in the schemas of GSM8K, DAPO-Math-17k and SkyWork-OR1-RL-Data."""

import json

import datasets
import pytest

import countdown
from support import data
from support.data import Problem, gold_answer, load_rows, prompt_text, prompt_token_ids, read_problems, tokenize

CHAT = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
GSM8K = {"question": "6 * 7?", "answer": "6 * 7 = <<6*7=42>>42\n#### 42"}
DAPO = {
    "data_source": "math_dapo",
    "prompt": [{"content": "What is 6 * 7? The last line should be Answer: $Answer", "role": "user"}],
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
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.mark.parametrize("row", [GSM8K, DAPO, SKYWORK, MATH, {"Problem": "6 * 7?", "Answer": 42}])
def test_the_fields_of_well_known_data_sets_are_recognised(row, tmp_path):
    problems, skipped = read_problems(load_rows(write(tmp_path / "rows.jsonl", [row])))
    ((prompt, answer),) = problems
    assert answer == "42" and not skipped
    assert prompt == next(row[name] for name in ("question", "prompt", "problem", "Problem") if name in row)


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
    ]
    problems, skipped = read_problems(rows)
    kept = [("a", "1"), ("interval", "[0, 1)"), ("closed interval", "[0, 1]"), ("zero", "0")]
    assert problems == [Problem(*row) for row in kept]
    assert skipped == {
        "without a prompt": 3,
        "without an answer": 2,
        "with an answer of more than 200 characters": 1,
        "with an answer that is a list": 2,
        "with a prompt that was there before": 1,
        "with a prompt that is neither text nor messages": 2,
    }


def test_fields_may_be_named_and_a_missing_one_is_an_error_that_names_what_is_there():
    rows = [{"task": {"text": "a"}, "gold": "1", "answer": "2"}]
    assert read_problems(rows, "task.text", "gold")[0] == [Problem("a", "1")]
    with pytest.raises(ValueError, match="prompt or problem.*task, gold, answer.*--fields PROMPT ANSWER"):
        read_problems(rows)
    with pytest.raises(ValueError, match="field Answers;.*--fields PROMPT ANSWER"):
        read_problems(rows, "task.text", "Answers")


def test_answers_at_the_end_of_a_text_are_found():
    assert gold_answer("so 5 - 2 = 3\n#### 1,003") == "1,003"
    assert gold_answer("#### Step 2\nso \\boxed{5}\n#### Done") == "5"  # headings of a solution
    assert gold_answer(r"thus \boxed{\frac{1}{2}}") == r"\frac{1}{2}"
    assert gold_answer(r"2\sqrt{3}") == r"2\sqrt{3}" and gold_answer(["7"]) == "7" and gold_answer(None) is None


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
    found = gold_answer(field)
    assert isinstance(found, list) if answer is None else found == answer


def test_a_byte_order_mark_is_no_part_of_a_file(tmp_path):
    (tmp_path / "rows.jsonl").write_bytes(b"\xef\xbb\xbf" + json.dumps(GSM8K).encode())
    assert load_rows(str(tmp_path / "rows.jsonl")) == [GSM8K]


@pytest.mark.parametrize("source", ["x.jsonl", "x.json", "x.parquet", "./x", "/no/x", "../x", "~/x", "no/such/x"])
def test_a_missing_file_is_one_short_error(source):
    with pytest.raises(ValueError) as raised:
        load_rows(source)
    assert str(raised.value) == f"data: no file {source!r}"


def test_what_may_be_a_data_set_of_the_hub_is_looked_for_there(monkeypatch):
    def refuse(name):
        raise RuntimeError(f"gated: {name}")

    monkeypatch.setattr(datasets, "get_dataset_config_names", refuse)
    for name in ("owner/name", "name"):
        with pytest.raises(ValueError, match=f"cannot load '{name}'.*gated: {name}.*hf auth login"):
            load_rows(name)


def test_files_of_all_kinds_and_folders_in_the_layout_of_the_hub_are_read(tmp_path):
    datasets.Dataset.from_list([DAPO]).to_parquet(tmp_path / "rows.parquet")
    (tmp_path / "rows.json").write_text(json.dumps([GSM8K]))
    assert [*load_rows(str(tmp_path / "rows.parquet"))] == [DAPO] and [*load_rows(str(tmp_path / "rows.json"))] == [GSM8K]
    hub = tmp_path / "gsm8k"
    for name, question in (("socratic", "s"), ("main", "m")):
        (hub / name).mkdir(parents=True)
        for split in ("train", "test"):
            datasets.Dataset.from_list([GSM8K | {"question": question + split}]).to_parquet(hub / name / f"{split}.parquet")
    files = "".join(
        f"- config_name: {name}\n  data_files:\n"
        + "".join(f"  - {{split: {split}, path: {name}/{split}.parquet}}\n" for split in ("train", "test"))
        for name in ("socratic", "main")
    )
    (hub / "README.md").write_text(f"---\nconfigs:\n{files}---\n")
    assert load_rows(str(hub))[0]["question"] == "mtrain"  # GSM8K has two configurations and no default
    assert load_rows(str(hub), "socratic/test")[0]["question"] == "stest"
    with pytest.raises(ValueError, match="cannot load.*validation"):
        load_rows(str(hub), split="validation")


@pytest.mark.parametrize(
    "content, message", [("", "is empty"), ("{}\n[1]\n", "line 2 is damaged"), ('{"a": 1}\n\n{"a"', "line 3 is damaged")]
)
def test_a_file_that_is_empty_or_broken_is_an_error_that_names_it_and_the_line(tmp_path, content, message):
    (tmp_path / "broken.jsonl").write_text(content)
    with pytest.raises(ValueError, match=f"broken.jsonl.*{message}") as raised:
        load_rows(str(tmp_path / "broken.jsonl"))
    assert "hub" not in str(raised.value)


def test_the_chat_template_writes_the_prompt_and_the_bos_is_not_doubled():
    tokenizer = countdown.build_tokenizer()
    plain = prompt_text(tokenizer, "1+2= ", "")
    assert plain == "1+2=\n" and tokenizer.decode(prompt_token_ids(tokenizer, plain)).startswith("<bos>1+2=")
    with pytest.raises(ValueError, match="chat template.*system, user"):
        prompt_text(tokenizer, "1+2=", system="be brief")
    tokenizer.chat_template = "<bos>" + CHAT
    assert prompt_text(tokenizer, "1+2=", "boxed", "brief") == "<bos><system>brief<user>1+2=\nboxed<assistant>"
    tokenizer.chat_template = "{{ raise_exception('System role not supported') }}"
    with pytest.raises(ValueError, match="refuses messages of system, user .System role not supported"):
        prompt_text(tokenizer, "1+2=", "boxed", "brief")
    tokenizer.chat_template = "<bos>" + CHAT
    messages = [{"role": "user", "content": "1+2="}]
    text = prompt_text(tokenizer, messages, "boxed")  # messages bring their own instruction
    assert text == "<bos><user>1+2=<assistant>"
    assert prompt_token_ids(tokenizer, text).count(tokenizer.bos_token_id) == 1


def test_prompts_beyond_the_limit_are_counted_and_token_ids_are_those_of_the_text(monkeypatch):
    tokenizer = countdown.build_tokenizer()
    problems = [Problem("1+2=", "3"), Problem("1+2+3=", "6")]
    short, too_long = tokenize(problems, tokenizer, 6, instruction="")  # <bos>, four characters, a newline
    assert too_long == 1 and short == [Problem(tokenizer("1+2=\n")["input_ids"], "3")]
    monkeypatch.setattr(data, "prompt_token_ids", lambda tokenizer, text: [])  # as a folder without a tokenizer's files gives
    with pytest.raises(ValueError, match="encodes nothing of '1.2='"):
        tokenize(problems, tokenizer, 6)
