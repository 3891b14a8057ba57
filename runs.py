"""What keeps long runs safe: files that are whole or not there, locks, checkpoints, processes.

torch and transformers are imported in the functions that need them: plot.py takes the files alone,
and is there in half the time.
"""

import dataclasses
import gc
import json
import logging
import math
import multiprocessing
import os
import resource
import shutil
import signal
import sys
import threading
import traceback
import warnings
from argparse import ArgumentDefaultsHelpFormatter, RawDescriptionHelpFormatter
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from difflib import get_close_matches
from multiprocessing import get_context
from pathlib import Path

import filelock
from safetensors import SafetensorError
from tqdm import tqdm

LOCK_S = 5  # seconds; a killed process may need a moment to let go of a lock
OUT_OF_MEMORY = (
    "out of memory on the device: lower --micro_batch_tokens (of eval_aime.py: --batch_size); then"
    " add --gradient_checkpointing; then lower --group_size or --max_new_tokens; then train"
    " adapters (--lora_rank). PYTORCH_ALLOC_CONF=expandable_segments:True before the command (older"
    " torch: PYTORCH_CUDA_ALLOC_CONF) wastes less where lengths differ. The same command continues"
    " (of train.py: with --resume)"
)
AT_LEAST_0 = (0, math.inf)  # limits of an option
AT_LEAST_1 = (1, math.inf)
WORKER_DIED = "a process was killed, perhaps as memory ran out: try fewer --jobs"


# ---------------------------------------------------------------- files
def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Write a file, or a new folder, that is never seen half written.

    write(temporary) fills a file or a folder beside `path`, which is then moved to `path`. If it
    fails, `path` is as it was. Two processes must not write the same path: see `lock`.
    """
    temporary = path.with_name(f".{path.name}.unfinished")
    remove(temporary)  # of a process that was killed
    try:
        write(temporary)
        os.replace(temporary, path)
    except (OSError, RuntimeError, SafetensorError) as error:  # torch's, and safetensors'
        remove(temporary)  # a full disk needs the room
        raise OSError(f"{path} cannot be written ({error}): is the disk full?") from error


def remove(path: Path) -> None:
    """Remove a file or a folder, if it is there."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def write_json(path: Path, content: dict) -> None:
    """Write a JSON object atomically."""
    text = json.dumps(content, indent=1) + "\n"
    write_atomically(path, lambda file: file.write_text(text))


def read_json(path: Path) -> dict:
    """Read a JSON object. Raises ValueError that names the file if it is damaged."""
    return json_object(path.read_bytes(), f"{path}")


def json_object(text: bytes, place: str) -> dict:
    """The object that `text` is. Raises ValueError that names its place if it is none."""
    content = None
    with suppress(ValueError):
        content = json.loads(text)
    if not isinstance(content, dict):
        raise ValueError(f"{place} is damaged: {text[:60]!r}; restore it, or delete it")
    return content


def append_line(path: Path, record: dict) -> None:
    """Add a line to a JSON Lines file; floats have six digits, and NaN is null.

    What a kill leaves are whole lines, but perhaps for the last.
    """
    rounded = {}
    for name, value in record.items():
        if isinstance(value, float):
            value = float(f"{value:.6g}") if math.isfinite(value) else None
        rounded[name] = value
    try:
        with path.open("a") as file:
            file.write(json.dumps(rounded) + "\n")
    except OSError as error:
        raise OSError(f"{path} cannot be written ({error}): is the disk full?") from error


def read_lines(path: Path) -> list[dict]:
    """Read a JSON Lines file of objects; a last line without its end is left out.

    Raises ValueError naming the first line that is damaged.
    """
    records = []
    for number, line in enumerate(path.read_bytes().splitlines(keepends=True), 1):
        if line.endswith(b"\n"):
            records.append(json_object(line, f"{path}, line {number}"))
    return records


def keep_steps(path: Path, last_step: int) -> None:
    """Cut off what a JSON Lines file holds of steps after last_step: they are made again."""
    if not path.exists():
        return
    kept = []
    for line, record in zip(path.read_bytes().splitlines(keepends=True), read_lines(path)):
        if not isinstance(record.get("step"), int):
            raise ValueError(f'{path} is damaged, a line has no "step": restore it, or delete it')
        if record["step"] <= last_step:
            kept.append(line)
    write_atomically(path, lambda file: file.write_bytes(b"".join(kept)))


def lock(path: Path, timeout: float = LOCK_S):
    """Hold the lock file `path` for a `with` block, or from now on.

    Raises ValueError if another process holds it for `timeout` seconds; -1 waits for ever.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        return filelock.FileLock(path).acquire(timeout=timeout)
    except filelock.Timeout:
        raise ValueError(
            f"another process is writing in {path.parent}: wait for it, or take another folder"
        ) from None


def check_same(path: Path, config: dict, may_differ: set[str]) -> dict:
    """The values in the JSON file `path`. Raises ValueError, naming them, for those that differ.

    The names in may_differ are not compared.
    """
    saved = read_json(path)
    changed = []
    for name in sorted((saved.keys() | config.keys()) - may_differ):
        if saved.get(name) != config.get(name):
            changed.append(f"{name}: {saved.get(name)} there, {config.get(name)} now")
    if changed:
        raise ValueError(
            f"output_dir {path.parent} holds results of other options: {'; '.join(changed)}; take"
            " the old values, or another folder"
        )
    return saved


def write_config(path: Path, config: dict, may_differ: set[str]) -> dict:
    """Write the config of a folder of runs; the lock of the folder is held.

    Returns the one that was there, {} if there was none. Raises ValueError if there is one and
    config["resume"] is not set, or if they differ: all but the names in may_differ must be equal,
    and config["steps"] must not be fewer.
    """
    before = {}
    if path.exists():
        if not config["resume"]:
            raise ValueError(f"output_dir {path.parent} holds runs: add --resume, or take another")
        before = check_same(path, config, may_differ)
        steps = before.get("steps", 0)
        if steps > config["steps"]:
            raise ValueError(f"steps: {steps} in {path.parent}, {config['steps']} now; take more")
    write_json(path, config)
    return before


# ---------------------------------------------------------------- checkpoints
def save_checkpoint(folder: Path, step: int, model, tokenizer, state: dict) -> None:
    """Write folder/checkpoint-STEP: a model that transformers loads, and in it state.pt.

    That holds `state` and the random states. The checkpoint before is removed once this one is
    whole.
    """
    import torch

    state = state | {"rng": torch.get_rng_state()}
    if model.device.type == "cuda":
        state["cuda_rng"] = torch.cuda.get_rng_state(model.device)

    def write(path: Path) -> None:
        model.save_pretrained(path)
        tokenizer.save_pretrained(path)
        torch.save(state, path / "state.pt")

    write_atomically(folder / f"checkpoint-{step}", write)
    remove_older_checkpoints(folder)


def remove_older_checkpoints(folder: Path) -> None:
    """Remove all checkpoints of a run but the newest, also what a kill has left of one."""
    found = checkpoints(folder)
    for step in sorted(found)[:-1]:
        shutil.rmtree(found[step])


def checkpoints(folder: Path) -> dict[int, Path]:
    """Step -> folder checkpoint-STEP. Others beside them, such as checkpoint-5-keep, are none."""
    found = {}
    for path in folder.glob("checkpoint-*"):
        step = path.name.removeprefix("checkpoint-")
        if step.isdecimal():
            found[int(step)] = path
    return found


def restore(checkpoint: Path, device: str, names: set[str]) -> dict:
    """What save_checkpoint was given as `state`; sets the random states to those of that moment.

    Raises ValueError if it is damaged, or lacks one of the names.
    """
    import torch

    path = checkpoint / "state.pt"
    try:
        # On the CPU: load_state_dict moves to the device what must be there.
        state = torch.load(path, map_location="cpu", weights_only=True)
        torch.set_rng_state(state["rng"])
        if "cuda_rng" in state and device != "cpu":
            torch.cuda.set_rng_state(state["cuda_rng"], device)
        return {name: state[name] for name in names}
    except Exception as error:  # of many kinds: empty, cut, not a checkpoint
        raise ValueError(
            f"{path} is damaged ({type(error).__name__}: {error}): delete {checkpoint} to begin"
            " the run again"
        ) from error


# ---------------------------------------------------------------- processes
_messages = None  # in a worker: the queue to its parent
_bar = None  # in the parent: the progress bar


def report(note: str, steps: int = 0) -> None:
    """From wherever a run goes on: `steps` more are done; a note without steps is a line."""
    if _messages is not None:
        _messages.put((note, steps))
    elif _bar is None or not steps:
        tqdm.write(note)
    else:
        _bar.set_postfix_str(note, refresh=False)
        _bar.update(steps)


def run_side_by_side(calls: dict[str, tuple], jobs: int, steps: int) -> list[str]:
    """Make every call, `jobs` at a time, each in a process of its own if jobs > 1.

    calls: name -> (function, *arguments); steps: how many all of them will report. Each call has
    one thread, so that its numbers do not depend on the others. One that fails is named, and does
    not stop the rest, unless its process was killed. Returns the names of the failed ones. Ctrl-C
    ends all of them.
    """
    global _bar
    failed = []
    interval = 0.5 if sys.stderr.isatty() else 30
    with tqdm(total=steps, unit="steps", mininterval=interval, disable=not calls) as _bar:
        for name, failure in (_in_processes if jobs > 1 else _in_this_process)(calls, jobs):
            tqdm.write(f"{name}: {failure or 'done'}", file=sys.stderr if failure else None)
            if failure:
                failed.append(name)
    _bar = None
    return failed


def _in_this_process(calls: dict[str, tuple], _: int):
    """Yield the name of every call and why it failed, "" if it did not."""
    import torch

    torch.set_num_threads(1)
    for name, (function, *arguments) in calls.items():
        failure = ""
        try:
            function(*arguments)
        except (Exception, SystemExit) as error:
            failure = _cause(error)
        # Let go of all that the last model has held, before the next is loaded.
        gc.collect()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
        yield name, failure


def _in_processes(calls: dict[str, tuple], jobs: int):
    """As _in_this_process."""
    spawn = get_context("spawn")
    messages = spawn.Queue()
    with ProcessPoolExecutor(min(jobs, len(calls) or 1), spawn, _begin_worker, (messages,)) as pool:
        names = {pool.submit(*call): name for name, call in calls.items()}
        pending = set(names)
        try:
            while pending:
                done, pending = wait(pending, timeout=0.1, return_when=FIRST_COMPLETED)
                while not messages.empty():  # this process alone reads
                    report(*messages.get())
                for future in done:
                    error = future.exception()
                    yield names[future], _cause(error) if error else ""
        except KeyboardInterrupt:
            for worker in multiprocessing.active_children():
                worker.terminate()
            raise


def _begin_worker(messages) -> None:
    global _messages
    _messages = messages
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends its workers
    threading.Thread(target=_end_with_parent, daemon=True).start()
    import torch

    torch.set_num_threads(1)
    _silence_libraries()


def _silence_libraries() -> None:
    """Their bars and notes would break the bar of the runs. What fails is raised all the same."""
    import transformers

    warnings.simplefilter("ignore", FutureWarning)  # transformers' and peft's, for developers
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # not every retry of a request
    os.environ["HF_DATASETS_DISABLE_PROGRESS_BARS"] = "1"  # datasets is imported later, if at all
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


def _end_with_parent() -> None:
    """A worker must not outlive a killed parent: a resumed command would write the same files."""
    multiprocessing.parent_process().join()
    os._exit(1)


def _cause(error: BaseException) -> str:
    """What the user can mend in one line; anything else with its traceback."""
    if type(error).__name__ == "OutOfMemoryError":  # torch's, a RuntimeError
        return OUT_OF_MEMORY
    if isinstance(error, BrokenProcessPool):
        return WORKER_DIED
    if isinstance(error, (ValueError, OSError, ArithmeticError)):
        return f"{error}"
    return "".join(traceback.format_exception(error))


def peak_memory(device: str) -> int:
    """Bytes that this process has held at most, of the device's memory or of its own."""
    if device == "cpu":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # kB on Linux
    import torch

    return torch.cuda.max_memory_allocated(device)


# ---------------------------------------------------------------- the command line
class HelpFormatter(ArgumentDefaultsHelpFormatter, RawDescriptionHelpFormatter):
    """Keeps the lines of the description, and adds to every option its default."""


def option(default, help: str):
    """A field of a dataclass of options: its default, or dataclasses.MISSING, and what --help says.

    A list is copied for every instance.
    """
    metadata = {"help": help}
    if isinstance(default, list):
        return dataclasses.field(default_factory=default.copy, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def parse(kind: type, arguments: list[str] | None, description: str):
    """An instance of the options' dataclass from the command line. Silences libraries, too.

    Raises ValueError for an unknown option, with the nearest one. Options cannot be abbreviated:
    --rho would silently be another experiment than --rho0.
    """
    from transformers import HfArgumentParser

    _silence_libraries()
    parser = HfArgumentParser(
        kind, description=description, formatter_class=HelpFormatter, allow_abbrev=False
    )
    options, unknown = parser.parse_known_args(arguments)
    if unknown:  # before the options are checked, which would name another
        names = [field.name for field in dataclasses.fields(kind)]
        nearest = get_close_matches(unknown[0].strip("-"), names, n=1)
        hint = f"do you mean --{nearest[0]}?" if nearest else "--help lists them"
        raise ValueError(f"{unknown[0]} is no option: {hint}")
    return kind(**vars(options))


def check_options(options, limits: dict[str, tuple[float, float]]) -> None:
    """Raise ValueError naming the first option that is wrong: outside its limits, least and most
    (of a list every value counts), an empty output_dir, a device that is not there.
    """
    import torch

    for name, (least, most) in limits.items():
        value = getattr(options, name)
        for number in value if isinstance(value, list) else [value]:
            if not least <= number <= most:
                raise ValueError(f"{name} must be from {least} to {most}, got {number}")
    if not options.output_dir:
        raise ValueError("output_dir must name a folder, got ''")
    devices = ["cpu"]
    if torch.cuda.is_available():
        devices += ["cuda", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))]
    if options.device not in devices:
        raise ValueError(
            f"device must be one that torch sees here, {', '.join(devices)}; got {options.device!r}"
        )


def command(name: str, main: Callable[[], int], if_interrupted: str) -> None:
    """Run `main` as a script and exit with its status.

    What the user can mend (an option, a folder, a full disk, too little memory) takes one line and
    no traceback.
    """
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print(f"\n{if_interrupted}", file=sys.stderr)
        sys.exit(130)
    except (ValueError, OSError, RuntimeError) as error:
        sys.exit(f"{name}: {_cause(error)}")
