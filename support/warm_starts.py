"""Countdown's supervised starts on disk: made once, shared by all runs that begin there."""

import json
from pathlib import Path

import countdown
from support.files import differences, lock, write_atomically
from support.workers import report


def warm_start(
    folder: str | Path,
    seed: int = 0,
    attempts: int = 2,
    steps: int = countdown.WARM_START_STEPS,
    device: str = "cpu",
    **sizes,
) -> Path:
    """Make countdown.supervised_start, save it with its tokenizer, return `folder`.

    A folder that is there already is returned at once if it was made with the same seed, attempts and steps; ValueError
    if with others, or if it holds something else. One that another process is making is waited for. `sizes` (of
    Qwen2Config) are not compared.
    """
    folder = Path(folder)
    settings = {"seed": seed, "attempts": attempts, "steps": steps}
    if min(attempts, steps) < 1:
        raise ValueError(f"attempts and steps must be positive, got {attempts} and {steps}")
    folder.parent.mkdir(parents=True, exist_ok=True)

    def make(temporary: Path) -> None:
        model, tokenizer = countdown.supervised_start(seed, attempts, steps, device, report, **sizes)
        model.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
        (temporary / "warm_start.json").write_text(json.dumps(settings, indent=2) + "\n")

    waiting = f"waiting for another process, which is making {folder}"
    with lock(folder.with_name(f"{folder.name}.lock"), waiting):
        if not folder.exists():  # complete or absent: an interrupted save must not look like a warm start
            write_atomically(folder, make)
    path = folder / "warm_start.json"
    if not path.is_file():
        raise ValueError(f"{folder} exists and is no warm start (it has no warm_start.json): name a new folder")
    if changed := differences(json.loads(path.read_text()), settings):
        raise ValueError(f"the warm start in {folder} was made with other settings ({changed}): delete it or name another")
    return folder
