"""What trl_bapo.py, verl_bapo.py and trinity_bapo.py share."""

from collections.abc import Callable
from dataclasses import dataclass, fields

import torch
import torch.distributed as dist
from torch import Tensor

from bapo import ClipSearch, bapo_loss


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
        return ClipSearch(**{one.name: getattr(self, one.name) for one in fields(ClipSearch)})


def searched_loss(
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantages: Tensor,
    aggregate: Callable[[Tensor], Tensor],
    search: ClipSearch,
    prefix: str,
) -> tuple[Tensor, dict[str, float]]:
    """Return bapo_loss with the trainer's token weights, and one pair of bounds for all ranks.

    log_prob, old_log_prob and advantages are [B, T]. aggregate is the trainer's own: float32 losses
    [B, T] -> loss. It is linear, so its gradient is each token's weight [B, T] in the loss. The
    search is over the world group, and every rank must call this equally often.

    The metrics are those of bapo_loss and the number of responses that were searched, with the
    prefix before their names. A NaN, such as the rho of tokens without advantages, is left out,
    because trainers average what they log. Bounds, rho and the responses are of all ranks (copies
    of a rank, by sequence, tensor and context parallelism, count too), the others of this rank. A
    search that sees few responses acts much like a fixed clip at [low_max, high_start].
    """
    weights = torch.func.grad(aggregate)(torch.zeros_like(log_prob, dtype=torch.float32))
    responses = weights.any(dim=1).sum()
    process_group = None
    if dist.is_initialized():
        process_group = dist.group.WORLD
        dist.all_reduce(responses)
    inputs = log_prob, old_log_prob, advantages, weights  # the weights are the mask, too
    loss, metrics = bapo_loss(*inputs, search, weights=weights, process_group=process_group)
    metrics["responses"] = responses
    del metrics["gradient_share"]  # it may be NaN on one rank alone, and verl needs equal names
    logged = {prefix + name: value.item() for name, value in metrics.items() if not value.isnan()}
    return loss, logged
