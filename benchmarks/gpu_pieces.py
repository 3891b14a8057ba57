"""What benchmarks/gpu.sh needs besides a shell. Every command prints JSON or writes it.

python benchmarks/gpu_pieces.py environment DEVICE
python benchmarks/gpu_pieces.py keep PATH ENVIRONMENT STATUS SECONDS
python benchmarks/gpu_pieces.py finals FOLDER
python benchmarks/gpu_pieces.py compare WHOLE KILLED
python benchmarks/gpu_pieces.py start FOLDER ATTEMPTS STEPS WIDTH LAYERS DEVICE
"""

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))


def environment(device: str) -> None:
    """Print the machine and the versions of a device; fails where PyTorch cannot use it."""
    import model
    import torch

    torch.zeros(1, device=device)
    print(json.dumps(model.environment(device)))


def keep(path: str, environment_path: str, status: str, seconds: str) -> None:
    """Write PATH.json, of a piece that has left PATH.log. It is whole or not there."""
    lines = Path(f"{path}.log").read_text(errors="replace").splitlines()
    results = []
    for line in lines:
        if line.startswith('{"'):
            results.append(json.loads(line))
    content = json.loads(Path(environment_path).read_text())
    content["status"] = int(status)
    content["seconds"] = int(seconds)
    content["last_line"] = lines[-1] if lines else ""
    content["results"] = results
    unfinished = Path(f"{path}.json.unfinished")
    unfinished.write_text(json.dumps(content, indent=1) + "\n")
    os.replace(unfinished, f"{path}.json")


def finals(folder: str) -> None:
    """Print the held-out accuracy of the start and of every run in a folder, name -> final.json.

    Raises FileNotFoundError if no run there has ended.
    """
    accuracies = {}
    for path in sorted(Path(folder).glob("start*.json")):
        accuracies[path.stem] = json.loads(path.read_text())
    runs = sorted(Path(folder).glob("*/final.json"))
    for path in runs:
        accuracies[path.parent.name] = json.loads(path.read_text())
    print(json.dumps(accuracies))
    if not runs:
        raise FileNotFoundError(f"no run in {folder} has ended")


def compare(whole: str, killed: str) -> None:
    """Print at which step the metrics of two runs differ first; null if they never do."""
    lines_whole = metrics(whole)
    lines_killed = metrics(killed)
    first_difference = None
    for line_whole, line_killed in zip(lines_whole, lines_killed):
        if line_whole != line_killed:
            first_difference = line_whole["step"]
            break
    result = {
        "updates": len(lines_whole),
        "updates_of_killed": len(lines_killed),
        "first_step_that_differs": first_difference,
    }
    print(json.dumps(result))


def metrics(folder: str) -> list[dict]:
    """The lines of metrics.jsonl of the only run in a folder."""
    (path,) = Path(folder).glob("*/metrics.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()]


def start(folder: str, attempts: str, steps: str, width: str, layers: str, device: str) -> None:
    """Make a supervised start that is larger than Countdown's, or the rest of one."""
    from support.warm_starts import warm_start

    warm_start(
        folder,
        seed=0,
        attempts=int(attempts),
        steps=int(steps),
        device=device,
        hidden_size=int(width),
        intermediate_size=3 * int(width),
        num_hidden_layers=int(layers),
        max_position_embeddings=256,
        initializer_range=int(width) ** -0.5,
    )


COMMANDS = {
    "environment": environment,
    "keep": keep,
    "finals": finals,
    "compare": compare,
    "start": start,
}

if __name__ == "__main__":
    COMMANDS[sys.argv[1]](*sys.argv[2:])
