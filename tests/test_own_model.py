"""train.py --model --data, from the command line.

The model is a Qwen2 with a chat template, saved locally, the data a JSONL of problems.
"""

import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import huggingface_hub
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

import eval_aime
import train
from bapo import ClipSearch
from support import data as data_module
from support.files import read_lines
from support.options import parse
from support.run_folder import read_metrics

ROOT = Path(__file__).parent.parent
CHAT = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}<assistant>"
OPTIONS = [
    "--methods=bapo@2",
    "--rho0=0.9",  # more than there is: the search raises both bounds as far as it may
    "--steps=10",
    "--prompts_per_step=4",
    "--group_size=4",
    "--held_out=3",
    "--max_new_tokens=8",
    "--learning_rate=1e-3",
    "--micro_batch_tokens=200",
    "--precision=bfloat16",
    "--gradient_checkpointing",
    "--checkpoint_every=2",
    "--device=cpu",
]
ARM = "bapo@2-seed0"  # the folder of the run


def character_tokenizer() -> PreTrainedTokenizerFast:
    """A character per token but for "####", without a pad token."""
    words = ["<eos>", "<unk>", "<user>", "<assistant>", "####", *"0123456789+=# \n"]
    vocabulary = {word: index for index, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<eos>", unk_token="<unk>", chat_template=CHAT
    )
    tokenizer.add_special_tokens({"additional_special_tokens": ["<user>", "<assistant>"]})
    tokenizer.add_tokens(["####"])
    return tokenizer


@pytest.fixture(scope="session")
def model(tmp_path_factory) -> str:
    """Folder of a Qwen2 with tied embeddings that answers any question by "####" and a digit.

    The digit is 0, 1 or 2, each as likely, and now and then there are more. That is written into
    the weights: what a trained model says would depend on how a CPU rounds.
    """
    folder = tmp_path_factory.mktemp("own") / "model"
    tokenizer = character_tokenizer()
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=20,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        eos_token_id=0,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    model = Qwen2ForCausalLM(config)
    start, eos, marker = tokenizer.convert_tokens_to_ids(["<assistant>", "<eos>", "####"])
    digits = tokenizer.convert_tokens_to_ids(["0", "1", "2"])
    # follows[i, j]: how much token j is wanted after token i
    follows = torch.zeros(32, 32)
    follows[start, marker] = 1.0
    follows[marker, digits] = 1.0
    follows[digits, eos] = 1.0
    for digit in digits:
        follows[digit, digits] = 0.7
    identity = torch.eye(32)
    last_mlp = model.model.layers[-1].mlp
    with torch.no_grad():
        # A token's state is its own unit vector until the last layer writes what follows it.
        model.model.embed_tokens.weight.copy_(identity[:20])
        last_mlp.gate_proj.weight.copy_(identity)
        last_mlp.up_proj.weight.copy_(identity)
        last_mlp.down_proj.weight.copy_(follows.T)
        model.model.norm.weight.fill_(3.0)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def data(tmp_path_factory) -> str:
    """GSM8K's schema, prompts of several lengths, and rows that must be left out."""
    rows = []
    for i in range(20):
        question = f"{'0+' * (i % 4)}{i}+{i % 2}="
        rows.append({"question": question, "answer": f"a sum\n#### {(i + i % 2) % 3}"})
    rows.append({"question": "", "answer": "#### 1"})
    rows.append({"question": "1+1=?", "answer": ["1", "2"]})
    # With the template 58 tokens: of the model's 64 positions, 56 are left for a prompt.
    rows.append({"question": "0" * 56, "answer": "0"})
    return write(tmp_path_factory.mktemp("data") / "sums.jsonl", rows)


def write(path: Path, rows: list[dict]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def words(model: str, data: str, folder, *more: str) -> list[str]:
    """A command line of train.py; later words win."""
    where = ["--model", model, "--data", data, "--output_dir", str(folder), "--instruction", ""]
    return [*OPTIONS, *where, *more]


def options_of(model: str, data: str, *more: str) -> train.Options:
    return train.Options(**parse(train.Options, words(model, data, "runs", *more), ""))


@pytest.fixture
def rewards(tmp_path) -> str:
    """A file that grades by itself: half a reward for a response that is nearly right."""
    path = tmp_path / "my_rewards.py"
    path.write_text(
        "def grade(response, answer):\n"
        "    return (response == '####' + answer) / 2 + (answer in response) / 2\n"
    )
    return str(path)


# ---------------------------------------------------------------- whole runs
def kill_when_it_has_lines(command: list[str], path: Path, lines: int) -> None:
    """Start train.py in processes of its own, and kill them when `path` has that many lines."""

    def has_lines() -> bool:
        return path.exists() and path.read_bytes().count(b"\n") >= lines

    process = subprocess.Popen(
        [sys.executable, "train.py", *command],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        while process.poll() is None and not has_lines():
            time.sleep(0.005)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert has_lines()


def test_a_model_trains_in_full_and_is_evaluated(model, data, rewards, tmp_path, here, capsys):
    """How a run of all weights resumes after a kill is tested in test_commands."""
    whole = tmp_path / "whole"
    command = words(model, data, whole, "--evaluate_every", "5")
    assert train.main(command) == 0
    check_what_was_said(capsys.readouterr().out, own=False)
    check_metrics(whole, own=False)
    evaluate(whole / ARM / "model", data, tmp_path / "evaluation")
    assert "| sums | 21 | " in capsys.readouterr().out  # the long prompt is no trouble here
    check_that_changes_are_refused(model, data, rewards, command, own=False)


def test_adapters_and_an_own_reward_train_are_killed_resume_exactly_and_are_evaluated(
    model, data, rewards, tmp_path, here, capsys
):
    """The same files and weights as without a kill.

    Kills: samples or evaluations that a continued run has twice, not at all or of another policy; a
    checkpoint without the adapters, their optimizer or their base; a reward that other processes
    cannot load.
    """
    pytest.importorskip("peft")
    more = ["--evaluate_every", "5", "--lora_rank", "4", "--learning_rate", "3e-3"]
    more += ["--reward", f"{rewards}:grade"]
    whole = tmp_path / "whole"
    assert train.main(words(model, data, whole, *more)) == 0
    check_what_was_said(capsys.readouterr().out, own=True)
    check_metrics(whole, own=True)

    killed = tmp_path / "killed"
    command = words(model, data, killed, *more)
    kill_when_it_has_lines(command, killed / ARM / "metrics.jsonl", 12)
    assert not (killed / ARM / "final.json").exists()
    assert train.main([*command, "--resume"]) == 0
    for name in ("metrics.jsonl", "samples.jsonl", "final.json"):
        assert (killed / ARM / name).read_bytes() == (whole / ARM / name).read_bytes(), name
    assert (killed / "start.json").read_bytes() == (whole / "start.json").read_bytes()
    expected = AutoModelForCausalLM.from_pretrained(whole / ARM / "model").state_dict()
    resumed = AutoModelForCausalLM.from_pretrained(killed / ARM / "model").state_dict()
    assert expected.keys() == resumed.keys()
    assert all(torch.equal(resumed[name], expected[name]) for name in expected)

    capsys.readouterr()
    evaluate(whole / ARM / "model", data, tmp_path / "evaluation")
    assert "| sums | 21 | " in capsys.readouterr().out
    check_that_changes_are_refused(model, data, rewards, command, own=True)


def check_what_was_said(printed: str, own: bool) -> None:
    if own:  # a grader of one's own may read a list of answers
        assert "23 rows, 21 used, 2 left out" in printed
        assert "with an answer that is a list" not in printed
    else:
        assert "23 rows, 20 used, 3 left out" in printed
        assert "1 with an answer that is a list" in printed
    assert "1 without a prompt" in printed
    assert "1 with a prompt of more than 56 tokens" in printed
    assert "| bapo@2 | 1 |" in printed


def check_metrics(output: Path, own: bool) -> None:
    lines = read_metrics(output / ARM / "metrics.jsonl")
    assert len({line["step"] for line in lines}) == 10
    assert any(0 < line["reward"] < 1 for line in lines)
    trained = [line for line in lines if line["update"]]
    assert trained
    for line in trained:
        assert line["low"] == pytest.approx(ClipSearch.low_max)
        assert line["high"] == pytest.approx(ClipSearch.high_max)
    assert all(0 <= line["sampler_gap"] < 0.1 for line in lines)

    start = json.loads((output / "start.json").read_text())
    final = json.loads((output / ARM / "final.json").read_text())
    assert start.keys() == final.keys() == {"greedy", "mean@4", "pass@4"}
    evaluated = [line for line in lines if "held_out_greedy" in line]
    assert [line["step"] for line in evaluated] == [5, 10]
    for name, value in final.items():
        assert evaluated[-1][f"held_out_{name}"] == pytest.approx(value, rel=1e-5)

    samples = read_lines(output / ARM / "samples.jsonl")
    assert [sample["step"] for sample in samples] == [1] * 8 + [10] * 8  # 2 prompts x 4
    rewards = {sample["reward"] for sample in samples}
    assert rewards <= ({0, 0.5, 1} if own else {0, 1})


def evaluate(model: Path, data: str, output: Path) -> None:
    command = ["--model", str(model), "--data", data, "--grader", "math", "--instruction", ""]
    command += ["--samples", "2", "--max_new_tokens", "6", "--device", "cpu"]
    assert eval_aime.main([*command, "--output_dir", str(output)]) == 0


def check_that_changes_are_refused(
    model: str, data: str, rewards: str, command: list[str], own: bool
) -> None:
    """Of the data, and of the file of a reward."""
    changed = Path(data).with_name("other.jsonl")
    changed.write_text(Path(data).read_text().replace("9+1=", "9+2="))
    with pytest.raises(ValueError, match="was made in another setting .*problems: "):
        train.main([*command, "--data", str(changed), "--resume"])
    if own:
        with open(rewards, "a") as file:
            file.write("# another function, perhaps\n")
        with pytest.raises(ValueError, match="was made in another setting .*reward_source: "):
            train.main([*command, "--resume"])


# ---------------------------------------------------------------- the task
def test_answers_of_any_length_and_kind_are_for_a_reward_of_ones_own_to_judge(
    model, rewards, tmp_path, monkeypatch
):
    """Kills: math-verify asked for, answers of more than 200 characters left out."""
    monkeypatch.setitem(sys.modules, "math_verify", None)
    rows = [{"problem": f"{i}=", "answer": rf"\sqrt{i}" * 99} for i in range(9)]
    path = write(tmp_path / "programs.jsonl", rows)
    task = train.load_task(options_of(model, path, "--reward", f"{rewards}:grade"))
    assert len(task.train) + len(task.held_out) == 9
    answer = task.train[0].answer
    assert task.grade(f"a {answer}", answer) == 0.5


@pytest.mark.parametrize(
    "more, message",
    [
        (["--held_out", "17"], "20 problems are too few to hold out 17 and train on 4 a step"),
        (["--fields", "text", "answer"], "no row has a field text.*question, answer"),
        (["--max_new_tokens", "64"], "64 .* leaves no room for a prompt in the 64 positions"),
        (["--max_new_tokens", "60", "--partial_budget", "5"], "the 64 positions"),
        (["--model", "no-such-folder/model"], "cannot load 'no-such-folder/model'"),
        (["--data", "no-such.jsonl"], "no-such.jsonl"),
        (["--data", ""], "model and data go together"),
        (["--precision", "float16"], "precision must be"),
        (["--micro_batch_tokens", "0"], "micro_batch_tokens must be at least 1"),
    ],
)
def test_what_does_not_fit_is_refused_before_any_work(
    model, data, tmp_path, monkeypatch, more, message
):
    # Without this it tries to reach the hub for half a minute.
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(train, "run_side_by_side", None)
    with pytest.raises(ValueError, match=message):
        train.main(words(model, data, tmp_path, *more))
    assert not list(tmp_path.iterdir())


def test_longer_prompts_than_the_model_has_positions_for_are_left_out_and_the_limit_is_said(
    model, data, capsys
):
    task = train.load_task(options_of(model, data, "--max_new_tokens", "54"))
    printed = capsys.readouterr().out
    assert f"prompts may have 10 tokens: {model} has 64 positions" in printed
    lengths = [len(problem.prompt) for problem in task.train + task.held_out]
    assert max(lengths) == 10
    assert f"{23 - len(lengths)} left out" in printed


def test_the_limit_of_prompts_is_not_raised_by_a_model_with_room(model, data, monkeypatch, capsys):
    monkeypatch.setattr(data_module, "MAX_PROMPT_TOKENS", 9)
    task = train.load_task(options_of(model, data))
    assert max(len(problem.prompt) for problem in task.train + task.held_out) == 9
    assert "positions" not in capsys.readouterr().out


def test_nobody_needs_to_read_what_is_said_of_the_data(model, data, monkeypatch):
    """Kills: print, which fails where the reader has gone (`| head -c 100`)."""

    class Closed(io.StringIO):
        def write(self, text):
            raise BrokenPipeError

    monkeypatch.setattr(sys, "stdout", Closed())
    assert len(train.load_task(options_of(model, data)).train) == 17


def test_latex_answers_without_the_library_are_refused_before_any_work(
    model, tmp_path, monkeypatch
):
    monkeypatch.setitem(sys.modules, "math_verify", None)
    rows = [{"problem": f"{i}=", "answer": rf"{i}\sqrt{{2}}"} for i in range(9)]
    path = write(tmp_path / "latex.jsonl", rows)
    with pytest.raises(ValueError, match="pip install math-verify"):
        train.main(words(model, path, tmp_path / "runs"))


def test_a_model_without_eos_and_a_tokenizer_of_another_model_fail_early_and_by_name(
    model, data, tmp_path
):
    folder = tmp_path / "model"
    shutil.copytree(model, folder)
    for name in ("tokenizer_config.json", "config.json", "generation_config.json"):
        saved = json.loads((folder / name).read_text())
        kept = {key: value for key, value in saved.items() if "eos" not in key}
        (folder / name).write_text(json.dumps(kept))
    with pytest.raises(ValueError, match="tokenizer and model name no EOS token"):
        train.main(words(str(folder), data, tmp_path / "runs"))
    small = AutoModelForCausalLM.from_pretrained(model)
    small.resize_token_embeddings(10)
    small.save_pretrained(folder)
    with pytest.raises(ValueError, match="writes token 1[0-9], but .* has 10"):
        train.main(words(str(folder), data, tmp_path / "runs"))


def test_held_out_problems_are_not_trained_on_and_the_split_is_always_the_same(model, data):
    task = train.load_task(options_of(model, data))
    again = train.load_task(options_of(model, data))
    assert task == again
    trained = {tuple(problem.prompt) for problem in task.train}
    held_out = {tuple(problem.prompt) for problem in task.held_out}
    assert len(trained) == 17
    assert len(held_out) == 3
    assert not trained & held_out


def test_the_split_and_its_configuration_are_asked_for_by_name(model, data, monkeypatch):
    rows = read_lines(Path(data))
    asked = []

    def load_rows(*names):
        asked.append(names)
        return rows

    monkeypatch.setattr(data_module, "load_rows", load_rows)
    for source in ("owner/name", "owner/name:test", "owner/name:main/test"):
        train.load_task(options_of(model, source))
    assert asked == [
        ("owner/name", "train"),
        ("owner/name", "test"),
        ("owner/name", "main/test"),
    ]
