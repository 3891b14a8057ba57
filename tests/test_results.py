"""results/study.py: the statistics, and the tables that stand on the pages."""

import re
from pathlib import Path

import pytest

pd = pytest.importorskip("pandas")
study = pytest.importorskip("results.study")  # needs matplotlib and scipy, too

RESULTS = Path(__file__).parent.parent / "results"
PAGES = [RESULTS.parent / "README.md", RESULTS / "README.md", RESULTS / "tables.md"]


def test_a_comparison_with_a_missing_run_is_refused(monkeypatch):
    """The first of runs.csv is missing."""
    read_csv = pd.read_csv
    monkeypatch.setattr(pd, "read_csv", lambda *path, **options: read_csv(*path, **options)[1:])
    with pytest.raises(KeyError):
        study.read_comparisons()


def test_the_pages_hold_the_tables_that_the_script_prints():
    """Every printed table stands on a page, and every table with ± on a page is printed."""
    printed = study.tables().values()
    pages = "\n".join(path.read_text() for path in PAGES)
    missing = [table for table in printed if table not in pages]
    assert not missing, "copy what python -m results.study prints"
    for table in re.findall(r"(?:^\|.*\n)+", pages, re.MULTILINE):
        assert "±" not in table or table in printed, table
