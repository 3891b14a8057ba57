"""Arms: what train.py compares. An arm brings its loss; the loop asks no further."""

import re
from dataclasses import asdict, dataclass, replace

import torch
from torch import Tensor

from bapo import (
    CLIP_HIGHER,
    GATE,
    GRPO,
    PAPER_MAIN,
    PAPER_OCTOTHINKER,
    ClipBounds,
    ClipSearch,
    bapo_loss,
    diagnostics,
    search_clip_bounds,
    token_losses,
)
from support.batches import MicroBatch
from support.metrics import entropy_metrics, gradient_metrics
from support.objectives import OBJECTIVES, balanced_scale, m2po_bounds, with_inputs
from support.suggest import likely

# The fields of a run's config that may differ between runs that share a table.
ARM_FIELDS = {
    "arm",
    "search",
    "epochs",
    "parts",
    "aggregation",
    "normalize_std",
    "share",
    "scale_up",
    "objective",
    "seed",
    "warm_start",
}


@dataclass(frozen=True)
class Arm:
    """An arm is METHOD[+MODIFIER...][@UPDATES].

    UPDATES is the number of optimizer steps on each batch of rollouts (default 8; 1 is on-policy;
    E + 1 for the paper's staleness E; the "k x" of its figures). EPOCHSxPARTS cuts the batch into
    PARTS mini-batches of whole groups, and goes through them EPOCHS times in the same order: 8 is
    8x1, 1x8 sees each group once, 2x4 is the authors' scheme. Where fewer groups are left than
    parts, there are as many parts as groups. Methods:

        grpo              fixed clip bounds [0.8, 1.2]; clip-higher: [0.8, 1.28] (DAPO)
        LOW-HIGH          fixed bounds of your own, as absolute ratios: 0.8-1.5
        bapo              bounds searched anew for every update, in the range of --rho0, --low and
                          --high
        bapo-gate         the same at 0.45 in [0.8, 1.1] x [1.2, 3.0]: past 1 the lower bound is a
                          gate, see bapo.ClipSearch
        bapo-main         the paper's main setting as printed
        bapo-octothinker  the paper's setting for OctoThinker (App. A) as printed
        balanced          GRPO, with negative advantages scaled down until the positive share at
                          ratio 1 is --rho0
        cispo, gspo, ...  the token losses of that name in support/objectives.py, with its defaults
                          (without --partial_budget decoupled-ppo, a-3po and off-policy-grpo are
                          grpo)

    Modifiers:

        sequence-mean     every response counts the same in the loss, instead of every token
        no-std            advantages without division by the group's standard deviation (Dr. GRPO)
        lowX, highX       the search may raise the lower (upper) bound up to X, as in
                          bapo+low0.98+high1.2; past 1 in steps of 0.06
        surrogate         rho counts the values of Eq. 8, instead of the gradient's masses (Eq. 5)
        at-one            the search may take out all negative tokens, which it does where every
                          ratio is 1
        shareS            negative advantages scaled up or down until the positive share at ratio 1
                          is S; share1: positives alone
    """

    name: str  # as it is written, with the number of updates: bapo+high3@8
    search: ClipSearch
    epochs: int = 8  # times that a batch of rollouts is gone through
    parts: int = 1  # mini-batches of a batch, an update for each
    aggregation: str = "token-mean"
    normalize_std: bool = True
    share: float | None = None  # to which negative advantages are scaled
    scale_up: bool = False  # or only down

    @property
    def updates(self) -> int:
        """Optimizer steps on each batch of rollouts, unless fewer groups than parts are left."""
        return self.epochs * self.parts

    @property
    def bounds_are_fixed(self) -> bool:
        """Whether bounds are known without looking at the whole optimizer step."""
        low_is_fixed = self.search.low_start == self.search.low_max
        high_is_fixed = self.search.high_start == self.search.high_max
        return low_is_fixed and high_is_fixed

    def config(self) -> dict:
        """All that decides the numbers, as it is saved."""
        config = asdict(self)
        config["arm"] = config.pop("name")
        config["objective"] = ""
        return config

    def scaled_advantages(self, advantages: Tensor, weights: Tensor) -> Tensor:
        """Advantages [N] of an optimizer step, negative ones scaled where the arm asks for it."""
        if self.share is None:
            return advantages
        scale = balanced_scale(advantages, weights, self.share, self.scale_up)
        return torch.where(advantages < 0, scale * advantages, advantages)

    def search_bounds(self, log_probs: Tensor, step: MicroBatch) -> ClipBounds:
        """Eq. 8 for a whole optimizer step, at log_probs [N, T]."""
        log_ratio = log_probs - step.rollouts.log_probs
        return search_clip_bounds(log_ratio, step.advantages, step.weights, self.search)

    def loss(
        self, log_probs: Tensor, entropy: Tensor, part: MicroBatch, bounds: ClipBounds | None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss of a micro-batch, to be added up over the step, and its metrics (0-dim tensors).

        log_probs, entropy: [n, T] of the policy in training. bounds: those of the step; None where
        they are fixed, or where the micro-batch is the whole step: they are searched then.
        """
        rollouts = part.rollouts
        loss, metrics = bapo_loss(
            log_probs,
            rollouts.log_probs,
            part.advantages,
            rollouts.mask,
            self.search,
            weights=part.weights,
            bounds=bounds,
        )

        def losses(leaf: Tensor) -> Tensor:
            log_ratio = leaf - rollouts.log_probs
            return token_losses(log_ratio, part.advantages, metrics["low"], metrics["high"])

        gradient = token_gradients(losses, log_probs)
        return loss, metrics | entropy_metrics(gradient, log_probs, entropy, rollouts.mask)


@dataclass(frozen=True)
class NeighbourArm(Arm):
    """An arm whose token losses are those of support/objectives.py."""

    objective: str = ""

    @property
    def bounds_are_fixed(self) -> bool:
        return self.objective != "m2po"

    def config(self) -> dict:
        return super().config() | {"objective": self.objective}

    def search_bounds(self, log_probs: Tensor, step: MicroBatch):
        rollouts = step.rollouts
        return m2po_bounds(log_probs, rollouts.log_probs, step.advantages, rollouts.mask)

    def loss(self, log_probs, entropy, part, bounds):
        rollouts = part.rollouts

        def losses(leaf: Tensor) -> Tensor:
            return with_inputs(
                self.objective,
                leaf,
                rollouts.log_probs,
                part.advantages,
                rollouts.mask,
                entropy=entropy,
                bounds=bounds,
                start_log_probs=part.start_log_probs,
                proximal_log_probs=part.start_log_probs,
                ages=part.ages,
                rollout_entropy=rollouts.entropy,
            )

        loss = (part.weights * losses(log_probs)).sum()
        log_ratio = log_probs.detach() - rollouts.log_probs
        no_bounds = (float("nan"), float("nan"))
        metrics = diagnostics(log_ratio, part.advantages, rollouts.mask, no_bounds, part.weights)
        gradient = token_gradients(losses, log_probs)
        metrics |= gradient_metrics(gradient, part.advantages, rollouts.mask, part.weights)
        metrics |= entropy_metrics(gradient, log_probs, entropy, rollouts.mask)
        return loss, metrics


def token_gradients(losses, log_probs: Tensor) -> Tensor:
    """d losses / d log_probs, token by token [n, T]; with clipping -r A X."""
    with torch.enable_grad():
        leaf = log_probs.detach().clone().requires_grad_()
        (gradient,) = torch.autograd.grad(losses(leaf).sum(), leaf)
    return gradient


# ---------------------------------------------------------------- arms by name
def parse_arm(text: str, search: ClipSearch) -> Arm:
    """The arm that `text` names, `search` being that of `bapo`.

    Raises ValueError for what makes no sense, with the likely method or modifier.
    """
    name, _, updates = text.partition("@")
    if not re.fullmatch(r"|[1-9]\d*(x[1-9]\d*)?", updates):
        raise ValueError(
            f"methods: {text!r} must end with @UPDATES or @EPOCHSxPARTS, as @8 or @2x4"
        )
    epochs, _, parts = (updates or "8").partition("x")
    epochs = int(epochs)
    parts = int(parts or 1)
    method, *modifiers = name.split("+")
    settings = {"search": search_of_method(method, text, search)}
    if method == "balanced":
        settings["share"] = search.rho0
    for modifier in modifiers:
        settings |= settings_of_modifier(modifier, method, text, settings["search"])
    settings["name"] = f"{name}@{epochs}" if parts == 1 else f"{name}@{epochs}x{parts}"
    settings["epochs"] = epochs
    settings["parts"] = parts
    if is_neighbour(method):
        return NeighbourArm(objective=method, **settings)
    return Arm(**settings)


def presets(search: ClipSearch) -> dict[str, ClipSearch]:
    """Method -> its search; `search` is that of `bapo`."""
    return {
        "grpo": GRPO,
        "clip-higher": CLIP_HIGHER,
        "bapo": search,
        "balanced": GRPO,
        "bapo-gate": GATE,
        "bapo-main": PAPER_MAIN,
        "bapo-octothinker": PAPER_OCTOTHINKER,
    }


def is_neighbour(method: str) -> bool:
    """Whether train.py takes this method's loss from support/objectives.py."""
    return method in OBJECTIVES and method not in presets(GRPO)


def search_of_method(method: str, text: str, search: ClipSearch) -> ClipSearch:
    """The search of a method, `search` being that of `bapo`; ValueError for an unknown one."""
    bounds = re.fullmatch(r"(\d*\.?\d+)-(\d*\.?\d+)", method)
    if bounds:
        return ClipSearch.fixed(float(bounds[1]), float(bounds[2]))
    if is_neighbour(method):
        return GRPO
    known = presets(search)
    if method not in known:
        meant = likely(method, [*known, *OBJECTIVES])
        hint = f"did you mean {meant}?" if meant else "see --help for the methods"
        raise ValueError(f"methods: {method!r} in {text!r} is no method: {hint}")
    return known[method]


def settings_of_modifier(modifier: str, method: str, text: str, search: ClipSearch) -> dict:
    """Fields of Arm that a modifier sets, given the search so far.

    Raises ValueError for an unknown one.
    """
    if modifier == "sequence-mean":
        return {"aggregation": "sequence-mean"}
    if modifier == "no-std":
        return {"normalize_std": False}
    share = re.fullmatch(r"share(0?\.\d+|1)", modifier)
    if share and float(share[1]) > 0:
        return {"share": float(share[1]), "scale_up": True}
    if modifier == "surrogate" and not is_neighbour(method):
        return {"search": replace(search, contribution="surrogate")}
    if modifier == "at-one" and not is_neighbour(method):
        return {"search": replace(search, may_empty=True)}
    top = re.fullmatch(r"(low|high)(\d*\.?\d+)", modifier)
    if top and method.startswith("bapo"):
        return {"search": with_range(search, top[1], float(top[2]))}
    known = "sequence-mean, no-std, surrogate, at-one, shareS; for bapo lowX, highX"
    raise ValueError(f"methods: {modifier!r} in {text!r} is no modifier: {known}")


def with_range(search: ClipSearch, side: str, top: float) -> ClipSearch:
    """The same search with another end of the range of one side."""
    if side == "high":
        return replace(search, high_max=top)
    step = 0.06 if top > 1 else search.low_step  # no point of the grid at 1
    return replace(search, low_max=top, low_step=step)
