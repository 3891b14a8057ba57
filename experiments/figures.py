"""Draw a picture for each finding from what is packed in results/, into results/figures.

    python experiments/figures.py

Curves are means of 10 steps and all seeds. Bands, and bars at dots, are 95 % intervals over seeds.
"""

import matplotlib.pyplot as plt
import pandas as pd
from scipy import stats

# It puts the top level on the path.
from tables import EQUIVALENT, MARGINS, ROOT, Sweeps, gaps, read_sweeps  # isort: skip

import plot

SMOOTHED = 10  # steps
TRAINING = {
    "entropy": "entropy (nats per token)",
    "grad_norm": "gradient norm (95th percentile of a step)",
    "reward": "reward",
}
PAPER = {
    "entropy": "Paper: GRPO's falls to 0.05, BAPO's stays above 0.1",
    "grad_norm": "Paper: BAPO's is flat, GRPO's has spikes",
    "reward": "Paper: BAPO's ends 0.07 above GRPO's",
    "held out": "Paper: BAPO's ends higher",
}
LOWS = [0.5, 0.8, 0.9]
METHODS = {1.2: ["0.5-1.2@8", "grpo@8", "0.9-1.2@8"], 2.0: ["0.5-2.0@8", "0.8-2.0@8", "0.9-2.0@8"]}


def training(found: plot.Runs, methods: list[str]) -> plt.Figure:
    """Entropy, norm, reward and held-out accuracy of at most five methods."""
    chosen = found.lines[found.lines["method"].isin(methods)]
    figure, axes = plt.subplots(2, 2, figsize=(9.4, 6), layout="constrained")
    for axis, (metric, title) in zip(axes.flat, TRAINING.items()):
        values = plot.by_step(chosen, metric).rolling(SMOOTHED, min_periods=1).mean()
        plot.curves(axis, values, f"{title}\n{PAPER[metric]}")
        plot.name_curves(axis)
    held_out = axes[1, 1]
    plot.held_out(held_out, found.accuracies, sorted(methods))
    held_out.set_title(f"{held_out.get_title()}\n{PAPER['held out']}")
    figure.suptitle(f"Curves: means of {SMOOTHED} steps and all seeds; band: 95 % interval")
    return figure


def search(found: plot.Runs, sweeps: Sweeps) -> plt.Figure:
    """Left: the search less fixed bounds. Right: the bounds that the searches used."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(9.4, 3.2), layout="constrained")
    rows = []
    for sweep, (method, other) in EQUIVALENT.items():
        for outcome, margin in MARGINS.items() if sweep in sweeps else ():
            in_margins = gaps(sweeps[sweep], outcome, method, other) / margin
            low, high = stats.ttest_1samp(in_margins, 0).confidence_interval(0.9)
            left.plot([low, high], [len(rows)] * 2, "k-")
            left.plot(in_margins.mean(), len(rows), "ko")
            rows.append(f"{outcome}, {method} − {other}")
    left.axvspan(-1, 1, alpha=0.15)
    plot.name_rows(left, rows)
    left.set(title="search − fixed bounds, in margins (90 %)")
    methods = ["bapo-main@8", "bapo-octothinker@8", "bapo@8"]
    plot.used_bounds(right, found.lines, methods)
    return figure


def bounds(sweeps: Sweeps) -> plt.Figure:
    """Four outcomes over the lower bound, for both upper bounds."""
    figure, axes = plt.subplots(1, 4, figsize=(9.4, 2.8), layout="constrained")
    for axis, outcome in zip(axes, MARGINS):
        mean, half = plot.interval(sweeps["bounds"][outcome].T)
        for high, methods in METHODS.items():
            label = f"upper bound {high}"
            axis.errorbar(LOWS, mean[methods], half[methods], fmt="o-", label=label)
        axis.set(title=outcome, xlabel="lower bound")
    axes[0].legend()
    return figure


def rate(runs: pd.DataFrame) -> plt.Figure:
    """Held-out mean@16, end less start, by learning rate."""
    runs["gain"] = runs["mean@16"] - runs["start mean@16"]
    figure, axes = plt.subplots(1, 2, figsize=(9.4, 3.2), sharey=True, layout="constrained")
    for axis, (attempts, of_attempts) in zip(axes, runs.groupby("attempts")):
        for method, of_method in of_attempts.groupby("method"):
            gains = of_method.set_index(["rate", "start"])["gain"].unstack()
            mean, half = plot.interval(gains)
            axis.errorbar(1e4 * mean.index, mean, half, fmt="o-", label=method)
        axis.axhline(0, color="black", linewidth=0.8)
        axis.set(title=f"{attempts} attempts: mean@16, end − start", xlabel="learning rate / 1e-4")
        axis.legend()
    return figure


def main() -> None:
    """Draw what is packed."""
    results = ROOT / "results"
    sweeps = read_sweeps(results)
    default = plot.load(results / "default")
    main_methods = ["grpo@1", "grpo@8", "bapo-main@8", "bapo-octothinker@8", "bapo@8"]
    figures = {"default": training(default, main_methods), "search": search(default, sweeps)}
    if "bounds" in sweeps:
        figures["bounds"] = bounds(sweeps)
    if "binding" in sweeps:
        binding = plot.load(results / "binding")
        figures["binding"] = training(binding, ["grpo@8", "bapo-main@8", "0.9-3.0@8"])
    figures["rate"] = rate(pd.read_csv(results / "rate-reuse/runs.csv", comment="#"))
    for name, figure in figures.items():
        plot.save(figure, results / f"figures/{name}.png")


if __name__ == "__main__":
    main()
