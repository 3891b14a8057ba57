"""results/scripts: packed runs equal the runs, the statistics, and the tables of the pages."""

import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from conftest import edit_json

import train
from results.scripts import figures, outcomes, pack, tables
from support import files, plot

ROOT = Path(__file__).parent.parent


# ---------------------------------------------------------------- packs
def test_packed_runs_are_read_as_they_were(made_up_runs, tmp_path):
    changed = {"methods": ["grpo@2"], "seeds": [1, 2], "learning_rate": 1e-4}
    files.write_json(made_up_runs / "config.json", vars(train.Options()) | changed)
    for path in (made_up_runs / "bapo@2-seed1").iterdir():
        path.unlink()
    for seed in (1, 2):
        final = (made_up_runs / f"grpo@2-seed{seed}/final.json").read_text()
        (made_up_runs / f"cispo@2-seed{seed}/final.json").write_text(final)
    packed = tmp_path / "results/made-up"
    pack.pack(made_up_runs, packed, "c0ffee", {"cispo@2": "renamed@2"})
    before = plot.outcomes(plot.load(made_up_runs)).rename({"cispo@2": "renamed@2"})
    after = plot.outcomes(plot.load(packed))
    pd.testing.assert_frame_equal(after, before.loc[after.index], rtol=1e-3, check_names=False)
    assert len(after) == len(before)
    (kept,) = files.read_json(packed / "runs.json")["blocks"]
    assert "--methods grpo@2 --seeds 1 2 --learning_rate 0.0001" in kept["command"]
    assert kept["commit"] == "c0ffee"
    edit_json(made_up_runs / "grpo@2-seed1/final.json", **{"mean@16": 0.9})
    for path in (made_up_runs / "cispo@2-seed1").iterdir():
        path.unlink()
    pack.pack(made_up_runs, packed, "c0ffee", {})  # a new version of one run; another one is gone
    accuracies = plot.load(packed).accuracies["mean@16"]
    assert accuracies["grpo@2", 1] == 0.9
    assert ("renamed@2", 1) in accuracies.index


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
    both, between, half, missing = claims(
        {}, {"others_sweep": "other"}, {"methods": "a", "others": "b c"}, {"seeds": "1-4"}
    ).itertuples()
    assert tables.differences(both, sweeps).to_list() == pytest.approx([0.1, 0.2, 0])
    assert tables.differences(between, sweeps).to_list() == pytest.approx([-0.9, -0.8, -1])
    assert tables.differences(half, sweeps).to_list() == pytest.approx([0.05, 0.1, 0.1])
    with pytest.raises(KeyError):
        tables.differences(missing, sweeps)


def test_every_family_has_a_correction_of_its_own():
    sweeps = {"made-up": sweep_of(a=[0.0] * 3, b=[0.01, 0.02, 0.02], c=[0.1, 0.1, 0.11])}
    rows = {}, {"methods": "c"}, {"family": "2"}
    tests = tables.tested(claims(*rows), sweeps)
    p = 1 - 5 / 27**0.5  # Student's, of t = 5 with two degrees of freedom
    assert tests["p (Holm)"][[0, 2]].to_list() == pytest.approx([p, p])  # the larger of two
    assert tests["p (Holm)"][1] == pytest.approx(2 * tests["p"][1])
    assert tests["verdict"].to_list() == ["as expected"] * 3
    third = tables.tested(claims(*rows, {"family": "2"}), sweeps)  # equal p-values
    assert third["p (Holm)"][[2, 3]].to_list() == pytest.approx([2 * p, 2 * p])
    assert third["verdict"][3] == "not significant after correction"


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
    sweep = sweep_of(near=[0.501] * 12, b=0.5 + apart, **{"grpo@8": [0.4] * 12})
    row = {"seeds": "1-12", "methods": "b", "others": others, "expected": expected}
    table = tables.intervals_table(claims(row), {"made-up": sweep})
    assert table["verdict"].to_list() == [said], table["interval"]


def test_a_figure_has_the_corrected_test_where_it_was_pre_registered_and_else_a_dagger():
    """The last row is of levels, and has no test."""
    sweeps = {"made-up": sweep_of(a=[0.0] * 3, b=[0.01, 0.02, 0.02], c=[-0.1, -0.1, -0.11])}
    tests = tables.tested(claims({}, {"methods": "a", "others": "b"}), sweeps)
    rows = claims({}, {"methods": "c"}, {"others": "", "expected": "–"})
    paper = rows.assign(figure="9", comparison="a → b", quantity="q", paper="")
    table = tables.figures_table(paper, tests, sweeps)
    assert table["here"].to_list() == ["0.00 → 0.02", "0.00 → -0.10", "0.017 ± 0.014"]
    assert table["difference"].to_list() == [
        "+0.017 ± 0.014, not significant after correction",
        "-0.103 ± 0.014, opposite direction †",
        "–",
    ]


# ---------------------------------------------------------------- outcomes
def updates_of(method: str, lines: list[dict], seed: int = 1) -> pd.DataFrame:
    """The lines of a run, as plot.load gives them."""
    index = pd.MultiIndex.from_tuples([(method, seed)] * len(lines), names=plot.RUN)
    return pd.DataFrame(lines, index=index)


def test_shares_of_searches_are_those_of_the_parts_where_an_update_has_several():
    whole = {"low": 0.6, "high": 1.2}
    inside = {"low": 0.6, "high": 2.0}
    end = {"low": 0.9, "high": 3.0}
    parts = {"low": 0.75, "high": 2.1, "at_start": 0.25, "at_end": 0.5}
    of_updates = updates_of("bapo@8", [whole, whole, end, inside])
    of_parts = updates_of("bapo-main-per4@8", [parts, parts])
    found = outcomes.searches(pd.concat([of_updates, of_parts]), plot.RUN)
    found = found[["at start", "inside", "at end"]]
    assert found.loc[("bapo@8", 1)].to_list() == [0.5, 0.25, 0.25]
    assert found.loc[("bapo-main-per4@8", 1)].to_list() == [0.25, 0.25, 0.5]


def test_outcomes_of_the_language_model_are_the_protocol_s():
    """A run that is evaluated every 8 steps. Its first two batches count for no search."""
    lines = []
    for step in range(1, 33):
        metrics = {"reward": float(step == 1), "entropy": float(step < 9), "entropy_now": 1.0}
        if step > 16:
            metrics |= {"reward": 0.5, "entropy": 2.0 if step < 25 else 3.0}
        metrics |= {"low": 0.6, "high": 1.2 if 3 <= step <= 16 else 3.0, "filtered_groups": 0.0}
        metrics |= {"grad_norm": 1.0 if step <= 16 else 9.0, "gradient_share": 0.4, "kl": 0.1}
        metrics |= {"held_out_mean@4": {8: 0.4, 16: 0.6, 24: 0.7, 32: 0.9}.get(step)}
        metrics |= {"rho_start": 0.4 + 0.01 * step}
        lines += [{"step": step, "update": update} | metrics for update in (1, 2)]
    index = pd.MultiIndex.from_tuples([("bapo-main@8", 1), (plot.START, 1)], names=plot.RUN)
    accuracies = pd.DataFrame({"mean@4": [0.6, 0.2]}, index)
    records = plot.Records(updates_of("bapo-main@8", lines), accuracies)
    found = outcomes.language_outcomes(records)
    run = found.loc[("bapo-main@8", 1)]
    assert (run["reward"], run["entropy"], run["mean@4"], run["norm"]) == (0, 0, 0.5, 1)
    later = run[["later reward", "later mean@4", "later entropy"]]
    assert later.to_list() == pytest.approx([0.5, 0.8, 3])
    assert run["at start"] == 1
    assert found.loc[(plot.START, 1), "mean@4"] == 0.2


def test_the_change_of_entropy_within_a_batch_is_the_last_update_less_the_first_by_seed():
    """The seeds differ far more than the methods. The last batch broke off after one update."""
    changes = {"grpo@3": [-0.1, -0.3, -0.5], "0.6-1.2@3": [-0.53, -0.11, -0.32]}
    seeds = {"grpo@3": [1, 2, 3], "0.6-1.2@3": [3, 1, 2]}
    lines = []
    for method, of_seeds in changes.items():
        for seed, change in zip(seeds[method], of_seeds):
            rows = [
                {"step": step, "update": update, "entropy_now": 2 + change * (update - 1) / 2}
                for step in (1, 2)
                for update in (1, 2, 3)
            ]
            broken = [{"step": 3, "update": 1, "entropy_now": 2.0}]
            lines.append(updates_of(method, rows + broken, seed))
    change = outcomes.within_batches(pd.concat(lines))
    assert change.groupby("method").size().to_list() == [6, 6]
    runs = pd.DataFrame({"within a batch": change.groupby(plot.RUN).mean()})
    runs = runs.rename({"grpo@3": "grpo@8"}).assign(
        **{"sum within batches": 0.0, "rollouts' entropy": 0.0}
    )
    table = tables.within_batches_table({"made-up": runs}).set_index("method")
    assert table.loc["grpo@8", "within a batch"].startswith("-0.3000 ±")
    assert table.loc["0.6-1.2@3", "− grpo@8"] == "-0.0200 ± 0.0248"
    assert table.loc["0.6-1.2@3", "below 0"] == "3/3"


# ---------------------------------------------------------------- mechanism
def made_up_mechanism() -> pd.DataFrame:
    """Two runs of an update. The second class lowers entropy, in one group of two."""
    rows = []
    for spread in (0.0, 0.001):
        row = {"step": 3, "update": 2}
        for place, name in enumerate(outcomes.CLASSES):
            lowers = place == 1
            row |= {f"share_{name}": 0.1, f"improbable_{name}": 0.5, f"probability_{name}": 0.2}
            row[f"fall_{name}"] = (0.05 if lowers else -0.01) + spread
            row[f"slope_{name}"] = -1.0 if lowers else 1.0
            row[f"slopes_{name}"] = "-3.0;0;1.0" if lowers else "0.5;0;0.5"
        row |= {"fall_at_0.6_1.2": 0.06, "fall_at_0.8_1.2": 0.01}
        row |= {"fall_at_0.8_1.5": -0.02, "fall_at_0.9_3.0": -0.08}
        rows.append(row)
    return pd.concat([updates_of("grpo@8", [row], seed) for seed, row in enumerate(rows)])


def test_what_lowers_entropy_is_drawn_to_the_left_and_counted():
    lines = made_up_mechanism()
    methods = ["grpo@8", "0.6-1.2@8", "0.9-3.0@8", "bapo@8", "bapo-main@8"]
    seeds = pd.MultiIndex.from_product([methods, [1, 2]], names=plot.RUN)
    changes = pd.DataFrame({"within a batch": [-0.02, -0.02, -0.03, -0.03] + [-0.01] * 6}, seeds)
    sweeps = {"smollm2": changes, "fixed": changes}
    figure = figures.mechanism({"smollm2": lines, "toy": lines}, sweeps)
    classes, predicted, measured = [
        [bar.get_width() for bar in axis.patches] for axis in figure.axes[:3]
    ]
    assert [width < 0 for width in classes] == [False, True] + [False] * 5
    assert predicted == pytest.approx([-0.06, -0.01, 0.02, 0.08])
    assert measured[:2] == pytest.approx([-0.03, -0.02])  # [0.6, 1.2], then GRPO
    table = tables.classes_table({"toy": lines}).set_index("class")
    columns = ["lowers, updates", "lowers, groups"]
    assert table.loc["A < 0, 0.6 to 0.8", columns].to_list() == ["2/2", "2/4"]
    assert table.loc["A > 0, r ≤ 1.2", columns].to_list() == ["0/2", "0/4"]


# ---------------------------------------------------------------- pages
def test_tables_md_is_what_the_script_prints():
    printed = tables.page(ROOT / "results")
    assert (ROOT / "results/tables.md").read_text() == printed, (
        "run python -m results.scripts.tables"
    )


@pytest.mark.parametrize("page", ["README.md", "results/README.md"])
def test_tables_of_results_stand_on_the_pages_as_they_were_printed(page):
    """A table with ±, % or "(0.1)" is one of results/tables.md, all its lines."""
    printed = (ROOT / "results/tables.md").read_text()
    for table in re.findall(r"(?:^\|.*\n)+", (ROOT / page).read_text(), re.MULTILINE):
        if re.search(r"±|%|\(0\.", table):
            assert table in printed, "copy it from results/tables.md"
