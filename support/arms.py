"""Arms: what train.py compares."""

import re
from dataclasses import dataclass, fields, replace

from bapo import CLIP_HIGHER, GATE, GRPO, PAPER_MAIN, PAPER_OCTOTHINKER, ClipSearch
from support.objectives import OBJECTIVES


@dataclass(frozen=True)
class Arm:
    """An arm is METHOD[+MODIFIER...][@UPDATES]; UPDATES is the number of optimizer steps on each batch of rollouts (default
    8; 1 is on-policy; E + 1 for the paper's staleness E; the "k x" of its figures). EPOCHSxPARTS cuts the batch into PARTS
    mini-batches of whole groups, and goes through them EPOCHS times in the same order: 8 is 8x1, 1x8 sees each group once, 2x4
    is the authors' scheme. Where fewer groups are left than parts, there are as many parts as groups. Methods:

        grpo             fixed clip bounds [0.8, 1.2]; clip-higher: [0.8, 1.28] (DAPO)
        LOW-HIGH         fixed bounds of your own, as absolute ratios: 0.8-1.5
        bapo             bounds searched anew for every update, in the range of --rho0, --low and --high
        bapo-gate        the same at 0.45 in [0.8, 1.1] x [1.2, 3.0]: past 1 the lower bound is a gate, see bapo.ClipSearch
        bapo-main        the paper's main setting as printed; bapo-octothinker: its setting for OctoThinker (App. A)
        balanced         GRPO, with negative advantages scaled down until the positive share at ratio 1 is --rho0
        cispo, gspo, ... the token losses of that name in objectives.py, with its defaults (decoupled-ppo, a-3po and
                         off-policy-grpo are grpo without --partial_budget)

    Modifiers:

        sequence-mean    every response counts the same in the loss, instead of every token
        no-std           advantages without the division by the group's standard deviation (Dr. GRPO)
        lowX, highX      the search may raise the lower (upper) bound up to X: bapo+low0.98+high1.2; past 1 in steps of 0.06
        surrogate        rho counts the values of Eq. 8, instead of the gradient's masses (Eq. 5)
        at-one           the search may take out all negative tokens, which it does where every ratio is 1
        shareS           negative advantages scaled up or down until the positive share at ratio 1 is S; share1: positives alone
    """

    arm: str
    search: ClipSearch
    epochs: int  # times that a batch of rollouts is gone through
    parts: int = 1  # mini-batches of a batch, an update for each
    aggregation: str = "token-mean"
    normalize_std: bool = True
    share: float | None = None  # to which negative advantages are scaled
    scale_up: bool = False  # or only down
    objective: str = ""  # of objectives.py, in place of the clipped surrogate


ARM_FIELDS = {field.name for field in fields(Arm)} | {"seed", "warm_start"}  # what may differ between runs that are compared


def parse_arm(text: str, search: ClipSearch) -> Arm:
    """The arm that `text` names, `search` being that of `bapo`. Raises ValueError for what makes no sense."""
    name, _, count = text.partition("@")
    epochs, _, parts = (count or "8").partition("x")
    method, *modifiers = name.split("+")
    presets = {"grpo": GRPO, "clip-higher": CLIP_HIGHER, "bapo": search, "balanced": GRPO}
    presets |= {"bapo-gate": GATE, "bapo-main": PAPER_MAIN, "bapo-octothinker": PAPER_OCTOTHINKER}
    bounds = re.fullmatch(r"(\d*\.?\d+)-(\d*\.?\d+)", method)
    others = {other: GRPO for other in OBJECTIVES if other not in presets}
    if not (method in presets | others or bounds) or not re.fullmatch(r"|[1-9]\d*(x[1-9]\d*)?", count):
        raise ValueError(f"methods: {text!r} is none of {', '.join(presets | others)}, LOW-HIGH, each with or without @UPDATES")
    chosen = ClipSearch.fixed(float(bounds[1]), float(bounds[2])) if bounds else (presets | others)[method]
    changes = {"share": search.rho0} if method == "balanced" else {"objective": method} if method in others else {}
    of_arm = {"sequence-mean": {"aggregation": "sequence-mean"}, "no-std": {"normalize_std": False}}
    of_search = {"surrogate": {"contribution": "surrogate"}, "at-one": {"may_empty": True}}
    for modifier in modifiers:
        if modifier in of_arm:
            changes |= of_arm[modifier]
        elif modifier in of_search and method not in others:
            chosen = replace(chosen, **of_search[modifier])
        elif (top := re.fullmatch(r"(low|high)(\d*\.?\d+)", modifier)) and method.startswith("bapo"):
            chosen = replace(chosen, **{f"{top[1]}_max": float(top[2])})
            if top[1] == "low" and chosen.low_max > 1:
                chosen = replace(chosen, low_step=0.06)  # no point of the grid at 1
        elif (share := re.fullmatch(r"share(0?\.\d+|1)", modifier)) and float(share[1]) > 0:
            changes |= {"share": float(share[1]), "scale_up": True}
        else:
            raise ValueError(
                f"methods: {modifier!r} in {text!r} is no modifier: {', '.join(of_arm | of_search)}, shareS, lowX, highX"
            )
    updates = epochs if parts in ("", "1") else f"{epochs}x{parts}"
    return Arm(f"{name}@{updates}", chosen, int(epochs), int(parts or 1), **changes)
