"""BAPO for verl 0.9 as a registered policy loss, without a fork. Needs bapo.py on the path (or a copy of it beside this file).

    PYTHONPATH=<folder of bapo.py> python3 -m verl.trainer.main_ppo <your options of a GRPO run> \\
        actor_rollout_ref.actor.policy_loss._target_=integrations.verl_bapo.BapoLossConfig \\
        actor_rollout_ref.actor.policy_loss.loss_mode=bapo \\
        +actor_rollout_ref.actor.policy_loss.rho0=0.45

The last is an example: every field of bapo.ClipSearch is an option, with its default. The folder must be on PYTHONPATH on
every node (`+ray_kwargs.ray_init.runtime_env.env_vars.PYTHONPATH=...` for a Ray cluster that is already running).

verl calls the loss once per micro-batch, so bounds are searched per micro-batch, over all ranks. They are those of the whole
mini-batch if it is one micro-batch: ppo_micro_batch_size_per_gpu = ppo_mini_batch_size * rollout.n / data-parallel ranks.
Masses are summed over the world group, which is right where each rank calls the loss equally often and each token is seen by
equally many ranks: FSDP, Ulysses, use_dynamic_bsz, Megatron's tensor and context parallelism. Its pipeline and its dynamic
context parallelism are refused, unless `+actor_rollout_ref.actor.policy_loss.reduce_over_ranks=False` lets each rank search on
its own part of the micro-batch.

clip_ratio* have no effect. The ratio is to verl's old_log_probs, by default the trained policy's at the start of the step:
give it several mini-batches or ppo_epochs, else every ratio is 1 and no bound acts.
"""

from dataclasses import dataclass, fields, make_dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from verl.trainer.ppo.core_algos import agg_loss, register_policy_loss
from verl.utils.torch_functional import masked_mean
from verl.workers.config import ActorConfig, PolicyLossConfig

from bapo import ClipBounds, ClipSearch, diagnostics, search_clip_bounds, token_losses

SearchFields = make_dataclass("SearchFields", [(field.name, field.type, field.default) for field in fields(ClipSearch)])


@dataclass
class BapoLossConfig(PolicyLossConfig, SearchFields):
    """verl's policy_loss section with the fields of bapo.ClipSearch, and `reduce_over_ranks`: sum the masses over all ranks.
    ValueError for a search that makes no sense, or if loss_mode is not "bapo" (verl would run another loss)."""

    loss_mode: str = "bapo"
    reduce_over_ranks: bool = True

    def __post_init__(self):
        if self.loss_mode != "bapo":
            remedy = "set actor_rollout_ref.actor.policy_loss.loss_mode=bapo"
            raise ValueError(f"loss_mode must be 'bapo' in a BapoLossConfig, got {self.loss_mode!r}: {remedy}")
        self.clip_search()

    def clip_search(self) -> ClipSearch:
        return ClipSearch(**{field.name: self[field.name] for field in fields(ClipSearch)})


def _process_group(config: ActorConfig):
    """The ranks to search over. Refuses the layouts in which the world group is the wrong answer (see above)."""
    if not (config.policy_loss.reduce_over_ranks and dist.is_initialized()):
        return None
    for option, allowed in (("pipeline_model_parallel_size", 1), ("dynamic_context_parallel", False)):
        if config.engine.get(option, allowed) != allowed:
            remedy = "set +actor_rollout_ref.actor.policy_loss.reduce_over_ranks=False"
            raise ValueError(f"{option} must be {allowed} to search over all ranks, got {config.engine[option]}: {remedy}")
    return dist.group.WORLD


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
    """verl's signature of a policy loss: search the bounds, then Eq. 4 at them, aggregated by verl's own agg_loss.

    All tensors [N, T], float but response_mask (bool or 0/1). rollout_is_weights multiply the tokens' losses, as in verl's
    own losses, and so their masses. Returns a 0-dim loss (times the ranks, as verl's) and metrics: bounds and rho are the
    micro-batch's over all ranks, clip fractions and KL this rank's, which verl averages. Raises ValueError for an unknown
    loss_agg_mode, or a config whose policy_loss is not a BapoLossConfig.
    """
    policy_loss = getattr(config, "policy_loss", None)
    if not hasattr(policy_loss, "clip_search"):
        remedy = "set actor_rollout_ref.actor.policy_loss._target_ to integrations.verl_bapo.BapoLossConfig"
        raise ValueError(f"config.policy_loss must be a BapoLossConfig, got {type(policy_loss).__name__}: {remedy}")

    def aggregate(losses: Tensor) -> Tensor:
        if rollout_is_weights is not None:
            losses = losses * rollout_is_weights
        return agg_loss(losses, response_mask, loss_agg_mode, **config.global_batch_info)

    log_ratio = log_prob.float() - old_log_prob.float()
    # verl's aggregation is linear, so its gradient is each token's weight in verl's loss: rho is the share of that very loss.
    with torch.enable_grad():
        probe = torch.zeros_like(log_ratio, requires_grad=True)
        (weights,) = torch.autograd.grad(aggregate(probe), probe)
    bounds = search_clip_bounds(log_ratio.detach(), advantages, weights, policy_loss.clip_search(), _process_group(config))
    loss = aggregate(token_losses(log_ratio, advantages, bounds.low, bounds.high))

    found = diagnostics(log_ratio.detach(), advantages, response_mask, bounds)
    metrics = {f"actor/bapo_{name}": found[name] for name in (*ClipBounds._fields, "clip_fraction_high", "clip_fraction_low")}
    # Under verl's names, by verl's definitions, to compare with runs of its other losses.
    metrics["actor/pg_clipfrac"] = found["clip_fraction_high"] + found["clip_fraction_low"]
    metrics["actor/ppo_kl"] = masked_mean(-log_ratio.detach().clamp(-20.0, 20.0), response_mask)
    return loss, dict(zip(metrics, torch.stack(list(metrics.values())).tolist(), strict=True))  # one read on the host
