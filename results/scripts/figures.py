"""Draw the pictures of README.md and results/README.md from what is packed, into results/figures.

python -m results.scripts.figures
"""

import pandas as pd
from matplotlib.figure import Figure

from results.scripts import outcomes
from results.scripts.outcomes import CLASSES, RESULTS, Packs, Sweeps
from support import plot

LABELS = {
    "grpo@1": "GRPO, one update per batch",
    "grpo@8": "GRPO",
    "0.6-1.2@8": "fixed [0.6, 1.2]",
    "0.9-3.0@8": "fixed [0.9, 3.0]",
    "bapo@8": "BAPO",
    "grpo@8 at 6e-6": "GRPO at 1.5 times the rate",
}
# Whether [0.6, 1.2], [0.8, 1.2] and [0.9, 3.0] let a class of tokens through (●) or clip it
LET_THROUGH = {
    "neg_below_0.6": "○○○",
    "neg_0.6_0.8": "●○○",
    "neg_0.8_0.9": "●●○",
    "neg_above_0.9": "●●●",
    "pos_below_1.2": "●●●",
    "pos_1.2_3.0": "○○●",
    "pos_above_3.0": "○○○",
}


# ---------------------------------------------------------------- curves of training
def row_of_curves(part, name: str, lines: pd.DataFrame, metrics: list[str], smoothed: int) -> None:
    """Draw metrics over steps, a panel each, in a figure or subfigure."""
    axes = part.subplots(1, len(metrics))
    for axis, metric in zip(axes, metrics):
        plot.curves(axis, lines, metric, f"{name}: {plot.PANELS[metric]}", smoothed)
    handles, methods = axes[0].get_legend_handles_labels()
    labels = [LABELS[method] for method in methods]
    part.legend(handles, labels, loc="outside lower center", ncols=2 * len(metrics) - 2)


def front(packs: Packs) -> Figure:
    """Draw entropy and norm of the toy, reward and entropy of SmolLM2."""
    figure = Figure((9.4, 3.4), layout="constrained")
    left, right = figure.subfigures(1, 2)
    row_of_curves(left, "toy", packs["rate-2e-4"].lines, ["entropy", "grad_norm"], 10)
    language = packs["smollm2"].lines.drop("0.9-3.0@8").rename({"bapo-main@8": "bapo@8"})
    row_of_curves(right, "SmolLM2", language, ["reward", "entropy"], 3)
    return figure


def toy_curves(packs: Packs) -> Figure:
    """Draw the four panels of the paper's Fig. 9."""
    figure = Figure((9.4, 3), layout="constrained")
    metrics = ["reward", "entropy", "grad_norm", "gradient_share"]
    row_of_curves(figure, "toy", packs["rate-2e-4"].lines, metrics, 10)
    return figure


def language_model(packs: Packs) -> Figure:
    """Draw reward and entropy of the language model, seeds 10 to 17."""
    figure = Figure((9.4, 3.8), layout="constrained")
    larger = packs["smollm2-larger-step"].lines.rename({"grpo@8": "grpo@8 at 6e-6"})
    lines = pd.concat([packs["smollm2"].lines.rename({"bapo-main@8": "bapo@8"}), larger])
    row_of_curves(figure, "SmolLM2", lines, ["reward", "entropy"], 3)
    return figure


# ---------------------------------------------------------------- the search
def switch(packs: Packs) -> Figure:
    """Draw rho before the search and where searches end, by update of a batch."""
    figure = Figure((9.4, 3.6), layout="constrained")
    rho, *panels = figure.subplots(1, 3)
    toy = packs["rate-2e-4"].lines.loc[["bapo@8"]].query("update > 0")
    # As the protocol describes the language model: without the first two batches of a run
    language = packs["smollm2"].lines.loc[["bapo-main@8"]].query("step >= 3 and update > 0")
    rho_before_the_search(rho, toy, 0.44, "toy", "C0")
    rho_before_the_search(rho, language, 0.4, "SmolLM2", "C1")
    rho.set_title("(a) rho before the search; dotted: rho0")
    where_searches_end(panels[0], toy, "(b) toy, rho0 0.44")
    where_searches_end(panels[1], language, "(c) SmolLM2, rho0 0.4")
    for axis in figure.axes:
        axis.set_xlabel("update of a batch")
        axis.legend(loc="upper center", bbox_to_anchor=(0.5, -0.18))
    return figure


def rho_before_the_search(axis, lines, rho0: float, name: str, colour: str) -> None:
    """Draw the mean over batches, a band that holds 80 % of them, and rho0."""
    of_batches = lines.groupby("update")["rho_start"]
    axis.plot(of_batches.mean(), "o-", color=colour, label=f"{name}: mean, and 80 % of the batches")
    low = of_batches.quantile(0.1)
    axis.fill_between(low.index, low, of_batches.quantile(0.9), color=colour, alpha=0.15)
    axis.axhline(rho0, color=colour, ls=":")


def where_searches_end(axis, lines: pd.DataFrame, title: str) -> None:
    """Draw the shares of searches as stacked bars."""
    shares = outcomes.searches(lines, ["update"])
    greys = ["0.4", "0.7", "0.95"]
    shares.plot.bar(ax=axis, stacked=True, color=greys, edgecolor="black", rot=0, title=title)
    axis.set_ylabel("share of the searches")


# ---------------------------------------------------------------- why entropy falls
def mechanism(sweeps: Sweeps) -> Figure:
    """Draw what classes of tokens do, what Eqs. 6 and 7 predict, and what batches lose.

    A row per model. In all panels left of 0 means that entropy falls.
    """
    figure = Figure((9.4, 7.2), layout="constrained")
    smollm2, toy = figure.subfigures(2, 1)
    row_of_mechanism(smollm2, "SmolLM2", sweeps["mechanism/smollm2"], sweeps["smollm2"])
    row_of_mechanism(toy, "toy", sweeps["mechanism/toy"], sweeps["fixed"])
    return figure


def row_of_mechanism(part, name: str, runs: pd.DataFrame, measured_runs: pd.DataFrame) -> None:
    """Draw the three panels of a model."""
    part.suptitle(f"{name} (classes and predictions: {len(runs)} of GRPO's runs)")
    of_tokens, predicted, measured = part.subplots(1, 3, width_ratios=[2, 1, 1])
    effects = {}
    for suffix, label in CLASSES.items():
        share = runs[f"share_{suffix}"].mean()
        effects[f"{label}   {share:.1%}  {LET_THROUGH[suffix]}"] = -runs[f"fall_{suffix}"]
    bars(
        of_tokens,
        effects,
        "what tokens do to entropy, their share, and whether (●)\n"
        "[0.6, 1.2], [0.8, 1.2], [0.9, 3.0] let them through",
    )
    falls = {
        "[0.6, 1.2]": -runs["fall_at_0.6_1.2"],
        "[0.8, 1.2]": -runs["fall_at_0.8_1.2"],
        "[0.9, 3.0]": -runs["fall_at_0.9_3.0"],
    }
    bars(predicted, falls, "predicted, an update")
    changes = measured_runs["within a batch"].unstack("method")
    changes = changes[["0.6-1.2@8", "grpo@8", "0.9-3.0@8"]].set_axis(list(falls), axis=1)
    bars(measured, changes, "measured, a batch")


def bars(axis, values, title: str) -> None:
    """Draw means over runs with their 95 % intervals, a bar per column from top to bottom."""
    mean, half = plot.interval(pd.DataFrame(values))
    colours = ["C3" if value < 0 else "C2" for value in mean]
    axis.barh(mean.index, mean, xerr=half, color=colours, alpha=0.7, capsize=3)
    axis.axvline(0, color="black", lw=1)
    axis.set_title(title, pad=12)
    axis.set_xlabel("falls ← entropy (nats) → rises")
    axis.locator_params("x", nbins=3)
    axis.invert_yaxis()


def main() -> None:
    """Draw all pictures."""
    packs = outcomes.read_packs()
    figures = {
        "front": front(packs),
        "curves": toy_curves(packs),
        "language_model": language_model(packs),
        "switch": switch(packs),
        "mechanism": mechanism(outcomes.read_sweeps(packs)),
    }
    for name, figure in figures.items():
        figure.savefig(RESULTS / f"figures/{name}.png", bbox_inches="tight")


if __name__ == "__main__":
    main()
