"""Rollouts: sampled responses, and the log-probs of their tokens.

Responses are sampled with Hugging Face `generate`. The rollout policy's log-probs come from a
forward pass after sampling, by the function that training uses (`token_log_probs`). The sampler's
own scores come from other kernels, with which importance ratios would not begin at 1.

These limits say how much is computed at a time, padding included:

    batch_tokens        tokens that `generate` draws together, which bounds the key-value cache
    micro_batch_tokens  tokens of a micro-batch, which bounds the activations of a backward pass
    CHUNK_LOGITS        logits that exist at once, which bounds the memory of the head

Shapes: B responses, those to one prompt consecutive; T response positions; L positions of prompt
and response; V vocabulary. A part of a batch is given by its row numbers, int64 [n].
"""

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm
from transformers import LogitsProcessor

from support.loading import autocast
from tasks import Problem

# Elements of a chunk's float32 logits [tokens, V]: 256 MiB, 441 tokens of Qwen2
CHUNK_LOGITS = 2**26


class Rollouts:
    """A batch of B responses. Versions, log-probs, entropy and advantages are 0 at first."""

    def __init__(
        self, prompts: list[list[int]], responses: list[list[int]], truncated: list[bool], device
    ):
        """Take the token ids of prompts and responses, and whether a response was cut off."""
        sequences = [prompt + response for prompt, response in zip(prompts, responses)]
        self.sequence_lengths = [len(ids) for ids in sequences]  # without padding
        self.sequences = pad_rows(sequences, device)  # [B, L] int64: prompt, response, padding
        self.response_ids = pad_rows(responses, device)  # [B, T] int64, padded on the right
        # [B, T] bool: response tokens, the EOS included. A mask `token != pad` would be wrong: pad
        # and EOS are often the same token, and the model must learn to write the EOS.
        self.mask = pad_rows([[True] * len(ids) for ids in responses], device)
        self.prompt_lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
        self.truncated = torch.tensor(truncated, device=device)  # [B] bool: without an EOS
        # [B, T] int64: the step whose policy drew each token
        self.versions = torch.zeros_like(self.response_ids)
        # [B, T] float32, of the policy that drew each token, in nats
        self.rollout_log_probs = torch.zeros(self.mask.shape, device=device)
        self.entropy = torch.zeros_like(self.rollout_log_probs)
        self.advantages = torch.zeros(len(sequences), device=device)  # [B] float32
        self.sampler_log_probs = None  # [B, T] float32, if `generate` recorded them


def pad_rows(rows: list[list], device) -> Tensor:
    """Return lists of unequal length as one tensor [B, longest], padded with 0 on the right."""
    return pad_sequence([torch.tensor(row) for row in rows], batch_first=True).to(device)


# ---------------------------------------------------------------- sampling
@torch.no_grad()
def generate(
    model,
    prompts: list[list[int]],
    *,
    max_new_tokens: int,
    group_size: int = 1,
    temperature: float = 1.0,
    top_p: float = 1.0,
    batch_tokens: int = 2**18,
    progress: str = "",
    records_log_probs: bool = False,
) -> Rollouts:
    """Sample group_size responses to each prompt (token ids) with torch's random generator.

    model: from loading.load_policy, which discards its own sampling options. A temperature of 0
    takes the likeliest token. top_p < 1 is for evaluation only, because it makes the log-probs of
    `token_log_probs` wrong. Responses that need more than batch_tokens together are drawn in
    several batches, grouped by length. progress names a bar that shows after ten seconds.
    records_log_probs is for `check_sampler`. Returns Rollouts with B = group_size * len(prompts),
    and with zeros for what is computed later.
    """
    eos_ids = model.generation_config.eos_token_id
    settings = {"do_sample": False}
    if temperature:  # the library's default of top_k is 50
        settings = {"do_sample": True, "temperature": temperature, "top_p": top_p, "top_k": 0}
    prompts = [prompt for prompt in prompts for _ in range(group_size)]  # one per response
    responses = [[] for _ in prompts]
    log_probs = [[] for _ in prompts]  # the sampler's
    lengths = [len(prompt) + max_new_tokens for prompt in prompts]
    packs = pack_by_length(lengths, batch_tokens)
    for rows in tqdm(packs, progress, delay=10, leave=False, disable=not progress):
        tensors = [torch.tensor(prompts[row], device=model.device) for row in rows]
        # On the left, so that all responses begin in one column. -1, which is no token, marks the
        # padding. The model gets 0 there, masked.
        prompt_ids = pad_sequence(tensors, batch_first=True, padding_value=-1, padding_side="left")
        sampler = SamplerLogProbs(temperature)
        with autocast(model):
            sequences = model.generate(
                prompt_ids.clamp(min=0),
                attention_mask=(prompt_ids >= 0).long(),
                max_new_tokens=max_new_tokens,
                logits_processor=[sampler] if records_log_probs else [],
                **settings,
            )
        drawn = sequences[:, prompt_ids.shape[1] :].tolist()
        for row, ids in zip(rows, drawn):
            ends = [length for length, token in enumerate(ids, 1) if token in eos_ids]
            responses[row] = ids[: ends[0]] if ends else ids  # with the first EOS
        if records_log_probs:
            sampler.end_column(sequences)
            for row, values in zip(rows, torch.cat(sampler.columns, 1).tolist()):
                log_probs[row] = values[: len(responses[row])]
    truncated = [response[-1] not in eos_ids for response in responses]
    rollouts = Rollouts(prompts, responses, truncated, model.device)
    if records_log_probs:
        rollouts.sampler_log_probs = pad_rows(log_probs, model.device)
    return rollouts


class SamplerLogProbs(LogitsProcessor):
    """The log-probs of the tokens that the library draws, as it sees them."""

    def __init__(self, temperature: float):
        self.temperature = temperature
        self.columns = []  # [n, 1] each; the last one [n, V], until its token is drawn

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Called by the library before a token is drawn. scores [n, V] are logits."""
        self.end_column(input_ids)
        self.columns.append((scores.float() / self.temperature).log_softmax(-1))
        return scores

    def end_column(self, input_ids: Tensor) -> None:
        """Keep the log-probs of the last tokens, which have been drawn."""
        if self.columns:
            self.columns[-1] = self.columns[-1].gather(1, input_ids[:, -1:])


def check_sampler(rollouts: Rollouts) -> None:
    """Raise RuntimeError if rollout log-probs are 0.1 or more from the sampler's, if it has any.

    That is a mean over tokens. Rounding to bfloat16 makes some 0.01.
    """
    if rollouts.sampler_log_probs is None:
        return
    differences = (rollouts.sampler_log_probs - rollouts.rollout_log_probs)[rollouts.mask]
    difference = differences.abs().mean().item()
    if not difference < 0.1:
        raise RuntimeError(
            f"the log-probs of sampling and of training differ by {difference:.2g} on average, and"
            " must differ by less than 0.1. The model reads a token after a cache, or beside"
            " padding, in another way than whole rows. Use another model, or a lower"
            " --max_new_tokens if its positions depend on the length"
        )


def pack_by_length(lengths: list[int], token_budget: int) -> list[list[int]]:
    """Return the rows in packs of at most token_budget, each row padded to the pack's longest.

    The longest rows come first, so that rows of similar length share a pack, and a lack of memory
    shows at once. A row longer than that gets a pack of its own.
    """
    rows = sorted(range(len(lengths)), key=lambda row: -lengths[row])
    packs = []
    while rows:
        longest = lengths[rows[0]]
        count = max(1, token_budget // longest)
        packs.append(rows[:count])
        rows = rows[count:]
    return packs


def response_texts(tokenizer, rollouts: Rollouts) -> list[str]:
    """Return each response as text, without the EOS that ends it.

    Other special tokens stay visible, because a grader must see them.
    """
    lengths = rollouts.mask.sum(1) - (~rollouts.truncated).long()
    texts = []
    for ids, length in zip(rollouts.response_ids.tolist(), lengths.tolist()):
        texts.append(tokenizer.decode(ids[:length], clean_up_tokenization_spaces=False))
    return texts


# ---------------------------------------------------------------- log-probs
def micro_batches(rollouts: Rollouts, rows: Tensor, micro_batch_tokens: int) -> list[Tensor]:
    """Split `rows` into micro-batches of at most micro_batch_tokens, padding included."""
    lengths = [rollouts.sequence_lengths[row] for row in rows.tolist()]
    return [rows[pack] for pack in pack_by_length(lengths, micro_batch_tokens)]


def token_log_probs(
    model, rollouts: Rollouts, rows: Tensor, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Return log-probs and exact entropies (nats) of the response tokens of a micro-batch.

    model: from loading.load_policy. Both results are float32 [n, T], of softmax(logits /
    temperature), and 0 outside the mask. The entropies have no gradient. The head reads a chunk of
    tokens at a time, so that the logits of all tokens never exist at once.
    """
    mask = rollouts.mask[rows]
    longest = max(rollouts.sequence_lengths[row] for row in rows.tolist())
    # A causal model does not look at the padding on the right: no attention mask is needed.
    input_ids = rollouts.sequences[rows, :longest]
    with autocast(model):
        states = model.get_decoder()(input_ids, use_cache=False).last_hidden_state
    # From here on, one element per response token. The state before a token predicts it.
    member, position = mask.nonzero(as_tuple=True)
    states = states[member, rollouts.prompt_lengths[rows][member] + position - 1]
    targets = rollouts.response_ids[rows][mask]

    chunk_tokens = max(1, CHUNK_LOGITS // model.config.get_text_config().vocab_size)
    read_chunk = partial(_chunk_log_probs, model.get_output_embeddings(), temperature)
    if torch.is_grad_enabled() and len(targets) > chunk_tokens:
        # Several chunks: keep no logits, and compute them again in the backward pass.
        read_chunk = partial(checkpoint, read_chunk, use_reentrant=False, preserve_rng_state=False)
    chunks = map(read_chunk, states.split(chunk_tokens), targets.split(chunk_tokens))
    log_probs, entropies = zip(*chunks)
    zeros = torch.zeros(mask.shape, device=mask.device)
    return (
        zeros.masked_scatter(mask, torch.cat(log_probs)),
        zeros.masked_scatter(mask, torch.cat(entropies)),
    )


def _chunk_log_probs(head: nn.Module, temperature: float, states: Tensor, targets: Tensor) -> tuple:
    """Return log-probs of the targets and entropies, float32 [tokens] each, from hidden states."""
    log_softmax = (head(states).float() / temperature).log_softmax(-1)
    with torch.no_grad():
        # entr(0) is 0, where -p log p is NaN if a logit is -inf.
        entropy = torch.special.entr(log_softmax.exp()).sum(-1)
    log_probs = log_softmax.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    return log_probs, entropy


@torch.no_grad()
def record_log_probs(
    model, rollouts: Rollouts, rows: Tensor, step: int, temperature: float
) -> None:
    """Record log-probs and entropies of the tokens that this step's policy drew.

    Tokens of earlier steps (partial rollouts) keep what was recorded then.
    """
    log_probs, entropy = token_log_probs(model, rollouts, rows, temperature)
    is_new = rollouts.versions[rows] == step
    rollouts.rollout_log_probs[rows] = log_probs.where(is_new, rollouts.rollout_log_probs[rows])
    rollouts.entropy[rows] = entropy.where(is_new, rollouts.entropy[rows])


# ---------------------------------------------------------------- partial rollouts
@torch.no_grad()
def generate_partially(
    model,
    unfinished: list[dict],
    problems: list[Problem],
    step: int,
    *,
    budget: int,
    micro_batch_tokens: int,
    **sampling,
) -> tuple[Rollouts | None, list[Problem]]:
    """Draw at most `budget` tokens of each response (partial rollouts, section 5.3).

    Begins a group for each problem, whose prompt is token ids, and continues the responses of all
    groups. Every token keeps the log-prob that it had under the policy that drew it. A group is
    finished after at most ceil(max_new_tokens / budget) steps, its first one included.

    unfinished: the responses of unfinished groups, those of a group consecutive; changed in place,
        and plain values, so that a checkpoint can hold them
    step: the version that the new tokens get
    sampling: the options of `generate`; max_new_tokens limits a response in all its steps

    Returns the finished groups' rollouts and problems, or (None, []) if no group is finished.
    """
    eos_ids = model.generation_config.eos_token_id
    max_new_tokens = sampling["max_new_tokens"]
    group_size = sampling["group_size"]
    responses = [*unfinished]
    for problem in problems:
        responses += [_new_response(problem) for _ in range(group_size)]
    growing = [response for response in responses if not response["is_finished"]]

    # All draw equally many tokens. Those past max_new_tokens are dropped below.
    sampling |= {"group_size": 1, "max_new_tokens": min(budget, max_new_tokens)}
    sequences = [response["prompt"] + response["ids"] for response in growing]
    drawn = generate(model, sequences, **sampling)
    drawn.versions.fill_(step)
    # For later steps. If the group is finished in this one, train.py records these values again, in
    # the micro-batches that training reads.
    rows = torch.arange(len(growing), device=model.device)
    for micro_batch in micro_batches(drawn, rows, micro_batch_tokens):
        record_log_probs(model, drawn, micro_batch, step, sampling["temperature"])
    check_sampler(drawn)
    drawn_tokens = drawn.mask.sum(1).tolist()
    for row, response in enumerate(growing):
        used = min(drawn_tokens[row], max_new_tokens - len(response["ids"]))
        response["ids"] += drawn.response_ids[row, :used].tolist()
        response["versions"] += [step] * used
        response["log_probs"] += drawn.rollout_log_probs[row, :used].tolist()
        response["entropy"] += drawn.entropy[row, :used].tolist()
        response["truncated"] = response["ids"][-1] not in eos_ids
        is_full = len(response["ids"]) == max_new_tokens
        response["is_finished"] = is_full or not response["truncated"]

    finished = []
    unfinished.clear()
    for start in range(0, len(responses), group_size):
        group = responses[start : start + group_size]
        is_finished = all(response["is_finished"] for response in group)
        (finished if is_finished else unfinished).extend(group)
    if not finished:
        return None, []

    def column(name: str) -> list:
        return [response[name] for response in finished]

    rollouts = Rollouts(column("prompt"), column("ids"), column("truncated"), model.device)
    rollouts.versions = pad_rows(column("versions"), model.device)
    rollouts.rollout_log_probs = pad_rows(column("log_probs"), model.device)
    rollouts.entropy = pad_rows(column("entropy"), model.device)
    return rollouts, [Problem(one["prompt"], one["answer"]) for one in finished[::group_size]]


def _new_response(problem: Problem) -> dict:
    """Return a response without a token; its lists have an entry per token."""
    lists = {"ids": [], "versions": [], "log_probs": [], "entropy": []}
    return {"prompt": problem.prompt, "answer": problem.answer, "is_finished": False} | lists
