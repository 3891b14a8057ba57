"""Draw runs of train.py, also runs that still go on, and tabulate them: curves.png and table.md.

    python plot.py runs/default
    python plot.py results/default      # what experiments/pack.py kept of runs

Means are over seeds. Bands, and what follows ±, are half of Student's 95 % interval of that mean.
Of runs that still go on, a step is the mean of the seeds that have come so far.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import pandas as pd
from scipy.special import stdtrit  # scipy.stats is slow to load

import runs

PANELS = {
    "reward": "reward",
    "entropy": "entropy (nats per token)",
    "grad_norm": "gradient norm (95th percentile of a step)",
    "gradient_share": "positive share of the gradient",
    "low": "clip bounds used",  # and "high"
}
RUN = ["method", "seed"]  # what names a run
LAST_STEPS = 10  # "at the end" is the mean of so many
SMOOTHED = 10  # curves are means of so many steps
plt.rcParams.update({"font.size": 9, "axes.titlesize": 9, "axes.grid": True, "grid.alpha": 0.3})


# ---------------------------------------------------------------- reading
class Runs(NamedTuple):
    """The runs of a folder.

    lines: a row per update with the columns step, update and metrics (NaN where a method or a step
    has none). accuracies: mean@k and pass@k of every run that has ended; those before training have
    the method "start". The index of both is method and seed.
    """

    lines: pd.DataFrame
    accuracies: pd.DataFrame


def load(folder: Path) -> Runs:
    """Read what train.py has written so far, or what pack.py kept. ValueError if there is none."""
    if (folder / "accuracies.csv").exists():
        lines = pd.read_csv(folder / "metrics.csv.xz", index_col=RUN)
        return Runs(lines, pd.read_csv(folder / "accuracies.csv", index_col=RUN))
    frames = {}
    for run, path in files(folder, "*-seed*/metrics.jsonl"):
        frames[run] = pd.DataFrame(runs.read_lines(path), dtype=float)
    if not frames:
        raise ValueError(f"{folder} holds no metrics: give train.py's --output_dir")
    lines = pd.concat(frames, names=RUN).droplevel(2)
    lines = lines.reindex(columns=lines.columns.union([*PANELS, "high"]))
    accuracies = {}
    for pattern in ("start-seed*.json", "*-seed*/final.json"):
        for run, path in files(folder, pattern):
            accuracies[run] = runs.read_json(path)
    return Runs(lines, pd.DataFrame(accuracies).T.filter(like="@"))


def files(folder: Path, pattern: str) -> Iterator[tuple[tuple[str, int], Path]]:
    """Method and seed, and path, of every file of runs; of starts the method is "start"."""
    for path in sorted(folder.glob(pattern)):
        name = path.relative_to(folder).parts[0]
        method, seed = name.removesuffix(".json").rsplit("-seed", 1)
        yield (method, int(seed)), path


# ---------------------------------------------------------------- numbers
def by_step(lines: pd.DataFrame, metric: str) -> pd.DataFrame:
    """A metric's mean over the updates of each step; of the norm the 95th percentile.

    Returns a row per step, a column per method and seed. NaN: not there, or not yet.
    """
    groups = lines.groupby(["step", *RUN])[metric]
    values = groups.quantile(0.95) if metric == "grad_norm" else groups.mean()
    return values.unstack(RUN)


def outcomes(found: Runs) -> pd.DataFrame:
    """The numbers of every run: a row per method and seed, a column per column of table.md."""
    lines = found.lines
    runs_of = lines.groupby(RUN)
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


def interval(values, confidence: float = 0.95) -> tuple:
    """Mean over seeds, and half of Student's interval of it; NaN with a single seed.

    values: a Series or DataFrame with a row per seed, or groups of such rows.
    """
    half = stdtrit(values.count() - 1, 0.5 + confidence / 2) * values.sem()
    return values.mean(), half


def levels(groups) -> pd.DataFrame:
    """Cells of a table: "mean ± half of the interval", "–" where there is no number.

    groups: rows of runs by what shall be a row. Returns a row per group, a column per outcome.
    """
    mean, half = interval(groups)
    cells = mean.map("{:.3f}".format) + " ± " + half.map("{:.3f}".format)
    return cells.replace(" ± nan", "", regex=True).replace("nan", "–")


def table(found: Runs) -> list[str]:
    """Lines of Markdown: a row per method, and one for the starts."""
    groups = outcomes(found).groupby(level=0)
    cells = levels(groups)
    cells.insert(0, "seeds", groups.size())
    return markdown(cells.reset_index(names="method"))


def markdown(cells: pd.DataFrame) -> list[str]:
    """Lines of a table, without the index."""
    rows = [cells.columns, ["---"] * len(cells.columns), *cells.astype(str).to_numpy()]
    return [f"| {' | '.join(row)} |" for row in rows]


# ---------------------------------------------------------------- the files
def curves(axis, lines: pd.DataFrame, metric: str, title: str) -> None:
    """A curve per method with its band: means of SMOOTHED steps and all seeds."""
    values = by_step(lines, metric)
    smooth = values.rolling(SMOOTHED, min_periods=1).mean().where(values.notna())
    axis.set_prop_cycle(None)  # a method has one colour, in all panels and for both bounds
    for method in values.columns.unique("method"):
        mean, half = interval(smooth[method].dropna(how="all").T)
        axis.plot(mean, label=method)
        axis.fill_between(mean.index, mean - half, mean + half, alpha=0.15, lw=0)
    axis.set(title=title, xlabel="step (batch of rollouts)")


def held_out(axis, accuracies: pd.DataFrame) -> None:
    """A dot and an interval per method, and for the starts; accuracies as in Runs."""
    mean, half = interval(accuracies.iloc[:, 0].groupby(level=0, sort=False))
    axis.errorbar(mean, mean.index, xerr=half, fmt="ko")
    axis.yaxis.tick_right()
    axis.set(title=f"held-out {accuracies.columns[0]}: start and ends")


def draw(found: Runs) -> plt.Figure:
    """Five panels of training, and held-out accuracy."""
    lines = found.lines
    figure, axes = plt.subplots(3, 2, figsize=(9.4, 9), layout="constrained")
    *panels, accuracy = axes.flat
    for axis, (metric, title) in zip(panels, PANELS.items()):
        curves(axis, lines, metric, title)
    curves(panels[-1], lines, "high", PANELS["low"])
    on_the_way = list(lines.filter(like="held_out_mean@"))
    if on_the_way:
        curves(accuracy, lines, on_the_way[0], on_the_way[0])
    elif len(found.accuracies):
        held_out(accuracy, found.accuracies)
    figure.legend(handles=panels[0].lines, loc="outside lower center", ncols=5)
    figure.suptitle(
        f"@N: N updates on each batch. Curves: means of {SMOOTHED} steps and all seeds;"
        " bands: 95 % intervals"
    )
    return figure


def save(figure: plt.Figure, path: Path) -> None:
    """Write a picture in one piece, and close it."""
    runs.write_atomically(path, lambda file: figure.savefig(file, format="png", dpi=110))
    plt.close(figure)


def report(folder: Path) -> str:
    """Write curves.png and table.md into the folder; return the table."""
    found = load(folder)
    save(draw(found), folder / "curves.png")
    text = "\n".join(table(found)) + "\n"
    runs.write_atomically(folder / "table.md", lambda file: file.write_text(text))
    return text


def main() -> int:
    """The command line. Returns the exit status 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=runs.HelpFormatter)
    parser.add_argument("folder", type=Path, help="of runs of train.py, or of packed runs")
    print(report(parser.parse_args().folder), end="")
    return 0


if __name__ == "__main__":
    runs.command("plot.py", main, "Interrupted: nothing is written half")
