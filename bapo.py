"""BAPO: Balanced Policy Optimization with Adaptive Clipping (Xi et al., arXiv 2510.18927).

To use BAPO in your own trainer, copy this file. It needs torch 2.2 or later and nothing else.

    advantages = group_relative_advantages(rewards, group_size)  # [B], once per batch of rollouts
    for update in range(8):
        log_probs = log_probs_of(rows)  # [B, T]: your forward pass
        loss, metrics = bapo_loss(log_probs, rollout_log_probs, advantages, mask, PAPER_MAIN)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

One optimizer step has one pair of bounds and one token count, so bapo_loss sees all of its tokens.
If the step has several micro-batches or GPUs, call `backward` in place of the loss.

Every update starts at the lowest clip bounds of its ranges. If the positive tokens' share of the
total absolute objective is below rho0 there, it raises the upper bound, and then the lower one,
until the share reaches rho0 or the ranges end (Eq. 8, Algorithm 1). GRPO and Clip-Higher are the
same code with fixed bounds.

    code                paper              meaning
    log_probs           log pi_theta       of the response tokens, under the policy in training
    rollout_log_probs   log pi_rollout     of the same tokens, under the policy that drew them
    ratio               r_t                importance ratio exp(log_probs - rollout_log_probs)
    advantages          A_t                group-relative; one per response [B] or per token [B, T]
    low, high           c_low, c_high      clip bounds: absolute ratios (0.8, 1.2), not 1 +- epsilon
    rho, rho0           rho, rho_0         P / (P + N) of Eq. 8, and its target
    mask                t = 1 .. T         True on response tokens, the EOS included
    B, T                                   responses and response positions in a batch

Compute rollout_log_probs with log_probs_of before the first update and store them: with
log_probs.detach() in their place every ratio is 1, and BAPO does nothing. Divide the logits by the
sampling temperature, in float32, and sample without top-p and top-k.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor


# ---------------------------------------------------------------- settings
@dataclass(frozen=True)
class ClipSearch:
    """Settings of the search for the clip bounds: its target and its ranges.

    The defaults are the paper's main setting (section 5.1). A range may be a single value; the last
    step of a range may be shorter.

    The bounds move only in updates whose rho is below the target rho0. Compare it with the rho of
    your own responses (rho_at_ratio_1) before you train, and with the logged rho_start while you
    do. If nearly all searches stop at the same end of the ranges, you have a fixed clip, and
    ClipSearch.fixed says so more simply.

    Raises ValueError for settings that make no sense.
    """

    rho0: float = 0.4
    low_start: float = 0.6  # a-
    low_max: float = 0.9  # b-
    low_step: float = 0.02  # delta_2
    high_start: float = 1.2  # a+
    high_max: float = 3.0  # b+
    high_step: float = 0.05  # delta_1

    def __post_init__(self):
        makes_sense = (
            0 <= self.rho0 < 1
            and 0 <= self.low_start <= self.low_max < self.high_start
            and 1 <= self.high_start <= self.high_max < math.inf
            and 0 < self.low_step < math.inf
            and 0 < self.high_step < math.inf
        )
        if not makes_sense:
            raise ValueError(
                "there must be 0 <= rho0 < 1, 0 <= low_start <= low_max < high_start <= high_max,"
                " high_start at least 1, finite ranges and finite steps above 0 (bounds are ratios"
                f" such as 0.8 and 1.2, not epsilons), got {self}"
            )

    @classmethod
    def fixed(cls, low: float, high: float) -> ClipSearch:
        """Return settings with one pair of bounds: fixed(0.8, 1.2) is GRPO.

        A low of 0 switches the lower bound off, and a high of 1e9 the upper one.
        """
        # No rho is below a target of 0, so nothing is searched.
        return cls(rho0=0.0, low_start=low, low_max=low, high_start=high, high_max=high)

    def lows(self) -> list[float]:
        """Return all values of the lower bound, ascending."""
        return _grid(self.low_start, self.low_max, self.low_step)

    def highs(self) -> list[float]:
        """Return all values of the upper bound, ascending."""
        return _grid(self.high_start, self.high_max, self.high_step)


def _grid(start: float, stop: float, step: float) -> list[float]:
    # 1e-6 allows for rounding: (0.9 - 0.8) / 0.02 is not exactly 5 in floats.
    steps = math.ceil((stop - start) / step - 1e-6)
    # The end is appended, because 0.6 + 15 * 0.02 is not exactly 0.9.
    return [start + i * step for i in range(steps)] + [stop]


GRPO = ClipSearch.fixed(0.8, 1.2)
PAPER_MAIN = ClipSearch()  # section 5.1
PAPER_APP_A = ClipSearch(rho0=0.45, low_start=0.8, high_max=2.0)  # App. A, which prints no steps


# ---------------------------------------------------------------- the clipped surrogate
MAX_LOG_RATIO = 20.0  # as in verl; exp(20) = 5e8 stays finite in float32 products and sums


def importance_ratio(log_ratio: Tensor) -> Tensor:
    """Return r_t = exp(log_ratio) in float32, with the log-ratio clamped to +-MAX_LOG_RATIO."""
    return log_ratio.float().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def gradient_mask(ratio: Tensor, advantages: Tensor, low: float, high: float) -> Tensor:
    """Return X of Eq. 7, True where the bounds let a gradient through: bool [B, T].

    ratio [B, T]; advantages [B, 1] or [B, T]. A token whose ratio lies exactly on its bound has a
    gradient here, whereas Eqs. 5 and 7 use strict inequalities. A token with A = 0 has none. X
    knows nothing of the clamp in importance_ratio: a clamped token has no gradient, but X may be
    True.
    """
    positive = (advantages > 0) & (ratio <= high)
    negative = (advantages < 0) & (ratio >= low)
    return positive | negative


def token_losses(log_ratio: Tensor, advantages: Tensor, low: float, high: float) -> Tensor:
    """Return the loss of every token, Eq. 4 with absolute bounds: float32 [B, T], not reduced.

    log_ratio [B, T]; advantages [B] or [B, T]. The derivative by log_ratio is -r A, but 0 for
    clipped tokens (Eq. 5) and clamped log-ratios. Raises ValueError for impossible bounds.
    """
    ClipSearch.fixed(low, high)  # raises for epsilons given as bounds
    advantages = _per_token(advantages)
    ratio = importance_ratio(log_ratio)
    # Eq. 4: -min(r A, clip(r, low, high) A). `gradient_mask` picks the smaller term, because the
    # gradient of torch.minimum and clamp at a bound depends on torch's version.
    clipped = ratio.detach().clamp(low, high)
    chosen = torch.where(gradient_mask(ratio, advantages, low, high), ratio, clipped)
    return -chosen * advantages


# ---------------------------------------------------------------- the positive share
@torch.no_grad()
def contribution_masses(
    log_ratio: Tensor, advantages: Tensor, weights: Tensor, search: ClipSearch
) -> Tensor:
    """Return the sums P and N of Eq. 8 at every candidate bound: rho = P / (P + N).

        P(high) = sum_{A>0} w A min(r, high)        N(low) = sum_{A<0} w |A| max(r, low)

    P depends on the upper bound alone and N on the lower one, so two lists serve all pairs. The
    result is one float64 vector, whose sums hardly depend on how a batch is split, and which a
    single all_reduce can sum: P at every upper bound, then N at every lower bound.
    log_ratio [B, T]; advantages [B] or [B, T]; weights w >= 0 [B, T] from token_weights. The sums
    add up over micro-batches and ranks, if `weights` were computed for the whole optimizer step.

    1. As printed Eq. 8 divides by |P - N|, which vanishes where both sides balance. The paper's
       figures show P / (P + N), and so does this code.
    2. Raising `low` can only raise N and lower rho. So the second half of the search never reaches
       rho0 and always ends at low_max.
    3. Eq. 8 weights a sum over the vocabulary by pi_rollout. Our tokens are drawn from pi_rollout,
       so a plain sum estimates it. To apply the factor, pass weights * rollout_log_probs.exp()
       here, but not to the loss.
    """
    log_ratio, advantages = _zero_outside(log_ratio, advantages, weights == 0)
    ratio = importance_ratio(log_ratio)
    terms = weights * advantages
    positive_part = terms.clamp(min=0)  # w A where A > 0, else 0
    negative_part = -terms.clamp(max=0)  # w |A| where A < 0, else 0
    # A ratio of NaN stays NaN in clamp, and rho becomes NaN.
    p = [
        (positive_part * ratio.clamp(max=high)).sum(dtype=torch.float64) for high in search.highs()
    ]
    n = [(negative_part * ratio.clamp(min=low)).sum(dtype=torch.float64) for low in search.lows()]
    return torch.stack(p + n)


# ---------------------------------------------------------------- the search
class ClipBounds(NamedTuple):
    """The result of a search."""

    low: float
    high: float
    rho: float  # positive share at (low, high), or NaN
    rho_start: float  # positive share at (low_start, high_start), or NaN
    reached: bool  # rho >= rho0 - 1e-6; False if rho is NaN


def search_clip_bounds(masses: Tensor, search: ClipSearch) -> ClipBounds:
    """Return the clip bounds of one update: Algorithm 1's loop over c_high, then over c_low.

    masses come from contribution_masses with the same search, summed over all that the optimizer
    step sees. They are read from the device once. Unlike the printed loop, this one searches the
    upper bound even if the lower range is a single value. If no token has an advantage, or a sum is
    NaN or infinite, the bounds stay at their start and rho is NaN.
    """
    lows = search.lows()
    highs = search.highs()
    # If the total is 0, NaN or infinite, this makes the first rho NaN.
    p, n = (masses / masses.sum()).split([len(highs), len(lows)])
    # The upper bound rises to the end of its range, and then the lower one.
    pairs = [(lows[0], high) for high in highs] + [(low, highs[-1]) for low in lows[1:]]
    rhos = torch.cat([p / (p + n[0]), p[-1] / (p[-1] + n[1:])]).tolist()
    for (low, high), rho in zip(pairs, rhos):
        # The tolerance lets a tie count as reached, however its sums are rounded.
        bounds = ClipBounds(low, high, rho, rhos[0], reached=rho >= search.rho0 - 1e-6)
        if bounds.reached or math.isnan(rho):
            break
    return bounds


# ---------------------------------------------------------------- one update
def bapo_loss(
    log_probs: Tensor,
    rollout_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    search: ClipSearch,
    *,
    weights: Tensor | None = None,
    bounds: tuple | None = None,
    process_group=None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Search the clip bounds, then return the loss of one update and its metrics.

    log_probs: [B, T], not empty, with a gradient. Any float dtype will do.
    rollout_log_probs: [B, T], computed by the same code before the first update. If the
        policy that drew the tokens is gone by then, take the log-probs that the sampler recorded.
    advantages: [B] or [B, T]. The gradient flows through log_probs alone.
    mask: [B, T], bool or 0/1
    search: the ranges and the target; not used if `bounds` are given
    weights: [B, T], by default token_weights(mask, process_group)
    bounds: (low, high) or ClipBounds, by default searched
    process_group: of torch.distributed, such as dist.group.WORLD; None: this process is alone

    Returns the loss to minimise (0-dim float32) and the metrics of `diagnostics`, of the tokens
    that are passed in. Values outside the mask have no effect, even if they are NaN. A NaN in a
    token that counts makes the loss NaN, and rho too if the bounds are searched. With an empty mask
    the loss is 0 and rho NaN. There is no KL term, no entropy bonus and no dual clip. Raises
    ValueError for an argument of the wrong shape and for impossible bounds.

    With a process_group the bounds and the token count are those of all its ranks. DDP averages
    gradients, so multiply the loss by the number of ranks, or call `backward`, which does.

    If your trainer calls a loss for every micro-batch, pass it `weights` and `bounds` of the whole
    step: token_weights of the step's mask, sliced; and search_clip_bounds of the sum of
    contribution_masses over all micro-batches and ranks. Add the losses up, do not average them.
    """
    has_ranks = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    is_per_rank = weights is None or (bounds is None and search.rho0 > 0)
    if has_ranks and is_per_rank and process_group is None:
        warnings.warn(
            "bapo_loss counts tokens and searches the bounds on this rank alone: pass"
            " process_group=dist.group.WORLD, or weights and bounds of the whole step",
            stacklevel=2,
        )
    if weights is None:
        weights = token_weights(mask, process_group)
    check_shapes(log_probs, rollout_log_probs, advantages, mask, weights)
    weights = weights.masked_fill(mask == 0, 0.0)
    # Subtract in float32, so that the difference is not rounded to bfloat16.
    log_ratio = log_probs.float() - rollout_log_probs.detach().float()
    log_ratio, advantages = _zero_outside(log_ratio, advantages, weights == 0)
    if bounds is None:
        masses = contribution_masses(log_ratio, advantages, weights, search)
        if process_group is not None:
            dist.all_reduce(masses, group=process_group)
        bounds = search_clip_bounds(masses, search)
    low, high, *_ = bounds
    loss = (weights * token_losses(log_ratio, advantages, low, high)).sum()
    return loss, diagnostics(log_ratio, advantages, weights, bounds)


def backward(
    log_probs_of: Callable,
    micro_batches: Sequence[Tensor],
    rollout_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    search: ClipSearch,
    process_group=None,
    *,
    loss_fn: Callable = bapo_loss,
    no_sync: Callable = nullcontext,
    run_backward: Callable = Tensor.backward,
) -> dict[str, Tensor]:
    """Add the gradient of one update to the policy's, micro-batch by micro-batch.

    The loss sees the whole update: one pair of bounds and one token count. A single micro-batch
    takes one forward pass, if there is no process_group. The graphs of several would not fit into
    memory together, so each takes one pass without a graph and one with it. Both must agree, so
    turn dropout off.

    log_probs_of: your forward pass: row numbers [n] -> log-probs [n, T], with the same T for all
    micro_batches: the row numbers of each, such as torch.arange(len(mask)).split(8), not empty
    rollout_log_probs, advantages, mask, search, process_group: as for bapo_loss, of all rows
    loss_fn: another loss with the arguments and the results of bapo_loss
    no_sync: of a DistributedDataParallel, policy.no_sync; the ranks then wait for each other in
        their last micro-batch only
    run_backward: the `backward` of a library such as accelerate, which takes a scalar

    Over GPUs all tensors are those of one rank, process_group is torch.distributed.group.WORLD, and
    the loss is multiplied by the number of ranks, because DDP averages gradients. The ranks may
    have different numbers of micro-batches (not with FSDP), but each needs at least one: if it has
    no response, pass any row with an empty mask. Returns the metrics of loss_fn and "loss", this
    rank's part. Raises what loss_fn raises.
    """
    rows = torch.cat(micro_batches)
    # Over ranks all passes come in one order, because DDP's first one with a graph communicates.
    keeps_graph = len(micro_batches) == 1 and process_group is None
    with torch.set_grad_enabled(keeps_graph):
        log_probs = torch.cat([log_probs_of(micro_batch) for micro_batch in micro_batches])
    leaf = log_probs.detach().requires_grad_()
    inputs = rollout_log_probs[rows], advantages[rows], mask[rows]
    loss, metrics = loss_fn(leaf, *inputs, search, process_group=process_group)
    metrics["loss"] = loss.detach()
    if process_group is not None:
        loss = loss * dist.get_world_size(process_group)

    # The gradient at the log-probs, which each micro-batch sends on to the policy.
    (gradient,) = torch.autograd.grad(loss, leaf)
    parts = gradient.split([len(micro_batch) for micro_batch in micro_batches])
    contexts = [no_sync] * (len(micro_batches) - 1) + [nullcontext]
    for micro_batch, part, context in zip(micro_batches, parts, contexts):
        with context():
            if not keeps_graph:
                log_probs = log_probs_of(micro_batch)
            # The derivative of this sum by the log-probs is their part of the gradient.
            run_backward((log_probs * part).sum())
    return metrics


# ---------------------------------------------------------------- advantages and weights
def group_relative_advantages(rewards: Tensor, group_size: int) -> Tensor:
    """Return GRPO's advantages, (R_i - mean R) / (std R + 1e-6) over each prompt's responses.

    rewards [B], those of a group consecutive; the result is float32 [B]. The standard deviation
    divides by n - 1, as in verl and TRL. A group with a standard deviation below 1e-6 gets exactly
    0. You may drop such groups before calling bapo_loss: the loss then averages over fewer tokens
    and is larger. Raises ValueError for a group_size below 2, and unless rewards are [B] with B a
    multiple of it.
    """
    if group_size < 2 or rewards.dim() != 1 or len(rewards) % group_size:
        raise ValueError(
            "rewards must be [B], with B a multiple of group_size >= 2 and a prompt's responses"
            f" together, got {list(rewards.shape)} and group_size={group_size}"
        )
    groups = rewards.double().view(-1, group_size)
    std, mean = torch.std_mean(groups, 1, keepdim=True)
    advantages = (groups - mean) / (std + 1e-6)
    # Equal rewards may differ by rounding, from each other and from their mean.
    return advantages.masked_fill(std < 1e-6, 0.0).flatten().float()


def rho_at_ratio_1(rewards: Tensor, lengths: Tensor, group_size: int) -> Tensor:
    """Return rho before the first update of a batch, where every ratio is 1: 0-dim float32.

    rewards [B] as in group_relative_advantages, and lengths [B], the response tokens of each
    response. This is bapo_loss's rho_start with the token-mean, if low_start <= 1: P is then the
    sum of A * length over A > 0, and N that of |A| * length over A < 0. NaN if no group has an
    advantage. With sequence-mean weights rho is 0.5 at ratio 1.
    """
    terms = group_relative_advantages(rewards, group_size) * lengths.view_as(rewards)
    return terms.clamp(min=0).sum() / terms.abs().sum()


def token_weights(mask: Tensor, process_group=None) -> Tensor:
    """Return each token's weight in the loss of ONE optimizer step: float32 [B, T].

    This is the token-mean: 1 / (response tokens of the step), and 0 outside the mask. mask [B, T]
    is bool or 0/1. Pass the mask of everything that the step sees and slice the result for
    micro-batches. With a process_group, pass this rank's mask; the count is summed over ranks.

    These weights also weight rho. You may pass others to bapo_loss, such as these two, where tokens
    is mask.sum(1, keepdim=True):

        mask / tokens.clamp(min=1) / (tokens > 0).sum()  # sequence-mean: every response the same
        mask / (len(mask) * length)                      # a constant length (Dr. GRPO)
    """
    inside = (mask != 0).float()
    count = inside.sum()
    if process_group is not None:
        dist.all_reduce(count, group=process_group)
    return inside / count.clamp(min=1)


# ---------------------------------------------------------------- metrics
@torch.no_grad()
def diagnostics(
    log_ratio: Tensor, advantages: Tensor, weights: Tensor, bounds: tuple
) -> dict[str, Tensor]:
    """Return what to log for one update: name -> 0-dim float32 tensor on the device of log_ratio.

    log_ratio, advantages, weights [B, T]; bounds (low, high) or ClipBounds. log_ratio and
    advantages must be 0 where weights are 0, as bapo_loss makes them. Fractions and kl are over the
    tokens whose weight is not 0.

    low, high            the clip bounds; rho, rho_start and reached, if they were searched
    gradient_share       positive tokens' share of the sum of w r |A| over unclipped tokens, where w
                         are `weights`; NaN if no token has a gradient
    clip_fraction_high   share of tokens without a gradient because A > 0 and r > high
    clip_fraction_low    share of tokens without a gradient because A < 0 and r < low
    kl                   mean of r - 1 - log r, Schulman's k3 estimate of the divergence
                         KL(pi_rollout || pi_theta)
    """
    ratio = importance_ratio(log_ratio)
    tokens = (weights != 0).sum().clamp(min=1)
    low, high, *_ = bounds
    has_gradient = gradient_mask(ratio, advantages, low, high)
    terms = weights * advantages * ratio * has_gradient  # a product, so that NaN stays NaN
    # expm1, because r - 1 would lose its digits near 1, where most ratios are.
    log_ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    k3 = torch.expm1(log_ratio) - log_ratio

    # Of a given pair there are only the first two.
    found = {name: ratio.new_full((), value) for name, value in zip(ClipBounds._fields, bounds)}
    return found | {
        "gradient_share": terms.clamp(min=0).sum() / terms.abs().sum(),
        "clip_fraction_high": ((advantages > 0) & ~has_gradient).sum() / tokens,
        "clip_fraction_low": ((advantages < 0) & ~has_gradient).sum() / tokens,
        "kl": k3.sum() / tokens,
    }


# ---------------------------------------------------------------- arguments
def check_shapes(log_probs: Tensor, rollout_log_probs: Tensor, advantages: Tensor, *others) -> None:
    """Raise ValueError unless all are [B, T]; advantages may be [B]. others: mask and weights."""
    shape = tuple(log_probs.shape)
    others = [tuple(other.shape) for other in (rollout_log_probs, *others)]
    given = tuple(advantages.shape)
    if len(shape) != 2 or set(others) != {shape} or given not in (shape, shape[:1]):
        raise ValueError(
            "log_probs, rollout_log_probs, mask and weights must have the same shape [B, T], and"
            f" advantages [B] or [B, T], got {[shape, *others]} and {given}"
        )


def _zero_outside(log_ratio: Tensor, advantages: Tensor, outside: Tensor) -> tuple[Tensor, Tensor]:
    """Return log-ratios and advantages [B, T] that are 0 where `outside` is True."""
    advantages = _per_token(advantages)
    return log_ratio.masked_fill(outside, 0.0), advantages.masked_fill(outside, 0.0)


def _per_token(advantages: Tensor) -> Tensor:
    """Return float32 advantages without a gradient: [B] becomes [B, 1], [B, T] keeps its shape."""
    return advantages.detach().float().reshape(len(advantages), -1)
