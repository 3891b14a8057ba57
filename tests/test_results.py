"""results/scripts: packed runs equal the runs, the statistics, and the tables of the pages."""

import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from conftest import write_lines

import train
from results.scripts import figures, outcomes, pack, tables
from support import files, plot

ROOT = Path(__file__).parent.parent


# ---------------------------------------------------------------- packs
def test_packed_runs_are_read_as_they_were(made_up_runs, tmp_path):
    """The second pack adds what is new, and keeps a run that is gone."""
    changed = {"methods": ["grpo@2"], "seeds": [1, 2], "learning_rate": 1e-4}
    files.write_json(made_up_runs / "config.json", vars(train.Options()) | changed)
    (made_up_runs / "bapo@2-seed1/metrics.jsonl").unlink()
    for seed in (1, 2):
        files.write_json(made_up_runs / f"cispo@2-seed{seed}/final.json", {"mean@16": 0.1})
    packed = tmp_path / "results/made-up"
    pack.pack(made_up_runs, packed, "c0ffee", {"cispo@2": "renamed@2"})
    before = plot.outcomes(plot.load(made_up_runs)).rename({"cispo@2": "renamed@2"})
    (made_up_runs / "cispo@2-seed1/metrics.jsonl").unlink()
    pack.pack(made_up_runs, packed, "c0ffee", {"cispo@2": "renamed@2"})
    after = plot.outcomes(plot.load(packed))
    pd.testing.assert_frame_equal(
        after.sort_index(), before.sort_index(), rtol=1e-3, check_names=False
    )
    (kept,) = files.read_json(packed / "runs.json")["blocks"]
    assert kept["command"].endswith("--methods grpo@2 --seeds 1 2 --learning_rate 0.0001")


def test_runs_that_go_on_or_were_continued_and_killed_are_not_packed(made_up_runs, tmp_path):
    (made_up_runs / "grpo@2-seed1/final.json").unlink()  # train.py removes it when it continues
    with pytest.raises(ValueError, match=r"\('cispo@2', 2\), \('grpo@2', 1\)\]"):
        pack.pack(made_up_runs, tmp_path / "results/made-up", "c0ffee", {})


# ---------------------------------------------------------------- statistics
def sweep_of(**columns) -> pd.DataFrame:
    """One outcome, mean@16, of methods by seed; the first seed is 1."""
    wide = pd.DataFrame(columns).rename_axis(index="seed", columns="method")
    wide.index += 1
    return wide.stack().swaplevel().to_frame("mean@16")


def claims(*changes: dict) -> pd.DataFrame:
    """Rows of tests.csv that compare b with a in mean@16."""
    row = {"family": "1", "seeds": "1-3", "sweep": "made-up", "others_sweep": "", "pairs": ""}
    row |= {"outcome": "mean@16", "expected": "above 0", "methods": "b", "others": "a"}
    return pd.DataFrame([row | change for change in changes])


def test_differences_are_paired_by_seed():
    sweep = sweep_of(b=[0.5, 0.7, 0.9, 0.1], a=[0.4, 0.5, 0.9, np.nan], c=[0.2, 0.1, 0.7, 0.3])
    sweeps = {"made-up": sweep, "other": sweep.sort_index(ascending=False) + 1}
    changes = {}, {"others_sweep": "other"}, {"methods": "a", "others": "b c"}
    expected = [0.1, 0.2, 0], [-0.9, -0.8, -1], [0.05, 0.1, 0.1]
    for claim, of_seeds in zip(claims(*changes).itertuples(), expected):
        assert tables.differences(claim, sweeps).to_list() == pytest.approx(of_seeds)
    (missing,) = claims({"seeds": "1-4"}).itertuples()
    with pytest.raises(KeyError):
        tables.differences(missing, sweeps)


def test_every_family_has_a_correction_of_its_own_and_a_dagger_none():
    sweeps = {"made-up": sweep_of(a=[0.0] * 3, b=[0.01, 0.02, 0.02], c=[0.1, 0.1, 0.11])}
    rows = {}, {"methods": "c"}, {"family": "2"}, {"family": "2"}, {"family": "†"}, {"family": "†"}
    tests = tables.tested(claims(*rows), sweeps)
    p = 1 - 5 / 27**0.5  # Student's, of t = 5 with two degrees of freedom
    of_c = tests["p"][1]
    assert tests["corrected"].to_list() == pytest.approx([p, 2 * of_c, 2 * p, 2 * p, p, p])
    table = tables.tests_table(tests)
    assert table["verdict"][1] == "as expected"
    assert table["verdict"][3] == "not significant after correction"


@pytest.mark.parametrize(
    "mean, p, expected, said",
    [
        (0.1, 0.2, "above 0", "not significant"),
        (-0.1, 0.01, "above 0", "opposite"),
        (-0.1, 0.01, "–", "lower"),
        (-0.1, 0.01, "half: below 0", "more than half"),
        (-0.1, 0.01, "half: above 0", "less than half"),
    ],
)
def test_verdicts(mean, p, expected, said):
    assert tables.verdict(mean, p, p, expected) == said


@pytest.mark.parametrize(
    "others, expected, said",
    [
        ("near", "-0.0042 to 0.0042", "equivalent"),  # 90 %: ±0.0039, 95 %: ±0.0048
        ("near", "-0.0037 to 0.05", "not shown"),
        ("near", "-0.05 to 0.0037", "not shown"),
        ("", "0.495 to 0.506", "the paper's level"),  # 90 %: 0.4971 to 0.5049
        ("", "0.4966 to 0.51", "not shown"),  # 95 %: 0.4962 to 0.5058
    ],
)
def test_the_whole_interval_must_lie_within_the_margin(others, expected, said):
    """90 % of a difference, 95 % of a level."""
    apart = np.array([0.0, 0.01, -0.01, 0.004] * 3)
    sweep = sweep_of(near=[0.501] * 12, b=0.5 + apart)
    row = {"seeds": "1-12", "others": others, "expected": expected}
    table = tables.intervals_table(claims(row), {"made-up": sweep})
    assert table["verdict"].to_list() == [said], table["interval"]


# ---------------------------------------------------------------- outcomes
def run_of(method: str, seed: int, lines: list[dict]) -> pd.DataFrame:
    """The lines of a run, as plot.load gives them."""
    index = pd.MultiIndex.from_tuples([(method, seed)] * len(lines), names=plot.RUN)
    return pd.DataFrame(lines, index=index)


def test_the_change_of_entropy_within_a_batch_is_the_last_update_less_the_first_by_seed():
    """The seeds differ far more than the methods. The last batch broke off after two updates."""
    changes = {
        "grpo@8": {1: -0.1, 2: -0.3, 3: -0.5},
        "0.6-1.2@8": {3: -0.53, 1: -0.11, 2: -0.32},
    }
    runs = []
    for method, of_seeds in changes.items():
        for seed, change in of_seeds.items():
            entropies = [(1, 1, 2.0), (1, 2, 9.0), (1, 3, 2 + change), (2, 1, 5.0), (2, 2, 6.0)]
            lines = [dict(zip(["step", "update", "entropy_now"], row)) for row in entropies]
            runs.append(run_of(method, seed, lines))
    change = outcomes.within_batches(pd.concat(runs)).groupby(plot.RUN).mean()
    sweep = pd.DataFrame({"within a batch": change})
    sweeps = dict.fromkeys(tables.WITHIN_BATCHES, sweep)
    table = tables.within_batches_table(sweeps).set_index(["runs", "method"]).loc["fixed"]
    assert table.loc["grpo@8", "within a batch"].startswith("-0.3000 ±")
    assert table.loc["0.6-1.2@8", "− grpo@8"] == "-0.0200 ± 0.0248"
    assert table.loc["0.6-1.2@8", "below 0"] == "3/3"


# ---------------------------------------------------------------- mechanism
def test_what_lowers_entropy_is_drawn_to_the_left_and_counted(tmp_path):
    """One run, packed. The second class lowers entropy, in one group of two; the third is empty.

    The lines after the fifth update repeat its slopes.
    """
    line = {"step": 3, "fall_at_0.6_1.2": 0.06, "fall_at_0.8_1.2": 0.01, "fall_at_0.9_3.0": -0.08}
    for place, name in enumerate(outcomes.CLASSES):
        numbers = {"share": 0.1, "improbable": None if place == 2 else 0.5, "probability": 0.2}
        numbers |= {"fall": -0.01, "slope": 1.0, "slopes": "0.5;0;0.5"}
        if place == 1:
            numbers |= {"fall": 0.05, "slope": -1.0, "slopes": "-3.0;0;1.0"}
        line |= {f"{column}_{name}": value for column, value in numbers.items()}
    runs = tmp_path / "runs"
    write_lines(runs / "grpo@8-seed40/metrics.jsonl", [line | {"update": 5}, line | {"update": 6}])
    files.write_json(runs / "grpo@8-seed40/final.json", {"mean@4": 0.5})
    files.write_json(runs / "config.json", {})
    pack.pack(runs, tmp_path / "mechanism/toy", "c0ffee", {})
    mechanism = outcomes.read_mechanism(tmp_path)
    table = tables.classes_table(mechanism).set_index("class")
    columns = ["lowers, updates", "lowers, groups", "improbable"]
    assert table.loc["A < 0, 0.6 to 0.8", columns].to_list() == ["1/1", "1/2", "0.500"]
    assert table.loc["A < 0, 0.8 to 0.9", columns].to_list() == ["0/1", "0/2", "–"]
    assert set(table["runs"]) == {"toy, seed 40"}

    methods = pd.MultiIndex.from_product([["grpo@8", "0.6-1.2@8", "0.9-3.0@8"], [1]])
    measured = pd.DataFrame({"within a batch": [-0.02, -0.03, -0.01]}, methods.set_names(plot.RUN))
    figure = figures.mechanism(mechanism, {"fixed": measured})
    classes, *others = [[bar.get_width() for bar in axis.patches] for axis in figure.axes]
    assert [width < 0 for width in classes] == [False, True] + [False] * 5
    assert others == [pytest.approx([-0.06, -0.01, 0.08]), pytest.approx([-0.03, -0.02, -0.01])]


# ---------------------------------------------------------------- pages
def test_tables_md_is_what_the_script_prints():
    printed = tables.page(ROOT / "results")
    assert (ROOT / "results/tables.md").read_text() == printed, (
        "run python -m results.scripts.tables"
    )


@pytest.mark.parametrize("page", ["README.md", "results/README.md"])
def test_tables_of_results_stand_on_the_pages_as_they_were_printed(page):
    """A table with ±, % or shares is one of results/tables.md, all its lines."""
    printed = (ROOT / "results/tables.md").read_text().replace("|  |", "| |")
    for table in re.findall(r"(?:^\|.*\n)+", (ROOT / page).read_text(), re.MULTILINE):
        if re.search(r"±|%|share of", table):
            assert table.replace("|  |", "| |") in printed, "copy it from results/tables.md"
