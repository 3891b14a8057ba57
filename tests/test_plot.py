"""plot.py: means, intervals, pictures and the packed copy, from run folders written by hand."""

import gzip
import json
import math
import re

import numpy as np
import pytest
from scipy import stats

from support import plot

SEARCH = {"rho0": 0.45, "low_start": 0.8}


def write_run(folder, arm, start, seed, of_steps, final=None, **settings):
    """A run's folder as train.py leaves it: of_steps are lists of lines, whose step and update are added here."""
    run = folder / (f"{arm}-start{start}-seed{seed}" if start is not None else f"{arm}-seed{seed}")
    run.mkdir(parents=True)
    config = {"arm": arm, "seed": seed, "epochs": int(arm.split("@")[1]), "search": SEARCH, "learning_rate": 4e-4, "steps": 80}
    config |= ({"warm_start": start} if start is not None else {}) | settings
    (run / "config.json").write_text(json.dumps({"config": config, "versions": {}}))
    lines = [
        {
            "step": step,
            **({"update": 0} if line.pop("untrained", False) else {"update": update, "updates": len(of_step)}),
            **line,
        }
        for step, of_step in enumerate(of_steps, 1)
        for update, line in enumerate(of_step, 1)
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if final:
        (run / "final.json").write_text(json.dumps(final))
    return run


def two_updates(reward, of_run=0.0):
    """A step with two updates, gradient norms 1 and 3; `of_run` shifts what differs between runs."""
    line = {
        "reward": reward,
        "entropy": 0.5,
        "gradient_share": 0.4 + of_run,
        "negatives_with_gradient": 0.9,
        "kl": 0.0012,
        "low": 0.8,
    }
    line |= {"length_correct": 20.0, "length_wrong": None, "clip_fraction_high": 0.01, "clip_fraction_low": 0.02}
    return [line | {"high": 2.2, "grad_norm": 1.0}, line | {"high": 3.2, "grad_norm": 3.0}]


@pytest.fixture
def folder(tmp_path):
    """bapo@2: one run. grpo@2: two warm starts, of which the first has two seeds; reward jumps before the last ten steps."""
    runs = tmp_path / "runs"
    for start, seed, end, greedy in ((1, 0, 0.5, 0.2), (1, 1, 0.7, 0.4), (2, 0, 0.8, 0.9)):
        steps = [two_updates(0.1, 0.1 * seed) for _ in range(20)] + [two_updates(end, 0.1 * seed) for _ in range(10)]
        write_run(runs, "grpo@2", start, seed, steps, {"greedy": greedy, "mean@16": greedy, "pass@8": 0.9, "pass@16": 0.95})
    write_run(runs, "bapo@2", 1, 0, [two_updates(0.3) for _ in range(30)], {"greedy": 0.5, "mean@16": 0.5, "pass@8": 0.6})
    for start, reached in ((1, 0.25), (2, 0.35)):
        (runs / f"start{start}.json").write_text(json.dumps({"greedy": 0.1, "mean@16": reached, "pass@8": 0.8}))
    return runs


def rows_of(lines):
    """arm -> column -> cell of a table's lines."""
    header, _, *rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("|")]
    return {row[0]: dict(zip(header, row)) for row in rows}


@pytest.fixture
def drawn(monkeypatch):
    """The figures that were saved, kept open: (figure, path)."""
    figures, close = [], plot.plt.close
    monkeypatch.setattr(plot.plt, "close", figures.append)
    yield figures
    for figure in figures:
        close(figure)


def test_the_name_of_a_curve_stands_where_it_ends(tmp_path, monkeypatch):
    """Kills: heights by the limits that an axis had before the last curve."""
    figure, axis = plot.plt.subplots()
    for label, end in (("up", 10), ("flat", 5)):
        axis.plot([0, 1], [5, end], label=label)
    monkeypatch.setattr(plot.plt, "close", lambda figure: None)
    plot.save(figure, tmp_path / "a.png")
    bottom, top = axis.get_ylim()
    heights = {text.get_text(): text.get_position()[1] for text in axis.texts}
    assert heights == {
        "up": pytest.approx((10 - bottom) / (top - bottom), abs=0.02),
        "flat": pytest.approx((5 - bottom) / (top - bottom), abs=0.02),
    }
    monkeypatch.undo()
    plot.plt.close(figure)


def overlaps(figure):
    """Pairs of names (of curves and rows) that cover each other."""
    figure.canvas.draw()  # at its own resolution, not the file's
    texts = [text for axis in figure.axes for text in axis.texts]
    boxes = [plot.matplotlib.text.Text.get_window_extent(text) for text in texts]
    return [
        (a.get_text(), b.get_text())
        for i, (a, box) in enumerate(zip(texts, boxes))
        for b, other in zip(texts[i + 1 :], boxes[i + 1 :])
        if box.overlaps(other)
    ]


# ---------------------------------------------------------------- numbers
def runs_of(pairs):
    return [plot.RunMetrics({"warm_start": start, "seed": seed}, {}, []) for start, seed in pairs]


def test_an_interval_is_student_s_over_the_means_of_warm_starts():
    rng = np.random.default_rng(0)
    pairs = [(start, seed) for start in (3, 1, 2) for seed in (0, 1)] + [(1, 2)]
    values = rng.normal(size=(len(pairs), 4))
    mean, half = plot.interval(values, runs_of(pairs))
    for column in range(4):
        of_starts = [np.mean([v for v, pair in zip(values[:, column], pairs) if pair[0] == start]) for start in (1, 2, 3)]
        low, high = stats.t.interval(0.95, 2, np.mean(of_starts), stats.sem(of_starts))
        assert (mean[column] - half[column], mean[column] + half[column]) == pytest.approx((low, high))
    _, narrower = plot.interval(values, runs_of(pairs), 0.90)
    assert narrower == pytest.approx(half * stats.t.ppf(0.95, 2) / stats.t.ppf(0.975, 2))


def test_with_one_warm_start_or_none_an_interval_is_over_seeds():
    values = [0.1, 0.4, 0.3]
    low, high = stats.t.interval(0.95, 2, np.mean(values), stats.sem(values))
    for start in (7, ""):
        mean, half = plot.interval(values, runs_of([(start, seed) for seed in range(3)]))
        assert (mean - half, mean + half) == pytest.approx((low, high))


def test_one_run_has_no_interval_and_missing_values_do_not_count():
    mean, half = plot.interval([0.5], runs_of([(1, 0)]))
    assert mean == 0.5 and np.isnan(half)
    mean, half = plot.interval([[0.5, math.nan], [math.nan, math.nan], [0.9, math.nan]], runs_of([(1, 0), (2, 0), (3, 0)]))
    assert mean[0] == pytest.approx(0.7) and half[0] == pytest.approx(stats.t.ppf(0.975, 1) * 0.2) and np.isnan(mean[1])


def test_the_table_states_ends_percentiles_and_intervals_over_warm_starts(folder):
    rows = rows_of(plot.report(folder))
    half = stats.t.ppf(0.975, 1) * stats.sem([0.6, 0.8])  # steps 21-30; the mean over seeds first
    grpo = rows["grpo@2"]
    assert grpo["reward at end"] == f"0.700 ± {half:.3f}" and grpo["runs"] == "3"
    assert grpo["entropy at end"] == "0.500 ± 0.000" and grpo["KL per update"] == "0.0012 ± 0.0000"
    assert grpo["gradient norm, 95th percentile"] == "3.000 ± 0.000" and grpo["negatives with gradient"] == "0.900 ± 0.000"
    assert grpo["gradient share"] == f"0.425 ± {stats.t.ppf(0.975, 1) * 0.025:.3f}"
    assert grpo["mean low"] == "0.800 ± 0.000" and grpo["mean high"] == "2.700 ± 0.000"
    assert grpo["held-out mean@16"] == f"0.600 ± {stats.t.ppf(0.975, 1) * 0.3:.3f}" and "held-out pass@16" not in grpo
    assert rows["bapo@2"]["reward at end"] == "0.300" and rows["bapo@2"]["held-out pass@8"] == "0.600"
    assert rows["warm start"]["runs"] == "2" and rows["warm start"]["held-out mean@16"].startswith("0.300 ± ")
    assert list(rows) == ["warm start", "grpo@2", "bapo@2"]
    assert (folder / "table.md").read_text().splitlines() == plot.report(folder)


def test_the_percentile_is_over_all_updates_of_a_run():
    norms = [float(x) for x in range(100)]
    lines = [{"step": i // 4 + 1, "update": i % 4 + 1, "grad_norm": norm} for i, norm in enumerate(norms)]
    assert plot.RunMetrics({}, {}, lines).outcome("grad_norm") == pytest.approx(94.05)


def test_an_arm_that_was_never_trained_is_said_to_be(tmp_path):
    untrained = [[{"untrained": True, "reward": 0.0, "entropy": 0.4}]] * 3
    write_run(tmp_path, "grpo@2", 1, 0, [[dict(line) for line in step] for step in untrained])
    write_run(tmp_path, "grpo@2", 1, 1, [two_updates(0.2)])
    row = rows_of(plot.report(tmp_path))["grpo@2"]
    assert row["runs"].startswith("2 (1 never trained") and row["reward at end"].startswith("0.100")
    assert "never" not in "".join(plot.table({"a@2": plot.load(tmp_path)[0]["grpo@2"][1:]}, {}))


def test_runs_of_an_own_model_need_no_warm_start(tmp_path):
    for seed in (0, 1):
        write_run(tmp_path, "grpo@2", None, seed, [two_updates(0.2)], {"greedy": 0.1, "mean@4": 0.2, "pass@4": 0.3})
    (tmp_path / "start.json").write_text(json.dumps({"greedy": 0.1, "mean@4": 0.1, "pass@4": 0.3}))
    rows = rows_of(plot.report(tmp_path))
    assert rows["warm start"]["held-out mean@4"] == "0.100" and rows["grpo@2"]["held-out pass@4"] == "0.300 ± 0.000"


def test_a_step_is_reduced_over_its_updates_and_missing_values_stay_missing():
    lines = [{"step": 1, "x": 1.0}, {"step": 1, "x": 3.0}, {"step": 2, "x": None}, {"step": 3}]
    run = plot.RunMetrics({}, {}, lines)
    np.testing.assert_array_equal(run.per_step("x"), [2.0, math.nan, math.nan])
    np.testing.assert_array_equal(run.per_step("x", np.max), [3.0, math.nan, math.nan])
    assert run.outcome("x") == 2.0 and math.isnan(run.outcome("y")) and math.isnan(run.outcome("mean@16"))


# ---------------------------------------------------------------- files
def test_a_packed_copy_gives_the_same_table_and_the_same_bytes_twice(folder, tmp_path):
    plot.pack(folder, tmp_path / "a", {"clip_fraction_low": 3})
    plot.pack(folder, tmp_path / "b", {"clip_fraction_low": 3})
    for name in ("runs.json", "metrics.csv.gz"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    assert plot.report(tmp_path / "a") == plot.report(folder)
    arms, starts = plot.load(tmp_path / "a")
    for arm, runs in plot.load(folder)[0].items():
        assert [run.config for run in runs] == [run.config for run in arms[arm]]
        assert [run.final for run in runs] == [run.final for run in arms[arm]]
    first, second = arms["grpo@2"][0].lines[:2]
    assert first["reward"] == 0.1 and "reward" not in second and second["clip_fraction_low"] == 0.02
    assert "length_wrong" not in first and "clip_fraction_high" not in first
    assert starts == {
        "1": {"greedy": 0.1, "mean@16": 0.25, "pass@8": 0.8},
        "2": {"greedy": 0.1, "mean@16": 0.35, "pass@8": 0.8},
    }


def test_packing_rounds_to_significant_digits(tmp_path):
    run = write_run(tmp_path / "runs", "grpo@1", 1, 0, [[{"reward": 0.123456789, "kl": 0.00123456, "grad_norm": 1234.567}]])
    plot.pack(run.parent, tmp_path / "packed")
    (line,) = plot.load(tmp_path / "packed")[0]["grpo@1"][0].lines
    assert (line["reward"], line["kl"], line["grad_norm"]) == (0.12346, 0.00123, 1235)


@pytest.mark.parametrize("content", ['{"step": 1, "upd\n', "null and void\n", "\0" * 50 + "\n"])
def test_a_damaged_line_is_refused_by_file_and_line(folder, content):
    path = folder / "grpo@2-start1-seed1" / "metrics.jsonl"
    lines = path.read_text().splitlines(True)
    path.write_text("".join(lines[:3]) + content + "".join(lines[3:]))
    with pytest.raises(ValueError, match=re.escape(str(path)) + ".*line 4"):
        plot.report(folder)


def test_an_unfinished_last_line_is_left_out_of_a_running_run_only(folder):
    path = folder / "grpo@2-start1-seed1" / "metrics.jsonl"
    with open(path, "a") as file:
        file.write('{"step": 31, "rew')
    with pytest.raises(ValueError, match=re.escape(str(path)) + ".*line 61"):
        plot.load(folder)
    path.with_name("final.json").unlink()
    arms, _ = plot.load(folder)
    assert [len(run.lines) for run in arms["grpo@2"]] == [60, 60, 60]
    path.write_text('{"step": 1, "rew')  # nothing is finished yet
    assert [len(run.lines) for run in plot.load(folder)[0]["grpo@2"]] == [60, 60]


@pytest.mark.parametrize("duplicate", [True, False])
def test_updates_that_are_missing_or_there_twice_are_refused(folder, duplicate):
    path = folder / "bapo@2-start1-seed0" / "metrics.jsonl"
    lines = path.read_text().splitlines(True)
    path.write_text("".join(lines[:5] + lines[4 if duplicate else 6 :]))
    with pytest.raises(ValueError, match=re.escape(str(path))):
        plot.load(folder)


def test_a_damaged_packed_copy_is_refused_by_file_and_line(folder, tmp_path):
    plot.pack(folder, tmp_path)
    path = tmp_path / "metrics.csv.gz"
    whole = path.read_bytes()
    path.write_bytes(whole[:-20])
    with pytest.raises(ValueError, match=re.escape(str(path))):
        plot.load(tmp_path)
    lines = gzip.decompress(whole).decode().splitlines(True)
    for damaged in ("grpo@2-start1-seed0,1,1,0.5\n", lines[4].replace("0.9", "x"), lines[4].replace("grpo", "oprg")):
        path.write_bytes(gzip.compress("".join([*lines[:4], damaged, *lines[5:]]).encode()))
        with pytest.raises(ValueError, match=re.escape(str(path)) + ", line 5"):
            plot.load(tmp_path)


@pytest.mark.parametrize("setting", [{"max_new_tokens": 80}, {"learning_rate": 1e-4}, {"temperature": 0.9}, {"steps": 40}])
def test_runs_that_differ_in_more_than_the_arm_do_not_share_a_table(folder, setting):
    write_run(folder, "grpo@4", 1, 0, [[{"reward": 0.5}]], epochs=4, parts=2, share=0.4, aggregation="sequence-mean")
    plot.load(folder)
    write_run(folder, "grpo@1", 1, 0, [[{"reward": 0.5}]], **setting)
    with pytest.raises(ValueError, match=f"grpo@1-start1-seed0 differ .*{next(iter(setting))}"):
        plot.report(folder)


def test_an_empty_folder_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no metrics"):
        plot.report(tmp_path)


# ---------------------------------------------------------------- pictures
def test_every_panel_shows_its_own_metric(folder, drawn):
    for arm, start in (("grpo@2", 3), ("bapo@2", 2)):  # a trend of its own in every metric
        steps = [
            [{**line, "reward": 0.01 * t, "entropy": 1 - 0.02 * t, "gradient_share": 0.5 + 0.01 * t} for line in two_updates(0)]
            for t in range(30)
        ]
        write_run(folder, arm, start, 0, steps, {"mean@16": 0.5, "greedy": 0.5, "pass@8": 0.5})
    plot.report(folder)
    arms, _ = plot.load(folder)
    panels = {axis.get_title(loc="left"): axis for axis in drawn[0].axes}
    for title, metric, reduce in (
        ("reward (mean of 5 steps)", "reward", np.mean),
        ("entropy (nats per token)", "entropy", np.mean),
        ("gradient norm (95th percentile)", "grad_norm", lambda values: np.percentile(values, 95)),
        ("positive share of the gradient", "gradient_share", np.mean),
    ):
        lines = {line.get_label(): line.get_ydata() for line in panels[title].lines}
        for arm, runs in arms.items():
            of_starts = {}
            for run in runs:
                of_starts.setdefault(run.config["warm_start"], []).append(run.per_step(metric, reduce))
            expected = np.mean([np.mean(values, 0) for values in of_starts.values()], 0)
            if metric == "reward":
                expected = [expected[max(0, i - 4) : i + 1].mean() for i in range(30)]
            np.testing.assert_allclose(lines[arm], expected)
    rows = panels["held-out mean@16: start (ring), end (dot)"]
    assert rows.lines[0].get_xdata() == pytest.approx([0.3, np.mean([0.3, 0.9, 0.5])], nan_ok=True)
    used = panels["clip bounds used (area: share of updates)"]
    assert {tuple(point) for dots in used.collections for point in dots.get_offsets().tolist()} == {
        (x, row) for row in (0, 1) for x in (0.8, 2.2, 3.2)
    }


def test_a_run_without_evaluation_shows_clipped_tokens(folder, drawn):
    for path in folder.glob("*/final.json"):
        path.unlink()
    plot.report(folder)
    panels = {axis.get_title(loc="left"): axis for axis in drawn[0].axes}
    assert panels["share of clipped tokens"].lines[0].get_ydata() == pytest.approx([0.03] * 30)


def test_names_and_letters_can_be_read_at_900_pixels(folder, drawn):
    for i, arm in enumerate(["grpo@1", "grpo@8", "bapo-main@8", "bapo@8", "1.02-3.0@8", "balanced@8", "grpo+sequence-mean@8"]):
        steps = [
            [dict(line, entropy=0.5 + 1e-5 * i) for line in (two_updates(0.3 + 1e-4 * i) * 4)[: int(arm[-1])]]
            for _ in range(30)
        ]
        write_run(folder, arm, 1, 0, steps, {"mean@16": 0.4, "pass@8": 0.5})
    plot.report(folder, note="not a result")
    (figure,) = drawn
    assert not overlaps(figure)
    assert any("not a result" in text.get_text() for text in figure.texts)
    letters = [text for text in figure.findobj(plot.matplotlib.text.Text) if text.get_text() and text.get_visible()]
    assert min(text.get_size() for text in letters) * 900 / 96 / figure.get_figwidth() >= 8.99
    for axis in figure.axes:
        for text in axis.texts:  # inside the picture, beside its own panel, and not in the next one
            box = plot.matplotlib.text.Text.get_window_extent(text)
            assert box.x0 >= axis.bbox.x1 and box.x1 <= figure.bbox.x1
            assert not any(box.overlaps(other.bbox) for other in figure.axes if other is not axis)
    assert plot.Image.open(folder / "curves.png").width == 1350  # 1.5 times 900


def test_places_of_names_are_apart_ordered_and_near():
    rng = np.random.default_rng(1)
    for count in [1, 2, 3, 9] * 50:
        heights = np.round(rng.uniform(0, 1, count), int(rng.integers(1, 4)))
        placed = plot.spread(heights.tolist(), 0.1)
        order = np.argsort(heights, kind="stable")
        assert np.all(np.diff(placed[order]) >= 0.1 - 1e-12)
        assert placed.min() >= -1e-12 and placed.max() <= 1 + 1e-12
        if count == 1 or np.diff(heights[order]).min() >= 0.1:
            np.testing.assert_allclose(placed, heights, atol=1e-12)
    assert np.diff(plot.spread([0.5] * 30, 0.1)) == pytest.approx([0.1] * 29)  # more than fit


def test_a_method_has_one_colour_in_every_picture():
    every = [*plot.COLOURS, "grpo@8", "bapo-gate@8", "1.02-3.0@8"]
    for arms in (every, every[::-1], every[3:]):
        found = plot.colours(arms)
        assert found["grpo@8"] == "#d55e00" and found["bapo-gate@8"] == "#0072b2" and found["1.02-3.0@8"] == "#009e73"
    found = plot.colours(["grpo@1", "grpo@2", "grpo@4", "grpo@8", "grpo@16", "0.8-1.5@8", "clip-higher@8", "bapo+at-one@8"])
    assert len(set(found.values())) == 8 and found["grpo@1"] == "#000000"
    assert list(plot.colours(["b@8", "a@8"]).values()) == list(plot.colours(["a@8", "b@8"]).values())[::-1]


def test_the_command_prints_the_table_also_of_a_packed_copy(folder, tmp_path, capsys):
    plot.pack(folder, tmp_path / "results")
    for path in (folder, tmp_path / "results"):
        plot.main([str(path)])
        assert "grpo@2" in capsys.readouterr().out
    assert {path.name for path in (tmp_path / "results").iterdir()} == {"runs.json", "metrics.csv.gz", "curves.png", "table.md"}
