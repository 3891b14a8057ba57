"""BAPO for Trinity-RFT 0.6 as a policy loss function, without a fork.

Put the folder that holds bapo.py and integrations/ on PYTHONPATH. In Trinity's YAML:

    algorithm:
      algorithm_type: grpo
      policy_loss_fn: integrations.trinity_bapo.BapoPolicyLossFn
      policy_loss_fn_args: {rho0: 0.45, loss_agg_mode: token-mean}

rho0 is an example: every field of bapo.ClipSearch is an option, with its default. Keep
loss_agg_mode among the arguments: Trinity replaces it by algorithm.loss_agg_mode, but only if it is
there.

Bounds are searched per micro-batch, over all ranks. The sums P and N (bapo.contribution_masses) are
added up over the world group. Do not use this file with pipeline parallelism, where not every rank
calls the loss.

A search should see at least 16 responses; a warning says once if one sees fewer, and
actor/bapo_responses logs how many (see bapo.bapo_loss).
"""

import functools
import math
import warnings

import torch
import torch.distributed as dist
from torch import Tensor
from trinity.algorithm.policy_loss_fn import PolicyLossFn
from trinity.algorithm.utils import aggregate_loss

from bapo import ClipSearch, contribution_masses, search_clip_bounds, token_losses

# Warn if a search sees fewer. The number is a convention; we have not measured a limit.
ENOUGH_RESPONSES = 16


@functools.cache  # so that it warns once
def warn_of_few_responses() -> None:
    """Say what a search over few responses becomes, and what to raise."""
    warnings.warn(
        f"a search saw fewer than {ENOUGH_RESPONSES} responses (actor/bapo_responses), and BAPO"
        " comes near a fixed clip at [low_max, high_start]. Raise"
        " trainer.max_token_len_per_gpu, or ppo_micro_batch_size_per_gpu without use_dynamic_bsz",
        stacklevel=3,
    )


def count_responses(old_logprob: Tensor, action_mask: Tensor) -> int:
    """Return how many responses of all ranks have a token in the mask. Both tensors are [B, T].

    Copies of a rank (sequence, tensor and context parallelism) hold the same batch and count once.
    Trinity does not tell the loss which ranks are copies, so ranks count as copies if they have the
    same number of responses and the same sum of old log-probs. Two ranks that happen to hold the
    same responses therefore count once, too.
    """
    responses = action_mask.any(dim=1).sum(dtype=torch.float64)
    total = old_logprob.masked_fill(action_mask == 0, 0.0).sum(dtype=torch.float64)
    of_rank = torch.stack([responses, total])
    of_ranks = [of_rank]
    if dist.is_initialized():
        of_ranks = [torch.empty_like(of_rank) for _ in range(dist.get_world_size())]
        dist.all_gather(of_ranks, of_rank)
    distinct = {tuple(numbers) for numbers in torch.stack(of_ranks).tolist()}
    return int(sum(count for count, _ in distinct))


class BapoPolicyLossFn(PolicyLossFn):
    """Search the bounds, then Eq. 4 at them, aggregated by Trinity's own aggregate_loss.

    search: the fields of bapo.ClipSearch. Raises ValueError for a search that makes no sense, and
    TypeError for an option that ClipSearch does not have.
    """

    def __init__(self, backend: str = "verl", loss_agg_mode: str = "token-mean", **search):
        super().__init__(backend)
        self.loss_agg_mode = loss_agg_mode
        self.search = ClipSearch(**search)

    def __call__(
        self,
        logprob: Tensor,
        old_logprob: Tensor,
        action_mask: Tensor,
        advantages: Tensor,
        **kwargs,
    ) -> tuple[Tensor, dict[str, float]]:
        """Trinity's signature; all tensors [B, T]. Returns a 0-dim loss and metrics.

        rho is left out of the metrics where no token has an advantage.
        """
        log_ratio = logprob.float() - old_logprob.float()
        # The aggregation is linear in the tokens' losses: its gradient is their weights in it.
        weights_of = torch.func.grad(aggregate_loss)
        weights = weights_of(torch.zeros_like(log_ratio), action_mask, self.loss_agg_mode)
        masses = contribution_masses(log_ratio, advantages, weights, self.search)
        if dist.is_initialized():
            dist.all_reduce(masses)
        bounds = search_clip_bounds(masses, self.search)
        losses = token_losses(log_ratio, advantages, bounds.low, bounds.high)
        loss = aggregate_loss(losses, action_mask, self.loss_agg_mode)

        responses = count_responses(old_logprob, action_mask)
        speaks = not dist.is_initialized() or dist.get_rank() == 0
        if self.search.rho0 > 0 and responses < ENOUGH_RESPONSES and speaks:
            warn_of_few_responses()
        metrics = {"bapo_responses": responses}
        for name, value in bounds._asdict().items():
            if not math.isnan(value):
                metrics[f"bapo_{name}"] = float(value)
        return loss, metrics

    @classmethod
    def default_args(cls) -> dict:
        """What Trinity passes to __init__ where the YAML has no policy_loss_fn_args."""
        return {"loss_agg_mode": "token-mean"}
