"""Pack the runs of a folder: what the tables and pictures need, and how they were made.

    python -m results.scripts.pack runs/rate-3e-4 results/rate-3e-4 "$(git rev-parse --short HEAD)"

The arguments are an output_dir of train.py, a folder in results/, and the commit that the runs were
made with. A fourth word, bapo@8=bapo-main@8, gives the first method the second name. It writes
metrics.csv.xz and accuracies.csv, which plot.load reads. Runs that were packed before stay, so that
a sweep can be made block by block; runs.json holds each block's commit, date, machine and options.
The language model's samples.csv.xz were packed by this script at commit fdcd1ab.
"""

import platform
import re
import sys
from datetime import date
from pathlib import Path

import pandas as pd

from support import plot, runs


def pack(source: Path, target: Path, commit: str, names: dict[str, str]) -> None:
    """Write the files into `target`. Raises ValueError if a run has not ended."""
    lines, accuracies = plot.read_runs(source)
    not_ended = lines.index.difference(accuracies.index)
    if len(not_ended):
        raise ValueError(
            f"{source} has runs that have not ended: {list(not_ended)}. Continue them; for one that"
            ' stopped at an infinite loss write {"steps": its last step, "mean@16": 0, "pass@8": 0}'
            " into its final.json"
        )
    lines = lines.rename(names)
    accuracies = accuracies.rename(names)
    config = source / "config.json"
    # Another processor gives other numbers for the same command.
    found = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())  # not on ARM
    blocks = []
    if target.exists():
        packed = plot.load(target)
        lines = with_others(lines, packed.lines)
        accuracies = with_others(accuracies, packed.accuracies)
        blocks = runs.read_json(target / "runs.json")["blocks"]
    block = {
        "commit": commit,
        "date": str(date.fromtimestamp(config.stat().st_mtime)),
        "machine": found[1] if found else platform.machine(),
        "options": runs.read_json(config),
    }
    if block not in blocks:
        blocks.append(block)
    target.mkdir(parents=True, exist_ok=True)
    lines.to_csv(target / "metrics.csv.xz", float_format="%.4g")
    accuracies.to_csv(target / "accuracies.csv", index_label=plot.RUN)
    runs.write_json(target / "runs.json", {"blocks": blocks})


def with_others(new: pd.DataFrame, old: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of new, and those of old runs that new does not have, ordered by run."""
    others = old[~old.index.isin(new.index)]
    return pd.concat([new, others]).sort_index(kind="stable")


def main() -> int:
    """Run the command line. Returns the exit status 0."""
    source, target, commit, *names = sys.argv[1:]
    pack(Path(source), Path(target), commit, dict(name.split("=") for name in names))
    return 0


if __name__ == "__main__":
    runs.command("pack.py", main, "Interrupted: pack again")
