"""Train with losses that train.py has no method for: what does a search see, do its bounds fit?

    python experiments/variants.py scope --seeds 150 151 --output_dir runs/scope
    python experiments/variants.py yoked --seeds 126 127 --learning_rate 3e-4 --rho0 0.42 \
--output_dir runs/target-0.42

The runs of train.py must be in output_dir, made with the same options; these are put beside them.
The same command continues after a kill.

scope: bapo-main-per16@8 and bapo-main-per4@8 search for every 16 or 4 responses of an update, drawn
at random, in the paper's main setting. bapo-gradient@8 has one search per update, with rho from
gradients and --rho0.

yoked: yoked@8 takes the bounds that bapo@8 found at the same update with the next of the given
seeds, and the last seed those of the first. If that run has no such update, it takes its last ones.
"""

import json
import math
import random
import sys
from bisect import bisect
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

sys.path.append(str(Path(__file__).parent.parent))
import bapo
import data
import runs
import train

UPDATES = 8  # on each batch, of all methods here


def next_update(folder: Path) -> tuple[int, int]:
    """Return the step and the update that the run in `folder` makes next."""
    path = folder / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    if not lines:
        return 1, 1
    last = json.loads(lines[-1])
    if last["update"] in (0, UPDATES):  # 0: a step without an update
        return last["step"] + 1, 1
    return last["step"], last["update"] + 1


@dataclass(frozen=True)
class ByParts(train.Method):
    """bapo_loss with a search for every `size` responses of an update."""

    folder: Path
    seed: int
    size: int
    search_of_part: bapo.ClipSearch

    def loss(self, log_probs, rollout_log_probs, advantages, mask) -> tuple[Tensor, dict]:
        """Return the sum of the parts' losses, and the metrics of the update.

        low, high and reached are means over the parts, which count equally. at_start and at_end
        are the shares of parts whose bounds are the first or the last of their ranges.
        """
        search = self.search_of_part
        weights = bapo.token_weights(mask)
        step, update = next_update(self.folder)
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
    lines = [line for line in runs.read_lines(run / "metrics.jsonl") if line["update"]]
    places = [(line["step"], line["update"]) for line in lines]
    return places, [(line["low"], line["high"]) for line in lines]


@dataclass(frozen=True)
class Yoked(train.Method):
    """bapo_loss with the bounds that the run in `donor` had at the same update."""

    folder: Path
    donor: Path

    def loss(self, *tensors: Tensor) -> tuple[Tensor, dict]:
        """Return the loss and its metrics."""
        places, found = bounds_of(self.donor)
        same_or_last = max(0, bisect(places, next_update(self.folder)) - 1)
        return bapo.bapo_loss(*tensors, bapo.PAPER_MAIN, bounds=found[same_or_last])


def main(arguments: list[str] | None = None) -> int:
    """Run the command line. Returns the exit status: 0, or 1 if a run failed."""
    kind, *arguments = arguments or sys.argv[1:]
    options = runs.parse(train.Options, arguments, __doc__)
    output = Path(options.output_dir)
    task = data.load_task(options)
    per = {"bapo-main-per16": (16, bapo.PAPER_MAIN), "bapo-main-per4": (4, bapo.PAPER_MAIN)}
    per["bapo-gradient"] = (
        sys.maxsize,
        bapo.ClipSearch(rho0=options.rho0, contribution="gradient"),
    )
    calls = {}
    for seed, next_seed in zip(options.seeds, options.seeds[1:] + options.seeds[:1]):
        for name in ["yoked"] if kind == "yoked" else per:
            folder = output / f"{name}@{UPDATES}-seed{seed}"
            # It has no `search` of its own: its loss does all.
            common = (f"{name}@{UPDATES}", None, UPDATES, 1, folder)
            if kind == "yoked":
                method = Yoked(*common, donor=output / f"bapo@8-seed{next_seed}")
            else:
                method = ByParts(*common, seed, *per[name])
            run = train.Run(folder, method, seed, options)
            calls[folder.name] = (train.train_and_evaluate, run, task)
    with runs.lock(output / ".lock"):
        runs.check_same(output / "config.json", asdict(options), train.MAY_DIFFER)
        failed = runs.run_side_by_side(calls, options.jobs, one_thread=True)
    return 1 if failed else 0


if __name__ == "__main__":
    runs.command("variants.py", main, "Interrupted: the same command continues")
