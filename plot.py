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
import pandas as pd
from scipy import stats

import runs

PANELS = {
    "reward": "reward",
    "entropy": "entropy (nats per token)",
    "grad_norm": "gradient norm (95th percentile of a step)",
    "gradient_share": "positive share of the gradient",
    "low": "clip bounds used",  # and "high"
}
LAST_STEPS = 10  # "at the end" is the mean of so many
SMOOTHED = 10  # curves are means of so many steps
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
        for pattern in ("start-seed*.json", "*-seed*/final.json"):
            for run, path in files(folder, pattern).items():
                accuracies[run] = runs.read_json(path)
    lines = lines.reindex(columns=lines.columns.union([*PANELS, "high"]))
    frame = pd.DataFrame.from_dict(accuracies, orient="index").sort_index()
    return Runs(lines, frame.drop(columns="steps", errors="ignore"))


def read_lines(folder: Path) -> pd.DataFrame:
    """All metrics.jsonl of a folder of runs, as Runs.lines."""
    frames = {}
    for run, path in files(folder, "*-seed*/metrics.jsonl").items():
        frames[run] = pd.DataFrame(runs.read_lines(path), dtype=float)
    if not any(map(len, frames.values())):
        raise ValueError(f"{folder} holds no metrics: give train.py's --output_dir")
    return pd.concat(frames, names=["method", "seed"]).reset_index(["method", "seed"])


def files(folder: Path, pattern: str) -> dict[tuple[str, int], Path]:
    """Method and seed of every file of the runs in a folder; of starts the method is "start"."""
    found = {}
    for path in sorted(folder.glob(pattern)):
        name = path.relative_to(folder).parts[0]
        method, seed = name.removesuffix(".json").rsplit("-seed", 1)
        found[method, int(seed)] = path
    return found


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


def levels(by_seed: pd.DataFrame) -> pd.DataFrame:
    """Cells of a table: "mean ± half of the interval", "–" where there is no number.

    by_seed: a row per seed, columns (outcome, method). Returns a row per method.
    """
    mean, half = interval(by_seed.T)
    cells = mean.map("{:.3f}".format) + " ± " + half.map("{:.3f}".format)
    return cells.str.removesuffix(" ± nan").replace("nan", "–").unstack(0)


def table(found: Runs) -> list[str]:
    """Lines of Markdown: a row per method, and one for the starts."""
    numbers = outcomes(found)
    cells = levels(numbers.unstack(0))[numbers.columns]
    cells.insert(0, "seeds", numbers.groupby(level=0).size())
    return markdown(cells.reset_index(names="method"))


def markdown(cells: pd.DataFrame) -> list[str]:
    """Lines of a table, without the index."""
    rows = cells.astype(str).to_numpy()
    rules = ["---"] * len(cells.columns)
    return [f"| {' | '.join(row)} |" for row in (cells.columns, rules, *rows)]


# ---------------------------------------------------------------- the files
def curves(axis, lines: pd.DataFrame, metric: str, title: str) -> None:
    """A curve per method with its band: means of SMOOTHED steps and all seeds."""
    values = by_step(lines, metric)
    smooth = values.rolling(SMOOTHED, min_periods=1).mean().where(values.notna())
    for i, method in enumerate(values.columns.unique("method")):
        mean, half = interval(smooth[method].dropna(how="all"))
        axis.plot(mean.index, mean, color=f"C{i}", label=method)
        axis.fill_between(mean.index, mean - half, mean + half, color=f"C{i}", alpha=0.15, lw=0)
    axis.set(title=title, xlabel="step (batch of rollouts)")


def held_out(axis, accuracies: pd.DataFrame) -> None:
    """A dot and an interval per method, and for the starts; accuracies as in Runs."""
    mean, half = interval(accuracies.iloc[:, 0].unstack())
    axis.errorbar(mean, mean.index, xerr=half.fillna(0), fmt="ko")
    axis.yaxis.tick_right()
    axis.set(title=f"held-out {accuracies.columns[0]}: start and ends")


def draw(found: Runs) -> plt.Figure:
    """Five panels of training, and held-out accuracy."""
    lines = found.lines
    figure, axes = plt.subplots(3, 2, figsize=(9.4, 9), layout="constrained")
    *panels, accuracy = axes.flat
    for axis, (metric, title) in zip(panels, PANELS.items()):
        curves(axis, lines, metric, title)
    if lines["grad_norm"].max() > 10 * lines["grad_norm"].median():  # it has spikes
        axes[1, 0].set_yscale("log")
    curves(axes[2, 0], lines, "high", PANELS["low"])
    on_the_way = list(lines.filter(like="held_out_mean@"))
    if on_the_way:
        curves(accuracy, lines, on_the_way[0], on_the_way[0].replace("_", " "))
    elif len(found.accuracies):
        held_out(accuracy, found.accuracies)
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=5)
    figure.suptitle(
        f"@N: N updates on each batch. Curves: means of {SMOOTHED} steps and all seeds;"
        " bands: 95 % intervals"
    )
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
