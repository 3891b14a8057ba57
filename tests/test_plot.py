"""plot.py: numbers of made-up runs, also of runs that still go on; the files that it writes."""

import shutil

import numpy as np
import pytest
from conftest import write_lines

import plot
import runs


def test_outcomes_are_the_numbers_of_the_lines(made_up_runs):
    numbers = plot.outcomes(plot.load(made_up_runs))
    of_run = numbers.loc[("grpo@2", 2)]
    assert of_run["entropy at the end"] == pytest.approx(0.3)
    assert of_run["reward at the end"] == pytest.approx(0.2)
    # of the norms 2, 6, 2, 6
    assert of_run["gradient norm, 95th percentile"] == pytest.approx(6)
    assert of_run["positive share"] == pytest.approx(0.4)
    assert (of_run["mean low"], of_run["mean high"]) == (0.8, 1.2)
    assert of_run["mean@16"] == pytest.approx(0.5)
    assert numbers.loc[("start", 2), "mean@16"] == 0.2


def test_only_the_last_steps_count_as_the_end(made_up_runs):
    path = made_up_runs / "grpo@2-seed1/metrics.jsonl"
    entropies = [9.0] * 5 + [1.0] * plot.LAST_STEPS
    lines = []
    for step, entropy in enumerate(entropies, 1):
        lines.append({"step": step, "update": 1, "entropy": entropy, "grad_norm": 1.0})
    write_lines(path, lines)
    numbers = plot.outcomes(plot.load(made_up_runs))
    assert numbers.loc[("grpo@2", 1), "entropy at the end"] == 1


def test_a_run_that_goes_on_counts_as_far_as_it_is(made_up_runs):
    found = plot.load(made_up_runs)
    assert len(found.lines.loc["bapo@2"]) == 2  # the cut line is left out
    numbers = plot.outcomes(found).loc[("bapo@2", 1)]
    assert numbers["mean high"] == 2.0  # not of the step in which nothing was trained
    assert numbers["entropy at the end"] == 0.5
    assert np.isnan(numbers["mean@16"])


def test_a_step_s_norm_is_the_95th_percentile_of_its_updates(made_up_runs):
    lines = plot.load(made_up_runs).lines
    norms = plot.by_step(lines, "grad_norm")["grpo@2"]
    assert norms[1].to_list() == pytest.approx([2.9, 2.9])  # 1 and 3: 1 + 0.95 * 2
    assert plot.by_step(lines, "grad_norm")["bapo@2"][1].isna().to_list() == [False, True]


def test_intervals_are_student_s(made_up_runs):
    accuracies = plot.load(made_up_runs).accuracies["mean@16"].unstack(0)
    mean, half = plot.interval(accuracies)
    assert mean["grpo@2"] == pytest.approx(0.45)
    # t(0.975, one degree of freedom) = 12.706; the standard error of 0.4 and 0.5 is 0.05
    assert half["grpo@2"] == pytest.approx(0.6353, abs=1e-4)
    assert np.isnan(plot.interval(accuracies.loc[[1]])[1]["grpo@2"])


def test_the_table_has_a_row_per_method_and_one_for_the_starts(made_up_runs):
    head, _, *rows = plot.report(made_up_runs).splitlines()
    columns = [cell.strip() for cell in head.split("|")]
    cells = {row.split("|")[1].strip(): row.split("|") for row in rows}
    assert sorted(cells) == ["bapo@2", "cispo@2", "grpo@2", "start"]
    assert cells["grpo@2"][columns.index("mean@16")].strip() == "0.450 ± 0.635"
    assert cells["cispo@2"][columns.index("mean low")].strip() == "–"
    assert cells["bapo@2"][columns.index("mean high")].strip() == "2.000"  # one seed: no interval
    assert (made_up_runs / "table.md").read_text().splitlines()[0] == head
    assert (made_up_runs / "curves.png").read_bytes().startswith(b"\x89PNG")


def rewritten(folder, run: str, *changes: dict) -> None:
    """Add changes[i] to line i of a run's metrics.jsonl."""
    path = folder / run / "metrics.jsonl"
    lines = runs.read_lines(path)
    for line, change in zip(lines, changes):
        line |= change
    write_lines(path, lines)


def test_the_table_says_how_often_bounds_moved(made_up_runs):
    at_start = {"low": 0.6, "high": 1.2, "rho": 0.5, "rho_start": 0.5, "reached": 1.0}
    balanced = {"low": 0.6, "high": 1.5, "rho": 0.45, "rho_start": 0.4, "reached": 1.0}
    # Where every ratio is 1 the search runs to its end, and nothing changes.
    without_effect = {"low": 0.9, "high": 3.0, "rho": 0.4, "rho_start": 0.4, "reached": 0.0}
    for seed in (1, 2):
        rewritten(made_up_runs, f"grpo@2-seed{seed}", *[at_start] * 4)
        rewritten(made_up_runs, f"cispo@2-seed{seed}", *[{"low": 0.0, "high": None}] * 4)
        shutil.copytree(made_up_runs / "grpo@2-seed1", made_up_runs / f"bapo@8-seed{seed}")
    rewritten(made_up_runs, "bapo@8-seed1", at_start, balanced, without_effect, without_effect)
    head, _, *rows = plot.table(plot.load(made_up_runs))
    columns = head.split(" | ")
    shown = {}
    for row in rows:
        cells = dict(zip(columns, row.split(" | ")))
        shown[cells["| method"]] = [cells[name] for name in (plot.MOVED, "mean low", "mean high")]
    assert [cell[:5] for cell in shown["| bapo@8"]] == ["0.375", "0.675", "1.688"]
    assert shown["| grpo@2"] == ["0.000 ± 0.000", "–", "–"]
    assert shown["| cispo@2"] == ["–", "–", "–"]  # a neighbour's low of 0 is no bound


def test_a_column_without_numbers_is_left_out(made_up_runs):
    head, *_ = plot.table(plot.load(made_up_runs))
    assert "mean@16" in head
    assert plot.MOVED not in head  # these lines hold no rho


def rewards_drawn(folder):
    """Axes with grpo@2's reward, on which nothing else is."""
    figure, axis = plot.plt.subplots()
    plot.curves(axis, plot.load(folder).lines.loc[["grpo@2"]], "reward", "")
    plot.plt.close(figure)
    return axis


def heights_of_band(axis) -> list[float]:
    (band,) = axis.collections
    return [float(point[1]) for path in band.get_paths() for point in path.vertices]


def test_a_few_seeds_are_lines_without_a_band(made_up_runs):
    axis = rewards_drawn(made_up_runs)
    heights = [line.get_ydata()[-1] for line in axis.lines]
    assert heights == pytest.approx([0.15, 0.1, 0.2])
    assert heights_of_band(axis) == []  # Student's would reach from -0.5 to 0.8
    assert len(axis.get_legend_handles_labels()[0]) == 1
    low, high = axis.get_ylim()
    assert 0.08 < low < 0.1
    assert 0.2 < high < 0.22


def test_five_seeds_have_a_band_that_is_shown_whole(made_up_runs):
    for seed in (3, 4, 5):
        shutil.copytree(made_up_runs / "grpo@2-seed1", made_up_runs / f"grpo@2-seed{seed}")
    axis = rewards_drawn(made_up_runs)
    (line,) = axis.lines
    assert line.get_ydata() == pytest.approx([0.12, 0.12])
    # t(0.975, four degrees of freedom) = 2.776; the standard error is 0.02
    assert max(heights_of_band(axis)) == pytest.approx(0.1755, abs=1e-4)
    assert axis.get_ylim()[1] > 0.1755


def panel_of(figure, title: str):
    return next(axis for axis in figure.axes if title in axis.get_title())


def drawn_by(axis, method: str):
    """The line of a method's means."""
    return next(line for line in axis.lines if line.get_label() == method)


def test_accuracies_on_the_way_are_drawn_as_measured(made_up_runs):
    (made_up_runs / "start-seed2.json").unlink()  # a given model is one start for all seeds
    for seed, measured in ((1, [0.3, 0.6]), (2, [0.5, 0.6])):
        of_step = [{"held_out_mean@16": accuracy} for accuracy in measured]
        rewritten(made_up_runs, f"grpo@2-seed{seed}", {}, of_step[0], {}, of_step[1])
    axis = panel_of(plot.draw(plot.load(made_up_runs)), "as measured")
    curve = drawn_by(axis, "grpo@2")
    assert curve.get_xdata().tolist() == [0, 1, 2]
    assert curve.get_ydata() == pytest.approx([0.2, 0.4, 0.6])  # the start, and no smoothing
    of_seeds = [line.get_ydata()[0] for line in axis.lines if line.get_linewidth() < 1]
    assert of_seeds == pytest.approx([0.2] * len(of_seeds))
    ends = [line.get_ydata()[0] for line in axis.lines if line.get_marker() == "s"]
    assert pytest.approx(0.45) in ends  # of final.json
    plot.plt.close("all")


def test_a_method_has_one_colour_in_all_panels_and_the_named_ones_in_all_pictures(made_up_runs):
    figure = plot.draw(plot.load(made_up_runs))
    curve = drawn_by(panel_of(figure, "reward"), "grpo@2")
    # Of the three methods bapo@2 and cispo@2 have no end yet: grpo@2 stays the third.
    ends = panel_of(figure, "held-out")
    of_means = [line for line in ends.lines if line.get_marker() == "s"]
    drawn = {round(float(line.get_ydata()[0]), 3): line.get_color() for line in of_means}
    assert drawn[0.45] == curve.get_color()
    assert drawn[0.2] == plot.COLOURS["start"]
    plot.plt.close("all")
    shown = plot.colours(["cispo@8", "0.9-3.0@8", "bapo@8", "grpo@1"])
    assert list(shown) == ["grpo@1", "bapo@8", "0.9-3.0@8", "cispo@8"]
    assert shown["bapo@8"] == plot.COLOURS["bapo@8"]
    assert len(set(shown.values())) == 4


def test_a_folder_without_runs_is_refused(tmp_path):
    with pytest.raises(ValueError, match=tmp_path.name):
        plot.load(tmp_path)
