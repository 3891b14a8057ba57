"""Where the time and the memory of a training step go, for a Qwen2 of a given size.

    python experiments/speed.py                            # Countdown's model and batch
    python experiments/speed.py --hidden 896 --layers 24 --vocabulary 151936 --prompts 4 \\
        --response_tokens 1000 --device cuda --precision bfloat16      # about 0.5B parameters

The weights are random, and so are the rewards: only seconds and bytes are real. Every part is the
function that train.py calls. The last row is what the update is compared with: a forward and a
backward pass over the same tokens with transformers' own cross-entropy.
"""

import resource
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
import countdown
from bapo import search_clip_bounds, token_weights
from rollout import autocast, generate, load_policy, log_probs_now
from rollout import micro_batches
from runs import parse
from train import Options, backward, option, parse_method

REPEATS = 5  # of which the fastest counts


@dataclass
class SpeedOptions:
    """Sizes of the model and of a batch of rollouts."""

    hidden: int = option(64, "width of the model")
    layers: int = option(2, "decoder layers")
    vocabulary: int = option(20, "tokens")
    prompts: int = option(16, "prompts in a batch")
    group_size: int = option(8, "responses per prompt")
    prompt_tokens: int = option(8, "tokens of a prompt")
    response_tokens: int = option(28, "tokens of a response")
    micro_batch_tokens: int = option(2**13, "tokens in one forward and backward pass")
    method: str = option("bapo@8", "as in train.py --methods")
    device: str = option("cpu", "cpu, cuda, cuda:1, ...")
    precision: str = option("float32", "float32 or bfloat16")
    gradient_checkpointing: bool = option(False, "compute layers again, for less memory")


def seconds(function: Callable[[], object], device: str) -> float:
    """The fastest of REPEATS calls, after one that does not count."""
    times = []
    for _ in range(REPEATS + 1):
        start = time.perf_counter()
        function()
        if device != "cpu":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start)
    return min(times[1:])


def main() -> None:
    """Print the table."""
    sizes = parse(SpeedOptions, None, __doc__)
    options = Options(
        methods=[sizes.method],
        device=sizes.device,
        precision=sizes.precision,
        micro_batch_tokens=sizes.micro_batch_tokens,
        group_size=sizes.group_size,
    )
    method = parse_method(sizes.method, options)
    tokenizer = countdown.build_tokenizer()
    model = countdown.build_model(
        tokenizer,
        vocab_size=sizes.vocabulary,
        hidden_size=sizes.hidden,
        intermediate_size=3 * sizes.hidden,
        num_hidden_layers=sizes.layers,
        max_position_embeddings=sizes.prompt_tokens + sizes.response_tokens,
    )
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        policy, _ = load_policy(
            folder,
            sizes.device,
            precision=sizes.precision,
            gradient_checkpointing=sizes.gradient_checkpointing,
        )
    prompts = torch.randint(4, 20, (sizes.prompts, sizes.prompt_tokens)).tolist()

    def draw():
        with autocast(sizes.device, sizes.precision):
            return generate(
                policy,
                prompts,
                group_size=sizes.group_size,
                max_new_tokens=sizes.response_tokens,
            )

    rollouts = draw()
    rollouts.advantages = torch.randn(len(rollouts.mask), device=sizes.device)

    every_row = torch.arange(len(rollouts.mask), device=sizes.device)
    parts = micro_batches(rollouts, every_row, sizes.micro_batch_tokens)

    def read():
        with autocast(sizes.device, sizes.precision):
            return log_probs_now(policy, rollouts, parts, 1.0)

    rollouts.log_probs, rollouts.entropy = read()
    weights = token_weights(rollouts.mask)
    log_ratio = 0.1 * torch.randn_like(rollouts.log_probs)  # as after some updates

    def search():
        search_clip_bounds(log_ratio, rollouts.advantages, weights, method.search)

    def update():
        backward(policy, rollouts, parts, method, options)
        policy.zero_grad()

    def plain():
        for rows in parts:
            ids = rollouts.sequences[rows]
            with autocast(sizes.device, sizes.precision):
                policy(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        policy.zero_grad()

    parameters = sum(parameter.numel() for parameter in policy.parameters())
    tokens = int(rollouts.mask.sum())
    print(f"{parameters:,} parameters, {tokens:,} response tokens, {len(parts)} micro-batches")
    rows = {
        "draw the responses": draw,
        "read the rollout policy's log-probs": read,
        "one update, without the optimizer": update,
        "of it, the search of the bounds": search,
        "forward and backward with cross-entropy": plain,
    }
    measured = {name: seconds(function, sizes.device) for name, function in rows.items()}
    of_update = measured["one update, without the optimizer"]
    print("| part | seconds | of an update |\n| --- | --- | --- |")
    for name, value in measured.items():
        print(f"| {name} | {value:.4f} | {value / of_update:.3f} |")
    if sizes.device == "cpu":
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    else:
        peak = torch.cuda.max_memory_allocated(sizes.device)
    print(f"peak memory {peak / 1e9:.2f} GB; torch {torch.__version__}, {sizes.device}")


if __name__ == "__main__":
    main()
