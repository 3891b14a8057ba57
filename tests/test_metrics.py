"""support/metrics.py and evaluation.py: every number that is logged against a literal count.

The Entropy-Clip Rule itself has test_entropy_rule.py.
"""

import itertools
import json
import math
import re
from types import SimpleNamespace

import pytest
import torch
from test_train import train_only

import bapo
import countdown
from reward import Problem
from rollout import Rollouts
from support import evaluation, metrics
from support.arms import Arm
from support.batches import MicroBatch, join
from train import make_batches

LENGTHS = [4, 2, 1, 3, 2, 4]
MASK = torch.arange(4) < torch.tensor(LENGTHS).unsqueeze(1)
TOKENS = 16


def made_up(seed: int = 0) -> Rollouts:
    """Six responses with random log-probs and entropies; outside the mask nothing must count."""
    generator = torch.Generator().manual_seed(seed)
    log_probs = -3 * torch.rand(MASK.shape, generator=generator)
    entropy = 2 * torch.rand(MASK.shape, generator=generator)
    sampler = -3 * torch.rand(MASK.shape, generator=generator)
    prompts = torch.ones(6, 2, dtype=torch.long)
    return Rollouts(
        prompt_ids=prompts,
        prompt_mask=prompts.bool(),
        response_ids=torch.randint(4, 9, MASK.shape, generator=generator),
        mask=MASK,
        truncated=torch.tensor([True, False, False, False, False, True]),
        log_probs=log_probs * MASK,
        entropy=entropy * MASK,
        sampler_log_probs=sampler,
    )


def inside(values: torch.Tensor) -> list[float]:
    """The values [6, 4] of the tokens, one by one."""
    return [values[row, place].item() for row, place in MASK.nonzero().tolist()]


def in_parts(rollouts: Rollouts, rows_of_parts: list[list[int]]) -> list[MicroBatch]:
    """One update's micro-batches of the given rows."""
    parts = []
    for rows in rows_of_parts:
        part = rollouts.select(torch.tensor(rows))
        parts.append(MicroBatch(part, torch.zeros(len(rows)), torch.zeros(part.mask.shape)))
    return parts


# ---------------------------------------------------------------- of a batch
@pytest.mark.parametrize(
    "batches",
    [
        [[[0, 1, 2, 3, 4, 5]]],
        [[[0, 1], [2, 3]], [[4, 5]]],
        [[[5], [3]], [[4, 0, 2], [1]]],
    ],
    ids=["one micro-batch", "two mini-batches", "in another order"],
)
def test_metrics_of_a_batch_equal_a_count_by_hand_however_it_was_read(batches):
    rollouts = made_up()
    rewards = torch.tensor([0.0, 1.0, 1.0, 0.0, 0.5, 0.0])
    kept = torch.tensor([True, False, False])
    read = [in_parts(rollouts, rows_of_parts) for rows_of_parts in batches]
    numbers = metrics.read_numbers(metrics.batch_metrics(rollouts, rewards, kept, read))
    gaps = [abs(gap) for gap in inside(rollouts.log_probs - rollouts.sampler_log_probs)]
    assert numbers == {
        "reward": pytest.approx(2.5 / 6),
        "entropy": pytest.approx(sum(inside(rollouts.entropy)) / TOKENS),
        "response_length": pytest.approx(TOKENS / 6),
        "length_correct": pytest.approx((2 + 1 + 2) / 3),
        "length_wrong": pytest.approx((4 + 3 + 4) / 3),
        "truncated": pytest.approx(2 / 6),
        "filtered_groups": pytest.approx(2 / 3),
        "sampler_gap": pytest.approx(sum(gaps) / TOKENS, rel=1e-5),
        "sampler_gap_max": pytest.approx(max(gaps)),
    }


def test_without_a_right_response_there_is_no_such_number():
    rollouts = made_up()
    read = [in_parts(rollouts, [[0, 1, 2, 3, 4, 5]])]
    none_kept = torch.zeros(3).bool()
    numbers = metrics.read_numbers(metrics.batch_metrics(rollouts, torch.zeros(6), none_kept, read))
    assert math.isnan(numbers["length_correct"])
    assert numbers["length_wrong"] == pytest.approx(TOKENS / 6)
    assert numbers["filtered_groups"] == 1


# ---------------------------------------------------------------- of an update
@pytest.mark.parametrize("micro_batch_tokens", [1, 12, 1000])
@pytest.mark.parametrize("search", [bapo.GRPO, bapo.ClipSearch()])
@pytest.mark.parametrize("given", [None, (0.7, 1.3)])
def test_metrics_of_an_update_equal_a_count_by_hand_in_one_and_several_micro_batches(
    search, given, micro_batch_tokens
):
    rollouts = made_up()
    rollouts.versions = torch.ones_like(rollouts.response_ids)
    advantages = torch.tensor([1.0, -1.0, 0.5, -0.5, 2.0, -2.0])
    arm = Arm("", search, 1)
    kept = torch.ones(3).bool()
    (batch,) = make_batches(rollouts, advantages, kept, arm, micro_batch_tokens)
    assert len(batch) == {1: 6, 12: 3, 1000: 1}[micro_batch_tokens]
    for part in batch:
        part.start_log_probs = part.rollouts.log_probs
        part.ages = torch.zeros_like(part.rollouts.response_ids)
    whole = join(batch)
    assert whole.weights.sum().item() == pytest.approx(1)
    # The order is that of the micro-batches: whose row is which tells the advantage.
    order = [advantages.tolist().index(advantage) for advantage in whole.advantages.tolist()]
    assert sorted(order) == [0, 1, 2, 3, 4, 5]
    other_policy = made_up(1)
    log_probs = other_policy.log_probs[order]
    entropy = other_policy.entropy[order]
    loss, found = arm.loss(log_probs, entropy, whole, given)
    numbers = metrics.read_numbers(found)

    weights = MASK / TOKENS
    expected_loss, expected = bapo.bapo_loss(
        other_policy.log_probs,
        rollouts.log_probs,
        advantages,
        MASK,
        search,
        weights=weights,
        bounds=given,
    )
    assert loss.item() == pytest.approx(expected_loss.item(), rel=1e-5)
    for name, value in expected.items():
        assert numbers[name] == pytest.approx(value.item(), rel=1e-5), name
    assert numbers.keys() - expected.keys() == {"entropy_rule", "entropy_now"}
    rule = 0.0
    for row, place in MASK.nonzero().tolist():
        log_prob = other_policy.log_probs[row, place].item()
        ratio = math.exp(log_prob - rollouts.log_probs[row, place].item())
        advantage = advantages[row].item()
        has_gradient = ratio <= numbers["high"] if advantage > 0 else ratio >= numbers["low"]
        if has_gradient:
            information = log_prob + other_policy.entropy[row, place].item()
            rule += ratio * information * advantage / TOKENS
    assert numbers["entropy_rule"] == pytest.approx(rule, rel=1e-4)
    expected_entropy = sum(inside(other_policy.entropy)) / TOKENS
    assert numbers["entropy_now"] == pytest.approx(expected_entropy)


def test_numbers_are_read_at_once_and_keep_their_order():
    values = {
        "a": torch.tensor(1.5, requires_grad=True).double(),
        "b": torch.tensor(True),
        "c": torch.tensor(math.nan),
    }
    numbers = metrics.read_numbers(values)
    assert list(numbers) == ["a", "b", "c"]
    assert (numbers["a"], numbers["b"]) == (1.5, 1.0)
    assert math.isnan(numbers["c"])


def test_seconds_of_a_part_add_up(monkeypatch):
    clock = iter([10.0, 10.5, 20.0, 22.0])
    monkeypatch.setattr(metrics.time, "perf_counter", lambda: next(clock))
    seconds = {}
    for _ in range(2):
        with metrics.timed(seconds, "part", "cpu"):
            pass
    assert seconds == {"part": 2.5}


def test_the_glossary_names_every_metric_that_a_run_logs(tmp_path, policy):
    lines = train_only(tmp_path / "whole", policy, steps=1, evaluate_every=1)
    lines += train_only(tmp_path / "partial", policy, steps=4, partial_budget=3)
    known = set()
    glossary = metrics.__doc__.replace("mean@k,...", "greedy,mean@16,pass@8,pass@16")
    for word in re.findall(r"(?:\w|\{[\w,@]+\})+", glossary):
        choices = [part.split(",") for part in re.split(r"[{}]", word)]  # a_{b,c}: a_b and a_c
        known |= {"".join(parts) for parts in itertools.product(*choices)}
    logged = set()
    for line in lines:
        logged |= line.keys()
    assert logged <= known


# ---------------------------------------------------------------- held-out accuracy
def test_the_final_accuracies_equal_a_count_by_hand(monkeypatch):
    """Responses made by hand: 3 problems, 4 samples each, some truncated.

    Of the samples 0, 1 and 3 of 4 are right; of the greedy responses one, for the last is cut.
    """
    right = {1: [[1], [0], [1]], 4: [[0, 0, 0, 0], [0, 1, 0, 0], [1, 1, 1, 1]]}
    truncated = {1: [[0], [0], [1]], 4: [[0, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 1]]}
    limits = {"max_new_tokens": 9, "temperature": 0.7, "batch_tokens": 99}
    drawn = []  # a random number for every call
    texts = []

    def generate(model, tokenizer, prompts, *, group_size, do_sample, **given):
        assert len(prompts) == 3
        assert do_sample == (group_size > 1)
        assert given == limits
        drawn.append(torch.rand(()).item())
        texts[:] = [str(one) for one in itertools.chain.from_iterable(right[group_size])]
        empty = torch.zeros(3 * group_size, 1, dtype=torch.long)
        is_truncated = torch.tensor(truncated[group_size]).flatten().bool()
        return Rollouts(empty, empty.bool(), empty, empty.bool(), is_truncated)

    monkeypatch.setattr(evaluation, "generate", generate)
    monkeypatch.setattr(evaluation, "response_texts", lambda tokenizer, rollouts: texts)
    held_out = countdown.problems()[1][:3]
    task = SimpleNamespace(held_out=held_out, grade=lambda text, answer: text == "1")
    options = SimpleNamespace(data="some.jsonl", device="cpu", precision="float32", **limits)
    state = torch.get_rng_state()
    accuracies = evaluation.evaluate(None, None, task, options)
    assert torch.equal(torch.get_rng_state(), state)  # as if nothing had been drawn
    assert accuracies == {
        "greedy": pytest.approx(1 / 3),
        "mean@4": pytest.approx(4 / 12),
        "pass@4": pytest.approx(2 / 3),
    }
    torch.manual_seed(5)
    assert evaluation.evaluate(None, None, task, options) == accuracies
    assert drawn[:2] == drawn[2:]


@pytest.mark.parametrize("data, samples", [("", 16), ("some.jsonl", 4)])
def test_a_policy_is_evaluated_on_the_held_out_problems_with_the_run_s_limits(
    tmp_path, policy, monkeypatch, data, samples
):
    """Kills: another number of samples, dropout left on, limits that are not the run's."""
    calls = []
    draw = evaluation.generate

    def generate(model, tokenizer, prompts, **settings):
        calls.append({"prompts": len(prompts), "training": model.training, **settings})
        return draw(model, tokenizer, prompts, **settings)

    monkeypatch.setattr(evaluation, "generate", generate)
    held_out = countdown.problems()[1][:2]
    task = SimpleNamespace(train=["other"], held_out=held_out, grade=countdown.grade)
    limits = {"max_new_tokens": 7, "temperature": 0.9, "batch_tokens": 55}
    options = SimpleNamespace(
        data=data,
        device="cpu",
        precision="float32",
        lora_rank=0,
        gradient_checkpointing=True,
        **limits,
    )
    evaluation.evaluate_policy(tmp_path / "final.json", policy, task, options)
    expected = {"prompts": 2, "training": False, **limits}
    assert calls == [
        {"group_size": 1, "do_sample": False, **expected},
        {"group_size": samples, "do_sample": True, **expected},
    ]
    saved = json.loads((tmp_path / "final.json").read_text())
    assert saved.keys() >= {"greedy", f"mean@{samples}"}


def test_truncated_responses_are_not_graded_and_every_other_one_is_with_its_own_answer():
    tokenizer = countdown.build_tokenizer()
    texts = ["1", "22", "333", "44"]  # the last has no EOS within the limit
    lengths = torch.tensor([2, 3, 4, 2])
    ids = torch.zeros(4, 4, dtype=torch.long)
    for row, text in enumerate(texts):
        tokens = [*tokenizer(text)["input_ids"][1:], tokenizer.eos_token_id]
        ids[row, : lengths[row]] = torch.tensor(tokens)[: lengths[row]]
    mask = torch.arange(4) < lengths.unsqueeze(1)
    truncated = torch.tensor([False, False, False, True])
    rollouts = Rollouts(ids, mask, ids, mask, truncated)
    problems = [Problem("p", "first"), Problem("q", "second")]
    asked = []

    def grade(response, answer):
        asked.append((response, answer))
        return len(response) / 2

    rewards = evaluation.grade_rollouts(grade, tokenizer, rollouts, problems, 2)
    assert asked == [("1", "first"), ("22", "first"), ("333", "second")]
    assert rewards.dtype == torch.float32
    assert rewards.tolist() == [0.5, 1.0, 1.5, 0.0]
