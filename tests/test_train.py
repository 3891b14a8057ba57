"""train.py: what a run does and logs, beyond the numbers that minimal.py checks (test_minimal.py).

`Watched` is a token loss that records what every update is given.
"""

import math
import re
from itertools import count
from pathlib import Path

import pytest
import torch
from conftest import without_seconds
from transformers import AutoModelForCausalLM

import train
from bapo import diagnostics
from rollout import Rollouts
from support import checkpoints, command_line, countdown, files, plot
from support.task import problems_of_step

FOLDER = "bapo@3-seed0"
REPORT = plot.report  # which train_here leaves out
OF_BOUNDS = {"low", "high", "gradient_share", "predicted_entropy_fall", "clip_fraction_low"}
OF_BOUNDS |= {"clip_fraction_high"}


class Watched(list):
    """The loss -r A, which keeps log_probs, rollout_log_probs, advantages, mask of every update."""

    def __call__(self, log_probs, rollout_log_probs, advantages, mask):
        self.append((log_probs.detach(), rollout_log_probs, advantages, mask))
        return -(log_probs - rollout_log_probs).exp() * advantages.unsqueeze(1)


@pytest.fixture
def watched(monkeypatch) -> Watched:
    """The updates of a method named watched."""
    updates = Watched()
    monkeypatch.setitem(train.other_losses(), "watched", updates)
    return updates


@pytest.fixture
def all_differ(monkeypatch) -> list[tuple[str, str, float]]:
    """Every response that has ended gets a reward of its own; a list of those that were graded."""
    asked = []

    def grade(response: str, answer: str) -> float:
        asked.append((response, answer, (len(asked) + 1) / 10_000))
        return asked[-1][2]

    monkeypatch.setattr(countdown, "grade", grade)
    return asked


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """The weights of a model that transformers loads."""
    return AutoModelForCausalLM.from_pretrained(folder).state_dict()


# ---------------------------------------------------------------- seeds and order
def test_a_seed_decides_a_run_and_the_order_of_its_prompts(train_here):
    """Whatever other seeds there are."""
    alone = train_here(steps=1, seeds=1, output_dir="alone")
    train_here(steps=1, seeds=[0, 1])
    beside = Path("runs/bapo@3-seed1")
    assert without_seconds(beside / "metrics.jsonl") == alone
    sample, *_ = files.read_lines(beside / "samples.jsonl")
    of_seed_0, *_ = files.read_lines(Path("runs", FOLDER, "samples.jsonl"))
    assert sample["prompt"] != of_seed_0["prompt"]


def test_every_epoch_goes_through_the_mini_batches_in_the_order_of_the_prompts(
    train_here, tmp_path, watched, all_differ, tokenizer
):
    options = {"steps": 1, "group_size": 8, "max_new_tokens": 28}
    train_here(methods="watched@1", **options)
    _, whole, _, mask = watched.pop()
    samples = files.read_lines(Path("runs/watched@1-seed0/samples.jsonl"))
    # <bos> counts one for the EOS; a response that was cut off has none.
    lengths = [len(tokenizer(sample["response"]).input_ids) for sample in samples]
    assert mask[:8].sum(1).tolist() == [min(length, 28) for length in lengths]
    lines = train_here(methods="watched@3x2", output_dir=tmp_path / "mini-batches", **options)
    assert [line["update"] for line in lines] == [1, 2, 3, 4, 5, 6]
    for update, (_, rollout_log_probs, advantages, _) in enumerate(watched):
        of_mini_batch = whole[:16] if update % 2 == 0 else whole[16:]
        assert torch.allclose(rollout_log_probs, of_mini_batch, atol=1e-5)
        assert advantages.view(-1, 8).sum(1).abs().max() < 1e-4  # whole groups


def test_with_fewer_groups_than_mini_batches_each_group_is_one(train_here, watched, all_differ):
    lines = train_here(methods="watched@2x3", steps=1, prompts_per_step=2, max_new_tokens=28)
    assert [line["update"] for line in lines] == [1, 2, 3, 4]
    assert [len(mask) for _, _, _, mask in watched] == [4] * 4


# ---------------------------------------------------------------- what is logged
def test_the_glossary_names_exactly_what_is_logged(train_here):
    """docs/logs.md explains what bapo.diagnostics does not."""
    page = (Path(train.__file__).parent / "docs/logs.md").read_text()
    glossary = set(re.findall(r"^([a-z]\w*(?:@k)?)  ", page, re.MULTILINE))
    of_loss = set(re.findall(r"\b[a-z]\w+\b", diagnostics.__doc__))
    train_here(evaluate_every=1, partial_budget=8)
    logged = set()
    for line in files.read_lines(Path("runs", FOLDER, "metrics.jsonl")):
        logged |= {re.sub(r"@\d+", "@k", name) for name in line}
    assert glossary - {"peak_memory_gb"} <= logged  # which a CPU does not have
    assert logged - glossary <= of_loss


def test_what_minimal_py_does_not_log_is_that_of_a_literal_loop(
    train_here, policy, tokenizer, all_differ
):
    """Of a first update: one group, whose responses samples.jsonl holds; the ratios are 1."""
    line, *_ = train_here(steps=1, prompts_per_step=1, group_size=8, max_new_tokens=28)
    samples = files.read_lines(Path("runs", FOLDER, "samples.jsonl"))
    rewards = torch.tensor([sample["reward"] for sample in samples], dtype=torch.float64)
    advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
    model = AutoModelForCausalLM.from_pretrained(policy)
    entropies = []
    falls = []
    for sample, advantage in zip(samples, advantages):
        end = "" if sample["truncated"] else tokenizer.eos_token
        text = sample["prompt"] + sample["response"] + end
        ids = tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids
        log_softmax = model(ids).logits[0, countdown.PROMPT_TOKENS - 1 : -1].detach().log_softmax(1)
        drawn = log_softmax.gather(1, ids[0, countdown.PROMPT_TOKENS :, None]).squeeze(1)
        entropy = -(log_softmax.exp() * log_softmax).sum(1)
        entropies.append(entropy)
        falls.append(advantage * (drawn + entropy))
    for name, values in (("entropy_now", entropies), ("predicted_entropy_fall", falls)):
        mean = torch.cat(values).mean().item()
        assert line[name] == pytest.approx(mean, rel=1e-4, abs=1e-5), name


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


def test_samples_are_the_responses_to_a_step_s_first_prompt(train_here, all_differ, monkeypatch):
    problems, _ = countdown.split_problems()
    monkeypatch.setattr(train, "SAMPLES_EVERY", 2)
    train_here(steps=4, max_new_tokens=28)
    samples = files.read_lines(Path("runs", FOLDER, "samples.jsonl"))
    assert [sample["step"] for sample in samples] == [1] * 4 + [2] * 4 + [4] * 4
    for sample in samples:
        first, *_ = problems_of_step(problems, sample["step"], 4, seed=0)
        assert sample["answer"] == first.answer
        assert first.answer in sample["prompt"]
        graded_as = (sample["response"], sample["answer"], sample["reward"])
        assert sample["reward"] == 0 or graded_as in all_differ


def test_evaluation_on_the_way_is_that_of_the_end(train_here):
    *others, last = train_here(steps=2, evaluate_every=2)
    final = files.read_json(Path("runs", FOLDER, "final.json"))
    for name in ("mean@16", "pass@8"):
        assert last[f"held_out_{name}"] == pytest.approx(final[name], rel=1e-5)
        assert not any(f"held_out_{name}" in line for line in others)
    assert final["pass@8"] >= final["mean@16"] > 0


def test_a_response_counts_for_pass_at_k_from_a_reward_above_0_on(train_here, monkeypatch):
    """The first two of the 2 * 16 responses before the first step earn one half."""
    calls = count()
    monkeypatch.setattr(countdown, "grade", lambda response, answer: 0.5 * (next(calls) < 2))
    train_here(steps=1)
    accuracies = files.read_json(Path("runs/start-seed0.json"))
    passed = 1 - (8 * 7) / (16 * 15)  # of the first problem; the second has no right response
    assert accuracies == pytest.approx({"mean@16": 1 / 32, "pass@8": passed / 2})


def test_a_search_that_never_moves_its_bounds_is_reported_once(
    train_here, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(train, "FIRST_STEPS", 2)

    def said(**options) -> list[str]:
        capsys.readouterr()
        lines.append(train_here(steps=3, output_dir=tmp_path / str(len(lines)), **options))
        return re.findall("(.*): the search has not moved", capsys.readouterr().out)

    lines = []
    assert said(methods=["bapo@3", "grpo@1", "cispo@1"], rho0=0.01) == [FOLDER]
    shares = [line["rho_start"] for line in lines[0] if line["step"] < 3]
    assert said(rho0=min(shares) + 1e-4) == []


def test_a_first_step_whose_every_response_is_cut_off_is_reported(
    train_here, tmp_path, monkeypatch, capsys
):
    measured = train.batch_metrics
    shares = iter([1.0, 1.0, 0.99])  # of a run's two steps, and of another run's one
    monkeypatch.setattr(
        train, "batch_metrics", lambda *batch: measured(*batch) | {"truncated": next(shares)}
    )
    train_here(steps=2, methods="grpo@1")
    train_here(steps=1, methods="grpo@1", output_dir=tmp_path / "other")
    said = capsys.readouterr().out
    assert re.findall(r"(step \d): all responses were cut off", said) == ["step 1"]


# ---------------------------------------------------------------- what trains
def test_a_command_in_which_nothing_is_ever_trained_ends_well(train_here, policy, monkeypatch):
    monkeypatch.setattr(countdown, "grade", lambda response, answer: False)
    lines = train_here(steps=2)
    assert [(line["step"], line["update"]) for line in lines] == [(1, 0), (2, 0)]
    for line in lines:
        assert (line["filtered_groups"], line["reward"]) == (1.0, 0.0)
        assert line["entropy"] > 0
        assert line["length_correct"] is None  # JSON has no NaN
    after = weights(Path("runs", FOLDER, "checkpoint-2"))
    for name, tensor in weights(policy).items():
        assert torch.equal(tensor, after[name]), name


def test_how_an_update_is_computed_changes_no_number(train_here, tmp_path):
    """Micro-batches, and layers that are computed again."""
    whole = train_here(steps=1)
    options = {"micro_batch_tokens": 60, "gradient_checkpointing": True}
    lines = train_here(steps=1, output_dir=tmp_path / "other", **options)
    for line, expected in zip(lines, whole, strict=True):
        assert line == pytest.approx(expected, rel=1e-3, abs=1e-4, nan_ok=True)


def test_trained_weights_are_float32_also_where_passes_are_bfloat16(train_here):
    lines = train_here(steps=1, precision="bfloat16")
    assert lines[0]["kl"] < 1e-3 < lines[-1]["kl"]
    for tensor in weights(Path("runs", FOLDER, "checkpoint-1")).values():
        assert tensor.dtype == torch.float32


def test_a_first_step_moves_the_weights_by_the_learning_rate_unless_the_gradient_is_clipped(
    train_here, tmp_path, policy
):
    """Adam divides the gradient by its size, unless epsilon is larger: here 1e-12 against 1e-8."""
    before = weights(policy)
    norms = []
    for limit, expected in ((0.0, 3e-4), (1e-12, 0.0)):
        output = tmp_path / str(limit)
        options = {"learning_rate": 3e-4, "max_grad_norm": limit, "output_dir": output}
        line, *_ = train_here(methods="grpo@1", steps=1, **options)
        after = weights(output / "grpo@1-seed0" / "checkpoint-1")
        moved = max((after[name] - before[name]).abs().max().item() for name in before)
        assert moved == pytest.approx(expected, rel=0.1, abs=1e-7)
        norms.append(line["grad_norm"])
    assert norms[0] == norms[1] > 0  # as they were before


def test_a_token_loss_is_trained_by_its_name(train_here):
    """That of PPO is GRPO's, whose bounds are logged, too."""
    lines = train_here(methods=["ppo@2", "grpo@2"], steps=1, micro_batch_tokens=60)
    of_grpo = files.read_lines(Path("runs/grpo@2-seed0/metrics.jsonl"))
    for line, expected in zip(lines, of_grpo, strict=True):
        assert OF_BOUNDS <= expected.keys() - line.keys()
        for name in expected.keys() & line.keys():
            assert line[name] == pytest.approx(expected[name], rel=1e-3, abs=1e-5), name


def test_bounds_are_those_that_were_asked_for(train_here, tmp_path):
    asked = {
        "0.9-1.2@1": (0.9, 1.2, {}),
        "clip-higher@1": (0.8, 1.28, {}),
        "bapo@1": (0.9, 3.0, {"rho0": 0.999999}),  # out of reach: the end of the range
        "bapo@2": (0.6, 1.2, {"rho0": 0.0}),
    }
    for method, (low, high, options) in asked.items():
        lines = train_here(methods=method, steps=1, output_dir=tmp_path / method, **options)
        for line in lines:
            assert (line["low"], line["high"]) == pytest.approx((low, high))


def test_every_seed_has_a_supervised_checkpoint_that_output_folders_share(train_here, monkeypatch):
    """All rewards are 0, so that nothing is trained and a run ends as it began."""
    monkeypatch.setattr(countdown, "grade", lambda response, answer: False)
    words = ["--device", "cpu", "--jobs", "1", "--warm_start_steps", "1", "--steps", "1"]
    words += ["--prompts_per_step", "2", "--methods", "grpo@1", "--output_dir"]
    assert train.main([*words, "first", "--seeds", "0", "1"]) == 0
    starts = [Path(f"starts/attempts2-steps1-seed{seed}") for seed in (0, 1)]
    monkeypatch.setattr(countdown, "supervised_start", None)  # from here on it would fail
    assert train.main([*words, "second", "--seeds", "0", "1"]) == 0
    heads = [weights(start)["lm_head.weight"] for start in starts]
    for seed, head in enumerate(heads):
        trained = weights(Path(f"second/grpo@1-seed{seed}/checkpoint-1"))
        assert torch.equal(trained["lm_head.weight"], head)
    assert not torch.equal(*heads)


# ---------------------------------------------------------------- partial rollouts
def test_older_tokens_keep_what_was_recorded_when_they_were_drawn(train_here, watched, all_differ):
    """At a step's first update only the tokens of its own policy have the ratio 1."""
    options = {"partial_budget": 3, "prompts_per_step": 2, "max_new_tokens": 9}
    lines = train_here(methods="watched@1", steps=5, **options)
    mixed = 0
    entropies_differ = 0
    for line, update in zip([line for line in lines if line["update"]], watched, strict=True):
        log_probs, rollout_log_probs, _, mask = update
        is_old = (log_probs - rollout_log_probs).abs() > 1e-5  # drawn by an earlier policy
        is_new = mask & ~is_old
        assert line["log_ratio_newest"] < 1e-5
        assert line["token_age"] > 0 or not is_old.any()
        mixed += int((is_new.any(1) & is_old.any(1)).sum())
        if is_old.any() and line["filtered_groups"] == 0:
            # These are means over the same tokens, of two policies.
            entropies_differ += abs(line["entropy"] - line["entropy_now"]) > 1e-5
        # A response is drawn from left to right: what is old comes first.
        assert not (is_new[:, :-1] & is_old[:, 1:]).any()
    assert mixed and entropies_differ
    assert any(line["waiting_groups"] for line in lines)


# ---------------------------------------------------------------- what stops a run
@pytest.mark.parametrize(
    "spoiled",
    [
        lambda log_probs: math.nan,  # the loss, but not its gradient
        lambda log_probs: (log_probs - log_probs.detach()).abs().sqrt(),  # the gradient alone
    ],
)
def test_a_loss_or_gradient_that_is_not_finite_stops_a_run_before_it_trains(
    train_here, refusal, monkeypatch, all_differ, spoiled
):
    calls = count()

    def mine(log_probs, rollout_log_probs, advantages, mask):
        losses = -(log_probs - rollout_log_probs).exp() * advantages.unsqueeze(1)
        return losses if next(calls) < 2 else losses + spoiled(log_probs)

    monkeypatch.setitem(train.other_losses(), "mine", mine)
    assert "step 2, update 1" in refusal(methods="mine@2", steps=3)
    folder = Path("runs/mine@2-seed0")
    lines = files.read_lines(folder / "metrics.jsonl")
    assert [(line["step"], line["update"]) for line in lines] == [(1, 1), (1, 2)]
    assert list(checkpoints.checkpoints(folder)) == [1]
    assert not (folder / "final.json").exists()


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
    assert "ratio" in refusal(steps=1)
    assert not Path("runs", FOLDER, "metrics.jsonl").exists()


def test_a_folder_whose_runs_all_failed_says_so_last(refusal, monkeypatch):
    monkeypatch.setattr(plot, "report", REPORT)
    monkeypatch.setattr(countdown, "grade", lambda response, answer: 1 / 0)
    *_, last = refusal(steps=1).strip().splitlines()
    assert last == f"These runs failed for the reasons above: start-seed0, {FOLDER}"


# ---------------------------------------------------------------- options
@pytest.mark.parametrize(
    "name, value",
    [
        ("methods", ["grpo"]),
        ("low and high", {"methods": ["0.8-0.9@2"]}),
        ("methods", ["grpo@1x0"]),
        ("methods", ["what@8"]),
        ("rho0", 1.0),
        ("rho0", math.nan),
        ("seeds", [0, -1]),
        ("steps", 0),
        ("group_size", 1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("learning_rate", 0.0),
        ("device", "cuda:99"),
        ("device", "cpu:0"),
        ("device", "mps"),
        ("model", "m"),
        # What would do nothing
        ("reward", "r.py:f"),
        ("fields", ["question", "answer"]),
        ("held_out", 9),
        ("rho0", {"methods": ["grpo@8", "bapo-main@8"], "rho0": 0.5}),
        ("attempts", {"model": "m", "data": "d", "attempts": 3}),
        ("warm_start_steps", {"model": "m", "data": "d", "warm_start_steps": 3}),
    ],
)
def test_a_wrong_option_is_refused_by_its_name(name, value):
    options = value if isinstance(value, dict) else {name: value}
    with pytest.raises(ValueError, match=name):
        train.Options(**options)


def test_a_resumed_command_may_name_the_folder_s_rho0_without_a_method_that_uses_it(train_here):
    train_here(steps=1, rho0=0.5)
    lines = train_here(steps=1, rho0=0.5, methods="grpo@3", resume=True)
    assert lines[-1]["low"] == pytest.approx(0.8)


def test_defaults_depend_on_the_task_and_options_are_not_abbreviated():
    with pytest.raises(ValueError, match="--rho is no option"):  # of --rho0
        command_line.parse(train.Options, ["--rho", "0.3"], "")
    own = train.Options(model="m", data="d")
    assert (own.learning_rate, own.max_new_tokens, own.max_grad_norm) == (1e-6, 1024, 1.0)
    default = train.Options()
    assert (default.learning_rate, default.max_new_tokens, default.max_grad_norm) == (2e-4, 28, 0.0)
