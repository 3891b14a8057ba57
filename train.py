"""Train language models with GRPO, BAPO and other losses on reused samples, and draw the curves.

    python train.py                     # three methods on Countdown, then runs/default/curves.png
    python train.py --methods grpo@4 bapo@4 0.8-1.5@4 --seeds 0 1 2 --output_dir runs/four
    python train.py --model Qwen/Qwen2.5-1.5B-Instruct --data openai/gsm8k --methods bapo@8 \
--output_dir runs/gsm8k

The file begins with Algorithm 1. The classes in its signatures follow under "a run's state" and
"options". METHODS_HELP, near the end, says what --methods takes and what a run leaves in its
folder.

    step                one batch of rollouts, and all updates on it
    mini-batch          the groups that one update (one optimizer step) sees
    micro-batch         the responses that one backward pass sees
"""

from __future__ import annotations

import itertools
import math
import os
import re
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

import torch
import transformers
from torch import Tensor
from tqdm import tqdm
from transformers.hf_argparser import HfArg

from bapo import (
    GRPO,
    PAPER_APP_A,
    PAPER_MAIN,
    ClipSearch,
    bapo_loss,
    diagnostics,
    group_relative_advantages,
    predicted_entropy_fall,
    token_weights,
)
from reward import grade_all, pass_at_k
from rollout import (
    PartialRollouts,
    Rollouts,
    generate,
    micro_batches,
    response_texts,
    token_log_probs,
)
from support import checkpoints, command_line, countdown, data, files, processes
from support.loading import autocast, load_policy
from support.task import Problem, Task, problems_of_step


# ---------------------------------------------------------------- Algorithm 1
def train(run: Run, task: Task) -> TrainState:
    """Run Algorithm 1, from the folder's newest checkpoint if there is one."""
    options = run.options
    state = load_state(run)
    policy = state.policy
    steps = processes.progress_bar(range(state.steps_done + 1, options.steps + 1), run.folder.name)
    for step in steps:
        sampling_began = seconds(options.device)
        log = {"step": step, "update": 0}
        # Sample group_size responses to each prompt: y ~ pi_rollout, the current pi_theta.
        problems = problems_of_step(task.train, step, options.prompts_per_step, run.seed)
        with autocast(options.device, options.precision):
            if options.partial_budget:  # section 5.3: the groups that this step has finished
                rollouts, problems = state.partial_rollouts.advance(policy, problems, step)
            else:
                prompts = [problem.prompt for problem in problems]
                rollouts = generate(policy, prompts, **sampling_options(options))
                rollouts.versions.fill_(step)
        sampling_ended = seconds(options.device)
        if rollouts is not None:  # None: no group is finished
            # Rewards, and advantages relative to the group.
            texts = response_texts(state.tokenizer, rollouts)
            rewards = rewards_of(task, texts, rollouts, problems)
            rollouts.advantages = group_relative_advantages(rewards, options.group_size)
            if step == 1 or step % SAMPLES_EVERY == 0:
                write_samples(run, step, state.tokenizer, rollouts, texts, rewards, problems)
            # Filter: groups of equal rewards have no advantage, and no update sees them.
            kept = (rollouts.advantages.view(-1, options.group_size) != 0).any(1)
            mini_batches, dropped = split_batch(rollouts, kept, run.method, options)
            # log pi_rollout, from the micro-batches that training reads: the ratios begin at 1.
            # Dropped groups are read for the entropy alone, which is that of the whole batch.
            for micro_batch in itertools.chain(dropped, *mini_batches):
                record_rollout_policy(policy, rollouts, micro_batch, step, options)
            log |= batch_metrics(rollouts, rewards, kept, step)
            # For staleness = 0 ... E: one update each, with clip bounds of its own.
            updates = mini_batches * run.method.epochs  # the list of mini-batches, epochs times
            for update, mini_batch in enumerate(updates, 1):
                metrics = backward(policy, rollouts, mini_batch, run, step)
                check_update(run, step, update, metrics)
                state.optimizer.step()
                state.optimizer.zero_grad()  # frees the gradients before the next sampling
                log |= {"update": update} | metrics
                if update < len(updates):  # the step's last line is written in end_step
                    files.append_line(run.folder / "metrics.jsonl", log)
        log |= {
            "rollout_s": sampling_ended - sampling_began,
            "update_s": seconds(options.device) - sampling_ended,
        }
        end_step(run, state, task, step, log)
    return state


@torch.no_grad()
def record_rollout_policy(
    policy, rollouts: Rollouts, rows: Tensor, step: int, options: Options
) -> None:
    """Record log-probs and entropies of the tokens that this step's policy drew.

    Tokens of earlier steps (partial rollouts) keep what was recorded then.
    """
    with autocast(options.device, options.precision):
        log_probs, entropy = token_log_probs(policy, rollouts, rows, options.temperature)
    is_new = rollouts.versions[rows] == step
    rollouts.rollout_log_probs[rows] = log_probs.where(is_new, rollouts.rollout_log_probs[rows])
    rollouts.entropy[rows] = entropy.where(is_new, rollouts.entropy[rows])


def backward(
    policy, rollouts: Rollouts, mini_batch: list[Tensor], run: Run, step: int
) -> dict[str, float]:
    """Compute the gradient of one update, and return the update's metrics.

    The loss sees the log-probs of the whole update: it searches one pair of bounds, and divides by
    one token count, however many micro-batches there are.
    """
    options = run.options
    log_probs, entropy = read_log_probs(policy, rollouts, mini_batch, options)

    # Search c_low and c_high, then compute the clipped loss: -min(r A, clip(r, c_low, c_high) A)
    rows = torch.cat(mini_batch)
    log_pi_rollout = rollouts.rollout_log_probs[rows]
    advantages = rollouts.advantages[rows]
    mask = rollouts.mask[rows]
    loss, metrics = run.method.loss(log_probs, log_pi_rollout, advantages, mask)
    loss.backward()  # as far as the policy, or the log-probs if there are several micro-batches
    if len(mini_batch) > 1:
        push_gradient(policy, rollouts, mini_batch, log_probs.grad, options)
    # A limit of 0 means none: an infinite one measures the norm and does not clip it.
    norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), options.max_grad_norm or math.inf)

    log_probs = log_probs.detach()
    log_ratio = log_probs - log_pi_rollout
    newest = mask & (rollouts.versions[rows] == step)
    metrics |= {
        "loss": loss.detach(),
        "grad_norm": norm,
        "log_ratio_newest": log_ratio[newest].abs().mean(),
        "entropy_now": entropy.sum() / mask.sum(),
    }
    if run.method.search:
        bounds = (metrics["low"], metrics["high"])
        metrics["predicted_entropy_fall"] = predicted_entropy_fall(
            log_ratio, log_probs, entropy, advantages, mask, bounds
        )
    return {name: float(value) for name, value in metrics.items()}


def read_log_probs(
    policy, rollouts: Rollouts, mini_batch: list[Tensor], options: Options
) -> tuple[Tensor, Tensor]:
    """Return log-probs and entropies [n, T] of the n responses that an update sees.

    With one micro-batch they keep their graph. The graphs of several would not fit into memory
    together, so the log-probs are then computed without one. The result is a leaf, and
    push_gradient sends its gradient to the policy.
    """
    if len(mini_batch) == 1:
        with autocast(options.device, options.precision):
            return token_log_probs(policy, rollouts, mini_batch[0], options.temperature)
    log_probs = []
    entropies = []
    for micro_batch in mini_batch:
        with torch.no_grad(), autocast(options.device, options.precision):
            part, entropy = token_log_probs(policy, rollouts, micro_batch, options.temperature)
        log_probs.append(part)
        entropies.append(entropy)
    return torch.cat(log_probs).requires_grad_(), torch.cat(entropies)


def push_gradient(
    policy, rollouts: Rollouts, mini_batch: list[Tensor], gradient: Tensor, options: Options
) -> None:
    """Backpropagate d loss / d log-probs [n, T] into the policy, micro-batch by micro-batch.

    Each is read a second time, because read_log_probs has kept no graph.
    """
    gradient_parts = gradient.split([len(micro_batch) for micro_batch in mini_batch])
    for micro_batch, gradient_part in zip(mini_batch, gradient_parts):
        with autocast(options.device, options.precision):
            log_probs, _ = token_log_probs(policy, rollouts, micro_batch, options.temperature)
        log_probs.backward(gradient_part)


def split_batch(rollouts: Rollouts, kept: Tensor, method: Method, options: Options) -> tuple:
    """Return mini-batches, each a list of micro-batches, and the dropped groups' micro-batches.

    A micro-batch is a tensor of row numbers. kept: bool, one per group. With fewer kept
    groups than mini-batches, each group is a mini-batch.
    """
    # [groups, group_size]
    rows = torch.arange(len(rollouts.mask), device=kept.device).view(len(kept), -1)
    mini_batches = []
    for groups in rows[kept].tensor_split(method.mini_batches):
        if len(groups):
            mini_batch = micro_batches(rollouts, groups.flatten(), options.micro_batch_tokens)
            mini_batches.append(mini_batch)
    dropped = micro_batches(rollouts, rows[~kept].flatten(), options.micro_batch_tokens)
    return mini_batches, dropped


def check_update(run: Run, step: int, update: int, metrics: dict[str, float]) -> None:
    """Stop before a wrong gradient reaches the optimizer.

    Raises FloatingPointError if the loss or the gradient is not finite. Raises RuntimeError if
    the tokens that a step drew have a mean |log-ratio| above 1e-3 (0.03 in bfloat16) at its first
    update. It is 0 or nearly 0 if the same code has computed both log-probs.
    """
    where = f"{run.folder.name}, step {step}, update {update}"
    if not math.isfinite(metrics["loss"] + metrics["grad_norm"]):
        raise FloatingPointError(
            f"{where}: the loss is {metrics['loss']} and the gradient norm {metrics['grad_norm']}:"
            " make fewer updates on a batch, or lower --learning_rate in another --output_dir"
        )
    tolerance = 1e-3 if run.options.precision == "float32" else 0.03
    if update == 1 and metrics["log_ratio_newest"] > tolerance:
        raise RuntimeError(
            f"{where}: the mean |log ratio| of tokens that were just drawn is"
            f" {metrics['log_ratio_newest']:.3g}, and must be at most {tolerance}. Check that the"
            " forward passes of rollouts and training use the same temperature, dtype and mask"
        )


def end_step(run: Run, state: TrainState, task: Task, step: int, log: dict) -> None:
    """Write the step's last line, and the held-out accuracy and a checkpoint where they are due.

    Prints a line if all responses were cut off, or if the search never moved the bounds.
    """
    options = run.options
    if options.device != "cpu":
        log["peak_memory_gb"] = torch.cuda.max_memory_allocated(options.device) / 1e9
    if options.partial_budget:
        log["waiting_groups"] = len(state.partial_rollouts.groups)
    if options.evaluate_every and step % options.evaluate_every == 0:
        accuracies = evaluate(state.policy, state.tokenizer, task, options)
        log |= {f"held_out_{name}": value for name, value in accuracies.items()}
    files.append_line(run.folder / "metrics.jsonl", log)
    if step in (1, FIRST_STEPS) and log.get("truncated") == 1:
        tqdm.write(
            f"{run.folder.name}, step {step}: all responses were cut off, and have the reward 0."
            " Raise --max_new_tokens; or, if those in samples.jsonl end and go on, add the token"
            " that ends them to eos_token_id in the model's generation_config.json"
        )
    if step == FIRST_STEPS:
        warn_if_bounds_never_moved(run)
    if step % options.checkpoint_every == 0 or step == options.steps:
        checkpoints.save_checkpoint(
            run.folder,
            step,
            state.policy,
            state.tokenizer,
            state.optimizer,
            state.partial_rollouts.saved(),
        )


def warn_if_bounds_never_moved(run: Run) -> None:
    """Print a line if no search of the first steps has moved the bounds: BAPO is a fixed clip."""
    rho0 = run.method.search.rho0 if run.method.search else 0.0
    lines = files.read_lines(run.folder / "metrics.jsonl")
    rhos = [line["rho_start"] for line in lines if line.get("rho_start") is not None]
    if rho0 and rhos and min(rhos) >= rho0:
        tqdm.write(
            f"{run.folder.name}: the search has not moved the bounds, because rho is"
            f" {statistics.mean(rhos):.2f} before it, and rho0 is {rho0}. Run the method"
            " bapo with a higher --rho0 in a new folder"
        )


def seconds(device: str) -> float:
    """Return the time in seconds, after the device has finished its work."""
    if device != "cpu":
        torch.cuda.synchronize(device)
    return time.perf_counter()


# ---------------------------------------------------------------- a run's state
@dataclass(frozen=True)
class Method:
    """A loss, and how many updates it makes on a batch."""

    name: str
    search: ClipSearch | None
    epochs: int  # passes over a batch of rollouts
    mini_batches: int  # parts of a batch, with an update for each
    token_losses: Callable | None  # a loss of neighbours/losses.py, without a search

    def loss(
        self, log_probs: Tensor, rollout_log_probs: Tensor, advantages: Tensor, mask: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss of one update and its metrics, as bapo_loss does."""
        if self.search:
            return bapo_loss(log_probs, rollout_log_probs, advantages, mask, self.search)
        losses = self.token_losses(log_probs, rollout_log_probs, advantages, mask)
        log_ratio = log_probs.detach() - rollout_log_probs
        weights = token_weights(mask)
        loss = (weights * losses).sum()
        return loss, diagnostics(log_ratio, advantages, mask, bounds=None, weights=weights)


@dataclass
class Run:
    """One method with one seed, in its folder."""

    folder: Path
    method: Method
    seed: int
    options: Options


@dataclass
class TrainState:
    """What a run holds in memory."""

    policy: torch.nn.Module
    tokenizer: transformers.PreTrainedTokenizerBase
    optimizer: torch.optim.Optimizer
    partial_rollouts: PartialRollouts  # used with --partial_budget
    steps_done: int  # at the checkpoint that the run continues from, or 0


def load_state(run: Run) -> TrainState:
    """Load a run's newest checkpoint, or else the model that training begins with.

    What was logged after the checkpoint is cut off. Raises ValueError if the run's checkpoint has
    been removed.
    """
    options = run.options
    run.folder.mkdir(parents=True, exist_ok=True)
    folder_of_step = checkpoints.checkpoints(run.folder)
    steps_done = max(folder_of_step, default=0)
    if steps_done:
        start = folder_of_step[steps_done]
    else:
        checkpoints.check_nothing_is_lost(run.folder, options.checkpoint_every)
        start = start_of(run.seed, options)
    policy, tokenizer = policy_of(start, options)
    trained = [parameter for parameter in policy.parameters() if parameter.requires_grad]
    if hasattr(policy, "peft_config"):
        count, total = policy.get_nb_trainable_parameters()
        layers = {name.rpartition(".")[2] for name in policy.targeted_module_names}
        tqdm.write(
            f"{run.folder.name}: trains {count:,} of {total:,} weights, with adapters at"
            f" {', '.join(sorted(layers))}"
        )
    optimizer = torch.optim.AdamW(trained, lr=options.learning_rate, weight_decay=0.0, fused=True)
    partial_rollouts = PartialRollouts(options.partial_budget, **sampling_options(options))
    for name in ("metrics.jsonl", "samples.jsonl"):
        files.keep_steps(run.folder / name, steps_done)
    torch.manual_seed(run.seed)  # after loading, which draws new adapters with a seed of its own
    if options.device != "cpu":
        torch.cuda.reset_peak_memory_stats(options.device)
    if steps_done:
        waiting = checkpoints.load_training_state(start, optimizer, options.device)
        partial_rollouts.restore(waiting)
        checkpoints.remove_older_checkpoints(run.folder)
    (run.folder / "final.json").unlink(missing_ok=True)  # of a command with fewer --steps
    return TrainState(policy, tokenizer, optimizer, partial_rollouts, steps_done)


def policy_of(name: str | Path, options: Options) -> tuple:
    """Return model and tokenizer of a folder or hub id, set up as the options say."""
    return load_policy(
        str(name),
        options.device,
        precision=options.precision,
        lora_rank=options.lora_rank,
        gradient_checkpointing=options.gradient_checkpointing,
    )


def sampling_options(options: Options) -> dict:
    """Return the sampling options of rollout.generate and PartialRollouts."""
    return {
        "group_size": options.group_size,
        "max_new_tokens": options.max_new_tokens,
        "temperature": options.temperature,
        # Sampling needs less memory per token: keys and values, not all activations.
        "batch_tokens": 32 * options.micro_batch_tokens,
    }


# ---------------------------------------------------------------- rewards, metrics, evaluation
SAMPLES_EVERY = 10  # steps between the responses that samples.jsonl keeps
FIRST_STEPS = 20  # after these, a run warns of bounds that never moved and of cut responses


def rewards_of(task: Task, texts: list[str], rollouts: Rollouts, problems: list[Problem]) -> Tensor:
    """Return rewards float32 [B]; problems holds one per group. Truncated responses get 0."""
    group_size = len(texts) // len(problems)
    answers = [problem.answer for problem in problems for _ in range(group_size)]
    rewards = grade_all(task.grader, texts, answers, rollouts.truncated.tolist())
    return torch.tensor(rewards, dtype=torch.float32, device=rollouts.mask.device)


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


def evaluate(policy, tokenizer, task: Task, options: Options) -> dict[str, float]:
    """Return the mean reward on the held-out problems, and unbiased pass@k.

    They are "mean@16" and "pass@8", of 16 responses per problem at --temperature; with --data
    "mean@4" and "pass@4", of 4. For pass@k a response is right if its reward is above 0. The random
    state is restored afterwards.
    """
    samples = 4 if options.data else 16
    k = min(8, samples)
    prompts = [problem.prompt for problem in task.held_out]
    devices = [] if policy.device.type == "cpu" else [policy.device]
    with torch.random.fork_rng(devices), autocast(options.device, options.precision):
        torch.manual_seed(0)
        sampling = sampling_options(options) | {"group_size": samples}
        rollouts = generate(policy, prompts, **sampling)
    rewards = rewards_of(task, response_texts(tokenizer, rollouts), rollouts, task.held_out)
    right_counts = (rewards.view(-1, samples) > 0).sum(1).tolist()
    return {
        f"mean@{samples}": rewards.double().mean().item(),
        f"pass@{k}": statistics.mean(pass_at_k(samples, count, k) for count in right_counts),
    }


def write_samples(run: Run, step: int, tokenizer, rollouts, texts, rewards, problems) -> None:
    """Write the first prompt's responses to samples.jsonl."""
    token_ids, answer = problems[0]
    common = {"step": step, "prompt": tokenizer.decode(token_ids), "answer": answer}
    group = zip(texts[: run.options.group_size], rollouts.truncated.tolist(), rewards.tolist())
    for text, truncated, reward in group:
        sample = common | {"response": text, "truncated": truncated, "reward": reward}
        files.append_line(run.folder / "samples.jsonl", sample)


# ---------------------------------------------------------------- options
@dataclass
class Options:
    """All options. None means the task's default. Raises ValueError for a wrong option."""

    methods: list[str] = HfArg(
        default_factory=lambda: ["grpo@1", "grpo@8", "bapo@8"], help="NAME@UPDATES, see above"
    )
    seeds: list[int] = HfArg(default_factory=lambda: [0], help="each method runs once per seed")
    steps: int = HfArg(default=140, help="batches of rollouts per run")
    prompts_per_step: int = HfArg(default=16, help="prompts in a batch")
    group_size: int = HfArg(default=8, help="responses per prompt")
    attempts: int = HfArg(default=2, help="Countdown: most attempts in a demonstration")
    max_new_tokens: int | None = HfArg(
        default=None,
        help="most tokens of a response; without an EOS its reward is 0 [14 per attempt; with"
        " --data 1024]",
    )
    temperature: float = HfArg(default=1.0, help="of sampling and of all log-probs")
    partial_budget: int = HfArg(
        default=0,
        help="partial rollouts (section 5.3): most tokens of a response drawn in a step; 0: off",
    )
    learning_rate: float | None = HfArg(
        default=None, help="of AdamW, constant, without weight decay [2e-4; with --data 1e-6]"
    )
    max_grad_norm: float | None = HfArg(
        default=None, help="clip the gradient norm at this; 0 is off [0; with --data 1]"
    )
    rho0: float | None = HfArg(
        default=None, help="bapo: target of rho [0.44; with --data 0.4, the paper's]"
    )
    warm_start_steps: int = HfArg(
        default=countdown.WARM_START_STEPS, help="Countdown: steps of the supervised checkpoint"
    )
    model: str = HfArg(
        default="", help="hub id or folder of a model; empty: Countdown and its own model"
    )
    data: str = HfArg(
        default="",
        help="with --model: a .jsonl, .json or .parquet file, or a hub data set: NAME (its split"
        " train), NAME:SPLIT or NAME:CONFIGURATION/SPLIT",
    )
    fields: list[str] = HfArg(
        default_factory=list, help="with --data: names of the prompt's and the answer's field"
    )
    reward: str = HfArg(
        default="",
        help="with --data: FILE.py:FUNCTION(response, answer), from 0 to 1 [compare the answers]",
    )
    held_out: int = HfArg(default=256, help="with --data: problems kept for evaluation")
    lora_rank: int = HfArg(
        default=0,
        help="train LoRA adapters (peft) of this rank; 0: all weights, or an adapter folder's",
    )
    device: str = HfArg(
        default="cuda" if torch.cuda.is_available() else "cpu", help="cpu, cuda, cuda:1, ..."
    )
    precision: Literal["float32", "bfloat16"] | None = HfArg(
        default=None,
        help="of forward passes [float32; with --data on a GPU bfloat16]; trained weights: float32",
    )
    micro_batch_tokens: int = HfArg(
        default=2**13, help="most tokens in a backward pass; 32 times as many are drawn together"
    )
    gradient_checkpointing: bool = HfArg(
        default=False, help="recompute activations in the backward pass, for less memory"
    )
    jobs: int = HfArg(
        default=1 if torch.cuda.is_available() else os.cpu_count() or 1,
        help="runs side by side, each on one CPU thread; --data with --jobs 1: all threads",
    )
    checkpoint_every: int = HfArg(default=5, help="steps between checkpoints")
    evaluate_every: int = HfArg(
        default=0, help="steps between held-out evaluations; 0: only before and after training"
    )
    output_dir: str = HfArg(
        default="runs/default",
        help="folder of the runs; supervised checkpoints go into `starts` beside it",
    )
    resume: bool = HfArg(
        default=False, help="continue the runs in output_dir; more --steps make them longer"
    )

    def __post_init__(self):
        with_data = bool(self.data)
        if bool(self.model) != with_data:
            raise ValueError(
                f"model and data go together, got {self.model!r} and {self.data!r}: give both, or"
                " neither for Countdown"
            )
        unused = ("attempts", "warm_start_steps") if with_data else ("fields", "reward", "held_out")
        for name in unused:
            # A field with a default_factory is no attribute of the class; its default is [].
            if getattr(self, name) != getattr(Options, name, []):
                where = "with" if with_data else "without"
                raise ValueError(f"{name} does nothing {where} --data: leave it out")
        uses_rho0 = any(method.startswith("bapo@") for method in self.methods)
        # A resumed command repeats its rho0, and may ask for other methods.
        if self.rho0 is not None and not uses_rho0 and not self.resume:
            raise ValueError(f"rho0 is used by the method bapo alone, got methods {self.methods}")
        defaults = {  # of Countdown, and of --data
            "max_new_tokens": (14 * self.attempts, 1024),
            "learning_rate": (2e-4, 1e-6),
            "rho0": (0.44, PAPER_MAIN.rho0),
            "max_grad_norm": (0.0, 1.0),
            "precision": ("float32", "float32" if self.device == "cpu" else "bfloat16"),
        }
        for name, (of_countdown, of_data) in defaults.items():
            if getattr(self, name) is None:
                setattr(self, name, of_data if with_data else of_countdown)
        command_line.check_values(self, LEAST)
        for method in self.methods:
            parse_method(method, self)


# The least value of each option that has one
LEAST = {
    "seeds": 0,
    "steps": 1,
    "prompts_per_step": 1,
    "group_size": 2,
    "attempts": 1,
    "max_new_tokens": 1,
    "temperature": 0.01,
    "partial_budget": 0,
    "learning_rate": 1e-12,
    "max_grad_norm": 0,
    "warm_start_steps": 1,
    "held_out": 1,
    "lora_rank": 0,
    "micro_batch_tokens": 1,
    "jobs": 1,
    "checkpoint_every": 1,
    "evaluate_every": 0,
}

# Options that --resume may change
MAY_DIFFER = {
    "methods",
    "seeds",
    "steps",
    "device",
    "micro_batch_tokens",
    "gradient_checkpointing",
    "jobs",
    "evaluate_every",
    "output_dir",
    "resume",
}


# ---------------------------------------------------------------- methods
METHODS_HELP = """\
--methods: a method is NAME@UPDATES, which makes UPDATES optimizer steps on each batch of rollouts.
1 is on-policy; the paper calls UPDATES - 1 the staleness E. NAME@EPOCHSxMINIBATCHES cuts the batch
into mini-batches of whole groups and goes through them EPOCHS times: 8 is 8x1, and 2x4 is the
authors' scheme. The names are

    grpo                fixed clip bounds [0.8, 1.2]
    LOW-HIGH            your own fixed bounds, as ratios: 0.8-1.28 is DAPO's Clip-Higher
    bapo                bounds searched anew for every update, in the paper's main range
                        (section 5.1), with the target --rho0
    bapo-main           the same with the paper's rho0 = 0.4
    bapo-app-a          the paper's setting for OctoThinker (App. A)
    bapo-app-a-gradient the same, with rho computed from gradients (bapo.ClipSearch.contribution)
    cispo, gspo, ...    other methods' token losses, from neighbours/losses.py

A run is a method and a seed. The seed sets Countdown's supervised checkpoint, the order of the
prompts and the sampling. Its folder METHOD-seedSEED holds metrics.jsonl (a line per update; see
docs/logs.md), samples.jsonl (some responses), final.json (held-out accuracy) and the newest
checkpoint, which transformers loads and --resume continues. output_dir also holds config.json,
start-seedSEED.json (held-out accuracy before training; only one with --model), curves.png and
table.md.

To try other ranges, add a ClipSearch to SEARCHES. To change the loss, edit token_losses,
unclipped and contribution_masses in bapo.py; or add a function (log_probs, rollout_log_probs,
advantages, mask) -> losses [B, T] to LOSSES in neighbours/losses.py. Its key there becomes a
method's name. To change the task, use --data and --reward.
"""
SEARCHES = {
    "grpo": GRPO,
    "bapo-main": PAPER_MAIN,
    "bapo-app-a": PAPER_APP_A,
    "bapo-app-a-gradient": replace(PAPER_APP_A, contribution="gradient"),
}  # parse_method adds "bapo", whose rho0 is --rho0


def parse_method(text: str, options: Options) -> Method:
    """Return the method that `text` names. Raises ValueError if there is none."""
    match = re.fullmatch(r"(.+)@([1-9]\d*)(?:x([1-9]\d*))?", text)
    if not match:
        raise ValueError(
            f"methods: {text!r} must be NAME@UPDATES or NAME@EPOCHSxMINIBATCHES, such as grpo@8"
        )
    name, epochs, mini_batches = match.groups(default="1")
    searches = SEARCHES | {"bapo": replace(PAPER_MAIN, rho0=options.rho0)}
    bounds = re.fullmatch(r"(\d*\.?\d+)-(\d*\.?\d+)", name)
    token_losses = None
    if bounds:
        searches[name] = ClipSearch.fixed(float(bounds[1]), float(bounds[2]))
    elif name not in searches:
        from neighbours.losses import LOSSES  # no other method needs them

        if name not in LOSSES:
            known = ", ".join([*searches, "LOW-HIGH", *LOSSES])
            raise ValueError(f"methods: {name!r} in {text!r} must be one of {known}")
        token_losses = LOSSES[name]
    return Method(text, searches.get(name), int(epochs), int(mini_batches), token_losses)


# ---------------------------------------------------------------- the command
def train_and_evaluate(run: Run, task: Task) -> None:
    """Finish a run and write its held-out accuracy to final.json."""
    path = run.folder / "final.json"
    steps = run.options.steps
    if path.exists() and files.read_json(path).get("steps") == steps:
        return
    state = train(run, task)
    accuracies = evaluate(state.policy, state.tokenizer, task, run.options)
    files.write_json(path, {"steps": steps} | accuracies)


def evaluate_start(path: Path, seed: int, task: Task, options: Options) -> None:
    """Write the held-out accuracy before training to `path`, unless it is there."""
    if path.exists():
        return
    policy, tokenizer = policy_of(start_of(seed, options), options)
    tqdm.write(f"{path.stem}: evaluating on {len(task.held_out)} problems before the first step")
    files.write_json(path, evaluate(policy, tokenizer, task, options))


def start_of(seed: int, options: Options) -> str:
    """Return the folder or hub id of the model that training begins with.

    Countdown's supervised checkpoint is trained if it is missing; output folders that lie side by
    side share it.
    """
    if options.model:
        return options.model
    starts = Path(options.output_dir).parent / "starts"
    return str(countdown.saved_start(starts, seed, options.attempts, options.warm_start_steps))


def main(arguments: list[str] | None = None) -> int:
    """Run the command line. Returns the exit status: 0, or 1 if a run failed."""
    options = command_line.parse(Options, arguments, f"{__doc__}\n{METHODS_HELP}")
    output = Path(options.output_dir)
    task = data.load_task(options) if options.data else countdown.load_task()
    from support import plot  # slow, so only after the options have been checked

    with files.lock(output / ".lock"):
        checkpoints.write_config(output / "config.json", asdict(options), MAY_DIFFER)
        failed = make_runs(output, options, task)
        if any(path.stat().st_size for path in output.glob("*-seed*/metrics.jsonl")):
            print(plot.report(output), end="")
    if failed:
        print(f"These runs failed for the reasons above: {', '.join(failed)}", file=sys.stderr)
        return 1
    print(f"The curves are in {output}/curves.png and this table in {output}/table.md.")
    return 0


def make_runs(output: Path, options: Options, task: Task) -> list[str]:
    """Make the runs that are missing; return the names of those that failed."""
    calls = {}
    # With --model, every seed begins with the same model.
    evaluated = options.seeds[:1] if options.model else options.seeds
    for seed in evaluated:
        path = output / f"start-seed{seed}.json"
        calls[path.stem] = (evaluate_start, path, seed, task, options)
    for text in options.methods:
        method = parse_method(text, options)
        for seed in options.seeds:
            run = Run(output / f"{method.name}-seed{seed}", method, seed, options)
            calls[run.folder.name] = (train_and_evaluate, run, task)
    # Countdown's numbers should be the same with any --jobs: sums depend on the number of threads.
    return processes.run_side_by_side(calls, options.jobs, one_thread=not options.data)


if __name__ == "__main__":
    command_line.command(
        "train.py",
        main,
        "Interrupted. The same command with --resume continues every run from its last checkpoint.",
    )
