"""integrations/trinity_bapo.py inside the installed Trinity-RFT. Skipped without it.

Its search over ranks is searched_loss of common.py, which test_verl_bapo.py runs on two.
"""

import pickle

import pytest
import torch

pytest.importorskip("trinity")

from trinity.algorithm.policy_loss_fn import POLICY_LOSS_FN

import bapo

# Trinity's aggregations
MODES = ["token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean"]


def batch():
    """[14, 23] each, by the names of Trinity's verl backend, in the order of bapo_loss."""
    shape = (14, 23)
    g = torch.Generator().manual_seed(3)
    old_log_probs = -3 * torch.rand(shape, generator=g)
    log_probs = old_log_probs + 0.3 * torch.randn(shape, generator=g)
    mask = torch.arange(23) < torch.randint(1, 24, (14, 1), generator=g)
    return {
        "logprob": log_probs.requires_grad_(),
        "old_log_probs": old_log_probs,
        "advantages": torch.randn(14, 1, generator=g).expand(shape) * mask,
        "response_mask": mask,
    }


@pytest.mark.parametrize("mode", MODES)
def test_loss_bounds_and_gradient_are_those_of_bapo_loss(mode):
    """As Trinity makes it: found by its path, and pickled."""
    inputs = list(batch().values())
    mask = inputs[3]
    weights = bapo.token_weights(mask)  # the sums of other aggregations have the same share
    if mode == "seq-mean-token-mean":
        weights = mask / (mask.sum(1, keepdim=True) * len(mask))
    rho0 = 0.305  # a target that the search meets on its way
    expected, expected_metrics = bapo.bapo_loss(*inputs, bapo.ClipSearch(rho0), weights=weights)
    expected.backward()
    assert 1.2 < expected_metrics["high"] < 3.0

    found = POLICY_LOSS_FN.get("integrations.trinity_bapo.BapoPolicyLossFn")
    options = found.default_args() | {"loss_agg_mode": mode, "rho0": rho0}
    loss_fn = pickle.loads(pickle.dumps(found(backend="verl", **options)))
    tensors = batch()
    loss, metrics = loss_fn(**tensors)
    assert metrics["bapo_responses"] == 14
    loss.backward()
    for name in ("low", "high", "rho", "rho_start", "reached"):
        assert metrics[f"bapo_{name}"] == pytest.approx(expected_metrics[name].item(), rel=1e-5)
    scale = (loss / expected).item()  # sums are not divided by the tokens
    if mode in ("token-mean", "seq-mean-token-mean"):
        assert scale == pytest.approx(1, rel=1e-5)
    gradient = tensors["logprob"].grad
    torch.testing.assert_close(gradient, scale * inputs[0].grad, rtol=1e-4, atol=1e-8)
