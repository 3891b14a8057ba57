"""integrations/trl_bapo.py on real trainers: what TRL's loss is given, against bapo.py on the tokens that TRL's loss weighs."""

import os
import runpy
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
trl = pytest.importorskip("trl")

from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import HfArgumentParser, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from trl import GRPOConfig, GRPOTrainer

from bapo import ClipSearch, search_clip_bounds
from integrations.trl_bapo import BAPOConfig, BAPOTrainer

pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")  # of transformers, in TRL
ROOT = Path(__file__).parent.parent
WORDS = ["[PAD]", "[EOS]", "[UNK]", *"abcdefgh"]
LOSS_TYPES = ("dapo", "bnpo", "grpo", "dr_grpo")
PROMPTS = Dataset.from_dict({"prompt": ["a b c", "d e", "f g h a", "b"] * 4})
# Generations are used twice, so that ratios leave 1; high learning rate, so that they leave it soon.
OPTIONS = dict(
    use_cpu=True, bf16=False, report_to=[], save_strategy="no", disable_tqdm=True, logging_steps=1, max_steps=4,
    num_generations=4, per_device_train_batch_size=4, gradient_accumulation_steps=2, num_iterations=2,
    max_completion_length=10, learning_rate=5e-2,
)  # fmt: skip


# ---------------------------------------------------------------- toys
def tokenizer():
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    special = dict(pad_token="[PAD]", eos_token="[EOS]", unk_token="[UNK]")
    return PreTrainedTokenizerFast(tokenizer_object=words, padding_side="left", **special)


def policy():
    torch.manual_seed(0)
    sizes = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1)
    return Qwen2ForCausalLM(Qwen2Config(vocab_size=len(WORDS), max_position_embeddings=32, **sizes))


def reward(completions, **_):
    """The more early letters the better, so short and long responses occur on both sides."""
    return [float(sum(word in "abc" for word in text.split())) for text in completions]


def make(trainer_class, tmp_path, **options):
    config_class = BAPOConfig if issubclass(trainer_class, BAPOTrainer) else GRPOConfig
    args = config_class(output_dir=str(tmp_path), **{**OPTIONS, **options})
    trainer = trainer_class(policy(), reward, args, PROMPTS, PROMPTS.select(range(4)), processing_class=tokenizer())
    trainer.current_gradient_accumulation_steps = args.gradient_accumulation_steps  # train() sets it
    return trainer


def samples(trainer, rows=8, seed=0, **extras):
    """A micro-batch as TRL's buffer holds it, with unequal lengths and ratios away from 1."""
    g = torch.Generator().manual_seed(seed)

    def integers(*shape):
        return torch.randint(3, len(WORDS), shape, generator=g)

    lengths = torch.randint(2, 13, (rows, 1), generator=g)
    inputs = {
        "prompt_ids": integers(rows, 3),
        "prompt_mask": (torch.arange(3) >= torch.randint(0, 3, (rows, 1), generator=g)).long(),
        "completion_ids": integers(rows, 12),
        "completion_mask": (torch.arange(12) < lengths).long(),
        "advantages": torch.randn(rows, generator=g) - 0.3,
        "num_items_in_batch": torch.tensor(100),  # of the whole generation batch
    }
    log_probs, _ = forward(trainer, inputs)
    inputs["old_per_token_logps"] = log_probs + 0.4 * torch.randn(log_probs.shape, generator=g)
    return {**inputs, **{name: extra(g, (rows, 12)) for name, extra in extras.items()}}


def forward(trainer, inputs):
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
    attention = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
    arguments = (trainer, trainer.model, ids, attention, inputs["completion_ids"].size(1))
    with torch.no_grad():
        return GRPOTrainer._get_per_token_logps_and_entropies(*arguments, compute_entropy=True)[:2]


def step(trainer, *micro_batches):
    """TRL's own training steps on these micro-batches, without an update: losses, and the bounds used for each."""
    trainer._buffered_inputs, trainer._step = list(micro_batches), len(micro_batches)  # not the first use: nothing is generated
    trainer.args.steps_per_generation = trainer.current_gradient_accumulation_steps = len(micro_batches)
    losses, bounds = [], []
    for i in range(len(micro_batches)):
        trainer.accelerator.gradient_state._set_sync_gradients(i == len(micro_batches) - 1)
        losses.append(trainer.training_step(trainer.model, {}, None).item())
        bounds.append((1 - trainer.epsilon_low, 1 + trainer.epsilon_high))
    return losses, bounds


# ---------------------------------------------------------------- the oracle
def tokens(trainer, inputs):
    """Log-ratio, advantages and weights of TRL's own loss, each [1, N * T].

    Where every ratio is 1 no token is clipped, and d loss / d log-prob is -weight * advantage: TRL itself tells the weights.
    """
    log_probs, entropies = forward(trainer, inputs)
    old = inputs.get("old_per_token_logps", log_probs)
    leaf = log_probs.clone().requires_grad_()
    kept = trainer._metrics["train"].copy()
    trainer._metrics["train"].clear()
    trainer._get_per_token_logps_and_entropies = lambda *_, **__: (leaf, entropies, None)
    at_one = {"sampling_per_token_logps": old, **inputs, "old_per_token_logps": log_probs}
    GRPOTrainer._compute_loss(trainer, trainer.model, at_one).backward()
    del trainer._get_per_token_logps_and_entropies
    trainer._metrics["train"].clear()
    trainer._metrics["train"].update(kept)
    advantages = inputs["advantages"].view(len(leaf), -1).expand_as(leaf)
    weights = torch.where(advantages == 0, 0.0, -leaf.grad / advantages)
    return torch.stack([log_probs - old, advantages, weights]).flatten(1).unsqueeze(1)


def expected(parts, search):
    return search_clip_bounds(*torch.cat(list(parts), dim=2), search)


def record(trainer):
    """Keep, for every micro-batch of a real training, its tokens and the bounds with which TRL computed the loss."""
    trainer.records, compute_loss = [], trainer._compute_loss

    def recorded(model, inputs):
        loss = compute_loss(model, inputs)
        if trainer.model.training:
            trainer.records.append((tokens(trainer, inputs), (1 - trainer.epsilon_low, 1 + trainer.epsilon_high)))
        return loss

    trainer._compute_loss = recorded


def pair(bounds):
    return bounds.low.item(), bounds.high.item()


def set_target_inside_the_grid(trainer, *micro_batches):
    search = trainer._search
    rho = expected((tokens(trainer, inputs) for inputs in micro_batches), search).rho_start.item()
    trainer._search = replace(search, rho0=rho + 0.02)
    return trainer._search


def inside(bounds, search):
    return search.high_start < bounds[1] < search.high_max or search.low_start < bounds[0] < search.low_max


# ---------------------------------------------------------------- one process, made-up samples
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_at_fixed_bounds_loss_and_gradient_are_grpos(loss_type, tmp_path):
    """Kills: a wrong sign or origin of epsilon, bounds that are set after the loss, a changed loss."""
    fixed = dict(rho0=0.0, low_start=0.7, low_max=0.7, high_start=1.28, high_max=1.28)
    results = []
    for trainer_class, options in ((GRPOTrainer, dict(epsilon=0.3, epsilon_high=0.28)), (BAPOTrainer, fixed)):
        trainer = make(trainer_class, tmp_path, loss_type=loss_type, **options)
        trainer.beta = 0.1  # a KL term beside it
        reference = dict(ref_per_token_logps=lambda g, shape: -2 - torch.rand(shape, generator=g))
        losses, _ = step(trainer, samples(trainer, seed=1, **reference), samples(trainer, seed=2, **reference))
        metrics = {name: values for name, values in trainer._metrics["train"].items() if name.startswith("clip_ratio")}
        results.append((losses, [p.grad for p in trainer.model.parameters()], metrics))
    grpo, bapo = results
    assert bapo[0] == pytest.approx(grpo[0], rel=1e-6)
    torch.testing.assert_close(bapo[1], grpo[1], rtol=1e-5, atol=1e-8)
    assert bapo[2] == grpo[2] and min(grpo[2]["clip_ratio/low_mean"] + grpo[2]["clip_ratio/high_mean"]) > 0.05


@pytest.mark.parametrize("scope", ["micro-batch", "step"])
@pytest.mark.parametrize("contribution", ["surrogate", "gradient"])
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_bounds_are_bapo_pys_on_the_tokens_and_weights_of_trls_loss(loss_type, contribution, scope, tmp_path):
    """Kills: weights of another loss type, a window that misses a micro-batch, a search per micro-batch in its place."""
    trainer = make(BAPOTrainer, tmp_path, loss_type=loss_type, contribution=contribution, search_scope=scope)
    first, second = samples(trainer, seed=1), samples(trainer, seed=2)
    parts = [first, second] if scope == "step" else [first]
    search = set_target_inside_the_grid(trainer, *parts)
    _, bounds = step(trainer, first, second)
    seen = [tokens(trainer, inputs) for inputs in (first, second)]
    alone = [expected([part], search) for part in seen]
    found = [expected(seen, search)] if scope == "step" else alone
    assert bounds == [pair(found[0]), pair(found[-1])] and inside(bounds[0], search)
    assert pair(alone[0]) != pair(alone[1])
    for name in ("low", "high", "rho", "rho_start", "reached"):
        assert trainer._metrics["train"][f"bapo/{name}"] == pytest.approx([float(getattr(f, name)) for f in found], rel=1e-5)
    # A new window is searched anew.
    assert step(trainer, second, second)[1] == [pair(alone[1])] * 2


EXTRAS = {
    "tool_mask": ({}, dict(tool_mask=lambda g, shape: (torch.rand(shape, generator=g) < 0.5).long())),
    "vllm_per_token": (
        dict(use_vllm=True),
        dict(importance_sampling_ratio=lambda g, shape: 2 * torch.rand(shape, generator=g)),
    ),
    "vllm_per_response": (
        dict(use_vllm=True),
        dict(importance_sampling_ratio=lambda g, shape: 2 * torch.rand(shape[0], 1, generator=g)),
    ),
    "off_policy_mask": (dict(off_policy_mask_threshold=0.0), {}),
    "off_policy_mask_of_sampler": (
        dict(off_policy_mask_threshold=0.0),
        dict(sampling_per_token_logps=lambda g, shape: -2 - torch.rand(shape, generator=g)),
    ),
    "entropy_mask": (dict(top_entropy_quantile=0.4), {}),
    "advantages_per_token": ({}, dict(advantages=lambda g, shape: torch.randn(shape, generator=g))),
}


@pytest.mark.parametrize("scope", ["micro-batch", "step"])
@pytest.mark.parametrize("extra", EXTRAS)
def test_whatever_else_weighs_a_token_in_trls_loss_weighs_it_in_rho(extra, scope, tmp_path):
    """Kills: a forgotten tool_mask, vLLM correction, off-policy or entropy mask."""
    settings, tensors = EXTRAS[extra]
    trainer = make(BAPOTrainer, tmp_path, search_scope=scope)
    plain = [expected([tokens(trainer, samples(trainer, seed=seed))], trainer._search).rho_start for seed in (1, 2)]
    for name, value in settings.items():
        setattr(trainer, name, value)
    batches = [samples(trainer, seed=seed, **tensors) for seed in (1, 2)]
    search = set_target_inside_the_grid(trainer, *batches)
    _, bounds = step(trainer, *batches)
    seen = [tokens(trainer, inputs) for inputs in batches]
    found = [expected(seen, search)] * 2 if scope == "step" else [expected([part], search) for part in seen]
    assert bounds == [pair(f) for f in found]
    assert all(abs(f.rho_start - rho) > 1e-3 for f, rho in zip([expected([part], search) for part in seen], plain))


# ---------------------------------------------------------------- one process, real training
def curve(trainer, name):
    return [line[f"bapo/{name}"] for line in trainer.state.log_history if f"bapo/{name}" in line]


@pytest.mark.parametrize("scope", ["micro-batch", "step"])
@pytest.mark.parametrize("reuse", [dict(num_iterations=2), dict(num_iterations=1, steps_per_generation=4)])
def test_training_moves_bounds_that_are_those_of_its_tokens(reuse, scope, tmp_path):
    """Kills: log-probs of another moment, another place of the window in TRL's buffer, bounds that are never set again."""
    trainer = make(BAPOTrainer, tmp_path, rho0=0.65, contribution="gradient", search_scope=scope, **reuse)
    before = [p.detach().clone() for p in trainer.model.parameters()]
    record(trainer)
    trainer.train()
    assert len(trainer.records) == 8 and trainer.state.global_step == 4
    for i in range(0, 8, 2):
        (first, bounds), (second, bounds_2) = trainer.records[i : i + 2]
        whole = pair(expected([first, second], trainer._search))
        parts = [pair(expected([part], trainer._search)) for part in (first, second)]
        assert [bounds, bounds_2] == ([whole] * 2 if scope == "step" else parts)
        ratios_are_one = i % 4 == 0  # the first of the two updates on these samples
        assert (torch.cat([first[0], second[0]]).abs().max() < 1e-5) == ratios_are_one
        assert curve(trainer, "low")[i // 2] == pytest.approx((bounds[0] + bounds_2[0]) / 2)
        assert curve(trainer, "high")[i // 2] == pytest.approx((bounds[1] + bounds_2[1]) / 2)
    assert all(len(curve(trainer, name)) == 4 for name in ("rho", "rho_start", "reached"))
    assert any(inside(bounds, trainer._search) for _, bounds in trainer.records)
    assert all(not torch.equal(p, q) for p, q in zip(before, trainer.model.parameters()))


def test_the_bounds_of_a_step_do_not_depend_on_its_micro_batches(tmp_path):
    """Kills: a window of the wrong length or place, weights of one micro-batch, a pre-pass that leaves something behind."""
    runs = []
    for scope, accumulation in (("step", 1), ("step", 2), ("step", 4), ("micro-batch", 4)):
        options = dict(
            per_device_train_batch_size=8 // accumulation, gradient_accumulation_steps=accumulation, num_iterations=3
        )
        trainer = make(BAPOTrainer, tmp_path, rho0=0.7, contribution="gradient", search_scope=scope, max_steps=6, **options)
        trainer.train()
        assert len(curve(trainer, "low")) == 6
        runs.append((curve(trainer, "low") + curve(trainer, "high"), list(trainer.model.parameters())))
    assert runs[0][0] == runs[1][0] == runs[2][0] != runs[3][0]
    assert len(set(runs[0][0][6:])) > 2  # the upper bound moved
    for run in runs[1:3]:
        torch.testing.assert_close(run[1], runs[0][1], rtol=1e-3, atol=1e-4)


def test_evaluation_neither_searches_nor_changes_anything(tmp_path):
    """Kills: a search in evaluation, whose metrics and bounds would leak into training."""
    runs = []
    for options in ({}, dict(eval_strategy="steps", eval_steps=1, per_device_eval_batch_size=4)):
        trainer = make(BAPOTrainer, tmp_path, rho0=0.5, contribution="gradient", **options)
        record(trainer)
        if options:  # evaluation draws samples of its own, after which training must go on as if it had not
            evaluate = trainer.evaluate

            def evaluation_apart(*arguments, evaluate=evaluate, trainer=trainer, **named):
                bounds = trainer.epsilon_low, trainer.epsilon_high
                with torch.random.fork_rng():
                    metrics = evaluate(*arguments, **named)
                assert (trainer.epsilon_low, trainer.epsilon_high) == bounds
                return metrics

            trainer.evaluate = evaluation_apart
        trainer.train()
        runs.append((curve(trainer, "low"), curve(trainer, "high"), [bounds for _, bounds in trainer.records]))
    evaluations = [line for line in trainer.state.log_history if "eval_loss" in line]
    assert len(evaluations) == 4 and not any("bapo" in name for line in evaluations for name in line)
    assert runs[0] == runs[1]


# ---------------------------------------------------------------- two processes
SCRIPT = """
import torch
from transformers import HfArgumentParser
from trl import GRPOConfig, GRPOTrainer
import test_trl_bapo as toy

(args,) = HfArgumentParser(GRPOConfig).parse_args_into_dataclasses()
trainer = GRPOTrainer(toy.policy(), toy.reward, args, toy.PROMPTS, processing_class=toy.tokenizer())
toy.record(trainer)
trainer.train()
kept = dict(records=trainer.records, weights=list(trainer.model.parameters()), log=trainer.state.log_history)
torch.save(kept, f"{args.output_dir}/{trainer.accelerator.process_index}.pt")
trainer.accelerator.end_training()
"""
CHANGED_LINES = {
    "from trl import GRPOConfig, GRPOTrainer": "from trl_bapo import BAPOConfig as GRPOConfig, BAPOTrainer",
    "trainer = GRPOTrainer(": "trainer = BAPOTrainer(",
}


@pytest.mark.parametrize("scope, loss_type", [("micro-batch", "bnpo"), ("step", "grpo")])
def test_two_processes_train_with_the_bounds_of_all_their_tokens(scope, loss_type, tmp_path):
    """Kills: bounds per process, masses that are averaged with unequal weights, a collective that only one process calls."""
    script = SCRIPT
    for line, changed in CHANGED_LINES.items():
        assert script.count(line) == 1
        script = script.replace(line, changed)
    (tmp_path / "script.py").write_text(script)
    options = {**OPTIONS, "report_to": "none", "max_steps": 3, "rho0": 0.65, "contribution": "gradient"}
    options |= dict(search_scope=scope, loss_type=loss_type, output_dir=tmp_path)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", str(tmp_path / "script.py")]
    command += [f"--{name}={value}" for name, value in options.items()]
    path = os.pathsep.join(map(str, [ROOT, ROOT / "integrations", ROOT / "tests"]))
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=180, check=False)
    assert run.returncode == 0, run.stderr[-3000:]

    first, second = (torch.load(tmp_path / f"{rank}.pt", weights_only=False) for rank in (0, 1))
    search = ClipSearch(rho0=0.65, contribution="gradient")
    counts, alone, used = [], [], []
    for i in range(0, 6, 2):
        window = [rank["records"][i : i + 2] for rank in (first, second)]
        for j in (0, 1):
            scanned = [part for part, _ in window[0] + window[1]] if scope == "step" else [window[0][j][0], window[1][j][0]]
            bounds = pair(expected(scanned, search))
            assert window[0][j][1] == window[1][j][1] == bounds
            alone += [pair(expected([window[rank][j][0]], search)) == bounds for rank in (0, 1)]
            used.append(bounds)
            counts.append([(window[rank][j][0][2] != 0).sum().item() for rank in (0, 1)])
    assert all(a != b for a, b in counts) and not all(alone) and any(inside(bounds, search) for bounds in used)
    assert all(torch.equal(p, q) for p, q in zip(first["weights"], second["weights"]))
    assert sum("bapo/rho" in line for line in first["log"]) == 3


# ---------------------------------------------------------------- options
def test_options_are_parsed_like_those_of_trl(tmp_path):
    search = ClipSearch(0.4, 0.7, 0.95, 0.05, 1.1, 2.0, 0.1, "surrogate", True)
    assert all(value != getattr(ClipSearch(), name) for name, value in vars(search).items())
    options = {
        **vars(search),
        "search_scope": "step",
        "use_cpu": True,
        "bf16": False,
        "num_iterations": 2,
        "output_dir": tmp_path,
    }
    (args,) = HfArgumentParser(BAPOConfig).parse_args_into_dataclasses([f"--{name}={value}" for name, value in options.items()])
    assert args.clip_search() == search and args.search_scope == "step" and args.num_iterations == 2
    default = BAPOConfig(use_cpu=True, bf16=False, num_iterations=2)
    assert default.clip_search() == ClipSearch() and default.search_scope == "micro-batch"
    off = HfArgumentParser(BAPOConfig).parse_args_into_dataclasses(["--use_cpu=True", "--bf16=False", "--num_iterations=2"])
    assert off[0].clip_search() == ClipSearch()


@pytest.mark.parametrize(
    "options, named",
    [
        *[(dict(loss_type=name), f"loss_type='{name}'.*dr_grpo") for name in ("cispo", "sapo", "vespo", "luspo")],
        (dict(importance_sampling_level="sequence"), "importance_sampling_level='sequence'.*'token'"),
        (dict(epsilon=0.1), "epsilon=0.1.*low_start"),
        (dict(epsilon_high=0.28), "epsilon_high=0.28.*high_start"),
        (dict(delta=4.0), "delta=4.0.*Remove it"),
        (dict(rho0=1.0), "rho0"),
        (dict(low_step=0.07), "low_step"),
        (dict(search_scope="batch"), "search_scope.*'batch'"),
        (dict(search_scope="step", gradient_accumulation_steps=4, steps_per_generation=2, num_iterations=3), "multiple.*=4"),
    ],
)
def test_options_that_contradict_the_search_are_refused(options, named, tmp_path):
    with pytest.raises(ValueError, match=named):
        BAPOConfig(output_dir=str(tmp_path), **{**OPTIONS, **options})


def test_a_grpo_config_is_refused(tmp_path):
    with pytest.raises(TypeError, match="BAPOConfig.*GRPOConfig"):
        BAPOTrainer(policy(), reward, GRPOConfig(output_dir=str(tmp_path), **OPTIONS), PROMPTS, processing_class=tokenizer())


@pytest.mark.parametrize(
    "reuse, idle",
    [
        (dict(num_iterations=1), True),
        (dict(num_iterations=1, steps_per_generation=1), True),
        (dict(num_iterations=2), False),
        (dict(num_iterations=1, steps_per_generation=4), False),
    ],
)
def test_idle_configurations_are_warned_of_and_only_they(reuse, idle, tmp_path, recwarn):
    """And the ratios of a real training are what the warning says."""
    trainer = make(BAPOTrainer, tmp_path, **{**reuse, "max_steps": 2})
    assert any("all ratios are 1" in str(warning.message) for warning in recwarn) == idle
    record(trainer)
    trainer.train()
    assert all(part[0].abs().max() < 1e-5 for part, _ in trainer.records) == idle


@pytest.mark.parametrize("version, warned_of", [("1.15.0", True), ("1.16.0", False), ("1.16.3", False), ("1.17.0", True)])
def test_another_version_of_trl_is_warned_of(version, warned_of, monkeypatch, recwarn):
    monkeypatch.setattr(trl, "__version__", version)
    runpy.run_path(str(ROOT / "integrations" / "trl_bapo.py"))
    assert any(f"not {version}" in str(warning.message) for warning in recwarn) == warned_of
