"""Draw runs of train.py, also runs that still go on, and tabulate them: curves.png and table.md.

    python plot.py runs/default
    python plot.py results/default      # what experiments/pack.py kept of runs

Means are over seeds. Bands, bars, and what follows ±, are half of Student's 95 % interval of that
mean; two seeds' is 12.7 standard errors, so below five seeds pictures show each seed instead.
Of runs that still go on, a step is the mean of the seeds that have come so far.
"""

import argparse
from collections.abc import Collection, Iterator
from itertools import cycle
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
METRICS = [*PANELS, "high", "rho", "rho_start", "reached"]  # what is read, though a run may lack it
RUN = ["method", "seed"]  # what names a run
LAST_STEPS = 10  # "at the end" is the mean of so many
SMOOTHED = 10  # curves are means of so many steps
FEWEST = 5  # seeds of which an interval is drawn
MOVED = "updates whose bounds moved"
# A method's colour in all pictures; the others of a picture take OTHER_COLOURS in turn.
COLOURS = {
    "start": "black",
    "grpo@1": "tab:gray",
    "grpo@8": "tab:blue",
    "bapo@8": "tab:orange",
    "bapo-main@8": "tab:brown",
    "bapo-app-a@8": "tab:red",
    "bapo-app-a-gradient@8": "tab:pink",
    "grpo": "tab:blue",
    "bapo": "tab:orange",
}
OTHER_COLOURS = ["tab:green", "tab:purple", "tab:olive", "tab:cyan"]  # LOW-HIGH is first: green
plt.rcParams.update({"font.size": 9, "axes.titlesize": 9, "axes.grid": True, "grid.alpha": 0.3})


# ---------------------------------------------------------------- reading
class Runs(NamedTuple):
    """The runs of a folder.

    lines: a row per update with the columns step, update and metrics (NaN where a method or a step
    has none; a method without bounds has no low and high). accuracies: mean@k and pass@k of every
    run that has ended; those before training have the method "start". The index of both is method
    and seed.
    """

    lines: pd.DataFrame
    accuracies: pd.DataFrame


def load(folder: Path) -> Runs:
    """Read what train.py has written so far, or what pack.py kept. ValueError if there is none."""
    if (folder / "accuracies.csv").exists():
        lines = pd.read_csv(folder / "metrics.csv.xz", index_col=RUN)
        accuracies = pd.read_csv(folder / "accuracies.csv", index_col=RUN)
    else:
        lines = read_lines(folder)
        found = {}
        for pattern in ("start-seed*.json", "*-seed*/final.json"):
            for run, path in files(folder, pattern):
                found[run] = runs.read_json(path)
        accuracies = pd.DataFrame(found).T.filter(like="@")
    lines = lines.reindex(columns=lines.columns.union(METRICS))
    lines["low"] = lines["low"].where(lines["high"].notna())  # 0 and infinite are no bounds
    return Runs(lines, accuracies)


def read_lines(folder: Path) -> pd.DataFrame:
    """The lines of every metrics.jsonl. ValueError if there is none."""
    frames = {}
    for run, path in files(folder, "*-seed*/metrics.jsonl"):
        frames[run] = pd.DataFrame(runs.read_lines(path), dtype=float)
    if not frames:
        raise ValueError(f"{folder} holds no metrics: give train.py's --output_dir")
    return pd.concat(frames, names=RUN).droplevel(2)


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
        MOVED: bounds_moved(lines).groupby(RUN).mean(),
        "mean low": runs_of["low"].mean(),
        "mean high": runs_of["high"].mean(),
    }
    return pd.concat([pd.DataFrame(columns), found.accuracies], axis=1)


def bounds_moved(lines: pd.DataFrame) -> pd.Series:
    """Of every update 1 if its bounds are not those where a search begins, else 0.

    A search stays at its start if the share there reaches the target. Where it moves, the share
    grows until it does, or the target is not reached. Fixed bounds have a target of 0. NaN: there
    is nothing to move, or pack.py has not kept rho.
    """
    moved = (lines["rho"] != lines["rho_start"]) | (lines["reached"] == 0)
    return moved.astype(float).where(lines["rho"].notna())


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
    """Lines of Markdown: a row per method, and one for the starts; no column without a number.

    Bounds that no update has moved are those of the method's name or of config.json.
    """
    groups = outcomes(found).groupby(level=0)
    cells = levels(groups)
    unmoved = groups[MOVED].max() == 0
    cells.loc[unmoved, ["mean low", "mean high"]] = "–"
    cells = cells.loc[:, (cells != "–").any()]
    cells.insert(0, "seeds", groups.size())
    cells = cells.loc[list(colours(cells.index))]
    return markdown(cells.reset_index(names="method"))


def markdown(cells: pd.DataFrame) -> list[str]:
    """Lines of a table, without the index."""
    rows = [cells.columns, ["---"] * len(cells.columns), *cells.astype(str).to_numpy()]
    return [f"| {' | '.join(row)} |" for row in rows]


# ---------------------------------------------------------------- the files
def colours(methods: Collection[str]) -> dict[str, str]:
    """The colour of each method, in the order in which methods are shown: those of COLOURS first.

    Others have their colours by the names that are given: give all of a picture.
    """
    others = sorted(set(methods) - set(COLOURS))
    every = COLOURS | dict(zip(others, cycle(OTHER_COLOURS)))
    return {method: every[method] for method in every if method in methods}


def drawn_interval(values) -> tuple:
    """`interval`, NaN also with fewer than FEWEST seeds."""
    mean, half = interval(values)
    return mean, half.where(values.count() >= FEWEST)


def curves(axis, lines: pd.DataFrame, metric: str, title: str) -> None:
    """A curve per method: means of SMOOTHED steps and all seeds."""
    values = by_step(lines, metric)
    smooth = values.rolling(SMOOTHED, min_periods=1).mean().where(values.notna())
    means(axis, smooth)
    axis.set(title=title, xlabel="step (batch of rollouts)")


def means(axis, values: pd.DataFrame, style: str = "-") -> None:
    """A line per method, with a band, or where seeds are few with each seed's own line.

    values are those of by_step.
    """
    for method, colour in colours(values.columns.unique("method")).items():
        seeds = values[method].dropna(how="all")
        mean, half = drawn_interval(seeds.T)
        axis.plot(mean, style, color=colour, label=method)
        few = half.isna()
        if few.any():
            axis.plot(seeds[few], color=colour, linewidth=0.6, alpha=0.5)
        axis.fill_between(mean.index, mean - half, mean + half, color=colour, alpha=0.15, lw=0)


def held_out(axis, found: Runs) -> None:
    """Accuracies as they were measured: the starts at step 0, lines from there with
    --evaluate_every, and beside the last step the ends. Dots are runs, squares their means.
    """
    accuracies = found.accuracies.iloc[:, 0]
    metric = f"held_out_{accuracies.name}"
    lines = found.lines.reindex(columns=["step", metric])
    values = by_step(lines, metric).dropna(how="all")
    ends = accuracies.unstack(level=0).reindex(columns=["start", *values.columns.unique("method")])
    # Runs of a given model have one start, whatever their seeds.
    starts = ends["start"].reindex(values.columns.get_level_values("seed"))
    values.loc[0] = starts.fillna(starts.mean()).to_numpy()
    means(axis, values.sort_index(), "o-")
    mean, half = drawn_interval(ends)
    for place, (method, colour) in enumerate(colours(ends.columns).items()):
        x = lines["step"].max() * (1 + 0.08 * place) if place else 0  # the first are the starts
        axis.plot([x] * len(ends), ends[method], ".", color=colour, alpha=0.4)
        axis.errorbar(x, mean[method], half[method], fmt="s", color=colour)
    axis.set(title=f"held-out {accuracies.name} as measured; squares: starts, ends", xlabel="step")


def draw(found: Runs) -> plt.Figure:
    """Five panels of training, and held-out accuracy."""
    lines = found.lines
    figure, axes = plt.subplots(3, 2, figsize=(9.4, 9), layout="constrained")
    *panels, accuracy = axes.flat
    for axis, (metric, title) in zip(panels, PANELS.items()):
        curves(axis, lines, metric, title)
    curves(panels[-1], lines, "high", PANELS["low"])
    if len(found.accuracies):
        held_out(accuracy, found)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=5)
    figure.suptitle(
        f"@N: N updates on each batch. Curves: means of {SMOOTHED} steps and all seeds\n"
        f"Bands and bars: 95 % intervals; with fewer than {FEWEST} seeds each seed is a thin line"
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
