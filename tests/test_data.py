"""data.py on local files in the schemas of GSM8K, DAPO-Math-17k, SkyWork-OR1-RL-Data and AIME."""

import json
import re
from types import SimpleNamespace

import pytest
from conftest import write_lines

import countdown
from data import (
    gold_answer,
    load_rows,
    load_task,
    read_problems,
    tokenize,
)
from reward import Problem

datasets = pytest.importorskip("datasets")

CHAT = (
    "<bos>{% for m in messages %}{{ '*' if m.role == 'system' else ';' }}{{ m.content }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}:{% endif %}"
)
GSM8K = {"question": "6 * 7?", "answer": "6 * 7 = <<6*7=42>>42\n#### 42"}
DAPO = {
    "data_source": "math_dapo",
    "prompt": [{"content": "6 * 7? The last line should be Answer: $Answer", "role": "user"}],
    "reward_model": {"ground_truth": "42", "style": "rule-lighteval/MATH_v2"},
}
SKYWORK = {
    "prompt": [{"role": "user", "content": "What is 6 * 7?"}],
    "reward_model": {"ground_truth": '["42"]', "style": "rule"},
    "extra_info": {"index": 0, "model_difficulty": {"DeepSeek-R1-Distill-Qwen-7B": 5}},
}
MATH = {"problem": "6 * 7?", "solution": r"It is \boxed{41}, no, \boxed{42}.", "level": "Level 1"}
AIME = {"Problem": "6 * 7?", "Answer": 42}


@pytest.fixture(autouse=True)
def cache_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))


# ---------------------------------------------------------------- rows and problems
@pytest.mark.parametrize("row", [GSM8K, DAPO, SKYWORK, MATH, AIME])
def test_the_fields_of_well_known_data_sets_are_recognised(row, tmp_path):
    rows = load_rows(write_lines(tmp_path / "rows.jsonl", [row]), "train")
    (problem,) = read_problems(rows)
    assert problem.prompt in row.values() and problem.answer == "42"


def test_rows_that_cannot_be_used_are_counted_by_their_reason(capsys):
    message = {"role": "user", "content": "chat"}
    rows = [
        {"prompt": "a", "answer": "1"},
        {"prompt": " ", "answer": "1"},
        {"prompt": None, "answer": "1"},
        {"prompt": [{"role": "user"}], "answer": "1"},
        {"prompt": "b", "answer": ""},
        {"prompt": "c", "answer": float("nan")},
        {"prompt": "d", "answer": ["1", "2"]},
        {"prompt": "f", "answer": "s" * 201},
        {"prompt": "a", "answer": "2"},
        {"prompt": [message], "answer": 0},
        {"prompt": "g", "answer": "s" * 200},
    ]
    usable = [Problem("a", "1"), Problem([message], "0"), Problem("g", "s" * 200)]
    assert read_problems(rows) == usable
    numbers = [int(text) for text in re.findall(r"\d+", capsys.readouterr().out)]
    assert numbers == [3, 11, 3, 4, 1]


def test_a_reward_of_ones_own_gets_answers_of_any_length_and_lists_as_json():
    rows = [
        {"prompt": "a", "answer": "so " * 100},
        {"prompt": "b", "answer": ["1", "2"]},
        {"prompt": "c", "answer": '["1", "2"]'},
    ]
    answers = [problem.answer for problem in read_problems(rows, own_grader=True)]
    assert answers == [("so " * 100).strip(), '["1", "2"]', '["1", "2"]']


def test_fields_may_be_named_and_a_missing_one_is_an_error_that_names_what_is_there(tmp_path):
    row = {"task": {"text": "a"}, "gold": "1", "answer": "2"}
    rows = load_rows(write_lines(tmp_path / "rows.jsonl", [row]), "train")
    assert read_problems(rows, "task.text", "gold") == [Problem("a", "1")]
    for fields in ((), ("task.text", "Answers")):
        with pytest.raises(ValueError, match="data.*task.*gold.*answer.*--fields"):
            read_problems(rows, *fields)
    for fields in (("task.text",), ("task.text", "gold", "answer")):
        with pytest.raises(ValueError, match="^fields"):
            read_problems(rows, *fields)


@pytest.mark.parametrize(
    "field, answer",
    [
        ("#### Step 1\n3\n#### 4", "4"),
        ("#### Step 2\nso \\boxed{5}\n#### Done", "5"),  # headings of a solution
        (r"thus \boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        ("[0, 1]", "[0, 1]"),  # an interval, not a list
        ('["[0, 1]"]', "[0, 1]"),
        (["7"], "7"),
        ('["7"] or "8"', '["7"] or "8"'),
        ('["1", "2"]', ""),
        ([0, 1], ""),
        (None, ""),
        ([None], ""),
    ],
)
def test_the_answer_in_an_answer_field(field, answer):
    assert gold_answer(field) == answer


def test_files_of_all_kinds_are_read(tmp_path):
    rows = [GSM8K, MATH | {"problem": "7 * 6?"}]  # they may differ in their fields
    expected = [Problem("6 * 7?", "42"), Problem("7 * 6?", "42")]
    lines = write_lines(tmp_path / "rows.jsonl", rows)
    whole = tmp_path / "rows.json"
    whole.write_text(json.dumps(rows))
    parquet = tmp_path / "rows.parquet"
    datasets.Dataset.from_list([GSM8K]).to_parquet(parquet)
    assert read_problems(load_rows(str(parquet), "train")) == expected[:1]
    for path in (lines, whole):
        assert read_problems(load_rows(str(path), "train")) == expected


def test_a_folder_in_the_layout_of_the_hub_is_read(tmp_path):
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
    # GSM8K has two configurations and no default.
    named = {"": "main train", ":test": "main test", ":socratic/test": "socratic test"}
    for split, question in named.items():
        assert load_rows(f"{hub}{split}", "train")[0]["question"] == question
    with pytest.raises(ValueError, match="data.*validation"):
        load_rows(f"{hub}:validation", "train")


@pytest.mark.parametrize(
    "name, content",
    [("gone.jsonl", None), ("empty.json", "[]"), ("cut.jsonl", '{"a": 1}\n\n{"a"')],
)
def test_a_file_that_is_missing_empty_or_broken_is_an_error_that_names_it(tmp_path, name, content):
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=f"data.*{name}"):
        load_rows(str(tmp_path / name), "train")


# ---------------------------------------------------------------- prompts
def test_the_chat_template_writes_the_prompt_and_the_bos_is_not_doubled():
    tokenizer = countdown.build_tokenizer()
    messages = [{"role": "system", "content": "1"}, {"role": "user", "content": "2="}]

    def read_by_the_model(prompt) -> str:
        ((token_ids, _),) = tokenize([Problem(prompt, "3")], tokenizer, 99, instruction="8")
        return tokenizer.decode(token_ids)

    assert read_by_the_model("1+2= ") == "<bos>1+2=<unk>8<unk>"  # line breaks
    assert read_by_the_model(messages[1:]) == "<bos>2=<unk>"  # it brings its instruction
    with pytest.raises(ValueError, match="chat template"):
        read_by_the_model(messages)
    tokenizer.chat_template = CHAT
    assert read_by_the_model("1+2=") == "<bos>;1+2=<unk>8:"
    assert read_by_the_model(messages) == "<bos>*1;2=:"


def test_a_template_that_fails_is_an_error_with_the_model_and_the_messages():
    tokenizer = countdown.build_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('System role not supported') }}"
    tokenizer.name_or_path = "models/mine"
    messages = [{"role": "system", "content": "1"}, {"role": "user", "content": "2="}]
    with pytest.raises(ValueError, match="^data: .*models/mine.*'role': 'system'"):
        tokenize([Problem(messages, "3")], tokenizer, 99)


def test_prompts_beyond_the_limit_are_counted_and_token_ids_are_those_of_the_text(capsys):
    tokenizer = countdown.build_tokenizer()
    problems = [Problem("1+2=", "3"), Problem("1+2+3=", "6")]
    # <bos>, four characters, a newline: six tokens
    short = tokenize(problems, tokenizer, 6, instruction="")
    assert short == [Problem(tokenizer("1+2=\n")["input_ids"], "3")]
    assert capsys.readouterr().out.startswith("1 ")


# ---------------------------------------------------------------- a task
@pytest.fixture
def options(tmp_path, policy):
    """train.py's, with a file of 12 problems, one prompt of which is too long."""
    rows = []
    for number in range(12):
        length = 90 if number == 5 else 5
        prompt = [{"role": "user", "content": f"{number}+".ljust(length, "1")}]
        rows.append({"prompt": prompt, "answer": str(number)})
    return SimpleNamespace(
        data=write_lines(tmp_path / "rows.jsonl", [*rows, {"prompt": "", "answer": "1"}]),
        fields=[],
        model=policy,
        reward="",
        held_out=3,
        prompts_per_step=4,
        max_new_tokens=53,
        partial_budget=0,
    )


def test_without_data_the_task_is_countdown():
    task = load_task(SimpleNamespace(data=""))
    tokenizer = countdown.build_tokenizer()
    for problems, of_task in zip(countdown.problems(), (task.train, task.held_out), strict=True):
        prompts = [tokenizer.decode(prompt) for prompt, _ in of_task]
        assert prompts == [f"<bos>{problem.prompt}" for problem in problems]
    assert task.grade is countdown.grade


def test_a_task_holds_problems_out_and_says_what_is_left_out(options, capsys):
    task = load_task(options)
    said = capsys.readouterr().out
    assert "12 of 13 rows" in said and "1 prompts" in said
    # The same in every run: what one has held out, another must not train on.
    assert [problem.answer for problem in task.held_out] == ["9", "10", "1"]
    numbers = sorted(int(problem.answer) for problem in [*task.train, *task.held_out])
    assert numbers == [0, 1, 2, 3, 4, 6, 7, 8, 9, 10, 11]
    assert task.grade(r"\boxed{07}", "7")
    tokenizer = countdown.build_tokenizer()
    for prompt, answer in task.train:
        assert tokenizer.decode(prompt).startswith(f"<bos>{answer}+")


def test_prompts_leave_room_for_responses(options):
    """A partial rollout may be longer by almost partial_budget tokens before it is cut."""
    longest = max(len(problem.prompt) for problem in load_task(options).train)
    options.partial_budget = 5
    options.max_new_tokens = 128 - 5 - longest
    assert len(load_task(options).train) == 8
    options.max_new_tokens += 1
    with pytest.raises(ValueError, match="data"):  # no prompt is left
        load_task(options)


def test_what_does_not_fit_is_refused_by_the_name_of_the_option(options, tmp_path):
    options.held_out = 8
    with pytest.raises(ValueError, match="held_out"):
        load_task(options)
    options.held_out = 7
    assert len(load_task(options).train) == 4
    options.max_new_tokens = 128
    with pytest.raises(ValueError, match="max_new_tokens"):
        load_task(options)
    options.max_new_tokens = 53

    rewards = tmp_path / "rewards.py"
    rewards.write_text("def grade(response, answer):\n    return 2\n")
    options.reward = f"{rewards}:grade"
    with pytest.raises(ValueError, match="rewards.py:grade"):
        load_task(options)
    rewards.with_name("fine.py").write_text("def grade(response, answer):\n    return 0.5\n")
    options.reward = f"{tmp_path}/fine.py:grade"
    assert load_task(options).grade("", "") == 0.5
