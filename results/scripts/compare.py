"""Compare the tables of results/study.py with those of results/scripts/tables.py, cell by cell.

    python -m results.scripts.compare

Needed once, like study_data.py. Every number and verdict of the tables that stay is compared.
"""

import re

from scipy import stats

from results import study
from results.scripts import outcomes, tables

NAMES = {"sweep": "folder", "others_sweep": "others_folder"}
VERDICTS = {
    "same direction": "✓",
    "more than half": "✓",
    "opposite direction": "✗",
    "less than half": "✗",
    "higher": "*",
    "lower": "*",
}


def full(claim) -> tuple:
    """Return what names a comparison in comparisons.csv."""
    others_folder = claim.others_sweep or claim.sweep
    methods = " ".join(f"{claim.sweep}/{name}" for name in claim.methods.split())
    others = " ".join(f"{others_folder}/{name}" for name in claim.others.split())
    return claim.seeds, methods, others, claim.outcome


def main() -> None:
    sweeps = outcomes.read_sweeps(outcomes.read_packs())
    new = study.read_comparisons()
    cells = {}
    for one in new.itertuples():
        key = (one.seeds, one.methods, one.others, one.outcome)
        cells.setdefault(key, []).append((one, study.cell(one)))
    compared = 0

    tests = tables.tested(tables.read_claims("tests"), sweeps)
    for test in tests.itertuples():
        verdict = tables.verdict(test, test.expected)
        mark = VERDICTS.get(verdict, "")
        expected = f"{test.difference} ({test.corrected:.2g}) {mark}".strip()
        found = [cell for one, cell in cells[full(test)] if one.family]
        in_figures = [one.table == "The paper's figures" for one, _ in cells[full(test)]]
        if test.family == "†" and not found:  # in the table of figures alone
            assert any(in_figures), test
            found = [cell for one, cell in cells[full(test)] if one.expected]
            expected = test.difference
            found = [re.sub(" [✓✗]$", "", cell) for cell in found]
        assert found == [expected], (found, expected)
        compared += 1
    print(f"{compared} tests: difference, p and verdict are the same")

    compared = 0
    for claim in tables.read_claims("intervals").itertuples():
        values = tables.differences(claim, sweeps)
        test = stats.ttest_1samp(values, 0)
        low, high = test.confidence_interval(float(claim.confidence))
        mean = (low + high) / 2
        expected = f"{mean:+.3f} ± {high - mean:.3f}"
        rows = [(one, cell) for one, cell in cells[full(claim)] if one.table.endswith("intervals")]
        ((one, cell),) = rows
        assert cell == expected, (cell, expected)
        band = re.findall(r"[\d.]+", one.row.rpartition("within ")[2])
        assert float(band[-1]) == float(claim.most), one.row
        compared += 1
    print(f"{compared} intervals are the same")

    compared = 0
    for name, claims in tables.read_claims("pages").groupby("table", sort=False):
        old = tables.page_table(claims, sweeps)
        if name == "The front page's table":
            assert study.plot.markdown(old) == study.tables()[name], name
            for claim in claims.itertuples():
                digits = old.set_index("").loc[claim.row, claim.column]
                front = [
                    c for one, c in cells[full(claim)] if one.table.startswith("The front page:")
                ]
                assert front == [digits], (claim, front)
                compared += 1
            continue
        assert study.plot.markdown(old) == study.tables()[name], name
        compared += old.size
    print(f"{compared} cells of the pages' tables are the same")

    compared = 0
    paper = tables.read_claims("paper")
    old = tables.figures_table(paper, tests, sweeps)
    rows = new[new["table"] == "The paper's figures"].groupby("row", sort=False)
    for (_, claim), (row, parts) in zip(old.iterrows(), rows, strict=True):
        printed = {one.column: study.cell(one) for one in parts.itertuples()}
        assert row.startswith(f"{claim.figure}: {claim.quantity} ({claim.paper})"), row
        if "difference" in printed:
            difference, _, verdict = claim.difference.partition(", ")
            dagger = verdict.endswith("†")
            assert dagger == row.endswith("†"), row
            mark = VERDICTS.get(verdict.removesuffix(" †"), "")
            cell = re.sub(r" \(.*\)", "", printed["difference"])
            assert cell == f"{difference} {mark}".strip(), (cell, claim.difference)
            assert f"{printed['from']} → {printed['to']}" == claim.here, claim
        else:
            level = float(claim.here.split()[0])
            assert abs(float(printed["to"]) - level) <= 0.0051, claim
        compared += 1
    print(f"{compared} rows of the paper's figures are the same")


if __name__ == "__main__":
    main()
