r"""BAPO for verl 0.9, as a registered policy loss without a fork.

Put the folder that holds bapo.py and integrations/ on PYTHONPATH.

    PYTHONPATH=<that folder> python3 -m verl.trainer.main_ppo <your options of a GRPO run> \
        actor_rollout_ref.actor.policy_loss._target_=integrations.verl_bapo.BapoLossConfig \
        actor_rollout_ref.actor.policy_loss.loss_mode=bapo \
        +actor_rollout_ref.actor.policy_loss.rho0=0.45

The last is an example: every field of bapo.ClipSearch is an option, with its default. The folder
must be on PYTHONPATH on every node; for a Ray cluster that is already running, set
`+ray_kwargs.ray_init.runtime_env.env_vars.PYTHONPATH=...`.

verl calls the loss once per micro-batch, so bounds are searched per micro-batch, over all ranks.
They are those of the whole mini-batch if it is one micro-batch: ppo_micro_batch_size_per_gpu =
ppo_mini_batch_size * rollout.n / data-parallel ranks.

A search over all ranks is right where each rank calls the loss equally often and each token is seen
by equally many ranks: FSDP, Ulysses, use_dynamic_bsz, Megatron's tensor and context parallelism.
Megatron's pipeline and its dynamic context parallelism are refused.

clip_ratio* have no effect. The ratio is to verl's old_log_probs, by default the trained policy's at
the start of the step: give it several mini-batches or ppo_epochs, else every ratio is 1 and no
bound acts.
"""

from dataclasses import dataclass

from torch import Tensor
from verl.trainer.ppo.core_algos import agg_loss, register_policy_loss
from verl.utils.torch_functional import masked_mean
from verl.workers.config import ActorConfig, PolicyLossConfig

from integrations.common import SearchOptions, searched_loss


@dataclass
class BapoLossConfig(SearchOptions, PolicyLossConfig):
    """verl's policy_loss section with the fields of bapo.ClipSearch.

    Raises ValueError for a search that makes no sense, or if loss_mode is not "bapo", since verl
    would then run another loss.
    """

    loss_mode: str = "bapo"

    def __post_init__(self):
        if self.loss_mode != "bapo":
            raise ValueError(
                f"loss_mode must be 'bapo' in a BapoLossConfig, got {self.loss_mode!r}: "
                "set actor_rollout_ref.actor.policy_loss.loss_mode=bapo"
            )
        self.clip_search()


@register_policy_loss("bapo")
def bapo_policy_loss(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: ActorConfig | None = None,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, float]]:
    """Search the bounds, then Eq. 4 at them, aggregated by verl's own agg_loss.

    The signature is verl's. All tensors are [B, T], float but response_mask (bool or 0/1).
    rollout_is_weights multiply the tokens' losses, as in verl's own losses, and so their masses.

    Returns a 0-dim loss (times the ranks, as verl's) and metrics. Bounds, rho and the number of
    responses are the micro-batch's over all ranks; the others are this rank's, which verl averages.
    Raises ValueError for an unknown loss_agg_mode, and where ranks do not all call this equally.
    """
    engine = config.engine
    if engine.get("pipeline_model_parallel_size", 1) > 1 or engine.get("dynamic_context_parallel"):
        raise ValueError(
            "BAPO trains with pipeline_model_parallel_size=1 and dynamic_context_parallel=False:"
            " every rank must call the loss, because the search is over all of them"
        )

    def aggregate(losses: Tensor) -> Tensor:
        if rollout_is_weights is not None:
            losses = losses * rollout_is_weights
        return agg_loss(losses, response_mask, loss_agg_mode, **config.global_batch_info)

    search = config.policy_loss.clip_search()
    inputs = log_prob, old_log_prob, advantages
    loss, metrics = searched_loss(*inputs, aggregate, search, "actor/bapo_")
    # Under verl's names, to compare with runs of its other losses.
    metrics["actor/pg_clipfrac"] = (
        metrics["actor/bapo_clip_fraction_high"] + metrics["actor/bapo_clip_fraction_low"]
    )
    metrics["actor/ppo_kl"] = masked_mean(old_log_prob - log_prob, response_mask).item()
    return loss, metrics
