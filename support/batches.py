"""What an optimizer step sees."""

from typing import NamedTuple

import torch
from torch import Tensor

from bapo import search_clip_bounds, token_weights
from rollout import Rollouts, autocast, recorded_log_probs
from support.objectives import balanced_scale, m2po_bounds, with_inputs


class Batch(NamedTuple):
    """The responses that one update sees, and the micro-batches in which every forward pass reads them: always the same
    ones, so that rounding cannot move the ratios of a policy that has not changed."""

    rollouts: Rollouts
    advantages: Tensor  # [N]
    weights: Tensor  # [N, T], bapo.token_weights of all of them
    micro_batches: list[tuple[Tensor, Rollouts]]  # rows, and those rows alone
    further: dict[str, Tensor]  # [N, T] each, by name: what a method of objectives.py takes beyond the usual inputs


def make_batches(rollouts: Rollouts, advantages: Tensor, kept: Tensor, arm, micro_batch_tokens: int) -> list[Batch]:
    """What the updates see in turn: the groups that are `kept` (bool [groups]), in arm.parts parts, or as many as groups."""
    rows = torch.arange(len(advantages), device=advantages.device).view(len(kept), -1)[kept]
    batches = []
    for part in rows.tensor_split(min(arm.parts, len(rows))) if len(rows) else ():
        chosen, of_rows = rollouts.select(part.flatten()), advantages[part.flatten()]
        weights = token_weights(chosen.mask, arm.aggregation)
        if arm.share is not None:
            scale = balanced_scale(of_rows, weights, arm.share, arm.scale_up)
            of_rows = torch.where(of_rows < 0, scale * of_rows, of_rows)
        batches.append(Batch(chosen, of_rows, weights, chosen.micro_batches(micro_batch_tokens), {}))
    return batches


def objective_losses(arm, batch: Batch, rows, log_probs: Tensor, entropy: Tensor, bounds) -> Tensor:
    """Token losses of arm.objective for some rows of a batch: log_probs and entropy [n, T'], float32 [n, T']."""
    columns, rollouts = slice(log_probs.shape[1]), batch.rollouts
    of_batch = {name: tensor[rows, columns] for name, tensor in batch.further.items()}
    four = log_probs, rollouts.log_probs[rows, columns], batch.advantages[rows], rollouts.mask[rows, columns]
    return with_inputs(arm.objective, *four, entropy=entropy, bounds=bounds, **of_batch)


def record(model, batch: Batch, options) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies [N, T] of a batch under the policy as it is."""
    with autocast(options.device, options.precision):
        return recorded_log_probs(model, batch.micro_batches, options.temperature)


def record_further(model, batches: list[Batch], step: int, arm, options) -> None:
    """Fill batch.further for a method of objectives.py. The policy that drew the tokens and the one that begins this step's
    updates are the same, unless rollouts are partial."""
    for batch in batches if arm.objective else []:
        rollouts, start, ages = batch.rollouts, batch.rollouts.log_probs, torch.zeros_like(batch.rollouts.response_ids)
        if rollouts.versions is not None:
            start, ages = record(model, batch, options)[0], step - rollouts.versions
        batch.further.update(start_log_probs=start, proximal_log_probs=start, ages=ages, rollout_entropy=rollouts.entropy)


def bounds_of_update(model, batch: Batch, unchanged: bool, arm, options):
    """Searched bounds of an update that is read in several micro-batches: all ratios are needed before the first backward
    pass, so one more forward pass, unless the policy is unchanged since it drew them, so that they are 1. Else None: the loss
    finds them itself."""
    search, m2po = arm.search, arm.objective == "m2po"
    fixed = (search.low_start, search.high_start) == (search.low_max, search.high_max) and not m2po
    if len(batch.micro_batches) == 1 or fixed:
        return None
    known = unchanged and batch.rollouts.versions is None
    log_probs, rollouts = batch.rollouts.log_probs if known else record(model, batch, options)[0], batch.rollouts
    if m2po:
        return m2po_bounds(log_probs, rollouts.log_probs, batch.advantages, rollouts.mask)
    return search_clip_bounds(log_probs - rollouts.log_probs, batch.advantages, batch.weights, search)
