"""BAPO as the paper prints it, token by token in Python's floats: what vectors.json expects.

    python tests/literal_bapo.py       # prints what every case of tests/vectors.json expects

`expected` is Algorithm 1 with Eqs. 4, 5 and 8, to read beside the paper. Standard library only, and
nothing of bapo.py: that is checked against the vectors, as any port is (check_port.py). Where the
paper leaves something open, the rule stands here in a comment.

A case: B responses, T places, everything lists.

    name, probes       what a port that fails has probably done wrong
    settings           rho0; low and high as [start, max, step]
    log_probs          [B][T]  of the policy in training
    rollout_log_probs  [B][T]  of the policy that drew the tokens
    advantages         [B] or [B][T]
    mask               [B][T]  true on response tokens
    weights            [B][T], only where they are not 1 / (response tokens of this update)
    expected           low, high, rho, rho_start (rho at the start bounds), reached, the loss to
                       minimise, and its gradient [B][T] with respect to log_probs

NaN is the string "nan". Where it is inside the mask, `expected` has neither bounds nor a gradient.
The order is that in which a porter should read: what most others build on comes first. No case
turns on rounding, so that a port in float32 passes.
"""

import math
from typing import NamedTuple

from check_port import read_cases


class Token(NamedTuple):
    """A response token: its place in [B][T], and what the algorithm knows of it."""

    row: int
    column: int
    log_ratio: float
    ratio: float  # r_t
    advantage: float  # A_t
    weight: float  # in the loss


def response_tokens(case: dict) -> list[Token]:
    """The tokens inside the mask. What stands outside it is never looked at."""
    count = sum(sum(row) for row in case["mask"])
    tokens = []
    for row, insides in enumerate(case["mask"]):
        for column, inside in enumerate(insides):
            if inside:
                log_ratio = case["log_probs"][row][column] - case["rollout_log_probs"][row][column]
                ratio = math.exp(min(max(log_ratio, -20.0), 20.0))  # finite in any dtype
                advantage = case["advantages"][row]
                if isinstance(advantage, list):
                    advantage = advantage[column]
                weight = case["weights"][row][column] if "weights" in case else 1 / count
                tokens.append(Token(row, column, log_ratio, ratio, advantage, weight))
    return tokens


def share(tokens: list[Token], low: float, high: float) -> float:
    """rho of Eq. 8, P / (P + N); NaN where no token has an advantage.

    The print has |P - N| below, which vanishes where the sides balance; its figures show the share.
    """
    terms = [token.weight * clipped_value(token, low, high) for token in tokens]
    positive = sum(term for term in terms if term > 0)
    total = sum(abs(term) for term in terms)
    return positive / total if total > 0 else math.nan


def clipped_value(token: Token, low: float, high: float) -> float:
    """min(r A, clip(r, low, high) A), Eq. 4; low and high are ratios."""
    clipped_ratio = min(max(token.ratio, low), high)
    return min(token.ratio * token.advantage, clipped_ratio * token.advantage)


def clips(token: Token, low: float, high: float) -> bool:
    """Whether the token loses its gradient, Eq. 5. A ratio that is the bound keeps it."""
    above = token.advantage > 0 and token.ratio > high
    below = token.advantage < 0 and token.ratio < low
    return above or below


def grid(start: float, largest: float, step: float) -> list[float]:
    """All values of a bound. Whole steps are counted: adding floats misses the last value."""
    steps = round((largest - start) / step)
    return [start + i * step for i in range(steps)] + [largest]


class Found(NamedTuple):
    """What the search ends with."""

    low: float
    high: float
    rho: float
    rho_start: float
    reached: bool


def search(tokens: list[Token], settings: dict) -> Found:
    """Algorithm 1: while rho < rho0 raise the upper bound; at its maximum raise the lower one."""
    lows = grid(*settings["low"])
    highs = grid(*settings["high"])
    raising_high = [(lows[0], high) for high in highs]
    raising_low = [(low, highs[-1]) for low in lows[1:]]
    target = settings["rho0"] - 1e-6  # a tie counts as reached, however it is rounded
    shares = []
    for low, high in raising_high + raising_low:
        shares.append(share(tokens, low, high))
        # With nothing to balance rho is NaN, and the bounds stay at their start.
        if shares[-1] >= target or math.isnan(shares[-1]):
            break
    return Found(low, high, shares[-1], shares[0], reached=shares[-1] >= target)


def expected(case: dict) -> dict:
    """What an update gives. case as above, with floats for NaN."""
    tokens = response_tokens(case)
    if any(math.isnan(token.log_ratio * token.advantage) for token in tokens):
        return {"loss": math.nan, "rho": math.nan, "reached": False}
    low, high, *_ = found = search(tokens, case["settings"])
    loss = 0.0
    gradient = [[0.0] * len(row) for row in case["mask"]]
    for token in tokens:
        loss -= token.weight * clipped_value(token, low, high)
        is_clipped = clips(token, low, high) or abs(token.log_ratio) > 20
        if not is_clipped:
            gradient[token.row][token.column] = -token.weight * token.ratio * token.advantage
    return found._asdict() | {"loss": loss, "gradient": gradient}


if __name__ == "__main__":
    for case in read_cases():
        print(case["name"], expected(case))
