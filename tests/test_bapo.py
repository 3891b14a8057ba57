"""bapo.py against literal code.

Algorithm 1 as a loop, Eq. 8 as sums, gradients by autograd of Eq. 4 written out.
"""

import itertools
import math
import threading
from collections import Counter
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import bapo
from bapo import (
    ClipBounds,
    ClipSearch,
    bapo_loss,
    clip_bounds,
    contribution_masses,
    search_clip_bounds,
    token_weights,
)

READINGS = ("surrogate", "gradient")
AGGREGATIONS = ("token-mean", "sequence-mean")


def f32(value: float) -> float:
    """The nearest float32."""
    return float(np.float32(value))


def pair(bounds) -> tuple[float, float]:
    """(low, high) of bounds or of metrics, as floats."""
    if isinstance(bounds, ClipBounds):
        return bounds.low.item(), bounds.high.item()
    return bounds["low"].item(), bounds["high"].item()


# ---------------------------------------------------------------- the oracle
class Tokens(NamedTuple):
    """Numpy float64 [N, T]; tokens of weight 0 are no tokens."""

    ratio: np.ndarray
    advantages: np.ndarray
    weights: np.ndarray


def as_tokens(log_ratio: Tensor, advantages: Tensor, weights: Tensor) -> Tokens:
    """The ratios are rounded to float32, as in bapo.py."""
    ratio = bapo.importance_ratio(log_ratio)
    return Tokens(
        ratio.double().numpy(),
        per_token(advantages, log_ratio).double().numpy(),
        weights.double().numpy(),
    )


def per_token(advantages: Tensor, like: Tensor) -> Tensor:
    return advantages[:, None].expand_as(like) if advantages.dim() == 1 else advantages


def literal_rho(tokens: Tokens, low: float, high: float, contribution: str) -> float:
    """Eq. 8 as sums over tokens, as a share; NaN without any mass."""
    positive = (tokens.weights != 0) & (tokens.advantages > 0)
    negative = (tokens.weights != 0) & (tokens.advantages < 0)
    value = tokens.ratio * tokens.advantages
    if contribution == "surrogate":
        clipped_high = np.clip(tokens.ratio, 0, high) * tokens.advantages
        clipped_low = np.clip(tokens.ratio, low, None) * tokens.advantages
        of_positive = np.minimum(value, clipped_high)
        of_negative = np.minimum(value, clipped_low)
    else:
        of_positive = value * (tokens.ratio <= high)
        of_negative = value * (tokens.ratio >= low)
    positive_mass = abs((tokens.weights * of_positive)[positive].sum())
    negative_mass = abs((tokens.weights * of_negative)[negative].sum())
    total = positive_mass + negative_mass
    return positive_mass / total if total else math.nan


class Literal(NamedTuple):
    """What Algorithm 1 finds: bounds, and every rho that it has tried."""

    low: float
    high: float
    tried: list[float]


def literal_search(tokens: Tokens, search: ClipSearch) -> Literal:
    """Algorithm 1, candidate by candidate; steps are counted, bounds rounded to float32."""
    steps_of_high = round((search.high_max - search.high_start) / search.high_step)
    steps_of_low = round((search.low_max - search.low_start) / search.low_step)
    widest = literal_rho(tokens, search.low_start, search.high_max, search.contribution)
    rho_without_mass = float(math.isnan(widest))
    i = 0
    j = 0
    tried = []
    while True:
        low = f32(search.low_start + j * search.low_step)
        high = f32(search.high_start + i * search.high_step)
        rho = literal_rho(tokens, low, high, search.contribution)
        tried.append(rho_without_mass if math.isnan(rho) else rho)
        at_the_end = i == steps_of_high and j == steps_of_low
        if tried[-1] >= search.rho0 - 1e-6 or at_the_end:
            return Literal(low, high, tried)
        if i < steps_of_high:
            i += 1
            continue
        next_low = f32(search.low_start + (j + 1) * search.low_step)
        if next_low > 1 and not search.may_empty and not any_negative_passes(tokens, next_low):
            return Literal(low, high, tried)
        j += 1


def any_negative_passes(tokens: Tokens, low: float) -> bool:
    negative = (tokens.weights != 0) & (tokens.advantages < 0)
    return bool((negative & (tokens.ratio >= low)).any())


# ---------------------------------------------------------------- random cases
class Case(NamedTuple):
    log_ratio: Tensor
    advantages: Tensor
    weights: Tensor
    search: dict  # arguments of ClipSearch


LOW_RANGES = [
    {},
    {"low_start": 0.6},
    {"low_start": 0.9},
    {"low_max": 0.98},
    {"low_step": 0.05},
    {"low_max": 1.1, "low_step": 0.06},
    {"low_max": 1.1, "low_step": 0.06},
    {"low_start": 0.97, "low_max": 1.17, "low_step": 0.04},
    {"low_start": 0.97, "low_max": 1.17, "low_step": 0.04},
    {"low_start": 1.02, "low_max": 1.02},
    {"low_start": 1.04, "low_max": 1.12, "low_step": 0.02},
]
HIGH_RANGES = [{}, {"high_max": 3.0}, {"high_max": 1.2}, {"high_step": 0.1}]
SPREADS = [0.0, 1e-5, 0.02, 0.1, 0.3, 0.5, 0.5, 2.0]  # of log-ratios
SIGNS = [None] * 6 + ["positive", "negative", "zero"]  # of advantages


def random_case(generator: torch.Generator, dtype: torch.dtype) -> Case:
    """A small batch with every degeneracy in it now and then."""

    def choose(choices):
        return choices[torch.randint(len(choices), (), generator=generator).item()]

    rows = choose([1, 2, 8, 12])
    width = choose([1, 5, 16])
    log_ratio = torch.randn(rows, width, generator=generator) * choose(SPREADS)
    if choose([True, False, False]):  # many ratios are exactly 1, a bound of some searches below
        log_ratio = log_ratio * (torch.rand(rows, width, generator=generator) < 0.5)
    shape = choose([(rows,), (rows, width)])
    advantages = torch.randn(shape, generator=generator)
    sign = choose(SIGNS)
    if sign == "positive":
        advantages = advantages.abs()
    elif sign == "negative":
        advantages = -advantages.abs()
    elif sign == "zero":
        advantages = torch.zeros_like(advantages)
    mask = torch.rand(rows, width, generator=generator) < choose([0.0, 0.3, 0.9, 1.0, 1.0])
    weights = token_weights(mask, choose(AGGREGATIONS))
    search = {"rho0": choose([0.0, 0.3, 0.4, 0.45, 0.5, 0.6, 0.95])}
    search |= choose(LOW_RANGES)
    search |= choose(HIGH_RANGES)
    if search.get("low_max", 0.9) < 1:
        search |= choose([{}, {"high_start": 1.0}])
    return Case(log_ratio.to(dtype), advantages.to(dtype), weights, search)


def with_target_on_the_way(
    search: ClipSearch, masses: Tensor, generator: torch.Generator
) -> ClipSearch:
    """The same search with a target that is met between its start and its last bounds."""
    positive, negative = masses.split([len(search.highs()), len(search.lows())])
    at_start = positive[0] / (positive[0] + negative[0])
    at_last_high = positive[-1] / (positive[-1] + negative[0])
    at_the_end = positive[-1] / (positive[-1] + negative[-1])
    largest = max(at_start, at_last_high, at_the_end)
    target = at_start + (largest - at_start) * torch.rand((), generator=generator)
    return replace(search, rho0=target.nan_to_num(0.5).clamp(max=0.999).item())


# ---------------------------------------------------------------- the search
@pytest.mark.parametrize(
    "seed, dtype", [(0, torch.bfloat16), (1, torch.float32), (2, torch.float64)]
)
@pytest.mark.parametrize("contribution", READINGS)
def test_search_equals_the_literal_loop(contribution, seed, dtype):
    generator = torch.Generator().manual_seed(seed)
    seen = Counter()
    cases = 250
    for number in range(cases):
        case = random_case(generator, dtype)
        # Only gradient masses tell whether a token passes a bound: by Eq. 8's values a range past 1
        # must be allowed to empty.
        may_empty = number % 2 == 0 or contribution == "surrogate"
        search = ClipSearch(**case.search, contribution=contribution, may_empty=may_empty)
        masses = contribution_masses(case.log_ratio, case.advantages, case.weights, search)
        if torch.rand((), generator=generator) < 0.75:
            search = with_target_on_the_way(search, masses, generator)
        found = clip_bounds(masses, search)
        tokens = as_tokens(case.log_ratio, case.advantages, case.weights)
        literal = literal_search(tokens, search)
        assert found.rho_start.item() == pytest.approx(literal.tried[0], abs=1e-6)
        target = search.rho0 - 1e-6
        if min(abs(rho - target) for rho in literal.tried) < 3e-7:
            continue  # float32 products may fall on either side
        assert pair(found) == (literal.low, literal.high), (case.search, literal.tried[-3:])
        assert found.rho.item() == pytest.approx(literal.tried[-1], abs=1e-6)
        assert found.reached.item() == (literal.tried[-1] >= target)

        lows = search.lows().tolist()
        highs = search.highs().tolist()
        is_past_1 = literal.low > max(1, lows[0])
        seen["compared"] += 1
        inside_low = literal.low not in (lows[0], lows[-1])
        inside_high = literal.high not in (highs[0], highs[-1])
        seen["inside"] += inside_low or inside_high
        seen["raised past 1"] += is_past_1
        seen["emptied"] += is_past_1 and not any_negative_passes(tokens, literal.low)
        seen["held back"] += literal.low < lows[-1] and not found.reached.item()
    # Every branch was taken. (Under "surrogate" no target stops the second half, and nothing is
    # held back.)
    assert seen["compared"] > 0.9 * cases
    assert seen["inside"] > 15
    assert seen["raised past 1"] > 3
    assert seen["emptied"] > 0
    assert seen["held back"] > 0 or contribution == "surrogate"


EVERY_BOUND = {
    "low_start": 0.8,
    "low_max": 1.04,
    "low_step": 0.06,
    "high_start": 1.1,
    "high_max": 3.0,
    "high_step": 0.1,
    "may_empty": True,
}


@pytest.mark.parametrize("low, high", [(1.0, 1.2), (0.8, 1.0)])
def test_a_token_exactly_on_a_bound_has_a_gradient(low, high):
    """Kills: clamp, which drops the gradient there from torch 2.15 on."""
    for bounds in ((low, high), (torch.tensor(low), torch.tensor(high))):
        log_ratio = torch.zeros(2, 3, requires_grad=True)
        losses = bapo.token_losses(log_ratio, torch.tensor([2.0, -3.0]), *bounds)
        losses.sum().backward()
        assert log_ratio.grad.tolist() == [[-2.0] * 3, [3.0] * 3]


@pytest.mark.parametrize("contribution", READINGS)
def test_masses_equal_the_sums_of_eq_8_at_every_candidate_and_bounds_are_inclusive(contribution):
    search = ClipSearch(**EVERY_BOUND, contribution=contribution)
    lows = search.lows()
    highs = search.highs()
    # Ratios on, one float below and one float above every bound, for both signs of the advantage.
    on = torch.cat([lows, highs])
    below = torch.nextafter(on, torch.tensor(0.0))
    above = torch.nextafter(on, torch.tensor(9.0))
    log_ratio = torch.cat([on, below, above]).double().log().repeat(2, 1)
    ratio = bapo.importance_ratio(log_ratio)
    assert torch.isin(ratio, on).sum() > 20  # exp(log(.)) gives many of the bounds back exactly
    advantages = torch.tensor([1.5, -0.5])
    weights = torch.rand(log_ratio.shape, generator=torch.Generator().manual_seed(0)) + 0.1
    masses = contribution_masses(log_ratio, advantages, weights, search)
    value = (weights * advantages[:, None]).double() * ratio.double()
    for mass, high in zip(masses, highs):
        if contribution == "surrogate":
            expected = value[0] * (ratio[0].clamp(max=high) / ratio[0]).double()
        else:
            expected = value[0] * (ratio[0] <= high)
        assert mass.item() == pytest.approx(expected.sum().item(), rel=1e-6)
    for mass, low in zip(masses[len(highs) :], lows):
        if contribution == "surrogate":
            expected = -value[1] * (ratio[1].clamp(min=low) / ratio[1]).double()
        else:
            expected = -value[1] * (ratio[1] >= low)
        assert mass.item() == pytest.approx(expected.sum().item(), rel=1e-6)
    # The loss agrees: a token on its bound still has a gradient, one float beyond it has none.
    for high in highs:
        assert torch.equal(has_gradient(log_ratio, advantages, 0.0, high)[0], ratio[0] <= high)
    for low in lows:
        assert torch.equal(has_gradient(log_ratio, advantages, low, 9.0)[1], ratio[1] >= low)


def has_gradient(log_ratio: Tensor, advantages: Tensor, low, high) -> Tensor:
    leaf = log_ratio.float().clone().requires_grad_()
    bapo.token_losses(leaf, advantages, low, high).sum().backward()
    return leaf.grad != 0


def test_masses_are_summed_in_float64():
    advantages = torch.ones(1, 1002)
    advantages[0, 0] = 2.0**24
    masses = contribution_masses(
        torch.zeros(1, 1002), advantages, torch.ones(1, 1002), ClipSearch()
    )
    assert masses[0] == 2**24 + 1001  # no float32


# ---------------------------------------------------------------- how Eq. 8 is read
def test_a_signed_sum_in_the_denominator_would_hardly_ever_fire():
    """Wrong responses from equally long to three times as long (Figs. 4, 6).

    The share asks for wider bounds, |P - N| never.
    """
    share_fires = 0
    signed_fires = 0
    advantages = torch.tensor([1.0, -1.0])
    search = bapo.PAPER_MAIN
    number_of_highs = len(search.highs())
    for wrong in range(10, 31):
        mask = torch.arange(30) < torch.tensor([[10], [wrong]])
        weights = token_weights(mask)
        masses = contribution_masses(torch.zeros(2, 30), advantages, weights, search)
        found = clip_bounds(masses, search)
        positive = masses[0].item()
        negative = masses[number_of_highs].item()
        assert found.rho_start.item() == pytest.approx(10 / (10 + wrong))
        share_fires += found.high.item() > 1.21
        if positive != negative:
            signed_fires += positive / abs(positive - negative) < 0.4
    assert share_fires == 15
    assert signed_fires == 0


def test_raising_low_lowers_rho_under_surrogate_and_never_under_gradient():
    generator = torch.Generator().manual_seed(0)
    weights = torch.ones(4, 20)
    for _ in range(20):
        log_ratio = torch.randn(4, 20, generator=generator) * 0.4
        advantages = torch.randn(4, generator=generator)
        advantages[0] = -1
        changes_of_negative = {}
        for contribution in READINGS:
            search = replace(bapo.GATE, contribution=contribution, may_empty=True)
            masses = contribution_masses(log_ratio, advantages, weights, search)
            positive, negative = masses.split([len(search.highs()), len(search.lows())])
            assert (positive.diff() >= 0).all()  # raising high never lowers P
            changes_of_negative[contribution] = negative.diff()
        assert (changes_of_negative["surrogate"] >= 0).all()
        assert (changes_of_negative["surrogate"] > 0).any()
        assert (changes_of_negative["gradient"] <= 0).all()
        assert (changes_of_negative["gradient"] < 0).any()


def test_the_plain_sum_over_sampled_tokens_estimates_eq_8s_sum_over_the_vocabulary():
    generator = torch.Generator().manual_seed(0)
    rollout = torch.tensor([0.7, 0.2, 0.1], dtype=torch.float64)
    policy = torch.tensor([0.5, 0.2, 0.3], dtype=torch.float64)
    advantage = torch.tensor([-1.0, 1.0, 0.5])
    search = replace(bapo.PAPER_MAIN, high_step=0.6, low_step=0.1)
    log_ratio = (policy / rollout).log()[None]
    # Over the vocabulary the weights are pi_rollout.
    exact = contribution_masses(log_ratio, advantage[None], rollout[None], search)
    samples = 50_000
    drawn = torch.multinomial(rollout, samples, replacement=True, generator=generator)
    of_drawn = (log_ratio[:, drawn], advantage[drawn][None])
    plain = contribution_masses(*of_drawn, token_weights(torch.ones(1, samples)), search)
    torch.testing.assert_close(plain, exact, rtol=0.02, atol=0)
    # Multiplying by pi_rollout once more, as Eq. 8 looks on sampled tokens, gives another number.
    twice = contribution_masses(*of_drawn, rollout[drawn][None] / samples, search)
    assert not torch.allclose(twice, exact, rtol=0.2)


# ---------------------------------------------------------------- the loss and its gradient
def literal_objective(log_ratio, advantages, weights, low: float, high: float) -> Tensor:
    """-sum w min(r A, clip(r, low, high) A), token by token, in float64."""
    total = torch.zeros((), dtype=torch.float64)
    for row, place in (weights != 0).nonzero().tolist():
        ratio = log_ratio[row, place].double().exp()
        advantage = advantages[row, place].double()
        if ratio.item() < low:
            clipped = torch.tensor(low, dtype=torch.float64)
        elif ratio.item() > high:
            clipped = torch.tensor(high, dtype=torch.float64)
        else:
            clipped = ratio
        smaller = ratio if (ratio * advantage).item() <= (clipped * advantage).item() else clipped
        total = total - weights[row, place].double() * smaller * advantage
    return total


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_loss_and_gradient_equal_autograd_of_the_literal_objective(dtype):
    generator = torch.Generator().manual_seed(2)
    for low, high in [(0.8, 1.28)] * 12 + [(1.05, 3.0)] * 6:
        case = random_case(generator, dtype)
        # Off r = 1, where the literal clip at (., 1.0) would be a tie.
        log_ratio = case.log_ratio + 0.01
        ours = log_ratio.clone().requires_grad_()
        theirs = log_ratio.clone().requires_grad_()
        loss = bapo.clipped_surrogate(ours, case.advantages, case.weights, low, high)
        advantages = per_token(case.advantages, log_ratio)
        literal = literal_objective(theirs, advantages, case.weights, low, high)
        assert loss.dtype == torch.float32
        assert loss.item() == pytest.approx(literal.item(), rel=1e-4, abs=1e-6)
        if literal.requires_grad:
            loss.backward()
            literal.backward()
            tolerance = 1e-2 if dtype == torch.bfloat16 else 1e-5
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=tolerance, atol=1e-7)


@pytest.mark.parametrize(
    "advantage, ratio, low, passes",
    [
        (1.0, 1.5, 0.8, False),
        (1.0, 0.5, 0.8, True),
        (-1.0, 1.5, 0.8, True),
        (-1.0, 0.5, 0.8, False),
        # Past 1 the lower bound is a gate: negative tokens pass once they are likelier than when
        # they were drawn, positive ones always.
        (-1.0, 1.0, 1.05, False),
        (-1.0, 1.04, 1.05, False),
        (-1.0, 1.06, 1.05, True),
        (1.0, 1.0, 1.05, True),
    ],
)
def test_only_two_of_the_four_quadrants_are_clipped(advantage, ratio, low, passes):
    log_ratio = torch.tensor([[math.log(ratio)]], requires_grad=True)
    bapo.token_losses(log_ratio, torch.tensor([advantage]), low, 1.2).sum().backward()
    gradient = log_ratio.grad.item()
    if passes:
        assert gradient == pytest.approx(-ratio * advantage)
    else:
        assert gradient == 0.0  # exactly


def test_a_token_one_float_beyond_its_bound_has_no_gradient_at_all():
    """Whatever the size of its advantage."""
    generator = torch.Generator().manual_seed(0)
    sizes = torch.rand(5000, generator=generator) + 0.01
    below = torch.nextafter(torch.tensor(0.9), torch.tensor(0.0)).double()
    negative = below.log().expand(5000, 1)  # float64, so that exp gives that very float32
    inside = bapo.importance_ratio(negative) >= torch.tensor(0.9)
    assert torch.equal(has_gradient_exactly(negative, -sizes, 0.9, 9.0), inside)
    for bound in (1.2, 2.95):
        above = torch.nextafter(torch.tensor(bound), torch.tensor(9.0)).double()
        positive = above.log().expand(5000, 1)
        inside = bapo.importance_ratio(positive) <= torch.tensor(bound)
        assert torch.equal(has_gradient_exactly(positive, sizes, 0.0, bound), inside)


def has_gradient_exactly(log_ratio: Tensor, advantages: Tensor, low, high) -> Tensor:
    """Like has_gradient, of log-ratios in float64."""
    leaf = log_ratio.clone().requires_grad_()
    bapo.token_losses(leaf, advantages, low, high).sum().backward()
    return leaf.grad != 0


def test_log_ratios_are_clamped_at_20_and_stay_finite():
    log_ratio = torch.tensor([[100.0, -100.0]], requires_grad=True)
    weights = torch.ones(1, 2)
    loss = bapo.clipped_surrogate(log_ratio, torch.tensor([-1.0]), weights, 0.8, 1.2)
    loss.backward()
    assert loss.item() == pytest.approx(math.exp(20) + 0.8, rel=1e-6)
    assert log_ratio.grad.tolist() == [[0.0, 0.0]]


def test_tokens_of_weight_0_count_nothing_even_nans():
    """Kills: a fill on one side of the loss alone, where 0 * NaN is NaN."""
    log_ratio = torch.tensor([[0.1, math.nan, -0.1, 0.3]], requires_grad=True)
    advantages = torch.tensor([[1.0, 1.0, -2.0, math.nan]])
    weights = torch.tensor([[0.5, 0.0, 0.25, 0.0]])
    total = bapo.clipped_surrogate(log_ratio, advantages, weights, 0.8, 1.2)
    total.backward()
    first = -0.5 * math.exp(0.1)
    third = 0.5 * math.exp(-0.1)
    assert total.item() == pytest.approx(first + third)
    torch.testing.assert_close(log_ratio.grad, torch.tensor([[first, 0.0, third, 0.0]]))


# ---------------------------------------------------------------- on-policy, and bounds past 1
RANGES = {
    "default": ClipSearch(),
    "gate": bapo.GATE,
    "main": bapo.PAPER_MAIN,
    "octothinker": bapo.PAPER_OCTOTHINKER,
    "script": bapo.AUTHORS_SCRIPT,
    "yaml": bapo.AUTHORS_YAML,
}


class Result(NamedTuple):
    loss: Tensor
    gradient: Tensor
    metrics: dict[str, Tensor]


def loss_at(log_ratio: Tensor, advantages: Tensor, search=None, **options) -> Result:
    """bapo_loss where all tokens count, and its gradient."""
    leaf = log_ratio.clone().requires_grad_()
    mask = torch.ones(leaf.shape)
    loss, metrics = bapo_loss(leaf, torch.zeros_like(leaf), advantages, mask, search, **options)
    loss.backward()
    return Result(loss.detach(), leaf.grad, metrics)


@pytest.mark.parametrize("noise", [0.0, 1e-5])
@pytest.mark.parametrize("name", RANGES)
def test_on_policy_bapo_is_grpo(name, noise):
    """Also where rounding moves the ratios off 1, and where no bound reaches the target."""
    generator = torch.Generator().manual_seed(0)
    log_ratio = noise * torch.randn(20, 30, generator=generator)
    advantages = torch.randn(20, generator=generator) - 0.5
    found = loss_at(log_ratio, advantages, RANGES[name])
    grpo = loss_at(log_ratio, advantages, bapo.GRPO)
    assert not found.metrics["reached"]
    assert found.metrics["high"] > 1.9
    assert 0.79 < found.metrics["low"] < 1
    assert found.metrics["negatives_with_gradient"] == 1
    assert torch.equal(found.loss, grpo.loss)
    assert torch.equal(found.gradient, grpo.gradient)
    assert (found.gradient != 0).all()
    exact = loss_at(torch.zeros(20, 30), advantages, bapo.GRPO)
    torch.testing.assert_close(found.loss, exact.loss, rtol=0, atol=1e-5)
    torch.testing.assert_close(found.gradient, exact.gradient, rtol=1e-4, atol=0)


ONE_OF_FOUR_RIGHT = torch.tensor([1.0, -1.0, -1.0, -1.0])


@pytest.mark.parametrize("may_empty", [False, True])
def test_only_may_empty_takes_a_bound_past_1_that_no_negative_token_passes(may_empty):
    search = replace(bapo.GATE, may_empty=may_empty)
    found = loss_at(torch.zeros(4, 10), ONE_OF_FOUR_RIGHT, search)
    low = 1.04 if may_empty else 0.98
    share = 1.0 if may_empty else 0.25
    assert pair(found.metrics) == (f32(low), 3.0)
    assert found.metrics["rho"].item() == pytest.approx(share)
    assert found.metrics["gradient_share"].item() == pytest.approx(share)
    assert found.metrics["reached"] == may_empty
    assert found.metrics["negatives_with_gradient"] == (not may_empty)
    negative = ONE_OF_FOUR_RIGHT < 0
    assert (found.gradient[~negative] < 0).all()
    if may_empty:
        assert (found.gradient[negative] == 0).all()
    else:
        assert (found.gradient[negative] > 0).all()


def test_one_negative_token_that_passes_lets_low_rise_past_1_but_no_further():
    log_ratio = torch.zeros(4, 10)
    log_ratio[3, 0] = math.log(1.05)
    search = replace(bapo.GATE, rho0=0.999)
    bounds = search_clip_bounds(log_ratio, ONE_OF_FOUR_RIGHT, torch.ones(4, 10), search)
    assert bounds.low.item() == f32(1.04)
    assert not bounds.reached
    assert bounds.rho.item() == pytest.approx(10 / 11.05)
    # A bound that is given, or where the range starts, is taken as it is.
    given = loss_at(log_ratio, ONE_OF_FOUR_RIGHT, bounds=(1.04, 3.0))
    assert given.gradient.count_nonzero() == 11
    assert given.gradient[3, 0] > 0
    start = ClipSearch.fixed(1.02, 3.0)
    fixed = loss_at(torch.zeros(4, 10), ONE_OF_FOUR_RIGHT, start)
    assert fixed.metrics["negatives_with_gradient"] == 0


@pytest.mark.parametrize("low_max", [1.02, 1.1])
def test_from_a_start_past_1_that_no_negative_token_passes_the_upper_bound_still_rises(low_max):
    log_ratio = torch.tensor([[math.log(1.5)], [0.0]])
    search = ClipSearch(low_start=1.02, low_max=low_max, low_step=0.02)
    bounds = search_clip_bounds(log_ratio, torch.tensor([1.0, -1.0]), torch.ones(2, 1), search)
    assert bounds.low.item() == f32(1.02)
    assert 1.49 < bounds.high < 1.56
    assert bounds.rho == 1
    assert bounds.rho_start == 0


# ---------------------------------------------------------------- splitting an update
class Update(NamedTuple):
    """Arguments of bapo_loss."""

    log_probs: Tensor
    rollout_log_probs: Tensor
    advantages: Tensor
    mask: Tensor

    @property
    def log_ratio(self) -> Tensor:
        return self.log_probs - self.rollout_log_probs

    def rows(self, rows) -> "Update":
        return Update(*(tensor[rows] for tensor in self))


def random_update(rows: int = 14, width: int = 23) -> Update:
    generator = torch.Generator().manual_seed(3)
    rollout = -torch.rand(rows, width, generator=generator) * 3
    log_probs = rollout + torch.randn(rows, width, generator=generator) * 0.3
    lengths = torch.randint(1, width + 1, (rows, 1), generator=generator)
    advantages = torch.randn(rows, generator=generator)
    return Update(log_probs, rollout, advantages, torch.arange(width) < lengths)


def search_inside_the_grid(aggregation: str, contribution: str) -> ClipSearch:
    """A search of `random_update` whose target lies a little above the share at the start."""
    update = random_update()
    search = ClipSearch(contribution=contribution)
    weights = token_weights(update.mask, aggregation)
    found = search_clip_bounds(update.log_ratio, update.advantages, weights, search)
    return replace(search, rho0=found.rho_start.item() + 0.01)


class HalfAtOne(NamedTuple):
    """2560 tokens, half of them at r = 1 exactly."""

    log_ratio: Tensor
    advantages: Tensor
    weights: Tensor


def half_at_one() -> HalfAtOne:
    generator = torch.Generator().manual_seed(4)
    log_ratio = 0.4 * torch.randn(64, 40, generator=generator)
    log_ratio = log_ratio * (torch.rand(64, 40, generator=generator) < 0.5)
    advantages = torch.randn(64, generator=generator)
    return HalfAtOne(log_ratio, advantages, token_weights(torch.ones(64, 40)))


@pytest.mark.parametrize("name", RANGES)
def test_neither_rounding_nor_splitting_moves_the_bounds(name):
    """For targets between two shares that the search passes: noise in log r, as of other kernels,
    and micro-batches."""
    log_ratio, advantages, weights = half_at_one()
    everything = replace(RANGES[name], rho0=0.999)
    shares = literal_search(as_tokens(log_ratio, advantages, weights), everything).tried
    targets = []
    for share, next_share in itertools.pairwise(shares):
        if next_share - share > 1e-4:
            targets.append((share + next_share) / 2)
    targets = targets[:: max(1, len(targets) // 6)]
    assert len(targets) > 3
    generator = torch.Generator().manual_seed(5)
    found_pairs = set()
    for target, noise in itertools.product(targets, (1e-6, 1e-5)):
        search = replace(RANGES[name], rho0=target)
        found = search_clip_bounds(log_ratio, advantages, weights, search)
        noisy = log_ratio + noise * torch.randn(log_ratio.shape, generator=generator)
        masses = 0.0
        for rows in torch.arange(64).tensor_split(7):
            of_part = (noisy[rows], advantages[rows], weights[rows])
            masses = masses + contribution_masses(*of_part, search)
        assert found.reached
        assert pair(found) == pair(clip_bounds(masses, search))
        found_pairs.add(pair(found))
    assert len(found_pairs) == len(targets)


def test_a_lower_bound_of_exactly_1_lets_rounding_decide():
    """Why a grid must not have such a point: noise of 1e-5 takes the gradient of a quarter of the
    negative tokens, half of those at r = 1."""
    log_ratio, advantages, weights = half_at_one()
    generator = torch.Generator().manual_seed(6)
    noisy = log_ratio + 1e-5 * torch.randn(log_ratio.shape, generator=generator)
    alive = []
    for values in (log_ratio, noisy):
        metrics = bapo.diagnostics(values, advantages, weights, (1.0, 3.0))
        alive.append(metrics["negatives_with_gradient"].item())
    assert alive == [pytest.approx(0.75, abs=0.02), pytest.approx(0.5, abs=0.02)]
    with pytest.raises(ValueError, match="a lower bound of exactly 1, where rounding would decide"):
        ClipSearch(low_max=1.1, low_step=0.05)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("contribution", READINGS)
@pytest.mark.parametrize("parts", [2, 7])
def test_bounds_loss_and_gradient_do_not_depend_on_the_split(parts, contribution, aggregation):
    update = random_update()
    search = search_inside_the_grid(aggregation, contribution)
    whole = update.log_probs.clone().requires_grad_()
    loss, metrics = bapo_loss(whole, *update[1:], search, aggregation=aggregation)
    loss.backward()
    assert 1.2 < metrics["high"] < 2.0  # inside the grid, where the parts alone say otherwise

    weights = token_weights(update.mask, aggregation)
    ends = [1, 6, 8, 9, 11, 13][: parts - 1]  # unequal parts
    rows_of_parts = torch.arange(len(update.mask)).tensor_split(ends)
    masses = 0.0
    highs_alone = set()
    for rows in rows_of_parts:
        of_part = (update.log_ratio[rows], update.advantages[rows], weights[rows])
        masses_of_part = contribution_masses(*of_part, search)
        masses = masses + masses_of_part
        highs_alone.add(clip_bounds(masses_of_part, search).high.item())
    bounds = clip_bounds(masses, search)
    assert pair(bounds) == pair(metrics)
    assert highs_alone != {bounds.high.item()}

    leaf = update.log_probs.clone().requires_grad_()
    total = 0.0
    for rows in rows_of_parts:
        part = update._replace(log_probs=leaf).rows(rows)
        part_loss, _ = bapo_loss(*part, weights=weights[rows], bounds=bounds)
        part_loss.backward()
        total += part_loss.item()
    assert total == pytest.approx(loss.item(), rel=1e-5)
    torch.testing.assert_close(leaf.grad, whole.grad, rtol=1e-5, atol=1e-9)


def on_two_ranks(path, function) -> list:
    """What function(rank, group) gives on each of two ranks, which sum by gloo.

    The ranks are threads: a process group of one's own is all that bapo.py asks for, and processes
    would import torch again.
    """
    results = [None, None]

    def run(rank: int) -> None:  # a rank that raises leaves None, which the caller notices
        store = dist.FileStore(str(path), 2)
        results[rank] = function(rank, dist.ProcessGroupGloo(store, rank, 2))

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    return results


@pytest.mark.skipif(not dist.is_gloo_available(), reason="needs torch.distributed with gloo")
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("contribution", READINGS)
def test_two_ranks_with_unequal_token_counts_equal_one(tmp_path, aggregation, contribution):
    update = random_update()
    search = search_inside_the_grid(aggregation, contribution)
    whole = update.log_probs.clone().requires_grad_()
    loss, metrics = bapo_loss(whole, *update[1:], search, aggregation=aggregation)
    loss.backward()
    assert 1.2 < metrics["high"] < 2.0

    def on_rank(rank, group) -> Result:
        mine = update.rows(slice(0, 5) if rank == 0 else slice(5, 14))
        leaf = mine.log_probs.clone().requires_grad_()
        options = {"aggregation": aggregation, "process_group": group}
        loss, metrics = bapo_loss(leaf, *mine[1:], search, **options)
        loss.backward()
        return Result(loss.detach(), leaf.grad, metrics)

    first, second = on_two_ranks(tmp_path / "store", on_rank)
    assert pair(first.metrics) == pair(second.metrics) == pair(metrics)
    assert first.metrics["rho"] == second.metrics["rho"]
    assert (first.loss + second.loss).item() == pytest.approx(loss.item(), rel=1e-5)
    gradient = torch.cat([first.gradient, second.gradient])
    torch.testing.assert_close(gradient, whole.grad, rtol=1e-5, atol=1e-9)


# ---------------------------------------------------------------- devices and modes
class Operators(TorchDispatchMode):
    """Names of all operators that run, of the backward pass too, and how often."""

    def __init__(self):
        super().__init__()
        self.names = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name == "index":
            indices = [index for index in args[1] if index is not None]
            if any(index.dtype == torch.bool for index in indices):
                name = "index_by_mask"
        self.names[name] += 1
        return func(*args, **(kwargs or {}))


HOST_READS = {
    "_local_scalar_dense",
    "item",
    "nonzero",
    "masked_select",
    "equal",
    "index_by_mask",
}
# Sums in an order that varies: on CUDA these raise, or are slow, under
# torch.use_deterministic_algorithms.
UNORDERED = {
    "cumsum",
    "cumprod",
    "index_add",
    "index_put",
    "_index_put_impl",
    "scatter",
    "scatter_add",
    "scatter_reduce",
    "index_reduce",
    "bincount",
    "histc",
    "put",
    "kthvalue",
    "median",
    "gather_backward",
    "index_copy",
    "_unsafe_index_put",
}


@pytest.mark.parametrize("contribution", READINGS)
def test_nothing_is_read_on_the_host_and_nothing_is_summed_in_an_order_that_varies(contribution):
    update = random_update()
    search = ClipSearch(rho0=0.99, contribution=contribution)
    leaf = update.log_probs.clone().requires_grad_()
    torch.use_deterministic_algorithms(True)
    try:
        with Operators() as operators:
            loss, _ = bapo_loss(leaf, *update[1:], search)
            loss.backward()
    finally:
        torch.use_deterministic_algorithms(False)
    used = {name.rstrip("_") for name in operators.names}
    assert {"exp", "mul", "sum", "where", "take", "ones_like"} <= used  # the last: backward pass
    assert not used & (HOST_READS | UNORDERED)


def test_what_counts_operators_sees_reads_and_unordered_sums():
    with Operators() as operators:
        torch.ones(()).item()
        torch.ones(3).cumsum_(0)
        torch.ones(3)[torch.ones(3) > 0]
        torch.ones(3)[torch.tensor([0])]
    assert operators.names["_local_scalar_dense"] == 1
    assert operators.names["cumsum_"] == 1
    assert operators.names["index_by_mask"] == operators.names["index"] == 1


def test_the_loss_runs_where_tensors_have_no_values():
    """A meta tensor has a shape alone: whatever reads a value, or needs one, raises."""
    update = Update(*(tensor.to("meta") for tensor in random_update()))
    loss, metrics = bapo_loss(update.log_probs.requires_grad_(), *update[1:])
    loss.backward()
    assert {metric.device.type for metric in metrics.values()} == {"meta"}


class Apple(torch.Tensor):
    """Says that it lies on an Apple GPU."""

    device = property(lambda self: torch.device("mps"))


class NoFloat64(TorchFunctionMode):
    """Makes what shall lie on "mps" on the CPU, and refuses it in float64, as the device does."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        on_apple = str(kwargs.get("device")) == "mps"
        if on_apple:
            kwargs["device"] = "cpu"
        made = func(*args, **kwargs)
        if on_apple:
            made = made.as_subclass(Apple)
        if isinstance(made, Apple) and made.dtype == torch.float64:
            raise TypeError("Cannot convert a MPS Tensor to float64 dtype")
        return made


@pytest.mark.parametrize("contribution", READINGS)
def test_a_device_without_float64_finds_the_same(contribution):
    update = random_update()
    search = search_inside_the_grid("token-mean", contribution)
    loss, metrics = bapo_loss(*update, search)
    on_apple = [tensor.as_subclass(Apple) for tensor in update]
    with NoFloat64():
        with pytest.raises(TypeError, match="float64"):
            torch.zeros(1, dtype=torch.float64, device="mps")
        apple_loss, apple_metrics = bapo_loss(*on_apple, search)
    assert isinstance(apple_loss, Apple)
    assert apple_loss.item() == pytest.approx(loss.item(), rel=1e-6)
    for name, metric in metrics.items():
        assert float(apple_metrics[name]) == pytest.approx(metric.item(), rel=1e-5), name


@pytest.mark.parametrize("given", ["nothing", "weights", "bounds", "all, to clipped_surrogate"])
def test_tensors_made_in_inference_mode_may_be_given(given):
    update = random_update()
    expected = update.log_probs.clone().requires_grad_()
    loss, _ = bapo_loss(expected, *update[1:])
    loss.backward()
    with torch.inference_mode():
        others = [tensor.clone() for tensor in update[1:]]
        rollout_log_probs, advantages, mask = others
        weights = token_weights(mask)
        log_ratio = update.log_probs - rollout_log_probs
        bounds = search_clip_bounds(log_ratio, advantages, weights, ClipSearch())
    leaf = update.log_probs.clone().requires_grad_()
    if given == "nothing":
        again, _ = bapo_loss(leaf, *others)
    elif given == "weights":
        again, _ = bapo_loss(leaf, *others, weights=weights)
    elif given == "bounds":
        again, _ = bapo_loss(leaf, *others, weights=weights, bounds=bounds)
    else:
        log_ratio = leaf - rollout_log_probs
        again = bapo.clipped_surrogate(log_ratio, advantages, weights, bounds.low, bounds.high)
    again.backward()
    assert torch.equal(again, loss)
    assert torch.equal(leaf.grad, expected.grad)


def test_a_compiled_loss_equals_the_plain_one_for_every_range():
    """Kills: a list read from a tensor within the compiled function, which then keeps one range's
    number of bounds. Traced only: no compiler is needed."""
    torch._dynamo.reset()
    compiled = torch.compile(bapo_loss, backend="eager")
    update = random_update(4, 6)
    for search in (ClipSearch(), bapo.GATE, bapo.GRPO):
        loss, metrics = compiled(*update, search)
        expected, expected_metrics = bapo_loss(*update, search)
        torch.testing.assert_close(loss, expected)
        assert pair(metrics) == pair(expected_metrics)


# ---------------------------------------------------------------- edges
AT_START = (0.6, 1.2)
AT_MAX = (0.9, 3.0)
NO_BOUNDS = (None, None)


@pytest.mark.parametrize("contribution", READINGS)
@pytest.mark.parametrize(
    "log_ratio, advantages, mask, expected, rho",
    [
        ([[0.1, -0.1]], [1.0], [[1, 1]], AT_START, 1.0),  # no negatives
        ([[0.1, -0.1]], [-1.0], [[1, 1]], AT_MAX, 0.0),  # no positives
        ([[-0.2, -0.3]], [-1.0], [[1, 1]], AT_MAX, 0.0),  # nor any unclipped negative at low_max
        ([[0.1, -0.1]], [-1.0], [[0, 0]], AT_START, 1.0),  # nothing unmasked
        ([[0.1, -0.1]], [0.0], [[1, 1]], AT_START, 1.0),  # no advantage
        ([[0.0]], [-1.0], [[1]], AT_MAX, 0.0),  # one token
        ([[0.0] * 5], [[1.0, 1.0, -1.0, -1.0, -1.0]], [[1] * 5], AT_START, 0.4),  # exactly 2 : 3
        ([[0.0] * 4], [[1.0, -1.0, -1.0, -1.0]], [[1] * 4], AT_MAX, 0.25),  # no bound can help
        ([[100.0, 0.0]], [[1.0, -1.0]], [[1, 1]], NO_BOUNDS, None),  # clamped, finite
        ([[math.nan, 0.0]], [[math.nan, 1.0]], [[0, 1]], AT_START, 1.0),  # NaN under the mask
        ([[]], [1.0], [[]], AT_START, 1.0),  # no tokens at all
    ],
)
def test_degenerate_batches(log_ratio, advantages, mask, expected, rho, contribution):
    leaf = torch.tensor(log_ratio, requires_grad=True)
    mask = torch.tensor(mask)
    search = replace(bapo.PAPER_MAIN, contribution=contribution)
    rollout = torch.zeros_like(leaf)
    loss, metrics = bapo_loss(leaf, rollout, torch.tensor(advantages), mask, search)
    loss.backward()
    assert math.isfinite(loss.item())
    assert torch.isfinite(leaf.grad).all()
    assert (leaf.grad[mask == 0] == 0).all()
    if expected != NO_BOUNDS:
        low, high = expected
        assert pair(metrics) == (f32(low), f32(high))
        assert metrics["rho"].item() == pytest.approx(rho)
        assert metrics["reached"].item() == (expected == AT_START)


def test_an_exact_tie_with_the_target_is_met_however_the_sums_are_split():
    advantages = torch.tensor([0.1] * 20 + [-0.1] * 30)  # P : N = 2 : 3 up to rounding, rho is 0.4
    weights = token_weights(torch.ones(50, 7))
    for parts in (1, 2, 5, 30):
        masses = 0.0
        for rows in torch.arange(50).chunk(parts):
            log_ratio = torch.zeros(len(rows), 7)
            of_part = (log_ratio, advantages[rows], weights[rows])
            masses = masses + contribution_masses(*of_part, bapo.PAPER_MAIN)
        assert clip_bounds(masses, bapo.PAPER_MAIN).high.item() == f32(1.2)


TWO_HIGHS = ClipSearch(rho0=0.4, low_start=0.9, high_max=1.25)  # and one low


@pytest.mark.parametrize("short_of_target, met", [(0.0, True), (5e-7, True), (2e-6, False)])
def test_the_target_has_a_tolerance_of_one_millionth(short_of_target, met):
    rho = 0.4 - short_of_target
    masses = torch.tensor([rho, 0.9, 1 - rho], dtype=torch.float64)  # P at 1.2 and 1.25; N
    found = clip_bounds(masses, TWO_HIGHS)
    assert found.high.item() == f32(1.2 if met else 1.25)
    assert found.reached


def test_equality_with_the_target_is_met():
    search = replace(TWO_HIGHS, rho0=0.5)
    target = 0.5 - 1e-6
    for rho, high in ((target, 1.2), (np.nextafter(target, 0), 1.25)):
        # P / (P + N) with P + N = 1 exactly
        found = clip_bounds(torch.tensor([rho, 0.9, 1 - rho], dtype=torch.float64), search)
        assert found.high.item() == f32(high)
    masses = torch.tensor([target, target, 1 - target], dtype=torch.float64)
    assert clip_bounds(masses, search).reached


def test_the_rollout_log_probs_get_no_gradient_and_the_mask_wins_over_weights():
    log_probs, rollout, advantages, mask = random_update()
    leaf = log_probs.clone().requires_grad_()
    rollout_leaf = rollout.clone().requires_grad_()
    weights = torch.full(mask.shape, 1 / mask.sum())
    loss, _ = bapo_loss(leaf, rollout_leaf, advantages, mask, weights=weights)
    loss.backward()
    assert rollout_leaf.grad is None
    assert (leaf.grad[~mask] == 0).all()
    expected, _ = bapo_loss(log_probs, rollout, advantages, mask)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)


def test_bfloat16_log_probs_are_subtracted_in_float32():
    rollout = torch.tensor([[-8.0, -8.0]], dtype=torch.bfloat16)
    log_probs = torch.tensor([[-8.001, -7.999]])  # rounded to bfloat16 both would be -8
    one = torch.tensor([1.0])
    _, metrics = bapo_loss(log_probs, rollout, one, torch.ones(1, 2))
    assert metrics["ratio_max_positive"].item() == pytest.approx(math.exp(0.001), rel=1e-5)
    log_probs = torch.tensor([[-8.0, -3.02]]).bfloat16()
    rollout = torch.tensor([[-8.03125, -3.0]]).bfloat16()
    _, metrics = bapo_loss(log_probs, rollout, one, torch.ones(1, 2))
    ratio = (log_probs.double() - rollout.double()).exp()
    assert metrics["ratio_max_positive"].item() == pytest.approx(ratio.max().item(), rel=1e-6)
    assert metrics["ratio_min_positive"].item() == pytest.approx(ratio.min().item(), rel=1e-6)


@pytest.mark.parametrize("position", [0, 1, 2])
def test_a_nan_inside_the_mask_makes_the_loss_nan(position):
    arguments = [torch.zeros(1, 2), torch.zeros(1, 2), torch.tensor([[1.0, -1.0]])]
    arguments[position][0, 1] = math.nan
    loss, _ = bapo_loss(*arguments, torch.ones(1, 2))
    assert loss.isnan()


def test_an_empty_low_range_still_lets_high_rise():
    search = ClipSearch(low_start=0.8, low_max=0.8, rho0=0.5, contribution="surrogate")
    log_ratio = torch.tensor([[math.log(1.5), 0.0]])
    advantages = torch.tensor([[1.0, -1.4]])
    found = search_clip_bounds(log_ratio, advantages, torch.ones(1, 2), search)
    assert pair(found) == (f32(0.8), f32(1.4))
    assert found.reached


def test_the_last_value_of_each_range_is_its_max_and_steps_are_counted_in_integers():
    low = 0.6
    while low + 0.02 <= 0.9:  # adding floats, as the algorithm is printed, stops one step short
        low += 0.02
    assert low < 0.89
    lows = bapo.PAPER_MAIN.lows()
    assert (len(lows), lows[-1].item()) == (16, f32(0.9))
    highs = bapo.PAPER_MAIN.highs()
    assert (len(highs), highs[-1].item()) == (37, 3.0)
    assert lows.dtype == highs.dtype == torch.float32


LONG_RANGE = ClipSearch(high_max=7.3, high_step=0.1)


@pytest.mark.parametrize("search", [*RANGES.values(), bapo.GRPO, LONG_RANGE])
def test_the_two_ways_to_make_a_grid_agree_in_float32(search):
    """The masses compare with Python floats, the bounds come from a tensor made on the device."""
    lows = bapo._grid_values(search.low_start, search.low_max, search.low_step)
    assert torch.tensor(lows).tolist() == search.lows().tolist()
    highs = bapo._grid_values(search.high_start, search.high_max, search.high_step)
    assert torch.tensor(highs).tolist() == search.highs().tolist()


def test_fixed_bounds_are_a_search_over_one_point():
    update = random_update()
    loss, metrics = bapo_loss(*update, bapo.CLIP_HIGHER)
    weights = token_weights(update.mask)
    expected = bapo.clipped_surrogate(update.log_ratio, update.advantages, weights, 0.8, 1.28)
    assert loss == expected
    assert metrics["reached"]
    given, metrics = bapo_loss(*update, bounds=(0.8, 1.28))
    assert given == expected
    assert metrics["high"].item() == f32(1.28)
    assert "rho" not in metrics


@pytest.mark.parametrize("options", [{}, {"search": None}])
def test_no_search_means_the_default_search(options):
    update = random_update()
    _, metrics = bapo_loss(*update, **options)
    weights = token_weights(update.mask)
    found = search_clip_bounds(update.log_ratio, update.advantages, weights, ClipSearch())
    assert pair(metrics) == pair(found) != (f32(0.8), f32(1.2))
    assert metrics["rho"].item() == pytest.approx(found.rho.item())


# ---------------------------------------------------------------- advantages and weights
def test_advantages_equal_the_literal_formula():
    rewards = torch.tensor([1.0, 0.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0])
    # First group: mean 1/4, sample deviation 1/2; second: mean 1/2, sample deviation sqrt(1/3).
    second = 0.5 / math.sqrt(1 / 3)
    expected = [1.5, -0.5, -0.5, -0.5, second, second, -second, -second]
    advantages = bapo.group_relative_advantages(rewards, 4)
    assert advantages.tolist() == pytest.approx(expected, rel=1e-5)
    advantages = bapo.group_relative_advantages(rewards, 4, normalize_std=False)
    assert advantages.tolist() == pytest.approx([0.75, -0.25, -0.25, -0.25, 0.5, 0.5, -0.5, -0.5])


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool]
)
def test_a_group_of_equal_rewards_gets_exactly_zero(dtype):
    rewards = torch.tensor([0.1] * 3 + [1.0] * 3, dtype=torch.float64).to(dtype)
    assert sum([0.1] * 3) / 3 != 0.1  # the mean of equal numbers may differ from them
    advantages = bapo.group_relative_advantages(rewards, 3)
    assert advantages.tolist() == [0.0] * 6
    assert advantages.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert bapo.group_relative_advantages(rewards, 1).tolist() == [0.0] * 6


def test_token_weights():
    mask = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0], [0, 0, 0, 0]])
    expected = torch.tensor([[0.25, 0.25, 0.25, 0], [0.25, 0, 0, 0], [0, 0, 0, 0]])
    torch.testing.assert_close(token_weights(mask), expected)
    sixth = 1 / 6
    expected = torch.tensor([[sixth, sixth, sixth, 0], [0.5, 0, 0, 0], [0, 0, 0, 0]])
    torch.testing.assert_close(token_weights(mask.bool(), "sequence-mean"), expected)
    torch.testing.assert_close(token_weights(mask, "constant", 10), mask / 30)
    for aggregation in ("token-mean", "sequence-mean", "constant"):
        assert token_weights(torch.zeros(2, 3), aggregation, 5).tolist() == [[0.0] * 3] * 2


def test_constant_aggregation_takes_its_length():
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    advantages = torch.tensor([1.0, 2.0])
    zeros = torch.zeros(2, 3)
    loss, _ = bapo_loss(zeros, zeros, advantages, mask, aggregation="constant", length=5)
    assert loss.item() == pytest.approx(-(2 * 1.0 + 1 * 2.0) / (2 * 5))
    with pytest.raises(ValueError, match="needs length > 0"):
        bapo_loss(zeros, zeros, advantages, mask, aggregation="constant")


@pytest.mark.parametrize("aggregation, share", [("token-mean", 1 / 3), ("sequence-mean", 1 / 2)])
def test_at_ratio_one_the_share_is_set_by_lengths_or_is_half(aggregation, share):
    """A quarter of the responses is right, and half as long as the others: the share depends on
    the lengths alone, and under sequence-mean on nothing."""
    advantages = bapo.group_relative_advantages(torch.tensor([1.0, 0.0, 0.0, 0.0]), 4)
    mask = torch.arange(20) < torch.tensor([[10], [20], [20], [20]])
    weights = token_weights(mask, aggregation)
    found = search_clip_bounds(torch.zeros(4, 20), advantages, weights, ClipSearch())
    assert found.rho_start.item() == pytest.approx(share, rel=1e-5)


# ---------------------------------------------------------------- metrics
class Token(NamedTuple):
    ratio: float
    advantage: float
    weight: float


def tokens_one_by_one(update: Update, aggregation: str) -> list[Token]:
    tokens = []
    for row, place in update.mask.nonzero().tolist():
        ratio = math.exp(update.log_ratio[row, place].item())
        weight = 1.0 if aggregation == "token-mean" else 1 / update.mask[row].sum().item()
        tokens.append(Token(ratio, update.advantages[row].item(), weight))
    return tokens


def literal_share(tokens: list[Token], low: float, high: float, contribution: str) -> float:
    """The positive share of Eq. 8, token by token."""
    positive = 0.0
    total = 0.0
    for ratio, advantage, weight in tokens:
        is_positive = advantage > 0
        bounded = min(ratio, high) if is_positive else max(ratio, low)
        if contribution == "gradient" and bounded != ratio:
            bounded = 0.0
        mass = weight * abs(advantage) * bounded
        total += mass
        positive += mass if is_positive else 0.0
    return positive / total


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("contribution", READINGS)
def test_metrics_equal_literal_sums_over_the_tokens(contribution, aggregation):
    update = random_update()
    with_nan = update.log_probs.masked_fill(~update.mask, math.nan).requires_grad_()
    search = replace(bapo.GRPO, contribution=contribution)
    _, metrics = bapo_loss(with_nan, *update[1:], search, aggregation=aggregation)
    tokens = tokens_one_by_one(update, aggregation)
    count = len(tokens)
    positive = [token.ratio for token in tokens if token.advantage > 0]
    negative = [token.ratio for token in tokens if token.advantage < 0]
    clipped_high = sum(ratio > 1.2 for ratio in positive)
    clipped_low = sum(ratio < 0.8 for ratio in negative)
    rho = literal_share(tokens, 0.8, 1.2, contribution)
    gradient_share = literal_share(tokens, 0.8, 1.2, "gradient")
    expected = {
        "low": 0.8,
        "high": 1.2,
        "rho": rho,
        "rho_start": rho,
        "reached": 1.0,
        "gradient_share": gradient_share,
        "clip_fraction_high": clipped_high / count,
        "clip_fraction_low": clipped_low / count,
        "negatives_with_gradient": 1 - clipped_low / len(negative),
        "positive_tokens": len(positive) / count,
        "negative_tokens": len(negative) / count,
        "ratio_mean_positive": np.mean(positive),
        "ratio_mean_negative": np.mean(negative),
        "ratio_min_positive": min(positive),
        "ratio_min_negative": min(negative),
        "ratio_max_positive": max(positive),
        "ratio_max_negative": max(negative),
        "kl": np.mean([token.ratio - 1 - math.log(token.ratio) for token in tokens]),
    }
    assert set(metrics) == set(expected)
    for name, value in expected.items():
        assert metrics[name].item() == pytest.approx(value, rel=1e-4), name
        assert metrics[name].shape == ()
        assert not metrics[name].requires_grad
    assert clipped_high != clipped_low > 0
    surrogate_share = literal_share(tokens, 0.8, 1.2, "surrogate")
    assert abs(gradient_share - surrogate_share) > 0.01


def test_without_weights_all_tokens_weigh_the_same():
    update = random_update()
    metrics = bapo.diagnostics(update.log_ratio, update.advantages, update.mask, (0.8, 1.2))
    tokens = tokens_one_by_one(update, "token-mean")
    share = literal_share(tokens, 0.8, 1.2, "gradient")
    assert metrics["gradient_share"].item() == pytest.approx(share, rel=1e-5)


def test_a_token_on_its_bound_is_not_counted_as_clipped():
    both = torch.tensor([1.0, -1.0])
    at_one = torch.zeros(1, 2)
    metrics = bapo.diagnostics(at_one, both[None], torch.ones(1, 2), (1.0, 1.0))
    assert metrics["clip_fraction_high"] == metrics["clip_fraction_low"] == 0
    assert bapo.unclipped(torch.ones(2), both, 1.0, 1.0).all()


def test_k3_estimates_kl_from_the_rollout_policy():
    rollout = torch.tensor([0.7, 0.2, 0.1])
    policy = torch.tensor([0.4, 0.4, 0.2])
    generator = torch.Generator().manual_seed(0)
    drawn = torch.multinomial(rollout, 200_000, replacement=True, generator=generator)[None]
    log_ratio = (policy / rollout).log()[drawn]
    metrics = bapo.diagnostics(log_ratio, torch.ones(1), torch.ones(drawn.shape), (0.8, 1.2))
    exact = (rollout * (rollout / policy).log()).sum().item()
    reverse = (policy * (policy / rollout).log()).sum().item()
    assert metrics["kl"].item() == pytest.approx(exact, rel=0.01)
    assert abs(reverse - exact) > 0.02 * exact


@pytest.mark.parametrize("size", [1e-5, 1e-4, 1e-3])
def test_a_small_kl_is_not_lost_to_cancellation(size):
    """Kills: r - 1 - log r, which gives -7e-10 for 5e-11 in float32."""
    log_ratio = torch.full((1, 8), size)
    metrics = bapo.diagnostics(log_ratio, torch.ones(1), torch.ones(1, 8), (0.8, 1.2))
    assert metrics["kl"].item() == pytest.approx(math.expm1(size) - size, rel=0.05)


def test_ratio_metrics_of_an_absent_sign_are_nan():
    _, metrics = bapo_loss(torch.zeros(1, 2), torch.zeros(1, 2), torch.ones(1), torch.ones(1, 2))
    for name in ("ratio_min_negative", "ratio_mean_negative", "negatives_with_gradient"):
        assert metrics[name].isnan(), name
    assert metrics["gradient_share"] == 1
    assert metrics["ratio_max_positive"] == 1


# ---------------------------------------------------------------- presets and errors
@pytest.mark.parametrize(
    "options, message",
    [
        ({"rho0": 1.0}, "rho0"),
        ({"rho0": -0.1}, "rho0"),
        ({"rho0": math.nan}, "rho0"),
        ({"low_start": 0.95}, "low_start"),
        ({"high_start": 3.5}, "high_start"),
        ({"high_max": math.inf}, "high_start"),
        ({"low_step": 0.0}, "low_step"),
        ({"high_step": -0.05}, "high_step"),
        ({"low_step": 0.07}, "low_step"),
        ({"high_step": 0.07}, "high_step"),
        ({"low_start": 1.0, "low_max": 1.3, "low_step": 0.1}, "low_max"),
        ({"contribution": "eq8"}, "contribution"),
        (
            {"low_max": 1.1, "low_step": 0.06, "contribution": "surrogate"},
            "low_max.*may_empty",
        ),
    ],
)
def test_a_search_that_makes_no_sense_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        ClipSearch(**options)


def test_presets_are_valid_and_as_published():
    """Sections 5.1 and A of the paper, with Eq. 8's values; and the default."""
    main = {
        "rho0": 0.4,
        "low_start": 0.6,
        "low_max": 0.9,
        "low_step": 0.02,
        "high_start": 1.2,
        "high_max": 3.0,
        "high_step": 0.05,
        "contribution": "surrogate",
        "may_empty": False,
    }
    assert vars(bapo.PAPER_MAIN) == main
    octothinker = main | {"rho0": 0.45, "low_start": 0.8, "high_max": 2.0}
    assert vars(bapo.PAPER_OCTOTHINKER) == octothinker
    assert vars(ClipSearch()) == octothinker | {"contribution": "gradient"}
    # This one is not the paper's.
    assert bapo.GATE == ClipSearch(low_max=1.1, low_step=0.06, high_max=3.0)
    for search, low, high in ((bapo.GRPO, 0.8, 1.2), (bapo.CLIP_HIGHER, 0.8, 1.28)):
        assert search.lows().tolist() == [f32(low)]
        assert search.highs().tolist() == [f32(high)]
    # P / N >= x is rho >= x / (1 + x).
    for preset, threshold in ((bapo.AUTHORS_SCRIPT, 0.5), (bapo.AUTHORS_YAML, 1.0)):
        assert preset.rho0 / (1 - preset.rho0) == pytest.approx(threshold)


ZEROS = torch.zeros(2, 3)
ONES = torch.ones(2, 3)
GOOD = {
    "log_probs": ZEROS,
    "rollout_log_probs": ZEROS,
    "advantages": torch.ones(2),
    "mask": ONES,
}


@pytest.mark.parametrize(
    "changed, message",
    [
        ({"rollout_log_probs": torch.zeros(2, 2)}, "rollout_log_probs"),
        ({"advantages": torch.zeros(3)}, "advantages"),
        ({"mask": torch.ones(2)}, "mask"),
        ({"log_probs": torch.zeros(3)}, r"log_probs must be \[N, T\], got shape \[3\]"),
        ({"advantages": np.ones(2)}, "advantages must be a tensor, got a ndarray"),
        ({"search": 0.4}, "search must be a ClipSearch or None, got a float"),
        ({"search": {"rho0": 0.4}}, "search must be a ClipSearch or None, got a dict"),
        ({"weights": torch.ones(2)}, r"weights must have shape \[2, 3\], got \[2\]"),
        ({"weights": 0.5}, "weights must be a tensor, got a float"),
        ({"mask": [[1, 1, 1]] * 2}, "mask must be a tensor, got a list"),
        ({"log_probs": np.zeros((2, 3))}, r"log_probs must be a tensor \[N, T\], got a ndarray"),
    ],
)
def test_an_argument_of_a_wrong_type_or_shape_is_named(changed, message):
    bapo_loss(**GOOD)
    with pytest.raises(ValueError, match=message):
        bapo_loss(**(GOOD | changed))


@pytest.mark.parametrize(
    "function, arguments, message",
    [
        (bapo.clipped_surrogate, (ZEROS, torch.zeros(2), torch.ones(3), 0.8, 1.2), "weights"),
        (clip_bounds, (torch.zeros(5), ClipSearch()), "masses"),
        (bapo.group_relative_advantages, (torch.zeros(7), 4), "group_size"),
        (bapo.group_relative_advantages, ([1.0, 0.0], 2), "rewards.*a list"),
        (bapo.group_relative_advantages, (torch.zeros(2, 2), 2), "rewards.*2, 2"),
        (bapo.group_relative_advantages, (torch.zeros(8), 0), "group_size"),
        (token_weights, (ONES, "mean"), "aggregation"),
        (token_weights, (ONES, "constant"), "length"),
        (token_weights, (torch.ones(3),), "mask"),
    ],
)
def test_a_wrong_argument_of_the_other_functions_is_named(function, arguments, message):
    with pytest.raises(ValueError, match=message):
        function(*arguments)


@pytest.mark.parametrize("low, high", [(0.2, 0.28), (1.2, 0.8), (1.2, 1.2), (0.8, 0.99)])
def test_epsilons_and_swapped_bounds_are_refused_wherever_bounds_are_given(low, high):
    """Kills: no check in one of the places where people write bounds."""
    message = "bounds are ratios, 0.8 and 1.2, not epsilons"
    advantages = torch.tensor([1.0, -1.0])
    with pytest.raises(ValueError, match=message):
        ClipSearch.fixed(low, high)
    with pytest.raises(ValueError, match=message):
        bapo_loss(**GOOD, bounds=(low, high))
    with pytest.raises(ValueError, match=message):
        bapo.token_losses(ZEROS, advantages, low, high)
    with pytest.raises(ValueError, match=message):
        bapo.clipped_surrogate(ZEROS, advantages, ONES, low, high)
