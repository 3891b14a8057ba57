"""Which answers count: a table of right and wrong responses, and hostile ones that must not hang or raise."""

import itertools
import time

import pytest

from reward import extract_boxed, grade_aime, pass_at_k


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


@pytest.mark.parametrize(
    "response, answer, right",
    [
        (r"\boxed{25}", 25, True),
        (r"\boxed{025}", "25", True),
        (r"\boxed{16}", "016", True),
        (r"\boxed{336}", r"336^\circ", True),
        (r"\boxed{336^{\circ}}", 336, True),
        (r"\boxed{ 7 }", "7", True),
        (r"$\boxed{\text{42}}$", "42", True),
        (r"\boxed{$42$}", "42", True),
        (r"\boxed{0}", "000", True),
        (r"\boxed{\boxed{9}}", "9", True),
        (r"\boxed{12} \boxed{13}", "13", True),
        (r"\boxed{12} \boxed{13}", "12", False),
        (r"\boxed{125}", "25", False),  # neither suffix
        (r"\boxed{25}", "125", False),
        (r"\boxed{5\cdot25=125}", "125", False),  # nor substring
        (r"\boxed{1{,}000}", 0, False),
        (r"\boxed{25.0}", 25, False),
        (r"\boxed{-5}", 5, False),
        (r"\boxed{\frac{50}{2}}", 25, False),
        (r"\boxed{\text{(A)}}", 1, False),
        (r"\boxed{２５}", 25, False),
        (r"\boxed{2_5}", 25, False),
        (r"\boxed{}", 0, False),
        ("the answer is 25", 25, False),
        (r"\boxed{25", 25, False),
        ("", 25, False),
    ],
)
def test_aime_answers_are_compared_as_integers(response, answer, right):
    assert grade_aime(response, answer) is right


@pytest.mark.parametrize("answer", ["", "1000", "-1", "x", "2.5", None, "1{,}000"])
def test_an_answer_that_is_no_aime_integer_is_refused(answer):
    with pytest.raises(ValueError, match="answer"):
        grade_aime(r"\boxed{1}", answer)


@pytest.mark.parametrize("piece", ["{", "}", r"\boxed{", r"\boxed", r"\boxed ", "\\", " ", "9", "0", "{,}", r"\text{", "{}", "$"])
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
            draws = [any(draw) for draw in itertools.combinations(outcomes, k)]
            assert pass_at_k(samples, correct, k) == pytest.approx(sum(draws) / len(draws))


@pytest.mark.parametrize("arguments", [(4, 2, 0), (4, 2, 5), (4, 5, 2), (4, -1, 2)])
def test_pass_at_k_refuses_impossible_counts(arguments):
    with pytest.raises(ValueError, match="pass_at_k"):
        pass_at_k(*arguments)
