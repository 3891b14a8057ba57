"""What trl_bapo.py, verl_bapo.py and trinity_bapo.py share."""

import math
from collections.abc import Callable
from dataclasses import dataclass, fields

import torch
import torch.distributed as dist
from torch import Tensor

from bapo import ClipBounds, ClipSearch, contribution_masses, search_clip_bounds, token_losses


@dataclass
class SearchOptions:
    """The fields of bapo.ClipSearch, for a trainer's own class of options to inherit."""

    rho0: float = ClipSearch.rho0
    low_start: float = ClipSearch.low_start
    low_max: float = ClipSearch.low_max
    low_step: float = ClipSearch.low_step
    high_start: float = ClipSearch.high_start
    high_max: float = ClipSearch.high_max
    high_step: float = ClipSearch.high_step

    def clip_search(self) -> ClipSearch:
        """The search that these options describe; ValueError for what makes no sense."""
        options = {one.name: getattr(self, one.name) for one in fields(ClipSearch)}
        return ClipSearch(**options)


def searched_loss(
    log_ratio: Tensor,
    advantages: Tensor,
    aggregate: Callable[[Tensor], Tensor],
    search: ClipSearch,
) -> tuple[Tensor, ClipBounds, int]:
    """Search one pair of bounds for all ranks.

    log_ratio and advantages are [B, T]. aggregate is the trainer's own: losses [B, T] -> loss. It
    is linear, so its gradient is each token's weight [B, T] in the loss. The sums are over the
    world group, and every rank must call this equally often.

    Returns the loss at the bounds, the bounds, and the number of responses that were searched
    (copies of a rank, by sequence, tensor and context parallelism, count too). A search that sees
    few of them acts much like a fixed clip at [low_max, high_start].
    """
    weights = torch.func.grad(aggregate)(torch.zeros_like(log_ratio))
    masses = contribution_masses(log_ratio, advantages, weights, search)
    responses = weights.any(dim=1).sum()
    if dist.is_initialized():
        dist.all_reduce(masses)
        dist.all_reduce(responses)
    bounds = search_clip_bounds(masses, search)
    losses = token_losses(log_ratio, advantages, bounds.low, bounds.high)
    return aggregate(losses), bounds, responses.item()


def bound_metrics(bounds: ClipBounds, prefix: str) -> dict[str, float]:
    """What to log of a search. A rho of NaN is left out, because trainers average what they log."""
    metrics = {}
    for name, value in bounds._asdict().items():
        if not math.isnan(value):
            metrics[prefix + name] = float(value)
    return metrics
