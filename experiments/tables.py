"""Print all tables of the pages from what is packed in results/.

    python experiments/tables.py > results/tables.md

tests.csv holds the pre-registered tests (results/protocol.md), paper.csv the curves of the paper.
Differences are paired by seed.
"""

import sys
from pathlib import Path

import numpy as np
import pandas as pd
from scipy import stats

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT))

import plot
import runs
from bapo import PAPER_MAIN

FIRST_LINES = """# All tables

`python experiments/tables.py` prints these tables of the runs in this folder, which
[README.md](README.md) explains. ± is half of Student's 95 % interval over seeds. All p-values are
two-sided. [protocol.md](protocol.md) defines the outcomes and the pre-registered tests; p (Holm) is
corrected within a family. A verdict with † is not pre-registered and not corrected. "Reproduced"
means significant with the expected sign. That is the paper's sign but for reward and mean@16 of
family A at 1e-4, where reuse was expected to help.

Lowest entropy is the lowest mean over 20 consecutive steps. Shares of updates and mean bounds leave
out each batch's first update, where every ratio is 1. kl is that of a batch's last update. Updates
at start, inside and at end are those whose bounds lie there in the range of the search."""
TARGET = 0.44  # rho0 of bapo in the sweeps over the learning rate
MARGINS = {"entropy": 0.03, "norm": 0.05, "pass@8": 0.05}  # of family E, for equivalence
SHORT = {"gradient norm": "norm", "positive share": "share"}
TRAINING = ["entropy", "lowest entropy", "norm", "share", "reward", "mean@16", "pass@8"]
BOUNDS = ["kl", "mean low", "mean high", "updates at start", "updates inside", "updates at end"]
MEANS = ["updates at start", "updates at end", "reached", "length_correct", "length_wrong"]

# folder -> a row per method and seed, a column per outcome
Sweeps = dict[str, pd.DataFrame]


# ---------------------------------------------------------------- outcomes
def read_sweeps(results: Path) -> Sweeps:
    """Return the outcomes of every packed folder."""
    sweeps = {}
    for path in sorted(results.glob("*/runs.json")):
        config = runs.read_json(path)["config"]
        sweep = outcomes(plot.load(path.parent))
        sweep["learning rate"] = plot.rate_name(config["learning_rate"])
        sweep["rho0"] = config["rho0"]
        sweeps[path.parent.name] = sweep
    return sweeps


def outcomes(found: plot.Runs) -> pd.DataFrame:
    """Return for every run what the tables show and what the .csv files name."""
    numbers = plot.outcomes(found).rename(columns=SHORT)
    numbers["lowest entropy"] = plot.by_step(found.lines, "entropy").rolling(20).mean().min()
    before = numbers.loc[plot.START, "mean@16"]
    numbers["gain"] = numbers["mean@16"].sub(before, level="seed")
    trained = found.lines.query("update > 0")
    searched = trained.index.get_level_values("method").str.startswith(("bapo", "yoked"))
    # The ranges of all searches begin and end there. The upper bound moves first.
    at_start = trained["high"] == PAPER_MAIN.high_start
    at_end = trained["low"] == PAPER_MAIN.low_max
    trained["updates at start"] = at_start.astype(float).where(searched)
    trained["updates at end"] = at_end.astype(float).where(searched)
    of_batch = trained.groupby([*plot.RUN, "step"])
    # Only between updates on one batch, whose tokens are the same.
    trained["fall"] = of_batch["entropy_now"].diff(-1)
    numbers = numbers.join(trained.query("update > 1").groupby(plot.RUN)[MEANS[:3]].mean())
    numbers = numbers.join(trained.groupby(plot.RUN)[MEANS[3:]].mean())
    numbers["kl"] = of_batch["kl"].last().groupby(plot.RUN).mean()
    numbers["updates inside"] = 1 - numbers["updates at start"] - numbers["updates at end"]
    numbers["negative share − 0.5"] = 0.5 - numbers["share"]
    numbers["longer"] = numbers["length_wrong"] - numbers["length_correct"]
    ranks = trained.groupby(plot.RUN)[["predicted_entropy_fall", "fall"]].corr("spearman")
    numbers["rank"] = ranks["fall"].xs("predicted_entropy_fall", level=-1)
    return numbers


def mean_of(sweep: pd.DataFrame, methods: str) -> pd.DataFrame:
    """Return by seed the mean of all outcomes over these methods."""
    numbers = sweep.select_dtypes("number")
    runs_of = [numbers.query("method == @name").droplevel("method") for name in methods.split()]
    return sum(runs_of) / len(runs_of)


def seeds_of(claim) -> range:
    """Return the seeds of a row of a .csv: "138-149"."""
    first, last = claim.seeds.split("-")
    return range(int(first), int(last) + 1)


def differences(claim, sweeps: Sweeps) -> pd.Series:
    """Return by seed the outcome of a claim's methods less that of the others, if there are any.

    With pairs it holds the mean of every two seeds, because the yoked runs exchanged their bounds
    within such pairs. Raises KeyError if a seed is missing.
    """
    values = mean_of(sweeps[claim.sweep], claim.methods)[claim.outcome]
    if claim.others:
        others = sweeps[claim.others_sweep or claim.sweep]
        values = values - mean_of(others, claim.others)[claim.outcome]
    values = values.dropna().loc[list(seeds_of(claim))]
    return values.groupby(values.index // 2).mean() if claim.pairs else values


def below(gains: pd.Series) -> str:
    """Return how many runs end below the accuracy before training: "1 of 8"."""
    return f"{(gains < 0).sum()} of {len(gains)}"


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
    return "reproduced" if as_expected else "reversed"


def tested(claims: pd.DataFrame, sweeps: Sweeps) -> pd.DataFrame:
    """Return the claims with columns mean, here, p, "p (Holm)" and verdict.

    Each family has a correction of its own.
    """
    values = [differences(claim, sweeps) for claim in claims.itertuples()]
    tests = claims.assign(here=list(map(shown, values)))
    tests["mean"] = [of_seeds.mean() for of_seeds in values]
    tests["p"] = [p_value(of_seeds) for of_seeds in values]
    tests["p (Holm)"] = tests.groupby("family")["p"].transform(holm)
    columns = ["mean", "p", "p (Holm)", "expected"]
    tests["verdict"] = [verdict(*row) for row in tests[columns].itertuples(index=False)]
    return tests


# ---------------------------------------------------------------- tables
def tests_table(tests: pd.DataFrame) -> pd.DataFrame:
    """Return the pre-registered tests as they are printed."""
    rows = []
    for test in tests.itertuples():
        first = " ".join(test.methods.split())
        second = test.others if " " not in test.others else f"mean of ({test.others})"
        where = f"{test.sweep} − {test.others_sweep}" if test.others_sweep else test.sweep
        rows.append(
            {
                "family": test.family,
                "runs": where,
                "difference": f"{first} − {second}",
                "outcome": test.outcome,
                "expected": test.expected,
                "seeds": test.seeds,
                "here": test.here,
            }
        )
    table = pd.DataFrame(rows)
    for name in ("p", "p (Holm)"):
        table[name] = tests[name].map("{:.2g}".format).to_list()
    table["verdict"] = tests["verdict"].to_list()
    return table


def equivalence_table(sweeps: Sweeps) -> pd.DataFrame:
    """Return family E's second half: is 0.9-3.0@8 equivalent to bapo@8 at 2e-4?"""
    columns = {"seeds": "138-149", "sweep": "rate-2e-4", "others_sweep": "", "pairs": ""}
    claims = pd.DataFrame({"outcome": list(MARGINS), "methods": "0.9-3.0@8", "others": "bapo@8"})
    rows = []
    for claim in claims.assign(**columns).itertuples():
        values = differences(claim, sweeps)
        mean, half = plot.interval(values, 0.9)
        within = abs(mean) + half < MARGINS[claim.outcome]
        rows.append(
            {
                "difference at 2e-4": f"{claim.methods} − {claim.others}",
                "outcome": claim.outcome,
                "90 % interval": f"{mean - half:+.3f} to {mean + half:+.3f}",
                "margin": f"±{MARGINS[claim.outcome]}",
                "verdict": "equivalent" if within else "not shown",
            }
        )
    return pd.DataFrame(rows)


def figures_table(paper: pd.DataFrame, tests: pd.DataFrame, sweeps: Sweeps) -> pd.DataFrame:
    """Return the paper's curves and ours, with the pre-registered verdict if there is one."""
    key = ["seeds", "sweep", "outcome", "methods", "others"]
    corrected = tests.query("others_sweep == ''").set_index(key)["verdict"]
    claims = tested(paper.assign(family=paper.index, others_sweep="", pairs=""), sweeps)
    rows = []
    for claim in claims.itertuples():
        place = tuple(getattr(claim, name) for name in key)
        said = corrected.get(place, f"{claim.verdict} †")
        if claim.expected == "higher":  # than in the paper: a level, no difference to test
            said = "higher †"
        methods = [name for name in (claim.others, claim.methods) if name]
        here = [
            f"{differences(claim._replace(methods=name, others=''), sweeps).mean():.2f}"
            for name in methods
        ]
        rows.append(
            {
                "figure": claim.figure,
                "curve": claim.curve,
                "paper": claim.paper,
                "here": " → ".join(here),
                "difference": claim.here if claim.others else claim.here.partition(" ")[2],
                "verdict": said,
            }
        )
    return pd.DataFrame(rows)


def levels_table(groups) -> pd.DataFrame:
    """Return the outcomes of groups of runs: a row per group, named in the first columns."""
    table = plot.levels(groups[[*TRAINING, *BOUNDS]])
    table = table.loc[:, (table != "–").any()]
    table.insert(0, "seeds", groups.size())
    table["below start"] = groups["gain"].agg(below)
    return table.reset_index()


def groups_of(sweeps: Sweeps) -> dict[str, object]:
    """Return heading -> the runs of a table of levels, grouped by its rows."""
    rates = pd.concat([sweeps[name] for name in sweeps if name.startswith("rate-")])
    by_rate = ["learning rate", "method"]
    targets = [sweeps[name] for name in sweeps if name.startswith("target-")]
    targets.append(sweeps["rate-3e-4"])
    choosing = pd.concat(targets).query("method == 'bapo@8' and 121 <= seed <= 125")
    groups = {
        "Seeds 138 to 149": rates.query("seed >= 138").groupby(by_rate),
        "Seeds 126 to 137": rates.query("126 <= seed <= 137").groupby(by_rate),
        "The learning rate, seeds 121 to 125": rates.query("121 <= seed <= 125").groupby(by_rate),
        "The target at 3e-4, seeds 121 to 125": choosing.groupby("rho0"),
    }
    for name in ("three-attempts", "target-0.42", "bounds", "partial"):
        measured = sweeps[name].query("seed < 121 or seed > 125")
        groups[f"The runs in {name}"] = measured.groupby("method")
    return groups


def page(results: Path) -> str:
    """Return the text of results/tables.md."""
    sweeps = read_sweeps(results)
    options = {"keep_default_na": False, "dtype": str}
    tests = tested(pd.read_csv(ROOT / "experiments/tests.csv", **options), sweeps)
    paper = pd.read_csv(ROOT / "experiments/paper.csv", **options)
    figures = figures_table(paper, tests, sweeps)
    front = figures[paper["front"] == "yes"]
    tables = {
        "What reproduces": front,
        "The paper's figures": figures,
        "The pre-registered tests": tests_table(tests),
        "Family E: equivalence": equivalence_table(sweeps),
    }
    for heading, groups in groups_of(sweeps).items():
        tables[heading] = levels_table(groups)
    lines = [FIRST_LINES]
    for heading, table in tables.items():
        lines += ["", f"## {heading}", "", *plot.markdown(table)]
    return "\n".join(lines)


if __name__ == "__main__":
    print(page(ROOT / "results"))
