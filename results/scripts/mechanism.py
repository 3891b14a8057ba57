"""Train as train.py does, and log which tokens a clip removes and what they do to entropy.

    python -m results.scripts.mechanism --methods grpo@8 --seeds 174 --output_dir runs/mechanism/toy

It takes train.py's options, trains with one CPU thread in this process, and changes nothing of the
runs. `reverse@8` is BAPO's switch reversed: bounds of [0.9, 3.0] if rho at [0.6, 1.2] is at least
--rho0, and else [0.6, 1.2]. Every update logs, for each class of tokens in CLASSES (A is the
advantage, r the ratio before the update):

    share_CLASS          share of the update's response tokens
    improbable_CLASS     share of the class with log pi + H < 0, whose gain raises entropy
    probability_CLASS    median probability of the sampled token under pi
    fall_CLASS           the class's term of bapo.predicted_entropy_fall, if nothing is clipped
    fall_at_LOW_HIGH     predicted_entropy_fall with these bounds, on the same ratios

Before the fifth update of the steps in SLOPE_STEPS also

    slopes_CLASS         for each group: minus the inner product of the gradients of the update's
                         mean entropy and of the class's part of the loss, without a clip. Above 0
                         the class raises entropy to first order, if the step follows the gradient
    slope_CLASS          their sum
"""

import math
import sys
from dataclasses import dataclass

import torch
from torch import Tensor

import bapo
import train
from support import command_line

CLASSES = {  # sign of A, r from, r below
    "neg_below_0.6": (-1, 0.0, 0.6),
    "neg_0.6_0.8": (-1, 0.6, 0.8),
    "neg_0.8_0.9": (-1, 0.8, 0.9),
    "neg_above_0.9": (-1, 0.9, math.inf),
    "pos_below_1.2": (1, 0.0, 1.2),
    "pos_1.2_3.0": (1, 1.2, 3.0),
    "pos_above_3.0": (1, 3.0, math.inf),
}
PAIRS = ((0.6, 1.2), (0.8, 1.2), (0.8, 1.5), (0.9, 3.0))
SLOPE_STEPS = (4, 12, 60)
SLOPE_UPDATE = 5


@dataclass(frozen=True)
class Reversed(train.Method):
    """BAPO's two pairs of bounds, exchanged."""

    def loss(self, log_probs, rollout_log_probs, advantages, mask) -> tuple[Tensor, dict]:
        """Return the loss of one update and its metrics."""
        log_ratio = log_probs.detach() - rollout_log_probs
        weights = bapo.token_weights(mask)
        start = bapo.ClipSearch.fixed(self.search.low_start, self.search.high_start)
        masses = bapo.contribution_masses(log_ratio, advantages, weights, start)
        rho = bapo.search_clip_bounds(masses, start).rho
        reached = rho >= self.search.rho0 - 1e-6
        low, high = (0.9, 3.0) if reached else (0.6, 1.2)
        bounds = bapo.ClipBounds(low, high, math.nan, rho, reached)
        return bapo.bapo_loss(
            log_probs, rollout_log_probs, advantages, mask, self.search, bounds=bounds
        )


def members(ratio: Tensor, advantages: Tensor) -> dict[str, Tensor]:
    """Return which tokens [B, T] belong to each class."""
    return {
        name: (sign * advantages > 0) & (ratio >= low) & (ratio < high)
        for name, (sign, low, high) in CLASSES.items()
    }


@torch.no_grad()
def measure(log_ratio, log_probs, entropy, advantages, mask) -> dict[str, float]:
    """Return the metrics of one update's classes and pairs of bounds."""
    ratio = bapo.importance_ratio(log_ratio)
    advantages = advantages.unsqueeze(1) * mask
    surprise = log_probs + entropy
    falls = ratio * advantages * surprise
    tokens = mask.sum()
    metrics = {}
    for name, chosen in members(ratio, advantages).items():
        metrics[f"share_{name}"] = chosen.sum() / tokens
        metrics[f"improbable_{name}"] = (surprise[chosen] < 0).float().mean()
        metrics[f"probability_{name}"] = (
            log_probs[chosen].exp().quantile(0.5) if chosen.any() else math.nan
        )
        metrics[f"fall_{name}"] = falls[chosen].sum() / tokens
    for low, high in PAIRS:
        metrics[f"fall_at_{low}_{high}"] = bapo.predicted_entropy_fall(
            log_ratio, log_probs, entropy, advantages, mask, (low, high)
        )
    return {name: float(value) for name, value in metrics.items()}


def differentiable(policy, rollouts, rows: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Return log-probs and entropies [n, T] of these rows, both with a graph."""
    states = policy.get_decoder()(rollouts.sequences[rows], use_cache=False).last_hidden_state
    member, position = rollouts.mask[rows].nonzero(as_tuple=True)
    states = states[member, rollouts.prompt_lengths[rows][member] + position - 1]
    log_softmax = (policy.get_output_embeddings()(states).float() / temperature).log_softmax(-1)
    targets = rollouts.response_ids[rows][member, position]
    log_probs = log_softmax.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    entropy = -(log_softmax.exp() * log_softmax).sum(-1)
    zeros = torch.zeros(rollouts.mask[rows].shape)
    places = (member, position)
    return zeros.index_put(places, log_probs), zeros.index_put(places, entropy)


def slopes(policy, rollouts, rows: Tensor, options: train.Options) -> dict[str, object]:
    """Return slope and slopes of every class, see the top of this file."""
    parameters = [one for one in policy.parameters() if one.requires_grad]
    groups = rows.split(options.group_size)
    tokens = rollouts.mask[rows].sum()

    def gradient(value: Tensor) -> list[Tensor]:
        found = torch.autograd.grad(value, parameters, retain_graph=True, allow_unused=True)
        return [torch.zeros_like(p) if g is None else g for g, p in zip(found, parameters)]

    of_entropy = [torch.zeros_like(one) for one in parameters]
    for group in groups:
        _, entropy = differentiable(policy, rollouts, group, options.temperature)
        for total, part in zip(of_entropy, gradient(entropy.sum() / tokens)):
            total += part
    found = {name: [] for name in CLASSES}
    for group in groups:
        log_probs, _ = differentiable(policy, rollouts, group, options.temperature)
        mask = rollouts.mask[group]
        log_ratio = (log_probs - rollouts.rollout_log_probs[group]) * mask
        advantages = rollouts.advantages[group].unsqueeze(1) * mask
        ratio = bapo.importance_ratio(log_ratio)
        for name, chosen in members(ratio.detach(), advantages).items():
            slope = 0.0
            if chosen.any():
                of_loss = gradient(-(ratio * advantages)[chosen].sum() / tokens)
                slope = -sum((a * b).sum().item() for a, b in zip(of_loss, of_entropy))
            found[name].append(slope)
    metrics = {f"slope_{name}": sum(values) for name, values in found.items()}
    for name, values in found.items():
        metrics[f"slopes_{name}"] = ";".join(f"{value:.3g}" for value in values)
    return metrics


def install() -> None:
    """Make train.py log more, and know reverse@8."""
    train_backward = train.backward
    train_parse = train.parse_method
    update_of = {}  # run folder -> (step, update)

    def backward(policy, rollouts, mini_batch, run, step):
        last_step, last_update = update_of.get(run.folder, (0, 0))
        update = last_update + 1 if step == last_step else 1
        update_of[run.folder] = (step, update)
        rows = torch.cat(mini_batch)
        more = {}
        if step in SLOPE_STEPS and update == SLOPE_UPDATE:
            more = slopes(policy, rollouts, rows, run.options)
        seen = {}

        def predicted(log_ratio, log_probs, entropy, advantages, mask, bounds):
            seen.update(measure(log_ratio, log_probs, entropy.detach(), advantages, mask))
            return bapo.predicted_entropy_fall(
                log_ratio, log_probs, entropy, advantages, mask, bounds
            )

        train.predicted_entropy_fall = predicted
        return train_backward(policy, rollouts, mini_batch, run, step) | seen | more

    def parse_method(text, options):
        if text.startswith("reverse@"):
            method = train_parse(text.replace("reverse", "bapo"), options)
            return Reversed(**vars(method) | {"name": text})
        return train_parse(text, options)

    train.backward = backward
    train.parse_method = parse_method


def main(arguments: list[str] | None = None) -> int:
    """Run the command line. Returns the exit status of train.py."""
    install()
    return train.main([*(sys.argv[1:] if arguments is None else arguments), "--jobs", "1"])


if __name__ == "__main__":
    torch.set_num_threads(1)
    command_line.command(
        "mechanism.py", main, "Interrupted: the same command with --resume continues"
    )
