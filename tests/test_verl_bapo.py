"""integrations/verl_bapo.py inside the installed verl: its config, its registry, its ppo_loss.

Skipped without verl.
"""

import functools
import itertools
import math
import os
import re
from dataclasses import asdict, replace
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from conftest import warnings_of

verl = pytest.importorskip("verl")

from hydra import compose, initialize_config_module
from hydra.errors import InstantiationException
from verl.trainer.ppo.core_algos import get_policy_loss_fn
from verl.utils import tensordict_utils as tu
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.utils.losses import ppo_loss

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
SECTION = "+actor_rollout_ref.actor.policy_loss"
# What verl's trainer tells of the whole mini-batch; made-up numbers.
GLOBAL = {
    "dp_size": 2,
    "batch_num_tokens": 311,
    "global_batch_size": 29,
    "loss_scale_factor": 40,
}


# ---------------------------------------------------------------- configs
@functools.cache
def actor_config(*overrides):
    """verl's default actor section with BAPO switched on, made as verl's workers make it."""
    needed = "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4"
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", overrides=[needed, *SWITCH_ON, *overrides])
    return omega_conf_to_dataclass(config.actor_rollout_ref.actor)


def with_search(search, global_batch_info=None, reduce_over_ranks=True, **options):
    """The actor section with this search."""
    policy_loss = BapoLossConfig(**asdict(search), reduce_over_ranks=reduce_over_ranks)
    config = replace(actor_config(), policy_loss=policy_loss, global_batch_info={}, **options)
    config.global_batch_info.update(global_batch_info or {})
    return config


# ---------------------------------------------------------------- tokens
class Batch(NamedTuple):
    """As verl passes it; [B, T] each."""

    log_prob: torch.Tensor
    old_log_prob: torch.Tensor
    advantages: torch.Tensor
    response_mask: torch.Tensor  # bool
    rollout_is_weights: torch.Tensor


LENGTHS = [7, 1, 23, 12, 4, 18, 9, 2, 21, 15, 5, 11, 3, 20]


def make_batch():
    n = len(LENGTHS)
    t = max(LENGTHS)
    g = torch.Generator().manual_seed(3)
    old_log_prob = -3 * torch.rand(n, t, generator=g)
    inside_response = torch.arange(t) < torch.tensor(LENGTHS)[:, None]
    not_of_a_tool = torch.rand(n, t, generator=g) < 0.9  # verl masks tools' tokens in a response
    mask = inside_response & not_of_a_tool
    return Batch(
        log_prob=old_log_prob + 0.3 * torch.randn(n, t, generator=g),
        old_log_prob=old_log_prob,
        advantages=torch.randn(n, 1, generator=g).expand(n, t) * mask,
        response_mask=mask,
        rollout_is_weights=2 * torch.rand(n, t, generator=g),
    )


class Result(NamedTuple):
    loss: float
    gradient: torch.Tensor  # [B, T], at log_prob
    metrics: dict[str, float]


def run(config, mode, rows=slice(None), is_weights=False, loss="bapo", convert=torch.Tensor.float):
    """Call a registered loss by keyword, as verl's ppo_loss does, on some rows of the batch.

    is_weights: whether to pass rollout_is_weights; convert: what the log-probs pass through.
    """
    batch = Batch(*[tensor[rows] for tensor in make_batch()])
    x = batch.log_prob.clone().requires_grad_()
    value, metrics = get_policy_loss_fn(loss)(
        old_log_prob=convert(batch.old_log_prob),
        log_prob=convert(x),
        advantages=batch.advantages,
        response_mask=batch.response_mask,
        loss_agg_mode=mode,
        config=config,
        rollout_is_weights=batch.rollout_is_weights if is_weights else None,
    )
    value.backward()
    return Result(value.item(), x.grad, metrics)


def weights_of(mask, mode):
    """Those of the mode, up to a factor, which cancels in a share."""
    if mode == "seq-mean-token-mean":
        return mask / (mask.sum(1, keepdim=True) * len(mask))
    return bapo.token_weights(mask)


def search_of_bapo(mode, is_weights, contribution="surrogate"):
    """A search that stops half way, and what bapo.py finds on the same tokens."""
    batch = make_batch()
    weights = weights_of(batch.response_mask, mode)
    if is_weights:
        weights = weights * batch.rollout_is_weights
    inputs = (batch.log_prob - batch.old_log_prob, batch.advantages, weights)
    search = bapo.ClipSearch(0.999, low_start=0.9, high_max=2.0, contribution=contribution)
    masses = bapo.contribution_masses(*inputs, search)
    last = bapo.search_clip_bounds(masses, search)
    search = replace(search, rho0=(last.rho_start + last.rho) / 2)
    return search, bapo.search_clip_bounds(masses, search)


# ---------------------------------------------------------------- the registered loss
@pytest.mark.parametrize("is_weights", [False, True])
@pytest.mark.parametrize("info", [{}, GLOBAL], ids=["micro-batch", "global"])
@pytest.mark.parametrize("mode", MODES)
def test_fixed_bounds_equal_verls_own_clipped_loss(mode, info, is_weights):
    fixed = bapo.ClipSearch.fixed(0.8, 1.28)
    clips = dict(clip_ratio_low=0.2, clip_ratio_high=0.28, clip_ratio_c=1e9)
    theirs = run(with_search(fixed, info, **clips), mode, is_weights=is_weights, loss="vanilla")
    ours = run(with_search(fixed, info, clip_ratio_c=1.01), mode, is_weights=is_weights)
    assert ours.loss == pytest.approx(theirs.loss, rel=1e-5)
    torch.testing.assert_close(ours.gradient, theirs.gradient, rtol=1e-5, atol=1e-9)
    for name in ("actor/pg_clipfrac", "actor/ppo_kl"):
        assert ours.metrics[name] == pytest.approx(theirs.metrics[name], rel=1e-5)
        assert ours.metrics[name] != 0


@pytest.mark.parametrize("contribution", ["surrogate", "gradient"])
@pytest.mark.parametrize("is_weights", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_bounds_are_those_of_bapo_on_the_same_tokens(mode, is_weights, contribution):
    search, bounds = search_of_bapo(mode, is_weights, contribution)
    assert 1.2 < bounds.high < 2.0
    batch = make_batch()
    log_ratio = batch.log_prob - batch.old_log_prob
    weights = bapo.token_weights(batch.response_mask)  # what is logged does not depend on them
    inputs = (log_ratio, batch.advantages, batch.response_mask)
    expected = bapo.diagnostics(*inputs, bounds, weights)
    for info in ({}, GLOBAL):  # the constants of the whole mini-batch cancel in a share
        metrics = run(with_search(search, info), mode, is_weights=is_weights).metrics
        for name in verl_bapo.LOGGED:
            value = metrics[f"actor/bapo_{name}"]
            assert value == pytest.approx(expected[name].item(), rel=1e-6), name


def test_bfloat16_log_probs_are_subtracted_in_float32():
    config = with_search(bapo.GRPO)
    given = run(config, "token-mean", convert=torch.Tensor.bfloat16)
    expected = run(config, "token-mean", convert=lambda x: x.bfloat16().float())
    assert given.loss == expected.loss


def test_one_search_of_fewer_than_16_responses_is_warned_of_once():
    searching = with_search(bapo.ClipSearch())
    enough = [2] * 16
    few = [2] * 15

    def twice(config, rows):
        for _ in range(2):
            run(config, "token-mean", rows)

    assert warnings_of(verl_bapo, lambda: twice(searching, enough)) == 0
    assert warnings_of(verl_bapo, lambda: twice(searching, few)) == 1
    assert warnings_of(verl_bapo, lambda: twice(with_search(bapo.GRPO), few)) == 0
    responses = run(searching, "token-mean", few).metrics["actor/bapo_responses"]
    assert responses == 15


def test_rho_is_logged_only_where_a_token_has_an_advantage(monkeypatch):
    """So that verl's mean is over the micro-batches that have one."""
    config = with_search(bapo.ClipSearch())
    whole = run(config, "token-mean").metrics
    batch = make_batch()
    batch.response_mask[3:6] = False
    without = batch._replace(advantages=torch.zeros_like(batch.advantages))
    monkeypatch.setitem(globals(), "make_batch", lambda: without)
    undefined = run(config, "token-mean").metrics
    assert set(whole) - set(undefined) == {"actor/bapo_rho", "actor/bapo_rho_start"}
    assert undefined["actor/bapo_responses"] == whole["actor/bapo_responses"] - 3

    # verl needs equally many values from ranks that search alone.
    alone = run(with_search(bapo.ClipSearch(), reduce_over_ranks=False), "token-mean").metrics
    assert math.isnan(alone["actor/bapo_rho"])


# ---------------------------------------------------------------- inside verl
def jagged(rows):
    return torch.nested.as_nested_tensor(list(rows), layout=torch.jagged)


def responses_of(tensor):
    """[B, T] without the padding, one tensor a response."""
    return [row[:length] for row, length in zip(tensor, LENGTHS)]


def test_verls_config_and_ppo_loss_equal_bapo_loss():
    """The way that a worker takes: verl's engines return the log-probs of whole sequences, each at
    the position before its token. Prompts have unequal lengths, so that a wrong place shows."""
    search, _ = search_of_bapo("seq-mean-token-mean", False)
    config = actor_config(
        f"{SECTION}.rho0={search.rho0}",
        f"{SECTION}.low_start=0.9",
        f"{SECTION}.high_max=2.0",
        "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean",
    )
    assert config.policy_loss.clip_search() == search

    batch = make_batch()
    theirs = batch.log_prob.clone().requires_grad_()
    of_sequences = []
    prompts = []
    for response, prompt in zip(responses_of(theirs), itertools.cycle([1, 2, 3])):
        of_prompt = torch.full((prompt - 1,), -9.0)
        unused = torch.full((1,), -9.0)
        of_sequences.append(torch.cat([of_prompt, response, unused]))
        prompts.append(torch.ones(prompt, dtype=torch.long))
    data = {
        "prompts": jagged(prompts),
        "responses": jagged(responses_of(torch.ones(theirs.shape, dtype=torch.long))),
        "response_mask": jagged(responses_of(batch.response_mask.long())),
        "old_log_probs": jagged(responses_of(batch.old_log_prob)),
        "advantages": jagged(responses_of(batch.advantages)),
    }
    info = {
        "dp_size": 1,
        "batch_num_tokens": batch.response_mask.sum().item(),
        "global_batch_size": len(LENGTHS),
    }
    output = {"log_probs": jagged(of_sequences)}
    loss, metrics = ppo_loss(config, output, tu.get_tensordict(data, info))
    loss.backward()

    ours = batch.log_prob.clone().requires_grad_()
    weights = weights_of(batch.response_mask, "seq-mean-token-mean")
    expected, _ = bapo.bapo_loss(ours, *batch[1:4], search, weights=weights)
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), abs=1e-6)
    torch.testing.assert_close(theirs.grad, ours.grad, rtol=1e-5, atol=1e-8)
    assert metrics["actor/bapo_responses"].aggregate() == batch.response_mask.any(dim=1).sum()
    assert config.global_batch_info["dp_size"] == 1  # what the number of copies comes from


# ---------------------------------------------------------------- ranks
def of_one_rank(rank, store, results):
    """One of two processes: its rows of the batch, in every mode."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    mask = make_batch().response_mask
    info = {
        "dp_size": 2,
        "batch_num_tokens": mask.sum().item(),
        "global_batch_size": len(mask),
    }
    rows = slice(0, 5) if rank == 0 else slice(5, 14)
    for mode in MODES:
        search, _ = search_of_bapo(mode, True)
        result = run(with_search(search, info), mode, rows, is_weights=True)
        results[rank, mode] = (result.loss, result.gradient.tolist(), result.metrics)
    searching = bapo.ClipSearch()
    for name, config in [
        ("ranks", with_search(searching, info)),
        ("copies", with_search(searching, info | {"dp_size": 1})),
        ("alone", with_search(searching, info, reduce_over_ranks=False)),
    ]:
        call = functools.partial(run, config, "token-mean", rows)
        results[rank, name] = (warnings_of(verl_bapo, call), call().metrics["actor/bapo_responses"])
    dist.barrier()
    os._exit(0)  # a normal exit may hang, or abort, in the threads of gloo


def test_two_ranks_search_on_their_union(tmp_path):
    with mp.Manager() as manager:
        shared = manager.dict()
        mp.spawn(of_one_rank, (str(tmp_path / "store"), shared), nprocs=2)
        results = dict(shared)
    # The first rank speaks for all; ranks that search alone speak for themselves.
    has_tokens = make_batch().response_mask.any(dim=1)
    counts = [has_tokens[:5].sum().item(), has_tokens[5:].sum().item()]
    for rank in (0, 1):
        assert results.pop((rank, "ranks")) == (rank == 0, sum(counts))
        assert results.pop((rank, "copies")) == (rank == 0, sum(counts) // 2)
        assert results.pop((rank, "alone")) == (True, counts[rank])
    results = {key: Result(*value) for key, value in results.items()}
    for mode in MODES:
        search, _ = search_of_bapo(mode, True)
        whole = run(with_search(search), mode, is_weights=True)
        ranks = [results[rank, mode] for rank in (0, 1)]
        for name in bapo.ClipBounds._fields:
            expected = pytest.approx(whole.metrics[f"actor/bapo_{name}"])
            assert [rank.metrics[f"actor/bapo_{name}"] for rank in ranks] == [expected] * 2
        # verl's ranks average gradients, and losses for the log.
        assert (ranks[0].loss + ranks[1].loss) / 2 == pytest.approx(whole.loss, rel=1e-5)
        gradient = torch.tensor(ranks[0].gradient + ranks[1].gradient) / 2
        torch.testing.assert_close(gradient, whole.gradient, rtol=1e-5, atol=1e-9)


def test_ranks_that_do_not_all_call_the_loss_equally_are_refused(monkeypatch):
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "all_reduce", lambda *_, **__: None)
    monkeypatch.setattr(dist, "get_world_size", lambda: 1)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    engine = "model_engine=megatron"
    run(actor_config(engine), "token-mean")
    for name, options in [
        ("pipeline_model_parallel_size", ["pipeline_model_parallel_size=2"]),
        (
            "dynamic_context_parallel",
            ["dynamic_context_parallel=True", "max_seqlen_per_dp_cp_rank=64"],
        ),
    ]:
        overrides = [f"actor_rollout_ref.actor.megatron.{option}" for option in options]
        with pytest.raises(ValueError, match=name):
            run(actor_config(engine, *overrides), "token-mean")
        alone = f"{SECTION}.reduce_over_ranks=False"
        run(actor_config(engine, *overrides, alone), "token-mean")


# ---------------------------------------------------------------- options
def test_defaults_are_those_of_the_search():
    assert actor_config().policy_loss.clip_search() == bapo.ClipSearch()


def test_a_wrong_option_is_refused_when_verl_builds_its_config():
    with pytest.raises(InstantiationException, match="ValueError.*rho0"):
        actor_config(f"{SECTION}.rho0=1.5")
    with pytest.raises(InstantiationException, match="loss_mode"):
        actor_config("actor_rollout_ref.actor.policy_loss.loss_mode=vanilla")
    without = replace(actor_config(), policy_loss=verl_bapo.PolicyLossConfig())
    with pytest.raises(ValueError, match="_target_"):
        run(without, "token-mean")
    with pytest.raises(ValueError, match="loss_agg_mode"):
        run(actor_config(), "mean")
