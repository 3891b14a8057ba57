"""Time the bound search on one thread: python benchmarks/search.py

Against (a) the literal loop of Algorithm 1, two sums and one read on the host per candidate pair, and (b) one forward pass of
clipped_surrogate; and within an update of the Countdown model. Log-ratios are normal (sigma 0.1). Default ranges, and a target
that no bounds meet: (a) tries all 42 pairs. The search always sums at all 43 bounds. Medians; what is compared takes turns.
"""

import random
import sys
from functools import partial
from itertools import product
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
from timing import paired_medians

import countdown
from bapo import ClipSearch, bapo_loss, clipped_surrogate, importance_ratio, search_clip_bounds, token_weights
from rollout import Rollouts, token_log_probs


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
        ways = [
            partial(search_clip_bounds, *arguments, search),
            partial(literal_loop, *arguments, search),
            partial(clipped_surrogate, *arguments, 0.8, 1.2),
        ]
        ours, loop, forward = (seconds * 1e3 for seconds in paired_medians(ways, repeats))
        times = f"{ours:.2f} ms | {loop:.2f} ms | {forward:.2f} ms | {loop / ours:.2f} | {ours / forward:.1f}"
        print(f"| {tokens:.0e} | {contribution} | {times} |")


def within_an_update(repeats: int = 25) -> None:
    """Print the search's share of one update on 16 prompts x 8 demonstrations of 4 attempts, 53 tokens at most."""
    torch.manual_seed(0)
    rng, tokenizer = random.Random(0), countdown.build_tokenizer()
    model = countdown.build_model(tokenizer).eval()
    rows = [row for row in countdown.problems()[0][:16] for _ in range(8)]
    texts = [countdown.demonstration(row, rng, attempts=4) + tokenizer.eos_token for row in rows]
    prompts = tokenizer([row.prompt for row in rows], return_tensors="pt").input_ids
    read = tokenizer(texts, add_special_tokens=False, padding=True, padding_side="right", return_tensors="pt")
    mask = read.attention_mask.bool()
    rollouts = Rollouts(prompts, prompts >= 0, read.input_ids, mask, ~mask.any(1))
    log_ratio, advantages, weights = 0.1 * torch.randn(mask.shape) * mask, torch.randn(len(mask)), token_weights(mask)
    rollout_log_probs = token_log_probs(model, rollouts)[0].detach() - log_ratio
    search, optimizer = ClipSearch(rho0=0.999), torch.optim.AdamW(model.parameters(), lr=1e-9, fused=True)

    def update():
        bapo_loss(token_log_probs(model, rollouts)[0], rollout_log_probs, advantages, mask, search)[0].backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    whole, part = paired_medians([update, partial(search_clip_bounds, log_ratio, advantages, weights, search)], repeats)
    print(f"\nOne update of the Countdown model on {int(mask.sum())} tokens, {mask.numel()} with padding: {whole * 1e3:.1f} ms")
    print(f"its search: {part * 1e3:.2f} ms, {part / whole:.1%} of it (torch {torch.__version__}, one thread)")


if __name__ == "__main__":
    torch.set_num_threads(1)
    against_the_loop()
    within_an_update()
