"""Tests of bapo.py, most of them against make_vectors.py.

make_vectors.py computes the paper's formulas token by token in Python's floats.
"""

import math
import os
import random
import re
import sys
import warnings
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import check_port
import make_vectors
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from torch.testing import assert_close

import bapo
from bapo import ClipSearch, bapo_loss, contribution_masses, token_weights


class Update(NamedTuple):
    """The first arguments of bapo_loss."""

    log_probs: Tensor
    rollout_log_probs: Tensor
    advantages: Tensor
    mask: Tensor


def random_update(seed: int, rows=14, width=12, spread=0.4, mean=0.0) -> Update:
    """Return responses of unequal lengths, with NaN outside the mask.

    spread is that of the log-ratios, mean that of the advantages.
    """
    torch.manual_seed(seed)
    mask = torch.arange(width) < torch.randint(width + 1, (rows, 1))
    rollout = torch.where(mask, -3 * torch.rand(rows, width), math.nan)
    log_probs = rollout + spread * torch.randn(rows, width)
    advantages = mean + torch.randn(rows, width)
    return Update(log_probs, rollout, advantages, mask)


# ---------------------------------------------------------------- an update
RANGES = [  # of the lower and of the upper bound
    ([0.6, 0.9, 0.02], [1.2, 3.0, 0.05]),
    ([0.9, 0.9, 0.02], [1.0, 1.5, 0.1]),
    ([0.0, 0.96, 0.12], [1.2, 1.2, 0.05]),
    ([1.02, 1.02, 0.02], [1.2, 3.0, 0.2]),
]


def random_case(rng: random.Random) -> dict:
    """Return an update, sometimes of one token, in the form that make_vectors.py takes."""
    low, high = rng.choice(RANGES)
    update = random_update(
        seed=rng.randrange(10**6),
        rows=rng.choice([1, 2, 5]),
        width=rng.choice([1, 4, 8]),
        spread=rng.choice([0.0, 0.1, 0.5, 1.0]),
        mean=rng.choice([0, 0, 0, 0, -9, 9]),  # with -9 and 9 all advantages have one sign
    )
    case = {name: tensor.tolist() for name, tensor in update._asdict().items()}
    if rng.random() < 0.5:
        weights = update.mask * torch.rand(update.mask.shape) / update.mask.numel()
        case["weights"] = weights.tolist()
    start = make_vectors.share(make_vectors.response_tokens(case), low[0], high[0])
    # Near the start, or hardly any search would stop inside the ranges. The start may be NaN.
    rho0 = min(0.99, start + rng.uniform(-0.01, 0.03))
    case["settings"] = {"rho0": max(0.0, rho0), "low": low, "high": high}
    return case


def literal_metrics(case: dict, gradient: Tensor) -> dict:
    """Return what the docstring of bapo.diagnostics promises."""
    tokens = make_vectors.response_tokens(case)
    low, high, *_ = found = make_vectors.search(tokens, case["settings"])
    count = max(len(tokens), 1)
    return found._asdict() | {
        # A token with A > 0 has a gradient below 0.
        "gradient_share": gradient.clamp(max=0).sum() / -gradient.abs().sum(),
        "clip_fraction_high": sum(make_vectors.clips(token, 0, high) for token in tokens) / count,
        "clip_fraction_low": sum(make_vectors.clips(token, low, 1e9) for token in tokens) / count,
        "kl": sum(token.ratio - 1 - token.log_ratio for token in tokens) / count,
    }


def test_every_number_of_an_update_equals_the_literal_algorithm():
    rng = random.Random("bapo")
    for _ in range(300):
        case = random_case(rng)
        expected = make_vectors.expected(case)
        expected |= literal_metrics(case, torch.tensor(expected["gradient"]))
        if "weights" in case:
            # A token of weight 0 is as one outside the mask.
            case["mask"] = [[True] * len(row) for row in case["mask"]]
        assert check_port.differences(expected, check_port.bapo_adapter(case)) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_log_probs_are_subtracted_in_float32_and_nothing_else_gets_a_gradient(dtype):
    """With advantages that are not detached, a critic would be trained."""
    log_probs, rollout, advantages, mask = random_update(1)
    inputs = log_probs.bfloat16(), rollout.to(dtype), advantages
    leaves = [tensor.requires_grad_() for tensor in inputs]
    loss, metrics = bapo_loss(*leaves, mask, bapo.PAPER_MAIN)
    loss.backward()
    assert [leaf.grad is None for leaf in leaves] == [False, True, True]
    assert not any(value.requires_grad for value in metrics.values())
    expected, _ = bapo_loss(*[leaf.float() for leaf in leaves], mask, bapo.PAPER_MAIN)
    assert loss == expected


# ---------------------------------------------------------------- the search
def test_presets_are_as_published():
    """The paper gives them in sections 5.1 and A."""
    assert bapo.PAPER_MAIN == ClipSearch(0.4, 0.6, 0.9, 0.02, 1.2, 3.0, 0.05)
    assert bapo.PAPER_APP_A == ClipSearch(0.45, 0.8, 0.9, 0.02, 1.2, 2.0, 0.05)


def test_the_last_step_of_a_range_may_be_shorter():
    assert ClipSearch(low_step=0.2).lows() == pytest.approx([0.6, 0.8, 0.9])
    assert ClipSearch(low_step=5).lows() == [0.6, 0.9]


def test_masses_are_summed_in_float64():
    advantages = torch.tensor([[2.0**24, 1.0]])
    ones = torch.ones(1, 2)
    masses = contribution_masses(torch.zeros(1, 2), advantages, ones, bapo.GRPO)
    assert masses[0] == 2**24 + 1  # which float32 cannot hold


def test_bounds_stay_at_their_start_if_a_sum_is_infinite():
    masses = torch.tensor([1.0] * 37 + [math.inf] * 16)  # at 37 upper and 16 lower bounds
    bounds = bapo.search_clip_bounds(masses, bapo.PAPER_MAIN)
    assert bounds[:2] == (0.6, 1.2) and math.isnan(bounds.rho)


# ---------------------------------------------------------------- splitting an update
WHOLE = random_update(2)
STOPS_INSIDE = ClipSearch(rho0=0.54, low_start=0.8)  # at an upper bound between 1.2 and 3


def rows_of(update: Update, rows) -> Update:
    return Update(*[tensor[rows] for tensor in update])


class Shift(torch.nn.Module):
    """A policy that adds a parameter [T] to log-probs. It has a buffer, which DDP hands around."""

    def __init__(self):
        super().__init__()
        self.shift = torch.nn.Parameter(torch.zeros(12))
        self.register_buffer("zero", torch.zeros(1))

    def forward(self, log_probs: Tensor) -> Tensor:
        return log_probs + self.shift + self.zero


def step_by_loss(update: Update) -> tuple[Tensor, dict]:
    """Return the gradient [T] with respect to `shift` and the metrics."""
    policy = Shift()
    loss, metrics = bapo_loss(policy(update.log_probs), *update[1:], STOPS_INSIDE)
    loss.backward()
    return policy.shift.grad, metrics | {"loss": loss.detach()}


def step_by_backward(policy, update: Update, micro_batches, **options) -> tuple[Tensor, dict]:
    """Return what step_by_loss does."""
    policy.zero_grad()

    def log_probs_of(rows: Tensor) -> Tensor:
        return policy(update.log_probs[rows])

    inputs = log_probs_of, micro_batches, *update[1:], STOPS_INSIDE
    metrics = bapo.backward(*inputs, **options)
    (shift,) = policy.parameters()
    return shift.grad, metrics


@pytest.mark.parametrize("ends", [[], [6], [1, 6, 8, 9, 11, 13]])
def test_backward_makes_the_same_step_of_all_micro_batches(ends):
    """Another loss gets all rows, and another library's `backward` scalars, which it doubles."""
    have_graph = []
    policy = Shift()
    policy.register_forward_hook(lambda *_: have_graph.append(torch.is_grad_enabled()))

    def loss_fn(log_probs: Tensor, *inputs, **options):
        assert len(log_probs) == 14
        return bapo_loss(log_probs, *inputs, **options)

    def run_backward(scalar: Tensor) -> None:
        assert scalar.dim() == 0
        (2 * scalar).backward()

    micro_batches = torch.arange(14).flip(0).tensor_split(ends)
    options = {"loss_fn": loss_fn, "run_backward": run_backward}
    step = step_by_backward(policy, WHOLE, micro_batches, **options)
    gradient, metrics = step_by_loss(WHOLE)
    assert_close(step, (2 * gradient, metrics))
    assert 1.2 < metrics["high"] < 3
    # The graphs of several would not fit into memory together.
    count = len(micro_batches)
    assert have_graph == ([True] if count == 1 else [False] * count + [True] * count)


def test_losses_of_micro_batches_add_up_with_weights_and_bounds_of_all():
    """This is what the docstring of bapo_loss describes."""
    log_probs, rollout, advantages, mask = WHOLE
    weights = token_weights(mask)
    masses = contribution_masses(log_probs - rollout, advantages, weights, STOPS_INSIDE)
    bounds = bapo.search_clip_bounds(masses, STOPS_INSIDE)
    loss = 0.0
    for rows in torch.arange(14).split(4):
        options = {"weights": weights[rows], "bounds": bounds[:2]}
        loss += bapo_loss(*rows_of(WHOLE, rows), bapo.GRPO, **options)[0]
    assert_close(loss, bapo_loss(*WHOLE, STOPS_INSIDE)[0])


def test_ranks_wait_in_the_last_micro_batch_alone_even_if_it_is_an_earlier_one_again():
    """A rank without responses may pass one empty row several times."""
    entered = []

    @contextmanager
    def no_sync():
        entered.append(True)
        yield

    rows = torch.arange(7)
    step_by_backward(Shift(), WHOLE, [rows, rows, rows], no_sync=no_sync)
    assert len(entered) == 2


def of_one_rank(rank: int, store: str) -> None:
    """Make the step in one of two processes, which holds 5 or 9 of the 14 responses.

    They have one and four micro-batches. The second step is made as the first one, because DDP
    arranges its buckets anew in between.
    """
    torch.set_num_threads(1)
    limit = timedelta(minutes=2)  # a rank that waits for ever fails
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2, timeout=limit)
    groups = [dist.new_group([0]), dist.new_group([1])]
    rows = torch.arange(14).tensor_split([5])[rank]
    part = rows_of(WHOLE, rows)
    micro_batches = torch.arange(len(rows)).tensor_split(1 if rank == 0 else 4)
    weights = token_weights(part.mask)
    for options in ({"search": bapo.GRPO}, {"search": STOPS_INSIDE, "weights": weights}):
        with pytest.warns(match="on this rank alone"):
            bapo_loss(*part, **options)
    alone, _ = step_by_loss(part)
    expected, metrics = step_by_loss(WHOLE)

    warnings.filterwarnings("error", "bapo_loss counts")
    bapo_loss(*part, bapo.GRPO, weights=weights)
    gradient, _ = step_by_backward(Shift(), part, micro_batches, process_group=groups[rank])
    assert_close(gradient, alone)
    policy = torch.nn.parallel.DistributedDataParallel(Shift())
    options = {"process_group": dist.group.WORLD, "no_sync": policy.no_sync}
    for _ in range(2):
        gradient, of_rank = step_by_backward(policy, part, micro_batches, **options)
        assert_close(gradient, expected)
        dist.all_reduce(of_rank["loss"])
        assert_close(of_rank["loss"], metrics["loss"])
    dist.barrier()
    os._exit(0)  # a normal exit may hang, or abort, in the threads of gloo


@pytest.mark.skipif(not dist.is_gloo_available(), reason="needs torch.distributed with gloo")
def test_two_ranks_make_the_step_of_one_process(tmp_path):
    """This test fails if tokens or masses are not summed over both ranks, or over another group.

    It also fails if one rank waits for the other in a micro-batch that the other does not have, or
    if the number of ranks is left out. A search or a count of tokens on one rank alone is a
    mistake, which a warning names, with GRPO as with BAPO.
    """
    mp.spawn(of_one_rank, (f"file://{tmp_path}/store",), nprocs=2)


# ---------------------------------------------------------------- advantages and weights
@pytest.mark.parametrize(
    "rewards, group_size, expected",
    [
        ([1, 0, 0, 0, 3, 3, 3, 3], 4, [1.5, -0.5, -0.5, -0.5, 0, 0, 0, 0]),  # (1 - 1 / 4) / 0.5
        ([0.001, 0.00101], 2, [-0.6195, 0.6195]),  # 5e-6 / (5e-6 * sqrt(2) + 1e-6)
        ([0.0, 3e-8], 2, [0, 0]),  # 0.1 + 0.2 - 0.3 in float32
    ],
)
def test_advantages_are_relative_to_the_group(rewards, group_size, expected):
    advantages = bapo.group_relative_advantages(torch.tensor(rewards), group_size)
    assert_close(advantages, torch.tensor(expected, dtype=torch.float32), rtol=1e-4, atol=0)


def test_rho_at_ratio_1_is_the_rho_that_the_first_update_starts_with():
    update = random_update(0)
    rewards = update.advantages[:, 0]
    advantages = bapo.group_relative_advantages(rewards, 7)
    inputs = update.rollout_log_probs, update.rollout_log_probs, advantages, update.mask
    _, metrics = bapo_loss(*inputs, bapo.PAPER_MAIN)
    assert_close(bapo.rho_at_ratio_1(rewards, update.mask.sum(1), 7), metrics["rho_start"])
    assert bapo.rho_at_ratio_1(torch.ones(8), torch.ones(8), 8).isnan()


def test_the_sequence_mean_that_the_docstring_of_token_weights_names():
    mask = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0], [0, 0, 0, 0]])
    formula = re.search("mask / tokens.*(?=  # sequence-mean)", token_weights.__doc__).group()
    weights = eval(formula, {"mask": mask, "tokens": mask.sum(1, keepdim=True)})
    assert weights.sum(1).tolist() == [0.5, 0.5, 0]


# ---------------------------------------------------------------- what is logged
@pytest.mark.parametrize("log_ratio, kl", [(1e-5, 5e-11), (math.inf, 4.85e8), (-math.inf, 19)])
def test_a_small_kl_is_not_lost_to_cancellation_and_a_large_one_is_finite(log_ratio, kl):
    """In float32 r - 1 - log r would be -7e-10 where it is 5e-11."""
    ones = torch.ones(1, 8)
    metrics = bapo.diagnostics(log_ratio * ones, ones, ones, (0.8, 1.2))
    assert metrics["kl"].item() == pytest.approx(kl, rel=0.05)


# ---------------------------------------------------------------- refusals
@pytest.mark.parametrize(
    "options",
    [
        {"rho0": 1.0},
        {"low_start": 0.95},
        {"low_step": 0.0},
        {"low_step": math.inf},
        {"high_max": math.inf},
        {"low_max": 1.2},  # not below high_start
        {"low_start": 0.2, "low_max": 0.2, "high_start": 0.28},  # epsilons
    ],
)
def test_a_search_that_makes_no_sense_is_refused(options):
    with pytest.raises(ValueError, match="not epsilons"):
        ClipSearch(**options)


def test_a_wrong_argument_is_named():
    good = WHOLE._asdict() | {"search": bapo.GRPO}
    for name in ("log_probs", "rollout_log_probs", "advantages", "mask", "weights"):
        with pytest.raises(ValueError, match=name):
            bapo_loss(**good | {name: torch.ones(14, 1)})
    with pytest.raises(ValueError, match="same shape"):
        bapo_loss(*rows_of(WHOLE, 0), bapo.GRPO)  # [T]
    with pytest.raises(ValueError, match="bounds are ratios"):
        bapo_loss(**good, bounds=(0.2, 0.28))
    for shape, group_size in [((7,), 4), ((2, 2), 2), ((4,), 1)]:
        with pytest.raises(ValueError, match="group_size"):
            bapo.group_relative_advantages(torch.zeros(shape), group_size)


def test_the_file_needs_torch_and_nothing_else():
    text = Path(bapo.__file__).read_text()
    imported = set(re.findall(r"^(?:from|import) (\w+)", text, re.MULTILINE))
    assert imported - sys.stdlib_module_names == {"torch"}
