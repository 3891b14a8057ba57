"""Train with replaced losses: another scope of the search, another run's bounds, more logged.

    python -m results.scripts.variants scope --seeds 150 151 --output_dir runs/scope
    python -m results.scripts.variants yoked --seeds 126 127 --learning_rate 3e-4 --rho0 0.42 \
--output_dir runs/target-0.42
    python -m results.scripts.variants measured --seeds 0 --output_dir runs/measured

For scope and yoked the runs of train.py must be in output_dir, made with the same options; these
are put beside them. The same command continues after a kill (measured: with --resume).

scope: bapo-main-per16@8 and bapo-main-per4@8 search for every 16 or 4 responses of an update, drawn
at random, in the paper's main setting. bapo-gradient@8 has one search per update, with rho from
gradients and --rho0.

measured: the runs of --methods, seed by seed. They train as in train.py, and log more (Measured).
A run that has ended keeps no checkpoint. measured-with-larger-step makes grpo@8 at 1.5 times the
learning rate, too, in a folder beside output_dir.

yoked: yoked@8 takes the bounds that bapo@8 found at the same update with the next of the given
seeds, and the last seed those of the first. If that run has no such update, it takes its last ones.
"""

import math
import random
import shutil
import sys
from bisect import bisect
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

import bapo
import train
from support import checkpoints, command_line, countdown, data, files, processes

UPDATES = 8  # on each batch, of all methods here


@dataclass(frozen=True)
class ByParts(train.Method):
    """bapo_loss with a search for every `size` responses of an update."""

    seed: int
    size: int
    search_of_part: bapo.ClipSearch

    def loss(
        self, log_probs, rollout_log_probs, advantages, mask, step, update
    ) -> tuple[Tensor, dict]:
        """Return the sum of the parts' losses, and the metrics of the update.

        low, high and reached are means over the parts, which count equally. at_start and at_end
        are the shares of parts whose bounds are the first or the last of their ranges.
        """
        search = self.search_of_part
        weights = bapo.token_weights(mask)
        order = random.Random(f"{self.seed}/{step}/{update}").sample(range(len(mask)), len(mask))
        log_ratio = log_probs.detach() - rollout_log_probs
        ratio = bapo.importance_ratio(log_ratio)
        gradient = weights * advantages.unsqueeze(1) * ratio
        loss = 0.0
        searches = []
        for rows in torch.tensor(order).split(self.size):
            tensors = log_probs[rows], rollout_log_probs[rows], advantages[rows], mask[rows]
            loss_of_part, metrics = bapo.bapo_loss(*tensors, search, weights=weights[rows])
            loss = loss + loss_of_part
            low = metrics["low"].item()
            high = metrics["high"].item()
            gradient[rows] *= bapo.unclipped(ratio[rows], advantages[rows].unsqueeze(1), low, high)
            at_start = math.isclose(high, search.high_start, rel_tol=1e-6)
            at_end = math.isclose(low, search.low_max, rel_tol=1e-6)
            searches.append((low, high, metrics["reached"].item(), at_start, at_end))
        metrics = bapo.diagnostics(log_ratio, advantages, mask, None, weights)
        names = ("low", "high", "reached", "at_start", "at_end")
        metrics |= zip(names, torch.tensor(searches).mean(0))
        metrics["gradient_share"] = gradient.clamp(min=0).sum() / gradient.abs().sum()
        return loss, metrics


@cache
def bounds_of(run: Path) -> tuple[list, list]:
    """Return (step, update) and (low, high) of a run's updates."""
    lines = [line for line in files.read_lines(run / "metrics.jsonl") if line["update"]]
    places = [(line["step"], line["update"]) for line in lines]
    return places, [(line["low"], line["high"]) for line in lines]


@dataclass(frozen=True)
class Yoked(train.Method):
    """bapo_loss with the bounds that the run in `donor` had at the same update."""

    donor: Path

    def loss(
        self, log_probs, rollout_log_probs, advantages, mask, step, update
    ) -> tuple[Tensor, dict]:
        """Return the loss and its metrics."""
        places, found = bounds_of(self.donor)
        same_or_last = max(0, bisect(places, (step, update)) - 1)
        tensors = log_probs, rollout_log_probs, advantages, mask
        return bapo.bapo_loss(*tensors, bapo.PAPER_MAIN, bounds=found[same_or_last])


RHO0 = [f"{percent / 100:.2f}" for percent in range(36, 57, 2)]  # 0.36 to 0.56


@dataclass(frozen=True)
class Measured(train.Method):
    """A method of train.py that logs more. The loss is the same.

    rho_at_0.6 and rho_at_0.8 are rho at the bounds [0.6, 1.2] and [0.8, 1.2]. rho_lengths is
    `rho_of_lengths`, and rho_lengths_ended the same without responses of max_new_tokens. grpo@8
    also logs what a search would have found in the paper's main range: low_T and high_T for
    targets T, and low_gradient_T and so on with rho from gradients.
    """

    group_size: int
    max_new_tokens: int

    def loss(
        self, log_probs, rollout_log_probs, advantages, mask, step, update
    ) -> tuple[Tensor, dict]:
        """Return the loss and its metrics."""
        loss, metrics = super().loss(log_probs, rollout_log_probs, advantages, mask, step, update)
        log_ratio = log_probs.detach() - rollout_log_probs
        weights = bapo.token_weights(mask)

        def found(search: bapo.ClipSearch) -> bapo.ClipBounds:
            masses = bapo.contribution_masses(log_ratio, advantages, weights, search)
            return bapo.search_clip_bounds(masses, search)

        metrics["rho_at_0.6"] = found(bapo.ClipSearch.fixed(0.6, 1.2)).rho
        metrics["rho_at_0.8"] = found(bapo.ClipSearch.fixed(0.8, 1.2)).rho
        lengths = mask.sum(1)
        ended = lengths < self.max_new_tokens
        metrics["rho_lengths"] = rho_of_lengths(advantages, lengths, self.group_size)
        metrics["rho_lengths_ended"] = rho_of_lengths(advantages, lengths, self.group_size, ended)
        for contribution, name in (("surrogate", ""), ("gradient", "gradient_")):
            for rho0 in RHO0 if self.name == "grpo@8" else []:
                bounds = found(bapo.ClipSearch(rho0=float(rho0), contribution=contribution))
                metrics[f"low_{name}{rho0}"] = bounds.low
                metrics[f"high_{name}{rho0}"] = bounds.high
        return loss, metrics


def rho_of_lengths(
    advantages: Tensor, lengths: Tensor, group_size: int, counted: Tensor | None = None
) -> float:
    """Return rho at ratio 1 from the lengths of responses, for rewards 0 and 1 and the token-mean.

    It is the sum of S L+ over the sum of S (L+ + L-), over groups with an advantage. S is the sum
    of a group's positive advantages; L+ and L- are the mean lengths of its right and its wrong
    responses. advantages, lengths and counted [B]: only the counted responses have lengths, and a
    group whose counted responses are all right or all wrong is left out.
    """
    right_lengths = 0.0
    all_lengths = 0.0
    counted = torch.ones_like(lengths, dtype=torch.bool) if counted is None else counted
    groups = zip(*(one.split(group_size) for one in (advantages, lengths.double(), counted)))
    for of_group, length, counts in groups:
        right = (of_group > 0) & counts
        wrong = (of_group < 0) & counts
        if right.any() and wrong.any():
            size = of_group.clamp(min=0).sum().item()
            right_lengths += size * length[right].mean().item()
            all_lengths += size * (length[right].mean() + length[wrong].mean()).item()
    return right_lengths / all_lengths if all_lengths else math.nan


def train_measured(run: train.Run, task: train.Task) -> None:
    """Finish a run, with samples of every step, and remove its checkpoint."""
    train.SAMPLES_EVERY = 1
    train.train_and_evaluate(run, task)
    for checkpoint in checkpoints.checkpoints(run.folder).values():
        shutil.rmtree(checkpoint)


def measured(options: train.Options, task: train.Task, with_larger_step: bool) -> dict[str, tuple]:
    """Return the calls of `measured`, and write config.json into their folders."""
    output = Path(options.output_dir)
    arms = [(output, options)]
    if with_larger_step:
        larger = output.with_name(f"{output.name}-larger-step")
        rate = 1.5 * options.learning_rate
        changes = {"methods": ["grpo@8"], "rho0": None, "learning_rate": rate}
        arms.append((larger, replace(options, output_dir=str(larger), **changes)))
    calls = {}
    for folder, of_arm in arms:
        folder.mkdir(parents=True, exist_ok=True)
        checkpoints.write_config(folder / "config.json", asdict(of_arm), train.MAY_DIFFER)
    for seed in options.seeds:
        path = output / f"start-seed{seed}.json"
        # With --model all runs begin with one model, whose accuracy is measured once.
        if not (options.model and (calls or any(output.glob("start-seed*.json")))):
            calls[path.stem] = (train.evaluate_start, path, seed, task, options)
        for folder, of_arm in arms:
            for text in of_arm.methods:
                method = train.parse_method(text, of_arm)
                method = Measured(
                    **vars(method),
                    group_size=of_arm.group_size,
                    max_new_tokens=of_arm.max_new_tokens,
                )
                run = train.Run(folder / f"{text}-seed{seed}", method, seed, of_arm)
                calls[f"{folder.name}/{run.folder.name}"] = (train_measured, run, task)
    return calls


def main(arguments: list[str] | None = None) -> int:
    """Run the command line. Returns the exit status: 0, or 1 if a run failed."""
    kind, *arguments = arguments or sys.argv[1:]
    kinds = ("scope", "yoked", "measured", "measured-with-larger-step")
    if kind not in kinds:
        raise ValueError(f"the first word must be one of {', '.join(kinds)}, got {kind!r}")
    options = command_line.parse(train.Options, arguments, __doc__)
    output = Path(options.output_dir)
    task = data.load_task(options) if options.data else countdown.load_task()
    per = {"bapo-main-per16": (16, bapo.PAPER_MAIN), "bapo-main-per4": (4, bapo.PAPER_MAIN)}
    per["bapo-gradient"] = (
        sys.maxsize,
        bapo.ClipSearch(rho0=options.rho0, contribution="gradient"),
    )
    if kind.startswith("measured"):
        with files.lock(output / ".lock"):
            calls = measured(options, task, kind == "measured-with-larger-step")
            return 1 if processes.run_side_by_side(calls, options.jobs, one_thread=True) else 0
    calls = {}
    for seed, next_seed in zip(options.seeds, options.seeds[1:] + options.seeds[:1]):
        for name in ["yoked"] if kind == "yoked" else per:
            folder = output / f"{name}@{UPDATES}-seed{seed}"
            # It has no `search` of its own: its loss does all.
            common = (f"{name}@{UPDATES}", None, UPDATES, 1, None)
            if kind == "yoked":
                method = Yoked(*common, donor=output / f"bapo@8-seed{next_seed}")
            else:
                method = ByParts(*common, seed, *per[name])
            run = train.Run(folder, method, seed, options)
            calls[folder.name] = (train.train_and_evaluate, run, task)
    with files.lock(output / ".lock"):
        files.check_same(output / "config.json", asdict(options), train.MAY_DIFFER)
        failed = processes.run_side_by_side(calls, options.jobs, one_thread=True)
    return 1 if failed else 0


if __name__ == "__main__":
    command_line.command("variants.py", main, "Interrupted: the same command continues")
