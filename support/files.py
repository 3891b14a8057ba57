"""Files of long runs: atomic writes, JSON Lines, locks, saved options and checkpoints.

torch is imported inside the functions that need it, because plot.py starts in half the time without
it.
"""

import json
import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import filelock


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
