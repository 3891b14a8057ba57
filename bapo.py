"""BAPO: Balanced Policy Optimization with Adaptive Clipping (Xi et al., arXiv 2510.18927), in one file to copy.

    loss, metrics = bapo_loss(log_probs, rollout_log_probs, advantages, mask)
    loss.backward()

Before every update BAPO searches the two clip bounds of the PPO/GRPO surrogate anew, until the tokens of positive
advantage carry at least the share rho0 of the policy-gradient loss (Eq. 8, Algorithm 1). GRPO and Clip-Higher are the
same code with a range of one point (`GRPO`, `CLIP_HIGHER`). torch and the standard library only.

    here                paper              meaning
    log_probs           log pi_theta       of the response tokens, under the policy that is being trained; carries the gradient
    rollout_log_probs   log pi_rollout     of the same tokens, under the policy that drew them
    ratio               r_t                importance ratio exp(log_probs - rollout_log_probs)
    advantages          A_t                group-relative (GRPO); one per response [N], or one per token [N, T]
    low, high           c_low, c_high      clip bounds: absolute ratios (0.8, 1.2), not 1 +- epsilon
    rho, rho0           rho, rho_0         positive tokens' share of the loss, and its target
    mask                y_t, t = 1..T      True on response tokens, EOS included (by position, never `token != pad`)
    weights             1 / sum of T       of each token in the loss (token_weights), 0 outside the mask

Shapes: N responses (a prompt's group is consecutive), T response positions. Any float dtype is accepted; ratios, bounds
and the loss are float32, sums float64 (float32 on Apple's MPS, which has no float64). Log-ratios are clamped to +-20, with
gradient 0 beyond. Values are never read on the host. What is NaN outside the mask has no effect; inside, the loss is NaN.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class ClipSearch:
    """Target, ranges and reading of the bound search (Algorithm 1); ValueError for what makes no sense.

    Bounds move on a grid counted in whole steps, so 0.6 + 15 * 0.02 is 0.9 and is reached. `contribution` says what a token
    counts in rho: "gradient", the mass of its gradient (Eq. 5: a clipped token counts nothing), or "surrogate", the value of
    Eq. 8; see contribution_masses. Past 1 a lower bound is a gate, not a trust region: a negative token has a gradient only
    once it has become likelier than when it was drawn. A grid should not have a point at 1, where rounding would decide. A
    bound past 1 that no negative token passes is not taken, unless may_empty: so BAPO is GRPO where every ratio is 1.

    The defaults are the paper's range for OctoThinker (App. A) in the gradient's reading; PAPER_OCTOTHINKER is it as printed.
    """

    rho0: float = 0.45
    low_start: float = 0.8  # a-
    low_max: float = 0.9  # b-
    low_step: float = 0.02  # delta_2
    high_start: float = 1.2  # a+
    high_max: float = 2.0  # b+
    high_step: float = 0.05  # delta_1
    contribution: str = "gradient"
    may_empty: bool = False

    def __post_init__(self):
        _check_search(self)

    @classmethod
    def fixed(cls, low: float, high: float) -> ClipSearch:
        """Bounds that never move: GRPO is fixed(0.8, 1.2). rho0 = 0, so the target always counts as reached."""
        return cls(rho0=0.0, low_start=low, low_max=low, high_start=high, high_max=high)

    def lows(self, device: torch.device | str = "cpu") -> Tensor:
        """All values of the lower bound, ascending: float32 [number of values]."""
        return _grid(self.low_start, self.low_max, self.low_step, device)

    def highs(self, device: torch.device | str = "cpu") -> Tensor:
        """All values of the upper bound, ascending: float32 [number of values]."""
        return _grid(self.high_start, self.high_max, self.high_step, device)


def bapo_loss(
    log_probs: Tensor,
    rollout_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    search: ClipSearch | None = None,
    *,
    aggregation: str = "token-mean",
    weights: Tensor | None = None,
    bounds: ClipBounds | tuple | None = None,
    process_group=None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Search the bounds, then the clipped surrogate at them: one update's loss (to minimise) and its metrics.

    log_probs [N, T] with gradient; rollout_log_probs [N, T], recorded when the tokens were drawn; advantages [N] or [N, T];
    mask [N, T]; search None: ClipSearch(). Returns a 0-dim float32 loss and `diagnostics` (0-dim, detached). ValueError on
    mismatched shapes.

    One optimizer step has ONE pair of bounds and ONE normaliser. When the step is split, give both:

        # gradient accumulation (parts: the micro-batches; no division of the loss by their number)
        weights = token_weights(mask)                                      # of the whole step, then sliced like the rest
        with torch.no_grad():
            masses = sum(contribution_masses(log_ratio(part), part.advantages, part.weights, search) for part in parts)
        bounds = clip_bounds(masses, search)
        for part in parts:
            loss, _ = bapo_loss(..., weights=part.weights, bounds=bounds)
            loss.backward()

        # data parallel: every rank passes its own part and the group; token counts and masses are summed over it
        loss, metrics = bapo_loss(..., search, process_group=dist.group.WORLD)
        (loss * dist.get_world_size()).backward()    # the ranks' losses add up to the step's, and DDP averages gradients

        # both at once: all_reduce the token count and the masses yourself, then pass weights and bounds.

    bounds may also be a plain (low, high). Pass weights too where a row holds several packed responses (aggregation
    "sequence-mean" takes a row for one response), and for "constant" (divided by the number of ranks). With process_group,
    metrics of tokens are this rank's, rho and bounds the group's.
    """
    rollout_log_probs = _per_token("rollout_log_probs", rollout_log_probs, log_probs).detach()
    log_ratio = log_probs.to(torch.promote_types(log_probs.dtype, torch.float32)) - rollout_log_probs
    _per_token("mask", mask, log_ratio)
    if weights is None:
        weights = token_weights(mask, aggregation, process_group=process_group)
    weights = weights.masked_fill(mask == 0, 0.0)
    if bounds is None:
        bounds = search_clip_bounds(log_ratio.detach(), advantages, weights, search or ClipSearch(), process_group)
    loss = clipped_surrogate(log_ratio, advantages, weights, bounds[0], bounds[1])
    return loss, diagnostics(log_ratio, advantages, mask, bounds, weights)


# ---------------------------------------------------------------- advantages and weights
def group_relative_advantages(rewards: Tensor, group_size: int, normalize_std: bool = True) -> Tensor:
    """GRPO's advantages: (R_i - mean R) / (std R + 1e-6) over the responses to one prompt.

    rewards [N], rewards of one group consecutive; returns [N] (float32, or float64 if rewards are). The standard
    deviation is the sample one (n - 1), as in verl, on which the authors' code builds, and TRL; epsilon only tames groups
    that differ by rounding. A group of equal rewards gets exactly 0. `normalize_std=False` subtracts the mean only
    (Dr. GRPO). Raises ValueError if rewards are no tensor [N] with N a multiple of group_size.
    """
    if not isinstance(rewards, Tensor) or rewards.dim() != 1 or group_size < 1 or len(rewards) % group_size:
        found = f"shape {list(rewards.shape)}" if isinstance(rewards, Tensor) else f"a {type(rewards).__name__}"
        wanted = "a tensor [N] with N a multiple of group_size, all responses of a prompt together"
        raise ValueError(f"rewards must be {wanted}, got {found} and group_size={group_size}")
    groups = rewards.to(_precise(rewards.device)).view(-1, group_size)
    advantages = groups - groups.mean(1, keepdim=True)
    if normalize_std and group_size > 1:
        advantages = advantages / (groups.std(1, keepdim=True) + 1e-6)
    # The mean of equal rewards may differ from them by rounding, so equality is asked of the rewards themselves.
    equal = (groups == groups[:, :1]).all(1, keepdim=True)
    return advantages.masked_fill(equal, 0.0).flatten().to(torch.promote_types(rewards.dtype, torch.float32))


def token_weights(mask: Tensor, aggregation: str = "token-mean", length: int | None = None, process_group=None) -> Tensor:
    """Each token's weight in the loss of ONE optimizer step: mask [N, T] (bool or 0/1) -> float32 [N, T].

    "token-mean"     1 / (response tokens of the step): every token counts the same; sums to 1
    "sequence-mean"  1 / (non-empty responses * tokens of this response): every row counts the same; sums to 1
    "constant"       1 / (N * length), `length` being a constant such as the longest response allowed (Dr. GRPO)

    Pass the mask of everything that the step sees, then slice the result for micro-batches; or this rank's part and the
    process_group, over which tokens and responses are then counted. 0 outside the mask; an empty mask gives zeros. Raises
    ValueError for an unknown aggregation, or "constant" without a positive length.
    """
    if mask.dim() != 2:
        raise ValueError(f"mask must be [N, T], got shape {list(mask.shape)}")
    weights = (mask != 0).float()
    if aggregation == "token-mean":
        count = weights.sum()
    elif aggregation == "sequence-mean":
        per_response = weights.sum(1, keepdim=True)
        weights, count = weights / per_response.clamp(min=1), (per_response > 0).sum()
    elif aggregation == "constant":
        if length is None or length <= 0:
            raise ValueError(f"aggregation='constant' needs length > 0 (the longest response allowed), got {length}")
        weights, count = weights / length, torch.full((), len(mask), device=mask.device)
    else:
        raise ValueError(f"aggregation must be 'token-mean', 'sequence-mean' or 'constant', got {aggregation!r}")
    if process_group is not None:
        dist.all_reduce(count, group=process_group)
    return weights / count.clamp(min=1)


# ---------------------------------------------------------------- the search
class ClipBounds(NamedTuple):
    """What the search found; 0-dim tensors on the device of the masses."""

    low: Tensor  # float32, absolute ratio
    high: Tensor  # float32, absolute ratio
    rho: Tensor  # float64, positive share of the contribution at (low, high)
    rho_start: Tensor  # float64, the same at (low_start, high_start)
    reached: Tensor  # bool, rho >= rho0 - 1e-6; if False the bounds are the last ones that may be taken


def search_clip_bounds(
    log_ratio: Tensor, advantages: Tensor, weights: Tensor, search: ClipSearch, process_group=None
) -> ClipBounds:
    """Clip bounds for one optimizer step: contribution_masses, summed over process_group if one is given, then
    clip_bounds. Every rank of the group must call it, with its slice of the whole step's weights; None: this process alone."""
    masses = contribution_masses(log_ratio, advantages, weights, search)
    if process_group is not None:
        dist.all_reduce(masses, group=process_group)
    return clip_bounds(masses, search)


@torch.no_grad()
def contribution_masses(log_ratio: Tensor, advantages: Tensor, weights: Tensor, search: ClipSearch) -> Tensor:
    """The sums from which the positive share rho of every candidate pair of bounds follows (Eq. 8).

    log_ratio [N, T], advantages [N] or [N, T], weights [N, T] from token_weights -> float64 [len(highs) + len(lows)]: P at
    every upper bound, then N at every lower bound, both ascending. Sums, so the masses of a batch are the sum of the masses
    of its parts, over micro-batches and over ranks, provided that `weights` are those of the whole step. With w the weights
    and [.] 1 if true, else 0:

        "surrogate"  P(high) = sum_{A>0} w A min(r, high)       N(low) = sum_{A<0} w |A| max(r, low)
        "gradient"   P(high) = sum_{A>0} w A r [r <= high]      N(low) = sum_{A<0} w |A| r [r >= low]

    How Eq. 8 is read here. (1) rho = P / (P + N), a share: Eq. 8's denominator as printed is |P - N|, which explodes when
    the sides balance, so that rho < rho0 would hardly ever hold. (2) Under "surrogate" raising `low` can only raise N and
    lower rho, so the second half of Algorithm 1 can never reach the target and runs to low_max; under "gradient" rho
    never falls along the path. The paper prints the first and describes the second ("filter out" negative tokens).
    (3) Eq. 8's factor pi_rollout is the sampling distribution: on tokens drawn from it the plain sum already is that
    expectation. Who wants the factor again multiplies `weights` by it.
    """
    advantages, weights = _per_token("advantages", advantages, log_ratio), _per_token("weights", weights, log_ratio)
    ratio = importance_ratio(log_ratio)  # NaNs are inside no bound; inside the mask the loss shows them
    value = (weights * advantages).float().nan_to_num()  # w A; 0 outside the mask whatever stands there
    sides = (search.highs(), value.clamp(min=0), torch.le), (search.lows(), -value.clamp(max=0), torch.ge)
    sums = []
    for bounds, size, inside in sides:
        for bound in bounds.tolist():  # made on the CPU: nothing is read from a device
            counted = torch.where(inside(ratio, bound), ratio, bound if search.contribution == "surrogate" else 0.0)
            sums.append((size * counted).sum(dtype=_precise(value.device)))
    return torch.stack(sums)


@torch.no_grad()
def clip_bounds(masses: Tensor, search: ClipSearch) -> ClipBounds:
    """Algorithm 1's loop over the bounds, all candidates at once and without reading anything on the host.

    From (low_start, high_start), while rho < rho0: raise `high` step by step to high_max, and only then `low` to low_max.
    A range of one point is fixed; as printed, the algorithm would then not move the other bound either, here it does.
    masses from contribution_masses with the same search. Positive mass only: rho is 1; negative mass only: 0, even where
    every negative token is clipped. No mass at any bounds: nothing to balance, rho is 1 and the start bounds stay. Raises
    ValueError on masses of another length.
    """
    lows, highs = search.lows(masses.device), search.highs(masses.device)
    if masses.shape != (len(highs) + len(lows),):
        raise ValueError(f"masses must be [{len(highs) + len(lows)}] for this search, got {list(masses.shape)}")
    # The path: high takes all its values at the first low; then low takes the rest of its values at the last high.
    positive, negative = masses.split([len(highs), len(lows)])
    rises, raises = len(highs) - 1, len(lows) - 1
    highs, positive = (torch.cat([values, values[-1:].expand(raises)]) for values in (highs, positive))
    lows, negative = (torch.cat([values[:1].expand(rises), values]) for values in (lows, negative))
    total = positive + negative  # the widest bounds are those after all rises: rho is 1 if even they let no mass through
    rho = torch.where(total == 0, (total[rises] == 0).to(total.dtype), positive / total)
    met = rho >= search.rho0 - 1e-6  # so that rounding and splitting a batch do not decide ties
    may_be_taken = (lows <= max(1.0, search.low_start)) | (negative > 0) | search.may_empty
    step = torch.where(met.any(), met.byte().argmax(), len(rho) - 1).clamp(max=may_be_taken.sum() - 1)
    return ClipBounds(lows.take(step), highs.take(step), rho.take(step), rho_start=rho[0], reached=met.take(step))


def _check_search(search: ClipSearch) -> None:
    if not 0 <= search.rho0 < 1:
        raise ValueError(f"rho0 must be in [0, 1), got {search.rho0}")
    if search.contribution not in ("surrogate", "gradient"):
        raise ValueError(f"contribution must be 'surrogate' or 'gradient', got {search.contribution!r}")
    for side in ("low", "high"):
        start, stop, step = (getattr(search, f"{side}_{name}") for name in ("start", "max", "step"))
        if not 0 <= start <= stop < math.inf:
            raise ValueError(f"{side}_start must be in [0, {side}_max], got {start} and {side}_max={stop}")
        if not 0 < step < math.inf:
            raise ValueError(f"{side}_step must be > 0, got {step}")
        steps = (stop - start) / step
        if abs(steps - round(steps)) > 1e-6:
            raise ValueError(f"{side}_step={step} misses {side}_max={stop} from {side}_start={start}: {steps} steps")
    if search.low_max > search.high_start:
        raise ValueError(f"low_max={search.low_max} must not exceed high_start={search.high_start}")
    if search.low_max > max(1, search.low_start) and search.contribution == "surrogate" and not search.may_empty:
        raise ValueError(f"low_max={search.low_max}: past 1 values do not tell which tokens pass; use 'gradient' or may_empty")


def _grid(start: float, stop: float, step: float, device) -> Tensor:
    # Not torch.tensor(list): no copy from the host, which would wait for the device.
    precise = _precise(torch.device(device))
    return torch.linspace(start, stop, round((stop - start) / step) + 1, dtype=precise, device=device).float()


def _precise(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "mps" else torch.float64  # MPS has no float64


GRPO = ClipSearch.fixed(0.8, 1.2)
CLIP_HIGHER = ClipSearch.fixed(0.8, 1.28)
GATE = ClipSearch(low_max=1.1, low_step=0.06, high_max=3.0)  # beyond what the paper prints; the grid avoids 1
PAPER_MAIN = ClipSearch(0.4, 0.6, 0.9, 0.02, 1.2, 3.0, 0.05, "surrogate")  # section 5.1
PAPER_OCTOTHINKER = ClipSearch(0.45, 0.8, 0.9, 0.02, 1.2, 2.0, 0.05, "surrogate")  # App. A; it gives no steps: the main ones
# The authors' released recipe thresholds P/N >= x, which is rho >= x / (1 + x); its search order and dual clip differ, too.
AUTHORS_SCRIPT = ClipSearch(1 / 3, 0.8, 0.95, 0.05, 1.2, 2.0, 0.1, "surrogate")
AUTHORS_YAML = ClipSearch(1 / 2, 0.6, 0.8, 0.05, 1.2, 2.0, 0.05, "surrogate")


# ---------------------------------------------------------------- the loss
def importance_ratio(log_ratio: Tensor) -> Tensor:
    """r_t = exp(log_ratio) in float32, the log-ratio clamped to +-20: the one ratio that masses, loss and metrics use."""
    return log_ratio.float().clamp(-20.0, 20.0).exp()


def token_losses(log_ratio: Tensor, advantages: Tensor, low, high) -> Tensor:
    """-min(r A, clip(r, low, high) A), Eq. 4 with absolute bounds, unreduced: float32 [N, T].

    low and high are floats or tensors that broadcast to [N, T]. The gradient -r A * d log_ratio is exactly 0 for A > 0 with
    r > high and for A < 0 with r < low, and passes everywhere else, on a bound too (Eq. 5).
    """
    # Copies: tensors made under inference_mode could not be kept for the backward pass.
    advantages = _per_token("advantages", advantages, log_ratio).to(torch.float32, copy=True)
    ratio = importance_ratio(log_ratio)
    low, high = (bound.to(torch.float32, copy=True) if isinstance(bound, Tensor) else bound for bound in (low, high))
    # The minimum by sign, not torch.minimum: that splits the gradient where r A and the clipped product round to the same.
    return -torch.where(advantages > 0, ratio.clamp(max=high), ratio.clamp(min=low)) * advantages


def clipped_surrogate(log_ratio: Tensor, advantages: Tensor, weights: Tensor, low, high) -> Tensor:
    """sum(weights * token_losses): the loss to minimise, 0-dim. GRPO and Clip-Higher are this with fixed bounds. Tokens of
    weight 0 count nothing, forward and backward, even NaNs."""
    outside = _per_token("weights", weights, log_ratio) == 0
    weights = weights.masked_fill(outside, 0.0)  # a copy, as in token_losses
    # Filled on both sides of the loss: 0 * NaN is NaN, forward as well as backward.
    losses = token_losses(log_ratio.masked_fill(outside, 0.0), advantages, low, high)
    return (weights * losses).masked_fill(outside, 0.0).sum()


def unclipped(ratio: Tensor, advantages: Tensor, low, high) -> Tensor:
    """X of Eq. 7 (bool): the tokens that have a gradient, A > 0 with r <= high and A < 0 with r >= low, as in token_losses."""
    return ((advantages > 0) & (ratio <= high)) | ((advantages < 0) & (ratio >= low))


def _per_token(name: str, tensor: Tensor, log_ratio: Tensor) -> Tensor:
    """Check one argument against log_ratio [N, T]; advantages [N] become [N, 1]."""
    if log_ratio.dim() != 2:
        raise ValueError(f"log-probs and log_ratio must be [N, T], got shape {list(log_ratio.shape)}")
    if name == "advantages" and tensor.dim() == 1 and len(tensor) == len(log_ratio):
        return tensor.unsqueeze(1)
    if tensor.shape != log_ratio.shape:
        or_n = f" or [{len(log_ratio)}]" if name == "advantages" else ""
        raise ValueError(f"{name} must have shape {list(log_ratio.shape)}{or_n}, got {list(tensor.shape)}")
    return tensor


@torch.no_grad()
def diagnostics(log_ratio: Tensor, advantages: Tensor, mask: Tensor, bounds: ClipBounds | tuple, weights: Tensor | None = None):
    """What to log for one update: name -> 0-dim float32 tensor, still on the device. Means are over response tokens.

    low, high, and with a ClipBounds also rho, rho_start, reached: see ClipBounds
    gradient_share           positive share of the gradient's mass at these bounds (Eq. 5), by `weights` [N, T] (None: equal)
    negatives_with_gradient  share of the tokens with A < 0 that have a gradient (r >= low); NaN where there is none
    clip_fraction_high, clip_fraction_low     tokens with A > 0 and r > high; with A < 0 and r < low (no gradient)
    positive_tokens, negative_tokens          share of tokens with A > 0, with A < 0
    ratio_{mean,min,max}_{positive,negative}  importance ratio by sign of A; NaN where the sign has no token
    kl                       mean of r - 1 - log r (Schulman's k3): KL(pi_rollout || pi_theta) on tokens drawn by pi_rollout
    """
    inside = mask != 0
    advantages = _per_token("advantages", advantages, log_ratio).masked_fill(~inside, 0.0)
    log_ratio = log_ratio.masked_fill(~inside, 0.0)
    ratio = importance_ratio(log_ratio)
    tokens = inside.sum().clamp(min=1)
    metrics = bounds._asdict() if isinstance(bounds, ClipBounds) else {"low": bounds[0], "high": bounds[1]}
    alive = unclipped(ratio, advantages, bounds[0], bounds[1])
    mass = (advantages * ratio * (1.0 if weights is None else weights)).masked_fill(~alive, 0.0)
    metrics["gradient_share"] = mass.clamp(min=0).sum() / mass.abs().sum()
    metrics["negatives_with_gradient"] = (alive & (advantages < 0)).sum() / (advantages < 0).sum()
    for sign, side, chosen in (("positive", "high", advantages > 0), ("negative", "low", advantages < 0)):
        count = chosen.sum()
        metrics[f"clip_fraction_{side}"] = (chosen & ~alive).sum() / tokens
        metrics[f"{sign}_tokens"] = count / tokens
        metrics[f"ratio_mean_{sign}"] = torch.where(chosen, ratio, 0.0).sum() / count
        for name, empty, reduce in (("min", math.inf, torch.amin), ("max", -math.inf, torch.amax)):
            extreme = reduce(torch.where(chosen, ratio, empty), (0, 1)) if ratio.numel() else ratio.new_full((), empty)
            metrics[f"ratio_{name}_{sign}"] = torch.where(count > 0, extreme, math.nan)
    metrics["kl"] = (ratio - 1 - log_ratio.clamp(-20.0, 20.0)).sum() / tokens
    return {name: torch.as_tensor(value, dtype=torch.float32, device=ratio.device) for name, value in metrics.items()}
