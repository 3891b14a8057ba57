"""Draw the pictures of README.md and results/README.md from what is packed, into results/figures.

python experiments/figures.py
"""

import matplotlib.pyplot as plt
import pandas as pd

# It puts the top level on the path.
import tables  # isort: skip

import plot

RATE = "learning rate / 1e-4"
UPDATES = "updates on a batch"
# Learning rate, and the first seed of the front page's picture
FRONT = {"1e-4": 138, "2e-4": 138, "3e-4": 126}
LABELS = {
    "grpo@1": "GRPO, one update on each batch (on-policy)",
    "grpo@8": "GRPO, eight updates on each batch",
    "bapo@8": "BAPO, eight updates on each batch",
}
OF_RATES = ["mean@16", "pass@8", "entropy", "norm"]
OF_TARGETS = ["updates at start", "updates at end", "mean low", "mean high", "norm", "pass@8"]
OF_BOUNDS = ["lowest entropy", "norm", "mean@16", "pass@8"]
TITLES = {
    "mean@16": "mean@16, held-out accuracy",
    "pass@8": "pass@8, held-out",
    "entropy": "entropy, last 10 steps",
    "lowest entropy": "lowest entropy over 20 steps",
    "norm": "gradient norm, 95th percentile",
    "updates at start": "share of updates at [0.6, 1.2]",
    "updates at end": "share of updates at [0.9, 3.0]",
    "mean low": "mean lower bound",
    "mean high": "mean upper bound",
}


def front(results) -> plt.Figure:
    """Draw reward, entropy and gradient norm (rows) at three learning rates (columns)."""
    metrics = {"reward": "reward", "entropy": "entropy (nats)", "grad_norm": "gradient norm"}
    figure, axes = plt.subplots(
        3, 3, figsize=(9.4, 7.6), sharex=True, sharey="row", layout="constrained"
    )
    for (rate, first), column in zip(FRONT.items(), axes.T):
        lines = plot.load(results / f"rate-{rate}").lines
        seeds = range(first, first + 12)  # noqa: F841, the query below reads it
        lines = lines.query("method in @LABELS and seed in @seeds")
        for metric, axis in zip(metrics, column):
            plot.curves(axis, lines, metric, "")
            axis.set(xlabel="", title=f"learning rate {rate}" if metric == "reward" else "")
        column[-1].set_xlabel("step (batch of rollouts)")
    for label, axis in zip(metrics.values(), axes[:, 0]):
        axis.set_ylabel(label)
    handles, methods = axes[0, 0].get_legend_handles_labels()
    labels = [LABELS[method] for method in methods]
    figure.legend(handles, labels, loc="outside lower center", ncols=3)
    return figure


def over(sweep: pd.DataFrame, x: str, outcomes: list[str], title: str) -> plt.Figure:
    """Draw panels of outcomes over the column x, with a line per method."""
    columns = len(outcomes) // 2
    figure, axes = plt.subplots(2, columns, figsize=(9.4, 6), layout="constrained")
    for axis, outcome in zip(axes.flat, outcomes):
        values = sweep.set_index(x, append=True)[outcome].unstack(plot.RUN)
        plot.means(axis, values, "o-")
        axis.set(title=TITLES[outcome], xlabel=x, xscale="log")
        axis.set_xticks(values.index, values.index)
        axis.minorticks_off()
    handles, labels = axes.flat[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=6)
    figure.suptitle(title)
    return figure


def over_rates(sweeps: tables.Sweeps) -> plt.Figure:
    """Draw the outcomes over the learning rate, on the seeds that all rates share."""
    rates = pd.concat([sweeps[name] for name in sweeps if name.startswith("rate-")])
    rates = rates.query("121 <= seed <= 125 and not method.str.startswith('before')")
    rates = rates.assign(**{RATE: (rates["learning rate"].astype(float) * 1e4).round(2)})
    return over(rates, RATE, OF_RATES, "@8: eight updates on each batch; seeds 121 to 125")


def over_targets(sweeps: tables.Sweeps) -> plt.Figure:
    """Draw the bounds and their effects over rho0."""
    targets = [sweep for name, sweep in sweeps.items() if name.startswith("target-")]
    targets.append(sweeps["rate-3e-4"])
    targets = pd.concat(targets).query("method == 'bapo@8' and 121 <= seed <= 125")
    return over(targets, "rho0", OF_TARGETS, "bapo@8 at learning rate 3e-4, seeds 121 to 125")


def over_updates(sweeps: tables.Sweeps) -> plt.Figure:
    """Draw the outcomes over the number of updates on a batch."""
    sweep = sweeps["rate-3e-4"].query("126 <= seed <= 133").reset_index("method")
    sweep[["method", UPDATES]] = sweep["method"].str.extract(r"^(grpo|bapo)@(\d+)$")
    sweep = sweep.dropna(subset="method").set_index("method", append=True)
    sweep = sweep.astype({UPDATES: int})
    return over(sweep, UPDATES, OF_RATES, "learning rate 3e-4, seeds 126 to 133")


def over_bounds(sweeps: tables.Sweeps) -> plt.Figure:
    """Draw the outcomes of fixed bounds: a line per upper bound over the lower one."""
    sweep = sweeps["bounds"].dropna(subset="mean low").reset_index("method")
    sweep["method"] = "upper bound " + sweep["mean high"].round(2).astype(str)
    sweep["lower bound"] = sweep["mean low"].round(2)
    sweep = sweep.set_index("method", append=True)
    title = "fixed bounds at learning rate 2e-4, eight updates on each batch, seeds 101 to 105"
    return over(sweep, "lower bound", OF_BOUNDS, title)


def main() -> None:
    """Draw all pictures."""
    results = tables.ROOT / "results"
    sweeps = tables.read_sweeps(results)
    figures = {
        "curves": front(results),
        "rates": over_rates(sweeps),
        "target": over_targets(sweeps),
        "staleness": over_updates(sweeps),
        "bounds": over_bounds(sweeps),
    }
    for name, figure in figures.items():
        plot.save(figure, results / f"figures/{name}.png")


if __name__ == "__main__":
    main()
