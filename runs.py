"""Files, checkpoints, worker processes and command lines of long runs.

torch and transformers are imported inside the functions that need them, because plot.py uses only
the files and starts in half the time without them.
"""

import gc
import json
import logging
import math
import multiprocessing
import os
import re
import shutil
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from pathlib import Path

import filelock
from tqdm import tqdm

OUT_OF_MEMORY = (
    "out of memory on the device: lower --micro_batch_tokens or add --gradient_checkpointing, and"
    " continue with --resume (eval_aime.py: lower --batch_size). If that is not enough, lower"
    " --group_size or --max_new_tokens or train adapters (--lora_rank) in another --output_dir"
)

KILLED = (
    "A process was killed, probably for lack of memory. The same command with --resume and fewer"
    " --jobs continues."
)


# ---------------------------------------------------------------- files
def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Let write(temporary) make a file or folder, which then replaces `path` at once."""
    temporary = path.with_name(f".{path.name}.unfinished")
    if temporary.is_dir():  # left by a process that was killed
        shutil.rmtree(temporary)
    write(temporary)
    os.replace(temporary, path)


def write_json(path: Path, content: dict) -> None:
    """Write a JSON object atomically."""
    text = json.dumps(content, indent=1) + "\n"
    write_atomically(path, lambda file: file.write_text(text))


def read_json(path: Path) -> dict:
    """Read a JSON object."""
    return json.loads(path.read_text())


def append_line(path: Path, record: dict) -> None:
    """Add a line to a JSON Lines file. Floats get six digits; NaN and infinity become null."""
    rounded = {}
    for name, value in record.items():
        if isinstance(value, float):
            value = float(f"{value:.6g}") if math.isfinite(value) else None
        rounded[name] = value
    with path.open("a") as file:
        file.write(json.dumps(rounded) + "\n")


def read_lines(path: Path) -> list[dict]:
    """Read a JSON Lines file, without a last line that a kill has cut in half.

    Raises ValueError that names a damaged line.
    """
    *lines, _ = path.read_text().split("\n")
    records = []
    for number, line in enumerate(lines, 1):
        try:
            records.append(json.loads(line))
        except ValueError as error:
            raise ValueError(f"{path}, line {number} is damaged: {error}") from error
    return records


def keep_steps(path: Path, last_step: int) -> None:
    """Cut a JSON Lines file after last_step: a resumed run makes the later steps again."""
    if path.exists():
        kept = [record for record in read_lines(path) if record["step"] <= last_step]
        text = "".join(json.dumps(record) + "\n" for record in kept)
        write_atomically(path, lambda file: file.write_text(text))


def lock(path: Path, timeout: float = 5):
    """Lock a file in a `with` block. ValueError if it stays locked for `timeout` seconds."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        return filelock.FileLock(path).acquire(timeout=timeout)
    except filelock.Timeout:
        raise ValueError(
            f"another process is writing in {path.parent}: wait for it, or use another folder"
        ) from None


def check_same(path: Path, config: dict, may_differ: set[str]) -> None:
    """Raise ValueError if options differ from those in the JSON file `path`, except may_differ."""
    saved = read_json(path)
    changed = [
        f"{name} was {saved.get(name)} and is now {value}"
        for name, value in config.items()
        if name not in may_differ and saved.get(name) != value
    ]
    if changed:
        raise ValueError(
            f"output_dir {path.parent} holds results of other options: {'; '.join(changed)}. Use"
            " the old values or another folder"
        )


def write_config(path: Path, config: dict, may_differ: set[str]) -> None:
    """Write the options of a folder of runs. ValueError if they differ from earlier commands'."""
    if path.exists():
        if not config["resume"]:
            raise ValueError(
                f"output_dir {path.parent} holds runs: add --resume, or use another folder"
            )
        check_same(path, config, may_differ)
        made = max((max(checkpoints(run), default=0) for run in path.parent.iterdir()), default=0)
        if config["steps"] < made:
            raise ValueError(
                f"steps must be at least {made}, got {config['steps']}: {path.parent} holds a"
                " checkpoint of that step, and runs cannot shrink"
            )
    write_json(path, config)


# ---------------------------------------------------------------- checkpoints
def save_checkpoint(folder: Path, step: int, model, tokenizer, optimizer, waiting: list) -> None:
    """Write folder/checkpoint-STEP: a model that transformers loads, and state.pt.

    state.pt holds the optimizer, the partial rollouts that wait, and torch's random states. Older
    checkpoints are then removed.
    """
    import torch

    state = {
        "optimizer": optimizer.state_dict(),
        "waiting": waiting,
        "rng": torch.get_rng_state(),
    }
    if model.device.type == "cuda":
        state["cuda_rng"] = torch.cuda.get_rng_state(model.device)

    def write(path: Path) -> None:
        model.save_pretrained(path)
        tokenizer.save_pretrained(path)
        torch.save(state, path / "state.pt")

    write_atomically(folder / f"checkpoint-{step}", write)
    remove_older_checkpoints(folder)


def remove_older_checkpoints(folder: Path) -> None:
    """Remove all checkpoints of a run but the newest."""
    found = checkpoints(folder)
    for step in sorted(found)[:-1]:
        shutil.rmtree(found[step])


def checkpoints(folder: Path) -> dict[int, Path]:
    """Return step -> folder checkpoint-STEP; a user's checkpoint-5-keep is left alone."""
    found = {}
    for path in folder.glob("checkpoint-*"):
        step = path.name.removeprefix("checkpoint-")
        if step.isdecimal():
            found[int(step)] = path
    return found


def restore(checkpoint: Path, optimizer, device: str) -> list:
    """Set the optimizer and torch's random states to those of a checkpoint.

    Returns the partial rollouts that wait. Raises ValueError that names the file if it is damaged.
    """
    import torch

    path = checkpoint / "state.pt"
    try:
        # On the CPU first: load_state_dict moves to the device what belongs there.
        state = torch.load(path, map_location="cpu", weights_only=True)
        optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["rng"])
        if "cuda_rng" in state and device != "cpu":
            torch.cuda.set_rng_state(state["cuda_rng"], device)
        return state["waiting"]
    except Exception as error:  # torch raises many kinds for a cut or empty file
        raise ValueError(
            f"{path} is damaged ({type(error).__name__}: {error}): delete the run's folder to begin"
            " the run again"
        ) from error


# ---------------------------------------------------------------- processes
def progress_bar(steps: range, name: str):
    """Return `steps` with a progress bar: that of this process, below those of the others."""
    identity = multiprocessing.current_process()._identity
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
    import torch

    if one_thread:
        torch.set_num_threads(1)
    tasks = [(name, partial(*call)) for name, call in calls.items()]
    if jobs > 1:
        tasks = _in_processes(calls, jobs)
    failed = []
    is_killed = False
    for name, finish in tasks:
        try:
            finish()
            tqdm.write(f"{name}: done")
        except BrokenProcessPool:
            failed.append(name)
            is_killed = True
        except (Exception, SystemExit) as error:
            failed.append(name)
            tqdm.write(f"{name}: {_cause(error)}", file=sys.stderr)
        gc.collect()  # frees what the last model holds before the next one is loaded
    if is_killed:
        tqdm.write(KILLED, file=sys.stderr)
    return failed


def _in_processes(calls: dict[str, tuple], jobs: int):
    """Make the calls in `jobs` processes; yield the name of each that has ended, and its result."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, spawn, _begin_worker) as pool:
        names = {pool.submit(*call): name for name, call in calls.items()}
        try:
            for future in as_completed(names):
                yield names[future], future.result
        except (KeyboardInterrupt, GeneratorExit):  # here, or where the results are used
            for worker in multiprocessing.active_children():
                worker.terminate()
            raise


def _begin_worker() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends its workers
    threading.Thread(target=_end_with_parent, daemon=True).start()
    import torch

    torch.set_num_threads(1)
    _silence_libraries()


def _end_with_parent() -> None:
    """End a worker when its parent is killed: a resumed command would write the same files."""
    multiprocessing.parent_process().join()
    os._exit(1)


def _silence_libraries() -> None:
    """Turn off the progress bars and notes that would break the bar of the runs."""
    import transformers

    warnings.simplefilter("ignore", FutureWarning)  # of transformers and peft, for developers
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # a note for every retry
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


def _cause(error: BaseException) -> str:
    """Return one line for what users can mend, and a traceback for anything else."""
    if type(error).__name__ == "OutOfMemoryError":  # torch's
        return OUT_OF_MEMORY
    if isinstance(error, (ValueError, OSError, ArithmeticError)):
        return f"{error}"
    return "".join(traceback.format_exception(error))


# ---------------------------------------------------------------- the command line
def parse(kind: type, arguments: list[str] | None, description: str):
    """Return an instance of the options' dataclass from the command line.

    --help prints the description and every option with its default. Raises ValueError for an
    unknown option. Options cannot be abbreviated, because --rho for --rho0 would silently be
    another experiment.
    """
    from transformers import HfArgumentParser

    _silence_libraries()
    arguments = sys.argv[1:] if arguments is None else arguments
    if "--help" in arguments or "-h" in arguments:
        print(description)  # argparse would fill its lines
    parser = HfArgumentParser(kind, usage="%(prog)s [--OPTION VALUE ...]", allow_abbrev=False)
    options, unknown = parser.parse_known_args(arguments)
    if unknown:
        raise ValueError(f"{unknown[0]} is no option: --help lists them")
    return kind(**vars(options))


def check_values(options, least: dict[str, float]) -> None:
    """Raise ValueError for a number below its least value or a missing device.

    Every value of a list counts. NaN and infinity are refused, too.
    """
    import torch

    for name, smallest in least.items():
        values = getattr(options, name)
        for value in values if isinstance(values, list) else [values]:
            if not smallest <= value < math.inf:
                raise ValueError(f"{name} must be finite and at least {smallest}, got {value}")
    if not re.fullmatch(r"cpu|cuda(:\d+)?", options.device):
        raise ValueError(f"device must be cpu, cuda or cuda:N, got {options.device!r}")
    try:
        torch.empty(0, device=options.device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"device: torch does not see {options.device!r}") from error


def command(name: str, main: Callable[[], int], if_interrupted: str) -> None:
    """Run `main` as a script and exit with its status; errors that users can mend take one line."""
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print(f"\n{if_interrupted}", file=sys.stderr)
        sys.exit(130)
    except (ValueError, OSError, RuntimeError) as error:
        sys.exit(f"{name}: {_cause(error)}")
