"""What all tests share: an untrained model, locked files, and train.py's runs without processes.

Makes the flat scripts importable from wherever pytest is called, and results independent of the
number of cores.
"""

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
