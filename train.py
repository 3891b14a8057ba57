"""Train language models with GRPO, BAPO and their like on stale samples, and draw what happens.

    python train.py                     # three methods on Countdown, then runs/default/curves.png
    python train.py --methods grpo@4 bapo@4 0.8-1.5@4 --seeds 0 1 2 --output_dir runs/four
    python train.py --model Qwen/Qwen2.5-1.5B-Instruct --data openai/gsm8k --methods bapo@8

A method is NAME@UPDATES: UPDATES optimizer steps on each batch of rollouts (default 8; 1 is
on-policy; E + 1 for the paper's staleness E; the "k x" of its figures). NAME@EPOCHSxMINIBATCHES
cuts the batch into so many mini-batches of whole groups, and goes through them EPOCHS times: 8 is
8x1, 2x4 is how the authors split a batch. Names:

    grpo                fixed clip bounds [0.8, 1.2]
    clip-higher         fixed clip bounds [0.8, 1.28] (DAPO)
    LOW-HIGH            fixed bounds of your own, as absolute ratios: 0.8-1.5
    bapo                bounds searched anew for every update (--rho0, --low, --high,
                        --contribution): by default the paper's main range (section 5.1)
    bapo-main           the same with the paper's numbers, rho0 = 0.4 included
    bapo-app-a          the paper's range for OctoThinker (App. A)
    bapo-app-a-gradient the same; a token counts the mass of its gradient in rho
    cispo, gspo, ...    neighbours: token losses of other methods, from neighbours/losses.py

A run is a method and a seed. The seed sets Countdown's supervised start, the order of the prompts
and the sampling. Its folder, METHOD-seedSEED, holds

    metrics.jsonl       a line per update; timings.jsonl: a line per step (see METRICS)
    samples.jsonl       a line per response that is kept to look at
    checkpoint-STEP/    the newest one: a model that transformers loads, and all that --resume needs
    final.json          held-out accuracy at the end

Beside the runs lie config.json, start-seedSEED.json (held-out accuracy before), curves.png and
table.md.

To change the loss: bapo.token_losses, with unclipped and contribution_masses beside it; or a new
function (log_probs, rollout_log_probs, advantages, mask) -> losses [N, T] in LOSSES of
neighbours/losses.py, whose key is then a method's name. The task: --data and --reward, or
data.load_task. What is logged: update_metrics, of an update; batch_metrics, of a batch. What is
saved: end_step, which writes it, and load_state, which reads it.

    step                one batch of rollouts, and all updates on it
    mini-batch          the groups that one update (one optimizer step) sees
    micro-batch         the responses that one forward and backward pass sees
"""

import hashlib
import itertools
import json
import math
import os
import re
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from os.path import abspath, isdir
from pathlib import Path
from typing import Literal

import torch
import transformers
from torch import Tensor

import countdown
import data
import runs
from bapo import (
    CLIP_HIGHER,
    GRPO,
    PAPER_APP_A,
    PAPER_MAIN,
    ClipSearch,
    bapo_loss,
    contribution_masses,
    diagnostics,
    predicted_entropy_fall,
    group_relative_advantages,
    search_clip_bounds,
    token_weights,
)
from data import Task
from neighbours.losses import LOSSES
from reward import Problem, grade_all, pass_at_k
from rollout import (
    PartialRollouts,
    Rollouts,
    autocast,
    generate,
    load_policy,
    log_probs_now,
    micro_batches,
    response_texts,
    token_log_probs,
)
from runs import AT_LEAST_0, AT_LEAST_1, option

SEARCHES = {
    "grpo": GRPO,
    "clip-higher": CLIP_HIGHER,
    "bapo-main": PAPER_MAIN,
    "bapo-app-a": PAPER_APP_A,
    "bapo-app-a-gradient": replace(PAPER_APP_A, contribution="gradient"),
}  # and "bapo", which the options give
MICRO_BATCH_TOKENS = 2**13
SAMPLES_EVERY = 10  # steps between responses that are kept to look at
FIRST_STEPS = 20  # after which a run whose bounds have not moved says so
# What decides the numbers; --resume says which of them have changed.
SCRIPTS = (
    "bapo.py",
    "countdown.py",
    "data.py",
    "neighbours/losses.py",
    "reward.py",
    "rollout.py",
    "train.py",
)


# ---------------------------------------------------------------- options
@dataclass
class Options:
    """All options. What is None or "auto" is filled in. Raises ValueError that names the option."""

    methods: list[str] = option(
        ["grpo@1", "grpo@8", "bapo@8"],
        "NAME@UPDATES, see above",
    )
    seeds: list[int] = option([0], "a run of every method for each")
    steps: int = option(140, "batches of rollouts per run")
    prompts_per_step: int = option(16, "prompts in a batch")
    group_size: int = option(8, "responses per prompt")
    max_new_tokens: int | None = option(
        None,
        "length limit of a response; one without EOS by then gets 0 [14 for each of"
        " --attempts; with --data 1024]",
    )
    temperature: float = option(1.0, "of sampling, and of every log-prob")
    partial_budget: int = option(
        0,
        "partial rollouts (5.3): most tokens per response and step, then it waits; 0: off",
    )
    learning_rate: float | None = option(
        None, "of AdamW, constant, no weight decay [2e-4; with --data 1e-6]"
    )
    max_grad_norm: float | None = option(
        None, "clip the gradient's norm here; 0: not [0; with --data 1]"
    )
    rho0: float | None = option(
        None,
        "of bapo: target share of positive tokens in the loss [0.44, some .03 above what GRPO"
        " has there; with --data the paper's 0.4]",
    )
    low: list[float] = option(
        [ClipSearch.low_start, ClipSearch.low_max, ClipSearch.low_step],
        "of bapo: lower bound, START MAX STEP, as absolute ratios",
    )
    high: list[float] = option(
        [ClipSearch.high_start, ClipSearch.high_max, ClipSearch.high_step],
        "of bapo: upper bound, START MAX STEP, as absolute ratios",
    )
    contribution: Literal["surrogate", "gradient"] = option(
        ClipSearch.contribution,
        "of bapo: what a token counts in its share, its value in Eq. 8 or its gradient's mass",
    )
    attempts: int = option(
        2,
        "Countdown: most attempts in a response; more make failing ones longer, and rho smaller",
    )
    warm_start_steps: int = option(countdown.WARM_START_STEPS, "Countdown: supervised steps before")
    model: str = option(
        "",
        "hub id or local folder of a model and its tokenizer; empty: Countdown and its own",
    )
    data: str = option(
        "",
        "with --model: a .jsonl, .json or .parquet file, or a data set of the hub, whose split"
        " train is taken unless it is given as NAME:SPLIT or NAME:CONFIGURATION/SPLIT",
    )
    fields: list[str] = option([], "with --data: names of prompt and answer [found by usual names]")
    reward: str = option(
        "",
        "with --data: FILE.py:FUNCTION(response, answer), from 0 to 1 [compares answers]",
    )
    held_out: int = option(256, "with --data: problems that no run trains on, for evaluation")
    lora_rank: int = option(0, "train adapters (peft) of this rank, not all weights; 0: off")
    device: str = option("cuda" if torch.cuda.is_available() else "cpu", "cpu, cuda, cuda:1, ...")
    precision: Literal["auto", "float32", "bfloat16"] = option(
        "auto",
        "of forward passes: float32, or bfloat16 by autocast, which auto takes with --data on"
        " a GPU; trained weights stay float32",
    )
    micro_batch_tokens: int = option(
        MICRO_BATCH_TOKENS,
        "most tokens, padding included, in one forward and backward pass; 32 times as many are"
        " drawn together",
    )
    gradient_checkpointing: bool = option(False, "compute layers again, for less memory")
    jobs: int = option(
        0, "runs side by side, one thread each; 0: one per core on a CPU, one on a GPU"
    )
    checkpoint_every: int = option(5, "steps between checkpoints")
    evaluate_every: int = option(0, "steps between held-out evaluations; 0: before and after only")
    output_dir: str = option("runs/default", "folder of the runs; starts lie beside it")
    resume: bool = option(
        False,
        "continue what is unfinished in output_dir; with more --steps, make it longer",
    )

    def __post_init__(self):
        with_data = bool(self.data)
        if bool(self.model) != with_data:
            raise ValueError(
                f"model and data go together: {self.model!r} and {self.data!r}; give both, or"
                " neither for Countdown"
            )
        if self.reward and not with_data:
            raise ValueError(f"reward goes with --data, as Countdown has its own: {self.reward!r}")
        if self.max_new_tokens is None:
            self.max_new_tokens = 1024 if with_data else 14 * self.attempts
        if self.learning_rate is None:
            self.learning_rate = 1e-6 if with_data else 2e-4
        if self.rho0 is None:
            self.rho0 = PAPER_MAIN.rho0 if with_data else 0.44
        if self.max_grad_norm is None:
            self.max_grad_norm = 1.0 if with_data else 0.0
        runs.check_options(self, LIMITS)
        for name in ("low", "high"):
            if len(getattr(self, name)) != 3:
                raise ValueError(
                    f"{name} takes three values, START MAX STEP, such as 0.8 0.9 0.02, got"
                    f" {getattr(self, name)}"
                )
        if self.precision == "auto":  # Countdown's model is small
            self.precision = "bfloat16" if with_data and self.device != "cpu" else "float32"
        if not self.jobs:
            self.jobs = (os.cpu_count() or 1) if self.device == "cpu" else 1
        methods = [parse_method(method, self).name for method in self.methods]
        for name, values in (("methods", methods), ("seeds", self.seeds)):
            if not values or len(set(values)) < len(values):
                raise ValueError(f"{name} must be different and at least one, got {values}")


# Option -> least and most; of a list every value.
LIMITS = {
    "attempts": AT_LEAST_1,  # before the length limit that follows from it
    "seeds": (0, 2**32 - 1),
    "steps": AT_LEAST_1,
    "prompts_per_step": AT_LEAST_1,
    "group_size": (2, math.inf),
    "max_new_tokens": AT_LEAST_1,
    "temperature": (0.01, 100.0),
    "partial_budget": AT_LEAST_0,
    "learning_rate": (1e-12, 1.0),
    "max_grad_norm": (0.0, math.inf),
    "warm_start_steps": AT_LEAST_1,
    "held_out": AT_LEAST_1,
    "lora_rank": AT_LEAST_0,
    "micro_batch_tokens": AT_LEAST_1,
    "jobs": AT_LEAST_0,
    "checkpoint_every": AT_LEAST_1,
    "evaluate_every": AT_LEAST_0,
}
# What may change when runs are continued: the experiment is the same, if not every random number.
MAY_DIFFER = {
    "methods",
    "seeds",
    "steps",
    "device",
    "micro_batch_tokens",
    "gradient_checkpointing",
    "jobs",
    "checkpoint_every",
    "evaluate_every",
    "output_dir",
    "resume",
    "versions",
    "scripts",
}


@dataclass(frozen=True)
class Method:
    """What a run trains with."""

    name: str
    # (log_probs, rollout_log_probs, advantages, mask, *, weights, bounds) -> loss, metrics:
    # bapo_loss with a search, or neighbour_loss with token losses
    loss: Callable
    search: ClipSearch | None  # None: a neighbour
    epochs: int  # times that a batch of rollouts is gone through
    mini_batches: int  # parts of a batch, an update for each


def neighbour_loss(
    token_losses: Callable,
    log_probs: Tensor,
    rollout_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    weights: Tensor,
    bounds: None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """bapo_loss for the token losses of another method. Its metrics are those without bounds."""
    losses = token_losses(log_probs, rollout_log_probs, advantages, mask)
    log_ratio = log_probs.detach() - rollout_log_probs
    metrics = diagnostics(log_ratio, advantages, mask, (0.0, math.inf), weights)
    return (weights * losses).sum(), metrics


def parse_method(text: str, options: Options) -> Method:
    """The method that `text` names. Raises ValueError for one that makes no sense."""
    match = re.fullmatch(r"([^@]+)(?:@([1-9]\d*)(?:x([1-9]\d*))?)?", text)
    if not match:
        raise ValueError(
            f"methods: {text!r} must be NAME@UPDATES or NAME@EPOCHSxMINIBATCHES: grpo@8"
        )
    name = match[1]
    epochs = int(match[2] or 8)
    mini_batches = int(match[3] or 1)
    bapo = ClipSearch(options.rho0, *options.low, *options.high, options.contribution)
    searches = SEARCHES | {"bapo": bapo}
    bounds = re.fullmatch(r"(\d*\.?\d+)-(\d*\.?\d+)", name)
    if bounds:
        low = float(bounds[1])
        high = float(bounds[2])
        name = f"{low}-{high}"  # .8-1.2 is 0.8-1.2
        searches[name] = ClipSearch.fixed(low, high)
    if name in searches:
        loss = partial(bapo_loss, search=searches[name])
    elif name in LOSSES:
        loss = partial(neighbour_loss, LOSSES[name])
    else:
        known = ", ".join([*searches, "LOW-HIGH", *LOSSES])
        raise ValueError(f"methods: {name!r} in {text!r} is none of {known}")
    scheme = f"{epochs}" if mini_batches == 1 else f"{epochs}x{mini_batches}"
    return Method(f"{name}@{scheme}", loss, searches.get(name), epochs, mini_batches)


# ---------------------------------------------------------------- Algorithm 1
@dataclass
class Run:
    """One method with one seed, in its folder."""

    folder: Path
    method: Method
    seed: int
    options: Options


def train(run: Run, task: Task) -> "TrainState":
    """Algorithm 1. Continues from the folder's checkpoint if there is one.

    Raises what check_update raises, before the optimizer sees the gradient.
    """
    options = run.options
    method = run.method
    state = load_state(run)
    policy = state.policy
    for step in range(state.steps_done + 1, options.steps + 1):
        clock = Clock(options.device)
        # y ~ pi_rollout <- pi_theta: group_size responses to each prompt (token ids)
        problems = data.problems_of_step(task.train, step, options.prompts_per_step, run.seed)
        with clock("rollout_s"), autocast(options.device, options.precision):
            if options.partial_budget:  # (5.3) those of the groups that are finished by now
                rollouts, problems = state.partial.advance(policy, problems, step)
            else:
                rollouts = generate(policy, [p.prompt for p in problems], **sampling(options))
                rollouts.versions.fill_(step)
        if rollouts is None:
            end_step(run, state, task, {"step": step, "update": 0}, clock)
            continue
        # Rewards, and advantages; groups of equal rewards have none, and are filtered out
        with clock("grading_s"):
            texts = response_texts(state.tokenizer, rollouts)
            rewards = grade(task, texts, rollouts, problems)
        if step == 1 or step % SAMPLES_EVERY == 0:
            write_samples(run, step, state.tokenizer, texts, rewards, problems)
        rollouts.advantages = group_relative_advantages(rewards, options.group_size)
        kept = (rollouts.advantages.view(-1, options.group_size) != 0).any(1)
        # What the updates see in turn: each a list of micro-batches, which are numbers of rows
        rows = torch.arange(len(rewards), device=rewards.device).view(len(problems), -1)
        mini_batches = []
        for groups in rows[kept].tensor_split(method.mini_batches):
            mini_batch = micro_batches(rollouts, groups.flatten(), options.micro_batch_tokens)
            if mini_batch:  # fewer groups may be kept than there are mini-batches
                mini_batches.append(mini_batch)
        dropped = micro_batches(rollouts, rows[~kept].flatten(), options.micro_batch_tokens)
        # log pi_rollout, by the forward pass that trains and in the micro-batches that train: then
        # rounding cannot move the ratios of a policy that has not changed. Groups filtered out are
        # read for the log alone.
        with clock("update_s"), autocast(options.device, options.precision):
            everything = [*itertools.chain(*mini_batches), *dropped]
            log_probs, entropy = log_probs_now(policy, rollouts, everything, options.temperature)
        drawn_now = rollouts.versions == step  # older tokens keep what their policies gave
        rollouts.rollout_log_probs = torch.where(drawn_now, log_probs, rollouts.rollout_log_probs)
        rollouts.entropy = torch.where(drawn_now, entropy, rollouts.entropy)
        updates = mini_batches * method.epochs
        log = {"step": step, "update": 0, "updates": len(updates)}
        log |= batch_metrics(rollouts, rewards, kept, step)
        # For staleness 0 .. E
        for update, mini_batch in enumerate(updates, 1):
            log["update"] = update
            known = log_probs if update == 1 else None
            with clock("update_s"):
                log |= backward(policy, rollouts, mini_batch, method, options, known)
                check_update(run, log)
                state.optimizer.step()
                state.optimizer.zero_grad()  # frees the gradients: no memory for them in sampling
            if update < len(updates):  # the last line waits for the held-out accuracy
                runs.append_line(run.folder / "metrics.jsonl", log)
        end_step(run, state, task, log, clock)
    return state


def backward(
    policy,
    rollouts: Rollouts,
    mini_batch: list[Tensor],
    method: Method,
    options: Options,
    known_log_probs: Tensor | None = None,
) -> dict[str, float]:
    """The gradient of one update, added up over its micro-batches; returns the update's metrics.

    mini_batch: the rows of each micro-batch. known_log_probs [N, T]: those of the policy as it is,
    where they are known.
    """
    rows = torch.cat(mini_batch)
    weights = torch.zeros_like(rollouts.rollout_log_probs)
    weights[rows] = token_weights(rollouts.mask[rows])  # of the whole update

    # c_low, c_high: from a-, a+, raised while rho < rho0 (Eq. 8), over all that the update sees.
    # With one micro-batch, or with fixed bounds, the loss itself needs no look at the rest.
    bounds = None
    if len(mini_batch) > 1 and method.search and not method.search.is_fixed:
        if known_log_probs is None:
            with autocast(options.device, options.precision):
                known_log_probs, _ = log_probs_now(
                    policy, rollouts, mini_batch, options.temperature
                )
        log_ratio = (known_log_probs - rollouts.rollout_log_probs)[rows]
        advantages = rollouts.advantages[rows]
        masses = contribution_masses(log_ratio, advantages, weights[rows], method.search)
        bounds = search_clip_bounds(masses, method.search)

    def loss_of(chosen: Tensor, log_probs: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return method.loss(
            log_probs,
            rollouts.rollout_log_probs[chosen],
            rollouts.advantages[chosen],
            rollouts.mask[chosen],
            weights=weights[chosen],
            bounds=bounds,
        )

    # The gradient of min(r A, clip(r, c_low, c_high) A)
    total_loss = 0.0
    log_probs = torch.zeros_like(rollouts.rollout_log_probs)
    entropy = torch.zeros_like(rollouts.rollout_log_probs)
    for micro_batch in mini_batch:
        with autocast(options.device, options.precision):
            with_gradient, entropy[micro_batch] = token_log_probs(
                policy, rollouts, micro_batch, options.temperature
            )
        loss, metrics = loss_of(micro_batch, with_gradient)
        loss.backward()
        total_loss = total_loss + loss.detach()
        log_probs[micro_batch] = with_gradient.detach()
    # Without a limit the norm is measured, not clipped.
    norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), options.max_grad_norm or math.inf)

    # What is logged
    if len(mini_batch) > 1:  # a micro-batch's own metrics are means over its tokens alone
        _, metrics = loss_of(rows, log_probs[rows])
    metrics |= {"loss": total_loss, "grad_norm": norm}
    used = (metrics["low"], metrics["high"])
    metrics |= update_metrics(rollouts, rows, log_probs[rows], entropy[rows], used)
    return {name: float(value) for name, value in metrics.items()}


def check_update(run: Run, log: dict[str, float]) -> None:
    """Raise before the optimizer sees a gradient that is wrong.

    FloatingPointError if it, or the loss, is not finite; RuntimeError if the first update after
    sampling does not find the ratios of the newest tokens at 1: their mean |log-ratio| within 1e-3,
    in bfloat16, where rounding may differ, within 0.03.
    """
    where = f"{run.folder.name}, step {log['step']}, update {log['update']}"
    if not math.isfinite(log["loss"] + log["grad_norm"]):
        raise FloatingPointError(f"{where}: loss {log['loss']}, gradient norm {log['grad_norm']}")
    tolerance = 1e-3 if run.options.precision == "float32" else 0.03
    if log["update"] == 1 and log["log_ratio_newest"] > tolerance:
        raise RuntimeError(
            f"{where}: the log importance ratio is {log['log_ratio_newest']:.3g}, expected 0 within"
            f" {tolerance}: rollout and training log-probs disagree (temperature, dtype, dropout, a"
            " mask off by one, or weights that changed between)"
        )


# ---------------------------------------------------------------- a run's beginning, a step's end
@dataclass
class TrainState:
    """What a run holds while it goes on."""

    policy: torch.nn.Module
    tokenizer: transformers.PreTrainedTokenizerBase
    optimizer: torch.optim.Optimizer
    partial: PartialRollouts  # used with --partial_budget
    steps_done: int  # by the checkpoint that it went on from, or 0


def load_state(run: Run) -> TrainState:
    """A run's state, from its newest checkpoint or from its start. Raises ValueError for damage."""
    options = run.options
    run.folder.mkdir(parents=True, exist_ok=True)
    checkpoints = runs.checkpoints(run.folder)
    steps_done = max(checkpoints, default=0)
    start = checkpoints.get(steps_done) or start_of(run.seed, options)
    policy, tokenizer = policy_of(str(start), options)
    trained = [parameter for parameter in policy.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=options.learning_rate, weight_decay=0.0, fused=True)
    partial_rollouts = PartialRollouts(options.partial_budget, **sampling(options))
    for name in ("metrics", "timings", "samples"):
        runs.keep_steps(run.folder / f"{name}.jsonl", steps_done)
    torch.manual_seed(run.seed)
    if steps_done:
        check_steps(run.folder / "metrics.jsonl", steps_done)
        saved = runs.restore(checkpoints[steps_done], options.device, {"optimizer", "waiting"})
        optimizer.load_state_dict(saved["optimizer"])
        partial_rollouts.groups = saved["waiting"]
    runs.remove_older_checkpoints(run.folder)
    return TrainState(policy, tokenizer, optimizer, partial_rollouts, steps_done)


def check_steps(path: Path, steps_done: int) -> None:
    """Raise ValueError if metrics.jsonl lacks a line of a step up to the checkpoint's."""
    lines = runs.read_lines(path)
    found = Counter(line["step"] for line in lines)
    expected = Counter(range(1, steps_done + 1))  # a step without updates has a line, too
    expected |= Counter({line["step"]: line.get("updates", 0) for line in lines})
    missing = expected - found
    if missing:
        raise ValueError(
            f"{path} lacks lines of step {min(missing)}, and the checkpoint is that of step"
            f" {steps_done}: restore it, or delete {path.parent} to begin the run again"
        )


def policy_of(name: str, options: Options) -> tuple:
    """Model and tokenizer of a folder or hub id, as the options want them."""
    return load_policy(
        name,
        options.device,
        precision=options.precision,
        lora_rank=options.lora_rank,
        gradient_checkpointing=options.gradient_checkpointing,
    )


def sampling(options: Options) -> dict:
    """Options of rollout.generate."""
    return {
        "group_size": options.group_size,
        "max_new_tokens": options.max_new_tokens,
        "temperature": options.temperature,
        # A sampled token keeps its keys and values alone, a trained one its activations.
        "batch_tokens": 32 * options.micro_batch_tokens,
    }


def end_step(run: Run, state: TrainState, task: Task, log: dict, clock: "Clock") -> None:
    """Write what is known at a step's end, the line of its last update included."""
    options = run.options
    step = log["step"]
    if options.evaluate_every and step % options.evaluate_every == 0:
        with clock("evaluation_s"):
            accuracies = evaluate(state.policy, state.tokenizer, task, options)
        log |= {f"held_out_{name}": value for name, value in accuracies.items()}
    if options.partial_budget:
        log["waiting_groups"] = len(state.partial.groups)
    runs.append_line(run.folder / "metrics.jsonl", log)
    if step == FIRST_STEPS:
        say_if_bounds_rest(run)
    if step % options.checkpoint_every == 0 or step == options.steps:
        saved = {"optimizer": state.optimizer.state_dict(), "waiting": state.partial.groups}
        with clock("checkpoint_s"):
            runs.save_checkpoint(run.folder, step, state.policy, state.tokenizer, saved)
    timings = clock.seconds | {"peak_memory_gb": runs.peak_memory(options.device) / 1e9}
    runs.append_line(run.folder / "timings.jsonl", {"step": step} | timings)
    if log["update"]:
        what = f"reward {log['reward']:.2f}, entropy {log['entropy']:.2f}"
    else:
        what = "nothing to train on: equal rewards in every group, or no group is finished"
    runs.report(f"{run.folder.name}: {what}", steps=1)


def say_if_bounds_rest(run: Run) -> None:
    """One line if no search of the first steps had to move the bounds: then BAPO does nothing."""
    search = run.method.search
    if search is None or search.is_fixed:
        return
    lines = runs.read_lines(run.folder / "metrics.jsonl")
    shares = [line["rho_start"] for line in lines if "rho_start" in line]
    if shares and min(shares) >= search.rho0:
        runs.report(
            f"{run.folder.name}: the bounds have not moved: before the search the positive share"
            f" is {statistics.mean(shares):.2f}, its target {search.rho0}. For a search that acts,"
            " take the method bapo and --rho0 some 0.03 above that share"
        )


class Clock:
    """The seconds of a step's parts."""

    def __init__(self, device: str):
        self.device = device
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str):
        """Add the seconds of the block to those of `name`."""
        start = time.perf_counter()
        yield
        if self.device != "cpu":
            torch.cuda.synchronize(self.device)
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start


# ---------------------------------------------------------------- rewards, metrics, evaluation
def grade(task: Task, texts: list[str], rollouts: Rollouts, problems: list[Problem]) -> Tensor:
    """Rewards float32 [N]. problems: one per group. Truncated responses get 0, ungraded.

    A reward may seed torch's generator, which would give every step the same draws: the random
    state is as before afterwards.
    """
    group_size = len(texts) // len(problems)
    answers = [problem.answer for problem in problems for _ in range(group_size)]
    device = rollouts.mask.device
    with fork_rng(device):
        rewards = grade_all(task.grade, texts, answers, rollouts.truncated.tolist())
    return torch.tensor(rewards, dtype=torch.float32, device=device)


def fork_rng(device: torch.device):
    """A block after which torch's random states are as before."""
    return torch.random.fork_rng(devices=[] if device.type == "cpu" else [device])


def batch_metrics(rollouts: Rollouts, rewards: Tensor, kept: Tensor, step: int) -> dict[str, float]:
    """Metrics of a batch of rollouts, see METRICS. rewards [N]; kept [groups] bool."""
    lengths = rollouts.mask.sum(1).float()
    of_later_policies = (rollouts.versions > rollouts.versions[:, :1]) & rollouts.mask
    metrics = {
        "reward": rewards.mean(),
        "entropy": rollouts.entropy.sum() / lengths.sum(),
        "response_length": lengths.mean(),
        "length_correct": lengths[rewards > 0].mean(),
        "length_wrong": lengths[rewards == 0].mean(),
        "truncated": rollouts.truncated.float().mean(),
        "filtered_groups": 1 - kept.float().mean(),
        "token_age": (step - rollouts.versions)[rollouts.mask].float().mean(),
        "mixed_responses": of_later_policies.any(1).float().mean(),
    }
    return {name: value.item() for name, value in metrics.items()}


def update_metrics(
    rollouts: Rollouts,
    rows: Tensor,
    log_probs: Tensor,
    entropy: Tensor,
    bounds: tuple[Tensor, Tensor],
) -> dict[str, Tensor]:
    """What an update logs beside its loss's own metrics. log_probs, entropy: [rows, T]."""
    mask = rollouts.mask[rows]
    log_ratio = log_probs - rollouts.rollout_log_probs[rows]
    newest = mask & (rollouts.versions[rows] == rollouts.versions.max())
    advantages = rollouts.advantages[rows]
    fall = predicted_entropy_fall(log_ratio, log_probs, entropy, advantages, mask, bounds)
    return {
        "log_ratio_newest": log_ratio[newest].abs().mean(),
        "entropy_now": entropy.sum() / mask.sum(),
        "predicted_entropy_fall": fall,
    }


def evaluate(policy, tokenizer, task: Task, options: Options) -> dict[str, float]:
    """Mean reward on the held-out problems over samples, and unbiased pass@k.

    There are 16 samples per problem, 4 with --data, drawn at --temperature. For pass@k a response
    is right if its reward is above 0. Leaves the random state as it was.
    """
    samples = 4 if options.data else 16
    k = min(8, samples)
    prompts = [problem.prompt for problem in task.held_out]
    with autocast(options.device, options.precision), fork_rng(policy.device):
        torch.manual_seed(0)
        rollouts = generate(policy, prompts, **sampling(options) | {"group_size": samples})
    rewards = grade(task, response_texts(tokenizer, rollouts), rollouts, task.held_out)
    right = (rewards.view(-1, samples) > 0).sum(1).tolist()
    return {
        f"mean@{samples}": rewards.double().mean().item(),
        f"pass@{k}": statistics.mean(pass_at_k(samples, count, k) for count in right),
    }


def write_samples(
    run: Run,
    step: int,
    tokenizer,
    texts: list[str],
    rewards: Tensor,
    problems: list[Problem],
) -> None:
    """Add the group whose rewards differ most to samples.jsonl."""
    groups = rewards.view(len(problems), -1)
    group = int(groups.std(1).argmax())
    prompt = tokenizer.decode(problems[group].prompt)
    first = group * groups.shape[1]
    for row, reward in enumerate(groups[group].tolist(), first):
        sample = {
            "step": step,
            "prompt": prompt,
            "answer": problems[group].answer,
            "response": texts[row],
            "reward": reward,
        }
        runs.append_line(run.folder / "samples.jsonl", sample)


# ---------------------------------------------------------------- the command
METRICS = """metrics.jsonl, of a batch of rollouts (the same in all lines of its step; reward,
entropy and lengths over ALL sampled responses, not only over the kept groups):

    step, update                 from 1; update 0: no group was kept, nothing was trained
    updates                      of this step: EPOCHS * MINIBATCHES, fewer where fewer groups than
                                 mini-batches were kept
    reward                       mean reward
    entropy                      nats per token of the distributions that the tokens were drawn from
    response_length              mean number of tokens, EOS included
    length_correct, length_wrong the same of right (reward above 0) and of wrong responses
    truncated                    share of responses without EOS within the limit (reward 0)
    filtered_groups              share of groups whose rewards are all equal: no update sees them
    token_age                    mean number of steps since a token was drawn
    mixed_responses              share of responses whose tokens several policies drew

Of an update (over the tokens that it sees, before its step):

    loss, grad_norm              the loss to be minimised; the gradient's norm before clipping
    low, high, rho, rho_start, reached              see bapo.ClipBounds
    gradient_share, clip_fraction_{high,low}, kl,
    {positive,negative}_tokens, ratio_{mean,min,max}_{positive,negative}    see bapo.diagnostics;
                                 neighbours: as if low were 0 and high infinite (null)
    log_ratio_newest             mean |log ratio| of the tokens that this step's policy drew: 0 at
                                 the first update
    entropy_now                  nats per token of the policy in training, at the same positions
    predicted_entropy_fall       see bapo.predicted_entropy_fall

Of the policy after a step's last update, in the line of that update:

    held_out_{mean@k,pass@k}     the accuracies of final.json, every --evaluate_every steps

With --partial_budget also:

    waiting_groups               groups that are not finished

timings.jsonl: seconds of a step's parts (update_s: the log-probs of the rollout policy included),
and the process's peak memory so far.
"""


def train_and_evaluate(run: Run, task: Task) -> None:
    """A run from its start or checkpoint to its end, and its held-out accuracy."""
    path = run.folder / "final.json"
    steps = run.options.steps
    if path.exists() and runs.read_json(path).get("steps") == steps:
        return
    state = train(run, task)
    accuracies = evaluate(state.policy, state.tokenizer, task, run.options)
    runs.write_json(path, {"steps": steps} | accuracies)


def evaluate_start(path: Path, seed: int, task: Task, options: Options) -> None:
    """Write the held-out accuracy of what a seed begins with to `path`."""
    if path.exists() and runs.read_json(path):
        return
    policy, tokenizer = policy_of(start_of(seed, options), options)
    runs.report(f"{path.stem}: evaluating on {len(task.held_out)} problems before the first step")
    runs.write_json(path, evaluate(policy, tokenizer, task, options))


def start_of(seed: int, options: Options) -> str:
    """Folder or hub id of what a seed begins with; Countdown's supervised start is made if missing.

    Folders of runs that lie side by side share it.
    """
    if options.model:
        return options.model
    name = f"attempts{options.attempts}-steps{options.warm_start_steps}-seed{seed}"
    folder = Path(options.output_dir).parent / "starts" / name
    with runs.lock(folder.with_name(f"{name}.lock"), timeout=-1):
        if not folder.exists():
            model, tokenizer = countdown.supervised_start(
                seed,
                options.attempts,
                options.warm_start_steps,
                options.device,
                progress=runs.report,
            )

            def write(path: Path) -> None:
                model.save_pretrained(path)
                tokenizer.save_pretrained(path)

            runs.write_atomically(folder, write)
    return str(folder)


def fingerprint(content: bytes) -> str:
    """Different for different contents."""
    return hashlib.sha256(content).hexdigest()[:16]


def with_absolute_paths(options: Options) -> Options:
    """The same options; a reward that changes the working directory then moves no file."""
    model = options.model
    if isdir(model):  # else an id of the hub
        model = abspath(model)
    reward = options.reward and abspath(options.reward)
    return replace(options, output_dir=abspath(options.output_dir), model=model, reward=reward)


def settings(options: Options, task: Task) -> dict:
    """The options, and what else decides the numbers of the runs in a folder."""
    found = asdict(options)
    found["problems"] = fingerprint(json.dumps([task.train, task.held_out]).encode())
    if options.reward:
        source = Path(options.reward.rpartition(":")[0])
        found["content_of_reward_file"] = fingerprint(source.read_bytes())
    found["versions"] = f"torch {torch.__version__}, transformers {transformers.__version__}"
    here = Path(__file__).parent
    found["scripts"] = {name: fingerprint((here / name).read_bytes()) for name in SCRIPTS}
    return found


def main(arguments: list[str] | None = None) -> int:
    """The command line. Returns the exit status: 0; 1 if a run failed."""
    began = time.perf_counter()
    given = runs.parse(Options, arguments, f"{__doc__}\n{METRICS}")
    options = with_absolute_paths(given)
    output = Path(options.output_dir)
    task = data.load_task(options)
    import plot  # slow: after the options have been checked

    with runs.lock(output / ".lock"):
        config = settings(options, task) | asdict(given)  # with the paths as they were given
        before = runs.write_config(output / "config.json", config, MAY_DIFFER).get("scripts", {})
        changed = dict(before.items() - config["scripts"].items())
        if changed:
            names = ", ".join(sorted(changed))
            print(f"changed since the last command, and used from now on: {names}")
        failed = make_runs(output, options, task)
        if any(output.glob("*-seed*/metrics.jsonl")):
            print(plot.report(output), end="")
    if failed:
        print(f"failed, for the reasons above: {', '.join(failed)}", file=sys.stderr)
    else:
        seconds = time.perf_counter() - began
        print(f"{output}/curves.png and {output}/table.md written after {seconds:.0f} s")
    return 1 if failed else 0


def make_runs(output: Path, options: Options, task: Task) -> list[str]:
    """Make what is missing; returns the names of what failed."""
    calls = {}
    evaluated = options.seeds[:1] if options.model else options.seeds  # one model, one accuracy
    for seed in evaluated:
        path = output / f"start-seed{seed}.json"
        calls[path.stem] = (evaluate_start, path, seed, task, options)
    # The longest first, so that no core is left with a long one at the end.
    methods = [parse_method(text, options) for text in options.methods]
    steps = 0
    for method in sorted(methods, key=lambda method: -method.epochs * method.mini_batches):
        for seed in options.seeds:
            folder = output / f"{method.name}-seed{seed}"
            run = Run(folder, method, seed, options)
            calls[folder.name] = (train_and_evaluate, run, task)
            steps += options.steps - max(runs.checkpoints(folder), default=0)
    return runs.run_side_by_side(calls, options.jobs, steps)


if __name__ == "__main__":
    runs.command(
        "train.py",
        main,
        "Interrupted. Continue with the same command and --resume: of each run at most the steps"
        " since its last checkpoint (--checkpoint_every) are made again",
    )
