"""Where the time and the memory of a training step go, for a Qwen2 of a given size.

    python experiments/speed.py                            # Countdown's model and batch
    python experiments/speed.py --hidden 896 --layers 24 --vocabulary 151936 --prompts_per_step 4 \\
        --max_new_tokens 1000 --device cuda --precision bfloat16       # about 0.5B parameters

The weights are random, and so are the rewards: only seconds and bytes are real. Every part is the
function that train.py calls, with the options of train.py and the last of its methods.
"""

import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import torch

sys.path.append(str(Path(__file__).parent.parent))
import countdown
import runs
from bapo import contribution_masses, search_clip_bounds, token_weights
from rollout import autocast, generate, log_probs_now, micro_batches
from train import Clock, Options, backward, parse_method, policy_of, sampling

REPEATS = 5  # of which the fastest counts, after one that does not


@dataclass
class SpeedOptions(Options):
    """Sizes of the model; all else as in train.py."""

    hidden: int = runs.option(64, "width of the model")
    layers: int = runs.option(2, "decoder layers")
    vocabulary: int = runs.option(20, "tokens")


def random_policy(options: SpeedOptions):
    """A model of these sizes, loaded as train.py loads one."""
    tokenizer = countdown.build_tokenizer()
    model = countdown.build_model(
        tokenizer,
        vocab_size=options.vocabulary,
        hidden_size=options.hidden,
        intermediate_size=3 * options.hidden,
        num_hidden_layers=options.layers,
        max_position_embeddings=countdown.PROMPT_TOKENS + options.max_new_tokens,
    )
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        policy, _ = policy_of(folder, options)
    return policy


def main() -> int:
    """Print the table. Returns the exit status 0."""
    torch.set_num_threads(1)  # as train.py does
    options = runs.parse(SpeedOptions, None, __doc__)
    device = options.device
    method = parse_method(options.methods[-1], options)
    policy = random_policy(options)
    shape = (options.prompts_per_step, countdown.PROMPT_TOKENS)
    prompts = torch.randint(4, 20, shape).tolist()
    measured = []
    for _ in range(REPEATS + 1):
        torch.manual_seed(0)
        clock = Clock(device)
        with clock("draw the responses"), autocast(device, options.precision):
            rollouts = generate(policy, prompts, **sampling(options))
        rollouts.advantages = torch.randn(len(rollouts.mask), device=device)
        rows = torch.arange(len(rollouts.mask), device=device)
        parts = micro_batches(rollouts, rows, options.micro_batch_tokens)
        with clock("read the rollout policy's log-probs"), autocast(device, options.precision):
            found = log_probs_now(policy, rollouts, parts, options.temperature)
        rollouts.rollout_log_probs, rollouts.entropy = found
        with clock("one update, without the optimizer"):
            backward(policy, rollouts, parts, method, options)
        policy.zero_grad()
        weights = token_weights(rollouts.mask)
        log_ratio = 0.1 * torch.randn_like(rollouts.rollout_log_probs)  # as after some updates
        with clock("of it, the search of the bounds"):
            masses = contribution_masses(log_ratio, rollouts.advantages, weights, method.search)
            search_clip_bounds(masses, method.search)
        measured.append(clock.seconds)

    parameters = sum(parameter.numel() for parameter in policy.parameters())
    tokens = int(rollouts.mask.sum())
    print(f"{parameters:,} parameters, {tokens:,} response tokens, {len(parts)} micro-batches")
    print(f"| {method.name} | seconds | of an update |\n| --- | --- | --- |")
    fastest = pd.DataFrame(measured[1:]).min()
    for part, seconds in fastest.items():
        share = seconds / fastest["one update, without the optimizer"]
        print(f"| {part} | {seconds:.4f} | {share:.3f} |")
    peak = runs.peak_memory(device)
    print(f"peak memory {peak / 1e9:.2f} GB; torch {torch.__version__}, {device}")
    return 0


if __name__ == "__main__":
    runs.command("speed.py", main, "Interrupted")
