"""Arms: what train.py compares. An arm brings its loss; the loop asks no further."""

import re
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from bapo import (
    CLIP_HIGHER,
    GRPO,
    PAPER_MAIN,
    PAPER_OCTOTHINKER,
    ClipBounds,
    ClipSearch,
    bapo_loss,
    diagnostics,
    importance_ratio,
    search_clip_bounds,
    unclipped,
)
from support.batches import MicroBatch
from support.metrics import entropy_metrics, gradient_metrics
from support.objectives import OBJECTIVES, m2po_bounds, with_inputs
from support.suggest import likely


@dataclass(frozen=True)
class Arm:
    """An arm is METHOD[@UPDATES].

    UPDATES is the number of optimizer steps on each batch of rollouts (default 8; 1 is on-policy;
    E + 1 for the paper's staleness E; the "k x" of its figures). EPOCHSxPARTS cuts the batch into
    PARTS mini-batches of whole groups, and goes through them EPOCHS times in the same order: 8 is
    8x1, 1x8 sees each group once, 2x4 is the authors' scheme. Where fewer groups are left than
    parts, there are as many parts as groups. Methods:

        grpo              fixed clip bounds [0.8, 1.2]; clip-higher: [0.8, 1.28] (DAPO)
        LOW-HIGH          fixed bounds of your own, as absolute ratios: 0.8-1.5
        bapo              bounds searched anew for every update, in the range of --rho0, --low and
                          --high
        bapo-main         the paper's main setting as printed
        bapo-octothinker  the paper's setting for OctoThinker (App. A) as printed
        cispo, gspo, ...  the token losses of that name in support/objectives.py, with its defaults
                          (without --partial_budget decoupled-ppo, a-3po and off-policy-grpo are
                          grpo)
    """

    name: str  # as it is written, with the number of updates: bapo@8
    search: ClipSearch
    epochs: int = 8  # times that a batch of rollouts is gone through
    parts: int = 1  # mini-batches of a batch, an update for each

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
        """The settings as they are saved in a run's config."""
        config = asdict(self)
        config["arm"] = config.pop("name")
        config["objective"] = ""
        return config

    def search_bounds(self, log_probs: Tensor, whole: MicroBatch) -> ClipBounds:
        """Eq. 8 for a whole update, at log_probs [N, T]."""
        log_ratio = log_probs - whole.rollouts.log_probs
        return search_clip_bounds(log_ratio, whole.advantages, whole.weights, self.search)

    def loss(
        self,
        log_probs: Tensor,
        entropy: Tensor,
        part: MicroBatch,
        bounds: ClipBounds | tuple | None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss of a micro-batch, to be added up over the update, and its metrics (0-dim tensors).

        log_probs, entropy: [n, T] of the policy in training. bounds: those of the update; None
        where they are fixed, or where the micro-batch is the whole update: they are searched then.
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
        # d loss / d log pi of a token: -r A X (Eqs. 5, 7)
        advantages = part.advantages.unsqueeze(1)
        ratio = importance_ratio(log_probs.detach() - rollouts.log_probs)
        has_gradient = unclipped(ratio, advantages, metrics["low"], metrics["high"])
        gradient = -ratio * advantages * has_gradient
        return loss, metrics | entropy_metrics(gradient, log_probs, entropy, rollouts.mask)


@dataclass(frozen=True)
class NeighbourArm(Arm):
    """An arm whose token losses are those of support/objectives.py."""

    objective: str = ""

    @property
    def bounds_are_fixed(self) -> bool:
        return self.objective != "m2po"  # whose bounds depend on all tokens of an update

    def config(self) -> dict:
        return super().config() | {"objective": self.objective}

    def search_bounds(self, log_probs: Tensor, whole: MicroBatch) -> tuple[Tensor, Tensor]:
        """M2PO's bounds (low, high); no other objective is asked: their bounds are fixed."""
        rollouts = whole.rollouts
        return m2po_bounds(log_probs, rollouts.log_probs, whole.advantages, rollouts.mask)

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
        # None of the metrics that need bounds: they come from the gradient, below.
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

    Raises ValueError for what makes no sense, with the likely method.
    """
    name, at, updates = text.partition("@")
    if at and not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)?", updates):
        raise ValueError(f"methods: {text!r} must end with @UPDATES or @EPOCHSxPARTS: @8, @2x4")
    epochs, _, parts = (updates or "8").partition("x")
    epochs = int(epochs)
    parts = int(parts or 1)
    try:
        chosen = search_of_method(name, text, search)
    except ValueError as error:
        prefix = "" if str(error).startswith("methods:") else f"methods: {text!r}: "
        raise ValueError(f"{prefix}{error}") from error
    full_name = f"{name}@{epochs}" if parts == 1 else f"{name}@{epochs}x{parts}"
    if is_neighbour(name):
        return NeighbourArm(full_name, chosen, epochs, parts, objective=name)
    return Arm(full_name, chosen, epochs, parts)


def presets(search: ClipSearch) -> dict[str, ClipSearch]:
    """Method -> its search; `search` is that of `bapo`."""
    return {
        "grpo": GRPO,
        "clip-higher": CLIP_HIGHER,
        "bapo": search,
        "bapo-main": PAPER_MAIN,
        "bapo-octothinker": PAPER_OCTOTHINKER,
    }


def is_neighbour(method: str) -> bool:
    """Whether train.py takes this method's loss from support/objectives.py."""
    # Of the presets only the names count here, whatever the search of `bapo` is.
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
