"""The benchmarks still run and print their ratios, at sizes too small to mean anything."""

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bapo import ClipSearch, search_clip_bounds, token_weights

ROOT = Path(__file__).parent.parent


def run(script: str, *options: str) -> str:
    command = [sys.executable, f"benchmarks/{script}", *options]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr[-2000:]
    return process.stdout


@pytest.fixture
def search(monkeypatch):
    """benchmarks/search.py as a module."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    spec = importlib.util.spec_from_file_location("benchmarks_search", ROOT / "benchmarks" / "search.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_search_is_timed_against_the_literal_loop(search, capsys):
    search.against_the_loop(sizes=(1000,), repeats=1)
    out = capsys.readouterr().out
    assert len(re.findall(r"\| 1e\+03 \| (?:gradient|surrogate) (?:\| \d+\.\d+ ms ){3}\| \d+\.\d+ \| \d+\.\d \|", out)) == 2


@pytest.mark.parametrize("contribution", ["gradient", "surrogate"])
def test_the_loop_that_the_search_is_timed_against_finds_its_bounds(contribution, search):
    g, inside = torch.Generator().manual_seed(0), 0
    for _ in range(40):
        log_ratio, advantages = torch.randn(8, 50, generator=g) * 0.3, torch.randn(8, generator=g)
        weights = token_weights(torch.ones(8, 50))
        start = search_clip_bounds(log_ratio, advantages, weights, ClipSearch(contribution=contribution)).rho_start.item()
        asked = ClipSearch(rho0=start + 0.005, contribution=contribution)
        found = search_clip_bounds(log_ratio, advantages, weights, asked)
        assert search.literal_loop(log_ratio, advantages, weights, asked) == (found.low.item(), found.high.item())
        inside += 1.21 < found.high.item() < 2.99
    assert inside > 10


def test_functions_that_are_compared_take_turns_and_the_first_turn_does_not_count(search, monkeypatch):
    calls, now = [], [0.0]
    monkeypatch.setattr(sys.modules["model"], "clock", lambda device: now[0])

    def function(name, *seconds):
        durations = iter(seconds)

        def call():
            calls.append(name)
            now[0] += next(durations)

        return call

    medians = search.paired_medians([function("a", 100, 3, 1, 2), function("b", 200, 5, 9, 7)], 3)
    assert medians == [2, 7] and "".join(calls) == "abababab"


@pytest.mark.parametrize("lora_rank", ["0", "2"])
def test_the_parts_of_a_model_are_timed_against_the_least_that_a_trainer_must_do(lora_rank):
    found = json.loads(run("model.py", "--prompts", "2", "--tokens", "6", "--repeats", "1", "--lora_rank", lora_rank))
    assert found["drawing"]["tokens"] > 16 and found["search_ms"] > 0
    one, several = found["one_micro_batch"], found["several_micro_batches"]
    assert one["micro_batches"] == 1 < several["micro_batches"]
    for part in (one, several):
        assert part["bapo/least"] == pytest.approx(part["bapo_s"] / part["least_s"], rel=1e-3)


def test_the_least_computes_the_same_gradient_as_a_loss_of_all_log_probs(search, policy):
    """Kills: fewer tokens than the update reads, the prompts' tokens, tokens of the wrong places."""
    import model as benchmark
    from test_train import Options, make_task

    options, task = Options(methods=["grpo"], device="cpu"), make_task()
    policy, tokenizer = benchmark.rollout.load_policy(policy, "cpu", False)
    torch.manual_seed(0)
    rollouts = benchmark.rollout.generate(policy, tokenizer, [row.prompt for row in task.train], max_new_tokens=9)
    (batch,) = benchmark.rollout.make_batches(rollouts, torch.ones(10), torch.ones(10, dtype=bool), options.arms()[0], 60)
    gradients = []
    step = type("Keep", (), {"step": lambda self: gradients.append([p.grad.clone() for p in policy.parameters()])})
    step.zero_grad = lambda self: policy.zero_grad()
    benchmark.least(policy, step(), batch, options)
    for _, part in batch.micro_batches:
        (-benchmark.rollout.token_log_probs(policy, part)[0].sum()).backward()
    for parameter, gradient in zip(policy.parameters(), gradients[0], strict=True):
        torch.testing.assert_close(parameter.grad, gradient)
