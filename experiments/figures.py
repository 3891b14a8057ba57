"""The paper's figures in small, drawn from packed metrics.

A picture is a function of analysis.Settings. It raises FileNotFoundError if runs are not packed.
"""

from dataclasses import dataclass

import numpy as np
from analysis import PRIMARY, Settings, difference
from drawing import (
    GREY,
    NEGATIVE,
    POSITIVE,
    dodged,
    find_arms,
    height_for,
    subplots,
    zero_line,
)
from scipy import stats

from support import plot
from support.files import read_lines
from support.run_metrics import RunMetrics, cell, interval

TRAINING = ["reward", "entropy", "grad_norm", "clipped"]
BALANCE = ["reward", "entropy", "grad_norm", "gradient_share"]
BUDGETS = [14, 28]  # of partial rollouts: tokens per response and step
LEAST_TOKENS = 10  # in a bin of figure 5


# ---------------------------------------------------------------- curves of arms
@dataclass(frozen=True)
class Curves:
    """A picture with a panel per metric and a curve per arm."""

    metrics: list[str]
    arms: dict[str, str]  # arm in the picture -> where its runs are
    caption: str
    bapo: str = ""  # the arm whose entropy the caption compares with GRPO's


def arms_of(folder: str, *arms: str) -> dict[str, str]:
    """Arm -> its place in a folder."""
    return {arm: f"{folder} {arm}" for arm in arms}


HARDER = "Harder case: four attempts, rate 4e-4"
CURVES = {
    "figure2": Curves(
        TRAINING,
        arms_of("default", "grpo@1", "grpo@8"),
        "Two attempts, rate 2e-4: one and eight updates on each batch",
    ),
    "figure2-hard": Curves(
        TRAINING,
        {
            "grpo@1": "four-attempts grpo@1",
            "grpo@2": "map-reuse grpo@2",
            "grpo@4": "map-reuse grpo@4",
            "grpo@8": "four-attempts grpo@8",
        },
        f"{HARDER}, 1 to 8 updates on each batch. With 8 the entropy ends highest; "
        "in the paper it falls, and rebounds",
    ),
    "figure7": Curves(
        TRAINING,
        {
            "grpo@8": "default grpo@8",
            "0.8-1.5@8": "fixed 0.8-1.5@8",
            "0.5-1.2@8": "fixed 0.5-1.2@8",
        },
        "Fixed bounds, two attempts, rate 2e-4, eight updates on each batch",
    ),
    "figure9": Curves(
        BALANCE,
        arms_of("default", "grpo@8", "bapo-main@8", "bapo@8"),
        "Two attempts, rate 2e-4: main range, and App. A's as gradients (bapo)",
        bapo="bapo-main@8",
    ),
    "figure9-long": Curves(
        BALANCE,
        arms_of("rate/0.0004", "grpo@1", "grpo@8", "bapo-octothinker@8"),
        "Two attempts, rate 4e-4, 240 steps",
        bapo="bapo-octothinker@8",
    ),
    "figure9-hard": Curves(
        BALANCE,
        arms_of("four-attempts", "grpo@8", "bapo-main@8"),
        f"{HARDER}, eight updates",
        bapo="bapo-main@8",
    ),
    "figure13": Curves(
        BALANCE,
        arms_of("default", "grpo@8", "bapo-octothinker@8"),
        "Two attempts, rate 2e-4: range for OctoThinker, as printed",
        bapo="bapo-octothinker@8",
    ),
}


def curves(settings: Settings, name: str):
    """A panel per metric, a curve per arm, its band the 95 % interval."""
    picture = CURVES[name]
    arms = find_arms(settings, picture.arms)
    if name == "figure7":
        pairs = {run.pair() for run in arms["0.8-1.5@8"]}
        arms = {arm: of_pairs(runs, pairs) for arm, runs in arms.items()}
    figure, axes = subplots(2, 2, height_for(arms))
    for axis, metric in zip(axes.flat, picture.metrics):
        plot.panel(axis, arms, metric)
    caption = f"{picture.caption}. Band: 95 % interval"
    if picture.bapo:
        caption += f"\n{picture.bapo}: {entropy_note(arms[picture.bapo], arms['grpo@8'])}"
    figure.suptitle(caption)
    return figure


def entropy_note(bapo: list[RunMetrics], grpo: list[RunMetrics]) -> str:
    """Whether BAPO's entropy ends above GRPO's, as it does in the paper."""
    gap = difference(bapo, grpo, "entropy")
    if abs(gap.mean) <= gap.half:
        direction = "above" if gap.mean > 0 else "below"
        return f"entropy ends {direction} GRPO's, not resolved; in the paper above it"
    if gap.mean > 0:
        return "entropy ends above GRPO's, as in the paper"
    return "entropy ends below GRPO's: the reverse of the paper's order"


def of_pairs(runs: list[RunMetrics], pairs: set) -> list[RunMetrics]:
    """The runs of these warm starts and seeds."""
    return [run for run in runs if run.pair() in pairs]


# ---------------------------------------------------------------- by sign
def figure4(settings: Settings, folder: str = "default"):
    """Positive and negative tokens' share of the gradient and of the tokens, GRPO."""
    figure, axes = subplots(2, 2, sharey=True)
    for row, (metric, title) in zip(
        axes, (("gradient_share", "of the gradient"), ("positive_tokens", "of the tokens"))
    ):
        for axis, arm in zip(row, ("grpo@1", "grpo@8")):
            runs = settings.find(f"{folder} {arm}")
            values = plot.curves(runs, metric)
            plot.band(axis, runs, values, POSITIVE, "A > 0")
            plot.band(axis, runs, 1 - values, NEGATIVE, "A < 0")
            axis.set(title=f"share {title}, {arm}")
    figure.suptitle(f"{setting_name(folder)}. Band: 95 % interval")
    return figure


def setting_name(folder: str) -> str:
    """What a picture says of the setting of these runs."""
    return HARDER if folder == "four-attempts" else "Two attempts, rate 2e-4"


def figure6(settings: Settings, folder: str = "default"):
    """Mean length of right and wrong responses, GRPO."""
    figure, axes = subplots(1, 2, sharey=True)
    for axis, arm in zip(axes.flat, ("grpo@1", "grpo@8")):
        runs = settings.find(f"{folder} {arm}")
        plot.band(axis, runs, plot.curves(runs, "length_correct"), POSITIVE, "right")
        plot.band(axis, runs, plot.curves(runs, "length_wrong"), NEGATIVE, "wrong")
        axis.set(title=f"response length in tokens, {arm}")
    figure.suptitle(f"{setting_name(folder)}. Band: 95 % interval")
    return figure


# ---------------------------------------------------------------- single tokens
def tokens(settings: Settings, sign: int) -> dict[str, np.ndarray]:
    """The single tokens that were kept with an advantage of this sign: an array per column."""
    lines = read_lines(settings.results / "figures/tokens/tokens.jsonl")
    columns = {}
    for name in lines[0]:
        if name != "step":
            columns[name] = np.concatenate([line[name] for line in lines])
    chosen = columns["sign"] == sign
    return {name: column[chosen] for name, column in columns.items()}


def merged_edges(values: np.ndarray, edges: list[float], least: int) -> list[float]:
    """`edges` without those between bins that hold fewer than `least` values.

    Such a bin joins the next one; the last ones join the one before. Returns at least two edges.
    """
    kept = [edges[0]]
    for edge in edges[1:]:
        if np.sum((values >= kept[-1]) & (values < edge)) >= least:
            kept.append(edge)
    if len(kept) > 1:
        kept[-1] = edges[-1]
    else:
        kept.append(edges[-1])
    return kept


def figure5(settings: Settings):
    """Mean probability of tokens by importance ratio, without clipping, last update of a batch."""
    edges = [0, 0.2, 0.4, 0.6, 0.8, 0.9, 0.97, 1.03, 1.1, 1.2, 1.4, 1.6, 2.0, np.inf]
    figure, axes = subplots(1, 2, 2.8, sharey=True)
    for axis, sign in zip(axes.flat, (-1, 1)):
        kept = tokens(settings, sign)
        bins = merged_edges(kept["ratio"], edges, LEAST_TOKENS)
        count, _ = np.histogram(kept["ratio"], bins)
        for name, label, colour in (
            ("rollout_probability", "drawn with", "#56b4e9"),
            ("probability", "then", "#0072b2"),
        ):
            sums, _ = np.histogram(kept["ratio"], bins, weights=kept[name])
            places = np.flatnonzero(count)
            axis.plot(places, sums[places] / count[places], "o-", color=colour, label=label)
        axis.set_xticks(range(len(count)), bin_names(bins), rotation=60)
        sign_name = "< 0" if sign < 0 else "> 0"
        axis.set(title=f"token probability, A {sign_name}", xlabel="importance ratio")
    figure.suptitle(f"A bin has at least {LEAST_TOKENS} tokens. Three runs, rate 2e-4, no clipping")
    return figure


def bin_names(edges: list[float]) -> list[str]:
    """ "0.8–0.9" for every bin, and "over 1.2" for the last one."""
    names = [f"{low:g}–{high:g}" for low, high in zip(edges, edges[1:])]
    return [*names[:-1], f"over {edges[-2]:g}"]


# ---------------------------------------------------------------- bounds
@dataclass(frozen=True)
class Range:
    """The ends of a search's range."""

    low_start: float
    low_max: float
    high_start: float
    high_max: float

    def state(self, low: float, high: float) -> str:
        """Where on its way through the range the search stopped."""
        if abs(high - self.high_start) < 1e-3:
            return "at the start"
        if abs(low - self.low_start) < 1e-3:
            return "upper bound raised"
        if abs(low - self.low_max) < 1e-3:
            return "at the end"
        return "lower bound raised, too"


RANGES = {
    "default bapo-main@8": Range(0.6, 0.9, 1.2, 3.0),
    "default bapo@8": Range(0.8, 0.9, 1.2, 2.0),
    "scheme bapo-main@2x4": Range(0.6, 0.9, 1.2, 3.0),
    "four-attempts bapo-main@8": Range(0.6, 0.9, 1.2, 3.0),
}
FIGURE8 = {  # place -> title
    "default bapo-main@8": "main range",
    "default bapo@8": "App. A's range, as gradients",
    "scheme bapo-main@2x4": "main range, authors' scheme",
}
STATES = {
    "at the start": "#cccccc",
    "upper bound raised": "#a6cee3",
    "lower bound raised, too": "#1f78b4",
    "at the end": "#08306b",
}
STEPS_TOGETHER = 5  # are drawn as one


def shares_of_states(
    runs: list[RunMetrics], search: Range, together: int = 1
) -> dict[str, np.ndarray]:
    """State -> its share of the updates, over all runs and `together` steps: float64 [steps]."""
    last = max(int(line["step"]) for run in runs for line in run.lines)
    counts = {state: np.zeros((last - 1) // together + 1) for state in STATES}
    for run in runs:
        for line in run.lines:
            if "low" in line:
                place = (int(line["step"]) - 1) // together
                counts[search.state(line["low"], line["high"])][place] += 1
    total = sum(counts.values())
    return {state: count / total for state, count in counts.items()}


def figure8(settings: Settings):
    """BAPO's bounds: their means, and where in its range the search stopped."""
    places = [place for place in FIGURE8 if place in settings.loaded]
    if not places:
        raise FileNotFoundError(f"{', '.join(FIGURE8)} are not in {settings.results}")
    figure, axes = subplots(2, len(places))
    for (top, bottom), place in zip(axes.T, places):
        search = RANGES[place]
        draw_bounds(top, settings.find(place), search)
        top.set(title=FIGURE8[place])
        draw_states(bottom, shares_of_states(settings.find(place), search, STEPS_TOGETHER))
    axes[1, 0].legend(loc="lower left", fontsize=8, framealpha=0.9)
    figure.suptitle(
        "Above: mean bounds (dotted: ends of the range). "
        "Below: where the search stopped, share of the updates"
    )
    return figure


def draw_bounds(axis, runs: list[RunMetrics], search: Range) -> None:
    """The mean of both bounds, over runs and 5 steps, and the ends of their ranges."""
    for metric, colour in (("high", POSITIVE), ("low", NEGATIVE)):
        mean, _ = interval(plot.smoothed(plot.curves(runs, metric), STEPS_TOGETHER), runs)
        axis.plot(np.arange(1, len(mean) + 1), mean, color=colour, label=metric)
    for end in (search.low_start, search.low_max, search.high_start, search.high_max):
        axis.axhline(end, color=GREY, linewidth=0.8, linestyle=":")


def draw_states(axis, shares: dict[str, np.ndarray]) -> None:
    """Shares stacked, from the start of the range (below) to its end."""
    count = len(next(iter(shares.values())))
    steps = STEPS_TOGETHER * np.arange(count) + (STEPS_TOGETHER + 1) / 2  # middles
    axis.stackplot(steps, shares.values(), colors=STATES.values(), labels=shares.keys(), lw=0)
    axis.margins(x=0)
    axis.set(ylim=(0, 1), xlabel="step (batch of rollouts)")


# ---------------------------------------------------------------- the Entropy-Clip Rule
def rule_pairs(runs: list[RunMetrics]) -> np.ndarray:
    """Predicted and actual change of the entropy from one update to the next: [2, pairs].

    On the same tokens, so only where both updates are of one batch. The prediction is minus the
    covariance of Eq. 6.
    """
    predicted = []
    actual = []
    for run in runs:
        for line, next_line in zip(run.lines, run.lines[1:]):
            if line["step"] == next_line["step"]:
                predicted.append(-line["entropy_rule"])
                actual.append(next_line["entropy_now"] - line["entropy_now"])
    return np.array([predicted, actual])


def figure_rule(settings: Settings):
    """The Entropy-Clip Rule against what the entropy then did, update by update."""
    figure, axes = subplots(1, 3)
    for axis, arm in zip(axes.flat, ("grpo@8", "bapo-main@8", "bapo-gate@8")):
        runs = settings.find(f"four-attempts {arm}")
        ranks = [stats.spearmanr(*rule_pairs([run])).statistic for run in runs]
        axis.hexbin(*rule_pairs(runs), gridsize=40, bins="log", mincnt=1)
        axis.set(title=f"{arm}: rank r {cell(ranks, runs, 2)}")
        axis.set(xlabel="predicted change", ylabel="change of entropy")
        axis.locator_params(nbins=4)
    figure.suptitle(f"{HARDER}: what Eq. 6 predicts of the next update, and what the entropy did")
    return figure


# ---------------------------------------------------------------- staleness, partial rollouts
REUSE = {  # updates on each batch -> where the runs of a method are
    1: "four-attempts grpo@1",  # BAPO is GRPO there
    2: "map-reuse {method}@2",
    4: "map-reuse {method}@4",
    8: "four-attempts {method}@8",
    16: "map-reuse {method}@16",
}


def figure11(settings: Settings):
    """What the number of updates on a batch costs: held-out accuracy, end − start."""
    figure, axes = subplots(1, 2)
    methods = ["grpo", "bapo-gate"]
    known = {}
    for updates, place in REUSE.items():
        if all(place.format(method=method) in settings.loaded for method in methods):
            known[updates] = place
    if len(known) < 2:
        raise FileNotFoundError(f"less than two numbers of updates are in {settings.results}")
    for axis, outcome in zip(axes.flat, (PRIMARY, "pass@8")):
        for index, method in enumerate(methods):
            gaps = []
            for place in known.values():
                runs_place = place.format(method=method)
                runs = settings.find(runs_place)
                gaps.append(difference(runs, settings.before(runs_place), outcome))
            positions = [dodged(i, index, len(methods), 0.12) for i in range(len(known))]
            draw_gaps(axis, positions, gaps, plot.COLOURS[method], method)
        zero_line(axis)
        axis.set_xticks(range(len(known)), [str(updates) for updates in known])
        axis.set(xlabel="updates on each batch", title=f"held-out {outcome}: end − start")
    figure.suptitle(f"{HARDER}; bapo-gate: lower bound up to 1.1. Bars: 95 % interval")
    return figure


def draw_gaps(axis, positions: list[float], gaps: list, colour: str, label: str) -> None:
    """Differences against positions, joined by a line, each with its interval."""
    means = [gap.mean for gap in gaps]
    halves = [gap.half for gap in gaps]
    axis.plot(positions, means, "o-", color=colour, label=label, markersize=4)
    axis.errorbar(positions, means, halves, fmt="none", color=colour)


def figure12(settings: Settings):
    """Partial rollouts: BAPO minus GRPO on the same start, step by step."""
    figure, axes = subplots(1, 2)
    for axis, metric in zip(axes.flat, ("reward", "entropy")):
        for budget, colour in zip(BUDGETS, ("#0072b2", "#e69f00")):
            folder = f"figures/budget-{budget}"
            runs, gaps = paired_curves(
                settings.find(f"{folder} bapo-gate@4"), settings.find(f"{folder} grpo@4"), metric
            )
            plot.band(axis, runs, gaps, colour, f"{budget} tokens")
        zero_line(axis)
        axis.set(title=f"{metric}: bapo-gate@4 − grpo@4")
    figure.suptitle(
        "Partial rollouts: tokens per response and step; harder case, 4 updates. "
        "Three starts, band: 95 % interval"
    )
    return figure


def paired_curves(
    runs: list[RunMetrics], others: list[RunMetrics], metric: str
) -> tuple[list[RunMetrics], np.ndarray]:
    """The runs that have a partner of the same start and seed, and their curves minus its."""
    partners = {run.pair(): run for run in others}
    paired = [run for run in runs if run.pair() in partners]
    values = plot.curves(paired, metric)
    other_values = plot.curves([partners[run.pair()] for run in paired], metric)
    steps = min(values.shape[1], other_values.shape[1])
    return paired, values[:, :steps] - other_values[:, :steps]


def mean_curve(settings: Settings, place: str, metric: str) -> np.ndarray:
    """The mean over warm starts of a metric, step by step."""
    runs = settings.find(place)
    mean, _ = interval(plot.curves(runs, metric), runs)
    return mean
