"""integrations/trinity_bapo.py inside the installed Trinity-RFT. Skipped without it."""

import os
import pickle

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from conftest import warnings_of

pytest.importorskip("trinity")

from trinity.algorithm.policy_loss_fn import POLICY_LOSS_FN

import bapo
from integrations import trinity_bapo
from integrations.trinity_bapo import BapoPolicyLossFn

# Trinity's aggregations
MODES = ["token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean"]


def batch(n=14, t=23):
    """log_prob, old_log_prob, advantages and mask, by the names of Trinity's verl backend."""
    g = torch.Generator().manual_seed(3)
    old_log_probs = -3 * torch.rand(n, t, generator=g)
    log_probs = old_log_probs + 0.3 * torch.randn(n, t, generator=g)
    mask = torch.arange(t) < torch.randint(1, t + 1, (n, 1), generator=g)
    advantages = torch.randn(n, 1, generator=g).expand(n, t) * mask
    return {
        "logprob": log_probs.requires_grad_(),
        "old_log_probs": old_log_probs,
        "advantages": advantages,
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
    _, at_start = bapo.bapo_loss(*inputs, bapo.ClipSearch(), weights=weights)
    rho0 = at_start["rho_start"].item() + 0.01  # a target that the search meets on its way
    expected, expected_metrics = bapo.bapo_loss(*inputs, bapo.ClipSearch(rho0), weights=weights)
    expected.backward()
    assert 1.2 < expected_metrics["high"] < 3.0

    found = POLICY_LOSS_FN.get("integrations.trinity_bapo.BapoPolicyLossFn")
    options = found.default_args() | {"loss_agg_mode": mode, "rho0": rho0}
    loss_fn = pickle.loads(pickle.dumps(found(backend="verl", **options)))
    assert set(loss_fn.select_keys) == {"old_log_probs", "response_mask", "advantages"}
    tensors = batch()
    loss, metrics = loss_fn(**tensors)
    loss.backward()
    for name in ("low", "high", "rho", "rho_start", "reached"):
        assert metrics[f"bapo_{name}"] == pytest.approx(expected_metrics[name].item(), rel=1e-5)
    scale = (loss / expected).item()  # sums are not divided by the tokens
    if mode in ("token-mean", "seq-mean-token-mean"):
        assert scale == pytest.approx(1, rel=1e-5)
    gradient = tensors["logprob"].grad
    torch.testing.assert_close(gradient, scale * inputs[0].grad, rtol=1e-4, atol=1e-8)


def test_one_search_of_fewer_than_16_responses_is_warned_of_once():
    """Responses without a token in the mask do not count."""

    def twice(n, rho0=0.4):
        tensors = batch(n)
        tensors["response_mask"][:2] = False
        for _ in range(2):
            _, metrics = BapoPolicyLossFn(rho0=rho0)(**tensors)
            assert metrics["bapo_responses"] == n - 2

    assert warnings_of(trinity_bapo, lambda: twice(18)) == 0
    assert warnings_of(trinity_bapo, lambda: twice(17)) == 1
    assert warnings_of(trinity_bapo, lambda: twice(17, rho0=0.0)) == 0


def of_one_rank(rank, store, results):
    """One of three processes. The first two hold the same batch, as copies of a rank do."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=3)
    rows = slice(5, 14) if rank == 2 else slice(0, 5)
    tensors = {name: tensor[rows] for name, tensor in batch().items()}
    tensors["old_log_probs"][~tensors["response_mask"]] = torch.nan  # padding may hold anything
    metrics = {}
    warned = warnings_of(trinity_bapo, lambda: metrics.update(BapoPolicyLossFn()(**tensors)[1]))
    bounds = (metrics["bapo_rho_start"], metrics["bapo_low"], metrics["bapo_high"])
    results[rank] = (warned, metrics["bapo_responses"]), bounds
    dist.barrier()
    os._exit(0)  # a normal exit may hang, or abort, in the threads of gloo


def test_ranks_search_together_copies_of_one_count_once_and_the_first_warns(tmp_path):
    with mp.Manager() as manager:
        results = manager.dict()
        mp.spawn(of_one_rank, (str(tmp_path / "store"), results), nprocs=3)
        (first, bounds), *others = [results[rank] for rank in range(3)]
    assert first == (1, 14)
    assert others == [((0, 14), bounds)] * 2


def test_rho_is_logged_only_where_a_token_has_an_advantage():
    """Trinity averages what its ranks and micro-batches log."""
    tensors = batch()
    tensors["advantages"] = torch.zeros_like(tensors["advantages"])
    _, metrics = BapoPolicyLossFn()(**tensors)
    assert set(metrics) == {"bapo_low", "bapo_high", "bapo_reached", "bapo_responses"}


def test_wrong_options_are_refused_by_name():
    assert BapoPolicyLossFn().search == bapo.ClipSearch()
    with pytest.raises(ValueError, match="high_start"):
        BapoPolicyLossFn(low_start=0.2, low_max=0.2, high_start=0.28, high_max=0.28)
    with pytest.raises(TypeError, match="clip_range_low"):
        BapoPolicyLossFn(clip_range_low=0.2)
    with pytest.raises(ValueError, match="loss_agg_mode"):
        BapoPolicyLossFn(loss_agg_mode="mean")(**batch())
