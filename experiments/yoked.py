"""Train with the bounds that bapo@8 found with another seed: does their fit to the batch matter?

    python experiments/yoked.py --seeds 126 127 --rho0 0.42 --output_dir runs/target-0.42

The runs of bapo@8 must be there; those of yoked@8 are put beside them. Each seed takes, at every
step and update, the bounds that the next of the given seeds found there, and the last seed those of
the first: so two seeds exchange their bounds. If that run has no such update, its last bounds are
taken. The options must be those of the runs there; the same command continues after a kill.
"""

import sys
from bisect import bisect
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path

sys.path.append(str(Path(__file__).parent.parent))
import data
import runs
import train
from bapo import ClipSearch, bapo_loss


def yoked_loss(search: ClipSearch, donor: Path, own: Path):
    """Return bapo_loss with the bounds of the run in `donor`, to be called once per update.

    own: the folder of the run that is trained.
    """
    lines = [line for line in runs.read_lines(donor / "metrics.jsonl") if line["update"]]
    places = [(line["step"], line["update"]) for line in lines]
    updates_of_step = Counter()

    def loss(*tensors, weights, bounds=None):
        if bounds is not None:
            raise ValueError("micro_batch_tokens must hold a whole update: give more")
        timings = own / "timings.jsonl"  # a line per step that has ended
        step = 1 + len(runs.read_lines(timings)) if timings.exists() else 1
        updates_of_step[step] += 1
        place = (step, updates_of_step[step])
        found = lines[max(0, bisect(places, place) - 1)]
        return bapo_loss(*tensors, search, weights=weights, bounds=(found["low"], found["high"]))

    return loss


def train_yoked(run: train.Run, donor: Path, task: data.Task) -> None:
    """Train and evaluate, as train.py does."""
    loss = yoked_loss(run.method.search, donor, run.folder)
    train.train_and_evaluate(replace(run, method=replace(run.method, loss=loss)), task)


def main(arguments: list[str] | None = None) -> int:
    """Run the command line. Returns the exit status: 0, or 1 if a run failed."""
    options = runs.parse(train.Options, arguments, __doc__)
    output = Path(options.output_dir)
    task = data.load_task(options)
    method = train.parse_method("bapo@8", options)
    calls = {}
    for seed, next_seed in zip(options.seeds, options.seeds[1:] + options.seeds[:1]):
        run = train.Run(output / f"yoked@8-seed{seed}", method, seed, options)
        calls[run.folder.name] = (train_yoked, run, output / f"bapo@8-seed{next_seed}", task)
    with runs.lock(output / ".lock"):
        runs.check_same(output / "config.json", asdict(options), train.MAY_DIFFER)
        failed = runs.run_side_by_side(calls, options.jobs)
    return 1 if failed else 0


if __name__ == "__main__":
    runs.command("yoked.py", main, "Interrupted: the same command continues")
