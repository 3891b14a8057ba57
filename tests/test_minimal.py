"""minimal.py is the literal oracle of the whole loop: train.py finds the same numbers."""

import pytest

import countdown
import minimal
import train
from bapo import GRPO, ClipSearch
from support.data import Task
from support.options import Options
from support.run_folder import prepare_folder, read_metrics

STEPS = 2


def even_length(response: str, answer: str) -> bool:
    """A reward that an untrained policy earns now and then."""
    return len(response) % 2 == 0


@pytest.fixture
def smaller(monkeypatch) -> None:
    """Fewer responses and updates, so that the test takes seconds."""
    monkeypatch.setattr(minimal, "PROMPTS", 6)
    monkeypatch.setattr(minimal, "GROUP_SIZE", 4)
    monkeypatch.setattr(minimal, "UPDATES", 3)
    monkeypatch.setattr(minimal, "LEARNING_RATE", 2e-3)


@pytest.mark.parametrize("method, search", [("bapo", ClipSearch()), ("grpo", GRPO)])
def test_train_py_finds_the_numbers_of_the_literal_loop(
    tmp_path, policy, monkeypatch, smaller, method, search
):
    """Kills: another order of prompts, another mask, advantages or normaliser of another set of
    responses, ratios against another policy, bounds of another update, a step too many."""
    options = Options(
        methods=[f"{method}@{minimal.UPDATES}"],
        seeds=[minimal.SEED],
        steps=STEPS,
        prompts_per_step=minimal.PROMPTS,
        group_size=minimal.GROUP_SIZE,
        learning_rate=minimal.LEARNING_RATE,
        device="cpu",
    )
    task = Task(*countdown.problems(), even_length)
    (run,) = train.make_runs(options, task)
    run = run._replace(folder=tmp_path / "run", start=policy)
    prepare_folder(run.folder, run.config, resume=False)
    train.train_run(run, task)
    monkeypatch.setattr(countdown, "grade", even_length)
    expected = minimal.train(search, policy, STEPS)
    lines = read_metrics(run.folder / "metrics.jsonl")
    assert len(lines) == len(expected) == STEPS * minimal.UPDATES
    for line, numbers in zip(lines, expected, strict=True):
        for name, number in numbers.items():
            assert line[name] == pytest.approx(number, rel=1e-3, abs=4e-6), (name, line["step"])
    if method == "bapo":
        assert len({(line["low"], line["high"]) for line in lines}) > 1  # the bounds moved


def test_the_settings_are_those_of_the_default_experiment():
    options = Options(device="cpu")
    assert minimal.STEPS == options.steps
    assert minimal.PROMPTS == options.prompts_per_step
    assert minimal.GROUP_SIZE == options.group_size
    assert minimal.MAX_NEW_TOKENS == options.max_new_tokens
    assert minimal.TEMPERATURE == options.temperature
    assert minimal.LEARNING_RATE == options.learning_rate
    assert f"bapo@{minimal.UPDATES}" in options.methods
