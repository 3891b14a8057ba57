"""The activations' row of docs/own_model.md, counted from autograd's saved tensors: python -m pytest -s tests/test_memory.py"""

import re
import sys
from pathlib import Path

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

import support.models

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT / "benchmarks"))

import model as benchmark


def bytes_per_token(size: str, layers: int, lora_rank: int = 0, tokens: int = 61) -> float:
    """Bytes per token that a forward pass under bfloat16 autocast keeps for the backward pass, weights and their copies
    not counted. (Copies are told by their size: a prime number of tokens gives activations another.)"""
    sizes = benchmark.SIZES[size] | {"num_hidden_layers": layers, "vocab_size": 64}
    with torch.device("meta"):
        policy = Qwen2ForCausalLM(Qwen2Config(**sizes))
    policy = policy.to_empty(device="cpu").eval()  # what the weights are does not matter
    if lora_rank:
        support.models.add_lora(policy, lora_rank, "bfloat16")
    kept, weights = {}, {parameter.untyped_storage().data_ptr() for parameter in policy.parameters()}
    copies = {parameter.numel() * 2 for parameter in policy.parameters() if parameter.dim() == 2}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights and storage.nbytes() not in copies:
            kept[storage.data_ptr()] = (storage.nbytes(), tensor)  # the tensor itself, or its address would be used again
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), torch.autocast("cpu", torch.bfloat16):
        policy.base_model(input_ids=torch.zeros(1, tokens, dtype=torch.long), use_cache=False)
    return sum(nbytes for nbytes, _ in kept.values()) / tokens


@pytest.mark.parametrize("column, size, lora_rank", [(0, "0.5b", 0), (1, "1.5b", 0), (2, "3b", 0), (3, "7b", 32)])
def test_a_token_keeps_the_bytes_that_the_page_says(column, size, lora_rank):
    """Of transformers' decoder layer, and in the page; what a pass keeps once is not counted."""
    if lora_rank:
        pytest.importorskip("peft")
    per_layer = bytes_per_token(size, 2, lora_rank) - bytes_per_token(size, 1, lora_rank)
    width = benchmark.SIZES[size]["hidden_size"]
    layers = benchmark.SIZES[size]["num_hidden_layers"]
    print(f"{size}: {per_layer / width:.1f} widths per token and layer, {per_layer * layers / 1e6:.2f} MB per token")
    row = next(line for line in (ROOT / "docs" / "own_model.md").read_text().splitlines() if "about 75 ·" in line)
    assert float(re.findall(r"(\d+\.\d) MB", row)[column]) == round(per_layer * layers / 1e6, 1)
    assert lora_rank or 70 < per_layer / width < 82
