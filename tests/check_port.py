"""Check a port of BAPO's loss, to any framework or language, against vectors.json.

    python tests/check_port.py FILE.py:FUNCTION
    python tests/check_port.py tests/check_port.py:bapo_adapter    # bapo.py itself

FUNCTION is called with one case at a time, without `expected`: a dict of plain lists and numbers,
as make_vectors.py describes them. It returns a dict of low, high, rho, rho_start, reached, loss and
gradient: Python's own numbers and lists, or what float() and len() understand. `bapo_adapter`,
below, is an example. A port in C++, say, is called there.

Each case that differs is printed with what it probes; read the first one first. Numbers may differ
by 1e-5 of their size, or by 1e-6, so that float32 passes. The exit status is 1 if any case differs.
Only this file and vectors.json are needed, and the standard library.
"""

import importlib.util
import json
import math
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

VECTORS = Path(__file__).with_name("vectors.json")


def bapo_adapter(case: dict, device: str = "cpu") -> dict:
    """One case through bapo.py, in torch."""
    import torch  # here, because other ports need none

    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    import bapo

    settings = case["settings"]
    search = bapo.ClipSearch(
        settings["rho0"], *settings["low"], *settings["high"], settings["contribution"]
    )
    tensors = {
        name: torch.tensor(case[name], device=device)
        for name in ("log_probs", "rollout_log_probs", "advantages", "mask", "weights")
        if name in case
    }
    log_probs = tensors["log_probs"].requires_grad_()
    loss, metrics = bapo.bapo_loss(**tensors, search=search)
    loss.backward()
    return metrics | {"loss": loss.item(), "gradient": log_probs.grad}


# ---------------------------------------------------------------- the check
def differences(expected: dict, got: dict) -> list[str]:
    """A line for each number that differs; of the gradient's, for the first."""
    if not isinstance(got, dict):
        return [f"FUNCTION must return a dict, got {type(got).__name__}"]
    missing = sorted(expected.keys() - got.keys())
    if missing:
        return [f"FUNCTION must return {', '.join(missing)} too, got {', '.join(sorted(got))}"]
    found = []
    for name, value in expected.items():
        if name != "gradient":
            found += number_differs(name, value, got[name])
    if "gradient" in expected:
        found += gradient_differs(expected["gradient"], got["gradient"])
    return found


def number_differs(name: str, expected: float, got) -> list[str]:
    """One line or none. A bool is 0 or 1."""
    try:
        got = float(got)
    except (TypeError, ValueError):
        return [f"{name}: expected {expected:.7g}, got {got!r}"]
    both_nan = math.isnan(expected) and math.isnan(got)
    if both_nan or math.isclose(got, expected, rel_tol=1e-5, abs_tol=1e-6):
        return []
    return [f"{name}: expected {expected:.7g}, got {got:.7g}"]


def gradient_differs(expected: list, got) -> list[str]:
    """One line or none: the first number that differs, and how many do."""
    try:
        fits = [len(row) for row in got] == [len(row) for row in expected]
    except TypeError:
        fits = False
    if not fits:
        shape = f"{len(expected)} rows of {len(expected[0])} numbers"
        return [f"gradient: expected {shape}, got {got}"]
    found = []
    for i, row in enumerate(expected):
        for j, number in enumerate(row):
            found += number_differs(f"gradient[{i}][{j}]", number, got[i][j])
    if len(found) > 1:
        found = [f"{found[0]} (and {len(found) - 1} more of the gradient)"]
    return found


def from_json(value):
    """The value with NaN where vectors.json says "nan"."""
    if isinstance(value, dict):
        return {name: from_json(one) for name, one in value.items()}
    if isinstance(value, list):
        return [from_json(one) for one in value]
    return math.nan if value == "nan" else value


def load(port: str) -> Callable[[dict], dict]:
    """FILE.py:FUNCTION; exits if there is no such thing."""
    file, _, name = port.rpartition(":")
    if not Path(file).is_file():
        sys.exit(f"the port must be given as FILE.py:FUNCTION, got {port!r}: no file {file!r}")
    sys.path.insert(0, str(Path(file).resolve().parent))  # it may import what lies beside it
    spec = importlib.util.spec_from_file_location("port", file)
    module = importlib.util.module_from_spec(spec)
    sys.modules["port"] = module  # where dataclasses look
    spec.loader.exec_module(module)
    if not callable(getattr(module, name, None)):
        sys.exit(f"{file} has no function {name!r}")
    return getattr(module, name)


def main(port: str) -> int:
    """Print what differs. Returns the exit status."""
    function = load(port)
    cases = from_json(json.loads(VECTORS.read_text()))
    wrong = 0
    for case in cases:
        given = {name: value for name, value in case.items() if name != "expected"}
        try:
            found = differences(case["expected"], function(given))
        except Exception:  # the other cases may say why
            found = traceback.format_exc(limit=-2).splitlines()
        if found:
            wrong += 1
            print(f"{case['name']}: {case['probes']}")
            print("".join(f"    {line}\n" for line in found))
    print(f"{len(cases) - wrong} of {len(cases)} cases agree")
    return 1 if wrong else 0


if __name__ == "__main__":
    if ":" not in sys.argv[-1]:
        sys.exit(__doc__)
    sys.exit(main(sys.argv[-1]))
