"""Tests of bapo.py, most of them against make_vectors.py.

make_vectors.py computes the paper's formulas token by token in Python's floats.
"""

import math
import os
import random
import re
import sys
import textwrap
import warnings
from dataclasses import replace
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
from bapo import (
    ClipBounds,
    ClipSearch,
    bapo_loss,
    contribution_masses,
    token_weights,
)

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
SEARCHES = [
    bapo.PAPER_MAIN,
    bapo.PAPER_APP_A,
    bapo.GRPO,
    ClipSearch.fixed(1.02, 3.0),
    ClipSearch.fixed(1.0, 1.2),
    ClipSearch.fixed(0.8, 1.0),
    ClipSearch(rho0=0.45, low_start=0.8, low_max=0.8, high_max=2.0),
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
        "contribution": search.contribution,
    }
    if weights is not None:
        case["weights"] = weights.tolist()
    return case


def literal_metrics(tokens: list[Token], found: Found) -> dict[str, float]:
    """Return what the docstring of bapo.diagnostics promises."""
    count = max(len(tokens), 1)
    metrics = found._asdict() | {"reached": float(found.reached)}
    metrics["gradient_share"] = make_vectors.share(tokens, found.low, found.high, "gradient")
    metrics["kl"] = sum(token.ratio - 1 - token.log_ratio for token in tokens) / count
    for sign, factor, side in (("positive", 1, "high"), ("negative", -1, "low")):
        chosen = [token for token in tokens if factor * token.advantage > 0]
        clipped = sum(make_vectors.clips(token, found.low, found.high) for token in chosen)
        metrics[f"clip_fraction_{side}"] = clipped / count
        metrics[f"{sign}_tokens"] = len(chosen) / count
    ratios = [token.ratio for token in tokens if token.advantage != 0]
    metrics["ratio_min"] = min(ratios, default=math.inf)
    metrics["ratio_max"] = max(ratios, default=-math.inf)
    return metrics


# ---------------------------------------------------------------- random updates
def matrix(rows: int, width: int, draw) -> Tensor:
    """Return a tensor [rows, width] whose numbers are the results of draw()."""
    return torch.tensor([draw() for _ in range(rows * width)]).reshape(rows, width)


def random_update(rng: random.Random, dtype: torch.dtype) -> Update:
    """Return a small update. Some have no token, tokens of one sign, or NaN outside the mask.

    dtype is that of log_probs; rollout_log_probs have the same one or another. Python's generator
    gives the same numbers on every machine.
    """
    rows = rng.choice([1, 2, 5])
    width = rng.choice([1, 4, 8])
    rollout = matrix(rows, width, lambda: rng.uniform(-4, 0))
    spread = rng.choice([0.0, 0.01, 0.1, 0.5, 1.0])
    log_probs = rollout + matrix(rows, width, lambda: rng.gauss(0, spread))
    if rng.random() < 0.3:  # ratios on a bound of 1
        log_probs = rollout + matrix(rows, width, lambda: rng.choice([0.0, 0.0, -0.5, 0.5]))
    mean = rng.choice([0, 0, 0, 0, -9, 9])  # with -9 and 9 all advantages have one sign
    scale = rng.choice([1, 1, 1, 0])
    advantages = scale * matrix(rows, width, lambda: rng.gauss(mean, 1))
    inside = rng.choice([0.0, 0.3, 0.9, 1.0])
    mask = matrix(rows, width, lambda: float(rng.random() < inside)) > 0
    junk = rng.choice([0.0, math.nan, math.inf])
    log_probs = log_probs.masked_fill(~mask, junk)
    rollout = rollout.masked_fill(~mask, junk)
    advantages = rng.choice([advantages.masked_fill(~mask, junk), advantages[:, 0]])
    rollout_dtype = rng.choice([dtype, *DTYPES])
    return Update(log_probs.to(dtype), rollout.to(rollout_dtype), advantages, mask)


def long_update() -> Update:
    """Return 14 responses of unequal lengths, up to 12, with NaN outside the mask."""
    rng = random.Random(3)
    rollout = matrix(14, 12, lambda: rng.uniform(-3, 0))
    log_probs = rollout + matrix(14, 12, lambda: rng.gauss(0, 0.4))
    advantages = matrix(14, 1, lambda: rng.gauss(0, 1))[:, 0]
    lengths = matrix(14, 1, lambda: rng.randint(1, 12))
    mask = torch.arange(12) < lengths
    return Update(log_probs.masked_fill(~mask, math.nan), rollout, advantages, mask)


# With these searches the bounds of long_update stop inside their ranges.
SEARCHES_THAT_STOP_INSIDE = [
    ClipSearch(rho0=0.4, low_start=0.8),
    ClipSearch(rho0=0.4, low_start=0.8, contribution="gradient"),
]


# ---------------------------------------------------------------- an update
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("contribution", ["surrogate", "gradient"])
def test_every_number_of_an_update_equals_the_literal_algorithm(contribution, dtype):
    """This test fails, too, if a log-prob is rounded to the dtype of the other before they meet."""
    rng = random.Random(f"{contribution} {dtype}")
    tolerance = 1e-2 if dtype.itemsize == 2 else 1e-5  # the gradient has this dtype
    for _ in range(600):
        update = random_update(rng, dtype)
        weights = rng.choice([None, matrix(*update.mask.shape, rng.random)])
        search = replace(rng.choice(SEARCHES), contribution=contribution)
        case = case_of(update, search, weights)
        tokens = make_vectors.response_tokens(case)
        settings = case["settings"]
        if rng.random() < 0.7:
            start = make_vectors.search(tokens, settings).rho_start
            if not math.isnan(start):
                settings["rho0"] = min(start + rng.uniform(0, 0.2), 0.999)

        leaf, *others = [tensor.clone().requires_grad_() for tensor in update[:3]]
        search = replace(search, rho0=settings["rho0"])
        loss, metrics = bapo_loss(leaf, *others, update.mask, search, weights=weights)
        loss.backward()
        # Otherwise advantages that are not detached would train a critic.
        assert [tensor.grad for tensor in others] == [None, None]
        expected = make_vectors.expected(case)
        gradient = torch.tensor(expected["gradient"])
        assert loss.dtype == torch.float32
        assert loss.item() == pytest.approx(expected["loss"], rel=1e-5, abs=3e-5)
        torch.testing.assert_close(leaf.grad.float(), gradient, rtol=tolerance, atol=1e-6)

        expected_metrics = literal_metrics(tokens, make_vectors.search(tokens, settings))
        assert metrics.keys() == expected_metrics.keys()
        for name, value in expected_metrics.items():
            close = pytest.approx(value, rel=2e-5, abs=2e-6, nan_ok=True)
            assert metrics[name].item() == close, name
            assert metrics[name].shape == ()
            assert not metrics[name].requires_grad


def test_a_token_of_weight_0_has_no_effect_even_if_it_is_nan():
    """It is inside the mask, so only its weight says that it does not count."""
    log_probs = torch.tensor([[-1.0, math.nan]], requires_grad=True)
    rollout = torch.full((1, 2), -1.0)
    weights = torch.tensor([[1.0, 0.0]])
    ones = torch.ones(1, 2)
    loss, metrics = bapo_loss(log_probs, rollout, ones, ones, bapo.PAPER_MAIN, weights=weights)
    loss.backward()
    assert (loss, metrics["kl"]) == (-1, 0)
    assert log_probs.grad.tolist() == [[-1, 0]]


@pytest.mark.parametrize("shape", [(2, 0), (0, 3)])
def test_a_batch_without_tokens_has_a_loss_of_0(shape):
    """A rank may get no response, and must take part in the search all the same."""
    zeros = torch.zeros(shape, requires_grad=True)
    loss, metrics = bapo_loss(zeros, zeros, torch.zeros(shape[0]), zeros, bapo.PAPER_MAIN)
    loss.backward()
    assert loss == 0 and metrics["rho"].isnan()
    assert (metrics["ratio_min"], metrics["ratio_max"]) == (math.inf, -math.inf)


def test_tensors_made_in_inference_mode_may_be_given():
    """Autograd cannot save such tensors for the backward pass."""
    update = long_update()
    with torch.inference_mode():
        others = [tensor.clone() for tensor in update[1:]]
        weights = token_weights(update.mask)
    leaf = update.log_probs.clone().requires_grad_()
    loss, _ = bapo_loss(leaf, *others, bapo.PAPER_MAIN, weights=weights)
    loss.backward()
    assert leaf.grad.any()


def test_nothing_but_the_search_reads_from_the_device():
    """On the device "meta", which holds no numbers, a read raises."""
    update = Update(*[tensor.to("meta") for tensor in long_update()])
    leaf = update.log_probs.requires_grad_()
    bounds = ClipBounds(0.8, 1.2, 0.5, 0.4, True)
    loss, metrics = bapo_loss(*update, bapo.PAPER_MAIN, bounds=bounds)
    loss.backward()
    assert {value.device.type for value in metrics.values()} == {"meta"}
    log_ratio = leaf - update.rollout_log_probs
    bapo.predicted_entropy_fall(log_ratio, leaf, leaf, *update[2:], bounds)
    weights = token_weights(update.mask)
    contribution_masses(log_ratio, update.advantages, weights, bapo.PAPER_MAIN)


# ---------------------------------------------------------------- the search
def test_presets_are_as_published():
    """The paper gives them in sections 5.1 and A."""
    main = {
        "rho0": 0.4,
        "low_start": 0.6,
        "low_max": 0.9,
        "low_step": 0.02,
        "high_start": 1.2,
        "high_max": 3.0,
        "high_step": 0.05,
        "contribution": "surrogate",
    }
    assert vars(bapo.PAPER_MAIN) == main
    assert vars(bapo.PAPER_APP_A) == main | {"rho0": 0.45, "low_start": 0.8, "high_max": 2.0}


def test_masses_are_summed_in_float64():
    advantages = torch.tensor([[2.0**24, 1.0]])
    ones = torch.ones(1, 2)
    masses = contribution_masses(torch.zeros(1, 2), advantages, ones, bapo.PAPER_MAIN)
    assert masses[0] == 2**24 + 1  # which float32 cannot hold


@pytest.mark.parametrize("contribution", ["surrogate", "gradient"])
@pytest.mark.parametrize(
    "name, value",
    [
        ("log_probs", math.nan),
        ("advantages", math.nan),
        ("advantages", math.inf),
        ("advantages", -math.inf),
    ],
)
def test_nan_or_infinity_in_one_response_makes_rho_nan_and_the_loss_not_finite(
    name, value, contribution
):
    """One response has the value in its first token, or as its advantage."""
    for row in (0, 1):  # a negative and a positive advantage
        update = long_update()
        getattr(update, name).view(14, -1)[row, 0] = value
        loss, metrics = bapo_loss(*update, ClipSearch(contribution=contribution))
        assert not loss.isfinite()
        assert metrics["rho"].isnan() and metrics["rho_start"].isnan()
        assert metrics["reached"] == 0
        assert metrics["gradient_share"].isnan() or value == -math.inf


# ---------------------------------------------------------------- splitting an update
class Step(NamedTuple):
    """The bounds of one optimizer step, and its gradient [T] with respect to `shift`."""

    bounds: ClipBounds
    gradient: Tensor


def whole_step(update: Update, search: ClipSearch, group=None) -> Step:
    """Make one step in one call. The model adds its parameter `shift` [T] to the log-probs."""
    shift = torch.zeros(update.mask.shape[1], requires_grad=True)
    loss, metrics = bapo_loss(update.log_probs + shift, *update[1:], search, process_group=group)
    loss.backward()
    found = [metrics[name].item() for name in ClipBounds._fields]
    return Step(ClipBounds(*found), shift.grad)


def recipe(ranks: bool) -> str:
    """Return the loop of bapo.py's docstring, with or without the lines for ranks."""
    _, _, loop = bapo.__doc__.partition("    group = dist")
    lines = f"    group = dist{loop}".splitlines()
    return textwrap.dedent("\n".join(line for line in lines if ranks or "# (ranks)" not in line))


def split_step(update: Update, parts: list, search: ClipSearch, ranks: bool) -> Step:
    """Make one step in micro-batches, and over ranks, by the docstring's own lines."""
    shift = torch.zeros(update.mask.shape[1], requires_grad=True)
    names = update._asdict() | vars(bapo) | {"group": None, "parts": parts, "search": search}
    names["dist"] = dist
    names["policy"] = shift
    names["log_probs_of"] = lambda policy, part: update.log_probs[part] + policy
    exec(recipe(ranks), names)
    return Step(names["bounds"], shift.grad)


def assert_same_step(step: Step, expected: Step) -> None:
    assert step.bounds == pytest.approx(expected.bounds, rel=1e-5)
    torch.testing.assert_close(step.gradient, expected.gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("search", SEARCHES_THAT_STOP_INSIDE)
def test_bounds_and_gradient_do_not_depend_on_micro_batches(search):
    update = long_update()
    expected = whole_step(update, search)
    assert search.high_start < expected.bounds.high
    for ends in ([6], [1, 6, 8, 9, 11, 13]):
        parts = torch.arange(14).tensor_split(ends)
        assert_same_step(split_step(update, parts, search, ranks=False), expected)


def of_one_rank(rank: int, folder: str) -> None:
    """Save the steps of one of two processes, which holds 5 or 9 of the 14 responses."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    update = long_update()
    mine = slice(0, 5) if rank == 0 else slice(5, 14)
    my_update = Update(*(tensor[mine] for tensor in update))
    parts = [slice(0, 2), slice(2, None)]
    search = SEARCHES_THAT_STOP_INSIDE[0]
    whole = whole_step(my_update, search, dist.group.WORLD)
    split = split_step(my_update, parts, search, ranks=True)
    with warnings.catch_warnings(record=True) as caught:
        alone = whole_step(my_update, search)
    groups = [dist.new_group([0]), dist.new_group([1])]
    alone_in_a_group = whole_step(my_update, search, groups[rank])
    said = [str(warning.message) for warning in caught]
    torch.save([whole, split, alone, alone_in_a_group, said], f"{folder}/{rank}.pt")
    dist.barrier()
    os._exit(0)  # a normal exit may hang, or abort, in the threads of gloo


@pytest.mark.skipif(not dist.is_gloo_available(), reason="needs torch.distributed with gloo")
def test_two_ranks_find_what_one_process_finds_with_and_without_micro_batches(tmp_path):
    """This test fails if the tokens are not counted, or the masses not summed, over both ranks.

    It also fails if they are summed over another group than the given one. A search on one rank
    alone is a mistake, which a warning names.
    """
    mp.spawn(of_one_rank, (str(tmp_path),), nprocs=2)
    ranks = [torch.load(tmp_path / f"{rank}.pt", weights_only=False) for rank in (0, 1)]
    wholes, splits, *_ = zip(*ranks)
    expected = whole_step(long_update(), SEARCHES_THAT_STOP_INSIDE[0])
    assert wholes[0].bounds == wholes[1].bounds
    assert splits[0].bounds == splits[1].bounds
    # DDP averages the gradients, so the page's loop has doubled them.
    whole = Step(wholes[0].bounds, wholes[0].gradient + wholes[1].gradient)
    split = Step(splits[0].bounds, (splits[0].gradient + splits[1].gradient) / 2)
    assert_same_step(whole, expected)
    assert_same_step(split, expected)
    for _, _, alone, alone_in_a_group, said in ranks:
        assert alone_in_a_group.bounds == alone.bounds
        assert torch.equal(alone_in_a_group.gradient, alone.gradient)
        (warning,) = said
        assert "on this rank alone, of 2" in warning


# ---------------------------------------------------------------- advantages and weights
def test_advantages_equal_the_literal_formula():
    rewards = torch.tensor([1.0, 0.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0])
    # First group: mean 1/4, sample deviation 1/2; second: mean 1/2, sample deviation sqrt(1/3).
    second = 0.5 / math.sqrt(1 / 3)
    expected = [1.5, -0.5, -0.5, -0.5, second, second, -second, -second]
    advantages = bapo.group_relative_advantages(rewards, 4)
    assert advantages.tolist() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.int64, torch.bool])
def test_a_group_of_equal_rewards_gets_exactly_zero(dtype):
    """The mean of equal numbers may differ from them by rounding."""
    for group_size in range(2, 20):
        rewards = torch.full((2 * group_size,), 0.1, dtype=torch.float64).to(dtype)
        advantages = bapo.group_relative_advantages(rewards, group_size)
        assert not advantages.any()
    assert advantages.dtype == torch.float32


def test_rho_at_ratio_1_is_a_ratio_of_lengths():
    """rho = sum of S L+ / sum of S (L+ + L-), for rewards 0 and 1 and the token-mean.

    S is a group's sum of positive advantages, L+ and L- the mean lengths of right and wrong.
    """
    for seed in range(300):
        generator = torch.Generator().manual_seed(seed)
        rewards = torch.randint(2, (24,), generator=generator).float()
        lengths = torch.randint(1, 10, (24, 1), generator=generator)
        log_probs = -3 * torch.rand(24, 9, generator=generator)
        advantages = bapo.group_relative_advantages(rewards, 8)
        mask = torch.arange(9) < lengths
        _, metrics = bapo_loss(log_probs, log_probs, advantages, mask, bapo.GRPO)
        right_lengths = all_lengths = 0.0
        for of_group, length in zip(advantages.split(8), lengths.double().split(8)):
            if of_group.any():
                size = of_group.clamp(min=0).sum()
                right_lengths += size * length[of_group > 0].mean()
                all_lengths += size * (length[of_group > 0].mean() + length[of_group < 0].mean())
        assert metrics["rho"].item() == pytest.approx(
            (right_lengths / all_lengths).item(), abs=1e-6
        )


def test_the_other_weights_that_the_docstring_of_token_weights_names():
    mask = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0], [0, 0, 0, 0]])
    names = {"mask": mask, "tokens": mask.sum(1, keepdim=True), "length": 7}
    formulas = re.findall(r"^ +(mask / .+?)  # ", token_weights.__doc__, re.MULTILINE)
    sequence_mean, constant = [eval(formula, names) for formula in formulas]
    of_responses = torch.tensor([1 / 6, 1 / 2, 0.0])
    torch.testing.assert_close(sequence_mean, mask * of_responses[:, None])
    torch.testing.assert_close(constant, mask / 21)


# ---------------------------------------------------------------- what is logged
@pytest.mark.parametrize("log_ratio", [1e-5, 100.0, -100.0, math.inf, -math.inf])
def test_a_small_kl_is_not_lost_to_cancellation_and_a_large_one_is_finite(log_ratio):
    """In float32 r - 1 - log r would be -7e-10 where it is 5e-11."""
    ones = torch.ones(1, 8)
    metrics = bapo.diagnostics(log_ratio * ones, torch.ones(1), ones, (0.8, 1.2), ones)
    clamped = min(max(log_ratio, -20), 20)
    assert metrics["kl"].item() == pytest.approx(math.expm1(clamped) - clamped, rel=0.05)


@pytest.mark.parametrize("low, high", [(0.8, 1.2), (0.5, 3.0), (0.99, 1.01), (1.05, 3.0)])
def test_the_predicted_entropy_fall_is_the_slope_of_the_entropy(low, high):
    """The logits of a softmax move in the direction A X, as in Eqs. 6 and 7.

    The rollout policy is uniform, so each of the six tokens is drawn once. Outside the mask is NaN.
    """
    rng = random.Random(0)
    for _ in range(30):
        advantages = matrix(1, 6, lambda: rng.gauss(0, 1))[0]
        logits = matrix(1, 6, lambda: rng.gauss(0, 0.4))[0].requires_grad_()
        log_probs = logits.log_softmax(0)
        log_ratio = log_probs + math.log(6)
        entropy = -(log_probs.exp() * log_probs).sum()
        (slope,) = torch.autograd.grad(entropy, logits)
        ratio = log_ratio.exp()
        has_gradient = torch.where(advantages > 0, ratio < high, ratio > low)

        mask = torch.tensor([[True], [False]]).expand(2, 6)
        tokens = [
            values.expand(2, 6).masked_fill(~mask, math.nan)
            for values in (log_ratio, log_probs, entropy, advantages)
        ]
        fall = bapo.predicted_entropy_fall(*tokens, mask, (low, high))
        expected = -(slope * advantages * has_gradient).sum()
        torch.testing.assert_close(fall, expected, rtol=1e-4, atol=1e-5)


# ---------------------------------------------------------------- refusals
def test_a_search_that_makes_no_sense_is_refused():
    for name, options in [
        ("rho0", {"rho0": 1.0}),
        ("low_start", {"low_start": 0.95}),
        ("low_step", {"low_step": 0.0}),
        ("low_step", {"low_step": 0.07}),
        ("low_step", {"low_step": 1e7}),
        ("low_step", {"low_step": math.inf}),
        ("high_step", {"high_step": 1e-7}),  # 18 million bounds
        ("contribution", {"contribution": "eq8"}),
    ]:
        with pytest.raises(ValueError, match=name):
            ClipSearch(**options)
    assert len(ClipSearch(high_max=2.1, high_step=1e-3).highs()) == 901


ZEROS = torch.zeros(2, 3)
GOOD = Update(ZEROS, ZEROS, torch.ones(2), torch.ones(2, 3))._asdict() | {"search": bapo.GRPO}


def test_a_wrong_argument_is_named():
    for name, value in [
        ("log_probs", torch.zeros(3)),
        ("rollout_log_probs", torch.zeros(2, 2)),
        ("advantages", torch.zeros(3)),
        ("mask", torch.ones(2)),
        ("weights", torch.ones(2)),
    ]:
        with pytest.raises(ValueError, match=f"^{name}"):
            bapo_loss(**(GOOD | {name: value}))
    for rewards in (torch.zeros(7), torch.zeros(2, 2)):
        with pytest.raises(ValueError, match="rewards.*group_size"):
            bapo.group_relative_advantages(rewards, 4)
    with pytest.raises(ValueError, match="group_size must be at least 2"):
        bapo.group_relative_advantages(torch.zeros(4), 1)


@pytest.mark.parametrize("low, high", [(0.2, 0.28), (1.2, 1.2)])
def test_epsilons_and_swapped_bounds_are_refused_wherever_bounds_are_given(low, high):
    with pytest.raises(ValueError, match="low and high"):
        ClipSearch.fixed(low, high)
    with pytest.raises(ValueError, match="low and high"):
        bapo_loss(**GOOD, bounds=(low, high))


def test_the_file_needs_torch_and_nothing_else():
    text = Path(bapo.__file__).read_text()
    imported = set(re.findall(r"^(?:from|import) (\w+)", text, re.MULTILINE))
    assert imported - sys.stdlib_module_names == {"torch"}
