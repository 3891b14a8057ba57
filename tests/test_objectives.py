"""objectives.py against literal code: every loss of one token in plain Python floats, differentiated by dual numbers."""

import ast
import math
from pathlib import Path

import pytest
import torch
from test_bapo import HOST_READS, UNORDERED, Operators

import bapo
from support import objectives
from support.objectives import OBJECTIVES, balanced_scale, m2po_bounds

NAMES = (
    "reinforce ppo clip-higher dual-clip truncated-is cispo topr rec-oneside asymre opmd dppo-tv sapo gspo m2po dcpo ce-gppo "
    "smoothing balanced decoupled-ppo a-3po erc off-policy-grpo"
).split()
CLIPPED = "ppo clip-higher dual-clip gspo m2po dcpo balanced decoupled-ppo a-3po erc off-policy-grpo".split()
EXTRA = {
    "decoupled-ppo": ["proximal_log_probs"],
    "a-3po": ["ages"],
    "erc": ["entropy", "rollout_entropy"],
    "off-policy-grpo": ["start_log_probs"],
}
# Beside the defaults: other values of every option, and bounds at 1, on which all tokens with r = 1 lie.
OTHERS = {
    "ppo": [dict(low=0.5, high=2.5), dict(low=1.0, high=1.1), dict(low=0.9, high=1.0), dict(low=1.02, high=3.0)],
    "clip-higher": [dict(low=0.7, high=1.4)],
    "dual-clip": [dict(low=0.7, high=1.1, cap=1.5), dict(low=1.0, high=1.0)],
    "truncated-is": [dict(cap=2.0), dict(cap=0.7)],
    "cispo": [dict(cap=1.28)],
    "rec-oneside": [dict(low=0.6, high=1.5), dict(low=1.0, high=1.0)],
    "asymre": [dict(shift=0.0), dict(shift=0.7)],
    "opmd": [dict(tau=1.3)],
    "dppo-tv": [dict(delta=0.03, cap=1.5)],
    "sapo": [dict(tau_positive=0.4, tau_negative=3.0)],
    "gspo": [dict(low=0.95, high=1.1), dict(low=1.0, high=1.0)],
    "m2po": [
        dict(budget=0.3, low_max=1.0, high_min=1.0),
        dict(budget=1e-3, low_max=0.95, high_min=1.02),
        dict(bounds=(0.9, 1.1)),
    ],
    "dcpo": [dict(epsilon_low=0.02, epsilon_high=0.6, high_max=1.5)],
    "ce-gppo": [dict(low=0.7, high=1.5, beta_low=0.3, beta_high=1.7), dict(low=1.0, high=1.0)],
    "smoothing": [dict(alpha=1.0), dict(alpha=0.2)],
    "balanced": [dict(rho0=0.0), dict(rho0=0.8), dict(scale=torch.tensor(0.3)), dict(scale=1.7)],
    "decoupled-ppo": [dict(low=0.5, high=2.0)],
    "a-3po": [dict(low=0.9, high=1.1)],
    "erc": [dict(low=0.6, high=1.1, change=(0.5, 1.5)), dict(change=(0.5, 1.0)), dict(change=(1.0, 2.0))],
    "off-policy-grpo": [dict(epsilon=0.05), dict(epsilon=1.5)],
}


# ---------------------------------------------------------------- the oracle
class Dual:
    """A number and its derivative with respect to the log-prob of one token. Order is that of the values."""

    def __init__(self, value, slope=0.0):
        self.value, self.slope = float(value), float(slope)

    @staticmethod
    def of(x):
        return x if isinstance(x, Dual) else Dual(x)

    def __add__(self, other):
        other = Dual.of(other)
        return Dual(self.value + other.value, self.slope + other.slope)

    def __mul__(self, other):
        other = Dual.of(other)
        return Dual(self.value * other.value, self.slope * other.value + self.value * other.slope)

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

    __radd__, __rmul__ = __add__, __mul__


def exp(x):
    x = Dual.of(x)
    return Dual(math.exp(x.value), math.exp(x.value) * x.slope)


def sg(x):
    return Dual.of(x).value


def clip(x, low, high):
    """Keeps x itself, and so its slope, on a bound."""
    x = high if x > high else x
    return low if x < low else x


def ratio(log_ratio):
    return exp(clip(log_ratio, -20.0, 20.0))


def surrogate(r, a, low, high):
    return -min(r * a, Dual.of(clip(r, low, high)) * a)


# name: loss of one token from lp, lb, A, the options, and what else the method needs
def one_token(name, lp, lb, a, o, **extra):
    r, p, q = ratio(lp - lb), math.exp(sg(lp)), math.exp(lb)
    if name == "reinforce":
        return -sg(r) * a * lp
    if name in ("ppo", "m2po"):
        return surrogate(r, a, o["low"], o["high"])
    if name == "clip-higher":
        return surrogate(r, a, o["low"], o["high"])
    if name == "dual-clip":
        loss = surrogate(r, a, o["low"], o["high"])
        return min(loss, Dual(-o["cap"] * a)) if a < 0 else loss
    if name in ("truncated-is", "cispo"):
        return -min(sg(r), o["cap"]) * a * lp
    if name == "topr":
        return -(1.0 if a > 0 else min(sg(r), 1.0)) * a * lp
    if name == "rec-oneside":
        keeps = (a >= 0 and sg(r) <= o["high"]) or (a <= 0 and sg(r) >= o["low"])
        return -a * lp if keeps else Dual(0.0)
    if name == "asymre":
        return -(a + o["shift"]) * lp
    if name == "opmd":
        return -a * lp + o["tau"] / 2 * (lp - lb) * (lp - lb)
    if name == "dppo-tv":
        dropped = (a > 0 and p - q > o["delta"]) or (a < 0 and q - p > o["delta"])
        return Dual(0.0) if dropped else -min(sg(r), o["cap"]) * a * lp
    if name == "sapo":
        tau = o["tau_positive"] if a > 0 else o["tau_negative"]
        return Dual(-4 / tau) / (1 + exp(-tau * (r - 1))) * a
    if name == "dcpo":
        low = 0.5 * (1 + math.sqrt(max(1 - 4 * o["epsilon_low"] / q, 0)))
        high = min(0.5 * (1 + math.sqrt(1 + 4 * o["epsilon_high"] / q)), o["high_max"])
        return surrogate(r, a, low, high)
    if name == "ce-gppo":
        same = exp(lp - sg(lp))  # r / sg(r), also where r is clamped
        if a < 0 and sg(r) < o["low"]:
            return -o["beta_low"] * o["low"] * same * a
        if a > 0 and sg(r) > o["high"]:
            return -o["beta_high"] * o["high"] * same * a
        return -sg(r) * same * a
    if name == "smoothing":
        return -ratio(lp - o["alpha"] * lb) * a
    if name == "balanced":
        loss = surrogate(r, a, 0.8, 1.2)
        return o["scale"] * loss if a < 0 else loss
    if name in ("decoupled-ppo", "a-3po"):
        lx = extra["proximal_log_probs"] if name == "decoupled-ppo" else lb
        if name == "a-3po" and extra["ages"] >= 1:
            lx = lb + (extra["ages"] - 1) / extra["ages"] * (sg(lp) - lb)
        clipped = ratio(clip(lp - lx, math.log(o["low"]), math.log(o["high"])) + lx - lb)
        return -min(r * a, clipped * a)
    if name == "erc":
        change = (extra["entropy"] + 1e-8) / (extra["rollout_entropy"] + 1e-8)
        loss = surrogate(r, a, o["low"], o["high"])
        return loss if o["change"][0] < change < o["change"][1] else Dual(sg(loss))
    if name == "off-policy-grpo":
        x = sg(ratio(extra["start_log_probs"] - lb))
        return surrogate(r, a, max(x - o["epsilon"], 0.0), x + o["epsilon"])
    raise KeyError(name)


def literal_m2po_bounds(data, o):
    """The limit by bisection, tokens in a list."""
    if o.get("bounds") is not None:
        return o["bounds"]
    moves = [(lp - lb, a) for lp, lb, a, inside in zip(*data) if inside]
    squares = [d * d for d, a in moves if (a > 0 and d > 0) or (a < 0 and d < 0)]
    if not squares or sum(squares) / len(squares) <= o["budget"]:
        return 0.0, math.inf
    below, above = 0.0, max(squares)
    for _ in range(200):
        middle = (below + above) / 2
        enough = sum(min(square, middle) for square in squares) / len(squares) >= o["budget"]
        below, above = (below, middle) if enough else (middle, above)
    tau = math.sqrt(above)
    return min(math.exp(-tau), o["low_max"]), max(math.exp(tau), o["high_min"])


def literal_scale(advantages, weights, rho0):
    positive = sum(w * a for a, w in zip(advantages, weights) if w and a > 0)
    negative = sum(-w * a for a, w in zip(advantages, weights) if w and a < 0)
    if negative == 0 or positive / (positive + negative) >= rho0:
        return 1.0
    return positive * (1 - rho0) / (rho0 * negative)


DEFAULTS = {
    "ppo": dict(low=0.8, high=1.2),
    "clip-higher": dict(low=0.8, high=1.28),
    "dual-clip": dict(low=0.8, high=1.2, cap=3.0),
    "truncated-is": dict(cap=1.0),
    "cispo": dict(cap=5.0),
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
    "balanced": dict(rho0=0.4, weights=None, scale=None),
    "decoupled-ppo": dict(low=0.8, high=1.2),
    "a-3po": dict(low=0.8, high=1.2),
    "erc": dict(low=0.8, high=1.28, change=(0.95, 1.05)),
    "off-policy-grpo": dict(epsilon=0.2),
}


def literal(name, batch, options):
    """Losses and gradients (for weights `w`) of a batch, as lists of rows."""
    o = {**DEFAULTS.get(name, {}), **options}
    rows = {key: tensor.double().tolist() for key, tensor in batch.items()}
    per_token = [[a] * len(lp) if isinstance(a, float) else a for a, lp in zip(rows["advantages"], rows["log_probs"])]
    flat = [sum(part, []) for part in (rows["log_probs"], rows["rollout_log_probs"], per_token, rows["mask"])]
    if name == "m2po":
        o["low"], o["high"] = literal_m2po_bounds(flat, o)
    if name == "balanced" and o["scale"] is None:
        weights = flat[3] if o["weights"] is None else sum(o["weights"].double().tolist(), [])
        o["scale"] = literal_scale(flat[2], [w * m for w, m in zip(weights, flat[3])], o["rho0"])
    losses, gradients = [], []
    for n, (lps, lbs) in enumerate(zip(rows["log_probs"], rows["rollout_log_probs"])):
        inside = [t for t, m in enumerate(rows["mask"][n]) if m]
        loss, gradient = [0.0] * len(lps), [0.0] * len(lps)
        for t in inside:
            extra = {key: rows[key][n][t] for key in EXTRA.get(name, [])}
            if name == "gspo":
                seeds = [Dual(lps[u], u == t) for u in inside]
                mean = sum((lp - lbs[u] for lp, u in zip(seeds, inside)), Dual(0.0)) / len(inside)
                for u in inside:
                    of_u = surrogate(ratio(mean), per_token[n][u], o["low"], o["high"])
                    gradient[t] += rows["w"][n][u] * of_u.slope
                    loss[u] = of_u.value
            else:
                found = Dual.of(one_token(name, Dual(lps[t], 1.0), lbs[t], per_token[n][t], o, **extra))
                loss[t], gradient[t] = found.value, rows["w"][n][t] * found.slope
        losses.append(loss)
        gradients.append(gradient)
    return losses, gradients


# ---------------------------------------------------------------- batches
def make(n=8, t=20, seed=0, spread=0.4, per_response=False, all_at=None, sign=None, mask=None):
    """Random tokens: a fifth at r = 1 exactly, some at A = 0, some responses empty; and what the methods may need besides."""
    g = torch.Generator().manual_seed(seed)
    randn, rand = (lambda: torch.randn(n, t, generator=g)), (lambda: torch.rand(n, t, generator=g))
    lb = -3 * rand() - 1e-3
    lb[rand() < 0.1] -= 20.0
    log_ratio = spread * randn() * (rand() < 0.8) if all_at is None else torch.full((n, t), all_at)
    advantages = torch.randn(n, generator=g) if per_response else randn() * (rand() < 0.9)
    advantages = {None: advantages, 1: advantages.abs(), -1: -advantages.abs(), 0: 0 * advantages}[sign]
    lengths = torch.randint(0, t + 1, (n, 1), generator=g)
    entropy = 2 * rand() * (rand() < 0.9)
    return {
        "log_probs": lb + log_ratio,
        "rollout_log_probs": lb,
        "advantages": advantages,
        "mask": torch.arange(t) < lengths if mask is None else torch.full((n, t), mask),
        "w": rand() + 0.1,
        "proximal_log_probs": lb + torch.where(rand() < 0.3, 0.0, 0.3 * randn()),
        "start_log_probs": lb + torch.where(rand() < 0.3, 0.0, 0.6 * randn()),
        "ages": torch.randint(0, 6, (n, t), generator=g),
        "rollout_entropy": entropy,
        "entropy": entropy * torch.where(rand() < 0.3, 1.0, 1 + 0.1 * randn()).abs(),
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


def call(name, batch, **options):
    """Losses, and the gradient of their sum weighted by batch["w"], at log_probs."""
    four = [batch[key] for key in ("log_probs", "rollout_log_probs", "advantages", "mask")]
    x = four[0].clone().requires_grad_()
    losses = OBJECTIVES[name](x, *four[1:], **{key: batch[key] for key in EXTRA.get(name, [])}, **options)
    assert losses.dtype == torch.float32 and losses.shape == x.shape
    weighted = (batch["w"] * losses).sum()
    if losses.requires_grad:
        weighted.backward()
    return losses.detach(), torch.zeros_like(x) if x.grad is None else x.grad


def part_of(batch, rows):
    return {key: tensor[rows] for key, tensor in batch.items()}


def test_the_names():
    assert list(OBJECTIVES) == NAMES and set(OTHERS) == set(NAMES) - {"reinforce", "topr"}


@pytest.mark.parametrize(
    "name, options",
    [(name, options) for name in NAMES for options in ({}, *OTHERS.get(name, []))],
    ids=lambda given: given if isinstance(given, str) else ",".join(f"{k}={v}" for k, v in given.items()) or "defaults",
)
def test_value_and_gradient_equal_the_literal_formula(name, options):
    """Kills: a wrong sign, default or bound, < for <= on a bound, min for max, the other sign of A, a missing or extra sg."""
    for case, batch in BATCHES.items():
        losses, gradient = call(name, batch, **options)
        expected = [torch.tensor(rows, dtype=torch.float64).view(losses.shape) for rows in literal(name, batch, options)]
        for found, wanted in zip((losses, gradient), expected):
            torch.testing.assert_close(
                found.double(), wanted, rtol=2e-5, atol=1e-5, msg=lambda text, case=case: f"{case}: {text}"
            )
        assert (losses[~batch["mask"]] == 0).all() and (gradient[~batch["mask"]] == 0).all(), case


@pytest.mark.parametrize("name", NAMES)
def test_what_stands_outside_the_mask_has_no_effect(name):
    """Kills: a fill after the computation, where 0 * NaN is NaN, and a mean or a scale over padding."""
    batch = make(seed=20)
    broken = {key: tensor.clone() for key, tensor in batch.items()}
    for value in (math.nan, math.inf, 1e30):
        for key, tensor in broken.items():
            if key not in ("w", "mask"):
                tensor[~batch["mask"]] = -7 if key == "ages" else value
        for mask in (batch["mask"], batch["mask"].float(), batch["mask"].long()):
            for ours, theirs in zip(call(name, {**broken, "mask": mask}), call(name, batch)):
                torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    log_probs = batch["log_probs"].clone()
    log_probs[batch["mask"]] = math.nan
    assert call(name, {**batch, "log_probs": log_probs})[0][batch["mask"]].isnan().all()


@pytest.mark.parametrize("name", NAMES)
def test_one_advantage_per_response_is_the_same_at_each_of_its_tokens(name):
    batch = make(seed=21, per_response=True)
    expanded = {**batch, "advantages": batch["advantages"][:, None].expand(8, 20)}
    for options in ({}, *OTHERS.get(name, [])):
        for one, each in zip(call(name, batch, **options), call(name, expanded, **options)):
            assert torch.equal(one, each)


@pytest.mark.parametrize("name", NAMES)
def test_gradients_flow_through_log_probs_alone(name):
    """Also of tensors made under inference_mode, and of a method's own extra tensors."""
    with torch.inference_mode():
        batch = make(seed=22)
    losses, gradient = call(name, {**batch, "log_probs": batch["log_probs"].clone(), "w": batch["w"].clone()})
    batch = {key: tensor.clone().requires_grad_(tensor.is_floating_point() and key != "w") for key, tensor in batch.items()}
    again, gradient_again = call(name, {**batch, "log_probs": batch["log_probs"].detach()})
    assert torch.equal(losses, again) and torch.equal(gradient, gradient_again) and (gradient != 0).any()
    assert all(tensor.grad is None for tensor in batch.values())


@pytest.mark.parametrize("name", NAMES)
def test_low_precision_log_probs_are_subtracted_in_float32(name):
    batch = make(seed=23)
    low = {key: tensor.bfloat16() if tensor.is_floating_point() and key != "w" else tensor for key, tensor in batch.items()}
    again = {key: tensor.float() if key != "w" and tensor.is_floating_point() else tensor for key, tensor in low.items()}
    assert torch.equal(call(name, low)[0], call(name, again)[0])
    double = {key: tensor.double() if key != "w" and tensor.is_floating_point() else tensor for key, tensor in batch.items()}
    torch.testing.assert_close(call(name, double)[0], call(name, batch)[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_read_on_the_host_and_nothing_is_summed_in_an_order_that_varies(name):
    batch = make(seed=24)
    with Operators() as operators:
        call(name, batch)
    assert not {operator.rstrip("_") for operator in operators.names} & (HOST_READS | UNORDERED)
    losses, _ = call(name, {key: tensor.to("meta") for key, tensor in batch.items()})  # it has shapes and no values
    assert losses.device.type == "meta"


# ---------------------------------------------------------------- relations between them
@pytest.mark.parametrize("name, bounds", [("ppo", (0.8, 1.2)), ("clip-higher", (0.8, 1.28)), ("ppo", (1.02, 3.0))])
def test_ppo_is_bapos_loss_at_fixed_bounds(name, bounds):
    for case in ("random", "far", "per response", "r beyond the clamp"):
        batch = BATCHES[case]
        losses, gradient = call(name, batch, low=bounds[0], high=bounds[1]) if bounds[0] > 1 else call(name, batch)
        x = batch["log_probs"].clone().requires_grad_()
        expected = bapo.token_losses(x - batch["rollout_log_probs"], batch["advantages"], *bounds)
        (batch["w"] * expected * batch["mask"]).sum().backward()
        assert torch.equal(losses, expected.detach() * batch["mask"]) and torch.equal(gradient, x.grad)


@pytest.mark.parametrize("name", ["decoupled-ppo", "a-3po", "off-policy-grpo", "dual-clip", "m2po"])
def test_without_what_it_adds_each_is_ppo(name):
    """A proximal policy, a start or an age of 0 or 1 that is the rollout policy's own; a cap or a budget never reached."""
    batch = BATCHES["random"]
    same = {key: batch["rollout_log_probs"] for key in ("proximal_log_probs", "start_log_probs")}
    options = {"dual-clip": dict(cap=1e9), "m2po": dict(bounds=(0.8, 1.2))}.get(name, {})
    for ages in (0, 1):
        found = call(name, {**batch, **same, "ages": torch.full_like(batch["ages"], ages)}, **options)
        for ours, theirs in zip(found, call("ppo", batch)):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_on_its_bound_a_token_keeps_its_gradient_and_one_float_beyond_it_has_none():
    """Where a bound is not a constant: DPPO's difference of probabilities, and the ratio at the start plus epsilon."""
    g = torch.Generator().manual_seed(30)
    lb = -3 * torch.rand(1, 1, generator=g)
    for sign in (1.0, -1.0):
        lp = (lb + sign * 0.1).requires_grad_()
        moved = (lp.detach().exp() - lb.exp()).abs().item()
        for delta, kept in ((moved, True), (moved * (1 - 1e-6), False)):
            losses = OBJECTIVES["dppo-tv"](lp, lb, torch.full((1,), sign), torch.ones(1, 1), delta=delta)
            assert (torch.autograd.grad(losses.sum(), lp)[0] != 0).item() == kept
        moved = abs((lp - lb).exp().item() - 1)
        for epsilon, kept in ((moved * (1 + 1e-6), True), (moved * (1 - 1e-6), False)):
            losses = OBJECTIVES["off-policy-grpo"](
                lp, lb, torch.full((1,), sign), torch.ones(1, 1), start_log_probs=lb, epsilon=epsilon
            )
            assert (torch.autograd.grad(losses.sum(), lp)[0] != 0).item() == kept


# ---------------------------------------------------------------- r = 1
AT_ONE = {
    "asymre": lambda batch: -batch["advantages"] - 0.1,
    "smoothing": lambda batch: -batch["advantages"] * batch["rollout_log_probs"].exp() ** 0.1,
    "balanced": lambda batch: -batch["advantages"] * torch.where(batch["advantages"] < 0, balanced_scale_of(batch), 1.0),
}


def balanced_scale_of(batch):
    return balanced_scale(batch["advantages"], batch["mask"].float())


@pytest.mark.parametrize("name", NAMES)
def test_at_ratio_one_the_gradient_is_as_documented(name):
    batch = make(seed=31, all_at=0.0)
    batch |= {key: batch["rollout_log_probs"] for key in ("proximal_log_probs", "start_log_probs")}
    batch |= {"w": torch.ones(8, 20), "entropy": batch["rollout_entropy"]}
    if name == "gspo":  # one advantage per response
        batch["advantages"] = batch["advantages"][:, :1].expand(8, 20)
    expected = AT_ONE.get(name, lambda batch: -batch["advantages"])(batch) * batch["mask"]
    torch.testing.assert_close(call(name, batch)[1], expected, rtol=1e-5, atol=1e-6)
    documented = OBJECTIVES[name].__doc__
    assert "At r = 1" in documented or "At r = x: -x A" in documented
    assert ("arXiv" in documented) == (name not in ("reinforce", "balanced"))


# ---------------------------------------------------------------- what is computed from the whole step
@pytest.mark.parametrize("low_max, high_min", [(0.7, 1.5), (1.0, 1.0)])
@pytest.mark.parametrize("budget", [1e-6, 0.01, 0.04, 0.5, 100.0])
def test_m2pos_bounds_are_the_literal_ones(budget, low_max, high_min):
    options = dict(budget=budget, low_max=low_max, high_min=high_min)
    seen = set()
    for batch in BATCHES.values():
        four = [batch[key] for key in ("log_probs", "rollout_log_probs", "advantages", "mask")]
        advantages = four[2] if four[2].dim() == 2 else four[2][:, None].expand(four[0].shape)
        flat = [tensor.double().flatten().tolist() for tensor in (*four[:2], advantages, four[3])]
        expected = literal_m2po_bounds(flat, options)
        bounds = m2po_bounds(*four, **options)
        assert [bound.dtype for bound in bounds] == [torch.float32] * 2 and all(bound.dim() == 0 for bound in bounds)
        assert [bound.item() for bound in bounds] == pytest.approx(expected, rel=2e-5)
        seen.add(expected)
    assert (0.0, math.inf) in seen and (len(seen) > 2 or low_max < 1 or budget == 100)


def test_m2pos_bounds_have_m2pos_defaults():
    four = [BATCHES["random"][key] for key in ("log_probs", "rollout_log_probs", "advantages", "mask")]
    assert m2po_bounds(*four) == m2po_bounds(*four, **DEFAULTS["m2po"]) == (torch.tensor(0.7), torch.tensor(1.5))


@pytest.mark.parametrize("count", [1, 2, 30, 3000])
def test_m2pos_newton_steps_suffice_for_a_tail_of_any_shape(count):
    """Squares over fourteen orders of magnitude, and a heavy tail, at each of which Newton's method may take another step."""
    heavy = (1e-3 * count / torch.arange(0.5, count)).sqrt()
    for log_ratio in (torch.logspace(-6, 1.3, count), heavy):
        inputs = log_ratio.view(1, -1), torch.zeros(1, count), torch.ones(1), torch.ones(1, count)
        mean = log_ratio.double().square().mean().item()
        for share in (0.01, 0.3, 0.8, 0.99, 0.999, 1.1):
            _, high = m2po_bounds(*inputs, budget=share * mean, low_max=1, high_min=1)
            limit = min(math.log(high.item()), 1e6) ** 2
            capped = log_ratio.double().square().clamp(max=limit).mean().item()
            assert capped == pytest.approx(min(share, 1) * mean, rel=1e-4)


def test_the_scale_gives_the_target_share_and_is_never_above_one():
    for case, batch in BATCHES.items():
        weights = batch["w"] * batch["mask"]
        for rho0 in (0.0, 0.3, 0.5, 0.9):
            scale = balanced_scale(batch["advantages"], weights, rho0)
            a = batch["advantages"] if batch["advantages"].dim() == 2 else batch["advantages"][:, None].expand(weights.shape)
            assert scale.dtype == torch.float32 and scale.dim() == 0
            assert scale.item() == pytest.approx(literal_scale(a.flatten().tolist(), weights.flatten().tolist(), rho0)), case
            mass = (weights * a).double()
            positive, negative = mass.clamp(min=0).sum(), -mass.clamp(max=0).sum()
            if scale < 1 and positive > 0:
                assert (positive / (positive + scale * negative)).item() == pytest.approx(rho0)
    assert balanced_scale(torch.tensor([1.0, 2.0]), torch.ones(2, 3)) == 1  # no negatives
    assert balanced_scale(torch.tensor([-1.0, -2.0]), torch.ones(2, 3)) == 0  # no positives
    assert balanced_scale(torch.tensor([math.nan, 1.0, -1.0]), torch.tensor([[0.0], [1.0], [4.0]]), 0.5) == 0.25


@pytest.mark.parametrize("parts", [1, 2, 5, 14])
def test_m2po_and_balanced_do_not_depend_on_the_split_if_told_the_whole_steps_statistics(parts):
    """Kills: statistics of the part in place of those that are given."""
    batch = make(14, 23, seed=32)
    four = [batch[key] for key in ("log_probs", "rollout_log_probs", "advantages", "mask")]
    told = {
        "m2po": dict(bounds=m2po_bounds(*four, budget=0.01, low_max=1, high_min=1)),
        "balanced": dict(scale=balanced_scale(batch["advantages"], batch["w"] * batch["mask"], 0.7)),
    }
    alone = {"m2po": dict(budget=0.01, low_max=1, high_min=1), "balanced": dict(rho0=0.7, weights=batch["w"])}
    for name in told:
        rows = torch.arange(14).chunk(parts)
        whole = call(name, batch, **alone[name])
        split = [call(name, part_of(batch, part), **told[name]) for part in rows]
        assert all(torch.equal(torch.cat(pieces), one) for pieces, one in zip(zip(*split), whole))
        if parts > 1:
            options = [alone[name] if name == "m2po" else {"rho0": 0.7, "weights": batch["w"][part]} for part in rows]
            untold = [call(name, part_of(batch, part), **given)[0] for part, given in zip(rows, options)]
            assert not torch.equal(torch.cat(untold), whole[0])


# ---------------------------------------------------------------- bad input
@pytest.mark.parametrize(
    "name, options, named",
    [
        ("ppo", dict(low=1.3), "low, high must be .* got"),
        ("ppo", dict(low=0.0), "low, high"),
        ("ppo", dict(high=math.inf), "low, high"),
        ("ppo", dict(low=math.nan), "low, high"),
        ("clip-higher", dict(high=0.28), "low, high must be absolute ratios"),
        ("dual-clip", dict(cap=1.0), "cap must be .*above 1, got 1.0"),
        ("dual-clip", dict(low=-0.2), "low, high"),
        ("truncated-is", dict(cap=0.0), "cap must be finite and above 0, got 0"),
        ("cispo", dict(cap=-5), "cap"),
        ("rec-oneside", dict(low=2.0), "low, high"),
        ("asymre", dict(shift=-0.1), "shift must be .*at least 0"),
        ("asymre", dict(shift=math.inf), "shift"),
        ("opmd", dict(tau=0), "tau"),
        ("dppo-tv", dict(delta=0), "delta"),
        ("dppo-tv", dict(cap=math.nan), "cap"),
        ("sapo", dict(tau_positive=0), "tau_positive"),
        ("sapo", dict(tau_negative=math.inf), "tau_negative"),
        ("gspo", dict(low=3e-4, high=4e-5), "low, high"),
        ("m2po", dict(budget=0), "budget"),
        ("m2po", dict(low_max=1.6), "low_max, high_min"),
        ("dcpo", dict(epsilon_low=0), "epsilon_low"),
        ("dcpo", dict(epsilon_high=-1), "epsilon_high"),
        ("dcpo", dict(high_max=0.5), "high_max must be .*at least 1"),
        ("ce-gppo", dict(beta_low=0), "beta_low"),
        ("ce-gppo", dict(beta_high=math.inf), "beta_high"),
        ("ce-gppo", dict(low=1.5), "low, high"),
        ("smoothing", dict(alpha=0), r"alpha must be in \(0, 1\]"),
        ("smoothing", dict(alpha=1.1), "alpha"),
        ("balanced", dict(rho0=1.0), r"rho0 must be in \[0, 1\), got 1.0"),
        ("balanced", dict(rho0=-0.1), "rho0"),
        ("balanced", dict(weights=torch.ones(3)), "weights must be of shape"),
        ("decoupled-ppo", dict(high=0.5), "low, high"),
        ("a-3po", dict(low=0), "low, high"),
        ("erc", dict(change=(1.05, 0.95)), "change must be"),
        ("erc", dict(low=0), "low, high"),
        ("off-policy-grpo", dict(epsilon=0), "epsilon"),
    ],
)
def test_a_bad_option_is_named(name, options, named):
    with pytest.raises(ValueError, match=named):
        call(name, BATCHES["random"], **options)


@pytest.mark.parametrize("name", NAMES)
def test_a_shape_that_does_not_fit_is_named(name):
    batch = make(n=4, t=6)
    for key in ("rollout_log_probs", "mask", *EXTRA.get(name, [])):
        with pytest.raises(ValueError, match=rf"{key} must be of shape \[4, 6\], got \[4, 5\]"):
            call(name, {**batch, key: batch[key][:, :5]})
    for wrong in (batch["advantages"][:3], batch["advantages"][:, :1], torch.ones(6)):
        with pytest.raises(ValueError, match=r"advantages must be of shape \[4, 6\] or \[4\]"):
            call(name, {**batch, "advantages": wrong})
    with pytest.raises(ValueError, match=r"must be \[N, T\], got \[24\]"):
        call(name, {**batch, "log_probs": batch["log_probs"].flatten()})


def test_the_scale_names_what_does_not_fit():
    with pytest.raises(ValueError, match="advantages must be of shape"):
        balanced_scale(torch.ones(3), torch.ones(4, 2))
    with pytest.raises(ValueError, match=r"weights must be \[N, T\], got \[4\]"):
        balanced_scale(torch.ones(4), torch.ones(4))
    with pytest.raises(ValueError, match="rho0"):
        balanced_scale(torch.ones(4), torch.ones(4, 2), 1.1)


def test_the_scale_may_also_raise_the_weight_of_negative_tokens():
    advantages, weights = torch.tensor([1.0, 1.0, -0.5]), torch.tensor([[0.2, 0.2], [0.1, 0.0], [0.3, 0.2]])
    positive, negative = 0.5, 0.25  # a natural share of 2/3
    assert balanced_scale(advantages, weights, 0.4) == 1
    for share in (0.2, 0.4, 0.9, 1.0):
        scale = balanced_scale(advantages, weights, share, scale_up=True).item()
        assert positive / (positive + scale * negative) == pytest.approx(share)


# ---------------------------------------------------------------- the file
def test_the_file_can_be_copied_and_its_functions_are_short():
    tree = ast.parse(Path(objectives.__file__).read_text())
    imported = {node.module if isinstance(node, ast.ImportFrom) else node.names[0].name
                for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)}  # fmt: skip
    assert imported == {"inspect", "math", "collections.abc", "torch"}
    for function in (node for node in tree.body if isinstance(node, ast.FunctionDef)):
        body = function.body[1:] if ast.get_docstring(function) else function.body
        assert body[-1].end_lineno - body[0].lineno < 15, function.name
