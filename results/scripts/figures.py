"""Draw the pictures of README.md and results/README.md from what is packed, into results/figures.

python -m results.scripts.figures
"""

import pandas as pd
from matplotlib.figure import Figure

from results.scripts import outcomes
from results.scripts.outcomes import CLASSES, RESULTS, Sweeps
from support import plot

LABELS = {
    "grpo@1": "GRPO, one update per batch",
    "grpo@8": "GRPO",
    "0.6-1.2@8": "fixed [0.6, 1.2]",
    "0.9-3.0@8": "fixed [0.9, 3.0]",
    "bapo@8": "BAPO",
    "reverse@8": "BAPO reversed",
    "grpo@8 at 6e-6": "GRPO at 1.5 times the rate",
}


# ---------------------------------------------------------------- curves of training
def row_of_curves(part, name: str, lines: pd.DataFrame, metrics: list[str], smoothed: int):
    """Draw metrics over steps, a panel each, in a figure or subfigure, and return that."""
    axes = part.subplots(1, len(metrics))
    for axis, metric in zip(axes, metrics):
        plot.curves(axis, lines, metric, f"{name}: {plot.PANELS[metric]}", smoothed)
    handles, methods = axes[0].get_legend_handles_labels()
    labels = [LABELS[method] for method in methods]
    part.legend(handles, labels, loc="outside lower center", ncols=2 * len(metrics) - 2)
    return part


def front(toy: pd.DataFrame, language: pd.DataFrame) -> Figure:
    """Draw entropy and norm of the toy, reward and entropy of SmolLM2."""
    figure = Figure((9.4, 3.4), layout="constrained")
    left, right = figure.subfigures(1, 2)
    row_of_curves(left, "toy", toy, ["entropy", "grad_norm"], 10)
    row_of_curves(right, "SmolLM2", language.drop("0.9-3.0@8"), ["reward", "entropy"], 3)
    return figure


# ---------------------------------------------------------------- the search
def switch(toy: pd.DataFrame, language: pd.DataFrame) -> Figure:
    """Draw rho before the search and where searches end, by update of a batch."""
    figure = Figure((9.4, 3.6), layout="constrained")
    rho, on_toy, on_smollm2 = figure.subplots(1, 3)
    rho.set_title("rho before the search; dotted: rho0")
    draw_searches(rho, on_toy, toy.loc[["bapo@8"]], "toy, rho0 0.44", 0.44)
    # Without the first two batches of a run, in which AdamW's steps are large
    language = language.loc[["bapo@8"]].query("step >= 3 and update > 0")
    draw_searches(rho, on_smollm2, language, "SmolLM2, rho0 0.4", 0.4)
    for axis in figure.axes:
        axis.set_xlabel("update of a batch")
        axis.legend(loc="upper center", bbox_to_anchor=(0.5, -0.18))
    return figure


def draw_searches(rho, ends, lines: pd.DataFrame, title: str, rho0: float) -> None:
    """Draw rho's mean over batches, a band that holds 80 % of them, and where searches end."""
    of_batches = lines.groupby("update")["rho_start"]
    (line,) = rho.plot(of_batches.mean(), "o-", label=f"{title}: mean, and 80 %")
    low = of_batches.quantile(0.1)
    rho.fill_between(low.index, low, of_batches.quantile(0.9), color=line.get_color(), alpha=0.15)
    rho.axhline(rho0, color=line.get_color(), ls=":")
    shares = outcomes.searches(lines, ["update"])
    greys = ["0.4", "0.7", "0.95"]
    shares.plot.bar(ax=ends, stacked=True, color=greys, edgecolor="black", rot=0)
    ends.set(title=title, ylabel="share of the searches")


# ---------------------------------------------------------------- why entropy falls
def mechanism(sweeps: Sweeps) -> Figure:
    """Draw what classes of tokens do, what Eqs. 6 and 7 predict, and what batches lose.

    A row per model. In all panels left of 0 means that entropy falls. Predictions are per unit of
    Eq. 6's step size, so their axes name no unit.
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
    labels = []
    for suffix, label in CLASSES.items():
        labels.append(f"{runs[f'share_{suffix}'].mean():.1%}   {label}")
    effects = runs[[f"fall_{suffix}" for suffix in CLASSES]]
    title = (
        "what tokens do to entropy, their share, and whether (●)\n"
        "[0.6, 1.2], [0.8, 1.2], [0.9, 3.0] let them through"
    )
    bars(of_tokens, -effects, labels, title)
    bounds = ["[0.6, 1.2]", "[0.8, 1.2]", "[0.9, 3.0]"]
    falls = runs[["fall_at_0.6_1.2", "fall_at_0.8_1.2", "fall_at_0.9_3.0"]]
    bars(predicted, -falls, bounds, "predicted, an update")
    changes = measured_runs["within a batch"].unstack("method")
    changes = changes[["0.6-1.2@8", "grpo@8", "0.9-3.0@8"]]
    bars(measured, changes, bounds, "measured, a batch (nats)")


def bars(axis, values: pd.DataFrame, labels: list[str], title: str) -> None:
    """Draw means over runs with their 95 % intervals, a bar per column from top to bottom."""
    mean, half = plot.interval(values)
    colours = ["C3" if value < 0 else "C2" for value in mean]
    axis.barh(labels, mean, xerr=half, color=colours, alpha=0.7, capsize=3)
    axis.axvline(0, color="black", lw=1)
    axis.set(title=title, xlabel="falls ← entropy → rises")
    axis.locator_params("x", nbins=3)
    axis.invert_yaxis()


def main() -> None:
    """Draw all pictures."""
    packs = outcomes.read_packs()
    toy = packs["rate-2e-4"].lines
    language = packs["smollm2"].lines.rename({"bapo-main@8": "bapo@8"})
    larger = packs["smollm2-larger-step"].lines
    figures = {
        "front": front(toy, language),
        "curves": row_of_curves(
            Figure((9.4, 3), layout="constrained"),
            "toy",
            toy,
            ["reward", "entropy", "grad_norm", "gradient_share"],  # the paper's Fig. 9
            10,
        ),
        "language_model": row_of_curves(
            Figure((9.4, 3.8), layout="constrained"),
            "SmolLM2",
            pd.concat([language, larger.rename({"grpo@8": "grpo@8 at 6e-6"})]),
            ["reward", "entropy"],
            3,
        ),
        "large_steps": row_of_curves(
            Figure((9.4, 3.8), layout="constrained"),
            "SmolLM2 at 4.8e-5",
            packs["large-steps"].lines.drop("0.9-1.2@8"),
            ["reward", "entropy"],
            3,
        ),
        "switch": switch(toy, language),
        "mechanism": mechanism(outcomes.read_sweeps(packs)),
    }
    for name, figure in figures.items():
        figure.savefig(RESULTS / f"figures/{name}.png", bbox_inches="tight")


if __name__ == "__main__":
    main()
