"""integrations/trl_bapo.py on real trainers. Skipped without TRL.

What TRL's loss is given is compared with bapo.py, on the tokens that TRL's loss weighs.
"""

import os
import runpy
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

from bapo import ClipBounds, ClipSearch, search_clip_bounds
from integrations.trl_bapo import BAPOConfig, BAPOTrainer

# Of transformers, in TRL.
pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")
ROOT = Path(__file__).parent.parent
WORDS = ["[PAD]", "[EOS]", "[UNK]", "a", "b", "c", "d", "e", "f", "g", "h"]
LOSS_TYPES = ("dapo", "bnpo", "grpo", "dr_grpo")
PROMPTS = Dataset.from_dict({"prompt": ["a b c", "d e", "f g h a", "b"] * 4})
# Generations are used twice, so that ratios leave 1; by the high learning rate they leave it soon.
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
    """The more early letters the better: short and long responses occur on both sides."""
    rewards = []
    for text in completions:
        early = [word for word in text.split() if word in "abc"]
        rewards.append(float(len(early)))
    return rewards


def make(trainer_class, tmp_path, **options):
    config_class = BAPOConfig if issubclass(trainer_class, BAPOTrainer) else GRPOConfig
    args = config_class(output_dir=str(tmp_path), **OPTIONS | options)
    trainer = trainer_class(
        policy(), reward, args, PROMPTS, PROMPTS.select(range(4)), processing_class=tokenizer()
    )
    # train() would set it.
    trainer.current_gradient_accumulation_steps = args.gradient_accumulation_steps
    return trainer


# ---------------------------------------------------------------- made-up samples
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
    move = 0.4 * torch.randn(log_probs.shape, generator=g)
    inputs["old_per_token_logps"] = log_probs + move
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
    for i in range(count):
        trainer.accelerator.gradient_state._set_sync_gradients(i == count - 1)
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
    at_one = {"sampling_per_token_logps": old_log_probs} | inputs
    at_one["old_per_token_logps"] = log_probs

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


def expected(parts, search):
    """What bapo.py finds on all these tokens."""
    log_ratio, advantages, weights = torch.cat(list(parts), dim=2)
    return search_clip_bounds(log_ratio, advantages, weights, search)


def expected_bounds(parts, search):
    bounds = expected(parts, search)
    return bounds.low.item(), bounds.high.item()


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


def set_target_inside_the_grid(trainer, *micro_batches):
    parts = [tokens(trainer, inputs) for inputs in micro_batches]
    rho = expected(parts, trainer._search).rho_start.item()
    trainer._search = replace(trainer._search, rho0=rho + 0.02)
    return trainer._search


def is_inside(bounds, search):
    """Whether the search stopped inside its range, and not at an end of it."""
    low, high = bounds
    low_moved = search.low_start < low < search.low_max
    high_moved = search.high_start < high < search.high_max
    return low_moved or high_moved


# ---------------------------------------------------------------- one process, made-up samples
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_at_fixed_bounds_loss_and_gradient_are_grpos(loss_type, tmp_path):
    """Kills: a wrong sign or origin of epsilon, bounds that are set after the loss."""
    fixed = dict(rho0=0.0, low_start=0.7, low_max=0.7, high_start=1.28, high_max=1.28)
    epsilons = dict(epsilon=0.3, epsilon_high=0.28)

    def reference(g, shape):
        return -2 - torch.rand(shape, generator=g)

    def clipped_step(trainer_class, options):
        """Losses, gradients, and TRL's metrics of clipping."""
        trainer = make(trainer_class, tmp_path, loss_type=loss_type, **options)
        trainer.beta = 0.1  # a KL term beside it
        first = samples(trainer, seed=1, ref_per_token_logps=reference)
        second = samples(trainer, seed=2, ref_per_token_logps=reference)
        losses, _ = step(trainer, first, second)
        gradients = [parameter.grad for parameter in trainer.model.parameters()]
        metrics = trainer._metrics["train"].items()
        clipping = {name: values for name, values in metrics if name.startswith("clip_ratio")}
        return losses, gradients, clipping

    grpo_losses, grpo_gradients, grpo_clipping = clipped_step(GRPOTrainer, epsilons)
    bapo_losses, bapo_gradients, bapo_clipping = clipped_step(BAPOTrainer, fixed)
    assert bapo_losses == pytest.approx(grpo_losses, rel=1e-6)
    torch.testing.assert_close(bapo_gradients, grpo_gradients, rtol=1e-5, atol=1e-8)
    assert bapo_clipping == grpo_clipping
    assert min(grpo_clipping["clip_ratio/low_mean"]) > 0.05
    assert min(grpo_clipping["clip_ratio/high_mean"]) > 0.05


@pytest.mark.parametrize("scope", ["micro-batch", "step"])
@pytest.mark.parametrize("contribution", ["surrogate", "gradient"])
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_bounds_are_bapo_pys_on_the_tokens_of_trls_loss(loss_type, contribution, scope, tmp_path):
    """Kills: weights of another loss type, a step that misses a micro-batch, the other scope."""
    trainer = make(
        BAPOTrainer,
        tmp_path,
        loss_type=loss_type,
        contribution=contribution,
        search_scope=scope,
    )
    first = samples(trainer, seed=1)
    second = samples(trainer, seed=2)
    target_from = [first, second] if scope == "step" else [first]
    search = set_target_inside_the_grid(trainer, *target_from)

    _, bounds = step(trainer, first, second)
    parts = [tokens(trainer, first), tokens(trainer, second)]
    alone = [expected_bounds([part], search) for part in parts]
    assert alone[0] != alone[1]
    if scope == "step":
        assert bounds == [expected_bounds(parts, search)] * 2
        searches = [expected(parts, search)]
    else:
        assert bounds == alone
        searches = [expected([part], search) for part in parts]
    assert is_inside(bounds[0], search)
    for name in ClipBounds._fields:
        values = [float(getattr(result, name)) for result in searches]
        assert trainer._metrics["train"][f"bapo/{name}"] == pytest.approx(values, rel=1e-5)

    # The next step is searched anew.
    _, bounds = step(trainer, second, second)
    assert bounds == [alone[1]] * 2


def random_flags(g, shape):
    return (torch.rand(shape, generator=g) < 0.5).long()


def random_corrections(g, shape):
    return 2 * torch.rand(shape, generator=g)


def random_corrections_per_response(g, shape):
    return 2 * torch.rand(shape[0], 1, generator=g)


def random_log_probs(g, shape):
    return -2 - torch.rand(shape, generator=g)


def random_advantages(g, shape):
    return torch.randn(shape, generator=g)


# Name: settings of the trainer, and further tensors of the samples.
EXTRAS = {
    "tool_mask": ({}, dict(tool_mask=random_flags)),
    "vllm_per_token": (
        dict(use_vllm=True),
        dict(importance_sampling_ratio=random_corrections),
    ),
    "vllm_per_response": (
        dict(use_vllm=True),
        dict(importance_sampling_ratio=random_corrections_per_response),
    ),
    "off_policy_mask": (dict(off_policy_mask_threshold=0.0), {}),
    "off_policy_mask_of_sampler": (
        dict(off_policy_mask_threshold=0.0),
        dict(sampling_per_token_logps=random_log_probs),
    ),
    "entropy_mask": (dict(top_entropy_quantile=0.4), {}),
    "advantages_per_token": ({}, dict(advantages=random_advantages)),
}


@pytest.mark.parametrize("scope", ["micro-batch", "step"])
@pytest.mark.parametrize("extra", EXTRAS)
def test_whatever_else_weighs_a_token_in_trls_loss_weighs_it_in_rho(extra, scope, tmp_path):
    """Kills: a forgotten tool_mask, vLLM correction, off-policy or entropy mask."""
    settings, tensors = EXTRAS[extra]
    trainer = make(BAPOTrainer, tmp_path, search_scope=scope)
    shares_without = []
    for seed in (1, 2):
        part = tokens(trainer, samples(trainer, seed))
        shares_without.append(expected([part], trainer._search).rho_start)

    for name, value in settings.items():
        setattr(trainer, name, value)
    batches = [samples(trainer, seed, **tensors) for seed in (1, 2)]
    search = set_target_inside_the_grid(trainer, *batches)
    _, bounds = step(trainer, *batches)
    parts = [tokens(trainer, inputs) for inputs in batches]
    if scope == "step":
        assert bounds == [expected_bounds(parts, search)] * 2
    else:
        assert bounds == [expected_bounds([part], search) for part in parts]
    for part, share_without in zip(parts, shares_without):
        assert abs(expected([part], search).rho_start - share_without) > 1e-3


# ---------------------------------------------------------------- one process, real training
def curve(trainer, name):
    logged = trainer.state.log_history
    return [line[f"bapo/{name}"] for line in logged if f"bapo/{name}" in line]


@pytest.mark.parametrize("scope", ["micro-batch", "step"])
@pytest.mark.parametrize(
    "reuse", [dict(num_iterations=2), dict(num_iterations=1, steps_per_generation=4)]
)
def test_training_moves_bounds_that_are_those_of_its_tokens(reuse, scope, tmp_path):
    """Kills: log-probs of another moment, another place in TRL's buffer, bounds set only once."""
    trainer = make(BAPOTrainer, tmp_path, rho0=0.65, search_scope=scope, **reuse)
    search = trainer._search
    parameters = list(trainer.model.parameters())
    before = [parameter.detach().clone() for parameter in parameters]
    record(trainer)
    trainer.train()
    assert trainer.state.global_step == 4
    assert len(trainer.records) == 8
    for i in range(4):
        first, first_bounds = trainer.records[2 * i]
        second, second_bounds = trainer.records[2 * i + 1]
        if scope == "step":
            whole = expected_bounds([first, second], search)
            assert first_bounds == second_bounds == whole
        else:
            assert first_bounds == expected_bounds([first], search)
            assert second_bounds == expected_bounds([second], search)
        first_on_these_samples = i % 2 == 0
        log_ratios = torch.cat([first[0], second[0]], dim=1)
        assert (log_ratios.abs().max() < 1e-5) == first_on_these_samples
        means = torch.tensor([first_bounds, second_bounds], dtype=torch.float64).mean(0)
        assert curve(trainer, "low")[i] == pytest.approx(means[0].item())
        assert curve(trainer, "high")[i] == pytest.approx(means[1].item())
    for name in ("rho", "rho_start", "reached"):
        assert len(curve(trainer, name)) == 4
    assert any(is_inside(bounds, search) for _, bounds in trainer.records)
    for old, new in zip(before, parameters):
        assert not torch.equal(old, new)


def test_the_bounds_of_a_step_do_not_depend_on_its_micro_batches(tmp_path):
    """Kills: a step of the wrong length or place, weights of one part, traces of searches."""

    def run(scope, accumulation):
        trainer = make(
            BAPOTrainer,
            tmp_path,
            rho0=0.7,
            search_scope=scope,
            max_steps=6,
            per_device_train_batch_size=8 // accumulation,
            gradient_accumulation_steps=accumulation,
            num_iterations=3,
        )
        trainer.train()
        bounds = list(zip(curve(trainer, "low"), curve(trainer, "high")))
        assert len(bounds) == 6
        return bounds, list(trainer.model.parameters())

    bounds, parameters = run("step", 1)
    assert len({high for _, high in bounds}) > 2  # it moved
    for accumulation in (2, 4):
        split_bounds, split_parameters = run("step", accumulation)
        assert split_bounds == bounds
        torch.testing.assert_close(split_parameters, parameters, rtol=1e-3, atol=1e-4)
    bounds_of_micro_batches, _ = run("micro-batch", 4)
    assert bounds_of_micro_batches != bounds


def test_evaluation_neither_searches_nor_changes_anything(tmp_path):
    """Kills: a search in evaluation, whose metrics and bounds would leak into training."""

    def train(trainer):
        """Makes no other trainer beside it, since each seeds the generator of the samples."""
        record(trainer)
        trainer.train()
        used = [bounds for _, bounds in trainer.records]
        return curve(trainer, "low"), curve(trainer, "high"), used

    without_evaluation = train(make(BAPOTrainer, tmp_path, rho0=0.5))
    evaluated = make(
        BAPOTrainer,
        tmp_path,
        rho0=0.5,
        eval_strategy="steps",
        eval_steps=1,
        per_device_eval_batch_size=4,
    )
    evaluate = evaluated.evaluate

    def evaluate_apart(*arguments, **options):
        """Evaluation draws samples, after which training must go on as if it had not."""
        bounds = used_bounds(evaluated)
        with torch.random.fork_rng():
            metrics = evaluate(*arguments, **options)
        assert used_bounds(evaluated) == bounds
        return metrics

    evaluated.evaluate = evaluate_apart
    assert train(evaluated) == without_evaluation
    evaluations = [line for line in evaluated.state.log_history if "eval_loss" in line]
    assert len(evaluations) == 4
    for line in evaluations:
        assert not any("bapo" in name for name in line)


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
kept = {
    "records": trainer.records,
    "weights": list(trainer.model.parameters()),
    "log": trainer.state.log_history,
}
torch.save(kept, f"{args.output_dir}/{trainer.accelerator.process_index}.pt")
trainer.accelerator.end_training()
"""
# The two lines that the docstring of trl_bapo.py has one change.
CHANGED_LINES = {
    "from trl import GRPOConfig, GRPOTrainer": (
        "from trl_bapo import BAPOConfig as GRPOConfig, BAPOTrainer"
    ),
    "trainer = GRPOTrainer(": "trainer = BAPOTrainer(",
}


def train_in_two_processes(folder, **options):
    """What each of the two processes kept."""
    script = SCRIPT
    for line, changed in CHANGED_LINES.items():
        assert script.count(line) == 1
        script = script.replace(line, changed)
    (folder / "script.py").write_text(script)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    command.append(str(folder / "script.py"))
    options = OPTIONS | {"report_to": "none", "output_dir": folder} | options
    command += [f"--{name}={value}" for name, value in options.items()]
    environment = dict(os.environ)
    environment["PYTHONPATH"] = f"{ROOT}:{ROOT / 'integrations'}:{ROOT / 'tests'}"
    environment["OMP_NUM_THREADS"] = "1"
    run = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=180, check=False
    )
    assert run.returncode == 0, run.stderr[-3000:]
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in (0, 1)]


@pytest.mark.parametrize("scope, loss_type", [("micro-batch", "bnpo"), ("step", "grpo")])
def test_two_processes_train_with_the_bounds_of_all_their_tokens(scope, loss_type, tmp_path):
    """Kills: bounds per process, masses averaged with unequal weights, a one-sided collective."""
    ranks = train_in_two_processes(
        tmp_path, max_steps=3, rho0=0.65, search_scope=scope, loss_type=loss_type
    )
    search = ClipSearch(rho0=0.65)
    all_bounds = []
    one_rank_suffices = []
    for i in range(6):
        part_of_first, bounds = ranks[0]["records"][i]
        part_of_second, bounds_of_second = ranks[1]["records"][i]
        assert bounds == bounds_of_second
        searched = [part_of_first, part_of_second]
        if scope == "step":
            other = i + 1 if i % 2 == 0 else i - 1  # the step's other micro-batch
            searched += [rank["records"][other][0] for rank in ranks]
        assert bounds == expected_bounds(searched, search)
        all_bounds.append(bounds)
        one_rank_suffices.append(expected_bounds([part_of_first], search) == bounds)
        one_rank_suffices.append(expected_bounds([part_of_second], search) == bounds)
        tokens_of_first = (part_of_first[2] != 0).sum()
        tokens_of_second = (part_of_second[2] != 0).sum()
        assert tokens_of_first != tokens_of_second  # so that a wrong weight would show
    assert not all(one_rank_suffices)
    assert any(is_inside(bounds, search) for bounds in all_bounds)
    for parameter, parameter_of_second in zip(ranks[0]["weights"], ranks[1]["weights"]):
        assert torch.equal(parameter, parameter_of_second)
    assert sum("bapo/rho" in line for line in ranks[0]["log"]) == 3


# ---------------------------------------------------------------- options
def parse(**options):
    arguments = [f"--{name}={value}" for name, value in options.items()]
    (args,) = HfArgumentParser(BAPOConfig).parse_args_into_dataclasses(arguments)
    return args


def test_options_are_parsed_like_those_of_trl(tmp_path):
    needed = dict(use_cpu=True, bf16=False, num_iterations=2)
    search = ClipSearch(
        rho0=0.4,
        low_start=0.7,
        low_max=0.95,
        low_step=0.05,
        high_start=1.1,
        high_max=2.1,
        high_step=0.1,
        contribution="surrogate",
        may_empty=True,
    )
    for name, value in asdict(search).items():
        assert value != getattr(ClipSearch(), name)
    args = parse(output_dir=tmp_path, search_scope="step", **needed, **asdict(search))
    assert args.clip_search() == search
    assert args.search_scope == "step"
    assert args.num_iterations == 2
    for default in (BAPOConfig(**needed), parse(**needed)):
        assert default.clip_search() == ClipSearch()
        assert default.search_scope == "micro-batch"


@pytest.mark.parametrize(
    "options, named",
    [
        (dict(loss_type="cispo"), "loss_type='cispo'.*dr_grpo"),
        (dict(loss_type="sapo"), "loss_type='sapo'.*dr_grpo"),
        (dict(loss_type="vespo"), "loss_type='vespo'.*dr_grpo"),
        (dict(loss_type="luspo"), "loss_type='luspo'.*dr_grpo"),
        (
            dict(importance_sampling_level="sequence"),
            "importance_sampling_level='sequence'.*'token'",
        ),
        (dict(epsilon=0.1), "epsilon=0.1.*low_start"),
        (dict(epsilon_high=0.28), "epsilon_high=0.28.*high_start"),
        (dict(delta=4.0), "delta=4.0.*Remove it"),
        (dict(rho0=1.0), "rho0"),
        (dict(low_step=0.07), "low_step"),
        (
            dict(low_start=0.2, low_max=0.2, high_start=0.28, high_max=0.28),
            "0.28.*ratios, 0.8 and 1.2, not epsilons",
        ),
        (dict(search_scope="batch"), "search_scope.*'batch'"),
        (
            dict(
                search_scope="step",
                gradient_accumulation_steps=4,
                steps_per_generation=2,
                num_iterations=3,
            ),
            "multiple of gradient_accumulation_steps=4",
        ),
    ],
)
def test_options_that_contradict_the_search_are_refused(options, named, tmp_path):
    with pytest.raises(ValueError, match=named):
        BAPOConfig(output_dir=str(tmp_path), **OPTIONS | options)


def test_a_grpo_config_is_refused(tmp_path):
    args = GRPOConfig(output_dir=str(tmp_path), **OPTIONS)
    with pytest.raises(TypeError, match="BAPOConfig.*GRPOConfig"):
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
def test_idle_configurations_are_warned_of_and_only_they(reuse, idle, tmp_path, recwarn):
    """And the ratios of a real training are what the warning says."""
    trainer = make(BAPOTrainer, tmp_path, max_steps=2, **reuse)
    warned = any("all ratios are 1" in str(warning.message) for warning in recwarn)
    assert warned == idle
    record(trainer)
    trainer.train()
    log_ratios = [part[0] for part, _ in trainer.records]
    assert (torch.cat(log_ratios, dim=1).abs().max() < 1e-5) == idle


@pytest.mark.parametrize(
    "version, warned_of",
    [("1.15.0", True), ("1.16.0", False), ("1.16.3", False), ("1.17.0", True)],
)
def test_another_version_of_trl_is_warned_of(version, warned_of, monkeypatch, recwarn):
    monkeypatch.setattr(trl, "__version__", version)
    runpy.run_path(str(ROOT / "integrations" / "trl_bapo.py"))
    assert any(f"not {version}" in str(warning.message) for warning in recwarn) == warned_of
