"""plot.py: the numbers of made-up runs, also of unfinished ones, and the files that it writes."""

import pytest
from conftest import write_lines, write_run

from support import plot, runs


def test_outcomes_leave_out_the_beginning_of_a_run_and_of_a_batch(made_up_runs):
    """Entropy is that of the last 10 steps, reward that of the last 20; another run is longer."""
    for run, steps in (("grpo@2-seed1", 25), ("grpo@2-seed2", 60)):
        lines = []
        for step in range(1, steps + 1):
            reward = float(steps - step < 20)
            lines.append(
                {"step": step, "update": 1, "reward": reward, "entropy": 0.0, "grad_norm": 1.0}
            )
        write_lines(made_up_runs / run / "metrics.jsonl", lines)
    numbers = plot.outcomes(plot.load(made_up_runs)).loc["grpo@2"]
    assert (numbers["reward"] == 1).all()


def test_the_report_has_a_row_per_method_and_one_before_training(made_up_runs):
    """A run that goes on has no accuracy yet, one seed no interval, a loss without bounds no low.

    What is no run has no row.
    """
    (made_up_runs / "bapo@2-seed7").mkdir()  # just begun
    write_lines(made_up_runs / "bapo@2-seed8/metrics.jsonl", [], cut_line='{"step": 1')
    write_run(made_up_runs, "grpo@2-seed1-old", {"reward": 0.9}, norm=9.0)
    # t(0.975, one degree of freedom) = 12.706; the standard error of 0.4 and 0.5 is 0.05. Norms
    # are the upper ends of 1, 3 and of 2, 6.
    assert plot.report(made_up_runs) == (
        "| method | seeds | entropy | reward | gradient norm | gradient_share | low | high"
        " | mean@16 | pass@8 |\n"
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |\n"
        "| bapo@2 | 1 | 0.500 | 0.000 | 1.000 | – | – | – | – | – |\n"
        "| before training | 2 | – | – | – | – | – | – | 0.200 ± 0.000 | 0.500 ± 0.000 |\n"
        "| cispo@2 | 2 | 0.300 ± 0.000 | 0.150 ± 0.635 | 6.000 ± 0.000 | 0.400 ± 0.000 | – | –"
        " | – | – |\n"
        "| grpo@2 | 2 | 0.300 ± 0.000 | 0.150 ± 0.635 | 4.500 ± 19.059 | 0.400 ± 0.000"
        " | 0.800 ± 0.000 | 1.200 ± 0.000 | 0.450 ± 0.635 | 0.500 ± 0.000 |\n"
    )
    assert (made_up_runs / "curves.png").stat().st_size > 10_000


def test_a_run_that_never_trained_is_drawn(tmp_path):
    """All rewards were equal, so no step had an update."""
    lines = [{"step": step, "update": 0, "reward": 0.0, "entropy": 0.5} for step in (1, 2)]
    write_lines(tmp_path / "grpo@8-seed0/metrics.jsonl", lines)
    assert "| grpo@8 | 1 | 0.500 | 0.000 | – |" in plot.report(tmp_path)


def test_a_folder_without_runs_is_refused(tmp_path):
    runs.write_json(tmp_path / "start-seed0.json", {"mean@16": 0.2})
    write_lines(tmp_path / "bapo@2-seed8/metrics.jsonl", [])
    with pytest.raises(ValueError, match=tmp_path.name):
        plot.load(tmp_path)
