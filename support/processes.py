"""Run calls side by side in processes of one CPU thread, or one after the other in this process."""

import gc
import multiprocessing
import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed

import torch
from tqdm import tqdm

from support.command_line import silence_libraries


def progress_bar(steps: range, name: str):
    """Return `steps` with a progress bar. Each process draws its bar in a line of its own."""
    identity = multiprocessing.current_process()._identity  # (n,) in worker n, else ()
    line = identity[0] - 1 if identity else 0
    return tqdm(steps, desc=name, position=line, leave=False, disable=None)  # None: in a terminal


def run_side_by_side(calls: dict[str, tuple], jobs: int, one_thread: bool) -> list[str]:
    """Make every call, `jobs` at a time; return the names of those that failed.

    calls: name -> (function, *arguments). With jobs > 1 each runs in a process with one thread;
    with jobs = 1, one_thread limits this process. A call that fails does not stop the rest. Ctrl-C
    ends all of them.
    """
    if one_thread:
        torch.set_num_threads(1)
    failed = []
    ended = _in_processes(calls, jobs) if jobs > 1 else _one_by_one(calls)
    for name, reason in ended:
        if reason is None:
            tqdm.write(f"{name}: done")
        else:
            failed.append(name)
            tqdm.write(f"{name}: {reason}", file=sys.stderr)
    return failed


def _one_by_one(calls: dict[str, tuple]) -> Iterator[tuple]:
    """Make the calls; yield the name of each, and None or why it failed."""
    for name, (function, *arguments) in calls.items():
        reason = None
        try:
            function(*arguments)
        except Exception as error:
            reason = _explain(error)
        gc.collect()  # frees what the last model holds before the next one is loaded
        yield name, reason


def _in_processes(calls: dict[str, tuple], jobs: int) -> Iterator[tuple]:
    """Make the calls in `jobs` processes; yield the name of each, and None or why it failed."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, spawn, _begin_worker) as pool:
        names = {pool.submit(*call): name for name, call in calls.items()}
        try:
            for future in as_completed(names):
                error = future.exception()
                yield names[future], None if error is None else _explain(error)
        except (KeyboardInterrupt, GeneratorExit):  # here, or where the results are used
            for worker in multiprocessing.active_children():
                worker.terminate()
            raise


def _explain(error: BaseException) -> str:
    """Return one line for what users can fix, and a traceback for anything else."""
    if isinstance(error, torch.OutOfMemoryError):
        return (
            f"{error}. Lower --micro_batch_tokens, or add --gradient_checkpointing; if the weights"
            " alone do not fit, --lora_rank"
        )
    if isinstance(error, (ValueError, OSError, ArithmeticError)):
        return f"{error}"
    return "".join(traceback.format_exception(error))


def _begin_worker() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends its workers
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    silence_libraries()


def _end_with_parent() -> None:
    """End a worker when its parent is killed: a resumed command would write the same files."""
    multiprocessing.parent_process().join()
    os._exit(1)
