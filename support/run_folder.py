"""What a run is, and its folder, so that nothing that was computed is lost.

config.json        everything that decides the numbers, the versions it was made with, and what
                   was changed on the way
metrics.jsonl      a line per update; timings.jsonl: a line per step; samples.jsonl: a line per
                   response that is kept to look at
checkpoint-STEP/   the newest one: a model that transformers loads, and state.pt for an exact
                   continuation
model/             the last checkpoint of a finished run (state.pt in it is needed only to make
                   the run longer)
final.json         held-out accuracy at the end
error.txt          the traceback of a run that failed
nonfinite.pt       the batch and the metrics of an update whose loss or gradient was not finite
lock               held by the process that writes here; the file stays, it means nothing itself
"""

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
import transformers

from support.arms import Arm
from support.batches import MicroBatch
from support.files import (
    Lines,
    differences,
    lock,
    read_lines,
    remove,
    remove_leftovers,
    write_atomically,
    write_json,
)
from support.options import Options
from support.workers import report, say

IDLE_STEPS = 10  # without a group to train on: worth a warning

# Options that fit a run into memory: they change rounding, and which random numbers a response
# gets where not all are drawn together, never a distribution. --resume may change them.
MEMORY_OPTIONS = {"micro_batch_tokens", "gradient_checkpointing"}

# The settings of an arm (Arm.config), and what else makes its runs differ.
ARM_CONFIG = {
    "arm",
    "search",
    "epochs",
    "parts",
    "objective",
    "seed",
    "warm_start",
}

# What may differ between runs that share a folder, and so a table and a picture.
MAY_DIFFER_IN_A_TABLE = ARM_CONFIG | MEMORY_OPTIONS | {"checkpoint_every"}

Config = dict[str, Any]  # all that decides a run's numbers; plain data, as JSON holds it


class Run(NamedTuple):
    """One arm, start and seed."""

    folder: Path
    arm: Arm
    start: str  # the policy to begin with: a folder, or a name on the hub
    seed: int
    options: Options
    config: Config  # as it is saved and compared


# ------------------------------------------------------------------------- before the first step
def prepare_output(output: Path, runs: list[Run], resume: bool) -> None:
    """Prepare the folder of all runs of a command, and the runs' own folders.

    Refuses, by ValueError, what would be noticed only after minutes of training: see
    check_same_setting and prepare_folder. What killed commands have left is removed.
    """
    if resume and not output.exists():
        say(f"--resume: there is no {output}, so everything begins afresh")
    clean_output(output)
    check_same_setting(output, runs[0].config, {run.folder for run in runs})
    for run in runs:
        prepare_folder(run.folder, run.config, resume)


def clean_output(output: Path) -> None:
    """Remove what earlier commands have left: half-written files, the errors of an evaluation.

    And, where no run is left, the accuracies of the starts: they may be those of another setting.
    """
    remove_leftovers(output)
    remove(output / "error.txt")
    if not any(output.glob("*/config.json")):
        for path in output.glob("start*.json"):
            path.unlink()


def check_same_setting(output: Path, config: Config, own: set[Path]) -> None:
    """Check that runs may share the folder `output`, and with it a table and a picture.

    Args:
        config: that of one of the runs that are to be made.
        own: the folders of all of them. They may have fewer steps: they are being made longer.

    Raises:
        ValueError: if a run that is there differs in more than MAY_DIFFER_IN_A_TABLE.
    """
    for config_path in sorted(output.glob("*/config.json")):
        folder = config_path.parent
        may_differ = MAY_DIFFER_IN_A_TABLE
        if folder in own:
            may_differ = may_differ | {"steps"}
        changed = differences(read_config(folder), config, may_differ)
        if changed:
            raise ValueError(
                f"{folder} was made in another setting ({changed}): take another --output_dir"
            )


def prepare_folder(folder: Path, config: Config, resume: bool) -> None:
    """Create a run's folder with its config, or check that the one there may be continued.

    A run may be made longer, and fitted into other memory: `steps`, `checkpoint_every` and
    MEMORY_OPTIONS may change, the last with a note in config.json; all else must be equal.

    Raises:
        ValueError: for a run that is there without `resume`, was made with other settings, is
            longer already, or is being written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with lock(folder / "lock"):
        changes = []
        if holds_a_run(folder):
            if not resume:
                raise ValueError(
                    f"{folder} holds a run already: add --resume to continue it, "
                    "or choose another --output_dir"
                )
            changes = continue_with(folder, config)
        versions = {
            "python": sys.version.split()[0],
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        }
        content = {"config": config, "versions": versions, "changed": changes}
        write_json(folder / "config.json", content)


def holds_a_run(folder: Path) -> bool:
    """Whether something would be lost if a run began in `folder`."""
    metrics = folder / "metrics.jsonl"
    has_metrics = metrics.exists() and metrics.stat().st_size > 0
    has_checkpoint = newest_checkpoint(folder) is not None
    return has_checkpoint or (folder / "model").exists() or has_metrics


def continue_with(folder: Path, config: Config) -> list[dict]:
    """Check that the run in `folder` may go on with `config`; a finished one is opened again.

    Returns what was changed since it began: a list of {step, option, from, to}. Raises ValueError
    if it was made with other options, or is longer already.
    """
    saved = read_config(folder)
    changed = differences(saved, config, {"steps", "checkpoint_every"} | MEMORY_OPTIONS)
    if changed:
        raise ValueError(
            f"{folder} was made with other options ({changed}): "
            "use the old ones, or another --output_dir"
        )
    done = steps_done(folder)
    if done > config["steps"]:
        raise ValueError(f"steps: {folder} has {done} already, more than {config['steps']}")
    model = folder / "model"
    if model.exists() and done < config["steps"]:
        if not (model / "state.pt").exists():
            raise ValueError(
                f"steps: {model}/state.pt is gone, without which the run cannot be made longer"
            )
        os.replace(model, folder / f"checkpoint-{done}")
        remove(folder / "final.json")  # of the shorter run
    changes = read_config_file(folder).get("changed", [])
    for option in sorted(MEMORY_OPTIONS):
        if saved.get(option) != config.get(option):
            change = {"step": done, "option": option}
            change["from"] = saved.get(option)
            change["to"] = config.get(option)
            changes.append(change)
    return changes


# ------------------------------------------------------------------------- reading
def read_config_file(folder: Path) -> dict:
    """config.json of the run in `folder`: "config", "versions", "changed"; {} if there is none."""
    path = folder / "config.json"
    return json.loads(path.read_text()) if path.exists() else {}


def read_config(folder: Path) -> Config:
    """The config of the run in `folder`; {} if there is none."""
    return read_config_file(folder).get("config", {})


def read_metrics(path: Path, unfinished: bool = False) -> list[dict]:
    """Read metrics.jsonl.

    unfinished: whether the run may still be going on, see read_lines. Raises ValueError naming
    the line where an update is there twice or missing: two processes wrote the file, or somebody
    cut it.
    """
    lines = read_lines(path, unfinished)
    last_step = 0
    last_update = 0
    last_update_of_step = 0  # the number of updates that the last line's step should have
    for number, line in enumerate(lines, 1):
        step = line.get("step")
        update = line.get("update")
        # A step has updates 1, 2, ...; one without anything to train on has a single line, 0.
        step_is_complete = last_update == last_update_of_step
        begins_a_step = step == last_step + 1 and update in (0, 1) and step_is_complete
        continues = (step, update) == (last_step, last_update + 1) and last_update > 0
        if not (begins_a_step or continues):
            raise ValueError(
                f"{path}, line {number}: step {step}, update {update} after "
                f"step {last_step}, update {last_update}: updates are missing or there twice"
            )
        last_step = step
        last_update = update
        last_update_of_step = line.get("updates", update)
    return lines


def steps_done(folder: Path) -> int:
    """Steps that need not be run again: up to the newest checkpoint; all of a finished run."""
    if (folder / "model").exists():
        return read_config(folder)["steps"]
    checkpoint = newest_checkpoint(folder)
    return step_of(checkpoint) if checkpoint else 0


def newest_checkpoint(folder: Path) -> Path | None:
    """The folder of the last whole checkpoint; None if there is none."""
    return max(folder.glob("checkpoint-*"), key=step_of, default=None)


def step_of(checkpoint: Path) -> int:
    """STEP of a folder checkpoint-STEP."""
    return int(checkpoint.name.partition("-")[2])


# ------------------------------------------------------------------------- while it runs
def write_step(
    folder: Path, log: dict, seconds: dict, files: dict[str, Lines], trained: bool
) -> None:
    """Write what belongs to a step, not to an update, and tell the parent that it is done.

    Args:
        log: what was logged of the step, with its number as "step".
        seconds: what took how long, for timings.jsonl.
        files: "metrics" and "timings". A step that trained nothing gets a line in metrics, too,
            as update 0; when there were IDLE_STEPS of them, the parent hears a warning.
    """
    if not trained:
        files["metrics"].write({**log, "update": 0})
        idle = idle_steps(files["metrics"].path)
        if idle % IDLE_STEPS == 0:
            report(
                f"{folder.name}: nothing to train on in the last {idle} steps: "
                "the rewards of every group are all equal, "
                "or, with partial rollouts, no group is finished"
            )
    files["timings"].write({"step": log["step"], **seconds})
    note = folder.name
    if "reward" in log:
        note += f" reward {log['reward']:.2f}"
    if "entropy" in log:
        note += f", entropy {log['entropy']:.2f}"
    report(note, steps=1)


def idle_steps(metrics: Path) -> int:
    """How many steps at the end of metrics.jsonl have trained nothing."""
    count = 0
    for line in reversed(read_lines(metrics)):
        if line["update"]:
            break
        count += 1
    return count


class NotFinite(FloatingPointError):
    """The loss or the gradient of an update is not finite; with all that shows why."""

    def __init__(self, step: int, update: int, numbers: dict[str, float], whole: MicroBatch):
        super().__init__(f"step {step}, update {update}")
        self.step = step
        self.update = update
        self.numbers = numbers
        self.whole = whole  # all that the update saw


def stop_not_finite(folder: Path, error: NotFinite) -> NoReturn:
    """Save the batch in folder/nonfinite.pt, and raise FloatingPointError that names the file."""
    path = folder / "nonfinite.pt"
    state = {
        "step": error.step,
        "update": error.update,
        "numbers": error.numbers,
        "batch": error.whole.rollouts.tensors(),
        "advantages": error.whole.advantages,
    }
    write_atomically(path, lambda file: torch.save(state, file))
    loss = error.numbers["loss"]
    norm = error.numbers["grad_norm"]
    raise FloatingPointError(
        f"{folder.name}: {error}: loss {loss}, gradient norm {norm};"
        f" the batch and all metrics are in {path}"
    ) from error


# ------------------------------------------------------------------------- checkpoints
def save_checkpoint(
    folder: Path, step: int, model, tokenizer, state: dict, files: dict[str, Lines]
) -> None:
    """Save the policy as a folder that transformers loads, and in it state.pt.

    That holds `state`, the random states, the step (which is also the data's cursor) and the
    sizes of the files. The checkpoint before is removed once this one is whole.
    """
    cuda_states = []
    if model.device.type == "cuda":
        cuda_states = [torch.cuda.get_rng_state(model.device)]
    state = state | {
        "step": step,
        "sizes": {name: file.size() for name, file in files.items()},
        "rng": torch.get_rng_state(),
        "cuda_rng": cuda_states,
    }

    def write(path: Path) -> None:
        model.save_pretrained(path)
        tokenizer.save_pretrained(path)
        torch.save(state, path / "state.pt")

    new = folder / f"checkpoint-{step}"
    write_atomically(new, write)
    older = [path for path in folder.glob("checkpoint-*") if path != new]
    half_written = list(folder.glob(".checkpoint-*"))
    for path in older + half_written:
        shutil.rmtree(path)


def restore(checkpoint: Path, device: str) -> dict:
    """Read state.pt of a checkpoint, and set the random states to those in it."""
    # On the CPU: load_state_dict moves to the device what must be there.
    state = torch.load(checkpoint / "state.pt", map_location="cpu", weights_only=True)
    torch.set_rng_state(state["rng"])
    if device != "cpu":
        for cuda_state in state["cuda_rng"]:
            torch.cuda.set_rng_state(cuda_state, device)
    return state


def finish(folder: Path) -> None:
    """Let the last checkpoint become model/, and remove what a kill has left half done.

    May be called again: then only the latter.
    """
    newest = newest_checkpoint(folder)
    if newest and not (folder / "model").exists():
        os.replace(newest, folder / "model")
    for checkpoint in folder.glob("checkpoint-*"):
        remove(checkpoint)
    for half_written in folder.glob(".*.unfinished"):
        remove(half_written)
    remove(folder / "error.txt")
