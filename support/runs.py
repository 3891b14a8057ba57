"""What train.py and eval_aime.py need around their work.

Options from a dataclass, files that a kill leaves whole, checkpoints, and runs side by side.
"""

import gc
import json
import math
import multiprocessing
import os
import shutil
import signal
import sys
import threading
import traceback
import warnings
from argparse import RawDescriptionHelpFormatter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import MISSING, field, fields
from pathlib import Path

import torch


# ---------------------------------------------------------------- options
def option(default, help: str, *, least: float = 0, may_change: bool = False):
    """Return a dataclass field: an option with its default and help.

    least: the least value of a number, which `check_options` reads
    may_change: a command that continues earlier work may give another value
    """
    if default and default is not MISSING:
        help = f"{help} (default: {default})"
    settings = {"metadata": {"help": help, "least": least}, "compare": not may_change}
    if isinstance(default, list):
        return field(default_factory=default.copy, **settings)
    return field(default=default, **settings)


def parse(options_class: type, arguments: list[str] | None, description: str):
    """Return an instance of a dataclass, whose fields come from `option`, from the command line.

    Options cannot be abbreviated, because --rho for --rho0 would silently be another experiment.
    """
    from transformers import HfArgumentParser  # slow

    class Parser(HfArgumentParser):  # passes all metadata on to add_argument
        def add_argument(self, *names, least=0, **settings):
            return super().add_argument(*names, **settings)

    silence_libraries()
    parser = Parser(
        options_class,
        usage="%(prog)s [--OPTION VALUE ...]",
        description=description,
        formatter_class=RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    # An unknown option ends here, before the class finds that another one is missing.
    return options_class(**vars(parser.parse_args(arguments)))


def check_options(options) -> None:
    """Raise ValueError for a number below its option's least value, NaN and infinity."""
    for one in fields(options):
        value = getattr(options, one.name)
        least = one.metadata["least"]
        if isinstance(value, int | float) and not least <= value < math.inf:
            raise ValueError(f"{one.name} must be finite and at least {least}, got {value}")


def check_same(path: Path, options) -> None:
    """Raise ValueError if an option that may not change differs from that in the JSON file."""
    saved = read_json(path)
    for one in fields(options):
        before = saved.get(one.name)
        now = getattr(options, one.name)
        if one.compare and before != now:
            raise ValueError(f"{one.name} was {before} in {path} and is now {now}")


def command(name: str, main: Callable[[], int], if_interrupted: str) -> None:
    """Run `main` as a script and exit with its status; print one line for what users can fix."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends it as Ctrl-C does
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(f"\n{if_interrupted}")
    except (ValueError, OSError) as error:
        sys.exit(f"{name}: {error}")


def silence_libraries() -> None:
    """Turn off the progress bars and notes of transformers, which would bury those of the runs."""
    import transformers  # slow

    warnings.simplefilter("ignore", FutureWarning)  # of transformers and peft, for developers
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


# ---------------------------------------------------------------- files
def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Let write(temporary) make a file or a new folder, then rename that to `path`."""
    temporary = path.with_name(f".{path.name}.unfinished")
    shutil.rmtree(temporary, ignore_errors=True)  # left by a process that was killed
    write(temporary)
    os.replace(temporary, path)


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically."""
    write_atomically(path, lambda file: file.write_text(text))


def write_json(path: Path, content: dict) -> None:
    """Write a JSON object atomically."""
    write_text(path, json.dumps(content, indent=1) + "\n")


def read_json(path: Path) -> dict:
    """Read a JSON object."""
    return json.loads(path.read_text())


def append_line(path: Path, record: dict) -> None:
    """Add a line to a JSON Lines file. NaN becomes null, because JSON has none."""
    values = {name: None if value != value else value for name, value in record.items()}
    with path.open("a") as file:
        file.write(json.dumps(values) + "\n")


def read_lines(path: Path) -> list[dict]:
    """Read a JSON Lines file, without a last line that a kill has cut in half."""
    *lines, _ = path.read_text().split("\n")
    return [json.loads(line) for line in lines]


def keep_steps(folder: Path, last_step: int) -> None:
    """Cut JSON Lines files after last_step: a resumed run makes the later steps again."""
    for path in folder.glob("*.jsonl"):
        kept = [json.dumps(line) for line in read_lines(path) if line["step"] <= last_step]
        write_text(path, "".join(line + "\n" for line in kept))


# ---------------------------------------------------------------- checkpoints
def save_checkpoint(run, step: int) -> None:
    """Write a train.Run as checkpoint-STEP in its folder; remove older ones, unless all are kept.

    state.pt holds the optimizer, the random states, and unfinished responses of partial rollouts.
    """
    state = {
        "optimizer": run.optimizer.state_dict(),
        "unfinished": run.unfinished,
        "rng": torch.get_rng_state(),
    }
    if run.policy.device.type == "cuda":
        state["cuda_rng"] = torch.cuda.get_rng_state(run.policy.device)

    def write(path: Path) -> None:
        run.policy.save_pretrained(path)
        run.tokenizer.save_pretrained(path)
        torch.save(state, path / "state.pt")

    older = [] if run.options.keep_checkpoints else checkpoints(run.folder)
    write_atomically(run.folder / f"checkpoint-{step}", write)
    for previous in older:
        shutil.rmtree(run.folder / f"checkpoint-{previous}")


def checkpoints(folder: Path) -> list[int]:
    """Return the steps of all checkpoint-STEP; a user's checkpoint-5-keep is left alone."""
    steps = [path.name.removeprefix("checkpoint-") for path in folder.glob("checkpoint-*")]
    return [int(step) for step in steps if step.isdecimal()]


def restore(run, checkpoint: Path) -> None:
    """Set optimizer, unfinished responses and torch's random states to those of a checkpoint."""
    try:
        # To the CPU first: load_state_dict moves to the device what belongs there.
        state = torch.load(checkpoint / "state.pt", map_location="cpu", weights_only=True)
    except Exception as error:  # of many kinds
        raise ValueError(
            f"{checkpoint} is damaged. Remove it, and --resume continues from an older one or the"
            " start"
        ) from error
    run.optimizer.load_state_dict(state["optimizer"])
    run.unfinished = state["unfinished"]
    torch.set_rng_state(state["rng"])
    if "cuda_rng" in state and run.policy.device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda_rng"], run.policy.device)


# ---------------------------------------------------------------- side by side
def run_side_by_side(calls: dict[str, Callable], jobs: int) -> list[str]:
    """Make every call, `jobs` at a time; return the names of those that failed.

    Calls that run side by side have a process with one thread each. A call that fails does not stop
    the rest. Ctrl-C ends all of them. Raises ValueError if a process was killed.
    """
    if min(jobs, len(calls)) == 1:
        return [name for name, call in calls.items() if not _succeeds(name, call)]
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, spawn, _begin_worker) as pool:
        try:
            succeeds = pool.map(_succeeds, calls.keys(), calls.values())
            return [name for name, success in zip(calls, succeeds) if not success]
        except KeyboardInterrupt:
            for worker in multiprocessing.active_children():
                worker.terminate()
            raise
        except BrokenProcessPool as error:
            raise ValueError(
                "a process was killed, perhaps for lack of memory: use fewer --jobs, and --resume"
            ) from error


def _succeeds(name: str, call: Callable) -> bool:
    """Make a call and say how it ended: one line for what users can fix, else a traceback."""
    reason = None
    try:
        call()
        print(f"{name}: done", flush=True)
    except torch.OutOfMemoryError as error:
        reason = (
            f"{error} Lower --micro_batch_tokens, or use --gradient_checkpointing or --lora_rank"
        )
    except (ValueError, OSError) as error:
        reason = error
    except Exception:
        reason = traceback.format_exc()
    if reason:
        print(f"{name}: {reason}", file=sys.stderr)
    gc.collect()  # frees what the model holds before the next one is loaded
    return reason is None


def _begin_worker() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends its workers
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    silence_libraries()


def _end_with_parent() -> None:
    """End a worker when its parent is killed: a resumed command would write the same files."""
    multiprocessing.parent_process().join()
    os._exit(1)
