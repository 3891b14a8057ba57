"""Losses of other methods that train on reused samples. To use them, copy this file and bapo.py.

    losses = cispo(log_probs, rollout_log_probs, advantages, mask, cap=4.0)  # [B, T]
    loss = losses.sum() / mask.sum()  # token-mean, if the mask is that of the whole optimizer step

The four inputs are those of bapo_loss, and a docstring has a loss's options, its paper on arXiv,
and public code with the same formula. The result is float32 [B, T], to be minimised, and 0 outside
the mask, whatever the inputs hold there. Inputs of other shapes and epsilons given as bounds raise
ValueError. In train.py the keys of LOSSES are methods: `--methods grpo@8 cispo@8`.

To add a loss, write its formula below under @token_loss, and its gradients into the table of
tests/test_other_losses.py. The symbols are:

    p, q       a token's probability under the policy in training and under the one that drew it
    lp, lb     their logarithms; only lp has a gradient
    r          importance ratio exp(lp - lb), with the clamp of bapo.importance_ratio
    A          advantage
    sg(x)      x without its gradient
    low, high  clip bounds: absolute ratios such as 0.8 and 1.2, not epsilons
    clip       PPO's loss -min(r A, clip(r, low, high) A), which is bapo.token_losses

At r = 1 the gradient with respect to lp is -A unless the docstring says otherwise.
"""

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from bapo import ClipSearch, check_shapes, gradient_mask, importance_ratio, token_losses

LOSSES = {}  # name -> function of the four inputs; @token_loss fills it


# ---------------------------------------------------------------- the tokens
class Tokens(NamedTuple):
    """What a loss is made of: float32 [B, T], and 0 outside the mask."""

    log_probs: Tensor  # lp, with gradient
    rollout_log_probs: Tensor  # lb
    log_ratio: Tensor  # lp - lb, not clamped, with gradient
    ratio: Tensor  # r, with gradient
    advantages: Tensor  # A
    mask: Tensor  # bool


def token_loss(formula):
    """Turn a formula on Tokens into a function of the four inputs, and add it to LOSSES.

    Its name there has hyphens for underscores.
    """

    @functools.wraps(formula)
    def loss(log_probs, rollout_log_probs, advantages, mask, **options) -> Tensor:
        check_shapes(log_probs, rollout_log_probs, advantages, mask)
        per_token = advantages.reshape(len(mask), -1)
        lp = _fill(log_probs, mask)
        lb = _fill(rollout_log_probs.detach(), mask)
        a = _fill(per_token.detach(), mask)
        return formula(Tokens(lp, lb, lp - lb, importance_ratio(lp - lb), a, mask != 0), **options)

    LOSSES[formula.__name__.replace("_", "-")] = loss
    return loss


def _fill(tensor: Tensor, mask: Tensor) -> Tensor:
    # float32 before anything is subtracted, so that bfloat16 does not round the ratios
    return tensor.float().masked_fill(mask == 0, 0.0)


def _reinforce(tokens: Tokens, weight: Tensor) -> Tensor:
    """-sg(weight) A lp"""
    return -tokens.advantages * tokens.log_probs * weight.detach()


# ---------------------------------------------------------------- fixed bounds, caps and gates
@token_loss
def reinforce(tokens):
    """Off-policy REINFORCE (any textbook): -sg(r) A lp, not clipped."""
    return _reinforce(tokens, weight=tokens.ratio)


@token_loss
def ppo(tokens, low=0.8, high=1.2):
    """PPO's (1707.06347) and GRPO's (2402.03300) clip. DAPO's Clip-Higher (2503.14476): high 1.28.

    Code: TRL `grpo`; verl `vanilla`, which adds a dual clip to this and other clips.
    """
    return token_losses(tokens.log_ratio, tokens.advantages, low, high)


@token_loss
def dual_clip(tokens, low=0.8, high=1.2, cap=3.0):
    """Dual-clip PPO (1912.09729): PPO's clip, with a loss of at most -cap A where A < 0.

    So there is no gradient where A < 0 and r > cap either.
    Code: verl `vanilla`, where cap is clip_ratio_c.
    """
    losses = token_losses(tokens.log_ratio, tokens.advantages, low, high)
    capped = losses.minimum(-cap * tokens.advantages)
    return torch.where(tokens.advantages < 0, capped, losses)


@token_loss
def truncated_is(tokens, cap=1.0):
    """Truncated importance sampling (IMPALA, 1802.01561): -sg(min(r, cap)) A lp.

    This is IMPALA's policy gradient without V-trace, which needs a critic.
    Code: ROLL `tis`.
    """
    return _reinforce(tokens, weight=tokens.ratio.clamp(max=cap))


@token_loss
def cispo(tokens, cap=5.0):
    """CISPO (MiniMax-M1, 2506.13585): -sg(min(r, cap)) A lp, truncated_is with ScaleRL's high cap.

    Code: TRL `cispo`, where epsilon_high is the cap. verl and ROLL clip r at 1 +- epsilon, that is
    from below too: verl's is this one with clip_ratio_low >= 1 and cap = 1 + clip_ratio_high.
    """
    return _reinforce(tokens, weight=tokens.ratio.clamp(max=cap))


@token_loss
def topr(tokens):
    """Tapered off-policy REINFORCE (2503.14286): -sg(w) A lp, w = 1 where A > 0, else min(r, 1).

    In the paper r and the reward are those of whole responses.
    Code: Trinity-RFT `topr`, by token and with advantages; ROLL `topr`, w by the reward's sign.
    """
    tapered = tokens.ratio.clamp(max=1.0)
    return _reinforce(tokens, weight=torch.where(tokens.advantages > 0, 1.0, tapered))


@token_loss
def rec_oneside(tokens, low=0.8, high=1.2):
    """REC-OneSide-NoIS (2509.24203): -A lp, but 0 where A > 0, r > high and where A < 0, r < low.

    Advantages are taken as given; the authors' are R - mean R, without the standard deviation.
    Code: Trinity-RFT `rec` (clip_mode one-side, weight none).
    """
    ClipSearch.fixed(low, high)  # raises for epsilons given as bounds
    return _reinforce(tokens, weight=gradient_mask(tokens.ratio, tokens.advantages, low, high))


@token_loss
def asymre(tokens, shift=0.1):
    """AsymRE (2506.20520): -(A + shift) lp, REINFORCE with a lower baseline; r is not used.

    At r = 1, as everywhere: -(A + shift). shift is in units of the advantages.
    Code: Trinity-RFT `rec` (regularizer forward-kl), where A has no standard deviation.
    """
    return -(tokens.advantages + shift) * tokens.log_probs


@token_loss
def opmd(tokens, tau=0.1):
    """Online policy mirror descent (Kimi k1.5, 2501.12599): -A lp + (tau / 2) (lp - lb)^2.

    Here lp - lb is not clamped.
    Code: ROLL `kimi15`; verl `dro` (beta is tau); Trinity-RFT `rec` with regularizer k2, whose
    coefficient is tau / 2, so that its 0.1 is tau = 0.2. Trinity's own `opmd` is another loss,
    -A lp / (1 + tau).
    """
    penalty = tau / 2 * tokens.log_ratio.square()
    return penalty - tokens.advantages * tokens.log_probs


@token_loss
def dppo_tv(tokens, delta=0.15, cap=20.0):
    """DPPO-Binary-TV (2602.04879): -sg(min(r, cap)) A lp, but 0 where p has moved too far.

    Too far: A > 0 and p - q > delta, or A < 0 and q - p > delta.
    Code: verl `dppo_tv` (delta from its script; cap is clip_ratio_c); the authors' Stable-RL.
    """
    moved = tokens.log_probs.detach().exp() - tokens.rollout_log_probs.exp()
    is_near = gradient_mask(moved, tokens.advantages, -delta, delta)
    return _reinforce(tokens, weight=is_near * tokens.ratio.clamp(max=cap))


@token_loss
def sapo(tokens, tau_positive=1.0, tau_negative=1.05):
    """SAPO (2511.20347): -(4 / tau) sigmoid(tau (r - 1)) A, a soft gate in place of the clip.

    tau is tau_positive where A > 0, else tau_negative.
    Code: TRL `sapo`, verl `sapo`.
    """
    tau = torch.where(tokens.advantages > 0, tau_positive, tau_negative)
    gate = torch.sigmoid(tau * (tokens.ratio - 1))
    return -4 / tau * gate * tokens.advantages


@token_loss
def gspo(tokens, low=1 - 3e-4, high=1 + 4e-4):
    """GSPO (2507.18071): the clip of one ratio per response, the exp of its mean of lp - lb.

    Each of the response's tokens has this loss. GSPO averages responses: use weights that give each
    response the same (sequence-mean). With train.py's token-mean, `gspo@8` is a token-mean of
    sequence losses, where long responses count more.
    At r = 1: -A, for a response whose weight and advantage are constant.
    Code: TRL (importance_sampling_level="sequence"); verl `gspo`, where a token's loss has a
    gradient at that token only: in sum the same if w and A are constant over the response.
    """
    length = tokens.mask.sum(1, keepdim=True)  # [B, 1]
    mean_log_ratio = tokens.log_ratio.sum(1, keepdim=True) / length.clamp(min=1)
    return token_losses(mean_log_ratio, tokens.advantages, low, high)


@token_loss
def dcpo(tokens, epsilon_low=0.16, epsilon_high=0.2, high_max=10.0):
    """DCPO (2509.02333): PPO's clip at bounds that are wider for unlikely tokens.

        low  = (1 + sqrt(max(1 - 4 epsilon_low / q, 0))) / 2
        high = min((1 + sqrt(1 + 4 epsilon_high / q)) / 2, high_max)

    The paper's smoothed advantages are not part of this.
    Code: the authors' (lime-RL/DCPO; epsilons of its README, 0.2 and 0.28 in its script).
    """
    q = tokens.rollout_log_probs.exp()
    low_root = (1 - 4 * epsilon_low / q).clamp(min=0).sqrt()
    high_root = (1 + 4 * epsilon_high / q).sqrt()
    low = (1 + low_root) / 2  # [B, T], so token_losses cannot take them
    high = ((1 + high_root) / 2).clamp(max=high_max)
    has_gradient = gradient_mask(tokens.ratio, tokens.advantages, low, high)
    chosen = torch.where(has_gradient, tokens.ratio, tokens.ratio.detach().clamp(low, high))
    return -chosen * tokens.advantages


@token_loss
def ce_gppo(tokens, low=0.8, high=1.2, beta_low=0.5, beta_high=1.0):
    """CE-GPPO (2509.20712): -sg(c) A lp, so that a clipped token keeps a gradient.

    c is beta_high high where A > 0 and r > high, beta_low low where A < 0 and r < low, else r. The
    paper has p / sg(p) in place of lp, with the same gradient.
    Code: the authors' (Kwai-Klear/CE-GPPO; their beta1 is beta_low, 0.5 for 1.5B and 0.75 for 7B).
    """
    ClipSearch.fixed(low, high)  # raises for epsilons given as bounds
    if_clipped = torch.where(tokens.advantages > 0, beta_high * high, beta_low * low)
    has_gradient = gradient_mask(tokens.ratio, tokens.advantages, low, high)
    return _reinforce(tokens, weight=torch.where(has_gradient, tokens.ratio, if_clipped))


# ---------------------------------------------------------------- with one more tensor
# These are not in LOSSES, because train.py has no such tensor.
def decoupled_ppo(
    log_probs, rollout_log_probs, advantages, mask, proximal_log_probs, low=0.8, high=1.2
):
    """Decoupled PPO (2110.00641): a clip around a proximal policy, exp(lx - lb) clip(exp(lp - lx)).

    lx is proximal_log_probs [B, T]: under an average of the weights, or under the policy when the
    update began. With lx = lb everywhere it is ppo.
    At r = 1: -A if lx = lb.
    Code: openai/ppo-ewma, with r at most 100.
    """
    check_shapes(proximal_log_probs, rollout_log_probs, advantages, mask)
    lx = _fill(proximal_log_probs.detach(), mask)
    weight = importance_ratio(lx - _fill(rollout_log_probs.detach(), mask))
    return weight * ppo(log_probs, lx, advantages, mask, low=low, high=high)


def a_3po(log_probs, rollout_log_probs, advantages, mask, ages, low=0.8, high=1.2):
    """A-3PO (2512.06547): decoupled_ppo whose lx is interpolated, without a second forward pass.

    lx = lb + (d - 1) / d (sg(lp) - lb) at age d. ages [B, T] (int) counts the versions of the
    policy since the token was drawn; 0 and 1 are both ppo.
    Code: AReaL (prox_logp_method loglinear).
    """
    share = 1 - 1 / ages.clamp(min=1)
    lx = torch.lerp(rollout_log_probs.float(), log_probs.float(), share)
    return decoupled_ppo(log_probs, rollout_log_probs, advantages, mask, lx, low, high)
