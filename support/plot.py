"""Draw and tabulate runs of train.py, finished or not: curves.png and table.md.

    python -m support.plot runs/default
    python -m support.plot runs/rate-1e-4 runs/rate-2e-4    # together, into runs/

Curves are means over seeds and over 10 steps, and faint lines show every step. Bands and ± are
95 % confidence intervals of the mean over seeds (Student's t); pictures show them from five seeds
on. With several folders a method is named FOLDER/METHOD, and both files go to the innermost folder
that holds all of them.
"""

import argparse
import math
import os
from pathlib import Path

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from scipy.special import stdtrit  # scipy.stats is slow to load

from support import runs

# Panels and columns have the names of metrics.jsonl, see docs/logs.md.
COLUMNS = r"^(reward|entropy|grad_norm|gradient_share|low|high|mean@\d+|pass@\d+)$"  # of table.md
PANELS = r"^(reward|entropy|grad_norm|gradient_share|low|high|truncated|held_out_.*|clip_.*)$"
MIN_SEEDS = 5  # seeds: with fewer, Student's interval is wider than the picture
LEGEND = "means of 10 steps; faint lines and held-out accuracy: every step"


# ---------------------------------------------------------------- numbers
def read_runs(folder: Path, common: Path) -> pd.DataFrame:
    """Read what train.py has written into an output_dir so far.

    Returns the metrics of every step, means over its updates. The last row of a run that has ended
    also holds its held-out accuracy, and rows of step 0 hold that before training. The index is
    method (which begins with the folder below `common`), seed and step. Folders with another name
    (bapo@8-seed0-old) are left out. Raises ValueError if there are no updates.
    """
    records = []
    prefix = folder.relative_to(common)
    for path in folder.glob("*-seed*/metrics.jsonl"):
        method, _, seed = path.parent.name.rpartition("-seed")
        if seed.isdecimal():
            run = {"method": prefix / method, "seed": seed, "reward": None}  # until a group is done
            records += [run | line for line in runs.read_lines(path)]
            final = path.with_name("final.json")  # train.py removes it before it continues a run
            if final.exists():
                records[-1] |= runs.read_json(final)
    if not records:
        raise ValueError(f"{folder} holds no metrics: give an output_dir of train.py")
    for path in folder.glob("start-seed*.json"):
        start = {"method": prefix / "before training", "seed": path.stem, "step": 0}
        records.append(start | runs.read_json(path))
    step = ["method", "seed", "step"]
    return pd.DataFrame(records).set_index(step).astype(float).groupby(step).mean()


def interval(values, confidence: float = 0.95) -> tuple:
    """Return the mean over rows, or groups of rows, and half of its interval (Student's)."""
    return values.mean(), stdtrit(values.count() - 1, (1 + confidence) / 2) * values.sem()


def markdown(cells: pd.DataFrame) -> str:
    """Return a Markdown table, without the index."""
    rows = [cells.columns, ["---"] * len(cells.columns), *cells.astype(str).to_numpy()]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def table(steps: pd.DataFrame) -> str:
    """Return table.md: a row per method, of means over its last 20 steps, and one before training.

    steps: what read_runs returns.
    """
    run = ["method", "seed"]
    seeds = steps.filter(regex=COLUMNS).groupby(run).tail(20).groupby(run).mean().groupby("method")
    mean, half = interval(seeds)
    cells = mean.map("{:.3f}".format) + " ± " + half.map("{:.3f}".format)
    cells = cells.replace(" ± nan", "", regex=True).replace("nan", "–")
    cells.insert(0, "seeds", seeds.size())
    return markdown(cells.reset_index())


# ---------------------------------------------------------------- pictures
def curves(axis: Axes, steps: pd.DataFrame, metric: str) -> None:
    """Draw a metric over steps: a line per method, with a band from five seeds on.

    A point is the mean of the last 10 steps that have a value. A faint line of every step shows
    what this mean hides, such as a fall in the last few.
    """
    window = 1 if "held_out" in metric else 10
    for method, of_method in steps.groupby("method"):
        values = of_method[metric].dropna()
        smooth = values.groupby("seed").rolling(window, min_periods=1).mean().groupby("step")
        mean, half = interval(smooth)
        half = half.where(smooth.count() >= MIN_SEEDS)
        (line,) = axis.plot(mean, label=method)
        axis.plot(values.groupby("step").mean(), color=line.get_color(), alpha=0.3)
        axis.fill_between(mean.index, mean - half, mean + half, alpha=0.15)
    axis.set(title=metric, xlabel="step")


def draw(steps: pd.DataFrame) -> Figure:
    """Draw the reward, and those of PANELS that are above 0 in several steps."""
    steps = steps.filter(regex=PANELS).query("step > 0")
    shown = (steps > 0).groupby("step").any().sum() > 1
    shown["reward"] = True
    rows = math.ceil(shown.sum() / 3)
    figure = Figure((12, 3 * rows), layout="constrained")
    for place, metric in enumerate(steps.columns[shown], 1):
        curves(figure.add_subplot(rows, 3, place), steps, metric)
    methods = figure.axes[0].get_legend_handles_labels()  # the same in all panels
    figure.legend(*methods, title=LEGEND, loc="outside lower center", ncols=4)
    return figure


def report(*folders: Path) -> str:
    """Write curves.png and table.md of one or several output_dirs; return the table.

    They go to the innermost folder that holds all of them. Raises ValueError if one has no updates.
    """
    folders = [folder.resolve() for folder in folders]
    common = Path(os.path.commonpath(folders))
    steps = pd.concat([read_runs(folder, common) for folder in folders])
    draw(steps).savefig(common / "curves.png")
    text = table(steps)
    (common / "table.md").write_text(text)
    return text


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folders", nargs="+", type=Path)
    print(report(*parser.parse_args().folders), end="")


if __name__ == "__main__":
    runs.command("plot.py", main, "Interrupted: run it again")
