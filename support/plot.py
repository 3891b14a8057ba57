"""Draw and tabulate runs of train.py, finished or not: curves.png and table.md.

    python -m support.plot runs/default
    python -m support.plot results/rate-2e-4    # also a folder that results/scripts/pack.py made

Curves are means over seeds and over 10 steps. Bands and ± are 95 % confidence intervals of
the mean over seeds (Student's t). Pictures show them from five seeds on.
"""

import sys
from pathlib import Path
from typing import NamedTuple

import matplotlib
import pandas as pd
from matplotlib.figure import Figure
from scipy.special import stdtrit  # scipy.stats is slow to load

from support import runs

PANELS = {
    "reward": "reward",
    "entropy": "entropy",
    "grad_norm": "gradient norm",
    "gradient_share": "positive share",
    "low": "lower clip bound",
    "high": "upper clip bound",
}
RUN = ["method", "seed"]  # what names a run
MIN_SEEDS = 5  # seeds: with fewer, Student's interval is wider than the picture
START = "before training"
# A method's colour, line and marker in all pictures
STYLES = {
    "grpo@1": "C7:s",
    "grpo@8": "C0--o",
    "bapo@8": "C1-^",
    "0.9-3.0@8": "C2-.v",
    "0.6-1.2@8": "C3-.D",
}
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
        lines = lines.apply(pd.to_numeric, errors="coerce")
    return Records(lines.reindex(columns=lines.columns.union([*PANELS])), accuracies)


def read_runs(folder: Path) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return lines and accuracies of an output_dir of train.py.

    Runs without a line are left out, and so are folders with another name (bapo@8-seed0-old).
    """
    lines = []
    accuracies = {}
    for path in folder.glob("start-seed*.json"):
        accuracies[START, int(path.stem.removeprefix("start-seed"))] = runs.read_json(path)
    for path in sorted(folder.glob("*-seed*/metrics.jsonl")):
        method, _, seed = path.parent.name.rpartition("-seed")
        if seed.isdecimal():
            for line in runs.read_lines(path):
                lines.append({"method": method, "seed": int(seed)} | line)
            final = path.with_name("final.json")  # train.py removes it before it continues a run
            if final.exists():
                accuracies[method, int(seed)] = runs.read_json(final)
    if not lines:
        raise ValueError(f"{folder} holds no metrics: give an output_dir of train.py")
    return pd.DataFrame(lines).set_index(RUN), pd.DataFrame(accuracies).T.filter(like="@")


# ---------------------------------------------------------------- numbers
def by_step(lines: pd.DataFrame, metric: str) -> pd.DataFrame:
    """Return a metric's mean over the updates of each step.

    The result has a row per step and a column per method and seed, with NaN for what is not there.
    """
    return lines.groupby(["step", *RUN])[metric].mean().unstack(RUN)


def outcomes(records: Records) -> pd.DataFrame:
    """Return the columns of table.md for every run: a row per method and seed.

    Entropy is the mean of a run's last 10 steps, reward of its last 20; the gradient norm is the
    95th percentile over its updates. The other columns leave out each batch's first update, where
    every ratio is 1 and clipping does nothing.
    """
    lines = records.lines
    steps_left = lines.groupby(RUN)["step"].transform("max") - lines["step"]
    columns = {
        "entropy": by_step(lines[steps_left < 10], "entropy").mean(),
        "reward": by_step(lines[steps_left < 20], "reward").mean(),
        "gradient norm": lines.groupby(RUN)["grad_norm"].quantile(0.95),
    }
    reused = lines[lines["update"] > 1].groupby(RUN)
    means = reused[["gradient_share", "low", "high"]].mean()
    return pd.concat([pd.DataFrame(columns), means, records.accuracies], axis=1)


def interval(values) -> tuple:
    """Return the mean over rows, or groups of rows, and half of its 95 % interval (Student's)."""
    return values.mean(), stdtrit(values.count() - 1, 0.975) * values.sem()


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
    cells.insert(0, "seeds", groups.size())
    return markdown(cells.reset_index(names="method"))


# ---------------------------------------------------------------- pictures
def curves(axis, lines: pd.DataFrame, metric: str, title: str, smoothed: int = 10) -> None:
    """Draw a metric over steps: a line per method, with a band from five seeds on."""
    values = by_step(lines, metric).rolling(smoothed, min_periods=1).mean()
    for index, method in enumerate(values.columns.unique("method")):
        seeds = values[method].T
        mean, half = interval(seeds)
        half = half.where(seeds.count() >= MIN_SEEDS)
        style = STYLES.get(method, f"C{index + 4}-")
        every = len(mean) // 7 + 1  # a whole number, because a share fails where all is NaN
        (line,) = axis.plot(mean, style, label=method, markevery=every, markersize=4)
        axis.fill_between(mean.index, mean - half, mean + half, color=line.get_color(), alpha=0.15)
    axis.set(title=title, xlabel=f"step (means of {smoothed})")


def draw(records: Records) -> Figure:
    """Draw six panels of training."""
    figure = Figure((9.4, 9), layout="constrained")
    for axis, (metric, title) in zip(figure.subplots(3, 2).flat, PANELS.items()):
        curves(axis, records.lines, metric, title)
    methods = axis.get_legend_handles_labels()  # the same in all panels
    figure.legend(*methods, loc="outside lower center", ncols=3, handlelength=3)
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
    runs.command("plot.py", main, "Interrupted: run it again")
