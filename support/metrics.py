"""What is measured and logged: the glossary of metrics.jsonl, and the functions that compute it.

Of a batch of rollouts (the same in all lines of its step). Reward, entropy and lengths are over ALL
sampled responses, not only over the kept groups:

    step, update                 from 1; update 0: no group was finished or
                                 kept, nothing was trained
    updates                      of this step: epochs * parts, fewer where fewer groups than parts
                                 were kept
    reward                       mean reward
    entropy                      nats per token of the distributions that the tokens were drawn from
    response_length              mean number of tokens, EOS included
    length_correct, length_wrong the same of right (reward above 0) and of wrong responses
    truncated                    share of responses without EOS within the limit (reward 0)
    filtered_groups              share of groups whose rewards are all equal: no update sees them
    sampler_gap, sampler_gap_max mean and largest |log-prob of the sampler - log-prob of the
                                 training forward pass|

Of an update (over the tokens that it sees, before its step):

    loss, grad_norm              the loss to be minimised; the gradient's norm before clipping
    low, high, rho, rho_start, reached              see bapo.ClipBounds
    gradient_share, negatives_with_gradient, clip_fraction_{high,low}, kl,
    {positive,negative}_tokens, ratio_{mean,min,max}_{positive,negative}    see bapo.diagnostics;
                                 with contribution "gradient", gradient_share is rho
    log_ratio_newest             largest |log ratio| (in bfloat16: the mean) of the tokens that this
                                 step's policy drew: 0 at the first update
    entropy_now                  nats per token of the policy in training, at the same positions
    entropy_rule                 mean of r (log pi + H) A X: what the Entropy-Clip Rule says the
                                 entropy loses

Of the policy after a step's last update, in the line of that update:

    held_out_{greedy,mean@k,...} the accuracies of final.json, every --evaluate_every steps

With partial rollouts also:

    new_tokens, resumed_responses, cut_by_age, waiting_groups     counts of this step
    token_age_mean, token_age_max                  steps between a token's policy and the newest
    resumed_tokens, mixed_trajectories             share of tokens drawn after their response's
                                                   first step; share of such responses

timings.jsonl has the seconds of a step's parts and tokens per second; final.json the held-out
accuracy (support/evaluation.py).
"""

import time
from contextlib import contextmanager

import torch
from torch import Tensor

from rollout import Rollouts
from support.batches import Batch


def batch_metrics(
    rollouts: Rollouts, rewards: Tensor, kept: Tensor, batches: list[Batch]
) -> dict[str, Tensor]:
    """Metrics of a batch of rollouts (0-dim tensors).

    rewards [N]; kept [groups] bool; batches: all of the rollouts, in the micro-batches in which
    their log-probs and entropies were recorded.
    """
    lengths = rollouts.mask.sum(1).float()
    correct = rewards > 0
    tokens = lengths.sum()
    entropy = 0.0
    gap = 0.0
    largest_gaps = []
    for batch in batches:
        for part in batch:
            recorded = part.rollouts
            gaps = (recorded.log_probs - recorded.sampler_log_probs).abs()
            gaps = gaps.masked_fill(~recorded.mask, 0.0)
            entropy = entropy + recorded.entropy.sum()
            gap = gap + gaps.sum()
            largest_gaps.append(gaps.max())
    return {
        "reward": rewards.mean(),
        "entropy": entropy / tokens,
        "response_length": lengths.mean(),
        "length_correct": mean_where(lengths, correct),
        "length_wrong": mean_where(lengths, ~correct),
        "truncated": rollouts.truncated.float().mean(),
        "filtered_groups": 1 - kept.float().mean(),
        "sampler_gap": gap / tokens,
        "sampler_gap_max": torch.stack(largest_gaps).max(),
    }


def mean_where(values: Tensor, chosen: Tensor) -> Tensor:
    """Mean of the chosen values, NaN if none is chosen; without waiting for the device."""
    return values.masked_fill(~chosen, 0.0).sum() / chosen.sum()


def entropy_metrics(
    gradient: Tensor, log_probs: Tensor, entropy: Tensor, mask: Tensor
) -> dict[str, Tensor]:
    """entropy_rule and entropy_now; all [n, T], gradient: of the token losses by log_probs.

    The rule is the mean over tokens of -(d loss / d log pi) (log pi + H), with clipping
    r (log pi + H) A X. On tokens drawn from pi_rollout a state's expectation of that is the rule's
    covariance, Cov_pi(log pi, A X): positive where the update of Eq. 6 lowers entropy. States are
    not pooled.
    """
    tokens = mask.sum()
    rule = gradient * (log_probs.detach() + entropy)
    return {
        "entropy_rule": -(rule * mask).sum() / tokens,
        "entropy_now": entropy.sum() / tokens,
    }


def gradient_metrics(
    gradient: Tensor, advantages: Tensor, mask: Tensor, weights: Tensor
) -> dict[str, Tensor]:
    """What bapo.diagnostics tells from clip bounds, told from the token losses' gradient."""
    size = (gradient * weights).abs()
    has_gradient = size != 0
    tokens = mask.sum()
    positive = mask & (advantages.unsqueeze(1) > 0)
    negative = mask & (advantages.unsqueeze(1) < 0)
    return {
        "gradient_share": (size * positive).sum() / (size * mask).sum(),
        "negatives_with_gradient": (negative & has_gradient).sum() / negative.sum(),
        "clip_fraction_high": (positive & ~has_gradient).sum() / tokens,
        "clip_fraction_low": (negative & ~has_gradient).sum() / tokens,
    }


def read_numbers(metrics: dict[str, Tensor]) -> dict[str, float]:
    """All 0-dim tensors to Python floats with one read from the device."""
    values = torch.stack([value.detach().float() for value in metrics.values()]).tolist()
    return dict(zip(metrics, values, strict=True))


@contextmanager
def timed(seconds: dict[str, float], name: str, device: str):
    """Add the seconds of the block to seconds[name]."""
    start = time.perf_counter()
    yield
    if device != "cpu":
        torch.cuda.synchronize(device)
    seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - start


def speeds(
    seconds: dict[str, float], new_tokens: float, batches: list[Batch], epochs: int
) -> dict[str, float]:
    """Tokens per second of a step: those drawn, and those that its updates read, with prompts."""
    trained = 0
    for batch in batches:
        for part in batch:
            trained += epochs * int(part.rollouts.lengths().sum())
    return {
        "rollout_tokens_per_s": new_tokens / seconds["rollout_s"],
        "update_tokens_per_s": trained / seconds["update_s"],
    }
