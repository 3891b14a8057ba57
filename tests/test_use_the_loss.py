"""README's "Use the loss": its loop trains a model, and its assertions find planted mistakes.

Both blocks are taken from the page and run as they stand, with responses of the toy.
"""

import re
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import countdown
from bapo import bapo_loss
from conftest import ROOT

SECTION = (ROOT / "README.md").read_text().split("## Use the loss\n")[1].split("\n## ")[0]
LOOP, ASSERTIONS = re.findall(r"^```python\n(.*?)^```", SECTION, re.DOTALL | re.MULTILINE)
UPDATE = re.search(r"^    metrics = backward\(.*\n", LOOP, re.MULTILINE)[0]
PROBLEMS = ["348:44", "129:27", "367:11", "225:20", "489:23", "135:16"]
GROUP_SIZE = 8


def draw(temperature: float = 1.0) -> SimpleNamespace:
    """Draw responses; return what the page's blocks need. log_probs_of has a temperature of 1."""
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "toy")
    policy = AutoModelForCausalLM.from_pretrained(ROOT / "toy", attention_dropout=0.2).eval()
    answers = [answer for answer in PROBLEMS for _ in range(GROUP_SIZE)]
    prompts = tokenizer([f"{answer}=" for answer in answers], return_tensors="pt").input_ids
    torch.manual_seed(0)
    drawn = policy.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        max_new_tokens=28,
        do_sample=True,
        temperature=temperature,
        top_k=0,
        return_dict_in_generate=True,
        output_scores=True,
    )
    response_ids = drawn.sequences[:, prompts.shape[1] :]
    is_eos = response_ids == tokenizer.eos_token_id
    mask = is_eos.cumsum(1) - is_eos.long() == 0

    def log_probs(logits, ids):
        return logits.log_softmax(-1).gather(-1, ids[..., None]).squeeze(-1)

    def log_probs_of(rows):
        logits = policy(drawn.sequences[rows]).logits[:, prompts.shape[1] - 1 : -1]
        return log_probs(logits, response_ids[rows])

    def reward_of(row):
        ids = response_ids[row][mask[row]]
        return countdown.reward(tokenizer.decode(ids, skip_special_tokens=True), answers[row])

    return SimpleNamespace(
        policy=policy,
        optimizer=torch.optim.AdamW(policy.parameters(), lr=1e-3),
        log_probs_of=log_probs_of,
        response_ids=response_ids,
        sampler_log_probs=log_probs(torch.stack(drawn.scores, dim=1), response_ids),
        eos_ids=torch.tensor([tokenizer.eos_token_id]),
        mask=mask,
        reward_of=reward_of,
        rewards=torch.tensor([float(reward_of(row)) for row in range(len(answers))]),
        group_size=GROUP_SIZE,
    )


def run(names, loop=LOOP, update=UPDATE, assertions=ASSERTIONS) -> dict:
    """Run the loop, with `update` and then the assertions in its place; return all its names."""
    assert UPDATE in loop
    namespace = dict(vars(names))
    exec(loop.replace(UPDATE, update + assertions), namespace)
    return namespace


# ---------------------------------------------------------------- right loops
def test_the_loop_raises_no_alarm_and_moves_the_policy():
    metrics = run(draw())["metrics"]
    assert metrics["kl"] > 1e-3  # at the last update


def test_a_loop_with_sequence_mean_weights_raises_no_alarm():
    names = draw()
    names.own = names.mask / names.mask.sum(1, keepdim=True)
    names.loss_fn = partial(bapo_loss, weights=names.own)
    update = UPDATE.replace("search)", "search, loss_fn=loss_fn)")
    run(names, update=update, assertions=ASSERTIONS.replace("terms = mask", "terms = own"))


def test_a_loop_whose_advantages_are_not_divided_by_the_deviation_raises_no_alarm():
    names = draw()
    groups = names.rewards.view(-1, GROUP_SIZE)
    names.deviations = (groups - groups.mean(1, keepdim=True)).flatten()
    run(names, LOOP.replace("group_relative_advantages(rewards, group_size)", "deviations"))


def test_a_batch_of_equal_rewards_raises_no_alarm():
    names = draw()
    names.rewards = torch.ones_like(names.rewards)
    names.reward_of = lambda row: 1.0
    run(names)


# ---------------------------------------------------------------- planted mistakes
def test_an_eos_outside_the_mask_is_found():
    names = draw()
    names.mask = names.mask & (names.response_ids != names.eos_ids)
    with pytest.raises(AssertionError, match="EOS"):
        run(names)


def test_padding_inside_the_mask_is_found():
    names = draw()
    names.mask = torch.ones_like(names.mask)
    with pytest.raises(AssertionError, match="EOS"):
        run(names)


def test_dropout_is_found():
    names = draw()
    names.policy.train()
    with pytest.raises(AssertionError, match="dropout"):
        run(names)


def test_ratios_that_do_not_begin_at_1_are_found():
    """The sampler's log-probs stand in the place of log_probs_of's, which has no temperature."""
    loop = re.sub(r"rollout_log_probs = .*", "rollout_log_probs = sampler_log_probs", LOOP)
    with pytest.raises(AssertionError, match="ratios do not begin at 1"):
        run(draw(temperature=0.6), loop)


def test_another_temperature_of_the_sampler_is_found():
    with pytest.raises(AssertionError, match="temperature"):
        run(draw(temperature=0.6))


def test_rewards_in_another_order_than_the_responses_are_found():
    names = draw()
    names.rewards = names.rewards.flip(0)
    with pytest.raises(AssertionError, match="order"):
        run(names)


def test_a_search_per_micro_batch_is_found():
    names = draw()
    names.bapo_loss = bapo_loss
    update = """\
    for rows in micro_batches:
        inputs = rollout_log_probs[rows], advantages[rows], mask[rows]
        loss, metrics = bapo_loss(log_probs_of(rows), *inputs, search)
        loss.backward()
"""
    with pytest.raises(AssertionError, match="per micro-batch"):
        run(names, update=update)
