"""train.py: what a run does, step by step, and what the options mean. A run's folder and whole commands: test_runs.py."""

import json
import math
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import bapo
import countdown
import rollout
import support.arms
import support.evaluation
import support.files
import support.metrics
import support.models
import support.run_folder
import train
from support.objectives import OBJECTIVES, m2po_bounds, with_inputs
from train import Options, Run, Task

TINY = dict(steps=4, prompts_per_step=4, group_size=4, max_new_tokens=8, learning_rate=1e-2, checkpoint_every=1, device="cpu")


def even_length(response: str, answer: str) -> bool:
    """A reward that an untrained model earns about half the time."""
    return len(response) % 2 == 0


def make_task(grade=even_length) -> Task:
    rows, held_out = countdown.problems()
    return Task(rows[:10], held_out[:4], grade)


def make_run(folder, policy="", method="bapo@3", seed=0, task=None, **options) -> Run:
    """The only run of these options, in a folder of its own."""
    options = Options(methods=[method], seeds=[seed], **(TINY | options))
    (run,) = train.make_runs(options, task or make_task())
    return run._replace(folder=Path(folder), start=policy)


def go(folder, policy, grade=even_length, given_bounds=None, watch=None, **options) -> list[dict]:
    """Carry out a short run, or what is missing of it; its metrics."""
    run = make_run(folder, policy, **options)
    support.run_folder.prepare_folder(run.folder, run.config, resume=True)
    train.carry_out(run, make_task(grade), given_bounds=given_bounds, **({} if watch is None else {"watch": watch}))
    return support.run_folder.read_metrics(run.folder / "metrics.jsonl")


class Watched(list):
    """All updates of a run, as `watch` is told of them."""

    def __call__(self, *of_update) -> None:
        self.append(of_update)


# ---------------------------------------------------------------- Algorithm 1
def test_the_same_seed_gives_the_same_metrics_and_another_seed_others(tmp_path, policy):
    a, b, c = (go(tmp_path / name, policy, seed=seed) for name, seed in (("a", 0), ("b", 0), ("c", 1)))
    assert a == b != c
    assert (tmp_path / "a/metrics.jsonl").read_bytes() == (tmp_path / "b/metrics.jsonl").read_bytes()
    assert [(line["step"], line["update"]) for line in a] == [(s, u) for s in (1, 2, 3, 4) for u in (1, 2, 3)]


def test_a_seed_sets_the_order_of_the_prompts_and_the_sampling_each(tmp_path, policy, monkeypatch):
    order, asked = train.prompts_of_step, []

    def keep(*arguments):
        asked.append(order(*arguments))
        return asked[-1]

    monkeypatch.setattr(train, "prompts_of_step", keep)
    for seed in (0, 1):
        go(tmp_path / str(seed), policy, seed=seed, steps=1)
    assert asked[0] != asked[1]
    monkeypatch.setattr(train, "prompts_of_step", lambda rows, step, count, seed: rows[:count])
    first, second = (go(tmp_path / f"same prompts {seed}", policy, seed=seed, steps=1) for seed in (0, 1))
    assert first[0]["entropy"] != second[0]["entropy"]


def test_updates_use_bapo_py_on_ratios_against_the_rollout_policy(tmp_path, policy):
    lines = go(tmp_path, policy)
    first = [line for line in lines if line["update"] == 1]
    later = [line for line in lines if line["update"] > 1]
    assert all(abs(line["ratio_max_positive"] - 1) < 1e-4 and line["kl"] < 1e-6 for line in first)
    assert all(line["ratio_max_positive"] > 1.001 and line["kl"] > 1e-6 for line in later)
    assert len({(line["low"], line["high"]) for line in lines}) > 1  # the bounds moved
    assert first[-1]["entropy"] != first[0]["entropy"]  # and the policy


@pytest.mark.parametrize("micro_batch_tokens", [60, 10**6])
@pytest.mark.parametrize("method", ["bapo@3", "bapo+surrogate+sequence-mean@3", "0.9-1.1@3"])
def test_what_is_logged_of_an_update_equals_a_literal_loop_over_its_tokens(tmp_path, policy, method, micro_batch_tokens):
    updates = Watched()
    lines = go(tmp_path, policy, method=method, steps=2, watch=updates, micro_batch_tokens=micro_batch_tokens)
    assert len(lines) == len(updates) == 6
    for line, (step, update, batch, log_probs, entropy) in zip(lines, updates):
        assert (line["step"], line["update"]) == (step, update)
        assert (len(batch.micro_batches) > 1) == (micro_batch_tokens == 60)
        rollouts, low, high = batch.rollouts, line["low"], line["high"]
        lengths = rollouts.mask.sum(1).tolist()
        loss = positive = negative = surrogate_positive = surrogate_negative = kl = entropies = alive = negatives = 0.0
        for i, length in enumerate(lengths):
            advantage = batch.advantages[i].item()
            weight = 1 / (len(lengths) * length) if "sequence-mean" in method else 1 / sum(lengths)
            for t in range(length):
                ratio = math.exp(log_probs[i, t] - rollouts.log_probs[i, t])
                loss -= weight * min(ratio * advantage, min(max(ratio, low), high) * advantage)
                kl += (ratio - 1 - math.log(ratio)) / sum(lengths)
                entropies += entropy[i, t].item() / sum(lengths)
                if advantage > 0:
                    positive += weight * advantage * ratio * (ratio <= high)
                    surrogate_positive += weight * advantage * min(ratio, high)
                else:
                    negatives += 1
                    alive += ratio >= low
                    negative -= weight * advantage * ratio * (ratio >= low)
                    surrogate_negative -= weight * advantage * max(ratio, low)
        assert line["loss"] == pytest.approx(loss, rel=1e-4, abs=1e-6)
        assert line["kl"] == pytest.approx(kl, rel=1e-3, abs=1e-7)
        assert line["entropy_now"] == pytest.approx(entropies, rel=1e-5)
        assert line["gradient_share"] == pytest.approx(positive / (positive + negative), rel=1e-4)
        assert line["negatives_with_gradient"] == pytest.approx(alive / negatives, rel=1e-5)
        by_values = surrogate_positive / (surrogate_positive + surrogate_negative)
        assert line["rho"] == pytest.approx(by_values if "surrogate" in method else line["gradient_share"], rel=1e-4)
    assert {line["low"] for line in lines} == ({0.9} if method.startswith("0.9") else {line["low"] for line in lines})


def test_on_policy_every_method_is_the_same_update(tmp_path, policy):
    losses = [
        [line["loss"] for line in go(tmp_path / m, policy, method=f"{m}@1")] for m in ("grpo", "bapo", "bapo-main", "0.5-1.5")
    ]
    assert losses[0] == losses[1] == losses[2] == losses[3]


def test_given_bounds_are_used_in_place_of_a_search(tmp_path, policy):
    searched = go(tmp_path / "searched", policy, steps=2)
    given = {(s, u): (0.5 + 0.1 * u, 1.1 * s) for s in (1, 2) for u in (1, 2, 3)}
    for tokens in (60, 10**6):
        lines = go(tmp_path / f"given{tokens}", policy, steps=2, given_bounds=given, micro_batch_tokens=tokens)
        pairs = {(line["step"], line["update"]): (line["low"], line["high"]) for line in lines}
        assert pairs == {key: pytest.approx(pair) for key, pair in given.items()} and "rho" not in lines[0]
    again = {(line["step"], line["update"]): (line["low"], line["high"]) for line in searched}
    lines = go(tmp_path / "again", policy, steps=2, given_bounds=again)
    for line, other in zip(lines, searched, strict=True):
        assert line == {name: pytest.approx(other[name], rel=1e-5) for name in line}


def test_a_run_reports_rewards_of_all_samples_and_counts_what_it_drops(tmp_path, policy):
    lines = go(tmp_path, policy, method="grpo@1")
    for line in lines:
        assert 0 < line["reward"] < 1 and line["length_correct"] > 0 and line["length_wrong"] > 0
    # An untrained model hardly ever writes <eos>: such a response is truncated and earns nothing, whatever its text.
    always = go(tmp_path / "always", policy, grade=lambda response, answer: True, method="grpo@1", steps=1)[0]
    assert always["truncated"] > 0 and always["reward"] == pytest.approx(1 - always["truncated"])


def test_a_batch_in_which_every_group_is_dropped_changes_nothing(tmp_path, policy):
    lines = go(tmp_path, policy, grade=lambda response, answer: False)
    assert [(line["update"], line["filtered_groups"], line["reward"]) for line in lines] == [(0, 1.0, 0.0)] * 4
    assert all(value is None or value == value for line in lines for value in line.values())  # JSON has no NaN
    before = AutoModelForCausalLM.from_pretrained(policy).state_dict()
    after = AutoModelForCausalLM.from_pretrained(tmp_path / "model").state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_groups_of_equal_rewards_are_dropped_right_or_wrong_and_still_count_in_what_is_said_of_the_batch(
    tmp_path, policy, monkeypatch
):
    plain, updates = go(tmp_path / "plain", policy, steps=1, method="grpo@1")[0], Watched()
    rewards = torch.tensor([1.0] * 4 + [0.0] * 4 + [0.3, 0.0, 0.3, 0.0] + [0.5] * 4)
    monkeypatch.setattr(train, "grade_rollouts", lambda *arguments: rewards)
    line = go(tmp_path / "one", policy, steps=1, method="grpo@1", watch=updates)[0]
    assert line["filtered_groups"] == 0.75 and line["reward"] == pytest.approx(rewards.mean().item())
    [(_, _, batch, *_)] = updates
    assert len(batch.advantages) == 4 and batch.advantages.tolist() == pytest.approx([0.866, -0.866, 0.866, -0.866], abs=1e-3)
    monkeypatch.setattr(train, "grade_rollouts", lambda *arguments: torch.zeros(16))
    none = go(tmp_path / "none", policy, steps=1, method="grpo@1")[0]
    assert none["update"] == 0
    for name in ("entropy", "response_length", "truncated", "sampler_gap", "sampler_gap_max"):  # the samples are the same
        assert plain[name] == pytest.approx(line[name], rel=1e-4) == pytest.approx(none[name], rel=1e-4), name


def test_the_saved_model_is_the_trained_one_and_loads_in_transformers(tmp_path, policy, monkeypatch):
    trained, save = {}, train.save_checkpoint

    def keep(folder, step, model, *rest):
        trained.update({name: value.clone() for name, value in model.state_dict().items()})
        save(folder, step, model, *rest)

    monkeypatch.setattr(train, "save_checkpoint", keep)
    go(tmp_path, policy)
    folder = tmp_path / "model"
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert all(torch.equal(value, trained[name]) for name, value in model.state_dict().items()) and trained
    start = AutoModelForCausalLM.from_pretrained(policy).state_dict()
    assert not torch.equal(start["lm_head.weight"], trained["lm_head.weight"])
    assert not list(tmp_path.glob("checkpoint-*")) and (folder / "state.pt").exists()  # for a longer run
    assert tokenizer("348:44=")["input_ids"] == countdown.build_tokenizer()("348:44=")["input_ids"]
    final = json.loads((tmp_path / "final.json").read_text())
    assert set(final) == {"greedy", "mean@16", "pass@8", "pass@16"} and final["pass@16"] >= final["pass@8"] >= final["mean@16"]


def test_every_prompt_comes_once_per_epoch_in_an_order_of_its_own():
    rows = list(range(10))
    steps = [train.prompts_of_step(rows, step, 4, seed=0) for step in range(1, 6)]
    flat = sum(steps, [])
    assert sorted(flat[:10]) == sorted(flat[10:]) == rows and flat[:10] != flat[10:]
    assert train.prompts_of_step(rows, 4, 4, seed=0) == steps[3]
    assert train.prompts_of_step(rows, 1, 4, seed=1) != steps[0]
    assert len(train.prompts_of_step(rows, 1, 25, seed=0)) == 25  # more prompts than data


def test_a_non_finite_loss_stops_the_run_before_the_update_and_saves_the_batch(tmp_path, policy, monkeypatch):
    calls = []

    def broken(*arguments, **options):
        calls.append(1)
        loss, metrics = bapo.bapo_loss(*arguments, **options)
        return loss * (float("nan") if len(calls) == 5 else 1.0), metrics

    steps, step = [], torch.optim.AdamW.step
    monkeypatch.setattr(torch.optim.AdamW, "step", lambda self: steps.append(1) or step(self))
    monkeypatch.setattr(train, "bapo_loss", broken)
    with pytest.raises(FloatingPointError, match="step 2, update 2"):
        go(tmp_path, policy)
    assert len(steps) == 4  # the optimizer has not seen the fifth
    saved = torch.load(tmp_path / "nonfinite.pt", weights_only=True)
    assert (saved["step"], saved["update"]) == (2, 2) and saved["numbers"]["loss"] != saved["numbers"]["loss"]
    assert saved["batch"]["response_ids"].shape == saved["batch"]["log_probs"].shape and len(saved["advantages"])
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 4  # what was computed before is kept


def test_a_gradient_that_is_not_finite_stops_the_run_too(tmp_path, policy, monkeypatch):
    clip = torch.nn.utils.clip_grad_norm_
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", lambda *a: clip(*a) * float("inf"))
    with pytest.raises(FloatingPointError, match="gradient norm inf"):
        go(tmp_path, policy)


def test_a_sampler_that_disagrees_with_training_stops_the_run(tmp_path, policy, monkeypatch):
    record = train.record

    def off(*arguments):
        log_probs, entropy = record(*arguments)
        return log_probs + 0.01, entropy

    monkeypatch.setattr(train, "record", off)
    with pytest.raises(RuntimeError, match="ratio"):
        go(tmp_path, policy)


def test_the_gap_between_the_sampler_and_the_training_forward_is_logged(tmp_path, policy, monkeypatch):
    assert go(tmp_path / "equal", policy, steps=1)[0]["sampler_gap_max"] < 1e-4
    draw = train.generate

    def another_sampler(*arguments, **options):
        rollouts = draw(*arguments, **options)
        rollouts.sampler_log_probs[:, 0] -= 0.5  # of the first token of every response
        return rollouts

    monkeypatch.setattr(train, "generate", another_sampler)
    lines = go(tmp_path / "apart", policy, steps=2, micro_batch_tokens=60)
    for line in lines:
        assert line["sampler_gap_max"] == pytest.approx(0.5, abs=1e-3)
        assert line["sampler_gap"] == pytest.approx(0.5 / line["response_length"], rel=1e-2)


def test_speeds_are_logged(tmp_path, policy):
    for method, shares in (("bapo@3", 3), ("bapo@1x2", 1)):  # how often the updates see the whole batch
        lines = go(tmp_path / method, policy, steps=2, method=method)
        timings = support.files.read_lines(tmp_path / method / "timings.jsonl")
        assert [timing["step"] for timing in timings] == [1, 2]
        for line, timing in zip([line for line in lines if line["update"] == 1], timings, strict=True):
            tokens = line["response_length"] * 16
            assert timing["rollout_tokens_per_s"] * timing["rollout_s"] == pytest.approx(tokens, rel=1e-4)
            kept = round((1 - line["filtered_groups"]) * 16)
            trained = timing["update_tokens_per_s"] * timing["update_s"]  # prompts have 8 tokens, responses 1 to 8
            assert shares * 9 * kept <= trained * 1.001 and trained <= shares * 16 * kept * 1.001


# ---------------------------------------------------------------- micro-batches and precision
def forwards_of(monkeypatch) -> list[bool]:
    """Whether each micro-batch's forward pass of train.py and rollout.py carries a gradient, as they come."""
    calls, forward = [], rollout.token_log_probs

    def counted(*arguments):
        calls.append(torch.is_grad_enabled())
        return forward(*arguments)

    monkeypatch.setattr(train, "token_log_probs", counted)
    monkeypatch.setattr(rollout, "token_log_probs", counted)
    return calls


@pytest.mark.parametrize("method", ["bapo@3", "grpo@3", "bapo@1x2", "bapo+surrogate@3"])
def test_bounds_loss_gradient_and_metrics_do_not_depend_on_the_micro_batches(tmp_path, policy, method):
    options = dict(method=method.replace("@", "+sequence-mean@"), steps=2, temperature=0.9)
    whole = go(tmp_path / "whole", policy, **options)
    for tokens in (1, 40, 100):  # 1: every response alone
        split = go(tmp_path / str(tokens), policy, micro_batch_tokens=tokens, **options)
        for a, b in zip(whole, split, strict=True):
            assert {name: b[name] for name in ("low", "high", "reached")} == {
                name: a[name] for name in ("low", "high", "reached")
            }
            assert a.keys() == b.keys()
            for name in a:
                assert b[name] == pytest.approx(a[name], rel=2e-3, abs=2e-5), (tokens, name)
    if method == "bapo@3":
        assert len({(line["low"], line["high"]) for line in whole}) > 1  # the bounds moved


def test_the_extra_forward_pass_is_made_only_where_the_ratios_are_needed_first(tmp_path, policy, monkeypatch):
    calls = forwards_of(monkeypatch)
    options = dict(steps=1)
    go(tmp_path / "single", policy, **options)
    record = calls.count(False)
    assert calls[record:] == [True] * 3 and record <= 2  # kept and dropped groups; then nothing but the updates
    calls.clear()
    go(tmp_path / "several", policy, micro_batch_tokens=60, **options)
    parts = calls.count(True) // 3
    assert parts > 1
    updates = [True] * parts + ([False] * parts + [True] * parts) * 2  # r = 1 at the first update is known
    assert calls[-len(updates) :] == updates
    recorded = len(calls) - len(updates)
    calls.clear()
    go(tmp_path / "fixed", policy, method="0.7-1.3@3", micro_batch_tokens=60, **options)
    assert calls == [False] * recorded + [True] * 3 * parts
    calls.clear()
    go(tmp_path / "partial", policy, micro_batch_tokens=60, partial_budget=8, **options)  # several policies: r is not 1
    first = calls.index(True)
    assert calls[first - 1] is False and calls.count(False) > calls.count(True)


@pytest.mark.parametrize("update", [1, 2])
def test_partial_rollouts_are_searched_at_their_own_ratios_even_in_the_first_update(tmp_path, policy, update):
    run = make_run(tmp_path, micro_batch_tokens=60)
    model, tokenizer = train.load_policy(policy, "cpu", False)
    torch.manual_seed(0)
    rollouts = train.generate(model, tokenizer, ["348:44=", "123:06="], group_size=4, max_new_tokens=8)
    log_probs, _ = rollout.recorded_log_probs(model, rollouts.micro_batches(60), 1.0)
    advantages = torch.tensor([1.0, -1.0, 0.5, -0.5] * 2)
    log_ratio = 0.1 * advantages.sign().unsqueeze(1) * rollouts.mask  # drawn by another policy; raises the positive share
    rollouts.log_probs = log_probs - log_ratio
    rollouts.versions = torch.zeros_like(rollouts.response_ids)
    weights = bapo.token_weights(rollouts.mask)
    shares = [
        bapo.search_clip_bounds(ratio, advantages, weights, bapo.GRPO).rho.item()
        for ratio in (log_ratio, torch.zeros_like(log_ratio))
    ]
    search = bapo.ClipSearch(rho0=sum(shares) / 2)  # met at these ratios, not met at r = 1
    expected = bapo.search_clip_bounds(log_ratio, advantages, weights, search)
    assert expected.low.item() == pytest.approx(search.low_start) and expected.reached
    run = run._replace(arm=support.arms.parse_arm("bapo@3", search))
    (batch,) = train.make_batches(rollouts, advantages, torch.tensor([True, True]), run.arm, 60)
    assert len(batch.micro_batches) > 1
    found = train.bounds_of_update(model, batch, update, run.arm, run.options)
    for name in ("low", "high", "rho", "rho_start"):
        assert getattr(found, name).item() == pytest.approx(getattr(expected, name).item(), abs=1e-5), name


def test_the_precision_is_that_of_every_forward_pass(tmp_path, policy, monkeypatch):
    seen, lines = {}, {}

    def spy_on(module, name):
        function = getattr(module, name)

        def spy(*arguments, **options):
            seen.setdefault(f"{module.__name__}.{name}", set()).add(torch.is_autocast_enabled("cpu"))
            return function(*arguments, **options)

        monkeypatch.setattr(module, name, spy)

    for module in (train, rollout, support.evaluation):
        spy_on(module, "generate")
    spy_on(train, "token_log_probs"), spy_on(rollout, "token_log_probs")
    for precision in ("bfloat16", "float32"):
        seen.clear()
        for budget in (0, 3):
            options = dict(steps=3 if budget else 1, precision=precision, partial_budget=budget, micro_batch_tokens=60)
            lines[precision, budget] = go(tmp_path / f"{precision}{budget}", policy, **options)
        assert len(seen) == 5 and set.union(*seen.values()) == {precision == "bfloat16"}, seen
    for budget in (0, 3):
        assert lines["bfloat16", budget] != lines["float32", budget]


def test_limits_of_memory_reach_sampling_updates_and_evaluation(tmp_path, policy, monkeypatch):
    drawn, read, checkpointed = [], [], []
    draw, forward, layers = rollout._generate_batch, rollout.token_log_probs, support.models.checkpoint_layers

    def draw_batch(model, prompts, config, *rest):
        drawn.append(len(prompts) * (max(map(len, prompts)) + config.max_new_tokens))
        return draw(model, prompts, config, *rest)

    def token_log_probs(model, part, *rest):
        read.append(part.lengths().max().item() * len(part.mask))
        return forward(model, part, *rest)

    monkeypatch.setattr(rollout, "_generate_batch", draw_batch)
    monkeypatch.setattr(rollout, "token_log_probs", token_log_probs)
    monkeypatch.setattr(train, "token_log_probs", token_log_probs)
    monkeypatch.setattr(rollout, "checkpoint_layers", lambda model: checkpointed.append(1) or layers(model))
    whole = go(tmp_path / "whole", policy, steps=1)
    assert max(drawn) == 64 * 16 and max(read) > 100 and not checkpointed  # 4 problems are held out; 16 samples of each
    for budget in (0, 3):
        drawn.clear(), read.clear()
        limits = dict(batch_tokens=99, micro_batch_tokens=50, gradient_checkpointing=True)
        lines = go(tmp_path / str(budget), policy, steps=2, partial_budget=budget, **limits)
        assert 48 < max(drawn) <= 99 and 25 < max(read) <= 50 and len(read) > 9, budget
        if not budget:
            assert lines[0]["grad_norm"] != whole[0]["grad_norm"]  # other samples: they were drawn in other batches
    assert len(checkpointed) == 4  # also in the evaluation, which comes first: a model that cannot is refused at once


def test_bfloat16_weights_lose_updates_that_float32_weights_keep(tmp_path, policy):
    """Why weights are float32 and only the forward pass is bfloat16."""
    changed = {}
    for dtype in (torch.float32, torch.bfloat16):
        model = AutoModelForCausalLM.from_pretrained(policy, dtype=dtype)
        before = torch.cat([p.detach().flatten() for p in model.parameters()])
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, weight_decay=0.0)
        model(torch.tensor([[5, 6, 7, 8]])).logits.float().log_softmax(-1)[..., 9].sum().backward()
        optimizer.step()
        after = torch.cat([p.detach().flatten() for p in model.parameters()])
        moved = torch.cat([p.grad.flatten() != 0 for p in model.parameters()])
        changed[dtype] = (after != before)[moved].float().mean().item()
    assert changed[torch.float32] > 0.9 and changed[torch.bfloat16] < 0.05
    half = tmp_path / "half"  # as most models come
    AutoModelForCausalLM.from_pretrained(policy, dtype=torch.bfloat16).save_pretrained(half)
    AutoTokenizer.from_pretrained(policy).save_pretrained(half)
    start = AutoModelForCausalLM.from_pretrained(half, dtype=torch.float32)
    go(tmp_path / "run", str(half), precision="bfloat16", learning_rate=1e-6, steps=1)
    trained = AutoModelForCausalLM.from_pretrained(tmp_path / "run/model", dtype="auto")
    assert trained.dtype == torch.float32
    moved = [(a != b).float().mean().item() for a, b in zip(trained.parameters(), start.parameters())]
    assert sum(moved) / len(moved) > 0.5


def test_bfloat16_runs_resume_exactly_and_their_first_ratios_are_one(tmp_path, policy, monkeypatch):
    options = dict(precision="bfloat16", micro_batch_tokens=60, gradient_checkpointing=True, steps=3)
    whole = go(tmp_path / "whole", policy, **options)
    first = [line for line in whole if line["update"] == 1]
    assert all(line["ratio_max_positive"] == line["ratio_min_negative"] == 1 for line in first)  # in spite of the rounding
    save = train.save_checkpoint
    monkeypatch.setattr(train, "save_checkpoint", lambda folder, step, *rest: save(folder, step, *rest) or crash_after(step, 2))
    with pytest.raises(KeyboardInterrupt):
        go(tmp_path / "crashed", policy, **options)
    monkeypatch.setattr(train, "save_checkpoint", save)
    folder = next((tmp_path / "crashed").glob("checkpoint-2"))  # in the middle of a run it is a model, too
    assert AutoModelForCausalLM.from_pretrained(folder).config.vocab_size == len(AutoTokenizer.from_pretrained(folder))
    assert go(tmp_path / "crashed", policy, **options) == whole


def crash_after(step: int, last: int) -> None:
    if step == last:
        raise KeyboardInterrupt


# ---------------------------------------------------------------- partial rollouts
@pytest.mark.parametrize("partial_budget", [0, 3])
def test_a_crash_between_checkpoints_is_repeated_exactly_with_waiting_responses_too(
    tmp_path, policy, monkeypatch, partial_budget
):
    monkeypatch.setattr(train, "MAX_AGE", 2)
    options = dict(checkpoint_every=2, steps=7, partial_budget=partial_budget, max_new_tokens=8)
    whole = go(tmp_path / "whole", policy, **options)
    prompts_of_step = train.prompts_of_step

    def crash(rows, step, *rest):
        if step == 6:
            raise KeyboardInterrupt
        return prompts_of_step(rows, step, *rest)

    monkeypatch.setattr(train, "prompts_of_step", crash)
    with pytest.raises(KeyboardInterrupt):
        go(tmp_path / "crashed", policy, **options)
    monkeypatch.setattr(train, "prompts_of_step", prompts_of_step)
    waiting = torch.load(tmp_path / "crashed/checkpoint-4/state.pt", weights_only=True)["waiting"]
    assert bool(waiting) == bool(partial_budget)
    assert go(tmp_path / "crashed", policy, **options) == whole
    assert (tmp_path / "crashed/final.json").read_bytes() == (tmp_path / "whole/final.json").read_bytes()


def test_partial_rollouts_train_on_trajectories_of_several_policies_and_are_logged(tmp_path, policy, monkeypatch):
    monkeypatch.setattr(train, "MAX_AGE", 5)
    updates = Watched()
    lines = go(tmp_path, policy, steps=8, partial_budget=3, max_new_tokens=8, watch=updates)
    assert 32 < lines[0].pop("new_tokens") <= 48
    assert lines[0] == {"step": 1, "resumed_responses": 0, "cut_by_age": 0, "waiting_groups": 4, "update": 0}
    assert 8 < lines[1]["resumed_responses"] <= 16  # the four groups that wait
    trained = [line for line in lines if line["update"] == 1]
    assert all(0 <= line["sampler_gap_max"] < 1e-4 for line in trained)  # of the sampler of each token's own policy
    assert any(line["mixed_trajectories"] > 0 and 0 < line["resumed_tokens"] < 1 for line in trained)
    assert all(line["token_age_max"] > line["token_age_mean"] > 0 for line in trained)
    # Tokens of earlier policies have ratios other than 1 already at the first update.
    assert any(abs(line["ratio_max_positive"] - 1) > 1e-3 for line in trained)
    for step, _, batch, *_ in updates:
        ages = (step - batch.rollouts.versions)[batch.rollouts.mask]
        assert 0 <= ages.min() and ages.max() <= 5


# ---------------------------------------------------------------- options and arms reach the update
def test_the_options_of_the_update_reach_it(tmp_path, policy):
    base = go(tmp_path / "base", policy, steps=1)
    other = go(tmp_path / "temperature", policy, steps=1, temperature=0.7)
    assert other[0]["grad_norm"] != base[0]["grad_norm"]
    # At temperature 0.7 the first ratios are still 1: sampling and training divide by the same.
    assert abs(other[0]["ratio_max_positive"] - 1) < 1e-4 and other[0]["sampler_gap_max"] < 1e-4
    # AdamW does not feel the scale of a gradient, but for its epsilon: a norm of 1e-7 leaves hardly any step.
    clipped = go(tmp_path / "clip", policy, steps=1, max_grad_norm=1e-10)
    assert clipped[0]["grad_norm"] == base[0]["grad_norm"] and clipped[1]["kl"] < 1e-3 * base[1]["kl"]
    before = AutoModelForCausalLM.from_pretrained(policy).state_dict()["lm_head.weight"].norm()
    after = AutoModelForCausalLM.from_pretrained(tmp_path / "clip/model").state_dict()["lm_head.weight"].norm()
    assert after == pytest.approx(before.item(), rel=1e-4)  # no weight decay
    slow = go(tmp_path / "slow", policy, steps=1, learning_rate=1e-5)
    assert slow[0] == base[0] and 0 < slow[1]["kl"] < 1e-2 * base[1]["kl"]
    still = go(tmp_path / "still", policy, steps=1, learning_rate=1e-12, method="grpo@3")
    for line in still:  # every update has its own gradient, not the sum of those before
        assert line["grad_norm"] == pytest.approx(base[0]["grad_norm"], rel=1e-3)


def watched(folder, policy, method, **options) -> tuple[list[dict], Watched]:
    updates = Watched()
    return go(folder, policy, method=method, steps=1, watch=updates, **options), updates


def test_sequence_mean_gives_every_response_the_same_weight(tmp_path, policy):
    for method, rows in (("grpo@1", "tokens"), ("grpo+sequence-mean@1", "same")):
        _, [(_, _, batch, *_)] = watched(tmp_path / method, policy, method)
        per_response, lengths = batch.weights.sum(1), batch.rollouts.mask.sum(1)
        expected = lengths / lengths.sum() if rows == "tokens" else torch.full_like(per_response, 1 / len(lengths))
        assert len(set(lengths.tolist())) > 1
        torch.testing.assert_close(per_response, expected)


def test_no_std_only_subtracts_the_mean(tmp_path, policy):
    for method, spread in (("grpo@1", None), ("grpo+no-std@1", 1.0)):
        _, [(_, _, batch, *_)] = watched(tmp_path / method, policy, method)
        for group in batch.advantages.view(-1, 4):
            right = (group > 0).float()  # rewards are 0 and 1
            assert group.sum().abs() < 1e-5
            assert (group.max() - group.min()).item() == pytest.approx(spread or 1 / right.std().item(), rel=1e-4)


def test_fresh_updates_see_their_own_part_of_the_batch_in_turn(tmp_path, policy):
    options = dict(prompts_per_step=9, learning_rate=1e-9)
    lines, updates = watched(tmp_path / "fresh", policy, "grpo@1x3", **options)
    again, of_again = watched(tmp_path / "again", policy, "grpo@3", **options)
    parts = [batch.rollouts for _, _, batch, *_ in updates]
    whole = of_again[0][2].rollouts
    prompts = [[tuple(ids) for ids in part.prompt_ids.tolist()] for part in (*parts, whole)]
    assert prompts[0] + prompts[1] + prompts[2] == prompts[3] and not set(prompts[0]) & set(prompts[1])
    assert [batch.rollouts.mask.shape for _, _, batch, *_ in of_again] == [whole.mask.shape] * 3
    assert len({line["entropy_now"] for line in lines}) == 3
    of_batch = ("reward", "entropy", "response_length", "sampler_gap_max", "filtered_groups", "truncated")
    for line in lines:  # a batch is what it is, however the updates see it
        assert {name: line[name] for name in of_batch} == {name: pytest.approx(again[0][name], rel=1e-5) for name in of_batch}
    weights = [batch.weights.sum().item() for _, _, batch, *_ in updates]
    assert weights == pytest.approx([1, 1, 1], rel=1e-5)  # each part is a whole update, with its own normaliser


def test_with_fewer_kept_groups_than_parts_there_are_as_many_parts_as_groups(tmp_path, policy):
    """Kills: a part that comes again within an epoch, an empty part, an order that changes between epochs."""
    lines, updates = watched(tmp_path, policy, "grpo@2x5", learning_rate=1e-9)
    kept = round(4 * (1 - lines[0]["filtered_groups"]))
    assert 2 <= kept < 5 and [line["update"] for line in lines] == [*range(1, 2 * kept + 1)]
    assert [line["updates"] for line in lines] == [2 * kept] * 2 * kept
    batches = [id(batch) for _, _, batch, *_ in updates]
    assert len(set(batches)) == kept and batches == batches[:kept] * 2
    assert all(batch.rollouts.mask.shape[0] == 4 for _, _, batch, *_ in updates)  # a group each


def share_at_one(batch) -> float:
    """Positive share of the loss where every ratio is 1."""
    mass = batch.advantages * batch.weights.sum(1)
    return (mass.clamp(min=0).sum() / mass.abs().sum()).item()


def test_negatives_are_scaled_until_the_share_at_ratio_one_is_the_one_asked_for(tmp_path, policy):
    options = dict(rho0=0.6)
    lines, updates = watched(tmp_path / "grpo", policy, "grpo@2", **options)
    natural, plain = share_at_one(updates[0][2]), updates[0][2].advantages
    assert lines[0]["gradient_share"] == pytest.approx(natural, abs=1e-4) and 0.2 < natural < 0.3
    shares = {"balanced@2": 0.6, "grpo+share0.1@2": 0.1, "grpo+share.8@2": 0.8, "grpo+share0.4+sequence-mean@2": 0.4}
    shares["grpo+share1@2"] = 1
    for method, share in shares.items():
        lines, updates = watched(tmp_path / method, policy, method, **options)
        for _, _, batch, *_ in updates:
            assert share_at_one(batch) == pytest.approx(share, abs=1e-5), method
            assert torch.equal(batch.advantages[plain > 0], plain[plain > 0])  # of the positive ones nothing changes
            factors = batch.advantages[plain < 0] / plain[plain < 0]
            torch.testing.assert_close(factors, factors[:1].expand_as(factors))
        assert lines[0]["gradient_share"] == pytest.approx(share, abs=1e-4)
        assert [(line["low"], line["high"]) for line in lines] == [(0.8, 1.2)] * 2
    assert lines[0]["negative_tokens"] == 0 and lines[0]["positive_tokens"] > 0.05  # share1: positives alone
    assert lines[1]["clip_fraction_low"] == 0 and lines[1]["negatives_with_gradient"] is None


def test_balanced_never_scales_negatives_up(tmp_path, policy):
    natural, balanced, up = (
        watched(tmp_path / method, policy, method, rho0=0.1) for method in ("grpo@2", "balanced@2", "grpo+share0.1@2")
    )
    assert balanced[0] == natural[0] and share_at_one(natural[1][0][2]) > 0.2
    assert share_at_one(up[1][0][2]) == pytest.approx(0.1, abs=1e-5)  # shareS does


def test_at_one_lets_the_search_take_out_all_negative_tokens(tmp_path, policy):
    options = dict(rho0=0.99, low=[0.8, 1.1, 0.06])
    (plain, _), (at_one, _) = (watched(tmp_path / m, policy, m, **options) for m in ("bapo@2", "bapo+at-one@2"))
    assert plain[0]["low"] < 1 and plain[0]["negatives_with_gradient"] == 1
    assert at_one[0]["low"] > 1 and at_one[0]["negatives_with_gradient"] == 0 and at_one[0]["gradient_share"] == 1
    assert plain[0]["high"] == at_one[0]["high"] == pytest.approx(3.0)


# ---------------------------------------------------------------- the methods of objectives.py
NEIGHBOURS = sorted(OBJECTIVES.keys() - {"clip-higher", "balanced"})  # which are arms without them


@pytest.mark.parametrize("weights", ["", "+sequence-mean"])
def test_ppo_by_objectives_py_is_grpo_by_bapo_py(tmp_path, policy, weights):
    """Kills: other weights, columns or advantages than the loop's; metrics of gradients that are not those of the bounds."""
    options = dict(steps=2, micro_batch_tokens=60)
    lines = [go(tmp_path / m, policy, method=f"{m}{weights}@3", **options) for m in ("ppo", "grpo")]
    bounds = {"low", "high", "rho", "rho_start", "reached"}
    for ours, theirs in zip(*lines, strict=True):
        assert ours.keys() == theirs.keys() - {"rho", "rho_start", "reached"}
        assert (ours["low"], ours["high"]) == (None, None)
        for name in ours.keys() - bounds:
            assert ours[name] == pytest.approx(theirs[name], rel=1e-4, abs=1e-7), name


@pytest.mark.parametrize("method", NEIGHBOURS)
def test_every_neighbour_trains_alike_in_one_micro_batch_and_in_several(tmp_path, policy, method):
    """Kills: m2po's bounds of a part, gspo's ratios of cut responses, inputs of other rows."""
    weights = "+sequence-mean" if method == "gspo" else ""
    options = dict(method=f"{method}{weights}@3", steps=2, partial_budget=5, grade=lambda text, _: len(text) % 3 == 0)
    whole, split = (go(tmp_path / str(tokens), policy, micro_batch_tokens=tokens, **options) for tokens in (10**6, 60))
    assert any(line["update"] for line in whole)
    for a, b in zip(whole, split, strict=True):
        for name in ("loss", "grad_norm", "kl", "gradient_share", "entropy_rule") if a["update"] else ():
            if b[name] != a[name]:  # gspo's bounds may leave no gradient: None
                assert b[name] == pytest.approx(a[name], rel=2e-3, abs=2e-5), name


@pytest.mark.parametrize("update", [1, 2])
def test_m2po_s_bounds_are_those_of_the_whole_step(policy, update):
    """Kills: bounds of a part, or none; ratios of 1 in the first update of partial rollouts."""
    run = make_run("unused", micro_batch_tokens=60, method="m2po@2")
    model, tokenizer = train.load_policy(policy, "cpu", False)
    torch.manual_seed(0)
    rollouts = train.generate(model, tokenizer, ["348:44=", "123:06="], group_size=4, max_new_tokens=8)
    log_probs, _ = rollout.recorded_log_probs(model, rollouts.micro_batches(60), 1.0)
    advantages = torch.tensor([1.0, -1.0, 0.5, -0.5] * 2)
    moved = 0.01 * torch.ones_like(log_probs)
    moved[-1, 0] = 2  # one token alone exceeds the budget
    rollouts.log_probs = (log_probs - moved * advantages.sign().unsqueeze(1)) * rollouts.mask
    rollouts.versions = torch.zeros_like(rollouts.response_ids)
    (batch,) = train.make_batches(rollouts, advantages, torch.tensor([True, True]), run.arm, 60)
    assert len(batch.micro_batches) > 1
    found = train.bounds_of_update(model, batch, update, run.arm, run.options)
    four = log_probs, rollouts.log_probs, advantages, rollouts.mask
    torch.testing.assert_close(found, m2po_bounds(*four), atol=1e-4, rtol=0)
    assert 0 < found[0] < 0.69 and 1.6 < found[1] < 10 and m2po_bounds(*(t[:2] for t in four))[1] == math.inf


def test_neighbours_get_the_inputs_of_their_own(tmp_path, policy, monkeypatch):
    """Kills: proximal log-probs of the policy that drew the tokens, ages of updates, the entropy of the other policy."""
    seen = []
    monkeypatch.setattr(rollout, "with_inputs", lambda *a, **further: seen.append((a, further)) or with_inputs(*a, **further))
    updates = Watched()
    go(tmp_path, policy, method="decoupled-ppo@2", steps=4, partial_budget=3, watch=updates, micro_batch_tokens=60)
    starts = {step: log_probs for step, update, _, log_probs, _ in updates if update == 1}
    assert len(starts) > 1 and seen
    for step, update, batch, log_probs, _ in updates:
        torch.testing.assert_close(batch.further["proximal_log_probs"], starts[step], atol=1e-5, rtol=0)
        assert torch.equal(batch.further["ages"], step - batch.rollouts.versions)
        assert batch.further["rollout_entropy"] is batch.rollouts.entropy
        if update == 2:
            assert not torch.allclose(log_probs, starts[step], atol=1e-5)
    assert any((batch.further["ages"][batch.rollouts.mask] > 0).any() for _, _, batch, *_ in updates)
    for (name, log_probs, *_), further in seen:
        assert name == "decoupled-ppo" and not further["entropy"].requires_grad
        assert all(further[key].shape == log_probs.shape for key in ("entropy", "rollout_entropy", "ages", "start_log_probs"))


# ---------------------------------------------------------------- options and arms
@pytest.mark.parametrize(
    "options, named",
    [
        (dict(methods=["cispos"]), "methods: 'cispos' is none of.*cispo, "),
        (dict(methods=["grpo@0"]), "grpo@0"),
        (dict(methods=["cispo+at-one@2"]), "'at-one' in 'cispo.at-one@2' is no modifier"),
        (dict(methods=["grpo@x"]), "grpo@x"),
        (dict(methods=["1.5-0.8"]), "low"),
        (dict(methods=[]), "methods"),
        (dict(methods=["grpo", "bapo", "grpo@8"]), "methods must be different.*grpo@8"),
        (dict(low=[0.95, 0.9]), "low_start"),
        (dict(low=[0.9]), "low takes 2 or 3 values"),
        (dict(high=[1.2, 3.0, 0.05, 1]), "high takes 2 or 3 values"),
        (dict(high=[1.2, 3.0, 0.07]), "high_step"),
        (dict(fields=["question"], model="m", data="d"), "fields takes 0 or 2 values"),
        (dict(rho0=1.0), "rho0"),
        (dict(model="m"), "model and data go together"),
        (dict(data="d"), "model and data go together"),
        (dict(group_size=1), "group_size must be at least 2"),
        (dict(steps=0), "steps must be at least 1"),
        (dict(held_out=0), "held_out must be at least 1"),
        (dict(batch_tokens=0), "batch_tokens must be at least 1"),
        (dict(warm_start_steps=0), "warm_start_steps must be at least 1"),
        (dict(checkpoint_every=0), "checkpoint_every must be at least 1"),
        (dict(attempts=0), "attempts must be at least 1"),
        (dict(seeds=[1, 1]), "seeds"),
        (dict(seeds=[]), "seeds"),
        (dict(warm_starts=[2, 2]), "warm_starts"),
        (dict(temperature=0.0), "temperature must be positive"),
        (dict(learning_rate=math.nan), "learning_rate must be positive"),
        (dict(learning_rate=math.inf), "learning_rate must be positive"),
        (dict(max_grad_norm=-1.0), "max_grad_norm must be at least 0"),
        (dict(partial_budget=-1), "partial_budget must be at least 0"),
        (dict(jobs=-1), "jobs must be at least 0"),
        (dict(device="tpu"), "device"),
        (dict(precision="float16"), "precision"),
    ],
)
def test_options_that_make_no_sense_are_refused_before_any_work(options, named):
    with pytest.raises(ValueError, match=named):
        Options(**options)


def test_the_defaults_follow_the_task_and_are_one_with_bapo_py():
    own = Options(model="m", data="d", device="cpu")
    assert (Options().max_new_tokens, Options().learning_rate, Options().max_grad_norm) == (28, 2e-4, 0.0)
    assert (own.max_new_tokens, own.learning_rate, own.max_grad_norm) == (1024, 1e-6, 1.0)
    assert Options(model="m", data="d", learning_rate=0.5, device="cpu").learning_rate == 0.5
    assert Options(device="cpu").precision == own.precision == "float32"
    assert Options(device="cpu", precision="bfloat16").precision == "bfloat16"
    # A response is at most as long as the demonstrations: 12 characters an attempt, a separator or EOS after each.
    assert Options().max_new_tokens == 13 * Options().attempts + 1
    (arm,) = Options(methods=["bapo"]).arms()
    assert arm.search == bapo.ClipSearch() and (arm.epochs, arm.parts) == (8, 1)


def test_options_of_the_search_shape_bapo_and_the_target_of_balanced_alone():
    options = Options(methods=["bapo", "bapo-main", "grpo", "balanced"], rho0=0.3, low=[0.7, 0.95, 0.05], high=[1.1, 1.4])
    found, main, grpo, balanced = options.arms()
    assert found.search == bapo.ClipSearch(0.3, 0.7, 0.95, 0.05, 1.1, 1.4)
    assert main.search == bapo.PAPER_MAIN and grpo.search == bapo.GRPO
    assert balanced.search == bapo.GRPO and (balanced.share, balanced.scale_up) == (0.3, False)


def test_runs_are_all_arms_starts_and_seeds_in_folders_of_their_own(tmp_path):
    output = str(tmp_path / "out")
    options = Options(methods=["grpo@1", "bapo"], seeds=[3, 4], warm_starts=[1, 2], output_dir=output, device="cpu")
    found = train.make_runs(options, make_task())
    assert {run.folder.relative_to(tmp_path / "out").as_posix() for run in found} == {
        f"{arm}-start{start}-seed{seed}" for arm in ("grpo@1", "bapo@8") for start in (1, 2) for seed in (3, 4)
    }
    for run in found:
        number = run.config["warm_start"]
        start = tmp_path / f"warm-starts/attempts2-steps{options.warm_start_steps}-seed{number}"
        assert run.start == str(start) == str(options.warm_start(number))
        assert f"-start{number}-seed{run.seed}" in run.folder.name and run.seed == run.config["seed"]
        assert run.config["arm"] == run.arm.arm and run.config["epochs"] == run.arm.epochs
    own = train.make_runs(Options(model="m/x", data="d", methods=["grpo"], seeds=[5], device="cpu"), make_task())
    assert [run.folder.as_posix() for run in own] == ["runs/default/grpo@8-seed5"]
    assert own[0].start == "m/x" and "warm_start" not in own[0].config


def test_a_run_s_config_has_all_that_decides_its_numbers(tmp_path):
    first = make_run(tmp_path).config
    assert first["search"] == vars(bapo.ClipSearch()) and first["learning_rate"] == 1e-2 and first["steps"] == 4
    other = Task(make_task().train[:9], make_task().held_out, even_length)
    assert make_run(tmp_path, task=other).config["problems"] != first["problems"]
    values = dict(group_size=8, max_new_tokens=9, temperature=0.9, partial_budget=2, prompts_per_step=5, steps=5)
    values |= dict(max_grad_norm=1.0, attempts=3, learning_rate=0.1, warm_start_steps=7, precision="bfloat16")
    values |= dict(micro_batch_tokens=99, batch_tokens=98)
    for name, value in values.items():
        assert make_run(tmp_path, **{name: value}).config[name] == value != first[name]
    assert json.loads(json.dumps(first)) == first  # what is read from a file compares equal
    assert not {"methods", "seeds", "warm_starts", "jobs", "output_dir", "resume"} & first.keys()
