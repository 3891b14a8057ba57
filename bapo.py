"""BAPO: Balanced Policy Optimization with Adaptive Clipping (Xi et al., arXiv 2510.18927).

To use BAPO in your own trainer, copy this file. It needs torch 2.2 or later and nothing else.

    advantages = group_relative_advantages(rewards, group_size)                           # [B]
    loss, metrics = bapo_loss(log_probs, rollout_log_probs, advantages, mask, PAPER_MAIN)
    loss.backward()

For every update BAPO begins with the lowest clip bounds of its ranges. If the positive tokens'
share of the total absolute objective is below rho0 there, it raises the upper bound, and then the
lower one, until the share reaches rho0 or the ranges end (Eq. 8, Algorithm 1). GRPO and Clip-Higher
are the same code with fixed bounds.

    code                paper              meaning
    log_probs           log pi_theta       of the response tokens, under the policy in training
    rollout_log_probs   log pi_rollout     of the same tokens, under the policy that drew them
    ratio               r_t                importance ratio exp(log_probs - rollout_log_probs)
    advantages          A_t                group-relative; one per response [B] or per token [B, T]
    low, high           c_low, c_high      clip bounds: absolute ratios (0.8, 1.2), not 1 +- epsilon
    rho, rho0           rho, rho_0         P / (P + N) of Eq. 8, and its target
    mask                t = 1 .. T         True on response tokens, the EOS included
    B, T                                   responses and response positions in a batch

The five mistakes that cost most:
1. Passing log_probs.detach() as rollout_log_probs. Every ratio is then 1, and BAPO does nothing.
   Compute and store the log-probs before the first update.
2. Computing the two log-probs with different code. Take both from the training model's forward
   pass: float32 logits, divided by the temperature. Sample without top-p and top-k.
3. Counting the tokens in each micro-batch or rank, or searching there without meaning to: see
   bapo_loss.
4. A mask that holds padding or misses the EOS, and rewards in another order than the responses.
5. A rho0 that was not compared with the rho of your own responses. BAPO may then be a fixed clip:
   see ClipSearch.

To test your code, make two updates on one batch, with a learning rate above 0. In the first,
metrics["kl"] should be below 1e-6 and both clip fractions 0; in the second, "kl" should be above 0.
To test the search, train one step with rho0=0.0, where no bounds may move, and one with rho0=0.999,
where every search should end at [0.9, 3.0], unless no advantage is negative.

One optimizer step has one pair of bounds and one token count. If a step is split into micro-batches
or over GPUs, this loop takes both from all parts before any part trains. `parts` holds the row
numbers of each micro-batch, as torch.arange(len(mask)).split(8) does, and log_probs_of is your
forward pass. dist is torch.distributed; on one GPU, leave out the lines marked (ranks) and set
`group = None`. The search costs one more forward pass, without gradient. Log what it returns.

    group = dist.group.WORLD  # (ranks)
    weights = token_weights(mask, group)  # mask and all other tensors: what this rank's step sees
    masses = 0.0
    for part in parts:
        with torch.no_grad():
            log_ratio = log_probs_of(policy, part) - rollout_log_probs[part]
        masses += contribution_masses(log_ratio, advantages[part], weights[part], search)
    dist.all_reduce(masses, group=group)  # (ranks)
    bounds = search_clip_bounds(masses, search)
    for part in parts:
        inputs = (log_probs_of(policy, part), rollout_log_probs[part], advantages[part], mask[part])
        loss, _ = bapo_loss(*inputs, search, weights=weights[part], bounds=bounds)
        loss = loss * dist.get_world_size(group)  # (ranks): DDP averages the gradients
        loss.backward()
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad


# ---------------------------------------------------------------- settings
@dataclass(frozen=True)
class ClipSearch:
    """Settings of the search for the clip bounds: its target, its ranges, and how rho is defined.

    The defaults are the paper's main setting (section 5.1). A range is a single value or a whole
    number of steps, and a step is above 0. A lower bound above 1 clips negative tokens even at
    ratio 1.

    rho0: the target, see below. The bounds move only in updates whose rho is smaller.
    contribution: "surrogate" counts a token by its term in Eq. 8, as printed. "gradient" counts it
        by the size of its gradient: r |A|, or 0 if it is clipped. See contribution_masses.

    Choose rho0 by the rho of your own responses. At a batch's first update every ratio is 1. With
    rewards of 0 and 1 and the token-mean, rho is then exactly a ratio of lengths:

        rho = sum S L+ / sum S (L+ + L-)        over the groups that have an advantage

    L+ and L- are the mean lengths of a group's right and wrong responses, and S is the sum of its
    positive advantages. If wrong responses are 1.5 times as long as right ones in every group, rho
    is 1 / (1 + 1.5) = 0.4. Sample ten batches with the model that you begin with, without training.
    Compute rho at ratio 1 for each: for this measurement alone, pass the same tensor to bapo_loss
    as log_probs and rollout_log_probs, and read rho_start. If rho0 is below most of these values,
    the bounds hardly ever move. If it is above most of them, they nearly always move. Then train,
    and log rho_start, low, high and reached. If nearly all searches stop at the same end of the
    ranges, you have a fixed clip, and ClipSearch.fixed says so more simply. With a sequence-mean
    loss rho is 0.5 at ratio 1.

    Raises ValueError for a rho0 outside [0, 1), an unknown contribution, and impossible ranges.
    """

    rho0: float = 0.4
    low_start: float = 0.6  # a-
    low_max: float = 0.9  # b-
    low_step: float = 0.02  # delta_2
    high_start: float = 1.2  # a+
    high_max: float = 3.0  # b+
    high_step: float = 0.05  # delta_1
    contribution: str = "surrogate"

    def __post_init__(self):
        if not 0 <= self.rho0 < 1:
            raise ValueError(f"rho0 must be at least 0 and below 1, got {self.rho0}")
        if self.contribution not in ("surrogate", "gradient"):
            raise ValueError(
                f"contribution must be 'surrogate' or 'gradient', got {self.contribution!r}"
            )
        _check_range("low", self.low_start, self.low_max, self.low_step)
        _check_range("high", self.high_start, self.high_max, self.high_step)
        _check_bounds("low_max and high_start", self.low_max, self.high_start)

    @classmethod
    def fixed(cls, low: float, high: float) -> ClipSearch:
        """Return settings with one pair of bounds, such as fixed(0.8, 1.2) for GRPO."""
        _check_bounds("low and high", low, high)
        # No rho is below a target of 0, so nothing is searched.
        return cls(rho0=0.0, low_start=low, low_max=low, high_start=high, high_max=high)

    def lows(self) -> list[float]:
        """Return all values of the lower bound, ascending."""
        return _grid(self.low_start, self.low_max, self.low_step)

    def highs(self) -> list[float]:
        """Return all values of the upper bound, ascending."""
        return _grid(self.high_start, self.high_max, self.high_step)


def _grid(start: float, stop: float, step: float) -> list[float]:
    steps = round((stop - start) / step)
    # The end is appended, because 0.6 + 15 * 0.02 is not exactly 0.9 in floats.
    return [start + i * step for i in range(steps)] + [stop]


def _check_range(side: str, start: float, stop: float, step: float) -> None:
    steps = (stop - start) / step if 0 < step < math.inf else math.inf
    # 1e-6 allows for rounding. 1000 steps or more are probably a typing error.
    is_whole = steps < 1000 and math.isclose(steps, round(steps), rel_tol=1e-6)
    if not (0 <= start <= stop and is_whole):
        raise ValueError(
            f"the range from {side}_start to {side}_max must begin at 0 or above and be 0 to"
            f" 999 whole steps of {side}_step, got {start}, {stop} and {step}"
        )


def _check_bounds(names: str, low: float, high: float) -> None:
    if not (0 <= low < high and high >= 1):
        raise ValueError(
            f"{names} must be clip bounds with 0 <= low < high and high >= 1, got {low} and {high};"
            " bounds are ratios such as 0.8 and 1.2, not epsilons"
        )


GRPO = ClipSearch.fixed(0.8, 1.2)
PAPER_MAIN = ClipSearch()  # section 5.1
PAPER_APP_A = ClipSearch(rho0=0.45, low_start=0.8, high_max=2.0)  # App. A, which prints no steps


# ---------------------------------------------------------------- the clipped surrogate
MAX_LOG_RATIO = 20.0  # as in verl; exp(20) = 5e8 stays finite in float32 products and sums


def importance_ratio(log_ratio: Tensor) -> Tensor:
    """Return r_t = exp(log_ratio) in float32, with the log-ratio clamped to +-MAX_LOG_RATIO."""
    return log_ratio.float().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def unclipped(ratio: Tensor, advantages: Tensor, low: float, high: float) -> Tensor:
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
    clipped tokens (Eq. 5) and clamped log-ratios. Raises ValueError unless 0 <= low < high and
    high >= 1.
    """
    _check_bounds("low and high", low, high)
    advantages = _per_token(advantages, log_ratio)
    ratio = importance_ratio(log_ratio)
    # Eq. 4: -min(r A, clip(r, low, high) A). `unclipped` picks the smaller term, because the
    # gradient of torch.minimum and clamp at a bound depends on torch's version.
    clipped = ratio.detach().clamp(low, high)
    chosen = torch.where(unclipped(ratio, advantages, low, high), ratio, clipped)
    return -chosen * advantages


# ---------------------------------------------------------------- the positive share
@torch.no_grad()
def contribution_masses(
    log_ratio: Tensor, advantages: Tensor, weights: Tensor, search: ClipSearch
) -> Tensor:
    """Return the sums P and N of Eq. 8 at every candidate bound: rho = P / (P + N).

    P depends on the upper bound alone and N on the lower one, so two lists serve all pairs. The
    result is one float64 vector (float32 on Apple's MPS): P at every upper bound, then N at every
    lower bound.
    log_ratio [B, T]; advantages [B] or [B, T]; weights w >= 0 [B, T] from token_weights. [x] is 1
    if x holds, else 0:

        "surrogate"  P(high) = sum_{A>0} w A min(r, high)      N(low) = sum_{A<0} w |A| max(r, low)
        "gradient"   P(high) = sum_{A>0} w A r [r <= high]     N(low) = sum_{A<0} w |A| r [r >= low]

    The sums add up over micro-batches and ranks, provided that `weights` were computed for the
    whole optimizer step. Three remarks on Eq. 8:

    1. As printed it divides by |P - N|, which vanishes where both sides balance. The paper's
       figures show P / (P + N), and so does this code.
    2. With "surrogate", raising `low` can only raise N and lower rho. So the second half of the
       search never reaches rho0 and always ends at low_max. With "gradient" rho never falls.
    3. Eq. 8 weights a sum over the vocabulary by pi_rollout. Our tokens are drawn from pi_rollout,
       so a plain sum estimates it. To apply the factor, pass weights * rollout_log_probs.exp()
       here, but not to the loss.
    """
    _check_shapes(log_ratio=log_ratio, weights=weights)
    log_ratio, advantages = _zero_outside(log_ratio, advantages, weights == 0)
    dtype = _widest_dtype(log_ratio.device)
    ratio = importance_ratio(log_ratio)
    positive_part = (weights * advantages).clamp(min=0)  # w A where A > 0, else 0
    negative_part = (weights * -advantages).clamp(min=0)  # w |A| where A < 0, else 0
    # A clipped token counts its bound in Eq. 8, and nothing in the gradient.
    # The comparisons are False for NaN, so a ratio of NaN is counted as it is, and rho becomes NaN.
    is_surrogate = search.contribution == "surrogate"
    masses = []
    for high in search.highs():
        if_clipped = high if is_surrogate else 0.0
        counted = torch.where(ratio > high, if_clipped, ratio)
        masses.append((positive_part * counted).sum(dtype=dtype))
    for low in search.lows():
        if_clipped = low if is_surrogate else 0.0
        counted = torch.where(ratio < low, if_clipped, ratio)
        masses.append((negative_part * counted).sum(dtype=dtype))
    return torch.stack(masses)


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
    upper bound even if the lower range is a single value. If no token counts at any bounds, usually
    because none has an advantage, the bounds stay at their start and rho is NaN. The same holds if
    a sum is NaN or infinite. If all tokens are clipped at the current bounds, rho counts as 0 and
    the search goes on.
    """
    lows = search.lows()
    highs = search.highs()
    last_low = len(lows) - 1
    last_high = len(highs) - 1
    positive, negative = masses.cpu().split([len(highs), len(lows)])
    p_of_high = positive.tolist()  # P at every upper bound
    n_of_low = negative.tolist()  # N at every lower bound
    # P is largest at b+. With "gradient" N is largest at a-. With "surrogate" N is 0 at a- only if
    # it is 0 at every bound. So a sum of 0 here means that no bounds count a token. It is not
    # between 0 and infinity if it is NaN, either.
    is_defined = 0 < p_of_high[last_high] + n_of_low[0] < math.inf
    # The tolerance lets a tie count as reached, however its sums are rounded.
    target = search.rho0 - 1e-6

    i_high = 0  # c_high = a+
    i_low = 0  # c_low = a-
    rho_start = _share(p_of_high[0], n_of_low[0]) if is_defined else math.nan
    rho = rho_start  # NaN is not below the target, and ends the search
    while rho < target and (i_high < last_high or i_low < last_low):
        if i_high < last_high:
            i_high += 1
        else:
            i_low += 1
        rho = _share(p_of_high[i_high], n_of_low[i_low])
    return ClipBounds(lows[i_low], highs[i_high], rho, rho_start, rho >= target)


def _share(positive: float, negative: float) -> float:
    total = positive + negative
    return positive / total if total else 0.0


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

    log_probs: [B, T], with a gradient. Any float dtype will do.
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
    token that counts makes the loss NaN, and rho too if the bounds are searched. Without any token
    the loss is 0 and rho NaN. There is no KL term, no entropy bonus and no dual clip. Raises
    ValueError for an argument of the wrong shape and for impossible bounds.

    One optimizer step has ONE pair of bounds and ONE token count. If it is split into micro-batches
    or ranks, compute `weights` from the mask of the whole step, sum contribution_masses over all
    parts, search `bounds` once, and pass both to the loss of every part. Add the parts' losses up;
    do not average them. The loop is at the top of this file. With one part per rank, process_group
    counts the tokens and sums the masses for you. DDP averages gradients, so multiply the loss by
    the world size in both cases.

    A search in each part is another method. A part that is one response with A > 0 has rho = 1, so
    nothing moves, and its tokens meet high_start. With A < 0 rho is 0, both bounds move to their
    ends, and its tokens meet low_max. Such parts have a fixed clip at [low_max, high_start], and
    parts of few responses come close to it.
    """
    if weights is None:
        weights = token_weights(mask, process_group)
    _check_shapes(
        log_probs=log_probs, rollout_log_probs=rollout_log_probs, mask=mask, weights=weights
    )
    weights = weights.masked_fill(mask == 0, 0.0)
    # Subtract in float32 or float64, so that the difference is not rounded to bfloat16.
    wide = torch.promote_types(log_probs.dtype, torch.float32)
    log_ratio = (log_probs.to(wide) - rollout_log_probs.detach()).float()
    log_ratio, advantages = _zero_outside(log_ratio, advantages, weights == 0)
    if bounds is None:
        masses = contribution_masses(log_ratio, advantages, weights, search)
        if process_group is not None:
            dist.all_reduce(masses, group=process_group)
        elif search.rho0 and _ranks() > 1:
            warnings.warn(
                f"bapo_loss searches the bounds on this rank alone, of {_ranks()}: pass"
                " process_group=dist.group.WORLD, or the bounds of the whole step",
                stacklevel=2,
            )
        bounds = search_clip_bounds(masses, search)
    low, high, *_ = bounds
    loss = (weights * token_losses(log_ratio, advantages, low, high)).sum()
    return loss, diagnostics(log_ratio, advantages, mask, bounds, weights)


# ---------------------------------------------------------------- advantages and weights
def group_relative_advantages(rewards: Tensor, group_size: int) -> Tensor:
    """Return GRPO's advantages, (R_i - mean R) / (std R + 1e-6) over each prompt's responses.

    rewards [B], those of a group consecutive; the result is float32 [B]. The standard deviation
    divides by n - 1, as in verl and TRL. A group of equal rewards gets exactly 0. You may drop such
    groups before calling bapo_loss: the loss then averages over fewer tokens and is larger. Raises
    ValueError for a group_size below 2, and unless rewards are [B] with B a multiple of it.
    """
    if group_size < 2:
        raise ValueError(
            "group_size must be at least 2, because advantages compare responses to the same"
            f" prompt, got {group_size}"
        )
    if rewards.dim() != 1 or len(rewards) % group_size:
        raise ValueError(
            "rewards must be a tensor [B] with B a multiple of group_size, all responses of a"
            f" prompt together, got shape {list(rewards.shape)} and group_size={group_size}"
        )
    groups = rewards.to(_widest_dtype(rewards.device)).view(-1, group_size)
    advantages = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-6)
    # Rounding may make the mean of equal rewards differ from them, so compare the rewards.
    all_equal = (groups == groups[:, :1]).all(1, keepdim=True)
    return advantages.masked_fill(all_equal, 0.0).flatten().float()


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
    _check_shapes(mask=mask)
    inside = (mask != 0).float()
    count = inside.sum()
    if process_group is not None:
        dist.all_reduce(count, group=process_group)
    return inside / count.clamp(min=1)


# ---------------------------------------------------------------- metrics
@torch.no_grad()
def diagnostics(
    log_ratio: Tensor, advantages: Tensor, mask: Tensor, bounds: tuple | None, weights: Tensor
) -> dict[str, Tensor]:
    """Return what to log for one update: name -> 0-dim float32 tensor on the device of log_ratio.

    log_ratio, mask, weights [B, T]; advantages [B] or [B, T]. Means are over response tokens; those
    of weight 0 count as tokens with A = 0 and ratio 1.

    low, high            the clip bounds; rho, rho_start and reached, if they were searched
    gradient_share       positive tokens' share of the sum of r |A| over unclipped tokens
    clip_fraction_high   share of tokens without a gradient because A > 0 and r > high
    clip_fraction_low    share of tokens without a gradient because A < 0 and r < low
    positive_tokens      share of tokens with A > 0
    negative_tokens      share of tokens with A < 0
    ratio_min, ratio_max smallest and largest importance ratio of the tokens with A != 0
    kl                   mean of r - 1 - log r, Schulman's k3 estimate of the divergence
                         KL(pi_rollout || pi_theta)

    Without bounds (None) the first four rows are left out. If no token has an advantage, ratio_min
    is inf and ratio_max -inf. gradient_share is NaN if no token has a gradient.
    """
    log_ratio, advantages = _zero_outside(log_ratio, advantages, (mask == 0) | (weights == 0))
    ratio = importance_ratio(log_ratio)
    tokens = (mask != 0).sum().clamp(min=1)
    positive = advantages > 0
    negative = advantages < 0

    metrics = {}
    if bounds is not None:
        for name, value in zip(ClipBounds._fields, bounds):  # a given pair has only the first two
            metrics[name] = ratio.new_full((), value)
        low, high, *_ = bounds
        has_gradient = unclipped(ratio, advantages, low, high)
        mass = weights * advantages * ratio * has_gradient  # a product, so that NaN stays NaN
        metrics["gradient_share"] = mass.clamp(min=0).sum() / mass.abs().sum()
        metrics["clip_fraction_high"] = (positive & ~has_gradient).sum() / tokens
        metrics["clip_fraction_low"] = (negative & ~has_gradient).sum() / tokens
    metrics["positive_tokens"] = positive.sum() / tokens
    metrics["negative_tokens"] = negative.sum() / tokens
    # Padded, because amin and amax fail if there are no numbers at all, as in [B, 0].
    ratio_or_inf = ratio.masked_fill(advantages == 0, math.inf).flatten()
    metrics["ratio_min"] = pad(ratio_or_inf, (0, 1), value=math.inf).amin()
    ratio_or_minus_inf = ratio.masked_fill(advantages == 0, -math.inf).flatten()
    metrics["ratio_max"] = pad(ratio_or_minus_inf, (0, 1), value=-math.inf).amax()
    # expm1, because r - 1 would lose its digits near 1, where most ratios are.
    log_ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    metrics["kl"] = (torch.expm1(log_ratio) - log_ratio).sum() / tokens
    return metrics


@torch.no_grad()
def predicted_entropy_fall(
    log_ratio: Tensor,
    log_probs: Tensor,
    entropy: Tensor,
    advantages: Tensor,
    mask: Tensor,
    bounds: tuple,
) -> Tensor:
    """Return the fall of entropy that the Entropy-Clip Rule predicts for an update (Eqs. 6, 7).

    It is the mean of r (log pi + H) A X over response tokens: the first-order fall per unit of
    Eq. 6's step size eta. Eq. 6 supposes that a step moves each prefix's logits on their own, by
    eta (A X + C). An optimizer moves shared parameters, so compare the sign and the trend with the
    entropy, and not the size.

    log_probs and entropy [B, T] are log pi and the exact entropy H in nats of the distribution at
    each token, under the policy in training; the rest is as in diagnostics. Returns a 0-dim
    float32, above 0 where entropy should fall. For one prefix it is an estimate, over tokens drawn
    from pi_rollout, of Cov_pi(log pi, A X) in Eq. 6.
    """
    outside = mask == 0
    log_ratio, advantages = _zero_outside(log_ratio, advantages, outside)
    ratio = importance_ratio(log_ratio)
    low, high, *_ = bounds
    gradient = ratio * advantages * unclipped(ratio, advantages, low, high)
    falls = gradient * (log_probs + entropy).masked_fill(outside, 0.0)
    return falls.sum() / (~outside).sum().clamp(min=1)


# ---------------------------------------------------------------- arguments
def _check_shapes(**tensors: Tensor) -> None:
    """Raise ValueError unless the first tensor is [B, T] and the others have its shape."""
    first, *_ = tensors.values()
    expected = list(first.shape) if first.dim() == 2 else "[B, T]"
    for name, tensor in tensors.items():
        if list(tensor.shape) != expected:
            raise ValueError(f"{name} must have shape {expected}, got {list(tensor.shape)}")


def _zero_outside(log_ratio: Tensor, advantages: Tensor, outside: Tensor) -> tuple[Tensor, Tensor]:
    """Return log-ratios and advantages [B, T] that are 0 where `outside` is True."""
    advantages = _per_token(advantages, log_ratio)
    return log_ratio.masked_fill(outside, 0.0), advantages.masked_fill(outside, 0.0)


def _per_token(advantages: Tensor, log_ratio: Tensor) -> Tensor:
    """Return float32 advantages without a gradient: [B] becomes [B, 1], [B, T] keeps its shape.

    It is a copy, because autograd cannot keep a tensor that was made under torch.inference_mode.
    """
    if advantages.shape == log_ratio.shape[:1]:
        advantages = advantages.unsqueeze(1)
    elif advantages.shape != log_ratio.shape:
        raise ValueError(
            f"advantages must have shape {list(log_ratio.shape)} or [{len(log_ratio)}],"
            f" got {list(advantages.shape)}"
        )
    return advantages.detach().to(torch.float32, copy=True)


def _ranks() -> int:
    """Return the number of ranks of torch.distributed, 1 if it is not in use."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def _widest_dtype(device: torch.device) -> torch.dtype:
    """Return float64 where the device has it: sums then hardly depend on how a batch is split."""
    return torch.float32 if device.type == "mps" else torch.float64
