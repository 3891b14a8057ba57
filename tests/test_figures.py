"""figures.py: its experiments are valid commands, its intervals are Student's, and every picture is drawn from packed metrics."""

import json
import random
from pathlib import Path

import numpy as np
import pytest
from scipy import stats
from transformers import HfArgumentParser

import figures
import plot
import train


def write_results(folder, experiment, gain=0.0):
    """Packed metrics of an experiment, made up: three steps of two updates, numbers drawn per arm and seed."""
    methods, seeds, _ = figures.EXPERIMENTS[experiment]
    about, lines, tokens = {}, [], []
    for arm in methods:
        for seed in seeds[:3]:
            rng, name = random.Random(f"{arm}/{seed}"), f"{arm}-seed{seed}"
            config = {
                "seed": seed,
                "updates_per_batch": int(arm.split("@")[1]),
                "search": {"rho0": 0.4 * arm.startswith("bapo")},
            }
            final = {metric: rng.random() for metric in ("greedy", "mean@16", "pass@8", "pass@16")}
            about[name] = {"config": config, "final": final}
            for step in (1, 2, 3):
                for update in (1, 2):
                    columns = "reward entropy rho low high grad_norm clip_fraction_high clip_fraction_low positive_tokens"
                    columns += " length_correct length_wrong entropy_rule entropy_now token_age_mean mixed_trajectories"
                    line = {column: rng.random() + 0.1 + gain for column in columns.split()}
                    lines.append({"run": name, "step": step, "update": update, **line})
            for sign in (-1.0, 1.0) * 30:
                token = {name: rng.random() for name in ("ratio", "probability", "rollout_probability", "entropy")}
                tokens.append({"run": name, "step": 1, "sign": sign, **token})
    target = folder / experiment
    target.mkdir(parents=True)
    (target / "runs.json").write_text(json.dumps({"warm_start": None, "runs": about}))
    plot.write_csv(target / "metrics.csv.gz", lines)
    if experiment == "tokens":
        plot.write_csv(target / "tokens.csv.gz", tokens)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("results")
    for experiment in figures.EXPERIMENTS:
        write_results(folder, experiment)
    return folder


@pytest.mark.parametrize("short", [False, True])
@pytest.mark.parametrize("experiment", figures.EXPERIMENTS)
def test_every_experiment_is_a_valid_command_of_train_py(experiment, short):
    (options,) = HfArgumentParser(train.Options).parse_args_into_dataclasses(figures.train_arguments(experiment, short=short))
    assert list(options.arms()) == figures.EXPERIMENTS[experiment].methods  # arms name themselves fully
    assert options.seeds == figures.EXPERIMENTS[experiment].seeds[: 2 if short else None]
    for name, value in figures.EXPERIMENTS[experiment].options.items():
        assert getattr(options, name) == (value // 5 if short and name == "steps" else value)


def test_every_comparison_is_of_arms_that_are_run():
    for _, pairs in figures.COMPARISONS:
        for experiment, arm, other_experiment, other in pairs:
            assert arm in figures.EXPERIMENTS[experiment].methods and other in figures.EXPERIMENTS[other_experiment].methods


@pytest.mark.parametrize("picture", [name for name, picture in figures.PICTURES.items() if picture.draw])
def test_every_picture_is_drawn_from_packed_metrics(picture, results):
    figure = figures.PICTURES[picture].draw(results)
    assert all(axis.has_data() for axis in figure.axes)
    plot.plt.close(figure)


def test_a_difference_is_paired_by_seed_with_student_s_interval(results):
    base = figures.load(results, "base")
    arm, other = base["bapo@8"], list(reversed(base["grpo@8"]))
    found = figures.difference(arm, other, "greedy")
    a, b = ([run.final["greedy"] for run in sorted(group, key=lambda run: run.seed)] for group in (arm, other))
    interval = stats.ttest_rel(a, b).confidence_interval(0.95)
    assert (found.mean - found.half, found.mean + found.half) == pytest.approx((interval.low, interval.high))
    assert figures.value(arm[0], "grad_norm") == max(line["grad_norm"] for line in arm[0].lines)
    assert "unresolved" in str(figures.Difference(0.1, 0.2, 3)) and "unresolved" not in str(figures.Difference(-0.3, 0.2, 3))


def test_the_document_states_every_comparison_and_the_commands(results):
    text = figures.differences(results)
    assert all(f"## {heading}" in text for heading, _ in figures.COMPARISONS)
    assert "--attempts 3" in text and "bapo@8 (surrogate) − bapo@8" in text


def test_the_rule_s_pairs_are_successive_updates_on_one_batch(results):
    run = figures.load(results, "base")["grpo@8"][0]
    predicted, actual = figures.rule_pairs([run])
    assert len(predicted) == 3  # two updates per step, three steps
    first, second = run.lines[:2]
    np.testing.assert_allclose(
        [predicted[0], actual[0]], [-first["entropy_rule"], second["entropy_now"] - first["entropy_now"]]
    )


def test_the_controls_of_adaptivity_are_the_means_that_were_measured():
    folder = Path(__file__).parent.parent / "results/figures"
    base = figures.load(folder, "base")
    for arm, control in figures.OWN_MEANS.items():
        lines = [line for run in base[arm] for line in run.lines if "low" in line]
        means = [f"{np.mean([line[side] for line in lines]):.2f}" for side in ("low", "high")]
        assert control == "-".join(means) + "@8"
