"""Write results/runs.csv, curves.csv and comparisons.csv from the packs.

    python -m results.scripts.study_data

It is needed once: its next commit deletes it with the packs that it reads.
"""

import re

import pandas as pd

from results.scripts import outcomes, tables
from results.scripts.outcomes import RESULTS
from support import plot, runs

LABELS = {
    "grpo@8": "GRPO",
    "0.6-1.2@8": "fixed [0.6, 1.2]",
    "0.9-1.2@8": "fixed [0.9, 1.2]",
    "0.9-3.0@8": "fixed [0.9, 3.0]",
    "bapo@8": "BAPO",
    "bapo-main@8": "BAPO",
    "reverse@8": "BAPO reversed",
    "grpo@1": "GRPO, one update per batch",
}
FOUR = ["grpo@8", "0.6-1.2@8", "0.9-3.0@8", "bapo@8"]
FOUR_OF_SMOLLM2 = ["grpo@8", "0.6-1.2@8", "0.9-3.0@8", "bapo-main@8"]
MADE_BY_VARIANTS = {"bapo-main-per16@8", "bapo-main-per4@8", "bapo-gradient@8", "yoked@8"}


# ---------------------------------------------------------------- runs.csv
def made(folder: str) -> pd.DataFrame:
    """Return commit, date and machine by seed and method. The first block with a run made it."""
    rows = {}
    for block in runs.read_json(RESULTS / folder / "runs.json")["blocks"]:
        if "options" in block:
            methods, seeds = block["options"]["methods"], block["options"]["seeds"]
        else:
            words = block["command"].split()
            methods, seeds = after(words, "--methods"), map(int, after(words, "--seeds"))
        for seed in seeds:
            for method in methods:
                about = [block[key] for key in ("commit", "date", "machine")]
                about[2] = about[2].replace(", 2 cores", "")
                rows.setdefault((method, seed), about)
    return rows


def after(words: list[str], option: str) -> list[str]:
    """Return the words after an option."""
    rest = words[words.index(option) + 1 :]
    ends = [index for index, word in enumerate(rest) if word.startswith("--")]
    return rest[: ends[0]] if ends else rest


def all_runs(packs, sweeps) -> pd.DataFrame:
    parts = {}
    for folder, outcomes_of in sweeps.items():
        records = packs[folder]
        part = outcomes_of.copy()
        if folder.startswith("mechanism"):
            part = pd.DataFrame(index=part.index)
        if "smollm2" in folder or folder == "large-steps":
            lengths = plot.by_step(records.lines, "length_correct")
            part["length of right answers"] = lengths.loc[2:16].mean()
        if folder == "large-steps":
            part["entropy"] = plot.by_step(records.lines, "entropy").loc[9:16].mean()
            searches = outcomes.searches(records.lines.query("update > 1"), plot.RUN)
            part = part.join(searches)
        part = part.drop(index=plot.START, level=0, errors="ignore")
        if "mean@16" in records.accuracies and plot.START in records.accuracies.index:
            start = records.accuracies.loc[plot.START]["mean@16"]
            seeds = part.index.get_level_values("seed")
            part["mean@16 before training"] = seeds.map(start)
        known = made(folder)
        abouts = []
        for method, seed in part.index:
            old = method.replace("bapo-app-a-gradient", "bapo")
            if folder in ("bounds", "partial"):
                key = (old, seed)
            else:
                key = (method, seed)
            if key in known:
                abouts.append(known[key])
            elif method in MADE_BY_VARIANTS:
                abouts.append(next(v for k, v in known.items() if k[1] == seed))
            else:
                raise KeyError(key)
        about = pd.DataFrame(abouts, part.index, columns=["commit", "date", "machine"])
        parts[folder] = about.join(part)
    table = pd.concat(parts, names=["folder"])
    drop = [c for c in table.columns if re.match("(share|improbable|probability|fall)_|pass@4", c)]
    return table.drop(columns=drop).dropna(axis=1, how="all")


# ---------------------------------------------------------------- curves.csv
def of_steps(picture, panel, lines, methods, metric, smoothed):
    values = plot.by_step(lines.loc[methods], metric).rolling(smoothed, min_periods=1).mean()
    parts = []
    for method in methods:
        mean, half = plot.interval(values[method].T)
        part = pd.DataFrame({"x": mean.index, "y": mean, "low": mean - half, "high": mean + half})
        parts.append(part.assign(picture=picture, panel=panel, line=LABELS[method]))
    return pd.concat(parts)


def of_updates(name, lines):
    by = lines.groupby("update")["rho_start"]
    rho = pd.DataFrame({"y": by.mean(), "low": by.quantile(0.1), "high": by.quantile(0.9)})
    parts = [rho.assign(panel="rho before the search")]
    shares = outcomes.searches(lines, ["update"])
    for end in ["never leave [0.6, 1.2]", "end at [0.9, 3.0]"]:
        share = shares[end]
        part = pd.DataFrame({"y": share})
        parts.append(part.assign(panel=f"share of searches that {end}"))
    return pd.concat(parts).reset_index(names="x").assign(line=name, picture="switch")


def all_curves(packs, sweeps) -> pd.DataFrame:
    parts = []
    language = packs["smollm2"].lines
    toy = packs["fixed"].lines
    large = packs["large-steps"].lines
    for metric in ["reward", "entropy"]:
        parts.append(of_steps("front", f"SmolLM2: {metric}", language, FOUR_OF_SMOLLM2, metric, 3))
    for metric in ["reward", "entropy"]:
        parts.append(of_steps("front", f"toy: {metric}", toy, FOUR, metric, 10))
    seven = [method for method in LABELS if method != "bapo-main@8"]
    for metric in ["reward", "entropy"]:
        parts.append(of_steps("large_steps", metric, large, seven, metric, 3))
    switch = [
        of_updates("toy, rho0 0.44", packs["rate-2e-4"].lines.loc[["bapo@8"]].query("update > 0")),
        of_updates(
            "SmolLM2, rho0 0.4",
            language.loc[["bapo-main@8"]].query("step >= 3 and update > 0"),
        ),
        of_updates("SmolLM2 at 4.8e-5, rho0 0.42", large.loc[["bapo@8"]].query("update > 0")),
    ]
    parts.append(
        pd.concat(switch).sort_values(
            "panel", key=lambda names: names != "rho before the search", kind="stable"
        )
    )
    columns = ["picture", "panel", "line", "x", "y", "low", "high"]
    table = pd.concat(parts)[columns]
    # Seven bands on top of each other show nothing; the table has the intervals.
    table.loc[table["picture"] == "large_steps", ["low", "high"]] = float("nan")
    return table


# ---------------------------------------------------------------- comparisons.csv
COLUMNS = "table,row,column,digits,confidence,family,expected,seeds,folder,methods,others,outcome"
COLUMNS = COLUMNS.split(",")
NAMES = {"sweep": "folder", "others_sweep": "others_folder"}
ON_TOY = set("ABCDEFHIJKPQ") | {"Width", "Adapting"}
FRONT = [
    # row, seeds, folder, methods, others_folder, others
    ("GRPO", "10-17", "smollm2", "grpo@8", "", ""),
    ("fixed bounds: [0.6, 1.2]", "10-17", "smollm2", "0.6-1.2@8", "", "grpo@8"),
    ("fixed bounds: [0.9, 3.0]", "10-17", "smollm2", "0.9-3.0@8", "", "grpo@8"),
    ("BAPO: rho0 0.4", "10-17", "smollm2", "bapo-main@8", "", "grpo@8"),
    ("GRPO: 1.5 times the rate", "10-17", "smollm2-larger-step", "grpo@8", "smollm2", "grpo@8"),
    (
        "GRPO: one update per batch (an eighth of the updates)",
        "10-17",
        "smollm2",
        "grpo@1",
        "",
        "grpo@8",
    ),
    (
        "GRPO: the same at 12 times the rate, from GRPO there",
        "52-57",
        "large-steps",
        "grpo@1",
        "",
        "grpo@8",
    ),
    ("GRPO", "162-173", "fixed", "grpo@8", "", ""),
    ("fixed bounds: [0.6, 1.2]", "162-173", "fixed", "0.6-1.2@8", "", "grpo@8"),
    ("fixed bounds: [0.9, 3.0]", "162-173", "fixed", "0.9-3.0@8", "", "grpo@8"),
    ("BAPO: rho0 0.44", "162-173", "fixed", "bapo@8", "", "grpo@8"),
    ("BAPO: rho0 0.4", "150-161", "scope", "bapo-main@8", "", "grpo@8"),
    ("GRPO: half the rate", "138-149", "rate-1e-4", "grpo@8", "rate-2e-4", "grpo@8"),
    (
        "GRPO: one update per batch (an eighth of the updates)",
        "138-149",
        "rate-2e-4",
        "grpo@1",
        "",
        "grpo@8",
    ),
]
POST_HOC = [
    # seeds, folder, methods, others, outcome
    ("18-25", "smollm2-gpu", "0.6-1.2@8", "grpo@8", "later reward"),
    ("10-17", "smollm2", "bapo-main@8", "grpo@8", "length of right answers"),
    ("18-25", "smollm2-gpu", "bapo-main@8", "grpo@8", "length of right answers"),
    ("52-57", "large-steps", "0.9-3.0@8", "0.6-1.2@8", "reward"),
    ("52-57", "large-steps", "0.9-3.0@8", "grpo@8", "entropy"),
    ("10-17", "smollm2", "0.6-1.2@8", "grpo@8", "within a batch"),
    ("10-17", "smollm2", "0.9-3.0@8", "grpo@8", "within a batch"),
    ("18-25", "smollm2-gpu", "0.6-1.2@8", "grpo@8", "within a batch"),
    ("162-173", "fixed", "0.6-1.2@8", "grpo@8", "within a batch"),
    ("162-173", "fixed", "0.9-3.0@8", "grpo@8", "within a batch"),
    ("52-57", "large-steps", "0.6-1.2@8", "", "within a batch"),
    ("52-57", "large-steps", "0.9-3.0@8", "", "within a batch"),
]


SAME = ["seeds", "folder", "methods", "others_folder", "others", "outcome"]


def named(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the rows with methods as FOLDER/METHOD, of the columns folder and others_folder."""
    methods = []
    others = []
    for one in rows.fillna("").itertuples():
        folder = one.others_folder or one.folder
        methods.append(" ".join(f"{one.folder}/{name}" for name in one.methods.split()))
        others.append(" ".join(f"{folder}/{name}" for name in one.others.split()))
    return rows.assign(methods=methods, others=others)


def of_front() -> pd.DataFrame:
    rows = []
    for row, seeds, folder, methods, others_folder, others in FRONT:
        on_toy = folder in ("fixed", "scope", "rate-1e-4", "rate-2e-4")
        table = "The front page: the toy" if on_toy else "The front page: SmolLM2"
        for column in ["reward", "pass@8" if on_toy else "mean@4"]:
            at_end = folder == "large-steps" and column == "mean@4"
            outcome = "mean@4 at the end" if at_end else column
            rows.append(
                (table, row, column, seeds, folder, methods, others_folder, others, outcome)
            )
    columns = "table,row,column,seeds,folder,methods,others_folder,others,outcome".split(",")
    return pd.DataFrame(rows, columns=columns)


def of_paper(tests: pd.DataFrame) -> pd.DataFrame:
    """Return the paper's figures: two levels and a difference a row."""
    rows = []
    registered = set(tests[tests["family"] != "†"][SAME].agg("|".join, axis=1))
    for _, one in tables.read_claims("paper").rename(columns=NAMES).iterrows():
        dagger = "" if not one.others or "|".join(one[SAME]) in registered else " †"
        row = f"{one.figure}: {one.quantity} ({one.paper}){dagger}"
        base = one[SAME].to_dict() | {"table": "The paper's figures", "row": row}
        if one.others:
            folder = one.others_folder or one.folder
            level = {"methods": one.others, "folder": folder, "others": "", "others_folder": ""}
            rows.append(base | level | {"column": "from"})
        rows.append(base | {"column": "to", "others": "", "others_folder": ""})
        if one.others:
            rows.append(base | {"column": "difference", "expected": one.sign, "digits": "3"})
    return pd.DataFrame(rows)


def label(one, with_outcome: bool) -> str:
    where = ""
    if one.folder.startswith("rate-"):
        where = one.folder.removeprefix("rate-") + ", "
    if one.family == "†":
        where = one.folder.removeprefix("rate-") + ", " + one.seeds.replace("-", "–") + ", "
    others = one.others
    if one.others_folder:
        others += f" at {one.others_folder.removeprefix('rate-')}"
    others = others.replace("at smollm2-larger-step", "at 6e-6").replace("at smollm2", "at 4e-6")
    compared = f"{one.methods} − {others}" if others else one.methods
    outcome = f", {one.outcome}" if with_outcome else ""
    family = one.family.removesuffix(": mean@16").removesuffix(": norm").removesuffix(": pass@8")
    family = family.partition(", half")[0].replace("M", "M", 1)
    half = " halves" if family != one.family and family == "M" else ""
    return f"{family}{half}: {where}{compared}{outcome}".removeprefix("†: ")


def band(one) -> str:
    if one.least == f"-{one.most}":
        return f"within ±{one.most}"
    return f"within {one.least} to {one.most}"


def all_comparisons() -> pd.DataFrame:
    pages = tables.read_claims("pages").rename(columns=NAMES)
    pages = pd.concat([of_front(), pages])
    tests = tables.read_claims("tests").rename(columns=NAMES)
    intervals = tables.read_claims("intervals").rename(columns=NAMES)
    later = {"family": "T", "seeds": "52-57", "folder": "large-steps-0.56", "methods": "bapo@8"}
    later |= {"others_folder": "large-steps", "outcome": "reward", "expected": "–"}
    later = pd.DataFrame([later | {"others": other} for other in ["0.9-3.0@8", "bapo@8"]])
    posthoc = pd.DataFrame(POST_HOC, columns=["seeds", "folder", "methods", "others", "outcome"])
    posthoc = posthoc.assign(family="†", expected="–", others_folder="")
    tests = pd.concat([tests, later, posthoc]).fillna("")
    paper = of_paper(tests)
    of_figures = paper[paper["column"] == "difference"][SAME].agg("|".join, axis=1)
    repeated = (tests["family"] == "†") & tests[SAME].agg("|".join, axis=1).isin(set(of_figures))
    tests = tests[~repeated].reset_index(drop=True)
    tests["expected"] = tests["expected"].str.removeprefix("half: ")
    on_toy = [one.family in ON_TOY or one.family.startswith("Range") for one in tests.itertuples()]
    places = []
    for one, toy in zip(tests.itertuples(), on_toy):
        if one.family == "†":
            places.append(("Not registered (†)", label(one, True), "difference (p)"))
        elif toy:
            places.append(("The pre-registered tests on the toy", label(one, False), one.outcome))
        else:
            name = "The other pre-registered tests"
            places.append((name, label(one, True), "difference (p)"))
    tests[["table", "row", "column"]] = places
    intervals["row"] = [f"{label(one, True)}: {band(one)}" for one in intervals.itertuples()]
    intervals = intervals.assign(
        table="The pre-registered intervals", column="interval", digits="3"
    )
    order = {"The paper's figures": 0, "The pre-registered tests on the toy": 1}
    tests = tests.sort_values("table", key=lambda names: names.map(order).fillna(2), kind="stable")
    tests["order"] = tests["table"].map({"Not registered (†)": 9}).fillna(0)
    tests = tests.assign(digits="3").sort_values("order", kind="stable")
    registered = tests[tests["family"] != "†"]
    tests["family"] += (
        tests["family"].eq("†").cumsum().astype(str).where(tests["family"] == "†", "")
    )
    parts = [pages, paper, registered, intervals.drop(columns="family"), tests[tests["order"] == 9]]
    together = pd.concat([named(part.fillna("")) for part in parts]).fillna("")
    together["digits"] = together["digits"].replace("", "2")
    plain = (together["others"] == "") & ~together["table"].isin(
        ["The pre-registered intervals", "Not registered (†)"]
    )
    together["confidence"] = together["confidence"].mask(
        ~plain & (together["confidence"] == ""), "0.95"
    )
    return together[COLUMNS]


def main() -> None:
    packs = outcomes.read_packs()
    sweeps = outcomes.read_sweeps(packs)
    all_runs(packs, sweeps).to_csv(RESULTS / "runs.csv")
    all_curves(packs, sweeps).to_csv(RESULTS / "curves.csv", float_format="%.5g", index=False)
    all_comparisons().to_csv(RESULTS / "comparisons.csv", index=False)


if __name__ == "__main__":
    main()
