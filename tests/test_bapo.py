"""bapo.py against literal code: Algorithm 1 as a loop, Eq. 8 as sums, gradients by autograd of Eq. 4 written out."""

import itertools
import math
import shutil
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import bapo
from bapo import ClipSearch, bapo_loss, clip_bounds, contribution_masses, search_clip_bounds, token_weights

READINGS = ("surrogate", "gradient")


# ---------------------------------------------------------------- the oracle
def literal_rho(ratio, advantages, weights, low, high, contribution):
    """Eq. 8 as sums over tokens, as a share; numpy float64 of float32 ratios. Tokens of weight 0 are no tokens."""
    inside = weights != 0
    r, a, w = ratio[inside], advantages[inside], weights[inside]
    positive, negative = a > 0, a < 0
    if contribution == "surrogate":
        p = np.minimum(r * a, np.clip(r, 0, high) * a)
        n = np.minimum(r * a, np.clip(r, low, None) * a)
    else:
        p, n = r * a * (r <= high), r * a * (r >= low)
    p, n = abs((w * p)[positive].sum()), abs((w * n)[negative].sum())
    return p / (p + n) if p + n else math.nan


def literal_search(ratio, advantages, weights, s):
    """Algorithm 1, candidate by candidate, steps counted in integers, bounds rounded to float32: low, high, every rho tried."""
    high_steps, low_steps = (round((s.high_max - s.high_start) / s.high_step), round((s.low_max - s.low_start) / s.low_step))
    i = j = 0
    tried = []
    nothing = math.isnan(literal_rho(ratio, advantages, weights, s.low_start, s.high_max, s.contribution))
    while True:
        low, high = float(np.float32(s.low_start + j * s.low_step)), float(np.float32(s.high_start + i * s.high_step))
        rho = literal_rho(ratio, advantages, weights, low, high, s.contribution)
        tried.append(float(nothing) if math.isnan(rho) else rho)
        if tried[-1] >= s.rho0 - 1e-6 or (i == high_steps and j == low_steps):
            return low, high, tried
        if i < high_steps:
            i += 1
            continue
        higher = float(np.float32(s.low_start + (j + 1) * s.low_step))
        passing = (weights != 0) & (advantages < 0) & (ratio >= higher)
        if higher > 1 and not passing.any() and not s.may_empty:
            return low, high, tried
        j += 1


def expand(advantages, like):
    return advantages[:, None].expand_as(like) if advantages.dim() == 1 else advantages


def random_case(generator, dtype):
    """A small batch with every degeneracy in it now and then."""

    def choose(options):
        return options[torch.randint(len(options), (), generator=generator).item()]

    n, t = choose([1, 2, 8, 12]), choose([1, 5, 16])
    log_ratio = torch.randn(n, t, generator=generator) * choose([0.0, 1e-5, 0.02, 0.1, 0.3, 0.5, 0.5, 2.0])
    if choose([0, 0, 1]):  # many ratios exactly 1, which is a bound of some searches below
        log_ratio = log_ratio * (torch.rand(n, t, generator=generator) < 0.5)
    advantages = torch.randn(n, generator=generator) if choose([0, 1]) else torch.randn(n, t, generator=generator)
    advantages = choose([lambda a: a] * 6 + [torch.abs, lambda a: -a.abs(), torch.zeros_like])(advantages)
    mask = torch.rand(n, t, generator=generator) < choose([0.0, 0.3, 0.9, 1.0, 1.0])
    weights = token_weights(mask, choose(["token-mean", "sequence-mean"]))
    up_to_1 = [{}, dict(low_start=0.6), dict(low_start=0.9), dict(low_max=1.0), dict(low_step=0.05)]
    past_1 = [dict(low_max=1.1, low_step=0.06), dict(low_start=0.96, low_max=1.16, low_step=0.04)]
    past_1 += [dict(low_start=1.02, low_max=1.02), dict(low_start=1.04, low_max=1.12, low_step=0.02)]
    search = dict(
        rho0=choose([0.0, 0.3, 0.4, 0.45, 0.5, 0.6, 0.95]),
        **choose(up_to_1 + past_1 * 2),
        **choose([{}, dict(high_max=2.0), dict(high_max=1.2), dict(high_step=0.1)]),
    )
    if search.get("low_max", 0.9) < 1:
        search |= choose([{}, dict(high_start=1.0)])
    return log_ratio.to(dtype), advantages.to(dtype), weights, search


@pytest.mark.parametrize("seed, dtype", [(0, torch.bfloat16), (1, torch.float32), (2, torch.float64)])
@pytest.mark.parametrize("contribution", READINGS)
def test_search_equals_the_literal_loop(contribution, seed, dtype):
    generator = torch.Generator().manual_seed(seed)
    seen = dict.fromkeys(["compared", "inside", "raised past 1", "emptied", "held back"], 0)
    for case in range(700):  # 6 * 700 = 4200 searches
        log_ratio, advantages, weights, options = random_case(generator, dtype)
        # Only gradient masses tell whether a token passes a bound: by Eq. 8's values a range past 1 must be allowed to empty.
        may_empty = case % 2 == 0 or contribution == "surrogate"
        search = ClipSearch(**options, contribution=contribution, may_empty=may_empty)
        masses = contribution_masses(log_ratio, advantages, weights, search)
        if torch.rand((), generator=generator) < 0.75:  # a target that is met on the way to the last bounds
            p, n = masses.split([len(search.highs()), len(search.lows())])
            shares = (p[0] / (p[0] + n[0]), p[-1] / (p[-1] + n[0]), p[-1] / (p[-1] + n[-1]))
            target = shares[0] + (max(shares) - shares[0]) * torch.rand((), generator=generator)
            search = replace(search, rho0=target.nan_to_num(0.5).clamp(max=0.999).item())
        found = clip_bounds(masses, search)
        ratio = bapo.importance_ratio(log_ratio).double().numpy()
        arguments = ratio, expand(advantages, log_ratio).double().numpy(), weights.double().numpy()
        low, high, tried = literal_search(*arguments, search)
        assert found.rho_start.item() == pytest.approx(tried[0], abs=1e-6)
        if min(abs(rho - (search.rho0 - 1e-6)) for rho in tried) < 3e-7:
            continue  # float32 products may fall on either side
        assert (found.low.item(), found.high.item()) == (low, high), (options, tried[-3:])
        assert found.rho.item() == pytest.approx(tried[-1], abs=1e-6)
        assert found.reached.item() == (tried[-1] >= search.rho0 - 1e-6)
        ends = (search.lows()[[0, -1]].tolist(), search.highs()[[0, -1]].tolist())
        seen["compared"] += 1
        seen["inside"] += low not in ends[0] or high not in ends[1]
        seen["raised past 1"] += low > max(1, ends[0][0])
        seen["emptied"] += low > max(1, ends[0][0]) and not (ratio >= low)[(arguments[1] < 0) & (arguments[2] != 0)].any()
        seen["held back"] += low < ends[0][1] and not found.reached.item()
    # Every branch was taken. (Under "surrogate" no target stops the second half, and nothing is held back.)
    least = {"compared": 660, "inside": 60, "raised past 1": 12, "emptied": 5, "held back": 5 * (contribution == "gradient")}
    assert all(seen[name] >= count for name, count in least.items()), seen


@pytest.mark.parametrize("contribution", READINGS)
def test_masses_equal_the_sums_of_eq_8_at_every_candidate_and_bounds_are_inclusive(contribution):
    s = ClipSearch(
        low_max=1.05, low_step=0.05, high_start=1.1, high_max=3.0, high_step=0.1, contribution=contribution, may_empty=True
    )
    lows, highs = s.lows(), s.highs()
    # Ratios on, one float below and one float above every bound, for both signs of the advantage.
    on = torch.cat([lows, highs]).double()
    ratios = torch.cat([on, torch.nextafter(on.float(), torch.tensor(0.0)), torch.nextafter(on.float(), torch.tensor(9.0))])
    log_ratio = ratios.double().log().repeat(2, 1)
    ratio = bapo.importance_ratio(log_ratio)
    assert torch.isin(ratio, torch.cat([lows, highs])).sum() > 20  # exp(log(.)) gives many of the bounds back exactly
    advantages, weights = torch.tensor([1.5, -0.5]), torch.rand(log_ratio.shape) + 0.1
    masses = contribution_masses(log_ratio, advantages, weights, s)
    v = (weights * advantages[:, None]).double()
    for k, high in enumerate(highs):
        r = ratio.double()
        p = v * r.clamp(max=high.item()) if contribution == "surrogate" else v * r * (ratio <= high)
        assert masses[k].item() == pytest.approx(p[0].sum().item(), rel=1e-6)
    for k, low in enumerate(lows):
        n = -v * r.clamp(min=low.item()) if contribution == "surrogate" else -v * r * (ratio >= low)
        assert masses[len(highs) + k].item() == pytest.approx(n[1].sum().item(), rel=1e-6)
    # Summed in float64: 2^24 + 1001 is no float32.
    many = torch.ones(1, 1002).index_fill(1, torch.tensor([0]), 2.0**24)
    assert (contribution_masses(torch.zeros(1, 1002), many, torch.ones(1, 1002), s)[: len(highs)] == 2**24 + 1001).all()
    # The loss agrees: a token on its bound still has gradient, one float beyond it has none.
    for bound, row in itertools.chain(((h, 0) for h in highs), ((l, 1) for l in lows)):
        x = log_ratio.float().clone().requires_grad_()
        bapo.token_losses(x, advantages, bound if row else 0.0, 9.0 if row else bound).sum().backward()
        unclipped = ratio[row] >= bound if row else ratio[row] <= bound
        assert torch.equal(x.grad[row] != 0, unclipped)


# ---------------------------------------------------------------- how Eq. 8 is read
def test_a_signed_sum_in_the_denominator_would_hardly_ever_fire():
    """Wrong responses from equally long to three times as long (Figs. 4, 6): the share asks for wider bounds, |P - N| never."""
    share_fires = signed_fires = 0
    for wrong in range(10, 31):
        mask = torch.arange(30) < torch.tensor([[10], [wrong]])
        arguments = (torch.zeros(2, 30), torch.tensor([1.0, -1.0]), token_weights(mask), bapo.PAPER_MAIN)
        masses, found = contribution_masses(*arguments), search_clip_bounds(*arguments)
        p, n = masses[0].item(), masses[37].item()
        assert found.rho_start.item() == pytest.approx(10 / (10 + wrong))
        share_fires += found.high.item() > 1.21
        signed_fires += p != n and p / abs(p - n) < 0.4
    assert share_fires == 15 and signed_fires == 0


def test_raising_low_lowers_rho_under_surrogate_and_never_under_gradient():
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        log_ratio, advantages = torch.randn(4, 20, generator=generator) * 0.4, torch.randn(4, generator=generator)
        n = {}
        for contribution in READINGS:
            s = replace(bapo.GATE, contribution=contribution, may_empty=True)
            masses = contribution_masses(log_ratio, advantages, torch.ones(4, 20), s)
            assert (masses[:37].diff() >= 0).all()  # raising high never lowers P
            n[contribution] = masses[37:].diff()
        assert (n["surrogate"] >= 0).all() and (n["gradient"] <= 0).all()
        if (advantages < 0).any():
            assert (n["surrogate"] > 0).any() and (n["gradient"] < 0).any()


def test_the_plain_sum_over_sampled_tokens_estimates_eq_8s_sum_over_the_vocabulary():
    generator = torch.Generator().manual_seed(0)
    rollout = torch.tensor([0.7, 0.2, 0.1], dtype=torch.float64)
    policy = torch.tensor([0.5, 0.2, 0.3], dtype=torch.float64)
    advantage = torch.tensor([-1.0, 1.0, 0.5])
    s = bapo.PAPER_MAIN
    log_ratio = (policy / rollout).log()[None]
    exact = contribution_masses(log_ratio, advantage[None], rollout[None], s)  # weights = pi_rollout, over the vocabulary
    drawn = torch.multinomial(rollout, 50_000, replacement=True, generator=generator)
    plain = contribution_masses(log_ratio[:, drawn], advantage[drawn][None], token_weights(torch.ones(1, 50_000)), s)
    torch.testing.assert_close(plain, exact, rtol=0.02, atol=0)
    # Multiplying by pi_rollout once more, as Eq. 8 looks on sampled tokens, gives another number.
    twice = contribution_masses(log_ratio[:, drawn], advantage[drawn][None], rollout[drawn][None] / 50_000, s)
    assert not torch.allclose(twice, exact, rtol=0.2)


# ---------------------------------------------------------------- the loss and its gradient
def literal_objective(log_ratio, advantages, weights, low, high):
    """-sum w min(r A, clip(r, low, high) A), token by token, in float64."""
    total = torch.zeros((), dtype=torch.float64)
    for i, t in itertools.product(*map(range, log_ratio.shape)):
        if weights[i, t] != 0:
            r, a = log_ratio[i, t].double().exp(), advantages[i, t].double()
            clipped = r if low <= r.item() <= high else torch.tensor(low if r.item() < low else high, dtype=torch.float64)
            total = total - weights[i, t].double() * (r * a if (r * a).item() <= (clipped * a).item() else clipped * a)
    return total


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_loss_and_gradient_equal_autograd_of_the_literal_objective(dtype):
    generator = torch.Generator().manual_seed(2)
    for low, high in [(0.8, 1.28)] * 25 + [(1.05, 3.0)] * 10:
        log_ratio, advantages, weights, _ = random_case(generator, dtype)
        log_ratio = log_ratio + 0.01  # off r = 1, where the literal clip at (., 1.0) would be a tie
        x, y = log_ratio.clone().requires_grad_(), log_ratio.clone().requires_grad_()
        loss = bapo.clipped_surrogate(x, advantages, weights, low, high)
        literal = literal_objective(y, expand(advantages, log_ratio), weights, low, high)
        assert loss.dtype == torch.float32
        assert loss.item() == pytest.approx(literal.item(), rel=1e-4, abs=1e-6)
        if literal.requires_grad:
            loss.backward(), literal.backward()
            tolerance = 1e-2 if dtype == torch.bfloat16 else 1e-5
            torch.testing.assert_close(x.grad, y.grad, rtol=tolerance, atol=1e-7)


@pytest.mark.parametrize(
    "advantage, ratio, low, has_gradient",
    [(1.0, 1.5, 0.8, False), (1.0, 0.5, 0.8, True), (-1.0, 1.5, 0.8, True), (-1.0, 0.5, 0.8, False)]
    # Past 1 the lower bound is a gate: negative tokens pass once they are likelier than when drawn, positive ones always.
    + [(-1.0, 1.0, 1.05, False), (-1.0, 1.04, 1.05, False), (-1.0, 1.06, 1.05, True), (1.0, 1.0, 1.05, True)],
)
def test_only_two_of_the_four_quadrants_are_clipped(advantage, ratio, low, has_gradient):
    x = torch.tensor([[math.log(ratio)]], requires_grad=True)
    bapo.token_losses(x, torch.tensor([advantage]), low, 1.2).sum().backward()
    assert x.grad.item() == (pytest.approx(-ratio * advantage) if has_gradient else 0.0)  # exactly 0


def test_a_token_one_float_beyond_its_bound_has_no_gradient_at_all():
    generator = torch.Generator().manual_seed(0)
    for bound, sign, beyond in ((0.9, -1.0, 0.0), (1.2, 1.0, 9.0), (2.95, 1.0, 9.0)):
        advantages = sign * (torch.rand(5000, generator=generator) + 0.01)
        target = torch.nextafter(torch.tensor(bound), torch.tensor(beyond)).double()
        x = target.log().expand(5000, 1).clone().requires_grad_()  # float64, so that exp gives that very float32
        ratio = bapo.importance_ratio(x)
        low, high = (bound, 9.0) if sign < 0 else (0.0, bound)
        bapo.token_losses(x, advantages, low, high).sum().backward()
        outside = ratio < torch.tensor(bound) if sign < 0 else ratio > torch.tensor(bound)
        assert torch.equal(x.grad != 0, ~outside)


def test_log_ratios_are_clamped_at_20_and_stay_finite():
    x = torch.tensor([[100.0, -100.0]], requires_grad=True)
    loss = bapo.clipped_surrogate(x, torch.tensor([-1.0]), torch.ones(1, 2), 0.8, 1.2)
    loss.backward()
    assert loss.item() == pytest.approx(math.exp(20) + 0.8, rel=1e-6)
    assert x.grad.tolist() == [[0.0, 0.0]]


def test_tokens_of_weight_0_count_nothing_even_nans():
    """Kills: a fill on one side of the loss alone, where 0 * NaN is NaN."""
    x = torch.tensor([[0.1, math.nan, -0.1, 0.3]], requires_grad=True)
    advantages, weights = torch.tensor([[1.0, 1.0, -2.0, math.nan]]), torch.tensor([[0.5, 0.0, 0.25, 0.0]])
    total = bapo.clipped_surrogate(x, advantages, weights, 0.8, 1.2)
    total.backward()
    parts = [-0.5 * math.exp(0.1), 0.5 * math.exp(-0.1)]
    assert total.item() == pytest.approx(sum(parts))
    torch.testing.assert_close(x.grad, torch.tensor([[parts[0], 0.0, parts[1], 0.0]]))


# ---------------------------------------------------------------- on-policy, and bounds past 1
RANGES = {
    "default": ClipSearch(), "gate": bapo.GATE, "main": bapo.PAPER_MAIN, "octothinker": bapo.PAPER_OCTOTHINKER,
    "script": bapo.AUTHORS_SCRIPT, "yaml": bapo.AUTHORS_YAML,
}  # fmt: skip


def loss_and_gradient(log_ratio, advantages, search, **options):
    x = log_ratio.clone().requires_grad_()
    loss, metrics = bapo_loss(x, torch.zeros_like(x), advantages, torch.ones(x.shape), search, **options)
    loss.backward()
    return loss.detach(), x.grad, metrics


@pytest.mark.parametrize("noise", [0.0, 1e-5])
@pytest.mark.parametrize("name", RANGES)
def test_on_policy_bapo_is_grpo(name, noise):
    """Also where rounding moves the ratios off 1, and where no bound reaches the target."""
    g = torch.Generator().manual_seed(0)
    log_ratio, advantages = noise * torch.randn(20, 30, generator=g), torch.randn(20, generator=g) - 0.5
    loss, gradient, metrics = loss_and_gradient(log_ratio, advantages, RANGES[name])
    grpo_loss, grpo_gradient, _ = loss_and_gradient(log_ratio, advantages, bapo.GRPO)
    assert not metrics["reached"] and metrics["high"] > 1.9 and 0.79 < metrics["low"] < 1
    assert torch.equal(loss, grpo_loss) and torch.equal(gradient, grpo_gradient) and (gradient != 0).all()
    exact_loss, exact_gradient, _ = loss_and_gradient(torch.zeros(20, 30), advantages, bapo.GRPO)
    torch.testing.assert_close(loss, exact_loss, rtol=0, atol=1e-5)
    torch.testing.assert_close(gradient, exact_gradient, rtol=1e-4, atol=0)
    assert metrics["negatives_with_gradient"] == 1


def test_only_may_empty_takes_a_bound_past_1_that_no_negative_token_passes():
    log_ratio, advantages = torch.zeros(4, 10), torch.tensor([1.0, -1.0, -1.0, -1.0])
    negative = advantages < 0
    for search, low, share in ((bapo.GATE, 0.98, 0.25), (replace(bapo.GATE, may_empty=True), 1.04, 1.0)):
        _, gradient, metrics = loss_and_gradient(log_ratio, advantages, search)
        assert (metrics["low"].item(), metrics["high"].item()) == (np.float32(low), 3.0)
        expected = {"rho": share, "gradient_share": share, "reached": low > 1, "negatives_with_gradient": low < 1}
        assert {name: metrics[name].item() for name in expected} == pytest.approx({n: float(x) for n, x in expected.items()})
        assert (gradient[negative] == 0).tolist() == [[low > 1] * 10] * 3 and (gradient[~negative] < 0).all()
    # One token that passes is enough; the bound after it is not taken either.
    log_ratio[3, 0] = math.log(1.05)
    bounds = search_clip_bounds(log_ratio, advantages, torch.ones(4, 10), replace(bapo.GATE, rho0=0.999))
    assert bounds.low.item() == np.float32(1.04) and not bounds.reached
    assert bounds.rho.item() == pytest.approx(10 / 11.05)
    # A bound that is given, or where the range starts, is taken as it is.
    assert loss_and_gradient(torch.zeros(4, 10), advantages, ClipSearch.fixed(1.02, 3.0))[2]["negatives_with_gradient"] == 0
    _, gradient, _ = loss_and_gradient(log_ratio, advantages, None, bounds=(1.04, 3.0))
    assert gradient.count_nonzero() == 11 and gradient[3, 0] > 0


def test_from_a_start_past_1_that_no_negative_token_passes_the_upper_bound_still_rises():
    log_ratio, advantages = torch.tensor([[math.log(1.5)], [0.0]]), torch.tensor([1.0, -1.0])
    for low_max, step in ((1.02, 0.02), (1.1, 0.02)):
        search = ClipSearch(low_start=1.02, low_max=low_max, low_step=step)
        bounds = search_clip_bounds(log_ratio, advantages, torch.ones(2, 1), search)
        assert bounds.low.item() == np.float32(1.02) and 1.49 < bounds.high < 1.56 and bounds.rho == 1 and bounds.rho_start == 0


# ---------------------------------------------------------------- splitting a step
def batch(n=14, t=23, seed=3):
    g = torch.Generator().manual_seed(seed)
    rollout = -torch.rand(n, t, generator=g) * 3
    log_probs = rollout + torch.randn(n, t, generator=g) * 0.3
    lengths = torch.randint(1, t + 1, (n, 1), generator=g)
    advantages = torch.randn(n, generator=g)
    return log_probs, rollout, advantages, torch.arange(t) < lengths


def search_inside_the_grid(aggregation, contribution):
    """A search of `batch()` whose target lies a little above the share at the start."""
    log_probs, rollout, advantages, mask = batch()
    search = ClipSearch(contribution=contribution)
    found = search_clip_bounds(log_probs - rollout, advantages, token_weights(mask, aggregation), search)
    return replace(search, rho0=found.rho_start.item() + 0.01)


def half_at_1():
    """Log-ratios, advantages and weights of 2560 tokens, half of them at r = 1 exactly."""
    g = torch.Generator().manual_seed(4)
    log_ratio = 0.4 * torch.randn(64, 40, generator=g) * (torch.rand(64, 40, generator=g) < 0.5)
    return log_ratio, torch.randn(64, generator=g), token_weights(torch.ones(64, 40))


@pytest.mark.parametrize("name", RANGES)
def test_neither_rounding_nor_splitting_moves_the_bounds(name):
    """For targets between any two shares that the search passes: noise in log r as of other kernels, and micro-batches."""
    log_ratio, advantages, weights = half_at_1()
    ratio, a, w = log_ratio.exp().double().numpy(), expand(advantages, log_ratio).double().numpy(), weights.double().numpy()
    *_, shares = literal_search(ratio, a, w, replace(RANGES[name], rho0=0.999))
    targets = [(x + y) / 2 for x, y in itertools.pairwise(shares) if y - x > 1e-4][::2]
    assert len(targets) > 3
    g = torch.Generator().manual_seed(5)
    seen = set()
    for target, noise, parts in itertools.product(targets, (1e-6, 1e-5), (1, 7)):
        search = replace(RANGES[name], rho0=target)
        found = search_clip_bounds(log_ratio, advantages, weights, search)
        noisy = log_ratio + noise * torch.randn(log_ratio.shape, generator=g)
        rows = torch.arange(64).tensor_split(parts)
        again = clip_bounds(sum(contribution_masses(noisy[i], advantages[i], weights[i], search) for i in rows), search)
        assert found.reached and found[:2] == again[:2]
        seen.add(tuple(bound.item() for bound in found[:2]))
    assert len(seen) == len(targets)


def test_a_grid_with_a_point_at_1_lets_rounding_decide():
    """Why ClipSearch warns of it: noise of 1e-5 takes the gradient of half of the tokens at r = 1, and moves the bounds."""
    log_ratio, advantages, weights = half_at_1()
    search = ClipSearch(low_max=1.1, low_step=0.05)
    assert 1.0 in search.lows().tolist()
    g = torch.Generator().manual_seed(6)
    noisy = log_ratio + 1e-5 * torch.randn(log_ratio.shape, generator=g)
    alive = [bapo.diagnostics(x, advantages, weights, (1.0, 3.0))["negatives_with_gradient"].item() for x in (log_ratio, noisy)]
    assert alive == [pytest.approx(0.75, abs=0.02), pytest.approx(0.5, abs=0.02)]
    at_1 = ClipSearch.fixed(1.0, 3.0)
    rho = [search_clip_bounds(x, advantages, weights, at_1).rho.item() for x in (log_ratio, noisy)]
    search = replace(search, rho0=(rho[0] + rho[1]) / 2)
    assert [search_clip_bounds(x, advantages, weights, search).low > 1 for x in (log_ratio, noisy)] == [True, False]


@pytest.mark.parametrize("aggregation", ["token-mean", "sequence-mean"])
@pytest.mark.parametrize("contribution", READINGS)
@pytest.mark.parametrize("parts", [2, 3, 7])
def test_bounds_loss_and_gradient_do_not_depend_on_the_split(parts, contribution, aggregation):
    log_probs, rollout, advantages, mask = batch()
    search = search_inside_the_grid(aggregation, contribution)
    whole = log_probs.clone().requires_grad_()
    loss, metrics = bapo_loss(whole, rollout, advantages, mask, search, aggregation=aggregation)
    loss.backward()

    x = log_probs.clone().requires_grad_()
    weights = token_weights(mask, aggregation)
    rows = torch.arange(len(mask)).tensor_split([1, 6, 8, 9, 11, 13][: parts - 1])  # unequal parts
    masses = sum(contribution_masses((log_probs - rollout)[i], advantages[i], weights[i], search) for i in rows)
    bounds = clip_bounds(masses, search)
    assert bounds.low == metrics["low"] and bounds.high == metrics["high"]
    assert 1.2 < bounds.high < 3.0  # inside the grid, and the parts alone would say otherwise
    alone = [
        clip_bounds(contribution_masses((log_probs - rollout)[i], advantages[i], weights[i], search), search) for i in rows
    ]
    assert any(of_part.high != bounds.high for of_part in alone)
    total = 0.0
    for i in rows:
        part, _ = bapo_loss(x[i], rollout[i], advantages[i], mask[i], weights=weights[i], bounds=bounds)
        part.backward()
        total += part.item()
    assert total == pytest.approx(loss.item(), rel=1e-5)
    torch.testing.assert_close(x.grad, whole.grad, rtol=1e-5, atol=1e-9)


def _rank(rank, store, results):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    log_probs, rollout, advantages, mask = batch()
    mine = slice(0, 5) if rank == 0 else slice(5, 14)
    for aggregation, contribution in itertools.product(("token-mean", "sequence-mean"), READINGS):
        x = log_probs[mine].clone().requires_grad_()
        search = search_inside_the_grid(aggregation, contribution)
        loss, metrics = bapo_loss(
            x, rollout[mine], advantages[mine], mask[mine], search, aggregation=aggregation, process_group=dist.group.WORLD
        )
        loss.backward()
        results[rank, aggregation, contribution] = (loss.item(), x.grad.numpy(), metrics["low"].item(), metrics["high"].item())
    dist.destroy_process_group()


def test_two_processes_with_unequal_token_counts_equal_one(tmp_path):
    with mp.Manager() as manager:
        results = manager.dict()
        mp.spawn(_rank, (str(tmp_path / "store"), results), nprocs=2)
        results = dict(results)
    log_probs, rollout, advantages, mask = batch()
    for aggregation, contribution in itertools.product(("token-mean", "sequence-mean"), READINGS):
        x = log_probs.clone().requires_grad_()
        search = search_inside_the_grid(aggregation, contribution)
        loss, metrics = bapo_loss(x, rollout, advantages, mask, search, aggregation=aggregation)
        loss.backward()
        first, second = (results[rank, aggregation, contribution] for rank in (0, 1))
        assert first[2:] == second[2:] == (metrics["low"].item(), metrics["high"].item())
        assert 1.2 < metrics["high"] < 3.0
        assert first[0] + second[0] == pytest.approx(loss.item(), rel=1e-5)
        torch.testing.assert_close(torch.from_numpy(np.concatenate([first[1], second[1]])), x.grad, rtol=1e-5, atol=1e-9)


# ---------------------------------------------------------------- devices and modes
class Operators(TorchDispatchMode):
    """Names of all operators that run, of the backward pass too, and how often."""

    def __init__(self):
        super().__init__()
        self.names = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


HOST_READS = {"_local_scalar_dense", "item", "nonzero", "masked_select", "equal", "index"}  # the last by a mask
# Sums in an order that varies: on CUDA these raise, or are slow, under torch.use_deterministic_algorithms.
UNORDERED = {
    "cumsum", "cumprod", "index_add", "index_put", "_index_put_impl", "scatter", "scatter_add", "scatter_reduce",
    "index_reduce", "bincount", "histc", "put", "kthvalue", "median", "gather_backward", "index_copy", "_unsafe_index_put",
}  # fmt: skip


@pytest.mark.parametrize("contribution", READINGS)
def test_nothing_is_read_on_the_host_and_nothing_is_summed_in_an_order_that_varies(contribution):
    log_probs, rollout, advantages, mask = batch()
    search = ClipSearch(rho0=0.99, contribution=contribution)
    torch.use_deterministic_algorithms(True)
    try:
        with Operators() as operators:
            bapo_loss(log_probs.clone().requires_grad_(), rollout, advantages, mask, search)[0].backward()
    finally:
        torch.use_deterministic_algorithms(False)
    used = {name.rstrip("_") for name in operators.names}
    assert {"exp", "mul", "sum", "where", "take", "ones_like"} <= used, used  # the last in the backward pass
    assert not used & (HOST_READS | UNORDERED)
    with Operators() as operators:
        torch.ones(()).item(), torch.ones(3).cumsum_(0), torch.ones(3)[torch.ones(3) > 0]
    assert operators.names["_local_scalar_dense"] == operators.names["cumsum_"] == operators.names["index"] == 1  # they count
    # A meta tensor has shapes and no values: whatever reads one, or needs one for a shape, raises.
    on_meta = [tensor.to("meta") for tensor in (log_probs, rollout, advantages, mask)]
    loss, metrics = bapo_loss(on_meta[0].requires_grad_(), *on_meta[1:], search)
    loss.backward()
    assert metrics["low"].device.type == "meta"


class Apple(torch.Tensor):
    """Says that it lies on an Apple GPU."""

    device = property(lambda self: torch.device("mps"))


class NoFloat64(TorchFunctionMode):
    """Makes what shall lie on "mps" on the CPU, and refuses it in float64, as the device does."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        on_apple = str(kwargs.get("device")) == "mps"
        made = func(*args, **(kwargs | {"device": "cpu"} if on_apple else kwargs))
        made = made.as_subclass(Apple) if on_apple else made
        if isinstance(made, Apple) and made.dtype == torch.float64:
            raise TypeError("Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support float64")
        return made


@pytest.mark.parametrize("contribution", READINGS)
def test_a_device_without_float64_finds_the_same(contribution):
    tensors, search = batch(), search_inside_the_grid("token-mean", contribution)
    loss, metrics = bapo_loss(*tensors, search)
    with NoFloat64():
        with pytest.raises(TypeError, match="float64"):
            torch.zeros(1, dtype=torch.float64, device="mps")
        there, found = bapo_loss(*(tensor.as_subclass(Apple) for tensor in tensors), search)
    assert isinstance(there, Apple) and there.item() == pytest.approx(loss.item(), rel=1e-6)
    for name in metrics:
        assert float(found[name]) == pytest.approx(metrics[name].item(), rel=1e-5), name


@pytest.mark.parametrize("given", ["nothing", "weights", "bounds", "everything, to clipped_surrogate"])
def test_tensors_made_in_inference_mode_may_be_given(given):
    tensors = batch()
    expected = tensors[0].clone().requires_grad_()
    loss, _ = bapo_loss(expected, *tensors[1:])
    loss.backward()
    with torch.inference_mode():
        others = [tensor.clone() for tensor in tensors[1:]]
        weights = token_weights(others[2])
        bounds = search_clip_bounds(tensors[0] - others[0], others[1], weights, ClipSearch())
    x = tensors[0].clone().requires_grad_()
    options = {"nothing": {}, "weights": dict(weights=weights), "bounds": dict(weights=weights, bounds=bounds)}
    if given in options:
        again, _ = bapo_loss(x, *others, **options[given])
    else:
        again = bapo.clipped_surrogate(x - others[0], others[1], weights, bounds.low, bounds.high)
    again.backward()
    assert torch.equal(again, loss) and torch.equal(x.grad, expected.grad)


# ---------------------------------------------------------------- edges
ON_START, ON_MAX = (0.6, 1.2), (0.9, 3.0)


@pytest.mark.parametrize("contribution", READINGS)
@pytest.mark.parametrize(
    "log_ratio, advantages, mask, expected, rho, reached",
    [
        ([[0.1, -0.1]], [1.0], [[1, 1]], ON_START, 1.0, True),  # no negatives
        ([[0.1, -0.1]], [-1.0], [[1, 1]], ON_MAX, 0.0, False),  # no positives
        ([[-0.2, -0.3]], [-1.0], [[1, 1]], ON_MAX, 0.0, False),  # nor any unclipped negative at the highest low
        ([[0.1, -0.1]], [-1.0], [[0, 0]], ON_START, 1.0, True),  # nothing unmasked
        ([[0.1, -0.1]], [0.0], [[1, 1]], ON_START, 1.0, True),  # no advantage
        ([[0.0]], [-1.0], [[1]], ON_MAX, 0.0, False),  # one token
        ([[0.0] * 5], [[1.0, 1.0, -1.0, -1.0, -1.0]], [[1] * 5], ON_START, 0.4, True),  # all ratios 1, exactly 2 : 3
        ([[0.0] * 4], [[1.0, -1.0, -1.0, -1.0]], [[1] * 4], ON_MAX, 0.25, False),  # r = 1: no bound can help
        ([[100.0, 0.0]], [[1.0, -1.0]], [[1, 1]], None, None, None),  # clamped, finite
        ([[math.nan, 0.0]], [[math.nan, 1.0]], [[0, 1]], ON_START, 1.0, True),  # NaN under the mask
        ([[]], [1.0], [[]], ON_START, 1.0, True),  # no tokens at all
    ],
)
def test_degenerate_batches(log_ratio, advantages, mask, expected, rho, reached, contribution):
    log_ratio, advantages, mask = torch.tensor(log_ratio), torch.tensor(advantages), torch.tensor(mask)
    x = log_ratio.clone().requires_grad_()
    search = replace(bapo.PAPER_MAIN, contribution=contribution)
    loss, metrics = bapo_loss(x, torch.zeros_like(x), advantages, mask, search)
    loss.backward()
    assert math.isfinite(loss.item()) and torch.isfinite(x.grad).all()
    assert (x.grad[mask == 0] == 0).all()
    if expected:
        assert metrics["reached"].item() == reached
        assert (metrics["low"].item(), metrics["high"].item()) == tuple(np.float32(expected).tolist())
        assert metrics["rho"].item() == pytest.approx(rho)


def test_an_exact_tie_with_the_target_is_met_however_the_sums_are_split():
    for parts in (1, 2, 5, 30):
        advantages = torch.tensor([0.1] * 20 + [-0.1] * 30)  # P : N = 2 : 3 up to rounding, so rho is 0.4
        weights = token_weights(torch.ones(50, 7))
        masses = sum(
            contribution_masses(torch.zeros(len(i), 7), advantages[i], weights[i], bapo.PAPER_MAIN)
            for i in torch.arange(50).chunk(parts)
        )
        assert clip_bounds(masses, bapo.PAPER_MAIN).high.item() == np.float32(1.2)


@pytest.mark.parametrize("short_of_target, met", [(0.0, True), (5e-7, True), (2e-6, False)])
def test_the_target_has_a_tolerance_of_one_millionth(short_of_target, met):
    search = ClipSearch(rho0=0.4, low_start=0.9, high_max=1.25)
    rho = 0.4 - short_of_target
    masses = torch.tensor([rho, 0.9, 1 - rho], dtype=torch.float64)  # P at 1.2, P at 1.25, N at 0.9
    found = clip_bounds(masses, search)
    assert found.high.item() == np.float32(1.2 if met else 1.25) and found.reached


def test_equality_with_the_target_is_met():
    search = ClipSearch(rho0=0.5, low_start=0.9, high_max=1.25)
    target = 0.5 - 1e-6
    for rho, met in ((target, True), (np.nextafter(target, 0), False)):
        # P / (P + N) with P + N = 1 exactly
        found = clip_bounds(torch.tensor([rho, 0.9, 1 - rho], dtype=torch.float64), search)
        assert (found.high.item() == np.float32(1.2)) == met
    never = clip_bounds(torch.tensor([target, target, 1 - target], dtype=torch.float64), search)
    assert never.reached


def test_the_rollout_log_probs_get_no_gradient_and_the_mask_wins_over_weights():
    log_probs, rollout, advantages, mask = batch()
    x, y = log_probs.clone().requires_grad_(), rollout.clone().requires_grad_()
    loss, _ = bapo_loss(x, y, advantages, mask, weights=torch.full(mask.shape, 1 / mask.sum()))
    loss.backward()
    assert y.grad is None and (x.grad[~mask] == 0).all()
    assert loss.item() == pytest.approx(bapo_loss(log_probs, rollout, advantages, mask)[0].item(), rel=1e-5)


def test_bfloat16_log_probs_are_subtracted_in_float32():
    rollout = torch.tensor([[-8.0, -8.0]], dtype=torch.bfloat16)
    log_probs = torch.tensor([[-8.001, -7.999]])  # rounded to bfloat16 both would be -8
    _, metrics = bapo_loss(log_probs, rollout, torch.tensor([1.0]), torch.ones(1, 2))
    assert metrics["ratio_max_positive"].item() == pytest.approx(math.exp(0.001), rel=1e-5)
    a, b = torch.tensor([[-8.0, -3.02]]).bfloat16(), torch.tensor([[-8.03125, -3.0]]).bfloat16()
    _, metrics = bapo_loss(a, b, torch.tensor([1.0]), torch.ones(1, 2))
    expected = (a.double() - b.double()).exp()
    assert metrics["ratio_max_positive"].item() == pytest.approx(expected.max().item(), rel=1e-6)
    assert metrics["ratio_min_positive"].item() == pytest.approx(expected.min().item(), rel=1e-6)


def test_a_nan_inside_the_mask_makes_the_loss_nan():
    for position in range(3):
        arguments = [torch.zeros(1, 2), torch.zeros(1, 2), torch.tensor([[1.0, -1.0]])]
        arguments[position][0, 1] = math.nan
        assert bapo_loss(*arguments, torch.ones(1, 2))[0].isnan()


def test_an_empty_low_range_still_lets_high_rise():
    search = ClipSearch(low_start=0.8, low_max=0.8, rho0=0.5, contribution="surrogate")
    log_ratio, advantages = torch.tensor([[math.log(1.5), 0.0]]), torch.tensor([[1.0, -1.4]])
    found = search_clip_bounds(log_ratio, advantages, torch.ones(1, 2), search)
    assert found.low.item() == np.float32(0.8) and found.high.item() == np.float32(1.4) and found.reached


def test_the_last_value_of_each_range_is_its_max_and_steps_are_counted_in_integers():
    s = bapo.PAPER_MAIN
    low = 0.6
    while low + 0.02 <= 0.9:  # adding floats, as the algorithm is printed, stops one step short
        low += 0.02
    assert low < 0.89
    assert s.lows()[-1].item() == np.float32(0.9) and len(s.lows()) == 16
    assert s.highs()[-1].item() == np.float32(3.0) and len(s.highs()) == 37
    assert s.lows().dtype == torch.float32


def test_fixed_bounds_are_a_search_over_one_point():
    log_probs, rollout, advantages, mask = batch()
    loss, metrics = bapo_loss(log_probs, rollout, advantages, mask, bapo.CLIP_HIGHER)
    expected = bapo.clipped_surrogate(log_probs - rollout, advantages, token_weights(mask), 0.8, 1.28)
    assert loss == expected and metrics["reached"]
    given, metrics = bapo_loss(log_probs, rollout, advantages, mask, bounds=(0.8, 1.28))
    assert given == expected and metrics["high"].item() == np.float32(1.28) and "rho" not in metrics


def test_no_search_means_the_default_search():
    tensors = batch()
    for options in ({}, dict(search=None)):
        loss, metrics = bapo_loss(*tensors, **options)
        found = search_clip_bounds(tensors[0] - tensors[1], tensors[2], token_weights(tensors[3]), ClipSearch())
        assert [metrics[name].item() for name in ("low", "high")] == [found.low.item(), found.high.item()] != [0.8, 1.2]
        assert metrics["rho"].item() == pytest.approx(found.rho.item())


# ---------------------------------------------------------------- advantages and weights
def test_advantages_equal_the_literal_formula():
    rewards = torch.tensor([1.0, 0.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0])
    # group 1: mean 1/4, sample std 1/2; group 2: mean 1/2, sample std sqrt(1/3)
    s = math.sqrt(1 / 3)
    expected = [1.5, -0.5, -0.5, -0.5, 0.5 / s, 0.5 / s, -0.5 / s, -0.5 / s]
    assert bapo.group_relative_advantages(rewards, 4).tolist() == pytest.approx(expected, rel=1e-5)
    assert bapo.group_relative_advantages(rewards, 4, normalize_std=False).tolist() == pytest.approx(
        [0.75, -0.25, -0.25, -0.25, 0.5, 0.5, -0.5, -0.5]
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool])
def test_a_group_of_equal_rewards_gets_exactly_zero(dtype):
    rewards = torch.tensor([0.1] * 3 + [1.0] * 3, dtype=torch.float64).to(dtype)
    assert sum([0.1] * 3) / 3 != 0.1  # the mean of equal numbers may differ from them
    advantages = bapo.group_relative_advantages(rewards, 3)
    assert advantages.tolist() == [0.0] * 6
    assert advantages.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert bapo.group_relative_advantages(rewards, 1).tolist() == [0.0] * 6


def test_token_weights():
    mask = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0], [0, 0, 0, 0]])
    third = 1 / 6
    assert token_weights(mask).tolist() == [[0.25] * 3 + [0.0], [0.25, 0, 0, 0], [0.0] * 4]
    expected = torch.tensor([[third] * 3 + [0.0], [0.5, 0, 0, 0], [0.0] * 4])
    torch.testing.assert_close(token_weights(mask.bool(), "sequence-mean"), expected)
    torch.testing.assert_close(token_weights(mask, "constant", 10), mask / 30)
    for aggregation in ("token-mean", "sequence-mean", "constant"):
        assert token_weights(torch.zeros(2, 3), aggregation, 5).tolist() == [[0.0] * 3] * 2


def test_at_ratio_one_the_share_is_set_by_lengths_under_token_mean_and_is_half_under_sequence_mean():
    rewards = torch.tensor([1.0, 0.0, 0.0, 0.0])  # a quarter right: the share does not depend on the accuracy
    advantages = bapo.group_relative_advantages(rewards, 4)
    mask = torch.arange(20) < torch.tensor([[10], [20], [20], [20]])
    for aggregation, share in (("token-mean", 1 / 3), ("sequence-mean", 1 / 2)):
        found = search_clip_bounds(torch.zeros(4, 20), advantages, token_weights(mask, aggregation), ClipSearch())
        assert found.rho_start.item() == pytest.approx(share, rel=1e-5)


# ---------------------------------------------------------------- metrics
@pytest.mark.parametrize("aggregation", ["token-mean", "sequence-mean"])
@pytest.mark.parametrize("contribution", READINGS)
def test_metrics_equal_literal_sums_over_the_tokens(contribution, aggregation):
    log_probs, rollout, advantages, mask = batch()
    log_probs = log_probs.masked_fill(~mask, math.nan)
    search = replace(bapo.GRPO, contribution=contribution)
    loss, metrics = bapo_loss(log_probs.requires_grad_(), rollout, advantages, mask, search, aggregation=aggregation)
    tokens = [
        (math.exp(log_probs[i, t].item() - rollout[i, t].item()), advantages[i].item(), 1 / mask[i].sum().item())
        for i, t in itertools.product(*map(range, mask.shape))
        if mask[i, t]
    ]
    if aggregation == "token-mean":
        tokens = [(r, a, 1.0) for r, a, _ in tokens]
    positive, negative = [r for r, a, _ in tokens if a > 0], [r for r, a, _ in tokens if a < 0]
    expected = {
        "low": 0.8, "high": 1.2, "reached": 1.0,
        "clip_fraction_high": sum(r > 1.2 for r in positive) / len(tokens),
        "clip_fraction_low": sum(r < 0.8 for r in negative) / len(tokens),
        "negatives_with_gradient": sum(r >= 0.8 for r in negative) / len(negative),
        "positive_tokens": len(positive) / len(tokens), "negative_tokens": len(negative) / len(tokens),
        "ratio_mean_positive": np.mean(positive), "ratio_mean_negative": np.mean(negative),
        "ratio_min_positive": min(positive), "ratio_min_negative": min(negative),
        "ratio_max_positive": max(positive), "ratio_max_negative": max(negative),
        "kl": np.mean([r - 1 - math.log(r) for r, _, _ in tokens]),
    }  # fmt: skip
    masses = {
        "surrogate": [(a > 0, w * abs(a) * (min(r, 1.2) if a > 0 else max(r, 0.8))) for r, a, w in tokens],
        "gradient": [(a > 0, w * abs(a) * r) for r, a, w in tokens if (r <= 1.2 if a > 0 else r >= 0.8)],
    }
    shares = {name: sum(m for up, m in parts if up) / sum(m for _, m in parts) for name, parts in masses.items()}
    expected["rho"] = expected["rho_start"] = shares[contribution]
    expected["gradient_share"] = shares["gradient"]
    assert set(metrics) == set(expected)
    for name, value in expected.items():
        assert metrics[name].item() == pytest.approx(value, rel=1e-4), name
        assert metrics[name].shape == () and not metrics[name].requires_grad
    assert expected["clip_fraction_high"] != expected["clip_fraction_low"] > 0
    assert abs(shares["gradient"] - shares["surrogate"]) > 0.01
    if aggregation == "token-mean":  # without weights all tokens weigh the same
        assert bapo.diagnostics(log_probs - rollout, advantages, mask, (0.8, 1.2))["gradient_share"] == pytest.approx(
            shares["gradient"]
        )


def test_a_token_on_its_bound_is_not_counted_as_clipped():
    x = torch.zeros(1, 2)  # r = 1
    metrics = bapo.diagnostics(x, torch.tensor([[1.0, -1.0]]), torch.ones(1, 2), (1.0, 1.0))
    assert metrics["clip_fraction_high"] == metrics["clip_fraction_low"] == 0
    assert bapo.unclipped(torch.ones(2), torch.tensor([1.0, -1.0]), 1.0, 1.0).all()


def test_k3_estimates_kl_from_the_rollout_policy():
    rollout, policy = torch.tensor([0.7, 0.2, 0.1]), torch.tensor([0.4, 0.4, 0.2])
    drawn = torch.multinomial(rollout, 200_000, replacement=True, generator=torch.Generator().manual_seed(0))[None]
    kl = bapo.diagnostics((policy / rollout).log()[drawn], torch.ones(1), torch.ones(drawn.shape), (0.8, 1.2))["kl"]
    exact, reverse = (rollout * (rollout / policy).log()).sum(), (policy * (policy / rollout).log()).sum()
    assert kl.item() == pytest.approx(exact.item(), rel=0.01) and abs(reverse - exact) > 0.02 * exact


def test_ratio_metrics_of_an_absent_sign_are_nan():
    _, metrics = bapo_loss(torch.zeros(1, 2), torch.zeros(1, 2), torch.ones(1), torch.ones(1, 2))
    assert metrics["ratio_min_negative"].isnan() and metrics["ratio_mean_negative"].isnan()
    assert metrics["negatives_with_gradient"].isnan() and metrics["gradient_share"] == 1
    assert metrics["ratio_max_positive"] == 1


# ---------------------------------------------------------------- errors
@pytest.mark.parametrize(
    "options, named",
    [
        (dict(rho0=1.0), "rho0"),
        (dict(rho0=-0.1), "rho0"),
        (dict(rho0=math.nan), "rho0"),
        (dict(low_start=0.95), "low_start"),
        (dict(high_start=3.5), "high_start"),
        (dict(high_max=math.inf), "high_start"),
        (dict(low_step=0.0), "low_step"),
        (dict(high_step=-0.05), "high_step"),
        (dict(low_step=0.07), "low_step"),
        (dict(high_step=0.07), "high_step"),
        (dict(low_start=1.0, low_max=1.3, low_step=0.1), "low_max"),
        (dict(contribution="eq8"), "contribution"),
        (dict(low_max=1.1, low_step=0.06, contribution="surrogate"), "low_max.*may_empty"),
    ],
)
def test_a_search_that_makes_no_sense_is_refused(options, named):
    with pytest.raises(ValueError, match=named):
        ClipSearch(**options)


def test_presets_are_valid_and_as_published():
    """Sections 5.1 and A of the paper, with Eq. 8's values; and the default."""
    main = dict(low_step=0.02, high_start=1.2, high_step=0.05, contribution="surrogate", may_empty=False)
    assert vars(bapo.PAPER_MAIN) == dict(rho0=0.4, low_start=0.6, low_max=0.9, high_max=3.0, **main)
    assert vars(bapo.PAPER_OCTOTHINKER) == dict(rho0=0.45, low_start=0.8, low_max=0.9, high_max=2.0, **main)
    main["contribution"] = "gradient"
    assert vars(ClipSearch()) == dict(rho0=0.45, low_start=0.8, low_max=0.9, high_max=2.0, **main)
    assert bapo.GATE == ClipSearch(low_max=1.1, low_step=0.06, high_max=3.0)  # not the paper's
    for search, low, high in ((bapo.GRPO, 0.8, 1.2), (bapo.CLIP_HIGHER, 0.8, 1.28)):
        assert (search.lows().tolist(), search.highs().tolist()) == ([np.float32(low)], [np.float32(high)])
    for preset, threshold in ((bapo.AUTHORS_SCRIPT, 0.5), (bapo.AUTHORS_YAML, 1.0)):  # P/N >= x is rho >= x/(1+x)
        assert preset.rho0 / (1 - preset.rho0) == pytest.approx(threshold)


@pytest.mark.parametrize(
    "call, named",
    [
        (lambda: bapo_loss(torch.zeros(2, 3), torch.zeros(2, 2), torch.zeros(2), torch.ones(2, 3)), "rollout_log_probs"),
        (lambda: bapo_loss(torch.zeros(2, 3), torch.zeros(2, 3), torch.zeros(3), torch.ones(2, 3)), "advantages"),
        (lambda: bapo_loss(torch.zeros(2, 3), torch.zeros(2, 3), torch.zeros(2), torch.ones(2)), "mask"),
        (lambda: bapo_loss(torch.zeros(3), torch.zeros(3), torch.zeros(3), torch.ones(3)), "log_probs must be .N, T., got shape .3."),
        (lambda: bapo.clipped_surrogate(torch.zeros(2, 3), torch.zeros(2), torch.ones(3), 0.8, 1.2), "weights"),
        (lambda: clip_bounds(torch.zeros(5), ClipSearch()), "masses"),
        (lambda: bapo.group_relative_advantages(torch.zeros(7), 4), "group_size"),
        (lambda: bapo.group_relative_advantages([1.0, 0.0], 2), "rewards.*a list"),
        (lambda: bapo.group_relative_advantages(torch.zeros(2, 2), 2), "rewards.*2, 2"),
        (lambda: bapo.group_relative_advantages(torch.zeros(8), 0), "group_size"),
        (lambda: token_weights(torch.ones(2, 3), "mean"), "aggregation"),
        (lambda: token_weights(torch.ones(2, 3), "constant"), "length"),
        (lambda: token_weights(torch.ones(3)), "mask"),
    ],
)
def test_mismatched_arguments_are_named(call, named):
    with pytest.raises(ValueError, match=named):
        call()


@pytest.mark.parametrize("low, high", [(0.2, 0.28), (1.2, 0.8), (1.2, 1.2), (0.8, 0.99)])
def test_epsilons_and_swapped_bounds_are_refused_wherever_bounds_are_given(low, high):
    """Kills: no check in one of the places where people write bounds."""
    zeros = torch.zeros(2, 3)
    advantages = torch.tensor([1.0, -1.0])
    mask = torch.ones(2, 3)
    calls = [
        lambda: ClipSearch.fixed(low, high),
        lambda: bapo_loss(zeros, zeros, advantages, mask, bounds=(low, high)),
        lambda: bapo.token_losses(zeros, advantages, low, high),
        lambda: bapo.clipped_surrogate(zeros, advantages, mask, low, high),
    ]
    for call in calls:
        with pytest.raises(ValueError, match="bounds are ratios, 0.8 and 1.2, not epsilons"):
            call()


def test_a_small_kl_is_not_lost_to_cancellation():
    """Kills: r - 1 - log r, which gives -7e-10 for 5e-11 in float32."""
    for size in (1e-5, 1e-4, 1e-3):
        log_ratio = torch.full((1, 8), size)
        kl = bapo.diagnostics(log_ratio, torch.ones(1), torch.ones(1, 8), (0.8, 1.2))["kl"].item()
        assert kl == pytest.approx(math.expm1(size) - size, rel=0.05)


def test_constant_aggregation_takes_its_length():
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    advantages = torch.tensor([1.0, 2.0])
    zeros = torch.zeros(2, 3)
    loss, _ = bapo_loss(zeros, zeros, advantages, mask, aggregation="constant", length=5)
    assert loss.item() == pytest.approx(-(2 * 1.0 + 1 * 2.0) / (2 * 5))
    with pytest.raises(ValueError, match="needs length > 0"):
        bapo_loss(zeros, zeros, advantages, mask, aggregation="constant")


@pytest.mark.parametrize(
    "changed, named",
    [
        (dict(advantages=np.ones(2)), "advantages must be a tensor, got a ndarray"),
        (dict(search=0.4), "search must be a ClipSearch or None, got a float"),
        (dict(search={"rho0": 0.4}), "search must be a ClipSearch or None, got a dict"),
        (dict(weights=torch.ones(2)), r"weights must have shape \[2, 3\], got \[2\]"),
        (dict(weights=0.5), "weights must be a tensor, got a float"),
        (dict(mask=[[1, 1, 1]] * 2), "mask must be a tensor, got a list"),
        (dict(log_probs=np.zeros((2, 3))), r"log_probs must be a tensor \[N, T\], got a ndarray"),
    ],
)
def test_arguments_of_a_wrong_type_are_named(changed, named):
    arguments = dict(log_probs=torch.zeros(2, 3), rollout_log_probs=torch.zeros(2, 3), advantages=torch.ones(2), mask=torch.ones(2, 3))
    with pytest.raises(ValueError, match=named):
        bapo_loss(**(arguments | changed))


def test_the_two_ways_to_make_a_grid_agree_in_float32():
    """The masses compare with Python floats, the bounds come from a tensor made on the device."""
    for search in (ClipSearch(), bapo.PAPER_MAIN, bapo.GATE, bapo.GRPO, ClipSearch(high_max=7.3, high_step=0.1)):
        for side, tensor in (("low", search.lows()), ("high", search.highs())):
            start, stop, step = (getattr(search, f"{side}_{end}") for end in ("start", "max", "step"))
            values = bapo._grid_values(start, stop, step)
            assert torch.tensor(values, dtype=torch.float32).tolist() == tensor.tolist()


@pytest.mark.skipif(shutil.which("gcc") is None, reason="torch.compile needs a compiler")
def test_a_compiled_loss_equals_the_plain_one_for_every_range():
    """Kills: a list read from a tensor within the compiled function, which then keeps one range's number of bounds."""
    torch._dynamo.reset()
    compiled = torch.compile(bapo_loss, backend="aot_eager")
    generator = torch.Generator().manual_seed(0)
    log_probs = 0.3 * torch.randn(4, 6, generator=generator)
    advantages = torch.tensor([1.0, -1.0, 0.5, -2.0])
    for search in (ClipSearch(), bapo.PAPER_MAIN, bapo.GATE, bapo.GRPO, bapo.AUTHORS_SCRIPT):
        arguments = (log_probs, torch.zeros(4, 6), advantages, torch.ones(4, 6), search)
        loss, metrics = compiled(*arguments)
        expected, of_expected = bapo_loss(*arguments)
        torch.testing.assert_close(loss, expected)
        assert (metrics["low"], metrics["high"]) == (of_expected["low"], of_expected["high"])
