"""experiments/: what is packed is what was there, the statistics, and that the pages show them."""

import re
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from conftest import write_lines
from scipy import stats

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "experiments"))

import pack
import plot
import runs
import tables
import train
import yoked
from bapo import ClipSearch


def test_packed_runs_are_read_as_they_were(made_up_runs, tmp_path):
    command = ["--methods", "grpo@2", "--seeds", "1", "2", "--learning_rate", "1e-4"]
    options = runs.parse(train.Options, [*command, "--output_dir", str(made_up_runs)], "")
    runs.write_json(made_up_runs / "config.json", vars(options))
    for path in (made_up_runs / "bapo@2-seed1").iterdir():
        path.unlink()
    for seed in (1, 2):
        final = (made_up_runs / f"grpo@2-seed{seed}/final.json").read_text()
        (made_up_runs / f"cispo@2-seed{seed}/final.json").write_text(final)
    packed = tmp_path / "results/made-up"
    pack.pack(made_up_runs, packed, "c0ffee")
    before = plot.outcomes(plot.load(made_up_runs))
    pd.testing.assert_frame_equal(
        plot.outcomes(plot.load(packed)), before, rtol=1e-3, check_names=False
    )
    (kept,) = runs.read_json(packed / "runs.json")["blocks"]
    words = "python train.py --methods grpo@2 --seeds 1 2 --learning_rate 0.0001"
    assert kept["command"] == f"{words} --output_dir runs/made-up"
    assert kept["commit"] == "c0ffee"
    written = [path.read_bytes() for path in sorted(packed.iterdir())]
    pack.pack(made_up_runs, packed, "c0ffee")  # into what was read back
    assert [path.read_bytes() for path in sorted(packed.iterdir())] == written


def test_runs_that_go_on_are_not_packed(made_up_runs, tmp_path):
    with pytest.raises(ValueError, match="cispo@2"):
        pack.pack(made_up_runs, tmp_path / "results/made-up", "c0ffee")


def test_holm_s_correction():
    # Sorted .01, .02, .03: times 3, 2, 1 gives .03, .04, .03, and none may be below the one before.
    corrected = tables.holm(pd.Series([0.03, 0.01, 0.02]))
    assert corrected.sort_index().to_list() == pytest.approx([0.04, 0.03, 0.04])
    assert tables.holm(pd.Series([0.9, 0.8])).to_list() == pytest.approx([1, 1])


def sweep_of(**columns) -> pd.DataFrame:
    """One outcome, mean@16, of methods by seed."""
    wide = pd.DataFrame(columns).rename_axis(index="seed", columns="method")
    return wide.stack().swaplevel().to_frame("mean@16")


def test_differences_are_paired_by_seed():
    sweep = sweep_of(a=[0.5, 0.7, 0.9, 0.1], b=[0.4, 0.5, 0.9, np.nan], c=[0.2, 0.1, 0.7, 0.3])
    differences = tables.gaps(sweep, "a", "b")["mean@16"]
    assert differences.dropna().to_list() == pytest.approx([0.1, 0.2, 0])
    # the same as scipy's paired test
    low, high = stats.ttest_rel([0.5, 0.7, 0.9], [0.4, 0.5, 0.9]).confidence_interval()
    assert tables.shown(differences, bold=False) == f"+0.100 ± {(high - low) / 2:.3f}"
    effect = tables.gaps(sweep, "a c", "b")["mean@16"].dropna()
    assert effect.to_list() == pytest.approx([-0.05, -0.1, -0.1])


def claim(**columns) -> pd.DataFrame:
    """A row of named.csv that compares b with a in mean@16."""
    row = {"family": "1", "sweep": "made-up", "outcome": "mean@16", "expected": "above 0"}
    return pd.DataFrame([row | {"methods": "b", "others": "a"} | columns])


def test_bold_is_what_the_correction_resolves_and_no_choosing_seed_is_tested():
    sweep = sweep_of(a=[0.0] * 5, b=[0.8, 0.01, 0.02, 0.02, 0.03])
    sweep = sweep.rename(index={0: 121, 1: 126, 2: 127, 3: 128, 4: 129}, level="seed")
    sweeps = {"made-up": sweep, "default": sweep}
    alone = tables.tested(claim(), sweeps).iloc[0]
    assert alone["seeds"] == 4
    assert alone["here"] == "**+0.020 ± 0.013**"
    assert 0.01 < alone["p"] < 0.02
    # Of five tests of which four are not run yet the correction is that for five.
    five = pd.concat([claim(), *[claim(methods="c")] * 4], ignore_index=True)
    tests = tables.tested(five, sweeps)
    assert tests["here"].to_list() == ["+0.020 ± 0.013", *["not run yet"] * 4]
    assert tests["verdict"].to_list() == ["not resolved", *["–"] * 4]


def test_the_chosen_rate_is_the_best_one_and_of_a_tie_the_lower():
    rows = []
    for rate, accuracies in ((0.5, (0.25, 0.25)), (1.0, (0.125, 0.375)), (2.0, (0.5, 0.0))):
        for seed, accuracy in enumerate(accuracies, 121):
            rows.append(("grpo@8", seed, rate, accuracy))
    choosing = pd.DataFrame(rows, columns=["method", "seed", "rate", "mean@16"])
    choosing = choosing.set_index(["method", "seed"])
    assert tables.chosen_rates(choosing).to_dict() == {"grpo@8": 0.5}
    table = tables.chosen_table(choosing)
    assert table.iloc[0].to_list() == ["grpo@8", 0.5, "yes", 2]


@pytest.mark.parametrize(
    "mean, p, expected, said",
    [
        (0.1, 0.2, "above 0", "not resolved"),
        (0.1, 0.01, "above 0", "as expected"),
        (-0.1, 0.01, "above 0", "the reverse"),
        (-0.1, 0.01, "below 0", "as expected"),
        (-0.1, 0.01, "–", "below 0"),
    ],
)
def test_verdicts(mean, p, expected, said):
    assert tables.verdict(mean, p, expected) == said


def test_runs_end_below_their_own_start_by_a_margin_or_not():
    gains = pd.Series([-0.06, -0.04, 0.0, 0.2])
    assert tables.below(gains) == "2 of 4"
    assert tables.below(gains, 0.05) == "1 of 4"


def test_equivalence_asks_for_the_whole_interval():
    fixed = {"0.9-2.0@8": [0.5] * 4, "grpo@8": [0.4] * 4}
    near = sweep_of(**fixed | {"bapo@8": [0.501, 0.499, 0.5, 0.502]})["mean@16"]
    far = sweep_of(**fixed | {"bapo@8": [0.6, 0.4, 0.5, 0.5]})["mean@16"]
    sweep = pd.DataFrame({"norm": far, "mean@16": near})
    rows = []
    for outcome in sweep:
        row = {"sweep": "default", "outcome": outcome, "margin": 0.03, "effect_in": "default"}
        rows.append(row | {"methods": "bapo@8", "others": "0.9-2.0@8"})
    table = tables.equivalence_table(pd.DataFrame(rows), {"default": sweep})
    assert table["equivalent"].to_list() == ["not shown", "yes"]
    assert table["margin / effect"].to_list() == ["30%", "30%"]


def test_tables_md_is_what_the_script_prints():
    printed = tables.page(ROOT / "results") + "\n"
    assert (ROOT / "results/tables.md").read_text() == printed, "run experiments/tables.py"


@pytest.mark.parametrize("page", ["README.md", "results/README.md"])
def test_tables_of_results_stand_on_the_pages_as_they_were_printed(page):
    """A table with an interval or a percentage is one of results/tables.md, all its lines."""
    printed = (ROOT / "results/tables.md").read_text()
    for table in re.findall(r"(?:^\|.*\n)+", (ROOT / page).read_text(), re.MULTILINE):
        if re.search("±|%", table):
            assert table in printed, "copy it from results/tables.md"


def test_a_run_that_is_yoked_to_itself_is_that_run(train_here, tmp_path, monkeypatch):
    """Also if it ends after a step and goes on; no line of it has a search's share."""
    monkeypatch.setattr(train, "FIRST_STEPS", 2)
    lines = train_here(methods="bapo@8")
    assert len({line["low"] + line["high"] for line in lines}) > 3
    config = runs.read_json(tmp_path / "runs/config.json")
    arguments = []
    for name in ("learning_rate", "prompts_per_step", "group_size", "max_new_tokens"):
        arguments += [f"--{name}", str(config[name])]
    arguments += ["--warm_start_steps", "1", "--output_dir", str(tmp_path / "runs"), "--jobs", "1"]
    for steps in ("1", "3"):
        assert yoked.main([*arguments, "--seeds", "0", "--steps", steps]) == 0
    for line, same in zip(lines, runs.read_lines(tmp_path / "runs/yoked@8-seed0/metrics.jsonl")):
        for name in ("rho", "rho_start", "reached"):  # of a search
            del line[name]
        assert line == same


def test_a_yoked_run_takes_the_bounds_of_the_same_place_or_the_last_before(tmp_path):
    donor = tmp_path / "donor"
    lines = []
    for step, update, low in [(1, 1, 0.6), (1, 2, 0.7), (2, 0, None), (3, 1, 0.8), (3, 2, 0.9)]:
        lines.append({"step": step, "update": update, "low": low, "high": 1.2})
    write_lines(donor / "metrics.jsonl", lines)
    loss = yoked.yoked_loss(ClipSearch(), donor, tmp_path)
    ones = torch.ones(1, 1)

    def lows(updates: int) -> list[float]:
        found = [loss(ones, ones, ones[0], ones, weights=ones)[1]["low"] for _ in range(updates)]
        return [round(low.item(), 6) for low in found]

    assert lows(3) == [0.6, 0.7, 0.7]
    runs.append_line(tmp_path / "timings.jsonl", {"step": 1})
    assert lows(1) == [0.7]
    runs.append_line(tmp_path / "timings.jsonl", {"step": 2})
    assert lows(2) == [0.8, 0.9]
