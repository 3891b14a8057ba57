"""eval_aime.py on a model whose every response is known beforehand."""

from pathlib import Path

import pandas as pd
import pytest
import torch
from conftest import EOS, bigram, write_lines

import eval_aime
from eval_aime import summarize
from support.runs import read_json, read_lines
from tasks.countdown import build_tokenizer

pytest.importorskip("datasets")

RIGHT = r"\boxed{016}"
WRONG = r"\boxed{17}"
ENDLESS = r"\boxed{16},"
# The model writes one of these words after a problem or a word, the second 2.7 times as often as
# the first, and <eos> after all others.
NEXT = {"1": [RIGHT], "2": [WRONG], "3": [RIGHT, WRONG], "4": [ENDLESS], ENDLESS: [ENDLESS]}


# ---------------------------------------------------------------- helpers
@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    """Folder of a model whose next token depends on the last one alone."""
    tokenizer = build_tokenizer()
    tokenizer.add_tokens([RIGHT, WRONG, ENDLESS])
    tokenizer.chat_template = "{{ messages[0].content }}"
    table = torch.zeros(len(tokenizer), len(tokenizer))  # logits
    table[:, EOS] = 100
    for last, words in NEXT.items():
        for place, word in enumerate(words):
            ids = tokenizer.convert_tokens_to_ids([last, word])
            table[*ids] = 200 + place
    folder = tmp_path_factory.mktemp("model")
    bigram(tokenizer, table).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture
def evaluate(tmp_path, model, monkeypatch):
    """A function that writes a file of problems with one answer, and evaluates in batches of two.

    Returns the samples in the order of their file, and the summary of the set.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("reward.compare_latex", lambda pairs: [])  # all answers are numbers

    def run(problems: str, folder="out", file="set.jsonl", answer="16", **options) -> tuple:
        rows = [{"problem": problem, "answer": answer} for problem in problems.split()]
        write_lines(Path(file), rows)
        words = f"--model {model} --data set.jsonl --output_dir {folder} --instruction= --samples 4"
        words += " --temperature 1 --batch_size 2 --max_new_tokens 5 --device cpu"
        for name, value in options.items():  # the last one counts
            words += f" --{name} {value}"
        assert eval_aime.main(words.split()) == 0
        (summary,) = read_json(Path(folder, "summary.json")).values()
        return read_lines(Path(folder, "samples.jsonl")), summary

    return run


# ---------------------------------------------------------------- end to end
def test_samples_and_results_are_those_of_the_model(evaluate):
    samples, summary = evaluate("1 2 4 5", precision="bfloat16")
    right, wrong, endless, silent = samples[-4:]
    assert right == {
        "set": "set.jsonl",
        "index": 3,
        "prompt": "1",
        "gold": "16",
        "response": RIGHT,
        "correct": True,
        "truncated": False,
        "tokens": 2,
    }
    assert not wrong["correct"]
    # A truncated response is wrong, whatever it holds.
    assert endless["truncated"] and endless["tokens"] == 5 and not endless["correct"]
    assert silent["response"] == ""
    assert summary["avg@k"] == summary["pass@4"] == summary["truncated"] == 0.25


def test_options_reach_the_sampler_and_every_batch_has_a_seed_of_its_own(evaluate):
    """Two problems have equal chances, and every sample is a batch."""

    def responses(samples=20, **options) -> list[str]:
        folder = f"out{[*options.values()]}"
        found, _ = evaluate("3 13", folder, samples=samples, batch_size=1, **options)
        return [sample["response"] for sample in found]

    drawn = responses()
    assert set(drawn[::2]) == {RIGHT, WRONG}
    assert drawn[::2] != drawn[1::2]
    assert responses(seed=2) != drawn
    assert responses(temperature=0.01) == responses(top_p=0.5) == [WRONG] * 40
    assert responses(temperature=0, samples=1) == [WRONG] * 2  # greedy


def test_a_reward_of_ones_own_grades_rows_without_answers(tmp_path, evaluate):
    (tmp_path / "rewards.py").write_text("half = lambda response, answer: len(response) and 0.5\n")
    _, summary = evaluate("1 5", answer="", reward="rewards.py:half")
    assert summary["avg@k"] == 0.25 and summary["pass@4"] == 0.5


def test_a_year_is_a_data_set_of_the_hub(evaluate):
    """A folder with the name and files of the repository on the hub is preferred to the hub."""
    _, summary = evaluate("1 2", file="HuggingFaceH4/aime_2024/train.jsonl", data="2024")
    assert summary["avg@k"] == 0.5


def test_a_response_that_the_model_has_no_positions_for_is_refused(evaluate):
    evaluate("1 11", samples=1, max_new_tokens=126)
    with pytest.raises(ValueError, match="^max_new_tokens: it leaves 1 of.*lower it"):
        evaluate("1 11", "other", samples=1, max_new_tokens=127)


# ---------------------------------------------------------------- killed, continued, changed
def test_a_killed_evaluation_continues_as_if_it_was_uninterrupted(evaluate, monkeypatch):
    problems = "1 2 3 4 13"
    whole = evaluate(problems, "whole")
    two = evaluate(problems, samples=2)
    assert evaluate(problems) == whole  # two are added
    path = Path("out/samples.jsonl")
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:6]) + lines[6][:30])
    assert evaluate(problems) == whole
    monkeypatch.setattr(eval_aime, "generate", None)  # nothing is drawn again
    assert evaluate(problems, samples=2, batch_size=3) == (whole[0], two[1])  # the first two
    with pytest.raises(ValueError, match="temperature was"):
        evaluate(problems, temperature=0.5)


def test_of_a_changed_file_new_problems_and_those_with_other_answers_are_drawn(evaluate):
    assert evaluate("2 1")[1]["avg@k"] == 0.5
    assert evaluate("1 11")[1]["avg@k"] == 1
    assert evaluate("1 11", answer="17")[1]["avg@k"] == 0


# ---------------------------------------------------------------- statistics
@pytest.mark.parametrize(
    "rewards, expected",
    [
        # Of six pairs of samples five hold a right one, and three of the other problem's.
        ([[1, 1, 0, 0], [0, 0, 1, 0]], {"avg@k": 3 / 8, "pass@2": 4 / 6, "pass@4": 1}),
        # Student's interval over problems, by scipy.stats.ttest_1samp
        ([[0, 0.5], [1, 0], [0.5, 0.5], [0.5, 0]], {"95 % low": 0.1453, "95 % high": 0.6047}),
        ([[0.75], [1], [1]], {"95 % low": 0.5581, "95 % high": 1}),  # cut off at 1
        ([[1, 0]], {"95 % low": 0, "95 % high": 1}),  # one problem says nothing of others
    ],
)
def test_the_summary_equals_counting_by_hand(rewards, expected):
    samples = pd.DataFrame({"prompt": range(len(rewards)), "correct": rewards}).explode("correct")
    result = summarize(samples.assign(truncated=False, tokens=10))
    assert {name: result[name] for name in expected} == pytest.approx(expected, abs=1e-4)
