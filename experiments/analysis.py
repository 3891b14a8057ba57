"""Tables of the packed experiments: differences between arms, collapses, the tests named before.

A place is FOLDER ARM, such as "map-lr/0.0001 bapo-gate@8": an arm of one packed sweep. Differences
are paired by warm start and seed and averaged within a warm start; Student's 95 % intervals are
over warm starts; p-values are two-sided, and corrected after Holm within their table.
"""

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy import stats

from support import run_metrics
from support.run_metrics import RunMetrics

PRIMARY = "mean@16"  # the outcome that was named before the runs
EXPLORATORY = ["pass@8", "reward", "entropy", "grad_norm", "gradient_share", "kl"]
COLLAPSE = 0.05  # a run collapses if it ends further than this below its warm start
MARGIN = 0.03  # an arm follows on-policy training if the 90 % interval lies within this
SCREENED = [1e-4, 2e-4, 4e-4]  # learning rates of the neighbours' screening

# Sweeps without the arms that theirs are compared with -> where these are.
REFERENCES = {
    "rescue/attempts-1": "map-attempts/1",
    "rescue": "four-attempts",
    "map-reuse": "four-attempts",
    "default/controls": "default",
    "ranges": "default",
    "fixed": "default",
    "scheme/yoked": "scheme",
}

INTRODUCTION = """Differences are paired by warm start and seed and averaged within a warm start.
Intervals are Student's 95 % over warm starts. p-values are two-sided, and corrected after Holm
within their table. What was named before the runs stands in [protocol.md](../protocol.md); all
else is exploratory. The eight named tests of the default experiment are corrected over those eight
alone, in [tests.md](../default/tests.md), so that their p-values here are others."""

TESTS_INTRODUCTION = """The eight differences that [protocol.md](../protocol.md) named before the
runs, paired by warm start, with Student's 95 % interval. p-values are two-sided, and corrected
after Holm over exactly these eight. A difference is resolved if its corrected p-value is below
0.05. All other numbers of the experiment are exploratory."""


class Settings:
    """All packed experiments below a folder."""

    def __init__(self, results: Path):
        self.results = results
        self.loaded: dict[str, list[RunMetrics]] = {}  # place -> its runs
        self.starts: dict[str, dict[str, dict]] = {}  # folder -> warm start -> its accuracies
        self.arms: dict[str, run_metrics.Arms] = {}  # folder -> arm -> its runs
        for path in sorted(results.rglob("runs.json")):
            folder = path.parent.relative_to(results).as_posix()
            self.arms[folder], self.starts[folder] = run_metrics.load(path.parent)
            for arm, runs in self.arms[folder].items():
                self.loaded[f"{folder} {arm}"] = runs

    def find(self, place: str) -> list[RunMetrics]:
        """The runs of a place. Raises FileNotFoundError if they are not packed."""
        if place not in self.loaded:
            raise FileNotFoundError(f"{place} is not in {self.results}")
        return self.loaded[place]

    def before(self, place: str) -> list[RunMetrics]:
        """What the warm starts of these runs reach on held-out problems, as runs."""
        folder = place.split()[0]
        starts = self.starts[folder]
        before = []
        for run in self.find(place):
            before.append(RunMetrics(run.config, starts.get(run.warm_start(), {}), []))
        return before

    def places(self, *experiments: str) -> list[str]:
        """All places of these experiments: of "rescue" those of rescue/yoked, too."""
        return [place for place in self.loaded if experiment_of(place) in experiments]

    def mean(self, place: str, name: str) -> float:
        """The mean of an outcome over the runs of a place."""
        return float(np.mean(run_metrics.outcomes(self.find(place), name)))


def experiment_of(place: str) -> str:
    """ "rescue" for "rescue/yoked bapo-gate@8"."""
    return place.split()[0].partition("/")[0]


# ---------------------------------------------------------------- differences
@dataclass(frozen=True)
class Difference:
    """A paired difference: printed as mean ± half the width of its interval."""

    mean: float
    half: float  # NaN where there are fewer than two warm starts or seeds
    p: float  # two-sided, of no difference, not corrected
    pairs: int

    def __str__(self) -> str:
        if math.isnan(self.half):
            return f"{self.mean:+.3f}"
        return f"{self.mean:+.3f} ± {self.half:.3f}"


def difference(
    runs: list[RunMetrics], others: list[RunMetrics], outcome: str, level: float = 0.95
) -> Difference:
    """An outcome of `runs` minus that of `others` with the same warm start and seed.

    All numbers are NaN if there is no such pair.
    """
    gaps, paired = paired_gaps(runs, others, outcome)
    return difference_of(gaps, paired, level)


def paired_gaps(
    runs: list[RunMetrics], others: list[RunMetrics], outcome: str
) -> tuple[list[float], list[RunMetrics]]:
    """Each run's outcome minus that of its pair in `others`; and the runs that have a pair."""
    other_outcomes = {run.pair(): run.outcome(outcome) for run in others}
    paired = [run for run in runs if run.pair() in other_outcomes]
    gaps = [run.outcome(outcome) - other_outcomes[run.pair()] for run in paired]
    return gaps, paired


def difference_of(gaps: list[float], runs: list[RunMetrics], level: float = 0.95) -> Difference:
    """The mean of paired gaps, one per run, averaged within a warm start first."""
    mean, half = run_metrics.interval(gaps, runs, level)
    starts = len({run.warm_start() for run in runs})
    freedom = (starts if starts > 1 else len(runs)) - 1
    t = math.nan
    if half > 0:
        t = mean / half * stats.t.ppf((1 + level) / 2, freedom)
    p = 2 * stats.t.sf(abs(t), freedom)
    return Difference(float(mean), float(half), float(p), len(runs))


def holm(p_values: list[float]) -> list[float]:
    """Holm's step-down correction. NaN stay, and do not count."""
    known = [i for i in np.argsort(p_values, kind="stable") if not np.isnan(p_values[i])]
    corrected = list(p_values)
    largest = 0.0
    for rank, i in enumerate(known):
        multiplied = min(1.0, (len(known) - rank) * p_values[i])
        largest = max(largest, multiplied)
        corrected[i] = largest
    return corrected


def percent(share: float) -> str:
    """ "12 %" of 0.123."""
    return f"{100 * share:.0f} %"


def p_text(p: float) -> str:
    """A p-value with three decimals."""
    if math.isnan(p):
        return "–"
    return f"{p:.3f}" if p >= 0.001 else "< 0.001"


def reference(settings: Settings, place: str, arm: str) -> str:
    """Where an arm is that runs of this place are compared with: in the same setting.

    In the neighbours' bench every arm has a learning rate of its own, and so has this one.
    """
    folder = place.split()[0]
    if folder.startswith("objectives/") and folder != "objectives/partial":
        at_a_rate = re.compile(rf"objectives/[\d.e-]+ {re.escape(arm)}")
        for other in settings.places("objectives"):
            if at_a_rate.fullmatch(other):
                return other
    experiment = folder.split("/")[0]
    other_folder = REFERENCES.get(folder) or REFERENCES.get(experiment, folder)
    return f"{other_folder} {arm}"


def collapses(settings: Settings, place: str) -> int:
    """How many of these runs end further than COLLAPSE below their warm starts."""
    count = 0
    for end, start in zip(settings.find(place), settings.before(place)):
        if end.outcome(PRIMARY) - start.outcome(PRIMARY) < -COLLAPSE:
            count += 1
    return count


# ---------------------------------------------------------------- tables: lists of rows of cells
def verdicts(settings: Settings, places: list[str]) -> list[list[str]]:
    """How each arm ends against its warm start, and against on-policy GRPO."""
    rows = [
        [
            "arm",
            "runs",
            f"{PRIMARY}: end − start",
            "collapsed",
            "runs that did",
            "end − grpo@1 (90 %)",
            "follows it",
        ]
    ]
    for place in places:
        runs = settings.find(place)
        change = difference(runs, settings.before(place), PRIMARY)
        on_policy = settings.loaded.get(reference(settings, place, "grpo@1"), [])
        gap = difference(runs, on_policy, PRIMARY, level=0.90)
        follows = abs(gap.mean) + gap.half <= MARGIN
        rows.append(
            [
                place,
                str(len(runs)),
                str(change),
                yes_or_no(change.mean < -COLLAPSE),
                str(collapses(settings, place)),
                str(gap) if gap.pairs else "–",
                yes_or_no(follows) if gap.pairs else "–",
            ]
        )
    return rows


def yes_or_no(answer: bool) -> str:
    """ "yes" or "no"."""
    return "yes" if answer else "no"


def differences(settings: Settings, pairs: list[tuple[str, str]]) -> list[list[str]]:
    """Arm − other arm: the primary outcome, its corrected p-value, and the exploratory ones.

    Pairs of the same place, or of one that is not packed, are left out.
    """
    header = ["difference", "pairs", PRIMARY, "p (Holm)"]
    header += [f"{name} (expl.)" for name in EXPLORATORY]
    there = []
    for one, other in pairs:
        if one != other and one in settings.loaded and other in settings.loaded:
            there.append((one, other))
    primary = []
    for one, other in there:
        primary.append(difference(settings.find(one), settings.find(other), PRIMARY))
    corrected = holm([gap.p for gap in primary])
    rows = [header]
    for (one, other), gap, p in zip(there, primary, corrected):
        row = [f"{one} − {other}", str(gap.pairs), str(gap), p_text(p)]
        for name in EXPLORATORY:
            row.append(str(difference(settings.find(one), settings.find(other), name)))
        rows.append(row)
    return rows


@dataclass(frozen=True)
class NamedTest:
    """A difference that protocol.md names: arm − other of the default experiment."""

    outcome: str
    arm: str
    other: str
    direction: int  # the sign that was named; 0: none


NAMED_TESTS = [
    NamedTest("lowest_entropy", "grpo@8", "grpo@1", direction=-1),
    NamedTest("lowest_entropy", "bapo@8", "grpo@8", direction=+1),
    NamedTest("grad_norm", "bapo@8", "grpo@8", direction=-1),
    NamedTest("grad_norm", "bapo-gate@8", "grpo@8", direction=-1),
    NamedTest("pass@8", "bapo@8", "grpo@8", direction=+1),
    NamedTest("pass@8", "bapo-gate@8", "grpo@8", direction=+1),
    NamedTest("mean@16", "bapo-gate@8", "grpo@8", direction=+1),
    NamedTest("mean@16", "bapo@8", "grpo@8", direction=0),
]
OUTCOME_NAMES = {
    "lowest_entropy": "lowest 20-step mean of the entropy",
    "grad_norm": "gradient norm, 95th percentile",
    "pass@8": "held-out pass@8",
    "mean@16": "held-out mean@16",
}
DIRECTIONS = {-1: "below 0", 0: "none", +1: "above 0"}


def named_tests(settings: Settings) -> list[list[str]]:
    """The eight tests of protocol.md."""
    gaps = []
    for test in NAMED_TESTS:
        runs = settings.find(f"default {test.arm}")
        others = settings.find(f"default {test.other}")
        gaps.append(difference(runs, others, test.outcome))
    corrected = holm([gap.p for gap in gaps])
    rows = [["outcome", "difference", "named", "found", "pairs", "p", "p (Holm)", "verdict"]]
    for test, gap, p in zip(NAMED_TESTS, gaps, corrected):
        rows.append(
            [
                OUTCOME_NAMES[test.outcome],
                f"`{test.arm}` − `{test.other}`",
                DIRECTIONS[test.direction],
                str(gap),
                str(gap.pairs),
                p_text(gap.p),
                p_text(p),
                verdict(gap.mean, p, test.direction),
            ]
        )
    return rows


def verdict(mean: float, p: float, direction: int) -> str:
    """What a test says: "as named", "the reverse", "resolved" without a direction, or not."""
    if not p < 0.05:
        return "not resolved"
    if direction == 0:
        return "resolved"
    return "as named" if mean * direction > 0 else "resolved, the reverse"


def collapse_table(settings: Settings, *experiments: str) -> list[list[str]]:
    """How many runs of each arm collapse."""
    rows = [["setting", "arm", "collapsed"]]
    for place in settings.places(*experiments):
        folder, arm = place.split()
        count = f"{collapses(settings, place)} of {len(settings.find(place))}"
        rows.append([folder, f"`{arm}`", count])
    return rows


def primary_gaps(
    settings: Settings, pairs: list[tuple[str, str]]
) -> tuple[list[Difference], list[float]]:
    """One place minus another in the primary outcome, and the p-values after Holm over all."""
    gaps = []
    for one, other in pairs:
        gaps.append(difference(settings.find(one), settings.find(other), PRIMARY))
    return gaps, holm([gap.p for gap in gaps])


# What the rule for the default range asks (protocol.md): the setting, and bapo-gate@8 − what.
RULE_FOR_THE_DEFAULT = [
    ("share 0.35, default then", "four-attempts bapo-gate@8", "rescue bapo+high3@8"),
    ("share 0.35, main range", "four-attempts bapo-gate@8", "four-attempts bapo-main@8"),
    ("share 0.35, OctoThinker's", "four-attempts bapo-gate@8", "rescue bapo-octothinker@8"),
    ("share 0.41, main range", "map-attempts/2 bapo-gate@8", "map-attempts/2 bapo-main@8"),
    ("share 0.41, 240 steps, default then", "fig9-long bapo-gate@8", "fig9-long bapo+high3@8"),
    ("share 0.50, main range", "map-attempts/1 bapo-gate@8", "map-attempts/1 bapo-main@8"),
    ("on-policy, GRPO", "rescue bapo-gate@1", "four-attempts grpo@1"),
    ("yoked bounds", "four-attempts bapo-gate@8", "rescue/yoked bapo-gate@8"),
    ("GRPO, same rate", "four-attempts bapo-gate@8", "four-attempts grpo@8"),
    ("GRPO, 0.7 × the rate", "four-attempts bapo-gate@8", "rescue/lr-0.00028 grpo@8"),
    ("positive tokens alone", "four-attempts bapo-gate@8", "rescue grpo+share1@8"),
]


def rule_for_the_default(settings: Settings) -> list[list[str]]:
    """Every comparison that the rule for the default range asks for, Holm over exactly these."""
    pairs = [(one, other) for _, one, other in RULE_FOR_THE_DEFAULT]
    gaps, corrected = primary_gaps(settings, pairs)
    rows = [["against", "bapo-gate − it, mean@16", "p", "p (Holm)"]]
    for (against, _, _), gap, p in zip(RULE_FOR_THE_DEFAULT, gaps, corrected):
        rows.append([against, str(gap), p_text(gap.p), p_text(p)])
    return rows


MOVEMENT = {  # place -> its name on the page
    "four-attempts bapo-gate@8": "BAPO, lower bound up to 1.1",
    "four-attempts grpo@8": "GRPO",
    "rescue/lr-0.00028 grpo@8": "GRPO, 0.7 × the rate",
    "map-lr/0.0002 grpo@8": "GRPO, half the rate",
    "map-reuse grpo@2": "GRPO, 2 updates",
    "map-reuse/fresh grpo@1x8": "GRPO, 8 updates on fresh parts",
}


def movement_table(settings: Settings) -> list[list[str]]:
    """How far an update moves the policy, and what comes of it.

    The mean of the KL is made by few updates of few runs, its median is not.
    """
    rows = [["arm", "KL, mean of updates", "KL, median of updates", f"{PRIMARY}: end − start"]]
    for place, label in MOVEMENT.items():
        runs = settings.find(place)
        row = [label]
        for name in ("kl", "median_kl"):
            row.append(run_metrics.cell(run_metrics.outcomes(runs, name), runs, digits=4))
        row.append(str(difference(runs, settings.before(place), PRIMARY)))
        rows.append(row)
    return rows


# ---------------------------------------------------------------- the search
def yoked_differ(settings: Settings) -> tuple[int, int]:
    """How many yoked bounds are not those that the run itself had, and how many there are.

    Compared are the updates of the same step and number, in runs of the same warm start and seed.
    """
    own = {run.pair(): bounds_of(run) for run in settings.find("scheme bapo-main@2x4")}
    differ = 0
    compared = 0
    for run in settings.find("scheme/yoked bapo-main@2x4"):
        for update, bounds in bounds_of(run).items():
            if update in own[run.pair()]:
                compared += 1
                differ += bounds != own[run.pair()][update]
    return differ, compared


def bounds_of(run: RunMetrics) -> dict[tuple[int, int], tuple[float, float]]:
    """(step, update) -> (low, high)."""
    bounds = {}
    for line in run.lines:
        if "low" in line:
            update = int(line["step"]), int(line["update"])
            bounds[update] = round(line["low"], 4), round(line["high"], 4)
    return bounds


SCHEME = {  # place -> its name on the page
    "scheme grpo@1": "GRPO, on-policy",
    "scheme grpo@2x4": "GRPO",
    "scheme bapo-main@2x4": "BAPO, main range",
    "scheme/yoked bapo-main@2x4": "its bounds in another order",
    "scheme 0.6-1.2@2x4": "fixed at the range's start, [0.6, 1.2]",
    "scheme 0.9-3.0@2x4": "fixed at the range's end, [0.9, 3.0]",
    "scheme bapo@2x4": "BAPO, App. A range",
    "scheme bapo-gate@2x4": "BAPO, lower bound up to 1.1",
}
HEADINGS = {  # of columns on the pages
    "mean@16": "mean@16",
    "pass@8": "pass@8",
    "reward": "reward at end",
    "entropy": "entropy at end",
    "grad_norm": "gradient norm",
    "gradient_share": "positive share",
    "low": "mean low",
    "high": "mean high",
}
SCHEME_OUTCOMES = ["mean@16", "pass@8", "entropy", "grad_norm", "low", "high"]
RANGE_OUTCOMES = ["mean@16", "pass@8", "entropy", "grad_norm", "gradient_share", "low", "high"]


def outcome_rows(
    settings: Settings, places: dict[str, str], names: list[str], pairs: set | None = None
) -> list[list[str]]:
    """A row per place that is packed, under its name, and a column per outcome.

    pairs: the warm starts and seeds that count; None: all.
    """
    rows = [["arm", "runs", *(HEADINGS[name] for name in names)]]
    for place, label in places.items():
        if place in settings.loaded:
            runs = settings.find(place)
            if pairs is not None:
                runs = [run for run in runs if run.pair() in pairs]
            cells = [run_metrics.cell(run_metrics.outcomes(runs, name), runs) for name in names]
            rows.append([label, str(len(runs)), *cells])
    return rows


def scheme_table(settings: Settings) -> list[list[str]]:
    """The authors' scheme: outcomes of every arm."""
    return outcome_rows(settings, SCHEME, SCHEME_OUTCOMES)


SCHEME_CONTROLS = [  # of the main range; these three were named before the runs
    "scheme/yoked bapo-main@2x4",
    "scheme 0.6-1.2@2x4",
    "scheme 0.9-3.0@2x4",
]


def adaptation_table(settings: Settings) -> list[list[str]]:
    """BAPO's main range minus its controls in the authors' scheme, Holm over these three."""
    searched = settings.find("scheme bapo-main@2x4")
    pairs = [("scheme bapo-main@2x4", control) for control in SCHEME_CONTROLS]
    gaps, corrected = primary_gaps(settings, pairs)
    rows = [
        ["BAPO, main range, less", PRIMARY, "p", "p (Holm)", "pass@8 (expl.)", "entropy (expl.)"]
    ]
    for place, gap, p in zip(SCHEME_CONTROLS, gaps, corrected):
        row = [SCHEME[place], str(gap), p_text(gap.p), p_text(p)]
        for outcome in ("pass@8", "entropy"):
            row.append(str(difference(searched, settings.find(place), outcome)))
        rows.append(row)
    return rows


CONTROLS = {  # place -> its name on the page
    "default grpo@8": "GRPO, fixed [0.8, 1.2]",
    "default/controls clip-higher@8": "fixed [0.8, 1.28] (Clip-Higher)",
    "default/controls 0.9-2.0@8": "fixed at the range's end, [0.9, 2.0]",
    "default/controls 1.02-3.0@8": "fixed [1.02, 3.0]",
    "default bapo@8": "BAPO, App. A range",
}


def controls_table(settings: Settings) -> list[list[str]]:
    """The default experiment's App. A range beside fixed bounds, on the starts of the latter."""
    pairs = {run.pair() for run in settings.find("default/controls 0.9-2.0@8")}
    return outcome_rows(settings, CONTROLS, RANGE_OUTCOMES, pairs)


RANGE_LOWS = ["0.9", "0.98", "1.04"]
RANGE_HIGHS = ["1.2", "2.0", "3.0"]


def range_place(low: str, high: str) -> str:
    """Where BAPO's runs are whose bounds may rise to these."""
    if (low, high) == ("0.9", "2.0"):
        return "default bapo@8"  # its own range
    return f"ranges bapo+low{low}+high{high}@8"


def range_pairs(settings: Settings) -> set[tuple[str, int]]:
    """The warm starts and seeds of the sweep `ranges`. FileNotFoundError if it is not packed."""
    return {run.pair() for run in settings.find(range_place("0.9", "1.2"))}


def ranges_table(settings: Settings) -> list[list[str]]:
    """Nine ranges, and GRPO on the same starts."""
    places = {"default grpo@1": "GRPO, on-policy", "default grpo@8": "GRPO"}
    for low in RANGE_LOWS:
        for high in RANGE_HIGHS:
            places[range_place(low, high)] = f"up to [{low}, {high}]"
    return outcome_rows(settings, places, RANGE_OUTCOMES, range_pairs(settings))


RANGE_EFFECTS = {  # name on the page -> the places compared: one list less the other
    "lower bound up to 0.98 instead of 0.9": (
        [range_place("0.98", high) for high in RANGE_HIGHS],
        [range_place("0.9", high) for high in RANGE_HIGHS],
    ),
    "lower bound up to 1.04 instead of 0.9": (
        [range_place("1.04", high) for high in RANGE_HIGHS],
        [range_place("0.9", high) for high in RANGE_HIGHS],
    ),
    "upper bound up to 2.0 instead of 1.2": (
        [range_place(low, "2.0") for low in RANGE_LOWS],
        [range_place(low, "1.2") for low in RANGE_LOWS],
    ),
    "upper bound up to 3.0 instead of 1.2": (
        [range_place(low, "3.0") for low in RANGE_LOWS],
        [range_place(low, "1.2") for low in RANGE_LOWS],
    ),
}
RANGE_EFFECT_OUTCOMES = ["entropy", "mean@16", "pass@8", "grad_norm"]


def range_effect(settings: Settings, effect: str, outcome: str) -> Difference:
    """What one bound of the range does, averaged over the three values of the other."""
    gaps = []
    runs = []
    for place, other in zip(*RANGE_EFFECTS[effect]):
        gaps_of_place, paired = paired_gaps(settings.find(place), settings.find(other), outcome)
        gaps += gaps_of_place
        runs += paired
    return difference_of(gaps, runs)


def range_effects_table(settings: Settings) -> list[list[str]]:
    """Every effect on every outcome."""
    rows = [["mean over the other bound", *(HEADINGS[name] for name in RANGE_EFFECT_OUTCOMES)]]
    for effect in RANGE_EFFECTS:
        cells = []
        for outcome in RANGE_EFFECT_OUTCOMES:
            cells.append(str(range_effect(settings, effect, outcome)))
        rows.append([effect, *cells])
    return rows


# ---------------------------------------------------------------- the neighbours
def best_rates(results: Path) -> dict[str, float]:
    """Arm -> the learning rate at which it ended highest in the screening.

    Empty before all of the screening is packed.
    """
    paths = {rate: results / f"objectives-screen/{rate}/runs.json" for rate in SCREENED}
    if not all(path.exists() for path in paths.values()):
        return {}
    ended: dict[str, dict[float, list[float]]] = {}
    for rate, path in paths.items():
        for run in json.loads(path.read_text())["runs"].values():
            rates = ended.setdefault(run["config"]["arm"], {})
            rates.setdefault(rate, []).append(run["final"][PRIMARY])
    best = {}
    for arm, rates in ended.items():
        means = {rate: np.mean(ends) for rate, ends in rates.items()}
        best[arm] = max(means, key=means.get)
    return best


def screening(settings: Settings) -> list[list[str]]:
    """Each neighbour by learning rate, and more at the last one; the highest first."""
    last = f"{SCREENED[-1]:g}"
    header = ["method"]
    header += [f"{PRIMARY} at {rate:g}" for rate in SCREENED]
    header += [f"pass@8 at {last}", f"entropy at {last}", "best rate"]
    rows = []
    for arm, best in best_rates(settings.results).items():
        row = [arm]
        for rate in SCREENED:
            place = f"objectives-screen/{rate} {arm}"
            row.append(f"{settings.mean(place, PRIMARY):.3f} ({collapses(settings, place)})")
        place = f"objectives-screen/{SCREENED[-1]} {arm}"
        row.append(f"{settings.mean(place, 'pass@8'):.3f}")
        row.append(f"{settings.mean(place, 'entropy'):.3f}")
        row.append(f"{best:g}")
        rows.append(row)
    rows.sort(key=lambda row: max(row[1:4]), reverse=True)
    return [header, *rows]


def bench(settings: Settings) -> list[list[str]]:
    """The neighbours' final runs, each at its best rate, beside the screening at the last rate.

    The highest first; then partial rollouts and SFPO, which were not screened.
    """
    screened_header, *screened_rows = screening(settings)
    places = settings.places("objectives")
    to_grpo = corrected_differences(settings, places, "grpo@8")
    to_gate = corrected_differences(settings, places, "bapo-gate@8")
    screened = {}
    for row in screened_rows:
        arm, best = row[0], row[-1]
        screened[f"objectives/{float(best)} {arm}"] = row
    header = ["method", "best rate", PRIMARY, "pass@8", "entropy", "collapsed"]
    header += ["− grpo@8 (Holm)", "− bapo-gate@8 (Holm)", *screened_header[-4:-1]]
    with_rate = []
    without_rate = []
    for place in places:
        runs = settings.find(place)
        folder, arm = place.split()
        row = [arm, screened[place][-1] if place in screened else folder.split("/")[1]]
        for name in (PRIMARY, "pass@8", "entropy"):
            row.append(run_metrics.cell(run_metrics.outcomes(runs, name), runs))
        row.append(f"{collapses(settings, place)} of {len(runs)}")
        row.append(to_grpo.get(place, "–"))
        row.append(to_gate.get(place, "–"))
        if place in screened:
            with_rate.append([*row, *screened[place][-4:-1]])
        else:
            without_rate.append([*row, "–", "–", "–"])
    with_rate.sort(key=lambda row: row[2], reverse=True)
    without_rate.sort(key=lambda row: row[2], reverse=True)
    return [header, *with_rate, *without_rate]


def corrected_differences(settings: Settings, places: list[str], arm: str) -> dict[str, str]:
    """Place -> its difference to an arm in mean@16, with the corrected p-value in brackets."""
    pairs = [(place, reference(settings, place, arm)) for place in places]
    _, *rows = differences(settings, pairs)
    cells = {}
    for name, _, gap, p, *_ in rows:
        cells[name.split(" − ")[0]] = f"{gap} ({p})"
    return cells


# ---------------------------------------------------------------- pages
def tables_of(settings: Settings, experiment: str) -> dict[str, list[list[str]]]:
    """Heading -> rows: all tables of an experiment."""
    places = settings.places(experiment)
    if experiment == "objectives-screen":
        return {"Means of two runs (and how many of them collapsed)": screening(settings)}
    if experiment == "objectives":
        tables = {"The bench": bench(settings)}
    else:
        tables = {"Every arm": verdicts(settings, places)}
    if experiment == "rescue":
        add_if_packed(tables, "The rule for the default range", rule_for_the_default, settings)
        add_if_packed(tables, "How far an update moves", movement_table, settings)
        for arm in ("bapo-main@8", "1.02-3.0@8", "balanced@8", "grpo@8"):
            places.append(f"four-attempts {arm}")
    if experiment == "default":
        searched = "default bapo@8"
        fixed = [place for place in CONTROLS if place != searched]
        pairs = [(searched, place) for place in fixed if place in settings.loaded]
        tables["App. A's range against fixed bounds"] = differences(settings, pairs)
    if experiment == "scheme":
        tables["Outcomes"] = scheme_table(settings)
        add_if_packed(tables, "Does the search matter?", adaptation_table, settings)
    if experiment == "ranges":
        add_if_packed(tables, "Nine ranges", ranges_table, settings)
        add_if_packed(tables, "What each bound does", range_effects_table, settings)
    for other in ("grpo@8", "grpo@2x4", "bapo-gate@8"):
        pairs = [(place, reference(settings, place, other)) for place in places]
        tables[f"Against {other}"] = differences(settings, pairs)
    pairs = []
    for place in places:
        if " bapo-gate" in place and not place.endswith("@8"):
            pairs.append((place, place.replace(" bapo-gate", " grpo")))
    tables["bapo-gate against GRPO at as many updates"] = differences(settings, pairs)
    return tables


def add_if_packed(tables: dict, heading: str, make_rows, settings: Settings) -> None:
    """Add a table, unless runs that it needs are not packed."""
    try:
        tables[heading] = make_rows(settings)
    except FileNotFoundError:
        return


def markdown(rows: list[list[str]]) -> list[str]:
    """The lines of a Markdown table; the first row is its header."""
    header, *others = rows
    lines = [header, ["---"] * len(header), *others]
    return ["| " + " | ".join(cells) + " |" for cells in lines]


def document(settings: Settings, experiment: str) -> str:
    """The page differences.md of an experiment: all its tables that have rows."""
    parts = [f"# {experiment}: differences", "", INTRODUCTION, ""]
    if experiment == "scheme" and "scheme/yoked bapo-main@2x4" in settings.loaded:
        differ, compared = yoked_differ(settings)
        parts += [f"{differ} of {compared} yoked bounds are not those that the run itself had.", ""]
    for heading, rows in tables_of(settings, experiment).items():
        if len(rows) > 1:
            parts += [f"## {heading}", "", *markdown(rows), ""]
    return "\n".join(parts)


def tests_document(settings: Settings) -> str:
    """The page default/tests.md."""
    parts = ["# default: the tests that were named before", "", TESTS_INTRODUCTION, ""]
    parts += [*markdown(named_tests(settings)), ""]
    parts += ["## Collapses", ""]
    parts += [f"Runs that end more than {COLLAPSE} below their warm start in held-out mean@16.", ""]
    parts += [*markdown(collapse_table(settings, "default", "rate")), ""]
    return "\n".join(parts)
