"""The options of train.py: one dataclass per group, a line of help and a limit each."""

import argparse
import difflib
import math
from dataclasses import dataclass, field, fields
from importlib.util import find_spec
from pathlib import Path

import torch
from transformers import HfArgumentParser

import countdown
from bapo import ClipSearch
from rollout import BATCH_TOKENS, MICRO_BATCH_TOKENS
from support.arms import Arm, parse_arm
from support.data import ANSWER_FIELDS, INSTRUCTION, PROMPT_FIELDS


def option(default, help: str):
    """A field of an options dataclass with a line of help."""
    given = {"default_factory": default.copy} if isinstance(default, list) else {"default": default}
    return field(**given, metadata={"help": help})


def parse(options: type, arguments: list[str] | None, description: str) -> dict:
    """Every option by name; the groups are the bases of `options`. Raises ValueError for an unknown one, with a likely one."""
    layout = type("Help", (argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter), {})
    parser = HfArgumentParser(options.__bases__, description=description, formatter_class=layout)
    *parsed, rest = parser.parse_args_into_dataclasses(arguments, return_remaining_strings=True)
    for word in rest:
        names = [f.name for group in options.__bases__ for f in fields(group)]
        wanted = word.lstrip("-").partition("=")[0]
        initials = [name for name in names if "".join(part[0] for part in name.split("_")) == wanted]
        likely = (initials or difflib.get_close_matches(wanted, names, 1))[:1]
        raise ValueError(f"unknown option {word}" + "".join(f": did you mean --{name}?" for name in likely))
    return {name: value for part in parsed for name, value in vars(part).items()}


def check_numbers(options, at_least: dict[float, str], positive: str) -> None:
    """ValueError naming the first option that is too small or not finite: at_least maps a least value to options' names."""
    for least, names in at_least.items():
        for name in names.split():
            if not least <= getattr(options, name) < math.inf:
                raise ValueError(f"{name} must be at least {least}, got {getattr(options, name)}")
    for name in positive.split():
        if not 0 < getattr(options, name) < math.inf:
            raise ValueError(f"{name} must be positive, got {getattr(options, name)}")


def resolve_device(device: str, precision: str) -> tuple[str, str]:
    """Both without "auto": CUDA if there is one; bfloat16 there, float32 on a CPU. ValueError for what is not there."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device != "cpu" and not (device.startswith("cuda") and (torch.device(device).index or 0) < torch.cuda.device_count()):
        raise ValueError(f"device must be auto, cpu, or a CUDA device that is there, got {device!r}")
    if precision not in ("auto", "float32", "bfloat16"):
        raise ValueError(f"precision must be auto, float32 or bfloat16, got {precision!r}")
    return device, {"cpu": "float32"}.get(device, "bfloat16") if precision == "auto" else precision


@dataclass
class TaskOptions:
    _argument_group_name = "task"
    model: str = option("", "hub id or local folder of a model and its tokenizer; empty: Countdown and its own small model")
    data: str = option("", "with --model: a data set of the hub, or a .jsonl, .json or .parquet file")
    split: str = option("train", "SPLIT or CONFIGURATION/SPLIT of the data set")
    fields: list[str] = option([], f"names of prompt and answer, a.b for b inside a; else of {PROMPT_FIELDS}, {ANSWER_FIELDS}")
    instruction: str = option(INSTRUCTION, "added to prompts that are text; prompts that are messages bring their own")
    reward: str = option("", "with --data: FILE.py:FUNCTION(response, answer), from 0 to 1, instead of comparing answers")
    max_prompt_tokens: int = option(1024, "longer prompts are left out, and counted")
    held_out: int = option(256, "problems of --data that no run trains on, for evaluation")
    attempts: int = option(2, "Countdown: most attempts in a response; more make failing ones longer, and rho smaller")
    warm_starts: list[int] = option([0], "Countdown: seeds of the supervised start; a run for each")
    warm_start_steps: int = option(countdown.WARM_START_STEPS, "Countdown: its steps")


@dataclass
class RunOptions:
    _argument_group_name = "run"
    methods: list[str] = option(["grpo@1", "grpo@8", "bapo@8", "bapo-gate@8"], "arms, see above")
    seeds: list[int] = option([0], "a run for each; sets the prompts' order and the sampling")
    steps: int = option(140, "batches of rollouts per run")
    prompts_per_step: int = option(16, "prompts in a batch")
    group_size: int = option(8, "responses per prompt")
    max_new_tokens: int | None = option(None, "length limit of a response; one without EOS by then gets 0 [28; --data 1024]")
    temperature: float = option(1.0, "of sampling, and of every log-prob")
    partial_budget: int = option(0, "partial rollouts (5.3): most tokens per response and step, then it waits; 0: off")
    checkpoint_every: int = option(5, "steps between checkpoints")
    samples_every: int = option(10, "steps between looks at a few responses, shown and kept in samples.jsonl; 0: never")
    evaluate_every: int = option(0, "steps between evaluations on held-out problems; 0: only before and after")
    output_dir: str = option("runs/default", "folder of the runs, the table and the picture; warm starts lie beside it")
    resume: bool = option(False, "continue what is unfinished in output_dir; with more --steps, make it longer")


@dataclass
class OptimisationOptions:
    _argument_group_name = "optimisation"
    learning_rate: float | None = option(None, "of AdamW, constant, no weight decay [2e-4; --data 1e-6]")
    lora_rank: int = option(0, "train adapters (peft) of this rank at all linear layers but the head, not the weights; 0: off")
    max_grad_norm: float | None = option(None, "clip the gradient's norm here; 0: not [0; --data 1]")


@dataclass
class BapoOptions:
    _argument_group_name = "BAPO (bounds are absolute ratios)"
    rho0: float = option(ClipSearch.rho0, "target share of positive tokens in the loss")
    low: list[float] = option([ClipSearch.low_start, ClipSearch.low_max, ClipSearch.low_step], "lower bound: START MAX [STEP]")
    high: list[float] = option([ClipSearch.high_start, ClipSearch.high_max, ClipSearch.high_step], "upper bound, likewise")


@dataclass
class MachineOptions:
    _argument_group_name = "machine"
    device: str = option("auto", "auto, cpu, cuda, cuda:1, ...")
    precision: str = option("auto", "of forward passes: float32, or bfloat16 by autocast [by device]; weights stay float32")
    jobs: int = option(0, "runs side by side, one thread each; 0: one per core on a CPU, one on a GPU")
    micro_batch_tokens: int = option(MICRO_BATCH_TOKENS, "most tokens, padding included, in one forward and backward pass")
    batch_tokens: int = option(BATCH_TOKENS, "most (prompt + max_new_tokens) * responses that are drawn together")
    gradient_checkpointing: bool = option(False, "compute every layer again in the backward pass: less memory, more time")


@dataclass
class Options(TaskOptions, RunOptions, OptimisationOptions, BapoOptions, MachineOptions):
    """All options. Raises ValueError for what makes no sense, naming the option."""

    def __post_init__(self):
        if bool(self.model) != bool(self.data):
            raise ValueError(f"model and data go together: got model={self.model!r} and data={self.data!r}")
        if self.reward and not self.data:
            raise ValueError(f"reward goes with --data, as Countdown has its own: got reward={self.reward!r}")
        defaults = {"max_new_tokens": (28, 1024), "learning_rate": (2e-4, 1e-6), "max_grad_norm": (0.0, 1.0)}
        for name, of_task in defaults.items():
            setattr(self, name, of_task[bool(self.data)] if getattr(self, name) is None else getattr(self, name))
        at_least = {2: "group_size", 0: "partial_budget jobs max_grad_norm samples_every evaluate_every lora_rank"}
        at_least[1] = "steps prompts_per_step max_new_tokens attempts warm_start_steps checkpoint_every max_prompt_tokens"
        at_least[1] += " held_out micro_batch_tokens batch_tokens"
        check_numbers(self, at_least, positive="temperature learning_rate")
        for name, lengths in {"low": (2, 3), "high": (2, 3), "fields": (0, 2)}.items():
            if len(getattr(self, name)) not in lengths:
                raise ValueError(f"{name} takes {lengths[0]} or {lengths[1]} values, got {getattr(self, name)}")
        if self.lora_rank and not find_spec("peft"):
            raise ValueError(f"lora_rank {self.lora_rank} needs peft: pip install peft")
        self.device, self.precision = resolve_device(self.device, self.precision)
        different = {"methods": [arm.arm for arm in self.arms()], "seeds": self.seeds, "warm_starts": self.warm_starts}
        for name, values in different.items():
            if len(set(values)) < len(values) or not values:
                raise ValueError(f"{name} must be different and at least one, got {values}")

    def arms(self) -> list[Arm]:
        """One for each of `methods`."""
        search = {"rho0": self.rho0}
        for side in ("low", "high"):
            search |= dict(zip((f"{side}_start", f"{side}_max", f"{side}_step"), getattr(self, side)))
        return [parse_arm(text, ClipSearch(**search)) for text in self.methods]

    def warm_start(self, seed: int) -> Path:
        """Folder of Countdown's start with this seed; folders of runs that lie side by side share it."""
        return Path(self.output_dir).parent / f"warm-starts/attempts{self.attempts}-steps{self.warm_start_steps}-seed{seed}"
