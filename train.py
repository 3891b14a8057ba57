"""Train language models with GRPO, BAPO and other losses on reused samples, and draw the curves.

    python train.py                     # three methods on Countdown, then runs/default/curves.png
    python train.py --methods grpo@4 bapo@4 0.8-1.5@4 --seeds 0 1 2 --output_dir runs/four
    python train.py --model Qwen/Qwen2.5-1.5B-Instruct --data openai/gsm8k --methods bapo@8 \
        --output_dir runs/gsm8k

A method is NAME@UPDATES: it makes UPDATES optimizer steps on each batch of rollouts. 1 is
on-policy; the paper calls UPDATES - 1 the staleness E. NAME@EPOCHSxMINIBATCHES cuts the batch into
mini-batches of whole groups and goes through them EPOCHS times: 8 is 8x1, and 2x4 is the authors'
scheme. The names are

    grpo                fixed clip bounds [0.8, 1.2]
    clip-higher         fixed clip bounds [0.8, 1.28] (DAPO)
    LOW-HIGH            your own fixed bounds, as absolute ratios: 0.8-1.5
    bapo                bounds searched anew for every update, in the paper's main range
                        (section 5.1), with the target --rho0
    bapo-main           the same with the paper's rho0 = 0.4
    bapo-app-a          the paper's setting for OctoThinker (App. A)
    bapo-app-a-gradient the same, with rho computed from gradients (bapo.ClipSearch.contribution)
    cispo, gspo, ...    other methods' token losses, from neighbours/losses.py

A run is a method and a seed. The seed sets Countdown's supervised checkpoint, the order of the
prompts and the sampling. Its folder METHOD-seedSEED holds metrics.jsonl (a line per update),
timings.jsonl (a line per step), samples.jsonl (some responses), final.json (held-out accuracy) and
the newest checkpoint, which transformers loads and --resume continues. docs/logs.md explains the
metrics. output_dir also holds config.json, start-seedSEED.json (held-out accuracy before training;
only one with --model), curves.png and table.md.

To try other ranges, add a ClipSearch to SEARCHES. To change the loss, edit token_losses,
unclipped and contribution_masses in bapo.py; or add a function (log_probs, rollout_log_probs,
advantages, mask) -> losses [B, T] to LOSSES in neighbours/losses.py. Its key there becomes a
method's name. To change the task, use --data and --reward.

    step                one batch of rollouts, and all updates on it
    mini-batch          the groups that one update (one optimizer step) sees
    micro-batch         the responses that one backward pass sees
"""

import math
import os
import re
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

import torch
import transformers
from torch import Tensor
from tqdm import tqdm
from transformers.hf_argparser import HfArg

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
    group_relative_advantages,
    predicted_entropy_fall,
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

SEARCHES = {
    "grpo": GRPO,
    "clip-higher": CLIP_HIGHER,
    "bapo-main": PAPER_MAIN,
    "bapo-app-a": PAPER_APP_A,
    "bapo-app-a-gradient": replace(PAPER_APP_A, contribution="gradient"),
}  # parse_method adds "bapo", whose rho0 is --rho0
SAMPLES_EVERY = 10  # steps between the responses that samples.jsonl keeps
FIRST_STEPS = 20  # after them a run warns if the search has never moved its bounds
WHAT_TO_SEE = """\
What to see in curves.png: with eight updates on each batch, GRPO (grpo@8) ends with less entropy
than on-policy training (grpo@1) and with a higher gradient norm, while BAPO (bapo@8) keeps more
entropy and a lower norm. Its reward is not higher, and a single seed can differ from the average.
"""


# ---------------------------------------------------------------- options
@dataclass
class Options:
    """All options. Those that are None get defaults of the task. ValueError for a wrong option."""

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
        default=None, help="of AdamW, constant, without weight decay [2e-4; --data: 1e-6]"
    )
    max_grad_norm: float | None = HfArg(
        default=None, help="clip the gradient norm at this; 0: off [0; with --data 1]"
    )
    rho0: float | None = HfArg(
        default=None, help="bapo: target of rho [0.44; with --data the paper's 0.4]"
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
        default=1 if torch.cuda.is_available() else os.cpu_count() or 1, help="runs side by side"
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
        if self.reward and not with_data:
            raise ValueError(f"reward goes with --data, got {self.reward!r} without it")
        defaults = {  # of Countdown, and of --data
            "max_new_tokens": (14 * self.attempts, 1024),
            "learning_rate": (2e-4, 1e-6),
            "rho0": (0.44, PAPER_MAIN.rho0),
            "max_grad_norm": (0.0, 1.0),
            "precision": ("float32", "float32" if self.device == "cpu" else "bfloat16"),
        }
        for name, values in defaults.items():
            if getattr(self, name) is None:
                setattr(self, name, values[with_data])
        runs.check_values(self, LEAST)
        for method in self.methods:
            parse_method(method, self)


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
    "checkpoint_every",
    "evaluate_every",
    "output_dir",
    "resume",
}


@dataclass(frozen=True)
class Method:
    """A loss, and how many updates it makes on a batch."""

    name: str
    # (log_probs, rollout_log_probs, advantages, mask, *, weights, bounds) -> loss, metrics
    loss: Callable
    search: ClipSearch | None  # None for a method of neighbours/losses.py
    epochs: int  # passes over a batch of rollouts
    mini_batches: int  # parts of a batch, with an update for each


def neighbour_loss(
    token_losses, log_probs, rollout_log_probs, advantages, mask, *, weights, bounds
):
    """Return loss and metrics as bapo_loss does, from another method's token losses."""
    losses = token_losses(log_probs, rollout_log_probs, advantages, mask)
    log_ratio = log_probs.detach() - rollout_log_probs
    metrics = diagnostics(log_ratio, advantages, mask, None, weights)
    return (weights * losses).sum(), metrics


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
    if bounds:
        searches[name] = ClipSearch.fixed(float(bounds[1]), float(bounds[2]))
    if name in searches:
        loss = partial(bapo_loss, search=searches[name])
    elif name in LOSSES:
        loss = partial(neighbour_loss, LOSSES[name])
    else:
        known = ", ".join([*searches, "LOW-HIGH", *LOSSES])
        raise ValueError(f"methods: {name!r} in {text!r} must be one of {known}")
    return Method(text, loss, searches.get(name), int(epochs), int(mini_batches))


# ---------------------------------------------------------------- Algorithm 1
@dataclass
class Run:
    """One method with one seed, in its folder."""

    folder: Path
    method: Method
    seed: int
    options: Options


def train(run: Run, task: Task) -> "TrainState":
    """Run Algorithm 1, from the folder's newest checkpoint if there is one."""
    options = run.options
    state = load_state(run)
    policy = state.policy
    steps = runs.progress_bar(range(state.steps_done + 1, options.steps + 1), run.folder.name)
    for step in steps:
        clock = Clock(options.device)
        log = {"step": step, "update": 0}
        # Sample group_size responses to each prompt: y ~ pi_rollout, the current pi_theta.
        problems = countdown.problems_of_step(task.train, step, options.prompts_per_step, run.seed)
        with autocast(options.device, options.precision):
            if options.partial_budget:  # section 5.3: the groups that this step has finished
                rollouts, problems = state.partial.advance(policy, problems, step)
            else:
                prompts = [problem.prompt for problem in problems]
                rollouts = generate(policy, prompts, **sampling(options))
                rollouts.versions.fill_(step)
        clock.lap("rollout_s")
        if rollouts is not None:
            # Rewards, and advantages relative to the group.
            texts = response_texts(state.tokenizer, rollouts)
            rewards = grade(task, texts, rollouts, problems)
            clock.lap("grading_s")
            if step == 1 or step % SAMPLES_EVERY == 0:
                write_samples(run, step, state.tokenizer, texts, rewards, problems)
            rollouts.advantages = group_relative_advantages(rewards, options.group_size)
            # Filter: groups of equal rewards have no advantage, and no update sees them.
            kept = (rollouts.advantages.view(-1, options.group_size) != 0).any(1)
            mini_batches, dropped = split_batch(rollouts, kept, run.method, options)
            # log pi_rollout of every token
            with autocast(options.device, options.precision):
                parts = sum(mini_batches, dropped)
                read_rollout_policy(policy, rollouts, parts, step, options)
            log |= batch_metrics(rollouts, rewards, kept, step)
            # For staleness = 0 ... E: one update each, with clip bounds of its own.
            updates = mini_batches * run.method.epochs
            for update, mini_batch in enumerate(updates, 1):
                # Search c_low and c_high, and take the gradient of the loss that they clip.
                metrics = backward(policy, rollouts, mini_batch, run.method, options)
                check_update(run, step, update, metrics)
                state.optimizer.step()
                state.optimizer.zero_grad()  # frees the gradients before the next sampling
                log |= {"update": update} | metrics
                if update < len(updates):  # the last line waits for the held-out accuracy
                    runs.append_line(run.folder / "metrics.jsonl", log)
            clock.lap("update_s")
        if options.partial_budget:
            log["waiting_groups"] = len(state.partial.groups)
        if options.evaluate_every and step % options.evaluate_every == 0:
            accuracies = evaluate(policy, state.tokenizer, task, options)
            log |= {f"held_out_{name}": value for name, value in accuracies.items()}
            clock.lap("evaluation_s")
        runs.append_line(run.folder / "metrics.jsonl", log)
        end_step(run, state, step, clock)
    return state


def split_batch(rollouts: Rollouts, kept: Tensor, method: Method, options: Options) -> tuple:
    """Return mini-batches, each a list of micro-batches, and the dropped groups' micro-batches.

    A micro-batch is a tensor of row numbers. kept: bool, one per group. Where fewer groups are kept
    than there are mini-batches, each mini-batch is one group.
    """
    rows = torch.arange(len(rollouts.mask), device=kept.device).view(len(kept), -1)
    parts = [*rows[kept].tensor_split(method.mini_batches), rows[~kept]]
    *mini_batches, dropped = [
        micro_batches(rollouts, part.flatten(), options.micro_batch_tokens) for part in parts
    ]
    return [mini_batch for mini_batch in mini_batches if mini_batch], dropped


def read_rollout_policy(
    policy, rollouts: Rollouts, parts: list[Tensor], step: int, options: Options
) -> None:
    """Fill in rollout_log_probs and entropy of the tokens that this step's policy drew.

    They come from the forward pass and the micro-batches of training, so that the ratios begin at
    1. Tokens that earlier steps drew keep the values that were recorded then.
    """
    log_probs, entropy = log_probs_now(policy, rollouts, parts, options.temperature)
    drawn_now = rollouts.versions == step
    rollouts.rollout_log_probs = torch.where(drawn_now, log_probs, rollouts.rollout_log_probs)
    rollouts.entropy = torch.where(drawn_now, entropy, rollouts.entropy)


def backward(
    policy, rollouts: Rollouts, mini_batch: list[Tensor], method: Method, options: Options
) -> dict[str, float]:
    """Add up the gradient of one update over its micro-batches; return the update's metrics."""
    rows = torch.cat(mini_batch)
    weights = torch.zeros_like(rollouts.rollout_log_probs)
    weights[rows] = token_weights(rollouts.mask[rows])  # one token count for the whole update
    bounds = None  # bapo_loss finds them, if it sees the whole update or if they are fixed
    search = method.search
    if len(mini_batch) > 1 and search and search.rho0:
        # Search over all micro-batches, before any of them trains (Eq. 8).
        with autocast(options.device, options.precision):
            log_probs, _ = log_probs_now(policy, rollouts, mini_batch, options.temperature)
        log_ratio = (log_probs - rollouts.rollout_log_probs)[rows]
        masses = contribution_masses(log_ratio, rollouts.advantages[rows], weights[rows], search)
        bounds = search_clip_bounds(masses, search)

    def loss_of(chosen, log_probs):  # of bapo_loss: -min(r A, clip(r, c_low, c_high) A)
        return method.loss(
            log_probs,
            rollouts.rollout_log_probs[chosen],
            rollouts.advantages[chosen],
            rollouts.mask[chosen],
            weights=weights[chosen],
            bounds=bounds,
        )

    total_loss = 0.0
    log_probs = []
    entropies = []
    for micro_batch in mini_batch:
        with autocast(options.device, options.precision):
            with_gradient, entropy = token_log_probs(
                policy, rollouts, micro_batch, options.temperature
            )
        loss, metrics = loss_of(micro_batch, with_gradient)
        loss.backward()
        total_loss = total_loss + loss.detach()
        log_probs.append(with_gradient.detach())
        entropies.append(entropy)
    # Without a limit the norm is measured, not clipped.
    norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), options.max_grad_norm or math.inf)

    log_probs = torch.cat(log_probs)
    entropy = torch.cat(entropies)
    if len(mini_batch) > 1:  # the metrics of the last micro-batch are those of its tokens alone
        _, metrics = loss_of(rows, log_probs)
    mask = rollouts.mask[rows]
    log_ratio = log_probs - rollouts.rollout_log_probs[rows]
    newest = mask & (rollouts.versions[rows] == rollouts.versions.max())
    metrics |= {
        "loss": total_loss,
        "grad_norm": norm,
        "log_ratio_newest": log_ratio[newest].abs().mean(),
        "entropy_now": entropy.sum() / mask.sum(),
    }
    if search:
        used = (metrics["low"], metrics["high"])
        metrics["predicted_entropy_fall"] = predicted_entropy_fall(
            log_ratio, log_probs, entropy, rollouts.advantages[rows], mask, used
        )
    return {name: float(value) for name, value in metrics.items()}


def check_update(run: Run, step: int, update: int, metrics: dict[str, float]) -> None:
    """Stop before a wrong gradient reaches the optimizer.

    Raises FloatingPointError if the loss or the gradient is not finite. Raises RuntimeError if
    the tokens that a step drew have a mean |log-ratio| above 1e-3 (0.03 in bfloat16) at its first
    update. It should be 0.
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


# ---------------------------------------------------------------- a run's state
@dataclass
class TrainState:
    """What a run holds in memory."""

    policy: torch.nn.Module
    tokenizer: transformers.PreTrainedTokenizerBase
    optimizer: torch.optim.Optimizer
    partial: PartialRollouts  # used with --partial_budget
    steps_done: int  # at the checkpoint that the run continues from, or 0


def load_state(run: Run) -> TrainState:
    """Load a run's newest checkpoint, or else the model that training begins with."""
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
        saved = runs.restore(checkpoints[steps_done], options.device)
        optimizer.load_state_dict(saved["optimizer"])
        partial_rollouts.groups = saved["waiting"]
        runs.remove_older_checkpoints(run.folder)
    return TrainState(policy, tokenizer, optimizer, partial_rollouts, steps_done)


def policy_of(name: str, options: Options) -> tuple:
    """Return model and tokenizer of a folder or hub id, set up as the options say."""
    return load_policy(
        name,
        options.device,
        precision=options.precision,
        lora_rank=options.lora_rank,
        gradient_checkpointing=options.gradient_checkpointing,
    )


def sampling(options: Options) -> dict:
    """Return the options of rollout.generate."""
    return {
        "group_size": options.group_size,
        "max_new_tokens": options.max_new_tokens,
        "temperature": options.temperature,
        # Sampling needs less memory per token: keys and values, not all activations.
        "batch_tokens": 32 * options.micro_batch_tokens,
    }


def end_step(run: Run, state: TrainState, step: int, clock: "Clock") -> None:
    """Save a checkpoint if it is time for one, and write the timings."""
    options = run.options
    if step == FIRST_STEPS:
        warn_if_bounds_never_moved(run)
    if step % options.checkpoint_every == 0 or step == options.steps:
        saved = {"optimizer": state.optimizer.state_dict(), "waiting": state.partial.groups}
        runs.save_checkpoint(run.folder, step, state.policy, state.tokenizer, saved)
        clock.lap("checkpoint_s")
    timings = clock.seconds | {"peak_memory_gb": runs.peak_memory(options.device) / 1e9}
    runs.append_line(run.folder / "timings.jsonl", {"step": step} | timings)


def warn_if_bounds_never_moved(run: Run) -> None:
    """Print a line if no search of the first steps has moved the bounds: BAPO is a fixed clip."""
    target = run.method.search.rho0 if run.method.search else 0.0
    lines = runs.read_lines(run.folder / "metrics.jsonl")
    shares = [line["rho_start"] for line in lines if "rho_start" in line]
    if target and shares and min(shares) >= target:
        share = statistics.mean(shares)
        tqdm.write(
            f"{run.folder.name}: the search has not moved the bounds, because rho is {share:.2f}"
            f" before it, and rho0 is {target}. Use bapo, a higher --rho0, another --output_dir"
        )


class Clock:
    """Seconds of the parts of a step."""

    def __init__(self, device: str):
        self.device = device
        self.seconds = {}
        self.last = time.perf_counter()

    def lap(self, name: str) -> None:
        """Count the time since the last lap as that of the part `name`."""
        if self.device != "cpu":
            torch.cuda.synchronize(self.device)
        now = time.perf_counter()
        self.seconds[name] = now - self.last
        self.last = now


# ---------------------------------------------------------------- rewards, metrics, evaluation
def grade(task: Task, texts: list[str], rollouts: Rollouts, problems: list[Problem]) -> Tensor:
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

    It draws 16 responses per problem, or 4 with --data, at --temperature. For pass@k a response is
    right if its reward is above 0. The random state is restored afterwards.
    """
    samples = 4 if options.data else 16
    k = min(8, samples)
    prompts = [problem.prompt for problem in task.held_out]
    devices = [] if policy.device.type == "cpu" else [policy.device]
    with torch.random.fork_rng(devices), autocast(options.device, options.precision):
        torch.manual_seed(0)
        rollouts = generate(policy, prompts, **sampling(options) | {"group_size": samples})
    rewards = grade(task, response_texts(tokenizer, rollouts), rollouts, task.held_out)
    right = (rewards.view(-1, samples) > 0).sum(1).tolist()
    return {
        f"mean@{samples}": rewards.double().mean().item(),
        f"pass@{k}": statistics.mean(pass_at_k(samples, count, k) for count in right),
    }


def write_samples(run: Run, step: int, tokenizer, texts, rewards, problems) -> None:
    """Write the first prompt's responses to samples.jsonl."""
    token_ids, answer = problems[0]
    asked = {"step": step, "prompt": tokenizer.decode(token_ids), "answer": answer}
    for text, reward in zip(texts[: run.options.group_size], rewards.tolist()):
        sample = asked | {"response": text, "reward": reward}
        runs.append_line(run.folder / "samples.jsonl", sample)


# ---------------------------------------------------------------- the command
def train_and_evaluate(run: Run, task: Task) -> None:
    """Finish a run and write its held-out accuracy to final.json."""
    path = run.folder / "final.json"
    steps = run.options.steps
    if path.exists() and runs.read_json(path).get("steps") == steps:
        return
    state = train(run, task)
    accuracies = evaluate(state.policy, state.tokenizer, task, run.options)
    runs.write_json(path, {"steps": steps} | accuracies)


def evaluate_start(path: Path, seed: int, task: Task, options: Options) -> None:
    """Write the held-out accuracy before training to `path`, unless it is there."""
    if path.exists():
        return
    policy, tokenizer = policy_of(start_of(seed, options), options)
    tqdm.write(f"{path.stem}: evaluating on {len(task.held_out)} problems before the first step")
    runs.write_json(path, evaluate(policy, tokenizer, task, options))


def start_of(seed: int, options: Options) -> str:
    """Return the folder or hub id of the model that training begins with.

    Countdown's supervised checkpoint is trained if it is missing; output folders that lie side by
    side share it.
    """
    if options.model:
        return options.model
    name = f"attempts{options.attempts}-steps{options.warm_start_steps}-seed{seed}"
    folder = Path(options.output_dir).parent / "starts" / name
    with runs.lock(folder.with_name(f"{name}.lock"), timeout=-1):
        if not folder.exists():
            countdown.save_start(folder, seed, options.attempts, options.warm_start_steps)
    return str(folder)


def main(arguments: list[str] | None = None) -> int:
    """Run the command line. Returns the exit status: 0, or 1 if a run failed."""
    options = runs.parse(Options, arguments, __doc__)
    output = Path(options.output_dir)
    task = data.load_task(options)
    import plot  # slow, so only after the options have been checked

    with runs.lock(output / ".lock"):
        runs.write_config(output / "config.json", asdict(options), MAY_DIFFER)
        failed = make_runs(output, options, task)
        if any(output.glob("*-seed*/metrics.jsonl")):
            print(plot.report(output), end="")
    if failed:
        print(f"These runs failed for the reasons above: {', '.join(failed)}", file=sys.stderr)
        return 1
    print(f"The curves are in {output}/curves.png and this table in {output}/table.md.")
    if replace(options, output_dir=Options.output_dir) == Options():
        print(WHAT_TO_SEE, end="")
    return 0


def make_runs(output: Path, options: Options, task: Task) -> list[str]:
    """Make the runs that are missing; return the names of those that failed."""
    calls = {}
    evaluated = options.seeds[:1] if options.model else options.seeds  # all begin with one model
    for seed in evaluated:
        path = output / f"start-seed{seed}.json"
        calls[path.stem] = (evaluate_start, path, seed, task, options)
    for text in options.methods:
        method = parse_method(text, options)
        for seed in options.seeds:
            run = Run(output / f"{method.name}-seed{seed}", method, seed, options)
            calls[run.folder.name] = (train_and_evaluate, run, task)
    return runs.run_side_by_side(calls, options.jobs)


if __name__ == "__main__":
    runs.command(
        "train.py",
        main,
        "Interrupted. The same command with --resume continues every run from its last checkpoint.",
    )
