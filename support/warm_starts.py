"""Countdown's supervised starts on disk: made once, shared by all runs that begin there."""

import json
from pathlib import Path

import torch

import countdown
from support.files import differences, lock, remove, remove_leftovers, write_atomically
from support.workers import report

SAVE_EVERY = 1000  # steps of a start, some ten seconds: all that an interruption can lose


def warm_start(
    folder: str | Path,
    seed: int = 0,
    attempts: int = 2,
    steps: int = countdown.WARM_START_STEPS,
    device: str = "cpu",
    **sizes,
) -> Path:
    """Make countdown.supervised_start, save it with its tokenizer, and return `folder`.

    A folder that is there already is returned at once. One that another process is making is
    waited for. One that was interrupted is continued from its last SAVE_EVERY steps, and ends as
    if it had not been. `sizes` are fields of Qwen2Config.

    Raises:
        ValueError: if the folder holds something else, or a start of another seed, attempts or
            steps. (`sizes` are not compared.)
    """
    folder = Path(folder)
    if min(attempts, steps) < 1:
        raise ValueError(f"attempts and steps must be positive, got {attempts} and {steps}")
    settings = {"seed": seed, "attempts": attempts, "steps": steps}
    folder.parent.mkdir(parents=True, exist_ok=True)
    with lock(
        folder.with_name(f"{folder.name}.lock"),
        waiting=f"waiting for another process, which is making {folder}",
    ):
        remove_leftovers(folder.parent)
        if not folder.exists():
            make(folder, settings, device, sizes)
    path = folder / "warm_start.json"
    if not path.is_file():
        raise ValueError(
            f"{folder} exists and is no warm start (it has no warm_start.json): name a new folder"
        )
    changed = differences(json.loads(path.read_text()), settings)
    if changed:
        raise ValueError(
            f"the warm start in {folder} was made with other settings ({changed}): "
            "delete it or name another"
        )
    return folder


def make(folder: Path, settings: dict, device: str, sizes: dict) -> None:
    """Train a start, or the rest of an interrupted one, and write its folder, which is not there.

    settings: seed, attempts and steps of countdown.supervised_start.
    """
    partial = folder.with_name(f".{folder.name}.partial.pt")  # what is done by now
    identity = {"settings": settings, "sizes": sizes, "device": device}

    def save(state: dict) -> None:
        content = {"identity": identity, "state": state}
        write_atomically(partial, lambda file: torch.save(content, file))

    saved = None
    if partial.exists():
        content = torch.load(partial, map_location="cpu", weights_only=True)
        if content["identity"] == identity:
            saved = content["state"]

    def write(temporary: Path) -> None:
        model, tokenizer = countdown.supervised_start(
            **settings,
            device=device,
            progress=report,
            saved=saved,
            save=save,
            save_every=SAVE_EVERY,
            **sizes,
        )
        model.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
        settings_file = temporary / "warm_start.json"
        settings_file.write_text(json.dumps(settings, indent=2) + "\n")

    # Complete or absent: an interrupted save must not look like a warm start.
    write_atomically(folder, write)
    remove(partial)
