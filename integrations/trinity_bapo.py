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
"""

import torch
import torch.distributed as dist
from torch import Tensor
from trinity.algorithm.policy_loss_fn import PolicyLossFn
from trinity.algorithm.utils import aggregate_loss

from bapo import ClipSearch, contribution_masses, search_clip_bounds, token_losses


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
        """Trinity's signature; all tensors [B, T]. Returns a 0-dim loss and metrics."""
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
        return loss, {f"bapo_{name}": float(value) for name, value in bounds._asdict().items()}

    @classmethod
    def default_args(cls) -> dict:
        """What Trinity passes to __init__ where the YAML has no policy_loss_fn_args."""
        return {"loss_agg_mode": "token-mean"}
