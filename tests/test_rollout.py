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
    literal,
)

import rollout
from rollout import Rollouts, generate, generate_partially, token_log_probs
from support.loading import load_policy
from tasks import Problem, countdown

SHARP = 0.001  # a temperature at which only the likeliest token is drawn


@pytest.fixture
def model(tokenizer):
    """Untrained, yet far from uniform: mistakes show."""
    model = countdown.build_model(tokenizer, seed=3).eval()
    model.precision = "float32"  # as load_policy sets it
    return model


def response_of(rollouts: Rollouts, row: int) -> list[int]:
    return rollouts.response_ids[row][rollouts.mask[row]].tolist()


# ---------------------------------------------------------------- log-probs
@pytest.mark.parametrize("chunk_tokens", [1000, 3])
def test_log_probs_entropies_and_gradients_are_those_of_a_literal_loop(
    model, monkeypatch, chunk_tokens
):
    """In the order of the rows that are asked for."""
    monkeypatch.setattr(rollout, "CHUNK_LOGITS", chunk_tokens * VOCABULARY)
    rollouts = given_rollouts()
    rows = torch.tensor([2, 0, 1])
    log_probs, entropy = token_log_probs(model, rollouts, rows, 0.7)
    importance = torch.arange(1.0, 22.0).view(3, 7)  # every token counts differently
    (log_probs * importance).sum().backward()
    found = gradients(model)
    assert not entropy.requires_grad
    assert not log_probs[~rollouts.mask[rows]].any()
    assert not entropy[~rollouts.mask[rows]].any()
    total = 0.0
    for index, row in enumerate(rows.tolist()):
        length = len(RESPONSES[row])
        expected, expected_entropy = literal(model, PROMPTS[row], RESPONSES[row], 0.7)
        assert_close(log_probs[index, :length], expected)
        assert_close(entropy[index, :length], expected_entropy)
        total = total + (expected * importance[index, :length]).sum()
    total.backward()
    torch.testing.assert_close(found, gradients(model), rtol=1e-3, atol=1e-3)


def test_packs_hold_every_row_once_within_the_limit_and_the_longest_first():
    """Of 9, 2 * 8 and 3 * 3 tokens."""
    assert rollout.pack_by_length([3, 9, 1, 7, 2, 8], 16) == [[1], [5, 3], [0, 4, 2]]


@pytest.mark.parametrize("chunk_tokens, is_kept", [(1000, True), (3, False)])
def test_the_logits_of_several_chunks_are_not_kept_for_the_backward_pass(
    model, monkeypatch, chunk_tokens, is_kept
):
    monkeypatch.setattr(rollout, "CHUNK_LOGITS", chunk_tokens * VOCABULARY)
    with kept_for_backward() as tensors:
        given_log_probs(model)
    assert any(tensor.shape[-1:] == (VOCABULARY,) for tensor in tensors) == is_kept


def test_sampling_and_reading_use_the_precision_of_the_model(policy):
    model, _ = load_policy(policy, precision="bfloat16")
    dtypes = []
    layer = model.model.layers[0].self_attn.q_proj
    layer.register_forward_hook(lambda module, inputs, output: dtypes.append(output.dtype))
    generate(model, PROMPTS, max_new_tokens=2)
    assert set(dtypes) == {torch.bfloat16}
    dtypes.clear()
    given_log_probs(model)
    assert set(dtypes) == {torch.bfloat16}


# ---------------------------------------------------------------- sampling
@pytest.mark.parametrize("batch_tokens", [10_000, 30, 1])
def test_responses_come_in_the_order_of_their_prompts_groups_together(chain, batch_tokens):
    """An EOS in a prompt ends nothing; one in a response belongs to it, and pads (pad is EOS)."""
    prompts = [[1, 17], [1, EOS, 15, 15], [1, 5, EOS, 9, 18], [LAST]]
    rollouts = generate(
        chain,
        prompts,
        max_new_tokens=4,
        group_size=2,
        temperature=SHARP,
        batch_tokens=batch_tokens,
    )
    expected = [[18, 19, EOS], [16, 17, 18, 19], [19, EOS], [EOS]]
    for row in range(8):
        assert response_of(rollouts, row) == expected[row // 2]
        whole = prompts[row // 2] + expected[row // 2]
        assert rollouts.sequences[row, : len(whole)].tolist() == whole
        assert rollouts.sequence_lengths[row] == len(whole)
    assert rollouts.truncated.tolist() == [False, False, True, True, False, False, False, False]


@pytest.mark.parametrize("lora_rank", [0, 2])
def test_sampling_options_of_the_model_s_own_change_nothing(folder, tokenizer, lora_rank):
    """Pairs of tokens are drawn as often as the table says, at the temperature that is given."""
    if lora_rank:
        pytest.importorskip("peft")
    vocabulary = 64  # the library's default of top_k would leave 50
    table = 0.2 * torch.randn(vocabulary, vocabulary, generator=torch.Generator().manual_seed(0))
    table += 3 * torch.eye(vocabulary)  # repetitions are likely, and a penalty shows
    table[:, EOS] = -100.0
    bigram(tokenizer, table).save_pretrained(folder)
    edit_json(
        folder / "generation_config.json",
        min_p=0.9,
        repetition_penalty=5.0,
        no_repeat_ngram_size=1,
    )
    model, _ = load_policy(str(folder), lora_rank=lora_rank)
    torch.manual_seed(0)
    rollouts = generate(model, [[1, 7]], group_size=4000, max_new_tokens=2, temperature=0.7)
    probabilities = (table / 0.7).softmax(-1)
    expected = probabilities[7].unsqueeze(1) * probabilities
    first, second = rollouts.response_ids.T
    counts = torch.bincount(vocabulary * first + second, minlength=vocabulary**2)
    found = counts.view(vocabulary, vocabulary) / 4000
    assert (found - expected).abs().max() < 0.05  # six standard errors
    assert (found.sum(1) > 0).sum() == vocabulary - 1


def test_texts_end_before_the_eos_and_show_special_tokens(tokenizer):
    rollouts = Rollouts([[1]] * 2, [[7, 0, 12, EOS], [7, 14, 12]], [False, True], "cpu")
    assert rollout.response_texts(tokenizer, rollouts) == ["3<pad>8", "3+8"]


# ---------------------------------------------------------------- partial rollouts
def advance(model, unfinished: list, prompt: list[int], step: int, **options):
    """One step of partial rollouts, with a new group for the prompt."""
    settings = {"budget": 2, "micro_batch_tokens": 20, "group_size": 1}
    problem = Problem(prompt, str(step))
    return generate_partially(model, unfinished, [problem], step, **settings | options)


def test_every_token_keeps_the_log_prob_of_the_policy_that_drew_it(model):
    """The policy is another one at every step."""
    model.generation_config.eos_token_id = [EOS, 7, 8]  # some responses end early
    torch.manual_seed(0)
    unfinished = []
    policies = {}
    resumed = 0
    for step in range(1, 7):
        policies[step] = copy.deepcopy(model)
        options = {"group_size": 3, "max_new_tokens": 7, "temperature": 0.7}
        rollouts, answered = advance(model, unfinished, PROMPTS[step % 2], step, **options)
        for parameter in model.parameters():
            parameter.data += 0.05 * torch.randn(parameter.shape)
        if rollouts is None:
            continue
        assert len(rollouts.mask) == 3 * len(answered)  # whole groups only
        for row, inside in enumerate(rollouts.mask):
            prompt = rollouts.sequences[row, : rollouts.prompt_lengths[row]].tolist()
            response = response_of(rollouts, row)
            assert prompt == answered[row // 3].prompt
            versions = rollouts.versions[row][inside]
            assert versions[0] == int(answered[row // 3].answer)
            resumed += int(versions[-1] > versions[0])
            for version in versions.unique().tolist():
                drawn = versions == version
                expected = literal(policies[version], prompt, response, 0.7)
                assert_close(rollouts.rollout_log_probs[row][inside][drawn], expected[0][drawn])
                assert_close(rollouts.entropy[row][inside][drawn], expected[1][drawn])
    assert resumed


def test_a_partial_response_grows_by_the_budget_and_is_cut_at_max_new_tokens(chain):
    """At the third step an EOS lies just within the limit of one response, and past the other's."""
    unfinished = []
    finished = []
    for step, prompt in enumerate([[14], [15], [4], [4]], 1):
        options = {"max_new_tokens": 5, "temperature": SHARP}
        rollouts, _ = advance(chain, unfinished, prompt, step, **options)
        if rollouts is not None:
            ids = rollouts.response_ids.tolist()
            finished.append((step, ids, rollouts.versions.tolist(), rollouts.truncated.tolist()))
    assert finished == [
        (3, [[15, 16, 17, 18, 19]], [[1, 1, 2, 2, 3]], [True]),
        (4, [[16, 17, 18, 19, EOS]], [[2, 2, 3, 3, 4]], [False]),
    ]
