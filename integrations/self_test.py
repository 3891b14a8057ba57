"""Look for the five mistakes that cost most, in the tensors of your own training loop.

    python -m integrations.self_test step.pt

In your loop, save one whole optimizer step with torch.save: the second update on a batch, as a dict
of what your loop computed, over all micro-batches and GPUs.

    first_log_probs    [B, T]  of the response tokens, at the first update on the batch
    log_probs          [B, T]  the same at the second update, after an optimizer step
    rollout_log_probs  [B, T]  what your loop passes to the loss
    sampler_log_probs  [B, T]  as the sampler (vLLM, generate) reported them
    lengths            [B]     tokens per response, EOS included, as the sampler reported them
    rewards            [B]     of the tokens under the mask, decoded and graded once more
    mask, advantages, group_size, search (rho0 and the ranges: a dict), low, high, and loss, the sum
                               over micro-batches (the mean over GPUs)
"""

import sys

import torch

from bapo import ClipSearch, bapo_loss, group_relative_advantages, rho_at_ratio_1


def find_mistakes(
    first_log_probs,
    log_probs,
    rollout_log_probs,
    sampler_log_probs,
    lengths,
    rewards,
    mask,
    advantages,
    group_size,
    search,
    low,
    high,
    loss,
) -> list[str]:
    """Return a sentence for each mistake that the step shows; the fifth needs several steps."""
    mask = mask.bool()

    def gap(others):
        return (others - rollout_log_probs)[mask].abs().mean()

    inputs = log_probs, rollout_log_probs, advantages, mask
    whole_loss, metrics = bapo_loss(*inputs, ClipSearch(**search))
    whole = torch.stack([whole_loss, metrics["low"], metrics["high"]])
    yours = torch.tensor([loss, low, high])
    graded = group_relative_advantages(rewards, group_size)
    mistakes = {
        "1. Every ratio is 1: store rollout_log_probs before the first update.": (
            gap(log_probs) < 1e-6
        ),
        "2. The first update's log-probs differ: compute both by the same code.": (
            gap(first_log_probs) > 0.03  # rounding to bfloat16 makes less, and float32 nothing
        ),
        "2. The sampler's log-probs differ: compare temperature, top-p and top-k.": (
            gap(sampler_log_probs) > 0.1
        ),
        "3. Count tokens and search once per step, over all its micro-batches.": (
            not torch.allclose(whole, yours, rtol=1e-3, atol=1e-5)
        ),
        "4. The mask is not as long as the responses with their EOS.": (
            (mask.sum(1) != lengths).any()
        ),
        "4. The rewards are not those of these responses, in this order.": (
            not torch.allclose(graded, advantages, atol=1e-3)
        ),
    }
    return [sentence for sentence, is_shown in mistakes.items() if is_shown]


if __name__ == "__main__":
    step = torch.load(sys.argv[1], map_location="cpu")
    print(*find_mistakes(**step) or ["No mistake found."], sep="\n")
    rho = rho_at_ratio_1(step["rewards"], step["lengths"], step["group_size"])
    print(f"5. rho at ratio 1 is {rho:.3f}: compare rho0 with it.")
