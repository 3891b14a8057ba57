"""What all tests share: an untrained model, locked files, and train.py's runs without processes.

Makes the flat scripts importable from wherever pytest is called, and results independent of the
number of cores.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent))
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def policy(tmp_path_factory) -> str:
    """Folder of Countdown's small model, untrained.

    It is nearly uniform, so that the responses of a group differ.
    """
    import countdown

    folder = tmp_path_factory.mktemp("policy")
    tokenizer = countdown.build_tokenizer()
    model = countdown.build_model(tokenizer, seed=0)
    with torch.no_grad():
        model.lm_head.weight.mul_(0.2)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


HOLDER = """
import sys
import filelock
lock = filelock.FileLock(sys.argv[1])
lock.acquire()
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def held():
    """Locks a file from another process until its input is closed."""
    holders = []

    def hold(path: Path) -> subprocess.Popen:
        path.parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-c", HOLDER, str(path)]
        holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        holders.append(holder)
        assert holder.stdout.readline() == b"held\n"
        return holder

    yield hold
    for holder in holders:
        holder.stdin.close()
        holder.wait(timeout=60)


@pytest.fixture
def here(monkeypatch) -> None:
    """train.py's runs in this process, where nothing is imported again, and no picture."""
    import train
    from support import plot

    monkeypatch.setattr(train, "run_side_by_side", one_after_the_other)
    monkeypatch.setattr(plot, "report", table_alone)


def one_after_the_other(
    work: dict[str, tuple], jobs: int, steps: int = 0, what: str = "", **_
) -> dict[str, Exception]:
    """What support.workers.run_side_by_side does, but for the processes."""
    failures = {}
    for name, (_, function, *arguments) in work.items():
        try:
            function(*arguments)
        except Exception as error:
            failures[name] = error
            print(f"{name}: {error}")
    return failures


def table_alone(folder: Path) -> list[str]:
    """What plot.report returns."""
    from support import run_metrics

    arms, starts = run_metrics.load(folder)
    return run_metrics.table(arms, starts)


@pytest.fixture
def made_up_runs(tmp_path) -> Path:
    """A folder of runs as train.py writes them: two seeds, two updates on each of two steps.

    grpo@2 has ended, and its bounds are fixed. bapo@2 still goes on: nothing was trained in its
    second step, and its last line is cut. cispo@2 has no bounds.
    """
    folder = tmp_path / "runs/made-up"
    for seed in (1, 2):
        of_step = {"reward": 0.1 * seed, "length_correct": 10, "length_wrong": 12}
        write_run(folder, f"grpo@2-seed{seed}", of_step | {"low": 0.8, "high": 1.2}, norm=seed)
        final = {"steps": 2, "mean@16": 0.3 + 0.1 * seed, "pass@8": 0.5}
        write_json(folder / f"grpo@2-seed{seed}/final.json", final)
        write_json(folder / f"start-seed{seed}.json", final | {"mean@16": 0.2})
        write_run(folder, f"cispo@2-seed{seed}", of_step, norm=2.0)
    lines = [
        {"step": 1, "update": 1, "entropy": 0.5, "grad_norm": 1.0, "low": 0.9, "high": 2.0},
        {"step": 2, "update": 0, "entropy": None, "reward": 0.0},
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines) + '{"step": 3, "upd'
    path = folder / "bapo@2-seed1/metrics.jsonl"
    path.parent.mkdir()
    path.write_text(text)
    return folder


def write_run(folder: Path, name: str, of_step: dict, norm: float) -> None:
    """Two steps of two updates: entropy .4 and .2, norms `norm` and 3 times that."""
    lines = []
    for step, entropy in ((1, 0.4), (2, 0.2)):
        for update in (1, 2):
            of_update = {"step": step, "update": update, "grad_norm": norm * (2 * update - 1)}
            lines.append(of_update | of_step | {"entropy": entropy, "gradient_share": 0.4})
    (folder / name).mkdir(parents=True)
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / name / "metrics.jsonl").write_text(text)


def write_json(path: Path, content: dict) -> None:
    path.write_text(json.dumps(content))
