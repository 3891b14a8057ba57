"""One stale update of BAPO, drawn: which tokens the bounds drop, and how the search finds them.

    python experiments/anatomy.py                     # makes a Countdown warm start (two minutes)
    python experiments/anatomy.py --warm_start runs/warm-starts/attempts2-steps6000-seed31

GRPO trains until an update comes at which the search has something to do: the positive share is
below its target, and the bounds that reach it lie inside the range. That update is drawn, into
results/figures/anatomy.png, before it is made.
"""

import argparse
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT))

from drawing import NEGATIVE, POSITIVE, plt, subplots

import countdown
import train
from bapo import (
    ClipBounds,
    ClipSearch,
    clip_bounds,
    contribution_masses,
    importance_ratio,
    token_weights,
)
from support import plot
from support.arms import parse_arm
from support.data import Task
from support.options import Options
from support.run_folder import Run, prepare_folder
from support.warm_starts import warm_start
from support.workers import command

STEPS = 40  # of GRPO, at most
WARM_START = 31  # one of the default experiment's
REGAINED = "#e69f00"  # no gradient at the start of the search, but at its end
NEWLY_DROPPED = "#a6d8d2"  # the reverse
PALE = "#d9d9d9"  # no gradient at either


@dataclass(frozen=True)
class Update:
    """What an update sees, before its step."""

    step: int
    update: int
    log_ratio: Tensor  # [N, T]: policy in training against the one that drew the tokens
    advantages: Tensor  # [N]
    mask: Tensor  # bool [N, T]

    def masses(self, search: ClipSearch) -> Tensor:
        """bapo.contribution_masses of this update."""
        weights = token_weights(self.mask)
        return contribution_masses(self.log_ratio, self.advantages, weights, search)

    def bounds(self, search: ClipSearch) -> ClipBounds:
        """The bounds that the search finds for this update."""
        return clip_bounds(self.masses(search), search)


class Found(Exception):
    """Ends the training: the update to draw has come."""

    def __init__(self, update: Update):
        super().__init__(f"step {update.step}, update {update.update}")
        self.update = update


# ---------------------------------------------------------------- the update
def something_to_do(bounds: ClipBounds, search: ClipSearch) -> bool:
    """Whether the target is missed at the start, and reached by a lower bound inside its range."""
    missed = bool(bounds.rho_start < search.rho0)
    low = float(bounds.low)
    inside = search.low_start + 1e-3 < low < search.low_max - 1e-3
    return missed and bool(bounds.reached) and inside


def find_update(start: Path, search: ClipSearch, seed: int, folder: Path, steps: int) -> Update:
    """Train with GRPO's bounds from a warm start until the search has something to do.

    Raises ValueError if it has nothing to do in all `steps`.
    """
    train_problems, held_out = countdown.problems()
    task = Task(train_problems, held_out, countdown.grade)
    options = Options(methods=["grpo@8"], seeds=[seed], steps=steps, output_dir=str(folder))
    arm = parse_arm("grpo@8", search)
    config = arm.config() | {"seed": seed, "steps": steps}
    run = Run(folder / "anatomy", arm, str(start), seed, options, config)
    prepare_folder(run.folder, run.config, resume=False)

    def watch(step: int, update: int, batch, log_probs: Tensor, entropy: Tensor) -> None:
        rollouts = batch.rollouts
        log_ratio = (log_probs - rollouts.log_probs).masked_fill(~rollouts.mask, 0.0)
        seen = Update(step, update, log_ratio, batch.advantages, rollouts.mask)
        if something_to_do(seen.bounds(search), search):
            raise Found(seen)

    try:
        train.train_run(run, task, watch=watch)
    except Found as found:
        return found.update
    raise ValueError(f"the search had nothing to do in {steps} steps: take another --seed")


# ---------------------------------------------------------------- the picture
@dataclass(frozen=True)
class SearchPath:
    """The positive share along the path of Algorithm 1: numpy arrays [candidates]."""

    low: np.ndarray
    high: np.ndarray
    rho: np.ndarray


def search_path(masses: Tensor, search: ClipSearch) -> SearchPath:
    """Every candidate pair of bounds, in the order in which the search takes them, and its rho.

    First the upper bound rises at the first lower bound, then the lower one at the last upper.
    """
    highs = search.highs().numpy()
    lows = search.lows().numpy()
    positive = masses[: len(highs)].numpy()
    negative = masses[len(highs) :].numpy()
    low = np.concatenate([np.full(len(highs), lows[0]), lows[1:]])
    high = np.concatenate([highs, np.full(len(lows) - 1, highs[-1])])
    positive_mass = np.concatenate([positive, np.full(len(lows) - 1, positive[-1])])
    negative_mass = np.concatenate([np.full(len(highs), negative[0]), negative[1:]])
    return SearchPath(low, high, positive_mass / (positive_mass + negative_mass))


def anatomy(update: Update, search: ClipSearch):
    """Left: which tokens have a gradient, by ratio. Right: rho along the search."""
    figure, (axes,) = subplots(1, 2, 3.4, width_ratios=[1.25, 1])
    bounds = update.bounds(search)
    draw_masses(axes[0], update, search, bounds)
    draw_path(axes[1], search_path(update.masses(search), search), search, bounds)
    figure.suptitle(
        f"One update on stale tokens (Countdown, step {update.step}, update {update.update}). "
        "Dotted: where the search starts; lines: where it stops"
    )
    return figure


def draw_masses(axis, update: Update, search: ClipSearch, bounds: ClipBounds) -> None:
    """Gradient mass by ratio: positive tokens upwards, negative ones downwards.

    Its colours say whether a token has a gradient at the bounds of the start and at the found ones.
    """
    mask = update.mask
    ratio = importance_ratio(update.log_ratio)
    advantages = update.advantages.unsqueeze(1).expand_as(ratio)
    mass = (advantages.abs() * ratio * token_weights(mask))[mask].numpy()
    positive = (advantages > 0)[mask].numpy()
    ratio = ratio[mask].numpy()
    before = np.where(positive, ratio <= search.high_start, ratio >= search.low_start)
    after = np.where(positive, ratio <= float(bounds.high), ratio >= float(bounds.low))
    layers = [
        (positive & before, POSITIVE, "A > 0"),
        (positive & ~before & after, REGAINED, "regained by the search"),
        (positive & ~after, PALE, "A > 0, dropped"),
        (~positive & after, NEGATIVE, "A < 0"),
        (~positive & before & ~after, NEWLY_DROPPED, "dropped by the search"),
        (~positive & ~before, PALE, "dropped before it"),
    ]
    edges = np.geomspace(0.5, 2.4, 61)
    inside = np.clip(ratio, edges[0], edges[-1])
    for chosen, colour, label in layers:
        sign = np.where(positive[chosen], 1.0, -1.0)
        share = sign * mass[chosen] / mass.sum()
        heights, _ = np.histogram(inside[chosen], edges, weights=share)
        if chosen.any():
            axis.stairs(heights, edges, fill=True, color=colour, linewidth=0, label=label)
    draw_bounds(axis, search, bounds)
    axis.axhline(0, color="black", linewidth=0.6)
    # Nearly all mass is near ratio 1, where no bound acts: roots show the rest, too.
    axis.set_yscale("function", functions=(np.cbrt, cube))
    axis.set_yticks([-0.2, -0.03, -0.002, 0, 0.002, 0.03, 0.2], minor=False)
    axis.set(xscale="log", xlim=(edges[0], edges[-1]), xlabel="importance ratio r")
    ratios = [0.5, 0.6, 0.8, 1, 1.2, 1.5, 2]
    axis.set_xticks(ratios, [f"{value:g}" for value in ratios])
    axis.minorticks_off()
    axis.legend(fontsize=8, loc="lower right", framealpha=1)
    axis.set(ylabel="share of the mass |A| r (cube-root scale)")
    axis.set(title="mass of the tokens that have a gradient")


def draw_bounds(axis, search: ClipSearch, bounds: ClipBounds) -> None:
    """The bounds of the start, dotted, and those that were found."""
    axis.axvline(search.low_start, color=NEGATIVE, linestyle=":", linewidth=1.4)
    axis.axvline(search.high_start, color=POSITIVE, linestyle=":", linewidth=1.4)
    axis.axvline(float(bounds.low), color=NEGATIVE, linewidth=1.4)
    axis.axvline(float(bounds.high), color=POSITIVE, linewidth=1.4)


def cube(values):
    """The inverse of the cube root."""
    return np.power(values, 3)


def draw_path(axis, path: SearchPath, search: ClipSearch, bounds: ClipBounds) -> None:
    """rho at every candidate, in the order of the search; the target; where it stops."""
    places = np.arange(len(path.rho))
    turn = len(search.highs()) - 1  # from here on the lower bound rises
    stop = int(np.flatnonzero(path.rho >= search.rho0 - 1e-6)[0])
    upper = places[: turn + 1]
    lower = places[turn:]
    axis.plot(upper, path.rho[upper], "o-", color=POSITIVE, markersize=3, label="_")
    axis.plot(lower, path.rho[lower], "o-", color=NEGATIVE, markersize=3, label="_")
    axis.axhline(search.rho0, color="black", linestyle="--", linewidth=1)
    axis.plot(stop, path.rho[stop], "o", markersize=10, markerfacecolor="none", color="black")
    low = float(bounds.low)
    high = float(bounds.high)
    axis.annotate(
        f"stops at [{low:.2f}, {high:.2f}]",
        (stop, path.rho[stop]),
        xytext=(-10, 8),
        textcoords="offset points",
        ha="right",
    )
    ticks = [0, turn, len(places) - 1]
    axis.set_xticks(ticks, [f"[{path.low[i]:.1f}, {path.high[i]:.1f}]" for i in ticks])
    axis.set(xlabel="bounds: first the upper one rises, then the lower one")
    axis.set(title=f"positive share ρ by bounds (target {search.rho0:g})")


# ---------------------------------------------------------------- the command line
def main(words: list[str] | None = None) -> int:
    """The command line. Returns the exit status 0."""
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    parser.add_argument("--warm_start", type=Path, help="folder of a Countdown warm start")
    parser.add_argument("--seed", type=int, default=60, help="of prompts and responses")
    parser.add_argument("--output", type=Path, default=ROOT / "results/figures/anatomy.png")
    options = parser.parse_args(words)
    torch.set_num_threads(1)
    search = ClipSearch()
    start = options.warm_start
    if start is None:
        start = warm_start(Options().warm_start(WARM_START), seed=WARM_START)
    with tempfile.TemporaryDirectory() as folder:
        update = find_update(start, search, options.seed, Path(folder), STEPS)
    plot.save(anatomy(update, search), options.output)
    plt.close("all")
    print(f"step {update.step}, update {update.update}: {options.output}")
    return 0


if __name__ == "__main__":
    command("anatomy.py", main)
