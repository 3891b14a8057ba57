"""train.py --lora_rank: adapters by peft. Whole runs with them, killed and resumed: test_own_model.py."""

import sys

import pytest
import torch
from test_own_model import character_tokenizer
from test_train import go
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

import rollout
import support.models
import train

peft = pytest.importorskip("peft")
PROMPTS = [[1, 5, 6], [1, 7, 8, 9, 5]]


@pytest.fixture(params=["tied", "untied"])
def base(request, tmp_path) -> str:
    """Folder of a Qwen2 whose logits are far from uniform."""
    sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1)
    torch.manual_seed(0)
    sizes |= dict(tie_word_embeddings=request.param == "tied", initializer_range=0.3)
    config = Qwen2Config(vocab_size=19, eos_token_id=0, **sizes)
    Qwen2ForCausalLM(config).save_pretrained(tmp_path / "base")
    character_tokenizer().save_pretrained(tmp_path / "base")
    return str(tmp_path / "base")


def adapted(base: str, **options):
    """A policy whose adapters are no longer nothing."""
    model, tokenizer = support.models.load_policy(base, "cpu", False, lora_rank=3, **options)
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(std=0.2)
    return model, tokenizer


def test_only_adapters_at_every_linear_layer_but_the_head_are_trained_and_at_first_they_do_nothing(base):
    """Kills: adapters at attention alone, a head that is trained, weights that are not frozen, adapters in bfloat16."""
    plain, tokenizer = support.models.load_policy(base, "cpu", False)
    for precision in ("float32", "bfloat16"):
        model, _ = support.models.load_policy(base, "cpu", False, lora_rank=3, precision=precision)
        rollouts = rollout.sample_rollouts(plain, tokenizer, PROMPTS, group_size=4, max_new_tokens=6, temperature=1.0)
        with rollout.autocast("cpu", precision):
            log_probs, _ = rollout.token_log_probs(model, rollouts)
            expected, _ = rollout.token_log_probs(plain, rollouts)
        log_probs.sum().backward()
        assert torch.equal(log_probs, expected)  # of weights in bfloat16, too: autocast makes them so
        trained = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
        layers = [name for name, module in plain.named_modules() if isinstance(module, torch.nn.Linear) and name != "lm_head"]
        assert len(layers) == 14 and trained == {f"{name}.lora_{side}.default.weight" for name in layers for side in "AB"}
        parameters = dict(model.named_parameters())
        assert {parameters[name].dtype for name in trained} == {torch.float32}
        frozen = {parameters[f"{name}.base_layer.weight"].dtype for name in layers}
        assert frozen == {getattr(torch, precision)}
        assert parameters["model.embed_tokens.weight"].dtype == parameters["model.norm.weight"].dtype == torch.float32


def test_log_probs_are_those_of_the_merged_plain_model_and_both_kinds_of_folder_load(base, tmp_path):
    """The oracle: peft's own merge. Kills: a head or a body without the adapters, another scale, whole logits."""
    model, tokenizer = adapted(base)
    rollouts = rollout.sample_rollouts(model, tokenizer, PROMPTS, group_size=6, max_new_tokens=6, temperature=0.9)
    model.save_pretrained(tmp_path / "adapter")
    assert sorted(path.name for path in (tmp_path / "adapter").glob("*.safetensors")) == ["adapter_model.safetensors"]
    plain = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tmp_path / "adapter")
    plain.merge_and_unload().save_pretrained(tmp_path / "merged")
    untouched = rollout.recorded_log_probs(support.models.load_policy(base, "cpu", False)[0], rollouts.micro_batches(99), 0.9)
    for folder in ("adapter", "merged"):  # as eval_aime.py and anybody else loads them
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / folder, dtype=torch.float32).eval()
        assert rollout.plain_head(loaded) is loaded.lm_head and hasattr(loaded, "peft_config") == (folder == "adapter")
        for read in (rollout.recorded_log_probs(loaded, rollouts.micro_batches(99), 0.9), untouched):
            same = [torch.allclose(*pair, atol=1e-5) for pair in zip(read, (rollouts.log_probs, rollouts.entropy))]
            assert same == [read is not untouched] * 2
    again, _ = support.models.load_policy(base, "cpu", False, lora_rank=3)
    assert rollout.plain_head(model) is model.lm_head and torch.equal(
        *(dict(m.named_parameters())["model.layers.0.mlp.up_proj.lora_A.default.weight"] for m in (model, again))
    )  # the same start, whatever was drawn before


def test_a_checkpoint_brings_adapters_and_their_base_back_exactly(base, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model, tokenizer = adapted("base", precision="bfloat16")
    model.save_pretrained(tmp_path / "elsewhere/adapter")
    tokenizer.save_pretrained(tmp_path / "elsewhere/adapter")
    monkeypatch.chdir("/")  # the base is found from wherever the command is called
    loaded, _ = support.models.load_policy(str(tmp_path / "elsewhere/adapter"), "cpu", False, lora_rank=3, precision="bfloat16")
    for (name, a), (other, b) in zip(model.named_parameters(), loaded.named_parameters(), strict=True):
        assert name == other and a.dtype == b.dtype and torch.equal(a, b) and a.requires_grad == b.requires_grad, name


@pytest.mark.parametrize("gradient_checkpointing", [False, True])
def test_a_run_trains_the_adapters_only_and_needs_the_first_ratio_to_be_one(tmp_path, policy, gradient_checkpointing):
    start = AutoModelForCausalLM.from_pretrained(policy).state_dict()
    options = dict(lora_rank=4, steps=2, micro_batch_tokens=60, gradient_checkpointing=gradient_checkpointing)
    lines = go(tmp_path, policy, precision="bfloat16", **options)
    assert all(abs(line["ratio_mean_positive"] - 1) < 0.02 for line in lines if line["update"] == 1)
    assert any(line["kl"] > 1e-6 for line in lines)
    after = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    for name, value in after.state_dict().items():
        kept = name.replace(".base_layer", "")
        assert ("lora_" in name) != (kept in start) and (kept not in start or torch.equal(value, start[kept])), name
    assert after.model.layers[0].mlp.up_proj.lora_B["default"].weight.abs().max() > 1e-3


def test_without_peft_full_training_works_and_adapters_are_refused_at_once(tmp_path, policy, monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    assert len(go(tmp_path, policy, steps=1)) == 3
    with pytest.raises(ValueError, match="lora_rank 8 needs peft: pip install peft"):
        train.Options(lora_rank=8)
    with pytest.raises(ValueError, match="lora_rank must be at least 0"):
        train.Options(lora_rank=-1)
