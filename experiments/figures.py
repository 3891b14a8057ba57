"""Draw the pictures of README.md and results/README.md from what is packed, into results/figures.

    python experiments/figures.py

Bands and bars are 95 % intervals over seeds, as plot.py draws them. What is not packed yet is left
out.
"""

import matplotlib.pyplot as plt
import pandas as pd

# It puts the top level on the path.
import tables  # isort: skip

import plot

RATE = "learning rate / 1e-4"
UPDATES = "updates on a batch"
LABELLED = {"grpo@8": ("right", "bottom"), "bapo@8": ("left", "top")}  # with their rates, and where
STALENESS = range(126, 134)  # the seeds of the sweep over it
CURVES = ["grpo@1", "grpo@8", "bapo@8", "0.9-3.0@8"]
OF_RATES = ["mean@16", "pass@8", "entropy at the end", "norm"]
OF_TARGETS = ["updates at start", "updates at end", "mean low", "mean high", "share", "norm"]
OF_BOUNDS = ["lowest entropy", "norm", "mean@16", "pass@8"]


def steps(folder, methods: list[str]) -> plt.Figure:
    """What the paper draws over steps: reward, entropy, norm and positive share of a folder."""
    lines = plot.load(folder).lines.query("method in @methods")
    figure, axes = plt.subplots(2, 2, figsize=(9.4, 6), layout="constrained")
    for axis, (metric, title) in zip(axes.flat, plot.PANELS.items()):
        plot.curves(axis, lines, metric, title)
    return with_legend(figure, f"means of {plot.SMOOTHED} steps, {seeds_of(lines)}")


def over(sweep: pd.DataFrame, x: str, outcomes: list[str], columns: int) -> plt.Figure:
    """Panels of outcomes over the column x, a line per method."""
    figure, axes = plt.subplots(2, columns, figsize=(9.4, 6), layout="constrained")
    for axis, outcome in zip(axes.flat, outcomes):
        values = sweep.set_index(x, append=True)[outcome].unstack(plot.RUN)
        plot.means(axis, values, "o-")
        axis.set(title=outcome, xlabel=x, xscale="log")
        axis.set_xticks(values.index, values.index)
        axis.minorticks_off()
    return with_legend(figure, seeds_of(sweep))


def trade(rates: pd.DataFrame) -> plt.Figure:
    """mean@16 against pass@8 and against kl: of each method a line through its rates."""
    means = rates.query("method != 'start'").groupby(["method", "rate"]).mean()
    figure, axes = plt.subplots(1, 2, figsize=(9.4, 4.6), sharey=True, layout="constrained")
    for axis, x in zip(axes, ("pass@8", "kl")):
        for method, colour in plot.colours(means.index.unique("method")).items():
            places = means.loc[method, [x, "mean@16"]]
            axis.plot(*places.to_numpy().T, "o-", color=colour, label=method)
            if method not in LABELLED:
                continue
            ha, va = LABELLED[method]
            for rate, place in places.iterrows():
                axis.annotate(f" {rate:g} ", place, color=colour, fontsize=7, ha=ha, va=va)
        axis.set(xlabel=x, ylabel="mean@16")
    axes[1].set(xscale="log", xlabel="kl of a batch, at its last update (0 with one update)")
    return with_legend(figure, f"numbers: {RATE} of {' and '.join(LABELLED)}, {seeds_of(rates)}")


def with_legend(figure: plt.Figure, title: str) -> plt.Figure:
    """The figure with a title, and below it the methods of its first panel."""
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=6)
    figure.suptitle(title)
    return figure


def seeds_of(rows: pd.DataFrame) -> str:
    """ "seeds 121 to 125": the first and the last of them."""
    seeds = rows.index.get_level_values("seed")
    return f"seeds {seeds.min()} to {seeds.max()}"


def by_upper_bound(bounds: pd.DataFrame) -> pd.DataFrame:
    """The sweep `bounds` with the upper bound for a method, and a column "lower bound"."""
    sweep = bounds.query("method != 'start'").reset_index("method")
    sweep["method"] = "upper bound " + sweep["mean high"].round(2).astype(str)
    sweep["lower bound"] = sweep["mean low"].round(2)
    return sweep.set_index("method", append=True)


def by_updates(sweep: pd.DataFrame) -> pd.DataFrame:
    """The runs of grpo and bapo without the @N of their names, which is in a column UPDATES."""
    sweep = sweep.query("seed in @STALENESS").reset_index("method")
    sweep[["method", UPDATES]] = sweep["method"].str.extract(r"^(grpo|bapo)@(\d+)$")
    sweep = sweep.dropna(subset="method").set_index("method", append=True)
    return sweep.astype({UPDATES: int})


def main() -> None:
    """Draw what is packed."""
    results = tables.ROOT / "results"
    sweeps = tables.read_sweeps(results)
    rates = sweeps["rates"].query("seed in @tables.CHOOSING")
    figures = {
        "bounds": over(by_upper_bound(sweeps["bounds"]), "lower bound", OF_BOUNDS, 2),
        "binding": steps(results / "binding", ["grpo@8", "bapo-main@8", "0.9-3.0@8"]),
    }
    if "rate-3e-4" in sweeps:
        figures["steps"] = steps(results / "rate-3e-4", CURVES)
        figures["rates"] = over(rates.rename(columns={"rate": RATE}), RATE, OF_RATES, 2)
        figures["target"] = over(sweeps["targets"], "rho0", [*OF_TARGETS, "mean@16", "pass@8"], 4)
        figures["trade"] = trade(rates)
        staleness = by_updates(sweeps["rate-3e-4"])
        if (staleness[UPDATES] > 8).any():
            figures["staleness"] = over(staleness, UPDATES, OF_RATES, 2)
    for name, figure in figures.items():
        plot.save(figure, results / f"figures/{name}.png")


if __name__ == "__main__":
    main()
