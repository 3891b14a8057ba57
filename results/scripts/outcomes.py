"""Read the packed runs and compute their outcomes: a table per pack, a row per method and seed.

results/protocol.md defines what is tested. Metrics are those of docs/logs.md.
"""

from pathlib import Path

import pandas as pd

from support import plot

RESULTS = Path(__file__).parents[1]
# Classes of tokens: their names in the packs of results/mechanism, the sign of the advantage, the
# range of the ratio, and whether [0.6, 1.2], [0.8, 1.2] and [0.9, 3.0] let them through (●)
CLASSES = {
    "neg_below_0.6": "A < 0, r < 0.6 ○○○",
    "neg_0.6_0.8": "A < 0, 0.6 to 0.8 ●○○",
    "neg_0.8_0.9": "A < 0, 0.8 to 0.9 ●●○",
    "neg_above_0.9": "A < 0, r ≥ 0.9 ●●●",
    "pos_below_1.2": "A > 0, r ≤ 1.2 ●●●",
    "pos_1.2_3.0": "A > 0, 1.2 to 3.0 ○○●",
    "pos_above_3.0": "A > 0, r > 3.0 ○○○",
}

Packs = dict[str, plot.Records]  # folder -> what is packed in it
Sweeps = dict[str, pd.DataFrame]  # folder -> outcomes of its runs


def read_packs() -> Packs:
    """Return what is packed in results/. Folders are named like "fixed" and "mechanism/toy"."""
    folders = sorted(path.parent for path in RESULTS.rglob("runs.json"))
    return {str(folder.relative_to(RESULTS)): plot.load(folder) for folder in folders}


def read_sweeps(packs: Packs) -> Sweeps:
    """Return the outcomes of all runs."""
    sweeps = {}
    for name, records in packs.items():
        if name.startswith("mechanism"):
            sweeps[name] = reused_means(records.lines)
        elif name == "large-steps":
            sweeps[name] = large_step_outcomes(records)
        elif name.startswith("smollm2"):
            sweeps[name] = language_outcomes(records)
        else:
            sweeps[name] = toy_outcomes(records)
    return sweeps


def toy_outcomes(records: plot.Records) -> pd.DataFrame:
    """Return the outcomes of parts 1 to 3 and 6 of the protocol, and others."""
    lines = records.lines
    numbers = plot.outcomes(records)
    entropy = plot.by_step(lines, "entropy")
    numbers["lowest entropy"] = entropy.rolling(20).mean().min()
    return numbers.join(within_batches(lines, lines))


def language_outcomes(records: plot.Records) -> pd.DataFrame:
    """Return the outcomes of parts 4 and 5 of the protocol, and others.

    mean@4 is that of steps 8 and 16, later mean@4 that of steps 24 and 32. Bounds, searches and kl
    are those of batches 3 to 16.
    """
    lines = records.lines.query("step <= 16")
    reward = plot.by_step(records.lines, "reward")
    entropy = plot.by_step(records.lines, "entropy")
    held_out = plot.by_step(records.lines, "held_out_mean@4")
    numbers = {
        "reward": reward.loc[2:16].mean(),
        "entropy": entropy.loc[9:16].mean(),
        "mean@4": held_out.loc[:16].mean(),
        "gradient norm": lines.groupby(plot.RUN)["grad_norm"].quantile(0.95),
        "later reward": reward.loc[17:].mean(),
        "later entropy": entropy.loc[25:].mean(),
        "later mean@4": held_out.loc[17:].mean(),
    }
    later = lines.query("step >= 3")
    bounds = later.query("update > 1").groupby(plot.RUN)[["low", "high"]].mean()
    return pd.DataFrame(numbers).join(bounds).join(within_batches(lines, later))


def large_step_outcomes(records: plot.Records) -> pd.DataFrame:
    """Return the outcomes of part 7 of the protocol.

    Changes of entropy and falls of reward are those from a step to the next.
    """
    reward = plot.by_step(records.lines, "reward")
    entropy = plot.by_step(records.lines, "entropy")
    numbers = {
        "reward": reward.loc[2:16].mean(),
        "change of entropy": entropy.diff().abs().mean(),
        "largest fall of reward": -reward.diff().min(),
        "mean@4 at the end": records.accuracies["mean@4"],
        "truncated": plot.by_step(records.lines, "truncated").mean(),
    }
    of_classes = reused_means(records.lines).filter(
        regex="^(share|improbable|probability|fall_at)_"
    )
    within = within_batches(records.lines, records.lines)["within a batch"]
    return pd.DataFrame(numbers).join(within).join(of_classes)


def reused_means(lines: pd.DataFrame) -> pd.DataFrame:
    """Return means over a run's batches from the third on, without each batch's first update."""
    reused = lines.query("step >= 3 and update > 1")
    return reused.select_dtypes("number").groupby(plot.RUN).mean()


def within_batches(lines: pd.DataFrame, later: pd.DataFrame) -> pd.DataFrame:
    """Return what happens between the first and the eighth update of a batch.

    The change of entropy is taken at the batch's own positions, before the update. It is negative
    if entropy falls. kl and searches are those of the later lines.
    """
    of_batches = lines.set_index("step", append=True)
    first = of_batches[of_batches["update"] == 1]
    last = of_batches[of_batches["update"] == 8]
    numbers = {
        "within a batch": (last["entropy_now"] - first["entropy_now"]).groupby(plot.RUN).mean(),
        "kl": later[later["update"] == 8].groupby(plot.RUN)["kl"].mean(),
        "rho at ratio 1": first.groupby(plot.RUN)["rho_start"].mean(),
    }
    return pd.DataFrame(numbers).join(searches(later.query("update > 1"), plot.RUN))


def searches(lines: pd.DataFrame, by: list[str]) -> pd.DataFrame:
    """Return the shares of BAPO's searches by where they end.

    The upper bound moves first, and the lower one only when the upper one has reached 3.0.
    """
    searched = lines.query("method in ['bapo@8', 'bapo-main@8']")
    at_start = searched["high"] == 1.2
    at_end = searched["low"] == 0.9
    ends = {
        "end at [0.9, 3.0]": at_end,
        "end between": ~at_start & ~at_end,
        "never leave [0.6, 1.2]": at_start,
    }
    return searched.assign(**ends).groupby(by)[list(ends)].mean()
