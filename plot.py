"""Draw and tabulate runs of train.py, finished or not: curves.png and table.md.

    python plot.py runs/default
    python plot.py results/rate-2e-4    # also a folder that experiments/pack.py made

Curves are means over seeds and over 10 steps. Bands, bars and ± are 95 % confidence intervals of
the mean over seeds (Student's t). Pictures show them from five seeds on.
"""

from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Collection
from itertools import cycle
from pathlib import Path
from typing import NamedTuple

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from scipy.special import stdtrit  # scipy.stats is slow to load

import runs

PANELS = {
    "reward": "reward",
    "entropy": "entropy (nats per token)",
    "grad_norm": "gradient norm (95th percentile of a step)",
    "gradient_share": "positive tokens' share of the gradient",
    "low": "clip bounds",  # and "high"
}
RUN = ["method", "seed"]  # what names a run
SMOOTHED = 10  # steps
FEWEST = 5  # seeds: with fewer, Student's interval is wider than the picture
START = "before training"
# A method's colour in all pictures; other methods take OTHER_COLOURS in turn.
COLOURS = {
    START: "black",
    "grpo@1": "tab:gray",
    "grpo@8": "tab:blue",
    "bapo@8": "tab:orange",
    "bapo-app-a@8": "tab:red",
    "grpo": "tab:blue",
    "bapo": "tab:orange",
}
OTHER_COLOURS = ["tab:green", "tab:purple", "tab:olive", "tab:cyan"]
plt.rcParams.update({"font.size": 9, "axes.titlesize": 9, "axes.grid": True, "grid.alpha": 0.3})


# ---------------------------------------------------------------- reading
class Runs(NamedTuple):
    """The runs of a folder. The index of both tables is method and seed.

    lines: a row per update, with the columns step, update and metrics (NaN where there is none).
    accuracies: mean@k and pass@k of every run that has ended, and those before training.
    """

    lines: pd.DataFrame
    accuracies: pd.DataFrame
    learning_rate: float


def load(folder: Path) -> Runs:
    """Read what train.py has written so far, or what pack.py kept. ValueError if there is none."""
    if (folder / "accuracies.csv").exists():
        lines = pd.read_csv(folder / "metrics.csv.xz", index_col=RUN)
        accuracies = pd.read_csv(folder / "accuracies.csv", index_col=RUN)
        config = runs.read_json(folder / "runs.json")["config"]
    else:
        frames = {}
        for run, path in files(folder, "*-seed*/metrics.jsonl"):
            frames[run] = pd.DataFrame(runs.read_lines(path), dtype=float)
        if not frames:
            raise ValueError(f"{folder} holds no metrics: give an output_dir of train.py")
        lines = pd.concat(frames, names=RUN).droplevel(2)
        found = {}
        for pattern in ("start-seed*.json", "*-seed*/final.json"):
            for run, path in files(folder, pattern):
                found[run] = runs.read_json(path)
        accuracies = pd.DataFrame(found).T.filter(like="@")
        config = runs.read_json(folder / "config.json")
    lines = lines.reindex(columns=lines.columns.union([*PANELS, "high"]))
    lines["low"] = lines["low"].where(lines["high"].notna())  # other methods have no bounds
    accuracies = accuracies.rename(index={"start": START}, level=0)
    return Runs(lines, accuracies, config["learning_rate"])


def files(folder: Path, pattern: str):
    """Yield method and seed, and the path, of every file of runs."""
    for path in sorted(folder.glob(pattern)):
        name = path.relative_to(folder).parts[0]
        method, seed = name.removesuffix(".json").rsplit("-seed", 1)
        yield (method, int(seed)), path


# ---------------------------------------------------------------- numbers
def by_step(lines: pd.DataFrame, metric: str) -> pd.DataFrame:
    """Return a metric's mean over the updates of each step; of the norm the 95th percentile.

    The result has a row per step and a column per method and seed, with NaN for what is not there.
    """
    groups = lines.groupby(["step", *RUN])[metric]
    values = groups.quantile(0.95) if metric == "grad_norm" else groups.mean()
    return values.unstack(RUN)


def outcomes(found: Runs) -> pd.DataFrame:
    """Return the columns of table.md for every run: a row per method and seed.

    Entropy is the mean of a run's last 10 steps, reward of its last 20; the gradient norm is the
    95th percentile over its updates. The other columns leave out each batch's first update, where
    every ratio is 1 and clipping does nothing.
    """
    lines = found.lines
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
    return pd.concat([pd.DataFrame(columns), found.accuracies], axis=1)


def interval(values, confidence: float = 0.95) -> tuple:
    """Return the mean over rows, or groups of rows, and half of Student's interval of it."""
    half = stdtrit(values.count() - 1, 0.5 + confidence / 2) * values.sem()
    return values.mean(), half


def levels(groups) -> pd.DataFrame:
    """Return table cells, "mean ± half of the interval": a row per group, a column per outcome."""
    mean, half = interval(groups)
    cells = mean.map("{:.3f}".format) + " ± " + half.map("{:.3f}".format)
    return cells.replace(" ± nan", "", regex=True).replace("nan", "–")


def markdown(cells: pd.DataFrame) -> list[str]:
    """Return the lines of a Markdown table, without the index."""
    rows = [cells.columns, ["---"] * len(cells.columns), *cells.astype(str).to_numpy()]
    return [f"| {' | '.join(row)} |" for row in rows]


def table(found: Runs) -> list[str]:
    """Return table.md: a row per method and one for the accuracy before training."""
    groups = outcomes(found).groupby(level=0)
    cells = levels(groups)
    cells = cells.loc[list(colours(cells.index)), (cells != "–").any()]
    cells.insert(0, "seeds", groups.size())
    return markdown(cells.reset_index(names="method"))


# ---------------------------------------------------------------- pictures
def colours(methods: Collection[str]) -> dict[str, str]:
    """Return the colour of each method, in the order in which methods are shown."""
    others = sorted(set(methods) - set(COLOURS))
    every = COLOURS | dict(zip(others, cycle(OTHER_COLOURS)))
    return {method: every[method] for method in every if method in methods}


def means(axis, values: pd.DataFrame, style: str = "-") -> None:
    """Draw a line per method, with a band from five seeds on.

    values has a row per place on the x-axis and a column per method and seed.
    """
    for method, colour in colours(values.columns.unique("method")).items():
        seeds = values[method].dropna(how="all")
        mean, half = interval(seeds.T)
        half = half.where(seeds.count(axis=1) >= FEWEST)
        axis.plot(mean, style, color=colour, label=method)
        axis.fill_between(mean.index, mean - half, mean + half, color=colour, alpha=0.15, lw=0)


def curves(axis, lines: pd.DataFrame, metric: str, title: str) -> None:
    """Draw a metric over steps."""
    values = by_step(lines, metric)
    means(axis, values.rolling(SMOOTHED, min_periods=1).mean().where(values.notna()))
    axis.set(title=title, xlabel="step (batch of rollouts)")


def held_out(axis, accuracies: pd.DataFrame) -> None:
    """Draw a point per method for each held-out accuracy, with a bar from five seeds on."""
    seeds = accuracies.groupby(level=0)
    methods = list(colours(seeds.groups))
    mean, half = interval(seeds)
    half = half.where(seeds.count() >= FEWEST)
    for column, marker in zip(accuracies, "os"):
        heights = mean.loc[methods, column]
        bars = half.loc[methods, column]
        axis.errorbar(methods, heights, bars, fmt=marker, color="black", label=column)
    axis.tick_params("x", rotation=15, labelsize=7)
    axis.set(title="held-out accuracy", ylim=(0, 1))
    axis.legend()


def draw(found: Runs) -> plt.Figure:
    """Draw five panels of training, and held-out accuracy."""
    figure, axes = plt.subplots(3, 2, figsize=(9.4, 9), layout="constrained")
    *panels, accuracy = axes.flat
    for axis, (metric, title) in zip(panels, PANELS.items()):
        curves(axis, found.lines, metric, title)
    curves(panels[-1], found.lines, "high", PANELS["low"])
    if len(found.accuracies):
        held_out(accuracy, found.accuracies)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=5)
    figure.suptitle(
        f"learning rate {rate_name(found.learning_rate)}; @N: N updates on each batch;"
        f" curves are means of {SMOOTHED} steps"
    )
    return figure


def rate_name(rate: float) -> str:
    """Return a learning rate as people write it: 2e-4."""
    return np.format_float_scientific(rate, trim="-", exp_digits=1)


def save(figure: plt.Figure, path: Path) -> None:
    """Write a picture and close it."""
    figure.savefig(path, dpi=110)
    plt.close(figure)


def report(folder: Path) -> str:
    """Write curves.png and table.md into the folder; return the table."""
    found = load(folder)
    save(draw(found), folder / "curves.png")
    text = "\n".join(table(found)) + "\n"
    (folder / "table.md").write_text(text)
    return text


def main() -> int:
    """Run the command line. Returns the exit status 0."""
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="of train.py or of experiments/pack.py")
    print(report(parser.parse_args().folder), end="")
    return 0


if __name__ == "__main__":
    runs.command("plot.py", main, "Interrupted: run it again")
