"""Tests of other_losses.py: how each loss pulls at likely and unlikely, good and bad tokens."""

import math

import pytest
import torch
from torch.testing import assert_close

import other_losses

# A loss has the gradient -g A at a token's log-prob. This table has g: first where A > 0, then
# where A < 0, each at the importance ratios 0.6, 1 and 6. All is worked out by hand for A = 2 and
# -2, and for tokens that had a probability of 0.1 when they were drawn.
TABLE = [
    ("reinforce", {}, [0.6, 1, 6], [0.6, 1, 6]),
    ("ppo", {}, [0.6, 1, 0], [0, 1, 6]),
    ("ppo", {"low": 0.5, "high": 7.0}, [0.6, 1, 6], [0.6, 1, 6]),
    ("dual-clip", {}, [0.6, 1, 0], [0, 1, 0]),
    ("dual-clip", {"low": 0.5, "high": 7.0, "cap": 8.0}, [0.6, 1, 6], [0.6, 1, 6]),
    ("truncated-is", {}, [0.6, 1, 1], [0.6, 1, 1]),
    ("truncated-is", {"cap": 2.0}, [0.6, 1, 2], [0.6, 1, 2]),
    ("cispo", {}, [0.6, 1, 5], [0.6, 1, 5]),
    ("cispo", {"cap": 2.0}, [0.6, 1, 2], [0.6, 1, 2]),
    ("topr", {}, [1, 1, 1], [0.6, 1, 1]),
    ("rec-oneside", {}, [1, 1, 0], [0, 1, 1]),
    ("rec-oneside", {"low": 0.5, "high": 7.0}, [1, 1, 1], [1, 1, 1]),
    ("asymre", {}, [1.05, 1.05, 1.05], [0.95, 0.95, 0.95]),  # (A + 0.1) / A
    ("asymre", {"shift": 1.0}, [1.5, 1.5, 1.5], [0.5, 0.5, 0.5]),
    ("opmd", {}, [1.0255, 1, 0.9104], [0.9745, 1, 1.0896]),  # 1 - 0.1 log(r) / A
    ("opmd", {"tau": 1.0}, [1.2554, 1, 0.1041], [0.7446, 1, 1.8959]),
    ("dppo-tv", {}, [0.6, 1, 0], [0.6, 1, 6]),  # the probabilities are 0.06, 0.1 and 0.6
    ("dppo-tv", {"delta": 0.03}, [0.6, 1, 0], [0, 1, 6]),
    ("dppo-tv", {"delta": 0.6, "cap": 4.0}, [0.6, 1, 4], [0.6, 1, 4]),
    ("sapo", {}, [0.5766, 1, 0.1596], [0.5743, 1, 0.1246]),  # 4 s (1 - s) r, with the sigmoid s
    ("sapo", {"tau_positive": 0.5, "tau_negative": 2.0}, [0.594, 1, 1.6825], [0.5134, 1, 0.0011]),
    ("gspo", {}, [0.6, 1, 0], [0, 1, 6]),
    ("gspo", {"low": 0.5, "high": 7.0}, [0.6, 1, 6], [0.6, 1, 6]),
    ("dcpo", {}, [0.6, 1, 0], [0.6, 1, 6]),  # the bounds are 0.5 and 2
    ("dcpo", {"epsilon_low": 0.02, "epsilon_high": 4.0}, [0.6, 1, 6], [0, 1, 6]),  # 0.72 and 6.8
    ("dcpo", {"epsilon_high": 4.0, "high_max": 5.0}, [0.6, 1, 0], [0.6, 1, 6]),
    ("ce-gppo", {}, [0.6, 1, 1.2], [0.4, 1, 6]),
    ("ce-gppo", {"low": 0.7, "high": 4, "beta_low": 1, "beta_high": 2}, [0.6, 1, 8], [0.7, 1, 6]),
    # The probability is 0.2 under the proximal policy, so the clipped ratios are 0.3, 0.5 and 3.
    ("decoupled_ppo", {}, [0.6, 1, 0], [0, 0, 6]),
    ("decoupled_ppo", {"low": 0.4, "high": 3.5}, [0.6, 1, 6], [0, 1, 6]),
    # At an age of 4 they are the fourth roots 0.88, 1 and 1.57.
    ("a_3po", {}, [0.6, 1, 0], [0.6, 1, 6]),
    ("a_3po", {"low": 0.9, "high": 1.6}, [0.6, 1, 6], [0, 1, 6]),
]
ADVANTAGES = torch.tensor([2.0, 2.0, 2.0, -2.0, -2.0, -2.0])
MASK = torch.tensor([True, True, False]).expand(6, 3)
EXTRAS = {"decoupled_ppo": "proximal_log_probs", "a_3po": "ages"}
every_loss = pytest.mark.parametrize("name", [*other_losses.LOSSES, *EXTRAS])


def make_batch():
    """Return six responses of two tokens, with NaN behind them."""
    rollout_log_probs = torch.full((6, 3), math.log(0.1)).where(MASK, math.nan)
    ratio = torch.tensor([0.6, 1.0, 6.0, 0.6, 1.0, 6.0]).unsqueeze(1)
    return {
        "log_probs": rollout_log_probs + ratio.log(),
        "rollout_log_probs": rollout_log_probs,
        "advantages": ADVANTAGES,
        "mask": MASK,
        "proximal_log_probs": rollout_log_probs + math.log(2),
        "ages": torch.tensor([4, 4, 0]).expand(6, 3),
    }


def losses_of(name, batch, **options):
    if name in EXTRAS:
        options[EXTRAS[name]] = batch[EXTRAS[name]]
    loss = getattr(other_losses, name.replace("-", "_"))
    return loss(*[*batch.values()][:4], **options)


def gradient_of(name, batch, **options):
    """Return g [B, T]."""
    leaf = batch["log_probs"].clone().requires_grad_()
    losses_of(name, batch | {"log_probs": leaf}, **options).sum().backward()
    return leaf.grad / -ADVANTAGES.unsqueeze(1)


# ---------------------------------------------------------------- the gradient
@pytest.mark.parametrize("name, options, positive, negative", TABLE)
def test_gradients(name, options, positive, negative):
    """NaN outside the mask has no effect."""
    expected = torch.tensor(positive + negative).unsqueeze(1) * MASK.float()
    assert_close(gradient_of(name, make_batch(), **options), expected, rtol=0, atol=1e-4)


def test_gspo_clips_the_geometric_mean_of_a_responses_ratios():
    """Here each token has an advantage of its own."""
    batch = make_batch()
    batch["log_probs"] = batch["rollout_log_probs"] + torch.tensor([0.5, -0.3, 0.0])
    batch["advantages"] = ADVANTAGES.unsqueeze(1) * torch.tensor([1.0, 3.0, 0.0])
    found = gradient_of("gspo", batch, low=0.8, high=1.2)
    assert_close(found, MASK * 2 * math.exp(0.1))  # 2 is the mean of 1 and 3


# ---------------------------------------------------------------- the inputs
@every_loss
def test_bfloat16_is_subtracted_in_float32_and_nan_inside_the_mask_shows(name):
    given = make_batch()
    meant = make_batch()
    for key in ("rollout_log_probs", "log_probs", "proximal_log_probs"):
        given[key] = given[key].bfloat16()
        given[key][0, 0] = math.nan
        meant[key] = given[key].float()
        # Nothing but log_probs may get a gradient.
        given[key].requires_grad_(key != "log_probs")
    losses = losses_of(name, given | {"mask": MASK.float()})
    assert_close(losses, losses_of(name, meant), equal_nan=True)
    assert losses[0, 0].isnan() and not losses.requires_grad


@every_loss
def test_the_loss_is_0_without_a_token(name):
    assert not losses_of(name, make_batch() | {"mask": torch.zeros(6, 3)}).any()


def test_wrong_shapes_and_epsilons_are_refused():
    with pytest.raises(ValueError, match="must have the same shape"):
        losses_of("ppo", make_batch() | {"mask": MASK.flatten()})
    for name in ("ppo", "rec-oneside", "ce-gppo"):
        with pytest.raises(ValueError, match="ratios such as 0.8 and 1.2"):
            losses_of(name, make_batch(), low=0.2, high=0.28)
