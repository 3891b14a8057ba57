"""Look for the five mistakes that cost most, in the tensors of your own training loop.

    python -m integrations.self_test step.pt

In your loop, save one whole optimizer step with torch.save: the second update on a batch, as a dict
of what your loop computed, over all micro-batches and GPUs.

    first_log_probs    [B, T]  of the response tokens, at the first update on the batch
    log_probs          [B, T]  the same at the second update, after an optimizer step
    rollout_log_probs  [B, T]  what your loop passes to the loss
    sampler_log_probs  [B, T]  as the sampler reported them, after the temperature (in vLLM with
                               logprobs_mode="processed_logprobs", which is not its default)
    lengths            [B]     tokens per response, EOS included, as the sampler reported them
    rewards            [B]     of the saved tokens under the mask, decoded and graded once more
    low, high          [M]     clip bounds of every micro-batch
    loss                       the sum over micro-batches (the mean over GPUs)
    search                     dataclasses.asdict(search)
    mask, group_size           and advantages [B]
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
    inputs = log_probs, rollout_log_probs, advantages, mask
    whole_loss, metrics = bapo_loss(*inputs, ClipSearch(**search))

    def gap(others):
        return (others - rollout_log_probs)[mask].abs().mean()

    def differs(values, expected, atol=1e-5):
        values = torch.as_tensor(values, dtype=torch.float32)
        return not torch.allclose(values, expected, rtol=1e-3, atol=atol)

    mistakes = {
        "1. Every ratio is 1: store rollout_log_probs before the first update.": (
            gap(log_probs) < 1e-6
        ),
        "2. The first update's log-probs differ: compute both by the same code.": (
            gap(first_log_probs) > 0.03  # rounding to bfloat16 makes less, and float32 nothing
        ),
        "2. The sampler's log-probs differ: compare temperature (before or after it?) and top-p.": (
            gap(sampler_log_probs) > 0.1
        ),
        "3. Count tokens and search once per step, over all its micro-batches.": (
            differs(loss, whole_loss)
            or differs(low, metrics["low"])
            or differs(high, metrics["high"])
        ),
        "4. The mask is not as long as the responses with their EOS.": (
            (mask.sum(1) != lengths).any()
        ),
        "4. The rewards are not those of these responses, in this order.": (
            # TRL adds 1e-4 to the standard deviation, which shows most where rewards are equal.
            differs(advantages, group_relative_advantages(rewards, group_size), atol=1e-3)
        ),
    }
    return [sentence for sentence, is_shown in mistakes.items() if is_shown]


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    step = torch.load(sys.argv[1], map_location="cpu")
    print(*find_mistakes(**step) or ["No mistake found."], sep="\n")
    rho = rho_at_ratio_1(step["rewards"], step["lengths"], step["group_size"])
    print(
        f"5. rho at ratio 1 is {rho:.3f}. A first search raises its bounds only if this is below"
        f" rho0, {step['search']['rho0']}. Compare ten batches."
    )
