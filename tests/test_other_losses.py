"""Tests of support/other_losses.py: every loss and its slope, by token, in Python's floats."""

import math
from types import SimpleNamespace

import pytest
import torch
from torch.testing import assert_close

from support import other_losses
from support.other_losses import LOSSES

# The test of a loss fails if one of its defaults changes.
CLIP = dict(low=0.8, high=1.2)
NO_CLIP = dict(low=0.0, high=math.inf)
DEFAULTS = {
    "reinforce": {},
    "ppo": CLIP,
    "dual-clip": CLIP | dict(cap=3.0),
    "truncated-is": dict(cap=1.0),
    "cispo": dict(cap=5.0),
    "topr": {},
    "rec-oneside": CLIP,
    "asymre": dict(shift=0.1),
    "opmd": dict(tau=0.1),
    "dppo-tv": dict(delta=0.15, cap=20.0),
    "sapo": dict(tau_positive=1.0, tau_negative=1.05),
    "gspo": dict(low=1 - 3e-4, high=1 + 4e-4),
    "dcpo": dict(epsilon_low=0.16, epsilon_high=0.2, high_max=10.0),
    "ce-gppo": CLIP | dict(beta_low=0.5, beta_high=1.0),
    "smoothing": dict(alpha=0.9),
    "decoupled_ppo": CLIP,
    "a_3po": CLIP,
}
FUNCTIONS = vars(other_losses) | LOSSES
MORE_INPUTS = {"decoupled_ppo": ["proximal_log_probs"], "a_3po": ["ages"]}
# In the first two pairs one bound is 1, so that every token with r = 1 lies on it.
BOUNDS = [(1.0, 1.1), (0.9, 1.0), (1.02, 3.0), (0.0, math.inf)]
every_loss = pytest.mark.parametrize("name", [*LOSSES, *MORE_INPUTS])


# ---------------------------------------------------------------- the oracle
def surrogate(r, a, low, high):
    """Return -min(r A, clip(r, low, high) A) and its slope, the derivative with respect to lp."""
    clipped = min(max(r, low), high)
    has_slope = r <= high if a > 0 else r >= low
    return -min(r * a, clipped * a), -r * a if has_slope else 0.0


def one_token(name, token, o):
    """Return loss and slope of a token. Its numbers and the options `o` are attributes.

    A loss without a clip has the bounds 0 and infinity.
    """
    lp = token.log_probs
    lb = token.rollout_log_probs
    a = token.advantages
    r = math.exp(lp - lb)
    p = math.exp(lp)
    q = math.exp(lb)
    loss, slope = surrogate(r, a, o.low, o.high)
    match name:
        case "ppo":
            return loss, slope
        case "dual-clip":
            if a < 0 and r > o.cap:
                return -o.cap * a, 0.0
            return loss, slope
        case "opmd":
            moved = lp - lb
            loss = -a * lp + o.tau / 2 * moved**2
            slope = -a + o.tau * moved
            return loss, slope
        case "sapo":
            tau = o.tau_positive if a > 0 else o.tau_negative
            gate = 1 / (1 + math.exp(-tau * (r - 1)))
            loss = -4 / tau * gate * a
            slope = -4 * gate * (1 - gate) * r * a
            return loss, slope
        case "dcpo":
            low_square = max(1 - 4 * o.epsilon_low / q, 0)
            high_square = 1 + 4 * o.epsilon_high / q
            low = (1 + math.sqrt(low_square)) / 2
            high = (1 + math.sqrt(high_square)) / 2
            return surrogate(r, a, low, min(high, o.high_max))
        case "ce-gppo":
            if slope == 0:
                r = o.beta_high * o.high if a > 0 else o.beta_low * o.low
            return -r * a, -r * a
        case "smoothing":
            loss = -p * q**-o.alpha * a
            return loss, loss
        case "gspo":
            return surrogate(token.response_ratio, a, o.low, o.high)
        case "decoupled_ppo" | "a_3po":
            lx = token.proximal_log_probs
            if name == "a_3po":
                age = max(token.ages, 1)
                lx = lb + (age - 1) / age * (lp - lb)
            loss, slope = surrogate(math.exp(lp - lx), a, o.low, o.high)
            weight = math.exp(lx - lb)
            return weight * loss, weight * slope
        # The other losses are -sg(weight) A lp.
        case "reinforce":
            weight = r
        case "truncated-is" | "cispo":
            weight = min(r, o.cap)
        case "topr":
            weight = 1.0 if a > 0 else min(r, 1.0)
        case "rec-oneside":
            weight = 0.0 if slope == 0 else 1.0
        case "asymre":
            weight = 1.0
            a += o.shift
        case "dppo-tv":
            moved = p - q if a > 0 else q - p
            weight = 0.0 if moved > o.delta else min(r, o.cap)
        case _:
            raise KeyError(name)
    return -weight * a * lp, -weight * a


def literal(name, batch, options):
    """Return losses [N, T], and the gradient [N, T] of their sum weighted by batch["w"]."""
    losses = torch.zeros_like(batch["log_probs"])
    gradient = torch.zeros_like(losses)
    options = SimpleNamespace(**NO_CLIP | options)
    log_ratio = batch["log_probs"] - batch["rollout_log_probs"]
    for n, t in batch["mask"].nonzero().tolist():
        token = SimpleNamespace(**{key: tensor[n, t].item() for key, tensor in batch.items()})
        response = batch["mask"][n]
        token.response_ratio = math.exp(log_ratio[n, response].mean())
        losses[n, t], slope = one_token(name, token, options)
        if name == "gspo":  # the loss depends on all of the response's tokens
            gradient[n, response] += token.w * slope / response.sum()
        else:
            gradient[n, t] = token.w * slope
    return losses, gradient


# ---------------------------------------------------------------- batches
def make_batch(scale=1.0):
    """Return responses of 0 to 14 tokens [30, 14]. Log-ratios are multiplied by `scale`."""
    generator = torch.Generator().manual_seed(0)

    def mixed(*values):
        chosen = torch.randint(len(values), (30, 14), generator=generator)
        return torch.tensor(values)[chosen]

    log_ratio = mixed(-12, -1.5, -0.25, -0.2, 0, 0.15, 0.2, 0.26, 0.7, 1.5, 4)
    rollout_log_probs = -mixed(0.02, 0.3, 0.9, 4, 20)
    lengths = torch.arange(30)[:, None] % 15
    return {
        "log_probs": rollout_log_probs + scale * log_ratio,
        "rollout_log_probs": rollout_log_probs,
        "advantages": mixed(-1.7, 0, 2),
        "mask": torch.arange(14) < lengths,
        "w": mixed(0.1, 6.1),
        "proximal_log_probs": rollout_log_probs + mixed(-0.6, 0, 0.3),
        "ages": mixed(0, 1, 2, 3),
    }


RAGGED = make_batch()
BATCHES = {
    "ragged": RAGGED,
    "r near 1": make_batch(scale=1e-3),
}


def inputs_of(name):
    return ["log_probs", "rollout_log_probs", "advantages", "mask", *MORE_INPUTS.get(name, [])]


def losses_of(name, batch, **options):
    return FUNCTIONS[name](**{key: batch[key] for key in inputs_of(name)}, **options)


def call(name, batch, **options):
    """Return losses [N, T], and the gradient [N, T] of their sum weighted by batch["w"]."""
    leaf = batch["log_probs"].clone().requires_grad_()
    losses = losses_of(name, batch | {"log_probs": leaf}, **options)
    assert losses.dtype == torch.float32
    (gradient,) = torch.autograd.grad((batch["w"] * losses).sum(), leaf)
    return losses.detach(), gradient


# ---------------------------------------------------------------- every loss
@every_loss
def test_value_and_gradient_equal_the_literal_formula(name):
    """The options are the defaults, other numbers, and bounds on which tokens lie."""
    defaults = DEFAULTS[name]
    others = defaults.keys() - {"low", "high"}
    tried = [{}, {option: 0.55 * defaults[option] for option in others}]
    if "low" in defaults:
        tried += [dict(low=low, high=high) for low, high in BOUNDS]
    for case, batch in BATCHES.items():
        for options in tried:
            found = call(name, batch, **options)
            expected = literal(name, batch, defaults | options)
            for tensor, exact in zip(found, expected):
                assert torch.allclose(tensor, exact, rtol=2e-5, atol=2e-5), (case, options)


@every_loss
def test_what_may_stand_in_the_inputs(name):
    """NaN outside the mask has no effect. One advantage per response counts at each of its tokens.
    bfloat16 is subtracted in float32, and only log_probs get a gradient."""
    column = RAGGED["advantages"][:, :1]
    given = RAGGED | {"advantages": column.squeeze(1), "mask": RAGGED["mask"].float()}
    meant = RAGGED | {"advantages": column.expand(30, 14)}
    for key in ("log_probs", "rollout_log_probs", "proximal_log_probs"):
        low = RAGGED[key].bfloat16()
        meant[key] = low.float()
        given[key] = low.masked_fill(~RAGGED["mask"], math.nan).requires_grad_(key != "log_probs")
    assert_close(call(name, given)[0], call(name, meant)[0])
    assert not losses_of(name, given).requires_grad


@every_loss
def test_nan_inside_the_mask_shows(name):
    losses, _ = call(name, RAGGED | {"log_probs": RAGGED["log_probs"] * math.nan})
    assert losses[RAGGED["mask"]].isnan().all()


@every_loss
def test_what_does_not_fit_is_named(name):
    for key in inputs_of(name):
        with pytest.raises(ValueError, match=f"^{key} "):
            call(name, RAGGED | {key: RAGGED[key].flatten()})
    if "low" in DEFAULTS[name]:
        for low, high in [(0.2, 0.28), (1.3, 1.2)]:
            with pytest.raises(ValueError, match="low and high"):
                call(name, RAGGED, low=low, high=high)
