"""Rollouts: sampled responses, and the log-probs of their tokens.

Responses are sampled with Hugging Face `generate`. The rollout policy's log-probs come from a
forward pass after sampling, by the function that training uses (`token_log_probs`). The sampler's
own scores come from other kernels, with which importance ratios would not begin at 1.

These limits say how much is computed at a time, each in tokens with padding included:

    batch_tokens        what `generate` draws together, which bounds the key-value cache
    max_tokens          what a micro-batch holds (`micro_batches`), which bounds the activations of
                        a backward pass
    READ_TOKENS         what one forward call takes, chosen for speed (on a CPU READ_TOKENS_ON_CPU)
    CHUNK_LOGITS        logits, not tokens, that exist at once, which bounds the head's memory

To read tokens means to run a forward pass over them.

Shapes: B responses, those to one prompt consecutive; T response positions; L positions of prompt
and response; V vocabulary. A part of a batch is given by its row numbers, int64 [n].
"""

import itertools
from dataclasses import asdict, dataclass, field
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint

from support.task import Problem

# A CPU is up to a third faster with fewer tokens, which stay in its cache.
READ_TOKENS = 2**12
READ_TOKENS_ON_CPU = 2**10
# Elements of a chunk's float32 logits [tokens, V]: 256 MiB, 441 tokens of Qwen2
CHUNK_LOGITS = 2**26


class Rollouts:
    """A batch of B responses. Versions, log-probs, entropy and advantages are 0 at first."""

    def __init__(
        self, prompts: list[list[int]], responses: list[list[int]], truncated: list[bool], device
    ):
        """Take the token ids of prompts and responses, and whether a response was cut off."""
        sequences = [prompt + response for prompt, response in zip(prompts, responses)]
        self.lengths = [len(ids) for ids in sequences]  # without padding
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
) -> Rollouts:
    """Sample group_size responses to each prompt (token ids) with torch's random generator.

    model: from support.loading.load_policy, which discards its own sampling options. top_p < 1 is
    for evaluation only, because it makes the log-probs of `token_log_probs` wrong. Responses that
    need more than batch_tokens together are drawn in several batches, grouped by length. Returns
    Rollouts with B = group_size * len(prompts), and with zeros for what is computed later.
    """
    eos_ids = model.generation_config.eos_token_id
    prompts = [prompt for prompt in prompts for _ in range(group_size)]  # one per response
    responses = [[] for _ in prompts]
    lengths = [len(prompt) + max_new_tokens for prompt in prompts]
    for rows in pack_by_length(lengths, batch_tokens):
        tensors = [torch.tensor(prompts[row], device=model.device) for row in rows]
        # On the left, so that all responses begin in one column. -1, which is no token, marks the
        # padding. The model gets 0 there, masked.
        prompt_ids = pad_sequence(tensors, batch_first=True, padding_value=-1, padding_side="left")
        sequences = model.generate(
            prompt_ids.clamp(min=0),
            attention_mask=(prompt_ids >= 0).long(),
            max_new_tokens=max_new_tokens,
            do_sample=True,
            temperature=temperature,
            top_p=top_p,
            top_k=0,  # the library's default is 50
        )
        drawn = sequences[:, prompt_ids.shape[1] :].tolist()
        for row, ids in zip(rows, drawn):
            responses[row] = up_to_eos(ids, eos_ids)
    truncated = [response[-1] not in eos_ids for response in responses]
    return Rollouts(prompts, responses, truncated, model.device)


def up_to_eos(ids: list[int], eos_ids: list[int]) -> list[int]:
    """Return the tokens up to and including the first EOS, or all if there is none."""
    for place, token in enumerate(ids):
        if token in eos_ids:
            return ids[: place + 1]
    return ids


def pack_by_length(lengths: list[int], max_tokens: int) -> list[list[int]]:
    """Return the rows in packs of at most max_tokens, each row padded to the pack's longest.

    The longest rows come first, so that rows of similar length share a pack, and a lack of memory
    shows at once. Rows that fit one pack keep their order, and a row longer than max_tokens gets a
    pack of its own.
    """
    if lengths and max(lengths) * len(lengths) <= max_tokens:
        return [list(range(len(lengths)))]
    rows = sorted(range(len(lengths)), key=lambda row: -lengths[row])
    packs = []
    while rows:
        longest = lengths[rows[0]]
        count = max(1, max_tokens // longest)
        packs.append(rows[:count])
        rows = rows[count:]
    return packs


def response_texts(tokenizer, rollouts: Rollouts) -> list[str]:
    """Return each response as text, without the EOS that ends it.

    Other special tokens stay visible, because a grader must see them. So do ids that the tokenizer
    has no token for, as <id 151700>: some embeddings are larger than their vocabulary (Qwen2.5).
    """
    known = set(tokenizer.get_vocab().values())
    lengths = rollouts.mask.sum(1) - (~rollouts.truncated).long()
    texts = []
    for response_ids, length in zip(rollouts.response_ids.tolist(), lengths.tolist()):
        text = ""
        # runs of known ids, and of others
        for has_token, ids in itertools.groupby(response_ids[:length], known.__contains__):
            if has_token:
                text += tokenizer.decode(
                    list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
                )
            else:
                text += "".join(f"<id {token}>" for token in ids)
        texts.append(text)
    return texts


# ---------------------------------------------------------------- log-probs
def token_log_probs(
    model, rollouts: Rollouts, rows: Tensor, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Return log-probs and exact entropies (nats) of the response tokens of `rows`.

    Both are float32 [n, T], of softmax(logits / temperature), and 0 outside the mask. The entropies
    have no gradient. The head reads a chunk of tokens at a time, so that the logits of all tokens
    never exist at once.
    """
    lengths = [rollouts.lengths[row] for row in rows.tolist()]
    chunk_tokens = max(1, CHUNK_LOGITS // model.config.get_text_config().vocab_size)
    read_chunk = partial(_chunk_log_probs, model.get_output_embeddings(), temperature)
    if torch.is_grad_enabled() and sum(lengths) > chunk_tokens:
        # Several chunks: keep no logits, and compute them again in the backward pass.
        read_chunk = partial(checkpoint, read_chunk, use_reentrant=False, preserve_rng_state=False)
    log_probs = []  # of each chunk
    entropies = []
    places = []  # of each pack's tokens in [n, T]: int64 [2, tokens]
    read_tokens = READ_TOKENS_ON_CPU if rows.device.type == "cpu" else READ_TOKENS
    for pack in pack_by_length(lengths, read_tokens):
        longest = max(lengths[index] for index in pack)
        indices = torch.tensor(pack, device=rows.device)  # in `rows`
        pack_rows = rows[indices]
        # A causal model does not look at the padding on the right: no attention mask is needed.
        input_ids = rollouts.sequences[pack_rows, :longest]
        states = model.get_decoder()(input_ids, use_cache=False).last_hidden_state
        # From here on, one element per response token of the pack
        member, position = rollouts.mask[pack_rows].nonzero(as_tuple=True)
        token_rows = pack_rows[member]
        targets = rollouts.response_ids[token_rows, position]
        # The state before a token predicts it.
        states = states[member, rollouts.prompt_lengths[token_rows] + position - 1]
        for chunk in zip(states.split(chunk_tokens), targets.split(chunk_tokens)):
            chunk_log_probs, chunk_entropies = read_chunk(*chunk)
            log_probs.append(chunk_log_probs)
            entropies.append(chunk_entropies)
        places.append(torch.stack([indices[member], position]))
    places = tuple(torch.cat(places, 1))
    zeros = torch.zeros(len(rows), rollouts.mask.shape[1], device=rows.device)
    return (
        zeros.index_put(places, torch.cat(log_probs)),
        zeros.index_put(places, torch.cat(entropies)),
    )


def _chunk_log_probs(head: nn.Module, temperature: float, states: Tensor, targets: Tensor) -> tuple:
    """Return log-probs of the targets and entropies, float32 [tokens] each, from hidden states."""
    log_softmax = (head(states).float() / temperature).log_softmax(-1)
    with torch.no_grad():
        # entr(0) is 0, where -p log p is NaN if a logit is -inf.
        entropy = torch.special.entr(log_softmax.exp()).sum(-1)
    log_probs = log_softmax.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    return log_probs, entropy


def micro_batches(rollouts: Rollouts, rows: Tensor, max_tokens: int) -> list[Tensor]:
    """Split `rows` into micro-batches of at most max_tokens tokens, padding included."""
    lengths = [rollouts.lengths[row] for row in rows.tolist()]
    return [rows[pack] for pack in pack_by_length(lengths, max_tokens)]


# ---------------------------------------------------------------- partial rollouts
@dataclass
class PartialResponse:
    """A response that several policies may draw. ids and the lists below it have equal lengths."""

    prompt: list[int]
    answer: str
    ids: list[int] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)  # the step whose policy drew the token
    rollout_log_probs: list[float] = field(default_factory=list)  # under that policy
    entropy: list[float] = field(default_factory=list)
    ended: bool = False  # with an EOS


@dataclass
class PartialRollouts:
    """Partial rollouts (section 5.3): a step draws at most `budget` tokens of a response.

    An unfinished response waits, and later policies continue it. A group is finished after at most
    ceil(max_new_tokens / budget) steps, its first one included.
    """

    budget: int
    max_new_tokens: int  # this and the next three as in `generate`
    group_size: int
    temperature: float
    batch_tokens: int = 2**18
    groups: list[list[PartialResponse]] = field(default_factory=list)  # unfinished

    @torch.no_grad()
    def advance(self, model, problems: list[Problem], step: int) -> tuple:
        """Begin a group for each problem, extend all responses, and remove the finished groups.

        The prompts of the problems are token ids. Returns the finished groups' rollouts and
        problems, or (None, []) if no group is finished.
        """
        for problem in problems:
            group = [
                PartialResponse(problem.prompt, problem.answer) for _ in range(self.group_size)
            ]
            self.groups.append(group)
        waiting = self._unfinished(sum(self.groups, []))
        self._extend(model, waiting, step)
        finished = [group for group in self.groups if not self._unfinished(group)]
        self.groups = [group for group in self.groups if self._unfinished(group)]
        if not finished:
            return None, []
        responses = sum(finished, [])
        rollouts = Rollouts(
            [response.prompt for response in responses],
            [response.ids for response in responses],
            [not response.ended for response in responses],
            model.device,
        )
        for name in ("versions", "rollout_log_probs", "entropy"):
            values = [getattr(response, name) for response in responses]
            setattr(rollouts, name, pad_rows(values, model.device))
        return rollouts, [Problem(group[0].prompt, group[0].answer) for group in finished]

    def saved(self) -> list[list[dict]]:
        """Return the unfinished groups as plain values, for a checkpoint."""
        return [[asdict(response) for response in group] for group in self.groups]

    def restore(self, saved: list[list[dict]]) -> None:
        """Take the unfinished groups that `saved` has returned."""
        self.groups = [[PartialResponse(**values) for values in group] for group in saved]

    def _unfinished(self, responses: list[PartialResponse]) -> list[PartialResponse]:
        """Return the responses without an EOS and below max_new_tokens."""
        return [r for r in responses if not r.ended and len(r.ids) < self.max_new_tokens]

    def _extend(self, model, responses: list[PartialResponse], step: int) -> None:
        """Add this policy's tokens, with their log-probs and entropies."""
        # All draw equally many tokens. Those past max_new_tokens are dropped below.
        drawn = generate(
            model,
            [response.prompt + response.ids for response in responses],
            max_new_tokens=min(self.budget, self.max_new_tokens),
            temperature=self.temperature,
            batch_tokens=self.batch_tokens,
        )
        # For later steps. If the group is finished in this one, train.record_rollout_policy
        # computes these values again, in the micro-batches that training reads.
        rows = torch.arange(len(responses), device=model.device)
        log_probs, entropy = token_log_probs(model, drawn, rows, self.temperature)
        drawn_tokens = drawn.mask.sum(1).tolist()
        for row, response in enumerate(responses):
            used = min(drawn_tokens[row], self.max_new_tokens - len(response.ids))
            response.ids += drawn.response_ids[row, :used].tolist()
            response.versions += [step] * used
            response.rollout_log_probs += log_probs[row, :used].tolist()
            response.entropy += entropy[row, :used].tolist()
            response.ended = used == drawn_tokens[row] and not drawn.truncated[row]
