"""integrations/verl_bapo.py inside the installed verl: its config and its registry.

Skipped without verl.
"""

import functools
import os
import re
from dataclasses import asdict, replace

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.testing import assert_close

verl = pytest.importorskip("verl")

from hydra import compose, initialize_config_module
from hydra.errors import InstantiationException
from verl.trainer.ppo.core_algos import get_policy_loss_fn
from verl.utils.config import omega_conf_to_dataclass

import bapo
from integrations import verl_bapo
from integrations.verl_bapo import BapoLossConfig

# verl's aggregations
MODES = [
    "token-mean",
    "token-sum",
    "seq-mean-token-sum",
    "seq-mean-token-sum-norm",
    "seq-mean-token-mean",
]
# The two options of the docstring's command line that switch BAPO on
SWITCH_ON = re.findall(r"^ +(actor_rollout_ref\.\S+)", verl_bapo.__doc__, re.MULTILINE)


# ---------------------------------------------------------------- configs and tokens
@functools.cache
def actor_config(*overrides):
    """verl's default actor section with BAPO switched on, made as verl's workers make it."""
    needed = "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4"
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", overrides=[needed, *SWITCH_ON, *overrides])
    return omega_conf_to_dataclass(config.actor_rollout_ref.actor)


def with_search(search, global_batch_info=None, **options):
    """The actor section with this search."""
    policy_loss = BapoLossConfig(**asdict(search))
    config = replace(actor_config(), policy_loss=policy_loss, global_batch_info={}, **options)
    config.global_batch_info.update(global_batch_info or {})
    return config


def make_batch():
    """[14, 23] each, by the names of verl's losses."""
    shape = (14, 23)
    g = torch.Generator().manual_seed(3)
    old_log_prob = -3 * torch.rand(shape, generator=g)
    mask = torch.rand(shape, generator=g) < 0.7  # verl masks tools' tokens in a response, too
    return {
        "log_prob": old_log_prob + 0.3 * torch.randn(shape, generator=g),
        "old_log_prob": old_log_prob,
        "advantages": torch.randn(14, 1, generator=g).round().expand(shape) * mask,
        "response_mask": mask,
        "rollout_is_weights": 2 * torch.rand(shape, generator=g),
    }


def run(config, mode="token-mean", rows=slice(None), loss="bapo", **changes):
    """Loss, gradient at log_prob and metrics of a registered loss, called as ppo_loss calls it."""
    tensors = {name: tensor[rows] for name, tensor in (make_batch() | changes).items()}
    x = tensors.pop("log_prob").clone().requires_grad_()
    loss_fn = get_policy_loss_fn(loss)
    value, metrics = loss_fn(log_prob=x, **tensors, loss_agg_mode=mode, config=config)
    value.backward()
    return value.item(), x.grad, metrics


def search_that_stops_half_way(mode):
    """A search, and the bounds that bapo.py finds with it on the tokens of verl's loss.

    Where every ratio is 1, its gradient is -weight * advantage, so verl itself tells the weights.
    """
    batch = make_batch()
    log_ratio = batch["log_prob"] - batch["old_log_prob"]
    at_one = batch["old_log_prob"]
    _, gradient, _ = run(with_search(bapo.GRPO), mode, loss="vanilla", log_prob=at_one)

    def find(search):
        masses = bapo.contribution_masses(log_ratio, -gradient, torch.ones(14, 23), search)
        return bapo.search_clip_bounds(masses, search)

    search = bapo.ClipSearch(rho0=find(bapo.PAPER_MAIN).rho_start + 0.005)
    bounds = find(search)
    assert 1.2 < bounds.high < 3.0
    return search, bounds


# ---------------------------------------------------------------- the registered loss
@pytest.mark.parametrize("mode", MODES)
def test_bounds_are_bapo_pys_and_the_loss_at_them_is_verls_own(mode):
    search, bounds = search_that_stops_half_way(mode)
    loss, gradient, metrics = run(with_search(search, clip_ratio_c=1.01), mode)
    assert metrics["actor/bapo_responses"] == 14
    for name, value in bounds._asdict().items():
        assert metrics[f"actor/bapo_{name}"] == pytest.approx(float(value), rel=1e-5), name

    clips = dict(clip_ratio_low=1 - bounds.low, clip_ratio_high=bounds.high - 1, clip_ratio_c=1e9)
    config = with_search(search, **clips)
    verls_loss, verls_gradient, verls_metrics = run(config, mode, loss="vanilla")
    assert loss == pytest.approx(verls_loss, rel=1e-5)
    assert_close(gradient, verls_gradient, rtol=1e-5, atol=1e-8)
    for name in ("actor/pg_clipfrac", "actor/ppo_kl"):
        assert metrics[name] == pytest.approx(verls_metrics[name], rel=1e-5)
        assert metrics[name] != 0


def test_bfloat16_log_probs_are_subtracted_in_float32():
    batch = make_batch()
    low = {name: batch[name].bfloat16() for name in ("log_prob", "old_log_prob")}
    rounded = {name: tensor.float() for name, tensor in low.items()}
    config = with_search(bapo.GRPO)
    assert run(config, **low)[0] == run(config, **rounded)[0]


# ---------------------------------------------------------------- ranks
def of_one_rank(rank, folder, searches):
    """One of two processes: its rows of the batch, in every mode."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    mask = make_batch()["response_mask"]
    info = {"dp_size": 2, "batch_num_tokens": mask.sum().item(), "global_batch_size": len(mask)}
    rows = slice(0, 5) if rank == 0 else slice(5, 14)
    results = {}
    for mode, search in searches.items():
        results[mode] = run(with_search(search, info), mode, rows)
    torch.save(results, f"{folder}/{rank}.pt")
    dist.barrier()
    os._exit(0)  # a normal exit may hang, or abort, in the threads of gloo


def test_two_ranks_search_on_their_union(tmp_path):
    searches = {mode: search_that_stops_half_way(mode)[0] for mode in MODES}
    mp.spawn(of_one_rank, (str(tmp_path), searches), nprocs=2)
    ranks = [torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1)]
    for mode, search in searches.items():
        _, gradient, metrics = run(with_search(search), mode)
        _, gradients, metrics_of_ranks = zip(*[results[mode] for results in ranks])
        # verl's ranks average gradients.
        assert_close(torch.cat(gradients) / 2, gradient, rtol=1e-5, atol=1e-8)
        for name in ("low", "high", "rho", "responses"):
            expected = pytest.approx(metrics[f"actor/bapo_{name}"], rel=1e-5)
            assert [logged[f"actor/bapo_{name}"] for logged in metrics_of_ranks] == [expected] * 2


@pytest.mark.parametrize(
    "options",
    [
        ["pipeline_model_parallel_size=2"],
        ["dynamic_context_parallel=True", "max_seqlen_per_dp_cp_rank=64"],
    ],
)
def test_ranks_that_do_not_all_call_the_loss_equally_are_refused(options):
    megatron = "model_engine=megatron"
    run(actor_config(megatron))
    overrides = [f"actor_rollout_ref.actor.megatron.{option}" for option in options]
    with pytest.raises(ValueError, match=options[0].split("=")[0]):
        run(actor_config(megatron, *overrides))


# ---------------------------------------------------------------- options
def test_the_command_line_sets_the_search():
    section = "actor_rollout_ref.actor.policy_loss"
    config = actor_config(f"+{section}.rho0=0.5")
    assert config.policy_loss.clip_search() == bapo.ClipSearch(0.5)
    with pytest.raises(InstantiationException, match="ValueError.*rho0"):
        actor_config(f"+{section}.rho0=1.5")
    with pytest.raises(InstantiationException, match="loss_mode must be 'bapo'"):
        actor_config(f"{section}.loss_mode=vanilla")
