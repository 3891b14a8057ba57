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


@functools.cache
def actor_config(*overrides):
    """verl's default actor section with BAPO switched on, made as verl's workers make it."""
    needed = "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4"
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", overrides=[needed, *SWITCH_ON, *overrides])
    return omega_conf_to_dataclass(config.actor_rollout_ref.actor)


def with_search(search, **options):
    """The actor section with this search."""
    return replace(actor_config(), policy_loss=BapoLossConfig(**asdict(search)), **options)


def make_batch():
    """[14, 23] each, by the names of verl's losses. bfloat16 can hold the log-probs."""
    shape = (14, 23)
    g = torch.Generator().manual_seed(3)
    old_log_prob = torch.randint(-24, 0, shape, generator=g) / 8
    mask = torch.rand(shape, generator=g) < 0.7  # verl masks tools' tokens in a response, too
    return {
        "log_prob": old_log_prob + torch.randint(-12, 13, shape, generator=g) / 16,
        "old_log_prob": old_log_prob,
        "advantages": torch.randn(14, 1, generator=g).round().expand(shape) * mask,
        "response_mask": mask,
        "rollout_is_weights": 2 * torch.rand(shape, generator=g),
    }


def run(config, mode="token-mean", loss="bapo", **batch):
    """Loss, gradient at log_prob and metrics of a registered loss, called as ppo_loss calls it."""
    x = batch.pop("log_prob").clone().requires_grad_()
    loss_fn = get_policy_loss_fn(loss)
    value, metrics = loss_fn(log_prob=x, **batch, loss_agg_mode=mode, config=config)
    value.backward()
    return value.item(), x.grad, metrics


# ---------------------------------------------------------------- the registered loss
def search_that_stops_half_way(mode, batch):
    """A search, and the bounds that bapo.py finds with it on the tokens of verl's loss.

    Where every ratio is 1, its gradient is -weight * advantage, so verl itself tells the weights.
    """
    at_one = batch | {"log_prob": batch["old_log_prob"]}
    _, gradient, _ = run(actor_config(), mode, "vanilla", **at_one)
    log_ratio = batch["log_prob"] - batch["old_log_prob"]

    def find(search):
        masses = bapo.contribution_masses(log_ratio, -gradient, torch.ones(14, 23), search)
        return bapo.search_clip_bounds(masses, search)

    search = bapo.ClipSearch(rho0=find(bapo.PAPER_MAIN).rho_start + 0.005)
    bounds = find(search)
    assert 1.2 < bounds.high < 3.0
    return search, bounds


def of_one_rank(rank, store):
    """One of two processes: the loss, gradient and metrics of its rows, in every mode."""
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    batch = make_batch()
    rows = [slice(0, 5), slice(5, 14)][rank]
    of_rank = {name: tensor[rows] for name, tensor in batch.items()}
    tokens = batch["response_mask"].sum().item()
    info = {"dp_size": 2, "batch_num_tokens": tokens, "global_batch_size": 14}
    for mode in MODES:
        search, bounds = search_that_stops_half_way(mode, batch)
        config = with_search(search, global_batch_info=info, clip_ratio_c=1.01)
        loss, gradient, metrics = run(config, mode, **of_rank)

        verls_config = replace(
            config,
            clip_ratio_low=1 - bounds.low,
            clip_ratio_high=bounds.high - 1,
            clip_ratio_c=1e9,
        )
        verls_loss, verls_gradient, expected = run(verls_config, mode, "vanilla", **of_rank)
        assert_close(loss, verls_loss, rtol=1e-5, atol=0)
        assert_close(gradient, verls_gradient, rtol=1e-5, atol=1e-8)
        del expected["actor/pg_clipfrac_lower"]
        for name, value in bounds._asdict().items():
            expected[f"actor/bapo_{name}"] = float(value)
        expected["actor/bapo_responses"] = 14
        for name, value in expected.items():
            assert metrics[name] == pytest.approx(value, rel=1e-5), name
    # A rank without advantages logs the same names, or verl could not average them.
    _, _, of_idle = run(config, mode, **of_rank | {"advantages": rank * of_rank["advantages"]})
    assert of_idle.keys() == metrics.keys()
    dist.barrier()
    os._exit(0)  # a normal exit may hang, or abort, in the threads of gloo


def test_two_ranks_have_the_bounds_of_their_union_and_verls_own_loss_at_them(tmp_path):
    mp.spawn(of_one_rank, (f"file://{tmp_path}/store",), nprocs=2)


# ---------------------------------------------------------------- options
def test_the_command_line_sets_the_search_and_a_rho_that_is_not_defined_is_not_logged():
    option = "+actor_rollout_ref.actor.policy_loss.rho0=0.5"
    config = actor_config("model_engine=megatron", option)
    assert config.policy_loss.clip_search() == bapo.ClipSearch(0.5)
    no_advantages = make_batch() | {"advantages": torch.zeros(14, 23)}
    _, _, metrics = run(config, **no_advantages)
    assert "actor/bapo_rho" not in metrics


@pytest.mark.parametrize(
    "said, options",
    [
        ("ValueError.*0 <= rho0 < 1", ["+actor_rollout_ref.actor.policy_loss.rho0=1.5"]),
        ("must be 'bapo'", ["actor_rollout_ref.actor.policy_loss.loss_mode=vanilla"]),
        (
            "every rank must call",
            ["actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=2"],
        ),
        (
            "every rank must call",
            [
                "actor_rollout_ref.actor.megatron.dynamic_context_parallel=True",
                "actor_rollout_ref.actor.megatron.max_seqlen_per_dp_cp_rank=64",
            ],
        ),
    ],
)
def test_options_that_contradict_the_search_are_refused(said, options):
    with pytest.raises((ValueError, InstantiationException), match=said):
        run(actor_config("model_engine=megatron", *options), **make_batch())
