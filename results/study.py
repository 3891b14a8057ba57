"""Print every table and draw every picture of README.md and of the pages in this folder.

    python -m results.study                # print the tables, draw results/figures

What is read, all of it in this folder:

runs.csv: a row per run, and every outcome that a table needs (protocol.md defines them).
comparisons.csv: a row per cell of a table or per test: the outcome of `methods` less that of
`others`, over seeds. Several methods stand for their mean. Names are FOLDER/METHOD.
curves.csv: what the pictures show. low and high are the ends of an interval or a band.
"""

from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from scipy import stats

from support import plot

HERE = Path(__file__).parent
STYLES = {
    "GRPO": "C0--o",
    "fixed [0.6, 1.2]": "C3-.D",
    "fixed [0.9, 1.2]": "C5:P",
    "fixed [0.9, 3.0]": "C2-.v",
    "BAPO": "C1-^",
    "BAPO reversed": "C4-X",
    "GRPO, one update per batch": "C7:s",
}


# ---------------------------------------------------------------- statistics
def of_seeds(one, outcomes: pd.DataFrame, names: str) -> pd.Series:
    """Return a comparison's outcome by seed, the mean of these methods.

    Raises KeyError if a seed is missing.
    """
    values = outcomes[one.outcome].unstack("name")[names.split()].mean(axis=1, skipna=False)
    first, last = map(int, one.seeds.split("-"))
    return values.dropna().loc[list(range(first, last + 1))]


def differences(one, outcomes: pd.DataFrame) -> pd.Series:
    """Return by seed the outcome of a comparison's methods less that of the others, if any."""
    values = of_seeds(one, outcomes, one.methods)
    if one.others:
        values = values - of_seeds(one, outcomes, one.others)
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
    tests = table[table["family"] != ""]
    corrected = tests.groupby("family")["p"].transform(holm)
    test = ["seeds", "methods", "others", "outcome"]
    table = table.merge(tests[test].assign(corrected=corrected), "left", test, validate="m:1")
    return table.assign(p=table["corrected"].combine_first(table["p"]))


# ---------------------------------------------------------------- tables
def cell(one) -> str:
    """Return a level, or a difference ± half of its interval.

    A significant one of a test has a mark: ✓ if its sign was expected, ✗ if the other one was, and
    * if none was.
    """
    mean = one.values.mean()
    if not one.confidence:
        return f"{mean:.2f}"
    interval = stats.ttest_1samp(one.values, 0).confidence_interval(float(one.confidence))
    half = (interval.high - interval.low) / 2
    text = f"{mean:+.{one.digits}f} ± {half:.{one.digits}f}"
    if one.family:
        text += f" ({one.p:.2g})"
    if not one.expected or one.p >= 0.05:
        return text
    if one.expected == "–":
        return f"{text} *"
    as_expected = one.expected == ("above 0" if mean > 0 else "below 0")
    return f"{text} {'✓' if as_expected else '✗'}"


def markdown(rows: pd.DataFrame) -> str:
    """Return the table of these cells."""
    cells = {}
    for one in rows.itertuples():
        cells.setdefault(one.column, {})[one.row] = cell(one)
    table = pd.DataFrame(cells, index=rows["row"].unique())
    return plot.markdown(table.fillna("–").reset_index(names=""))


def tables() -> dict[str, str]:
    """Return all tables by name, in Markdown."""
    groups = read_comparisons().groupby("table", sort=False)
    return {name: markdown(rows) for name, rows in groups}


# ---------------------------------------------------------------- pictures
def picture(points: pd.DataFrame, height: float, xlabel: str) -> Figure:
    """Draw a panel for each title, with a line and its band for each label, and one legend."""
    figure = Figure((9.4, height), layout="constrained")
    panels = points.groupby("panel", sort=False)
    for axis, (title, of_panel) in zip(figure.subplots(1, len(panels)), panels):
        for label, line in of_panel.groupby("line", sort=False):
            style = STYLES.get(label, "-o")
            (drawn,) = axis.plot(line["x"], line["y"], style, label=label, markersize=4)
            drawn.set_markevery(len(line) // 8)
            colour = drawn.get_color()
            axis.fill_between(line["x"], line["low"], line["high"], color=colour, alpha=0.1)
        axis.set(title=title, xlabel=xlabel)
        axis.grid(alpha=0.3)
    handles, labels = axis.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, handlelength=3)
    return figure


def ranges(points: pd.DataFrame) -> Figure:
    """Draw a panel for each title, with a bar from low to high for each label."""
    figure = Figure((9.4, 2.4), layout="constrained")
    panels = points.groupby("panel", sort=False)
    for axis, (title, bars) in zip(figure.subplots(1, 2, sharey=True), panels):
        width = bars["high"] - bars["low"]
        axis.barh(bars["line"], width, left=bars["low"], color=["C0", "C1", "C1", "C1"], alpha=0.7)
        axis.set(title=title, xlabel="importance ratio r", xlim=(0, 3.3))
        axis.set_xticks([0, 0.6, 0.9, 1.2, 2, 3])
        axis.grid(alpha=0.3)
    axis.invert_yaxis()  # of both panels
    return figure


def main() -> None:
    """Print the tables and draw the pictures."""
    for name, table in tables().items():
        print(f"## {name}\n\n{table}")
    points = pd.read_csv(HERE / "curves.csv").set_index("picture")
    figures = {
        "front": picture(points.loc["front"], 3.2, "step"),
        "method": ranges(points.loc["method"]),
        "large_steps": picture(points.loc["large_steps"], 4.2, "step"),
        "switch": picture(points.loc["switch"], 3.2, "update of a batch"),
    }
    for name, figure in figures.items():
        figure.savefig(HERE / f"figures/{name}.png", dpi=130)


if __name__ == "__main__":
    main()
