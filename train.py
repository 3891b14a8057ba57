"""Train language models with GRPO, BAPO and other losses on reused samples, and draw the curves.

    python train.py                     # three methods on Countdown, then runs/default/curves.png
    python train.py --methods grpo@4 bapo@4 0.8-1.5@4 --seeds 0 1 2 --output_dir runs/four
    python train.py --model Qwen/Qwen2.5-1.5B-Instruct --data openai/gsm8k --methods bapo@8 \
--output_dir runs/gsm8k

The file begins with Algorithm 1. The classes Run, TrainState, Options and Method follow below.

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
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
import transformers
from torch import Tensor

from bapo import (
    GRPO,
    PAPER_APP_A,
    PAPER_MAIN,
    ClipSearch,
    bapo_loss,
    diagnostics,
    gradient_mask,
    group_relative_advantages,
    importance_ratio,
    token_weights,
)
from other_losses import LOSSES
from reward import grade_all, pass_at_k
from rollout import (
    Rollouts,
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


# ---------------------------------------------------------------- Algorithm 1
def train(run: Run, task: Task, state: TrainState) -> None:
    """Run Algorithm 1, from the step that the state has reached."""
    options = run.options
    policy = state.policy
    steps = range(state.resumed_from + 1, options.steps + 1)
    for step in runs.progress_bar(steps, run.folder.name):
        began = time.perf_counter()
        # Sample group_size responses to each prompt: y ~ pi_rollout, the current pi_theta.
        problems = problems_of_step(task.train, step, options.prompts_per_step, run.seed)
        rollouts, problems = sample(state, problems, step, options)
        if rollouts is None:  # partial rollouts: no group is finished
            end_step(run, state, task, step, [{"step": step, "update": 0}])
            continue
        sampled = time.perf_counter()
        # Rewards, and advantages relative to the group.
        texts = response_texts(state.tokenizer, rollouts)
        rewards = rewards_of(task, texts, rollouts, problems)
        rollouts.advantages = group_relative_advantages(rewards, options.group_size)
        write_samples(run, step, state.tokenizer, rollouts, texts, rewards, problems)
        # Filter: groups of equal rewards have no advantage, and no update sees them.
        kept = (rollouts.advantages.view(-1, options.group_size) != 0).any(1)
        mini_batches, dropped = split_batch(rollouts, kept, run.method, options)
        # log pi_rollout, from the micro-batches that training reads: the ratios begin at 1.
        # Dropped groups are read for the entropy alone, which is that of the whole batch.
        for micro_batch in itertools.chain(dropped, *mini_batches):
            record_log_probs(policy, rollouts, micro_batch, step, options.temperature)
        rollout_metrics = batch_metrics(rollouts, rewards, kept, step)
        # For staleness = 0 ... E: one update each, with clip bounds of its own.
        updates = mini_batches * run.method.epochs  # the list of mini-batches, epochs times
        lines = []
        for update, mini_batch in enumerate(updates, 1):
            metrics = backward(policy, rollouts, mini_batch, run, step)
            check_update(run, step, update, metrics)
            state.optimizer.step()
            state.optimizer.zero_grad()  # frees the gradients before the next sampling
            lines.append({"step": step, "update": update} | rollout_metrics | metrics)
        if not lines:
            lines.append({"step": step, "update": 0} | rollout_metrics)
        lines[-1] |= {"rollout_s": sampled - began, "update_s": time.perf_counter() - sampled}
        end_step(run, state, task, step, lines)


def sample(
    state: TrainState, problems: list[Problem], step: int, options: Options
) -> tuple[Rollouts | None, list[Problem]]:
    """Return a batch of rollouts and its problems, one per group.

    With --partial_budget (section 5.3) these are the groups that this step has finished, or None
    and [].
    """
    if options.partial_budget:
        return generate_partially(
            state.policy,
            state.unfinished_groups,
            problems,
            step,
            budget=options.partial_budget,
            micro_batch_tokens=options.micro_batch_tokens,
            **sampling_options(options),
        )
    prompts = [problem.prompt for problem in problems]
    rollouts = generate(state.policy, prompts, **sampling_options(options))
    rollouts.versions.fill_(step)
    return rollouts, problems


def backward(
    policy, rollouts: Rollouts, mini_batch: list[Tensor], run: Run, step: int
) -> dict[str, float]:
    """Compute the gradient of one update, as `backward` at the top of bapo.py; return its metrics.

    The loss sees the whole update: one pair of bounds and one token count for all micro-batches.
    """
    options = run.options
    # A single micro-batch keeps its graph. The graphs of several would not fit into memory
    # together, so their log-probs are computed without one, and again below.
    is_single = len(mini_batch) == 1
    with torch.set_grad_enabled(is_single):
        outputs = [
            token_log_probs(policy, rollouts, micro_batch, options.temperature)
            for micro_batch in mini_batch
        ]
    log_probs, entropy = (torch.cat(tensors) for tensors in zip(*outputs))  # [n, T]
    log_probs.requires_grad_()  # a leaf, unless it is the end of the policy's own graph

    # Search c_low and c_high, then compute the clipped loss: -min(r A, clip(r, c_low, c_high) A)
    rows = torch.cat(mini_batch)
    log_pi_rollout = rollouts.rollout_log_probs[rows]
    advantages = rollouts.advantages[rows]
    mask = rollouts.mask[rows]
    loss, metrics = run.method.loss(log_probs, log_pi_rollout, advantages, mask)
    loss.backward()  # as far as the policy, or the log-probs if there are several micro-batches

    if not is_single:
        # Send d loss / d log-probs to the policy, micro-batch by micro-batch.
        gradients = log_probs.grad.split([len(micro_batch) for micro_batch in mini_batch])
        for micro_batch, gradient in zip(mini_batch, gradients):
            recomputed, _ = token_log_probs(policy, rollouts, micro_batch, options.temperature)
            recomputed.backward(gradient)
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
    if "low" in metrics:
        bounds = (metrics["low"], metrics["high"])
        metrics["predicted_entropy_fall"] = predicted_entropy_fall(
            log_ratio, log_probs, entropy, advantages.unsqueeze(1), mask, bounds
        )
    return {name: float(value) for name, value in metrics.items()}


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
    where = f"step {step}, update {update}"
    if not math.isfinite(metrics["loss"] + metrics["grad_norm"]):
        raise FloatingPointError(
            f"{where}: the loss or the gradient is not finite. Lower --learning_rate or the updates"
            " in --methods, in another --output_dir"
        )
    tolerance = 1e-3 if run.options.precision == "float32" else 0.03
    log_ratio = metrics["log_ratio_newest"]
    if update == 1 and log_ratio > tolerance:
        raise RuntimeError(
            f"{where}: the mean |log ratio| of tokens that were just drawn is {log_ratio:.3g}, and"
            f" must be at most {tolerance}. Check that the forward passes of rollouts and training"
            " use the same temperature, dtype and mask"
        )


def end_step(run: Run, state: TrainState, task: Task, step: int, lines: list[dict]) -> None:
    """Write the step's lines, and held-out accuracies and a checkpoint where they are due.

    The last line also gets the accuracies and, on a GPU, the peak memory.
    """
    options = run.options
    if options.device != "cpu":
        lines[-1]["peak_memory_gb"] = torch.cuda.max_memory_allocated(options.device) / 1e9
    if options.evaluate_every and step % options.evaluate_every == 0:
        accuracies = evaluate(state.policy, state.tokenizer, task, options)
        lines[-1] |= {f"held_out_{name}": value for name, value in accuracies.items()}
    for line in lines:
        runs.append_line(run.folder / "metrics.jsonl", line)
    if step % options.checkpoint_every == 0 or step == options.steps:
        runs.save_checkpoint(run.folder, step, state)


# ---------------------------------------------------------------- a run's state
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
    unfinished_groups: list[dict]  # of rollout.generate_partially
    resumed_from: int  # the step of the checkpoint that the run continues from, or 0


def load_state(run: Run) -> TrainState:
    """Load a run's newest checkpoint, or else the model that training begins with.

    What was logged after the checkpoint is cut off. Raises ValueError if the checkpoint has more
    steps than --steps.
    """
    options = run.options
    folder_of_step = runs.checkpoints(run.folder)
    resumed_from = max(folder_of_step, default=0)
    if resumed_from > options.steps:
        raise ValueError(
            f"steps must be at least {resumed_from}, because {run.folder} has that many, got"
            f" {options.steps}"
        )
    if resumed_from:
        model = folder_of_step[resumed_from]
    elif options.model:
        model = options.model
    else:  # output folders that lie side by side share it
        starts = Path(options.output_dir).parent / "starts"
        model = countdown.supervised_checkpoint(starts, run.seed)
    policy, tokenizer = load_policy(
        str(model),
        options.device,
        precision=options.precision,
        lora_rank=options.lora_rank,
        gradient_checkpointing=options.gradient_checkpointing,
    )
    trained = [parameter for parameter in policy.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=options.learning_rate, weight_decay=0.0, fused=True)
    torch.manual_seed(run.seed)  # after loading, which draws new adapters with a seed of its own
    if options.device != "cpu":
        torch.cuda.reset_peak_memory_stats(options.device)  # of an earlier run in this process
    unfinished_groups = []
    if resumed_from:
        unfinished_groups = runs.restore(model, optimizer, options.device)
    run.folder.mkdir(parents=True, exist_ok=True)
    for name in ("metrics.jsonl", "samples.jsonl"):
        runs.keep_steps(run.folder / name, resumed_from)
    (run.folder / "final.json").unlink(missing_ok=True)  # of a command with fewer --steps
    return TrainState(policy, tokenizer, optimizer, unfinished_groups, resumed_from)


def sampling_options(options: Options) -> dict:
    """Return the sampling options of rollout.generate."""
    return {
        "group_size": options.group_size,
        "max_new_tokens": options.max_new_tokens,
        "temperature": options.temperature,
        # Sampling needs less memory per token: keys and values, not all activations.
        "batch_tokens": 32 * options.micro_batch_tokens,
    }


# ---------------------------------------------------------------- rewards, metrics, evaluation
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
    with torch.random.fork_rng(devices):
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
    """Write the first prompt of a step and its responses to samples.jsonl."""
    token_ids, answer = problems[0]
    group_size = run.options.group_size
    record = {
        "step": step,
        "prompt": tokenizer.decode(token_ids),
        "answer": answer,
        "responses": texts[:group_size],
        "truncated": rollouts.truncated[:group_size].tolist(),
        "rewards": rewards[:group_size].tolist(),
    }
    runs.append_line(run.folder / "samples.jsonl", record)


# ---------------------------------------------------------------- options
@dataclass
class Options:
    """All options. None means the task's default. Raises ValueError for a wrong option.

    --help prints the text below each field.
    """

    methods: list[str] = option(
        ["grpo@1", "grpo@8", "bapo@8"], "NAME@UPDATES, see above", may_change=True
    )
    seeds: list[int] = option([0], "each method runs once per seed", may_change=True)
    steps: int = option(140, "batches of rollouts per run", least=1, may_change=True)
    prompts_per_step: int = option(16, "prompts in a batch", least=1)
    group_size: int = option(8, "responses per prompt", least=2)
    max_new_tokens: int | None = option(
        None,
        "most tokens of a response; without an EOS its reward is 0 [28; with --data 1024]",
        least=1,
    )
    temperature: float = option(1.0, "of sampling and of all log-probs", least=0.01)
    partial_budget: int = option(
        0,
        "partial rollouts (section 5.3): most tokens of a response drawn in a step; 0: off",
        least=0,
    )
    learning_rate: float | None = option(
        None, "of AdamW, constant, without weight decay [2e-4; with --data 1e-6]", least=0
    )
    max_grad_norm: float | None = option(
        None, "clip the gradient norm at this; 0 is off [0; with --data 1]", least=0
    )
    rho0: float | None = option(None, "bapo: target of rho [0.44; with --data 0.4, the paper's]")
    model: str = option("", "hub id or folder of a model; empty: Countdown and its own model")
    data: str = option(
        "",
        "with --model: a .jsonl or .parquet file, or a hub data set: NAME (its split"
        " train), NAME:SPLIT or NAME:CONFIGURATION/SPLIT",
    )
    fields: list[str] = option([], "with --data: names of the prompt's and the answer's field")
    reward: str = option(
        "", "with --data: FILE.py:FUNCTION(response, answer), from 0 to 1 [compare the answers]"
    )
    held_out: int = option(256, "with --data: problems kept for evaluation", least=1)
    lora_rank: int = option(
        0,
        "train LoRA adapters (peft) of this rank; 0: all weights, or an adapter folder's",
        least=0,
    )
    device: str = option(
        "cuda" if torch.cuda.is_available() else "cpu", "cpu, cuda, cuda:1, ...", may_change=True
    )
    precision: Literal["float32", "bfloat16"] | None = option(
        None, "of forward passes [float32; with --data on a GPU bfloat16]; trained weights: float32"
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
        1 if torch.cuda.is_available() else os.cpu_count() or 1,
        "runs side by side, each on one CPU thread; --data with --jobs 1: all threads",
        may_change=True,
    )
    checkpoint_every: int = option(5, "steps between checkpoints", least=1, may_change=True)
    evaluate_every: int = option(
        0,
        "steps between held-out evaluations; 0: only before and after training",
        least=0,
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
        if min(self.seeds) < 0:
            raise ValueError(f"seeds must be 0 or above, got {self.seeds}")
        if bool(self.model) != bool(self.data) or (self.reward and not self.data):
            raise ValueError(
                f"got model {self.model!r}, data {self.data!r} and reward {self.reward!r}: give"
                " model and data, or none of them for Countdown"
            )
        uses_rho0 = any(method.startswith("bapo@") for method in self.methods)
        # A resumed command repeats its rho0, and may ask for other methods.
        if self.rho0 is not None and not uses_rho0 and not self.resume:
            raise ValueError(f"rho0 is for bapo alone, got {self.methods}: add bapo@8 or drop it")
        defaults = {  # of Countdown
            "max_new_tokens": 28,
            "learning_rate": 2e-4,
            "rho0": 0.44,
            "max_grad_norm": 0.0,
            "precision": "float32",
        }
        if self.data:
            defaults = {
                "max_new_tokens": 1024,
                "learning_rate": 1e-6,
                "rho0": PAPER_MAIN.rho0,
                "max_grad_norm": 1.0,
                "precision": "float32" if self.device == "cpu" else "bfloat16",
            }
        for name, value in defaults.items():
            if getattr(self, name) is None:
                setattr(self, name, value)
        runs.check_options(self)
        for method in self.methods:
            parse_method(method, self)


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
    bapo-app-a          the paper's setting for OctoThinker (App. A)
    cispo, gspo, ...    other methods' token losses, from support/other_losses.py. The loss is
                        always their token-mean (gspo's own would be a sequence-mean), without the
                        groups of equal rewards (which asymre and opmd would train on)

A run is a method and a seed. The seed sets Countdown's supervised checkpoint, the order of the
prompts and the sampling. Its folder METHOD-seedSEED holds metrics.jsonl (a line per update; see
docs/logs.md), samples.jsonl (the responses to a prompt of each step), final.json (held-out
accuracy) and the newest checkpoint, which transformers loads and --resume continues. output_dir
also holds config.json, start-seedSEED.json (held-out accuracy before training; with --model only
start-seed0.json), curves.png and table.md.

To try other ranges, add a ClipSearch in parse_method. To change the loss, edit token_losses,
gradient_mask and contribution_masses in bapo.py; or add a function (log_probs, rollout_log_probs,
advantages, mask) -> losses [B, T] to LOSSES in support/other_losses.py. Its key there becomes a
method's name. To change the task, use --data and --reward.
"""


@dataclass(frozen=True)
class Method:
    """A loss, and how many updates it makes on a batch."""

    search: ClipSearch | None
    other_loss: Callable | None  # of support/other_losses.py, instead of a search
    epochs: int  # passes over a batch of rollouts
    mini_batches: int  # parts of a batch, with an update for each

    def loss(
        self, log_probs: Tensor, rollout_log_probs: Tensor, advantages: Tensor, mask: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss of one update and its metrics, as bapo_loss does."""
        if self.search:
            return bapo_loss(log_probs, rollout_log_probs, advantages, mask, self.search)
        losses = self.other_loss(log_probs, rollout_log_probs, advantages, mask)
        weights = token_weights(mask)
        log_ratio = log_probs.detach() - rollout_log_probs
        advantages = advantages.unsqueeze(1) * mask
        metrics = diagnostics(log_ratio, advantages, weights, (0.0, math.inf))
        # The others depend on bounds.
        return (weights * losses).sum(), {name: metrics[name] for name in ("ratio_max", "kl")}


def parse_method(text: str, options: Options) -> Method:
    """Return the method that `text` names. Raises ValueError if there is none."""
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
        searches[name] = ClipSearch.fixed(float(bounds[1]), float(bounds[2]))
    elif name not in searches | LOSSES:
        known = ", ".join([*searches, "LOW-HIGH", *LOSSES])
        raise ValueError(f"methods: {name!r} in {text!r} must be one of {known}")
    return Method(searches.get(name), LOSSES.get(name), int(epochs), int(mini_batches))


# ---------------------------------------------------------------- the command
def train_and_evaluate(run: Run, task: Task) -> None:
    """Finish a run, and write held-out accuracies before and after it."""
    options = run.options
    final = run.folder / "final.json"
    if final.exists() and runs.read_json(final)["steps"] == options.steps:
        return
    state = load_state(run)
    # With --model, every seed begins with the same model.
    seed = 0 if options.model else run.seed
    start = run.folder.with_name(f"start-seed{seed}.json")
    # Runs that begin with the same model wait for the one that evaluates it.
    with runs.lock(start.with_suffix(".lock"), timeout=-1):
        if not start.exists() and not state.resumed_from:
            runs.write_json(start, evaluate(state.policy, state.tokenizer, task, options))
    train(run, task, state)
    accuracies = evaluate(state.policy, state.tokenizer, task, options)
    runs.write_json(final, {"steps": options.steps} | accuracies)


def run_all(options: Options, task: Task) -> list[str]:
    """Make the runs that are missing; return the names of those that failed."""
    output = Path(options.output_dir)
    calls = {}
    for text in options.methods:
        for seed in options.seeds:
            run = Run(output / f"{text}-seed{seed}", parse_method(text, options), seed, options)
            calls[run.folder.name] = (train_and_evaluate, run, task)
    # Countdown's numbers should be the same with any --jobs: sums depend on the number of threads.
    return runs.run_side_by_side(calls, options.jobs, one_thread=not options.data)


def write_config(path: Path, options: Options) -> None:
    """Write the options of a folder of runs to its config.json.

    Raises ValueError if the folder holds runs and the command has no --resume, or if options differ
    from those of earlier commands, except MAY_DIFFER.
    """
    if any(path.parent.glob("*-seed*")):
        if not options.resume:
            raise ValueError(
                f"output_dir {path.parent} holds runs: add --resume, or use another folder"
            )
        runs.check_same(path, options)
    runs.write_options(path, options)


def main(arguments: list[str] | None = None) -> int:
    """Run the command line. Returns the exit status: 0, or 1 if a run failed."""
    options = runs.parse(Options, arguments, f"{__doc__}\n{METHODS_HELP}")
    output = Path(options.output_dir)
    with runs.lock(output / ".lock"):
        write_config(output / "config.json", options)
        task = data.load_task(options) if options.data else countdown.load_task()
        failed = run_all(options, task)
        if any(path.stat().st_size for path in output.glob("*-seed*/metrics.jsonl")):
            from support import plot  # slow, so not needed to check the options

            print(plot.report(output), end="")
            print(f"The curves are in {output}/curves.png and this table in {output}/table.md.")
        if failed:
            names = ", ".join(failed)
            print(f"These runs failed for the reasons above: {names}.", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    runs.command(
        "train.py",
        main,
        "Interrupted. The same command with --resume continues every run from its last checkpoint.",
    )
