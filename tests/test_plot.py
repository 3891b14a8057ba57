"""plot.py: the numbers of made-up runs, also of unfinished ones, and the files that it writes."""

import shutil

import pytest
from conftest import write_lines, write_run
from matplotlib.figure import Figure

from support import plot


def test_outcomes_are_the_numbers_of_the_lines(made_up_runs):
    numbers = plot.outcomes(plot.load(made_up_runs))
    of_run = numbers.loc[("grpo@2", 2)]
    assert of_run["entropy"] == pytest.approx(0.3)
    assert of_run["reward"] == pytest.approx(0.2)
    # of the norms 2, 6, 2, 6
    assert of_run["gradient norm"] == pytest.approx(6)
    assert of_run["positive share"] == pytest.approx(0.4)
    assert (of_run["mean low"], of_run["mean high"]) == (0.8, 1.2)
    assert of_run["mean@16"] == pytest.approx(0.5)
    assert numbers.loc[(plot.START, 2), "mean@16"] == 0.2


def test_the_end_of_each_run_is_its_own(made_up_runs):
    """Entropy is that of the last 10 steps, reward that of the last 20; another run is longer."""
    for run, steps in (("grpo@2-seed1", 25), ("grpo@2-seed2", 60)):
        lines = []
        for step in range(1, steps + 1):
            left = steps - step
            values = {"entropy": float(left < 10), "reward": float(left < 20), "grad_norm": 1.0}
            lines.append({"step": step, "update": 1} | values)
        write_lines(made_up_runs / run / "metrics.jsonl", lines)
    numbers = plot.outcomes(plot.load(made_up_runs)).loc["grpo@2"]
    assert numbers["entropy"].to_list() == numbers["reward"].to_list() == [1.0, 1.0]


def test_a_step_s_norm_is_the_95th_percentile_of_its_updates(made_up_runs):
    lines = plot.load(made_up_runs).lines
    norms = plot.by_step(lines, "grad_norm")["grpo@2"]
    assert norms[1].to_list() == pytest.approx([2.9, 2.9])  # 1 and 3: 1 + 0.95 * 2
    assert plot.by_step(lines, "grad_norm")["bapo@2"][1].isna().to_list() == [False, True]


def test_the_table_has_a_row_per_method_and_one_before_training(made_up_runs):
    head, _, *rows = plot.report(made_up_runs).splitlines()
    columns = [cell.strip() for cell in head.split("|")]
    cells = {row.split("|")[1].strip(): row.split("|") for row in rows}
    assert list(cells) == [plot.START, "bapo@2", "cispo@2", "grpo@2"]
    # t(0.975, one degree of freedom) = 12.706; the standard error of 0.4 and 0.5 is 0.05
    assert cells["grpo@2"][columns.index("mean@16")].strip() == "0.450 ± 0.635"
    assert cells["cispo@2"][columns.index("mean low")].strip() == "–"
    assert cells["bapo@2"][columns.index("entropy")].strip() == "0.500"  # one seed: no interval
    assert cells["bapo@2"][columns.index("mean@16")].strip() == "–"  # it still goes on
    assert (made_up_runs / "table.md").read_text().splitlines()[0] == head
    assert (made_up_runs / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_bounds_are_those_of_all_updates_but_a_batch_s_first(made_up_runs):
    lines = []
    for step, high in ((1, 1.2), (2, 1.5)):
        # Where every ratio is 1, the search runs to its end and changes nothing.
        first = {"step": step, "update": 1, "low": 0.9, "high": 3.0, "grad_norm": 1.0}
        lines += [first, first | {"update": 2, "low": 0.6, "high": high}]
    write_lines(made_up_runs / "grpo@2-seed1/metrics.jsonl", lines)
    numbers = plot.outcomes(plot.load(made_up_runs)).loc[("grpo@2", 1)]
    assert (numbers["mean low"], numbers["mean high"]) == pytest.approx((0.6, 1.35))


def test_five_seeds_have_a_band(made_up_runs):
    for seed in (3, 4, 5):
        shutil.copytree(made_up_runs / "grpo@2-seed1", made_up_runs / f"grpo@2-seed{seed}")
    axis = Figure().subplots()
    plot.curves(axis, plot.load(made_up_runs).lines.loc[["grpo@2"]], "reward", "")
    (band,) = axis.collections
    heights = [point[1] for path in band.get_paths() for point in path.vertices]
    # Of a mean of 0.12; t(0.975, four degrees of freedom) = 2.776; the standard error is 0.02
    assert max(heights) == pytest.approx(0.1755, abs=1e-4)


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
