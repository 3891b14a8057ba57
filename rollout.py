"""Rollouts: sample responses with Hugging Face `generate`, and compute log-probs and entropy of response tokens.

The rollout policy's log-probs come from a forward pass after sampling, by the very function that training uses
(`token_log_probs`), not from the sampler's scores: kernels that differ would alone move importance ratios by per cents.

A step draws rollouts and makes updates with them, one optimizer step each. An update adds up the gradients of
micro-batches. A micro-batch is read in buckets, one call of the model each, of responses of similar length, so that little
is padding. The hidden states of a bucket go through the output head in chunks of tokens.

Shapes: N responses, P prompt positions (left-padded), T response positions (right-padded), V vocabulary.
"""

from dataclasses import dataclass, fields
from functools import cached_property, partial
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import GenerationConfig, LogitsProcessor, PreTrainedModel

BATCH_TOKENS = 2**18  # (prompt + new tokens) * responses that `generate` draws together: it bounds the key-value cache
MICRO_BATCH_TOKENS = 2**13  # tokens of a micro-batch, padding included: it bounds the activations kept for the backward pass
# Tokens of a bucket. An accelerator needs more work at a time than a CPU (how much is a guess: not measured yet).
BUCKET_TOKENS = {"cpu": 2**10, "cuda": 2**12}
CHUNK_LOGITS = 2**26  # elements of a chunk's float32 log-softmax [tokens, V]: 256 MiB, 441 tokens of Qwen2
PER_TOKEN = ("response_ids", "log_probs", "entropy", "versions", "sampler_log_probs")  # what there is for every drawn token


class Bucket(NamedTuple):
    """Sequences as the model reads them: without padding on the left, so that it needs no mask."""

    input_ids: Tensor  # [n, L] int64: prompt, response, padding
    predictors: Tensor  # [tokens] int64, where in the flattened input_ids each response token is predicted
    targets: Tensor  # [tokens] int64, the response tokens
    places: Tensor  # [tokens] int64, where in the flattened [N, T] they belong


@dataclass
class Rollouts:
    """N sampled responses; the responses to one prompt are consecutive."""

    prompt_ids: Tensor  # [N, P] int64, left-padded
    prompt_mask: Tensor  # [N, P] bool
    response_ids: Tensor  # [N, T] int64, right-padded after the first EOS
    mask: Tensor  # [N, T] bool: response tokens, the EOS included
    truncated: Tensor  # [N] bool: no EOS within the length limit
    log_probs: Tensor | None = None  # [N, T] float32, of the policy that drew the tokens; 0 outside the mask
    entropy: Tensor | None = None  # [N, T] float32 nats, of the whole distribution that each token was drawn from
    versions: Tensor | None = None  # [N, T] int64, number of the policy that drew each token; None: all by the same
    sampler_log_probs: Tensor | None = None  # [N, T] float32, by the sampler's own arithmetic, to log the gap

    def tensors(self) -> dict[str, Tensor]:
        """Those that are filled in, by name."""
        return {f.name: tensor for f in fields(self) if (tensor := getattr(self, f.name)) is not None}

    def to(self, device) -> "Rollouts":
        return Rollouts(**{name: tensor.to(device) for name, tensor in self.tensors().items()})

    def select(self, rows: Tensor) -> "Rollouts":
        """The given rows (indices or bool [N]), without response positions that none of them uses."""
        chosen = {name: tensor[rows] for name, tensor in self.tensors().items()}
        width = int(chosen["mask"].sum(1).max()) if len(chosen["mask"]) else 0
        return Rollouts(**{name: t[:, :width] if name in (*PER_TOKEN, "mask") else t for name, t in chosen.items()})

    def lengths(self) -> Tensor:
        """Tokens of prompt and response, without padding: int64 [N]."""
        return self.prompt_mask.sum(1) + self.mask.sum(1)

    def micro_batches(self, max_tokens: int) -> list[tuple[Tensor, "Rollouts"]]:
        """Row numbers, and those rows alone, of at most max_tokens tokens each, padding included; see `pack_by_length`."""
        packs = [torch.tensor(pack, dtype=torch.long) for pack in pack_by_length(self.lengths().tolist(), max_tokens)]
        return [(rows, self.select(rows)) for rows in (pack.to(self.mask.device) for pack in packs)]

    @cached_property
    def buckets(self) -> list[Bucket]:
        """For `token_log_probs`. Kept, as they are read several times and making them waits for the device."""
        tokens = torch.cat([self.prompt_ids, self.response_ids], 1)
        padding = ~torch.cat([self.prompt_mask, self.mask], 1)
        response = torch.cat([torch.zeros_like(self.prompt_mask), self.mask], 1)
        places = torch.arange(self.mask.numel(), device=self.mask.device).view(self.mask.shape)
        buckets, lengths = [], self.lengths().tolist()
        for pack in pack_by_length(lengths, BUCKET_TOKENS[self.mask.device.type]):
            rows, longest = torch.tensor(pack, device=self.mask.device), max(lengths[row] for row in pack)
            order = padding[rows].byte().argsort(dim=1, stable=True)[:, :longest]
            input_ids = tokens[rows].gather(1, order)
            positions = response[rows].gather(1, order).flatten().nonzero().squeeze(1)
            targets = input_ids.flatten()[positions]
            buckets.append(Bucket(input_ids, positions - 1, targets, places[rows][self.mask[rows]]))
        return buckets


def eos_token_ids(model: PreTrainedModel, tokenizer) -> list[int]:
    """Every token that ends a response: the generation config's (chat models list several), the model's, the tokenizer's.
    Raises ValueError if there is none that the model has a logit for: a response could then never end."""
    found = [getattr(source, "eos_token_id", None) for source in (model.generation_config, model.config, tokenizer)]
    found = [token for ids in found for token in (ids if isinstance(ids, (list, tuple)) else [ids]) if token is not None]
    ids = {token for token in found if token < model.config.get_text_config().vocab_size}
    if not ids:
        raise ValueError("tokenizer and model name no EOS token: set tokenizer.eos_token, or no response could ever end")
    return sorted(ids)


def response_mask(response_ids: Tensor, eos_ids: list[int]) -> tuple[Tensor, Tensor]:
    """mask [N, T], True up to and including the first EOS, and truncated [N], True where there is none. By position, never
    `token != pad`: pad and EOS are often the same token, and the EOS must be trained."""
    is_eos = torch.isin(response_ids, torch.tensor(eos_ids, device=response_ids.device))
    eos_before = is_eos.cumsum(1) - is_eos.long()
    return eos_before == 0, ~is_eos.any(1)


def sampling_config(eos_ids, max_new_tokens: int, temperature=1.0, do_sample=True, top_p=1.0, top_k=0) -> GenerationConfig:
    """Sampling from softmax(logits / temperature), or greedy decoding. Every option that would fall back to the model's
    generation config or to a default of the library (top_k = 50) is set. top_p < 1 and top_k > 0 are for evaluation only:
    they make the log-probs of `token_log_probs` wrong. An EOS pads: a tokenizer's pad token may be none, or not embedded."""
    if do_sample and not temperature > 0:
        raise ValueError(f"temperature must be > 0, got {temperature}; for greedy decoding set do_sample=False")
    options = dict(max_new_tokens=max_new_tokens, eos_token_id=eos_ids, pad_token_id=eos_ids[0], use_cache=True)
    options |= dict(temperature=temperature, top_p=top_p, top_k=top_k) if do_sample else {}
    return GenerationConfig(do_sample=do_sample, num_beams=1, repetition_penalty=1.0, **options)


def pad(rows: list[list], value, side: str = "right") -> Tensor:
    """Lists of unequal length as one tensor [N, longest]."""
    return nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], True, value, padding_side=side)


def _collect(prompts: list[list[int]], responses: list[dict]) -> Rollouts:
    """On the CPU, of token ids and as many dicts: "truncated", and for names in PER_TOKEN a list with an entry per token."""
    columns = {name: pad([response[name] for response in responses], 0) for name in PER_TOKEN if name in responses[0]}
    columns["mask"] = pad([[True] * len(response["response_ids"]) for response in responses], False)
    prompt_mask = pad([[True] * len(prompt) for prompt in prompts], False, "left")
    truncated = torch.tensor([response["truncated"] for response in responses])
    return Rollouts(pad(prompts, 0, "left"), prompt_mask, truncated=truncated, **columns)


class _SamplerLogProbs(LogitsProcessor):
    """Keeps the log-prob of every token that `generate` draws, in the sampler's own arithmetic."""

    def __init__(self, temperature: float):
        self.temperature, self.columns, self.logits = temperature, [], None

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if self.logits is not None:
            self.add(input_ids[:, -1])
        self.logits = scores  # before the temperature, which comes later in the list
        return scores

    def add(self, drawn: Tensor) -> None:
        logits = self.logits.float() / self.temperature
        self.columns.append(logits.gather(1, drawn.unsqueeze(1)).squeeze(1) - logits.logsumexp(1))


def token_ids(tokenizer, prompts: list[str] | list[list[int]]) -> list[list[int]]:
    """Prompts given as text, encoded with the tokenizer's special tokens; as token ids, as they are."""
    return tokenizer(prompts)["input_ids"] if isinstance(prompts[0], str) else prompts


def generate(
    model, tokenizer, prompts: list, *, group_size: int = 1, max_new_tokens: int, batch_tokens: int = BATCH_TOKENS, **sampling
) -> Rollouts:
    """group_size responses to each prompt (text, or token ids), drawn with torch's global generator; log_probs and entropy
    are not filled in, sampler_log_probs are if do_sample. sampling: temperature, do_sample, top_p, top_k of sampling_config.
    What does not fit batch_tokens at once is drawn in several batches, prompts of similar length together. ValueError
    without prompts, for an empty one, or if tokenizer and model have no EOS token."""
    if not prompts:
        raise ValueError("prompts is empty: nothing to generate")
    config = sampling_config(eos_token_ids(model, tokenizer), max_new_tokens, **sampling)
    encoded = [ids for ids in token_ids(tokenizer, prompts) for _ in range(group_size)]
    if not all(encoded):
        raise ValueError(f"prompts: number {[bool(ids) for ids in encoded].index(False) // group_size} has no token")
    responses = {}
    for pack in pack_by_length([len(ids) + max_new_tokens for ids in encoded], batch_tokens):
        responses |= zip(pack, _generate_batch(model, [encoded[row] for row in pack], config))
    return _collect(encoded, [responses[row] for row in range(len(encoded))]).to(model.device)


@torch.no_grad()
def _generate_batch(model, prompts: list[list[int]], config: GenerationConfig) -> list[dict]:
    prompt_ids = pad(prompts, config.pad_token_id, "left").to(model.device)  # by hand: a tokenizer may pad on the right
    prompt_mask = pad([[1] * len(ids) for ids in prompts], 0, "left").to(model.device)
    sampler = _SamplerLogProbs(config.temperature) if config.do_sample else None
    keep_from_autocast(model.get_output_embeddings())
    # `generate` fills whatever is None from the model's own generation config: take that away while it runs.
    own, training = model.generation_config, model.training
    model.generation_config = GenerationConfig()
    try:
        sequences = model.eval().generate(prompt_ids, config, [sampler] if sampler else None, attention_mask=prompt_mask)
    finally:
        model.generation_config = own
        model.train(training)
    response_ids = sequences[:, prompt_ids.shape[1] :]
    mask, truncated = response_mask(response_ids, config.eos_token_id)
    columns, lengths = {"response_ids": response_ids}, mask.sum(1).tolist()
    if sampler:
        sampler.add(response_ids[:, -1])
        columns["sampler_log_probs"] = torch.stack(sampler.columns, 1)
    columns = {name: [row[:n] for row, n in zip(values.tolist(), lengths)] for name, values in columns.items()}
    columns["truncated"] = truncated.tolist()
    return [dict(zip(columns, response)) for response in zip(*columns.values())]


def pack_by_length(lengths: list[int], max_tokens: int) -> list[list[int]]:
    """Rows in packs of at most max_tokens, padded to their longest row; the longest rows first, so that rows of similar
    length share a pack and memory runs out at once or never. What fits one pack keeps its order; a row that is longer
    than max_tokens has a pack of its own."""
    if max(lengths, default=0) * len(lengths) <= max_tokens:
        return [list(range(len(lengths)))]
    packs: list[list[int]] = []
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        if not packs or lengths[packs[-1][0]] * (len(packs[-1]) + 1) > max_tokens:
            packs.append([])
        packs[-1].append(row)
    return packs


def token_log_probs(
    model: PreTrainedModel, rollouts: Rollouts, temperature: float = 1.0, chunk_logits: int = CHUNK_LOGITS
) -> tuple[Tensor, Tensor]:
    """log softmax(logits / temperature) of every response token, and the exact entropy (nats) of the distribution at its place,
    detached: float32 [N, T] each, 0 outside the mask. Chunks have chunk_logits elements and are computed again in the backward
    pass rather than kept; so the logits of a micro-batch never exist at one time, unless the model does more to them than a
    plain head (`plain_head`). Autocast does not reach the head (`keep_from_autocast`)."""
    keep_from_autocast(model.get_output_embeddings())
    head, chunks = plain_head(model), []
    size = max(1, chunk_logits // model.config.get_text_config().vocab_size)
    read = partial(_chunk_log_probs, head or nn.Identity(), temperature)
    if torch.is_grad_enabled() and sum(len(bucket.targets) for bucket in rollouts.buckets) > size:
        read = partial(checkpoint, read, use_reentrant=False, preserve_rng_state=False)
    for bucket in rollouts.buckets:
        # The padding is on the right, where a causal model does not look: no attention mask is needed.
        if head is None:
            states = model(input_ids=bucket.input_ids, use_cache=False).logits
        else:
            states = model.base_model(input_ids=bucket.input_ids, use_cache=False).last_hidden_state
        states = states.flatten(0, 1).index_select(0, bucket.predictors)  # only response tokens go through the softmax
        chunks += [read(*chunk) for chunk in zip(states.split(size), bucket.targets.split(size))]
    zeros = torch.zeros(rollouts.mask.numel(), device=rollouts.mask.device)
    places = torch.cat([bucket.places for bucket in rollouts.buckets])
    return tuple(zeros.index_copy(0, places, torch.cat(values)).view(rollouts.mask.shape) for values in zip(*chunks))


def _chunk_log_probs(head: nn.Module, temperature: float, states: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    log_softmax = (head(states).float() / temperature).log_softmax(-1)
    with torch.no_grad():
        entropy = torch.special.entr(log_softmax.exp()).sum(-1)
    return log_softmax.gather(-1, targets.unsqueeze(-1)).squeeze(-1), entropy


def keep_from_autocast(head: nn.Module | None) -> None:
    """From now on an output head computes in the dtype of its weights, as a rule float32, also under autocast: one bfloat16
    step of a logit in [16, 32) is 0.125, more than |log 0.9|, so rounding alone would carry ratios over a clip bound. A head
    that is no plain nn.Linear stays as it is, and so does what a model does to its logits afterwards."""
    if type(head) is nn.Linear and "forward" not in vars(head):
        head.forward = partial(_linear_outside_autocast, head)


def _linear_outside_autocast(layer: nn.Linear, states: Tensor) -> Tensor:
    with torch.autocast(states.device.type, enabled=False):
        return nn.functional.linear(states.to(layer.weight.dtype), layer.weight, layer.bias)


_PLAIN_HEADS: WeakKeyDictionary = WeakKeyDictionary()  # model -> what plain_head found


def plain_head(model: PreTrainedModel) -> nn.Linear | None:
    """The model's output head, if logits are nothing but this head applied to the last hidden states, else None. Asked of
    the model itself, once, with three tokens: some models scale or cap their logits, and say so in many ways."""
    if model not in _PLAIN_HEADS:
        head, ids = model.get_output_embeddings(), torch.arange(3, device=model.device).unsqueeze(0)
        plain = isinstance(head, nn.Linear) and model.base_model is not model
        if plain:
            keep_from_autocast(head)  # else rounding would hide a small difference
            with torch.no_grad():
                states = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
                plain = torch.equal(head(states), model(input_ids=ids, use_cache=False).logits)
        _PLAIN_HEADS[model] = head if plain else None
    return _PLAIN_HEADS[model]


@torch.no_grad()
def recorded_log_probs(model, micro_batches: list[tuple[Tensor, Rollouts]], temperature: float) -> tuple[Tensor, Tensor]:
    """token_log_probs of all micro-batches, without gradient: float32 [N, T] each."""
    read = [(rows, torch.stack(token_log_probs(model, rollouts, temperature))) for rows, rollouts in micro_batches]
    recorded = torch.zeros(2, sum(len(rows) for rows, _ in read), max(v.shape[2] for _, v in read), device=read[0][0].device)
    for rows, values in read:
        recorded[:, rows, : values.shape[2]] = values
    return tuple(recorded)


def sample_rollouts(
    model, tokenizer, prompts: list, *, temperature: float, micro_batch_tokens: int = MICRO_BATCH_TOKENS, **options
) -> Rollouts:
    """`generate`, then the log-probs of the policy that drew the tokens, detached, at the same temperature."""
    rollouts = generate(model, tokenizer, prompts, temperature=temperature, **options)
    rollouts.log_probs, rollouts.entropy = recorded_log_probs(model, rollouts.micro_batches(micro_batch_tokens), temperature)
    return rollouts


def response_texts(tokenizer, rollouts: Rollouts) -> list[str]:
    """Each response as text, without the EOS that ends it. Other special tokens stay visible: a grader must see them."""
    lengths = (rollouts.mask.sum(1) - (~rollouts.truncated).long()).tolist()
    ids = [row[:length] for row, length in zip(rollouts.response_ids.tolist(), lengths)]
    return tokenizer.batch_decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def check_first_ratio(log_probs: Tensor, rollouts: Rollouts, version: int = 0, exact: bool = True) -> None:
    """On the first update after sampling the policy IS the rollout policy: raise RuntimeError unless every ratio is 1. exact:
    the largest |log ratio| must be within 1e-3; else, for bfloat16, where single tokens differ by rounding, the mean one within
    0.03. Of partial rollouts only tokens of the newest policy, `version`, are asked. NaN passes: the loss shows it."""
    newest = rollouts.mask if rollouts.versions is None else rollouts.mask & (rollouts.versions == version)
    gaps = (log_probs.detach() - rollouts.log_probs).abs() * newest
    found = (gaps.max() if exact else gaps.sum() / newest.sum().clamp(min=1)).item() if gaps.numel() else 0.0
    tolerance = 1e-3 if exact else 0.03
    if found > tolerance:
        raise RuntimeError(
            f"the first update after sampling has a log importance ratio of {found:.3g}, expected 0 within {tolerance}: rollout"
            " and training log-probs disagree (temperature, dtype, dropout, a mask off by one, or weights that changed between)"
        )


def autocast(device: str, precision: str) -> torch.autocast:
    """Forward passes in the given precision. Trained weights are float32: in bfloat16 a step of 1e-6 would round to nothing."""
    return torch.autocast(torch.device(device).type, torch.bfloat16, enabled=precision == "bfloat16")
