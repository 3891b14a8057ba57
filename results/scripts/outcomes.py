"""Read the packed runs and compute their outcomes: a table per pack, a row per method and seed.

results/protocol.md defines what is tested. Metrics are those of docs/logs.md.
"""

from pathlib import Path

import pandas as pd

from bapo import PAPER_MAIN
from support import plot

RESULTS = Path(__file__).parents[1]
LANGUAGE_MODEL = ("smollm2", "smollm2-larger-step", "smollm2-gpu")
BATCH = [*plot.RUN, "step"]
SHORT = {"gradient norm": "norm", "positive share": "share"}
MECHANISM = {"smollm2": "SmolLM2", "toy": "toy"}  # folders in results/mechanism
# Classes of tokens: the sign of the advantage, and the range of the ratio. These are names of
# columns in the packs of results/mechanism.
CLASSES = {
    "neg_below_0.6": "A < 0, r < 0.6",
    "neg_0.6_0.8": "A < 0, 0.6 to 0.8",
    "neg_0.8_0.9": "A < 0, 0.8 to 0.9",
    "neg_above_0.9": "A < 0, r ≥ 0.9",
    "pos_below_1.2": "A > 0, r ≤ 1.2",
    "pos_1.2_3.0": "A > 0, 1.2 to 3.0",
    "pos_above_3.0": "A > 0, r > 3.0",
}

Packs = dict[str, plot.Records]  # folder -> what is packed in it
Sweeps = dict[str, pd.DataFrame]  # folder -> outcomes of its runs


def read_packs(results: Path) -> Packs:
    """Return what is packed, without results/mechanism."""
    folders = sorted(path.parent for path in results.glob("*/runs.json"))
    return {folder.name: plot.load(folder) for folder in folders}


def read_mechanism(results: Path) -> dict[str, pd.DataFrame]:
    """Return what is packed in results/mechanism: a row per update 2 to 8 from batch 3 on."""
    lines = {}
    for name in MECHANISM:
        folder = results / "mechanism" / name
        if folder.exists():
            lines[name] = plot.load(folder).lines.query("step >= 3 and update > 1")
    return lines


def read_sweeps(packs: Packs) -> Sweeps:
    """Return the outcomes of all runs. "smollm2-both" has both sets of seeds of SmolLM2."""
    sweeps = {}
    for name, records in packs.items():
        of_pack = language_outcomes if name in LANGUAGE_MODEL else toy_outcomes
        sweeps[name] = of_pack(records)
    sweeps["smollm2-both"] = pd.concat([sweeps["smollm2"], sweeps["smollm2-gpu"]])
    return sweeps


def toy_outcomes(records: plot.Records) -> pd.DataFrame:
    """Return the outcomes of parts 1 to 3 and 6 of the protocol, and others."""
    lines = records.lines
    numbers = plot.outcomes(records).rename(columns=SHORT)
    entropy = plot.by_step(lines, "entropy")
    numbers["lowest entropy"] = entropy.rolling(20).mean().min()
    numbers["negative share − 0.5"] = 0.5 - numbers["share"]
    return numbers.join(within_runs(lines, lines.query("update > 1")))


def language_outcomes(records: plot.Records) -> pd.DataFrame:
    """Return the outcomes of parts 4 and 5 of the protocol, and others.

    "Later" outcomes are those of steps 17 to 32. Mean bounds, searches and kl are those of batches
    3 to 16.
    """
    lines = records.lines.query("step <= 16")
    all_lines = records.lines
    numbers = plot.outcomes(records._replace(lines=lines)).rename(columns=SHORT)
    held_out = mean_after(0, lines, "held_out_mean@4")  # of steps 8 and 16
    numbers["mean@4"] = held_out.combine_first(numbers["mean@4"])
    numbers["reward"] = mean_after(1, lines, "reward")
    numbers["entropy"] = mean_after(8, lines, "entropy")
    numbers["later reward"] = mean_after(16, all_lines, "reward")
    numbers["later mean@4"] = mean_after(16, all_lines, "held_out_mean@4")  # of steps 24 and 32
    numbers["later entropy"] = mean_after(24, all_lines, "entropy")
    reused = lines.query("step >= 3 and update > 1")
    bounds = reused.groupby(plot.RUN)[["low", "high"]].mean()
    numbers["mean low"] = bounds["low"]
    numbers["mean high"] = bounds["high"]
    return numbers.join(within_runs(lines, reused))


def mean_after(step: int, lines: pd.DataFrame, metric: str) -> pd.Series:
    """Return for every run the mean of a metric over the steps after this one."""
    return plot.by_step(lines[lines["step"] > step], metric).mean()


def within_runs(lines: pd.DataFrame, reused: pd.DataFrame) -> pd.DataFrame:
    """Return the change of entropy within batches, kl of last updates, and where searches end."""
    last_kl = reused.groupby(BATCH)["kl"].last()
    numbers = {
        "within a batch": within_batches(lines).groupby(plot.RUN).mean(),
        "kl": last_kl.groupby(plot.RUN).mean(),
    }
    return pd.DataFrame(numbers).join(searches(reused, plot.RUN))


def within_batches(lines: pd.DataFrame) -> pd.Series:
    """Return the change of entropy from the first to the last update of every batch.

    Both are at the batch's own positions, before that update. Negative: entropy falls. Batches
    that broke off before their last update are left out. The index is method, seed and step.
    """
    of_batch = lines.query("update > 0").groupby(BATCH)["entropy_now"]
    updates = of_batch.size()
    whole = updates == updates.groupby(plot.RUN).transform("max")
    return (of_batch.last() - of_batch.first())[whole & (updates > 1)]


def searches(lines: pd.DataFrame, by: list[str]) -> pd.DataFrame:
    """Return the shares of searches that end at the start, inside or at the end of their range.

    All ranges begin and end with the main range's bounds, and the upper bound moves first. Runs
    with several searches in an update are left out, because `low` and `high` are their means.
    """
    methods = lines.index.get_level_values("method")
    one_search = methods.str.startswith("bapo") & ~methods.str.contains("-per")
    searched = lines[one_search]
    at_start = searched["high"] == PAPER_MAIN.high_start
    at_end = searched["low"] == PAPER_MAIN.low_max
    ends = {"at start": at_start, "inside": ~at_start & ~at_end, "at end": at_end}
    return searched.assign(**ends).groupby(by)[list(ends)].mean()


def where_searches_ended(lines: pd.DataFrame) -> pd.DataFrame:
    """Return for every batch its change of entropy and where searches of updates 2 to 8 ended."""
    reused = lines.query("update > 1").set_index("step", append=True)
    shares = searches(reused, BATCH)
    batches = pd.DataFrame({"change": within_batches(lines), "searches": "both, or between"})
    batches.loc[shares["at start"] == 1, "searches"] = "all at [0.6, 1.2]"
    batches.loc[shares["at end"] == 1, "searches"] = "all at [0.9, 3.0]"
    return batches


def seeds(lines: pd.DataFrame) -> str:
    """Return the seeds of a few runs: "seed 40", or "seeds 40, 41"."""
    found = lines.index.unique("seed")
    return f"seed{'s' * (len(found) > 1)} {', '.join(map(str, found))}"
