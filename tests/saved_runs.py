"""Run folders written by hand, and what tests ask of pictures."""

import json
from pathlib import Path

from matplotlib.text import Text

SEARCH = {"rho0": 0.45, "low_start": 0.8}


def write_run(
    folder: Path,
    arm: str,
    start: int | None,
    seed: int,
    step_lines: list[list[dict]],
    final: dict | None = None,
    **settings,
) -> Path:
    """A run's folder as train.py leaves it.

    step_lines: for every step the lines of its updates, without step and update; a line with
    "untrained" is that of a step without an update. Without `final` the run goes on.
    """
    config = {
        "arm": arm,
        "seed": seed,
        "epochs": int(arm.split("@")[1][0]),
        "search": SEARCH,
        "learning_rate": 4e-4,
        "steps": 80,
    }
    name = f"{arm}-seed{seed}"
    if start is not None:
        config["warm_start"] = start
        name = f"{arm}-start{start}-seed{seed}"
    config.update(settings)
    run = folder / name
    run.mkdir(parents=True)
    (run / "config.json").write_text(json.dumps({"config": config, "versions": {}}))
    with open(run / "metrics.jsonl", "w") as file:
        for step, updates in enumerate(step_lines, 1):
            for update, values in enumerate(updates, 1):
                line = {"step": step, **values}
                if line.pop("untrained", False):
                    line["update"] = 0
                else:
                    line["update"] = update
                    line["updates"] = len(updates)
                file.write(json.dumps(line) + "\n")
    if final:
        (run / "final.json").write_text(json.dumps(final))
    return run


def two_updates(reward: float, more_share: float = 0.0, **changes) -> list[dict]:
    """The lines of a step with two updates, of gradient norms 1 and 3."""
    line = {
        "reward": reward,
        "entropy": 0.5,
        "gradient_share": 0.4 + more_share,
        "negatives_with_gradient": 0.9,
        "kl": 0.0012,
        "low": 0.8,
        "length_correct": 20.0,
        "length_wrong": None,
        "clip_fraction_high": 0.01,
        "clip_fraction_low": 0.02,
        **changes,
    }
    return [{**line, "high": 2.2, "grad_norm": 1.0}, {**line, "high": 3.2, "grad_norm": 3.0}]


def write_folder(runs: Path) -> Path:
    """One run of bapo@2; of grpo@2 two warm starts, of which the first has two seeds.

    The reward jumps before the last ten of 30 steps.
    """
    for start, seed, end, accuracy in ((1, 0, 0.5, 0.2), (1, 1, 0.7, 0.4), (2, 0, 0.8, 0.9)):
        steps = [two_updates(0.1, 0.1 * seed) for _ in range(20)]
        steps += [two_updates(end, 0.1 * seed) for _ in range(10)]
        final = {"greedy": accuracy, "mean@16": accuracy, "pass@8": 0.9, "pass@16": 0.95}
        write_run(runs, "grpo@2", start, seed, steps, final)
    steps = [two_updates(0.3) for _ in range(30)]
    write_run(runs, "bapo@2", 1, 0, steps, {"greedy": 0.5, "mean@16": 0.5, "pass@8": 0.6})
    for start, reached in ((1, 0.25), (2, 0.35)):
        accuracies = {"greedy": 0.1, "mean@16": reached, "pass@8": 0.8}
        (runs / f"start{start}.json").write_text(json.dumps(accuracies))
    return runs


def rows_of(lines: list[str]) -> dict[str, dict[str, str]]:
    """Arm -> column -> cell of a Markdown table."""
    table = [line for line in lines if line.startswith("|")]
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table]
    header = cells[0]
    return {row[0]: dict(zip(header, row)) for row in cells[2:]}


def overlaps(figure) -> list[tuple[str, str]]:
    """Pairs of names (of curves and rows) that cover each other."""
    figure.canvas.draw()  # at its own resolution, not the file's
    texts = [text for axis in figure.axes for text in axis.texts]
    # The extent of the letters alone: an annotation's own extent has its arrow, too.
    boxes = [Text.get_window_extent(text) for text in texts]
    found = []
    for i, box in enumerate(boxes):
        for j in range(i + 1, len(boxes)):
            if box.overlaps(boxes[j]):
                found.append((texts[i].get_text(), texts[j].get_text()))
    return found
