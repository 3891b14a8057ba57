"""Countdown: a small verifiable task and a small model, so that RL runs in minutes on a CPU.

A problem gives three numbers and a target. A response is one or more attempts joined by `;`. Each
attempt applies two operators from left to right and writes down every result; only the last attempt
counts:

    <bos>348:44=                       the prompt: numbers 3, 4, 8, target 44; always 8 tokens
    4*8=32+3=35;3+8=11*4=44<eos>       a response: a miss, then a hit

A model that has missed tries again, so failing responses are longer than successful ones: negative
tokens outnumber positive ones. BAPO (arXiv 2510.18927, Figures 4 and 6) is about this imbalance.
"""

import itertools
import math
import random
import re
from collections.abc import Callable
from functools import cache

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from reward import Problem

PROMPT_TOKENS = 8  # <bos>, three digits, ":", two digits, "="
HELD_OUT = 256  # problems that are never trained on
WARM_START_STEPS = 6000
WARM_START_BATCH = 24  # demonstrations in a batch
REPORT_EVERY = 50  # steps of the supervised start
APPLY = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}
ANSWER = re.compile(r"[1-9]{3}:[0-9]{2}")


# ---------------------------------------------------------------- problems
@cache
def attempts_by_value(numbers: str) -> dict[int, list[str]]:
    """Every distinct attempt with the three digits `numbers`, by its value.

    Those of "348" with the value 44 are "3+8=11*4=44" and "8+3=11*4=44".
    """
    digits = [int(digit) for digit in numbers]
    attempts: dict[int, list[str]] = {}
    for a, b, c in sorted(set(itertools.permutations(digits))):
        for op1, op2 in itertools.product(APPLY, repeat=2):
            first = APPLY[op1](a, b)
            value = APPLY[op2](first, c)
            text = f"{a}{op1}{b}={first}{op2}{c}={value}"
            attempts.setdefault(value, []).append(text)
    return attempts


def problems(seed: int = 0) -> tuple[list[Problem], list[Problem]]:
    """All 1860 solvable problems in random order: 1604 to train on, and 256 held out."""
    solvable = []
    for digits in itertools.combinations_with_replacement("123456789", 3):
        numbers = "".join(digits)
        for target in sorted(attempts_by_value(numbers)):
            if 1 <= target <= 99:
                answer = f"{numbers}:{target:02d}"
                solvable.append(Problem(f"{answer}=", answer))
    random.Random(seed).shuffle(solvable)
    return solvable[HELD_OUT:], solvable[:HELD_OUT]


def grade(response: str, answer: str) -> bool:
    """Whether the last attempt of `response` is correct and hits the target in `answer`.

    The response is any text, without <eos>. Raises ValueError if `answer` is not like "348:44".
    """
    if not ANSWER.fullmatch(answer):
        raise ValueError(
            f"answer is {answer[:100]!r}; expected three digits 1-9, a colon and two digits, "
            'for example "348:44"'
        )
    numbers, _, target = answer.partition(":")
    last = response.rpartition(";")[2]
    return last in attempts_by_value(numbers).get(int(target), [])


def demonstration(problem: Problem, rng: random.Random, attempts: int) -> str:
    """A noisy demonstration: attempts until one is right, `attempts` at most.

    Each is right with probability 0.5; else it is correct arithmetic that misses the target. The
    text has at most 13 * attempts tokens, <eos> included.
    """
    by_value = attempts_by_value(problem.answer[:3])
    target = int(problem.answer[4:])
    misses = []
    for value, texts in by_value.items():
        if value != target:
            misses += texts
    written = []
    for _ in range(attempts):
        right = rng.random() < 0.5
        written.append(rng.choice(by_value[target] if right else misses))
        if right:
            break
    return ";".join(written)


# ---------------------------------------------------------------- the model
def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character, 20 in all. Encoding prepends <bos>; <eos> is left to the caller."""
    special = ["<pad>", "<bos>", "<eos>", "<unk>"]
    characters = "0123456789+-*=:;"
    vocabulary = {token: index for index, token in enumerate([*special, *characters])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()  # no spaces between the characters
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", vocabulary["<bos>"])]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


def build_model(tokenizer: PreTrainedTokenizerFast, seed: int = 0, **others) -> Qwen2ForCausalLM:
    """A randomly initialised Qwen2 on the CPU, in float32 and without dropout.

    `others` are fields of Qwen2Config that replace those given here.
    """
    sizes = {
        "vocab_size": len(tokenizer),
        "hidden_size": 64,
        "intermediate_size": 192,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": 128,
        "tie_word_embeddings": False,
        "attention_dropout": 0.0,
        # About 1 / sqrt(hidden_size). The default 0.02 suits wide models; this one learns slower.
        "initializer_range": 0.1,
    }
    config = Qwen2Config(
        **(sizes | others),
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    # Parameters are drawn from the global generator: seed it, and give it back as it was.
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return Qwen2ForCausalLM(config)


def supervised_start(
    seed: int = 0,
    attempts: int = 2,
    steps: int = WARM_START_STEPS,
    device: str = "cpu",
    progress: Callable[[str, int], None] | None = None,
    **sizes,
) -> tuple[Qwen2ForCausalLM, PreTrainedTokenizerFast]:
    """A model that has learned from noisy demonstrations, and its tokenizer: where RL begins.

    It has seen `steps` batches of WARM_START_BATCH demonstrations, with AdamW and a cosine
    schedule. `sizes` (fields of Qwen2Config) make a larger model. The result depends on the
    arguments, the number of threads and the device. progress(note, steps) is called every
    REPORT_EVERY steps.
    """
    tokenizer = build_tokenizer()
    model = build_model(tokenizer, seed, **sizes).to(device).train()
    peak_rate = 5e-3 * min(1, 128 / model.config.hidden_size)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=peak_rate, betas=(0.9, 0.98), weight_decay=0.01, fused=True
    )
    warm_up = max(1, steps // 20)

    def share_of_peak_rate(step: int) -> float:
        rising = (step + 1) / warm_up
        falling = 0.5 * (1 + math.cos(math.pi * step / steps))
        return min(rising, falling)

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, share_of_peak_rate)
    problems_to_learn, _ = problems()
    rng = random.Random(seed)
    for step in range(1, steps + 1):
        texts = []
        for problem in rng.choices(problems_to_learn, k=WARM_START_BATCH):
            response = demonstration(problem, rng, attempts)
            texts.append(problem.prompt + response + tokenizer.eos_token)
        loss = _supervised_loss(model, tokenizer, texts)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if progress and step % REPORT_EVERY == 0:
            progress(f"loss {loss.item():.3f}", REPORT_EVERY)
    return model, tokenizer


def _supervised_loss(
    model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, texts: list[str]
) -> torch.Tensor:
    """Mean cross-entropy, a scalar, of the tokens behind the prompts of B texts."""
    batch = tokenizer(texts, padding=True, padding_side="right", return_tensors="pt")
    batch = batch.to(model.device)
    targets = batch.input_ids.masked_fill(batch.attention_mask == 0, -100)
    targets = targets[:, PROMPT_TOKENS:]  # (B, R)
    # Padding is on the right, where a causal model does not look: no attention mask is needed.
    logits = model(input_ids=batch.input_ids[:, :-1]).logits
    logits = logits[:, PROMPT_TOKENS - 1 :]  # (B, R, V)
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
