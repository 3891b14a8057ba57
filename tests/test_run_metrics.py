"""support/run_metrics.py: outcomes, intervals, the table and the packed copy of saved runs."""

import json
import lzma
import math
import re

import numpy as np
import pytest
from saved_runs import rows_of, two_updates, write_folder, write_run
from scipy import stats

from support import run_metrics
from support.run_metrics import RunMetrics


@pytest.fixture
def folder(tmp_path):
    return write_folder(tmp_path / "runs")


def runs_of(pairs):
    return [RunMetrics({"warm_start": start, "seed": seed}, {}, []) for start, seed in pairs]


def run_with(name, values):
    """A run with one update a step."""
    lines = []
    for step, value in enumerate(values, 1):
        lines.append({"step": step, "update": 1, name: value})
    return RunMetrics({}, {}, lines)


# ---------------------------------------------------------------- outcomes
def test_a_step_is_reduced_over_its_updates_and_missing_values_stay_missing():
    lines = [{"step": 1, "x": 1.0}, {"step": 1, "x": 3.0}, {"step": 2, "x": None}, {"step": 3}]
    run = RunMetrics({}, {}, lines)
    np.testing.assert_array_equal(run.per_step("x"), [2.0, math.nan, math.nan])
    np.testing.assert_array_equal(run.per_step("x", np.max), [3.0, math.nan, math.nan])
    assert run.outcome("x") == 2.0
    assert math.isnan(run.outcome("y"))
    assert math.isnan(run.outcome("mean@16"))


def test_the_gradient_norm_s_percentile_and_the_kl_s_median_are_over_all_updates_of_a_run():
    """Kills: percentiles or medians of the means of steps."""
    lines = []
    for i in range(100):
        lines.append({"step": i // 4 + 1, "update": i % 4 + 1, "grad_norm": float(i), "kl": i**2})
    run = RunMetrics({}, {}, lines)
    assert run.outcome("grad_norm") == pytest.approx(94.05)
    assert run.outcome("median_kl") == pytest.approx((49**2 + 50**2) / 2)
    assert run.outcome("kl") == pytest.approx(np.mean(np.arange(100) ** 2))


def test_the_lowest_entropy_is_that_of_20_consecutive_steps():
    """Kills: the lowest single step, the mean at the end, a window of another width."""
    rng = np.random.default_rng(0)
    values = 0.3 + 0.1 * rng.normal(size=60)
    values[30:50] -= 0.2
    values[5] = -1.0  # a single low step
    expected = min(values[i : i + 20].mean() for i in range(41))
    assert run_with("entropy", values).outcome("lowest_entropy") == pytest.approx(expected)
    assert run_with("entropy", values[:7]).outcome("lowest_entropy") == pytest.approx(
        values[:7].mean()
    )
    assert math.isnan(RunMetrics({}, {}, []).outcome("lowest_entropy"))


def test_rewards_and_entropies_at_the_end_are_means_of_ten_steps_and_other_metrics_of_all():
    values = [float(step) for step in range(1, 31)]
    assert run_with("reward", values).outcome("reward") == 25.5
    assert run_with("entropy", values).outcome("entropy") == 25.5
    assert run_with("low", values).outcome("low") == 15.5


# ---------------------------------------------------------------- intervals
def test_an_interval_is_student_s_over_the_means_of_warm_starts():
    rng = np.random.default_rng(0)
    pairs = [(3, 0), (3, 1), (1, 0), (1, 1), (2, 0), (2, 1), (1, 2)]
    values = rng.normal(size=(len(pairs), 4))
    mean, half = run_metrics.interval(values, runs_of(pairs))
    starts = np.array([start for start, _ in pairs])
    for column in range(4):
        means = [values[starts == start, column].mean() for start in (1, 2, 3)]
        low, high = stats.t.interval(0.95, 2, np.mean(means), stats.sem(means))
        assert mean[column] - half[column] == pytest.approx(low)
        assert mean[column] + half[column] == pytest.approx(high)
    _, narrower = run_metrics.interval(values, runs_of(pairs), 0.90)
    assert narrower == pytest.approx(half * stats.t.ppf(0.95, 2) / stats.t.ppf(0.975, 2))


@pytest.mark.parametrize("start", [7, ""])
def test_with_one_warm_start_or_none_an_interval_is_over_seeds(start):
    values = [0.1, 0.4, 0.3]
    low, high = stats.t.interval(0.95, 2, np.mean(values), stats.sem(values))
    mean, half = run_metrics.interval(values, runs_of([(start, 0), (start, 1), (start, 2)]))
    assert (mean - half, mean + half) == pytest.approx((low, high))


def test_one_run_has_no_interval_and_missing_values_do_not_count():
    mean, half = run_metrics.interval([0.5], runs_of([(1, 0)]))
    assert mean == 0.5
    assert np.isnan(half)
    values = [[0.5, math.nan], [math.nan, math.nan], [0.9, math.nan]]
    mean, half = run_metrics.interval(values, runs_of([(1, 0), (2, 0), (3, 0)]))
    assert mean[0] == pytest.approx(0.7)
    assert half[0] == pytest.approx(stats.t.ppf(0.975, 1) * 0.2)
    assert np.isnan(mean[1])


# ---------------------------------------------------------------- the table
def test_the_table_states_ends_percentiles_and_intervals_over_warm_starts(folder):
    lines = run_metrics.table(*run_metrics.load(folder))
    rows = rows_of(lines)
    assert list(rows) == ["warm start", "grpo@2", "bapo@2"]
    half = stats.t.ppf(0.975, 1) * stats.sem([0.6, 0.8])  # steps 21-30; the mean over seeds first
    accuracy_half = stats.t.ppf(0.975, 1) * 0.3
    expected = {
        "runs": "3",
        "reward at end": f"0.700 ± {half:.3f}",
        "entropy at end": "0.500 ± 0.000",
        "KL per update": "0.0012 ± 0.0000",
        "gradient norm, 95th percentile": "3.000 ± 0.000",
        "negatives with gradient": "0.900 ± 0.000",
        "gradient share": f"0.425 ± {stats.t.ppf(0.975, 1) * 0.025:.3f}",
        "mean low": "0.800 ± 0.000",
        "mean high": "2.700 ± 0.000",
        "held-out mean@16": f"0.600 ± {accuracy_half:.3f}",
    }
    for column, cell in expected.items():
        assert rows["grpo@2"][column] == cell
    assert "held-out pass@16" not in rows["grpo@2"]
    assert rows["bapo@2"]["reward at end"] == "0.300"
    assert rows["bapo@2"]["held-out pass@8"] == "0.600"
    assert rows["warm start"]["runs"] == "2"
    assert rows["warm start"]["held-out mean@16"].startswith("0.300 ± ")
    assert lines[-1].startswith("Mean ± half of Student's 95 % interval over warm starts.")
    assert lines[-1].endswith("At end: mean of the last 10 steps.")


def test_the_note_below_the_table_claims_no_more_than_there_is(tmp_path):
    """Kills: an interval over warm starts, or a mean of ten steps, where there are none."""
    write_run(tmp_path, "grpo@2", None, 0, [two_updates(0.2)] * 4)
    note = run_metrics.table(*run_metrics.load(tmp_path))[-1]
    assert note == "One run per arm. At end: mean of the last 4 steps."
    write_run(tmp_path, "grpo@2", None, 1, [two_updates(0.2)] * 4)
    note = run_metrics.table(*run_metrics.load(tmp_path))[-1]
    assert note.startswith("Mean ± half of Student's 95 % interval over seeds.")


def test_an_arm_that_was_never_trained_is_said_to_be(tmp_path):
    untrained = [{"untrained": True, "reward": 0.0, "entropy": 0.4}]
    write_run(tmp_path, "grpo@2", 1, 0, [untrained] * 3)
    write_run(tmp_path, "grpo@2", 1, 1, [two_updates(0.2)])
    arms, starts = run_metrics.load(tmp_path)
    row = rows_of(run_metrics.table(arms, starts))["grpo@2"]
    assert row["runs"].startswith("2 (1 never trained")
    assert row["reward at end"].startswith("0.100")
    trained = {"grpo@2": arms["grpo@2"][1:]}
    assert "never" not in "".join(run_metrics.table(trained, {}))


def test_runs_of_an_own_model_need_no_warm_start(tmp_path):
    for seed in (0, 1):
        final = {"greedy": 0.1, "mean@4": 0.2, "pass@4": 0.3}
        write_run(tmp_path, "grpo@2", None, seed, [two_updates(0.2)], final)
    before = {"greedy": 0.1, "mean@4": 0.1, "pass@4": 0.3}
    (tmp_path / "start.json").write_text(json.dumps(before))
    rows = rows_of(run_metrics.table(*run_metrics.load(tmp_path)))
    assert rows["before RL"]["held-out mean@4"] == "0.100"
    assert rows["grpo@2"]["held-out pass@4"] == "0.300 ± 0.000"


# ---------------------------------------------------------------- packed copies
def test_a_packed_copy_gives_the_same_table_and_the_same_bytes_twice(folder, tmp_path):
    run_metrics.pack(folder, tmp_path / "a", {"clip_fraction_low": 3})
    run_metrics.pack(folder, tmp_path / "b", {"clip_fraction_low": 3})
    for name in ("runs.json", "metrics.csv.xz"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    loaded = run_metrics.load(folder)
    packed = run_metrics.load(tmp_path / "a")
    assert run_metrics.table(*packed) == run_metrics.table(*loaded)
    arms, starts = packed
    for arm, runs in loaded[0].items():
        assert [run.config for run in runs] == [run.config for run in arms[arm]]
        assert [run.final for run in runs] == [run.final for run in arms[arm]]
    assert starts == loaded[1]


def test_what_is_the_same_for_a_step_is_packed_once_and_missing_columns_stay_missing(
    folder, tmp_path
):
    run_metrics.pack(folder, tmp_path, {"clip_fraction_low": 3})
    first, second = run_metrics.load(tmp_path)[0]["grpo@2"][0].lines[:2]
    assert first["reward"] == 0.1
    assert "reward" not in second
    assert second["clip_fraction_low"] == 0.02
    assert "length_wrong" not in first
    assert "clip_fraction_high" not in first


def test_packing_rounds_to_significant_digits(tmp_path):
    line = {"reward": 0.123456789, "kl": 0.00123456, "grad_norm": 1234.567}
    run = write_run(tmp_path / "runs", "grpo@1", 1, 0, [[line]])
    run_metrics.pack(run.parent, tmp_path / "packed")
    (packed,) = run_metrics.load(tmp_path / "packed")[0]["grpo@1"][0].lines
    assert packed["reward"] == 0.12346
    assert packed["kl"] == 0.00123
    assert packed["grad_norm"] == 1235


# ---------------------------------------------------------------- what is refused
@pytest.mark.parametrize("content", ['{"step": 1, "upd\n', "null and void\n", "\0" * 50 + "\n"])
def test_a_damaged_line_is_refused_by_file_and_line(folder, content):
    path = folder / "grpo@2-start1-seed1" / "metrics.jsonl"
    lines = path.read_text().splitlines(True)
    path.write_text("".join(lines[:3]) + content + "".join(lines[3:]))
    with pytest.raises(ValueError, match=re.escape(str(path)) + ".*line 4"):
        run_metrics.load(folder)


def test_an_unfinished_last_line_is_left_out_of_a_running_run_only(folder):
    path = folder / "grpo@2-start1-seed1" / "metrics.jsonl"
    with open(path, "a") as file:
        file.write('{"step": 31, "rew')
    with pytest.raises(ValueError, match=re.escape(str(path)) + ".*line 61"):
        run_metrics.load(folder)
    path.with_name("final.json").unlink()
    arms, _ = run_metrics.load(folder)
    assert [len(run.lines) for run in arms["grpo@2"]] == [60, 60, 60]
    path.write_text('{"step": 1, "rew')  # nothing is finished yet
    arms, _ = run_metrics.load(folder)
    assert [len(run.lines) for run in arms["grpo@2"]] == [60, 60]


@pytest.mark.parametrize("duplicate", [True, False])
def test_updates_that_are_missing_or_there_twice_are_refused(folder, duplicate):
    path = folder / "bapo@2-start1-seed0" / "metrics.jsonl"
    lines = path.read_text().splitlines(True)
    rest = lines[4:] if duplicate else lines[6:]
    path.write_text("".join(lines[:5] + rest))
    with pytest.raises(ValueError, match=re.escape(str(path))):
        run_metrics.load(folder)


def test_a_damaged_packed_copy_is_refused_by_file_and_line(folder, tmp_path):
    run_metrics.pack(folder, tmp_path)
    path = tmp_path / "metrics.csv.xz"
    whole = path.read_bytes()
    path.write_bytes(whole[:-20])
    with pytest.raises(ValueError, match=re.escape(str(path))):
        run_metrics.load(tmp_path)
    lines = lzma.decompress(whole).decode().splitlines(True)
    cut = "grpo@2-start1-seed0,1,1,0.5\n"
    no_number = lines[4].replace("0.9", "x")
    no_run = lines[4].replace("grpo", "oprg")
    for damaged in (cut, no_number, no_run):
        text = "".join([*lines[:4], damaged, *lines[5:]])
        path.write_bytes(lzma.compress(text.encode()))
        with pytest.raises(ValueError, match=re.escape(str(path)) + ", line 5"):
            run_metrics.load(tmp_path)


@pytest.mark.parametrize(
    "setting",
    [{"max_new_tokens": 80}, {"learning_rate": 1e-4}, {"temperature": 0.9}, {"steps": 40}],
)
def test_runs_that_differ_in_more_than_the_arm_do_not_share_a_table(folder, setting):
    line = [[{"reward": 0.5}]]
    own = {"epochs": 4, "parts": 2, "objective": "cispo"}
    write_run(folder, "grpo@4", 1, 0, line, **own)
    run_metrics.load(folder)
    write_run(folder, "grpo@1", 1, 0, line, **setting)
    with pytest.raises(ValueError, match=f"grpo@1-start1-seed0 differ .*{next(iter(setting))}"):
        run_metrics.load(folder)


def test_an_empty_folder_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no metrics"):
        run_metrics.load(tmp_path)
