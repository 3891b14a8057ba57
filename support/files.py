"""Files of long runs: atomic writes, JSON Lines, locks and saved options."""

import json
import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import filelock


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
    """Add a line to a JSON Lines file. Floats get six digits; NaN and infinity become null."""
    rounded = {}
    for name, value in record.items():
        if isinstance(value, float):
            value = float(f"{value:.6g}") if math.isfinite(value) else None
        rounded[name] = value
    with path.open("a") as file:
        file.write(json.dumps(rounded) + "\n")


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
            f"{path} has other options: {'; '.join(changed)}. Use the old values or another"
            " output_dir"
        )
