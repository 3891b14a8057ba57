"""The paper's figures, the map and what rescues GRPO, drawn from packed metrics."""

from functools import partial

import matplotlib.pyplot as plt
import numpy as np
from analysis import PRIMARY, SCREENED, Settings, best_rates, difference, screening
from scipy import stats

from support import plot
from support.files import read_lines

POSITIVE, NEGATIVE = plot.OTHERS[3], plot.OTHERS[2]
FIVE = ["grpo@1", "grpo@8", "bapo-gate@8", "1.02-3.0@8", "balanced@8"]
FOUR, SHARE = ("reward", "entropy", "grad_norm", "clipped"), ("reward", "entropy", "grad_norm", "gradient_share")
BUDGETS = (14, 28)  # of partial rollouts: tokens per response and step
CURVES = {  # picture -> ending of the titles -> metrics, and arm in the picture -> where its runs are
    "figure2": {"": (FOUR, {f"grpo@{u}": f"{'four-attempts' if u in (1, 8) else 'map-reuse'} grpo@{u}" for u in (1, 2, 4, 8)})},
    "figure7": {"": (FOUR, {arm: f"figures/fixed {arm}" for arm in ("grpo@8", "0.8-1.5@8", "0.5-1.2@8")})},
    "figure9": {"": (SHARE, {arm: f"fig9-long {arm}" for arm in ("grpo@8", "bapo-gate@8", "bapo+high3@8")})},
    "figure12": {
        f", budget {n}": (FOUR[:2], {arm: f"figures/budget-{n} {arm}" for arm in ("grpo@4", "bapo-gate@4")}) for n in BUDGETS
    },
}
BY_SIGN = {  # picture -> title -> the metric for A > 0 (right responses), and for A < 0 unless that is the rest
    "figure4": {"share of the gradient": ("gradient_share", ""), "share of the tokens": ("positive_tokens", "")},
    "figure6": {"response length, all samples": ("length_correct", "length_wrong")},
}
DOSES = {  # task -> positive share of the gradient at ratio 1 -> where stale GRPO's runs with it are
    "four attempts": {0.35: "four-attempts grpo@8", 0.4: "rescue grpo+share0.40@8", 0.45: "four-attempts balanced@8"}
    | {0.5: "rescue grpo+share0.50@8", 1.0: "rescue grpo+share1@8"},
    "one attempt": {x: f"rescue/attempts-1 grpo+share{x:.2f}@8" for x in (0.3, 0.35, 0.4)} | {0.5: "map-attempts/1 grpo@8"},
}
REUSE = {1: "four-attempts grpo@1", 2: "map-reuse {}@2", 4: "map-reuse {}@4", 8: "four-attempts {}@8", 16: "map-reuse {}@16"}
MAP = {  # picture -> an axis of the map, its values and where the runs of an arm are, and the arms
    "map-rate": ("learning rate", {x: f"map-lr/{x} {{}}" for x in (5e-5, 1e-4, 2e-4)} | {4e-4: "four-attempts {}"}, FIVE),
    "map-attempts": ("attempts", {n: "four-attempts {}" if n == 4 else f"map-attempts/{n} {{}}" for n in (1, 2, 4, 6)}, FIVE),
    "figure11": ("updates per batch", REUSE, ["grpo", "bapo-gate"]),
}


def subplots(rows: int, columns: int, arms: int = 0):
    """A figure in the width of a page, with room for the names of the arms."""
    return plt.subplots(rows, columns, figsize=(plot.WIDTH, rows * max(2.5, 0.7 + 0.165 * arms) + 0.3), squeeze=False)


def curves(settings: Settings, name: str):
    """A panel per metric, a curve per arm."""
    panels = [(metric, *of_title) for of_title in CURVES[name].items() for metric in of_title[1][0]]
    figure, axes = subplots(2, 2, max(len(arms) for _, _, (_, arms) in panels))
    for axis, (metric, ending, (_, arms)) in zip(axes.flat, panels):
        plot.panel(axis, {arm: settings.find(place) for arm, place in arms.items()}, metric, ending)
    return figure


def by_sign(settings: Settings, name: str):
    """GRPO on-policy (left) and stale."""
    figure, axes = subplots(len(BY_SIGN[name]), 2)
    for column, arm in zip(axes.T, ("grpo@1", "grpo@8")):
        runs = settings.find(f"four-attempts {arm}")
        for axis, (title, (positive, negative)) in zip(column, BY_SIGN[name].items()):
            values = plot.curves(runs, positive)
            plot.band(axis, runs, values, POSITIVE, "A > 0")
            plot.band(axis, runs, plot.curves(runs, negative) if negative else 1 - values, NEGATIVE, "A < 0")
            axis.set(title=f"{title}, {arm}")
    return figure


def tokens(settings: Settings, sign: int) -> dict[str, np.ndarray]:
    """The single tokens that were kept, with an advantage of this sign: one array per column."""
    lines = read_lines(settings.results / "figures/tokens/tokens.jsonl")
    columns = {name: np.concatenate([line[name] for line in lines]) for name in lines[0] if name != "step"}
    return {name: column[columns["sign"] == sign] for name, column in columns.items()}


def figure5(settings: Settings):
    """Mean probability of tokens by importance ratio, without clipping, at the last update of a batch."""
    edges = np.array([0, 0.2, 0.4, 0.6, 0.8, 0.9, 0.97, 1.03, 1.1, 1.2, 1.4, 1.6, 2.0, np.inf])
    figure, axes = subplots(1, 2)
    for axis, sign in zip(axes.flat, (-1, 1)):
        found = tokens(settings, sign)
        count = np.histogram(found["ratio"], edges)[0]
        for name, colour in (("rollout_probability", "#56b4e9"), ("probability", "#0072b2")):
            means = np.histogram(found["ratio"], edges, weights=found[name])[0] / np.maximum(count, 1)
            axis.plot(np.flatnonzero(count > 9), means[count > 9], "o-", color=colour, label=name.partition("_")[0])
        axis.set_xticks(range(len(count)), [f"{low:g}–{high:g}" for low, high in zip(edges, edges[1:])], rotation=60)
        axis.set(title=f"token probability, A {'<' if sign < 0 else '>'} 0", xlabel="importance ratio (at least 10 tokens)")
    return figure


def figure10(settings: Settings):
    """Importance ratio against probability and entropy of single tokens, as density."""
    figure, axes = subplots(2, 2)
    for column, sign in zip(axes.T, (-1, 1)):
        found = tokens(settings, sign)
        for axis, name in zip(column, ("probability", "entropy")):
            shown = axis.hexbin(np.log10(np.clip(found["ratio"], 1e-2, 1e2)), found[name], gridsize=40, bins="log", mincnt=1)
            figure.colorbar(shown, ax=axis, label="tokens")
            axis.set(title=f"token {name}, A {'<' if sign < 0 else '>'} 0", xlabel="log10 of the importance ratio")
    return figure


def figure8(settings: Settings):
    """BAPO's bounds: mean over the updates of a step, and how often each was used."""
    arms = {arm: settings.find(f"four-attempts {arm}") for arm in ("bapo-main@8", "bapo-gate@8")}
    figure, axes = subplots(1, 3)
    plot.panel(axes[0, 0], arms, "low")
    plot.panel(axes[0, 1], arms, "high")
    plot.used_bounds(axes[0, 2], arms)
    return figure


def rule_pairs(runs: list[plot.RunMetrics]) -> np.ndarray:
    """[2, pairs]: predicted (-covariance) and actual change of the entropy on the same tokens, from one update to the next."""
    pairs = [(now, after) for run in runs for now, after in zip(run.lines, run.lines[1:]) if now["step"] == after["step"]]
    return np.transpose([(-now["entropy_rule"], after["entropy_now"] - now["entropy_now"]) for now, after in pairs])


def figure_rule(settings: Settings):
    """The Entropy-Clip Rule against what the entropy then did, update by update."""
    figure, axes = subplots(1, 3)
    for axis, arm in zip(axes.flat, ("grpo@8", "bapo-main@8", "bapo-gate@8")):
        runs = settings.find(f"four-attempts {arm}")
        ranks = [stats.spearmanr(*rule_pairs([run])).statistic for run in runs]
        axis.hexbin(*rule_pairs(runs), gridsize=40, bins="log", mincnt=1)
        axis.set(title=f"{arm}: rank r {plot.cell(ranks, runs, 2)}", xlabel="predicted change", ylabel="change of entropy")
        axis.locator_params(nbins=4)
    return figure


def draw_outcome(axis, settings: Settings, outcome: str, places: dict, colour: str, label: str) -> None:
    """An outcome with its interval against the keys of `places`; of a held-out accuracy what it gained on the warm start."""
    if "@" in outcome:
        values = [difference(settings.find(place), settings.before(place), outcome)[:2] for place in places.values()]
    else:
        values = [plot.interval([run.outcome(outcome) for run in runs], runs) for runs in map(settings.find, places.values())]
    mean, half = zip(*values)
    axis.plot([*places], mean, "o-", color=colour, label=label, markersize=4)
    axis.errorbar([*places], mean, half, fmt="none", color=colour)
    axis.set(title=f"held-out {outcome}: end − start" if "@" in outcome else f"{outcome} at the end")


def figure_map(settings: Settings, name: str):
    """Where stale GRPO collapses, along an axis of the map: all that is packed. FileNotFoundError if this is only one value."""
    label, places, arms = MAP[name]
    there = {x: place for x, place in places.items() if any(place.format(arm) in settings.loaded for arm in arms)}
    if len(there) < 2:
        raise FileNotFoundError(f"of {', '.join(places.values())} at most one is in {settings.results}")
    figure, axes = subplots(1, 2, 8)
    for axis, outcome in zip(axes.flat, (PRIMARY, "pass@8")):
        for arm, colour in plot.colours(arms).items():
            at = {i: place.format(arm) for i, place in enumerate(there.values()) if place.format(arm) in settings.loaded}
            draw_outcome(axis, settings, outcome, at, colour, arm)
        axis.axhline(0, color="0.6", linewidth=0.8)
        axis.set_xticks(range(len(there)), [f"{x:g}" for x in there])
        axis.set(xlabel=label)
    return figure


def figure_dose(settings: Settings):
    """Stale GRPO with negative advantages scaled, and nothing else changed: what it gains, and its entropy."""
    figure, axes = subplots(1, 2)
    for (task, places), colour in zip(DOSES.items(), ("#d55e00", "#0072b2")):
        for axis, outcome in zip(axes.flat, (PRIMARY, "entropy")):
            draw_outcome(axis, settings, outcome, places, colour, task)
            axis.set(xlabel="positive share of the gradient at ratio 1")
    axes[0, 0].axhline(0, color="0.6", linewidth=0.8)
    return figure


def figure_rescue(settings: Settings):
    """What rescues stale GRPO, at four attempts."""
    settings.find("rescue grpo+share1@8")
    places = [place for place in settings.places("four-attempts", "rescue") if "attempts" not in place]
    arms = {
        place.split("/")[-1].removeprefix("four-attempts ").removeprefix("rescue "): settings.find(place) for place in places
    }
    figure, axes = subplots(1, 2, round(1.3 * len(arms)))
    for axis, outcome in zip(axes.flat, (PRIMARY, "pass@8")):
        plot.dots(axis, arms, settings.starts["four-attempts"], outcome)
    return figure


def figure_objectives(settings: Settings):
    """The neighbours in the screening, a mark per learning rate, and with an interval on fresh runs at the best of them."""
    arms, best = [row[0] for row in screening(settings)[1:]], best_rates(settings.results)
    if not arms:
        raise FileNotFoundError(f"objectives-screen/ is not whole in {settings.results}")
    figure, axes = subplots(1, 2, round(1.3 * len(arms)))
    for axis, outcome in zip(axes.flat, (PRIMARY, "pass@8")):
        for row, (arm, colour) in enumerate(plot.colours(arms).items()):
            for rate, mark in zip(SCREENED, "<o>"):
                ends = [run.outcome(outcome) for run in settings.find(f"objectives-screen/{rate} {arm}")]
                axis.plot(np.mean(ends), row, mark, color=colour, markerfacecolor="white", markersize=5)
            if final := settings.loaded.get(f"objectives/{best[arm]} {arm}"):
                mean, half = plot.interval([run.outcome(outcome) for run in final], final)
                axis.errorbar([mean], [row], xerr=[np.nan_to_num(half)], fmt="o", color=colour, markersize=6, linewidth=2)
        starts = settings.before(f"objectives-screen/{SCREENED[0]} {arms[0]}")
        axis.axvline(np.mean([start.outcome(outcome) for start in starts]), color="0.6", linewidth=0.8)
        plot.name_rows(axis, arms)
        axis.set(title=f"held-out {outcome}")
    marks = "Two runs each at the rates 1e-4 (◁), 2e-4 (○) and 4e-4 (▷), grey line: their start"
    figure.suptitle(f"{marks}; dot: five fresh runs at the best rate, 95 % interval")
    return figure


PICTURES = {name: partial(curves, name=name) for name in CURVES} | {name: partial(by_sign, name=name) for name in BY_SIGN}
PICTURES |= {name: partial(figure_map, name=name) for name in MAP} | {"rule": figure_rule, "objectives": figure_objectives}
PICTURES |= {"figure5": figure5, "figure8": figure8, "figure10": figure10, "dose": figure_dose, "rescue": figure_rescue}
