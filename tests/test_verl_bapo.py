"""integrations/verl_bapo.py inside the installed verl: its config, its registry, its ppo_loss.

Skipped without verl.
"""

import functools
import re
from dataclasses import asdict, fields, replace
from typing import NamedTuple

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

# verl's aggregations, and those of bapo.token_weights that have the same share
MODES = {
    "token-mean": "token-mean",
    "token-sum": "token-mean",
    "seq-mean-token-sum": "token-mean",
    "seq-mean-token-sum-norm": "token-mean",
    "seq-mean-token-mean": "sequence-mean",
}
# The docstring's command line: what switches BAPO on, and an example of an option.
OVERRIDES = re.findall(r"^ +(\+?actor_rollout_ref\.\S+)", verl_bapo.__doc__, re.MULTILINE)
SWITCH_ON = OVERRIDES[:2]
EXAMPLE = OVERRIDES[2:]
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


def with_loss(policy_loss, global_batch_info=None, **options):
    config = replace(actor_config(), policy_loss=policy_loss, global_batch_info={}, **options)
    config.global_batch_info.update(global_batch_info or {})
    return config


def as_config(search, **options):
    return BapoLossConfig(**asdict(search), **options)


# ---------------------------------------------------------------- tokens
class Batch(NamedTuple):
    """As verl passes it; [N, T] each."""

    log_prob: torch.Tensor
    old_log_prob: torch.Tensor
    advantages: torch.Tensor
    response_mask: torch.Tensor  # bool
    rollout_is_weights: torch.Tensor


def make_batch():
    n = 14
    t = 23
    g = torch.Generator().manual_seed(3)
    old_log_prob = -3 * torch.rand(n, t, generator=g)
    inside_response = torch.arange(t) < torch.randint(1, t + 1, (n, 1), generator=g)
    not_of_a_tool = torch.rand(n, t, generator=g) < 0.9  # verl masks tools' tokens in a response
    mask = inside_response & not_of_a_tool
    return Batch(
        advantages=torch.randn(n, 1, generator=g).expand(n, t) * mask,
        log_prob=old_log_prob + 0.3 * torch.randn(n, t, generator=g),
        old_log_prob=old_log_prob,
        response_mask=mask,
        rollout_is_weights=2 * torch.rand(n, t, generator=g),
    )


class Result(NamedTuple):
    loss: float
    gradient: torch.Tensor | None  # [N, T], at log_prob; None under no_grad
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
    if value.requires_grad:
        value.backward()
    return Result(value.item(), x.grad, metrics)


def search_of_bapo(mode, is_weights, contribution="gradient"):
    """A search whose target is met inside the grid, and what bapo.py finds on the same tokens."""
    batch = make_batch()
    weights = bapo.token_weights(batch.response_mask, MODES[mode])
    if is_weights:
        weights = weights * batch.rollout_is_weights
    inputs = (batch.log_prob - batch.old_log_prob, batch.advantages, weights)
    search = bapo.ClipSearch(low_step=0.01, high_max=3.0, contribution=contribution)
    rho_start = bapo.search_clip_bounds(*inputs, search).rho_start.item()
    search = replace(search, rho0=rho_start + 0.01)
    return search, bapo.search_clip_bounds(*inputs, search)


# ---------------------------------------------------------------- against verl's own loss
@pytest.mark.parametrize("is_weights", [False, True])
@pytest.mark.parametrize("info", [{}, GLOBAL], ids=["micro-batch", "global"])
@pytest.mark.parametrize("mode", MODES)
def test_fixed_bounds_equal_verls_own_clipped_loss(mode, info, is_weights):
    fixed = as_config(bapo.ClipSearch.fixed(0.8, 1.28))
    config = with_loss(fixed, info, clip_ratio_low=0.2, clip_ratio_high=0.28, clip_ratio_c=1e9)
    ours = run(config, mode, is_weights=is_weights)
    theirs = run(config, mode, is_weights=is_weights, loss="vanilla")
    assert ours.loss == pytest.approx(theirs.loss, rel=1e-5)
    torch.testing.assert_close(ours.gradient, theirs.gradient, rtol=1e-5, atol=1e-9)
    for name in ("actor/pg_clipfrac", "actor/ppo_kl"):
        assert ours.metrics[name] == pytest.approx(theirs.metrics[name], rel=1e-5)
        assert ours.metrics[name] != 0
    assert ours.metrics["actor/bapo_low"] == np.float32(0.8)
    assert ours.metrics["actor/bapo_high"] == np.float32(1.28)


def test_verls_clip_options_do_nothing():
    search, _ = search_of_bapo("token-mean", False)
    plain = run(with_loss(as_config(search)), "token-mean")
    narrow = dict(clip_ratio=0.01, clip_ratio_low=0.01, clip_ratio_high=0.01, clip_ratio_c=1.01)
    clipped = run(with_loss(as_config(search), **narrow), "token-mean")
    assert clipped.loss == plain.loss
    assert torch.equal(clipped.gradient, plain.gradient)
    assert clipped.metrics == plain.metrics


# ---------------------------------------------------------------- against bapo.py
@pytest.mark.parametrize("contribution", ["surrogate", "gradient"])
@pytest.mark.parametrize("is_weights", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_bounds_are_those_of_bapo_on_the_same_tokens(mode, is_weights, contribution):
    search, bounds = search_of_bapo(mode, is_weights, contribution)
    high_moved = 1.2 < bounds.high < 3.0
    low_moved = 0.8 < bounds.low < 0.9
    assert high_moved or low_moved
    batch = make_batch()
    log_ratio = batch.log_prob - batch.old_log_prob
    expected = bapo.diagnostics(log_ratio, batch.advantages, batch.response_mask, bounds)
    for info in ({}, GLOBAL):  # the constants of the whole mini-batch cancel in a share
        config = with_loss(as_config(search), info)
        metrics = run(config, mode, is_weights=is_weights).metrics
        for name, value in bounds._asdict().items():
            assert metrics[f"actor/bapo_{name}"] == pytest.approx(float(value), rel=1e-6), name
        for name in ("clip_fraction_high", "clip_fraction_low"):
            assert metrics[f"actor/bapo_{name}"] == expected[name] > 0


def test_bfloat16_log_probs_are_subtracted_in_float32():
    search, _ = search_of_bapo("token-mean", True)
    config = with_loss(as_config(search))

    def rounded(log_probs):
        return log_probs.bfloat16().float()

    low = run(config, "token-mean", is_weights=True, convert=torch.Tensor.bfloat16)
    expected = run(config, "token-mean", is_weights=True, convert=rounded)
    assert low.loss == expected.loss
    assert low.metrics == expected.metrics


def test_no_gradient_is_needed():
    search, _ = search_of_bapo("token-mean", True)
    config = with_loss(as_config(search))
    expected = run(config, "token-mean", is_weights=True)
    with torch.no_grad():
        assert run(config, "token-mean", is_weights=True).loss == expected.loss != 0


def test_the_batch_tells_the_weights_apart():
    shares = []
    for mode in ("token-mean", "seq-mean-token-mean"):
        for is_weights in (False, True):
            _, bounds = search_of_bapo(mode, is_weights)
            shares.append(bounds.rho_start.item())
    assert np.diff(sorted(shares)).min() > 1e-3


# ---------------------------------------------------------------- inside verl
def jagged(rows):
    return torch.nested.as_nested_tensor(list(rows), layout=torch.jagged)


def pad(rows):
    return torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True)


class Responses:
    """Six responses of a softmax policy with logits [position, 11].

    Prompts are of unequal length, so that a wrong alignment shows.
    """

    def __init__(self):
        g = torch.Generator().manual_seed(0)
        self.prompts = [1, 2, 3, 1, 2, 3]  # lengths
        self.lengths = [4, 2, 5, 9, 12, 7]  # of the responses
        self.advantages = torch.tensor([1.0, 1.0, 1.0, -1.0, -1.0, -1.0])
        self.mask = pad(torch.ones(length) for length in self.lengths)
        self.start = torch.randn(15, 11, generator=g)
        self.ids = []
        for prompt, length in zip(self.prompts, self.lengths, strict=True):
            self.ids.append(torch.randint(11, (prompt + length,), generator=g))
        self.old = [self.response_log_probs(self.start, i).clone() for i in range(6)]

    def log_probs(self, logits, i):
        """Of the token that follows each position of sequence i, as verl's engines return them.

        The last one is unused.
        """
        next_ids = self.ids[i].roll(-1)[:, None]
        log_probs = logits[: len(next_ids)].log_softmax(-1)
        return log_probs.gather(1, next_ids).squeeze(1)

    def response_log_probs(self, logits, i):
        return self.log_probs(logits, i)[self.prompts[i] - 1 : -1]

    def verls_loss(self, config, logits, part):
        """verl's ppo_loss on the responses of `part`, and its metrics."""
        prompts = []
        responses = []
        masks = []
        advantages = []
        for i in part:
            prompts.append(self.ids[i][: self.prompts[i]])
            responses.append(self.ids[i][self.prompts[i] :])
            masks.append(torch.ones(self.lengths[i], dtype=torch.long))
            advantages.append(self.advantages[i].expand(self.lengths[i]))
        data = {
            "prompts": jagged(prompts),
            "responses": jagged(responses),
            "response_mask": jagged(masks),
            "old_log_probs": jagged(self.old[i] for i in part),
            "advantages": jagged(advantages),
        }
        info = {"dp_size": 1, "batch_num_tokens": sum(self.lengths), "global_batch_size": 6}
        output = {"log_probs": jagged(self.log_probs(logits, i) for i in part)}
        loss, metrics = ppo_loss(config, output, tu.get_tensordict(data, info))
        return loss, {name: metric.aggregate() for name, metric in metrics.items()}

    def our_loss(self, search, logits, part):
        """bapo_loss on the same responses."""
        log_probs = pad(self.response_log_probs(logits, i) for i in part)
        old = pad(self.old[i] for i in part)
        columns = slice(log_probs.shape[1])
        return bapo.bapo_loss(
            log_probs,
            old,
            self.advantages[part],
            self.mask[part, columns],
            search,
            weights=bapo.token_weights(self.mask, "sequence-mean")[part, columns],
        )


def test_updates_through_verls_config_and_ppo_loss_equal_those_of_bapo_loss():
    """Six updates of three micro-batches each."""
    assert len(EXAMPLE) == 1
    config = actor_config(
        *EXAMPLE,
        f"{SECTION}.low_step=0.05",
        f"{SECTION}.high_max=3.0",
        f"{SECTION}.may_empty=True",
        "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean",
    )
    search = config.policy_loss.clip_search()
    assert search == bapo.ClipSearch(rho0=0.45, low_step=0.05, high_max=3.0, may_empty=True)

    responses = Responses()
    theirs = responses.start.clone().requires_grad_()
    ours = responses.start.clone().requires_grad_()
    optimizer = torch.optim.SGD([theirs, ours], lr=3.0)
    all_bounds = set()
    for _ in range(6):
        for part in ([0, 3], [1, 4], [2, 5]):
            loss, metrics = responses.verls_loss(config, theirs, part)
            expected_loss, expected_metrics = responses.our_loss(search, ours, part)
            (loss + expected_loss).backward()
            assert loss.item() == pytest.approx(expected_loss.item(), rel=1e-5, abs=1e-7)
            bounds = (metrics["actor/bapo_low"], metrics["actor/bapo_high"])
            assert bounds == (expected_metrics["low"].item(), expected_metrics["high"].item())
            all_bounds.add(bounds)
        optimizer.step()
        optimizer.zero_grad()
    torch.testing.assert_close(theirs, ours, rtol=1e-5, atol=1e-6)
    assert len(all_bounds) > 3
    assert (theirs - responses.start).abs().max() > 0.5


# ---------------------------------------------------------------- ranks
def train_rank(rank, store, results):
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
        for reduce in (True, False):
            config = with_loss(as_config(search, reduce_over_ranks=reduce), info)
            result = run(config, mode, rows, is_weights=True)
            results[rank, mode, reduce] = (result.loss, result.gradient.numpy(), result.metrics)
    dist.destroy_process_group()


def test_two_ranks_search_on_their_union(tmp_path):
    with mp.Manager() as manager:
        shared = manager.dict()
        mp.spawn(train_rank, (str(tmp_path / "store"), shared), nprocs=2)
        results = {key: Result(*value) for key, value in shared.items()}
    for mode in MODES:
        search, _ = search_of_bapo(mode, True)
        whole = run(with_loss(as_config(search)), mode, is_weights=True)
        first = results[0, mode, True]
        second = results[1, mode, True]
        for name in bapo.ClipBounds._fields:
            expected = pytest.approx(whole.metrics[f"actor/bapo_{name}"])
            assert first.metrics[f"actor/bapo_{name}"] == expected
            assert second.metrics[f"actor/bapo_{name}"] == expected
        # verl's ranks average gradients, and losses for the log.
        assert (first.loss + second.loss) / 2 == pytest.approx(whole.loss, rel=1e-5)
        gradient = np.concatenate([first.gradient, second.gradient]) / 2
        np.testing.assert_allclose(gradient, whole.gradient, rtol=1e-5, atol=1e-9)

        alone = [results[rank, mode, False].metrics["actor/bapo_high"] for rank in (0, 1)]
        assert alone != [whole.metrics["actor/bapo_high"]] * 2


@pytest.mark.parametrize(
    "options, named",
    [
        (["pipeline_model_parallel_size=2"], "pipeline_model_parallel_size"),
        (
            ["dynamic_context_parallel=True", "max_seqlen_per_dp_cp_rank=64"],
            "dynamic_context_parallel",
        ),
    ],
)
def test_ranks_that_do_not_all_call_the_loss_equally_are_refused(options, named, monkeypatch):
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "all_reduce", lambda *_, **__: None)
    engine = "model_engine=megatron"
    overrides = [f"actor_rollout_ref.actor.megatron.{option}" for option in options]
    alone = f"{SECTION}.reduce_over_ranks=False"
    run(actor_config(engine), "token-mean")
    with pytest.raises(ValueError, match=f"{named} must be.*reduce_over_ranks"):
        run(actor_config(engine, *overrides), "token-mean")
    run(actor_config(engine, *overrides, alone), "token-mean")


# ---------------------------------------------------------------- errors
def test_defaults_are_those_of_the_search():
    """And BapoLossConfig has all of them: nothing is left to another default."""
    assert BapoLossConfig().clip_search() == bapo.ClipSearch()
    assert actor_config().policy_loss.clip_search() == bapo.ClipSearch()
    of_search = {field.name for field in fields(bapo.ClipSearch)}
    assert of_search <= {field.name for field in fields(BapoLossConfig)}


@pytest.mark.parametrize(
    "overrides, named",
    [
        (["rho0=1.5"], "rho0"),
        (["high_step=0.07"], "high_step"),
        (["contribution=eq8"], "contribution"),
        (
            ["low_start=0.2", "low_max=0.2", "high_start=0.28", "high_max=0.28"],
            "ratios, 0.8 and 1.2, not epsilons",
        ),
    ],
)
def test_a_wrong_search_is_refused_when_verl_builds_its_config(overrides, named):
    overrides = [f"{SECTION}.{override}" for override in overrides]
    with pytest.raises(InstantiationException, match=f"ValueError.*{named}"):
        actor_config(*overrides)


def test_a_config_that_would_run_another_loss_is_refused():
    with pytest.raises(InstantiationException, match="loss_mode must be 'bapo'"):
        actor_config("actor_rollout_ref.actor.policy_loss.loss_mode=vanilla")
    with pytest.raises(ValueError, match="_target_"):
        run(with_loss(verl_bapo.PolicyLossConfig()), "token-mean")
    with pytest.raises(ValueError, match="loss_agg_mode"):
        run(actor_config(), "mean")
