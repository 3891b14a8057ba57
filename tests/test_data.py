"""data.py on local files in the schemas of GSM8K, DAPO-Math-17k, SkyWork-OR1-RL-Data and AIME."""

import json
import math

import pytest
from conftest import write_lines
from tokenizers.processors import TemplateProcessing

import train
from reward import grade_math
from tasks import countdown
from tasks.data import Problem, gold_answer, load_rows, load_task, read_problems, tokenize

datasets = pytest.importorskip("datasets")

CHAT = (
    "<bos>{% for m in messages %}{{ ';' if m.role == 'user' else '*' }}{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}:{% endif %}"
)
GSM8K = {"question": "6 * 7?", "answer": "6 * 7 = <<6*7=42>>42\n#### 42"}
DAPO = {
    "prompt": [{"content": "6 * 7? The last line should be Answer: $Answer", "role": "user"}],
    "reward_model": {"ground_truth": "42", "style": "rule-lighteval/MATH_v2"},
}
MATH = {"problem": "6 * 7?", "solution": r"It is \boxed{41}, no, \boxed{42}.", "level": "Level 1"}
# `datasets` would round this id and make a timestamp of the date.
AIME = {"Problem": "6 · 7?", "Answer": 42, "id": 18446744073709551617, "date": "2024-05-01"}
SENTENCE = "The answer is 5."


# ---------------------------------------------------------------- rows
@pytest.mark.parametrize(
    "split, kept",
    [("", [0, 1, 2, 3]), (":train[:2]", [0, 1]), (":train[:25%]+train[3:]", [0, 3])],
)
def test_a_file_or_a_part_of_it_is_read(split, kept, tmp_path):
    rows = [{"prompt": f"{number}"} for number in range(4)]
    lines = write_lines(tmp_path / "at 10:30/rows.jsonl", rows)
    parquet = f"{tmp_path}/rows.parquet"
    datasets.Dataset.from_list(rows).to_parquet(parquet)
    for path in (lines, parquet):
        assert list(load_rows(path + split, "test")) == [rows[number] for number in kept]


@pytest.mark.parametrize(
    "name, reason",
    [
        ("cut.jsonl", "JSONDecodeError"),
        ("rows.jsonl:test", "train"),  # the one split of a file
        ("rows.csv", "JSONDecodeError.*one JSON object a line"),
        ("rows.json:train", "JSONDecodeError.*one JSON object a line"),
    ],
)
def test_a_file_that_cannot_be_read_is_refused(name, reason, tmp_path):
    write_lines(tmp_path / "rows.jsonl", [{"a": 1}])
    write_lines(tmp_path / "cut.jsonl", [{"a": 1}], '\n{"a"')
    (tmp_path / "rows.csv").write_text("prompt,answer\n1,2\n")
    (tmp_path / "rows.json").write_text('[\n{"prompt": "1"}\n]')
    with pytest.raises(ValueError, match=f"^data: .*{name}.*{reason}"):
        load_rows(f"{tmp_path}/{name}", "train")


HUB = """---
configs:
- config_name: socratic
  data_files: [{split: test, path: socratic/test.jsonl}]
- config_name: main
  data_files: [{split: train, path: main/train.jsonl}, {split: test, path: main/test.jsonl}]
---
"""


def test_a_folder_in_the_layout_of_the_hub_is_read(tmp_path):
    """GSM8K has two configurations and no default."""
    named = {"": "main/train", ":socratic/test": "socratic/test", ":main/train[1:]": "main/train"}
    for place in ("main/train", "main/test", "socratic/test"):
        write_lines(tmp_path / f"hub/{place}.jsonl", [{"question": place}] * 2)
    (tmp_path / "hub/README.md").write_text(HUB)
    for split, place in named.items():
        questions = load_rows(f"{tmp_path}/hub{split}", "train")["question"]
        assert list(questions) == [place] * (1 if "[1:]" in split else 2)


# ---------------------------------------------------------------- problems
@pytest.mark.parametrize("row", [GSM8K, DAPO, MATH, AIME])
def test_the_fields_of_well_known_data_sets_are_recognised(row, tmp_path):
    line = "\ufeff" + json.dumps(row, ensure_ascii=False)  # begins as files of Windows do
    rows = load_rows(write_lines(tmp_path / "rows.jsonl", [], line), "train")
    assert rows == [row]
    (problem,) = read_problems(rows)
    assert problem.prompt in row.values() and problem.answer == "42"


def test_rows_without_a_prompt_or_an_answer_of_their_own_are_left_out(capsys):
    chat = [{"role": "user", "content": "chat"}]
    rows = [
        {"prompt": "a", "answer": "1"},
        {"prompt": " ", "answer": "1"},
        {"prompt": "b", "answer": ""},
        {"prompt": "a", "answer": "2"},
        {"prompt": chat, "answer": 0},
        {"prompt": "d", "answer": "s" * 200},
        {"prompt": "e", "answer": "s" * 201},
        {"prompt": None, "problem": "g", "answer": [], "solution": r"\boxed{5}", "choices": []},
    ]
    usable = [Problem("a", "1"), Problem(chat, "0"), Problem("d", "s" * 200), Problem("g", "5")]
    assert read_problems(rows) == usable
    said = capsys.readouterr().out
    assert "4 of 8 rows" in said and "1 answers cannot be compared, such as 'sss" in said


@pytest.mark.parametrize("field", ["Body", "choices", "B", "Option 1", "system_prompt", "image_1"])
def test_what_a_prompt_would_lack_is_refused(field):
    row = {"question": "Which is even, 2 or 3?", "answer": "2", field: "2 or 3"}
    assert read_problems([row]) == [Problem(row["question"], "2")]
    for question in ("Which is even?", "<image 1> Which is even, 2 or 3?"):
        with pytest.raises(ValueError, match="^data: .*Which is even.*no pictures"):
            read_problems([row | {"question": question}])


def test_fields_may_be_named_and_an_error_says_what_is_missing_or_unreadable():
    row = {"task": {"text": "a"}, "gold": "1", "answer": SENTENCE}
    assert read_problems([row], "task.text", "gold") == [Problem("a", "1")]
    with pytest.raises(ValueError, match="^data.*'task', 'gold', 'answer'.*--fields"):
        read_problems([row])
    with pytest.raises(
        ValueError, match=f"^data: .*1 answers cannot be compared.*{SENTENCE}.*--reward"
    ):
        read_problems([row], "task.text", "answer")


def test_a_reward_of_ones_own_needs_no_answers_and_gets_all_of_them_whole():
    tests = {"tests": [1, "#### a"]}
    rows = [{"prompt": "a"}, {"prompt": "b", "answer": SENTENCE}, {"prompt": "c", "answer": tests}]
    expected = [Problem("a", ""), Problem("b", SENTENCE), Problem("c", json.dumps(tests))]
    assert read_problems(rows, own_grader=True) == expected
    with pytest.raises(ValueError, match="0 of 3 rows.*'prompt'.*--fields"):
        read_problems(rows, "prompt", "tests", own_grader=True)


@pytest.mark.parametrize(
    "field, answer",
    [
        ("#### Step 2\nso \\boxed{5}\n#### Done", "5"),  # headings of a solution
        ("[0, 1]", "[0, 1]"),  # an interval, not a list
        ('["1", "2"]', ""),
        ([2, 3], ""),  # no interval
        ("['2', '3']", ""),
        (r'["\\frac{\\pi}{2}"]', r"\frac{\pi}{2}"),
        (r'["\frac{1}{2}"]', ""),  # LaTeX that JSON should have escaped
        (r'["\nu"]', ""),
        (" 5\r\n", "5"),
        ({"value": "5"}, ""),
        (SENTENCE, ""),
        ("They are equal", "They are equal"),
        (math.nan, ""),
        (1e-5, ""),  # no grader reads an exponent
        ([0.5], "0.5"),
    ],
)
def test_the_answer_in_an_answer_field(field, answer):
    assert gold_answer(field) == answer


# ---------------------------------------------------------------- prompts
@pytest.fixture
def read_by_the_model():
    """A function that gives the text of a prompt's tokens, with this chat template."""
    tokenizer = countdown.build_tokenizer()
    tokenizer.name_or_path = "models/mine"
    ids = [("<bos>", tokenizer.bos_token_id), ("<eos>", tokenizer.eos_token_id)]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing("<bos> $A <eos>", None, ids)

    def read(prompt, template: str | None = None) -> str:
        tokenizer.chat_template = template
        ((token_ids, _),) = tokenize([Problem(prompt, "3")], tokenizer, 99, instruction="8")
        return tokenizer.decode(token_ids)

    return read


USER = {"role": "user", "content": "2="}
SYSTEM = {"role": "system", "content": "1"}
DATED = "{% if strftime_now is defined %}{{ strftime_now('%-d') }}{% endif %}" + CHAT


@pytest.mark.parametrize(
    "prompt, template, text",
    [
        ("1+2= ", None, "<bos>1+2=<unk>8<unk>"),  # line breaks
        ([USER], None, "<bos>2=<unk>"),  # it brings its instruction
        ("1+2=", CHAT, "<bos>;1+2=<unk>8:"),
        (r"\boxed2=", CHAT, "<bos>;<unk><unk><unk><unk><unk><unk>2=:"),  # asks for a box already
        ([SYSTEM, USER], CHAT, "<bos>*1;2=:"),
        ([USER], DATED, "26<bos>;2=:"),
    ],
)
def test_the_template_writes_the_prompt_without_a_second_bos_or_an_eos(
    read_by_the_model, prompt, template, text
):
    assert read_by_the_model(prompt, template) == text


WITHOUT_SYSTEM = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}"
)


@pytest.mark.parametrize(
    "template, prompt",
    [
        (None, [SYSTEM, USER]),  # several messages need a template
        (CHAT, [{"from": "human", "value": "2="}]),
        (CHAT, [{"role": "user", "content": [{"type": "text", "text": "2="}]}]),
        (CHAT, [USER, {"role": "assistant", "content": "3"}]),  # NuminaMath's hold the solution
        (WITHOUT_SYSTEM, [SYSTEM, USER]),
    ],
)
def test_messages_that_a_template_would_drop_or_print_are_refused(
    read_by_the_model, template, prompt
):
    with pytest.raises(ValueError, match="^data: .*models/mine"):
        read_by_the_model(prompt, template)


# ---------------------------------------------------------------- a task
@pytest.fixture
def options(tmp_path, policy):
    """train.py's, with a file of 12 problems, one prompt of which is too long."""
    rows = []
    for number in range(12):
        length = 90 if number == 5 else 5
        content = f"{number}+".ljust(length, "1")
        rows.append({"prompt": [{"role": "user", "content": content}], "answer": str(number)})
    return train.Options(
        data=write_lines(tmp_path / "rows.jsonl", rows),
        model=policy,
        held_out=3,
        prompts_per_step=4,
        max_new_tokens=53,
    )


def test_a_task_holds_problems_out_and_says_what_is_left_out(options, capsys):
    task = load_task(options)
    assert "11 of 12 prompts have at most" in capsys.readouterr().out
    # The same in every run: what one has held out, another must not train on.
    assert [problem.answer for problem in task.held_out] == ["9", "10", "1"]
    numbers = sorted(int(problem.answer) for problem in [*task.train, *task.held_out])
    assert numbers == [0, 1, 2, 3, 4, 6, 7, 8, 9, 10, 11]
    assert task.grader is grade_math
    options.held_out = 0
    assert len(load_task(options).train) == 11


def test_prompts_leave_room_for_responses(options):
    """A partial rollout may be longer by almost partial_budget tokens before it is cut."""
    longest = max(len(problem.prompt) for problem in load_task(options).train)
    options.partial_budget = 5
    options.max_new_tokens = 128 - 5 - longest
    assert len(load_task(options).train) == 8
    options.max_new_tokens += 1
    with pytest.raises(ValueError, match="^data: 0 problems are too few.*held_out"):
        load_task(options)
    options.max_new_tokens = 123
    with pytest.raises(ValueError, match="^max_new_tokens: .*128 .*128 positions.*lower"):
        load_task(options)


def test_the_grader_is_tried_before_training(options, tmp_path, monkeypatch):
    monkeypatch.setattr("reward.check_math_verify", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        load_task(options)
    options.reward = f"{tmp_path}/rewards.py:two"
    (tmp_path / "rewards.py").write_text("two = lambda response, answer: 2\n")
    with pytest.raises(ValueError, match="rewards.py:two"):
        load_task(options)
