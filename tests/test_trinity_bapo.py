"""integrations/trinity_bapo.py inside the installed Trinity-RFT. Skipped without it."""

import pickle

import pytest
import torch

pytest.importorskip("trinity")

from trinity.algorithm.policy_loss_fn import POLICY_LOSS_FN

import bapo
from integrations.trinity_bapo import BapoPolicyLossFn

PATH = "integrations.trinity_bapo.BapoPolicyLossFn"
# Trinity's aggregations, and those of bapo.token_weights that have the same share
MODES = {
    "token-mean": "token-mean",
    "seq-mean-token-sum": "token-mean",
    "seq-mean-token-sum-norm": "token-mean",
    "seq-mean-token-mean": "sequence-mean",
}


def batch(n=14, t=23):
    """log_prob, old_log_prob, advantages and mask, by the names of Trinity's verl backend."""
    g = torch.Generator().manual_seed(3)
    old_log_probs = -3 * torch.rand(n, t, generator=g)
    log_probs = old_log_probs + 0.3 * torch.randn(n, t, generator=g)
    mask = torch.arange(t) < torch.randint(1, t + 1, (n, 1), generator=g)
    advantages = torch.randn(n, 1, generator=g).expand(n, t) * mask
    return {
        "logprob": log_probs,
        "old_log_probs": old_log_probs,
        "advantages": advantages,
        "response_mask": mask,
    }


def call(loss_fn):
    """Loss, gradient and metrics."""
    tensors = batch()
    x = tensors["logprob"].requires_grad_()
    loss, metrics = loss_fn(**tensors)
    loss.backward()
    return loss.item(), x.grad, metrics


@pytest.mark.parametrize("mode", MODES)
def test_loss_bounds_and_gradient_are_those_of_bapo_loss(mode):
    """Kills: weights of another aggregation, bounds that the loss does not use."""
    tensors = batch()
    x = tensors["logprob"].requires_grad_()
    inputs = (x, tensors["old_log_probs"], tensors["advantages"], tensors["response_mask"])
    search = bapo.ClipSearch(rho0=0.0)
    weights = bapo.token_weights(tensors["response_mask"], MODES[mode])
    _, at_start = bapo.bapo_loss(*inputs, search, weights=weights)
    rho0 = at_start["rho_start"].item() + 0.01  # a target inside the grid

    search = bapo.ClipSearch(rho0=rho0)
    expected, expected_metrics = bapo.bapo_loss(*inputs, search, weights=weights)
    (expected_gradient,) = torch.autograd.grad(expected, x)
    assert 1.2 < expected_metrics["high"] < 2.0

    loss, gradient, metrics = call(BapoPolicyLossFn(loss_agg_mode=mode, rho0=rho0))
    for name in ("low", "high", "rho", "rho_start", "reached"):
        assert metrics[f"bapo_{name}"] == pytest.approx(expected_metrics[name].item(), rel=1e-5)
    scale = (loss / expected).item()  # sums are not divided by the tokens
    if mode in ("token-mean", "seq-mean-token-mean"):
        assert scale == pytest.approx(1, rel=1e-5)
    torch.testing.assert_close(gradient, scale * expected_gradient, rtol=1e-4, atol=1e-8)


def test_trinity_finds_it_by_its_path_and_may_pickle_it():
    found = POLICY_LOSS_FN.get(PATH)
    loss_fn = found(backend="verl", **found.default_args())
    assert set(loss_fn.select_keys) == {"old_log_probs", "response_mask", "advantages"}
    again = pickle.loads(pickle.dumps(loss_fn))
    assert again.search == bapo.ClipSearch()
    loss, gradient, metrics = call(loss_fn)
    loss_again, gradient_again, metrics_again = call(again)
    assert loss == loss_again
    assert torch.equal(gradient, gradient_again)
    assert metrics == metrics_again


def test_wrong_options_are_refused():
    with pytest.raises(ValueError, match="not epsilons"):
        BapoPolicyLossFn(low_start=0.2, low_max=0.2, high_start=0.28, high_max=0.28)
    with pytest.raises(TypeError, match="clip_range_low"):
        BapoPolicyLossFn(clip_range_low=0.2)
    with pytest.raises(ValueError, match="loss_agg_mode"):
        call(BapoPolicyLossFn(loss_agg_mode="mean"))
