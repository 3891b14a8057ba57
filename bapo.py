"""BAPO: Balanced Policy Optimization with Adaptive Clipping (Xi et al., arXiv 2510.18927).

One file to copy; it needs torch and the standard library only. Tested with torch 2.2 to 2.15.

    loss, metrics = bapo_loss(log_probs, rollout_log_probs, advantages, mask)
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
    mask                y_t, t = 1..T      True on response tokens, the EOS included
    weights             1 / sum of T       each token's weight in the loss: 0 outside the mask, by
                                           default 1 / (response tokens of the update)

Shapes: N responses (those to one prompt are consecutive), T response positions.

Dtypes: any float dtype is accepted. Ratios, bounds, the loss and its metrics are float32; the sums
that the search compares and the advantages are computed in float64 (float32 on Apple's MPS, which
has no float64). Log-ratios are clamped to +-20, with gradient 0 beyond. Nothing is read on the
host. A NaN outside the mask has no effect; inside it, the loss is NaN.

Both log-probs must be those of the distribution that the tokens were drawn from: logits divided by
the sampling temperature, in float32, by one and the same forward pass (the sampler's own log-probs
differ by rounding). Responses of a group without any advantage may be left out before this or not;
with "token-mean" leaving them out makes the loss larger, because fewer tokens share it.
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
    """Settings of the bound search (Algorithm 1): target, ranges, and how Eq. 8 is read.

    The search itself is search_clip_bounds.

    The defaults are the paper's range for OctoThinker (App. A), read by the gradient's mass;
    PAPER_OCTOTHINKER is the same range as printed. Bounds move on a grid that is counted in whole
    steps, so 0.6 + 15 * 0.02 is 0.9 and is reached.

    contribution: what a token counts in rho. "gradient" is the mass of its gradient (Eq. 5: a
        clipped token counts nothing), "surrogate" the value of Eq. 8; see contribution_masses.
    may_empty: whether the search may take a lower bound above 1 at which no negative token has a
        gradient any more. By default it stops before, so BAPO is GRPO where every ratio is 1.

    Past 1 a lower bound is a gate, not a trust region: a negative token has a gradient only once
    it has become likelier than when it was drawn. A range of several points must not contain 1
    itself, where rounding would decide which tokens pass. Raises ValueError for settings that make
    no sense.
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
        """Bounds that never move: GRPO is fixed(0.8, 1.2). rho0 is 0, which is always reached."""
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
    length: int | None = None,
    weights: Tensor | None = None,
    bounds: ClipBounds | tuple | None = None,
    process_group=None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Search the bounds, then take the clipped surrogate at them: one update's loss and metrics.

    log_probs [N, T] carry the gradient; rollout_log_probs [N, T] were recorded when the tokens were
    drawn; advantages [N] or [N, T]; mask [N, T]; search None is ClipSearch(). aggregation and
    length: see token_weights. Returns the loss to minimise (0-dim float32) and `diagnostics`
    (0-dim, detached). Raises ValueError for an argument of a wrong type or shape.

    One optimizer step has ONE pair of bounds and ONE normaliser. When the step is split into
    micro-batches (`parts`), give both, and do not divide the loss by their number:

        weights = token_weights(mask)     # of the whole step; each part gets its slice
        masses = 0.0
        for part in parts:
            with torch.no_grad():
                log_ratio = compute_log_probs(part) - part.rollout_log_probs
            masses = masses + contribution_masses(log_ratio, part.advantages, part.weights, search)
        bounds = clip_bounds(masses, search)
        for part in parts:
            loss, _ = bapo_loss(..., weights=part.weights, bounds=bounds)
            loss.backward()

    With data parallelism every rank passes its own part and the process group. Token counts and
    masses are then summed over the group, for every aggregation:

        loss, metrics = bapo_loss(..., search, process_group=dist.group.WORLD)
        (loss * dist.get_world_size()).backward()    # because DDP averages the ranks' gradients

    Metrics of tokens are then this rank's; rho and the bounds are the group's. With both splits at
    once, all_reduce the token count and the masses yourself, then pass weights and bounds.

    bounds may also be a plain (low, high). Pass weights where a row holds several packed responses:
    "sequence-mean" takes a row for one response. Given weights replace aggregation and length.
    """
    _check_matrix("log_probs", log_probs)
    _check_shape("rollout_log_probs", rollout_log_probs, log_probs)
    _check_shape("mask", mask, log_probs)
    if search is None:
        search = ClipSearch()
    if not isinstance(search, ClipSearch):
        raise ValueError(f"search must be a ClipSearch or None, got a {type(search).__name__}")
    if weights is None:
        weights = token_weights(mask, aggregation, length, process_group)
    _check_shape("weights", weights, log_probs)
    weights = weights.masked_fill(mask == 0, 0.0)
    at_least_float32 = torch.promote_types(log_probs.dtype, torch.float32)
    log_ratio = log_probs.to(at_least_float32) - rollout_log_probs.detach()
    if bounds is None:
        bounds = search_clip_bounds(log_ratio.detach(), advantages, weights, search, process_group)
    loss = clipped_surrogate(log_ratio, advantages, weights, bounds[0], bounds[1])
    return loss, diagnostics(log_ratio, advantages, mask, bounds, weights)


# ---------------------------------------------------------------- advantages and weights
def group_relative_advantages(
    rewards: Tensor, group_size: int, normalize_std: bool = True
) -> Tensor:
    """GRPO's advantages: (R_i - mean R) / (std R + 1e-6) over the responses to one prompt.

    rewards [N], those of a group consecutive; returns [N], float32 (float64 if rewards are). The
    standard deviation is the sample one (n - 1), as in verl and TRL. A group of equal rewards gets
    exactly 0. normalize_std=False subtracts the mean only (Dr. GRPO). Raises ValueError if rewards
    are no tensor [N] with N a multiple of group_size.
    """
    if not isinstance(rewards, Tensor):
        raise ValueError(f"rewards must be a tensor [N], got a {type(rewards).__name__}")
    if rewards.dim() != 1 or group_size < 1 or len(rewards) % group_size:
        raise ValueError(
            "rewards must be a tensor [N] with N a multiple of group_size, all responses of a"
            f" prompt together, got shape {list(rewards.shape)} and group_size={group_size}"
        )
    groups = rewards.to(_precise(rewards.device)).view(-1, group_size)
    advantages = groups - groups.mean(1, keepdim=True)
    if normalize_std and group_size > 1:
        # Epsilon only tames groups that differ by rounding.
        advantages = advantages / (groups.std(1, keepdim=True) + 1e-6)
    # The mean of equal rewards may differ from them by rounding: ask the rewards themselves.
    all_equal = (groups == groups[:, :1]).all(1, keepdim=True)
    advantages = advantages.masked_fill(all_equal, 0.0).flatten()
    return advantages.to(torch.promote_types(rewards.dtype, torch.float32))


def token_weights(
    mask: Tensor,
    aggregation: str = "token-mean",
    length: int | None = None,
    process_group=None,
) -> Tensor:
    """Each token's weight in the loss of ONE optimizer step: mask [N, T] -> float32 [N, T].

    "token-mean"     1 / (response tokens of the step): every token counts the same; sums to 1
    "sequence-mean"  1 / (non-empty responses * tokens of this response): every row counts the same
    "constant"       1 / (N * length), `length` being a constant such as the longest response
                     allowed (Dr. GRPO)

    mask is bool or 0/1. Pass the mask of everything that the step sees, then slice the result for
    micro-batches; or this rank's part and the process_group, over which tokens and responses are
    then counted. 0 outside the mask; an empty mask gives zeros. Raises ValueError for an unknown
    aggregation, and for "constant" without a positive length.
    """
    _check_matrix("mask", mask)
    inside = (mask != 0).float()
    if aggregation == "token-mean":
        weights = inside
        count = inside.sum()
    elif aggregation == "sequence-mean":
        tokens = inside.sum(1, keepdim=True)
        weights = inside / tokens.clamp(min=1)
        count = (tokens > 0).sum()
    elif aggregation == "constant":
        if length is None or length <= 0:
            raise ValueError(
                "aggregation='constant' needs length > 0 (the longest response allowed),"
                f" got {length}"
            )
        weights = inside / length
        count = torch.full((), len(mask), device=mask.device)
    else:
        raise ValueError(
            f"aggregation must be 'token-mean', 'sequence-mean' or 'constant', got {aggregation!r}"
        )
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
    reached: Tensor  # bool, rho >= rho0 - 1e-6; if False the bounds are the last that may be taken


def search_clip_bounds(
    log_ratio: Tensor, advantages: Tensor, weights: Tensor, search: ClipSearch, process_group=None
) -> ClipBounds:
    """Clip bounds for one optimizer step: contribution_masses, then clip_bounds.

    With a process_group the masses are summed over it: every rank must call this, with its slice of
    the whole step's weights. None: this process alone.
    """
    masses = contribution_masses(log_ratio, advantages, weights, search)
    if process_group is not None:
        dist.all_reduce(masses, group=process_group)
    return clip_bounds(masses, search)


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
    (2) Under "surrogate" raising `low` can only raise N and lower rho, so the second half of
        Algorithm 1 can never reach the target and runs to low_max. Under "gradient" rho never falls
        along the path. The paper prints the first and describes the second ("filter out" negative
        tokens).
    (3) Eq. 8's factor pi_rollout is the sampling distribution. On tokens drawn from it the plain
        sum already is that expectation. Who wants the factor again multiplies `weights` by it.
    """
    _check_matrix("log_ratio", log_ratio)
    advantages = _per_token_advantages(advantages, log_ratio)
    _check_shape("weights", weights, log_ratio)
    precise = _precise(log_ratio.device)
    # A NaN is inside no bound; if it is inside the mask, the loss shows it.
    ratio = importance_ratio(log_ratio)
    # 0 outside the mask, whatever the advantages are there.
    weighted_advantages = (weights * advantages).float().nan_to_num()
    positive = weighted_advantages.clamp(min=0)
    negative = -weighted_advantages.clamp(max=0)
    surrogate = search.contribution == "surrogate"
    masses = []
    for high in _grid_values(search.high_start, search.high_max, search.high_step):
        clipped_value = high if surrogate else 0.0  # what a clipped token counts
        counted = torch.where(ratio <= high, ratio, clipped_value)
        masses.append((positive * counted).sum(dtype=precise))
    for low in _grid_values(search.low_start, search.low_max, search.low_step):
        clipped_value = low if surrogate else 0.0
        counted = torch.where(ratio >= low, ratio, clipped_value)
        masses.append((negative * counted).sum(dtype=precise))
    return torch.stack(masses)


@torch.no_grad()
def clip_bounds(masses: Tensor, search: ClipSearch) -> ClipBounds:
    """Algorithm 1's loop over the bounds, for all candidates at once and without a host read:

        low, high = low_start, high_start
        while rho(low, high) < rho0 and not (low == low_max and high == high_max):
            if high < high_max:
                high += high_step      # the upper bound is exhausted first
            else:
                low += low_step

    masses are those of contribution_masses with the same search. A range of one point stays there,
    and the other bound still moves; as printed, a lower range of one point would end the loop at
    once.

    Where every token is clipped rho is 0 / 0. If some token has mass at the widest bounds
    (low_start, high_max), it is taken as 0 and the search goes on. If none has, there is nothing to
    balance: it is taken as 1, and the start bounds stay.

    Raises ValueError on masses of another length.
    """
    lows = search.lows(masses.device)
    highs = search.highs(masses.device)
    if masses.shape != (len(highs) + len(lows),):
        raise ValueError(
            f"masses must be [{len(highs) + len(lows)}] for this search, got {list(masses.shape)}"
        )
    positive, negative = masses.split([len(highs), len(lows)])
    # Point i of the path that the loop walks: high rises first, at the first low; then low rises,
    # at the last high.
    steps_of_high = len(highs) - 1
    point = torch.arange(len(highs) + len(lows) - 1, device=masses.device)
    high_index = point.clamp(max=steps_of_high)
    low_index = (point - steps_of_high).clamp(min=0)
    path_high = highs[high_index]
    path_low = lows[low_index]
    path_positive = positive[high_index]
    path_negative = negative[low_index]
    path_total = path_positive + path_negative
    # rho where it is 0 / 0, see the docstring; this point of the path has the widest bounds.
    nothing_to_balance = path_total[steps_of_high] == 0
    rho_without_mass = nothing_to_balance.to(path_total.dtype)
    rho = torch.where(path_total == 0, rho_without_mass, path_positive / path_total)
    # A tie, such as lengths of 3 : 2 at ratio 1, counts as reached however rounding falls.
    reached = rho >= search.rho0 - 1e-6
    first_reached = torch.where(reached.any(), reached.byte().argmax(), len(rho) - 1)
    # A low past 1 that no negative token passes may not be taken; such points end the path.
    not_past_one = path_low <= max(1.0, search.low_start)
    may_be_taken = not_past_one | (path_negative > 0)
    if search.may_empty:
        may_be_taken = torch.ones_like(may_be_taken)
    last_allowed = may_be_taken.sum() - 1
    stop = torch.minimum(first_reached, last_allowed)
    return ClipBounds(
        low=path_low.take(stop),
        high=path_high.take(stop),
        rho=rho.take(stop),
        rho_start=rho[0],
        reached=reached.take(stop),
    )


def _check_search(search: ClipSearch) -> None:
    if not 0 <= search.rho0 < 1:
        raise ValueError(f"rho0 must be in [0, 1), got {search.rho0}")
    if search.contribution not in ("surrogate", "gradient"):
        raise ValueError(
            f"contribution must be 'surrogate' or 'gradient', got {search.contribution!r}"
        )
    _check_range("low", search.low_start, search.low_max, search.low_step)
    _check_range("high", search.high_start, search.high_max, search.high_step)
    _check_bounds(search.low_max, search.high_start, "low_max and high_start")
    lows = _grid_values(search.low_start, search.low_max, search.low_step)
    if len(lows) > 1 and any(abs(low - 1) < 1e-6 for low in lows):
        raise ValueError(
            f"low_start={search.low_start}, low_max={search.low_max} and low_step={search.low_step}"
            " have a lower bound of exactly 1, where rounding would decide: choose another step,"
            " or another end if the range begins or ends at 1"
        )
    past_one = search.low_max > max(1, search.low_start)
    if past_one and search.contribution == "surrogate" and not search.may_empty:
        raise ValueError(
            f"low_max={search.low_max}: past 1 the search must know which negative tokens pass,"
            " which contribution='surrogate' does not count; use 'gradient' or may_empty=True"
        )


def _check_range(side: str, start: float, stop: float, step: float) -> None:
    if not 0 <= start <= stop < math.inf:
        raise ValueError(
            f"{side}_start must be in [0, {side}_max], got {start} and {side}_max={stop}"
        )
    if not 0 < step < math.inf:
        raise ValueError(f"{side}_step must be > 0, got {step}")
    steps = (stop - start) / step
    if abs(steps - round(steps)) > 1e-6:
        raise ValueError(
            f"{side}_step={step} misses {side}_max={stop} from {side}_start={start}: {steps} steps"
        )


def _check_bounds(low, high, names: str = "low and high") -> None:
    """Plain numbers only: tensors are never read on the host."""
    if isinstance(low, Tensor) or isinstance(high, Tensor):
        return
    if high < 1 or low >= high:
        raise ValueError(
            f"{names} must be clip bounds with low < high and high >= 1, got {low} and {high};"
            " bounds are ratios, 0.8 and 1.2, not epsilons"
        )


def _grid_values(start: float, stop: float, step: float) -> list[float]:
    """From start to stop in whole steps."""
    steps = round((stop - start) / step)
    if steps == 0:
        return [start]
    return [start + i * (stop - start) / steps for i in range(steps + 1)]


def _grid(start: float, stop: float, step: float, device: torch.device | str) -> Tensor:
    """_grid_values as float32. Made on the device: a copy from the host would wait for it."""
    count = round((stop - start) / step) + 1
    precise = _precise(torch.device(device))
    return torch.linspace(start, stop, count, dtype=precise, device=device).float()


def _precise(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "mps" else torch.float64


GRPO = ClipSearch.fixed(0.8, 1.2)
CLIP_HIGHER = ClipSearch.fixed(0.8, 1.28)
# Beyond what the paper prints: the lower bound may pass 1. The grid avoids 1 itself.
GATE = ClipSearch(low_max=1.1, low_step=0.06, high_max=3.0)
# The paper's main setting (section 5.1), as printed.
PAPER_MAIN = ClipSearch(
    rho0=0.4,
    low_start=0.6,
    low_max=0.9,
    low_step=0.02,
    high_start=1.2,
    high_max=3.0,
    high_step=0.05,
    contribution="surrogate",
)
# The paper's setting for OctoThinker (App. A), which prints no steps: those of the main setting.
PAPER_OCTOTHINKER = ClipSearch(contribution="surrogate")
# The authors' released recipe asks for P/N >= x, which is rho >= x / (1 + x). Its order of the
# search and its dual clip differ, too.
AUTHORS_SCRIPT = ClipSearch(
    rho0=1 / 3, low_max=0.95, low_step=0.05, high_step=0.1, contribution="surrogate"
)
AUTHORS_YAML = ClipSearch(
    rho0=1 / 2, low_start=0.6, low_max=0.8, low_step=0.05, contribution="surrogate"
)


# ---------------------------------------------------------------- the loss
def importance_ratio(log_ratio: Tensor) -> Tensor:
    """r_t = exp(log_ratio), float32, the log-ratio clamped to +-20.

    Masses, loss and metrics all use this one ratio.
    """
    return log_ratio.float().clamp(-20.0, 20.0).exp()


def token_losses(log_ratio: Tensor, advantages: Tensor, low, high) -> Tensor:
    """-min(r A, clip(r, low, high) A), Eq. 4 with absolute bounds, unreduced: float32 [N, T].

    low and high are floats, or tensors that broadcast to [N, T]. The gradient -r A * d log_ratio is
    exactly 0 for A > 0 with r > high and for A < 0 with r < low, and passes everywhere else, on a
    bound too (Eq. 5). Raises ValueError for plain bounds with low >= high or high < 1.
    """
    _check_matrix("log_ratio", log_ratio)
    _check_bounds(low, high)
    # Copies, because autograd cannot keep a tensor made under torch.inference_mode.
    advantages = _per_token_advantages(advantages, log_ratio).to(torch.float32, copy=True)
    if isinstance(low, Tensor):
        low = low.to(torch.float32, copy=True)
    if isinstance(high, Tensor):
        high = high.to(torch.float32, copy=True)
    ratio = importance_ratio(log_ratio)
    # The minimum, chosen by the sign of the advantage. torch.minimum would give a token on a bound
    # half of its gradient, and torch.clamp, from torch 2.15 on, none of it.
    if_positive = torch.where(ratio > high, high, ratio)
    if_negative = torch.where(ratio < low, low, ratio)
    clipped_ratio = torch.where(advantages > 0, if_positive, if_negative)
    return -clipped_ratio * advantages


def clipped_surrogate(log_ratio: Tensor, advantages: Tensor, weights: Tensor, low, high) -> Tensor:
    """sum(weights * token_losses): the loss to minimise, 0-dim.

    GRPO and Clip-Higher are this with fixed bounds. Tokens of weight 0 count nothing, forward and
    backward, even if they are NaN.
    """
    _check_shape("weights", weights, log_ratio)
    outside = weights == 0
    weights = weights.clone()  # a copy, as in token_losses
    # Filled on both sides of the loss: 0 * NaN is NaN, forward as well as backward.
    losses = token_losses(log_ratio.masked_fill(outside, 0.0), advantages, low, high)
    return (weights * losses).masked_fill(outside, 0.0).sum()


def unclipped(ratio: Tensor, advantages: Tensor, low, high) -> Tensor:
    """X of Eq. 7, the tokens that have a gradient in token_losses: bool [N, T].

    ratio [N, T] is importance_ratio(log_ratio); advantages [N, 1] or [N, T], not [N]; low and high
    as in token_losses. Nothing is checked.
    """
    positive = (advantages > 0) & (ratio <= high)
    negative = (advantages < 0) & (ratio >= low)
    return positive | negative


@torch.no_grad()
def diagnostics(
    log_ratio: Tensor,
    advantages: Tensor,
    mask: Tensor,
    bounds: ClipBounds | tuple,
    weights: Tensor | None = None,
) -> dict[str, Tensor]:
    """What to log for one update: name -> 0-dim float32 tensor, still on the device.

    Shares and means are over response tokens.

    low, high                    the bounds; with a ClipBounds also rho, rho_start, reached
    gradient_share               positive share of the gradient's mass at these bounds (Eq. 5),
                                 by `weights` [N, T] (None: all equal)
    negatives_with_gradient      share of the tokens with A < 0 that have a gradient (r >= low)
    clip_fraction_high           tokens without gradient because A > 0 and r > high
    clip_fraction_low            tokens without gradient because A < 0 and r < low
    positive_tokens              tokens with A > 0
    negative_tokens              tokens with A < 0
    ratio_mean_positive, ratio_min_positive, ratio_max_positive    importance ratio where A > 0
    ratio_mean_negative, ratio_min_negative, ratio_max_negative    importance ratio where A < 0
    kl                           mean of r - 1 - log r (Schulman's k3): KL(pi_rollout || pi_theta),
                                 on tokens drawn by pi_rollout

    A share or mean over tokens of one sign of which there are none is NaN.
    """
    inside = mask != 0
    advantages = _per_token_advantages(advantages, log_ratio).masked_fill(~inside, 0.0)
    log_ratio = log_ratio.masked_fill(~inside, 0.0)
    ratio = importance_ratio(log_ratio)
    tokens = inside.sum().clamp(min=1)
    low, high = bounds[0], bounds[1]
    has_gradient = unclipped(ratio, advantages, low, high)
    positive = advantages > 0
    negative = advantages < 0

    mass = advantages * ratio
    if weights is not None:
        mass = mass * weights
    mass = mass.masked_fill(~has_gradient, 0.0)  # also where a weight is NaN
    # r - 1 cancels near 1, where most tokens are: expm1 does not.
    clamped = log_ratio.float().clamp(-20.0, 20.0)
    kl = (torch.expm1(clamped) - clamped).sum() / tokens

    metrics = bounds._asdict() if isinstance(bounds, ClipBounds) else {"low": low, "high": high}
    metrics["gradient_share"] = mass.clamp(min=0).sum() / mass.abs().sum()
    metrics["negatives_with_gradient"] = (has_gradient & negative).sum() / negative.sum()
    metrics["clip_fraction_high"] = (positive & ~has_gradient).sum() / tokens
    metrics["clip_fraction_low"] = (negative & ~has_gradient).sum() / tokens
    metrics["positive_tokens"] = positive.sum() / tokens
    metrics["negative_tokens"] = negative.sum() / tokens
    for sign, chosen in (("positive", positive), ("negative", negative)):
        mean, smallest, largest = _mean_min_max(ratio, chosen)
        metrics[f"ratio_mean_{sign}"] = mean
        metrics[f"ratio_min_{sign}"] = smallest
        metrics[f"ratio_max_{sign}"] = largest
    metrics["kl"] = kl
    for name, value in metrics.items():
        metrics[name] = torch.as_tensor(value, dtype=torch.float32, device=ratio.device)
    return metrics


def _mean_min_max(values: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of the chosen values; NaN if none is chosen."""
    count = chosen.sum()
    mean = torch.where(chosen, values, 0.0).sum() / count
    if not values.numel():
        return mean, mean, mean
    smallest = torch.where(chosen, values, math.inf).amin((0, 1))
    largest = torch.where(chosen, values, -math.inf).amax((0, 1))
    nothing = count == 0
    return mean, smallest.masked_fill(nothing, math.nan), largest.masked_fill(nothing, math.nan)


# ---------------------------------------------------------------- checks of arguments
def _check_matrix(name: str, tensor: Tensor) -> None:
    if not isinstance(tensor, Tensor):
        raise ValueError(f"{name} must be a tensor [N, T], got a {type(tensor).__name__}")
    if tensor.dim() != 2:
        raise ValueError(f"{name} must be [N, T], got shape {list(tensor.shape)}")


def _check_shape(name: str, tensor: Tensor, like: Tensor) -> None:
    if not isinstance(tensor, Tensor):
        raise ValueError(f"{name} must be a tensor, got a {type(tensor).__name__}")
    if tensor.shape != like.shape:
        raise ValueError(f"{name} must have shape {list(like.shape)}, got {list(tensor.shape)}")


def _per_token_advantages(advantages: Tensor, log_ratio: Tensor) -> Tensor:
    """Advantages [N] as [N, 1], which broadcasts; [N, T] as they are."""
    if not isinstance(advantages, Tensor):
        raise ValueError(f"advantages must be a tensor, got a {type(advantages).__name__}")
    if advantages.dim() == 1 and len(advantages) == len(log_ratio):
        return advantages.unsqueeze(1)
    if advantages.shape != log_ratio.shape:
        raise ValueError(
            f"advantages must have shape {list(log_ratio.shape)} or [{len(log_ratio)}],"
            f" got {list(advantages.shape)}"
        )
    return advantages
