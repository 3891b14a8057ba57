"""Print all tables of the pages from what is packed in results/.

    python -m results.scripts.tables > results/tables.md

tests.csv holds the pre-registered tests (results/protocol.md), others.csv further differences that
the pages quote, and paper.csv the curves of the paper. Differences are paired by seed.
"""

from pathlib import Path

import numpy as np
import pandas as pd
from scipy import stats

from results.scripts import outcomes
from results.scripts.outcomes import CLASSES, LANGUAGE_MODEL, RESULTS, Packs, Sweeps
from support import plot

FIRST_LINES = """# All tables

`python -m results.scripts.tables` prints these tables of the runs in this folder, which
[README.md](README.md) explains. ± is half of Student's 95 % interval over seeds, and differences
are paired by seed. p-values are two-sided, and corrected by Holm's method within a family of
[protocol.md](protocol.md), which also defines the outcomes. What has a † is not pre-registered and
not corrected.

"As expected" means significant with the expected sign, "opposite" significant with the other one.
The expected sign is the paper's, or what earlier seeds had shown. In the table of the paper's
figures "same direction" means that a difference is significant and has the paper's sign. Changes of
entropy are negative where it falls. `bapo` on the toy has rho0 0.44, and `bapo-main` has 0.4.

Norm is the 95th percentile over all updates, and lowest entropy the lowest mean over 20 consecutive
steps. Mean bounds and shares of searches leave out each batch's first update, where every ratio is
1. kl is that of a batch's last update."""
SAME = {"as expected": "same direction", "opposite": "opposite direction"}
FIRST_SEEDS = (10, 18, 101, 121, 126, 138, 150, 162, 174)  # of the sets that were made together
WITHIN_BATCHES = ["smollm2", "smollm2-gpu", "fixed", "rate-2e-4", "scope", "bounds", "rate-1e-4"]
GRPO_AND_BAPO = ["grpo@8", "bapo@8", "bapo-main@8"]
WITH_INTERVAL = ["reward", "entropy", "norm", "mean@16", "pass@8"]
LEVELS = [*WITH_INTERVAL, "kl", "mean low", "mean high", "at start", "at end", "rho, lag 1"]
LANGUAGE_LEVELS = ["reward", "entropy", "norm", "mean@4", "later reward", *LEVELS[5:]]
LANGUAGE_LEVELS += ["later, no update", "norm above 1", "rho, first updates"]


# ---------------------------------------------------------------- statistics
def mean_of(sweep: pd.DataFrame, methods: str) -> pd.DataFrame:
    """Return by seed the mean of all outcomes over these methods."""
    runs_of = [sweep.xs(method, level="method") for method in methods.split()]
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


def shown(values: pd.Series, digits: int = 3) -> str:
    """Return mean ± half of the 95 % interval. One value has none."""
    mean, half = plot.interval(values)
    return f"{mean:+.{digits}f} ± {half:.{digits}f}".removesuffix(" ± nan")


def below(values: pd.Series) -> str:
    """Return how many values are below 0: "1/8"."""
    return f"{(values < 0).sum()}/{values.count()}"


def p_value(values: pd.Series) -> float:
    """Return Student's two-sided p-value of a mean of 0."""
    return stats.ttest_1samp(values, 0).pvalue


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
    """Return the claims with columns difference, "below 0", p, "p (Holm)" and verdict.

    Each family has a correction of its own.
    """
    values = [differences(claim, sweeps) for claim in claims.itertuples()]
    means = [of_seeds.mean() for of_seeds in values]
    tests = claims.assign(p=[p_value(of_seeds) for of_seeds in values])
    tests["difference"] = [shown(of_seeds) for of_seeds in values]
    tests["below 0"] = list(map(below, values))
    tests["p (Holm)"] = tests.groupby("family")["p"].transform(holm)
    rows = zip(means, tests["p"], tests["p (Holm)"], tests["expected"])
    tests["verdict"] = [verdict(*row) for row in rows]
    return tests


# ---------------------------------------------------------------- tables of tests
def described(claim) -> dict[str, str]:
    """Return the first cells of a claim's row."""
    others = f"mean of ({claim.others})" if " " in claim.others else claim.others
    folders = " − ".join(filter(None, (claim.sweep, claim.others_sweep)))
    return {
        "family": claim.family,
        "runs": f"{folders}, {claim.seeds}",
        "compared": " − ".join(filter(None, (claim.methods, others))),
        "outcome": claim.outcome,
    }


def without_repeats(table: pd.DataFrame, columns: list[str]) -> pd.DataFrame:
    """Leave out a cell that repeats the one above it, if all cells to its left do."""
    repeated = table[columns].eq(table[columns].shift()).cummin(axis=1)
    return table.assign(**table[columns].mask(repeated, ""))


def tests_table(tests: pd.DataFrame, p: str) -> pd.DataFrame:
    """Return tests as they are printed, with the column p of p-values."""
    table = pd.DataFrame([described(test) for test in tests.itertuples()], tests.index)
    table[["difference", "below 0"]] = tests[["difference", "below 0"]]
    table[p] = tests[p].map("{:.2g}".format)
    table["verdict"] = tests["verdict"]
    return without_repeats(table, ["family", "runs", "compared"])


def intervals_table(claims: pd.DataFrame, sweeps: Sweeps) -> pd.DataFrame:
    """Return whether intervals lie within what was expected, such as "1.8 to 2.2".

    That is a 90 % interval for the equivalence of two methods, and a 95 % interval for the level
    of one. A margin is also shown as a share of what the second method changes in GRPO.
    """
    rows = []
    for claim in claims.itertuples():
        confidence = 0.9 if claim.others else 0.95
        values = differences(claim, sweeps)
        low, high = stats.ttest_1samp(values, 0).confidence_interval(confidence)
        least, most = map(float, claim.expected.split(" to "))
        within = least <= low and high <= most
        row = described(claim) | {"expected": claim.expected}
        row["interval"] = f"{low:.3f} to {high:.3f} ({confidence:.0%})"
        row["margin / effect"] = "–"
        if claim.others:
            second = claim._replace(methods=claim.others, others="grpo@8", others_sweep=claim.sweep)
            second = second._replace(sweep=claim.others_sweep or claim.sweep)
            row["margin / effect"] = f"{most / abs(differences(second, sweeps).mean()):.0%}"
        said = "equivalent" if claim.others else "the paper's level"
        row["verdict"] = said if within else "not shown"
        rows.append(row)
    return pd.DataFrame(rows)


def figures_table(paper: pd.DataFrame, tests: pd.DataFrame, sweeps: Sweeps) -> pd.DataFrame:
    """Return the paper's curves and ours, a row each.

    A row has the corrected test if it was pre-registered. One of levels, without a second method,
    may have two outcomes: "mean low and mean high".
    """
    key = ["seeds", "sweep", "outcome", "methods", "others"]
    corrected = tests.query("others_sweep == ''").set_index(key)["p (Holm)"]
    rows = []
    for claim in paper.assign(others_sweep="", pairs="").itertuples():
        row = {"figure": claim.figure, "compared": claim.comparison, "quantity": claim.quantity}
        row["paper"] = claim.paper or "–"
        levels = claim._replace(others="")
        if claim.others:
            before = differences(levels._replace(methods=claim.others), sweeps).mean()
            values = differences(claim, sweeps)
            row["here"] = f"{before:.2f} → {differences(levels, sweeps).mean():.2f}"
            place = tuple(getattr(claim, name) for name in key)
            p = p_value(values)
            said = verdict(values.mean(), p, corrected.get(place, p), claim.expected)
            dagger = "" if place in corrected else " †"
            row["difference"] = f"{shown(values)}, {SAME.get(said, said)}{dagger}"
        else:
            of_outcomes = [levels._replace(outcome=name) for name in claim.outcome.split(" and ")]
            shown_levels = [shown(differences(one, sweeps)).lstrip("+") for one in of_outcomes]
            row["here"] = " and ".join(shown_levels)
            row["difference"] = claim.expected
        rows.append(row)
    return without_repeats(pd.DataFrame(rows), ["figure", "compared"])


# ---------------------------------------------------------------- tables of levels
def front_table(claims: pd.DataFrame, sweeps: Sweeps) -> pd.DataFrame:
    """Return levels, with the difference from grpo@8 at the usual rate in brackets."""
    cells = {}
    for claim in claims.itertuples():
        cell = f"{differences(claim._replace(others=''), sweeps).mean():.3f}"
        if claim.others:
            cell += f" ({shown(differences(claim, sweeps))})"
        cells.setdefault(claim.column, {})[claim.row] = cell
    return pd.DataFrame(cells).reset_index(names="")


def levels_table(sweeps: Sweeps, folders: list[str], columns: list[str]) -> pd.DataFrame:
    """Return mean outcomes of all runs: a row per folder, set of seeds and method.

    The first five outcomes also have an interval.
    """
    every = pd.concat({name: sweeps[name] for name in folders}, names=["runs"]).reset_index("seed")
    groups = every.groupby(["runs", np.digitize(every["seed"], FIRST_SEEDS), "method"])
    mean, half = plot.interval(groups[columns])
    cells = mean.map("{:.3f}".format)
    with_half = columns[: len(WITH_INTERVAL)]
    cells[with_half] += half[with_half].map(" ± {:.3f}".format)
    cells = cells.replace(" ± nan", "", regex=True).replace("nan", "")
    cells.insert(0, "seeds", groups["seed"].agg(lambda of: f"{of.min()}–{of.max()}"))
    cells = cells.droplevel(1).reset_index().drop_duplicates(["seeds", "method", columns[3]])
    return without_repeats(cells, ["runs"])


def by_update(packs: Packs) -> pd.DataFrame:
    """Return what GRPO's and BAPO's updates see and find: columns are updates of a batch."""
    names = ["smollm2", "smollm2-gpu", "fixed"]
    lines = pd.concat({name: packs[name].lines for name in names}, names=["runs"])
    lines = lines.query("step >= 3 and update > 0 and method in @GRPO_AND_BAPO")
    lines = lines[(lines["step"] <= 16) | lines.index.isin(["fixed"], level="runs")]
    clipped = lines["clip_fraction_low"] + lines["clip_fraction_high"]
    lines = lines.rename(columns={"rho_start": "rho"}).assign(clipped=clipped)
    groups = ["runs", "method", "update"]
    lines = lines.astype({"update": int})
    means = lines.groupby(groups)[["rho", "clipped"]].mean()
    means = means.join(outcomes.searches(lines, groups)[["at start", "at end"]])
    cells = means.stack().dropna().map("{:.3f}".format).unstack("update").rename(columns=str)
    return without_repeats(cells.reset_index(names=["runs", "method", "mean"]), ["runs", "method"])


def shares_by_rho0(packs: Packs) -> pd.DataFrame:
    """Return where searches with other values of rho0 would have ended in updates of grpo@8."""
    reused = packs["measured"].lines.query("method == 'grpo@8' and step >= 3 and update > 1")
    columns = {}
    for name in reused.filter(regex=r"^low_0\."):
        rho0 = name.removeprefix("low_")
        columns[rho0] = {
            "stay at [0.6, 1.2]": (reused[f"high_{rho0}"] == 1.2).mean(),
            "end at [0.9, 3.0]": (reused[name] == 0.9).mean(),
        }
    return pd.DataFrame(columns).map("{:.2f}".format).reset_index(names="share of searches, rho0")


# ---------------------------------------------------------------- why entropy falls
def within_batches_table(sweeps: Sweeps) -> pd.DataFrame:
    """Return the mean change of entropy within a batch, and its difference from GRPO's.

    Beside it stand its sum over a run and the change of the rollouts' entropy.
    """
    tables = {}
    for name, sweep in sweeps.items():
        runs = sweep.drop([plot.START, "grpo@1"], level="method", errors="ignore")
        changes = runs["within a batch"].unstack("method")
        apart = changes.sub(changes["grpo@8"], axis=0)
        table = pd.DataFrame({"within a batch": changes.apply(shown, digits=4)})
        table["− grpo@8"] = apart.apply(shown, digits=4)
        table["below 0"] = apart.apply(below)
        sums = runs[["sum within batches", "rollouts' entropy"]].groupby("method").mean()
        tables[name] = table.join(sums.map("{:+.3f}".format))
        tables[name].loc["grpo@8", ["− grpo@8", "below 0"]] = "–"
    every = pd.concat(tables, names=["runs", "method"])
    return without_repeats(every.reset_index(), ["runs"])


def by_end_of_search(packs: Packs) -> pd.DataFrame:
    """Return BAPO's change of entropy within a batch by where the batch's searches ended."""
    tables = {}
    for name in ("smollm2", "smollm2-gpu", "fixed", "scope"):
        lines = packs[name].lines.query("method in @GRPO_AND_BAPO[1:]")
        if name in LANGUAGE_MODEL:
            lines = lines.query("step <= 16")
        tables[name] = outcomes.where_searches_ended(lines)
    batches = pd.concat(tables, names=["runs"])
    groups = ["runs", "method", "searches"]
    change = batches.groupby([*groups, "seed"])["change"].mean().groupby(groups).apply(shown, 4)
    counts = batches.groupby(groups).size()
    share = (counts / counts.groupby(groups[:2]).transform("sum")).map("{:.2f}".format)
    table = pd.DataFrame({"share of batches": share, "within a batch": change}).reset_index()
    return without_repeats(table, groups[:2])


def classes_table(mechanism: dict[str, pd.DataFrame]) -> pd.DataFrame:
    """Return for every class of tokens what it is and what it does to entropy.

    fall: its part of Eqs. 6 and 7. lowers: how many updates, and groups of these, have a gradient
    that lowers entropy, among those that have tokens of the class.
    """
    rows = []
    for model, lines in mechanism.items():
        of_run = lines.select_dtypes("number").groupby(plot.RUN).mean()
        for name, label in CLASSES.items():
            row = {"model": model, "class": label}
            for column in ("share", "improbable", "probability", "fall"):
                row[column] = shown(of_run[f"{column}_{name}"].dropna()).lstrip("+")
            slopes = lines[f"slope_{name}"].dropna()
            groups = lines[f"slopes_{name}"].dropna().str.split(";").explode().astype(float)
            row["lowers, updates"] = below(slopes[slopes != 0])
            row["lowers, groups"] = below(groups[groups != 0])
            rows.append(row)
    return without_repeats(pd.DataFrame(rows), ["model"])


def predicted_table(mechanism: dict[str, pd.DataFrame]) -> pd.DataFrame:
    """Return the predicted fall of entropy by an update, at other bounds on the same ratios."""
    rows = []
    for model, lines in mechanism.items():
        falls = lines.filter(like="fall_at_").groupby(plot.RUN).mean()
        falls.columns = falls.columns.str.removeprefix("fall_at_").str.replace("_", " to ")
        rows.append({"model": model} | falls.apply(shown).to_dict())
    return pd.DataFrame(rows)


def page(results: Path) -> str:
    """Return the text of results/tables.md."""
    packs = outcomes.read_packs(results)
    sweeps = outcomes.read_sweeps(packs)
    mechanism = outcomes.read_mechanism(results)
    for model, lines in mechanism.items():
        sweeps[f"mechanism/{model}"] = lines.select_dtypes("number").groupby(plot.RUN).mean()
    options = {"keep_default_na": False, "dtype": str}
    front, claims, others, paper = [
        pd.read_csv(RESULTS / f"scripts/{name}.csv", **options)
        for name in ("front", "tests", "others", "paper")
    ]
    of_intervals = claims["expected"].str.contains(" to ")
    tests = tested(claims[~of_intervals], sweeps)
    others = tested(others.assign(family=others.index, expected="–"), sweeps)
    toy = [name for name in packs if name not in (*LANGUAGE_MODEL, "measured")]
    tables = {
        "The front page's table": front_table(front, sweeps),
        "The paper's figures": figures_table(paper, tests, sweeps),
        "Change of entropy within a batch (†)": within_batches_table(
            {name: sweeps[name] for name in WITHIN_BATCHES}
        ),
        "The same for BAPO, by where its searches ended (†)": by_end_of_search(packs),
    }
    if mechanism:
        tables["Classes of tokens (†)"] = classes_table(mechanism)
        tables["Predicted fall of entropy by an update (†)"] = predicted_table(mechanism)
    tables |= {
        "The pre-registered tests": tests_table(tests, "p (Holm)"),
        "The pre-registered intervals": intervals_table(claims[of_intervals], sweeps),
        "Other differences (†)": tests_table(others, "p").drop(columns="family"),
        "The language model's runs": levels_table(sweeps, [*LANGUAGE_MODEL], LANGUAGE_LEVELS),
        "The toy's runs": levels_table(sweeps, toy, LEVELS),
        "By update of a batch, from batch 3 on": by_update(packs),
        "Where searches with another rho0 would have ended, toy": shares_by_rho0(packs),
    }
    text = FIRST_LINES + "\n"
    for heading, table in tables.items():
        text += f"\n## {heading}\n\n{plot.markdown(table)}"
    return text


if __name__ == "__main__":
    print(page(RESULTS), end="")
