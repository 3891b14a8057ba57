"""support/objectives.py against literal code.

Every loss of one token is written again in plain Python floats, and differentiated by dual numbers.
"""

import ast
import inspect
import math
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from test_bapo import HOST_READS, UNORDERED, Operators

import bapo
from support import objectives
from support.objectives import OBJECTIVES, m2po_bounds, with_inputs

# The defaults, once more: an objective whose default changes fails here.
DEFAULTS = {
    "reinforce": {},
    "ppo": dict(low=0.8, high=1.2),
    "clip-higher": dict(low=0.8, high=1.28),
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
    "m2po": dict(budget=0.04, low_max=0.7, high_min=1.5),
    "dcpo": dict(epsilon_low=0.16, epsilon_high=0.2, high_max=10.0),
    "ce-gppo": dict(low=0.8, high=1.2, beta_low=0.5, beta_high=1.0),
    "smoothing": dict(alpha=0.9),
    "decoupled-ppo": dict(low=0.8, high=1.2),
    "a-3po": dict(low=0.8, high=1.2),
    "erc": dict(low=0.8, high=1.28, change=(0.95, 1.05)),
    "off-policy-grpo": dict(epsilon=0.2),
}
NAMES = list(DEFAULTS)
# Other values of every option, and bounds at 1, on which all tokens with r = 1 lie.
OTHERS = {
    "ppo": [
        dict(low=0.5, high=2.5),
        dict(low=1.0, high=1.1),
        dict(low=0.9, high=1.0),
        dict(low=1.02, high=3.0),
    ],
    "clip-higher": [dict(low=0.7, high=1.4)],
    "dual-clip": [dict(low=0.7, high=1.1, cap=1.5), dict(low=1.0, high=1.1)],
    "truncated-is": [dict(cap=2.0), dict(cap=0.7)],
    "cispo": [dict(cap=1.28)],
    "rec-oneside": [
        dict(low=0.6, high=1.5),
        dict(low=1.0, high=1.1),
        dict(low=0.9, high=1.0),
    ],
    "asymre": [dict(shift=0.0), dict(shift=0.7)],
    "opmd": [dict(tau=1.3)],
    "dppo-tv": [dict(delta=0.03, cap=1.5)],
    "sapo": [dict(tau_positive=0.4, tau_negative=3.0)],
    "gspo": [dict(low=0.95, high=1.1), dict(low=1.0, high=1.1), dict(low=0.9, high=1.0)],
    "m2po": [
        dict(budget=0.3, low_max=1.0, high_min=1.0),
        dict(budget=1e-3, low_max=0.95, high_min=1.02),
        dict(bounds=(0.9, 1.1)),
    ],
    "dcpo": [dict(epsilon_low=0.02, epsilon_high=0.6, high_max=1.5)],
    "ce-gppo": [
        dict(low=0.7, high=1.5, beta_low=0.3, beta_high=1.7),
        dict(low=1.0, high=1.1),
        dict(low=0.9, high=1.0),
    ],
    "smoothing": [dict(alpha=1.0), dict(alpha=0.2)],
    "decoupled-ppo": [dict(low=0.5, high=2.0)],
    "a-3po": [dict(low=0.9, high=1.1)],
    "erc": [
        dict(low=0.6, high=1.1, change=(0.5, 1.5)),
        dict(change=(0.5, 1.0)),
        dict(change=(1.0, 2.0)),
    ],
    "off-policy-grpo": [dict(epsilon=0.05), dict(epsilon=1.5)],
}
# The tensors that a method takes beside the usual four inputs.
FURTHER = {
    "decoupled-ppo": ["proximal_log_probs"],
    "a-3po": ["ages"],
    "erc": ["entropy", "rollout_entropy"],
    "off-policy-grpo": ["start_log_probs"],
}
INPUTS = ["log_probs", "rollout_log_probs", "advantages", "mask"]


def options_of(name):
    """All the options that a method is tried with; {} are its defaults."""
    return [{}, *OTHERS.get(name, [])]


# ---------------------------------------------------------------- the oracle
class Dual:
    """A number, and its slope: its derivative with respect to the log-prob of one token.

    Numbers are ordered by their values.
    """

    def __init__(self, value, slope=0.0):
        self.value = float(value)
        self.slope = float(slope)

    @staticmethod
    def of(x):
        return x if isinstance(x, Dual) else Dual(x)

    def __add__(self, other):
        other = Dual.of(other)
        return Dual(self.value + other.value, self.slope + other.slope)

    def __mul__(self, other):
        other = Dual.of(other)
        slope = self.slope * other.value + self.value * other.slope
        return Dual(self.value * other.value, slope)

    def __truediv__(self, other):
        other = Dual.of(other)
        return self * Dual(1 / other.value, -other.slope / other.value**2)

    def __sub__(self, other):
        return self + -Dual.of(other)

    def __neg__(self):
        return self * -1.0

    def __lt__(self, other):
        return self.value < Dual.of(other).value

    def __gt__(self, other):
        return self.value > Dual.of(other).value

    __radd__ = __add__
    __rmul__ = __mul__


def exp(x):
    x = Dual.of(x)
    return Dual(math.exp(x.value), math.exp(x.value) * x.slope)


def sg(x):
    """Stop-gradient: the value alone, as a float."""
    return Dual.of(x).value


def clip(x, low, high):
    """Keeps x itself, and so its slope, on a bound."""
    if x > high:
        return high
    if x < low:
        return low
    return x


def ratio(log_ratio):
    return exp(clip(log_ratio, -20.0, 20.0))


def surrogate(r, a, low, high):
    clipped = Dual.of(clip(r, low, high))
    return -min(r * a, clipped * a)


def one_token(name, lp, lb, a, o, further):
    """The loss of one token: lp a Dual; lb and the advantage a floats; o the options by name."""
    r = ratio(lp - lb)
    p = math.exp(sg(lp))
    q = math.exp(lb)
    match name:
        case "reinforce":
            return -sg(r) * a * lp
        case "ppo" | "clip-higher" | "m2po":
            return surrogate(r, a, o["low"], o["high"])
        case "dual-clip":
            loss = surrogate(r, a, o["low"], o["high"])
            return min(loss, Dual(-o["cap"] * a)) if a < 0 else loss
        case "truncated-is" | "cispo":
            return -min(sg(r), o["cap"]) * a * lp
        case "topr":
            weight = 1.0 if a > 0 else min(sg(r), 1.0)
            return -weight * a * lp
        case "rec-oneside":
            kept_if_positive = a >= 0 and sg(r) <= o["high"]
            kept_if_negative = a <= 0 and sg(r) >= o["low"]
            return -a * lp if kept_if_positive or kept_if_negative else Dual(0.0)
        case "asymre":
            return -(a + o["shift"]) * lp
        case "opmd":
            return -a * lp + o["tau"] / 2 * (lp - lb) * (lp - lb)
        case "dppo-tv":
            risen_too_far = a > 0 and p - q > o["delta"]
            fallen_too_far = a < 0 and q - p > o["delta"]
            if risen_too_far or fallen_too_far:
                return Dual(0.0)
            return -min(sg(r), o["cap"]) * a * lp
        case "sapo":
            tau = o["tau_positive"] if a > 0 else o["tau_negative"]
            return Dual(-4 / tau) / (1 + exp(-tau * (r - 1))) * a
        case "dcpo":
            low = 0.5 * (1 + math.sqrt(max(1 - 4 * o["epsilon_low"] / q, 0)))
            high = 0.5 * (1 + math.sqrt(1 + 4 * o["epsilon_high"] / q))
            return surrogate(r, a, low, min(high, o["high_max"]))
        case "ce-gppo":
            one = exp(lp - sg(lp))  # r / sg(r), also where r is clamped
            if a < 0 and sg(r) < o["low"]:
                return -o["beta_low"] * o["low"] * one * a
            if a > 0 and sg(r) > o["high"]:
                return -o["beta_high"] * o["high"] * one * a
            return -sg(r) * one * a
        case "smoothing":
            return -ratio(lp - o["alpha"] * lb) * a
        case "decoupled-ppo" | "a-3po":
            if name == "decoupled-ppo":
                lx = further["proximal_log_probs"]
            else:
                age = max(further["ages"], 1)
                lx = lb + (age - 1) / age * (sg(lp) - lb)
            clipped = clip(lp - lx, math.log(o["low"]), math.log(o["high"]))
            return -min(r * a, ratio(clipped + lx - lb) * a)
        case "erc":
            change = (further["entropy"] + 1e-8) / (further["rollout_entropy"] + 1e-8)
            loss = surrogate(r, a, o["low"], o["high"])
            least, most = o["change"]
            return loss if least < change < most else Dual(sg(loss))
        case "off-policy-grpo":
            x = sg(ratio(further["start_log_probs"] - lb))
            return surrogate(r, a, max(x - o["epsilon"], 0.0), x + o["epsilon"])
    raise KeyError(name)


def literal_m2po_bounds(batch, o):
    """M2PO's bounds with the limit found by bisection, over a list of tokens."""
    if o.get("bounds") is not None:
        return o["bounds"]
    squares = []
    for lps, lbs, advantages, mask in zip(*rows_of_inputs(batch)):
        for lp, lb, a, inside in zip(lps, lbs, advantages, mask):
            moved_with_advantage = (a > 0 and lp > lb) or (a < 0 and lp < lb)
            if inside and moved_with_advantage:
                squares.append((lp - lb) ** 2)
    if not squares or sum(squares) / len(squares) <= o["budget"]:
        return 0.0, math.inf
    below = 0.0
    above = max(squares)
    for _ in range(200):
        middle = (below + above) / 2
        mean = sum(min(square, middle) for square in squares) / len(squares)
        if mean >= o["budget"]:
            above = middle
        else:
            below = middle
    tau = math.sqrt(above)
    return min(math.exp(-tau), o["low_max"]), max(math.exp(tau), o["high_min"])


def rows_of_inputs(batch):
    """The four inputs as lists of rows; an advantage of a response is repeated for each token."""
    inputs = {key: batch[key] for key in INPUTS}
    if inputs["advantages"].dim() == 1:
        inputs["advantages"] = inputs["advantages"][:, None].expand(batch["log_probs"].shape)
    return [tensor.double().tolist() for tensor in inputs.values()]


def literal(name, batch, options):
    """Losses [N, T], and the gradient [N, T] of their sum weighted by batch["w"], in float64."""
    o = DEFAULTS[name] | options
    if name == "m2po":
        o["low"], o["high"] = literal_m2po_bounds(batch, o)
    losses = torch.zeros(batch["log_probs"].shape, dtype=torch.float64)
    gradient = torch.zeros_like(losses)
    for n, (lps, lbs, advantages, mask) in enumerate(zip(*rows_of_inputs(batch))):
        inside = [t for t, m in enumerate(mask) if m]
        for t in inside:
            if name == "gspo":
                # Every token's loss depends on the response's mean, and so on token t.
                total = Dual(0.0)
                for u in inside:
                    total = total + (Dual(lps[u], slope=u == t) - lbs[u])
                s = ratio(total / len(inside))
                for u in inside:
                    loss = surrogate(s, advantages[u], o["low"], o["high"])
                    losses[n, u] = loss.value
                    gradient[n, t] += batch["w"][n, u] * loss.slope
            else:
                further = {key: batch[key][n, t].item() for key in FURTHER.get(name, [])}
                lp = Dual(lps[t], slope=1.0)
                loss = Dual.of(one_token(name, lp, lbs[t], advantages[t], o, further))
                losses[n, t] = loss.value
                gradient[n, t] = batch["w"][n, t] * loss.slope
    return losses, gradient


# ---------------------------------------------------------------- batches
def make(n=8, t=20, seed=0, spread=0.4, per_response=False, all_at=None, sign=None, mask=None):
    """Random tokens: a fifth at r = 1 exactly, some at A = 0, some responses empty.

    all_at: the log-ratio of every token; sign: that of every advantage; mask: that of every token.
    The rest of the keys are what some method needs besides.
    """
    g = torch.Generator().manual_seed(seed)

    def normal():
        return torch.randn(n, t, generator=g)

    def uniform():
        return torch.rand(n, t, generator=g)

    rollout_log_probs = -3 * uniform() - 1e-3
    rollout_log_probs[uniform() < 0.1] -= 20.0
    if all_at is None:
        log_ratio = spread * normal() * (uniform() < 0.8)
    else:
        log_ratio = torch.full((n, t), all_at)
    if per_response:
        advantages = torch.randn(n, generator=g)
    else:
        advantages = normal() * (uniform() < 0.9)
    if sign is not None:
        advantages = sign * advantages.abs()
    lengths = torch.randint(0, t + 1, (n, 1), generator=g)
    entropy = 2 * uniform() * (uniform() < 0.9)
    entropy_change = torch.where(uniform() < 0.3, 1.0, 1 + 0.1 * normal()).abs()
    proximal_move = torch.where(uniform() < 0.3, 0.0, 0.3 * normal())
    start_move = torch.where(uniform() < 0.3, 0.0, 0.6 * normal())
    return {
        "log_probs": rollout_log_probs + log_ratio,
        "rollout_log_probs": rollout_log_probs,
        "advantages": advantages,
        "mask": torch.arange(t) < lengths if mask is None else torch.full((n, t), mask),
        "w": uniform() + 0.1,
        "proximal_log_probs": rollout_log_probs + proximal_move,
        "start_log_probs": rollout_log_probs + start_move,
        "ages": torch.randint(0, 6, (n, t), generator=g),
        "rollout_entropy": entropy,
        "entropy": entropy * entropy_change,
    }


BATCHES = {
    "random": make(24, 30, seed=1),
    "far": make(12, 20, seed=2, spread=3.0),
    "near": make(12, 20, seed=3, spread=0.02),
    "per response": make(16, 12, seed=4, per_response=True),
    "r = 1": make(seed=5, all_at=0.0),
    "r huge": make(seed=6, all_at=15.0),
    "r tiny": make(seed=7, all_at=-15.0),
    "r beyond the clamp": make(seed=8, spread=60.0),
    "A = 0": make(seed=9, sign=0),
    "no negatives": make(seed=10, sign=1),
    "no positives": make(seed=11, sign=-1),
    "empty mask": make(seed=12, mask=False),
    "full mask": make(seed=13, mask=True),
    "one token, A > 0": make(1, 1, seed=14, all_at=0.3, sign=1, mask=True),
    "one token, A < 0": make(1, 1, seed=15, all_at=-0.3, sign=-1, mask=True),
    "no response": make(0, 3),
}


class Result(NamedTuple):
    losses: torch.Tensor  # [N, T]
    gradient: torch.Tensor  # [N, T], of the sum of w * losses, at log_probs


def call(name, batch, **options):
    x = batch["log_probs"].clone().requires_grad_()
    others = [batch[key] for key in INPUTS[1:]]
    further = {key: batch[key] for key in FURTHER.get(name, [])}
    losses = OBJECTIVES[name](x, *others, **further, **options)
    assert losses.dtype == torch.float32
    assert losses.shape == x.shape
    if losses.requires_grad:
        (batch["w"] * losses).sum().backward()
    gradient = torch.zeros_like(x) if x.grad is None else x.grad
    return Result(losses.detach(), gradient)


def inputs_of(batch):
    return [batch[key] for key in INPUTS]


def part_of(batch, rows):
    return {key: tensor[rows] for key, tensor in batch.items()}


def cast(batch, convert):
    """The batch with its floats, but for the weights of the test, in another dtype."""
    converted = dict(batch)
    for key, tensor in batch.items():
        if key != "w" and tensor.is_floating_point():
            converted[key] = convert(tensor)
    return converted


def assert_close(found, expected, case):
    """For losses and gradients of the literal code; `case` is for the error."""
    torch.testing.assert_close(
        found, expected, rtol=2e-5, atol=1e-5, msg=lambda text: f"{case}: {text}"
    )


def describe(given):
    """A readable test id."""
    if isinstance(given, str):
        return given
    return ",".join(f"{key}={value}" for key, value in given.items()) or "defaults"


# ---------------------------------------------------------------- every method
def test_all_methods_and_all_their_options_are_tried():
    assert list(OBJECTIVES) == NAMES
    for name in NAMES:
        tried = set(DEFAULTS[name]) | set(FURTHER.get(name, []))
        for options in OTHERS.get(name, []):
            tried |= set(options)
        assert tried == set(inspect.signature(OBJECTIVES[name]).parameters) - set(INPUTS), name


@pytest.mark.parametrize(
    "name, options",
    [(name, options) for name in NAMES for options in options_of(name)],
    ids=describe,
)
def test_value_and_gradient_equal_the_literal_formula(name, options):
    """Kills: a wrong sign, default or bound, < for <= on a bound, min for max, a missing sg."""
    for case, batch in BATCHES.items():
        result = call(name, batch, **options)
        for found, expected in zip(result, literal(name, batch, options)):
            assert_close(found.double(), expected, case)
            assert (found[~batch["mask"]] == 0).all(), case


@pytest.mark.parametrize("name", NAMES)
def test_what_stands_outside_the_mask_has_no_effect(name):
    """Kills: a fill after the computation, where 0 * NaN is NaN, and a mean over padding."""
    batch = make(seed=20)
    outside = ~batch["mask"]
    expected = call(name, batch)
    for value in (math.nan, math.inf, 1e30):
        broken = {key: tensor.clone() for key, tensor in batch.items()}
        for key, tensor in broken.items():
            if key not in ("w", "mask"):
                tensor[outside] = -7 if key == "ages" else value
        for mask in (batch["mask"], batch["mask"].float(), batch["mask"].long()):
            result = call(name, broken | {"mask": mask})
            assert torch.equal(result.losses, expected.losses)
            assert torch.equal(result.gradient, expected.gradient)

    log_probs = batch["log_probs"].clone()
    log_probs[batch["mask"]] = math.nan
    losses = call(name, batch | {"log_probs": log_probs}).losses
    assert losses[batch["mask"]].isnan().all()


@pytest.mark.parametrize("name", NAMES)
def test_one_advantage_per_response_is_the_same_at_each_of_its_tokens(name):
    batch = make(seed=21, per_response=True)
    expanded = batch | {"advantages": batch["advantages"][:, None].expand(8, 20)}
    for options in options_of(name):
        one = call(name, batch, **options)
        each = call(name, expanded, **options)
        assert torch.equal(one.losses, each.losses)
        assert torch.equal(one.gradient, each.gradient)


@pytest.mark.parametrize("name", NAMES)
def test_gradients_flow_through_log_probs_alone(name):
    """Also of tensors made under inference_mode, and of a method's own further tensors."""
    with torch.inference_mode():
        batch = make(seed=22)
    copied = {key: batch[key].clone() for key in ("log_probs", "w")}
    expected = call(name, batch | copied)

    leaves = {key: tensor.clone() for key, tensor in batch.items()}
    for key, tensor in leaves.items():
        if tensor.is_floating_point() and key != "w":
            tensor.requires_grad_()
    result = call(name, leaves | {"log_probs": leaves["log_probs"].detach()})
    assert torch.equal(result.losses, expected.losses)
    assert torch.equal(result.gradient, expected.gradient)
    assert (result.gradient != 0).any()
    assert all(tensor.grad is None for tensor in leaves.values())


@pytest.mark.parametrize("name", NAMES)
def test_low_precision_log_probs_are_subtracted_in_float32(name):
    batch = make(seed=23)
    low = cast(batch, torch.Tensor.bfloat16)
    rounded = cast(low, torch.Tensor.float)
    assert torch.equal(call(name, low).losses, call(name, rounded).losses)
    double = cast(batch, torch.Tensor.double)
    torch.testing.assert_close(
        call(name, double).losses, call(name, batch).losses, rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_read_on_the_host_nor_summed_in_an_order_that_varies(name):
    batch = make(seed=24)
    with Operators() as operators:
        call(name, batch)
    used = {operator.rstrip("_") for operator in operators.names}
    assert not used & (HOST_READS | UNORDERED)
    # A meta tensor has shapes and no values.
    on_meta = {key: tensor.to("meta") for key, tensor in batch.items()}
    assert call(name, on_meta).losses.device.type == "meta"


def test_with_inputs_gives_each_method_what_it_takes():
    batch = make(seed=25)
    names = sorted({key for keys in FURTHER.values() for key in keys})
    further = {key: batch[key] for key in names}
    for name in NAMES:
        losses = with_inputs(name, *inputs_of(batch), bounds=None, **further)
        assert torch.equal(losses, call(name, batch).losses), name
    bounds = (0.9, 1.1)
    losses = with_inputs("m2po", *inputs_of(batch), bounds=bounds, **further)
    assert torch.equal(losses, call("m2po", batch, bounds=bounds).losses)


# ---------------------------------------------------------------- relations between them
@pytest.mark.parametrize(
    "name, options, low, high",
    [
        ("ppo", {}, 0.8, 1.2),
        ("clip-higher", {}, 0.8, 1.28),
        ("ppo", dict(low=1.02, high=3.0), 1.02, 3.0),
    ],
)
def test_ppo_is_bapos_loss_at_fixed_bounds(name, options, low, high):
    for case in ("random", "far", "per response", "r beyond the clamp"):
        batch = BATCHES[case]
        result = call(name, batch, **options)
        x = batch["log_probs"].clone().requires_grad_()
        log_ratio = x - batch["rollout_log_probs"]
        expected = bapo.token_losses(log_ratio, batch["advantages"], low, high) * batch["mask"]
        (batch["w"] * expected).sum().backward()
        assert torch.equal(result.losses, expected.detach())
        assert torch.equal(result.gradient, x.grad)


@pytest.mark.parametrize("name", ["decoupled-ppo", "a-3po", "off-policy-grpo", "dual-clip", "m2po"])
def test_without_what_it_adds_each_is_ppo(name):
    """The proximal policy or start is the rollout policy; ages are 0 or 1; caps are not reached."""
    batch = dict(BATCHES["random"])
    batch["proximal_log_probs"] = batch["rollout_log_probs"]
    batch["start_log_probs"] = batch["rollout_log_probs"]
    options = {"dual-clip": dict(cap=1e9), "m2po": dict(bounds=(0.8, 1.2))}.get(name, {})
    expected = call("ppo", batch)
    for age in (0, 1):
        ages = torch.full_like(batch["ages"], age)
        result = call(name, batch | {"ages": ages}, **options)
        torch.testing.assert_close(result.losses, expected.losses, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(result.gradient, expected.gradient, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_a_token_on_its_bound_has_a_gradient_and_beyond_it_has_none(sign):
    """Where a bound is no constant: DPPO's difference of probabilities, the start plus epsilon."""
    lb = torch.tensor([[-1.7]])
    lp = (lb + sign * 0.1).requires_grad_()
    advantages = torch.tensor([sign])
    mask = torch.ones(1, 1)

    def has_gradient(name, **options):
        losses = OBJECTIVES[name](lp, lb, advantages, mask, **options)
        (gradient,) = torch.autograd.grad(losses.sum(), lp)
        return gradient.item() != 0

    moved = (lp.detach().exp() - lb.exp()).abs().item()
    assert has_gradient("dppo-tv", delta=moved)
    assert not has_gradient("dppo-tv", delta=moved * (1 - 1e-6))
    moved = abs((lp - lb).exp().item() - 1)
    assert has_gradient("off-policy-grpo", start_log_probs=lb, epsilon=moved * (1 + 1e-6))
    assert not has_gradient("off-policy-grpo", start_log_probs=lb, epsilon=moved * (1 - 1e-6))


# ---------------------------------------------------------------- r = 1
@pytest.mark.parametrize("name", NAMES)
def test_at_ratio_one_the_gradient_is_as_documented(name):
    batch = make(seed=31, all_at=0.0)
    batch["proximal_log_probs"] = batch["rollout_log_probs"]
    batch["start_log_probs"] = batch["rollout_log_probs"]
    batch["entropy"] = batch["rollout_entropy"]
    batch["w"] = torch.ones(8, 20)
    if name == "gspo":  # one advantage per response
        batch["advantages"] = batch["advantages"][:, :1].expand(8, 20)

    expected = -batch["advantages"]
    if name == "asymre":
        expected = expected - 0.1
    if name == "smoothing":
        expected = expected * batch["rollout_log_probs"].exp() ** 0.1
    gradient = call(name, batch).gradient
    torch.testing.assert_close(gradient, expected * batch["mask"], rtol=1e-5, atol=1e-6)

    documented = OBJECTIVES[name].__doc__
    assert "At r = 1" in documented or "At r = x: -x A" in documented
    assert ("arXiv" in documented) == (name != "reinforce")


# ---------------------------------------------------------------- M2PO, from the whole step
@pytest.mark.parametrize("low_max, high_min", [(0.7, 1.5), (1.0, 1.0)])
@pytest.mark.parametrize("budget", [1e-6, 0.01, 0.04, 0.5, 100.0])
def test_m2pos_bounds_are_the_literal_ones(budget, low_max, high_min):
    options = dict(budget=budget, low_max=low_max, high_min=high_min)
    different = set()
    for batch in BATCHES.values():
        expected = literal_m2po_bounds(batch, options)
        different.add(expected)
        bounds = m2po_bounds(*inputs_of(batch), **options)
        for bound, value in zip(bounds, expected, strict=True):
            assert bound.dtype == torch.float32
            assert bound.dim() == 0
            assert bound.item() == pytest.approx(value, rel=2e-5)
    assert (0.0, math.inf) in different
    if low_max == 1 and budget < 100:
        assert len(different) > 2


def test_m2pos_bounds_have_m2pos_defaults():
    inputs = inputs_of(BATCHES["random"])
    expected = (torch.tensor(0.7), torch.tensor(1.5))
    assert m2po_bounds(*inputs) == m2po_bounds(*inputs, **DEFAULTS["m2po"]) == expected


@pytest.mark.parametrize("count", [1, 2, 30, 3000])
def test_m2pos_newton_steps_suffice_for_a_tail_of_any_shape(count):
    """Squares over fourteen orders of magnitude, and a heavy tail: each may take another step."""
    heavy_tailed = (1e-3 * count / torch.arange(0.5, count)).sqrt()
    for log_ratio in (torch.logspace(-6, 1.3, count), heavy_tailed):
        inputs = (log_ratio.view(1, -1), torch.zeros(1, count), torch.ones(1), torch.ones(1, count))
        squares = log_ratio.double().square()
        mean = squares.mean().item()
        for share in (0.01, 0.3, 0.8, 0.99, 0.999, 1.1):
            _, high = m2po_bounds(*inputs, budget=share * mean, low_max=1, high_min=1)
            limit = min(math.log(high.item()), 1e6) ** 2
            capped = squares.clamp(max=limit).mean().item()
            assert capped == pytest.approx(min(share, 1) * mean, rel=1e-4)


@pytest.mark.parametrize("parts", [1, 2, 5, 14])
def test_m2po_does_not_depend_on_the_split_if_told_the_whole_steps_bounds(parts):
    """Kills: bounds of the part in place of those that are given."""
    batch = make(14, 23, seed=32)
    options = dict(budget=0.01, low_max=1, high_min=1)
    whole = call("m2po", batch, **options)
    bounds = m2po_bounds(*inputs_of(batch), **options)
    told_losses = []
    told_gradients = []
    untold_losses = []
    for rows in torch.arange(14).chunk(parts):
        part = part_of(batch, rows)
        told = call("m2po", part, bounds=bounds)
        told_losses.append(told.losses)
        told_gradients.append(told.gradient)
        untold_losses.append(call("m2po", part, **options).losses)
    assert torch.equal(torch.cat(told_losses), whole.losses)
    assert torch.equal(torch.cat(told_gradients), whole.gradient)
    assert torch.equal(torch.cat(untold_losses), whole.losses) == (parts == 1)


# ---------------------------------------------------------------- bad input
@pytest.mark.parametrize(
    "name, options, named",
    [
        ("dual-clip", dict(cap=1.0), "cap must be .*above 1, got 1.0"),
        ("truncated-is", dict(cap=0.0), "cap must be finite and above 0, got 0"),
        ("cispo", dict(cap=-5), "cap"),
        ("asymre", dict(shift=-0.1), "shift must be .*at least 0"),
        ("asymre", dict(shift=math.inf), "shift"),
        ("opmd", dict(tau=0), "tau"),
        ("dppo-tv", dict(delta=0), "delta"),
        ("dppo-tv", dict(cap=math.nan), "cap"),
        ("sapo", dict(tau_positive=0), "tau_positive"),
        ("sapo", dict(tau_negative=math.inf), "tau_negative"),
        ("m2po", dict(budget=0), "budget"),
        ("m2po", dict(low_max=1.6), r"low_max must be a ratio in \(0, 1\].*got 1.6"),
        ("m2po", dict(high_min=0.5), "high_min must be a ratio of at least 1.*got 0.5"),
        ("dcpo", dict(epsilon_low=0), "epsilon_low"),
        ("dcpo", dict(epsilon_high=-1), "epsilon_high"),
        ("dcpo", dict(high_max=0.5), "high_max must be .*at least 1"),
        ("ce-gppo", dict(beta_low=0), "beta_low"),
        ("ce-gppo", dict(beta_high=math.inf), "beta_high"),
        ("smoothing", dict(alpha=0), r"alpha must be in \(0, 1\]"),
        ("smoothing", dict(alpha=1.1), "alpha"),
        ("erc", dict(change=(1.05, 0.95)), "change must be"),
        ("off-policy-grpo", dict(epsilon=0), "epsilon"),
    ],
)
def test_a_bad_option_is_named(name, options, named):
    with pytest.raises(ValueError, match=named):
        call(name, BATCHES["random"], **options)


@pytest.mark.parametrize(
    "low, high",
    [
        (0.2, 0.28),  # epsilons
        (3e-4, 4e-4),  # GSPO's epsilons
        (0.2, 0.2),
        (0.8, 0.99),
        (1.3, 1.2),
        (1.2, 1.2),
        (0.0, 1.2),
        (-0.2, 1.2),
        (math.nan, 1.2),
        (0.8, math.inf),
    ],
)
@pytest.mark.parametrize("name", [name for name in NAMES if "low" in DEFAULTS[name]])
def test_bounds_that_are_no_ratios_are_refused(name, low, high):
    """Kills: epsilons taken for ratios, which clip every token whose ratio is near 1."""
    with pytest.raises(ValueError, match=rf"low, high must be .*not epsilons, got \({low}, {high}"):
        call(name, BATCHES["r = 1"], low=low, high=high)


@pytest.mark.parametrize("name", NAMES)
def test_a_shape_that_does_not_fit_is_named(name):
    batch = make(n=4, t=6)
    for key in ("rollout_log_probs", "mask", *FURTHER.get(name, [])):
        with pytest.raises(ValueError, match=rf"{key} must be of shape \[4, 6\], got \[4, 5\]"):
            call(name, batch | {key: batch[key][:, :5]})
    for wrong in (batch["advantages"][:3], batch["advantages"][:, :1], torch.ones(6)):
        with pytest.raises(ValueError, match=r"advantages must be of shape \[4, 6\] or \[4\]"):
            call(name, batch | {"advantages": wrong})
    with pytest.raises(ValueError, match=r"log_probs must be \[N, T\], got \[24\]"):
        call(name, batch | {"log_probs": batch["log_probs"].flatten()})


# ---------------------------------------------------------------- the file
def test_the_file_can_be_copied():
    tree = ast.parse(Path(objectives.__file__).read_text())
    imported = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            imported.add(node.module)
        elif isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
    assert imported == {"inspect", "math", "collections.abc", "typing", "torch"}
