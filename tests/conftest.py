"""Make the flat scripts importable from wherever pytest is called, and results independent of the number of cores."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent))
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def policy(tmp_path_factory) -> str:
    """Folder of Countdown's small model, untrained: nearly uniform, so that the responses of a group differ."""
    import countdown

    folder = tmp_path_factory.mktemp("policy")
    tokenizer = countdown.build_tokenizer()
    model = countdown.build_model(tokenizer, seed=0)
    with torch.no_grad():
        model.lm_head.weight.mul_(0.2)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)
