"""Verifiable rewards: read the final answer of a response and grade it. Linear time, and no response makes it raise."""

import math
import re

# Escaped characters are consumed whole, so that \{ and \} (braces to be printed) do not count as braces.
_BRACES = re.compile(r"\\boxed\s*\{|\\.|[{}]", re.DOTALL)
# What LaTeX writes around or inside an integer without changing it: $ signs, spacing, size, degrees, thousands {,}.
_DECORATION = re.compile(r"\s|\$|\\[,;:! ]|~|\\(?:left|right|displaystyle)(?![a-zA-Z])|\^\{?\\circ\}?|\\degree|°|\{,\}")
_INTEGER = re.compile(r"\+?0*([0-9]{1,3})")


def extract_boxed(text: str) -> str | None:
    """Content of the last brace-balanced \\boxed{...}: the one that starts last. None if there is none."""
    open_braces: list[int] = []  # where the content of every open brace starts; -1 for braces that are no box
    start = end = -1
    for match in _BRACES.finditer(text):
        token = match.group()
        if token == "}":
            opened = open_braces.pop() if open_braces else -1
            if opened > start:
                start, end = opened, match.start()
        elif token == "{":
            open_braces.append(-1)
        elif token.endswith("{") and token.startswith("\\boxed"):
            open_braces.append(match.end())
    return text[start:end] if start >= 0 else None


def aime_integer(text: str) -> int | None:
    """The integer 0-999 that `text` is, written in plain digits or LaTeX ("016", "336^\\circ"); None if it is anything else."""
    plain = _DECORATION.sub("", text)
    wrapped = re.fullmatch(r"\\(?:text|mathrm|mathbf|textbf)\{([^{}]*)\}", plain)
    match = _INTEGER.fullmatch(wrapped.group(1) if wrapped else plain)
    return int(match.group(1)) if match else None


def grade_aime(response: str, answer: str | int) -> bool:
    """Whether the last boxed answer of `response` is the integer `answer` (0-999): "016" is 16, "336^\\circ" is 336.

    A response without a balanced box, or whose box is not an integer, is wrong. Raises ValueError only for an `answer`
    that is not such an integer itself.
    """
    expected = aime_integer(str(answer))
    if expected is None:
        raise ValueError(f"answer must be an integer from 0 to 999, got {str(answer)[:100]!r}")
    boxed = extract_boxed(response)
    return boxed is not None and aime_integer(boxed) == expected


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """Chance that at least one of k responses drawn without replacement from `samples`, `correct` of them right, is right.

    1 - C(samples - correct, k) / C(samples, k), the unbiased estimator of pass@k for one problem. Raises ValueError unless
    1 <= k <= samples and 0 <= correct <= samples.
    """
    if not (1 <= k <= samples and 0 <= correct <= samples):
        raise ValueError(f"pass_at_k needs 1 <= k <= samples and 0 <= correct <= samples, got {k=}, {samples=}, {correct=}")
    return 1 - math.comb(samples - correct, k) / math.comb(samples, k)
