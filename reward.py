"""Verifiable rewards: read the final answer of a response and grade it.

No response can crash or stall these graders. Reading an answer takes time that is linear in the
length of the response. Answers in LaTeX are compared by the library math-verify, in processes with
limits (`compare_latex`). Your own reward function (`own_reward`) has no time limit.
"""

import json
import logging
import math
import os
import re
import runpy
import signal
import subprocess
import sys
from collections.abc import Callable
from fractions import Fraction
from functools import cache
from importlib.util import find_spec
from numbers import Real

# An escaped character matches, too, but without a group: \{ and \} are printed and enclose nothing.
_BRACES = re.compile(r"(\\boxed\s*\{|[{}])|\\.", re.DOTALL)

# What `bare` removes: spacing and $ on both sides; before the answer the name of a variable (x=,
# m + n =, S_{10}=); behind it degrees, a unit such as \text{ cm}^2, and a full stop.
_SPACE = r"\s|~|\\?\$|\\[,;:! ]|\\(?:q?quad|displaystyle)(?![a-zA-Z])"
_NAME = r"\\?[a-zA-Z]+(?:_\{?\w+\}?)?(?:\s*\+\s*[a-zA-Z]+)*\s*="
_TEXT = r"\\(?:text|textbf|mathrm|mathbf|mbox)\{"
_UNIT = _TEXT + r"[^{}0-9]*\}(?:\^\{?[0-9]\}?)?"
_BEHIND = rf"{_SPACE}|\.|\^\{{?\\circ\}}?|\\degree|°|{_UNIT}"
_AROUND = re.compile(rf"(?:{_SPACE})*(?:{_NAME}(?:{_SPACE})*)?(.*?)(?:{_BEHIND})*", re.DOTALL)
_WRAPPED = re.compile(_TEXT + r"([^{}]*)\}")

# A number in one of four forms, perhaps with a sign before it and a per cent sign behind it
_NUMBER = re.compile(
    r"""([-+]?)\s*(?:
    ([0-9]*)\s*\\[cdt]?frac\s*(\{\s*-?[0-9]+\s*\}|[0-9])\s*(\{\s*-?0*[1-9][0-9]*\s*\}|[1-9])
    | ([0-9]+\s*/\s*0*[1-9][0-9]*                                            # 3/4
    | [1-9][0-9]{0,2}(?:(?:,|\{,\}|,\\!\s*|\\,)[0-9]{3})+(?:\.[0-9]*)?       # 1,234.5
    | [0-9]+(?:\.[0-9]*)?|\.[0-9]+)
    )(?:\s*\\?%)?""",
    re.VERBOSE,
)

_AIME_INTEGER = re.compile(r"\+?\s*0*([0-9]{1,3})(?:\.0+)?")
_ANSWER_LINE = re.compile(r"(?:^|\n)[ \t*#]*(?:(?:final )?answer[ \t*]*:|####)([^\n]*)", re.I)

# Limits of math-verify, in processor time and address space. Most pairs of texts take 0.1 s.
PAIR_SECONDS = 0.5  # each pair has at least this
BATCH_SECONDS = 3  # the pairs of a small batch share this
PAIR_BYTES = 2**29
PAIRS_AT_ONCE = 16


# ---------------------------------------------------------------- reading an answer
def extract_boxed(text: str) -> str | None:
    """Return the content of the last brace-balanced \\boxed{...}, or None if there is none."""
    ends = []  # positions of closing braces whose opening brace is still to come
    for match in reversed(list(_BRACES.finditer(text))):
        token = match[1]
        if token == "}":
            ends.append(match.start())
        elif token and ends:
            end = ends.pop()
            if token != "{":
                return text[match.end() : end]
    return None


def bare(text: str) -> str:
    """Return `text` without what may stand around an answer.

    "$x = 25.$" and "\\text{25}^\\circ" become "25"; "3 3 6" stays as it is. A text of more than 200
    characters is not a short answer and becomes "".
    """
    if len(text) > 200:
        return ""
    text = text.replace("−", "-")
    for _ in range(2):  # outside \text{}, then inside
        text = _AROUND.fullmatch(text)[1]
        if wrapped := _WRAPPED.fullmatch(text):
            text = wrapped[1]
    return text


def aime_integer(text: str) -> int | None:
    """Return the integer from 0 to 999 that `text` is ("016", "336^\\circ", "x = 25."), or None."""
    match = _AIME_INTEGER.fullmatch(bare(text))
    return int(match[1]) if match else None


def number(text: str) -> Fraction | None:
    """Return the exact value of the number that `text` is, or None.

    Numbers are "72", "-1,234.50", "1{,}000", "3/4", "\\frac{3}{4}" and "2\\frac12" (a mixed number:
    5/2), with anything around them that `bare` removes. 50\\% is 50.
    """
    match = _NUMBER.fullmatch(bare(text))
    if not match:
        return None
    sign, whole, numerator, denominator, plain = match.groups()
    if plain:
        value = Fraction(re.sub("[^0-9./]", "", plain))
    else:
        numerator = int(numerator.strip("{}"))
        denominator = int(denominator.strip("{}"))
        if whole and not 0 <= numerator < denominator:  # 2\frac{5}{2} is no mixed number
            return None
        value = int(whole or 0) + Fraction(numerator, denominator)
    return -value if sign == "-" else value


def final_answer(response: str) -> str | None:
    """Return the answer of a response: the content of its last balanced box.

    Without a box it is the end of the last line that begins with "Answer:", "Final answer:" or
    "####". Returns None if there is none, or if it is empty.
    """
    answer = extract_boxed(response)
    if answer is None:
        lines = _ANSWER_LINE.findall(response)
        answer = lines[-1].strip(" \t*") if lines else ""
    return answer.strip() or None


# ---------------------------------------------------------------- grading
def grade_aime(response: str, answer: str | int) -> bool:
    """Return whether the last balanced box of `response` is the integer `answer`.

    Raises ValueError if `answer` is not an integer from 0 to 999.
    """
    expected = aime_integer(str(answer))
    if expected is None:
        raise ValueError(f"answer must be from 0 to 999, got {answer!r}: use --grader math")
    boxed = extract_boxed(response) or ""
    return aime_integer(boxed) == expected


def grade_math(response: str, answer: str) -> bool:
    """Return whether the final answer of `response` is `answer`.

    A number is compared by its exact value. Any other answer is compared as text. If the texts
    differ, `compare_latex` decides, for which 2\\sqrt{3} is \\sqrt{12}. To grade many responses,
    call `grade_all`.
    """
    return grade_all(grade_math, [response], [answer], skip=[False])[0]


def _grade_without_library(response: str, answer: str):
    """Return whether the response is right, or the two LaTeX texts whose comparison decides it."""
    given = final_answer(response)
    if given is None:
        return False
    expected = number(answer)
    if expected is not None:
        return number(given) == expected
    answer = _latex(answer)
    given = _latex(given)
    return given == answer or (answer, given)


def _latex(text: str) -> str:
    """Return an answer without the $ and full stops around it, cut off at 1000 characters."""
    return text[:1000].lstrip(" $").rstrip(" $.")


def grade_all(
    grader: Callable[[str, str], float], responses: list[str], answers: list[str], skip: list[bool]
) -> list[float]:
    """Return grader(response, answer) of every row, or False where `skip` is set.

    Responses that were cut off are skipped, whatever they hold. For grade_math all LaTeX texts are
    compared at once. Raises ValueError for unequal lengths.
    """
    if grader is grade_math:
        grader = _grade_without_library
    rewards = []  # or pairs of texts, whose comparison decides the reward
    for response, answer, skipped in zip(responses, answers, skip, strict=True):
        rewards.append(not skipped and grader(response, answer))
    pairs = list({one for one in rewards if isinstance(one, tuple)})
    verdicts = dict(zip(pairs, compare_latex(pairs)))
    return [verdicts.get(one, one) for one in rewards]


# ---------------------------------------------------------------- math-verify
def compare_latex(pairs: list[tuple[str, str]]) -> list[bool]:
    """Return whether math-verify finds the two LaTeX texts of each pair equal.

    The library's own time-outs are signals, which work in the main thread only and cannot interrupt
    a long operation. So every pair gets a process of its own, a fork. Each fork gets
    max(PAIR_SECONDS, BATCH_SECONDS / pairs) seconds of processor time. Then the kernel ends it, and
    its pair counts as not equal. Raises ValueError if math-verify is not installed.
    """
    if not pairs:
        return []
    check_math_verify()
    process = subprocess.run(
        [sys.executable, __file__],
        input=json.dumps(pairs),
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONHASHSEED": "0"},  # sympy's order of terms follows the hashes
        text=True,
        check=True,
    )
    return json.loads(process.stdout)


def check_math_verify() -> None:
    """Raise ValueError if math-verify is not installed."""
    if not find_spec("math_verify"):
        raise ValueError("answers in LaTeX need another package: run `pip install math-verify`")


def _compare() -> None:
    """Read pairs as JSON and print the verdicts, in the process that compare_latex starts."""
    import resource  # not on every system

    logging.disable()  # the library warns that nobody limits its time
    resource.setrlimit(resource.RLIMIT_AS, (PAIR_BYTES, PAIR_BYTES))
    _is_equal("x+1", "1+x")  # loads the library and its grammar, once for all forks
    pairs = json.load(sys.stdin)
    seconds = max(PAIR_SECONDS, BATCH_SECONDS / len(pairs))
    verdicts = []
    for start in range(0, len(pairs), PAIRS_AT_ONCE):
        forks = [_fork(pair, seconds) for pair in pairs[start : start + PAIRS_AT_ONCE]]
        verdicts += [os.waitpid(fork, 0)[1] == 0 for fork in forks]
    print(json.dumps(verdicts))


def _fork(pair: list[str], seconds: float) -> int:
    """Return the id of a new process that ends with status 0 if the two texts are equal."""
    fork = os.fork()
    if fork == 0:
        signal.setitimer(signal.ITIMER_PROF, seconds)  # SIGPROF ends the process
        try:
            if _is_equal(*pair):
                os._exit(0)
        finally:
            os._exit(1)
    return fork


def _is_equal(answer: str, given: str) -> bool:
    """Return math-verify's verdict, without a time limit."""
    from math_verify import parse, verify

    expected = parse(f"${answer}$", parsing_timeout=None)
    found = parse(f"${given}$", parsing_timeout=None)
    return verify(expected, found, timeout_seconds=None)


# ---------------------------------------------------------------- your own reward
_run_file = cache(runpy.run_path)  # a file's path -> the names that it defines


def own_reward(place: str, response: str, answer: str) -> float:
    """Return the value of the reward function `place`, FILE.py:FUNCTION.

    Raises ValueError if the function fails, or does not return a number from 0 to 1.
    """
    path, _, name = place.rpartition(":")
    end = response[-100:]
    try:
        value = _run_file(path)[name](response, answer)
    except Exception as error:
        raise ValueError(
            f"The reward function {place} failed for the response {end!r}: {error!r}. It must be"
            " FILE.py:FUNCTION and take a response and an answer."
        ) from error
    if not (isinstance(value, Real) and 0 <= value <= 1):
        raise ValueError(
            f"The reward function {place} returned {value!r} for the response {end!r}. It must"
            " return a number from 0 to 1."
        )
    return float(value)


# ---------------------------------------------------------------- statistics
def pass_at_k(samples: int, correct: int, k: int) -> float:
    """Return an unbiased estimate of the chance that at least one of k responses is right.

    It is 1 - C(samples - correct, k) / C(samples, k). k is at most `samples`.
    """
    return 1 - math.comb(samples - correct, k) / math.comb(samples, k)


if __name__ == "__main__":
    _compare()
