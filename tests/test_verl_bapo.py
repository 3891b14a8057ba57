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
from conftest import warnings_of
from torch.testing import assert_close

verl = pytest.importorskip("verl")

from hydra import compose, initialize_config_module
from hydra.errors import InstantiationException
from verl.trainer.ppo.core_algos import get_policy_loss_fn
from verl.utils.config import omega_conf_to_dataclass

import bapo
from integrations import common, verl_bapo
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
SECTION = "+actor_rollout_ref.actor.policy_loss"
LENGTHS = [7, 1, 23, 12, 4, 18, 9, 2, 21, 15, 5, 11, 3, 20]


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
    shape = (len(LENGTHS), max(LENGTHS))
    g = torch.Generator().manual_seed(3)
    old_log_prob = -3 * torch.rand(shape, generator=g)
    inside_response = torch.arange(shape[1]) < torch.tensor(LENGTHS)[:, None]
    not_of_a_tool = torch.rand(shape, generator=g) < 0.9  # verl masks tools' tokens in a response
    mask = inside_response & not_of_a_tool
    return {
        "log_prob": old_log_prob + 0.3 * torch.randn(shape, generator=g),
        "old_log_prob": old_log_prob,
        "advantages": torch.randn(shape[0], 1, generator=g).expand(shape) * mask,
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


def search_of_bapo(mode):
    """A search that stops half way, and the bounds that bapo.py finds on the same tokens."""
    batch = make_batch()
    mask = batch["response_mask"]
    if mode == "seq-mean-token-mean":
        rho0 = 0.442
        weights = mask / mask.sum(1, keepdim=True)
    else:
        rho0 = 0.496
        weights = mask.float()  # other modes differ by a factor, which cancels in a share
    search = bapo.ClipSearch(rho0)
    log_ratio = batch["log_prob"] - batch["old_log_prob"]
    weights = weights * batch["rollout_is_weights"]
    masses = bapo.contribution_masses(log_ratio, batch["advantages"], weights, search)
    return search, bapo.search_clip_bounds(masses, search)


# ---------------------------------------------------------------- the registered loss
@pytest.mark.parametrize("mode", MODES)
def test_bounds_are_bapo_pys_and_the_loss_at_them_is_verls_own(mode):
    search, bounds = search_of_bapo(mode)
    assert 1.2 < bounds.high < 3.0
    loss, gradient, metrics = run(with_search(search, clip_ratio_c=1.01), mode)
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


def test_one_search_of_fewer_than_16_responses_is_warned_of_once():
    def twice(search, count):
        for _ in range(2):
            _, _, metrics = run(with_search(search), rows=[2] * count)
            assert metrics["actor/bapo_responses"] == count

    assert warnings_of(common, lambda: twice(bapo.PAPER_MAIN, 16)) == 0
    assert warnings_of(common, lambda: twice(bapo.PAPER_MAIN, 15)) == 1
    assert warnings_of(common, lambda: twice(bapo.GRPO, 15)) == 0


def test_without_an_advantage_rho_is_not_logged():
    """So that verl's mean is over the micro-batches that have one."""
    _, _, metrics = run(with_search(bapo.PAPER_MAIN), advantages=torch.zeros(14, 23))
    assert metrics["actor/bapo_low"] == 0.6
    assert "actor/bapo_rho" not in metrics


# ---------------------------------------------------------------- ranks
def of_one_rank(rank, folder):
    """One of two processes: its rows of the batch, in every mode."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    mask = make_batch()["response_mask"]
    info = {"dp_size": 2, "batch_num_tokens": mask.sum().item(), "global_batch_size": len(mask)}
    rows = slice(0, 5) if rank == 0 else slice(5, 14)
    results = {}
    for mode in MODES:
        search, _ = search_of_bapo(mode)
        call = functools.partial(run, with_search(search, info), mode, rows)
        results[mode] = call()
    copies = with_search(bapo.PAPER_MAIN, info | {"dp_size": 1})
    results["copies"] = run(copies, rows=rows)
    torch.save((results, warnings_of(common, call)), f"{folder}/{rank}.pt")
    dist.barrier()
    os._exit(0)  # a normal exit may hang, or abort, in the threads of gloo


def test_two_ranks_search_on_their_union(tmp_path):
    mp.spawn(of_one_rank, (str(tmp_path),), nprocs=2)
    (first, first_warns), (second, second_warns) = [
        torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1)
    ]
    assert (first_warns, second_warns) == (1, 0)
    for mode in MODES:
        search, _ = search_of_bapo(mode)
        loss, gradient, metrics = run(with_search(search), mode)
        # verl's ranks average gradients, and losses for the log.
        assert (first[mode][0] + second[mode][0]) / 2 == pytest.approx(loss, rel=1e-5)
        of_ranks = torch.cat([first[mode][1], second[mode][1]]) / 2
        assert_close(of_ranks, gradient, rtol=1e-5, atol=1e-8)
        for name in ("low", "high", "rho", "responses"):
            expected = pytest.approx(metrics[f"actor/bapo_{name}"], rel=1e-5)
            assert first[mode][2][f"actor/bapo_{name}"] == expected
            assert second[mode][2][f"actor/bapo_{name}"] == expected
    _, _, of_copies = first["copies"]
    assert of_copies["actor/bapo_responses"] == metrics["actor/bapo_responses"] // 2


@pytest.mark.parametrize(
    "name, options",
    [
        ("pipeline_model_parallel_size", ["pipeline_model_parallel_size=2"]),
        (
            "dynamic_context_parallel",
            ["dynamic_context_parallel=True", "max_seqlen_per_dp_cp_rank=64"],
        ),
    ],
)
def test_ranks_that_do_not_all_call_the_loss_equally_are_refused(name, options):
    megatron = "model_engine=megatron"
    run(actor_config(megatron))
    overrides = [f"actor_rollout_ref.actor.megatron.{option}" for option in options]
    with pytest.raises(ValueError, match=name):
        run(actor_config(megatron, *overrides))


# ---------------------------------------------------------------- options
def test_the_command_line_sets_the_search():
    assert actor_config().policy_loss.clip_search() == bapo.ClipSearch()
    config = actor_config(f"{SECTION}.rho0=0.5", f"{SECTION}.high_max=2.0")
    assert config.policy_loss.clip_search() == bapo.ClipSearch(0.5, high_max=2.0)


def test_a_wrong_option_is_refused_when_verl_builds_its_config():
    with pytest.raises(InstantiationException, match="ValueError.*rho0"):
        actor_config(f"{SECTION}.rho0=1.5")
    with pytest.raises(InstantiationException, match="loss_mode"):
        actor_config("actor_rollout_ref.actor.policy_loss.loss_mode=vanilla")
    without = replace(actor_config(), policy_loss=verl_bapo.PolicyLossConfig())
    with pytest.raises(ValueError, match="_target_"):
        run(without)
