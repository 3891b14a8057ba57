"""Verifiable rewards: read the final answer of a response and grade it.

No response can crash or stall these graders. Reading an answer takes time that is linear in the
length of the response. Numbers are compared exactly, and other answers as texts. If the texts
differ, the library math-verify compares them, in processes with limits (`compare_latex`). Your own
reward function (`own_reward`) has no time limit.
"""

import json
import math
import os
import re
import resource
import runpy
import signal
import subprocess
import sys
import traceback
import unicodedata
from collections.abc import Callable
from fractions import Fraction
from functools import cache, partial

# What braces enclose, with up to eight layers of braces inside. \{ and \} are printed and enclose
# nothing. The + behind * gives nothing back: the time is linear in the length of the text.
_CONTENT = r"(?:[^{}\\]|\\.)*+"
for _ in range(8):
    _CONTENT = rf"(?:[^{{}}\\]|\\.|\{{{_CONTENT}\}})*+"
# \boxed{9} or \fbox{9}, but not \\boxed, a line break, and no box without an answer, such as
# \boxed{...}. \boxed 9 without braces ends with the formula, unless it is a number. Without a
# limit, hostile text would take quadratic time.
_BOX = (
    r"(?s)(?<!\\)(?:\\\\)*\\(?:boxed|fbox)(?![a-zA-Z])\s*+"
    rf"(?=\{{(?!(?:[\s.…_~$]|\\[,;:! ]|\\[lc]?dots)*+\}})({_CONTENT})\}}"
    r"|([-+]?\.?[0-9][^\s$]{0,400}|[^\s${}][^\s$]{0,400}?(?=\$|\\[)\]])))"
)
# "**Final Answer:** 5", "So the answer is: 5", "#### 5", or "### Answer" and 5 in the next line
# that is not empty; also, anywhere, Minerva's "Final Answer: The final answer is $5$. I hope it is
# correct." A longer line is no answer, and without a limit hostile text would take quadratic time.
_ANSWER_LINE = r"""(?xim)
    (?:^(?:[^\w\n]|_|[0-9]+[.)]|(?:so|thus|hence|therefore)\b)*
        |\b(?=final\ answer:\ the\ final\ answer\ is))(?:
    (?:the\ )?(?:final\ |correct\ )?answer(?:\ is)?[ \t\r*_`]*[:：\n](?:[\s*_`]|(?:\$\$|\\\[)\s*\n)*
    (?:(?:the\ )?(?:final\ |correct\ )?answer\ is)?
    | (?<=\#\#\#\#)
    )(?=([^\n]{0,400}?)(?:I\ hope\ it\ is\ correct.*)?$)"""

MAX_CHARACTERS = 400  # a longer text is not a final answer

# `normalize_latex` writes an answer in one notation. It replaces characters ...
_PATTERNS = {
    "−": "-",
    "[×·⋅]": "*",
    "²": "^2",
    "³": "^3",
    "π": r"\\pi ",
    "∞": r"\\infty ",
    "√": r"\\sqrt ",
    "±": r"\\pm ",
    "∪": r"\\cup ",
    **{
        character: r"\\frac{" + unicodedata.normalize("NFKC", character).replace("⁄", "}{") + "}"
        for character in "¼½¾⅐⅑⅒⅓⅔⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞"
    },
    # ... commands ...
    r"\\[cdt]frac(?![a-zA-Z])": r"\\frac",
    r"\\(?:text[a-z]+|mathrm|operatorname|mbox)(?![a-zA-Z])": r"\\text",
    r"\\([lg])eq(?:slant)?(?![a-zA-Z])": r"\\\1e",
    r"\\varnothing(?![a-zA-Z])": r"\\emptyset",
    r"\\(?:cdot|times)(?![a-zA-Z])": "*",
    r"\\mid(?![a-zA-Z])": "|",
    r"\\(?:q?quad|displaystyle|textstyle|bf|rm)(?![a-zA-Z])": " ",
    r"\\(?:(?:left|right)(?!\.)|mathbf|mathit|boldsymbol|bm|emph|underline)(?![a-zA-Z])": "",
    # ... and what is written in several ways, in this order
    r"(?<=[0-9])(?:,\\!\s*|\\,|\{,\})(?=[0-9]{3})": ",",  # 1{,}000
    # a space for spaces, currencies and signs of formulas: \$5, \(5\) and $5$ become 5
    r"(?:[\s~€£¥]|(?<!\\)(?:\\?\$|\\[,;:! ()\[\]]))+": " ",
    # 25^\circ C
    r"(?:°|\\degree(?![a-zA-Z])|\^ ?\{? ?(?:\\circ|\\degree) ?\}?)(?: ?[CF](?![a-zA-Z]))?": " ",
    r"\\text ?\{([deij])\}": r"\1",  # \mathrm{d}x
    r"\\text ?\{(exp|ln|log|(?:arc)?(?:sin|cos|tan)|cot|sec|csc)\} ?": r"\\\1 ",
    r",?(?: ?\\text ?\{ ?,? ?| )(?:and|or)(?: ?\}| )": ", ",  # 6, 8\text{, and } 10
    # \sqrt13 and \sqrt x
    r"\\sqrt ?(\[[^\]]*\])? ?([0-9]+(?:\.[0-9]+)?|\\pi|[a-zA-Z](?![a-zA-Z]))": r"\\sqrt\1{\2}",
    r"([\^_]) ?(-?[0-9]+|\w)": r"\1{\2}",  # x^2
    r"\\(frac|overline) ?(\w|\\pi)": r"\\\1{\2}",  # \frac12, \frac\pi2
    r"(\\frac ?\{[^{}]*\}) ?(\w|\\pi(?![a-zA-Z]))": r"\1{\2}",
    r"(?<=[0-9])i(?![a-zA-Z])": "*i",  # math-verify takes the i in 2i for a real number
    # what may stand around an answer
    r"^[ *`=]+|(?:[ *`,;:]|(?<!\.)\.|(?<=[0-9])_\{10\})+$": "",
    rf"^(?:\\text ?)?\{{({_CONTENT})\}}$": r"\1",
}
# Behind a number, \text{ cm}^2, / \text{s}, or (apples) with a space, but no words that change it
# or say something about it
_UNITS = r"""(?xi)
    (?<=[0-9)}i])(?:\ ?[/*]?\ ?\\text\ ?\{|\ \((?![^mg]\))(?=(?:[a-zA-Z\ .']|-[a-zA-Z]{2})+\)))
    (?!\W*(?:squared|cubed|factorial|[ap]\.?m)\b | [^{}()]*\b(?:
        hundred | thousand | [mb]illion | trillion | dozen | hal[fv]
        | (?:thirds|fourths|fifths|sixths|eighths|tenths | k|mn|bn | over|minus|plus|mod|base
        | choose|remainder | is|are|was|if|no|not|to|than|least|most|about|approx\w*|roughly|almost
        | nearly|below|under|negative|wrong|incorrect|false)\b))
    (?:[^{}()0-9,=<>]|\^\{-?[0-9]+\})*[})](?:\^\{-?[0-9]+\})?
    (?=$|\ ?[/*]?\ ?\\text)"""

# What `comparison_text` replaces, in this order
_SPELLINGS = {
    rf"\\text ?\{{({_CONTENT})\}}": r"\1",  # \text{Monday}
    r"(^|[0-9] )\(([a-zA-Z .']+)\)$": r"\1\2",  # (C), 9 (apples)
    r"(?<=[0-9])( *[aApP])\.?[mM]\.?$": r"\1m",  # 8:30 p.m.
    # Spaces go, but 2 5 is not 25, "2, 100" is not 2,100, and \pi r has no other form.
    r"([0-9] (?=[0-9])|^[0-9]{1,3}, (?=[0-9]{3}$)|\\[a-zA-Z]+ (?=[a-zA-Z]))| ": r"\1",
    # \frac{1}{2} as a factor, an exponent or a base stays
    r"(?<![\w)\]}^/!|])\\frac\{([0-9]+)\}\{([0-9]+)\}(?![\w({\\^!])": r"\1/\2",
}

# x=5, m+n=5, S_{10}=5, \angle A=5, or f(3)=5, as `comparison_text` writes them
_NAMED = r"^(?!not)\\?[a-zA-Z]+(?: [a-zA-Z]+)?(?:_\{\w+\})?(?:\([^()=]*\))?(?:\+[a-zA-Z])*=([^=]*)$"
# A number in one of three forms, perhaps with a sign, a power of ten and a per cent sign
_NUMBER = r"""(?x)
    ([-+]?(?:
    [0-9]+/0*[1-9][0-9]*  # 3/4
    | [1-9][0-9]{0,2}(?:,[0-9]{3})+(?:\.[0-9]+)?  # 1,234.5
    | [0-9]+(?:\.[0-9]+)? | \.[0-9]+
    ))(?:\*10\^\{([-+]?[0-9]{1,3})\})?(?:\\?%)?"""

# What math-verify reads right: it drops other commands, or takes words for products of letters.
_READABLE = r"""(?x)
    (?![a-zA-Z]+$)(?:
    (?:[0-9]+(?:\.[0-9]+)?|\.[0-9]+)(?![0-9._]|\ [0-9])
    | [-+/<>|&()\[\]{}\ ] | \\\\ | \\[{}] | (?<!\{), | \*(?!\*) | =(?!=) | !(?![!=])
    | \^(?!\{?T)  # no transpose
    | (?<![a-zA-Z])[a-zA-Z](?![a-zA-Z]|\ ?[0-9])(?:_\{\w+\})?  # x_{1}
    | (?<![a-zA-Z0-9])[a-ce-z]{2,3}(?![a-zA-Z]|\ ?[0-9])  # the product ab, but no dx
    | \\(?:frac|pi|infty|emptyset|pm|mp|cup|cap|setminus|in|le|ge|ne|neq|lt|gt|exp|ln
        |alpha|beta|gamma|delta|epsilon|theta|lambda|mu|rho|sigma|tau|phi|omega
        |(?:arc)?(?:sin|cos|tan)|cot|sec|csc|[lr]floor|[lr]ceil|[lr]vert|binom)(?![a-zA-Z])
    | \\sqrt(?=[{\[]) | \\log(?:_\{\w+\})? | \\mathbb\{[A-Z]\} | \\(?:begin|end)\{[pbv]?matrix\}
    )+"""

# Limits of math-verify. Most pairs of texts take 0.1 s.
PAIR_SECONDS = 1  # processor time
PAIR_BYTES = 2**29  # address space
PAIRS_AT_ONCE = 16


# ---------------------------------------------------------------- reading an answer
def extract_boxed(text: str) -> str:
    """Return the content of the last box that is not empty, or "" if there is none.

    A box is \\boxed{...} or \\fbox{...} with balanced braces, or \\boxed 9. Only what follows the
    last </think> counts, if there is one.
    """
    answer = ""
    for in_braces, bare in re.findall(_BOX, text.rpartition("</think>")[2]):
        answer = in_braces or bare
    return answer


def normalize_latex(text: str) -> str:
    """Return `text` in one notation of LaTeX, without what may stand around an answer.

    "$25.$" and "\\text{25}^\\circ" become "25", and \\frac12 becomes \\frac{1}{2}. A text of more
    than MAX_CHARACTERS becomes "".
    """
    if len(text) > MAX_CHARACTERS:
        return ""
    for pattern in [*_PATTERNS, *_PATTERNS]:  # each time, a layer of braces or \text{} is taken off
        text = re.sub(pattern, _PATTERNS[pattern], text)
    return text


def comparison_text(latex: str) -> str:
    """Return what normalize_latex gave, without \\text and without spaces that do not matter.

    It is the same for (3, 4) and (3,4), for C and (C), and for \\text{25 cm} and 25\\text{ cm}. It
    does no arithmetic and reads no numbers. Case matters only in a text with a LaTeX command.
    """
    for pattern, replacement in _SPELLINGS.items():
        latex = re.sub(pattern, replacement, latex)
    return latex if "\\" in latex else latex.casefold()


def value_text(latex: str) -> str:
    """Return comparison_text(latex) without name and units: 25 for x = 25\\text{ cm}^2."""
    return re.sub(_NAMED, r"\1", comparison_text(re.sub(_UNITS, "", latex)))


def number(text: str) -> Fraction | None:
    """Return the exact value of the number that `text`, from value_text, is, or None.

    Numbers are "72", "016", "-1,234.50", "3/4" and "1.5*10^{3}". 50\\% is 50.
    """
    match = re.fullmatch(_NUMBER, text)
    if not match:
        return None
    return Fraction(match[1].replace(",", "")) * Fraction(10) ** int(match[2] or 0)


def final_answer(response: str) -> str:
    """Return the last box (see `extract_boxed`), or else the last answer line, or "".

    Such a line begins with "Answer:", "Final answer:" or "####", and the answer may stand in the
    next line.
    """
    answer = extract_boxed(response)
    if not answer:
        for line in re.findall(_ANSWER_LINE, response.rpartition("</think>")[2]):
            answer = line.strip(" \t\r*_`") or answer  # an empty line is no answer
    return answer


# ---------------------------------------------------------------- grading
def grade_math(response: str, answer: str) -> bool:
    """Return whether the final answer of `response` is `answer`.

    Two numbers are compared by their exact values, and other answers as texts. If the texts differ,
    `compare_latex` decides, for which 2\\sqrt{3} is \\sqrt{12}. To grade many responses, call
    `grade_all`.
    """
    return grade_all(grade_math, [response], [answer], truncated=[False])[0]


def grade_all(
    grader: Callable,
    responses: list[str],
    answers: list[str],
    truncated: list[bool],
) -> list[float]:
    """Return grader(response, answer) of every row, or False if the response was cut off.

    For grade_math all LaTeX texts are compared at once. Raises ValueError for unequal lengths.
    """
    if grader is grade_math:
        grader = _verdict_or_texts
    rows = zip(responses, answers, truncated, strict=True)
    grades = [not is_cut and grader(response, answer) for response, answer, is_cut in rows]
    pairs = list({grade for grade in grades if isinstance(grade, tuple)})
    verdicts = dict(zip(pairs, compare_latex(pairs)))
    return [verdicts.get(grade, grade) for grade in grades]


def _verdict_or_texts(response: str, answer: str) -> bool | tuple[str, str]:
    """Return the verdict of grade_math, or the two texts that math-verify must compare.

    25 cm is 25\\text{ cm}, 25\\text{ cm} is 25, and x = 5 is 5, but not y = 5.
    """
    answer = normalize_latex(answer)
    given = normalize_latex(final_answer(response))
    texts = comparison_text(answer), comparison_text(given)
    if texts[0] != texts[1] and not all("=" in text for text in texts):
        texts = value_text(answer), value_text(given)
    if texts[0] == texts[1]:
        return texts[0] != ""
    values = [number(text) for text in texts]
    if None not in values:
        return values[0] == values[1]
    if values != [None, None] and "=" in "".join(texts):  # 2x + y = 5 is not 5
        return False
    return all(re.fullmatch(_READABLE, text) for text in texts) and texts


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
        raise ValueError(
            "math-verify, which compares answers in LaTeX, does not work here: run `pip install"
            f" math-verify antlr4-python3-runtime==4.13.2`. It said:\n{run.stderr}"
        )
    return json.loads(run.stdout)


def _compare() -> None:
    """Read pairs as JSON and print the verdicts, in the process that compare_latex starts."""
    resource.setrlimit(resource.RLIMIT_AS, (PAIR_BYTES, PAIR_BYTES))
    # This loads all parts of the library once, or each fork would need a second for it.
    if not _is_equal("(x+1)^2", "x^2+2x+1"):
        raise RuntimeError("a trial comparison failed")
    pairs = json.load(sys.stdin)
    verdicts = []
    for start in range(0, len(pairs), PAIRS_AT_ONCE):
        forks = []
        for answer, given in pairs[start : start + PAIRS_AT_ONCE]:
            fork = os.fork()
            if fork == 0:  # the new process: its status is 0 if the two texts are equal
                signal.setitimer(signal.ITIMER_PROF, PAIR_SECONDS)  # SIGPROF ends it
                os._exit(not _is_equal(answer, given))  # after an exception it is 1, too
            forks.append(fork)
        verdicts += [os.waitpid(fork, 0)[1] == 0 for fork in forks]
    print(json.dumps(verdicts))


def _is_equal(answer: str, given: str) -> bool:
    """Return math-verify's verdict, without a time limit.

    Texts that are no LaTeX are not searched for a number, units are not dropped, and values are
    compared to a thousand digits.
    """
    from latex2sympy2_extended import NormalizationConfig
    from math_verify import LatexExtractionConfig, parse, verify

    units_stay = NormalizationConfig(malformed_operators=True, nits=True)
    config = [LatexExtractionConfig(normalization_config=units_stay)]
    texts = [parse(f"${text}$", config, parsing_timeout=None) for text in (answer, given)]
    return verify(
        *texts,
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
    try:
        value = _function(spec)(response, answer)
        if not 0 <= value <= 1:
            raise ValueError(f"it returned {value!r}")
    except Exception as error:
        raise ValueError(
            f"reward: {spec} failed for the response {response[-100:]!r}. It must be"
            " FILE.py:FUNCTION, take (response, answer), and return a number from 0 to 1.\n"
            + traceback.format_exc()
        ) from error
    return float(value)


@cache
def _function(spec: str) -> Callable:
    """Run the file once, as `import` would, and return the function."""
    path, _, name = spec.rpartition(":")
    sys.path.insert(0, os.path.dirname(path))
    return runpy.run_path(path)[name]


def choose_grader(spec: str, answer: str) -> Callable[[str, str], float]:
    """Return grade_math, or if `spec` is FILE.py:FUNCTION, own_reward of it.

    The grader is tried first, own_reward with `answer` also as the response. Raises ValueError if
    it does not work, for example math-verify with another antlr runtime.
    """
    if not spec:
        compare_latex([("x+1", "1+x")])
        return grade_math
    grader = partial(own_reward, spec)
    grader(answer, answer)
    return grader


if __name__ == "__main__":
    _compare()
