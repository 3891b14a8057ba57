"""Tests of other_losses.py, against every loss token by token in float64."""

import math
from types import SimpleNamespace

import pytest
import torch
from torch.testing import assert_close

import other_losses
from other_losses import LOSSES

# The test of a loss fails if one of its defaults changes.
CLIP = dict(low=0.8, high=1.2)
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
    "decoupled_ppo": CLIP,
    "a_3po": CLIP,
}
INPUTS = ["log_probs", "rollout_log_probs", "advantages", "mask"]
MORE_INPUTS = {"decoupled_ppo": ["proximal_log_probs"], "a_3po": ["ages"]}
# In the first two pairs one bound is 1, so that every token with r = 1 lies on it.
BOUNDS = [(1.0, 1.1), (0.9, 1.0), (0.0, 1e9)]
every_loss = pytest.mark.parametrize("name", [*LOSSES, *MORE_INPUTS])


# ---------------------------------------------------------------- the oracle
def clip(r, a, low, high):
    """Return -min(r A, clip(r, low, high) A). A ratio that is its bound keeps its gradient."""
    return -min(r, high) * a if a > 0 else -max(r, low) * a


def one_token(name, token, o):
    """Return the loss of a token. Its numbers (0-dim, float64) and the options `o` are attributes.

    lp alone has a gradient.
    """
    lp = token.log_probs
    lb = token.rollout_log_probs
    a = token.advantages
    r = (lp - lb).exp()
    weight = r.item()
    match name:
        case "ppo":
            return clip(r, a, o.low, o.high)
        case "dual-clip":
            loss = clip(r, a, o.low, o.high)
            return min(loss, -o.cap * a) if a < 0 else loss
        case "opmd":
            return -a * lp + o.tau / 2 * (lp - lb) ** 2
        case "sapo":
            tau = o.tau_positive if a > 0 else o.tau_negative
            return -4 / tau * a / (1 + (-tau * (r - 1)).exp())
        case "dcpo":
            q = lb.exp()
            low_square = max(1 - 4 * o.epsilon_low / q, 0)
            high_square = 1 + 4 * o.epsilon_high / q
            high = (1 + high_square**0.5) / 2
            return clip(r, a, (1 + low_square**0.5) / 2, min(high, o.high_max))
        case "ce-gppo":
            if a > 0 and r > o.high:
                weight = o.beta_high * o.high
            elif a < 0 and r < o.low:
                weight = o.beta_low * o.low
            return -weight * (lp - lp.item()).exp() * a
        case "gspo":
            return clip(token.response_ratio, a, o.low, o.high)
        case "decoupled_ppo" | "a_3po":
            lx = token.proximal_log_probs
            if name == "a_3po":
                age = max(token.ages, 1)
                lx = lb + (age - 1) / age * (lp.item() - lb)
            return (lx - lb).exp() * clip((lp - lx).exp(), a, o.low, o.high)
        # The other losses are -sg(weight) A lp, with weight r unless they change it.
        case "truncated-is" | "cispo":
            weight = min(weight, o.cap)
        case "topr":
            weight = 1.0 if a > 0 else min(weight, 1.0)
        case "rec-oneside":
            weight = float(r <= o.high if a > 0 else r >= o.low)
        case "asymre":
            weight = 1.0
            a = a + o.shift
        case "dppo-tv":
            moved = lp.exp() - lb.exp()
            is_kept = moved <= o.delta if a > 0 else moved >= -o.delta
            weight = min(weight, o.cap) * float(is_kept)
    return -weight * a * lp


def literal(name, batch, **options):
    """Return losses [N, T], token by token."""
    options = SimpleNamespace(**DEFAULTS[name] | options)
    log_ratio = batch["log_probs"].double() - batch["rollout_log_probs"].double()
    losses = torch.zeros(15, 14)
    for n, t in batch["mask"].nonzero().tolist():
        token = SimpleNamespace(**{key: tensor[n, t].double() for key, tensor in batch.items()})
        token.response_ratio = log_ratio[n, batch["mask"][n]].mean().exp()
        losses[n, t] = one_token(name, token, options)
    return losses


# ---------------------------------------------------------------- batches
def make_batch(scale=1.0):
    """Return responses of 0 to 14 tokens [15, 14]. Log-ratios are multiplied by `scale`."""
    generator = torch.Generator().manual_seed(0)

    def mixed(*values):
        chosen = torch.randint(len(values), (15, 14), generator=generator)
        return torch.tensor(values)[chosen]

    log_ratio = mixed(-12, -1.5, -0.25, -0.2, 0, 0.15, 0.2, 0.26, 0.7, 1.5, 4)
    rollout_log_probs = -mixed(0.02, 0.3, 0.9, 4, 20)
    lengths = torch.arange(15)[:, None]
    return {
        "log_probs": rollout_log_probs + scale * log_ratio,
        "rollout_log_probs": rollout_log_probs,
        "advantages": mixed(-1.7, 0, 2),
        "mask": torch.arange(14) < lengths,
        "proximal_log_probs": rollout_log_probs + mixed(-0.6, 0, 0.3),
        "ages": mixed(0, 1, 2, 3),
    }


RAGGED = make_batch()
NEAR_1 = make_batch(scale=1e-3)


def losses_of(name, batch, **options):
    function = LOSSES.get(name) or getattr(other_losses, name)
    inputs = INPUTS + MORE_INPUTS.get(name, [])
    return function(**{key: batch[key] for key in inputs}, **options)


def with_gradient(function, name, batch, **options):
    """Return losses [N, T], and the gradient [N, T] of their sum."""
    leaf = batch["log_probs"].clone().requires_grad_()
    losses = function(name, batch | {"log_probs": leaf}, **options)
    (gradient,) = torch.autograd.grad(losses.sum(), leaf)
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
    for batch in (RAGGED, NEAR_1):
        for options in tried:
            found = with_gradient(losses_of, name, batch, **options)
            expected = with_gradient(literal, name, batch, **options)
            assert_close(found, expected, rtol=2e-5, atol=2e-5)


@every_loss
def test_what_may_stand_in_the_inputs(name):
    """NaN outside the mask has no effect. One advantage per response counts at each of its tokens.
    bfloat16 is subtracted in float32, and only log_probs get a gradient."""
    column = RAGGED["advantages"][:, :1]
    given = RAGGED | {"advantages": column.squeeze(1), "mask": RAGGED["mask"].float()}
    meant = RAGGED | {"advantages": column.expand(15, 14)}
    for key in ("log_probs", "rollout_log_probs", "proximal_log_probs"):
        low = RAGGED[key].bfloat16()
        meant[key] = low.float()
        given[key] = low.masked_fill(~RAGGED["mask"], math.nan).requires_grad_(key != "log_probs")
    assert_close(losses_of(name, given), losses_of(name, meant))
    assert not losses_of(name, given).requires_grad


@every_loss
def test_nan_inside_the_mask_shows(name):
    losses = losses_of(name, RAGGED | {"log_probs": RAGGED["log_probs"] * math.nan})
    assert losses[RAGGED["mask"]].isnan().all()


@pytest.mark.parametrize("key", ["log_probs", "mask"])
def test_a_wrong_shape_is_refused(key):
    with pytest.raises(ValueError, match="must have the same shape"):
        losses_of("ppo", RAGGED | {key: RAGGED[key].flatten()})


@pytest.mark.parametrize("name", [name for name in DEFAULTS if "low" in DEFAULTS[name]])
def test_epsilons_are_refused(name):
    with pytest.raises(ValueError, match="ratios such as 0.8 and 1.2"):
        losses_of(name, RAGGED, low=0.2, high=0.28)
