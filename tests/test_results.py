"""results/study.py: the statistics, and the tables that stand on the pages."""

import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

pd = pytest.importorskip("pandas")
study = pytest.importorskip("results.study")  # needs matplotlib and scipy, too

RESULTS = Path(__file__).parent.parent / "results"
PAGES = [RESULTS.parent / "README.md", RESULTS / "README.md", RESULTS / "tables.md"]


def test_a_comparison_with_a_missing_run_is_refused():
    """The third seed has no run of f/a."""
    columns = {"f/a": [0.4, 0.5, np.nan], "f/b": [0.5, 0.7, 0.9]}
    wide = pd.DataFrame(columns, [1, 2, 3]).rename_axis(index="seed", columns="name")
    runs = wide.stack(future_stack=True).to_frame("reward")
    one = SimpleNamespace(outcome="reward", seeds="1-2", methods="f/a", others="f/b")
    assert study.differences(one, runs).to_list() == pytest.approx([-0.1, -0.2])
    one.seeds = "1-3"
    with pytest.raises(KeyError):
        study.differences(one, runs)


def test_holm_multiplies_by_the_tests_that_are_left():
    corrected = study.holm(pd.Series([0.03, 0.01, 0.04, 0.6]))
    assert corrected.sort_index().to_list() == pytest.approx([0.09, 0.04, 0.09, 0.6])


def test_the_pages_hold_the_tables_that_the_script_prints():
    """Every printed table stands on a page, and every table with ± on a page is printed."""
    printed = study.tables().values()
    pages = "\n".join(path.read_text() for path in PAGES)
    missing = [table for table in printed if table not in pages]
    assert not missing, "copy what python -m results.study prints"
    for table in re.findall(r"(?:^\|.*\n)+", pages, re.MULTILINE):
        assert "±" not in table or table in printed, table
