"""Run calls side by side in processes of one CPU thread, or one after the other in this process."""

import gc
import multiprocessing
import os
import signal
import sys
import threading
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool

import torch
from tqdm import tqdm

from support.command_line import explain, silence_libraries

KILLED = (
    "A process was killed, probably for lack of memory. The same command with --resume and fewer"
    " --jobs continues."
)


def progress_bar(steps: range, name: str):
    """Return `steps` with a progress bar. Each process draws its bar in a line of its own."""
    identity = multiprocessing.current_process()._identity  # (n,) in worker n, else ()
    return tqdm(
        steps,
        desc=name,
        position=identity[0] - 1 if identity else 0,
        leave=False,
        mininterval=0.5 if sys.stderr.isatty() else 30,
    )


def run_side_by_side(calls: dict[str, tuple], jobs: int, one_thread: bool) -> list[str]:
    """Make every call, `jobs` at a time; return the names of those that failed.

    calls: name -> (function, *arguments). With jobs > 1 each runs in a process with one thread;
    with jobs = 1, one_thread limits this process. A call that fails does not stop the rest. Ctrl-C
    ends all of them.
    """
    if one_thread:
        torch.set_num_threads(1)
    failed = {}  # name -> why
    ended = _in_processes(calls, jobs) if jobs > 1 else _one_by_one(calls)
    for name, reason in ended:
        if reason is None:
            tqdm.write(f"{name}: done")
        else:
            failed[name] = reason
            if reason != KILLED:
                tqdm.write(f"{name}: {reason}", file=sys.stderr)
    if KILLED in failed.values():  # the others end with the killed one, so say it once
        tqdm.write(KILLED, file=sys.stderr)
    return list(failed)


def _one_by_one(calls: dict[str, tuple]):
    """Make the calls; yield the name of each, and None or why it failed."""
    for name, (function, *arguments) in calls.items():
        reason = None
        try:
            function(*arguments)
        except (Exception, SystemExit) as error:
            reason = explain(error)
        gc.collect()  # frees what the last model holds before the next one is loaded
        yield name, reason


def _in_processes(calls: dict[str, tuple], jobs: int):
    """Make the calls in `jobs` processes; yield the name of each, and None or why it failed."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, spawn, _begin_worker) as pool:
        names = {pool.submit(*call): name for name, call in calls.items()}
        try:
            for future in as_completed(names):
                error = future.exception()
                reason = None
                if isinstance(error, BrokenProcessPool):
                    reason = KILLED
                elif error is not None:
                    reason = explain(error)
                yield names[future], reason
        except (KeyboardInterrupt, GeneratorExit):  # here, or where the results are used
            for worker in multiprocessing.active_children():
                worker.terminate()
            raise


def _begin_worker() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends its workers
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    silence_libraries()


def _end_with_parent() -> None:
    """End a worker when its parent is killed: a resumed command would write the same files."""
    multiprocessing.parent_process().join()
    os._exit(1)
