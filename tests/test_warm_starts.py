"""support/warm_starts.py: a start that is interrupted. The others: test_countdown.py."""

import pytest
import torch
from transformers import AutoModelForCausalLM

import countdown
from support import warm_starts

STEPS = 9
SAVE_EVERY = 4
PARTIAL = ".start.partial.pt"


@pytest.fixture
def saves_often(monkeypatch):
    monkeypatch.setattr(warm_starts, "SAVE_EVERY", SAVE_EVERY)


def interrupt_at(step: int, monkeypatch, folder) -> list[int]:
    """Begin or continue a start, and interrupt it before a step; the steps that it took."""
    original = countdown._supervised_loss
    losses = []

    def loss(*arguments):
        if len(losses) == step:
            raise KeyboardInterrupt
        losses.append(original(*arguments))
        return losses[-1]

    with monkeypatch.context() as patch:
        patch.setattr(countdown, "_supervised_loss", loss)
        with pytest.raises(KeyboardInterrupt):
            warm_starts.warm_start(folder, steps=STEPS)
    return losses


def weights(folder) -> list[torch.Tensor]:
    return list(AutoModelForCausalLM.from_pretrained(folder).parameters())


def test_an_interrupted_start_goes_on_and_equals_an_uninterrupted_one_bit_for_bit(
    tmp_path, saves_often, monkeypatch
):
    """Kills: a start that begins again; one without its optimizer, rate or random state."""
    told = []
    monkeypatch.setattr(warm_starts, "report", lambda note, steps: told.append(steps))
    folder = tmp_path / "start"
    interrupt_at(6, monkeypatch, folder)
    assert {path.name for path in tmp_path.iterdir()} == {"start.lock", PARTIAL}
    assert len(interrupt_at(3, monkeypatch, folder)) == 3  # steps 5, 6 and 7
    assert (tmp_path / PARTIAL).exists()
    warm_starts.warm_start(folder, steps=STEPS)
    assert sum(told) == STEPS  # also those that were done before
    assert {path.name for path in tmp_path.iterdir()} == {"start", "start.lock"}
    whole = warm_starts.warm_start(tmp_path / "whole", steps=STEPS)
    assert all(map(torch.equal, weights(folder), weights(whole)))


def test_what_is_left_of_a_start_of_other_settings_is_not_continued(
    tmp_path, saves_often, monkeypatch
):
    folder = tmp_path / "start"
    interrupt_at(6, monkeypatch, folder)
    warm_starts.warm_start(folder, steps=STEPS, seed=1)
    whole = warm_starts.warm_start(tmp_path / "whole", steps=STEPS, seed=1)
    assert all(map(torch.equal, weights(folder), weights(whole)))
    assert not (tmp_path / PARTIAL).exists()
