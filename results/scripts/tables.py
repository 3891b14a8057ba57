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
from results.scripts import smollm2
from support import plot

FIRST_LINES = """# All tables

`python -m results.scripts.tables` prints these tables of the runs in this folder, which
[README.md](README.md) explains. ± is half of Student's 95 % interval over seeds. All p-values are
two-sided. [protocol.md](protocol.md) defines the outcomes and the pre-registered tests; p (Holm) is
corrected within a family. What has a † is not pre-registered and not corrected.

"As expected" means significant with the expected sign, "opposite" significant with the other one;
the protocol calls them "reproduced" and "reversed". The expected sign is the paper's, except for
reward and mean@16 of family A at 1e-4, where reuse was expected to help. In the tables of figures
"same direction" means that a difference is significant and has the paper's sign. What is "by
construction" follows from the lengths of the responses. "Equivalent" is the protocol's "as much" in
family M. In family N the expected sign is what family L found, and in family Q what seeds 138 to
149 showed.

Norm without another word is the 95th percentile over all updates. Lowest entropy is the lowest mean
over 20 consecutive steps. Mean bounds and shares of searches leave out each batch's first update,
where every ratio is 1. Searches at start, inside and at end are those whose bounds end there in the
range of the search. "Reached" is the share that reached rho0, "reached if moved" that among the
searches that left their start. With a search for every 16 or 4 responses, these are means over an
update's searches. kl is that of a batch's last update."""
SHORT = {"gradient norm": "norm", "positive share": "share"}
NORMS = {  # outcome -> updates on each batch
    "norm of update 1": [1],
    "norm of updates 2 to 8": range(2, 9),
    "norm of all updates": range(1, 17),
}
SEARCHES = ["searches at start", "searches inside", "searches at end", "reached"]
SEARCHES += ["reached if moved"]
LEVELS = ["entropy", "lowest entropy", "norm", *NORMS, "share", "reward", "mean@16", "pass@8", "kl"]
LEVELS += ["mean low", "mean high", *SEARCHES]
# metric -> column, in the tables by update
ON_THE_TOY = {
    "rho_start": "rho before the search",
    "gradient_share": "share",
    "grad_norm": "mean norm",
    "kl": "kl",
    "low": "mean low",
    "high": "mean high",
}
MEASURED = {
    "rho_at_0.6": "rho at [0.6, 1.2]",
    "rho_at_0.8": "rho at [0.8, 1.2]",
    "rho_lengths": "rho from lengths",
    "rho_lengths_ended": "the same, ended",
    "kl": "kl",
    "clip_fraction_low": "clipped low",
    "clip_fraction_high": "clipped high",
    "low": "mean low",
    "high": "mean high",
}
FRONT = {
    "entropy": "entropy",
    "reward": "reward",
    "norm": "norm, 95th percentile",
    "norm of update 1": "norm, first updates",
    "mean@16": "mean@16",
    "pass@8": "pass@8",
}
LANGUAGE_METHODS = [plot.START, "grpo@1", "grpo@8", "grpo@8 at 6e-6"]
LANGUAGE_METHODS += ["bapo-main@8", "0.6-1.2@8", "0.9-3.0@8"]
LANGUAGE_FRONT = {
    "entropy": "entropy",
    "reward": "reward",
    "norm": "norm, 95th percentile",
    "norm of update 1": "norm, first updates",
    "mean@4": "mean@4",
    "later mean@4": "mean@4, steps 24 and 32",
}
SEEDS = ((101, 105), (121, 125), (126, 137), (138, 149), (150, 161), (162, 173))  # made together
ROOT = Path(__file__).parents[2]
SAME = {"as expected": "same direction", "opposite": "opposite direction"}
LANGUAGE_MODEL = ("smollm2", "smollm2-larger-step", "smollm2-gpu")

Packs = dict[str, plot.Records]  # folder -> what is packed in it
# folder -> a row per method and seed, a column per outcome
Sweeps = dict[str, pd.DataFrame]


# ---------------------------------------------------------------- outcomes
def read_packs(results: Path) -> Packs:
    """Return what is packed."""
    folders = sorted(path.parent for path in results.glob("*/runs.json"))
    return {folder.name: plot.load(folder) for folder in folders}


def read_sweeps(packs: Packs) -> Sweeps:
    """Return the outcomes of all runs."""
    return {
        name: language_outcomes(records) if name in LANGUAGE_MODEL else outcomes(records)
        for name, records in packs.items()
    }


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
    # Only between updates on one batch, whose tokens are the same.
    falls = trained[["predicted_entropy_fall"]].assign(
        fall=trained.groupby([*plot.RUN, "step"])["entropy_now"].diff(-1)
    )
    ranks = falls.groupby(plot.RUN).corr("spearman")["fall"]
    numbers["rank"] = ranks.xs("predicted_entropy_fall", level=-1)
    last = trained.groupby([*plot.RUN, "step"])["kl"].last()
    numbers["kl"] = last.groupby(plot.RUN).mean()
    return numbers.join(norms(trained)).join(searches(trained.query("update > 1"), plot.RUN))


def language_outcomes(records: plot.Records) -> pd.DataFrame:
    """Return the outcomes that parts 4 and 5 of the protocol define, for every run.

    Mean bounds and searches are those of batches 3 to 16.
    """
    lines = records.lines.query("step <= 16")
    numbers = plot.outcomes(records._replace(lines=lines)).rename(columns=SHORT)
    numbers["reward"] = plot.by_step(lines.query("step >= 2"), "reward").mean()
    numbers["entropy"] = plot.by_step(lines.query("step >= 9"), "entropy").mean()
    trained = numbers.index.get_level_values("method") != plot.START
    held_out = plot.by_step(lines, "held_out_mean@4").mean()  # after steps 8 and 16
    numbers.loc[trained, "mean@4"] = held_out
    rest = records.lines.query("step > 16")
    numbers["later reward"] = plot.by_step(rest, "reward").mean()
    numbers["later mean@4"] = plot.by_step(rest, "held_out_mean@4").mean()  # after 24 and 32
    numbers["later entropy"] = plot.by_step(rest.query("step > 24"), "entropy").mean()
    reused = lines.query("step >= 3 and update > 1")
    numbers[["mean low", "mean high"]] = reused.groupby(plot.RUN)[["low", "high"]].mean()
    return numbers.join(norms(lines.query("update > 0"))).join(searches(reused, plot.RUN))


def norms(trained: pd.DataFrame) -> pd.DataFrame:
    """Return for every run the mean norm of some updates of each batch."""
    columns = {}
    for name, updates in NORMS.items():
        among = trained[trained["update"].isin(updates)]
        columns[name] = among.groupby(plot.RUN)["grad_norm"].mean()
    return pd.DataFrame(columns)


def searches(lines: pd.DataFrame, by: list[str]) -> pd.DataFrame:
    """Return where searches ended, as shares of a run's searches or of other groups.

    Runs with several searches in an update have logged at_start and at_end. The ranges of all
    searches begin and end with the main range's bounds, and the upper bound moves first.
    """
    methods = lines.index.get_level_values("method")
    searched = lines[methods.str.startswith(("bapo", "yoked"))]
    at_start = (searched["high"] == PAPER_MAIN.high_start).astype(float)
    at_end = (searched["low"] == PAPER_MAIN.low_max).astype(float)
    shares = {
        "searches at start": searched.get("at_start", at_start).fillna(at_start),
        "searches at end": searched.get("at_end", at_end).fillna(at_end),
        "reached": searched["reached"],
    }
    means = searched.assign(**shares).groupby(by)[list(shares)].mean()
    moved = 1 - means["searches at start"]
    means["searches inside"] = (moved - means["searches at end"]).clip(lower=0)
    means["reached if moved"] = (means["reached"] - means["searches at start"]) / moved
    return means[SEARCHES]


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


def rewards_table(tests: pd.DataFrame, others: pd.DataFrame) -> pd.DataFrame:
    """Return the differences in reward between BAPO and GRPO at equal numbers of updates."""
    every = pd.concat([tests.assign(dagger=""), others.assign(dagger=" †")])
    every = every[every["methods"].str.startswith("bapo") & (every["outcome"] == "reward")]
    every = every[every["others"] == "grpo@" + every["methods"].str.partition("@")[2]]
    table = pd.DataFrame([described(test) for test in every.itertuples()])
    table["reward"] = [here + dagger for here, dagger in zip(every["here"], every["dagger"])]
    table["verdict"] = every["verdict"].to_list()
    columns = ["runs", "difference", "seeds", "reward", "verdict"]
    return table[columns].sort_values("runs", kind="stable")


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
            grpo = claim._replace(others="grpo@8", others_sweep=claim.sweep)
            second = grpo._replace(methods=claim.others, sweep=claim.others_sweep or claim.sweep)
            effects = [differences(one, sweeps).mean() for one in (grpo, second)]
            row["effect on grpo@8, first / second"] = f"{effects[0] / effects[1]:.0%}"
            row["margin / second's effect"] = f"{most / abs(effects[1]):.0%}"
        rows.append(row)
    return pd.DataFrame(rows).fillna("–")


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
    table = pd.DataFrame(rows)
    repeated = table[["figure", "compared"]].duplicated()
    table.loc[repeated, ["figure", "compared"]] = ""
    return table


def levels_table(groups, columns: list[str]) -> pd.DataFrame:
    """Return the outcomes of groups of runs: a row per group, named in the first columns."""
    table = plot.levels(groups[columns])
    table = table.loc[:, (table != "–").any()]
    table.insert(0, "seeds", groups.size())
    if columns is LEVELS:
        table["below start"] = groups["gain"].agg(below)
    return table.reset_index()


def front(packs: Packs, sweeps: Sweeps) -> pd.DataFrame:
    """Return mean (standard deviation) over the seeds 138 to 149, at 2e-4 and at lower rates.

    Before training, entropy and reward are those of the first batch.
    """
    methods = [plot.START, "grpo@1", "grpo@8", "bapo@8", "0.9-3.0@8"]
    at_rates = [sweeps["rate-2e-4"]]
    for rate in ("1e-4", "5e-5"):
        names = {method: f"{method} at {rate}" for method in ("grpo@8", "bapo@8")}
        at_rates.append(sweeps[f"rate-{rate}"].query("seed >= 138").loc[list(names)].rename(names))
        methods += names.values()
    every = pd.concat(at_rates)
    first = packs["rate-2e-4"].lines.query("step == 1 and update == 1 and method == 'grpo@8'")
    every.update(first[["entropy", "reward"]].rename({"grpo@8": plot.START}))
    groups = every.rename(columns=FRONT)[list(FRONT.values())].groupby("method")
    return mean_and_deviation(groups).loc[methods].reset_index(names="method")


def language_front(sweeps: Sweeps) -> pd.DataFrame:
    """Return mean (standard deviation) over both sets of seeds of the language model."""
    groups = both_sets(sweeps).rename(columns=LANGUAGE_FRONT).groupby(["seeds", "method"])
    cells = mean_and_deviation(groups[list(LANGUAGE_FRONT.values())])
    return cells.reindex(LANGUAGE_METHODS, level="method").reset_index()


def rewards_by_seed(sweeps: Sweeps) -> pd.DataFrame:
    """Return the reward of every run of the language model."""
    rewards = both_sets(sweeps)["reward"].unstack("method").droplevel("seeds")
    cells = rewards[LANGUAGE_METHODS[1:]].map("{:.3f}".format).replace("nan", "–")
    return cells.reset_index()


def both_sets(sweeps: Sweeps) -> pd.DataFrame:
    """Return the outcomes of all runs of the language model, by set of seeds."""
    larger = sweeps["smollm2-larger-step"].loc[["grpo@8"]].rename({"grpo@8": "grpo@8 at 6e-6"})
    sets = {"10–17": pd.concat([sweeps["smollm2"], larger]), "18–25": sweeps["smollm2-gpu"]}
    return pd.concat(sets, names=["seeds"])


def mean_and_deviation(groups) -> pd.DataFrame:
    """Return table cells, "mean (standard deviation)", with a row per group."""
    cells = groups.mean().map("{:.3f}".format) + groups.std().map(" ({:.3f})".format)
    return cells.replace(r" \(nan\)", "", regex=True).replace("nan", "–")


def by_update(lines: pd.DataFrame, columns: dict[str, str]) -> pd.DataFrame:
    """Return what updates see and find: a row per method and number of the update on its batch."""
    trained = lines.query("update > 0").astype({"update": int})
    groups = [*plot.RUN, "update"]
    means = trained.groupby(groups)[list(columns)].mean().rename(columns=columns)
    means = means.join(searches(trained, groups))
    return levels_table(means.groupby(["method", "update"]), list(means))


def levels_tables(packs: Packs, sweeps: Sweeps) -> dict[str, pd.DataFrame]:
    """Return heading -> a table of levels."""
    tables = {}
    for name in packs.keys() - LANGUAGE_MODEL:
        for first, last in SEEDS:
            measured = sweeps[name].query(f"{first} <= seed <= {last}")
            if len(measured):
                heading = f"The runs in {name}, seeds {first} to {last}"
                tables[heading] = levels_table(measured.groupby("method"), LEVELS)
    for name in ("rate-2e-4", "scope"):
        tables[f"By update of a batch in {name}"] = by_update(packs[name].lines, ON_THE_TOY)
    return dict(sorted(tables.items()))


# ---------------------------------------------------------------- runs that logged more
def mechanics_tables(packs: Packs) -> dict[str, pd.DataFrame]:
    """Return heading -> a table of what updates see and find, from the third batch on."""
    tables = {}
    for name in ("measured", *LANGUAGE_MODEL):
        lines = packs[name].lines.query("step >= 3")
        tables[f"By update of a batch in {name}, from batch 3 on"] = by_update(lines, MEASURED)
        tables[f"What a search would have found for grpo@8 in {name}"] = would_have_found(lines)
    return tables


def outcomes_tables(results: Path, packs: Packs, sweeps: Sweeps) -> dict[str, pd.DataFrame]:
    """Return heading -> a table of the language model's outcomes that no test looks at."""
    tables = {}
    columns = ["reward", "entropy", "mean@4", "pass@4", "norm", *NORMS, "share"]
    columns += ["later reward", "later entropy", "later mean@4"]
    columns += ["mean low", "mean high", *SEARCHES]
    for name in LANGUAGE_MODEL:
        groups = sweeps[name].groupby("method")
        samples = pd.read_csv(results / name / "samples.csv.xz", index_col=plot.RUN)
        tables |= {
            f"The runs in {name}; bounds and searches of batches 3 to 16": levels_table(
                groups, columns
            ),
            f"Entropy by reward in {name}, batches 3 to 16": at_equal_reward(packs[name].lines),
            f"The responses in {name} to the first prompt of every step": failures(samples),
        }
    return tables


def at_equal_reward(lines: pd.DataFrame) -> pd.DataFrame:
    """Return the mean entropy of batches whose mean reward lies in the same quarter of [0, 1]."""
    batches = lines.query("3 <= step <= 16 and update == 1")
    quarters = ["up to 0.25", "up to 0.5", "up to 0.75", "up to 1"]
    quarter = pd.cut(batches["reward"], [-1, 0.25, 0.5, 0.75, 1], labels=quarters)
    entropies = batches.groupby([*plot.RUN, quarter], observed=False)["entropy"].mean().unstack()
    return levels_table(entropies.groupby("method"), quarters)


def would_have_found(lines: pd.DataFrame) -> pd.DataFrame:
    """Return the bounds that searches with other targets find in the updates of grpo@8."""
    reused = lines.query("method == 'grpo@8' and update > 1")
    of_searches = {}
    for name in reused.filter(regex="^low_"):
        search = name.removeprefix("low_").replace("gradient_", "gradient, ")
        bounds = reused[[name, name.replace("low", "high")]].set_axis(["low", "high"], axis=1)
        of_searches[f"bapo, {search}"] = bounds.droplevel("method").assign(reached=np.nan)
    every = pd.concat(of_searches, names=["method"])
    means = every.groupby(plot.RUN)[["low", "high"]].mean().join(searches(every, plot.RUN))
    return levels_table(means.groupby("method"), list(means))


def failures(samples: pd.DataFrame) -> pd.DataFrame:
    """Return the shares of right responses and of reasons why others are wrong.

    Right responses of at most six words, such as "A coat and a cow.", are counted apart.
    """
    words = samples["response"].fillna("").str.split().str.len()
    right = samples["reward"] > 0
    kinds = {
        "right, over six words": right & (words > 6),
        "right, up to six words": right,
        "cut off": samples["truncated"],
        "too long": words > smollm2.WORDS,
    }
    reasons = pd.Series(np.select(list(kinds.values()), list(kinds), "a word missing"))
    shares = pd.get_dummies(reasons.set_axis(samples.index)).groupby(plot.RUN).mean()
    return levels_table(shares.groupby("method"), [*kinds, "a word missing"])


def page(results: Path) -> str:
    """Return the text of results/tables.md."""
    packs = read_packs(results)
    sweeps = read_sweeps(packs)
    options = {"keep_default_na": False, "dtype": str}
    claims, others, paper = [
        pd.read_csv(ROOT / f"results/scripts/{name}.csv", **options)
        for name in ("tests", "others", "paper")
    ]
    of_intervals = claims["expected"].str.contains(" to ")
    intervals = claims[of_intervals]
    tests = tested(claims[~of_intervals], sweeps)
    of_language, to_language = (one["sweep"].isin(LANGUAGE_MODEL) for one in (tests, intervals))
    others = tested(others.assign(family=others.index, expected="–"), sweeps)
    on_front = paper[paper["front"] == "yes"]
    tables = {
        "Before and after: mean (standard deviation) over seeds 138 to 149": front(packs, sweeps),
        "The language model: mean (standard deviation) over its seeds": language_front(sweeps),
        "The paper's figures in short": figures_table(on_front, tests, sweeps),
        "The paper's figures": figures_table(paper, tests, sweeps),
        "Reward, BAPO and GRPO": rewards_table(tests, others),
        "The pre-registered tests of the language model": tests_table(tests[of_language]),
        "Equivalence for the language model": intervals_table(intervals[to_language], sweeps),
        "The language model's reward by seed": rewards_by_seed(sweeps),
        "The pre-registered tests": tests_table(tests[~of_language]),
        "The pre-registered intervals": intervals_table(intervals[~to_language], sweeps),
        "Other differences (†)": tests_table(others).drop(
            columns=["family", "expected", "p (Holm)"]
        ),
    }
    tables |= levels_tables(packs, sweeps)
    tables |= mechanics_tables(packs)
    tables |= outcomes_tables(results, packs, sweeps)
    text = FIRST_LINES + "\n"
    for heading, table in tables.items():
        text += f"\n## {heading}\n\n{plot.markdown(table)}"
    return text


if __name__ == "__main__":
    print(page(ROOT / "results"), end="")
