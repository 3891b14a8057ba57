"""support/objectives.py against the losses of TRL 1.16 and verl 0.9.1, each skipped if missing.

Both sides weigh tokens by token-mean or by sequence-mean. Where an engine differs by design, the
objective's docstring says so, and the last tests show it.
"""

import types
from collections import defaultdict
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

import bapo
from support.objectives import OBJECTIVES


class Tokens(NamedTuple):
    log_probs: Tensor  # [N, T]
    rollout_log_probs: Tensor  # [N, T]
    advantages: Tensor  # [N], or [N, T] if not per response
    mask: Tensor  # bool [N, T]


class Result(NamedTuple):
    loss: float
    gradient: Tensor  # [N, T], at log_probs


def make_tokens(spread=0.5, per_response=True):
    """No response is empty, and some tokens lie at r = 1."""
    n = 12
    t = 18
    g = torch.Generator().manual_seed(0)
    rollout_log_probs = -3 * torch.rand(n, t, generator=g) - 1e-3
    moved = torch.rand(n, t, generator=g) < 0.9
    log_ratio = spread * torch.randn(n, t, generator=g) * moved
    advantages = torch.randn(n, generator=g) if per_response else torch.randn(n, t, generator=g)
    lengths = torch.randint(1, t + 1, (n, 1), generator=g)
    mask = torch.arange(t) < lengths
    return Tokens(rollout_log_probs + log_ratio, rollout_log_probs, advantages, mask)


def ours(name, tokens, aggregation, **options):
    x = tokens.log_probs.clone().requires_grad_()
    losses = OBJECTIVES[name](
        x, tokens.rollout_log_probs, tokens.advantages, tokens.mask, **options
    )
    loss = (bapo.token_weights(tokens.mask, aggregation) * losses).sum()
    loss.backward()
    return Result(loss.item(), x.grad)


def assert_equal(result, expected):
    assert result.loss == pytest.approx(expected.loss, rel=1e-5, abs=1e-7)
    torch.testing.assert_close(result.gradient, expected.gradient, rtol=1e-5, atol=1e-8)
    assert expected.gradient.count_nonzero() > 20


# ---------------------------------------------------------------- TRL
def trls(tokens, loss_type, level="token", **options):
    """GRPOTrainer._compute_loss, on a stand-in for the trainer that hands it these log-probs."""
    trl = pytest.importorskip("trl")
    from accelerate import Accelerator

    x = tokens.log_probs.clone().requires_grad_()
    n, t = x.shape
    trainer = types.SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (x, torch.ones_like(x), None),
        loss_type=loss_type,
        importance_sampling_level=level,
        epsilon_low=options.get("epsilon_low", 0.2),
        epsilon_high=options.get("epsilon_high", 0.2),
        args=types.SimpleNamespace(
            delta=None, use_bias_correction_kl=False, steps_per_generation=1, **options
        ),
        beta=0.0,
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        use_vllm=False,
        use_adaptive_entropy=False,
        _entropy_bonus_enabled=False,
        current_gradient_accumulation_steps=1,
        max_completion_length=t,
        model=torch.nn.Linear(1, 1),
        accelerator=Accelerator(cpu=True),
        _metrics={"train": defaultdict(list)},
    )
    inputs = {
        "prompt_ids": torch.zeros(n, 1, dtype=torch.long),
        "prompt_mask": torch.ones(n, 1, dtype=torch.long),
        "completion_ids": torch.zeros(n, t, dtype=torch.long),
        "completion_mask": tokens.mask.long(),
        "advantages": tokens.advantages,
        "old_per_token_logps": tokens.rollout_log_probs,
        "num_items_in_batch": tokens.mask.sum(),
    }
    loss = trl.GRPOTrainer._compute_loss(trainer, None, inputs)
    loss.backward()
    return Result(loss.item(), x.grad)


@pytest.mark.parametrize("spread", [0.02, 0.5, 2.0])
@pytest.mark.parametrize(
    "name, options, aggregation, loss_type, theirs",
    [
        ("ppo", {}, "sequence-mean", "grpo", {}),
        ("ppo", {}, "token-mean", "dapo", {}),
        ("clip-higher", {}, "token-mean", "bnpo", dict(epsilon_high=0.28)),
        ("cispo", {}, "token-mean", "cispo", dict(epsilon_high=5.0)),
        ("truncated-is", dict(cap=1.3), "token-mean", "cispo", dict(epsilon_high=1.3)),
        (
            "sapo",
            {},
            "sequence-mean",
            "sapo",
            dict(sapo_temperature_pos=1.0, sapo_temperature_neg=1.05),
        ),
        (
            "gspo",
            {},
            "sequence-mean",
            "grpo",
            dict(level="sequence", epsilon_low=3e-4, epsilon_high=4e-4),
        ),
        ("gspo", dict(low=0.8, high=1.2), "sequence-mean", "grpo", dict(level="sequence")),
    ],
)
def test_trls_own_loss(name, options, aggregation, loss_type, theirs, spread):
    for per_response in (True, False):
        if name == "gspo" and not per_response:
            continue
        tokens = make_tokens(spread, per_response)
        assert_equal(ours(name, tokens, aggregation, **options), trls(tokens, loss_type, **theirs))


# ---------------------------------------------------------------- verl
VERL_AGGREGATIONS = {"sequence-mean": "seq-mean-token-mean", "token-mean": "token-mean"}


def verls(tokens, mode, aggregation, policy_loss=None, **options):
    """The registered loss, called by keyword as verl's workers call it.

    policy_loss: what its config holds in that section; options: the rest of the actor's config.
    """
    pytest.importorskip("verl")
    from verl.trainer.ppo.core_algos import get_policy_loss_fn
    from verl.workers.config import FSDPActorConfig

    config = FSDPActorConfig(
        strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, **options
    )
    for key, value in (policy_loss or {}).items():
        object.__setattr__(config.policy_loss, key, value)  # verl's configs are frozen

    x = tokens.log_probs.clone().requires_grad_()
    advantages = tokens.advantages
    if advantages.dim() == 1:
        advantages = advantages[:, None].expand(x.shape)
    loss, _ = get_policy_loss_fn(mode)(
        old_log_prob=tokens.rollout_log_probs,
        log_prob=x,
        advantages=advantages,
        response_mask=tokens.mask.float(),
        loss_agg_mode=VERL_AGGREGATIONS[aggregation],
        config=config,
    )
    loss.backward()
    return Result(loss.item(), x.grad)


@pytest.mark.parametrize("spread", [0.02, 0.5, 2.0])
@pytest.mark.parametrize("aggregation", ["token-mean", "sequence-mean"])
@pytest.mark.parametrize(
    "name, options, mode, theirs",
    [
        ("ppo", {}, "vanilla", dict(clip_ratio_c=1e9)),
        ("clip-higher", {}, "vanilla", dict(clip_ratio_high=0.28, clip_ratio_c=1e9)),
        ("dual-clip", {}, "vanilla", {}),
        (
            "dual-clip",
            dict(low=0.9, cap=1.7),
            "vanilla",
            dict(clip_ratio_low=0.1, clip_ratio_c=1.7),
        ),
        (
            "dppo-tv",
            {},
            "dppo_tv",
            dict(clip_ratio_low=0.15, clip_ratio_high=0.15, clip_ratio_c=20.0),
        ),
        (
            "dppo-tv",
            dict(delta=0.05, cap=3.0),
            "dppo_tv",
            dict(clip_ratio_low=0.05, clip_ratio_high=0.05),
        ),
        ("sapo", {}, "sapo", {}),
        ("cispo", {}, "cispo", dict(clip_ratio_low=10.0, clip_ratio_high=4.0)),
        ("gspo", {}, "gspo", dict(clip_ratio_low=3e-4, clip_ratio_high=4e-4)),
        ("gspo", dict(low=0.8, high=1.2), "gspo", {}),
        ("opmd", {}, "dro", dict(policy_loss=dict(dro_beta=0.1))),
        ("opmd", dict(tau=2.0), "dro", dict(policy_loss=dict(dro_beta=2.0))),
    ],
)
def test_verls_own_loss(name, options, mode, theirs, aggregation, spread):
    if mode == "sapo" and aggregation == "token-mean":
        pytest.skip("verl's sapo averages by sequence whatever it is asked for")
    for per_response in (True, False):
        if name == "gspo" and not per_response:
            continue
        tokens = make_tokens(spread, per_response)
        expected = verls(tokens, mode, aggregation, **theirs)
        assert_equal(ours(name, tokens, aggregation, **options), expected)


def test_verls_gspo_keeps_a_tokens_gradient_at_that_token():
    """The loss is the same; the gradient is not, where a response has several advantages."""
    tokens = make_tokens(per_response=False)
    result = ours("gspo", tokens, "sequence-mean", low=0.8, high=1.2)
    theirs = verls(tokens, "gspo", "sequence-mean")
    assert result.loss == pytest.approx(theirs.loss, rel=1e-5)
    assert (result.gradient - theirs.gradient).abs().max() > 1e-3


def test_verls_cispo_clips_the_ratio_from_below_too():
    tokens = make_tokens(per_response=False)
    theirs = verls(tokens, "cispo", "token-mean", clip_ratio_low=0.2, clip_ratio_high=4.0)
    difference = (ours("cispo", tokens, "token-mean").gradient - theirs.gradient).abs()
    log_ratio = tokens.log_probs - tokens.rollout_log_probs
    below = (log_ratio < -0.23) & tokens.mask  # log 0.8 is -0.223
    differs = difference[below] > 1e-4
    assert differs.sum() > below.sum() / 2
    assert difference[log_ratio > 0].max() < 1e-7
