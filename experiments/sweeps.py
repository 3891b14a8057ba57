"""The experiments behind results/: run what is missing, pack it, and draw and analyse what is packed.

    python experiments/sweeps.py default rate scheme ranges --jobs 2
    python experiments/sweeps.py rescue --quick     # the machinery in minutes, in runs/quick: its pictures are no results
    python experiments/sweeps.py --draw             # train nothing: pictures and differences.md of all that results/ holds

An experiment is one or several sweeps, NAME or NAME/SETTING: train.py with its own options, in runs/NAME-SETTING, packed into
results/NAME/SETTING. What is on disk is not run again, and what was killed goes on.
"""

import argparse
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

sys.path.append(str(Path(__file__).parent.parent))

import analysis
import figures
import hooks

import countdown
import support.files
import support.options
import support.run_folder
import support.workers
import train
from support import plot


class Sweep(NamedTuple):
    """Arms, options that are not train.py's defaults, and pairs of warm start and seed."""

    methods: str
    options: dict = {}
    pairs: list[tuple[int, int]] = [(start, 10) for start in range(1, 6)]
    more: dict[str, int] = {}  # packed columns beside the usual ones -> significant digits
    carry_out: Callable = train.carry_out  # makes a run


# Every start has a seed of its own, so that runs share neither the policy nor the order of the prompts.
PAIRED = [(start, start + 20) for start in range(31, 39)]
FIRST = [(start, 10) for start in range(1, 6)]
SCREEN, FINAL = [(6, 20), (7, 20)], [(start, 21) for start in range(8, 13)]  # the neighbours'
CLIPPED = {"clip_fraction_high": 3, "clip_fraction_low": 3}
RULE = {"positive_tokens": 3, "entropy_rule": 4, "entropy_now": 6}
# The harder case, written out in full: train.py's defaults are another one.
HARD = {"attempts": 4, "max_new_tokens": 53, "learning_rate": 4e-4, "steps": 60}
LONG = {"attempts": 2, "max_new_tokens": 28, "learning_rate": 4e-4, "steps": 240}
SCHEME = {"prompts_per_step": 64, "learning_rate": 4e-4, "steps": 100}  # with @2x4 the authors' scheme
FIVE, SIX = " ".join(figures.FIVE), " ".join([*figures.FIVE, "bapo-main@8"])
MAIN_FIVE = "grpo@1 grpo@8 bapo@8 bapo-gate@8 bapo-main@8"
RESCUE = "grpo+share1@8 0.8-3.0+share1@8 0.8-3.0+share0.45@8 grpo+share0.40@8 grpo+share0.50@8 grpo+sequence-mean@8 "
RESCUE += "bapo+high3@8 bapo-octothinker@8 bapo-gate+at-one@8 bapo-gate@1 bapo-gate+at-one@1"
RANGES = [f"bapo+low{low}+high{high}@8" for low in ("0.9", "0.98", "1.04") for high in ("1.2", "2.0", "3.0")]
RANGES.remove("bapo+low0.9+high2.0@8")  # that is bapo@8
# The neighbours with their authors' weights and advantages. Without partial rollouts ppo, decoupled-ppo, a-3po and
# off-policy-grpo are GRPO.
NEIGHBOURS = "reinforce clip-higher dual-clip truncated-is cispo topr rec-oneside+no-std asymre+no-std opmd+no-std dppo-tv "
NEIGHBOURS += "sapo gspo+sequence-mean m2po dcpo ce-gppo smoothing erc grpo bapo-gate balanced grpo+sequence-mean"
NEIGHBOURS = "grpo@1 " + " ".join(f"{name}@8" for name in NEIGHBOURS.split())
BEST = analysis.best_rates(Path(__file__).parent.parent / "results")
SWEEPS = {
    "default": Sweep(f"{MAIN_FIVE} bapo-octothinker@8", {}, PAIRED, CLIPPED | {"positive_tokens": 3, "rho_start": 3}),
    "default/controls": Sweep("clip-higher@8 0.9-2.0@8 1.02-3.0@8", {}, PAIRED[:5]),
    "rate/0.0003": Sweep(MAIN_FIVE, {"learning_rate": 3e-4}, PAIRED[:5]),
    "scheme": Sweep(
        "grpo@1 grpo@2x4 bapo-main@2x4 0.6-1.2@2x4 0.9-3.0@2x4 bapo@2x4 bapo-gate@2x4", SCHEME, PAIRED[:5], {"rho_start": 3}
    ),
    "scheme/yoked": Sweep("bapo-main@2x4", SCHEME, PAIRED[:5], carry_out=partial(hooks.yoked, source="scheme")),
    "ranges": Sweep(" ".join(RANGES), {}, PAIRED[:3]),
    "fixed": Sweep("0.8-1.5@8 0.5-1.2@8", {}, PAIRED[:3], CLIPPED),
    "rate/0.0004": Sweep("grpo@1 bapo-octothinker@8", LONG, FIRST),
    "rate/0.0001": Sweep(MAIN_FIVE, {"learning_rate": 1e-4}, PAIRED[:5]),
    "four-attempts": Sweep(
        "grpo@1 grpo@8 bapo-main@8 bapo-gate@8 1.02-3.0@8 balanced@8",
        HARD,
        FIRST + [(s, 11) for s in range(1, 6)],
        CLIPPED | RULE,
    ),
    "rescue": Sweep(RESCUE, HARD),
    **{
        f"rescue/rho0-{rho0}": Sweep("bapo@8", HARD | {"rho0": rho0, "low": "0.8 1.1 0.06", "high": "1.2 3.0"})
        for rho0 in (0.35, 0.4, 0.5, 0.55)
    },
    "rescue/lr-0.00028": Sweep("grpo@8", HARD | {"learning_rate": 2.8e-4}),
    "rescue/attempts-1": Sweep(
        "grpo+share0.30@8 grpo+share0.35@8 grpo+share0.40@8", HARD | {"attempts": 1, "max_new_tokens": 16}
    ),
    "rescue/yoked": Sweep("bapo-gate@8", HARD, carry_out=partial(hooks.yoked, source="four-attempts")),
    **{
        f"map-attempts/{n}": Sweep(SIX, HARD | {"attempts": n, "max_new_tokens": most})
        for n, most in ((1, 16), (2, 28), (6, 80))
    },
    **{f"map-lr/{rate}": Sweep(FIVE, HARD | {"learning_rate": rate}) for rate in (5e-5, 1e-4, 2e-4)},
    "map-reuse": Sweep("grpo@2 grpo@4 grpo@16 bapo-gate@2 bapo-gate@4 bapo-gate@16", HARD, more=CLIPPED),
    "map-reuse/fresh": Sweep("grpo@1x8 bapo-gate@1x8", HARD | {"prompts_per_step": 128}),
    "fig9-long": Sweep("grpo@8 bapo-gate@8 bapo+high3@8", LONG),
    "figures/fixed": Sweep("grpo@8 0.8-1.5@8 0.5-1.2@8", HARD | {"learning_rate": 1e-4}, FIRST[:3], CLIPPED),
    "figures/tokens": Sweep("0-1000@8", HARD | {"learning_rate": 2e-4, "steps": 40}, FIRST[:3], carry_out=hooks.keep_tokens),
    **{f"figures/budget-{n}": Sweep("grpo@4 bapo-gate@4", HARD | {"partial_budget": n}, FIRST[:3]) for n in figures.BUDGETS},
    **{f"objectives-screen/{rate}": Sweep(NEIGHBOURS, HARD | {"learning_rate": rate}, SCREEN) for rate in analysis.SCREENED},
}
for rate in sorted(set(BEST.values())):
    SWEEPS[f"objectives/{rate}"] = Sweep(
        " ".join(arm for arm in BEST if BEST[arm] == rate), HARD | {"learning_rate": rate}, FINAL
    )
if BEST:  # what changes GRPO, at its rate
    AT_ITS_BEST, PARTIAL = HARD | {"learning_rate": BEST["grpo@8"]}, "grpo@8 decoupled-ppo@8 a-3po@8 off-policy-grpo@8"
    SWEEPS["objectives/partial"] = Sweep(PARTIAL, {"partial_budget": 14} | AT_ITS_BEST, FINAL)
    SWEEPS["objectives/sfpo"] = Sweep("grpo@8", AT_ITS_BEST, FINAL, carry_out=hooks.slow_fast)
EXPERIMENTS = list(dict.fromkeys(name.partition("/")[0] for name in SWEEPS))


def folder_of(name: str, quick: bool = False) -> str:
    """Where a sweep's runs are."""
    return f"runs/{'quick/' * quick}{name.replace('/', '-')}"


def arguments(name: str, quick: bool = False) -> list[list[str]]:
    """The command lines of train.py that make a sweep (but for what hooks.py adds), one per seed."""
    methods, options, pairs, *_ = SWEEPS[name]
    if quick:
        options, pairs = options | {"steps": 2, "warm_start_steps": 1500}, pairs[:1]
    lines = []
    for seed in dict.fromkeys(seed for _, seed in pairs):
        starts = " ".join(str(start) for start, of_start in pairs if of_start == seed)
        words = {"output_dir": folder_of(name, quick), "methods": methods, "warm_starts": starts, "seeds": seed} | options
        lines.append([word for option, value in words.items() for word in (f"--{option}", *str(value).split())])
    return lines


def make(name: str, jobs: int, quick: bool) -> bool:
    """Carry out all runs of a sweep that are missing, side by side; whether none failed."""
    rows, held_out = countdown.problems()
    task, found = train.Task(rows, held_out[: 64 if quick else None], countdown.grade), []
    for line in arguments(name, quick):
        options = train.Options(**support.options.parse(train.Options, line, __doc__))
        found += train.make_runs(options, task)
    for run in found:
        support.run_folder.prepare_folder(run.folder, run.config, resume=True)
    missing = [run for run in found if not (run.folder / "model").exists()]
    options.warm_starts = list(dict.fromkeys(run.config["warm_start"] for run in found))  # of all seeds
    return not train.work_on(missing, task, options, Path(options.output_dir), jobs, SWEEPS[name].carry_out)


def pack(name: str, target: Path, quick: bool) -> None:
    """Pack a sweep with its table, and its single tokens if it kept any: of steps that were run twice, the second ones."""
    source, target, tokens = Path(folder_of(name, quick)), target / name, []
    plot.pack(source, target, SWEEPS[name].more)
    (target / "table.md").write_text("\n".join(plot.table(*plot.load(target))) + "\n")
    for path in sorted(source.glob("*/tokens.jsonl")):
        tokens += {line["step"]: json.dumps(line) + "\n" for line in support.files.read_lines(path)}.values()
    if tokens:
        (target / "tokens.jsonl").write_text("".join(tokens))


def draw(target: Path, note: str) -> None:
    """differences.md, and every picture for which all is packed; of the others it prints what they wait for."""
    settings = analysis.Settings(target)
    (target / "figures").mkdir(parents=True, exist_ok=True)
    for name, picture in figures.PICTURES.items():
        try:
            plot.save(picture(settings), target / "figures" / f"{name}.png", note)
        except FileNotFoundError as error:
            print(f"{name}: {error}")
    for name in ("default", "four-attempts"):
        if (target / name / "runs.json").exists():
            plot.report(target / name, note)
    for experiment in filter(settings.places, EXPERIMENTS):
        (target / experiment / "differences.md").write_text(analysis.document(settings, experiment))


def main(words: list[str] | None = None) -> int:
    """The command line. Returns the exit status: 0, or 1 if a run failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("experiments", nargs="*", help=", ".join(EXPERIMENTS))
    parser.add_argument("--jobs", type=int, default=2, help="runs side by side")
    parser.add_argument("--quick", action="store_true", help="a short warm start, two steps a run, into runs/quick")
    parser.add_argument("--draw", action="store_true", help="train nothing")
    options = parser.parse_args(words)
    if "objectives" in options.experiments and not BEST:
        raise ValueError("objectives takes its learning rates from results/objectives-screen: make objectives-screen first")
    if unknown := set(options.experiments) - set(EXPERIMENTS):
        raise ValueError(f"experiments: {', '.join(sorted(unknown))} is none of {', '.join(EXPERIMENTS)}")
    target, whole = Path("runs/quick/results" if options.quick else "results"), True
    chosen = options.experiments + ["four-attempts"] * ("rescue" in options.experiments)  # whose bounds it takes
    names = [name for name in SWEEPS if name.partition("/")[0] in chosen and not options.draw]
    for name in names:
        if made := make(name, options.jobs, options.quick):
            pack(name, target, options.quick)
        whole &= made
    draw(target, "not a result: --quick" if options.quick else "")
    print(f"pictures and differences.md are in {target}")
    return 0 if whole else 1


if __name__ == "__main__":
    support.workers.command("sweeps.py", main, "Interrupted: the same command goes on")
