"""BAPO's Algorithm 1 with nothing around it, for a reader with the paper in the other hand.

    python minimal.py           # BAPO: 140 steps, a line for each
    python minimal.py grpo      # GRPO: the same with fixed clip bounds

The task is Countdown (countdown.py); the start is a small model that has learned from noisy
demonstrations, made once (some three minutes). The loss, the search for the bounds and the
advantages are those of bapo.py. BAPO is ClipSearch() here: the range of App. A, and the positive
share rho of the gradient's masses, in which a clipped token counts nothing;
bapo.contribution_masses says how that differs from Eq. 8 as printed. The paper's main setting is
bapo.PAPER_MAIN.

`python train.py --methods bapo@8 grpo@8` computes the same numbers (but for rounding), with all
that long runs need: checkpoints, micro-batches, many runs side by side, held-out accuracy,
pictures, other models and data. To change the loss, see the line before backward(); the task,
countdown.problems, grade and supervised_start.
"""

import sys
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

import countdown
from bapo import (
    GRPO,
    ClipSearch,
    clipped_surrogate,
    group_relative_advantages,
    search_clip_bounds,
    token_weights,
)
from data import problems_of_step

STEPS = 140
PROMPTS = 16  # per step
GROUP_SIZE = 8  # G: responses to each prompt
UPDATES = 8  # E + 1: optimizer steps on each batch of rollouts; 1 is on-policy
MAX_NEW_TOKENS = 28
TEMPERATURE = 1.0
LEARNING_RATE = 2e-4
SEED = 0
START = Path(f"runs/starts/attempts2-steps{countdown.WARM_START_STEPS}-seed{SEED}")  # as train.py's


def train(search: ClipSearch, start: Path = START, steps: int = STEPS) -> list[dict[str, float]]:
    """Algorithm 1. Prints a line per step, and returns the metrics of every update."""
    tokenizer = AutoTokenizer.from_pretrained(start)
    policy = AutoModelForCausalLM.from_pretrained(start, dtype=torch.float32).eval()
    optimizer = torch.optim.AdamW(policy.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    problems, _ = countdown.problems()
    torch.manual_seed(SEED)
    log = []
    for step in range(1, steps + 1):
        # Sample G responses to each prompt: y ~ pi_rollout, which is pi_theta as it is now.
        asked = problems_of_step(problems, step, PROMPTS, SEED)
        prompt_ids = tokenizer([problem.prompt for problem in asked], return_tensors="pt").input_ids
        prompt_ids = prompt_ids.repeat_interleave(GROUP_SIZE, 0)  # [N, P]: all are equally long
        sequences = sample(policy, tokenizer, prompt_ids)  # [N, P + T]
        response_ids = sequences[:, prompt_ids.shape[1] :]  # [N, T]
        mask = response_mask(response_ids, tokenizer.eos_token_id)  # [N, T]

        # Rewards, and advantages A_t relative to the group.
        rewards = grade(tokenizer, asked, response_ids, mask)  # [N]
        advantages = group_relative_advantages(rewards, GROUP_SIZE)  # [N]

        # log pi_rollout of every token, by the forward pass that trains.
        with torch.no_grad():
            rollout_log_probs, entropy = token_log_probs(policy, sequences, response_ids)
        mean_entropy = (entropy * mask).sum() / mask.sum()

        # Filter: a group whose rewards are all equal has no advantage, and teaches nothing.
        kept_groups = (advantages.view(-1, GROUP_SIZE) != 0).any(1)  # [PROMPTS]
        kept = kept_groups.repeat_interleave(GROUP_SIZE)  # [N]
        if not kept.any():
            print(f"step {step}: the rewards of every group are all equal")
            continue
        advantages = advantages[kept]
        weights = token_weights(mask[kept])  # 1 / (response tokens of the update)

        # For staleness = 0 ... E: one update each, on the same batch.
        for update in range(1, UPDATES + 1):
            log_probs, _ = token_log_probs(policy, sequences[kept], response_ids[kept])
            log_ratio = log_probs - rollout_log_probs[kept]
            # Start at c_low = a-, c_high = a+; while rho < rho0 raise c_high, then c_low (Eq. 8,
            # read as in bapo.contribution_masses).
            bounds = search_clip_bounds(log_ratio.detach(), advantages, weights, search)
            # -min(r A, clip(r, c_low, c_high) A), mean over tokens (Eq. 4 with these bounds).
            loss = clipped_surrogate(log_ratio, advantages, weights, bounds.low, bounds.high)
            loss.backward()
            # Measured, not clipped: the limit is infinite.
            norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), float("inf"))
            optimizer.step()
            optimizer.zero_grad()
            numbers = bounds._asdict()
            numbers["step"] = step
            numbers["update"] = update
            numbers["reward"] = rewards.mean().item()
            numbers["entropy"] = mean_entropy.item()
            numbers["loss"] = loss.item()
            numbers["grad_norm"] = norm.item()
            log.append(numbers)
        print(
            f"step {step:3d}: reward {rewards.mean():.3f}, entropy {mean_entropy:.3f}, and at the"
            f" last update: gradient norm {norm:.2f}, rho {bounds.rho:.3f},"
            f" bounds {bounds.low:.2f} {bounds.high:.2f}"
        )
    return log


@torch.no_grad()
def sample(policy, tokenizer, prompt_ids: Tensor) -> Tensor:
    """One response to each row of prompt_ids [N, P]: int64 [N, P + T], padded with EOS."""
    return policy.generate(
        prompt_ids,
        attention_mask=torch.ones_like(prompt_ids),
        max_new_tokens=MAX_NEW_TOKENS,
        do_sample=True,
        temperature=TEMPERATURE,
        top_p=1.0,  # truncated sampling would make the recorded log-probs wrong
        top_k=0,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.eos_token_id,
    )


def response_mask(response_ids: Tensor, eos: int) -> Tensor:
    """True up to and including the first EOS: bool [N, T]."""
    is_eos = response_ids == eos
    eos_before = is_eos.cumsum(1) - is_eos.long()
    return eos_before == 0


def grade(tokenizer, asked: list, response_ids: Tensor, mask: Tensor) -> Tensor:
    """1 for a right response, 0 for a wrong one or one without EOS: float32 [N]."""
    rewards = []
    for row, length in enumerate(mask.sum(1).tolist()):
        ids = response_ids[row, :length].tolist()
        ended = ids[-1] == tokenizer.eos_token_id
        answer = asked[row // GROUP_SIZE].answer
        rewards.append(float(ended and countdown.grade(tokenizer.decode(ids[:-1]), answer)))
    return torch.tensor(rewards)


def token_log_probs(policy, sequences: Tensor, response_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probs of the response tokens, and entropies at their places: float32 [N, T] each.

    Padding is on the right, where a causal model does not look: no attention mask is needed.
    Outside the mask the values mean nothing.
    """
    responses_begin = sequences.shape[1] - response_ids.shape[1]
    logits = policy(sequences).logits[:, responses_begin - 1 : -1]  # [N, T, V]
    log_softmax = (logits / TEMPERATURE).log_softmax(-1)
    with torch.no_grad():
        entropy = -(log_softmax.exp() * log_softmax).sum(-1)
    log_probs = log_softmax.gather(-1, response_ids.unsqueeze(-1)).squeeze(-1)
    return log_probs, entropy


if __name__ == "__main__":
    (name,) = sys.argv[1:] or ["bapo"]
    chosen = {"bapo": ClipSearch(), "grpo": GRPO}[name]
    torch.set_num_threads(1)  # as in train.py: sums depend on the number of threads
    if not START.exists():
        print("making the start: some three minutes of supervised learning")
        model, model_tokenizer = countdown.supervised_start(SEED, attempts=2)
        unfinished = START.with_suffix(".unfinished")
        model_tokenizer.save_pretrained(unfinished)
        model.save_pretrained(unfinished)
        unfinished.rename(START)  # whole or not there
    train(chosen)
