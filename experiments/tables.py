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
    "collapsed": "",
}
COLLAPSE = 0.05  # a run collapses if its mean@16 ends further than this below its start
MARGINS = {"entropy": 0.025, "norm": 0.05, "mean@16": 0.03, "pass@8": 0.04}
EQUIVALENT = {
    "default": ("bapo-app-a-gradient@8", "0.9-2.0@8"),
    "binding": ("bapo-main@8", "0.9-3.0@8"),
}
FIRST_LINES = """# All tables

What `python experiments/tables.py` prints of the runs in this folder; [README.md](README.md)
explains it."""
MEANS = ["at its start", "at its end", "rho_start", "length_correct", "length_wrong"]  # of updates
RATE_COMPARED = {"grpo@8": "grpo@1", "1.02-3.0@8": "grpo@8"}
RATE_SETTINGS = ["attempts", "rate", "steps"]

# name -> a row per method and seed, a column per outcome; before training the method is "start"
Sweeps = dict[str, pd.DataFrame]


# ---------------------------------------------------------------- outcomes
def read_sweeps(results: Path) -> Sweeps:
    """The outcomes of what is packed; in `bounds` also those of `default`, of the same seeds."""
    sweeps = {}
    for name in ("default", "binding", "bounds", "partial"):
        sweeps[name] = outcomes(plot.load(results / name))
    seeds = sweeps["bounds"].loc["start"].index
    shared = sweeps["default"].loc[(["grpo@8", "0.9-2.0@8"], seeds), :]
    sweeps["bounds"] = pd.concat([sweeps["bounds"], shared])
    return sweeps


def outcomes(found: plot.Runs) -> pd.DataFrame:
    """Of every run what OUTCOMES, paper.csv and `collapsed` name."""
    numbers = plot.outcomes(found).rename(
        columns={
            "gradient norm, 95th percentile": "norm",
            "positive share": "share",
            "reward at the end": "reward",
        }
    )
    numbers["entropy"] = plot.by_step(found.lines, "entropy").rolling(20).mean().min()
    numbers["negatives"] = 0.5 - numbers["share"]
    starts = numbers.loc["start", "mean@16"]
    numbers["gain"] = numbers["mean@16"].sub(starts, level="seed")
    trained = found.lines.query("update > 0")
    # The ranges of all three searches begin and end there. The upper bound moves first.
    trained["at its start"] = trained["high"] == PAPER_MAIN.high_start
    trained["at its end"] = trained["low"] == PAPER_MAIN.low_max
    # On the same tokens, so only from one update on a batch to the next.
    trained["fall"] = trained.groupby([*plot.RUN, "step"])["entropy_now"].diff(-1)
    of_run = trained.groupby(plot.RUN)
    numbers = numbers.join(of_run[MEANS].mean())
    numbers["inside"] = 0.5 - numbers["at its start"] - numbers["at its end"]
    numbers["longer"] = numbers["length_wrong"] - numbers["length_correct"]
    ranks = of_run[["predicted_entropy_fall", "fall"]].corr("spearman")
    numbers["rank"] = ranks["fall"].xs("predicted_entropy_fall", level=-1)
    return numbers


def gaps(sweep: pd.DataFrame, methods: str, others: str) -> pd.DataFrame:
    """The mean over methods (names with spaces between) less that over others, of all outcomes.

    Returns a row per seed; NaN where one of the runs is missing.
    """
    if not others:
        return mean_of(sweep, methods)
    return mean_of(sweep, methods) - mean_of(sweep, others)


def mean_of(sweep: pd.DataFrame, methods: str) -> pd.DataFrame:
    """Of every seed the mean over these methods; NaN where one is missing."""
    runs_of = [sweep.loc[method] for method in methods.split()]
    return sum(runs_of) / len(runs_of)


def collapsed(gains: pd.Series) -> str:
    """ "1 of 8": how many runs collapse, by what they gain in mean@16."""
    return f"{(gains < -COLLAPSE).sum()} of {len(gains)}"


# ---------------------------------------------------------------- statistics
def shown(differences: pd.Series) -> str:
    """Mean ± half of the 95 % interval, bold where it excludes 0; "–" where there are none."""
    mean, half = plot.interval(differences)
    if np.isnan(mean):
        return "–"
    text = f"{mean:+.3f} ± {half:.3f}"
    return f"**{text}**" if abs(mean) > half else text


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
    """The rows of named.csv or paper.csv, with the columns here, mean, p, "p (Holm)", verdict.

    Each family of claims has its own correction.
    """
    found = []
    for claim in claims.itertuples():
        differences = gaps(sweeps[claim.sweep], claim.methods, claim.others)[claim.outcome]
        p = stats.ttest_1samp(differences, 0, nan_policy="omit").pvalue
        found.append({"here": shown(differences), "mean": differences.mean(), "p": p})
    tests = claims.join(pd.DataFrame(found))
    tests["p (Holm)"] = tests.groupby("family")["p"].transform(holm)
    tests["verdict"] = list(map(verdict, tests["mean"], tests["p (Holm)"], tests["expected"]))
    return tests


# ---------------------------------------------------------------- tables
def changes(sweep: pd.DataFrame, methods: str, others: str) -> pd.Series:
    """Of every outcome the difference between methods and others."""
    return gaps(sweep, methods, others)[list(OUTCOMES)].agg(shown)


def levels_table(sweep: pd.DataFrame) -> pd.DataFrame:
    """The outcomes of a sweep's methods; the index is the method."""
    runs_of = sweep.groupby("method")
    table = plot.levels(runs_of)[list(OUTCOMES)]
    table["collapsed"] = runs_of["gain"].agg(collapsed)
    return table


def front_table(default: pd.DataFrame) -> pd.DataFrame:
    """Levels of the starts and of GRPO, and what the searches change."""
    levels = levels_table(default).T
    table = levels.loc[[*OUTCOMES, "collapsed"], ["start", "grpo@1", "grpo@8"]]
    for method in ("bapo-main@8", "bapo-app-a@8", "bapo-app-a-gradient@8"):
        changed = changes(default, method, "grpo@8")
        table[f"{method} − grpo@8"] = changed.combine_first(levels[method])
    table["BAPO in the paper"] = IN_THE_PAPER
    table.index = [*OUTCOMES.values(), "runs that collapse"]
    return table.reset_index(names="")


def tests_table(sweeps: Sweeps, named: pd.DataFrame) -> pd.DataFrame:
    """The tests of named.csv."""
    tests = tested(named, sweeps).rename(columns={"expected": "named"})
    for name in ("p", "p (Holm)"):
        tests[name] = tests[name].map("{:.2g}".format)
    columns = ["family", "difference", "outcome", "named", "here", "p", "p (Holm)", "verdict"]
    return tests[columns]


def figures_table(sweeps: Sweeps, paper: pd.DataFrame) -> pd.DataFrame:
    """The paper's figures row by row: paper.csv. A verdict's p-value is not corrected."""
    claims = tested(paper.assign(family=paper.index), sweeps)
    claims["verdict"] = claims["verdict"].str.replace("expected", "in the paper")
    table = claims[["figure", "shows", "difference", "here", "verdict"]]
    return table.set_axis(["figure", "the paper shows", "here", "found", "verdict"], axis=1)


def effects_table(bounds: pd.DataFrame, named: pd.DataFrame) -> pd.DataFrame:
    """What each bound does to all outcomes: the contrasts of family 3."""
    rows = {}
    for effect in named.query("family == 3").itertuples():
        rows[effect.difference] = changes(bounds, effect.methods, effect.others)
    return pd.DataFrame(rows).T.reset_index(names="")


def equivalence_table(sweeps: Sweeps) -> pd.DataFrame:
    """The search less fixed bounds at the end of its range.

    The last columns are mean and half of the 90 % interval, in margins.
    """
    rows = []
    for name, (method, other) in EQUIVALENT.items():
        differences = gaps(sweeps[name], method, other)
        for outcome, margin in MARGINS.items():
            mean, half = plot.interval(differences[outcome], 0.9)
            rows.append(
                {
                    "difference": f"{method} − {other}",
                    "outcome": outcome,
                    "90 % interval": f"{mean - half:+.3f} to {mean + half:+.3f}",
                    "margin": f"±{margin}",
                    "equivalent": "yes" if abs(mean) + half < margin else "not shown",
                    "mean": mean / margin,
                    "half": half / margin,
                }
            )
    return pd.DataFrame(rows)


def search_table(sweeps: Sweeps) -> pd.DataFrame:
    """Where in its range the search stops: shares of the updates of a run."""
    runs_of = pd.concat(sweeps, names=[""]).groupby(["", "method"], sort=False)
    shares = plot.levels(runs_of)[["at its start", "at its end"]]
    return shares.filter(like="bapo", axis=0).reset_index()


def literal_table(updates: pd.DataFrame) -> pd.DataFrame:
    """Readings of Eq. 8 for the main range on the first updates of GRPO's batches: literal.py."""
    by_seed = updates.groupby(["seed", "reading"], sort=False).mean().drop(columns="step")
    table = plot.levels(by_seed.groupby("reading", sort=False))
    return table.reset_index(names="Eq. 8 read as")


def read_rates(results: Path) -> pd.DataFrame:
    """The older runs of several learning rates, with what they gain in mean@16."""
    runs = pd.read_csv(results / "rate-reuse/runs.csv", comment="#")
    runs["gain"] = runs["mean@16"] - runs["start mean@16"]
    return runs


def rate_table(runs: pd.DataFrame) -> pd.DataFrame:
    """Eight updates less one, and bounds past 1 less GRPO's, by attempts and learning rate."""
    runs = runs.set_index(["method", *RATE_SETTINGS, "start"])
    gains = runs.loc["grpo@8"].groupby(RATE_SETTINGS)["gain"]
    columns = [
        gains.size().rename("starts of grpo"),
        gains.agg(collapsed).rename("grpo@8 collapsed"),
    ]
    for method, other in RATE_COMPARED.items():
        by_setting = gaps(runs, method, other).groupby(RATE_SETTINGS)
        columns.append(by_setting["mean@16"].agg(shown).rename(f"{method} − {other}: mean@16"))
    columns.append(by_setting["entropy"].agg(shown))  # of the last pair
    return pd.concat(columns, axis=1).reset_index()


# ---------------------------------------------------------------- printing
def page(results: Path) -> str:
    """The text of results/tables.md."""
    sweeps = read_sweeps(results)
    named = pd.read_csv(ROOT / "experiments/named.csv")
    paper = pd.read_csv(ROOT / "experiments/paper.csv", keep_default_na=False)
    tables = {
        "The front page's": front_table(sweeps["default"]),
        "The tests that protocol.md names": tests_table(sweeps, named),
        "The search against fixed bounds": equivalence_table(sweeps).drop(columns=["mean", "half"]),
        "Where the search stops": search_table(sweeps),
        "The paper's figures": figures_table(sweeps, paper),
        "Learning rate and reuse": rate_table(read_rates(results)),
        "Readings of Eq. 8": literal_table(pd.read_csv(results / "literal.csv")),
        "The effect of each bound": effects_table(sweeps["bounds"], named),
    }
    for name, sweep in sweeps.items():
        tables[f"The runs in {name}"] = levels_table(sweep).reset_index()
    lines = [FIRST_LINES]
    for heading, table in tables.items():
        lines += ["", f"## {heading}", "", *plot.markdown(table)]
    return "\n".join(lines)


if __name__ == "__main__":
    print(page(ROOT / "results"))
