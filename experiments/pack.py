"""Keep of a folder of runs what the tables and pictures need, and how they were made.

    python experiments/pack.py runs/default results/default "$(git rev-parse --short HEAD)"

The last word is the commit that the runs were made with. The files are metrics.csv.xz,
accuracies.csv and runs.json. plot.load reads both kinds of folders.
"""

import argparse
import sys
from datetime import date
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT))

import plot
import runs
import train

KEPT = [
    "step",
    "update",
    "reward",
    "entropy",
    "length_correct",
    "length_wrong",
    "grad_norm",
    "low",
    "high",
    "gradient_share",
    "rho_start",
    "entropy_rule",
    "entropy_now",
]
NOT_SAID = {"jobs", "resume", "device", "precision", "checkpoint_every"}  # in the command


def pack(source: Path, target: Path, commit: str) -> None:
    """Write the files into `target`. Raises ValueError if a run has not ended."""
    lines, accuracies = plot.load(source)
    not_ended = lines.index.difference(accuracies.index)
    if len(not_ended):
        raise ValueError(f"{source} has runs that have not ended: {list(not_ended)}")
    target.mkdir(parents=True, exist_ok=True)
    lines.reindex(columns=KEPT).to_csv(target / "metrics.csv.xz", float_format="%.4g")
    accuracies.to_csv(target / "accuracies.csv", index_label=plot.RUN)
    config = runs.read_json(source / "config.json") | {"output_dir": f"runs/{target.name}"}
    made = date.fromtimestamp((source / "config.json").stat().st_mtime)
    kept = {
        "command": command(config),
        "commit": commit,
        "date": str(made),
        "config": config,
    }
    runs.write_json(target / "runs.json", kept)


def command(config: dict) -> str:
    """The command that made the runs: train.py with the options that are not its defaults."""
    words = ["python train.py"]
    for name, default in vars(train.Options()).items():
        value = config[name]
        if value != default and name not in NOT_SAID:
            values = value if isinstance(value, list) else [value]
            words.append(f"--{name} {' '.join(map(str, values))}")
    return " ".join(words)


def main() -> int:
    """The command line. Returns the exit status 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=runs.HelpFormatter)
    parser.add_argument("source", type=Path, help="output_dir of train.py")
    parser.add_argument("target", type=Path, help="folder in results/")
    parser.add_argument("commit", help="that the runs were made with")
    pack(**vars(parser.parse_args()))
    return 0


if __name__ == "__main__":
    runs.command("pack.py", main, "Interrupted: pack again")
