"""Draw and tabulate runs of train.py, finished or not: curves.png and table.md.

    python -m support.plot runs/default
    python -m support.plot runs/rate-1e-4 runs/rate-2e-4    # together, into runs/

Curves are means over seeds and over 10 steps, and faint lines show every step. Bands and ± are
95 % confidence intervals of the mean over seeds (Student's t); pictures show them from five seeds
on. With several folders a method is named FOLDER/METHOD, and both files go to the innermost folder
that holds all of them.
"""

import argparse
import os
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure
from scipy.special import stdtrit  # scipy.stats is slow to load

from support import runs

RUN = ["method", "seed"]  # what names a run
# Panels and columns have the names of metrics.jsonl, see docs/logs.md.
PANELS = [
    "entropy",
    "grad_norm",
    "held_out_mean@4",
    "held_out_mean@16",
    "truncated",
    "gradient_share",
    "low",
    "high",
    "clip_fraction_low",
    "clip_fraction_high",
]
COLUMNS = r"^(reward|entropy|grad_norm|gradient_share|low|high|mean@\d+|pass@\d+)$"  # of table.md
LEGEND = "means of 10 steps; faint lines and held-out accuracy: every step"
MIN_SEEDS = 5  # seeds: with fewer, Student's interval is wider than the picture


# ---------------------------------------------------------------- reading
def read_runs(folder: Path, prefix: Path = Path()) -> pd.DataFrame:
    """Read what train.py has written into an output_dir so far.

    Returns a row per update, with the columns step, update and metrics. The last row of a run that
    has ended also holds its held-out accuracy, and rows without a step hold that before training.
    The index is method, which begins with `prefix`, and seed. Folders with another name
    (bapo@8-seed0-old) are left out. Raises ValueError if there are no updates.
    """
    records = []
    for path in sorted(folder.glob("*-seed*/metrics.jsonl")):
        method, _, seed = path.parent.name.rpartition("-seed")
        if seed.isdecimal():
            run = {"method": str(prefix / method), "seed": seed}
            records += [run | line for line in runs.read_lines(path)]
            final = path.with_name("final.json")  # train.py removes it before it continues a run
            if final.exists():
                records[-1] |= runs.read_json(final)
    if not records:
        raise ValueError(f"{folder} holds no metrics: give an output_dir of train.py")
    for path in folder.glob("start-seed*.json"):
        start = {"method": str(prefix / "before training"), "seed": path.stem}
        records.append(start | runs.read_json(path))
    return pd.DataFrame(records).set_index(RUN).astype(float)


# ---------------------------------------------------------------- numbers
def interval(values) -> tuple:
    """Return the mean over rows, or groups of rows, and half of its 95 % interval (Student's)."""
    return values.mean(), stdtrit(values.count() - 1, 0.975) * values.sem()


def markdown(cells: pd.DataFrame) -> str:
    """Return a Markdown table, without the index."""
    rows = [cells.columns, ["---"] * len(cells.columns), *cells.astype(str).to_numpy()]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def table(lines: pd.DataFrame) -> str:
    """Return table.md: a row per method, of means over its last 20 steps, and one before training.

    lines: what read_runs returns.
    """
    steps = lines.groupby([*RUN, "step"], dropna=False).mean().filter(regex=COLUMNS)
    seeds = steps.groupby(RUN).tail(20).groupby(RUN).mean().dropna(how="all").groupby("method")
    mean, half = interval(seeds)
    cells = mean.map("{:.3f}".format) + " ± " + half.map("{:.3f}".format)
    cells = cells.replace(" ± nan", "", regex=True).replace("nan", "–")
    cells.insert(0, "seeds", seeds.size())
    return markdown(cells.reset_index())


# ---------------------------------------------------------------- pictures
def curves(axis, lines: pd.DataFrame, metric: str, smoothed: int) -> None:
    """Draw a metric over steps: a line per method, with a band from five seeds on.

    A point is the mean of the last `smoothed` steps that have a value. A faint line of every step
    shows what this mean hides, such as a fall in the last few.
    """
    updates = lines.reindex(columns=["step", metric])  # partial rollouts begin without a metric
    steps = updates.groupby(["step", *RUN])[metric].mean().unstack("step")  # a row per run
    for method, seeds in steps.groupby("method"):
        values = seeds.dropna(axis=1, how="all")
        mean, half = interval(values.T.rolling(smoothed, min_periods=1).mean().T)
        half = half.where(values.count() >= MIN_SEEDS)
        (line,) = axis.plot(mean, label=method)
        axis.plot(values.mean(), color=line.get_color(), linewidth=0.7, alpha=0.4)
        axis.fill_between(mean.index, mean - half, mean + half, color=line.get_color(), alpha=0.15)
    axis.set(title=metric, xlabel="step")
    axis.grid(alpha=0.3)


def draw(lines: pd.DataFrame) -> Figure:
    """Draw the reward, and those of PANELS that are above 0 in several steps."""
    steps = lines["step"]
    shown = [name for name in PANELS if name in lines and steps[lines[name] > 0].nunique() > 1]
    rows = len(shown) // 3 + 1
    figure = Figure((12, 2.6 * rows + 1), layout="constrained")
    for place, metric in enumerate(["reward", *shown], 1):
        axis = figure.add_subplot(rows, 3, place)
        curves(axis, lines, metric, smoothed=1 if "held_out" in metric else 10)
    methods = axis.get_legend_handles_labels()  # the same in all panels
    figure.legend(*methods, title=LEGEND, loc="outside lower center", ncols=4)
    return figure


def report(*folders: Path) -> str:
    """Write curves.png and table.md of one or several output_dirs; return the table.

    They go to the innermost folder that holds all of them. Raises ValueError if one has no updates.
    """
    folders = [folder.resolve() for folder in folders]
    common = Path(os.path.commonpath(folders))
    lines = pd.concat([read_runs(folder, folder.relative_to(common)) for folder in folders])
    draw(lines).savefig(common / "curves.png")
    text = table(lines)
    (common / "table.md").write_text(text)
    return text


def main() -> int:
    """Run the command line. Returns the exit status 0."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folders", nargs="+", type=Path, help="output_dir of train.py")
    print(report(*parser.parse_args().folders), end="")
    return 0


if __name__ == "__main__":
    runs.command("plot.py", main, "Interrupted: run it again")
