"""Verifiable rewards: read the final answer of a response and grade it.

No response can crash or stall these graders. Reading an answer takes time that is linear in the
length of the response. Numbers are compared exactly, and other answers as texts. If the texts
differ, the library math-verify compares them, in processes with limits (`compare_latex`). Your own
reward function (`own_reward`) has no time limit.
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
from contextlib import suppress
from fractions import Fraction
from functools import cache
from numbers import Real

# An escaped character matches, too, but without a group: \{ and \} are printed and enclose nothing.
_BRACES = re.compile(r"(\\(?:boxed|fbox)(?![a-zA-Z])\s*\{?|[{}])|\\.", re.DOTALL)
# \boxed 9 without braces: a number, or what ends with the formula. Without a limit, hostile text
# would take quadratic time.
_UNBRACED = re.compile(r"[-+]?\.?[0-9][^\s$]*|[^\s${}][^\s$]{0,400}?(?=\$|\\[)\]])")
_EMPTY_BOX = re.compile(r"(?:[\s.…_~$]|\\[,;:! ]|\\[lc]?dots)*")
# "**Final Answer:** 5", "#### 5", or "### Answer" and 5 in the next line that is not empty; also
# Minerva's "Final Answer: The final answer is $5$. I hope it is correct."
_ANSWER_LINE = re.compile(
    r"""^(?:[^\w\n]|_|[0-9]+[.)])*(?:
    (?:the\ )?(?:final\ |correct\ )?answer(?:\ is)?[ \t\r*_`]*[:：\n](?:[\s*_`]|(?:\$\$|\\\[)\s*\n)*
    (?:(?:the\ )?(?:final\ |correct\ )?answer\ is)?
    | (?<=\#\#\#\#)
    )(?=([^\n]*?)(?:I\ hope\ it\ is\ correct.*)?$)""",
    re.VERBOSE | re.MULTILINE | re.IGNORECASE,
)

MAX_CHARACTERS = 400  # a longer text is not a final answer

# `normalize_latex` writes an answer in one notation. These patterns are replaced, in this order ...
_NOTATIONS = (
    ("−", "-"),
    ("²", "^2"),
    ("³", "^3"),
    ("[×·⋅•]", r"\\cdot "),
    ("π", r"\\pi "),
    ("∞", r"\\infty "),
    ("√", r"\\sqrt"),
    ("½", r"\\frac12"),
    # 1{,}000 and 1,\!000 become 1,000
    (r"(?<=[0-9])(?:,\\!\s*|\\,|\{,\})(?=[0-9]{3})", ","),
    # 90^\circ and 25^\circ C become 90 and 25
    (r"(?:\^\{?\\circ\}?|\\degree|°)(?: ?[CF](?![a-zA-Z]))?", " "),
    (r"\\(?:q?quad|displaystyle|textstyle|bf|rm)(?![a-zA-Z])", " "),
    # a space for spaces, currencies and signs of formulas: \$5, \(5\) and $5$ become 5
    (r"(?:[\s~€£¥]|(?<!\\)(?:\\?\$|\\[,;:! ()\[\]]))+", " "),
    # \left( becomes (
    (r"\\(?:left|right)(?![a-zA-Z.])", ""),
    (r"\\[cdt]frac", r"\\frac"),
    # \operatorname{arcsin} becomes arcsin, and \mathrm{cm} becomes \text{cm}
    (r"\\operatorname ?\{([a-z]+)\}", r"\1"),
    (r"\\(?:text[a-z]*|mathrm|mbox|operatorname) ?\{", r"\\text{"),
    # 6, 8\text{, and } 10 becomes 6, 8, 10
    (r",? ?\\text\{ ?,? ?(?:and|or) ?\}", ", "),
    (r"\\varnothing", r"\\emptyset"),
    (r"\\mid(?![a-zA-Z])", "|"),
    # \leqslant and \leq become \le
    (r"\\([gl])eq(?:slant)?(?![a-zA-Z])", r"\\\1e"),
    # \mathrm{d}x becomes dx, and \mathbf{v} becomes v
    (r"\\text\{([deij])\}|\\(?:mathbf|boldsymbol|bm) ?\{(\w)\}", r"\1\2"),
    # \mathbf{25} becomes {25}
    (r"\\(?:mathbf|mathit|boldsymbol|bm|emph|underline) ?\{", "{"),
    # x**2 becomes x^2, but **25** is Markdown
    (r"(?<=[\w)}\]])\*\*(?=[\w({\\-])", "^"),
    # 2*pi becomes 2*\pi, sin(x) and ln 2 become \sin (x) and \ln 2, and (2, oo) becomes (2, \infty)
    (r"(?<![\\a-zA-Z])(pi|alpha|beta|gamma|theta|phi)(?![a-zA-Z])", r"\\\1 "),
    (
        r"(?<![\\a-zA-Z])((?:arc)?(?:sin|cos|tan)h?|cot|sec|csc|ln|log|exp)"
        r"(?= ?(?:[({|0-9\\^_]|[a-z](?![a-z])))",
        r"\\\1 ",
    ),
    (r"(?<![\\a-zA-Z])(?:oo|inf|infinity|infty)(?![a-zA-Z])", r"\\infty "),
    # (0,1)U(2,3) becomes (0,1)\cup (2,3)
    (r"(?<=[)\]]) ?U ?(?=[(\[])", r"\\cup "),
    # sqrt(x+1), \sqrt(x+1) and \sqrt13 become \sqrt{x+1} and \sqrt{13}
    (
        r"(?:\\|(?<![\\a-zA-Z]))sqrt(\[[^\]]*\])? ?(?:\(((?:[^()]|\([^()]*\))*)\)"
        r"|([0-9]+(?:\.[0-9]+)?|(?:\\pi|[a-zA-Z])(?![a-zA-Z])))",
        r"\\sqrt\1{\2\3}",
    ),
    # 2i becomes 2 i, because math-verify takes the i behind a digit for a real number
    (r"(?<=[0-9])i(?![a-zA-Z])", " i"),
)
# ... and what may stand around an answer is removed: = and a label, punctuation and the base ten,
# the unit of a number, and braces.
# \text{Area of } ABC =, or \text{Answer: }
_LABEL = r"\\text\{[^{}]*(?:\}(?:_\w|_\{\w*\})?[\\a-zA-Z ]*[=:]|: ?\})(?=[^=:]*$)"
_AROUND = re.compile(
    rf"(?:[ *`=]|{_LABEL})*(.*?)(?:[ *`,;:]|(?<!\.)\.(?!\.)|(?<=[0-9])_\{{?10\}}?)*"
)
# \text{ cm}^2, or / \text{s}, but not \text{ p.m.}
_UNIT = (
    r" ?(?:/|\\cdot ?)?\\text\{(?! ?[aApP]\.?[mM]\b)(?:\^\{?-?[0-9]\}?|[^{}0-9])*\}"
    r"(?:\^\{?-?[0-9]\}?)?"
)
# a word in \text{}, or a \text{} before a number
_WORDS = r"\\text\{[^{}]*(?:[a-zA-Z]{2}|\}[ ]?[0-9])"
# 25 \text{ cm}^2: the group is 25
_WITH_UNIT = re.compile(rf"((?:(?!{_WORDS}).)*(?:[0-9)}}]|\\pi) ?)(?:{_UNIT})+")
# {25} or \text{25}, with up to two more layers of braces inside: the group is 25
_WRAPPED = re.compile(r"(?:\\text)?\{([^{}]*(?:\{[^{}]*(?:\{[^{}]*\}[^{}]*)*\}[^{}]*)*)\}")

# What a number is the value of: x =, m + n =, S_{10} =, \angle A =, f(3) =
_NAME = r"(?:[\\a-zA-Z][\\a-zA-Z ]*(?:_\w|_\{[^{}]*\})?(?:\([^()=]*\))?(?: ?\+ ?[a-zA-Z]+)* ?= ?)?"
# A number in one of four forms, perhaps with a sign, a power of ten, a per cent sign, and (apples)
# behind a space
_NUMBER = re.compile(
    _NAME + r"([-+]?) ?(?:"
    r"([0-9]*) ?\\frac ?(\{ ?-?[0-9]+ ?\}|[0-9]) ?(\{ ?-?0*[1-9][0-9]* ?\}|[1-9])"
    r"|([0-9]+ ?/ ?0*[1-9][0-9]*"  # 3/4
    r"|[1-9][0-9]{0,2}(?:,[0-9]{3})+(?:\.[0-9]*)?"  # 1,234.5
    r"|[0-9]+(?:\.[0-9]*)?|\.[0-9]+)"
    r")(?: ?(?:\\times|\\cdot|\*) ?10 ?\^ ?\{? ?([-+]?[0-9]{1,3}) ?\}?)?"  # \times 10^{3}
    r"(?: ?\\?%)?(?: \( ?[a-zA-Z][a-zA-Z .'-]*\))?"
)

# What `comparison_text` replaces, in this order. A fraction with something beside it stays.
_SPELLINGS = (
    (r"\\text\{([^{}]*)\}", r"\1"),  # \text{Monday}
    (r"\{(\w)\}", r"\1"),  # x^{2} becomes x^2
    # \frac{\pi}{2} and \frac \pi2 become \pi/2
    (
        r"(?<![\w^])(?<![\w^] )\\frac ?(?:\{([^{}+-]+)\}|(\w|\\[a-zA-Z]+))"
        r" ?(?:\{([0-9]+|\\?[a-zA-Z]+)\}|(\w|\\[a-zA-Z]+))(?! ?\w)",
        r"\1\2/\3\4",
    ),
    (r"(^|[0-9] )\(([a-zA-Z .'-]+)\)$", r"\1\2"),  # (C), 9 (apples)
    (r"(?<![0-9]) | (?![0-9])", ""),  # 2 5 is not 25
    (r"(?<=[0-9])([aApP])\.?[mM]\.?$", r"\1m"),  # 8:30 p.m.
)

# What math-verify drops, takes for a product of letters and numbers, or works out
_UNREADABLE = re.compile(
    r"""\\(?:overline|d?dot|bar|vec|[a-z]*dots[a-z]?|prime|partial|approx|top)(?![a-zA-Z])
    | \\(?:sum|prod|i*nt|lim)(?![a-zA-Z])  # what is still to be worked out
    | '|…|\.\. | \^\{?T                    # f'(x), 0.33..., A^T
    | [0-9][)}]*\ ?_                       # 52_8
    | (?:\}\{|/)\ ?d\ ?[a-zA-Z]            # \frac{dy}{dx}
    | [0-9]:[0-5][0-9](?![0-9])            # 12:50
    | (?<![_^])[0-9]\ [0-9]                # 3 4
    | ^[a-zA-Z ]{2,}$                      # ABD
    | (?<![\\a-zA-Z])(?<!\\begin\{)(?<!\\end\{)(?!and\ |or\ )(?:
        [a-zA-Z]{4,} | [a-zA-Z]+\ ?[0-9]               # words: two pears, 5 ft 6 in
        | [A-Z]{2,}(?![A-Z]*[\]}]?\ ?=))               # ABD, but not AB =
    |"""
    + _WORDS,
    re.VERBOSE,
)

# Limits of math-verify. Most pairs of texts take 0.1 s.
PAIR_SECONDS = 1  # processor time
PAIR_BYTES = 2**29  # address space
PAIRS_AT_ONCE = 16


# ---------------------------------------------------------------- reading an answer
def extract_boxed(text: str) -> str | None:
    """Return the content of the last box that is not empty, or None if there is none.

    A box is \\boxed{...} or \\fbox{...} with balanced braces, or \\boxed 9. Only what follows the
    last </think> counts, if there is one.
    """
    text = text.rpartition("</think>")[2]
    ends = []  # positions of closing braces whose opening brace is still to come
    for match in reversed(list(_BRACES.finditer(text))):
        token = match[1]
        if not token:  # an escaped character
            continue
        content = ""
        if token == "}":
            ends.append(match.start())
        elif token[-1] != "{":  # a box without braces
            if unbraced := _UNBRACED.match(text, match.end()):
                content = unbraced[0]
        elif ends:
            end = ends.pop()
            if token != "{":  # a box
                content = text[match.end() : end]
        if not _EMPTY_BOX.fullmatch(content):
            return content
    return None


def normalize_latex(text: str) -> str:
    """Return `text` in one notation of LaTeX, without what may stand around an answer.

    "$25.$", "\\text{25}^\\circ" and "25\\,\\mathrm{cm}^2" become "25"; "3 3 6" stays as it is. A
    text of more than MAX_CHARACTERS becomes "".
    """
    if len(text) > MAX_CHARACTERS:
        return ""
    for pattern, notation in _NOTATIONS:
        text = re.sub(pattern, notation, text)
    for _ in range(3):  # each time, one more layer of braces or \text{} is taken off
        for pattern in (_AROUND, _WITH_UNIT, _WRAPPED):
            if match := pattern.fullmatch(text):
                text = match[1]
    return text.strip()


def number(text: str) -> Fraction | None:
    """Return the exact value of the number that `text` is, or None.

    Numbers are "72", "016", "-1,234.50", "1{,}000", "3/4", "\\frac{3}{4}", "2\\frac12" (a mixed
    number: 5/2) and "1.5\\times10^3", with a name (x=72) and anything around them that
    normalize_latex removes. 50\\% is 50.
    """
    match = _NUMBER.fullmatch(normalize_latex(text))
    if not match:
        return None
    sign, whole, numerator, denominator, plain, exponent = match.groups()
    if plain:
        value = Fraction(re.sub("[^0-9./]", "", plain))
    else:
        numerator = int(numerator.strip("{}"))
        denominator = int(denominator.strip("{}"))
        if whole and not 0 <= numerator < denominator:  # 2\frac{5}{2} is no mixed number
            return None
        value = int(whole or 0) + Fraction(numerator, denominator)
    value *= Fraction(10) ** int(exponent or 0)
    return -value if sign == "-" else value


def comparison_text(text: str) -> str:
    """Return normalize_latex(text) without spaces and braces that do not matter.

    Texts are compared by it. It is the same for \\frac{\\pi}{2} and \\pi/2, for (3, 4) and (3,4),
    and for C and (C). It does no arithmetic and reads no numbers. Case matters only in a text with
    a LaTeX command.
    """
    text = normalize_latex(text)
    for pattern, replacement in _SPELLINGS:
        text = re.sub(pattern, replacement, text)
    return text if "\\" in text else text.casefold()


def final_answer(response: str) -> str | None:
    """Return the last box (see `extract_boxed`), or else the last answer line, or None.

    Such a line begins with "Answer:", "Final answer:" or "####", and the answer may stand in the
    next line.
    """
    answer = extract_boxed(response)
    if answer is None:
        for match in _ANSWER_LINE.finditer(response.rpartition("</think>")[2]):
            answer = match[1].strip(" \t\r*_`") or answer  # an empty line is no answer
    return answer


# ---------------------------------------------------------------- grading
def grade_aime(response: str, answer: str | int) -> bool:
    """Return whether the last box of `response` is the number `answer`.

    Raises ValueError if `answer` is not an integer from 0 to 999.
    """
    expected = number(str(answer))
    if expected not in range(1000):
        raise ValueError(
            f"answer must be an integer from 0 to 999, got {answer!r}: use --grader math"
        )
    return number(extract_boxed(response) or "") == expected


def grade_math(response: str, answer: str) -> bool:
    """Return whether the final answer of `response` is `answer`.

    Two numbers are compared by their exact values, and other answers as texts. If the texts differ,
    `compare_latex` decides, for which 2\\sqrt{3} is \\sqrt{12}. To grade many responses, call
    `grade_all`.
    """
    return grade_all(grade_math, [response], [answer], truncated=[False])[0]


def _grade_without_library(response: str, answer: str):
    """Return whether the response is right, or the two LaTeX texts whose comparison decides it."""
    given = normalize_latex(final_answer(response) or "")
    if not given:
        return False
    if comparison_text(given) == comparison_text(answer):
        return True
    answer = normalize_latex(answer)
    values = [number(answer), number(given)]
    left_sides = {text.partition("=")[0].strip() for text in (answer, given) if "=" in text}
    if None not in values and len(left_sides) < 2:  # x = 5 is 5
        return values[0] == values[1]
    if left_sides and values != [None, None]:  # x = 5 is not y = 5, and x + y = 5 is not 5
        return False
    if _UNREADABLE.search(answer) or _UNREADABLE.search(given):
        return False
    return answer, given


def grade_all(
    grader: Callable[[str, str], float],
    responses: list[str],
    answers: list[str],
    truncated: list[bool],
) -> list[float]:
    """Return grader(response, answer) of every row, or False if the response was cut off.

    For grade_math all LaTeX texts are compared at once. Raises ValueError for unequal lengths.
    """
    if grader is grade_math:
        grader = _grade_without_library
    grades = []  # rewards, or pairs of texts whose comparison decides the reward
    for response, answer, is_cut in zip(responses, answers, truncated, strict=True):
        grades.append(not is_cut and grader(response, answer))
    pairs = list({grade for grade in grades if isinstance(grade, tuple)})
    verdicts = dict(zip(pairs, compare_latex(pairs)))
    return [verdicts.get(grade, grade) for grade in grades]


# ---------------------------------------------------------------- math-verify
def compare_latex(pairs: list[tuple[str, str]]) -> list[bool]:
    """Return whether math-verify finds the two LaTeX texts of each pair equal.

    The library's own time-outs are signals, which work in the main thread only and cannot interrupt
    a long operation. So every pair gets a process of its own, a fork. After PAIR_SECONDS of
    processor time the kernel ends it, and its pair counts as not equal.

    The gold answer comes first, and says whether order counts: 4, 3 is not (3, 4), but the set
    \\{3, 4\\}. Otherwise the two may be exchanged. Raises ValueError if math-verify does not work.
    """
    if not pairs:
        return []
    run = subprocess.run(
        [sys.executable, __file__],
        input=json.dumps(pairs),
        env=os.environ | {"PYTHONHASHSEED": "0"},  # sympy's order of terms follows the hashes
        capture_output=True,
        text=True,
    )
    if run.returncode != 0:
        _, _, reason = run.stderr.strip().rpartition("\n")  # the last line of a traceback
        raise ValueError(
            f"math-verify, which compares answers in LaTeX, does not work here ({reason}): run `pip"
            " install math-verify antlr4-python3-runtime==4.13.2`"
        )
    return json.loads(run.stdout)


def check_math_verify() -> None:
    """Raise ValueError if math-verify does not work, for example with another antlr runtime."""
    compare_latex([("x+1", "1+x")])


def _compare() -> None:
    """Read pairs as JSON and print the verdicts, in the process that compare_latex starts."""
    import resource  # not on every system

    logging.disable()  # the library warns that it has no time limit
    with suppress(ValueError, OSError):  # macOS has no such limit
        resource.setrlimit(resource.RLIMIT_AS, (PAIR_BYTES, PAIR_BYTES))
    # This loads all parts of the library once, or each fork would need a second for it.
    if not _is_equal("(x+1)^2", "x^2+2x+1"):
        raise RuntimeError("a trial comparison failed")
    pairs = json.load(sys.stdin)
    verdicts = []
    for start in range(0, len(pairs), PAIRS_AT_ONCE):
        forks = [_fork(pair) for pair in pairs[start : start + PAIRS_AT_ONCE]]
        for fork in forks:
            _, status = os.waitpid(fork, 0)
            verdicts.append(status == 0)
    print(json.dumps(verdicts))


def _fork(pair: list[str]) -> int:
    """Return the id of a new process that ends with status 0 if the two texts are equal."""
    fork = os.fork()
    if fork == 0:
        signal.setitimer(signal.ITIMER_PROF, PAIR_SECONDS)  # SIGPROF ends the process
        try:
            if _is_equal(*pair):
                os._exit(0)
        finally:
            os._exit(1)
    return fork


def _is_equal(answer: str, given: str) -> bool:
    """Return math-verify's verdict, without a time limit.

    Texts that are no LaTeX are not searched for a number, units are not dropped, and values are
    compared to a thousand digits.
    """
    from latex2sympy2_extended import NormalizationConfig
    from math_verify import LatexExtractionConfig, parse, verify

    units_stay = NormalizationConfig(malformed_operators=True, nits=True)
    config = [LatexExtractionConfig(normalization_config=units_stay)]
    expected = parse(f"${answer}$", config, parsing_timeout=None)
    found = parse(f"${given}$", config, parsing_timeout=None)
    return verify(
        expected,
        found,
        float_rounding=1000,
        numeric_precision=1050,
        allow_set_relation_comp=True,  # 0 < x < 1 is (0, 1), in both directions
        timeout_seconds=None,
    )


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """Return an unbiased estimate of the chance that at least one of k responses is right.

    It is 1 - C(samples - correct, k) / C(samples, k). k is at most `samples`.
    """
    return 1 - math.comb(samples - correct, k) / math.comb(samples, k)


# ---------------------------------------------------------------- your own reward
def own_reward(spec: str, response: str, answer: str) -> float:
    """Return the value of the reward function `spec`, FILE.py:FUNCTION.

    The file may import its neighbours. Raises ValueError if the function fails, or does not return
    a number from 0 to 1.
    """
    path, _, name = spec.rpartition(":")
    try:
        value = _run_file(path)[name](response, answer)
        if not (isinstance(value, Real) and 0 <= value <= 1):
            raise ValueError(f"it returned {value!r}")
    except Exception as error:
        raise ValueError(
            f"reward: {spec} failed for the response {response[-100:]!r}: {error!r}. It must be"
            " FILE.py:FUNCTION, take (response, answer), and return a number from 0 to 1"
        ) from error
    return float(value)


@cache
def _run_file(path: str) -> dict:
    """Run a file once, as `import` would, and return the names that it defines."""
    sys.path.insert(0, os.path.dirname(path))
    return runpy.run_path(path)


if __name__ == "__main__":
    _compare()
