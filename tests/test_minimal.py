"""minimal.py is the oracle of train.py's loop: both log the same numbers.

These tests fail if train.py trains on dropped groups, drops a group because one of its rewards
equals the mean, leaves the standard deviation out of the advantages, counts tokens or searches
bounds per micro-batch, logs the metrics of the last micro-batch, keeps old gradients, decays
weights, reads the rollout policy again at every update, leaves the temperature out of sampling or
log-probs, or lets evaluation move the random state; if rollout.py masks the EOS; or if
minimal.py rewards a response that has not ended.
"""

import pytest
from conftest import REWARDS

import minimal
import train
from bapo import ClipSearch
from tasks import countdown, problems_of_step

# With a target above a half the bounds have to move as soon as ratios do. They do not begin at 1,
# where every first ratio lies: on a bound the gradient of torch.clamp depends on torch's version.
SEARCH = ClipSearch(
    rho0=0.6, low_start=0.5, low_max=0.9, low_step=0.1, high_start=1.1, high_max=3.0, high_step=0.1
)
LITERAL_SEARCH = minimal.ClipSearch(SEARCH.rho0, SEARCH.lows(), SEARCH.highs())


# minimal.py with few responses, a temperature, and a learning rate that moves every ratio
SETTINGS = {
    "STEPS": 3,
    "PROMPTS": 8,
    "GROUP_SIZE": 3,
    "UPDATES": 3,
    "MAX_NEW_TOKENS": 16,
    "TEMPERATURE": 0.8,
    "LEARNING_RATE": 5e-3,
    "SEED": 1,
}


@pytest.mark.parametrize(
    "method, search, micro_batch_tokens",
    [("bapo", LITERAL_SEARCH, 80), ("bapo", LITERAL_SEARCH, 10_000), ("grpo", minimal.GRPO, 80)],
)
def test_train_py_finds_the_numbers_of_the_literal_loop(
    train_here, monkeypatch, policy, method, search, micro_batch_tokens
):
    """One group of each step is dropped, as it gets nothing; a micro-batch has some five rows.

    In others a reward is the group's mean: 0, 0.5, 1.
    """
    for name, value in SETTINGS.items():
        monkeypatch.setattr(minimal, name, value)
    problems = countdown.load_task().train
    dropped = set()
    for step in range(1, minimal.STEPS + 1):
        first, *_ = problems_of_step(problems, step, minimal.PROMPTS, minimal.SEED)
        dropped.add(first.answer)

    def grade(response: str, answer: str) -> float:
        return 0.0 if answer in dropped else REWARDS[len(response) % 3]

    monkeypatch.setattr(countdown, "grade", grade)
    monkeypatch.setattr(train, "PAPER_MAIN", SEARCH)  # whose range "bapo" has
    lines = train_here(
        methods=f"{method}@{minimal.UPDATES}",
        seeds=minimal.SEED,
        steps=minimal.STEPS,
        prompts_per_step=minimal.PROMPTS,
        group_size=minimal.GROUP_SIZE,
        max_new_tokens=minimal.MAX_NEW_TOKENS,
        temperature=minimal.TEMPERATURE,
        learning_rate=minimal.LEARNING_RATE,
        micro_batch_tokens=micro_batch_tokens,
        evaluate_every=1,
        **({"rho0": SEARCH.rho0} if method == "bapo" else {}),
    )
    expected = minimal.train(search, policy)
    assert len(lines) == len(expected) == minimal.STEPS * minimal.UPDATES
    for line, numbers in zip(lines, expected):
        assert line["filtered_groups"] > 0
        # A log has six digits. Sums in another order differ by about as much in the first update,
        # and AdamW makes that larger in later ones.
        is_first = numbers["step"] == numbers["update"] == 1
        for name, number in numbers.items():
            is_counted = name in ("step", "update", "reward", "low", "high")
            tolerance = 3e-5 if is_counted or is_first else 1e-3
            close = pytest.approx(float(number), rel=tolerance, abs=tolerance / 10)
            assert line[name] == close, (name, line["step"], line["update"])


def test_the_settings_are_those_of_the_default_experiment():
    options = train.Options(device="cpu")
    assert minimal.PROMPTS == options.prompts_per_step
    for name in ("steps", "group_size", "max_new_tokens", "temperature", "learning_rate"):
        assert getattr(minimal, name.upper()) == getattr(options, name), name
    search = train.parse_method("bapo@8", options).search
    assert minimal.BAPO == (search.rho0, search.lows(), search.highs())
    assert f"bapo@{minimal.UPDATES}" in options.methods
