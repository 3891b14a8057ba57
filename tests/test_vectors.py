"""vectors.json, and check_port.py, which says of a port where it differs from them."""

from pathlib import Path

import check_port
import make_vectors

LITERAL = Path(make_vectors.__file__)


def test_what_the_vectors_expect_is_what_the_script_makes():
    assert check_port.VECTORS.read_text() == make_vectors.text()


def test_bapo_agrees_by_the_example_of_an_adapter(capsys):
    status = check_port.main(f"{check_port.__file__}:bapo_adapter")
    assert (status, capsys.readouterr().out) == (0, "40 of 40 cases agree\n")


def test_a_wrong_port_is_told_first_what_it_did_wrong(tmp_path, capsys):
    literal = LITERAL.read_text()
    right = ' >= settings["rho0"] - 1e-6'
    assert right in literal
    port = tmp_path / "wrong_port.py"
    port.write_text(literal.replace(right, ' >= settings["rho0"]'))
    assert check_port.main(f"{port}:expected") == 1
    first, *_ = capsys.readouterr().out.splitlines()
    assert first.startswith("tie: lengths of 2 and 3 at ratio 1 are a tie with rho0 = 0.4")


def test_a_port_without_a_gradient_does_not_pass(tmp_path, capsys):
    port = tmp_path / "port_without_gradient.py"
    port.write_text(
        "import make_vectors\n"
        "def port(case):\n"
        "    return make_vectors.expected(case) | {'gradient': []}\n"
    )
    assert check_port.main(f"{port}:port") == 1
    assert "gradient[0][0]: expected -0.25, got None" in capsys.readouterr().out
