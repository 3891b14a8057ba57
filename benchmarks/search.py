"""Time the bound search on one CPU thread: python benchmarks/search.py

The search is compared with (a) the literal loop of Algorithm 1, which takes two sums and a read on
the host for every pair of bounds that it tries, and (b) one forward pass of clipped_surrogate.

Log-ratios are normal (standard deviation 0.1), and the target is one that no bounds of the default
ranges meet, so that (a) tries all pairs. The search always sums at all bounds. What is compared
takes turns; medians of processor time. For the search within an update see model.py.
"""

from functools import partial
from itertools import product

import torch
from model import paired_medians  # puts the top level on the path
from torch import Tensor

from bapo import ClipSearch, clipped_surrogate, importance_ratio, search_clip_bounds, token_weights

TOKENS_OF_A_RESPONSE = 500
UNREACHABLE_SHARE = 0.999


def literal_loop(
    log_ratio: Tensor, advantages: Tensor, weights: Tensor, search: ClipSearch
) -> tuple[float, float]:
    """Algorithm 1 as printed, in either reading: the low and high bound at which it stops.

    log_ratio and weights [N, T], advantages [N]. What does not change is outside the loop.
    """
    ratio = importance_ratio(log_ratio)
    weighted_advantages = weights * advantages.unsqueeze(1)
    positive_weights = weighted_advantages.clamp(min=0)
    negative_weights = -weighted_advantages.clamp(max=0)
    for low, high in pairs_in_order(search):
        if search.contribution == "surrogate":
            positive = positive_weights * ratio.clamp(max=high)
            negative = negative_weights * ratio.clamp(min=low)
        else:
            positive = positive_weights * ratio * (ratio <= high)
            negative = negative_weights * ratio * (ratio >= low)
        positive_mass = positive.sum(dtype=torch.float64)
        negative_mass = negative.sum(dtype=torch.float64)
        share = positive_mass / (positive_mass + negative_mass)
        if share.item() >= search.rho0:
            break
    return low, high


def pairs_in_order(search: ClipSearch) -> list[tuple[float, float]]:
    """All (low, high) in the order of Algorithm 1: high rises first, then low."""
    lows = search.lows().tolist()
    highs = search.highs().tolist()
    pairs = [(lows[0], high) for high in highs]
    pairs += [(low, highs[-1]) for low in lows[1:]]
    return pairs


def against_the_loop(
    sizes: tuple[int, ...] = (10_000, 100_000, 1_000_000), repeats: int = 9
) -> None:
    """Print the table of times and ratios; sizes: numbers of tokens."""
    print(
        "| tokens | contribution | search | (a) loop | (b) forward | (a) / search | search / (b) |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for tokens, contribution in product(sizes, ("gradient", "surrogate")):
        torch.manual_seed(0)
        responses = tokens // TOKENS_OF_A_RESPONSE
        log_ratio = 0.1 * torch.randn(responses, TOKENS_OF_A_RESPONSE)
        advantages = torch.randn(responses)
        weights = token_weights(torch.ones_like(log_ratio))
        search = ClipSearch(rho0=UNREACHABLE_SHARE, contribution=contribution)
        ways = [
            partial(search_clip_bounds, log_ratio, advantages, weights, search),
            partial(literal_loop, log_ratio, advantages, weights, search),
            partial(clipped_surrogate, log_ratio, advantages, weights, 0.8, 1.2),
        ]
        search_s, loop_s, forward_s = paired_medians(ways, repeats)
        cells = [
            f"{tokens:.0e}",
            contribution,
            f"{1e3 * search_s:.2f} ms",
            f"{1e3 * loop_s:.2f} ms",
            f"{1e3 * forward_s:.2f} ms",
            f"{loop_s / search_s:.2f}",
            f"{search_s / forward_s:.1f}",
        ]
        print(f"| {' | '.join(cells)} |")


if __name__ == "__main__":
    torch.set_num_threads(1)
    against_the_loop()
