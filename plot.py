"""Draw saved metrics: reward, entropy, positive contribution, gradient norm, clip fractions and clip bounds.

    python plot.py runs                           # runs/curves.png and runs/table.md, as train.py makes them at its end
    python plot.py runs --pack results/default    # and a compact copy of all metrics, from which the same can be drawn

Curves are means over seeds, bands one standard deviation over seeds. A folder holds either one folder per run (train.py)
or runs.json and metrics.csv.gz (packed), and tokens.csv.gz if the runs saved tokens.
"""

import argparse
import csv
import gzip
import io
import json
import math
import warnings
from pathlib import Path
from typing import NamedTuple

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

LAST_STEPS = 10  # the table's "at the end" is the mean over these


class RunMetrics(NamedTuple):
    """One run; a step is one batch of rollouts with all its updates."""

    arm: str
    seed: int
    config: dict
    final: dict | None  # held-out accuracies, once the run has ended
    lines: list[dict]  # one per update, as in metrics.jsonl

    def per_step(self, name: str, reduce=np.mean) -> np.ndarray:
        """A metric reduced over the updates of each step: float64 [steps]; NaN where a step has no value."""
        steps: dict[int, list[float]] = {}
        for line in self.lines:
            value = line.get(name)
            steps.setdefault(int(line["step"]), []).extend([] if value is None else [value])
        return np.array([reduce(values) if values else math.nan for values in steps.values()])

    def summary(self, name: str, reduce=np.mean, last: int | None = None) -> float:
        """A metric reduced within its steps, then over the last ones (None: all) that have a value; NaN if none has."""
        values = self.per_step(name, reduce)
        values = values[-last:] if last else values
        values = values[~np.isnan(values)]
        return float(reduce(values)) if len(values) else math.nan


def to_json_number(value: float) -> float | None:
    """Six significant digits; null for what JSON has no number for."""
    return float(f"{value:.6g}") if math.isfinite(value) else None


def read_lines(path: Path) -> list[dict]:
    """JSON Lines. A last line that was cut off is left out."""
    with open(path) as file:
        return [json.loads(line) for line in file if line.endswith("\n")]


def read_csv(path: Path) -> list[dict]:
    """Lines of a packed CSV as in JSON: numbers but for the first column, empty cells left out."""
    with gzip.open(path, "rt", newline="") as file:
        header, *rows = csv.reader(file)
    return [{name: cell if name == "run" else float(cell) for name, cell in zip(header, row) if cell} for row in rows]


def write_csv(path: Path, lines: list[dict]) -> None:
    """Five significant digits. The same lines give the same bytes: gzip's time and name are fixed."""
    names = list(dict.fromkeys(name for line in lines for name in line))
    with (
        open(path, "wb") as raw,
        gzip.GzipFile("", "wb", 9, raw, mtime=0) as zipped,
        io.TextIOWrapper(zipped, newline="") as file,
    ):
        writer = csv.DictWriter(file, names, lineterminator="\n")
        writer.writeheader()
        for line in lines:
            writer.writerow({k: f"{v:.5g}" if isinstance(v, (int, float)) else v for k, v in line.items()})


def load(folder: Path) -> list[RunMetrics]:
    """All runs in `folder` that have metrics, those of one arm together. Raises ValueError if there is none."""
    found: dict[str, tuple[dict, dict | None, list[dict]]] = {}  # name -> config, final, lines
    if (folder / "runs.json").exists():
        about = json.loads((folder / "runs.json").read_text())["runs"]
        found = {name: (run["config"], run["final"], []) for name, run in about.items()}
        for line in read_csv(folder / "metrics.csv.gz"):
            found[line.pop("run")][2].append(line)
    else:
        for path in sorted(folder.glob("*/metrics.jsonl")):
            final = path.with_name("final.json")
            config = json.loads(path.with_name("config.json").read_text())["config"]
            found[path.parent.name] = (config, json.loads(final.read_text()) if final.exists() else None, read_lines(path))
    runs = [
        RunMetrics(name.rpartition("-seed")[0], config["seed"], config, final, lines)
        for name, (config, final, lines) in found.items()
        if lines
    ]
    if not runs:
        raise ValueError(f"{folder} holds no metrics: run train.py --output_dir {folder} first")
    # Fixed bounds first, and among those the on-policy arm; then by name.
    key = lambda run: (run.config["search"]["rho0"] > 0, run.config["updates_per_batch"], run.arm, run.seed)  # noqa: E731
    return sorted(runs, key=key)


def by_arm(runs: list[RunMetrics]) -> dict[str, list[RunMetrics]]:
    """Runs grouped by arm, in their order."""
    arms: dict[str, list[RunMetrics]] = {}
    for run in runs:
        arms.setdefault(run.arm, []).append(run)
    return arms


def over_seeds(runs: list[RunMetrics], name: str, reduce=np.mean) -> np.ndarray:
    """A metric per step for each seed: [seeds, steps], cut to the steps that all runs have."""
    curves = [run.per_step(name, reduce) for run in runs]
    steps = min(map(len, curves))
    return np.stack([curve[:steps] for curve in curves])


def smooth(values: np.ndarray, width: int = 5) -> np.ndarray:
    """Trailing mean over up to `width` steps; values [seeds, steps]."""
    return np.stack([values[:, max(0, i - width + 1) : i + 1].mean(1) for i in range(values.shape[1])], 1)


def band(axis, x, values: np.ndarray, label: str | None, *style, **more) -> None:
    """Mean over seeds, and one standard deviation as a band; values [seeds, points], NaN where a seed has none."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # points at which no seed, or only one, has a value
        mean, spread = np.nanmean(values, 0), np.nanstd(values, 0, ddof=1)
    (line,) = axis.plot(x, mean, *style, label=label, linewidth=1.3, **more)
    axis.fill_between(x, mean - spread, mean + spread, color=line.get_color(), alpha=0.15, linewidth=0)


def draw(runs: list[RunMetrics], path: Path) -> None:
    """Six panels in the manner of the paper's Figs. 2, 8 and 9."""
    figure, axes = plt.subplots(2, 3, figsize=(15, 7.5), constrained_layout=True)
    panels = [
        ("reward of all samples (mean of 5 steps)", [("reward", np.mean, "-")]),
        ("entropy of the rollout policy (nats per token)", [("entropy", np.mean, "-")]),
        ("positive tokens' contribution $\\rho$ at the bounds used", [("rho", np.mean, "-")]),
        ("gradient norm, before clipping (largest of a step)", [("grad_norm", np.max, "-")]),
        ("clipped tokens: A>0, r>high (solid), A<0, r<low (dotted)",
         [("clip_fraction_high", np.mean, "-"), ("clip_fraction_low", np.mean, ":")]),
        ("clip bounds: high (solid), low (dotted)", [("high", np.mean, "-"), ("low", np.mean, ":")]),
    ]  # fmt: skip
    for axis, (title, curves) in zip(axes.flat, panels):
        for color, (arm, group) in zip(plt.rcParams["axes.prop_cycle"].by_key()["color"] * 9, by_arm(runs).items()):
            for name, reduce, style in curves:
                values = over_seeds(group, name, reduce)
                values = smooth(values) if name == "reward" else values
                band(axis, np.arange(1, values.shape[1] + 1), values, arm if style == "-" else None, style, color=color)
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("step (batch of rollouts)")
        axis.grid(alpha=0.3)
    if any(line.get("grad_norm") for run in runs for line in run.lines):
        axes[1, 0].set_yscale("log")
    axes[0, 0].legend(fontsize=9)
    seeds = sorted({len(group) for group in by_arm(runs).values()})
    note = "METHOD@UPDATES: optimizer steps on each batch. Mean over %s seed(s); band: one standard deviation" % (
        "-".join(map(str, dict.fromkeys((seeds[0], seeds[-1]))))
    )
    figure.suptitle(note, fontsize=10)
    save(figure, path)


def save(figure: plt.Figure, path: Path) -> None:
    """Write a picture in one piece, and close it."""
    temporary = path.with_name(f".{path.name}")
    figure.savefig(temporary, format="png", dpi=90)
    temporary.replace(path)
    plt.close(figure)


def table(runs: list[RunMetrics], warm_start: dict | None) -> list[str]:
    """Markdown: a row per arm, mean ± standard deviation over seeds; "at the end" is the mean over the last steps."""
    names = list(next((run.final for run in runs if run.final), warm_start or {}))

    def cell(values) -> str:
        values = [value for value in values if value is not None and not math.isnan(value)]
        if not values:
            return "–"
        spread = f" ± {np.std(values, ddof=1):.3f}" if len(values) > 1 else ""
        return f"{np.mean(values):.3f}{spread}"

    header = ["arm", "seeds", "reward at end", "entropy at end", "rho, mean", "max grad norm", "clipped", "mean low / high"]
    rows = [[*header, *(f"held-out {name}" for name in names)], ["---"] * (len(header) + len(names))]
    if warm_start:
        rows.append(["warm start", *[""] * (len(header) - 1), *(cell([warm_start.get(name)]) for name in names)])
    for arm, group in by_arm(runs).items():
        of = lambda name, *how: [run.summary(name, *how) for run in group]  # noqa: E731
        clipped = [high + low for high, low in zip(of("clip_fraction_high"), of("clip_fraction_low"))]
        rows.append(
            [
                arm,
                str(len(group)),
                cell(of("reward", np.mean, LAST_STEPS)),
                cell(of("entropy", np.mean, LAST_STEPS)),
                cell(of("rho")),
                cell(of("grad_norm", np.max)),
                cell(clipped),
                f"{np.mean(of('low')):.2f} / {np.mean(of('high')):.2f}",
                *(cell([(run.final or {}).get(name) for run in group]) for name in names),
            ]
        )
    return ["| " + " | ".join(row) + " |" for row in rows]


def report(folder: Path) -> list[str]:
    """Draw folder/curves.png, write folder/table.md, and return the table's lines."""
    start = folder / "warm-start.json"
    if (folder / "runs.json").exists():
        warm_start = json.loads((folder / "runs.json").read_text())["warm_start"]
    else:
        warm_start = json.loads(start.read_text()) if start.exists() else None
    runs = load(folder)
    draw(runs, folder / "curves.png")
    lines = table(runs, warm_start)
    (folder / "table.md").write_text("\n".join(lines) + "\n")
    return lines


def pack(folder: Path, target: Path) -> None:
    """Copy all runs of `folder` into runs.json (configurations, results), metrics.csv.gz (a line per update) and, if tokens
    were saved, tokens.csv.gz."""
    runs, start = load(folder), folder / "warm-start.json"
    about = {f"{run.arm}-seed{run.seed}": {"config": run.config, "final": run.final} for run in runs}
    target.mkdir(parents=True, exist_ok=True)
    warm_start = json.loads(start.read_text()) if start.exists() else None
    (target / "runs.json").write_text(json.dumps({"warm_start": warm_start, "runs": about}, indent=1) + "\n")
    write_csv(target / "metrics.csv.gz", [{"run": f"{run.arm}-seed{run.seed}", **line} for run in runs for line in run.lines])
    tokens = []
    for name in about:
        for line in read_lines(folder / name / "tokens.jsonl") if (folder / name / "tokens.jsonl").exists() else []:
            step = line.pop("step")
            tokens += [{"run": name, "step": step, **dict(zip(line, values))} for values in zip(*line.values())]
    if tokens:
        write_csv(target / "tokens.csv.gz", tokens)


def main(arguments: list[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="what train.py --output_dir wrote, or a packed copy")
    parser.add_argument("--pack", type=Path, help="also write a packed copy here, and draw it")
    options = parser.parse_args(arguments)
    if options.pack:
        pack(options.folder, options.pack)
    print("\n".join(report(options.pack or options.folder)))


if __name__ == "__main__":
    main()
