"""minimal.py is the oracle of train.py's loop: both log the same numbers.

These tests fail if train.py trains on dropped groups, drops a group because one of its rewards
equals the mean, leaves the standard deviation out of the advantages, counts tokens or searches
bounds per micro-batch, logs the metrics of the last micro-batch, keeps old gradients, decays
weights, reads the rollout policy again at every update, leaves the temperature out of sampling or
log-probs, or lets evaluation move the random state; if rollout.py masks the EOS; or if
minimal.py rewards a response that has not ended.
"""

import pytest

import minimal
import train

# Few responses, a temperature, and a learning rate that moves every ratio
SHARED = {
    "steps": 3,
    "group_size": 3,
    "max_new_tokens": 16,
    "temperature": 0.8,
    "learning_rate": 5e-3,
}


@pytest.mark.parametrize(
    "method, search, options",
    [
        # With a target above a half the bounds have to move as soon as ratios do.
        ("bapo@3", minimal.BAPO._replace(rho0=0.6), {"rho0": 0.6}),
        ("grpo@3", minimal.GRPO, {}),
    ],
)
def test_train_py_finds_the_numbers_of_the_literal_loop(
    train_here, monkeypatch, policy, method, search, options
):
    """A micro-batch has some five rows. In some groups a reward is the mean: 0, 0.5, 1."""
    for name, value in SHARED.items():
        monkeypatch.setattr(minimal, name.upper(), value)
    monkeypatch.setattr(minimal, "PROMPTS", 8)
    monkeypatch.setattr(minimal, "UPDATES", 3)
    options |= {"methods": method, "prompts_per_step": 8, "evaluate_every": 1}
    lines = train_here(micro_batch_tokens=80, **options, **SHARED)
    expected = minimal.train(search, policy)
    assert len(lines) == len(expected) == 9
    assert any(line["filtered_groups"] for line in lines)
    for line, numbers in zip(lines, expected):
        # A log has six digits. Sums in another order differ by about as much in the first update,
        # and AdamW makes that larger in later ones.
        tolerance = 3e-5 if numbers["step"] == numbers["update"] == 1 else 1e-3
        for name, number in numbers.items():
            close = pytest.approx(float(number), rel=tolerance, abs=tolerance / 10)
            assert line[name] == close, (name, line["step"], line["update"])


def test_the_settings_are_those_of_the_default_experiment():
    options = train.Options(device="cpu")
    assert minimal.PROMPTS == options.prompts_per_step
    for name in SHARED:
        assert getattr(minimal, name.upper()) == getattr(options, name), name
    search = train.parse_method("bapo@8", options).search
    rho0, lows, highs = minimal.BAPO
    assert [rho0, *lows, *highs] == pytest.approx([search.rho0, *search.lows(), *search.highs()])
    assert f"bapo@{minimal.UPDATES}" in options.methods
