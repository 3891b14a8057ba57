"""Pack the runs of a folder: what the tables and pictures need, and how they were made.

    python -m results.scripts.pack runs/rate-3e-4 results/rate-3e-4 "$(git rev-parse --short HEAD)"

The words are an output_dir of train.py, a folder in results/, and the commit that the runs were
made with. A fourth word, bapo@8=bapo-main@8, gives the first method the second name. It writes
metrics.csv.xz, accuracies.csv and runs.json, which plot.load reads. Runs that were packed before
stay, so that a sweep can be made block by block; runs.json holds each block's command, commit,
date and machine. The language model's samples.csv.xz were packed by this script at commit fdcd1ab.
"""

import os
import re
import sys
from datetime import date
from pathlib import Path

import pandas as pd

import train
from support import command_line, files, plot

# kept once per step
OF_STEP = ["reward", "entropy", "length_correct", "length_wrong", "truncated", "filtered_groups"]
OF_UPDATE = [
    "step",
    "update",
    "grad_norm",
    "low",
    "high",
    "gradient_share",
    "rho_start",
    "reached",
    "at_start",
    "at_end",
    "kl",
    "entropy_now",
    "predicted_entropy_fall",
    "clip_fraction_high",
    "clip_fraction_low",
]
# With --evaluate_every, and what runs of other commits log for single comparisons
EXTRA = re.compile("(held_out|rho|low|high|share|improbable|probability|fall|slopes?)_.+")
# The mechanism's runs measure slopes at this update, and wrote them again on the step's later lines
SLOPE_UPDATE = 5
LEFT_OUT = {"jobs", "resume", "device", "checkpoint_every"}  # of the command


def pack(source: Path, target: Path, commit: str, names: dict[str, str]) -> None:
    """Write the files into `target`. Raises ValueError if a run has not ended."""
    lines, accuracies = read(source)
    not_ended = lines.index.difference(accuracies.index)
    if len(not_ended):
        raise ValueError(
            f"{source} has runs that have not ended: {list(not_ended)}. Continue them; for one that"
            ' stopped at an infinite loss write {"steps": its last step, "mean@16": 0, "pass@8": 0}'
            " into its final.json"
        )
    extra = filter(EXTRA.fullmatch, lines)
    columns = dict.fromkeys([*OF_STEP, *OF_UPDATE, *extra])
    lines = lines[[name for name in columns if name in lines]].rename(names)
    lines.loc[lines["update"] > 1, OF_STEP] = None
    slopes = lines.columns[lines.columns.str.startswith(("slope_", "slopes_"))]
    lines.loc[lines["update"] != SLOPE_UPDATE, slopes] = None
    accuracies = accuracies.rename(names)
    config = files.read_json(source / "config.json")
    made = date.fromtimestamp((source / "config.json").stat().st_mtime)
    program = "-m results.scripts.mechanism" if "fall_at_0.8_1.2" in lines else "train.py"
    block = {"command": f"python {program}{options(config)}", "commit": commit}
    block |= {"date": str(made), "machine": machine()}
    blocks = [block]
    if target.exists():
        packed = plot.load(target)
        lines = with_others(lines, packed.lines)
        accuracies = with_others(accuracies, packed.accuracies)
        before = files.read_json(target / "runs.json")["blocks"]
        blocks = [one for one in before if one["command"] != block["command"]] + blocks
    target.mkdir(parents=True, exist_ok=True)
    lines.to_csv(target / "metrics.csv.xz", float_format="%.4g")
    accuracies.to_csv(target / "accuracies.csv", index_label=plot.RUN)
    files.write_json(target / "runs.json", {"blocks": blocks, "config": config})


def read(source: Path) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return lines and accuracies as plot.read_runs does, but let columns hold text.

    slopes_CLASS of the mechanism's runs are texts such as "-0.2;0.1".
    """
    frames = {}
    accuracies = {}
    for path in source.glob("start-seed*.json"):
        seed = int(path.stem.removeprefix("start-seed"))
        accuracies[plot.START, seed] = files.read_json(path)
    for path in source.glob("*-seed*/metrics.jsonl"):
        method, seed = path.parent.name.split("-seed")
        run = (method, int(seed))
        frames[run] = pd.DataFrame(files.read_lines(path))
        final = path.with_name("final.json")  # train.py removes it before it continues a run
        if final.exists():
            accuracies[run] = files.read_json(final)
    lines = pd.concat(frames, names=plot.RUN).droplevel(2)  # the line numbers
    return lines, pd.DataFrame(accuracies).T.filter(like="@")


def with_others(new: pd.DataFrame, old: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of new, and those of old runs that new does not have, ordered by run."""
    others = old[~old.index.isin(new.index)]
    return pd.concat([new, others]).sort_index(kind="stable")


def machine() -> str:
    """Return the processor, since another one gives other numbers for the same command."""
    text = Path("/proc/cpuinfo").read_text()
    name = re.search(r"model name\s*: (.*)", text)[1]
    return f"{name}, {os.cpu_count()} cores"


def options(config: dict) -> str:
    """Return the options that are not train.py's defaults, each with a space before it."""
    defaults = vars(train.Options())
    text = ""
    for name, value in config.items():
        if value != defaults.get(name) and name not in LEFT_OUT:
            words = value if isinstance(value, list) else [value]
            text += f" --{name} {' '.join(map(str, words))}"
    return text


def main() -> int:
    """Run the command line. Returns the exit status 0."""
    source, target, commit, *names = sys.argv[1:]
    pack(Path(source), Path(target), commit, dict(name.split("=") for name in names))
    return 0


if __name__ == "__main__":
    command_line.command("pack.py", main, "Interrupted: pack again")
