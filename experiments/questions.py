"""The front page's picture, and two questions: does the search matter, and which range?"""

import numpy as np
from analysis import (
    PRIMARY,
    RANGE_HIGHS,
    RANGE_LOWS,
    SCHEME,
    Settings,
    difference,
    percent,
    range_pairs,
    range_place,
    yoked_differ,
)
from drawing import (
    GREY,
    ended,
    label_rows,
    subplots,
    thin_and_mean,
    zero_line,
)
from figures import of_pairs

from support import plot
from support.run_metrics import Arms, interval, outcomes

FRONT_ARMS = [
    "grpo@1",
    "grpo@8",
    "bapo-main@8",
    "bapo-octothinker@8",
    "bapo@8",
    "bapo-gate@8",
]
FRONT_FOLDERS = {"default": "rate 2e-4, 8 starts", "rate/0.0003": "rate 3e-4, 5 starts"}
FRONT_METRICS = {
    "reward": "reward",
    "entropy": "entropy (nats per token)",
    "grad_norm": "gradient norm (95th percentile)",
    "gradient_share": "positive share (bapo-gate is above)",
}


# ---------------------------------------------------------------- the front page
def front(settings: Settings):
    """The default experiment at its rate and at a higher one, every start beside the mean."""
    settings.find("default grpo@8")
    folders = {name: title for name, title in FRONT_FOLDERS.items() if name in settings.arms}
    rows = len(FRONT_METRICS) + 1
    figure, axes = subplots(rows, len(folders), 1.9, sharey="row")
    axes[list(FRONT_METRICS).index("gradient_share"), 0].set_ylim(0.37, 0.47)
    for column, (folder, title) in zip(axes.T, folders.items()):
        there = settings.arms[folder]
        arms = {arm: there[arm] for arm in FRONT_ARMS if arm in there}
        for axis, (metric, name) in zip(column, FRONT_METRICS.items()):
            draw_arms(axis, arms, metric)
            axis.set(title=f"{name}, {title}")
        column[-2].set(xlabel="step (batch of rollouts)")
        draw_held_out(column[-1], arms, settings.starts[folder])
        column[-1].set(title=f"held-out mean@16 (●) and pass@8 (■), {title}")
    show_names(figure, axes[0, 0])
    return figure


def draw_arms(axis, arms: Arms, metric: str) -> None:
    """A metric of every run, thin, and its mean over runs, both smoothed over 5 steps."""
    for arm, colour in plot.colours(arms).items():
        values = plot.curves(arms[arm], metric)
        if metric != "reward":  # which is smoothed already
            values = plot.smoothed(values)
        thin_and_mean(axis, values, arms[arm], colour, arm)


def draw_held_out(axis, arms: Arms, starts: dict[str, dict]) -> None:
    """Both held-out accuracies of each arm at the end; dotted: what the warm starts reach."""
    used = {run.warm_start() for runs in arms.values() for run in runs}
    for outcome, mark in ((PRIMARY, "o"), ("pass@8", "s")):
        before = np.mean([starts[start][outcome] for start in used])
        axis.axvline(before, color=GREY, linewidth=1, linestyle=":")
        for arm, colour in plot.colours(arms).items():
            row = FRONT_ARMS.index(arm)  # the same in both columns
            runs = arms[arm]
            each = outcomes(runs, outcome)
            mean, half = interval(each, runs)
            axis.plot(each, [row] * len(each), mark, color=colour, markersize=3, alpha=0.3)
            axis.errorbar([mean], [row], xerr=[half], fmt=mark, color=colour, markersize=6)
    axis.set(yticks=[], ylim=(len(FRONT_ARMS) - 0.5, -0.5), xlabel="share of right responses")


def show_names(figure, axis) -> None:
    """The names of the curves above the picture, and none beside the panels."""
    lines = [line for line in axis.lines if not line.get_label().startswith("_")]
    names = [line.get_label() for line in lines]
    figure.legend(lines, names, loc="outside upper center", ncols=len(names), frameon=False)
    for other in figure.axes:
        for line in other.lines:
            line.set_label("_")


# ---------------------------------------------------------------- does the search matter?
def scheme(settings: Settings):
    """The authors' scheme: BAPO against its own bounds in another order and fixed ones."""
    settings.find("scheme/yoked bapo-main@2x4")
    places = [place for place in SCHEME if place in settings.loaded]
    figure, (axes,) = subplots(1, 3, 0.75 + 0.24 * len(places), sharey=True)
    searched = settings.find("scheme bapo-main@2x4")
    for axis, outcome in zip(axes, (PRIMARY, "pass@8", "entropy")):
        for row, place in enumerate(places):
            gap = difference(settings.find(place), searched, outcome)
            half = 0.0 if place == "scheme bapo-main@2x4" else gap.half
            colour = "#e69f00" if place == "scheme bapo-main@2x4" else "#0072b2"
            plot.dot_with_interval(axis, gap.mean, row, half, colour)
        zero_line(axis, vertical=True)
        axis.set(title=f"{outcome} − the main range's")
    label_rows(axes[0], [SCHEME[place] for place in places], bold=["BAPO, main range"])
    differ, compared = yoked_differ(settings)
    figure.suptitle(
        "The authors' scheme (2 epochs over 4 mini-batches). "
        f"{percent(differ / compared)} of the yoked bounds differ from the run's own. "
        "95 % intervals, not corrected"
    )
    return figure


# ---------------------------------------------------------------- which range?
LOW_COLOURS = {"0.9": "#56b4e9", "0.98": "#0072b2", "1.04": "#08306b"}
HIGH_MARKS = {"1.2": "o", "2.0": "s", "3.0": "^"}


def ranges(settings: Settings):
    """Entropy, mean@16 and pass@8 of nine ranges against each other, same three starts."""
    pairs = range_pairs(settings)
    figure, (axes,) = subplots(1, 3, 3.2)
    views = [("entropy", PRIMARY), ("entropy", "pass@8"), (PRIMARY, "pass@8")]
    for axis, (horizontal, vertical) in zip(axes, views):
        for low in RANGE_LOWS:
            for high in RANGE_HIGHS:
                runs = of_pairs(settings.find(range_place(low, high)), pairs)
                x, _ = ended(runs, horizontal)
                y, _ = ended(runs, vertical)
                axis.plot(x, y, HIGH_MARKS[high], color=LOW_COLOURS[low], markersize=7)
        for arm in ("grpo@1", "grpo@8"):
            runs = of_pairs(settings.find(f"default {arm}"), pairs)
            x, _ = ended(runs, horizontal)
            y, _ = ended(runs, vertical)
            axis.plot(x, y, "*", color=plot.COLOURS.get(arm, plot.COLOURS["grpo"]), markersize=11)
        axis.set(xlabel=named(horizontal), ylabel=named(vertical))
    show_range_names(figure)
    figure.supxlabel(
        "Means of three starts; their intervals, in the table, are as wide as most gaps", fontsize=9
    )
    return figure


def named(outcome: str) -> str:
    """An axis's label."""
    return "entropy at the end" if outcome == "entropy" else f"held-out {outcome}"


def show_range_names(figure) -> None:
    """What marks and colours mean, above the picture."""
    handles = []
    for low, colour in LOW_COLOURS.items():
        handles += plot.plt.plot([], [], "o", color=colour, label=f"low up to {low}")
    for high, mark in HIGH_MARKS.items():
        handles += plot.plt.plot([], [], mark, color=GREY, label=f"high up to {high}")
    handles += plot.plt.plot([], [], "*", color="#000000", label="grpo@1")
    handles += plot.plt.plot([], [], "*", color=plot.COLOURS["grpo"], label="grpo@8")
    names = [handle.get_label() for handle in handles]
    figure.legend(handles, names, loc="outside upper center", ncols=4, frameon=False)
    for handle in handles:
        handle.set_label("_")
