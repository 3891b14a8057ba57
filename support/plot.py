"""Draw and tabulate runs of train.py, finished or not: curves.png and table.md.

    python -m support.plot runs/default
    python -m support.plot results/rate-2e-4    # also a folder that results/scripts/pack.py made

Curves are means over seeds and over 10 steps. Bands and ± are 95 % confidence intervals of
the mean over seeds (Student's t). Pictures show them from five seeds on.
"""

import sys
from collections.abc import Collection
from itertools import cycle
from pathlib import Path
from typing import NamedTuple

import matplotlib
import pandas as pd
from matplotlib.figure import Figure
from scipy.special import stdtrit  # scipy.stats is slow to load

from support import command_line, files

PANELS = {
    "reward": "reward",
    "entropy": "entropy (nats per token)",
    "grad_norm": "gradient norm (95th percentile of a step)",
    "gradient_share": "positive tokens' share of the gradient",
    "low": "lower clip bound",
    "high": "upper clip bound",
}
RUN = ["method", "seed"]  # what names a run
SMOOTHED = 10  # steps
FEWEST = 5  # seeds: with fewer, Student's interval is wider than the picture
START = "before training"
# A method's colour, line and marker in all pictures; other methods take OTHER_STYLES in turn.
STYLES = {
    START: "k:",
    "grpo@1": "C7:s",
    "grpo@8": "C0--o",
    "bapo@8": "C1-^",
    "0.9-3.0@8": "C2-.v",
}
OTHER_STYLES = ["C3-.D", "C4--P", "C5-D", "C8:X", "C9-d", "C6-.h"]
matplotlib.rcParams |= {"font.size": 9, "axes.titlesize": 9, "axes.grid": True, "grid.alpha": 0.3}


# ---------------------------------------------------------------- reading
class Records(NamedTuple):
    """What the runs of a folder wrote. The index of both tables is method and seed.

    lines: a row per update, with the columns step, update and metrics (NaN where there is none).
    accuracies: mean@k and pass@k of every run that has ended, and those before training.
    """

    lines: pd.DataFrame
    accuracies: pd.DataFrame


def load(folder: Path) -> Records:
    """Read what train.py has written so far, or what pack.py kept.

    Raises ValueError if there is nothing.
    """
    if (folder / "accuracies.csv").exists():
        lines = pd.read_csv(folder / "metrics.csv.xz", index_col=RUN)
        accuracies = pd.read_csv(folder / "accuracies.csv", index_col=RUN)
    else:
        lines, accuracies = read_runs(folder)
    lines = lines.reindex(columns=lines.columns.union([*PANELS]))
    return Records(lines, accuracies.rename(index={"start": START}, level=0))


def read_runs(folder: Path) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return lines and accuracies of an output_dir of train.py.

    Runs without a line are left out, and so are folders with another name (bapo@8-seed0-old).
    """
    lines = {}
    accuracies = {}
    for path in folder.glob("start-seed*.json"):
        accuracies["start", int(path.stem.removeprefix("start-seed"))] = files.read_json(path)
    for path in sorted(folder.glob("*-seed*/metrics.jsonl")):
        method, _, seed = path.parent.name.rpartition("-seed")
        records = files.read_lines(path)
        if records and seed.isdecimal():
            lines[method, int(seed)] = pd.DataFrame(records, dtype=float)
            final = path.with_name("final.json")  # train.py removes it before it continues a run
            if final.exists():
                accuracies[method, int(seed)] = files.read_json(final)
    if not lines:
        raise ValueError(f"{folder} holds no metrics: give an output_dir of train.py")
    # Without the level of line numbers
    return pd.concat(lines, names=RUN).droplevel(2), pd.DataFrame(accuracies).T.filter(like="@")


# ---------------------------------------------------------------- numbers
def by_step(lines: pd.DataFrame, metric: str) -> pd.DataFrame:
    """Return a metric's mean over the updates of each step; of the norm the 95th percentile.

    The result has a row per step and a column per method and seed, with NaN for what is not there.
    """
    groups = lines.groupby(["step", *RUN])[metric]
    values = groups.quantile(0.95) if metric == "grad_norm" else groups.mean()
    return values.unstack(RUN)


def outcomes(records: Records) -> pd.DataFrame:
    """Return the columns of table.md for every run: a row per method and seed.

    Entropy is the mean of a run's last 10 steps, reward of its last 20; the gradient norm is the
    95th percentile over its updates. The other columns leave out each batch's first update, where
    every ratio is 1 and clipping does nothing.
    """
    lines = records.lines
    steps_left = lines.groupby(RUN)["step"].transform("max") - lines["step"]
    reused = lines[lines["update"] > 1].groupby(RUN)
    columns = {
        "entropy": by_step(lines[steps_left < 10], "entropy").mean(),
        "reward": by_step(lines[steps_left < 20], "reward").mean(),
        "gradient norm": lines.groupby(RUN)["grad_norm"].quantile(0.95),
        "positive share": reused["gradient_share"].mean(),
        "mean low": reused["low"].mean(),
        "mean high": reused["high"].mean(),
    }
    return pd.concat([pd.DataFrame(columns), records.accuracies], axis=1)


def interval(values, confidence: float = 0.95) -> tuple:
    """Return the mean over rows, or groups of rows, and half of Student's interval of it."""
    half = stdtrit(values.count() - 1, 0.5 + confidence / 2) * values.sem()
    return values.mean(), half


def levels(groups) -> pd.DataFrame:
    """Return table cells, "mean ± half of the interval": a row per group, a column per outcome."""
    mean, half = interval(groups)
    cells = mean.map("{:.3f}".format) + " ± " + half.map("{:.3f}".format)
    return cells.replace(" ± nan", "", regex=True).replace("nan", "–")


def markdown(cells: pd.DataFrame) -> str:
    """Return a Markdown table, without the index."""
    rows = [cells.columns, ["---"] * len(cells.columns), *cells.astype(str).to_numpy()]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def table(records: Records) -> str:
    """Return table.md: a row per method and one for the accuracy before training."""
    groups = outcomes(records).groupby(level=0)
    cells = levels(groups)
    cells = cells.loc[list(styles(cells.index)), (cells != "–").any()]
    cells.insert(0, "seeds", groups.size())
    return markdown(cells.reset_index(names="method"))


# ---------------------------------------------------------------- pictures
def styles(methods: Collection[str]) -> dict[str, str]:
    """Return matplotlib's format of each method, in the order in which methods are shown."""
    others = sorted(set(methods) - set(STYLES))
    all_styles = STYLES | dict(zip(others, cycle(OTHER_STYLES)))
    return {method: style for method, style in all_styles.items() if method in methods}


def means(axis, values: pd.DataFrame) -> None:
    """Draw a line per method, with a band from five seeds on.

    values has a row per place on the x-axis and a column per method and seed.
    """
    for method, style in styles(values.columns.unique("method")).items():
        seeds = values[method].dropna(how="all")
        mean, half = interval(seeds.T)
        half = half.where(seeds.count(axis=1) >= FEWEST)
        (line,) = axis.plot(mean, style, label=method, markevery=0.15, markersize=4)
        axis.fill_between(mean.index, mean - half, mean + half, color=line.get_color(), alpha=0.15)


def curves(axis, lines: pd.DataFrame, metric: str, title: str, smoothed: int = SMOOTHED) -> None:
    """Draw a metric over steps."""
    values = by_step(lines, metric)
    means(axis, values.rolling(smoothed, min_periods=1).mean().where(values.notna()))
    axis.set(title=title, xlabel=f"step (means of {smoothed})")


def legend(figure: Figure, columns: int = 3) -> None:
    """Name the methods below all panels, as the first panel has them."""
    handles_and_labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(*handles_and_labels, loc="outside lower center", ncols=columns, handlelength=3)


def draw(records: Records) -> Figure:
    """Draw six panels of training."""
    figure = Figure((9.4, 9), layout="constrained")
    for axis, (metric, title) in zip(figure.subplots(3, 2).flat, PANELS.items()):
        curves(axis, records.lines, metric, title)
    legend(figure)
    return figure


def report(folder: Path) -> str:
    """Write curves.png and table.md into the folder; return the table."""
    records = load(folder)
    draw(records).savefig(folder / "curves.png")
    text = table(records)
    (folder / "table.md").write_text(text)
    return text


def main() -> int:
    """Run the command line, by default for the current folder. Returns the exit status 0."""
    print(report(Path(*sys.argv[1:])), end="")
    return 0


if __name__ == "__main__":
    command_line.command("plot.py", main, "Interrupted: run it again")
