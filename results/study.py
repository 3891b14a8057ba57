"""Print every table and draw every picture of README.md and of the pages in this folder.

    python -m results.study                # print the tables, draw results/figures

What is read, all of it in this folder:

runs.csv: a row per run, and every outcome that a table needs (protocol.md defines them).
comparisons.csv: a row per cell of a table or per test: the outcome of `methods` less that of
`others`, over seeds. Several methods stand for their mean. Names are FOLDER/METHOD. `expected` is
the sign that a test expects, or 0 if it expects none.
curves.csv: what the pictures show. low and high are the ends of an interval or a band.
"""

import re
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from scipy import stats

from support import plot

HERE = Path(__file__).parent
TEST = ["seeds", "methods", "others", "outcome"]  # what a test compares
MARKS = {1: "✓", -1: "✗", 0: "*"}  # the expected sign, the other one, none was expected
STYLES = ["--o", "-^", "-.D", "-.v", ":P", "-X", ":s"]  # of lines, in their order


# ---------------------------------------------------------------- statistics
def differences(one, outcomes: pd.DataFrame) -> pd.Series:
    """Return by seed the outcome of a comparison's methods less that of the others, if any.

    outcomes has the index name and seed. Raises KeyError if a run is missing.
    """
    runs = outcomes[one.outcome].unstack("name")
    values = runs[one.methods.split()].mean(axis=1, skipna=False)
    if one.others:
        values = values - runs[one.others.split()].mean(axis=1, skipna=False)
    first, last = map(int, one.seeds.split("-"))
    values = values.dropna().loc[list(range(first, last + 1))]
    if "yoked@8" in one.others:
        # These runs exchanged their bounds within pairs of seeds, so the sample is the pairs.
        values = values.groupby(values.index // 2).mean()
    return values


def holm(p_values: pd.Series) -> pd.Series:
    """Return Holm's correction."""
    ordered = p_values.sort_values()
    tests_left = np.arange(len(ordered), 0, -1)
    return (ordered * tests_left).cummax().clip(upper=1)


def read_comparisons() -> pd.DataFrame:
    """Return the comparisons whose runs are there, with the columns values (by seed) and p.

    p is Student's, two-sided, of a mean of 0. It is corrected within a family of tests, also where
    another table repeats the test.
    """
    runs = pd.read_csv(HERE / "runs.csv")
    runs["name"] = runs["folder"] + "/" + runs["method"]
    outcomes = runs.set_index(["name", "seed"])
    table = pd.read_csv(HERE / "comparisons.csv", keep_default_na=False, dtype=str)
    table = table[table["folder"].isin(runs["folder"])]
    table["values"] = [differences(one, outcomes) for one in table.itertuples()]
    table["p"] = [stats.ttest_1samp(values, 0).pvalue for values in table["values"]]
    table = table.set_index(TEST)
    corrected = table[table["family"] != ""].groupby("family")["p"].transform(holm)
    table["p"] = corrected.reindex(table.index).fillna(table["p"])
    return table


# ---------------------------------------------------------------- tables
def cell(one) -> str:
    """Return a level, or a difference ± half of its interval, with a mark if it is significant."""
    if not one.confidence:
        return f"{one.values.mean():.2f}"
    mean, half = plot.interval(one.values, float(one.confidence))
    text = f"{mean:+.{one.digits}f} ± {half:.{one.digits}f}"
    text = re.sub(r"^[-+](?=0\.0+ )", "", text)  # no sign before 0.00
    if one.family:
        text += f" ({one.p:.2g})"
    if one.expected and one.p < 0.05:
        text += " " + MARKS[int(one.expected) * np.sign(mean)]
    return text


def tables() -> dict[str, str]:
    """Return all tables by name, in Markdown."""
    table = read_comparisons()
    table["cell"] = [cell(one) for one in table.itertuples()]
    markdown = {}
    for name, rows in table.groupby("table", sort=False):
        cells = rows.set_index(["row", "column"])["cell"].unstack(sort=False, fill_value="–")
        markdown[name] = plot.markdown(cells.reset_index(names=""))
    return markdown


# ---------------------------------------------------------------- pictures
def curves(points: pd.DataFrame, xlabel: str) -> Figure:
    """Draw a panel for each title, with a line and its band for each label, and one legend."""
    figure = Figure((9.4, 3.6), layout="constrained")
    panels = points.groupby("panel", sort=False)
    for axis, (title, of_panel) in zip(figure.subplots(1, len(panels)), panels):
        for style, (label, line) in zip(STYLES, of_panel.groupby("line", sort=False)):
            every = len(line) // 8
            axis.plot("x", "y", style, data=line, label=label, markersize=5, markevery=every)
            axis.fill_between("x", "low", "high", data=line, alpha=0.07)
        axis.set(title=title, xlabel=xlabel)
    figure.legend(*axis.get_legend_handles_labels(), loc="outside lower center", ncols=4)
    return figure


def ranges(points: pd.DataFrame) -> Figure:
    """Draw a panel for each title, with a bar from low to high for each label."""
    figure = Figure((9.4, 2.4), layout="constrained")
    panels = points.groupby("panel", sort=False)
    for axis, (title, bars) in zip(figure.subplots(1, 2, sharey=True), panels):
        axis.hlines("line", "low", "high", ["C1", "C1", "C1", "C0"], data=bars, linewidth=20)
        axis.axvline(1, color="black", linestyle=":")
        axis.set(title=title, xlabel="importance ratio r", xlim=(0, 3.3), ylim=(-0.6, 3.6))
        axis.set_xticks([0, 0.6, 0.9, 1.2, 2, 3])
    return figure


def main() -> None:
    """Print the tables and draw the pictures."""
    for name, table in tables().items():
        print(f"## {name}\n\n{table}")
    for name, points in pd.read_csv(HERE / "curves.csv").groupby("picture"):
        if name == "method":
            figure = ranges(points)
        else:
            figure = curves(points, "update of a batch" if name == "switch" else "step")
        figure.savefig(HERE / f"figures/{name}.png", dpi=130)


if __name__ == "__main__":
    main()
