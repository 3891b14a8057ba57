"""Train language models with GRPO, BAPO and their like on stale samples, and draw what happens.

    python train.py                     # four methods on Countdown, then runs/default/curves.png
    python train.py --methods grpo@4 bapo@4 0.8-1.5@4 --seeds 0 1 2 --output_dir runs/four
    python train.py --model Qwen/Qwen2.5-1.5B-Instruct --data openai/gsm8k --methods bapo@8

A method is NAME@UPDATES: UPDATES optimizer steps on each batch of rollouts (default 8; 1 is
on-policy; E + 1 for the paper's staleness E; the "k x" of its figures). NAME@EPOCHSxPARTS cuts the
batch into PARTS mini-batches of whole groups, and goes through them EPOCHS times: 8 is 8x1, 2x4 is
the authors' scheme. Names:

    grpo                fixed clip bounds [0.8, 1.2]; clip-higher: [0.8, 1.28] (DAPO)
    LOW-HIGH            fixed bounds of your own, as absolute ratios: 0.8-1.5
    bapo                bounds searched anew for every update, in the range of --rho0, --low, --high
    bapo-main           the paper's main setting (section 5.1) as printed
    bapo-octothinker    the paper's setting for OctoThinker (App. A) as printed
    cispo, gspo, ...    the token losses of that name in neighbours/losses.py

A run is a method and a seed. The seed sets Countdown's supervised start, the order of the prompts
and the sampling. Its folder, METHOD-seedSEED, holds

    metrics.jsonl       a line per update; timings.jsonl: a line per step (see METRICS)
    samples.jsonl       a line per response that is kept to look at
    checkpoint-STEP/    the newest one: a model that transformers loads, and all that --resume needs
    final.json          held-out accuracy at the end

    step                one batch of rollouts, and all updates on it
    mini-batch          the groups that one update (one optimizer step) sees
    micro-batch         the responses that one forward and backward pass sees
"""

import gc
import hashlib
import json
import math
import os
import re
import resource
import statistics
import time
from argparse import ArgumentDefaultsHelpFormatter, RawDescriptionHelpFormatter
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
import transformers
from torch import Tensor
from transformers import HfArgumentParser

import countdown
import data
import plot
import runs
from bapo import (
    CLIP_HIGHER,
    GRPO,
    PAPER_MAIN,
    PAPER_OCTOTHINKER,
    ClipBounds,
    ClipSearch,
    bapo_loss,
    diagnostics,
    entropy_rule,
    group_relative_advantages,
    search_clip_bounds,
    token_weights,
)
from data import Task
from neighbours.losses import LOSSES
from reward import Problem, grade_all, pass_at_k
from rollout import (
    BATCH_TOKENS,
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

METRICS = """metrics.jsonl, of a batch of rollouts (the same in all lines of its step; reward,
entropy and lengths over ALL sampled responses, not only over the kept groups):

    step, update                 from 1; update 0: no group was kept, nothing was trained
    updates                      of this step: EPOCHS * PARTS, fewer where fewer groups than PARTS
                                 were kept
    reward                       mean reward
    entropy                      nats per token of the distributions that the tokens were drawn from
    response_length              mean number of tokens, EOS included
    length_correct, length_wrong the same of right (reward above 0) and of wrong responses
    truncated                    share of responses without EOS within the limit (reward 0)
    filtered_groups              share of groups whose rewards are all equal: no update sees them

Of an update (over the tokens that it sees, before its step):

    loss, grad_norm              the loss to be minimised; the gradient's norm before clipping
    low, high, rho, rho_start, reached              see bapo.ClipBounds
    gradient_share, negatives_with_gradient, clip_fraction_{high,low}, kl,
    {positive,negative}_tokens, ratio_{mean,min,max}_{positive,negative}    see bapo.diagnostics
    log_ratio_newest             largest |log ratio| (in bfloat16: the mean) of the tokens that this
                                 step's policy drew: 0 at the first update
    entropy_now                  nats per token of the policy in training, at the same positions
    entropy_rule                 see bapo.entropy_rule

Of the policy after a step's last update, in the line of that update:

    held_out_{mean@k,pass@k}     the accuracies of final.json, every --evaluate_every steps

With --partial_budget also:

    waiting_groups               groups that are not finished
    token_age                    mean number of steps since a token was drawn
    mixed_responses              share of responses whose tokens several policies drew

timings.jsonl: seconds of a step's parts, and the process's peak memory so far.
"""

SEARCHES = {
    "grpo": GRPO,
    "clip-higher": CLIP_HIGHER,
    "bapo": ClipSearch(),  # replaced by --rho0, --low, --high
    "bapo-main": PAPER_MAIN,
    "bapo-octothinker": PAPER_OCTOTHINKER,
}
MAX_AGE = 8  # partial rollouts: steps after which an unfinished response is cut off (reward 0)
MICRO_BATCH_TOKENS = 2**13
# Of bapo.diagnostics, what a neighbour's losses have, too: all that does not depend on clip bounds.
WITHOUT_BOUNDS = (
    "kl",
    "positive_tokens",
    "negative_tokens",
    "ratio_mean_positive",
    "ratio_min_positive",
    "ratio_max_positive",
    "ratio_mean_negative",
    "ratio_min_negative",
    "ratio_max_negative",
)
SAMPLES_EVERY = 10  # steps between looks at a few responses


# ---------------------------------------------------------------- options
def option(default, help: str):
    """A field of Options; a list is copied. help must not hold a single % sign."""
    if isinstance(default, list):
        return field(default_factory=default.copy, metadata={"help": help})
    return field(default=default, metadata={"help": help})


@dataclass
class Options:
    """All options. What is None or "auto" is filled in. Raises ValueError that names the option."""

    methods: list[str] = option(
        ["grpo@1", "grpo@8", "bapo-main@8", "bapo@8"], "NAME@UPDATES, see above"
    )
    seeds: list[int] = option([0], "a run of every method for each")
    steps: int = option(140, "batches of rollouts per run")
    prompts_per_step: int = option(16, "prompts in a batch")
    group_size: int = option(8, "responses per prompt")
    max_new_tokens: int | None = option(
        None, "length limit of a response; one without EOS by then gets 0 [28; with --data 1024]"
    )
    temperature: float = option(1.0, "of sampling, and of every log-prob")
    partial_budget: int = option(
        0, "partial rollouts (5.3): most tokens per response and step, then it waits; 0: off"
    )
    learning_rate: float | None = option(
        None, "of AdamW, constant, no weight decay [2e-4; with --data 1e-6]"
    )
    max_grad_norm: float | None = option(
        None, "clip the gradient's norm here; 0: not [0; with --data 1]"
    )
    rho0: float = option(ClipSearch.rho0, "of bapo: target share of positive tokens in the loss")
    low: list[float] = option(
        [ClipSearch.low_start, ClipSearch.low_max, ClipSearch.low_step],
        "of bapo: lower bound, START MAX [STEP], as absolute ratios",
    )
    high: list[float] = option(
        [ClipSearch.high_start, ClipSearch.high_max, ClipSearch.high_step],
        "of bapo: upper bound, START MAX [STEP], as absolute ratios",
    )
    attempts: int = option(
        2, "Countdown: most attempts in a response; more make failing ones longer, and rho smaller"
    )
    warm_start_steps: int = option(countdown.WARM_START_STEPS, "Countdown: supervised steps before")
    model: str = option(
        "", "hub id or local folder of a model and its tokenizer; empty: Countdown and its own"
    )
    data: str = option(
        "",
        "with --model: a .jsonl, .json or .parquet file, or a data set of the hub, whose split"
        " train is taken unless it is given as NAME:SPLIT or NAME:CONFIGURATION/SPLIT",
    )
    fields: list[str] = option([], "with --data: names of prompt and answer [found by usual names]")
    reward: str = option(
        "", "with --data: FILE.py:FUNCTION(response, answer), from 0 to 1 [compares answers]"
    )
    held_out: int = option(256, "with --data: problems that no run trains on, for evaluation")
    lora_rank: int = option(0, "train adapters (peft) of this rank, not all weights; 0: off")
    device: str = option("auto", "auto, cpu, cuda, cuda:1, ...")
    precision: str = option(
        "auto",
        "of forward passes: float32, or bfloat16 by autocast, which auto takes with --data on a"
        " GPU; trained weights stay float32",
    )
    micro_batch_tokens: int = option(
        MICRO_BATCH_TOKENS,
        "most tokens, padding included, in one forward and backward pass; at most 32 times as many"
        " are drawn together",
    )
    gradient_checkpointing: bool = option(False, "compute layers again, for less memory")
    jobs: int = option(
        0, "runs side by side, one thread each; 0: one per core on a CPU, one on a GPU"
    )
    checkpoint_every: int = option(5, "steps between checkpoints")
    evaluate_every: int = option(0, "steps between held-out evaluations; 0: before and after only")
    output_dir: str = option("runs/default", "folder of the runs; starts lie beside it")
    resume: bool = option(
        False, "continue what is unfinished in output_dir; with more --steps, make it longer"
    )

    def __post_init__(self):
        with_data = bool(self.data)
        if bool(self.model) != with_data:
            raise ValueError(f"model and data go together: {self.model!r} and {self.data!r}")
        if self.reward and not with_data:
            raise ValueError(f"reward goes with --data, as Countdown has its own: {self.reward!r}")
        if self.max_new_tokens is None:
            self.max_new_tokens = 1024 if with_data else 28
        if self.learning_rate is None:
            self.learning_rate = 1e-6 if with_data else 2e-4
        if self.max_grad_norm is None:
            self.max_grad_norm = 1.0 if with_data else 0.0
        check_limits(self)
        self.device, self.precision = resolve_device(self.device, self.precision, with_data)
        if not self.jobs:
            self.jobs = (os.cpu_count() or 1) if self.device == "cpu" else 1
        for name in ("methods", "seeds"):
            values = getattr(self, name)
            if not values or len(set(values)) < len(values):
                raise ValueError(f"{name} must be different and at least one, got {values}")
        for method in self.methods:
            parse_method(method, self)  # fails now rather than after an hour


AT_LEAST = {
    "steps": 1,
    "prompts_per_step": 1,
    "group_size": 2,
    "max_new_tokens": 1,
    "partial_budget": 0,
    "max_grad_norm": 0,
    "attempts": 1,
    "warm_start_steps": 1,
    "held_out": 1,
    "lora_rank": 0,
    "micro_batch_tokens": 1,
    "jobs": 0,
    "checkpoint_every": 1,
    "evaluate_every": 0,
}
POSITIVE = ("temperature", "learning_rate")
LENGTHS = {"low": (2, 3), "high": (2, 3), "fields": (0, 2)}  # of lists
# What may change when runs are continued: how they are made and looked at, not what they are.
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
}


def check_limits(options: Options) -> None:
    """Raise ValueError naming the first option that is outside its limits."""
    for name, least in AT_LEAST.items():
        value = getattr(options, name)
        if not least <= value < math.inf:
            raise ValueError(f"{name} must be at least {least}, got {value}")
    for name in POSITIVE:
        value = getattr(options, name)
        if not 0 < value < math.inf:
            raise ValueError(f"{name} must be positive, got {value}")
    for name, lengths in LENGTHS.items():
        value = getattr(options, name)
        if len(value) not in lengths:
            raise ValueError(f"{name} takes {lengths[0]} or {lengths[1]} values, got {value}")
    for seed in options.seeds:
        if not 0 <= seed < 2**32:
            raise ValueError(f"seeds must be from 0 to 2**32 - 1, got {seed}")
    if not options.output_dir:
        raise ValueError("output_dir must name a folder, got ''")


def resolve_device(device: str, precision: str, with_data: bool) -> tuple[str, str]:
    """Replace "auto". Raises ValueError for a device that is not there, or another precision."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    cuda = re.fullmatch(r"cuda(?::(\d+))?", device)
    is_there = cuda and int(cuda[1] or 0) < torch.cuda.device_count()
    if device != "cpu" and not is_there:
        raise ValueError(f"device must be auto, cpu, or a CUDA device that is there: {device!r}")
    if precision == "auto":  # Countdown's numbers are the same on every device
        precision = "bfloat16" if with_data and device != "cpu" else "float32"
    if precision not in ("float32", "bfloat16"):
        raise ValueError(f"precision must be auto, float32 or bfloat16, got {precision!r}")
    return device, precision


@dataclass(frozen=True)
class Method:
    """What a run trains with: BAPO's loss with a search, or the token losses of a neighbour."""

    name: str
    search: ClipSearch | None  # None: a neighbour
    token_losses: Callable | None  # bapo_loss's first four arguments -> float32 [N, T]
    epochs: int  # times that a batch of rollouts is gone through
    parts: int  # mini-batches of a batch, an update for each


def parse_method(text: str, options: Options) -> Method:
    """The method that `text` names. Raises ValueError for one that makes no sense."""
    match = re.fullmatch(r"([^@]+)(?:@([1-9]\d*)(?:x([1-9]\d*))?)?", text)
    if not match:
        raise ValueError(f"methods: {text!r} must be NAME@UPDATES or NAME@EPOCHSxPARTS: grpo@8")
    name, epochs, parts = match[1], int(match[2] or 8), int(match[3] or 1)
    searches = SEARCHES | {"bapo": own_search(options)}
    bounds = re.fullmatch(r"(\d*\.?\d+)-(\d*\.?\d+)", name)
    if bounds:
        search = ClipSearch.fixed(float(bounds[1]), float(bounds[2]))
    elif name in searches:
        search = searches[name]
    elif name in LOSSES:
        search = None
    else:
        known = ", ".join([*searches, "LOW-HIGH", *LOSSES])
        raise ValueError(f"methods: {name!r} in {text!r} is none of {known}")
    scheme = f"{epochs}" if parts == 1 else f"{epochs}x{parts}"
    return Method(f"{name}@{scheme}", search, LOSSES.get(name), epochs, parts)


def own_search(options: Options) -> ClipSearch:
    """The search of `bapo`. Raises ValueError for a range that makes no sense."""
    low_start, low_max, low_step = (*options.low, ClipSearch.low_step)[:3]
    high_start, high_max, high_step = (*options.high, ClipSearch.high_step)[:3]
    return ClipSearch(
        rho0=options.rho0,
        low_start=low_start,
        low_max=low_max,
        low_step=low_step,
        high_start=high_start,
        high_max=high_max,
        high_step=high_step,
    )


# ---------------------------------------------------------------- Algorithm 1
@dataclass
class Run:
    """One method with one seed, in its folder."""

    folder: Path
    method: Method
    seed: int
    start: str  # folder or hub id of the model before training
    options: Options


def train(run: Run, task: Task) -> None:
    """Algorithm 1. Continues from the folder's checkpoint if there is one.

    Raises FloatingPointError on a loss or gradient that is not finite, before the optimizer sees
    it.
    """
    options = run.options
    method = run.method
    state = begin(run)
    policy = state.policy
    for step in range(state.steps_done + 1, options.steps + 1):
        clock = Clock(options.device)
        # y ~ pi_rollout <- pi_theta: group_size responses to each prompt
        problems = data.problems_of_step(task.train, step, options.prompts_per_step, run.seed)
        with clock("rollout_s"), autocast(options.device, options.precision):
            if state.partial is None:
                rollouts = generate(
                    policy, [problem.prompt for problem in problems], **sampling(options)
                )
                rollouts.versions.fill_(step)
            else:  # partial rollouts (5.3): those of the groups that are finished by now
                rollouts, problems = state.partial.advance(
                    policy, problems, step, options.micro_batch_tokens
                )
        if rollouts is None:
            end_step(run, state, task, {"step": step, "update": 0}, clock)
            continue
        # Rewards, and advantages; groups of equal rewards have none, and are filtered out
        with clock("grading_s"):
            rewards = grade(task, state.tokenizer, rollouts, problems)
        write_samples(run, step, state.tokenizer, rollouts, rewards, problems)
        rollouts.advantages = group_relative_advantages(rewards, options.group_size)
        kept = (rollouts.advantages.view(-1, options.group_size) != 0).any(1)
        mini_batches = split(rollouts, kept, method.parts, options.micro_batch_tokens)
        dropped = split(rollouts, ~kept, 1, options.micro_batch_tokens)
        # log pi_rollout, by the forward pass that trains and in the micro-batches that train: then
        # rounding cannot move the ratios of a policy that has not changed.
        with clock("update_s"), autocast(options.device, options.precision):
            everything = sum(mini_batches + dropped, [])
            start_log_probs, entropy = log_probs_now(
                policy, rollouts, everything, options.temperature
            )
        drawn_now = rollouts.versions == step  # older tokens keep what their policies gave
        rollouts.log_probs = torch.where(drawn_now, start_log_probs, rollouts.log_probs)
        rollouts.entropy = torch.where(drawn_now, entropy, rollouts.entropy)
        log = {"step": step, "update": 0, "updates": method.epochs * len(mini_batches)}
        log |= batch_metrics(rollouts, rewards, kept, step)
        # For staleness 0 .. E
        for update, parts in enumerate(mini_batches * method.epochs, 1):
            log["update"] = update
            with clock("update_s"):
                log |= backward(
                    policy,
                    rollouts,
                    parts,
                    method,
                    options,
                    start_log_probs if update == 1 else None,
                )
                check_update(run, log)
                state.optimizer.step()
                state.optimizer.zero_grad()  # frees the gradients: no memory for them in sampling
            if update < log["updates"]:
                runs.append_line(run.folder / "metrics.jsonl", log)
        end_step(run, state, task, log, clock)


def backward(
    policy,
    rollouts: Rollouts,
    parts: list[Tensor],
    method: Method,
    options: Options,
    start_log_probs: Tensor | None,
) -> dict[str, float]:
    """The gradient of one update, added up over its micro-batches; returns the update's metrics.

    parts: the rows of each micro-batch. start_log_probs [N, T]: log-probs of the policy as it is,
    where they are known.
    """
    rows = torch.cat(parts)
    weights = token_weights(rollouts.mask[rows])  # of the whole update
    rollouts.weights[rows] = weights
    # c_low, c_high: from a-, a+, raised while rho < rho0 (Eq. 8), over all that the update sees.
    # With one micro-batch, or with fixed bounds, bapo_loss needs no look at the rest for that.
    bounds = None
    if len(parts) > 1 and method.search and not method.search.is_fixed:
        if start_log_probs is None:
            with autocast(options.device, options.precision):
                start_log_probs, _ = log_probs_now(policy, rollouts, parts, options.temperature)
        log_ratio = (start_log_probs - rollouts.log_probs)[rows]
        bounds = search_clip_bounds(log_ratio, rollouts.advantages[rows], weights, method.search)
    # One update with min(r A, clip(r, c_low, c_high) A)
    total_loss = 0.0
    log_probs = torch.zeros_like(rollouts.log_probs)
    entropy = torch.zeros_like(rollouts.log_probs)
    for part in parts:
        with autocast(options.device, options.precision):
            log_probs_of_part, entropy[part] = token_log_probs(
                policy, rollouts, part, options.temperature
            )
        loss, metrics = loss_of(method, log_probs_of_part, rollouts, part, bounds)
        loss.backward()
        total_loss = total_loss + loss.detach()
        log_probs[part] = log_probs_of_part.detach()
    if len(parts) > 1:  # metrics of the whole update
        _, metrics = loss_of(method, log_probs[rows], rollouts, rows, bounds)
    # Without a limit the norm is measured, not clipped.
    norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), options.max_grad_norm or math.inf)

    mask = rollouts.mask[rows]
    log_ratio = (log_probs - rollouts.log_probs)[rows]
    newest = log_ratio[mask & (rollouts.versions[rows] == rollouts.versions.max())].abs()
    metrics["loss"] = total_loss
    metrics["grad_norm"] = norm
    metrics["log_ratio_newest"] = newest.max() if options.precision == "float32" else newest.mean()
    metrics["entropy_now"] = entropy[rows].sum() / mask.sum()
    if method.search:
        metrics["entropy_rule"] = entropy_rule(
            log_ratio,
            log_probs[rows],
            entropy[rows],
            rollouts.advantages[rows],
            mask,
            (metrics["low"].item(), metrics["high"].item()),
        )
    return {name: float(value) for name, value in metrics.items()}


def loss_of(
    method: Method, log_probs: Tensor, rollouts: Rollouts, rows: Tensor, bounds: ClipBounds | None
) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss of some rows of an update, to be added up over it, and their metrics (0-dim tensors).

    log_probs [n, T] of the policy in training. bounds: those of the update; None: searched here.
    """
    rollout_log_probs = rollouts.log_probs[rows]
    advantages = rollouts.advantages[rows]
    mask = rollouts.mask[rows]
    weights = rollouts.weights[rows]
    if method.search:
        return bapo_loss(
            log_probs,
            rollout_log_probs,
            advantages,
            mask,
            method.search,
            weights=weights,
            bounds=bounds,
        )
    losses = method.token_losses(log_probs, rollout_log_probs, advantages, mask)
    log_ratio = log_probs.detach() - rollout_log_probs
    metrics = diagnostics(log_ratio, advantages, mask, (0.0, math.inf), weights)
    return (weights * losses).sum(), {name: metrics[name] for name in WITHOUT_BOUNDS}


def check_update(run: Run, log: dict[str, float]) -> None:
    """Raise before the optimizer sees a gradient that is wrong.

    FloatingPointError if it, or the loss, is not finite; RuntimeError if the first update after
    sampling does not find the ratios of the newest tokens at 1: within 1e-3 for the largest
    log-ratio; in bfloat16, where single tokens may differ by rounding, within 0.03 for the mean.
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


def split(rollouts: Rollouts, chosen: Tensor, parts: int, max_tokens: int) -> list[list[Tensor]]:
    """The chosen groups in `parts` mini-batches, and these in micro-batches of max_tokens tokens.

    chosen [groups] bool. Returns row numbers. Where fewer groups than parts are chosen, each is a
    mini-batch; where none is, the list is empty.
    """
    rows = torch.arange(len(rollouts.mask), device=chosen.device).view(len(chosen), -1)[chosen]
    if not len(rows):
        return []
    mini_batches = rows.tensor_split(min(parts, len(rows)))
    return [micro_batches(rollouts, groups.flatten(), max_tokens) for groups in mini_batches]


# ---------------------------------------------------------------- a run's beginning, a step's end
@dataclass
class TrainState:
    """What a run holds while it goes on."""

    policy: torch.nn.Module
    tokenizer: transformers.PreTrainedTokenizerBase
    optimizer: torch.optim.Optimizer
    partial: PartialRollouts | None
    steps_done: int  # before it began, or went on


def begin(run: Run) -> TrainState:
    """A run's state, from its newest checkpoint or from its start."""
    options = run.options
    run.folder.mkdir(parents=True, exist_ok=True)
    newest = runs.checkpoints(run.folder)[-1:]
    policy, tokenizer = policy_of(str(newest[0]) if newest else run.start, options)
    trained = [parameter for parameter in policy.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=options.learning_rate, weight_decay=0.0, fused=True)
    torch.manual_seed(run.seed)
    state = TrainState(policy, tokenizer, optimizer, None, 0)
    if options.partial_budget:
        state.partial = PartialRollouts(
            budget=options.partial_budget, max_age=MAX_AGE, **sampling(options)
        )
    for checkpoint in newest:
        saved = runs.restore(checkpoint, options.device)
        optimizer.load_state_dict(saved["optimizer"])
        state.steps_done = runs.step_of(checkpoint)
        if state.partial:
            state.partial.waiting = saved["waiting"]
    for name in ("metrics", "timings", "samples"):
        runs.keep_steps(run.folder / f"{name}.jsonl", state.steps_done)
    return state


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
        "batch_tokens": min(BATCH_TOKENS, 32 * options.micro_batch_tokens),
    }


def end_step(run: Run, state: TrainState, task: Task, log: dict, clock: "Clock") -> None:
    """Write what is known at a step's end, the line of its last update included."""
    options = run.options
    step = log["step"]
    if options.evaluate_every and step % options.evaluate_every == 0:
        with clock("evaluation_s"):
            accuracies = evaluate(state.policy, state.tokenizer, task, options)
        log |= {f"held_out_{name}": value for name, value in accuracies.items()}
    if state.partial:
        log["waiting_groups"] = len(state.partial.waiting)
    runs.append_line(run.folder / "metrics.jsonl", log)
    runs.append_line(run.folder / "timings.jsonl", {"step": step} | clock.numbers())
    if step % options.checkpoint_every == 0 or step == options.steps:
        saved = {"optimizer": state.optimizer.state_dict()}
        if state.partial:
            saved["waiting"] = state.partial.waiting
        runs.save_checkpoint(run.folder, step, state.policy, state.tokenizer, saved)
    if log["update"]:
        what = f"reward {log['reward']:.2f}, entropy {log['entropy']:.2f}"
    else:
        what = "nothing to train on: equal rewards in every group, or no group is finished"
    runs.report(f"{run.folder.name}: {what}", steps=1)


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

    def numbers(self) -> dict[str, float]:
        """For timings.jsonl: the seconds, and the peak memory since the process began."""
        if self.device == "cpu":
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # kB on Linux
        else:
            peak = torch.cuda.max_memory_allocated(self.device)
        return self.seconds | {"peak_memory_gb": peak / 1e9}


# ---------------------------------------------------------------- rewards, metrics, evaluation
def grade(task: Task, tokenizer, rollouts: Rollouts, problems: list[Problem]) -> Tensor:
    """Rewards float32 [N]. problems: one per group. Truncated responses get 0, ungraded.

    A reward function may seed torch's generator: the random state is as before afterwards.
    """
    texts = response_texts(tokenizer, rollouts)
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
    ages = (step - rollouts.versions)[rollouts.mask].float()
    metrics = {
        "reward": rewards.mean(),
        "entropy": rollouts.entropy.sum() / lengths.sum(),
        "response_length": lengths.mean(),
        "length_correct": lengths[rewards > 0].mean(),
        "length_wrong": lengths[rewards == 0].mean(),
        "truncated": rollouts.truncated.float().mean(),
        "filtered_groups": 1 - kept.float().mean(),
    }
    if ages.any():  # partial rollouts
        later = (rollouts.versions > rollouts.versions[:, :1]) & rollouts.mask
        metrics["token_age"] = ages.mean()
        metrics["mixed_responses"] = later.any(1).float().mean()
    return {name: value.item() for name, value in metrics.items()}


def evaluate(policy, tokenizer, task: Task, options: Options) -> dict[str, float]:
    """Mean reward on the held-out problems over samples, and unbiased pass@k.

    There are 16 samples per problem, 4 with --data. For pass@k a response is right if its reward is
    above 0. Leaves the random state as it was.
    """
    samples = 4 if options.data else 16
    k = min(8, samples)
    with autocast(options.device, options.precision), fork_rng(policy.device):
        torch.manual_seed(0)
        rollouts = generate(
            policy,
            [problem.prompt for problem in task.held_out],
            **sampling(options) | {"group_size": samples},
        )
    rewards = grade(task, tokenizer, rollouts, task.held_out).view(-1, samples)
    right = (rewards > 0).sum(1).tolist()
    return {
        f"mean@{samples}": rewards.double().mean().item(),
        f"pass@{k}": statistics.mean(pass_at_k(samples, count, k) for count in right),
    }


def write_samples(
    run: Run, step: int, tokenizer, rollouts: Rollouts, rewards: Tensor, problems: list[Problem]
) -> None:
    """Add the first group whose rewards differ to samples.jsonl, and show a right and a wrong one.

    At the first step, and then every SAMPLES_EVERY.
    """
    if step != 1 and step % SAMPLES_EVERY:
        return
    groups = rewards.view(len(problems), -1)
    group = int((groups != groups[:, :1]).any(1).int().argmax())
    texts = response_texts(tokenizer, rollouts)
    shown = {}
    for row in range(group * groups.shape[1], (group + 1) * groups.shape[1]):
        reward = rewards[row].item()
        sample = {
            "step": step,
            "prompt": tokenizer.decode(problems[group].prompt),
            "answer": problems[group].answer,
            "response": texts[row],
            "reward": reward,
            "truncated": bool(rollouts.truncated[row]),
        }
        runs.append_line(run.folder / "samples.jsonl", sample)
        shown["right" if reward > 0 else "wrong"] = texts[row][-200:].replace("\n", " ")
    for verdict, text in shown.items():
        runs.report(f"{run.folder.name}, step {step}, {verdict}: {text}")


# ---------------------------------------------------------------- the command
def carry_out(run: Run, task: Task) -> None:
    """A run from its start or checkpoint to its end, and its held-out accuracy."""
    path = run.folder / "final.json"
    if path.exists() and runs.read_json(path).get("steps") == run.options.steps:
        return
    train(run, task)
    empty_device()
    measure(path, str(runs.checkpoints(run.folder)[-1]), task, run.options)


def measure(path: Path, name: str, task: Task, options: Options) -> None:
    """Write the held-out accuracy of a policy (a folder, or a name on the hub) to `path`."""
    if path.exists() and runs.read_json(path).get("steps") == options.steps:
        return
    policy, tokenizer = policy_of(name, options)
    accuracies = evaluate(policy, tokenizer, task, options)
    runs.write_json(path, {"steps": options.steps} | accuracies)
    empty_device()


def empty_device() -> None:
    """Let go of all that the last model has held, before the next is loaded."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def make_start(folder: Path, seed: int, options: Options) -> None:
    """Countdown's supervised start: made once, shared by folders of runs that lie side by side."""
    with runs.lock(folder.with_name(f"{folder.name}.lock"), timeout=-1):
        if folder.exists():
            return
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


def countdown_task() -> Task:
    """Countdown's problems as token ids, and its grader."""
    tokenizer = countdown.build_tokenizer()
    parts = []
    for problems in countdown.problems():
        parts.append([Problem(tokenizer(prompt).input_ids, answer) for prompt, answer in problems])
    return Task(*parts, countdown.grade)


def prepare(output: Path, options: Options, task: Task) -> None:
    """Write config.json, or compare with it. The lock of the folder is held.

    Raises ValueError if the folder holds runs and --resume is not given, or other options.
    """
    path = output / "config.json"
    config = asdict(options)
    config["problems"] = fingerprint(json.dumps([task.train, task.held_out]).encode())
    if options.reward:
        config["reward_source"] = fingerprint(Path(options.reward.rpartition(":")[0]).read_bytes())
    config["versions"] = f"torch {torch.__version__}, transformers {transformers.__version__}"
    if path.exists():
        if not options.resume:
            raise ValueError(f"output_dir {output} holds runs: add --resume, or take another")
        saved = runs.read_json(path)
        changed = []
        for name in sorted((saved.keys() | config.keys()) - MAY_DIFFER):
            if saved.get(name) != config.get(name):
                changed.append(f"{name}: {saved.get(name)} there, {config.get(name)} now")
        if saved.get("steps", 0) > options.steps:
            changed.append(f"steps: {saved['steps']} there, {options.steps} now")
        if changed:
            raise ValueError(
                f"output_dir {output} holds runs with other options: {'; '.join(changed)}"
            )
    runs.write_json(path, config)


def fingerprint(content: bytes) -> str:
    """Different for different contents."""
    return hashlib.sha256(content).hexdigest()[:16]


def main(arguments: list[str] | None = None) -> int:
    """The command line. Returns the exit status: 0; 1 if a run failed or nothing was trained."""
    began = time.perf_counter()
    options = parse(Options, arguments, f"{__doc__}\n{METRICS}")
    output = Path(options.output_dir)
    task = data.load_task(options) if options.data else countdown_task()
    with runs.lock(output / ".lock"):
        prepare(output, options, task)
        print(json.dumps(asdict(options)), flush=True)
        failed = work(output, options, task)
        if not any(output.glob("*-seed*/metrics.jsonl")):
            return 1  # the failures were printed as they came
        print("\n".join(plot.report(output)))
    seconds = time.perf_counter() - began
    print(f"{output / 'curves.png'} and {output / 'table.md'} written after {seconds:.0f} s")
    return 1 if failed else 0


def work(output: Path, options: Options, task: Task) -> list[str]:
    """Make the starts that are missing, and all runs; returns the names of what failed."""
    starts = {}
    for seed in options.seeds:
        name = f"attempts{options.attempts}-steps{options.warm_start_steps}-seed{seed}"
        starts[seed] = Path(output.parent, "starts", name)
    missing = {seed: folder for seed, folder in starts.items() if not folder.exists()}
    if options.model:
        starts = dict.fromkeys(options.seeds, options.model)
        missing = {}
    failed = runs.run_side_by_side(
        {folder.name: (make_start, folder, seed, options) for seed, folder in missing.items()},
        options.jobs,
        steps=options.warm_start_steps * len(missing),
        unit="supervised steps",
    )
    if failed:
        return failed
    pieces = {}
    for seed, start in starts.items():
        path = output / f"start-seed{seed}.json"
        pieces[path.stem] = (measure, path, str(start), task, options)
    # The longest first, so that no core is left with a long one at the end.
    methods = [parse_method(text, options) for text in options.methods]
    steps_left = 0
    for method in sorted(methods, key=lambda method: -method.epochs * method.parts):
        for seed, start in starts.items():
            folder = output / f"{method.name}-seed{seed}"
            run = Run(folder, method, seed, str(start), options)
            pieces[folder.name] = (carry_out, run, task)
            done = runs.checkpoints(folder)[-1:]
            steps_left += options.steps - (runs.step_of(done[0]) if done else 0)
    return runs.run_side_by_side(pieces, options.jobs, steps_left, unit="steps")


class HelpFormatter(ArgumentDefaultsHelpFormatter, RawDescriptionHelpFormatter):
    """Keeps the lines of the description, and adds to every option its default."""


def parse(kind: type, arguments: list[str] | None, description: str):
    """An instance of the options' dataclass from the command line.

    Raises ValueError for an unknown option. Options cannot be abbreviated: --rho would silently be
    another experiment than --rho0.
    """
    parser = HfArgumentParser(
        kind, description=description, formatter_class=HelpFormatter, allow_abbrev=False
    )
    options, unknown = parser.parse_args_into_dataclasses(
        arguments, return_remaining_strings=True, look_for_args_file=False
    )
    if unknown:
        raise ValueError(f"unknown option {unknown[0]}: see --help")
    return options


if __name__ == "__main__":
    runs.command(
        "train.py",
        main,
        "Interrupted. Continue with the same command and --resume: of each run at most the steps"
        " since its last checkpoint (--checkpoint_every) are made again",
    )
