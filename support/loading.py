"""Load a policy and its tokenizer, and refuse models that would be trained on wrong log-probs."""

from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from pathlib import Path

import torch
from jinja2 import TemplateError
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

# Causal masks, which old checkpoints hold beside their weights
MASKS = (".attn.bias", ".attention.bias", ".masked_bias")


def autocast(model) -> torch.autocast:
    """Return a context for forward passes in `model.precision`, which `load_policy` sets.

    Trained weights stay float32, because in bfloat16 a step of 1e-6 would round to nothing.
    """
    enabled = model.precision == "bfloat16"
    return torch.autocast(model.device.type, torch.bfloat16, enabled=enabled)


class Float32Head(nn.Module):
    """An output embedding with float32 logits [..., V], also under autocast.

    bfloat16 logits have steps of 0.125 in [16, 32), which is more than |log 0.9|: rounding alone
    would carry ratios over a clip bound.
    """

    def __init__(self, head: nn.Linear):
        """Share the float32 weights of `head`."""
        super().__init__()
        self.weight = head.weight
        self.bias = head.bias

    def forward(self, states: Tensor) -> Tensor:
        with torch.autocast(states.device.type, enabled=False):
            return nn.functional.linear(states.float(), self.weight, self.bias)


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
    loaded with its base. gradient_checkpointing computes layers again in the backward pass. Sets
    model.precision, and torch's precision of float32 products.

    Raises ValueError for what cannot be loaded, for weights that are missing or unexpected, for
    a missing tokenizer or EOS, for quantised weights without adapters, and if it is trainable, for
    models that scale or cap their logits.
    """
    # The float32 head may use TF32 beside bfloat16 layers of a GPU.
    torch.set_float32_matmul_precision("high" if precision == "bfloat16" else "highest")
    _, tokenizer = load_config_and_tokenizer(name)
    has_adapters = lora_rank > 0 or _holds_adapters(name)
    trains_all = trainable and not has_adapters
    dtype = "float32" if trains_all else precision
    with _errors_in_one_line(name):
        model, report = AutoModelForCausalLM.from_pretrained(
            _base_of(name), dtype=dtype, output_loading_info=True, ignore_mismatched_sizes=True
        )
        _check_weights(report)
        if trains_all and getattr(model, "is_quantized", False):
            raise ValueError("quantised weights cannot be trained without --lora_rank")
        model.generation_config = _generation_config(model, tokenizer)
        model.precision = precision  # see `autocast`
        head = model.get_output_embeddings()
        if dtype == "bfloat16":
            head = deepcopy(head).float()  # an embedding that it was tied to keeps its dtype
        model.set_output_embeddings(Float32Head(head))
        if has_adapters:
            model = _with_adapters(model, name, lora_rank)
    model = model.to(device).eval()
    if trainable:
        with _errors_in_one_line(name), autocast(model):
            _check_head(model)
    if gradient_checkpointing:
        from transformers.modeling_layers import GradientCheckpointingLayer  # slow

        # transformers checkpoints layers in training mode only, which turns dropout on. Under
        # no_grad nothing changes, so `generate` keeps its key-value cache.
        for layer in model.modules():
            if isinstance(layer, GradientCheckpointingLayer):
                layer.forward = partial(
                    checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False
                )
    return model, tokenizer


def load_config_and_tokenizer(name: str) -> tuple:
    """Load configuration and tokenizer of a local folder (adapters, too) or of the hub."""
    with _errors_in_one_line(name):
        config = AutoConfig.from_pretrained(_base_of(name))
        tokenizer = AutoTokenizer.from_pretrained(name)
        if not tokenizer("0").input_ids:  # what transformers makes of a folder without a tokenizer
            raise ValueError("the folder has no tokenizer: save its base model's there")
    return config, tokenizer


def _base_of(name: str) -> str:
    """Return the base of adapters in the folder `name`, or else `name`; a path becomes absolute."""
    if _holds_adapters(name):
        from peft import PeftConfig  # a package that Countdown does not need

        name = PeftConfig.from_pretrained(name).base_model_name_or_path
    return str(Path(name).resolve()) if Path(name).is_dir() else name


def _holds_adapters(name: str) -> bool:
    return Path(name, "adapter_config.json").exists()


@contextmanager
def _errors_in_one_line(name: str):
    """Turn any exception in this block into a ValueError of one line."""
    try:
        yield
    except Exception as error:  # of many kinds: no such model, a damaged file, another version
        raise ValueError(f"model: cannot use {name!r} ({error!r})") from error


def _check_weights(report: dict) -> None:
    """Raise ValueError for weights that would be random, and for those that would be dropped."""
    for kind, keys in report.items():  # missing_keys, mismatched_keys, unexpected_keys, ...
        wrong = [key for key in keys if not str(key).endswith(MASKS)]
        if wrong:
            raise ValueError(f"{len(wrong)} {kind}, such as {wrong[0]}: they do not fit the config")


def _with_adapters(model, name: str, lora_rank: int):
    """Return the model with the adapters in the folder `name`, or with new ones of rank lora_rank.

    Trained weights are float32.
    """
    from peft import LoraConfig, PeftConfig, get_peft_model

    is_saved = _holds_adapters(name)
    if is_saved:
        adapters = PeftConfig.from_pretrained(name)
        adapters.inference_mode = False
        if lora_rank not in (0, adapters.r):  # also refuses prompt tuning, which has no rank
            raise ValueError(f"its adapters have rank {adapters.r}, not {lora_rank}")
    else:  # adds 2 B A x to W x, where B is 0 at first
        adapters = LoraConfig(r=lora_rank, lora_alpha=2 * lora_rank, target_modules="all-linear")
    torch.manual_seed(0)  # A is the same for every seed
    model = get_peft_model(model, adapters)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()  # before weights are loaded, and rounded
    if is_saved:
        report = model.load_adapter(name, "default", is_trainable=True)
        _check_weights(report._asdict())
    return model


def _generation_config(model, tokenizer) -> GenerationConfig:
    """Return a config with every token that ends a response: chat models list several.

    An id that the model lists counts only if it is a special token of the tokenizer. Many models
    list the id of another tokenizer, which is ordinary text in this one.
    """
    listed = model.generation_config.eos_token_id
    special = {id for id, token in tokenizer.added_tokens_decoder.items() if token.special}
    eos_ids = special.intersection(listed if isinstance(listed, list) else [listed])
    eos_ids.update({tokenizer.eos_token_id, _end_of_turn(tokenizer)} - {None})
    if not eos_ids:
        raise ValueError("it has no EOS token: set eos_token in its tokenizer_config.json")
    # Gemma 3's embedding has no row for its image token, which no text contains.
    in_texts = set(tokenizer.get_vocab().values()) - special
    in_texts.update(eos_ids, tokenizer("0").input_ids)  # a BOS, too
    embedded = len(model.get_input_embeddings().weight)
    if max(in_texts) >= embedded:
        raise ValueError(
            f"its tokenizer has {len(tokenizer)} tokens, and its embedding {embedded} rows: save"
            " it after model.resize_token_embeddings(len(tokenizer))"
        )
    return GenerationConfig(eos_token_id=sorted(eos_ids), pad_token_id=min(eos_ids))


def _end_of_turn(tokenizer) -> int | None:
    """Return the token that ends the assistant's turn in the chat template, if there is one.

    It may differ from the EOS: Qwen2.5's base models have ChatML's <|im_end|> and <|endoftext|>.
    If the turn ends in plain text, a line says so.
    """
    answer = "My answer."
    turns = [{"role": "user", "content": "A question?"}, {"role": "assistant", "content": answer}]
    try:
        text = tokenizer.apply_chat_template(turns, tokenize=False)
    except (TemplateError, ValueError):  # it writes prompts alone, or there is none
        return None
    end = text.partition(answer)[2].strip()
    for token_id in tokenizer(end, add_special_tokens=False).input_ids:
        if token_id in tokenizer.added_tokens_decoder:
            return token_id
    if end:
        print(f"model: {end!r}, which ends a turn in its chat template, is text: only EOS ends one")
    return None


@torch.no_grad()
def _check_head(model) -> None:
    """Raise ValueError if logits are not those of the head, which token_log_probs applies itself.

    Some models scale or cap them (Cohere, Gemma 2).
    """
    ids = torch.tensor([[5, 6, 7]], device=model.device)
    states = model.get_decoder()(ids, use_cache=False).last_hidden_state
    logits = model(ids, use_cache=False).logits
    if not torch.equal(logits, model.get_output_embeddings()(states)):
        raise ValueError("it scales, caps or transforms the logits of its head, or gives NaN")
