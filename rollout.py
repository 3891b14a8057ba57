"""Rollouts: responses sampled with Hugging Face `generate`, and the log-probs of their tokens.

The rollout policy's log-probs come from a forward pass after sampling, by the very function that
training uses (`token_log_probs`), not from the sampler's scores: kernels that differ would alone
move importance ratios by several per cent.

How a model reads responses: an optimizer step adds up the gradients of micro-batches. A micro-batch
is read in buckets of responses of similar length, one call of the model each, so that little is
padding. The hidden states of a bucket go through the output head in chunks of tokens, so that the
logits of all tokens never exist at one time.

Shapes: N responses, P prompt positions (padded on the left), T response positions (padded on the
right), V vocabulary.
"""

from dataclasses import dataclass, fields
from functools import cached_property, partial
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import GenerationConfig, LogitsProcessor, PreTrainedModel

# (prompt + new tokens) * responses that `generate` draws together: it bounds the key-value cache.
BATCH_TOKENS = 2**18
# Tokens of a micro-batch, padding included: it bounds the activations kept for the backward pass.
MICRO_BATCH_TOKENS = 2**13
# Tokens of a bucket. An accelerator needs more work at a time than a CPU (how much is a guess).
BUCKET_TOKENS = {"cpu": 2**10, "cuda": 2**12, "meta": 2**10}
# Elements of a chunk's float32 log-softmax [tokens, V]: 256 MiB, 441 tokens of Qwen2.
CHUNK_LOGITS = 2**26
# The fields of Rollouts that hold a value for every drawn token.
PER_TOKEN = ("response_ids", "log_probs", "entropy", "versions", "sampler_log_probs")


class Bucket(NamedTuple):
    """Sequences as the model reads them: without padding on the left, so that it needs no mask."""

    input_ids: Tensor  # [n, L] int64: prompt, response, padding
    predictors: Tensor  # [tokens] int64: where in the flat input_ids the targets are predicted
    targets: Tensor  # [tokens] int64: the response tokens
    places: Tensor  # [tokens] int64: where in the flat [N, T] they belong


@dataclass
class Rollouts:
    """N sampled responses; the responses to one prompt are consecutive."""

    prompt_ids: Tensor  # [N, P] int64, left-padded
    prompt_mask: Tensor  # [N, P] bool
    response_ids: Tensor  # [N, T] int64, right-padded after the first EOS
    mask: Tensor  # [N, T] bool: response tokens, the EOS included
    truncated: Tensor  # [N] bool: no EOS within the length limit
    log_probs: Tensor | None = None  # [N, T] float32, of the policy that drew each; 0 outside
    entropy: Tensor | None = None  # [N, T] float32 nats, of the distribution of each token
    versions: Tensor | None = None  # [N, T] int64, the step whose policy drew each token
    sampler_log_probs: Tensor | None = None  # [N, T] float32 by the sampler's own arithmetic

    def tensors(self) -> dict[str, Tensor]:
        """Those that are filled in, by name."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if value is not None}

    def to(self, device: torch.device | str) -> "Rollouts":
        """All tensors on that device."""
        return Rollouts(**{name: tensor.to(device) for name, tensor in self.tensors().items()})

    def select(self, rows: Tensor) -> "Rollouts":
        """The given rows (indices, or bool [N]); response positions that none uses are cut."""
        chosen = {name: tensor[rows] for name, tensor in self.tensors().items()}
        width = int(chosen["mask"].sum(1).max()) if len(chosen["mask"]) else 0
        for name in (*PER_TOKEN, "mask"):
            if name in chosen:
                chosen[name] = chosen[name][:, :width]
        return Rollouts(**chosen)

    def lengths(self) -> Tensor:
        """Tokens of prompt and response, without padding: int64 [N]."""
        return self.prompt_mask.sum(1) + self.mask.sum(1)

    def micro_batch_rows(self, max_tokens: int) -> list[Tensor]:
        """Row numbers of micro-batches of at most max_tokens tokens each, padding included."""
        packs = pack_by_length(self.lengths().tolist(), max_tokens)
        return [torch.tensor(pack, dtype=torch.long, device=self.mask.device) for pack in packs]

    @cached_property
    def buckets(self) -> list[Bucket]:
        """For `token_log_probs`. Kept: they are read at every update, and making them waits for the
        device."""
        tokens = torch.cat([self.prompt_ids, self.response_ids], 1)
        is_padding = ~torch.cat([self.prompt_mask, self.mask], 1)
        is_response = torch.cat([torch.zeros_like(self.prompt_mask), self.mask], 1)
        places = torch.arange(self.mask.numel(), device=self.mask.device).view(self.mask.shape)
        lengths = self.lengths().tolist()
        buckets = []
        for pack in pack_by_length(lengths, BUCKET_TOKENS[self.mask.device.type]):
            rows = torch.tensor(pack, device=self.mask.device)
            longest = max(lengths[row] for row in pack)
            # A stable sort of the padding flags moves all padding to the right.
            order = is_padding[rows].byte().argsort(dim=1, stable=True)[:, :longest]
            input_ids = tokens[rows].gather(1, order)
            positions = is_response[rows].gather(1, order).flatten().nonzero().squeeze(1)
            buckets.append(
                Bucket(
                    input_ids=input_ids,
                    predictors=positions - 1,
                    targets=input_ids.flatten()[positions],
                    places=places[rows][self.mask[rows]],
                )
            )
        return buckets


# ---------------------------------------------------------------- sampling
def generate(
    model: PreTrainedModel,
    tokenizer,
    prompts: list,
    *,
    group_size: int = 1,
    max_new_tokens: int,
    batch_tokens: int = BATCH_TOKENS,
    **sampling,
) -> Rollouts:
    """group_size responses to each prompt (text, or token ids), drawn with torch's generator.

    sampling: temperature, do_sample, top_p, top_k of `sampling_config`. log_probs and entropy are
    not filled in; sampler_log_probs are if do_sample. What does not fit batch_tokens at once is
    drawn in several batches, prompts of similar length together. Raises ValueError without prompts,
    for an empty one, and if tokenizer and model have no EOS token.
    """
    if not prompts:
        raise ValueError("prompts is empty: nothing to generate")
    config = sampling_config(eos_token_ids(model, tokenizer), max_new_tokens, **sampling)
    encoded = []
    for number, ids in enumerate(token_ids(tokenizer, prompts)):
        if not ids:
            raise ValueError(f"prompts: number {number} has no token")
        encoded += [ids] * group_size
    longest_possible = [len(ids) + max_new_tokens for ids in encoded]
    responses: list[dict | None] = [None] * len(encoded)
    for pack in pack_by_length(longest_possible, batch_tokens):
        drawn = _generate_batch(model, [encoded[row] for row in pack], config)
        for row, response in zip(pack, drawn, strict=True):
            responses[row] = response
    return collect(encoded, responses).to(model.device)


def eos_token_ids(model: PreTrainedModel, tokenizer) -> list[int]:
    """Every token that ends a response: the generation config's (chat models list several), the
    model's and the tokenizer's.

    Raises ValueError if there is none that the model has a logit for: a response could never end.
    """
    vocabulary = model.config.get_text_config().vocab_size
    ids = set()
    for source in (model.generation_config, model.config, tokenizer):
        named = getattr(source, "eos_token_id", None)
        if isinstance(named, (list, tuple)):
            ids.update(named)
        elif named is not None:
            ids.add(named)
    ids = {token for token in ids if token is not None and token < vocabulary}
    if not ids:
        raise ValueError(
            "tokenizer and model name no EOS token: set tokenizer.eos_token,"
            " or no response could ever end"
        )
    return sorted(ids)


def sampling_config(
    eos_ids: list[int],
    max_new_tokens: int,
    temperature: float = 1.0,
    do_sample: bool = True,
    top_p: float = 1.0,
    top_k: int = 0,
) -> GenerationConfig:
    """Sampling from softmax(logits / temperature), or greedy decoding.

    Every option that would fall back to the model's generation config, or to a default of the
    library (top_k = 50), is set. top_p < 1 and top_k > 0 are for evaluation only: they make the
    log-probs of `token_log_probs` wrong. An EOS pads, as a tokenizer may have no pad token.
    """
    always = {
        "max_new_tokens": max_new_tokens,
        "eos_token_id": eos_ids,
        "pad_token_id": eos_ids[0],
        "use_cache": True,
        "num_beams": 1,
        "repetition_penalty": 1.0,
    }
    if not do_sample:
        return GenerationConfig(do_sample=False, **always)
    if not temperature > 0:
        raise ValueError(
            f"temperature must be > 0, got {temperature}; for greedy decoding set do_sample=False"
        )
    return GenerationConfig(
        do_sample=True, temperature=temperature, top_p=top_p, top_k=top_k, **always
    )


def response_mask(response_ids: Tensor, eos_ids: list[int]) -> tuple[Tensor, Tensor]:
    """mask [N, T], True up to and including the first EOS, and truncated [N], True without one.

    By position, never `token != pad`: pad and EOS are often the same token, and the EOS is trained.
    """
    is_eos = torch.isin(response_ids, torch.tensor(eos_ids, device=response_ids.device))
    eos_before = is_eos.cumsum(1) - is_eos.long()
    return eos_before == 0, ~is_eos.any(1)


def token_ids(tokenizer, prompts: list[str] | list[list[int]]) -> list[list[int]]:
    """Prompts given as text, encoded with the tokenizer's special tokens; token ids as they are."""
    if isinstance(prompts[0], str):
        return tokenizer(prompts)["input_ids"]
    return prompts


def pad(rows: list[list], value, side: str = "right") -> Tensor:
    """Lists of unequal length as one tensor [N, longest]."""
    tensors = [torch.tensor(row) for row in rows]
    return nn.utils.rnn.pad_sequence(
        tensors, batch_first=True, padding_value=value, padding_side=side
    )


def collect(prompts: list[list[int]], responses: list[dict]) -> Rollouts:
    """Rollouts on the CPU, of prompts (token ids) and as many dicts, one per response.

    A dict holds "truncated", and for names in PER_TOKEN a list with an entry per token.
    """
    per_token = {}
    for name in PER_TOKEN:
        if name in responses[0]:
            per_token[name] = pad([response[name] for response in responses], 0)
    return Rollouts(
        prompt_ids=pad(prompts, 0, "left"),
        prompt_mask=pad([[True] * len(prompt) for prompt in prompts], False, "left"),
        mask=pad([[True] * len(response["response_ids"]) for response in responses], False),
        truncated=torch.tensor([response["truncated"] for response in responses]),
        **per_token,
    )


def response_texts(tokenizer, rollouts: Rollouts) -> list[str]:
    """Each response as text, without the EOS that ends it.

    Other special tokens stay visible: a grader must see them.
    """
    lengths = (rollouts.mask.sum(1) - (~rollouts.truncated).long()).tolist()
    ids = rollouts.response_ids.tolist()
    texts_ids = [row[:length] for row, length in zip(ids, lengths, strict=True)]
    return tokenizer.batch_decode(
        texts_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
    )


def pack_by_length(lengths: list[int], max_tokens: int) -> list[list[int]]:
    """Rows in packs of at most max_tokens, each padded to its longest row.

    The longest rows come first, so that rows of similar length share a pack, and memory runs out
    at once or never. What fits one pack keeps its order; a row longer than max_tokens has a pack of
    its own.
    """
    if max(lengths, default=0) * len(lengths) <= max_tokens:
        return [list(range(len(lengths)))]
    longest_first = sorted(range(len(lengths)), key=lambda row: -lengths[row])
    packs: list[list[int]] = []
    for row in longest_first:
        longest_of_pack = lengths[packs[-1][0]] if packs else 0
        if not packs or longest_of_pack * (len(packs[-1]) + 1) > max_tokens:
            packs.append([])
        packs[-1].append(row)
    return packs


@torch.no_grad()
def _generate_batch(
    model: PreTrainedModel, prompts: list[list[int]], config: GenerationConfig
) -> list[dict]:
    """One call of the model's `generate`: a dict for `collect` per prompt."""
    # Padded by hand: a tokenizer may pad on the right.
    prompt_ids = pad(prompts, config.pad_token_id, "left").to(model.device)
    attention_mask = pad([[1] * len(ids) for ids in prompts], 0, "left").to(model.device)
    recorder = _SamplerLogProbs(config.temperature) if config.do_sample else None
    keep_from_autocast(model.get_output_embeddings())
    # `generate` fills whatever is None from the model's own config: take that away while it runs.
    own_config = model.generation_config
    was_training = model.training
    model.generation_config = GenerationConfig()
    model.eval()
    try:
        sequences = model.generate(
            prompt_ids,
            config,
            logits_processor=[recorder] if recorder else None,
            attention_mask=attention_mask,
        )
    finally:
        model.generation_config = own_config
        model.train(was_training)
    response_ids = sequences[:, prompt_ids.shape[1] :]
    mask, truncated = response_mask(response_ids, config.eos_token_id)
    lengths = mask.sum(1).tolist()
    ids = response_ids.tolist()
    is_truncated = truncated.tolist()
    responses = []
    for row, length in enumerate(lengths):
        responses.append({"response_ids": ids[row][:length], "truncated": is_truncated[row]})
    if recorder:
        recorder.add(response_ids[:, -1])
        log_probs = torch.stack(recorder.columns, 1).tolist()
        for row, length in enumerate(lengths):
            responses[row]["sampler_log_probs"] = log_probs[row][:length]
    return responses


class _SamplerLogProbs(LogitsProcessor):
    """Keeps the log-prob of every token that `generate` draws, in the sampler's own arithmetic."""

    def __init__(self, temperature: float):
        self.temperature = temperature
        self.columns: list[Tensor] = []  # [N] for each drawn position
        self.logits: Tensor | None = None

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if self.logits is not None:
            self.add(input_ids[:, -1])
        self.logits = scores  # before the temperature, which comes later in the list
        return scores

    def add(self, drawn: Tensor) -> None:
        logits = self.logits.float() / self.temperature
        chosen = logits.gather(1, drawn.unsqueeze(1)).squeeze(1)
        self.columns.append(chosen - logits.logsumexp(1))


# ---------------------------------------------------------------- log-probs
def token_log_probs(
    model: PreTrainedModel,
    rollouts: Rollouts,
    temperature: float = 1.0,
    chunk_logits: int = CHUNK_LOGITS,
) -> tuple[Tensor, Tensor]:
    """log softmax(logits / temperature) of every response token, and the entropy at its place.

    Both float32 [N, T], 0 outside the mask; the entropy is exact, in nats, and detached. Chunks of
    chunk_logits elements are computed again in the backward pass rather than kept. The logits of a
    micro-batch never exist at one time, unless the model does more to them than a plain head.
    """
    keep_from_autocast(model.get_output_embeddings())
    head = plain_head(model)
    tokens_per_chunk = max(1, chunk_logits // model.config.get_text_config().vocab_size)
    tokens = sum(len(bucket.targets) for bucket in rollouts.buckets)
    read_chunk = partial(_chunk_log_probs, head or nn.Identity(), temperature)
    if torch.is_grad_enabled() and tokens > tokens_per_chunk:
        read_chunk = partial(checkpoint, read_chunk, use_reentrant=False, preserve_rng_state=False)
    log_probs = []
    entropies = []
    for bucket in rollouts.buckets:
        # The padding is on the right, where a causal model does not look: no attention mask.
        if head is None:
            states = model(input_ids=bucket.input_ids, use_cache=False).logits
        else:
            states = model.base_model(input_ids=bucket.input_ids, use_cache=False).last_hidden_state
        # Only response tokens go through the softmax.
        states = states.flatten(0, 1).index_select(0, bucket.predictors)
        state_chunks = states.split(tokens_per_chunk)
        target_chunks = bucket.targets.split(tokens_per_chunk)
        for state_chunk, target_chunk in zip(state_chunks, target_chunks, strict=True):
            chunk_log_probs, chunk_entropy = read_chunk(state_chunk, target_chunk)
            log_probs.append(chunk_log_probs)
            entropies.append(chunk_entropy)
    places = torch.cat([bucket.places for bucket in rollouts.buckets])
    zeros = torch.zeros(rollouts.mask.numel(), device=rollouts.mask.device)

    def to_rows(values: list[Tensor]) -> Tensor:
        return zeros.index_copy(0, places, torch.cat(values)).view(rollouts.mask.shape)

    return to_rows(log_probs), to_rows(entropies)


def _chunk_log_probs(
    head: nn.Module, temperature: float, states: Tensor, targets: Tensor
) -> tuple[Tensor, Tensor]:
    """Log-probs of the targets and entropies, float32 [tokens] each, from hidden states."""
    log_softmax = (head(states).float() / temperature).log_softmax(-1)
    with torch.no_grad():
        entropy = torch.special.entr(log_softmax.exp()).sum(-1)
    return log_softmax.gather(-1, targets.unsqueeze(-1)).squeeze(-1), entropy


def autocast(device: str, precision: str) -> torch.autocast:
    """Forward passes in the given precision.

    Trained weights stay float32: in bfloat16 a step of 1e-6 would round to nothing.
    """
    enabled = precision == "bfloat16"
    return torch.autocast(torch.device(device).type, torch.bfloat16, enabled=enabled)


class _HeadOutsideAutocast(nn.Linear):
    """An output head that computes in the dtype of its weights, also under autocast."""

    def forward(self, states: Tensor) -> Tensor:
        with torch.autocast(states.device.type, enabled=False):
            return nn.functional.linear(states.to(self.weight.dtype), self.weight, self.bias)


def keep_from_autocast(head: nn.Module | None) -> None:
    """From now on an output head computes in the dtype of its weights, as a rule float32.

    Logits in bfloat16 would have steps of 0.125 in [16, 32), more than |log 0.9|: rounding alone
    would carry ratios over a clip bound. A head that is no plain nn.Linear stays as it is, and so
    does what a model does to its logits afterwards.
    """
    if type(head) is nn.Linear:
        head.__class__ = _HeadOutsideAutocast  # a patched `forward` would be a reference cycle


_PLAIN_HEADS: WeakKeyDictionary = WeakKeyDictionary()  # model -> what plain_head answered


def plain_head(model: PreTrainedModel) -> nn.Linear | None:
    """The model's output head, if logits are nothing but this head applied to the last hidden
    states, else None.

    Asked of the model itself, once, with three tokens: some models scale or cap their logits, and
    say so in many ways.
    """
    if model not in _PLAIN_HEADS:
        head = model.get_output_embeddings()
        is_plain = isinstance(head, nn.Linear) and model.base_model is not model
        if is_plain:
            keep_from_autocast(head)  # else rounding would hide a small difference
            is_plain = _logits_are_those_of(head, model)
        _PLAIN_HEADS[model] = head if is_plain else None
    return _PLAIN_HEADS[model]


@torch.no_grad()
def _logits_are_those_of(head: nn.Linear, model: PreTrainedModel) -> bool:
    ids = torch.arange(3, device=model.device).unsqueeze(0)
    kind = model.device.type
    # Without autocast's cache: it would keep casts of the weights that carry no gradient.
    with torch.autocast(
        kind,
        dtype=torch.get_autocast_dtype(kind),
        enabled=torch.is_autocast_enabled(kind),
        cache_enabled=False,
    ):
        states = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
        return torch.equal(head(states), model(input_ids=ids, use_cache=False).logits)


# ---------------------------------------------------------------- the rollout policy's log-probs
def sample_rollouts(
    model: PreTrainedModel,
    tokenizer,
    prompts: list,
    *,
    temperature: float,
    micro_batch_tokens: int = MICRO_BATCH_TOKENS,
    **options,
) -> Rollouts:
    """`generate`, then log-probs and entropies of the policy that drew the tokens, detached.

    For partial rollouts; otherwise train.py calls `generate`, and reads the log-probs in the
    micro-batches of its updates.
    """
    rollouts = generate(model, tokenizer, prompts, temperature=temperature, **options)
    rollouts.log_probs = torch.zeros_like(rollouts.sampler_log_probs)
    rollouts.entropy = torch.zeros_like(rollouts.sampler_log_probs)
    for rows in rollouts.micro_batch_rows(micro_batch_tokens):
        part = rollouts.select(rows)
        width = part.mask.shape[1]
        with torch.no_grad():
            log_probs, entropy = token_log_probs(model, part, temperature)
        rollouts.log_probs[rows, :width] = log_probs
        rollouts.entropy[rows, :width] = entropy
    return rollouts


def newest_log_ratio(
    log_probs: Tensor, rollouts: Rollouts, step: int, exact: bool = True
) -> Tensor:
    """|log r| of the tokens that this step's policy drew: their largest, or, if not exact, mean.

    0-dim. At the first update after sampling the policy IS the rollout policy, so it must be 0.
    """
    newest = rollouts.mask & (rollouts.versions == step)
    gaps = (log_probs.detach() - rollouts.log_probs).abs().masked_fill(~newest, 0.0)
    if exact:
        return gaps.max()
    return gaps.sum() / newest.sum().clamp(min=1)


def check_first_ratio(log_ratio: float, exact: bool = True) -> None:
    """Raise RuntimeError unless `newest_log_ratio` at the first update after sampling is 0.

    Within 1e-3 for the largest; within 0.03 for the mean, which is asked in bfloat16, where single
    tokens may differ by rounding. NaN passes: the loss shows it.
    """
    tolerance = 1e-3 if exact else 0.03
    if log_ratio > tolerance:
        raise RuntimeError(
            f"the first update after sampling has a log importance ratio of {log_ratio:.3g},"
            f" expected 0 within {tolerance}: rollout and training log-probs disagree"
            " (temperature, dtype, dropout, a mask off by one, or weights that changed between)"
        )
