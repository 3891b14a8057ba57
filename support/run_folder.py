"""What a run is, its folder, so that nothing that was computed is lost, and runs side by side.

config.json        everything that decides the numbers, and the versions it was made with
metrics.jsonl      a line per update; timings.jsonl: a line per step; samples.jsonl: a line per response that is kept to look at
checkpoint-STEP/   the newest one: a model that transformers loads, and state.pt for an exact continuation
model/             the last checkpoint of a finished run (state.pt in it is needed only to make the run longer)
final.json         held-out accuracy at the end; error.txt: the traceback of a run that failed
lock               held by the process that writes here; the file stays, it means nothing by itself
"""

import json
import os
import shutil
import sys
from pathlib import Path
from typing import NamedTuple

import torch
import transformers

from support.arms import ARM_FIELDS, Arm
from support.files import Lines, differences, lock, read_lines, remove, write_atomically, write_json
from support.options import Options
from support.workers import report

IDLE_STEPS = 10  # without a group to train on: worth a warning


class Run(NamedTuple):
    """One arm, start and seed."""

    folder: Path
    arm: Arm
    start: str  # the policy to begin with: a folder, or a name on the hub
    seed: int
    options: Options
    config: dict  # all that decides the numbers, as it is saved and compared


def read_metrics(path: Path, unfinished: bool = False) -> list[dict]:
    """metrics.jsonl. ValueError if an update is there twice or missing: two processes wrote it, or somebody cut it."""
    lines, last, expected = read_lines(path, unfinished), (0, 0), 0
    for number, line in enumerate(lines, 1):
        key = step, update = line.get("step"), line.get("update")
        begins = step == last[0] + 1 and update in (0, 1) and last[1] == expected
        goes_on = key == (last[0], last[1] + 1) and last[1] > 0
        if not begins and not goes_on:
            raise ValueError(f"{path}, line {number}: step, update {key} after {last}: updates are missing or there twice")
        last, expected = key, line.get("updates", update)
    return lines


def end_of_step(folder: Path, log: dict, seconds: dict, files: dict[str, Lines], trained: bool) -> None:
    """Lines for a step without any update, and for its speed; word to the parent, and a warning if nothing is trained."""
    if not trained:
        files["metrics"].write({**log, "update": 0})
        updates = [line["update"] for line in read_lines(files["metrics"].path)]
        idle = len(updates) - max((i for i, update in enumerate(updates, 1) if update), default=0)
        if idle % IDLE_STEPS == 0:
            report(f"{folder.name}: nothing to train on in the last {idle} steps: the rewards of every group are all equal")
    files["timings"].write({"step": log["step"], **seconds})
    report(f"{folder.name} " + ", ".join(f"{k} {log[k]:.2f}" for k in ("reward", "entropy") if k in log), steps=1)


def read_config(folder: Path) -> dict:
    """The config of the run in `folder`; {} if there is none."""
    path = folder / "config.json"
    return json.loads(path.read_text())["config"] if path.exists() else {}


def prepare_folder(folder: Path, config: dict, resume: bool) -> None:
    """Create a run's folder with its config, or check that the one there may be continued with this one: all must be equal but
    `steps` and `checkpoint_every`, as a run may be made longer. ValueError for a run that is there without `resume`, was made
    with other settings, is longer already, or is being written."""
    folder.mkdir(parents=True, exist_ok=True)
    with lock(folder / "lock"):
        saved, metrics, model = read_config(folder), folder / "metrics.jsonl", folder / "model"
        if newest_checkpoint(folder) or model.exists() or metrics.exists() and metrics.stat().st_size:
            if not resume:
                raise ValueError(f"{folder} holds a run already: add --resume to continue it, or choose another --output_dir")
            if changed := differences(saved, config, {"steps", "checkpoint_every"}):
                raise ValueError(f"{folder} was made with other options ({changed}): use the old ones, or another --output_dir")
            if (done := steps_done(folder)) > config["steps"]:
                raise ValueError(f"steps: {folder} has {done} already, more than {config['steps']}")
            if model.exists() and done < config["steps"]:
                if not (model / "state.pt").exists():
                    raise ValueError(f"steps: {model}/state.pt is gone, without which the run cannot be made longer")
                os.replace(model, folder / f"checkpoint-{done}")
                (folder / "final.json").unlink(missing_ok=True)  # of the shorter run
        versions = {"python": sys.version.split()[0], "torch": torch.__version__, "transformers": transformers.__version__}
        write_json(folder / "config.json", {"config": config, "versions": versions})


def check_same_setting(output: Path, config: dict, own: set[Path]) -> None:
    """ValueError if a run in `output` differs in more than what makes an arm, a start and a seed: all runs of a folder share
    one table and one picture. The `own` ones may in steps, too: they are being made longer."""
    for folder in (found := sorted(path.parent for path in output.glob("*/config.json"))):
        may_differ = ARM_FIELDS | {"checkpoint_every"} | ({"steps"} if folder in own else set())
        if changed := differences(read_config(folder), config, may_differ):
            raise ValueError(f"{folder} was made in another setting ({changed}): take another --output_dir")
    for path in [] if found else output.glob("start*.json"):
        path.unlink()  # what the start reached in the setting of runs that are gone


def steps_done(folder: Path) -> int:
    """Steps that need not be run again: up to the newest checkpoint, or all if the run is finished."""
    if (folder / "model").exists():
        return read_config(folder)["steps"]
    return int(checkpoint.name.partition("-")[2]) if (checkpoint := newest_checkpoint(folder)) else 0


def newest_checkpoint(folder: Path) -> Path | None:
    """The folder of the last whole checkpoint; None if there is none."""
    return max(folder.glob("checkpoint-*"), key=lambda path: int(path.name.partition("-")[2]), default=None)


def save_checkpoint(folder: Path, step: int, model, tokenizer, state: dict, files: dict[str, Lines]) -> None:
    """The policy, as a folder that transformers loads, and in it state.pt: `state`, the random states, the step (which is
    the data's cursor, too) and the files' sizes. The checkpoint before is removed when this one is whole."""
    cuda = [torch.cuda.get_rng_state(model.device)] if model.device.type == "cuda" else []
    sizes = {name: file.size() for name, file in files.items()}
    state = {**state, "step": step, "sizes": sizes, "rng": torch.get_rng_state(), "cuda_rng": cuda}

    def write(path: Path) -> None:
        model.save_pretrained(path)
        tokenizer.save_pretrained(path)
        torch.save(state, path / "state.pt")

    new = folder / f"checkpoint-{step}"
    write_atomically(new, write)
    for old in {*folder.glob("checkpoint-*"), *folder.glob(".checkpoint-*")} - {new}:
        shutil.rmtree(old)


def restore(checkpoint: Path, device: str) -> dict:
    """state.pt of a checkpoint; sets the random states."""
    state = torch.load(checkpoint / "state.pt", map_location="cpu", weights_only=True)  # load_state_dict moves what must be
    torch.set_rng_state(state["rng"])
    for of_device in state["cuda_rng"] if device != "cpu" else []:
        torch.cuda.set_rng_state(of_device, device)
    return state


def finish(folder: Path) -> None:
    """The last checkpoint becomes model/; what a kill has left half written or half removed goes. Again: only the latter."""
    if (newest := newest_checkpoint(folder)) and not (folder / "model").exists():
        os.replace(newest, folder / "model")
    for path in [*folder.glob("checkpoint-*"), *folder.glob(".*.unfinished"), folder / "error.txt"]:
        remove(path)


def stop_not_finite(folder: Path, step: int, update: int, numbers: dict, batch) -> None:
    """Save the batch and raise FloatingPointError."""
    path = folder / "nonfinite.pt"
    state = {"step": step, "update": update, "numbers": numbers, "batch": vars(batch.rollouts), "advantages": batch.advantages}
    write_atomically(path, lambda file: torch.save(state, file))
    wrong = f"loss {numbers['loss']}, gradient norm {numbers['grad_norm']}"
    raise FloatingPointError(f"{folder.name}: step {step}, update {update}: {wrong}; the batch and all metrics are in {path}")
