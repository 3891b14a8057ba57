"""Tests of bapo.py, most of them against make_vectors.py.

make_vectors.py computes the paper's formulas token by token in Python's floats.
"""

import math
import os
import random
import re
import sys
import warnings
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import make_vectors
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from make_vectors import Found, Token
from torch import Tensor

import bapo
from bapo import ClipBounds, ClipSearch, bapo_loss, contribution_masses, token_weights

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
SEARCHES = [
    bapo.PAPER_MAIN,
    bapo.PAPER_APP_A,
    bapo.GRPO,
    ClipSearch.fixed(1.02, 3.0),
    ClipSearch.fixed(0.8, 1e9),
    ClipSearch.fixed(0, 1.2),
    ClipSearch(low_start=0.9, high_start=1.0, high_max=1.5, high_step=0.1),
    ClipSearch(low_start=0.0, low_max=0.96, low_step=0.12, high_max=1.2),
]


class Update(NamedTuple):
    """The first arguments of bapo_loss."""

    log_probs: Tensor
    rollout_log_probs: Tensor
    advantages: Tensor
    mask: Tensor


# ---------------------------------------------------------------- the oracle
def case_of(update: Update, search: ClipSearch, weights: Tensor | None) -> dict:
    """Return an update in the form that make_vectors.py takes."""
    case = {name: tensor.tolist() for name, tensor in update._asdict().items()}
    case["settings"] = {
        "rho0": search.rho0,
        "low": [search.low_start, search.low_max, search.low_step],
        "high": [search.high_start, search.high_max, search.high_step],
    }
    if weights is not None:
        case["weights"] = weights.tolist()
    return case


def literal_metrics(tokens: list[Token], found: Found) -> dict[str, float]:
    """Return what the docstring of bapo.diagnostics promises."""
    tokens = [token for token in tokens if token.weight]
    count = max(len(tokens), 1)
    metrics = found._asdict() | {"reached": float(found.reached)}
    masses = [0.0, 0.0]  # of A < 0 and of A > 0
    for token in tokens:
        if not make_vectors.clips(token, found.low, found.high):
            masses[token.advantage > 0] += token.weight * token.ratio * abs(token.advantage)
    metrics["gradient_share"] = masses[1] / sum(masses) if sum(masses) else math.nan
    metrics["kl"] = sum(token.ratio - 1 - token.log_ratio for token in tokens) / count
    for sign, side in ((1, "high"), (-1, "low")):
        chosen = [token for token in tokens if sign * token.advantage > 0]
        clipped = sum(make_vectors.clips(token, found.low, found.high) for token in chosen)
        metrics[f"clip_fraction_{side}"] = clipped / count
    return metrics


# ---------------------------------------------------------------- random updates
def matrix(rows: int, width: int, draw) -> Tensor:
    """Return a tensor [rows, width] whose numbers are the results of draw()."""
    return torch.tensor([draw() for _ in range(rows * width)]).reshape(rows, width)


def random_update(
    rng: random.Random, rows: int = 14, width: int = 12, spread: float = 0.4, mean: float = 0.0
) -> Update:
    """Return responses of unequal lengths, with NaN outside the mask.

    spread is that of the log-ratios, mean that of the advantages. Python's generator gives the same
    numbers on every machine.
    """
    rollout = matrix(rows, width, lambda: rng.uniform(-3, 0))
    log_probs = rollout + matrix(rows, width, lambda: rng.gauss(0, spread))
    advantages = matrix(rows, 1, lambda: rng.gauss(mean, 1))[:, 0]
    mask = torch.arange(width) < matrix(rows, 1, lambda: rng.randint(0, width))
    outside = torch.where(mask, 0.0, math.nan)
    return Update(log_probs + outside, rollout + outside, advantages, mask)


def long_update() -> Update:
    return random_update(random.Random(1))


STOPS_INSIDE = ClipSearch(rho0=0.375, low_start=0.8)  # in long_update, at an upper bound of 2.05


# ---------------------------------------------------------------- an update
def test_every_number_of_an_update_equals_the_literal_algorithm():
    """This test fails, too, if a log-prob is rounded to the dtype of the other before they meet."""
    rng = random.Random("bapo")
    for _ in range(1000):
        update = random_update(
            rng,
            rows=rng.choice([1, 2, 5]),
            width=rng.choice([1, 4, 8]),
            spread=rng.choice([0.0, 0.01, 0.1, 0.5, 1.0]),
            mean=rng.choice([0, 0, 0, -9, 9]),  # with -9 and 9 all advantages have one sign
        )
        of_tokens = 1.5 + update.rollout_log_probs  # advantages [B, T], of both signs
        advantages = rng.choice([update.advantages, of_tokens])
        log_probs = update.log_probs.to(rng.choice(DTYPES))
        rollout = update.rollout_log_probs.to(rng.choice([log_probs.dtype, *DTYPES]))
        update = Update(log_probs, rollout, advantages, update.mask)
        # Some tokens inside the mask have the weight 0.
        weights = rng.choice([None, matrix(*update.mask.shape, lambda: max(0, rng.random() - 0.2))])
        search = rng.choice(SEARCHES)
        case = case_of(update, search, weights)
        tokens = make_vectors.response_tokens(case)
        start = make_vectors.search(tokens, case["settings"]).rho_start
        if not math.isnan(start):  # else hardly any search would stop inside the ranges
            rho0 = min(start + rng.uniform(0, 0.2), 0.999)
            search = replace(search, rho0=rho0)
            case = case_of(update, search, weights)

        leaf, *others = [tensor.clone().requires_grad_() for tensor in update[:3]]
        loss, metrics = bapo_loss(leaf, *others, update.mask, search, weights=weights)
        loss.backward()
        # Otherwise advantages that are not detached would train a critic.
        assert [tensor.grad for tensor in others] == [None, None]
        expected = make_vectors.expected(case)
        gradient = torch.tensor(expected["gradient"])
        assert loss.dtype == torch.float32
        assert loss.item() == pytest.approx(expected["loss"], rel=1e-5, abs=3e-5)
        tolerance = 5e-2 if leaf.dtype.itemsize == 2 else 1e-5  # the gradient has this dtype
        torch.testing.assert_close(leaf.grad.float(), gradient, rtol=tolerance, atol=1e-6)

        found = make_vectors.search(tokens, case["settings"])
        expected_metrics = literal_metrics(tokens, found)
        assert metrics.keys() == expected_metrics.keys()
        for name, value in expected_metrics.items():
            close = pytest.approx(value, rel=2e-5, abs=2e-6, nan_ok=True)
            assert metrics[name].item() == close, name
            assert metrics[name].shape == ()
            assert not metrics[name].requires_grad


def test_a_token_of_weight_0_has_no_effect_even_if_it_is_nan():
    """It is inside the mask, so only its weight says that it does not count."""
    update = long_update()
    weights = token_weights(update.mask)
    weights[0] = 0.0
    update.log_probs[0] = math.nan
    loss, metrics = bapo_loss(*update, bapo.PAPER_MAIN, weights=weights)
    assert not any(value.isnan() for value in (loss, *metrics.values()))


# ---------------------------------------------------------------- the search
def test_presets_are_as_published():
    """The paper gives them in sections 5.1 and A."""
    assert bapo.PAPER_APP_A == ClipSearch(0.45, 0.8, 0.9, 0.02, 1.2, 2.0, 0.05)


def test_masses_are_summed_in_float64():
    advantages = torch.tensor([[2.0**24, 1.0]])
    ones = torch.ones(1, 2)
    masses = contribution_masses(torch.zeros(1, 2), advantages, ones, bapo.PAPER_MAIN)
    assert masses[0].item() == 2**24 + 1  # which float32 cannot hold


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_bounds_stay_at_their_start_if_a_sum_is_not_finite(wrong):
    masses = torch.ones(53, dtype=torch.float64)  # 37 upper and 16 lower bounds
    masses[37:] = wrong
    low, high, *rhos, reached = bapo.search_clip_bounds(masses, bapo.PAPER_MAIN)
    assert (low, high, reached) == (0.6, 1.2, False) and all(map(math.isnan, rhos))


# ---------------------------------------------------------------- splitting an update
class Shift(torch.nn.Module):
    """A policy that adds a parameter [T] to log-probs. It has a buffer, which DDP hands around."""

    def __init__(self):
        super().__init__()
        self.shift = torch.nn.Parameter(torch.zeros(12))
        self.register_buffer("zero", torch.zeros(1))

    def forward(self, log_probs: Tensor) -> Tensor:
        return log_probs + self.shift + self.zero


class Step(NamedTuple):
    """The bounds of one optimizer step, and its gradient [T] with respect to `shift`."""

    bounds: ClipBounds
    gradient: Tensor


def bounds_of(metrics: dict[str, Tensor]) -> ClipBounds:
    return ClipBounds(*[metrics[name].item() for name in ClipBounds._fields])


def whole_step(update: Update, search: ClipSearch) -> Step:
    """Make one step in one call."""
    policy = Shift()
    loss, metrics = bapo_loss(policy(update.log_probs), *update[1:], search)
    loss.backward()
    return Step(bounds_of(metrics), policy.shift.grad)


def backward_step(policy, update: Update, micro_batches, search: ClipSearch, **options) -> Step:
    """Make one step by bapo.backward."""
    policy.zero_grad()
    metrics = bapo.backward(
        lambda rows: policy(update.log_probs[rows]), micro_batches, *update[1:], search, **options
    )
    (shift,) = policy.parameters()
    return Step(bounds_of(metrics), shift.grad)


def step_of_given_bounds(update: Update, micro_batches, search: ClipSearch) -> Step:
    """Make one step with a loss for every micro-batch, as bapo_loss's docstring describes it."""
    policy = Shift()
    weights = token_weights(update.mask)
    masses = 0.0
    for rows in micro_batches:
        log_ratio = update.log_probs[rows] - update.rollout_log_probs[rows]
        masses += contribution_masses(log_ratio, update.advantages[rows], weights[rows], search)
    bounds = bapo.search_clip_bounds(masses, search)
    for rows in micro_batches:
        inputs = [tensor[rows] for tensor in update[1:]]
        log_probs = policy(update.log_probs[rows])
        loss, _ = bapo_loss(log_probs, *inputs, search, weights=weights[rows], bounds=bounds)
        loss.backward()
    return Step(bounds, policy.shift.grad)


def assert_same_step(step: Step, expected: Step) -> None:
    assert step.bounds == pytest.approx(expected.bounds, rel=1e-5)
    torch.testing.assert_close(step.gradient, expected.gradient, rtol=1e-4, atol=1e-6)


def test_bounds_and_gradient_do_not_depend_on_micro_batches():
    update = long_update()
    expected = whole_step(update, STOPS_INSIDE)
    assert STOPS_INSIDE.high_start < expected.bounds.high < STOPS_INSIDE.high_max
    for ends in ([], [6], [1, 6, 8, 9, 11, 13]):
        micro_batches = torch.arange(14).flip(0).tensor_split(ends)
        assert_same_step(backward_step(Shift(), update, micro_batches, STOPS_INSIDE), expected)
        assert_same_step(step_of_given_bounds(update, micro_batches, STOPS_INSIDE), expected)


@pytest.mark.parametrize("count", [1, 3])
def test_backward_of_another_library_gets_scalars_and_another_loss_all_rows(count):
    """The library halves what it gets, as accelerate does with two accumulation steps."""
    update = long_update()
    micro_batches = torch.arange(14).tensor_split(count)
    given = []

    def loss_fn(*arguments, **options):
        loss, metrics = bapo_loss(*arguments, **options)
        return 2 * loss, metrics

    def run_backward(scalar: Tensor) -> None:
        given.append(scalar.shape)
        (scalar / 2).backward()

    options = {"loss_fn": loss_fn, "run_backward": run_backward}
    step = backward_step(Shift(), update, micro_batches, STOPS_INSIDE, **options)
    assert_same_step(step, whole_step(update, STOPS_INSIDE))
    assert given == [()] * count


def of_one_rank(rank: int, folder: str) -> None:
    """Save the steps of one of two processes, which holds 5 or 9 of the 14 responses.

    They have one and four micro-batches. The second step is made as the first one, because DDP
    arranges its buckets anew in between.
    """
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    limit = timedelta(minutes=2)  # a rank that waits for ever fails
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2, timeout=limit)
    rows = torch.arange(14).tensor_split([5])[rank]
    update = Update(*[tensor[rows] for tensor in long_update()])
    micro_batches = torch.arange(len(rows)).tensor_split(1 if rank == 0 else 4)
    policy = torch.nn.parallel.DistributedDataParallel(Shift())
    options = {"process_group": dist.group.WORLD, "no_sync": policy.no_sync}
    steps = []
    for _ in range(2):
        steps.append(backward_step(policy, update, micro_batches, STOPS_INSIDE, **options))

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        alone = whole_step(update, STOPS_INSIDE)
        bapo_loss(*update, bapo.GRPO)
        weights = token_weights(update.mask)
        bapo_loss(*update, bapo.GRPO, weights=weights)
    said = [str(warning.message) for warning in caught]
    groups = [dist.new_group([0]), dist.new_group([1])]
    _, metrics = bapo_loss(*update, STOPS_INSIDE, process_group=groups[rank])
    torch.save([steps, alone.bounds, bounds_of(metrics), said], f"{folder}/{rank}.pt")
    dist.barrier()
    os._exit(0)  # a normal exit may hang, or abort, in the threads of gloo


@pytest.mark.skipif(not dist.is_gloo_available(), reason="needs torch.distributed with gloo")
def test_two_ranks_make_the_step_of_one_process(tmp_path):
    """This test fails if tokens or masses are not summed over both ranks, or over another group.

    It also fails if one rank waits for the other in a micro-batch that the other does not have, or
    if the number of ranks is left out. A search or a count of tokens on one rank alone is a
    mistake, which a warning names, with GRPO as with BAPO.
    """
    mp.spawn(of_one_rank, (str(tmp_path),), nprocs=2)
    expected = whole_step(long_update(), STOPS_INSIDE)
    for rank in (0, 1):
        saved = torch.load(tmp_path / f"{rank}.pt", weights_only=False)
        steps, alone, alone_in_a_group, said = saved
        for step in steps:
            assert_same_step(step, expected)
        assert alone_in_a_group == alone != expected.bounds
        assert ["on this rank alone" in warning for warning in said] == [True, True]


# ---------------------------------------------------------------- advantages and weights
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.bool])
def test_advantages_equal_the_literal_formula(dtype):
    rewards = torch.tensor([1, 0, 0, 0, 1, 1, 0, 0]).to(dtype)
    # First group: mean 1/4, sample deviation 1/2; second: mean 1/2, sample deviation sqrt(1/3).
    second = 0.5 / math.sqrt(1 / 3)
    expected = [1.5, -0.5, -0.5, -0.5, second, second, -second, -second]
    advantages = bapo.group_relative_advantages(rewards, 4)
    assert advantages.dtype == torch.float32
    assert advantages.tolist() == pytest.approx(expected, rel=2e-5)  # 1e-6 more in the denominator


def test_rewards_that_are_equal_but_for_rounding_have_no_advantage():
    for rewards, differ in [
        ([0.1] * 7, False),  # their mean differs from them
        ([0.0, 3e-8], False),  # 0.1 + 0.2 - 0.3 in float32
        ([0.001, 0.00101], True),
        ([1000.0, 1000.1], True),
    ]:
        advantages = bapo.group_relative_advantages(torch.tensor(rewards), len(rewards))
        assert advantages.any() == differ, rewards


def test_rho_at_ratio_1_is_the_rho_that_the_first_update_starts_with():
    generator = torch.Generator().manual_seed(0)
    for _ in range(100):
        rewards = torch.randint(-2, 3, (24,), generator=generator) / 2
        lengths = torch.randint(1, 10, (24,), generator=generator)
        mask = torch.arange(9) < lengths[:, None]
        advantages = bapo.group_relative_advantages(rewards, 8)
        ones = torch.ones(24, 9)
        _, metrics = bapo_loss(ones, ones, advantages, mask, bapo.PAPER_MAIN)
        rho = bapo.rho_at_ratio_1(rewards, lengths, 8)
        assert rho.item() == pytest.approx(metrics["rho_start"].item(), rel=1e-5)
    assert bapo.rho_at_ratio_1(torch.ones(8), torch.ones(8), 8).isnan()


def test_the_other_weights_that_the_docstring_of_token_weights_names():
    mask = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0], [0, 0, 0, 0]])
    formulas = re.findall(r"^ +(mask / .+?)  # ", token_weights.__doc__, re.MULTILINE)
    sequence_mean, constant = formulas
    values = eval(sequence_mean, {"mask": mask, "tokens": mask.sum(1, keepdim=True)})
    torch.testing.assert_close(values.sum(1), torch.tensor([0.5, 0.5, 0.0]))
    torch.testing.assert_close(eval(constant, {"mask": mask, "length": 7}), mask / 21)


# ---------------------------------------------------------------- what is logged
@pytest.mark.parametrize("log_ratio", [1e-5, math.inf, -math.inf])
def test_a_small_kl_is_not_lost_to_cancellation_and_a_large_one_is_finite(log_ratio):
    """In float32 r - 1 - log r would be -7e-10 where it is 5e-11."""
    ones = torch.ones(1, 8)
    metrics = bapo.diagnostics(log_ratio * ones, ones, ones, (0.8, 1.2))
    clamped = min(max(log_ratio, -20), 20)
    assert metrics["kl"].item() == pytest.approx(math.expm1(clamped) - clamped, rel=0.05)


# ---------------------------------------------------------------- refusals
def test_a_search_that_makes_no_sense_is_refused():
    for name, options in [
        ("rho0", {"rho0": 1.0}),
        ("low_start", {"low_start": 0.95}),
        ("low_step", {"low_step": 0.0}),
        ("low_step", {"low_step": math.inf}),
        ("high_max", {"high_max": math.inf}),
    ]:
        with pytest.raises(ValueError, match=name):
            ClipSearch(**options)
    assert ClipSearch(low_step=0.2).lows() == pytest.approx([0.6, 0.8, 0.9])
    assert ClipSearch(low_step=5).lows() == [0.6, 0.9]


def test_a_wrong_argument_is_named():
    good = long_update()._asdict() | {"search": bapo.GRPO}
    for name in ("log_probs", "rollout_log_probs", "advantages", "mask", "weights"):
        with pytest.raises(ValueError, match=name):
            bapo_loss(**(good | {name: torch.ones(13)}))
    for rewards, group_size in [(torch.zeros(7), 4), (torch.zeros(2, 2), 2), (torch.zeros(4), 1)]:
        with pytest.raises(ValueError, match="group_size"):
            bapo.group_relative_advantages(rewards, group_size)


@pytest.mark.parametrize("low, high", [(0.2, 0.28), (1.2, 1.2)])
def test_epsilons_and_swapped_bounds_are_refused_wherever_bounds_are_given(low, high):
    with pytest.raises(ValueError, match="not epsilons"):
        ClipSearch.fixed(low, high)
    with pytest.raises(ValueError, match="not epsilons"):
        bapo_loss(*long_update(), bapo.GRPO, bounds=(low, high))


def test_the_file_needs_torch_and_nothing_else():
    text = Path(bapo.__file__).read_text()
    imported = set(re.findall(r"^(?:from|import) (\w+)", text, re.MULTILINE))
    assert imported - sys.stdlib_module_names == {"torch"}
