"""Rollouts: responses sampled with Hugging Face `generate`, the log-probs of their tokens, and the
loading of the model that gives both.

The rollout policy's log-probs come from a forward pass after sampling, by the very function that
training uses (`token_log_probs`), not from the sampler's scores: kernels that differ would alone
move importance ratios by several per cent.

A batch of rollouts is one store, `Rollouts`. Whoever reads a part of it, such as the micro-batch of
one backward pass, names its rows.

Shapes: N responses, T response positions, L positions of prompt and response, V vocabulary.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from reward import Problem

# Tokens that one forward call reads, padding included: a CPU is up to a third faster with few of
# long responses, as they stay in its cache. This bounds no memory of training; micro-batches do.
READ_TOKENS = 2**12
READ_TOKENS_ON_CPU = 2**10
# Elements of the float32 logits [tokens, V] that exist at a time: 256 MiB, 441 tokens of Qwen2.
CHUNK_LOGITS = 2**26


@dataclass
class Rollouts:
    """N responses; those to one prompt are consecutive."""

    sequences: Tensor  # [N, L] int64: prompt, response, padding
    prompt_lengths: Tensor  # [N] int64
    response_ids: Tensor  # [N, T] int64, padded on the right
    mask: Tensor  # [N, T] bool: response tokens, the EOS included
    truncated: Tensor  # [N] bool: cut off, without EOS
    versions: Tensor  # [N, T] int64: the step whose policy drew each token
    rollout_log_probs: (
        Tensor  # [N, T] float32, of the policy that drew each token; 0 outside the mask
    )
    entropy: Tensor  # [N, T] float32 nats, of the distribution that each token was drawn from
    advantages: Tensor  # [N] float32; 0 until whoever trains on them fills them in

    @cached_property
    def lengths(self) -> list[int]:
        """Tokens of each prompt and response, without padding."""
        return (self.prompt_lengths + self.mask.sum(1)).tolist()


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
    """group_size responses to each prompt (token ids), drawn with torch's generator.

    model: from `load_policy`, which leaves it no sampling options of its own. top_p < 1 is for
    evaluation only: it makes the log-probs of `token_log_probs` wrong. batch_tokens bounds the
    key-value cache: (prompt + new tokens) * responses. What does not fit at once is drawn in
    several batches, prompts of similar length together. All that `collect` leaves 0 is left 0.
    """
    eos_ids = model.generation_config.eos_token_id
    asked = [prompt for prompt in prompts for _ in range(group_size)]
    responses: list[list[int]] = [[] for _ in asked]
    for rows in pack_by_length([len(prompt) + max_new_tokens for prompt in asked], batch_tokens):
        tensors = [torch.tensor(asked[row], device=model.device) for row in rows]
        prompt_ids = pad_sequence(tensors, True, -1, padding_side="left")
        sequences = model.generate(
            prompt_ids.clamp(min=0),
            attention_mask=(prompt_ids >= 0).long(),
            max_new_tokens=max_new_tokens,
            do_sample=True,
            temperature=temperature,
            top_p=top_p,
            top_k=0,  # the library's default is 50
        )
        drawn = sequences[:, prompt_ids.shape[1] :]
        lengths = response_mask(drawn, eos_ids).sum(1).tolist()
        for row, ids, length in zip(rows, drawn.tolist(), lengths):
            responses[row] = ids[:length]
    truncated = [response[-1] not in eos_ids for response in responses]
    return collect(asked, responses, truncated, model.device)


def response_mask(response_ids: Tensor, eos_ids: list[int]) -> Tensor:
    """True up to and including the first EOS: bool [N, T].

    By position, never `token != pad`: pad and EOS are often the same token, and the EOS is trained.
    """
    is_eos = torch.isin(response_ids, torch.tensor(eos_ids, device=response_ids.device))
    eos_before = is_eos.cumsum(1) - is_eos.long()
    return eos_before == 0


def collect(
    prompts: list[list[int]], responses: list[list[int]], truncated: list[bool], device
) -> Rollouts:
    """Rollouts of token ids; all that is not known of them yet is 0."""
    response_ids = pad_rows(responses, device)
    mask = pad_rows([[True] * len(ids) for ids in responses], device)
    return Rollouts(
        sequences=pad_rows([prompt + ids for prompt, ids in zip(prompts, responses)], device),
        prompt_lengths=torch.tensor([len(prompt) for prompt in prompts], device=device),
        response_ids=response_ids,
        mask=mask,
        truncated=torch.tensor(truncated, device=device),
        versions=torch.zeros_like(response_ids),
        rollout_log_probs=torch.zeros(mask.shape, device=device),
        entropy=torch.zeros(mask.shape, device=device),
        advantages=torch.zeros(len(mask), device=device),
    )


def pad_rows(rows: list[list], device) -> Tensor:
    """Lists of unequal length as one tensor [N, longest], padded with 0 on the right."""
    return pad_sequence([torch.tensor(row) for row in rows], batch_first=True).to(device)


def pack_by_length(lengths: list[int], max_tokens: int) -> list[list[int]]:
    """Rows in packs of at most max_tokens, each padded to its longest row.

    The longest rows come first, so that rows of similar length share a pack, and memory runs out
    at once or never. What fits one pack keeps its order; a row longer than max_tokens has a pack of
    its own. No rows make no pack.
    """
    if lengths and max(lengths) * len(lengths) <= max_tokens:
        return [list(range(len(lengths)))]
    packs: list[list[int]] = []
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        longest_of_pack = lengths[packs[-1][0]] if packs else 0
        if not packs or longest_of_pack * (len(packs[-1]) + 1) > max_tokens:
            packs.append([])
        packs[-1].append(row)
    return packs


def response_texts(tokenizer, rollouts: Rollouts) -> list[str]:
    """Each response as text, without the EOS that ends it.

    Other special tokens stay visible: a grader must see them.
    """
    lengths = rollouts.mask.sum(1) - (~rollouts.truncated).long()
    rows = zip(rollouts.response_ids.tolist(), lengths.tolist())
    ids = [row[:length] for row, length in rows]
    return tokenizer.batch_decode(
        ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
    )


# ---------------------------------------------------------------- log-probs
def token_log_probs(
    model, rollouts: Rollouts, rows: Tensor, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """log softmax(logits / temperature) of the response tokens of `rows`, and their entropies.

    rows: int64 [n], numbers of rows. Returns two float32 [n, T], 0 outside the mask; the entropy is
    exact, in nats, and detached. The model reads rows of similar length together. Its head reads a
    chunk of tokens at a time, again in the backward pass, so that the logits of all of them never
    exist at one time.
    """
    decoder, head = decoder_and_head(model)
    lengths = [rollouts.lengths[row] for row in rows.tolist()]
    chunk = max(1, CHUNK_LOGITS // head.out_features)
    read_chunk = partial(_chunk_log_probs, head, temperature)
    if torch.is_grad_enabled() and sum(lengths) > chunk:
        read_chunk = partial(checkpoint, read_chunk, use_reentrant=False, preserve_rng_state=False)
    places = []  # [2, tokens]: where in the result the tokens of each pack belong
    log_probs = []
    entropies = []
    read_tokens = READ_TOKENS_ON_CPU if rows.device.type == "cpu" else READ_TOKENS
    for pack in pack_by_length(lengths, read_tokens):
        longest = max(lengths[i] for i in pack)
        pack = torch.tensor(pack, device=rows.device)
        # The padding is on the right, where a causal model does not look: no attention mask.
        input_ids = rollouts.sequences[rows[pack], :longest]
        states = decoder(input_ids=input_ids, use_cache=False).last_hidden_state
        # Only response tokens go on; each is predicted one position before its own.
        row, position = rollouts.mask[rows[pack]].nonzero(as_tuple=True)
        places.append(torch.stack((pack[row], position)))
        position = position + rollouts.prompt_lengths[rows[pack]][row]
        states = states[row, position - 1]
        targets = input_ids[row, position]
        for states_of_chunk, targets_of_chunk in zip(states.split(chunk), targets.split(chunk)):
            chunk_log_probs, chunk_entropy = read_chunk(states_of_chunk, targets_of_chunk)
            log_probs.append(chunk_log_probs)
            entropies.append(chunk_entropy)
    zeros = torch.zeros(len(rows), rollouts.mask.shape[1], device=rows.device)
    place = tuple(torch.cat(places, dim=1))
    return (
        zeros.index_put(place, torch.cat(log_probs)),
        zeros.index_put(place, torch.cat(entropies)),
    )


def _chunk_log_probs(
    head: nn.Module, temperature: float, states: Tensor, targets: Tensor
) -> tuple[Tensor, Tensor]:
    """Log-probs of the targets and entropies, float32 [tokens] each, from hidden states."""
    log_softmax = (head(states).float() / temperature).log_softmax(-1)
    with torch.no_grad():
        entropy = torch.special.entr(log_softmax.exp()).sum(-1)
    return log_softmax.gather(-1, targets.unsqueeze(-1)).squeeze(-1), entropy


def micro_batches(rollouts: Rollouts, rows: Tensor, max_tokens: int) -> list[Tensor]:
    """`rows` in pieces of at most max_tokens tokens each, padding included; [] for no rows."""
    lengths = [rollouts.lengths[row] for row in rows.tolist()]
    return [rows[pack] for pack in pack_by_length(lengths, max_tokens)]


@torch.no_grad()
def log_probs_now(
    model, rollouts: Rollouts, parts: list[Tensor], temperature: float
) -> tuple[Tensor, Tensor]:
    """`token_log_probs` of the given micro-batches without gradient: [N, T], 0 in other rows."""
    log_probs = torch.zeros_like(rollouts.rollout_log_probs)
    entropy = torch.zeros_like(rollouts.rollout_log_probs)
    for rows in parts:
        log_probs[rows], entropy[rows] = token_log_probs(model, rollouts, rows, temperature)
    return log_probs, entropy


def autocast(device: str, precision: str) -> torch.autocast:
    """Forward passes in the given precision.

    Trained weights stay float32: in bfloat16 a step of 1e-6 would round to nothing.
    """
    enabled = precision == "bfloat16"
    return torch.autocast(torch.device(device).type, torch.bfloat16, enabled=enabled)


# ---------------------------------------------------------------- partial rollouts
@dataclass
class PartialResponse:
    """A response that several policies may draw; a list has an entry for every token."""

    prompt: list[int]
    ids: list[int] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)  # the step whose policy drew it
    rollout_log_probs: list[float] = field(default_factory=list)  # under that policy
    entropy: list[float] = field(default_factory=list)
    finished: bool = False
    truncated: bool = False


# They are in checkpoints, which torch.load reads with weights_only=True.
torch.serialization.add_safe_globals([PartialResponse, Problem])


@dataclass
class PartialRollouts:
    """Partial rollouts (section 5.3): responses that run past a step's token budget wait here, and
    later policies resume them. No group waits for more than max_new_tokens / budget steps.
    """

    budget: int  # most tokens that a step adds to a response
    max_new_tokens: int  # this and the next three as in `generate`
    group_size: int
    temperature: float
    batch_tokens: int = 2**18
    groups: list[tuple[Problem, list[PartialResponse]]] = field(default_factory=list)

    @torch.no_grad()
    def advance(
        self, model, problems: list[Problem], step: int
    ) -> tuple[Rollouts | None, list[Problem]]:
        """One step: start a group for each problem (its prompt is token ids), add up to `budget`
        tokens of this policy to every unfinished response, and take out the groups whose responses
        are all finished.

        Returns the rollouts of those groups, None if there is none, and their problems.
        """
        for problem in problems:
            group = [PartialResponse(problem.prompt) for _ in range(self.group_size)]
            self.groups.append((problem, group))
        responses = [response for _, group in self.groups for response in group]
        self._extend(model, [r for r in responses if not r.finished], step)

        finished = []
        waiting = []
        for problem, group in self.groups:
            is_finished = all(response.finished for response in group)
            (finished if is_finished else waiting).append((problem, group))
        self.groups = waiting
        if not finished:
            return None, []
        responses = [response for _, group in finished for response in group]
        rollouts = collect(
            [response.prompt for response in responses],
            [response.ids for response in responses],
            [response.truncated for response in responses],
            model.device,
        )
        for name in ("versions", "rollout_log_probs", "entropy"):
            values = [getattr(response, name) for response in responses]
            setattr(rollouts, name, pad_rows(values, model.device))
        return rollouts, [problem for problem, _ in finished]

    def _extend(self, model, unfinished: list[PartialResponse], step: int) -> None:
        """Add this policy's tokens, with their log-probs and entropies."""
        # One limit for all: some may be drawn past max_new_tokens. What is too much is dropped.
        drawn = generate(
            model,
            [response.prompt + response.ids for response in unfinished],
            max_new_tokens=min(self.budget, self.max_new_tokens),
            temperature=self.temperature,
            batch_tokens=self.batch_tokens,
        )
        rows = torch.arange(len(unfinished), device=model.device)
        log_probs, entropy = token_log_probs(model, drawn, rows, self.temperature)
        drawn_tokens = drawn.mask.sum(1).tolist()
        for row, response in enumerate(unfinished):
            used = min(drawn_tokens[row], self.max_new_tokens - len(response.ids))
            response.ids += drawn.response_ids[row, :used].tolist()
            response.versions += [step] * used
            response.rollout_log_probs += log_probs[row, :used].tolist()
            response.entropy += entropy[row, :used].tolist()
            ended = used == drawn_tokens[row] and not drawn.truncated[row]
            response.finished = ended or len(response.ids) == self.max_new_tokens
            response.truncated = response.finished and not ended


# ---------------------------------------------------------------- the model
class Float32Head(nn.Linear):
    """An output head that computes in float32, also under autocast.

    Logits in bfloat16 would have steps of 0.125 in [16, 32), more than |log 0.9|: rounding alone
    would carry ratios over a clip bound.
    """

    def forward(self, states: Tensor) -> Tensor:
        """Logits float32 [..., V]."""
        with torch.autocast(states.device.type, enabled=False):
            return nn.functional.linear(states.float(), self.weight, self.bias)


def load_policy(
    name: str,
    device: str = "cpu",
    *,
    precision: str = "float32",
    lora_rank: int = 0,
    gradient_checkpointing: bool = False,
    trainable: bool = True,
) -> tuple:
    """Model and tokenizer of a local folder or a hub id.

    The model is in evaluation mode (no dropout), its trained weights and its head are float32, and
    its generation config holds nothing but every id that ends a response: sampling options of its
    own would make the log-probs wrong. lora_rank > 0 trains adapters (peft) at every linear layer
    but the head; with bfloat16 the frozen weights are then kept in it, as all are if the model is
    not `trainable`. A folder of adapters is loaded with its base. gradient_checkpointing computes
    every layer again in the backward pass.

    Raises ValueError for what cannot be loaded, for weights that are missing, NaN or of another
    shape, for a tokenizer or an EOS that is missing, and for models that scale or cap their logits.
    """
    # With bfloat16 passes the float32 head may use TF32 on a GPU, which "high" allows.
    torch.set_float32_matmul_precision("high" if precision == "bfloat16" else "highest")
    has_adapters = Path(name, "adapter_config.json").exists()
    frozen_in_bfloat16 = precision == "bfloat16" and (lora_rank or has_adapters or not trainable)
    dtype = torch.bfloat16 if frozen_in_bfloat16 else torch.float32
    base = base_of(name)
    _, tokenizer = load_without_weights(name)
    with loading("the weights", base):
        model, report = AutoModelForCausalLM.from_pretrained(
            base, dtype=dtype, output_loading_info=True, ignore_mismatched_sizes=True
        )
    if has_adapters:
        from peft import PeftModel

        with loading("the adapters", name):
            model = PeftModel.from_pretrained(model, name, is_trainable=True)
    wrong = sorted(report["missing_keys"])
    wrong += sorted(str(mismatch[0]) for mismatch in report["mismatched_keys"])
    if wrong:
        raise ValueError(
            f"model: the files of {base!r} have no weights, or some of another shape, for"
            f" {', '.join(wrong[:5])} ({len(wrong)} in all): they would be random numbers;"
            " download or save the model again"
        )
    if lora_rank and not has_adapters:  # 2 B A x is added to W x, B being zero at first
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(0)  # A is the same for every seed
        adapters = LoraConfig(r=lora_rank, lora_alpha=2 * lora_rank, target_modules="all-linear")
        model = get_peft_model(model, adapters)
    if hasattr(model, "peft_config"):  # a set, which every process would save in another order
        settings = model.peft_config["default"]
        settings.target_modules = sorted(settings.target_modules)
    model = model.to(device).eval()
    _with_head(model).generation_config = _plain_generation_config(model, tokenizer, name)
    decoder, head = decoder_and_head(model)
    if type(head) is nn.Linear:
        head.float()
        head.__class__ = Float32Head
    with torch.no_grad(), autocast(device, precision):
        ids = torch.arange(3, device=device).unsqueeze(0)
        states = decoder(input_ids=ids, use_cache=False).last_hidden_state
        logits = model(input_ids=ids, use_cache=False).logits
        if logits.isnan().any():
            raise ValueError(
                f"model: {name!r} gives logits that are NaN: train or download it again"
            )
        if not torch.equal(head(states), logits):
            raise ValueError(
                f"model: {name!r} scales or caps the logits that its head gives, which"
                " rollout.token_log_probs does not: take another model"
            )
    if gradient_checkpointing:
        _checkpoint_layers(model)
    return model, tokenizer


def load_without_weights(name: str) -> tuple:
    """Configuration and tokenizer of a local folder, which may hold adapters, or of a hub id.

    Raises ValueError, naming the file, for what cannot be loaded.
    """
    base = base_of(name)
    with loading("config.json", base):
        config = AutoConfig.from_pretrained(base)
    with loading("tokenizer.json", name):
        tokenizer = AutoTokenizer.from_pretrained(name)
    if not tokenizer("0").input_ids:  # what transformers makes of a folder without tokenizer.json
        raise ValueError(
            f"model: the tokenizer in {name!r} has no tokens: save it there again, with"
            " AutoTokenizer.from_pretrained(BASE).save_pretrained(FOLDER)"
        )
    return config, tokenizer


def base_of(name: str) -> str:
    """Where the weights lie: of adapters with their base, else with `name`. A folder's name becomes
    absolute, because adapters name their base by it.

    Raises ValueError for a folder that is not there: the hub would be asked for half a minute.
    """
    if Path(name, "adapter_config.json").exists():
        with loading("adapter_config.json", name):
            from peft import PeftConfig  # a package that Countdown does not need

            name = str(PeftConfig.from_pretrained(name).base_model_name_or_path)
    path = Path(name)
    if path.is_dir():
        return str(path.resolve())
    is_hub_id = name[:1].isalnum() and name.count("/") <= 1
    has_neighbours = "/" in name and path.parent.is_dir()
    if path.exists() or has_neighbours or not is_hub_id:
        raise ValueError(f"model: there is no folder {name!r}: give one, or a hub id")
    return name


@contextmanager
def loading(what: str, name: str) -> Iterator[None]:
    """A block in which whatever a library raises becomes a ValueError of one line."""
    try:
        yield
    except Exception as error:  # of many kinds: no such model, a damaged file, another version
        cause = " ".join(f"{error}".split())
        raise ValueError(
            f"model: cannot load {what} of {name!r} ({type(error).__name__}: {cause}). Give a"
            " folder with config.json, weights and tokenizer, or a hub id; for a gated model,"
            " accept its terms on the hub and run `hf auth login`"
        ) from error


def decoder_and_head(model) -> tuple[nn.Module, nn.Module]:
    """What makes hidden states of tokens, and what makes logits of hidden states."""
    with_head = _with_head(model)
    return with_head.base_model, with_head.get_output_embeddings()


def _with_head(model):
    """The model that draws and gives logits: the one inside the adapters, where there are some."""
    return model.get_base_model() if hasattr(model, "peft_config") else model


def _plain_generation_config(model, tokenizer, name: str) -> GenerationConfig:
    """Every token that ends a response: those of the model (chat models list several) and the
    tokenizer's. Raises ValueError if none of them can be drawn: a response could never end."""
    _, head = decoder_and_head(model)
    ids = set()
    for source in (model.generation_config, model.config, tokenizer):
        named = getattr(source, "eos_token_id", None)
        ids |= set(named if isinstance(named, list) else [named])
    ids -= {None}
    known = sorted(token for token in ids if token < head.out_features)
    if not known:
        raise ValueError(
            f"model: {name!r} and its tokenizer name as EOS tokens {sorted(ids)}, none of which is"
            f" among the {head.out_features} that the model draws: set tokenizer.eos_token, or no"
            " response could ever end"
        )
    return GenerationConfig(eos_token_id=known, pad_token_id=known[0])


def _checkpoint_layers(model) -> None:
    """transformers checkpoints layers in training mode alone, which turns dropout on.

    Under no_grad nothing changes: `generate` keeps its key-value cache.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer  # slow

    layers = [layer for layer in model.modules() if isinstance(layer, GradientCheckpointingLayer)]
    if not layers:
        raise ValueError(
            f"gradient_checkpointing: {type(model).__name__} does not support it; leave it out"
        )
    for layer in layers:
        layer.forward = partial(
            checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False
        )
