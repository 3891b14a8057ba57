"""Micro-batches: what one forward and backward pass of an update sees."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from rollout import PER_TOKEN, Rollouts


@dataclass
class MicroBatch:
    """Some of the responses that an update trains on, with all that a loss takes of them.

    An update is one optimizer step; a step is one batch of rollouts with all its updates.

    Every forward pass reads the same micro-batches, so that rounding cannot move the ratios of a
    policy that has not changed.
    """

    rollouts: Rollouts  # n responses, with the log-probs of the policies that drew their tokens
    advantages: Tensor  # [n] float32
    weights: Tensor  # [n, T] float32, share of each token in the loss of the whole update
    start_log_probs: Tensor | None = None  # [n, T] of the policy that begins this step's updates
    ages: Tensor | None = None  # [n, T] int64, steps since each token was drawn


Batch = list[MicroBatch]  # all that one update sees


def join(batch: Batch) -> MicroBatch:
    """All micro-batches as one, the responses in the order of the micro-batches."""
    if len(batch) == 1:
        return batch[0]
    parts_by_name = {name: [] for name in batch[0].rollouts.tensors()}
    for part in batch:
        for name, tensor in part.rollouts.tensors().items():
            parts_by_name[name].append(tensor)
    rollouts = {}
    for name, tensors in parts_by_name.items():
        has_positions = name in PER_TOKEN or name == "mask"
        rollouts[name] = join_rows(tensors) if has_positions else torch.cat(tensors)
    return MicroBatch(
        rollouts=Rollouts(**rollouts),
        advantages=torch.cat([part.advantages for part in batch]),
        weights=join_rows([part.weights for part in batch]),
        start_log_probs=join_rows([part.start_log_probs for part in batch]),
        ages=join_rows([part.ages for part in batch]),
    )


def join_rows(tensors: list[Tensor]) -> Tensor:
    """[n_i, T_i] each -> [sum of n_i, largest T_i], filled with 0 (False) on the right."""
    width = max(tensor.shape[1] for tensor in tensors)
    return torch.cat([pad(tensor, (0, width - tensor.shape[1])) for tensor in tensors])
