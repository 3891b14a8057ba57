"""What several pictures of the experiments share."""

import matplotlib.pyplot as plt
import numpy as np
from analysis import Difference, Settings, difference

from support import plot
from support.run_metrics import Arms, RunMetrics, interval, outcomes

POSITIVE = plot.OTHER_COLOURS[3]  # tokens with A > 0, right responses
NEGATIVE = plot.OTHER_COLOURS[2]  # tokens with A < 0, wrong responses
GREY = "0.6"


def subplots(rows: int, columns: int, height: float = 2.5, **options):
    """A figure in the width of a page; height is that of a row of panels, in inches."""
    size = (plot.WIDTH, rows * height + 0.3)
    return plt.subplots(rows, columns, figsize=size, squeeze=False, **options)


def height_for(arms) -> float:
    """Inches that a panel needs for the names of its arms."""
    return max(2.5, 0.7 + 0.165 * len(arms))


def find_arms(settings: Settings, places: dict[str, str]) -> Arms:
    """Arm -> its runs. FileNotFoundError if one of the places is not packed."""
    return {arm: settings.find(place) for arm, place in places.items()}


def dodged(position: float, index: int, count: int, width: float) -> float:
    """The place of the index-th of `count` marks that share a position, `width` in all."""
    return position + width * (index / max(1, count - 1) - 0.5)


def ended(runs: list[RunMetrics], outcome: str) -> tuple[float, float]:
    """Mean of an outcome, and half the width of its interval."""
    mean, half = interval(outcomes(runs, outcome), runs)
    return float(mean), float(half)


def gained(settings: Settings, place: str, outcome: str) -> Difference:
    """What an arm's held-out accuracy gained on its warm starts."""
    return difference(settings.find(place), settings.before(place), outcome)


def thin_and_mean(axis, values: np.ndarray, runs: list[RunMetrics], colour: str, label: str):
    """Every run as a thin line, and their mean; values [runs, steps]."""
    steps = np.arange(1, values.shape[1] + 1)
    for of_run in values:
        axis.plot(steps, of_run, color=colour, linewidth=0.5, alpha=0.3, label="_")
    mean, _ = interval(values, runs)
    axis.plot(steps, mean, color=colour, linewidth=1.8, label=label)


def zero_line(axis, vertical: bool = False) -> None:
    """A grey line at 0, across the axis that shows a difference."""
    if vertical:
        axis.axvline(0, color=GREY, linewidth=0.8)
    else:
        axis.axhline(0, color=GREY, linewidth=0.8)


def label_rows(axis, labels: list[str], bold: list[str] = ()) -> None:
    """A row per label, the first on top, its name left of the panel."""
    axis.set_yticks(range(len(labels)), labels)
    axis.set(ylim=(len(labels) - 0.4, -0.6))
    for text in axis.get_yticklabels():
        if text.get_text() in bold:
            text.set_fontweight("bold")
