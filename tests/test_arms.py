"""support/arms.py: an arm is its method and its updates."""

import pytest

import bapo
from support.arms import Arm, NeighbourArm, parse_arm

SEARCH = bapo.ClipSearch(rho0=0.3)  # of the arm `bapo`


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
        ("grpo@1x8", Arm("grpo@1x8", bapo.GRPO, 1, 8)),
        ("grpo@8x1", Arm("grpo@8", bapo.GRPO, 8)),
        ("bapo-main@2x4", Arm("bapo-main@2x4", bapo.PAPER_MAIN, 2, 4)),
    ],
)
def test_an_arm_is_its_method_and_its_updates(text, arm):
    assert parse_arm(text, SEARCH) == arm


def test_a_neighbour_is_its_objective():
    expected = NeighbourArm("gspo@2", bapo.GRPO, 2, objective="gspo")
    assert parse_arm("gspo@2", SEARCH) == expected


def test_an_arm_is_saved_under_its_name_with_all_that_decides_its_numbers():
    config = parse_arm("cispo@2x4", SEARCH).config()
    assert config == {
        "arm": "cispo@2x4",
        "search": vars(bapo.GRPO),
        "epochs": 2,
        "parts": 4,
        "objective": "cispo",
    }
    assert parse_arm("grpo", SEARCH).config()["objective"] == ""


@pytest.mark.parametrize(
    "text, message",
    [
        ("cispos", r"'cispos' in 'cispos' is no method: did you mean cispo\?$"),
        ("bapoo@8", r"'bapoo' in 'bapoo@8' is no method: did you mean bapo\?$"),
        ("GRPO@8", r"did you mean grpo\?$"),
        ("bapo-mai@8", r"did you mean bapo-main\?$"),
        ("", "'' in '' is no method: see --help"),
        ("0.8", "'0.8' in '0.8' is no method: see --help"),
        ("1.5-0.8", "got 1.5 and 0.8"),
        ("grpo@0", "'grpo@0' must end with @UPDATES or @EPOCHSxPARTS"),
        ("grpo@x", "'grpo@x' must end with"),
        ("grpo@8@8", "'grpo@8@8' must end with"),
        ("grpo@2x", "must end with"),
        ("grpo@2x0", "must end with"),
        ("grpo+no-std@8", "'grpo.no-std' in"),
        ("balanced@8", "'balanced' in"),
    ],
)
def test_an_unknown_method_is_refused_by_name(text, message):
    with pytest.raises(ValueError, match=message):
        parse_arm(text, SEARCH)
