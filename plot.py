"""Draw runs of train.py, also runs that still go on, and tabulate them: curves.png and table.md.

    python plot.py runs/default
    python plot.py results/default      # what experiments/pack.py kept of runs

Means are over seeds. Bands, and what follows ±, are half of Student's 95 % interval of that mean.
Of runs that still go on, a step is the mean of the seeds that have come so far.
"""

import argparse
from pathlib import Path
from typing import NamedTuple

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from scipy import stats

import runs

PANELS = {
    "reward": "reward (mean of 5 steps)",
    "entropy": "entropy (nats per token)",
    "grad_norm": "gradient norm (95th percentile of a step)",
    "gradient_share": "positive share of the gradient",
}
LAST_STEPS = 10  # "at the end" is the mean of so many
LINE = 0.09  # height of a line of text, as a part of a panel's
plt.rcParams.update({"font.size": 9, "axes.titlesize": 9, "axes.grid": True, "grid.alpha": 0.3})


# ---------------------------------------------------------------- reading
class Runs(NamedTuple):
    """The runs of a folder.

    lines: a row per update with the columns method, seed, step, update and metrics (NaN where a
    method or a step has none).
    accuracies: mean@k and pass@k of every run that has ended; the index is method and seed. Those
    before training have the method "start".
    """

    lines: pd.DataFrame
    accuracies: pd.DataFrame


def load(folder: Path) -> Runs:
    """Read what train.py has written so far, or what pack.py kept. ValueError if there is none."""
    accuracies = {}
    if (folder / "runs.json").exists():
        lines = pd.read_csv(folder / "metrics.csv.xz")
        kept = runs.read_json(folder / "runs.json")
        for method, by_seed in {**kept["final"], "start": kept["starts"]}.items():
            for seed, values in by_seed.items():
                accuracies[method, int(seed)] = values
    else:
        lines = read_lines(folder)
        for path in folder.glob("start-seed*.json"):
            accuracies[method_and_seed(path.stem)] = runs.read_json(path)
        for path in folder.glob("*-seed*/final.json"):
            accuracies[method_and_seed(path.parent.name)] = runs.read_json(path)
    for name in (*PANELS, "low", "high"):
        if name not in lines:
            lines[name] = np.nan
    frame = pd.DataFrame.from_dict(accuracies, orient="index").sort_index()
    return Runs(lines, frame.drop(columns="steps", errors="ignore"))


def read_lines(folder: Path) -> pd.DataFrame:
    """All metrics.jsonl of a folder of runs, as Runs.lines."""
    frames = {}
    for path in sorted(folder.glob("*-seed*/metrics.jsonl")):
        frames[method_and_seed(path.parent.name)] = pd.DataFrame(runs.read_lines(path), dtype=float)
    if not any(map(len, frames.values())):
        raise ValueError(f"{folder} holds no metrics: give train.py's --output_dir")
    return pd.concat(frames, names=["method", "seed"]).reset_index(["method", "seed"])


def method_and_seed(name: str) -> tuple[str, int]:
    """Of a run's folder or a start's file."""
    method, _, seed = name.rpartition("-seed")
    return method, int(seed)


# ---------------------------------------------------------------- numbers
def by_step(lines: pd.DataFrame, metric: str) -> pd.DataFrame:
    """A metric's mean over the updates of each step; of the norm the 95th percentile.

    Returns a row per step, a column per method and seed. NaN: not there, or not yet.
    """
    groups = lines.groupby(["step", "method", "seed"])[metric]
    values = groups.quantile(0.95) if metric == "grad_norm" else groups.mean()
    return values.unstack(["method", "seed"])


def outcomes(found: Runs) -> pd.DataFrame:
    """The numbers of every run: a row per method and seed, a column per column of table.md."""
    lines = found.lines
    runs_of = lines.groupby(["method", "seed"])
    last = lines[lines["step"] > runs_of["step"].transform("max") - LAST_STEPS]
    columns = {
        "entropy at the end": by_step(last, "entropy").mean(),
        "reward at the end": by_step(last, "reward").mean(),
        "gradient norm, 95th percentile": runs_of["grad_norm"].quantile(0.95),
        "positive share": runs_of["gradient_share"].mean(),
        "mean low": runs_of["low"].mean(),
        "mean high": runs_of["high"].mean(),
    }
    return pd.concat([pd.DataFrame(columns), found.accuracies], axis=1)


def interval(values: pd.DataFrame) -> tuple[pd.Series, pd.Series]:
    """Mean over the columns (seeds), and half of Student's 95 % interval; NaN with a single one."""
    half = stats.t.ppf(0.975, values.count(axis=1) - 1) * values.sem(axis=1)
    return values.mean(axis=1), half


def table(found: Runs) -> list[str]:
    """Lines of Markdown: a row per method, and one for the starts."""
    numbers = outcomes(found)
    rows = [["method", "seeds", *numbers.columns]]
    for method, of_method in numbers.groupby(level=0, sort=False):
        cells = [f"{mean:.3f} ± {half:.3f}" for mean, half in zip(*interval(of_method.T))]
        cells = [cell.removesuffix(" ± nan").replace("nan", "–") for cell in cells]
        rows.append([method, str(len(of_method)), *cells])
    return markdown(rows)


def markdown(rows: list[list[str]]) -> list[str]:
    """Lines of a table; the first row is its head."""
    head, *others = rows
    return [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *others)]


# ---------------------------------------------------------------- panels
def curves(axis, values: pd.DataFrame, title: str) -> None:
    """A curve per method with its band; values as by_step returns them."""
    for i, method in enumerate(values.columns.unique("method")):
        mean, half = interval(values[method].dropna(how="all"))
        axis.plot(mean.index, mean, color=f"C{i}", label=method)
        axis.fill_between(mean.index, mean - half, mean + half, color=f"C{i}", alpha=0.15, lw=0)
    axis.set(title=title, xlabel="step (batch of rollouts)")


def name_curves(axis) -> None:
    """Write the name of every curve right of where it ends, none over another."""
    to_panel = axis.transScale + axis.transLimits
    heights = {}
    for line in axis.lines:
        if len(line.get_xydata()):
            heights[line] = to_panel.transform(line.get_xydata()[-1])[1]
    lines = sorted(heights, key=heights.get)
    steps = LINE * np.arange(len(lines))
    # Less its step, every height may go anywhere, if only the sequence does not fall.
    level = np.maximum.accumulate([heights[line] for line in lines] - steps)
    level = np.minimum(level, 1 - LINE * len(lines))
    for line, height in zip(lines, level + steps):
        place = axis.transAxes
        axis.text(1.02, height, line.get_label(), color=line.get_color(), transform=place)


def held_out(axis, accuracies: pd.DataFrame, methods: list[str]) -> None:
    """A held-out accuracy of each method, from the start (ring) to the end (dot, interval)."""
    values = accuracies.iloc[:, 0].unstack()
    for row, method in enumerate(methods):
        if method in values.index:
            ended = values.loc[:, values.loc[method].notna()]  # the same seeds for ring and dot
            mean, half = interval(ended)
            half = half.fillna(0)[method]
            axis.errorbar(mean[method], row, xerr=half, fmt="o", color=f"C{row}")
            axis.plot(mean.get("start"), row, "o", color=f"C{row}", markerfacecolor="white")
    name_rows(axis, methods)
    axis.set(title=f"held-out {accuracies.columns[0]}: start (ring), end (dot)")


def used_bounds(axis, lines: pd.DataFrame, methods: list[str]) -> None:
    """How often a method used each clip bound: the share of its updates is a circle's area."""
    for row, method in enumerate(methods):
        for side in ("low", "high"):
            used = lines.loc[lines["method"] == method, side].round(3)
            shares = used.value_counts(normalize=True)
            axis.scatter(shares.index, [row] * len(shares), 150 * shares, f"C{row}", lw=0)
    name_rows(axis, methods)
    axis.set(title="clip bounds used (area: share of updates)", xlabel="importance ratio")


def name_rows(axis, methods: list[str]) -> None:
    """A method per row, the first on top, named on the right."""
    axis.set_yticks(range(len(methods)), methods)
    axis.set_ylim(len(methods) - 0.5, -0.5)
    axis.yaxis.tick_right()


# ---------------------------------------------------------------- the files
def draw(found: Runs) -> plt.Figure:
    """Four panels of training, held-out accuracy, clip bounds."""
    lines = found.lines
    methods = sorted(lines["method"].unique())
    figure, axes = plt.subplots(3, 2, figsize=(9.4, 8 + 0.3 * len(methods)), layout="constrained")
    for axis, (metric, title) in zip(axes.flat, PANELS.items()):
        values = by_step(lines, metric)
        if metric == "reward":
            values = values.rolling(5, min_periods=1).mean().where(values.notna())
        curves(axis, values, title)
        means = values.T.groupby("method").mean()
        least = means.min(axis=None)
        if metric == "grad_norm" and means.max(axis=None) > 10 * least > 0:
            axis.set(yscale="log", ylim=(0.7 * least, None))  # a band may reach below 0
    on_the_way = [name for name in lines if name.startswith("held_out_mean@")]
    if on_the_way:
        measured = by_step(lines, on_the_way[0])
        curves(axes[2, 0], measured.dropna(how="all"), on_the_way[0].replace("_", " "))
    elif len(found.accuracies):
        held_out(axes[2, 0], found.accuracies, methods)
    used_bounds(axes[2, 1], lines, methods)
    for axis in axes.flat[:-1] if on_the_way else axes.flat[:-2]:
        name_curves(axis)
    figure.suptitle("@N: N updates on each batch. Band: 95 % interval of the mean over seeds")
    return figure


def save(figure: plt.Figure, path: Path) -> None:
    """Write a picture in one piece, and close it."""
    runs.write_atomically(path, lambda file: figure.savefig(file, format="png", dpi=110))
    plt.close(figure)


def report(folder: Path) -> list[str]:
    """Write curves.png and table.md into the folder; return the table's lines."""
    found = load(folder)
    save(draw(found), folder / "curves.png")
    lines = table(found)
    text = "\n".join(lines) + "\n"
    runs.write_atomically(folder / "table.md", lambda file: file.write_text(text))
    return lines


def main() -> int:
    """The command line. Returns the exit status 0."""
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    parser.add_argument("folder", type=Path, help="of runs of train.py, or of packed runs")
    print("\n".join(report(parser.parse_args().folder)))
    return 0


if __name__ == "__main__":
    runs.command("plot.py", main, "Interrupted: nothing is written half")
