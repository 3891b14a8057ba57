"""Print how far eight updates move the ratios, in float32 and with weights rounded to bfloat16.

    python -m results.scripts.rounding runs/smollm2-135m 4e-6

The words are a model (a folder or a hub id) and a learning rate. 32 responses to one prompt get
advantages of 1 and -1 in turn. Training is in float32. After each update the log-probs are read
twice: with the trained weights, and with these weights rounded to bfloat16, as a forward pass in
bfloat16 sees them. Embeddings and head are not rounded, because train.py reads them in float32. All
this is done from the weights of the folder, and then from these weights rounded to bfloat16, which
is how most models are published.
"""

import sys

import torch

from bapo import PAPER_MAIN, bapo_loss
from rollout import Rollouts, generate, token_log_probs
from support.loading import load_policy


@torch.no_grad()
def read(policy, rollouts: Rollouts, rounded: bool) -> torch.Tensor:
    """Return log-probs [B, T], if asked with the layers' weights rounded to bfloat16."""
    layers = policy.get_decoder().layers
    exact = [weight.data for weight in layers.parameters()]
    if rounded:
        for weight in layers.parameters():
            weight.data = weight.data.bfloat16().float()
    log_probs, _ = token_log_probs(policy, rollouts, torch.arange(len(rollouts.mask)))
    for weight, values in zip(layers.parameters(), exact):
        weight.data = values
    return log_probs


def print_movement(policy, rollouts: Rollouts, rate: float) -> None:
    """Make eight updates, and print the mean |log-ratio| after each."""
    before = [read(policy, rollouts, rounded) for rounded in (False, True)]
    optimizer = torch.optim.AdamW(policy.parameters(), lr=rate, weight_decay=0.0)
    rows = torch.arange(len(rollouts.mask))
    for update in range(1, 9):
        log_probs, _ = token_log_probs(policy, rollouts, rows)
        loss, _ = bapo_loss(log_probs, before[0], rollouts.advantages, rollouts.mask, PAPER_MAIN)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        moved = []
        for rounded in (False, True):
            log_ratio = read(policy, rollouts, rounded) - before[rounded]
            moved.append(log_ratio[rollouts.mask].abs().mean())
        print(f"after {update} updates: {moved[0]:.4f}, with rounded weights {moved[1]:.4f}")


def main(name: str, rate: float) -> None:
    """Sample responses, and print how far updates move the policy from both starts."""
    policy, tokenizer = load_policy(name)
    torch.manual_seed(0)
    prompt = tokenizer("The sun").input_ids
    rollouts = generate(policy, [prompt], max_new_tokens=32, group_size=32)
    rollouts.advantages = torch.tensor([1.0, -1.0]).repeat(16)
    weights = {name: values.clone() for name, values in policy.state_dict().items()}
    # bfloat16 keeps the first 16 bits of a float32. 0x8000 in the last 16 is half way to the next.
    layers = torch.cat([weight.flatten() for weight in policy.get_decoder().layers.parameters()])
    half_way = (layers.view(torch.int32) & 0xFFFF == 0x8000).float().mean()
    print(
        f"The weights of the folder, {half_way:.1%} of them half way between two bfloat16 numbers:"
    )
    print_movement(policy, rollouts, rate)
    policy.load_state_dict({name: values.bfloat16().float() for name, values in weights.items()})
    print("The same, rounded to bfloat16:")
    print_movement(policy, rollouts, rate)


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))
