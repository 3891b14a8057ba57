"""BAPO for Trinity-RFT 0.6 as a policy loss function, without a fork.

Put the folder that holds bapo.py and integrations/ on PYTHONPATH. In Trinity's YAML:

    algorithm:
      algorithm_type: grpo
      policy_loss_fn: integrations.trinity_bapo.BapoPolicyLossFn
      policy_loss_fn_args: {rho0: 0.45, loss_agg_mode: token-mean}

rho0 is an example: every field of bapo.ClipSearch is an option, with its default. Keep
loss_agg_mode among the arguments: Trinity replaces it by algorithm.loss_agg_mode, but only if it is
there.

Bounds are searched per micro-batch, over all ranks. Do not use this file with pipeline parallelism,
where not every rank calls the loss, nor with the tinker backend, which calls it per response. By
default (algorithm.bypass_old_logprobs) the old log-probs are the sampler's, so that ratios are not
exactly 1 at a batch's first update.
"""

from torch import Tensor
from trinity.algorithm.policy_loss_fn import PolicyLossFn
from trinity.algorithm.utils import aggregate_loss

from bapo import ClipSearch
from integrations.common import bound_metrics, searched_loss


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

        def aggregate(losses: Tensor) -> Tensor:
            return aggregate_loss(losses, action_mask, self.loss_agg_mode)

        loss, bounds, responses = searched_loss(log_ratio, advantages, aggregate, self.search)
        return loss, bound_metrics(bounds, "bapo_") | {"bapo_responses": responses}

    @classmethod
    def default_args(cls) -> dict:
        """What Trinity passes to __init__ where the YAML has no policy_loss_fn_args."""
        return {"loss_agg_mode": "token-mean"}
