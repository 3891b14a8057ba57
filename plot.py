"""Draw saved metrics: reward, entropy, positive contribution, gradient norm, clip fractions and clip bounds.

    python plot.py runs                           # runs/curves.png and runs/table.md, as train.py makes them at its end
    python plot.py runs --pack results/default    # and a compact copy of all metrics, from which the same can be drawn

Curves are means over seeds, bands one standard deviation over seeds. A folder holds either one folder per run (train.py)
or runs.json and metrics.jsonl.gz (packed).
"""

import argparse
import gzip
import json
import math
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
            steps.setdefault(line["step"], []).extend([] if value is None else [value])
        return np.array([reduce(values) if values else math.nan for values in steps.values()])

    def summary(self, name: str, reduce=np.mean, last: int = 0) -> float:
        """A metric reduced within its steps and then over the last ones (0: all) that have a value; NaN if none has."""
        values = self.per_step(name, reduce)[-last:]
        values = values[~np.isnan(values)]
        return float(reduce(values)) if len(values) else math.nan


def to_json_number(value: float) -> float | None:
    """Six significant digits; null for what JSON has no number for."""
    return float(f"{value:.6g}") if math.isfinite(value) else None


def read_lines(path: Path) -> list[dict]:
    """JSON Lines, gzipped or not. A last line that was cut off is left out."""
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt") as file:
        return [json.loads(line) for line in file if line.endswith("\n")]


def load(folder: Path) -> list[RunMetrics]:
    """All runs below `folder` that have metrics, those of one arm together. Raises ValueError if there is none."""
    runs = []
    if (folder / "runs.json").exists():
        about = json.loads((folder / "runs.json").read_text())["runs"]
        lines: dict[str, list[dict]] = {name: [] for name in about}
        for line in read_lines(folder / "metrics.jsonl.gz"):
            lines[line.pop("run")].append(line)
        found = [(name, run["config"], run["final"], lines[name]) for name, run in about.items()]
    else:
        found = []
        for path in sorted(folder.glob("*/metrics.jsonl")):
            final = path.with_name("final.json")
            config = json.loads(path.with_name("config.json").read_text())["config"]
            result = json.loads(final.read_text()) if final.exists() else None
            found.append((path.parent.name, config, result, read_lines(path)))
    for name, config, final, lines_of_run in found:
        if lines_of_run:
            runs.append(RunMetrics(name.rpartition("-seed")[0], config["seed"], config, final, lines_of_run))
    if not runs:
        raise ValueError(f"{folder} holds no metrics: run train.py --output_dir {folder} first")
    # Fixed bounds first, and among those the on-policy arm; then by name.
    key = lambda run: (run.config["search"]["rho0"] > 0, run.config["updates_per_batch"], run.arm, run.seed)  # noqa: E731
    return sorted(runs, key=key)


def by_arm(runs: list[RunMetrics]) -> dict[str, list[RunMetrics]]:
    arms: dict[str, list[RunMetrics]] = {}
    for run in runs:
        arms.setdefault(run.arm, []).append(run)
    return arms


def over_seeds(runs: list[RunMetrics], name: str, reduce=np.mean) -> np.ndarray:
    """A metric per step for each seed: [seeds, steps], cut to the steps that all runs have."""
    curves = [run.per_step(name, reduce) for run in runs]
    steps = min(map(len, curves))
    return np.stack([curve[:steps] for curve in curves])


def draw(runs: list[RunMetrics], path: Path) -> None:
    """Six panels in the manner of the paper's Figs. 2, 8 and 9."""
    figure, axes = plt.subplots(2, 3, figsize=(15, 7.5), constrained_layout=True)
    panels = [
        ("reward (all samples)", [("reward", np.mean, "-")]),
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
                steps, mean = np.arange(1, values.shape[1] + 1), values.mean(0)
                axis.plot(steps, mean, style, color=color, label=arm if style == "-" else None, linewidth=1.4)
                if len(group) > 1:
                    spread = values.std(0, ddof=1)
                    axis.fill_between(steps, mean - spread, mean + spread, color=color, alpha=0.15, linewidth=0)
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
    temporary = path.with_name(f".{path.name}")
    figure.savefig(temporary, format="png", dpi=110)
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
        rows.append(["warm start", *[""] * (len(header) - 1), *(f"{warm_start[name]:.3f}" for name in names)])
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
                *(cell([run.final and run.final[name] for run in group]) for name in names),
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
    """Copy all runs of `folder` into two files, runs.json (configurations, results) and metrics.jsonl.gz (every update)."""
    runs, start = load(folder), folder / "warm-start.json"
    about = {f"{run.arm}-seed{run.seed}": {"config": run.config, "final": run.final} for run in runs}
    target.mkdir(parents=True, exist_ok=True)
    warm_start = json.loads(start.read_text()) if start.exists() else None
    (target / "runs.json").write_text(json.dumps({"warm_start": warm_start, "runs": about}, indent=1) + "\n")
    # mtime and name fixed, so that the same metrics give the same file
    with open(target / "metrics.jsonl.gz", "wb") as raw, gzip.GzipFile("", "wb", 9, raw, mtime=0) as file:
        for run in runs:
            for line in run.lines:
                file.write((json.dumps({"run": f"{run.arm}-seed{run.seed}", **line}) + "\n").encode())


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="what train.py --output_dir wrote, or a packed copy")
    parser.add_argument("--pack", type=Path, help="also write a packed copy here, and draw it")
    options = parser.parse_args(arguments)
    if options.pack:
        pack(options.folder, options.pack)
    print("\n".join(report(options.pack or options.folder)))


if __name__ == "__main__":
    main()
