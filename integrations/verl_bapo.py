"""BAPO for verl 0.9 as a registered policy loss, without a fork. Needs bapo.py on the path (or a copy of it beside this file).

    PYTHONPATH=<folder of bapo.py> python3 -m verl.trainer.main_ppo <your options of a GRPO run> \\
        actor_rollout_ref.actor.policy_loss._target_=integrations.verl_bapo.BapoLossConfig \\
        actor_rollout_ref.actor.policy_loss.loss_mode=bapo \\
        +actor_rollout_ref.actor.policy_loss.rho0=0.45

The last is an example: every field of bapo.ClipSearch is an option, with its default. Hydra imports this module where
verl builds its actor, in every worker, which registers the loss; so the folder must be on PYTHONPATH on every node
(`+ray_kwargs.ray_init.runtime_env.env_vars.PYTHONPATH=...` for a Ray cluster that is already running).

Scope: verl calls the loss once per micro-batch, so bounds are searched per micro-batch, over all ranks. They are those of the
whole mini-batch if it is one micro-batch: ppo_micro_batch_size_per_gpu = ppo_mini_batch_size * rollout.n / data-parallel ranks.

The ranks' masses are summed over the world group, as verl's losses are not given another. That is right wherever each
rank calls the loss equally often and each token is seen by equally many ranks, since equal double counts cancel in a
share: FSDP, Ulysses, Megatron's tensor and context parallelism, and use_dynamic_bsz (verl gives all ranks the same number
of micro-batches). Under Megatron's pipeline parallelism only the last stage calls the loss, and a sum over all ranks would
wait for ever; its dynamic context parallelism counts tokens unequally often. Both are refused: with
`+actor_rollout_ref.actor.policy_loss.reduce_over_ranks=False` each rank searches on its own part of the micro-batch.

Of verl's options clip_ratio, clip_ratio_low, clip_ratio_high and clip_ratio_c have no effect (no dual clip); loss_agg_mode,
the KL and entropy terms and rollout correction work as always. The ratio is taken to verl's old_log_probs. By default
these are the trained policy's at the start of the step: give it several mini-batches or ppo_epochs, else every ratio is 1 and
no bound acts. With algorithm.rollout_correction.bypass_mode=True they are those of the rollout engine.
"""

from dataclasses import dataclass, fields

import torch
import torch.distributed as dist
from torch import Tensor
from verl.trainer.ppo.core_algos import agg_loss, register_policy_loss
from verl.utils.torch_functional import masked_mean
from verl.workers.config import ActorConfig, PolicyLossConfig

from bapo import ClipBounds, ClipSearch, diagnostics, search_clip_bounds, token_losses


@dataclass
class BapoLossConfig(PolicyLossConfig):
    """verl's policy_loss section with the fields of bapo.ClipSearch, and `reduce_over_ranks`: sum the masses over all ranks.

    Raises ValueError for a search that makes no sense, or if loss_mode is not "bapo" (verl would run another loss).
    """

    loss_mode: str = "bapo"
    reduce_over_ranks: bool = True
    rho0: float = ClipSearch.rho0
    low_start: float = ClipSearch.low_start
    low_max: float = ClipSearch.low_max
    low_step: float = ClipSearch.low_step
    high_start: float = ClipSearch.high_start
    high_max: float = ClipSearch.high_max
    high_step: float = ClipSearch.high_step
    contribution: str = ClipSearch.contribution
    may_empty: bool = ClipSearch.may_empty

    def __post_init__(self):
        if self.loss_mode != "bapo":
            raise ValueError(
                f"loss_mode must be 'bapo' in a BapoLossConfig, got {self.loss_mode!r}: "
                "set actor_rollout_ref.actor.policy_loss.loss_mode=bapo"
            )
        self.clip_search()

    def clip_search(self) -> ClipSearch:
        return ClipSearch(**{field.name: self[field.name] for field in fields(ClipSearch)})


def _process_group(config: ActorConfig):
    """The ranks to search over. Refuses the layouts in which the world group is the wrong answer (see above)."""
    if not (config.policy_loss.reduce_over_ranks and dist.is_initialized()):
        return None
    for option, allowed in (("pipeline_model_parallel_size", 1), ("dynamic_context_parallel", False)):
        if config.engine.get(option, allowed) != allowed:
            raise ValueError(
                f"{option} must be {allowed} to search over all ranks, got {config.engine[option]}: "
                "set +actor_rollout_ref.actor.policy_loss.reduce_over_ranks=False"
            )
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
    own losses, and so their masses. Returns a 0-dim loss (times the ranks, as verl's) and metrics: low, high, rho,
    rho_start, reached are the micro-batch's over all ranks, clip fractions and KL this rank's, which verl averages.
    Raises ValueError for an unknown loss_agg_mode, or a config whose policy_loss is not a BapoLossConfig.
    """
    policy_loss = getattr(config, "policy_loss", None)
    if not hasattr(policy_loss, "clip_search"):
        raise ValueError(
            f"config.policy_loss must be a BapoLossConfig, got {type(policy_loss).__name__}: "
            "set actor_rollout_ref.actor.policy_loss._target_ to integrations.verl_bapo.BapoLossConfig"
        )

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
