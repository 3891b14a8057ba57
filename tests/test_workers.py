"""support/workers.py: work side by side, what a person sees of it, and how a script ends."""

import errno
import multiprocessing
import os
import sys
from concurrent.futures import ALL_COMPLETED, wait
from multiprocessing import util

import pytest
import torch

from support import workers


# ------------------------------------------------------------------------- what a person sees
def test_without_a_terminal_there_is_a_plain_line_now_and_then_with_the_time_left(
    monkeypatch, capsys
):
    clock = [100.0]
    monkeypatch.setattr(workers.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr("tqdm.std.time", lambda: clock[0])
    progress = workers.Progress(60, "steps", done=10)
    for _ in range(40):
        clock[0] += 10
        progress.update(1, "a note")
    progress.close()
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 10  # of 400 s, a line once more than half a minute has gone
    # 46 steps of 10 s are left; the ten that were there took no time.
    assert lines[0].split("|")[0] == "steps:  23%"
    assert "14/60 [00:40<07:40, 10.00s/it, a note]" in lines[0]
    assert "50/60 [06:40<01:40, 10.00s/it, a note]" in lines[-1]


class Gone:
    """A pipe whose reader has ended."""

    def write(self, text):
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    flush = close = lambda self, *_: self.write("")


@pytest.mark.parametrize("name, other", [("stdout", "stderr"), ("stderr", "stdout")])
def test_what_nobody_reads_any_more_is_not_printed_and_the_other_stream_goes_on(
    monkeypatch, capsys, name, other
):
    monkeypatch.setattr(sys, name, Gone())
    for _ in range(2):
        workers.say("lost", getattr(sys, name))
    assert sys.stdout is not sys.stderr
    workers.say("read", getattr(sys, other))
    getattr(sys, name).close()
    captured = capsys.readouterr()
    assert (captured.out + captured.err) == "read\n"


def test_a_stream_that_was_closed_before_python_began_is_no_error(monkeypatch):
    """Kills: an AttributeError under `python train.py >&-`."""
    monkeypatch.setattr(sys, "stdout", None)
    workers.say("lost")
    monkeypatch.setattr(sys, "stderr", None)
    workers.say("lost", sys.stderr)
    workers.Progress(10, "steps").update(1)
    with pytest.raises(SystemExit) as ended:
        workers.command("x.py", lambda: print("lost") or 3)
    assert ended.value.code == 3


# ------------------------------------------------------------------------- side by side
WORK = """
import signal

import torch

from support import workers


def fail(text):
    workers.report("a word on the way")
    raise KeyError(text)


def succeed(path):
    workers.report("half", steps=1)
    ignores_ctrl_c = signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    path.write_text(f"{torch.get_num_threads()} {ignores_ctrl_c}")
    workers.report("whole", steps=1)
    workers.tell("the last word")


def run_out_of_memory():
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\\nGPU 0 has ...")
"""


@pytest.fixture
def some_work(tmp_path, monkeypatch):
    """The functions above, in a file that workers can import."""
    (tmp_path / "some_work.py").write_text(WORK)
    monkeypatch.syspath_prepend(tmp_path)
    import some_work

    yield some_work
    del sys.modules["some_work"]


def test_a_failed_run_leaves_its_traceback_and_does_not_stop_the_others(
    tmp_path, capsys, monkeypatch, some_work
):
    """Kills: failures in the order of a set; a line of OOM without a way out."""
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    monkeypatch.setattr(workers, "LINE_S", 0)
    monkeypatch.setattr(workers, "MEANWHILE_S", 0)
    drawn = []

    def draw():
        drawn.append(1)
        return drawn[1]  # fails the first time

    work = {
        "a run": (tmp_path, some_work.fail, "deep"),
        "full": (tmp_path / "gone", some_work.fail, "x"),
        "big": (tmp_path, some_work.run_out_of_memory),
        "another": (tmp_path, some_work.succeed, tmp_path / "done"),
    }
    failures = workers.run_side_by_side(work, 1, steps=2, meanwhile=draw)
    assert list(failures) == ["a run", "full", "big"]
    assert isinstance(failures["a run"], KeyError)
    printed = capsys.readouterr()
    error_file = tmp_path / "error.txt"
    assert f"a run: KeyError: 'deep' (traceback: {error_file})\n" in printed.out
    assert "another: done" in printed.out
    traces = error_file.read_text()
    assert "in fail" in traces and "raise KeyError(text)\nKeyError: 'deep'" in traces
    assert "Tried to allocate 2.00 GiB" in traces
    assert "raise KeyError(text)" in printed.out  # of "full": its folder cannot keep it
    (memory_line,) = [line for line in printed.out.splitlines() if line.startswith("big: ")]
    ways_out = ["--micro_batch_tokens", "--gradient_checkpointing", "--group_size", "--lora_rank"]
    places = [memory_line.index(option) for option in ways_out]
    assert places == sorted(places)
    assert "expandable_segments:True" in memory_line
    assert (tmp_path / "done").read_text() == "1 True"  # one thread; Ctrl-C is for the parent
    assert "a word on the way" in printed.out and "the last word" in printed.out
    assert "steps: 100%" in printed.err and ", whole]\n" in printed.err
    assert "\r" not in printed.err
    assert len(drawn) > 1
    assert printed.err.count("no picture yet: list index out of range") == 1
    assert workers.run_side_by_side({}, 1) == {}


@pytest.fixture
def forked(monkeypatch):
    """Workers that have nothing to import: for work that computes nothing."""
    monkeypatch.setattr(workers, "get_context", lambda _: multiprocessing.get_context("fork"))


def test_what_ends_at_the_same_time_is_told_in_the_order_in_which_it_was_given(
    tmp_path, capsys, monkeypatch, forked
):
    """Kills: the order of a set, which another run of the same command does not repeat."""

    def wait_for_all(futures, **_):
        return wait(futures, return_when=ALL_COMPLETED)

    monkeypatch.setattr(workers, "wait", wait_for_all)
    names = [f"run {number}" for number in range(20)]
    work = {name: (tmp_path, divmod, 1, 0) for name in names}
    assert list(workers.run_side_by_side(work, 1)) == names
    told = [line.partition(":")[0] for line in capsys.readouterr().out.splitlines()]
    assert told == names


def test_a_worker_that_is_killed_is_told_with_what_may_have_killed_it(tmp_path, capsys, forked):
    failures = workers.run_side_by_side({"a run": (tmp_path, os._exit, 9)}, 1)
    assert list(failures) == ["a run"]
    assert "a run: a process was killed, perhaps as memory ran out" in capsys.readouterr().out


def report_as_the_process_ends():
    util.Finalize(None, workers.report, ("late", 1), exitpriority=1)


def test_a_step_that_is_reported_as_a_worker_ends_is_counted(tmp_path, capsys, monkeypatch, forked):
    """Kills: a bar that is closed before all messages are read."""
    monkeypatch.setattr(workers, "LINE_S", 0)
    work = {"a run": (tmp_path, report_as_the_process_ends)}
    assert workers.run_side_by_side(work, 1, steps=1) == {}
    assert "steps: 100%" in capsys.readouterr().err


# ------------------------------------------------------------------------- how a script ends
def test_a_script_ends_with_its_status_or_one_line(capsys):
    def interrupted():
        raise KeyboardInterrupt

    def full():
        raise OSError(errno.ENOSPC, "No space left on device", "metrics.jsonl")

    def big():
        raise torch.OutOfMemoryError("CUDA out of memory.\nGPU 0 has a total capacity of ...")

    expected = {
        (lambda: 3): 3,
        interrupted: 130,
        full: "x.py: [Errno 28] No space left on device: 'metrics.jsonl'",
        big: "x.py: lower --batch_tokens",
    }
    for main, status in expected.items():
        with pytest.raises(SystemExit) as ended:
            workers.command("x.py", main, "how to go on", out_of_memory="lower --batch_tokens")
        assert ended.value.code == status
    assert capsys.readouterr().err.strip() == "how to go on"
