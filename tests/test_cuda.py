"""A GPU against the vectors and the CPU. All is skipped without a GPU. To run it on the CPU:

DEVICE=cpu python -m pytest tests/test_cuda.py
"""

import os

import check_port
import pytest
import torch
from conftest import given_rollouts
from torch.nn.attention import SDPBackend, sdpa_kernel

import rollout
from support.loading import load_policy

# Matrix products repeat on a GPU only with a workspace of a fixed size, set before the first one.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
DEVICE = os.environ.get("DEVICE", "cuda")
pytestmark = pytest.mark.skipif(
    DEVICE != "cpu" and not torch.cuda.is_available(), reason="needs a GPU"
)


@pytest.mark.parametrize("case", check_port.read_cases(), ids=lambda case: case["name"])
def test_loss_gradient_and_bounds_are_those_of_the_paper(case):
    got = check_port.bapo_adapter(case, DEVICE)
    assert check_port.differences(case["expected"], got) == []


def test_log_probs_are_those_of_the_cpu(policy):
    found = []
    for device in ("cpu", DEVICE):
        model, _ = load_policy(policy, device)
        rows = torch.tensor([1, 0], device=device)
        found.append(rollout.token_log_probs(model, given_rollouts(device), rows, 0.9))
    for expected, values in zip(*found):
        torch.testing.assert_close(values.cpu(), expected, rtol=1e-4, atol=1e-4)


@pytest.fixture
def repeatable_kernels():
    """As far as PyTorch can: the same inputs give the same numbers on a GPU, too."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    with sdpa_kernel(SDPBackend.MATH):
        yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("precision, others", [("float32", {}), ("bfloat16", {"lora_rank": 4})])
def test_runs_go_on_where_they_stopped(tmp_path, train_here, repeatable_kernels, precision, others):
    """Random and optimizer state are restored on the device.

    A run stops by itself if the first ratios of a batch of rollouts are not 1.
    """
    if others:
        pytest.importorskip("peft")
    options = others | {"device": DEVICE, "precision": precision, "micro_batch_tokens": 99}
    whole = train_here(output_dir=tmp_path / "whole", **options)
    train_here(output_dir=tmp_path / "parts", steps=2, **options)
    resumed = train_here(output_dir=tmp_path / "parts", resume=True, **options)
    for name in ("step", "update", "reward", "response_length"):  # what was drawn decides them
        assert resumed[-1][name] == whole[-1][name]
