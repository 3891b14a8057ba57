"""neighbours/losses.py against literal code: every loss of one token, and its slope, in floats.

Where verl is installed, against verl's losses too. Where an engine differs by design, the loss's
docstring says so.
"""

import math

import pytest
import torch

from neighbours import losses as neighbours
from neighbours.losses import LOSSES, m2po_bounds

# Functions to copy, with the tensors that they take beside the usual four.
FURTHER = {
    "decoupled_ppo": ["proximal_log_probs"],
    "a_3po": ["ages"],
    "erc": ["entropy", "rollout_entropy"],
    "off_policy_grpo": ["start_log_probs"],
}
FUNCTIONS = LOSSES | {name: getattr(neighbours, name) for name in FURTHER}
INPUTS = ["log_probs", "rollout_log_probs", "advantages", "mask"]
# The defaults, once more: a loss whose default changes fails here.
DEFAULTS = {
    "reinforce": {},
    "ppo": dict(low=0.8, high=1.2),
    "dual-clip": dict(low=0.8, high=1.2, cap=3.0),
    "truncated-is": dict(cap=1.0),
    "cispo": dict(cap=5.0),
    "topr": {},
    "rec-oneside": dict(low=0.8, high=1.2),
    "asymre": dict(shift=0.1),
    "opmd": dict(tau=0.1),
    "dppo-tv": dict(delta=0.15, cap=20.0),
    "sapo": dict(tau_positive=1.0, tau_negative=1.05),
    "gspo": dict(low=1 - 3e-4, high=1 + 4e-4),
    "dcpo": dict(epsilon_low=0.16, epsilon_high=0.2, high_max=10.0),
    "ce-gppo": dict(low=0.8, high=1.2, beta_low=0.5, beta_high=1.0),
    "smoothing": dict(alpha=0.9),
    "decoupled_ppo": dict(low=0.8, high=1.2),
    "a_3po": dict(low=0.8, high=1.2),
    "erc": dict(low=0.8, high=1.28, change=(0.95, 1.05)),
    "off_policy_grpo": dict(epsilon=0.2),
}
NAMES = list(DEFAULTS)
# Other values, and bounds at 1, on which all tokens with r = 1 lie.
BOUNDS = [dict(low=0.6, high=1.5), dict(low=1.0, high=1.1), dict(low=0.9, high=1.0)]
OTHERS = {
    "ppo": [dict(low=1.02, high=3.0), dict(low=0.0, high=math.inf)],
    "dual-clip": [dict(cap=1.5)],
    "truncated-is": [dict(cap=2.0), dict(cap=0.7)],
    "cispo": [dict(cap=1.28)],
    "asymre": [dict(shift=0.7)],
    "opmd": [dict(tau=1.3)],
    "dppo-tv": [dict(delta=0.03, cap=1.5)],
    "sapo": [dict(tau_positive=0.4, tau_negative=3.0)],
    "dcpo": [dict(epsilon_low=0.02, epsilon_high=0.6, high_max=1.5)],
    "ce-gppo": [dict(beta_low=0.3, beta_high=1.7)],
    "smoothing": [dict(alpha=1.0), dict(alpha=0.2)],
    "erc": [dict(change=(0.5, 1.0)), dict(change=(1.0, 2.0))],
    "off_policy_grpo": [dict(epsilon=0.05), dict(epsilon=1.5)],
}


# ---------------------------------------------------------------- the oracle
def surrogate(r, a, low, high):
    """-min(r A, clip(r, low, high) A), and its slope: the derivative with respect to lp."""
    clipped = min(max(r, low), high)
    above = a > 0 and r > high
    below = a < 0 and r < low
    loss = -min(r * a, clipped * a)
    slope = 0.0 if above or below else -r * a
    return loss, slope


def weighted(weight, a, lp):
    """-sg(weight) A lp, and its slope."""
    return -weight * a * lp, -weight * a


def one_token(name, lp, lb, a, o, further):
    """Loss and slope of one token; o: the options, further: what the loss takes besides."""
    r = math.exp(lp - lb)
    p = math.exp(lp)
    q = math.exp(lb)
    above = "high" in o and a > 0 and r > o["high"]
    below = "low" in o and a < 0 and r < o["low"]
    match name:
        case "reinforce":
            return weighted(r, a, lp)
        case "ppo":
            return surrogate(r, a, o["low"], o["high"])
        case "dual-clip":
            if a < 0 and r > o["cap"]:
                return -o["cap"] * a, 0.0
            return surrogate(r, a, o["low"], o["high"])
        case "truncated-is" | "cispo":
            return weighted(min(r, o["cap"]), a, lp)
        case "topr":
            return weighted(1.0 if a > 0 else min(r, 1.0), a, lp)
        case "rec-oneside":
            return weighted(0.0 if above or below else 1.0, a, lp)
        case "asymre":
            return weighted(1.0, a + o["shift"], lp)
        case "opmd":
            moved = lp - lb
            loss = -a * lp + o["tau"] / 2 * moved**2
            slope = -a + o["tau"] * moved
            return loss, slope
        case "dppo-tv":
            if a > 0 and p - q > o["delta"]:
                return 0.0, 0.0
            if a < 0 and q - p > o["delta"]:
                return 0.0, 0.0
            return weighted(min(r, o["cap"]), a, lp)
        case "sapo":
            tau = o["tau_positive"] if a > 0 else o["tau_negative"]
            gate = 1 / (1 + math.exp(-tau * (r - 1)))
            loss = -4 / tau * gate * a
            slope = -4 * gate * (1 - gate) * r * a
            return loss, slope
        case "dcpo":
            low_square = max(1 - 4 * o["epsilon_low"] / q, 0)
            high_square = 1 + 4 * o["epsilon_high"] / q
            low = 0.5 * (1 + math.sqrt(low_square))
            high = 0.5 * (1 + math.sqrt(high_square))
            return surrogate(r, a, low, min(high, o["high_max"]))
        case "ce-gppo":
            if above:
                r = o["beta_high"] * o["high"]
            if below:
                r = o["beta_low"] * o["low"]
            return -r * a, -r * a
        case "smoothing":
            loss = -p * q ** -o["alpha"] * a
            return loss, loss
        case "decoupled_ppo" | "a_3po":
            (lx,) = further
            if name == "a_3po":
                age = max(lx, 1)
                lx = lb + (age - 1) / age * (lp - lb)
            loss, slope = surrogate(math.exp(lp - lx), a, o["low"], o["high"])
            weight = math.exp(lx - lb)
            return weight * loss, weight * slope
        case "erc":
            entropy, rollout_entropy = further
            least, most = o["change"]
            change = (entropy + 1e-8) / (rollout_entropy + 1e-8)
            loss, slope = surrogate(r, a, o["low"], o["high"])
            return loss, slope if least < change < most else 0.0
        case "off_policy_grpo":
            x = math.exp(further[0] - lb)
            return surrogate(r, a, max(x - o["epsilon"], 0.0), x + o["epsilon"])
    raise KeyError(name)


def literal(name, batch, o):
    """Losses [N, T], and the gradient [N, T] of their sum weighted by batch["w"], in float64."""
    losses = torch.zeros_like(batch["log_probs"], dtype=torch.float64)
    gradient = torch.zeros_like(losses)
    log_ratio = batch["log_probs"].double() - batch["rollout_log_probs"].double()
    for n, t in batch["mask"].nonzero().tolist():
        lp, lb, a = (batch[key][n, t].item() for key in INPUTS[:3])
        w = batch["w"][n, t]
        if name == "gspo":
            # The loss depends on the mean over the response, and so on all of its tokens.
            inside = batch["mask"][n]
            s = math.exp(log_ratio[n, inside].mean())
            losses[n, t], slope = surrogate(s, a, o["low"], o["high"])
            gradient[n, inside] += w * slope / inside.sum()
        else:
            further = [batch[key][n, t].item() for key in FURTHER.get(name, [])]
            losses[n, t], slope = one_token(name, lp, lb, a, o, further)
            gradient[n, t] = w * slope
    return losses, gradient


# ---------------------------------------------------------------- batches
def make_batch(scale=1.0, full=False):
    """[30, 14]: all combinations of the numbers below, log-ratios times `scale`, in mixed order.

    Responses of 0 to 14 tokens, or of 14. The last keys are what some loss needs besides.
    """
    combinations = torch.cartesian_prod(
        torch.tensor([-12, -1.5, -0.4, -0.25, -0.2, -0.02, 0, 0.02, 0.15, 0.2, 0.26, 0.7, 1.5, 4]),
        torch.tensor([-0.02, -0.3, -0.9, -1.7, -4, -20]),
        torch.tensor([-1.7, -0.5, 0, 0.6, 2]),
    )
    i = torch.arange(420).view(30, 14)
    mixed = combinations[i * 37 % 420]  # 37 and 420 have no divisor in common
    log_ratio, rollout_log_probs, advantages = mixed.unbind(2)
    lengths = torch.full((30, 1), 14) if full else i[:, :1] // 14 % 15
    return {
        "log_probs": rollout_log_probs + scale * log_ratio,
        "rollout_log_probs": rollout_log_probs,
        "advantages": advantages,
        "mask": torch.arange(14) < lengths,
        "w": 0.1 + i % 7,
        "proximal_log_probs": rollout_log_probs + scale * 0.3 * (i % 5 - 2),
        "start_log_probs": rollout_log_probs + scale * 0.5 * (i % 3 - 1),
        "ages": i % 4,
        "entropy": 0.5 * (i % 4) * (1 + 0.03 * (i % 5 - 2)),
        "rollout_entropy": 0.5 * (i % 4),
    }


RAGGED = make_batch()
BATCHES = {
    "all": make_batch(full=True),
    "ragged": RAGGED,
    "r near 1": make_batch(scale=1e-3),
    "r = 1": make_batch(scale=0.0),
    "no response": {key: tensor[:0] for key, tensor in RAGGED.items()},
}


def call(name, batch, **options):
    """Losses, and the gradient at log_probs of their sum weighted by batch["w"]: both [N, T]."""
    x = batch["log_probs"].clone().requires_grad_()
    others = [batch[key] for key in INPUTS[1:]]
    further = {key: batch[key] for key in FURTHER.get(name, [])}
    losses = FUNCTIONS[name](x, *others, **further, **options)
    assert losses.dtype == torch.float32
    (gradient,) = torch.autograd.grad((batch["w"] * losses).sum(), x)
    return losses.detach(), gradient


def assert_equal(found, expected):
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])


# ---------------------------------------------------------------- every loss
@pytest.mark.parametrize("name", NAMES)
def test_value_and_gradient_equal_the_literal_formula(name):
    """Also on the bounds themselves, and with the defaults."""
    bounds = BOUNDS if "low" in DEFAULTS[name] else []
    for case, batch in BATCHES.items():
        for options in [{}, *bounds, *OTHERS.get(name, [])]:
            found = call(name, batch, **options)
            expected = literal(name, batch, DEFAULTS[name] | options)
            for tensor, exact in zip(found, expected, strict=True):
                error = (tensor - exact).abs() / (1 + exact.abs())
                assert (error < 2e-5).all(), (case, options)
                assert (tensor[~batch["mask"]] == 0).all(), (case, options)


@pytest.mark.parametrize("name", NAMES)
def test_what_stands_outside_the_mask_has_no_effect_and_nan_inside_shows(name):
    """A fill after the computation would keep NaN, because 0 * NaN is NaN."""
    outside = ~RAGGED["mask"]
    expected = call(name, RAGGED)
    for value in (math.nan, math.inf):
        broken = dict(RAGGED)
        for key in set(RAGGED) - {"w", "mask"}:
            fill = value if RAGGED[key].is_floating_point() else -7
            broken[key] = RAGGED[key].masked_fill(outside, fill)
        assert_equal(call(name, broken), expected)
        assert_equal(call(name, broken | {"mask": RAGGED["mask"].float()}), expected)
    losses, _ = call(name, RAGGED | {"log_probs": torch.full((30, 14), math.nan)})
    assert losses[RAGGED["mask"]].isnan().all()


@pytest.mark.parametrize("name", NAMES)
def test_one_advantage_per_response_is_the_same_at_each_of_its_tokens(name):
    advantages = RAGGED["advantages"][:, 3]
    repeated = advantages[:, None].expand(30, 14)
    found = call(name, RAGGED | {"advantages": advantages})
    assert_equal(found, call(name, RAGGED | {"advantages": repeated}))


@pytest.mark.parametrize("name", NAMES)
def test_low_precision_log_probs_are_subtracted_in_float32(name):
    low = {key: RAGGED[key].bfloat16() for key in INPUTS[:2]}
    rounded = {key: tensor.float() for key, tensor in low.items()}
    assert torch.equal(call(name, RAGGED | low)[0], call(name, RAGGED | rounded)[0])


@pytest.mark.parametrize("name", NAMES)
def test_gradients_flow_through_log_probs_alone(name):
    """Also where the other tensors were made under inference_mode, which autograd cannot keep."""
    with torch.inference_mode():
        others = {key: RAGGED[key].clone() for key in set(RAGGED) - {"log_probs", "w"}}
    assert_equal(call(name, RAGGED | others), call(name, RAGGED))

    leaves = {}
    for key in set(RAGGED) - {"log_probs", "w"}:
        leaves[key] = RAGGED[key].clone().requires_grad_(RAGGED[key].is_floating_point())
    call(name, RAGGED | leaves)
    inputs = [(RAGGED | leaves)[key] for key in INPUTS]
    further = {key: leaves[key] for key in FURTHER.get(name, [])}
    assert not FUNCTIONS[name](*inputs, **further).requires_grad


@pytest.mark.parametrize("name", NAMES)
def test_what_does_not_fit_is_named(name):
    wrong = {key: RAGGED[key][:, :5] for key in [*INPUTS[1:], *FURTHER.get(name, [])]}
    wrong["log_probs"] = RAGGED["log_probs"].flatten()
    for key, tensor in wrong.items():
        with pytest.raises(ValueError, match=f"^{key} "):
            call(name, RAGGED | {key: tensor})
    if "low" in DEFAULTS[name]:
        for low, high in [(0.2, 0.28), (3e-4, 4e-4), (0.8, 0.99), (1.3, 1.2), (math.nan, 1.2)]:
            with pytest.raises(ValueError, match="low and high"):
                call(name, RAGGED, low=low, high=high)


# ---------------------------------------------------------------- M2PO
@pytest.mark.parametrize(
    "budget, tau_squared", [(0.5, 0.5), (1, 1), (1.2, 1.4), (2.4, 3.8), (2.5, math.inf)]
)
def test_m2pos_bounds_limit_the_mean_square_over_h(budget, tau_squared):
    """H holds two tokens of each of the first two rows; of the other tokens, one has moved against
    its advantage, one stands outside the mask, and those of the last row have no advantage.

    The mean of min(1, tau^2) and min(4, tau^2) is the budget.
    """
    log_ratio = torch.tensor([[1, 2, -3, math.nan], [-2, -1, 3, math.nan], [1, 2, 3, math.nan]])
    advantages = torch.tensor([0.5, -2.0, 0.0])
    inputs = (log_ratio, torch.zeros(3, 4), advantages, ~log_ratio.isnan())
    tau = math.sqrt(tau_squared)
    bounds = m2po_bounds(*inputs, budget=budget, low_max=1, high_min=1)
    assert bounds == pytest.approx((math.exp(-tau), math.exp(tau)))
    assert m2po_bounds(*inputs) == (0.7, 1.5)
    assert m2po_bounds(*inputs[:2], -advantages, log_ratio == 1) == (0.0, math.inf)


# ---------------------------------------------------------------- a real engine
@pytest.mark.parametrize("scale", [0.01, 0.5])
@pytest.mark.parametrize(
    "name, mode, changes",
    [
        ("ppo", "vanilla", dict(clip_ratio_c=1e9)),
        ("dual-clip", "vanilla", {}),
        ("dppo-tv", "dppo_tv", dict(clip_ratio_low=0.15, clip_ratio_high=0.15, clip_ratio_c=20.0)),
        ("sapo", "sapo", {}),
        ("cispo", "cispo", dict(clip_ratio_low=10.0, clip_ratio_high=4.0)),
        ("gspo", "gspo", dict(clip_ratio_low=3e-4, clip_ratio_high=4e-4)),
    ],
)
def test_verls_own_loss(name, mode, changes, scale):
    """Its registered loss, called by keyword as verl's workers call it. Written for verl 0.9.1."""
    pytest.importorskip("verl")
    from verl.trainer.ppo.core_algos import get_policy_loss_fn
    from verl.workers.config import FSDPActorConfig

    config = FSDPActorConfig(
        strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, **changes
    )
    batch = {key: tensor[1:15] for key, tensor in make_batch(scale).items()}  # no empty response
    batch["advantages"] = batch["advantages"][:, :1].expand(14, 14)
    batch["w"] = batch["mask"] / (14 * batch["mask"].sum(1, keepdim=True))

    x = batch["log_probs"].clone().requires_grad_()
    expected, _ = get_policy_loss_fn(mode)(
        old_log_prob=batch["rollout_log_probs"],
        log_prob=x,
        advantages=batch["advantages"],
        response_mask=batch["mask"].float(),
        loss_agg_mode="seq-mean-token-mean",
        config=config,
    )
    expected.backward()
    losses, gradient = call(name, batch)
    assert (batch["w"] * losses).sum().item() == pytest.approx(expected.item(), rel=1e-5, abs=1e-7)
    torch.testing.assert_close(gradient, x.grad, rtol=1e-5, atol=1e-8)
    assert x.grad.count_nonzero() > 10
