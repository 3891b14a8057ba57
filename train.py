"""Train language models with GRPO, BAPO and other losses on reused samples, and draw the curves.

    python train.py                     # three methods on Countdown, then runs/default/curves.png
    python train.py --methods grpo@4 bapo@4 0.8-1.5@4 --seeds 0 1 2 --output_dir runs/four
    python train.py --model Qwen/Qwen2.5-1.5B-Instruct --data openai/gsm8k --methods bapo@8 \
--output_dir runs/gsm8k

A method is NAME@UPDATES, which makes UPDATES optimizer steps on each batch of rollouts; 1 is
on-policy. NAME@EPOCHSxMINIBATCHES cuts the batch into mini-batches of whole groups and goes through
them EPOCHS times: 8 is 8x1, and 2x4 is the authors' scheme. The names are grpo (clip bounds of
[0.8, 1.2]), LOW-HIGH (your own fixed bounds, as ratios: 0.8-1.28 is DAPO's Clip-Higher), bapo (a
search in the paper's main range with the target --rho0), bapo-app-a (App. A), and the losses of
other_losses.py, such as cispo. Every loss is a token-mean over groups whose rewards differ.
A run is a method and a seed. docs/logs.md describes its files.
"""

from __future__ import annotations

import itertools
import math
import os
import re
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

import torch
import transformers
from filelock import FileLock
from torch import Tensor

from bapo import (
    GRPO,
    PAPER_APP_A,
    PAPER_MAIN,
    ClipSearch,
    backward,
    bapo_loss,
    diagnostics,
    gradient_mask,
    group_relative_advantages,
    importance_ratio,
    token_weights,
)
from other_losses import LOSSES
from reward import final_answer, grade_all, grade_math, pass_at_k
from rollout import (
    Rollouts,
    check_sampler,
    generate,
    generate_partially,
    micro_batches,
    record_log_probs,
    response_texts,
    token_log_probs,
)
from support import runs
from support.loading import load_policy
from support.runs import option
from tasks import Problem, Task, countdown, data, problems_of_step

HAS_CUDA = torch.cuda.is_available()
SHOWN = ("reward", "entropy", "response_length", "truncated", "rollout_s", "update_s")


# ---------------------------------------------------------------- Algorithm 1
def train(run: Run) -> None:
    """Run Algorithm 1, from the step that the run has reached.

    A step is one batch of rollouts and all updates on it. An update, which is one optimizer step,
    sees a mini-batch of groups, and a backward pass sees a micro-batch of responses.
    """
    options = run.options
    is_first_batch = True  # with partial rollouts the first steps may finish no group
    idle_steps = 0  # in a row
    for step in range(run.resumed_from + 1, options.steps + 1):
        began = time.perf_counter()
        # Sample group_size responses to each prompt: y ~ pi_rollout, the current pi_theta.
        rollouts, problems = sample(run, step)
        if rollouts is None:  # no group is finished
            end_step(run, step, {}, [])
            continue
        sampled = time.perf_counter()
        # Rewards, and advantages relative to the group.
        texts, rewards = grade(run, rollouts, problems)
        rollouts.advantages = group_relative_advantages(rewards, options.group_size)
        sample_line = write_samples(run, step, rollouts, texts, rewards, problems[0])
        # Filter: groups of equal rewards have no advantage, and no update sees them.
        kept = (rollouts.advantages.view(-1, options.group_size) != 0).any(1)
        mini_batches, dropped = split_batch(run, rollouts, kept)
        # log pi_rollout, from the micro-batches that training reads: the ratios begin at 1.
        # Dropped groups are read for the entropy alone, which is that of the whole batch.
        batches = itertools.chain(dropped, *mini_batches)
        record_log_probs(run.policy, rollouts, batches, step, options.temperature)
        check_sampler(rollouts)
        record = batch_metrics(rollouts, rewards, kept, step)
        # For staleness = 0 ... E: one update each, with clip bounds of its own.
        updates = []
        passes = mini_batches * run.method.epochs  # the list, epochs times
        for update, mini_batch in enumerate(passes, 1):
            updates.append({"update": update} | compute_gradient(run, rollouts, mini_batch, step))
            run.optimizer.step()
            run.optimizer.zero_grad()  # frees the gradients before the next sampling
        record |= {"rollout_s": sampled - began, "update_s": time.perf_counter() - sampled}
        end_step(run, step, record, updates)
        idle_steps = 0 if updates else idle_steps + 1
        if is_first_batch and (record["reward"] == 0 or record["truncated"] > 0.9):
            warn(run, "no response is right, or nearly all are cut off", sample_line)
        if idle_steps == 3:
            warn(run, "no group of three steps has had an advantage", sample_line)
        is_first_batch = False


def sample(run: Run, step: int) -> tuple[Rollouts | None, list[Problem]]:
    """Return a batch of rollouts and the problem of each group.

    With partial rollouts (section 5.3) these are the groups that the step has finished, or (None,
    []) if it has finished none.
    """
    options = run.options
    problems = problems_of_step(run.task.train, step, options.prompts_per_step, run.seed)
    sampling = {
        "group_size": options.group_size,
        "max_new_tokens": options.max_new_tokens,
        "temperature": options.temperature,
        # Sampling needs less memory per token: keys and values, not all activations.
        "batch_tokens": 32 * options.micro_batch_tokens,
    }
    if options.partial_budget:
        return generate_partially(
            run.policy,
            run.unfinished,
            problems,
            step,
            budget=options.partial_budget,
            micro_batch_tokens=options.micro_batch_tokens,
            **sampling,
        )
    rollouts = generate(run.policy, [problem.prompt for problem in problems], **sampling)
    rollouts.versions.fill_(step)
    return rollouts, problems


def split_batch(run: Run, rollouts: Rollouts, kept: Tensor) -> tuple:
    """Return mini-batches, each a list of micro-batches, and the dropped groups' micro-batches.

    A micro-batch is a tensor of row numbers. kept: bool, one per group. With fewer kept
    groups than mini-batches, each group is a mini-batch.
    """
    # [groups, group_size]
    rows = torch.arange(len(rollouts.mask), device=kept.device).view(len(kept), -1)
    split = partial(micro_batches, rollouts, micro_batch_tokens=run.options.micro_batch_tokens)
    parts = rows[kept].tensor_split(run.method.mini_batches)
    mini_batches = [split(groups.flatten()) for groups in parts if len(groups)]
    return mini_batches, split(rows[~kept].flatten())


def compute_gradient(
    run: Run, rollouts: Rollouts, mini_batch: list[Tensor], step: int
) -> dict[str, float]:
    """Compute the gradient of one update, clip its norm, and return the update's metrics.

    Raises RuntimeError if the norm is not finite.
    """
    log_probs = torch.zeros_like(rollouts.rollout_log_probs)  # [B, T], under pi_theta
    entropy = torch.zeros_like(log_probs)

    def log_probs_of(rows: Tensor) -> Tensor:
        found, entropy[rows] = token_log_probs(run.policy, rollouts, rows, run.options.temperature)
        log_probs[rows] = found.detach()
        return found

    # Search c_low and c_high, then compute the clipped loss: -min(r A, clip(r, c_low, c_high) A)
    metrics = backward(
        log_probs_of,
        mini_batch,
        rollouts.rollout_log_probs,
        rollouts.advantages,
        rollouts.mask,
        run.method.search,
        loss_fn=run.method.loss_fn,
    )
    metrics["grad_norm"] = torch.nn.utils.clip_grad_norm_(
        run.policy.parameters(),
        run.options.max_grad_norm or math.inf,  # which measures the norm and does not clip it
        error_if_nonfinite=True,
    )

    rows = torch.cat(mini_batch)
    mask = torch.zeros_like(rollouts.mask)  # [B, T], of the mini-batch alone
    mask[rows] = rollouts.mask[rows]
    log_ratio = log_probs - rollouts.rollout_log_probs
    newest = mask & (rollouts.versions == step)
    metrics["log_ratio_newest"] = log_ratio[newest].abs().mean()
    metrics["entropy_now"] = entropy[mask].mean()
    if "low" in metrics:
        metrics["predicted_entropy_fall"] = predicted_entropy_fall(
            log_ratio,
            log_probs,
            entropy,
            rollouts.advantages.unsqueeze(1),
            mask,
            (metrics["low"], metrics["high"]),
        )
    return {name: float(value) for name, value in metrics.items()}


def end_step(run: Run, step: int, record: dict, updates: list[dict]) -> None:
    """Print and log a step; evaluate and write a checkpoint where they are due.

    record: what is said of the whole step, which the line of every update repeats; {} if no group
    is finished. Without an update there is one line, of update 0.
    """
    options = run.options
    figures = [f"{name} {record[name]:.3g}" for name in SHOWN if name in record]
    figures = figures or ["no group is finished"]
    print(f"{run.folder.name}: step {step} of {options.steps}:", *figures, flush=True)
    if options.evaluate_every and step % options.evaluate_every == 0:
        for name, value in evaluate(run).items():
            record[f"held_out_{name}"] = value
    for metrics in updates or [{"update": 0}]:
        runs.append_line(run.folder / "metrics.jsonl", {"step": step} | metrics | record)
    if step % options.checkpoint_every == 0 or step == options.steps:
        runs.save_checkpoint(run, step)


# ---------------------------------------------------------------- a run
@dataclass
class Run:
    """One method with one seed, in its folder, and what it holds in memory."""

    folder: Path
    method: Method
    seed: int
    options: Options
    task: Task
    policy: torch.nn.Module
    tokenizer: transformers.PreTrainedTokenizerBase
    optimizer: torch.optim.Optimizer
    unfinished: list[list[dict]]  # groups of rollout.generate_partially
    resumed_from: int  # the step of the checkpoint that the run continues from, or 0


def finish_run(options: Options, task: Task, text: str, seed: int) -> None:
    """Train the method `text` with a seed, from the run's newest checkpoint on.

    Held-out accuracies are written before and after training. What was logged after the checkpoint
    is cut off. Raises ValueError if the checkpoint has more steps than --steps.
    """
    folder = Path(options.output_dir, f"{text}-seed{seed}")
    final = folder / "final.json"
    if final.exists() and runs.read_json(final)["steps"] == options.steps:
        return
    resumed_from = max(runs.checkpoints(folder), default=0)
    if resumed_from > options.steps:
        raise ValueError(f"steps: {folder} already has {resumed_from}, got {options.steps}")
    if resumed_from:
        model = folder / f"checkpoint-{resumed_from}"
    else:  # output folders that lie side by side share the supervised checkpoint
        starts = folder.parent.parent / "starts"
        model = options.model or countdown.supervised_checkpoint(starts, seed)
    policy, tokenizer = load_policy(
        str(model),
        options.device,
        precision=options.precision,
        lora_rank=options.lora_rank,
        gradient_checkpointing=options.gradient_checkpointing,
    )
    trained = [parameter for parameter in policy.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=options.learning_rate, weight_decay=0.0, fused=True)
    method = parse_method(text, options)
    run = Run(folder, method, seed, options, task, policy, tokenizer, optimizer, [], resumed_from)
    torch.manual_seed(seed)  # after loading, which draws new adapters with a seed of its own
    if resumed_from:
        runs.restore(run, model)
    folder.mkdir(exist_ok=True)
    runs.keep_steps(folder, resumed_from)
    final.unlink(missing_ok=True)  # of a command with fewer --steps

    # With --model, every seed begins with the same model.
    start = folder.with_name(f"start-seed{0 if options.model else seed}.json")
    # Runs that begin with the same model wait for the one that evaluates it.
    with FileLock(start.with_suffix(".lock")):
        if not start.exists() and not resumed_from:
            runs.write_json(start, evaluate(run))
    train(run)
    runs.write_json(final, {"steps": options.steps} | evaluate(run))


# ---------------------------------------------------------------- rewards and metrics
def grade(run: Run, rollouts: Rollouts, problems: list[Problem]) -> tuple[list[str], Tensor]:
    """Return responses as text, and their rewards float32 [B]; truncated ones get 0.

    problems: one per group
    """
    texts = response_texts(run.tokenizer, rollouts)
    group_size = len(texts) // len(problems)
    answers = [problem.answer for problem in problems for _ in range(group_size)]
    rewards = grade_all(run.task.grader, texts, answers, rollouts.truncated.tolist())
    return texts, torch.tensor(rewards, dtype=torch.float32, device=rollouts.mask.device)


def batch_metrics(rollouts: Rollouts, rewards: Tensor, kept: Tensor, step: int) -> dict[str, float]:
    """Return the metrics of a batch of rollouts, see docs/logs.md. rewards [B]; kept [groups]."""
    lengths = rollouts.mask.sum(1).float()
    metrics = {
        "reward": rewards.mean(),
        "entropy": rollouts.entropy.sum() / lengths.sum(),
        "response_length": lengths.mean(),
        "length_correct": lengths[rewards > 0].mean(),
        "length_wrong": lengths[rewards == 0].mean(),
        "truncated": rollouts.truncated.float().mean(),
        "filtered_groups": 1 - kept.float().mean(),
        "token_age": (step - rollouts.versions)[rollouts.mask].float().mean(),
    }
    return {name: value.item() for name, value in metrics.items()}


@torch.no_grad()
def predicted_entropy_fall(
    log_ratio: Tensor,
    log_probs: Tensor,
    entropy: Tensor,
    advantages: Tensor,
    mask: Tensor,
    bounds: tuple[float, float],
) -> Tensor:
    """Return the fall of entropy that the Entropy-Clip Rule predicts for an update (Eqs. 6, 7).

    It is the mean of r (log pi + H) A X over response tokens: the first-order fall per unit of
    Eq. 6's step size eta, 0-dim and above 0 where entropy should fall. Eq. 6 supposes that a step
    moves each prefix's logits on their own, by eta (A X + C). An optimizer moves shared parameters,
    so compare the sign and the trend with the entropy, and not the size. For one prefix it is an
    estimate, over tokens drawn from pi_rollout, of Cov_pi(log pi, A X) in Eq. 6.

    log_probs and entropy [B, T] are log pi and the exact entropy H in nats of the distribution at
    each token, under the policy in training; advantages [B, 1] or [B, T]; bounds (low, high).
    """
    ratio = importance_ratio(log_ratio)
    gradient = ratio * advantages * gradient_mask(ratio, advantages, *bounds)
    falls = gradient * (log_probs + entropy)
    return falls[mask].mean()


def write_samples(
    run: Run, step: int, rollouts: Rollouts, texts: list[str], rewards: Tensor, problem: Problem
) -> dict:
    """Write a line to samples.jsonl: a step's first problem and its responses. Return the line."""
    group = slice(run.options.group_size)
    line = {
        "step": step,
        "prompt": run.tokenizer.decode(problem.prompt),
        "answer": problem.answer,
        "responses": texts[group],
        "truncated": rollouts.truncated[group].tolist(),
        "rewards": rewards[group].tolist(),
    }
    runs.append_line(run.folder / "samples.jsonl", line)
    return line


def warn(run: Run, reason: str, sample_line: dict) -> None:
    """Say why a run may learn nothing, with a response, how it is read, and what to do."""
    response = sample_line["responses"][0]
    read = response
    if run.task.grader is grade_math:  # others read the response themselves
        read = final_answer(response)
    print(
        f"WARNING: {run.folder.name} may learn nothing: {reason}. For example",
        f"prompt: {sample_line['prompt']!r}",
        f"response: {response!r}",
        f"read as: {read!r}",
        f"reference answer: {sample_line['answer']!r}, reward: {sample_line['rewards'][0]:g}",
        "If responses go on after their answer, they do not end with an EOS that --max_new_tokens"
        " leaves room for. If an answer is right, its format is not the reference's: see --reward."
        " If all are right, the problems are too easy.",
        sep="\n  ",
        flush=True,
    )


# ---------------------------------------------------------------- evaluation
def evaluate(run: Run) -> dict[str, float]:
    """Return the mean reward on the held-out problems, and unbiased pass@k; {} if there are none.

    They are "mean@16" and "pass@8", of 16 responses per problem at --temperature; with --data
    "mean@4" and "pass@4", of 4. For pass@k a response is right if its reward is above 0. The random
    state is restored afterwards.
    """
    options = run.options
    problems = run.task.held_out
    if not problems:
        return {}
    samples = 4 if options.data else 16
    k = min(8, samples)
    name = run.folder.name
    print(f"{name}: evaluation of {len(problems)} prompts, {samples} responses each", flush=True)
    devices = [] if options.device == "cpu" else [options.device]
    with torch.random.fork_rng(devices):
        torch.manual_seed(0)
        rollouts = generate(
            run.policy,
            [problem.prompt for problem in problems],
            group_size=samples,
            max_new_tokens=options.max_new_tokens,
            temperature=options.temperature,
            batch_tokens=32 * options.micro_batch_tokens,
            progress="evaluation",
        )
    _, rewards = grade(run, rollouts, problems)
    right_counts = (rewards.view(-1, samples) > 0).sum(1).tolist()
    return {
        f"mean@{samples}": rewards.double().mean().item(),
        f"pass@{k}": statistics.mean(pass_at_k(samples, count, k) for count in right_counts),
    }


# ---------------------------------------------------------------- options
COUNTDOWN = {
    "max_new_tokens": 28,
    "learning_rate": 2e-4,
    "max_grad_norm": 0.0,
    "rho0": 0.44,
    "precision": "float32",
}
OWN_DATA = {
    "max_new_tokens": 1024,
    "learning_rate": 1e-6,
    "max_grad_norm": 1.0,
    "rho0": PAPER_MAIN.rho0,
    "precision": "bfloat16" if HAS_CUDA else "float32",
}


@dataclass
class Options:
    """All options. None means the task's default, above. Raises ValueError for a wrong option."""

    methods: list[str] = option(
        ["grpo@1", "grpo@8", "bapo@8"], "NAME@UPDATES, see above", may_change=True
    )
    seeds: list[int] = option([0], "each method runs once per seed", may_change=True)
    steps: int = option(140, "batches of rollouts per run", least=1, may_change=True)
    prompts_per_step: int = option(16, "prompts in a batch", least=1)
    group_size: int = option(8, "responses per prompt", least=2)
    max_new_tokens: int | None = option(
        None,
        "most tokens of a response; without an EOS its reward is 0 (default: 28; with --data 1024)",
        least=1,
    )
    temperature: float = option(1.0, "of sampling and of all log-probs")
    partial_budget: int = option(
        0, "partial rollouts (section 5.3): most tokens of a response drawn in a step; 0: off"
    )
    learning_rate: float | None = option(
        None, "of AdamW, constant, without weight decay (default: 2e-4; with --data 1e-6)"
    )
    max_grad_norm: float | None = option(
        None, "clip the gradient norm at this; 0: off (default: 0; with --data 1)"
    )
    rho0: float | None = option(None, "bapo: target of rho (default: 0.44; with --data 0.4)")
    model: str = option("", "hub id or folder of a model; empty: Countdown and its own model")
    data: str = option(
        "",
        "with --model: a .jsonl or .parquet file, or a hub data set: NAME (its split"
        " train), NAME:SPLIT or NAME:CONFIGURATION/SPLIT",
    )
    fields: list[str] = option([], "with --data: names of the prompt's and the answer's field")
    reward: str = option(
        "",
        "with --data: FILE.py:FUNCTION(response, answer), from 0 to 1; empty: compare the answers",
    )
    held_out: int = option(256, "with --data: problems kept for evaluation")
    lora_rank: int = option(
        0, "train LoRA adapters (peft) of this rank; 0: all weights, or an adapter folder's"
    )
    device: str = option("cuda" if HAS_CUDA else "cpu", "cpu, cuda, cuda:1, ...", may_change=True)
    precision: Literal["float32", "bfloat16"] | None = option(
        None,
        "of forward passes; trained weights are float32 (default: float32; with --data on a GPU"
        " bfloat16)",
    )
    micro_batch_tokens: int = option(
        2**13,
        "most tokens in a backward pass; 32 times as many are drawn together",
        least=1,
        may_change=True,
    )
    gradient_checkpointing: bool = option(
        False, "recompute activations in the backward pass, for less memory", may_change=True
    )
    jobs: int = option(
        1 if HAS_CUDA else os.cpu_count(),
        "runs side by side, each on one CPU thread; with --data a single one uses all threads",
        least=1,
        may_change=True,
    )
    keep_checkpoints: bool = option(False, "keep all checkpoints", may_change=True)
    checkpoint_every: int = option(5, "steps between checkpoints", least=1, may_change=True)
    evaluate_every: int = option(
        0,
        "steps between held-out evaluations; 0: only before and after training",
        may_change=True,
    )
    output_dir: str = option(
        "runs/default",
        "folder of the runs; supervised checkpoints go into `starts` beside it",
        may_change=True,
    )
    resume: bool = option(
        False, "continue the runs in output_dir; more --steps make them longer", may_change=True
    )

    def __post_init__(self):
        needs_data = self.model or self.fields or self.reward
        if bool(needs_data) != bool(self.data) or (self.data and not self.model):
            raise ValueError("give --model and --data together; --fields and --reward need them")
        defaults = OWN_DATA if self.data else COUNTDOWN
        for name, value in defaults.items():
            if getattr(self, name) is None:
                setattr(self, name, value)
        runs.check_options(self)
        if not self.temperature:  # eval_aime.py reads 0 as greedy
            raise ValueError("temperature must be above 0 to train, got 0")
        for method in self.methods:
            parse_method(method, self)


# ---------------------------------------------------------------- methods
class Method(NamedTuple):
    """A loss, and how many updates it makes on a batch."""

    search: ClipSearch | None  # of bapo_loss; other losses have none
    loss_fn: Callable  # bapo_loss, or with its arguments and results
    epochs: int  # passes over a batch of rollouts
    mini_batches: int  # parts of a batch, with an update for each


def parse_method(text: str, options: Options) -> Method:
    """Return the method that `text` names. Raises ValueError if there is none.

    To try other ranges, add a ClipSearch here.
    """
    match = re.fullmatch(r"(.+)@([1-9]\d*)(?:x([1-9]\d*))?", text)
    if not match:
        raise ValueError(
            f"methods: {text!r} must be NAME@UPDATES or NAME@EPOCHSxMINIBATCHES, such as grpo@8"
        )
    name, epochs, mini_batches = match.groups(default="1")
    searches = {
        "grpo": GRPO,
        "bapo": replace(PAPER_MAIN, rho0=options.rho0),
        "bapo-app-a": PAPER_APP_A,
    }
    bounds = re.fullmatch(r"(\d*\.?\d+)-(\d*\.?\d+)", name)
    if bounds:
        searches[name] = ClipSearch.fixed(*map(float, bounds.groups()))
    elif name not in searches | LOSSES:
        known = ", ".join([*searches, "LOW-HIGH", *LOSSES])
        raise ValueError(f"methods: {name!r} in {text!r} must be one of {known}")
    loss_fn = partial(other_loss, LOSSES[name]) if name in LOSSES else bapo_loss
    return Method(searches.get(name), loss_fn, int(epochs), int(mini_batches))


def other_loss(
    losses_of: Callable,
    log_probs: Tensor,
    rollout_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    search: None,
    process_group: None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the token-mean of a loss of other_losses.py and its kl, as bapo_loss does."""
    losses = losses_of(log_probs, rollout_log_probs, advantages, mask)
    weights = token_weights(mask)
    log_ratio = log_probs - rollout_log_probs  # 0 outside the mask, as both are
    found = diagnostics(log_ratio, advantages.unsqueeze(1), weights, (0.0, math.inf))
    return (weights * losses).sum(), {"kl": found["kl"]}  # the others depend on bounds


# ---------------------------------------------------------------- the command
def main(arguments: list[str] | None = None) -> int:
    """Run the command line. Returns 0. Raises ValueError if a run failed."""
    options = runs.parse(Options, arguments, __doc__)
    output = Path(options.output_dir)
    if not options.data:  # the same numbers with any --jobs: sums depend on the threads
        torch.set_num_threads(1)
    with FileLock(output / ".lock", timeout=5):
        if any(output.glob("*-seed*")):
            if not options.resume:
                raise ValueError(f"output_dir: {output} holds runs: add --resume, or use another")
            runs.check_same(output / "config.json", options)
        runs.write_json(output / "config.json", vars(options))
        task = data.load_task(options) if options.data else countdown.load_task()
        calls = {}
        for text, seed in itertools.product(options.methods, options.seeds):
            calls[f"{text}-seed{seed}"] = partial(finish_run, options, task, text, seed)
        failed = runs.run_side_by_side(calls, options.jobs)
        if failed:
            raise ValueError(f"These runs failed for the reasons above: {', '.join(failed)}")
        from support import plot  # slow, so not needed to check the options

        print(plot.report(output), end="")
        print(f"The curves are in {output}/curves.png and this table in {output}/table.md.")
    return 0


if __name__ == "__main__":
    runs.command(
        "train.py",
        main,
        "Interrupted. The same command with --resume continues every run from its last checkpoint.",
    )
