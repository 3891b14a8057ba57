"""results/scripts: packed runs equal the runs, the statistics, and the tables of the pages."""

import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from conftest import write_run

from results.scripts import figures, outcomes, pack, tables
from support import plot, runs

ROOT = Path(__file__).parent.parent


# ---------------------------------------------------------------- packs
def test_packed_runs_are_read_as_they_were(made_up_runs, tmp_path):
    """A run that goes on is refused. The second pack has a run's new version, and keeps a run that
    is gone.
    """
    packed = tmp_path / "results/made-up"
    for seed in (1, 2):
        runs.write_json(made_up_runs / f"cispo@2-seed{seed}/final.json", {"mean@16": 0.1})
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
    assert len(runs.read_json(packed / "runs.json")["blocks"]) == 1


# ---------------------------------------------------------------- statistics
def test_a_comparison_with_a_missing_run_is_refused():
    """The third seed has no run of a."""
    columns = {"a": [0.4, 0.5, np.nan], "b": [0.5, 0.7, 0.9], "c": [0.2, 0.1, 0.7]}
    wide = pd.DataFrame(columns, [1, 2, 3]).rename_axis(index="seed", columns="method")
    sweep = wide.stack().swaplevel().to_frame("mean@16")
    claim = SimpleNamespace(outcome="mean@16", seeds="1-3")
    with pytest.raises(KeyError):
        tables.of_seeds(claim, sweep, "a c")


def test_holm_multiplies_by_the_tests_that_are_left():
    corrected = tables.holm(pd.Series([0.03, 0.01, 0.04, 0.6]))
    assert corrected.sort_index().to_list() == pytest.approx([0.09, 0.04, 0.09, 0.6])


def test_outcomes_of_large_steps():
    run = {"step": [1, 2, 3, 4], "reward": [1.0, 0.9, 0.2, 0.7], "entropy": [3.0, 3.5, 3.5, 2.5]}
    run |= {"truncated": [0.0, 0.0, 0.0, 1.0], "update": 1}
    run |= dict.fromkeys(["entropy_now", "kl", "rho_start", "low", "high"], 0.0)  # not looked at
    index = pd.MultiIndex.from_tuples([("grpo@8", 1)] * 4, names=plot.RUN)
    records = plot.Records(pd.DataFrame(run, index), pd.DataFrame({"mean@4": [0.7]}, index[:1]))
    (numbers,) = outcomes.large_step_outcomes(records).to_dict("records")
    expected = [0.6, 0.5, 0.7, 0.7, 0.25]  # the first is a mean without step 1
    assert list(numbers.values())[: len(expected)] == pytest.approx(expected)


# ---------------------------------------------------------------- what is packed, and the pages
@pytest.fixture(scope="module")
def packs():
    return outcomes.read_packs()


def test_what_lowers_entropy_is_drawn_to_the_left(packs):
    """The toy's panels: classes, predictions and measurements."""
    *_, classes, predicted, measured = figures.mechanism(outcomes.read_sweeps(packs)).axes
    assert classes.patches[1].get_width() == pytest.approx(-0.009, abs=1e-3)  # A < 0, 0.6 to 0.8
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
