"""Measure what a literal reading of Eq. 8 would do, on the updates of GRPO: results/literal.csv.

    python experiments/literal.py

It makes the supervised starts of the default runs where they are missing. Of the first update of
every step: each reading's share at the start bounds of the main range, whether the search rests
there, and the bounds that it finds.
"""

import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pandas as pd
import torch
from torch import Tensor

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT))

import data
import runs
import train
from bapo import GRPO, PAPER_MAIN, bapo_loss, contribution_masses, search_clip_bounds
from bapo import token_weights

SEEDS = [101, 102, 103, 104, 105]
STEPS = 30


class Update(NamedTuple):
    """What the loss sees in an update; N responses of the groups that are kept, T positions."""

    step: int
    update: int  # from 1
    log_ratio: Tensor  # float32 [N, T]
    rollout_log_probs: Tensor  # float32 [N, T]
    advantages: Tensor  # float32 [N]
    mask: Tensor  # bool [N, T]


def updates_of_grpo(seed: int, steps: int) -> list[Update]:
    """The updates of `grpo@8` with train.py's defaults, recorded by its loss."""
    torch.set_num_threads(1)  # as train.py does
    updates = []

    def recording_loss(log_probs, rollout_log_probs, advantages, mask, **others):
        step, update = divmod(len(updates), 8)
        log_ratio = log_probs.detach() - rollout_log_probs
        of_update = (log_ratio, rollout_log_probs, advantages, mask)
        updates.append(Update(step + 1, update + 1, *of_update))
        return bapo_loss(log_probs, rollout_log_probs, advantages, mask, GRPO, **others)

    options = train.Options(seeds=[seed], steps=steps, output_dir=str(ROOT / "runs/default"))
    method = replace(train.parse_method("grpo@8", options), loss=recording_loss)
    with tempfile.TemporaryDirectory() as folder:
        run = train.Run(Path(folder) / f"grpo@8-seed{seed}", method, seed, options)
        train.train(run, data.countdown_task())
    return updates


def readings(update: Update) -> pd.DataFrame:
    """What three readings of Eq. 8 give for the main range: the share at its start, the bounds."""
    weights = token_weights(update.mask)
    literal = main_range(update, weights * update.rollout_log_probs.exp())
    natural = literal["share at its start"]
    share = natural / abs(2 * natural - 1)
    rests = share >= PAPER_MAIN.rho0
    rows = {
        "P / (P + N), as here": main_range(update, weights),
        "the same, with the factor π_rollout": literal,
        "P / abs(P − N) with it, as printed": {
            "share at its start": share,
            "updates that rest there": rests,
        },
    }
    return pd.DataFrame.from_dict(rows, orient="index")


def main_range(update: Update, weights: Tensor) -> dict[str, float]:
    """The search in the main range, tokens weighted by `weights` [N, T]."""
    masses = contribution_masses(update.log_ratio, update.advantages, weights, PAPER_MAIN)
    found = search_clip_bounds(masses, PAPER_MAIN)
    return {
        "share at its start": found.rho_start,
        "updates that rest there": found.high == PAPER_MAIN.high_start,
        "mean low": found.low,
        "mean high": found.high,
    }


def main() -> int:
    """Write the file. Returns the exit status 0."""
    found = {}
    for seed in SEEDS:
        for update in updates_of_grpo(seed, STEPS):
            if update.update == 1:  # of later ones the ratios tell, too
                found[seed, update.step] = readings(update)
    rows = pd.concat(found, names=["seed", "step", "reading"])
    rows.to_csv(ROOT / "results/literal.csv", float_format="%.4g")
    return 0


if __name__ == "__main__":
    runs.command("literal.py", main, "Interrupted: nothing is written")
