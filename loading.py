"""Load a policy and its tokenizer, and refuse models that would be trained on wrong log-probs."""

from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

# How much the logits of one token may differ between two ways of reading it, as a part of their
# standard deviation. Rounding makes 1e-5, with TF32 1e-3, and with bfloat16 weights 0.02.
TOLERANCE = {torch.float32: 0.01, torch.bfloat16: 0.1}
# Endings of the names of causal masks and rotary frequencies, which old checkpoints hold, too
NOT_WEIGHTS = (".attn.bias", ".attention.bias", ".masked_bias", ".causal_mask", ".inv_freq")


def autocast(device: str, precision: str) -> torch.autocast:
    """Return a context for forward passes in `precision`.

    Trained weights stay float32, because in bfloat16 a step of 1e-6 would round to nothing.
    """
    kind = torch.device(device).type
    return torch.autocast(kind, torch.bfloat16, enabled=precision == "bfloat16")


class Float32Head(nn.Linear):
    """An output embedding with float32 logits [..., V], also under autocast.

    bfloat16 logits have steps of 0.125 in [16, 32), which is more than |log 0.9|: rounding alone
    would carry ratios over a clip bound.
    """

    def __init__(self, head: nn.Linear):
        """Share the float32 weights of `head`."""
        super().__init__(head.in_features, head.out_features, device="meta")
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
    loaded with its base. gradient_checkpointing computes layers again in the backward pass.

    Raises ValueError for what cannot be loaded, for weights that are missing or have no place, for
    a missing tokenizer or EOS, for quantised weights without adapters, and for models that sample
    from other distributions than they are trained on. One that is not trainable may scale or cap
    its logits.
    """
    # The float32 head may use TF32 beside bfloat16 layers.
    torch.set_float32_matmul_precision("high" if precision == "bfloat16" else "highest")
    has_adapters = lora_rank > 0 or _holds_adapters(name)
    trains_all = trainable and not has_adapters
    dtype = "float32" if trains_all else precision
    _, tokenizer = load_without_weights(name)
    with loading(name):
        model, report = AutoModelForCausalLM.from_pretrained(
            base_of(name), dtype=dtype, output_loading_info=True, ignore_mismatched_sizes=True
        )
    _check_weights(model, report, name)
    if trains_all and getattr(model, "is_quantized", False):
        raise ValueError(
            f"model: {name!r} is quantised, and most of its weights cannot be trained: give"
            " --lora_rank, or a model that is not quantised"
        )
    model.generation_config = _plain_generation_config(model, tokenizer, name)
    with loading(name, "It needs a linear head: take another model"):
        head = model.get_output_embeddings()
        if dtype == "bfloat16":
            head = deepcopy(head).float()  # an embedding that it was tied to keeps its dtype
        model.set_output_embeddings(Float32Head(head))
    if has_adapters:
        model = _with_adapters(model, name, lora_rank, trainable)
    model = model.to(device).eval()
    with loading(name, "Take another model"), autocast(device, dtype):
        fault = _fault_of_logits(model, trainable)
    if fault:
        raise ValueError(f"model: {name!r} {fault}: take another model")
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
    if _holds_adapters(name):
        from peft import PeftConfig  # a package that Countdown does not need

        name = PeftConfig.from_pretrained(name).base_model_name_or_path
    return str(Path(name).resolve()) if Path(name).is_dir() else name


def _holds_adapters(name: str) -> bool:
    return Path(name, "adapter_config.json").exists()


OTHER_FOLDER = (
    "Give a folder with config.json, weights and tokenizer, or a hub id; for a gated model, accept"
    " its terms on the hub and run `hf auth login`"
)


@contextmanager
def loading(name: str, advice: str = OTHER_FOLDER):
    """Turn any exception in this block into a ValueError of one line that ends with `advice`."""
    try:
        yield
    except Exception as error:  # of many kinds: no such model, a damaged file, another version
        cause = " ".join(f"{error}".split())
        raise ValueError(
            f"model: cannot load {name!r} ({type(error).__name__}: {cause}). {advice}"
        ) from error


def _check_weights(model, report: dict, name: str) -> None:
    """Raise ValueError for weights that are missing, or have no place in a module that has others.

    Other weights without a place, as of a second head, are named in a line of output.
    """
    missing = [*report["missing_keys"], *(key for key, *_ in report["mismatched_keys"])]
    if missing:
        raise ValueError(
            f"model: {len(missing)} weights of {name!r}, such as {missing[0]}, are missing or have"
            " a wrong shape, and would be random: save the model again"
        )
    # Where the model has weights: modules, and lists of layers. Files may leave out the first part.
    places = ("base_model.",)
    for path, module in model.named_modules():
        if isinstance(module, nn.ModuleList) or module._parameters:
            places += (f"{path}.", f"{path}.".removeprefix(f"{model.base_model_prefix}."))
    unused = []
    for key in sorted(report["unexpected_keys"]):
        if key.endswith(NOT_WEIGHTS):
            continue
        if key.startswith(places) or "lora_" in key:
            raise ValueError(
                f"model: config.json has no place for weights of {name!r}, such as {key}, and the"
                " model would be another one without them: correct config.json"
            )
        unused.append(key)
    if unused:
        print(f"{name}: weights that the model does not use: {', '.join(unused[:8])}")


def _with_adapters(model, name: str, lora_rank: int, trainable: bool):
    """Return the model with the adapters in the folder `name`, or with new ones of rank lora_rank.

    Whatever trains is float32.
    """
    from peft import LoraConfig, PeftConfig, get_peft_model

    is_saved = _holds_adapters(name)
    if is_saved:
        adapters = PeftConfig.from_pretrained(name)
        adapters.inference_mode = not trainable
        rank = getattr(adapters, "r", None)
        if lora_rank not in (0, rank):
            raise ValueError(
                f"lora_rank: {name!r} holds adapters of rank {rank}, got {lora_rank}: leave it out"
                " to train those, or merge them into their base first"
            )
        # Training reads the decoder and its head, which pass these two by.
        if adapters.is_prompt_learning or getattr(adapters, "alora_invocation_tokens", None):
            raise ValueError(
                f"model: {name!r} holds a learned prompt, or adapters that begin at invocation"
                " tokens (aLoRA): give adapters that are always on, such as LoRA"
            )
    else:  # adds 2 B A x to W x, where B is 0 at first
        adapters = LoraConfig(r=lora_rank, lora_alpha=2 * lora_rank, target_modules="all-linear")
    torch.manual_seed(0)  # A is the same for every seed
    with loading(name, "Train it without --lora_rank, or take another model"):
        model = get_peft_model(model, adapters)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()  # before weights are loaded, and rounded
    if not is_saved:
        return model
    with loading(name):
        report = model.load_adapter(name, "default", is_trainable=trainable)
    wrong = [*report.missing_keys, *report.unexpected_keys]
    if wrong:
        raise ValueError(
            f"model: the adapters in {name!r} do not fit their base {base_of(name)!r}:"
            f" {len(wrong)} weights, such as {wrong[0]}, are missing or have no place. Use the"
            " base that they were trained with"
        )
    return model


def _plain_generation_config(model, tokenizer, name: str) -> GenerationConfig:
    """Return a config with every token that ends a response: chat models list several.

    An id in the model's configs counts only if it is a special token of the tokenizer. Many configs
    hold the id of another tokenizer, which is ordinary text in this one.
    """
    listed = set()
    for config in (model.generation_config, model.config):
        eos = getattr(config, "eos_token_id", None)
        listed |= set(eos if isinstance(eos, list) else [eos])
    eos_ids = {tokenizer.eos_token_id}
    for token_id, token in tokenizer.added_tokens_decoder.items():
        if token.special and token_id in listed:
            eos_ids.add(token_id)
    ignored = listed - eos_ids - {None}
    if ignored:
        print(f"{name}: eos_token_id {sorted(ignored)} ignored: no special token of the tokenizer")
    eos_ids = sorted(eos_ids - {None})
    if not eos_ids:
        raise ValueError(
            f"model: {name!r} and its tokenizer have no EOS token, so no response could end: set"
            " tokenizer.eos_token"
        )
    return GenerationConfig(eos_token_id=eos_ids, pad_token_id=eos_ids[0])


@torch.no_grad()
def _fault_of_logits(model, trainable: bool) -> str:
    """Say why samples would come from other distributions than training reads, or return "".

    `generate` reads a prompt with padding on the left, and then a token at a time after a cache.
    rollout.token_log_probs reads whole rows without a mask, and applies the head itself. The logits
    differ if a model mixes padding into its states (RWKV, MiniMax), if it sees later tokens, or if
    it scales or caps the logits of its head (Cohere, Gemma 2).
    """
    vocabulary = model.config.get_text_config().vocab_size
    # [1, 12], tokens from all over the vocabulary
    prompt = torch.arange(1, 13, device=model.device)[None] * vocabulary // 14
    mask = torch.ones_like(prompt)
    padding = 9
    mask[:, :padding] = 0
    drawn = model.generate(
        prompt * mask,
        attention_mask=mask,
        do_sample=False,
        min_new_tokens=3,
        max_new_tokens=3,
        output_logits=True,
        return_dict_in_generate=True,
    )
    ids = drawn.sequences[:, padding:]
    logits = model(ids, use_cache=False).logits
    if trainable:
        states = model.get_decoder()(ids, use_cache=False).last_hidden_state
        if not torch.equal(logits, model.get_output_embeddings()(states)):
            return "scales, caps or transforms the logits of its head, or they are NaN"
    read = logits[0, -4:-1]  # for the 3 new tokens
    sampled = torch.cat(drawn.logits)
    possible = ~(read < -1e4).any(0)  # a head may mask a part of the vocabulary
    difference = (sampled - read)[:, possible].std(-1)
    error = (difference / read[:, possible].std(-1).clamp(min=1e-9)).max().item()
    if not error <= TOLERANCE[model.dtype]:  # also for NaN
        return (
            "is not sampled from the distribution that is trained: with padding on the left and a"
            " cache, as `generate` reads prompts, its logits differ from those of a whole row by"
            f" {error:.1%} of their standard deviation"
        )
    return ""


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
