"""What the tests share: one thread, no network, small models, and train.py run in this process.

`policy` is where runs begin: an untrained model, so that no test waits for a supervised start.
`train_here` is `python train.py` with small settings.
"""

import os
import shutil
import sys
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"  # before anything is imported that reads it

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent))
torch.set_num_threads(1)  # results do not depend on the number of cores

import countdown
import plot
import runs
import train

SMALL = {
    "methods": "bapo@3",
    "steps": 3,
    "prompts_per_step": 4,
    "group_size": 4,
    "max_new_tokens": 12,
    "learning_rate": 5e-3,
    "warm_start_steps": 1,
    "checkpoint_every": 1,
    "device": "cpu",
    "jobs": 1,
}
REWARDS = (0.0, 0.5, 1.0)


@pytest.fixture(scope="session")
def tokenizer():
    """Countdown's: a token for each of 16 characters and of <pad>, <bos>, <eos>, <unk>."""
    return countdown.build_tokenizer()


@pytest.fixture(scope="session")
def policy(tmp_path_factory, tokenizer) -> str:
    """Folder of Countdown's small model, untrained, and of its tokenizer.

    It is nearly uniform: the responses of a group differ, and three of four end within 28 tokens.
    """
    folder = tmp_path_factory.mktemp("policy")
    model = countdown.build_model(tokenizer, seed=0)
    with torch.no_grad():
        model.lm_head.weight.mul_(0.2)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def graded(response: str, answer: str) -> float:
    """A reward that an untrained policy earns: 0, 0.5 or 1 by the number of characters."""
    return REWARDS[len(response) % 3]


@pytest.fixture
def train_here(tmp_path, policy, monkeypatch):
    """A function that runs train.py on Countdown in this process, and gives its metrics.jsonl.

    train_here(steps=2, resume=True) passes SMALL and, in its place, what is given; True is an
    option alone, a list several values. Runs go to tmp_path / "runs", or to `output_dir`, begin
    with `policy` and get the rewards of `graded`; two problems are held out; nothing is drawn.
    Returns the lines of the first method's and seed's run. Asserts that the command succeeds.
    """
    monkeypatch.setattr(countdown, "HELD_OUT", 2)
    monkeypatch.setattr(countdown, "grade", graded)
    monkeypatch.setattr(plot, "report", lambda folder: [])

    def run(**options) -> list[dict]:
        settings = SMALL | {"output_dir": tmp_path / "runs"} | options
        output = Path(settings["output_dir"])
        arguments = []
        for name, value in settings.items():
            values = value if isinstance(value, list) else [value]
            arguments.append(f"--{name}")
            arguments += [str(one) for one in values if one is not True]
        parsed = train.parse(train.Options, arguments, "")
        for seed in parsed.seeds:
            name = f"attempts{parsed.attempts}-steps{parsed.warm_start_steps}-seed{seed}"
            shutil.copytree(policy, output.parent / "starts" / name, dirs_exist_ok=True)
        assert train.main(arguments) == 0
        folder = output / f"{parsed.methods[0]}-seed{parsed.seeds[0]}"
        return runs.read_lines(folder / "metrics.jsonl")

    return run
