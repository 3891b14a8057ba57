"""results/scripts: packed runs equal the runs, the statistics, and the tables of the pages."""

import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from conftest import write_run

from results.scripts import figures, outcomes, pack, tables
from support import files, plot

ROOT = Path(__file__).parent.parent


# ---------------------------------------------------------------- packs
def test_packed_runs_are_read_as_they_were(made_up_runs, tmp_path):
    """A run that goes on is refused. The second pack has a run's new version, and keeps a run that
    is gone.
    """
    packed = tmp_path / "results/made-up"
    for seed in (1, 2):
        files.write_json(made_up_runs / f"cispo@2-seed{seed}/final.json", {"mean@16": 0.1})
    with pytest.raises(ValueError, match=r"not ended: \[\('bapo@2', 1\)\]"):
        pack.pack(made_up_runs, packed, "c0ffee", {})
    (made_up_runs / "bapo@2-seed1/metrics.jsonl").unlink()
    pack.pack(made_up_runs, packed, "c0ffee", {"cispo@2": "renamed@2"})
    write_run(made_up_runs, "grpo@2-seed1", {"reward": 0.7}, norm=9.0)
    expected = plot.table(plot.load(made_up_runs)).replace("cispo@2", "renamed@2")
    (made_up_runs / "cispo@2-seed1/metrics.jsonl").unlink()
    pack.pack(made_up_runs, packed, "c0ffee", {"cispo@2": "renamed@2"})
    rows = plot.table(plot.load(packed)).splitlines()
    assert sorted(rows) == sorted(expected.splitlines())
    assert len(files.read_json(packed / "runs.json")["blocks"]) == 1


# ---------------------------------------------------------------- statistics
def sweep_of(**columns) -> pd.DataFrame:
    """One outcome, mean@16, of methods by seed; the first seed is 1, and the last stands first."""
    wide = pd.DataFrame(columns).rename_axis(index="seed", columns="method")
    wide.index += 1
    return wide[::-1].stack().swaplevel().to_frame("mean@16")


def claims(*changes: dict) -> pd.DataFrame:
    """Rows of tests.csv that compare b with a in mean@16."""
    row = {"family": "1", "seeds": "1-3", "sweep": "made-up", "others_sweep": "", "methods": "b"}
    row |= {"others": "a", "outcome": "mean@16", "expected": "above 0"}
    return pd.DataFrame([row | change for change in changes])


def test_differences_are_paired_by_seed():
    """The fourth seed has no run of a, and a test with it is refused."""
    sweep = sweep_of(b=[0.5, 0.7, 0.9, 0.1], a=[0.4, 0.5, 0.9, np.nan], c=[0.2, 0.1, 0.7, 0.3])
    sweeps = {"made-up": sweep, "other": sweep.sort_index()}
    rows = claims({}, {"methods": "a", "others": "b c", "others_sweep": "other"}, {"seeds": "1-4"})
    pair, means, missing = rows.itertuples()
    assert tables.differences(pair, sweeps).to_list() == pytest.approx([0.1, 0.2, 0])
    assert tables.differences(means, sweeps).to_list() == pytest.approx([0.05, 0.1, 0.1])
    with pytest.raises(KeyError):
        tables.differences(missing, sweeps)


def test_every_family_has_a_correction_of_its_own_and_a_dagger_none():
    sweeps = {"made-up": sweep_of(a=[0.0] * 3, b=[0.01, 0.02, 0.02], c=[0.1, 0.1, 0.11])}
    rows = {}, {"methods": "c"}, {"family": "2"}, {"family": "2"}, {"family": "†"}, {"family": "†"}
    tests = tables.tested(claims(*rows), sweeps)
    p = 1 - 5 / 27**0.5  # Student's, of t = 5 with two degrees of freedom
    of_c = tests["p"][1]
    assert tests["corrected"].to_list() == pytest.approx([p, 2 * of_c, 2 * p, 2 * p, p, p])


@pytest.mark.parametrize(
    "corrected, expected, said",
    [
        (0.2, "above 0", "not significant after correction"),
        (0.01, "above 0", "opposite direction"),
        (0.01, "–", "lower"),
        (0.01, "half: below 0", "more than half"),
        (0.01, "half: above 0", "less than half"),
    ],
)
def test_what_is_said_of_a_difference_below_0(corrected, expected, said):
    test = SimpleNamespace(mean=-0.1, p=0.01, corrected=corrected)
    assert tables.verdict(test, expected) == said


def test_the_whole_interval_must_lie_within_the_margin():
    """At 90 % it is -0.0039 to 0.0039, at 95 % -0.0048 to 0.0048."""
    sweeps = {"made-up": sweep_of(a=[0.501] * 12, b=[0.5, 0.51, 0.49, 0.504] * 3)}
    common = {"seeds": "1-12", "if_within": "equivalent"}
    rows = []
    for least, most in [(-0.0042, 0.0042), (-0.0037, 0.05), (-0.05, 0.0037)]:
        rows.append(common | {"least": least, "most": most, "confidence": 0.9})
    table = tables.intervals_table(claims(*rows, rows[0] | {"confidence": 0.95}), sweeps)
    assert table["verdict"].to_list() == ["equivalent", "not shown", "not shown", "not shown"]


def test_changes_within_batches_are_compared_by_seed():
    """The seeds differ far more than the methods."""
    sweep = sweep_of(**{"grpo@8": [-0.1, -0.3, -0.5], "0.6-1.2@8": [-0.11, -0.32, -0.53]})
    sweep.columns = ["within a batch"]
    sweeps = dict.fromkeys(["smollm2", "smollm2-gpu", "fixed", "scope", "bounds"], sweep)
    table = tables.within_batches_table(sweeps)
    assert table.loc[1, "− grpo@8"] == "-0.0200 ± 0.0248"
    assert table.loc[1, "below 0"] == "3/3"


def test_outcomes_of_large_steps():
    run = {"step": [1, 2, 3, 4], "reward": [1.0, 0.9, 0.2, 0.7], "entropy": [3.0, 3.5, 3.5, 2.5]}
    run["truncated"] = [0.0, 0.0, 0.0, 1.0]
    index = pd.MultiIndex.from_tuples([("grpo@8", 1)] * 4, names=plot.RUN)
    records = plot.Records(pd.DataFrame(run, index), pd.DataFrame({"mean@4": [0.7]}, index[:1]))
    (numbers,) = outcomes.large_step_outcomes(records).to_dict("records")
    expected = [0.6, 0.5, 0.7, 0.7, 0.25]  # the first is a mean without step 1
    assert list(numbers.values()) == pytest.approx(expected)


# ---------------------------------------------------------------- what is packed, and the pages
@pytest.fixture(scope="module")
def packs():
    return outcomes.read_packs()


def test_what_lowers_entropy_is_drawn_to_the_left(packs):
    """The toy's panels: classes, predictions and measurements."""
    *_, classes, predicted, measured = figures.mechanism(outcomes.read_sweeps(packs)).axes
    assert classes.patches[1].get_width() == pytest.approx(-0.009, abs=1e-3)  # A < 0, 0.6 to 0.8
    assert classes.patches[3].get_width() == pytest.approx(0.012, abs=1e-3)  # A < 0, r ≥ 0.9
    assert predicted.patches[0].get_width() == pytest.approx(-0.013, abs=1e-3)
    assert measured.patches[0].get_width() == pytest.approx(-0.0091, abs=1e-4)


def test_tables_md_is_what_the_script_prints(packs):
    printed = tables.page(packs)
    assert (ROOT / "results/tables.md").read_text() == printed, (
        "run python -m results.scripts.tables"
    )


@pytest.mark.parametrize("page", ["README.md", "results/README.md"])
def test_tables_of_results_stand_on_the_pages_as_they_were_printed(page):
    """A table with ± is one of results/tables.md, all its lines."""
    printed = (ROOT / "results/tables.md").read_text().replace("|  |", "| |")
    for table in re.findall(r"(?:^\|.*\n)+", (ROOT / page).read_text(), re.MULTILINE):
        if "±" in table:
            assert table.replace("|  |", "| |") in printed, "copy it from results/tables.md"
