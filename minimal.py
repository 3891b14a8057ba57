"""Algorithm 1 of the BAPO paper as one short script.

    python minimal.py           # BAPO: 140 steps, a line for each
    python minimal.py grpo      # GRPO: the same with fixed clip bounds

The task is Countdown (tasks/countdown.py). Training begins with a small model that was trained on
noisy demonstrations. The first run makes it, which takes about two minutes.

- GRPO clips at 0.8 and 1.2 in every update. BAPO raises the upper bound until rho, the positive
  tokens' share of the objective, reaches a target rho0. If the upper bound comes to its end
  before that, BAPO raises the lower one, too (`search_clip_bounds`). All else is the same. Both
  average the loss over all tokens, and drop groups of equal rewards.
- Let P be the sum of |terms| of Eq. 4 over tokens with A > 0, and N the same over A < 0. The paper
  prints rho as P / |P - N|, which is infinite where P = N. Its figures show P / (P + N), as
  computed here.
- Eq. 8's factor pi_rollout does not appear in the code, because a sum over tokens that were drawn
  from pi_rollout already accounts for it.
- rho0 is 0.44 instead of the paper's 0.4. While all ratios are 1, rho is about 0.41 on this task.
  With a target below most of its values, the bounds would stay at 0.6 and 1.2 in most updates.
- bapo.py is the file to copy. It also clamps log-ratios and takes token weights, and its functions
  of the same names take other arguments.

`python train.py --methods bapo@8 grpo@8 --device cpu --output_dir runs/two` runs the same
experiment. To try another loss, change `surrogate`. Another task needs equally long prompts and
rewards of 0 or 1.
"""

import argparse
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from tasks import countdown, problems_of_step

STEPS = 140
PROMPTS = 16  # per step
GROUP_SIZE = 8  # G: responses to each prompt
UPDATES = 8  # E + 1: optimizer steps on each batch of rollouts; 1 is on-policy
MAX_NEW_TOKENS = 28
TEMPERATURE = 1.0
LEARNING_RATE = 2e-4
SEED = 0
STARTS = Path("runs/starts")  # the folder of supervised checkpoints, which train.py uses, too


# ---------------------------------------------------------------- what the paper is about
class ClipSearch(NamedTuple):
    """The values that the clip bounds may have, ascending, and the target of the search."""

    rho0: float
    lows: list[float]  # of c_low
    highs: list[float]  # of c_high


BAPO = ClipSearch(
    rho0=0.44,
    lows=[i / 100 for i in range(60, 91, 2)],  # a- = 0.6 to b- = 0.9 in steps of delta_2 = 0.02
    highs=[i / 100 for i in range(120, 301, 5)],  # a+ = 1.2 to b+ = 3 in steps of delta_1 = 0.05
)
GRPO = ClipSearch(rho0=0.0, lows=[0.8], highs=[1.2])


def surrogate(ratio: Tensor, A: Tensor, low: float, high: float) -> Tensor:
    """Return the terms of Eq. 4, which have the sign of A. The bounds are ratios, not epsilons."""
    return torch.minimum(ratio * A, ratio.clamp(low, high) * A)


def positive_share(ratio: Tensor, A: Tensor, low: float, high: float) -> float:
    """Return rho of Eq. 8: P / (P + N), the sums of |term| over A > 0 and over A < 0."""
    # Eq. 8 clips at [0, c_high] where A > 0. That is the same, because below c_low the smaller term
    # is r A. The sums are in float64, so that a tie with rho0 hardly depends on rounding.
    terms = surrogate(ratio, A, low, high).double()
    return (terms.clamp(min=0).sum() / terms.abs().sum()).item()


def search_clip_bounds(ratio: Tensor, A: Tensor, search: ClipSearch) -> tuple[float, ...]:
    """Algorithm 1: while rho < rho0, raise c_high; at the end of its range, raise c_low instead.

    A token with A < 0 and a ratio below c_low counts c_low |A| in Eq. 8. So raising c_low can only
    make N larger, and rho smaller. Once the search raises c_low, it ends at b- without reaching
    rho0.

    Unlike the printed loop, this one searches the upper bound even if the lower range is a single
    value. Returns c_low, c_high, rho after the search, and rho before it.
    """
    low, *lows = search.lows
    high, *highs = search.highs
    rho_start = positive_share(ratio, A, low, high)
    rho = rho_start
    # The 1e-6 lets a rho that equals rho0 count as reached, however it is rounded.
    while rho < search.rho0 - 1e-6:
        if highs:
            high = highs.pop(0)
        elif lows:
            low = lows.pop(0)
        else:
            break
        rho = positive_share(ratio, A, low, high)
    return low, high, rho, rho_start


def train(search: ClipSearch, start: Path) -> list[dict]:
    """Run Algorithm 1, print a line per step, and return the metrics of every update."""
    tokenizer = AutoTokenizer.from_pretrained(start)
    policy = AutoModelForCausalLM.from_pretrained(start, dtype=torch.float32)
    policy.eval()  # without dropout, in sampling and in training
    optimizer = torch.optim.AdamW(policy.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    problems = countdown.load_task().train
    torch.manual_seed(SEED)
    history = []
    for step in range(1, STEPS + 1):
        # Sample G responses to each prompt: y ~ pi_rollout, which is pi_theta as it is now.
        prompts, answers = zip(*problems_of_step(problems, step, PROMPTS, SEED))
        prompt_ids = torch.tensor(prompts).repeat_interleave(GROUP_SIZE, 0)  # [B, prompt]
        sequences = sample(policy, tokenizer, prompt_ids)  # [B, prompt + T]
        response_ids = sequences[:, prompt_ids.shape[1] :]  # [B, T]
        mask = response_mask(response_ids, tokenizer.eos_token_id)  # [B, T]

        # Rewards, and advantages relative to the group.
        rewards = rewards_of(tokenizer, answers, response_ids).view(PROMPTS, GROUP_SIZE)
        deviations = rewards - rewards.mean(1, keepdim=True)
        advantages = deviations / (rewards.std(1, keepdim=True) + 1e-6)  # [PROMPTS, GROUP_SIZE]

        # log pi_rollout of every token, by the function that the updates use: ratios begin at 1.
        with torch.no_grad():
            rollout_log_probs, entropy = token_log_probs(policy, sequences, response_ids)
        mean_entropy = (entropy * mask).sum() / mask.sum()

        # Filter: drop groups of equal rewards, whose advantages are all 0.
        kept = (advantages != 0).any(1).repeat_interleave(GROUP_SIZE)  # [B]
        if not kept.any():
            print(f"step {step}: no update, because within each group all rewards are equal")
            continue
        kept_mask = mask[kept]  # bool [K, T], of the K responses in the kept groups
        A = advantages.flatten()[kept].repeat_interleave(kept_mask.sum(1))  # A_t, one per token

        # For staleness = 0 ... E: one update each, on the same batch.
        for update in range(1, UPDATES + 1):
            log_probs, _ = token_log_probs(policy, sequences[kept], response_ids[kept])
            log_ratio = log_probs - rollout_log_probs[kept]
            ratio = log_ratio[kept_mask].exp()  # r_t, one per token
            low, high, rho, rho_start = search_clip_bounds(ratio.detach(), A, search)
            loss = -surrogate(ratio, A, low, high).mean()
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), torch.inf)  # not clipped
            optimizer.step()
            optimizer.zero_grad()
            metrics = {
                "step": step,
                "update": update,
                "reward": rewards.mean().item(),
                "entropy": mean_entropy.item(),
                "loss": loss.item(),
                "grad_norm": norm.item(),
                "low": low,
                "high": high,
                "rho_start": rho_start,
                "rho": rho,
            }
            history.append(metrics)
        print(
            f"step {step:3d}: reward {rewards.mean():.3f}, entropy {mean_entropy:.3f}; last update:"
            f" gradient norm {norm:.2f}, rho {rho_start:.3f} before the search, {rho:.3f} after it,"
            f" bounds {low:.2f} {high:.2f}"
        )
    return history


# ---------------------------------------------------------------- what any trainer needs
@torch.no_grad()
def sample(policy, tokenizer, prompt_ids: Tensor) -> Tensor:
    """Sample a response to each prompt of equal length, int64 [B, prompt].

    Returns both: int64 [B, prompt + T], padded with EOS on the right.
    """
    return policy.generate(
        prompt_ids,
        attention_mask=torch.ones_like(prompt_ids),
        max_new_tokens=MAX_NEW_TOKENS,
        do_sample=True,
        temperature=TEMPERATURE,
        # With top-p or top-k the rollout log-probs would be wrong.
        top_p=1.0,
        top_k=0,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.eos_token_id,
    )


def response_mask(response_ids: Tensor, eos: int) -> Tensor:
    """Return a mask that is True up to and including the first EOS: bool [B, T]."""
    is_eos = response_ids == eos
    eos_before = is_eos.cumsum(1) - is_eos.long()
    return eos_before == 0


def rewards_of(tokenizer, answers: tuple, response_ids: Tensor) -> Tensor:
    """Return 1 for a right response, 0 for a wrong one or one without an EOS: float32 [B]."""
    rewards = []
    for row, text in enumerate(tokenizer.batch_decode(response_ids)):
        response, eos, _ = text.partition(tokenizer.eos_token)
        answer = answers[row // GROUP_SIZE]
        rewards.append(float(eos != "" and countdown.grade(response, answer)))
    return torch.tensor(rewards)


def token_log_probs(policy, sequences: Tensor, response_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return log-probs of the response tokens, and the policy's entropies there in nats.

    Both are float32 [B, T], and the entropies have no gradient.
    Padding is on the right, where a causal model does not look, so it needs no attention mask. The
    values outside the response mask mean nothing.
    """
    prompt_length = sequences.shape[1] - response_ids.shape[1]
    # The logits before a token predict it.
    logits = policy(sequences).logits[:, prompt_length - 1 : -1]  # [B, T, V]
    log_softmax = (logits / TEMPERATURE).log_softmax(-1)
    with torch.no_grad():
        entropy = -(log_softmax.exp() * log_softmax).sum(-1)
    log_probs = log_softmax.gather(-1, response_ids.unsqueeze(-1)).squeeze(-1)
    return log_probs, entropy


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("method", nargs="?", choices=["bapo", "grpo"], default="bapo")
    search = GRPO if parser.parse_args().method == "grpo" else BAPO
    torch.set_num_threads(1)  # as in train.py: sums depend on the number of threads
    train(search, countdown.supervised_checkpoint(STARTS, SEED))
