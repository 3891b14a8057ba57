"""Partial rollouts (section 5.3): responses that are drawn over several steps."""

import torch

from reward import Problem
from rollout import PER_TOKEN, Rollouts, collect, sample_rollouts, token_ids


class PartialRollouts:
    """Responses that ran past a step's token budget wait here, and a later policy resumes them.

    Every token keeps the log-prob and the entropy under the policy that drew it, and its version:
    the number of the step. Ages count steps, also those after which nothing could be trained on.

    budget: most tokens that a step adds to a response, at least 1. max_age: a response that is
    unfinished so many steps after its first token is truncated, as if it had reached
    max_new_tokens, so that its group can be trained on; at least 1. sampling: further options of
    `rollout.sample_rollouts`. `groups` is plain data, for checkpoints: a dict per group of
    "problem" (a Problem as a tuple), "prompt" (its token ids) and "responses"; a response has a
    list per name in PER_TOKEN, and "truncated", None as long as it is unfinished.
    """

    def __init__(
        self, *, budget: int, max_age: int, max_new_tokens: int, group_size: int, **sampling
    ):
        if budget < 1 or max_age < 1:
            raise ValueError(f"budget and max_age must be at least 1, got {budget} and {max_age}")
        self.budget = budget
        self.max_age = max_age
        self.max_new_tokens = max_new_tokens
        self.group_size = group_size
        self.sampling = sampling
        self.groups: list[dict] = []

    def advance(
        self, model, tokenizer, problems: list[Problem], step: int
    ) -> tuple[Rollouts | None, list[Problem], dict[str, float]]:
        """One step: start a group for each problem, add up to `budget` tokens of this policy to
        every unfinished response, and take out the groups whose responses are all finished.

        Returns the rollouts of those groups (None if there is none), their problems, and counts for
        the log.
        """
        prompts = token_ids(tokenizer, [problem.prompt for problem in problems])
        for problem, ids in zip(problems, prompts, strict=True):
            responses = [_empty_response() for _ in range(self.group_size)]
            self.groups.append({"problem": tuple(problem), "prompt": ids, "responses": responses})
        counts = self._extend(model, tokenizer, step)
        finished = [group for group in self.groups if _is_finished(group)]
        self.groups = [group for group in self.groups if not _is_finished(group)]
        counts["waiting_groups"] = len(self.groups)
        if not finished:
            return None, [], counts
        prompts = []
        responses = []
        for group in finished:
            prompts += [group["prompt"]] * self.group_size
            responses += group["responses"]
        rollouts = collect(prompts, responses).to(model.device)
        answered = [Problem(*group["problem"]) for group in finished]
        return rollouts, answered, counts | _ages(rollouts, step)

    def _extend(self, model, tokenizer, step: int) -> dict[str, float]:
        """Add this policy's tokens to all unfinished responses; returns counts for the log."""
        prompts = []
        unfinished = []
        for group in self.groups:
            for response in group["responses"]:
                if response["truncated"] is None:
                    prompts.append(group["prompt"] + response["response_ids"])
                    unfinished.append(response)
        lengths = [len(response["response_ids"]) for response in unfinished]
        # One limit for all: that of the shortest response. Longer ones may be drawn past
        # max_new_tokens; what is too much is dropped below.
        limit = min(self.budget, self.max_new_tokens - min(lengths))
        new = sample_rollouts(model, tokenizer, prompts, max_new_tokens=limit, **self.sampling)
        new = new.to("cpu")
        new.versions = torch.full_like(new.response_ids, step)
        counts = {
            "new_tokens": 0,
            "resumed_responses": sum(length > 0 for length in lengths),
            "cut_by_age": 0,
        }
        for row, response in enumerate(unfinished):
            drawn = int(new.mask[row].sum())
            used = min(drawn, self.max_new_tokens - lengths[row])
            for name in PER_TOKEN:
                response[name] += getattr(new, name)[row, :used].tolist()
            counts["new_tokens"] += used
            ended_with_eos = used == drawn and not new.truncated[row]
            is_full = len(response["response_ids"]) == self.max_new_tokens
            is_old = step - response["versions"][0] >= self.max_age
            if ended_with_eos:
                response["truncated"] = False
            elif is_full or is_old:
                response["truncated"] = True
                counts["cut_by_age"] += int(not is_full)
        return counts


def _empty_response() -> dict:
    response = {name: [] for name in PER_TOKEN}
    response["truncated"] = None
    return response


def _is_finished(group: dict) -> bool:
    return all(response["truncated"] is not None for response in group["responses"])


def _ages(rollouts: Rollouts, step: int) -> dict[str, float]:
    """How many steps ago tokens were drawn, for the log."""
    age = (step - rollouts.versions)[rollouts.mask].float()
    resumed = (rollouts.versions > rollouts.versions[:, :1]) & rollouts.mask
    return {
        "token_age_mean": age.mean().item(),
        "token_age_max": age.max().item(),
        "resumed_tokens": (resumed.sum() / rollouts.mask.sum()).item(),
        "mixed_trajectories": resumed.any(1).float().mean().item(),
    }
