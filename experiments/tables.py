"""Print the tables of README.md and results/README.md from what is packed in results/.

    python experiments/tables.py

named.csv holds the tests that results/protocol.md names, paper.csv what the paper's figures show.
Differences are paired by seed. ± is half of Student's 95 % interval; bold: it excludes 0.
"""

import sys
from pathlib import Path

import numpy as np
import pandas as pd
from scipy import stats

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT))

import plot
from bapo import PAPER_MAIN

OUTCOMES = {
    "entropy": "entropy, lowest mean of 20 steps",
    "norm": "gradient norm, 95th percentile",
    "share": "positive share of the gradient",
    "reward": "reward at the end",
    "mean@16": "held-out mean@16",
    "pass@8": "held-out pass@8",
}
IN_THE_PAPER = {
    "entropy": "higher: +0.08 (Fig. 9), +0.15 (Fig. 13)",
    "norm": "lower: flat, GRPO's spikes past 100 (Fig. 9)",
    "share": "higher: about +0.03 (Fig. 9)",
    "reward": "higher: +0.07 (Figs. 9, 13)",
    "mean@16": "higher: +2 to +8 points of AIME (Fig. 11)",
    "pass@8": "not shown",
}
COLLAPSE = 0.05  # a run collapses if its mean@16 ends further than this below its start
MARGINS = {"entropy": 0.025, "norm": 0.05, "mean@16": 0.03, "pass@8": 0.04}
EQUIVALENT = {"default": ("bapo@8", "0.9-2.0@8"), "binding": ("bapo-main@8", "0.9-3.0@8")}
OLD_OUTCOMES = ["mean@16", "entropy", "start mean@16"]

Rows = list[list[str]]
Sweeps = dict[str, pd.DataFrame]  # name -> a row per seed, columns (outcome, method)


# ---------------------------------------------------------------- outcomes
def read_sweeps(results: Path) -> Sweeps:
    """The outcomes of what is packed; in `bounds` also those of `default`, of the same seeds."""
    sweeps = {}
    for name in ("default", "binding", "bounds", "partial"):
        if (results / name / "runs.json").exists():
            sweeps[name] = outcomes(plot.load(results / name))
    if "bounds" in sweeps:
        default = sweeps["default"]
        shared = default.loc[:, default.columns.isin(["grpo@8", "0.9-2.0@8"], level=1)]
        sweeps["bounds"] = sweeps["bounds"].join(shared).sort_index(axis=1)
    return sweeps


def outcomes(found: plot.Runs) -> pd.DataFrame:
    """Of every run what OUTCOMES and paper.csv name: a row per seed, columns (outcome, method)."""
    lines = found.lines.set_index(["method", "seed"])
    numbers = plot.outcomes(found).rename(
        columns={
            "gradient norm, 95th percentile": "norm",
            "positive share": "share",
            "reward at the end": "reward",
        }
    )
    numbers["entropy"] = plot.by_step(found.lines, "entropy").rolling(20).mean().min()
    numbers["negatives"] = 0.5 - numbers["share"]
    # The ranges of all three searches begin and end there. The upper bound moves first.
    lines["at its start"] = lines["high"] == PAPER_MAIN.high_start
    lines["at its end"] = lines["low"] == PAPER_MAIN.low_max
    trained = lines[lines["update"] > 0]
    for name in ("at its start", "at its end", "rho_start", "length_correct", "length_wrong"):
        numbers[name] = trained.groupby(level=[0, 1])[name].mean()
    numbers["inside"] = 0.5 - numbers["at its start"] - numbers["at its end"]
    numbers["longer"] = numbers["length_wrong"] - numbers["length_correct"]
    # On the same tokens, so only from one update on a batch to the next.
    now = lines.groupby(["method", "seed", "step"])["entropy_now"]
    changes = pd.DataFrame({"rule": -lines["entropy_rule"], "change": -now.diff(-1)})
    ranks = changes.groupby(level=[0, 1]).corr("spearman")
    numbers["rank"] = ranks["change"].xs("rule", level=-1)
    return numbers.unstack(0).sort_index(axis=1)


def gaps(sweep: pd.DataFrame, outcome: str, methods: str, others: str) -> pd.Series:
    """Of every seed the mean over methods (names with spaces between) less that over others."""
    values = sweep[outcome]
    means = values[methods.split()].mean(axis=1, skipna=False)
    if others:
        means = means - values[others.split()].mean(axis=1, skipna=False)
    return means.dropna()


def collapsed(sweep: pd.DataFrame, method: str) -> str:
    """ "1 of 8": how many runs of a method collapse."""
    falls = gaps(sweep, "mean@16", "start", method)
    return f"{(falls > COLLAPSE).sum()} of {len(falls)}"


# ---------------------------------------------------------------- statistics
def shown(differences: pd.Series) -> str:
    """Mean ± half of the 95 % interval, bold where it excludes 0."""
    low, high = stats.ttest_1samp(differences, 0).confidence_interval()
    text = f"{differences.mean():+.3f} ± {(high - low) / 2:.3f}"
    return f"**{text}**" if low > 0 or high < 0 else text


def verdict(differences: pd.Series, p: float, expected: str) -> str:
    """What a p-value says of a difference that was expected "above 0", "below 0" or "–"."""
    if not p < 0.05:
        return "not resolved"
    side = "above 0" if differences.mean() > 0 else "below 0"
    if expected == "–":
        return side
    return "as expected" if side == expected else "the reverse"


def holm(p_values: list[float]) -> np.ndarray:
    """Holm's step-down correction."""
    order = np.argsort(p_values)
    multiplied = np.array(p_values)[order] * np.arange(len(order), 0, -1)
    corrected = np.empty(len(order))
    corrected[order] = np.maximum.accumulate(multiplied).clip(max=1)
    return corrected


# ---------------------------------------------------------------- tables
def front_table(default: pd.DataFrame) -> Rows:
    """GRPO's levels, and what the searches change."""
    levels = ["grpo@1", "grpo@8"]
    methods = ["bapo-main@8", "bapo-octothinker@8", "bapo@8"]
    rows = [["", *levels, *(f"{method} − grpo@8" for method in methods), "BAPO in the paper"]]
    for outcome, name in OUTCOMES.items():
        cells = [level(default, outcome, method) for method in levels]
        for method in methods:
            cells.append(shown(gaps(default, outcome, method, "grpo@8")))
        rows.append([name, *cells, IN_THE_PAPER[outcome]])
    counts = [collapsed(default, method) for method in (*levels, *methods)]
    return [*rows, ["runs that collapse", *counts, ""]]


def level(sweep: pd.DataFrame, outcome: str, method: str) -> str:
    """Mean ± half of the 95 % interval."""
    mean, half = plot.interval(sweep[outcome][[method]].T)
    return f"{mean[method]:.3f} ± {half[method]:.3f}"


def levels_table(sweep: pd.DataFrame) -> Rows:
    """The outcomes of a sweep's methods."""
    rows = [["method", "seeds", *OUTCOMES, "collapsed"]]
    for method in sweep["entropy"].dropna(axis=1, how="all"):
        cells = [level(sweep, outcome, method) for outcome in OUTCOMES]
        count = str(sweep["entropy"][method].count())
        rows.append([method, count, *cells, collapsed(sweep, method)])
    return rows


def tests_table(sweeps: Sweeps, named: pd.DataFrame) -> Rows:
    """The tests of named.csv, each family with its own correction."""
    rows = [["family", "difference", "outcome", "named", "here", "p", "p (Holm)", "verdict"]]
    for _, family in named[named["sweep"].isin(sweeps)].groupby("family"):
        tests = list(family.itertuples())
        found = [gaps(sweeps[t.sweep], t.outcome, t.methods, t.others) for t in tests]
        p_values = [stats.ttest_1samp(differences, 0).pvalue for differences in found]
        for t, differences, p, corrected in zip(tests, found, p_values, holm(p_values)):
            cells = [t.family, t.difference, t.outcome, t.expected, shown(differences)]
            result = verdict(differences, corrected, t.expected)
            rows.append([*cells, f"{p:.2g}", f"{corrected:.2g}", result])
    return rows


def figures_table(sweeps: Sweeps, paper: pd.DataFrame) -> Rows:
    """The paper's figures row by row: paper.csv. A verdict's p-value is not corrected."""
    rows = [["figure", "the paper shows", "here", "", "verdict"]]
    for claim in paper[paper["sweep"].isin(sweeps)].itertuples():
        differences = gaps(sweeps[claim.sweep], claim.outcome, claim.methods, claim.others)
        p = stats.ttest_1samp(differences, 0).pvalue
        result = verdict(differences, p, claim.expected).replace("expected", "in the paper")
        rows.append([claim.figure, claim.shows, claim.difference, shown(differences), result])
    return rows


def effects_table(bounds: pd.DataFrame, named: pd.DataFrame) -> Rows:
    """What each bound does to all outcomes: the contrasts of family 3."""
    rows = [["", *OUTCOMES]]
    for effect in named[named["family"] == "3"].itertuples():
        cells = []
        for outcome in OUTCOMES:
            cells.append(shown(gaps(bounds, outcome, effect.methods, effect.others)))
        rows.append([effect.difference, *cells])
    return rows


def equivalence_table(sweeps: Sweeps) -> Rows:
    """The search less fixed bounds at the end of its range."""
    rows = [["difference", "outcome", "here", "90 % interval", "margin", "equivalent"]]
    for name, (method, other) in EQUIVALENT.items():
        for outcome, margin in MARGINS.items() if name in sweeps else ():
            differences = gaps(sweeps[name], outcome, method, other)
            low, high = stats.ttest_1samp(differences, 0).confidence_interval(0.9)
            inside = "yes" if -margin < low and high < margin else "not shown"
            cells = [shown(differences), f"{low:+.3f} to {high:+.3f}", f"±{margin}", inside]
            rows.append([f"{method} − {other}", outcome, *cells])
    return rows


def search_table(sweeps: Sweeps) -> Rows:
    """Where in its range the search stops: shares of the updates of a run."""
    rows = [["", "method", "at its start", "at its end", "at its end: least and most of a run"]]
    for name, sweep in sweeps.items():
        for method in sweep["entropy"].filter(like="bapo"):
            start = sweep["at its start"][method]
            end = sweep["at its end"][method]
            cells = [
                f"{start.mean():.0%}",
                f"{end.mean():.0%}",
                f"{end.min():.0%}, {end.max():.0%}",
            ]
            rows.append([name, method, *cells])
    return rows


def literal_table(updates: pd.DataFrame) -> Rows:
    """Readings of Eq. 8 for the main range on the first updates of GRPO's batches: literal.py."""
    columns = {"share": "share at its start", "rests": "updates that rest there"}
    columns |= {"low": "mean low", "high": "mean high"}
    rows = [["Eq. 8 read as", *columns.values()]]
    for reading, of_reading in updates.groupby("reading", sort=False):
        means = of_reading.groupby("seed")[list(columns)].mean()
        cells = [f"{mean:.3f} ± {half:.3f}" for mean, half in zip(*plot.interval(means.T))]
        rows.append([reading, *(cell.replace("nan ± nan", "–") for cell in cells)])
    return rows


def rate_table(runs: pd.DataFrame) -> Rows:
    """Eight updates less one, and bounds past 1 less GRPO's, by attempts and learning rate."""
    compared = {"grpo@8": "grpo@1", "1.02-3.0@8": "grpo@8"}
    rows = [["attempts", "rate", "steps", "starts", "grpo@8 collapsed"]]
    for method, other in compared.items():
        rows[0] += [f"{method} − {other}: mean@16", "entropy"]
    for (attempts, rate, steps), of_rate in runs.groupby(["attempts", "rate", "steps"]):
        numbers = of_rate.set_index(["start", "method"])[OLD_OUTCOMES].unstack()
        numbers["mean@16", "start"] = numbers["start mean@16"]["grpo@8"]
        cells = [str(attempts), f"{rate:g}", str(steps), str(len(numbers))]
        cells.append(collapsed(numbers, "grpo@8"))
        for method, other in compared.items():
            for outcome in ("mean@16", "entropy"):
                is_there = method in numbers[outcome]
                cells.append(shown(gaps(numbers, outcome, method, other)) if is_there else "–")
        rows.append(cells)
    return rows


# ---------------------------------------------------------------- printing
def all_tables(results: Path) -> dict[str, list[str]]:
    """Name -> lines of every table whose runs are packed."""
    sweeps = read_sweeps(results)
    named = pd.read_csv(ROOT / "experiments/named.csv", dtype=str, keep_default_na=False)
    paper = pd.read_csv(ROOT / "experiments/paper.csv", dtype=str, keep_default_na=False)
    tables = {
        "front": front_table(sweeps["default"]),
        "tests": tests_table(sweeps, named),
        "equivalence": equivalence_table(sweeps),
        "search": search_table(sweeps),
        "figures": figures_table(sweeps, paper),
        "rate": rate_table(pd.read_csv(results / "rate-reuse/runs.csv", comment="#")),
        "literal": literal_table(pd.read_csv(results / "literal.csv")),
    }
    if "bounds" in sweeps:
        tables["effects"] = effects_table(sweeps["bounds"], named)
    for name, sweep in sweeps.items():
        tables[name] = levels_table(sweep)
    return {name: plot.markdown(rows) for name, rows in tables.items()}


if __name__ == "__main__":
    for name, lines in all_tables(ROOT / "results").items():
        print("\n".join([f"## {name}", "", *lines, ""]))
