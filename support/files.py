"""Files that are whole or not there, lines that are added one by one, and locks."""

import json
import math
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import filelock

from support import workers

LOCK_S = 5  # a killed process may need a moment to let go of a lock


def to_json_number(value: float) -> float | None:
    """Six significant digits; null for what JSON has no number for."""
    return float(f"{value:.6g}") if math.isfinite(value) else None


def write_atomically(path: Path, write: Callable[[Path], None]) -> None:
    """Let `write` fill a file or a new folder beside `path`, then move it there: nobody ever sees half of it."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.unfinished")  # another process may be writing the same
    remove(temporary)  # left by a killed process of this number
    try:
        write(temporary)
        os.replace(temporary, path)
    finally:
        remove(temporary)  # if it is still there: a full disk needs the room


def remove(path: Path) -> None:
    """A file or a folder, if it is there."""
    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def write_json(path: Path, content) -> None:
    """Write JSON atomically."""
    write_atomically(path, lambda file: file.write_text(json.dumps(content, indent=1) + "\n"))


class Lines:
    """A JSON Lines file to add to. Each line is one unbuffered write, so that an interrupted run leaves whole lines. What came
    after keep_bytes is cut off, as a continued run writes it again. ValueError if the file is shorter than that."""

    def __init__(self, path: Path, keep_bytes: int = 0):
        self.path, self.file = path, open(path, "ab", buffering=0)
        if self.size() < keep_bytes:
            raise ValueError(f"{path} has {self.size()} bytes, its checkpoint was made at {keep_bytes}: it was cut or replaced")
        self.file.truncate(keep_bytes)

    def write(self, record: dict) -> None:
        """Add a line. OSError, with all lines before it whole, if there is no room for it."""
        rounded = {k: to_json_number(v) if isinstance(v, float) else v for k, v in record.items()}
        line, before = (json.dumps(rounded) + "\n").encode(), self.size()
        with suppress(OSError):
            if self.file.write(line) == len(line):  # a full disk may take a part of it without an error
                return
        self.file.truncate(before)
        raise OSError(f"{self.path}: no room for another line (is the disk full?); the {before} bytes before it are whole")

    def size(self) -> int:
        return os.fstat(self.file.fileno()).st_size


def read_lines(path: Path, unfinished: bool = False) -> list[dict]:
    """A JSON Lines file of objects; empty lines are left out. ValueError naming the line that is damaged; unfinished: a last
    line without its end is left out, as the process that writes the file may be at it."""
    found = []
    for number, line in enumerate(path.read_bytes().splitlines(keepends=True), 1):
        if not line.endswith(b"\n") and unfinished:
            break
        try:
            found += [dict(**json.loads(line))] if line.strip() else []  # bytes: json skips a byte order mark there
        except (ValueError, TypeError) as error:
            raise ValueError(f"{path}, line {number} is damaged: {line[:60]!r}") from error
    return found


def lock(path: Path, waiting: str = ""):
    """Hold the lock file `path` for a `with` block. ValueError if it stays taken LOCK_S; with `waiting`, say so and wait."""
    held = filelock.FileLock(path)
    try:
        return held.acquire(timeout=0 if waiting else LOCK_S)
    except filelock.Timeout:
        if not waiting:
            raise ValueError(f"{path.parent}: another process is writing there; wait for it, or take another folder") from None
        (workers.report if workers._messages else workers.say)(waiting)
        return held.acquire()


def differences(saved: dict, now: dict, may_differ: set[str] = frozenset()) -> str:
    """ "name: old there, new now; ..." for all that differs; "" if nothing does."""
    names = sorted(name for name in (saved.keys() | now.keys()) - may_differ if saved.get(name) != now.get(name))
    return "; ".join(f"{name}: {saved.get(name)} there, {now.get(name)} now" for name in names)
