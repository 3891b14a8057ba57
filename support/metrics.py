"""What is measured and logged: the glossary of metrics.jsonl, and the functions that compute it.

Of a batch of rollouts (the same in all lines of its step; over ALL sampled responses, not only over the kept groups):

    step, update                 from 1; update 0: no group was kept, nothing was trained
    updates                      of this step: epochs * parts, fewer where fewer groups than parts were kept
    reward                       mean reward
    entropy                      nats per token of the distributions that the tokens were drawn from
    response_length, length_correct, length_wrong   tokens, EOS included; of all, right and wrong responses
    truncated                    share of responses without EOS within the limit (reward 0)
    filtered_groups              share of groups whose rewards are all equal: advantage 0, no update sees them
    sampler_gap, sampler_gap_max mean and largest |log-prob of the sampler - log-prob of the training forward pass|

Of an update (over the tokens that it sees, before its step):

    loss, grad_norm              the clipped surrogate to be minimised; the gradient's norm before clipping
    low, high, rho, rho_start, reached, gradient_share, negatives_with_gradient, clip_fraction_{high,low}, kl,
    {positive,negative}_tokens, ratio_{mean,min,max}_{positive,negative}      see bapo.ClipBounds and bapo.diagnostics
    entropy_now                  nats per token of the policy in training, at the same positions
    entropy_rule                 mean of r (log pi + H) A X: what the Entropy-Clip Rule says the entropy loses
    held_out_{greedy,mean@k,...} every --evaluate_every steps, in the step's last line: the accuracies of final.json

With partial rollouts also:

    new_tokens, resumed_responses, cut_by_age, waiting_groups     counts of this step
    token_age_mean, token_age_max                  versions between a token's policy and the newest, of the tokens trained on
    resumed_tokens, mixed_trajectories             share of tokens drawn after their response's first version; of such responses

timings.jsonl has the seconds of a step's parts and tokens per second; final.json the held-out accuracy (`evaluate`).
"""

import math
import time
from contextlib import contextmanager

import torch
from torch import Tensor

from bapo import diagnostics, search_clip_bounds, token_losses
from rollout import Rollouts
from support.batches import Batch, objective_losses

SAMPLE_PROMPTS = 2  # whose responses are kept in samples.jsonl


def batch_metrics(rollouts: Rollouts, rewards: Tensor, kept: Tensor, read: list[Rollouts]) -> dict[str, Tensor]:
    """Metrics of a batch (0-dim tensors): rewards [N], kept [groups] bool; `read` are all of its responses in the parts in
    which their log-probs and entropies were recorded."""
    lengths, correct = rollouts.mask.sum(1).float(), rewards > 0
    gaps = [(part.log_probs - part.sampler_log_probs).abs().masked_fill(~part.mask, 0.0) for part in read]
    return {
        "reward": rewards.mean(),
        "entropy": sum(part.entropy.sum() for part in read) / lengths.sum(),
        "response_length": lengths.mean(),
        "length_correct": lengths[correct].mean(),
        "length_wrong": lengths[~correct].mean(),
        "truncated": rollouts.truncated.float().mean(),
        "filtered_groups": 1 - kept.float().mean(),
        "sampler_gap": sum(gap.sum() for gap in gaps) / lengths.sum(),
        "sampler_gap_max": torch.stack([gap.max() for gap in gaps]).max(),
    }


def update_metrics(of_loss: dict[str, Tensor], bounds, log_probs: Tensor, entropy: Tensor, batch: Batch, arm):
    """Metrics of an update (name -> 0-dim tensor): those of bapo_loss if it saw the whole batch, else the same of all
    micro-batches together, and the entropy's. bounds: what bapo_loss was given; log_probs, entropy [N, T]. For a method
    of objectives.py, autograd tells which tokens have a gradient.

    entropy_rule is the mean over tokens of -(d loss / d log pi) (log pi + H), with clipping r (log pi + H) A X. On tokens drawn
    from pi_rollout a state's expectation of that is the rule's covariance, Cov_pi(log pi, A X): positive where the update of
    Eq. 6 lowers entropy. States are not pooled."""
    old, mask, leaf, metrics = batch.rollouts.log_probs, batch.rollouts.mask, log_probs.clone().requires_grad_(), of_loss
    log_ratio = log_probs - old
    if arm.objective:
        losses = objective_losses(arm, batch, slice(None), leaf, entropy, bounds)
        metrics = diagnostics(log_ratio, batch.advantages, mask, (math.nan, math.nan), batch.weights)
    else:
        if len(batch.micro_batches) > 1:
            bounds = bounds or search_clip_bounds(log_ratio, batch.advantages, batch.weights, arm.search)
            metrics = diagnostics(log_ratio, batch.advantages, mask, bounds, batch.weights)
        losses = token_losses(leaf - old, batch.advantages, metrics["low"], metrics["high"])
    (gradient,) = torch.autograd.grad(losses.sum(), leaf)  # of a token; with clipping -r A X
    if arm.objective:  # what diagnostics tells from the bounds, here from the gradient
        size, advantages = (gradient * batch.weights).abs(), batch.advantages.unsqueeze(1)
        alive, positive, negative = size != 0, mask & (advantages > 0), mask & (advantages < 0)
        metrics |= {
            "gradient_share": (size * positive).sum() / (size * mask).sum(),
            "negatives_with_gradient": (negative & alive).sum() / negative.sum(),
            "clip_fraction_high": (positive & ~alive).sum() / mask.sum(),
            "clip_fraction_low": (negative & ~alive).sum() / mask.sum(),
        }
    rule = -(gradient * (log_probs + entropy) * mask).sum() / mask.sum()
    return metrics | {"entropy_rule": rule, "entropy_now": entropy.sum() / mask.sum()}


def read_numbers(metrics: dict[str, Tensor]) -> dict[str, float]:
    """All 0-dim tensors to Python floats with one read from the device."""
    return dict(zip(metrics, torch.stack([value.detach().float() for value in metrics.values()]).tolist()))


@contextmanager
def timed(timings: dict, name: str, device: str):
    """Add the seconds of the block to timings[name]."""
    start = time.perf_counter()
    yield
    if device != "cpu":
        torch.cuda.synchronize(device)
    timings[name] = timings.get(name, 0.0) + time.perf_counter() - start


def speeds(seconds: dict[str, float], log: dict, batches: list[Batch], run) -> dict[str, float]:
    """Tokens per second of a step: those drawn, and those of prompts and responses that its updates read."""
    if not batches:
        return {}
    drawn = log.get("new_tokens", log["response_length"] * run.options.prompts_per_step * run.options.group_size)
    trained = run.arm.epochs * sum(int(batch.rollouts.lengths().sum()) for batch in batches)
    return {"rollout_tokens_per_s": drawn / seconds["rollout_s"], "update_tokens_per_s": trained / seconds["update_s"]}
