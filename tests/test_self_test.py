"""integrations/self_test.py finds the mistakes that it names when they are planted in a loop."""

import pytest
import torch

from bapo import ClipSearch, bapo_loss, group_relative_advantages
from integrations.self_test import find_mistakes

MASK = torch.arange(12) < torch.tensor([2, 11, 5, 8, 3, 9, 4, 7])[:, None]
REWARDS = torch.tensor([1.0, 0.0, 1.0, 0.0, 1.0, 0.0, 0.0, 1.0])
LOG_PROBS = -torch.randn(8, 12, generator=torch.Generator().manual_seed(0)).abs()


def right_step() -> dict:
    """The second update of a right loop on two groups of four responses, one in a micro-batch."""
    inputs = {
        "log_probs": 1.2 * LOG_PROBS,
        "rollout_log_probs": LOG_PROBS,
        "advantages": group_relative_advantages(REWARDS, 4),
        "mask": MASK,
    }
    loss, metrics = bapo_loss(**inputs, search=ClipSearch(0.6))
    return inputs | {
        "first_log_probs": LOG_PROBS + 1e-4,
        "sampler_log_probs": LOG_PROBS + 0.01,
        "lengths": MASK.sum(1),
        "rewards": REWARDS,
        "group_size": 4,
        "search": {"rho0": 0.6},
        "loss": loss,
        "low": metrics["low"].expand(2),  # of two micro-batches
        "high": metrics["high"].expand(2),
    }


@pytest.mark.parametrize(
    "number, planted",
    [
        ("1.", {"rollout_log_probs": 1.2 * LOG_PROBS}),  # log_probs.detach()
        ("2.", {"first_log_probs": LOG_PROBS / 0.7}),  # temperature
        ("2.", {"sampler_log_probs": LOG_PROBS / 0.7}),
        ("3.", {"loss": torch.tensor(0.2567)}),  # the mean of two micro-batches' losses
        ("3.", {"high": torch.tensor([1.2, 3.0])}),  # a search in each of them
        ("4.", {"mask": torch.ones(8, 12)}),  # padding
        ("4.", {"mask": MASK & MASK.roll(-1, 1)}),  # without the EOS
        ("4.", {"rewards": REWARDS.flip(0)}),  # another order
    ],
)
def test_a_planted_mistake_is_found(number, planted):
    step = right_step()
    assert find_mistakes(**step) == []
    assert any(mistake.startswith(number) for mistake in find_mistakes(**step | planted))
