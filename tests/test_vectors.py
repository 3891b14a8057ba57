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


MINIMUM = "return min(token.ratio * token.advantage, clipped_ratio * token.advantage)"
CLIPPED_VALUE = "abs(clipped_value(token, low, high))"
COUNTED_GRID = """    values = [start + i * step for i in range(steps)]
    return [*values, largest]
"""
SUMMED_GRID = """    values = [start]
    while values[-1] + step <= largest:
        values.append(values[-1] + step)
    return values
"""


@pytest.mark.parametrize(
    "old, new, named",
    [
        ("positive / total if total", "positive / negative if negative", "share"),
        ("token.ratio, low), high)", "token.ratio, 1 - low), 1 + high)", "positive-above-high"),
        (MINIMUM, "return clipped_ratio * token.advantage", "positive-below-low"),
        ("< 0 and token.ratio < low", "< 0 and token.ratio > high", "negative-below-low"),
        (MINIMUM, MINIMUM.replace("min(", "max(-3.0, min(") + ")", "dual-clip"),
        ("token.ratio > high", "token.ratio >= high", "on-the-upper-bound"),
        ("token.ratio < low", "token.ratio <= low", "on-the-lower-bound"),
        (CLIPPED_VALUE, "abs(token.ratio * token.advantage)", "clipped-in-the-share"),
        ("elif clips(token, low, high):", "elif False:", "clipped-has-no-gradient"),
        (" or abs(token.log_ratio) > 20", "", "clamp"),
        ("advantage = advantage[column]", "advantage = advantage[0]", "advantages-of-tokens"),
        (" if inside[column]]", "]", "padding"),
        ('return {"loss": math.nan}', 'return {"loss": 0.0}', "nan-inside-the-mask"),
        ("1 / len(places)", '1 / len(case["mask"]) / sum(case["mask"][row])', "token-mean"),
        ('weight = case["weights"][row][column]', "pass", "weights-of-a-part"),
        ("token.weight * counted", "counted", "weights-in-the-share"),
        (' >= settings["rho0"] - 1e-6', ' >= settings["rho0"]', "tie"),
        (' >= settings["rho0"] - 1e-6', ' >= settings["rho0"] - 1e-4', "almost"),
        ("if highs[i_high] < highs[-1]:", "if lows[i_low] == lows[-1]:", "upper-first"),
        ("at_the_end = lows[i_low] == lows[-1] and", "at_the_end =", "lower-bound-moves"),
        (COUNTED_GRID, SUMMED_GRID, "grid-of-the-main-range"),
        ("round((largest", "int((largest", "rounded-count"),
        ("or at_the_end:", "or at_the_end or len(lows) == 1:", "one-lower-bound"),
        ("if math.isnan(share(", "if not tokens and math.isnan(share(", "no-advantage"),
        ("0.0 if math.isnan(rho)", "1.0 if math.isnan(rho)", "clipped-at-the-start"),
    ],
)
def test_a_wrong_port_is_told_first_what_it_did_wrong(old, new, named, tmp_path, capsys):
    port = tmp_path / "port.py"
    literal = LITERAL.read_text()
    assert old in literal
    port.write_text(literal.replace(old, new))
    assert check_port.main(f"{port}:expected") == 1
    assert capsys.readouterr().out.startswith(f"{named}: {PROBES[named]}\n")


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

def short(case):
    return make_vectors.expected(case) | {"gradient": []}

def empty(case):
    return make_vectors.expected(case) | {"loss": None}

def nothing(case):
    pass

def broken(case):
    assert "expected" not in case
    return case["mask"] + case["log_ratio"]

a_number = 3
"""


@pytest.mark.parametrize(
    "function, said",
    [
        ("without_gradient", "FUNCTION must return gradient, high, low, reached, rho, rho_start"),
        ("flat", "gradient: expected 2 rows of 2 numbers, got [-0.25, -0.25, 0.375, 0.375]"),
        ("short", "gradient: expected 2 rows of 2 numbers, got []"),
        ("empty", "loss: expected 0.25, got None"),
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
        ("port.py", "FILE.py:FUNCTION, got 'port.py'"),
        (f"{tmp_path}/other.py:flat", "no file"),
        (f"{tmp_path}/port.py:missing", "no function 'missing'"),
        (f"{tmp_path}/port.py:a_number", "no function 'a_number'"),
    ]:
        with pytest.raises(SystemExit, match=said):
            check_port.main(port)
