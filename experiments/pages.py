"""Tables and findings on the pages: made of packed metrics, and written between marks.

A page has a line `<!-- table NAME -->` or `<!-- text NAME -->`, and further down `<!-- end -->`;
what stands between them is replaced by the table or the text of that name, once its runs are
packed. So words such as "as in the paper" or "not resolved" are computed, too.
"""

import math
import re
import textwrap
from dataclasses import dataclass
from pathlib import Path

import analysis
import figures
import numpy as np
from analysis import PRIMARY, Settings, difference, markdown, percent
from scipy import stats

from support import run_metrics
from support.run_metrics import RunMetrics, cell, outcomes

MARKED = re.compile(r"(<!-- (table|text) (\S+) -->\n).*?(<!-- end -->)", re.S)


# ---------------------------------------------------------------- the paper's figures
@dataclass(frozen=True)
class Claim:
    """What a figure of the paper shows, as an outcome of one place less that of another."""

    figure: str
    paper: str
    picture: str
    arm: str  # place
    other: str  # place
    outcome: str
    sign: int  # of the difference, in the paper


CLAIMS = [
    Claim(
        "2",
        "8 updates on a batch end with less reward than 1",
        "figure2",
        "default grpo@8",
        "default grpo@1",
        "reward",
        -1,
    ),
    Claim(
        "2",
        "and the entropy falls lower",
        "figure2",
        "default grpo@8",
        "default grpo@1",
        "lowest_entropy",
        -1,
    ),
    Claim(
        "2",
        "and the norm rises",
        "figure2",
        "default grpo@8",
        "default grpo@1",
        "grad_norm",
        +1,
    ),
    Claim(
        "7",
        "[0.8, 1.5] ends with more reward than [0.8, 1.2] (three starts)",
        "figure7",
        "fixed 0.8-1.5@8",
        "default grpo@8",
        "reward",
        +1,
    ),
    Claim(
        "7",
        "and more entropy (three starts)",
        "figure7",
        "fixed 0.8-1.5@8",
        "default grpo@8",
        "entropy",
        +1,
    ),
    Claim(
        "7",
        "[0.5, 1.2] ends with less reward (three starts)",
        "figure7",
        "fixed 0.5-1.2@8",
        "default grpo@8",
        "reward",
        -1,
    ),
    Claim(
        "7",
        "and less entropy (three starts)",
        "figure7",
        "fixed 0.5-1.2@8",
        "default grpo@8",
        "entropy",
        -1,
    ),
    Claim(
        "12",
        "partial rollouts: more reward than GRPO (`bapo-gate@4`, 14 tokens, harder case)",
        "figure12",
        "figures/budget-14 bapo-gate@4",
        "figures/budget-14 grpo@4",
        "reward",
        +1,
    ),
    Claim(
        "12",
        "and more entropy",
        "figure12",
        "figures/budget-14 bapo-gate@4",
        "figures/budget-14 grpo@4",
        "entropy",
        +1,
    ),
]


def judged(gap: analysis.Difference, sign: int) -> str:
    """Whether a difference is the paper's: its 95 % interval decides."""
    if math.isnan(gap.half) or abs(gap.mean) <= gap.half:
        return "not resolved"
    return "as in the paper" if gap.mean * sign > 0 else "the reverse"


def link(figure: str, picture: str) -> str:
    """A figure's number as a link to its picture."""
    return f"[{figure}](figures/{picture}.png)"


def figures_table(settings: Settings) -> list[list[str]]:
    """The paper's figures but for 9 and 13, row by row. What is not packed is left out."""
    rows = []
    for claim in CLAIMS:
        if claim.arm in settings.loaded and claim.other in settings.loaded:
            runs = settings.find(claim.arm)
            gap = difference(runs, settings.find(claim.other), claim.outcome)
            name = link(claim.figure, claim.picture)
            rows.append([name, claim.paper, str(gap), judged(gap, claim.sign)])
    if "default grpo@8" in settings.loaded:
        rows += shares_and_lengths(settings.find("default grpo@8"))
    if (settings.results / "figures/tokens/tokens.jsonl").exists():
        rows.append(probabilities(settings))
    if "default bapo-main@8" in settings.loaded:
        rows.append(ends_of_the_range(settings))
    if "four-attempts grpo@8" in settings.loaded:
        rows.append(rule(settings))
    rows.sort(key=lambda row: figure_number(row[0]))
    header = ["figure", "the paper shows", "here", "verdict"]
    return [header, *rows]


def figure_number(name: str) -> int:
    """For sorting: the figure's number; equations come after all figures."""
    return 1000 if "Eqs" in name else int(re.search(r"\d+", name)[0])


def against_zero(values: list[float], runs: list[RunMetrics]) -> analysis.Difference:
    """A value of every run as a difference to 0."""
    mean, half = run_metrics.interval(values, runs)
    return analysis.Difference(float(mean), float(half), math.nan, len(runs))


def shares_and_lengths(runs: list[RunMetrics]) -> list[list[str]]:
    """Figures 4 and 6: negative tokens carry most of the gradient; wrong responses are longer."""
    shares = [0.5 - run.outcome("gradient_share") for run in runs]
    longer = []
    for run in runs:
        longer.append(run.outcome("length_wrong") - run.outcome("length_correct"))
    share_gap = against_zero(shares, runs)
    length_gap = against_zero(longer, runs)
    return [
        [
            link("4", "figure4"),
            "negative tokens carry more than half of the gradient (here: their share − 0.5)",
            str(share_gap),
            judged(share_gap, +1),
        ],
        [
            link("6", "figure6"),
            "wrong responses are longer (tokens)",
            str(length_gap),
            judged(length_gap, +1),
        ],
    ]


def probabilities(settings: Settings) -> list[str]:
    """Figure 5: tokens whose ratio is far from 1 were drawn with less probability."""
    near = []
    far = []
    for sign in (-1, 1):
        columns = figures.tokens(settings, sign)
        ratio = columns["ratio"]
        drawn_with = columns["rollout_probability"]
        near.append(drawn_with[(ratio >= 0.97) & (ratio < 1.03)].mean())
        far.append(drawn_with[(ratio < 0.8) | (ratio > 1.2)].mean())
    verdict = "as in the paper" if max(far) < min(near) else "the reverse"
    return [
        link("5", "figure5"),
        "tokens with ratios far from 1 were less probable (means: far, near; harder case)",
        f"{np.mean(far):.2f}, {np.mean(near):.2f}",
        verdict,
    ]


def ends_of_the_range(settings: Settings) -> list[str]:
    """Figure 8: where the main range's bounds are."""
    place = "default bapo-main@8"
    at_the_start = share_of_updates(settings, place, "at the start")
    at_the_end = share_of_updates(settings, place, "at the end")
    between = 1 - at_the_start - at_the_end
    verdict = "as in the paper" if between > 0.5 else "only their means: updates are at its ends"
    return [
        link("8", "figure8"),
        "bounds are inside the range (`bapo-main@8`: updates at its start, at its end)",
        f"{percent(at_the_start)}, {percent(at_the_end)}",
        verdict,
    ]


def share_of_updates(settings: Settings, place: str, state: str) -> float:
    """The share of a place's updates whose search stopped in a state of figures.STATES."""
    runs = settings.find(place)
    shares = figures.shares_of_states(runs, figures.RANGES[place], together=10**6)
    return float(shares[state][0])


def rule(settings: Settings) -> list[str]:
    """Equations 6 and 7: what the rule predicts, and what the entropy does."""
    runs = settings.find("four-attempts grpo@8")
    ranks = [stats.spearmanr(*figures.rule_pairs([run])).statistic for run in runs]
    gap = against_zero(ranks, runs)
    return [
        link("Eqs. 6, 7", "rule"),
        "the rule predicts the change of the entropy (rank correlation, harder case)",
        cell(ranks, runs, 2),
        judged(gap, +1),
    ]


# ---------------------------------------------------------------- BAPO against GRPO
@dataclass(frozen=True)
class Row:
    """BAPO's runs and GRPO's beside them."""

    label: str
    arm: str
    grpo: str


OCTOTHINKER_HARD = "rescue bapo-octothinker@8"
BAPO_ROWS = [
    Row("Fig. 9: `bapo-main@8`, 2e-4", "default bapo-main@8", "default grpo@8"),
    Row("`bapo-main@8`, 3e-4", "rate/0.0003 bapo-main@8", "rate/0.0003 grpo@8"),
    Row("`bapo-main@8`, 4e-4, 60 steps", "map-attempts/2 bapo-main@8", "map-attempts/2 grpo@8"),
    Row("`bapo-main@2x4`, authors' scheme", "scheme bapo-main@2x4", "scheme grpo@2x4"),
    Row("`bapo-main@8`, four attempts", "four-attempts bapo-main@8", "four-attempts grpo@8"),
    Row("Fig. 13: `bapo-octothinker@8`, 2e-4", "default bapo-octothinker@8", "default grpo@8"),
    Row(
        "`bapo-octothinker@8`, 4e-4, 240 steps",
        "rate/0.0004 bapo-octothinker@8",
        "rate/0.0004 grpo@8",
    ),
    Row("`bapo-octothinker@8`, four attempts", OCTOTHINKER_HARD, "four-attempts grpo@8"),
    Row("gradients: `bapo@8`, 2e-4", "default bapo@8", "default grpo@8"),
    Row("`bapo@8`, 1e-4", "rate/0.0001 bapo@8", "rate/0.0001 grpo@8"),
    Row("`bapo@8`, 3e-4", "rate/0.0003 bapo@8", "rate/0.0003 grpo@8"),
    Row("`bapo@2x4`, authors' scheme", "scheme bapo@2x4", "scheme grpo@2x4"),
    Row("beyond the paper: `bapo-gate@8`, 2e-4", "default bapo-gate@8", "default grpo@8"),
    Row("`bapo-gate@8`, 1e-4", "rate/0.0001 bapo-gate@8", "rate/0.0001 grpo@8"),
    Row("`bapo-gate@8`, 3e-4", "rate/0.0003 bapo-gate@8", "rate/0.0003 grpo@8"),
    Row("`bapo-gate@2x4`, authors' scheme", "scheme bapo-gate@2x4", "scheme grpo@2x4"),
    Row(
        "`bapo+high3@8` (App. A's, upper bound up to 3.0), 4e-4, 240 steps",
        "fig9-long bapo+high3@8",
        "fig9-long grpo@8",
    ),
    Row("`bapo-gate@8`, four attempts", "four-attempts bapo-gate@8", "four-attempts grpo@8"),
]
IN_THE_PAPER = {"reward": +1, "entropy": +1, "grad_norm": -1, "gradient_share": +1, PRIMARY: +1}
BAPO_OUTCOMES = ["reward", "entropy", "grad_norm", "gradient_share", PRIMARY, "pass@8"]


def bapo_table(settings: Settings) -> list[list[str]]:
    """BAPO − GRPO. Bold: resolved, as in the paper; italic: resolved, the reverse."""
    directions = {+1: "higher", -1: "lower", 0: "–"}
    paper = [directions[IN_THE_PAPER.get(name, 0)] for name in BAPO_OUTCOMES]
    headings = [analysis.HEADINGS[name] for name in BAPO_OUTCOMES]
    rows = [["BAPO − GRPO", "pairs", *headings], ["the paper", "", *paper]]
    for row in BAPO_ROWS:
        if row.arm in settings.loaded and row.grpo in settings.loaded:
            runs = settings.find(row.arm)
            others = settings.find(row.grpo)
            gaps = [difference(runs, others, name) for name in BAPO_OUTCOMES]
            cells = []
            for name, gap in zip(BAPO_OUTCOMES, gaps):
                cells.append(marked(gap, IN_THE_PAPER.get(name, 0)))
            rows.append([row.label, str(gaps[0].pairs), *cells])
    return rows


def marked(gap: analysis.Difference, sign: int) -> str:
    """A difference, bold where it is resolved as in the paper, italic where the reverse is."""
    verdict = judged(gap, sign) if sign else "not resolved"
    if verdict == "as in the paper":
        return f"**{gap}**"
    if verdict == "the reverse":
        return f"*{gap}*"
    return str(gap)


FRONT_COLUMNS = {  # heading -> arm of the default experiment
    "main range as printed (Fig. 9), `bapo-main`": "default bapo-main@8",
    "App. A's as printed (Fig. 13), `bapo-octothinker`": "default bapo-octothinker@8",
    "App. A's by the gradient, `bapo`": "default bapo@8",
    "beyond the paper: `bapo-gate`": "default bapo-gate@8",
}
FRONT_ROWS = {  # outcome -> what it is called, and what the paper shows
    "entropy": ("entropy at the end", "stays higher", +1),
    "grad_norm": ("gradient norm, 95th percentile", "lower", -1),
    "gradient_share": ("positive share of the gradient", "higher", +1),
    "reward": ("reward at the end", "higher", +1),
    PRIMARY: ("held-out mean@16", "higher", +1),
    "pass@8": ("held-out pass@8", "not shown", 0),
}


def front_table(settings: Settings) -> list[list[str]]:
    """BAPO − GRPO in the default experiment: what the paper shows, and whether it shows here."""
    rows = [["BAPO − GRPO, 8 updates on each batch", "paper", *FRONT_COLUMNS]]
    for outcome, (name, paper, sign) in FRONT_ROWS.items():
        cells = []
        for heading, arm in FRONT_COLUMNS.items():
            gap = difference(settings.find(arm), settings.find("default grpo@8"), outcome)
            is_the_paper_s = not heading.startswith("beyond the paper")
            cells.append(f"{gap}: {front_verdict(gap, sign if is_the_paper_s else 0)}")
        rows.append([name, paper, *cells])
    return rows


def front_verdict(gap: analysis.Difference, sign: int) -> str:
    """One or two words on a difference; sign 0: the paper does not show it."""
    if sign:
        words = {"as in the paper": "**reproduces**", "the reverse": "*the reverse*"}
        return words.get(judged(gap, sign), "not resolved")
    if judged(gap, +1) == "as in the paper":
        return "higher"
    if judged(gap, -1) == "as in the paper":
        return "lower"
    return "not resolved"


def default_table(settings: Settings) -> list[list[str]]:
    """The default experiment: every arm's outcomes, and its collapses."""
    settings.find("default grpo@8")
    arms = settings.arms["default"]
    starts = settings.starts["default"]
    names = [PRIMARY, "pass@8", "entropy", "grad_norm", "gradient_share"]
    rows = [["arm", *(analysis.HEADINGS[name] for name in names), "collapsed"]]
    before = run_metrics.start_runs(starts)
    cells = [cell(outcomes(before, name), before) for name in names]
    rows.append(["before RL", *cells, "–"])
    for arm, runs in arms.items():
        cells = [cell(outcomes(runs, name), runs) for name in names]
        count = analysis.collapses(settings, f"default {arm}")
        rows.append([f"`{arm}`", *cells, f"{count} of {len(runs)}"])
    return rows


# ---------------------------------------------------------------- the harder case
def map_table(settings: Settings) -> list[list[str]]:
    """Stale GRPO and on-policy GRPO over rates and numbers of attempts."""
    header = ["four attempts unless named", f"`grpo@1`: {PRIMARY}, end − start"]
    header += ["`grpo@8`", "collapsed", "`grpo@8`: positive share"]
    rows = [header]
    for label, folder in {
        "rate 5e-5": "map-lr/5e-05",
        "rate 1e-4": "map-lr/0.0001",
        "rate 2e-4": "map-lr/0.0002",
        "rate 4e-4": "four-attempts",
        "two attempts, 4e-4": "map-attempts/2",
        "one attempt, 4e-4": "map-attempts/1",
    }.items():
        row = [label]
        for arm in ("grpo@1", "grpo@8"):
            place = f"{folder} {arm}"
            gap = difference(settings.find(place), settings.before(place), PRIMARY)
            row.append(str(gap))
        stale = settings.find(f"{folder} grpo@8")
        row.append(f"{analysis.collapses(settings, f'{folder} grpo@8')} of {len(stale)}")
        row.append(cell(outcomes(stale, "gradient_share"), stale))
        rows.append(row)
    return rows


IMBALANCE = {  # name -> place, harder case
    "`grpo@1`, on-policy": "four-attempts grpo@1",
    "`grpo@2`": "map-reuse grpo@2",
    "8 updates on fresh parts, 8 × the samples": "map-reuse/fresh grpo@1x8",
    "`grpo@8`": "four-attempts grpo@8",
    "`grpo@8`, 0.7 × the rate": "rescue/lr-0.00028 grpo@8",
    "`grpo@8`, negatives scaled to share 0.50": "rescue grpo+share0.50@8",
    "`grpo@8`, positive tokens alone": "rescue grpo+share1@8",
    "`bapo-gate@8`": "four-attempts bapo-gate@8",
    "fixed [1.02, 3.0]": "four-attempts 1.02-3.0@8",
}


def imbalance_table(settings: Settings) -> list[list[str]]:
    """Balance, movement and harm, harder case."""
    header = ["four attempts, 4e-4", "positive share"]
    header.append("KL to the policy that drew the tokens, median of updates")
    rows = [[*header, f"{PRIMARY}: end − start", "collapsed"]]
    for label, place in IMBALANCE.items():
        runs = settings.find(place)
        gap = difference(runs, settings.before(place), PRIMARY)
        # The first update on a batch has KL 0: with one or two updates, so has the median.
        median_kl = "–"
        if not place.endswith(("@1", "@2")):
            median_kl = cell(outcomes(runs, "median_kl"), runs, 4)
        rows.append(
            [
                label,
                cell(outcomes(runs, "gradient_share"), runs),
                median_kl,
                str(gap),
                f"{analysis.collapses(settings, place)} of {len(runs)}",
            ]
        )
    return rows


def neighbours_table(settings: Settings) -> list[list[str]]:
    """The neighbours: each at its best rate, and what it does at a rate that is too high."""
    header, *rows = analysis.bench(settings)
    column = {name: i for i, name in enumerate(header)}
    short = [["method", "rate", PRIMARY, "− `grpo@8` (Holm)", "collapsed at 4e-4"]]
    for row in rows:
        place = f"objectives-screen/{analysis.SCREENED[-1]} {row[0]}"
        screened = row[column[f"{PRIMARY} at 0.0004"]] != "–"
        collapsed = f"{analysis.collapses(settings, place)} of 2" if screened else "–"
        cells = [row[column[name]] for name in ("best rate", PRIMARY, "− grpo@8 (Holm)")]
        short.append([f"`{row[0]}`", *cells, collapsed])
    return short


TABLES = {
    "front": front_table,
    "figures": figures_table,
    "bapo": bapo_table,
    "default": default_table,
    "tests": analysis.named_tests,
    "map": map_table,
    "imbalance": imbalance_table,
    "rule": analysis.rule_for_the_default,
    "neighbours": neighbours_table,
}


# ---------------------------------------------------------------- findings
AIMS = {"entropy": "entropy", PRIMARY: "mean@16", "pass@8": "pass@8"}


def paragraph(sentences: list[str]) -> str:
    """Sentences in lines of at most 120 letters."""
    return textwrap.fill(" ".join(sentences), 120, break_on_hyphens=False)


def ranges_text(settings: Settings) -> str:
    """The picture of the nine ranges, and for every aim the range that serves it best."""
    pairs = analysis.range_pairs(settings)
    sentences = []
    for outcome, name in AIMS.items():
        means = {}
        runs_of = {}
        for low in analysis.RANGE_LOWS:
            for high in analysis.RANGE_HIGHS:
                runs = figures.of_pairs(settings.find(analysis.range_place(low, high)), pairs)
                runs_of[f"[{low}, {high}]"] = runs
                means[f"[{low}, {high}]"] = np.mean(outcomes(runs, outcome))
        best = max(means, key=means.get)
        sentence = f"For {name}, bounds up to {best} end highest"
        if best != DEFAULT_RANGE:
            gap = difference(runs_of[best], runs_of[DEFAULT_RANGE], outcome)
            sentence += f", {gap} from the default range up to {DEFAULT_RANGE}"
        sentences.append(sentence + ".")
    rows = markdown(analysis.ranges_table(settings))
    picture = "![entropy, mean@16 and pass@8 of nine ranges](ranges/ranges.png)"
    effects = markdown(analysis.range_effects_table(settings))
    caution = "That is the best of nine, which the intervals do not count: a hint, no finding."
    return "\n".join([picture, "", *effects, "", paragraph([*sentences, caution]), "", *rows])


DEFAULT_RANGE = "[0.9, 2.0]"


def certainty(gap: analysis.Difference) -> str:
    """ "resolved" where the interval excludes 0."""
    return "resolved" if abs(gap.mean) > gap.half else "not resolved"


def controls_text(settings: Settings) -> str:
    """Whether App. A's range does more than its own end as fixed bounds, in the default setting."""
    searched = settings.find("default bapo@8")
    fixed = settings.find("default/controls 0.9-2.0@8")
    gaps = []
    for outcome, name in {**AIMS, "grad_norm": "the gradient's norm"}.items():
        gap = difference(searched, fixed, outcome)
        gaps.append(f"{name} {gap} ({certainty(gap)})")
    rows = markdown(analysis.controls_table(settings))
    at_the_end = share_of_updates(settings, "default bapo@8", "at the end")
    sentences = [
        f"The search stops at the end of its range in {percent(at_the_end)} of the updates of all "
        f"{len(searched)} runs of `bapo@8`.",
        f"BAPO less that end as fixed bounds: {', '.join(gaps)}.",
    ]
    return "\n".join([*rows, "", paragraph(sentences)])


def scheme_text(settings: Settings) -> str:
    """Whether the search matters: BAPO against its own bounds in another order, and fixed ones."""
    differ, compared = analysis.yoked_differ(settings)
    control = "a control" if differ >= compared / 3 else "no control, as was named before"
    sentences = [
        f"Of the yoked bounds {percent(differ / compared)} are not those that the run itself had "
        f"at that step and update, so they are {control}.",
    ]
    comparisons = analysis.adaptation_table(settings)
    resolved = []
    for row in comparisons[1:]:
        if row[3] == "< 0.001" or float(row[3]) < 0.05:
            resolved.append(f"{row[0]}: {row[1]}")
    if resolved:
        sentences.append(f"Resolved in mean@16 after Holm: {'; '.join(resolved)}.")
    else:
        sentences.append("None of the three differences in mean@16 is resolved after Holm.")
    searched = settings.find("scheme bapo-main@2x4")
    at_the_end = settings.find("scheme 0.9-3.0@2x4")
    higher = []
    for outcome in ("pass@8", "entropy"):
        gap = difference(at_the_end, searched, outcome)
        if gap.mean > gap.half:
            higher.append(outcome)
    if higher:
        sentences.append(
            "Exploratory: the fixed bounds at the end of the range end higher than the search in "
            f"{' and '.join(higher)}."
        )
    rows = markdown(analysis.scheme_table(settings))
    picture = "![the authors' scheme](scheme/scheme.png)"
    return "\n".join([picture, "", *rows, "", *markdown(comparisons), "", paragraph(sentences)])


TEXTS = {"ranges": ranges_text, "controls": controls_text, "scheme": scheme_text}


# ---------------------------------------------------------------- filling in
def filled(page: str, settings: Settings) -> str:
    """A page with all that is marked made anew; what lacks packed runs stays as it is.

    Raises ValueError for a mark of an unknown name.
    """

    def made(match: re.Match) -> str:
        before, kind, name, after = match.groups()
        makers = TABLES if kind == "table" else TEXTS
        if name not in makers:
            raise ValueError(f"{kind} {name} is none of {', '.join(makers)}")
        try:
            content = makers[name](settings)
        except FileNotFoundError:
            return match[0]
        if kind == "table":
            content = "\n".join(markdown(content))
        return f"{before}\n{content}\n\n{after}"

    return MARKED.sub(made, page)


def fill_in(path: Path, settings: Settings) -> None:
    """Make the tables of a page anew, if there is such a page."""
    if path.exists():
        path.write_text(filled(path.read_text(), settings))
