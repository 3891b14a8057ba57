"""What train.py trains on: problems, their grader, and the order in which they come."""

import math
import random
from collections.abc import Callable
from typing import NamedTuple


class Problem(NamedTuple):
    """A problem of a data set or of Countdown."""

    # text or the messages of a chat, as read; token ids after `tokenize`
    prompt: str | list[dict] | list[int]
    answer: str


class Task(NamedTuple):
    """Prompts and a grading function. The prompts are token ids."""

    train: list[Problem]
    held_out: list[Problem]
    # response, answer -> reward from 0 to 1; no lambda, because it is sent to worker processes
    grader: Callable[[str, str], float]


def problems_of_step(problems: list[Problem], step: int, count: int, seed: int) -> list[Problem]:
    """Return the `count` problems of a step; steps begin at 1.

    Every pass over the data has a new random order. The result depends on the arguments alone,
    so a resumed run needs no record of its position.
    """
    end = step * count
    order = []
    for epoch in range(math.ceil(end / len(problems))):
        order += random.Random(f"{seed}/{epoch}").sample(problems, len(problems))
    return order[end - count : end]
