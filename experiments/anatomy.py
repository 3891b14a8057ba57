"""Open one update: which tokens the bounds drop, and how the search finds them.

    python experiments/anatomy.py

GRPO trains from a supervised start of the default runs (see reproduce.sh). The first update at
which the search of `bapo` stops inside its range of lower bounds is drawn, as it is before its
step: results/figures/anatomy.png.
"""

import matplotlib.pyplot as plt
import numpy as np

# It puts the top level on the path.
from literal import ROOT, Update, updates_of_grpo  # isort: skip

import plot
import runs
from bapo import ClipSearch, clip_bounds, contribution_masses, importance_ratio, token_weights

SEED = 101
STEPS = 30  # of GRPO
POSITIVE = "C0"
NEGATIVE = "C1"
SEARCH = ClipSearch()


def masses_of(update: Update):
    """bapo.contribution_masses of an update."""
    weights = token_weights(update.mask)
    return contribution_masses(update.log_ratio, update.advantages, weights, SEARCH)


def find_update() -> Update:
    """The first update at which the lower bound stops between the ends of its range."""
    for update in updates_of_grpo(SEED, STEPS):
        low = clip_bounds(masses_of(update), SEARCH).low
        if SEARCH.low_start < low < SEARCH.low_max:
            return update
    raise ValueError(f"SEED {SEED}: no search stops inside its range in {STEPS} steps")


def draw_tokens(axis, update: Update) -> None:
    """How many tokens of each sign have which ratio; where the search starts and stops."""
    ratio = importance_ratio(update.log_ratio)
    edges = np.geomspace(0.4, 2.5, 61)
    for sign, colour, label in ((1, POSITIVE, "A > 0"), (-1, NEGATIVE, "A < 0")):
        chosen = update.mask & (sign * update.advantages > 0).unsqueeze(1)
        inside = ratio[chosen].clamp(edges[0], edges[-1]).numpy()
        axis.hist(inside, edges, color=colour, alpha=0.6, label=label)
    found = clip_bounds(masses_of(update), SEARCH)
    axis.vlines([SEARCH.low_start, SEARCH.high_start], 0, 1000, "black", "dotted", "search starts")
    axis.vlines([found.low, found.high], 0, 1000, "black", label="search stops")
    axis.set(xscale="log", yscale="log", xlabel="importance ratio", ylabel="tokens")
    axis.set_xticks([0.5, 0.8, 1, 1.2, 2], ["0.5", "0.8", "1", "1.2", "2"])
    axis.minorticks_off()
    axis.legend()


def draw_path(axis, update: Update) -> None:
    """The share at every pair of bounds, in Algorithm 1's order, on an axis from 0.3 to 0.6."""
    masses = masses_of(update).numpy()
    highs = len(SEARCH.highs())
    positive, negative = masses[:highs], masses[highs:]
    raising_high = positive / (positive + negative[0])
    raising_low = positive[-1] / (positive[-1] + negative[1:])
    axis.plot(np.concatenate([raising_high, raising_low]), "o-", markersize=3)
    axis.axvline(highs - 1, color="black", linestyle=":", label="then the lower bound rises")
    axis.axhline(SEARCH.rho0, color="black", linestyle="--", label="target ρ0")
    axis.set(ylim=(0.3, 0.6), title="positive share ρ", xlabel="pairs of bounds, in order")
    axis.legend()


def main() -> int:
    """Write the picture. Returns the exit status 0."""
    update = find_update()
    figure, (left, right) = plt.subplots(1, 2, figsize=(9.4, 3.4), layout="constrained")
    draw_tokens(left, update)
    draw_path(right, update)
    place = f"step {update.step}, update {update.update}"
    figure.suptitle(f"grpo@8 of the default setting, seed {SEED}: {place}")
    plot.save(figure, ROOT / "results/figures/anatomy.png")
    return 0


if __name__ == "__main__":
    runs.command("anatomy.py", main, "Interrupted: nothing is written")
