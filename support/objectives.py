"""BAPO's neighbours: the token losses of off-policy policy-gradient methods for language models, in one file to copy.

    losses = OBJECTIVES["cispo"](log_probs, rollout_log_probs, advantages, mask)
    (weights * losses).sum().backward()              # weights [N, T]: each token's share of the optimizer step

Every function takes log_probs [N, T] with gradient, rollout_log_probs [N, T] of the policy that drew the tokens, advantages
[N] or [N, T] and mask [N, T] (True or 1 on response tokens), then options by name. It returns the tokens' losses, to be
minimised: float32 [N, T], 0 outside the mask. Weighting is the caller's. Gradients flow through log_probs alone. What stands
outside the mask has no effect, NaN included. Any float dtype is accepted and no value is read on the host. Raises ValueError
for a shape that does not fit and for an option that makes no sense.

    p, q   the token's probability under the policy in training and under the one that drew it; lp, lb their logarithms
    r      importance ratio exp(lp - lb), lp - lb clamped to +-20 (gradient 0 beyond), as in bapo.py
    A      advantage;  sg(.): no gradient through it;  low, high: clip bounds as absolute ratios (0.8, 1.2), not 1 +- epsilon
    clip   PPO's: -min(r A, clip(r, low, high) A); no gradient for A > 0, r > high and for A < 0, r < low

"At r = 1" gives a token's gradient with respect to its lp. "Code" names public code that was read and has this formula, with
differences; defaults are from there. The dual clip that verl-based code adds to every clip is in dual_clip only. SFPO (arXiv
2510.04072) is not here: it changes the training loop, not the loss.
"""

import inspect
import math
from collections.abc import Callable

import torch
from torch import Tensor


def _require(name: str, value, fits: bool, rule: str) -> None:
    if not fits:
        raise ValueError(f"{name} must be {rule}, got {value}")


def _positive(**options: float) -> None:
    for name, value in options.items():
        _require(name, value, 0 < value < math.inf, "finite and above 0")


def _ordered(low: float, high: float, names: str = "low, high") -> None:
    _require(names, (low, high), 0 < low <= high < math.inf, "absolute ratios with 0 < low <= high, such as 0.8, 1.2")


def _per_token(name: str, tensor: Tensor, shape: torch.Size) -> Tensor:
    """Check one argument against [N, T]; advantages [N] become [N, T]."""
    _require("log_probs, mask and weights", list(shape), len(shape) == 2, "[N, T]")
    if name == "advantages" and tensor.shape == shape[:1]:
        return tensor.unsqueeze(1).expand(shape)
    allowed = f"of shape {list(shape)}" + (f" or [{shape[0]}]" if name == "advantages" else "")
    _require(name, list(tensor.shape), tensor.shape == shape, allowed)
    return tensor


def _tokens(log_probs: Tensor, rollout_log_probs: Tensor, advantages: Tensor, mask: Tensor, **others: Tensor) -> tuple:
    """lp, lb, lp - lb, A, *others: checked, float32 [N, T], filled with 0 outside the mask before anything is computed."""
    given = {"rollout_log_probs": rollout_log_probs, "advantages": advantages, **others}
    outside = _per_token("mask", mask, log_probs.shape) == 0
    lp = log_probs.masked_fill(outside, 0)
    lb, advantages, *others = (
        _per_token(name, tensor, log_probs.shape).detach().masked_fill(outside, 0) for name, tensor in given.items()
    )
    log_ratio = lp.to(torch.promote_types(lp.dtype, torch.float32)) - lb
    return lp.float(), lb.float(), log_ratio.float(), advantages.float(), *(other.float() for other in others)


def _ratio(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-20.0, 20.0).exp()  # exp(20) = 5e8: still finite after products and sums in float32


def _sum(values: Tensor) -> Tensor:
    return values.sum(dtype=torch.float32 if values.device.type == "mps" else torch.float64)  # Apple's MPS has no float64


def _clip(ratio: Tensor, advantages: Tensor, low, high) -> Tensor:
    # The minimum by sign, not torch.minimum: that splits the gradient where r A and the clipped product round to the same.
    return -torch.where(advantages > 0, ratio.clamp(max=high), ratio.clamp(min=low)) * advantages


def reinforce(log_probs, rollout_log_probs, advantages, mask) -> Tensor:
    """Off-policy REINFORCE: -sg(r) A lp, unclipped. At r = 1: -A."""
    lp, _, log_ratio, advantages = _tokens(log_probs, rollout_log_probs, advantages, mask)
    return -_ratio(log_ratio).detach() * advantages * lp


def ppo(log_probs, rollout_log_probs, advantages, mask, *, low=0.8, high=1.2) -> Tensor:
    """PPO's and GRPO's clip (arXiv 1707.06347, 2402.03300), bapo.py's token_losses. At r = 1: -A if low <= 1 <= high.
    Code: TRL `grpo`; verl `vanilla`."""
    _ordered(low, high)
    _, _, log_ratio, advantages = _tokens(log_probs, rollout_log_probs, advantages, mask)
    return _clip(_ratio(log_ratio), advantages, low, high)


def clip_higher(log_probs, rollout_log_probs, advantages, mask, *, low=0.8, high=1.28) -> Tensor:
    """DAPO's Clip-Higher (arXiv 2503.14476): ppo with a raised upper bound. At r = 1: -A. Code: as for ppo."""
    return ppo(log_probs, rollout_log_probs, advantages, mask, low=low, high=high)


def dual_clip(log_probs, rollout_log_probs, advantages, mask, *, low=0.8, high=1.2, cap=3.0) -> Tensor:
    """PPO's clip with losses of at most -cap A where A < 0, so no gradient for A < 0, r > cap either. At r = 1: -A.
    Source: arXiv 1912.09729. Code: verl `vanilla` (clip_ratio_c)."""
    _ordered(low, high)
    _require("cap", cap, 1 < cap < math.inf, "finite and above 1")
    _, _, log_ratio, advantages = _tokens(log_probs, rollout_log_probs, advantages, mask)
    ratio = _ratio(log_ratio)
    return _clip(torch.where(advantages < 0, ratio.clamp(max=cap), ratio), advantages, low, high)


def truncated_is(log_probs, rollout_log_probs, advantages, mask, *, cap=1.0) -> Tensor:
    """Truncated importance sampling: -sg(min(r, cap)) A lp. At r = 1: -A if cap >= 1.
    IMPALA's policy gradient (arXiv 1802.01561) without V-trace, which needs a critic. Code: ROLL `tis`."""
    _positive(cap=cap)
    lp, _, log_ratio, advantages = _tokens(log_probs, rollout_log_probs, advantages, mask)
    return -_ratio(log_ratio).clamp(max=cap).detach() * advantages * lp


def cispo(log_probs, rollout_log_probs, advantages, mask, *, cap=5.0) -> Tensor:
    """CISPO (arXiv 2506.13585): truncated_is with a high cap, an absolute ratio. At r = 1: -A.
    Code: TRL `cispo` (epsilon_high is the cap; 5 is ScaleRL's). verl and ROLL clip r at 1 +- epsilon, so from below too:
    verl's is this one if clip_ratio_low >= 1 and cap = 1 + clip_ratio_high."""
    return truncated_is(log_probs, rollout_log_probs, advantages, mask, cap=cap)


def topr(log_probs, rollout_log_probs, advantages, mask) -> Tensor:
    """Tapered off-policy REINFORCE: -sg(w) A lp, w = 1 for A > 0, else min(r, 1). At r = 1: -A. Source: arXiv 2503.14286, of
    whole responses and rewards. Code: Trinity-RFT `topr`, by token, with advantages; ROLL `topr`, w by the reward's sign."""
    lp, _, log_ratio, advantages = _tokens(log_probs, rollout_log_probs, advantages, mask)
    weight = torch.where(advantages > 0, 1.0, _ratio(log_ratio).clamp(max=1.0))
    return -weight.detach() * advantages * lp


def rec_oneside(log_probs, rollout_log_probs, advantages, mask, *, low=0.8, high=1.2) -> Tensor:
    """REC-OneSide-NoIS: -A lp, 0 for A > 0, r > high and for A < 0, r < low. At r = 1: -A if low <= 1 <= high.
    Source: arXiv 2509.24203. Code: Trinity-RFT `rec` (clip_mode one-side, weight none). Advantages are taken as given; the
    authors' are R - mean R, without the standard deviation."""
    _ordered(low, high)
    lp, _, log_ratio, advantages = _tokens(log_probs, rollout_log_probs, advantages, mask)
    ratio = _ratio(log_ratio)
    return -advantages * lp * torch.where(advantages > 0, ratio <= high, ratio >= low)


def asymre(log_probs, rollout_log_probs, advantages, mask, *, shift=0.1) -> Tensor:
    """Asymmetric REINFORCE: -(A + shift) lp, a lowered baseline; r plays no part. At r = 1, as everywhere: -(A + shift).
    Source: arXiv 2506.20520. Code: Trinity-RFT `rec` (regularizer forward-kl), where A has no standard deviation."""
    _require("shift", shift, 0 <= shift < math.inf, "finite and at least 0, in units of the advantages")
    lp, _, _, advantages = _tokens(log_probs, rollout_log_probs, advantages, mask)
    return -(advantages + shift) * lp


def opmd(log_probs, rollout_log_probs, advantages, mask, *, tau=0.1) -> Tensor:
    """Online policy mirror descent of Kimi k1.5: -A lp + (tau / 2) (lp - lb)^2, lp - lb not clamped. At r = 1: -A.
    Source: arXiv 2501.12599. Code: ROLL `kimi15`; verl `dro` (beta = tau); Trinity-RFT `rec` with regularizer k2, whose
    coefficient is tau / 2 (its 0.1 is tau = 0.2). Trinity's own `opmd` is another loss, -A lp / (1 + tau)."""
    _positive(tau=tau)
    lp, _, log_ratio, advantages = _tokens(log_probs, rollout_log_probs, advantages, mask)
    return -advantages * lp + tau / 2 * log_ratio.square()


def dppo_tv(log_probs, rollout_log_probs, advantages, mask, *, delta=0.15, cap=20.0) -> Tensor:
    """DPPO-Binary-TV: -sg(min(r, cap)) A lp, 0 for A > 0, p - q > delta and for A < 0, q - p > delta. At r = 1: -A.
    Source: arXiv 2602.04879. Code: verl `dppo_tv`, delta that of its script, cap its clip_ratio_c; the authors' Stable-RL."""
    _positive(delta=delta, cap=cap)
    lp, lb, log_ratio, advantages = _tokens(log_probs, rollout_log_probs, advantages, mask)
    moved = (lp.exp() - lb.exp()).detach()
    kept = torch.where(advantages > 0, moved <= delta, moved >= -delta)
    return -_ratio(log_ratio).clamp(max=cap).detach() * advantages * lp * kept


def sapo(log_probs, rollout_log_probs, advantages, mask, *, tau_positive=1.0, tau_negative=1.05) -> Tensor:
    """SAPO: -(4 / tau) sigmoid(tau (r - 1)) A, tau by the sign of A: a soft gate in place of the clip. At r = 1: -A.
    Source: arXiv 2511.20347. Code: TRL `sapo`, verl `sapo`."""
    _positive(tau_positive=tau_positive, tau_negative=tau_negative)
    _, _, log_ratio, advantages = _tokens(log_probs, rollout_log_probs, advantages, mask)
    tau = torch.full_like(advantages, tau_negative).masked_fill(advantages > 0, tau_positive)
    return -4 / tau * torch.sigmoid(tau * (_ratio(log_ratio) - 1)) * advantages


def gspo(log_probs, rollout_log_probs, advantages, mask, *, low=1 - 3e-4, high=1 + 4e-4) -> Tensor:
    """GSPO: -min(s A, clip(s, low, high) A), s = exp(mean of lp - lb over the response), on each of the response's tokens.
    Meant for sequence-mean weights. At r = 1 a response of constant weight w and constant A has the gradient -w A at each
    token. Source: arXiv 2507.18071. Code: TRL (importance_sampling_level="sequence"); verl `gspo`, where a token's loss has
    a gradient at that token only: in sum the same if w and A are constant over the response."""
    _ordered(low, high)
    _, _, log_ratio, advantages = _tokens(log_probs, rollout_log_probs, advantages, mask)
    mean = log_ratio.sum(1, keepdim=True) / (mask != 0).sum(1, keepdim=True).clamp(min=1)
    return _clip(_ratio(mean), advantages, low, high)


@torch.no_grad()
def m2po_bounds(log_probs, rollout_log_probs, advantages, mask, *, budget=0.04, low_max=0.7, high_min=1.5) -> tuple:
    """M2PO's (low, high) for one optimizer step, from all of its tokens; 0-dim float32.
    H: the tokens with A > 0, r > 1 and with A < 0, r < 1. If the mean of (lp - lb)^2 over H exceeds budget, tau makes that of
    min((lp - lb)^2, tau^2) equal it, low = min(exp(-tau), low_max), high = max(exp(tau), high_min). Else no clip: (0, inf)."""
    _positive(budget=budget)
    _ordered(low_max, high_min, "low_max, high_min")
    _, _, log_ratio, advantages = _tokens(log_probs, rollout_log_probs, advantages, mask)
    chosen = log_ratio * advantages > 0
    squares, total = torch.where(chosen, log_ratio.square(), 0.0), budget * _sum(chosen)
    limit = torch.full_like(total, budget)
    for _ in range(32):  # Newton's method, from below, for sum min(square, limit) = total: error * slope falls fourfold a step
        above = squares > limit
        limit = (total - _sum(squares.masked_fill(above, 0))) / _sum(above).clamp(min=1)
    tau = torch.where(_sum(squares) > total, limit.sqrt(), math.inf)
    return (-tau).exp().clamp(max=low_max).float(), tau.exp().clamp(min=high_min).float()


def m2po(log_probs, rollout_log_probs, advantages, mask, *, budget=0.04, low_max=0.7, high_min=1.5, bounds=None) -> Tensor:
    """M2PO: PPO's clip at one pair of bounds per step, set by a second moment. At r = 1: -A.
    bounds: m2po_bounds of the whole step; None: of the tokens given. Source: arXiv 2510.01161. Code: Infini-AI-Lab/M2PO, the
    authors', per micro-batch, tau being the largest |lp - lb| in H below this one; their scripts leave out low_max and high_min
    (1 and 1 here). Trinity-RFT and AReaL have no bounds: they drop the largest squares until the rest are within budget."""
    four = log_probs, rollout_log_probs, advantages, mask
    low, high = bounds or m2po_bounds(*four, budget=budget, low_max=low_max, high_min=high_min)
    _, _, log_ratio, advantages = _tokens(*four)
    return _clip(_ratio(log_ratio), advantages, low, high)


def dcpo(log_probs, rollout_log_probs, advantages, mask, *, epsilon_low=0.16, epsilon_high=0.2, high_max=10.0) -> Tensor:
    """DCPO: PPO's clip at bounds that are wider for unlikely tokens, low = (1 + sqrt(max(1 - 4 epsilon_low / q, 0))) / 2 and
    high = min((1 + sqrt(1 + 4 epsilon_high / q)) / 2, high_max). At r = 1: -A. Source: arXiv 2509.02333. Code: the authors'
    (lime-RL/DCPO; epsilons of its README, 0.2 and 0.28 in its script). Its smoothed advantages are not part of this."""
    _positive(epsilon_low=epsilon_low, epsilon_high=epsilon_high)
    _require("high_max", high_max, 1 <= high_max < math.inf, "finite and at least 1")
    _, lb, log_ratio, advantages = _tokens(log_probs, rollout_log_probs, advantages, mask)
    low = (1 + (1 - 4 * epsilon_low / lb.exp()).clamp(min=0).sqrt()) / 2
    high = ((1 + (1 + 4 * epsilon_high / lb.exp()).sqrt()) / 2).clamp(max=high_max)
    return _clip(_ratio(log_ratio), advantages, low, high)


def ce_gppo(log_probs, rollout_log_probs, advantages, mask, *, low=0.8, high=1.2, beta_low=0.5, beta_high=1.0) -> Tensor:
    """CE-GPPO: -sg(c) (p / sg p) A: a clipped token keeps the gradient -c A. c = r, but beta_high high for A > 0, r > high and
    beta_low low for A < 0, r < low. At r = 1: -A if low <= 1 <= high. Source: arXiv 2509.20712. Code: the authors'
    (Kwai-Klear/CE-GPPO; their beta1, here beta_low, is 0.5 for 1.5B and 0.75 for 7B)."""
    _ordered(low, high)
    _positive(beta_low=beta_low, beta_high=beta_high)
    lp, _, log_ratio, advantages = _tokens(log_probs, rollout_log_probs, advantages, mask)
    ratio = _ratio(log_ratio).detach()
    above, below = torch.where(ratio > high, beta_high * high, ratio), torch.where(ratio < low, beta_low * low, ratio)
    return -torch.where(advantages > 0, above, below) * (lp - lp.detach()).exp() * advantages


def smoothing(log_probs, rollout_log_probs, advantages, mask, *, alpha=0.9) -> Tensor:
    """Exponential smoothing of importance weights: -p q^(-alpha) A, clamped like r. At r = 1: -q^(1 - alpha) A, not -A.
    Source: arXiv 2305.15877, for contextual bandits; to take tokens for actions is this file's reading. Code: the authors'
    (imadaouali/exponential-smoothing-icml23), alpha = 1 - n^(-1/4) for n logged actions: 0.9 at n = 10,000."""
    _require("alpha", alpha, 0 < alpha <= 1, "in (0, 1]; 1 is the plain importance ratio")
    _, lb, log_ratio, advantages = _tokens(log_probs, rollout_log_probs, advantages, mask)
    return -_ratio(log_ratio + (1 - alpha) * lb) * advantages


@torch.no_grad()
def balanced_scale(advantages: Tensor, weights: Tensor, rho0: float = 0.4, scale_up: bool = False) -> Tensor:
    """min(1, (1 - rho0) P / (rho0 N)), the factor on A < 0 that raises the positive share P / (P + N) at r = 1 to rho0; 0-dim.
    advantages [N] or [N, T], weights [N, T] of the whole optimizer step (0 outside the mask); P and N: the sums of w |A| over
    A > 0 and A < 0. 1 where the share is at least rho0, unless scale_up, or N is 0; 0 where only N has mass."""
    _require("rho0", rho0, 0 <= rho0 <= 1, "in [0, 1]")
    advantages = _per_token("advantages", advantages, weights.shape).masked_fill(weights == 0, 0)
    value = weights * advantages
    positive, negative = (1 - rho0) * _sum(value.clamp(min=0)), -rho0 * _sum(value.clamp(max=0))
    return torch.where(negative > (0 if scale_up else positive), positive / negative, 1.0).float()


def balanced(log_probs, rollout_log_probs, advantages, mask, *, rho0=0.4, weights=None, scale=None) -> Tensor:
    """A control without a paper: GRPO's clip, the losses of A < 0 times a scale that meets BAPO's target without a search.
    scale: balanced_scale of the whole step; None: of the tokens given, with rho0 and weights [N, T] (None: all alike).
    At r = 1: -A for A > 0, -scale A for A < 0."""
    losses = ppo(log_probs, rollout_log_probs, advantages, mask)
    _require("rho0", rho0, 0 <= rho0 < 1, "in [0, 1)")
    if scale is None:
        weights = torch.ones_like(losses) if weights is None else _per_token("weights", weights, mask.shape)
        scale = balanced_scale(advantages, weights.detach().masked_fill(mask == 0, 0), rho0)
    return torch.where(_per_token("advantages", advantages, mask.shape) < 0, scale * losses, losses)


def decoupled_ppo(log_probs, rollout_log_probs, advantages, mask, *, proximal_log_probs, low=0.8, high=1.2) -> Tensor:
    """PPO's clip around a proximal policy: -min(r A, exp(clip(lp - lx, log low, log high) + lx - lb) A).
    Needs lx = proximal_log_probs [N, T]: under an average of the weights, or under the policy when the update began. At r = 1
    and lx = lb: -A; with lx = lb everywhere it is ppo. Source: arXiv 2110.00641. Code: openai/ppo-ewma (r at most 100)."""
    _ordered(low, high)
    four = log_probs, rollout_log_probs, advantages, mask
    _, lb, log_ratio, advantages, lx = _tokens(*four, proximal_log_probs=proximal_log_probs)
    moved = log_ratio - (lx - lb)
    moved = torch.where(advantages > 0, moved.clamp(max=math.log(high)), moved.clamp(min=math.log(low)))
    return -_ratio(moved + (lx - lb)) * advantages


def a_3po(log_probs, rollout_log_probs, advantages, mask, *, ages, low=0.8, high=1.2) -> Tensor:
    """A-3PO: decoupled_ppo with lx = lb + (d - 1) / d (sg(lp) - lb) at age d, so without a second forward pass. At r = 1: -A.
    Needs ages [N, T] (int): versions of the policy since the token was drawn; 0 and 1 are both ppo. Source: arXiv 2512.06547.
    Code: AReaL (prox_logp_method loglinear)."""
    lp, lb, _, _, ages = _tokens(log_probs, rollout_log_probs, advantages, mask, ages=ages)
    lx = lb + (1 - 1 / ages.clamp(min=1)) * (lp.detach() - lb)
    return decoupled_ppo(log_probs, rollout_log_probs, advantages, mask, proximal_log_probs=lx, low=low, high=high)


def erc(
    log_probs, rollout_log_probs, advantages, mask, *, entropy, rollout_entropy, low=0.8, high=1.28, change=(0.95, 1.05)
) -> Tensor:
    """Entropy Ratio Clipping: PPO's clip, without gradient (the loss stays) unless change[0] < H / H_rollout < change[1].
    Needs H = entropy and H_rollout = rollout_entropy [N, T], over the whole vocabulary at each token's state; 1e-8 is added to
    both. At r = 1 and H = H_rollout: -A. Source: arXiv 2512.05591. Code: the authors' (Kwai-Klear/ERC `grpo_erc`), on
    Clip-Higher; H_rollout is there that of the policy when the batch's updates began."""
    _ordered(low, high)
    _ordered(*change, "change")
    four = log_probs, rollout_log_probs, advantages, mask
    _, _, log_ratio, advantages, now, then = _tokens(*four, entropy=entropy, rollout_entropy=rollout_entropy)
    losses, changed = _clip(_ratio(log_ratio), advantages, low, high), (now + 1e-8) / (then + 1e-8)
    return torch.where((changed > change[0]) & (changed < change[1]), losses, losses.detach())


def off_policy_grpo(log_probs, rollout_log_probs, advantages, mask, *, start_log_probs, epsilon=0.2) -> Tensor:
    """Off-policy GRPO: -min(r A, clip(r, max(x - epsilon, 0), x + epsilon) A), x = exp(start_log_probs - lb).
    Needs start_log_probs [N, T]: under the policy when the iteration began. At r = x: -x A. Source: arXiv 2505.22257, where
    f_epsilon(r, x, A) has the ratios of whole responses; read in two published summaries of the paper, and no code is
    public. epsilon is GRPO's."""
    _positive(epsilon=epsilon)
    _, lb, log_ratio, advantages, lx = _tokens(log_probs, rollout_log_probs, advantages, mask, start_log_probs=start_log_probs)
    x = _ratio(lx - lb)
    return _clip(_ratio(log_ratio), advantages, x - epsilon, x + epsilon)  # r > 0: max(., 0) changes nothing


OBJECTIVES: dict[str, Callable[..., Tensor]] = {  # "clip-higher": clip_higher
    function.__name__.replace("_", "-"): function
    for function in (
        *(reinforce, ppo, clip_higher, dual_clip, truncated_is, cispo, topr, rec_oneside, asymre, opmd, dppo_tv, sapo, gspo),
        *(m2po, dcpo, ce_gppo, smoothing, balanced, decoupled_ppo, a_3po, erc, off_policy_grpo),
    )
}


def with_inputs(name: str, *four: Tensor, **further) -> Tensor:
    """OBJECTIVES[name] of the four inputs and of those `further` ones, by name, that it takes."""
    function = OBJECTIVES[name]
    return function(*four, **{key: further[key] for key in inspect.signature(function).parameters if key in further})
