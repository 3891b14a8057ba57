"""train.py --reward: a grading function of the user's own. In a whole run: test_own_model.py."""

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

def long_text(response, answer):
    return "9" * 100_000

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
    grade = partial(reward.own_reward, f"{file}:grade")
    sent = pickle.loads(pickle.dumps(grade))
    responses = ["abc", "abc", "cut off"]
    answers = ["bcd", "c", "c"]
    rewards = reward.grade_all(sent, responses, answers, skip=[False, False, True])
    assert rewards == [0.2, 0.1, False]
    assert reward.own_reward(f"{file}:always", "", "") == 1.0
    assert reward.own_reward(f"{file}:of_numpy", "", "") == 0.25


@pytest.mark.parametrize("name", ["text", "too_much", "no_number", "nothing", "long_text"])
def test_anything_else_is_an_error_that_is_short_and_names_function_and_response(file, name):
    wanted = f"my_rewards.py:{name} must give a number from 0 to 1, got .* for 'a response'"
    with pytest.raises(ValueError, match=wanted) as raised:
        reward.own_reward(f"{file}:{name}", "a response", "")
    assert len(str(raised.value)) < 300 + len(str(file))


@pytest.mark.parametrize(
    "place, message",
    [
        (
            "gone.py:grade",
            "reward must be FILE.py:FUNCTION, got 'gone.py:grade': there is no file 'gone.py'",
        ),
        ("my_rewards.py", "reward must be FILE.py:FUNCTION"),
        ("my_rewards.py:grad", r"'my_rewards.py' needs a function grad\(response, answer\)"),
        ("my_rewards.py:number", r"needs a function number\(response, answer\)"),
        (
            "my_rewards.py:alone",
            r"needs a function alone\(response, answer\).*too many positional",
        ),
        ("broken.py:grade", r"'broken.py' needs a function grade\(response, answer\) \(SyntaxErr"),
    ],
)
def test_what_cannot_grade_is_refused_before_the_model_is_even_looked_for(
    file, monkeypatch, place, message
):
    monkeypatch.chdir(file.parent)
    (file.parent / "broken.py").write_text("def grade(response, answer) return 1\n")
    command = ["--model", "gone/model", "--data", "gone.jsonl", "--reward", place]
    with pytest.raises(ValueError, match=message):
        train.main([*command, "--device", "cpu"])
    assert not (file.parent / "runs").exists()


def test_countdown_grades_its_own_responses():
    with pytest.raises(ValueError, match="reward goes with --data, as Countdown has its own"):
        train.Options(reward="a.py:f")
