"""Draw the pictures of README.md and results/README.md from what is packed, into results/figures.

python -m results.scripts.figures
"""

import pandas as pd
from matplotlib.figure import Figure

from bapo import PAPER_MAIN
from results.scripts import tables
from support import plot

RATE = "learning rate / 1e-4 (log scale)"
UPDATES = "updates on a batch (log scale)"
LOWER = "lower bound (log scale)"
LARGER_STEP = "grpo@8, 1.5 times the rate"
LABELS = {
    plot.START: "before training",
    "grpo@1": "grpo@1: GRPO, on-policy",
    "grpo@8": "grpo@8: GRPO, eight updates",
    "bapo@8": "bapo@8: BAPO, eight updates",
    "bapo-main@8": "bapo-main@8: BAPO, rho0 0.4",
    "0.6-1.2@8": "0.6-1.2@8: fixed bounds",
    "0.9-3.0@8": "0.9-3.0@8: fixed bounds",
    LARGER_STEP: "grpo@8 at 1.5 times the rate",
}
RATES = ["5e-5", "1e-4", "2e-4"]
OF_RATES = ["mean@16", "pass@8", "entropy", "norm"]
OF_BOUNDS = ["lowest entropy", "norm", "mean@16", "pass@8"]
TITLES = {
    "mean@16": "mean@16, held-out accuracy",
    "pass@8": "pass@8, held-out",
    "entropy": "entropy, last 10 steps",
    "lowest entropy": "lowest entropy over 20 steps",
    "norm": "gradient norm, 95th percentile",
}
# What one search sees: methods -> marker and label
SCOPES = {
    "bapo(-main)?@": ("ko", "toy: a search per update"),
    "bapo-gradient": ("ks", "toy: clipped tokens count nothing in rho"),
    "bapo-main-per16": ("k^", "toy: a search per 16 responses"),
    "bapo-main-per4": ("kv", "toy: a search per 4 responses"),
}
# Points of the mean bounds that have a name: method and folder -> name
NAMES = {
    ("bapo-main@8", "scope"): "rho0 0.40",
    ("bapo@8", "target-0.42"): "rho0 0.42",
    ("bapo@16", "rate-3e-4"): "rho0 0.44, 16 updates",
    ("bapo@8", "rate-2e-4"): "rho0 0.44",
}


def legend(figure: Figure, columns: int) -> None:
    """Name the methods below all panels."""
    plot.legend(figure, columns)
    for text in figure.legends[0].get_texts():
        text.set_text(LABELS.get(text.get_text(), text.get_text()))


def front(packs: tables.Packs, sweeps: tables.Sweeps) -> Figure:
    """Draw reward, entropy, the norm of each batch's first update, and pass@8 before and after."""
    figure = Figure((10.4, 3.2), layout="constrained")
    reward, entropy, norm, accuracy = figure.subplots(1, 4)
    lines = packs["rate-2e-4"].lines
    plot.curves(reward, lines, "reward", "reward")
    plot.curves(entropy, lines, "entropy", "entropy (nats per token)")
    first = lines.query("update <= 1")
    plot.curves(norm, first, "grad_norm", "gradient norm of first updates")
    before_and_after(accuracy, sweeps["rate-2e-4"]["pass@8"])
    legend(figure, columns=4)
    return figure


def before_and_after(axis, accuracies: pd.Series) -> None:
    """Draw the mean and its interval before training and, side by side, of every method after."""
    mean, half = plot.interval(accuracies.groupby("method"))
    methods = plot.styles(mean.index.drop(plot.START))
    for place, (method, style) in enumerate(methods.items()):
        ends = [plot.START, method]
        axis.errorbar([0, 0.85 + place / 10], mean[ends], half[ends], fmt=style, capsize=3)
    axis.set(title="pass@8, held-out", xlim=(-0.3, 1.45))
    axis.set_xticks([0, 1], ["before training", "after"])


def language_model(packs: tables.Packs) -> Figure:
    """Draw reward and entropy of the language model over steps, in a row for each set of seeds."""
    figure = Figure((9.4, 7), layout="constrained")
    larger = packs["smollm2-larger-step"].lines.rename({"grpo@8": LARGER_STEP})
    sets = {
        "seeds 10 to 17": pd.concat([packs["smollm2"].lines, larger]),
        "seeds 18 to 25": packs["smollm2-gpu"].lines,
    }
    rows = figure.subplots(2, 2, sharey="col")
    for (reward, entropy), (seeds, lines) in zip(rows, sets.items()):
        plot.curves(reward, lines, "reward", f"reward, {seeds}", smoothed=3)
        plot.curves(entropy, lines, "entropy", f"entropy (nats per token), {seeds}", smoothed=3)
    legend(figure, columns=3)
    return figure


def switch(packs: tables.Packs, sweeps: tables.Sweeps) -> Figure:
    """Draw rho before the search and where searches end, by update, and mean bounds."""
    figure = Figure((9.4, 8.4), layout="constrained")
    rho, ends_of_toy, ends_of_language, bounds = figure.subplots(2, 2).flat
    toy = packs["rate-2e-4"].lines.loc[["bapo@8"]]
    # As the protocol describes the language model: without the first two batches of a run
    language = packs["smollm2"].lines.loc[["bapo-main@8"]].query("step >= 3")
    rho_before_the_search(rho, toy, "toy, bapo@8", "C4-^", aside=-0.1)
    rho_before_the_search(rho, language, "SmolLM2, bapo-main@8", "C5--o", aside=0.1)
    rho.axhline(0.44, color="C4", ls=":", label="rho0 of the toy, 0.44")
    rho.axhline(0.40, color="C5", ls="-.", label="rho0 of SmolLM2 and the paper, 0.40")
    rho.set(title="(a) rho before the search", xlabel="update of a batch", ylabel="rho")
    rho.set_xticks(range(1, 9))
    where_searches_end(ends_of_toy, toy, "(b) toy, rho0 0.44")
    where_searches_end(ends_of_language, language, "(c) SmolLM2, rho0 0.40")
    mean_bounds(bounds, sweeps)
    for axis in (rho, ends_of_toy, ends_of_language, bounds):
        axis.legend(loc="upper center", bbox_to_anchor=(0.5, -0.15))
    return figure


def rho_before_the_search(axis, lines: pd.DataFrame, name: str, style: str, aside: float) -> None:
    """Draw the mean over batches, and bars that hold 80 % of them."""
    of_batches = lines.groupby("update")["rho_start"]
    mean = of_batches.mean()
    bars = [mean - of_batches.quantile(0.1), of_batches.quantile(0.9) - mean]
    label = f"{name}: mean, and 80 % of the batches"
    axis.errorbar(mean.index + aside, mean, bars, fmt=style, capsize=3, label=label)


def where_searches_end(axis, lines: pd.DataFrame, title: str) -> None:
    """Draw the shares of searches that end at the end, inside or at the start as stacked bars."""
    searched = lines.query("update > 0")
    shares = tables.searches(searched, ["update"])
    looks = {
        "searches at end": ("0.4", "", "end at [0.9, 3.0]"),
        "searches inside": ("white", "xxxx", "end between"),
        "searches at start": ("0.85", "//", "never leave [0.6, 1.2]"),
    }
    bottom = 0.0
    for place, (colour, hatch, label) in looks.items():
        look = {"color": colour, "hatch": hatch, "edgecolor": "black", "label": label}
        axis.bar(shares.index, shares[place], bottom=bottom, **look)
        bottom = bottom + shares[place]
    axis.set(title=f"{title}: {len(searched):,} searches", xticks=shares.index)
    axis.set(xlabel="update of a batch", ylabel="share of the searches")


def mean_bounds(axis, sweeps: tables.Sweeps) -> None:
    """Draw mean bounds of all searches, the line of a switch between two clips, and the paper."""
    search = PAPER_MAIN
    ends = [search.low_start, search.low_max], [search.high_start, search.high_max]
    axis.plot(*ends, "k-", lw=1, label="a switch between [0.6, 1.2] and [0.9, 3.0]")
    every = pd.concat(sweeps, names=["sweep"]).dropna(subset="searches at start")
    means = every.groupby(["method", "sweep"])[["mean low", "mean high"]].mean()
    of_language = means.index.get_level_values("sweep").isin(tables.LANGUAGE_MODEL)
    for methods, (marker, label) in SCOPES.items():
        chosen = means[~of_language & means.index.get_level_values("method").str.match(methods)]
        axis.plot(chosen["mean low"], chosen["mean high"], marker, mfc="none", ms=6, label=label)
    label = {"textcoords": "offset points", "fontsize": 8, "arrowprops": {"arrowstyle": "-"}}
    for run, name in NAMES.items():
        axis.annotate(name, means.loc[run], (10, -28), **label)
    look = {"mfc": "none", "ms": 11, "mew": 2, "label": "SmolLM2: a search per update"}
    axis.plot(means["mean low"][of_language], means["mean high"][of_language], "C5D", **look)
    label = "the paper's Fig. 8 (upper bound: 1.8 to 2.2)"
    axis.errorbar(0.7, 2.0, 0.2, fmt="k*", ms=12, capsize=3, label=label)
    axis.set(title="(d) mean bounds", xlabel="mean lower bound", ylabel="mean upper bound")


def over(sweep: pd.DataFrame, x: str, outcomes: list[str]) -> Figure:
    """Draw panels of outcomes over the column x, with a line per method."""
    figure = Figure((9.4, 6), layout="constrained")
    for axis, outcome in zip(figure.subplots(2, len(outcomes) // 2).flat, outcomes):
        values = sweep.set_index(x, append=True)[outcome].unstack(plot.RUN)
        plot.means(axis, values)
        axis.set(title=TITLES[outcome], xlabel=x, xscale="log")
        axis.set_xticks(values.index, values.index)
        axis.minorticks_off()
    plot.legend(figure)
    return figure


def over_rates(sweeps: tables.Sweeps) -> Figure:
    """Draw the outcomes over the learning rate, on the seeds 138 to 149."""
    rates = [sweeps[f"rate-{rate}"].assign(**{RATE: float(rate) * 1e4}) for rate in RATES]
    return over(pd.concat(rates).query("seed >= 138").round({RATE: 2}), RATE, OF_RATES)


def over_updates(sweeps: tables.Sweeps) -> Figure:
    """Draw the outcomes over the number of updates on a batch."""
    runs = sweeps["rate-3e-4"].query("seed <= 133")
    before = runs.query("method == @plot.START").filter(["norm", "mean@16", "pass@8"])
    sweep = runs.reset_index("method")
    sweep[["method", UPDATES]] = sweep["method"].str.extract(r"^(grpo|bapo)@(\d+)$")
    sweep = sweep.dropna(subset="method").set_index("method", append=True)
    sweep = sweep.astype({UPDATES: int}).swaplevel()
    # It has no number of updates, so its line goes from one end to the other.
    level = [before.assign(**{UPDATES: end}) for end in (1, 16)]
    return over(pd.concat([sweep, *level]), UPDATES, OF_RATES)


def over_bounds(sweeps: tables.Sweeps) -> Figure:
    """Draw the outcomes of fixed bounds: a line per upper bound over the lower one."""
    sweep = sweeps["bounds"].dropna(subset="mean low").reset_index("method")
    sweep["method"] = "upper bound " + sweep["mean high"].round(2).astype(str)
    sweep[LOWER] = sweep["mean low"].round(2)
    return over(sweep.set_index("method", append=True), LOWER, OF_BOUNDS)


def main(results) -> None:
    """Draw all pictures."""
    packs = tables.read_packs(results)
    sweeps = tables.read_sweeps(packs)
    figures = {
        "curves": front(packs, sweeps),
        "switch": switch(packs, sweeps),
        "rates": over_rates(sweeps),
        "staleness": over_updates(sweeps),
        "bounds": over_bounds(sweeps),
        "language_model": language_model(packs),
    }
    for name, figure in figures.items():
        figure.savefig(results / f"figures/{name}.png", bbox_inches="tight")


if __name__ == "__main__":
    main(tables.ROOT / "results")
