"""Work side by side in processes, and what a person sees of it.

Only the parent prints: workers `report` to it through a queue.
"""

import io
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from pathlib import Path

import torch
import transformers
from tqdm import tqdm

LINE_S = 30  # seconds between lines of progress, where there is no terminal
MEANWHILE_S = 180  # seconds between pictures of runs that go on
OUT_OF_MEMORY = (
    "out of memory on the device: lower --micro_batch_tokens; then add --gradient_checkpointing; "
    "then lower --group_size or --max_new_tokens; then train adapters (--lora_rank). "
    "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True in the environment may help, too"
)
WORKER_DIED = "a process was killed, perhaps as memory ran out: try fewer --jobs"


# ------------------------------------------------------------------------- what a person sees
def say(text: str, file=None) -> None:
    """Print a line to `file` (default: standard output), above the progress bar if there is one.

    When nobody reads any more (`| head`, or a stream that was closed), go on without.
    """
    stream = file or sys.stdout
    if stream is None:  # it was closed before Python began
        return
    try:
        tqdm.write(text, file=stream)
        stream.flush()
    except (OSError, ValueError):
        # The interpreter flushes the streams at its end, and must not fail there, either.
        silent = open(os.devnull, "w")
        if stream is sys.stderr:
            sys.stderr = silent
        elif stream is sys.stdout:
            sys.stdout = silent


class Progress(tqdm):
    """A bar on a terminal; elsewhere a plain line every LINE_S seconds. Both have the time left.

    total: steps of all the work; with 0 nothing is shown. done: those that were done before.
    """

    def __init__(self, total: int, what: str, done: int = 0):
        self.last_line_at = time.monotonic()
        self.on_terminal = sys.stderr is not None and sys.stderr.isatty()
        super().__init__(
            desc=what,
            total=total,
            initial=done,
            file=None if self.on_terminal else io.StringIO(),
            dynamic_ncols=True,
            smoothing=0,
            disable=not total,
        )

    def update(self, count: int, note: str = "") -> None:
        """`count` more steps are done; the note stands at the end of the line."""
        self.set_postfix_str(note, refresh=False)
        super().update(count)
        if not self.on_terminal and time.monotonic() - self.last_line_at > LINE_S:
            say(str(self), sys.stderr)
            self.last_line_at = time.monotonic()


# ------------------------------------------------------------------------- in a worker
_messages = None  # of a worker: the queue to its parent


def report(note: str, steps: int = 0) -> None:
    """From a worker: `steps` more are done; a note without steps is a message of its own.

    Elsewhere nothing happens: see `tell`.
    """
    if _messages is not None:
        _messages.put((note, steps))


def tell(text: str) -> None:
    """Say a line from wherever the code runs, in a worker or in the parent."""
    if _messages is None:
        say(text)
    else:
        report(text)


def _start_worker(messages) -> None:
    """Set up a process that has just begun: queue, signals, one thread, no messages of others."""
    global _messages
    _messages = messages
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends its workers
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


def _end_with_parent() -> None:
    """A worker must not outlive a killed parent: a resumed command would write the same files."""
    multiprocessing.parent_process().join()
    os._exit(1)


# ------------------------------------------------------------------------- in the parent
def run_side_by_side(
    work: dict[str, tuple],
    jobs: int,
    steps: int = 0,
    what: str = "steps",
    meanwhile: Callable[[], object] = lambda: None,
) -> dict[str, BaseException]:
    """Do every piece of work in one of `jobs` processes.

    Each has one thread, so that a run's numbers do not depend on the others. An exception in one
    does not stop the rest; a process that dies does. Ctrl-C ends all of them.

    Args:
        work: name -> (folder, function, *arguments).
        steps: how many all of them will `report`; what: the name of these steps.
        meanwhile: called every MEANWHILE_S seconds; it may fail.

    Returns:
        The failures, name -> exception. Their tracebacks are added to folder/error.txt.
    """
    if not work:
        return {}
    context = get_context("spawn")
    messages = context.Queue()
    failures = {}
    last_meanwhile_at = time.monotonic()
    processes = min(jobs, len(work))
    with Progress(steps, what) as progress:
        with ProcessPoolExecutor(processes, context, _start_worker, (messages,)) as pool:
            names = {}  # of every piece of work, in the order in which they were given
            for name, (_, function, *arguments) in work.items():
                names[pool.submit(function, *arguments)] = name
            pending = set(names)
            try:
                while pending:
                    done, pending = wait(pending, timeout=0.1, return_when=FIRST_COMPLETED)
                    _show(messages, progress)
                    if time.monotonic() - last_meanwhile_at > MEANWHILE_S:
                        _do_meanwhile(meanwhile)
                        last_meanwhile_at = time.monotonic()
                    for future, name in names.items():
                        if future not in done:
                            continue
                        error = future.exception()
                        if error:
                            failures[name] = error
                            _say_failure(name, error, Path(work[name][0]) / "error.txt")
                        else:
                            say(f"{name}: done")
            except KeyboardInterrupt:
                for worker in multiprocessing.active_children():
                    worker.terminate()
                raise
        # What came with the last of them. A bar that is closed would not count it.
        _show(messages, progress)
    return failures


def _show(messages, progress: Progress) -> None:
    """Show all that the workers have reported."""
    while not messages.empty():  # this process alone reads
        note, steps = messages.get()
        if steps:
            progress.update(steps, note)
        else:
            say(note)


def _do_meanwhile(meanwhile: Callable[[], object]) -> None:
    try:
        meanwhile()
    except Exception as error:  # no metrics yet, a full disk: training goes on
        say(f"no picture yet: {error}", sys.stderr)


def _say_failure(name: str, error: BaseException, file: Path) -> None:
    """One line about a piece of work that failed; its traceback is added to `file`."""
    trace = "".join(traceback.format_exception(error))
    try:
        with open(file, "a") as opened:
            opened.write(trace)
    except OSError:  # the disk is full, perhaps
        say(trace)
    if isinstance(error, torch.OutOfMemoryError):
        cause = OUT_OF_MEMORY
    elif isinstance(error, BrokenProcessPool):
        cause = WORKER_DIED
    else:
        cause = f"{type(error).__name__}: {error}"
    say(f"{name}: {cause} (traceback: {file})")


def command(
    name: str,
    main: Callable[[], int],
    interrupted: str = "Interrupted",
    out_of_memory: str = OUT_OF_MEMORY,
) -> None:
    """Run `main` as a script and exit with its status.

    What the user can mend (an option, a folder, a full disk, too little memory) takes one line
    and no traceback. Ctrl-C says `interrupted`.
    """
    # A stream that was closed before Python began is None, which every library would trip over.
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w")
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace")  # a terminal may lack a response's letters
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        say(f"\n{interrupted}", sys.stderr)
        sys.exit(130)
    except torch.OutOfMemoryError:
        sys.exit(f"{name}: {out_of_memory}")
    except (ValueError, OSError) as error:
        sys.exit(f"{name}: {error}")
