"""Train language models with GRPO, BAPO and their like on stale samples, and draw what happens.

    python train.py                     # four arms on Countdown, then runs/default/curves.png
    python train.py --methods grpo@4 bapo@4 0.8-1.5@4 --seeds 0 1 2 --output_dir runs/four
    python train.py --model Qwen/Qwen2.5-1.5B-Instruct --data openai/gsm8k --methods bapo

Algorithm 1 is `train_run`; minimal.py is the same without all that long runs need. A run is an
arm, a start and a seed; the same seed means the same prompts. A run's folder is described in
support/run_folder.py, what is logged in support/metrics.py.

    step          one batch of rollouts, and all updates on it
    mini-batch    the groups that one update (one optimizer step) sees: the type Batch
    micro-batch   what one forward and backward pass of an update sees: the type MicroBatch
"""

import gc
import hashlib
import json
import math
import os
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

import countdown
from bapo import ClipBounds, group_relative_advantages, token_weights
from reward import Problem
from rollout import (
    Rollouts,
    autocast,
    check_first_ratio,
    generate,
    newest_log_ratio,
    token_log_probs,
)
from support import plot
from support.arms import Arm
from support.batches import Batch, MicroBatch, join, join_rows
from support.data import Task, load_task, prompts_of_step
from support.evaluation import (
    evaluate_on_the_way,
    evaluate_policy,
    grade_rollouts,
    write_samples,
)
from support.files import Lines, lock
from support.metrics import batch_metrics, read_numbers, speeds, timed
from support.models import load_policy
from support.options import Options, parse
from support.partial_rollouts import PartialRollouts
from support.run_folder import (
    NotFinite,
    Run,
    finish,
    newest_checkpoint,
    prepare_output,
    read_metrics,
    restore,
    save_checkpoint,
    steps_done,
    stop_not_finite,
    write_step,
)
from support.warm_starts import warm_start
from support.workers import command, run_side_by_side, say

MAX_AGE = 8  # partial rollouts: steps after which an unfinished response is cut (reward 0)
LOG_FILES = ("metrics", "timings", "samples")  # .jsonl, in a run's folder


def train_run(run: Run, task: Task) -> None:
    """Algorithm 1. Continues from the folder's checkpoint if there is one.

    Raises NotFinite on a non-finite loss or gradient, before the optimizer sees it.
    """
    options = run.options
    arm = run.arm
    state = begin(run)
    policy = state.policy
    for step in range(state.steps_done + 1, options.steps + 1):
        seconds: dict[str, float] = {}
        # y ~ pi_rollout <- pi_theta: group_size responses to each prompt
        with timed(seconds, "rollout_s", options.device):
            asked = prompts_of_step(task.train, step, options.prompts_per_step, run.seed)
            rollouts, problems, counts = draw(state, asked, step, options)
        log = {"step": step, **counts}
        if rollouts is None:  # partial rollouts: no group is finished yet
            end_step(run, state, task, log, seconds, [])
            continue
        # Rewards
        with timed(seconds, "grading_s", options.device):
            rewards = grade_rollouts(
                task.grade, state.tokenizer, rollouts, problems, options.group_size
            )
        write_samples(state.files["samples"], step, state.tokenizer, rollouts, rewards, problems)
        # Advantages; groups of equal rewards have none, and are filtered out
        advantages = group_relative_advantages(rewards, options.group_size)
        kept = (advantages.view(-1, options.group_size) != 0).any(1)
        # log pi_rollout, by the forward pass that trains. Groups filtered out are read, too, for
        # the log alone: entropy and sampler_gap are those of all responses.
        with timed(seconds, "update_s", options.device):
            batches = make_batches(rollouts, advantages, kept, arm, options.micro_batch_tokens)
            dropped = make_batches(rollouts, advantages, ~kept, arm, options.micro_batch_tokens)
            record(policy, batches + dropped, step, options)
            log |= read_numbers(batch_metrics(rollouts, rewards, kept, batches + dropped))
        log["updates"] = arm.epochs * len(batches)
        # For staleness 0 .. E
        for update, batch in enumerate(batches * arm.epochs, 1):
            with timed(seconds, "update_s", options.device):
                # c_low, c_high: from a-, a+, raised while rho < rho0 (Eq. 8). None: they are
                # fixed, or the update is one micro-batch and the loss below searches by itself.
                bounds = bounds_over_micro_batches(
                    policy, batch, arm, options, unchanged=update == 1
                )
                # One update with min(r A, clip(r, low, high) A)
                seen = update_policy(
                    policy, state.optimizer, batch, bounds, arm, options, step, update
                )
            numbers = seen.numbers
            if update == log["updates"]:
                numbers |= evaluate_on_the_way(
                    policy, state.tokenizer, task, options, step, seconds
                )
            state.files["metrics"].write({**log, "update": update, **numbers})
        end_step(run, state, task, log, seconds, batches)


# ---------------------------------------------------------------- one update
class Update(NamedTuple):
    """What an update has seen, before its step."""

    numbers: dict[str, float]  # its metrics
    whole: MicroBatch  # all its micro-batches as one
    log_probs: Tensor  # [N, T] float32 of the policy in training
    entropy: Tensor  # [N, T] float32 nats, likewise


def update_policy(
    policy,
    optimizer: torch.optim.Optimizer,
    batch: Batch,
    bounds: ClipBounds | tuple[float, float] | None,
    arm: Arm,
    options: Options,
    step: int,
    update: int,
) -> Update:
    """One optimizer step on a batch, its gradient added up over the micro-batches.

    bounds: None where the loss knows or finds them, see `bounds_over_micro_batches`. The device is
    read once. Raises NotFinite before the optimizer sees a non-finite gradient, and RuntimeError if
    the first update after sampling does not find the ratios at 1.
    """
    losses = []
    log_probs_of_parts = []
    entropy_of_parts = []
    for part in batch:
        with autocast(options.device, options.precision):
            log_probs, entropy = token_log_probs(policy, part.rollouts, options.temperature)
        loss, metrics = arm.loss(log_probs, entropy, part, bounds)
        loss.backward()
        losses.append(loss.detach())
        log_probs_of_parts.append(log_probs.detach())
        entropy_of_parts.append(entropy)
    # Without a limit the norm is measured, not clipped.
    norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), options.max_grad_norm or math.inf)

    whole = join(batch)
    log_probs = join_rows(log_probs_of_parts)
    entropy = join_rows(entropy_of_parts)
    # With one micro-batch, the metrics of the loop are those of the whole update already.
    if len(batch) > 1:
        with torch.no_grad():
            _, metrics = arm.loss(log_probs, entropy, whole, bounds)
    exact = options.precision == "float32"
    metrics["loss"] = torch.stack(losses).sum()
    metrics["grad_norm"] = norm
    metrics["log_ratio_newest"] = newest_log_ratio(log_probs, whole.rollouts, step, exact)
    numbers = read_numbers(metrics)

    if update == 1:
        check_first_ratio(numbers["log_ratio_newest"], exact)
    if not (math.isfinite(numbers["loss"]) and math.isfinite(numbers["grad_norm"])):
        raise NotFinite(step, update, numbers, whole)
    optimizer.step()
    optimizer.zero_grad()  # frees the gradients: no memory for them while responses are drawn
    return Update(numbers, whole, log_probs, entropy)


def bounds_over_micro_batches(
    policy, batch: Batch, arm: Arm, options: Options, unchanged: bool
) -> ClipBounds | tuple[Tensor, Tensor] | None:
    """Clip bounds of an update that is read in several micro-batches, or None.

    They need the ratios of all micro-batches before the first backward pass: one more forward pass,
    unless the policy is `unchanged` since `record`. None where bounds are fixed, or where the only
    micro-batch is the whole step: the loss then searches by itself.
    """
    if arm.bounds_are_fixed or len(batch) == 1:
        return None
    log_probs = []
    for part in batch:
        if unchanged:
            log_probs.append(part.start_log_probs)
        else:
            now, _ = log_probs_now(policy, part, options)
            log_probs.append(now)
    return arm.search_bounds(join_rows(log_probs), join(batch))


# ---------------------------------------------------------------- what an update sees
def make_batches(
    rollouts: Rollouts, advantages: Tensor, kept: Tensor, arm: Arm, micro_batch_tokens: int
) -> list[Batch]:
    """What the updates see in turn: the groups that are `kept`, in arm.parts mini-batches.

    advantages [N]; kept [groups] bool. Where fewer groups than arm.parts are kept, each is a
    mini-batch; where none is, the list is empty. Weights are those of a whole mini-batch, as each
    is one optimizer step.
    """
    rows = torch.arange(len(advantages), device=advantages.device).view(len(kept), -1)[kept]
    if not len(rows):
        return []
    batches = []
    for rows_of_groups in rows.tensor_split(min(arm.parts, len(rows))):
        rows_of_mini_batch = rows_of_groups.flatten()
        mini_batch = rollouts.select(rows_of_mini_batch)
        weights = token_weights(mini_batch.mask)
        of_mini_batch = advantages[rows_of_mini_batch]
        batch = []
        for rows_read in mini_batch.micro_batch_rows(micro_batch_tokens):
            part = mini_batch.select(rows_read)
            width = part.mask.shape[1]
            batch.append(MicroBatch(part, of_mini_batch[rows_read], weights[rows_read, :width]))
        batches.append(batch)
    return batches


def record(policy, batches: list[Batch], step: int, options: Options) -> None:
    """Fill in the log-probs and entropies of the tokens that this step's policy drew.

    They are read in the very micro-batches that the updates read, and kept there: the rollouts that
    these were selected from are not changed. Of partial rollouts, tokens of earlier policies keep
    what those gave.
    """
    for batch in batches:
        for part in batch:
            log_probs, entropy = log_probs_now(policy, part, options)
            rollouts = part.rollouts
            part.start_log_probs = log_probs
            part.ages = step - rollouts.versions
            drawn_now = part.ages == 0
            rollouts.log_probs = torch.where(drawn_now, log_probs, rollouts.log_probs)
            rollouts.entropy = torch.where(drawn_now, entropy, rollouts.entropy)


@torch.no_grad()
def log_probs_now(policy, part: MicroBatch, options: Options) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies, float32 [n, T] each, under the policy as it is; no gradient."""
    with autocast(options.device, options.precision):
        return token_log_probs(policy, part.rollouts, options.temperature)


def draw(
    state: "TrainState", problems: list[Problem], step: int, options: Options
) -> tuple[Rollouts | None, list[Problem], dict[str, float]]:
    """Draw responses. Returns rollouts, the problem of each group of them, and counts for the log.

    With partial rollouts these are the groups that are finished by now; None if none is.
    """
    with autocast(options.device, options.precision):
        if state.partial_rollouts:
            return state.partial_rollouts.advance(state.policy, state.tokenizer, problems, step)
        rollouts = generate(
            state.policy,
            state.tokenizer,
            [problem.prompt for problem in problems],
            group_size=options.group_size,
            max_new_tokens=options.max_new_tokens,
            temperature=options.temperature,
            batch_tokens=options.batch_tokens,
        )
    rollouts.versions = torch.full_like(rollouts.response_ids, step)
    # Places for `record`, which fills those of the micro-batches; these here stay 0.
    rollouts.log_probs = torch.zeros_like(rollouts.sampler_log_probs)
    rollouts.entropy = torch.zeros_like(rollouts.sampler_log_probs)
    return rollouts, problems, {}


# ---------------------------------------------------------------- a run's beginning and ends
@dataclass
class TrainState:
    """What a run holds while it goes on."""

    policy: torch.nn.Module
    tokenizer: object
    optimizer: torch.optim.Optimizer
    partial_rollouts: PartialRollouts | None
    files: dict[str, Lines]  # for each of LOG_FILES
    steps_done: int  # before it began, or went on


def begin(run: Run) -> TrainState:
    """A run's state, from its newest checkpoint or from its start."""
    options = run.options
    checkpoint = newest_checkpoint(run.folder)
    policy, tokenizer = load_policy(
        str(checkpoint or run.start),
        options.device,
        options.gradient_checkpointing,
        options.lora_rank,
        options.precision,
    )
    optimizer = torch.optim.AdamW(
        policy.parameters(), lr=options.learning_rate, weight_decay=0.0, fused=True
    )
    torch.manual_seed(run.seed)
    partial_rollouts = None
    if options.partial_budget:
        partial_rollouts = PartialRollouts(
            budget=options.partial_budget,
            max_age=MAX_AGE,
            max_new_tokens=options.max_new_tokens,
            group_size=options.group_size,
            temperature=options.temperature,
            batch_tokens=options.batch_tokens,
            micro_batch_tokens=options.micro_batch_tokens,
        )
    saved = {"step": 0, "sizes": dict.fromkeys(LOG_FILES, 0)}  # 0 bytes: the run begins afresh
    if checkpoint:
        saved = restore(checkpoint, options.device)
        optimizer.load_state_dict(saved["optimizer"])
        if partial_rollouts:
            partial_rollouts.groups = saved["waiting"]
    files = {}
    for name in LOG_FILES:
        files[name] = Lines(run.folder / f"{name}.jsonl", keep_bytes=saved["sizes"][name])
    read_metrics(run.folder / "metrics.jsonl")  # refuses a damaged one
    return TrainState(policy, tokenizer, optimizer, partial_rollouts, files, saved["step"])


def end_step(
    run: Run,
    state: TrainState,
    task: Task,
    log: dict[str, float],
    seconds: dict[str, float],
    batches: list[Batch],
) -> None:
    """Log what belongs to a step, not to an update, and save a checkpoint now and then.

    batches: [] if nothing was trained; held-out accuracy then belongs here, not into the line of
    the last update.
    """
    options = run.options
    step = log["step"]
    if batches:
        if "new_tokens" in log:  # partial rollouts
            drawn = log["new_tokens"]
        else:
            drawn = log["response_length"] * options.prompts_per_step * options.group_size
        seconds |= speeds(seconds, drawn, batches, run.arm.epochs)
    else:
        log |= evaluate_on_the_way(state.policy, state.tokenizer, task, options, step, seconds)
    write_step(run.folder, log, seconds, state.files, trained=bool(batches))
    if step % options.checkpoint_every == 0 or step == options.steps:
        waiting = state.partial_rollouts.groups if state.partial_rollouts else []
        training = {"optimizer": state.optimizer.state_dict(), "waiting": waiting}
        save_checkpoint(run.folder, step, state.policy, state.tokenizer, training, state.files)


def carry_out(run: Run, task: Task) -> None:
    """A run from its start or checkpoint to its end: the last checkpoint becomes the result."""
    with lock(run.folder / "lock"):
        if not (run.folder / "model").exists():
            try:
                train_run(run, task)
            except NotFinite as error:
                stop_not_finite(run.folder, error)
            empty_device()
            checkpoint = newest_checkpoint(run.folder)
            evaluate_policy(run.folder / "final.json", checkpoint, task, run.options)
        finish(run.folder)
    empty_device()


def empty_device() -> None:
    """Let go of all that the last model has held, before the next is loaded."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


# ---------------------------------------------------------------- the command
def make_runs(options: Options, task: Task) -> list[Run]:
    """All runs that the options ask for."""
    shared = shared_config(options, task)
    warm_start_seeds = [None] if options.data else options.warm_starts
    runs = []
    for seed in options.seeds:
        for warm_start_seed in warm_start_seeds:
            for arm in options.arms():
                config = shared | arm.config() | {"seed": seed}
                if options.data:
                    name = f"{arm.name}-seed{seed}"
                    start = options.model
                else:
                    name = f"{arm.name}-start{warm_start_seed}-seed{seed}"
                    start = str(options.warm_start(warm_start_seed))
                    config["warm_start"] = warm_start_seed
                folder = Path(options.output_dir) / name
                runs.append(Run(folder, arm, start, seed, options, config))
    return runs


def shared_config(options: Options, task: Task) -> dict:
    """What decides the numbers of every run that the options ask for."""
    config = asdict(options)
    # Left out: what a run has of its own (arm.config, seed, warm_start), where and how the command
    # works, and what only looks at a run.
    for name in (
        "methods",
        "seeds",
        "warm_starts",
        "jobs",
        "output_dir",
        "resume",
        "rho0",
        "low",
        "high",
        "evaluate_every",
    ):
        del config[name]
    problems = json.dumps([task.train, task.held_out]).encode()
    config["problems"] = hashlib.sha256(problems).hexdigest()[:16]
    if options.reward:
        source = Path(options.reward.rpartition(":")[0]).read_bytes()
        config["reward_source"] = hashlib.sha256(source).hexdigest()[:16]
    return config


def work_on(
    runs: list[Run],
    task: Task,
    options: Options,
    output: Path,
    jobs: int,
) -> dict[str, BaseException]:
    """Make the starts that are missing, evaluate them, and make all runs.

    output: the folder of the runs; jobs: processes side by side. Returns the failures, name ->
    exception.
    """
    if options.data:
        starts = {"": options.model}
    else:
        starts = {seed: options.warm_start(seed) for seed in options.warm_starts}
        failures = make_warm_starts(starts, options, jobs)
        if failures:
            return failures
    work = {}
    for name, start in starts.items():
        path = output / f"start{name}.json"
        if not path.exists():
            work[path.stem] = (output, evaluate_policy, path, start, task, options)
    # The longest first, so that no core is left with a long one at the end.
    for run in sorted(runs, key=lambda run: -run.arm.updates):
        work[run.folder.name] = (run.folder, carry_out, run, task)
    steps_left = sum(options.steps - steps_done(run.folder) for run in runs)
    return run_side_by_side(work, jobs, steps_left, meanwhile=lambda: plot.report(output))


def make_warm_starts(
    starts: dict[int, Path], options: Options, jobs: int
) -> dict[str, BaseException]:
    """Make those that are missing side by side; starts: seed -> folder. Returns the failures."""
    work = {}
    for seed, folder in starts.items():
        if not folder.exists():
            arguments = (seed, options.attempts, options.warm_start_steps, options.device)
            work[folder.name] = (folder.parent, warm_start, folder, *arguments)
    return run_side_by_side(work, jobs, options.warm_start_steps * len(work), "warm start")


def main(arguments: list[str] | None = None) -> int:
    """The command line. Returns the exit status: 0; 1 if a run failed or nothing was trained."""
    started = time.perf_counter()
    options = Options(**parse(Options, arguments, f"{__doc__}\n{Arm.__doc__}"))
    output = Path(options.output_dir)
    if options.data:
        task = load_task(options)
    else:
        task = Task(*countdown.problems(), countdown.grade)
    runs = make_runs(options, task)
    prepare_output(output, runs, options.resume)  # refuses before the first minute of training
    say(json.dumps(asdict(options)))
    cores = os.cpu_count() or 1
    jobs = options.jobs or (cores if options.device == "cpu" else 1)
    failures = work_on(runs, task, options, output, jobs)
    lines = []
    for run in runs:
        if (run.folder / "metrics.jsonl").exists():
            lines += read_metrics(run.folder / "metrics.jsonl")
    if not lines:
        return 1  # the failures were printed as they came
    say("\n".join(plot.report(output)))
    seconds = time.perf_counter() - started
    say(f"{output / 'curves.png'} and {output / 'table.md'} written after {seconds:.0f} s")
    if not any(line["update"] for line in lines):
        problem = (
            "nothing was trained: the rewards of every group were all equal,"
            " or, with partial rollouts, no group was finished"
        )
        say(f"{problem} (see reward in the table)", sys.stderr)
        return 1
    return 1 if failures else 0


if __name__ == "__main__":
    interrupted = (
        "Interrupted. Continue with the same command and --resume: of each run at most the steps"
        " since its last checkpoint (--checkpoint_every) are made again"
    )
    command("train.py", main, interrupted)
