"""results/scripts: packed runs equal the runs, the statistics, and the tables of the pages."""

import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from conftest import edit_json

import train
from results.scripts import pack, tables
from support import command_line, files, plot

ROOT = Path(__file__).parent.parent


def test_packed_runs_are_read_as_they_were(made_up_runs, tmp_path):
    command = ["--methods", "grpo@2", "--seeds", "1", "2", "--learning_rate", "1e-4"]
    options = command_line.parse(train.Options, [*command, "--output_dir", str(made_up_runs)], "")
    files.write_json(made_up_runs / "config.json", vars(options))
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
    (kept,) = files.read_json(packed / "runs.json")["blocks"]
    words = "python train.py --methods grpo@2 --seeds 1 2 --learning_rate 0.0001"
    assert kept["command"] == f"{words} --output_dir runs/made-up"
    assert kept["commit"] == "c0ffee"
    written = [path.read_bytes() for path in sorted(packed.iterdir())]
    pack.pack(made_up_runs, packed, "c0ffee")  # into what was read back
    assert [path.read_bytes() for path in sorted(packed.iterdir())] == written
    edit_json(made_up_runs / "grpo@2-seed1/final.json", **{"mean@16": 0.9})
    pack.pack(made_up_runs, packed, "c0ffee")
    assert plot.load(packed).accuracies.loc[("grpo@2", 1), "mean@16"] == 0.9


def test_runs_that_go_on_or_were_continued_and_killed_are_not_packed(made_up_runs, tmp_path):
    (made_up_runs / "grpo@2-seed1/final.json").unlink()  # train.py removes it when it continues
    with pytest.raises(ValueError, match=r"\('cispo@2', 2\), \('grpo@2', 1\)\]"):
        pack.pack(made_up_runs, tmp_path / "results/made-up", "c0ffee")


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
    sweeps = {"made-up": sweep, "other": sweep + 1}
    both, between, half, missing = claims(
        {}, {"others_sweep": "other"}, {"methods": "a", "others": "b c"}, {"seeds": "1-4"}
    ).itertuples()
    assert tables.differences(both, sweeps).to_list() == pytest.approx([0.1, 0.2, 0])
    assert tables.differences(between, sweeps).to_list() == pytest.approx([-0.9, -0.8, -1])
    assert tables.differences(half, sweeps).to_list() == pytest.approx([0.05, 0.1, 0.1])
    with pytest.raises(KeyError):
        tables.differences(missing, sweeps)


def test_every_family_has_a_correction_of_its_own():
    sweeps = {"made-up": sweep_of(a=[0.0] * 3, b=[0.01, 0.02, 0.02])}
    tests = tables.tested(claims({}, {}, {"family": "2"}), sweeps)
    p = 1 - 5 / 27**0.5  # Student's, of t = 5 with two degrees of freedom
    assert tests["p (Holm)"].to_list() == pytest.approx([2 * p, 2 * p, p])
    *first_family, second_family = tests["verdict"]
    assert first_family == ["not significant after correction"] * 2
    assert second_family == "as expected"


@pytest.mark.parametrize(
    "mean, p, expected, said",
    [
        (0.1, 0.2, "above 0", "not significant"),
        (0.1, 0.01, "above 0", "as expected"),
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


def updates_of(method: str, lines: list[dict]) -> pd.DataFrame:
    """The lines of a run with seed 1, as plot.load gives them."""
    index = pd.MultiIndex.from_tuples([(method, 1)] * len(lines), names=plot.RUN)
    return pd.DataFrame(lines, index=index)


def test_shares_of_searches_are_those_of_the_parts_where_an_update_has_several():
    whole = {"low": 0.6, "high": 1.2, "reached": 1.0}
    inside = {"low": 0.6, "high": 2.0, "reached": 1.0}
    end = {"low": 0.9, "high": 3.0, "reached": 0.0}
    parts = {"low": 0.75, "high": 2.1, "reached": 0.5, "at_start": 0.25, "at_end": 0.5}
    of_updates = updates_of("bapo@8", [whole, whole, end, inside])
    of_parts = updates_of("bapo-main-per4@8", [parts, parts])
    found = tables.searches(pd.concat([of_updates, of_parts]), plot.RUN)
    assert found.loc[("bapo@8", 1)].to_list() == [0.5, 0.25, 0.25, 0.75, 0.5]
    assert found.loc[("bapo-main-per4@8", 1)].to_list() == [0.25, 0.25, 0.5, 0.5, 1 / 3]


def test_outcomes_of_the_language_model_are_the_protocol_s():
    """A run that is evaluated every 8 steps. Its first two batches count for no search."""
    lines = []
    for step in range(1, 33):
        metrics = {"reward": float(step == 1), "entropy": float(step < 9), "reached": 1.0}
        if step > 16:
            metrics |= {"reward": 0.5, "entropy": 2.0 if step < 25 else 3.0}
        metrics |= {"low": 0.6, "high": 1.2 if 3 <= step <= 16 else 3.0}
        metrics |= {"grad_norm": 1.0 if step <= 16 else 9.0, "gradient_share": 0.4}
        metrics |= {"held_out_mean@4": {8: 0.4, 16: 0.6, 24: 0.7, 32: 0.9}.get(step)}
        lines += [{"step": step, "update": update} | metrics for update in (1, 2)]
    index = pd.MultiIndex.from_tuples([("bapo-main@8", 1), (plot.START, 1)], names=plot.RUN)
    accuracies = pd.DataFrame({"mean@4": [0.6, 0.2]}, index)
    records = plot.Records(updates_of("bapo-main@8", lines), accuracies)
    found = tables.language_outcomes(records)
    run = found.loc[("bapo-main@8", 1)]
    assert (run["reward"], run["entropy"], run["mean@4"], run["norm"]) == (0, 0, 0.5, 1)
    later = run[["later reward", "later mean@4", "later entropy"]]
    assert later.to_list() == pytest.approx([0.5, 0.8, 3])
    assert run["searches at start"] == 1
    assert found.loc[(plot.START, 1), "mean@4"] == 0.2


def test_entropy_is_compared_among_batches_of_equal_reward():
    rewards = {0.1: 1.0, 0.25: 2.0, 0.3: 5.0, 1.0: 7.0}
    lines = [
        {"step": step, "update": update, "reward": reward, "entropy": entropy}
        for step, (reward, entropy) in enumerate(rewards.items(), 3)
        for update in (1, 2)
    ]
    early = [{"step": 2, "update": 1, "reward": 0.3, "entropy": 100.0}]
    table = tables.at_equal_reward(updates_of("grpo@8", early + lines))
    assert table.iloc[0, 2:].to_list() == ["1.500", "5.000", "7.000"]


def test_the_bounds_that_other_targets_would_have_found():
    bounds = [(0.6, 1.2), (0.6, 2.0), (0.9, 3.0), (0.9, 3.0)]
    lines = [{"step": 3, "update": 2, "low_0.40": low, "high_0.40": high} for low, high in bounds]
    (found,) = tables.would_have_found(updates_of("grpo@8", lines)).to_dict("records")
    assert found["method"] == "bapo, 0.40"
    assert found["high"] == "2.300"
    assert [found[name] for name in tables.SEARCHES[:3]] == ["0.250", "0.250", "0.500"]


def test_reasons_why_responses_fail():
    responses = {"the cat": 1.0, "the " * 7: 1.0, "cut": 0.0, "a " * 21: 0.0, "a dog": 0.0}
    samples = [{"response": text, "reward": reward} for text, reward in responses.items()]
    samples = updates_of("grpo@8", samples).assign(truncated=[False, False, True, False, False])
    table = tables.failures(samples)
    assert table.iloc[0, 2:].to_list() == ["0.200"] * 5


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
