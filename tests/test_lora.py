"""support/models.py: loading a policy, and adapters by peft (train.py --lora_rank).

Whole runs with adapters, killed and resumed: test_own_model.py.
"""

import gc
import math
import re
import sys
import textwrap
import weakref
from pathlib import Path

import pytest
import torch
from test_own_model import character_tokenizer
from test_train import go
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

import rollout
import train
from support import models

peft = pytest.importorskip("peft")
ROOT = Path(__file__).parent.parent
PROMPTS = [[1, 5, 6], [1, 7, 8, 9, 5]]


@pytest.fixture
def base(tmp_path) -> str:
    """Folder of a Qwen2 whose logits are far from uniform; head and embeddings are tied."""
    return save_base(tmp_path, tied=True)


@pytest.fixture(params=["tied", "untied"])
def either_base(request, tmp_path) -> str:
    """The same, and one with a head of its own."""
    return save_base(tmp_path, tied=request.param == "tied")


def save_base(tmp_path: Path, tied: bool) -> str:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=19,
        eos_token_id=0,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=tied,
        initializer_range=0.3,
    )
    Qwen2ForCausalLM(config).save_pretrained(tmp_path / "base")
    character_tokenizer().save_pretrained(tmp_path / "base")
    return str(tmp_path / "base")


def adapted(base: str, **options):
    """A policy whose adapters are no longer nothing."""
    model, tokenizer = models.load_policy(base, "cpu", False, lora_rank=3, **options)
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(std=0.2)
    return model, tokenizer


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_only_adapters_at_every_linear_layer_but_the_head_are_trained_and_at_first_they_do_nothing(
    either_base, precision
):
    """Kills: adapters at attention alone or in bfloat16, a head or weights that are trained."""
    plain, tokenizer = models.load_policy(either_base, "cpu", False)
    model, _ = models.load_policy(either_base, "cpu", False, lora_rank=3, precision=precision)
    rollouts = rollout.sample_rollouts(
        plain, tokenizer, PROMPTS, group_size=4, max_new_tokens=6, temperature=1.0
    )
    with rollout.autocast("cpu", precision):
        log_probs, _ = rollout.token_log_probs(model, rollouts)
        expected, _ = rollout.token_log_probs(plain, rollouts)
    log_probs.sum().backward()
    assert torch.equal(log_probs, expected)  # of weights in bfloat16, too: autocast makes them so

    layers = []
    for name, module in plain.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            layers.append(name)
    assert len(layers) == 14
    adapters = set()
    for layer in layers:
        adapters.add(f"{layer}.lora_A.default.weight")
        adapters.add(f"{layer}.lora_B.default.weight")
    parameters = dict(model.named_parameters())
    trained = {name for name, parameter in parameters.items() if parameter.grad is not None}
    assert trained == adapters
    assert {parameters[name].dtype for name in trained} == {torch.float32}
    frozen = {parameters[f"{layer}.base_layer.weight"].dtype for layer in layers}
    assert frozen == {getattr(torch, precision)}
    assert parameters["model.embed_tokens.weight"].dtype == torch.float32
    assert parameters["model.norm.weight"].dtype == torch.float32


def test_adapters_begin_the_same_whatever_was_drawn_before(base):
    name = "model.layers.0.mlp.up_proj.lora_A.default.weight"
    first, _ = models.load_policy(base, "cpu", False, lora_rank=3)
    torch.rand(7)
    second, _ = models.load_policy(base, "cpu", False, lora_rank=3)
    assert torch.equal(first.get_parameter(name), second.get_parameter(name))


def merging_code() -> str:
    """The code of docs/own_model.md that makes a plain model of adapters."""
    page = (ROOT / "docs/own_model.md").read_text()
    (block,) = re.findall(r"\n\n((?:    .*\n)*    .*merge_and_unload.*\n(?:    .*\n)*)", page)
    return textwrap.dedent(block)


def test_log_probs_are_those_of_the_model_that_the_documented_code_merges(
    either_base, tmp_path, monkeypatch
):
    """The oracle: peft's own merge. Kills: a head or a body without the adapters, another scale.

    And pages whose code does not run, or gives a folder that train.py cannot begin with.
    """
    monkeypatch.chdir(tmp_path)
    model, tokenizer = adapted(either_base)
    rollouts = rollout.sample_rollouts(
        model, tokenizer, PROMPTS, group_size=6, max_new_tokens=6, temperature=0.9
    )
    adapters = tmp_path / "runs/gsm8k/bapo@8-seed0/model"
    model.save_pretrained(adapters)
    tokenizer.save_pretrained(adapters)
    weights = [path.name for path in adapters.glob("*.safetensors")]
    assert weights == ["adapter_model.safetensors"]
    assert rollout.plain_head(model) is model.lm_head
    exec(merging_code(), {})

    def differences(folder: str) -> list[bool]:
        """Whether log-probs and entropy of a folder's model differ from those that were drawn."""
        loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        assert rollout.plain_head(loaded) is loaded.lm_head
        log_probs, entropy = rollout.token_log_probs(loaded, rollouts, 0.9)
        same = [
            torch.allclose(log_probs, rollouts.log_probs, atol=1e-5),
            torch.allclose(entropy, rollouts.entropy, atol=1e-5),
        ]
        return [not one for one in same]

    assert differences(str(adapters)) == [False, False]
    assert differences("merged") == [False, False]
    assert differences(either_base) == [True, True]
    merged, tokenizer = models.load_policy("merged", "cpu", False)
    assert not hasattr(merged, "peft_config")
    assert tokenizer("1+2=")["input_ids"] == character_tokenizer()("1+2=")["input_ids"]


def test_train_py_refuses_a_folder_of_adapters_and_says_what_to_do(base, tmp_path):
    model, tokenizer = adapted(base)
    folder = str(tmp_path / "adapters")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    problems = tmp_path / "problems.jsonl"
    problems.write_text('{"prompt": "1", "answer": "1"}\n')
    command = ["--model", folder, "--data", str(problems), "--device", "cpu"]
    with pytest.raises(ValueError, match="holds adapters, not a model: merge them .*own_model.md"):
        train.main([*command, "--output_dir", str(tmp_path / "runs")])


def test_a_checkpoint_brings_adapters_and_their_base_back_exactly(base, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model, tokenizer = adapted("base", precision="bfloat16")
    folder = tmp_path / "elsewhere/adapter"
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    monkeypatch.chdir("/")  # the base is found from wherever the command is called
    loaded, _ = models.load_policy(str(folder), "cpu", False, lora_rank=3, precision="bfloat16")
    expected = dict(model.named_parameters())
    found = dict(loaded.named_parameters())
    assert found.keys() == expected.keys()
    for name, parameter in expected.items():
        assert found[name].dtype == parameter.dtype, name
        assert found[name].requires_grad == parameter.requires_grad, name
        assert torch.equal(found[name], parameter), name


@pytest.mark.parametrize("gradient_checkpointing", [False, True])
def test_a_run_trains_the_adapters_only_and_needs_the_first_ratio_to_be_one(
    tmp_path, policy, gradient_checkpointing
):
    lines = go(
        tmp_path,
        policy,
        precision="bfloat16",
        lora_rank=4,
        steps=2,
        micro_batch_tokens=60,
        gradient_checkpointing=gradient_checkpointing,
    )
    first_ratios = [line["ratio_mean_positive"] for line in lines if line["update"] == 1]
    assert all(abs(ratio - 1) < 0.02 for ratio in first_ratios)
    assert any(line["kl"] > 1e-6 for line in lines)
    before = AutoModelForCausalLM.from_pretrained(policy).state_dict()
    after = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    weights = {}
    for name, value in after.state_dict().items():
        if "lora_" not in name:
            weights[name.replace(".base_layer", "")] = value
    assert weights.keys() == before.keys()
    assert all(torch.equal(weights[name], before[name]) for name in before)
    adapter = after.model.layers[0].mlp.up_proj.lora_B["default"].weight
    assert adapter.abs().max() > 1e-3


def test_without_peft_full_training_works_and_adapters_are_refused_at_once(
    tmp_path, policy, monkeypatch
):
    monkeypatch.setitem(sys.modules, "peft", None)
    assert len(go(tmp_path, policy, steps=1)) == 3
    with pytest.raises(ValueError, match="lora_rank 8 needs peft: pip install peft"):
        train.Options(lora_rank=8)
    with pytest.raises(ValueError, match="lora_rank must be at least 0"):
        train.Options(lora_rank=-1)


def test_without_peft_a_folder_of_adapters_says_what_to_install(base, tmp_path, monkeypatch):
    model, _ = adapted(base)
    model.save_pretrained(tmp_path / "adapters")
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ValueError, match="holds adapters, which need the package peft: pip inst"):
        models.load_policy(str(tmp_path / "adapters"), "cpu", False)


# ---------------------------------------------------------------- what cannot be loaded
def test_a_file_of_weights_that_was_cut_off_is_an_error_that_names_the_folder(base):
    path = Path(base) / "model.safetensors"
    content = path.read_bytes()
    for size in (4, len(content) // 2):
        path.write_bytes(content[:size])
        with pytest.raises(ValueError, match=f"cannot load '{base}' .SafetensorError"):
            models.load_policy(base, "cpu", False)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_weights_that_are_not_finite_are_refused_with_the_model_s_name(base, value):
    model = AutoModelForCausalLM.from_pretrained(base)
    model.model.norm.weight.data[3] = value
    model.save_pretrained(base)
    with pytest.raises(ValueError, match=f"'{base}' has weights that are NaN or infinite.*norm"):
        models.load_policy(base, "cpu", False)


def test_the_weights_of_a_model_whose_layers_are_computed_again_go_with_its_last_name(base):
    """Kills: a patch of a layer's forward that holds the layer, so that a run's model stays."""
    model, _ = models.load_policy(base, "cpu", gradient_checkpointing=True)
    model(torch.tensor([[1, 2, 3]]), use_cache=False).logits.sum().backward()
    reference = weakref.ref(model.model.layers[0].mlp.up_proj.weight)
    gc.collect()
    gc.disable()
    try:
        del model
        assert reference() is None
    finally:
        gc.enable()
