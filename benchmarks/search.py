"""Time the bound search on one thread: python benchmarks/search.py

Against (a) the literal loop of Algorithm 1, two sums and one read on the host per candidate pair, and (b) one forward pass of
clipped_surrogate. Log-ratios are normal (sigma 0.1). Default ranges, and a target that no bounds meet: (a) tries all 42
pairs. The search always sums at all 43 bounds. Medians; what is compared takes turns. Within an update: model.py.
"""

from functools import partial
from itertools import product

import torch
from model import paired_medians  # puts the top level on the path

from bapo import ClipSearch, clipped_surrogate, importance_ratio, search_clip_bounds, token_weights


def literal_loop(log_ratio, advantages, weights, search: ClipSearch) -> tuple[float, float]:
    """Algorithm 1 as printed, in either reading; returns the last bounds. What does not change is outside the loop."""
    ratio = importance_ratio(log_ratio)
    value = weights * advantages.unsqueeze(1)
    positive, negative = value.clamp(min=0), -value.clamp(max=0)
    lows, highs = search.lows().tolist(), search.highs().tolist()
    for low, high in [(lows[0], high) for high in highs] + [(low, highs[-1]) for low in lows[1:]]:
        if search.contribution == "surrogate":
            p, n = positive * ratio.clamp(max=high), negative * ratio.clamp(min=low)
        else:
            p, n = positive * ratio * (ratio <= high), negative * ratio * (ratio >= low)
        p, n = p.sum(dtype=torch.float64), n.sum(dtype=torch.float64)
        if (p / (p + n)).item() >= search.rho0:
            break
    return low, high


def against_the_loop(sizes: tuple = (10_000, 100_000, 1_000_000), repeats: int = 9) -> None:
    """Print the table of times and ratios against (a) and (b)."""
    print("| tokens | contribution | search | (a) loop | (b) forward | (a) / search | search / (b) |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for tokens, contribution in product(sizes, ("gradient", "surrogate")):
        torch.manual_seed(0)
        shape = (tokens // 500, 500)
        arguments = torch.randn(shape) * 0.1, torch.randn(shape[0]), token_weights(torch.ones(shape))
        search = ClipSearch(rho0=0.999, contribution=contribution)
        ways = [partial(function, *arguments, search) for function in (search_clip_bounds, literal_loop)]
        ways.append(partial(clipped_surrogate, *arguments, 0.8, 1.2))
        ours, loop, forward = (seconds * 1e3 for seconds in paired_medians(ways, repeats))
        times = f"{ours:.2f} ms | {loop:.2f} ms | {forward:.2f} ms | {loop / ours:.2f} | {ours / forward:.1f}"
        print(f"| {tokens:.0e} | {contribution} | {times} |")


if __name__ == "__main__":
    torch.set_num_threads(1)
    against_the_loop()
