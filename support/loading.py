"""Load a policy and its tokenizer, and refuse models whose log-probs would be wrong."""

from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig


def autocast(device: str, precision: str) -> torch.autocast:
    """Return a context for forward passes in `precision`.

    Trained weights stay float32, because in bfloat16 a step of 1e-6 would round to nothing.
    """
    kind = torch.device(device).type
    return torch.autocast(kind, torch.bfloat16, enabled=precision == "bfloat16")


def _float32_logits(head: nn.Linear, states: Tensor) -> Tensor:
    """Return float32 logits [..., V], also under autocast.

    bfloat16 logits have steps of 0.125 in [16, 32), which is more than |log 0.9|: rounding alone
    would carry ratios over a clip bound.
    """
    with torch.autocast(states.device.type, enabled=False):
        return nn.functional.linear(states.float(), head.weight, head.bias)


def load_policy(
    name: str,
    device: str = "cpu",
    *,
    precision: str = "float32",
    lora_rank: int = 0,
    gradient_checkpointing: bool = False,
    trainable: bool = True,
) -> tuple:
    """Load model and tokenizer from a local folder or the hub.

    The model is in evaluation mode (no dropout). Its trained weights and its head are float32;
    weights that are not trained have the dtype `precision`. Its generation config holds only the
    ids that end a response, because its own sampling options would make the log-probs wrong.
    lora_rank > 0 trains adapters (peft) at every linear layer but the head; a folder of adapters is
    loaded with its base. gradient_checkpointing computes layers again in the backward pass.

    Raises ValueError for what cannot be loaded, for weights that are missing or of another shape,
    for a missing tokenizer or EOS, and for models that scale or cap their logits.
    """
    # The float32 head may use TF32 beside bfloat16 layers.
    torch.set_float32_matmul_precision("high" if precision == "bfloat16" else "highest")
    has_adapters = Path(name, "adapter_config.json").exists()
    frozen_in_bfloat16 = precision == "bfloat16" and (lora_rank or has_adapters or not trainable)
    dtype = torch.bfloat16 if frozen_in_bfloat16 else torch.float32
    _, tokenizer = load_without_weights(name)
    with loading(name):
        model, report = AutoModelForCausalLM.from_pretrained(
            base_of(name), dtype=dtype, output_loading_info=True, ignore_mismatched_sizes=True
        )
    wrong = [*report["missing_keys"], *(key for key, *_ in report["mismatched_keys"])]
    if wrong:
        raise ValueError(
            f"model: {len(wrong)} weights of {name!r}, such as {wrong[0]}, are missing or have a"
            " wrong shape, and would be random: save the model again"
        )
    model.generation_config = _plain_generation_config(model, tokenizer, name)
    head = model.get_output_embeddings()
    head.forward = partial(_float32_logits, head.float())
    if has_adapters:
        from peft import PeftModel

        with loading(name):
            model = PeftModel.from_pretrained(model, name, is_trainable=True)
        rank = model.peft_config["default"].r
        if lora_rank not in (0, rank):
            raise ValueError(
                f"lora_rank: {name!r} holds adapters of rank {rank}, got {lora_rank}: leave it out"
                " to train those, or merge them into their base first"
            )
    elif lora_rank:  # adds 2 B A x to W x, where B is 0 at first
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(0)  # A is the same for every seed
        adapters = LoraConfig(r=lora_rank, lora_alpha=2 * lora_rank, target_modules="all-linear")
        model = get_peft_model(model, adapters)
    model = model.to(device).eval()
    _check_head(model, device, precision, name)
    if gradient_checkpointing:
        _checkpoint_layers(model)
    return model, tokenizer


def load_without_weights(name: str) -> tuple:
    """Load configuration and tokenizer of a local folder (adapters, too) or of the hub."""
    with loading(name):
        config = AutoConfig.from_pretrained(base_of(name))
        tokenizer = AutoTokenizer.from_pretrained(name)
    if not tokenizer("0").input_ids:  # what transformers makes of a folder without tokenizer.json
        raise ValueError(
            f"model: the tokenizer in {name!r} has no tokens: save it there again, with"
            " AutoTokenizer.from_pretrained(BASE).save_pretrained(FOLDER)"
        )
    return config, tokenizer


def base_of(name: str) -> str:
    """Return the base of adapters in the folder `name`, or else `name`; a path becomes absolute."""
    if Path(name, "adapter_config.json").exists():
        from peft import PeftConfig  # a package that Countdown does not need

        name = PeftConfig.from_pretrained(name).base_model_name_or_path
    return str(Path(name).resolve()) if Path(name).is_dir() else name


@contextmanager
def loading(name: str):
    """Turn any exception in this block into a ValueError of one line."""
    try:
        yield
    except Exception as error:  # of many kinds: no such model, a damaged file, another version
        cause = " ".join(f"{error}".split())
        raise ValueError(
            f"model: cannot load {name!r} ({type(error).__name__}: {cause}). Give a folder with"
            " config.json, weights and tokenizer, or a hub id; for a gated model, accept its terms"
            " on the hub and run `hf auth login`"
        ) from error


def _plain_generation_config(model, tokenizer, name: str) -> GenerationConfig:
    """Return a config with every token that ends a response: chat models list several."""
    ids = set()
    for source in (model.generation_config, model.config, tokenizer):
        eos = getattr(source, "eos_token_id", None)
        ids |= set(eos if isinstance(eos, list) else [eos])
    eos_ids = sorted(ids - {None})
    if not eos_ids:
        raise ValueError(
            f"model: {name!r} and its tokenizer have no EOS token, so no response could end: set"
            " tokenizer.eos_token"
        )
    return GenerationConfig(eos_token_id=eos_ids, pad_token_id=eos_ids[0])


@torch.no_grad()
def _check_head(model, device: str, precision: str, name: str) -> None:
    """Raise ValueError if the logits are not those of the head, as in Gemma 2 and Cohere."""
    ids = torch.arange(3, device=device).unsqueeze(0)
    with autocast(device, precision):
        states = model.get_decoder()(ids, use_cache=False).last_hidden_state
        expected = model.get_output_embeddings()(states)
        logits = model(ids, use_cache=False).logits
    if not torch.equal(logits, expected):
        raise ValueError(
            f"model: {name!r} scales or caps the logits of its head, or they are NaN:"
            " rollout.token_log_probs would be wrong; take another model"
        )


def _checkpoint_layers(model) -> None:
    """Checkpoint every layer: transformers does so in training mode only, which turns dropout on.

    Under no_grad nothing changes, so `generate` keeps its key-value cache.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer  # slow

    for layer in model.modules():
        if isinstance(layer, GradientCheckpointingLayer):
            layer.forward = partial(
                checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False
            )
