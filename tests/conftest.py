"""What the tests share: one thread, no network, small models, and train.py run in this process.

`policy` is where runs begin: an untrained model, so that no test waits for a supervised checkpoint.
`train_here` is `python train.py` with small settings. Modules of the project are imported where
they are used: bapo.py's tests need torch alone, and the engines' environments lack some packages.
"""

import gc
import json
import os
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path

CACHE = tempfile.TemporaryDirectory()  # removed at the end
# Before anything is imported that reads them
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_CACHE"] = CACHE.name

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent))
torch.set_num_threads(1)  # results do not depend on the number of cores

SMALL = {
    "methods": "bapo@3",
    "seeds": 0,
    "steps": 3,
    "prompts_per_step": 4,
    "group_size": 4,
    "max_new_tokens": 12,
    "learning_rate": 5e-3,
    "checkpoint_every": 1,
    "device": "cpu",
    "jobs": 1,
}
REWARDS = (0.0, 0.5, 1.0)
VOCABULARY = 20  # of Countdown's tokenizer
EOS = 2
LAST = VOCABULARY - 1
PROMPTS = [[1, 7, 8, 12], [1, 4], [1, 5, EOS, 7, 8, 9, 10], [1, 9, 9]]
RESPONSES = [[5, 6, EOS], [10, 11, 4, 4, 19, 3, 12], [EOS], [7, 13, 8, 2, 14]]


@pytest.fixture(scope="session")
def tokenizer():
    """Countdown's: a token for each of 16 characters and of <pad>, <bos>, <eos>, <unk>."""
    from tasks import countdown

    return countdown.build_tokenizer()


@pytest.fixture(scope="session")
def policy(tmp_path_factory, tokenizer) -> str:
    """Folder of Countdown's small model, untrained, and of its tokenizer.

    It is nearly uniform: the responses of a group differ, and three of four end within 28 tokens.
    """
    from tasks import countdown

    folder = tmp_path_factory.mktemp("policy")
    model = countdown.build_model(tokenizer, seed=0)
    with torch.no_grad():
        model.lm_head.weight.mul_(0.2)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def graded(response: str, answer: str = "") -> float:
    """A reward that an untrained policy earns: 0, 0.5 or 1 by the number of characters."""
    return REWARDS[len(response) % 3]


@pytest.fixture
def train_here(tmp_path, policy, monkeypatch):
    """A function that runs train.py on Countdown in this process, and gives its metrics.jsonl.

    train_here(steps=2, resume=True) passes SMALL and, in its place, what is given. Runs go to
    tmp_path / "runs", or to `output_dir`, begin with `policy` and get the rewards of `graded`; two
    problems are held out; nothing is drawn. Returns the lines of the first method's run, see
    `without_seconds`. Asserts that the command succeeds.
    """
    import train
    from tasks import countdown

    plot = pytest.importorskip("support.plot")  # needs matplotlib, pandas and scipy
    gc.freeze()  # or the collection after every run would search all imports

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(countdown, "HELD_OUT", 2)
    monkeypatch.setattr(countdown, "grade", graded)
    monkeypatch.setattr(countdown, "supervised_checkpoint", lambda *settings: policy)
    monkeypatch.setattr(plot, "report", lambda folder: "")

    def run(**options) -> list[dict]:
        settings = SMALL | {"output_dir": tmp_path / "runs"} | options
        arguments = []
        for name, value in settings.items():
            arguments += f"--{name} {value}".split()
        assert train.main(arguments) == 0
        method = settings["methods"].split()[0]
        folder = Path(settings["output_dir"]) / f"{method}-seed{settings['seeds']}"
        return without_seconds(folder / "metrics.jsonl")

    return run


def without_seconds(path: Path) -> list[dict]:
    """The lines of metrics.jsonl, with 0 for the seconds, which differ from run to run."""
    from support import runs

    return [line | {"rollout_s": 0, "update_s": 0} for line in runs.read_lines(path)]


@pytest.fixture
def refusal(train_here, capsys):
    """A function that runs train_here, which must fail, and gives what it said."""

    def run(**options) -> str:
        capsys.readouterr()
        with pytest.raises((ValueError, OSError, AssertionError)) as failed:
            train_here(**options)
        return f"{failed.value}\n{capsys.readouterr().err}"

    return run


def write_lines(path: Path, lines: list[dict], cut_line: str = "") -> str:
    """A file of one JSON object a line, in a folder that may be new. Returns its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + cut_line)
    return str(path)


# ---------------------------------------------------------------- models and log-probs
def bigram(tokenizer, table: torch.Tensor):
    """A model with logits table[t] [V] after the token t. Untied, float32."""
    from tasks import countdown

    model = countdown.build_model(tokenizer).eval()
    model.precision = "float32"  # as load_policy sets it
    model.resize_token_embeddings(len(table), mean_resizing=False)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.fill_(1.0 if "norm" in name else 0.0)
        # The last norm makes 8 of 1000: its root mean square is 1000 / sqrt(64).
        model.model.embed_tokens.weight.fill_diagonal_(1000.0)
        model.lm_head.weight[:, : len(table)] = table.T / 8
    return model


@pytest.fixture
def folder(tmp_path, tokenizer) -> Path:
    """A model that counts up, and its tokenizer, saved.

    After t comes t + 1, and after LAST comes EOS; at a temperature of 1 mostly others.
    """
    table = torch.eye(VOCABULARY).roll(1, dims=1)
    table[LAST] = table[EOS - 1]
    folder = tmp_path / "model"
    bigram(tokenizer, table).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def chain(folder):
    from support.loading import load_policy

    return load_policy(str(folder))[0]


def given_rollouts(device="cpu"):
    """RESPONSES to PROMPTS, of unequal lengths."""
    from rollout import Rollouts

    return Rollouts(PROMPTS, RESPONSES, [EOS], device)


def given_log_probs(model):
    """Log-probs of RESPONSES."""
    from rollout import token_log_probs

    log_probs, _ = token_log_probs(model, given_rollouts(), torch.arange(4))
    return log_probs


def assert_close(value: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(value, expected, rtol=1e-4, atol=1e-4)


def gradients(model) -> dict[str, torch.Tensor]:
    """Copies of all gradients, which are set back."""
    found = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            found[name] = parameter.grad.clone()
    model.zero_grad()
    return found


@contextmanager
def kept_for_backward():
    """A list that gets all tensors that the block keeps for the backward pass."""
    tensors = []

    def pack(tensor):
        tensors.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield tensors


def edit_json(path: Path, **changes) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
