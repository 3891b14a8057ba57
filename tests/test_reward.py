"""reward.py: tables of right, wrong and hostile answers, limits of math-verify, own rewards."""

import time
from collections.abc import Sequence
from threading import Thread

import pytest

import reward
from reward import choose_grader, extract_boxed, final_answer, grade_all, grade_math


# ---------------------------------------------------------------- reading an answer
@pytest.mark.parametrize(
    "text, boxed",
    [
        (r"\boxed{1} then \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        (r"\boxed{\boxed{7}}", "7"),  # nested: the one that starts last
        (r"\boxed{12} but then \boxed{13", "12"),  # the unclosed one is no box
        (r"\boxed {\left\{1\right.}", r"\left\{1\right."),  # printed braces do not count
        (r"{ \\\boxed{6}", "6"),  # after a line break
        (r"\boxed{5} within \boxed{}, \boxed{\ } or \boxed{...}", "5"),  # empty ones are none
        (r"\boxed{5} in \boxed form", "5"),
        (r"\fbox{7}", "7"),
        (r"so \boxed -9 eggs", "-9"),
        (r"\(\boxed\frac{1}{2}\)", r"\frac{1}{2}"),
        (r"<think>\boxed{1}</think>\boxed{2}", "2"),
        (r"<think>\boxed{1}</think> Hm.", ""),
    ],
)
def test_the_last_box_with_an_answer(text, boxed):
    assert extract_boxed(text) == boxed


@pytest.mark.parametrize(
    "piece",
    ["{", r"\boxed{", r"\boxed=", r"\text{", "\\", " ", "9", r"^{\circ}", ".,", "9 ", "a_{a} + "]
    + ["So final answer: the final answer is 5 "],
)
def test_hostile_responses_take_linear_time_and_hide_no_answer(piece):
    text = piece * (200_000 // len(piece))
    short = piece * (395 // len(piece))  # a longer one is no answer, and no pattern reads it
    started = time.process_time()
    for given in (text, rf"\boxed{{{text}}}", rf"\boxed {text}", f"Answer: {short}"):
        reward._verdict_or_texts(given, given)
    assert grade_math(rf"{text}\boxed{{1}}", "1")  # an answer behind it is still found
    assert time.process_time() - started < 30  # quadratic time would be hours


@pytest.mark.parametrize(
    "line",
    [
        "Answer: 13",
        "Answer:\n13",
        "**Answer:**\n\n13",
        "### Answer\n13",
        "**Final Answer**\n\\[\n13\n\\]",
        "- Answer: 13",
        "1. _Answer:_ 13",
        "> Answer: `13`",
        "✅ Final Answer: **13**",
        "The correct answer is: 13",
        "ANSWER ：13\r\n",
        "#### 13",
    ],
)
def test_an_answer_line_counts_only_without_a_box(line):
    assert final_answer(f"Answer: 5\n{line}\nDone.") == "13"
    assert final_answer(f"\\boxed{{12}} eggs.\n{line}") == "12"
    assert final_answer(f"{line}\nNo: \\boxed{{12}}") == "12"
    assert final_answer(f"<think>\n{line}\n</think>") == ""


def test_an_answer_line_may_hold_words():
    assert final_answer("Answer: the number of eggs is 12") == "the number of eggs is 12"
    assert final_answer("Answer: 1\nAnswer:") == "1"
    assert grade_math("Final Answer: The final answer is $5$. I hope it is correct.", "5")
    sentence = "The final answer is $7$. I hope it is correct."
    assert final_answer(f"So Final Answer: {sentence}") == "$7$."
    assert final_answer(f"2 + 5 = 7. Final Answer: {sentence}") == "$7$."
    for response in ("The answer is 5", r"\boxed{}", "Answer:", "In answer: 5"):
        assert final_answer(response) == ""


# ---------------------------------------------------------------- grading
# The first answer of each row is the same as the others ...
EQUAL = r"""
-1234.5 | -1,234.50
-5/2 | -2\frac{1}{2}
-1/2 | \frac{ 1 }{-2}
1234567890 | 1,\!234{,}567\,890
-0.0015 | -1.5 \times 10^{-3}
25 | 25. | $25$ | 25.00 | x = 25. | m+n=25 | AB = 25 | S_{10} = 25 | \text{25} | \mathbf{25} | +25
25 | + 25 | 025 | 25^\circ | 25^{\circ} | 25\degree | 25° | 25\% | 25% | \$25 | 25\text{ cm}^2
25 | 25 \mathrm{~cm} | \,25\, | \displaystyle 25 | \frac{50}{2} | 50/2 | 25\ \text{square units}
25 | 25\quad | 25~ | 25\,\% | 25\ \mathrm{cm^2} | \(25\) | {25} | =25 | 25, | \textrm{25}
25 | \displaystyle{25} | \text{Area of } ABC = 25 | 25_{10} | 25\,\mathrm{m\,s^{-1}} | 5^2
25 | \sqrt{625} | 20+5 | 5 \cdot 5 | 2.5\times10^1 | f(3)=25 | \angle A = 25^\circ | (25) | \{25\}
25 | ~25 | **25** | \boldsymbol{25} | 25 (apples) | 25^\circ C | 25 (t-shirts)
25 | 25\text{ cm squared} | 25 \text{ m}/\text{s} | 25\text{ of them}
25 | 0025.0 | \text{$25$} | $m + n = 25^\circ.$
1000 | 1,000 | 1{,}000 | 1,\!000 | 1000.0 | \$1{,}000.00 | 1000\text{ dollars}
1234567 | 1,234,567 | 1{,}234{,}567 | 1\,234\,567
5/2 | 2.50 | 2\frac12 | 2 \frac{1}{2} | 2\tfrac12 | 2\frac{2}{4} | \frac52 | \frac 52 | \frac5{2}
5/2 | \frac{ 5 }{ 2 } | \dfrac{5}{2} | \frac{-5}{-2} | 5 / 2 | x = \frac52 | \text{2.5}
2\frac12 | 2.5 | 5/2 | 2\frac{1}{2}
-3 | -3 | −3 | - 3 | -3.0 | -03 | x=-3 | -\frac{6}{2} | -\frac62 | -3^\circ | \text{-3}
\frac{1}{3} | 1/3 | \frac13 | \frac{2}{6} | -\frac{1}{-3}
0.5 | 1/2 | .5 | 0.50 | 0.5. | \frac12
50 | 50\% | 50% | 50\text{ percent}
0 | 0 | -0 | 0.0 | 000 | 0^\circ | \frac{0}{5}
72 | 72\text{ miles per hour} | 72\mbox{ cm}^2 | 72~\text{km} | 72\,\mathrm{m}^2
x=5 | 5 | x=5 | x = 5.0
2\sqrt{3} | \sqrt{12} | 2\sqrt3 | \frac{6}{\sqrt{3}} | x=2\sqrt{3} | AB = 2\sqrt{3} | 2\sqrt{3}.
x+1 | 1+x | $x + 1$ | y=x+1 | f(x)=x+1 | \frac{x^2-1}{x-1}
16\pi | \pi\cdot16 | 16\pi\text{ cm}^2
[0, 1) | [0,1) | x\in[0,1) | \left[0,1\right) | 0\le x<1
(-\infty, 2)\cup(3,\infty) | (3,\infty)\cup(-\infty,2)
(3, 4) | (3,4) | 3,4 | \left(3,4\right) | (3.0,4) | x=3,y=4
\{1, 2, 3\} | 1,2,3 | 3,2,1 | \{3,2,1\} | (1,2,3) | 1, 2 \text{ and } 3 | 1, 2 and 3
y=2x+3 | y=3+2x | 2x+3 | y-2x=3
\begin{pmatrix}1\\2\end{pmatrix} | \begin{bmatrix}1\\2\end{bmatrix}
\text{Monday} | Monday | \text{monday} | \mathrm{Monday}
\text{(B)} | B | (B) | \text{B}
2516_8 | 2516_{8}
3 4 | $3 4$
2\frac34x | 2\frac{3}{4}x
\sqrt{\frac14} | \sqrt{\frac{1}{4}}
9 (apples) | 9 | 9 apples
100,200,300 | 100, 200, 300
1+\mathrm{i} | 1+i | \text{i}+1
0.\overline{3} | 0.\overline 3
x \text{ is even} | \text{x is even}
8:34 \text{ p.m.} | \text{8:34 p.m.} | 8:34 PM
6, 8\text{, and }10 | 6,8,10 | \{10,8,6\}
\emptyset | \varnothing
\{x|-2\leq x<1\} | \{x \mid -2\leqslant x<1\}
x=2,x=3 | 2,3 | 3,2 | x=3 \text{ or } x=2
x=\pi | \pi
# the same in LaTeX and in Unicode
2\pi r | 2πr
\frac12+\frac{\pi}{8} | ½ + π/8
x^2+1 | x²+1 | **x^2+1**
\frac{4}{3}\pi r^3 | (4/3)πr³
\ln 2 | \ln(2) | \operatorname{ln} 2 | \mathrm{ln}(2)
\log_2 3 | \log_2(3)
\sin x | \sin(x) | \operatorname{sin}x
e^x | \exp(x)
\sqrt{13} | √13 | \sqrt13
\frac{\sqrt{3}}{2} | √3/2 | \frac{\sqrt3}2
\sqrt[3]{2} | \sqrt[3]2
\frac{\pi}{2} | \frac\pi2 | \frac\pi 2 | π/2
\sqrt{\pi} | √π | \sqrt\pi
\infty | ∞
(-\infty,2)\cup(3,\infty) | (-∞,2)∪(3,∞)
2\cdot 3^2 | 2·3^2 | 2×3² | 18
1.5\times10^3 | 1500 | 1.5×10³ | 1.5*10^{3} | 1,500
6.02\times10^{23} | 602,000,000,000,000,000,000,000
\frac12 | ½
2\frac13 | 2⅓ | 7/3
\frac{1}{7}+\pi | π + ⅐
1\pm\sqrt{5} | 1±√5 | 1-√5, 1+√5
1+2i | 1+2*i | 2i+1
\text{log cabin} | Log cabin
# of AIME and HMMT 2026
(3+\sqrt{6})^{-1/3} | (3+√6)^(-1/3) | \frac{1}{\sqrt[3]{3+\sqrt6}}
50(1 - \frac{1}{2^{101} - 1}) | 50*(1 - 1/(2^{101} - 1))
74^\circ | 74° | 74
25 cm | 25\text{ cm} | 25 \mathrm{cm} | \text{25 cm}
2, 100 | 100, 2 | 2,\,100 | \{2, 100\}
"""
# ... and here it is not.
UNEQUAL = r"""
1 | 1/0 | 1\frac{1}{0}
10 | 1_0
12345 | 1,2345
3/2 | 2\frac{-1}{2}
1.2 | 1.2.3
1234567890.1 | 1234567890.10000001
25 | 2 5 | 2,5 | 2{,}5 | 2\,5 | 25, 26 | 25 \text{ or } 26 | 26 | -25 | 125 | 2.5 | 25.0000001
25 | 25^2 | x=26 | x\neq25 | x>25 | \text{(A) }25 | 25x | 25\pi | ２５ | 25! | 12^\circ 5
25 | \frac{25}{0} | 25e0 | 1{,}025 | 25=25 | 20 + 5 = 25 | 5=25 | 25 cm | \approx 25
25 | \text{The answer is } 25 | 25\mathrm{i} | 25... | 25_8 | x^2+y^2=25
1000 | 1 000 | 1{,}00{,}0 | 1,00,0 | 1, 000 | 1.000 | 1e3 | 10,00
1234567 | 1,234567 | 1234,567 | 12,34,567
5/2 | 2\cdot\frac12 | 2 1/2 | 2\,1/2 | 1 | \frac{2}{5} | -2.5 | 2\frac{1}{3} | 52
2\frac12 | 1 | 2
-3 | 3 | +3 | --3 | \pm 3
\frac{1}{3} | 0.33 | 0.\overline{3} | 0.333333 | 0.3333333333
0.5 | 0,5 | 5
50 | 0.5 | \frac{1}{2}
0 | \emptyset | \text{None}
72 | \text{72 miles} | 72\text{ or }73
x=5 | 6 | x=6 | y=5 | \theta=5
2\sqrt{3} | \sqrt{11} | 3.46 | -2\sqrt3 | 3.4641016151377544
x+1 | x-1 | y+1
16\pi | 16
[0, 1) | [0,1] | (0,1] | 0,1
(-\infty, 2)\cup(3,\infty) | (-\infty,2]\cup(3,\infty)
(3, 4) | (4,3)
\{1, 2, 3\} | \{1,2\}
y=2x+3 | y=2x-3
\begin{pmatrix}1\\2\end{pmatrix} | (1,2)
\text{Monday} | \text{Tuesday}
\text{(B)} | \text{(C)}
2516_8 | 2517_8 | 2516_9 | 2516
3 4 | 12 | 34
2\frac34x | \frac{23}{4}x
\sqrt{\frac14} | \sqrt{1}/4
0.125 | 12.5\%
1+\mathrm{i} | 1
0.\overline{3} | 0
x \text{ is even} | x \text{ is odd} | x
8:34 \text{ p.m.} | 8:34\text{ a.m.} | 8:34
x=2,x=3 | y=2,y=3 | x=2,x=4
x=\pi | y=\pi
2-2^{-2023} | 2-2^{-2024}
10^{-20} | 10^{-21} | 0.0
3.14\ldots | 3.14
1,2,\dots,10 | 1,2,\dots,11
3 \text{ apples and } 4 \text{ pears} | 3 \text{ apples and } 5 \text{ pears} | 3
5, \text{Yes} | 5, \text{No} | 5
5t | 5h | 5
f'(x) | f(x)
\frac{dy}{dx} | 0
A^T | A
ABD | BAD
\triangle ABC | \triangle BCA
12:50 | 6:25 | 0.24
\frac{1}{2} | \int_0^1 x dx
# words behind a number, and lists that look like numbers
10 | 10\text{ million} | 10 (million) | 10\text{ hundredths} | 10\text{ cm}\text{ thousand}
2 | 2\text{ squared} | 2\text{ and a half} | 2\text{ dozen eggs} | 2\text{, or } 3
3 | 3\text{ or fewer} | 3\text{ at most} | 3\text{ is wrong} | 3 (x + y) | 3 (x - y)
3x-y | 3 (x-y) | 3x (-y)
1,234 | 1, 234 | (1,234) | \{1, 234\} | 1;234
2, 100 | 2,100 | 2100 | (2, 100, 1)
25 cm | 25 | 25 m | 24 cm
25 | \text{not } x = 25 | 25 \text{ to one} | 25\text{ at least}
25 | 251 | 5\cdot5=25 | -x=25
250 | 2x=50
"""


def grade_boxes(given: Sequence[str], golds: Sequence[str]) -> list[bool]:
    responses = [rf"\boxed{{{text}}}" for text in given]
    return grade_all(grade_math, responses, golds, truncated=[False] * len(given))


def test_every_pair_of_the_tables_gets_its_verdict_in_both_directions():
    """Both tables at once, so that a verdict that goes to another pair shows."""
    pytest.importorskip("math_verify")
    golds = []
    given = []
    verdicts = []
    for table, verdict in ((EQUAL, True), (UNEQUAL, False)):
        for row in table.splitlines():
            first, *others = row.split(" | ")
            golds += [first] * len(others) + others
            given += others + [first] * len(others)
            verdicts += [verdict] * 2 * len(others)
    grades = grade_boxes(given, golds)
    wrong = [case for case in zip(golds, given, grades, verdicts) if case[2] != case[3]]
    assert wrong == []


def test_the_gold_answer_says_whether_the_order_counts():
    pytest.importorskip("math_verify")
    assert grade_boxes(["4, 3", "(3,4)"], ["(3,4)", "4, 3"]) == [False, True]


# ---------------------------------------------------------------- processes of math-verify
STAND_IN = """
import mmap
import os

LatexExtractionConfig = NormalizationConfig = dict

def parse(text, config, parsing_timeout):
    return text.strip("$\\\\")

def verify(answer, given, **settings):
    if "endless" in given:
        while True:
            pass
    if "large" in given:
        mmap.mmap(-1, 2**31)  # address space that nothing touches: quick where it is allowed
    if "raises" in given:
        raise ValueError
    if "dies" in given:
        os.kill(os.getpid(), 9)
    return "wrong" not in given
"""


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    """In place of math-verify: the given command says what happens, and others are right."""
    path = tmp_path / "math_verify.py"
    path.write_text(STAND_IN)
    (tmp_path / "latex2sympy2_extended.py").write_text(STAND_IN)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(tmp_path)
    return path


def test_an_answer_that_misbehaves_is_wrong_and_the_others_are_graded_in_any_thread(stand_in):
    given = ["x_{raises}", "x_{large}", "x_{dies}", "x_{endless}", "x_{endless}+1", "1+x"]
    verdicts = []
    thread = Thread(
        target=lambda: verdicts.extend(grade_boxes(given, ["x+1"] * len(given))), daemon=True
    )
    thread.start()
    thread.join(60)
    assert verdicts == [False, False, False, False, False, True]


@pytest.mark.parametrize(
    "library",
    [
        'raise ImportError("Unsupported ANTLR version 4.12.0")',
        STAND_IN + "\ndef verify(*texts, **settings): return False  # it parses nothing\n",
    ],
)
def test_a_library_that_does_not_work_is_an_error_that_says_what_to_install(stand_in, library):
    assert choose_grader("", "") is grade_math
    stand_in.write_text(library)
    with pytest.raises(ValueError, match=r"(?s)pip install.*4\.13\.2.*(4\.12|trial)"):
        choose_grader("", "")


# ---------------------------------------------------------------- your own reward
REWARDS = """
import neighbour

def share(response, answer):
    import late_neighbour
    return neighbour.share(response, answer)

def text(response, answer):
    return "1"

def too_little(response, answer):
    return -0.5

def not_a_number(response, answer):
    return float("nan")

def raises(response, answer):
    return 1 / 0
"""
NEIGHBOUR = """
import numpy

def share(response, answer):
    return numpy.float32(len(set(response) & set(answer)) / 4)
"""


def test_a_reward_gives_numbers_from_0_to_1_and_one_that_fails_is_named(tmp_path):
    file = tmp_path / "my_rewards.py"
    file.write_text(REWARDS)
    (tmp_path / "neighbour.py").write_text(NEIGHBOUR)
    (tmp_path / "late_neighbour.py").touch()
    grader = choose_grader(f"{file}:share", "abc")
    truncated = [False, False, True]
    assert grade_all(grader, ["abc", "abc", "c"], ["bcd", "c", "c"], truncated) == [0.5, 0.25, 0]
    for name, said in {
        "text": "TypeError",
        "too_little": "returned -0.5",
        "not_a_number": "returned nan",
        "raises": 'my_rewards.py", line 18, .*ZeroDivisionError',
        "missing": "KeyError: 'missing'",
    }.items():
        with pytest.raises(ValueError, match=f"(?s)my_rewards.py:{name}.*'an answer'.*{said}"):
            choose_grader(f"{file}:{name}", "an answer")
