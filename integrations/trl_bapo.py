"""BAPO in TRL: a GRPOTrainer whose two clip bounds come from bapo.py's search. Tested with TRL 1.16.0.

Put this file and bapo.py beside your GRPO script and change two lines, the import and the class:

    from trl_bapo import BAPOConfig as GRPOConfig, BAPOTrainer      # was: from trl import GRPOConfig, GRPOTrainer
    trainer = BAPOTrainer(model=..., reward_funcs=..., args=GRPOConfig(num_iterations=4, ...), ...)

Samples must be reused (num_iterations > 1 or steps_per_generation > gradient_accumulation_steps): otherwise all ratios are
1, no bound does anything, and a warning says so. Loss, KL, vLLM correction, metrics and evaluation stay TRL's; before each
loss in training BAPO sets its epsilon_low = 1 - low and epsilon_high = high - 1.

rho is the positive share of the gradient's mass in TRL's own loss (contribution="surrogate": of the loss itself). Tokens weigh
what they weigh in loss_type ("dapo", "bnpo", "grpo", "dr_grpo"), times tool_mask, importance_sampling_ratio (vLLM), off-policy
mask and entropy mask (top_entropy_quantile). The search spans all processes and, by search_scope,

    "micro-batch"  one micro-batch of each: bounds for each micro-batch, as in the authors' code, at no cost
    "step"         all that the optimizer step sees, as in the paper, at the cost of one more forward pass without gradient
                   per micro-batch, in training mode as TRL's for the old log-probs (none if gradient_accumulation_steps is 1)

Logged with TRL's metrics: bapo/low, bapo/high (absolute ratios), bapo/rho, bapo/rho_start, bapo/reached.
"""

import inspect
import warnings
from dataclasses import dataclass, fields, make_dataclass
from typing import ClassVar, Literal

import torch
import trl
from packaging.version import Version
from torch import Tensor
from trl import GRPOConfig, GRPOTrainer

from bapo import ClipBounds, ClipSearch, clip_bounds, contribution_masses

# Methods with an underscore are private to TRL and may change in any release.
if not Version("1.16") <= Version(trl.__version__) < Version("1.17"):
    warnings.warn(f"trl_bapo.py is tested with TRL 1.16, not {trl.__version__}: run its tests first", stacklevel=2)

TITLE = "BAPO: Stabilizing Off-Policy Reinforcement Learning for LLMs via Balanced Policy Optimization with Adaptive Clipping"
LOSS_TYPES = ("dapo", "bnpo", "grpo", "dr_grpo")  # those that clip a ratio per token at both bounds
# The options that a batch may hold for the forward pass (images): TRL gives both the same names.
FORWARD_OPTIONS = list(inspect.signature(GRPOTrainer._get_per_token_logps_and_entropies).parameters)

SearchFields = make_dataclass("SearchFields", [(field.name, field.type, field.default) for field in fields(ClipSearch)])


@dataclass
class BAPOConfig(GRPOConfig, SearchFields):
    """GRPOConfig with the fields of bapo.ClipSearch (rho0 ... may_empty: see there) and search_scope (see above). ValueError
    for what makes no sense or contradicts a search of both bounds. Warns if all ratios will be 1."""

    search_scope: Literal["micro-batch", "step"] = "micro-batch"

    def __post_init__(self):
        super().__post_init__()
        self.clip_search()
        if self.loss_type not in LOSS_TYPES:
            raise ValueError(f"loss_type={self.loss_type!r} does not clip every token at two bounds: use one of {LOSS_TYPES}")
        if self.importance_sampling_level != "token":
            raise ValueError(f"importance_sampling_level={self.importance_sampling_level!r}: BAPO clips tokens, use 'token'")
        for name in ("epsilon", "epsilon_high", "delta"):
            if getattr(self, name) != getattr(GRPOConfig, name):
                ranges = "low_start, low_max, high_start, high_max are the ranges, absolute ratios"
                raise ValueError(f"{name}={getattr(self, name)}: BAPO searches both bounds. Remove it; {ranges}")
        if self.search_scope not in ("micro-batch", "step"):
            raise ValueError(f"search_scope must be 'micro-batch' or 'step', got {self.search_scope!r}")
        accumulation, reuse = self.gradient_accumulation_steps, self.steps_per_generation * self.num_iterations
        if self.search_scope == "step" and reuse % accumulation:
            wanted = f"steps_per_generation * num_iterations = {reuse} a multiple of gradient_accumulation_steps={accumulation}"
            raise ValueError(f"search_scope='step' must see a step's samples at its start: make {wanted}, or use 'micro-batch'")
        if accumulation % reuse == 0:
            remedy = f"set num_iterations > 1 or steps_per_generation > gradient_accumulation_steps={accumulation}"
            warnings.warn(f"no sample outlives its optimizer step: all ratios are 1 and BAPO is GRPO; {remedy}", stacklevel=3)

    def clip_search(self) -> ClipSearch:
        return ClipSearch(**{field.name: getattr(self, field.name) for field in fields(ClipSearch)})


class BAPOTrainer(GRPOTrainer):
    """GRPOTrainer with BAPO's bounds; the same arguments, but args is a BAPOConfig."""

    _tag_names, _name = ["trl", "bapo"], "BAPO"
    _paper: ClassVar = {"title": TITLE, "id": "2510.18927"}

    def __init__(self, model, reward_funcs=None, args=None, *more, **options):
        args = BAPOConfig() if args is None else args
        if not isinstance(args, BAPOConfig):
            raise TypeError(f"args must be a BAPOConfig, got a {type(args).__name__}: replace it, the options are the same")
        self._search, self._inside_step = args.clip_search(), False
        self._to_search = None  # the micro-batch whose log-probs the next forward pass gives
        super().__init__(model, reward_funcs, args, *more, **options)

    def _prepare_inputs(self, generation_batch):
        """TRL's micro-batch; before a step's first one, with search_scope "step", also the bounds of the step."""
        inputs = super()._prepare_inputs(generation_batch)
        if self.model.training:
            if self.args.search_scope == "micro-batch" or self.current_gradient_accumulation_steps == 1:
                self._to_search = inputs
            elif not self._inside_step:
                self._set_bounds(self._step_masses())
            self._inside_step = not self.accelerator.sync_gradients
        return inputs

    def _get_per_token_logps_and_entropies(self, *args, **options):
        """TRL's forward pass, which its loss calls before it reads epsilon_low and epsilon_high."""
        outputs = super()._get_per_token_logps_and_entropies(*args, **options)
        if self._to_search is not None:
            inputs, self._to_search = self._to_search, None
            self._set_bounds(self._masses(inputs, outputs[0], outputs[1]))
        return outputs

    @torch.no_grad()
    def _step_masses(self) -> Tensor:
        """Sum of the masses of the step's micro-batches, which lie in TRL's buffer from this one on."""
        masses = 0
        for step in range(self._step, self._step + self.current_gradient_accumulation_steps):
            inputs = self._buffered_inputs[step % self.args.steps_per_generation]
            log_probs, entropies, _ = self._get_per_token_logps_and_entropies(
                self.model,
                torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1),
                torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1),
                inputs["completion_ids"].size(1),
                compute_entropy=True,
                **{name: inputs[name] for name in FORWARD_OPTIONS if name in inputs},
            )
            masses = masses + self._masses(inputs, log_probs, entropies)
        return masses

    @torch.no_grad()
    def _masses(self, inputs, log_probs: Tensor, entropies: Tensor) -> Tensor:
        """contribution_masses of one micro-batch; log_probs and entropies [N, T]. The weights are those of TRL's loss up to a
        factor that all micro-batches and processes share (responses per micro-batch, and dapo's and dr_grpo's constants)."""
        mask = inputs["completion_mask"] * inputs.get("tool_mask", 1)
        old_log_probs = inputs.get("old_per_token_logps", log_probs)  # none: TRL takes the ratio to be 1
        weights = mask.float()
        if self.loss_type == "grpo":
            weights = weights / mask.sum(1, keepdim=True).clamp(min=1)
        elif self.loss_type == "bnpo":
            weights = weights / mask.sum().clamp(min=1)
        if self.off_policy_mask_threshold is not None:
            advantages = inputs["advantages"].view(len(mask), -1)
            sampling = inputs.get("sampling_per_token_logps", old_log_probs)
            weights = weights * self.get_off_policy_mask(advantages, log_probs, sampling, mask, self.off_policy_mask_threshold)
        if self.top_entropy_quantile < 1:
            weights = weights * self.get_high_entropy_mask(entropies, mask, 1 - self.top_entropy_quantile)
        weights = weights * inputs.get("importance_sampling_ratio", 1)
        return contribution_masses(log_probs - old_log_probs, inputs["advantages"], weights, self._search)

    def _set_bounds(self, masses: Tensor) -> None:
        """Algorithm 1 on the masses of all processes; TRL's loss and clip metrics then use the bounds."""
        bounds = clip_bounds(self.accelerator.reduce(masses, reduction="sum"), self._search)
        metrics = dict(zip(ClipBounds._fields, torch.stack([value.double() for value in bounds]).tolist()))
        # In float64 1 - (1 - low) gives back the very float32 of the search.
        self.epsilon_low, self.epsilon_high = 1 - metrics["low"], metrics["high"] - 1
        for name, value in metrics.items():
            self._metrics["train"][f"bapo/{name}"].append(value)
