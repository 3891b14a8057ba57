"""README's "Use the loss" and the self-test of integrations/README.md, as they stand on the pages.

The loop trains the toy, and the self-test finds planted mistakes.
"""

import itertools
from functools import partial

import pytest
import torch

import countdown
import rollout
from conftest import ROOT, python_blocks
from data import Problem


TRL, ONE_PASS, FORWARD, LOOP = python_blocks("README.md", "Use the loss")
SELF_TEST, CALL = python_blocks("integrations/README.md", "Your own loop")
BACKWARD = "        metrics = backward(log_probs_of, micro_batches, "
UPDATE = f"{BACKWARD}rollout_log_probs, advantages, mask, search)\n"
CODE = ONE_PASS + SELF_TEST + LOOP.replace(UPDATE, UPDATE + CALL)
PROBLEMS = ["348:44", "129:27", "367:11", "225:20", "489:23", "135:16"]


def draw(temperature: float = 1.0, precision: str = "float32") -> dict:
    """Draw responses; return what the blocks need. log_probs_of has a temperature of 1."""
    policy, tokenizer = rollout.load_policy(str(ROOT / "toy"), precision=precision)
    problems = [Problem(tokenizer(f"{answer}=").input_ids, answer) for answer in PROBLEMS]
    torch.manual_seed(0)
    groups, _ = rollout.draw(
        policy, [], problems, 1, group_size=8, max_new_tokens=28, temperature=temperature
    )
    responses = list(itertools.chain(*groups))
    batch = rollout.Batch(responses, "cpu")
    rewards = rollout.grade(policy, tokenizer, responses, countdown.reward)
    response_ids = batch.ids[:, 1:].clone()
    response_ids[:, 0] = tokenizer.eos_token_id  # in the prompt, as chat templates have it
    return {
        "policy": policy,
        "batch": batch,
        "optimizer": torch.optim.AdamW(policy.parameters(), lr=1e-3),
        "log_probs_of": partial(rollout.token_log_probs, policy, batch, temperature=1.0),
        "rewards": rewards,
        "batches": [(torch.ones(48), batch.mask), (rewards, batch.mask)],
        "group_size": 8,
        "mask": batch.mask,
        "log_probs": batch.sampler_log_probs.clone().requires_grad_(),
        "rollout_log_probs": batch.sampler_log_probs,
        "prompts": [response["prompt"] for response in responses],
        "response_ids": response_ids,
        "eos_ids": torch.tensor([tokenizer.eos_token_id]),
        "sampler_log_probs": batch.sampler_log_probs,
        "reward_of": lambda row: responses[row]["reward"],
    }


def run(names: dict, edits: dict[str, str]) -> dict:
    """Run all blocks but TRL's, with edits, and return the loop's last metrics."""
    code = CODE
    for old, new in edits.items():
        assert old in code
        code = code.replace(old, new)
    exec(code, names)
    return names["metrics"]


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_right_loop_moves_the_policy_without_an_alarm(precision):
    """Its first batch, whose groups are all dropped, is skipped. A learning rate may be 0."""
    names = draw(precision=precision)
    assert run(names, {})["kl"] > 1e-3  # at the last update
    names["optimizer"].param_groups[0]["lr"] = 0.0
    assert run(names, {CALL: ""})["kl"] == 0


def test_the_forward_pass_is_that_of_train_py():
    names = draw(temperature=0.7)
    names |= {"ids": names["batch"].ids, "temperature": 0.7}
    exec(FORWARD, names)
    rows = torch.tensor([5, 0, 17])
    expected = rollout.token_log_probs(names["policy"], names["batch"], rows, temperature=0.7)
    log_probs = names["log_probs_of"](rows).where(names["mask"][rows], 0.0)
    torch.testing.assert_close(log_probs, expected)


def batches(one: str) -> dict[str, str]:
    """Return the edit that gives the loop one batch of rewards and mask."""
    return {"in batches:": f"in [({one})]:"}


LOOP_STARTS = "for rewards, mask in"
RECORD = "rollout_log_probs[rows] = log_probs_of(rows)\n"
SAMPLERS = "rollout_log_probs = sampler_log_probs\n"
DROPOUT = """\
right = log_probs_of
log_probs_of = lambda rows: torch.dropout(right(rows), 0.1, True)
for rewards, mask in"""


@pytest.mark.parametrize(
    "message, temperature, edits",
    [
        ("with the EOS", 1.0, batches("rewards, mask & (response_ids != eos_ids)")),
        ("with the EOS", 1.0, batches("rewards, torch.ones_like(mask)")),  # with the padding
        ("order", 1.0, batches("rewards.flip(0), mask")),
        ("next to each other", 1.0, {" prompts,\n": " prompts[::8] * 8,\n"}),
        ("two equal passes", 1.0, {LOOP_STARTS: DROPOUT}),
        ("temperature", 0.6, {}),
        # The sampler's log-probs, at its temperature, beside those of log_probs_of, which has none
        ("the ratios do not begin", 0.6, {RECORD: SAMPLERS}),
        ("is dropout on", 0.6, {RECORD: SAMPLERS, CALL: ""}),
        ("ratios stay at 1", 1.0, {UPDATE: f"        for rows in micro_batches: {RECORD}{UPDATE}"}),
        (
            "search once per optimizer step",
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
