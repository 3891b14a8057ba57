"""rollout.py against literal softmaxes, and against models whose distributions are given.

`chain` counts up: its most likely responses are known, token by token.
"""

import copy

import pytest
import torch
from conftest import (
    EOS,
    LAST,
    PROMPTS,
    RESPONSES,
    VOCABULARY,
    assert_close,
    bigram,
    edit_json,
    given_log_probs,
    given_rollouts,
    gradients,
    kept_for_backward,
)

import rollout
from rollout import (
    Rollouts,
    check_sampler,
    generate,
    generate_partially,
    record_log_probs,
    token_log_probs,
)
from support.loading import load_policy
from tasks import Problem, countdown


@pytest.fixture
def model(tokenizer):
    """Untrained, yet far from uniform: mistakes show. Some responses end early."""
    model = countdown.build_model(tokenizer, seed=3).eval()
    model.precision = "float32"  # as load_policy sets it
    model.generation_config.eos_token_id = [EOS, 7, 8]
    return model


def literal(model, prompt: list[int], response: list[int]) -> torch.Tensor:
    """Log-probs and entropies [2, T] at a temperature of 0.7, from all that stands before each."""
    found = []
    for place, token in enumerate(response):
        logits = model(torch.tensor([prompt + response[:place]])).logits[0, -1]
        log_probs = (logits / 0.7).log_softmax(-1)
        found.append(torch.stack([log_probs[token], -(log_probs.exp() * log_probs).sum()]))
    return torch.stack(found, 1)


# ---------------------------------------------------------------- log-probs
@pytest.mark.parametrize("chunk_tokens", [1000, 3])
def test_log_probs_entropies_and_gradients_are_those_of_a_literal_loop(
    model, monkeypatch, chunk_tokens
):
    """In the order of the rows. No logits are kept for the backward pass."""
    monkeypatch.setattr(rollout, "CHUNK_LOGITS", chunk_tokens * VOCABULARY)
    rows = [2, 0, 1]
    with kept_for_backward() as tensors:
        found = token_log_probs(model, given_rollouts(), torch.tensor(rows), 0.7)
    assert not any(tensor.shape[-1:] == (VOCABULARY,) for tensor in tensors)
    importance = torch.arange(1.0, 22.0).view(3, 7)  # every token counts differently
    (found[0] * importance).sum().backward()
    found_gradients = gradients(model)
    expected = torch.zeros(2, 3, 7)
    for index, row in enumerate(rows):
        expected[:, index, : len(RESPONSES[row])] = literal(model, PROMPTS[row], RESPONSES[row])
    assert_close(torch.stack(found), expected)
    assert not found[1].requires_grad
    (expected[0] * importance).sum().backward()
    torch.testing.assert_close(found_gradients, gradients(model), rtol=1e-3, atol=1e-3)


def test_packs_hold_every_row_once_within_the_limit_and_the_longest_first():
    """Of 9, 2 * 8 and 3 * 3 tokens."""
    assert rollout.pack_by_length([3, 9, 1, 7, 2, 8], 16) == [[1], [5, 3], [0, 4, 2]]


def test_sampling_and_reading_use_the_precision_of_the_model(policy):
    model, _ = load_policy(policy, precision="bfloat16")
    dtypes = []
    layer = model.model.layers[0].self_attn.q_proj
    layer.register_forward_hook(lambda module, inputs, output: dtypes.append(output.dtype))
    generate(model, PROMPTS, max_new_tokens=1)
    given_log_probs(model)
    assert dtypes == [torch.bfloat16] * 2


# ---------------------------------------------------------------- sampling
@pytest.mark.parametrize("batch_tokens", [10_000, 30])
def test_responses_come_in_the_order_of_their_prompts_groups_together(chain, batch_tokens):
    """An EOS in a prompt ends nothing; one in a response belongs to it, and pads (pad is EOS).

    A temperature of 0 takes the likeliest token.
    """
    prompts = [[1, 17], [1, EOS, 15, 15], [1, 5, EOS, 9, 18], [LAST]]
    rollouts = generate(
        chain, prompts, max_new_tokens=4, group_size=2, temperature=0, batch_tokens=batch_tokens
    )
    expected = [[18, 19, EOS], [16, 17, 18, 19], [19, EOS], [EOS]]
    for row in range(8):
        response = expected[row // 2]
        assert rollouts.response_ids[row][rollouts.mask[row]].tolist() == response
        assert rollouts.truncated[row] == (len(response) == 4)


@pytest.mark.parametrize("lora_rank", [0, 2])
def test_sampling_options_of_the_model_s_own_change_nothing(folder, tokenizer, lora_rank):
    """A token repeats as often as the table says, at the temperature that is given.

    The library's default of top_k would leave 50 of the 63 tokens that are no EOS.
    """
    if lora_rank:
        pytest.importorskip("peft")
    torch.manual_seed(0)
    table = 3 * torch.eye(64) + 0.01 * torch.randn(64, 64)
    table[:, EOS] = -100.0
    bigram(tokenizer, table).save_pretrained(folder)
    own = {"min_p": 0.9, "repetition_penalty": 5.0, "no_repeat_ngram_size": 1}
    edit_json(folder / "generation_config.json", **own)
    model, _ = load_policy(str(folder), lora_rank=lora_rank)
    rollouts = generate(model, [[1, 7]], group_size=4000, max_new_tokens=2, temperature=0.7)
    first, second = rollouts.response_ids.T
    assert len(first.unique()) == 63
    expected = (table[7] / 0.7).softmax(0)[7]
    assert abs((first == second).float().mean() - expected) < 0.05  # six standard errors


def test_texts_end_before_the_eos_and_show_special_tokens(tokenizer):
    rollouts = Rollouts([[1]] * 2, [[7, 0, 12, EOS], [7, 14, 12]], [EOS], "cpu")
    assert rollout.response_texts(tokenizer, rollouts) == ["3<pad>8", "3+8"]


def test_the_log_probs_of_sampling_are_those_of_training_in_several_padded_batches(model):
    rollouts = generate(model, PROMPTS, max_new_tokens=7, temperature=0.7, batch_tokens=30)
    record_log_probs(model, rollouts, torch.arange(4).split(3), 0, 0.7)
    assert_close(rollouts.sampler_log_probs, rollouts.rollout_log_probs)
    check_sampler(rollouts)
    rollouts.rollout_log_probs += 0.2
    with pytest.raises(ValueError, match="differ by"):
        check_sampler(rollouts)


# ---------------------------------------------------------------- partial rollouts
def advance(model, unfinished: list, prompt: list[int], step: int, **options):
    """One step of partial rollouts, with a new group for the prompt."""
    settings = {"budget": 2, "micro_batch_tokens": 20, "group_size": 1}
    problem = Problem(prompt, str(step))
    return generate_partially(model, unfinished, [problem], step, **settings | options)


def test_every_token_keeps_the_log_prob_of_the_policy_that_drew_it(model):
    """The policy is another one at every step. train.py records the last step's tokens again."""
    torch.manual_seed(0)
    unfinished = []
    policies = {}
    options = {"group_size": 3, "max_new_tokens": 7, "temperature": 0.7}
    for step in range(1, 7):
        policies[step] = copy.deepcopy(model)
        rollouts, answered = advance(model, unfinished, PROMPTS[step % 2], step, **options)
        for row in range(3 * len(answered)):  # whole groups only
            record_log_probs(model, rollouts, [torch.tensor([row])], step, 0.7)
            response = rollouts.responses[row]
            found = rollouts.rollout_log_probs[row], rollouts.entropy[row]
            versions = rollouts.versions[row, : len(response)].tolist()
            for place, version in enumerate(versions):
                expected = literal(policies[version], answered[row // 3].prompt, response)
                assert_close(torch.stack(found)[:, place], expected[:, place])
        if rollouts:
            assert len(rollouts.mask) == 3 * len(answered)
            assert_close(rollouts.sampler_log_probs, rollouts.rollout_log_probs)
        for parameter in model.parameters():
            parameter.data += 0.05 * torch.randn(parameter.shape)
    assert versions[0] < versions[-1]  # a response of several policies


def test_a_partial_response_grows_by_the_budget_and_is_cut_at_max_new_tokens(chain):
    """At the third step an EOS lies just within the limit of one response, and past the other's.

    At the fourth step a response is the EOS alone.
    """
    unfinished = []
    finished = []
    for step, prompt in enumerate([[14], [15], [4], [LAST]], 1):
        # Only the likeliest token is drawn.
        options = {"max_new_tokens": 5, "temperature": 0.001}
        rollouts, answered = advance(chain, unfinished, prompt, step, **options)
        if rollouts:
            versions = rollouts.versions.tolist()
            finished.append((answered, rollouts.responses, versions, rollouts.truncated.tolist()))
    assert finished == [
        ([([14], "1")], [[15, 16, 17, 18, 19]], [[1, 1, 2, 2, 3]], [True]),
        (
            [([15], "2"), ([LAST], "4")],
            [[16, 17, 18, 19, EOS], [EOS]],
            [[2, 2, 3, 3, 4], [4, 0, 0, 0, 0]],
            [False, False],
        ),
    ]
