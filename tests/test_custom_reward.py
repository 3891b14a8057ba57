"""train.py --reward: a grading function of the user's own, loaded by its path. In a whole run: test_own_model.py."""

import pickle
from functools import partial

import pytest

import reward
import train

GRADE = """
from dataclasses import dataclass

import numpy

@dataclass
class Rule:  # looks its module up by name
    wanted: "str"

def grade(response, answer):
    return len(set(response) & set(answer)) / 10

def always(response: str, answer: str, more=None) -> bool:
    return True

def of_numpy(response, answer):
    return numpy.float32(0.25)

def text(response, answer):
    return "1"

def too_much(response, answer):
    return 1.5

def no_number(response, answer):
    return float("nan")

def nothing(response, answer):
    pass

def alone(response):
    return True

number = 3
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "my_rewards.py"
    path.write_text(GRADE)
    return path


def test_it_gives_numbers_from_0_to_1_also_after_it_was_sent_to_a_process(file):
    sent = pickle.loads(pickle.dumps(partial(reward.own_reward, f"{file}:grade")))
    assert reward.grade_all(sent, ["abc", "abc", "cut off"], ["bcd", "c", "c"], [False, False, True]) == [0.2, 0.1, False]
    assert [reward.own_reward(f"{file}:{name}", "", "") for name in ("always", "of_numpy")] == [1.0, 0.25]
    for name in ("text", "too_much", "no_number", "nothing"):
        with pytest.raises(ValueError, match=f"my_rewards.py:{name} must give a number from 0 to 1, got .* for 'a response'"):
            reward.own_reward(f"{file}:{name}", "a response", "")


@pytest.mark.parametrize(
    "place, message",
    [
        ("gone.py:grade", "reward must be FILE.py:FUNCTION, got 'gone.py:grade': there is no file 'gone.py'"),
        ("my_rewards.py", "reward must be FILE.py:FUNCTION"),
        ("my_rewards.py:grad", r"'my_rewards.py' needs a function grad\(response, answer\)"),
        ("my_rewards.py:number", r"needs a function number\(response, answer\)"),
        ("my_rewards.py:alone", r"needs a function alone\(response, answer\).*too many positional"),
        ("broken.py:grade", r"'broken.py' needs a function grade\(response, answer\) \(SyntaxError"),
    ],
)
def test_what_cannot_grade_is_refused_before_the_model_is_even_looked_for(file, monkeypatch, place, message):
    monkeypatch.chdir(file.parent)
    (file.parent / "broken.py").write_text("def grade(response, answer) return 1\n")
    with pytest.raises(ValueError, match=message):
        train.main(["--model", "gone/model", "--data", "gone.jsonl", "--reward", place, "--device", "cpu"])
    assert not (file.parent / "runs").exists()


def test_countdown_grades_its_own_responses(file):
    with pytest.raises(ValueError, match="reward goes with --data, as Countdown has its own: got reward='a.py:f'"):
        train.Options(reward="a.py:f")
