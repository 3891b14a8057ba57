"""Print all tables of the pages from what is packed in results/.

    python -m results.scripts.tables > results/tables.md

Lists of comparisons: tests.csv and intervals.csv have the pre-registered ones
(results/protocol.md), tests.csv also others that the pages quote, with a † as family. pages.csv has
the tables of README.md and results/README.md, paper.csv the paper's curves. Their columns: methods
(several stand for their mean) of the runs in the folder sweep are compared with the others, of
others_sweep or of the same folder.
"""

import numpy as np
import pandas as pd
from scipy import stats

from results.scripts import outcomes
from results.scripts.outcomes import CLASSES, RESULTS, Packs, Sweeps
from support import plot

FIRST_LINES = """# All tables

`python -m results.scripts.tables` prints these tables of the runs in this folder, which
[README.md](README.md) explains. ± is half of Student's 95 % interval over seeds, and differences
are paired by seed. p-values are two-sided, and corrected by Holm's method within a family of
[protocol.md](protocol.md), which also defines the outcomes. What has a † is not pre-registered and
not corrected.

A difference is that of `methods` less `others`, of the same runs unless another folder is named.
Several methods stand for their mean. "Same direction" means significant with the expected sign,
"opposite direction" significant with the other one. The expected sign is the paper's, or what
earlier seeds had shown; in the table of the paper's figures it is the paper's.
Changes of entropy are negative where it falls. `bapo` on the toy has rho0 0.44, and `bapo-main` has
0.4. A class of tokens has a ● for each of [0.6, 1.2], [0.8, 1.2] and [0.9, 3.0] that lets it
through.

The gradient norm is the 95th percentile over all updates, and lowest entropy the lowest mean over
20 consecutive steps. Bounds, gradient_share and shares of searches leave out each batch's first
update, where every ratio is 1. kl is that of a batch's last update. On SmolLM2 bounds, searches and
kl are those of batches 3 to 16, but in the table of large steps those of all batches.
"""
LEVELS_OF = ["rate-2e-4", "scope", "smollm2", "smollm2-gpu", "smollm2-larger-step"]
LEVELS = ["later reward", "kl", "rho at ratio 1"]
LEVELS += ["never leave [0.6, 1.2]", "end between", "end at [0.9, 3.0]"]
MECHANISM = ["mechanism/smollm2", "mechanism/toy", "large-steps"]
PREDICTED = ["fall_at_0.6_1.2", "fall_at_0.8_1.2", "fall_at_0.8_1.5", "fall_at_0.9_3.0"]


# ---------------------------------------------------------------- statistics
def of_seeds(claim, sweep: pd.DataFrame, methods: str) -> pd.Series:
    """Return by seed the claim's outcome, the mean of these methods.

    Raises KeyError if one of the claim's seeds is missing.
    """
    by_method = sweep[claim.outcome].unstack("method")[methods.split()]
    values = by_method.mean(axis=1, skipna=False).dropna()
    first, last = map(int, claim.seeds.split("-"))
    return values.loc[list(range(first, last + 1))]


def differences(claim, sweeps: Sweeps) -> pd.Series:
    """Return by seed the outcome of a claim's methods less that of the others, if there are any."""
    values = of_seeds(claim, sweeps[claim.sweep], claim.methods)
    if claim.others:
        sweep = sweeps[claim.others_sweep or claim.sweep]
        values = values - of_seeds(claim, sweep, claim.others)
    if claim.others == "yoked@8":
        # These runs exchanged their bounds within pairs of seeds, so the sample is the pairs.
        values = values.groupby(values.index // 2).mean()
    return values


def shown(values: pd.Series, digits: int = 3) -> str:
    """Return mean ± half of the 95 % interval. One value has no interval; without any it is –."""
    mean, half = plot.interval(values)
    cell = f"{mean:+.{digits}f} ± {half:.{digits}f}"
    return cell.replace(" ± nan", "").replace("+nan", "–")


def below(values: pd.Series) -> str:
    """Return how many values are below 0: "1/8"."""
    return f"{(values < 0).sum()}/{values.count()}"


def holm(p_values: pd.Series) -> pd.Series:
    """Return Holm's correction."""
    ordered = p_values.sort_values()
    tests_left = np.arange(len(ordered), 0, -1)
    return (ordered * tests_left).cummax().clip(upper=1)


def tested(claims: pd.DataFrame, sweeps: Sweeps) -> pd.DataFrame:
    """Return the claims with the columns mean, difference, p and corrected.

    p is Student's, of a mean of 0. Each family has a correction of its own, and † has none.
    """
    values = [differences(claim, sweeps) for claim in claims.itertuples()]
    tests = claims.assign(
        mean=[one.mean() for one in values],
        difference=[shown(one) for one in values],
        p=[stats.ttest_1samp(one, 0).pvalue for one in values],
    )
    corrected = tests.groupby("family")["p"].transform(holm)
    return tests.assign(corrected=corrected.mask(tests["family"] == "†", tests["p"]))


def verdict(test, expected: str) -> str:
    """Return what a test says of a difference that was expected "above 0", "below 0" or "–".

    "half: above 0" is a comparison with the midpoint of two methods.
    """
    if test.corrected >= 0.05:
        return "not significant" if test.p >= 0.05 else "not significant after correction"
    if expected == "–":
        return "higher" if test.mean > 0 else "lower"
    same = (test.mean > 0) == expected.endswith("above 0")
    if expected.startswith("half"):
        return "more than half" if same else "less than half"
    return "same direction" if same else "opposite direction"


# ---------------------------------------------------------------- tables of comparisons
def name_others(claims: pd.DataFrame) -> pd.DataFrame:
    """Return the claims with the folder of the others, if it is not `sweep`, beside their names."""
    named = claims["others"].where(
        claims["others_sweep"] == "", claims["others"] + " of " + claims["others_sweep"]
    )
    return claims.assign(others=named).drop(columns="others_sweep")


def tests_table(tests: pd.DataFrame) -> pd.DataFrame:
    """Return tests as they are printed, with the corrected p."""
    table = name_others(tests).drop(columns=["mean", "corrected"])
    table["p"] = tests["corrected"].map("{:.2g}".format)
    table["verdict"] = [verdict(test, test.expected) for test in tests.itertuples()]
    return table


def intervals_table(claims: pd.DataFrame, sweeps: Sweeps) -> pd.DataFrame:
    """Return whether the whole intervals lie within what was registered."""
    intervals = []
    verdicts = []
    for claim in claims.itertuples():
        test = stats.ttest_1samp(differences(claim, sweeps), 0)
        low, high = test.confidence_interval(float(claim.confidence))
        within = float(claim.least) <= low and high <= float(claim.most)
        intervals.append(f"{low:.3f} to {high:.3f}")
        verdicts.append(claim.if_within if within else f"not shown: {claim.if_within}")
    bands = claims["least"] + " to " + claims["most"]
    table = name_others(claims).drop(columns=["least", "most", "if_within"])
    return table.assign(band=bands, interval=intervals, verdict=verdicts)


def figures_table(paper: pd.DataFrame, tests: pd.DataFrame, sweeps: Sweeps) -> pd.DataFrame:
    """Return the paper's curves and ours, a row each."""
    here = []
    said = []
    for claim in paper.merge(tests, how="left").itertuples():  # on what names a test
        if claim.others:
            after = of_seeds(claim, sweeps[claim.sweep], claim.methods).mean()
            dagger = " †" if claim.family == "†" else ""
            here.append(f"{after - claim.mean:.2f} → {after:.2f}")
            said.append(f"{claim.difference}, {verdict(claim, claim.sign)}{dagger}")
        else:
            here.append(shown(differences(claim, sweeps)).lstrip("+"))
            said.append(claim.sign)
    columns = paper[["figure", "compared", "quantity", "paper"]]
    return columns.assign(here=here, difference=said)


def page_table(claims: pd.DataFrame, sweeps: Sweeps) -> pd.DataFrame:
    """Return a table of GRPO's levels and of differences from them, to two digits."""
    cells = {}
    for claim in claims.itertuples():
        values = differences(claim, sweeps)
        cell = shown(values, 2) if claim.others else f"{values.mean():.2f}"
        cells.setdefault(claim.column, {})[claim.row] = cell
    return pd.DataFrame(cells).fillna("–").reset_index(names="")


# ---------------------------------------------------------------- other tables
def levels_table(sweeps: Sweeps, folders: list[str], columns: list[str]) -> pd.DataFrame:
    """Return mean outcomes of all runs: a row per folder and method."""
    runs = pd.concat({name: sweeps[name] for name in folders}, names=["runs"])
    groups = runs[columns].dropna(how="all").groupby(["runs", "method"])
    cells = plot.levels(groups)
    cells.insert(0, "seeds", groups.size())
    return cells.reset_index()


def within_batches_table(sweeps: Sweeps) -> pd.DataFrame:
    """Return the mean change of entropy within a batch, and its difference from GRPO's."""
    tables = {}
    for name in ["smollm2", "smollm2-gpu", "fixed", "scope", "bounds", "large-steps"]:
        changes = sweeps[name]["within a batch"].unstack("method").dropna(axis=1, how="all")
        apart = changes.sub(changes["grpo@8"], axis=0).drop(columns="grpo@8")
        table = changes.apply(shown, digits=4).to_frame("within a batch")
        table["− grpo@8"] = apart.apply(shown, digits=4)
        table["below 0"] = apart.apply(below)
        tables[name] = table.fillna("–")
    return pd.concat(tables, names=["runs", "method"]).reset_index()


def classes_table(packs: Packs, sweeps: Sweeps) -> pd.DataFrame:
    """Return for every class of GRPO's tokens what it is, and in how many groups it lowers entropy.

    A group counts if it has tokens of the class. Slopes were measured at the fifth update, and
    later lines of the step repeat them.
    """
    rows = []
    for name in MECHANISM:
        lines = packs[name].lines.query("method == 'grpo@8' and update == 5")
        of_runs = sweeps[name].loc["grpo@8"]
        for suffix, label in CLASSES.items():
            row = {"runs": name, "class": label}
            for column in ["share", "improbable", "probability"]:
                row[column] = shown(of_runs[f"{column}_{suffix}"]).lstrip("+")
            slopes = lines[f"slopes_{suffix}"].dropna().str.split(";").explode().astype(float)
            row["groups where it lowers entropy"] = below(slopes[slopes != 0])
            rows.append(row)
    return pd.DataFrame(rows)


def lengths_table() -> pd.DataFrame:
    """Return what share of SmolLM2's sampled responses are right, the short ones apart."""
    tables = {}
    for name in ["smollm2", "smollm2-gpu"]:
        samples = pd.read_csv(RESULTS / name / "samples.csv.xz").query("step <= 16")
        right = samples["reward"] == 1
        is_short = samples["response"].str.split().str.len() <= 6
        counted = {"at most six words": right & is_short, "more than six words": right & ~is_short}
        tables[name] = pd.DataFrame(counted).groupby(samples["method"]).mean()
    return pd.concat(tables, names=["runs"]).map("{:.2f}".format).reset_index()


def by_update_table(packs: Packs) -> pd.DataFrame:
    """Return what bounds, rho and kl are at the updates of a batch, where steps are large."""
    lines = packs["large-steps"].lines.loc[["bapo@8", "reverse@8"]].query("update > 0")
    low, high = lines["low"], lines["high"]
    numbers = {
        "rho before the search": lines["rho_start"],
        "kl": lines["kl"],
        "at [0.6, 1.2]": ((low == 0.6) & (high == 1.2)).astype(float),
        "at [0.9, 3.0]": ((low == 0.9) & (high == 3.0)).astype(float),
    }
    means = (
        pd.DataFrame(numbers).assign(update=lines["update"]).groupby(["method", "update"]).mean()
    )
    table = means.stack().unstack("update").rename(columns=str).map("{:.2f}".format)
    return table.rename_axis(["method", "update of a batch"]).reset_index()


# ---------------------------------------------------------------- the page
def read_claims(name: str) -> pd.DataFrame:
    """Return a list of comparisons. Cells are texts, empty ones included."""
    return pd.read_csv(RESULTS / f"scripts/{name}.csv", keep_default_na=False, dtype=str)


def without_repeats(table: pd.DataFrame) -> pd.DataFrame:
    """Leave out a cell that repeats the one above it, if all cells to its left do."""
    repeated = table.eq(table.shift()).cummin(axis=1)
    return table.mask(repeated, "")


def page(packs: Packs) -> str:
    """Return the text of results/tables.md."""
    sweeps = outcomes.read_sweeps(packs)
    tests = tested(read_claims("tests"), sweeps)
    of_grpo = {name: sweeps[name].loc[["grpo@8"]] for name in MECHANISM}
    tables = {}
    for heading, claims in read_claims("pages").groupby("table", sort=False):
        tables[heading] = page_table(claims, sweeps)
    tables |= {
        "The paper's figures": figures_table(read_claims("paper"), tests, sweeps),
        "Change of entropy within a batch (†)": within_batches_table(sweeps),
        "Classes of tokens (†)": classes_table(packs, sweeps),
        "Predicted fall of entropy by an update (†)": levels_table(of_grpo, MECHANISM, PREDICTED),
        "Right responses of SmolLM2 in steps 1 to 16, by length (†)": lengths_table(),
        "Large steps, by update of a batch (†)": by_update_table(packs),
        "The pre-registered intervals": intervals_table(read_claims("intervals"), sweeps),
        "The pre-registered tests (p by Holm), and others (†)": tests_table(tests),
        "Levels": levels_table(sweeps, LEVELS_OF, LEVELS),
    }
    text = FIRST_LINES
    for heading, table in tables.items():
        text += f"\n## {heading}\n\n{plot.markdown(without_repeats(table))}"
    return text


if __name__ == "__main__":
    print(page(outcomes.read_packs()), end="")
