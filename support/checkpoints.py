"""Checkpoints of a run, and the options of a folder of runs: what --resume continues and refuses.

A command with --resume must have the options of the folder, but for train.MAY_DIFFER
(`write_config`). Every run then continues from its newest checkpoint (train.load_state), and what
was logged after it is made again. A run without a checkpoint begins anew, unless more than that
would be lost (`check_nothing_is_lost`).
"""

import shutil
from pathlib import Path

import torch

from support.files import check_same, read_lines, write_atomically, write_json


def save_checkpoint(folder: Path, step: int, model, tokenizer, optimizer, waiting: list) -> None:
    """Write folder/checkpoint-STEP: a model that transformers loads, and state.pt.

    state.pt holds the optimizer, the partial rollouts that wait, and torch's random states. Older
    checkpoints are then removed.
    """
    state = {
        "optimizer": optimizer.state_dict(),
        "waiting": waiting,
        "rng": torch.get_rng_state(),
    }
    if model.device.type == "cuda":
        state["cuda_rng"] = torch.cuda.get_rng_state(model.device)

    def write(path: Path) -> None:
        model.save_pretrained(path)
        tokenizer.save_pretrained(path)
        torch.save(state, path / "state.pt")

    write_atomically(folder / f"checkpoint-{step}", write)
    remove_older_checkpoints(folder)


def remove_older_checkpoints(folder: Path) -> None:
    """Remove all checkpoints of a run but the newest."""
    folder_of_step = checkpoints(folder)
    for step in sorted(folder_of_step)[:-1]:
        shutil.rmtree(folder_of_step[step])


def checkpoints(folder: Path) -> dict[int, Path]:
    """Return step -> folder checkpoint-STEP; a user's checkpoint-5-keep is left alone."""
    folder_of_step = {}
    for path in folder.glob("checkpoint-*"):
        step = path.name.removeprefix("checkpoint-")
        if step.isdecimal():
            folder_of_step[int(step)] = path
    return folder_of_step


def load_training_state(checkpoint: Path, optimizer, device: str) -> list:
    """Set the optimizer and torch's random states to those of a checkpoint.

    Returns the partial rollouts that wait. Raises ValueError that names the file if it is damaged.
    """
    path = checkpoint / "state.pt"
    try:
        # To the CPU first: load_state_dict moves to the device what belongs there.
        state = torch.load(path, map_location="cpu", weights_only=True)
        optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["rng"])
        if "cuda_rng" in state and device != "cpu":
            torch.cuda.set_rng_state(state["cuda_rng"], device)
        return state["waiting"]
    except Exception as error:  # torch raises many kinds for a cut or empty file
        raise ValueError(
            f"{path} is damaged ({type(error).__name__}: {error}): delete the run's folder to begin"
            " the run again"
        ) from error


def check_nothing_is_lost(folder: Path, checkpoint_every: int) -> None:
    """Raise ValueError if a run has logged more steps than come before a first checkpoint."""
    path = folder / "metrics.jsonl"
    lines = read_lines(path) if path.exists() else []
    logged = max((line["step"] for line in lines), default=0)
    if logged > checkpoint_every or (folder / "final.json").exists():
        raise ValueError(
            f"{folder} holds the logs of {logged} steps, but no checkpoint to continue from: move"
            " the folder away to begin this run again, or put its checkpoint back"
        )


def write_config(path: Path, config: dict, may_differ: set[str]) -> None:
    """Write the options of a folder of runs.

    Raises ValueError if the folder holds runs and the command has no --resume, if options differ
    from those of earlier commands (except may_differ), or if there are fewer steps than a
    checkpoint has.
    """
    if path.exists():
        if not config["resume"]:
            raise ValueError(
                f"output_dir {path.parent} holds runs: add --resume, or use another folder"
            )
        check_same(path, config, may_differ)
        newest_steps = [max(checkpoints(run), default=0) for run in path.parent.iterdir()]
        most_steps = max(newest_steps)
        if config["steps"] < most_steps:
            raise ValueError(
                f"steps must be at least {most_steps}, got {config['steps']}: {path.parent} holds a"
                " checkpoint of that step, and runs cannot shrink"
            )
    write_json(path, config)
