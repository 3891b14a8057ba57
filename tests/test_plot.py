"""plot.py: the numbers of made-up runs, also of unfinished ones, and what it draws."""

import pytest
from conftest import write_lines, write_run

from support import plot, runs


def test_the_report_has_a_row_per_method_and_one_before_training(made_up_runs):
    """A run that goes on has no accuracy yet, one seed no interval, a loss without bounds no low.

    Metrics are means over the last 20 steps, in which a step with more updates counts no more.
    What is no run has no row.
    """
    (made_up_runs / "bapo@2-seed7").mkdir()  # just begun
    write_lines(made_up_runs / "bapo@2-seed8/metrics.jsonl", [], cut_line='{"step": 1')
    write_run(made_up_runs, "grpo@2-seed1-old", {"reward": 0.9}, norm=9.0)
    lines = []
    for step in range(1, 22):
        lines += [{"step": step, "reward": float(step < 3)}] * step
    write_lines(made_up_runs / "long@2-seed1/metrics.jsonl", lines)
    # t(0.975, one degree of freedom) = 12.706; the standard error of 0.4 and 0.5 is 0.05.
    assert plot.report(made_up_runs) == (
        "| method | seeds | entropy | grad_norm | low | high | reward | gradient_share | mean@16"
        " | pass@8 |\n"
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |\n"
        "| bapo@2 | 1 | 0.500 | 1.000 | 0.900 | 2.000 | 0.000 | – | – | – |\n"
        "| before training | 2 | – | – | – | – | – | – | 0.200 ± 0.000 | 0.500 ± 0.000 |\n"
        "| cispo@2 | 2 | 0.300 ± 0.000 | 4.000 ± 0.000 | – | – | 0.150 ± 0.635 | 0.400 ± 0.000"
        " | – | – |\n"
        "| grpo@2 | 2 | 0.300 ± 0.000 | 3.000 ± 12.706 | 0.800 ± 0.000 | 1.200 ± 0.000"
        " | 0.150 ± 0.635 | 0.400 ± 0.000 | 0.450 ± 0.635 | 0.500 ± 0.000 |\n"
        "| long@2 | 1 | – | – | – | – | 0.050 | – | – | – |\n"
    )
    assert (made_up_runs / "curves.png").stat().st_size > 10_000


def test_two_folders_make_one_picture_and_one_table(tmp_path, made_up_runs):
    write_run(tmp_path / "runs/b/rate", "grpo@2-seed1", {"reward": 0.9}, norm=1.0)
    text = plot.report(made_up_runs, tmp_path / "runs/b/rate")
    assert "| made-up/grpo@2 | 2 |" in text and "| b/rate/grpo@2 | 1 |" in text
    assert (tmp_path / "runs/table.md").read_text() == text
    assert (tmp_path / "runs/curves.png").exists()


def test_panels_are_what_says_something(tmp_path):
    """A run that never trained has a reward of 0, which is drawn; a single accuracy is not.

    The smoothed entropy hides that it falls at the end, so there is a line of every step.
    """
    lines = [
        {"step": 1, "reward": 0.0, "entropy": 1.0, "truncated": 1.0, "clip_fraction_low": 0.0},
        {"step": 2, "reward": 0.0, "entropy": 1.0, "truncated": 1.0, "held_out_mean@4": 0.5},
        {"step": 3, "reward": 0.0, "entropy": 0.1, "held_out_mean@16": 0.5, "held_out_mean@4": 0.1},
    ]
    lines += lines[-1:]  # another update
    write_lines(tmp_path / "bapo@1-seed0/metrics.jsonl", lines)
    panels = {}
    for axis in plot.draw(plot.read_runs(tmp_path)).axes:
        panels[axis.get_title()] = [list(line.get_ydata()) for line in axis.lines]
    assert list(panels) == ["reward", "entropy", "held_out_mean@4", "truncated"]
    assert panels["held_out_mean@4"][0] == [0.5, 0.1]
    smoothed, every_step = panels["entropy"]
    assert smoothed[-1] == pytest.approx(0.7)
    assert every_step[-1] == 0.1


def test_partial_rollouts_without_a_finished_group_are_drawn(tmp_path):
    write_lines(tmp_path / "grpo@8-seed0/metrics.jsonl", [{"step": 1, "update": 0}])
    plot.report(tmp_path)


def test_a_folder_without_runs_is_refused(tmp_path):
    runs.write_json(tmp_path / "start-seed0.json", {"mean@16": 0.2})
    write_lines(tmp_path / "bapo@2-seed8/metrics.jsonl", [])
    with pytest.raises(ValueError, match=tmp_path.name):
        plot.report(tmp_path)
