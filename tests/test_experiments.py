"""experiments/: valid commands, honest statistics, and pictures that show what they say."""

import json
import math
import random
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from saved_runs import overlaps, write_run
from scipy import stats

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT / "experiments"))

import analysis
import anatomy
import figures
import harder_case
import hooks
import pages
import pictures
import questions
import sweeps

import bapo
import train
from support import plot, run_metrics
from support.files import read_lines
from support.options import Options, parse
from support.run_metrics import RunMetrics


def options_of(line: list[str]) -> Options:
    return Options(**parse(Options, line, ""))


# ---------------------------------------------------------------- the commands
@pytest.mark.parametrize("quick", [False, True])
@pytest.mark.parametrize("name", sweeps.SWEEPS)
def test_every_sweep_is_a_valid_command_of_train_py(name, quick):
    sweep = sweeps.SWEEPS[name]
    pairs = []
    for line in sweeps.arguments(name, quick):
        options = options_of(line)
        assert [arm.name for arm in options.arms()] == sweep.methods  # arms name themselves fully
        for seed in options.seeds:
            pairs += [(start, seed) for start in options.warm_starts]
        for option, value in sweep.options.items():
            if not (quick and option == "steps"):
                read = getattr(options, option)
                assert read == value or read == [float(word) for word in str(value).split()]
        assert options.output_dir == sweeps.folder_of(name, quick)
        assert options.output_dir.startswith("runs/quick/" if quick else "runs/")
        longest = {1: 16, 2: 28, 4: 53, 6: 80}
        assert options.max_new_tokens == longest[options.attempts]
    assert pairs == (sweep.pairs[:1] if quick else sweep.pairs)


def test_sweeps_lie_in_folders_of_their_own_and_share_their_warm_starts():
    folders = [sweeps.folder_of(name) for name in sweeps.SWEEPS]
    assert len(set(folders)) == len(folders)
    assert {Path(folder).parent for folder in folders} == {Path("runs")}


def test_no_run_that_a_hypothesis_was_found_on_is_used_to_test_it():
    looked_at_starts = {0, 21, 22, 23}
    looked_at_seeds = {*range(10), *range(31, 36), 41, 42, 43, 44}
    for name, sweep in sweeps.SWEEPS.items():
        for start, seed in sweep.pairs:
            assert start not in looked_at_starts, name
            assert seed not in looked_at_seeds, name


def test_every_start_of_the_default_experiment_has_a_seed_of_its_own():
    pairs = sweeps.SWEEPS["default"].pairs
    assert pairs == [
        (31, 51),
        (32, 52),
        (33, 53),
        (34, 54),
        (35, 55),
        (36, 56),
        (37, 57),
        (38, 58),
    ]
    assert sweeps.SWEEPS["default/controls"].pairs == pairs[:5]


def test_the_neighbours_are_screened_and_compared_on_starts_and_seeds_of_their_own():
    used = sweeps.SWEEPS["four-attempts"].pairs
    for pairs in (sweeps.SCREEN, sweeps.FINAL):
        for position in (0, 1):  # starts, seeds
            assert not {pair[position] for pair in pairs} & {pair[position] for pair in used}
        used = used + pairs


def test_the_nine_ranges_are_eight_arms_and_the_default_one():
    arms = sweeps.SWEEPS["ranges"].methods
    assert len(arms) == 8
    assert "bapo+low0.9+high2.0@8" not in arms
    default = next(arm for arm in options_of([]).arms() if arm.name.startswith("bapo@"))
    assert (default.search.low_max, default.search.high_max) == (0.9, 2.0)


def test_bapo_may_pass_one_and_no_bound_is_at_one():
    options = options_of(sweeps.arguments("default")[0])
    gate = next(arm for arm in options.arms() if arm.name == "bapo-gate@8")
    lows = gate.search.lows()
    assert lows.max() > 1
    assert (lows - 1).abs().min() > 0.01


def test_only_missing_runs_are_carried_out_and_with_the_sweep_s_own_hooks(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    calls = []

    def remember(work, jobs, steps=0, what="", **_):
        calls.append((work, steps))
        return {}

    monkeypatch.setattr(train, "run_side_by_side", remember)
    assert sweeps.make("rescue/yoked", 2, quick=True)
    (starts, _), (work, steps) = calls
    assert [Path(name).name for name in starts] == ["attempts4-steps1500-seed1"]
    assert steps == 2
    functions = {item[1] for item in work.values()}
    assert functions == {train.evaluate_policy, sweeps.SWEEPS["rescue/yoked"].carry_out}
    Path("runs/quick/rescue-yoked/bapo-gate@8-start1-seed10/model").mkdir()
    Path("runs/quick/rescue-yoked/start1.json").write_text("{}")
    assert sweeps.make("rescue/yoked", 2, quick=True)
    assert calls[-1] == ({}, 0)


def test_a_sweep_that_takes_another_s_bounds_comes_after_it():
    for experiments in (["rescue"], ["scheme"]):
        names = sweeps.chosen_sweeps(experiments)
        source = "four-attempts" if experiments == ["rescue"] else "scheme"
        assert names.index(f"{experiments[0]}/yoked") > names.index(source)
    assert sweeps.chosen_sweeps(["fixed"]) == ["fixed"]


def test_an_unknown_experiment_is_refused_and_so_are_the_neighbours_before_their_screening(
    monkeypatch,
):
    monkeypatch.setattr(sweeps, "BEST_RATES", {})
    with pytest.raises(ValueError, match="nonsense is none of default, rate"):
        sweeps.main(["nonsense"])
    with pytest.raises(ValueError, match="objectives-screen first"):
        sweeps.main(["objectives"])


# ---------------------------------------------------------------- hooks
def test_yoked_bounds_are_those_of_the_run_at_other_steps():
    rng = random.Random(0)
    lines = []
    for step in range(1, 21):
        for update in (1, 2, 3):
            bounds = {"low": rng.random(), "high": 1 + rng.random()}
            lines.append({"step": step, "update": update, **bounds})
    lines = [line for line in lines if line["step"] != 7]
    lines.append({"step": 7, "update": 0})  # trained nothing
    given = hooks.permuted_bounds(lines, 20, seed=3)
    assert sorted(given) == [(step, update) for step in range(1, 21) for update in (1, 2, 3)]
    for update in (1, 2, 3):
        taken = [given[step, update] for step in range(1, 21)]
        own = [(line["low"], line["high"]) for line in lines if line["update"] == update]
        assert set(taken) == set(own)  # 19 pairs, and one of them again
        assert sum(pair == own[i] for i, pair in enumerate(taken[:6])) < 4
    assert given == hooks.permuted_bounds(lines, 20, seed=3)
    assert given != hooks.permuted_bounds(lines, 20, seed=4)


def test_tokens_are_kept_with_the_sign_of_their_response_and_at_the_last_update_only(
    tmp_path, monkeypatch
):
    mask = torch.tensor([[True, True, False], [True, True, True]])
    rollout_log_probs = torch.log(torch.tensor([[0.5, 0.25, 1.0], [0.1, 0.2, 0.4]]))
    log_probs = torch.log(torch.tensor([[0.25, 0.5, 1.0], [0.2, 0.2, 0.2]]))
    rollouts = SimpleNamespace(mask=mask, log_probs=rollout_log_probs)
    batch = SimpleNamespace(rollouts=rollouts, advantages=torch.tensor([-1.5, 0.5]))

    def carry_out(run, task, watch):
        for update in (1, 2):
            watch(9, update, batch, log_probs, torch.full((2, 3), 0.7))

    monkeypatch.setattr(train, "carry_out", carry_out)
    run = SimpleNamespace(folder=tmp_path, arm=SimpleNamespace(epochs=2, parts=1))
    hooks.keep_tokens(run, None)
    (line,) = read_lines(tmp_path / "tokens.jsonl")
    assert line["step"] == 9
    assert line["sign"] == [-1, -1, 1, 1, 1]
    assert line["ratio"] == [0.5, 2, 2, 1, 0.5]
    assert line["rollout_probability"] == [0.5, 0.25, 0.1, 0.2, 0.4]
    assert line["entropy"] == [0.7] * 5


def test_slow_fast_moves_back_before_the_last_update_of_every_batch(monkeypatch):
    """Against a literal loop, over three batches.

    Kills: moving after the last update, the first batch's w0 for all batches.
    """
    weight = torch.tensor([1.0, -2.0], dtype=torch.float64, requires_grad=True)
    generator = torch.Generator().manual_seed(0)
    slopes = torch.randn(12, 2, dtype=torch.float64, generator=generator)

    def train_on(optimizer):
        for slope in slopes:
            weight.grad = slope.clone()
            optimizer.step()

    def carry_out(run, task):
        train_on(torch.optim.SGD([weight], lr=0.1))

    monkeypatch.setattr(train, "carry_out", carry_out)
    run = SimpleNamespace(arm=SimpleNamespace(epochs=2, parts=2))
    hooks.slow_fast(run, None, alpha=0.6)
    expected = torch.tensor([1.0, -2.0], dtype=torch.float64)
    for batch in slopes.view(3, 4, 2):
        first = expected.clone()
        for slope in batch[:3]:
            expected = expected - 0.1 * slope
        expected = first + 0.6 * (expected - first) - 0.1 * batch[3]
    torch.testing.assert_close(weight.detach(), expected)
    train_on(torch.optim.SGD([weight], lr=0.1))  # no other optimizer is touched afterwards
    torch.testing.assert_close(weight.detach(), expected - 0.1 * slopes.sum(0))


# ---------------------------------------------------------------- statistics
def runs_with(ends: dict, outcome: str = "mean@16") -> list[RunMetrics]:
    """Runs from (warm start, seed) -> outcome."""
    runs = []
    for (start, seed), end in ends.items():
        config = {"warm_start": start, "seed": seed, "arm": "a@8"}
        runs.append(RunMetrics(config, {outcome: end}, []))
    return runs


def rejected_by_the_procedure(p_values: list[float], alpha: float) -> set[int]:
    """Holm's procedure, literally."""
    found = set()
    left = sorted(range(len(p_values)), key=lambda i: p_values[i])
    while left and p_values[left[0]] <= alpha / len(left):
        found.add(left.pop(0))
    return found


def test_holm_s_correction_is_the_step_down_procedure():
    rng = random.Random(0)
    for _ in range(300):
        digits = rng.choice([1, 2, 6])
        p_values = [round(rng.random() ** 3, digits) for _ in range(rng.randint(1, 7))]
        corrected = analysis.holm(p_values)
        for alpha in [rng.random() for _ in range(20)] + [0.05]:
            if all(abs(p - alpha) > 1e-9 for p in corrected):
                rejected = {i for i, p in enumerate(corrected) if p <= alpha}
                assert rejected == rejected_by_the_procedure(p_values, alpha)
    with_nan = analysis.holm([0.01, math.nan, 0.04, 0.03])
    assert with_nan[::2] == pytest.approx([0.03, 0.06])
    assert math.isnan(with_nan[1])
    assert analysis.holm([]) == []


def test_a_difference_is_paired_and_averaged_within_warm_starts():
    rng = random.Random(1)
    pairs = [(start, seed) for start in range(1, 6) for seed in (10, 11)]
    one = {pair: rng.random() for pair in pairs}
    other = {pair: rng.random() for pair in reversed(pairs)}
    found = analysis.difference(runs_with(one), runs_with(other), "mean@16")
    gaps = []
    for start in range(1, 6):
        gaps.append(np.mean([one[start, seed] - other[start, seed] for seed in (10, 11)]))
    expected = stats.ttest_1samp(gaps, 0)
    interval = expected.confidence_interval(0.95)
    assert found.mean - found.half == pytest.approx(interval.low)
    assert found.mean + found.half == pytest.approx(interval.high)
    assert found.p == pytest.approx(expected.pvalue)
    assert found.pairs == 10
    narrower = analysis.difference(runs_with(one), runs_with(other), "mean@16", 0.90)
    interval = expected.confidence_interval(0.90)
    assert narrower.half == pytest.approx((interval.high - interval.low) / 2)
    assert narrower.p == pytest.approx(found.p)
    of_one_seed = {pair: end for pair, end in one.items() if pair[1] == 10}
    assert analysis.difference(runs_with(one), runs_with(of_one_seed), "mean@16").pairs == 5
    assert analysis.difference(runs_with(one), [], "mean@16").pairs == 0


def test_a_positive_difference_means_that_the_first_arm_has_more():
    more = {(start, 10): 0.5 + 0.01 * start for start in (1, 2, 3)}
    less = {(start, 10): 0.2 + 0.01 * start for start in (1, 2, 3)}
    gap = analysis.difference(runs_with(more), runs_with(less), "mean@16")
    assert str(gap).startswith("+0.300")
    gap = analysis.difference(runs_with({(1, 10): 0.1}), runs_with({(1, 10): 0.3}), "mean@16")
    assert str(gap) == "-0.200"


def pack_arms(results: Path, folder: str, ends: dict, start: float = 0.4, **of_line) -> None:
    """Packed runs of warm starts 1, 2, ...; ends: arm -> mean@16 of each."""
    source = results.parent / "runs" / folder.replace("/", "-")
    for arm, of_starts in ends.items():
        updates = int(arm.split("@")[1])
        for warm_start, end in enumerate(of_starts, 1):
            line = {"reward": end, "entropy": 0.3, "kl": 0.01, "grad_norm": 0.2, **of_line}
            final = {"greedy": end, "mean@16": end, "pass@8": end + 0.3}
            write_run(source, arm, warm_start, 10, [[line] * updates] * 2, final)
            before = {"mean@16": start, "pass@8": 0.7}
            (source / f"start{warm_start}.json").write_text(json.dumps(before))
    run_metrics.pack(source, results / folder)


def rows_by_first_cell(rows: list[list[str]]) -> dict[str, dict[str, str]]:
    return {row[0]: dict(zip(rows[0], row)) for row in rows[1:]}


FIVE_ENDS = {
    "grpo@1": [0.50, 0.51, 0.49, 0.52, 0.48],
    "grpo@8": [0.36, 0.34, 0.34, 0.34, 0.34],
    "bapo-gate@8": [0.51, 0.50, 0.50, 0.51, 0.49],
    "balanced@8": [0.36, 0.36, 0.36, 0.34, 0.36],
    "1.02-3.0@8": [0.40, 0.61, 0.40, 0.60, 0.49],
}


def test_collapse_and_following_on_policy_are_what_was_named_before(tmp_path):
    pack_arms(tmp_path / "results", "default", FIVE_ENDS)
    settings = analysis.Settings(tmp_path / "results")
    rows = rows_by_first_cell(analysis.verdicts(settings, settings.places("default")))
    verdicts = {}
    for place, row in rows.items():
        arm = place.split()[1]
        verdicts[arm] = (row["collapsed"], row["runs that did"], row["follows it"])
    assert verdicts == {
        "grpo@1": ("no", "0", "yes"),
        "grpo@8": ("yes", "4", "no"),  # -0.056
        "bapo-gate@8": ("no", "0", "yes"),
        "balanced@8": ("no", "1", "no"),  # -0.044
        "1.02-3.0@8": ("no", "0", "no"),  # the mean is the same, the interval is wide
    }
    assert rows["default grpo@8"]["mean@16: end − start"].startswith("-0.056 ± ")


def test_differences_are_corrected_after_holm_within_their_table(tmp_path):
    pack_arms(tmp_path / "results", "default", FIVE_ENDS)
    settings = analysis.Settings(tmp_path / "results")
    pairs = [("default bapo-gate@8", "default grpo@8"), ("default grpo@1", "default grpo@8")]
    pairs.append(("default not-packed@8", "default grpo@8"))
    rows = rows_by_first_cell(analysis.differences(settings, pairs))
    assert len(rows) == 2
    row = rows["default bapo-gate@8 − default grpo@8"]
    gate = stats.ttest_rel(FIVE_ENDS["bapo-gate@8"], FIVE_ENDS["grpo@8"]).pvalue
    on_policy = stats.ttest_rel(FIVE_ENDS["grpo@1"], FIVE_ENDS["grpo@8"]).pvalue
    assert row["mean@16"].startswith("+0.158 ± ")
    assert row["pairs"] == "5"
    corrected = float(row["p (Holm)"].replace("< 0.001", "0"))
    assert corrected == pytest.approx(max(2 * min(gate, on_policy), gate), abs=6e-4)


def test_every_arm_is_compared_within_its_own_setting_and_neighbours_at_each_one_s_best_rate():
    places = ["objectives/sfpo grpo@8", "objectives/0.0002 bapo-gate@8", "objectives/0.0001 grpo@8"]
    settings = SimpleNamespace(places=lambda experiment: places)
    for place, arm, expected in (
        ("rescue/yoked bapo-gate@8", "grpo@8", "four-attempts grpo@8"),
        ("rescue/attempts-1 grpo+share0.30@8", "grpo@8", "map-attempts/1 grpo@8"),
        ("map-lr/0.0001 bapo-gate@8", "grpo@1", "map-lr/0.0001 grpo@1"),
        ("map-reuse bapo-gate@2", "grpo@8", "four-attempts grpo@8"),
        ("default/controls clip-higher@8", "grpo@8", "default grpo@8"),
        ("scheme/yoked bapo-main@2x4", "grpo@2x4", "scheme grpo@2x4"),
        ("fig9-long bapo@8", "grpo@8", "fig9-long grpo@8"),
        ("rate/0.0004 bapo-octothinker@8", "grpo@8", "rate/0.0004 grpo@8"),
        ("rate/0.0001 bapo@8", "grpo@8", "rate/0.0001 grpo@8"),
        ("objectives/0.0004 cispo@8", "grpo@8", "objectives/0.0001 grpo@8"),
        ("objectives/sfpo grpo@8", "bapo-gate@8", "objectives/0.0002 bapo-gate@8"),
        ("objectives/partial a-3po@8", "grpo@8", "objectives/partial grpo@8"),
    ):
        assert analysis.reference(settings, place, arm) == expected


def test_bapo_is_compared_with_grpo_at_as_many_updates(tmp_path):
    ends = {"grpo@4": [0.3, 0.4], "bapo-gate@4": [0.5, 0.5], "bapo-gate@2": [0.1, 0.2]}
    pack_arms(tmp_path / "results", "map-reuse", ends)
    page = analysis.document(analysis.Settings(tmp_path / "results"), "map-reuse")
    table = page.partition("at as many updates")[2]
    assert "| map-reuse bapo-gate@4 − map-reuse grpo@4 | 2 | +0.150 ± " in table
    assert "bapo-gate@2" not in table


# ---------------------------------------------------------------- the tests named before
def test_the_named_tests_are_those_of_the_protocol():
    """Kills: a test that is added, left out or turned around after the results were seen."""
    protocol = (ROOT / "results/protocol.md").read_text()
    rows = []
    for line in protocol.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 3 and " − `" in cells[1]:
            outcome = cells[0] or rows[-1][0]
            rows.append((outcome, cells[1], cells[2]))
    outcomes = {
        "lowest mean of the entropy over 20 consecutive steps": "lowest_entropy",
        "95th percentile of the gradient's norm": "grad_norm",
        "held-out pass@8 at the end": "pass@8",
        "held-out mean@16 at the end": "mean@16",
    }
    expected = []
    for outcome, arms, direction in rows:
        expected.append((outcomes[outcome], arms, direction))
    found = []
    for test in analysis.NAMED_TESTS:
        arms = f"`{test.arm}` − `{test.other}`"
        found.append((test.outcome, arms, analysis.DIRECTIONS[test.direction]))
    assert found == expected
    assert len(found) == 8


def test_the_named_tests_are_corrected_over_exactly_the_eight(tmp_path):
    rng = random.Random(3)
    source = tmp_path / "runs"
    ends = {}
    for arm in ("grpo@1", "grpo@8", "bapo@8", "bapo-gate@8", "bapo-main@8"):
        for start in range(1, 7):
            values = {name: rng.random() for name in ("entropy", "grad_norm", "mean@16", "pass@8")}
            ends[arm, start] = values
            line = {"entropy": values["entropy"], "grad_norm": values["grad_norm"]}
            final = {"mean@16": values["mean@16"], "pass@8": values["pass@8"]}
            steps = [[line] * int(arm[-1])] * 3
            write_run(source, arm, start, 50 + start, steps, final)
            before = {"mean@16": 0.5, "pass@8": 0.5}
            (source / f"start{start}.json").write_text(json.dumps(before))
    run_metrics.pack(source, tmp_path / "results/default")
    settings = analysis.Settings(tmp_path / "results")
    header, *rows = analysis.named_tests(settings)
    p_values = []
    for test in analysis.NAMED_TESTS:
        name = {"lowest_entropy": "entropy"}.get(test.outcome, test.outcome)
        one = [ends[test.arm, start][name] for start in range(1, 7)]
        other = [ends[test.other, start][name] for start in range(1, 7)]
        p_values.append(stats.ttest_rel(one, other).pvalue)
    corrected = analysis.holm(p_values)
    for row, p, corrected_p in zip(rows, p_values, corrected):
        cells = dict(zip(header, row))
        assert float(cells["p"]) == pytest.approx(p, abs=2e-3)
        assert float(cells["p (Holm)"]) == pytest.approx(corrected_p, abs=2e-2)
    page = analysis.tests_document(settings)
    assert page.count("| held-out mean@16 |") == 2
    below = sum(ends["bapo-main@8", start]["mean@16"] < 0.45 for start in range(1, 7))
    assert f"| default | `bapo-main@8` | {below} of 6 |" in page


def test_a_verdict_follows_the_direction_that_was_named():
    assert analysis.verdict(-0.1, 0.01, -1) == "as named"
    assert analysis.verdict(+0.1, 0.01, -1) == "resolved, the reverse"
    assert analysis.verdict(+0.1, 0.01, 0) == "resolved"
    assert analysis.verdict(-0.1, 0.05, -1) == "not resolved"
    assert analysis.verdict(-0.1, math.nan, -1) == "not resolved"


# ---------------------------------------------------------------- the search
def test_yoked_bounds_that_equal_the_run_s_own_are_counted(tmp_path):
    """Kills: comparing the bounds of other updates, or of another start."""
    bounds = {"own": {}, "yoked": {}}
    for start in (1, 2):
        lows = [0.6, 0.7, 0.8, 0.9]
        bounds["own"][start] = lows
        bounds["yoked"][start] = [lows[1], lows[0], *lows[2:]] if start == 1 else lows
    for name, folder in (("own", "scheme"), ("yoked", "scheme-yoked")):
        for start, lows in bounds[name].items():
            steps = []
            for step in (0, 2):
                steps.append([{"low": low, "high": 1.2} for low in lows[step : step + 2]])
            write_run(tmp_path / "runs" / folder, "bapo-main@2x4", start, 50 + start, steps)
    run_metrics.pack(tmp_path / "runs/scheme", tmp_path / "results/scheme")
    run_metrics.pack(tmp_path / "runs/scheme-yoked", tmp_path / "results/scheme/yoked")
    settings = analysis.Settings(tmp_path / "results")
    assert analysis.yoked_differ(settings) == (2, 8)
    page = analysis.document(settings, "scheme")
    assert "2 of 8 yoked bounds are not those" in page


# ---------------------------------------------------------------- the neighbours
def test_the_best_rate_is_that_of_the_highest_mean_in_the_screening(tmp_path):
    results = tmp_path / "results"
    assert analysis.best_rates(results) == {}
    pack_arms(results, "objectives-screen/0.0001", {"a@8": [0.5, 0.3], "b@8": [0.1, 0.1]})
    pack_arms(results, "objectives-screen/0.0004", {"a@8": [0.6, 0.1], "b@8": [0.3, 0]})
    assert analysis.best_rates(results) == {}  # half a screening is none
    pack_arms(results, "objectives-screen/0.0002", {"a@8": [0.1, 0.1], "b@8": [0.1, 0.0]})
    assert analysis.best_rates(results) == {"a@8": 1e-4, "b@8": 4e-4}
    page = analysis.document(analysis.Settings(results), "objectives-screen")
    first, second = page.splitlines()[-2:]
    assert first == "| a@8 | 0.400 (1) | 0.100 (2) | 0.350 (1) | 0.650 | 0.300 | 0.0001 |"
    assert second == "| b@8 | 0.100 (2) | 0.050 (2) | 0.150 (2) | 0.450 | 0.300 | 0.0004 |"


def test_the_bench_shows_each_neighbour_at_its_best_rate_and_at_the_last_one_beside_it(tmp_path):
    """Kills: the screening beside another rate, SFPO among the methods, a wrong difference."""
    results = tmp_path / "results"
    for rate, end in {"0.0001": 0.4, "0.0002": 0.3, "0.0004": 0.2}.items():
        ends = {"a@8": [0.5 - end] * 2, "grpo@8": [end] * 2, "bapo-gate@8": [end] * 2}
        pack_arms(results, f"objectives-screen/{rate}", ends)
    ends = {"grpo@8": [0.1, 0.4, 0.6], "bapo-gate@8": [0.4, 0.6, 0.9]}
    pack_arms(results, "objectives/0.0001", ends)
    pack_arms(results, "objectives/0.0004", {"a@8": [0.3, 0.4, 0.2]})
    pack_arms(results, "objectives/sfpo", {"grpo@8": [0.9, 0.9, 0.9]})
    settings = analysis.Settings(results)
    header, *rows = analysis.bench(settings)
    columns = {}
    for name in header:
        columns[name] = [dict(zip(header, row))[name] for row in rows]
    assert columns["method"] == ["bapo-gate@8", "grpo@8", "a@8", "grpo@8"]
    assert columns["best rate"] == ["0.0001", "0.0001", "0.0004", "sfpo"]
    assert [cell[:5] for cell in columns["mean@16"]] == ["0.633", "0.367", "0.300", "0.900"]
    to_grpo = columns["− grpo@8 (Holm)"]
    assert [cell[:6] for cell in to_grpo] == ["+0.267", "–", "-0.067", "+0.533"]
    to_gate = columns["− bapo-gate@8 (Holm)"]
    assert [cell[:6] for cell in to_gate] == ["–", "-0.267", "-0.333", "+0.267"]
    assert columns["mean@16 at 0.0004"] == ["0.200 (2)", "0.200 (2)", "0.300 (2)", "–"]
    assert columns["collapsed"] == ["0 of 3", "1 of 3", "2 of 3", "0 of 3"]
    pairs = []
    for place in ("0.0001 bapo-gate@8", "0.0004 a@8", "sfpo grpo@8"):
        pairs.append((f"objectives/{place}", "objectives/0.0001 grpo@8"))
    p_values = [row[3] for row in analysis.differences(settings, pairs)[1:]]
    assert [to_grpo[i][-6:-1] for i in (0, 2, 3)] == p_values


# ---------------------------------------------------------------- pictures
COLUMNS = [
    "reward",
    "entropy",
    "low",
    "high",
    "grad_norm",
    "kl",
    "gradient_share",
    "negatives_with_gradient",
    "clip_fraction_high",
    "clip_fraction_low",
    "positive_tokens",
    "length_correct",
    "length_wrong",
    "entropy_rule",
    "entropy_now",
]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Packed metrics of every sweep, made up: two warm starts, three steps."""
    folder = tmp_path_factory.mktemp("made-up")
    methods = {name: sweep.methods for name, sweep in sweeps.SWEEPS.items()}
    for rate in analysis.SCREENED:  # whichever is the best one of made-up runs
        methods[f"objectives/{rate}"] = sweeps.NEIGHBOURS
    methods["objectives/sfpo"] = ["grpo@8"]
    methods["objectives/partial"] = ["grpo@8", "a-3po@8"]
    for name, arms in methods.items():
        source = folder / "runs" / name.replace("/", "-")
        extra = sweeps.SWEEPS[name].extra_columns if name in sweeps.SWEEPS else {}
        for arm in arms:
            for start in (1, 2):
                write_made_up_run(source, name, arm, start)
        run_metrics.pack(source, folder / "results" / name, extra)
    write_made_up_tokens(folder / "results/figures/tokens/tokens.jsonl")
    return folder / "results"


def write_made_up_run(source: Path, name: str, arm: str, start: int) -> None:
    rng = random.Random(f"{name}/{arm}/{start}")
    steps = []
    for _ in range(3):
        updates = []
        for _ in range(run_metrics.updates_of(arm)):
            updates.append({column: 0.1 + rng.random() for column in COLUMNS})
        steps.append(updates)
    final = {"greedy": rng.random(), "mean@16": rng.random(), "pass@8": rng.random()}
    write_run(source, arm, start, 10, steps, final)
    before = {"mean@16": start / 10, "pass@8": 0.9}
    (source / f"start{start}.json").write_text(json.dumps(before))


def write_made_up_tokens(path: Path) -> None:
    rng = random.Random(0)
    with open(path, "w") as file:
        for step in range(1, 30):
            line = {"step": step}
            line["sign"] = [rng.choice([-1.0, 1.0]) for _ in range(40)]
            line["ratio"] = [math.exp(rng.gauss(0, 0.5)) for _ in range(40)]
            for name in ("probability", "rollout_probability", "entropy"):
                line[name] = [rng.random() for _ in range(40)]
            file.write(json.dumps(line) + "\n")


@pytest.fixture(scope="module")
def settings(results):
    return analysis.Settings(results)


@pytest.fixture
def kept(monkeypatch):
    """Figures stay open after they were saved, until the test ends."""
    close = plot.plt.close
    monkeypatch.setattr(plot.plt, "close", lambda figure: None)
    yield
    close("all")


@pytest.mark.parametrize("path", pictures.PICTURES)
def test_every_picture_is_drawn_from_packed_metrics(path, settings, tmp_path, kept):
    figure = pictures.PICTURES[path](settings)
    plot.save(figure, tmp_path / "a.png", "not a result: --quick")
    assert figure.axes
    assert all(axis.has_data() for axis in figure.axes)
    assert not overlaps(figure)
    assert "not a result: --quick" in figure.get_suptitle()
    assert (tmp_path / "a.png").stat().st_size > 5000


def lines_of(figure) -> dict[str, dict]:
    """Title of a panel -> name of a curve -> what it shows."""
    shown = {}
    for axis in figure.axes:
        title = axis.get_title(loc="left")
        shown[title] = {line.get_label(): line.get_ydata() for line in axis.lines}
    return shown


def mean_over_starts(settings, place: str, metric: str) -> np.ndarray:
    return np.mean([run.per_step(metric) for run in settings.find(place)], 0)


def test_the_shares_of_figure_4_have_the_right_signs(settings, kept):
    figure = figures.figure4(settings)
    shown = lines_of(figure)
    for arm in ("grpo@1", "grpo@8"):
        for title, metric in (
            ("share of the gradient", "gradient_share"),
            ("share of the tokens", "positive_tokens"),
        ):
            positive = mean_over_starts(settings, f"default {arm}", metric)
            np.testing.assert_allclose(shown[f"{title}, {arm}"]["A > 0"], positive)
            np.testing.assert_allclose(shown[f"{title}, {arm}"]["A < 0"], 1 - positive)
    assert len({axis.get_ylim() for axis in figure.axes}) == 1  # one scale


def test_the_lengths_of_figure_6_are_those_of_right_and_wrong_responses(settings, kept):
    figure = figures.figure6(settings)
    shown = lines_of(figure)
    for arm in ("grpo@1", "grpo@8"):
        for name, metric in (("right", "length_correct"), ("wrong", "length_wrong")):
            expected = mean_over_starts(settings, f"default {arm}", metric)
            np.testing.assert_allclose(shown[f"response length in tokens, {arm}"][name], expected)
    assert len({axis.get_ylim() for axis in figure.axes}) == 1


def test_clipped_tokens_are_those_of_both_sides(settings, kept):
    clipped = lines_of(figures.curves(settings, "figure2-hard"))["share of clipped tokens"]
    high = mean_over_starts(settings, "map-reuse grpo@4", "clip_fraction_high")
    low = mean_over_starts(settings, "map-reuse grpo@4", "clip_fraction_low")
    np.testing.assert_allclose(clipped["grpo@4"], high + low)
    assert list(clipped) == ["grpo@1", "grpo@2", "grpo@4", "grpo@8"]


def test_a_caption_says_where_the_order_is_the_reverse_of_the_paper_s():
    def runs(*entropies):
        made = []
        for start, entropy in enumerate(entropies):
            line = {"step": 1, "update": 1, "entropy": entropy}
            made.append(RunMetrics({"warm_start": start, "seed": 0}, {}, [line]))
        return made

    grpo = runs(0.3, 0.31, 0.32)
    assert "above GRPO's, as in the paper" in figures.entropy_note(runs(0.4, 0.42, 0.41), grpo)
    assert "below GRPO's: the reverse" in figures.entropy_note(runs(0.2, 0.22, 0.21), grpo)
    assert "below GRPO's, not resolved" in figures.entropy_note(runs(0.2, 0.4, 0.3), grpo)


def test_bins_with_few_tokens_are_merged_and_no_token_is_lost():
    """Kills: dropping a bin, or leaving one with few tokens."""
    rng = np.random.default_rng(0)
    values = np.exp(rng.normal(size=200) * 0.2)
    edges = [0, 0.2, 0.4, 0.6, 0.8, 0.9, 0.97, 1.03, 1.1, 1.2, 1.4, 1.6, 2.0, np.inf]
    merged = figures.merged_edges(values, edges, least=10)
    count, _ = np.histogram(values, merged)
    assert count.sum() == 200
    assert count.min() >= 10
    assert len(count) > 4
    assert set(merged) <= set(edges)
    assert figures.merged_edges(values[:5], edges, least=10) == [0, np.inf]


def test_every_update_has_one_state_of_the_search():
    search = figures.Range(0.6, 0.9, 1.2, 3.0)
    bounds = [(0.6, 1.2), (0.6, 1.25), (0.6, 3.0), (0.62, 3.0), (0.9, 3.0)]
    states = [search.state(low, high) for low, high in bounds]
    assert states == [
        "at the start",
        "upper bound raised",
        "upper bound raised",
        "lower bound raised, too",
        "at the end",
    ]
    lines = []
    for step, (low, high) in enumerate([*bounds, (0.6, 1.2)]):
        lines.append({"step": step // 2 + 1, "low": low, "high": high})
    shares = figures.shares_of_states([RunMetrics({}, {}, lines)], search)
    np.testing.assert_allclose(sum(shares.values()), 1)
    np.testing.assert_allclose(shares["at the start"], [0.5, 0, 0.5])
    np.testing.assert_allclose(shares["at the end"], [0, 0, 0.5])
    together = figures.shares_of_states([RunMetrics({}, {}, lines)], search, together=2)
    np.testing.assert_allclose(together["at the start"], [0.25, 0.5])


def test_partial_rollouts_are_shown_as_paired_differences(settings, kept):
    shown = lines_of(figures.figure12(settings))
    for budget in figures.BUDGETS:
        folder = f"figures/budget-{budget}"
        one = mean_over_starts(settings, f"{folder} bapo-gate@4", "entropy")
        other = mean_over_starts(settings, f"{folder} grpo@4", "entropy")
        drawn = shown["entropy: bapo-gate@4 − grpo@4"][f"{budget} tokens"]
        np.testing.assert_allclose(drawn, one - other)


def gains(settings, place: str) -> list[float]:
    """mean@16 at the end less that of the warm start, of every run."""
    return [run.final["mean@16"] - int(run.warm_start()) / 10 for run in settings.find(place)]


def test_the_map_shows_gains_at_their_places_with_their_intervals(settings, kept):
    figure = harder_case.figure_map(settings, "map-rate")
    axis = figure.axes[0]
    assert axis.get_xlabel() == "learning rate"
    names = [text.get_text() for text in axis.get_xticklabels()]
    assert names == ["5e-05", "0.0001", "0.0002", "0.0004"]
    shown = {line.get_label(): line for line in axis.lines}
    folders = ["map-lr/5e-05", "map-lr/0.0001", "map-lr/0.0002", "four-attempts"]
    for i, folder in enumerate(folders):
        expected = np.mean(gains(settings, f"{folder} bapo-gate@8"))
        assert shown["bapo-gate@8"].get_ydata()[i] == pytest.approx(expected)
        assert abs(shown["bapo-gate@8"].get_xdata()[i] - i) < 0.2
    # No two arms at one place: their error bars are dodged.
    first_places = [shown[arm].get_xdata()[0] for arm in harder_case.FIVE]
    assert np.diff(sorted(first_places)).min() > 0.01
    bars = [segment for bars in axis.collections for segment in bars.get_segments()]
    arms = [name for name in shown if not name.startswith("_")]
    low, high = bars[4 * arms.index("bapo-gate@8") + 3][:, 1]
    half = stats.t.ppf(0.975, 1) * np.std(gains(settings, "four-attempts bapo-gate@8"), ddof=1)
    assert (high - low) / 2 == pytest.approx(half / 2**0.5)


def test_the_map_of_attempts_says_what_its_starts_reach(settings, kept):
    figure = harder_case.figure_map(settings, "map-attempts")
    assert "1: 0.15, 0.90" in figure.get_suptitle()  # made-up starts: 0.1 and 0.2, and 0.9


def test_the_dose_is_shown_at_its_share(settings, kept):
    figure = harder_case.figure_dose(settings)
    left, right = figure.axes
    gained = {line.get_label(): line.get_xydata() for line in left.lines}
    entropies = {line.get_label(): line.get_xydata() for line in right.lines}
    for task, places in harder_case.DOSES.items():
        for i, (share, place) in enumerate(places.items()):
            assert gained[task][i][0] == pytest.approx(share, abs=0.006)
            assert gained[task][i][1] == pytest.approx(np.mean(gains(settings, place)))
            ended = np.mean([run.outcome("entropy") for run in settings.find(place)])
            assert entropies[task][i][1] == pytest.approx(ended)
            named = place.partition("share")[2].partition("@")[0]
            assert not named or float(named) == share


def test_what_rescues_grpo_is_sorted_within_groups(settings):
    rows = harder_case.rescue_rows(settings)
    means = []
    for label, place in rows:
        if not place:
            assert label in harder_case.RESCUE
            means = []
        else:
            means.append(settings.mean(place, "mean@16"))
            assert means == sorted(means, reverse=True)
    assert len(rows) == sum(len(places) + 1 for places in harder_case.RESCUE.values())


def test_the_rule_s_pairs_are_successive_updates_on_one_batch(settings):
    runs = settings.find("four-attempts grpo@8")
    predicted, actual = figures.rule_pairs(runs[:1])
    assert len(predicted) == 3 * 7
    first, second = runs[0].lines[:2]
    assert predicted[0] == pytest.approx(-first["entropy_rule"])
    assert actual[0] == pytest.approx(second["entropy_now"] - first["entropy_now"])


def test_the_front_page_shows_every_start_and_the_mean(settings, kept):
    """Kills: a rate's curves in the other column, means without their starts."""
    figure = questions.front(settings)
    titles = [axis.get_title(loc="left") for axis in figure.axes]
    for folder, title in questions.FRONT_FOLDERS.items():
        axis = figure.axes[titles.index(f"entropy (nats per token), {title}")]
        runs = settings.find(f"{folder} grpo@8")
        colour = plot.COLOURS["grpo"]
        drawn = [line.get_ydata() for line in axis.lines if line.get_color() == colour]
        assert len(drawn) == len(runs) + 1
        expected = plot.smoothed(plot.curves(runs, "entropy"))
        np.testing.assert_allclose(drawn[:-1], expected)
        np.testing.assert_allclose(drawn[-1], expected.mean(0))


def test_drawing_needs_no_run_and_draws_what_is_there(results, tmp_path, capsys):
    for name in ("default", "figures/tokens"):
        (tmp_path / name).mkdir(parents=True)
        for path in (results / name).iterdir():
            if path.is_file():
                (tmp_path / name / path.name).write_bytes(path.read_bytes())
    sweeps.draw(tmp_path, "not a result: --quick")
    drawn = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.png")}
    names = ["figure2", "figure4", "figure5", "figure6", "figure8", "figure9", "figure13"]
    assert drawn == {"default/curves.png", *(f"figures/{name}.png" for name in names)}
    assert "figures/map-rate.png: " in capsys.readouterr().out
    page = (tmp_path / "default/differences.md").read_text()
    assert "## Every arm" in page
    assert "## Against grpo@8" in page
    assert "default bapo-gate@8 − default grpo@8" in page
    assert (tmp_path / "default/tests.md").exists()
    assert (tmp_path / "default/table.md").exists()


# ---------------------------------------------------------------- pages
def test_a_marked_table_is_made_again_and_the_rest_of_the_page_stays(settings, tmp_path):
    page = "before\n<!-- table default -->\nold\n<!-- end -->\nafter <!-- end -->\n"
    filled = pages.filled(page, settings)
    assert filled.startswith("before\n<!-- table default -->\n\n| arm | mean@16 |")
    assert filled.endswith("|\n\n<!-- end -->\nafter <!-- end -->\n")
    assert "old" not in filled
    assert pages.filled(filled, settings) == filled
    empty = analysis.Settings(tmp_path)
    assert pages.filled(filled, empty) == filled  # no runs: what is there stays
    with pytest.raises(ValueError, match="table nonsense is none of "):
        pages.filled("<!-- table nonsense -->\n<!-- end -->", settings)


@pytest.mark.parametrize("name", [*pages.TABLES, *pages.TEXTS])
def test_all_that_may_be_marked_is_made_from_packed_metrics(name, settings):
    kind = "table" if name in pages.TABLES else "text"
    filled = pages.filled(f"<!-- {kind} {name} -->\n<!-- end -->", settings)
    tables = [block for block in filled.split("\n\n") if block.startswith("| ")]
    assert tables
    for table in tables:
        rows = table.splitlines()
        assert len(rows) > 2
        assert len({row.count("|") for row in rows}) == 1


def test_a_difference_is_the_paper_s_only_if_it_is_resolved_in_that_direction():
    def judged(mean, half, sign):
        return pages.judged(analysis.Difference(mean, half, math.nan, 5), sign)

    assert judged(0.1, 0.05, +1) == "as in the paper"
    assert judged(-0.1, 0.05, +1) == "the reverse"
    assert judged(-0.1, 0.05, -1) == "as in the paper"
    assert judged(0.1, 0.2, +1) == "not resolved"
    assert judged(0.1, math.nan, +1) == "not resolved"


def test_the_verdict_on_yoked_bounds_is_that_of_the_protocol(settings, monkeypatch):
    """Kills: taking them for a control where less than a third of them differ."""
    monkeypatch.setattr(analysis, "yoked_differ", lambda settings: (300, 1000))
    assert "so they are no control" in pages.scheme_text(settings)
    monkeypatch.setattr(analysis, "yoked_differ", lambda settings: (334, 1000))
    assert "33 %" in pages.scheme_text(settings)
    assert "so they are a control" in pages.scheme_text(settings)


def test_the_best_range_is_named_for_every_aim(settings):
    text = " ".join(pages.ranges_text(settings).split())
    for outcome, name in pages.AIMS.items():
        means = {}
        for low in analysis.RANGE_LOWS:
            for high in analysis.RANGE_HIGHS:
                place = analysis.range_place(low, high)
                means[f"[{low}, {high}]"] = settings.mean(place, outcome)
        best = max(means, key=means.get)
        assert f"For {name}, bounds up to {best} end highest" in text


def test_an_effect_of_a_bound_is_the_mean_over_the_other_bound_start_by_start(settings):
    """Kills: runs of other starts than those of the sweep, an interval over nine gaps."""
    effect = "lower bound up to 0.98 instead of 0.9"
    found = analysis.range_effect(settings, effect, "entropy")
    gaps = []
    for pair in sorted(analysis.range_pairs(settings)):
        ends = {}
        for low in ("0.98", "0.9"):
            ends[low] = []
            for high in analysis.RANGE_HIGHS:
                runs = settings.find(analysis.range_place(low, high))
                (run,) = [run for run in runs if run.pair() == pair]
                ends[low].append(run.outcome("entropy"))
        gaps.append(np.mean(ends["0.98"]) - np.mean(ends["0.9"]))
    assert found.mean == pytest.approx(np.mean(gaps))
    expected = stats.ttest_1samp(gaps, 0)
    assert found.p == pytest.approx(expected.pvalue)
    assert found.half == pytest.approx(np.diff(expected.confidence_interval())[0] / 2)


# ---------------------------------------------------------------- the anatomy of an update
@pytest.fixture
def update():
    """300 tokens whose ratios spread around 1."""
    generator = torch.Generator().manual_seed(1)
    log_ratio = 0.3 * torch.randn(30, 10, generator=generator)
    advantages = torch.randn(30, generator=generator)
    mask = torch.ones(30, 10, dtype=torch.bool)
    return anatomy.Update(3, 7, log_ratio, advantages, mask)


def test_the_path_that_is_drawn_is_the_one_that_is_searched(update):
    """Kills: a path in another order, or with other masses than the search's."""
    for rho0 in (0.3, 0.45, 0.5, 0.55):
        search = bapo.ClipSearch(rho0=rho0)
        bounds = update.bounds(search)
        path = anatomy.search_path(update.masses(search), search)
        assert path.rho[0] == pytest.approx(float(bounds.rho_start))
        met = np.flatnonzero(path.rho >= rho0 - 1e-6)
        stop = met[0] if len(met) else -1
        assert path.low[stop] == pytest.approx(float(bounds.low))
        assert path.high[stop] == pytest.approx(float(bounds.high))
        assert path.rho[stop] == pytest.approx(float(bounds.rho))


def test_the_update_is_drawn_and_its_masses_add_up_to_one(update, tmp_path, kept):
    search = bapo.ClipSearch(rho0=float(update.bounds(bapo.ClipSearch()).rho_start) + 0.02)
    figure = anatomy.anatomy(update, search)
    plot.save(figure, tmp_path / "a.png")
    left = figure.axes[0]
    total = sum(np.abs(patch.get_data().values).sum() for patch in left.patches)
    assert total == pytest.approx(1)
    assert (tmp_path / "a.png").stat().st_size > 5000


def test_an_update_is_drawn_only_where_the_search_has_something_to_do():
    search = bapo.ClipSearch()

    def bounds(rho_start, low, reached):
        low = torch.tensor(low)
        return bapo.ClipBounds(
            low, torch.tensor(2.0), torch.tensor(0.451), torch.tensor(rho_start), reached
        )

    assert anatomy.something_to_do(bounds(0.44, 0.88, True), search)
    assert not anatomy.something_to_do(bounds(0.46, 0.88, True), search)
    assert not anatomy.something_to_do(bounds(0.44, 0.9, True), search)
    assert not anatomy.something_to_do(bounds(0.44, 0.8, True), search)
    assert not anatomy.something_to_do(bounds(0.44, 0.88, False), search)


def test_the_update_comes_from_train_py_s_own_loop(policy, tmp_path, monkeypatch):
    """One step of GRPO from an untrained policy: the masked tokens count nothing."""

    def grade(response: str, answer: str) -> bool:
        return len(response) % 2 == 0  # something that an untrained policy can reach

    monkeypatch.setattr(anatomy.countdown, "grade", grade)
    monkeypatch.setattr(anatomy, "something_to_do", lambda bounds, search: True)
    found = anatomy.find_update(Path(policy), bapo.ClipSearch(), 60, tmp_path, steps=1)
    assert (found.step, found.update) == (1, 1)
    assert found.log_ratio.shape == found.mask.shape
    assert float(found.log_ratio[~found.mask].abs().sum()) == 0.0
    monkeypatch.setattr(anatomy, "something_to_do", lambda bounds, search: False)
    with pytest.raises(ValueError, match="take another --seed"):
        anatomy.find_update(Path(policy), bapo.ClipSearch(), 60, tmp_path / "b", steps=1)
