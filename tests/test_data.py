"""data.py on local files in the schemas of GSM8K, DAPO-Math-17k, SkyWork-OR1-RL-Data and AIME."""

import json
import math

import pytest
from conftest import write_lines
from tokenizers.processors import TemplateProcessing

import train
from reward import grade_math
from tasks.countdown import build_tokenizer
from tasks.data import Problem, gold_answer, load_rows, load_task, read_problems, tokenize

datasets = pytest.importorskip("datasets")

SENTENCE = "The answer is 5."


# ---------------------------------------------------------------- rows
def test_parts_of_files_and_folders_are_read(tmp_path):
    """GSM8K has two configurations on the hub and no default."""
    main = [{"question": "main"}] * 2
    lines = write_lines(tmp_path / "at 10:30/main.jsonl", main)
    parquet = f"{tmp_path}/main.parquet"
    datasets.Dataset.from_list(main).to_parquet(parquet)
    hub = tmp_path / "hub"
    write_lines(hub / "main.jsonl", main)
    write_lines(hub / "test.jsonl", [{"question": "socratic"}])
    (hub / "README.md").write_text(
        "---\nconfigs:\n"
        "- {config_name: socratic, data_files: [{split: test, path: test.jsonl}]}\n"
        "- {config_name: main, data_files: [{split: train, path: main.jsonl}]}\n---\n"
    )
    for data in (lines, parquet, str(hub)):
        assert list(load_rows(data, "train")) == main
    for data in (f"{lines}:train[1:]", f"{parquet}:train[1:]", f"{hub}:main/train[1:]"):
        assert list(load_rows(data, "test")) == main[1:]
    assert list(load_rows(f"{hub}:socratic/test", "train")) == [{"question": "socratic"}]
    for path in (tmp_path / "rows.csv", tmp_path / "cut.jsonl"):
        with pytest.raises(ValueError, match=f"^data: .*{path}.*Give a .parquet file"):
            load_rows(write_lines(path, main, '\n{"a"'), "train")


# ---------------------------------------------------------------- problems
def test_the_fields_of_well_known_data_sets_are_recognised(tmp_path):
    """The file begins as files of Windows do, and has an empty line."""
    chat = [{"content": "6 * 7? The last line should be Answer: $Answer", "role": "user"}]
    rows = [
        {"question": "6 * 7?", "answer": "6 * 7 = <<6*7=42>>42\n#### 42"},
        {"prompt": chat, "reward_model": {"ground_truth": "42"}},
        {"problem": "6 · 7?", "solution": r"It is \boxed{41}, no, \boxed{42}."},
        # `datasets` would round this id and make a timestamp of the date.
        {"Problem": "6 7?", "Answer": 42, "id": 18446744073709551617, "date": "2024-05-01"},
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("\ufeff" + "\n\n".join(json.dumps(row) for row in rows))
    assert load_rows(str(path), "train") == rows
    prompts = ["6 * 7?", chat, "6 · 7?", "6 7?"]
    assert read_problems(rows) == [Problem(prompt, "42") for prompt in prompts]


def test_rows_without_a_prompt_or_an_answer_of_their_own_are_left_out(capsys):
    rows = [
        {"prompt": "a", "answer": "1"},
        {"prompt": " ", "answer": "1"},
        {"prompt": "b", "answer": ""},
        {"prompt": "a", "answer": "2"},
        {"prompt": "c", "answer": 0},
        {"prompt": "d", "answer": "s" * 201},
        {"prompt": None, "problem": "e", "answer": [], "solution": r"\boxed{5}", "choices": []},
    ]
    assert read_problems(rows) == [Problem("a", "1"), Problem("c", "0"), Problem("e", "5")]
    said = capsys.readouterr().out
    assert "3 of 7 rows" in said and "1 answers cannot be compared, such as 'sss" in said


@pytest.mark.parametrize("field", ["Body", "choices", "B", "Option 1", "system_prompt", "image_1"])
def test_what_a_prompt_would_lack_is_refused(field):
    row = {"question": "Which is even, 2 or 3?", "answer": "2", field: "2 or 3"}
    assert read_problems([row]) == [Problem(row["question"], "2")]
    for question in ("Which is even?", "<image 1> Which is even, 2 or 3?"):
        with pytest.raises(ValueError, match="^data: .*Which is even.*no pictures"):
            read_problems([row | {"question": question}])


def test_fields_may_be_named_and_a_reward_of_ones_own_gets_all_answers_whole():
    tests = {"tests": [1, "#### a"]}
    rows = [{"task": {"text": "a"}, "gold": 1}, {"prompt": "b", "answer": SENTENCE}]
    rows += [{"prompt": "c", "answer": tests}, {"prompt": "d"}]
    assert read_problems(rows, "task.text", "gold") == [Problem("a", "1")]
    expected = [Problem("b", SENTENCE), Problem("c", json.dumps(tests)), Problem("d", "")]
    assert read_problems(rows, own_grader=True) == expected
    with pytest.raises(ValueError, match=f"^data: .*2 answers cannot.*{SENTENCE}.*--reward"):
        read_problems(rows)
    with pytest.raises(ValueError, match="^data: 0 of 4 rows.*'task', 'gold'.*--fields"):
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
USER = {"role": "user", "content": "2="}
SYSTEM = {"role": "system", "content": "1"}
CHAT = (
    "<bos>{% for m in messages %}{{ ';' if m.role == 'user' else '*' }}{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}:{% endif %}"
)
DATED = "{% if strftime_now is defined %}{{ strftime_now('%Y-%m-%d') }}{% endif %}" + CHAT


def read_by_the_model(prompt, template: str | None) -> str:
    """The text of a prompt's tokens, from a tokenizer that adds a BOS and an EOS."""
    tokenizer = build_tokenizer()
    ids = [("<bos>", tokenizer.bos_token_id), ("<eos>", tokenizer.eos_token_id)]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing("<bos> $A <eos>", None, ids)
    tokenizer.chat_template = template
    ((token_ids, _),) = tokenize([Problem(prompt, "3")], tokenizer, 99, instruction="8")
    return tokenizer.decode(token_ids).replace("<unk>", "?")


@pytest.mark.parametrize(
    "prompt, template, text",
    [
        ("1+2= ", None, "<bos>1+2=?8?"),  # line breaks
        ([USER], None, "<bos>2=?"),  # it brings its instruction
        ("1+2=", CHAT, "<bos>;1+2=?8:"),
        (r"\boxed2=", CHAT, "<bos>;??????2=:"),  # asks for a box already
        ([SYSTEM, USER], CHAT, "<bos>*1;2=:"),
        ([USER], DATED, "2024-07-26<bos>;2=:"),
    ],
)
def test_the_template_writes_the_prompt_without_a_second_bos_or_an_eos(prompt, template, text):
    assert read_by_the_model(prompt, template) == text


@pytest.mark.parametrize(
    "template, prompt",
    [
        (None, [SYSTEM, USER]),  # several messages need a template
        (CHAT, [{"from": "human", "value": "2="}]),
        (CHAT, [{"role": "user", "content": [{"type": "text", "text": "2="}]}]),
        (CHAT, [USER, {"role": "assistant", "content": "3"}]),  # NuminaMath's hold the solution
        (CHAT.replace("in messages", "in messages[1:]"), [SYSTEM, USER]),
    ],
)
def test_messages_that_a_template_would_drop_or_print_are_refused(template, prompt):
    with pytest.raises(ValueError, match="^data: .*cannot write the prompt"):
        read_by_the_model(prompt, template)


# ---------------------------------------------------------------- a task
def test_a_task_holds_problems_out_and_leaves_room_for_responses(tmp_path, policy):
    """One prompt is too long for the 128 positions."""
    rows = []
    for content in ["5" * 90, *"01234678"]:
        rows.append({"prompt": [USER | {"content": content}], "answer": content})
    data = write_lines(tmp_path / "rows.jsonl", rows)
    options = train.Options(
        data=data, model=policy, held_out=3, prompts_per_step=4, max_new_tokens=53
    )
    task = load_task(options)
    # The same in every run: what one has held out, another must not train on.
    assert [problem.answer for problem in task.held_out] == ["4", "1", "6"]
    assert sorted(problem.answer for problem in task.train) == ["0", "2", "3", "7", "8"]
    assert task.grader is grade_math
    # A partial rollout may be longer by almost partial_budget tokens before it is cut.
    options.partial_budget = 5
    options.max_new_tokens = 128 - 5 - len(task.train[0].prompt)
    load_task(options)
    options.max_new_tokens += 1
    with pytest.raises(ValueError, match="^data: 0 problems are too few.*max_new_tokens"):
        load_task(options)
    options.max_new_tokens = 123
    with pytest.raises(ValueError, match="^max_new_tokens: .* 128 positions"):
        load_task(options)
