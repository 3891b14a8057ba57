"""integrations/trl_bapo.py on real trainers. Skipped without TRL.

What TRL's loss is given is compared with bapo.py, on the tokens that TRL's loss weighs.
"""

import json
import os
import re
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
trl = pytest.importorskip("trl")

from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import HfArgumentParser, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from trl import GRPOConfig, GRPOTrainer

from bapo import ClipBounds, ClipSearch, contribution_masses, search_clip_bounds
from integrations.trl_bapo import BAPOConfig, BAPOTrainer

# Of transformers, in TRL.
pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")
ROOT = Path(__file__).parent.parent
WORDS = ["[PAD]", "[EOS]", "[UNK]", "a", "b", "c", "d", "e", "f", "1", "2"]
LOSS_TYPES = ("dapo", "bnpo", "grpo", "dr_grpo")
PROMPTS = Dataset.from_dict({"prompt": ["a b c", "d e", "f 1 2 a", "b"] * 4})
# Generations are used twice, so that ratios leave 1.
OPTIONS = dict(
    use_cpu=True,
    bf16=False,
    report_to=[],
    save_strategy="no",
    disable_tqdm=True,
    logging_steps=1,
    max_steps=4,
    num_generations=4,
    per_device_train_batch_size=4,
    per_device_eval_batch_size=4,
    gradient_accumulation_steps=2,
    num_iterations=2,
    max_completion_length=10,
    learning_rate=5e-2,
)


# ---------------------------------------------------------------- toys
def tokenizer():
    ids = {word: i for i, word in enumerate(WORDS)}
    words = Tokenizer(models.WordLevel(ids, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=words,
        padding_side="left",
        pad_token="[PAD]",
        eos_token="[EOS]",
        unk_token="[UNK]",
        chat_template="{% for message in messages %}{{ message.content }}{% endfor %}",
    )


def policy():
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(WORDS),
        max_position_embeddings=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    return Qwen2ForCausalLM(config)


def reward(completions, **_):
    """The more early letters the better."""
    return [float(sum(word in "abc" for word in text.split())) for text in completions]


def make(trainer_class, tmp_path, **options):
    config_class = BAPOConfig if issubclass(trainer_class, BAPOTrainer) else GRPOConfig
    args = config_class(output_dir=str(tmp_path), **OPTIONS | options)
    trainer = trainer_class(
        policy(), reward, args, PROMPTS, PROMPTS.select(range(4)), processing_class=tokenizer()
    )
    # train() would set it.
    trainer.current_gradient_accumulation_steps = args.gradient_accumulation_steps
    return trainer


def samples(trainer, seed, **extras):
    """A micro-batch as TRL's buffer holds it, with unequal lengths and ratios away from 1.

    extras: further tensors by name, each made by a function of a generator and a shape.
    """
    rows = 8
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, 13, (rows, 1), generator=g)
    padding = torch.randint(0, 3, (rows, 1), generator=g)
    inputs = {
        "prompt_ids": torch.randint(3, len(WORDS), (rows, 3), generator=g),
        "prompt_mask": (torch.arange(3) >= padding).long(),
        "completion_ids": torch.randint(3, len(WORDS), (rows, 12), generator=g),
        "completion_mask": (torch.arange(12) < lengths).long(),
        "advantages": torch.randn(rows, generator=g) - 0.3,
        "num_items_in_batch": torch.tensor(100),  # of the whole generation batch
    }
    log_probs, _ = forward(trainer, inputs)
    inputs["old_per_token_logps"] = log_probs + 0.4 * torch.randn(log_probs.shape, generator=g)
    for name, extra in extras.items():
        inputs[name] = extra(g, (rows, 12))
    return inputs


def forward(trainer, inputs):
    """TRL's log-probs and entropies, [N, T] each, without BAPO's search."""
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
    attention = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
    length = inputs["completion_ids"].size(1)
    with torch.no_grad():
        log_probs, entropies, _ = GRPOTrainer._get_per_token_logps_and_entropies(
            trainer, trainer.model, ids, attention, length, compute_entropy=True
        )
    return log_probs, entropies


def used_bounds(trainer):
    """(low, high) with which TRL computes its loss."""
    return 1 - trainer.epsilon_low, 1 + trainer.epsilon_high


def step(trainer, *micro_batches):
    """TRL's own training steps on these micro-batches, without an update.

    Returns the losses, and the bounds used for each.
    """
    count = len(micro_batches)
    trainer._buffered_inputs = list(micro_batches)
    trainer._step = count  # not the first use, so nothing is generated
    trainer.args.steps_per_generation = count
    trainer.current_gradient_accumulation_steps = count
    losses = []
    bounds = []
    for _ in range(count):
        losses.append(trainer.training_step(trainer.model, {}, None).item())
        bounds.append(used_bounds(trainer))
    return losses, bounds


# ---------------------------------------------------------------- the oracle
def tokens(trainer, inputs):
    """Log-ratio, advantages and weights of TRL's own loss, stacked: [3, 1, N * T].

    Where every ratio is 1 no token is clipped, and d loss / d log-prob is -weight * advantage. So
    TRL itself tells the weights.
    """
    log_probs, entropies = forward(trainer, inputs)
    old_log_probs = inputs.get("old_per_token_logps", log_probs)
    leaf = log_probs.clone().requires_grad_()
    at_one = inputs | {"old_per_token_logps": log_probs}

    metrics = trainer._metrics["train"].copy()
    trainer._metrics["train"].clear()
    trainer._get_per_token_logps_and_entropies = lambda *_, **__: (leaf, entropies, None)
    GRPOTrainer._compute_loss(trainer, trainer.model, at_one).backward()
    del trainer._get_per_token_logps_and_entropies
    trainer._metrics["train"].clear()
    trainer._metrics["train"].update(metrics)

    advantages = inputs["advantages"].view(len(leaf), -1).expand_as(leaf)
    weights = torch.where(advantages == 0, 0.0, -leaf.grad / advantages)
    log_ratio = log_probs - old_log_probs
    return torch.stack([log_ratio, advantages, weights]).flatten(1).unsqueeze(1)


def expected(parts, search) -> ClipBounds:
    """What bapo.py finds on all these tokens."""
    log_ratio, advantages, weights = torch.cat(list(parts), dim=2)
    masses = contribution_masses(log_ratio, advantages, weights, search)
    return search_clip_bounds(masses, search)


def step_and_compare(trainer, micro_batches):
    """A step whose bounds are those of bapo.py, for a target that the search meets on its way."""
    parts = [tokens(trainer, inputs) for inputs in micro_batches]
    scopes = [parts] * 2 if trainer.args.search_scope == "step" else [[part] for part in parts]
    rho_start = expected(scopes[0], trainer._search).rho_start
    trainer._search = replace(trainer._search, rho0=rho_start + 0.002)
    searches = [expected(scope, trainer._search) for scope in scopes]
    assert searches[0].reached
    assert searches[0].high > trainer._search.high_start

    trainer._metrics["train"].clear()
    _, bounds = step(trainer, *micro_batches)
    assert bounds == [search[:2] for search in searches]
    logged = searches[:1] if trainer.args.search_scope == "step" else searches
    for name in ClipBounds._fields:
        values = [float(getattr(search, name)) for search in logged]
        assert trainer._metrics["train"][f"bapo/{name}"] == pytest.approx(values, rel=1e-5)
    return parts


# ---------------------------------------------------------------- one process, made-up samples
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_at_fixed_bounds_loss_and_gradient_are_grpos(loss_type, tmp_path):

    def clipped_step(trainer_class, options):
        """Losses, gradients, and TRL's metrics of clipping."""
        trainer = make(trainer_class, tmp_path, loss_type=loss_type, **options)
        trainer.beta = 0.1  # a KL term beside it
        micro_batches = [
            samples(trainer, seed, ref_per_token_logps=random_log_probs) for seed in (1, 2)
        ]
        losses, _ = step(trainer, *micro_batches)
        gradients = [parameter.grad for parameter in trainer.model.parameters()]
        metrics = trainer._metrics["train"].items()
        clipping = {name: values for name, values in metrics if name.startswith("clip_ratio")}
        return losses, gradients, clipping

    losses, gradients, clipping = clipped_step(GRPOTrainer, dict(epsilon=0.3, epsilon_high=0.28))
    fixed = dict(rho0=0.0, low_start=0.7, low_max=0.7, high_start=1.28, high_max=1.28)
    bapo_losses, bapo_gradients, bapo_clipping = clipped_step(BAPOTrainer, fixed)
    assert bapo_losses == pytest.approx(losses, rel=1e-6)
    torch.testing.assert_close(bapo_gradients, gradients, rtol=1e-5, atol=1e-8)
    assert bapo_clipping == clipping
    assert min(clipping["clip_ratio/low_mean"]) > 0.05
    assert min(clipping["clip_ratio/high_mean"]) > 0.05


@pytest.mark.parametrize("scope", ["micro-batch", "step"])
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_bounds_are_bapo_pys_on_the_tokens_of_trls_loss(loss_type, scope, tmp_path):
    trainer = make(BAPOTrainer, tmp_path, loss_type=loss_type, search_scope=scope)
    first = samples(trainer, seed=1)
    second = samples(trainer, seed=2)
    parts = step_and_compare(trainer, [first, second])
    alone = [expected([part], trainer._search)[:2] for part in parts]
    assert alone[0] != alone[1]
    # The next step is searched anew.
    _, bounds = step(trainer, second, second)
    assert bounds == [alone[1]] * 2


def random_log_probs(g, shape):
    return -2 - torch.rand(shape, generator=g)


def random_flags(g, shape):
    return (torch.rand(shape, generator=g) < 0.5).long()


def random_corrections(g, shape):
    return 2 * torch.rand(shape, generator=g)


def random_advantages(g, shape):
    return torch.randn(shape, generator=g)


EXTRAS = {
    "tool_mask": random_flags,
    "importance_sampling_ratio": random_corrections,
    "advantages": random_advantages,  # one per token
}


@pytest.mark.parametrize("scope", ["micro-batch", "step"])
@pytest.mark.parametrize("extra", EXTRAS)
def test_whatever_else_weighs_a_token_in_trls_loss_weighs_it_in_rho(extra, scope, tmp_path):
    """These are tools' masks and vLLM's correction."""
    trainer = make(BAPOTrainer, tmp_path, search_scope=scope)
    plain = expected([tokens(trainer, samples(trainer, 1))], trainer._search)
    trainer.use_vllm = extra == "importance_sampling_ratio"
    tensors = {extra: EXTRAS[extra]}
    parts = step_and_compare(trainer, [samples(trainer, seed, **tensors) for seed in (1, 2)])
    assert abs(expected(parts[:1], trainer._search).rho_start - plain.rho_start) > 1e-3


# ---------------------------------------------------------------- real training
def record(trainer):
    """Keep each micro-batch of a real training: its tokens, and the bounds that TRL's loss used."""
    trainer.records = []
    compute_loss = trainer._compute_loss

    def recorded(model, inputs):
        loss = compute_loss(model, inputs)
        if trainer.model.training:
            trainer.records.append((tokens(trainer, inputs), used_bounds(trainer)))
        return loss

    trainer._compute_loss = recorded


@pytest.mark.parametrize("scope", ["micro-batch", "step"])
@pytest.mark.parametrize(
    "reuse", [dict(num_iterations=2), dict(num_iterations=1, steps_per_generation=4)]
)
def test_trainings_bounds_are_those_of_its_tokens(reuse, scope, tmp_path):
    """Also with evaluation between the steps, which searches nothing."""
    evaluation = dict(eval_strategy="steps", eval_steps=1)
    trainer = make(BAPOTrainer, tmp_path, rho0=0.65, search_scope=scope, **reuse, **evaluation)
    record(trainer)
    trainer.train()
    assert len(trainer.records) == 8
    logged = [line["bapo/rho"] for line in trainer.state.log_history if "bapo/rho" in line]
    for i in range(4):
        of_step = trainer.records[2 * i : 2 * i + 2]
        parts = [part for part, _ in of_step]
        scopes = [parts] * 2 if scope == "step" else [[part] for part in parts]
        first, second = [expected(searched, trainer._search) for searched in scopes]
        assert [bounds for _, bounds in of_step] == [first[:2], second[:2]]
        assert logged[i] == pytest.approx((first.rho + second.rho) / 2, rel=1e-4)
        on_policy = i % 2 == 0  # the first update on these samples
        log_ratios = torch.cat([part[0] for part in parts], dim=1)
        assert (log_ratios.abs().max() < 1e-5) == on_policy


# Runs the page's script, which leaves its records.
RECORDED = """
import os
import runpy
import torch
import test_trl_bapo as toy
from trl import GRPOTrainer
from trl_bapo import BAPOTrainer

def train(trainer):
    toy.record(trainer)
    GRPOTrainer.train(trainer)
    torch.save(trainer.records, f"{trainer.accelerator.process_index}.pt")

BAPOTrainer.train = train
runpy.run_path("train_bapo.py", run_name="__main__")
torch.distributed.barrier()
os._exit(0)  # a normal exit sometimes aborts in the threads of torch's process groups
"""


def test_the_pages_script_in_two_processes_trains_with_the_bounds_of_all_their_tokens(tmp_path):
    """Both processes use the bounds of all tokens, although they hold unequal numbers of them."""
    page = (ROOT / "integrations/README.md").read_text()
    script, *_ = re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    (row,) = re.findall(r'^(\{"prompt": .*\})$', page, re.MULTILINE)
    (command,) = re.findall(r"^python (-m torch\..*)", page, re.MULTILINE)
    (tmp_path / "train_bapo.py").write_text(script)
    (tmp_path / "recorded.py").write_text(RECORDED)
    rows = [json.loads(row) | {"answer": answer} for answer in "12" * 8]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
    policy().save_pretrained(tmp_path / "policy")
    tokenizer().save_pretrained(tmp_path / "policy")

    words = command.replace("train_bapo.py", "recorded.py").split()
    options = OPTIONS | dict(report_to="none", max_steps=3, model_name_or_path="policy")
    options |= dict(rho0=0.635, search_scope="step", loss_type="bnpo")
    words += [f"--{name}={value}" for name, value in options.items()]
    environment = dict(os.environ, OMP_NUM_THREADS="1")
    environment["PYTHONPATH"] = f"{ROOT}:{ROOT / 'integrations'}:{ROOT / 'tests'}"
    run = subprocess.run(
        [sys.executable, *words],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr[-3000:]

    ranks = [torch.load(tmp_path / f"{rank}.pt", weights_only=False) for rank in (0, 1)]
    search = ClipSearch(rho0=0.635)
    for i in (0, 2, 4):  # the first of a step's two micro-batches
        records = [rank[at] for rank in ranks for at in (i, i + 1)]
        whole = expected([part for part, _ in records], search)
        assert [bounds for _, bounds in records] == [whole[:2]] * 4
    alone = [expected([part for part, _ in rank[:2]], search)[:2] for rank in ranks]
    assert alone[0] != alone[1]
    (trained,) = tmp_path.glob("runs/*/model.safetensors")
    assert trained.read_bytes() != (tmp_path / "policy/model.safetensors").read_bytes()


# ---------------------------------------------------------------- options
def test_options_are_parsed_like_those_of_trl(tmp_path):
    needed = dict(use_cpu=True, bf16=False, num_iterations=2, output_dir=str(tmp_path))
    search = ClipSearch(0.4, 0.7, 0.95, 0.05, 1.1, 2.1, 0.1, "surrogate")
    options = needed | asdict(search) | {"search_scope": "step"}
    arguments = [f"--{name}={value}" for name, value in options.items()]
    (args,) = HfArgumentParser(BAPOConfig).parse_args_into_dataclasses(arguments)
    assert args.clip_search() == search
    assert args.search_scope == "step"
    assert BAPOConfig(**needed).clip_search() == ClipSearch()


def test_options_that_contradict_the_search_are_refused(tmp_path):
    uneven = dict(gradient_accumulation_steps=4, steps_per_generation=2, num_iterations=3)
    for name, options in [
        ("loss_type", dict(loss_type="cispo")),
        ("importance_sampling_level", dict(importance_sampling_level="sequence")),
        ("epsilon", dict(epsilon=0.1)),
        ("epsilon_high", dict(epsilon_high=0.28)),
        ("delta", dict(delta=4.0)),
        ("off_policy_mask_threshold", dict(off_policy_mask_threshold=0.5)),
        ("top_entropy_quantile", dict(top_entropy_quantile=0.2)),
        ("rho0", dict(rho0=1.0)),
        ("search_scope", dict(search_scope="batch")),
        ("gradient_accumulation_steps", dict(search_scope="step", **uneven)),
    ]:
        with pytest.raises(ValueError, match=name):
            BAPOConfig(output_dir=str(tmp_path), **OPTIONS | options)
    args = GRPOConfig(output_dir=str(tmp_path), **OPTIONS)
    with pytest.raises(TypeError, match="BAPOConfig"):
        BAPOTrainer(policy(), reward, args, PROMPTS, processing_class=tokenizer())


@pytest.mark.parametrize(
    "reuse, idle",
    [
        (dict(num_iterations=1), True),
        (dict(num_iterations=1, steps_per_generation=1), True),
        (dict(num_iterations=2), False),
        (dict(num_iterations=1, steps_per_generation=4), False),
    ],
)
def test_a_configuration_whose_ratios_are_all_1_is_warned_of(reuse, idle, tmp_path, recwarn):
    BAPOConfig(output_dir=str(tmp_path), **OPTIONS | reuse)
    assert any("BAPO is GRPO" in str(warning.message) for warning in recwarn) == idle
