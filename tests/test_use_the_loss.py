"""README's "Use the loss": its loop trains a model, and its assertions find planted mistakes.

Both blocks are taken from the page and run as they stand, with responses of the toy.
"""

import itertools
import re
from functools import partial

import pytest
import torch

import countdown
import rollout
from conftest import ROOT
from data import Problem

SECTION = (ROOT / "README.md").read_text().split("## Use the loss\n")[1].split("\n## ")[0]
LOOP, ASSERTIONS = re.findall(r"^```python\n(.*?)^```", SECTION, re.DOTALL | re.MULTILINE)
UPDATE = "mask, search)\n"  # the end of the line that calls `backward`
CODE = LOOP.replace(UPDATE, UPDATE + ASSERTIONS)
START = "\nsearch = "  # the loop's first line below the imports
PROBLEMS = ["348:44", "129:27", "367:11", "225:20", "489:23", "135:16"]


def draw(temperature: float = 1.0) -> dict:
    """Draw responses; return what the page's blocks need. log_probs_of has a temperature of 1."""
    policy, tokenizer = rollout.load_policy(str(ROOT / "toy"))
    problems = [Problem(tokenizer(f"{answer}=").input_ids, answer) for answer in PROBLEMS]
    torch.manual_seed(0)
    groups, _ = rollout.draw(
        policy, [], problems, 1, group_size=8, max_new_tokens=28, temperature=temperature
    )
    responses = list(itertools.chain(*groups))
    batch = rollout.Batch(responses, "cpu")
    return {
        "policy": policy,
        "optimizer": torch.optim.AdamW(policy.parameters(), lr=1e-3),
        "log_probs_of": partial(rollout.token_log_probs, policy, batch, temperature=1.0),
        "response_ids": batch.ids[:, 1:],
        "sampler_log_probs": batch.sampler_log_probs,
        "eos_ids": torch.tensor([tokenizer.eos_token_id]),
        "mask": batch.mask,
        "rewards": rollout.grade(policy, tokenizer, responses, countdown.reward),
        "reward_of": lambda row: responses[row]["reward"],
        "group_size": 8,
    }


def run(names: dict, edits: dict[str, str]) -> dict:
    """Run the loop with the assertions below `backward`, and with edits; return all its names."""
    code = CODE
    for old, new in edits.items():
        assert old in code
        code = code.replace(old, new)
    exec(code, names)
    return names


@pytest.mark.parametrize(
    "edits",
    [
        {},
        {"group_relative_advantages(rewards, group_size)": "rewards - rewards.mean()"},
        {  # sequence-mean
            "import ClipSearch": "import bapo_loss, ClipSearch",
            START: "\nown = mask / mask.sum(1, keepdim=True)"
            "\nloss_fn = lambda *inputs, **options: bapo_loss(*inputs, weights=own, **options)"
            + START,
            "mask, search)": "mask, search, loss_fn=loss_fn)",
            "terms = mask": "terms = own",
        },
    ],
)
def test_a_right_loop_raises_no_alarm_and_moves_the_policy(edits):
    metrics = run(draw(), edits)["metrics"]
    assert metrics["kl"] > 1e-3  # at the last update


def test_a_batch_of_equal_rewards_raises_no_alarm():
    run(draw() | {"rewards": torch.ones(48), "reward_of": lambda row: 1.0}, {})


@pytest.mark.parametrize(
    "message, temperature, edits",
    [
        ("EOS", 1.0, {START: "\nmask = mask & (response_ids != eos_ids)" + START}),
        ("EOS", 1.0, {START: "\nmask = torch.ones_like(mask)" + START}),  # with the padding
        ("order", 1.0, {START: "\nrewards = rewards.flip(0)" + START}),
        (
            "dropout",
            1.0,
            {
                START: "\nright = log_probs_of"
                "\nlog_probs_of = lambda rows: torch.dropout(right(rows), 0.1, True)" + START
            },
        ),
        ("temperature", 0.6, {}),
        # The sampler's log-probs stand in the place of log_probs_of's, which has no temperature.
        (
            "ratios do not begin at 1",
            0.6,
            {"torch.cat([log_probs_of(rows) for rows in micro_batches])": "sampler_log_probs"},
        ),
        (
            "per micro-batch",
            1.0,
            {
                "metrics = backward(log_probs_of, micro_batches": "for rows in micro_batches:"
                " metrics = backward(log_probs_of, [rows]"
            },
        ),
    ],
)
def test_a_mistake_is_found(message, temperature, edits):
    with pytest.raises(AssertionError, match=message):
        run(draw(temperature), edits)
