"""The harder case, four attempts at 4e-4: the map, the dose, what rescues GRPO, the neighbours."""

from dataclasses import dataclass

import numpy as np
from analysis import PRIMARY, SCREENED, Settings, best_rates, difference
from drawing import (
    GREY,
    dodged,
    ended,
    gained,
    label_rows,
    subplots,
    zero_line,
)
from figures import draw_gaps

from support import plot

FIVE = ["grpo@1", "grpo@8", "bapo-gate@8", "1.02-3.0@8", "balanced@8"]


# ---------------------------------------------------------------- the map
@dataclass(frozen=True)
class Map:
    """An axis of the map: its values, and where the runs are."""

    label: str
    folders: dict[float, str]
    caption: str


MAPS = {
    "map-rate": Map(
        "learning rate",
        {
            5e-5: "map-lr/5e-05",
            1e-4: "map-lr/0.0001",
            2e-4: "map-lr/0.0002",
            4e-4: "four-attempts",
        },
        "Four attempts, eight updates (grpo@1: one), 60 steps, five runs each",
    ),
    "map-attempts": Map(
        "attempts",
        {1: "map-attempts/1", 2: "map-attempts/2", 4: "four-attempts", 6: "map-attempts/6"},
        "Rate 4e-4, 60 steps. Every number of attempts has warm starts of its own",
    ),
}


def figure_map(settings: Settings, name: str):
    """Where stale GRPO collapses: what every arm gained on its start, along an axis of the map."""
    chosen = MAPS[name]
    known = {}
    for value, folder in chosen.folders.items():
        if folder in settings.arms:
            known[value] = folder
    if len(known) < 2:
        raise FileNotFoundError(f"less than two of {chosen.label} are in {settings.results}")
    figure, axes = subplots(1, 2, 2.9)
    for axis, outcome in zip(axes.flat, (PRIMARY, "pass@8")):
        for index, (arm, colour) in enumerate(plot.colours(FIVE).items()):
            gaps = [gained(settings, f"{folder} {arm}", outcome) for folder in known.values()]
            positions = [dodged(i, index, len(FIVE), 0.3) for i in range(len(known))]
            draw_gaps(axis, positions, gaps, colour, arm)
        zero_line(axis)
        axis.set_xticks(range(len(known)), [f"{value:g}" for value in known])
        axis.set(xlabel=chosen.label, title=f"held-out {outcome}: end − start")
    caption = f"{chosen.caption}. Bars: 95 % interval"
    if name == "map-attempts":
        caption += f"\nwarm starts' {PRIMARY}, pass@8: {starts_text(settings, known)}"
    figure.suptitle(caption)
    return figure


def starts_text(settings: Settings, folders: dict[float, str]) -> str:
    """What the warm starts of these settings reach."""
    parts = []
    for value, folder in folders.items():
        before = settings.before(f"{folder} grpo@8")
        reached = [f"{ended(before, outcome)[0]:.2f}" for outcome in (PRIMARY, "pass@8")]
        parts.append(f"{value:g}: {', '.join(reached)}")
    return "; ".join(parts)


# ---------------------------------------------------------------- the dose
DOSES = {  # task -> positive share of the gradient at ratio 1 -> where stale GRPO's runs are
    "four attempts": {
        0.35: "four-attempts grpo@8",
        0.4: "rescue grpo+share0.40@8",
        0.45: "four-attempts balanced@8",
        0.5: "rescue grpo+share0.50@8",
        1.0: "rescue grpo+share1@8",
    },
    "one attempt": {
        0.3: "rescue/attempts-1 grpo+share0.30@8",
        0.35: "rescue/attempts-1 grpo+share0.35@8",
        0.4: "rescue/attempts-1 grpo+share0.40@8",
        0.5: "map-attempts/1 grpo@8",
    },
}


def figure_dose(settings: Settings):
    """Stale GRPO with negative advantages scaled: what it gains, and its entropy at the end."""
    figure, (axes,) = subplots(1, 2)
    for (task, places), colour in zip(DOSES.items(), ("#d55e00", "#0072b2")):
        shift = 0.005 if task == "one attempt" else -0.005
        positions = [share + shift for share in places]
        gaps = [gained(settings, place, PRIMARY) for place in places.values()]
        draw_gaps(axes[0], positions, gaps, colour, task)
        ends = [ended(settings.find(place), "entropy") for place in places.values()]
        means = [mean for mean, _ in ends]
        halves = [half for _, half in ends]
        axes[1].plot(positions, means, "o-", color=colour, label=task, markersize=4)
        axes[1].errorbar(positions, means, halves, fmt="none", color=colour)
    zero_line(axes[0])
    axes[0].set(title=f"held-out {PRIMARY}: end − start")
    axes[1].set(title="entropy at the end")
    for axis in axes:
        axis.set(xlabel="positive share of the gradient at ratio 1")
    figure.suptitle("GRPO, rate 4e-4, eight updates; negative advantages scaled. 95 % intervals")
    return figure


# ---------------------------------------------------------------- what rescues GRPO
RESCUE = {  # group -> name -> place
    "less reuse": {
        "GRPO, one update": "four-attempts grpo@1",
        "two updates": "map-reuse grpo@2",
        "eight updates on fresh parts, 8 × the samples": "map-reuse/fresh grpo@1x8",
    },
    "GRPO, eight updates": {
        "GRPO": "four-attempts grpo@8",
        "0.7 × the learning rate": "rescue/lr-0.00028 grpo@8",
        "half the learning rate": "map-lr/0.0002 grpo@8",
        "a quarter of the learning rate": "map-lr/0.0001 grpo@8",
    },
    "BAPO, lower bound up to 0.9": {
        "main range": "four-attempts bapo-main@8",
        "range for OctoThinker, as printed": "rescue bapo-octothinker@8",
        "[0.8, 0.9] × [1.2, 3.0] (not printed)": "rescue bapo+high3@8",
    },
    "negative tokens weigh less": {
        "share 0.40": "rescue grpo+share0.40@8",
        "share 0.45": "four-attempts balanced@8",
        "share 0.45, upper bound 3.0": "rescue 0.8-3.0+share0.45@8",
        "share 0.50": "rescue grpo+share0.50@8",
        "every response weighs the same": "rescue grpo+sequence-mean@8",
        "positive tokens alone": "rescue grpo+share1@8",
        "positive tokens alone, upper bound 3.0": "rescue 0.8-3.0+share1@8",
    },
    "lower bound past 1": {
        "BAPO, lower bound up to 1.1": "four-attempts bapo-gate@8",
        "the search's bounds in another order": "rescue/yoked bapo-gate@8",
        "searched at ratio 1, too": "rescue bapo-gate+at-one@8",
        "fixed [1.02, 3.0]": "four-attempts 1.02-3.0@8",
    },
}


def figure_rescue(settings: Settings):
    """What rescues stale GRPO: groups of arms, in each the highest first."""
    rows = rescue_rows(settings)
    figure, (axes,) = subplots(1, 2, 0.75 + 0.17 * len(rows), sharey=True)
    for axis, outcome in zip(axes, (PRIMARY, "pass@8")):
        for row, (_, place) in enumerate(rows):
            if place:
                gap = gained(settings, place, outcome)
                plot.dot_with_interval(axis, gap.mean, row, gap.half, "#0072b2")
        zero_line(axis, vertical=True)
        axis.set(title=f"held-out {outcome}: end − start")
    label_rows(axes[0], [label for label, _ in rows], bold=list(RESCUE))
    figure.suptitle("Four attempts, rate 4e-4 unless named, five runs each. Bars: 95 % interval")
    return figure


def rescue_rows(settings: Settings) -> list[tuple[str, str]]:
    """Label and place of every row; a group's heading has no place."""
    rows = []
    for group, places in RESCUE.items():
        means = {label: settings.mean(place, PRIMARY) for label, place in places.items()}
        rows.append((group, ""))
        for label in sorted(means, key=means.get, reverse=True):
            rows.append((label, places[label]))
    return rows


# ---------------------------------------------------------------- the neighbours
RATE_MARKS = {1e-4: "<", 2e-4: "o", 4e-4: ">"}


def figure_objectives(settings: Settings):
    """The neighbours against GRPO, each at its best rate, and what they reach at every rate."""
    best = best_rates(settings.results)
    if not best:
        raise FileNotFoundError(f"objectives-screen/ is not whole in {settings.results}")
    grpo = settings.find(f"objectives/{best['grpo@8']} grpo@8")
    gaps = {}
    for arm, rate in best.items():
        place = f"objectives/{rate} {arm}"
        if place in settings.loaded:
            gaps[arm] = difference(settings.find(place), grpo, PRIMARY)
    arms = sorted(gaps, key=lambda arm: gaps[arm].mean, reverse=True)
    figure, (axes,) = subplots(1, 2, 0.75 + 0.18 * len(arms), sharey=True)
    for row, arm in enumerate(arms):
        half = 0.0 if arm == "grpo@8" else gaps[arm].half
        plot.dot_with_interval(axes[0], gaps[arm].mean, row, half, "#0072b2")
        for rate, mark in RATE_MARKS.items():
            mean = settings.mean(f"objectives-screen/{rate} {arm}", PRIMARY)
            axes[1].plot(mean, row, mark, color="#0072b2", markerfacecolor="white", markersize=5)
    zero_line(axes[0], vertical=True)
    starts = settings.before(f"objectives-screen/{SCREENED[0]} grpo@8")
    reached = [start.outcome(PRIMARY) for start in starts]
    axes[1].axvline(np.mean(reached), color=GREY, linewidth=0.8)
    axes[0].set(title=f"held-out {PRIMARY} − GRPO's, each at its best rate")
    axes[1].set(title=f"held-out {PRIMARY} by rate (grey: start)")
    label_rows(axes[0], arms, bold=["grpo@8", "bapo-gate@8"])
    figure.suptitle(
        "Left: five fresh runs each, 95 % interval. "
        "Right: two runs each at 1e-4 (◁), 2e-4 (○), 4e-4 (▷)"
    )
    return figure
