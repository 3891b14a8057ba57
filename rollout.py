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

from collections.abc import Iterable
from functools import partial

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm

from support.loading import autocast
from tasks import Problem

# Elements of a chunk's float32 logits [tokens, V]: 256 MiB, 441 tokens of Qwen2
CHUNK_LOGITS = 2**26


class Rollouts:
    """A batch of B responses. Versions, log-probs and entropy are 0 at first."""

    def __init__(
        self, prompts: list[list[int]], responses: list[list[int]], eos_ids: list[int], device
    ):
        """Take the token ids of prompts and responses. A response without an EOS was cut off."""
        sequences = [prompt + response for prompt, response in zip(prompts, responses)]
        self.sequences = pad_rows(sequences, device)  # [B, L] int64: prompt, response, padding
        self.response_ids = pad_rows(responses, device)  # [B, T] int64, padded on the right
        # [B, T] bool: response tokens, the EOS included. A mask `token != pad` would be wrong: pad
        # and EOS are often the same token, and the model must learn to write the EOS.
        self.mask = pad_rows([[True] * len(ids) for ids in responses], device)
        self.responses = responses
        self.prompt_lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
        self.sequence_lengths = self.prompt_lengths + self.mask.sum(1)  # [B], without padding
        truncated = [ids[-1] not in eos_ids for ids in responses]
        self.truncated = torch.tensor(truncated, device=device)  # [B] bool: without an EOS
        # [B, T] int64: the step whose policy drew each token
        self.versions = torch.zeros_like(self.response_ids)
        # [B, T] float32, of the policy that drew each token, in nats
        self.rollout_log_probs = torch.zeros(self.mask.shape, device=device)
        self.entropy = torch.zeros_like(self.rollout_log_probs)
        self.sampler_log_probs = torch.zeros_like(self.rollout_log_probs)  # of the same policy
        self.advantages = None  # [B] float32


def pad_rows(rows: list[list], device, **options) -> Tensor:
    """Return lists of unequal length as one tensor [B, longest, ...], with 0 on the right."""
    tensors = [torch.tensor(row) for row in rows]
    return pad_sequence(tensors, batch_first=True, **options).to(device)


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
) -> Rollouts:
    """Sample group_size responses to each prompt (token ids) with torch's random generator.

    model: from loading.load_policy, which discards its own sampling options. A temperature of 0
    takes the likeliest token. top_p < 1 is for evaluation only, because it makes the log-probs of
    `token_log_probs` wrong. Responses that need more than batch_tokens together are drawn in
    several batches, grouped by length. progress names a bar that shows after ten seconds. Returns
    Rollouts with B = group_size * len(prompts), the sampler's log-probs (before top_p), and zeros
    for what is computed later.
    """
    eos_ids = model.generation_config.eos_token_id
    settings = {}
    if temperature:  # the library's default of top_k is 50
        settings = {"do_sample": True, "temperature": temperature, "top_p": top_p, "top_k": 0}
    prompts = [prompt for prompt in prompts for _ in range(group_size)]  # one per response
    responses = [None] * len(prompts)
    sampler_log_probs = [None] * len(prompts)
    lengths = [len(prompt) + max_new_tokens for prompt in prompts]
    packs = pack_by_length(lengths, batch_tokens)
    for rows in tqdm(packs, progress, delay=10, leave=False, disable=not progress):
        # On the left, so that all responses begin in one column. -1, which is no token, marks the
        # padding. The model gets 0 there, masked.
        prompt_ids = pad_rows(
            [prompts[row] for row in rows], model.device, padding_value=-1, padding_side="left"
        )
        columns = []  # log-probs [n, 1] by position; the last one has those of all tokens
        with autocast(model):
            sequences = model.generate(
                prompt_ids.clamp(min=0),
                attention_mask=(prompt_ids >= 0).long(),
                max_new_tokens=max_new_tokens,
                logits_processor=[partial(record_scores, temperature or 1.0, columns)],
                **settings,
            )
        columns[-1] = columns[-1].gather(1, sequences[:, -1:])
        drawn = sequences[:, -len(columns) :].tolist()
        for row, ids, log_probs in zip(rows, drawn, torch.cat(columns, 1).tolist()):
            ends = [length for length, token in enumerate(ids, 1) if token in eos_ids]
            length = min(ends, default=len(ids))  # with the first EOS
            responses[row] = ids[:length]
            sampler_log_probs[row] = log_probs[:length]
    rollouts = Rollouts(prompts, responses, eos_ids, model.device)
    rollouts.sampler_log_probs = pad_rows(sampler_log_probs, model.device)
    return rollouts


def record_scores(temperature: float, columns: list, input_ids: Tensor, scores: Tensor) -> Tensor:
    """Append the log-probs of all tokens [n, V] to columns, and return the logits as they are.

    The library calls this with its logits before it draws each token. The token before is known
    then, the last of input_ids [n, L], and `columns` keep its log-prob alone: [n, 1].
    """
    if columns:
        columns[-1] = columns[-1].gather(1, input_ids[:, -1:])
    columns.append((scores / temperature).log_softmax(-1))
    return scores


def check_sampler(rollouts: Rollouts) -> None:
    """Raise ValueError unless the mean |sampler's - rollout log-prob| over tokens is below 0.1.

    Rounding to bfloat16 makes some 0.01.
    """
    differences = (rollouts.sampler_log_probs - rollouts.rollout_log_probs)[rollouts.mask]
    difference = differences.abs().mean()
    if not difference < 0.1:
        raise ValueError(
            f"the log-probs of sampling and of training differ by {difference:.2g}, not below 0.1:"
            " the model reads a token after a cache, or beside padding, in another way. Use another"
            " model, or a lower --max_new_tokens if positions depend on the length"
        )


def pack_by_length(lengths: list[int], token_budget: int) -> list[list[int]]:
    """Return the rows in packs of at most token_budget, each row padded to the pack's longest.

    The longest rows come first, so that rows of similar length share a pack, and a lack of memory
    shows at once. A row longer than that gets a pack of its own.
    """
    rows = sorted(range(len(lengths)), key=lambda row: -lengths[row])
    packs = []
    while rows:
        count = max(1, token_budget // lengths[rows[0]])
        packs.append(rows[:count])
        rows = rows[count:]
    return packs


def response_texts(tokenizer, rollouts: Rollouts) -> list[str]:
    """Return each response as text, without the EOS that ends it.

    Other special tokens stay visible, because a grader must see them.
    """
    rows = zip(rollouts.responses, rollouts.truncated.tolist())
    responses = [ids if truncated else ids[:-1] for ids, truncated in rows]
    return tokenizer.batch_decode(responses, clean_up_tokenization_spaces=False)


# ---------------------------------------------------------------- log-probs
def micro_batches(rollouts: Rollouts, rows: Tensor, micro_batch_tokens: int) -> list[Tensor]:
    """Split `rows` into micro-batches of at most micro_batch_tokens, padding included."""
    lengths = rollouts.sequence_lengths[rows].tolist()
    return [rows[pack] for pack in pack_by_length(lengths, micro_batch_tokens)]


def token_log_probs(
    model, rollouts: Rollouts, rows: Tensor, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Return log-probs and exact entropies (nats) of the response tokens of a micro-batch.

    model: from loading.load_policy. Both results are float32 [n, T], of softmax(logits /
    temperature), and 0 outside the mask. The entropies have no gradient. The head reads a chunk of
    tokens at a time, and again in the backward pass: the logits of all tokens never exist at once.
    """
    mask = rollouts.mask[rows]
    longest = rollouts.sequence_lengths[rows].max()
    # A causal model does not look at the padding on the right: no attention mask is needed.
    input_ids = rollouts.sequences[rows, :longest]
    with autocast(model):
        states = model.get_decoder()(input_ids, use_cache=False).last_hidden_state
    # From here on, one element per response token. The state before a token predicts it.
    member, position = mask.nonzero(as_tuple=True)
    states = states[member, rollouts.prompt_lengths[rows][member] + position - 1]
    targets = rollouts.response_ids[rows][mask]
    head = model.get_output_embeddings()

    def read_chunk(states, targets):
        log_softmax = (head(states) / temperature).log_softmax(-1)
        log_probs = log_softmax.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
        with torch.no_grad():
            # entr(0) is 0, where -p log p is NaN if a logit is -inf.
            entropy = torch.special.entr(log_softmax.exp()).sum(-1)
        return torch.stack([log_probs, entropy])  # float32 [2, tokens]

    chunk_tokens = CHUNK_LOGITS // len(head.weight)
    chunks = [  # keep no logits, and compute them again in the backward pass
        checkpoint(read_chunk, *chunk, use_reentrant=False, preserve_rng_state=False)
        for chunk in zip(states.split(chunk_tokens), targets.split(chunk_tokens))
    ]
    zeros = torch.zeros(2, *mask.shape, device=mask.device)
    log_probs, entropy = zeros.masked_scatter(mask, torch.cat(chunks, 1))
    return log_probs, entropy.detach()


@torch.no_grad()
def record_log_probs(
    model, rollouts: Rollouts, batches: Iterable[Tensor], step: int, temperature: float
) -> None:
    """For the rows of `batches`, record log-probs and entropies of the tokens that `step` drew.

    Tokens of earlier steps (partial rollouts) keep what was recorded then.
    """
    recorded = rollouts.rollout_log_probs, rollouts.entropy
    for rows in batches:
        is_new = rollouts.versions[rows] == step
        for old, new in zip(recorded, token_log_probs(model, rollouts, rows, temperature)):
            old[rows] = new.where(is_new, old[rows])


# ---------------------------------------------------------------- partial rollouts
@torch.no_grad()
def generate_partially(
    model,
    unfinished: list[list[dict]],
    problems: list[Problem],
    step: int,
    *,
    group_size: int,
    max_new_tokens: int,
    budget: int,
    micro_batch_tokens: int,
    **sampling,
) -> tuple[Rollouts | None, list[Problem]]:
    """Draw at most `budget` tokens of each response (partial rollouts, section 5.3).

    Begins a group for each problem, whose prompt is token ids, and continues the responses of all
    groups. Every token keeps the log-prob that it had under the policy that drew it. A group is
    finished after at most ceil(max_new_tokens / budget) steps, its first one included.

    unfinished: unfinished groups, each a list of responses; changed in place, and plain values, so
        that a checkpoint can hold them. A token's values are its version, log-prob, entropy and the
        sampler's log-prob
    step: the version that the new tokens get
    max_new_tokens: most tokens of a response, over all its steps
    sampling: options of `generate`, with temperature

    Returns the finished groups' rollouts and problems, or (None, []) if no group is finished.
    """
    eos_ids = model.generation_config.eos_token_id
    groups = [*unfinished]
    for prompt, answer in problems:
        new = {"prompt": prompt, "answer": answer, "ids": [], "values": [], "goes_on": True}
        groups.append([dict(new) for _ in range(group_size)])
    growing = [response for group in groups for response in group if response["goes_on"]]

    sequences = [response["prompt"] + response["ids"] for response in growing]
    drawn = generate(model, sequences, max_new_tokens=min(budget, max_new_tokens), **sampling)
    drawn.versions.fill_(step)
    # For later steps. If the group is finished in this one, train.py records these values again, in
    # the micro-batches that training reads.
    rows = torch.arange(len(growing), device=model.device)
    batches = micro_batches(drawn, rows, micro_batch_tokens)
    record_log_probs(model, drawn, batches, step, sampling["temperature"])
    values = [drawn.versions, drawn.rollout_log_probs, drawn.entropy, drawn.sampler_log_probs]
    values = torch.stack(values, 2).tolist()
    for response, new_ids, new_values in zip(growing, drawn.responses, values):
        # All draw equally many tokens, and these go past the limit of some.
        ids = (response["ids"] + new_ids)[:max_new_tokens]
        response["ids"] = ids
        response["values"] = (response["values"] + new_values)[: len(ids)]
        response["goes_on"] = ids[-1] not in eos_ids and len(ids) < max_new_tokens

    finished = []
    unfinished.clear()
    for group in groups:
        goes_on = any(response["goes_on"] for response in group)
        (unfinished if goes_on else finished).append(group)
    if not finished:
        return None, []

    responses = [response for group in finished for response in group]
    prompts = [response["prompt"] for response in responses]
    ids = [response["ids"] for response in responses]
    rollouts = Rollouts(prompts, ids, eos_ids, model.device)
    values = pad_rows([response["values"] for response in responses], model.device).unbind(2)
    versions, rollouts.rollout_log_probs, rollouts.entropy, rollouts.sampler_log_probs = values
    rollouts.versions = versions.long()
    return rollouts, [Problem(one["prompt"], one["answer"]) for one, *_ in finished]
