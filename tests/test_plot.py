"""plot.py: the numbers of made-up runs, also of unfinished ones, and the files that it writes."""

import pytest
from conftest import write_lines, write_run

from support import plot


def test_outcomes_leave_out_the_beginning_of_a_run_and_of_a_batch(made_up_runs):
    """Entropy is that of the last 10 steps, reward that of the last 20; another run is longer."""
    for run, steps in (("grpo@2-seed1", 25), ("grpo@2-seed2", 60)):
        lines = []
        for step in range(1, steps + 1):
            left = steps - step
            common = {"step": step, "entropy": float(left < 10), "reward": float(left < 20)}
            # Where every ratio is 1, the search runs to its end and changes nothing.
            lines.append(common | {"update": 1, "low": 0.9, "high": 3.0, "grad_norm": 1.0})
            lines.append(common | {"update": 2, "low": 0.6, "high": 1.5, "grad_norm": 1.0})
        write_lines(made_up_runs / run / "metrics.jsonl", lines)
    numbers = plot.outcomes(plot.load(made_up_runs)).loc["grpo@2"]
    for name, expected in {"entropy": 1, "reward": 1, "mean low": 0.6, "mean high": 1.5}.items():
        assert numbers[name].to_list() == pytest.approx([expected] * 2), name


def test_a_step_s_norm_is_the_95th_percentile_of_its_updates(made_up_runs):
    lines = plot.load(made_up_runs).lines
    norms = plot.by_step(lines, "grad_norm")["grpo@2"]
    assert norms[1].to_list() == pytest.approx([2.9, 2.9])  # 1 and 3: 1 + 0.95 * 2


def test_the_table_has_a_row_per_method_and_one_before_training(made_up_runs):
    head, _, *lines = plot.report(made_up_runs).splitlines()
    columns = [cell.strip() for cell in head.split("|")[2:-1]]
    rows = {}
    for line in lines:
        _, method, *cells, _ = [cell.strip() for cell in line.split("|")]
        rows[method] = dict(zip(columns, cells))
    assert list(rows) == [plot.START, "bapo@2", "cispo@2", "grpo@2"]
    # t(0.975, one degree of freedom) = 12.706; the standard error of 0.4 and 0.5 is 0.05
    assert rows["grpo@2"] == {
        "seeds": "2",
        "entropy": "0.300 ± 0.000",  # of 0.4 and 0.2
        "reward": "0.150 ± 0.635",
        "gradient norm": "4.500 ± 19.059",  # of 3 and 6, the upper ends of 1, 3 and of 2, 6
        "positive share": "0.400 ± 0.000",
        "mean low": "0.800 ± 0.000",
        "mean high": "1.200 ± 0.000",
        "mean@16": "0.450 ± 0.635",
        "pass@8": "0.500 ± 0.000",
    }
    assert rows[plot.START]["mean@16"] == "0.200 ± 0.000"
    assert rows["cispo@2"]["mean low"] == "–"
    assert rows["bapo@2"]["entropy"] == "0.500"  # one seed: no interval
    assert rows["bapo@2"]["mean@16"] == "–"  # it still goes on
    assert (made_up_runs / "table.md").read_text().splitlines()[0] == head
    assert (made_up_runs / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_what_is_no_run_is_left_out(made_up_runs):
    before = plot.table(plot.load(made_up_runs))
    (made_up_runs / "bapo@2-seed7").mkdir()  # just begun
    write_lines(made_up_runs / "bapo@2-seed8/metrics.jsonl", [], cut_line='{"step": 1')
    write_run(made_up_runs, "grpo@2-seed1-old", {"reward": 0.9}, norm=9.0)
    assert plot.table(plot.load(made_up_runs)) == before


def test_a_folder_without_runs_is_refused(tmp_path):
    write_lines(tmp_path / "bapo@2-seed8/metrics.jsonl", [])
    with pytest.raises(ValueError, match=tmp_path.name):
        plot.load(tmp_path)
