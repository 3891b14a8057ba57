"""data.py on local files in the schemas of GSM8K, DAPO-Math-17k, SkyWork-OR1-RL-Data and AIME."""

import json
import math
import re
from types import SimpleNamespace

import pytest
from conftest import write_lines
from tokenizers.processors import TemplateProcessing

from reward import grade_math
from tasks import countdown
from tasks.data import (
    INSTRUCTION,
    Problem,
    as_messages,
    gold_answer,
    load_rows,
    load_task,
    read_problems,
    tokenize,
)

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
SKYWORK = {
    "prompt": [{"role": "user", "content": "What is 6 * 7?"}],
    "reward_model": {"ground_truth": '["42"]', "style": "rule"},
}
MATH = {"problem": "6 * 7?", "solution": r"It is \boxed{41}, no, \boxed{42}.", "level": "Level 1"}
AIME = {"Problem": "6 * 7?", "Answer": 42}


# ---------------------------------------------------------------- rows and problems
@pytest.mark.parametrize("row", [GSM8K, DAPO, SKYWORK, MATH, AIME])
def test_the_fields_of_well_known_data_sets_are_recognised(row, tmp_path):
    rows = load_rows(write_lines(tmp_path / "rows.jsonl", [row]), "train")
    (problem,) = read_problems(rows)
    assert problem.prompt in row.values() and problem.answer == "42"


def test_rows_that_cannot_be_used_are_counted_by_their_reason(capsys):
    chat = [{"role": "user", "content": "chat"}]
    rows = [
        {"prompt": "a", "answer": "1"},
        {"prompt": " ", "answer": "1"},
        {"prompt": "b", "answer": ""},
        {"prompt": "c", "answer": ["1", "2"]},
        {"prompt": "d", "answer": "s" * 201},
        {"prompt": "a", "answer": "2"},
        {"prompt": chat, "answer": 0},
        {"prompt": "e", "answer": "s" * 200},
        {"prompt": "f", "solution": "We have 5"},
        {"prompt": "g", "solution": "5"},
        {"prompt": "h ![](https://cdn.mathpix.com/1.jpg)", "answer": "1"},
    ]
    usable = [Problem("a", "1"), Problem(chat, "0"), Problem("e", "s" * 200), Problem("g", "5")]
    assert read_problems(rows) == usable
    # usable, all, no prompt, no answer, repeated, a picture
    assert re.findall(r"\d+", capsys.readouterr().out) == ["4", "11", "1", "4", "1", "1"]


@pytest.mark.parametrize("empty", [" ", None, [], math.nan])
def test_an_empty_field_is_none(empty):
    row = {"prompt": empty, "problem": "a", "choices": empty, "images": empty}
    row |= {"answer": empty, "solution": r"\boxed{5}"}
    assert read_problems([row]) == [Problem("a", "5")]


@pytest.mark.parametrize(
    "row, prompt",
    [
        ({"Body": "I have 2.", "Question": "How many?"}, "I have 2.\nHow many?"),  # SVAMP
        ({"context": "2 + 2", "prompt": "What is 2 + 2?"}, "What is 2 + 2?"),
        ({"instruction": "Add.", "input": "2, 2"}, "Add.\n\n2, 2"),  # Alpaca
        ({"question": "2 + 2?", "instruction": "Be brief.", "input": "1"}, "2 + 2?"),
        ({"question": "2 + 2? A) 4 B) 5", "A": "4", "B": "5"}, "2 + 2? A) 4 B) 5"),
        ({"question": "2 + 2?", "A": "4", "has_image": False}, "2 + 2?"),
    ],
)
def test_a_prompt_holds_what_its_question_is_about(row, prompt):
    assert read_problems([row | {"answer": "4"}]) == [Problem(prompt, "4")]


@pytest.mark.parametrize(
    "field",
    [
        "choices",
        "Passages",
        "B",  # MMLU
        "opb",  # MedMCQA
        "option_a",
        "Option 1",
        "choice_a",
        "option1",  # WinoGrande
        "answerB",  # Social IQa
        "sol2",  # PIQA
        "endings",  # HellaSwag
        "system",
        "system_prompt",  # OpenOrca
        "history",
        "image",
        "images",
        "image_1",  # MMMU
        "decoded_image",  # MathVista
        "Picture",  # TheoremQA
        "image_paths",
    ],
)
def test_what_a_prompt_would_lack_is_refused(field):
    row = {"question": "Which is even?", "answer": "2", field: ["1", "2"]}
    with pytest.raises(ValueError, match=f"^data: .*Which is even.*{field}|{field}.*Which is even"):
        read_problems([row])


@pytest.mark.parametrize("prompt", ["<image>2?", '2? <img src="1.png">', "<|image_pad|>2?", "2?"])
def test_messages_have_no_pictures_in_them_or_beside_them(prompt):
    row = {"prompt": [{"role": "user", "content": prompt}], "answer": "4", "system": "x"}
    if prompt == "2?":
        assert len(read_problems([row])) == 1  # messages need nothing else
        row["images"] = ["1.png"]
    with pytest.raises(ValueError, match="^data: .*no pictures"):
        read_problems([row])


def test_fields_may_be_named_and_a_missing_one_is_an_error_that_names_what_is_there(tmp_path):
    row = {"Body": "b", "task": {"text": "a"}, "gold": "1", "answer": "2"}
    rows = load_rows(write_lines(tmp_path / "rows.jsonl", [row]), "train")
    assert read_problems(rows, "task.text", "gold") == [Problem("b\na", "1")]
    with pytest.raises(ValueError, match="data.*task.*gold.*answer.*--fields"):
        read_problems(rows)
    with pytest.raises(ValueError, match="^fields"):
        read_problems(rows, "task.text")


@pytest.mark.parametrize(
    "field, answer",
    [
        ("#### Step 2\nso \\boxed{5}\n#### Done", "5"),  # headings of a solution
        ("[0, 1]", "[0, 1]"),  # an interval, not a list
        ('["1", "2"]', ""),
        (r'["\frac{1}{2}"]', r"\frac{1}{2}"),  # LaTeX that JSON should have escaped
        (r'["\\frac{\\pi}{2}"]', r"\frac{\pi}{2}"),
        (r'["45\u00b0"]', "45°"),
        ("\frac{1}{2}", ""),
        (" \t5\r\n", "\t5"),
        ('["7"] or "8"', ""),
        ({"value": "5"}, ""),
        ("The answer is 5.", ""),
        ("They are equal", "They are equal"),
        (r"\text{proof}", ""),
        ("N/A", ""),
        (math.nan, ""),
        (1e-5, "0.00001"),
        ([1e20], "100000000000000000000"),
    ],
)
def test_the_answer_in_an_answer_field(field, answer):
    assert gold_answer(field) == answer


def test_files_of_all_kinds_are_read(tmp_path):
    whole = tmp_path / "rows.json"
    whole.write_text(json.dumps([GSM8K]))
    parquet = tmp_path / "rows.parquet"
    datasets.Dataset.from_list([GSM8K]).to_parquet(parquet)
    lines = write_lines(tmp_path / "at 10:30/rows.jsonl", [], f"\n{json.dumps(GSM8K)}")
    for path in (lines, whole, parquet):
        assert read_problems(load_rows(str(path), "train")) == [Problem("6 * 7?", "42")]
        with pytest.raises(ValueError, match="^data: .*:test"):  # a file has no splits
            load_rows(f"{path}:test", "train")


@pytest.mark.parametrize(
    "answer", ["18446744073709551616", "0.12345678901234567890", '"2024-05-01"']
)
def test_a_json_line_keeps_digits_and_dates(answer, tmp_path):
    path = write_lines(tmp_path / "rows.jsonl", [], f'{{"prompt": "a", "answer": {answer}}}')
    assert read_problems(load_rows(path, "train")) == [Problem("a", answer.strip('"'))]


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
    named = {
        "": ["main/train"] * 2,
        ":socratic/test": ["socratic/test"] * 2,
        ":main/train[1:]+test[:50%]": ["main/train", "main/test"],
    }
    for place in ("main/train", "main/test", "socratic/test"):
        write_lines(tmp_path / f"hub/{place}.jsonl", [{"question": place}] * 2)
    (tmp_path / "hub/README.md").write_text(HUB)
    for split, questions in named.items():
        assert load_rows(f"{tmp_path}/hub{split}", "train")["question"] == questions
    with pytest.raises(ValueError, match="data.*validation"):
        load_rows(f"{tmp_path}/hub:validation", "train")


@pytest.mark.parametrize(
    "name, content",
    [
        ("gone.jsonl", None),
        ("empty.json", "[]"),
        ("empty.jsonl", "\n"),
        ("cut.jsonl.*line 3", '{"a": 1}\n\n{"a"'),
    ],
)
def test_a_file_that_is_missing_empty_or_broken_is_an_error_that_names_it(tmp_path, name, content):
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=f"data.*{name}"):
        load_rows(str(tmp_path / name), "train")


# ---------------------------------------------------------------- prompts
@pytest.fixture
def read_by_the_model():
    """A function that gives the text of a prompt's tokens, with this chat template."""

    def read(prompt, template: str | None = None, instruction: str = "8") -> str:
        tokenizer = read.tokenizer
        tokenizer.chat_template = template
        ((token_ids, _),) = tokenize([Problem(prompt, "3")], tokenizer, 99, instruction)
        return tokenizer.decode(token_ids)

    read.tokenizer = countdown.build_tokenizer()
    read.tokenizer.name_or_path = "models/mine"
    return read


def test_the_chat_template_writes_the_prompt_and_the_bos_is_not_doubled(read_by_the_model):
    messages = [{"role": "system", "content": "1"}, {"role": "user", "content": "2="}]
    assert read_by_the_model("1+2= ") == "<bos>1+2=<unk>8<unk>"  # line breaks
    assert read_by_the_model(messages[1:]) == "<bos>2=<unk>"  # it brings its instruction
    with pytest.raises(ValueError, match="^data: .*models/mine.*'role': 'system'"):
        read_by_the_model(messages)  # several, without a template
    assert read_by_the_model("1+2=", CHAT) == "<bos>;1+2=<unk>8:"
    assert read_by_the_model(messages, CHAT) == "<bos>*1;2=:"
    assert read_by_the_model(json.dumps(messages), CHAT) == "<bos>*1;2=:"


# Like DeepSeek's: other roles than these two are dropped, and thoughts of earlier answers.
DEEPSEEK = """{% for m in messages %}
{% if m.role == 'user' %}<User>{{ m.content }}{% endif %}
{% if m.role == 'assistant' %}<Assistant>{{ m.content.split('</think>')[-1] }}{% endif %}
{% endfor %}<Assistant>"""
USER = {"role": "user", "content": " 2="}
ANSWER = {"role": "assistant", "content": "<think>8</think> 3"}


@pytest.mark.parametrize("template", [CHAT, None])
@pytest.mark.parametrize(
    "prompt",
    [
        [{"from": "human", "value": "2="}],
        [{"role": "human", "content": "2="}, USER],
        [{"role": "user", "content": [{"type": "text", "text": "2="}]}],
        [{"role": "user", "content": " "}],
        [{"role": "system", "content": ["2="]}, USER],
        [USER, ANSWER],  # NuminaMath's messages hold the solution
        str([USER]),  # no JSON
    ],
)
def test_messages_that_a_template_would_drop_or_print_are_refused(
    read_by_the_model, template, prompt
):
    with pytest.raises(ValueError, match="^data: .*models/mine"):
        read_by_the_model(prompt, template)


def test_a_template_that_leaves_out_a_message_is_refused(read_by_the_model):
    """Of an answer only the thoughts may be left out."""
    assert "2=" in read_by_the_model([USER, ANSWER, USER], DEEPSEEK)
    with pytest.raises(ValueError, match="^data: .*leaves out '1'"):
        read_by_the_model([{"role": "system", "content": "1"}, USER], DEEPSEEK)


def test_a_prompt_does_not_end_with_an_eos(read_by_the_model):
    tokenizer = read_by_the_model.tokenizer
    ids = [("<bos>", tokenizer.bos_token_id), ("<eos>", tokenizer.eos_token_id)]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing("<bos> $A <eos>", None, ids)
    assert tokenizer.decode(tokenizer("2").input_ids) == "<bos>2<eos>"
    assert read_by_the_model("2=") == "<bos>2=<unk>8<unk>"
    assert read_by_the_model("2=", CHAT) == "<bos>;2=<unk>8:"


@pytest.mark.parametrize(
    "prompt, instruction, asked",
    [
        (rf"2= {INSTRUCTION}", INSTRUCTION, rf"2= {INSTRUCTION}"),
        (r"2= Answer within \boxed{}.", "8", "2= Answer within \\boxed{}.\n8"),
        ("2=", "", "2="),
    ],
)
def test_an_instruction_is_not_repeated(prompt, instruction, asked):
    assert as_messages(prompt, instruction) == [{"role": "user", "content": asked}]


# ---------------------------------------------------------------- a task
@pytest.fixture
def options(tmp_path, policy):
    """train.py's, with a file of 12 problems, one prompt of which is too long."""
    rows = [{"prompt": "", "answer": "1"}]
    for number in range(12):
        length = 90 if number == 5 else 5
        content = f"{number}+".ljust(length, "1")
        rows.append({"prompt": [{"role": "user", "content": content}], "answer": str(number)})
    return SimpleNamespace(
        data=write_lines(tmp_path / "rows.jsonl", rows),
        fields=[],
        model=policy,
        reward="",
        held_out=3,
        prompts_per_step=4,
        max_new_tokens=53,
        partial_budget=0,
    )


def test_a_task_holds_problems_out_and_says_what_is_left_out(options, capsys):
    task = load_task(options)
    assert "1 prompts of more" in capsys.readouterr().out
    # The same in every run: what one has held out, another must not train on.
    assert [problem.answer for problem in task.held_out] == ["9", "10", "1"]
    numbers = sorted(int(problem.answer) for problem in [*task.train, *task.held_out])
    assert numbers == [0, 1, 2, 3, 4, 6, 7, 8, 9, 10, 11]
    assert task.grader is grade_math
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
    with pytest.raises(ValueError, match="^data: 0 problems are too few.*held_out"):
        load_task(options)
    options.max_new_tokens = 128
    with pytest.raises(ValueError, match="max_new_tokens"):
        load_task(options)


def test_math_verify_is_tried_before_training(options, monkeypatch):
    monkeypatch.setattr("reward.check_math_verify", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        load_task(options)


def test_a_reward_of_ones_own_gets_any_answer_and_is_tried_before_training(options, tmp_path):
    assert gold_answer(r'["1", "a\nbc"]', own_grader=True) == r'["1", "a\nbc"]'
    rows = [{"prompt": f"{number}", "solution": "s" * 201} for number in range(7)]
    options.data = write_lines(tmp_path / "long.jsonl", rows)
    rewards = tmp_path / "rewards.py"
    rewards.write_text("half = lambda response, answer: 0.5\ntwo = lambda response, answer: 2\n")
    options.reward = f"{rewards}:half"
    assert load_task(options).grader("", "") == 0.5
    options.reward = f"{rewards}:two"
    with pytest.raises(ValueError, match="rewards.py:two"):
        load_task(options)
