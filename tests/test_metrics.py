"""metrics.py: every number of metrics.jsonl and final.json against a literal count. The Entropy-Clip Rule has its own file."""

import itertools
import json
import math
import re
import time
from types import SimpleNamespace

import pytest
import torch
from test_train import go

import bapo
import countdown
import support.arms
import support.evaluation
import support.metrics
from rollout import Rollouts
from train import make_batches

MASK = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 0, 0, 0], [1, 1, 1, 0], [1, 1, 0, 0], [1, 1, 1, 1]]).bool()


def made_up(seed: int = 0) -> Rollouts:
    """Six responses with random log-probs and entropies; what stands outside the mask must not count."""
    generator = torch.Generator().manual_seed(seed)
    scale = torch.tensor([-3.0, 2.0, -3.0]).view(3, 1, 1)
    log_probs, entropy, sampler = torch.rand(3, *MASK.shape, generator=generator) * scale
    ids = torch.randint(4, 9, MASK.shape, generator=generator)
    prompts = torch.ones(6, 2, dtype=torch.long)
    return Rollouts(
        prompts, prompts.bool(), ids, MASK, torch.tensor([1, 0, 0, 0, 0, 1]).bool(),
        log_probs * MASK, entropy * MASK, sampler_log_probs=sampler,
    )  # fmt: skip


@pytest.mark.parametrize(
    "parts", [[[0, 1, 2, 3, 4, 5]], [[0, 1], [2, 3], [4, 5]], [[4, 5], [0, 1, 2, 3]], [[5], [3], [4, 0, 2], [1]]]
)
def test_metrics_of_a_batch_equal_a_count_by_hand_however_it_was_read(parts):
    rollouts, rewards = made_up(), torch.tensor([0.0, 1.0, 1.0, 0.0, 0.5, 0.0])
    read = [rollouts.select(torch.tensor(rows)) for rows in parts]
    found = support.metrics.read_numbers(
        support.metrics.batch_metrics(rollouts, rewards, torch.tensor([True, False, False]), read)
    )
    gaps = [abs(rollouts.log_probs[i, t] - rollouts.sampler_log_probs[i, t]).item() for i, t in MASK.nonzero().tolist()]
    assert found == {
        "reward": pytest.approx(2.5 / 6),
        "entropy": pytest.approx(sum(rollouts.entropy[i, t].item() for i, t in MASK.nonzero().tolist()) / 16),
        "response_length": pytest.approx(16 / 6),
        "length_correct": pytest.approx((2 + 1 + 2) / 3),
        "length_wrong": pytest.approx((4 + 3 + 4) / 3),
        "truncated": pytest.approx(2 / 6),
        "filtered_groups": pytest.approx(2 / 3),
        "sampler_gap": pytest.approx(sum(gaps) / 16, rel=1e-5),
        "sampler_gap_max": pytest.approx(max(gaps)),
    }


def test_without_a_right_response_there_is_no_such_number():
    rollouts = made_up()
    found = support.metrics.read_numbers(
        support.metrics.batch_metrics(rollouts, torch.zeros(6), torch.zeros(3).bool(), [rollouts])
    )
    assert math.isnan(found["length_correct"]) and found["length_wrong"] == pytest.approx(16 / 6)
    assert found["filtered_groups"] == 1


@pytest.mark.parametrize("micro_batch_tokens", [1, 12, 1000])
@pytest.mark.parametrize("search", [bapo.GRPO, bapo.ClipSearch(), (0.7, 1.3)])
def test_metrics_of_an_update_equal_a_count_by_hand_in_one_and_several_micro_batches(search, micro_batch_tokens):
    rollouts, advantages = made_up(), torch.tensor([1.0, -1.0, 0.5, -0.5, 2.0, -2.0])
    given = search if isinstance(search, tuple) else None
    search = bapo.ClipSearch.fixed(*given) if given else search
    arm = support.arms.Arm("", search, 1)
    (batch,) = make_batches(rollouts, advantages, torch.ones(3).bool(), arm, micro_batch_tokens)
    assert len(batch.micro_batches) == {1: 6, 12: 3, 1000: 1}[micro_batch_tokens]
    log_probs, entropy = made_up(1).log_probs, made_up(1).entropy
    args = (log_probs, rollouts.log_probs, advantages, MASK, search)
    of_loss = bapo.bapo_loss(*args, weights=batch.weights, bounds=given)[1] if len(batch.micro_batches) == 1 else {"low": 0}
    found = support.metrics.read_numbers(support.metrics.update_metrics(of_loss, given, log_probs, entropy, batch, arm))
    _, whole = bapo.bapo_loss(*args, weights=batch.weights, bounds=given)
    for name, value in whole.items():
        assert found[name] == pytest.approx(value.item(), rel=1e-5), name
    assert ("rho" in found) == (given is None) and len(found) == len(whole) + 2
    rule = 0.0
    for i, t in MASK.nonzero().tolist():
        r, a = math.exp(log_probs[i, t] - rollouts.log_probs[i, t]), advantages[i].item()
        inside = r <= found["high"] if a > 0 else r >= found["low"]
        rule += r * (log_probs[i, t] + entropy[i, t]).item() * a * inside / 16
    assert found["entropy_rule"] == pytest.approx(rule, rel=1e-4)
    assert found["entropy_now"] == pytest.approx(sum(entropy[i, t].item() for i, t in MASK.nonzero().tolist()) / 16)


def test_the_final_accuracies_equal_a_count_by_hand(monkeypatch):
    """Responses made by hand: 3 problems, 4 samples each, some truncated; correct are 0, 1 and 3 of 4."""
    right = {1: [[1, 0, 1]], 4: [[0, 0, 0, 0], [0, 1, 0, 0], [1, 1, 1, 1]]}
    cut = {1: [[0, 0, 1]], 4: [[0] * 4, [0] * 4, [0, 0, 0, 1]]}

    def generate(model, tokenizer, prompts, *, group_size, do_sample, **limits):
        assert len(prompts) == 3 and do_sample == (group_size > 1)
        assert limits == {"max_new_tokens": 9, "temperature": 0.7, "batch_tokens": 99}
        count = 3 * group_size
        seen.append(torch.rand(()).item())
        flat = torch.tensor(cut[group_size]).flatten()
        empty = torch.zeros(count, 1, dtype=torch.long)
        texts[:] = torch.tensor(right[group_size]).flatten().tolist()
        return Rollouts(empty, empty.bool(), empty, empty.bool(), flat.bool())

    seen, texts = [], []
    monkeypatch.setattr(support.evaluation, "generate", generate)
    monkeypatch.setattr(support.evaluation, "response_texts", lambda tokenizer, rollouts: list(map(str, texts)))
    task = SimpleNamespace(held_out=countdown.problems()[1][:3], grade=lambda text, answer: text == "1")
    limits = dict(max_new_tokens=9, temperature=0.7, batch_tokens=99)
    options = SimpleNamespace(data="some.jsonl", device="cpu", precision="float32", **limits)
    state = torch.get_rng_state()
    result = support.evaluation.evaluate(None, None, task, options)
    assert torch.equal(torch.get_rng_state(), state)  # the caller's random numbers go on as if nothing had been drawn
    assert result == {"greedy": pytest.approx(1 / 3), "mean@4": pytest.approx(4 / 12), "pass@4": pytest.approx(2 / 3)}
    torch.manual_seed(5)
    more = support.evaluation.evaluate(None, None, task, options)
    assert more == result and seen[:2] == seen[2:]


@pytest.mark.parametrize("data, samples", [("", 16), ("some.jsonl", 4)])
def test_a_policy_is_evaluated_on_the_held_out_problems_with_the_run_s_limits(tmp_path, policy, monkeypatch, data, samples):
    """Kills: another number of samples, dropout left on, limits that are not the run's."""
    seen, draw = [], support.evaluation.generate

    def generate(model, tokenizer, prompts, **options):
        seen.append(options | {"prompts": len(prompts), "training": model.training})
        return draw(model, tokenizer, prompts, **options)

    monkeypatch.setattr(support.evaluation, "generate", generate)
    task = SimpleNamespace(train=["other"], held_out=countdown.problems()[1][:2], grade=countdown.grade)
    limits = dict(max_new_tokens=7, temperature=0.9, batch_tokens=55)
    machine = dict(device="cpu", precision="float32", lora_rank=0, gradient_checkpointing=True)
    support.evaluation.evaluate_policy(tmp_path / "final.json", policy, task, SimpleNamespace(data=data, **machine, **limits))
    greedy, sampled = ({"group_size": n, "do_sample": n > 1, "prompts": 2, "training": False} | limits for n in (1, samples))
    assert seen == [greedy, sampled]
    assert json.loads((tmp_path / "final.json").read_text()).keys() >= {"greedy", f"mean@{samples}"}


def test_truncated_responses_are_not_graded_and_every_other_one_is_with_its_own_answer():
    tokenizer, asked = countdown.build_tokenizer(), []
    eos = tokenizer.eos_token_id
    texts = ["1", "22", "333", "4"]
    ids = torch.tensor([tokenizer(text)["input_ids"][1:] + [eos] + [0] * (3 - len(text)) for text in texts])
    ids[3, 1] = ids[3, 0]  # "44": no EOS within the limit
    lengths = torch.tensor([2, 3, 4, 2])
    mask = torch.arange(4) < lengths.unsqueeze(1)
    rollouts = Rollouts(ids, mask, ids, mask, torch.tensor([False, False, False, True]))
    rows = [countdown.Problem("p", "first"), countdown.Problem("q", "second")]

    def grade(response, answer):
        asked.append((response, answer))
        return len(response) / 2

    rewards = support.evaluation.grade_rollouts(grade, tokenizer, rollouts, rows, 2)
    assert asked == [("1", "first"), ("22", "first"), ("333", "second")]
    assert rewards.dtype == torch.float32 and rewards.tolist() == [0.5, 1.0, 1.5, 0.0]


def test_numbers_are_read_at_once_and_seconds_add_up():
    values = {"a": torch.tensor(1.5, requires_grad=True).double(), "b": torch.tensor(True), "c": torch.tensor(math.nan)}
    found = support.metrics.read_numbers(values)
    assert found["a"] == 1.5 and found["b"] == 1.0 and math.isnan(found["c"]) and list(found) == ["a", "b", "c"]
    seconds = {}
    for _ in range(2):
        with support.metrics.timed(seconds, "part", "cpu"):
            time.sleep(0.03)
    assert 0.06 <= seconds["part"] < 60


def test_the_glossary_names_every_metric_that_a_run_logs(tmp_path, policy):
    lines = go(tmp_path / "whole", policy, steps=1) + go(tmp_path / "partial", policy, steps=4, partial_budget=3)
    known = set()
    for word in re.findall(r"(?:\w|\{[\w,]+\})+", support.metrics.__doc__):
        choices = [part.split(",") for part in re.split(r"[{}]", word)]  # a_{b,c} is a_b and a_c
        known |= {"".join(parts) for parts in itertools.product(*choices)}
    assert {name for line in lines for name in line} <= known
