"""Open one update: which tokens the bounds drop, and how the search finds them.

    python experiments/anatomy.py

GRPO trains from a supervised start of the default runs (see reproduce.sh). The first update at
which the search of `bapo` stops inside its range of lower bounds is drawn, as it is before its
step: results/figures/anatomy.png.
"""

from dataclasses import replace

import matplotlib.pyplot as plt
from torch import Tensor

# It puts the top level on the path.
from literal import ROOT, Update, updates_of_grpo  # isort: skip

import plot
import runs
from bapo import PAPER_APP_A, ClipBounds, contribution_masses, importance_ratio
from bapo import search_clip_bounds, token_weights

SEED = 101
STEPS = 30  # of GRPO
SEARCH = replace(PAPER_APP_A, contribution="gradient")


def find_update() -> tuple[Update, Tensor, ClipBounds]:
    """The first update whose lower bound stops between the ends of its range.

    With its contribution_masses and the bounds that the search finds.
    """
    for update in updates_of_grpo(SEED, STEPS):
        weights = token_weights(update.mask)
        masses = contribution_masses(update.log_ratio, update.advantages, weights, SEARCH)
        found = search_clip_bounds(masses, SEARCH)
        if SEARCH.low_start < found.low < SEARCH.low_max:
            return update, masses, found
    raise ValueError(f"SEED {SEED}: no search stops inside its range in {STEPS} steps")


def draw_tokens(axis, update: Update, found: ClipBounds) -> None:
    """How many tokens of each sign have which ratio; where the search starts and stops."""
    ratio = importance_ratio(update.log_ratio).clamp(0.4, 2.2)
    for chosen, label in ((update.advantages > 0, "A > 0"), (update.advantages < 0, "A < 0")):
        of_tokens = ratio[chosen][update.mask[chosen]]
        axis.hist(of_tokens.numpy(), 60, range=(0.4, 2.2), log=True, alpha=0.6, label=label)
    starts = [SEARCH.low_start, SEARCH.high_start]
    axis.vlines(starts, 0, 1000, "black", "dotted", label="search starts")
    axis.vlines([found.low, found.high], 0, 1000, "black", label="search stops")
    axis.set(xlabel="importance ratio", ylabel="tokens")
    axis.legend()


def draw_path(axis, masses: Tensor) -> None:
    """The share at every pair of bounds, in Algorithm 1's order, on an axis from 0.3 to 0.6."""
    highs = len(SEARCH.highs())
    positive = masses[:highs]
    negative = masses[highs:]
    raising_high = positive / (positive + negative[0])
    raising_low = positive[-1] / (positive[-1] + negative[1:])
    axis.plot([*raising_high, *raising_low], "o-", markersize=3)
    axis.axvline(highs - 1, color="black", linestyle=":", label="then the lower bound rises")
    axis.axhline(SEARCH.rho0, color="black", linestyle="--", label="target ρ0")
    axis.set(ylim=(0.3, 0.6), title="positive share ρ", xlabel="pairs of bounds, in order")
    axis.legend()


def main() -> int:
    """Write the picture. Returns the exit status 0."""
    update, masses, found = find_update()
    figure, (left, right) = plt.subplots(1, 2, figsize=(9.4, 3.4), layout="constrained")
    draw_tokens(left, update, found)
    draw_path(right, masses)
    place = f"step {update.step}, update {update.update}"
    figure.suptitle(f"grpo@8 of the default setting, seed {SEED}: {place}")
    plot.save(figure, ROOT / "results/figures/anatomy.png")
    return 0


if __name__ == "__main__":
    runs.command("anatomy.py", main, "Interrupted: nothing is written")
