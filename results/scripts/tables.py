"""Print all tables of the pages from what is packed in results/.

    python -m results.scripts.tables > results/tables.md

Lists of comparisons: tests.csv has the pre-registered ones (results/protocol.md) and, with a † as
family, others that the pages quote; front.csv has the front page's table, paper.csv the paper's
curves.
"""

from pathlib import Path

import numpy as np
import pandas as pd
from scipy import stats

from results.scripts import outcomes
from results.scripts.outcomes import CLASSES, LANGUAGE_MODEL, MECHANISM, RESULTS, Packs, Sweeps
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
1. kl is that of a batch's last update. Several methods in a row stand for their mean.
"""
KEY = ["seeds", "sweep", "others_sweep", "outcome", "methods", "others"]  # what names a test
SAME = {"as expected": "same direction", "opposite": "opposite direction"}
WITHIN_BATCHES = ["smollm2", "smollm2-gpu", "fixed", "scope", "bounds"]
BY_END = ["smollm2", "smollm2-gpu", "fixed", "scope"]
LEVELS = ["reward", "entropy", "norm", "mean@4", "later reward", "mean@16", "pass@8", "kl"]
LEVELS += ["at start", "inside", "at end"]
PREDICTED = ["fall_at_0.6_1.2", "fall_at_0.8_1.2", "fall_at_0.8_1.5", "fall_at_0.9_3.0"]


# ---------------------------------------------------------------- statistics
def mean_of(sweep: pd.DataFrame, methods: str, outcome: str) -> pd.Series:
    """Return by seed the mean of an outcome over these methods."""
    by_method = sweep[outcome].unstack("method")
    return by_method[methods.split()].mean(axis=1, skipna=False)


def differences(claim, sweeps: Sweeps) -> pd.Series:
    """Return by seed the outcome of a claim's methods less that of the others, if there are any.

    Without seeds it has all that there are. With pairs it holds the mean of every two seeds,
    because the yoked runs exchanged their bounds within such pairs. Raises KeyError if a seed is
    missing.
    """
    values = mean_of(sweeps[claim.sweep], claim.methods, claim.outcome)
    if claim.others:
        sweep = sweeps[claim.others_sweep or claim.sweep]
        values = values - mean_of(sweep, claim.others, claim.outcome)
    values = values.dropna()
    if claim.seeds:
        first, last = map(int, claim.seeds.split("-"))
        values = values.loc[list(range(first, last + 1))]
    if claim.pairs:
        values = values.groupby(values.index // 2).mean()
    return values


def shown(values: pd.Series, digits: int = 3) -> str:
    """Return mean ± half of the 95 % interval. One value has no interval; without any it is –."""
    mean, half = plot.interval(values)
    if np.isnan(mean):
        return "–"
    cell = f"{mean:+.{digits}f}"
    if np.isnan(half):
        return cell
    return f"{cell} ± {half:.{digits}f}"


def below(values: pd.Series) -> str:
    """Return how many values are below 0: "1/8"."""
    return f"{(values < 0).sum()}/{values.count()}"


def holm(p_values: pd.Series) -> pd.Series:
    """Return Holm's correction."""
    ordered = p_values.sort_values()
    tests_left = np.arange(len(ordered), 0, -1)
    return (ordered * tests_left).cummax().clip(upper=1)


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
    """Return the claims with columns mean, difference, below_0, p and corrected.

    p is Student's, of a mean of 0. Each family has a correction of its own, and † has none.
    """
    rows = []
    for claim in claims.itertuples():
        values = differences(claim, sweeps)
        row = {"mean": values.mean(), "difference": shown(values), "below_0": below(values)}
        row["p"] = stats.ttest_1samp(values, 0).pvalue
        rows.append(row)
    tests = claims.join(pd.DataFrame(rows, claims.index))
    corrected = tests.groupby("family")["p"].transform(holm)
    without = tests["family"] == "†"
    return tests.assign(corrected=corrected.mask(without, tests["p"]))


# ---------------------------------------------------------------- tables of tests
def described(claim) -> dict[str, str]:
    """Return the first cells of a claim's row."""
    row = {"family": claim.family, "runs": claim.sweep, "seeds": claim.seeds}
    row["compared"] = claim.methods
    if claim.others_sweep:
        row["runs"] += f" − {claim.others_sweep}"
    if claim.others:
        row["compared"] += f" − {claim.others}"
    row["outcome"] = claim.outcome
    return row


def tests_table(tests: pd.DataFrame) -> pd.DataFrame:
    """Return tests as they are printed."""
    rows = []
    for test in tests.itertuples():
        row = described(test)
        row["difference"] = test.difference
        row["below 0"] = test.below_0
        row["p"] = f"{test.corrected:.2g}"
        row["verdict"] = verdict(test.mean, test.p, test.corrected, test.expected)
        rows.append(row)
    return pd.DataFrame(rows)


def intervals_table(claims: pd.DataFrame, sweeps: Sweeps) -> pd.DataFrame:
    """Return whether intervals lie within what was expected, such as "1.8 to 2.2".

    That is a 90 % interval for the equivalence of two methods, and a 95 % interval for the level
    of one.
    """
    rows = []
    for claim in claims.itertuples():
        confidence, said = (0.9, "equivalent") if claim.others else (0.95, "the paper's level")
        mean, half = plot.interval(differences(claim, sweeps), confidence)
        low = mean - half
        high = mean + half
        least, most = map(float, claim.expected.split(" to "))
        row = described(claim)
        row["expected"] = claim.expected
        row["interval"] = f"{low:.3f} to {high:.3f} ({confidence:.0%})"
        row["verdict"] = said if least <= low and high <= most else "not shown"
        rows.append(row)
    return pd.DataFrame(rows)


def figures_table(paper: pd.DataFrame, tests: pd.DataFrame, sweeps: Sweeps) -> pd.DataFrame:
    """Return the paper's curves and ours, a row each."""
    tests = tests.set_index(KEY)
    rows = []
    for claim in paper.itertuples():
        row = {"figure": claim.figure, "compared": claim.comparison, "quantity": claim.quantity}
        row["paper"] = claim.paper
        if claim.others:
            row["here"] = before_and_after(claim, sweeps)
            row["difference"] = tested_difference(claim, tests)
        else:
            row["here"] = levels_of(claim, sweeps)
            row["difference"] = claim.expected
        rows.append(row)
    return pd.DataFrame(rows)


def before_and_after(claim, sweeps: Sweeps) -> str:
    """Return the mean outcomes of the others and of the methods."""
    after = differences(claim._replace(others=""), sweeps).mean()
    before = after - differences(claim, sweeps).mean()
    return f"{before:.2f} → {after:.2f}"


def tested_difference(claim, tests: pd.DataFrame) -> str:
    """Return the claim's test, with the paper's sign as what was expected."""
    test = tests.loc[tuple(getattr(claim, name) for name in KEY)]
    said = verdict(test["mean"], test["p"], test["corrected"], claim.expected)
    cell = f"{test['difference']}, {SAME.get(said, said)}"
    return f"{cell} †" if test["family"] == "†" else cell


def levels_of(claim, sweeps: Sweeps) -> str:
    """Return the levels of one or two outcomes: "mean low and mean high"."""
    cells = []
    for outcome in claim.outcome.split(" and "):
        values = differences(claim._replace(outcome=outcome), sweeps)
        cells.append(shown(values).lstrip("+"))
    return " and ".join(cells)


# ---------------------------------------------------------------- tables of levels
def front_table(claims: pd.DataFrame, sweeps: Sweeps) -> pd.DataFrame:
    """Return GRPO's levels, and the differences from them."""
    cells = {}
    for claim in claims.itertuples():
        values = differences(claim, sweeps)
        cell = shown(values, 2) if claim.others else f"{values.mean():.2f}"
        cells.setdefault(claim.column, {})[claim.row] = cell
    return pd.DataFrame(cells).reset_index(names="")


def levels_table(sweeps: Sweeps, folders: list[str], columns: list[str]) -> pd.DataFrame:
    """Return mean outcomes of all runs: a row per folder and method."""
    runs = pd.concat({name: sweeps[name] for name in folders}, names=["runs"])
    groups = runs.groupby(["runs", "method"])
    cells = plot.levels(groups[columns])
    cells.insert(0, "seeds", groups.size())
    return cells.reset_index()


def by_update(packs: Packs) -> pd.DataFrame:
    """Return rho, and where BAPO's searches end. The columns are the updates of a batch."""
    folders = {name: packs[name].lines for name in ["smollm2", "rate-2e-4"]}
    lines = pd.concat(folders, names=["runs"]).query("step >= 3 and update > 0")
    lines = lines.query("method in ['grpo@8', 'bapo@8', 'bapo-main@8']")
    lines = lines.astype({"update": int}).rename(columns={"rho_start": "rho"})
    groups = ["runs", "method", "update"]
    means = lines.groupby(groups)[["rho"]].mean()
    means = means.join(outcomes.searches(lines, groups))
    cells = means.stack().dropna().map("{:.2f}".format)
    by_mean = cells.unstack("update").rename(columns=str)
    return by_mean.reset_index(names=["runs", "method", "mean"])


def shares_by_rho0(packs: Packs) -> pd.DataFrame:
    """Return where searches with other values of rho0 would have ended in updates of grpo@8."""
    reused = packs["measured"].lines.query("method == 'grpo@8' and step >= 3 and update > 1")
    columns = {}
    for rho0 in ["0.36", "0.38", "0.40", "0.42", "0.44", "0.46", "0.48"]:
        stay = reused[f"high_{rho0}"] == 1.2
        end = reused[f"low_{rho0}"] == 0.9
        columns[rho0] = [f"{stay.mean():.2f}", f"{end.mean():.2f}"]
    rows = [f"share of searches that {end}" for end in ["stay at [0.6, 1.2]", "end at [0.9, 3.0]"]]
    return pd.DataFrame(columns, rows).reset_index(names="rho0")


# ---------------------------------------------------------------- why entropy falls
def within_batches_table(sweeps: Sweeps) -> pd.DataFrame:
    """Return the mean change of entropy within a batch, and its difference from GRPO's."""
    tables = {}
    for name in WITHIN_BATCHES:
        changes = sweeps[name]["within a batch"].unstack("method").dropna(axis=1, how="all")
        apart = changes.sub(changes["grpo@8"], axis=0).drop(columns="grpo@8")
        table = changes.apply(shown, digits=4).to_frame("within a batch")
        table["− grpo@8"] = apart.apply(shown, digits=4)
        table["below 0"] = apart.apply(below)
        tables[name] = table.fillna("–")
    return pd.concat(tables, names=["runs", "method"]).reset_index()


def by_end_of_search(packs: Packs) -> pd.DataFrame:
    """Return BAPO's change of entropy within a batch by where the batch's searches ended."""
    batches = {}
    for name in BY_END:
        lines = packs[name].lines.query("method in ['bapo@8', 'bapo-main@8']")
        if name in LANGUAGE_MODEL:
            lines = lines.query("step <= 16")
        batches[name] = outcomes.where_searches_ended(lines)
    batches = pd.concat(batches, names=["runs"])
    groups = ["runs", "method", "searches"]
    of_runs = batches.groupby([*groups, "seed"])["change"].mean()
    table = batches.groupby(groups).size().to_frame("batches")
    table["within a batch"] = of_runs.groupby(groups).apply(shown, 4)
    return table.reset_index()


def classes_table(mechanism: dict[str, pd.DataFrame]) -> pd.DataFrame:
    """Return for every class of tokens what it is and what it does to entropy.

    fall: its part of Eqs. 6 and 7. lowers: how many updates, and groups of these, have a gradient
    that lowers entropy, among those that have tokens of the class.
    """
    rows = []
    for model, lines in mechanism.items():
        of_run = lines.select_dtypes("number").groupby(plot.RUN).mean()
        runs = f"{MECHANISM[model]}, {outcomes.seeds(lines)}"
        for name, label in CLASSES.items():
            row = {"runs": runs, "class": label}
            for column in ["share", "improbable", "probability", "fall"]:
                values = of_run[f"{column}_{name}"]
                row[column] = shown(values).lstrip("+")
            updates = lines[f"slope_{name}"]
            groups = lines[f"slopes_{name}"].dropna().str.split(";")
            groups = groups.explode().astype(float)
            row["lowers, updates"] = below(updates[updates != 0])
            row["lowers, groups"] = below(groups[groups != 0])
            rows.append(row)
    return pd.DataFrame(rows)


# ---------------------------------------------------------------- the page
def read_claims(name: str) -> pd.DataFrame:
    """Return a list of comparisons. Cells are texts, empty ones included."""
    return pd.read_csv(RESULTS / f"scripts/{name}.csv", keep_default_na=False, dtype=str)


def without_repeats(table: pd.DataFrame) -> pd.DataFrame:
    """Leave out a cell that repeats the one above it, if all cells to its left do."""
    repeated = table.eq(table.shift()).cummin(axis=1)
    return table.mask(repeated, "")


def page(results: Path) -> str:
    """Return the text of results/tables.md."""
    packs = outcomes.read_packs(results)
    sweeps = outcomes.read_sweeps(packs)
    mechanism = outcomes.read_mechanism(results)
    for model, lines in mechanism.items():
        of_runs = lines.select_dtypes("number").groupby(plot.RUN).mean()
        sweeps[f"mechanism/{model}"] = of_runs
    claims = read_claims("tests")
    of_intervals = claims["expected"].str.contains(" to ")
    tests = tested(claims[~of_intervals], sweeps)
    registered = tests["family"] != "†"
    paper = read_claims("paper")
    paper = paper[paper["sweep"].isin(sweeps)]
    levels = [name for name in packs if name != "measured"]
    tables = {
        "The front page's table": front_table(read_claims("front"), sweeps),
        "The paper's figures": figures_table(paper, tests, sweeps),
        "Change of entropy within a batch (†)": within_batches_table(sweeps),
        "The same for BAPO, by where its searches ended (†)": by_end_of_search(packs),
    }
    if mechanism:
        names = [f"mechanism/{model}" for model in mechanism]
        tables["Classes of tokens (†)"] = classes_table(mechanism)
        tables["Predicted fall of entropy by an update (†)"] = levels_table(
            sweeps, names, PREDICTED
        )
    tables |= {
        "The pre-registered tests (p by Holm)": tests_table(tests[registered]),
        "The pre-registered intervals": intervals_table(claims[of_intervals], sweeps),
        "Other differences (†)": tests_table(tests[~registered]),
        "Levels": levels_table(sweeps, levels, LEVELS),
        "By update of a batch, from batch 3 on": by_update(packs),
        "Where searches with another rho0 would have ended, toy": shares_by_rho0(packs),
    }
    text = FIRST_LINES
    for heading, table in tables.items():
        text += f"\n## {heading}\n\n{plot.markdown(without_repeats(table))}"
    return text


if __name__ == "__main__":
    print(page(RESULTS), end="")
