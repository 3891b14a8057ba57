"""support/arms.py: an arm is its method, its modifiers and its updates."""

from dataclasses import replace

import pytest

import bapo
from support.arms import Arm, NeighbourArm, parse_arm

SEARCH = bapo.ClipSearch(rho0=0.3)  # of the arm `bapo`

MANY = "0.8-3.0+no-std+sequence-mean+share.5@2x4"


@pytest.mark.parametrize(
    "text, arm",
    [
        ("grpo", Arm("grpo@8", bapo.GRPO, 8)),
        ("grpo@1", Arm("grpo@1", bapo.GRPO, 1)),
        ("clip-higher@16", Arm("clip-higher@16", bapo.CLIP_HIGHER, 16)),
        ("bapo", Arm("bapo@8", bapo.ClipSearch(rho0=0.3), 8)),
        ("bapo-main", Arm("bapo-main@8", bapo.PAPER_MAIN, 8)),
        ("bapo-octothinker@4", Arm("bapo-octothinker@4", bapo.PAPER_OCTOTHINKER, 4)),
        ("0.5-1.2@4", Arm("0.5-1.2@4", bapo.ClipSearch.fixed(0.5, 1.2), 4)),
        ("1.02-3.0", Arm("1.02-3.0@8", bapo.ClipSearch.fixed(1.02, 3.0), 8)),
        (".8-2", Arm(".8-2@8", bapo.ClipSearch.fixed(0.8, 2.0), 8)),
        ("balanced", Arm("balanced@8", bapo.GRPO, 8, share=0.3)),
        (
            "grpo+sequence-mean",
            Arm("grpo+sequence-mean@8", bapo.GRPO, 8, aggregation="sequence-mean"),
        ),
        ("grpo+no-std@2", Arm("grpo+no-std@2", bapo.GRPO, 2, normalize_std=False)),
        ("grpo@1x8", Arm("grpo@1x8", bapo.GRPO, 1, 8)),
        ("grpo@8x1", Arm("grpo@8", bapo.GRPO, 8)),
        ("bapo-main@2x4", Arm("bapo-main@2x4", bapo.PAPER_MAIN, 2, 4)),
        ("bapo+high3@8", Arm("bapo+high3@8", bapo.ClipSearch(rho0=0.3, high_max=3.0), 8)),
        (
            "bapo+low0.98+high1.2",
            Arm("bapo+low0.98+high1.2@8", bapo.ClipSearch(rho0=0.3, low_max=0.98, high_max=1.2), 8),
        ),
        (
            "bapo+low1.04",
            Arm("bapo+low1.04@8", bapo.ClipSearch(rho0=0.3, low_max=1.04, low_step=0.06), 8),
        ),
        ("grpo+share1", Arm("grpo+share1@8", bapo.GRPO, 8, share=1.0, scale_up=True)),
        ("grpo+share0.45", Arm("grpo+share0.45@8", bapo.GRPO, 8, share=0.45, scale_up=True)),
        (
            "bapo+surrogate",
            Arm("bapo+surrogate@8", bapo.ClipSearch(rho0=0.3, contribution="surrogate"), 8),
        ),
        ("bapo+at-one", Arm("bapo+at-one@8", bapo.ClipSearch(rho0=0.3, may_empty=True), 8)),
        (
            "bapo-main+at-one",
            Arm("bapo-main+at-one@8", replace(bapo.PAPER_MAIN, may_empty=True), 8),
        ),
        (MANY, Arm(MANY, bapo.ClipSearch.fixed(0.8, 3.0), 2, 4, "sequence-mean", False, 0.5, True)),
    ],
)
def test_an_arm_is_its_method_its_modifiers_and_its_updates(text, arm):
    assert parse_arm(text, SEARCH) == arm


def test_a_neighbour_is_its_objective_with_the_same_modifiers():
    arm = parse_arm("gspo+sequence-mean@2", SEARCH)
    expected = NeighbourArm(
        "gspo+sequence-mean@2", bapo.GRPO, 2, aggregation="sequence-mean", objective="gspo"
    )
    assert arm == expected


def test_an_arm_is_saved_under_its_name_with_all_that_decides_its_numbers():
    config = parse_arm("cispo+share0.45@2x4", SEARCH).config()
    assert config == {
        "arm": "cispo+share0.45@2x4",
        "search": vars(bapo.GRPO),
        "epochs": 2,
        "parts": 4,
        "aggregation": "token-mean",
        "normalize_std": True,
        "share": 0.45,
        "scale_up": True,
        "objective": "cispo",
    }
    assert parse_arm("grpo", SEARCH).config()["objective"] == ""


@pytest.mark.parametrize(
    "text, message",
    [
        ("cispos", r"'cispos' in 'cispos' is no method: did you mean cispo\?$"),
        ("bapoo@8", r"'bapoo' in 'bapoo@8' is no method: did you mean bapo\?$"),
        ("GRPO@8", r"did you mean grpo\?$"),
        ("bapo-gat@8", r"did you mean bapo-gate\?$"),
        ("", "'' in '' is no method: see --help"),
        ("0.8", "'0.8' in '0.8' is no method: see --help"),
        ("1.5-0.8", "got 1.5 and 0.8"),
        ("grpo@0", "'grpo@0' must end with @UPDATES or @EPOCHSxPARTS"),
        ("grpo@x", "'grpo@x' must end with"),
        ("grpo@8@8", "'grpo@8@8' must end with"),
        ("grpo@8+no-std", "'grpo@8.no-std' must end with"),
        ("grpo@2x", "must end with"),
        ("grpo@2x0", "must end with"),
        ("grpo+high3", "'high3' in 'grpo.high3' is no modifier"),
        ("bapo+low0.97", "low_step"),
        ("grpo+", "'' in 'grpo.' is no modifier: sequence-mean, no-std, "),
        ("grpo+sequence_mean", "'sequence_mean' in 'grpo.sequence_mean' is no modifier"),
        ("grpo+no-std+fast@2", "'fast' in"),
        ("grpo+fresh@2", "'fresh' in"),
        ("grpo+share", "'share' in"),
        ("grpo+share0", "'share0' in"),
        ("grpo+share0.0", "'share0.0' in"),
        ("grpo+share1.5", "'share1.5' in"),
        ("grpo+share-1", "'share-1' in"),
        ("cispo+at-one@2", "'at-one' in 'cispo.at-one@2' is no modifier"),
    ],
)
def test_an_unknown_method_or_modifier_is_refused_by_name(text, message):
    with pytest.raises(ValueError, match=message):
        parse_arm(text, SEARCH)
