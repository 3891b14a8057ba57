"""Temporary."""
import random
from collections.abc import Callable
from typing import NamedTuple
from reward import Problem


class Task(NamedTuple):
    train: list[Problem]
    held_out: list[Problem]
    grade: Callable


def problems_of_step(problems: list[Problem], step: int, count: int, seed: int) -> list[Problem]:
    """The `count` problems of step 1, 2, ...: a new random order for every pass over the data.

    A function of its arguments alone, so that a resumed run needs no cursor.
    """
    chosen = []
    for index in range((step - 1) * count, step * count):
        epoch, position = divmod(index, len(problems))
        if not chosen or position == 0:
            rng = random.Random(f"{seed}/{epoch}")
            order = rng.sample(range(len(problems)), len(problems))
        chosen.append(problems[order[position]])
    return chosen


