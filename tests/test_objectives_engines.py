"""objectives.py against the losses of TRL 1.16 and verl 0.9.1, each skipped unless installed.

Equal weights are token_weights' token-mean and sequence-mean. Where an engine differs by design, the objective's docstring says
so and the last test shows it.
"""

import types
from collections import defaultdict

import pytest
import torch

import bapo
from support.objectives import OBJECTIVES


def batch(n=12, t=18, seed=0, spread=0.5, per_response=True):
    """log_probs, rollout_log_probs, advantages, mask; no response is empty, and some tokens lie at r = 1."""
    g = torch.Generator().manual_seed(seed)
    rollout = -3 * torch.rand(n, t, generator=g) - 1e-3
    log_probs = rollout + spread * torch.randn(n, t, generator=g) * (torch.rand(n, t, generator=g) < 0.9)
    advantages = torch.randn(n, generator=g) if per_response else torch.randn(n, t, generator=g)
    return log_probs, rollout, advantages, torch.arange(t) < torch.randint(1, t + 1, (n, 1), generator=g)


def ours(name, tokens, aggregation, **options):
    log_probs, rollout, advantages, mask = tokens
    x = log_probs.clone().requires_grad_()
    weights = bapo.token_weights(mask, aggregation)
    loss = (weights * OBJECTIVES[name](x, rollout, advantages, mask, **options)).sum()
    loss.backward()
    return loss.item(), x.grad


def assert_equal(found, expected):
    assert found[0] == pytest.approx(expected[0], rel=1e-5, abs=1e-7)
    torch.testing.assert_close(found[1], expected[1], rtol=1e-5, atol=1e-8)
    assert expected[1].count_nonzero() > 20


# ---------------------------------------------------------------- TRL
def trls(tokens, loss_type, aggregation, level="token", **options):
    """GRPOTrainer._compute_loss itself, on a stand-in for the trainer that hands it these log-probs."""
    trl = pytest.importorskip("trl")
    from accelerate import Accelerator

    log_probs, rollout, advantages, mask = tokens
    x = log_probs.clone().requires_grad_()
    entropies = torch.ones_like(x)
    args = types.SimpleNamespace(delta=None, use_bias_correction_kl=False, steps_per_generation=1, **options)
    trainer = types.SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (x, entropies, None),
        aux_loss_enabled=False, top_entropy_quantile=1.0, off_policy_mask_threshold=None, importance_sampling_level=level,
        beta=0.0, loss_type=loss_type, args=args, use_vllm=False, _entropy_bonus_enabled=False, use_adaptive_entropy=False,
        epsilon_low=options.get("epsilon_low", 0.2), epsilon_high=options.get("epsilon_high", 0.2),
        current_gradient_accumulation_steps=1, max_completion_length=mask.shape[1], model=torch.nn.Linear(1, 1),
        accelerator=Accelerator(cpu=True), _metrics={"train": defaultdict(list)},
    )  # fmt: skip
    inputs = {
        "prompt_ids": torch.zeros(len(x), 1, dtype=torch.long), "prompt_mask": torch.ones(len(x), 1, dtype=torch.long),
        "completion_ids": torch.zeros(x.shape, dtype=torch.long), "completion_mask": mask.long(),
        "advantages": advantages, "old_per_token_logps": rollout, "num_items_in_batch": mask.sum(),
    }  # fmt: skip
    loss = trl.GRPOTrainer._compute_loss(trainer, None, inputs)
    loss.backward()
    return loss.item(), x.grad


@pytest.mark.parametrize("spread", [0.02, 0.5, 2.0])
@pytest.mark.parametrize(
    "name, options, loss_type, aggregation, theirs",
    [
        ("ppo", {}, "grpo", "sequence-mean", {}),
        ("ppo", {}, "dapo", "token-mean", {}),
        ("clip-higher", {}, "bnpo", "token-mean", dict(epsilon_high=0.28)),
        ("cispo", {}, "cispo", "token-mean", dict(epsilon_high=5.0)),
        ("truncated-is", dict(cap=1.3), "cispo", "token-mean", dict(epsilon_high=1.3)),
        ("sapo", {}, "sapo", "sequence-mean", dict(sapo_temperature_pos=1.0, sapo_temperature_neg=1.05)),
        ("gspo", {}, "grpo", "sequence-mean", dict(level="sequence", epsilon_low=3e-4, epsilon_high=4e-4)),
        ("gspo", dict(low=0.8, high=1.2), "grpo", "sequence-mean", dict(level="sequence")),
    ],
)
def test_trls_own_loss(name, options, loss_type, aggregation, theirs, spread):
    for per_response in (True, False) if name != "gspo" else (True,):
        tokens = batch(spread=spread, per_response=per_response)
        assert_equal(ours(name, tokens, aggregation, **options), trls(tokens, loss_type, aggregation, **theirs))


# ---------------------------------------------------------------- verl
def verls(tokens, mode, aggregation, **options):
    """The registered loss, called by keyword as verl's workers call it."""
    pytest.importorskip("verl")
    from verl.trainer.ppo.core_algos import get_policy_loss_fn
    from verl.workers.config import FSDPActorConfig

    log_probs, rollout, advantages, mask = tokens
    x = log_probs.clone().requires_grad_()
    policy_loss = options.pop("policy_loss", {})
    config = FSDPActorConfig(strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, **options)
    for key, value in policy_loss.items():
        object.__setattr__(config.policy_loss, key, value)
    loss, _ = get_policy_loss_fn(mode)(
        old_log_prob=rollout,
        log_prob=x,
        advantages=advantages if advantages.dim() == 2 else advantages[:, None].expand(x.shape),
        response_mask=mask.float(),
        loss_agg_mode={"sequence-mean": "seq-mean-token-mean", "token-mean": "token-mean"}[aggregation],
        config=config,
    )
    loss.backward()
    return loss.item(), x.grad


@pytest.mark.parametrize("spread", [0.02, 0.5, 2.0])
@pytest.mark.parametrize("aggregation", ["token-mean", "sequence-mean"])
@pytest.mark.parametrize(
    "name, options, mode, theirs",
    [
        ("ppo", {}, "vanilla", dict(clip_ratio_c=1e9)),
        ("clip-higher", {}, "vanilla", dict(clip_ratio_high=0.28, clip_ratio_c=1e9)),
        ("dual-clip", {}, "vanilla", {}),
        ("dual-clip", dict(low=0.9, cap=1.7), "vanilla", dict(clip_ratio_low=0.1, clip_ratio_c=1.7)),
        ("dppo-tv", {}, "dppo_tv", dict(clip_ratio_low=0.15, clip_ratio_high=0.15, clip_ratio_c=20.0)),
        ("dppo-tv", dict(delta=0.05, cap=3.0), "dppo_tv", dict(clip_ratio_low=0.05, clip_ratio_high=0.05)),
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
    for per_response in (True, False) if name != "gspo" else (True,):
        tokens = batch(spread=spread, per_response=per_response)
        assert_equal(ours(name, tokens, aggregation, **options), verls(tokens, mode, aggregation, **theirs))


def test_where_verl_differs():
    """GSPO with several advantages in a response: verl keeps a gradient at its own token. CISPO: verl clips from below too."""
    tokens = batch(per_response=False)
    found = ours("gspo", tokens, "sequence-mean", low=0.8, high=1.2)
    theirs = verls(tokens, "gspo", "sequence-mean")
    assert found[0] == pytest.approx(theirs[0], rel=1e-5)
    assert (found[1] - theirs[1]).abs().max() > 1e-3
    theirs = verls(tokens, "cispo", "token-mean", clip_ratio_low=0.2, clip_ratio_high=4.0)
    below = (tokens[0] - tokens[1] < -0.23) & tokens[3]
    difference = (ours("cispo", tokens, "token-mean")[1] - theirs[1]).abs()
    assert (difference[below] > 1e-4).sum() > below.sum() / 2 and difference[~below & (tokens[0] > tokens[1])].max() < 1e-7
