"""integrations/verl_bapo.py inside the installed verl: its config, its registry, its ppo_loss. Skipped without verl."""

import functools
import re
from dataclasses import fields, replace

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

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

# verl's aggregations, and bapo.token_weights' whose share they have
MODES = {
    "token-mean": "token-mean",
    "token-sum": "token-mean",
    "seq-mean-token-sum": "token-mean",
    "seq-mean-token-sum-norm": "token-mean",
    "seq-mean-token-mean": "sequence-mean",
}
OVERRIDES = re.findall(r"^ +(\+?actor_rollout_ref\.\S+)", verl_bapo.__doc__, re.MULTILINE)  # the docstring's command line
SECTION = "+actor_rollout_ref.actor.policy_loss"


@functools.cache
def actor_config(*overrides):
    """verl's default actor section with the docstring's overrides, made as verl's workers make it."""
    with initialize_config_module("verl.trainer.config", version_base=None):
        needed = ["actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4"]
        config = compose("ppo_trainer", overrides=[*needed, *OVERRIDES[:2], *overrides])
    return omega_conf_to_dataclass(config.actor_rollout_ref.actor)


def with_loss(policy_loss, **options):
    return replace(actor_config(), policy_loss=policy_loss, global_batch_info={}, **options)


def batch(n=14, t=23, seed=3):
    """log_prob, old_log_prob, advantages, response_mask as verl passes them, and rollout_is_weights."""
    g = torch.Generator().manual_seed(seed)
    old = -torch.rand(n, t, generator=g) * 3
    mask = torch.arange(t) < torch.randint(1, t + 1, (n, 1), generator=g)
    mask &= torch.rand(n, t, generator=g) < 0.9  # verl masks tools' tokens inside a response
    advantages = torch.randn(n, 1, generator=g).expand(n, t) * mask
    return old + torch.randn(n, t, generator=g) * 0.3, old, advantages, mask, torch.rand(n, t, generator=g) * 2


GLOBAL = {"dp_size": 2, "batch_num_tokens": 311, "global_batch_size": 29, "loss_scale_factor": 40}


def run(config, mode, rows=slice(None), is_weights=False, loss="bapo", cast=lambda log_probs: log_probs):
    """Call a registered loss by keyword, as verl's ppo_loss does: loss, gradient, metrics."""
    log_prob, old, advantages, mask, weights = (tensor[rows] for tensor in batch())
    x = log_prob.clone().requires_grad_()
    value, metrics = get_policy_loss_fn(loss)(
        old_log_prob=cast(old),
        log_prob=cast(x),
        advantages=advantages,
        response_mask=mask,
        loss_agg_mode=mode,
        config=config,
        rollout_is_weights=weights if is_weights else None,
    )
    if value.requires_grad:
        value.backward()
    return value.item(), x.grad, metrics


def share_search(mode, is_weights, contribution="gradient"):
    """What bapo.py finds on the same tokens, with a target that it meets inside the grid; and that search."""
    log_prob, old, advantages, mask, is_weight = batch()
    weights = bapo.token_weights(mask, MODES[mode]) * (is_weight if is_weights else 1)
    search = bapo.ClipSearch(low_start=0.8, low_step=0.01, contribution=contribution)
    rho_start = bapo.search_clip_bounds(log_prob - old, advantages, weights, search).rho_start.item()
    search = replace(search, rho0=rho_start + 0.01)
    return bapo.search_clip_bounds(log_prob - old, advantages, weights, search), search


def as_config(search, **options):
    return BapoLossConfig(**{field.name: getattr(search, field.name) for field in fields(search)}, **options)


# ---------------------------------------------------------------- against verl's own loss
@pytest.mark.parametrize("is_weights", [False, True])
@pytest.mark.parametrize("info", [{}, GLOBAL], ids=["micro-batch", "global"])
@pytest.mark.parametrize("mode", MODES)
def test_fixed_bounds_equal_verls_own_clipped_loss(mode, info, is_weights):
    fixed = as_config(bapo.ClipSearch.fixed(0.8, 1.28))
    config = with_loss(fixed, clip_ratio_low=0.2, clip_ratio_high=0.28, clip_ratio_c=1e9)
    config.global_batch_info.update(info)
    ours, theirs = (run(config, mode, is_weights=is_weights, loss=name) for name in ("bapo", "vanilla"))
    assert ours[0] == pytest.approx(theirs[0], rel=1e-5)
    torch.testing.assert_close(ours[1], theirs[1], rtol=1e-5, atol=1e-9)
    for name in ("actor/pg_clipfrac", "actor/ppo_kl"):
        assert ours[2][name] == pytest.approx(theirs[2][name], rel=1e-5) and ours[2][name] != 0
    assert ours[2]["actor/bapo_low"] == np.float32(0.8) and ours[2]["actor/bapo_high"] == np.float32(1.28)


def test_verls_clip_options_do_nothing():
    search = share_search("token-mean", False)[1]
    options = {"clip_ratio": 0.01, "clip_ratio_low": 0.01, "clip_ratio_high": 0.01, "clip_ratio_c": 1.01}
    first, second = (run(with_loss(as_config(search), **given), "token-mean") for given in ({}, options))
    assert first[0] == second[0] and torch.equal(first[1], second[1]) and first[2] == second[2]


# ---------------------------------------------------------------- against bapo.py
@pytest.mark.parametrize("contribution", ["surrogate", "gradient"])
@pytest.mark.parametrize("is_weights", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_bounds_are_those_of_bapo_on_the_same_tokens(mode, is_weights, contribution):
    found, search = share_search(mode, is_weights, contribution)
    assert 1.2 < found.high < 3.0 or 0.8 < found.low < 0.9
    for info in ({}, GLOBAL):  # the constants of the whole mini-batch cancel in a share
        config = with_loss(as_config(search))
        config.global_batch_info.update(info)
        metrics = run(config, mode, is_weights=is_weights)[2]
        for name, value in found._asdict().items():
            assert metrics[f"actor/bapo_{name}"] == pytest.approx(float(value), rel=1e-6), name
    log_prob, old, advantages, mask, _ = batch()
    expected = bapo.diagnostics(log_prob - old, advantages, mask, found)
    for name in ("clip_fraction_high", "clip_fraction_low"):
        assert metrics[f"actor/bapo_{name}"] == expected[name] > 0


def test_bfloat16_log_probs_are_subtracted_in_float32_and_no_gradient_is_needed():
    config = with_loss(as_config(share_search("token-mean", True)[1]))
    low, high = (
        run(config, "token-mean", is_weights=True, cast=cast)
        for cast in (torch.Tensor.bfloat16, lambda x: x.bfloat16().float())
    )
    assert low[0] == high[0] and low[2] == high[2]
    with torch.no_grad():
        assert run(config, "token-mean", is_weights=True)[0] != 0


def test_the_batch_tells_the_weights_apart():
    shares = [
        share_search(mode, w)[0].rho_start.item() for mode in ("token-mean", "seq-mean-token-mean") for w in (False, True)
    ]
    assert np.diff(sorted(shares)).min() > 1e-3


# ---------------------------------------------------------------- inside verl
def jagged(rows):
    return torch.nested.as_nested_tensor(list(rows), layout=torch.jagged)


def pad(rows):
    return torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True)


class Tokens:
    """Six responses of a softmax policy with logits [position, 11]; prompts of unequal length, so a wrong alignment shows."""

    def __init__(self):
        g = torch.Generator().manual_seed(0)
        self.prompts, self.lengths = [1, 2, 3, 1, 2, 3], [4, 2, 5, 9, 12, 7]
        self.advantages = torch.tensor([1.0, 1.0, 1.0, -1.0, -1.0, -1.0])
        self.mask = pad(torch.ones(n) for n in self.lengths)
        self.start = torch.randn(15, 11, generator=g)
        self.ids = [torch.randint(11, (p + n,), generator=g) for p, n in zip(self.prompts, self.lengths, strict=True)]
        self.old = [self.log_probs(self.start, i)[self.prompts[i] - 1 : -1].clone() for i in range(6)]

    def log_probs(self, logits, i):
        """Of the token that follows each position of sequence i, as verl's engines return them; the last one's is unused."""
        return logits[: len(self.ids[i])].log_softmax(-1).gather(1, self.ids[i].roll(-1)[:, None]).squeeze(1)

    def verls_loss(self, config, logits, part):
        data = {
            "prompts": jagged(self.ids[i][: self.prompts[i]] for i in part),
            "responses": jagged(self.ids[i][self.prompts[i] :] for i in part),
            "response_mask": jagged(torch.ones(self.lengths[i], dtype=torch.long) for i in part),
            "old_log_probs": jagged(self.old[i] for i in part),
            "advantages": jagged(self.advantages[i].expand(self.lengths[i]) for i in part),
        }
        info = {"dp_size": 1, "batch_num_tokens": sum(self.lengths), "global_batch_size": 6}
        output = {"log_probs": jagged(self.log_probs(logits, i) for i in part)}
        loss, metrics = ppo_loss(config, output, tu.get_tensordict(data, info))
        return loss, {name: metric.aggregate() for name, metric in metrics.items()}

    def our_loss(self, search, logits, part):
        log_probs = pad(self.log_probs(logits, i)[self.prompts[i] - 1 : -1] for i in part)
        t = log_probs.shape[1]
        weights = bapo.token_weights(self.mask, "sequence-mean")[part, :t]
        old = pad(self.old[i] for i in part)
        return bapo.bapo_loss(log_probs, old, self.advantages[part], self.mask[part, :t], search, weights=weights)


def test_updates_through_verls_config_and_ppo_loss_equal_those_of_bapo_loss():
    """Six updates of three micro-batches each."""
    assert len(OVERRIDES) == 3
    more = [
        f"{SECTION}.low_step=0.05",
        f"{SECTION}.may_empty=True",
        "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean",
    ]
    config = actor_config(*OVERRIDES[2:], *more)
    search = config.policy_loss.clip_search()
    assert search == bapo.ClipSearch(rho0=0.45, low_step=0.05, may_empty=True)

    tokens, seen = Tokens(), set()
    theirs, ours = (tokens.start.clone().requires_grad_() for _ in range(2))
    optimizers = [torch.optim.SGD([logits], lr=3.0) for logits in (theirs, ours)]
    for _ in range(6):
        for part in ([0, 3], [1, 4], [2, 5]):
            loss, metrics = tokens.verls_loss(config, theirs, part)
            expected, found = tokens.our_loss(search, ours, part)
            (loss + expected).backward()
            assert loss.item() == pytest.approx(expected.item(), rel=1e-5, abs=1e-7)
            bounds = metrics["actor/bapo_low"], metrics["actor/bapo_high"]
            assert bounds == (found["low"].item(), found["high"].item())
            seen.add(bounds)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    torch.testing.assert_close(theirs, ours, rtol=1e-5, atol=1e-6)
    assert len(seen) > 3 and (theirs - tokens.start).abs().max() > 0.5


# ---------------------------------------------------------------- ranks
def _rank(rank, store, results):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    mask = batch()[3]
    rows = slice(0, 5) if rank == 0 else slice(5, 14)
    for mode in MODES:
        for reduce in (True, False):
            config = with_loss(as_config(share_search(mode, True)[1], reduce_over_ranks=reduce))
            config.global_batch_info.update(dp_size=2, batch_num_tokens=mask.sum().item(), global_batch_size=len(mask))
            loss, gradient, metrics = run(config, mode, rows, is_weights=True)
            results[rank, mode, reduce] = loss, gradient.numpy(), metrics
    dist.destroy_process_group()


def test_two_ranks_search_on_their_union(tmp_path):
    with mp.Manager() as manager:
        results = manager.dict()
        mp.spawn(_rank, (str(tmp_path / "store"), results), nprocs=2)
        results = dict(results)
    for mode in MODES:
        loss, gradient, metrics = run(with_loss(as_config(share_search(mode, True)[1])), mode, is_weights=True)
        ranks = [results[rank, mode, True] for rank in (0, 1)]
        for name in ("low", "high", "rho", "rho_start", "reached"):
            assert [rank[2][f"actor/bapo_{name}"] for rank in ranks] == pytest.approx([metrics[f"actor/bapo_{name}"]] * 2)
        # verl's ranks average gradients, and losses for the log.
        assert sum(rank[0] for rank in ranks) / 2 == pytest.approx(loss, rel=1e-5)
        np.testing.assert_allclose(np.concatenate([rank[1] for rank in ranks]) / 2, gradient, rtol=1e-5, atol=1e-9)
        alone = [results[rank, mode, False][2]["actor/bapo_high"] for rank in (0, 1)]
        assert alone != [metrics["actor/bapo_high"]] * 2


@pytest.mark.parametrize(
    "options, named",
    [
        (["pipeline_model_parallel_size=2"], "pipeline_model_parallel_size"),
        (["dynamic_context_parallel=True", "max_seqlen_per_dp_cp_rank=64"], "dynamic_context_parallel"),
    ],
)
def test_ranks_that_do_not_all_call_the_loss_equally_are_refused(options, named, monkeypatch):
    options = [f"actor_rollout_ref.actor.megatron.{option}" for option in options]
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "all_reduce", lambda *a, **k: None)
    run(actor_config("model_engine=megatron"), "token-mean")
    with pytest.raises(ValueError, match=f"{named} must be.*reduce_over_ranks"):
        run(actor_config("model_engine=megatron", *options), "token-mean")
    run(actor_config("model_engine=megatron", *options, f"{SECTION}.reduce_over_ranks=False"), "token-mean")


# ---------------------------------------------------------------- errors
def test_defaults_are_those_of_the_search():
    """And BapoLossConfig has all of them: nothing is left to another default."""
    assert BapoLossConfig().clip_search() == bapo.ClipSearch() == actor_config().policy_loss.clip_search()
    assert {field.name for field in fields(bapo.ClipSearch)} <= {field.name for field in fields(BapoLossConfig)}


@pytest.mark.parametrize(
    "override, named", [("rho0=1.5", "rho0"), ("high_step=0.07", "high_step"), ("contribution=eq8", "contribution")]
)
def test_a_wrong_search_is_refused_when_verl_builds_its_config(override, named):
    with pytest.raises(InstantiationException, match=f"ValueError.*{named}"):
        actor_config(f"{SECTION}.{override}")


def test_a_config_that_would_run_another_loss_is_refused():
    with pytest.raises(InstantiationException, match="loss_mode must be 'bapo'"):
        actor_config("actor_rollout_ref.actor.policy_loss.loss_mode=vanilla")
    with pytest.raises(ValueError, match="_target_"):
        run(with_loss(verl_bapo.PolicyLossConfig()), "token-mean")
    with pytest.raises(ValueError, match="loss_agg_mode"):
        run(actor_config(), "mean")
