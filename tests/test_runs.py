"""Runs that are killed, continued, made longer, refused and damaged: what runs.py is for.

Killed at any moment and continued, a run equals one that was never killed, byte for byte, but for
timings.jsonl.
"""

import logging
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
import warnings
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import countdown
import runs
import train

ROOT = Path(__file__).parent.parent
FOLDER = "bapo@3-seed0"
WRITING = {"open", "os.rename", "os.remove", "os.mkdir", "os.rmdir"}
SMALL = {"prompts_per_step": 3, "max_new_tokens": 6}


def results(output: Path | str) -> dict[str, bytes]:
    """The files of an output folder, but for what tells how it was made."""
    files = {}
    for path in sorted(Path(output).rglob("*")):
        if path.is_file() and path.name not in ("timings.jsonl", "config.json", ".lock"):
            files[str(path.relative_to(output))] = path.read_bytes()
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
    """Copies of a folder, one for every state that a kill could leave: an audit hook of Python.

    It is called before files are opened, moved and removed.
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
def test_a_run_that_was_killed_at_any_moment_ends_as_if_it_had_not_been(
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


def children(process: int) -> list[int]:
    """The processes that multiprocessing has spawned for a process."""
    found = []
    for folder in Path("/proc").iterdir():
        try:
            command = (folder / "cmdline").read_text()
            parent = (folder / "stat").read_text().rpartition(")")[2].split()[1]
        except OSError:  # no process, or one that has ended
            continue
        if int(parent) == process and "spawn_main" in command:
            found.append(int(folder.name))
    return found


def sizes(output: str) -> list[int]:
    """How much has been logged."""
    return [path.stat().st_size for path in sorted(Path(output).glob("*/metrics.jsonl"))]


def test_the_real_command_goes_on_where_it_and_a_worker_were_killed(policy, own_task):
    """At random moments, as a user starts it: its own data and reward, and two processes."""
    words = [*own_task, "--model", policy, "--methods", "grpo@1", "bapo@2", "--steps", "16"]
    words += ["--prompts_per_step", "4", "--group_size", "4"]
    words += ["--learning_rate", "1e-3", "--checkpoint_every", "2"]
    assert train.main([*words, "--jobs", "1", "--output_dir", "whole"]) == 0

    words += ["--output_dir", "killed"]
    for victim in ("worker", "parent"):
        before = sizes("killed")
        command = [sys.executable, ROOT / "train.py", *words, "--jobs", "2"]
        process = subprocess.Popen(command)
        while process.poll() is None and sizes("killed") == before:
            time.sleep(0.01)
        time.sleep(random.uniform(0, 0.5))
        workers = children(process.pid)
        for killed in workers[:1] if victim == "worker" else [process.pid]:
            os.kill(killed, signal.SIGKILL)
        process.wait(timeout=300)
        assert process.returncode
        until = time.monotonic() + 30
        while any(Path(f"/proc/{worker}/exe").exists() for worker in workers):
            assert time.monotonic() < until, "a worker has outlived its parent"
            time.sleep(0.1)
        words += [] if "--resume" in words else ["--resume"]
    assert train.main([*words, "--jobs", "1"]) == 0
    check_equal("killed", "whole")
    Path("own.py").write_text("def odd(response, answer):\n    return 0\n")
    with pytest.raises(ValueError, match="reward_file"):
        train.main([*words, "--jobs", "1"])


def test_more_steps_make_a_run_as_long_as_one_that_was_never_shorter(train_here):
    train_here(steps=3, output_dir="whole", **SMALL)
    train_here(steps=2, checkpoint_every=5, **SMALL)
    assert Path("runs", FOLDER, "checkpoint-2").exists()
    lines = train_here(steps=3, resume=True, **SMALL)
    assert {line["step"] for line in lines} == {1, 2, 3}
    check_equal("runs", "whole")


# ---------------------------------------------------------------- what is refused
def test_other_options_are_refused_by_their_names_and_some_may_differ(train_here, refusal):
    options = SMALL | {"steps": 2}
    train_here(**options)
    before = results("runs")
    assert "--resume" in refusal(**options)
    others = {"temperature": 0.9, "rho0": 0.3, "lora_rank": 2, "max_new_tokens": 5, "steps": 1}
    others |= {"learning_rate": 1.0, "attempts": 3, "low": [0.7, 0.9, 0.1], "partial_budget": 2}
    for name, value in others.items():
        assert f"{name}: " in refusal(resume=True, **(options | {name: value}))
    config = runs.read_json(Path("runs/config.json"))
    runs.write_json(Path("runs/config.json"), config | {"unknown": 1})
    assert "unknown: " in refusal(resume=True, **options)
    runs.write_json(Path("runs/config.json"), config)
    assert results("runs") == before
    may_differ = {"micro_batch_tokens": 99, "gradient_checkpointing": True}
    may_differ |= {"checkpoint_every": 9, "evaluate_every": 1}
    train_here(resume=True, **(options | may_differ))
    assert results("runs") == before


def test_other_problems_are_refused(train_here, refusal, monkeypatch):
    """Those that are held out count, too."""
    train_here(steps=1, **SMALL)
    to_train_on, held_out = countdown.problems()
    for others in ((to_train_on[1:], held_out), (to_train_on, held_out[1:])):
        monkeypatch.setattr(countdown, "problems", lambda others=others: others)
        assert "problems: " in refusal(steps=1, resume=True, **SMALL)


def test_a_folder_in_which_another_command_is_at_work_is_refused(train_here, refusal, monkeypatch):
    """Kills: two that start together, and leave the runs of one under the options of the other."""
    reading, writing = os.pipe()

    def wait_forever(response: str, answer: str) -> bool:
        os.write(writing, b"begun")
        time.sleep(1000)

    with monkeypatch.context() as patch:
        patch.setattr(countdown, "grade", wait_forever)
        first = get_context("fork").Process(target=train_here, kwargs={"steps": 1})
        first.start()
        os.read(reading, 5)
    config = Path("runs/config.json").read_bytes()
    assert "runs" in refusal(steps=50, resume=True)
    assert Path("runs/config.json").read_bytes() == config
    first.kill()
    first.join()
    train_here(steps=1, resume=True)  # its lock has died with it


def test_a_device_that_is_not_there_is_refused(monkeypatch):
    """Kills: cuda:7 with two devices, found out after the supervised start."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for device in ("cpu", "cuda", "cuda:1"):
        train.Options(device=device)
    for device in ("cuda:2", "cuda:x", "cudas", ""):
        with pytest.raises(ValueError, match="device .* cpu, cuda, cuda:0, cuda:1; got"):
            train.Options(device=device)


def test_a_reward_that_ends_the_process_fails_the_run(refusal, monkeypatch):
    monkeypatch.setattr(countdown, "grade", lambda response, answer: sys.exit(0))
    refusal(steps=1)
    assert not Path("runs", FOLDER, "final.json").exists()


# ---------------------------------------------------------------- what lies in the folders
def test_what_a_user_puts_into_the_folders_stays_and_harms_nothing(train_here, policy):
    shutil.copytree(policy, "runs/minimal-start")
    train_here(steps=2, **SMALL)
    run = Path("runs", FOLDER)
    own = ["checkpoint-1-keep", "checkpoint-2-backup", "checkpoint-x"]
    for name in own:
        shutil.copytree(run / "checkpoint-2", run / name)
    train_here(steps=3, resume=True, **SMALL)
    assert {path.name for path in run.glob("checkpoint-*")} == {*own, "checkpoint-3"}
    train_here(steps=3, output_dir="whole", **SMALL)
    for path in [*(run / name for name in own), Path("runs/minimal-start")]:
        shutil.rmtree(path)
    check_equal("runs", "whole")


LINE = b'{"step": 1, "update": 1}\n'
DAMAGES = {
    "config.json": [b"", b"[]", b"null", b'{"steps": 2'],
    f"{FOLDER}/final.json": [b"", b"3", b'{"steps": 2'],
    f"{FOLDER}/metrics.jsonl": [b"[1]\n", b"{}\n", LINE + b'{"step": \n' + LINE, b"\0\0\n"],
    f"{FOLDER}/samples.jsonl": [b'{"step": null}\n', b"3\n", LINE[:9] + b"\n" + LINE],
    f"{FOLDER}/checkpoint-2/state.pt": [None, b"", b"junk" * 9, b"PK\3\4", "cut"],
    f"{FOLDER}/checkpoint-2/model.safetensors": [None, b"", b"junk" * 9, "cut", "lm_head.weight"],
    f"{FOLDER}/checkpoint-2/tokenizer.json": [None, b"", "cut"],
    f"{FOLDER}/checkpoint-2/config.json": [None, b"", b"[]"],
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_file_is_named_in_a_line(train_here, refusal, name):
    """None: the file is gone; a name: without that weight."""
    train_here(steps=2, **SMALL)
    path = Path("runs", name)
    whole = path.read_bytes()
    for damage in DAMAGES[name]:
        if damage is None:
            path.unlink()
        elif damage == "cut":
            path.write_bytes(whole[: len(whole) // 2])
        elif isinstance(damage, str):
            weights = load_file(path)
            del weights[damage]
            save_file(weights, path, {"format": "pt"})
        else:
            path.write_bytes(damage)
        said = refusal(steps=3, resume=True, **SMALL)
        # Of a model's files the folder is enough.
        is_state = path.suffix in (".json", ".jsonl", ".pt") and "tokenizer" not in name
        named = path.name if is_state and "/config" not in name else path.parent.name
        assert named in said, (damage, said)
        assert "Traceback" not in said, (damage, said)
        path.write_bytes(whole)
    train_here(steps=3, resume=True, **SMALL)


def test_a_start_without_some_of_its_weights_is_refused(train_here, refusal, policy, tmp_path):
    """Kills: random weights in their place, silently."""
    train_here(steps=1, output_dir="first/runs", **SMALL)
    (start,) = Path("first/starts").glob("*/")  # beside it lies its lock
    weights = load_file(start / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, start / "model.safetensors", {"format": "pt"})
    words = ["--methods", "grpo@1", "--steps", "1", "--jobs", "1", "--warm_start_steps", "1"]
    assert train.main([*words, "--device", "cpu", "--output_dir", "first/again"]) == 1
    assert not list(Path("first/again").rglob("checkpoint-*"))


@pytest.mark.parametrize("room", [900, 4000, 100_000, 600_000])
def test_a_full_disk_is_one_line_that_names_the_file(train_here, refusal, monkeypatch, room):
    """No file may grow past `room` bytes: config.json, metrics.jsonl, weights, state.pt."""
    main = train.main
    options = SMALL | {"steps": 2}

    def within_limits(arguments: list[str]) -> int:
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, hard))
        try:
            return main(arguments)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    with monkeypatch.context() as patch:
        patch.setattr(train, "main", within_limits)
        said = refusal(**options)
    assert "runs/" in said
    assert "Traceback" not in said
    assert not list(Path("runs").rglob("*.unfinished"))
    train_here(resume=True, **options)
    train_here(output_dir="whole", **options)
    check_equal("runs", "whole")


# ---------------------------------------------------------------- files
def test_a_file_or_a_folder_is_whole_or_as_it_was(tmp_path):
    path = tmp_path / "a.json"
    runs.write_json(path, {"a": 1})

    def fail(temporary: Path) -> None:
        temporary.write_text("half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        runs.write_atomically(path, fail)
    assert runs.read_json(path) == {"a": 1}
    folder = tmp_path / "folder"
    with pytest.raises(KeyboardInterrupt):
        runs.write_atomically(folder, fail)
    assert not folder.exists()
    runs.write_atomically(folder, lambda temporary: temporary.mkdir())
    assert folder.is_dir()
    runs.write_json(path, {"a": 2})
    assert sorted(tmp_path.iterdir()) == [path, folder]


def test_lines_hold_numbers_as_json_can_and_a_last_half_line_is_left_out(tmp_path):
    path = tmp_path / "a.jsonl"
    runs.append_line(path, {"step": 1, "x": 1 / 3, "y": float("nan"), "z": float("-inf")})
    runs.append_line(path, {"step": 2, "x": 12345678})
    expected = [{"step": 1, "x": 0.333333, "y": None, "z": None}, {"step": 2, "x": 12345678}]
    assert runs.read_lines(path) == expected
    with path.open("a") as file:
        file.write('{"step": 3')
    assert runs.read_lines(path) == expected
    runs.keep_steps(path, 1)
    assert runs.read_lines(path) == expected[:1]
    assert path.read_bytes().endswith(b"}\n")


def test_older_checkpoints_go_and_what_is_none_stays(tmp_path):
    assert runs.checkpoints(tmp_path) == {}
    for name in ("checkpoint-9", "checkpoint-10", "checkpoint-11-keep"):
        (tmp_path / name).mkdir()
    runs.remove_older_checkpoints(tmp_path)
    assert runs.checkpoints(tmp_path) == {10: tmp_path / "checkpoint-10"}
    kept = {path.name for path in tmp_path.iterdir()}
    assert kept == {"checkpoint-10", "checkpoint-11-keep"}


# ---------------------------------------------------------------- processes
def test_an_interrupted_command_says_how_to_go_on(capsys):
    def interrupted() -> int:
        raise KeyboardInterrupt

    with pytest.raises(SystemExit) as ended:
        runs.command("train.py", interrupted, "go on with --resume")
    assert ended.value.code == 130
    assert "go on with --resume" in capsys.readouterr().err
    assert runs.peak_memory("cpu") > 10**8  # bytes: torch alone takes more


def test_too_little_memory_is_one_line_and_a_bug_keeps_its_traceback():
    said = {}
    for error in (torch.OutOfMemoryError("CUDA"), RuntimeError("a bug")):

        def fail(error=error) -> int:
            raise error

        with pytest.raises(SystemExit) as ended:
            runs.command("train.py", fail, "interrupted")
        said[type(error)] = ended.value.code
    assert "Traceback" not in said[torch.OutOfMemoryError]
    assert "PYTORCH_ALLOC_CONF=expandable_segments:True" in said[torch.OutOfMemoryError]
    assert "Traceback" in said[RuntimeError] and "in fail" in said[RuntimeError]


WAITING = """
import os
import sys
import time
from pathlib import Path

import runs


def wait() -> None:
    Path(str(os.getpid())).touch()
    time.sleep(1000)


if __name__ == "__main__":
    calls = {"first": (wait,), "second": (wait,)}
    runs.command("waiting.py", lambda: len(runs.run_side_by_side(calls, 2, 0)), "Interrupted.")
"""


def test_ctrl_c_ends_all_processes_with_one_line(tmp_path):
    """A terminal sends it to all of them; here to a worker first, which leaves it to its parent."""
    (tmp_path / "waiting.py").write_text(WAITING)
    process = subprocess.Popen(
        [sys.executable, "waiting.py"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        workers = []
        while process.poll() is None and len(workers) < 2:
            time.sleep(0.1)
            workers = [int(path.name) for path in tmp_path.iterdir() if path.name.isdecimal()]
        os.kill(workers[0], signal.SIGINT)
        time.sleep(1)  # so that a worker's failure would be heard of
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130
    assert "Interrupted." in said
    assert "Traceback" not in said
    assert not any(Path(f"/proc/{worker}/exe").exists() for worker in workers)


def test_libraries_do_not_break_the_bar_of_the_runs():
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        runs.parse(train.Options, [], "")
        warnings.warn("of peft", FutureWarning, stacklevel=1)
    assert not heard
    # Where "... thrown while requesting HEAD https://..." comes from.
    assert not logging.getLogger("huggingface_hub.utils._http").isEnabledFor(logging.WARNING)


def divide(number: int, folder: Path) -> None:
    (folder / str(number)).write_text(str(1 / number))


def test_what_fails_is_named_and_does_not_stop_the_rest(tmp_path, capsys):
    work = {f"piece {number}": (divide, number, tmp_path) for number in (2, 0, 4)}
    assert runs.run_side_by_side(work, 1, steps=3) == ["piece 0"]
    assert {path.name for path in tmp_path.iterdir()} == {"2", "4"}
    assert "piece 0: division by zero" in capsys.readouterr().err
