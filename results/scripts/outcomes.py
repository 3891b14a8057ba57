"""Read the packed runs and compute their outcomes: a table per pack, a row per method and seed.

results/protocol.md defines what is tested. Metrics are those of docs/logs.md.
"""

from pathlib import Path

import numpy as np
import pandas as pd

from bapo import PAPER_MAIN
from support import plot

RESULTS = Path(__file__).parents[1]
LANGUAGE_MODEL = ("smollm2", "smollm2-larger-step", "smollm2-gpu")
BATCH = [*plot.RUN, "step"]
MECHANISM = ("smollm2", "toy")  # folders in results/mechanism
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
    """Return what is packed."""
    folders = sorted(path.parent for path in results.glob("*/runs.json"))
    return {folder.name: plot.load(folder) for folder in folders}


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
    numbers = common_outcomes(records)
    numbers["lowest entropy"] = plot.by_step(lines, "entropy").rolling(20).mean().min()
    numbers["negative share − 0.5"] = 0.5 - numbers["share"]
    numbers["rollouts' entropy"] = change_of_rollouts(lines, lines["step"].max() - 10)
    trained = lines.query("update > 0")
    # Only between updates on one batch, whose tokens are the same.
    falls = trained[["predicted_entropy_fall"]].assign(
        fall=trained.groupby(BATCH)["entropy_now"].diff(-1)
    )
    ranks = falls.groupby(plot.RUN).corr("spearman")["fall"]
    numbers["rank"] = ranks.xs("predicted_entropy_fall", level=-1)
    numbers["kl"] = kl(trained)
    return numbers.join(searches(trained.query("update > 1"), plot.RUN))


def language_outcomes(records: plot.Records) -> pd.DataFrame:
    """Return the outcomes of parts 4 and 5 of the protocol, and others.

    "Later" outcomes are those of steps 17 to 32. Mean bounds, searches and kl are those of batches
    3 to 16.
    """
    lines = records.lines.query("step <= 16")
    later = records.lines.query("step > 16")
    numbers = common_outcomes(records._replace(lines=lines))
    rewards = plot.by_step(lines.query("step >= 2"), "reward").mean()
    later_rewards = plot.by_step(later, "reward").mean()
    numbers["reward"] = rewards
    numbers["entropy"] = plot.by_step(lines.query("step >= 9"), "entropy").mean()
    numbers["rollouts' entropy"] = change_of_rollouts(lines, 8)
    trained = numbers.index.get_level_values("method") != plot.START
    held_out = plot.by_step(lines, "held_out_mean@4").mean()  # after steps 8 and 16
    numbers.loc[trained, "mean@4"] = held_out
    numbers["later reward"] = later_rewards
    numbers["later mean@4"] = plot.by_step(later, "held_out_mean@4").mean()  # after 24 and 32
    numbers["later entropy"] = plot.by_step(later.query("step > 24"), "entropy").mean()
    numbers["log-odds"] = np.log(rewards / (1 - rewards))
    numbers["later log-odds"] = np.log(later_rewards / (1 - later_rewards))
    no_update = later.query("update == 0").groupby(plot.RUN).size()
    numbers["later, no update"] = no_update.reindex(later_rewards.index, fill_value=0) / 16
    reused = lines.query("step >= 3 and update > 1")
    numbers[["mean low", "mean high"]] = reused.groupby(plot.RUN)[["low", "high"]].mean()
    numbers["log norm, equal groups"] = norm_at_equal_groups(lines.query("step >= 3"))
    numbers["kl"] = kl(reused)
    return numbers.join(searches(reused, plot.RUN))


def common_outcomes(records: plot.Records) -> pd.DataFrame:
    """Return the outcomes that both models have."""
    short = {"gradient norm": "norm", "positive share": "share"}
    numbers = plot.outcomes(records).rename(columns=short)
    first = records.lines.query("update == 1")
    trained = records.lines.query("update > 0")
    numbers["norm above 1"] = (trained["grad_norm"] > 1).groupby(plot.RUN).mean()
    rho = first.groupby(plot.RUN)["rho_start"]
    numbers["rho, first updates"] = rho.mean()
    numbers["rho, lag 1"] = rho.apply(pd.Series.autocorr)
    change = within_batches(records.lines)
    numbers["within a batch"] = change.groupby(plot.RUN).mean()
    numbers["sum within batches"] = change.groupby(plot.RUN).sum()
    return numbers


def within_batches(lines: pd.DataFrame) -> pd.Series:
    """Return the change of entropy from the first to the last update of every batch.

    Both are at the batch's own positions, before that update. Negative: entropy falls. Batches
    that broke off before their last update are left out. The index is method, seed and step.
    """
    of_batch = lines.query("update > 0").groupby(BATCH)["entropy_now"]
    updates = of_batch.size()
    whole = updates == updates.groupby(plot.RUN).transform("max")
    return (of_batch.last() - of_batch.first())[whole]


def change_of_rollouts(lines: pd.DataFrame, after: int) -> pd.Series:
    """Return the rollouts' mean entropy after that step, less that of the first batch."""
    entropy = plot.by_step(lines, "entropy")
    return entropy[entropy.index > after].mean() - entropy.loc[1]


def where_searches_ended(lines: pd.DataFrame) -> pd.DataFrame:
    """Return for every batch its change of entropy and where searches of updates 2 to 8 ended."""
    reused = lines.query("update > 1").set_index("step", append=True)
    ended = reused.assign(start=reused["high"] == PAPER_MAIN.high_start)
    ended["end"] = reused["low"] == PAPER_MAIN.low_max
    shares = ended.groupby(BATCH)[["start", "end"]].mean()
    batches = pd.DataFrame({"change": within_batches(lines), "searches": "both, or between"})
    batches.loc[shares["start"] == 1, "searches"] = "all at [0.6, 1.2]"
    batches.loc[shares["end"] == 1, "searches"] = "all at [0.9, 3.0]"
    return batches


def kl(lines: pd.DataFrame) -> pd.Series:
    """Return for every run the mean kl of its batches' last updates."""
    return lines.groupby(BATCH)["kl"].last().groupby(plot.RUN).mean()


def norm_at_equal_groups(lines: pd.DataFrame) -> pd.Series:
    """Return for every run by how much its first updates' log norm is above that of all runs.

    The mean over all runs is that of the updates with as many groups left after filtering.
    """
    first = lines.query("update == 1")
    log_norm = np.log(first["grad_norm"])
    usual = log_norm.groupby(first["filtered_groups"].round(2)).transform("mean")
    return (log_norm - usual).groupby(plot.RUN).mean()


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
        "at start": searched.get("at_start", at_start).fillna(at_start),
        "at end": searched.get("at_end", at_end).fillna(at_end),
    }
    means = searched.assign(**shares).groupby(by)[list(shares)].mean()
    means["inside"] = (1 - means["at start"] - means["at end"]).clip(lower=0)
    return means


def read_mechanism(results: Path) -> dict[str, pd.DataFrame]:
    """Return what is packed in results/mechanism: a row per update 2 to 8 from batch 3 on."""
    lines = {}
    for name in MECHANISM:
        path = results / "mechanism" / name / "metrics.csv.xz"
        if path.exists():
            lines[name] = pd.read_csv(path, index_col=plot.RUN).query("step >= 3 and update > 1")
    return lines
