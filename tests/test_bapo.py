"""Tests of bapo.py, most of them against literal_bapo.py and the vectors.

literal_bapo.py computes the paper's formulas token by token in Python's floats.
"""

import math
import os
import random
import warnings
from datetime import timedelta
from typing import NamedTuple

import check_port
import literal_bapo
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


def random_update(seed: int, rows=14, width=12, spread=0.4) -> Update:
    """Return responses of unequal lengths, with NaN outside the mask.

    spread is that of the log-ratios.
    """
    torch.manual_seed(seed)
    mask = torch.arange(width) < torch.randint(width + 1, (rows, 1))
    rollout = torch.where(mask, -3 * torch.rand(rows, width), math.nan)
    log_probs = rollout + spread * torch.randn(rows, width)
    return Update(log_probs, rollout, torch.randn(rows, width), mask)


# ---------------------------------------------------------------- an update
RANGES = [  # of the lower and of the upper bound
    ([0.6, 0.9, 0.02], [1.2, 3.0, 0.05]),
    ([0.0, 0.96, 0.12], [1.2, 1.2, 0.05]),
    ([1.02, 1.02, 0.02], [1.2, 3.0, 0.2]),
]


def random_case(rng: random.Random) -> dict:
    """Return an update, sometimes of one token, in the form that literal_bapo.py takes."""
    low, high = rng.choice(RANGES)
    update = random_update(
        seed=rng.randrange(10**6),
        rows=rng.choice([1, 2, 5]),
        width=rng.choice([1, 4, 8]),
        spread=rng.choice([0.0, 0.1, 0.5, 1.0]),
    )
    case = {name: tensor.tolist() for name, tensor in update._asdict().items()}
    if rng.random() < 0.5:
        weights = update.mask * torch.rand(update.mask.shape) / update.mask.numel()
        case["weights"] = weights.tolist()
    start = literal_bapo.share(literal_bapo.response_tokens(case), low[0], high[0])
    # Near the start, or hardly any search would stop inside the ranges. The start may be NaN.
    rho0 = min(0.99, start + rng.uniform(-0.01, 0.03))
    case["settings"] = {"rho0": max(0.0, rho0), "low": low, "high": high}
    return case


def literal_metrics(case: dict, gradient: Tensor) -> dict:
    """Return what the docstring of bapo.diagnostics promises."""
    tokens = literal_bapo.response_tokens(case)
    low, high, *_ = found = literal_bapo.search(tokens, case["settings"])
    count = max(len(tokens), 1)
    return found._asdict() | {
        # A token with A > 0 has a gradient below 0.
        "gradient_share": gradient.clamp(max=0).sum() / -gradient.abs().sum(),
        "clip_fraction_high": sum(literal_bapo.clips(token, 0, high) for token in tokens) / count,
        "clip_fraction_low": sum(literal_bapo.clips(token, low, 1e9) for token in tokens) / count,
        "kl": sum(token.ratio - 1 - token.log_ratio for token in tokens) / count,
    }


def test_every_number_of_an_update_equals_the_literal_algorithm():
    rng = random.Random("bapo")
    for _ in range(300):
        case = random_case(rng)
        expected = literal_bapo.expected(case)
        expected |= literal_metrics(case, torch.tensor(expected["gradient"]))
        if "weights" in case:
            # A token of weight 0 is as one outside the mask.
            case["mask"] = [[True] * len(row) for row in case["mask"]]
        assert check_port.differences(expected, check_port.bapo_adapter(case)) == []


def test_the_vectors_expect_what_the_literal_algorithm_finds():
    for case in check_port.read_cases():
        assert check_port.differences(case["expected"], literal_bapo.expected(case)) == []


def always_a_half(case):
    return literal_bapo.expected(case) | {"rho": 0.5}


def test_bapo_agrees_with_the_vectors_and_a_wrong_port_is_told_what_it_did_wrong(capsys):
    assert check_port.main(f"{check_port.__file__}:bapo_adapter") == 0
    assert "differs" not in capsys.readouterr().out
    assert check_port.main(f"{__file__}:always_a_half") == 1
    assert "P / (P + N), 0.4 here" in capsys.readouterr().out


def test_log_probs_are_subtracted_in_float32_and_nothing_else_gets_a_gradient():
    """With advantages that are not detached, a critic would be trained."""
    log_probs, rollout, advantages, mask = random_update(1)
    inputs = log_probs.bfloat16(), rollout.bfloat16(), advantages
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


def test_masses_are_summed_in_float64():
    advantages = torch.tensor([[2.0**24, 1.0]])
    masses = contribution_masses(torch.zeros(1, 2), advantages, torch.ones(1, 2), bapo.GRPO)
    assert masses[0] == 2**24 + 1  # which float32 cannot hold


def test_bounds_stay_at_their_start_if_a_sum_is_infinite():
    masses = torch.tensor([1.0] * 37 + [math.inf] * 16)  # at 37 upper and 16 lower bounds
    low, high, rho, *_ = bapo.search_clip_bounds(masses, bapo.PAPER_MAIN)
    assert (low, high) == (0.6, 1.2) and math.isnan(rho)


# ---------------------------------------------------------------- splitting an update
WHOLE = random_update(2)
STOPS_INSIDE = ClipSearch(rho0=0.54, low_start=0.8)  # at an upper bound between 1.2 and 3


class Policy(torch.nn.Module):
    """The log-probs of WHOLE as parameters [B, T]. It has a buffer, which DDP hands around."""

    def __init__(self):
        super().__init__()
        self.log_probs = torch.nn.Parameter(WHOLE.log_probs.clone())
        self.register_buffer("zero", torch.zeros(1))

    def forward(self, rows: Tensor) -> Tensor:
        return self.log_probs[rows] + self.zero


def step_by_loss() -> tuple[Tensor, dict]:
    """Return the gradient [B, T] and the metrics of the whole update."""
    log_probs = WHOLE.log_probs.clone().requires_grad_()
    loss, metrics = bapo_loss(log_probs, *WHOLE[1:], STOPS_INSIDE)
    loss.backward()
    return log_probs.grad, metrics | {"loss": loss.detach()}


def step_by_backward(policy, micro_batches, **options) -> tuple[Tensor, dict]:
    """Return the gradient [B, T] and the metrics of the rows in micro_batches."""
    policy.zero_grad()
    metrics = bapo.backward(policy, micro_batches, *WHOLE[1:], STOPS_INSIDE, **options)
    return next(policy.parameters()).grad, metrics


@pytest.mark.parametrize("ends", [[], [6], [1, 6, 8, 9, 11, 13]])
def test_backward_makes_the_same_step_of_all_micro_batches(ends):
    """Another library's `backward` gets scalars, which it doubles here."""
    have_graph = []
    policy = Policy()
    policy.register_forward_hook(lambda *_: have_graph.append(torch.is_grad_enabled()))
    micro_batches = torch.arange(14).flip(0).tensor_split(ends)
    step = step_by_backward(policy, micro_batches, run_backward=lambda part: (2 * part).backward())
    gradient, metrics = step_by_loss()
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
        inputs = [tensor[rows] for tensor in WHOLE]
        loss += bapo_loss(*inputs, bapo.GRPO, weights=weights[rows], bounds=bounds)[0]
    assert_close(loss, bapo_loss(*WHOLE, STOPS_INSIDE)[0])


def of_one_rank(rank: int, store: str) -> None:
    """Make the step in one of two processes, which holds 5 or 9 of the 14 responses.

    They have one and three micro-batches. The second step is made as the first one, because DDP
    arranges its buckets anew in between.
    """
    torch.set_num_threads(1)
    limit = timedelta(minutes=2)  # a rank that waits for ever fails
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2, timeout=limit)
    expected, _ = step_by_loss()
    micro_batches = [torch.arange(5).split(5), torch.arange(5, 14).split(3)][rank]
    with pytest.warns(match="on this rank alone"):
        step_by_backward(Policy(), micro_batches)
    warnings.filterwarnings("error", "bapo_loss counts")
    policy = torch.nn.parallel.DistributedDataParallel(Policy())
    options = {"process_group": dist.group.WORLD, "no_sync": policy.no_sync}
    for _ in range(2):
        gradient, _ = step_by_backward(policy, micro_batches, **options)
        assert_close(gradient, expected)
    dist.barrier()
    os._exit(0)  # a normal exit may hang, or abort, in the threads of gloo


def test_two_ranks_make_the_step_of_one_process(tmp_path):
    """This test fails if tokens or masses are not summed over both ranks.

    It also fails if one rank waits for the other in a micro-batch that the other does not have, or
    if the number of ranks is left out. A search on one rank alone is a mistake, which a warning
    names.
    """
    mp.spawn(of_one_rank, (f"file://{tmp_path}/store",), nprocs=2)


# ---------------------------------------------------------------- advantages
def test_advantages_are_relative_to_the_group():
    """The second group has (R - mean) / (std + 1e-6), and the third 0.1 + 0.2 - 0.3 in float32."""
    rewards = torch.tensor([1.0, 0.0, 0.001, 0.00101, 0.0, 3e-8])
    expected = torch.tensor([0.7071, -0.7071, -0.6195, 0.6195, 0.0, 0.0])
    assert_close(bapo.group_relative_advantages(rewards, 2), expected, rtol=1e-4, atol=0)


def test_rho_at_ratio_1_is_the_rho_that_the_first_update_starts_with():
    _, rollout, advantages, mask = random_update(0)
    rewards = advantages[:, 0]
    advantages = bapo.group_relative_advantages(rewards, 7)
    _, metrics = bapo_loss(rollout, rollout, advantages, mask, bapo.PAPER_MAIN)
    assert_close(bapo.rho_at_ratio_1(rewards, mask.sum(1), 7), metrics["rho_start"])


# ---------------------------------------------------------------- what is logged
def test_a_small_kl_is_not_lost_to_cancellation_and_a_large_one_is_finite():
    """In float32 r - 1 - log r would be -7e-10 where it is 5e-11."""
    ones = torch.ones(1, 8)
    for log_ratio, kl in [(1e-5, 5e-11), (math.inf, 4.85e8)]:
        metrics = bapo.diagnostics(log_ratio * ones, ones, ones, (0.8, 1.2))
        assert metrics["kl"].item() == pytest.approx(kl, rel=0.05)


# ---------------------------------------------------------------- refusals
@pytest.mark.parametrize(
    "options",
    [
        {"rho0": 1.0},
        {"low_start": 0.95},
        {"low_step": 0.0},
        {"high_max": math.inf},
        {"low_max": 1.2},  # not below high_start
        {"low_start": 0.2, "low_max": 0.2, "high_start": 0.28},  # epsilons
    ],
)
def test_a_search_that_makes_no_sense_is_refused(options):
    with pytest.raises(ValueError, match="not epsilons"):
        ClipSearch(**options)


def test_wrong_arguments_are_refused():
    good = WHOLE._asdict() | {"search": bapo.GRPO}
    for name in ("log_probs", "rollout_log_probs", "advantages", "mask", "weights"):
        with pytest.raises(ValueError, match="same shape"):
            bapo_loss(**good | {name: torch.ones(14, 1)})
    with pytest.raises(ValueError, match="bounds are ratios"):
        bapo_loss(**good, bounds=(0.2, 0.28))
    with pytest.raises(ValueError, match="group_size"):
        bapo.group_relative_advantages(torch.zeros(7), 4)
