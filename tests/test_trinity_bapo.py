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
from integrations import common
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
    rho0 = 0.305  # a target that the search meets on its way
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


def of_one_rank(rank, folder):
    """One of two processes: seven of 14 responses each, so that they weigh the same."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    tensors = {name: tensor.split(7)[rank] for name, tensor in batch().items()}
    tensors["old_log_probs"][~tensors["response_mask"]] = torch.nan  # padding may hold anything
    loss_fn = BapoPolicyLossFn(loss_agg_mode="seq-mean-token-sum")
    _, metrics = loss_fn(**tensors)
    torch.save((metrics, warnings_of(common, lambda: loss_fn(**tensors))), f"{folder}/{rank}.pt")
    dist.barrier()
    os._exit(0)  # a normal exit may hang, or abort, in the threads of gloo


def test_ranks_search_together_and_the_first_warns_of_few_responses(tmp_path):
    mp.spawn(of_one_rank, (str(tmp_path),), nprocs=2)
    results = [torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1)]
    _, expected = BapoPolicyLossFn(loss_agg_mode="seq-mean-token-sum")(**batch())
    assert expected["bapo_responses"] == 14
    for metrics, _ in results:
        assert metrics == pytest.approx(expected, rel=1e-5)
    assert [warned for _, warned in results] == [1, 0]


def test_without_an_advantage_rho_is_not_logged():
    """Trinity averages what its ranks and micro-batches log."""
    _, metrics = BapoPolicyLossFn()(**batch() | {"advantages": torch.zeros(14, 23)})
    assert set(metrics) == {"bapo_low", "bapo_high", "bapo_reached", "bapo_responses"}


def test_wrong_options_are_refused_by_name():
    with pytest.raises(ValueError, match="high_start"):
        BapoPolicyLossFn(low_start=0.2, low_max=0.2, high_start=0.28, high_max=0.28)
    with pytest.raises(TypeError, match="clip_range_low"):
        BapoPolicyLossFn(clip_range_low=0.2)
