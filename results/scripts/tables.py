"""Print all tables of the pages from what is packed in results/.

    python -m results.scripts.tables > results/tables.md

tests.csv holds the pre-registered tests (results/protocol.md), others.csv further differences that
the pages quote, and paper.csv the curves of the paper. Differences are paired by seed.
"""

from pathlib import Path

import numpy as np
import pandas as pd
from scipy import stats

from bapo import PAPER_MAIN
from support import files, plot

FIRST_LINES = """# All tables

`python -m results.scripts.tables` prints these tables of the runs in this folder, which
[README.md](README.md) explains. ± is half of Student's 95 % interval over seeds. All p-values are
two-sided. [protocol.md](protocol.md) defines the outcomes and the pre-registered tests; p (Holm) is
corrected within a family. What has a † is not pre-registered and not corrected.

"As expected" means significant with the expected sign, "opposite" significant with the other one;
the protocol calls them "reproduced" and "reversed". The expected sign is the paper's, except for
reward and mean@16 of family A at 1e-4, where reuse was expected to help. "Same direction?" is "yes"
where a difference is significant and has the paper's sign, and "–" where the paper prints no
difference to compare with. What is "by construction" follows from the lengths of the responses.

Lowest entropy is the lowest mean over 20 consecutive steps. Mean bounds and shares of searches
leave out each batch's first update, where every ratio is 1. Searches at start, inside and at end
are those whose bounds end there in the range of the search; reached is the share that reached rho0.
With a search for every 16 or 4 responses, these are means over an update's searches. kl is that of
a batch's last update."""
SHORT = {"gradient norm": "norm", "positive share": "share"}
LEVELS = ["entropy", "lowest entropy", "norm", "share", "reward", "mean@16", "pass@8", "kl"]
LEVELS += ["mean low", "mean high", "searches at start", "searches inside", "searches at end"]
LEVELS += ["reached"]
NORMS = {  # outcome -> updates on each batch
    "norm of update 1": [1],
    "norm of update 8": [8],
    "norm of updates 2 to 8": range(2, 9),
    "norm of all updates": range(1, 9),
}
LARGE = "95th percentile of updates 2 to 8"
FIRST = "share of update 1 among the largest 5 %"
QUICK_START = {
    "entropy": "entropy",
    "reward": "reward",
    "norm": "gradient norm",
    "share": "positive share",
    "mean@16": "mean@16",
    "pass@8": "pass@8",
}
ROOT = Path(__file__).parents[2]
SAME = {"as expected": "yes", "opposite": "no"}

# folder -> a row per method and seed, a column per outcome
Sweeps = dict[str, pd.DataFrame]


# ---------------------------------------------------------------- outcomes
def read_sweeps(results: Path) -> Sweeps:
    """Return the outcomes of every packed folder."""
    sweeps = {}
    for path in sorted(results.glob("*/runs.json")):
        folder = path.parent
        sweep = outcomes(plot.load(folder))
        sweep["learning rate"] = folder.name.removeprefix("rate-")
        sweep["rho0"] = files.read_json(path)["config"]["rho0"]
        sweeps[folder.name] = sweep
    return sweeps


def outcomes(records: plot.Records) -> pd.DataFrame:
    """Return for every run what the tables show and what the .csv files name."""
    numbers = plot.outcomes(records).rename(columns=SHORT)
    numbers["lowest entropy"] = plot.by_step(records.lines, "entropy").rolling(20).mean().min()
    before = numbers.loc[plot.START, "mean@16"]
    numbers["gain"] = numbers["mean@16"].sub(before, level="seed")
    trained = records.lines.query("update > 0")
    of_run = trained.groupby(plot.RUN)
    numbers["longer"] = of_run["length_wrong"].mean() - of_run["length_correct"].mean()
    numbers["negative share − 0.5"] = 0.5 - numbers["share"]
    of_batch = trained.groupby([*plot.RUN, "step"])
    numbers["kl"] = of_batch["kl"].last().groupby(plot.RUN).mean()
    # Only between updates on one batch, whose tokens are the same.
    falls = trained[["predicted_entropy_fall"]].assign(fall=of_batch["entropy_now"].diff(-1))
    ranks = falls.groupby(plot.RUN).corr("spearman")["fall"]
    numbers["rank"] = ranks.xs("predicted_entropy_fall", level=-1)
    return numbers.join(norms(trained)).join(searches(trained.query("update > 1")))


def norms(trained: pd.DataFrame) -> pd.DataFrame:
    """Return for every run the gradient norms of a batch's first update and of the others."""
    columns = {}
    for name, updates in NORMS.items():
        of_updates = trained[trained["update"].isin(updates)].groupby(plot.RUN)["grad_norm"]
        columns[name] = of_updates.mean()
    columns[LARGE] = trained.query("2 <= update <= 8").groupby(plot.RUN)["grad_norm"].quantile(0.95)
    limits = trained.groupby(plot.RUN)["grad_norm"].transform("quantile", 0.95)
    largest = trained[trained["grad_norm"] > limits]
    columns[FIRST] = (largest["update"] == 1).groupby(plot.RUN).mean()
    return pd.DataFrame(columns)


def searches(reused: pd.DataFrame) -> pd.DataFrame:
    """Return for every run where its searches ended, as shares of them.

    Runs with several searches in an update have logged at_start and at_end. The ranges of all
    searches begin and end with the main range's bounds, and the upper bound moves first.
    """
    methods = reused.index.get_level_values("method")
    searched = reused[methods.str.startswith(("bapo", "yoked"))]
    at_start = (searched["high"] == PAPER_MAIN.high_start).astype(float)
    at_end = (searched["low"] == PAPER_MAIN.low_max).astype(float)
    shares = {
        "searches at start": searched.get("at_start", at_start).fillna(at_start),
        "searches at end": searched.get("at_end", at_end).fillna(at_end),
        "reached": searched["reached"],
    }
    means = pd.DataFrame(shares).groupby(plot.RUN).mean()
    means["searches inside"] = 1 - means["searches at start"] - means["searches at end"]
    return means


def mean_of(sweep: pd.DataFrame, methods: str) -> pd.DataFrame:
    """Return by seed the mean of all outcomes over these methods."""
    numbers = sweep.select_dtypes("number")
    runs_of = [numbers.query("method == @name").droplevel("method") for name in methods.split()]
    return sum(runs_of) / len(runs_of)


def differences(claim, sweeps: Sweeps) -> pd.Series:
    """Return by seed the outcome of a claim's methods less that of the others, if there are any.

    With pairs it holds the mean of every two seeds, because the yoked runs exchanged their bounds
    within such pairs. Raises KeyError if a seed is missing.
    """
    values = mean_of(sweeps[claim.sweep], claim.methods)[claim.outcome]
    if claim.others:
        others = sweeps[claim.others_sweep or claim.sweep]
        values = values - mean_of(others, claim.others)[claim.outcome]
    first, last = map(int, claim.seeds.split("-"))
    values = values.dropna().loc[list(range(first, last + 1))]
    return values.groupby(values.index // 2).mean() if claim.pairs else values


def below(values: pd.Series) -> str:
    """Return how many values are below 0: "1 of 8"."""
    return f"{(values < 0).sum()} of {len(values)}"


def of_rates(sweeps: Sweeps) -> pd.DataFrame:
    """Return the runs at all learning rates."""
    return pd.concat([sweeps[name] for name in sweeps if name.startswith("rate-")])


def of_targets(sweeps: Sweeps) -> pd.DataFrame:
    """Return bapo@8 with all targets at 3e-4, on the choosing seeds."""
    targets = [sweeps[name] for name in sweeps if name.startswith("target-")]
    every = pd.concat([*targets, sweeps["rate-3e-4"]])
    return every.query("method == 'bapo@8' and 121 <= seed <= 125")


# ---------------------------------------------------------------- statistics
def shown(values: pd.Series) -> str:
    """Return mean ± half of the 95 % interval."""
    mean, half = plot.interval(values)
    return f"{mean:+.3f} ± {half:.3f}"


def p_value(values: pd.Series) -> float:
    """Return Student's two-sided p-value of a mean of 0."""
    return 2 * stats.t.sf(abs(values.mean() / values.sem()), values.count() - 1)


def holm(p_values: pd.Series) -> pd.Series:
    """Return Holm's correction."""
    ordered = p_values.sort_values()
    return (ordered * np.arange(len(ordered), 0, -1)).cummax().clip(upper=1)


def verdict(mean: float, p: float, corrected: float, expected: str) -> str:
    """Return what the tests say of a difference that was expected "above 0", "below 0" or "–".

    "half: above 0" is a comparison with the midpoint of two methods.
    """
    if corrected >= 0.05:
        return "not significant" if p >= 0.05 else "not significant after correction"
    if expected == "–":
        return "higher" if mean > 0 else "lower"
    as_expected = (mean > 0) == expected.endswith("above 0")
    if expected.startswith("half"):
        return "more than half" if as_expected else "less than half"
    return "as expected" if as_expected else "opposite"


def tested(claims: pd.DataFrame, sweeps: Sweeps) -> pd.DataFrame:
    """Return the claims with columns mean, here, "below 0", p, "p (Holm)" and verdict.

    Each family has a correction of its own.
    """
    values = [differences(claim, sweeps) for claim in claims.itertuples()]
    tests = claims.assign(here=list(map(shown, values)))
    tests["below 0"] = list(map(below, values))
    tests["mean"] = [of_seeds.mean() for of_seeds in values]
    tests["p"] = [p_value(of_seeds) for of_seeds in values]
    tests["p (Holm)"] = tests.groupby("family")["p"].transform(holm)
    columns = ["mean", "p", "p (Holm)", "expected"]
    tests["verdict"] = [verdict(*row) for row in tests[columns].itertuples(index=False)]
    return tests


# ---------------------------------------------------------------- tables
def described(claim) -> dict[str, str]:
    """Return the first cells of a claim's row."""
    others = f"mean of ({claim.others})" if " " in claim.others else claim.others
    both = claim.sweep, claim.others_sweep
    return {
        "family": claim.family,
        "runs": " − ".join(filter(None, both)),
        "difference": " − ".join(filter(None, (claim.methods, others))),
        "outcome": claim.outcome,
        "expected": claim.expected,
        "seeds": claim.seeds,
    }


def tests_table(tests: pd.DataFrame) -> pd.DataFrame:
    """Return tests as they are printed."""
    table = pd.DataFrame([described(test) for test in tests.itertuples()])
    for name in ("here", "below 0", "p", "p (Holm)", "verdict"):
        style = "{:.2g}" if name.startswith("p") else "{}"
        table[name] = tests[name].map(style.format).to_list()
    return table


def intervals_table(claims: pd.DataFrame, sweeps: Sweeps) -> pd.DataFrame:
    """Return whether intervals lie within what was expected, such as "1.8 to 2.2".

    That is a 90 % interval for the equivalence of two methods, which is compared with their
    effects on GRPO, and a 95 % interval for the level of one.
    """
    rows = []
    for claim in claims.itertuples():
        confidence = 0.9 if claim.others else 0.95
        mean, half = plot.interval(differences(claim, sweeps), confidence)
        least, most = map(float, claim.expected.split(" to "))
        within = least <= mean - half and mean + half <= most
        shown_as = "equivalent" if claim.others else "the paper's level"
        row = described(claim)
        row["interval"] = f"{mean - half:.3f} to {mean + half:.3f} ({confidence:.0%})"
        row["verdict"] = shown_as if within else "not shown"
        if claim.others:
            effects = [
                differences(claim._replace(methods=method, others="grpo@8"), sweeps).mean()
                for method in (claim.methods, claim.others)
            ]
            row["effect on grpo@8, first / second"] = f"{effects[0] / effects[1]:.0%}"
            row["margin / second's effect"] = f"{most / abs(effects[1]):.0%}"
        rows.append(row)
    return pd.DataFrame(rows).fillna("–")


def figures_table(paper: pd.DataFrame, tests: pd.DataFrame, sweeps: Sweeps) -> pd.DataFrame:
    """Return the paper's curves and ours, with the corrected test if it was pre-registered.

    A row may show two outcomes: "mean low and mean high".
    """
    key = ["seeds", "sweep", "outcome", "methods", "others"]
    corrected = tests.query("others_sweep == ''").set_index(key)["p (Holm)"]
    rows = []
    for claim in paper.assign(others_sweep="", pairs="").itertuples():
        here = []
        difference = []
        for outcome in claim.outcome.split(" and "):
            one = claim._replace(outcome=outcome)
            values = differences(one, sweeps)
            difference.append(shown(values) if claim.others else shown(values).partition(" ")[2])
            methods = filter(None, (claim.others, claim.methods))
            alone = [one._replace(methods=method, others="") for method in methods]
            here.append(" → ".join(f"{differences(level, sweeps).mean():.2f}" for level in alone))
        same = claim.expected
        if same in ("above 0", "below 0"):
            place = tuple(getattr(claim, name) for name in key)
            p = p_value(values)
            said = verdict(values.mean(), p, corrected.get(place, p), claim.expected)
            same = SAME.get(said, said) + (" †" if place not in corrected else "")
        rows.append(
            {
                "figure": claim.figure,
                "what": claim.curve,
                "paper": claim.paper,
                "here": " and ".join(here),
                "difference": " and ".join(difference),
                "same direction?": same,
            }
        )
    return pd.DataFrame(rows)


def levels_table(groups, columns: list[str]) -> pd.DataFrame:
    """Return the outcomes of groups of runs: a row per group, named in the first columns."""
    table = plot.levels(groups[columns])
    table = table.loc[:, (table != "–").any()]
    table.insert(0, "seeds", groups.size())
    if columns is LEVELS:
        table["below start"] = groups["gain"].agg(below)
    return table.reset_index()


def quick_start(runs_of: pd.DataFrame) -> pd.DataFrame:
    """Return mean (standard deviation) over seeds of the three methods that train.py trains."""
    groups = runs_of.rename(columns=QUICK_START)[QUICK_START.values()].groupby("method")
    cells = groups.mean().map("{:.3f}".format) + groups.std().map(" ({:.3f})".format)
    methods = [plot.START, "grpo@1", "grpo@8", "bapo@8"]
    return (
        cells.replace("nan (nan)", "–").loc[methods].reset_index(names="mean (standard deviation)")
    )


def levels_tables(sweeps: Sweeps) -> dict[str, pd.DataFrame]:
    """Return heading -> a table of levels."""
    fresh = sweeps["rate-2e-4"].query("seed >= 138")
    tables = {
        "Quick start: mean (standard deviation) over seeds 138 to 149 at 2e-4": quick_start(fresh)
    }
    for first, last in ((138, 149), (126, 137), (121, 125)):
        at_rates = of_rates(sweeps).query("@first <= seed <= @last")
        groups = at_rates.groupby(["learning rate", "method"])
        tables[f"The learning rate, seeds {first} to {last}"] = levels_table(groups, LEVELS)
    targets = of_targets(sweeps).groupby("rho0")
    tables["The target at 3e-4, seeds 121 to 125"] = levels_table(targets, LEVELS)
    for name in ("scope", "three-attempts", "target-0.42", "bounds", "partial"):
        measured = sweeps[name].query("seed < 121 or seed > 125").groupby("method")
        tables[f"The runs in {name}"] = levels_table(measured, LEVELS)
    for seeds, sweep in (("138 to 149", fresh), ("150 to 161", sweeps["scope"])):
        trained = sweep.query("method != @plot.START").groupby("method")
        norms_of = levels_table(trained, ["norm", *NORMS, LARGE, FIRST])
        tables[f"The gradient norm at 2e-4, seeds {seeds}"] = norms_of
    return tables


def page(results: Path) -> str:
    """Return the text of results/tables.md."""
    sweeps = read_sweeps(results)
    options = {"keep_default_na": False, "dtype": str}
    files = ("tests", "others", "paper")
    claims, others, paper = [
        pd.read_csv(ROOT / f"results/scripts/{name}.csv", **options) for name in files
    ]
    of_intervals = claims["expected"].str.contains(" to ")
    tests = tested(claims[~of_intervals], sweeps)
    figures = figures_table(paper, tests, sweeps)
    others = tested(others.assign(family=others.index, expected="–"), sweeps)
    tables = {
        "What reproduces": figures[paper["front"] == "yes"],
        "The paper's figures": figures,
        "The pre-registered tests": tests_table(tests),
        "The pre-registered intervals": intervals_table(claims[of_intervals], sweeps),
        "Other differences (†)": tests_table(others).drop(
            columns=["family", "expected", "p (Holm)"]
        ),
    }
    text = FIRST_LINES + "\n"
    for heading, table in (tables | levels_tables(sweeps)).items():
        text += f"\n## {heading}\n\n{plot.markdown(table)}"
    return text


if __name__ == "__main__":
    print(page(ROOT / "results"), end="")
