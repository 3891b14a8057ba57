"""Files that are whole or not there, lines that are added one by one, and locks."""

import json
import math
import os
import re
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import filelock

from support.workers import tell

LOCK_S = 5  # seconds; a killed process may need a moment to let go of a lock


# ------------------------------------------------------------------------- whole files
def write_atomically(path: Path, write: Callable[[Path], None]) -> None:
    """Write a file, or a new folder, that is never seen half written.

    write(temporary) fills a file or a folder beside `path`, which is then moved to `path`. If it
    fails, `path` is as it was and nothing is left beside it. The temporary name has the number
    of this process in it, as another process may be writing the same file.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.unfinished")
    remove(temporary)  # of a process that had this number and was killed
    try:
        write(temporary)
        os.replace(temporary, path)
    finally:
        remove(temporary)  # if it is still there: a full disk needs the room


def remove_leftovers(folder: Path) -> None:
    """Remove what killed processes have left half written in `folder`; if there is one.

    What a running process is writing stays.
    """
    for path in folder.glob(".*.unfinished"):
        written_by = re.fullmatch(r".+\.(\d+)\.unfinished", path.name)
        if written_by and not is_running(int(written_by[1])):
            remove(path)


def is_running(process: int) -> bool:
    """Whether there is a process with this number."""
    try:
        os.kill(process, 0)  # no signal: only the question
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):  # another user's; no number of a process
        return True
    return True


def remove(path: Path) -> None:
    """Remove a file or a folder, if it is there."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def write_json(path: Path, content) -> None:
    """Write JSON atomically."""
    text = json.dumps(content, indent=1) + "\n"
    write_atomically(path, lambda file: file.write_text(text))


# ------------------------------------------------------------------------- lines
class Lines:
    """A JSON Lines file to add to.

    Each line is one unbuffered write, so that an interrupted run leaves whole lines.

    Args:
        path: the file; it is made if it is not there.
        keep_bytes: what comes after this many bytes is cut off, as a continued run writes it
            again; 0 empties the file, None keeps all of it.

    Raises:
        ValueError: if the file is shorter than keep_bytes.
    """

    def __init__(self, path: Path, keep_bytes: int | None = None):
        self.path = path
        self.file = open(path, "ab", buffering=0)
        if keep_bytes is None:
            return
        if self.size() < keep_bytes:
            size = self.size()
            self.file.close()
            raise ValueError(
                f"{path} has {size} bytes, its checkpoint was made at {keep_bytes}: "
                "it was cut or replaced"
            )
        self.file.truncate(keep_bytes)

    def write(self, record: dict) -> None:
        """Add a line; floats have six digits. OSError, all lines before it whole, without room."""
        rounded = {}
        for name, value in record.items():
            rounded[name] = to_json_number(value) if isinstance(value, float) else value
        line = (json.dumps(rounded) + "\n").encode()
        size_before = self.size()
        with suppress(OSError):
            written = self.file.write(line)
            if written == len(line):
                return
        # A full disk may also take a part of the line without an error.
        self.file.truncate(size_before)
        raise OSError(
            f"{self.path}: no room for another line (is the disk full?); "
            f"the {size_before} bytes before it are whole"
        )

    def size(self) -> int:
        """Bytes that the file has."""
        return os.fstat(self.file.fileno()).st_size


def to_json_number(value: float) -> float | None:
    """Six significant digits; null for what JSON has no number for."""
    return float(f"{value:.6g}") if math.isfinite(value) else None


def read_lines(path: Path, unfinished: bool = False) -> list[dict]:
    """Read a JSON Lines file of objects; empty lines are left out.

    unfinished: whether a process may still be writing the file: a last line without its end is
    then left out. Raises ValueError naming the first line that is damaged.
    """
    records = []
    lines = path.read_bytes().splitlines(keepends=True)
    for number, line in enumerate(lines, 1):
        if unfinished and not line.endswith(b"\n"):
            break
        if not line.strip():
            continue
        try:
            record = json.loads(line)  # of bytes: json skips a byte order mark
        except ValueError as error:
            raise ValueError(f"{path}, line {number} is damaged: {line[:60]!r}") from error
        if not isinstance(record, dict):
            raise ValueError(f"{path}, line {number} is damaged, no object: {line[:60]!r}")
        records.append(record)
    return records


# ------------------------------------------------------------------------- locks, comparisons
def lock(path: Path, waiting: str = ""):
    """Hold the lock file `path` for a `with` block.

    If another process holds it, this one says `waiting` and waits; without such a text it raises
    ValueError after LOCK_S seconds.
    """
    file_lock = filelock.FileLock(path)
    try:
        return file_lock.acquire(timeout=0 if waiting else LOCK_S)
    except filelock.Timeout:
        if not waiting:
            raise ValueError(
                f"{path.parent}: another process is writing there; "
                "wait for it, or take another folder"
            ) from None
    tell(waiting)
    return file_lock.acquire()


def differences(saved: dict, now: dict, may_differ: set[str] = frozenset()) -> str:
    """ "name: old there, new now; ..." for all that differs; "" if nothing does."""
    texts = []
    for name in sorted((saved.keys() | now.keys()) - may_differ):
        if saved.get(name) != now.get(name):
            texts.append(f"{name}: {saved.get(name)} there, {now.get(name)} now")
    return "; ".join(texts)
