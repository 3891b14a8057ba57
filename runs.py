"""What a run is, its folder, so that nothing that was computed is lost, and runs side by side.

config.json        everything that decides the numbers, and the versions it was made with
metrics.jsonl      a line per update; timings.jsonl: a line per step; samples.jsonl: a line per response that is kept to look at
checkpoint-STEP/   the newest one: a model that transformers loads, and state.pt for an exact continuation
model/             the last checkpoint of a finished run (state.pt in it is needed only to make the run longer)
final.json         held-out accuracy at the end; error.txt: the traceback of a run that failed
lock               held by the process that writes here; the file stays, it means nothing by itself
"""

import argparse
import difflib
import io
import json
import math
import os
import re
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from multiprocessing import active_children, get_context, parent_process
from pathlib import Path

import filelock
import torch
import transformers
from tqdm import tqdm
from transformers import HfArgumentParser

from bapo import CLIP_HIGHER, GATE, GRPO, PAPER_MAIN, PAPER_OCTOTHINKER, ClipSearch
from objectives import OBJECTIVES

LOCK_S = 5  # a killed process may need a moment to let go of a lock
LINE_S = 30  # between lines of progress, where there is no terminal
MEANWHILE_S = 180  # between pictures of runs that go on
IDLE_STEPS = 10  # without a group to train on: worth a warning


# ---------------------------------------------------------------- options
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


# ---------------------------------------------------------------- arms
@dataclass(frozen=True)
class Arm:
    """An arm is METHOD[+MODIFIER...][@UPDATES]; UPDATES is the number of optimizer steps on each batch of rollouts (default
    8; 1 is on-policy; E + 1 for the paper's staleness E; the "k x" of its figures). EPOCHSxPARTS cuts the batch into PARTS
    mini-batches of whole groups, and goes through them EPOCHS times in the same order: 8 is 8x1, 1x8 sees each group once, 2x4
    is the authors' scheme. Where fewer groups are left than parts, there are as many parts as groups. Methods:

        grpo             fixed clip bounds [0.8, 1.2]; clip-higher: [0.8, 1.28] (DAPO)
        LOW-HIGH         fixed bounds of your own, as absolute ratios: 0.8-1.5
        bapo             bounds searched anew for every update, in the range of --rho0, --low and --high
        bapo-gate        the same at 0.45 in [0.8, 1.1] x [1.2, 3.0]: past 1 the lower bound is a gate, see bapo.ClipSearch
        bapo-main        the paper's main setting as printed; bapo-octothinker: its setting for OctoThinker (App. A)
        balanced         GRPO, with negative advantages scaled down until the positive share at ratio 1 is --rho0
        cispo, gspo, ... the token losses of that name in objectives.py, with its defaults (decoupled-ppo, a-3po and
                         off-policy-grpo are grpo without --partial_budget)

    Modifiers:

        sequence-mean    every response counts the same in the loss, instead of every token
        no-std           advantages without the division by the group's standard deviation (Dr. GRPO)
        lowX, highX      the search may raise the lower (upper) bound up to X: bapo+low0.98+high1.2; past 1 in steps of 0.06
        surrogate        rho counts the values of Eq. 8, instead of the gradient's masses (Eq. 5)
        at-one           the search may take out all negative tokens, which it does where every ratio is 1
        shareS           negative advantages scaled up or down until the positive share at ratio 1 is S; share1: positives alone
    """

    arm: str
    search: ClipSearch
    epochs: int  # times that a batch of rollouts is gone through
    parts: int = 1  # mini-batches of a batch, an update for each
    aggregation: str = "token-mean"
    normalize_std: bool = True
    share: float | None = None  # to which negative advantages are scaled
    scale_up: bool = False  # or only down
    objective: str = ""  # of objectives.py, in place of the clipped surrogate


ARM_FIELDS = {field.name for field in fields(Arm)} | {"seed", "warm_start"}  # what may differ between runs that are compared


def parse_arm(text: str, search: ClipSearch) -> Arm:
    """The arm that `text` names, `search` being that of `bapo`. Raises ValueError for what makes no sense."""
    name, _, count = text.partition("@")
    epochs, _, parts = (count or "8").partition("x")
    method, *modifiers = name.split("+")
    presets = {"grpo": GRPO, "clip-higher": CLIP_HIGHER, "bapo": search, "balanced": GRPO}
    presets |= {"bapo-gate": GATE, "bapo-main": PAPER_MAIN, "bapo-octothinker": PAPER_OCTOTHINKER}
    bounds = re.fullmatch(r"(\d*\.?\d+)-(\d*\.?\d+)", method)
    others = {other: GRPO for other in OBJECTIVES if other not in presets}
    if not (method in presets | others or bounds) or not re.fullmatch(r"|[1-9]\d*(x[1-9]\d*)?", count):
        raise ValueError(f"methods: {text!r} is none of {', '.join(presets | others)}, LOW-HIGH, each with or without @UPDATES")
    chosen = ClipSearch.fixed(float(bounds[1]), float(bounds[2])) if bounds else (presets | others)[method]
    changes = {"share": search.rho0} if method == "balanced" else {"objective": method} if method in others else {}
    of_arm = {"sequence-mean": {"aggregation": "sequence-mean"}, "no-std": {"normalize_std": False}}
    of_search = {"surrogate": {"contribution": "surrogate"}, "at-one": {"may_empty": True}}
    for modifier in modifiers:
        if modifier in of_arm:
            changes |= of_arm[modifier]
        elif modifier in of_search and method not in others:
            chosen = replace(chosen, **of_search[modifier])
        elif (top := re.fullmatch(r"(low|high)(\d*\.?\d+)", modifier)) and method.startswith("bapo"):
            chosen = replace(chosen, **{f"{top[1]}_max": float(top[2])})
            if top[1] == "low" and chosen.low_max > 1:
                chosen = replace(chosen, low_step=0.06)  # no point of the grid at 1
        elif (share := re.fullmatch(r"share(0?\.\d+|1)", modifier)) and float(share[1]) > 0:
            changes |= {"share": float(share[1]), "scale_up": True}
        else:
            raise ValueError(
                f"methods: {modifier!r} in {text!r} is no modifier: {', '.join(of_arm | of_search)}, shareS, lowX, highX"
            )
    updates = epochs if parts in ("", "1") else f"{epochs}x{parts}"
    return Arm(f"{name}@{updates}", chosen, int(epochs), int(parts or 1), **changes)


# ---------------------------------------------------------------- files
def to_json_number(value: float) -> float | None:
    """Six significant digits; null for what JSON has no number for."""
    return float(f"{value:.6g}") if math.isfinite(value) else None


def write_atomically(path: Path, write: Callable[[Path], None]) -> None:
    """Let `write` fill a file or a new folder beside `path`, then move it there: nobody ever sees half of it."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.unfinished")  # another process may be writing the same
    remove(temporary)  # left by a killed process of this number
    try:
        write(temporary)
        os.replace(temporary, path)
    finally:
        remove(temporary)  # if it is still there: a full disk needs the room


def remove(path: Path) -> None:
    """A file or a folder, if it is there."""
    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def write_json(path: Path, content) -> None:
    """Write JSON atomically."""
    write_atomically(path, lambda file: file.write_text(json.dumps(content, indent=1) + "\n"))


class Lines:
    """A JSON Lines file to add to. Each line is one unbuffered write, so that an interrupted run leaves whole lines. What came
    after keep_bytes is cut off, as a continued run writes it again. ValueError if the file is shorter than that."""

    def __init__(self, path: Path, keep_bytes: int = 0):
        self.path, self.file = path, open(path, "ab", buffering=0)
        if self.size() < keep_bytes:
            raise ValueError(f"{path} has {self.size()} bytes, its checkpoint was made at {keep_bytes}: it was cut or replaced")
        self.file.truncate(keep_bytes)

    def write(self, record: dict) -> None:
        """Add a line. OSError, with all lines before it whole, if there is no room for it."""
        rounded = {k: to_json_number(v) if isinstance(v, float) else v for k, v in record.items()}
        line, before = (json.dumps(rounded) + "\n").encode(), self.size()
        with suppress(OSError):
            if self.file.write(line) == len(line):  # a full disk may take a part of it without an error
                return
        self.file.truncate(before)
        raise OSError(f"{self.path}: no room for another line (is the disk full?); the {before} bytes before it are whole")

    def size(self) -> int:
        return os.fstat(self.file.fileno()).st_size


def read_lines(path: Path, unfinished: bool = False) -> list[dict]:
    """A JSON Lines file of objects; empty lines are left out. ValueError naming the line that is damaged; unfinished: a last
    line without its end is left out, as the process that writes the file may be at it."""
    found = []
    for number, line in enumerate(path.read_bytes().splitlines(keepends=True), 1):
        if not line.endswith(b"\n") and unfinished:
            break
        try:
            found += [dict(**json.loads(line))] if line.strip() else []  # bytes: json skips a byte order mark there
        except (ValueError, TypeError) as error:
            raise ValueError(f"{path}, line {number} is damaged: {line[:60]!r}") from error
    return found


def read_metrics(path: Path, unfinished: bool = False) -> list[dict]:
    """metrics.jsonl. ValueError if an update is there twice or missing: two processes wrote it, or somebody cut it."""
    lines, last, expected = read_lines(path, unfinished), (0, 0), 0
    for number, line in enumerate(lines, 1):
        key = step, update = line.get("step"), line.get("update")
        begins = step == last[0] + 1 and update in (0, 1) and last[1] == expected
        goes_on = key == (last[0], last[1] + 1) and last[1] > 0
        if not begins and not goes_on:
            raise ValueError(f"{path}, line {number}: step, update {key} after {last}: updates are missing or there twice")
        last, expected = key, line.get("updates", update)
    return lines


def end_of_step(folder: Path, log: dict, seconds: dict, files: dict[str, Lines], trained: bool) -> None:
    """Lines for a step without any update, and for its speed; word to the parent, and a warning if nothing is trained."""
    if not trained:
        files["metrics"].write({**log, "update": 0})
        updates = [line["update"] for line in read_lines(files["metrics"].path)]
        idle = len(updates) - max((i for i, update in enumerate(updates, 1) if update), default=0)
        if idle % IDLE_STEPS == 0:
            report(f"{folder.name}: nothing to train on in the last {idle} steps: the rewards of every group are all equal")
    files["timings"].write({"step": log["step"], **seconds})
    report(f"{folder.name} " + ", ".join(f"{k} {log[k]:.2f}" for k in ("reward", "entropy") if k in log), steps=1)


# ---------------------------------------------------------------- a folder
def lock(path: Path, waiting: str = ""):
    """Hold the lock file `path` for a `with` block. ValueError if it stays taken LOCK_S; with `waiting`, say so and wait."""
    held = filelock.FileLock(path)
    try:
        return held.acquire(timeout=0 if waiting else LOCK_S)
    except filelock.Timeout:
        if not waiting:
            raise ValueError(f"{path.parent}: another process is writing there; wait for it, or take another folder") from None
        (report if _messages else say)(waiting)
        return held.acquire()


def differences(saved: dict, now: dict, may_differ: set[str] = frozenset()) -> str:
    """ "name: old there, new now; ..." for all that differs; "" if nothing does."""
    names = sorted(name for name in (saved.keys() | now.keys()) - may_differ if saved.get(name) != now.get(name))
    return "; ".join(f"{name}: {saved.get(name)} there, {now.get(name)} now" for name in names)


def read_config(folder: Path) -> dict:
    """The config of the run in `folder`; {} if there is none."""
    path = folder / "config.json"
    return json.loads(path.read_text())["config"] if path.exists() else {}


def prepare_folder(folder: Path, config: dict, resume: bool) -> None:
    """Create a run's folder with its config, or check that the one there may be continued with this one: all must be equal but
    `steps` and `checkpoint_every`, as a run may be made longer. ValueError for a run that is there without `resume`, was made
    with other settings, is longer already, or is being written."""
    folder.mkdir(parents=True, exist_ok=True)
    with lock(folder / "lock"):
        saved, metrics, model = read_config(folder), folder / "metrics.jsonl", folder / "model"
        if newest_checkpoint(folder) or model.exists() or metrics.exists() and metrics.stat().st_size:
            if not resume:
                raise ValueError(f"{folder} holds a run already: add --resume to continue it, or choose another --output_dir")
            if changed := differences(saved, config, {"steps", "checkpoint_every"}):
                raise ValueError(f"{folder} was made with other options ({changed}): use the old ones, or another --output_dir")
            if (done := steps_done(folder)) > config["steps"]:
                raise ValueError(f"steps: {folder} has {done} already, more than {config['steps']}")
            if model.exists() and done < config["steps"]:
                if not (model / "state.pt").exists():
                    raise ValueError(f"steps: {model}/state.pt is gone, without which the run cannot be made longer")
                os.replace(model, folder / f"checkpoint-{done}")
                (folder / "final.json").unlink(missing_ok=True)  # of the shorter run
        versions = {"python": sys.version.split()[0], "torch": torch.__version__, "transformers": transformers.__version__}
        write_json(folder / "config.json", {"config": config, "versions": versions})


def check_same_setting(output: Path, config: dict, own: set[Path]) -> None:
    """ValueError if a run in `output` differs in more than what makes an arm, a start and a seed: all runs of a folder share
    one table and one picture. The `own` ones may in steps, too: they are being made longer."""
    for folder in (found := sorted(path.parent for path in output.glob("*/config.json"))):
        may_differ = ARM_FIELDS | {"checkpoint_every"} | ({"steps"} if folder in own else set())
        if changed := differences(read_config(folder), config, may_differ):
            raise ValueError(f"{folder} was made in another setting ({changed}): take another --output_dir")
    for path in [] if found else output.glob("start*.json"):
        path.unlink()  # what the start reached in the setting of runs that are gone


def steps_done(folder: Path) -> int:
    """Steps that need not be run again: up to the newest checkpoint, or all if the run is finished."""
    if (folder / "model").exists():
        return read_config(folder)["steps"]
    return int(checkpoint.name.partition("-")[2]) if (checkpoint := newest_checkpoint(folder)) else 0


def newest_checkpoint(folder: Path) -> Path | None:
    """The folder of the last whole checkpoint; None if there is none."""
    return max(folder.glob("checkpoint-*"), key=lambda path: int(path.name.partition("-")[2]), default=None)


def save_checkpoint(folder: Path, step: int, model, tokenizer, state: dict, files: dict[str, Lines]) -> None:
    """The policy, as a folder that transformers loads, and in it state.pt: `state`, the random states, the step (which is
    the data's cursor, too) and the files' sizes. The checkpoint before is removed when this one is whole."""
    cuda = [torch.cuda.get_rng_state(model.device)] if model.device.type == "cuda" else []
    sizes = {name: file.size() for name, file in files.items()}
    state = {**state, "step": step, "sizes": sizes, "rng": torch.get_rng_state(), "cuda_rng": cuda}

    def write(path: Path) -> None:
        model.save_pretrained(path)
        tokenizer.save_pretrained(path)
        torch.save(state, path / "state.pt")

    new = folder / f"checkpoint-{step}"
    write_atomically(new, write)
    for old in {*folder.glob("checkpoint-*"), *folder.glob(".checkpoint-*")} - {new}:
        shutil.rmtree(old)


def restore(checkpoint: Path, device: str) -> dict:
    """state.pt of a checkpoint; sets the random states."""
    state = torch.load(checkpoint / "state.pt", map_location="cpu", weights_only=True)  # load_state_dict moves what must be
    torch.set_rng_state(state["rng"])
    for of_device in state["cuda_rng"] if device != "cpu" else []:
        torch.cuda.set_rng_state(of_device, device)
    return state


def finish(folder: Path) -> None:
    """The last checkpoint becomes model/; what a kill has left half written or half removed goes. Again: only the latter."""
    if (newest := newest_checkpoint(folder)) and not (folder / "model").exists():
        os.replace(newest, folder / "model")
    for path in [*folder.glob("checkpoint-*"), *folder.glob(".*.unfinished"), folder / "error.txt"]:
        remove(path)


def stop_not_finite(folder: Path, step: int, update: int, numbers: dict, batch) -> None:
    """Save the batch and raise FloatingPointError."""
    path = folder / "nonfinite.pt"
    state = {"step": step, "update": update, "numbers": numbers, "batch": vars(batch.rollouts), "advantages": batch.advantages}
    write_atomically(path, lambda file: torch.save(state, file))
    wrong = f"loss {numbers['loss']}, gradient norm {numbers['grad_norm']}"
    raise FloatingPointError(f"{folder.name}: step {step}, update {update}: {wrong}; the batch and all metrics are in {path}")


# ---------------------------------------------------------------- what is printed
def say(text: str, file=None) -> None:
    """Print a line, above the bar if there is one. When nobody reads any more (`| head`), go on without."""
    try:
        tqdm.write(text, file=file or sys.stdout)
        (file or sys.stdout).flush()
    except (OSError, ValueError):  # so that the interpreter does not fail at its end, either
        setattr(sys, "stderr" if file is sys.stderr else "stdout", open(os.devnull, "w"))


class Progress(tqdm):
    """A bar on a terminal; elsewhere a plain line every half minute. Both with the time left for all. Of 0 steps: none."""

    def __init__(self, total: int, what: str, done: int = 0):
        self.last, self.shown = time.monotonic(), sys.stderr.isatty()
        hidden = None if self.shown else io.StringIO()
        super().__init__(desc=what, total=total, initial=done, file=hidden, dynamic_ncols=True, smoothing=0, disable=not total)

    def update(self, count: int, note: str = "") -> None:
        self.set_postfix_str(note, refresh=False)
        super().update(count)
        if not self.shown and time.monotonic() - self.last > LINE_S:
            say(str(self), sys.stderr)
            self.last = time.monotonic()


# ---------------------------------------------------------------- side by side
_messages = None  # of a worker: its way to the parent, the only process that prints


def report(note: str, steps: int = 0) -> None:
    """From a worker: `steps` more are done; a note without steps is a message of its own."""
    if _messages is not None:
        _messages.put((note, steps))


def _start_worker(messages) -> None:
    global _messages
    _messages = messages
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends its workers
    # A worker must not outlive a killed parent: a resumed command would then write to the same files.
    threading.Thread(target=lambda: (parent_process().join(), os._exit(1)), daemon=True).start()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


def run_side_by_side(work: dict[str, tuple], jobs: int, steps=0, what="steps", meanwhile: Callable = lambda: None) -> dict:
    """Every piece of work, name -> (folder, function, *arguments), in one of `jobs` processes, one thread each, so that a
    run's numbers do not depend on the others. `steps`: how many all of them will `report`. meanwhile(), which may fail, is
    called every MEANWHILE_S. Returns the failures, name -> exception, their tracebacks added to folder/error.txt; an exception
    in one run does not stop the rest (a process that dies, does). Ctrl-C ends all of them."""
    if not work:
        return {}
    context = get_context("spawn")
    messages, failures = context.Queue(), {}
    progress, last = Progress(steps, what), time.monotonic()
    with ProcessPoolExecutor(min(jobs, len(work)), context, _start_worker, (messages,)) as pool:
        pending = futures = {pool.submit(*of_name[1:]): name for name, of_name in work.items()}
        try:
            while pending:
                done, pending = wait(pending, 0.1, FIRST_COMPLETED)
                _show(messages, progress)
                if time.monotonic() - last > MEANWHILE_S:
                    try:
                        meanwhile()
                    except Exception as error:  # no metrics yet, a full disk: training goes on
                        say(f"no picture yet: {error}", sys.stderr)
                    last = time.monotonic()
                for future in done:
                    name = futures[future]
                    if error := future.exception():
                        failures[name], file = error, Path(work[name][0]) / "error.txt"
                        trace = "".join(traceback.format_exception(error))
                        try:
                            with open(file, "a") as opened:
                                opened.write(trace)
                        except OSError:  # the disk is full, perhaps
                            say(trace)
                        say(f"{name}: {type(error).__name__}: {error} (traceback: {file})")
                    else:
                        say(f"{name}: done")
        except KeyboardInterrupt:
            for worker in active_children():
                worker.terminate()
            raise
        finally:
            progress.close()
    _show(messages, progress)  # what came with the last of them
    return failures


def _show(messages, progress: Progress) -> None:
    while not messages.empty():  # this process alone reads
        note, steps = messages.get()
        progress.update(steps, note) if steps else say(note)


def command(name: str, main: Callable[[], int], interrupted: str = "Interrupted") -> None:
    """Run `main` as a script: its status, or one line for what the user can mend (an option, a folder, a full disk)."""
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace")  # a response may have what the terminal cannot show
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        say(f"\n{interrupted}", sys.stderr)
        sys.exit(130)
    except (ValueError, OSError) as error:
        sys.exit(f"{name}: {error}")
