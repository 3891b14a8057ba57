"""BAPO: Balanced Policy Optimization with Adaptive Clipping (Xi et al., arXiv 2510.18927).

One file to copy; it needs torch alone. Tested with torch 2.2, 2.4, 2.13 and 2.14.

    loss, metrics = bapo_loss(log_probs, rollout_log_probs, advantages, mask, PAPER_MAIN)
    loss.backward()

Before every update BAPO searches the two clip bounds of the PPO/GRPO surrogate anew, until the
tokens of positive advantage carry at least the share rho0 of the policy-gradient loss (Eq. 8,
Algorithm 1). GRPO and Clip-Higher are the same code with ranges of one point.

    here                paper              meaning
    log_probs           log pi_theta       of the response tokens, under the policy in training
    rollout_log_probs   log pi_rollout     of the same tokens, under the policy that drew them
    ratio               r_t                importance ratio exp(log_probs - rollout_log_probs)
    advantages          A_t                group-relative; one per response [N] or per token [N, T]
    low, high           c_low, c_high      clip bounds: absolute ratios (0.8, 1.2), not 1 +- epsilon
    rho, rho0           rho, rho_0         positive tokens' share of the loss, and its target
    mask                t = 1 .. T         True on response tokens, the EOS included
    weights             1 / sum of T       each token's weight in the loss: 0 outside the mask, by
                                           default 1 / (response tokens of the update)

Shapes: N responses (those to one prompt are consecutive), T response positions.

Dtypes: any float dtype is accepted. Ratios, the loss and its metrics are float32; the sums that the
search compares and the advantages are computed in float64 (float32 on Apple's MPS, which has no
float64). Log-ratios are clamped to +-20, with gradient 0 beyond. What stands outside the mask has
no effect, NaN included; a NaN inside it makes the loss NaN. A search reads the device once, and
nothing else here does. As in the paper there is no KL term and no entropy bonus; nor a dual clip,
which the authors' script has.

When you copy this:

- Both log-probs must be those of the distribution that the tokens were drawn from: logits divided
  by the sampling temperature, no top-p or top-k, by one and the same forward pass, in float32. The
  sampler's own differ by rounding; bfloat16 ones by up to 0.03, more than a step of the search.
- If the policy that drew the tokens is gone (an asynchronous sampler), pass the log-probs that the
  sampler recorded: the ratio then holds its rounding, too. Those of the weights at the start of the
  update would hide all staleness from before.
- Padding inside the mask, and rewards in another order than the responses, go unnoticed. Rows that
  pack several responses need advantages [N, T].
- Compile the model, not the loss: every new pair of bounds would be another graph.
- Groups without any advantage may be left out before this or not. Leaving them out makes the loss
  larger, because fewer tokens share it.
- Test it with two updates on one batch:
      first["kl"] < 1e-6 and first["clip_fraction_low"] + first["clip_fraction_high"] == 0
      second["kl"] > 0  # else rollout_log_probs are read again: the ratio is always 1
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor


# ---------------------------------------------------------------- the clipped surrogate
def importance_ratio(log_ratio: Tensor) -> Tensor:
    """r_t = exp(log_ratio), float32, the log-ratio clamped to +-20."""
    return log_ratio.float().clamp(-20.0, 20.0).exp()


def unclipped(ratio: Tensor, advantages: Tensor, low: float, high: float) -> Tensor:
    """X of Eq. 7, the tokens that have a gradient: bool [N, T]. False where A is 0, and for NaN.

    On a bound a token has its gradient, where Eqs. 5 and 7 are strict. The loss and all metrics use
    this rule; contribution_masses has its two sides, for every bound. ratio [N, T]; advantages
    [N, 1] or [N, T], not [N].
    """
    positive = (advantages > 0) & (ratio <= high)
    negative = (advantages < 0) & (ratio >= low)
    return positive | negative


def token_losses(log_ratio: Tensor, advantages: Tensor, low: float, high: float) -> Tensor:
    """-min(r A, clip(r, low, high) A), Eq. 4 with absolute bounds, unreduced: float32 [N, T].

    The gradient is -r A * d log_ratio; it is exactly 0 for A > 0 with r > high, for A < 0 with
    r < low (Eq. 5), and beyond the clamp of log_ratio. Raises ValueError for bounds with
    low >= high or high < 1.
    """
    _check_bounds("low and high", low, high)
    advantages = _per_token(advantages, log_ratio)
    ratio = importance_ratio(log_ratio)
    # Not torch.minimum, which on a bound passes half of the gradient; and torch.clamp would pass
    # all or none of it, by torch's version.
    clipped = ratio.detach().clamp(low, high)
    return -torch.where(unclipped(ratio, advantages, low, high), ratio, clipped) * advantages


# ---------------------------------------------------------------- the search
@torch.no_grad()
def contribution_masses(
    log_ratio: Tensor, advantages: Tensor, weights: Tensor, search: ClipSearch
) -> Tensor:
    """The sums from which the positive share rho of every candidate pair of bounds follows (Eq. 8).

    log_ratio [N, T], advantages [N] or [N, T], weights [N, T] from token_weights. Returns float64
    [len(highs) + len(lows)]: P at every upper bound, then N at every lower bound, both ascending.
    With w the weights, and [.] 1 if true, else 0:

        "surrogate"  P(high) = sum_{A>0} w A min(r, high)      N(low) = sum_{A<0} w |A| max(r, low)
        "gradient"   P(high) = sum_{A>0} w A r [r <= high]     N(low) = sum_{A<0} w |A| r [r >= low]

    They are sums, so those of a batch are the sum of those of its parts, over micro-batches and
    over ranks, provided that `weights` are those of the whole step.

    How Eq. 8 is read here:
    (1) rho = P / (P + N), a share. Eq. 8 as printed divides by |P - N|, which vanishes where the
        sides balance: rho would be huge there, and rho < rho0 would hardly ever hold.
    (2) Under "surrogate", which Eq. 8 prints and the authors' code takes, raising `low` can only
        raise N and lower rho, so the second half of Algorithm 1 can never reach the target and runs
        to low_max. Under "gradient" rho never falls along the path, as the paper describes it
        ("filter out" negative tokens).
    (3) Eq. 8's factor pi_rollout is the sampling distribution. On tokens drawn from it the plain
        sum already is that expectation. Who wants the factor again multiplies `weights` by it.
    """
    _check_shape("weights", weights, log_ratio)
    precise = _precise(log_ratio.device)
    ratio = importance_ratio(log_ratio)  # a NaN is inside no bound
    weighted = (weights * _per_token(advantages, log_ratio)).masked_fill(weights == 0, 0.0)
    positive = weighted.clamp(min=0)
    negative = -weighted.clamp(max=0)
    clipped = 1.0 if search.contribution == "surrogate" else 0.0  # counts its bound, or nothing
    masses = []
    for high in search.highs():
        counted = torch.where(ratio <= high, ratio, clipped * high)
        masses.append((positive * counted).sum(dtype=precise))
    for low in search.lows():
        counted = torch.where(ratio >= low, ratio, clipped * low)
        masses.append((negative * counted).sum(dtype=precise))
    return torch.stack(masses)


class ClipBounds(NamedTuple):
    """What the search found."""

    low: float
    high: float
    rho: float  # positive share of the contribution at (low, high)
    rho_start: float  # the same at (low_start, high_start)
    reached: bool  # rho >= rho0 - 1e-6; if False the bounds are the last of the range


def search_clip_bounds(masses: Tensor, search: ClipSearch) -> ClipBounds:
    """Algorithm 1's loop over the bounds: the upper one is exhausted first, then the lower one.

    masses are those of contribution_masses with the same search, of all that one optimizer step
    sees; they are read from the device once. Masses of another length raise RuntimeError. A range
    of one point stays there, and the other bound still moves; as printed, a lower range of one
    point would end the loop at once.

    At the first update on a batch every ratio is 1, and bounds around 1 change nothing: below the
    target the search then ends at low_max and high_max, without effect.

    Where every token is clipped rho is 0 / 0: it is taken as 0, and the search goes on. Where no
    token has a mass at any bounds there is nothing to balance: rho is 1, and the start bounds stay.
    """
    lows = search.lows()
    highs = search.highs()
    positive, negative = masses.cpu().split([len(highs), len(lows)])
    positive = positive.tolist()  # P at every upper bound
    negative = negative.tolist()  # N at every lower bound
    anything_to_balance = positive[-1] + negative[0] > 0  # at the widest bounds
    # A tie, such as lengths of 3 : 2 at ratio 1, counts as reached however rounding falls.
    target = search.rho0 - 1e-6

    i_high = 0  # c_high = a+
    i_low = 0  # c_low = a-
    rho_start = rho = _share(positive[0], negative[0]) if anything_to_balance else 1.0
    while rho < target and (i_high < len(highs) - 1 or i_low < len(lows) - 1):
        if i_high < len(highs) - 1:
            i_high += 1
        else:
            i_low += 1
        rho = _share(positive[i_high], negative[i_low])
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
    """Search the bounds, then take the clipped surrogate at them: one update's loss and metrics.

    log_probs [N, T] carry the gradient, and nothing else does; rollout_log_probs [N, T] were
    recorded when the tokens were drawn; advantages [N] or [N, T]; mask [N, T]; weights [N, T], by
    default token_weights(mask, process_group); bounds (low, high), by default searched. Returns the
    loss to minimise (0-dim float32) and `diagnostics` (0-dim, detached). Raises ValueError for an
    argument of wrong shape, and for bounds that are none.

    One optimizer step has ONE pair of bounds and ONE normaliser. When the step is split into
    micro-batches (`parts`, each the numbers of its rows), over data-parallel ranks, or both, give
    both. The bounds cost one more forward pass, without gradient. With one process leave out what
    is marked (ranks), and `group`: None is this process alone.

        group = dist.group.WORLD  # (ranks)
        weights = token_weights(mask, group)  # mask and all tensors: what this rank's step sees
        masses = 0.0
        for part in parts:
            with torch.no_grad():
                log_ratio = compute_log_probs(part) - rollout_log_probs[part]
            masses += contribution_masses(log_ratio, advantages[part], weights[part], search)
        dist.all_reduce(masses, group=group)  # (ranks)
        bounds = search_clip_bounds(masses, search)
        for part in parts:
            inputs = (rollout_log_probs[part], advantages[part], mask[part], search)
            loss, _ = bapo_loss(
                compute_log_probs(part), *inputs, weights=weights[part], bounds=bounds
            )
            loss = loss * dist.get_world_size(group)  # (ranks): DDP averages the gradients
            loss.backward()

    Do not divide the loss by the number of micro-batches; where Accelerate or DeepSpeed do so on
    their own, multiply it by that number. Without micro-batches process_group=group finds weights
    and bounds; the loss is multiplied by the world size all the same. Metrics of tokens are this
    rank's then, rho and the bounds the group's.
    """
    _check_shape("log_probs", log_probs, log_probs)
    _check_shape("rollout_log_probs", rollout_log_probs, log_probs)
    _check_shape("mask", mask, log_probs)
    if weights is None:
        weights = token_weights(mask, process_group)
    _check_shape("weights", weights, log_probs)
    weights = weights.masked_fill(mask == 0, 0.0)
    # Subtracted before any rounding: equal log-probs give a ratio of exactly 1.
    wide = torch.promote_types(log_probs.dtype, torch.float32)
    log_ratio = (log_probs.to(wide) - rollout_log_probs.detach()).float()
    if bounds is None:
        masses = contribution_masses(log_ratio, advantages, weights, search)
        if process_group is not None:
            dist.all_reduce(masses, group=process_group)
        bounds = search_clip_bounds(masses, search)
    outside = weights == 0  # counts nothing, forward and backward, even if it is NaN
    losses = token_losses(
        log_ratio.masked_fill(outside, 0.0),
        _per_token(advantages, log_ratio).masked_fill(outside, 0.0),
        bounds[0],
        bounds[1],
    )
    loss = (weights * losses).sum()
    return loss, diagnostics(log_ratio, advantages, mask, bounds, weights)


# ---------------------------------------------------------------- advantages and weights
def group_relative_advantages(rewards: Tensor, group_size: int) -> Tensor:
    """GRPO's advantages: (R_i - mean R) / (std R + 1e-6) over the responses to one prompt.

    rewards [N], those of a group consecutive; returns float32 [N]. The standard deviation is the
    sample one (n - 1), as in verl and TRL; Dr. GRPO leaves it out. A group of equal rewards gets
    exactly 0. Raises ValueError if rewards are not [N] with N a multiple of group_size.
    """
    if rewards.dim() != 1 or len(rewards) % group_size:
        raise ValueError(
            "rewards must be a tensor [N] with N a multiple of group_size, all responses of a"
            f" prompt together, got shape {list(rewards.shape)} and group_size={group_size}"
        )
    groups = rewards.to(_precise(rewards.device)).view(-1, group_size)
    # Epsilon only tames groups that differ by rounding.
    advantages = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-6)
    # The mean of equal rewards may differ from them by rounding: ask the rewards themselves.
    all_equal = (groups == groups[:, :1]).all(1, keepdim=True)
    return advantages.masked_fill(all_equal, 0.0).flatten().float()


def token_weights(mask: Tensor, process_group=None) -> Tensor:
    """Each token's weight in the loss of ONE optimizer step: mask [N, T] -> float32 [N, T].

    1 / (response tokens of the step), "token-mean": every token counts the same. mask is bool or
    0/1. Pass that of everything the step sees, then slice the result for micro-batches; or this
    rank's part and the process_group, whose tokens are then counted. 0 outside the mask; an empty
    mask gives zeros.

    rho counts tokens by their weights. Other weights, which bapo_loss takes as well, with `tokens`
    = mask.sum(1, keepdim=True):

        mask / tokens.clamp(min=1) / (tokens > 0).sum()  # sequence-mean: every response the same
        mask / (len(mask) * length)  # a constant length, such as the longest allowed (Dr. GRPO)

    With sequence-mean and group-relative advantages rho is 0.5 before a batch's first update, so
    that a target below a half hardly ever acts.
    """
    _check_shape("mask", mask, mask)
    inside = (mask != 0).float()
    count = inside.sum()
    if process_group is not None:
        dist.all_reduce(count, group=process_group)
    return inside / count.clamp(min=1)


# ---------------------------------------------------------------- what to log
@torch.no_grad()
def diagnostics(
    log_ratio: Tensor,
    advantages: Tensor,
    mask: Tensor,
    bounds: tuple,
    weights: Tensor,
) -> dict[str, Tensor]:
    """What to log for one update: name -> 0-dim float32 tensor, on the device of log_ratio.

    Shares and means are over response tokens.

    low, high                    the bounds; of a ClipBounds also rho, rho_start, reached
    gradient_share               positive share of the gradient's mass at these bounds (Eq. 5),
                                 by `weights` [N, T]
    clip_fraction_high           tokens without gradient because A > 0 and r > high
    clip_fraction_low            tokens without gradient because A < 0 and r < low
    positive_tokens              tokens with A > 0
    negative_tokens              tokens with A < 0
    ratio_mean_positive, ratio_min_positive, ratio_max_positive    importance ratio where A > 0
    ratio_mean_negative, ratio_min_negative, ratio_max_negative    importance ratio where A < 0
    kl                           mean of r - 1 - log r (Schulman's k3): KL(pi_rollout || pi_theta),
                                 on tokens drawn by pi_rollout

    Of a sign without tokens a share or mean is NaN, the smallest ratio inf, the largest -inf.
    """
    inside = mask != 0
    advantages = _per_token(advantages, log_ratio).masked_fill(~inside, 0.0)
    log_ratio = log_ratio.float().clamp(-20.0, 20.0).masked_fill(~inside, 0.0)
    ratio = log_ratio.exp()
    tokens = inside.sum().clamp(min=1)
    has_gradient = unclipped(ratio, advantages, bounds[0], bounds[1])
    mass = (weights * advantages * ratio).masked_fill(~has_gradient, 0.0)

    metrics = {}
    for name, value in zip(ClipBounds._fields, bounds):
        metrics[name] = ratio.new_full((), value)
    metrics["gradient_share"] = mass.clamp(min=0).sum() / mass.abs().sum()
    metrics["clip_fraction_high"] = ((advantages > 0) & ~has_gradient).sum() / tokens
    metrics["clip_fraction_low"] = ((advantages < 0) & ~has_gradient).sum() / tokens
    for sign, chosen in (("positive", advantages > 0), ("negative", advantages < 0)):
        count = chosen.sum()
        metrics[f"{sign}_tokens"] = count / tokens
        metrics[f"ratio_mean_{sign}"] = ratio.masked_fill(~chosen, 0.0).sum() / count
        metrics[f"ratio_min_{sign}"] = ratio.masked_fill(~chosen, math.inf).amin()
        metrics[f"ratio_max_{sign}"] = ratio.masked_fill(~chosen, -math.inf).amax()
    # r - 1 cancels near 1, where most tokens are: expm1 does not.
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
    """What the Entropy-Clip Rule (Eqs. 6, 7) says the entropy loses, per unit of the logits' step
    and to first order: mean of r (log pi + H) A X.

    log_probs and entropy [N, T]: log pi and H, the exact entropy in nats of the distribution at
    each token, of the policy in training; the rest as in diagnostics. Returns 0-dim float32.

    On tokens drawn from pi_rollout a state's expectation of the summand is the rule's covariance
    Cov_pi(log pi, A X): positive where the update of Eq. 6 lowers entropy. States are not pooled.
    """
    advantages = _per_token(advantages, log_ratio)
    ratio = importance_ratio(log_ratio)
    gradient = ratio * advantages * unclipped(ratio, advantages, bounds[0], bounds[1])
    lost = gradient * (log_probs + entropy)
    return lost.masked_fill(mask == 0, 0.0).sum() / (mask != 0).sum().clamp(min=1)


# ---------------------------------------------------------------- settings
@dataclass(frozen=True)
class ClipSearch:
    """Settings of the bound search (Algorithm 1): target, ranges, and how Eq. 8 is read.

    The defaults are the paper's main setting (section 5.1), and Eq. 8 as it is printed. Bounds move
    on a grid that is counted in whole steps, so 0.6 + 15 * 0.02 is 0.9 and is reached. A range may
    be one point. A range of several lower bounds must end below 1: past it, negative tokens would
    lose their gradient already at ratio 1.

    rho0: below the share that a task has by itself (`rho_start`), BAPO rests. The paper's tasks
        have 0.37 to 0.45, and its BAPO ends some 0.03 above (Figs. 4, 9): look at rho_start in a
        few steps of GRPO, and set rho0 that much higher.
    contribution: what a token counts in rho. "surrogate" is its value in Eq. 8, "gradient" the mass
        of its gradient (Eq. 5: a clipped token counts nothing); see contribution_masses. Only with
        "gradient" can the second half of the search, which raises the lower bound, reach rho0.

    Raises ValueError for settings that make no sense.
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
            raise ValueError(f"rho0 must be in [0, 1), got {self.rho0}")
        if self.contribution not in ("surrogate", "gradient"):
            raise ValueError(
                f"contribution must be 'surrogate' or 'gradient', got {self.contribution!r}"
            )
        _check_range("low", self.low_start, self.low_max, self.low_step)
        _check_range("high", self.high_start, self.high_max, self.high_step)
        _check_bounds("low_max and high_start", self.low_max, self.high_start)
        if self.low_start < self.low_max and self.low_max >= 1:
            raise ValueError(
                f"low_max must be below 1 in a range of several lower bounds, got {self.low_max};"
                " ClipSearch.fixed(low, high) may lie past 1"
            )

    @classmethod
    def fixed(cls, low: float, high: float) -> ClipSearch:
        """Bounds that never move: GRPO is fixed(0.8, 1.2). rho0 is 0, which is always reached."""
        return cls(rho0=0.0, low_start=low, low_max=low, high_start=high, high_max=high)

    @property
    def is_fixed(self) -> bool:
        """Whether the bounds are known without looking at any token."""
        return self.low_start == self.low_max and self.high_start == self.high_max

    def lows(self) -> list[float]:
        """All values of the lower bound, ascending."""
        return _grid(self.low_start, self.low_max, self.low_step)

    def highs(self) -> list[float]:
        """All values of the upper bound, ascending."""
        return _grid(self.high_start, self.high_max, self.high_step)


def _grid(start: float, stop: float, step: float) -> list[float]:
    return [start + i * step for i in range(round((stop - start) / step))] + [stop]


def _check_range(side: str, start: float, stop: float, step: float) -> None:
    steps = (stop - start) / step if step > 0 else math.inf
    if not (0 <= start <= stop and steps < 1000 and abs(steps - round(steps)) < 1e-6):
        raise ValueError(
            f"{side}_step must lead from {side}_start >= 0 to {side}_max in whole steps, fewer than"
            f" 1000, got {side}_start={start}, {side}_max={stop}, {side}_step={step}"
        )


def _check_bounds(names: str, low: float, high: float) -> None:
    if not (0 <= low < high and high >= 1):
        raise ValueError(
            f"{names} must be clip bounds with low < high and high >= 1, got {low} and {high};"
            " bounds are ratios, 0.8 and 1.2, not epsilons"
        )


GRPO = ClipSearch.fixed(0.8, 1.2)
CLIP_HIGHER = ClipSearch.fixed(0.8, 1.28)
PAPER_MAIN = ClipSearch()  # section 5.1
PAPER_APP_A = ClipSearch(rho0=0.45, low_start=0.8, high_max=2.0)  # OctoThinker; steps not printed


# ---------------------------------------------------------------- arguments
def _check_shape(name: str, tensor: Tensor, like: Tensor) -> None:
    if tensor.dim() != 2 or tensor.shape != like.shape:
        raise ValueError(
            f"{name} must be [N, T], here {list(like.shape)}, got shape {list(tensor.shape)}"
        )


def _per_token(advantages: Tensor, log_ratio: Tensor) -> Tensor:
    """Advantages [N] as [N, 1], which broadcasts, or [N, T]: float32, without their gradient.

    A copy, because autograd cannot keep a tensor that was made under torch.inference_mode.
    """
    if advantages.shape == log_ratio.shape[:1]:
        advantages = advantages.unsqueeze(1)
    elif advantages.shape != log_ratio.shape:
        raise ValueError(
            f"advantages must have shape {list(log_ratio.shape)} or [{len(log_ratio)}],"
            f" got {list(advantages.shape)}"
        )
    return advantages.detach().to(torch.float32, copy=True)


def _precise(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "mps" else torch.float64
