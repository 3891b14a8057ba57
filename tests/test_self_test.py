"""integrations/self_test.py finds the mistakes that it names when they are planted in a loop."""

import pytest
import torch

from bapo import ClipSearch, bapo_loss, group_relative_advantages
from integrations.self_test import find_mistakes

SEARCH = {"rho0": 0.6}


def right_step() -> dict:
    """The second update of a right loop on 16 responses. First come the inputs of bapo_loss."""
    torch.manual_seed(0)
    lengths = torch.randint(2, 12, (16,))
    rewards = (lengths < 7).float().roll(1)
    rollout = -torch.randn(16, 12).abs()
    step = {
        "log_probs": rollout + 0.2 * torch.randn(16, 12),
        "rollout_log_probs": rollout,
        "advantages": group_relative_advantages(rewards, 8),
        "mask": torch.arange(12) < lengths[:, None],
        "first_log_probs": rollout + 1e-4,
        "sampler_log_probs": rollout + 0.01,
        "rewards": rewards,
        "lengths": lengths,
        "group_size": 8,
        "search": SEARCH,
    }
    loss, metrics = loss_of(step, slice(16))
    return step | {"loss": loss, "low": metrics["low"], "high": metrics["high"]}


def loss_of(step: dict, rows: slice) -> tuple:
    inputs = [tensor[rows] for tensor in list(step.values())[:4]]
    return bapo_loss(*inputs, ClipSearch(**SEARCH))


def test_a_right_loop_passes_and_its_bounds_have_moved():
    step = right_step()
    assert find_mistakes(**step) == []
    assert step["high"] > 1.3


def searched_in_each_micro_batch(step: dict) -> dict:
    first, _ = loss_of(step, slice(8))
    second, _ = loss_of(step, slice(8, 16))
    return {"loss": (first + second) / 2}


@pytest.mark.parametrize(
    "number, plant",
    [
        ("1.", lambda step: {"rollout_log_probs": step["log_probs"]}),  # log_probs.detach()
        ("2.", lambda step: {"first_log_probs": step["rollout_log_probs"] / 0.7}),  # temperature
        ("2.", lambda step: {"sampler_log_probs": step["rollout_log_probs"] / 0.7}),
        ("3.", searched_in_each_micro_batch),
        ("3.", lambda step: {"high": step["high"] + 0.05}),
        ("4.", lambda step: {"mask": torch.ones(16, 12, dtype=torch.bool)}),  # padding
        ("4.", lambda step: {"mask": step["mask"] & step["mask"].roll(-1, 1)}),  # without the EOS
        ("4.", lambda step: {"advantages": step["advantages"].flip(0)}),  # another order
    ],
)
def test_a_planted_mistake_is_found(number, plant):
    step = right_step()
    found = find_mistakes(**step | plant(step))
    assert any(sentence.startswith(number) for sentence in found)
