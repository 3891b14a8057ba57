"""Token losses of other methods that train on reused samples, in one file to copy.

    from neighbours.losses import LOSSES

    losses = LOSSES["cispo"](log_probs, rollout_log_probs, advantages, mask)
    (weights * losses).sum().backward()  # weights [N, T]: each token's share of the optimizer step

    name                paper (arXiv)                          defaults
    reinforce           off-policy REINFORCE, any textbook     none
    ppo                 PPO 1707.06347, GRPO 2402.03300        low 0.8, high 1.2; DAPO's
                                                               Clip-Higher 2503.14476: high 1.28
    dual-clip           dual-clip PPO 1912.09729               low 0.8, high 1.2, cap 3
    truncated-is        IMPALA 1802.01561                      cap 1
    cispo               MiniMax-M1 2506.13585                  cap 5 (ScaleRL's)
    topr                TOPR 2503.14286                        none
    rec-oneside         REC-OneSide-NoIS 2509.24203            low 0.8, high 1.2
    asymre              AsymRE 2506.20520                      shift 0.1
    opmd                Kimi k1.5 2501.12599                   tau 0.1
    dppo-tv             DPPO-Binary-TV 2602.04879              delta 0.15, cap 20
    sapo                SAPO 2511.20347                        tau 1.0 (A > 0), 1.05 (A < 0)
    gspo                GSPO 2507.18071                        low 1 - 3e-4, high 1 + 4e-4
    dcpo                DCPO 2509.02333                        epsilons 0.16, 0.2; high <= 10
    ce-gppo             CE-GPPO 2509.20712                     low 0.8, high 1.2, betas 0.5, 1
    smoothing           exponential smoothing 2305.15877       alpha 0.9

The keys of LOSSES are also methods of train.py: `--methods cispo@8`. To add a loss, write a
function of the four inputs and add it there. The following functions need more inputs, so they are
not in LOSSES. They are for loops that have what they need.

    function            paper (arXiv)                          needs, and defaults
    m2po_bounds         M2PO 2510.01161                        all tokens of the optimizer step;
                                                               budget 0.04, [0.7, 1.5] at least
    decoupled_ppo       decoupled PPO 2110.00641               a proximal policy; low 0.8, high 1.2
    a_3po               A-3PO 2512.06547                       tokens' ages; low 0.8, high 1.2
    erc                 Entropy Ratio Clipping 2512.05591      both entropies; low 0.8, high 1.28,
                                                               change (0.95, 1.05)
    off_policy_grpo     off-policy GRPO 2505.22257             the policy at the iteration's start;
                                                               epsilon 0.2

SFPO (2510.04072) is missing because it changes the training loop, not the loss.

The first four arguments of every function are the same; options are keyword arguments.

    log_probs          [N, T]         of the response tokens, under the policy in training; only
                                      they carry a gradient
    rollout_log_probs  [N, T]         of the same tokens, under the policy that drew them
    advantages         [N] or [N, T]  one per response, or one per token
    mask               [N, T]         True or 1 on response tokens

Every function returns the loss of each token, which is to be minimised: float32 [N, T], 0 outside
the mask. The caller chooses the weights of the tokens. Any float dtype will do. Values outside the
mask have no effect, even if they are NaN; a NaN inside it makes the loss NaN. ValueError is raised
for a tensor of the wrong shape and for epsilons given as bounds; other options are not checked.

In the formulas:

    p, q       the token's probability under the policy in training and under the one that drew it
    lp, lb     their logarithms
    r          the importance ratio exp(lp - lb); lp - lb is clamped to +-20, with gradient 0 beyond
    A          the advantage
    sg(x)      x without its gradient
    low, high  clip bounds: absolute ratios such as 0.8 and 1.2, not epsilons
    clip       PPO's loss -min(r A, clip(r, low, high) A): no gradient where A > 0 and r > high,
               nor where A < 0 and r < low

At r = 1 the gradient with respect to lp is -A unless the docstring says otherwise. "Code" names
public code with this formula, which also gave the defaults, and says what else differs there. verl
adds a dual clip to every clip; here only dual_clip has one.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor


# ---------------------------------------------------------------- fixed bounds, caps and gates
def reinforce(log_probs, rollout_log_probs, advantages, mask) -> Tensor:
    """Off-policy REINFORCE: -sg(r) A lp, not clipped."""
    tokens = _read(log_probs, rollout_log_probs, advantages, mask)
    return -tokens.ratio.detach() * tokens.advantages * tokens.log_probs


def ppo(
    log_probs, rollout_log_probs, advantages, mask, *, low: float = 0.8, high: float = 1.2
) -> Tensor:
    """PPO's and GRPO's clip, the same as token_losses of bapo.py.

    Code: TRL `grpo`; verl `vanilla`.
    """
    _check_bounds(low, high)
    tokens = _read(log_probs, rollout_log_probs, advantages, mask)
    return _clip(tokens.ratio, tokens.advantages, low, high)


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
    Code: verl `vanilla`, where cap is clip_ratio_c.
    """
    _check_bounds(low, high)
    tokens = _read(log_probs, rollout_log_probs, advantages, mask)
    capped = torch.where(tokens.ratio > cap, cap, tokens.ratio)
    ratio = torch.where(tokens.advantages < 0, capped, tokens.ratio)
    return _clip(ratio, tokens.advantages, low, high)


def truncated_is(log_probs, rollout_log_probs, advantages, mask, *, cap: float = 1.0) -> Tensor:
    """Truncated importance sampling: -sg(min(r, cap)) A lp.

    This is IMPALA's policy gradient without V-trace, which needs a critic.
    Code: ROLL `tis`.
    """
    tokens = _read(log_probs, rollout_log_probs, advantages, mask)
    weight = tokens.ratio.detach().clamp(max=cap)
    return -weight * tokens.advantages * tokens.log_probs


def cispo(log_probs, rollout_log_probs, advantages, mask, *, cap: float = 5.0) -> Tensor:
    """CISPO: truncated_is with a high cap.

    Code: TRL `cispo`, where epsilon_high is the cap. verl and ROLL clip r at 1 +- epsilon, that is
    from below too: verl's is this one with clip_ratio_low >= 1 and cap = 1 + clip_ratio_high.
    """
    return truncated_is(log_probs, rollout_log_probs, advantages, mask, cap=cap)


def topr(log_probs, rollout_log_probs, advantages, mask) -> Tensor:
    """Tapered off-policy REINFORCE: -sg(w) A lp, w = 1 where A > 0, else min(r, 1).

    In the paper r and the reward are those of whole responses.
    Code: Trinity-RFT `topr`, by token and with advantages; ROLL `topr`, w by the reward's sign.
    """
    tokens = _read(log_probs, rollout_log_probs, advantages, mask)
    tapered = tokens.ratio.detach().clamp(max=1.0)
    weight = torch.where(tokens.advantages > 0, 1.0, tapered)
    return -weight * tokens.advantages * tokens.log_probs


def rec_oneside(
    log_probs, rollout_log_probs, advantages, mask, *, low: float = 0.8, high: float = 1.2
) -> Tensor:
    """REC-OneSide-NoIS: -A lp, but 0 where A > 0 and r > high, and where A < 0 and r < low.

    Advantages are taken as given; the authors' are R - mean R, without the standard deviation.
    Code: Trinity-RFT `rec` (clip_mode one-side, weight none).
    """
    _check_bounds(low, high)
    tokens = _read(log_probs, rollout_log_probs, advantages, mask)
    kept = torch.where(tokens.advantages > 0, tokens.ratio <= high, tokens.ratio >= low)
    return -tokens.advantages * tokens.log_probs * kept


def asymre(log_probs, rollout_log_probs, advantages, mask, *, shift: float = 0.1) -> Tensor:
    """Asymmetric REINFORCE: -(A + shift) lp, with a lower baseline; r is not used.

    At r = 1, as everywhere: -(A + shift). shift is in units of the advantages.
    Code: Trinity-RFT `rec` (regularizer forward-kl), where A has no standard deviation.
    """
    tokens = _read(log_probs, rollout_log_probs, advantages, mask)
    return -(tokens.advantages + shift) * tokens.log_probs


def opmd(log_probs, rollout_log_probs, advantages, mask, *, tau: float = 0.1) -> Tensor:
    """Online policy mirror descent of Kimi k1.5: -A lp + (tau / 2) (lp - lb)^2.

    Here lp - lb is not clamped.
    Code: ROLL `kimi15`; verl `dro` (beta is tau); Trinity-RFT `rec` with regularizer k2, whose
    coefficient is tau / 2, so that its 0.1 is tau = 0.2. Trinity's own `opmd` is another loss,
    -A lp / (1 + tau).
    """
    tokens = _read(log_probs, rollout_log_probs, advantages, mask)
    penalty = tau / 2 * tokens.log_ratio.square()
    return penalty - tokens.advantages * tokens.log_probs


def dppo_tv(
    log_probs, rollout_log_probs, advantages, mask, *, delta: float = 0.15, cap: float = 20.0
) -> Tensor:
    """DPPO-Binary-TV: -sg(min(r, cap)) A lp, but 0 where the probability has moved too far.

    Too far: A > 0 and p - q > delta, or A < 0 and q - p > delta.
    Code: verl `dppo_tv` (delta from its script; cap is clip_ratio_c); the authors' Stable-RL.
    """
    tokens = _read(log_probs, rollout_log_probs, advantages, mask)
    moved = tokens.log_probs.detach().exp() - tokens.rollout_log_probs.exp()
    kept = torch.where(tokens.advantages > 0, moved <= delta, moved >= -delta)
    weight = tokens.ratio.detach().clamp(max=cap)
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
    Code: TRL `sapo`, verl `sapo`.
    """
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
    Code: TRL (importance_sampling_level="sequence"); verl `gspo`, where a token's loss has a
    gradient at that token only: in sum the same if w and A are constant over the response.
    """
    _check_bounds(low, high)
    tokens = _read(log_probs, rollout_log_probs, advantages, mask)
    total = tokens.log_ratio.sum(1, keepdim=True)  # [N, 1]
    length = tokens.inside.sum(1, keepdim=True)  # [N, 1]
    response_ratio = _ratio(total / length.clamp(min=1))
    return _clip(response_ratio, tokens.advantages, low, high)


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

    The paper's smoothed advantages are not part of this.
    Code: the authors' (lime-RL/DCPO; epsilons of its README, 0.2 and 0.28 in its script).
    """
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
    Code: the authors' (Kwai-Klear/CE-GPPO; their beta1 is beta_low, 0.5 for 1.5B and 0.75 for 7B).
    """
    _check_bounds(low, high)
    tokens = _read(log_probs, rollout_log_probs, advantages, mask)
    ratio = tokens.ratio.detach()
    if_positive = torch.where(ratio > high, beta_high * high, ratio)
    if_negative = torch.where(ratio < low, beta_low * low, ratio)
    coefficient = torch.where(tokens.advantages > 0, if_positive, if_negative)
    one = (tokens.log_probs - tokens.log_probs.detach()).exp()  # p / sg(p): its slope is 1
    return -coefficient * one * tokens.advantages


def smoothing(log_probs, rollout_log_probs, advantages, mask, *, alpha: float = 0.9) -> Tensor:
    """Exponential smoothing of importance weights: -p q^(-alpha) A, clamped like r.

    alpha is in (0, 1]; 1 is the plain importance ratio.
    At r = 1: -q^(1 - alpha) A, not -A.
    The paper is on contextual bandits; to take tokens for actions is this file's reading.
    Code: the authors' (imadaouali/exponential-smoothing-icml23), where alpha = 1 - n^(-1/4) for n
    logged actions: 0.9 at n = 10,000.
    """
    tokens = _read(log_probs, rollout_log_probs, advantages, mask)
    log_weight = tokens.log_ratio + (1 - alpha) * tokens.rollout_log_probs
    return -_ratio(log_weight) * tokens.advantages


# What train.py takes by name: all that the four inputs suffice for.
LOSSES = {
    "reinforce": reinforce,
    "ppo": ppo,
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
    "dcpo": dcpo,
    "ce-gppo": ce_gppo,
    "smoothing": smoothing,
}


# ---------------------------------------------------------------- to copy: they need one thing more
def m2po_bounds(
    log_probs,
    rollout_log_probs,
    advantages,
    mask,
    *,
    budget: float = 0.04,
    low_max: float = 0.7,
    high_min: float = 1.5,
) -> tuple[float, float]:
    """M2PO's clip bounds (low, high), from ALL tokens of an optimizer step; its loss is ppo's.

        low, high = m2po_bounds(log_probs, rollout_log_probs, advantages, mask)
        losses = ppo(log_probs, rollout_log_probs, advantages, mask, low=low, high=high)

    Where the step is split into micro-batches, the first line needs all of them.

    H holds the tokens that have already moved the way their advantage asks for: A > 0 and r > 1,
    or A < 0 and r < 1. If the mean of (lp - lb)^2 over H is within budget, there is no clip:
    (0, inf). Else tau is such that the mean of min((lp - lb)^2, tau^2) over H equals budget, and

        low  = min(exp(-tau), low_max)
        high = max(exp(tau), high_min)

    Code: Infini-AI-Lab/M2PO, the authors'. There bounds are per micro-batch, and tau is the largest
    |lp - lb| in H below the one here; their scripts leave out low_max and high_min (1 and 1 here).
    Trinity-RFT and AReaL have no bounds: they drop the largest squares until the rest are within
    budget.
    """
    tokens = _read(log_probs, rollout_log_probs, advantages, mask)
    log_ratio = tokens.log_ratio.detach()
    in_h = log_ratio * tokens.advantages > 0
    squares = log_ratio[in_h].cpu().double().square().sort().values  # [H], ascending
    allowed = budget * len(squares)
    if squares.sum() <= allowed:
        return 0.0, math.inf
    # The sum of min(square, tau^2) if tau^2 were each of the squares: that one and all larger
    # squares count tau^2. It rises with tau^2, so the squares below tau^2 are those within allowed.
    not_smaller = torch.arange(len(squares), 0, -1)
    capped_sums = squares.cumsum(0) - squares + not_smaller * squares
    below = int((capped_sums <= allowed).sum())
    tau_squared = (allowed - squares[:below].sum().item()) / (len(squares) - below)
    tau = math.sqrt(tau_squared)
    return min(math.exp(-tau), low_max), max(math.exp(tau), high_min)


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
    """PPO's clip around a proximal policy, in place of the one that drew: exp(lx - lb) clip.

    The clip is that of exp(lp - lx). lx = proximal_log_probs [N, T] is under an average of the
    weights, or under the policy when the update began. With lx = lb everywhere it is ppo.
    At r = 1: -A if lx = lb.
    Code: openai/ppo-ewma, with r at most 100.
    """
    _check_bounds(low, high)
    tokens = _read(log_probs, rollout_log_probs, advantages, mask)
    lx = tokens.read("proximal_log_probs", proximal_log_probs)
    weight = _ratio(lx - tokens.rollout_log_probs)
    return weight * _clip(_ratio(tokens.log_probs - lx), tokens.advantages, low, high)


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
    Code: AReaL (prox_logp_method loglinear).
    """
    tokens = _read(log_probs, rollout_log_probs, advantages, mask)
    age = tokens.read("ages", ages).clamp(min=1)
    lx = tokens.rollout_log_probs + (1 - 1 / age) * tokens.log_ratio.detach()
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
    Code: the authors' (Kwai-Klear/ERC `grpo_erc`), on Clip-Higher. Their H_rollout is that of the
    policy when the batch's updates began.
    """
    _check_bounds(low, high)
    tokens = _read(log_probs, rollout_log_probs, advantages, mask)
    new_entropy = tokens.read("entropy", entropy) + 1e-8
    old_entropy = tokens.read("rollout_entropy", rollout_entropy) + 1e-8
    entropy_ratio = new_entropy / old_entropy
    kept = (entropy_ratio > change[0]) & (entropy_ratio < change[1])
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
    In the paper the ratios are those of whole responses. It was read in two published summaries,
    and no code is public. epsilon is GRPO's.
    """
    tokens = _read(log_probs, rollout_log_probs, advantages, mask)
    start = tokens.read("start_log_probs", start_log_probs)
    start_ratio = _ratio(start - tokens.rollout_log_probs)
    # max(x - epsilon, 0) is not needed, since r > 0.
    return _clip(tokens.ratio, tokens.advantages, start_ratio - epsilon, start_ratio + epsilon)


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
        _check_shape(name, tensor, self.inside.shape)
        return _fill(tensor.detach(), self.inside)


def _read(log_probs: Tensor, rollout_log_probs: Tensor, advantages: Tensor, mask: Tensor) -> Tokens:
    """Check the four inputs and fill them with 0 outside the mask, before anything is computed."""
    shape = log_probs.shape
    if len(shape) != 2:
        raise ValueError(f"log_probs must be [N, T], got {list(shape)}")
    _check_shape("rollout_log_probs", rollout_log_probs, shape)
    _check_shape("mask", mask, shape)
    if advantages.shape == shape[:1]:
        advantages = advantages.unsqueeze(1).expand(shape)
    _check_shape("advantages", advantages, shape)

    inside = mask != 0
    lp = _fill(log_probs, inside)
    lb = _fill(rollout_log_probs.detach(), inside)
    log_ratio = lp - lb
    return Tokens(
        log_probs=lp,
        rollout_log_probs=lb,
        log_ratio=log_ratio,
        ratio=_ratio(log_ratio),
        advantages=_fill(advantages.detach(), inside),
        inside=inside,
    )


def _fill(tensor: Tensor, inside: Tensor) -> Tensor:
    """float32, so that bfloat16 does not round the ratios, and 0 outside the mask."""
    return tensor.masked_fill(~inside, 0).float()


def _ratio(log_ratio: Tensor) -> Tensor:
    """exp, clamped: exp(20) = 5e8 is still finite after products and sums in float32."""
    return log_ratio.clamp(-20.0, 20.0).exp()


def _clip(ratio: Tensor, advantages: Tensor, low, high) -> Tensor:
    """-min(r A, clip(r, low, high) A); bounds are floats, or tensors that broadcast to [N, T]."""
    # The minimum by sign. Where r A and the clipped product round to the same, torch.minimum splits
    # the gradient, and clamp, which passed it on before torch 2.15, drops it.
    if_positive = torch.where(ratio > high, high, ratio)
    if_negative = torch.where(ratio < low, low, ratio)
    return -torch.where(advantages > 0, if_positive, if_negative) * advantages


# ---------------------------------------------------------------- errors
def _check_shape(name: str, tensor: Tensor, shape: torch.Size) -> None:
    if tensor.shape != shape:
        allowed = f"{list(shape)} or [{shape[0]}]" if name == "advantages" else list(shape)
        raise ValueError(f"{name} must have shape {allowed}, got {list(tensor.shape)}")


def _check_bounds(low: float, high: float) -> None:
    """Refuse what cannot be a pair of bounds, such as epsilons given for ratios."""
    if not (0 <= low < high and high >= 1):
        raise ValueError(
            f"low and high must be clip bounds with low < high and high >= 1, got {low} and {high};"
            " bounds are ratios, 0.8 and 1.2, not epsilons"
        )
