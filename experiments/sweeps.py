"""The experiments behind results/: run what is missing, pack it, draw and analyse what is packed.

    python experiments/sweeps.py default rate scheme ranges --jobs 2
    python experiments/sweeps.py rescue --quick     # the machinery in minutes, no results
    python experiments/sweeps.py --draw             # train nothing: pictures, tables, differences

An experiment is one or several sweeps, NAME or NAME/SETTING: train.py with its own options, in
runs/NAME-SETTING, packed into results/NAME/SETTING. What is on disk is not run again, and what was
killed goes on. --quick works in runs/quick.
"""

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT))

import analysis
import hooks
import pages
import pictures

import countdown
import train
from support import plot, run_metrics
from support.data import Task
from support.files import read_lines
from support.options import Options, parse
from support.run_folder import prepare_folder
from support.workers import command

FRESH_STARTS = [1, 2, 3, 4, 5]
FIRST = [(start, 10) for start in FRESH_STARTS]
BOTH_SEEDS = FIRST + [(start, 11) for start in FRESH_STARTS]
# Every start with a seed of its own, so that runs share neither policy nor order of the prompts.
PAIRED = [(start, start + 20) for start in range(31, 39)]
SCREEN = [(6, 20), (7, 20)]  # the neighbours' screening
FINAL = [(start, 21) for start in range(8, 13)]  # and their final runs


@dataclass(frozen=True)
class Sweep:
    """Arms, options that are not train.py's defaults, and pairs of warm start and seed."""

    methods: list[str]
    options: dict = field(default_factory=dict)
    pairs: list[tuple[int, int]] = field(default_factory=lambda: FIRST)
    # Packed columns beside the usual ones -> significant digits.
    extra_columns: dict[str, int] = field(default_factory=dict)
    carry_out: Callable = train.carry_out  # makes one run


CLIPPED = {"clip_fraction_high": 3, "clip_fraction_low": 3}
BALANCE = {"positive_tokens": 3, "rho_start": 3}
RULE = {"positive_tokens": 3, "entropy_rule": 4, "entropy_now": 6}

# The harder case, written out in full: train.py's defaults are another one.
HARD = {"attempts": 4, "max_new_tokens": 53, "learning_rate": 4e-4, "steps": 60}
LONG = {"attempts": 2, "max_new_tokens": 28, "learning_rate": 4e-4, "steps": 240}
# With arms @2x4 this is the authors' scheme.
SCHEME = {"prompts_per_step": 64, "learning_rate": 4e-4, "steps": 100}

MAIN_FIVE = ["grpo@1", "grpo@8", "bapo@8", "bapo-gate@8", "bapo-main@8"]
HARD_FIVE = ["grpo@1", "grpo@8", "bapo-gate@8", "1.02-3.0@8", "balanced@8"]
RESCUE = [
    "grpo+share1@8",
    "0.8-3.0+share1@8",
    "0.8-3.0+share0.45@8",
    "grpo+share0.40@8",
    "grpo+share0.50@8",
    "grpo+sequence-mean@8",
    "bapo+high3@8",
    "bapo-octothinker@8",
    "bapo-gate+at-one@8",
    "bapo-gate@1",
    "bapo-gate+at-one@1",
]
# The neighbours with their authors' weights and advantages. Without partial rollouts ppo,
# decoupled-ppo, a-3po and off-policy-grpo are GRPO.
NEIGHBOURS = [
    "grpo@1",
    "reinforce@8",
    "clip-higher@8",
    "dual-clip@8",
    "truncated-is@8",
    "cispo@8",
    "topr@8",
    "rec-oneside+no-std@8",
    "asymre+no-std@8",
    "opmd+no-std@8",
    "dppo-tv@8",
    "sapo@8",
    "gspo+sequence-mean@8",
    "m2po@8",
    "dcpo@8",
    "ce-gppo@8",
    "smoothing@8",
    "erc@8",
    "grpo@8",
    "bapo-gate@8",
    "balanced@8",
    "grpo+sequence-mean@8",
]


def range_methods() -> list[str]:
    """The arms of `ranges`: nine ranges but for the default one, which is bapo@8."""
    places = []
    for low in analysis.RANGE_LOWS:
        for high in analysis.RANGE_HIGHS:
            places.append(analysis.range_place(low, high))
    return [place.removeprefix("ranges ") for place in places if place.startswith("ranges ")]


SWEEPS = {
    "default": Sweep(
        methods=[*MAIN_FIVE, "bapo-octothinker@8"],
        pairs=PAIRED,
        extra_columns={**CLIPPED, **BALANCE},
    ),
    "default/controls": Sweep(
        methods=["clip-higher@8", "0.9-2.0@8", "1.02-3.0@8"],
        pairs=PAIRED[:5],
    ),
    "rate/0.0003": Sweep(
        methods=MAIN_FIVE,
        options={"learning_rate": 3e-4},
        pairs=PAIRED[:5],
    ),
    "scheme": Sweep(
        methods=[
            "grpo@1",
            "grpo@2x4",
            "bapo-main@2x4",
            "0.6-1.2@2x4",
            "0.9-3.0@2x4",
            "bapo@2x4",
            "bapo-gate@2x4",
        ],
        options=SCHEME,
        pairs=PAIRED[:5],
        extra_columns={"rho_start": 3},
    ),
    "scheme/yoked": Sweep(
        methods=["bapo-main@2x4"],
        options=SCHEME,
        pairs=PAIRED[:5],
        carry_out=partial(hooks.yoked, source="scheme"),
    ),
    "ranges": Sweep(methods=range_methods(), pairs=PAIRED[:3]),
    "fixed": Sweep(
        methods=["0.8-1.5@8", "0.5-1.2@8"],
        pairs=PAIRED[:3],
        extra_columns=CLIPPED,
    ),
    "rate/0.0004": Sweep(methods=["grpo@1", "grpo@8", "bapo-octothinker@8"], options=LONG),
    "rate/0.0001": Sweep(
        methods=MAIN_FIVE,
        options={"learning_rate": 1e-4},
        pairs=PAIRED[:5],
    ),
    "four-attempts": Sweep(
        methods=["grpo@1", "grpo@8", "bapo-main@8", "bapo-gate@8", "1.02-3.0@8", "balanced@8"],
        options=HARD,
        pairs=BOTH_SEEDS,
        extra_columns={**CLIPPED, **RULE},
    ),
    "rescue": Sweep(methods=RESCUE, options=HARD),
    "rescue/lr-0.00028": Sweep(methods=["grpo@8"], options={**HARD, "learning_rate": 2.8e-4}),
    "rescue/attempts-1": Sweep(
        methods=["grpo+share0.30@8", "grpo+share0.35@8", "grpo+share0.40@8"],
        options={**HARD, "attempts": 1, "max_new_tokens": 16},
    ),
    "rescue/yoked": Sweep(
        methods=["bapo-gate@8"],
        options=HARD,
        carry_out=partial(hooks.yoked, source="four-attempts"),
    ),
    "map-reuse": Sweep(
        methods=["grpo@2", "grpo@4", "grpo@16", "bapo-gate@2", "bapo-gate@4", "bapo-gate@16"],
        options=HARD,
        extra_columns=CLIPPED,
    ),
    "map-reuse/fresh": Sweep(
        methods=["grpo@1x8", "bapo-gate@1x8"],
        options={**HARD, "prompts_per_step": 128},
    ),
    "fig9-long": Sweep(methods=["grpo@8", "bapo-gate@8", "bapo+high3@8"], options=LONG),
    "figures/fixed": Sweep(
        methods=["grpo@8", "0.8-1.5@8", "0.5-1.2@8"],
        options={**HARD, "learning_rate": 1e-4},
        pairs=FIRST[:3],
        extra_columns=CLIPPED,
    ),
    "figures/tokens": Sweep(
        methods=["0-1000@8"],
        options={**HARD, "learning_rate": 2e-4, "steps": 40},
        pairs=FIRST[:3],
        carry_out=hooks.keep_tokens,
    ),
}
for rho0 in (0.35, 0.4, 0.5, 0.55):
    SWEEPS[f"rescue/rho0-{rho0}"] = Sweep(
        methods=["bapo@8"],
        options={**HARD, "rho0": rho0, "low": "0.8 1.1 0.06", "high": "1.2 3.0"},
    )
for attempts, max_new_tokens in ((1, 16), (2, 28), (6, 80)):
    SWEEPS[f"map-attempts/{attempts}"] = Sweep(
        methods=[*HARD_FIVE, "bapo-main@8"],
        options={**HARD, "attempts": attempts, "max_new_tokens": max_new_tokens},
    )
for rate in (5e-5, 1e-4, 2e-4):
    SWEEPS[f"map-lr/{rate}"] = Sweep(methods=HARD_FIVE, options={**HARD, "learning_rate": rate})
for budget in (14, 28):
    SWEEPS[f"figures/budget-{budget}"] = Sweep(
        methods=["grpo@4", "bapo-gate@4"],
        options={**HARD, "partial_budget": budget},
        pairs=FIRST[:3],
    )
for rate in analysis.SCREENED:
    SWEEPS[f"objectives-screen/{rate}"] = Sweep(
        methods=NEIGHBOURS,
        options={**HARD, "learning_rate": rate},
        pairs=SCREEN,
    )
# Each neighbour once more at its best rate; what changes GRPO, at GRPO's.
BEST_RATES = analysis.best_rates(ROOT / "results")
for rate in sorted(set(BEST_RATES.values())):
    SWEEPS[f"objectives/{rate}"] = Sweep(
        methods=[arm for arm in BEST_RATES if BEST_RATES[arm] == rate],
        options={**HARD, "learning_rate": rate},
        pairs=FINAL,
    )
if BEST_RATES:
    GRPO_AT_ITS_BEST = {**HARD, "learning_rate": BEST_RATES["grpo@8"]}
    SWEEPS["objectives/partial"] = Sweep(
        methods=["grpo@8", "decoupled-ppo@8", "a-3po@8", "off-policy-grpo@8"],
        options={**GRPO_AT_ITS_BEST, "partial_budget": 14},
        pairs=FINAL,
    )
    SWEEPS["objectives/sfpo"] = Sweep(
        methods=["grpo@8"],
        options=GRPO_AT_ITS_BEST,
        pairs=FINAL,
        carry_out=hooks.slow_fast,
    )
EXPERIMENTS = list(dict.fromkeys(name.partition("/")[0] for name in SWEEPS))


# ---------------------------------------------------------------- runs
def folder_of(name: str, quick: bool = False) -> str:
    """Where a sweep's runs are."""
    folder = "runs/quick" if quick else "runs"
    return f"{folder}/{name.replace('/', '-')}"


def arguments(name: str, quick: bool = False) -> list[list[str]]:
    """The command lines of train.py that make a sweep (but for its hook), one per seed."""
    sweep = SWEEPS[name]
    options = dict(sweep.options)
    pairs = sweep.pairs
    if quick:
        options["steps"] = 2
        options["warm_start_steps"] = 1500
        pairs = pairs[:1]
    seeds = list(dict.fromkeys(seed for _, seed in pairs))
    lines = []
    for seed in seeds:
        line = ["--output_dir", folder_of(name, quick), "--methods", *sweep.methods]
        line.append("--warm_starts")
        line += [str(start) for start, seed_of_start in pairs if seed_of_start == seed]
        line += ["--seeds", str(seed)]
        for option, value in options.items():
            line += [f"--{option}", *str(value).split()]
        lines.append(line)
    return lines


def make(name: str, jobs: int, quick: bool) -> bool:
    """Carry out all runs of a sweep that are missing, side by side; whether none failed."""
    train_problems, held_out = countdown.problems()
    if quick:
        held_out = held_out[:64]
    task = Task(train_problems, held_out, countdown.grade)
    runs = []
    for line in arguments(name, quick):
        options = Options(**parse(Options, line, __doc__))
        runs += train.make_runs(options, task)
    for run in runs:
        prepare_folder(run.folder, run.config, resume=True)
    missing = [run for run in runs if not (run.folder / "model").exists()]
    # The starts of all seeds: `options` are those of the last seed.
    options.warm_starts = list(dict.fromkeys(run.config["warm_start"] for run in runs))
    output = Path(options.output_dir)
    failures = train.work_on(missing, task, options, output, jobs, SWEEPS[name].carry_out)
    return not failures


def pack(name: str, target: Path, quick: bool) -> None:
    """Pack a sweep with its table, and its single tokens if it kept any."""
    source = Path(folder_of(name, quick))
    run_metrics.pack(source, target / name, SWEEPS[name].extra_columns)
    tokens = []
    for path in sorted(source.glob("*/tokens.jsonl")):
        # A run that went on from a checkpoint wrote some steps twice: the second ones count.
        last = {line["step"]: line for line in read_lines(path)}
        tokens += [json.dumps(line) + "\n" for line in last.values()]
    if tokens:
        (target / name / "tokens.jsonl").write_text("".join(tokens))


# ---------------------------------------------------------------- pictures and tables
def draw(target: Path, note: str) -> None:
    """Draw and analyse all that is packed below `target`.

    Every table.md and differences.md, default/tests.md, the tables on the pages, and the pictures
    whose runs are packed; of the others it prints what they wait for.
    """
    settings = analysis.Settings(target)
    for folder, arms in settings.arms.items():
        table = run_metrics.table(arms, settings.starts[folder])
        write_page(target / folder / "table.md", table)
    for experiment in EXPERIMENTS:
        if settings.places(experiment):
            page = analysis.document(settings, experiment)
            (target / experiment / "differences.md").write_text(page)
    if "default" in settings.arms:
        (target / "default/tests.md").write_text(analysis.tests_document(settings))
    if "four-attempts" in settings.arms:
        plot.report(target / "four-attempts", note)
    for path, picture in pictures.PICTURES.items():
        try:
            figure = picture(settings)
        except FileNotFoundError as error:
            print(f"{path}: {error}")
            continue
        (target / path).parent.mkdir(parents=True, exist_ok=True)
        plot.save(figure, target / path, note)
    for page in (target.parent / "README.md", target / "README.md", target / "objectives.md"):
        pages.fill_in(page, settings)


def write_page(path: Path, lines: list[str]) -> None:
    """Write lines of text."""
    path.write_text("\n".join(lines) + "\n")


# ---------------------------------------------------------------- the command line
def main(words: list[str] | None = None) -> int:
    """The command line. Returns the exit status: 0, or 1 if a run failed."""
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    parser.add_argument("experiments", nargs="*", help=", ".join(EXPERIMENTS))
    parser.add_argument("--jobs", type=int, default=2, help="runs side by side")
    parser.add_argument("--quick", action="store_true", help="a short warm start, two steps a run")
    parser.add_argument("--draw", action="store_true", help="train nothing")
    options = parser.parse_args(words)
    check_experiments(options.experiments)
    target = Path("runs/quick/results" if options.quick else "results")
    all_made = True
    if not options.draw:
        for name in chosen_sweeps(options.experiments):
            made = make(name, options.jobs, options.quick)
            if made:
                pack(name, target, options.quick)
            all_made = all_made and made
    draw(target, "not a result: --quick" if options.quick else "")
    print(f"pictures and differences.md are in {target}")
    return 0 if all_made else 1


def check_experiments(experiments: list[str]) -> None:
    """Raise ValueError for an experiment that does not exist, or cannot be made yet."""
    if "objectives" in experiments and not BEST_RATES:
        raise ValueError(
            "objectives takes its learning rates from results/objectives-screen: "
            "make objectives-screen first"
        )
    unknown = sorted(set(experiments) - set(EXPERIMENTS))
    if unknown:
        known = ", ".join(EXPERIMENTS)
        raise ValueError(f"experiments: {', '.join(unknown)} is none of {known}")


def chosen_sweeps(experiments: list[str]) -> list[str]:
    """The sweeps of these experiments, in the order in which they can be made."""
    chosen = set(experiments)
    if "rescue" in chosen:
        chosen.add("four-attempts")  # rescue/yoked takes its bounds
    names = [name for name in SWEEPS if name.partition("/")[0] in chosen]
    # A sweep that takes another's bounds comes after it.
    return sorted(names, key=lambda name: name.endswith("/yoked"))


if __name__ == "__main__":
    command("sweeps.py", main, "Interrupted: the same command goes on")
