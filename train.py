"""Train language models with GRPO, BAPO and their like on stale samples, and draw what happens (Algorithm 1: `train_run`).

    python train.py                                     # four arms on Countdown, then runs/default/curves.png and a table
    python train.py --methods grpo@4 bapo@4 0.8-1.5@4 --seeds 0 1 2 --output_dir runs/four
    python train.py --model Qwen/Qwen2.5-1.5B-Instruct --data openai/gsm8k --methods bapo         # your own, on one GPU

A run is an arm, a start and a seed; the same seed means the same prompts. Its folder: runs.py; metrics: metrics.py.
"""

import hashlib
import json
import math
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch

import countdown
import support.warm_starts
from bapo import bapo_loss, group_relative_advantages
from rollout import autocast, check_first_ratio, generate, token_log_probs
from support import plot
from support.arms import Arm
from support.batches import bounds_of_update, make_batches, objective_losses, record, record_further
from support.data import Task, load_task, prompts_of_step
from support.evaluation import evaluate_on_the_way, evaluate_policy, grade_rollouts, write_samples
from support.files import Lines, lock
from support.metrics import batch_metrics, read_numbers, speeds, timed, update_metrics
from support.models import load_policy
from support.options import Options, parse
from support.partial_rollouts import PartialRollouts
from support.run_folder import (
    Run,
    check_same_setting,
    end_of_step,
    finish,
    newest_checkpoint,
    prepare_folder,
    read_metrics,
    restore,
    save_checkpoint,
    steps_done,
    stop_not_finite,
)
from support.workers import command, run_side_by_side, say

MAX_AGE = 8  # partial rollouts: steps after which an unfinished response is cut (reward 0)


def train_run(run: Run, task: Task, given_bounds: dict | None = None, watch: Callable = lambda *_: None) -> None:
    """Algorithm 1. Continues from the folder's checkpoint if there is one.

    given_bounds: (step, update) -> (low, high), instead of a search. watch(step, update, batch, log_probs, entropy) is called
    after every update. Raises FloatingPointError on a non-finite loss or gradient, before the optimizer sees it.
    """
    options, arm, device = run.options, run.arm, run.options.device
    model, tokenizer, optimizer, partial, files, done = begin(run)
    for step in range(done + 1, options.steps + 1):
        seconds, batches = {}, []
        # y ~ pi_rollout <- pi_theta: group_size responses to each prompt
        with timed(seconds, "rollout_s", device):
            rows = prompts_of_step(task.train, step, options.prompts_per_step, run.seed)
            rollouts, rows, log = draw(model, tokenizer, rows, step, partial, options)
        log = {"step": step, **log}
        if rollouts is not None:
            # Rewards and advantages; groups of equal rewards teach nothing and are filtered out
            with timed(seconds, "grading_s", device):
                rewards = grade_rollouts(task.grade, tokenizer, rollouts, rows, options.group_size)
                if options.samples_every and step % options.samples_every == 0:
                    write_samples(files["samples"], step, tokenizer, rollouts, rewards, rows)
            advantages = group_relative_advantages(rewards, options.group_size, arm.normalize_std)
            kept = (advantages.view(-1, options.group_size) != 0).any(1)
            batches, dropped = (make_batches(rollouts, advantages, g, arm, options.micro_batch_tokens) for g in (kept, ~kept))
            # log pi_rollout, by the forward pass that trains; partial rollouts have brought that of each token's own policy
            with timed(seconds, "update_s", device):
                for batch in (batches + dropped) * (partial is None):
                    batch.rollouts.log_probs, batch.rollouts.entropy = record(model, batch, options)
                record_further(model, batches, step, arm, options)
                log |= read_numbers(batch_metrics(rollouts, rewards, kept, [batch.rollouts for batch in batches + dropped]))
                log["updates"] = arm.epochs * len(batches)
        # For staleness 0 .. E
        for update in range(1, 1 + arm.epochs * len(batches)):
            with timed(seconds, "update_s", device):
                batch = batches[(update - 1) % len(batches)]
                # The clip bounds: one pair for all that the optimizer step sees
                bounds = (
                    given_bounds[step, update] if given_bounds else bounds_of_update(model, batch, update == 1, arm, options)
                )
                # One update with min(r A, clip(r, low, high) A)
                loss, metrics, now = 0.0, {}, (torch.zeros_like(batch.weights), torch.zeros_like(batch.weights))
                for rows, part in batch.micro_batches:
                    columns = slice(part.mask.shape[1])
                    with autocast(device, options.precision):
                        log_probs, entropy = token_log_probs(model, part, options.temperature)
                    old, weights = batch.rollouts.log_probs[rows, columns], batch.weights[rows, columns]
                    args = (log_probs, old, batch.advantages[rows], part.mask, arm.search)
                    if arm.objective:
                        part_loss = (weights * objective_losses(arm, batch, rows, log_probs, entropy, bounds)).sum()
                    else:
                        part_loss, metrics = bapo_loss(*args, weights=weights, bounds=bounds)
                    part_loss.backward()
                    loss += part_loss.detach()
                    now[0][rows, columns], now[1][rows, columns] = log_probs.detach(), entropy
                if update == 1:
                    check_first_ratio(now[0], batch.rollouts, step, exact=options.precision == "float32")
                norm = torch.nn.utils.clip_grad_norm_(model.parameters(), options.max_grad_norm or math.inf)
                numbers = read_numbers(update_metrics(metrics, bounds, *now, batch, arm) | {"loss": loss, "grad_norm": norm})
                if not (math.isfinite(numbers["loss"]) and math.isfinite(numbers["grad_norm"])):
                    stop_not_finite(run.folder, step, update, numbers, batch)
                optimizer.step()
                optimizer.zero_grad()  # frees the gradients: no memory for them while responses are drawn
            if update == log["updates"]:
                numbers |= evaluate_on_the_way(model, tokenizer, task, options, step, seconds)
            files["metrics"].write({**log, "update": update, **numbers})
            watch(step, update, batch, *now)
        if not batches:
            log |= evaluate_on_the_way(model, tokenizer, task, options, step, seconds)
        end_of_step(run.folder, log, seconds | speeds(seconds, log, batches, run), files, trained=bool(batches))
        if step % options.checkpoint_every == 0 or step == options.steps:
            state = {"optimizer": optimizer.state_dict(), "waiting": partial.groups if partial else []}
            save_checkpoint(run.folder, step, model, tokenizer, state, files)


# ---------------------------------------------------------------- what the loop calls
def begin(run: Run) -> tuple:
    """Policy, tokenizer, optimizer, the buffer of partial rollouts (or None), files, and the steps done: from the newest
    checkpoint, or from the run's start."""
    options, checkpoint = run.options, newest_checkpoint(run.folder)
    of_model = options.device, options.gradient_checkpointing, options.lora_rank, options.precision
    model, tokenizer = load_policy(str(checkpoint or run.start), *of_model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate, weight_decay=0.0, fused=True)
    torch.manual_seed(run.seed)
    partial = None
    if options.partial_budget:
        names = "max_new_tokens group_size temperature batch_tokens micro_batch_tokens".split()
        sampling = {name: getattr(options, name) for name in names}
        partial = PartialRollouts(budget=options.partial_budget, max_age=MAX_AGE, **sampling)
    state = {"step": 0, "sizes": dict.fromkeys(("metrics", "timings", "samples"), 0)}
    if checkpoint:
        state = restore(checkpoint, options.device)
        optimizer.load_state_dict(state["optimizer"])
        if partial:
            partial.groups = state["waiting"]
    files = {name: Lines(run.folder / f"{name}.jsonl", size) for name, size in state["sizes"].items()}
    read_metrics(run.folder / "metrics.jsonl")  # refuses a damaged one
    return model, tokenizer, optimizer, partial, files, state["step"]


def draw(model, tokenizer, rows: list, step: int, partial: PartialRollouts | None, options: Options) -> tuple:
    """Responses to the rows' prompts, group by group; with a budget per step, those groups that are finished by now (None if
    none is). Returns rollouts, the rows they answer, and what to log of the buffer."""
    with autocast(options.device, options.precision):
        if partial:
            return partial.advance(model, tokenizer, rows, step)
        limits = {name: getattr(options, name) for name in ("group_size", "max_new_tokens", "temperature", "batch_tokens")}
        return generate(model, tokenizer, [row.prompt for row in rows], **limits), rows, {}


def carry_out(run: Run, task: Task, **hooks) -> None:
    """A run from its start or checkpoint to its end: train_run, evaluate, and the last checkpoint becomes the result."""
    with lock(run.folder / "lock"):
        if not (run.folder / "model").exists():
            train_run(run, task, **hooks)
            evaluate_policy(run.folder / "final.json", newest_checkpoint(run.folder), task, run.options)
        finish(run.folder)


# ---------------------------------------------------------------- the command line
def make_runs(options: Options, task: Task) -> list[Run]:
    """All runs that the options ask for."""
    problems = hashlib.sha256(json.dumps([task.train, task.held_out]).encode()).hexdigest()[:16]
    apart = "methods seeds warm_starts jobs output_dir resume rho0 low high samples_every evaluate_every".split()
    shared = {name: value for name, value in asdict(options).items() if name not in apart} | {"problems": problems}
    if options.reward:
        shared["reward_source"] = hashlib.sha256(Path(options.reward.rpartition(":")[0]).read_bytes()).hexdigest()[:16]
    starts = [None] if options.data else options.warm_starts
    runs = []
    for arm, start, seed in ((arm, start, seed) for seed in options.seeds for start in starts for arm in options.arms()):
        name = f"{arm.arm}-seed{seed}" if options.data else f"{arm.arm}-start{start}-seed{seed}"
        config = shared | asdict(arm) | {"seed": seed} | ({} if options.data else {"warm_start": start})
        policy = options.model if options.data else str(options.warm_start(start))
        runs.append(Run(Path(options.output_dir) / name, arm, policy, seed, options, config))
    return runs


def main(arguments: list[str] | None = None) -> int:
    """The command line. Returns the exit status: 0; 1 if a run failed or nothing was trained."""
    options, started = Options(**parse(Options, arguments, f"{__doc__}\n{Arm.__doc__}")), time.perf_counter()
    output = Path(options.output_dir)
    task = Task(*load_task(options)) if options.data else Task(*countdown.problems(), countdown.grade)
    runs = make_runs(options, task)
    check_same_setting(output, runs[0].config, {run.folder for run in runs})
    for run in runs:  # refuse before the first minute of training, not after it
        prepare_folder(run.folder, run.config, options.resume)
    say(json.dumps(asdict(options)))
    jobs = options.jobs or (os.cpu_count() or 1 if options.device == "cpu" else 1)
    failures = work_on(runs, task, options, output, jobs, carry_out)
    lines = [read_metrics(path) for run in runs if (path := run.folder / "metrics.jsonl").exists()]
    if not any(lines):
        return 1  # the failures were printed as they came
    say("\n".join(plot.report(output)))
    say(f"{output / 'curves.png'} and {output / 'table.md'} written after {time.perf_counter() - started:.0f} s")
    if not any(line["update"] for of_run in lines for line in of_run):
        say("nothing was trained: the rewards of every group were all equal (see reward in the table)", sys.stderr)
        return 1
    return 1 if failures else 0


def work_on(runs: list[Run], task: Task, options: Options, output: Path, jobs: int, carry_out: Callable) -> dict:
    """Make the starts that are missing, evaluate them, and carry out all runs; returns the failures, name -> exception."""
    starts = {"": options.model} if options.data else {str(seed): options.warm_start(seed) for seed in options.warm_starts}
    if not options.data:
        settings = (options.attempts, options.warm_start_steps, options.device)
        work = {
            f.name: (f.parent, support.warm_starts.warm_start, f, int(s), *settings)
            for s, f in starts.items()
            if not f.exists()
        }
        if failures := run_side_by_side(work, jobs, options.warm_start_steps * len(work), "warm start"):
            return failures
    # The longest first, so that no core is left with a long one at the end.
    runs = sorted(runs, key=lambda run: -run.arm.epochs * run.arm.parts)
    left = sum(options.steps - steps_done(run.folder) for run in runs)
    work = {run.folder.name: (run.folder, carry_out, run, task) for run in runs}
    paths = {output / f"start{name}.json": start for name, start in starts.items()}
    before = {p.stem: (output, evaluate_policy, p, start, task, options) for p, start in paths.items() if not p.exists()}
    return run_side_by_side(before | work, jobs, left, meanwhile=lambda: plot.report(output))


if __name__ == "__main__":
    command("train.py", main, "Interrupted. Continue with the same command and --resume: nothing that was computed is lost")
