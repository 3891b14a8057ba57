"""Draw the runs of a folder, also of runs that still go on: curves.png, table.md, differences.md.

    python plot.py runs/default
    python plot.py results/default        # what was kept of the runs behind the README

Intervals are Student's 95 % over seeds; differences are paired by seed, their p-values two-sided and
not corrected.
"""

import json
import sys
from collections import defaultdict
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from scipy import stats

PANELS = {
    "reward": "reward",
    "entropy": "entropy (nats per token)",
    "grad_norm": "gradient norm (95th percentile)",
    "gradient_share": "positive share of the gradient",
    "low": "lower bound",
    "high": "upper bound",
}
LAST_STEPS = 10  # reward and entropy "at the end" are means over so many steps


class Run:
    """One run: its metrics by step, and its held-out accuracies ({} until it has ended)."""

    def __init__(self, folder: Path):
        self.method, _, self.seed = folder.name.rpartition("-seed")
        self.lines = [json.loads(line) for line in open(folder / "metrics.jsonl")]
        final = folder / "final.json"
        self.final = json.loads(final.read_text()) if final.exists() else {}

    def per_step(self, metric: str) -> np.ndarray:
        """A metric over the updates of each step: their mean, of the norm the 95th percentile."""
        steps = defaultdict(list)
        for line in self.lines:
            steps[line["step"]].append(line[metric] if line.get(metric) is not None else np.nan)
        if metric == "grad_norm":
            return np.array([np.percentile(values, 95) for values in steps.values()])
        return np.array([np.mean(values) for values in steps.values()])

    def outcomes(self) -> dict[str, float]:
        """One number per column of the tables."""
        norms = [line["grad_norm"] for line in self.lines if line.get("grad_norm")] or [np.nan]
        return {
            "reward at end": self.per_step("reward")[-LAST_STEPS:].mean(),
            "entropy at end": self.per_step("entropy")[-LAST_STEPS:].mean(),
            "gradient norm, 95th percentile": np.percentile(norms, 95),
            "positive share": self.per_step("gradient_share").mean(),
            "mean low": self.per_step("low").mean(),
            "mean high": self.per_step("high").mean(),
            **self.final,
        }


def load(folder: Path) -> dict[str, list[Run]]:
    """Method -> its runs, by seed."""
    runs = defaultdict(list)
    for path in sorted(folder.glob("*/metrics.jsonl")):
        run = Run(path.parent)
        runs[run.method].append(run)
    if not runs:
        raise SystemExit(f"{folder} holds no metrics: run train.py --output_dir {folder} first")
    return runs


# ---------------------------------------------------------------- curves.png
def draw(runs: dict[str, list[Run]], path: Path) -> None:
    """A panel per metric, a curve per method: the mean over seeds and its interval."""
    figure, axes = plt.subplots(3, 2, figsize=(9.4, 9), layout="constrained")
    for axis, (metric, title) in zip(axes.flat, PANELS.items()):
        for method, of_method in runs.items():
            curves = [run.per_step(metric) for run in of_method]
            steps = min(len(curve) for curve in curves)
            curves = np.stack([curve[:steps] for curve in curves])
            mean, half = mean_and_half(curves)
            (line,) = axis.plot(np.arange(1, steps + 1), mean, label=method)
            axis.fill_between(
                np.arange(1, steps + 1), mean - half, mean + half, color=line.get_color(), alpha=0.15
            )
        axis.set(title=title, xlabel="step (batch of rollouts)")
    figure.legend(*axes.flat[0].get_legend_handles_labels(), loc="outside upper center", ncols=4)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def mean_and_half(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean over runs [runs, ...], and half of Student's interval; 0 for a single run."""
    if len(values) < 2:
        return values.mean(0), np.zeros(values.shape[1:])
    half = stats.t.ppf(0.975, len(values) - 1) * stats.sem(values, 0)
    return values.mean(0), half


# ---------------------------------------------------------------- tables
def table(runs: dict[str, list[Run]]) -> list[str]:
    """A row per method: mean ± half of the interval."""
    columns = list(next(iter(runs.values()))[0].outcomes())
    rows = [["method", "runs", *columns], ["---"] * (len(columns) + 2)]
    for method, of_method in runs.items():
        cells = []
        for column in columns:
            values = np.array([run.outcomes().get(column, np.nan) for run in of_method])
            mean, half = mean_and_half(values)
            cells.append(f"{mean:.3f} ± {half:.3f}")
        rows.append([method, str(len(of_method)), *cells])
    return ["| " + " | ".join(row) + " |" for row in rows]


def differences(runs: dict[str, list[Run]], other: str) -> list[str]:
    """Every method minus `other`, paired by seed: mean ± half of the interval, p."""
    others = {run.seed: run.outcomes() for run in runs[other]}
    columns = list(next(iter(others.values())))
    rows = [[f"− {other}", "pairs", *columns], ["---"] * (len(columns) + 2)]
    for method, of_method in runs.items():
        pairs = [(run.outcomes(), others[run.seed]) for run in of_method if run.seed in others]
        if method == other or len(pairs) < 2:
            continue
        cells = []
        for column in columns:
            ours, theirs = zip(*((one[column], two[column]) for one, two in pairs))
            test = stats.ttest_rel(ours, theirs)
            interval = test.confidence_interval()
            half = (interval.high - interval.low) / 2
            cells.append(f"{np.mean(ours) - np.mean(theirs):+.3f} ± {half:.3f} (p {test.pvalue:.3f})")
        rows.append([method, str(len(pairs)), *cells])
    return ["| " + " | ".join(row) + " |" for row in rows]


def report(folder: Path) -> list[str]:
    """Write the picture and the tables; return the lines of the table."""
    runs = load(folder)
    draw(runs, folder / "curves.png")
    lines = table(runs)
    (folder / "table.md").write_text("\n".join(lines) + "\n")
    if "grpo@8" in runs:
        (folder / "differences.md").write_text("\n".join(differences(runs, "grpo@8")) + "\n")
    return lines


if __name__ == "__main__":
    print("\n".join(report(Path(sys.argv[1]))))
