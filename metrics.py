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
import statistics
import time
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from bapo import diagnostics, search_clip_bounds, token_losses
from reward import grade_all, pass_at_k
from rollout import Batch, Rollouts, autocast, generate, load_policy, objective_losses, response_texts
from runs import Lines, report, write_json

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


def evaluate_policy(path: Path, policy: str | Path, task, options) -> None:
    """Write the held-out accuracy of a policy (a folder, or a name on the hub) to `path`."""
    of_model = options.device, options.gradient_checkpointing, options.lora_rank, options.precision
    write_json(path, evaluate(*load_policy(str(policy), *of_model), task, options))


def evaluate_on_the_way(model, tokenizer, task, options, step: int, seconds: dict) -> dict[str, float]:
    """Every --evaluate_every steps the held-out accuracies, for metrics.jsonl; adds the time it took to `seconds`."""
    if not options.evaluate_every or step % options.evaluate_every:
        return {}
    with timed(seconds, "evaluation_s", options.device):
        found = evaluate(model, tokenizer, task, options)
    return {f"held_out_{name}": value for name, value in found.items()}


def evaluate(model, tokenizer, task, options) -> dict[str, float]:
    """Mean reward on the held-out problems: greedy and over 16 samples (4 with --data), and unbiased pass@8 and pass@samples
    from them (right: a reward above 0). A truncated response is wrong. Leaves the random state as it was."""
    limits = {name: getattr(options, name) for name in ("max_new_tokens", "temperature", "batch_tokens")}
    samples, rows = 4 if options.data else 16, task.held_out
    prompts, forked = [row.prompt for row in rows], [] if options.device == "cpu" else [options.device]

    def accuracy(group_size: int, do_sample: bool) -> Tensor:
        rollouts = generate(model, tokenizer, prompts, group_size=group_size, do_sample=do_sample, **limits)
        return grade_rollouts(task.grade, tokenizer, rollouts, rows, group_size).double().view(-1, group_size)

    with autocast(options.device, options.precision), torch.random.fork_rng(devices=forked):
        torch.manual_seed(0)
        greedy, sampled = accuracy(1, False), accuracy(samples, True)
    result = {"greedy": greedy.mean().item(), f"mean@{samples}": sampled.mean().item()}
    for k in sorted({min(8, samples), samples}):
        result[f"pass@{k}"] = statistics.mean(pass_at_k(samples, right, k) for right in (sampled > 0).sum(1).tolist())
    return result


def write_samples(file: Lines, step: int, tokenizer, rollouts: Rollouts, rewards: Tensor, rows: list) -> None:
    """Add all responses to SAMPLE_PROMPTS of the prompts to samples.jsonl, first of those whose rewards [N] differ; show the
    last right and the last wrong one. rows: one per group."""
    groups, shown = rewards.view(len(rows), -1).tolist(), {}
    for i in sorted(range(len(rows)), key=lambda i: len(set(groups[i])) == 1)[:SAMPLE_PROMPTS]:
        part = rollouts.select(torch.arange(i * len(groups[i]), (i + 1) * len(groups[i]))).to("cpu")
        about = {"step": step, "prompt": tokenizer.decode(part.prompt_ids[0][part.prompt_mask[0]]), "answer": rows[i].answer}
        columns = response_texts(tokenizer, part), groups[i], part.mask.sum(1).tolist(), part.truncated.tolist()
        for values in zip(*columns):
            sample = about | dict(zip(("response", "reward", "tokens", "truncated"), values))
            file.write(sample)
            shown["right" if sample["reward"] > 0 else "wrong"] = sample
    for verdict, sample in shown.items():
        prompt, response = (" ".join(sample[name].split()) for name in ("prompt", "response"))
        ending = " (cut off)" * sample["truncated"] + f" [{sample['answer']}]"
        report(f"{file.path.parent.name}, step {step}, {verdict}: {prompt[-60:]} -> {response[-200:]}{ending}")


def grade_rollouts(grade, tokenizer, rollouts: Rollouts, rows: list, group_size: int) -> Tensor:
    """Rewards float32 [N] on the rollouts' device: grade(response, answer), 0 for truncated responses, which are not graded.
    rows: one per group."""
    answers = [row.answer for row in rows for _ in range(group_size)]
    rewards = grade_all(grade, response_texts(tokenizer, rollouts), answers, rollouts.truncated.tolist())
    return torch.tensor(rewards, dtype=torch.float32, device=rollouts.mask.device)
