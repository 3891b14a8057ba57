"""Verifiable rewards: read the final answer of a response and grade it.

No response makes a grader of this file raise, and none takes long: everything is linear in the
length of the response, but for LaTeX answers. Those are compared by the library math-verify, in
processes of their own that have a time limit (`compare_latex`). A reward function of the user's own
(`load_reward`) has no time limit.
"""

import inspect
import json
import math
import os
import re
import runpy
import signal
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from fractions import Fraction
from functools import cache, lru_cache
from types import ModuleType
from typing import NamedTuple

# Escaped characters are matched whole, so that \{ and \} (braces to be printed) are no braces here.
_BRACES = re.compile(r"\\boxed\s*\{|\\.|[{}]", re.DOTALL)

# What may stand around an answer without changing it: spacing and $. Behind it also degrees, a unit
# such as \text{ cm}^2, and a full stop.
_SPACE = r"\s|~|\\?\$|\\[,;:! ]|\\(?:q?quad|displaystyle)(?![a-zA-Z])"
_TEXT = r"\\(?:text|textbf|mathrm|mathbf|mbox)\{"
_UNIT = rf"{_TEXT}[^{{}}0-9]*\}}(?:\^\{{?[0-9]\}}?)?"
_BEHIND = rf"{_SPACE}|\.|\^\{{?\\circ\}}?|\\degree|°|{_UNIT}"
_ENDS = re.compile(rf"^(?:{_SPACE})+|(?:{_BEHIND})+$")
_WRAPPED = re.compile(_TEXT + r"([^{}]*)\}")
_NAME = re.compile(
    r"^\\?[a-zA-Z]+(?:_\{?\w+\}?)?(?:\s*\+\s*[a-zA-Z]+)*\s*="
)  # x=, m + n =, S_{10}=

# A number: a sign, then \frac with or without a whole part, or a/b, or a decimal with or without
# separators between its thousands; then perhaps a per cent sign.
_PART = r"(\{\s*-?[0-9]+\s*\}|[0-9])"
_FRACTION = rf"([0-9]*)\s*\\[cdt]?frac\s*{_PART}\s*{_PART}"
_QUOTIENT = r"([0-9]+)\s*/\s*([0-9]+)"
_THOUSANDS = r"[1-9][0-9]{0,2}(?:(?:,|\{,\}|,\\!\s*|\\,)[0-9]{3})+"
_DECIMAL = rf"((?:{_THOUSANDS}|[0-9]+)(?:\.[0-9]*)?|\.[0-9]+)"
_NUMBER = re.compile(rf"([-+]?)\s*(?:{_FRACTION}|{_QUOTIENT}|{_DECIMAL})(?:\s*\\?%)?")

_AIME_INTEGER = re.compile(r"\+?\s*0*([0-9]{1,3})(?:\.0+)?")
_ANSWER_LINE = re.compile(
    r"(?:^|\n)[ \t*#]*(?:(?:final )?answer[ \t*]*:|####)([^\n]*)", re.IGNORECASE
)

GRADE_SECONDS = 3  # processor time that math-verify gets for one answer
GRADE_BYTES = 2**32  # address space that it gets
GRADE_PROCESSES = 8  # most processes that compare answers side by side

# Process id -> its processes of math-verify that have no work. By the id, because a fork must not
# use those of its parent.
_idle: dict[int, list[subprocess.Popen]] = defaultdict(list)


class Problem(NamedTuple):
    """One problem, of a data set or of Countdown."""

    # As it is read: text, or the messages of a chat. After `tokenize`: token ids.
    prompt: str | list[dict] | list[int]
    answer: str


# ---------------------------------------------------------------- reading an answer
def extract_boxed(text: str) -> str | None:
    """The content of the last brace-balanced \\boxed{...}, which is the one that starts last.

    None if there is none.
    """
    open_braces: list[
        int
    ] = []  # where the content of each open brace starts; -1 where it is no box
    start = -1
    end = -1
    for match in _BRACES.finditer(text):
        token = match.group()
        if token == "}":
            opened = open_braces.pop() if open_braces else -1
            if opened > start:
                start = opened
                end = match.start()
        elif token == "{":
            open_braces.append(-1)
        elif len(token) > 2:  # \boxed{; an escaped character has two
            open_braces.append(match.end())
    return text[start:end] if start >= 0 else None


def bare(text: str) -> str:
    """`text` without what stands around an answer.

    "$x = 25.$" and "\\text{25}^\\circ" become "25"; "3 3 6" stays as it is. A text of more than 200
    characters is no short answer, and becomes "".
    """
    if len(text) > 200:
        return ""
    text = text.replace("−", "-")
    for _ in range(2):  # outside \text{}, then inside
        text = _ENDS.sub("", text)
        text = _NAME.sub("", text)
        text = _ENDS.sub("", text)
        if wrapped := _WRAPPED.fullmatch(text):
            text = wrapped[1]
    return text


def aime_integer(text: str) -> int | None:
    """The integer from 0 to 999 that `text` is: "016", "336^\\circ", "x = 25.0".

    None if it is anything else.
    """
    match = _AIME_INTEGER.fullmatch(bare(text))
    return int(match[1]) if match else None


def number(text: str) -> Fraction | None:
    """The exact value of the number that `text` is; None if it is anything else.

    Numbers are "72", "-1,234.50", "1{,}000", "3/4", "\\frac{3}{4}" and "2\\frac12" (a mixed number:
    5/2), with anything around them that `bare` takes away. Per cents count as written: 50\\% is 50.
    """
    match = _NUMBER.fullmatch(bare(text))
    if not match:
        return None
    sign, whole, *parts, decimal = match.groups()
    if decimal:
        digits = re.sub(r"[^0-9.]", "", decimal)
        value = Fraction(digits)
    else:
        # The parts of \frac, or those of a/b: the other two are None.
        numerator, denominator = (int(part.strip("{}")) for part in parts if part)
        if denominator == 0:
            return None
        if whole and not 0 <= numerator < denominator:  # 2\frac{5}{2} is no mixed number
            return None
        value = int(whole or 0) + Fraction(numerator, denominator)
    return -value if sign == "-" else value


def final_answer(response: str) -> str | None:
    """What a response gives as its answer: the content of its last balanced box.

    Without a box it is the end of the last line that begins with "Answer:", "Final answer:" or
    "####", the forms that data sets ask for. None if there is none, or nothing in it.
    """
    answer = extract_boxed(response)
    if answer is None:
        lines = _ANSWER_LINE.findall(response)
        answer = lines[-1].strip(" \t*") if lines else ""
    return answer.strip() or None


# ---------------------------------------------------------------- grading
def grade_aime(response: str, answer: str | int) -> bool:
    """Whether the last balanced box of `response` holds the integer `answer` and nothing else.

    Raises ValueError if `answer` is no integer from 0 to 999.
    """
    expected = aime_integer(str(answer))
    if expected is None:
        shown = str(answer)[:100]
        raise ValueError(f"answer must be an integer from 0 to 999, got {shown!r}")
    boxed = extract_boxed(response) or ""
    return aime_integer(boxed) == expected


def grade_math(
    response: str, answer: str, compare: Callable[[str, str], bool] | None = None
) -> bool:
    """Whether the final answer of `response` is `answer`.

    A number is compared by its exact value, and what is no plain number is then wrong. Any other
    answer is compared as text, and where the texts differ by compare(answer, given); the default is
    `compare_latex`, for which 2\\sqrt{3} is \\sqrt{12}. So numbers are graded more strictly than by
    math-verify alone: tests/test_reward.py has a table of all differences.
    """
    given = final_answer(response)
    if given is None:
        return False
    expected = number(answer)
    if expected is not None:
        return number(given) == expected
    answer = _latex(answer)
    given = _latex(given)
    if given == answer:
        return True
    return compare(answer, given) if compare else compare_latex(answer, given)


def _latex(text: str) -> str:
    """At most 1000 characters of an answer, without the $ and the stop that may enclose it."""
    return text[:1000].lstrip(" $").rstrip(" $.")


def grade_all(
    grade: Callable[[str, str], float | bool],
    responses: Sequence[str],
    answers: Sequence[str],
    skip: Sequence[bool],
) -> list[float | bool]:
    """grade(response, answer) of every row, False where `skip` is set.

    Skipped rows are not graded: responses that were cut off get no reward whatever they hold. For
    grade_math, different pairs of LaTeX texts are compared side by side in up to GRADE_PROCESSES
    processes. One takes a second or two to start, then about 50 ms of a core for a pair (`python -m
    pytest -s tests/test_reward.py -k table` prints it). Raises ValueError for unequal lengths.
    """
    rows = list(zip(responses, answers, skip, strict=True))
    if grade is grade_math:
        _compare_side_by_side(rows)
    return [not skipped and grade(response, answer) for response, answer, skipped in rows]


def _compare_side_by_side(rows: list[tuple[str, str, bool]]) -> None:
    """Fill the cache of compare_latex for all rows (response, answer, skipped) that will ask it."""
    pairs: set[tuple[str, str]] = set()

    def remember(answer: str, given: str) -> bool:
        pairs.add((answer, given))
        return False

    for response, answer, skipped in rows:
        if not skipped:
            grade_math(response, answer, compare=remember)
    processes = min(os.cpu_count() or 1, GRADE_PROCESSES)
    with ThreadPoolExecutor(processes) as threads:
        comparisons = [threads.submit(compare_latex, answer, given) for answer, given in pairs]
    for comparison in comparisons:
        comparison.result()  # raises what went wrong there


# ---------------------------------------------------------------- math-verify
@lru_cache(maxsize=2**14)
def compare_latex(answer: str, given: str) -> bool:
    """Whether math-verify finds two LaTeX texts equal, within GRADE_SECONDS and GRADE_BYTES.

    Any thread may call this. The time-outs of the library itself are signals, which work in the
    main thread only, and late within one long operation. So it runs in processes that the kernel
    ends: they are started when needed, kept for the next answers, and end with this process.

    Raises ValueError if math-verify is not installed, RuntimeError if its process does not start.
    """
    import_math_verify()
    line = json.dumps([answer, given]) + "\n"
    for _ in range(2):  # again where a process was ended by somebody else
        worker = _take_worker()
        verdict = _ask(worker, line)
        if verdict:
            _idle[os.getpid()].append(worker)
            return verdict == "True\n"
        _dispose(worker)
        if worker.returncode == -signal.SIGPROF:  # it took too long
            return False
        if worker.returncode > 0:  # it ended by itself, and not by a signal
            command = " ".join(worker.args)
            raise RuntimeError(
                f"math-verify does not start in a process of its own: {command} says why"
            )
    return False


def _ask(worker: subprocess.Popen, line: str) -> str:
    """The line that a process gives for a line; "" if it has ended, before it read it or after."""
    try:
        worker.stdin.write(line)
    except BrokenPipeError:
        return ""
    return worker.stdout.readline()


def _take_worker() -> subprocess.Popen:
    """A process of math-verify without work: one that is there and alive, or a new one."""
    idle = _idle[os.getpid()]
    while True:
        try:
            worker = idle.pop()  # as one step: other threads take from this list, too
        except IndexError:
            return _start_worker()
        if worker.poll() is None:
            return worker


def _start_worker() -> subprocess.Popen:
    """A new process that runs this file: `_answer_pairs`."""
    return subprocess.Popen(
        [sys.executable, __file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        bufsize=1,  # a line is sent when it is written
        env={**os.environ, "PYTHONHASHSEED": "0"},  # sympy's order of terms follows the hashes
        start_new_session=True,  # Ctrl-C is not for it
    )


def _dispose(worker: subprocess.Popen) -> None:
    """Wait for the end of a process that answers no more; its return code is then known."""
    with suppress(BrokenPipeError):  # the line that it has not read
        worker.stdin.close()
    worker.stdout.close()
    worker.wait()


def _answer_pairs() -> None:
    """In a process of compare_latex: pairs as JSON lines in, a line True or False out for each."""
    import resource  # not on every system, and needed in this process only

    math_verify = import_math_verify()
    resource.setrlimit(resource.RLIMIT_AS, (GRADE_BYTES, GRADE_BYTES))
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_PROF, GRADE_SECONDS)  # SIGPROF ends the process
        answer, given = json.loads(line)
        expected = math_verify.parse(f"${answer}$", parsing_timeout=None)
        found = math_verify.parse(f"${given}$", parsing_timeout=None)
        equal = math_verify.verify(expected, found, timeout_seconds=None)
        print(bool(equal), flush=True)


def import_math_verify() -> ModuleType:
    """The library, imported when the first answer needs it. ValueError if it is not installed."""
    try:
        import math_verify
    except ImportError as error:
        raise ValueError(
            "answers that are not numbers need the package math-verify: pip install math-verify"
        ) from error
    return math_verify


# ---------------------------------------------------------------- a reward of one's own
@cache
def load_reward(place: str) -> Callable[[str, str], float | bool]:
    """The function that `place`, FILE.py:FUNCTION, names.

    Raises ValueError for a file that is not there or does not run, for a name that is no function
    in it, and for a function that does not take a response and an answer.
    """
    path, _, name = place.rpartition(":")
    if not os.path.isfile(path):
        raise ValueError(
            f"reward must be FILE.py:FUNCTION, got {place!r}: there is no file {path!r}"
        )
    try:
        definitions = runpy.run_path(path, run_name="reward_of_your_own")
        function = definitions.get(name)
        inspect.signature(function).bind("response", "answer")
    except Exception as error:
        cause = f"{type(error).__name__}: {error}"
        raise ValueError(
            f"reward: {path!r} needs a function {name}(response, answer) ({cause})"
        ) from error
    return function


def own_reward(place: str, response: str, answer: str) -> float:
    """What the function of `load_reward` gives; it may take as long as it likes.

    Raises ValueError if that is not a number from 0 to 1 or a bool.
    """
    function = load_reward(place)
    reward = function(response, answer)
    is_number = hasattr(reward, "__float__")
    if not (is_number and 0 <= float(reward) <= 1):
        shown = repr(reward)[:100]
        raise ValueError(
            f"reward: {place} must give a number from 0 to 1, got {shown} for {response[-100:]!r}"
        )
    return float(reward)


# ---------------------------------------------------------------- statistics
def pass_at_k(samples: int, correct: int, k: int) -> float:
    """Chance that at least one of k responses is right.

    1 - C(samples - correct, k) / C(samples, k): the k are drawn without replacement from `samples`
    responses, of which `correct` are right. It is unbiased for one problem. Raises ValueError for
    impossible counts.
    """
    if not (1 <= k <= samples and 0 <= correct <= samples):
        raise ValueError(
            "pass_at_k needs 1 <= k <= samples and 0 <= correct <= samples, "
            f"got {k=}, {samples=}, {correct=}"
        )
    return 1 - math.comb(samples - correct, k) / math.comb(samples, k)


if __name__ == "__main__":
    _answer_pairs()
