"""Temporary: goes to rollout.py."""
import torch
from torch import Tensor
from typing import NamedTuple
from bapo import token_weights
from rollout import *
from rollout import recorded_log_probs


class Batch(NamedTuple):
    """The responses that one update sees, and the micro-batches in which every forward pass reads them: always the same
    ones, so that rounding cannot move the ratios of a policy that has not changed."""

    rollouts: Rollouts
    advantages: Tensor  # [N]
    weights: Tensor  # [N, T], bapo.token_weights of all of them
    micro_batches: list[tuple[Tensor, Rollouts]]  # rows, and those rows alone
    tokens: int  # of prompts and responses, without padding


def make_batches(rollouts: Rollouts, advantages: Tensor, kept: Tensor, arm, micro_batch_tokens: int) -> list[Batch]:
    """What the updates see in turn: the groups that are `kept` (bool [groups]), or their parts if arm.fresh."""
    rows = torch.arange(len(advantages), device=advantages.device).view(len(kept), -1)[kept]
    batches = []
    for part in rows.tensor_split(arm.updates if arm.fresh else 1):
        if len(part):
            chosen, of_rows = rollouts.select(part.flatten()), advantages[part.flatten()]
            weights = token_weights(chosen.mask, arm.aggregation)
            if arm.share is not None:
                of_rows = with_positive_share(of_rows, weights, arm.share, arm.scale_up)
            micro_batches = chosen.micro_batches(micro_batch_tokens)
            batches.append(Batch(chosen, of_rows, weights, micro_batches, int(chosen.lengths().sum())))
    return batches


def with_positive_share(advantages: Tensor, weights: Tensor, share: float, scale_up: bool) -> Tensor:
    """Advantages [N], the negative ones scaled by one factor so that positive tokens carry `share` of the loss where every
    ratio is 1; weights [N, T]. Without scale_up the factor is 1 at most."""
    mass = advantages * weights.sum(1)
    factor = mass.clamp(min=0).sum() * (1 - share) / (share * -mass.clamp(max=0).sum())
    factor = factor if scale_up else factor.clamp(max=1.0)
    return torch.where(advantages < 0, advantages * factor, advantages)


def autocast(device: str, precision: str) -> torch.autocast:
    """Forward passes in the given precision. The weights stay float32: in bfloat16 a step of 1e-6 would round to nothing."""
    return torch.autocast(torch.device(device).type, torch.bfloat16, enabled=precision == "bfloat16")


# ------------- to data.py
import random, sys
from types import SimpleNamespace
from transformers import AutoConfig, AutoTokenizer, GenerationConfig
from data import load_rows, read_problems, tokenize, Problem
from reward import grade_math, import_math_verify, number
from rollout import eos_token_ids, load_pretrained


def prompts_of_step(rows: list, step: int, count: int, seed: int) -> list:
    """The rows of step 1, 2, ...: a new random order for every pass over the data. A function of its arguments alone,
    so that a resumed run needs no cursor."""
    chosen = []
    for i in range((step - 1) * count, step * count):
        epoch, position = divmod(i, len(rows))
        if not chosen or position == 0:
            order = random.Random(f"{seed}/{epoch}").sample(range(len(rows)), len(rows))
        chosen.append(rows[order[position]])
    return chosen


def load_task(options) -> tuple[list[Problem], list[Problem], object]:
    """Training problems, held-out problems and grader of train.py's --data for its --model, after all that can be checked
    without the weights. Prints what was left out.

    Lowers max_prompt_tokens to what the model has positions for, and says so. Raises ValueError for data, a tokenizer or a
    model that cannot be loaded or do not fit each other, for less data than held_out and one step need, and if answers need
    math-verify and it is not installed.
    """
    tokenizer, model = load_pretrained(AutoTokenizer, options.model), load_pretrained(AutoConfig, options.model)
    try:
        generation = GenerationConfig.from_pretrained(options.model)
    except OSError:  # there need not be one
        generation = None
    eos_token_ids(SimpleNamespace(config=model, generation_config=generation), tokenizer)
    positions = getattr(model.get_text_config(), "max_position_embeddings", None) or sys.maxsize
    room = positions - options.max_new_tokens - max(options.partial_budget - 1, 0)
    if room < 1:
        raise ValueError(
            f"max_new_tokens {options.max_new_tokens} (+ partial_budget - 1) leaves no room for a prompt in the {positions} "
            f"positions of {options.model}: lower it"
        )
    if options.max_prompt_tokens > room:
        print(f"max_prompt_tokens lowered from {options.max_prompt_tokens} to {room}: {options.model} has {positions} positions")
        options.max_prompt_tokens = room
    configuration, _, split = options.split.rpartition("/")
    rows = load_rows(options.data, configuration, split)
    problems, skipped = read_problems(rows, *options.fields)
    problems, too_long = tokenize(problems, tokenizer, options.max_prompt_tokens, instruction=options.instruction)
    skipped[f"with a prompt of more than {options.max_prompt_tokens} tokens"] = too_long
    reasons = "".join(f", {count} {reason}" for reason, count in skipped.items() if count)
    print(f"{options.data}: {len(rows)} rows, {len(problems)} used, {len(rows) - len(problems)} left out{reasons}")
    unknown = max((max(problem.prompt) for problem in problems), default=0)
    vocabulary = model.get_text_config().vocab_size
    if unknown >= vocabulary:
        raise ValueError(f"model: the tokenizer writes token {unknown}, but {options.model} has {vocabulary}: take its own")
    if len(problems) < options.held_out + options.prompts_per_step:
        raise ValueError(
            f"data: {len(problems)} problems are too few to hold out {options.held_out} and train on {options.prompts_per_step} "
            "a step: lower held_out or prompts_per_step"
        )
    if any(number(problem.answer) is None for problem in problems):
        import_math_verify()
    random.Random(0).shuffle(problems)
    return problems[options.held_out :], problems[: options.held_out], grade_math
