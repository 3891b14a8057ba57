"""The token losses of BAPO's neighbours: off-policy policy-gradient methods, in one file to copy.

    from support.objectives import OBJECTIVES

    losses = OBJECTIVES["cispo"](log_probs, rollout_log_probs, advantages, mask)
    (weights * losses).sum().backward()  # weights [N, T]: each token's share of the optimizer step

torch and the standard library only. The first four arguments of every function are the same:

    log_probs          [N, T]         of the response tokens, under the policy in training;
                                      carries the gradient
    rollout_log_probs  [N, T]         of the same tokens, under the policy that drew them
    advantages         [N] or [N, T]  one per response, or one per token
    mask               [N, T]         True, or 1, on response tokens

The method's own options follow, by name. The result is the loss of each token, to be minimised:
float32 [N, T], 0 outside the mask. How tokens are weighted is the caller's choice.

Any float dtype is accepted. Gradients flow through log_probs alone. What stands outside the mask
has no effect, not even NaN. No value is read on the host. ValueError for a tensor whose shape does
not fit and for an option that makes no sense.

In the formulas:

    p, q       the token's probability under the policy in training, and under the one that drew it
    lp, lb     their logarithms
    r          the importance ratio exp(lp - lb); lp - lb is clamped to +-20, with gradient 0 beyond
    A          the advantage
    sg(x)      x, through which no gradient flows
    low, high  clip bounds: absolute ratios such as 0.8 and 1.2, not the epsilons 0.2 and 0.2
    clip       PPO's loss -min(r A, clip(r, low, high) A): no gradient where A > 0 and r > high,
               nor where A < 0 and r < low

and in the docstrings:

    At r = 1:  a token's gradient with respect to its lp, where the two policies agree
    Source:    the paper
    Code:      public code that was read and has this formula, and where it differs. Defaults are
               from there. verl adds a dual clip to every clip; here only dual_clip has it.

SFPO (arXiv 2510.04072) is missing: it changes the training loop, not the loss.
"""

import inspect
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


# ---------------------------------------------------------------- fixed bounds, caps and gates
def reinforce(log_probs, rollout_log_probs, advantages, mask) -> Tensor:
    """Off-policy REINFORCE: -sg(r) A lp, not clipped.

    At r = 1: -A.
    """
    tokens = _read(log_probs, rollout_log_probs, advantages, mask)
    return -tokens.ratio.detach() * tokens.advantages * tokens.log_probs


def ppo(
    log_probs, rollout_log_probs, advantages, mask, *, low: float = 0.8, high: float = 1.2
) -> Tensor:
    """PPO's and GRPO's clip, the same as token_losses of bapo.py.

    At r = 1: -A if low <= 1.
    Source: arXiv 1707.06347 (PPO), 2402.03300 (GRPO).
    Code: TRL `grpo`; verl `vanilla`.
    """
    _check_bounds(low, high)
    tokens = _read(log_probs, rollout_log_probs, advantages, mask)
    return _clip(tokens.ratio, tokens.advantages, low, high)


def clip_higher(
    log_probs, rollout_log_probs, advantages, mask, *, low: float = 0.8, high: float = 1.28
) -> Tensor:
    """DAPO's Clip-Higher: ppo with a raised upper bound.

    At r = 1: -A.
    Source: arXiv 2503.14476.
    Code: as for ppo.
    """
    return ppo(log_probs, rollout_log_probs, advantages, mask, low=low, high=high)


def dual_clip(
    log_probs,
    rollout_log_probs,
    advantages,
    mask,
    *,
    low: float = 0.8,
    high: float = 1.2,
    cap: float = 3.0,
) -> Tensor:
    """PPO's clip, with a loss of at most -cap A where A < 0.

    So there is no gradient where A < 0 and r > cap either.
    At r = 1: -A.
    Source: arXiv 1912.09729.
    Code: verl `vanilla`, where cap is clip_ratio_c.
    """
    _check_bounds(low, high)
    _check("cap", cap, 1 < cap < math.inf, "finite and above 1")
    tokens = _read(log_probs, rollout_log_probs, advantages, mask)
    capped = torch.where(tokens.ratio > cap, cap, tokens.ratio)
    ratio = torch.where(tokens.advantages < 0, capped, tokens.ratio)
    return _clip(ratio, tokens.advantages, low, high)


def truncated_is(log_probs, rollout_log_probs, advantages, mask, *, cap: float = 1.0) -> Tensor:
    """Truncated importance sampling: -sg(min(r, cap)) A lp.

    This is IMPALA's policy gradient without V-trace, which needs a critic.
    At r = 1: -A if cap >= 1.
    Source: arXiv 1802.01561.
    Code: ROLL `tis`.
    """
    _check_positive("cap", cap)
    tokens = _read(log_probs, rollout_log_probs, advantages, mask)
    weight = tokens.ratio.clamp(max=cap).detach()
    return -weight * tokens.advantages * tokens.log_probs


def cispo(log_probs, rollout_log_probs, advantages, mask, *, cap: float = 5.0) -> Tensor:
    """CISPO: truncated_is with a high cap.

    At r = 1: -A.
    Source: arXiv 2506.13585.
    Code: TRL `cispo`, where epsilon_high is the cap; 5 is ScaleRL's. verl and ROLL clip r at
    1 +- epsilon, that is from below too: verl's is this one with clip_ratio_low >= 1 and
    cap = 1 + clip_ratio_high.
    """
    return truncated_is(log_probs, rollout_log_probs, advantages, mask, cap=cap)


def topr(log_probs, rollout_log_probs, advantages, mask) -> Tensor:
    """Tapered off-policy REINFORCE: -sg(w) A lp, w = 1 where A > 0, else min(r, 1).

    At r = 1: -A.
    Source: arXiv 2503.14286, in which r and the reward are those of whole responses.
    Code: Trinity-RFT `topr`, by token and with advantages; ROLL `topr`, w by the reward's sign.
    """
    tokens = _read(log_probs, rollout_log_probs, advantages, mask)
    tapered = tokens.ratio.clamp(max=1.0)
    weight = torch.where(tokens.advantages > 0, 1.0, tapered).detach()
    return -weight * tokens.advantages * tokens.log_probs


def rec_oneside(
    log_probs, rollout_log_probs, advantages, mask, *, low: float = 0.8, high: float = 1.2
) -> Tensor:
    """REC-OneSide-NoIS: -A lp, but 0 where A > 0 and r > high, and where A < 0 and r < low.

    Advantages are taken as given; the authors' are R - mean R, without the standard deviation.
    At r = 1: -A if low <= 1.
    Source: arXiv 2509.24203.
    Code: Trinity-RFT `rec` (clip_mode one-side, weight none).
    """
    _check_bounds(low, high)
    tokens = _read(log_probs, rollout_log_probs, advantages, mask)
    kept = torch.where(tokens.advantages > 0, tokens.ratio <= high, tokens.ratio >= low)
    return -tokens.advantages * tokens.log_probs * kept


def asymre(log_probs, rollout_log_probs, advantages, mask, *, shift: float = 0.1) -> Tensor:
    """Asymmetric REINFORCE: -(A + shift) lp, a lowered baseline; r plays no part.

    At r = 1, as everywhere: -(A + shift).
    Source: arXiv 2506.20520.
    Code: Trinity-RFT `rec` (regularizer forward-kl), where A has no standard deviation.
    """
    rule = "finite and at least 0, in units of the advantages"
    _check("shift", shift, 0 <= shift < math.inf, rule)
    tokens = _read(log_probs, rollout_log_probs, advantages, mask)
    return -(tokens.advantages + shift) * tokens.log_probs


def opmd(log_probs, rollout_log_probs, advantages, mask, *, tau: float = 0.1) -> Tensor:
    """Online policy mirror descent of Kimi k1.5: -A lp + (tau / 2) (lp - lb)^2.

    Here lp - lb is not clamped.
    At r = 1: -A.
    Source: arXiv 2501.12599.
    Code: ROLL `kimi15`; verl `dro` (beta is tau); Trinity-RFT `rec` with regularizer k2, whose
    coefficient is tau / 2, so that its 0.1 is tau = 0.2. Trinity's own `opmd` is another loss,
    -A lp / (1 + tau).
    """
    _check_positive("tau", tau)
    tokens = _read(log_probs, rollout_log_probs, advantages, mask)
    penalty = tau / 2 * tokens.log_ratio.square()
    return penalty - tokens.advantages * tokens.log_probs


def dppo_tv(
    log_probs, rollout_log_probs, advantages, mask, *, delta: float = 0.15, cap: float = 20.0
) -> Tensor:
    """DPPO-Binary-TV: -sg(min(r, cap)) A lp, but 0 where the probability has moved too far.

    Too far: A > 0 and p - q > delta, or A < 0 and q - p > delta.
    At r = 1: -A.
    Source: arXiv 2602.04879.
    Code: verl `dppo_tv` (delta from its script; cap is clip_ratio_c); the authors' Stable-RL.
    """
    _check_positive("delta", delta)
    _check_positive("cap", cap)
    tokens = _read(log_probs, rollout_log_probs, advantages, mask)
    moved = tokens.log_probs.detach().exp() - tokens.rollout_log_probs.exp()
    kept = torch.where(tokens.advantages > 0, moved <= delta, moved >= -delta)
    weight = tokens.ratio.clamp(max=cap).detach()
    return -weight * tokens.advantages * tokens.log_probs * kept


def sapo(
    log_probs,
    rollout_log_probs,
    advantages,
    mask,
    *,
    tau_positive: float = 1.0,
    tau_negative: float = 1.05,
) -> Tensor:
    """SAPO: -(4 / tau) sigmoid(tau (r - 1)) A, a soft gate in place of the clip.

    tau is tau_positive where A > 0, else tau_negative.
    At r = 1: -A.
    Source: arXiv 2511.20347.
    Code: TRL `sapo`, verl `sapo`.
    """
    _check_positive("tau_positive", tau_positive)
    _check_positive("tau_negative", tau_negative)
    tokens = _read(log_probs, rollout_log_probs, advantages, mask)
    tau = torch.full_like(tokens.advantages, tau_negative)
    tau = tau.masked_fill(tokens.advantages > 0, tau_positive)
    gate = torch.sigmoid(tau * (tokens.ratio - 1))
    return -4 / tau * gate * tokens.advantages


def gspo(
    log_probs,
    rollout_log_probs,
    advantages,
    mask,
    *,
    low: float = 1 - 3e-4,
    high: float = 1 + 4e-4,
) -> Tensor:
    """GSPO: the clip of one ratio per response, s = exp(mean of lp - lb over the response).

    Each of the response's tokens has the loss -min(s A, clip(s, low, high) A). It is meant for
    weights that average each response (sequence-mean).
    At r = 1: -A, for a response whose weight and advantage are constant.
    Source: arXiv 2507.18071.
    Code: TRL (importance_sampling_level="sequence"); verl `gspo`, where a token's loss has a
    gradient at that token only: in sum the same if w and A are constant over the response.
    """
    _check_bounds(low, high)
    tokens = _read(log_probs, rollout_log_probs, advantages, mask)
    total = tokens.log_ratio.sum(1, keepdim=True)  # [N, 1]
    length = tokens.inside.sum(1, keepdim=True)  # [N, 1]
    response_ratio = _exp(total / length.clamp(min=1))
    return _clip(response_ratio, tokens.advantages, low, high)


# ---------------------------------------------------------------- bounds computed from the tokens
def m2po(
    log_probs,
    rollout_log_probs,
    advantages,
    mask,
    *,
    budget: float = 0.04,
    low_max: float = 0.7,
    high_min: float = 1.5,
    bounds: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """M2PO: PPO's clip at one pair of bounds per optimizer step, set by a second moment.

    bounds is what m2po_bounds returns for the whole step; None computes it from the tokens given,
    with budget, low_max and high_min.
    At r = 1: -A.
    Source: arXiv 2510.01161.
    Code: Infini-AI-Lab/M2PO, the authors'. There bounds are per micro-batch, and tau is the largest
    |lp - lb| in H below the one here; their scripts leave out low_max and high_min (1 and 1 here).
    Trinity-RFT and AReaL have no bounds: they drop the largest squares until the rest are within
    budget.
    """
    tokens = _read(log_probs, rollout_log_probs, advantages, mask)
    if bounds is None:
        bounds = _m2po_bounds(tokens, budget, low_max, high_min)
    low, high = bounds
    return _clip(tokens.ratio, tokens.advantages, low, high)


def m2po_bounds(
    log_probs,
    rollout_log_probs,
    advantages,
    mask,
    *,
    budget: float = 0.04,
    low_max: float = 0.7,
    high_min: float = 1.5,
) -> tuple[Tensor, Tensor]:
    """M2PO's (low, high) for one optimizer step, from all of its tokens: two 0-dim float32 tensors.

    H holds the tokens that have already moved the way their advantage asks for: A > 0 and r > 1,
    or A < 0 and r < 1. If the mean of (lp - lb)^2 over H is within budget, there is no clip:
    (0, inf). Else tau is such that the mean of min((lp - lb)^2, tau^2) over H equals budget, and

        low  = min(exp(-tau), low_max)
        high = max(exp(tau), high_min)
    """
    tokens = _read(log_probs, rollout_log_probs, advantages, mask)
    return _m2po_bounds(tokens, budget, low_max, high_min)


def dcpo(
    log_probs,
    rollout_log_probs,
    advantages,
    mask,
    *,
    epsilon_low: float = 0.16,
    epsilon_high: float = 0.2,
    high_max: float = 10.0,
) -> Tensor:
    """DCPO: PPO's clip at bounds that are wider for unlikely tokens.

        low  = (1 + sqrt(max(1 - 4 epsilon_low / q, 0))) / 2
        high = min((1 + sqrt(1 + 4 epsilon_high / q)) / 2, high_max)

    At r = 1: -A.
    Source: arXiv 2509.02333. Its smoothed advantages are not part of this.
    Code: the authors' (lime-RL/DCPO; epsilons of its README, 0.2 and 0.28 in its script).
    """
    _check_positive("epsilon_low", epsilon_low)
    _check_positive("epsilon_high", epsilon_high)
    _check("high_max", high_max, 1 <= high_max < math.inf, "finite and at least 1")
    tokens = _read(log_probs, rollout_log_probs, advantages, mask)
    q = tokens.rollout_log_probs.exp()
    low_root = (1 - 4 * epsilon_low / q).clamp(min=0).sqrt()
    high_root = (1 + 4 * epsilon_high / q).sqrt()
    low = (1 + low_root) / 2
    high = ((1 + high_root) / 2).clamp(max=high_max)
    return _clip(tokens.ratio, tokens.advantages, low, high)


# ---------------------------------------------------------------- no token without a gradient
def ce_gppo(
    log_probs,
    rollout_log_probs,
    advantages,
    mask,
    *,
    low: float = 0.8,
    high: float = 1.2,
    beta_low: float = 0.5,
    beta_high: float = 1.0,
) -> Tensor:
    """CE-GPPO: -sg(c) (p / sg(p)) A, so that a clipped token keeps a gradient.

    c is beta_high high where A > 0 and r > high, beta_low low where A < 0 and r < low, else r.
    At r = 1: -A if low <= 1.
    Source: arXiv 2509.20712.
    Code: the authors' (Kwai-Klear/CE-GPPO; their beta1 is beta_low, 0.5 for 1.5B and 0.75 for 7B).
    """
    _check_bounds(low, high)
    _check_positive("beta_low", beta_low)
    _check_positive("beta_high", beta_high)
    tokens = _read(log_probs, rollout_log_probs, advantages, mask)
    ratio = tokens.ratio.detach()
    if_positive = torch.where(ratio > high, beta_high * high, ratio)
    if_negative = torch.where(ratio < low, beta_low * low, ratio)
    coefficient = torch.where(tokens.advantages > 0, if_positive, if_negative)
    one = (tokens.log_probs - tokens.log_probs.detach()).exp()  # p / sg(p): its slope is 1
    return -coefficient * one * tokens.advantages


def smoothing(log_probs, rollout_log_probs, advantages, mask, *, alpha: float = 0.9) -> Tensor:
    """Exponential smoothing of importance weights: -p q^(-alpha) A, clamped like r.

    At r = 1: -q^(1 - alpha) A, not -A.
    Source: arXiv 2305.15877, on contextual bandits; to take tokens for actions is this file's
    reading.
    Code: the authors' (imadaouali/exponential-smoothing-icml23), where alpha = 1 - n^(-1/4) for n
    logged actions: 0.9 at n = 10,000.
    """
    _check("alpha", alpha, 0 < alpha <= 1, "in (0, 1]; 1 is the plain importance ratio")
    tokens = _read(log_probs, rollout_log_probs, advantages, mask)
    log_weight = tokens.log_ratio + (1 - alpha) * tokens.rollout_log_probs
    return -_exp(log_weight) * tokens.advantages


# ---------------------------------------------------------------- one input more
def decoupled_ppo(
    log_probs,
    rollout_log_probs,
    advantages,
    mask,
    *,
    proximal_log_probs: Tensor,
    low: float = 0.8,
    high: float = 1.2,
) -> Tensor:
    """PPO's clip around a proximal policy with the log-probs lx, in place of the one that drew.

    -min(r A, exp(clip(lp - lx, log low, log high) + lx - lb) A). lx = proximal_log_probs [N, T] is
    under an average of the weights, or under the policy when the update began. With lx = lb
    everywhere it is ppo.
    At r = 1: -A if lx = lb.
    Source: arXiv 2110.00641.
    Code: openai/ppo-ewma, with r at most 100.
    """
    _check_bounds(low, high)
    tokens = _read(log_probs, rollout_log_probs, advantages, mask)
    lx = tokens.read("proximal_log_probs", proximal_log_probs)
    drift = lx - tokens.rollout_log_probs
    moved = tokens.log_ratio - drift
    if_positive = torch.where(moved > math.log(high), math.log(high), moved)
    if_negative = torch.where(moved < math.log(low), math.log(low), moved)
    clipped = torch.where(tokens.advantages > 0, if_positive, if_negative)
    return -_exp(clipped + drift) * tokens.advantages


def a_3po(
    log_probs,
    rollout_log_probs,
    advantages,
    mask,
    *,
    ages: Tensor,
    low: float = 0.8,
    high: float = 1.2,
) -> Tensor:
    """A-3PO: decoupled_ppo whose proximal policy is interpolated, without a second forward pass.

    lx = lb + (d - 1) / d (sg(lp) - lb) at age d. ages [N, T] (int) counts the versions of the
    policy since the token was drawn; 0 and 1 are both ppo.
    At r = 1: -A.
    Source: arXiv 2512.06547.
    Code: AReaL (prox_logp_method loglinear).
    """
    tokens = _read(log_probs, rollout_log_probs, advantages, mask)
    age = tokens.read("ages", ages).clamp(min=1)
    moved = tokens.log_probs.detach() - tokens.rollout_log_probs
    lx = tokens.rollout_log_probs + (1 - 1 / age) * moved
    return decoupled_ppo(
        log_probs, rollout_log_probs, advantages, mask, proximal_log_probs=lx, low=low, high=high
    )


def erc(
    log_probs,
    rollout_log_probs,
    advantages,
    mask,
    *,
    entropy: Tensor,
    rollout_entropy: Tensor,
    low: float = 0.8,
    high: float = 1.28,
    change: tuple[float, float] = (0.95, 1.05),
) -> Tensor:
    """Entropy Ratio Clipping: PPO's clip, without gradient where the entropy has changed too much.

    A token has a gradient only if change[0] < H / H_rollout < change[1]; its loss stays. entropy
    and rollout_entropy [N, T] are H and H_rollout, over the whole vocabulary at the token's state;
    1e-8 is added to both.
    At r = 1: -A if H = H_rollout.
    Source: arXiv 2512.05591.
    Code: the authors' (Kwai-Klear/ERC `grpo_erc`), on Clip-Higher. Their H_rollout is that of the
    policy when the batch's updates began.
    """
    _check_bounds(low, high)
    least, most = change
    _check("change", change, 0 < least < most < math.inf, "two ratios with 0 < least < most")
    tokens = _read(log_probs, rollout_log_probs, advantages, mask)
    new_entropy = tokens.read("entropy", entropy) + 1e-8
    old_entropy = tokens.read("rollout_entropy", rollout_entropy) + 1e-8
    entropy_ratio = new_entropy / old_entropy
    kept = (entropy_ratio > least) & (entropy_ratio < most)
    losses = _clip(tokens.ratio, tokens.advantages, low, high)
    return torch.where(kept, losses, losses.detach())


def off_policy_grpo(
    log_probs,
    rollout_log_probs,
    advantages,
    mask,
    *,
    start_log_probs: Tensor,
    epsilon: float = 0.2,
) -> Tensor:
    """Off-policy GRPO: -min(r A, clip(r, max(x - epsilon, 0), x + epsilon) A).

    x = exp(start_log_probs - lb) is the ratio when the iteration began: start_log_probs [N, T] are
    under the policy of that moment.
    At r = x: -x A.
    Source: arXiv 2505.22257, where the ratios are those of whole responses. It was read in two
    published summaries, and no code is public. epsilon is GRPO's.
    """
    _check_positive("epsilon", epsilon)
    tokens = _read(log_probs, rollout_log_probs, advantages, mask)
    start = tokens.read("start_log_probs", start_log_probs)
    start_ratio = _exp(start - tokens.rollout_log_probs)
    # max(x - epsilon, 0) is not needed, since r > 0.
    return _clip(tokens.ratio, tokens.advantages, start_ratio - epsilon, start_ratio + epsilon)


OBJECTIVES: dict[str, Callable[..., Tensor]] = {
    "reinforce": reinforce,
    "ppo": ppo,
    "clip-higher": clip_higher,
    "dual-clip": dual_clip,
    "truncated-is": truncated_is,
    "cispo": cispo,
    "topr": topr,
    "rec-oneside": rec_oneside,
    "asymre": asymre,
    "opmd": opmd,
    "dppo-tv": dppo_tv,
    "sapo": sapo,
    "gspo": gspo,
    "m2po": m2po,
    "dcpo": dcpo,
    "ce-gppo": ce_gppo,
    "smoothing": smoothing,
    "decoupled-ppo": decoupled_ppo,
    "a-3po": a_3po,
    "erc": erc,
    "off-policy-grpo": off_policy_grpo,
}


def with_inputs(
    name: str,
    log_probs: Tensor,
    rollout_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    **further,
) -> Tensor:
    """OBJECTIVES[name], given those of the `further` inputs that it takes, and no others."""
    objective = OBJECTIVES[name]
    accepted = inspect.signature(objective).parameters
    options = {key: value for key, value in further.items() if key in accepted}
    return objective(log_probs, rollout_log_probs, advantages, mask, **options)


# ---------------------------------------------------------------- the tokens
class Tokens(NamedTuple):
    """What a loss is made of: [N, T], float32 but for `inside`, and 0 outside the mask."""

    log_probs: Tensor  # lp, with gradient
    rollout_log_probs: Tensor  # lb
    log_ratio: Tensor  # lp - lb, not clamped, with gradient
    ratio: Tensor  # r, with gradient
    advantages: Tensor  # A
    inside: Tensor  # bool, the mask

    def read(self, name: str, tensor: Tensor) -> Tensor:
        """A further input, checked and made like the others; `name` is for the error."""
        tensor = _per_token(name, tensor, self.inside.shape)
        return tensor.detach().masked_fill(~self.inside, 0).float()


def _read(log_probs: Tensor, rollout_log_probs: Tensor, advantages: Tensor, mask: Tensor) -> Tokens:
    """Check the four inputs and fill them with 0 outside the mask, before anything is computed."""
    _check_two_dimensional("log_probs", log_probs)
    shape = log_probs.shape
    outside = _per_token("mask", mask, shape) == 0
    rollout_log_probs = _per_token("rollout_log_probs", rollout_log_probs, shape)
    advantages = _per_token("advantages", advantages, shape)

    lp = log_probs.masked_fill(outside, 0)
    lb = rollout_log_probs.detach().masked_fill(outside, 0)
    # Subtracted in float32, or better if an input is: bfloat16 would round the ratios.
    precise = torch.promote_types(lp.dtype, torch.float32)
    log_ratio = (lp.to(precise) - lb).float()
    return Tokens(
        log_probs=lp.float(),
        rollout_log_probs=lb.float(),
        log_ratio=log_ratio,
        ratio=_exp(log_ratio),
        advantages=advantages.detach().masked_fill(outside, 0).float(),
        inside=~outside,
    )


def _per_token(name: str, tensor: Tensor, shape: torch.Size) -> Tensor:
    """Check one input against `shape`, [N, T]; advantages [N] become [N, T]."""
    allowed = f"of shape {list(shape)}"
    if name == "advantages":
        if tensor.shape == shape[:1]:
            return tensor.unsqueeze(1).expand(shape)
        allowed += f" or [{shape[0]}]"
    _check(name, list(tensor.shape), tensor.shape == shape, allowed)
    return tensor


def _exp(log_ratio: Tensor) -> Tensor:
    """The ratio; exp(20) = 5e8 is still finite after products and sums in float32."""
    return log_ratio.clamp(-20.0, 20.0).exp()


def _clip(ratio: Tensor, advantages: Tensor, low, high) -> Tensor:
    """-min(r A, clip(r, low, high) A); bounds are floats, or tensors that broadcast to [N, T]."""
    # The minimum by sign. Where r A and the clipped product round to the same, torch.minimum splits
    # the gradient, and clamp, which passed it on before torch 2.15, drops it.
    if_positive = torch.where(ratio > high, high, ratio)
    if_negative = torch.where(ratio < low, low, ratio)
    return -torch.where(advantages > 0, if_positive, if_negative) * advantages


@torch.no_grad()
def _m2po_bounds(
    tokens: Tokens, budget: float, low_max: float, high_min: float
) -> tuple[Tensor, Tensor]:
    _check_positive("budget", budget)
    _check("low_max", low_max, 0 < low_max <= 1, "a ratio in (0, 1]; 1 leaves it out")
    _check("high_min", high_min, 1 <= high_min < math.inf, "a ratio of at least 1; 1 leaves it out")
    in_h = tokens.log_ratio * tokens.advantages > 0
    squares = torch.where(in_h, tokens.log_ratio.square(), 0.0)
    allowed = budget * _sum(in_h)
    # tau^2 solves sum of min(square, tau^2) = allowed. Newton's method, from below: the product of
    # error and slope falls at least fourfold a step.
    tau_squared = torch.full_like(allowed, budget)
    for _ in range(32):
        above = squares > tau_squared
        sum_below = _sum(squares.masked_fill(above, 0))
        tau_squared = (allowed - sum_below) / _sum(above).clamp(min=1)
    exceeded = _sum(squares) > allowed
    tau = torch.where(exceeded, tau_squared.sqrt(), math.inf)
    low = (-tau).exp().clamp(max=low_max)
    high = tau.exp().clamp(min=high_min)
    return low.float(), high.float()


def _sum(values: Tensor) -> Tensor:
    """The sum of all values in float64; in float32 on Apple's MPS, which has no float64."""
    on_apple = values.device.type == "mps"
    return values.sum(dtype=torch.float32 if on_apple else torch.float64)


# ---------------------------------------------------------------- errors
def _check(name: str, value, fits: bool, rule: str) -> None:
    if not fits:
        raise ValueError(f"{name} must be {rule}, got {value}")


def _check_positive(name: str, value: float) -> None:
    _check(name, value, 0 < value < math.inf, "finite and above 0")


def _check_bounds(low: float, high: float) -> None:
    """Refuse what cannot be a pair of bounds, such as epsilons given for ratios."""
    fits = 0 < low < high and 1 <= high < math.inf
    rule = "absolute ratios with 0 < low < high and high >= 1: 0.8 and 1.2, not epsilons"
    _check("low, high", (low, high), fits, rule)


def _check_two_dimensional(name: str, tensor: Tensor) -> None:
    _check(name, list(tensor.shape), tensor.dim() == 2, "[N, T]")
