"""bapo.py against make_vectors.py: the paper's formulas, token by token in Python's floats."""

import math
import os
import random
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

import bapo
import make_vectors
from bapo import (
    ClipBounds,
    ClipSearch,
    bapo_loss,
    contribution_masses,
    search_clip_bounds,
    token_weights,
)
from make_vectors import Found, Token

READINGS = ("surrogate", "gradient")
SEARCHES = [
    bapo.PAPER_MAIN,
    bapo.PAPER_APP_A,
    bapo.GRPO,
    bapo.CLIP_HIGHER,
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
    """An update as make_vectors.py has it."""
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


def is_a_tie(tokens: list[Token], settings: dict) -> bool:
    """Whether float32 products may fall on either side of the target."""
    searches = [
        make_vectors.search(tokens, settings | {"rho0": settings["rho0"] + nudge})
        for nudge in (-5e-7, 5e-7)
    ]
    return searches[0] != searches[1]


def literal_metrics(tokens: list[Token], found: Found) -> dict[str, float]:
    """bapo.diagnostics, by its docstring."""
    count = max(len(tokens), 1)
    metrics = found._asdict() | {"reached": float(found.reached)}
    metrics["gradient_share"] = make_vectors.share(tokens, found.low, found.high, "gradient")
    metrics["kl"] = sum(token.ratio - 1 - token.log_ratio for token in tokens) / count
    for sign, factor, side in (("positive", 1, "high"), ("negative", -1, "low")):
        chosen = [token for token in tokens if factor * token.advantage > 0]
        clipped = sum(make_vectors.clips(token, found.low, found.high) for token in chosen)
        ratios = [token.ratio for token in chosen]
        metrics[f"clip_fraction_{side}"] = clipped / count
        metrics[f"{sign}_tokens"] = len(chosen) / count
        metrics[f"ratio_mean_{sign}"] = sum(ratios) / len(ratios) if ratios else math.nan
        metrics[f"ratio_min_{sign}"] = min(ratios, default=math.inf)
        metrics[f"ratio_max_{sign}"] = max(ratios, default=-math.inf)
    return metrics


# ---------------------------------------------------------------- random updates
def matrix(rows: int, width: int, draw) -> Tensor:
    """[rows, width], each number by a call of draw."""
    return torch.tensor([draw() for _ in range(rows * width)]).reshape(rows, width)


def random_update(rng: random.Random, dtype: torch.dtype) -> Update:
    """A small update with every degeneracy in it now and then.

    Outside the mask stands anything. Python's generator gives the same numbers on every machine.
    """
    rows = rng.choice([1, 2, 5])
    width = rng.choice([1, 4, 8])
    rollout = matrix(rows, width, lambda: rng.uniform(-4, 0))
    spread = rng.choice([0.0, 0.01, 0.1, 0.5, 1.0])
    log_probs = rollout + matrix(rows, width, lambda: rng.gauss(0, spread))
    if rng.random() < 0.3:  # ratios on a bound of 1
        log_probs = rollout + matrix(rows, width, lambda: rng.choice([0.0, 0.0, -0.5, 0.5]))
    mean = rng.choice([0, 0, 0, 0, -9, 9])  # -9, 9: all of one sign
    scale = rng.choice([1, 1, 1, 0])
    columns = rng.choice([1, width])
    advantages = scale * matrix(rows, columns, lambda: rng.gauss(mean, 1))
    inside = rng.choice([0.0, 0.3, 0.9, 1.0])
    mask = matrix(rows, width, lambda: float(rng.random() < inside)) > 0
    junk = rng.choice([0.0, math.nan, math.inf])
    log_probs = log_probs.masked_fill(~mask, junk)
    rollout = rollout.masked_fill(~mask, rng.choice([0.0, junk]))
    if advantages.shape == mask.shape:
        advantages = advantages.masked_fill(~mask, junk)
    else:
        advantages = advantages[:, 0]
    return Update(log_probs.to(dtype), rollout.to(dtype), advantages, mask)


def long_update() -> Update:
    """14 responses of unequal lengths, up to 12."""
    rng = random.Random(3)
    rollout = matrix(14, 12, lambda: rng.uniform(-3, 0))
    log_probs = rollout + matrix(14, 12, lambda: rng.gauss(0, 0.4))
    advantages = matrix(14, 1, lambda: rng.gauss(0, 1))[:, 0]
    lengths = matrix(14, 1, lambda: rng.randint(1, 12))
    return Update(log_probs, rollout, advantages, torch.arange(12) < lengths)


# For long_update: they meet their targets on the way.
SEARCHES_THAT_STOP_INSIDE = [
    ClipSearch(rho0=0.4, low_start=0.8),
    ClipSearch(rho0=0.4, low_start=0.8, contribution="gradient"),
]


# ---------------------------------------------------------------- an update
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("contribution", READINGS)
def test_every_number_of_an_update_equals_the_literal_algorithm(contribution, dtype):
    rng = random.Random(f"{contribution} {dtype}")
    tolerance = 1e-2 if dtype.itemsize == 2 else 1e-5  # of a gradient in that dtype
    compared = 0
    for _ in range(600):
        update = random_update(rng, dtype)
        weights = rng.choice([None, matrix(*update.mask.shape, rng.random)])
        search = replace(rng.choice(SEARCHES), contribution=contribution)
        case = case_of(update, search, weights)
        tokens = make_vectors.response_tokens(case)
        settings = case["settings"]
        if rng.random() < 0.7:
            start = make_vectors.search(tokens, settings).rho_start
            settings["rho0"] = min(start + rng.uniform(0, 0.2), 0.999)
        if is_a_tie(tokens, settings):
            continue
        compared += 1

        leaf = update.log_probs.clone().requires_grad_()
        search = replace(search, rho0=settings["rho0"])
        loss, metrics = bapo_loss(leaf, *update[1:], search, weights=weights)
        loss.backward()
        expected = make_vectors.expected(case)
        gradient = torch.tensor(expected["gradient"])
        assert loss.dtype == torch.float32
        assert loss.item() == pytest.approx(expected["loss"], rel=1e-5, abs=3e-5)
        torch.testing.assert_close(leaf.grad.float(), gradient, rtol=tolerance, atol=1e-6)

        found = make_vectors.search(tokens, settings)
        expected_metrics = literal_metrics(tokens, found)
        assert metrics.keys() == expected_metrics.keys()
        for name, value in expected_metrics.items():
            close = pytest.approx(value, rel=2e-5, abs=2e-6, nan_ok=True)
            assert metrics[name].item() == close, name
            assert metrics[name].shape == ()
            assert not metrics[name].requires_grad

        entropy = matrix(*update.mask.shape, lambda: rng.uniform(0, 3))
        fall = 0.0  # Eqs. 6, 7
        for token in tokens:
            at = (token.row, token.column)
            if not make_vectors.clips(token, found.low, found.high):
                information = (update.log_probs[at] + entropy[at]).item()
                fall += token.ratio * token.advantage * information / len(tokens)
        log_ratio = update.log_probs.float() - update.rollout_log_probs
        others = (update.log_probs, entropy, update.advantages, update.mask)
        logged = bapo.predicted_entropy_fall(log_ratio, *others, found[:2])
        assert logged.item() == pytest.approx(fall, rel=1e-4, abs=1e-4)
    assert compared > 500


def test_log_probs_are_subtracted_before_they_are_rounded():
    """In bfloat16 the subtraction would give 20.402, and a rollout of -3.0351 would be -3.03."""
    log_probs = torch.tensor([[-0.0101]]).bfloat16()
    rollout = torch.tensor([[-3.03]]).bfloat16()
    for given in (rollout, rollout.float()):
        update = (log_probs, given, torch.tensor([-1.0]), torch.ones(1, 1))
        loss, _ = bapo_loss(*update, bapo.GRPO)
        assert loss.item() == pytest.approx(20.515, abs=0.001)
    finer = torch.tensor([[-3.0351]])
    _, metrics = bapo_loss(log_probs, finer, torch.tensor([1.0]), torch.ones(1, 1), bapo.GRPO)
    expected = math.exp(log_probs.item() + 3.0351)
    assert metrics["ratio_max_positive"].item() == pytest.approx(expected, rel=1e-5)
    ratio = bapo.importance_ratio(log_probs)
    assert ratio.item() == pytest.approx(math.exp(log_probs.item()), rel=1e-6)

    log_probs = torch.full((1, 1), -33.3, dtype=torch.float64, requires_grad=True)
    update = (log_probs, log_probs.detach(), torch.tensor([1.0]), torch.ones(1, 1))
    loss, metrics = bapo_loss(*update, ClipSearch.fixed(0.8, 1.0))
    loss.backward()
    assert metrics["ratio_max_positive"] == 1
    assert log_probs.grad.item() == -1


def test_the_log_probs_alone_get_a_gradient():
    """Otherwise advantages that are not detached would train a critic."""
    update = long_update()
    leaves = [tensor.clone().requires_grad_() for tensor in update[:3]]
    weights = token_weights(update.mask).requires_grad_()
    loss, _ = bapo_loss(*leaves, update.mask, bapo.PAPER_MAIN)
    loss.backward()
    log_probs, rollout_log_probs, advantages = leaves
    assert log_probs.grad.count_nonzero() > 0
    assert rollout_log_probs.grad is None
    assert advantages.grad is None
    log_ratio = update.log_probs - update.rollout_log_probs
    masses = contribution_masses(log_ratio, leaves[2], weights, bapo.PAPER_MAIN)
    assert not masses.requires_grad


def test_a_token_of_weight_0_has_no_effect_even_if_it_is_nan():
    update = long_update()
    weights = token_weights(update.mask)
    weights[3] = 0.0
    expected, _ = bapo_loss(*update, bapo.PAPER_MAIN, weights=weights)
    leaf = update.log_probs.clone()
    leaf[3] = math.nan
    leaf.requires_grad_()
    loss, _ = bapo_loss(leaf, *update[1:], bapo.PAPER_MAIN, weights=weights)
    loss.backward()
    assert torch.equal(loss, expected)
    assert leaf.grad.isfinite().all()


def test_tensors_made_in_inference_mode_may_be_given():
    update = long_update()
    expected, _ = bapo_loss(*update, bapo.PAPER_MAIN)
    with torch.inference_mode():
        others = [tensor.clone() for tensor in update[1:]]
        rollout_log_probs, advantages, mask = others
        weights = token_weights(mask)
        log_ratio = update.log_probs - rollout_log_probs
        masses = contribution_masses(log_ratio, advantages, weights, bapo.PAPER_MAIN)
        bounds = search_clip_bounds(masses, bapo.PAPER_MAIN)
    for given in ({}, {"weights": weights}, {"weights": weights, "bounds": bounds}):
        leaf = update.log_probs.clone().requires_grad_()
        loss, _ = bapo_loss(leaf, *others, bapo.PAPER_MAIN, **given)
        loss.backward()
        assert torch.equal(loss, expected)
    log_ratio = update.log_probs.clone().requires_grad_() - rollout_log_probs
    bapo.token_losses(log_ratio, advantages, bounds.low, bounds.high).sum().backward()


def test_given_bounds_are_used():
    update = long_update()
    fixed, _ = bapo_loss(*update, bapo.CLIP_HIGHER)
    given, metrics = bapo_loss(*update, bapo.PAPER_MAIN, bounds=(0.8, 1.28))
    assert torch.equal(fixed, given)
    assert "rho" not in metrics


def test_a_search_reads_the_device_once_and_nothing_else_does():
    """On the device "meta", which has no numbers, a read raises."""
    update = [tensor.to("meta") for tensor in long_update()]
    leaf = update[0].requires_grad_()
    for bounds in ((0.8, 1.2), ClipBounds(0.8, 1.2, 0.5, 0.4, True)):
        loss, metrics = bapo_loss(leaf, *update[1:], bapo.PAPER_MAIN, bounds=bounds)
        loss.backward()
    assert {value.device.type for value in metrics.values()} == {"meta"}
    weights = token_weights(update[3])
    log_ratio = update[0] - update[1]
    masses = contribution_masses(log_ratio, update[2], weights, bapo.PAPER_MAIN)
    bapo.predicted_entropy_fall(log_ratio, *update[:2], *update[2:], (0.8, 1.2))
    with pytest.raises(NotImplementedError):
        search_clip_bounds(masses, bapo.PAPER_MAIN)


# ---------------------------------------------------------------- the search
def test_bounds_that_may_move_are_not_fixed():
    assert bapo.GRPO.is_fixed
    assert not ClipSearch(low_start=0.9).is_fixed
    assert not ClipSearch(high_max=1.2).is_fixed


def test_presets_are_as_published():
    """Sections 5.1 and A of the paper, with Eq. 8's values."""
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
    assert (bapo.GRPO.lows(), bapo.GRPO.highs()) == ([0.8], [1.2])
    assert (bapo.CLIP_HIGHER.lows(), bapo.CLIP_HIGHER.highs()) == ([0.8], [1.28])


def test_a_token_on_a_bound_has_its_gradient_and_its_mass():
    log_ratio = torch.tensor([[0.5, -0.5]], requires_grad=True)  # A > 0, A < 0
    advantages = torch.tensor([[1.0, -1.0]])
    high, low = log_ratio.detach().exp()[0].tolist()
    bapo.token_losses(log_ratio, advantages, low, high).sum().backward()
    assert log_ratio.grad.tolist() == [[-high, low]]
    for contribution in ("surrogate", "gradient"):
        search = replace(ClipSearch.fixed(low, high), contribution=contribution)
        ones = torch.ones(1, 2)
        masses = contribution_masses(log_ratio, advantages, ones, search)
        assert masses.tolist() == [high, low]


def test_masses_are_summed_in_float64():
    advantages = torch.ones(1, 1002)
    advantages[0, 0] = 2.0**24
    zeros = torch.zeros(1, 1002)
    masses = contribution_masses(zeros, advantages, torch.ones(1, 1002), bapo.PAPER_MAIN)
    assert masses[0] == 2**24 + 1001  # no float32


class OnApple(Tensor):
    """Says that it lies on an Apple GPU, which has no float64."""

    device = property(lambda self: torch.device("mps"))


def test_a_device_without_float64_sums_in_float32():
    zeros = torch.zeros(1, 2).as_subclass(OnApple)
    masses = contribution_masses(zeros, torch.ones(1), torch.ones(1, 2), bapo.PAPER_MAIN)
    assert masses.dtype == torch.float32


# ---------------------------------------------------------------- splitting an update
class Step(NamedTuple):
    """What one optimizer step found, and its gradient [T] of `shift`, below."""

    bounds: ClipBounds
    gradient: Tensor


def whole_step(update: Update, search: ClipSearch, group=None) -> Step:
    """One step in one call. The model is a shift of the log-probs of each position, [T]."""
    shift = torch.zeros(update.mask.shape[1], requires_grad=True)
    loss, metrics = bapo_loss(update.log_probs + shift, *update[1:], search, process_group=group)
    loss.backward()
    found = [metrics[name].item() for name in ClipBounds._fields]
    return Step(ClipBounds(*found), shift.grad)


def recipe(ranks: bool) -> str:
    """The lines of integrations/README.md for a split step, with or without those for ranks."""
    page = (Path(bapo.__file__).parent / "integrations/README.md").read_text()
    lines = page[page.index("group = dist") : page.index("```\n\nDo not divide")].splitlines()
    return "\n".join(line for line in lines if ranks or "# (ranks)" not in line)


def split_step(update: Update, parts: list, search: ClipSearch, ranks: bool) -> Step:
    """One step in micro-batches, and over ranks, as the page says line by line."""
    shift = torch.zeros(update.mask.shape[1], requires_grad=True)
    names = update._asdict() | vars(bapo) | {"group": None, "parts": parts, "search": search}
    names["dist"] = dist
    names["compute_log_probs"] = lambda part: update.log_probs[part] + shift
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
    """Saves the steps of one of two processes, which holds 5 or 9 of the 14 responses."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    update = long_update()
    mine = slice(0, 5) if rank == 0 else slice(5, 14)
    my_update = Update(*(tensor[mine] for tensor in update))
    parts = torch.arange(len(my_update.mask)).tensor_split([2])
    steps = []
    for search in SEARCHES_THAT_STOP_INSIDE:
        whole = whole_step(my_update, search, dist.group.WORLD)
        split = split_step(my_update, parts, search, ranks=True)
        steps.append([*whole, *split])
    torch.save(steps, f"{folder}/{rank}.pt")
    dist.barrier()
    os._exit(0)  # a normal exit may hang, or abort, in the threads of gloo


@pytest.mark.skipif(not dist.is_gloo_available(), reason="needs torch.distributed with gloo")
def test_two_ranks_find_what_one_process_finds_with_and_without_micro_batches(tmp_path):
    """The page's loop counts the tokens, and sums the masses, of both ranks."""
    mp.spawn(of_one_rank, (str(tmp_path),), nprocs=2)
    steps_of_first, steps_of_second = (
        torch.load(tmp_path / f"{rank}.pt", weights_only=False) for rank in (0, 1)
    )
    update = long_update()
    for search in SEARCHES_THAT_STOP_INSIDE:
        expected = whole_step(update, search)
        first = steps_of_first.pop(0)
        second = steps_of_second.pop(0)
        assert first[0] == second[0]
        assert first[2] == second[2]
        # Without micro-batches the ranks' gradients add up; the recipe has doubled each, for the
        # mean that DDP takes.
        assert_same_step(Step(first[0], first[1] + second[1]), expected)
        assert_same_step(Step(first[2], (first[3] + second[3]) / 2), expected)


# ---------------------------------------------------------------- advantages and weights
def test_advantages_equal_the_literal_formula():
    rewards = torch.tensor([1.0, 0.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0])
    # First group: mean 1/4, sample deviation 1/2; second: mean 1/2, sample deviation sqrt(1/3).
    second = 0.5 / math.sqrt(1 / 3)
    expected = [1.5, -0.5, -0.5, -0.5, second, second, -second, -second]
    advantages = bapo.group_relative_advantages(rewards, 4)
    assert advantages.tolist() == pytest.approx(expected, rel=1e-5)
    pair = bapo.group_relative_advantages(torch.tensor([3.0, 0.0]), 2)
    assert pair.tolist() == pytest.approx([math.sqrt(0.5), -math.sqrt(0.5)], rel=1e-5)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool]
)
def test_a_group_of_equal_rewards_gets_exactly_zero(dtype):
    """Also where the mean of equal numbers differs from them by rounding."""
    for group_size in range(2, 20):
        for reward in (0.1, 0.3, 0.7, 1.0):
            rewards = torch.full((2 * group_size,), reward, dtype=torch.float64).to(dtype)
            advantages = bapo.group_relative_advantages(rewards, group_size)
            assert not advantages.any()
    assert advantages.dtype == torch.float32


def test_token_weights_and_those_of_the_formulas_in_their_docstring():
    mask = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0], [0, 0, 0, 0]])
    assert_weights(token_weights(mask), of_first=1 / 4, of_second=1 / 4)
    assert not token_weights(torch.zeros(2, 3)).any()
    names = {"mask": mask, "tokens": mask.sum(1, keepdim=True), "length": 7}
    formulas = re.findall(r"^ +(mask / .+?)  # ", token_weights.__doc__, re.MULTILINE)
    sequence_mean, constant = [eval(formula, names) for formula in formulas]
    assert_weights(sequence_mean, of_first=1 / 6, of_second=1 / 2)
    assert_weights(constant, of_first=1 / 21, of_second=1 / 21)


def assert_weights(weights: Tensor, of_first: float, of_second: float) -> None:
    """Of three tokens, of one, and of none."""
    expected = [[of_first] * 3 + [0.0], [of_second, 0.0, 0.0, 0.0], [0.0] * 4]
    torch.testing.assert_close(weights, torch.tensor(expected))


# ---------------------------------------------------------------- what is logged
@pytest.mark.parametrize(
    "log_ratio, kl",
    [
        (1e-5, math.expm1(1e-5) - 1e-5),
        (1e-3, math.expm1(1e-3) - 1e-3),
        (100.0, math.expm1(20) - 20),
        (-100.0, math.expm1(-20) + 20),
    ],
)
def test_a_small_kl_is_not_lost_to_cancellation_and_a_large_one_is_finite(log_ratio, kl):
    """In float32 r - 1 - log r would be -7e-10 where it is 5e-11."""
    ones = torch.ones(1, 8)
    metrics = bapo.diagnostics(log_ratio * ones, torch.ones(1), ones, (0.8, 1.2), ones)
    assert metrics["kl"].item() == pytest.approx(kl, rel=0.05)


def entropy_of(logits: Tensor) -> Tensor:
    return torch.special.entr(logits.softmax(-1)).sum()


@pytest.mark.parametrize("low, high", [(0.8, 1.2), (0.5, 3.0), (0.99, 1.01), (1.05, 3.0)])
def test_the_entropy_rule_predicts_the_change_with_an_error_that_shrinks_quadratically(low, high):
    """A state is a softmax over six tokens, whose logits move by eta A X, as Eq. 6 has it.

    Each token is drawn as often as the rollout policy has it drawn on the mean.
    """
    rng = random.Random(0)
    errors = {1e-2: 0.0, 1e-3: 0.0}  # by the step size eta
    for _ in range(30):
        counts = matrix(1, 6, lambda: rng.randint(1, 4))[0]
        rollout = (counts / counts.sum()).double().log()
        logits = rollout + 0.4 * matrix(1, 6, lambda: rng.gauss(0, 1))[0]
        advantages = matrix(1, 6, lambda: rng.gauss(0, 1))[0]
        policy = logits.log_softmax(-1)
        drawn = torch.arange(6).repeat_interleave(counts)[None]
        predicted = -bapo.predicted_entropy_fall(
            (policy - rollout)[drawn],
            policy[drawn],
            entropy_of(logits).expand(drawn.shape),
            advantages[drawn],
            torch.ones(drawn.shape),
            (low, high),
        )
        ratio = (policy - rollout).exp()
        has_gradient = torch.where(advantages > 0, ratio < high, ratio > low)  # Eq. 7
        move = advantages * has_gradient
        for eta in errors:
            change = entropy_of(logits + eta * move) - entropy_of(logits)
            errors[eta] += (change - eta * predicted).abs().item()
    # A wrong prediction's would shrink by 10, as the changes do.
    assert errors[1e-3] / errors[1e-2] == pytest.approx(1e-2, rel=0.3)


# ---------------------------------------------------------------- refusals
def test_a_search_that_makes_no_sense_is_refused():
    for name, options in [
        ("rho0", {"rho0": 1.0}),
        ("rho0", {"rho0": -0.1}),
        ("rho0", {"rho0": math.nan}),
        ("low_start", {"low_start": 0.95}),
        ("low_max", {"low_start": math.nan}),
        ("low_start", {"low_start": -0.1}),
        ("high_start", {"high_start": 3.5}),
        ("high_start", {"high_max": math.inf}),
        ("low_step", {"low_step": 0.0}),
        ("high_step", {"high_step": -0.05}),
        ("low_step", {"low_step": 0.07}),
        ("high_step", {"high_step": 0.07}),
        ("high_step", {"high_step": 1e-7}),  # eight million bounds
        ("low_step", {"low_step": 1e-8}),
        ("low_max", {"low_max": 1.1, "low_step": 0.06}),
        ("low_max", {"low_max": 1.0}),
        ("contribution", {"contribution": "eq8"}),
    ]:
        with pytest.raises(ValueError, match=name):
            ClipSearch(**options)
    assert len(ClipSearch(high_max=2.1, high_step=1e-3).highs()) == 901


ZEROS = torch.zeros(2, 3)
GOOD = Update(ZEROS, ZEROS, torch.ones(2), torch.ones(2, 3))._asdict() | {"search": bapo.GRPO}


def test_an_argument_of_a_wrong_shape_is_named():
    bapo_loss(**GOOD)
    for name, value in [
        ("log_probs", torch.zeros(3)),
        ("rollout_log_probs", torch.zeros(2, 2)),
        ("advantages", torch.zeros(3)),
        ("mask", torch.ones(2)),
        ("weights", torch.ones(2)),
    ]:
        with pytest.raises(ValueError, match=f"^{name}"):
            bapo_loss(**(GOOD | {name: value}))
    for name, function, arguments in [
        ("weights", contribution_masses, (ZEROS, torch.ones(2), torch.ones(2), bapo.GRPO)),
        ("group_size", bapo.group_relative_advantages, (torch.zeros(7), 4)),
        ("rewards", bapo.group_relative_advantages, (torch.zeros(2, 2), 2)),
        ("mask", token_weights, (torch.ones(3),)),
    ]:
        with pytest.raises(ValueError, match=name):
            function(*arguments)
    with pytest.raises(RuntimeError):  # torch's own
        search_clip_bounds(torch.zeros(5), bapo.PAPER_MAIN)


@pytest.mark.parametrize(
    "low, high",
    [(0.2, 0.28), (1.2, 0.8), (1.2, 1.2), (0.8, 0.99), (-0.2, 1.2), (math.nan, 1.2)],
)
def test_epsilons_and_swapped_bounds_are_refused_wherever_bounds_are_given(low, high):
    with pytest.raises(ValueError, match="low"):
        ClipSearch.fixed(low, high)
    with pytest.raises(ValueError, match="low"):
        bapo_loss(**GOOD, bounds=(low, high))
    with pytest.raises(ValueError, match="low"):
        bapo.token_losses(ZEROS, torch.ones(2), low, high)
    with pytest.raises(ValueError, match="high"):
        bapo_loss(**GOOD, bounds=(0.8, math.nan))


def test_a_copy_of_the_file_alone_needs_torch_and_nothing_else(tmp_path):
    shutil.copy(bapo.__file__, tmp_path)
    (tmp_path / "use.py").write_text(
        "import sys, torch\n"
        "before = set(sys.modules)\n"
        "import bapo\n"
        "added = {name.partition('.')[0] for name in set(sys.modules) - before}\n"
        "print(*(added - set(sys.stdlib_module_names) - {'torch'}), bapo.__file__)\n"
    )
    command = [sys.executable, "-E", "use.py"]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["bapo", str(Path(tmp_path, "bapo.py"))]
