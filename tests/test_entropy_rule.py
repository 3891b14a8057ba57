"""The Entropy-Clip Rule (Eqs. 6, 7, Table 4) against the entropy of tabular states that really move."""

import itertools

import pytest
import torch

from bapo import unclipped


def random_states(generator, n=40, v=7):
    """n tabular states: logits of the policy, log-probs of a rollout policy nearby, advantages; float64 [n, v]."""
    logits = torch.randn(n, v, generator=generator, dtype=torch.float64) * 1.5
    rollout = (logits + 0.4 * torch.randn(n, v, generator=generator, dtype=torch.float64)).log_softmax(-1)
    return logits, rollout, torch.randn(n, v, generator=generator, dtype=torch.float64)


def entropy_of(logits):
    return torch.special.entr(logits.softmax(-1)).sum(-1)


def moves(logits, rollout, advantages, low, high):
    """Both steps of the logits, written out; the second by autograd of Eq. 4 as a sum over the vocabulary."""
    ratio = (logits.log_softmax(-1) - rollout).exp()
    x = torch.where(advantages > 0, ratio < high, ratio > low).double()  # Eq. 7
    z = logits.clone().requires_grad_()
    r = (z.log_softmax(-1) - rollout).exp()
    (rollout.exp() * torch.minimum(r * advantages, r.clamp(low, high) * advantages)).sum().backward()
    return {"printed": advantages * x + 0.7, "gradient": z.grad}  # any constant C


def entropy_slope(log_policy, log_rollout, advantages, low, high, step):
    """The rule where the whole distribution is known: dH / d eta of each state, to first order, all [..., V] -> [...].

    A small move eta * f of a state's logits changes its entropy by -eta * Cov_pi(log pi, f). With X = unclipped, "printed"
    takes f = A X + C of Eq. 6 (any C: a constant has no covariance); "gradient" takes the move of plain gradient ascent on
    the clipped surrogate, f = pi (A X - E_pi[A X]) (Proposition 1), in which the factor pi and this C matter."""
    policy = log_policy.exp()
    move = advantages * unclipped((log_policy - log_rollout).exp(), advantages, low, high)
    if step == "gradient":
        move = policy * (move - (policy * move).sum(-1, keepdim=True))
    centered = log_policy - (policy * log_policy).sum(-1, keepdim=True)
    return -(policy * centered * move).sum(-1)


@pytest.mark.parametrize("step", ["printed", "gradient"])
@pytest.mark.parametrize("low, high", [(0.8, 1.2), (0.5, 3.0), (0.99, 1.01), (1.05, 3.0)])
def test_the_entropy_rule_predicts_the_change_with_an_error_that_shrinks_quadratically(step, low, high):
    logits, rollout, advantages = random_states(torch.Generator().manual_seed(0))
    slope = entropy_slope(logits.log_softmax(-1), rollout, advantages, low, high, step)
    move = moves(logits, rollout, advantages, low, high)[step]
    errors = []
    for eta in (1e-2, 1e-3, 1e-4):
        change = entropy_of(logits + eta * move) - entropy_of(logits)
        errors.append((change - eta * slope).abs().mean().item())
        if eta == 1e-4:
            assert errors[-1] < 1e-2 * change.abs().mean().item() and change.abs().mean() > 0
    for larger, smaller in itertools.pairwise(errors):
        assert smaller / larger == pytest.approx(1e-2, rel=0.3)  # a tenth of the step, a hundredth of the error


def test_the_two_steps_of_the_rule_differ():
    logits, rollout, advantages = random_states(torch.Generator().manual_seed(1))
    printed, gradient = (
        entropy_slope(logits.log_softmax(-1), rollout, advantages, 0.8, 1.2, s) for s in ("printed", "gradient")
    )
    assert (printed - gradient).abs().mean() > 0.1 * printed.abs().mean()


def test_the_printed_slope_is_the_expectation_of_the_per_token_terms():
    """r (log pi + H) A X, whose mean is logged and counted by hand in test_metrics.py."""
    logits, rollout, advantages = random_states(torch.Generator().manual_seed(2))
    log_policy = logits.log_softmax(-1)
    ratio = (log_policy - rollout).exp()
    inside = torch.where(advantages > 0, ratio <= 1.2, ratio >= 0.8)
    terms = ratio * (log_policy + entropy_of(logits)[:, None]) * advantages * inside
    expectation = (rollout.exp() * terms).sum(-1)  # over tokens drawn from pi_rollout
    torch.testing.assert_close(expectation, -entropy_slope(log_policy, rollout, advantages, 0.8, 1.2, "printed"))


def test_the_four_token_classes_of_table_4_move_entropy_as_stated():
    """Definition 1, relative: high advantage is A X > E_pi[A X], high probability log pi > E_pi[log pi]. Raising one token's
    A X alone (its share of the covariance) lowers entropy if the token is of high probability, and raises it if of low."""
    logits, rollout, advantages = random_states(torch.Generator().manual_seed(3))
    log_policy, p = logits.log_softmax(-1), logits.softmax(-1)
    ax = advantages * unclipped((log_policy - rollout).exp(), advantages, 0.8, 1.2)
    high_advantage = ax > (p * ax).sum(-1, keepdim=True)
    high_probability = log_policy > (p * log_policy).sum(-1, keepdim=True)
    eta, seen = 1e-5, set()
    for token in range(logits.shape[1]):
        # The token's own part of the move, its advantage measured from the mean.
        move = torch.zeros_like(logits)
        move[:, token] = (ax - (p * ax).sum(-1, keepdim=True))[:, token]
        falls = entropy_of(logits + eta * move) < entropy_of(logits)
        lowers = high_advantage[:, token] == high_probability[:, token]  # positive likely, negative unlikely
        assert torch.equal(falls, lowers)
        seen |= set(zip(high_advantage[:, token].tolist(), high_probability[:, token].tolist()))
    assert len(seen) == 4
