"""Measure what a literal reading of Eq. 8 would do, on the updates of GRPO: results/literal.csv.

    python experiments/literal.py

Needs the supervised starts of the default runs (see reproduce.sh). Of the first
update of every step, each reading's share at the start bounds of the main range, whether the search
rests there, and the bounds that it finds.
"""

import sys
from collections.abc import Iterator
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
from bapo import (
    GRPO,
    PAPER_MAIN,
    bapo_loss,
    clip_bounds,
    contribution_masses,
    group_relative_advantages,
    token_weights,
)
from rollout import generate, load_policy, response_texts, token_log_probs

SEEDS = [101, 102, 103, 104, 105]
STEPS = 30


class Update(NamedTuple):
    """What an update sees before its step; N responses of groups that are kept, T positions."""

    step: int
    update: int  # from 1
    log_ratio: Tensor  # float32 [N, T]
    rollout_log_probs: Tensor  # float32 [N, T]
    advantages: Tensor  # float32 [N]
    mask: Tensor  # bool [N, T]


def updates_of_grpo(seed: int, steps: int) -> Iterator[Update]:
    """The updates of `grpo@8` with train.py's defaults, each before it is made."""
    options = train.Options(seeds=[seed])
    task = data.countdown_task()
    policy, tokenizer = load_policy(str(ROOT / f"runs/starts/attempts2-steps6000-seed{seed}"))
    learning_rate = options.learning_rate
    optimizer = torch.optim.AdamW(policy.parameters(), lr=learning_rate, weight_decay=0.0)
    torch.manual_seed(seed)
    for step in range(1, steps + 1):
        problems = data.problems_of_step(task.train, step, options.prompts_per_step, seed)
        prompts = [problem.prompt for problem in problems]
        rollouts = generate(policy, prompts, **train.sampling(options))
        rewards = train.grade(task, response_texts(tokenizer, rollouts), rollouts, problems)
        advantages = group_relative_advantages(rewards, options.group_size)
        kept = advantages.nonzero().flatten()
        advantages = advantages[kept]
        mask = rollouts.mask[kept]
        for update in range(1, 9):
            log_probs, _ = token_log_probs(policy, rollouts, kept, options.temperature)
            if update == 1:
                rollout_log_probs = log_probs.detach()
            log_ratio = log_probs.detach() - rollout_log_probs
            yield Update(step, update, log_ratio, rollout_log_probs, advantages, mask)
            loss, _ = bapo_loss(log_probs, rollout_log_probs, advantages, mask, GRPO)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()


def readings(update: Update) -> list[dict]:
    """What three readings of Eq. 8 give for the main range: the share at its start, the bounds."""
    plain = token_weights(update.mask)
    all_weights = {
        "P / (P + N), as here": plain,
        "the same, with the factor π_rollout": plain * update.rollout_log_probs.exp(),
    }
    rows = []
    for reading, weights in all_weights.items():
        masses = contribution_masses(update.log_ratio, update.advantages, weights, PAPER_MAIN)
        found = clip_bounds(masses, PAPER_MAIN)
        rests = found.high == PAPER_MAIN.high_start
        rows.append({"reading": reading, "share": found.rho_start, "rests": rests})
        rows[-1] |= {"low": found.low, "high": found.high}
    share = found.rho_start / abs(2 * found.rho_start - 1)
    rests = share >= PAPER_MAIN.rho0
    rows.append({"reading": "P / abs(P − N) with it, as printed", "share": share, "rests": rests})
    return rows


def main() -> int:
    """Write the file. Returns the exit status 0."""
    rows = []
    for seed in SEEDS:
        for update in updates_of_grpo(seed, STEPS):
            if update.update == 1:  # of later ones the ratios tell, too
                of_update = {"seed": seed, "step": update.step}
                rows += [of_update | reading for reading in readings(update)]
    path = ROOT / "results/literal.csv"
    pd.DataFrame(rows).to_csv(path, index=False, float_format="%.4g")
    return 0


if __name__ == "__main__":
    runs.command("literal.py", main, "Interrupted: nothing is written")
