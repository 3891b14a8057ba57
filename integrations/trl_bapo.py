"""BAPO in TRL 1.16: a GRPOTrainer whose two clip bounds come from bapo.py.

Methods with an underscore are private to TRL and may change in any release, so run
tests/test_trl_bapo.py first if yours is another one.

Put the folder that holds bapo.py and integrations/ on PYTHONPATH, or your script into it. Then
change two lines of your script, the import and the class:

    # was: from trl import GRPOConfig, GRPOTrainer
    from integrations.trl_bapo import BAPOConfig as GRPOConfig, BAPOTrainer
    # was: trainer = GRPOTrainer(...)
    trainer = BAPOTrainer(model=..., reward_funcs=..., args=GRPOConfig(num_iterations=4, ...), ...)

Samples must be reused: num_iterations > 1, or steps_per_generation > gradient_accumulation_steps.
Otherwise all ratios are 1 and no bound does anything; a warning says so.

Loss, KL, vLLM correction, metrics and evaluation stay TRL's. Before each loss in training, BAPO
sets TRL's epsilon_low = 1 - low and epsilon_high = high - 1.

rho is the positive share of TRL's own loss without its KL term. A token has the weight that it has
in TRL's loss: by loss_type ("dapo", "bnpo", "grpo", "dr_grpo"), times tool_mask and
importance_sampling_ratio (vLLM). The off-policy mask and the entropy mask (top_entropy_quantile)
are refused.

The search spans all that the optimizer step sees, in all processes, as in the paper's Algorithm 1.
It costs one more forward pass without gradient per micro-batch, in training mode as TRL's for the
old log-probs.

Logged with TRL's metrics: bapo/low, bapo/high (absolute ratios), bapo/rho, bapo/rho_start and
bapo/reached. If no token in a search has an advantage, rho is not defined and is not logged.
"""

import inspect
import math
import warnings
from dataclasses import dataclass

import torch
from torch import Tensor
from trl import GRPOConfig, GRPOTrainer

from bapo import contribution_masses, search_clip_bounds
from integrations.common import SearchOptions

# What options may be: the loss clips a ratio per token, at two bounds that the search sets, and
# `_weights` knows all that weighs a token.
ALLOWED = {
    "loss_type": ("dapo", "bnpo", "grpo", "dr_grpo"),
    "importance_sampling_level": ("token",),
    "epsilon": (GRPOConfig.epsilon,),
    "epsilon_high": (None,),
    "delta": (None,),
    "off_policy_mask_threshold": (None,),
    "top_entropy_quantile": (1.0,),
}

# What TRL's forward pass takes. The samples may hold some of it (images), under the same names.
FORWARD_OPTIONS = inspect.signature(GRPOTrainer._get_per_token_logps_and_entropies).parameters


@dataclass
class BAPOConfig(SearchOptions, GRPOConfig):
    """GRPOConfig with the fields of bapo.ClipSearch.

    ValueError for what makes no sense or contradicts a search of both bounds. Warns if all ratios
    will be 1.
    """

    def __post_init__(self):
        super().__post_init__()
        self.clip_search()
        for name, allowed in ALLOWED.items():
            if getattr(self, name) not in allowed:
                raise ValueError(
                    f"{name} must be one of {allowed} with BAPO. To set the clip bounds use"
                    " low_start, low_max, high_start and high_max, as absolute ratios"
                )
        micro_batches_served = self.steps_per_generation * self.num_iterations
        if micro_batches_served % self.gradient_accumulation_steps != 0:
            raise ValueError(
                "steps_per_generation * num_iterations must be a multiple of"
                " gradient_accumulation_steps: the search needs all samples of an optimizer step"
                " at its start"
            )
        if micro_batches_served == self.gradient_accumulation_steps:
            warnings.warn(
                "samples are not reused, so all ratios are 1 and BAPO is GRPO: set num_iterations"
                " > 1 or steps_per_generation > gradient_accumulation_steps",
                stacklevel=3,
            )


class BAPOTrainer(GRPOTrainer):
    """GRPOTrainer with BAPO's bounds; the same arguments, but args is a BAPOConfig."""

    def _prepare_inputs(self, generation_batch):
        """TRL's micro-batch. The first one of an optimizer step sets the step's bounds."""
        inputs = super()._prepare_inputs(generation_batch)
        if self.model.training and self._step % self.current_gradient_accumulation_steps == 0:
            self._search_bounds()
        return inputs

    @torch.no_grad()
    def _search_bounds(self) -> None:
        """Algorithm 1 on the micro-batches of this optimizer step and all processes.

        TRL's loss and its clip metrics then use the bounds.
        """
        search = self.args.clip_search()
        masses = 0
        # The micro-batches lie in TRL's buffer, from the current one on.
        for step in range(self._step, self._step + self.current_gradient_accumulation_steps):
            inputs = self._buffered_inputs[step % self.args.steps_per_generation]
            log_probs, _, _ = self._get_per_token_logps_and_entropies(
                self.model,
                torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1),
                torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1),
                inputs["completion_ids"].size(1),
                **{name: inputs[name] for name in FORWARD_OPTIONS if name in inputs},
            )
            # Without old log-probs TRL takes every ratio to be 1.
            log_ratio = log_probs - inputs.get("old_per_token_logps", log_probs)
            weights = self._weights(inputs)
            masses += contribution_masses(log_ratio, inputs["advantages"], weights, search)
        masses = self.accelerator.reduce(masses, reduction="sum")
        bounds = search_clip_bounds(masses, search)
        self.epsilon_low = 1 - bounds.low
        self.epsilon_high = bounds.high - 1
        for name, value in bounds._asdict().items():
            if not math.isnan(value):  # TRL averages what it logs
                self._metrics["train"][f"bapo/{name}"].append(float(value))

    def _weights(self, inputs) -> Tensor:
        """Each token's weight [B, T] in TRL's loss of a micro-batch.

        It lacks factors that all micro-batches and processes share, which cancel in a share: the
        number of responses per micro-batch, and the constants of dapo and dr_grpo.
        """
        mask = inputs["completion_mask"] * inputs.get("tool_mask", 1)
        weights = mask * inputs.get("importance_sampling_ratio", 1.0)
        if self.loss_type == "grpo":
            return weights / mask.sum(1, keepdim=True).clamp(min=1)
        if self.loss_type == "bnpo":
            return weights / mask.sum().clamp(min=1)
        return weights
