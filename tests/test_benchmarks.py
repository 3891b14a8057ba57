"""The benchmarks still run and print their ratios, at sizes too small to mean anything."""

import json
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

import train
from bapo import ClipSearch, search_clip_bounds, token_weights
from rollout import generate, token_log_probs
from support.models import load_policy

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT / "benchmarks"))

import model as benchmark
import search as search_benchmark


# ---------------------------------------------------------------- search.py
def test_the_search_is_timed_against_the_literal_loop(capsys):
    search_benchmark.against_the_loop(sizes=(1000,), repeats=1)
    printed = capsys.readouterr().out
    times = r"(?:\| \d+\.\d+ ms ){3}"
    for contribution in ("gradient", "surrogate"):
        row = rf"\| 1e\+03 \| {contribution} {times}\| \d+\.\d+ \| \d+\.\d \|"
        assert len(re.findall(row, printed)) == 1


@pytest.mark.parametrize("contribution", ["gradient", "surrogate"])
def test_the_loop_that_the_search_is_timed_against_finds_its_bounds(contribution):
    generator = torch.Generator().manual_seed(0)
    inside_the_range = 0
    for _ in range(40):
        log_ratio = 0.3 * torch.randn(8, 50, generator=generator)
        advantages = torch.randn(8, generator=generator)
        weights = token_weights(torch.ones(8, 50))
        search = ClipSearch(contribution=contribution)
        at_start = search_clip_bounds(log_ratio, advantages, weights, search)
        target = at_start.rho_start.item() + 0.005  # a little more than no search gives
        search = ClipSearch(rho0=target, contribution=contribution)
        bounds = search_clip_bounds(log_ratio, advantages, weights, search)
        low, high = search_benchmark.literal_loop(log_ratio, advantages, weights, search)
        assert low == bounds.low.item()
        assert high == bounds.high.item()
        inside_the_range += 1.21 < high < 2.99
    assert inside_the_range > 10


# ---------------------------------------------------------------- clocks and counters
def test_functions_that_are_compared_take_turns_and_the_first_turn_does_not_count(monkeypatch):
    calls = []
    seconds = [0.0]
    monkeypatch.setattr(benchmark, "clock", lambda device: seconds[0])

    def lasting(name, *durations):
        rest = list(durations)

        def call():
            calls.append(name)
            seconds[0] += rest.pop(0)

        return call

    functions = [lasting("a", 100, 3, 1, 2), lasting("b", 200, 5, 9, 7)]
    assert benchmark.paired_medians(functions, 3) == [2, 7]
    assert "".join(calls) == "abababab"


def test_host_waits_are_counted_without_the_notice_that_pytorch_gives_first(monkeypatch):
    """Kills: a count of every warning that speaks of synchronizing, as the notice does."""
    notice = (
        "Synchronization debug mode is a prototype feature and does not yet detect all"
        " synchronizing operations"
    )

    def set_mode(mode: str) -> None:
        if mode == "warn":
            warnings.warn(notice, stacklevel=1)

    def wait_twice() -> None:
        for _ in range(2):
            warnings.warn("called a synchronizing CUDA operation", stacklevel=1)

    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", set_mode)
    assert benchmark.host_waits("cuda", wait_twice) == 2
    assert benchmark.host_waits("cuda", lambda: None) == 0
    assert benchmark.host_waits("cpu", wait_twice) is None


# ---------------------------------------------------------------- model.py
@pytest.mark.parametrize("lora_rank", [0, 2])
def test_the_parts_of_a_model_are_timed_against_the_least_that_a_trainer_must_do(
    lora_rank, monkeypatch, capsys
):
    """The updates are those of train.py itself, and the ratios those of the printed times."""
    if lora_rank:
        pytest.importorskip("peft")
    updates = []
    update_policy = train.update_policy

    def keep(policy, optimizer, batch, bounds, arm, *others, **named):
        updates.append((arm.name, len(batch), bounds is None))
        return update_policy(policy, optimizer, batch, bounds, arm, *others, **named)

    monkeypatch.setattr(train, "update_policy", keep)
    arguments = f"model.py --prompts 2 --tokens 6 --repeats 1 --lora_rank {lora_rank} --device cpu"
    monkeypatch.setattr(sys, "argv", arguments.split(" "))
    benchmark.main()
    result = json.loads(capsys.readouterr().out)
    assert result["drawing"]["tokens"] > 16
    assert result["search_ms"] > 0
    assert 0 <= result["sampler_gap"] < 1e-5
    one = result["one_micro_batch"]
    several = result["several_micro_batches"]
    assert one["micro_batches"] == 1 < several["micro_batches"]
    for part in (one, several):
        assert part["bapo/least"] == pytest.approx(part["bapo_s"] / part["least_s"])
        assert part["bapo/grpo"] == pytest.approx(part["bapo_s"] / part["grpo_s"])
        assert part["tokens_per_s"] == pytest.approx(part["tokens"] / part["bapo_s"])
    # Of several micro-batches BAPO's bounds are searched before the update; GRPO's are fixed.
    assert set(updates) == {
        ("grpo@8", 1, True),
        ("bapo@8", 1, True),
        ("grpo@8", several["micro_batches"], True),
        ("bapo@8", several["micro_batches"], False),
    }
    assert ("head_share_of_flops" in result) == (not lora_rank)


class KeepGradients:
    """An optimizer that moves nothing."""

    def __init__(self, policy):
        self.policy = policy
        self.gradients = []

    def step(self) -> None:
        self.gradients = [parameter.grad.clone() for parameter in self.policy.parameters()]

    def zero_grad(self) -> None:
        self.policy.zero_grad()


def small_batch(policy: str, micro_batch_tokens: int):
    """Model, batch and options: ten responses of an untrained model to two prompts."""
    options = train.Options(methods=["grpo"], device="cpu")
    model, tokenizer = load_policy(policy, "cpu", False)
    torch.manual_seed(0)
    rollouts = generate(model, tokenizer, ["348:44=", "125:7="], group_size=5, max_new_tokens=9)
    advantages = torch.ones(10)
    kept = torch.tensor([True, True])
    (arm,) = options.arms()
    (batch,) = train.make_batches(rollouts, advantages, kept, arm, micro_batch_tokens)
    return model, batch, options


def test_the_least_computes_the_same_gradient_as_a_loss_of_all_log_probs(policy):
    """Kills: fewer tokens than the update reads, the prompts' tokens, tokens of wrong places."""
    model, batch, options = small_batch(policy, micro_batch_tokens=60)
    assert len(batch) > 1
    optimizer = KeepGradients(model)
    benchmark.least(model, optimizer, batch, options)
    for part in batch:
        log_probs, _ = token_log_probs(model, part.rollouts)
        (-log_probs.sum()).backward()
    for parameter, gradient in zip(model.parameters(), optimizer.gradients, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)


def test_the_head_of_the_least_is_a_plain_one_in_the_precision_of_the_layers(policy, monkeypatch):
    """Kills: a least whose head is train.py's, so that the ratio to it hides the head's cost."""
    model, batch, options = small_batch(policy, micro_batch_tokens=10**6)
    options.precision = "bfloat16"
    token_log_probs(model, batch[0].rollouts)  # from now on the model's head stays out of autocast
    dtypes = []
    linear = torch.nn.functional.linear

    def keep(states, weight, bias=None):
        product = linear(states, weight, bias)
        if weight is model.lm_head.weight:
            dtypes.append(product.dtype)
        return product

    monkeypatch.setattr(torch.nn.functional, "linear", keep)
    benchmark.least(model, KeepGradients(model), batch, options)
    assert set(dtypes) == {torch.bfloat16}


def test_the_head_s_share_of_the_operations_is_what_its_tokens_and_weights_give(policy):
    model, batch, _ = small_batch(policy, micro_batch_tokens=10**6)
    rollouts = batch[0].rollouts
    head = 6 * model.lm_head.weight.numel() * rollouts.mask.sum().item()
    weights_of_layers = 0
    for name, parameter in model.named_parameters():
        if "lm_head" not in name and "embed_tokens" not in name:
            weights_of_layers += parameter.numel()
    layers = 6 * weights_of_layers * rollouts.lengths().sum().item()
    assert benchmark.head_share_of_flops(model, batch) == pytest.approx(head / (head + layers))


def test_the_first_groups_that_fit_are_taken_and_always_one(policy):
    _, batch, _ = small_batch(policy, micro_batch_tokens=10**6)
    rollouts = batch[0].rollouts
    rollouts = rollouts.select(torch.arange(8))  # one group of the benchmark's
    lengths = int(rollouts.lengths().sum())
    two = rollouts.select(torch.arange(8).repeat(2))
    assert benchmark.first_groups(two, 2 * lengths).tolist() == [True, True]
    assert benchmark.first_groups(two, 2 * lengths - 1).tolist() == [True, False]
    assert benchmark.first_groups(two, 1).tolist() == [True, False]


# ---------------------------------------------------------------- bapo.py in another project
def test_the_snippet_of_the_front_page_runs_beside_a_copy_of_bapo_py_alone(tmp_path):
    """As written, in an empty folder. Kills: an import of the project, a name that is gone."""
    readme = (ROOT / "README.md").read_text()
    section = readme.split("## The loss in other code")[1].split("\n## ")[0]
    snippet = "\n".join(re.findall(r"^    (.*)$", section, re.MULTILINE))
    assert "import" in snippet and "loss.backward()" in snippet
    (tmp_path / "bapo.py").write_bytes((ROOT / "bapo.py").read_bytes())
    before = """
import torch
torch.manual_seed(0)
group_size = 4
rewards = torch.tensor([1.0, 0, 0, 1, 0, 1, 1, 1])
rollout_log_probs = -torch.rand(8, 5)
log_probs = (rollout_log_probs + 0.1 * torch.randn(8, 5)).requires_grad_()
mask = torch.ones(8, 5, dtype=torch.bool)
"""
    after = """
assert torch.isfinite(loss) and log_probs.grad.abs().sum() > 0
assert metrics["low"] < 1 < metrics["high"]
"""
    (tmp_path / "use.py").write_text(before + snippet + after)
    process = subprocess.run(
        [sys.executable, "-P", "use.py"],
        cwd=tmp_path,
        env={"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stderr
