"""train.py: what a run does, step by step.

A run's folder has test_run_folder.py, whole commands have test_commands.py.
`go`, `make_run`, `make_task` and `even_length` are used by other tests, too.
"""

import gc
import json
import math
import sys
import weakref
from collections import Counter
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from test_bapo import HOST_READS
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, AutoTokenizer

import bapo
import countdown
import reward
import rollout
import train
from support import arms, evaluation, models, options, run_folder
from support.batches import MicroBatch, join, join_rows
from support.data import Task, prompts_of_step
from support.files import read_lines
from support.metrics import batch_metrics
from support.objectives import OBJECTIVES, m2po_bounds
from support.options import Options
from support.run_folder import Run

TINY = {
    "steps": 4,
    "prompts_per_step": 4,
    "group_size": 4,
    "max_new_tokens": 8,
    "learning_rate": 1e-2,
    "checkpoint_every": 1,
    "device": "cpu",
}


# ---------------------------------------------------------------- short runs
def even_length(response: str, answer: str) -> bool:
    """A reward that an untrained model earns about half the time."""
    return len(response) % 2 == 0


def never(response: str, answer: str) -> bool:
    return False


def make_task(grade=even_length) -> Task:
    problems, held_out = countdown.problems()
    return Task(problems[:10], held_out[:4], grade)


def make_run(folder, policy="", method="bapo@3", seed=0, task=None, **others) -> Run:
    """The only run of these options, in a folder of its own."""
    options = Options(methods=[method], seeds=[seed], **(TINY | others))
    (run,) = train.make_runs(options, task or make_task())
    return run._replace(folder=Path(folder), start=policy)


def go(folder, policy, grade=even_length, **others) -> list[dict]:
    """Carry out a short run, or what is missing of it; its metrics."""
    run = make_run(folder, policy, **others)
    run_folder.prepare_folder(run.folder, run.config, resume=True)
    train.carry_out(run, make_task(grade))
    return run_folder.read_metrics(run.folder / "metrics.jsonl")


def train_only(folder, policy, grade=even_length, watch=None, **others):
    """Metrics of a short run without the evaluation at its end: a fraction of the time.

    watch: told of every update.
    """
    run = make_run(folder, policy, **({"checkpoint_every": 10} | others))
    run.folder.mkdir(exist_ok=True)
    update_policy = train.update_policy

    def told(*arguments):
        seen = update_policy(*arguments)
        if watch is not None:
            watch(*arguments[-2:], seen.whole, seen.log_probs, seen.entropy)
        return seen

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "update_policy", told)
        train.train_run(run, make_task(grade))
    return run_folder.read_metrics(run.folder / "metrics.jsonl")


class Seen(NamedTuple):
    """What `watch` is told of an update."""

    step: int
    update: int
    batch: MicroBatch
    log_probs: torch.Tensor
    entropy: torch.Tensor


class Watched(list):
    """All updates of a run."""

    def __call__(self, *of_update) -> None:
        self.append(Seen(*of_update))


def watched(folder, policy, method, **others) -> tuple[list[dict], Watched]:
    """Metrics and updates of one step."""
    updates = Watched()
    lines = train_only(folder, policy, method=method, steps=1, watch=updates, **others)
    return lines, updates


def first_updates(lines: list[dict]) -> list[dict]:
    return [line for line in lines if line["update"] == 1]


def bounds_of(lines: list[dict]) -> dict[tuple[int, int], tuple[float, float]]:
    return {(line["step"], line["update"]): (line["low"], line["high"]) for line in lines}


@pytest.fixture(scope="module")
def plain(policy, tmp_path_factory) -> list[dict]:
    """The metrics of three steps of bapo@3."""
    return train_only(tmp_path_factory.mktemp("plain"), policy, steps=3)


# ---------------------------------------------------------------- Algorithm 1
def test_the_same_seed_gives_the_same_metrics_and_another_seed_others(tmp_path, policy, plain):
    again = train_only(tmp_path / "again", policy, steps=3)
    assert again == plain
    keys = [(line["step"], line["update"]) for line in again]
    assert keys == [(step, update) for step in (1, 2, 3) for update in (1, 2, 3)]
    other = train_only(tmp_path / "other", policy, steps=1, seed=1)
    assert other != plain[:3]


def test_a_seed_sets_the_order_of_the_prompts_and_the_sampling_each(tmp_path, policy, monkeypatch):
    asked = []

    def keep(*arguments):
        asked.append(prompts_of_step(*arguments))
        return asked[-1]

    monkeypatch.setattr(train, "prompts_of_step", keep)
    for seed in (0, 1):
        train_only(tmp_path / str(seed), policy, seed=seed, steps=1)
    assert asked[0] != asked[1]
    monkeypatch.setattr(train, "prompts_of_step", lambda rows, step, count, seed: rows[:count])
    entropies = set()
    for seed in (0, 1):
        folder = tmp_path / f"same{seed}"
        (line,) = train_only(folder, policy, method="grpo@1", seed=seed, steps=1)
        entropies.add(line["entropy"])
    assert len(entropies) == 2


def test_updates_use_bapo_py_on_ratios_against_the_rollout_policy(plain):
    for line in plain:
        if line["update"] == 1:
            assert line["ratio_max_positive"] == pytest.approx(1, abs=1e-4)
            assert line["kl"] < 1e-6
        else:
            assert line["ratio_max_positive"] > 1.001
            assert line["kl"] > 1e-6
    assert len(set(bounds_of(plain).values())) > 1  # the bounds moved
    assert plain[0]["entropy"] != plain[-1]["entropy"]  # and the policy


class Literal:
    """Sums over the tokens of an update, one by one."""

    def __init__(self, seen: Seen, low: float, high: float):
        batch = seen.batch
        rollouts = batch.rollouts
        lengths = rollouts.mask.sum(1).tolist()
        tokens = sum(lengths)
        self.loss = 0.0
        self.kl = 0.0
        self.entropy = 0.0
        self.negatives = 0
        self.negatives_with_gradient = 0
        self.masses = {(True, "gradient"): 0.0, (False, "gradient"): 0.0}
        self.masses |= {(True, "value"): 0.0, (False, "value"): 0.0}
        for row, length in enumerate(lengths):
            advantage = batch.advantages[row].item()
            is_positive = advantage > 0
            weight = 1 / tokens
            mass = weight * abs(advantage)
            for place in range(length):
                log_ratio = seen.log_probs[row, place] - rollouts.log_probs[row, place]
                ratio = math.exp(log_ratio)
                clipped = min(max(ratio, low), high)
                self.loss -= weight * min(ratio * advantage, clipped * advantage)
                self.kl += (ratio - 1 - math.log(ratio)) / tokens
                self.entropy += seen.entropy[row, place].item() / tokens
                has_gradient = ratio <= high if is_positive else ratio >= low
                value = min(ratio, high) if is_positive else max(ratio, low)
                self.masses[is_positive, "value"] += mass * value
                if has_gradient:
                    self.masses[is_positive, "gradient"] += mass * ratio
                if not is_positive:
                    self.negatives += 1
                    self.negatives_with_gradient += int(has_gradient)

    def share(self, kind: str) -> float:
        """The positive share rho."""
        positive = self.masses[True, kind]
        return positive / (positive + self.masses[False, kind])


@pytest.mark.parametrize("micro_batch_tokens", [60, 10**6])
@pytest.mark.parametrize("method", ["bapo@3", "bapo-main@3", "0.9-1.1@3"])
def test_what_is_logged_of_an_update_equals_a_literal_loop_over_its_tokens(
    tmp_path, policy, method, micro_batch_tokens
):
    lines, updates = watched(tmp_path, policy, method, micro_batch_tokens=micro_batch_tokens)
    assert len(lines) == len(updates) == 3
    for line, seen in zip(lines, updates):
        assert (line["step"], line["update"]) == (seen.step, seen.update)
        assert not seen.log_probs.requires_grad
        assert not seen.entropy.requires_grad
        literal = Literal(seen, line["low"], line["high"])
        assert line["loss"] == pytest.approx(literal.loss, rel=1e-4, abs=1e-6)
        assert line["kl"] == pytest.approx(literal.kl, rel=1e-3, abs=1e-7)
        assert line["entropy_now"] == pytest.approx(literal.entropy, rel=1e-5)
        assert line["gradient_share"] == pytest.approx(literal.share("gradient"), rel=1e-4)
        alive = literal.negatives_with_gradient / literal.negatives
        assert line["negatives_with_gradient"] == pytest.approx(alive, rel=1e-5)
        rho = literal.share("value" if method == "bapo-main@3" else "gradient")
        assert line["rho"] == pytest.approx(rho, rel=1e-4)
    if method.startswith("0.9"):
        for pair in bounds_of(lines).values():
            assert pair == pytest.approx((0.9, 1.1))


def test_on_policy_every_method_is_the_same_update(tmp_path, policy):
    losses = set()
    for method in ("grpo", "bapo", "bapo-main", "0.5-1.5"):
        lines = train_only(tmp_path / method, policy, method=f"{method}@1", steps=2)
        losses.add(tuple(line["loss"] for line in lines))
    assert len(losses) == 1


def test_rewards_are_those_of_all_samples(tmp_path, policy, plain):
    for line in plain:
        assert 0 < line["reward"] < 1
        assert line["length_correct"] > 0
        assert line["length_wrong"] > 0
    # An untrained model hardly ever writes <eos>: such a response earns nothing, whatever its text.
    (line,) = train_only(tmp_path, policy, lambda *_: True, method="grpo@1", steps=1)
    assert line["truncated"] > 0
    assert line["reward"] == pytest.approx(1 - line["truncated"])


def test_a_batch_in_which_every_group_is_dropped_changes_nothing(tmp_path, policy):
    lines = train_only(tmp_path, policy, never, steps=2)
    assert len(lines) == 2
    for line in lines:
        assert (line["update"], line["filtered_groups"], line["reward"]) == (0, 1.0, 0.0)
        assert not any(value != value for value in line.values())  # JSON has no NaN
    before = AutoModelForCausalLM.from_pretrained(policy).state_dict()
    after = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-2").state_dict()
    for name, tensor in before.items():
        assert torch.equal(tensor, after[name]), name


def test_groups_of_equal_rewards_are_dropped_and_still_count_in_what_is_said_of_the_batch(
    tmp_path, policy, monkeypatch
):
    """Kills: a filter that asks for an advantage of every response, metrics of kept groups alone.

    In the third group two responses have the mean reward: an advantage of 0, and they are kept.
    The sampler is apart by another amount for each response: a gap of rounding alone would differ
    between micro-batches.
    """

    def another_sampler(*arguments, **others):
        rollouts = rollout.generate(*arguments, **others)
        apart = torch.arange(16).view(16, 1) / 16
        rollouts.sampler_log_probs = rollouts.sampler_log_probs - apart * rollouts.mask
        return rollouts

    monkeypatch.setattr(train, "generate", another_sampler)
    (normal,) = train_only(tmp_path / "normal", policy, steps=1, method="grpo@1")
    rewards = torch.tensor([1.0] * 4 + [0.0] * 4 + [0.0, 0.5, 1.0, 0.5] + [0.5] * 4)
    monkeypatch.setattr(train, "grade_rollouts", lambda *arguments: rewards)
    (one,), (seen,) = watched(tmp_path / "one", policy, "grpo@1")
    assert one["filtered_groups"] == 0.75
    assert one["reward"] == pytest.approx(0.5)
    advantages = seen.batch.advantages.tolist()
    assert advantages == pytest.approx([-1.2247, 0.0, 1.2247, 0.0], abs=1e-3)
    monkeypatch.setattr(train, "grade_rollouts", lambda *arguments: torch.zeros(16))
    (none,) = train_only(tmp_path / "none", policy, steps=1, method="grpo@1")
    assert none["update"] == 0
    for name in ("entropy", "response_length", "truncated", "sampler_gap", "sampler_gap_max"):
        assert one[name] == pytest.approx(normal[name], rel=1e-4), name  # the samples are the same
        assert none[name] == pytest.approx(normal[name], rel=1e-4), name


def test_the_saved_model_is_the_trained_one_and_loads_in_transformers(
    tmp_path, policy, monkeypatch
):
    trained = {}

    def keep(folder, step, model, *rest):
        for name, value in model.state_dict().items():
            trained[name] = value.clone()
        run_folder.save_checkpoint(folder, step, model, *rest)

    monkeypatch.setattr(train, "save_checkpoint", keep)
    go(tmp_path, policy, steps=2)
    folder = tmp_path / "model"
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for name, value in model.state_dict().items():
        assert torch.equal(value, trained[name]), name
    start = AutoModelForCausalLM.from_pretrained(policy).state_dict()
    assert not torch.equal(start["lm_head.weight"], trained["lm_head.weight"])
    assert not list(tmp_path.glob("checkpoint-*"))
    assert (folder / "state.pt").exists()  # for a longer run
    expected_ids = countdown.build_tokenizer()("348:44=")["input_ids"]
    assert tokenizer("348:44=")["input_ids"] == expected_ids
    final = json.loads((tmp_path / "final.json").read_text())
    assert set(final) == {"greedy", "mean@16", "pass@8", "pass@16"}
    assert final["pass@16"] >= final["pass@8"] >= final["mean@16"]


def test_every_prompt_comes_once_per_epoch_in_an_order_of_its_own():
    problems = list(range(10))
    order = []
    for step in range(1, 6):
        order += prompts_of_step(problems, step, 4, seed=0)
    assert sorted(order[:10]) == problems
    assert sorted(order[10:]) == problems
    assert order[:10] != order[10:]
    assert prompts_of_step(problems, 4, 4, seed=0) == order[12:16]
    assert prompts_of_step(problems, 1, 4, seed=1) != order[:4]
    assert len(prompts_of_step(problems, 1, 25, seed=0)) == 25  # more prompts than data


def test_speeds_are_logged(tmp_path, policy):
    """Tokens per second times seconds are the tokens; prompts have 8, responses 1 to 8."""
    times_seen = {"bapo@3": 3, "bapo@1x2": 1}  # how often the updates see the whole batch
    for method, times in times_seen.items():
        line = train_only(tmp_path / method, policy, steps=1, method=method)[0]
        (timing,) = read_lines(tmp_path / method / "timings.jsonl")
        assert timing["step"] == 1
        drawn = timing["rollout_tokens_per_s"] * timing["rollout_s"]
        assert drawn == pytest.approx(line["response_length"] * 16, rel=1e-4)
        kept = round((1 - line["filtered_groups"]) * 16)
        trained = timing["update_tokens_per_s"] * timing["update_s"]
        assert times * 9 * kept <= trained * 1.001
        assert trained <= times * 16 * kept * 1.001


# ---------------------------------------------------------------- what stops a run
def test_a_non_finite_loss_stops_the_run_before_the_update_and_saves_the_batch(
    tmp_path, policy, monkeypatch
):
    losses = []
    optimizer_steps = []
    step = torch.optim.AdamW.step

    def broken(*arguments, **others):
        loss, metrics = bapo.bapo_loss(*arguments, **others)
        losses.append(loss)
        return loss * (float("nan") if len(losses) == 5 else 1.0), metrics

    def counted(optimizer):
        optimizer_steps.append(1)
        return step(optimizer)

    monkeypatch.setattr(arms, "bapo_loss", broken)
    monkeypatch.setattr(torch.optim.AdamW, "step", counted)
    with pytest.raises(FloatingPointError, match="step 2, update 2"):
        go(tmp_path, policy)
    assert len(optimizer_steps) == 4  # the optimizer has not seen the fifth
    saved = torch.load(tmp_path / "nonfinite.pt", weights_only=True)
    assert (saved["step"], saved["update"]) == (2, 2)
    assert math.isnan(saved["numbers"]["loss"])
    assert saved["batch"]["response_ids"].shape == saved["batch"]["log_probs"].shape
    assert len(saved["advantages"]) == len(saved["batch"]["response_ids"])
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert len(lines) == 4  # what was computed before is kept


def test_a_gradient_that_is_not_finite_stops_the_run_too(tmp_path, policy, monkeypatch):
    clip = torch.nn.utils.clip_grad_norm_

    def infinite(*arguments):
        return clip(*arguments) * math.inf

    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", infinite)
    with pytest.raises(FloatingPointError, match="gradient norm inf"):
        go(tmp_path, policy)


def test_recorded_log_probs_that_are_not_those_of_training_stop_the_run(
    tmp_path, policy, monkeypatch
):
    record = train.record

    def off(model, batches, *rest):
        record(model, batches, *rest)
        for batch in batches:
            for part in batch:
                part.rollouts.log_probs = part.rollouts.log_probs + 0.01

    monkeypatch.setattr(train, "record", off)
    with pytest.raises(RuntimeError, match="log importance ratio of 0.01"):
        train_only(tmp_path, policy)


# ---------------------------------------------------------------- sampler and reward functions
@pytest.mark.parametrize("method, partial_budget", [("bapo@2", 0), ("cispo@2", 0), ("bapo@2", 3)])
def test_a_sampler_that_differs_changes_nothing_but_the_gap_that_is_logged(
    tmp_path, policy, monkeypatch, method, partial_budget
):
    """Kills: the sampler's log-probs in the place of those that the training forward pass gives."""
    settings = {"method": method, "partial_budget": partial_budget, "micro_batch_tokens": 60}
    settings["steps"] = 3 if partial_budget else 1
    equal = train_only(tmp_path / "equal", policy, **settings)

    def another_sampler(*arguments, **others):
        rollouts = rollout_generate(*arguments, **others)
        rollouts.sampler_log_probs = rollouts.sampler_log_probs - 0.5 * rollouts.mask
        return rollouts

    rollout_generate = rollout.generate
    monkeypatch.setattr(train, "generate", another_sampler)
    monkeypatch.setattr(rollout, "generate", another_sampler)
    apart = train_only(tmp_path / "apart", policy, **settings)
    gaps = {"sampler_gap", "sampler_gap_max"}
    trained = False
    for line, other in zip(apart, equal, strict=True):
        for name in other.keys() - gaps:
            assert line[name] == other[name], name
        if "sampler_gap" in line:
            trained = True
            assert other["sampler_gap_max"] < 1e-4
            assert line["sampler_gap_max"] == pytest.approx(0.5, abs=1e-3)
            assert line["sampler_gap"] == pytest.approx(0.5, abs=1e-3)
    assert trained


SEEDING = """
import torch

torch.manual_seed(0)

def grade(response, answer):
    torch.manual_seed(0)
    return len(response) % 2 == 0
"""


def test_a_reward_that_seeds_torch_changes_nothing_and_a_resumed_run_is_exact(
    tmp_path, policy, plain, monkeypatch
):
    """Kills: a grader, or the import of its file, that sets the generator which draws responses."""
    (tmp_path / "seeding.py").write_text(SEEDING)
    grade = partial(reward.own_reward, f"{tmp_path / 'seeding.py'}:grade")
    settings = {"steps": 3, "checkpoint_every": 1}
    reward.load_reward.cache_clear()
    assert train_only(tmp_path / "whole", policy, grade, **settings) == plain

    def stop(problems, step, *rest):
        if step == 3:
            raise KeyboardInterrupt
        return prompts_of_step(problems, step, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(train, "prompts_of_step", stop)
        with pytest.raises(KeyboardInterrupt):
            train_only(tmp_path / "resumed", policy, grade, **settings)
    reward.load_reward.cache_clear()  # as in a new process
    assert train_only(tmp_path / "resumed", policy, grade, **settings) == plain


# ---------------------------------------------------------------- micro-batches
@pytest.mark.parametrize("method", ["bapo@3", "0.8-1.2@3", "bapo@1x2", "bapo-main@3"])
def test_bounds_loss_gradient_and_metrics_do_not_depend_on_the_micro_batches(
    tmp_path, policy, monkeypatch, method
):
    monkeypatch.setattr(options, "DRAWN_TOGETHER", 2**18)  # so that the samples are the same
    settings = {
        "method": method,
        "steps": 2 if method == "bapo@3" else 1,
        "temperature": 0.9,
    }
    whole = train_only(tmp_path / "whole", policy, **settings)
    sizes = (1, 60) if method == "bapo@1x2" else (60,)  # 1: every response alone
    for tokens in sizes:
        split = train_only(tmp_path / str(tokens), policy, micro_batch_tokens=tokens, **settings)
        for line, other in zip(whole, split, strict=True):
            assert line.keys() == other.keys()
            for name in ("low", "high", "reached"):
                assert line[name] == other[name]
            for name in line:
                assert other[name] == pytest.approx(line[name], rel=2e-3, abs=2e-5), (tokens, name)
    if method == "bapo@3":
        assert len(set(bounds_of(whole).values())) > 1  # the bounds moved


def test_the_extra_forward_pass_is_made_only_where_the_ratios_are_needed_first(
    tmp_path, policy, monkeypatch
):
    forward = rollout.token_log_probs
    carries_gradient = []  # of every forward pass of a micro-batch, as they come

    def counted(*arguments):
        carries_gradient.append(torch.is_grad_enabled())
        return forward(*arguments)

    monkeypatch.setattr(train, "token_log_probs", counted)
    train_only(tmp_path / "single", policy, steps=1)
    # Kept and dropped groups; then nothing but the updates.
    recorded = carries_gradient.index(True)
    assert recorded <= 2
    assert carries_gradient[recorded:] == [True] * 3

    carries_gradient.clear()
    train_only(tmp_path / "several", policy, micro_batch_tokens=60, steps=1)
    parts = carries_gradient.count(True) // 3
    assert parts > 1
    first_update = [True] * parts  # r = 1 is known
    later_update = [False] * parts + [True] * parts
    updates = first_update + 2 * later_update
    assert carries_gradient[-len(updates) :] == updates
    recorded = len(carries_gradient) - len(updates)

    carries_gradient.clear()
    settings = {"method": "0.7-1.3@3", "micro_batch_tokens": 60, "steps": 1}
    train_only(tmp_path / "fixed", policy, **settings)
    assert carries_gradient == [False] * recorded + [True] * 3 * parts


@pytest.mark.parametrize("unchanged", [True, False])
@pytest.mark.parametrize("method", ["bapo@3", "m2po@3"])
def test_bounds_are_those_of_the_whole_step_at_the_ratios_of_each_token_s_own_policy(
    policy, method, unchanged
):
    """Kills: bounds of a part; ratios of 1 in the first update of partial rollouts.

    The tokens were drawn by an earlier policy than the one that begins the step, `start`.
    """
    run = make_run("unused", micro_batch_tokens=60, method=method)
    model, tokenizer = models.load_policy(policy, "cpu", False)
    torch.manual_seed(0)
    rollouts = rollout.sample_rollouts(
        model,
        tokenizer,
        ["348:44=", "123:06="],
        group_size=4,
        max_new_tokens=8,
        temperature=1.0,
    )
    advantages = torch.tensor([1.0, -1.0, 0.5, -0.5] * 2)
    start = rollouts.log_probs
    moved = torch.full_like(start, 0.1 if method == "bapo@3" else 0.01)
    if method == "m2po@3":
        moved[-1, 0] = 2  # one token alone exceeds the budget
    moved = (moved * advantages.sign().unsqueeze(1)) * rollouts.mask
    rollouts.log_probs = start - moved
    rollouts.versions = torch.zeros_like(rollouts.response_ids)
    if method == "bapo@3":
        weights = bapo.token_weights(rollouts.mask)
        at_these = bapo.search_clip_bounds(moved, advantages, weights, bapo.GRPO).rho.item()
        at_one = bapo.search_clip_bounds(0 * moved, advantages, weights, bapo.GRPO).rho.item()
        search = bapo.ClipSearch(rho0=(at_these + at_one) / 2)  # met here, not met at r = 1
        run = run._replace(arm=arms.parse_arm(method, search))
        expected = bapo.search_clip_bounds(moved, advantages, weights, search)
        assert expected.low.item() == pytest.approx(search.low_start)
        assert expected.reached
    else:
        expected = m2po_bounds(start, rollouts.log_probs, advantages, rollouts.mask)
        assert 0 < expected[0] < 0.69
        assert 1.6 < expected[1] < 10
        first_rows = [start[:2], rollouts.log_probs[:2], advantages[:2], rollouts.mask[:2]]
        assert m2po_bounds(*first_rows)[1] == math.inf
    kept = torch.tensor([True, True])
    (batch,) = train.make_batches(rollouts, advantages, kept, run.arm, 60)
    assert len(batch) > 1
    train.record(model, [batch], 1, run.options)
    assert not any((part.ages == 0).any() for part in batch)
    found = train.bounds_over_micro_batches(model, batch, run.arm, run.options, unchanged)
    for value, other in zip(found, expected, strict=True):
        assert value.item() == pytest.approx(other.item(), abs=1e-4)


def test_the_precision_is_that_of_every_forward_pass(tmp_path, policy, monkeypatch):
    autocast_states = {}
    spied = []

    def spy_on(module, name):
        function = getattr(module, name)

        def spy(*arguments, **others):
            states = autocast_states.setdefault(f"{module.__name__}.{name}", set())
            states.add(torch.is_autocast_enabled("cpu"))
            return function(*arguments, **others)

        monkeypatch.setattr(module, name, spy)
        spied.append(f"{module.__name__}.{name}")

    for module in (train, rollout, evaluation):
        spy_on(module, "generate")
    for module in (train, rollout):
        spy_on(module, "token_log_probs")
    lines = {}
    for precision in ("bfloat16", "float32"):
        autocast_states.clear()
        for budget in (0, 3):
            lines[precision, budget] = train_only(
                tmp_path / f"{precision}{budget}",
                policy,
                steps=3 if budget else 1,
                precision=precision,
                partial_budget=budget,
                micro_batch_tokens=60,
                evaluate_every=3 if budget else 0,
            )
        assert autocast_states == {name: {precision == "bfloat16"} for name in spied}
    for budget in (0, 3):
        assert lines["bfloat16", budget] != lines["float32", budget]


def test_limits_of_memory_reach_sampling_updates_and_evaluation(tmp_path, policy, monkeypatch):
    drawn_together = []  # tokens
    read_together = []
    checkpointed = []
    draw = rollout._generate_batch
    forward = rollout.token_log_probs
    checkpoint_layers = models.checkpoint_layers

    def counted_draw(model, prompts, config):
        longest = max(len(ids) for ids in prompts)
        drawn_together.append(len(prompts) * (longest + config.max_new_tokens))
        return draw(model, prompts, config)

    def counted_forward(model, part, *rest):
        read_together.append(part.lengths().max().item() * len(part.mask))
        return forward(model, part, *rest)

    def counted_checkpoint(model):
        checkpointed.append(model)
        checkpoint_layers(model)

    monkeypatch.setattr(rollout, "_generate_batch", counted_draw)
    monkeypatch.setattr(rollout, "token_log_probs", counted_forward)
    monkeypatch.setattr(train, "token_log_probs", counted_forward)
    monkeypatch.setattr(models, "checkpoint_layers", counted_checkpoint)
    monkeypatch.setattr(options, "DRAWN_TOGETHER", 2)
    whole = train_only(tmp_path / "whole", policy, steps=1)
    assert max(drawn_together) == 16 * 16
    assert max(read_together) > 100
    assert not checkpointed
    for budget in (0, 3):
        drawn_together.clear()
        read_together.clear()
        lines = train_only(
            tmp_path / str(budget),
            policy,
            steps=2,
            partial_budget=budget,
            micro_batch_tokens=50,
            gradient_checkpointing=True,
            evaluate_every=2,
        )
        assert 48 < max(drawn_together) <= 100, budget
        assert 25 < max(read_together) <= 50, budget
        assert len(read_together) > 9
        assert lines[-1]["held_out_greedy"] >= 0
        if not budget:  # other samples: they were drawn in other batches
            assert lines[0]["grad_norm"] != whole[0]["grad_norm"]
    assert len(checkpointed) == 2


# ---------------------------------------------------------------- bfloat16
def test_bfloat16_weights_lose_updates_that_float32_weights_keep(tmp_path, policy):
    """Why weights are float32 and only the forward pass is bfloat16."""
    changed = {}
    for dtype in (torch.float32, torch.bfloat16):
        model = AutoModelForCausalLM.from_pretrained(policy, dtype=dtype)
        before = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, weight_decay=0.0)
        logits = model(torch.tensor([[5, 6, 7, 8]])).logits.float()
        logits.log_softmax(-1)[..., 9].sum().backward()
        optimizer.step()
        after = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
        has_gradient = torch.cat([p.grad.flatten() != 0 for p in model.parameters()])
        changed[dtype] = (after != before)[has_gradient].float().mean().item()
    assert changed[torch.float32] > 0.9
    assert changed[torch.bfloat16] < 0.05

    half = tmp_path / "half"  # as most models come
    AutoModelForCausalLM.from_pretrained(policy, dtype=torch.bfloat16).save_pretrained(half)
    AutoTokenizer.from_pretrained(policy).save_pretrained(half)
    start = AutoModelForCausalLM.from_pretrained(half, dtype=torch.float32)
    run = tmp_path / "run"
    train_only(run, str(half), precision="bfloat16", learning_rate=1e-6, steps=1)
    trained = AutoModelForCausalLM.from_pretrained(run / "checkpoint-1", dtype="auto")
    assert trained.dtype == torch.float32
    moved = []
    for new, old in zip(trained.parameters(), start.parameters(), strict=True):
        moved.append((new != old).float().mean().item())
    assert sum(moved) / len(moved) > 0.5


BFLOAT16_RUNS = {
    "one micro-batch": {},
    "several, layers computed again": {"micro_batch_tokens": 60, "gradient_checkpointing": True},
    "adapters": {"lora_rank": 4, "micro_batch_tokens": 60},
    "partial rollouts": {"partial_budget": 3, "steps": 5},
    "partial rollouts in several": {"partial_budget": 3, "steps": 5, "micro_batch_tokens": 60},
}


@pytest.mark.parametrize("settings", BFLOAT16_RUNS.values(), ids=BFLOAT16_RUNS)
def test_in_bfloat16_the_first_ratios_of_new_tokens_are_exactly_1(tmp_path, policy, settings):
    """Kills: a record that is read in other micro-batches than those that the updates read.

    Rounding would clip tokens: of GRPO's and narrower bounds at the first update.
    """
    if "lora_rank" in settings:
        pytest.importorskip("peft")
    updates = Watched()
    settings = {"steps": 2, "method": "0.999-1.001@2", "precision": "bfloat16"} | settings
    lines = train_only(tmp_path, policy, watch=updates, **settings)
    first = [seen for seen in updates if seen.update == 1]
    assert len(first) >= 2
    of_new_tokens = 0
    of_old_tokens = 0
    for seen in first:
        rollouts = seen.batch.rollouts
        is_new = rollouts.mask & (rollouts.versions == seen.step)
        assert torch.equal(seen.log_probs[is_new], rollouts.log_probs[is_new])
        of_new_tokens += int(is_new.sum())
        of_old_tokens += int((rollouts.mask & ~is_new).sum())
    assert of_new_tokens > 20
    assert (of_old_tokens > 0) == ("partial_budget" in settings)
    for line in first_updates(lines):
        assert line["log_ratio_newest"] == 0
        if not of_old_tokens:
            assert line["clip_fraction_high"] == line["clip_fraction_low"] == 0
            assert line["ratio_max_positive"] == line["ratio_min_negative"] == 1


# ---------------------------------------------------------------- interrupted and resumed
@pytest.mark.parametrize(
    "settings",
    [
        {"steps": 7, "partial_budget": 3, "method": "bapo@2"},
        {"steps": 4, "precision": "bfloat16", "method": "bapo@2"},
    ],
    ids=["partial rollouts", "bfloat16"],
)
def test_a_crash_between_checkpoints_is_repeated_exactly_with_waiting_responses_too(
    tmp_path, policy, monkeypatch, settings
):
    monkeypatch.setattr(train, "MAX_AGE", 2)
    settings = {"checkpoint_every": 2} | settings
    whole = train_only(tmp_path / "whole", policy, **settings)
    last = settings["steps"] - 1

    def crash(problems, step, *rest):
        if step == last:
            raise KeyboardInterrupt
        return prompts_of_step(problems, step, *rest)

    crashed = tmp_path / "crashed"
    with monkeypatch.context() as patch:
        patch.setattr(train, "prompts_of_step", crash)
        with pytest.raises(KeyboardInterrupt):
            train_only(crashed, policy, **settings)
    (folder,) = crashed.glob("checkpoint-*")
    state = torch.load(folder / "state.pt", weights_only=True)
    assert bool(state["waiting"]) == ("partial_budget" in settings)
    # In the middle of a run it is a model, too.
    vocabulary = AutoModelForCausalLM.from_pretrained(folder).config.vocab_size
    assert vocabulary == len(AutoTokenizer.from_pretrained(folder))
    assert train_only(crashed, policy, **settings) == whole


class OnGpu:
    """A model that says that it lies on a GPU; a tokenizer; saves nothing."""

    device = torch.device("cuda:1")

    def save_pretrained(self, folder) -> None:
        folder.mkdir(exist_ok=True)


def test_the_random_state_of_the_model_s_own_gpu_is_saved_and_restored(tmp_path, monkeypatch):
    """Kills: a resumed run on a GPU that draws other responses than one that went on."""
    gpu = {"cuda:1": torch.arange(16, dtype=torch.uint8)}

    def get_state(device):
        return gpu[str(device)].clone()

    def set_state(state, device):
        gpu[str(device)] = state

    monkeypatch.setattr(torch.cuda, "get_rng_state", get_state)
    monkeypatch.setattr(torch.cuda, "set_rng_state", set_state)
    model = OnGpu()
    run_folder.save_checkpoint(tmp_path, 3, model, model, {"waiting": []}, {})
    on_cpu = torch.get_rng_state()
    torch.rand(3)
    gpu["cuda:1"] = torch.zeros(16, dtype=torch.uint8)
    state = run_folder.restore(tmp_path / "checkpoint-3", "cuda:1")
    assert state["step"] == 3
    assert gpu["cuda:1"].tolist() == list(range(16))
    assert torch.equal(torch.get_rng_state(), on_cpu)
    gpu.clear()
    run_folder.restore(tmp_path / "checkpoint-3", "cpu")  # a run may go on without the GPU
    assert not gpu


# ---------------------------------------------------------------- partial rollouts
def test_partial_rollouts_train_on_trajectories_of_several_policies_and_are_logged(
    tmp_path, policy, monkeypatch
):
    monkeypatch.setattr(train, "MAX_AGE", 5)
    updates = Watched()
    lines = train_only(tmp_path, policy, steps=7, partial_budget=3, watch=updates)
    first = lines[0]
    assert 32 < first.pop("new_tokens") <= 48
    assert first == {
        "step": 1,
        "update": 0,
        "resumed_responses": 0,
        "cut_by_age": 0,
        "waiting_groups": 4,
    }
    assert 8 < lines[1]["resumed_responses"] <= 16  # the four groups that wait
    trained = first_updates(lines)
    for line in trained:
        assert 0 <= line["sampler_gap_max"] < 1e-4  # of the sampler of each token's own policy
        assert line["token_age_max"] > line["token_age_mean"] > 0
    assert any(line["mixed_trajectories"] > 0 for line in trained)
    assert any(0 < line["resumed_tokens"] < 1 for line in trained)
    # Tokens of earlier policies have ratios other than 1 already at the first update.
    assert any(abs(line["ratio_max_positive"] - 1) > 1e-3 for line in trained)
    for seen in updates:
        rollouts = seen.batch.rollouts
        ages = (seen.step - rollouts.versions)[rollouts.mask]
        assert 0 <= ages.min()
        assert ages.max() <= 5


def test_the_first_ratio_of_partial_rollouts_is_asked_of_this_step_s_tokens(
    tmp_path, policy, monkeypatch
):
    """Kills: a check of the tokens of step 0, of which there are none after the start.

    The step's own tokens get a log-prob that is wrong; older ones may have any.
    """
    record = train.record

    def off(model, batches, step, run_options):
        record(model, batches, step, run_options)
        for batch in batches:
            for part in batch:
                rollouts = part.rollouts
                rollouts.log_probs = rollouts.log_probs + 0.01 * (rollouts.versions == step)

    train_only(tmp_path / "right", policy, steps=4, partial_budget=3)
    monkeypatch.setattr(train, "record", off)
    with pytest.raises(RuntimeError, match="log importance ratio of 0.01"):
        train_only(tmp_path / "off", policy, steps=4, partial_budget=3)


# ---------------------------------------------------------------- options reach the update
def test_the_options_of_the_update_reach_it(tmp_path, policy, plain):
    other = train_only(tmp_path / "temperature", policy, steps=1, temperature=0.7)
    assert other[0]["grad_norm"] != plain[0]["grad_norm"]
    # At temperature 0.7 the first ratios are still 1: sampling and training divide by the same.
    assert other[0]["ratio_max_positive"] == pytest.approx(1, abs=1e-4)
    assert other[0]["sampler_gap_max"] < 1e-4
    # AdamW does not feel the scale of a gradient, but for its epsilon.
    clipped = train_only(tmp_path / "clip", policy, steps=1, max_grad_norm=1e-10)
    assert clipped[0]["grad_norm"] == plain[0]["grad_norm"]
    assert clipped[1]["kl"] < 1e-3 * plain[1]["kl"]
    before = AutoModelForCausalLM.from_pretrained(policy).lm_head.weight.norm().item()
    checkpoint = tmp_path / "clip" / "checkpoint-1"
    after = AutoModelForCausalLM.from_pretrained(checkpoint).lm_head.weight.norm().item()
    assert after == pytest.approx(before, rel=1e-4)  # no weight decay
    slow = train_only(tmp_path / "slow", policy, steps=1, learning_rate=1e-5)
    assert slow[0] == plain[0]
    assert 0 < slow[1]["kl"] < 1e-2 * plain[1]["kl"]
    still = train_only(tmp_path / "still", policy, steps=1, learning_rate=1e-12, method="grpo@3")
    for line in still:  # every update has its own gradient, not the sum of those before
        assert line["grad_norm"] == pytest.approx(plain[0]["grad_norm"], rel=1e-3)


# ---------------------------------------------------------------- mini-batches
def prompts_of(batch: MicroBatch) -> list[tuple]:
    return [tuple(ids) for ids in batch.rollouts.prompt_ids.tolist()]


def test_mini_batches_are_parts_of_the_batch_in_turn(tmp_path, policy):
    settings = {"prompts_per_step": 9, "learning_rate": 1e-9}
    lines, updates = watched(tmp_path / "parts", policy, "grpo@1x3", **settings)
    (of_whole, *_), whole = watched(tmp_path / "whole", policy, "grpo@3", **settings)
    first, second, third = [prompts_of(seen.batch) for seen in updates]
    assert first + second + third == prompts_of(whole[0].batch)
    assert not set(first) & set(second)
    assert {seen.batch.rollouts.mask.shape for seen in whole} == {whole[0].log_probs.shape}
    assert len({line["entropy_now"] for line in lines}) == 3
    of_batch = ("reward", "entropy", "response_length", "sampler_gap_max", "truncated")
    for line in lines:  # a batch is what it is, however the updates see it
        for name in of_batch:
            assert line[name] == pytest.approx(of_whole[name], rel=1e-5), name
    for seen in updates:  # each part is a whole update, with its own normaliser
        assert seen.batch.weights.sum().item() == pytest.approx(1, rel=1e-5)


def test_with_fewer_kept_groups_than_parts_there_are_as_many_parts_as_groups(tmp_path, policy):
    """Kills: a part that comes again within an epoch, an empty part, an order that changes."""
    lines, updates = watched(tmp_path, policy, "grpo@2x5", learning_rate=1e-9)
    kept = round(4 * (1 - lines[0]["filtered_groups"]))
    assert 2 <= kept < 5
    assert [line["update"] for line in lines] == list(range(1, 2 * kept + 1))
    assert {line["updates"] for line in lines} == {2 * kept}
    batches = [id(seen.batch) for seen in updates]
    assert len(set(batches)) == kept
    assert batches == 2 * batches[:kept]
    for seen in updates:
        assert len(seen.batch.rollouts.mask) == 4  # a group each


# ---------------------------------------------------------------- the methods of objectives.py
NEIGHBOURS = sorted(OBJECTIVES.keys() - {"clip-higher"})  # which is an arm without them


def test_ppo_by_objectives_py_is_grpo_by_bapo_py(tmp_path, policy):
    """Kills: other weights, columns or advantages than the loop's; metrics of another gradient."""
    settings = {"steps": 2, "micro_batch_tokens": 60}
    ppo = train_only(tmp_path / "ppo", policy, method="ppo@3", **settings)
    grpo = train_only(tmp_path / "grpo", policy, method="grpo@3", **settings)
    of_search = {"rho", "rho_start", "reached"}
    for line, other in zip(ppo, grpo, strict=True):
        assert line.keys() == other.keys() - of_search
        assert (line["low"], line["high"]) == (None, None)
        for name in line.keys() - {"low", "high"}:
            assert line[name] == pytest.approx(other[name], rel=1e-4, abs=1e-7), name


def made_up_step(device: str = "cpu") -> list[MicroBatch]:
    """An optimizer step in three micro-batches of unequal shapes, of tokens of several policies."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(3, 5), (4, 7), (2, 2)]
    parts = []
    for rows, width in shapes:
        lengths = torch.randint(1, width + 1, (rows, 1), generator=generator)
        lengths[0] = width
        mask = torch.arange(width) < lengths
        ids = torch.randint(4, 9, mask.shape, generator=generator)
        prompts = torch.ones(rows, 2, dtype=torch.long)
        old, start, entropy = torch.rand(3, rows, width, generator=generator).unbind()
        ages = torch.randint(0, 3, mask.shape, generator=generator)
        rollouts = rollout.Rollouts(
            prompt_ids=prompts,
            prompt_mask=prompts.bool(),
            response_ids=ids,
            mask=mask,
            truncated=torch.zeros(rows, dtype=torch.bool),
            log_probs=-old * mask,
            entropy=entropy * mask,
            versions=3 - ages,
            sampler_log_probs=-old * mask,
        )
        advantages = torch.randn(rows, generator=generator)
        parts.append(MicroBatch(rollouts, advantages, mask.float(), -start * mask, ages))
    tokens = sum(int(part.rollouts.mask.sum()) for part in parts)
    for part in parts:
        part.rollouts = part.rollouts.to(device)
        part.advantages = part.advantages.to(device)
        part.weights = (part.weights / tokens).to(device)
        part.start_log_probs = part.start_log_probs.to(device)
        part.ages = part.ages.to(device)
    return parts


@pytest.mark.parametrize("method", ["bapo", "bapo-main", *NEIGHBOURS])
def test_every_method_has_the_same_loss_and_gradient_in_one_micro_batch_and_in_several(method):
    """Kills: m2po's bounds of a part, gspo's ratios of cut responses, inputs of other rows."""
    arm = arms.parse_arm(method, bapo.ClipSearch())
    parts = made_up_step()
    whole = join(parts)
    generator = torch.Generator().manual_seed(1)
    log_probs = -torch.rand(whole.rollouts.mask.shape, generator=generator)
    entropy = torch.rand(log_probs.shape, generator=generator)
    bounds = None if arm.bounds_are_fixed else arm.search_bounds(log_probs, whole)

    leaf = log_probs.clone().requires_grad_()
    loss, metrics = arm.loss(leaf, entropy, whole, bounds)
    loss.backward()

    total = 0.0
    row = 0
    for part in parts:
        rows, width = part.weights.shape
        part_leaf = log_probs[row : row + rows, :width].clone().requires_grad_()
        part_entropy = entropy[row : row + rows, :width]
        part_loss, _ = arm.loss(part_leaf, part_entropy, part, bounds)
        part_loss.backward()
        total += part_loss.item()
        torch.testing.assert_close(part_leaf.grad, leaf.grad[row : row + rows, :width])
        row += rows
    assert total == pytest.approx(loss.item(), rel=1e-5)
    assert leaf.grad.count_nonzero() > 1
    assert metrics["entropy_rule"].isfinite()


def test_neighbours_get_the_inputs_of_their_own(tmp_path, policy, monkeypatch):
    """Kills: proximal log-probs of the policy that drew the tokens, ages of updates."""
    calls = []

    def kept(name, log_probs, rollout_log_probs, advantages, mask, **further):
        calls.append((name, mask, further))
        return with_inputs(name, log_probs, rollout_log_probs, advantages, mask, **further)

    with_inputs = arms.with_inputs
    monkeypatch.setattr(arms, "with_inputs", kept)
    updates = Watched()
    train_only(
        tmp_path,
        policy,
        method="decoupled-ppo@2",
        steps=4,
        partial_budget=3,
        watch=updates,
        micro_batch_tokens=60,
    )
    at_start = {seen.step: seen.log_probs for seen in updates if seen.update == 1}
    assert len(at_start) > 1
    oldest = 0
    for seen in updates:
        batch = seen.batch
        start = at_start[seen.step]
        torch.testing.assert_close(batch.start_log_probs, start, atol=1e-5, rtol=0)
        mask = batch.rollouts.mask
        ages = seen.step - batch.rollouts.versions
        assert torch.equal(batch.ages[mask], ages[mask])
        oldest = max(oldest, ages[mask].max())
        if seen.update == 2:
            assert not torch.allclose(seen.log_probs, start, atol=1e-5)
    assert oldest > 0
    assert calls
    for name, mask, further in calls:
        assert name == "decoupled-ppo"
        assert not further["entropy"].requires_grad
        assert torch.equal(further["proximal_log_probs"], further["start_log_probs"])
        for input_name in ("entropy", "rollout_entropy", "ages", "start_log_probs"):
            assert further[input_name].shape == mask.shape


# ---------------------------------------------------------------- devices
@pytest.mark.parametrize("method", ["bapo", "grpo", "bapo-main", *NEIGHBOURS])
def test_the_loss_part_of_an_update_runs_where_tensors_have_no_values(method):
    """Kills: a tensor made on the CPU, a dtype that does not fit, a value that the host reads.

    On "meta" there are shapes, dtypes and devices alone. What an update does in update_policy
    besides the model's own passes.
    """
    arm = arms.parse_arm(method, bapo.ClipSearch())
    parts = made_up_step("meta")[:2]
    whole = join(parts)
    shape = whole.rollouts.mask.shape
    log_probs = torch.empty(shape, device="meta")
    entropy = torch.empty(shape, device="meta")
    bounds = None if arm.bounds_are_fixed else arm.search_bounds(log_probs, whole)
    log_probs_of_parts = []
    losses = []
    for part in parts:
        leaf = torch.empty_like(part.weights, requires_grad=True)
        loss, metrics = arm.loss(leaf, torch.empty_like(part.weights), part, bounds)
        loss.backward()
        assert leaf.grad.shape == leaf.shape
        losses.append(loss.detach())
        log_probs_of_parts.append(leaf.detach())
    joined = join_rows(log_probs_of_parts)
    assert joined.shape == shape
    _, metrics = arm.loss(joined, entropy, whole, bounds)
    metrics["loss"] = torch.stack(losses).sum()
    for exact in (True, False):
        metrics[f"newest {exact}"] = rollout.newest_log_ratio(joined, whole.rollouts, 3, exact)
    for name, value in metrics.items():
        assert value.device.type == "meta", name
        assert value.shape == (), name


def test_the_metrics_of_a_batch_are_computed_where_tensors_have_no_values():
    parts = made_up_step("meta")
    whole = join(parts)
    rewards = torch.empty(len(whole.advantages), device="meta")
    kept = torch.empty(3, dtype=torch.bool, device="meta")
    metrics = batch_metrics(whole.rollouts, rewards, kept, [parts])
    assert {(value.device.type, value.shape) for value in metrics.values()} == {("meta", ())}


READS = ("item", "tolist", "cpu", "nonzero", "__bool__", "__float__", "__int__", "__index__")


class HostReads(TorchDispatchMode):
    """Counts how often the host waits for a value on the device, by what asks for it.

    reads_of_models: those of transformers' own code, which nothing here can avoid: it looks for
    packed sequences in every forward pass, and for the end of all sequences after every token.
    """

    def __init__(self, monkeypatch):
        super().__init__()
        self.reads: list[str] = []
        self.reads_of_models: list[str] = []
        self.inside_a_read = False
        for name in READS:
            self._count(monkeypatch, name)

    def _count(self, monkeypatch, name: str) -> None:
        method = getattr(torch.Tensor, name)

        def counted(tensor, *arguments, **others):
            if self.inside_a_read:
                return method(tensor, *arguments, **others)
            caller = sys._getframe(1).f_code.co_filename
            kept = self.reads_of_models if "transformers" in caller else self.reads
            kept.append(name)
            self.inside_a_read = True
            try:
                return method(tensor, *arguments, **others)
            finally:
                self.inside_a_read = False

        monkeypatch.setattr(torch.Tensor, name, counted)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name == "index":  # reads the device where it is by a mask
            is_read = any(index is not None and index.dtype == torch.bool for index in args[1])
        else:
            is_read = name in HOST_READS | {"_unique2", "unique_dim", "repeat_interleave"}
        if is_read and not self.inside_a_read:
            self.reads.append(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "method, micro_batch_tokens",
    [("bapo@3", 10**6), ("bapo@3", 60), ("m2po@3", 60)],
)
def test_an_update_reads_the_device_once(tmp_path, policy, monkeypatch, method, micro_batch_tokens):
    """Kills: a metric that is read by itself, a bound that the host compares.

    With -s it also says how many reads a step has.
    """
    reads_of_updates = []
    reads_before_step = []
    update_policy = train.update_policy
    bounds_over = train.bounds_over_micro_batches
    counter = HostReads(monkeypatch)

    def counted_prompts(*arguments):
        reads_before_step.append(len(counter.reads))
        return prompts_of_step(*arguments)

    def counted_search(*arguments, **others):
        before = len(counter.reads)
        bounds = bounds_over(*arguments, **others)
        assert len(counter.reads) == before
        return bounds

    def counted_update(*arguments):
        before = len(counter.reads)
        seen = update_policy(*arguments)
        reads_of_updates.append(counter.reads[before:])
        return seen

    monkeypatch.setattr(train, "prompts_of_step", counted_prompts)
    monkeypatch.setattr(train, "bounds_over_micro_batches", counted_search)
    monkeypatch.setattr(train, "update_policy", counted_update)
    settings = {"method": method, "micro_batch_tokens": micro_batch_tokens}
    with counter:
        train_only(tmp_path, policy, steps=3, **settings)
    assert reads_of_updates == [["tolist"]] * 9
    # The second step: the first shows samples, the last writes a checkpoint.
    _, second, third = reads_before_step
    of_step = counter.reads[second:third]
    print(f"{method}, {micro_batch_tokens}: {len(of_step)} reads in a step", Counter(of_step))
    assert len(of_step) < 60


def test_nothing_of_a_model_is_alive_after_its_run(tmp_path, policy, monkeypatch):
    """Kills: a circle of references through a patched forward pass, a cache that keeps models.

    Two runs in one process, as train.py's workers do on a GPU. What the second needs must not come
    on top of what the first has needed.
    """
    alive: list[weakref.ref] = []
    load_policy = models.load_policy
    alive_at_load = []

    def watched_load(*arguments):
        alive_at_load.append(sum(ref() is not None for ref in alive))
        model, tokenizer = load_policy(*arguments)
        alive.extend(weakref.ref(module) for module in model.modules())
        return model, tokenizer

    monkeypatch.setattr(train, "load_policy", watched_load)
    monkeypatch.setattr(evaluation, "load_policy", watched_load)
    monkeypatch.setattr(train, "empty_device", lambda: None)
    for number in range(2):
        gc.collect()
        gc.disable()  # what is let go must be free at once, not when the collector comes by
        try:
            go(tmp_path / str(number), policy, steps=1, gradient_checkpointing=True)
        finally:
            gc.enable()
    assert alive_at_load == [0] * 4  # a policy to train and one to evaluate, of two runs
    assert not any(ref() is not None for ref in alive)


# ---------------------------------------------------------------- runs of a command
def test_runs_are_all_arms_starts_and_seeds_in_folders_of_their_own(tmp_path):
    output = tmp_path / "out"
    options = Options(
        methods=["grpo@1", "bapo"],
        seeds=[3, 4],
        warm_starts=[1, 2],
        output_dir=str(output),
        device="cpu",
    )
    expected = set()
    for arm in ("grpo@1", "bapo@8"):
        for start in (1, 2):
            expected.add(output / f"{arm}-start{start}-seed3")
            expected.add(output / f"{arm}-start{start}-seed4")
    runs = train.make_runs(options, make_task())
    assert len(runs) == 8
    assert {run.folder for run in runs} == expected
    for run in runs:
        number = run.config["warm_start"]
        name = f"attempts2-steps{options.warm_start_steps}-seed{number}"
        start = str(tmp_path / "warm-starts" / name)
        assert run.start == str(options.warm_start(number)) == start
        assert f"-start{number}-seed{run.seed}" in run.folder.name
        assert run.seed == run.config["seed"]
        assert run.config["arm"] == run.arm.name
        assert run.config["epochs"] == run.arm.epochs


def test_a_run_of_one_s_own_model_starts_from_it():
    options = Options(model="m/x", data="d", methods=["grpo"], seeds=[5], device="cpu")
    (run,) = train.make_runs(options, make_task())
    assert run.folder.as_posix() == "runs/default/grpo@8-seed5"
    assert run.start == "m/x"
    assert "warm_start" not in run.config


def test_a_run_s_config_has_all_that_decides_its_numbers(tmp_path):
    first = make_run(tmp_path).config
    assert first["search"] == vars(bapo.ClipSearch())
    assert first["learning_rate"] == 1e-2
    assert first["steps"] == 4
    other = Task(make_task().train[:9], make_task().held_out, even_length)
    assert make_run(tmp_path, task=other).config["problems"] != first["problems"]
    values = {
        "group_size": 8,
        "max_new_tokens": 9,
        "temperature": 0.9,
        "partial_budget": 2,
        "prompts_per_step": 5,
        "steps": 5,
        "max_grad_norm": 1.0,
        "attempts": 3,
        "learning_rate": 0.1,
        "warm_start_steps": 7,
        "precision": "bfloat16",
        "micro_batch_tokens": 99,
    }
    for name, value in values.items():
        assert make_run(tmp_path, **{name: value}).config[name] == value != first[name]
    assert json.loads(json.dumps(first)) == first  # what is read from a file compares equal
    of_the_command = {"methods", "seeds", "warm_starts", "jobs", "output_dir", "resume"}
    assert not of_the_command & first.keys()


# ---------------------------------------------------------------- options
@pytest.mark.parametrize(
    "given, message",
    [
        ({"methods": []}, "methods must be different and at least one"),
        ({"methods": ["grpo", "bapo", "grpo@8"]}, "methods must be different.*grpo@8"),
        ({"seeds": [1, 1]}, "seeds must be different"),
        ({"seeds": []}, "seeds must be different"),
        ({"warm_starts": [2, 2]}, "warm_starts must be different"),
        ({"low": [0.95, 0.9]}, "low_start"),
        ({"low": [0.9]}, "low takes 2 or 3 values"),
        ({"high": [1.2, 3.0, 0.05, 1]}, "high takes 2 or 3 values"),
        ({"high": [1.2, 3.0, 0.07]}, "high_step"),
        ({"fields": ["question"], "model": "m", "data": "d"}, "fields takes 0 or 2 values"),
        ({"rho0": 1.0}, "rho0"),
        ({"model": "m"}, "model and data go together"),
        ({"data": "d"}, "model and data go together"),
        ({"group_size": 1}, "group_size must be at least 2"),
        ({"steps": 0}, "steps must be at least 1"),
        ({"held_out": 0}, "held_out must be at least 1"),
        ({"micro_batch_tokens": 0}, "micro_batch_tokens must be at least 1"),
        ({"warm_start_steps": 0}, "warm_start_steps must be at least 1"),
        ({"checkpoint_every": 0}, "checkpoint_every must be at least 1"),
        ({"attempts": 0}, "attempts must be at least 1"),
        ({"temperature": 0.0}, "temperature must be positive"),
        ({"learning_rate": math.nan}, "learning_rate must be positive"),
        ({"learning_rate": math.inf}, "learning_rate must be positive"),
        ({"max_grad_norm": -1.0}, "max_grad_norm must be at least 0"),
        ({"partial_budget": -1}, "partial_budget must be at least 0"),
        ({"jobs": -1}, "jobs must be at least 0"),
    ],
)
def test_options_that_make_no_sense_are_refused_before_any_work(given, message):
    with pytest.raises(ValueError, match=message):
        Options(**given)


def test_the_defaults_follow_the_task_and_are_one_with_bapo_py():
    countdowns = Options(device="cpu")
    assert countdowns.max_new_tokens == 28
    assert countdowns.learning_rate == 2e-4
    assert countdowns.max_grad_norm == 0.0
    own = Options(model="m", data="d", device="cpu")
    assert own.max_new_tokens == 1024
    assert own.learning_rate == 1e-6
    assert own.max_grad_norm == 1.0
    given = Options(model="m", data="d", learning_rate=0.5, device="cpu")
    assert given.learning_rate == 0.5
    # Demonstrations have 12 characters an attempt, and a separator or EOS after each.
    assert countdowns.max_new_tokens >= 13 * countdowns.attempts
    (arm,) = Options(methods=["bapo"], device="cpu").arms()
    assert arm.search == bapo.ClipSearch()
    assert (arm.epochs, arm.parts) == (8, 1)


def test_options_of_the_search_shape_bapo_alone():
    options = Options(
        methods=["bapo", "bapo-main", "grpo"],
        rho0=0.3,
        low=[0.7, 0.95, 0.05],
        high=[1.1, 1.4],
        device="cpu",
    )
    found, main, grpo = options.arms()
    assert found.search == bapo.ClipSearch(0.3, 0.7, 0.95, 0.05, 1.1, 1.4)
    assert main.search == bapo.PAPER_MAIN
    assert grpo.search == bapo.GRPO
