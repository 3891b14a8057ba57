"""benchmarks/gpu.sh, all of it on a CPU at sizes that mean nothing."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Results are in out/, everything else in work/. The path has a space."""
    return tmp_path_factory.mktemp("of the GPU")


def run(folder: Path, *parts: str, **environment: str) -> subprocess.CompletedProcess:
    """The script in `folder`; environment: more variables."""
    command = ["bash", "benchmarks/gpu.sh", str(folder / "out"), *parts]
    variables = {
        "WORK": str(folder / "work"),
        "PYTHON": sys.executable,
        "DEVICE": "cpu",
        "TINY": "1",
        "MINUTES": "60",
        **environment,
    }
    return subprocess.run(
        command, cwd=ROOT, env=os.environ | variables, capture_output=True, text=True
    )


def results(folder: Path) -> dict[str, dict]:
    """PART/PIECE -> what the piece has left."""
    contents = {}
    for path in folder.glob("out/*/*.json"):
        contents[f"{path.parent.name}/{path.stem}"] = json.loads(path.read_text())
    return contents


def failing_python(folder: Path, condition: str) -> str:
    """A Python that fails wherever its first arguments, as $1 and $2, meet a condition of bash."""
    path = folder / "failing python"
    path.write_text(f'#!/bin/bash\nif {condition}; then exit 3; fi\nexec "{sys.executable}" "$@"\n')
    path.chmod(0o755)
    return str(path)


def test_every_part_leaves_its_results(folder):
    process = run(folder)
    pieces = results(folder)
    assert process.returncode == 0, (process.stdout, process.stderr)
    assert {name: piece["status"] for name, piece in pieces.items()} == {
        "tests/test_cuda": 0,
        "model/countdown": 0,
        "lora/countdown": 0,
        "resume/whole": 0,
        "resume/killed": 0,
        "default/grpo@1": 0,
        "scale/start": 0,
        "scale/grpo@1": 0,
        "suite/test_files": 0,
    }
    assert all("CPU" in piece["device"] and piece["torch"] for piece in pieces.values())
    for name in ("tests/test_cuda", "suite/test_files"):
        assert re.search(r"\d+ passed", pieces[name]["last_line"])
    assert pieces["model/countdown"]["results"][0]["one_micro_batch"]["bapo/least"] > 0
    assert pieces["lora/countdown"]["results"][0]["lora_rank"] == 2
    for name in ("default/grpo@1", "scale/grpo@1"):
        assert pieces[name]["results"][-1].keys() == {"start0", "grpo@1-start0-seed0"}
    same = {"updates": 12, "updates_of_killed": 12, "first_step_that_differs": None}
    killed = pieces["resume/killed"]
    assert killed["results"][-1] == same
    lines = [result.get("lines_when_killed", 0) for result in killed["results"]]
    assert 4 < max(lines) <= 12
    assert not list(folder.glob("out/**/*.safetensors"))  # models belong into the other folder
    assert list(folder.glob("work/**/*.safetensors"))


def test_the_same_command_again_repeats_nothing_even_with_a_new_folder_of_results(folder):
    before = results(folder)
    (folder / "out").rename(folder / "brought away")
    try:
        assert run(folder, MINUTES="0").returncode == 0
        assert results(folder) == before
    finally:
        subprocess.run(["rm", "-rf", str(folder / "out")], check=True)
        (folder / "brought away").rename(folder / "out")


def test_a_piece_that_fails_stops_no_other_and_its_failure_is_remembered(tmp_path):
    python = failing_python(tmp_path, '[[ "$*" == *lora_rank* ]]')
    process = run(tmp_path, "lora", "model", PYTHON=python)
    statuses = {name: piece["status"] for name, piece in results(tmp_path).items()}
    assert process.returncode == 1
    assert statuses == {"lora/countdown": 3, "model/countdown": 0}
    assert run(tmp_path, "lora", PYTHON=python, MINUTES="0").returncode == 1


def test_a_piece_that_time_cuts_off_leaves_no_result_and_is_done_by_the_next_call(tmp_path):
    """Kills: a piece without end that keeps the script; a piece cut off that counts as done."""
    python = tmp_path / "waiting python"
    once = tmp_path / "waited"
    python.write_text(
        f'#!/bin/bash\nif [[ $1 == benchmarks/model.py && ! -e "{once}" ]]; then\n'
        f'  touch "{once}"\n  sleep 600\nfi\nexec "{sys.executable}" "$@"\n'
    )
    python.chmod(0o755)
    cut = run(tmp_path, "model", PYTHON=str(python), MINUTES="0.3")
    assert cut.returncode == 75, (cut.stdout, cut.stderr)
    assert "run the same command again" in cut.stdout
    assert once.exists()
    assert results(tmp_path) == {}
    assert run(tmp_path, "model", PYTHON=str(python)).returncode == 0
    assert results(tmp_path)["model/countdown"]["status"] == 0


def test_a_device_that_is_not_there_and_an_unknown_part_are_told_at_once(tmp_path):
    without = run(tmp_path, "tests", DEVICE="cuda:99")
    assert without.returncode == 1
    assert without.stderr
    unknown = run(tmp_path, "test")
    assert unknown.returncode == 2
    assert "there is no part test; the parts are tests model" in unknown.stderr
    assert results(tmp_path) == {}
