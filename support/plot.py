"""Draw saved metrics, also of runs that are still going on: a picture and a table.

    python -m support.plot runs/default     # curves.png and table.md there, as train.py makes them

The numbers come from run_metrics.py; every band is its interval.
"""

import argparse
import colorsys
import math
import textwrap
from io import BytesIO
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.colors import to_hex, to_rgb
from PIL import Image

from support.files import write_atomically
from support.run_metrics import (
    Arms,
    RunMetrics,
    Starts,
    held_out_names,
    interval,
    load,
    outcomes,
    percentile95,
    spread_over,
    table,
    updates_of,
)

# Letters have 9 points where a picture is shown 900 pixels wide.
plt.rcParams.update(
    {
        "font.size": 9,
        "axes.titlesize": 9,
        "axes.titleweight": "bold",
        "axes.titlelocation": "left",
        "figure.constrained_layout.use": True,
        "axes.grid": True,
        "grid.alpha": 0.3,
    }
)
WIDTH = 9.375  # inches
DPI = 144  # pixels per inch of the file, which is 1.5 times 900 pixels wide
LETTER_POINTS = 9
CAPTION_LETTERS = 120  # in a line above the picture

# The colour of a method, or of an arm, in every picture.
COLOURS = {
    "grpo@1": "#000000",
    "grpo": "#d55e00",
    "clip-higher": "#8c6d31",
    "bapo-main": "#e69f00",
    "bapo-octothinker": "#bcae00",
    "bapo": "#56b4e9",
    "1.02-3.0": "#009e73",
}
# Those of other methods, which take them in the order of their names.
OTHER_COLOURS = [
    "#7f7f7f",
    "#9467bd",
    "#17a398",
    "#a50026",
    "#b8860b",
    "#4d4dff",
    "#006400",
    "#e377c2",
    "#5c4033",
]
TITLES = {
    "reward": "reward (mean of 5 steps)",
    "entropy": "entropy (nats per token)",
    "grad_norm": "gradient norm (95th percentile)",
    "clipped": "share of clipped tokens",
    "gradient_share": "positive share of the gradient",
}


# ---------------------------------------------------------------- colours and places
def colours(arms) -> dict[str, str]:
    """Arm -> its colour: its method's, lighter with fewer than 8 updates, darker with more."""
    methods = {arm: arm.partition("@")[0] for arm in arms}
    others = sorted(set(methods.values()) - COLOURS.keys())
    palette = COLOURS | dict(zip(others, other_colours(len(others))))
    chosen = {}
    for arm, method in methods.items():
        if arm in COLOURS:
            chosen[arm] = COLOURS[arm]
        else:
            chosen[arm] = shade(palette[method], math.log2(updates_of(arm) / 8))
    return chosen


def other_colours(count: int) -> list[str]:
    """So many different colours: OTHER_COLOURS, or if these are too few hues of a circle."""
    if count <= len(OTHER_COLOURS):
        return OTHER_COLOURS[:count]
    return [to_hex(colorsys.hsv_to_rgb(i / count, 0.8, 0.75)) for i in range(count)]


def shade(colour: str, doublings: float) -> str:
    """A colour made darker by `doublings`, or lighter if that is negative."""
    white = min(0.4, max(0.0, -0.2 * doublings))
    black = min(0.6, max(0.0, 0.4 * doublings))
    return to_hex([white + (1 - white - black) * part for part in to_rgb(colour)])


def spread(heights: list[float], gap: float) -> np.ndarray:
    """Places at least `gap` apart, near the given heights and in their order.

    Within [0, 1] if they fit there.
    """
    ranks = np.argsort(heights, kind="stable")
    steps = gap * np.arange(len(heights))
    # Less its step, every height may go anywhere, if only the sequence does not fall.
    level = np.asarray(heights, float)[ranks] - steps
    from_below = np.maximum.accumulate(level)
    from_above = np.minimum.accumulate(level[::-1])[::-1]
    level = (from_below + from_above) / 2
    level = np.clip(level, 0, max(0, 1 - gap * (len(steps) - 1)))
    return (level + steps)[np.argsort(ranks)]


# ---------------------------------------------------------------- curves
def curves(runs: list[RunMetrics], metric: str) -> np.ndarray:
    """What a panel shows of each run: float64 [runs, steps], cut to the steps that all have."""
    if metric == "clipped":
        return curves(runs, "clip_fraction_high") + curves(runs, "clip_fraction_low")
    reduce = percentile95 if metric == "grad_norm" else np.mean
    per_run = [run.per_step(metric, reduce) for run in runs]
    steps = min(len(values) for values in per_run)
    values = np.stack([values[:steps] for values in per_run])
    return smoothed(values) if metric == "reward" else values


def smoothed(values: np.ndarray, width: int = 5) -> np.ndarray:
    """The mean of each step and the width - 1 before it, as far as there are any: [runs, steps]."""
    means = []
    for step in range(values.shape[1]):
        window = values[:, max(0, step - width + 1) : step + 1]
        means.append(window.mean(1))
    return np.stack(means, 1)


def band(
    axis,
    runs: list[RunMetrics],
    values: np.ndarray,
    colour: str,
    label: str,
    steps: list[int] | None = None,
) -> None:
    """Mean over runs, with its interval; values [runs, steps], at steps 1, 2, ... by default."""
    mean, half = interval(values, runs)
    if steps is None:
        steps = np.arange(1, values.shape[1] + 1)
    axis.plot(steps, mean, color=colour, label=label, linewidth=1.4)
    axis.fill_between(steps, mean - half, mean + half, color=colour, alpha=0.15, linewidth=0)
    axis.set(xlabel="step (batch of rollouts)")


def panel(axis, arms: Arms, metric: str, ending: str = "") -> None:
    """One metric, a curve per arm."""
    for arm, colour in colours(arms).items():
        band(axis, arms[arm], curves(arms[arm], metric), colour, arm)
    if metric == "grad_norm":
        widen_to_decades(axis)
    axis.set(title=TITLES.get(metric, metric.replace("_", " ")) + ending)


def widen_to_decades(axis) -> None:
    """A logarithmic axis if the curves span more than a decade."""
    heights = [height for line in axis.lines for height in line.get_ydata() if height > 0]
    if heights and max(heights) > 10 * min(heights):
        axis.set(yscale="log", ylim=(0.7 * min(heights), None))  # an interval may reach below 0


def on_the_way(axis, arms: Arms, starts: Starts, name: str) -> None:
    """A held-out accuracy where --evaluate_every has measured it, from the start (step 0) on."""
    for arm, colour in colours(arms).items():
        measured = [accuracies_by_step(run, starts, name) for run in arms[arm]]
        steps = sorted({step for of_run in measured for step in of_run})
        values = []
        for of_run in measured:
            values.append([of_run.get(step, math.nan) for step in steps])
        band(axis, arms[arm], np.array(values), colour, arm, steps)
    axis.set(title=f"held-out {name}")


def accuracies_by_step(run: RunMetrics, starts: Starts, name: str) -> dict[int, float]:
    """Step -> held-out accuracy of one run: its start, those on the way, its end."""
    accuracies = {0: starts.get(run.warm_start(), {}).get(name, math.nan)}
    for line in run.lines:
        if f"held_out_{name}" in line:
            accuracies[line["step"]] = line[f"held_out_{name}"]
    if name in run.final:
        accuracies[run.config["steps"]] = run.final[name]
    return accuracies


# ---------------------------------------------------------------- rows
def name_rows(axis, names: dict[str, str]) -> None:
    """A row per name, the first on top, named in its colour."""
    for row, (name, colour) in enumerate(names.items()):
        place = axis.get_yaxis_transform()
        axis.text(1.03, row, name, color=colour, va="center", transform=place)
    axis.set(yticks=[], ylim=(len(names) - 0.4, -0.6))


def dots(axis, arms: Arms, starts: Starts, name: str) -> None:
    """A held-out accuracy of each arm, from the warm start (ring) to the end (dot, interval)."""
    names = colours(arms)
    for row, (arm, colour) in enumerate(names.items()):
        runs = arms[arm]
        mean, half = interval(outcomes(runs, name), runs)
        before = [starts.get(run.warm_start(), {}).get(name, math.nan) for run in runs]
        start, _ = interval(before, runs)
        axis.plot([start, mean], [row, row], color=colour, linewidth=0.8)
        axis.plot([start], [row], "o", color=colour, markerfacecolor="white", markersize=5)
        dot_with_interval(axis, mean, row, half, colour)
    name_rows(axis, names)
    axis.set(title=f"held-out {name}: start (ring), end (dot)", xlabel=name)


def dot_with_interval(axis, mean: float, row: float, half: float, colour: str) -> None:
    """A dot, and its interval as a bar to both sides if it has one."""
    sides = [np.nan_to_num(half)]
    axis.errorbar([mean], [row], xerr=sides, fmt="o", color=colour, markersize=6, linewidth=2)


def used_bounds(axis, arms: Arms) -> None:
    """How often each bound was used: the area of a circle is its share of the arm's updates."""
    names = colours(arms)
    for row, (arm, colour) in enumerate(names.items()):
        for side in ("low", "high"):
            used = [bound for run in arms[arm] for bound in run.values(side)]
            bounds, count = np.unique(np.round(used, 3), return_counts=True)
            areas = 150 * count / max(1, count.sum())
            rows = np.full(len(bounds), row)
            axis.scatter(bounds, rows, areas, colour, alpha=0.8, linewidth=0)
    name_rows(axis, names)
    axis.axvline(1, color="0.6", linewidth=0.8)
    axis.set(
        title="clip bounds used (area: share of updates)", xlabel="importance ratio", xscale="log"
    )
    ratios = [0.6, 0.8, 1, 1.2, 1.5, 2, 3]
    axis.set_xticks(ratios, [f"{ratio:g}" for ratio in ratios])
    axis.minorticks_off()


# ---------------------------------------------------------------- the whole picture
def name_curves(axis, figure: plt.Figure) -> None:
    """Write the name of every labelled curve where it ends, right of the panel."""
    names = []
    heights = []
    for line in axis.lines:
        points = line.get_xydata()
        points = points[np.isfinite(points).all(1)]
        if len(points) and not line.get_label().startswith("_"):
            pixel = axis.transData.transform(points[-1])
            names.append(line)
            heights.append(axis.transAxes.inverted().transform(pixel)[1])
    gap = 1.25 * LETTER_POINTS / 72 * figure.dpi / axis.bbox.height
    for line, height in zip(names, spread(heights, gap)):
        place = axis.transAxes
        axis.text(
            1.03, height, line.get_label(), color=line.get_color(), va="center", transform=place
        )


def save(figure: plt.Figure, path: Path, note: str = "") -> None:
    """Name the curves, add the note, write the picture in one piece and close it."""
    heading = []
    for text in (note, *figure.get_suptitle().split("\n")):
        heading += textwrap.wrap(text, CAPTION_LETTERS)
    figure.suptitle("\n".join(heading), fontsize=LETTER_POINTS)
    figure.draw_without_rendering()  # or neither limits nor heights of the panels would be known
    for axis in figure.axes:
        name_curves(axis, figure)
    drawn = BytesIO()
    figure.savefig(drawn, dpi=DPI)
    plt.close(figure)
    small = Image.open(drawn).convert("RGB").quantize(255)  # a third of the bytes
    write_atomically(path, lambda file: small.save(file, "PNG", optimize=True))


def report(folder: Path, note: str = "") -> list[str]:
    """Write folder/curves.png, with the note, and folder/table.md; return the table's lines."""
    arms, starts = load(folder)
    save(report_figure(arms, starts), folder / "curves.png", note)
    lines = table(arms, starts)
    write_atomically(folder / "table.md", lambda file: file.write_text("\n".join(lines) + "\n"))
    return lines


def report_figure(arms: Arms, starts: Starts) -> plt.Figure:
    """Six panels: what training did, what it led to on held-out problems, and the bounds."""
    row_height = max(2.3, 0.7 + 0.165 * len(arms))
    figure, axes = plt.subplots(3, 2, figsize=(WIDTH, 3 * row_height + 0.3))
    for axis, metric in zip(axes.flat, ("reward", "entropy", "grad_norm", "gradient_share")):
        panel(axis, arms, metric)
    measured = on_the_way_name(arms)
    held_out = held_out_names(arms)
    if measured:
        on_the_way(axes[2, 0], arms, starts, measured)
    elif held_out:
        dots(axes[2, 0], arms, starts, held_out[0])
    else:
        panel(axes[2, 0], arms, "clipped")
    used_bounds(axes[2, 1], arms)
    figure.suptitle(caption(arms))
    return figure


def on_the_way_name(arms: Arms) -> str:
    """The mean@k that was measured on the way, "" if none was."""
    for runs in arms.values():
        for run in runs:
            for line in run.lines:
                for name in line:
                    if name.startswith("held_out_mean@"):
                        return name.removeprefix("held_out_")
    return ""


def caption(arms: Arms) -> str:
    """What the reader of the picture must know: the endings of the arms, and the bands."""
    parts = []
    counts = sorted({updates_of(arm) for arm in arms})
    if 1 in counts:
        parts.append("@1: on-policy")
    if counts[-1] > 1:
        parts.append(f"@{counts[-1]}: {counts[-1]} updates on each batch")
    over = spread_over(arms)
    if over:
        parts.append(f"band: 95 % interval of the mean over {over}")
    return "; ".join(parts)


def main(arguments: list[str] | None = None) -> None:
    """The command line."""
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("support.plot", description=__doc__, formatter_class=layout)
    parser.add_argument("folder", type=Path, help="what train.py wrote, or a packed copy")
    options = parser.parse_args(arguments)
    print("\n".join(report(options.folder)))


if __name__ == "__main__":
    main()
