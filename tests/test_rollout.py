"""rollout.py against plain softmaxes of single, unpadded sequences."""

import copy
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
from rollout import (
    Rollouts,
    check_first_ratio,
    eos_token_ids,
    generate,
    pack_by_length,
    plain_head,
    recorded_log_probs,
    response_mask,
    sample_rollouts,
    token_log_probs,
)
from support.models import checkpoint_layers, load_policy, load_pretrained
from support.partial_rollouts import PartialRollouts

PROMPTS = ["348:44=", "123:06=", "9"]  # of different lengths, so that there is padding on the left


@pytest.fixture(scope="module")
def tokenizer():
    return countdown.build_tokenizer()


@pytest.fixture
def model(tokenizer):
    return countdown.build_model(tokenizer, seed=3).eval()  # untrained, yet far from uniform: mistakes show


def sampled(model, tokenizer, temperature=1.0, **options):
    torch.manual_seed(0)
    options = {"group_size": 4, "max_new_tokens": 12} | options
    return sample_rollouts(model, tokenizer, PROMPTS, temperature=temperature, **options)


def literal(model, rollouts, row, temperature):
    """log-probs and entropies of one response from its own unpadded sequence, float64."""
    prompt = rollouts.prompt_ids[row][rollouts.prompt_mask[row]]
    response = rollouts.response_ids[row][rollouts.mask[row]]
    logits = model(torch.cat([prompt, response])[None]).logits[0, len(prompt) - 1 : -1].double() / temperature
    p = logits.softmax(-1)
    return p.log()[torch.arange(len(response)), response], -(p * p.log()).sum(-1)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_log_probs_and_entropy_equal_the_plain_softmax_of_each_sequence(model, tokenizer, temperature):
    model.generation_config.eos_token_id = list(range(2, 5))  # so that some responses end soon
    rollouts = sampled(model, tokenizer, temperature, max_new_tokens=6)
    assert rollouts.mask.sum(1).unique().numel() > 2 and rollouts.truncated.any() and not rollouts.truncated.all()
    for row in range(len(rollouts.mask)):
        log_probs, entropy = literal(model, rollouts, row, temperature)
        inside = rollouts.mask[row]
        torch.testing.assert_close(rollouts.log_probs[row][inside].double(), log_probs, atol=2e-5, rtol=1e-5)
        torch.testing.assert_close(rollouts.entropy[row][inside].double(), entropy, atol=2e-5, rtol=1e-5)
    assert (rollouts.log_probs[~rollouts.mask] == 0).all() and (rollouts.entropy[~rollouts.mask] == 0).all()
    assert rollouts.log_probs.dtype == torch.float32 and not rollouts.log_probs.requires_grad


@pytest.mark.parametrize("bucket_tokens", [10_000, 30, 1])
def test_chunks_buckets_and_micro_batches_change_neither_values_nor_gradients(model, tokenizer, monkeypatch, bucket_tokens):
    model.generation_config.eos_token_id = list(range(2, 8))  # responses of many lengths
    rollouts = sampled(model, tokenizer, max_new_tokens=6)
    assert rollouts.mask.sum(1).unique().numel() > 3
    results = []
    for chunk_logits, micro_batch_tokens in ((10_000, 10_000), (60, 10_000), (10_000, 30), (60, 30)):
        if results:  # the first is the reference, in one bucket
            monkeypatch.setitem(rollout.BUCKET_TOKENS, "cpu", bucket_tokens)
            rollouts = rollouts.select(torch.arange(len(rollouts.mask)))
            assert (len(rollouts.buckets) > 1) == (bucket_tokens < 10_000)
        model.zero_grad()
        scattered = torch.zeros(2, *rollouts.mask.shape)
        for rows, part in rollouts.micro_batches(micro_batch_tokens):
            log_probs, entropy = token_log_probs(model, part, 0.7, chunk_logits)
            (log_probs * torch.arange(log_probs.shape[1])).sum().backward()
            assert not entropy.requires_grad
            scattered[:, rows, : log_probs.shape[1]] = torch.stack([log_probs.detach(), entropy])
        results.append((scattered, model.lm_head.weight.grad.clone(), model.model.embed_tokens.weight.grad.clone()))
        recorded = recorded_log_probs(model, rollouts.micro_batches(micro_batch_tokens), 0.7)
        torch.testing.assert_close(torch.stack(recorded), scattered)
    for other in results[1:]:
        for whole, split in zip(results[0], other):
            torch.testing.assert_close(split, whole, rtol=1e-4, atol=1e-5)


def test_no_more_than_a_chunk_of_logits_exists_and_chunks_are_recomputed_rather_than_kept(model, tokenizer):
    rollouts = sampled(model, tokenizer)
    sizes = []
    model.lm_head.register_forward_hook(lambda module, arguments, output: sizes.append(output.numel()))
    log_probs, _ = token_log_probs(model, rollouts, chunk_logits=100)
    sizes_of_forward = sizes[:]
    log_probs.sum().backward()
    tokens = int(rollouts.mask.sum())
    assert max(sizes) <= 100 and sum(sizes_of_forward) == tokens * 20 and len(sizes_of_forward) >= tokens * 20 / 100
    assert sum(sizes) == 2 * sum(sizes_of_forward)  # each once more in the backward pass
    sizes.clear()
    token_log_probs(model, rollouts, chunk_logits=10_000)[0].sum().backward()
    assert sum(sizes) == tokens * 20  # a single chunk is kept


@pytest.mark.parametrize("lengths", [[5], [3, 9, 1, 7, 2, 8], [4] * 10, list(range(1, 40))])
@pytest.mark.parametrize("limit", [1, 8, 16, 1000])
def test_packing_puts_every_row_into_one_batch_within_the_limit_and_wastes_little(lengths, limit):
    batches = pack_by_length(lengths, limit)
    assert sorted(row for batch in batches for row in batch) == list(range(len(lengths)))
    for batch in batches:
        assert len(batch) == 1 or max(lengths[row] for row in batch) * len(batch) <= limit
    if len(batches) == 1:
        assert batches[0] == list(range(len(lengths)))  # nothing is reordered without need
    else:
        longest = [lengths[row] for batch in batches for row in batch]
        assert longest == sorted(lengths, reverse=True)  # similar lengths together, the most memory first


def test_a_head_that_does_more_than_a_linear_map_gets_whole_logits(tokenizer, model):
    assert plain_head(model) is model.lm_head
    sizes = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2)
    capped = Gemma2Config(vocab_size=20, head_dim=8, final_logit_softcapping=0.5, query_pre_attn_scalar=8, **sizes)
    torch.manual_seed(0)
    capped = Gemma2ForCausalLM(capped).eval()
    scaled = copy.deepcopy(model)
    scaled.lm_head = torch.nn.Sequential(scaled.lm_head, torch.nn.Hardtanh())  # an output head that is no linear layer
    rollouts = sampled(model, tokenizer, max_new_tokens=4)
    for other in (capped, scaled):
        assert plain_head(other) is None
        log_probs, _ = token_log_probs(other, rollouts)
        for row in range(len(rollouts.mask)):
            expected, _ = literal(other, rollouts, row, 1.0)
            torch.testing.assert_close(log_probs[row][rollouts.mask[row]].double(), expected, atol=2e-5, rtol=1e-5)


# Every kind of dropout that these models have, very high.
DROPOUT = {
    Qwen2ForCausalLM: Qwen2Config(
        vocab_size=20, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, attention_dropout=0.5, tie_word_embeddings=True, eos_token_id=2,
    ),
    OPTForCausalLM: OPTConfig(
        vocab_size=20, hidden_size=16, ffn_dim=32, num_hidden_layers=2, num_attention_heads=2, word_embed_proj_dim=16,
        max_position_embeddings=64, dropout=0.5, attention_dropout=0.5, activation_dropout=0.5, layerdrop=0.5, eos_token_id=2,
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", DROPOUT)
def test_gradient_checkpointing_recomputes_layers_and_changes_neither_values_nor_gradients(tmp_path, tokenizer, kind):
    torch.manual_seed(0)
    kind(copy.deepcopy(DROPOUT[kind])).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    results = []
    for gradient_checkpointing, expected_calls in ((False, 1), (True, 2)):  # of a layer, in one forward and backward pass
        model, _ = load_policy(str(tmp_path), "cpu", gradient_checkpointing)
        attention = next(module for name, module in model.named_modules() if name.endswith("layers.0.self_attn"))
        calls = []
        attention.register_forward_pre_hook(lambda _, args, kwargs, calls=calls: calls.append(kwargs), with_kwargs=True)
        rollouts = sampled(model, tokenizer)
        plain_head(model)
        calls.clear()
        log_probs, entropy = token_log_probs(model, rollouts)
        log_probs.sum().backward()
        assert len(calls) == expected_calls
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        assert len(gradients) > 20 and any(gradient.abs().max() > 0.1 for gradient in gradients)
        results.append((rollouts.response_ids, rollouts.log_probs, log_probs.detach(), entropy, *gradients))
        calls.clear()
        sampled(model, tokenizer)
        cached = [call["past_key_values"] is not None for call in calls]
        assert len(cached) > 5 and all(cached[:-1]) and not cached[-1]  # the last call is the one for log-probs
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
    with pytest.raises(ValueError, match="gradient_checkpointing: Linear"):
        checkpoint_layers(torch.nn.Linear(1, 1))


def test_prompts_drawn_in_batches_by_length_come_back_in_their_order(model, tokenizer, monkeypatch):
    prompts = ["9", "348:44=", "12", "123:06=", "1234"]
    whole = generate(model, tokenizer, prompts, group_size=2, max_new_tokens=5, do_sample=False)
    drawn = []
    draw = rollout._generate_batch
    monkeypatch.setattr(rollout, "_generate_batch", lambda m, ids, *rest: drawn.append(ids) or draw(m, ids, *rest))
    parts = generate(model, tokenizer, prompts, group_size=2, max_new_tokens=5, do_sample=False, batch_tokens=30)
    assert [[len(ids) for ids in batch] for batch in drawn] == [[8, 8], [8, 8], [5, 5, 3], [3, 2, 2]]
    assert all(len(batch) * (max(map(len, batch)) + 5) <= 30 for batch in drawn)
    for name in ("prompt_ids", "prompt_mask", "response_ids", "mask", "truncated"):
        assert torch.equal(getattr(parts, name), getattr(whole, name)), name  # greedy, so the same responses
    sampled_parts = generate(model, tokenizer, prompts, group_size=2, max_new_tokens=5, batch_tokens=30)
    log_probs, _ = token_log_probs(model, sampled_parts)
    gap = (sampled_parts.sampler_log_probs - log_probs.detach())[sampled_parts.mask].abs()
    assert gap.max() < 1e-4  # they came back in the right order, too


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_the_sampler_s_own_log_probs_are_kept(model, tokenizer, temperature):
    model.generation_config.eos_token_id = list(range(2, 5))
    rollouts = sampled(model, tokenizer, temperature, max_new_tokens=4)
    assert rollouts.truncated.any() and not rollouts.truncated.all()
    gap = (rollouts.sampler_log_probs - rollouts.log_probs).abs()[rollouts.mask].max()
    assert 0 < gap < 1e-4  # two ways of computing the same, cached and all at once: close, and not a copy
    with torch.no_grad():
        model.lm_head.weight.mul_(0.5)  # another policy: the record stays the sampler's
    log_probs, _ = token_log_probs(model, rollouts, temperature)
    assert (rollouts.sampler_log_probs - log_probs).abs()[rollouts.mask].max() > 0.1


VOCABULARY = 512


def high_entropy_model(kind):
    """Logits in [16, 32), where bfloat16 has steps of 0.125, and nearly uniform distributions."""
    sizes = dict(vocab_size=VOCABULARY, hidden_size=64, intermediate_size=128, num_attention_heads=4, num_key_value_heads=2)
    sizes |= dict(num_hidden_layers=6, tie_word_embeddings=False, eos_token_id=0, initializer_range=0.1)
    torch.manual_seed(0)
    if kind == "plain":
        model = Qwen2ForCausalLM(Qwen2Config(**sizes)).eval()
    else:
        capped = Gemma2Config(**sizes, head_dim=16, final_logit_softcapping=60.0, query_pre_attn_scalar=16)
        model = Gemma2ForCausalLM(capped).eval()
    model.lm_head = torch.nn.Linear(64, VOCABULARY)
    torch.nn.init.normal_(model.lm_head.weight, std=0.12)
    torch.nn.init.constant_(model.lm_head.bias, 24.0)
    return model


def share_clipped_by_rounding(model):
    """The largest share of tokens with a ratio outside [0.9, 3.0] between two readings of one policy under autocast."""
    prompts = [list(range(5, 5 + length)) for length in (3, 9, 6, 14)]
    torch.manual_seed(1)
    with torch.autocast("cpu", torch.bfloat16):
        rollouts = generate(model, SimpleNamespace(), prompts, group_size=12, max_new_tokens=24)
        readings = [recorded_log_probs(model, rollouts.micro_batches(limit), 1.0)[0] for limit in (10_000, 200)]
        readings.append(token_log_probs(model, rollouts, chunk_logits=50 * VOCABULARY)[0].detach())  # with a gradient
    readings += [recorded_log_probs(model, rollouts.micro_batches(10_000), 1.0)[0], rollouts.sampler_log_probs]
    assert rollouts.mask.sum() > 1000
    shares = []
    for new in readings:
        for old in readings:
            ratio = (new - old)[rollouts.mask].exp()
            shares.append(((ratio < 0.9) | (ratio > 3.0)).float().mean().item())
    return max(shares)


@pytest.mark.parametrize("kind", ["plain", "capped"])
def test_rounding_alone_clips_no_token_under_autocast(kind, monkeypatch):
    model = high_entropy_model(kind)
    assert (plain_head(model) is model.lm_head) == (kind == "plain")
    logits = model(torch.arange(40).view(2, 20)).logits
    assert 16 <= logits.min() and logits.max() < 32
    rollouts = generate(model, SimpleNamespace(), [[5, 6]], max_new_tokens=2)
    for read in (token_log_probs, lambda model, _: generate(model, SimpleNamespace(), [[5, 6]], max_new_tokens=2)):
        model, dtypes = high_entropy_model(kind), {"body": set(), "head": set()}
        plain_head(model)
        for name, module in (("body", model.model.layers[0].mlp), ("head", model.lm_head)):
            module.register_forward_hook(lambda _, args, output, kept=dtypes[name]: kept.add(output.dtype))
        with torch.autocast("cpu", torch.bfloat16):
            values = read(model, rollouts)
        assert dtypes == {"body": {torch.bfloat16}, "head": {torch.float32}}  # autocast is on, but for the head
        if read is token_log_probs:
            values[0].sum().backward()
            assert {parameter.grad.dtype for parameter in model.parameters()} == {torch.float32}
    assert share_clipped_by_rounding(model) == 0
    monkeypatch.setattr(rollout, "keep_from_autocast", lambda head: None)
    assert share_clipped_by_rounding(high_entropy_model(kind)) > 0.01  # what a head in bfloat16 would do


def test_weights_in_bfloat16_are_used_as_they_are(model, tokenizer):
    rollouts = sampled(model.to(torch.bfloat16), tokenizer)
    assert rollouts.log_probs.dtype == rollouts.sampler_log_probs.dtype == torch.float32
    assert model.lm_head.weight.dtype == torch.bfloat16 and (rollouts.log_probs[rollouts.mask] < 0).all()


def test_under_autocast_weights_stay_float32_and_the_first_ratio_is_exactly_one(model, tokenizer):
    with torch.autocast("cpu", torch.bfloat16):
        rollouts = generate(model, tokenizer, PROMPTS, group_size=4, max_new_tokens=12)
        parts = rollouts.micro_batches(60)
        rollouts.log_probs, _ = recorded_log_probs(model, parts, 1.0)
        assert len(parts) > 1
        for rows, part in parts:
            log_probs, _ = token_log_probs(model, part)
            assert torch.equal(log_probs, rollouts.log_probs[rows, : log_probs.shape[1]])
    assert log_probs.dtype == torch.float32 and model.lm_head.weight.dtype == torch.float32
    in_float32, _ = token_log_probs(model, rollouts)
    gap = (in_float32 - rollouts.log_probs).abs()[rollouts.mask]
    assert 1e-3 < gap.max() < 0.5  # it was bfloat16 arithmetic


def test_every_first_ratio_is_one_and_a_wrong_temperature_is_noticed(model, tokenizer):
    rollouts = sampled(model, tokenizer, 0.6)
    check_first_ratio(token_log_probs(model, rollouts, 0.6)[0], rollouts)
    some = rollouts.select(torch.tensor([True, False] * 6))  # other rows, other width
    check_first_ratio(token_log_probs(model, some, 0.6)[0], some)
    for exact in (True, False):
        with pytest.raises(RuntimeError, match="ratio"):
            check_first_ratio(token_log_probs(model, rollouts, 1.0)[0], rollouts, exact=exact)
    one_off = rollouts.log_probs.clone()
    one_off[0, 0] += 0.5  # bfloat16 may round a single token so far
    check_first_ratio(one_off, rollouts, exact=False)
    with pytest.raises(RuntimeError, match="ratio"):
        check_first_ratio(one_off, rollouts)


def test_sampling_ignores_what_the_model_s_own_generation_config_says(model, tokenizer, monkeypatch):
    own = dict(temperature=0.1, top_k=1, top_p=0.1, min_p=0.9, repetition_penalty=9.0, no_repeat_ngram_size=1, min_new_tokens=9)
    model.generation_config.update(do_sample=False, num_beams=3, **own)
    before = model.generation_config
    effective = []
    prepare = model._prepare_generation_config
    monkeypatch.setattr(
        model, "_prepare_generation_config", lambda *a, **k: effective.append(prepare(*a, **k)[0]) or (effective[-1], {})
    )
    torch.manual_seed(0)
    rollouts = generate(model, tokenizer, ["348:44="], group_size=6000, max_new_tokens=2, temperature=0.7)
    config = effective[0]
    assert (config.do_sample, config.temperature, config.top_p, config.top_k) == (True, 0.7, 1.0, 0)
    assert (config.repetition_penalty, config.num_beams) == (1.0, 1)
    for name in ("min_p", "typical_p", "no_repeat_ngram_size", "min_new_tokens", "epsilon_cutoff", "bad_words_ids"):
        assert getattr(config, name) in (None, 0, 0.0, 1.0), name
    assert model.generation_config is before  # and it is given back
    # What counts: the drawn frequencies are softmax(logits / temperature) over the whole vocabulary.
    with torch.no_grad():
        expected = (model(torch.tensor(tokenizer(["348:44="])["input_ids"])).logits[0, -1] / 0.7).softmax(-1)
    counts = torch.bincount(rollouts.response_ids[:, 0], minlength=len(tokenizer)) / 6000
    assert (counts - expected).abs().max() < 0.025 and expected.max() < 0.9


def test_greedy_decoding_takes_the_most_likely_token_and_the_training_mode_is_given_back(model, tokenizer):
    model.train()
    rollouts = generate(model, tokenizer, PROMPTS, max_new_tokens=5, do_sample=False)
    assert model.training
    for row in range(len(PROMPTS)):
        ids = rollouts.prompt_ids[row][rollouts.prompt_mask[row]]
        for token in rollouts.response_ids[row][rollouts.mask[row]]:
            assert token == model(ids[None]).logits[0, -1].argmax()
            ids = torch.cat([ids, token[None]])


def test_the_mask_is_positional_and_keeps_the_first_of_several_eos():
    ids = torch.tensor([[5, 6, 2, 2, 2], [5, 7, 5, 2, 5], [5, 5, 5, 5, 5], [2, 5, 5, 5, 5]])
    mask, truncated = response_mask(ids, [2, 7])  # 2 is the pad token of this imaginary model, too
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
    ended = ~rollouts.truncated
    assert ended.any()
    for row in ended.nonzero().flatten():
        tokens = rollouts.response_ids[row][rollouts.mask[row]].tolist()
        assert tokens[-1] in stops and not set(tokens[:-1]) & set(stops)
    assert (rollouts.log_probs[rollouts.mask] < 0).all()  # the EOS has a log-prob: it is trained


def test_an_eos_that_the_model_has_no_logit_for_does_not_count(model, tokenizer):
    model.generation_config.eos_token_id, model.config.eos_token_id = [2, 20, 151643], None
    assert eos_token_ids(model, tokenizer) == [2]


def test_a_model_without_eos_and_an_empty_list_of_prompts_are_refused(model, tokenizer):
    with pytest.raises(ValueError, match="prompts"):
        generate(model, tokenizer, [], max_new_tokens=2)
    with pytest.raises(ValueError, match="temperature"):
        generate(model, tokenizer, PROMPTS, max_new_tokens=2, temperature=0.0)
    model.generation_config.eos_token_id = model.config.eos_token_id = None
    eos, tokenizer.eos_token = tokenizer.eos_token, None
    try:
        with pytest.raises(ValueError, match="EOS"):
            generate(model, tokenizer, PROMPTS, max_new_tokens=2)
    finally:
        tokenizer.eos_token = eos


def test_select_drops_unused_positions_and_may_keep_nothing(model, tokenizer):
    rollouts = sampled(model, tokenizer)
    shortest = rollouts.mask.sum(1).argmin()
    one = rollouts.select(shortest[None])
    assert one.mask.all() and one.response_ids.shape == one.log_probs.shape == one.mask.shape
    none = rollouts.select(torch.zeros(len(rollouts.mask), dtype=torch.bool))
    assert none.mask.shape == (0, 0) and isinstance(none, Rollouts)
    ((rows, part),) = none.micro_batches(10)
    assert len(rows) == len(part.mask) == 0


def test_texts_end_before_the_eos_and_show_stray_special_tokens(tokenizer):
    rows = [["3", "<pad>", "8", "=", "<eos>", "<pad>"], list("3+8=11")]
    ids = torch.tensor([tokenizer.convert_tokens_to_ids(row) for row in rows])
    mask, truncated = response_mask(ids, [tokenizer.eos_token_id])
    rollouts = Rollouts(ids[:, :0], ids[:, :0].bool(), ids, mask, truncated)
    assert rollout.response_texts(tokenizer, rollouts) == ["3<pad>8=", "3+8=11"]


# ---------------------------------------------------------------- partial rollouts
def perturb(model, version):
    """Another policy, as an update would make it."""
    generator = torch.Generator().manual_seed(version)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))


def test_every_token_of_a_partial_rollout_has_the_log_prob_of_the_policy_that_drew_it(model, tokenizer):
    rows = [countdown.Problem(prompt, prompt) for prompt in PROMPTS]
    partial = PartialRollouts(budget=3, max_age=9, max_new_tokens=8, group_size=4, temperature=0.7)
    torch.manual_seed(0)
    policies, finished, answered = [], [], []
    for version in range(7):
        policies.append(copy.deepcopy(model))
        rollouts, done, counts = partial.advance(model, tokenizer, rows if version < 3 else rows[:1], version)
        if rollouts is not None:
            finished.append(rollouts)
            answered += done
            assert len(rollouts.mask) == 4 * len(done)  # whole groups only
            assert counts["token_age_max"] == (version - rollouts.versions[rollouts.mask]).max()
        perturb(model, version)
    assert sum(len(r.mask) for r in finished) >= 24 and all(isinstance(row, countdown.Problem) for row in answered)
    assert max(len(r.versions[i][r.mask[i]].unique()) for r in finished for i in range(len(r.mask))) == 3
    for rollouts in finished:
        for i in range(len(rollouts.mask)):
            for version in rollouts.versions[i][rollouts.mask[i]].unique():
                drawn = rollouts.mask[i] & (rollouts.versions[i] == version)
                log_probs, entropy = literal(policies[version], rollouts, i, 0.7)
                inside = drawn[rollouts.mask[i]]
                torch.testing.assert_close(rollouts.log_probs[i][drawn].double(), log_probs[inside], atol=2e-5, rtol=1e-5)
                torch.testing.assert_close(rollouts.entropy[i][drawn].double(), entropy[inside], atol=2e-5, rtol=1e-5)
            length = int(rollouts.mask[i].sum())
            ended = rollouts.response_ids[i][length - 1] == tokenizer.eos_token_id
            assert rollouts.truncated[i] == ~ended and (ended or length == 8)


@pytest.mark.parametrize("max_new_tokens, cut", [(9, True), (7, False)])  # 7 tokens are reached before the age, 9 are not
def test_counts_of_partial_rollouts_are_those_of_a_literal_count(model, tokenizer, max_new_tokens, cut):
    partial = PartialRollouts(budget=2, max_age=3, max_new_tokens=max_new_tokens, group_size=4, temperature=1.0)
    torch.manual_seed(0)
    seen = dict.fromkeys(("resumed_responses", "cut_by_age", "token_age_mean", "mixed_trajectories"), 0)
    old = []  # tokens of every unfinished response
    for version in range(9):
        rollouts, _, counts = partial.advance(model, tokenizer, [countdown.Problem("348:44=", "")], version)
        left = [r for group in partial.groups for r in group["responses"]]
        inside = [] if rollouts is None else [v[m].tolist() for v, m in zip(rollouts.versions, rollouts.mask)]
        versions = inside + [r["versions"] for r in left]
        truncated = ([] if rollouts is None else rollouts.truncated.tolist()) + [r["truncated"] for r in left]
        assert counts["new_tokens"] == sum(row.count(version) for row in versions)
        assert counts["resumed_responses"] == sum(length > 0 for length in old)
        assert counts["waiting_groups"] == len(partial.groups)
        ended = [row for row, end in zip(versions, truncated) if end and row[-1] == version]  # in this iteration, without EOS
        assert counts["cut_by_age"] == sum(len(row) < max_new_tokens for row in ended)
        assert all(len(row) == max_new_tokens or version - row[0] == 3 for row in ended)
        ages = [version - drawn for row in inside for drawn in row]
        if ages:
            assert counts["token_age_mean"] == pytest.approx(sum(ages) / len(ages)) and counts["token_age_max"] == max(ages)
            resumed = [drawn > row[0] for row in inside for drawn in row]
            assert counts["resumed_tokens"] == pytest.approx(sum(resumed) / len(resumed))
            assert counts["mixed_trajectories"] == pytest.approx(sum(len(set(row)) > 1 for row in inside) / len(inside))
            assert 0 <= counts["token_age_mean"] < counts["token_age_max"] or max(ages) == 0
        old = [len(r["response_ids"]) for r in left if r["truncated"] is None]
        for name in seen:
            seen[name] += counts.get(name, 0)
    assert {name for name in seen if not seen[name]} == (set() if cut else {"cut_by_age"}) and ended


def test_limits_of_memory_reach_generation_and_forward_passes(model, tokenizer, monkeypatch):
    drawn, read = [], []
    draw, forward = rollout._generate_batch, rollout.token_log_probs
    monkeypatch.setattr(rollout, "_generate_batch", lambda m, ids, *rest: drawn.append(ids) or draw(m, ids, *rest))
    monkeypatch.setattr(rollout, "token_log_probs", lambda m, part, *rest: read.append(part) or forward(m, part, *rest))
    options = dict(group_size=4, max_new_tokens=6, temperature=1.0, batch_tokens=30, micro_batch_tokens=40)
    partial = PartialRollouts(budget=50, max_age=2, **options)  # a budget cannot raise max_new_tokens
    for draw_all in (
        lambda: sample_rollouts(model, tokenizer, PROMPTS, **options),
        lambda: partial.advance(model, tokenizer, [countdown.Problem(prompt, "") for prompt in PROMPTS], 0),
    ):
        drawn.clear(), read.clear()
        draw_all()
        assert 4 < len(drawn) < 12 and all(len(ids) * (max(map(len, ids)) + 6) <= 30 for ids in drawn)
        assert len(read) > 3 and all(len(part.mask) * part.lengths().max() <= 40 for part in read)
        assert sum(len(part.mask) for part in read) == sum(map(len, drawn)) == 12


def test_a_response_that_grows_too_old_is_cut_and_counted_and_bad_budgets_are_refused(model, tokenizer):
    partial = PartialRollouts(budget=1, max_age=2, max_new_tokens=50, group_size=4, temperature=1.0)
    cuts = []
    for version in range(3):
        rollouts, done, counts = partial.advance(model, tokenizer, [countdown.Problem(str(version), "")], version)
        cuts.append(counts["cut_by_age"])
        assert counts["waiting_groups"] == len(partial.groups)
    # The first group is done at last: some of its responses have ended, the others are cut after three tokens.
    assert [row.prompt for row in done] == ["0"] and len(partial.groups) == 2
    assert cuts[:2] == [0, 0] and cuts[2] == rollouts.truncated.sum() > 0
    assert rollouts.mask.sum(1).max() == 3 and counts["token_age_max"] == 2
    for options in (dict(budget=0, max_age=1), dict(budget=1, max_age=0)):
        with pytest.raises(ValueError, match="budget"):
            PartialRollouts(**options, max_new_tokens=8, group_size=4, temperature=1.0)


def test_the_first_ratio_is_asked_of_the_newest_tokens_only(model, tokenizer):
    rollouts = sampled(model, tokenizer)
    rollouts.versions = torch.ones_like(rollouts.response_ids)
    rollouts.versions[:, 0] = 0
    log_probs = rollouts.log_probs.clone()
    log_probs[:, 0] += 1.0
    check_first_ratio(log_probs, rollouts, version=1)
    with pytest.raises(RuntimeError, match="ratio"):
        check_first_ratio(log_probs, rollouts, version=0)


# ---------------------------------------------------------------- loading
def test_a_policy_is_loaded_in_float32_without_dropout_and_can_be_saved(tmp_path, tokenizer):
    saved = Qwen2ForCausalLM(copy.deepcopy(DROPOUT[Qwen2ForCausalLM])).to(torch.bfloat16)  # as most models come
    saved.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    settings = (tmp_path / "generation_config.json").read_text().replace("{", '{"temperature": 0.6, "top_k": 20,', 1)
    (tmp_path / "generation_config.json").write_text(settings)
    model, loaded = load_policy(str(tmp_path), "cpu", False)
    assert model.dtype == torch.float32 and not any(module.training for module in model.modules())
    assert loaded.get_vocab() == tokenizer.get_vocab()
    assert model.generation_config.temperature is model.generation_config.top_k is None
    sampled(model, loaded)
    model.save_pretrained(tmp_path / "again")
    again, _ = load_pretrained(AutoModelForCausalLM, str(tmp_path / "again"), output_loading_info=True)
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), model.parameters(), strict=True))
    assert [name for name, _ in again.named_parameters()] == [name for name, _ in model.named_parameters()]


def test_a_folder_that_is_not_there_is_named_in_one_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there" / "empty").mkdir(parents=True)
    for name in (str(tmp_path / "missing"), "./missing", "../missing", "a/b/c", "there", "there/empty"):
        with pytest.raises(ValueError) as caught:
            load_pretrained(AutoConfig, name)
        assert str(caught.value) == f"model: no folder {name!r} with a config.json"

    class Hub:
        @staticmethod
        def from_pretrained(name, **options):
            if name == "there/on-the-hub":
                return options
            raise OSError("not found")

    with pytest.raises(ValueError, match="^model: no folder 'there/missing' with"):
        load_pretrained(Hub, "there/missing")
    assert load_pretrained(Hub, "there/on-the-hub", dtype=1) == {"dtype": 1}  # a folder of that owner hides nothing
    for name in ("gpt0", "owner/name"):
        with pytest.raises(ValueError, match=f"^model: cannot load '{name}' .OSError: not found.*hub id"):
            load_pretrained(Hub, name)
    (tmp_path / "there" / "config.json").write_text("{}")  # a model without weights
    with pytest.raises(ValueError, match="^model: cannot load 'there'"):
        load_policy("there", "cpu", False)
