"""BAPO for verl 0.9, as a registered policy loss without a fork.

Put the folder that holds bapo.py and integrations/ on PYTHONPATH.

    PYTHONPATH=<that folder> python3 -m verl.trainer.main_ppo <your options of a GRPO run> \\
        actor_rollout_ref.actor.policy_loss._target_=integrations.verl_bapo.BapoLossConfig \\
        actor_rollout_ref.actor.policy_loss.loss_mode=bapo \\
        +actor_rollout_ref.actor.policy_loss.rho0=0.45

The last is an example: every field of bapo.ClipSearch is an option, with its default. The folder
must be on PYTHONPATH on every node; for a Ray cluster that is already running, set
`+ray_kwargs.ray_init.runtime_env.env_vars.PYTHONPATH=...`.

verl calls the loss once per micro-batch, so bounds are searched per micro-batch, over all ranks.
They are those of the whole mini-batch if it is one micro-batch: ppo_micro_batch_size_per_gpu =
ppo_mini_batch_size * rollout.n / data-parallel ranks. A search should see at least 16 responses; a
warning says once if one sees fewer, and actor/bapo_responses logs how many (see
bapo.bapo_loss).

Masses are summed over the world group. That is right where each rank calls the loss equally often
and each token is seen by equally many ranks: FSDP, Ulysses, use_dynamic_bsz, Megatron's tensor and
context parallelism. Megatron's pipeline and its dynamic context parallelism are refused, unless
`+actor_rollout_ref.actor.policy_loss.reduce_over_ranks=False` lets each rank search on its own part
of the micro-batch.

clip_ratio* have no effect. The ratio is to verl's old_log_probs, by default the trained policy's at
the start of the step: give it several mini-batches or ppo_epochs, else every ratio is 1 and no
bound acts.
"""

import functools
import math
import warnings
from dataclasses import dataclass, fields

import torch
import torch.distributed as dist
from torch import Tensor
from verl.trainer.ppo.core_algos import agg_loss, register_policy_loss
from verl.utils.torch_functional import masked_mean
from verl.workers.config import ActorConfig, PolicyLossConfig

from bapo import ClipSearch, contribution_masses, diagnostics, search_clip_bounds, token_losses

SECTION = "actor_rollout_ref.actor.policy_loss"
# Of bapo.diagnostics, what is logged as actor/bapo_...
LOGGED = ("low", "high", "rho", "rho_start", "reached", "clip_fraction_high", "clip_fraction_low")
# Warn if a search sees fewer. The number is a convention; we have not measured a limit.
ENOUGH_RESPONSES = 16


@dataclass
class BapoLossConfig(PolicyLossConfig):
    """verl's policy_loss section with the fields of bapo.ClipSearch, and reduce_over_ranks.

    reduce_over_ranks: sum the masses over all ranks. Raises ValueError for a search that makes no
    sense, or if loss_mode is not "bapo", since verl would then run another loss.
    """

    loss_mode: str = "bapo"
    rho0: float = ClipSearch.rho0
    low_start: float = ClipSearch.low_start
    low_max: float = ClipSearch.low_max
    low_step: float = ClipSearch.low_step
    high_start: float = ClipSearch.high_start
    high_max: float = ClipSearch.high_max
    high_step: float = ClipSearch.high_step
    contribution: str = ClipSearch.contribution
    reduce_over_ranks: bool = True

    def __post_init__(self):
        if self.loss_mode != "bapo":
            raise ValueError(
                f"loss_mode must be 'bapo' in a BapoLossConfig, got {self.loss_mode!r}: "
                f"set {SECTION}.loss_mode=bapo"
            )
        self.clip_search()

    def clip_search(self) -> ClipSearch:
        """The search that these options describe; ValueError for what makes no sense."""
        options = {one.name: getattr(self, one.name) for one in fields(ClipSearch)}
        return ClipSearch(**options)


@functools.cache  # so that it warns once
def warn_of_few_responses() -> None:
    """Say what a search over few responses becomes, and what to raise."""
    warnings.warn(
        f"a search saw fewer than {ENOUGH_RESPONSES} responses (actor/bapo_responses), and BAPO"
        " comes near a fixed clip at [low_max, high_start]. Raise"
        " ppo_micro_batch_size_per_gpu, or ppo_max_token_len_per_gpu with use_dynamic_bsz",
        stacklevel=3,
    )


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
    responses are the micro-batch's over all ranks; clip fractions and KL are this rank's, which
    verl averages. rho is left out where no token has an advantage. (With reduce_over_ranks=False it
    is NaN there, because verl needs equally many values from each rank.) Raises ValueError for an
    unknown loss_agg_mode, for a config whose policy_loss is not a BapoLossConfig, and to search
    over ranks that do not all call this equally.

    actor/bapo_responses counts responses with a token in the mask, and copies of a rank (sequence,
    tensor and context parallelism) once. It takes all of verl's dp_size data-parallel ranks to have
    equally many copies, as they do in verl 0.9.
    """
    # Not isinstance: a copy of this file beside the script is another module, with its own class.
    if not hasattr(config.policy_loss, "clip_search"):
        raise ValueError(
            f"config.policy_loss must be a BapoLossConfig, got {type(config.policy_loss).__name__}:"
            f" set {SECTION}._target_ to integrations.verl_bapo.BapoLossConfig"
        )
    over_ranks = config.policy_loss.reduce_over_ranks and dist.is_initialized()
    if over_ranks:
        allowed = {"pipeline_model_parallel_size": 1, "dynamic_context_parallel": False}
        for option, value in allowed.items():
            if config.engine.get(option, value) != value:
                raise ValueError(
                    f"{option} must be {value} to search over all ranks: set"
                    f" +{SECTION}.reduce_over_ranks=False"
                )

    def aggregate(losses: Tensor) -> Tensor:
        if rollout_is_weights is not None:
            losses = losses * rollout_is_weights
        return agg_loss(losses, response_mask, loss_agg_mode, **config.global_batch_info)

    log_ratio = log_prob.float() - old_log_prob.float()
    # The aggregation is linear in the tokens' losses: its gradient is their weights in verl's loss.
    weights = torch.func.grad(aggregate)(torch.zeros_like(log_ratio))
    search = config.policy_loss.clip_search()
    masses = contribution_masses(log_ratio, advantages, weights, search)
    responses = response_mask.any(dim=1).sum()
    if over_ranks:
        dist.all_reduce(masses)
        dist.all_reduce(responses)
        ranks = dist.get_world_size()
        copies = ranks // config.global_batch_info.get("dp_size", ranks)
        responses = responses // copies
    bounds = search_clip_bounds(masses, search)
    speaks = not over_ranks or dist.get_rank() == 0
    if search.rho0 > 0 and responses < ENOUGH_RESPONSES and speaks:
        warn_of_few_responses()
    loss = aggregate(token_losses(log_ratio, advantages, bounds.low, bounds.high))

    of_update = diagnostics(log_ratio, advantages, response_mask, bounds, weights)
    metrics = {"actor/bapo_responses": responses.item()}
    for name in LOGGED:
        value = of_update[name].item()
        if not (math.isnan(value) and config.policy_loss.reduce_over_ranks):
            metrics[f"actor/bapo_{name}"] = value
    # Under verl's names, by verl's definitions, to compare with runs of its other losses.
    clipped = of_update["clip_fraction_high"] + of_update["clip_fraction_low"]
    metrics["actor/pg_clipfrac"] = clipped.item()
    negative_log_ratio = -log_ratio.detach().clamp(-20.0, 20.0)
    metrics["actor/ppo_kl"] = masked_mean(negative_log_ratio, response_mask).item()
    return loss, metrics
