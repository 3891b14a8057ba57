"""Verifiable rewards: read the final answer of a response and grade it. No response makes it raise, and none takes long: linear
time, but for LaTeX answers, which the library math-verify compares in processes of their own (`compare_latex`)."""

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
from fractions import Fraction
from functools import cache, lru_cache
from typing import NamedTuple

# Escaped characters are consumed whole, so that \{ and \} (braces to be printed) do not count as braces.
_BRACES = re.compile(r"\\boxed\s*\{|\\.|[{}]", re.DOTALL)
# What stands around an answer without changing it: spacing and $; behind it also degrees, a unit such as \text{ cm}^2, a stop.
_SPACE = r"\s|~|\\?\$|\\[,;:! ]|\\(?:q?quad|displaystyle)(?![a-zA-Z])"
_TEXT = r"\\(?:text|textbf|mathrm|mathbf|mbox)\{"
_BEHIND = rf"{_SPACE}|\.|\^\{{?\\circ\}}?|\\degree|°|{_TEXT}[^{{}}0-9]*\}}(?:\^\{{?[0-9]\}}?)?"
_ENDS = re.compile(rf"^(?:{_SPACE})+|(?:{_BEHIND})+$")
_WRAPPED = re.compile(_TEXT + r"([^{}]*)\}")
_NAME = re.compile(r"^\\?[a-zA-Z]+(?:_\{?\w+\}?)?(?:\s*\+\s*[a-zA-Z]+)*\s*=")  # x=, m + n =, S_{10}=
_PART = r"(\{\s*-?[0-9]+\s*\}|[0-9])"
_THOUSANDS = r"[1-9][0-9]{0,2}(?:(?:,|\{,\}|,\\!\s*|\\,)[0-9]{3})+"
_NUMBER = re.compile(
    rf"([-+]?)\s*(?:([0-9]*)\s*\\[cdt]?frac\s*{_PART}\s*{_PART}|([0-9]+)\s*/\s*([0-9]+)"
    rf"|((?:{_THOUSANDS}|[0-9]+)(?:\.[0-9]*)?|\.[0-9]+))(?:\s*\\?%)?"
)
_ANSWER_LINE = re.compile(r"(?:^|\n)[ \t*#]*(?:(?:final )?answer[ \t*]*:|####)([^\n]*)", re.IGNORECASE)
GRADE_SECONDS, GRADE_BYTES = 3, 2**32  # processor time and address space that math-verify gets for an answer
_idle: dict[int, list[subprocess.Popen]] = defaultdict(list)  # process id -> its workers without work; a fork starts its own


class Problem(NamedTuple):
    """One problem, of a data set or of Countdown."""

    prompt: str | list[dict] | list[int]  # as read: text or messages of a chat; after `tokenize`: token ids
    answer: str


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
        elif token == "{" or len(token) > 2:
            open_braces.append(match.end() if len(token) > 2 else -1)
    return text[start:end] if start >= 0 else None


def bare(text: str) -> str:
    """`text` without what stands around an answer: "$x = 25.$" and "\\text{25}^\\circ" are "25"; "3 3 6" stays as it is. A text
    of more than 200 characters is no short answer: ""."""
    text = text.replace("−", "-") if len(text) <= 200 else ""
    for _ in range(2):  # outside and inside \text{}
        text = _ENDS.sub("", _NAME.sub("", _ENDS.sub("", text)))
        text = _WRAPPED.sub(r"\1", text) if _WRAPPED.fullmatch(text) else text
    return text


def aime_integer(text: str) -> int | None:
    """The integer 0-999 that `text` is, in digits ("016", "336^\\circ", "x = 25.0"); None if it is anything else."""
    match = re.fullmatch(r"\+?\s*0*([0-9]{1,3})(?:\.0+)?", bare(text))
    return int(match[1]) if match else None


def grade_aime(response: str, answer: str | int) -> bool:
    """Whether the last balanced box of `response` holds the integer `answer` and nothing else. ValueError if that is none."""
    expected = aime_integer(str(answer))
    if expected is None:
        raise ValueError(f"answer must be an integer from 0 to 999, got {str(answer)[:100]!r}")
    return aime_integer(extract_boxed(response) or "") == expected


def number(text: str) -> Fraction | None:
    """The number that `text` is: "72", "-1,234.50", "1{,}000", "3/4", "\\frac{3}{4}", "2\\frac12" (mixed: 5/2), with what
    `bare` takes away around it; None if it is anything else. Per cents count as they are written: 50\\% is 50."""
    if not (match := _NUMBER.fullmatch(bare(text))):
        return None
    sign, whole, *fraction, decimal = match.groups()
    parts = [int(part.strip("{}")) for part in fraction if part]
    if parts and (parts[1] == 0 or whole and not 0 <= parts[0] < parts[1]):
        return None
    value = int(whole or 0) + Fraction(*parts) if parts else Fraction(re.sub(r"[^0-9.]", "", decimal))
    return -value if sign == "-" else value


def final_answer(response: str) -> str | None:
    """What a response gives as its answer: its last balanced box; without one the end of the last line that begins with
    "Answer:", "Final answer:" or "####" (the forms that data sets ask for). None if there is none, or nothing in it."""
    answer = extract_boxed(response)
    if answer is None:
        lines = _ANSWER_LINE.findall(response)
        answer = lines[-1].strip(" \t*") if lines else ""
    return answer.strip() or None


def grade_math(response: str, answer: str, compare: Callable[[str, str], bool] | None = None) -> bool:
    """Whether the final answer of `response` is `answer`: a number by its exact value (what is no plain number is then wrong),
    any other as text, and if the texts differ by `compare` (LaTeX: 2\\sqrt{3} is \\sqrt{12}; default: compare_latex). So
    numbers are graded more strictly than by math-verify alone; tests/test_reward.py has a table of all differences."""
    given, expected = final_answer(response), number(answer)
    if given is None:
        return False
    if expected is not None:
        return number(given) == expected
    answer, given = (text[:1000].lstrip(" $").rstrip(" $.") for text in (answer, given))
    return given == answer or (compare or compare_latex)(answer, given)


def grade_all(grade: Callable, responses: Sequence[str], answers: Sequence[str], skip: Sequence[bool]) -> list[bool]:
    """grade(response, answer) of every row; False, ungraded, where `skip` is set: responses cut off get no reward anyway.

    For grade_math, different pairs of LaTeX texts are compared side by side, in at most 8 processes: a second or two to start
    one, then about 50 ms of a core a pair (python -m pytest -s tests/test_reward.py -k table).
    """
    rows = list(zip(responses, answers, skip, strict=True))
    if grade is grade_math:
        pairs: set[tuple[str, str]] = set()
        for response, answer, skipped in rows:
            if not skipped:
                grade_math(response, answer, lambda *pair: pairs.add(pair))
        with ThreadPoolExecutor(min(os.cpu_count() or 1, 8)) as threads:
            list(threads.map(compare_latex, *zip(*pairs)))  # into its cache
    return [not skipped and grade(response, answer) for response, answer, skipped in rows]


@lru_cache(maxsize=2**14)
def compare_latex(answer: str, given: str) -> bool:
    """Whether math-verify finds two LaTeX texts equal within GRADE_SECONDS and GRADE_BYTES. Any thread may call this.

    The library's own time-outs are signals: for the main thread only, and late within one long operation. So it runs in
    processes that the kernel ends, started when needed and kept; they end with this one.
    """
    import_math_verify()
    idle = _idle[os.getpid()]
    try:
        worker = idle.pop()
        while worker.poll() is not None:  # somebody ended it
            worker = idle.pop()
    except IndexError:
        options = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
        options |= {"bufsize": 1, "env": {**os.environ, "PYTHONHASHSEED": "0"}, "start_new_session": True}  # no Ctrl-C
        worker = subprocess.Popen([sys.executable, __file__], **options)
    worker.stdin.write(json.dumps([answer, given]) + "\n")
    verdict = worker.stdout.readline()
    if verdict:
        idle.append(worker)
    elif worker.wait() > 0:  # not ended by a signal
        raise RuntimeError(f"math-verify does not start in a process of its own: {' '.join(worker.args)} says why")
    return verdict == "True\n"


def import_math_verify():
    """The library, imported when the first answer needs it. Raises ValueError with the remedy if it is not installed."""
    try:
        import math_verify
    except ImportError as error:
        raise ValueError("answers that are not numbers are compared by math-verify: pip install math-verify") from error
    return math_verify


@cache
def load_reward(place: str) -> Callable[[str, str], float | bool]:
    """The function that FILE.py:FUNCTION names. Raises ValueError for a file that is not there or does not run, a name that
    is no function in it, and a function that does not take a response and an answer."""
    path, _, name = place.rpartition(":")
    if not os.path.isfile(path):
        raise ValueError(f"reward must be FILE.py:FUNCTION, got {place!r}: there is no file {path!r}")
    try:
        function = runpy.run_path(path, run_name="reward_of_your_own").get(name)
        inspect.signature(function).bind("response", "answer")
    except Exception as error:
        problem = f"needs a function {name}(response, answer) ({type(error).__name__}: {error})"
        raise ValueError(f"reward: {path!r} {problem}") from error
    return function


def own_reward(place: str, response: str, answer: str) -> float:
    """What the function of load_reward gives, which must be a number from 0 to 1 or a bool: ValueError if it is not."""
    given = load_reward(place)(response, answer)
    if not (hasattr(given, "__float__") and 0 <= float(given) <= 1):
        raise ValueError(f"reward: {place} must give a number from 0 to 1, got {given!r} for {response[-100:]!r}")
    return float(given)


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """Chance that at least one of k responses drawn without replacement from `samples`, `correct` of them right, is right:
    1 - C(samples - correct, k) / C(samples, k), unbiased for one problem. Raises ValueError for impossible counts."""
    if not (1 <= k <= samples and 0 <= correct <= samples):
        raise ValueError(f"pass_at_k needs 1 <= k <= samples and 0 <= correct <= samples, got {k=}, {samples=}, {correct=}")
    return 1 - math.comb(samples - correct, k) / math.comb(samples, k)


if __name__ == "__main__":  # a process of compare_latex: pairs as JSON lines in, True or False a line out
    import resource  # not on every system, and needed in this process only

    math_verify = import_math_verify()
    resource.setrlimit(resource.RLIMIT_AS, (GRADE_BYTES, GRADE_BYTES))
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_PROF, GRADE_SECONDS)  # SIGPROF ends the process
        gold, found = (math_verify.parse(f"${text}$", parsing_timeout=None) for text in json.loads(line))
        print(bool(math_verify.verify(gold, found, timeout_seconds=None)), flush=True)
