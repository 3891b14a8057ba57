"""experiments/: what is packed is what was there, the statistics, and that the pages show them."""

import re
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from scipy import stats

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "experiments"))

import pack
import plot
import tables
import runs
import train


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
    return pd.DataFrame(columns).stack().swaplevel().to_frame("mean@16")


def test_differences_are_paired_by_seed():
    sweep = sweep_of(a=[0.5, 0.7, 0.9, 0.1], b=[0.4, 0.5, 0.9, np.nan], c=[0.2, 0.1, 0.7, 0.3])
    differences = tables.gaps(sweep, "a", "b")["mean@16"]
    assert differences.dropna().to_list() == pytest.approx([0.1, 0.2, 0])
    # the same as scipy's paired test
    low, high = stats.ttest_rel([0.5, 0.7, 0.9], [0.4, 0.5, 0.9]).confidence_interval()
    assert tables.shown(differences) == f"+0.100 ± {(high - low) / 2:.3f}"
    effect = tables.gaps(sweep, "a c", "b")["mean@16"].dropna()
    assert effect.to_list() == pytest.approx([-0.05, -0.1, -0.1])


def test_bold_is_what_excludes_zero():
    assert tables.shown(pd.Series([0.1, 0.11, 0.12])).startswith("**+0.110")
    assert tables.shown(pd.Series([-0.1, 0.0, 0.11])).startswith("+0.003")


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


def test_runs_collapse_below_their_own_start():
    assert tables.collapsed(pd.Series([-0.06, -0.04, 0.2])) == "1 of 3"


def test_equivalence_asks_for_the_whole_interval(monkeypatch):
    monkeypatch.setattr(tables, "EQUIVALENT", {"default": ("bapo@8", "0.9-2.0@8")})
    fixed = {"0.9-2.0@8": [0.5, 0.5, 0.5, 0.5]}
    near = sweep_of(**fixed | {"bapo@8": [0.501, 0.499, 0.5, 0.502]})["mean@16"]
    far = sweep_of(**fixed | {"bapo@8": [0.6, 0.4, 0.5, 0.5]})["mean@16"]
    sweep = pd.DataFrame({"entropy": near, "norm": far, "mean@16": near, "pass@8": near})
    table = tables.equivalence_table({"default": sweep})
    assert table["equivalent"].to_list() == ["yes", "not shown", "yes", "yes"]


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
