"""What train.py and eval_aime.py need around their work.

Options from a dataclass, files that a kill leaves whole, checkpoints, and runs side by side.
"""

import gc
import json
import logging
import math
import multiprocessing
import os
import shutil
import signal
import sys
import threading
import traceback
import warnings
from argparse import ArgumentDefaultsHelpFormatter, RawDescriptionHelpFormatter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, field, fields
from pathlib import Path

import filelock
import torch
from tqdm import tqdm


# ---------------------------------------------------------------- options
def option(
    default,
    help: str,
    *,
    least: float | None = None,
    may_change: bool = False,
    by_task: tuple | None = None,
):
    """Return a dataclass field: an option with its help, least value and default.

    may_change: a command that continues earlier work may give another value
    by_task: the defaults of Countdown and of --data, in place of None
    """
    if by_task:
        help = f"{help} (default: {by_task[0]}; with --data {by_task[1]})"
    metadata = {"help": help, "least": least, "may_change": may_change, "by_task": by_task}
    if isinstance(default, list):
        return field(default_factory=default.copy, metadata=metadata)
    return field(default=default, metadata=metadata)


class HelpFormatter(ArgumentDefaultsHelpFormatter, RawDescriptionHelpFormatter):
    """Print the description as it is, and every default that is not empty."""

    def _get_help_string(self, action):
        has_default = action.default not in (None, "", [])
        return super()._get_help_string(action) if has_default else action.help


def parse(options_class: type, arguments: list[str] | None, description: str):
    """Return an instance of a dataclass, whose fields come from `option`, from the command line.

    Options cannot be abbreviated, because --rho for --rho0 would silently be another experiment.
    """
    from transformers import HfArgumentParser  # slow

    class Parser(HfArgumentParser):
        def add_argument(self, *names, least=None, may_change=None, by_task=None, **settings):
            return super().add_argument(*names, **settings)  # which knows no other metadata

    silence_libraries()
    parser = Parser(
        options_class,
        usage="%(prog)s [--OPTION VALUE ...]",
        description=description,
        formatter_class=HelpFormatter,
        allow_abbrev=False,
    )
    # An unknown option ends here, before the class finds that another one is missing.
    return options_class(**vars(parser.parse_args(arguments)))


def check_options(options) -> None:
    """Raise ValueError for a number below its least value, NaN and infinity."""
    for one in fields(options):
        least = one.metadata["least"]
        value = getattr(options, one.name)
        if least is not None and not least <= value < math.inf:
            raise ValueError(f"{one.name} must be finite and at least {least}, got {value}")


def check_same(path: Path, options) -> None:
    """Raise ValueError if an option that may not change differs from that in the JSON file."""
    saved = read_json(path)
    for one in fields(options):
        value = getattr(options, one.name)
        if saved.get(one.name) != value and not one.metadata["may_change"]:
            raise ValueError(
                f"{one.name} was {saved.get(one.name)} in {path} and is now {value}: use the old"
                " value or another output_dir"
            )


def write_options(path: Path, options) -> None:
    """Write the options to a JSON file."""
    write_json(path, asdict(options))


def command(name: str, main: Callable[[], int], if_interrupted: str) -> None:
    """Run `main` as a script and exit with its status; print one line for what users can fix."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends it as Ctrl-C does
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print(f"\n{if_interrupted}", file=sys.stderr)
        sys.exit(130)
    except (ValueError, OSError) as error:
        sys.exit(f"{name}: {error}")


def silence_libraries() -> None:
    """Turn off the progress bars and notes that would break the bar of the runs."""
    import transformers  # slow

    warnings.simplefilter("ignore", FutureWarning)  # of transformers and peft, for developers
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # a note for every retry
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


# ---------------------------------------------------------------- files
def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Let write(temporary) make a file or a new folder, then rename that to `path`."""
    temporary = path.with_name(f".{path.name}.unfinished")
    if temporary.is_dir():  # left by a process that was killed
        shutil.rmtree(temporary)
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


def keep_steps(path: Path, last_step: int) -> None:
    """Cut a JSON Lines file after last_step: a resumed run makes the later steps again."""
    if path.exists():
        kept = [record for record in read_lines(path) if record["step"] <= last_step]
        write_text(path, "".join(json.dumps(record) + "\n" for record in kept))


def lock(path: Path, timeout: float = 5):
    """Lock a file in a `with` block. A timeout of -1 waits for ever.

    Raises ValueError if another process keeps the lock for `timeout` seconds.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        return filelock.FileLock(path).acquire(timeout=timeout)
    except filelock.Timeout:
        raise ValueError(
            f"another process is writing in {path.parent}: wait for it, or use another folder"
        ) from None


# ---------------------------------------------------------------- checkpoints
def save_checkpoint(folder: Path, step: int, state, keep: bool = False) -> None:
    """Write a train.TrainState as folder/checkpoint-STEP; remove older ones unless `keep`.

    state.pt holds the optimizer, the random states, and unfinished responses of partial rollouts.
    """
    saved = {
        "optimizer": state.optimizer.state_dict(),
        "unfinished": state.unfinished,
        "rng": torch.get_rng_state(),
    }
    if state.policy.device.type == "cuda":
        saved["cuda_rng"] = torch.cuda.get_rng_state(state.policy.device)

    def write(path: Path) -> None:
        state.policy.save_pretrained(path)
        state.tokenizer.save_pretrained(path)
        torch.save(saved, path / "state.pt")

    write_atomically(folder / f"checkpoint-{step}", write)
    for older, path in checkpoints(folder).items():
        if older < step and not keep:
            shutil.rmtree(path)


def checkpoints(folder: Path) -> dict[int, Path]:
    """Return step -> folder checkpoint-STEP; a user's checkpoint-5-keep is left alone."""
    folder_of_step = {}
    for path in folder.glob("checkpoint-*"):
        step = path.name.removeprefix("checkpoint-")
        if step.isdecimal():
            folder_of_step[int(step)] = path
    return folder_of_step


def restore(checkpoint: Path, optimizer, device: str) -> list:
    """Set the optimizer and torch's random states to those of a checkpoint.

    Returns the unfinished responses of partial rollouts. Raises ValueError for a damaged state.pt.
    """
    try:
        # To the CPU first: load_state_dict moves to the device what belongs there.
        state = torch.load(checkpoint / "state.pt", map_location="cpu", weights_only=True)
    except Exception as error:  # of many kinds
        raise ValueError(
            f"{checkpoint} is damaged ({type(error).__name__}). Remove this folder: --resume then"
            " continues from the checkpoint before it, or else from the start"
        ) from error
    optimizer.load_state_dict(state["optimizer"])
    torch.set_rng_state(state["rng"])
    if "cuda_rng" in state and device != "cpu":
        torch.cuda.set_rng_state(state["cuda_rng"], device)
    return state["unfinished"]


# ---------------------------------------------------------------- side by side
def progress_bar(steps: range, name: str):
    """Return `steps` with a progress bar. Each process draws its bar in a line of its own."""
    identity = multiprocessing.current_process()._identity  # (n,) in worker n, else ()
    line = identity[0] - 1 if identity else 0
    return tqdm(
        steps,
        desc=name,
        initial=steps.start - 1,
        total=steps.stop - 1,
        position=line,
        leave=False,
        disable=None,  # where there is no terminal
    )


def report_step(bar, name: str, step: int, record: dict) -> None:
    """Show the figures of a step behind the bar, or as a line where there is no terminal."""
    seconds = record["rollout_s"] + record["update_s"]
    figures = (
        f"reward {record['reward']:.3f}, entropy {record['entropy']:.3f},"
        f" length {record['response_length']:.0f}, cut off {record['truncated']:.0%},"
        f" {seconds:.1f} s"
    )
    bar.set_postfix_str(figures)
    if bar.disable:
        print(f"{name}: step {step} of {bar.total}: {figures}", flush=True)


def run_side_by_side(calls: dict[str, tuple], jobs: int, one_thread: bool) -> list[str]:
    """Make every call, `jobs` at a time; return the names of those that failed.

    calls: name -> (function, *arguments). With jobs > 1 each runs in a process with one thread;
    with jobs = 1, one_thread limits this process. A call that fails does not stop the rest. Ctrl-C
    ends all of them. Raises ValueError if a process was killed.
    """
    if jobs == 1:
        if one_thread:
            torch.set_num_threads(1)
        return [name for name, call in calls.items() if not _succeeds(name, *call)]
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, spawn, _begin_worker) as pool:
        futures = {name: pool.submit(_succeeds, name, *call) for name, call in calls.items()}
        try:
            return [name for name, future in futures.items() if not future.result()]
        except KeyboardInterrupt:
            for worker in multiprocessing.active_children():
                worker.terminate()
            raise
        except BrokenProcessPool as error:
            raise ValueError(
                "a process was killed, perhaps because there was not enough memory: use fewer"
                " --jobs. --resume continues every run"
            ) from error


def _succeeds(name: str, function: Callable, *arguments) -> bool:
    """Make a call and say how it ended: one line for what users can fix, else a traceback."""
    reason = ""
    try:
        function(*arguments)
    except torch.OutOfMemoryError as error:
        reason = (
            f"{error}. Lower --micro_batch_tokens, or add --gradient_checkpointing; if the weights"
            " alone do not fit, --lora_rank"
        )
    except (ValueError, OSError, ArithmeticError) as error:
        reason = f"{error}"
    except Exception:
        reason = traceback.format_exc()
    gc.collect()  # frees what the model holds before the next one is loaded
    tqdm.write(f"{name}: {reason or 'done'}", file=sys.stderr if reason else sys.stdout)
    return not reason


def _begin_worker() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends its workers
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    silence_libraries()


def _end_with_parent() -> None:
    """End a worker when its parent is killed: a resumed command would write the same files."""
    multiprocessing.parent_process().join()
    os._exit(1)
