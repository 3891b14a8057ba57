"""--resume: resumed runs equal uninterrupted ones, and changed options are refused.

Results are compared byte for byte; only config.json and the seconds in metrics.jsonl may differ.
"""

import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from conftest import without_seconds, write_lines
from filelock import FileLock

import train
from support import runs

ROOT = Path(__file__).parent.parent
FOLDER = Path("runs/bapo@3-seed0")
SMALL = {"prompts_per_step": 3, "max_new_tokens": 6}
# peft writes a set into adapter_config.json, in any order.
LEFT_OUT = ("config.json", "adapter_config.json", ".lock", "curves.png")
# A reward that kills the command from one of its workers, in the third step. The worker then waits.
OWN = """
import multiprocessing, os, pathlib, time

def odd(response, answer):
    parent = multiprocessing.parent_process()
    if parent and list(pathlib.Path("killed").glob("*/checkpoint-2")):
        os.kill(parent.pid, 9)
        time.sleep(999)
    return len(response) % 2
"""


def results(output: str) -> dict:
    """The files of an output folder, without those that tell how it was made."""
    files = {}
    for path in Path(output).rglob("*"):
        if path.name == "metrics.jsonl":
            files[path.relative_to(output)] = without_seconds(path)
        elif path.is_file() and path.name not in LEFT_OUT:
            files[path.relative_to(output)] = path.read_bytes()
    return files


# ---------------------------------------------------------------- killed and continued
def test_a_run_that_was_ended_equals_an_uninterrupted_one(train_here, monkeypatch, capsys):
    """By SIGTERM in the third step's log, after a checkpoint of the second; a line is cut.

    With LoRA and partial rollouts, where a response of six tokens takes two steps.
    """
    pytest.importorskip("peft")
    options = SMALL | {"steps": 4, "checkpoint_every": 2, "partial_budget": 3, "lora_rank": 2}
    first, *_, last = train_here(output_dir="whole", **options)
    assert first["update"] == 0
    assert "step 1 of 4: no group is finished" in capsys.readouterr().out
    assert last["update"] and 0 < last["token_age"] < 1
    append_line = runs.append_line

    def append_until_step_3(path: Path, record: dict) -> None:
        append_line(path, record)
        if record["step"] == 3:
            with path.open("a") as file:
                file.write('{"step": 3, "upd')
            signal.raise_signal(signal.SIGTERM)

    with monkeypatch.context() as patch, pytest.raises(SystemExit) as ended:
        patch.setattr(runs, "append_line", append_until_step_3)
        runs.command("train.py", partial(train_here, **options), "Interrupted")
    assert ended.value.code == "\nInterrupted"
    assert list(runs.checkpoints(FOLDER)) == [2]
    train_here(resume=True, **options)
    assert results("runs") == results("whole")


def test_a_command_whose_process_was_killed_continues_and_its_workers_have_ended(
    tmp_path, policy, monkeypatch
):
    """It has two workers, and the user's own model, data and reward; nothing is held out."""
    pytest.importorskip("datasets")
    monkeypatch.chdir(tmp_path)
    rows = [{"prompt": f"{number}+1=", "answer": str(number + 1)} for number in range(10, 40)]
    write_lines(Path("data.jsonl"), rows)
    Path("own.py").write_text(OWN)
    words = (
        f"--model {policy} --data data.jsonl --reward own.py:odd --held_out 0 --device cpu"
        " --methods grpo@1 bapo@2 --steps 6 --checkpoint_every 2 --keep_checkpoints"
        " --prompts_per_step 4 --group_size 4 --max_new_tokens 12 --learning_rate 1e-3"
        " --output_dir"
    ).split()
    assert train.main([*words, "whole", "--jobs", "1"]) == 0
    assert set(runs.checkpoints(Path("whole/grpo@1-seed0"))) == {2, 4, 6}
    assert Path("whole/curves.png").exists()

    command = [sys.executable, ROOT / "train.py", *words, "killed", "--jobs", "2"]
    # This waits for the workers, too, because they write into the same pipe.
    ended = subprocess.run(command, stdout=subprocess.PIPE, timeout=300)
    assert ended.returncode == -signal.SIGKILL
    assert train.main([*words, "killed", "--jobs", "1", "--resume"]) == 0
    assert results("killed") == results("whole")


def test_more_steps_make_a_run_as_long_as_one_that_was_never_shorter(
    train_here, refusal, monkeypatch
):
    """The accuracy of fewer steps goes when training continues."""
    train_here(steps=3, output_dir="whole", **SMALL)
    options = SMALL | {"steps": 2, "checkpoint_every": 5}
    train_here(**options)
    assert "--resume" in refusal(**options)
    assert "rho0 was" in refusal(**options, resume=True, rho0=0.3)
    assert "already has 2" in refusal(**SMALL, resume=True, steps=1)
    with monkeypatch.context() as patch:
        patch.setattr(train, "generate", None)
        refusal(steps=3, resume=True, **SMALL)
    assert not (FOLDER / "final.json").exists()
    train_here(steps=3, resume=True, **SMALL)
    assert results("runs") == results("whole")


# ---------------------------------------------------------------- what is refused


def test_a_folder_in_which_another_command_is_at_work_is_refused(refusal):
    with FileLock("runs/.lock"):
        assert "runs/.lock" in refusal()
    assert not Path("runs/config.json").exists()


def test_a_run_continues_from_its_newest_checkpoint_and_keeps_a_copy(train_here, refusal):
    """In the order of their names as text, 10 would come before 9. A kill may leave a part of 9."""
    train_here(steps=1)
    (FOLDER / "checkpoint-1").rename(FOLDER / "checkpoint-10")
    (FOLDER / "checkpoint-9").mkdir()
    (FOLDER / "checkpoint-9-keep").mkdir()
    assert train_here(steps=11, resume=True)[-1]["step"] == 11
    assert {path.name for path in FOLDER.glob("*check*")} == {"checkpoint-11", "checkpoint-9-keep"}
    os.truncate(FOLDER / "checkpoint-11/state.pt", 99)
    assert "checkpoint-11 is damaged. Remove it" in refusal(steps=12, resume=True)
