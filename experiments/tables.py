"""Print the tables of README.md and results/README.md from what is packed in results/.

    python experiments/tables.py > results/tables.md

named.csv holds the tests that results/protocol.md names, equivalent.csv its equivalences, paper.csv
what the paper's figures show. Differences are paired by seed. What is not packed yet is left out; a
test without runs says so.
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

What `python experiments/tables.py` prints of the runs in this folder; [README.md](README.md)
explains it. ±: half of Student's 95 % interval over seeds. Bold: one of the tests that
[protocol.md](protocol.md) names, and resolved after Holm's correction; nothing else is bold.

Rates are learning rates / 1e-4. Lowest and highest entropy: of the means over 20 consecutive steps.
Entropy and reward at the end: means of the last 10 steps; a start's entropy is that of the first
batch, which it draws. Norm: the 95th percentile of the gradient's norm over all updates. Share: the
positive share of the gradient. kl: of a batch at its last update, which is 0 if there is one only.
Updates at start, inside, at end: those whose bounds stand there in the range of a search. Differ:
the updates at which `yoked@8` was given other bounds than `bapo@8` found there."""
CHOOSING = range(121, 126)  # the seeds that choose a rate, and that no test uses
TARGET = 0.44  # rho0 of bapo in the sweep over the rate
SHOWN = [
    "target-0.42",
    "default",
    "binding",
    "bounds",
    "partial",
]  # besides the sweep over the rate
COLLAPSE = 0.05  # a run collapses if its mean@16 ends further than this below its start
SHORT = {
    "gradient norm, 95th percentile": "norm",
    "positive share": "share",
    "reward at the end": "reward",
}
ENTROPIES = ["lowest entropy", "highest entropy", "entropy at the end"]
TRAINING = [*ENTROPIES, "norm", "share", "reward", "mean@16", "pass@8"]
BOUNDS = [
    "kl",
    "mean low",
    "mean high",
    "updates at start",
    "updates inside",
    "updates at end",
    "differ",
]
MEANS = [
    "updates at start",
    "updates at end",
    "rho_start",
    "reached",
    "length_correct",
    "length_wrong",
]

# name -> a row per method and seed, a column per outcome; before training the method is "start"
Sweeps = dict[str, pd.DataFrame]


# ---------------------------------------------------------------- outcomes
def read_sweeps(results: Path) -> Sweeps:
    """The outcomes of what is packed, by folder; in `bounds` also those of `default`, same seeds.

    "rates" has the runs of the sweep over the rate, "targets" those of the sweep over rho0, and
    "best" of the first those at the rate that is chosen for their method.
    """
    sweeps = {}
    for path in results.glob("*/runs.json"):
        config = runs.read_json(path)["config"]
        sweep = outcomes(plot.load(path.parent))
        sweep["rate"] = round(config["learning_rate"] * 1e4, 3)
        sweep["rho0"] = config["rho0"]
        sweeps[path.parent.name] = sweep
    seeds = sweeps["bounds"].loc["start"].index
    shared = sweeps["default"].loc[(["grpo@8", "0.9-2.0@8"], seeds), :]
    sweeps["bounds"] = pd.concat([sweeps["bounds"], shared])
    later = pd.concat(sweeps.values()).query("seed >= @CHOOSING.start")
    sweeps["rates"] = rates = later.query("rho0 == @TARGET")
    sweeps["targets"] = later.query("method == 'bapo@8' and rate == 3 and seed in @CHOOSING")
    chosen = chosen_rates(rates.query("seed in @CHOOSING and method != 'start'"))
    of_method = rates.index.get_level_values("method").map(chosen)
    sweeps["best"] = rates[rates["rate"] == of_method]
    return sweeps


def outcomes(found: plot.Runs) -> pd.DataFrame:
    """Of every run what the tables show and named.csv and paper.csv name."""
    numbers = plot.outcomes(found).rename(columns=SHORT)
    entropy = plot.by_step(found.lines, "entropy")
    of_20_steps = entropy.rolling(20).mean()
    numbers["lowest entropy"] = of_20_steps.min()
    numbers["highest entropy"] = of_20_steps.max()
    of_starts = entropy.loc[1].groupby("seed").mean()
    numbers.update(pd.concat({"start": of_starts}).rename("entropy at the end"))
    starts = numbers.loc["start", "mean@16"]
    numbers["gain"] = numbers["mean@16"].sub(starts, level="seed")
    trained = found.lines.query("update > 0")
    searched = trained.index.get_level_values("method").str.startswith(("bapo", "yoked"))
    # The ranges of all searches begin and end there. The upper bound moves first.
    at_start = trained["high"] == PAPER_MAIN.high_start
    at_end = trained["low"] == PAPER_MAIN.low_max
    trained["updates at start"] = at_start.astype(float).where(searched)
    trained["updates at end"] = at_end.astype(float).where(searched)
    of_batch = trained.groupby([*plot.RUN, "step"])
    # On the same tokens, so only from one update on a batch to the next.
    trained["fall"] = of_batch["entropy_now"].diff(-1)
    of_run = trained.groupby(plot.RUN)
    numbers = numbers.join(of_run[MEANS].mean())
    numbers["kl"] = of_batch["kl"].last().groupby(plot.RUN).mean()
    numbers["updates inside"] = 1 - numbers["updates at start"] - numbers["updates at end"]
    for share in ("share", "updates inside", "reached"):
        numbers[f"{share} − 0.5"] = numbers[share] - 0.5
    numbers["longer"] = numbers["length_wrong"] - numbers["length_correct"]
    ranks = of_run[["predicted_entropy_fall", "fall"]].corr("spearman")
    numbers["rank"] = ranks["fall"].xs("predicted_entropy_fall", level=-1)
    numbers["differ"] = pd.concat({"yoked@8": differing(trained)})
    return numbers


def differing(trained: pd.DataFrame) -> pd.Series:
    """Of every seed: share of the updates at which yoked@8 has other bounds than bapo@8."""
    found = trained.query("method == 'bapo@8'")
    given = trained.query("method == 'yoked@8'")
    both = found.merge(given, on=["seed", "step", "update"])
    differ = (both["low_x"] != both["low_y"]) | (both["high_x"] != both["high_y"])
    return differ.groupby("seed").mean()


def chosen_rates(choosing: pd.DataFrame) -> pd.Series:
    """Of every method the rate of highest mean mean@16; of a tie the lower."""
    return choosing.groupby(["method", "rate"])["mean@16"].mean().unstack().idxmax(axis=1)


def gaps(sweep: pd.DataFrame, methods: str, others: str) -> pd.DataFrame:
    """The mean over methods (names with spaces between) less that over others, of all outcomes.

    Returns a row per seed; NaN where one of the runs is missing.
    """
    if not others:
        return mean_of(sweep, methods)
    return mean_of(sweep, methods) - mean_of(sweep, others)


def mean_of(sweep: pd.DataFrame, methods: str) -> pd.DataFrame:
    """Of every seed the mean over these methods; NaN where one is missing."""
    names = methods.split()
    runs_of = [sweep.query("method == @name").droplevel("method") for name in names]
    return sum(runs_of) / len(runs_of)


def of_claim(claim, sweeps: Sweeps) -> pd.Series:
    """The differences that a row of a .csv speaks of, by seed; none if its sweep is not there."""
    sweep = sweeps.get(claim.sweep, sweeps["default"][:0]).query("seed not in @CHOOSING")
    return gaps(sweep, claim.methods, claim.others)[claim.outcome].dropna()


def below(gains: pd.Series, margin: float = 0.0) -> str:
    """ "1 of 8": how many runs end further than margin below their start, by what they gain."""
    return f"{(gains < -margin).sum()} of {len(gains)}"


# ---------------------------------------------------------------- statistics
def shown(differences: pd.Series, bold: bool) -> str:
    """Mean ± half of the 95 % interval, or "not run yet"."""
    mean, half = plot.interval(differences)
    if np.isnan(half):
        return "not run yet"
    text = f"{mean:+.3f} ± {half:.3f}"
    return f"**{text}**" if bold else text


def p_value(differences: pd.Series) -> float:
    """Student's, two-sided, of a mean of 0; NaN without two seeds."""
    return 2 * stats.t.sf(abs(differences.mean() / differences.sem()), differences.count() - 1)


def verdict(difference: float, p: float, expected: str) -> str:
    """What a p-value says of a difference that was expected "above 0", "below 0" or "–"."""
    if np.isnan(p):
        return "–"
    if p >= 0.05:
        return "not resolved"
    side = "above 0" if difference > 0 else "below 0"
    if expected == "–":
        return side
    return "as expected" if side == expected else "the reverse"


def holm(p_values: pd.Series) -> pd.Series:
    """Holm's step-down correction, also for the tests of the family that are NaN, not run yet."""
    ordered = p_values.sort_values()
    return (ordered * np.arange(len(ordered), 0, -1)).cummax().clip(upper=1)


def tested(claims: pd.DataFrame, sweeps: Sweeps) -> pd.DataFrame:
    """The rows of named.csv or paper.csv, with columns seeds, here, mean, p, "p (Holm)", verdict.

    Each family of claims has its own correction.
    """
    differences = [of_claim(claim, sweeps) for claim in claims.itertuples()]
    tests = claims.assign(seeds=list(map(len, differences)), p=list(map(p_value, differences)))
    tests["mean"] = [of_seeds.mean() for of_seeds in differences]
    tests["p (Holm)"] = tests.groupby("family")["p"].transform(holm)
    tests["here"] = list(map(shown, differences, tests["p (Holm)"] < 0.05))
    tests["verdict"] = list(map(verdict, tests["mean"], tests["p (Holm)"], tests["expected"]))
    return tests


# ---------------------------------------------------------------- tables
def levels_table(groups) -> pd.DataFrame:
    """The outcomes of groups of runs: a row per group, its name in the first columns."""
    table = plot.levels(groups)[[*TRAINING, *BOUNDS]]
    table = table.loc[:, (table != "–").any()]
    table.insert(0, "seeds", groups.size())
    table["below start"] = groups["gain"].agg(below)
    table[f"by more than {COLLAPSE}"] = groups["gain"].agg(below, COLLAPSE)
    return table.reset_index()


def chosen_table(choosing: pd.DataFrame) -> pd.DataFrame:
    """The rate at which each method is measured. seeds: of that of its rates that has fewest."""
    chosen = chosen_rates(choosing)
    tried = choosing.groupby("method")["rate"]
    edge = (chosen == tried.min()) | (chosen == tried.max())
    seeds = choosing.groupby(["method", "rate"]).size().groupby("method").min()
    columns = {
        "chosen rate": chosen,
        "an edge of the rates tried": edge.map({True: "yes", False: "no"}),
        f"seeds (of {len(CHOOSING)})": seeds,
    }
    return pd.DataFrame(columns).reset_index()


def tests_table(claims: pd.DataFrame, sweeps: Sweeps) -> pd.DataFrame:
    """The tests of rows of named.csv."""
    tests = tested(claims, sweeps).rename(columns={"expected": "named"})
    for name in ("p", "p (Holm)"):
        tests[name] = tests[name].map("{:.2g}".format).replace("nan", "–")
    columns = ["family", "difference", "sweep", "outcome", "named", "seeds", "here", "p"]
    return tests[[*columns, "p (Holm)", "verdict"]]


def equivalence_table(claims: pd.DataFrame, sweeps: Sweeps) -> pd.DataFrame:
    """The rows of equivalent.csv: whether the 90 % interval lies within the margin.

    A margin is also given as a part of the effect: what the methods change against grpo@8.
    """
    rows = []
    for claim in claims.itertuples():
        differences = of_claim(claim, sweeps)
        mean, half = plot.interval(differences, 0.9)
        effect = of_claim(claim._replace(sweep=claim.effect_in, others="grpo@8"), sweeps).mean()
        rows.append(
            {
                "difference": f"{claim.methods} − {claim.others}",
                "sweep": claim.sweep,
                "outcome": claim.outcome,
                "seeds": len(differences),
                "90 % interval": f"{mean - half:+.3f} to {mean + half:+.3f}",
                "margin": f"±{claim.margin}",
                "margin / effect": f"{claim.margin / abs(effect):.0%}",
                "equivalent": "yes" if abs(mean) + half < claim.margin else "not shown",
            }
        )
    return pd.DataFrame(rows).query("seeds > 1")


def figures_table(paper: pd.DataFrame, sweeps: Sweeps) -> pd.DataFrame:
    """The paper's figures row by row: paper.csv. No p-value is corrected."""
    claims = tested(paper.assign(family=paper.index), sweeps).query("seeds > 1")
    claims["here"] = claims["here"].str.strip("*")
    claims["verdict"] = claims["verdict"].str.replace("expected", "in the paper")
    table = claims[["figure", "shows", "sweep", "difference", "here", "verdict"]]
    names = ["figure", "the paper shows", "sweep", "here", "found", "uncorrected"]
    return table.set_axis(names, axis=1)


def literal_table(updates: pd.DataFrame) -> pd.DataFrame:
    """Readings of Eq. 8 for the main range on the first updates of GRPO's batches: literal.py."""
    by_seed = updates.groupby(["seed", "reading"], sort=False).mean().drop(columns="step")
    table = plot.levels(by_seed.groupby("reading", sort=False))
    return table.reset_index(names="Eq. 8 read as")


# ---------------------------------------------------------------- printing
def page(results: Path) -> str:
    """The text of results/tables.md."""
    claims = {}
    for name in ("named", "equivalent", "paper"):
        path = ROOT / f"experiments/{name}.csv"
        claims[name] = pd.read_csv(path, keep_default_na=False, dtype={"family": str})
    sweeps = read_sweeps(results)
    rates = sweeps["rates"]
    choosing = rates.query("seed in @CHOOSING")
    measuring = rates.query("seed not in @CHOOSING")
    groups = {
        "The rates, choosing seeds": choosing.groupby(["rate", "method"]),
        "The target, choosing seeds": sweeps["targets"].groupby("rho0"),
        "The rates, measuring seeds": measuring.groupby(["rate", "method"]),
    }
    for name in SHOWN:
        if name in sweeps:
            measured = sweeps[name].query("seed not in @CHOOSING")
            groups[f"The runs in {name}"] = measured.groupby("method")
    tables = {"The chosen rates": chosen_table(choosing.query("method != 'start'"))}
    for question, tests in claims["named"].groupby("question", sort=False):
        tables[f"Tests: {question}"] = tests_table(tests, sweeps)
    tables["Equivalences"] = equivalence_table(claims["equivalent"], sweeps)
    tables["The paper's figures"] = figures_table(claims["paper"], sweeps)
    tables["Readings of Eq. 8"] = literal_table(pd.read_csv(results / "literal.csv"))
    for heading, runs_of in groups.items():
        if len(runs_of):
            tables[heading] = levels_table(runs_of)
    lines = [FIRST_LINES]
    for heading, table in tables.items():
        if len(table):
            lines += ["", f"## {heading}", "", *plot.markdown(table)]
    return "\n".join(lines)


if __name__ == "__main__":
    print(page(ROOT / "results"))
