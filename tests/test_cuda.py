"""A GPU against the CPU. DEVICE=cpu python -m pytest tests/test_cuda.py: the same where there is none."""

import os
from dataclasses import replace

import pytest
import torch
from test_train import go

import bapo
import rollout
import support.models
from support import objectives

DEVICE = os.environ.get("DEVICE", "cuda")
pytestmark = pytest.mark.skipif(DEVICE != "cpu" and not torch.cuda.is_available(), reason="needs a GPU")
WAITS = "error" if DEVICE != "cpu" else "default"


def some(seed: int, rows: int = 24, tokens: int = 40) -> tuple:
    """log_probs, log_probs of the rollout policy, advantages and mask; every seventh case has no negative, or no positive."""
    g = torch.Generator().manual_seed(seed)
    old = -torch.rand(rows, tokens, generator=g)
    advantages = torch.randn(rows, generator=g)
    advantages = {0: advantages.abs(), 3: -advantages.abs()}.get(seed % 7, advantages)
    mask = torch.arange(tokens) < torch.randint(1, tokens + 1, (rows, 1), generator=g)
    return old + 0.2 * torch.randn(rows, tokens, generator=g), old, advantages, mask


def test_loss_gradient_bounds_and_metrics_are_those_of_the_cpu():
    """Kills: a sum in another dtype, a tensor that is made on the CPU."""
    for seed in range(50):
        found = []
        for device in ("cpu", DEVICE):
            log_probs, old, advantages, mask = (tensor.to(device) for tensor in some(seed))
            log_probs.requires_grad_()
            search = replace((bapo.ClipSearch(), bapo.GATE, bapo.PAPER_MAIN)[seed % 3], rho0=0.45)
            loss, metrics = bapo.bapo_loss(log_probs, old, advantages, mask, search)
            loss.backward()
            assert loss.device.type == torch.device(device).type
            found.append({"loss": loss, "gradient": log_probs.grad} | metrics)
        for name, value in found[0].items():
            torch.testing.assert_close(found[1][name].detach().cpu(), value.detach(), rtol=1e-4, atol=1e-6, equal_nan=True)


def test_the_losses_of_the_neighbours_are_those_of_the_cpu():
    log_probs, old, advantages, mask = some(1)
    further = {name: old + 0.05 for name in ("start_log_probs", "proximal_log_probs")} | {"ages": torch.zeros_like(old).long()}
    further |= {"entropy": -old, "rollout_entropy": -old}
    for name in objectives.OBJECTIVES:
        if name not in ("clip-higher", "balanced"):
            of_device = []
            for device in ("cpu", DEVICE):
                inputs = [tensor.to(device) for tensor in (log_probs, old, advantages, mask)]
                more = {key: value.to(device) for key, value in further.items()}
                of_device.append(objectives.with_inputs(name, *inputs, bounds=None, **more).cpu())
            torch.testing.assert_close(*of_device, rtol=1e-4, atol=1e-6, msg=name)


def test_the_search_never_makes_the_host_wait():
    log_probs, old, advantages, mask = (tensor.to(DEVICE) for tensor in some(1))
    weights = bapo.token_weights(mask)
    torch.cuda.set_sync_debug_mode(WAITS) if DEVICE != "cpu" else None
    try:
        found = bapo.search_clip_bounds(log_probs - old, advantages, weights, bapo.GATE)
    finally:
        torch.cuda.set_sync_debug_mode("default") if DEVICE != "cpu" else None
    cpu = [tensor.cpu() for tensor in (log_probs - old, advantages, weights)]
    assert found.low.item() == pytest.approx(bapo.search_clip_bounds(*cpu, bapo.GATE).low.item())


def test_log_probs_are_those_of_the_cpu(policy):
    model, tokenizer = support.models.load_policy(policy, "cpu", False)
    torch.manual_seed(0)
    rollouts = rollout.sample_rollouts(model, tokenizer, ["348:44=", "1:"], group_size=9, max_new_tokens=9, temperature=0.9)
    moved, parts = support.models.load_policy(policy, DEVICE, True)[0], rollouts.to(DEVICE).micro_batches(60)
    for values, expected in zip(rollout.recorded_log_probs(moved, parts, 0.9), (rollouts.log_probs, rollouts.entropy)):
        torch.testing.assert_close(values.cpu(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("lora_rank", [0, 4])
def test_runs_train_with_first_ratios_of_one_and_go_on_after_a_crash(tmp_path, policy, precision, lora_rank):
    options = dict(device=DEVICE, precision=precision, lora_rank=lora_rank, micro_batch_tokens=99, evaluate_every=2)
    lines = go(tmp_path / "whole", policy, **options)
    assert all(abs(line["ratio_mean_positive"] - 1) < 0.03 for line in lines if line["update"] == 1)
    assert lines[-1]["held_out_mean@16"] >= 0 and any(line["kl"] > 1e-6 for line in lines)
    go(tmp_path / "in two", policy, steps=2, **options)
    again = go(tmp_path / "in two", policy, **options)
    assert len(again) == len(lines) and again[-1]["entropy"] == pytest.approx(lines[-1]["entropy"], rel=0.2)
