"""Countdown: a small verifiable task and a small warm-started model, so that RL runs in minutes on a CPU.

A problem gives three numbers and a target. A response is one or more attempts joined by `;`, each applying two
operators from left to right and writing down every result; only the last attempt counts:

    <bos>348:44=                       the prompt: numbers 3, 4, 8, target 44; always 8 tokens
    4*8=32+3=35;3+8=11*4=44<eos>       a response: a miss, then a hit

A model that has missed tries again, so failing responses are longer than successful ones: negative tokens outnumber
positive ones, the imbalance that BAPO (arXiv 2510.18927, Figures 4 and 6) is about.
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
HELD_OUT = 256
WARM_START_STEPS = 6000
APPLY = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}
ATTEMPT = re.compile(r"([1-9])([-+*])([1-9])=-?[0-9]{1,2}([-+*])([1-9])=-?[0-9]{1,3}")


def attempt(a: int, op1: str, b: int, op2: str, c: int) -> tuple[str, int]:
    """The attempt `a op1 b op2 c` as text, and its value: (3, "+", 8, "*", 4) -> ("3+8=11*4=44", 44)."""
    first = APPLY[op1](a, b)
    value = APPLY[op2](first, c)
    return f"{a}{op1}{b}={first}{op2}{c}={value}", value


@cache
def attempts_by_value(numbers: str) -> dict[int, list[str]]:
    """Every distinct attempt with these numbers, grouped by its value."""
    found: dict[int, list[str]] = {}
    for a, b, c in sorted(set(itertools.permutations(map(int, numbers)))):
        for op1, op2 in itertools.product(APPLY, repeat=2):
            text, value = attempt(a, op1, b, op2, c)
            found.setdefault(value, []).append(text)
    return found


def problems(seed: int = 0) -> tuple[list[Problem], list[Problem]]:
    """All 1860 solvable problems in random order, as 1604 training and 256 held-out rows. No problem is in both."""
    triples = map("".join, itertools.combinations_with_replacement("123456789", 3))
    answers = [f"{n}:{target:02d}" for n in triples for target in sorted(attempts_by_value(n)) if 1 <= target <= 99]
    rows = [Problem(f"{answer}=", answer) for answer in answers]
    random.Random(seed).shuffle(rows)
    return rows[HELD_OUT:], rows[:HELD_OUT]


def grade(response: str, answer: str) -> bool:
    """Whether the last attempt of `response` (any text, without <eos>) is correct and hits the target in `answer`.
    ValueError if `answer` is not like "348:44"."""
    if not re.fullmatch(r"[1-9]{3}:[0-9]{2}", answer):
        raise ValueError(f'answer is {answer!r}; expected three digits 1-9, ":", two digits, for example "348:44"')
    last = response.rpartition(";")[2]
    if not (match := ATTEMPT.fullmatch(last)):
        return False
    a, op1, b, op2, c = match.groups()
    # Writing the attempt again and comparing texts needs no parsing of untrusted numbers (int() accepts "1_0" or "１").
    text, value = attempt(int(a), op1, int(b), op2, int(c))
    return last == text and sorted(a + b + c) == sorted(answer[:3]) and value == int(answer[4:])


def demonstration(row: Problem, rng: random.Random, attempts: int = 4) -> str:
    """A noisy demonstration: attempts until one is right, `attempts` at most; each is right with probability 0.5, or else
    correct arithmetic that misses the target. It has at most 13 * attempts tokens, <eos> included."""
    by_value, target = attempts_by_value(row.answer[:3]), int(row.answer[4:])
    wrong = [text for value, texts in by_value.items() if value != target for text in texts]
    written = []
    for _ in range(attempts):
        right = rng.random() < 0.5
        written.append(rng.choice(by_value[target] if right else wrong))
        if right:
            break
    return ";".join(written)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character, 20 in all. Encoding prepends <bos>; <eos> is left to the caller."""
    special = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>"}
    vocabulary = {token: i for i, token in enumerate([*special.values(), *"0123456789+-*=:;"])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()  # no spaces between the characters
    tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", vocabulary["<bos>"])])
    options = {"padding_side": "left", "clean_up_tokenization_spaces": False}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special, **options)


def build_model(tokenizer: PreTrainedTokenizerFast, seed: int = 0, **others) -> Qwen2ForCausalLM:
    """A randomly initialised Qwen2 on the CPU, in float32 and without dropout; `others`: sizes of Qwen2Config."""
    sizes = {"vocab_size": len(tokenizer), "hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 128}
    special = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    # A range of about 1 / sqrt(hidden_size); the default 0.02 suits wide models, this one learns slower.
    sizes |= {"initializer_range": 0.1, "tie_word_embeddings": False, "attention_dropout": 0.0} | others
    # Parameters are drawn from the global generator: seed it, and give it back to the caller as it was.
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return Qwen2ForCausalLM(Qwen2Config(**(sizes | others), **special))


def supervised_start(
    seed: int = 0,
    attempts: int = 2,
    steps: int = WARM_START_STEPS,
    device: str = "cpu",
    progress: Callable[[str, int], None] | None = None,
    **sizes,
) -> tuple[Qwen2ForCausalLM, PreTrainedTokenizerFast]:
    """A model that has learned from `steps` batches of 24 noisy demonstrations, and its tokenizer: where RL begins.

    AdamW with a cosine schedule. `sizes` (of Qwen2Config) make a larger model. The result depends on the arguments, the
    number of threads and the device. progress(note, steps) is called every 50 steps.
    """
    tokenizer = build_tokenizer()
    model = build_model(tokenizer, seed, **sizes).to(device).train()
    peak_rate = 5e-3 * min(1, 128 / model.config.hidden_size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=peak_rate, betas=(0.9, 0.98), weight_decay=0.01, fused=True)
    warm_up = max(1, steps // 20)

    def share_of_peak_rate(step: int) -> float:
        return min((step + 1) / warm_up, 0.5 * (1 + math.cos(math.pi * step / steps)))

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, share_of_peak_rate)
    problems_to_learn, _ = problems()
    rng = random.Random(seed)
    for step in range(1, steps + 1):
        chosen = rng.choices(problems_to_learn, k=24)
        texts = [problem.prompt + demonstration(problem, rng, attempts) + tokenizer.eos_token for problem in chosen]
        batch = tokenizer(texts, padding=True, padding_side="right", return_tensors="pt").to(device)
        targets = batch.input_ids.masked_fill(batch.attention_mask == 0, -100)[:, PROMPT_TOKENS:]  # (B, R)
        # Padding is on the right, where a causal model does not look: no attention mask is needed.
        logits = model(input_ids=batch.input_ids[:, :-1]).logits[:, PROMPT_TOKENS - 1 :]  # (B, R, V)
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if progress and (step % 50 == 0 or step == steps):
            progress(f"loss {loss.item():.3f}", 50 if step % 50 == 0 else steps % 50)
    return model, tokenizer
