"""Draw a picture for each finding from what is packed in results/, into results/figures.

    python experiments/figures.py

Curves are means of 10 steps and all seeds. Bands, and bars at dots, are 95 % intervals over seeds.
"""

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd

# It puts the top level on the path.
from tables import MARGINS, ROOT, Sweeps, equivalence_table, read_rates, read_sweeps  # isort: skip

import plot

TRAINING = {
    "entropy": "entropy (nats per token)\nFig. 9: GRPO's falls to 0.05, BAPO's stays above 0.1",
    "grad_norm": "gradient norm (95th percentile)\nFig. 9: BAPO's is flat, GRPO's has spikes",
    "reward": "reward\nFig. 9: BAPO's ends 0.07 above GRPO's",
}
LOWS = [0.5, 0.8, 0.9]
METHODS = {1.2: ["0.5-1.2@8", "grpo@8", "0.9-1.2@8"], 2.0: ["0.5-2.0@8", "0.8-2.0@8", "0.9-2.0@8"]}


def training(found: plot.Runs, methods: list[str]) -> plt.Figure:
    """Entropy, norm, reward and held-out accuracy of at most five methods."""
    figure, axes = plt.subplots(2, 2, figsize=(9.4, 6), layout="constrained")
    *panels, accuracy = axes.flat
    for axis, (metric, title) in zip(panels, TRAINING.items()):
        plot.curves(axis, found.lines.loc[methods], metric, title)
        name_curves(axis)
    plot.held_out(accuracy, found.accuracies.loc[["start", *methods]])
    accuracy.set_title("held-out mean@16: start and ends\nFig. 11: BAPO's ends higher")
    figure.suptitle(f"Curves: means of {plot.SMOOTHED} steps and all seeds; band: 95 % interval")
    return figure


def name_curves(axis) -> None:
    """Name every curve on the right of its panel, in the order and with a line to where it ends."""
    lines = sorted(axis.lines, key=lambda line: line.get_ydata()[-1])
    for line, height in zip(lines, np.linspace(0.1, 0.9, len(lines))):
        axis.annotate(
            line.get_label(),
            xy=line.get_xydata()[-1],
            xytext=(1.05, height),
            textcoords="axes fraction",
            color=line.get_color(),
            va="center",
            arrowprops={"arrowstyle": "-", "color": line.get_color(), "relpos": (0, 0.5)},
        )


def search(sweeps: Sweeps) -> plt.Figure:
    """The search less fixed bounds at the end of its range."""
    figure, axis = plt.subplots(figsize=(9.4, 3.2), layout="constrained")
    table = equivalence_table(sweeps)[::-1]
    names = table["outcome"] + ", " + table["difference"]
    axis.errorbar(table["mean"], names, xerr=table["half"], fmt="ko")
    axis.axvspan(-1, 1, alpha=0.15)
    axis.set(title="search − fixed bounds: 90 % intervals, in margins of equivalence (shaded)")
    return figure


def bounds(sweep: pd.DataFrame) -> plt.Figure:
    """Four outcomes over the lower bound, for both upper bounds."""
    figure, axes = plt.subplots(1, 4, figsize=(9.4, 2.8), layout="constrained")
    mean, half = plot.interval(sweep.groupby("method"))
    for axis, outcome in zip(axes, MARGINS):
        for high, methods in METHODS.items():
            heights = mean.loc[methods, outcome]
            bars = half.loc[methods, outcome]
            axis.errorbar(LOWS, heights, bars, fmt="o-", label=f"upper bound {high}")
        axis.set(title=outcome, xlabel="lower bound")
    axes[0].legend()
    return figure


def rate(runs: pd.DataFrame) -> plt.Figure:
    """Held-out mean@16, end less start, by learning rate."""
    runs["rate"] *= 1e4
    mean, half = plot.interval(runs.groupby(["attempts", "rate", "method"])["gain"])
    figure, axes = plt.subplots(1, 2, figsize=(9.4, 3.2), sharey=True, layout="constrained")
    for axis, attempts in zip(axes, (2, 4)):
        mean[attempts].unstack().plot(yerr=half[attempts].unstack(), fmt="o-", ax=axis)
        axis.axhline(0, color="black", linewidth=0.8)
        axis.set(title=f"{attempts} attempts: mean@16, end − start", xlabel="learning rate / 1e-4")
    return figure


def main() -> None:
    """Draw what is packed."""
    results = ROOT / "results"
    sweeps = read_sweeps(results)
    arms = ["grpo@1", "grpo@8", "bapo-main@8", "bapo-app-a@8", "bapo-app-a-gradient@8"]
    figures = {
        "default": training(plot.load(results / "default"), arms),
        "search": search(sweeps),
        "bounds": bounds(sweeps["bounds"]),
        "binding": training(plot.load(results / "binding"), ["grpo@8", "bapo-main@8", "0.9-3.0@8"]),
        "rate": rate(read_rates(results)),
    }
    for name, figure in figures.items():
        plot.save(figure, results / f"figures/{name}.png")


if __name__ == "__main__":
    main()
