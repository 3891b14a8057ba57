"""A GPU against the CPU. Without a GPU nothing runs, but with

DEVICE=cpu python -m pytest tests/test_cuda.py
"""

import os
from dataclasses import replace

import pytest
import torch

import bapo
import rollout

# Matrix products repeat on a GPU only with a workspace of a fixed size, set before the first one.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
DEVICE = os.environ.get("DEVICE", "cuda")
GRADIENT = replace(bapo.PAPER_APP_A, contribution="gradient")
pytestmark = pytest.mark.skipif(
    DEVICE != "cpu" and not torch.cuda.is_available(), reason="needs a GPU"
)


def loss_and_metrics(device: str, seed: int, search: bapo.ClipSearch) -> dict[str, torch.Tensor]:
    """All that bapo_loss gives for random tokens [24, 40], and the gradient, on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    rollout_log_probs = -torch.rand(24, 40, generator=generator)
    log_probs = rollout_log_probs + 0.2 * torch.randn(24, 40, generator=generator)
    advantages = torch.randn(24, generator=generator)
    if seed == 0:
        advantages = advantages.abs()  # no negative token
    mask = torch.arange(40) < torch.randint(1, 41, (24, 1), generator=generator)
    log_probs = log_probs.to(device).requires_grad_()
    loss, metrics = bapo.bapo_loss(
        log_probs, rollout_log_probs.to(device), advantages.to(device), mask.to(device), search
    )
    loss.backward()
    values = {"loss": loss, "gradient": log_probs.grad} | metrics
    return {name: value.detach().cpu() for name, value in values.items()}


@pytest.mark.parametrize("search", [bapo.GRPO, bapo.PAPER_MAIN, GRADIENT])
def test_loss_gradient_bounds_and_metrics_are_those_of_the_cpu(search):
    for seed in range(6):
        expected = loss_and_metrics("cpu", seed, replace(search, rho0=0.45))
        values = loss_and_metrics(DEVICE, seed, replace(search, rho0=0.45))
        assert values.keys() == expected.keys()
        for name, value in values.items():
            torch.testing.assert_close(
                value, expected[name], rtol=1e-4, atol=1e-6, equal_nan=True, msg=name
            )


def test_log_probs_are_those_of_the_cpu(policy):
    prompts = [[1, 7, 8, 12], [1, 4]]
    found = []
    for device in ("cpu", DEVICE):
        model, _ = rollout.load_policy(policy, device)
        rollouts = rollout.Rollouts(prompts, [[5, 6, 2], [9] * 7], [False, True], device)
        rows = torch.tensor([1, 0], device=device)
        found.append(rollout.token_log_probs(model, rollouts, rows, 0.9))
    for expected, values in zip(*found):
        torch.testing.assert_close(values.cpu(), expected, rtol=1e-4, atol=1e-4)


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


@pytest.mark.parametrize(
    "precision, others", [("float32", {}), ("bfloat16", {}), ("bfloat16", {"lora_rank": 4})]
)
def test_runs_go_on_where_they_stopped(tmp_path, train_here, repeatable_kernels, precision, others):
    """Random and optimizer state are restored on the device.

    A run stops by itself if the first ratios of a batch of rollouts are not 1.
    """
    if others:
        pytest.importorskip("peft")
    options = others | {
        "device": DEVICE,
        "precision": precision,
        "micro_batch_tokens": 99,
        "evaluate_every": 2,
    }
    lines = train_here(output_dir=tmp_path / "whole", steps=4, **options)
    train_here(output_dir=tmp_path / "parts", steps=2, **options)
    resumed_lines = train_here(output_dir=tmp_path / "parts", steps=4, resume=True, **options)
    assert len(resumed_lines) == len(lines)
    if DEVICE == "cpu":
        assert resumed_lines == lines
    for resumed, line in zip(resumed_lines, lines):
        if line["step"] == 3:  # the first one after the stop
            assert [resumed.get(name) for name in COUNTS] == [line.get(name) for name in COUNTS]
