"""Grading, held-out accuracy, and responses to look at."""

import statistics
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from reward import Problem, grade_all, pass_at_k
from rollout import Rollouts, autocast, generate, response_texts
from support.data import Task
from support.files import Lines, write_json
from support.metrics import timed
from support.models import load_policy
from support.options import Options
from support.workers import report

SAMPLE_PROMPTS = 2  # whose responses are kept in samples.jsonl
SAMPLES_EVERY = 10  # steps between looks at a few responses; the first step's are shown, too


def grade_rollouts(
    grade: Callable, tokenizer, rollouts: Rollouts, problems: list[Problem], group_size: int
) -> Tensor:
    """Rewards float32 [N] on the rollouts' device: grade(response, answer) for every response.

    problems: one per group. Truncated responses get 0 and are not graded. A reward function may
    seed torch's generator: the random state is as before afterwards.
    """
    answers = []
    for problem in problems:
        answers += [problem.answer] * group_size
    texts = response_texts(tokenizer, rollouts)
    device = rollouts.mask.device
    with fork_rng(device):
        rewards = grade_all(grade, texts, answers, rollouts.truncated.tolist())
    return torch.tensor(rewards, dtype=torch.float32, device=device)


def fork_rng(device: torch.device | str):
    """A block after which torch's random states are as before."""
    is_cpu = torch.device(device).type == "cpu"
    return torch.random.fork_rng(devices=[] if is_cpu else [device])


# ---------------------------------------------------------------- held-out accuracy
def evaluate_policy(path: Path, policy: str | Path, task: Task, options: Options) -> None:
    """Write the held-out accuracy of a policy (a folder, or a name on the hub) to `path`."""
    model, tokenizer = load_policy(
        str(policy),
        options.device,
        options.gradient_checkpointing,
        options.lora_rank,
        options.precision,
    )
    write_json(path, evaluate(model, tokenizer, task, options))


def evaluate_on_the_way(
    model, tokenizer, task: Task, options: Options, step: int, seconds: dict[str, float]
) -> dict[str, float]:
    """Every --evaluate_every steps the held-out accuracies, for metrics.jsonl.

    Adds the time it took to `seconds`.
    """
    if not options.evaluate_every or step % options.evaluate_every:
        return {}
    with timed(seconds, "evaluation_s", options.device):
        accuracies = evaluate(model, tokenizer, task, options)
    return {f"held_out_{name}": value for name, value in accuracies.items()}


def evaluate(model, tokenizer, task: Task, options: Options) -> dict[str, float]:
    """Mean reward on the held-out problems, greedy and over samples, and unbiased pass@k.

    There are 16 samples per problem, 4 with --data. For pass@k a response is right if its reward is
    above 0. A truncated response is wrong. Leaves the random state as it was.
    """
    samples = 4 if options.data else 16
    prompts = [problem.prompt for problem in task.held_out]

    def rewards_of(group_size: int, do_sample: bool) -> Tensor:
        rollouts = generate(
            model,
            tokenizer,
            prompts,
            group_size=group_size,
            max_new_tokens=options.max_new_tokens,
            batch_tokens=options.batch_tokens,
            temperature=options.temperature,
            do_sample=do_sample,
        )
        rewards = grade_rollouts(task.grade, tokenizer, rollouts, task.held_out, group_size)
        return rewards.double().view(-1, group_size)

    with autocast(options.device, options.precision), fork_rng(options.device):
        torch.manual_seed(0)
        greedy = rewards_of(1, do_sample=False)
        sampled = rewards_of(samples, do_sample=True)
    accuracies = {"greedy": greedy.mean().item(), f"mean@{samples}": sampled.mean().item()}
    right_per_problem = (sampled > 0).sum(1).tolist()
    for k in sorted({min(8, samples), samples}):
        estimates = [pass_at_k(samples, right, k) for right in right_per_problem]
        accuracies[f"pass@{k}"] = statistics.mean(estimates)
    return accuracies


# ---------------------------------------------------------------- responses to look at
def write_samples(
    file: Lines,
    step: int,
    tokenizer,
    rollouts: Rollouts,
    rewards: Tensor,
    problems: list[Problem],
) -> None:
    """Add the responses to SAMPLE_PROMPTS prompts to samples.jsonl, and show one right, one wrong.

    Nothing at most steps: at the first, and then every SAMPLES_EVERY. Groups whose rewards [N]
    differ come first. problems: one per group.
    """
    if step != 1 and step % SAMPLES_EVERY:
        return
    rewards_of_group = rewards.view(len(problems), -1).tolist()
    group_size = len(rewards_of_group[0])

    def is_uniform(group: int) -> bool:
        return len(set(rewards_of_group[group])) == 1

    groups = sorted(range(len(problems)), key=is_uniform)  # False sorts first
    last_right = None
    last_wrong = None
    for group in groups[:SAMPLE_PROMPTS]:
        rows = torch.arange(group * group_size, (group + 1) * group_size)
        part = rollouts.select(rows.to(rollouts.mask.device)).to("cpu")
        prompt = tokenizer.decode(part.prompt_ids[0][part.prompt_mask[0]])
        texts = response_texts(tokenizer, part)
        for row, text in enumerate(texts):
            sample = {
                "step": step,
                "prompt": prompt,
                "answer": problems[group].answer,
                "response": text,
                "reward": rewards_of_group[group][row],
                "tokens": int(part.mask[row].sum()),
                "truncated": bool(part.truncated[row]),
            }
            file.write(sample)
            if sample["reward"] > 0:
                last_right = sample
            else:
                last_wrong = sample
    run = file.path.parent.name
    if last_right:
        report(f"{run}, step {step}, right: {one_line(last_right)}")
    if last_wrong:
        report(f"{run}, step {step}, wrong: {one_line(last_wrong)}")


def one_line(sample: dict) -> str:
    """The ends of a sample's prompt and response, and the answer that was wanted."""
    prompt = " ".join(sample["prompt"].split())
    response = " ".join(sample["response"].split())
    cut_off = " (cut off)" if sample["truncated"] else ""
    return f"{prompt[-60:]} -> {response[-200:]}{cut_off} [{sample['answer'][:100]}]"
