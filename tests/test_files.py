"""support/files.py: files that are whole or not there, and lines that are added one by one."""

import json
import os
import resource
import subprocess
from pathlib import Path

import filelock
import pytest

from support import files
from support.files import Lines, read_lines, write_atomically, write_json


# ------------------------------------------------------------------------- whole files
def test_a_file_is_as_it_was_where_writing_it_fails(tmp_path):
    path = tmp_path / "file.json"
    write_json(path, {"a": 1})

    def crash(file):
        file.write_text("half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_atomically(path, crash)
    assert json.loads(path.read_text()) == {"a": 1}
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_is_written_also_where_a_killed_process_of_this_number_had_begun(tmp_path):
    begun = tmp_path / f".folder.{os.getpid()}.unfinished"
    begun.mkdir()
    (begun / "stale").write_text("")
    write_atomically(tmp_path / "folder", lambda folder: folder.mkdir())
    assert list(tmp_path.iterdir()) == [tmp_path / "folder"]
    assert not list((tmp_path / "folder").iterdir())


def test_two_processes_write_the_same_file_under_names_of_their_own(tmp_path):
    path = tmp_path / "file"

    def write_own_name(file):
        file.write_text(file.name)

    write_atomically(path, write_own_name)
    own_name = path.read_text()
    child = os.fork()
    if not child:
        write_atomically(path, write_own_name)
        os._exit(0)
    os.waitpid(child, 0)
    assert str(os.getpid()) in own_name
    assert str(child) in path.read_text()


def process_that_has_ended() -> int:
    """The number of a process that is no more."""
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


def test_what_killed_processes_have_left_goes_and_what_is_being_written_stays(tmp_path):
    ended = process_that_has_ended()
    for name in (f".start.json.{ended}.unfinished", f"..a.partial.pt.{ended}.unfinished"):
        (tmp_path / name).write_text("half")
    (tmp_path / f".model.{ended}.unfinished").mkdir()
    stay = [
        f".curves.png.{os.getpid()}.unfinished",
        ".curves.png.1.unfinished",  # of another user, if not of root
        ".mine.unfinished",
        f".mine.{ended}",
        "table.md",
    ]
    for name in stay:
        (tmp_path / name).write_text("")
    files.remove_leftovers(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == set(stay)
    files.remove_leftovers(tmp_path / "not there")


# ------------------------------------------------------------------------- lines
def whole_lines(path: Path) -> Lines:
    """A file of three lines."""
    lines = Lines(path)
    for step in (1, 2, 3):
        lines.write({"step": step, "update": 1})
    return lines


def check_whole(path: Path, before: bytes) -> None:
    assert path.read_bytes() == before
    assert [line["step"] for line in read_lines(path)] == [1, 2, 3]


def test_numbers_are_written_as_json_can_hold_them(tmp_path):
    assert files.to_json_number(0.123456789) == 0.123457
    assert files.to_json_number(float("nan")) is None
    assert files.to_json_number(float("-inf")) is None
    lines = Lines(tmp_path / "a")
    lines.write({"x": float("inf"), "y": 1 / 3, "z": 12345678, "n": None})
    expected = '{"x": null, "y": 0.333333, "z": 12345678, "n": null}\n'
    assert (tmp_path / "a").read_text() == expected


def test_a_file_keeps_its_lines_unless_it_is_told_how_many_bytes_to_keep(tmp_path):
    """Kills: a default that empties a file that is opened to be added to."""
    path = tmp_path / "lines"
    whole_lines(path)
    before = path.read_bytes()
    Lines(path).write({"step": 4})
    assert path.read_bytes() == before + b'{"step": 4}\n'
    Lines(path, len(before))
    check_whole(path, before)
    with pytest.raises(ValueError, match=f"has {len(before)} bytes, its checkpoint was made at"):
        Lines(path, len(before) + 1)
    check_whole(path, before)
    Lines(path, 0)
    assert path.read_bytes() == b""


class HalfWritten:
    """An unbuffered file whose disk is full in the middle of a line."""

    def __init__(self, file):
        self.file = file

    def write(self, content: bytes) -> int:
        return self.file.write(content[: len(content) // 2])

    def __getattr__(self, name):
        return getattr(self.file, name)


def test_half_a_line_is_cut_off_again_and_the_error_names_the_file(tmp_path):
    path = tmp_path / "metrics.jsonl"
    lines = whole_lines(path)
    before = path.read_bytes()
    real_file = lines.file
    lines.file = HalfWritten(real_file)
    with pytest.raises(OSError, match="metrics.jsonl: no room for another line .is the disk full"):
        lines.write({"step": 4, "update": 1})
    check_whole(path, before)
    lines.file = real_file
    lines.write({"step": 4, "update": 1})
    assert len(read_lines(path)) == 4


def test_a_file_that_may_not_grow_keeps_its_whole_lines(tmp_path):
    path = tmp_path / "metrics.jsonl"
    lines = whole_lines(path)
    before = path.read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 9, hard))
        for _ in range(2):  # the first writes nine bytes, then there is an error at once
            with pytest.raises(OSError, match="no room for another line"):
                lines.write({"step": 4, "update": 1})
            check_whole(path, before)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.fixture
def small_disk(tmp_path):
    """A disk of 16 kB; only root can mount it."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=16k", "tmpfs", disk]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("a small disk can be mounted by root alone")
    yield disk
    subprocess.run(["umount", disk], check=True)


def test_on_a_disk_that_is_full_the_lines_before_stay_whole(small_disk):
    path = small_disk / "metrics.jsonl"
    lines = Lines(path)
    count = 0
    with pytest.raises(OSError, match="no room for another line"):
        while count < 1000:
            lines.write({"step": count + 1, "text": "x" * 100})
            count += 1
    assert 50 < count < 200
    assert [line["step"] for line in read_lines(path)] == list(range(1, count + 1))
    with pytest.raises(OSError):
        write_json(small_disk / "final.json", ["x" * 10000])
    assert [file.name for file in small_disk.iterdir()] == ["metrics.jsonl"]
    lines.file.close()


@pytest.mark.parametrize("unfinished", [False, True])
@pytest.mark.parametrize(
    "old, new, number",
    [
        (b'"step": 2', b'"step" 2', 2),
        (b'{"step": 1', b'\0\0\0{"step": 1', 1),
        (b'{"step": 2, "update": 1}', b"[2, 1]", 2),
        (b'{"step": 3, "update": 1}', b"3", 3),
    ],
)
def test_a_damaged_line_is_named_and_none_is_skipped(tmp_path, old, new, number, unfinished):
    path = tmp_path / "metrics.jsonl"
    whole_lines(path)
    path.write_bytes(path.read_bytes().replace(old, new))
    with pytest.raises(ValueError, match=rf"metrics.jsonl, line {number} is damaged"):
        read_lines(path, unfinished)


def test_the_last_line_may_be_half_there_while_a_process_writes_it(tmp_path):
    path = tmp_path / "metrics.jsonl"
    whole_lines(path)
    whole = path.read_bytes()
    path.write_bytes(whole[:-9])
    with pytest.raises(ValueError, match="line 3 is damaged"):
        read_lines(path)
    expected = [{"step": 1, "update": 1}, {"step": 2, "update": 1}]
    assert read_lines(path, unfinished=True) == expected
    path.write_bytes(whole[:-1])  # all but its end: the number may have been longer
    assert read_lines(path, unfinished=True) == expected
    path.write_bytes(b"\xef\xbb\xbf" + whole + b"\n  \n")  # a byte order mark, empty lines
    assert len(read_lines(path)) == 3


# ------------------------------------------------------------------------- locks, comparisons
@pytest.fixture
def holder(tmp_path, held):
    """A process that holds tmp_path/lock until its input is closed."""
    return held(tmp_path / "lock")


def test_a_lock_of_another_process_is_refused_or_waited_for(tmp_path, holder, monkeypatch):
    monkeypatch.setattr(files, "LOCK_S", 0.1)
    with pytest.raises(ValueError, match=f"{tmp_path}: another process is writing there"):
        files.lock(tmp_path / "lock")
    said = []

    def tell(text):
        said.append(text)
        holder.stdin.close()  # it lets go

    monkeypatch.setattr(files, "tell", tell)
    with files.lock(tmp_path / "lock", waiting="waiting for it"):
        assert said == ["waiting for it"]
        with pytest.raises(filelock.Timeout):
            filelock.FileLock(tmp_path / "lock").acquire(timeout=0)
    with files.lock(tmp_path / "lock", waiting="a free one is not waited for"):
        assert said == ["waiting for it"]


def test_differences_are_named_with_both_values():
    saved = {"rate": 1, "gone": 2, "same": 3, "steps": 4}
    now = {"rate": 9, "same": 3, "new": None, "steps": 5}
    assert (
        files.differences(saved, now, {"steps"}) == "gone: 2 there, None now; rate: 1 there, 9 now"
    )
    assert files.differences(saved, saved) == ""
