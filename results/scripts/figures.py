"""Draw the pictures of README.md and results/README.md from what is packed, into results/figures.

python -m results.scripts.figures
"""

import pandas as pd
from matplotlib.figure import Figure

from results.scripts import tables
from support import plot

RATE = "learning rate / 1e-4 (log scale)"
UPDATES = "updates on a batch (log scale)"
LOWER = "lower bound (log scale)"
# Learning rate, and the first seed of the front page's picture
FRONT = {"1e-4": 138, "2e-4": 138, "3e-4": 126}
METRICS = {"reward": "reward", "entropy": "entropy (nats)", "grad_norm": "gradient norm"}
LABELS = {
    "grpo@1": "GRPO, one update per batch (on-policy)",
    "grpo@8": "GRPO, eight updates per batch",
    "bapo@8": "BAPO, eight updates per batch",
}
SCOPES = {
    "bapo@8": "one search per update, rho0 0.44",
    "bapo-main@8": "one search per update, rho0 0.4",
    "bapo-main-per16@8": "one per 16 responses, rho0 0.4",
    "bapo-main-per4@8": "one per 4 responses, rho0 0.4",
}
# The levels that one reads from the paper's Fig. 8
PAPER = {"high": ("mean upper bound", 1.8, 2.2), "low": ("mean lower bound", 0.69, 0.71)}
OF_RATES = ["mean@16", "pass@8", "entropy", "norm"]
OF_TARGETS = ["searches at start", "searches at end", "mean low", "mean high", "norm", "pass@8"]
OF_BOUNDS = ["lowest entropy", "norm", "mean@16", "pass@8"]
TITLES = {
    "mean@16": "mean@16, held-out accuracy",
    "pass@8": "pass@8, held-out",
    "entropy": "entropy, last 10 steps",
    "lowest entropy": "lowest entropy over 20 steps",
    "norm": "gradient norm, 95th percentile",
    "searches at start": "share of searches at [0.6, 1.2]",
    "searches at end": "share of searches at [0.9, 3.0]",
    "mean low": "mean lower bound",
    "mean high": "mean upper bound",
}


def legend(figure: Figure, labels: dict[str, str]) -> None:
    """Name the methods below all panels."""
    plot.legend(figure)
    for text in figure.legends[0].get_texts():
        text.set_text(labels.get(text.get_text(), text.get_text()))


def front(results) -> Figure:
    """Draw reward, entropy and gradient norm (rows) at three learning rates (columns)."""
    figure = Figure((9.4, 7.6), layout="constrained")
    columns = figure.subplots(3, 3, sharex=True, sharey="row").T
    for (rate, first), column in zip(FRONT.items(), columns):
        lines = plot.load(results / f"rate-{rate}").lines
        seeds = range(first, first + 12)  # noqa: F841, the query below reads it
        lines = lines.query("method in @LABELS and seed in @seeds")
        for axis, (metric, name) in zip(column, METRICS.items()):
            plot.curves(axis, lines, metric, f"{name}, learning rate {rate}")
            axis.label_outer()
    legend(figure, LABELS)
    return figure


def scope(results) -> Figure:
    """Draw the mean bounds over training for what one search sees, and the paper's level."""
    figure = Figure((9.4, 4.2), layout="constrained")
    lines = plot.load(results / "scope").lines.query("method in @SCOPES and update > 1")
    for axis, (metric, (title, least, most)) in zip(figure.subplots(1, 2), PAPER.items()):
        plot.curves(axis, lines, metric, title)
        axis.axhspan(least, most, color="black", alpha=0.2, lw=0, label="the paper's Fig. 8")
    legend(figure, SCOPES)
    return figure


def over(sweep: pd.DataFrame, x: str, outcomes: list[str]) -> Figure:
    """Draw panels of outcomes over the column x, with a line per method."""
    figure = Figure((9.4, 6), layout="constrained")
    for axis, outcome in zip(figure.subplots(2, len(outcomes) // 2).flat, outcomes):
        values = sweep.set_index(x, append=True)[outcome].unstack(plot.RUN)
        plot.means(axis, values)
        axis.set(title=TITLES[outcome], xlabel=x, xscale="log")
        axis.set_xticks(values.index, values.index)
        axis.minorticks_off()
    plot.legend(figure)
    return figure


def across(sweep: pd.DataFrame, method: str, x: str, ends: tuple) -> list[pd.DataFrame]:
    """Return norm and accuracies of runs that have no place on the x-axis, at both its ends."""
    level = sweep.query("method == @method").filter(["norm", "mean@16", "pass@8"])
    return [level.assign(**{x: end}) for end in ends]


def over_rates(sweeps: tables.Sweeps) -> Figure:
    """Draw the outcomes over the learning rate, on the seeds that all rates share."""
    rates = tables.of_rates(sweeps).query("121 <= seed <= 125")
    rates[RATE] = (rates["learning rate"].astype(float) * 1e4).round(2)
    return over(rates, RATE, OF_RATES)


def over_targets(sweeps: tables.Sweeps) -> Figure:
    """Draw the bounds and their effects over rho0, on the same seeds."""
    grpo = across(sweeps["rate-3e-4"].query("121 <= seed <= 125"), "grpo@8", "rho0", (0.4, 0.46))
    return over(pd.concat([tables.of_targets(sweeps), *grpo]), "rho0", OF_TARGETS)


def over_updates(sweeps: tables.Sweeps) -> Figure:
    """Draw the outcomes over the number of updates on a batch."""
    runs = sweeps["rate-3e-4"].query("126 <= seed <= 133")
    before = across(runs, plot.START, UPDATES, (1, 16))
    sweep = runs.reset_index("method")
    sweep[["method", UPDATES]] = sweep["method"].str.extract(r"^(grpo|bapo)@(\d+)$")
    sweep = sweep.dropna(subset="method").set_index("method", append=True)
    sweep = sweep.astype({UPDATES: int}).swaplevel()
    return over(pd.concat([sweep, *before]), UPDATES, OF_RATES)


def over_bounds(sweeps: tables.Sweeps) -> Figure:
    """Draw the outcomes of fixed bounds: a line per upper bound over the lower one."""
    sweep = sweeps["bounds"].dropna(subset="mean low").reset_index("method")
    sweep["method"] = "upper bound " + sweep["mean high"].round(2).astype(str)
    sweep[LOWER] = sweep["mean low"].round(2)
    return over(sweep.set_index("method", append=True), LOWER, OF_BOUNDS)


def main(results) -> None:
    """Draw all pictures."""
    sweeps = tables.read_sweeps(results)
    figures = {
        "curves": front(results),
        "scope": scope(results),
        "rates": over_rates(sweeps),
        "target": over_targets(sweeps),
        "staleness": over_updates(sweeps),
        "bounds": over_bounds(sweeps),
    }
    for name, figure in figures.items():
        figure.savefig(results / f"figures/{name}.png")


if __name__ == "__main__":
    main(tables.ROOT / "results")
