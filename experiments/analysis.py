"""Differences between arms, as Markdown tables.

Named before the runs: the primary outcome is held-out mean@16 at the end. Differences are paired by warm start and seed and
averaged within a warm start; Student's 95 % intervals are over warm starts; p-values are two-sided, and corrected after Holm
within their table. All else is exploratory.
"""

import json
import re
from pathlib import Path
from typing import NamedTuple

import numpy as np
from scipy import stats

from support import plot

PRIMARY, EXPLORATORY = "mean@16", ("pass@8", "reward", "entropy", "grad_norm", "gradient_share", "kl")
COLLAPSE = 0.05  # an arm collapses if it ends further than this below its warm start
SCREENED = (1e-4, 2e-4, 4e-4)  # learning rates of the neighbours' screening; the last is the four-attempt experiment's
MARGIN = 0.03  # it follows on-policy training if the 90 % interval of the difference lies within this


class Difference(NamedTuple):
    """Its mean, half the width of its interval, the p-value of none, and the number of pairs."""

    mean: float
    half: float
    p: float
    pairs: int

    def __str__(self) -> str:
        return f"{self.mean:+.3f}" + ("" if np.isnan(self.half) else f" ± {self.half:.3f}")


def difference(runs: list[plot.RunMetrics], others: list[plot.RunMetrics], outcome: str, level: float = 0.95) -> Difference:
    """Of runs - others with the same warm start and seed; NaN where there are none."""
    of_others = {run.pair(): run.outcome(outcome) for run in others}
    paired = [run for run in runs if run.pair() in of_others]
    mean, half = plot.interval([run.outcome(outcome) - of_others[run.pair()] for run in paired], paired, level)
    starts = len({run.pair()[0] for run in paired})
    free = (starts if starts > 1 else len(paired)) - 1
    t = mean / half * stats.t.ppf((1 + level) / 2, free) if half > 0 else np.nan
    return Difference(float(mean), float(half), float(2 * stats.t.sf(abs(t), free)), len(paired))


def holm(p_values: list[float]) -> list[float]:
    """Holm's step-down correction; NaN stay, and do not count."""
    known = [i for i in np.argsort(p_values, kind="stable") if not np.isnan(p_values[i])]
    corrected, largest = list(p_values), 0.0
    for rank, i in enumerate(known):
        largest = corrected[i] = max(largest, min(1.0, (len(known) - rank) * p_values[i]))
    return corrected


class Settings:
    """Packed experiments by place: FOLDER ARM, such as "map-lr/0.0001 bapo-gate@8"."""

    def __init__(self, results: Path):
        folders = {path.parent.relative_to(results).as_posix(): path.parent for path in sorted(results.rglob("runs.json"))}
        self.loaded, self.starts, self.results = {}, {}, results
        for name, folder in folders.items():
            arms, self.starts[name] = plot.load(folder)
            self.loaded |= {f"{name} {arm}": runs for arm, runs in arms.items()}

    def find(self, place: str) -> list[plot.RunMetrics]:
        if place not in self.loaded:
            raise FileNotFoundError(f"{place} is not in {self.results}")
        return self.loaded[place]

    def before(self, place: str) -> list[plot.RunMetrics]:
        """What the warm starts of these runs reach, held out, as runs."""
        starts = self.starts[place.split()[0]]
        return [run._replace(final=starts.get(run.pair()[0], {}), lines=[]) for run in self.find(place)]

    def places(self, *experiments: str) -> list[str]:
        """All that is there of these experiments."""
        return [place for place in self.loaded if place.split()[0].split("/")[0] in experiments]


def reference(settings: Settings, place: str, arm: str) -> str:
    """Where an arm is in the setting of this place; in the neighbours' bench, each arm has a learning rate of its own."""
    folder = place.split()[0]
    if folder.startswith("objectives/") and folder != "objectives/partial":
        at = [there for there in settings.places("objectives") if re.fullmatch(rf"objectives/[\d.e-]+ {re.escape(arm)}", there)]
        return (at or [f"{folder} {arm}"])[0]
    others = {"rescue/attempts-1": "map-attempts/1", "rescue": "four-attempts", "map-reuse": "four-attempts"}
    others |= {"default/controls": "default", "ranges": "default", "fixed": "default", "scheme/yoked": "scheme"}
    return f"{others.get(folder) or others.get(folder.split('/')[0], folder)} {arm}"


def collapses(settings: Settings, place: str) -> int:
    """How many of these runs end further than COLLAPSE below their warm starts."""
    pairs = zip(settings.find(place), settings.before(place))
    return sum(end.outcome(PRIMARY) - start.outcome(PRIMARY) < -COLLAPSE for end, start in pairs)


def verdicts(settings: Settings, places: list[str]) -> list[list[str]]:
    """Rows: how each arm ends against its warm start, and against on-policy GRPO."""
    rows = [["arm", "runs", f"{PRIMARY}: end − start", "collapsed", "runs that did", "end − grpo@1 (90 %)", "follows it"]]
    for place in places:
        runs = settings.find(place)
        change = difference(runs, settings.before(place), PRIMARY)
        gap = difference(runs, settings.loaded.get(reference(settings, place, "grpo@1"), []), PRIMARY, 0.90)
        collapsed, follows = ("yes" if x else "no" for x in (change.mean < -COLLAPSE, abs(gap.mean) + gap.half <= MARGIN))
        compared = [str(gap), follows] if gap.pairs else ["–", "–"]
        rows.append([place, str(len(runs)), str(change), collapsed, str(collapses(settings, place)), *compared])
    return rows


def differences(settings: Settings, pairs: list[tuple[str, str]]) -> list[list[str]]:
    """Rows: arm - other arm, the primary outcome with its corrected p-value, and the exploratory ones."""
    rows = [["difference", "pairs", PRIMARY, "p (Holm)", *(f"{name} (expl.)" for name in EXPLORATORY)]]
    pairs = [pair for pair in pairs if pair[0] != pair[1] and settings.loaded.keys() >= set(pair)]
    found = [[difference(*map(settings.find, pair), name) for name in (PRIMARY, *EXPLORATORY)] for pair in pairs]
    for (one, other), gaps, p in zip(pairs, found, holm([gaps[0].p for gaps in found])):
        primary, *exploratory = map(str, gaps)
        corrected = "–" if np.isnan(p) else f"{p:.3f}" if p >= 0.001 else "< 0.001"
        rows.append([f"{one} − {other}", str(gaps[0].pairs), primary, corrected, *exploratory])
    return rows


def best_rates(results: Path) -> dict[str, float]:
    """Arm -> the learning rate at which it ended highest in the screening. Empty before all of it is packed."""
    paths, ended = {rate: results / f"objectives-screen/{rate}/runs.json" for rate in SCREENED}, {}
    for rate, path in paths.items() if all(path.exists() for path in paths.values()) else ():
        for run in json.loads(path.read_text())["runs"].values():
            ended.setdefault(run["config"]["arm"], {}).setdefault(rate, []).append(run["final"][PRIMARY])
    return {arm: max(rates, key=lambda rate: np.mean(rates[rate])) for arm, rates in ended.items()}


def screening(settings: Settings) -> list[list[str]]:
    """Rows: each neighbour by learning rate, and more at the last one; the highest first."""

    def mean(place: str, name: str) -> str:
        return f"{np.mean([run.outcome(name) for run in settings.find(place)]):.3f}"

    last, rows = f"{SCREENED[-1]:g}", []
    for arm, best in best_rates(settings.results).items():
        places = [f"objectives-screen/{rate} {arm}" for rate in SCREENED]
        ends = [f"{mean(place, PRIMARY)} ({collapses(settings, place)})" for place in places]
        rows.append([arm, *ends, mean(places[-1], "pass@8"), mean(places[-1], "entropy"), f"{best:g}"])
    names = [*(f"{PRIMARY} at {rate:g}" for rate in SCREENED), f"pass@8 at {last}", f"entropy at {last}"]
    return [["method", *names, "best rate"], *sorted(rows, key=lambda row: max(row[1:4]), reverse=True)]


def bench(settings: Settings) -> list[list[str]]:
    """Rows: the neighbours' final runs against two of them, and beside those at a best rate the screening at the last rate; the
    highest first, then partial rollouts and SFPO."""
    (*_, ends, passes, entropies, best), *screened = screening(settings)
    names, places = (PRIMARY, "pass@8", "entropy"), settings.places("objectives")
    pairs = [[(place, reference(settings, place, other)) for place in places] for other in ("grpo@8", "bapo-gate@8")]
    gaps = [{row[0].split(" − ")[0]: f"{row[2]} ({row[3]})" for row in differences(settings, of_other)} for of_other in pairs]
    at_last, rows = {f"objectives/{float(row[-1])} {row[0]}": [row[-1], *row[-4:-1]] for row in screened}, []
    for place in places:
        runs, (folder, arm) = settings.find(place), place.split()
        rate, *last = at_last.get(place, [folder.split("/")[1], "–", "–", "–"])
        cells = [plot.cell([run.outcome(name) for run in runs], runs) for name in names]
        collapsed = f"{collapses(settings, place)} of {len(runs)}"
        rows.append([arm, rate, *cells, collapsed, *(of_other.get(place, "–") for of_other in gaps), *last])
    header = ["method", best, *names, "collapsed", "− grpo@8 (Holm)", "− bapo-gate@8 (Holm)", ends, passes, entropies]
    return [header, *sorted(rows, key=lambda row: (row[-1] != "–", row[2]), reverse=True)]


def document(settings: Settings, experiment: str) -> str:
    """All tables of an experiment, as Markdown."""
    places, text = settings.places(experiment), f"# {experiment}: differences\n\n{__doc__.split(chr(10), 2)[2]}"
    if experiment == "objectives-screen":
        tables, places = {"Means of two runs (and how many of them collapsed)": screening(settings)}, []
    elif experiment == "objectives":
        tables = {"The bench": bench(settings)}
    else:
        tables = {"Every arm": verdicts(settings, places)}
    if experiment == "rescue":
        places += [f"four-attempts {arm}@8" for arm in ("bapo-main", "1.02-3.0", "balanced", "grpo")]
    for other in ("grpo@8", "bapo-gate@8"):
        tables[f"Against {other}"] = differences(settings, [(place, reference(settings, place, other)) for place in places])
    pairs = [
        (place, place.replace(" bapo-gate", " grpo")) for place in places if not place.endswith("@8") and " bapo-gate" in place
    ]
    tables["bapo-gate against GRPO at as many updates"] = differences(settings, pairs)
    for heading, (header, *rows) in tables.items():
        lines = ["| " + " | ".join(row) + " |" for row in (header, ["---"] * len(header), *rows)]
        text += "\n".join(["", f"## {heading}", "", *lines, ""]) if rows else ""
    return text
