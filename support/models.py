"""Load a policy for training: float32 weights or adapters, gradient checkpointing."""

from functools import partial
from pathlib import Path

import torch
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer


def load_pretrained(kind, name: str, **options):
    """kind.from_pretrained(name), of one of transformers' Auto classes. Raises ValueError with the cause if it cannot."""
    try:
        return kind.from_pretrained(name, **options)
    except (OSError, ValueError, KeyError) as error:
        path, parts = Path(name), Path(name).parts
        local = name.startswith((".", "/")) or len(parts) > 2 or path.exists() or len(parts) == 2 and path.parent.is_dir()
        if local and not any((path / file).exists() for file in ("config.json", "adapter_config.json")):
            raise ValueError(f"model: no folder {name!r} with a config.json") from error
        raise ValueError(
            f"model: cannot load {name!r} ({type(error).__name__}: {error}). Give a folder with config.json, weights and "
            "tokenizer, or a hub id; for a gated model, accept its terms on the hub and run `hf auth login`"
        ) from error


def load_policy(name: str, device: str, gradient_checkpointing: bool, lora_rank: int = 0, precision: str = "float32") -> tuple:
    """Model (float32, but see add_lora; dropout off) and tokenizer. ValueError for what cannot be loaded or checkpointed."""
    model = load_pretrained(AutoModelForCausalLM, name, dtype=torch.float32).eval()
    if lora_rank:
        add_lora(model, lora_rank, precision)
    model.to(device)
    if gradient_checkpointing:
        checkpoint_layers(model)
    if not model.generation_config.do_sample:  # sampling options beside greedy decoding: some versions refuse to save them
        model.generation_config.update(temperature=None, top_p=None, top_k=None)
    return model, load_pretrained(AutoTokenizer, name)


def add_lora(model: PreTrainedModel, rank: int, precision: str) -> None:
    """Freeze the weights, and train adapters of this rank (B A x times 2, B = 0 at first) at every linear layer but the head.
    A checkpoint holds the adapters alone; where it was loaded from one, the model has them, and its base, already. For
    bfloat16 the frozen matrices become what autocast makes of them anyway, in half the memory; all else stays float32."""
    from peft import LoraConfig
    from peft.tuners.lora import LoraLayer

    if not hasattr(model, "peft_config"):
        if Path(model.name_or_path).is_dir():  # checkpoints name their base
            model.name_or_path = str(Path(model.name_or_path).resolve())
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(0)
            model.add_adapter(LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear"))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name)
    for module in model.modules():
        if isinstance(module, LoraLayer) and precision == "bfloat16":
            module.base_layer.weight.data = module.base_layer.weight.data.bfloat16()


def checkpoint_layers(model: PreTrainedModel) -> None:
    """Recompute every decoder layer's activations in the backward pass instead of keeping them. By hand, as transformers
    does so in training mode alone, which turns dropout on. Under no_grad nothing changes: `generate` keeps its key-value
    cache. Raises ValueError for a model that has no such layers."""
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise ValueError(f"gradient_checkpointing: {type(model).__name__} does not support it; leave it out")
    for layer in layers:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)
