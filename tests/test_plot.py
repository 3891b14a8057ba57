"""plot.py: numbers of made-up runs, also of runs that still go on; the files that it writes."""

import json

import numpy as np
import pytest

import plot


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
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
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


def test_accuracies_on_the_way_are_drawn(made_up_runs):
    path = made_up_runs / "grpo@2-seed1/metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines[1]["held_out_mean@4"] = 0.3
    lines[3]["held_out_mean@4"] = 0.6
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    figure = plot.draw(plot.load(made_up_runs))
    panel = next(axis for axis in figure.axes if "mean@4" in axis.get_title())
    curve = next(line for line in panel.lines if line.get_label() == "grpo@2")
    assert curve.get_xdata().tolist() == [1, 2]
    assert curve.get_ydata() == pytest.approx([0.3, 0.45])  # smoothed, as all curves
    plot.plt.close(figure)


def test_a_folder_without_runs_is_refused(tmp_path):
    with pytest.raises(ValueError, match=tmp_path.name):
        plot.load(tmp_path)
