"""The pages against the packed metrics, without training: every "x.xxx ± x.xxx" stands in a table that is recomputed, and
what is said around it has tests of its own."""

import re
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from support import plot

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT / "experiments"))
import analysis
import figures

RESULTS = ROOT / "results"
FRONT, PAGE = (ROOT / "README.md").read_text(), (RESULTS / "README.md").read_text()
NUMBER = r"[+\-−]?\d\.\d{3,4} ± \d\.\d{3,4}"


@pytest.fixture(scope="module")
def default():
    return plot.load(RESULTS / "four-attempts")


def test_the_tables_are_those_of_the_packed_metrics(default):
    assert (RESULTS / "four-attempts/table.md").read_text() == "\n".join(plot.table(*default)) + "\n"
    settings = analysis.Settings(RESULTS)
    for path in RESULTS.glob("*/differences.md"):
        assert path.read_text() == analysis.document(settings, path.parent.name)


def test_the_front_page_s_table_is_made_of_cells_of_the_packed_metrics(default):
    header, _, *lines = (line.strip("| ").split(" | ") for line in plot.table(*default)[:-2])
    cells = {line[0]: dict(zip(header, line)) for line in lines}
    names = ["held-out mean@16", "held-out pass@8", "entropy at end", "gradient share"]
    rows = re.findall(r"^\| (`[^`]+`|before RL)[^|]*\|[^|]*\|(.*)\|$", FRONT, re.M)
    rows = [(name.strip("`"), [cell.strip() for cell in rest.split("|")]) for name, rest in rows if "±" in rest]
    assert [name for name, _ in rows] == ["before RL", *default[0]]
    for name, found in rows:
        expected = [cells["warm start" if name == "before RL" else name][column] for column in names]
        assert found == [cell if cell != "–" else "" for cell in expected], name


@pytest.mark.parametrize("text", [FRONT, PAGE], ids=["README.md", "results/README.md"])
def test_every_number_in_the_text_stands_in_a_table(text):
    known = "".join(path.read_text() for path in RESULTS.glob("**/*.md") if path.name != "README.md").replace("−", "-")
    found = [number.replace("−", "-").lstrip("+-") for number in re.findall(NUMBER, text)]
    assert found and all(number in known for number in found), [number for number in found if number not in known]


def test_every_corrected_p_value_stands_beside_its_difference():
    rows = [line for path in RESULTS.glob("*/differences.md") for line in path.read_text().splitlines()]
    found = re.findall(r"(\d\.\d{3} ± \d\.\d{3})[^±]{0,40}?Holm (0\.\d{3})", PAGE)
    assert len(found) == PAGE.count("(Holm 0") + PAGE.count(", Holm 0") == 7
    assert all(any(number in row and f"| {p} |" in row for row in rows) for number, p in found), found


def test_what_the_verdicts_say_of_bounds_shares_and_lengths(default):
    arms = default[0]

    def shares(arm: str) -> Counter:
        pairs = [(round(line["low"], 2), round(line["high"], 2)) for run in arms[arm] for line in run.lines if "low" in line]
        return Counter({pair: count / len(pairs) for pair, count in Counter(pairs).items()})

    main, gate = shares("bapo-main@8"), shares("bapo-gate@8")
    assert (
        f"at [0.9, 3.0] in {main[0.9, 3.0]:.0%} of the updates, at its start in {main[0.6, 1.2]:.0%}".replace("%", " %") in PAGE
    )
    assert f"`bapo-gate` at [1.04, 3.0] in {gate[1.04, 3.0]:.0%}".replace("%", " %") in PAGE
    mean = {name: np.mean([run.outcome(name) for run in arms["grpo@8"]]) for name in ("length_wrong", "length_correct")}
    assert "wrong responses have {length_wrong:.0f} tokens, right ones {length_correct:.0f}".format(**mean) in PAGE
    negative = 1 - np.mean([run.outcome("gradient_share") for run in arms["grpo@8"]])
    assert f"negative tokens carry about {negative:.2f} of the gradient" in PAGE
    alive = [np.mean([run.outcome("negatives_with_gradient") for run in arms[arm]]) for arm in ("bapo-gate@8", "1.02-3.0@8")]
    assert f"leave a gradient to {alive[0]:.0%} and {alive[1]:.0%} of the negative tokens".replace("%", " %") in PAGE
    others = [
        np.mean([run.outcome("negatives_with_gradient") for run in arms[f"{a}@8"]]) for a in ("grpo", "bapo-main", "balanced")
    ]
    assert min(others) > 0.93
    assert sum(run.outcome("mean@16") < default[1][run.pair()[0]]["mean@16"] - 0.05 for run in arms["grpo@8"]) == 5


def test_what_is_said_of_the_learning_rates():
    """Collapsed runs of grpo@8, and the arms that end above their starts."""

    def changes(folder: str, arm: str) -> list[float]:
        arms, starts = plot.load(RESULTS / folder)
        return [run.outcome("mean@16") - starts[run.pair()[0]]["mean@16"] for run in arms[arm]]

    folders = ("four-attempts", "map-lr/0.0002", "map-lr/0.0001", "map-lr/5e-05")
    assert [sum(change < -analysis.COLLAPSE for change in changes(folder, "grpo@8")) for folder in folders] == [5, 2, 0, 0]
    ends = {
        arm: max(np.mean([run.outcome("mean@16") for run in plot.load(RESULTS / folder)[0][arm]]) for folder in folders)
        for arm in ("bapo-gate@8", "grpo@8", "grpo@1")
    }
    assert {arm: round(end, 2) for arm, end in ends.items()} == {"bapo-gate@8": 0.50, "grpo@8": 0.49, "grpo@1": 0.48}
    arms = plot.load(RESULTS / "map-lr/0.0001")[0]
    assert len(arms) == 5 and all(np.mean(changes("map-lr/0.0001", arm)) > 0 for arm in arms)
    text = (RESULTS / "map-lr/differences.md").read_text()
    assert "| map-lr/0.0002 bapo-gate@8 | 5 | +0.076 ± 0.019 | no | 0 | +0.015 ± 0.011 | yes |" in text  # follows on-policy
    assert (ROOT / "bapo.py").read_text().count("low_max: float = 0.9 ") == 1  # the rule is not met


def test_what_is_said_of_attempts_and_doses():
    settings = analysis.Settings(RESULTS)

    def collapsed(place: str) -> int:
        pairs = zip(settings.find(place), settings.before(place))
        return sum(run.outcome("mean@16") - start.outcome("mean@16") < -analysis.COLLAPSE for run, start in pairs)

    def mean(place: str, name: str) -> float:
        return np.mean([run.outcome(name) for run in settings.find(place)])

    folders = ("four-attempts", "map-attempts/2", "map-attempts/1")
    assert [collapsed(f"{folder} grpo@8") for folder in folders] == [5, 2, 0]
    assert [round(1 - mean(f"{folder} grpo@1", "gradient_share"), 2) for folder in folders] == [0.65, 0.59, 0.50]
    places = ["rescue/attempts-1 grpo+share0.30@8", "rescue grpo+share0.50@8", "rescue/lr-0.00028 grpo@8"]
    assert [collapsed(place) for place in places] == [2, 4, 5]
    printed = ("four-attempts bapo-main@8", "rescue bapo-octothinker@8", "rescue bapo+high3@8")
    assert [collapsed(place) for place in printed] == [5, 5, 5] and collapsed("fig9-long grpo@8") == 5
    assert min(mean(place, "negatives_with_gradient") for place in printed) > 0.9
    shares = {"bapo-gate@8": 0.84, "1.02-3.0@8": 0.90, "grpo@8": 0.36}
    assert {arm: round(mean(f"four-attempts {arm}", "gradient_share"), 2) for arm in shares} == shares
    assert round(mean("rescue grpo+sequence-mean@8", "gradient_share"), 2) == 0.50
    starts = [np.mean([run.outcome("mean@16") for run in settings.before(f"{folder} grpo@8")]) for folder in folders]
    assert starts == sorted(starts, reverse=True)
    halves = mean("map-attempts/1 grpo@8", "pass@8") / settings.starts["map-attempts/1"]["1"]["pass@8"]
    assert 0.4 < halves < 0.6
    assert mean("map-reuse grpo@2", "mean@16") > starts[0]
    assert (
        max(settings.places("four-attempts", "rescue", "map-reuse"), key=lambda p: mean(p, "mean@16"))
        == "map-reuse/fresh grpo@1x8"
    )
    for arm in ("0.8-3.0+share0.45@8", "grpo+share0.40@8", "grpo+share0.50@8"):
        assert mean(f"rescue {arm}", "negatives_with_gradient") > 0.93 and collapsed(f"rescue {arm}") > 2
    for place in settings.places("figures"):
        if "fixed" in place:
            assert mean(place, "clip_fraction_high") + mean(place, "clip_fraction_low") < 0.01


def test_matched_movement_is_grpo_at_the_default_rate():
    """Kills: a run at another learning rate whose KL per update is nearer to BAPO's."""
    settings = analysis.Settings(RESULTS)
    places = [place for place in settings.places("rescue", "map-lr", "four-attempts") if place.endswith(" grpo@8")]
    kl = {
        place: np.mean([run.outcome("kl") for run in settings.find(place)]) for place in [*places, "four-attempts bapo-gate@8"]
    }
    assert (
        min(places, key=lambda place: abs(kl[place] - kl["four-attempts bapo-gate@8"])) == "four-attempts grpo@8"
        and len(places) == 5
    )


@pytest.fixture(scope="module")
def neighbours():
    """The packed bench, its page, and the arms but on-policy GRPO."""
    arms = [arm for arm in analysis.best_rates(RESULTS) if arm != "grpo@1"]
    return analysis.Settings(RESULTS), (RESULTS / "objectives.md").read_text(), arms


def test_the_table_of_the_neighbours_is_the_one_that_was_made(neighbours):
    made = (RESULTS / "objectives/differences.md").read_text().partition("## Against")[0]
    assert [line for line in neighbours[1].splitlines() if line[:1] == "|"] == [x for x in made.splitlines() if x[:1] == "|"]


def test_what_is_said_of_the_neighbours_at_their_best_rates(neighbours):
    settings, page, arms = neighbours
    rates = analysis.best_rates(RESULTS)
    assert sorted(arm for arm in rates if rates[arm] > 1e-4) == ["grpo@1", "gspo+sequence-mean@8"]
    places = {arm: f"objectives/{rate} {arm}" for arm, rate in rates.items()}
    assert len(arms) == 21 and not any(analysis.collapses(settings, place) for place in places.values())
    assert all(len(settings.find(place)) == 5 for place in places.values())
    gains = [analysis.difference(settings.find(place), settings.before(place), "mean@16").mean for place in places.values()]
    assert [round(gain, 3) for gain in (min(gains), max(gains))] == [0.031, 0.103]
    above = {
        arm: analysis.difference(settings.find(place), settings.find(places["grpo@8"]), "mean@16")
        for arm, place in places.items()
    }
    least, most = (find((arm for arm in arms if arm != "grpo@8"), key=lambda arm: above[arm].mean) for find in (min, max))
    assert (least, most) == ("smoothing@8", "grpo+sequence-mean@8")
    assert f"{above[least]} (`smoothing`) to {above[most]}".replace("-", "−") in " ".join(page.split())
    tested = [(place, analysis.reference(settings, place, "grpo@8")) for place in settings.places("objectives")]
    p_values = {row[0].split(" − ")[0]: row[3] for row in analysis.differences(settings, tested)[1:]}
    assert min(float(p) for p in p_values.values()) > 0.05 and f"Holm {p_values[places[most]]})" in page
    tested = [(place, analysis.reference(settings, place, "bapo-gate@8")) for place in settings.places("objectives")]
    found = {row[0].split(" − ")[0]: row[2:4] for row in analysis.differences(settings, tested)[1:]}
    (resolved,) = (place for place, (_, p) in found.items() if float(p.removeprefix("< ")) < 0.05)
    gap, p = found[resolved]
    assert resolved == places["dppo-tv@8"] and f"`dppo-tv` ends {gap[1:]} below it (Holm {p})" in page
    kept = [analysis.difference(settings.find(places[arm]), settings.find(places["grpo@8"]), "pass@8") for arm in KEPT]
    assert "{}, {} and {} above".format(*(str(gap)[1:] for gap in kept)) in " ".join(page.split())
    passes = {arm: np.mean([run.outcome("pass@8") for run in settings.find(place)]) for arm, place in places.items()}
    assert max(passes[arm] for arm in set(places) - {*KEPT}) < 0.87 < min(passes[arm] for arm in KEPT)
    starts, ends = settings.before(places["grpo@8"]), settings.find(places["grpo@8"])
    assert [round(np.mean([run.outcome(name) for run in starts]), 3) for name in ("mean@16", "pass@8")] == [0.389, 0.927]
    assert round(np.mean([run.outcome("mean@16") for run in ends]), 3) == 0.440


def test_what_is_said_of_partial_rollouts_and_sfpo(neighbours):
    settings, page, _ = neighbours
    said = " ".join(page.split())
    change = {
        place: analysis.difference(settings.find(f"objectives/{place}"), settings.find(f"objectives/{of}"), "mean@16")
        for place, of in {f"partial {arm}@8": "partial grpo@8" for arm in ("decoupled-ppo", "a-3po", "off-policy-grpo")}.items()
        | {"sfpo grpo@8": "0.0001 grpo@8", "partial grpo@8": "0.0001 grpo@8"}.items()
    }
    for place, gap in change.items():
        assert str(gap).replace("-", "−") in said and gap.pairs == (4 if "partial" in place else 5), place
    assert not any(analysis.collapses(settings, place) for place in settings.places("objectives"))


KEPT = ("bapo-gate@8", "gspo+sequence-mean@8", "grpo@1")  # that end with the highest pass@8


def test_what_is_said_of_the_neighbours_at_the_default_rate(neighbours):
    settings, page, arms = neighbours
    mean = {
        (arm, rate, name): np.mean([run.outcome(name) for run in settings.find(f"objectives-screen/{rate} {arm}")])
        for arm in arms for rate in analysis.SCREENED for name in ("mean@16", "kl", "negatives_with_gradient")
    }  # fmt: skip
    collapses = {(arm, rate): analysis.collapses(settings, f"objectives-screen/{rate} {arm}") for arm, rate, _ in mean}
    low, middle, high = analysis.SCREENED
    kept = ["bapo-gate@8", "gspo+sequence-mean@8"]
    assert sorted(arm for arm in arms if collapses[arm, high] < 2) == kept and not any(collapses[arm, high] for arm in kept)
    assert [round(mean[arm, high, "negatives_with_gradient"], 2) for arm in kept] == [0.19, 0.23]
    assert min(mean[arm, high, "negatives_with_gradient"] for arm in set(arms) - {*kept}) > 0.505
    assert sorted(arms, key=lambda arm: mean[arm, high, "kl"])[:2] == kept[::-1]
    assert [round(mean[arm, high, "kl"], 3) for arm in (*kept, "grpo@8")] == [0.012, 0.005, 0.020]
    never = {arm.split("@")[0].split("+")[0] for arm in arms if mean[arm, high, "negatives_with_gradient"] > 0.999}
    assert never == {arm.split("@")[0].split("+")[0] for arm in arms if mean[arm, high, "mean@16"] < 0.06} and len(never) == 9
    assert all(f"`{arm}`" in page for arm in never) and round(mean["ce-gppo@8", middle, "mean@16"], 3) == 0
    above = [
        mean[f"{a}@8", high, "mean@16"] - mean["grpo@8", high, "mean@16"] for a in ("balanced", "grpo+sequence-mean", "erc")
    ]
    assert [round(gap, 2) for gap in above] == [0.14, 0.20, 0.20] and round(mean["grpo@8", high, "mean@16"], 3) == 0.114
    starts = settings.before(f"objectives-screen/{low} grpo@8")
    assert [round(np.mean([run.outcome(name) for run in starts]), 3) for name in ("mean@16", "pass@8")] == [0.403, 0.939]


def test_the_rank_correlations_of_the_rule(default):
    for arm in ("grpo@8", "bapo-main@8", "bapo-gate@8"):
        ranks = [stats.spearmanr(*figures.rule_pairs([run])).statistic for run in default[0][arm]]
        assert plot.cell(ranks, default[0][arm], 2) in next(
            line for line in PAGE.splitlines() if line.startswith("| Eqs. 6, 7")
        )


def test_what_is_said_of_single_tokens():
    found = {sign: figures.tokens(analysis.Settings(RESULTS), sign) for sign in (-1, 1)}
    for columns in found.values():
        near = (columns["ratio"] >= 0.97) & (columns["ratio"] < 1.03)  # a bin of figure 5
        far = (columns["ratio"] < 0.8) | (columns["ratio"] > 1.2)
        assert round(columns["rollout_probability"][near].mean(), 2) == 0.93
        assert 0.3 < columns["rollout_probability"][far].mean() < 0.45
