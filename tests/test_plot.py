"""support/plot.py: pictures of run folders that were written by hand."""

import numpy as np
import pytest
from matplotlib.text import Text
from saved_runs import overlaps, two_updates, write_folder, write_run

from support import plot, run_metrics


@pytest.fixture
def folder(tmp_path):
    return write_folder(tmp_path / "runs")


@pytest.fixture
def drawn(monkeypatch):
    """The figures that were saved, kept open."""
    figures = []
    close = plot.plt.close
    monkeypatch.setattr(plot.plt, "close", figures.append)
    yield figures
    for figure in figures:
        close(figure)


def panels_of(figure):
    """Title -> panel."""
    return {axis.get_title(loc="left"): axis for axis in figure.axes}


# ---------------------------------------------------------------- what is shown
def mean_over_starts(runs, metric, reduce):
    """The mean over seeds, then over warm starts, step by step."""
    starts = {}
    for run in runs:
        starts.setdefault(run.warm_start(), []).append(run.per_step(metric, reduce))
    return np.mean([np.mean(values, 0) for values in starts.values()], 0)


def test_every_panel_shows_its_own_metric(folder, drawn):
    for arm, start in (("grpo@2", 3), ("bapo@2", 2)):  # a trend of its own in every metric
        steps = []
        for step in range(30):
            steps.append(two_updates(0.01 * step, 0.01 * step, entropy=1 - 0.02 * step))
        write_run(folder, arm, start, 0, steps, {"mean@16": 0.5, "greedy": 0.5, "pass@8": 0.5})
    plot.report(folder)
    arms, _ = run_metrics.load(folder)
    panels = panels_of(drawn[0])
    for title, metric, reduce in (
        ("entropy (nats per token)", "entropy", np.mean),
        ("gradient norm (95th percentile)", "grad_norm", run_metrics.percentile95),
        ("positive share of the gradient", "gradient_share", np.mean),
    ):
        shown = {line.get_label(): line.get_ydata() for line in panels[title].lines}
        for arm, runs in arms.items():
            np.testing.assert_allclose(shown[arm], mean_over_starts(runs, metric, reduce))
    rewards = panels["reward (mean of 5 steps)"]
    for line in rewards.lines:
        every_step = mean_over_starts(arms[line.get_label()], "reward", np.mean)
        expected = [every_step[max(0, i - 4) : i + 1].mean() for i in range(30)]
        np.testing.assert_allclose(line.get_ydata(), expected)
    accuracies = panels["held-out mean@16: start (ring), end (dot)"]
    expected = [0.3, np.mean([0.3, 0.9, 0.5])]
    assert accuracies.lines[0].get_xdata() == pytest.approx(expected, nan_ok=True)
    points = set()
    for circles in panels["clip bounds used (area: share of updates)"].collections:
        points |= {tuple(point) for point in circles.get_offsets().tolist()}
    assert points == {(x, row) for row in (0, 1) for x in (0.8, 2.2, 3.2)}


def test_a_run_without_evaluation_shows_clipped_tokens(folder, drawn):
    for path in folder.glob("*/final.json"):
        path.unlink()
    plot.report(folder)
    clipped = panels_of(drawn[0])["share of clipped tokens"]
    assert clipped.lines[0].get_ydata() == pytest.approx([0.03] * 30)


def test_the_caption_claims_no_more_than_there_is(tmp_path, folder):
    """Kills: "on-policy" without such an arm, "over warm starts" with one."""
    arms, _ = run_metrics.load(folder)
    expected = "@2: 2 updates on each batch; band: 95 % interval of the mean over warm starts"
    assert plot.caption(arms) == expected
    write_run(tmp_path, "grpo@1", 1, 0, [two_updates(0.2)])
    arms, _ = run_metrics.load(tmp_path)
    assert plot.caption(arms) == "@1: on-policy"
    write_run(tmp_path, "grpo@1", 1, 1, [two_updates(0.2)])
    arms, _ = run_metrics.load(tmp_path)
    assert plot.caption(arms).endswith("over seeds")


def test_the_report_writes_the_table_that_it_returns(folder):
    lines = plot.report(folder)
    assert lines == run_metrics.table(*run_metrics.load(folder))
    assert (folder / "table.md").read_text().splitlines() == lines


def test_the_command_prints_the_table_also_of_a_packed_copy(folder, tmp_path, capsys):
    run_metrics.pack(folder, tmp_path / "results")
    for path in (folder, tmp_path / "results"):
        plot.main([str(path)])
        assert "grpo@2" in capsys.readouterr().out
    written = {path.name for path in (tmp_path / "results").iterdir()}
    assert written == {"runs.json", "metrics.csv.xz", "curves.png", "table.md"}


# ---------------------------------------------------------------- how it is shown
def test_the_name_of_a_curve_stands_where_it_ends(tmp_path, drawn):
    """Kills: heights by the limits that an axis had before the last curve."""
    figure, axis = plot.plt.subplots()
    axis.plot([0, 1], [5, 10], label="up")
    axis.plot([0, 1], [5, 5], label="flat")
    plot.save(figure, tmp_path / "a.png")
    bottom, top = axis.get_ylim()
    heights = {text.get_text(): text.get_position()[1] for text in axis.texts}
    assert heights["up"] == pytest.approx((10 - bottom) / (top - bottom), abs=0.02)
    assert heights["flat"] == pytest.approx((5 - bottom) / (top - bottom), abs=0.02)


def test_a_long_caption_is_broken_into_lines_inside_the_picture(tmp_path, drawn):
    figure, axis = plot.plt.subplots(figsize=(plot.WIDTH, 3))
    figure.suptitle("seven letters in a word " * 12)
    plot.save(figure, tmp_path / "a.png", note="not a result")
    figure.canvas.draw()
    (caption,) = figure.texts
    assert caption.get_text().startswith("not a result\nseven")
    box = caption.get_window_extent()
    assert box.x0 >= 0
    assert box.x1 <= figure.bbox.x1


def test_names_and_letters_can_be_read_at_900_pixels(folder, drawn):
    arms = ["grpo@1", "grpo@8", "bapo-main@8", "bapo@8", "1.02-3.0@8", "gspo@8"]
    arms.append("truncated-is@8")
    for i, arm in enumerate(arms):
        updates = two_updates(0.3 + 1e-4 * i, entropy=0.5 + 1e-5 * i) * 4
        steps = [updates[: int(arm[-1])]] * 30
        write_run(folder, arm, 1, 0, steps, {"mean@16": 0.4, "pass@8": 0.5})
    plot.report(folder, note="not a result")
    (figure,) = drawn
    assert not overlaps(figure)
    assert any("not a result" in text.get_text() for text in figure.texts)
    for text in figure.findobj(Text):
        if text.get_text() and text.get_visible():
            assert text.get_size() * 900 / 96 / figure.get_figwidth() >= 8.99
    for axis in figure.axes:
        others = [other for other in figure.axes if other is not axis]
        for text in axis.texts:  # beside its own panel, in the picture, not in the next panel
            box = Text.get_window_extent(text)
            assert box.x0 >= axis.bbox.x1
            assert box.x1 <= figure.bbox.x1
            assert not any(box.overlaps(other.bbox) for other in others)
    assert plot.Image.open(folder / "curves.png").width == 1350  # 1.5 times 900


def test_places_of_names_are_apart_ordered_and_near():
    rng = np.random.default_rng(1)
    for count in [1, 2, 3, 9] * 50:
        heights = np.round(rng.uniform(0, 1, count), int(rng.integers(1, 4)))
        placed = plot.spread(heights.tolist(), 0.1)
        order = np.argsort(heights, kind="stable")
        assert np.all(np.diff(placed[order]) >= 0.1 - 1e-12)
        assert placed.min() >= -1e-12
        assert placed.max() <= 1 + 1e-12
        if count == 1 or np.diff(heights[order]).min() >= 0.1:
            np.testing.assert_allclose(placed, heights, atol=1e-12)
    assert np.diff(plot.spread([0.5] * 30, 0.1)) == pytest.approx([0.1] * 29)  # more than fit


def test_a_method_has_one_colour_in_every_picture():
    every = [*plot.COLOURS, "grpo@8", "bapo@8", "1.02-3.0@8"]
    for arms in (every, every[::-1], every[3:]):
        chosen = plot.colours(arms)
        assert chosen["grpo@8"] == "#d55e00"
        assert chosen["bapo@8"] == "#56b4e9"
        assert chosen["1.02-3.0@8"] == "#009e73"
    arms = ["grpo@1", "grpo@2", "grpo@4", "grpo@8", "grpo@16", "0.8-1.5@8", "clip-higher@8"]
    chosen = plot.colours([*arms, "gspo@8"])
    assert len(set(chosen.values())) == 8
    assert chosen["grpo@1"] == "#000000"
    first_colours = list(plot.colours(["b@8", "a@8"]).values())
    assert first_colours == list(plot.colours(["a@8", "b@8"]).values())[::-1]


def test_many_methods_do_not_share_a_colour():
    """Kills: taking the first colours again where there are more methods than colours."""
    arms = [f"method{i}@8" for i in range(30)]
    assert len(set(plot.colours(arms).values())) == 30


def test_the_order_of_tables_is_that_of_the_colours():
    assert list(plot.COLOURS) == run_metrics.METHODS
