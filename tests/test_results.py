"""The pages against the packed metrics, without training.

Tables are made again and compared; words around them have a test that recomputes what they say.
"""

import re
import sys
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT / "experiments"))

import analysis
import figures
import pages
import pictures
import sweeps

from support import run_metrics

RESULTS = ROOT / "results"
FRONT_PATH = ROOT / "README.md"
PAGE_PATH = RESULTS / "README.md"
BENCH_PATH = RESULTS / "objectives.md"
PROTOCOL_PATH = RESULTS / "protocol.md"
LIMIT = 6_000_000  # bytes of packed metrics


def one_line(path: Path) -> str:
    """A page's text in one line, so that sentences may be broken anywhere."""
    return " ".join(path.read_text().split())


PAGE = one_line(PAGE_PATH)
BENCH = one_line(BENCH_PATH)


@pytest.fixture(scope="module")
def settings():
    return analysis.Settings(RESULTS)


def gain(settings, place: str, outcome: str = "mean@16") -> analysis.Difference:
    """End − start."""
    return analysis.difference(settings.find(place), settings.before(place), outcome)


def gap(settings, one: str, other: str, outcome: str = "mean@16") -> analysis.Difference:
    return analysis.difference(settings.find(one), settings.find(other), outcome)


def resolved(difference: analysis.Difference) -> bool:
    return abs(difference.mean) > difference.half


# ---------------------------------------------------------------- tables
def test_every_table_and_difference_is_that_of_the_packed_metrics(settings):
    for folder, arms in settings.arms.items():
        lines = run_metrics.table(arms, settings.starts[folder])
        assert (RESULTS / folder / "table.md").read_text() == "\n".join(lines) + "\n", folder
    for path in RESULTS.glob("*/differences.md"):
        assert path.read_text() == analysis.document(settings, path.parent.name)
    if "default" in settings.arms:
        assert (RESULTS / "default/tests.md").read_text() == analysis.tests_document(settings)


@pytest.mark.parametrize("path", [FRONT_PATH, PAGE_PATH, BENCH_PATH], ids=lambda path: path.name)
def test_the_tables_on_the_pages_are_those_of_the_packed_metrics(path, settings):
    assert path.read_text() == pages.filled(path.read_text(), settings)


def test_every_mark_on_a_page_names_a_table():
    """Kills: a misspelt end of a mark, after which nothing would be made there again."""
    for path in (FRONT_PATH, PAGE_PATH, BENCH_PATH):
        text = path.read_text()
        marks = text.count("<!-- table ") + text.count("<!-- text ")
        assert len(pages.MARKED.findall(text)) == marks


def prose(text: str) -> str:
    """A page without what is made for it, its tables and its commands."""
    text = pages.MARKED.sub("", text)
    lines = [line for line in text.splitlines() if line[:1] != "|" and line[:4] != "    "]
    return " ".join(" ".join(lines).split())


INTERVAL = re.compile(r"([+\-−]?)(\d\.\d{3,4}) ± (\d\.\d{3,4})([^.;]*)")


def signs(number: str, following: str) -> set[str]:
    """How a number may stand in a table: by its own sign, or by the word that follows it."""
    if number:
        return {number.replace("−", "-")}
    if re.search(r"\b(below|less|lower)\b", following):
        return {"-"}
    if re.search(r"\b(above|more|higher)\b", following):
        return {"+"}
    return {"", "+"}


@pytest.mark.parametrize("path", [FRONT_PATH, PAGE_PATH, BENCH_PATH], ids=lambda path: path.name)
def test_every_interval_in_the_prose_stands_in_a_table_with_its_sign(path):
    """Kills: a number that no table has, and one whose direction is turned around."""
    known = " ".join(page.read_text() for page in RESULTS.glob("**/*.md") if page != path)
    known += " ".join(line for line in path.read_text().splitlines() if line[:1] == "|")
    for sign, mean, half, following in INTERVAL.findall(prose(path.read_text())):
        forms = [f"{form}{mean} ± {half}" for form in signs(sign, following)]
        assert any(re.search(rf"(?<![\d.+-]){re.escape(form)}", known) for form in forms), forms


def test_the_results_page_leaves_measured_numbers_to_its_tables():
    """In its prose stand settings alone."""
    for path in (PAGE_PATH, BENCH_PATH):
        text = prose(path.read_text())
        settings_named = {"0.05", "0.7", "0.8", "0.9", "0.98", "1.02", "1.04", "1.1", "1.2"}
        settings_named |= {"2.0", "3.0"}
        assert set(re.findall(r"\d+\.\d+", text)) <= settings_named, path


def test_packed_metrics_stay_small():
    assert sum(path.stat().st_size for path in RESULTS.rglob("*.csv.xz")) < LIMIT


def test_the_commands_of_the_protocol_name_experiments_that_exist():
    lines = [line.strip() for line in PROTOCOL_PATH.read_text().splitlines()]
    commands = [line for line in lines if line.startswith("python ")]
    assert len(commands) >= 8
    for line in commands:
        for command in line.partition("#")[0].split("&&"):
            words = command.split()
            assert (ROOT / words[1]).exists()
            options = words[2:]
            if "--jobs" in options:
                options = options[: options.index("--jobs")]
            names = [word for word in options if not word.startswith("--")]
            assert set(names) <= set(sweeps.EXPERIMENTS), line


def test_what_the_pages_link_to_is_there(settings):
    """A picture may be missing only as long as its runs are not packed."""
    for path in (PAGE_PATH, BENCH_PATH):
        for target in re.findall(r"\]\(([^)#]+)\)", path.read_text()):
            if not (path.parent / target).exists():
                assert not is_packed(target, settings), target


def is_packed(target: str, settings) -> bool:
    """Whether all runs behind a picture, or default/tests.md, are packed."""
    if target == "default/tests.md":
        return "default" in settings.arms
    try:
        figure = pictures.PICTURES[target](settings)
    except FileNotFoundError:
        return False
    figures.plot.plt.close(figure)
    return True


def test_what_is_compared_began_with_the_same_policies(settings):
    """Kills: pairing runs by the number of a start that other code or another machine has made."""
    pairs = [(claim.arm, claim.other) for claim in pages.CLAIMS]
    pairs += [(row.arm, row.grpo) for row in pages.BAPO_ROWS]
    pairs += [(one, other) for _, one, other in analysis.RULE_FOR_THE_DEFAULT]
    for place in settings.loaded:
        for arm in ("grpo@1", "grpo@8", "grpo@2x4", "bapo-gate@8"):
            pairs.append((place, analysis.reference(settings, place, arm)))
    compared = 0
    for place, other in pairs:
        if place not in settings.loaded or other not in settings.loaded:
            continue
        starts = settings.starts[place.split()[0]]
        other_starts = settings.starts[other.split()[0]]
        for name in starts.keys() & other_starts.keys():
            assert starts[name] == other_starts[name], (place, other, name)
            compared += 1
    assert compared > 500


# ---------------------------------------------------------------- the words around the tables
def test_what_is_said_of_the_learning_rate(settings):
    assert "At a high rate eight updates on each batch destroy GRPO, and at low rates" in PAGE
    assert analysis.collapses(settings, "four-attempts grpo@8") == 5
    for folder in ("map-lr/5e-05", "map-lr/0.0001"):
        against_on_policy = gap(settings, f"{folder} grpo@8", f"{folder} grpo@1")
        assert against_on_policy.mean > against_on_policy.half
        for arm in settings.arms[folder]:
            assert analysis.collapses(settings, f"{folder} {arm}") == 0


def test_what_is_said_of_one_attempt(settings):
    assert "With one attempt, where the share is one half, nothing collapses" in PAGE
    for arm in settings.arms["map-attempts/1"]:
        assert analysis.collapses(settings, f"map-attempts/1 {arm}") == 0
    share = settings.mean("map-attempts/1 grpo@8", "gradient_share")
    assert share == pytest.approx(0.5, abs=0.02)
    starts = []
    for folder in ("map-attempts/1", "map-attempts/2", "four-attempts"):
        before = settings.before(f"{folder} grpo@8")
        starts.append(np.mean(run_metrics.outcomes(before, "mean@16")))
    assert starts == sorted(starts)


def test_imbalance_alone_does_no_harm(settings):
    assert "are as imbalanced as `grpo@8` and end above their starts" in PAGE
    stale = settings.mean("four-attempts grpo@8", "gradient_share")
    for place in ("four-attempts grpo@1", "map-reuse/fresh grpo@1x8"):
        assert settings.mean(place, "gradient_share") <= stale
        assert gain(settings, place).mean > gain(settings, place).half


def test_scaling_and_a_lower_rate_recover_half_of_the_distance_to_on_policy_training(settings):
    assert "recovers about half of the distance to `grpo@1`, and so does 0.7 times the rate" in PAGE
    stale = gain(settings, "four-attempts grpo@8").mean
    distance = gain(settings, "four-attempts grpo@1").mean - stale
    for place in (
        "rescue grpo+share0.50@8",
        "rescue/lr-0.00028 grpo@8",
    ):
        assert 0.4 < (gain(settings, place).mean - stale) / distance < 0.6
        assert analysis.collapses(settings, place) > 2  # "most of these runs still collapse"
    assert settings.mean("rescue/lr-0.00028 grpo@8", "gradient_share") < 0.36
    assert "both also move less per update" in PAGE
    stale_kl = settings.mean("four-attempts grpo@8", "median_kl")
    for place in ("rescue grpo+share0.50@8", "rescue/lr-0.00028 grpo@8"):
        assert settings.mean(place, "median_kl") < stale_kl
    assert "whose negatives are scaled up the most end lower, resolved only before the" in PAGE
    places = settings.places("rescue")
    corrected = analysis.corrected_differences(settings, places, "grpo@8")
    scaled_up = "rescue/attempts-1 grpo+share0.30@8"
    lower = gap(settings, scaled_up, "map-attempts/1 grpo@8")
    assert lower.mean < -lower.half
    assert float(corrected[scaled_up].partition("(")[2].rstrip(")")) > 0.05


def test_runs_on_fresh_parts_hardly_move(settings):
    assert "their policy hardly moves away from them" in PAGE
    fresh = settings.mean("map-reuse/fresh grpo@1x8", "median_kl")
    assert fresh < settings.mean("four-attempts grpo@8", "median_kl") / 10


def test_what_is_said_of_positive_tokens_alone(settings):
    assert "Positive tokens alone are not resolved from `bapo-gate@8` in mean@16, and end" in PAGE
    gate = "four-attempts bapo-gate@8"
    alone = "rescue grpo+share1@8"
    assert not resolved(gap(settings, alone, gate))
    in_pass = gap(settings, alone, gate, "pass@8")
    assert in_pass.mean < -in_pass.half
    assert "with 3.0 on both sides the difference is not resolved" in PAGE
    assert not resolved(gap(settings, "rescue 0.8-3.0+share1@8", gate, "pass@8"))


def test_the_rule_for_the_default_range_is_not_met(settings):
    assert "The rule is not met" in PAGE
    yoked = analysis.difference(
        settings.find("four-attempts bapo-gate@8"),
        settings.find("rescue/yoked bapo-gate@8"),
        "mean@16",
        level=0.90,
    )
    assert abs(yoked.mean) + yoked.half > analysis.MARGIN
    assert "over 240 steps the default of then is not beaten after the correction" in PAGE
    rows = {row[0]: row for row in analysis.rule_for_the_default(settings)}
    assert float(rows["share 0.41, 240 steps, default then"][3]) > 0.05
    assert "what remains of its gain is resolved only before the correction" in PAGE
    rows = {row[0]: row for row in analysis.rule_for_the_default(settings)}
    _, _, p, corrected = rows["GRPO, 0.7 × the rate"]
    assert float(p) < 0.05 < float(corrected)
    # The match among the rates that were run, by the median of the KL and by its mean.
    rates = ["four-attempts", "rescue/lr-0.00028", "map-lr/0.0002", "map-lr/0.0001"]
    for measure, nearest in {"median_kl": "rescue/lr-0.00028", "kl": "four-attempts"}.items():
        wanted = settings.mean("four-attempts bapo-gate@8", measure)
        distance = {}
        for folder in rates:
            distance[folder] = abs(settings.mean(f"{folder} grpo@8", measure) - wanted)
        assert min(distance, key=distance.get) == nearest
    assert "nearest by it is GRPO at the same rate, which is beaten" in PAGE
    assert float(rows["GRPO, same rate"][3]) < 0.05


def test_the_three_lines_to_start_with(settings):
    assert "neither two updates at 4e-4 nor eight at 1e-4 made a run collapse" in PAGE
    for place in ("map-reuse grpo@2", "map-lr/0.0001 grpo@8", "map-lr/5e-05 grpo@8"):
        assert analysis.collapses(settings, place) == 0
    assert "eight at 2e-4 still did" in PAGE
    assert analysis.collapses(settings, "map-lr/0.0002 grpo@8") > 0
    assert "App. A's search, there at [0.9, 2.0] in nearly every update, let all five" in PAGE
    at_the_end = []
    for run in settings.find("rescue bapo-octothinker@8"):
        at_the_end += [bounds == (0.9, 2.0) for bounds in analysis.bounds_of(run).values()]
    assert np.mean(at_the_end) > 0.95
    assert "try fixed bounds, which need no search: [1.02, 3.0], or, if entropy matters" in PAGE
    gate = "default/controls 1.02-3.0@8"
    trust = "default/controls 0.9-2.0@8"
    accuracy = gap(settings, gate, trust, "mean@16")
    entropy = gap(settings, gate, trust, "entropy")
    assert accuracy.mean > accuracy.half and entropy.mean < -entropy.half
    assert analysis.collapses(settings, "four-attempts 1.02-3.0@8") == 0
    assert gain(settings, "four-attempts 1.02-3.0@8").mean > 0


def test_the_caption_of_the_reuse_picture_says_which_order_is_seen(settings):
    assert "With 8 the entropy ends highest" in figures.CURVES["figure2-hard"].caption
    places = figures.CURVES["figure2-hard"].arms
    ends = {arm: settings.mean(place, "entropy") for arm, place in places.items()}
    assert max(ends, key=ends.get) == "grpo@8"


def test_the_rank_correlation_of_the_rule_is_that_of_the_runs(settings):
    runs = settings.find("four-attempts grpo@8")
    ranks = [stats.spearmanr(*figures.rule_pairs([run])).statistic for run in runs]
    assert run_metrics.cell(ranks, runs, 2) in PAGE


# ---------------------------------------------------------------- the default experiment
def test_what_is_said_of_octothinker_s_range(settings):
    assert "shows what Fig. 13 shows of entropy and norms, in both readings" in PAGE
    assert "loses less of pass@8; its reward and mean@16 are not resolved from GRPO's" in PAGE
    assert (
        "higher than GRPO's (mean@16 not after Holm, [rescue](rescue/differences.md)) and the"
        in PAGE
    )
    hard = ("rescue bapo-octothinker@8", "four-attempts grpo@8")
    corrected = analysis.corrected_differences(settings, settings.places("rescue"), "grpo@8")
    assert float(corrected[hard[0]].partition("(")[2].rstrip(")")) > 0.05
    assert "but all five runs collapse, as all five of GRPO's do" in PAGE
    for place in hard:
        assert analysis.collapses(settings, place) == len(settings.find(place)) == 5
    for name in ("reward", "mean@16"):
        difference = gap(settings, *hard, name)
        assert difference.mean > difference.half
    assert not resolved(gap(settings, *hard, "entropy"))
    for arm in ("bapo-octothinker@8", "bapo@8"):
        gaps = {}
        for name in ("entropy", "grad_norm", "pass@8", "reward", "mean@16"):
            gaps[name] = gap(settings, f"default {arm}", "default grpo@8", name)
        assert gaps["entropy"].mean > gaps["entropy"].half
        assert gaps["grad_norm"].mean < -gaps["grad_norm"].half
        assert gaps["pass@8"].mean > gaps["pass@8"].half
        assert not resolved(gaps["reward"])
        assert not resolved(gaps["mean@16"])


def test_what_is_said_of_the_main_range(settings):
    assert "the main range rests at its start in most updates" in PAGE
    assert "At four attempts most updates stop at its end, which lowers the norm and raises" in PAGE
    hard = ("four-attempts bapo-main@8", "four-attempts grpo@8")
    norm = gap(settings, *hard, "grad_norm")
    share = gap(settings, *hard, "gradient_share")
    assert norm.mean < -norm.half and share.mean > share.half
    assert pages.share_of_updates(settings, hard[0], "at the end") > 0.5
    assert analysis.collapses(settings, hard[0]) == 5
    runs = settings.find("default bapo-main@8")
    shares = figures.shares_of_states(runs, figures.RANGES["default bapo-main@8"], 10**6)
    assert shares["at the start"][0] > 0.5
    assert "its target is below the share that these runs have anyway" in PAGE
    assert settings.mean("default grpo@8", "gradient_share") > 0.4
    assert "its entropy ends lower: the reverse of Fig. 9" in PAGE
    entropy = gap(settings, "default bapo-main@8", "default grpo@8", "entropy")
    assert entropy.mean < -entropy.half


def test_what_is_said_of_the_search_beside_the_fixed_end_of_its_range(settings):
    """Kills: a front page that credits the search with what fixed bounds do as well."""
    front = one_line(FRONT_PATH)
    assert "in most updates it stops at the end of its range, below its target" in front
    at_the_end = pages.share_of_updates(settings, "default bapo@8", "at the end")
    reached = []
    for run in settings.find("default bapo@8"):
        reached += [line["gradient_share"] >= 0.45 for line in run.lines if line["update"]]
    assert at_the_end - np.mean(reached) > 0.5
    assert "its search ends inside the range, as few do" in front
    at_the_start = pages.share_of_updates(settings, "default bapo@8", "at the start")
    assert 1 - at_the_start - at_the_end < 0.1
    assert (
        "Fixed bounds there, [0.9, 2.0], have lower norms and keep more entropy and pass@8" in front
    )
    fixed = "default/controls 0.9-2.0@8"
    for name, sign in {"entropy": +1, "grad_norm": -1, "pass@8": +1}.items():
        difference = gap(settings, fixed, "default grpo@8", name)
        assert difference.mean * sign > difference.half
    assert "on five starts no outcome is resolved between them and the search" in front
    for name in ("entropy", "grad_norm", "pass@8", "gradient_share", "reward", "mean@16"):
        difference = gap(settings, "default bapo@8", fixed, name)
        assert difference.pairs == 5
        assert not resolved(difference)


def test_what_is_said_of_the_search_in_the_authors_scheme(settings):
    """Kills: a front page that names the one p-value before the correction."""
    front = one_line(FRONT_PATH)
    assert "in mean@16, resolved only before the correction for three comparisons" in front
    place = "scheme bapo-main@2x4"
    yoked = gap(settings, place, "scheme/yoked bapo-main@2x4", "mean@16")
    assert yoked.mean < -yoked.half
    assert "None of the three differences in mean@16 is resolved after Holm" in PAGE
    _, *controls = analysis.adaptation_table(settings)
    assert len(controls) == 3
    assert all(float(row[3]) > 0.05 for row in controls)
    assert "the fixed bounds at the end of the range end higher than the search in pass@8" in PAGE
    for outcome in ("pass@8", "entropy"):
        kept = gap(settings, "scheme 0.9-3.0@2x4", place, outcome)
        assert kept.mean > kept.half
    assert (
        "its mean lower bound is near that of Fig. 8, 0.7, and its mean upper bound below" in PAGE
    )
    assert "hardly any is between" in PAGE
    for searched in (place, "default bapo-main@8"):
        assert settings.mean(searched, "low") == pytest.approx(0.7, abs=0.05)
        assert settings.mean(searched, "high") < 1.9
        at_the_ends = 0.0
        for state in ("at the start", "at the end"):
            at_the_ends += pages.share_of_updates(settings, searched, state)
        assert at_the_ends > 0.95
    assert "stops at its start in most updates" in PAGE
    assert pages.share_of_updates(settings, place, "at the start") > 0.5
    assert "No gain by the search is resolved" in PAGE
    for control in analysis.SCHEME_CONTROLS:
        better = gap(settings, place, control, "mean@16")
        assert better.mean <= better.half


def test_what_is_said_of_the_ranges(settings):
    def effect(which, outcome):
        return analysis.range_effect(settings, which, outcome)

    assert "up to 0.98 the norms are lower and pass@8 ends higher" in PAGE
    assert "up to 3.0 it lowers the norms and raises pass@8, by less" in PAGE
    upper = "upper bound up to 3.0 instead of 1.2"
    for outcome, sign in {"grad_norm": -1, "pass@8": +1}.items():
        by_low = effect("lower bound up to 0.98 instead of 0.9", outcome)
        by_high = effect(upper, outcome)
        assert by_high.half < sign * by_high.mean < sign * by_low.mean
    near_one = "lower bound up to 0.98 instead of 0.9"
    norm = effect(near_one, "grad_norm")
    passes = effect(near_one, "pass@8")
    assert norm.mean < -norm.half and passes.mean > passes.half
    assert "up to 1.04 the entropy ends lower" in PAGE
    entropy = effect("lower bound up to 1.04 instead of 0.9", "entropy")
    assert entropy.mean < -entropy.half
    assert "What the upper bound does to entropy and mean@16 is not resolved" in PAGE
    for high in ("2.0", "3.0"):
        for outcome in ("entropy", "mean@16"):
            assert not resolved(effect(f"upper bound up to {high} instead of 1.2", outcome))


def test_what_is_said_of_the_bound_past_one(settings):
    assert "`bapo-gate` ends higher in reward, mean@16 and pass@8, and keeps no more" in PAGE
    assert "In the authors' scheme reward and mean@16 are not resolved" in PAGE
    for folder in ("default", "four-attempts"):
        for name in ("reward", "mean@16", "pass@8"):
            higher = gap(settings, f"{folder} bapo-gate@8", f"{folder} grpo@8", name)
            assert higher.mean > higher.half
    for name in ("reward", "mean@16"):
        assert not resolved(gap(settings, "scheme bapo-gate@2x4", "scheme grpo@2x4", name))
    assert "at 3e-4 and at four attempts it ends lower" in PAGE
    for folder in ("rate/0.0003", "four-attempts"):
        entropy = gap(settings, f"{folder} bapo-gate@8", f"{folder} grpo@8", "entropy")
        assert entropy.mean < -entropy.half
    front = one_line(FRONT_PATH)
    assert "`bapo-gate` and fixed [1.02, 3.0] end above GRPO in mean@16, and keep no more" in front
    fixed = ("default/controls 1.02-3.0@8", "default grpo@8")
    accuracy = gap(settings, *fixed, "mean@16")
    assert accuracy.mean > accuracy.half
    assert gap(settings, *fixed, "entropy").mean < 0
    entropy = gap(settings, "default bapo-gate@8", "default grpo@8", "entropy")
    assert entropy.mean < entropy.half


def test_what_the_front_page_says_of_the_named_tests_and_the_paper_s_ranges(settings):
    front = one_line(FRONT_PATH)
    assert "with its main range it shows none of them" in front
    for name, sign in {"entropy": +1, "grad_norm": -1, "gradient_share": +1}.items():
        main = gap(settings, "default bapo-main@8", "default grpo@8", name)
        assert sign * main.mean <= main.half
        for arm in ("bapo@8", "bapo-octothinker@8"):
            shown = gap(settings, f"default {arm}", "default grpo@8", name)
            assert sign * shown.mean > shown.half
    assert "seven come out as named; the eighth, mean@16 of `bapo`, is not resolved" in front
    verdicts = [row[-1] for row in analysis.named_tests(settings)[1:]]
    assert verdicts == ["as named"] * 7 + ["not resolved"]
    assert "no range of the paper ends resolved above GRPO in reward or mean@16. Where" in front
    assert "Where GRPO collapses, which no run does at 2e-4, App. A's collapses, too" in front
    for place in settings.places("default"):
        assert analysis.collapses(settings, place) == 0
    assert analysis.collapses(settings, "rescue bapo-octothinker@8") == 5
    assert analysis.collapses(settings, "rate/0.0004 bapo-octothinker@8") == 3
    for arm in ("bapo-main@8", "bapo-octothinker@8", "bapo@8"):
        for name in ("reward", "mean@16"):
            difference = gap(settings, f"default {arm}", "default grpo@8", name)
            assert difference.mean <= difference.half


# ---------------------------------------------------------------- the neighbours
@pytest.fixture(scope="module")
def best(settings):
    """Arm -> where its final runs are."""
    rates = analysis.best_rates(RESULTS)
    return {arm: f"objectives/{rate} {arm}" for arm, rate in rates.items()}


def test_no_neighbour_is_resolved_from_grpo_at_its_best_rate(settings, best):
    assert "At its best rate no method collapses, and none is resolved from GRPO" in BENCH
    assert not any(analysis.collapses(settings, place) for place in best.values())
    assert all(len(settings.find(place)) == 5 for place in best.values())
    places = settings.places("objectives")
    for text in analysis.corrected_differences(settings, places, "grpo@8").values():
        assert float(text.partition("(")[2].rstrip(")")) > 0.05


def test_what_is_said_of_the_neighbours_at_the_high_rate(settings, best):
    assert "all but `gspo`, `bapo-gate` and on-policy training collapse" in BENCH
    kept = {"gspo+sequence-mean@8", "bapo-gate@8", "grpo@1"}
    collapsed = {}
    alive = {}
    moved = {}
    for arm in best:
        place = f"objectives-screen/{analysis.SCREENED[-1]} {arm}"
        collapsed[arm] = analysis.collapses(settings, place)
        if arm != "grpo@1":
            alive[arm] = settings.mean(place, "negatives_with_gradient")
            moved[arm] = settings.mean(place, "kl")
    assert {arm for arm, count in collapsed.items() if count < 2} == kept
    assert all(collapsed[arm] == 0 for arm in kept)
    assert "leave a gradient to the fewest negative tokens, and move least per update" in BENCH
    assert "equal weight lets [two](rescue/differences.md) collapse" in BENCH
    assert analysis.collapses(settings, "rescue grpo+sequence-mean@8") == 2
    assert "`balanced` [all](four-attempts/differences.md)" in BENCH
    assert analysis.collapses(settings, "four-attempts balanced@8") == 5
    stale_kept = kept - {"grpo@1"}
    assert set(sorted(alive, key=alive.get)[:2]) == stale_kept
    assert set(sorted(moved, key=moved.get)[:2]) == stale_kept


def test_losses_that_never_stop_a_negative_token_end_lowest(settings, best):
    assert "Losses that never stop a negative token end lowest there" in BENCH
    ends = {}
    never = set()
    for arm in best:
        if arm != "grpo@1":
            place = f"objectives-screen/{analysis.SCREENED[-1]} {arm}"
            ends[arm] = settings.mean(place, "mean@16")
            if settings.mean(place, "negatives_with_gradient") > 0.999:
                never.add(arm)
    assert set(sorted(ends, key=ends.get)[: len(never)]) == never
    for arm in never:
        assert f"`{arm.split('@')[0].split('+')[0]}`" in BENCH
    for arm in ("balanced@8", "grpo+sequence-mean@8", "erc@8"):
        assert ends[arm] > ends["grpo@8"]


def test_erc_balances_nothing(settings):
    assert "so does `erc`, which balances nothing" in BENCH
    place = "objectives-screen/0.0004 {}@8"
    erc = settings.mean(place.format("erc"), "gradient_share")
    assert erc == pytest.approx(settings.mean(place.format("grpo"), "gradient_share"), abs=0.02)


def test_what_is_said_of_the_bench(settings):
    rates = analysis.best_rates(RESULTS)
    assert len(rates) == 22
    assert "Twenty-two arms" in PAGE
    assert "the best rate is mostly the lowest that was tried" in BENCH
    assert sum(rate == min(analysis.SCREENED) for rate in rates.values()) > len(rates) / 2
    partial = [place for place in settings.places("objectives") if "/partial" in place]
    assert all(len(settings.find(place)) == 4 for place in partial)


def test_what_is_said_of_the_other_rates(settings):
    front = one_line(FRONT_PATH)
    assert "At other rates (exploratory) norms and pass@8 come out the same" in front
    for rate in ("0.0001", "0.0003"):
        pair = (f"rate/{rate} bapo@8", f"rate/{rate} grpo@8")
        norm = gap(settings, *pair, "grad_norm")
        passes = gap(settings, *pair, "pass@8")
        assert norm.mean < -norm.half
        assert passes.mean > passes.half
    assert "the entropy does at 1e-4, and is not resolved at 3e-4" in front
    assert not resolved(gap(settings, *pair, "entropy"))
    low = ("rate/0.0001 bapo@8", "rate/0.0001 grpo@8")
    entropy = gap(settings, *low, "entropy")
    assert entropy.mean > entropy.half
    assert "At 1e-4 it keeps more entropy and pass@8, too, but its reward ends lower" in PAGE
    reward = gap(settings, *low, "reward")
    assert reward.mean < -reward.half
    assert "GRPO ends higher in mean@16 there than at 2e-4" in PAGE
    assert "fewer updates on each batch, a lower learning rate, and" in front
    lower_rate = gap(settings, "rate/0.0001 grpo@8", "default grpo@8", "mean@16")
    assert lower_rate.mean > lower_rate.half
    assert "three of five runs collapse, as three of GRPO's do" in PAGE
    for arm in ("grpo@8", "bapo-octothinker@8"):
        assert analysis.collapses(settings, f"rate/0.0004 {arm}") == 3
    norm = gap(settings, "rate/0.0004 bapo-octothinker@8", "rate/0.0004 grpo@8", "grad_norm")
    assert norm.mean < -norm.half


def test_what_is_said_of_the_entropy_where_grpo_collapses(settings):
    assert "There GRPO's entropy rises at the end" in PAGE
    for place in ("four-attempts grpo@8", "rate/0.0004 grpo@8"):
        curves = np.stack([run.per_step("entropy") for run in settings.find(place)]).mean(0)
        assert curves[-10:].mean() > curves[:10].mean()
        assert curves.argmin() < len(curves) - 10
