"""integrations/self_test.py finds the mistakes that it names when they are planted in a loop."""

import pytest
import torch

from bapo import ClipSearch, bapo_loss, group_relative_advantages
from integrations.self_test import find_mistakes

SEARCH = {"rho0": 0.6}


def a_step(**planted) -> dict:
    """The second update of a loop on 16 responses, right but for what is planted."""
    generator = torch.Generator().manual_seed(0)

    def noise() -> torch.Tensor:
        return torch.randn(16, 12, generator=generator)

    lengths = torch.randint(2, 12, (16,), generator=generator)
    rewards = (lengths < 7).float().roll(1)
    rollout = -noise().abs()
    step = {
        "rewards": rewards,
        "lengths": lengths,
        "group_size": 8,
        "mask": torch.arange(12) < lengths[:, None],
        "rollout_log_probs": rollout,
        "first_log_probs": rollout + 1e-4 * noise(),
        "log_probs": rollout + 0.2 * noise(),
        "sampler_log_probs": rollout + 0.01 * noise(),
        "advantages": group_relative_advantages(rewards, 8),
        "search": SEARCH,
    }
    step |= planted
    loss, metrics = bapo_loss(*inputs(step), ClipSearch(**SEARCH))
    return step | {"loss": loss, "low": metrics["low"], "high": metrics["high"]} | planted


def inputs(step: dict, rows=slice(None)) -> list:
    names = ("log_probs", "rollout_log_probs", "advantages", "mask")
    return [step[name][rows] for name in names]


def test_a_right_loop_passes_and_its_bounds_have_moved():
    step = a_step()
    assert find_mistakes(step) == []
    assert step["high"] > 1.3


def test_searching_in_each_micro_batch_is_found():
    step = a_step()
    search = ClipSearch(**SEARCH)
    first, metrics = bapo_loss(*inputs(step, slice(8)), search)
    second, _ = bapo_loss(*inputs(step, slice(8, 16)), search)
    planted = {"loss": (first + second) / 2, "low": metrics["low"], "high": metrics["high"]}
    (found,) = find_mistakes(a_step(**planted))
    assert found.startswith("3.")


@pytest.mark.parametrize(
    "number, plant",
    [
        ("1.", lambda step: {"rollout_log_probs": step["log_probs"]}),  # log_probs.detach()
        ("2.", lambda step: {"first_log_probs": step["rollout_log_probs"] / 0.7}),  # temperature
        ("2.", lambda step: {"sampler_log_probs": step["rollout_log_probs"] / 0.7}),
        ("4.", lambda step: {"mask": torch.ones(16, 12, dtype=torch.bool)}),  # padding
        ("4.", lambda step: {"mask": step["mask"] & step["mask"].roll(-1, 1)}),  # without the EOS
        ("4.", lambda step: {"advantages": step["advantages"].flip(0)}),  # another order
    ],
)
def test_a_planted_mistake_is_found(number, plant):
    assert any(sentence.startswith(number) for sentence in find_mistakes(a_step(**plant(a_step()))))
