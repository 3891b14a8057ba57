"""plot.py: the numbers of made-up runs, also of unfinished ones, and what it draws."""

from pathlib import Path

import pytest
from conftest import write_lines

from support import runs

plot = pytest.importorskip("support.plot")  # needs matplotlib, pandas and scipy


def write_run(folder: Path, name: str, lines: list[dict], **final) -> None:
    """A run whose last line is cut, with its accuracies if it has ended."""
    write_lines(folder / name / "metrics.jsonl", lines, cut_line='{"step": 3, "upd')
    if final:
        runs.write_json(folder / name / "final.json", final)


def test_the_report_has_a_row_per_method_and_one_before_training(tmp_path):
    """A run that goes on has no accuracy yet, one seed no interval, a loss without bounds no low.

    Metrics are means over the last 20 steps, in which a step with more updates counts no more.
    What is no run has no row.
    """
    for seed in (1, 2):
        lines = [{"step": 1, "update": 1, "reward": 0.1 * seed, "low": 0.8}]
        write_run(tmp_path, f"grpo@2-seed{seed}", lines, **{"mean@16": 0.3 + 0.1 * seed})
    write_run(tmp_path, "grpo@2-seed1-old", [{"step": 1, "reward": 9.0}])
    write_run(tmp_path, "bapo@2-seed7", [])  # just begun
    lines = []
    for step in range(1, 22):
        lines += [{"step": step, "reward": float(step < 3)}] * step
    write_run(tmp_path, "cispo@8-seed1", lines)
    runs.write_json(tmp_path / "start-seed0.json", {"mean@16": 0.2})
    # t(0.975, one degree of freedom) = 12.706; the standard error of 0.4 and 0.5 is 0.05.
    assert plot.report(tmp_path) == (
        "| method | seeds | reward | low | mean@16 |\n"
        "| --- | --- | --- | --- | --- |\n"
        "| before training | 1 | – | – | 0.200 |\n"
        "| cispo@8 | 1 | 0.050 | – | – |\n"
        "| grpo@2 | 2 | 0.150 ± 0.635 | 0.800 ± 0.000 | 0.450 ± 0.635 |\n"
    )
    assert (tmp_path / "curves.png").exists()


def test_two_folders_make_one_picture_and_one_table(tmp_path):
    """Partial rollouts may have no metric."""
    folders = [tmp_path / "runs/a", tmp_path / "runs/b/rate"]
    for folder in folders:
        write_run(folder, "grpo@2-seed1", [{"step": 1, "update": 0}], **{"mean@16": 0.3})
    plot.report(*folders)
    text = (tmp_path / "runs/table.md").read_text()
    assert "| a/grpo@2 |" in text and "| b/rate/grpo@2 |" in text


def test_panels_are_what_says_something(tmp_path):
    """A run that never trained has a reward of 0, which is drawn; a single accuracy is not.

    The smoothed entropy hides that it falls at the end, so there is a line of every step.
    """
    lines = [
        {"step": 1, "reward": 0.0, "entropy": 1.0, "truncated": 1.0, "clip_fraction_low": 0.0},
        {"step": 2, "entropy": 1.0, "truncated": 1.0, "held_out_mean@4": 0.5},
        {"step": 3, "entropy": 0.1, "held_out_mean@16": 0.5, "held_out_mean@4": 0.1},
    ]
    write_run(tmp_path, "bapo@1-seed0", lines + lines[-1:])  # two updates
    figure = plot.draw(plot.read_runs(tmp_path, tmp_path))
    panels = {axis.get_title(): axis.lines for axis in figure.axes}
    assert list(panels) == ["reward", "entropy", "truncated", "held_out_mean@4"]
    assert list(panels["held_out_mean@4"][0].get_ydata()) == [0.5, 0.1]
    assert [line.get_ydata()[-1] for line in panels["entropy"]] == pytest.approx([0.7, 0.1])


def test_a_folder_without_runs_is_refused(tmp_path):
    write_run(tmp_path, "bapo@2-seed8", [])
    with pytest.raises(ValueError, match=tmp_path.name):
        plot.report(tmp_path)
