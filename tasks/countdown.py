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
from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F
import transformers  # as a module: Qwen2's code is loaded where it is used, not for --help
from filelock import FileLock
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from support.runs import write_atomically
from tasks import Problem, Task

PROMPT_TOKENS = 8  # <bos>, three digits, ":", two digits, "="
HELD_OUT = 256  # problems that are never trained on
ATTEMPTS = 2  # most attempts of a demonstration
SUPERVISED_STEPS = 6000
APPLY = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}


# ---------------------------------------------------------------- problems
@cache
def attempts_by_answer(numbers: str) -> dict[str, list[str]]:
    """Return answer -> all distinct attempts with the three digits `numbers` that are right for it.

    An answer joins numbers and target: those of "348:44" are "3+8=11*4=44" and "8+3=11*4=44".
    """
    attempts = {}
    orders = sorted(set(itertools.permutations(map(int, numbers))))
    for (a, b, c), op1, op2 in itertools.product(orders, APPLY, APPLY):
        first = APPLY[op1](a, b)
        value = APPLY[op2](first, c)
        answer = f"{numbers}:{value:02d}"
        attempts.setdefault(answer, []).append(f"{a}{op1}{b}={first}{op2}{c}={value}")
    return attempts


def grade(response: str, answer: str) -> bool:
    """Return whether the last attempt of `response` (any text, without <eos>) is right."""
    return response.rpartition(";")[2] in attempts_by_answer(answer[:3])[answer]


def demonstration(answer: str, rng: random.Random) -> str:
    """Return a noisy demonstration: attempts until one is right, ATTEMPTS at most.

    Each is right with probability 0.5; else it is correct arithmetic that misses the target. The
    text has at most 13 * ATTEMPTS tokens, <eos> included.
    """
    by_answer = attempts_by_answer(answer[:3])
    hits = by_answer[answer]
    misses = [attempt for attempt in itertools.chain(*by_answer.values()) if attempt not in hits]
    attempts = []
    for _ in range(ATTEMPTS):
        is_right = rng.random() < 0.5
        attempts.append(rng.choice(hits if is_right else misses))
        if is_right:
            break
    return ";".join(attempts)


def load_task() -> Task:
    """Return the 1860 solvable problems in a fixed random order, and the grader.

    1604 are to train on, and 256 held out.
    """
    tokenizer = build_tokenizer()
    problems = []
    for numbers in map("".join, itertools.combinations_with_replacement("123456789", 3)):
        for target in range(1, 100):
            answer = f"{numbers}:{target:02d}"
            if answer in attempts_by_answer(numbers):
                problems.append(Problem(tokenizer(f"{answer}=").input_ids, answer))
    random.Random(0).shuffle(problems)
    return Task(problems[HELD_OUT:], problems[:HELD_OUT], grade)


# ---------------------------------------------------------------- the model
def build_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """Return a tokenizer with 20 tokens, one per character.

    Encoding prepends <bos>; <eos> is left to the caller.
    """
    tokens = ["<pad>", "<bos>", "<eos>", "<unk>", *"0123456789+-*=:;"]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()  # no spaces between the characters
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", vocabulary["<bos>"])]
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
    )


def build_model(
    tokenizer: transformers.PreTrainedTokenizerFast, seed: int = 0
) -> "transformers.Qwen2ForCausalLM":
    """Return a randomly initialised Qwen2 on the CPU, in float32 and without dropout."""
    config = transformers.Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=128,
        # About 1 / sqrt(hidden_size). With the default 0.02, which is for wider models, this one
        # learns more slowly.
        initializer_range=0.1,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(seed)  # parameters are drawn from the global generator
    return transformers.Qwen2ForCausalLM(config)


def train_supervised(seed: int) -> tuple:
    """Return a model that has learned from noisy demonstrations, and its tokenizer.

    RL begins with this model. It has seen SUPERVISED_STEPS batches of 24 demonstrations, with AdamW
    and a learning rate that rises to 5e-3 and falls as a cosine, on the CPU. The result depends on
    the seed and the number of threads.
    """
    print(f"training the supervised checkpoint of seed {seed}: about two minutes", flush=True)
    tokenizer = build_tokenizer()
    model = build_model(tokenizer, seed)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), fused=True)
    problems = load_task().train
    rng = random.Random(seed)
    for step in range(SUPERVISED_STEPS):
        rising = 20 * (step + 1) / SUPERVISED_STEPS
        falling = 0.5 * (1 + math.cos(math.pi * step / SUPERVISED_STEPS))
        optimizer.param_groups[0]["lr"] = 5e-3 * min(rising, falling)
        batch = rng.choices(problems, k=24)
        texts = [f"{answer}={demonstration(answer, rng)}<eos>" for _, answer in batch]
        # Padding is on the right, where a causal model does not look: no attention mask is needed.
        ids = tokenizer(texts, padding=True, return_tensors="pt").input_ids
        logits = model(input_ids=ids[:, :-1]).logits[:, PROMPT_TOKENS - 1 :]  # [B, T, V]
        targets = ids[:, PROMPT_TOKENS:].flatten()
        loss = F.cross_entropy(logits.flatten(0, 1), targets, ignore_index=tokenizer.pad_token_id)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return model, tokenizer


def supervised_checkpoint(starts: Path, seed: int) -> Path:
    """Return the folder in `starts` that holds train_supervised(seed).

    It is made if it is missing. A process that needs it while another one makes it waits.
    """
    folder = starts / f"attempts{ATTEMPTS}-steps{SUPERVISED_STEPS}-seed{seed}"

    def save(path: Path) -> None:
        for part in train_supervised(seed):
            part.save_pretrained(path)

    with FileLock(folder.with_suffix(".lock")):
        if not folder.exists():
            write_atomically(folder, save)
    return folder
