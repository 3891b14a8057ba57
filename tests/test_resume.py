"""--resume: resumed runs equal uninterrupted ones, and changed options are refused.

Results are compared byte for byte; only config.json and the seconds in metrics.jsonl may differ.
"""

import shutil
import subprocess
import sys
import time
from hashlib import sha256
from pathlib import Path

import pytest
from conftest import without_seconds, write_lines

import train
from support import runs

ROOT = Path(__file__).parent.parent
FOLDER = "bapo@3-seed0"
SMALL = {"prompts_per_step": 3, "max_new_tokens": 6}
# peft writes a set into adapter_config.json, in any order.
LEFT_OUT = ("config.json", "adapter_config.json", ".lock")


def results(output: Path | str) -> dict:
    """The files of an output folder, without those that tell how it was made."""
    files = {}
    for path in sorted(Path(output).rglob("*")):
        if path.is_file() and path.name not in LEFT_OUT:
            content = sha256(path.read_bytes()).hexdigest()
            if path.name == "metrics.jsonl":
                content = without_seconds(path)
            files[str(path.relative_to(output))] = content
    return files


# ---------------------------------------------------------------- killed and continued
def test_a_step_that_finishes_no_group_leaves_a_checkpoint(train_here):
    assert train_here(**SMALL | {"steps": 1, "partial_budget": 1}) == [{"step": 1, "update": 0}]
    assert list(runs.checkpoints(Path("runs", FOLDER))) == [1]


@pytest.mark.parametrize("options", [{}, {"partial_budget": 3, "lora_rank": 2}])
def test_a_run_that_was_killed_equals_an_uninterrupted_one(train_here, monkeypatch, options):
    """In the third step's log, after a checkpoint of the second; a line of the log is cut."""
    if "lora_rank" in options:
        pytest.importorskip("peft")
    options = SMALL | {"steps": 4, "checkpoint_every": 2} | options
    lines = train_here(output_dir="whole", **options)
    assert any(line["update"] for line in lines)
    append_line = runs.append_line

    def append_until_step_3(path: Path, record: dict) -> None:
        append_line(path, record)
        if record["step"] == 3:
            with path.open("a") as file:
                file.write('{"step": 3, "upd')
            raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(runs, "append_line", append_until_step_3)
        train_here(**options)
    assert list(runs.checkpoints(Path("runs", FOLDER))) == [2]
    train_here(resume=True, **options)
    assert results("runs") == results("whole")


def test_a_command_whose_process_was_killed_continues_and_its_workers_have_ended(
    tmp_path, policy, monkeypatch
):
    """It has two workers, and the user's own model, data and reward."""
    monkeypatch.chdir(tmp_path)
    rows = [{"prompt": f"{number}+1=", "answer": str(number + 1)} for number in range(10, 40)]
    write_lines(Path("data.jsonl"), rows)
    Path("own.py").write_text("odd = lambda response, answer: len(response) % 2")
    words = ["--model", policy, "--data", "data.jsonl", "--reward", "own.py:odd", "--held_out", "2"]
    words += ["--methods", "grpo@1", "bapo@2", "--steps", "8", "--checkpoint_every", "2"]
    words += ["--prompts_per_step", "4", "--group_size", "4", "--max_new_tokens", "12"]
    words += ["--learning_rate", "1e-3", "--device", "cpu"]
    assert train.main([*words, "--jobs", "1", "--output_dir", "whole"]) == 0

    words += ["--output_dir", "killed"]
    process = subprocess.Popen([sys.executable, ROOT / "train.py", *words, "--jobs", "2"])
    while process.poll() is None and not list(Path("killed").glob("*/metrics.jsonl")):
        time.sleep(0.01)
    assert process.poll() is None
    workers = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    process.kill()
    process.wait()
    assert workers
    until = time.monotonic() + 120
    while any(Path(f"/proc/{worker}/exe").exists() for worker in workers):
        assert time.monotonic() < until, "a worker has outlived its parent"
        time.sleep(0.1)
    assert train.main([*words, "--resume", "--jobs", "1"]) == 0
    assert results("killed") == results("whole")


def test_more_steps_make_a_run_as_long_as_one_that_was_never_shorter(train_here):
    """Also if still more were asked for before, and Ctrl-C came before the next checkpoint."""
    train_here(steps=3, output_dir="whole", **SMALL)
    train_here(steps=2, checkpoint_every=5, **SMALL)
    train_here(steps=3, resume=True, **SMALL)
    assert results("runs") == results("whole")


# ---------------------------------------------------------------- what is refused
def test_changed_options_are_refused_by_name_and_some_may_differ(train_here, refusal):
    options = SMALL | {"steps": 2}
    train_here(**options)
    before = results("runs")
    assert "--resume" in refusal(**options)
    for name, value in {"temperature": 0.9, "rho0": 0.3, "max_new_tokens": 5}.items():
        assert f"{name} was" in refusal(resume=True, **(options | {name: value}))
    train_here(resume=True, **(options | {"micro_batch_tokens": 99, "evaluate_every": 1}))
    assert results("runs") == before
    assert "steps must be at least 2" in refusal(resume=True, **(options | {"steps": 1}))


def test_a_folder_in_which_another_command_is_at_work_is_refused(refusal):
    with runs.lock(Path("runs/.lock")):
        assert "another process is writing" in refusal(steps=1, **SMALL)
    assert not Path("runs/config.json").exists()


def test_an_accuracy_of_fewer_steps_goes_when_training_continues(train_here, refusal, monkeypatch):
    train_here(steps=1, **SMALL)
    monkeypatch.setattr(train, "generate", lambda *_, **__: 1 / 0)  # before the next line is logged
    refusal(steps=2, resume=True, **SMALL)
    assert not Path("runs", FOLDER, "final.json").exists()


def test_a_run_continues_from_its_newest_checkpoint_and_keeps_a_copy(train_here):
    """In the order of their names as text, 10 would come before 9. A kill may leave a part of 9."""
    options = SMALL | {"methods": "grpo@1", "group_size": 2}
    train_here(steps=10, checkpoint_every=10, **options)
    folder = Path("runs/grpo@1-seed0")
    shutil.copytree(folder / "checkpoint-10", folder / "checkpoint-9-keep")
    (folder / "checkpoint-9").mkdir()
    train_here(steps=11, checkpoint_every=11, resume=True, **options)
    assert {path.name for path in folder.glob("*check*")} == {"checkpoint-11", "checkpoint-9-keep"}
