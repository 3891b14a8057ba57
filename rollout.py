"""Rollouts: sample responses with Hugging Face `generate`, and compute log-probs and entropy of response tokens.

The rollout policy's log-probs come from a forward pass after sampling, by the very function that training uses
(`token_log_probs`), not from the sampler's scores: kernels that differ would alone move importance ratios by per cents.

Shapes: N responses, P prompt positions (left-padded), T response positions (right-padded), V vocabulary.
"""

from dataclasses import dataclass, fields

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

CHUNK_TOKENS = 4096  # tokens whose float32 log-softmax [tokens, V] exists at one time


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

    def to(self, device) -> "Rollouts":
        return Rollouts(**{f.name: t if (t := getattr(self, f.name)) is None else t.to(device) for f in fields(self)})

    def select(self, rows: Tensor) -> "Rollouts":
        """The given rows (indices or bool [N]), without response positions that none of them uses."""
        chosen = {f.name: getattr(self, f.name)[rows] for f in fields(self) if getattr(self, f.name) is not None}
        width = int(chosen["mask"].sum(1).max()) if len(chosen["mask"]) else 0
        per_token = ("response_ids", "mask", "log_probs", "entropy", "versions")
        return Rollouts(**{name: t[:, :width] if name in per_token else t for name, t in chosen.items()})


def eos_token_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Every token that ends a response: the generation config's (chat models list several), the model's, the tokenizer's.

    Raises ValueError if there is none: a response could then never end.
    """
    ids: set[int] = set()
    for source in (model.generation_config, model.config, tokenizer):
        found = getattr(source, "eos_token_id", None)
        ids.update(found if isinstance(found, (list, tuple)) else [] if found is None else [found])
    if not ids:
        raise ValueError("tokenizer and model name no EOS token: set tokenizer.eos_token, or no response could ever end")
    return sorted(ids)


def response_mask(response_ids: Tensor, eos_ids: list[int]) -> tuple[Tensor, Tensor]:
    """mask [N, T], True up to and including the first EOS, and truncated [N], True where there is none.

    By position, never `token != pad`: pad and EOS are often the same token, and the EOS must be trained.
    """
    is_eos = torch.isin(response_ids, torch.tensor(eos_ids, device=response_ids.device))
    eos_before = is_eos.cumsum(1) - is_eos.long()
    return eos_before == 0, ~is_eos.any(1)


def sampling_config(
    *,
    max_new_tokens: int,
    temperature: float,
    eos_ids: list[int],
    pad_id: int,
    do_sample: bool = True,
    top_p: float = 1.0,
    top_k: int = 0,
) -> GenerationConfig:
    """Sampling from softmax(logits / temperature), or greedy decoding. Every option that would fall back to the model's
    generation config or to a default of the library (top_k = 50) is set. top_p < 1 and top_k > 0 are for evaluation only:
    they make the log-probs of `token_log_probs` wrong."""
    if do_sample and not temperature > 0:
        raise ValueError(f"temperature must be > 0, got {temperature}; for greedy decoding set do_sample=False")
    drawing = dict(temperature=temperature, top_p=top_p, top_k=top_k) if do_sample else {}
    return GenerationConfig(
        do_sample=do_sample,
        num_beams=1,
        repetition_penalty=1.0,
        max_new_tokens=max_new_tokens,
        eos_token_id=eos_ids,
        pad_token_id=pad_id,
        use_cache=True,
        **drawing,
    )


def pad(rows: list[list], value, side: str = "right") -> Tensor:
    """Lists of unequal length as one tensor [N, longest]."""
    return torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], True, value, padding_side=side)


@torch.no_grad()
def generate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: list[str] | list[list[int]],
    *,
    group_size: int = 1,
    max_new_tokens: int,
    temperature: float = 1.0,
    do_sample: bool = True,
    top_p: float = 1.0,
    top_k: int = 0,
) -> Rollouts:
    """group_size responses to each prompt (text, or token ids), drawn with torch's global generator; log_probs and entropy
    are not filled in.

    Raises ValueError without prompts, or if tokenizer and model have no EOS token.
    """
    if not prompts:
        raise ValueError("prompts is empty: nothing to generate")
    eos_ids = eos_token_ids(model, tokenizer)
    pad_id = eos_ids[0] if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    config = sampling_config(
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        eos_ids=eos_ids,
        pad_id=pad_id,
        do_sample=do_sample,
        top_p=top_p,
        top_k=top_k,
    )
    # Padded by hand: a tokenizer may pad on the right, or have no pad token.
    encoded = tokenizer(prompts)["input_ids"] if isinstance(prompts[0], str) else prompts
    prompt_ids = pad(encoded, pad_id, "left").repeat_interleave(group_size, 0).to(model.device)
    prompt_mask = pad([[1] * len(ids) for ids in encoded], 0, "left").repeat_interleave(group_size, 0).to(model.device)

    # `generate` fills whatever is None from the model's own generation config: take that away while it runs.
    own, was_training = model.generation_config, model.training
    model.generation_config = GenerationConfig()
    model.eval()
    try:
        sequences = model.generate(inputs=prompt_ids, attention_mask=prompt_mask, generation_config=config)
    finally:
        model.generation_config = own
        model.train(was_training)
    response_ids = sequences[:, prompt_ids.shape[1] :]
    mask, truncated = response_mask(response_ids, eos_ids)
    return Rollouts(prompt_ids, prompt_mask.bool(), response_ids.masked_fill(~mask, pad_id), mask, truncated)


def token_log_probs(
    model: PreTrainedModel, rollouts: Rollouts, temperature: float = 1.0, chunk_tokens: int = CHUNK_TOKENS
) -> tuple[Tensor, Tensor]:
    """Log-prob of every response token, and exact entropy of the distribution at its position: float32 [N, T] each.

    log softmax(logits / temperature) in float32; carries the gradient unless called under no_grad. The entropy (nats, over
    the full vocabulary) is detached. Both are 0 outside the mask. The float32 log-softmax exists for chunk_tokens tokens
    at a time; it is computed again in the backward pass rather than kept.
    """
    input_ids = torch.cat([rollouts.prompt_ids, rollouts.response_ids], 1)
    attention_mask = torch.cat([rollouts.prompt_mask, rollouts.mask], 1).long()
    logits = model(
        input_ids=input_ids,
        attention_mask=attention_mask,
        position_ids=(attention_mask.cumsum(1) - 1).clamp(min=0),  # as `generate` counts them under left padding
        logits_to_keep=rollouts.response_ids.shape[1] + 1,
        use_cache=False,
    ).logits[:, :-1]
    # Only response tokens go through the softmax: a batch is often half padding.
    logits, targets = logits[rollouts.mask], rollouts.response_ids[rollouts.mask]
    chunks = list(zip(logits.split(chunk_tokens), targets.split(chunk_tokens)))
    if len(chunks) > 1 and torch.is_grad_enabled():
        parts = [checkpoint(_chunk_log_probs, *chunk, temperature, use_reentrant=False) for chunk in chunks]
    else:
        parts = [_chunk_log_probs(*chunk, temperature) for chunk in chunks]
    log_probs, entropy = (torch.cat(side) for side in zip(*parts))
    zeros = torch.zeros(rollouts.mask.shape, device=logits.device)
    return zeros.masked_scatter(rollouts.mask, log_probs), zeros.masked_scatter(rollouts.mask, entropy)


def _chunk_log_probs(logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    log_softmax = (logits.float() / temperature).log_softmax(-1)
    with torch.no_grad():
        entropy = torch.special.entr(log_softmax.exp()).sum(-1)
    return log_softmax.gather(-1, targets.unsqueeze(-1)).squeeze(-1), entropy


def sample_rollouts(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompts: list[str], *, temperature: float, **options
) -> Rollouts:
    """`generate`, then the log-probs of the policy that drew the tokens, detached, at the same temperature."""
    rollouts = generate(model, tokenizer, prompts, temperature=temperature, **options)
    with torch.no_grad():
        rollouts.log_probs, rollouts.entropy = token_log_probs(model, rollouts, temperature)
    return rollouts


def response_texts(tokenizer: PreTrainedTokenizerBase, rollouts: Rollouts) -> list[str]:
    """Each response as text, without the EOS that ends it. Other special tokens stay visible: a grader must see them."""
    lengths = (rollouts.mask.sum(1) - (~rollouts.truncated).long()).tolist()
    ids = [row[:length] for row, length in zip(rollouts.response_ids.tolist(), lengths)]
    return tokenizer.batch_decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


class PartialRollouts:
    """Partial rollouts (5.3): a response that runs past the iteration's token budget waits here, unfinished, and is resumed
    by a later policy. Every token keeps the log-prob and the entropy under the policy that drew it, and its version: the
    number of the iteration. Ages count iterations, also those after which nothing could be trained on.

    budget: most tokens that an iteration adds to a response. max_age: a response that is still unfinished that many
    versions after its first token is cut, as if it had reached max_new_tokens (so its group can be trained on), and counted.
    `groups` is plain data, for checkpoints. Raises ValueError for a budget or age below 1.
    """

    def __init__(self, *, budget: int, max_age: int, max_new_tokens: int, group_size: int, temperature: float):
        if budget < 1 or max_age < 1:
            raise ValueError(f"budget and max_age must be at least 1, got {budget} and {max_age}")
        self.budget, self.max_age, self.max_new_tokens = budget, max_age, max_new_tokens
        self.group_size, self.temperature = group_size, temperature
        self.groups: list[dict] = []

    def advance(self, model, tokenizer, rows: list, version: int) -> tuple[Rollouts | None, list, dict[str, float]]:
        """One iteration: start a group for each of `rows` (at least one named tuple with .prompt), add up to `budget` tokens
        of this policy to every unfinished response, and take out the groups whose responses are all finished.

        Returns their rollouts (None if there is no such group), their rows, and counts for the log.
        """
        for row, ids in zip(rows, tokenizer([row.prompt for row in rows])["input_ids"]):
            columns = ("tokens", "log_probs", "entropy", "versions")
            responses = [{name: [] for name in columns} | {"end": None} for _ in range(self.group_size)]
            self.groups.append({"row": tuple(row), "prompt": ids, "responses": responses})
        active = [(g["prompt"], r) for g in self.groups for r in g["responses"] if r["end"] is None]
        resumed = sum(bool(response["tokens"]) for _, response in active)
        cut = self._extend(model, tokenizer, active, version)
        done = [g for g in self.groups if all(r["end"] for r in g["responses"])]
        self.groups = [g for g in self.groups if not all(r["end"] for r in g["responses"])]
        counts = {"resumed_responses": resumed, "cut_by_age": cut, "waiting_groups": len(self.groups)}
        if not done:
            return None, [], counts
        rollouts = self._collect(done, tokenizer.pad_token_id or 0).to(model.device)
        first = rollouts.versions.masked_fill(~rollouts.mask, version).amin(1, keepdim=True)
        age = (version - rollouts.versions)[rollouts.mask].float()
        later = (rollouts.versions > first) & rollouts.mask
        counts |= {
            "token_age_mean": age.mean().item(),
            "token_age_max": age.max().item(),
            "resumed_tokens": (later.sum() / rollouts.mask.sum()).item(),
            "mixed_trajectories": later.any(1).float().mean().item(),
        }
        return rollouts, [type(rows[0])(*group["row"]) for group in done], counts

    def _extend(self, model, tokenizer, active: list[tuple[list[int], dict]], version: int) -> int:
        """Add this policy's tokens to the responses; returns how many were cut for their age."""
        prompts = [prompt + response["tokens"] for prompt, response in active]
        new = sample_rollouts(model, tokenizer, prompts, max_new_tokens=self.budget, temperature=self.temperature)
        new, cut = new.to("cpu"), 0
        for i, (_, response) in enumerate(active):
            length = min(int(new.mask[i].sum()), self.max_new_tokens - len(response["tokens"]))
            ended = not new.truncated[i] and length == int(new.mask[i].sum())
            for name, values in (("tokens", new.response_ids), ("log_probs", new.log_probs), ("entropy", new.entropy)):
                response[name] += values[i, :length].tolist()
            response["versions"] += [version] * length
            too_old = version - response["versions"][0] >= self.max_age
            if ended:
                response["end"] = "eos"
            elif len(response["tokens"]) >= self.max_new_tokens or too_old:
                response["end"] = "cut"
                cut += len(response["tokens"]) < self.max_new_tokens
        return cut

    def _collect(self, groups: list[dict], pad_id: int) -> Rollouts:
        responses = [response for group in groups for response in group["responses"]]
        prompts = [group["prompt"] for group in groups for _ in group["responses"]]
        return Rollouts(
            prompt_ids=pad(prompts, pad_id, "left"),
            prompt_mask=pad([[True] * len(prompt) for prompt in prompts], False, "left"),
            response_ids=pad([r["tokens"] for r in responses], pad_id),
            mask=pad([[True] * len(r["tokens"]) for r in responses], False),
            truncated=torch.tensor([r["end"] != "eos" for r in responses]),
            log_probs=pad([r["log_probs"] for r in responses], 0.0),
            entropy=pad([r["entropy"] for r in responses], 0.0),
            versions=pad([r["versions"] for r in responses], 0),
        )


def check_first_ratio(log_probs: Tensor, rollouts: Rollouts, version: int = 0, tolerance: float = 1e-3) -> None:
    """On the first full-batch update after sampling the policy IS the rollout policy: every ratio must be 1.

    Of partial rollouts only the tokens drawn by the newest policy, `version`, are asked. Reads one number on the host.
    Raises RuntimeError naming the usual causes if any |log ratio| exceeds tolerance (NaN passes: the loss shows it).
    """
    newest = rollouts.mask if rollouts.versions is None else rollouts.mask & (rollouts.versions == version)
    gap = ((log_probs.detach() - rollouts.log_probs).abs() * newest).max().item() if log_probs.numel() else 0.0
    if gap > tolerance:
        raise RuntimeError(
            f"the first update after sampling has a log importance ratio of {gap:.3g}, expected 0 within {tolerance}: "
            "rollout and training log-probs disagree (different temperature or dtype, dropout, a mask that is off by "
            "one, or weights that changed in between)"
        )
