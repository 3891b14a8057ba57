"""Saved runs, read back: metrics, intervals, the table of a folder, and packed copies.

A folder holds one folder per run, as train.py leaves them, or a packed copy: runs.json (settings
and results) and metrics.csv.xz (a line per update). Nothing here needs matplotlib.

Every mean is over the seeds of a warm start first and over warm starts then, with Student's 95 %
interval over warm starts. With a single warm start, mean and interval are over its seeds.
"""

import csv
import json
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from scipy.special import stdtrit

from support.files import differences, write_atomically, write_json
from support.run_folder import MAY_DIFFER_IN_A_TABLE, read_config, read_metrics

LAST_STEPS = 10  # "at end" is the mean over so many steps
LOWEST_STEPS = 20  # "lowest entropy" is the lowest mean over so many consecutive steps

# The order of methods in tables and pictures; all others follow by name.
METHODS = [
    "grpo@1",
    "grpo",
    "clip-higher",
    "bapo-main",
    "bapo-octothinker",
    "bapo",
    "1.02-3.0",
]

# Packed columns and their significant digits. What is the same for all updates of a step stands in
# the first line of the step only.
STEP_COLUMNS = {
    "reward": 5,
    "entropy": 5,
    "length_correct": 5,
    "length_wrong": 5,
    "filtered_groups": 5,
}
UPDATE_COLUMNS = {
    "low": 5,
    "high": 5,
    "gradient_share": 3,
    "negatives_with_gradient": 3,
    "kl": 3,
    "grad_norm": 4,
}

# The table's columns: outcome, heading, decimals.
TABLE_COLUMNS = [
    ("reward", "reward at end", 3),
    ("entropy", "entropy at end", 3),
    ("grad_norm", "gradient norm, 95th percentile", 3),
    ("gradient_share", "gradient share", 3),
    ("negatives_with_gradient", "negatives with gradient", 3),
    ("kl", "KL per update", 4),
    ("low", "mean low", 3),
    ("high", "mean high", 3),
]


@dataclass
class RunMetrics:
    """One run. A step is one batch of rollouts with all its updates."""

    config: dict
    final: dict  # held-out accuracies; empty until the run has ended
    lines: list[dict]  # one per update, as in metrics.jsonl
    known: dict[str, float] = field(default_factory=dict, repr=False)  # outcomes so far

    def warm_start(self) -> str:
        """The warm start's number, "" for a run of one's own model."""
        return str(self.config.get("warm_start", ""))

    def pair(self) -> tuple[str, int]:
        """Warm start and seed: runs of two arms are compared where these are equal."""
        return self.warm_start(), self.config["seed"]

    def values(self, name: str) -> list[float]:
        """A metric of all lines that have it."""
        return [line[name] for line in self.lines if line.get(name) is not None]

    def per_step(self, name: str, reduce: Callable = np.mean) -> np.ndarray:
        """A metric reduced over the updates of each step: float64 [steps].

        NaN for a step that has no value.
        """
        steps: dict[float, list[float]] = {}
        for line in self.lines:
            values = steps.setdefault(line["step"], [])
            if line.get(name) is not None:
                values.append(line[name])
        return np.array([reduce(values) if values else math.nan for values in steps.values()])

    def outcome(self, name: str) -> float:
        """One number for the whole run, NaN if the run has none.

        "greedy", "mean@16", "pass@8", ...   held-out accuracy at the end
        "reward", "entropy"                  mean over the last LAST_STEPS steps
        "lowest_entropy"                     lowest mean of the entropy over LOWEST_STEPS
                                             consecutive steps (over all steps, if they are fewer)
        "grad_norm"                          95th percentile over all updates
        "median_kl"                          median over all updates
        any other metric                     mean over the steps
        """
        if name not in self.known:
            self.known[name] = self._outcome(name)
        return self.known[name]

    def _outcome(self, name: str) -> float:
        if name == "greedy" or "@" in name:
            return self.final.get(name, math.nan)
        if name == "grad_norm":
            return percentile95(self.values(name) or [math.nan])
        if name == "median_kl":
            return float(np.median(self.values("kl") or [math.nan]))
        if name == "lowest_entropy":
            return lowest_mean(self.per_step("entropy"), LOWEST_STEPS)
        values = self.per_step(name)
        if name in ("reward", "entropy"):
            values = values[-LAST_STEPS:]
        known = values[~np.isnan(values)]
        return float(known.mean()) if len(known) else math.nan


Arms = dict[str, list[RunMetrics]]  # arm -> its runs
Starts = dict[str, dict]  # warm start -> the held-out accuracies that it has before any training


def percentile95(values) -> float:
    """The 95th percentile."""
    return float(np.percentile(values, 95))


def lowest_mean(values: np.ndarray, width: int) -> float:
    """The lowest mean of `width` consecutive values, or of all of them if there are fewer."""
    if not len(values):
        return math.nan
    width = min(width, len(values))
    means = np.convolve(values, np.full(width, 1 / width), mode="valid")
    return float(means.min())


def updates_of(arm: str) -> int:
    """Updates on each batch of rollouts: 8 for grpo@8, and for grpo@2x4."""
    count = arm.partition("@")[2] or "8"
    return math.prod(int(factor) for factor in count.split("x"))


def order(arm: str) -> tuple[int, str, int]:
    """A sorting key: where an arm stands in tables and pictures."""
    method = arm.partition("@")[0]
    name = arm if arm in METHODS else method
    rank = METHODS.index(name) if name in METHODS else len(METHODS)
    return rank, method, updates_of(arm)


# ---------------------------------------------------------------- files
def load(folder: Path) -> tuple[Arms, Starts]:
    """All runs of a folder that have metrics, by arm, and its warm starts.

    Raises ValueError for a damaged file, for a folder without runs, and for runs that differ in
    more than arm, seed and warm start.
    """
    if (folder / "runs.json").exists():
        runs, starts = read_packed(folder)
    else:
        runs, starts = read_run_folders(folder)
    if not runs:
        raise ValueError(f"{folder} holds no metrics: run train.py --output_dir {folder} first")
    names = sorted(runs, key=lambda name: (order(runs[name].config["arm"]), runs[name].pair()))
    first = next(iter(runs))
    arms: Arms = {}
    for name in names:
        config = runs[name].config
        if changed := differences(runs[first].config, config, MAY_DIFFER_IN_A_TABLE | {"arm"}):
            raise ValueError(
                f"{folder}: {first} and {name} differ in more than arm, seed and start "
                f"({changed}): move one away"
            )
        arms.setdefault(config["arm"], []).append(runs[name])
    return arms, starts


def read_run_folders(folder: Path) -> tuple[dict[str, RunMetrics], Starts]:
    """Run folder -> its metrics, of runs that go on, too; and the warm starts."""
    runs = {}
    for path in sorted(folder.glob("*/metrics.jsonl")):
        final_path = path.with_name("final.json")
        ended = final_path.exists()
        lines = read_metrics(path, unfinished=not ended)
        if lines:
            final = json.loads(final_path.read_text()) if ended else {}
            runs[path.parent.name] = RunMetrics(read_config(path.parent), final, lines)
    starts = {}
    for path in sorted(folder.glob("start*.json")):
        starts[path.stem.removeprefix("start")] = json.loads(path.read_text())
    return runs, starts


def read_packed(folder: Path) -> tuple[dict[str, RunMetrics], Starts]:
    """Run -> its metrics, and the warm starts.

    Raises ValueError, which names the file and the line, for a damaged copy.
    """
    import lzma  # which some builds of Python lack: only packed copies need it

    about = json.loads((folder / "runs.json").read_text())
    path = folder / "metrics.csv.xz"
    runs = {}
    for name, run in about["runs"].items():
        runs[name] = RunMetrics(about["config"] | run["config"], run["final"], [])
    with lzma.open(path, "rt") as file:
        rows = csv.DictReader(file, restkey="more", restval="missing")
        try:
            for row in rows:
                name = row.pop("run")
                line = {column: float(value) for column, value in row.items() if value}
                runs[name].lines.append(line)
        except (OSError, EOFError, lzma.LZMAError, ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path}, line {rows.line_num} is damaged: {error!r}") from error
    return runs, about["warm_starts"]


def pack(folder: Path, target: Path, more: dict[str, int] | None = None) -> None:
    """Copy all runs of `folder` into target/runs.json and target/metrics.csv.xz.

    A line of metrics.csv.xz is an update; its columns are STEP_COLUMNS, UPDATE_COLUMNS and `more`
    (name -> significant digits). The same runs give the same bytes.
    """
    import lzma

    arms, starts = load(folder)
    columns = {"step": 9, "update": 9, **STEP_COLUMNS, **UPDATE_COLUMNS, **(more or {})}
    packed = [run for runs in arms.values() for run in runs]
    shared = shared_settings(packed)
    about = {"config": shared, "warm_starts": starts, "runs": {}}
    text_lines = [",".join(["run", *columns])]
    for run in packed:
        name = packed_name(run)
        own = {key: value for key, value in run.config.items() if key not in shared}
        about["runs"][name] = {"config": own, "final": run.final}
        for line in run.lines:
            text_lines.append(",".join([name, *packed_cells(line, columns)]))
    text = "\n".join(text_lines) + "\n"
    content = lzma.compress(text.encode(), preset=9)
    target.mkdir(parents=True, exist_ok=True)
    write_atomically(target / "metrics.csv.xz", lambda file: file.write_bytes(content))
    write_json(target / "runs.json", about)


def shared_settings(runs: list[RunMetrics]) -> dict:
    """The settings that are the same in all runs."""
    shared = {}
    for key, value in runs[0].config.items():
        if all(run.config.get(key) == value for run in runs):
            shared[key] = value
    return shared


def packed_name(run: RunMetrics) -> str:
    """ARM-startN-seedM, or ARM-seedM without a warm start."""
    start, seed = run.pair()
    return (
        f"{run.config['arm']}-start{start}-seed{seed}"
        if start
        else f"{run.config['arm']}-seed{seed}"
    )


def packed_cells(line: dict, columns: dict[str, int]) -> list[str]:
    """The cells of a packed line, rounded to the significant digits of their columns."""
    cells = []
    for column, digits in columns.items():
        value = line.get(column)
        repeated = column in STEP_COLUMNS and line["update"] > 1
        cells.append("" if value is None or repeated else f"{value:.{digits}g}")
    return cells


# ---------------------------------------------------------------- numbers
def interval(values, runs: list[RunMetrics], level: float = 0.95) -> tuple[np.ndarray, np.ndarray]:
    """Mean, and half the width of Student's interval, of values [runs, ...].

    Over warm starts, whose seeds are averaged first, or over seeds if there is one warm start. NaN
    are left out; half a width is NaN where fewer than two values are left.
    """
    values = np.asarray(values, float)
    starts = np.array([run.warm_start() for run in runs])
    different = list(dict.fromkeys(starts.tolist()))
    # numpy warns where all values, or all but one, are NaN.
    with warnings.catch_warnings(action="ignore", category=RuntimeWarning):
        if len(different) > 1:
            values = np.stack([np.nanmean(values[starts == start], 0) for start in different])
        count = (~np.isnan(values)).sum(0)
        error = np.nanstd(values, 0, ddof=1) / np.sqrt(count)
        half = stdtrit(count - 1, (1 + level) / 2) * error
        return np.nanmean(values, 0), half


def outcomes(runs: list[RunMetrics], name: str) -> list[float]:
    """An outcome of every run, see RunMetrics.outcome."""
    return [run.outcome(name) for run in runs]


def cell(values, runs: list[RunMetrics], digits: int = 3) -> str:
    """A table's cell: "mean ± half the interval's width", as far as there are any."""
    numbers = [f"{x:.{digits}f}" for x in interval(values, runs) if not np.isnan(x)]
    return " ± ".join(numbers) or "–"


def held_out_names(arms: Arms) -> list[str]:
    """The held-out accuracies that are shown: mean@k, and pass at the smaller k.

    Empty before the first run has ended.
    """
    ended = [run.final for runs in arms.values() for run in runs if run.final]
    if not ended:
        return []
    means = [name for name in ended[0] if name.startswith("mean@")]
    passes = [name for name in ended[0] if name.startswith("pass@")]
    return means + passes[:1]


def spread_over(arms: Arms) -> str:
    """What the intervals are over: "warm starts", "seeds", or "" where every arm has one run."""
    most_starts = max(len({run.warm_start() for run in runs}) for runs in arms.values())
    if most_starts > 1:
        return "warm starts"
    most_runs = max(len(runs) for runs in arms.values())
    return "seeds" if most_runs > 1 else ""


def table(arms: Arms, starts: Starts) -> list[str]:
    """The lines of a Markdown table, a row per arm; a line below it says what a cell is."""
    columns = list(TABLE_COLUMNS)
    for name in held_out_names(arms):
        columns.append((name, f"held-out {name}", 3))
    headings = [heading for _, heading, _ in columns]
    rows = [["arm", "runs", *headings], ["---"] * (len(columns) + 2)]
    shown = dict(arms)
    if starts:
        is_own_model = list(starts) == [""]
        shown = {"before RL" if is_own_model else "warm start": start_runs(starts)} | shown
    for arm, runs in shown.items():
        cells = [cell(outcomes(runs, name), runs, digits) for name, _, digits in columns]
        rows.append([arm, count_runs(runs), *cells])
    return ["| " + " | ".join(row) + " |" for row in rows] + ["", table_note(arms)]


def start_runs(starts: Starts) -> list[RunMetrics]:
    """The warm starts as runs without updates, for a row of the table."""
    runs = []
    for start, reached in starts.items():
        runs.append(RunMetrics({"warm_start": start, "seed": 0}, reached, []))
    return runs


def count_runs(runs: list[RunMetrics]) -> str:
    """The number of runs, and how many of them never made an update."""
    never = sum(bool(run.lines) and not any(run.values("update")) for run in runs)
    if never:
        return f"{len(runs)} ({never} never trained: every group had equal rewards)"
    return f"{len(runs)}"


def table_note(arms: Arms) -> str:
    """The sentence below the table."""
    over = spread_over(arms)
    mean = f"Mean ± half of Student's 95 % interval over {over}. " if over else "One run per arm. "
    steps = max(len(run.per_step("reward")) for runs in arms.values() for run in runs)
    last = min(LAST_STEPS, steps)
    return mean + (
        f"At end: mean of the last {last} steps." if last > 1 else "At end: the last step."
    )
