"""Load a policy for training: float32 weights or adapters, gradient checkpointing."""

import functools
from importlib.util import find_spec
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils.peft_utils import find_adapter_config_file


def load_pretrained(kind, name: str, **options):
    """kind.from_pretrained(name, **options), where `kind` is one of transformers' Auto classes.

    `name` is a folder or a hub id. Raises ValueError with the cause and the remedy if it cannot be
    loaded.
    """
    if Path(name).is_dir() and not _holds_a_model(Path(name)):
        # transformers 5.0 would guess a configuration from the folder's name.
        raise ValueError(_no_model_in(name))
    try:
        return kind.from_pretrained(name, **options)
    except (OSError, ValueError, KeyError, ImportError, SafetensorError) as error:
        raise ValueError(_why_not_loaded(kind, name, error)) from error


def _why_not_loaded(kind, name: str, error: Exception) -> str:
    """The message of load_pretrained."""
    if _must_be_a_folder(name) and not _holds_a_model(Path(name)):
        return _no_model_in(name)
    # Where the hub could not be reached, asking it again would take a minute.
    may_hold_adapters = Path(name).is_dir() or "config.json" in str(error)
    holds_adapters = may_hold_adapters and _holds_adapters(name)
    if holds_adapters and kind is AutoConfig:
        return (
            f"model: {name!r} holds adapters, not a model: merge them with their base first, as "
            "docs/own_model.md says under Adapters"
        )
    if holds_adapters and not find_spec("peft"):
        return f"model: {name!r} holds adapters, which need the package peft: pip install peft"
    return (
        f"model: cannot load {name!r} ({type(error).__name__}: {error}). Give a folder with "
        "config.json, weights and tokenizer, or a hub id; for a gated model, accept its terms on "
        "the hub and run `hf auth login`"
    )


def _no_model_in(name: str) -> str:
    return f"model: no folder {name!r} with a config.json"


def _must_be_a_folder(name: str) -> bool:
    """Whether `name` can be no hub id, which is NAME or OWNER/NAME, or is the path of something."""
    path = Path(name)
    if name.startswith((".", "/")) or path.exists():
        return True
    if len(path.parts) == 2:
        return path.parent.is_dir()
    return len(path.parts) > 2


def _holds_a_model(folder: Path) -> bool:
    """Whether a folder has what transformers loads: a model, or adapters."""
    return (folder / "config.json").exists() or (folder / "adapter_config.json").exists()


def _holds_adapters(name: str) -> bool:
    """Whether a folder, or a repository of the hub, is one of adapters."""
    try:
        return find_adapter_config_file(name) is not None
    except (OSError, ValueError):  # there is no such repository, or no such name
        return False


def load_policy(
    name: str,
    device: str,
    gradient_checkpointing: bool,
    lora_rank: int = 0,
    precision: str = "float32",
) -> tuple:
    """Model and tokenizer of a folder or hub id.

    The model is in evaluation mode (no dropout), its weights are float32; with lora_rank > 0 see
    `add_lora`, where `precision` matters. Raises ValueError for what cannot be loaded or
    checkpointed, and for weights that are not finite.
    """
    # With bfloat16 passes the float32 output head may use TF32 on a GPU, which "high" allows.
    torch.set_float32_matmul_precision("high" if precision == "bfloat16" else "highest")
    model = load_pretrained(AutoModelForCausalLM, name, dtype=torch.float32).eval()
    if lora_rank:
        add_lora(model, lora_rank, precision)
    model.to(device)
    check_finite(model, name)
    if gradient_checkpointing:
        checkpoint_layers(model)
    if not model.generation_config.do_sample:
        # Sampling options beside greedy decoding: some versions refuse to save them.
        model.generation_config.update(temperature=None, top_p=None, top_k=None)
    tokenizer = load_pretrained(AutoTokenizer, name)
    return model, tokenizer


def check_finite(model: PreTrainedModel, name: str) -> None:
    """Raise ValueError, naming the model and a parameter, if a weight is NaN or infinite."""
    for parameter_name, parameter in model.named_parameters():
        if not parameter.isfinite().all():
            raise ValueError(
                f"model: {name!r} has weights that are NaN or infinite, first in {parameter_name}: "
                "take a checkpoint from before its training diverged, or download it again"
            )


def add_lora(model: PreTrainedModel, rank: int, precision: str) -> None:
    """Freeze the weights, and train adapters at every linear layer but the head.

    An adapter adds 2 B A x to W x, with A [rank, in] random and B [out, rank] zero at first, both
    float32. A checkpoint holds the adapters alone; a model that was loaded from one has them, and
    its base, already. For precision "bfloat16" the frozen matrices become what autocast makes of
    them anyway, in half the memory; everything else stays float32.
    """
    from peft import LoraConfig
    from peft.tuners.lora import LoraLayer

    if not hasattr(model, "peft_config"):
        if Path(model.name_or_path).is_dir():
            # A checkpoint names its base: by a path that does not depend on the working directory.
            model.name_or_path = str(Path(model.name_or_path).resolve())
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(0)
            settings = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear")
            model.add_adapter(settings)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name)
    if precision == "bfloat16":
        for module in model.modules():
            if isinstance(module, LoraLayer):
                weight = module.base_layer.weight
                weight.data = weight.data.bfloat16()


def checkpoint_layers(model: PreTrainedModel) -> None:
    """Compute every decoder layer's activations again in the backward pass, not keep them.

    transformers does so in training mode alone, which turns dropout on. Under no_grad nothing
    changes: `generate` keeps its key-value cache. Raises ValueError for a model without such
    layers.
    """
    layers = [layer for layer in model.modules() if isinstance(layer, GradientCheckpointingLayer)]
    if not layers:
        kind = type(model).__name__
        raise ValueError(f"gradient_checkpointing: {kind} does not support it; leave it out")
    for layer in layers:
        # A class of its own, and no function that holds the layer: such a circle would keep the
        # model in memory after its run.
        layer.__class__ = _recomputed(type(layer))


@functools.cache
def _recomputed(kind: type) -> type:
    """A subclass of a layer's class whose forward pass is checkpointed."""

    class Recomputed(kind):
        def forward(self, *arguments, **options):
            return checkpoint(
                super().forward,
                *arguments,
                use_reentrant=False,
                preserve_rng_state=False,  # there is no dropout
                **options,
            )

    Recomputed.__name__ = kind.__name__
    return Recomputed
