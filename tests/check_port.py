"""Check a port of BAPO's loss, to any framework or language, against vectors.json.

    python tests/check_port.py FILE.py:FUNCTION
    python tests/check_port.py tests/check_port.py:bapo_adapter    # bapo.py itself

FUNCTION is called with one case at a time, without `expected`: a dict of plain lists and numbers,
as make_vectors.py describes them. It returns a dict of low, high, rho, rho_start, reached, loss and
gradient: numbers, and rows of numbers, that float() understands. `bapo_adapter`, below, is an
example. A port in C++, say, is called there.

A case that differs is printed with what it probes; read the first one first. Numbers may differ by
1e-5 of their size, or by 1e-6, so that float32 passes. The exit status is 1 if any case differs.
Only this file and vectors.json are needed, and the standard library.
"""

import importlib
import json
import math
import sys
from pathlib import Path

VECTORS = Path(__file__).with_name("vectors.json")


def bapo_adapter(case: dict, device: str = "cpu") -> dict:
    """One case through bapo.py, in torch."""
    import torch  # here, because other ports need none

    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    import bapo

    settings = case["settings"]
    search = bapo.ClipSearch(settings["rho0"], *settings["low"], *settings["high"])
    tensors = {}
    for name, value in case.items():
        if isinstance(value, list):
            tensors[name] = torch.tensor(value, device=device)
    log_probs = tensors["log_probs"].requires_grad_()
    loss, metrics = bapo.bapo_loss(**tensors, search=search)
    loss.backward()
    return metrics | {"loss": loss.item(), "gradient": log_probs.grad}


# ---------------------------------------------------------------- the check
def read_cases() -> list[dict]:
    """The cases of vectors.json, with NaN in the place of "nan", which stands there for it."""
    return json.loads(VECTORS.read_text().replace('"nan"', "NaN"))


def differences(expected: dict, got: dict) -> list[str]:
    """Return a line for each part of the result that differs. KeyError for one that is missing."""
    lines = []
    for name, value in expected.items():
        if not is_close(value, got[name]):
            lines.append(f"{name}: expected {value}, got {got[name]}")
    return lines


def is_close(expected, got) -> bool:
    """Whether two numbers, or two lists of numbers of the same lengths, are close."""
    if isinstance(expected, list):
        return len(expected) == len(got) and all(map(is_close, expected, got))
    both_nan = math.isnan(expected) and math.isnan(got)
    return both_nan or math.isclose(expected, got, rel_tol=1e-5, abs_tol=1e-6)


def main(port: str) -> int:
    """Print what differs. Returns the exit status."""
    file, _, name = port.rpartition(":")
    sys.path.insert(0, str(Path(file).resolve().parent))
    function = getattr(importlib.import_module(Path(file).stem), name)
    cases = read_cases()
    wrong = 0
    for case in cases:
        print(case["name"])
        lines = differences(case.pop("expected"), function(case))
        if lines:
            wrong += 1
            print(f"    differs: {case['probes']}", *lines, sep="\n    ")
    print(f"{len(cases) - wrong} of {len(cases)} cases agree")
    return 1 if wrong else 0


if __name__ == "__main__":
    if ":" not in sys.argv[-1]:
        sys.exit(__doc__)
    sys.exit(main(sys.argv[-1]))
