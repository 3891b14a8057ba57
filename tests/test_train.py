"""train.py: what a run does and logs, beyond the numbers that test_minimal.py checks."""

import math
from itertools import count
from pathlib import Path

import pytest
import torch
from conftest import given_rollouts, graded
from transformers import AutoModelForCausalLM

import train
from bapo import ClipSearch
from other_losses import LOSSES
from rollout import Rollouts, token_log_probs
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


# ---------------------------------------------------------------- what is logged
def test_the_metrics_of_an_update_are_those_of_the_policy_in_training(train_here, monkeypatch):
    # No group is dropped, whatever was drawn.
    monkeypatch.setattr(train, "rewards_of", lambda _, texts, *__: torch.arange(len(texts)) % 2.0)
    lines = train_here(steps=1)
    assert lines[0]["entropy_now"] == pytest.approx(lines[0]["entropy"], rel=1e-5)
    assert lines[1]["entropy_now"] != pytest.approx(lines[0]["entropy"], rel=1e-3)
    assert lines[0]["log_ratio_newest"] < 1e-6 < lines[1]["log_ratio_newest"]


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

    The rollout policy is uniform, so each of the six tokens is drawn once. A second response of NaN
    is outside the mask.
    """
    mask = torch.tensor([[True], [False]]).expand(2, 6)
    generator = torch.Generator().manual_seed(0)
    for _ in range(30):
        advantages = torch.randn(6, generator=generator)
        logits = (0.4 * torch.randn(6, generator=generator)).requires_grad_()
        log_probs = logits.log_softmax(0)
        log_ratio = log_probs + math.log(6)
        entropy = -(log_probs.exp() * log_probs).sum()
        (slope,) = torch.autograd.grad(entropy, logits)
        ratio = log_ratio.exp()
        has_gradient = torch.where(advantages > 0, ratio < high, ratio > low)
        expected = -(slope * advantages * has_gradient).sum()

        tokens = [log_ratio, log_probs, entropy, advantages]
        tokens = [values.expand(2, 6).masked_fill(~mask, math.nan) for values in tokens]
        fall = train.predicted_entropy_fall(*tokens, mask, (low, high))
        torch.testing.assert_close(fall, expected, rtol=1e-4, atol=1e-5)


def test_samples_and_evaluations_of_a_run(train_here, monkeypatch):
    """Samples answer a step's first prompt, and the last evaluation on the way is final.json."""
    problems, _ = countdown.split_problems()
    lines = train_here(steps=2, max_new_tokens=28, evaluate_every=2)
    samples = runs.read_lines(Path("runs", FOLDER, "samples.jsonl"))
    assert [sample["step"] for sample in samples] == [1, 2]
    for sample in samples:
        first, *_ = problems_of_step(problems, sample["step"], 4, seed=0)
        assert sample["answer"] == first.answer
        assert first.answer in sample["prompt"]
        graded_ones = [graded(response, first.answer) for response in sample["responses"]]
        for earned, truncated, reward in zip(graded_ones, sample["truncated"], sample["rewards"]):
            assert reward == (0.0 if truncated else earned)
        assert len(graded_ones) == 4
    final = runs.read_json(Path("runs", FOLDER, "final.json"))
    for name in ("mean@16", "pass@8"):
        for line in lines:
            logged = line.get(f"held_out_{name}")
            assert logged == (pytest.approx(final[name], rel=1e-5) if line["step"] == 2 else None)


def test_a_response_counts_for_pass_at_k_from_a_reward_above_0_on(train_here, monkeypatch):
    """The first two of the 2 * 16 responses before the first step earn one half."""
    calls = count()
    monkeypatch.setattr(countdown, "grade", lambda response, answer: 0.5 * (next(calls) < 2))
    train_here(steps=1)
    accuracies = runs.read_json(Path("runs/start-seed0.json"))
    passed = 1 - (8 * 7) / (16 * 15)  # of the first problem; the second has no right response
    assert accuracies == pytest.approx({"mean@16": 1 / 32, "pass@8": passed / 2})


# ---------------------------------------------------------------- what trains
def test_batches_without_an_advantage_are_logged(train_here, monkeypatch):
    monkeypatch.setattr(countdown, "grade", lambda response, answer: False)
    lines = train_here(steps=2)
    assert [(line["step"], line["update"]) for line in lines] == [(1, 0), (2, 0)]
    for line in lines:
        assert (line["filtered_groups"], line["reward"]) == (1.0, 0.0)
        assert line["entropy"] > 0
        assert line["length_correct"] is None  # JSON has no NaN


def test_bfloat16_rounds_alike_in_rollouts_and_training(train_here):
    lines = train_here(steps=1, precision="bfloat16")
    assert lines[0]["log_ratio_newest"] < 1e-6  # rollouts and training round alike
    assert lines[-1]["kl"] > 1e-3
    assert lines != train_here(steps=1, precision="float32", output_dir="float32")


def test_a_gradient_is_clipped_at_max_grad_norm_and_its_norm_is_logged_as_it_was(
    train_here, tmp_path, policy
):
    """Adam divides the gradient by its size, but not one far below its epsilon, 1e-8."""
    whole, *_ = train_here(methods="grpo@1", steps=1, output_dir=tmp_path / "whole")
    clipped, *_ = train_here(methods="grpo@1", steps=1, max_grad_norm=1e-12)
    assert clipped["grad_norm"] == whole["grad_norm"] > 0
    before = AutoModelForCausalLM.from_pretrained(policy).state_dict()
    after = AutoModelForCausalLM.from_pretrained("runs/grpo@1-seed0/checkpoint-1").state_dict()
    torch.testing.assert_close(after, before, rtol=0, atol=1e-6)


def test_ppo_of_the_other_losses_trains_as_grpo_does(train_here):
    """Two passes over two mini-batches. PPO's runs log nothing that depends on bounds."""
    options = {"max_new_tokens": 28, "micro_batch_tokens": 90}
    lines = train_here(methods=["ppo@2x2", "grpo@2x2"], steps=1, **options)
    of_grpo = runs.read_lines(Path("runs/grpo@2x2-seed0/metrics.jsonl"))
    for line, expected in zip(lines, of_grpo, strict=True):
        assert "low" in expected and not {"low", "gradient_share", "reached"} & line.keys()
        for name in line:
            assert line[name] == pytest.approx(expected[name], rel=1e-3, abs=1e-5), name


def test_bounds_are_those_that_were_asked_for():
    assert train.parse_method("0.9-1.2@1", train.Options()).search == ClipSearch.fixed(0.9, 1.2)


def test_older_tokens_keep_what_was_recorded_when_they_were_drawn(chain):
    """All first tokens are older, and the third response is not read."""
    rollouts = given_rollouts()
    rollouts.versions[:, 1:] = 2
    rollouts.rollout_log_probs.fill_(-9.0)
    rollouts.entropy.fill_(9.0)
    rows = torch.tensor([3, 0, 1])
    train.record_log_probs(chain, rollouts, rows, 2, 0.7)
    log_probs, entropy = token_log_probs(chain, rollouts, rows, 0.7)
    for recorded, now, before in (
        (rollouts.rollout_log_probs, log_probs, -9.0),
        (rollouts.entropy, entropy, 9.0),
    ):
        assert (recorded[:, 0] == before).all() and (recorded[2] == before).all()
        assert torch.equal(recorded[rows, 1:], now[:, 1:])


# ---------------------------------------------------------------- what stops a run
@pytest.mark.parametrize(
    "spoiled",
    [
        lambda log_probs: math.nan,  # the loss, but not its gradient
        lambda log_probs: (log_probs - log_probs.detach()).abs().sqrt(),  # the gradient alone
    ],
)
def test_a_loss_or_gradient_that_is_not_finite_stops_a_run_before_it_trains(
    train_here, refusal, monkeypatch, spoiled
):
    calls = count()

    def mine(log_probs, rollout_log_probs, advantages, mask):
        losses = -(log_probs - rollout_log_probs).exp() * advantages.unsqueeze(1)
        return losses if next(calls) < 2 else losses + spoiled(log_probs)

    trained = []
    step = torch.optim.AdamW.step
    monkeypatch.setattr(torch.optim.AdamW, "step", lambda self: trained.append(step(self)))
    monkeypatch.setitem(LOSSES, "mine", mine)
    assert "step 2, update 1" in refusal(methods="mine@2", steps=3)
    assert len(trained) == 2
    assert list(runs.checkpoints(Path("runs/mine@2-seed0"))) == [1]


def test_a_policy_that_is_not_the_one_that_drew_the_tokens_stops_a_run(
    train_here, refusal, monkeypatch
):
    """Here the log-probs of training are 0.01 off, to both sides alike."""
    log_probs_of = train.token_log_probs

    def off(*arguments):
        log_probs, entropy = log_probs_of(*arguments)
        if torch.is_grad_enabled():
            log_probs = log_probs + 0.01 * (-1) ** torch.arange(log_probs.shape[1])
        return log_probs, entropy

    monkeypatch.setattr(train, "token_log_probs", off)
    assert "|log ratio|" in refusal(steps=1)


def test_a_command_that_failed_before_its_first_run_may_be_changed(
    train_here, refusal, monkeypatch
):
    with monkeypatch.context() as patch:
        patch.setattr(train, "load_policy", lambda *_, **__: 1 / 0)
        patch.setattr("support.plot.report", lambda folder: 1 / 0)  # there is nothing to draw
        assert "These runs failed" in refusal(steps=1)
    train_here(steps=1, temperature=0.9)


def test_runs_that_failed_are_named_though_their_logs_are_empty(refusal, monkeypatch):
    """The second command cuts off what was logged after the last checkpoint: everything."""

    def out_of_memory(*arguments):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(train, "compute_gradient", out_of_memory)
    monkeypatch.setattr("support.plot.report", lambda folder: 1 / 0)  # there is nothing to draw
    assert "--micro_batch_tokens" in refusal(steps=1)
    (log,) = Path("runs").glob("*/samples.jsonl")
    log.with_name("metrics.jsonl").write_text('{"step": 1}\n')
    assert "These runs failed" in refusal(steps=1, resume=True)


# ---------------------------------------------------------------- options
@pytest.mark.parametrize(
    "name, value",
    [
        ("methods", ["what@8"]),
        ("temperature", math.nan),
        ("max_grad_norm", -1.0),
        ("seeds", [-1]),
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
