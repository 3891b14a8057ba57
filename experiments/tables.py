"""Print the tables of README.md and results/README.md from what is packed in results/.

    python experiments/tables.py > results/tables.md

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
    "mean@16": "higher: +3 to +8 points of AIME (Fig. 11)",
    "pass@8": "not shown",
}
COLLAPSE = 0.05  # a run collapses if its mean@16 ends further than this below its start
MARGINS = {"entropy": 0.025, "norm": 0.05, "mean@16": 0.03, "pass@8": 0.04}
EQUIVALENT = {"default": ("bapo@8", "0.9-2.0@8"), "binding": ("bapo-main@8", "0.9-3.0@8")}
FIRST_LINES = """# All tables

What `python experiments/tables.py` prints of the runs in this folder; [README.md](README.md)
explains it."""
RATE_COMPARED = {"grpo@8": "grpo@1", "1.02-3.0@8": "grpo@8"}

Sweeps = dict[str, pd.DataFrame]  # name -> a row per seed, columns (outcome, method)


# ---------------------------------------------------------------- outcomes
def read_sweeps(results: Path) -> Sweeps:
    """The outcomes of what is packed; in `bounds` also those of `default`, of the same seeds."""
    sweeps = {}
    for name in ("default", "binding", "bounds", "partial"):
        sweeps[name] = outcomes(plot.load(results / name))
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
    """Mean ± half of the 95 % interval, bold where it excludes 0; "–" where there are none."""
    if differences.empty:
        return "–"
    test = stats.ttest_1samp(differences, 0)
    low, high = test.confidence_interval()
    text = f"{differences.mean():+.3f} ± {(high - low) / 2:.3f}"
    return f"**{text}**" if low > 0 or high < 0 else text


def verdict(difference: float, p: float, expected: str) -> str:
    """What a p-value says of a difference that was expected "above 0", "below 0" or "–"."""
    if not p < 0.05:
        return "not resolved"
    side = "above 0" if difference > 0 else "below 0"
    if expected == "–":
        return side
    return "as expected" if side == expected else "the reverse"


def holm(p_values: pd.Series) -> pd.Series:
    """Holm's step-down correction."""
    ordered = p_values.sort_values()
    return (ordered * np.arange(len(ordered), 0, -1)).cummax().clip(upper=1)


def tested(claims: pd.DataFrame, sweeps: Sweeps) -> pd.DataFrame:
    """The rows of named.csv or paper.csv, with the columns here, mean and p."""
    found = []
    for claim in claims.itertuples():
        differences = gaps(sweeps[claim.sweep], claim.outcome, claim.methods, claim.others)
        p = stats.ttest_1samp(differences, 0).pvalue
        found.append({"here": shown(differences), "mean": differences.mean(), "p": p})
    return claims.join(pd.DataFrame(found))


# ---------------------------------------------------------------- tables
def levels_table(sweep: pd.DataFrame) -> pd.DataFrame:
    """The outcomes of a sweep's methods."""
    table = plot.levels(sweep)[list(OUTCOMES)]
    table.insert(0, "seeds", sweep["mean@16"].count())
    table["collapsed"] = [collapsed(sweep, method) for method in table.index]
    return table.reset_index(names="method")


def changes(sweep: pd.DataFrame, methods: str, others: str) -> list[str]:
    """Of every outcome the difference between methods and others."""
    return [shown(gaps(sweep, outcome, methods, others)) for outcome in OUTCOMES]


def front_table(default: pd.DataFrame) -> pd.DataFrame:
    """Levels of the starts and of GRPO, and what the searches change."""
    table = plot.levels(default).loc[["start", "grpo@1", "grpo@8"], list(OUTCOMES)].T
    counts = [collapsed(default, method) for method in table]
    for method in ("bapo-main@8", "bapo-octothinker@8", "bapo@8"):
        table[f"{method} − grpo@8"] = changes(default, method, "grpo@8")
        counts.append(collapsed(default, method))
    table["BAPO in the paper"] = IN_THE_PAPER
    table.loc["runs that collapse"] = [*counts, ""]
    return table.rename(index=OUTCOMES).reset_index(names="")


def tests_table(sweeps: Sweeps, named: pd.DataFrame) -> pd.DataFrame:
    """The tests of named.csv, each family with its own correction."""
    tests = tested(named, sweeps).rename(columns={"expected": "named"})
    tests["p (Holm)"] = tests.groupby("family")["p"].transform(holm)
    tests["verdict"] = list(map(verdict, tests["mean"], tests["p (Holm)"], tests["named"]))
    for name in ("p", "p (Holm)"):
        tests[name] = tests[name].map("{:.2g}".format)
    columns = ["family", "difference", "outcome", "named", "here", "p", "p (Holm)", "verdict"]
    return tests[columns]


def figures_table(sweeps: Sweeps, paper: pd.DataFrame) -> pd.DataFrame:
    """The paper's figures row by row: paper.csv. A verdict's p-value is not corrected."""
    claims = tested(paper, sweeps)
    verdicts = pd.Series(map(verdict, claims["mean"], claims["p"], claims["expected"]))
    claims["verdict"] = verdicts.str.replace("expected", "in the paper")
    table = claims[["figure", "shows", "difference", "here", "verdict"]]
    return table.set_axis(["figure", "the paper shows", "here", "", "verdict"], axis=1)


def effects_table(bounds: pd.DataFrame, named: pd.DataFrame) -> pd.DataFrame:
    """What each bound does to all outcomes: the contrasts of family 3."""
    rows = {}
    for effect in named[named["family"] == "3"].itertuples():
        rows[effect.difference] = changes(bounds, effect.methods, effect.others)
    table = pd.DataFrame.from_dict(rows, orient="index", columns=list(OUTCOMES))
    return table.reset_index(names="")


def equivalence_table(sweeps: Sweeps) -> pd.DataFrame:
    """The search less fixed bounds at the end of its range.

    A last column, "ends", has the ends of the 90 % interval in margins.
    """
    rows = []
    for name, (method, other) in EQUIVALENT.items():
        for outcome, margin in MARGINS.items():
            differences = gaps(sweeps[name], outcome, method, other)
            test = stats.ttest_1samp(differences, 0)
            low, high = test.confidence_interval(0.9)
            rows.append(
                {
                    "difference": f"{method} − {other}",
                    "outcome": outcome,
                    "here": shown(differences),
                    "90 % interval": f"{low:+.3f} to {high:+.3f}",
                    "margin": f"±{margin}",
                    "equivalent": "yes" if -margin < low and high < margin else "not shown",
                    "ends": (low / margin, high / margin),
                }
            )
    return pd.DataFrame(rows)


def search_table(sweeps: Sweeps) -> pd.DataFrame:
    """Where in its range the search stops: shares of the updates of a run."""
    shares = {}
    for name, sweep in sweeps.items():
        ends = sweep[["at its start", "at its end"]]
        levels = plot.levels(ends)
        shares[name] = levels.filter(like="bapo", axis=0)
    table = pd.concat(shares, names=["", "method"])
    return table.reset_index()


def literal_table(updates: pd.DataFrame) -> pd.DataFrame:
    """Readings of Eq. 8 for the main range on the first updates of GRPO's batches: literal.py."""
    columns = list(updates.columns[3:])
    by_seed = updates.groupby(["seed", "reading"])[columns].mean().unstack()
    table = plot.levels(by_seed).loc[updates["reading"].unique(), columns]
    return table.reset_index(names="Eq. 8 read as")


def rate_table(runs: pd.DataFrame) -> pd.DataFrame:
    """Eight updates less one, and bounds past 1 less GRPO's, by attempts and learning rate."""
    columns = ["attempts", "rate", "steps", "starts", "grpo@8 collapsed"]
    for method, other in RATE_COMPARED.items():
        columns += [f"{method} − {other}: mean@16", "entropy"]
    settings = ["attempts", "rate", "steps"]
    by_start = runs.pivot(index=[*settings, "start"], columns="method")
    by_start["mean@16", "start"] = by_start["start mean@16", "grpo@8"]
    rows = []
    for (attempts, rate, steps), sweep in by_start.groupby(level=settings):
        row = [attempts, f"{rate:g}", steps, len(sweep), collapsed(sweep, "grpo@8")]
        for method, other in RATE_COMPARED.items():
            row.append(shown(gaps(sweep, "mean@16", method, other)))
            row.append(shown(gaps(sweep, "entropy", method, other)))
        rows.append(row)
    return pd.DataFrame(rows, columns=columns)


# ---------------------------------------------------------------- printing
def page(results: Path) -> str:
    """The text of results/tables.md."""
    sweeps = read_sweeps(results)
    named = pd.read_csv(ROOT / "experiments/named.csv", dtype=str, keep_default_na=False)
    paper = pd.read_csv(ROOT / "experiments/paper.csv", dtype=str, keep_default_na=False)
    older = pd.read_csv(results / "rate-reuse/runs.csv", comment="#")
    tables = {
        "The front page's": front_table(sweeps["default"]),
        "The tests that protocol.md names": tests_table(sweeps, named),
        "The search against fixed bounds": equivalence_table(sweeps).drop(columns="ends"),
        "Where the search stops": search_table(sweeps),
        "The paper's figures": figures_table(sweeps, paper),
        "Learning rate and reuse": rate_table(older),
        "Readings of Eq. 8": literal_table(pd.read_csv(results / "literal.csv")),
        "The effect of each bound": effects_table(sweeps["bounds"], named),
    }
    for name, sweep in sweeps.items():
        tables[f"The runs in {name}"] = levels_table(sweep)
    lines = [FIRST_LINES]
    for heading, table in tables.items():
        lines += ["", f"## {heading}", "", *plot.markdown(table)]
    return "\n".join(lines)


if __name__ == "__main__":
    print(page(ROOT / "results"))
