"""Whole commands of train.py: killed, interrupted, repeated, side by side, without a reader.

Most commands are forked from a process that has imported everything (`nursery`), as an import of
torch and transformers takes seconds.
"""

import json
import multiprocessing
import os
import random
import runpy
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from conftest import table_alone
from test_run_folder import same_results
from test_train import even_length, go, make_run, make_task

import countdown
import train
from support import files, plot, run_folder, warm_starts, workers
from support.options import parse
from support.run_folder import read_metrics

ROOT = Path(__file__).parent.parent
COMMAND = [
    "--steps=2",
    "--prompts_per_step=2",
    "--group_size=4",
    "--warm_start_steps=100",
    "--attempts=1",
    "--max_new_tokens=13",
    "--device=cpu",
]
START = "attempts1-steps100-seed0"
TRAINING_PROBLEMS, HELD_OUT_PROBLEMS = countdown.problems()


def few_problems(seed: int = 0) -> tuple[list, list]:
    """The problems of the first six steps of COMMAND: learned by heart in a hundred steps."""
    return train.prompts_of_step(TRAINING_PROBLEMS, 1, 12, 0), HELD_OUT_PROBLEMS[:4]


@pytest.fixture
def few(monkeypatch):
    """A task that takes no time: for commands in this process."""
    monkeypatch.setattr(countdown, "problems", few_problems)


@pytest.fixture(scope="session")
def learned(tmp_path_factory) -> Path:
    """A warm start that now and then is right."""
    folder = tmp_path_factory.mktemp("starts") / START
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(countdown, "problems", few_problems)
        return warm_starts.warm_start(folder, attempts=1, steps=100)


@pytest.fixture
def output(tmp_path, learned) -> str:
    """An --output_dir with the warm start beside it."""
    shutil.copytree(learned, tmp_path / "warm-starts" / START)
    return str(tmp_path / "runs")


def make_runs(words: list[str], task: train.Task) -> list[train.Run]:
    """The runs of a command line."""
    options = train.Options(**parse(train.Options, words, ""))
    return train.make_runs(options, task)


# ------------------------------------------------------------------------- what shares a folder
@pytest.mark.parametrize(
    "option, value, message",
    [
        ("max_new_tokens", "7", "max_new_tokens: 13 there, 7 now"),
        ("temperature", "0.9", "temperature: 1.0 there, 0.9 now"),
        ("learning_rate", "0.5", r"learning_rate: \S+ there, 0.5 now"),
        ("steps", "3", "steps: 2 there, 3 now"),
        ("warm_start_steps", "4", "warm_start_steps: 100 there, 4 now"),
        ("partial_budget", "2", "partial_budget: 0 there, 2 now"),
    ],
)
def test_arms_that_cannot_be_compared_do_not_share_a_folder(tmp_path, few, option, value, message):
    output = tmp_path / "runs"
    folder = output / "grpo@1-start0-seed0"
    task = train.Task(*few_problems(), countdown.grade)
    (first,) = make_runs([*COMMAND, "--methods", "grpo@1"], task)
    run_folder.prepare_folder(folder, first.config, resume=False)
    other = ["--methods=bapo@1", "--seeds=7", "--rho0=0.4", f"--output_dir={output}"]
    with pytest.raises(ValueError, match=f"{folder.name} was made in another setting .*{message}"):
        train.main([*COMMAND, *other, f"--{option}={value}"])
    assert [path.name for path in output.iterdir()] == [folder.name]
    # And where somebody puts them into one folder, they share no table.
    files.Lines(folder / "metrics.jsonl").write({"step": 1, "update": 1})
    second = output / "bapo@1-start0-seed0"
    shutil.copytree(folder, second)
    config = first.config | {"arm": "bapo@1", option: json.loads(value)}
    files.write_json(second / "config.json", {"config": config, "versions": {}})
    with pytest.raises(ValueError, match=f"differ in more than arm.*{option}"):
        plot.load(output)


def test_runs_that_differ_in_memory_alone_share_a_table(tmp_path):
    output = tmp_path / "runs"
    config = make_run(tmp_path).config
    smaller = {"micro_batch_tokens": 60, "gradient_checkpointing": True, "checkpoint_every": 9}
    for name, changed in (("bapo@3-start0-seed0", {}), ("bapo@3-start0-seed1", smaller)):
        run_folder.prepare_folder(output / name, config | changed, resume=False)
        files.Lines(output / name / "metrics.jsonl").write({"step": 1, "update": 1})
    arms, _ = plot.load(output)
    assert [len(runs) for runs in arms.values()] == [2]


def test_what_a_start_reached_is_not_taken_over_from_runs_that_are_gone(output, here, few):
    path = Path(output) / "start0.json"
    path.parent.mkdir()
    path.write_text('{"greedy": 77}')
    words = [*COMMAND, "--methods", "grpo@1", "--output_dir", output]
    assert train.main(words) == 0
    assert "77" not in path.read_text()
    assert "mean@16" in path.read_text()
    path.write_text('{"greedy": 1, "mean@16": 0.77, "pass@8": 1, "pass@16": 1}')
    assert train.main([*words, "--seeds", "1"]) == 0
    assert "0.77" in path.read_text()  # with a run beside it, it is that run's


# ------------------------------------------------------------------------- locks
def test_a_folder_in_which_another_process_writes_is_refused_and_left_alone(
    output, policy, monkeypatch, held, here, few
):
    monkeypatch.setattr(files, "LOCK_S", 0.2)
    folder = Path(output) / "grpo@1-start0-seed0"
    holder = held(folder / "lock")
    words = [*COMMAND, "--methods", "grpo@1", "--output_dir", output, "--resume"]
    with pytest.raises(ValueError, match=f"{folder}: another process is writing there"):
        train.main(words)
    with pytest.raises(ValueError, match="another process is writing there"):
        train.carry_out(make_run(folder, policy), make_task())
    assert [path.name for path in folder.iterdir()] == ["lock"]
    holder.kill()  # the lock dies with its holder
    holder.wait()
    assert train.main(words) == 0


def test_a_second_process_waits_for_the_warm_start_and_says_so(tmp_path, held, monkeypatch):
    folder = tmp_path / "attempts1-steps3-seed0"
    holder = held(tmp_path / "attempts1-steps3-seed0.lock")
    said = []

    def say(text):
        said.append(text)
        holder.stdin.close()  # it lets go

    monkeypatch.setattr(workers, "say", say)
    assert warm_starts.warm_start(folder, attempts=1, steps=3) == folder
    assert said == [f"waiting for another process, which is making {folder}"]


# ------------------------------------------------------------------------- commands in this process
def never_right(response: str, answer: str) -> bool:
    return False


def test_a_warning_says_when_nothing_is_trained_for_long(tmp_path, policy, monkeypatch):
    """Kills: a step that was trained on counted as idle."""
    warnings = []

    def report(note, steps=0):
        if not steps:
            warnings.append(note)

    monkeypatch.setattr(run_folder, "report", report)
    monkeypatch.setattr(run_folder, "IDLE_STEPS", 3)
    nothing = (
        "nothing to train on in the last {} steps: the rewards of every group are all equal, "
        "or, with partial rollouts, no group is finished"
    )
    go(tmp_path / "never", policy, grade=never_right, steps=7)
    assert warnings == [f"never: {nothing.format(idle)}" for idle in (3, 6)]
    warnings.clear()
    go(tmp_path / "always", policy, steps=4)
    assert not warnings

    original = train.prompts_of_step
    steps = []

    def keep_step(rows, step, *rest):
        steps.append(step)
        return original(rows, step, *rest)

    def right_in_step_1(response, answer):
        return steps[-1] == 1 and even_length(response, answer)

    monkeypatch.setattr(train, "prompts_of_step", keep_step)
    go(tmp_path / "once", policy, grade=right_in_step_1, steps=4)
    assert warnings == [f"once: {nothing.format(3)}"]


def test_the_command_fails_where_nothing_was_trained(output, monkeypatch, here, few, capsys):
    monkeypatch.setattr(countdown, "grade", never_right)
    words = [*COMMAND, "--methods", "grpo@1", "--output_dir", output]
    assert train.main(words) == 1
    printed = capsys.readouterr()
    assert "nothing was trained" in printed.err
    assert "| grpo@1 | 1" in printed.out
    assert train.main([*words, "--resume"]) == 1
    assert train.main([*words, "--resume", "--seeds", "0", "1"]) == 1


def test_starts_come_first_then_the_longest_runs_and_what_is_there_is_not_made_again(
    output, few, monkeypatch
):
    calls = []

    def side_by_side(work, jobs, steps=0, what="steps", meanwhile=None):
        calls.append((list(work), jobs, steps, what))
        return {}

    monkeypatch.setattr(train, "run_side_by_side", side_by_side)
    words = [
        *COMMAND,
        "--methods",
        "grpo@1",
        "bapo@4",
        "grpo@2",
        "--warm_starts",
        "0",
        "1",
        "--output_dir",
        output,
    ]
    assert train.main([*words, "--jobs", "3"]) == 1  # nothing came of it
    longest_first = [
        "bapo@4-start0-seed0",
        "bapo@4-start1-seed0",
        "grpo@2-start0-seed0",
        "grpo@2-start1-seed0",
        "grpo@1-start0-seed0",
        "grpo@1-start1-seed0",
    ]
    assert calls == [
        (["attempts1-steps100-seed1"], 3, 100, "warm start"),
        (["start0", "start1", *longest_first], 3, 12, "steps"),
    ]
    calls.clear()
    (Path(output) / "start0.json").write_text("{}")
    start = Path(output).parent / "warm-starts" / START
    shutil.copytree(start, Path(output) / longest_first[0] / "checkpoint-1")
    monkeypatch.setattr(os, "cpu_count", lambda: 5)
    assert train.main([*words, "--resume"]) == 1
    assert calls[1] == (["start1", *longest_first], 5, 11, "steps")
    assert train.main([*words, "--resume", "--jobs", "1", "--steps", "3"]) == 1
    _, jobs, steps, _ = calls[-1]
    assert (jobs, steps) == (1, 17)


def test_one_failed_run_makes_the_command_fail_but_not_the_table(
    output, here, few, monkeypatch, capsys
):
    carry_out = train.carry_out

    def fail_once(run, task):
        if run.config["arm"] == "grpo@1":
            raise RuntimeError("out of memory")
        carry_out(run, task)

    words = [*COMMAND, "--methods", "grpo@1", "bapo@2", "--output_dir", output]
    with monkeypatch.context() as patch:
        patch.setattr(train, "carry_out", fail_once)
        assert train.main(words) == 1
    assert "| bapo@2 | 1 |" in capsys.readouterr().out
    assert train.main([*words, "--resume"]) == 0


def test_without_a_warm_start_nothing_is_begun(tmp_path, here, few, monkeypatch, capsys):
    monkeypatch.setattr(countdown, "supervised_start", lambda **settings: 1 / 0)
    output = tmp_path / "runs"
    assert train.main([*COMMAND, "--methods", "grpo@1", "--output_dir", str(output)]) == 1
    assert "division by zero" in capsys.readouterr().out
    assert not list(output.glob("*/metrics.jsonl"))


@pytest.mark.parametrize("problem", ["a file", "no disk"])
def test_an_output_folder_that_cannot_be_made_takes_one_line(tmp_path, monkeypatch, problem):
    (tmp_path / "file").write_text("")
    output = tmp_path / "file" if problem == "a file" else Path("/proc/nowhere/runs")
    monkeypatch.setattr(sys, "argv", ["train.py", *COMMAND, "--output_dir", str(output)])
    with pytest.raises(SystemExit) as ended:
        workers.command("train.py", train.main)
    message = str(ended.value)
    assert message.startswith("train.py: ")
    assert f"'{output.parent}" in message
    assert "\n" not in message


# ------------------------------------------------------------------------- processes of their own
def nursery() -> None:
    """The life of a process that forks what the tests ask for: no second for an import.

    It never computes anything itself, as a process that has computed a gradient must not fork.
    """
    for line in sys.stdin:
        request = json.loads(line)
        if "reap" in request:
            child, status = os.waitpid(request["reap"], os.WNOHANG)
            exit_code = os.waitstatus_to_exitcode(status) if child else None
            print(json.dumps(exit_code), flush=True)
            continue
        child = os.fork()
        if not child:
            grow_up(**request)
            return
        print(child, flush=True)


def grow_up(call: str, arguments: list, few: bool, stdout: str, stderr: str) -> None:
    """What a shell does for a new command; then `call`, a function of this file.

    SIGINT is as in a terminal, whatever the tests have inherited.
    """
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    append = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    os.dup2(os.open(stdout, append), 1)
    os.dup2(os.open(stderr, append), 2)
    workers.get_context = lambda method: multiprocessing.get_context("fork")
    if few:
        countdown.problems = few_problems
        plot.report = table_alone
        files.LOCK_S = 0.1
        warm_starts.SAVE_EVERY = 10
    globals()[call](*arguments)


def command_line(*words: str) -> None:
    os.chdir(ROOT)
    sys.argv = ["train.py", *words]
    runpy.run_path("train.py", run_name="__main__")


def run_to_be_killed(folder: str, policy: str, steps: int) -> None:
    go(folder, policy, method="bapo@2", checkpoint_every=3, steps=steps)


class Started:
    """A process that the nursery has forked."""

    def __init__(self, ask, pid: int):
        self.ask = ask
        self.pid = pid
        self.returncode = None

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self.ask({"reap": self.pid})
        return self.returncode

    def wait(self, seconds: float = 300) -> int:
        wait_for(lambda: self.poll() is not None, seconds)
        return self.returncode


@pytest.fixture(scope="session")
def ask():
    """Sends a request to the nursery and returns its answer."""
    command = [sys.executable, "-c", "import test_commands; test_commands.nursery()"]
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    with subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        bufsize=1,
    ) as process:

        def request(content: dict):
            process.stdin.write(json.dumps(content) + "\n")
            return json.loads(process.stdout.readline())

        yield request
        process.stdin.close()


@pytest.fixture
def started(ask, tmp_path):
    """Starts a command, or another call; nothing that was started outlives the test."""
    processes = []

    def start(*arguments, call="command_line", few=True, stdout="out", stderr="err") -> Started:
        request = {
            "call": call,
            "arguments": arguments,
            "few": few,
            "stdout": str(tmp_path / stdout),
            "stderr": str(tmp_path / stderr),
        }
        process = Started(ask, ask(request))
        processes.append(process)
        return process

    yield start
    for process in processes:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        process.wait()


def wait_for(condition, seconds: float = 300) -> None:
    deadline = time.time() + seconds
    while not condition():
        assert time.time() < deadline, "it never came"
        time.sleep(0.005)


def number_of_lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def is_alive(group: int) -> bool:
    """Whether any process of the group is left that does not only wait for its parent."""
    listed = subprocess.run(
        ["ps", "-eo", "pgid=,stat="], capture_output=True, text=True, check=True
    )
    for line in listed.stdout.splitlines():
        group_of_process, state = line.split()
        if int(group_of_process) == group and not state.startswith("Z"):
            return True
    return False


def read_a_little(path: Path) -> None:
    """`head -c 100` of what a process writes into a pipe."""
    with open(path, "rb", buffering=0) as pipe:
        missing = 100
        while missing:
            missing -= len(pipe.read(missing))


# ------------------------------------------------------------------------- repeated
def clone_without(packages: list[str], folder: Path) -> dict[str, str]:
    """Copy what train.py needs to `folder`. Returns an environment where `packages` are missing."""
    for pattern in ("*.py", "support/*.py"):
        for path in ROOT.glob(pattern):
            copy = folder / path.relative_to(ROOT)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(path.read_bytes())
    # Python runs this file when it begins; to import the packages is an error then.
    blocked = "import sys\n"
    for package in packages:
        blocked += f"sys.modules[{package!r}] = None\n"
    (folder / "sitecustomize.py").write_text(blocked)
    return os.environ | {"PYTHONPATH": str(folder)}


def test_the_command_ends_with_all_files_and_can_be_repeated_with_resume(
    tmp_path, learned, here, capsys, monkeypatch
):
    """In a clone whose path has spaces, with the packages that Countdown needs and no others.

    The only test of Countdown with the processes as they are; the others fork theirs.
    """
    clone = tmp_path / "a clone of it"
    environment = clone_without(["datasets", "math_verify", "peft"], clone)
    runs = clone / "runs/default"
    shutil.copytree(learned, clone / "runs/warm-starts" / START)
    names = ["bapo-main@1x2-start0-seed0", "grpo@8-start0-seed0"]
    words = [*COMMAND, "--jobs=1", "--methods", "bapo-main@1x2", "grpo@8"]
    ended = subprocess.run(
        [sys.executable, "train.py", *words],
        cwd=clone,
        env=environment,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert ended.returncode == 0, ended.stderr
    made = ["config.json", "metrics.jsonl", "timings.jsonl", "final.json", "model/config.json"]
    for name in names:
        assert all((runs / name / file).exists() for file in made)
    assert (runs / "curves.png").read_bytes().startswith(b"\x89PNG")
    table = (runs / "table.md").read_text()
    assert "| bapo-main@1x2 | 1 |" in table and "| grpo@8 | 1 |" in table
    assert table.strip() in ended.stdout
    assert not list((clone / "runs").rglob(".*"))  # no temporary files
    printed = ended.stdout + ended.stderr
    assert "\r" not in printed and "\x1b" not in printed  # no terminal, no bars

    monkeypatch.chdir(clone)
    with pytest.raises(ValueError, match="--resume"):
        train.main(words)
    before = {path: path.read_bytes() for path in runs.rglob("*.json*")}
    assert train.main([*words, "--resume"]) == 0
    assert table.strip() in capsys.readouterr().out
    assert before == {path: path.read_bytes() for path in runs.rglob("*.json*")}
    # A run's numbers do not depend on the processes around it.
    task = train.Task(*countdown.problems(), countdown.grade)
    _, run = make_runs(words, task)
    alone = run._replace(folder=tmp_path / "alone")
    run_folder.prepare_folder(alone.folder, alone.config, resume=False)
    train.carry_out(alone, task)
    same_results(alone.folder, run.folder)


def test_two_processes_in_one_folder_and_on_one_warm_start_do_no_harm(tmp_path, started, here, few):
    arms = ["grpo@1", "bapo@2", "grpo@2"]
    words = [*COMMAND, "--methods", *arms, "--steps=4", "--jobs=2"]
    both = tmp_path / "both/runs"
    alone = tmp_path / "alone/runs"
    for more in ([], ["--resume"]):  # two fresh starts, then two continuations of what they left
        processes = [started(*words, f"--output_dir={both}", *more) for _ in range(2)]
        assert all(process.wait() in (0, 1) for process in processes)
    printed = (tmp_path / "out").read_text() + (tmp_path / "err").read_text()
    for bad in ("Traceback", "not empty", "No such file"):
        assert bad not in printed, printed
    assert train.main([*words, f"--output_dir={both}", "--resume"]) == 0
    assert train.main([*words, f"--output_dir={alone}"]) == 0
    for arm in arms:
        name = f"{arm}-start0-seed0"
        same_results(both / name, alone / name)
    assert not list(tmp_path.rglob(".*"))


# ------------------------------------------------------------------------- killed
def test_killed_at_random_moments_and_resumed_equals_uninterrupted(tmp_path, policy, started):
    """KILLS=30 KILL_STEPS=100 in the environment: for longer."""
    kills = int(os.environ.get("KILLS", 4))
    steps = int(os.environ.get("KILL_STEPS", 12))
    whole = tmp_path / "whole"
    killed = tmp_path / "killed"
    metrics = killed / "metrics.jsonl"
    run_to_be_killed(whole, policy, steps)
    lines_in_all = number_of_lines(whole / "metrics.jsonl")
    rng = random.Random(0)
    for kill in range(kills):
        enough = lines_in_all * (kill + rng.random()) / (kills + 0.5)
        delay = rng.uniform(0, 0.03)
        process = started(str(killed), policy, steps, call="run_to_be_killed", few=False)
        wait_for(lambda enough=enough: number_of_lines(metrics) > enough)
        time.sleep(delay)
        assert process.poll() is None
        os.kill(process.pid, signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
    run_to_be_killed(killed, policy, steps)
    same_results(killed, whole)
    for path in killed.iterdir():
        assert "checkpoint" not in path.name and "unfinished" not in path.name


def test_a_killed_command_takes_its_workers_along_and_resumed_equals_uninterrupted(
    tmp_path, output, started, here, few
):
    words = [*COMMAND, "--methods", "grpo@2", "bapo@2", "--jobs=2", "--steps=24"]
    names = ["grpo@2-start0-seed0", "bapo@2-start0-seed0"]
    killed = Path(output)
    whole = tmp_path / "whole"
    process = started(*words, f"--output_dir={killed}")
    for name in names:
        wait_for(lambda name=name: number_of_lines(killed / name / "metrics.jsonl") > 7)
    os.kill(process.pid, signal.SIGKILL)  # the parent alone, as the out-of-memory killer does
    process.wait()
    wait_for(lambda: not is_alive(process.pid), 60)  # nobody of its group is left to write
    assert not any((killed / name / "final.json").exists() for name in names)
    assert train.main([*words, f"--output_dir={killed}", "--resume"]) == 0
    assert train.main([*words, f"--output_dir={whole}"]) == 0
    for name in names:
        same_results(killed / name, whole / name)


# ------------------------------------------------------------------------- interrupted, not read
def test_it_goes_on_when_nobody_reads_and_ctrl_c_ends_all_runs_and_says_how_to_go_on(
    tmp_path, output, started
):
    """`train.py | head -c 100`, then Ctrl-C."""
    words = [*COMMAND, "--steps=5000", "--methods", "grpo@2", "bapo@2", "--jobs=2"]
    os.mkfifo(tmp_path / "pipe")
    process = started(*words, "--seeds", "0", "1", "--output_dir", output, stdout="pipe")
    read_a_little(tmp_path / "pipe")
    runs = tmp_path / "runs"
    metrics_files = [runs / f"{arm}@2-start0-seed0/metrics.jsonl" for arm in ("grpo", "bapo")]
    wait_for((runs / "start0.json").exists)  # of which a word is printed
    for file in metrics_files:
        wait_for(lambda file=file: number_of_lines(file) > 12)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to every process of the group
    assert process.wait() == 130
    stderr = (tmp_path / "err").read_text()
    assert "--resume" in stderr
    assert "Traceback" not in stderr and "Error" not in stderr
    wait_for(lambda: not is_alive(process.pid), 60)
    for file in metrics_files:
        assert read_metrics(file)  # whole lines
        (checkpoint,) = file.parent.glob("checkpoint-*")
        torch.load(checkpoint / "state.pt", weights_only=True)
    assert not list(runs.glob("*-seed1/metrics.jsonl"))  # the runs that were waiting did not start


def test_ctrl_c_during_the_warm_start_says_how_to_go_on_and_keeps_what_was_done(tmp_path, started):
    """Kills: a warm start that is lost as a whole."""
    words = [*COMMAND, "--warm_start_steps=1000000", "--methods", "grpo@1"]
    process = started(*words, "--output_dir", str(tmp_path / "runs"))
    name = "attempts1-steps1000000-seed0"
    saved = tmp_path / f"warm-starts/.{name}.partial.pt"
    wait_for(saved.exists)
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait() == 130
    stderr = (tmp_path / "err").read_text()
    assert "--resume" in stderr and "Traceback" not in stderr
    wait_for(lambda: not is_alive(process.pid), 60)
    left = {path.name for path in saved.parent.iterdir() if "unfinished" not in path.name}
    assert left == {saved.name, f"{name}.lock"}
    assert torch.load(saved, weights_only=True)["state"]["step"] % 10 == 0


def test_it_goes_on_or_stops_when_nobody_reads_its_errors_either(
    tmp_path, output, started, here, few
):
    """`train.py 2>&1 | head -c 100`."""
    words = [*COMMAND, "--methods", "grpo@1", "--jobs=1", "--output_dir", output]
    os.mkfifo(tmp_path / "pipe")
    process = started(*words, stdout="pipe", stderr="pipe")
    read_a_little(tmp_path / "pipe")
    process.wait()
    wait_for(lambda: not is_alive(process.pid), 60)
    assert train.main([*words, "--resume"]) == 0  # wherever it stopped, nothing is damaged
