"""Train small language models with GRPO, Clip-Higher and BAPO on stale samples, and draw what happens (Algorithm 1).

    python train.py                                          # four arms on Countdown, then runs/curves.png and a table
    python train.py --methods grpo bapo 0.8-1.5 --seeds 0 1 2 --updates_per_batch 4 --output_dir runs/four

An arm is METHOD or METHOD@UPDATES, where UPDATES is the number of optimizer steps on each batch of rollouts:

    grpo                 fixed clip bounds [0.8, 1.2]
    clip-higher          fixed [0.8, 1.28] (DAPO)
    LOW-HIGH             fixed bounds of your own, as absolute ratios: 0.8-1.5
    bapo                 bounds searched anew for every update, in the range of the options (--rho0, --low_start, ...)
    bapo-main            the paper's main range; bapo-octothinker: its range for OctoThinker (App. A)

UPDATES = 1 is on-policy. It is E + 1 for the paper's staleness E, the figures' "k x", and epochs * batch / mini-batch of
the authors' script. All updates use the whole batch again, unless --mini_batches cuts it into fresh ones. Every run is an
arm and a seed; runs with the same seed see the same prompts from the same warm start. A run's folder holds config.json,
metrics.jsonl (a line per update), timings.jsonl, checkpoint.pt, and at its end final.json and model/.
"""

import argparse
import json
import math
import os
import random
import re
import shutil
import signal
import statistics
import sys
import threading
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from multiprocessing import active_children, get_context, parent_process
from pathlib import Path
from typing import Callable, NamedTuple

import torch
import transformers
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, HfArgumentParser

import countdown
import plot
from bapo import CLIP_HIGHER, GRPO, PAPER_MAIN, PAPER_OCTOTHINKER, ClipSearch
from bapo import bapo_loss, entropy_rule_terms, group_relative_advantages, token_weights
from reward import pass_at_k
from rollout import PartialRollouts, Rollouts, check_first_ratio, generate, response_texts, sample_rollouts, token_log_probs


def option(default, help: str):
    """A field of Options with a line of help."""
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata={"help": help})
    return field(default=default, metadata={"help": help})


@dataclass
class Options:
    """The command line's options. Raises ValueError for what makes no sense, naming the option."""

    methods: list[str] = option(["grpo@1", "grpo", "clip-higher", "bapo"], "arms: METHOD or METHOD@UPDATES, see above")
    seeds: list[int] = option([0], "one run per arm and seed; a seed sets the prompts' order and the sampling")
    updates_per_batch: int = option(8, "optimizer steps on each batch of rollouts, for arms without @UPDATES; 1 is on-policy")
    steps: int = option(60, "rollout batches per run")
    prompts_per_step: int = option(16, "prompts in a rollout batch")
    group_size: int = option(8, "responses per prompt")
    max_new_tokens: int = option(28, "length limit of a response; one that reaches it without EOS gets reward 0")
    temperature: float = option(1.0, "of sampling, and of every log-prob")
    learning_rate: float = option(2e-4, "of AdamW, constant")
    weight_decay: float = option(0.0, "of AdamW")
    max_grad_norm: float = option(0.0, "clip the gradient norm here; 0 leaves it alone (the logged norm is before clipping)")
    normalize_std: bool = option(True, "divide advantages by the group's standard deviation; --no_normalize_std: Dr. GRPO")
    aggregation: str = option("token-mean", "weight of a token in loss and search: token-mean or sequence-mean")
    rho0: float = option(0.45, "bapo: target share of positive tokens in the loss")
    low_start: float = option(0.8, "bapo: where the lower clip bound starts (absolute ratio, like all bounds)")
    low_max: float = option(0.9, "bapo: how far it may rise")
    low_step: float = option(0.02, "bapo: its step")
    high_start: float = option(1.2, "bapo: where the upper clip bound starts")
    high_max: float = option(3.0, "bapo: how far it may rise")
    high_step: float = option(0.05, "bapo: its step")
    contribution: str = option("gradient", "what counts in rho, for every arm: gradient (Eq. 5) or surrogate (Eq. 8)")
    mini_batches: int = option(1, "cut each batch of rollouts into this many; update u uses number u modulo it (1: all of it)")
    search_parts: int = option(1, "search the bounds in this many parts of the update's batch apart, as the authors' code does")
    save_tokens: int = option(0, "tokens of each step's last update that go into tokens.jsonl (ratio, probability, entropy)")
    partial_budget: int = option(0, "partial rollouts: most tokens per response and step, then it waits; 0: whole responses")
    max_age: int = option(8, "partial rollouts: steps after which an unfinished response is cut (reward 0)")
    evaluation_samples: int = option(16, "samples per held-out problem at the end")
    warm_start_steps: int = option(countdown.WARM_START_STEPS, "supervised steps before RL, shared by all runs in output_dir")
    attempts: int = option(2, "most attempts in a demonstration; more make failing responses longer, and rho smaller")
    device: str = option("auto", "auto, cpu, cuda, cuda:1, ...")
    jobs: int = option(0, "runs side by side, one thread each; 0: one per core on a CPU, one on a GPU")
    checkpoint_every: int = option(5, "steps between checkpoints")
    warm_start_dir: str = option("", "folder of the warm start; empty: warm-start in output_dir")
    output_dir: str = option("runs", "folder of the warm start, the runs, the table and the picture")
    resume: bool = option(False, "continue what is unfinished in output_dir, with the same options")

    def __post_init__(self):
        counts = "updates_per_batch steps prompts_per_step max_new_tokens evaluation_samples mini_batches search_parts max_age"
        for name in [*counts.split(), "warm_start_steps", "attempts", "checkpoint_every"]:
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("weight_decay", "max_grad_norm", "save_tokens", "partial_budget", "jobs"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be 0 or more, got {getattr(self, name)}")
        if self.group_size < 2:
            raise ValueError(f"group_size must be at least 2, got {self.group_size}: advantages compare a prompt's responses")
        for name in ("temperature", "learning_rate"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        if self.aggregation not in ("token-mean", "sequence-mean"):
            raise ValueError(f"aggregation must be token-mean or sequence-mean, got {self.aggregation!r}")
        if len(set(self.seeds)) < len(self.seeds) or not self.seeds:
            raise ValueError(f"seeds must be different and at least one, got {self.seeds}")
        if self.device == "auto":
            self.device = "cuda" if torch.cuda.is_available() else "cpu"
        if self.device != "cpu" and not (self.device.startswith("cuda") and torch.cuda.is_available()):
            raise ValueError(f"device must be auto, cpu, or a CUDA device that is there, got {self.device!r}")
        self.arms()

    def search_range(self) -> dict:
        """The options that are fields of ClipSearch."""
        return {name: getattr(self, name) for name in ClipSearch.__dataclass_fields__}

    def arms(self) -> dict[str, tuple[ClipSearch, int]]:
        """Name -> (clip bounds, updates per batch). Raises ValueError for a method or a range that makes no sense."""
        presets = {
            "grpo": GRPO,
            "clip-higher": CLIP_HIGHER,
            "bapo": ClipSearch(**self.search_range()),
            "bapo-main": PAPER_MAIN,
            "bapo-octothinker": PAPER_OCTOTHINKER,
        }
        arms = {}
        for text in self.methods:
            method, _, updates = text.partition("@")
            bounds = re.fullmatch(r"(\d*\.?\d+)-(\d*\.?\d+)", method)
            if not (method in presets or bounds) or not re.fullmatch(r"[1-9]\d*|", updates):
                raise ValueError(f"methods: {text!r} is none of {', '.join(presets)}, LOW-HIGH, each with or without @UPDATES")
            search = ClipSearch.fixed(float(bounds[1]), float(bounds[2])) if bounds else presets[method]
            updates = int(updates or self.updates_per_batch)
            search = ClipSearch(**(asdict(search) | {"contribution": self.contribution}))
            arms[f"{method}@{updates}"] = (search, updates)
        return arms

    def run_config(self, search: ClipSearch, updates: int, seed: int) -> dict:
        """Everything that decides one run's numbers: what is saved beside its metrics, and compared on --resume."""
        beside = {
            "methods",
            "seeds",
            "jobs",
            "checkpoint_every",
            "output_dir",
            "warm_start_dir",
            "resume",
            *self.search_range(),
        }
        own = {name: value for name, value in asdict(self).items() if name not in beside}
        return own | {"updates_per_batch": updates, "seed": seed, "search": asdict(search)}


class Task(NamedTuple):
    """A task is prompts plus a grading function; a policy to start from is a folder or hub name of model and tokenizer."""

    train: list[countdown.Row]
    held_out: list[countdown.Row]
    grade: Callable[[str, str], bool]
    policy: str


class Run(NamedTuple):
    """One arm and seed: its folder, and all that decides its numbers."""

    name: str
    folder: Path
    config: dict


# ---------------------------------------------------------------- files
def write_atomically(path: Path, write: Callable[[Path], None]) -> None:
    """Let `write` fill a file or folder beside `path`, then move it there: nobody ever sees half of it. (Of a folder that is
    there already, the old one is removed just before.)"""
    temporary = path.with_name(f".{path.name}.unfinished")
    if temporary.is_dir():  # left by a killed process
        shutil.rmtree(temporary)
    write(temporary)
    if path.is_dir():
        shutil.rmtree(path)
    os.replace(temporary, path)


def write_json(path: Path, content) -> None:
    """Write JSON atomically."""
    write_atomically(path, lambda file: file.write_text(json.dumps(content, indent=1) + "\n"))


class Lines:
    """A JSON Lines file. Each line is one unbuffered write, so that an interrupted run leaves whole lines."""

    def __init__(self, path: Path, keep_bytes: int = 0):
        self.file = open(path, "ab", buffering=0)
        self.file.truncate(keep_bytes)

    def write(self, record: dict) -> None:
        rounded = {k: plot.to_json_number(v) if isinstance(v, float) else v for k, v in record.items()}
        self.file.write((json.dumps(rounded) + "\n").encode())

    def size(self) -> int:
        return os.fstat(self.file.fileno()).st_size


def has_metrics(run: Run) -> bool:
    """Whether the run got as far as its first line of metrics."""
    path = run.folder / "metrics.jsonl"
    return path.exists() and path.stat().st_size > 0


def prepare_folder(run: Run, resume: bool) -> None:
    """Create the run's folder with its config, or check that the one there was made with the same options."""
    path = run.folder / "config.json"
    if path.exists() and has_metrics(run):
        if not resume:
            raise ValueError(f"{run.folder} holds a run already: add --resume to continue it, or choose another --output_dir")
        saved = json.loads(path.read_text())["config"]
        changed = {
            f"{name}: {saved.get(name)} there, {run.config.get(name)} now"
            for name in saved.keys() | run.config.keys()
            if saved.get(name) != run.config.get(name)
        }
        if changed:
            raise ValueError(
                f"{run.folder} was made with other options ({'; '.join(sorted(changed))}): "
                "use the old ones, or another --output_dir"
            )
    run.folder.mkdir(parents=True, exist_ok=True)
    versions = {"python": sys.version.split()[0], "torch": torch.__version__, "transformers": transformers.__version__}
    write_json(path, {"config": run.config, "versions": versions})


# ---------------------------------------------------------------- one run
def prompts_of_step(rows: list, step: int, count: int, seed: int) -> list:
    """The rows of step 0, 1, 2, ...: a new random order for every pass over the data. A function of its arguments alone,
    so that a resumed run needs no cursor."""
    chosen = []
    for i in range(step * count, (step + 1) * count):
        epoch, position = divmod(i, len(rows))
        if not chosen or position == 0:
            order = random.Random(f"{seed}/{epoch}").sample(range(len(rows)), len(rows))
        chosen.append(rows[order[position]])
    return chosen


def batch_metrics(rollouts: Rollouts, rewards: torch.Tensor, kept: torch.Tensor) -> dict:
    """What one batch of rollouts says before any update: over ALL sampled responses, not only over the kept groups."""
    lengths = rollouts.mask.sum(1).float()
    correct = rewards > 0
    return {
        "reward": rewards.mean(),
        "entropy": rollouts.entropy.sum() / rollouts.mask.sum(),
        "response_length": lengths.mean(),
        "length_correct": lengths[correct].mean(),
        "length_wrong": lengths[~correct].mean(),
        "truncated": rollouts.truncated.float().mean(),
        "filtered_groups": 1 - kept.float().mean(),
    }


def read_numbers(metrics: dict) -> dict[str, float]:
    """All 0-dim tensors to Python floats with one read from the device."""
    return dict(zip(metrics, torch.stack([value.detach().float() for value in metrics.values()]).tolist()))


@contextmanager
def timed(timings: dict, name: str, device: str):
    """Add the seconds of the block to timings[name]."""
    start = time.perf_counter()
    yield
    if device != "cpu":
        torch.cuda.synchronize(device)
    timings[name] = timings.get(name, 0.0) + time.perf_counter() - start


def roll_out(model, tokenizer, rows: list, version: int, partial: PartialRollouts | None, config: dict):
    """Responses to the rows' prompts, group by group; with a budget per iteration, those groups that are finished by now.

    Returns rollouts (None if there is no finished group), the rows they answer, and what to log of the buffer.
    """
    if partial:
        return partial.advance(model, tokenizer, rows, version)
    prompts = [row.prompt for row in rows]
    options = {name: config[name] for name in ("group_size", "max_new_tokens", "temperature")}
    return sample_rollouts(model, tokenizer, prompts, **options), rows, {}


def grade_rollouts(task: Task, tokenizer, rollouts: Rollouts, rows: list, group_size: int) -> torch.Tensor:
    """Rewards [N]: 1 for a right response that ended by itself, else 0."""
    answers = [row.answer for row in rows for _ in range(group_size)]
    right = [task.grade(text, answer) for text, answer in zip(response_texts(tokenizer, rollouts), answers)]
    return torch.tensor(right, dtype=torch.float32, device=rollouts.mask.device).masked_fill(rollouts.truncated, 0.0)


def train_run(run: Run, task: Task, checkpoint_every: int, position: int = 0) -> None:
    """One arm, one seed: Algorithm 1. Continues from the folder's checkpoint if there is one.

    Raises FloatingPointError on a non-finite loss or gradient, before the optimizer sees it; the batch is saved.
    """
    config, device = run.config, run.config["device"]
    model = AutoModelForCausalLM.from_pretrained(task.policy, dtype=torch.float32).to(device).eval()  # eval: no dropout
    tokenizer = AutoTokenizer.from_pretrained(task.policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config["learning_rate"], weight_decay=config["weight_decay"])
    torch.manual_seed(config["seed"])
    partial = None
    if config["partial_budget"]:
        options = {name: config[name] for name in ("max_age", "max_new_tokens", "group_size", "temperature")}
        partial = PartialRollouts(budget=config["partial_budget"], **options)
    first_step, sizes = restore(run, model, optimizer, partial)
    names = ["metrics", "timings"] + ["tokens"] * bool(config["save_tokens"])
    files = {name: Lines(run.folder / f"{name}.jsonl", sizes.get(name, 0)) for name in names}

    bar = tqdm(total=config["steps"], initial=first_step, desc=run.name, position=position, leave=False, dynamic_ncols=True)
    for step in range(first_step, config["steps"]):
        timings: dict[str, float] = {}
        rows = prompts_of_step(task.train, step, config["prompts_per_step"], config["seed"])
        with timed(timings, "rollout_s", device):
            rollouts, rows, counts = roll_out(model, tokenizer, rows, step, partial, config)
        of_batch = {"step": step + 1, **counts}
        if rollouts is None:
            files["metrics"].write({**of_batch, "update": 0})
        else:
            rewards = grade_rollouts(task, tokenizer, rollouts, rows, config["group_size"])
            with timed(timings, "update_s", device):
                of_batch |= update_policy(run, model, optimizer, rollouts, rewards, of_batch, files)
            bar.set_postfix(reward=f"{of_batch['reward']:.2f}", entropy=f"{of_batch['entropy']:.2f}", refresh=False)
        files["timings"].write({"step": step + 1, **timings})
        bar.update()
        if (step + 1) % checkpoint_every == 0 or step + 1 == config["steps"]:
            save_checkpoint(run, step + 1, model, optimizer, partial, files)
    bar.close()
    write_atomically(run.folder / "model", lambda folder: (model.save_pretrained(folder), tokenizer.save_pretrained(folder)))
    write_json(run.folder / "final.json", evaluate(model, tokenizer, task, config))


def update_policy(run: Run, model, optimizer, rollouts: Rollouts, rewards: torch.Tensor, of_batch: dict, files: dict) -> dict:
    """All updates on one batch of rollouts; a line of metrics for each. Returns the metrics of the batch itself."""
    config, search, version = run.config, ClipSearch(**run.config["search"]), of_batch["step"] - 1
    advantages = group_relative_advantages(rewards, config["group_size"], config["normalize_std"])
    # Groups of equal rewards teach nothing; token-mean is over the tokens of the others.
    kept = (advantages.view(-1, config["group_size"]) != 0).any(1)
    of_batch = of_batch | read_numbers(batch_metrics(rollouts, rewards, kept))
    rows_of_groups = torch.arange(len(rewards), device=rewards.device).view(-1, config["group_size"])[kept]
    parts = [rows.flatten() for rows in rows_of_groups.tensor_split(config["mini_batches"]) if len(rows)]
    parts = [(rollouts.select(rows), advantages[rows]) for rows in parts]
    for update in range(config["updates_per_batch"] if parts else 0):
        batch, batch_advantages = parts[update % len(parts)]
        log_probs, entropy = token_log_probs(model, batch, config["temperature"])
        if update == 0:
            check_first_ratio(log_probs, batch, version)
        loss, metrics = update_loss(log_probs, entropy, batch, batch_advantages, search, config)
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config["max_grad_norm"] or math.inf)
        numbers = read_numbers(metrics | {"loss": loss, "grad_norm": norm})
        if not (math.isfinite(numbers["loss"]) and math.isfinite(numbers["grad_norm"])):
            stop_not_finite(run, of_batch["step"], update + 1, numbers, batch, batch_advantages)
        optimizer.step()
        files["metrics"].write({**of_batch, "update": update + 1, **numbers})
    if not parts:
        files["metrics"].write({**of_batch, "update": 0})
    elif config["save_tokens"]:
        tokens = token_sample(log_probs, entropy, batch, batch_advantages, config["save_tokens"])
        files["tokens"].write({"step": of_batch["step"], **tokens})
    return of_batch


def save_checkpoint(run: Run, step: int, model, optimizer, partial: PartialRollouts | None, files: dict[str, Lines]) -> None:
    """All that an exact continuation needs, atomically."""
    device = run.config["device"]
    state = {
        "step": step,
        "sizes": {name: file.size() for name, file in files.items()},
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "rng": torch.get_rng_state(),
        "cuda_rng": torch.cuda.get_rng_state(device) if device != "cpu" else None,
        "waiting": partial.groups if partial else [],
    }
    write_atomically(run.folder / "checkpoint.pt", lambda file: torch.save(state, file))


def restore(run: Run, model, optimizer, partial: PartialRollouts | None) -> tuple[int, dict[str, int]]:
    """Load the checkpoint, if there is one: steps done, and how long the files were then (what came later is run again)."""
    path, device = run.folder / "checkpoint.pt", run.config["device"]
    if not path.exists():
        return 0, {}
    saved = torch.load(path, map_location="cpu", weights_only=True)  # load_state_dict moves what belongs on the device
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    torch.set_rng_state(saved["rng"])
    if device != "cpu":
        torch.cuda.set_rng_state(saved["cuda_rng"], device)
    if partial:
        partial.groups = saved["waiting"]
    return saved["step"], saved["sizes"]


def update_loss(log_probs, entropy, batch: Rollouts, advantages, search: ClipSearch, config: dict) -> tuple[torch.Tensor, dict]:
    """bapo_loss of one update's batch, and its metrics with those that need the entropy [N, T] of the policy.

    With search_parts > 1 the parts are searched apart under one normaliser, and the metrics are means over the parts'
    tokens (extremes stay extremes).
    """
    weights = token_weights(batch.mask, config["aggregation"])
    losses, metrics = [], []
    tensors = (log_probs, batch.log_probs, advantages, batch.mask, weights, entropy)
    # One part, unless the search is to see less than the update: then every part has its own bounds.
    for part in zip(*(tensor.tensor_split(config["search_parts"]) for tensor in tensors)):
        now, then, part_advantages, mask, part_weights, part_entropy = part
        loss, of_part = bapo_loss(now, then, part_advantages, mask, search, weights=part_weights)
        now, bounds = now.detach(), (of_part["low"], of_part["high"])
        terms = entropy_rule_terms(now - then, now, part_entropy, part_advantages, *bounds)
        of_part["entropy_rule"] = (terms * mask).sum() / mask.sum().clamp(min=1)
        losses.append(loss)
        metrics.append(of_part)
    tokens = torch.stack([mask.sum() for mask in batch.mask.tensor_split(config["search_parts"])])

    def combine(name: str) -> torch.Tensor:
        values = torch.stack([of_part[name] for of_part in metrics])
        if "_min_" in name or "_max_" in name:
            values = values[~values.isnan()]
            return values.new_tensor(math.nan) if not len(values) else values.amin() if "_min_" in name else values.amax()
        weight = tokens * ~values.isnan()
        return (values.nan_to_num() * weight).sum() / weight.sum()

    combined = metrics[0] if len(metrics) == 1 else {name: combine(name) for name in metrics[0]}
    return sum(losses), combined | {"entropy_now": entropy.sum() / batch.mask.sum()}


def token_sample(log_probs, entropy, batch: Rollouts, advantages, count: int) -> dict[str, list]:
    """At most `count` response tokens, evenly spread over the batch: what Figs. 5 and 10 are drawn from."""
    inside = batch.mask
    sign = advantages.sign().unsqueeze(1).expand_as(log_probs)[inside]
    every = max(1, math.ceil(len(sign) / count))
    columns = {
        "sign": sign,
        "ratio": (log_probs.detach() - batch.log_probs)[inside].exp(),
        "probability": log_probs.detach()[inside].exp(),
        "rollout_probability": batch.log_probs[inside].exp(),
        "entropy": entropy[inside],
    }
    return {name: [plot.to_json_number(x) for x in column[::every].tolist()] for name, column in columns.items()}


def stop_not_finite(run: Run, step: int, update: int, numbers: dict, batch: Rollouts, advantages: torch.Tensor) -> None:
    """Save the batch and raise FloatingPointError."""
    path = run.folder / "nonfinite.pt"
    content = {"step": step, "update": update, "numbers": numbers, "batch": vars(batch), "advantages": advantages}
    write_atomically(path, lambda file: torch.save(content, file))
    raise FloatingPointError(
        f"{run.name}: step {step}, update {update}: loss {numbers['loss']}, gradient norm {numbers['grad_norm']}; "
        f"the batch and all metrics are in {path}"
    )


def evaluate(model, tokenizer, task: Task, config: dict) -> dict[str, float]:
    """Held-out accuracy: greedy, mean over k samples, and unbiased pass@8 and pass@k from them. Leaves the RNG as it was."""
    k = config["evaluation_samples"]
    prompts = [row.prompt for row in task.held_out]
    limits = dict(max_new_tokens=config["max_new_tokens"], temperature=config["temperature"])

    def accuracy(samples: int, do_sample: bool) -> torch.Tensor:
        rollouts = generate(model, tokenizer, prompts, group_size=samples, do_sample=do_sample, **limits)
        answers = [row.answer for row in task.held_out for _ in range(samples)]
        graded = [task.grade(text, answer) for text, answer in zip(response_texts(tokenizer, rollouts), answers)]
        return (torch.tensor(graded) & ~rollouts.truncated.cpu()).view(-1, samples)

    with torch.random.fork_rng():
        torch.manual_seed(0)
        greedy, sampled = accuracy(1, False), accuracy(k, True)
    result = {"greedy": greedy.double().mean().item(), f"mean@{k}": sampled.double().mean().item()}
    for of in sorted({min(8, k), k}):
        result[f"pass@{of}"] = statistics.mean(pass_at_k(k, correct, of) for correct in sampled.sum(1).tolist())
    return result


# ---------------------------------------------------------------- all runs
_slot = 0  # the row of this process's progress bar


def _start_worker(lock, slots) -> None:
    global _slot
    _slot = slots.get()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends its workers
    # A worker must not outlive a killed parent: a resumed command would then write to the same files.
    threading.Thread(target=lambda: (parent_process().join(), os._exit(1)), daemon=True).start()
    tqdm.set_lock(lock)
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


def _work(*arguments) -> None:
    train_run(*arguments, position=_slot)


def run_side_by_side(runs: list[Run], task: Task, jobs: int, checkpoint_every: int) -> dict[str, BaseException]:
    """Every run in one of `jobs` processes, one thread each, so that a run's numbers do not depend on the others.

    Returns the failures by run name; an exception in one run does not stop the rest (a process that dies, does). Ctrl-C ends
    all of them.
    """
    context = get_context("spawn")
    tqdm.set_lock(context.RLock())
    slots = context.Queue()
    for slot in range(jobs):
        slots.put(slot)
    failures = {}
    with ProcessPoolExecutor(jobs, context, _start_worker, (tqdm.get_lock(), slots)) as pool:
        futures = {pool.submit(_work, run, task, checkpoint_every): run for run in runs}
        try:
            for future in as_completed(futures):
                run = futures[future]
                if error := future.exception():
                    failures[run.name] = error
                tqdm.write(f"{run.name}: {f'{type(error).__name__}: {error}' if error else 'done'}")
        except KeyboardInterrupt:
            for worker in active_children():
                worker.terminate()
            raise
    return failures


def countdown_task(options: Options, output: Path) -> Task:
    """Countdown and its warm start, which is made once per output folder. On one thread, like the runs: the model is too
    small to gain from more, and its weights do not depend on the number of cores."""
    torch.set_num_threads(1)
    folder = options.warm_start_dir or output / "warm-start"
    policy = countdown.warm_start(folder, attempts=options.attempts, steps=options.warm_start_steps, device=options.device)
    return Task(*countdown.problems(), countdown.grade, str(policy))


def main(arguments: list[str] | None = None) -> int:
    """The command line. Returns the exit status: 0, or 1 if a run failed."""
    parser = HfArgumentParser(Options, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    (options,) = parser.parse_args_into_dataclasses(arguments)
    started = time.perf_counter()
    output = Path(options.output_dir)
    runs = [
        Run(f"{name}-seed{seed}", output / f"{name}-seed{seed}", options.run_config(search, updates, seed))
        for seed in options.seeds
        for name, (search, updates) in options.arms().items()
    ]
    for run in runs:  # refuse before the first minute of training, not after it
        prepare_folder(run, options.resume)
    print(json.dumps(asdict(options), indent=1))
    transformers.utils.logging.disable_progress_bar()
    task = countdown_task(options, output)
    start = output / "warm-start.json"
    if not start.exists():
        model, tokenizer = AutoModelForCausalLM.from_pretrained(task.policy), AutoTokenizer.from_pretrained(task.policy)
        write_json(start, evaluate(model.to(options.device).eval(), tokenizer, task, runs[0].config))

    unfinished = [run for run in runs if not (run.folder / "final.json").exists()]
    # The longest first, so that no core is left with a long one at the end.
    unfinished.sort(key=lambda run: -run.config["updates_per_batch"])
    jobs = min(options.jobs or (os.cpu_count() or 1 if options.device == "cpu" else 1), max(len(unfinished), 1))
    try:
        failures = run_side_by_side(unfinished, task, jobs, options.checkpoint_every)
    except KeyboardInterrupt:
        print(f"\nInterrupted. Continue with the same command and --resume; metrics so far are in {output}", file=sys.stderr)
        return 130
    if not any(map(has_metrics, runs)):
        return 1  # the failures were printed as they came
    for line in plot.report(output):
        print(line)
    print(f"{output / 'curves.png'} and {output / 'table.md'} written after {time.perf_counter() - started:.0f} s")
    return 1 if failures else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ValueError as error:  # an option that makes no sense, or a folder that holds something else
        sys.exit(f"train.py: {error}")
