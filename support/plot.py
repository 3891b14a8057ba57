"""Draw saved metrics, also of runs that are still going on: a picture and a table.

    python plot.py runs/default         # curves.png and table.md there, as train.py makes them at its end

A folder holds one folder per run (train.py) or a packed copy: runs.json and metrics.csv.gz. Every mean is over the seeds
of a warm start first, then over warm starts, with Student's 95 % interval; with a single warm start, over seeds.
"""

import argparse
import csv
import gzip
import json
import math
import warnings
import zlib
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import NamedTuple

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.colors import to_hex, to_rgb
from PIL import Image
from scipy.special import stdtrit

from support.arms import ARM_FIELDS
from support.files import differences, write_atomically, write_json
from support.run_folder import read_config, read_metrics

# Letters of 9 points where the picture is shown 900 pixels wide.
plt.rcParams.update({"font.size": 9, "axes.titlesize": 9, "axes.titleweight": "bold", "axes.titlelocation": "left"})
plt.rcParams.update({"figure.constrained_layout.use": True, "axes.grid": True, "grid.alpha": 0.3})
WIDTH, DPI = 9.375, 144  # inches; pixels per inch of the file
# The colour of a method, or of an arm, in every picture; the order is that of tables. Other methods take OTHERS by name.
COLOURS = {"grpo@1": "#000000", "grpo": "#d55e00", "clip-higher": "#8c6d31", "bapo-main": "#e69f00", "bapo-gate": "#0072b2"}
COLOURS |= {"1.02-3.0": "#009e73", "balanced": "#cc79a7", "bapo": "#56b4e9", "bapo-octothinker": "#bcae00"}
OTHERS = ("#7f7f7f", "#9467bd", "#17a398", "#a50026", "#b8860b", "#4d4dff", "#006400", "#e377c2", "#5c4033")
LAST_STEPS = 10  # "at end" is the mean over these
PERCENTILE95 = partial(np.percentile, q=95)
# Packed columns -> significant digits; those of the batch stand in the first line of a step only.
OF_BATCH = {"reward": 5, "entropy": 5, "length_correct": 5, "length_wrong": 5, "filtered_groups": 5}
OF_UPDATE = {"low": 5, "high": 5, "gradient_share": 3, "negatives_with_gradient": 3, "kl": 3, "grad_norm": 4}
TITLES = {"reward": "reward (mean of 5 steps)", "entropy": "entropy (nats per token)", "clipped": "share of clipped tokens"}
TITLES |= {"grad_norm": "gradient norm (95th percentile)", "gradient_share": "positive share of the gradient"}


class RunMetrics(NamedTuple):
    """One run; a step is one batch of rollouts with all its updates."""

    config: dict
    final: dict  # held-out accuracies; empty until the run has ended
    lines: list[dict]  # one per update, as in metrics.jsonl

    def pair(self) -> tuple:
        """Warm start ("" if there is none) and seed: what runs of two arms are paired by."""
        return str(self.config.get("warm_start", "")), self.config["seed"]

    def values(self, name: str) -> list[float]:
        """A metric of all lines that have it."""
        return [line[name] for line in self.lines if line.get(name) is not None]

    def per_step(self, name: str, reduce=np.mean) -> np.ndarray:
        """A metric reduced over the updates of each step: float64 [steps]; NaN where a step has no value."""
        steps: dict[float, list[float]] = {}
        for line in self.lines:
            steps.setdefault(line["step"], []).extend([] if line.get(name) is None else [line[name]])
        return np.array([reduce(values) if values else math.nan for values in steps.values()])

    def outcome(self, name: str) -> float:
        """One number, NaN if there is none: reward and entropy at the end, the gradient norm's 95th percentile over updates,
        a held-out accuracy, or any other metric's mean."""
        if name == "greedy" or "@" in name:
            return self.final.get(name, math.nan)
        if name == "grad_norm":
            return float(PERCENTILE95(self.values(name) or [math.nan]))
        values = self.per_step(name)[-LAST_STEPS if name in ("reward", "entropy") else 0 :]
        return float(np.nanmean(values)) if not np.isnan(values).all() else math.nan


Arms = dict[str, list[RunMetrics]]


# ---------------------------------------------------------------- files
def load(folder: Path) -> tuple[Arms, dict[str, dict]]:
    """Arm -> its runs that have metrics; warm start -> what it reaches without training. Raises ValueError for a damaged file,
    for no run at all, and for runs that differ in more than arm, seed and warm start."""
    runs, starts = {}, {path.stem[5:]: json.loads(path.read_text()) for path in sorted(folder.glob("start*.json"))}
    for path in sorted(folder.glob("*/metrics.jsonl")):
        final = path.with_name("final.json")
        if lines := read_metrics(path, unfinished=not final.exists()):
            final = json.loads(final.read_text()) if final.exists() else {}
            runs[path.parent.name] = RunMetrics(read_config(path.parent), final, lines)
    if (folder / "runs.json").exists():
        runs, starts = read_packed(folder)
    if not runs:
        raise ValueError(f"{folder} holds no metrics: run train.py --output_dir {folder} first")
    (first, of_first), arms = next(iter(runs.items())), {}
    for name, run in sorted(runs.items(), key=lambda item: (order(item[1].config["arm"]), item[1].pair())):
        if changed := differences(of_first.config, run.config, ARM_FIELDS):
            raise ValueError(f"{folder}: {first} and {name} differ in more than arm, seed and start ({changed}): move one away")
        arms.setdefault(run.config["arm"], []).append(run)
    return arms, starts


def read_packed(folder: Path) -> tuple[dict[str, RunMetrics], dict[str, dict]]:
    """Run -> its metrics, and the warm starts. ValueError names the file and the line that is damaged."""
    about, path = json.loads((folder / "runs.json").read_text()), folder / "metrics.csv.gz"
    runs = {name: RunMetrics(about["config"] | run["config"], run["final"], []) for name, run in about["runs"].items()}
    with gzip.open(path, "rt") as file:
        rows = csv.DictReader(file, restkey="more", restval="missing")
        try:
            for row in rows:
                runs[row.pop("run")].lines.append({column: float(cell) for column, cell in row.items() if cell})
        except (OSError, EOFError, zlib.error, ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path}, line {rows.line_num} is damaged: {error!r}") from error
    return runs, about["warm_starts"]


def pack(folder: Path, target: Path, more: dict[str, int] | None = None) -> None:
    """Copy all runs of `folder` into runs.json (settings, results) and metrics.csv.gz: a line per update, whose columns are
    OF_BATCH, OF_UPDATE and `more`, name -> significant digits. The same runs give the same bytes."""
    (arms, starts), columns = load(folder), {"step": 9, "update": 9} | OF_BATCH | OF_UPDATE | (more or {})
    packed = [run for runs in arms.values() for run in runs]
    shared = {key: x for key, x in packed[0].config.items() if all(run.config.get(key) == x for run in packed)}
    about, rows = {"config": shared, "warm_starts": starts, "runs": {}}, [["run", *columns]]
    for run in packed:
        name = f"{run.config['arm']}-start{run.pair()[0]}-seed{run.pair()[1]}".replace("-start-", "-")
        about["runs"][name] = {"config": {k: x for k, x in run.config.items() if k not in shared}, "final": run.final}
        for line in run.lines:
            cells = [None if line["update"] > 1 and column in OF_BATCH else line.get(column) for column in columns]
            rows.append([name, *("" if x is None else f"{x:.{digits}g}" for x, digits in zip(cells, columns.values()))])
    content = gzip.compress("".join(",".join(row) + "\n" for row in rows).encode(), mtime=0)
    target.mkdir(parents=True, exist_ok=True)
    write_atomically(target / "metrics.csv.gz", lambda file: file.write_bytes(content))
    write_json(target / "runs.json", about)


# ---------------------------------------------------------------- numbers
def interval(values, runs: list[RunMetrics], level: float = 0.95) -> tuple[np.ndarray, np.ndarray]:
    """Mean and half the width of Student's interval of values [runs, ...], over warm starts or, if there is one, over seeds.
    NaN are left out; half a width is NaN where fewer than two values are."""
    values, starts = np.asarray(values, float), [run.pair()[0] for run in runs]
    with warnings.catch_warnings(action="ignore", category=RuntimeWarning):  # numpy's, where all or all but one are NaN
        if len(set(starts)) > 1:
            values = np.stack([np.nanmean(values[[s == start for s in starts]], 0) for start in dict.fromkeys(starts)])
        count = (~np.isnan(values)).sum(0)
        half = stdtrit(count - 1, (1 + level) / 2) * np.nanstd(values, 0, ddof=1) / np.sqrt(count)
        return np.nanmean(values, 0), half


def cell(values, runs: list[RunMetrics], digits: int = 3) -> str:
    """Mean ± half the interval's width, as far as there are any."""
    return " ± ".join(f"{x:.{digits}f}" for x in interval(values, runs) if not np.isnan(x)) or "–"


def measures(arms: Arms) -> list[str]:
    """The held-out accuracies that are shown: mean@k, and pass at the smaller k; none before a run has ended."""
    final = next((run.final for runs in arms.values() for run in runs if run.final), {})
    return [name for name in final if name.startswith("mean@")] + [name for name in final if name.startswith("pass@")][:1]


def table(arms: Arms, starts: dict[str, dict]) -> list[str]:
    """Markdown, a row per arm; a line below says what a cell is."""
    names = {"reward": "reward at end", "entropy": "entropy at end", "grad_norm": "gradient norm, 95th percentile"}
    names |= {"gradient_share": "gradient share", "negatives_with_gradient": "negatives with gradient", "kl": "KL per update"}
    names |= {"low": "mean low", "high": "mean high"} | {name: f"held-out {name}" for name in measures(arms)}
    rows = [["arm", "runs", *names.values()], ["---"] * (len(names) + 2)]
    start_runs = [RunMetrics({"warm_start": start, "seed": 0}, reached, []) for start, reached in starts.items()]
    for arm, runs in (({"warm start": start_runs} if starts else {}) | arms).items():
        never = sum(bool(run.lines) and not any(run.values("update")) for run in runs)
        count = f"{len(runs)}" + (f" ({never} never trained: every group had equal rewards)" if never else "")
        cells = [cell([run.outcome(name) for run in runs], runs, 4 if name == "kl" else 3) for name in names]
        rows.append([arm, count, *cells])
    about = f"Mean ± half of Student's 95 % interval over warm starts (one: over seeds). At end: mean of {LAST_STEPS} steps."
    return ["| " + " | ".join(row) + " |" for row in rows] + ["", about]


# ---------------------------------------------------------------- pictures
def updates_of(arm: str) -> int:
    """Updates on each batch of rollouts: 8 for grpo@8, and for grpo@2x4."""
    return math.prod(int(factor) for factor in (arm.partition("@")[2] or "8").split("x"))


def order(arm: str) -> tuple:
    """Where an arm stands in tables and pictures."""
    method = arm.partition("@")[0]
    name = arm if arm in COLOURS else method
    return list(COLOURS).index(name) if name in COLOURS else len(COLOURS), method, updates_of(arm)


def colours(arms) -> dict[str, str]:
    """Arm -> its colour: its method's, lighter with fewer than 8 updates per batch and darker with more."""
    others, found = sorted({arm.partition("@")[0] for arm in arms} - COLOURS.keys()), {}
    for arm in arms:
        method = arm.partition("@")[0]
        colour = COLOURS.get(arm) or COLOURS.get(method) or OTHERS[others.index(method) % len(OTHERS)]
        doublings = 0 if arm in COLOURS else math.log2(updates_of(arm) / 8)
        light, dark = min(0.4, max(0, -0.2 * doublings)), min(0.6, max(0, 0.4 * doublings))
        found[arm] = to_hex([light + (1 - light - dark) * part for part in to_rgb(colour)])
    return found


def curves(runs: list[RunMetrics], metric: str) -> np.ndarray:
    """What a panel shows of each run: float64 [runs, steps], cut to the steps that all have."""
    if metric == "clipped":
        return curves(runs, "clip_fraction_high") + curves(runs, "clip_fraction_low")
    found = [run.per_step(metric, PERCENTILE95 if metric == "grad_norm" else np.mean) for run in runs]
    values = np.stack([curve[: min(map(len, found))] for curve in found])
    if metric != "reward":
        return values
    return np.stack([values[:, max(0, i - 4) : i + 1].mean(1) for i in range(values.shape[1])], 1)


def band(axis, runs: list[RunMetrics], values: np.ndarray, colour: str, label: str, steps: list[int] | None = None) -> None:
    """Mean over runs against steps (1, 2, ... if none are given), with its interval; values [runs, steps]."""
    (mean, half), steps = interval(values, runs), np.arange(1, values.shape[1] + 1) if steps is None else steps
    axis.plot(steps, mean, color=colour, label=label, linewidth=1.4)
    axis.fill_between(steps, mean - half, mean + half, color=colour, alpha=0.15, linewidth=0)
    axis.set(xlabel="step (batch of rollouts)")


def panel(axis, arms: Arms, metric: str, ending: str = "") -> None:
    """One metric, a curve per arm; gradient norms on a logarithmic axis if they span more than a decade."""
    for arm, colour in colours(arms).items():
        band(axis, arms[arm], curves(arms[arm], metric), colour, arm)
    means = [y for line in axis.lines for y in line.get_ydata() if y > 0] or [1]
    if metric == "grad_norm" and max(means) > 10 * min(means):
        axis.set(yscale="log", ylim=(0.7 * min(means), None))  # an interval may reach below 0
    axis.set(title=TITLES.get(metric, metric.replace("_", " ")) + ending)


def name_rows(axis, arms) -> None:
    """A row per arm, the first on top, named in its colour."""
    for row, (arm, colour) in enumerate(colours(arms).items()):
        axis.text(1.03, row, arm, color=colour, va="center", transform=axis.get_yaxis_transform())
    axis.set(yticks=[], ylim=(len(arms) - 0.4, -0.6))


def dots(axis, arms: Arms, starts: dict[str, dict], name: str) -> None:
    """A held-out accuracy of each arm, from the warm start (ring) to the end (dot with interval)."""
    for row, (arm, colour) in enumerate(colours(arms).items()):
        runs = arms[arm]
        mean, half = interval([run.outcome(name) for run in runs], runs)
        start, _ = interval([starts.get(run.pair()[0], {}).get(name, math.nan) for run in runs], runs)
        axis.plot([start, mean], [row, row], color=colour, linewidth=0.8)
        axis.plot([start], [row], "o", color=colour, markerfacecolor="white", markersize=5)
        axis.errorbar([mean], [row], xerr=[np.nan_to_num(half)], fmt="o", color=colour, markersize=6, linewidth=2)
    name_rows(axis, arms)
    axis.set(title=f"held-out {name}: start (ring), end (dot)", xlabel=name)


def on_the_way(axis, arms: Arms, starts: dict[str, dict], name: str) -> None:
    """A held-out accuracy of each arm where --evaluate_every has measured it, from the start (step 0) on."""
    for arm, colour in colours(arms).items():
        found = [{0: starts.get(run.pair()[0], {}).get(name, math.nan)} for run in arms[arm]]
        for of_run, run in zip(found, arms[arm]):
            of_run |= {line["step"]: line[f"held_out_{name}"] for line in run.lines if f"held_out_{name}" in line}
            of_run |= {run.config["steps"]: run.final[name]} if name in run.final else {}
        steps = sorted(set().union(*found))
        values = np.array([[of_run.get(step, math.nan) for step in steps] for of_run in found])
        band(axis, arms[arm], values, colour, arm, steps)
    axis.set(title=f"held-out {name}")


def used_bounds(axis, arms: Arms) -> None:
    """How often each bound was used: the area of a circle is its share of the arm's updates."""
    for row, (arm, colour) in enumerate(colours(arms).items()):
        for side in ("low", "high"):
            bounds, count = np.unique(np.round([x for run in arms[arm] for x in run.values(side)], 3), return_counts=True)
            axis.scatter(bounds, 0 * bounds + row, 150 * count / max(1, count.sum()), colour, alpha=0.8, linewidth=0)
    name_rows(axis, arms)
    axis.axvline(1, color="0.6", linewidth=0.8)
    axis.set(title="clip bounds used (area: share of updates)", xlabel="importance ratio", xscale="log")
    axis.set_xticks([0.6, 0.8, 1, 1.2, 1.5, 2, 3], ["0.6", "0.8", "1", "1.2", "1.5", "2", "3"])
    axis.minorticks_off()


def spread(heights: list[float], gap: float) -> np.ndarray:
    """Places at least `gap` apart, near the given heights and in their order; within [0, 1] if they fit there."""
    ranks, steps = np.argsort(heights, kind="stable"), gap * np.arange(len(heights))
    level = np.asarray(heights, float)[ranks] - steps
    level = (np.maximum.accumulate(level) + np.minimum.accumulate(level[::-1])[::-1]) / 2
    return (np.clip(level, 0, max(0, 1 - gap * (len(steps) - 1))) + steps)[np.argsort(ranks)]


def save(figure: plt.Figure, path: Path, note: str = "") -> None:
    """Name every labelled curve where it ends, add the note, write the picture in one piece and close it."""
    figure.suptitle("\n".join(text for text in (note, figure.get_suptitle()) if text), fontsize=9)
    for axis in figure.axes:
        axis.get_ylim()  # or transData would not know of the last curves
        ends = [(line, line.get_xydata()[np.isfinite(line.get_xydata()).all(1)]) for line in axis.lines]
        ends = [(line, points[-1]) for line, points in ends if len(points) and not line.get_label().startswith("_")]
        heights = [axis.transAxes.inverted().transform(axis.transData.transform(point))[1] for _, point in ends]
        gap = 1.35 * 9 / 72 * figure.dpi / axis.bbox.height  # the layout, made on saving, leaves the axis a bit less high
        for (line, _), height in zip(ends, spread(heights, gap)):
            axis.text(1.03, height, line.get_label(), color=line.get_color(), va="center", transform=axis.transAxes)
    figure.savefig(drawn := BytesIO(), dpi=DPI)
    plt.close(figure)
    small = Image.open(drawn).convert("RGB").quantize(255)  # a third of the bytes
    write_atomically(path, lambda file: small.save(file, "PNG", optimize=True))


def report(folder: Path, note: str = "") -> list[str]:
    """Write folder/curves.png (with the note on it) and folder/table.md, and return the table's lines."""
    arms, starts = load(folder)
    figure, axes = plt.subplots(3, 2, figsize=(WIDTH, 3 * max(2.3, 0.7 + 0.165 * len(arms)) + 0.3))
    for axis, metric in zip(axes.flat, ("reward", "entropy", "grad_norm", "gradient_share")):
        panel(axis, arms, metric)
    lines = [line for runs in arms.values() for run in runs for line in run.lines]
    if measured := [name for line in lines for name in line if name.startswith("held_out_mean@")]:
        on_the_way(axes[2, 0], arms, starts, measured[0].removeprefix("held_out_"))
    elif held_out := measures(arms):
        dots(axes[2, 0], arms, starts, held_out[0])
    else:
        panel(axes[2, 0], arms, "clipped")
    used_bounds(axes[2, 1], arms)
    figure.suptitle("@1: on-policy; @8: eight updates on each batch. Band: 95 % interval of the mean over warm starts")
    save(figure, folder / "curves.png", note)
    lines = table(arms, starts)
    write_atomically(folder / "table.md", lambda file: file.write_text("\n".join(lines) + "\n"))
    return lines


def main(arguments: list[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="what train.py --output_dir wrote, or a packed copy")
    print("\n".join(report(parser.parse_args(arguments).folder)))


if __name__ == "__main__":
    main()
