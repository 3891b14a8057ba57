"""--resume: resumed runs equal uninterrupted ones, changed options and damaged files are refused.

Results are compared byte for byte; only config.json and the seconds in metrics.jsonl may differ.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import edit_json, without_seconds, write_lines

import train
from support import checkpoints, files, processes

ROOT = Path(__file__).parent.parent
FOLDER = "bapo@3-seed0"
WRITING = {"open", "os.rename", "os.remove", "os.mkdir", "os.rmdir"}
SMALL = {"prompts_per_step": 3, "max_new_tokens": 6}
# peft writes a set into adapter_config.json, in any order.
LEFT_OUT = ("config.json", "adapter_config.json", ".lock")


def results(output: Path | str) -> dict:
    """The files of an output folder, without those that tell how it was made."""
    files = {}
    for path in sorted(Path(output).rglob("*")):
        if path.is_file() and path.name not in LEFT_OUT:
            content = path.read_bytes()
            if path.name == "metrics.jsonl":
                content = without_seconds(path)
            files[str(path.relative_to(output))] = content
    return files


def check_equal(output: Path | str, whole: Path | str) -> None:
    """The same files, with the same content."""
    found = results(output)
    expected = results(whole)
    assert found.keys() == expected.keys()
    for name, content in expected.items():
        assert found[name] == content, f"{output}/{name}"


# ---------------------------------------------------------------- killed and continued
class Moments(list):
    """An audit hook that copies a folder in every state in which a kill could leave it.

    Python calls it before files are opened, moved and removed.
    """

    def __init__(self, folder: Path, copies: Path):
        self.folder = folder
        self.copies = copies
        self.state = {}
        self.is_watching = True

    def __call__(self, event: str, arguments: tuple) -> None:
        if not self.is_watching or event not in WRITING:
            return
        self.is_watching = False  # the copies open files, too
        state = {}
        for path in self.folder.rglob("*"):
            status = path.stat()
            state[path] = (status.st_size, status.st_mtime_ns)
        if state != self.state:
            self.state = state
            self.append(self.copies / str(len(self)))
            shutil.copytree(self.folder, self[-1])
        self.is_watching = True


@pytest.mark.parametrize(
    "options, every", [({}, 2), ({"partial_budget": 3, "lora_rank": 2, "steps": 4}, 8)]
)
def test_a_run_that_was_killed_at_any_moment_equals_an_uninterrupted_one(
    train_here, tmp_path, options, every
):
    if "lora_rank" in options:
        pytest.importorskip("peft")
    options = SMALL | {"steps": 2} | options
    output = tmp_path / "runs"
    output.mkdir()
    moments = Moments(output, tmp_path / "moments")
    sys.addaudithook(moments)
    lines = train_here(**options)
    moments.is_watching = False
    assert any(line["update"] for line in lines)
    assert len(moments) > 30
    whole = output.rename(tmp_path / "whole")
    for killed in moments[::every]:
        killed.rename(output)
        folder = output / FOLDER
        if not (folder / "final.json").exists():
            for path in folder.glob("*.jsonl"):  # killed within a line
                path.write_bytes(path.read_bytes() + b'{"step": 1, "upd')
        train_here(resume=True, **options)
        check_equal(output, whole)
        shutil.rmtree(output)


# It leaves a file named after the process that has called it.
OWN_REWARD = """
import os

def odd(response, answer):
    open(f"process-{os.getpid()}", "w").close()
    return len(response) % 2
"""


def test_a_command_whose_process_was_killed_continues_and_its_workers_have_ended(
    tmp_path, policy, monkeypatch
):
    """It has two workers, and the user's own model, data and reward."""
    monkeypatch.chdir(tmp_path)
    rows = [{"prompt": f"{number}+1=", "answer": str(number + 1)} for number in range(10, 40)]
    write_lines(Path("data.jsonl"), rows)
    Path("own.py").write_text(OWN_REWARD)
    words = ["--model", policy, "--data", "data.jsonl", "--reward", "own.py:odd", "--held_out", "2"]
    words += ["--methods", "grpo@1", "bapo@2", "--steps", "8", "--checkpoint_every", "2"]
    words += ["--prompts_per_step", "4", "--group_size", "4", "--max_new_tokens", "12"]
    words += ["--learning_rate", "1e-3", "--device", "cpu"]
    assert train.main([*words, "--jobs", "1", "--output_dir", "whole"]) == 0

    words += ["--output_dir", "killed"]
    process = subprocess.Popen([sys.executable, ROOT / "train.py", *words, "--jobs", "2"])
    while process.poll() is None and not list(Path("killed").glob("*/metrics.jsonl")):
        time.sleep(0.01)
    process.kill()
    process.wait()
    called = {path.name.removeprefix("process-") for path in Path().glob("process-*")}
    workers = called - {str(os.getpid()), str(process.pid)}
    assert workers
    until = time.monotonic() + 30
    while any(Path(f"/proc/{worker}/exe").exists() for worker in workers):
        assert time.monotonic() < until, "a worker has outlived its parent"
        time.sleep(0.1)
    assert train.main([*words, "--resume", "--jobs", "1"]) == 0
    check_equal("killed", "whole")


def test_more_steps_make_a_run_as_long_as_one_that_was_never_shorter(train_here):
    """Also if still more were asked for before, and Ctrl-C came before the next checkpoint."""
    train_here(steps=3, output_dir="whole", **SMALL)
    train_here(steps=2, checkpoint_every=5, **SMALL)
    assert Path("runs", FOLDER, "checkpoint-2").exists()
    edit_json(Path("runs/config.json"), steps=100_000)
    lines = train_here(steps=3, checkpoint_every=5, resume=True, **SMALL)
    assert {line["step"] for line in lines} == {1, 2, 3}
    check_equal("runs", "whole")


# ---------------------------------------------------------------- what is refused
def test_changed_options_are_refused_by_name_and_some_may_differ(train_here, refusal):
    options = SMALL | {"steps": 2}
    train_here(**options)
    before = results("runs")
    assert "--resume" in refusal(**options)
    others = {"temperature": 0.9, "rho0": 0.3, "max_new_tokens": 5}
    for name, value in others.items():
        assert f"{name} was" in refusal(resume=True, **(options | {name: value}))
    assert "steps must be at least 2, got 1" in refusal(resume=True, **(options | {"steps": 1}))
    assert results("runs") == before
    may_differ = {"micro_batch_tokens": 99, "evaluate_every": 1}
    train_here(resume=True, **(options | may_differ))
    assert results("runs") == before


def test_a_folder_in_which_another_command_is_at_work_is_refused(refusal):
    with files.lock(Path("runs/.lock")):
        assert "another process is writing" in refusal(steps=1, **SMALL)
    assert not Path("runs/config.json").exists()


@pytest.mark.parametrize("checkpoint_every, has_ended", [(5, True), (1, False)])
def test_a_run_whose_checkpoint_is_gone_is_not_begun_again(
    train_here, refusal, checkpoint_every, has_ended
):
    options = SMALL | {"checkpoint_every": checkpoint_every}
    train_here(steps=2, **options)
    run = Path("runs", FOLDER)
    shutil.rmtree(run / "checkpoint-2")
    if not has_ended:
        (run / "final.json").unlink()
    before = results("runs")
    said = refusal(steps=3, resume=True, **options)
    assert f"{FOLDER} holds the logs of 2 steps, but no checkpoint" in said
    assert results("runs") == before


def test_an_accuracy_of_fewer_steps_goes_when_training_continues(train_here, refusal, monkeypatch):
    train_here(steps=1, **SMALL)
    monkeypatch.setattr(train, "generate", lambda *_, **__: 1 / 0)  # before the next line is logged
    refusal(steps=2, resume=True, **SMALL)
    assert not Path("runs", FOLDER, "final.json").exists()


def test_damaged_files_are_named_in_one_line(train_here, refusal):
    """Those that are read first are damaged last."""
    train_here(steps=2, **SMALL)
    run = Path("runs", FOLDER)
    state = run / "checkpoint-2/state.pt"
    state.write_bytes(state.read_bytes()[:1000])
    said = refusal(steps=3, resume=True, **SMALL)
    assert "state.pt is damaged" in said and "Traceback" not in said
    metrics = run / "metrics.jsonl"
    metrics.write_text('{"step": 1, "upd\n' + metrics.read_text())
    assert "metrics.jsonl, line 1 is damaged" in refusal(steps=3, resume=True, **SMALL)
    (run / "checkpoint-2/tokenizer.json").unlink()
    said = refusal(steps=3, resume=True, **SMALL)
    assert "checkpoint-2" in said and "Traceback" not in said


# ---------------------------------------------------------------- files and processes
def test_a_run_keeps_its_newest_checkpoint_and_what_a_user_has_copied(tmp_path):
    """In the order of their names as text, 10 would come before 9."""
    for name in ("2", "9", "10", "2-keep"):
        (tmp_path / f"checkpoint-{name}").mkdir()
    checkpoints.remove_older_checkpoints(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoint-2-keep", "checkpoint-10"}


def kill_this_process() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_killed_worker_is_one_sentence(capsys):
    calls = {"first": (kill_this_process,), "second": (kill_this_process,)}
    assert sorted(processes.run_side_by_side(calls, 2, one_thread=True)) == ["first", "second"]
    said = capsys.readouterr().err
    assert said.count("A process was killed") == 1
    assert "Traceback" not in said
