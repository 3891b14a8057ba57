"""experiments/: valid commands, honest statistics, and pictures of packed metrics that show what they say."""

import json
import math
import random
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy import stats
from test_plot import overlaps, write_run

sys.path.append(str(Path(__file__).parent.parent / "experiments"))

import analysis
import figures
import hooks
import sweeps

import support.files
import support.options
import train
from support import plot


def of(pairs, outcome="mean@16"):
    """Runs from (warm start, seed) -> outcome."""
    return [plot.RunMetrics({"warm_start": w, "seed": s, "arm": "a@8"}, {outcome: x}, []) for (w, s), x in pairs.items()]


# ---------------------------------------------------------------- the commands
@pytest.mark.parametrize("quick", [False, True])
@pytest.mark.parametrize("name", sweeps.SWEEPS)
def test_every_sweep_is_a_valid_command_of_train_py(name, quick):
    sweep, pairs = sweeps.SWEEPS[name], []
    for line in sweeps.arguments(name, quick):
        options = train.Options(**support.options.parse(train.Options, line, ""))
        assert [arm.arm for arm in options.arms()] == sweep.methods.split()  # arms name themselves fully
        pairs += [(start, seed) for seed in options.seeds for start in options.warm_starts]
        for option, value in sweep.options.items():
            if not (quick and option == "steps"):
                found = getattr(options, option)
                assert found == value or found == [float(x) for x in str(value).split()]
        assert options.output_dir == sweeps.folder_of(name, quick)
        assert options.output_dir.startswith("runs/quick/" if quick else "runs/")
        assert options.max_new_tokens == {1: 16, 2: 28, 4: 53, 6: 80}[options.attempts]
    assert pairs == sweep.pairs[: 1 if quick else None]


def test_sweeps_lie_in_folders_of_their_own_and_share_their_warm_starts():
    folders = [sweeps.folder_of(name) for name in sweeps.SWEEPS]
    assert len(set(folders)) == len(folders) and {Path(folder).parent for folder in folders} == {Path("runs")}


def test_no_run_that_a_hypothesis_was_found_on_is_used_to_test_it():
    for name, sweep in sweeps.SWEEPS.items():
        for start, seed in sweep.pairs:
            assert start not in (0, 21, 22, 23) and seed not in {*range(10), *range(31, 36), 41, 42, 43, 44}, name


def test_every_start_of_the_default_experiment_has_a_seed_of_its_own():
    pairs = sweeps.SWEEPS["default"].pairs
    assert pairs == [(31, 51), (32, 52), (33, 53), (34, 54), (35, 55), (36, 56), (37, 57), (38, 58)]
    assert sweeps.SWEEPS["default/controls"].pairs == pairs[:5]


def test_bapo_may_pass_one_and_no_bound_is_at_one():
    options = train.Options(**support.options.parse(train.Options, sweeps.arguments("default")[0], ""))
    lows = next(arm for arm in options.arms() if arm.arm == "bapo-gate@8").search.lows()
    assert lows.max() > 1 and (lows - 1).abs().min() > 0.01


def test_only_missing_runs_are_carried_out_and_with_the_sweep_s_own_hooks(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    calls = []
    monkeypatch.setattr(train, "run_side_by_side", lambda work, jobs, steps=0, what="", **_: calls.append((work, steps)) or {})
    assert sweeps.make("rescue/yoked", 2, quick=True)
    (starts, _), (work, steps) = calls
    assert [Path(name).name for name in starts] == ["attempts4-steps1500-seed1"] and steps == 2
    assert [item[1] for item in work.values()] == [train.evaluate_policy, sweeps.SWEEPS["rescue/yoked"].carry_out]
    Path("runs/quick/rescue-yoked/bapo-gate@8-start1-seed10/model").mkdir()
    Path("runs/quick/rescue-yoked/start1.json").write_text("{}")
    assert sweeps.make("rescue/yoked", 2, quick=True) and calls[-1] == ({}, 0)


def test_an_unknown_experiment_is_refused_and_so_are_the_neighbours_before_their_screening(monkeypatch):
    monkeypatch.setattr(sweeps, "BEST", {})
    for name, problem in {"nonsense": "nonsense is none of default, rate", "objectives": "objectives-screen first"}.items():
        with pytest.raises(ValueError, match=problem):
            sweeps.main([name])


def test_the_neighbours_are_screened_and_compared_on_starts_and_seeds_of_their_own():
    used = sweeps.SWEEPS["four-attempts"].pairs
    for pairs in (sweeps.SCREEN, sweeps.FINAL):
        for position in (0, 1):  # starts, seeds
            assert not {pair[position] for pair in pairs} & {pair[position] for pair in used}
        used = used + pairs


# ---------------------------------------------------------------- hooks
def test_yoked_bounds_are_those_of_the_run_at_other_steps():
    rng = random.Random(0)
    lines = [{"step": s, "update": u, "low": rng.random(), "high": 1 + rng.random()} for s in range(1, 21) for u in (1, 2, 3)]
    lines = [line for line in lines if line["step"] != 7] + [{"step": 7, "update": 0}]
    given = hooks.permuted_bounds(lines, 20, seed=3)
    assert sorted(given) == [(s, u) for s in range(1, 21) for u in (1, 2, 3)]
    for update in (1, 2, 3):
        taken = [given[step, update] for step in range(1, 21)]
        there = [(line["low"], line["high"]) for line in lines if line["update"] == update]
        assert set(taken) == set(there)  # 19 pairs, and one of them again
        assert sum(pair == there[i] for i, pair in enumerate(taken[:6])) < 4
    assert given == hooks.permuted_bounds(lines, 20, seed=3) != hooks.permuted_bounds(lines, 20, seed=4)


def test_tokens_are_kept_with_the_sign_of_their_response_and_at_the_last_update_only(tmp_path, monkeypatch):
    mask = torch.tensor([[True, True, False], [True, True, True]])
    old = torch.log(torch.tensor([[0.5, 0.25, 1.0], [0.1, 0.2, 0.4]]))
    now = torch.log(torch.tensor([[0.25, 0.5, 1.0], [0.2, 0.2, 0.2]]))
    batch = SimpleNamespace(rollouts=SimpleNamespace(mask=mask, log_probs=old), advantages=torch.tensor([-1.5, 0.5]))
    monkeypatch.setattr(
        train, "carry_out", lambda run, task, watch: [watch(9, u, batch, now, torch.full((2, 3), 0.7)) for u in (1, 2)]
    )
    hooks.keep_tokens(SimpleNamespace(folder=tmp_path, arm=SimpleNamespace(epochs=2, parts=1)), None)
    (line,) = support.files.read_lines(tmp_path / "tokens.jsonl")
    assert line["step"] == 9 and line["sign"] == [-1, -1, 1, 1, 1] and line["ratio"] == [0.5, 2, 2, 1, 0.5]
    assert line["rollout_probability"] == [0.5, 0.25, 0.1, 0.2, 0.4] and line["entropy"] == [0.7] * 5


def test_slow_fast_moves_back_before_the_last_update_of_every_batch(monkeypatch):
    """Against a literal loop, over three batches. Kills: moving after the last update, w0 of the first batch for all."""
    weight = torch.tensor([1.0, -2.0], dtype=torch.float64, requires_grad=True)
    slopes = torch.randn(12, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def train_on(optimizer):
        for slope in slopes:
            weight.grad = slope.clone()
            optimizer.step()

    monkeypatch.setattr(train, "carry_out", lambda run, task: train_on(torch.optim.SGD([weight], lr=0.1)))
    hooks.slow_fast(SimpleNamespace(arm=SimpleNamespace(epochs=2, parts=2)), None, alpha=0.6)
    expected = torch.tensor([1.0, -2.0], dtype=torch.float64)
    for batch in slopes.view(3, 4, 2):
        first = expected.clone()
        for slope in batch[:3]:
            expected = expected - 0.1 * slope
        expected = first + 0.6 * (expected - first) - 0.1 * batch[3]
    torch.testing.assert_close(weight.detach(), expected)
    train_on(torch.optim.SGD([weight], lr=0.1))  # and no other optimizer is touched afterwards
    torch.testing.assert_close(weight.detach(), expected - 0.1 * slopes.sum(0))


# ---------------------------------------------------------------- statistics
def test_holm_s_correction_is_the_step_down_procedure():
    def rejected(p_values, alpha):  # the procedure, literally
        found, left = set(), sorted(range(len(p_values)), key=lambda i: p_values[i])
        while left and p_values[left[0]] <= alpha / len(left):
            found.add(left.pop(0))
        return found

    rng = random.Random(0)
    for _ in range(300):
        p_values = [round(rng.random() ** 3, rng.choice([1, 2, 6])) for _ in range(rng.randint(1, 7))]
        corrected = analysis.holm(p_values)
        for alpha in [rng.random() for _ in range(20)] + [0.05]:
            if all(abs(p - alpha) > 1e-9 for p in corrected):
                assert {i for i, p in enumerate(corrected) if p <= alpha} == rejected(p_values, alpha)
    assert analysis.holm([0.01, math.nan, 0.04, 0.03])[::2] == pytest.approx([0.03, 0.06]) and analysis.holm([]) == []
    assert math.isnan(analysis.holm([0.01, math.nan])[1])


def test_a_difference_is_paired_and_averaged_within_warm_starts():
    rng = random.Random(1)
    pairs = [(start, seed) for start in range(1, 6) for seed in (10, 11)]
    one, other = ({pair: rng.random() for pair in pairs} for _ in range(2))
    found = analysis.difference(of(one), of(dict(reversed(other.items()))), "mean@16")
    gaps = [np.mean([one[start, seed] - other[start, seed] for seed in (10, 11)]) for start in range(1, 6)]
    expected = stats.ttest_1samp(gaps, 0)
    interval = expected.confidence_interval(0.95)
    assert (found.mean - found.half, found.mean + found.half) == pytest.approx((interval.low, interval.high))
    assert found.p == pytest.approx(expected.pvalue) and found.pairs == 10
    narrower = analysis.difference(of(one), of(other), "mean@16", 0.90)
    assert narrower.half == pytest.approx(interval_half(expected, 0.90)) and narrower.p == pytest.approx(found.p)
    only = {pair: x for pair, x in one.items() if pair[1] == 10}
    assert analysis.difference(of(one), of(only), "mean@16").pairs == 5
    assert analysis.difference(of(one), of({}), "mean@16").pairs == 0


def interval_half(test, level):
    return (test.confidence_interval(level).high - test.confidence_interval(level).low) / 2


def test_a_positive_difference_means_that_the_first_arm_has_more():
    more, less = ({(start, 10): x + 0.01 * start for start in (1, 2, 3)} for x in (0.5, 0.2))
    assert str(analysis.difference(of(more), of(less), "mean@16")).startswith("+0.300")
    assert str(analysis.difference(of({(1, 10): 0.1}), of({(1, 10): 0.3}), "mean@16")) == "-0.200"


def pack_arms(results, folder, ends, start=0.4):
    """Packed runs of 5 warm starts; ends: arm -> mean@16 of each."""
    source = results.parent / "runs" / folder.replace("/", "-")
    for arm, of_starts in ends.items():
        for warm_start, end in enumerate(of_starts, 1):
            line = {"reward": end, "entropy": 0.3, "kl": 0.01, "grad_norm": 0.2}
            final = {"greedy": end, "mean@16": end, "pass@8": end + 0.3}
            write_run(source, arm, warm_start, 10, [[line] * int(arm.split("@")[1])] * 2, final)
            (source / f"start{warm_start}.json").write_text(json.dumps({"mean@16": start, "pass@8": 0.7}))
    plot.pack(source, results / folder)


def rows_of(rows):
    return {row[0]: dict(zip(rows[0], row)) for row in rows[1:]}


def test_collapse_and_following_on_policy_are_what_was_named_before(tmp_path):
    ends = {"grpo@1": [0.50, 0.51, 0.49, 0.52, 0.48], "grpo@8": [0.36, 0.34, 0.34, 0.34, 0.34]}
    ends |= {"bapo-gate@8": [0.51, 0.50, 0.50, 0.51, 0.49], "balanced@8": [0.36, 0.36, 0.36, 0.34, 0.36]}
    ends |= {"1.02-3.0@8": [0.40, 0.61, 0.40, 0.60, 0.49]}
    pack_arms(tmp_path / "results", "default", ends)
    settings = analysis.Settings(tmp_path / "results")
    rows = rows_of(analysis.verdicts(settings, settings.places("default")))
    assert {arm.split()[1]: (row["collapsed"], row["runs that did"], row["follows it"]) for arm, row in rows.items()} == {
        "grpo@1": ("no", "0", "yes"),
        "grpo@8": ("yes", "4", "no"),  # -0.056
        "bapo-gate@8": ("no", "0", "yes"),
        "balanced@8": ("no", "1", "no"),  # -0.044
        "1.02-3.0@8": ("no", "0", "no"),  # the mean is the same, the interval is wide
    }
    assert rows["default grpo@8"]["mean@16: end − start"].startswith("-0.056 ± ")
    rows = rows_of(
        analysis.differences(settings, [("default bapo-gate@8", "default grpo@8"), ("default grpo@1", "default grpo@8")])
    )
    first = rows["default bapo-gate@8 − default grpo@8"]
    gaps = [a - b for a, b in zip(ends["bapo-gate@8"], ends["grpo@8"])]
    p_values = [stats.ttest_1samp(gaps, 0).pvalue, stats.ttest_rel(ends["grpo@1"], ends["grpo@8"]).pvalue]
    assert first["mean@16"].startswith("+0.158 ± ") and first["pairs"] == "5"
    assert float(first["p (Holm)"].replace("< 0.001", "0")) == pytest.approx(max(2 * min(p_values), p_values[0]), abs=6e-4)


def test_every_arm_is_compared_within_its_own_setting_and_neighbours_at_each_one_s_best_rate():
    loaded = dict.fromkeys(["objectives/0.0001 grpo@8", "objectives/0.0002 bapo-gate@8", "objectives/sfpo grpo@8"])
    settings = SimpleNamespace(places=lambda experiment: list(loaded)[::-1])
    for place, arm, found in (
        ("rescue/yoked bapo-gate@8", "grpo@8", "four-attempts grpo@8"),
        ("rescue/attempts-1 grpo+share0.30@8", "grpo@8", "map-attempts/1 grpo@8"),
        ("map-lr/0.0001 bapo-gate@8", "grpo@1", "map-lr/0.0001 grpo@1"),
        ("map-reuse bapo-gate@2", "grpo@8", "four-attempts grpo@8"),
        ("default/controls clip-higher@8", "grpo@8", "default grpo@8"),
        ("scheme/yoked bapo-main@2x4", "grpo@2x4", "scheme grpo@2x4"),
        ("fig9-long bapo@8", "grpo@8", "fig9-long grpo@8"),
        ("objectives/0.0004 cispo@8", "grpo@8", "objectives/0.0001 grpo@8"),
        ("objectives/sfpo grpo@8", "bapo-gate@8", "objectives/0.0002 bapo-gate@8"),
        ("objectives/partial a-3po@8", "grpo@8", "objectives/partial grpo@8"),
    ):
        assert analysis.reference(settings, place, arm) == found


def test_bapo_is_compared_with_grpo_at_as_many_updates(tmp_path):
    pack_arms(tmp_path / "results", "map-reuse", {"grpo@4": [0.3, 0.4], "bapo-gate@4": [0.5, 0.5], "bapo-gate@2": [0.1, 0.2]})
    text = analysis.document(analysis.Settings(tmp_path / "results"), "map-reuse").partition("at as many updates")[2]
    assert "| map-reuse bapo-gate@4 − map-reuse grpo@4 | 2 | +0.150 ± " in text and "bapo-gate@2" not in text


def test_the_best_rate_is_that_of_the_highest_mean_in_the_screening(tmp_path):
    assert analysis.best_rates(tmp_path / "results") == {}
    screening = {"0.0001": {"a@8": [0.5, 0.3], "b@8": [0.1, 0.1]}, "0.0004": {"a@8": [0.6, 0.1], "b@8": [0.3, 0]}}
    for rate, ends in screening.items():
        pack_arms(tmp_path / "results", f"objectives-screen/{rate}", ends)
    assert analysis.best_rates(tmp_path / "results") == {}  # half a screening is none
    pack_arms(tmp_path / "results", "objectives-screen/0.0002", {"a@8": [0.1, 0.1], "b@8": [0.1, 0.0]})
    assert analysis.best_rates(tmp_path / "results") == {"a@8": 1e-4, "b@8": 4e-4}
    first, second = analysis.document(analysis.Settings(tmp_path / "results"), "objectives-screen").splitlines()[-2:]
    assert first == "| a@8 | 0.400 (1) | 0.100 (2) | 0.350 (1) | 0.650 | 0.300 | 0.0001 |"
    assert second == "| b@8 | 0.100 (2) | 0.050 (2) | 0.150 (2) | 0.450 | 0.300 | 0.0004 |"


def test_the_bench_shows_each_neighbour_at_its_best_rate_and_at_the_last_one_beside_it(tmp_path):
    """Kills: the screening beside a run at another rate, SFPO among the methods, a difference from the wrong arm."""
    results = tmp_path / "results"
    for rate, end in {"0.0001": 0.4, "0.0002": 0.3, "0.0004": 0.2}.items():
        pack_arms(results, f"objectives-screen/{rate}", {"a@8": [0.5 - end] * 2, "grpo@8": [end] * 2, "bapo-gate@8": [end] * 2})
    pack_arms(results, "objectives/0.0001", {"grpo@8": [0.1, 0.4, 0.6], "bapo-gate@8": [0.4, 0.6, 0.9]})
    pack_arms(results, "objectives/0.0004", {"a@8": [0.3, 0.4, 0.2]})
    pack_arms(results, "objectives/sfpo", {"grpo@8": [0.9, 0.9, 0.9]})
    settings = analysis.Settings(results)
    header, *rows = analysis.bench(settings)
    assert [row[:2] for row in rows] == [["bapo-gate@8", "0.0001"], ["grpo@8", "0.0001"], ["a@8", "0.0004"], ["grpo@8", "sfpo"]]
    gate, grpo, other, sfpo = (dict(zip(header, row)) for row in rows)
    assert [row["mean@16"][:5] for row in (gate, grpo, other, sfpo)] == ["0.633", "0.367", "0.300", "0.900"]
    assert [row["− grpo@8 (Holm)"][:6] for row in (gate, grpo, other, sfpo)] == ["+0.267", "–", "-0.067", "+0.533"]
    assert [row["− bapo-gate@8 (Holm)"][:6] for row in (gate, grpo, other, sfpo)] == ["–", "-0.267", "-0.333", "+0.267"]
    assert [row["mean@16 at 0.0004"] for row in (gate, grpo, other, sfpo)] == ["0.200 (2)", "0.200 (2)", "0.300 (2)", "–"]
    assert [row["collapsed"] for row in (gate, grpo, other, sfpo)] == ["0 of 3", "1 of 3", "2 of 3", "0 of 3"]
    pairs = [
        (f"objectives/{place}", "objectives/0.0001 grpo@8") for place in ("0.0001 bapo-gate@8", "0.0004 a@8", "sfpo grpo@8")
    ]
    p_values = [row[3] for row in analysis.differences(settings, pairs)[1:]]
    assert [row["− grpo@8 (Holm)"][-6:-1] for row in (gate, other, sfpo)] == p_values


# ---------------------------------------------------------------- pictures
COLUMNS = "reward entropy low high grad_norm kl gradient_share negatives_with_gradient clip_fraction_high clip_fraction_low"
COLUMNS += " positive_tokens length_correct length_wrong entropy_rule entropy_now"


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Packed metrics of every sweep, made up: two warm starts, three steps."""
    folder = tmp_path_factory.mktemp("made-up")
    bench = {"0.0001": "grpo@8 cispo@8", "0.0004": "grpo@1 m2po@8", "sfpo": "grpo@8", "partial": "grpo@8 a-3po@8"}
    bench = {f"objectives/{name}": sweeps.Sweep(arms) for name, arms in bench.items()}
    for name, sweep in (sweeps.SWEEPS | bench).items():
        source = folder / "runs" / name.replace("/", "-")
        for arm in sweep.methods.split():
            for start in (1, 2):
                rng = random.Random(f"{name}/{arm}/{start}")
                steps = [
                    [{c: 0.1 + rng.random() for c in COLUMNS.split()} for _ in range(int(arm.split("@")[1]))] for _ in range(3)
                ]
                final = {"greedy": rng.random(), "mean@16": rng.random(), "pass@8": rng.random()}
                write_run(source, arm, start, 10, steps, final)
                (source / f"start{start}.json").write_text(json.dumps({"mean@16": start / 10, "pass@8": 0.9}))
        plot.pack(source, folder / "results" / name, sweep.more)
    rng, lines = random.Random(0), []
    for step in range(1, 30):
        ratio = [math.exp(rng.gauss(0, 0.5)) for _ in range(40)]
        line = {"step": step, "sign": [rng.choice([-1.0, 1.0]) for _ in range(40)], "ratio": ratio}
        lines.append(
            line | {name: [rng.random() for _ in range(40)] for name in ("probability", "rollout_probability", "entropy")}
        )
    (folder / "results/figures/tokens/tokens.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder / "results"


@pytest.mark.parametrize("name", figures.PICTURES)
def test_every_picture_is_drawn_from_packed_metrics(name, results, tmp_path, monkeypatch):
    figure, close = figures.PICTURES[name](analysis.Settings(results)), plot.plt.close
    monkeypatch.setattr(plot.plt, "close", lambda figure: None)
    plot.save(figure, tmp_path / "a.png", "not a result: --quick")
    assert figure.axes and all(axis.has_data() for axis in figure.axes) and not overlaps(figure)
    assert "not a result: --quick" in figure.get_suptitle() and (tmp_path / "a.png").stat().st_size > 5000
    close(figure)


def lines_of(figure):
    """Title of a panel -> name -> what its curve shows."""
    return {axis.get_title(loc="left"): {line.get_label(): line.get_ydata() for line in axis.lines} for axis in figure.axes}


def mean_over_starts(results, place, metric):
    runs = analysis.Settings(results).find(place)
    return np.mean([run.per_step(metric) for run in runs], 0)


def test_the_shares_of_figure_4_have_the_right_signs(results):
    figure = figures.by_sign(analysis.Settings(results), "figure4")
    panels = lines_of(figure)
    for arm in ("grpo@1", "grpo@8"):
        for title, metric in (("share of the gradient", "gradient_share"), ("share of the tokens", "positive_tokens")):
            positive = mean_over_starts(results, f"default {arm}", metric)
            np.testing.assert_allclose(panels[f"{title}, {arm}"]["A > 0"], positive)
            np.testing.assert_allclose(panels[f"{title}, {arm}"]["A < 0"], 1 - positive)
    plot.plt.close(figure)


def test_the_lengths_of_figure_6_and_the_curves_of_figure_2_are_their_own(results):
    figure = figures.by_sign(analysis.Settings(results), "figure6")
    panels = lines_of(figure)
    for arm in ("grpo@1", "grpo@8"):
        for name, metric in (("A > 0", "length_correct"), ("A < 0", "length_wrong")):
            expected = mean_over_starts(results, f"default {arm}", metric)
            np.testing.assert_allclose(panels[f"response length, all samples, {arm}"][name], expected)
    plot.plt.close(figure)
    figure = figures.curves(analysis.Settings(results), "figure2")
    clipped = lines_of(figure)["share of clipped tokens"]
    sides = [mean_over_starts(results, "map-reuse grpo@4", f"clip_fraction_{side}") for side in ("high", "low")]
    np.testing.assert_allclose(clipped["grpo@4"], sides[0] + sides[1])
    assert list(clipped) == ["grpo@1", "grpo@2", "grpo@4", "grpo@8"]
    plot.plt.close(figure)


def test_the_map_shows_gains_at_their_places(results):
    figure, settings = figures.PICTURES["map-rate"](analysis.Settings(results)), analysis.Settings(results)
    axis = figure.axes[0]
    assert axis.get_xlabel() == "learning rate" and [t.get_text() for t in axis.get_xticklabels()] == [
        "5e-05",
        "0.0001",
        "0.0002",
        "0.0004",
    ]
    shown = {line.get_label(): line.get_ydata() for line in axis.lines}
    for i, folder in enumerate(["map-lr/5e-05", "map-lr/0.0001", "map-lr/0.0002", "default"]):
        gains = [run.final["mean@16"] - float(run.pair()[0]) / 10 for run in settings.find(f"{folder} bapo-gate@8")]
        assert shown["bapo-gate@8"][i] == pytest.approx(np.mean(gains))
    bars = [segment for bars in axis.collections for segment in bars.get_segments()]  # in the order of the arms
    arms = [line.get_label() for line in axis.lines if not line.get_label().startswith("_")]
    (_, low), (_, high) = bars[4 * arms.index("bapo-gate@8") + 3]  # the last one, of `gains`
    assert (high - low) / 2 == pytest.approx(stats.t.ppf(0.975, 1) * np.std(gains, ddof=1) / 2**0.5)
    plot.plt.close(figure)


def test_the_dose_is_shown_at_its_share(results):
    figure, settings = figures.figure_dose(analysis.Settings(results)), analysis.Settings(results)
    gain, entropy = ({line.get_label(): line.get_xydata() for line in axis.lines} for axis in figure.axes)
    for task, places in figures.DOSES.items():
        assert [x for x, _ in gain[task]] == [x for x, _ in entropy[task]] == [*places]
        for (x, place), (_, shown), (_, ended) in zip(places.items(), gain[task], entropy[task]):
            runs = settings.find(place)
            assert shown == pytest.approx(np.mean([run.final["mean@16"] - float(run.pair()[0]) / 10 for run in runs]))
            assert ended == pytest.approx(np.mean([run.outcome("entropy") for run in runs]))
            named = place.partition("share")[2].partition("@")[0]
            assert not named or float(named) == x
    plot.plt.close(figure)


def test_the_rule_s_pairs_are_successive_updates_on_one_batch(results):
    runs = analysis.Settings(results).find("default grpo@8")
    predicted, actual = figures.rule_pairs(runs[:1])
    assert len(predicted) == 3 * 7
    first, second = runs[0].lines[:2]
    assert (predicted[0], actual[0]) == pytest.approx((-first["entropy_rule"], second["entropy_now"] - first["entropy_now"]))


def test_drawing_needs_no_run_and_draws_what_is_there(results, tmp_path, capsys):
    for name in ("default", "figures/tokens"):
        for path in (results / name).iterdir():
            (tmp_path / name).mkdir(parents=True, exist_ok=True)
            if path.is_file():
                (tmp_path / name / path.name).write_bytes(path.read_bytes())
    sweeps.draw(tmp_path, "not a result: --quick")
    pictures = {path.stem for path in (tmp_path / "figures").glob("*.png")}
    assert pictures == {"figure4", "figure5", "figure6", "figure8", "figure10", "figure11", "rule"}
    assert (tmp_path / "default/curves.png").exists() and "map-rate: of map-lr/5e-05 {}" in capsys.readouterr().out
    text = (tmp_path / "default/differences.md").read_text()
    assert "## Every arm" in text and "## Against grpo@8" in text and "default bapo-gate@8 − default grpo@8" in text
