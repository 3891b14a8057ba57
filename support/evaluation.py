"""Held-out accuracy, grading, and samples to look at."""

import statistics
from pathlib import Path

import torch
from torch import Tensor

from reward import grade_all, pass_at_k
from rollout import Rollouts, autocast, generate, response_texts
from support.files import Lines, write_json
from support.metrics import timed
from support.models import load_policy
from support.workers import report

SAMPLE_PROMPTS = 2  # whose responses are kept in samples.jsonl


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
