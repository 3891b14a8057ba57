"""integrations/trinity_bapo.py inside the installed Trinity-RFT. Skipped without it or verl.

Where Trinity's and verl's aggregations are the same, their losses are. Its search over ranks is
searched_loss of common.py, which test_verl_bapo.py runs on two.
"""

import pickle

import pytest
import torch

pytest.importorskip("trinity")

from test_verl_bapo import make_batch, run, with_search

from bapo import ClipSearch
from trinity.algorithm.policy_loss_fn import POLICY_LOSS_FN

RHO0 = 0.215  # a target that the search meets on its way


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"])
def test_loss_gradient_and_metrics_are_those_of_verl_bapo(mode):
    """As Trinity makes it: found by its path, and pickled. Its log-probs may be bfloat16."""
    batch = make_batch() | {"rollout_is_weights": None}
    expected_loss, expected_gradient, expected = run(with_search(ClipSearch(RHO0)), mode, **batch)
    assert 1.2 < expected["actor/bapo_high"] < 3.0

    found = POLICY_LOSS_FN.get("integrations.trinity_bapo.BapoPolicyLossFn")
    options = found.default_args() | {"loss_agg_mode": mode, "rho0": RHO0}
    loss_fn = pickle.loads(pickle.dumps(found(backend="verl", **options)))
    log_prob = batch["log_prob"].bfloat16().requires_grad_()
    loss, metrics = loss_fn(
        logprob=log_prob,
        old_log_probs=batch["old_log_prob"].bfloat16(),
        advantages=batch["advantages"],
        response_mask=batch["response_mask"],
    )
    loss.backward()
    assert loss.item() == pytest.approx(expected_loss)
    torch.testing.assert_close(log_prob.grad.float(), expected_gradient, rtol=1e-2, atol=0)
    for name, value in metrics.items():
        assert value == pytest.approx(expected[f"actor/{name}"]), name
