"""The Entropy-Clip Rule (Eqs. 6, 7, Table 4) against the entropy of tabular states that move.

A state is a distribution over V tokens; there are n of them, all float64 [n, V].
"""

import itertools
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from bapo import unclipped


class States(NamedTuple):
    """Policies, rollout policies nearby, and advantages: [n, V] each."""

    logits: Tensor
    rollout: Tensor  # log-probs
    advantages: Tensor

    @property
    def log_policy(self) -> Tensor:
        return self.logits.log_softmax(-1)

    @property
    def ratio(self) -> Tensor:
        return (self.log_policy - self.rollout).exp()


def random_states(seed: int, states: int = 40, vocabulary: int = 7) -> States:
    generator = torch.Generator().manual_seed(seed)

    def noise() -> Tensor:
        return torch.randn(states, vocabulary, generator=generator, dtype=torch.float64)

    logits = 1.5 * noise()
    rollout = (logits + 0.4 * noise()).log_softmax(-1)
    return States(logits, rollout, noise())


def entropy_of(logits: Tensor) -> Tensor:
    return torch.special.entr(logits.softmax(-1)).sum(-1)


def mean_under(policy: Tensor, values: Tensor) -> Tensor:
    """Expectation of each state [n, 1]."""
    return (policy * values).sum(-1, keepdim=True)


def printed_move(states: States, low: float, high: float) -> Tensor:
    """Eq. 6: the logits move by A X + C, for any constant C."""
    inside = torch.where(states.advantages > 0, states.ratio < high, states.ratio > low)  # Eq. 7
    return states.advantages * inside + 0.7


def gradient_move(states: States, low: float, high: float) -> Tensor:
    """Plain gradient ascent, by autograd of Eq. 4 as a sum over the vocabulary."""
    logits = states.logits.clone().requires_grad_()
    ratio = (logits.log_softmax(-1) - states.rollout).exp()
    unclipped_value = ratio * states.advantages
    clipped_value = ratio.clamp(low, high) * states.advantages
    objective = states.rollout.exp() * torch.minimum(unclipped_value, clipped_value)
    objective.sum().backward()
    return logits.grad


MOVES = {"printed": printed_move, "gradient": gradient_move}


def entropy_slope(states: States, low: float, high: float, step: str) -> Tensor:
    """The rule: dH / d eta of each state [n], to first order.

    A small move eta * f of a state's logits changes its entropy by -eta * Cov_pi(log pi, f). With
    X = unclipped, "printed" takes f = A X (a constant has no covariance); "gradient" takes the move
    of plain gradient ascent on the clipped surrogate, f = pi (A X - E_pi[A X]) (Proposition 1).
    """
    policy = states.log_policy.exp()
    move = states.advantages * unclipped(states.ratio, states.advantages, low, high)
    if step == "gradient":
        move = policy * (move - mean_under(policy, move))
    centered = states.log_policy - mean_under(policy, states.log_policy)
    return -(policy * centered * move).sum(-1)


@pytest.mark.parametrize("step", MOVES)
@pytest.mark.parametrize("low, high", [(0.8, 1.2), (0.5, 3.0), (0.99, 1.01), (1.05, 3.0)])
def test_the_entropy_rule_predicts_the_change_with_an_error_that_shrinks_quadratically(
    step, low, high
):
    states = random_states(0)
    slope = entropy_slope(states, low, high, step)
    move = MOVES[step](states, low, high)
    errors = []
    for eta in (1e-2, 1e-3, 1e-4):
        change = entropy_of(states.logits + eta * move) - entropy_of(states.logits)
        errors.append((change - eta * slope).abs().mean().item())
    size = change.abs().mean().item()
    assert 0 < errors[-1] < 1e-2 * size
    for larger, smaller in itertools.pairwise(errors):
        # a tenth of the step, a hundredth of the error
        assert smaller / larger == pytest.approx(1e-2, rel=0.3)


def test_the_two_steps_of_the_rule_differ():
    states = random_states(1)
    printed = entropy_slope(states, 0.8, 1.2, "printed")
    gradient = entropy_slope(states, 0.8, 1.2, "gradient")
    assert (printed - gradient).abs().mean() > 0.1 * printed.abs().mean()


def test_the_printed_slope_is_the_expectation_of_the_per_token_terms():
    """r (log pi + H) A X, whose mean is logged and counted by hand in test_metrics.py."""
    states = random_states(2)
    ratio = states.ratio
    inside = torch.where(states.advantages > 0, ratio <= 1.2, ratio >= 0.8)
    entropy = entropy_of(states.logits).unsqueeze(1)
    terms = ratio * (states.log_policy + entropy) * states.advantages * inside
    expectation = (states.rollout.exp() * terms).sum(-1)  # over tokens drawn from pi_rollout
    torch.testing.assert_close(expectation, -entropy_slope(states, 0.8, 1.2, "printed"))


def test_the_four_token_classes_of_table_4_move_entropy_as_stated():
    """Raising one token's A X lowers entropy if the token is likely, and raises it if not.

    Definition 1, relative: an advantage is high where A X > E_pi[A X], a probability where
    log pi > E_pi[log pi]. A token's own part of the move is its advantage from the mean.
    """
    states = random_states(3)
    policy = states.log_policy.exp()
    advantages = states.advantages * unclipped(states.ratio, states.advantages, 0.8, 1.2)
    from_mean = advantages - mean_under(policy, advantages)
    has_high_advantage = from_mean > 0
    is_likely = states.log_policy > mean_under(policy, states.log_policy)
    classes = set()
    for token in range(states.logits.shape[1]):
        move = torch.zeros_like(states.logits)
        move[:, token] = from_mean[:, token]
        moved = states.logits + 1e-5 * move
        falls = entropy_of(moved) < entropy_of(states.logits)
        # positive and likely, or negative and unlikely
        expected = has_high_advantage[:, token] == is_likely[:, token]
        assert torch.equal(falls, expected)
        classes |= set(zip(has_high_advantage[:, token].tolist(), is_likely[:, token].tolist()))
    assert len(classes) == 4
