"""The paper's figures in small: run what is missing, draw, and state every difference with its interval.

    python figures.py 2               # or 4 5 6 7 8 9 10 11 12, rule, collapse, settings; several at once; "all"
    python figures.py all --short     # two seeds and 12 steps each: minutes, to look at the machinery
    python figures.py all --draw      # train nothing: draw from results/figures again

Every figure is made of experiments: train.py with the options in EXPERIMENTS, in runs/figures/EXPERIMENT. A run that is
on disk is not repeated, one that was killed is continued. Then all of an experiment's metrics are packed into
results/figures/EXPERIMENT, and pictures and results/figures/differences.md are drawn from there.

A difference is the mean over seeds of (arm - other arm) with the same seed, and Student's 95 % confidence interval. An
interval that holds 0 is called unresolved.
"""

import argparse
import sys
from functools import cache
from pathlib import Path
from typing import Callable, NamedTuple

import matplotlib.pyplot as plt
import numpy as np
from scipy import stats

import plot
import train

FIVE, THREE = [0, 1, 2, 3, 4], [0, 1, 2]
MAIN, OCTO, MIXED = "bapo-main@8", "bapo-octothinker@8", "bapo@8"  # MIXED: [.8, .9] x [1.2, 3.0], rho0 .45
# Each BAPO arm at U = 8, fixed at the mean of the bounds that it used (over seeds and updates).
OWN_MEANS = {MIXED: "0.89-2.87@8", MAIN: "0.65-1.55@8", OCTO: "0.89-1.96@8"}


class Experiment(NamedTuple):
    """A folder of runs: train.py with these arms, seeds and options."""

    methods: list[str]
    seeds: list[int]
    options: dict[str, object] = {}


BASE = ["grpo@1", "grpo@2", "grpo@4", "grpo@8", "clip-higher@2", "clip-higher@4", "clip-higher@8", "bapo@2", "bapo@4"]
END = "0.9-3.0@8"  # the end of MIXED's range, where it stays most of the time
BASE += [MIXED, MAIN, OCTO, "0.8-1.5@8", "0.5-1.2@8", "0.9-1.5@8", END, *OWN_MEANS.values()]
RANGES = ["grpo@1", "grpo@8", MIXED, MAIN, OCTO, "0.9-1.5@8"]
EXPERIMENTS = {
    "base": Experiment(BASE, FIVE),
    "equal_updates": Experiment(["grpo@1"], FIVE, {"steps": 480, "checkpoint_every": 40}),
    # A learning rate at which eight updates per batch break GRPO.
    "high_lr": Experiment(
        ["grpo@1", "grpo@8", "clip-higher@8", MIXED, MAIN, OCTO, "0.8-1.5@8", "0.5-1.2@8", "0.9-1.5@8", "0.9-3.0@8"],
        FIVE,
        {"learning_rate": 3e-4},
    ),
    "tokens": Experiment(["0-1000@8"], THREE, {"save_tokens": 256}),
    # Other natural positive shares: one attempt (right and wrong responses equally long), three attempts.
    "attempts1": Experiment(RANGES, THREE, {"attempts": 1, "max_new_tokens": 16}),
    "attempts3": Experiment(RANGES, THREE, {"attempts": 3, "max_new_tokens": 40}),
    "fresh": Experiment(["grpo@8", MIXED], THREE, {"mini_batches": 8, "prompts_per_step": 128}),
    "search_parts8": Experiment([MIXED, MAIN], THREE, {"search_parts": 8}),
    "surrogate": Experiment([MIXED, MAIN], THREE, {"contribution": "surrogate"}),
    "sequence_mean": Experiment(["grpo@8", MIXED], THREE, {"aggregation": "sequence-mean"}),
    "clip02": Experiment(["grpo@8", MIXED], THREE, {"max_grad_norm": 0.2}),  # 1.0 would hardly ever bind
    "partial8": Experiment(["grpo@4", "bapo@4"], THREE, {"attempts": 3, "max_new_tokens": 40, "partial_budget": 8}),
    "partial16": Experiment(["grpo@4", "bapo@4"], THREE, {"attempts": 3, "max_new_tokens": 40, "partial_budget": 16}),
}
AT_END = {"reward": "reward at end", "entropy": "entropy at end"}
METRICS = ["reward", "entropy", "grad_norm", "greedy", "mean@16", "pass@8", "pass@16"]


# ---------------------------------------------------------------- data
@cache
def load(results: Path, experiment: str) -> dict[str, list[plot.RunMetrics]]:
    """Runs of a packed experiment by arm."""
    return plot.by_arm(plot.load(results / experiment))


def value(run: plot.RunMetrics, metric: str) -> float:
    """One number of a run: reward and entropy over the last ten steps, the largest gradient norm, or a held-out accuracy."""
    if metric in ("reward", "entropy"):
        return run.summary(metric, np.mean, plot.LAST_STEPS)
    if metric == "grad_norm":
        return run.summary(metric, np.max)
    return run.final[metric]


class Difference(NamedTuple):
    """A paired difference with its 95 % interval, mean ± half."""

    mean: float
    half: float  # half the width of the 95 % interval
    seeds: int

    def __str__(self) -> str:
        verdict = " (unresolved)" if abs(self.mean) <= self.half else ""
        return f"{self.mean:+.3f} ± {self.half:.3f}{verdict}"


def difference(arm: list[plot.RunMetrics], other: list[plot.RunMetrics], metric: str) -> Difference:
    """Mean of arm - other over the seeds that both have, with its 95 % interval."""
    of_other = {run.seed: value(run, metric) for run in other}
    gaps = np.array([value(run, metric) - of_other[run.seed] for run in arm if run.seed in of_other])
    half = stats.t.ppf(0.975, len(gaps) - 1) * gaps.std(ddof=1) / np.sqrt(len(gaps)) if len(gaps) > 1 else np.nan
    return Difference(gaps.mean(), half, len(gaps))


COMPARISONS = [
    # (heading, [(experiment, arm, experiment of the other, other arm)])
    (
        "Fig. 2: staleness, against on-policy GRPO at equal steps, then at equal updates",
        [("base", f"grpo@{u}", "base", "grpo@1") for u in (2, 4, 8)] + [("base", "grpo@8", "equal_updates", "grpo@1")],
    ),
    ("Fig. 7: fixed bounds, against [0.8, 1.2]", [("base", a, "base", "grpo@8") for a in ("0.8-1.5@8", "0.5-1.2@8")]),
    (
        "Fig. 9: BAPO's ranges and the fixed pairs at 8 updates, against GRPO",
        [("base", a, "base", "grpo@8") for a in (MIXED, MAIN, OCTO, "clip-higher@8", "0.9-1.5@8", END, *OWN_MEANS.values())],
    ),
    (
        "Figs. 2, 7 and 9 at learning rate 3e-4: against GRPO at 8 updates",
        [("high_lr", a, "high_lr", "grpo@8") for a in EXPERIMENTS["high_lr"].methods if a != "grpo@8"],
    ),
    ("At learning rate 3e-4: each BAPO arm against the fixed pair [0.9, 1.5]", [("high_lr", a, "high_lr", "0.9-1.5@8") for a in (MIXED, MAIN, OCTO)]),
    ("Adaptivity: the default range against its end, [0.9, 3.0]", [("base", MIXED, "base", END)]),
    ("The same at learning rate 3e-4", [("high_lr", MIXED, "high_lr", END)]),
    ("Adaptivity: each BAPO arm against its own mean bounds", [("base", a, "base", b) for a, b in OWN_MEANS.items()]),
    ("Adaptivity: each BAPO arm against the fixed pair [0.9, 1.5]", [("base", a, "base", "0.9-1.5@8") for a in OWN_MEANS]),
    (
        "Fig. 11: BAPO ([0.8, 0.9] x [1.2, 3.0], rho0 0.45) against GRPO and Clip-Higher at 2, 4, 8 updates",
        [("base", f"bapo@{u}", "base", f"{other}@{u}") for u in (2, 4, 8) for other in ("grpo", "clip-higher")],
    ),
    *(
        (
            f"Natural share {share}: BAPO's ranges against GRPO, and against [0.9, 1.5]",
            [(e, a, e, b) for b in ("grpo@8", "0.9-1.5@8") for a in (MIXED, MAIN, OCTO)],
        )
        for e, share in (("attempts1", "0.50 (one attempt)"), ("attempts3", "0.37 (three attempts)"))
    ),
    ("Scope: search in 8 parts against the whole batch", [("search_parts8", a, "base", a) for a in (MIXED, MAIN)]),
    ("Contribution: surrogate against gradient", [("surrogate", a, "base", a) for a in (MIXED, MAIN)]),
    ("Aggregation: sequence-mean against token-mean", [("sequence_mean", a, "base", a) for a in ("grpo@8", MIXED)]),
    ("Aggregation: BAPO against GRPO under sequence-mean", [("sequence_mean", MIXED, "sequence_mean", "grpo@8")]),
    (
        "Gradient norm clipped at 0.2: against none; BAPO against GRPO",
        [("clip02", a, "base", a) for a in ("grpo@8", MIXED)] + [("clip02", MIXED, "clip02", "grpo@8")],
    ),
    (
        "Staleness by 8 fresh mini-batches of a batch of 128 prompts: BAPO against GRPO, and each against reuse of 16 prompts",
        [("fresh", MIXED, "fresh", "grpo@8")] + [("fresh", a, "base", a) for a in ("grpo@8", MIXED)],
    ),
    *((f"Fig. 12: partial rollouts, budget {b}: BAPO against GRPO, 4 updates", [(f"partial{b}", "bapo@4", f"partial{b}", "grpo@4")]) for b in (8, 16)),
]  # fmt: skip


def differences(results: Path) -> str:
    """All comparisons whose experiments are there, and a table of every arm's means, as Markdown."""
    text = ["# Differences and means", "", "Made by `python figures.py`; see there for what an interval is.", ""]
    there = {path.name for path in results.iterdir() if (path / "runs.json").exists()}
    for heading, pairs in COMPARISONS:
        rows = []
        for experiment, arm, other_experiment, other in pairs:
            if (
                {experiment, other_experiment} <= there
                and arm in load(results, experiment)
                and other in load(results, other_experiment)
            ):
                arms = load(results, experiment)[arm], load(results, other_experiment)[other]
                gaps = [difference(*arms, metric) for metric in METRICS]
                names = [name if e == "base" else f"{name} ({e})" for e, name in ((experiment, arm), (other_experiment, other))]
                rows.append(f"| {names[0]} − {names[1]} | {gaps[0].seeds} | " + " | ".join(map(str, gaps)) + " |")
        if rows:
            head = ["difference", "seeds", *(AT_END.get(m, m if m != "grad_norm" else "max grad norm") for m in METRICS)]
            text += [f"## {heading}", "", "| " + " | ".join(head) + " |", "| --- " * len(head) + "|", *rows, ""]
    for experiment in EXPERIMENTS:
        if experiment in there:
            runs = [run for group in load(results, experiment).values() for run in group]
            text += [
                f"## Means: {experiment}",
                "",
                f"train.py {' '.join(train_arguments(experiment)[4:])}",
                "",
                *plot.table(runs, None),
                "",
            ]
    return "\n".join(text)


# ---------------------------------------------------------------- pictures
def series(runs: list[plot.RunMetrics], metric: str) -> np.ndarray:
    """[seeds, steps]: the mean over a step's updates; of the gradient norm the largest; "clipped" is both sides together."""
    if metric == "clipped":
        return plot.over_seeds(runs, "clip_fraction_high") + plot.over_seeds(runs, "clip_fraction_low")
    return plot.over_seeds(runs, metric, np.max if metric == "grad_norm" else np.mean)


def panel(axis, arms: dict[str, list[plot.RunMetrics]], metric: str, title: str, against: str = "step") -> None:
    """One metric of several arms against steps or updates; rewards smoothed over five steps (or as many updates as that is)."""
    most = max(runs[0].config["updates_per_batch"] for runs in arms.values())
    for label, runs in arms.items():
        values, updates = series(runs, metric), runs[0].config["updates_per_batch"]
        width = 5 if against == "step" else 5 * most // updates
        x = np.arange(1, values.shape[1] + 1) * (updates if against == "update" else 1)
        plot.band(axis, x, plot.smooth(values, width) if metric == "reward" else values, label)
    axis.set_title(title, fontsize=10)
    axis.set_xlabel({"step": "step (batch of rollouts)", "update": "update"}[against])
    axis.grid(alpha=0.3)
    if metric == "grad_norm":
        axis.set_yscale("log")


def curves(arms: dict[str, list[plot.RunMetrics]], panels: list[tuple[str, str]], rows: int = 1) -> plt.Figure:
    """One panel per (metric, title), a curve per arm."""
    columns = -(-len(panels) // rows)
    figure, axes = plt.subplots(rows, columns, figsize=(4.6 * columns, 3.6 * rows), squeeze=False, constrained_layout=True)
    for axis, (metric, title) in zip(axes.flat, panels):
        panel(axis, arms, metric, title)
    axes[0, 0].legend(fontsize=8)
    return figure


FOUR = [("reward", "reward (mean of 5 steps)"), ("entropy", "entropy (nats per token)"), ("clipped", "share of clipped tokens"), ("grad_norm", "gradient norm (largest of a step)")]  # fmt: skip


def figure2(results: Path) -> plt.Figure:
    """GRPO at 1, 2, 4, 8 updates per batch: against steps (above) and against updates (below, with on-policy at equal updates)."""
    base, equal = load(results, "base"), load(results, "equal_updates")["grpo@1"]
    arms = {f"GRPO, {u} update(s)": base[f"grpo@{u}"] for u in (1, 2, 4, 8)}
    figure, axes = plt.subplots(2, 4, figsize=(18.4, 7.2), constrained_layout=True)
    for column, (metric, title) in enumerate(FOUR):
        panel(axes[0, column], arms, metric, title)
        panel(axes[1, column], {**arms, "GRPO, 1 update, more steps": equal}, metric, title, against="update")
    axes[0, 0].legend(fontsize=8)
    axes[1, 0].legend(fontsize=8)
    return figure


def figure4(results: Path) -> plt.Figure:
    """GRPO at 8 updates: share of the loss, and of the tokens, by sign of the advantage."""
    runs = load(results, "base")["grpo@8"]
    figure, axes = plt.subplots(1, 2, figsize=(9.5, 3.6), constrained_layout=True)
    rho, positive = plot.over_seeds(runs, "rho"), plot.over_seeds(runs, "positive_tokens")
    for axis, share, title in ((axes[0], rho, "share of the policy-gradient loss"), (axes[1], positive, "share of tokens")):
        x = np.arange(1, share.shape[1] + 1)
        plot.band(axis, x, 1 - share, "negative")
        plot.band(axis, x, share, "positive")
        axis.set(title=f"{title} (GRPO, 8 updates)", xlabel="step (batch of rollouts)")
        axis.legend()
        axis.grid(alpha=0.3)
    return figure


def token_columns(results: Path) -> dict[str, np.ndarray]:
    """The saved tokens of experiment "tokens": one array per column."""
    lines = plot.read_csv(results / "tokens" / "tokens.csv.gz")
    return {
        name: np.array([line[name] for line in lines])
        for name in ("sign", "ratio", "probability", "rollout_probability", "entropy")
    }


def figure5(results: Path) -> plt.Figure:
    """Token probability by importance-ratio bucket and sign, without clipping ([0, 1000]), last update of each step."""
    tokens = token_columns(results)
    figure, axes = plt.subplots(1, 2, figsize=(10, 3.6), constrained_layout=True, sharey=True)
    buckets = [0, 0.2, 0.4, 0.6, 0.8, 0.9, 0.97, 1.03, 1.1, 1.2, 1.4, 1.6, 2.0, np.inf]
    for axis, sign, title in ((axes[0], -1, "A < 0"), (axes[1], 1, "A > 0")):
        chosen = tokens["sign"] == sign
        where = np.digitize(tokens["ratio"][chosen], buckets) - 1
        for name, offset in (("rollout_probability", -0.2), ("probability", 0.2)):
            means = [
                tokens[name][chosen][where == i].mean() if (where == i).sum() >= 10 else np.nan for i in range(len(buckets) - 1)
            ]
            axis.bar(np.arange(len(means)) + offset, means, 0.4, label={"probability": "policy"}.get(name, "rollout policy"))
        labels = [f"{a}–{b}" for a, b in zip(buckets, buckets[1:])]
        axis.set_xticks(range(len(labels)), labels, rotation=60, fontsize=7)
        axis.set(
            title=f"{title}: mean token probability by importance ratio", xlabel="importance ratio (buckets of ≥ 10 tokens)"
        )
        axis.legend(fontsize=8)
    return figure


def figure6(results: Path) -> plt.Figure:
    """Mean response length of right and wrong responses (all samples, also of groups that are dropped), GRPO."""
    figure, axes = plt.subplots(1, 2, figsize=(9.5, 3.6), constrained_layout=True, sharey=True)
    for axis, arm in zip(axes, ("grpo@1", "grpo@8")):
        for metric, label in (("length_wrong", "wrong"), ("length_correct", "right")):
            values = plot.over_seeds(load(results, "base")[arm], metric)
            plot.band(axis, np.arange(1, values.shape[1] + 1), values, label)
        axis.set(title=f"response length (tokens), {arm}", xlabel="step (batch of rollouts)")
        axis.legend()
        axis.grid(alpha=0.3)
    return figure


def figure7(results: Path) -> plt.Figure:
    """Fixed bounds at 8 updates."""
    base = load(results, "base")
    arms = {
        "[0.8, 1.5]": base["0.8-1.5@8"],
        "[0.8, 1.2]": base["grpo@8"],
        "[0.5, 1.2]": base["0.5-1.2@8"],
        "[0.9, 1.5]": base["0.9-1.5@8"],
    }
    return curves(arms, FOUR)


def figure8(results: Path) -> plt.Figure:
    """BAPO's bounds over time (mean over the updates of a step), and their distribution over updates."""
    base = load(results, "base")
    figure, axes = plt.subplots(3, 3, figsize=(13, 9.5), constrained_layout=True)
    for column, (arm, title) in enumerate(
        ((MIXED, "[.8,.9]×[1.2,3.0], ρ0 .45"), (MAIN, "[.6,.9]×[1.2,3.0], ρ0 .4"), (OCTO, "[.8,.9]×[1.2,2.0], ρ0 .45"))
    ):
        for side, color in (("high", "C0"), ("low", "C1")):
            values = plot.over_seeds(base[arm], side)
            plot.band(axes[0, column], np.arange(1, values.shape[1] + 1), values, side, color=color)
        axes[0, column].set(title=title, xlabel="step", ylim=(0.5, 3.1))
        axes[0, column].legend(fontsize=8)
        for row, side, bins in ((1, "high", np.arange(1.175, 3.05, 0.05)), (2, "low", np.arange(0.59, 0.93, 0.02))):
            lines = [line for run in base[arm] for line in run.lines if side in line]
            first = [line[side] for line in lines if line["update"] == 1]
            later = [line[side] for line in lines if line["update"] > 1]
            axes[row, column].hist(
                [later, first], bins=bins, stacked=True, label=["later updates", "first update on a batch (r = 1)"]
            )
            axes[row, column].set(xlabel=f"{side} bound", ylabel="updates", yscale="log")
        axes[1, column].legend(fontsize=8)
    return figure


def figure9(results: Path) -> plt.Figure:
    """BAPO's ranges, GRPO, Clip-Higher, and the controls at 8 updates."""
    base = load(results, "base")
    names = {
        "GRPO": "grpo@8",
        "Clip-Higher": "clip-higher@8",
        "BAPO [.8,.9]×[1.2,3], .45": MIXED,
        "BAPO main": MAIN,
        "BAPO OctoThinker": OCTO,
    }
    names |= {f"fixed at its means {OWN_MEANS[MIXED][:-2]}": OWN_MEANS[MIXED], "fixed [0.9, 1.5]": "0.9-1.5@8"}
    panels = [FOUR[0], FOUR[1], ("rho", "positive contribution ρ at the bounds used"), FOUR[3]]
    return curves({label: base[arm] for label, arm in names.items() if arm in base}, panels, rows=2)


def figure_collapse(results: Path) -> plt.Figure:
    """The same at learning rate 3e-4, where eight updates per batch break GRPO."""
    arms = load(results, "high_lr")
    names = {"GRPO, on-policy": "grpo@1", "GRPO": "grpo@8", "Clip-Higher": "clip-higher@8", "BAPO [.8,.9]×[1.2,3], .45": MIXED}
    names |= {"BAPO main": MAIN, "BAPO OctoThinker": OCTO, "fixed [0.9, 1.5]": "0.9-1.5@8"}
    panels = [FOUR[0], FOUR[1], ("rho", "positive contribution ρ at the bounds used"), FOUR[3]]
    return curves({label: arms[arm] for label, arm in names.items()}, panels, rows=2)


def figure10(results: Path) -> plt.Figure:
    """Importance ratio, token probability and token entropy of single tokens."""
    tokens = token_columns(results)
    figure, axes = plt.subplots(1, 2, figsize=(10, 4), constrained_layout=True)
    for axis, name in zip(axes, ("probability", "entropy")):
        for sign, label in ((-1, "A < 0"), (1, "A > 0")):
            chosen = tokens["sign"] == sign
            axis.scatter(tokens["ratio"][chosen], tokens[name][chosen], s=3, alpha=0.3, label=label, rasterized=True)
        beyond = (tokens["ratio"] > 4).mean()
        axis.set(xlabel=f"importance ratio ({beyond:.1%} of the tokens are beyond 4)", ylabel=f"token {name}", xlim=(0, 4))
        axis.legend(fontsize=8)
    return figure


def figure11(results: Path) -> plt.Figure:
    """Held-out accuracy against staleness."""
    base, metrics = load(results, "base"), ("greedy", "mean@16", "pass@8", "pass@16")
    figure, axes = plt.subplots(1, 4, figsize=(15, 3.6), constrained_layout=True)
    for axis, metric in zip(axes, metrics):
        for offset, method in ((-0.1, "grpo"), (0.0, "clip-higher"), (0.1, "bapo")):
            found = np.array([[run.final[metric] for run in base[f"{method}@{u}"]] for u in (2, 4, 8)])
            axis.errorbar(
                np.arange(3) + offset, found.mean(1), found.std(1, ddof=1) if found.shape[1] > 1 else 0, fmt="o-", label=method
            )
        axis.axhline(
            np.mean([run.final[metric] for run in base["grpo@1"]]), color="0.5", linestyle=":", label="grpo, on-policy"
        )
        axis.set_xticks(range(3), ["2", "4", "8"])
        axis.set(title=f"held-out {metric}", xlabel="updates per batch")
    axes[0].legend(fontsize=8)
    return figure


def figure12(results: Path) -> plt.Figure:
    """Partial rollouts at two budgets, 4 updates."""
    arms = {f"{m}, budget {b}": load(results, f"partial{b}")[f"{m}@4"] for b in (8, 16) for m in ("grpo", "bapo")}
    return curves(arms, [FOUR[0], FOUR[1], ("token_age_mean", "mean token age (versions)"), ("mixed_trajectories", "share of trajectories of several policies")])  # fmt: skip


def rule_pairs(runs: list[plot.RunMetrics]) -> tuple[np.ndarray, np.ndarray]:
    """Predicted (-covariance) and actual change of the entropy on the same tokens, from each update to the next on its batch."""
    pairs = [
        (-now["entropy_rule"], after["entropy_now"] - now["entropy_now"])
        for run in runs
        for now, after in zip(run.lines, run.lines[1:])
        if now["step"] == after["step"] and "entropy_rule" in now and "entropy_rule" in after
    ]
    return tuple(np.array(pairs).T)


def figure_rule(results: Path) -> plt.Figure:
    """The Entropy-Clip Rule's prediction against the change of entropy that followed, update by update (AdamW steps)."""
    base = load(results, "base")
    figure, axes = plt.subplots(1, 3, figsize=(13, 3.8), constrained_layout=True)
    for axis, arm in zip(axes, ("grpo@8", "clip-higher@8", MIXED)):
        predicted, actual = rule_pairs(base[arm])
        per_seed = [stats.spearmanr(*rule_pairs([run])).statistic for run in base[arm]]
        r = stats.pearsonr(predicted, actual).statistic
        spread = f" ± {np.std(per_seed, ddof=1):.2f}" if len(per_seed) > 1 else ""
        axis.scatter(predicted, actual, s=4, alpha=0.3, rasterized=True)
        axis.axhline(0, color="0.6", linewidth=0.8)
        axis.axvline(0, color="0.6", linewidth=0.8)
        axis.set(title=f"{arm}: r = {r:.2f}, rank r = {np.mean(per_seed):.2f}{spread}", xlabel="prediction: −mean of r (log π + H) A X", ylabel="change of entropy")  # fmt: skip
    return figure


class Picture(NamedTuple):
    """What a figure needs, and how it is drawn."""

    experiments: list[str]
    draw: Callable[[Path], plt.Figure] | None  # None: only differences


PICTURES = {
    "2": Picture(["base", "equal_updates"], figure2),
    "4": Picture(["base"], figure4),
    "5": Picture(["tokens"], figure5),
    "6": Picture(["base"], figure6),
    "7": Picture(["base"], figure7),
    "8": Picture(["base"], figure8),
    "9": Picture(["base"], figure9),
    "10": Picture(["tokens"], figure10),
    "11": Picture(["base"], figure11),
    "12": Picture(["partial8", "partial16"], figure12),
    "rule": Picture(["base"], figure_rule),
    "collapse": Picture(["high_lr"], figure_collapse),
    "settings": Picture([name for name in EXPERIMENTS if name not in ("tokens", "partial8", "partial16")], None),
}


# ---------------------------------------------------------------- the command
def train_arguments(experiment: str, runs: str = "runs/figures", short: bool = False) -> list[str]:
    """The command line of train.py that makes an experiment."""
    methods, seeds, options = EXPERIMENTS[experiment]
    options = options | ({"steps": options.get("steps", 60) // 5, "warm_start_steps": 300} if short else {})
    warm_start = f"{runs}/warm-start-{options.get('attempts', 2)}"
    arguments = ["--output_dir", f"{runs}/{experiment}", "--warm_start_dir", warm_start, "--methods", *methods]
    arguments += ["--seeds", *map(str, seeds[:2] if short else seeds)]
    return arguments + [word for name, option in options.items() for word in (f"--{name}", str(option))]


def main(arguments: list[str] | None = None) -> int:
    """The command line. Returns the exit status: 0, or 1 if a run failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("figures", nargs="+", choices=[*PICTURES, "all"])
    parser.add_argument("--short", action="store_true", help="two seeds, 12 steps, a short warm start; into runs/figures-short")
    parser.add_argument("--draw", action="store_true", help="train nothing, draw from what results/figures holds")
    options = parser.parse_args(arguments)
    chosen = list(PICTURES) if "all" in options.figures else options.figures
    runs = "runs/figures-short" if options.short else "runs/figures"
    results = Path(runs) / "results" if options.short else Path("results/figures")
    if not options.draw:
        for experiment in dict.fromkeys(name for figure in chosen for name in PICTURES[figure].experiments):
            status = train.main([*train_arguments(experiment, runs, options.short), "--resume"])
            if status:
                return status
            plot.pack(Path(runs) / experiment, results / experiment)
    for figure in chosen:
        if PICTURES[figure].draw:
            plot.save(PICTURES[figure].draw(results), results / f"figure{figure}.png")
    (results / "differences.md").write_text(differences(results))
    print(f"pictures and differences.md are in {results}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
