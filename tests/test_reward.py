"""Which answers count: a table of right and wrong responses, and hostile ones.

The hostile ones must neither hang nor raise.
"""

import functools
import itertools
import os
import subprocess
import sys
import threading
import time
from collections import defaultdict
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

import pytest

import reward
from reward import (
    aime_integer,
    compare_latex,
    extract_boxed,
    final_answer,
    grade_aime,
    grade_all,
    grade_math,
    number,
    pass_at_k,
)

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize(
    "text, boxed",
    [
        (r"so \boxed{25}.", "25"),
        (r"\boxed{1} then \boxed{2}", "2"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\boxed{7}}", "7"),  # nested: the one that starts last
        (r"\boxed{12} but then \boxed{13", "12"),  # the unclosed one is no box
        (r"\boxed {5}", "5"),
        (r"\boxed{\{1,2\}}", r"\{1,2\}"),  # printed braces do not count
        (r"\boxed{}", ""),
        (r"a } stray brace, \boxed{3}", "3"),
        (r"{ \boxed{4}", "4"),
        (r"\\\boxed{6}", "6"),  # after a line break
        ("no box", None),
        (r"\boxed 5", None),
        (r"\boxedx{5}", None),
        (r"\boxed{5", None),
        ("", None),
    ],
)
def test_the_last_balanced_box(text, boxed):
    assert extract_boxed(text) == boxed


# Response and gold answer: what models write, what the data sets hold, and what a lenient grader
# would let through.
RIGHT = [
    (r"\boxed{25}", 25),
    (r"\boxed{25}", "25"),
    (r"\boxed{025}", "25"),
    (r"\boxed{25}", "025"),
    (r"\boxed{016}", 16),
    (r"\boxed{16}", "016"),
    (r"\boxed{0}", "000"),
    (r"\boxed{000}", 0),
    (r"\boxed{0000007}", 7),
    (r"\boxed{999}", 999),
    (r"\boxed{+25}", 25),
    (r"\boxed{336}", r"336^\circ"),
    (r"\boxed{336^\circ}", 336),
    (r"\boxed{336^{\circ}}", r"336^\circ"),
    (r"\boxed{336°}", 336),
    (r"\boxed{336\degree}", 336),
    (r"\boxed{ 7 }", "7"),
    ("\\boxed{\n7\n}", "7"),
    (r"\boxed {5}", 5),
    (r"\boxed{\,42\,}", 42),
    (r"\boxed{$42$}", "42"),
    (r"$\boxed{42}$", "$42$"),
    (r"\[\boxed{42}\]", 42),
    (r"$\boxed{\text{42}}$", "42"),
    (r"\boxed{\mathrm{42}}", 42),
    (r"\boxed{\mathbf{042}}", 42),
    (r"\boxed{\displaystyle 42}", 42),
    (r"\boxed{73.}", 73),
    (r"\boxed{25.0}", 25),
    (r"\boxed{25.00}", 25),
    (r"\boxed{x=25}", 25),
    (r"\boxed{$m + n = 25^\circ.$}", 25),
    (r"\boxed{\text{$25$}}", 25),
    (r"\boxed{25\text{ cm}^2}", 25),
    (r"\boxed{25\quad}", 25),
    (r"**Answer:** \boxed{104}.", "104"),
    (r"<think>\boxed{3}? No.</think> \boxed{4}", 4),
    (r"\boxed{12} \boxed{13}", "13"),  # the last of two
    (r"\boxed{\boxed{9}}", "9"),
    (r"\boxed{12} or \boxed{13", 12),  # the unclosed one is no box
    (r"\boxed{13 and \boxed{12}", 12),
    (r"} \boxed{4}", 4),
    (r"\{ \boxed{4}", 4),
]
WRONG = [
    (r"\boxed{26}", 25),
    (r"\boxed{12} \boxed{13}", "12"),
    (r"\boxed{13}, so not \boxed{25} but \boxed{31}", 13),
    (r"\boxed{125}", "25"),  # neither suffix
    (r"\boxed{125}", "025"),
    (r"\boxed{25}", "125"),
    (r"\boxed{5\cdot25=125}", "125"),  # nor substring
    (r"\boxed{5·25=125}", "025"),
    (r"\boxed{5\cdot 25=125}", "25"),
    (r"\boxed{x=26}", 25),
    (r"\boxed{2x=5}", 25),
    (r"\boxed{2x=25}", 25),
    (r"\boxed{-x=25}", 25),
    (r"\boxed{x \ne 25}", 25),
    (r"\boxed{3 3 6}", 336),  # what stands between digits keeps them apart
    (r"\boxed{2{,}5}", 25),
    (r"\boxed{2\,5}", 25),
    (r"\boxed{12^\circ 5}", 125),
    (r"\boxed{2.5}", 25),
    (r"\boxed{25.01}", 25),
    (r"\boxed{25, 26}", 25),
    (r"\boxed{2 + 5}", 25),
    (r"\boxed{2,5}", 25),
    (r"\boxed{1{,}000}", 0),
    (r"\boxed{1{,}000}", 1),
    (r"\boxed{1{,}000}", 100),
    (r"\boxed{1000}", 0),
    (r"\boxed{9999999999999999999999}", 999),
    (r"\boxed{2.5e1}", 25),
    (r"\boxed{0x19}", 25),
    (r"\boxed{-5}", 5),
    (r"\boxed{\frac{50}{2}}", 25),
    (r"\boxed{\sqrt{625}}", 25),
    (r"\boxed{5^2}", 25),
    (r"\boxed{\text{(A)}}", 1),
    (r"\boxed{\text{(A) }25}", 25),
    (r"\boxed{\text{twenty-five}}", 25),
    (r"\boxed{25\%}", 25),
    (r"\boxed{２５}", 25),  # digits, but not ASCII
    (r"\boxed{٢٥}", 25),
    (r"\boxed{2_5}", 25),
    (r"\boxed{None}", 0),
    (r"\boxed{}", 0),
    (r"\boxed{ }", 0),
    ("the answer is 25", 25),
    ("25", 25),
    (r"\boxed 25", 25),
    (r"\fbox{25}", 25),
    (r"\boxed{25", 25),
    (r"\boxed{\boxed{25}", 26),
    (r"boxed{25}", 25),
    (r"\boxed\{25\}", 25),
    ("", 25),
]


@pytest.mark.parametrize(
    "response, answer, right",
    [(*case, True) for case in RIGHT] + [(*case, False) for case in WRONG],
)
def test_aime_answers_are_compared_as_integers(response, answer, right):
    assert grade_aime(response, answer) is right


@pytest.mark.parametrize(
    "text, integer",
    [
        ("016", 16),
        (r"336^\circ", 336),
        ("$0$", 0),
        ("999", 999),
        ("1000", None),
        ("-1", None),
        ("", None),
        ("1.0", 1),
    ],
)
def test_the_integer_of_a_gold_answer(text, integer):
    assert aime_integer(text) == integer


@pytest.mark.parametrize("answer", ["", "1000", "-1", "x", "2.5", None, "1{,}000"])
def test_an_answer_that_is_no_aime_integer_is_refused(answer):
    with pytest.raises(ValueError, match="answer"):
        grade_aime(r"\boxed{1}", answer)


BRACES = ["{", "}", "{}", "{,}", r"\boxed{", r"\boxed", r"\boxed ", r"\boxed{1}", r"\text{"]
PIECES = [*BRACES, "\\", " ", "9", "0", "$", "^", r"^{\circ}"]


@pytest.mark.parametrize("piece", PIECES)
def test_hostile_responses_take_linear_time_and_never_raise(piece):
    text = piece * (1_000_000 // len(piece))
    started = time.process_time()
    for response in (text, rf"\boxed{{{text}", rf"\boxed{{{text}}}", rf"{text}\boxed{{1}}"):
        grade_aime(response, 1)
    assert time.process_time() - started < 30  # quadratic time would be hours


def test_the_answer_after_a_megabyte_of_braces_is_still_found():
    assert grade_aime("{" * 1_000_000 + r"\boxed{1}", 1)
    assert grade_aime("}" * 1_000_000 + r"\boxed{1}", 1)
    assert not grade_aime(r"\boxed{" + "9" * 1_000_000 + "}", 999)


def test_pass_at_k_is_the_mean_over_all_draws():
    for samples, correct in ((5, 0), (5, 2), (6, 5), (4, 4)):
        outcomes = [True] * correct + [False] * (samples - correct)
        for k in range(1, samples + 1):
            passed = [any(draw) for draw in itertools.combinations(outcomes, k)]
            assert pass_at_k(samples, correct, k) == pytest.approx(sum(passed) / len(passed))


@pytest.mark.parametrize("arguments", [(4, 2, 0), (4, 2, 5), (4, 5, 2), (4, -1, 2)])
def test_pass_at_k_refuses_impossible_counts(arguments):
    with pytest.raises(ValueError, match="pass_at_k"):
        pass_at_k(*arguments)


@pytest.mark.parametrize(
    "text, value",
    [
        ("72", "72"),
        ("-1,234.50", "-1234.5"),
        ("+3/4", "3/4"),
        (r"-\dfrac{1}{2}", "-1/2"),
        (r"\frac34", "3/4"),
        (r"\$72", "72"),
        ("$0.50$", "1/2"),
        (".5", "1/2"),
        (r"50\%", "50"),
        (r"72\text{ miles}.", "72"),
        ("1{,}000", "1000"),
        (r"\frac{-1}{2}", "-1/2"),
        (r"\text{18}", "18"),
        (r"18 \text{ cm}^2", "18"),
        ("−5", "-5"),
        (" " * 100 + "7", "7"),
        (r"2\frac12", "5/2"),
        (r"-2\frac{1}{2}", "-5/2"),
        (r"1,\!234{,}567\,890", "1234567890"),
        (r"\frac{ 1 }{-2}", "-1/2"),
        ("12 / 5", "12/5"),
        ("x = 5.", "5"),
        (r"5.\%", "5"),
        ("9" * 200, "9" * 200),
    ],
)
def test_numbers_are_read_exactly(text, value):
    assert number(text) == Fraction(value)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x",
        "1,23",
        "1e5",
        "12 apples",
        "1/0",
        "3 4/5",
        r"\sqrt{4}",
        "1_0",
        "１",
        "--1",
        "1.2.3",
        "7" + " " * 200,
    ]
    + [
        r"3\,4/5",
        "1, 234",
        "0,125",
        "1234,567",
        "1,2345",
        r"2{,}5",
        r"2\frac{5}{2}",
        r"2\frac{-1}{2}",
        r"1\frac{1}{0}",
        ".",
    ],
)
def test_what_is_no_plain_number_is_none(text):
    assert number(text) is None


def test_the_final_answer_is_the_last_box_or_else_the_last_answer_line():
    assert final_answer(r"Answer: 1 \boxed{2} \boxed{3}" + "\nAnswer: 4") == "3"
    assert final_answer("Answer: 1\nso\n **Answer:** $5$ ") == "$5$"
    assert final_answer("... \n#### 7") == "7"
    assert final_answer("**Final Answer:** 5") == "5"
    assert final_answer("### Answer: 5") == "5"
    assert final_answer("The answer is 5") is None
    assert final_answer(r"\boxed{}") is None
    assert final_answer("Answer:") is None


def test_number_answers_are_compared_as_numbers_without_any_library(monkeypatch):
    monkeypatch.setitem(sys.modules, "math_verify", None)  # importing it would raise
    assert grade_math(r"\boxed{0.5}", r"\frac{1}{2}")
    assert grade_math("Answer: 1,000", "1000")
    assert grade_math(r"\boxed{-07}", "-7")
    assert not grade_math(r"\boxed{5}", "50")
    assert not grade_math(r"\boxed{x + 5}", "5")
    assert not grade_math("5", "5")
    assert not grade_math(r"\boxed{" + "9" * 5000 + "}", "9")  # and nothing raises
    # What is too long is not read in part.
    assert not grade_math(r"\boxed{72" + "~" * 250 + "or 73}", "72")
    assert grade_math(r"\boxed{x+1}", "x+1")  # the same text needs no library either
    with pytest.raises(ValueError, match="pip install math-verify"):
        grade_math(r"\boxed{1+x}", "x+1")


# Gold answer: what is right and what is wrong, for this grader and for math-verify alike.
AGREED = {
    "25": (
        r"25 | 25. | $25$ | 25.0 | 25.00 | x=25 | x = 25. | m+n=25 | AB = 25 | S_{10} = 25"
        r" | \text{25} | \mathbf{25}"
        r" | \mathrm{25} | +25 | + 25 | 025 | 25^\circ | 25^{\circ} | 25\degree | 25° | 25\%"
        r" | 25% | \$25 | 25\text{ cm}"
        r" | 25\text{ cm}^2 | 25 \mathrm{~cm} | \,25\, | \displaystyle 25 | \frac{50}{2}"
        r" | 50/2 | 25\ \text{square units}"
        r" | 25\quad | 25~",
        r"2 5 | 2,5 | 2{,}5 | 2\,5 | 25, 26 | 25 \text{ or } 26 | 26 | -25 | 125 | 2.5 | 25.1"
        r" | 25.0000001 | 25^2 | x=26"
        r" | x\neq25 | x>25 | \boldsymbol{25} | \text{(A) }25 | \text{twenty-five} | 25x"
        r" | 25\pi | ２５ | 25! | 12^\circ 5"
        r" | \frac{25}{0} | 25e0 | 1{,}025",
    ),
    "336": (r"336^\circ | 336. | 336.0 | n = 336", r"3 3 6 | 3\,36 | 3{,}36 | 33 6"),
    "1000": (
        r"1,000 | 1{,}000 | 1,\!000 | 1000.0 | \$1,000 | \$1{,}000.00 | 1000\text{ dollars}",
        "1 000 | 1{,}00{,}0 | 1,00,0 | 1, 000 | 1.000 | 1e3 | 10,00",
    ),
    "1234567": ("1,234,567 | 1{,}234{,}567", "1,234567 | 1234,567 | 12,34,567"),
    "5/2": (
        r"2.5 | 2\frac12 | 2\frac{1}{2} | 2 \frac{1}{2} | 2\tfrac12 | 2\frac{2}{4} | \frac52"
        r" | \frac 52 | \frac5{2}"
        r" | \frac{5}{2} | \frac{ 5 }{ 2 } | \dfrac{5}{2} | \frac{10}{4} | \frac{-5}{-2} | 5/2"
        r" | 5 / 2 | 2.50 | +2.5"
        r" | x = \frac52",
        r"2\cdot\frac12 | 2 1/2 | 2\,1/2 | 1 | \frac{2}{5} | -2.5 | 2\frac{1}{3} | 52",
    ),
    r"2\frac12": (r"2.5 | 5/2 | 2\frac{1}{2}", "1 | 2"),
    "34/5": (r"6.8 | 6\frac45 | \frac{34}{5} | 34/5", r"3\,4/5 | 3 4/5"),
    "-3": (
        r"-3 | −3 | - 3 | -3.0 | -03 | x=-3 | -\frac{6}{2} | -\frac62 | -3^\circ | \text{-3}",
        r"3 | +3 | --3 | \pm 3",
    ),
    r"\frac{1}{3}": (
        r"1/3 | \frac13 | \frac{2}{6} | -\frac{1}{-3}",
        r"0.33 | 0.\overline{3} | 33.\overline{3}\%",
    ),
    "0.5": (r"1/2 | .5 | 0.50 | 0.5. | \frac12", "0,5 | 5"),
    "50": (r"50\% | 50% | 50\text{ percent}", r"0.5 | \frac{1}{2}"),
    "0": (r"0 | -0 | 0.0 | 000 | 0^\circ | \frac{0}{5}", r"\emptyset | \text{None}"),
    "18.90": (r"18.9 | \$18.90 | \$18.9", "18.91 | 18{.}9 | 1890"),
    "0.125": ("1/8 | .125", "125"),
    "72": (
        r"72\text{ miles} | 72\text{ miles per hour} | 72\mbox{ cm}^2 | 72~\text{km}"
        r" | 72\,\mathrm{m}^2 | 72\text{ m}^3",
        r"\text{72 miles} | 72\text{ or }73",
    ),
    "x=5": ("5 | x=5", "6 | x=6"),
    r"2\sqrt{3}": (
        r"\sqrt{12} | 2\sqrt3 | \frac{6}{\sqrt{3}} | x=2\sqrt{3} | 3.4641016151377544",
        r"\sqrt{11} | 3.46 | -2\sqrt3",
    ),
    "x+1": (r"1+x | $x + 1$ | y=x+1 | f(x)=x+1 | \frac{x^2-1}{x-1}", "x-1 | y+1"),
    "x^2-1": ("(x-1)(x+1)", "(x-1)^2"),
    r"\frac{\pi}{4}": (r"\pi/4 | \frac14\pi | \arctan 1 | 0.785398", r"45^\circ | \frac{\pi}{3}"),
    r"16\pi": (r"\pi\cdot16 | 16\pi\text{ cm}^2", "16"),
    r"\log_2 3": (r"\frac{\ln 3}{\ln 2}", r"\log 3"),
    "2^{10}-1": ("1023", "2^{10}-2"),
    "3+4i": ("4i+3", r"3-4i | 5 | \sqrt{-16}+3"),
    "[0, 1]": (
        r"[0,1] | \left[0,1\right] | x\in[0,1]",
        r"[0,1) | (0,1) | [1,0] | 0,1 | 0\le x\le 1",
    ),
    "[0, 1)": ("[0,1) | [0, 1.0)", r"[0,1] | (0,1] | 0\le x<1"),
    r"(-\infty, 2)\cup(3,\infty)": (
        r"(3,\infty)\cup(-\infty,2)",
        r"(-\infty,2]\cup(3,\infty) | x<2\text{ or }x>3",
    ),
    "(3, 4)": (r"(3,4) | 3,4 | \left(3,4\right) | (3.0,4) | x=3,y=4", "(4,3)"),
    r"\{1, 2, 3\}": (r"1,2,3 | 3,2,1 | \{3,2,1\} | (1,2,3) | 1, 2 \text{ and } 3", r"\{1,2\}"),
    "y=2x+3": ("y=3+2x | 2x+3 | y-2x=3", "y=2x-3"),
    r"\begin{pmatrix}1\\2\end{pmatrix}": (
        r"\begin{bmatrix}1\\2\end{bmatrix}",
        r"(1,2) | \begin{pmatrix}2\\1\end{pmatrix}",
    ),
    r"\text{Monday}": (r"Monday | \text{monday} | \mathrm{Monday}", r"\text{Tuesday}"),
    r"\text{(B)}": (r"B | (B) | \text{B}", r"\text{(C)}"),
}
# Why the two differ: gold answer and what only math-verify takes for right ...
STRICTER = {
    "arithmetic is not done": [
        (
            "25",
            r"5^2 | \sqrt{625} | 20+5 | 5 \cdot 5 | 5\times5 | 2.5\times10^1 | 0.25\times 100"
            r" | 25\sqrt{1} | 25:1 | 25=25",
        ),
        ("25", "20 + 5 = 25"),
        ("1000", "10^3"),
        ("5/2", r"2 + \frac12 | 5:2"),
        (r"\frac{1}{3}", "3^{-1}"),
        ("0", "1-1"),
    ],
    "what is named before = is a variable, not a term": [
        ("25", r"f(3)=25 | \angle A = 25^\circ | 5=25")
    ],
    "numbers are exact, not rounded to six decimals": [
        (r"\frac{1}{3}", "0.333333 | 0.3333333333"),
        ("5/2", "2.4999999"),
    ],
    "per cents count as they are written": [("0.5", r"50\%"), ("0.125", r"12.5\%")],
    "a comma is no decimal point": [("0.125", "0,125")],
    "no brackets": [("25", r"(25) | \{25\}"), ("-3", r"(-3) | \left(-3\right)"), ("0", r"\{0\}")],
    "words and signs": [
        ("25", r"25 cm | \approx 25 | \text{The answer is } 25"),
        ("72", "72 miles"),
    ],
}
# ... and what math-verify does not read, or reads as something else.
LAXER = {
    "thin spaces between thousands": [("1000", r"1\,000"), ("1234567", r"1\,234\,567")],
    "spacing and a full stop around the answer": [
        ("25", "~25"),
        ("5/2", r"\text{2.5}"),
        (r"2\sqrt{3}", r"2\sqrt{3}."),
    ],
    "the name of the variable does not matter": [("x=5", "y=5")],
}
# Numbers that grade_math takes for an AIME answer and grade_aime does not: it wants the integer
# itself. Gold answer, given answer.
NO_AIME_ANSWERS = {
    ("25", r"25\%"),
    ("25", "25%"),
    ("25", r"\frac{50}{2}"),
    ("25", "50/2"),
    ("50", r"50\%"),
    ("50", "50%"),
    ("0", "-0"),
    ("0", r"\frac{0}{5}"),
}


class Row(NamedTuple):
    """A line of the table above."""

    gold: str
    given: str
    right: bool  # for grade_math
    by_math_verify: bool


def table() -> list[Row]:
    rows = []
    for gold, (right, wrong) in AGREED.items():
        rows += [Row(gold, given, True, True) for given in right.split(" | ")]
        rows += [Row(gold, given, False, False) for given in wrong.split(" | ")]
    for pairs in STRICTER.values():
        for gold, texts in pairs:
            rows += [Row(gold, given, False, True) for given in texts.split(" | ")]
    for pairs in LAXER.values():
        for gold, texts in pairs:
            rows += [Row(gold, given, True, False) for given in texts.split(" | ")]
    return rows


def test_a_table_of_answers_agrees_with_math_verify_but_for_the_listed_reasons():
    math_verify = pytest.importorskip("math_verify")
    rows = table()
    assert len(rows) > 300
    responses = [rf"\boxed{{{row.given}}}" for row in rows]
    golds = [row.gold for row in rows]
    compare_latex.cache_clear()
    started = time.perf_counter()
    graded = grade_all(grade_math, responses, golds, skip=[False] * len(rows))
    seconds = time.perf_counter() - started
    print(f"\n{compare_latex.cache_info().currsize} pairs of LaTeX texts in {seconds:.1f} s")
    for row, response, verdict in zip(rows, responses, graded, strict=True):
        assert verdict is row.right, row
        gold = math_verify.parse(f"${row.gold}$")
        given = math_verify.parse(f"${row.given}$")
        assert math_verify.verify(gold, given) is row.by_math_verify, row
        if aime_integer(row.gold) is not None:
            right_for_aime = row.right and (row.gold, row.given) not in NO_AIME_ANSWERS
            assert grade_aime(response, row.gold) is right_for_aime, row


def test_latex_answers_are_compared_by_math_verify():
    pytest.importorskip("math_verify")
    assert grade_math(r"\boxed{\sqrt{12}}", r"2\sqrt{3}")
    assert grade_math(r"\boxed{1+x}", "$x+1$")
    assert grade_math("Answer: $1+x$.", "x+1.")
    assert grade_math(r"\boxed{\text{Monday}.}", r"\text{Monday}")
    assert not grade_math(r"\boxed{\sqrt{11}}", r"2\sqrt{3}")


# ---------------------------------------------------------------- processes of math-verify
@pytest.fixture
def no_idle_workers(monkeypatch):
    """Processes of math-verify are started anew: those of other tests stay as they are."""
    pytest.importorskip("math_verify")
    monkeypatch.setattr(reward, "_idle", defaultdict(list))


def compare(answer: str, given: str) -> bool:
    """compare_latex without its cache."""
    return compare_latex.__wrapped__(answer, given)


def python_that(script: str, folder: Path) -> str:
    """An executable that is started in place of Python and runs a shell script."""
    path = folder / "python"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


def test_no_answer_takes_long_in_any_thread_and_the_next_ones_are_graded(no_idle_workers):
    takes_hours = r"\boxed{10^{10^{10}}}"
    verdicts = []

    def grade_two():
        verdicts.append(grade_math(takes_hours, "x+1"))
        verdicts.append(grade_math(r"\boxed{1+x^1}", "x+1"))

    thread = threading.Thread(target=grade_two, daemon=True)
    thread.start()
    thread.join(300)
    assert verdicts == [False, True]


def test_workers_are_limited_and_apart_from_the_terminal(no_idle_workers):
    assert compare("x+1", "1+x")
    assert compare("x+2", "2+x")
    (worker,) = reward._idle[os.getpid()]  # the same for both
    assert os.getsid(worker.pid) != os.getsid(0)
    if sys.platform == "linux":
        limits = Path(f"/proc/{worker.pid}/limits").read_text()
        environment = Path(f"/proc/{worker.pid}/environ").read_text()
        assert f"address space         {reward.GRADE_BYTES}" in limits
        assert "PYTHONHASHSEED=0\0" in environment


def test_a_fork_does_not_use_the_workers_of_its_parent(no_idle_workers, monkeypatch):
    assert compare("x+1", "1+x")
    (worker,) = reward._idle[os.getpid()]
    monkeypatch.setattr(os, "getpid", lambda: -1)  # as in a fork
    assert compare("x+1", "1+x")
    assert reward._idle[-1] != [worker]


def test_a_worker_that_died_is_replaced_whenever_that_is_noticed(no_idle_workers, monkeypatch):
    """Kills: BrokenPipeError, or a wrong verdict, where it dies between the look and the line."""
    assert compare("x+1", "1+x")
    for looks_alive in (False, True):
        (worker,) = reward._idle[os.getpid()]
        worker.kill()
        worker.wait()
        if looks_alive:
            monkeypatch.setattr(worker, "poll", lambda: None)
        assert compare("x+1", "1+x")
        assert worker not in reward._idle[os.getpid()]


def test_an_answer_is_wrong_if_worker_after_worker_is_killed(
    no_idle_workers, monkeypatch, tmp_path
):
    monkeypatch.setattr(sys, "executable", python_that("read line; kill -9 $$", tmp_path))
    assert not compare("x+1", "1+x")
    assert reward._idle[os.getpid()] == []


def test_a_worker_that_cannot_start_is_an_error_not_a_wrong_answer(
    no_idle_workers, monkeypatch, tmp_path
):
    monkeypatch.setattr(sys, "executable", python_that("read line; exit 3", tmp_path))
    with pytest.raises(RuntimeError, match="reward.py says why"):
        compare("x+1", "1+x")


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_workers_end_with_the_process_that_started_them():
    pytest.importorskip("math_verify")
    code = """
import os, reward
reward.compare_latex("x+1", "1+x")
print(reward._idle[os.getpid()][0].pid, flush=True)
os._exit(0)
"""
    command = [sys.executable, "-c", code]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    worker = int(ended.stdout)
    try:
        for _ in range(1200):
            status = Path(f"/proc/{worker}/status").read_text()
            if "(zombie)" in status:  # some containers leave their dead unburied
                break
            time.sleep(0.05)
        is_running = "(zombie)" not in status
    except OSError:  # it is gone
        is_running = False
    assert not is_running, f"process {worker} is still there"


def test_a_batch_is_graded_in_order_without_what_is_skipped():
    seen = []

    def grade(response, answer):
        seen.append(response)
        return response == answer

    skip = [False, False, False, True]
    assert grade_all(grade, list("abcd"), list("abxd"), skip) == [True, True, False, False]
    assert seen == list("abc")
    with pytest.raises(ValueError, match="zip"):
        grade_all(grade, ["a", "b"], ["a"], [False, False])


def test_a_batch_of_latex_answers_is_compared_side_by_side_and_equal_pairs_once(monkeypatch):
    both_are_under_way = threading.Barrier(2, timeout=30)
    calls = []

    @functools.cache
    def compare(answer, given):
        calls.append((answer, given))
        both_are_under_way.wait()
        return given == "1+x"

    monkeypatch.setattr(reward, "compare_latex", compare)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    given = ["1+x", "1+x", "x+2", "x+1", "x+3", "7"]
    responses = [rf"\boxed{{{text}}}" for text in given]
    answers = ["x+1", "x+1", "x+1", "x+1", "x+1", "7"]
    skip = [False, False, False, False, True, False]
    assert grade_all(grade_math, responses, answers, skip) == [True, True, False, True, False, True]
    assert sorted(calls) == [("x+1", "1+x"), ("x+1", "x+2")]
    assert grade_all(grade_math, [], [], []) == []
