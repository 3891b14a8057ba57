"""Runs that train.py has no option for: yoked bounds, single tokens, SFPO. Each runs in a worker process."""

import json
import random

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import support.run_folder
import train


def yoked(run: train.Run, task: train.Task, source: str) -> None:
    """The bounds that the same arm used in the sweep runs/SOURCE with the same start and seed, without their adaptation."""
    lines = support.run_folder.read_metrics(run.folder.parent.with_name(source) / run.folder.name / "metrics.jsonl")
    train.carry_out(run, task, given_bounds=permuted_bounds(lines, run.options.steps, run.seed))


def permuted_bounds(lines: list[dict], steps: int, seed: int) -> dict[tuple[int, int], tuple[float, float]]:
    """(step, update) -> (low, high) of `lines`, permuted over the steps among the bounds of the same update of a batch; drawn
    with replacement where `lines` has fewer steps, as some trained nothing."""
    rng, given = random.Random(seed), {}
    for update in sorted({line["update"] for line in lines} - {0}):  # 0: a step that trained nothing
        pairs = [(line["low"], line["high"]) for line in lines if line["update"] == update]
        more = [rng.choice(pairs) for _ in range(steps - len(pairs))]
        given |= {(step, update): pair for step, pair in enumerate(rng.sample(pairs + more, steps), 1)}
    return given


def keep_tokens(run: train.Run, task: train.Task) -> None:
    """A run that leaves some 40 tokens of each step's last update in tokens.jsonl, a line per step with a list per column."""

    def write(step: int, update: int, batch, log_probs, entropy) -> None:
        if update == run.arm.epochs * run.arm.parts:
            mask, old = batch.rollouts.mask, batch.rollouts.log_probs
            columns = {"sign": batch.advantages.sign().unsqueeze(1).expand_as(old), "ratio": (log_probs - old).exp()}
            columns |= {"probability": log_probs.exp(), "rollout_probability": old.exp(), "entropy": entropy}
            every = max(1, int(mask.sum()) // 40)
            kept = {name: [float(f"{x:.3g}") for x in column[mask][::every].tolist()] for name, column in columns.items()}
            with open(run.folder / "tokens.jsonl", "a") as file:
                file.write(json.dumps({"step": step, **kept}) + "\n")

    train.carry_out(run, task, watch=write)


def slow_fast(run: train.Run, task: train.Task, alpha: float = 0.8) -> None:
    """SFPO (arXiv 2510.04072): the last of a batch's updates starts at w0 + alpha (w - w0), w being the weights after those
    before it and w0 the weights before all of them."""
    updates, before = run.arm.epochs * run.arm.parts, []

    def keep(optimizer, *_) -> None:
        if len(before) == updates:
            before.clear()
        before.append(None if before else [weight.detach().clone() for weight in optimizer.param_groups[0]["params"]])

    def move(optimizer, *_) -> None:
        if len(before) == updates - 1:
            with torch.no_grad():
                for weight, first in zip(optimizer.param_groups[0]["params"], before[0]):
                    weight.copy_(first.lerp(weight, alpha))

    with register_optimizer_step_pre_hook(keep), register_optimizer_step_post_hook(move):
        train.carry_out(run, task)
