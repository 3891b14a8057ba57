"""Print how far eight updates on a batch move the ratios, in float32 and with rounded weights.

    python -m results.scripts.rounding runs/smollm2-135m 4e-6

The folder is that of results/scripts/smollm2.py, and the number the learning rate. Training is in
float32. After each update the log-probs are read twice: with the trained weights, and with these
weights rounded to bfloat16, as a forward pass in bfloat16 sees them. The head is not rounded,
because train.py keeps it in float32. Both begin with the weights of the folder, and then with
these weights rounded to bfloat16, which is how most models are published.
"""

import sys
from contextlib import contextmanager

import torch

import train
from bapo import PAPER_MAIN, bapo_loss, group_relative_advantages
from rollout import generate, response_texts, token_log_probs
from support import data
from support.loading import load_policy


@contextmanager
def rounded_to_bfloat16(policy):
    """Round all weights but the head's to bfloat16, and restore them at the end."""
    head = policy.get_output_embeddings().weight
    exact = {weight: weight.data for weight in policy.parameters() if weight is not head}
    for weight in exact:
        weight.data = weight.data.bfloat16().float()
    yield
    for weight, values in exact.items():
        weight.data = values


def print_movement(policy, rollouts, temperature: float, rate: float) -> None:
    """Make eight updates, and print mean |log-ratio| and kl after each."""
    rows = torch.arange(len(rollouts.mask))

    @torch.no_grad()
    def read() -> torch.Tensor:
        return token_log_probs(policy, rollouts, rows, temperature)[0]

    before = read()
    with rounded_to_bfloat16(policy):
        rounded_before = read()
    optimizer = torch.optim.AdamW(policy.parameters(), lr=rate, weight_decay=0)
    for update in range(1, 9):
        log_probs, _ = token_log_probs(policy, rollouts, rows, temperature)
        loss, _ = bapo_loss(log_probs, before, rollouts.advantages, rollouts.mask, PAPER_MAIN)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        exact = read() - before
        with rounded_to_bfloat16(policy):
            rounded = read() - rounded_before
        moved = [log_ratio[rollouts.mask].abs().mean() for log_ratio in (exact, rounded)]
        print(f"after {update} updates: {moved[0]:.4f}, with rounded weights {moved[1]:.4f}")


def main(folder: str, rate: float) -> None:
    """Sample one batch of the task, and print how far updates move it from both starts."""
    reward = "results/scripts/smollm2.py:reward"
    options = train.Options(model=folder, data=f"{folder}/two_words.jsonl", reward=reward)
    task = data.load_task(options)
    policy, tokenizer = load_policy(folder)
    torch.manual_seed(0)
    problems = task.train[:4]
    prompts = [problem.prompt for problem in problems]
    rollouts = generate(policy, prompts, max_new_tokens=48, group_size=8, temperature=0.6)
    texts = response_texts(tokenizer, rollouts)
    rewards = train.rewards_of(task, texts, rollouts, problems)
    rollouts.advantages = group_relative_advantages(rewards, 8)
    weights = {name: values.clone() for name, values in policy.state_dict().items()}
    print(f"rewards: {rewards.tolist()}\nThe weights of the folder:")
    print_movement(policy, rollouts, 0.6, rate)
    policy.load_state_dict({name: values.bfloat16().float() for name, values in weights.items()})
    print("The same, rounded to bfloat16:")
    print_movement(policy, rollouts, 0.6, rate)


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))
