"""What a user sees while a run goes on: samples, held-out accuracy, the picture, boards.

Killed and resumed: test_own_model.py.
"""

import json
import re
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from test_train import even_length, go, never, train_only
from transformers import AutoTokenizer

import rollout
from reward import Problem
from support import evaluation, plot
from support.files import Lines, read_lines, write_json
from support.models import load_policy

ROOT = Path(__file__).parent.parent


# ---------------------------------------------------------------- samples
def test_samples_are_all_responses_of_prompts_that_teach_and_a_right_and_a_wrong_one_is_shown(
    tmp_path, policy, monkeypatch
):
    """Kills: rows of another group, rewards or answers shifted by one, a moved random state."""
    tokenizer = AutoTokenizer.from_pretrained(policy)
    model, _ = load_policy(policy, "cpu", False)
    problems = []
    for prompt in ("348:44=", "123:06=", "999:27=", "125:11="):
        problems.append(Problem(prompt, prompt[:-1]))
    prompts = [problem.prompt for problem in problems]
    torch.manual_seed(0)
    rollouts = rollout.generate(model, tokenizer, prompts, group_size=3, max_new_tokens=9)
    rewards = torch.tensor([0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 0.0, 0.4, 0.0, 0.0, 0.0, 1.0])
    said = []
    monkeypatch.setattr(evaluation, "report", said.append)
    file = Lines(tmp_path / "samples.jsonl")
    state = torch.get_rng_state()
    evaluation.write_samples(file, 20, tokenizer, rollouts, rewards, problems)
    assert torch.equal(state, torch.get_rng_state())
    samples = read_lines(file.path)
    texts = rollout.response_texts(tokenizer, rollouts)
    last_two_prompts = range(6, 12)  # their rewards differ
    for sample, row in zip(samples, last_two_prompts, strict=True):
        problem = problems[row // 3]
        assert sample == {
            "step": 20,
            "prompt": f"<bos>{problem.prompt}",
            "answer": problem.answer,
            "response": texts[row],
            "reward": pytest.approx(rewards[row].item()),
            "tokens": int(rollouts.mask[row].sum()),
            "truncated": bool(rollouts.truncated[row]),
        }
    right, wrong = said
    name = tmp_path.name
    assert right.startswith(f"{name}, step 20, right: <bos>125:11= -> {texts[11]}")
    assert "[125:11]" in right
    assert wrong.startswith(f"{name}, step 20, wrong: <bos>125:11= -> {texts[10]}")


@pytest.mark.parametrize("step, is_shown", [(1, True), (2, False), (9, False), (10, True)])
def test_samples_are_those_of_the_first_step_and_of_every_tenth(
    tmp_path, policy, monkeypatch, step, is_shown
):
    monkeypatch.setattr(evaluation, "report", lambda text: None)
    tokenizer = AutoTokenizer.from_pretrained(policy)
    ids = torch.tensor([[5, 2], [6, 2]])
    mask = torch.ones(2, 2).bool()
    rollouts = rollout.Rollouts(ids, mask, ids, mask, torch.zeros(2).bool())
    file = Lines(tmp_path / "samples.jsonl")
    rewards = torch.tensor([0.0, 1.0])
    evaluation.write_samples(file, step, tokenizer, rollouts, rewards, [Problem("p", "a")])
    assert len(read_lines(file.path)) == (2 if is_shown else 0)


def without_held_out(lines: list[dict]) -> list[dict]:
    kept = []
    for line in lines:
        kept.append({name: value for name, value in line.items() if "held_out" not in name})
    return kept


def test_samples_and_evaluations_change_no_number_and_may_be_switched_on_later(
    tmp_path, policy, monkeypatch
):
    """Kills: an evaluation that moves the random state, options that are part of what a run is."""
    monkeypatch.setattr(evaluation, "SAMPLES_EVERY", 100)
    plain = train_only(tmp_path / "plain", policy)
    samples = read_lines(tmp_path / "plain/samples.jsonl")
    assert [sample["step"] for sample in samples] == [1] * 8
    looked_at = tmp_path / "looked at"
    go(looked_at, policy, steps=1)
    monkeypatch.setattr(evaluation, "SAMPLES_EVERY", 3)
    lines = go(looked_at, policy, evaluate_every=2)
    samples = read_lines(looked_at / "samples.jsonl")
    assert [sample["step"] for sample in samples] == [1] * 8 + [3] * 8
    evaluated = [line for line in lines if "held_out_pass@8" in line]
    assert [(line["step"], line["update"]) for line in evaluated] == [(2, 3), (4, 3)]
    assert without_held_out(lines) == plain
    final = json.loads((looked_at / "final.json").read_text())
    for name, value in final.items():
        assert lines[-1][f"held_out_{name}"] == pytest.approx(value, rel=1e-5)
    timings = read_lines(looked_at / "timings.jsonl")
    assert [timing["step"] for timing in timings if "evaluation_s" in timing] == [2, 4]


def test_what_is_not_trained_is_evaluated_too(tmp_path, policy):
    (line,) = train_only(tmp_path, policy, never, steps=1, evaluate_every=1)
    assert (line["update"], line["held_out_greedy"]) == (0, 0.0)


def test_rewards_between_0_and_1_train_and_count_as_right_in_pass_at_k(tmp_path, policy):
    def a_third(response, answer):
        return even_length(response, answer) / 3

    lines = train_only(tmp_path, policy, a_third, steps=2, method="grpo@1", evaluate_every=2)
    for line in lines:
        assert line["update"] == 1
        assert 0 < line["reward"] <= 1 / 3 + 1e-6
        assert line["length_correct"] > 0
    last = lines[-1]
    assert 0 < last["held_out_mean@16"] < 1 / 3
    assert last["held_out_pass@8"] > last["held_out_mean@16"]


# ---------------------------------------------------------------- the picture
def test_the_picture_shows_held_out_accuracy_on_the_way_from_the_start_to_a_peak_and_down(
    tmp_path, monkeypatch
):
    """Kills: curves at the wrong steps, a panel that hides the peak, another warm start's start."""
    accuracies = {0: [0.5, 0.9, 0.1], 1: [0.7, 0.7, 0.3]}  # by warm start, at steps 2, 4, 6
    for start, values in accuracies.items():
        folder = tmp_path / f"bapo@1-start{start}-seed0"
        folder.mkdir()
        write_json(tmp_path / f"start{start}.json", {"mean@16": 0.2 + 0.2 * start})
        config = {"arm": "bapo@1", "seed": 0, "warm_start": start, "steps": 6}
        write_json(folder / "config.json", {"config": config, "versions": {}})
        with open(folder / "metrics.jsonl", "w") as file:
            for step in range(1, 7):
                line = {"step": step, "update": 1, "reward": 0.5, "low": 0.8, "high": 1.2}
                if step % 2 == 0:
                    line["held_out_greedy"] = 0.0
                    line["held_out_mean@16"] = values[step // 2 - 1]
                file.write(json.dumps(line) + "\n")
    figures = []
    close = plot.plt.close
    monkeypatch.setattr(plot.plt, "close", figures.append)
    plot.report(tmp_path)
    figure = figures[0]
    (axis,) = [axis for axis in figure.axes if axis.get_title(loc="left") == "held-out mean@16"]
    points = axis.lines[0].get_xydata().tolist()
    expected = [[0, 0.3], [2, 0.6], [4, 0.8], [6, 0.2]]
    assert points == [pytest.approx(point) for point in expected]
    close(figure)


# ---------------------------------------------------------------- sending it elsewhere
class Board:
    """What trackio and W&B have in common, and TensorBoard's writer; keeps what it is sent."""

    def __init__(self, *folder):
        self.sent = []
        Board.last = self

    def init(self, project, name):
        self.sent.append(name)

    def log(self, values):
        self.sent.append(values)

    def finish(self):
        self.sent.append("the end")

    def add_scalar(self, name, value, update):
        assert isinstance(value, float | int)
        self.sent.append((name, update))

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass


def code_for_boards(package: str) -> str:
    """The lines of docs/own_model.md that send metrics.jsonl to a board."""
    page = (ROOT / "docs/own_model.md").read_text()
    chosen = []
    for block in re.findall(r"\n\n((?:    .*\n)+)", page):
        is_for_tensorboard = "tensorboard" in block
        if "metrics.jsonl" in block and is_for_tensorboard == ("tensorboard" in package):
            chosen.append(textwrap.dedent(block))
    (code,) = chosen
    return code.replace("trackio", package)


@pytest.mark.parametrize("package", ["trackio", "wandb", "torch.utils.tensorboard"])
@pytest.mark.parametrize("installed", [False, True])
def test_the_lines_of_the_page_send_all_metrics(package, installed, tmp_path, monkeypatch):
    """Kills: a null that a board refuses, a line that is left out.

    With the package itself where it is installed.
    """
    code = code_for_boards(package)
    assert len(code.splitlines()) <= 8
    lines = [
        {"step": 1, "update": 0, "reward": 0.0, "length_correct": None},
        {"step": 2, "update": 1, "loss": -0.5},
    ]
    folder = tmp_path / "runs/gsm8k/bapo@8-seed0"
    folder.mkdir(parents=True)
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "metrics.jsonl").write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    if installed:
        pytest.importorskip(package.replace("torch.utils.", ""))
        exec(code, {})
        assert len(list(tmp_path.rglob("*"))) > 4  # what the package keeps
    elif "tensorboard" in package:
        monkeypatch.setitem(sys.modules, package, SimpleNamespace(SummaryWriter=Board))
        exec(code, {})
        names = []
        for update, line in enumerate(lines):
            names += [(name, update) for name in line]
        assert Board.last.sent == names
    else:
        board = Board()
        monkeypatch.setitem(sys.modules, package, board)
        exec(code, {})
        without_null = {"step": 1, "update": 0, "reward": 0.0}
        assert board.sent == ["bapo@8-seed0", without_null, lines[1], "the end"]
