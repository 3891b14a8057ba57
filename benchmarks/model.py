"""Speed and memory of train.py's parts for a model built from its public configuration, with random weights. Prints JSON.

    python benchmarks/model.py                                          # the Countdown model
    python benchmarks/model.py --size small                             # a small Qwen2, 6 M parameters
    python benchmarks/model.py --size 0.5b --prompts 16 --tokens 512    # on a GPU: Qwen2.5-0.5B; also 1.5b, 3b, 7b

Tokens drawn and trained per second, peak memory, the search's own time, and seconds of an update in one micro-batch and in
several, where BAPO needs one more forward pass: with GRPO's fixed bounds, with BAPO's search, and the least that any trainer
must do, one forward and backward pass of the same packed tokens through the same model with a plain cross-entropy, and an
optimizer step; on a GPU also how often the host waits for the device. Ratios of the rollout policy are drawn at random (sigma
0.1), since BAPO at ratio 1 has nothing to do. What is compared takes turns; medians.
"""

import argparse
import json
import platform
import resource
import statistics
import sys
import time
import warnings
from functools import partial
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
import transformers
from transformers import Qwen2Config, Qwen2ForCausalLM

import countdown
import rollout
import support.arms
import support.batches
import support.evaluation
import support.metrics
import support.models
import train
from bapo import bapo_loss, search_clip_bounds

# config.json of Qwen2.5 on the hub, of these fields
FIELDS = (
    "hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads vocab_size tie_word_embeddings"
)
SIZES = {
    "small": (256, 1024, 4, 4, 2, 8192, True),
    "0.5b": (896, 4864, 24, 14, 2, 151936, True),
    "1.5b": (1536, 8960, 28, 12, 2, 151936, True),
    "3b": (2048, 11008, 36, 16, 2, 151936, True),
    "7b": (3584, 18944, 28, 28, 4, 152064, False),
}


def build(size: str, device: str) -> Qwen2ForCausalLM:
    """Random float32 weights."""
    if size == "countdown":
        return countdown.build_model(countdown.build_tokenizer()).to(device).eval()
    sizes = dict(zip(FIELDS.split(), SIZES[size]))
    eos = list(range(sizes["vocab_size"] // 128))  # random responses end after 128 tokens on average
    torch.manual_seed(0)
    with torch.device(device):
        return Qwen2ForCausalLM(Qwen2Config(**sizes, max_position_embeddings=32768, eos_token_id=eos)).eval()


def update(model, optimizer, batch: support.batches.Batch, arm: support.arms.Arm, options) -> None:
    """One optimizer step, as train.train_run makes its second one on a batch."""
    bounds, loss = support.batches.bounds_of_update(model, batch, 2, arm, options), 0.0
    now = torch.zeros_like(batch.weights), torch.zeros_like(batch.weights)
    for rows, part in batch.micro_batches:
        columns = slice(part.mask.shape[1])
        with rollout.autocast(options.device, options.precision):
            log_probs, entropy = rollout.token_log_probs(model, part, options.temperature)
        old, weights = batch.rollouts.log_probs[rows, columns], batch.weights[rows, columns]
        arguments = (log_probs, old, batch.advantages[rows], part.mask, arm.search)
        part_loss, found = bapo_loss(*arguments, weights=weights, bounds=bounds)
        part_loss.backward()
        loss += part_loss.detach()
        now[0][rows, columns], now[1][rows, columns] = log_probs.detach(), entropy
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    support.metrics.read_numbers(
        support.metrics.update_metrics(found, bounds, *now, batch, arm) | {"loss": loss, "grad_norm": norm}
    )
    optimizer.step()
    optimizer.zero_grad()


def least(model, optimizer, batch: support.batches.Batch, options) -> None:
    """The least that an optimizer step on these tokens takes: logits of the response tokens alone, and no metric."""
    for _, part in batch.micro_batches:
        loss = 0.0
        for bucket in part.buckets:
            with rollout.autocast(options.device, options.precision):
                states = model.base_model(input_ids=bucket.input_ids, use_cache=False).last_hidden_state
                logits = model.get_output_embeddings()(states.flatten(0, 1).index_select(0, bucket.predictors))
            loss = loss + torch.nn.functional.cross_entropy(logits.float(), bucket.targets, reduction="sum")
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def clock(device: str) -> float:
    """Seconds, once the device has done its work; on a CPU of processor time, which other processes hardly change."""
    if device == "cpu":
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def paired_medians(functions: list, repeats: int, device: str = "cpu") -> list[float]:
    """Seconds of each function; they take turns, so that a drift of the machine's speed hits all of them."""
    times = [[] for _ in functions]
    for _ in range(repeats + 1):
        for function, of_function in zip(functions, times):
            start = clock(device)
            function()
            of_function.append(clock(device) - start)
    return [statistics.median(of_function[1:]) for of_function in times]  # the first turn warms up


def peak_gib(device: str) -> float:
    """Largest memory since the last call, of the GPU's allocator; of the process so far on a CPU."""
    if device == "cpu":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    peak = torch.cuda.max_memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    return peak / 2**30


def host_waits(device: str, function) -> int | None:
    """How often the function makes the host wait for the GPU; None on a CPU."""
    if device == "cpu":
        return None
    with warnings.catch_warnings(record=True, action="always") as caught:
        torch.cuda.set_sync_debug_mode("warn")
        function()
        torch.cuda.set_sync_debug_mode("default")
    return sum("synchroniz" in str(warning.message) for warning in caught)


def measure(options) -> dict:
    """Everything that is printed."""
    device = options.device
    settings = train.Options(
        methods=["grpo", "bapo"], device=device, prompts_per_step=options.prompts, group_size=8, max_new_tokens=options.tokens,
        learning_rate=1e-9, gradient_checkpointing=options.gradient_checkpointing, lora_rank=options.lora_rank,
    )  # fmt: skip
    model, arms = build(options.size, device), settings.arms()
    name = f"{platform.machine()}, one thread" if device == "cpu" else torch.cuda.get_device_name(device)
    found = vars(options) | {"device": name, "torch": torch.__version__, "transformers": transformers.__version__}
    found |= {"precision": settings.precision, "parameters": sum(parameter.numel() for parameter in model.parameters())}
    if options.lora_rank:
        support.models.add_lora(model, options.lora_rank, settings.precision)
    if options.gradient_checkpointing:
        support.models.checkpoint_layers(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-9, fused=True)
    vocabulary, length = model.config.vocab_size, 8 if options.size == "countdown" else 128
    prompts = torch.randint(vocabulary // 2, vocabulary, (options.prompts, length)).tolist()
    rows, _ = [SimpleNamespace(prompt=prompt) for prompt in prompts], peak_gib(device)
    start = clock(device)
    rollouts, _, _ = train.draw(model, None, rows, 1, None, settings)
    seconds, tokens, read = clock(device) - start, int(rollouts.mask.sum()), int(rollouts.lengths().sum())
    found["drawing"] = {"tokens": tokens, "tokens_per_s": tokens / seconds, "peak_gib": peak_gib(device)}

    advantages, kept = torch.randn(len(rollouts.mask), device=device), torch.ones(options.prompts, dtype=bool, device=device)
    for what, limit in (("one_micro_batch", 10**9), ("several_micro_batches", read // 4)):
        (batch,) = support.batches.make_batches(rollouts, advantages, kept, arms[0], limit)
        log_probs, batch.rollouts.entropy = support.batches.record(model, batch, settings)
        gap = ((log_probs - batch.rollouts.sampler_log_probs).abs() * batch.rollouts.mask).sum().item() / tokens
        batch.rollouts.log_probs = log_probs + 0.1 * torch.randn_like(log_probs) * batch.rollouts.mask
        steps = [partial(update, model, optimizer, batch, arm, settings) for arm in arms]
        grpo, bapo, floor = paired_medians([*steps, partial(least, model, optimizer, batch, settings)], options.repeats, device)
        found[what] = {"micro_batches": len(batch.micro_batches), "grpo_s": grpo, "bapo_s": bapo, "least_s": floor}
        found[what] |= {"bapo/grpo": bapo / grpo, "grpo/least": grpo / floor, "bapo/least": bapo / floor}
        found[what] |= {"tokens_per_s": read / bapo, "peak_gib": peak_gib(device), "host_waits": host_waits(device, steps[1])}
    search = partial(search_clip_bounds, log_probs - batch.rollouts.log_probs, batch.advantages, batch.weights, arms[1].search)
    (search_s,) = paired_medians([search], 20, device)
    shares = {"search_ms": search_s * 1e3, "search/bapo": search_s / found["one_micro_batch"]["bapo_s"]}
    return found | shares | {"search_waits": host_waits(device, search), "sampler_gap": gap}


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=["countdown", *SIZES], default="countdown")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=53, help="length limit of a response")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--lora_rank", type=int, default=0)
    parser.add_argument("--gradient_checkpointing", action="store_true")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(json.dumps(measure(options)))


if __name__ == "__main__":
    main()
