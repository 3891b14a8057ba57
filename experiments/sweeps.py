"""The experiments behind results/: run what is missing, pack it, and draw and analyse what is packed.

    python experiments/sweeps.py default rescue map-attempts map-lr map-reuse fig9-long figures --jobs 2
    python experiments/sweeps.py rescue --quick     # the machinery in minutes, in runs/quick: its pictures are no results
    python experiments/sweeps.py --draw             # train nothing: pictures and differences.md of all that results/ holds

An experiment is one or several sweeps, NAME or NAME/SETTING: train.py with its own options, in runs/NAME-SETTING, packed into
results/NAME/SETTING. What is on disk is not run again, and what was killed goes on.
"""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

sys.path.append(str(Path(__file__).parent.parent))

import analysis
import figures
import hooks

import countdown
import plot
import runs
import train


class Sweep(NamedTuple):
    """Arms, options that are not train.py's defaults, warm starts, seeds."""

    methods: str
    options: dict = {}
    warm_starts: range = range(1, 6)
    seeds: range = range(10, 11)
    more: dict[str, int] = {}  # packed columns beside the usual ones -> significant digits
    carry_out: Callable = train.carry_out  # makes a run


SCREEN, FINAL = (range(6, 8), range(20, 21)), (range(8, 13), range(21, 22))  # the neighbours' starts and seeds: all fresh
THREE, CLIPPED = range(1, 4), {"clip_fraction_high": 3, "clip_fraction_low": 3}
RULE = {"positive_tokens": 3, "entropy_rule": 4, "entropy_now": 6}
FIVE, SIX = " ".join(figures.FIVE), " ".join([*figures.FIVE, "bapo-main@8"])
RESCUE = "grpo+share1@8 0.8-3.0+share1@8 0.8-3.0+share0.45@8 grpo+share0.40@8 grpo+share0.50@8 grpo+sequence-mean@8 "
RESCUE += "bapo@8 bapo-octothinker@8 bapo-gate+at-one@8 bapo-gate@1 bapo-gate+at-one@1"
# The neighbours with their authors' weights and advantages. Without partial rollouts ppo, decoupled-ppo, a-3po and
# off-policy-grpo are GRPO.
NEIGHBOURS = "reinforce clip-higher dual-clip truncated-is cispo topr rec-oneside+no-std asymre+no-std opmd+no-std dppo-tv "
NEIGHBOURS += "sapo gspo+sequence-mean m2po dcpo ce-gppo smoothing erc grpo bapo-gate balanced grpo+sequence-mean"
NEIGHBOURS = "grpo@1 " + " ".join(f"{name}@8" for name in NEIGHBOURS.split())
BEST = analysis.best_rates(Path(__file__).parent.parent / "results")
SWEEPS = {
    "default": Sweep("grpo@1 grpo@8 bapo-main@8 bapo-gate@8 1.02-3.0@8 balanced@8", seeds=range(10, 12), more=CLIPPED | RULE),
    "rescue": Sweep(RESCUE),
    **{f"rescue/rho0-{rho0}": Sweep("bapo@8", {"rho0": rho0, "low": "0.8 1.1 0.06"}) for rho0 in (0.35, 0.4, 0.5, 0.55)},
    "rescue/lr-0.00028": Sweep("grpo@8", {"learning_rate": 2.8e-4}),
    "rescue/attempts-1": Sweep("grpo+share0.30@8 grpo+share0.35@8 grpo+share0.40@8", {"attempts": 1, "max_new_tokens": 16}),
    "rescue/yoked": Sweep("bapo-gate@8", carry_out=hooks.yoked),
    **{f"map-attempts/{n}": Sweep(SIX, {"attempts": n, "max_new_tokens": most}) for n, most in ((1, 16), (2, 28), (6, 80))},
    **{f"map-lr/{rate}": Sweep(FIVE, {"learning_rate": rate}) for rate in (5e-5, 1e-4, 2e-4)},
    "map-reuse": Sweep("grpo@2 grpo@4 grpo@16 bapo-gate@2 bapo-gate@4 bapo-gate@16", more=CLIPPED),
    "map-reuse/fresh": Sweep("grpo+fresh@8 bapo-gate+fresh@8", {"prompts_per_step": 128}),
    "fig9-long": Sweep("grpo@8 bapo-gate@8 bapo@8", {"attempts": 2, "max_new_tokens": 28, "steps": 240}),
    "figures/fixed": Sweep("grpo@8 0.8-1.5@8 0.5-1.2@8", {"learning_rate": 1e-4}, THREE, more=CLIPPED),
    "figures/tokens": Sweep("0-1000@8", {"learning_rate": 2e-4, "steps": 40}, THREE, carry_out=hooks.keep_tokens),
    **{f"figures/budget-{n}": Sweep("grpo@4 bapo-gate@4", {"partial_budget": n}, THREE) for n in figures.BUDGETS},
    **{f"objectives-screen/{rate}": Sweep(NEIGHBOURS, {"learning_rate": rate}, *SCREEN) for rate in analysis.SCREENED},
}
for rate in sorted(set(BEST.values())):
    SWEEPS[f"objectives/{rate}"] = Sweep(" ".join(arm for arm in BEST if BEST[arm] == rate), {"learning_rate": rate}, *FINAL)
if BEST:  # what changes GRPO, at its rate
    AT_ITS_BEST, PARTIAL = {"learning_rate": BEST["grpo@8"]}, "grpo@8 decoupled-ppo@8 a-3po@8 off-policy-grpo@8"
    SWEEPS["objectives/partial"] = Sweep(PARTIAL, {"partial_budget": 14} | AT_ITS_BEST, *FINAL)
    SWEEPS["objectives/sfpo"] = Sweep("grpo@8", AT_ITS_BEST, *FINAL, carry_out=hooks.slow_fast)
EXPERIMENTS = list(dict.fromkeys(name.partition("/")[0] for name in SWEEPS))


def arguments(name: str, quick: bool = False) -> list[str]:
    """The command line of train.py that makes a sweep (but for what hooks.py adds)."""
    methods, options, starts, seeds, *_ = SWEEPS[name]
    if quick:
        options, starts, seeds = options | {"steps": 2, "warm_start_steps": 1500}, starts[:1], seeds[:1]
    lists = {"methods": methods, "warm_starts": " ".join(map(str, starts)), "seeds": " ".join(map(str, seeds))}
    options = {"output_dir": f"runs/{'quick/' * quick}{name.replace('/', '-')}"} | lists | options
    return [word for option, value in options.items() for word in (f"--{option}", *str(value).split())]


def make(name: str, jobs: int, quick: bool) -> bool:
    """Carry out all runs of a sweep that are missing, side by side; whether none failed."""
    options = train.Options(**runs.parse(train.Options, arguments(name, quick), __doc__))
    rows, held_out = countdown.problems()
    task = train.Task(rows, held_out[: 64 if quick else None], countdown.grade)
    found = train.make_runs(options, task)
    for run in found:
        runs.prepare_folder(run.folder, run.config, resume=True)
    missing = [run for run in found if not (run.folder / "model").exists()]
    return not train.work_on(missing, task, options, Path(options.output_dir), jobs, SWEEPS[name].carry_out)


def pack(name: str, target: Path, quick: bool) -> None:
    """Pack a sweep with its table, and its single tokens if it kept any: of steps that were run twice, the second ones."""
    source, target, tokens = Path(arguments(name, quick)[1]), target / name, []
    plot.pack(source, target, SWEEPS[name].more)
    (target / "table.md").write_text("\n".join(plot.table(*plot.load(target))) + "\n")
    for path in sorted(source.glob("*/tokens.jsonl")):
        tokens += {line["step"]: json.dumps(line) + "\n" for line in runs.read_lines(path)}.values()
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
    if (target / "default" / "runs.json").exists():
        plot.report(target / "default", note)
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
    chosen = options.experiments + ["default"] * ("rescue" in options.experiments)  # whose bounds it takes
    names = [name for name in SWEEPS if name.partition("/")[0] in chosen and not options.draw]
    for name in names:
        if made := make(name, options.jobs, options.quick):
            pack(name, target, options.quick)
        whole &= made
    draw(target, "not a result: --quick" if options.quick else "")
    print(f"pictures and differences.md are in {target}")
    return 0 if whole else 1


if __name__ == "__main__":
    runs.command("sweeps.py", main, "Interrupted: the same command goes on")
