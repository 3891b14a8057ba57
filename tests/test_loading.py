"""loading.py: what is loaded, in which dtype, and what is refused."""

import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
from conftest import (
    EOS,
    assert_close,
    bigram,
    edit_json,
    given_log_probs,
    gradients,
    kept_for_backward,
)
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    CohereConfig,
    CohereForCausalLM,
    PreTrainedModel,
)

from support.loading import autocast, load_policy
from tasks import countdown


def with_weights(folder: Path, remove: str = "", **others) -> None:
    """Change the weights in a folder."""
    path = next(folder.glob("*model.safetensors"))
    weights = load_file(path) | others
    weights.pop(remove, None)
    save_file(weights, path, {"format": "pt"})


# ---------------------------------------------------------------- what is loaded
@pytest.mark.parametrize("tied", [False, True])
def test_a_bfloat16_file_is_trained_in_float32_without_dropout(tmp_path, tokenizer, tied):
    """And its head is float32 always, also under autocast."""
    config = countdown.build_model(tokenizer).config
    config.tie_word_embeddings = tied
    AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    model, _ = load_policy(str(tmp_path), precision="bfloat16")
    assert not model.training
    head = model.get_output_embeddings().weight
    assert (head is model.get_input_embeddings().weight) == tied
    for parameter in model.parameters():
        assert parameter.requires_grad and parameter.dtype == torch.float32
    ids = torch.tensor([[5, 6]])
    with autocast(model):
        states = model.model(ids).last_hidden_state
        logits = model(ids).logits
    # Rounding the head would change log-probs by more than the clip bounds allow.
    assert torch.equal(logits, states.float() @ head.T)
    model, _ = load_policy(str(tmp_path), precision="bfloat16", trainable=False)
    assert model.get_output_embeddings().weight.dtype == torch.float32
    assert model.get_input_embeddings().weight.dtype == torch.bfloat16


def test_gradient_checkpointing_keeps_less_and_changes_no_gradient(policy):
    kept = []
    found = []
    for options in ({}, {"gradient_checkpointing": True}):
        model, _ = load_policy(policy, **options)
        with kept_for_backward() as tensors:
            total = given_log_probs(model).sum()
        kept.append(sum(tensor.numel() for tensor in tensors))
        total.backward()
        found.append(gradients(model))
    assert kept[1] < kept[0] / 2
    torch.testing.assert_close(found[1], found[0])


# ---------------------------------------------------------------- what is refused
def without_tokenizer(folder: Path) -> None:
    for path in folder.glob("tokenizer*"):
        path.unlink()


def without_eos(folder: Path) -> None:
    edit_json(folder / "generation_config.json", eos_token_id=None)
    edit_json(folder / "tokenizer_config.json", eos_token=None)


def with_more_tokens(folder: Path, names: list[str], **settings) -> None:
    """Add tokens that the model has no rows for; "<|...|>" are special ones."""
    tokenizer = AutoTokenizer.from_pretrained(folder, **settings)
    tokenizer.add_tokens([AddedToken(name, special="|" in name) for name in names])
    tokenizer.save_pretrained(folder)


@pytest.mark.parametrize(
    "damage, named",
    [
        (shutil.rmtree, ""),
        (partial(with_weights, remove="lm_head.weight"), "missing.*lm_head.weight"),
        (partial(with_weights, **{"lm_head.weight": torch.zeros(9, 64)}), "mismatched.*lm_head"),
        (partial(with_weights, **{"lm_head.bias": torch.zeros(64)}), "unexpected.*lm_head.bias"),
        (partial(with_weights, **{"lm_head.weight": torch.full((20, 64), torch.nan)}), "NaN"),
        (without_tokenizer, "tokenizer"),
        (without_eos, "EOS"),
        (partial(with_more_tokens, names=["<think>"]), "21 tokens.* 20 rows"),
        (partial(with_more_tokens, names=[], eos_token="<|end|>"), "21 tokens.* 20 rows"),
    ],
)
def test_incomplete_or_damaged_models_are_refused_in_one_line(folder, damage, named):
    damage(folder)
    with pytest.raises(ValueError, match=f"^model: .*model.*{named}") as raised:
        load_policy(str(folder))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "template, eos_ids, printed",
    [
        ("{{ messages[1].content }}\n<|im_end|>\n", [EOS, 3, 20], ""),  # ChatML, Qwen2.5
        # In gpt-oss 20 ends a thought and earlier turns, and 21 the last turn.
        ("{{ messages[1].content }}<|{{ 'im_' if messages[2] }}end|>", [EOS, 3, 21], ""),
        ("{{ messages[1].content }}\n;;\n", [EOS, 3], "';;'"),
        ("{{ messages[0].content }}<|im_end|>", [EOS, 3], ""),
        ("{{ raise_exception('one message') }}", [EOS, 3], ""),
    ],
)
def test_special_tokens_that_are_listed_and_the_end_of_a_turn_end_a_response(
    folder, tokenizer, capsys, template, eos_ids, printed
):
    """Of those listed, 3 is <unk>. 19, ";", and 22 are text, and 99 is no token.

    23 has no row in the embedding, as Gemma 3's image token.
    """
    bigram(tokenizer, torch.zeros(23, 23)).save_pretrained(folder)
    # Causal masks of old checkpoints are no weights.
    with_weights(folder, **{"model.layers.0.self_attn.masked_bias": torch.zeros(1)})
    with_more_tokens(folder, ["<|im_end|>", "<|end|>", "<think>", "<|image|>"])
    edit_json(folder / "generation_config.json", eos_token_id=[3, 19, 22, 99])
    edit_json(folder / "tokenizer_config.json", chat_template=template)
    model, _ = load_policy(str(folder))
    assert model.generation_config.eos_token_id == eos_ids
    assert printed in capsys.readouterr().out


def test_quantised_weights_are_for_adapters_and_evaluation_only(folder, monkeypatch):
    """transformers marks them so, whatever has quantised them."""
    monkeypatch.setattr(PreTrainedModel, "is_quantized", True, raising=False)
    with pytest.raises(ValueError, match="^model: .*quantised.*--lora_rank"):
        load_policy(str(folder))
    load_policy(str(folder), trainable=False)
    pytest.importorskip("peft")
    load_policy(str(folder), lora_rank=2)


def test_models_that_scale_their_logits_are_for_evaluation_only(folder):
    sizes = {"vocab_size": 20, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = CohereConfig(**sizes)
    CohereForCausalLM(config).save_pretrained(folder)
    load_policy(str(folder), trainable=False)
    with pytest.raises(ValueError, match="^model: .*scales"):
        load_policy(str(folder))


# ---------------------------------------------------------------- adapters
def test_adapters_are_all_that_is_trained_and_saved(policy, tokenizer, tmp_path, monkeypatch):
    """The oracle is peft's own merge. Adapters find their base from any working directory."""
    pytest.importorskip("peft")
    monkeypatch.chdir(Path(policy).parent)
    model, _ = load_policy(Path(policy).name, lora_rank=3)
    monkeypatch.chdir(tmp_path)
    given_log_probs(model).sum().backward()
    trained = gradients(model)
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad == ("lora_" in name) == (name in trained)
        if "lora_B" in name:
            parameter.data.normal_(std=0.5)
    log_probs = given_log_probs(model)
    model.save_pretrained("adapters")
    tokenizer.save_pretrained("adapters")
    with pytest.raises(ValueError, match="^model: .*rank 3.*64"):
        load_policy("adapters", lora_rank=64)
    loaded, _ = load_policy("adapters", lora_rank=3)
    assert_close(given_log_probs(loaded.merge_and_unload()), log_probs)


def test_saved_adapters_are_float32_beside_frozen_bfloat16_weights_and_must_fit(
    policy, tokenizer, tmp_path
):
    """peft would round the saved norm to bfloat16."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["norm"])
    model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(policy), config)
    weights = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            weights[name] = parameter.data.normal_()
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)

    model, _ = load_policy(str(tmp_path), precision="bfloat16", gradient_checkpointing=True)
    given_log_probs(model).sum().backward()
    assert gradients(model).keys() == weights.keys()
    for name, parameter in model.named_parameters():
        if name in weights:
            assert torch.equal(parameter, weights[name])
        elif "q_proj.base_layer" in name:
            assert parameter.dtype == torch.bfloat16

    key = "base_model.model.model.layers.7.self_attn.q_proj.lora_A.weight"
    with_weights(tmp_path, **{key: torch.zeros(2, 64)})
    with pytest.raises(ValueError, match="^model: .*adapters.*layers.7.self_attn.q_proj"):
        load_policy(str(tmp_path))
