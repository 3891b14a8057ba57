"""train.py: what a run does and logs, beyond the numbers that test_minimal.py checks."""

import math
from itertools import count
from pathlib import Path

import pandas as pd
import pytest
import torch
from conftest import graded, without_seconds

import rollout
import train
from support import runs
from tasks import countdown

FOLDER = "bapo@3-seed0"


@pytest.fixture
def unequal_rewards(monkeypatch):
    """0, 1, 0, 1 ...: no group is dropped, whatever was drawn."""
    monkeypatch.setattr(
        train, "grade_all", lambda _, texts, *__: [i % 2 for i, _ in enumerate(texts)]
    )


# ---------------------------------------------------------------- a batch
def test_every_epoch_goes_through_mini_batches_of_whole_groups_in_their_order(
    train_here, monkeypatch
):
    """The second of four groups is dropped. With fewer than mini-batches, each group is one."""
    rewards = [0, 0, 0, 1] + 4 * [1] + 2 * [0, 0, 0, 1]
    monkeypatch.setattr(train, "grade_all", lambda *_: rewards)
    seen = []

    def compute_gradient(run, rollouts, mini_batch, step):
        seen.append(sorted(row // 4 for row in torch.cat(mini_batch).tolist()))  # groups
        return {}

    monkeypatch.setattr(train, "compute_gradient", compute_gradient)
    train_here(methods="grpo@2x2 grpo@1x5", steps=1)
    first, third, fourth = 4 * [0], 4 * [2], 4 * [3]
    assert seen == 2 * [first + third, fourth] + [first, third, fourth]


# ---------------------------------------------------------------- what is logged
def test_the_predicted_entropy_fall_is_the_slope_of_the_entropy():
    """The logits of a softmax move in the direction A X, as in Eqs. 6 and 7.

    The rollout policy is uniform, and each of 6 tokens is drawn once after each of 30 prefixes. The
    mask leaves out the last prefix.
    """
    torch.manual_seed(0)
    advantages = torch.randn(30, 6)
    mask = torch.ones(30, 6, dtype=torch.bool)
    mask[29] = False
    logits = (0.4 * torch.randn(30, 6)).requires_grad_()
    log_probs = logits.log_softmax(1)
    entropy = -(log_probs.exp() * log_probs).sum(1, keepdim=True)
    (slope,) = torch.autograd.grad(entropy.sum(), logits)
    ratio = 6 * log_probs.exp()
    has_gradient = torch.where(advantages > 0, ratio < 1.3, ratio > 0.9)
    expected = -(slope * advantages * has_gradient)[mask].sum() / 29

    fall = train.predicted_entropy_fall(
        ratio.log(), log_probs, entropy, advantages, mask, (0.9, 1.3)
    )
    torch.testing.assert_close(fall, expected)


def test_samples_metrics_and_evaluations_of_a_run(train_here, capsys):
    """A batch is one group, so samples.jsonl holds all of it. The last evaluation is final.json.

    Rollouts and training round alike, here to bfloat16.
    """
    options = {"prompts_per_step": 1, "group_size": 16, "max_new_tokens": 28}
    lines = train_here(methods="grpo@2", steps=2, evaluate_every=2, precision="bfloat16", **options)
    in_float32 = train_here(methods="grpo@1", steps=1, output_dir="float32", **options)
    assert lines[0]["entropy"] == pytest.approx(in_float32[0]["entropy"], rel=0.1)
    assert lines[0]["entropy"] != in_float32[0]["entropy"]
    samples = runs.read_lines(Path("runs/grpo@2-seed0/samples.jsonl"))
    assert "WARNING" not in capsys.readouterr().out
    for sample, line, second in zip(samples, lines[::2], lines[1::2], strict=True):
        assert line["entropy_now"] == pytest.approx(line["entropy"], rel=1e-5)
        assert second["entropy_now"] != pytest.approx(line["entropy"], rel=1e-3)
        assert line["log_ratio_newest"] < 1e-6 < second["kl"] < second["log_ratio_newest"]
        assert line["predicted_entropy_fall"] != 0
        assert sample["answer"] in sample["prompt"]
        batch = pd.DataFrame(sample)
        earned = batch["responses"].map(graded).where(~batch["truncated"], 0.0)
        assert earned.tolist() == sample["rewards"]
        # A token is a character or a special token, and the EOS is one.
        tokens = batch["responses"].str.replace("<...>", "?", regex=True).str.len()
        lengths = tokens + ~batch["truncated"]
        expected = {
            "reward": earned.mean(),
            "truncated": batch["truncated"].mean(),
            "response_length": lengths.mean(),
            "length_correct": lengths[earned > 0].mean(),
            "length_wrong": lengths[earned == 0].mean(),
        }
        assert {name: line[name] for name in expected} == pytest.approx(expected)
    final = runs.read_json(Path("runs/grpo@2-seed0/final.json"))
    assert second["held_out_pass@8"] == pytest.approx(final["pass@8"], rel=1e-5)


def test_a_run_that_may_learn_nothing_says_so_and_goes_on(train_here, monkeypatch, capsys):
    """At once if nothing is right, and after three steps of equal rewards.

    Only the first two of the 2 * 16 responses before the first step earn something, one half.
    """
    calls = count()
    monkeypatch.setattr(countdown, "grade", lambda response, answer: 0.5 * (next(calls) < 2))
    lines = train_here(steps=4)
    assert [(line["step"], line["update"]) for line in lines] == [(1, 0), (2, 0), (3, 0), (4, 0)]
    assert lines[0]["filtered_groups"] == 1
    assert lines[0]["length_correct"] is None  # JSON has no NaN
    assert capsys.readouterr().out.count(f"WARNING: {FOLDER} may learn nothing") == 2
    # A response with a reward above 0 is right for pass@8.
    passed = 1 - (8 * 7) / (16 * 15)  # of the first problem; the second has no right response
    accuracies = runs.read_json(Path("runs/start-seed0.json"))
    assert accuracies == pytest.approx({"mean@16": 1 / 32, "pass@8": passed / 2})


def test_a_run_whose_responses_are_cut_off_says_so(
    train_here, unequal_rewards, monkeypatch, capsys
):
    def cut_off(*arguments, **options):
        rollouts = rollout.generate(*arguments, **options)
        rollouts.truncated.fill_(True)
        return rollouts

    monkeypatch.setattr(train, "generate", cut_off)
    train_here(steps=2)
    assert capsys.readouterr().out.count("WARNING") == 1


# ---------------------------------------------------------------- what trains
def test_a_gradient_is_clipped_at_max_grad_norm_and_its_norm_is_logged_as_it_was(train_here):
    """Adam divides the gradient by its size, but not one far below its epsilon, 1e-8."""
    whole = train_here(steps=1, output_dir="whole")
    clipped = train_here(steps=1, max_grad_norm=1e-12)
    assert clipped[0]["grad_norm"] == whole[0]["grad_norm"] > 0
    assert clipped[1]["kl"] < 1e-6 < whole[1]["kl"]


def test_ppo_of_the_other_losses_trains_as_with_its_bounds(train_here):
    """Two passes over two mini-batches. PPO's runs log nothing that depends on bounds."""
    methods = "ppo@2x2 0.8-1.2@2x2"
    lines = train_here(methods=methods, steps=1, max_new_tokens=28, micro_batch_tokens=90)
    of_bounds = without_seconds(Path("runs/0.8-1.2@2x2-seed0/metrics.jsonl"))
    for line, expected in zip(lines, of_bounds, strict=True):
        assert "low" in expected and not {"low", "gradient_share", "reached"} & line.keys()
        assert line["entropy_now"] > 0.75 * line["entropy"]  # of the mini-batch's tokens alone
        expected = {name: expected[name] for name in line}
        assert line == pytest.approx(expected, rel=1e-3, abs=1e-5)


# ---------------------------------------------------------------- what stops a run
def test_a_gradient_that_is_not_finite_stops_a_run_before_it_trains(refusal, monkeypatch):
    bapo_loss = train.bapo_loss

    def spoiled(*arguments, **others):
        loss, metrics = bapo_loss(*arguments, **others)
        return loss * math.nan, metrics

    monkeypatch.setattr(train, "bapo_loss", spoiled)
    monkeypatch.setattr(torch.optim.AdamW, "step", None)
    assert "non-finite" in refusal()


@pytest.mark.parametrize("partial_budget", [0, 20])
def test_a_model_that_reads_whole_rows_in_another_way_than_it_samples_is_refused(
    refusal, monkeypatch, partial_budget
):
    token_log_probs = rollout.token_log_probs

    def shifted(*arguments):
        log_probs, entropy = token_log_probs(*arguments)
        return log_probs - 0.2, entropy

    monkeypatch.setattr(rollout, "token_log_probs", shifted)
    assert "log-probs of sampling and of training differ" in refusal(partial_budget=partial_budget)


def test_a_command_whose_run_failed_in_this_process_says_so_and_may_be_changed(
    refusal, monkeypatch
):
    """There is nothing to draw."""

    def out_of_memory(*arguments, **options):
        raise torch.OutOfMemoryError

    monkeypatch.setattr("support.plot.report", None)
    monkeypatch.setattr(train, "load_policy", out_of_memory)
    assert "--micro_batch_tokens" in refusal(jobs=2)
    assert "These runs failed" in refusal(temperature=0.9)


# ---------------------------------------------------------------- options
@pytest.mark.parametrize(
    "name, value",
    [
        ("methods", ["what@8"]),
        ("temperature", math.nan),
        ("temperature", 0.0),
        ("max_grad_norm", -1.0),
        ("group_size", 1),
        ("model", "m"),
        ("fields", ["question", "answer"]),
    ],
)
def test_a_wrong_option_is_refused_by_its_name(name, value):
    with pytest.raises(ValueError, match=name):
        train.Options(**{name: value})


def test_defaults_depend_on_the_task():
    """test_minimal.py has those of Countdown."""
    own = train.Options(model="m", data="d", max_new_tokens=99)
    assert (own.learning_rate, own.rho0, own.max_new_tokens) == (1e-6, 0.4, 99)
