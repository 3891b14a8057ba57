"""Draw the pictures of README.md and results/README.md from what is packed, into results/figures.

python -m results.scripts.figures
"""

from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from results.scripts import outcomes
from results.scripts.outcomes import CLASSES, MECHANISM, RESULTS, Packs, Sweeps
from support import plot

LABELS = {
    "grpo@1": "GRPO, one update per batch",
    "grpo@8": "GRPO",
    "0.6-1.2@8": "fixed [0.6, 1.2]",
    "0.9-3.0@8": "fixed [0.9, 3.0]",
    "bapo@8": "BAPO",
    "grpo@8 at 6e-6": "GRPO at 1.5 times the rate",
}
TITLES = {
    "reward": "reward",
    "entropy": "entropy",
    "grad_norm": "gradient norm",
    "gradient_share": "positive share",
}
ENDS = {
    "at end": "end at [0.9, 3.0]",
    "inside": "end between",
    "at start": "never leave [0.6, 1.2]",
}
# Clip bounds -> what the packs in results/mechanism name their prediction, the method that has
# them, and the classes of tokens that they do not clip
BOUNDS = {
    "[0.6, 1.2]": (
        "fall_at_0.6_1.2",
        "0.6-1.2@8",
        ["neg_0.6_0.8", "neg_0.8_0.9", "neg_above_0.9", "pos_below_1.2"],
    ),
    "[0.8, 1.2]": (
        "fall_at_0.8_1.2",
        "grpo@8",
        ["neg_0.8_0.9", "neg_above_0.9", "pos_below_1.2"],
    ),
    "[0.9, 3.0]": (
        "fall_at_0.9_3.0",
        "0.9-3.0@8",
        ["neg_above_0.9", "pos_below_1.2", "pos_1.2_3.0"],
    ),
}


def row_of_curves(part, name: str, lines: pd.DataFrame, metrics: list[str], smoothed: int) -> None:
    """Draw metrics over steps, a panel each, in a figure or subfigure."""
    axes = part.subplots(1, len(metrics))
    for axis, metric in zip(axes, metrics):
        plot.curves(axis, lines, metric, f"{name}: {TITLES[metric]}", smoothed)
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
    row_of_curves(figure, "toy", packs["rate-2e-4"].lines, list(TITLES), 10)
    return figure


def language_model(packs: Packs) -> Figure:
    """Draw reward and entropy of the language model, seeds 10 to 17."""
    figure = Figure((9.4, 3.8), layout="constrained")
    larger = packs["smollm2-larger-step"].lines.rename({"grpo@8": "grpo@8 at 6e-6"})
    lines = pd.concat([packs["smollm2"].lines.rename({"bapo-main@8": "bapo@8"}), larger])
    row_of_curves(figure, "SmolLM2", lines, ["reward", "entropy"], 3)
    return figure


def switch(packs: Packs) -> Figure:
    """Draw rho before the search and where searches end, by update of a batch."""
    figure = Figure((9.4, 3.6), layout="constrained")
    rho, *panels = figure.subplots(1, 3)
    toy = packs["rate-2e-4"].lines.loc[["bapo@8"]]
    # As the protocol describes the language model: without the first two batches of a run
    language = packs["smollm2"].lines.loc[["bapo-main@8"]].query("step >= 3")
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
    of_batches = lines.query("update > 0").groupby("update")["rho_start"]
    axis.plot(of_batches.mean(), "o-", color=colour, label=f"{name}: mean, and 80 % of the batches")
    low = of_batches.quantile(0.1)
    high = of_batches.quantile(0.9)
    axis.fill_between(low.index, low, high, color=colour, alpha=0.15)
    axis.axhline(rho0, color=colour, ls=":")


def where_searches_end(axis, lines: pd.DataFrame, title: str) -> None:
    """Draw the shares of searches as stacked bars."""
    lines = lines.query("update > 0").astype({"update": int})
    shares = outcomes.searches(lines, ["update"])[list(ENDS)].rename(columns=ENDS)
    greys = ["0.4", "0.7", "0.95"]
    shares.plot.bar(ax=axis, stacked=True, color=greys, edgecolor="black", rot=0, title=title)
    axis.set_ylabel("share of the searches")


# ---------------------------------------------------------------- why entropy falls
def mechanism(lines_of: dict[str, pd.DataFrame], sweeps: Sweeps) -> Figure:
    """Draw what classes of tokens do, what Eqs. 6 and 7 predict, and what batches lose.

    A row per model. In all panels left of 0 means that entropy falls.
    """
    figure = Figure((9.4, 3.6 * len(lines_of)), layout="constrained")
    parts = figure.subfigures(len(lines_of), 1, squeeze=False)
    folders = {"smollm2": "smollm2", "toy": "fixed"}
    for part, (model, lines) in zip(parts.flat, lines_of.items()):
        part.suptitle(f"{MECHANISM[model]}, {outcomes.seeds(lines)}", fontweight="bold")
        of_tokens, predicted, measured = part.subplots(1, 3, width_ratios=[2, 1, 1])
        of_runs = lines.select_dtypes("number").groupby(plot.RUN).mean()
        classes(of_tokens, of_runs)
        changes = sweeps[folders[model]]["within a batch"].unstack("method")
        falls = {}
        changes_of = {}
        for bounds, (column, method, _) in BOUNDS.items():
            falls[bounds] = -of_runs[column]
            changes_of[bounds] = changes[method]
        bars(predicted, falls, "predicted, an update")
        bars(measured, changes_of, "measured, a batch")
    return figure


def classes(axis, of_runs: pd.DataFrame) -> None:
    """Draw the classes' effects. Beside a class stand its share and which bounds let it through."""
    effects = {}
    shares = []
    for name, label in CLASSES.items():
        effects[label] = -of_runs[f"fall_{name}"]
        shares.append(f"{of_runs[f'share_{name}'].mean():.1%}")
    bars(axis, effects, "what tokens do to entropy")
    columns = {"share": shares}
    for bounds, (_, _, let_through) in BOUNDS.items():
        head = bounds.replace(" ", "\n")
        columns[head] = ["●" if name in let_through else "–" for name in CLASSES]
    centred = {"transform": axis.get_yaxis_transform(), "ha": "center", "va": "center"}
    axis.text(1.36, -1.9, "let through (●) by", **centred)
    for place, (head, cells) in zip([1.09, 1.23, 1.36, 1.49], columns.items()):
        for row, text in enumerate([head, *cells]):
            axis.text(place, row - 1, text, **centred)


def bars(axis, values: dict[str, pd.Series], title: str) -> None:
    """Draw the mean over runs with its 95 % interval, a bar per entry from top to bottom."""
    mean, half = plot.interval(pd.DataFrame(values))
    colours = ["C3" if value < 0 else "C2" for value in mean]
    axis.barh(mean.index, mean, xerr=half, color=colours, alpha=0.7, capsize=3)
    axis.axvline(0, color="black", lw=1)
    axis.set_title(title, pad=12)
    axis.set_xlabel("falls ← entropy (nats) → rises")
    axis.locator_params("x", nbins=3)
    axis.invert_yaxis()


def main(results: Path) -> None:
    """Draw all pictures."""
    packs = outcomes.read_packs(results)
    sweeps = outcomes.read_sweeps(packs)
    figures = {
        "front": front(packs),
        "curves": toy_curves(packs),
        "language_model": language_model(packs),
        "switch": switch(packs),
    }
    lines_of = outcomes.read_mechanism(results)
    if lines_of:
        figures["mechanism"] = mechanism(lines_of, sweeps)
    for name, figure in figures.items():
        figure.savefig(results / f"figures/{name}.png", bbox_inches="tight")


if __name__ == "__main__":
    main(RESULTS)
