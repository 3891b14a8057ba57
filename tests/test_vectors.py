"""vectors.json, and check_port.py, which says of a port where it differs from them."""

import check_port
import make_vectors


def test_what_the_vectors_expect_is_what_the_script_makes():
    assert check_port.VECTORS.read_text() == make_vectors.text()


def test_bapo_agrees_by_the_example_of_an_adapter():
    assert check_port.main(f"{check_port.__file__}:bapo_adapter") == 0


def always_a_half(case):
    return make_vectors.expected(case) | {"rho": 0.5}


def test_a_wrong_port_is_told_what_it_did_wrong(capsys):
    assert check_port.main(f"{__file__}:always_a_half") == 1
    first, *_ = capsys.readouterr().out.split("differs: ")[1:]
    assert first.startswith("rho is the positive share P / (P + N), 0.4 here")
    assert "rho: expected 0.4, got 0.5" in first
