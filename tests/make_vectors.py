"""BAPO as the paper prints it, token by token in Python's floats, and the vectors made with it.

    python tests/make_vectors.py       # writes tests/vectors.json, anew

`expected` is Algorithm 1 with Eqs. 4, 5 and 8, to read beside the paper. Standard library only, and
nothing of bapo.py: that is checked against the vectors, as any port is (check_port.py). Where the
paper leaves something open, the rule stands here in a comment.

A case of vectors.json: N responses, T places, everything lists.

    name, probes       what a port that fails has probably done wrong
    settings           rho0; low and high as [start, max, step]; contribution, how Eq. 8 is read
    log_probs          [N][T]  of the policy in training
    rollout_log_probs  [N][T]  of the policy that drew the tokens
    advantages         [N] or [N][T]
    mask               [N][T]  true on response tokens
    weights            [N][T], only where they are not 1 / (response tokens of this update)
    expected           low, high, rho, rho_start (rho at the start bounds), reached, the loss to
                       minimise, and its gradient [N][T] with respect to log_probs

NaN is the string "nan". Where it is inside the mask, `expected` has the loss alone. No case turns
on rounding, so that a port in float32 passes.
"""

import json
import math
from pathlib import Path
from typing import NamedTuple

VECTORS = Path(__file__).with_name("vectors.json")


# ---------------------------------------------------------------- the algorithm
class Token(NamedTuple):
    """A response token: its place in [N][T], and what the algorithm knows of it."""

    row: int
    column: int
    log_ratio: float
    ratio: float  # r_t
    advantage: float  # A_t
    weight: float  # in the loss


def response_tokens(case: dict) -> list[Token]:
    """The tokens inside the mask. What stands outside it is never looked at."""
    places = []
    for row, inside in enumerate(case["mask"]):
        places += [(row, column) for column in range(len(inside)) if inside[column]]

    tokens = []
    for row, column in places:
        log_ratio = case["log_probs"][row][column] - case["rollout_log_probs"][row][column]
        ratio = math.exp(min(max(log_ratio, -20.0), 20.0))  # finite in any dtype
        advantage = case["advantages"][row]
        if isinstance(advantage, list):
            advantage = advantage[column]
        weight = 1 / len(places)
        if "weights" in case:
            weight = case["weights"][row][column]
        tokens.append(Token(row, column, log_ratio, ratio, advantage, weight))
    return tokens


def share(tokens: list[Token], low: float, high: float, contribution: str) -> float:
    """rho of Eq. 8, P / (P + N); NaN where no token counts anything.

    The print has |P - N| below, which vanishes where the sides balance; its figures show the share.
    """
    positive = 0.0
    negative = 0.0
    for token in tokens:
        if contribution == "surrogate":  # as printed: the value, which the loss sums
            counted = abs(clipped_value(token, low, high))
        elif clips(token, low, high):  # "gradient", Eq. 5: a clipped token counts nothing
            counted = 0.0
        else:
            counted = abs(token.ratio * token.advantage)
        if token.advantage > 0:
            positive += token.weight * counted
        elif token.advantage < 0:
            negative += token.weight * counted
    total = positive + negative
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
    values = [start + i * step for i in range(steps)]
    return [*values, largest]


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
    contribution = settings["contribution"]
    # Nothing to balance, even between the widest bounds: the start bounds stay.
    if math.isnan(share(tokens, lows[0], highs[-1], contribution)):
        return Found(lows[0], highs[0], rho=1.0, rho_start=1.0, reached=True)

    i_high = 0
    i_low = 0
    shares = []
    while True:
        rho = share(tokens, lows[i_low], highs[i_high], contribution)
        shares.append(0.0 if math.isnan(rho) else rho)  # 0 / 0 is 0
        reached = shares[-1] >= settings["rho0"] - 1e-6  # a tie counts, however it is rounded
        at_the_end = lows[i_low] == lows[-1] and highs[i_high] == highs[-1]
        if reached or at_the_end:
            return Found(lows[i_low], highs[i_high], shares[-1], shares[0], reached)
        if highs[i_high] < highs[-1]:
            i_high += 1
        else:
            i_low += 1


def expected(case: dict) -> dict:
    """What an update gives. case as above, with floats for NaN."""
    tokens = response_tokens(case)
    if any(math.isnan(token.log_ratio * token.advantage) for token in tokens):
        return {"loss": math.nan}
    found = search(tokens, case["settings"])
    loss = 0.0
    gradient = [[0.0 for _ in row] for row in case["mask"]]
    for token in tokens:
        loss -= token.weight * clipped_value(token, found.low, found.high)
        is_clipped = clips(token, found.low, found.high) or abs(token.log_ratio) > 20
        if not is_clipped:
            slope = token.weight * token.ratio * token.advantage
            gradient[token.row][token.column] -= slope
    return found._asdict() | {"loss": loss, "gradient": gradient}


# ---------------------------------------------------------------- the cases
MAIN = {  # section 5.1
    "rho0": 0.4,
    "low": [0.6, 0.9, 0.02],
    "high": [1.2, 3.0, 0.05],
    "contribution": "surrogate",
}
MAIN_GRADIENT = MAIN | {"contribution": "gradient"}
APP_A = MAIN | {"rho0": 0.45, "low": [0.8, 0.9, 0.02], "high": [1.2, 2.0, 0.05]}
BINARY_GRIDS = MAIN_GRADIENT | {  # exact, however they are summed
    "rho0": 0.5,
    "low": [0.5, 0.875, 0.125],
    "high": [1.25, 1.75, 0.25],
}


def fixed(low: float, high: float) -> dict:
    """Bounds that never move; a target of 0 is always reached."""
    return MAIN | {"rho0": 0.0, "low": [low, low, 0.02], "high": [high, high, 0.05]}


GRPO = fixed(0.8, 1.2)


def case(
    name: str, probes: str, settings: dict, log_ratios: list, advantages: list, **others
) -> dict:
    """A case without what is expected. log_ratios [N][T]; None stands outside the mask."""
    mask = [[value is not None for value in row] for row in log_ratios]
    log_probs = [[round((value or 0.0) - 3.0, 9) for value in row] for row in log_ratios]
    made = {
        "name": name,
        "probes": probes,
        "settings": settings,
        "log_probs": log_probs,
        "rollout_log_probs": [[-3.0 for _ in row] for row in log_ratios],
        "advantages": advantages,
        "mask": mask,
    }
    return made | others


NAN = math.nan
ONES = [[0.0, 0.0], [0.0, 0.0]]  # log-ratios of two responses to which nothing has happened yet
MIXED = [
    [0.5, 0.1, -0.3, 0.0, 0.8],
    [-0.45, 0.2, -0.12, 0.0, -0.3],
    [0.3, -0.6, 0.05, 1.3, 0.15],
    [0.4, -0.2, 0.1, -0.35, -0.25],
]
MIXED_ADVANTAGES = [1.0, -1.2, 0.3, -1.4]

# What most others build on comes first: the first case that differs says most.
CASES = [
    case(
        "share",
        "rho is the positive share P / (P + N), 0.4 here; P / N (the authors' code) is 0.667,"
        " P / |P - N| (Eq. 8 as printed) is 2, and the share of tokens, whatever their A, is 0.5",
        GRPO,
        ONES,
        [1.0, -1.5],
    ),
    case(
        "pi-rollout",
        "Eq. 8's factor pi_rollout is the sampling of the tokens: multiplied in once more, it makes"
        " rho 0.817 instead of 0.4",
        GRPO,
        ONES,
        [1.0, -1.5],
        log_probs=[[-0.1, -0.1], [-2.0, -2.0]],
        rollout_log_probs=[[-0.1, -0.1], [-2.0, -2.0]],
    ),
    case(
        "positive-above-high",
        "A > 0 and r = 1.65 above c_high = 1.2: the token counts 1.2 and has no gradient. Bounds"
        " are ratios: taken for an epsilon, 1.2 would clip at 2.2",
        GRPO,
        [[0.5, 0.1]],
        [1.0],
    ),
    case(
        "positive-below-low",
        "A > 0 and r = 0.61 below c_low: not clipped, for Eq. 4 takes the minimum; clamping the"
        " ratio alone would count 0.8, and block the gradient",
        GRPO,
        [[-0.5, 0.1]],
        [1.0],
    ),
    case(
        "negative-below-low",
        "A < 0 and r = 0.61 below c_low = 0.8: the token counts 0.8 and has no gradient. Where"
        " A < 0 the minimum of Eq. 4 is max(r, c_low) A, not min(r, c_high) A",
        GRPO,
        [[-0.5, 0.1]],
        [-1.0],
    ),
    case(
        "negative-above-high",
        "A < 0 and r = 1.65 above c_high: not clipped. Where A < 0 the minimum of Eq. 4 is"
        " max(r, c_low) A, and the upper bound has no part in it",
        GRPO,
        [[0.5, 0.1]],
        [-1.0],
    ),
    case(
        "dual-clip",
        "A < 0 and r = 12.2: the paper has no dual clip, which would cap the token at 3 or 10",
        GRPO,
        [[2.5, 0.1]],
        [-1.0],
    ),
    case(
        "on-the-upper-bound",
        "r is exactly c_high = 1: a token on a bound is not clipped. Its whole gradient passes, not"
        " half or none (minimum and clamp of some libraries), and with contribution 'gradient' it"
        " counts in P",
        fixed(0.8, 1.0) | {"contribution": "gradient"},
        ONES,
        [1.0, -1.5],
    ),
    case(
        "on-the-lower-bound",
        "r is exactly c_low = 1: a token on a bound is not clipped. Its whole gradient passes, not"
        " half or none (minimum and clamp of some libraries), and with contribution 'gradient' it"
        " counts in N",
        fixed(1.0, 1.2) | {"contribution": "gradient"},
        ONES,
        [1.0, -1.5],
    ),
    case(
        "clipped-in-the-share",
        "contribution 'surrogate': a clipped token counts its clipped value, as in the loss: P has"
        " 1.2 and N 0.8. The ratio itself would give 0.617, and leaving it out 0.5",
        GRPO,
        [[0.5, 0.1], [-0.5, 0.1]],
        [1.0, -1.0],
    ),
    case(
        "clipped-has-no-gradient",
        "contribution 'gradient': a clipped token counts nothing, neither in P nor in N: 0.5",
        GRPO | {"contribution": "gradient"},
        [[0.5, 0.1], [-0.5, 0.1]],
        [1.0, -1.0],
    ),
    case(
        "clamp",
        "log-ratios are clamped to +-20: exp(99.5) is infinite in float32. Beyond, the gradient"
        " is 0",
        GRPO,
        [[99.5, 0.1]],
        [-1.0],
        log_probs=[[-0.5, -2.9]],
        rollout_log_probs=[[-100.0, -3.0]],
    ),
    case(
        "advantages-of-tokens",
        "advantages [N][T]: each token has its own, and its sign alone says which bound is meant",
        GRPO,
        [[0.5, -0.5, 0.1], [0.5, -0.5, -0.1]],
        [[1.0, -0.5, 2.0], [-1.0, 0.5, -2.0]],
    ),
    case(
        "zero-advantage",
        "tokens with A = 0 are tokens of the mean, whose denominator is 6, and count neither in P"
        " nor in N",
        GRPO,
        [[0.1, 0.0], [0.3, -0.3], [0.0, 0.1]],
        [1.0, 0.0, -1.5],
    ),
    case(
        "padding",
        "what is outside the mask counts nothing, neither in the loss, nor in the mean's"
        " denominator (4, not 8), nor in rho; the ratio there is 20",
        GRPO,
        [[0.1, 0.0, None, None], [0.0, 0.1, None, None]],
        [1.0, -1.5],
        log_probs=[[-2.9, -3.0, 0.0, 0.0], [-3.0, -2.9, 0.0, 0.0]],
    ),
    case(
        "nan-outside-the-mask",
        "NaN outside the mask has no effect, in the gradient too. Multiplying by the mask leaves"
        " 0 * NaN = NaN: set a number there first",
        GRPO,
        [[0.1, 0.0, None], [0.0, None, 0.1]],
        [[1.0, 1.0, NAN], [-1.5, NAN, -1.5]],
        log_probs=[[-2.9, -3.0, NAN], [-3.0, NAN, -2.9]],
        rollout_log_probs=[[-3.0, -3.0, NAN], [-3.0, -1.0, -3.0]],
    ),
    case(
        "nan-inside-the-mask",
        "a NaN inside the mask makes the loss NaN: clipping, or replacing NaN by 0, must not hide"
        " it",
        GRPO,
        [[0.1, NAN], [0.0, 0.1]],
        [1.0, -1.5],
    ),
    case(
        "nan-advantage",
        "an advantage of NaN makes the loss NaN, though it is neither above 0 nor below",
        GRPO,
        [[0.1, 0.0], [0.0, 0.1]],
        [NAN, -1.5],
    ),
    case(
        "token-mean",
        "the loss is the mean over all response tokens of the update, here of 3 and of 1: -0.375."
        " The mean of the responses' means is 0.25",
        GRPO,
        [[0.0, 0.0, 0.0], [0.0, None, None]],
        [1.0, -1.5],
    ),
    case(
        "weights-of-a-part",
        "these 4 tokens are part of a step of 10: given weights of 0.1 are used as they are, and"
        " not normalised once more",
        GRPO,
        [[0.1, 0.0], [0.0, 0.1]],
        [1.0, -1.5],
        weights=[[0.1, 0.1], [0.1, 0.1]],
    ),
    case(
        "weights-outside-the-mask",
        "given weights count nothing outside the mask: the ratio there is 20",
        GRPO,
        [[0.1, 0.0, None], [0.0, 0.1, None]],
        [1.0, -1.5],
        log_probs=[[-2.9, -3.0, 0.0], [-3.0, -2.9, 0.0]],
        weights=[[0.1, 0.1, 0.1], [0.1, 0.1, 0.1]],
    ),
    case(
        "weights-in-the-share",
        "rho counts each token by its weight, as the loss does: 0.4; by number it is 0.667",
        GRPO,
        [[0.0, 0.0, 0.0], [0.0, None, None]],
        [1.0, -1.5],
        weights=[[1 / 6, 1 / 6, 1 / 6], [0.5, 0.0, 0.0]],
    ),
    case(
        "tie",
        "lengths of 2 and 3 at ratio 1 are a tie with rho0 = 0.4, left to rounding; so a share"
        " counts as reached at rho0 - 1e-6. Here it is 0.3999995",
        MAIN,
        [[0.0, 0.0, None], [0.0, 0.0, 0.0]],
        [0.999998, -1.0],
    ),
    case(
        "almost",
        "0.39995 is not 0.4: no more than 1e-6 is forgiven. These bounds are all there are, so"
        " reached is false",
        GRPO | {"rho0": 0.4},
        ONES,
        [0.9998, -1.5],
    ),
    case(
        "upper-first",
        "the upper bound is raised first, and the lower one only when that has come to its maximum:"
        " here it stays at 0.6. The authors' code raises the lower bound first",
        MAIN,
        MIXED,
        MIXED_ADVANTAGES,
    ),
    case(
        "found-bounds",
        "loss and gradient are taken at the bounds that were found (the upper one moved to 1.6),"
        " not at the start bounds; rho_start is the share at those",
        MAIN | {"rho0": 0.5},
        [[0.5], [0.0]],
        [1.0, -1.57],
    ),
    case(
        "lower-bound-moves",
        "contribution 'gradient', second half of the search: at the upper bound's maximum, where it"
        " stays, the lower one rises to 0.75 and rho0 is reached",
        BINARY_GRIDS,
        [[0.5, 0.0, 0.0], [-0.6, -0.36, 0.0]],
        [1.0, -2.5],
    ),
    case(
        "grid-of-the-main-range",
        "a target out of reach: the bounds end at exactly 0.9 and 3. Count whole steps: 0.6 plus"
        " 0.02 again and again stops at 0.88, for the floats sum to 0.9000000000000002; those of"
        " 0.05 sum to 2.999999999999997, from where one more step leads to 3.05",
        MAIN | {"rho0": 0.45},
        MIXED,
        MIXED_ADVANTAGES,
    ),
    case(
        "grid-of-app-a",
        "a target out of reach: the bounds end at exactly 0.9 and 2. Count whole steps: sums of"
        " floats stop at 0.88 and 1.95, for the last is a little more",
        APP_A,
        MIXED,
        MIXED_ADVANTAGES,
    ),
    case(
        "last-pair",
        "only the very last pair, 0.9 and 2, clips the token of ratio 0.89: it is tried, and"
        " reached is true",
        APP_A | {"contribution": "gradient"},
        [[0.5, 0.0], [-0.115, 0.0]],
        [1.0, -2.0],
    ),
    case(
        "rounded-count",
        "(0.9 - 0.8) / 0.02 is 4.999999999999999: five steps, to be rounded. Cut off to four, the"
        " grid lacks 0.88, where this search stops",
        APP_A | {"contribution": "gradient"},
        [[0.5, 0.0], [-0.14, 0.0]],
        [1.0, -2.0],
    ),
    case(
        "ratio-1",
        "at the first update on a batch every ratio is 1, and bounds around 1 change nothing: below"
        " its target the search runs to the end, and the loss is that of any other bounds",
        MAIN | {"rho0": 0.45},
        ONES,
        [1.0, -1.5],
    ),
    case(
        "one-lower-bound",
        "a lower range of one point stays there, and the upper bound still moves; Algorithm 1 as"
        " printed would end at once",
        MAIN | {"rho0": 0.5, "low": [0.9, 0.9, 0.02]},
        [[0.5], [0.0]],
        [1.0, -1.57],
    ),
    case(
        "one-upper-bound",
        "an upper range of one point stays there, and the lower bound still moves",
        MAIN_GRADIENT | {"rho0": 0.5, "high": [1.2, 1.2, 0.05]},
        [[0.1, 0.0], [-0.25, 0.0]],
        [1.0, -1.8],
    ),
    case(
        "only-positive",
        "without negative tokens rho is 1: the start bounds stay",
        MAIN,
        [[0.5, -0.7], [0.1, 0.0]],
        [1.0, 0.5],
    ),
    case(
        "only-negative",
        "without positive tokens rho is 0 at all bounds: the search ends at the last ones, and"
        " reached is false",
        MAIN,
        [[0.5, -0.7], [0.1, -0.2]],
        [-1.0, -0.5],
    ),
    case(
        "no-advantage",
        "without any advantage there is nothing to balance: rho is 1 and the start bounds stay, no"
        " 0 / 0; the gradient is 0",
        MAIN,
        [[0.5, -0.7], [0.1, 0.0]],
        [0.0, 0.0],
    ),
    case(
        "no-token",
        "an empty mask: the loss is 0, no 0 / 0; rho is 1 and the start bounds stay",
        MAIN,
        [[None, None]],
        [1.0],
    ),
    case(
        "clipped-at-the-start",
        "contribution 'gradient', no token has a gradient at the start bounds: 0 / 0 is taken as 0"
        " and the search goes on, until the upper bound lets the positive token in",
        MAIN_GRADIENT,
        [[0.42], [-0.7]],
        [1.0, -1.0],
    ),
    case(
        "clipped-at-all-bounds",
        "contribution 'gradient', no token has a gradient even at the widest bounds: nothing to"
        " balance, rho is 1 and the start bounds stay",
        MAIN_GRADIENT,
        [[1.2], [-0.7]],
        [1.0, -1.0],
    ),
]


# ---------------------------------------------------------------- the file
def to_json(value):
    """The value with NaN as a string, and floats rounded to what every machine agrees on."""
    if isinstance(value, dict):
        return {name: to_json(one) for name, one in value.items()}
    if isinstance(value, list):
        return [to_json(one) for one in value]
    if isinstance(value, float):
        return "nan" if math.isnan(value) else float(f"{value:.9g}")
    return value


def text() -> str:
    """What vectors.json holds: a line for each part of a case."""
    cases = []
    for one in CASES:
        parts = to_json(one | {"expected": expected(one)})
        lines = [f"  {json.dumps(name)}: {json.dumps(part)}" for name, part in parts.items()]
        cases.append("{\n" + ",\n".join(lines) + "\n}")
    return "[\n" + ",\n".join(cases) + "\n]\n"


if __name__ == "__main__":
    VECTORS.write_text(text())
