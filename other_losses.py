"""Losses of other methods that train on reused samples, in one file to copy.

It needs torch alone. In train.py a key of LOSSES is a method: `--methods grpo@8 cispo@8 sapo@8`. In
a loop of your own:

    from other_losses import cispo

    losses = cispo(log_probs, rollout_log_probs, advantages, mask, cap=4.0)  # [N, T]
    loss = losses.sum() / mask.sum()  # token-mean, if the mask is that of the whole optimizer step

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

Two functions take one more tensor, so they are not in LOSSES and train.py cannot use them:
decoupled_ppo (2110.00641) and a_3po (A-3PO, 2512.06547). M2PO (2510.01161), Entropy Ratio Clipping
(2512.05591), off-policy GRPO (2505.22257) and SFPO (2510.04072) are missing. They need all tokens
of the optimizer step, entropies, another policy or another training loop.

Every function takes these four inputs. Options are keyword arguments.

    log_probs          [N, T]         of the response tokens, under the policy in training; only
                                      they carry a gradient
    rollout_log_probs  [N, T]         of the same tokens, under the policy that drew them
    advantages         [N] or [N, T]  one per response, or one per token
    mask               [N, T]         True or 1 on response tokens

Every function returns the loss of each token, which is to be minimised: float32 [N, T], 0 outside
the mask. The caller chooses the weights of the tokens; train.py takes the token-mean. Any float
dtype will do. Values outside the mask have no effect, even if they are NaN; a NaN of log_probs
inside it makes the loss NaN. ValueError is raised for an input of the wrong shape and for epsilons
given as bounds; other options are not checked.

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
adds a dual clip to every clip; here only dual_clip has one. tests/test_other_losses.py compares
every loss with a literal formula, in value and gradient. At commit fdcd1ab ppo, dual-clip, cispo,
dppo-tv, sapo and gspo were equal to the losses of verl 0.9.1, too.

To add a loss, write its formula below. @token_loss puts it into LOSSES under its name, with hyphens
for underscores, and makes it a function of the four inputs:

    @token_loss
    def squared(tokens):
        return -tokens.ratio.square() / 2 * tokens.advantages
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

LOSSES = {}  # name -> function of the four inputs; @token_loss fills it


# ---------------------------------------------------------------- the tokens
class Tokens(NamedTuple):
    """What a loss is made of: [N, T], float32 but for `inside`, and 0 outside the mask."""

    log_probs: Tensor  # lp, with gradient
    rollout_log_probs: Tensor  # lb
    log_ratio: Tensor  # lp - lb, not clamped, with gradient
    ratio: Tensor  # r, with gradient
    advantages: Tensor  # A
    inside: Tensor  # bool, the mask


def token_loss(formula: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Turn a formula on Tokens into a function of the four inputs, and add it to LOSSES."""

    @functools.wraps(formula)
    def loss(log_probs, rollout_log_probs, advantages, mask, **options) -> Tensor:
        return formula(_read(log_probs, rollout_log_probs, advantages, mask), **options)

    LOSSES[formula.__name__.replace("_", "-")] = loss
    return loss


def _read(log_probs: Tensor, rollout_log_probs: Tensor, advantages: Tensor, mask: Tensor) -> Tokens:
    """Check the four inputs and fill them with 0 outside the mask, before anything is computed."""
    shape, *others = [list(one.shape) for one in (log_probs, rollout_log_probs, mask)]
    given = list(advantages.shape)
    if len(shape) != 2 or others != [shape] * 2 or given not in (shape, shape[:1]):
        raise ValueError(
            "log_probs, rollout_log_probs and mask must have the same shape [N, T], and advantages"
            f" [N] or [N, T], got {[shape, *others]} and {given}"
        )
    if given != shape:
        advantages = advantages.unsqueeze(1).expand(shape)
    inside = mask != 0
    lp = _fill(log_probs, inside)
    lb = _fill(rollout_log_probs.detach(), inside)
    return Tokens(
        log_probs=lp,
        rollout_log_probs=lb,
        log_ratio=lp - lb,
        ratio=_ratio(lp - lb),
        advantages=_fill(advantages.detach(), inside),
        inside=inside,
    )


def _fill(tensor: Tensor, inside: Tensor) -> Tensor:
    """float32, so that bfloat16 does not round the ratios, and 0 outside the mask."""
    return tensor.masked_fill(~inside, 0).float()


def _ratio(log_ratio: Tensor) -> Tensor:
    """exp, clamped: exp(20) = 5e8 is still finite after products and sums in float32."""
    return log_ratio.clamp(-20.0, 20.0).exp()


def _beyond(moved: Tensor, advantages: Tensor, low, high) -> Tensor:
    """True where A > 0 and moved > high, or A <= 0 and moved < low: bool [N, T].

    Bounds are floats, or tensors that broadcast to [N, T]. A NaN is never beyond, so it shows.
    """
    return torch.where(advantages > 0, moved > high, moved < low)


def _clip(ratio: Tensor, advantages: Tensor, low, high) -> Tensor:
    """-min(r A, clip(r, low, high) A); bounds as in _beyond."""
    # The minimum by sign. Where r A and the clipped product round to the same, torch.minimum splits
    # the gradient, and clamp, which passed it on before torch 2.15, drops it.
    bound = torch.where(advantages > 0, high, low)
    return -torch.where(_beyond(ratio, advantages, low, high), bound, ratio) * advantages


def _reinforce(tokens: Tokens, weight: Tensor) -> Tensor:
    """-sg(weight) A lp"""
    return -tokens.advantages * tokens.log_probs * weight.detach()


def _check_bounds(low: float, high: float) -> None:
    """Refuse what cannot be a pair of bounds, such as epsilons given for ratios."""
    if not (0 <= low < high and high >= 1):
        raise ValueError(
            f"low and high must be clip bounds with low < high and high >= 1, got {low} and {high};"
            " bounds are ratios, 0.8 and 1.2, not epsilons"
        )


# ---------------------------------------------------------------- fixed bounds, caps and gates
@token_loss
def reinforce(tokens: Tokens) -> Tensor:
    """Off-policy REINFORCE: -sg(r) A lp, not clipped."""
    return _reinforce(tokens, weight=tokens.ratio)


@token_loss
def ppo(tokens: Tokens, low: float = 0.8, high: float = 1.2) -> Tensor:
    """PPO's and GRPO's clip, the same as token_losses of bapo.py.

    Code: TRL `grpo`; verl `vanilla`.
    """
    _check_bounds(low, high)
    return _clip(tokens.ratio, tokens.advantages, low, high)


@token_loss
def dual_clip(tokens: Tokens, low: float = 0.8, high: float = 1.2, cap: float = 3.0) -> Tensor:
    """PPO's clip, with a loss of at most -cap A where A < 0.

    So there is no gradient where A < 0 and r > cap either.
    Code: verl `vanilla`, where cap is clip_ratio_c.
    """
    _check_bounds(low, high)
    ratio = torch.where(tokens.advantages < 0, tokens.ratio.clamp(max=cap), tokens.ratio)
    return _clip(ratio, tokens.advantages, low, high)


@token_loss
def truncated_is(tokens: Tokens, cap: float = 1.0) -> Tensor:
    """Truncated importance sampling: -sg(min(r, cap)) A lp.

    This is IMPALA's policy gradient without V-trace, which needs a critic.
    Code: ROLL `tis`.
    """
    return _reinforce(tokens, weight=tokens.ratio.clamp(max=cap))


@token_loss
def cispo(tokens: Tokens, cap: float = 5.0) -> Tensor:
    """CISPO: -sg(min(r, cap)) A lp, which is truncated_is with a high cap.

    Code: TRL `cispo`, where epsilon_high is the cap. verl and ROLL clip r at 1 +- epsilon, that is
    from below too: verl's is this one with clip_ratio_low >= 1 and cap = 1 + clip_ratio_high.
    """
    return _reinforce(tokens, weight=tokens.ratio.clamp(max=cap))


@token_loss
def topr(tokens: Tokens) -> Tensor:
    """Tapered off-policy REINFORCE: -sg(w) A lp, w = 1 where A > 0, else min(r, 1).

    In the paper r and the reward are those of whole responses.
    Code: Trinity-RFT `topr`, by token and with advantages; ROLL `topr`, w by the reward's sign.
    """
    tapered = tokens.ratio.clamp(max=1.0)
    return _reinforce(tokens, weight=torch.where(tokens.advantages > 0, 1.0, tapered))


@token_loss
def rec_oneside(tokens: Tokens, low: float = 0.8, high: float = 1.2) -> Tensor:
    """REC-OneSide-NoIS: -A lp, but 0 where A > 0 and r > high, and where A < 0 and r < low.

    Advantages are taken as given; the authors' are R - mean R, without the standard deviation.
    Code: Trinity-RFT `rec` (clip_mode one-side, weight none).
    """
    _check_bounds(low, high)
    return _reinforce(tokens, weight=~_beyond(tokens.ratio, tokens.advantages, low, high))


@token_loss
def asymre(tokens: Tokens, shift: float = 0.1) -> Tensor:
    """Asymmetric REINFORCE: -(A + shift) lp, with a lower baseline; r is not used.

    At r = 1, as everywhere: -(A + shift). shift is in units of the advantages.
    Code: Trinity-RFT `rec` (regularizer forward-kl), where A has no standard deviation.
    """
    return -(tokens.advantages + shift) * tokens.log_probs


@token_loss
def opmd(tokens: Tokens, tau: float = 0.1) -> Tensor:
    """Online policy mirror descent of Kimi k1.5: -A lp + (tau / 2) (lp - lb)^2.

    Here lp - lb is not clamped.
    Code: ROLL `kimi15`; verl `dro` (beta is tau); Trinity-RFT `rec` with regularizer k2, whose
    coefficient is tau / 2, so that its 0.1 is tau = 0.2. Trinity's own `opmd` is another loss,
    -A lp / (1 + tau).
    """
    penalty = tau / 2 * tokens.log_ratio.square()
    return penalty - tokens.advantages * tokens.log_probs


@token_loss
def dppo_tv(tokens: Tokens, delta: float = 0.15, cap: float = 20.0) -> Tensor:
    """DPPO-Binary-TV: -sg(min(r, cap)) A lp, but 0 where the probability has moved too far.

    Too far: A > 0 and p - q > delta, or A < 0 and q - p > delta.
    Code: verl `dppo_tv` (delta from its script; cap is clip_ratio_c); the authors' Stable-RL.
    """
    moved = tokens.log_probs.detach().exp() - tokens.rollout_log_probs.exp()
    kept = ~_beyond(moved, tokens.advantages, -delta, delta)
    return _reinforce(tokens, weight=kept * tokens.ratio.clamp(max=cap))


@token_loss
def sapo(tokens: Tokens, tau_positive: float = 1.0, tau_negative: float = 1.05) -> Tensor:
    """SAPO: -(4 / tau) sigmoid(tau (r - 1)) A, a soft gate in place of the clip.

    tau is tau_positive where A > 0, else tau_negative.
    Code: TRL `sapo`, verl `sapo`.
    """
    tau = torch.where(tokens.advantages > 0, tau_positive, tau_negative)
    gate = torch.sigmoid(tau * (tokens.ratio - 1))
    return -4 / tau * gate * tokens.advantages


@token_loss
def gspo(tokens: Tokens, low: float = 1 - 3e-4, high: float = 1 + 4e-4) -> Tensor:
    """GSPO: the clip of one ratio per response, s = exp(mean of lp - lb over the response).

    Each of the response's tokens has the loss -min(s A, clip(s, low, high) A). GSPO averages
    responses: use weights that give each response the same (sequence-mean). With train.py's
    token-mean, `gspo@8` is a token-mean of sequence losses, where long responses count more.
    At r = 1: -A, for a response whose weight and advantage are constant.
    Code: TRL (importance_sampling_level="sequence"); verl `gspo`, where a token's loss has a
    gradient at that token only: in sum the same if w and A are constant over the response.
    """
    _check_bounds(low, high)
    total = tokens.log_ratio.sum(1, keepdim=True)  # [N, 1]
    length = tokens.inside.sum(1, keepdim=True)  # [N, 1]
    response_ratio = _ratio(total / length.clamp(min=1))
    return _clip(response_ratio, tokens.advantages, low, high)


@token_loss
def dcpo(
    tokens: Tokens, epsilon_low: float = 0.16, epsilon_high: float = 0.2, high_max: float = 10.0
) -> Tensor:
    """DCPO: PPO's clip at bounds that are wider for unlikely tokens.

        low  = (1 + sqrt(max(1 - 4 epsilon_low / q, 0))) / 2
        high = min((1 + sqrt(1 + 4 epsilon_high / q)) / 2, high_max)

    The paper's smoothed advantages are not part of this.
    Code: the authors' (lime-RL/DCPO; epsilons of its README, 0.2 and 0.28 in its script).
    """
    q = tokens.rollout_log_probs.exp()
    low_root = (1 - 4 * epsilon_low / q).clamp(min=0).sqrt()
    high_root = (1 + 4 * epsilon_high / q).sqrt()
    low = (1 + low_root) / 2
    high = ((1 + high_root) / 2).clamp(max=high_max)
    return _clip(tokens.ratio, tokens.advantages, low, high)


@token_loss
def ce_gppo(
    tokens: Tokens,
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
    ratio = tokens.ratio.detach()
    if_clipped = torch.where(tokens.advantages > 0, beta_high * high, beta_low * low)
    is_clipped = _beyond(ratio, tokens.advantages, low, high)
    coefficient = torch.where(is_clipped, if_clipped, ratio)
    one = (tokens.log_probs - tokens.log_probs.detach()).exp()  # p / sg(p): its slope is 1
    return -coefficient * one * tokens.advantages


# ---------------------------------------------------------------- with one more tensor
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
    """Decoupled PPO: the clip around a proximal policy, exp(lx - lb) clip(exp(lp - lx)).

    lx is proximal_log_probs [N, T]: under an average of the weights, or under the policy when the
    update began. With lx = lb everywhere it is ppo.
    At r = 1: -A if lx = lb.
    Code: openai/ppo-ewma, with r at most 100.
    """
    tokens = _read(log_probs, rollout_log_probs, advantages, mask)
    lx = _fill(proximal_log_probs.detach(), tokens.inside)
    return _decoupled(tokens, lx, low, high)


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
    share = 1 - 1 / ages.clamp(min=1)
    lx = tokens.rollout_log_probs + share * tokens.log_ratio.detach()
    return _decoupled(tokens, lx, low, high)


def _decoupled(tokens: Tokens, lx: Tensor, low: float, high: float) -> Tensor:
    _check_bounds(low, high)
    weight = _ratio(lx - tokens.rollout_log_probs)
    return weight * _clip(_ratio(tokens.log_probs - lx), tokens.advantages, low, high)
