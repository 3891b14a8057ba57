"""Checkpoints of a run: a model that transformers loads, and what else --resume needs."""

import shutil
from pathlib import Path

import torch

from support.files import write_atomically


def save_checkpoint(folder: Path, step: int, state) -> None:
    """Write a train.TrainState as folder/checkpoint-STEP, and remove older checkpoints.

    state.pt holds the optimizer, unfinished groups of partial rollouts, and torch's random states.
    """
    saved = {
        "optimizer": state.optimizer.state_dict(),
        "waiting": state.unfinished_groups,  # the name in earlier checkpoints
        "rng": torch.get_rng_state(),
    }
    if state.policy.device.type == "cuda":
        saved["cuda_rng"] = torch.cuda.get_rng_state(state.policy.device)

    def write(path: Path) -> None:
        state.policy.save_pretrained(path)
        state.tokenizer.save_pretrained(path)
        torch.save(saved, path / "state.pt")

    write_atomically(folder / f"checkpoint-{step}", write)
    for older, path in by_step(folder).items():
        if older < step:
            shutil.rmtree(path)


def by_step(folder: Path) -> dict[int, Path]:
    """Return step -> folder checkpoint-STEP; a user's checkpoint-5-keep is left alone."""
    folder_of_step = {}
    for path in folder.glob("checkpoint-*"):
        step = path.name.removeprefix("checkpoint-")
        if step.isdecimal():
            folder_of_step[int(step)] = path
    return folder_of_step


def restore(checkpoint: Path, optimizer, device: str) -> list:
    """Set the optimizer and torch's random states to those of a checkpoint.

    Returns the unfinished groups of partial rollouts.
    """
    # To the CPU first: load_state_dict moves to the device what belongs there.
    state = torch.load(checkpoint / "state.pt", map_location="cpu", weights_only=True)
    optimizer.load_state_dict(state["optimizer"])
    torch.set_rng_state(state["rng"])
    if "cuda_rng" in state and device != "cpu":
        torch.cuda.set_rng_state(state["cuda_rng"], device)
    return state["waiting"]
