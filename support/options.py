"""The options of train.py: one dataclass per group; every option brings its help and its limits."""

import argparse
import dataclasses
import math
import re
import types
import typing
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import torch

import countdown
from bapo import ClipSearch
from rollout import BATCH_TOKENS, MICRO_BATCH_TOKENS
from support.arms import Arm, parse_arm
from support.data import ANSWER_FIELDS, INSTRUCTION, PROMPT_FIELDS
from support.suggest import likely

# Responses may be drawn together that have this many times the tokens of a backward pass: a
# sampled token keeps its keys and values alone, a trained one its activations.
DRAWN_TOGETHER = BATCH_TOKENS // MICRO_BATCH_TOKENS


# ------------------------------------------------------------------------- declare and check
def option(
    default,
    help: str,
    *,
    at_least: float | None = None,
    positive: bool = False,
    length: tuple[int, ...] = (),
):
    """A field of a dataclass of options.

    Args:
        default: its value if it is not given; a list is copied.
        help: one line for --help.
        at_least: the least value that check_limits lets pass.
        positive: whether the value must be above 0.
        length: the lengths that a list may have.
    """
    metadata = {"help": help, "at_least": at_least, "positive": positive, "length": length}
    if isinstance(default, list):
        return dataclasses.field(default_factory=default.copy, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def check_limits(options) -> None:
    """Raise ValueError naming the first option of a dataclass that is outside its limits."""
    for field in dataclasses.fields(options):
        value = getattr(options, field.name)
        at_least = field.metadata.get("at_least")
        if at_least is not None and not at_least <= value < math.inf:
            raise ValueError(f"{field.name} must be at least {at_least}, got {value}")
        if field.metadata.get("positive") and not 0 < value < math.inf:
            raise ValueError(f"{field.name} must be positive, got {value}")
        length = field.metadata.get("length")
        if length and len(value) not in length:
            lengths = " or ".join(str(number) for number in length)
            raise ValueError(f"{field.name} takes {lengths} values, got {value}")


# ------------------------------------------------------------------------- the command line
class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Keeps the lines of the description, and adds to every option its default."""


def parse(options: type, arguments: list[str] | None, description: str) -> dict:
    """Read a command line.

    Args:
        options: a dataclass whose bases are the groups of options, dataclasses themselves.
        arguments: the words of the command line; None: those of this process.
        description: what --help says first.

    Returns:
        Every option's value by its name.

    Raises:
        ValueError: for an unknown option, with the one that was probably meant. Options cannot
            be abbreviated: --rho would silently be another experiment than --rho0.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=HelpFormatter, allow_abbrev=False
    )
    for group in options.__bases__:
        arguments_of_group = parser.add_argument_group(group._argument_group_name)
        types_of_group = typing.get_type_hints(group)
        for field in dataclasses.fields(group):
            add_argument(arguments_of_group, field, types_of_group[field.name])
    parsed, unknown_words = parser.parse_known_args(arguments)
    if unknown_words:
        word = unknown_words[0]
        name = word.lstrip("-").partition("=")[0].replace("-", "_")
        meant = likely(name, vars(parsed))
        hint = f": did you mean --{meant}?" if meant else ""
        raise ValueError(f"unknown option {word}{hint}")
    return vars(parsed)


def add_argument(parser, field: dataclasses.Field, annotation) -> None:
    """Add --NAME, and --NA-ME for na_me, to an argparse parser or group.

    annotation: bool (a flag, off by default), a type, `type | None`, or list[type].
    """
    flags = [f"--{field.name}"]
    if "_" in field.name:
        flags.append(f"--{field.name.replace('_', '-')}")
    help = field.metadata["help"].replace("%", "%%")
    if annotation is bool:
        parser.add_argument(*flags, dest=field.name, action="store_true", help=help)
        return
    settings = {"dest": field.name, "help": help}
    if field.default_factory is not dataclasses.MISSING:
        settings["default"] = field.default_factory()
    elif field.default is not dataclasses.MISSING:
        settings["default"] = field.default
    else:
        settings["required"] = True
    if typing.get_origin(annotation) is list:
        settings["nargs"] = "+"
        annotation = typing.get_args(annotation)[0]
    if isinstance(annotation, types.UnionType):  # type | None
        annotation = typing.get_args(annotation)[0]
    parser.add_argument(*flags, type=annotation, **settings)


def resolve_device(device: str, precision: str) -> tuple[str, str]:
    """Replace "auto": by CUDA if there is one, and by bfloat16 there, float32 on a CPU.

    Raises ValueError for a device that is not there and for an unknown precision.
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    cuda = re.fullmatch(r"cuda(?::(\d+))?", device)
    is_there = cuda and int(cuda[1] or 0) < torch.cuda.device_count()
    if device != "cpu" and not is_there:
        wanted = "auto, cpu, or a CUDA device that is there"
        raise ValueError(f"device must be {wanted}, got {device!r}")
    if precision not in ("auto", "float32", "bfloat16"):
        raise ValueError(f"precision must be auto, float32 or bfloat16, got {precision!r}")
    if precision == "auto":
        precision = "float32" if device == "cpu" else "bfloat16"
    return device, precision


# ------------------------------------------------------------------------- the options
@dataclass
class TaskOptions:
    """What is trained on, and from which start."""

    _argument_group_name = "task"
    model: str = option(
        "", "hub id or local folder of a model and its tokenizer; empty: Countdown and its own"
    )
    data: str = option(
        "",
        "with --model: a .jsonl, .json or .parquet file, or a data set of the hub, whose split "
        "train is taken unless it is given as NAME:SPLIT or NAME:CONFIGURATION/SPLIT",
    )
    fields: list[str] = option(
        [],
        "names of prompt and answer, a.b for b inside a; if not given, the first that is there "
        f"of {', '.join(PROMPT_FIELDS)} and of {', '.join(ANSWER_FIELDS)}",
        length=(0, 2),
    )
    instruction: str = option(
        INSTRUCTION, "added to prompts that are text; prompts that are messages bring their own"
    )
    reward: str = option(
        "",
        "with --data: FILE.py:FUNCTION(response, answer), from 0 to 1, instead of comparing "
        "answers",
    )
    held_out: int = option(
        256, "problems of --data that no run trains on, for evaluation", at_least=1
    )
    attempts: int = option(
        2,
        "Countdown: most attempts in a response; more make failing ones longer, and rho smaller",
        at_least=1,
    )
    warm_starts: list[int] = option([0], "Countdown: seeds of the supervised start; a run for each")
    warm_start_steps: int = option(
        countdown.WARM_START_STEPS, "Countdown: steps of the supervised start", at_least=1
    )


@dataclass
class RunOptions:
    """Which runs, how long, and where they are kept."""

    _argument_group_name = "run"
    methods: list[str] = option(["grpo@1", "grpo@8", "bapo-main@8", "bapo@8"], "arms, see above")
    seeds: list[int] = option([0], "a run for each; sets the order of the prompts and the sampling")
    steps: int = option(140, "batches of rollouts per run", at_least=1)
    prompts_per_step: int = option(16, "prompts in a batch", at_least=1)
    group_size: int = option(8, "responses per prompt", at_least=2)
    max_new_tokens: int | None = option(
        None,
        "length limit of a response; one without EOS by then gets 0 [28; with --data 1024]",
        at_least=1,
    )
    temperature: float = option(1.0, "of sampling, and of every log-prob", positive=True)
    partial_budget: int = option(
        0,
        "partial rollouts (5.3): most tokens per response and step, then it waits; 0: off",
        at_least=0,
    )
    checkpoint_every: int = option(5, "steps between checkpoints", at_least=1)
    evaluate_every: int = option(
        0,
        "steps between evaluations on held-out problems; 0: only before and after",
        at_least=0,
    )
    output_dir: str = option(
        "runs/default", "folder of the runs, the table and the picture; warm starts lie beside it"
    )
    resume: bool = option(
        False, "continue what is unfinished in output_dir; with more --steps, make it longer"
    )


@dataclass
class OptimisationOptions:
    """How weights are changed."""

    _argument_group_name = "optimisation"
    learning_rate: float | None = option(
        None, "of AdamW, constant, no weight decay [2e-4; with --data 1e-6]", positive=True
    )
    lora_rank: int = option(
        0,
        "train adapters (peft) of this rank at all linear layers but the head, not the weights; "
        "0: off",
        at_least=0,
    )
    max_grad_norm: float | None = option(
        None, "clip the gradient's norm here; 0: not [0; with --data 1]", at_least=0
    )


@dataclass
class BapoOptions:
    """The bound search of the arm `bapo`."""

    _argument_group_name = "BAPO (bounds are absolute ratios)"
    rho0: float = option(ClipSearch.rho0, "target share of positive tokens in the loss")
    low: list[float] = option(
        [ClipSearch.low_start, ClipSearch.low_max, ClipSearch.low_step],
        "lower bound: START MAX [STEP]",
        length=(2, 3),
    )
    high: list[float] = option(
        [ClipSearch.high_start, ClipSearch.high_max, ClipSearch.high_step],
        "upper bound: START MAX [STEP]",
        length=(2, 3),
    )

    def clip_search(self) -> ClipSearch:
        """The search of the arm `bapo`. Raises ValueError for a range that makes no sense."""
        return ClipSearch(
            rho0=self.rho0,
            low_start=self.low[0],
            low_max=self.low[1],
            low_step=self.low[2] if len(self.low) == 3 else ClipSearch.low_step,
            high_start=self.high[0],
            high_max=self.high[1],
            high_step=self.high[2] if len(self.high) == 3 else ClipSearch.high_step,
        )


@dataclass
class MachineOptions:
    """Where it runs, in which precision, and how much memory it may take."""

    _argument_group_name = "machine"
    device: str = option("auto", "auto, cpu, cuda, cuda:1, ...")
    precision: str = option(
        "auto",
        "of forward passes: float32, or bfloat16 by autocast, which auto takes with --data on a "
        "GPU; weights stay float32",
    )
    jobs: int = option(
        0,
        "runs side by side, one thread each; 0: one per core on a CPU, one on a GPU",
        at_least=0,
    )
    micro_batch_tokens: int = option(
        MICRO_BATCH_TOKENS,
        "most tokens, padding included, in one forward and backward pass; lower it when memory "
        f"is short: at most {DRAWN_TOGETHER} times as many are drawn together",
        at_least=1,
    )
    gradient_checkpointing: bool = option(
        False, "compute every layer again in the backward pass: less memory, more time"
    )

    @property
    def batch_tokens(self) -> int:
        """Most (prompt + max_new_tokens) * responses that are drawn together."""
        return min(BATCH_TOKENS, DRAWN_TOGETHER * self.micro_batch_tokens)


@dataclass
class Options(TaskOptions, RunOptions, OptimisationOptions, BapoOptions, MachineOptions):
    """All options.

    What was left None or "auto" is filled in: it depends on the task and the machine. Raises
    ValueError for what makes no sense, naming the option.
    """

    def __post_init__(self):
        if bool(self.model) != bool(self.data):
            given = f"model={self.model!r} and data={self.data!r}"
            raise ValueError(f"model and data go together: got {given}")
        if self.reward and not self.data:
            own = "as Countdown has its own"
            raise ValueError(f"reward goes with --data, {own}: got reward={self.reward!r}")
        if self.max_new_tokens is None:
            self.max_new_tokens = 1024 if self.data else 28
        if self.learning_rate is None:
            self.learning_rate = 1e-6 if self.data else 2e-4
        if self.max_grad_norm is None:
            self.max_grad_norm = 1.0 if self.data else 0.0
        check_limits(self)
        if self.lora_rank and not find_spec("peft"):
            raise ValueError(f"lora_rank {self.lora_rank} needs peft: pip install peft")
        if self.precision == "auto" and not self.data:
            self.precision = "float32"  # Countdown's numbers are the same on every device
        self.device, self.precision = resolve_device(self.device, self.precision)
        check_different("methods", [arm.name for arm in self.arms()])
        check_different("seeds", self.seeds)
        check_different("warm_starts", self.warm_starts)

    def arms(self) -> list[Arm]:
        """One for each of `methods`."""
        search = self.clip_search()
        return [parse_arm(text, search) for text in self.methods]

    def warm_start(self, seed: int) -> Path:
        """Folder of Countdown's start with this seed; sibling folders of runs share it."""
        name = f"attempts{self.attempts}-steps{self.warm_start_steps}-seed{seed}"
        return Path(self.output_dir).parent / "warm-starts" / name


def check_different(name: str, values: list) -> None:
    """Raise ValueError, naming the option, for an empty list or a value that is there twice."""
    if not values or len(set(values)) < len(values):
        raise ValueError(f"{name} must be different and at least one, got {values}")
