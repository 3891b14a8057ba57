"""vectors.json, and check_port.py, which says of a port where it differs from them."""

import json
import subprocess
import sys
from pathlib import Path

import check_port
import make_vectors
import pytest

ROOT = Path(__file__).resolve().parent.parent
LITERAL = Path(make_vectors.__file__)
PROBES = {case["name"]: case["probes"] for case in json.loads(check_port.VECTORS.read_text())}


def test_what_the_vectors_expect_is_what_the_script_makes():
    assert check_port.VECTORS.read_text() == make_vectors.text()


def test_bapo_agrees_by_the_example_of_an_adapter():
    command = [sys.executable, "tests/check_port.py", "tests/check_port.py:bapo_adapter"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    said = f"{len(PROBES)} of {len(PROBES)} cases agree\n"
    assert (run.returncode, run.stdout) == (0, said), run.stderr


def test_a_wrong_port_is_told_first_what_it_did_wrong(tmp_path, capsys):
    literal = LITERAL.read_text()
    right = ' >= settings["rho0"] - 1e-6'
    assert right in literal
    port = tmp_path / "port.py"
    port.write_text(literal.replace(right, ' >= settings["rho0"]'))
    assert check_port.main(f"{port}:expected") == 1
    assert capsys.readouterr().out.startswith(f"tie: {PROBES['tie']}\n")


UNFINISHED = """
from __future__ import annotations
from dataclasses import dataclass
import make_vectors

@dataclass
class OfAPort:
    settings: dict

def without_gradient(case):
    return {name: value for name, value in make_vectors.expected(case).items() if name == "loss"}

def flat(case):
    found = make_vectors.expected(case)
    return found | {"gradient": sum(found.get("gradient", []), [])}

def nothing(case):
    pass

def broken(case):
    assert "expected" not in case
    return case["mask"] + case["log_ratio"]
"""


@pytest.mark.parametrize(
    "function, said",
    [
        ("without_gradient", "FUNCTION must return gradient, high, low, reached, rho, rho_start"),
        ("flat", "gradient: expected 2 rows of 2 numbers, got [-0.25, -0.25, 0.375, 0.375]"),
        ("nothing", "FUNCTION must return a dict, got NoneType"),
        ("broken", "KeyError: 'log_ratio'"),
    ],
)
def test_what_a_port_returns_must_be_whole(function, said, tmp_path, capsys):
    (tmp_path / "port.py").write_text(UNFINISHED)
    assert check_port.main(f"{tmp_path}/port.py:{function}") == 1
    assert said in capsys.readouterr().out


def test_a_port_that_is_not_there_is_named(tmp_path):
    (tmp_path / "port.py").write_text(UNFINISHED)
    for port, said in [
        (f"{tmp_path}/other.py:flat", "FILE.py:FUNCTION, got .*no file"),
        (f"{tmp_path}/port.py:missing", "no function 'missing'"),
    ]:
        with pytest.raises(SystemExit, match=said):
            check_port.main(port)
