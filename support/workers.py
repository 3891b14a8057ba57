"""Work side by side in processes, and what a person sees of it."""

import io
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from multiprocessing import active_children, get_context, parent_process
from pathlib import Path

import torch
import transformers
from tqdm import tqdm

LINE_S = 30  # between lines of progress, where there is no terminal
MEANWHILE_S = 180  # between pictures of runs that go on


def say(text: str, file=None) -> None:
    """Print a line, above the bar if there is one. When nobody reads any more (`| head`), go on without."""
    try:
        tqdm.write(text, file=file or sys.stdout)
        (file or sys.stdout).flush()
    except (OSError, ValueError):  # so that the interpreter does not fail at its end, either
        setattr(sys, "stderr" if file is sys.stderr else "stdout", open(os.devnull, "w"))


class Progress(tqdm):
    """A bar on a terminal; elsewhere a plain line every half minute. Both with the time left for all. Of 0 steps: none."""

    def __init__(self, total: int, what: str, done: int = 0):
        self.last, self.shown = time.monotonic(), sys.stderr.isatty()
        hidden = None if self.shown else io.StringIO()
        super().__init__(desc=what, total=total, initial=done, file=hidden, dynamic_ncols=True, smoothing=0, disable=not total)

    def update(self, count: int, note: str = "") -> None:
        self.set_postfix_str(note, refresh=False)
        super().update(count)
        if not self.shown and time.monotonic() - self.last > LINE_S:
            say(str(self), sys.stderr)
            self.last = time.monotonic()


_messages = None  # of a worker: its way to the parent, the only process that prints


def report(note: str, steps: int = 0) -> None:
    """From a worker: `steps` more are done; a note without steps is a message of its own."""
    if _messages is not None:
        _messages.put((note, steps))


def _start_worker(messages) -> None:
    global _messages
    _messages = messages
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends its workers
    # A worker must not outlive a killed parent: a resumed command would then write to the same files.
    threading.Thread(target=lambda: (parent_process().join(), os._exit(1)), daemon=True).start()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


def run_side_by_side(work: dict[str, tuple], jobs: int, steps=0, what="steps", meanwhile: Callable = lambda: None) -> dict:
    """Every piece of work, name -> (folder, function, *arguments), in one of `jobs` processes, one thread each, so that a
    run's numbers do not depend on the others. `steps`: how many all of them will `report`. meanwhile(), which may fail, is
    called every MEANWHILE_S. Returns the failures, name -> exception, their tracebacks added to folder/error.txt; an exception
    in one run does not stop the rest (a process that dies, does). Ctrl-C ends all of them."""
    if not work:
        return {}
    context = get_context("spawn")
    messages, failures = context.Queue(), {}
    progress, last = Progress(steps, what), time.monotonic()
    with ProcessPoolExecutor(min(jobs, len(work)), context, _start_worker, (messages,)) as pool:
        pending = futures = {pool.submit(*of_name[1:]): name for name, of_name in work.items()}
        try:
            while pending:
                done, pending = wait(pending, 0.1, FIRST_COMPLETED)
                _show(messages, progress)
                if time.monotonic() - last > MEANWHILE_S:
                    try:
                        meanwhile()
                    except Exception as error:  # no metrics yet, a full disk: training goes on
                        say(f"no picture yet: {error}", sys.stderr)
                    last = time.monotonic()
                for future in done:
                    name = futures[future]
                    if error := future.exception():
                        failures[name], file = error, Path(work[name][0]) / "error.txt"
                        trace = "".join(traceback.format_exception(error))
                        try:
                            with open(file, "a") as opened:
                                opened.write(trace)
                        except OSError:  # the disk is full, perhaps
                            say(trace)
                        say(f"{name}: {type(error).__name__}: {error} (traceback: {file})")
                    else:
                        say(f"{name}: done")
        except KeyboardInterrupt:
            for worker in active_children():
                worker.terminate()
            raise
        finally:
            progress.close()
    _show(messages, progress)  # what came with the last of them
    return failures


def _show(messages, progress: Progress) -> None:
    while not messages.empty():  # this process alone reads
        note, steps = messages.get()
        progress.update(steps, note) if steps else say(note)


def command(name: str, main: Callable[[], int], interrupted: str = "Interrupted") -> None:
    """Run `main` as a script: its status, or one line for what the user can mend (an option, a folder, a full disk)."""
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace")  # a response may have what the terminal cannot show
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        say(f"\n{interrupted}", sys.stderr)
        sys.exit(130)
    except (ValueError, OSError) as error:
        sys.exit(f"{name}: {error}")
