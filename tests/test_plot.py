"""plot.py: means, spreads and the packed copy, from metrics written by hand."""

import json
import math

import numpy as np
import pytest

import plot


def write_run(folder, arm, seed, rewards, final=None, rho0=0.0):
    """Two updates per step; gradient norms 1 and 3, rho seed-dependent."""
    run = folder / f"{arm}-seed{seed}"
    run.mkdir(parents=True)
    config = {"seed": seed, "updates_per_batch": 2, "search": {"rho0": rho0}}
    (run / "config.json").write_text(json.dumps({"config": config}))
    lines = []
    for step, reward in enumerate(rewards, 1):
        for update in (1, 2):
            line = {"step": step, "update": update, "reward": reward, "entropy": 0.5, "rho": 0.4 + 0.1 * seed, "low": 0.8}
            line |= {"high": 1.2 + update, "grad_norm": 2.0 * update - 1, "clip_fraction_high": 0.01, "clip_fraction_low": 0.02}
            lines.append(line)
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 99, "rew')
    if final:
        (run / "final.json").write_text(json.dumps(final))


@pytest.fixture
def folder(tmp_path):
    write_run(tmp_path, "grpo@2", 0, [0.1] * 20 + [0.5] * 10, {"greedy": 0.25})
    write_run(tmp_path, "grpo@2", 1, [0.1] * 20 + [0.7] * 12, {"greedy": 0.75})
    write_run(tmp_path, "bapo@2", 0, [0.3] * 30, {"greedy": 0.5}, rho0=0.4)
    (tmp_path / "warm-start.json").write_text(json.dumps({"greedy": 0.125}))
    return tmp_path


def test_the_table_is_means_and_sample_deviations_over_seeds(folder):
    header, _, start, grpo, bapo = ([cell.strip() for cell in line.split("|")[1:-1]] for line in plot.report(folder))
    row = dict(zip(header, grpo))
    assert (row["arm"], row["seeds"]) == ("grpo@2", "2")
    assert row["reward at end"] == f"0.600 ± {0.2 / math.sqrt(2):.3f}"  # steps 21-30 of both, a sample deviation
    assert row["max grad norm"] == "3.000 ± 0.000" and row["clipped"] == "0.030 ± 0.000"
    assert row["rho, mean"] == f"0.450 ± {0.1 / math.sqrt(2):.3f}" and row["mean low / high"] == "0.80 / 2.70"
    assert row["held-out greedy"] == f"0.500 ± {0.5 / math.sqrt(2):.3f}"
    assert dict(zip(header, bapo))["reward at end"] == "0.300" and start[-1] == "0.125"
    assert (folder / "table.md").exists() and (folder / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_a_packed_copy_gives_the_same_table_and_the_same_bytes_twice(folder, tmp_path_factory):
    target = tmp_path_factory.mktemp("results")
    tokens = {"step": 7, "sign": [1.0, -1.0], "ratio": [0.5, 1.5]}
    (folder / "bapo@2-seed0/tokens.jsonl").write_text(json.dumps(tokens) + "\n")
    plot.pack(folder, target)
    assert plot.read_csv(target / "tokens.csv.gz") == [
        {"run": "bapo@2-seed0", "step": 7, "sign": 1, "ratio": 0.5}, {"run": "bapo@2-seed0", "step": 7, "sign": -1, "ratio": 1.5}
    ]  # fmt: skip
    before = (target / "metrics.csv.gz").read_bytes()
    assert plot.report(target) == plot.report(folder)
    plot.pack(folder, target)
    assert (target / "metrics.csv.gz").read_bytes() == before


def test_a_step_is_reduced_over_its_updates_and_missing_values_stay_missing():
    lines = [{"step": 1, "x": 1.0}, {"step": 1, "x": 3.0}, {"step": 2, "x": None}, {"step": 3}]
    run = plot.RunMetrics("a", 0, {}, None, lines)
    np.testing.assert_array_equal(run.per_step("x"), [2.0, math.nan, math.nan])
    np.testing.assert_array_equal(run.per_step("x", np.max), [3.0, math.nan, math.nan])


def test_an_empty_folder_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no metrics"):
        plot.report(tmp_path)


def test_numbers_are_written_as_json_can_hold_them():
    assert plot.to_json_number(0.123456789) == 0.123457
    assert plot.to_json_number(math.nan) is None and plot.to_json_number(math.inf) is None
