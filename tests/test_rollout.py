"""rollout.py and support/partial_rollouts.py against plain softmaxes of single, unpadded sequences.

And how support/models.py loads a policy.
"""

import copy
import itertools
from types import SimpleNamespace

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

import countdown
import rollout
from reward import Problem
from rollout import (
    Rollouts,
    check_first_ratio,
    eos_token_ids,
    generate,
    keep_from_autocast,
    newest_log_ratio,
    pack_by_length,
    plain_head,
    response_mask,
    sample_rollouts,
    token_log_probs,
)
from support.models import checkpoint_layers, load_policy, load_pretrained
from support.partial_rollouts import PartialRollouts

PROMPTS = ["348:44=", "123:06=", "9"]  # of different lengths: there is padding on the left


@pytest.fixture(scope="module")
def tokenizer():
    return countdown.build_tokenizer()


@pytest.fixture
def model(tokenizer):
    """Untrained, yet far from uniform: mistakes show."""
    return countdown.build_model(tokenizer, seed=3).eval()


def sampled(model, tokenizer, temperature=1.0, **others) -> Rollouts:
    torch.manual_seed(0)
    settings = {"group_size": 4, "max_new_tokens": 12} | others
    return sample_rollouts(model, tokenizer, PROMPTS, temperature=temperature, **settings)


@torch.no_grad()
def literal(model, rollouts, row, temperature) -> tuple[torch.Tensor, torch.Tensor]:
    """log-probs and entropies of one response from its own unpadded sequence, float64."""
    prompt = rollouts.prompt_ids[row][rollouts.prompt_mask[row]]
    response = rollouts.response_ids[row][rollouts.mask[row]]
    logits = model(torch.cat([prompt, response]).unsqueeze(0)).logits[0, len(prompt) - 1 : -1]
    probabilities = (logits.double() / temperature).softmax(-1)
    log_softmax = probabilities.log()
    log_probs = log_softmax[torch.arange(len(response)), response]
    return log_probs, -(probabilities * log_softmax).sum(-1)


def assert_close(values, expected) -> None:
    torch.testing.assert_close(values.double(), expected.double(), atol=2e-5, rtol=1e-5)


def read_in_parts(model, rollouts, max_tokens, temperature=1.0) -> torch.Tensor:
    """Log-probs [N, T], read in micro-batches without a gradient."""
    log_probs = torch.zeros(rollouts.mask.shape)
    for rows in rollouts.micro_batch_rows(max_tokens):
        with torch.no_grad():
            part, _ = token_log_probs(model, rollouts.select(rows), temperature)
        log_probs[rows, : part.shape[1]] = part
    return log_probs


# ---------------------------------------------------------------- log-probs
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_log_probs_and_entropy_equal_the_plain_softmax_of_each_sequence(
    model, tokenizer, temperature
):
    model.generation_config.eos_token_id = [2, 3, 4]  # so that some responses end soon
    rollouts = sampled(model, tokenizer, temperature, max_new_tokens=6)
    assert rollouts.mask.sum(1).unique().numel() > 2
    assert set(rollouts.truncated.tolist()) == {True, False}
    for row, inside in enumerate(rollouts.mask):
        log_probs, entropy = literal(model, rollouts, row, temperature)
        assert_close(rollouts.log_probs[row][inside], log_probs)
        assert_close(rollouts.entropy[row][inside], entropy)
    assert (rollouts.log_probs[~rollouts.mask] == 0).all()
    assert (rollouts.entropy[~rollouts.mask] == 0).all()
    assert rollouts.log_probs.dtype == torch.float32
    assert not rollouts.log_probs.requires_grad


@pytest.mark.parametrize("bucket_tokens", [10_000, 30, 1])
def test_chunks_buckets_and_micro_batches_change_neither_values_nor_gradients(
    model, tokenizer, monkeypatch, bucket_tokens
):
    model.generation_config.eos_token_id = list(range(2, 8))  # responses of many lengths
    rollouts = sampled(model, tokenizer, max_new_tokens=6)
    assert rollouts.mask.sum(1).unique().numel() > 3
    results = []
    # The first is the reference, in one bucket.
    for chunk_logits, max_tokens in ((10_000, 10_000), (60, 10_000), (60, 30)):
        if results:
            monkeypatch.setitem(rollout.BUCKET_TOKENS, "cpu", bucket_tokens)
            rollouts = rollouts.select(torch.arange(len(rollouts.mask)))
            assert (len(rollouts.buckets) > 1) == (bucket_tokens < 10_000)
        model.zero_grad()
        values = torch.zeros(2, *rollouts.mask.shape)
        for rows in rollouts.micro_batch_rows(max_tokens):
            part = rollouts.select(rows)
            log_probs, entropy = token_log_probs(model, part, 0.7, chunk_logits)
            assert not entropy.requires_grad
            place = torch.arange(log_probs.shape[1])
            (log_probs * place).sum().backward()
            values[0, rows, : log_probs.shape[1]] = log_probs.detach()
            values[1, rows, : log_probs.shape[1]] = entropy
        head_gradient = model.lm_head.weight.grad.clone()
        embedding_gradient = model.model.embed_tokens.weight.grad.clone()
        results.append((values, head_gradient, embedding_gradient))
    for other in results[1:]:
        for whole, split in zip(results[0], other, strict=True):
            # Of the whole tensor: an element that cancels to nearly 0 is nothing but rounding.
            assert (split - whole).norm() < 1e-5 * whole.norm()


def test_rollouts_are_recorded_alike_in_one_micro_batch_and_in_several(model, tokenizer):
    whole = sampled(model, tokenizer)
    split = sampled(model, tokenizer, micro_batch_tokens=30)
    assert torch.equal(split.response_ids, whole.response_ids)
    torch.testing.assert_close(split.log_probs, whole.log_probs, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(split.entropy, whole.entropy, rtol=1e-4, atol=1e-5)


def test_no_more_than_a_chunk_of_logits_exists_and_chunks_are_recomputed_rather_than_kept(
    model, tokenizer
):
    rollouts = sampled(model, tokenizer)
    tokens = int(rollouts.mask.sum())
    vocabulary = 20
    sizes = []
    model.lm_head.register_forward_hook(lambda module, inputs, output: sizes.append(output.numel()))
    log_probs, _ = token_log_probs(model, rollouts, chunk_logits=100)
    sizes_of_forward = sizes.copy()
    log_probs.sum().backward()
    assert max(sizes) <= 100
    assert sum(sizes_of_forward) == tokens * vocabulary
    assert sum(sizes) == 2 * sum(sizes_of_forward)  # each once more in the backward pass
    sizes.clear()
    log_probs, _ = token_log_probs(model, rollouts, chunk_logits=10_000)
    log_probs.sum().backward()
    assert sum(sizes) == tokens * vocabulary  # a single chunk is kept


@pytest.mark.parametrize("lengths", [[5], [3, 9, 1, 7, 2, 8], [4] * 10, list(range(1, 40))])
@pytest.mark.parametrize("limit", [1, 8, 16, 1000])
def test_packing_puts_every_row_into_one_pack_within_the_limit_and_wastes_little(lengths, limit):
    packs = pack_by_length(lengths, limit)
    rows = list(itertools.chain.from_iterable(packs))
    assert sorted(rows) == list(range(len(lengths)))
    for pack in packs:
        longest = max(lengths[row] for row in pack)
        assert len(pack) == 1 or longest * len(pack) <= limit
    if len(packs) == 1:
        assert rows == list(range(len(lengths)))  # nothing is reordered without need
    else:  # similar lengths together, the most memory first
        assert [lengths[row] for row in rows] == sorted(lengths, reverse=True)


def tiny_gemma(**others) -> Gemma2ForCausalLM:
    """A model that caps its logits."""
    settings = {
        "vocab_size": 20,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "query_pre_attn_scalar": 8,
        "final_logit_softcapping": 0.5,
    }
    torch.manual_seed(0)
    return Gemma2ForCausalLM(Gemma2Config(**(settings | others))).eval()


def test_a_head_that_does_more_than_a_linear_map_gets_whole_logits(tokenizer, model):
    assert plain_head(model) is model.lm_head
    no_linear_layer = copy.deepcopy(model)
    no_linear_layer.lm_head = torch.nn.Sequential(model.lm_head, torch.nn.Hardtanh())
    rollouts = sampled(model, tokenizer, max_new_tokens=4)
    for other in (tiny_gemma(), no_linear_layer):
        assert plain_head(other) is None
        log_probs, _ = token_log_probs(other, rollouts)
        for row, inside in enumerate(rollouts.mask):
            expected, _ = literal(other, rollouts, row, 1.0)
            assert_close(log_probs[row][inside], expected)


# ---------------------------------------------------------------- gradient checkpointing
# Every kind of dropout that these models have, very high.
DROPOUT = {
    Qwen2ForCausalLM: Qwen2Config(
        vocab_size=20,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        attention_dropout=0.5,
        tie_word_embeddings=True,
        eos_token_id=2,
    ),
    OPTForCausalLM: OPTConfig(
        vocab_size=20,
        hidden_size=16,
        ffn_dim=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        word_embed_proj_dim=16,
        max_position_embeddings=64,
        dropout=0.5,
        attention_dropout=0.5,
        activation_dropout=0.5,
        layerdrop=0.5,
        eos_token_id=2,
    ),
}


def calls_of_first_layer(model) -> list[dict]:
    """The keyword arguments of every call of the first layer's attention, as they come."""
    calls = []
    for name, module in model.named_modules():
        if name.endswith("layers.0.self_attn"):
            module.register_forward_pre_hook(
                lambda module, inputs, keywords: calls.append(keywords), with_kwargs=True
            )
    return calls


@pytest.mark.parametrize("kind", DROPOUT)
def test_gradient_checkpointing_recomputes_layers_and_changes_neither_values_nor_gradients(
    tmp_path, tokenizer, kind
):
    torch.manual_seed(0)
    kind(copy.deepcopy(DROPOUT[kind])).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    results = []
    for gradient_checkpointing in (False, True):
        model, _ = load_policy(str(tmp_path), "cpu", gradient_checkpointing)
        calls = calls_of_first_layer(model)
        rollouts = sampled(model, tokenizer)
        drawing = calls.copy()
        calls.clear()
        log_probs, entropy = token_log_probs(model, rollouts)
        log_probs.sum().backward()
        assert len(calls) == (2 if gradient_checkpointing else 1)
        gradients = []
        for parameter in model.parameters():
            if parameter.grad is not None:
                gradients.append(parameter.grad)
        assert len(gradients) > 20
        assert max(gradient.abs().max() for gradient in gradients) > 0.1
        values = [rollouts.response_ids, rollouts.log_probs, log_probs.detach(), entropy]
        results.append(values + gradients)
        # Sampling has its cache; then the model is asked for its head, and for the log-probs.
        is_cached = [call["past_key_values"] is not None for call in drawing]
        cached_calls = is_cached.index(False)
        assert cached_calls > 5
        assert not any(is_cached[cached_calls:])
    for plain, checkpointed in zip(*results, strict=True):
        assert torch.equal(checkpointed, plain)


def test_a_copy_of_a_policy_computes_with_its_own_weights(model, tokenizer):
    checkpoint_layers(model)
    rollouts = sampled(model, tokenizer)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    log_probs, _ = token_log_probs(other, rollouts)
    assert torch.equal(log_probs.detach(), rollouts.log_probs)
    log_probs.sum().backward()
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_model_without_layers_that_can_be_checkpointed_is_refused():
    with pytest.raises(ValueError, match="gradient_checkpointing: Linear"):
        checkpoint_layers(torch.nn.Linear(1, 1))


# ---------------------------------------------------------------- sampling
def test_prompts_drawn_in_batches_by_length_come_back_in_their_order(model, tokenizer, monkeypatch):
    prompts = ["9", "348:44=", "12", "123:06=", "1234"]
    settings = {"group_size": 2, "max_new_tokens": 5}
    whole = generate(model, tokenizer, prompts, do_sample=False, **settings)
    drawn = []
    draw = rollout._generate_batch

    def kept(model, prompt_ids, config):
        drawn.append([len(ids) for ids in prompt_ids])
        return draw(model, prompt_ids, config)

    monkeypatch.setattr(rollout, "_generate_batch", kept)
    settings["batch_tokens"] = 30
    parts = generate(model, tokenizer, prompts, do_sample=False, **settings)
    assert drawn == [[8, 8], [8, 8], [5, 5, 3], [3, 2, 2]]
    assert all(len(lengths) * (max(lengths) + 5) <= 30 for lengths in drawn)
    for name in ("prompt_ids", "prompt_mask", "response_ids", "mask", "truncated"):
        assert torch.equal(getattr(parts, name), getattr(whole, name)), name  # greedy: the same
    parts = generate(model, tokenizer, prompts, **settings)
    log_probs, _ = token_log_probs(model, parts)
    gaps = (parts.sampler_log_probs - log_probs.detach())[parts.mask].abs()
    assert gaps.max() < 1e-4  # these came back in the right order, too


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_the_sampler_s_own_log_probs_are_kept(model, tokenizer, temperature):
    model.generation_config.eos_token_id = [2, 3, 4]
    rollouts = sampled(model, tokenizer, temperature, max_new_tokens=4)
    assert set(rollouts.truncated.tolist()) == {True, False}
    gaps = (rollouts.sampler_log_probs - rollouts.log_probs).abs()[rollouts.mask]
    # Two ways of computing the same, cached and all at once: close, and not a copy.
    assert 0 < gaps.max() < 1e-4
    with torch.no_grad():
        model.lm_head.weight.mul_(0.5)  # another policy: the record stays the sampler's
    log_probs, _ = token_log_probs(model, rollouts, temperature)
    assert (rollouts.sampler_log_probs - log_probs).abs()[rollouts.mask].max() > 0.1


OWN_SETTINGS = {
    "temperature": 0.1,
    "top_k": 1,
    "top_p": 0.1,
    "min_p": 0.9,
    "repetition_penalty": 1.5,
    "no_repeat_ngram_size": 1,
    "min_new_tokens": 9,
}


def test_sampling_ignores_what_the_model_s_own_generation_config_says(
    model, tokenizer, monkeypatch
):
    model.generation_config.update(do_sample=False, num_beams=3, **OWN_SETTINGS)
    own_config = model.generation_config
    effective = []
    prepare = model._prepare_generation_config

    def kept(*arguments, **others):
        config, model_kwargs = prepare(*arguments, **others)
        effective.append(config)
        return config, model_kwargs

    monkeypatch.setattr(model, "_prepare_generation_config", kept)
    torch.manual_seed(0)
    rollouts = generate(
        model, tokenizer, ["348:44="], group_size=3000, max_new_tokens=2, temperature=0.7
    )
    (config,) = effective
    assert config.do_sample
    assert (config.temperature, config.top_p, config.top_k) == (0.7, 1.0, 0)
    assert (config.repetition_penalty, config.num_beams) == (1.0, 1)
    off = (None, 0, 0.0, 1.0)
    for name in ("min_p", "typical_p", "no_repeat_ngram_size", "min_new_tokens", "bad_words_ids"):
        assert getattr(config, name) in off, name
    assert model.generation_config is own_config  # it is given back
    # What counts: the drawn frequencies are softmax(logits / temperature) over the vocabulary.
    prompt_ids = torch.tensor(tokenizer(["348:44="])["input_ids"])
    with torch.no_grad():
        expected = (model(prompt_ids).logits[0, -1] / 0.7).softmax(-1)
    counts = torch.bincount(rollouts.response_ids[:, 0], minlength=len(tokenizer))
    assert (counts / 3000 - expected).abs().max() < 0.035
    assert expected.max() < 0.9


@pytest.mark.parametrize("do_sample", [True, False])
def test_a_repetition_penalty_of_the_model_s_own_is_not_applied(model, tokenizer, do_sample):
    """Kills: a config that leaves the penalty open, which `generate` then takes from the model.

    With it neither the greedy tokens nor the sampler's log-probs are those of the softmax.
    """
    settings = {"max_new_tokens": 12, "do_sample": do_sample}
    torch.manual_seed(0)
    expected = generate(model, tokenizer, PROMPTS, **settings)
    model.generation_config.repetition_penalty = 1.5
    model.config.repetition_penalty = 1.5
    torch.manual_seed(0)
    rollouts = generate(model, tokenizer, PROMPTS, **settings)
    assert torch.equal(rollouts.response_ids, expected.response_ids)
    config = rollout.sampling_config([2], **settings)
    assert config.repetition_penalty == 1.0  # None would be the model's, in some versions
    if do_sample:
        log_probs, _ = token_log_probs(model, rollouts)
        gaps = (rollouts.sampler_log_probs - log_probs).abs()[rollouts.mask]
        assert gaps.max() < 1e-4


def test_greedy_decoding_takes_the_most_likely_token_and_the_training_mode_is_given_back(
    model, tokenizer
):
    model.train()
    rollouts = generate(model, tokenizer, PROMPTS, max_new_tokens=5, do_sample=False)
    assert model.training
    assert rollouts.sampler_log_probs is None
    for row in range(len(PROMPTS)):
        ids = rollouts.prompt_ids[row][rollouts.prompt_mask[row]]
        for token in rollouts.response_ids[row][rollouts.mask[row]]:
            assert token == model(ids.unsqueeze(0)).logits[0, -1].argmax()
            ids = torch.cat([ids, token.unsqueeze(0)])


# ---------------------------------------------------------------- the end of a response
def test_the_mask_is_positional_and_keeps_the_first_of_several_eos():
    ids = torch.tensor([[5, 6, 2, 2, 2], [5, 7, 5, 2, 5], [5, 5, 5, 5, 5], [2, 5, 5, 5, 5]])
    mask, truncated = response_mask(ids, [2, 7])  # 2 is the pad token of this model, too
    assert mask.sum(1).tolist() == [3, 2, 5, 1]
    assert truncated.tolist() == [False, False, True, False]


def test_generation_stops_at_every_eos_id_and_works_when_pad_is_eos(model, tokenizer):
    stops = tokenizer.convert_tokens_to_ids(["<eos>", "=", ";"])
    model.generation_config.eos_token_id = stops[:2]
    model.config.eos_token_id = stops[2]
    tokenizer.pad_token = tokenizer.eos_token
    try:
        assert eos_token_ids(model, tokenizer) == sorted(stops)
        rollouts = sampled(model, tokenizer, group_size=8)
    finally:
        tokenizer.pad_token = "<pad>"
    ended = (~rollouts.truncated).nonzero().flatten()
    assert len(ended)
    for row in ended:
        *tokens, last = rollouts.response_ids[row][rollouts.mask[row]].tolist()
        assert last in stops
        assert not set(tokens) & set(stops)
    assert (rollouts.log_probs[rollouts.mask] < 0).all()  # the EOS has a log-prob: it is trained


def test_an_eos_that_the_model_has_no_logit_for_does_not_count(model, tokenizer):
    model.generation_config.eos_token_id = [2, 20, 151643]
    model.config.eos_token_id = None
    assert eos_token_ids(model, tokenizer) == [2]


def test_what_cannot_be_drawn_from_is_refused(model, tokenizer):
    with pytest.raises(ValueError, match="prompts is empty"):
        generate(model, tokenizer, [], max_new_tokens=2)
    with pytest.raises(ValueError, match="prompts: number 1 has no token"):
        generate(model, tokenizer, [[5], []], max_new_tokens=2)
    with pytest.raises(ValueError, match="temperature must be > 0, got 0.0"):
        generate(model, tokenizer, PROMPTS, max_new_tokens=2, temperature=0.0)
    model.generation_config.eos_token_id = None
    model.config.eos_token_id = None
    eos_token = tokenizer.eos_token
    tokenizer.eos_token = None
    try:
        with pytest.raises(ValueError, match="EOS"):
            generate(model, tokenizer, PROMPTS, max_new_tokens=2)
    finally:
        tokenizer.eos_token = eos_token


def test_select_drops_unused_positions_and_may_keep_nothing(model, tokenizer):
    rollouts = sampled(model, tokenizer)
    shortest = rollouts.mask.sum(1).argmin()
    one = rollouts.select(shortest.unsqueeze(0))
    assert one.mask.all()
    assert one.response_ids.shape == one.log_probs.shape == one.mask.shape
    none = rollouts.select(torch.zeros(len(rollouts.mask), dtype=torch.bool))
    assert none.mask.shape == (0, 0)
    (rows,) = none.micro_batch_rows(10)
    assert rows.tolist() == []


def test_texts_end_before_the_eos_and_show_stray_special_tokens(tokenizer):
    tokens = [["3", "<pad>", "8", "=", "<eos>", "<pad>"], list("3+8=11")]
    ids = torch.tensor([tokenizer.convert_tokens_to_ids(row) for row in tokens])
    mask, truncated = response_mask(ids, [tokenizer.eos_token_id])
    no_prompt = ids[:, :0]
    rollouts = Rollouts(no_prompt, no_prompt.bool(), ids, mask, truncated)
    assert rollout.response_texts(tokenizer, rollouts) == ["3<pad>8=", "3+8=11"]


# ---------------------------------------------------------------- precision
VOCABULARY = 512


def high_entropy_model(kind: str):
    """Logits in [16, 32), where bfloat16 has steps of 0.125, and nearly uniform distributions."""
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 4,
        "tie_word_embeddings": False,
        "eos_token_id": 0,
        "initializer_range": 0.1,
    }
    if kind == "plain":
        torch.manual_seed(0)
        model = Qwen2ForCausalLM(Qwen2Config(**sizes)).eval()
    else:
        model = tiny_gemma(
            **sizes, head_dim=16, final_logit_softcapping=60.0, query_pre_attn_scalar=16
        )
    model.lm_head = torch.nn.Linear(64, VOCABULARY)
    torch.nn.init.normal_(model.lm_head.weight, std=0.12)
    torch.nn.init.constant_(model.lm_head.bias, 24.0)
    return model


NO_TOKENIZER = SimpleNamespace()  # prompts are token ids, and the model names its EOS


def share_clipped_by_rounding(model) -> float:
    """The largest share of tokens with a ratio outside [0.9, 3.0] between two readings of one
    policy, of which all but one are under autocast."""
    prompts = [list(range(5, 5 + length)) for length in (3, 9, 6, 14)]
    torch.manual_seed(1)
    with torch.autocast("cpu", torch.bfloat16):
        rollouts = generate(model, NO_TOKENIZER, prompts, group_size=12, max_new_tokens=24)
        readings = [
            read_in_parts(model, rollouts, 10_000),
            read_in_parts(model, rollouts, 200),
            token_log_probs(model, rollouts, chunk_logits=50 * VOCABULARY)[0].detach(),
        ]
    readings.append(read_in_parts(model, rollouts, 10_000))
    readings.append(rollouts.sampler_log_probs)
    assert rollouts.mask.sum() > 1000
    shares = []
    for new, old in itertools.permutations(readings, 2):
        ratio = (new - old)[rollouts.mask].exp()
        shares.append(((ratio < 0.9) | (ratio > 3.0)).float().mean().item())
    return max(shares)


@pytest.mark.parametrize("kind", ["plain", "capped"])
def test_rounding_alone_clips_no_token_under_autocast(kind):
    model = high_entropy_model(kind)
    with torch.no_grad():
        logits = model(torch.arange(40).view(2, 20)).logits
    assert 16 <= logits.min()
    assert logits.max() < 32
    assert (plain_head(model) is model.lm_head) == (kind == "plain")
    assert share_clipped_by_rounding(model) == 0


def test_a_head_in_bfloat16_would_clip_a_token_and_is_kept_from_autocast():
    """Logits of 24.0625, half-way between two bfloat16 numbers, from two nearly equal states."""
    states = torch.tensor([[24.0, 0.0625 - 2**-10], [24.0, 0.0625 + 2**-10]])
    head = torch.nn.Linear(2, 100, bias=False)
    with torch.no_grad():
        head.weight[:, 0] = 1.0
        head.weight[:, 1] = 0.0
        head.weight[0, 1] = 1.0

    def ratio_of_the_first_token() -> float:
        with torch.autocast("cpu", torch.bfloat16):
            logits = head(states)
        log_probs = logits.float().log_softmax(-1)[:, 0]
        return (log_probs[0] - log_probs[1]).exp().item()

    assert ratio_of_the_first_token() < 0.9
    keep_from_autocast(head)
    assert ratio_of_the_first_token() == pytest.approx(1, abs=0.01)


@pytest.mark.parametrize("kind", ["plain", "capped"])
def test_under_autocast_the_body_is_bfloat16_and_the_head_and_the_gradients_are_float32(kind):
    def draw(model):
        return generate(model, NO_TOKENIZER, [[5, 6]], max_new_tokens=2)

    rollouts = draw(high_entropy_model(kind))

    def train(model):
        log_probs, _ = token_log_probs(model, rollouts)
        log_probs.sum().backward()
        assert {parameter.grad.dtype for parameter in model.parameters()} == {torch.float32}

    for use in (draw, train):
        model = high_entropy_model(kind)
        plain_head(model)
        dtypes = {"body": set(), "head": set()}

        def keep(dtypes_of_module):
            return lambda module, inputs, output: dtypes_of_module.add(output.dtype)

        model.model.layers[0].mlp.register_forward_hook(keep(dtypes["body"]))
        model.lm_head.register_forward_hook(keep(dtypes["head"]))
        with torch.autocast("cpu", torch.bfloat16):
            use(model)
        assert dtypes == {"body": {torch.bfloat16}, "head": {torch.float32}}


def test_weights_in_bfloat16_are_used_as_they_are(model, tokenizer):
    rollouts = sampled(model.to(torch.bfloat16), tokenizer)
    assert rollouts.log_probs.dtype == rollouts.sampler_log_probs.dtype == torch.float32
    assert model.lm_head.weight.dtype == torch.bfloat16
    assert (rollouts.log_probs[rollouts.mask] < 0).all()


def test_under_autocast_the_same_micro_batches_give_the_same_bits(model, tokenizer):
    with torch.autocast("cpu", torch.bfloat16):
        rollouts = sampled(model, tokenizer, micro_batch_tokens=60)
        all_rows = rollouts.micro_batch_rows(60)
        assert len(all_rows) > 1
        for rows in all_rows:
            log_probs, _ = token_log_probs(model, rollouts.select(rows))  # with a gradient
            width = log_probs.shape[1]
            assert torch.equal(log_probs, rollouts.log_probs[rows, :width])
    assert log_probs.dtype == torch.float32
    assert model.lm_head.weight.dtype == torch.float32
    in_float32, _ = token_log_probs(model, rollouts)
    gaps = (in_float32 - rollouts.log_probs).abs()[rollouts.mask]
    assert 1e-3 < gaps.max() < 0.5  # it was bfloat16 arithmetic


# ---------------------------------------------------------------- the first ratio
def log_ratio(log_probs, rollouts, step=1, exact=True) -> float:
    return newest_log_ratio(log_probs, rollouts, step, exact).item()


def test_every_first_ratio_is_one_and_a_wrong_temperature_is_noticed(model, tokenizer):
    rollouts = sampled(model, tokenizer, 0.6)
    rollouts.versions = torch.ones_like(rollouts.response_ids)
    some = rollouts.select(torch.tensor([True, False] * 6))  # other rows, other width
    for part in (rollouts, some):
        log_probs, _ = token_log_probs(model, part, 0.6)
        check_first_ratio(log_ratio(log_probs, part))
    wrong, _ = token_log_probs(model, rollouts, 1.0)
    for exact in (True, False):
        with pytest.raises(RuntimeError, match="log importance ratio of"):
            check_first_ratio(log_ratio(wrong, rollouts, exact=exact), exact)


def test_the_newest_log_ratio_is_the_largest_or_the_mean_of_this_step_s_tokens():
    """Kills: tokens of other steps or of the padding, a mean over all tokens.

    Three steps drew the tokens; what stands outside the mask must not count.
    """
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0]]).bool()
    versions = torch.tensor([[0, 2, 2, 2], [1, 2, 2, 2]])
    drawn = torch.zeros(2, 4)
    now = torch.tensor([[9.0, 0.2, -0.5, 9.0], [8.0, -0.2, 9.0, 9.0]])
    empty = torch.zeros(2, 0, dtype=torch.long)
    rollouts = Rollouts(
        prompt_ids=empty,
        prompt_mask=empty.bool(),
        response_ids=versions,
        mask=mask,
        truncated=torch.zeros(2).bool(),
        log_probs=drawn,
        versions=versions,
    )
    assert log_ratio(now, rollouts, step=2) == pytest.approx(0.5)
    assert log_ratio(now, rollouts, step=2, exact=False) == pytest.approx(0.9 / 3)
    assert log_ratio(now, rollouts, step=1) == 8
    assert log_ratio(now, rollouts, step=0, exact=False) == 9
    assert log_ratio(now, rollouts, step=5) == log_ratio(now, rollouts, 5, exact=False) == 0


def test_in_bfloat16_single_tokens_may_differ_by_rounding():
    check_first_ratio(0.9e-3)
    check_first_ratio(0.029, exact=False)
    check_first_ratio(float("nan"))  # the loss shows it
    for ratio, exact in ((1.1e-3, True), (0.031, False)):
        with pytest.raises(RuntimeError, match="temperature, dtype, dropout"):
            check_first_ratio(ratio, exact)


# ---------------------------------------------------------------- partial rollouts
def perturb(model, seed: int) -> None:
    """Another policy, as an update would make it."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))


def test_every_token_of_a_partial_rollout_has_the_log_prob_of_the_policy_that_drew_it(
    model, tokenizer
):
    problems = [Problem(prompt, prompt) for prompt in PROMPTS]
    partial = PartialRollouts(budget=3, max_age=9, max_new_tokens=8, group_size=4, temperature=0.7)
    torch.manual_seed(0)
    policies = []
    finished = []
    for step in range(6):
        policies.append(copy.deepcopy(model))
        asked = problems if step < 2 else problems[:1]
        rollouts, answered, counts = partial.advance(model, tokenizer, asked, step)
        if rollouts is not None:
            finished.append(rollouts)
            assert len(rollouts.mask) == 4 * len(answered)  # whole groups only
            assert all(isinstance(problem, Problem) for problem in answered)
            oldest = rollouts.versions[rollouts.mask].min()
            assert counts["token_age_max"] == step - oldest
        perturb(model, step)
    assert sum(len(rollouts.mask) for rollouts in finished) >= 20
    most_policies = 0
    for rollouts in finished:
        for row, inside in enumerate(rollouts.mask):
            versions = rollouts.versions[row][inside]
            most_policies = max(most_policies, len(versions.unique()))
            for version in versions.unique():
                is_drawn = versions == version
                log_probs, entropy = literal(policies[version], rollouts, row, 0.7)
                recorded = rollouts.log_probs[row][inside]
                assert_close(recorded[is_drawn], log_probs[is_drawn])
                recorded = rollouts.entropy[row][inside]
                assert_close(recorded[is_drawn], entropy[is_drawn])
            length = len(versions)
            ended = bool(rollouts.response_ids[row][length - 1] == tokenizer.eos_token_id)
            assert rollouts.truncated[row] == (not ended)
            assert ended or length == 8
    assert most_policies == 3


def responses_of(rollouts: Rollouts | None, partial: PartialRollouts) -> list[dict]:
    """All responses that are finished by now or wait: versions of their tokens, and truncated."""
    responses = []
    if rollouts is not None:
        for row, inside in enumerate(rollouts.mask):
            versions = rollouts.versions[row][inside].tolist()
            truncated = bool(rollouts.truncated[row])
            responses.append({"versions": versions, "truncated": truncated})
    for group in partial.groups:
        responses += group["responses"]
    return responses


# 7 tokens are reached before the age, 9 are not.
@pytest.mark.parametrize("max_new_tokens, cut_by_age", [(9, True), (7, False)])
def test_counts_of_partial_rollouts_are_those_of_a_literal_count(
    model, tokenizer, max_new_tokens, cut_by_age
):
    partial = PartialRollouts(
        budget=2, max_age=3, max_new_tokens=max_new_tokens, group_size=4, temperature=1.0
    )
    torch.manual_seed(0)
    seen = dict.fromkeys(("resumed_responses", "cut_by_age", "mixed_trajectories"), 0)
    unfinished_before = 0
    for step in range(9):
        problems = [Problem("348:44=", "")]
        rollouts, _, counts = partial.advance(model, tokenizer, problems, step)
        responses = responses_of(rollouts, partial)
        all_versions = [response["versions"] for response in responses]
        new_tokens = sum(versions.count(step) for versions in all_versions)
        assert counts["new_tokens"] == new_tokens
        assert counts["resumed_responses"] == unfinished_before
        assert counts["waiting_groups"] == len(partial.groups)
        cut = 0
        for response in responses:
            versions = response["versions"]
            if response["truncated"] and versions[-1] == step:  # in this step
                is_full = len(versions) == max_new_tokens
                assert is_full or step - versions[0] == 3
                cut += int(not is_full)
        assert counts["cut_by_age"] == cut
        if rollouts is not None:
            of_finished = all_versions[: len(rollouts.mask)]
            ages = [step - version for versions in of_finished for version in versions]
            assert counts["token_age_mean"] == pytest.approx(sum(ages) / len(ages))
            assert counts["token_age_max"] == max(ages)
            resumed = 0
            mixed = 0
            for versions in of_finished:
                resumed += sum(version > versions[0] for version in versions)
                mixed += len(set(versions)) > 1
            assert counts["resumed_tokens"] == pytest.approx(resumed / len(ages))
            assert counts["mixed_trajectories"] == pytest.approx(mixed / len(of_finished))
        unfinished_before = sum(response["truncated"] is None for response in responses)
        for name in seen:
            seen[name] += counts.get(name, 0)
    never_seen = {name for name, total in seen.items() if not total}
    assert never_seen == (set() if cut_by_age else {"cut_by_age"})


def test_every_unfinished_response_grows_by_the_budget_whatever_the_others_have_left(
    model, tokenizer
):
    """Kills: the limit of the longest response, which leaves the younger ones short."""
    with torch.no_grad():  # no response ends by itself
        model.lm_head = torch.nn.Linear(64, 20)
        model.lm_head.bias.zero_()
        model.lm_head.bias[tokenizer.eos_token_id] = -100
    partial = PartialRollouts(budget=3, max_age=9, max_new_tokens=7, group_size=2, temperature=1.0)
    lengths = []
    for step in range(3):
        problems = [Problem(PROMPTS[step], "")]
        partial.advance(model, tokenizer, problems, step)
        all_responses = [group["responses"] for group in partial.groups]
        lengths.append([len(responses[0]["response_ids"]) for responses in all_responses])
    assert lengths == [[3], [6, 3], [6, 3]]  # the first group is full, and done, in the third step


def test_limits_of_memory_reach_generation_and_forward_passes(model, tokenizer, monkeypatch):
    drawn = []  # prompts that were drawn together
    parts = []  # responses that were read together
    draw = rollout._generate_batch
    forward = rollout.token_log_probs

    def kept_draw(model, prompt_ids, config):
        drawn.append(prompt_ids)
        return draw(model, prompt_ids, config)

    def kept_forward(model, part, *rest):
        parts.append(part)
        return forward(model, part, *rest)

    monkeypatch.setattr(rollout, "_generate_batch", kept_draw)
    monkeypatch.setattr(rollout, "token_log_probs", kept_forward)
    settings = {
        "group_size": 4,
        "max_new_tokens": 6,
        "temperature": 1.0,
        "batch_tokens": 30,
        "micro_batch_tokens": 40,
    }
    # A budget cannot raise max_new_tokens.
    partial = PartialRollouts(budget=50, max_age=2, **settings)
    problems = [Problem(prompt, "") for prompt in PROMPTS]
    for draw_all in (
        lambda: sample_rollouts(model, tokenizer, PROMPTS, **settings),
        lambda: partial.advance(model, tokenizer, problems, 0),
    ):
        drawn.clear()
        parts.clear()
        draw_all()
        assert 4 < len(drawn) < 12
        for prompt_ids in drawn:
            longest = max(len(ids) for ids in prompt_ids)
            assert len(prompt_ids) * (longest + 6) <= 30
        assert len(parts) > 3
        for part in parts:
            assert len(part.mask) * part.lengths().max() <= 40
        assert sum(len(part.mask) for part in parts) == sum(map(len, drawn)) == 12


def test_a_response_that_grows_too_old_is_cut_and_counted(model, tokenizer):
    partial = PartialRollouts(budget=1, max_age=2, max_new_tokens=50, group_size=4, temperature=1.0)
    cuts = []
    for step in range(3):
        problems = [Problem(str(step), "")]
        rollouts, answered, counts = partial.advance(model, tokenizer, problems, step)
        cuts.append(counts["cut_by_age"])
        assert counts["waiting_groups"] == len(partial.groups)
    # The first group is done at last: some of its responses have ended, the others are cut after
    # three tokens.
    assert [problem.prompt for problem in answered] == ["0"]
    assert len(partial.groups) == 2
    assert cuts[:2] == [0, 0]
    assert cuts[2] == rollouts.truncated.sum() > 0
    assert rollouts.mask.sum(1).max() == 3
    assert counts["token_age_max"] == 2


@pytest.mark.parametrize("budget, max_age", [(0, 1), (1, 0)])
def test_budgets_of_partial_rollouts_that_make_no_sense_are_refused(budget, max_age):
    with pytest.raises(ValueError, match=f"at least 1, got {budget} and {max_age}"):
        PartialRollouts(
            budget=budget, max_age=max_age, max_new_tokens=8, group_size=4, temperature=1.0
        )


# ---------------------------------------------------------------- loading
def test_a_policy_is_loaded_in_float32_without_dropout_and_can_be_saved(tmp_path, tokenizer):
    saved = Qwen2ForCausalLM(copy.deepcopy(DROPOUT[Qwen2ForCausalLM]))
    saved.to(torch.bfloat16).save_pretrained(tmp_path)  # as most models come
    tokenizer.save_pretrained(tmp_path)
    settings = tmp_path / "generation_config.json"
    text = settings.read_text()
    settings.write_text(text.replace("{", '{"temperature": 0.6, "top_k": 20,', 1))
    model, loaded_tokenizer = load_policy(str(tmp_path), "cpu", False)
    assert model.dtype == torch.float32
    assert not any(module.training for module in model.modules())
    assert loaded_tokenizer.get_vocab() == tokenizer.get_vocab()
    assert model.generation_config.temperature is None
    assert model.generation_config.top_k is None
    sampled(model, loaded_tokenizer, max_new_tokens=2)
    model.save_pretrained(tmp_path / "again")
    again = load_pretrained(AutoModelForCausalLM, str(tmp_path / "again"))
    expected = dict(model.named_parameters())
    for name, parameter in again.named_parameters():
        assert torch.equal(parameter, expected.pop(name)), name
    assert not expected


def test_a_folder_that_is_not_there_is_named_in_one_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there" / "empty").mkdir(parents=True)
    missing = str(tmp_path / "missing")
    for name in (missing, "./missing", "../missing", "a/b/c", "there", "there/empty"):
        with pytest.raises(ValueError) as caught:
            load_pretrained(AutoConfig, name)
        assert str(caught.value) == f"model: no folder {name!r} with a config.json"


def test_a_name_on_the_hub_is_told_from_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there").mkdir()

    class Hub:
        @staticmethod
        def from_pretrained(name, **options):
            if name == "there/on-the-hub":
                return options
            raise OSError("not found")

    with pytest.raises(ValueError, match="^model: no folder 'there/missing' with"):
        load_pretrained(Hub, "there/missing")
    # A folder of that owner hides nothing.
    assert load_pretrained(Hub, "there/on-the-hub", dtype=1) == {"dtype": 1}
    for name in ("gpt0", "owner/name"):
        message = f"^model: cannot load '{name}' .OSError: not found.*hub id"
        with pytest.raises(ValueError, match=message):
            load_pretrained(Hub, name)
    (tmp_path / "there" / "config.json").write_text("{}")  # a model without weights
    with pytest.raises(ValueError, match="^model: cannot load 'there'"):
        load_policy("there", "cpu", False)
