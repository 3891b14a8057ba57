"""A GPU against the CPU.

DEVICE=cpu python -m pytest tests/test_cuda.py does the same where there is no GPU.
"""

import os
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from test_train import go
from torch import Tensor

import bapo
import rollout
from support import models, objectives
from support.arms import is_neighbour

# Matrix products repeat on a GPU only with a workspace of a fixed size, set before the first one.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
DEVICE = os.environ.get("DEVICE", "cuda")
pytestmark = pytest.mark.skipif(
    DEVICE != "cpu" and not torch.cuda.is_available(), reason="needs a GPU"
)


class Sample(NamedTuple):
    """What a loss takes, drawn at random."""

    log_probs: Tensor  # [N, T]
    rollout_log_probs: Tensor  # [N, T]
    advantages: Tensor  # [N]
    mask: Tensor  # [N, T] bool

    def to(self, device: str) -> "Sample":
        return Sample(*[tensor.to(device) for tensor in self])

    def log_ratio(self) -> Tensor:
        return self.log_probs - self.rollout_log_probs


def sample(seed: int, responses: int = 24, tokens: int = 40) -> Sample:
    """Of seven seeds one has no negative advantage, and one no positive."""
    generator = torch.Generator().manual_seed(seed)
    rollout_log_probs = -torch.rand(responses, tokens, generator=generator)
    log_probs = rollout_log_probs + 0.2 * torch.randn(responses, tokens, generator=generator)
    advantages = torch.randn(responses, generator=generator)
    if seed % 7 == 0:
        advantages = advantages.abs()
    if seed % 7 == 3:
        advantages = -advantages.abs()
    lengths = torch.randint(1, tokens + 1, (responses, 1), generator=generator)
    return Sample(log_probs, rollout_log_probs, advantages, torch.arange(tokens) < lengths)


def loss_gradient_and_metrics(inputs: Sample, search: bapo.ClipSearch) -> dict[str, Tensor]:
    """All that bapo_loss gives, on the CPU."""
    log_probs = inputs.log_probs.requires_grad_()
    loss, metrics = bapo.bapo_loss(
        log_probs, inputs.rollout_log_probs, inputs.advantages, inputs.mask, search
    )
    loss.backward()
    assert loss.device == inputs.log_probs.device
    values = {"loss": loss, "gradient": log_probs.grad, **metrics}
    return {name: value.detach().cpu() for name, value in values.items()}


@pytest.mark.parametrize("search", [bapo.ClipSearch(), bapo.GATE, bapo.PAPER_MAIN])
def test_loss_gradient_bounds_and_metrics_are_those_of_the_cpu(search):
    """Kills: a sum in another dtype, a tensor that is made on the CPU."""
    search = replace(search, rho0=0.45)
    for seed in range(17):
        expected = loss_gradient_and_metrics(sample(seed), search)
        values = loss_gradient_and_metrics(sample(seed).to(DEVICE), search)
        assert values.keys() == expected.keys()
        for name, value in values.items():
            torch.testing.assert_close(
                value, expected[name], rtol=1e-4, atol=1e-6, equal_nan=True, msg=name
            )


@pytest.mark.parametrize("name", [name for name in objectives.OBJECTIVES if is_neighbour(name)])
def test_the_losses_of_the_neighbours_are_those_of_the_cpu(name):
    losses = []
    for device in ("cpu", DEVICE):
        inputs = sample(1).to(device)
        shifted = inputs.rollout_log_probs + 0.05
        loss = objectives.with_inputs(
            name,
            *inputs,
            bounds=None,
            start_log_probs=shifted,
            proximal_log_probs=shifted,
            ages=torch.zeros_like(inputs.mask, dtype=torch.long),
            entropy=-inputs.rollout_log_probs,
            rollout_entropy=-inputs.rollout_log_probs,
        )
        losses.append(loss.cpu())
    torch.testing.assert_close(*losses, rtol=1e-4, atol=1e-6)


@contextmanager
def no_waiting():
    """An operation that makes the host wait for the device is an error."""
    if DEVICE == "cpu":
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_the_search_never_makes_the_host_wait():
    bounds = []
    for device in ("cpu", DEVICE):
        inputs = sample(1).to(device)
        log_ratio = inputs.log_ratio()
        weights = bapo.token_weights(inputs.mask)
        with no_waiting():
            found = bapo.search_clip_bounds(log_ratio, inputs.advantages, weights, bapo.GATE)
        bounds.append([found.low.item(), found.high.item()])
    assert bounds[0] == pytest.approx(bounds[1])


def test_log_probs_are_those_of_the_cpu(policy):
    model, tokenizer = models.load_policy(policy, "cpu", False)
    torch.manual_seed(0)
    rollouts = rollout.sample_rollouts(
        model, tokenizer, ["348:44=", "1:"], group_size=9, max_new_tokens=9, temperature=0.9
    )
    on_device, _ = models.load_policy(policy, DEVICE, True)
    with torch.no_grad():
        log_probs, entropy = rollout.token_log_probs(on_device, rollouts.to(DEVICE), 0.9)
    torch.testing.assert_close(log_probs.cpu(), rollouts.log_probs, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(entropy.cpu(), rollouts.entropy, rtol=1e-4, atol=1e-4)


@pytest.fixture
def repeatable_kernels():
    """As far as PyTorch can: the same inputs give the same numbers on a GPU, too."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    torch.backends.cuda.enable_flash_sdp(False)
    yield
    torch.backends.cuda.enable_flash_sdp(True)
    torch.backends.cuda.enable_mem_efficient_sdp(True)
    torch.use_deterministic_algorithms(False)


# What was drawn decides them, whatever the rounding.
COUNTS = ("reward", "response_length", "length_correct", "length_wrong", "truncated")


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("lora_rank", [0, 4])
def test_runs_train_with_first_ratios_of_one_and_go_on_after_a_crash(
    tmp_path, policy, precision, lora_rank, repeatable_kernels
):
    """Kills: a random state, or an optimizer state, that is not restored."""
    if lora_rank:
        pytest.importorskip("peft")
    options = {
        "device": DEVICE,
        "precision": precision,
        "lora_rank": lora_rank,
        "micro_batch_tokens": 99,
        "evaluate_every": 2,
    }
    lines = go(tmp_path / "whole", policy, **options)
    first_updates = [line for line in lines if line["update"] == 1]
    assert all(abs(line["ratio_mean_positive"] - 1) < 0.03 for line in first_updates)
    assert any(line["kl"] > 1e-6 for line in lines)
    assert lines[-1]["held_out_mean@16"] >= 0
    go(tmp_path / "in two", policy, steps=2, **options)
    resumed_lines = go(tmp_path / "in two", policy, **options)
    assert len(resumed_lines) == len(lines)
    if DEVICE == "cpu":
        assert resumed_lines == lines
    for resumed, line in zip(resumed_lines, lines, strict=True):
        if line["step"] == 3:  # the first one after the crash
            assert [resumed[name] for name in COUNTS] == [line[name] for name in COUNTS]
