"""What a user sees while a run goes on: samples, held-out accuracy, the picture. Killed and resumed: test_own_model.py."""

import json
import re
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from test_train import even_length, go
from transformers import AutoTokenizer

import rollout
import support.evaluation
import support.files
import support.metrics
import support.models
from support import plot


# ---------------------------------------------------------------- samples
def drawn(policy) -> tuple:
    tokenizer, policy = AutoTokenizer.from_pretrained(policy), support.models.load_policy(policy, "cpu", False)[0]
    torch.manual_seed(0)
    rows = [SimpleNamespace(prompt=prompt, answer=prompt[:-1]) for prompt in ("348:44=", "123:06=", "999:27=", "125:11=")]
    prompts = [row.prompt for row in rows]
    return tokenizer, rollout.generate(policy, tokenizer, prompts, group_size=3, max_new_tokens=9), rows


def test_samples_are_all_responses_of_prompts_that_teach_and_a_right_and_a_wrong_one_is_shown(tmp_path, policy, monkeypatch):
    """Kills: rows of another group, rewards or answers shifted by one, a look that moves the random state."""
    tokenizer, rollouts, rows = drawn(policy)
    rewards = torch.tensor([0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 0.0, 0.4, 0.0, 0.0, 0.0, 1.0])
    said, state = [], torch.get_rng_state()
    monkeypatch.setattr(support.evaluation, "report", said.append)
    file = support.files.Lines(tmp_path / "samples.jsonl")
    support.evaluation.write_samples(file, 20, tokenizer, rollouts, rewards, rows)
    assert torch.equal(state, torch.get_rng_state())
    samples, texts = support.files.read_lines(file.path), rollout.response_texts(tokenizer, rollouts)
    for sample, i in zip(samples, range(6, 12), strict=True):  # the last two prompts: their rewards differ
        row, length = rows[i // 3], int(rollouts.mask[i].sum())
        assert sample == {
            "step": 20, "prompt": f"<bos>{row.prompt}", "answer": row.answer, "response": texts[i],
            "reward": pytest.approx(rewards[i].item()), "tokens": length, "truncated": bool(rollouts.truncated[i]),
        }  # fmt: skip
    right, wrong = said if "right" in said[0] else said[::-1]
    assert right.startswith(f"{tmp_path.name}, step 20, right: <bos>125:11= -> {texts[11]}") and "[125:11]" in right
    assert wrong.startswith(f"{tmp_path.name}, step 20, wrong: <bos>125:11= -> {texts[10]}") and len(said) == 2


def test_samples_and_evaluations_change_no_number_and_may_be_switched_on_later(tmp_path, policy):
    """Kills: an evaluation that moves the random state, options that are part of a run's identity."""
    plain = go(tmp_path / "plain", policy, samples_every=0)
    assert (tmp_path / "plain/samples.jsonl").read_bytes() == b""
    go(tmp_path / "looked at", policy, samples_every=0, steps=1)
    lines = go(tmp_path / "looked at", policy, samples_every=3, evaluate_every=2)
    assert [sample["step"] for sample in support.files.read_lines(tmp_path / "looked at/samples.jsonl")] == [3] * 8
    held_out = {(line["step"], line["update"]): name for line in lines for name in line if name == "held_out_pass@8"}
    assert list(held_out) == [(2, 3), (4, 3)]
    assert [{name: x for name, x in line.items() if "held_out" not in name} for line in lines] == plain
    final = json.loads((tmp_path / "looked at/final.json").read_text())
    assert {name: pytest.approx(x, rel=1e-5) for name, x in final.items()} == {
        name.removeprefix("held_out_"): x for name, x in lines[-1].items() if "held_out" in name
    }
    timings = support.files.read_lines(tmp_path / "looked at/timings.jsonl")
    assert [timing["step"] for timing in timings if "evaluation_s" in timing] == [2, 4]


def test_what_is_not_trained_is_evaluated_too(tmp_path, policy):
    lines = go(tmp_path, policy, grade=lambda response, answer: False, steps=2, evaluate_every=1)
    assert [(line["update"], line["held_out_greedy"]) for line in lines] == [(0, 0.0)] * 2


def test_rewards_between_0_and_1_train_and_count_as_right_in_pass_at_k(tmp_path, policy):
    lines = go(tmp_path, policy, grade=lambda response, answer: even_length(response, answer) / 3, steps=2, method="grpo@1")
    assert all(0 < line["reward"] <= 1 / 3 + 1e-6 and line["length_correct"] > 0 for line in lines)
    final = json.loads((tmp_path / "final.json").read_text())
    assert 0 < final["mean@16"] < 1 / 3 and final["pass@8"] > final["mean@16"]


# ---------------------------------------------------------------- the picture
def test_the_picture_shows_held_out_accuracy_on_the_way_from_the_start_to_a_peak_and_down(tmp_path, monkeypatch):
    """Kills: curves at the wrong steps, a panel that hides the peak, a start of another warm start."""
    accuracies = {0: [0.5, 0.9, 0.1], 1: [0.7, 0.7, 0.3]}
    for start, values in accuracies.items():
        folder = tmp_path / f"bapo@1-start{start}-seed0"
        folder.mkdir()
        (tmp_path / f"start{start}.json").write_text(json.dumps({"mean@16": 0.2 + 0.2 * start}))
        config = {"arm": "bapo@1", "seed": 0, "warm_start": start, "steps": 6}
        support.files.write_json(folder / "config.json", {"config": config, "versions": {}})
        lines = [{"step": step, "update": 1, "reward": 0.5, "low": 0.8, "high": 1.2} for step in range(1, 7)]
        for line, value in zip(lines[1::2], values):
            line |= {"held_out_greedy": 0.0, "held_out_mean@16": value}
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    kept, close = [], plot.plt.close
    monkeypatch.setattr(plot.plt, "close", kept.append)
    plot.report(tmp_path)
    axis = kept[0].axes[4]
    assert axis.get_title(loc="left") == "held-out mean@16"
    assert axis.lines[0].get_xydata().flatten().tolist() == pytest.approx([0, 0.3, 2, 0.6, 4, 0.8, 6, 0.2])
    close(kept[0])


# ---------------------------------------------------------------- sending it elsewhere
class Board:
    """What trackio and W&B have in common, and TensorBoard's writer; keeps what it is sent."""

    def __init__(self, *folder):
        Board.sent = self.sent = []

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


@pytest.mark.parametrize("package", ["trackio", "wandb", "torch.utils.tensorboard"])
@pytest.mark.parametrize("installed", [False, True])
def test_the_lines_of_the_page_send_all_metrics(package, installed, tmp_path, monkeypatch):
    """Kills: a null that a board refuses, a line that is left out. With the package itself where it is installed."""
    page = (Path(__file__).parent.parent / "docs/own_model.md").read_text()
    blocks = [textwrap.dedent(block) for block in re.findall(r"\n\n((?:    .*\n)+)", page) if "metrics.jsonl" in block]
    (code,) = [block for block in blocks if ("tensorboard" in block) == ("tensorboard" in package)]
    assert len(blocks) == 2 and len(code.splitlines()) <= 6
    lines = [{"step": 1, "update": 0, "reward": 0.0, "length_correct": None}, {"step": 2, "update": 1, "loss": -0.5}]
    folder = tmp_path / "runs/gsm8k/bapo@8-seed0"
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    if installed:
        pytest.importorskip(package.replace("torch.utils.", ""))
    else:
        board = Board()
        monkeypatch.setitem(sys.modules, package, SimpleNamespace(SummaryWriter=Board) if "tensorboard" in package else board)
    exec(code.replace("trackio", package), {})
    if installed:
        assert len(list(tmp_path.rglob("*"))) > 4  # what the package keeps
    elif "tensorboard" in package:
        assert Board.sent == [(name, update) for update, line in enumerate(lines) for name in line]
    else:
        assert board.sent == ["bapo@8-seed0", {"step": 1, "update": 0, "reward": 0.0}, lines[1], "the end"]
