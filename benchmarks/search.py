"""Time the bound search, in one run on one thread, against two yardsticks and within a training step.

    python benchmarks/search.py

(a) the literal loop of Algorithm 1: per candidate an elementwise minimum and maximum, two float64 sums and one host read;
    main range, a target that is never met, so all 52 candidates. Everything that does not change is outside the loop.
(b) one forward pass of clipped_surrogate.

Log-ratios are normal with standard deviation `sigma`; half of the responses have a positive advantage. On a CPU the
search sorts only the tokens that some candidate clips, so its time depends on sigma. glibc's mmap and trim thresholds
are fixed (this script starts itself again with them set): else (a) and (b) mostly measure page faults. Medians.
"""

import os
import statistics
import sys
import time
from pathlib import Path

THRESHOLDS = {"MALLOC_MMAP_THRESHOLD_": str(1 << 30), "MALLOC_TRIM_THRESHOLD_": str(1 << 34), "OMP_NUM_THREADS": "1"}
if any(os.environ.get(name) != value for name, value in THRESHOLDS.items()):
    os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | THRESHOLDS)
sys.path.insert(0, str(Path(__file__).parent.parent))

import torch  # noqa: E402

import countdown  # noqa: E402
from bapo import ClipSearch, bapo_loss, clipped_surrogate, importance_ratio, search_clip_bounds, token_weights  # noqa: E402
from rollout import sample_rollouts, token_log_probs  # noqa: E402


def literal_loop(log_ratio, advantages, weights, search):
    """Algorithm 1 as printed, efficiently, in the surrogate or the gradient reading; returns the last bounds."""
    ratio = importance_ratio(log_ratio)
    value = weights * advantages.unsqueeze(1)
    positive, negative = value.clamp(min=0), -value.clamp(max=0)
    lows, highs = search.lows().tolist(), search.highs().tolist()
    path = [(lows[0], high) for high in highs] + [(low, highs[-1]) for low in lows[1:]]
    for low, high in path:
        if search.contribution == "surrogate":
            p, n = positive * ratio.clamp(max=high), negative * ratio.clamp(min=low)
        else:
            p, n = positive * ratio * (ratio <= high), negative * ratio * (ratio >= low)
        p, n = p.sum(dtype=torch.float64), n.sum(dtype=torch.float64)
        if (p / (p + n)).item() >= search.rho0:
            break
    return low, high


def paired_medians(functions, repeats):
    """Seconds of each function; they take turns, so that a drift of the machine's speed hits all of them."""
    for function in functions:
        function()
    times = [[] for _ in functions]
    for _ in range(repeats):
        for function, of_function in zip(functions, times):
            start = time.perf_counter()
            function()
            of_function.append(time.perf_counter() - start)
    return [statistics.median(of_function) for of_function in times]


def against_the_loop():
    """Print the table of times and ratios against (a) and (b)."""
    print("| tokens | sigma | contribution | search | (a) loop | (b) forward | (a) / search | search / (b) |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for tokens in (100_000, 1_000_000):
        for sigma in (0.03, 0.1, 0.3):
            for contribution in ("surrogate", "gradient"):
                torch.manual_seed(0)
                shape = (tokens // 500, 500)
                log_ratio, advantages = torch.randn(shape) * sigma, torch.randn(shape[0])
                weights = token_weights(torch.ones(shape))
                search = ClipSearch(rho0=0.999, contribution=contribution)
                found = search_clip_bounds(log_ratio, advantages, weights, search)
                if (found.low.item(), found.high.item()) != literal_loop(log_ratio, advantages, weights, search):
                    raise RuntimeError("the search and the loop disagree")
                search_s, loop_s, forward_s = paired_medians(
                    [
                        lambda: search_clip_bounds(log_ratio, advantages, weights, search),
                        lambda: literal_loop(log_ratio, advantages, weights, search),
                        lambda: clipped_surrogate(log_ratio, advantages, weights, 0.8, 1.2),
                    ],
                    9,
                )
                print(
                    f"| {tokens:.0e} | {sigma} | {contribution} | {search_s * 1e3:.2f} ms | {loop_s * 1e3:.1f} ms "
                    f"| {forward_s * 1e3:.2f} ms | {loop_s / search_s:.1f} | {search_s / forward_s:.2f} |"
                )


def within_a_training_step():
    """Print which share of one update of the Countdown model its search takes."""
    torch.manual_seed(0)
    tokenizer = countdown.build_tokenizer()
    model = countdown.build_model(tokenizer).eval()
    prompts = [row.prompt for row in countdown.problems()[0][:16]]
    batch = sample_rollouts(model, tokenizer, prompts, group_size=8, max_new_tokens=28, temperature=1.0)
    advantages, search = torch.randn(len(batch.mask)), ClipSearch(rho0=0.999, contribution="gradient")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    weights, log_ratio = token_weights(batch.mask), torch.randn(batch.mask.shape) * 0.1

    def update():
        log_probs, _ = token_log_probs(model, batch)
        bapo_loss(log_probs, batch.log_probs, advantages, batch.mask, search)[0].backward()
        optimizer.step()
        optimizer.zero_grad()

    update_s, search_s = paired_medians([update, lambda: search_clip_bounds(log_ratio, advantages, weights, search)], 15)
    print(
        f"\nOne update of the Countdown model on {int(batch.mask.sum())} tokens: {update_s * 1e3:.1f} ms; "
        f"its search: {search_s * 1e3:.2f} ms, {100 * search_s / update_s:.1f} %"
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, 1 thread, {THRESHOLDS}\n")
    against_the_loop()
    within_a_training_step()
