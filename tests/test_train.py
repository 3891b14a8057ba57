"""train.py: what a run does and logs, beyond the numbers that test_minimal.py checks."""

import math
from itertools import count
from pathlib import Path

import pytest
import torch
from conftest import VOCABULARY, graded
from transformers import LlamaConfig, LlamaForCausalLM

import train
from bapo import ClipSearch
from rollout import Rollouts
from support import runs
from tasks import countdown, problems_of_step

FOLDER = "bapo@3-seed0"


# ---------------------------------------------------------------- a batch
def test_mini_batches_are_whole_groups_in_the_order_of_the_prompts():
    """With fewer groups than mini-batches, each group is one."""
    rollouts = Rollouts([[1]] * 8, [[5]] * 8, [False] * 8, "cpu")
    kept = torch.tensor([True, False, True, True])  # of four groups of two
    options = train.Options(micro_batch_tokens=100)
    for text, expected in (
        ("grpo@3x2", [[0, 1, 4, 5], [6, 7]]),
        ("grpo@3x5", [[0, 1], [4, 5], [6, 7]]),
    ):
        method = train.parse_method(text, options)
        mini_batches, (dropped,) = train.split_batch(rollouts, kept, method, options)
        assert [rows.tolist() for (rows,) in mini_batches] == expected
        assert dropped.tolist() == [2, 3]


def test_each_epoch_goes_through_all_mini_batches(train_here, monkeypatch):
    """Mini-batches 1 and 2 are seen as 1 2 1 2, and not as 1 1 2 2."""
    # No group is dropped, whatever was drawn.
    monkeypatch.setattr(train, "rewards_of", lambda _, texts, *__: torch.arange(len(texts)) % 2.0)
    compute_gradient = train.compute_gradient
    seen = []

    def noted(run, rollouts, mini_batch, step):
        seen.append(sorted(torch.cat(mini_batch).tolist()))
        return compute_gradient(run, rollouts, mini_batch, step)

    monkeypatch.setattr(train, "compute_gradient", noted)
    train_here(methods="grpo@2x2", steps=1)
    assert seen == 2 * [[*range(8)], [*range(8, 16)]]


# ---------------------------------------------------------------- what is logged
def test_the_metrics_of_an_update_are_those_of_the_policy_in_training(train_here, monkeypatch):
    """In both precisions rollouts and training round alike."""
    # No group is dropped, whatever was drawn.
    monkeypatch.setattr(train, "rewards_of", lambda _, texts, *__: torch.arange(len(texts)) % 2.0)
    entropies = set()
    for precision in ("float32", "bfloat16"):
        first, second, _ = train_here(steps=1, precision=precision, output_dir=precision)
        assert first["entropy_now"] == pytest.approx(first["entropy"], rel=1e-5)
        assert second["entropy_now"] != pytest.approx(first["entropy"], rel=1e-3)
        assert first["log_ratio_newest"] < 1e-6
        assert second["log_ratio_newest"] > second["kl"] > 1e-3
        entropies.add(first["entropy"])
    assert len(entropies) == 2


def test_the_metrics_of_a_batch_are_those_of_its_tokens():
    responses = [[5], [5, 5], [5, 5, 5], [5, 5, 5, 5]]
    batch = Rollouts([[1]] * 4, responses, [False, True, False, False], "cpu")
    batch.entropy = batch.mask * torch.tensor([1.0, 2.0, 3.0, 4.0])
    batch.versions.fill_(7)
    batch.versions[:3, 0] = 5  # the first tokens of three responses are two steps old
    rewards = torch.tensor([0.0, 1.0, 0.0, 0.5])
    kept = torch.tensor([True, False, True])
    assert train.batch_metrics(batch, rewards, kept, step=7) == pytest.approx(
        {
            "reward": 1.5 / 4,
            "entropy": 20 / 10,
            "response_length": 10 / 4,
            "length_correct": 3,
            "length_wrong": 2,
            "truncated": 1 / 4,
            "filtered_groups": 1 / 3,
            "token_age": 6 / 10,
        }
    )


@pytest.mark.parametrize("low, high", [(0.8, 1.2), (1.05, 3.0)])
def test_the_predicted_entropy_fall_is_the_slope_of_the_entropy(low, high):
    """The logits of a softmax move in the direction A X, as in Eqs. 6 and 7.

    The rollout policy is uniform, and each of 6 tokens is drawn once after each of 30 prefixes.
    Those after a last one are NaN, outside the mask.
    """
    torch.manual_seed(0)
    advantages = torch.randn(31, 6)
    logits = (0.4 * torch.randn(31, 6)).requires_grad_()
    logits.data[30] = math.nan
    log_probs = logits.log_softmax(1)
    log_ratio = log_probs + math.log(6)
    entropy = -(log_probs.exp() * log_probs)
    mask = ~log_probs.isnan()
    (slope,) = torch.autograd.grad(entropy[mask].sum(), logits)
    ratio = log_ratio.exp()
    has_gradient = torch.where(advantages > 0, ratio < high, ratio > low)
    expected = -(slope * advantages * has_gradient)[mask].sum() / 30

    entropy = entropy.sum(1, keepdim=True).expand(31, 6)
    fall = train.predicted_entropy_fall(
        log_ratio, log_probs, entropy, advantages, mask, (low, high)
    )
    torch.testing.assert_close(fall, expected)


def test_samples_and_evaluations_of_a_run(train_here, capsys):
    """Samples answer a step's first prompt, and the last evaluation on the way is final.json.

    Every step prints a line.
    """
    problems = countdown.load_task().train
    lines = train_here(steps=2, max_new_tokens=28, evaluate_every=2)
    samples = runs.read_lines(Path("runs", FOLDER, "samples.jsonl"))
    for step, sample in enumerate(samples, 1):
        first, *_ = problems_of_step(problems, step, 4, seed=0)
        assert (sample["step"], sample["answer"]) == (step, first.answer)
        assert first.answer in sample["prompt"]
        rewards = []
        for response, truncated in zip(sample["responses"], sample["truncated"], strict=True):
            rewards.append(0.0 if truncated else graded(response, ""))
        assert sample["rewards"] == rewards and len(rewards) == 4
    assert len(samples) == 2
    final = runs.read_json(Path("runs", FOLDER, "final.json"))
    first, *_, last = lines
    assert "held_out_mean@16" not in first
    for name in ("mean@16", "pass@8"):
        assert last[f"held_out_{name}"] == pytest.approx(final[name], rel=1e-5)
    printed = capsys.readouterr().out
    assert f"{FOLDER}: step 1 of 2: reward {first['reward']:.3g} " in printed
    assert f"{FOLDER}: step 2 of 2: reward {last['reward']:.3g} " in printed
    assert "WARNING" not in printed


def test_a_response_counts_for_pass_at_k_from_a_reward_above_0_on(train_here, monkeypatch):
    """The first two of the 2 * 16 responses before the first step earn one half."""
    calls = count()
    monkeypatch.setattr(countdown, "grade", lambda response, answer: 0.5 * (next(calls) < 2))
    train_here(steps=1)
    accuracies = runs.read_json(Path("runs/start-seed0.json"))
    passed = 1 - (8 * 7) / (16 * 15)  # of the first problem; the second has no right response
    assert accuracies == pytest.approx({"mean@16": 1 / 32, "pass@8": passed / 2})


def test_a_run_that_may_learn_nothing_says_so_and_goes_on(train_here, monkeypatch, capsys):
    """At once if nothing is right or most is cut off, and after three steps of equal rewards."""
    monkeypatch.setattr(countdown, "grade", lambda response, answer: False)
    lines = train_here(steps=4)
    for step, line in enumerate(lines, 1):
        assert (line["step"], line["update"], line["filtered_groups"]) == (step, 0, 1.0)
        assert line["entropy"] > line["reward"] == 0.0
        assert line["length_correct"] is None  # JSON has no NaN
    said = capsys.readouterr().out
    sample, *_ = runs.read_lines(Path("runs", FOLDER, "samples.jsonl"))
    assert "no response is right" in said and "no group of three steps" in said
    assert said.count(f"WARNING: {FOLDER} may learn nothing") == 2
    assert f"prompt: {sample['prompt']!r}\n  response: {sample['responses'][0]!r}\n" in said
    assert f"\n  reference answer: {sample['answer']!r}, reward: 0\n" in said

    monkeypatch.setattr(train, "rewards_of", lambda _, texts, *__: torch.arange(len(texts)) % 2.0)
    train_here(steps=2, output_dir="few")
    assert "WARNING" not in capsys.readouterr().out
    batch_metrics = train.batch_metrics
    monkeypatch.setattr(train, "batch_metrics", lambda *all: batch_metrics(*all) | {"truncated": 1})
    train_here(steps=2, output_dir="short")
    assert capsys.readouterr().out.count("WARNING") == 1


# ---------------------------------------------------------------- what trains
def test_a_gradient_is_clipped_at_max_grad_norm_and_its_norm_is_logged_as_it_was(train_here):
    """Adam divides the gradient by its size, but not one far below its epsilon, 1e-8."""
    whole = train_here(steps=1, output_dir="whole")
    clipped = train_here(steps=1, max_grad_norm=1e-12)
    assert clipped[0]["grad_norm"] == whole[0]["grad_norm"] > 0
    assert clipped[1]["kl"] < 1e-6 < whole[1]["kl"]


def test_ppo_of_the_other_losses_trains_as_grpo_does(train_here):
    """Two passes over two mini-batches. PPO's runs log nothing that depends on bounds."""
    options = {"max_new_tokens": 28, "micro_batch_tokens": 90}
    lines = train_here(methods="ppo@2x2 grpo@2x2", steps=1, **options)
    of_grpo = runs.read_lines(Path("runs/grpo@2x2-seed0/metrics.jsonl"))
    for line, expected in zip(lines, of_grpo, strict=True):
        assert "low" in expected and not {"low", "gradient_share", "reached"} & line.keys()
        for name in line:
            assert line[name] == pytest.approx(expected[name], rel=1e-3, abs=1e-5), name


def test_bounds_are_those_that_were_asked_for():
    assert train.parse_method("0.9-1.2@1", train.Options()).search == ClipSearch.fixed(0.9, 1.2)


# ---------------------------------------------------------------- what stops a run
def test_a_gradient_that_is_not_finite_stops_a_run_before_it_trains(refusal, monkeypatch):
    """In the first update of the second step."""
    bapo_loss = train.bapo_loss
    trained = []

    def spoiled(*arguments, **others):
        loss, metrics = bapo_loss(*arguments, **others)
        return loss * (math.nan if len(trained) == 3 else 1.0), metrics

    step = torch.optim.AdamW.step
    monkeypatch.setattr(torch.optim.AdamW, "step", lambda self: trained.append(step(self)))
    monkeypatch.setattr(train, "bapo_loss", spoiled)
    assert "non-finite" in refusal()
    assert len(trained) == 3
    assert runs.checkpoints(Path("runs", FOLDER)) == [1]


@pytest.mark.parametrize("partial_budget", [0, 20])
def test_a_model_that_reads_whole_rows_in_another_way_than_it_samples_is_refused(
    refusal, monkeypatch, folder, partial_budget
):
    """Its positions change in rows of more than 20 tokens; the prompt has 8."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        initializer_range=0.5,
        rope_parameters={
            "rope_type": "longrope",
            "short_factor": [1.0] * 4,
            "long_factor": [4.0] * 4,
            "original_max_position_embeddings": 20,
        },
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    monkeypatch.setattr(countdown, "supervised_checkpoint", lambda *settings: folder)
    found = refusal(steps=1, max_new_tokens=16, partial_budget=partial_budget)
    assert "log-probs of sampling and of training differ" in found
    assert not list(runs.checkpoints(Path("runs", FOLDER)))


def test_a_command_whose_runs_failed_says_so_and_may_be_changed(refusal, monkeypatch):
    """There is nothing to draw."""

    def out_of_memory(*arguments, **options):
        raise torch.OutOfMemoryError

    monkeypatch.setattr("support.plot.report", lambda folder: 1 / 0)
    with monkeypatch.context() as patch:
        patch.setattr(train, "load_policy", out_of_memory)
        assert "These runs failed" in refusal(temperature=0.9)
    monkeypatch.setattr(train, "compute_gradient", out_of_memory)
    assert "--micro_batch_tokens" in refusal()


# ---------------------------------------------------------------- options
@pytest.mark.parametrize(
    "name, value",
    [
        ("methods", ["what@8"]),
        ("temperature", math.nan),
        ("temperature", 0.0),
        ("max_grad_norm", -1.0),
        ("model", "m"),
    ],
)
def test_a_wrong_option_is_refused_by_its_name(name, value):
    with pytest.raises(ValueError, match=name):
        train.Options(**{name: value})


def test_defaults_depend_on_the_task():
    own = train.Options(model="m", data="d")
    assert (own.learning_rate, own.max_new_tokens, own.max_grad_norm) == (1e-6, 1024, 1.0)
    assert own.rho0 == 0.4
    assert train.Options().max_grad_norm == 0.0  # test_minimal.py has the other defaults
