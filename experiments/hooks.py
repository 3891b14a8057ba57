"""Runs that train.py has no option for: yoked bounds, single tokens, SFPO.

Each function makes one run, in a worker process, as train.carry_out does.
"""

import json
import random

from torch import Tensor, no_grad
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

import train
from support.data import Task
from support.run_folder import Run, read_metrics

Bounds = tuple[float, float]  # low, high
TOKENS_KEPT = 40  # about so many of each step


# ---------------------------------------------------------------- yoked bounds
def yoked(run: Run, task: Task, source: str) -> None:
    """Train with the bounds that the same arm, start and seed used in the sweep runs/SOURCE.

    They come in another order, so that they no longer follow what the run does.
    """
    searched = run.folder.parent.with_name(source) / run.folder.name
    lines = read_metrics(searched / "metrics.jsonl")
    bounds = permuted_bounds(lines, run.options.steps, run.seed)
    train.carry_out(run, task, given_bounds=bounds)


def permuted_bounds(lines: list[dict], steps: int, seed: int) -> dict[tuple[int, int], Bounds]:
    """(step, update) -> (low, high): those of `lines`, in a random order of the steps.

    The bounds of a batch's first update stay bounds of a first update, and so on. Where `lines`
    have fewer steps, as some trained nothing, the missing ones are drawn with replacement.
    """
    rng = random.Random(seed)
    updates = {line["update"] for line in lines}
    updates.discard(0)  # the mark of a step that trained nothing
    given = {}
    for update in sorted(updates):
        used = [(line["low"], line["high"]) for line in lines if line["update"] == update]
        missing = [rng.choice(used) for _ in range(steps - len(used))]
        shuffled = rng.sample(used + missing, steps)
        for step, bounds in enumerate(shuffled, 1):
            given[step, update] = bounds
    return given


# ---------------------------------------------------------------- single tokens
def keep_tokens(run: Run, task: Task) -> None:
    """Train, and keep some tokens of each step's last update in the run's tokens.jsonl."""
    last_update = run.arm.epochs * run.arm.parts

    def watch(step: int, update: int, batch, log_probs: Tensor, entropy: Tensor) -> None:
        if update == last_update:
            columns = token_columns(batch, log_probs, entropy)
            with open(run.folder / "tokens.jsonl", "a") as file:
                file.write(json.dumps({"step": step, **columns}) + "\n")

    train.carry_out(run, task, watch=watch)


def token_columns(batch, log_probs: Tensor, entropy: Tensor) -> dict[str, list[float]]:
    """Every so many response tokens of a batch, a list per column, with three significant digits.

    log_probs and entropy [N, T]: the policy in training, at the tokens of batch.rollouts.
    """
    mask = batch.rollouts.mask
    rollout_log_probs = batch.rollouts.log_probs
    columns = {
        "sign": batch.advantages.sign().unsqueeze(1).expand_as(log_probs),
        "ratio": (log_probs - rollout_log_probs).exp(),
        "probability": log_probs.exp(),
        "rollout_probability": rollout_log_probs.exp(),
        "entropy": entropy,
    }
    every = max(1, int(mask.sum()) // TOKENS_KEPT)
    kept = {}
    for name, column in columns.items():
        kept[name] = [float(f"{value:.3g}") for value in column[mask][::every].tolist()]
    return kept


# ---------------------------------------------------------------- SFPO
def slow_fast(run: Run, task: Task, alpha: float = 0.8) -> None:
    """SFPO (arXiv 2510.04072): the last of a batch's updates starts nearer to the first weights.

    With w0 the weights before all updates on a batch, and w those after all but the last, the last
    one starts at w0 + alpha (w - w0).
    """
    updates = run.arm.epochs * run.arm.parts
    first_weights: list[Tensor] = []
    done = 0  # updates on this batch

    def before_update(optimizer, *_) -> None:
        nonlocal done
        if done == updates:
            done = 0
        if done == 0:
            first_weights.clear()
            for weight in optimizer.param_groups[0]["params"]:
                first_weights.append(weight.detach().clone())

    def after_update(optimizer, *_) -> None:
        nonlocal done
        done += 1
        if done == updates - 1:
            with no_grad():
                for weight, first in zip(optimizer.param_groups[0]["params"], first_weights):
                    weight.copy_(first.lerp(weight, alpha))

    before = register_optimizer_step_pre_hook(before_update)
    after = register_optimizer_step_post_hook(after_update)
    with before, after:
        train.carry_out(run, task)
