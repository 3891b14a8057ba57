"""Partial rollouts (section 5.3)."""

import torch

from rollout import PER_TOKEN, Rollouts, _collect, sample_rollouts, token_ids


class PartialRollouts:
    """Partial rollouts (5.3): a response that runs past the iteration's token budget waits here, unfinished, and is resumed
    by a later policy. Every token keeps the log-prob and the entropy under the policy that drew it, and its version: the
    number of the iteration. Ages count iterations, also those after which nothing could be trained on.

    budget: most tokens that an iteration adds to a response. max_age: a response that is unfinished so many versions after
    its first token is truncated, as if it had reached max_new_tokens, so that its group can be trained on; both at least 1.
    sampling: further options of `sample_rollouts`. `groups` is plain data, for checkpoints.
    """

    def __init__(self, *, budget: int, max_age: int, max_new_tokens: int, group_size: int, **sampling):
        if budget < 1 or max_age < 1:
            raise ValueError(f"budget and max_age must be at least 1, got {budget} and {max_age}")
        self.budget, self.max_age, self.max_new_tokens = budget, max_age, max_new_tokens
        self.group_size, self.sampling = group_size, sampling
        self.groups: list[dict] = []

    def advance(self, model, tokenizer, rows: list, version: int) -> tuple[Rollouts | None, list, dict[str, float]]:
        """One iteration: start a group for each of `rows` (at least one named tuple with .prompt), add up to `budget` tokens
        of this policy to every unfinished response, and take out the groups whose responses are all finished. Returns their
        rollouts (None if there is no such group), their rows, and counts for the log."""
        for row, ids in zip(rows, token_ids(tokenizer, [row.prompt for row in rows])):
            responses = [{name: [] for name in PER_TOKEN} | {"truncated": None} for _ in range(self.group_size)]
            self.groups.append({"row": tuple(row), "prompt": ids, "responses": responses})
        unfinished = [(g["prompt"], r) for g in self.groups for r in g["responses"] if r["truncated"] is None]
        counts = self._extend(model, tokenizer, unfinished, version)
        done = [g for g in self.groups if all(r["truncated"] is not None for r in g["responses"])]
        self.groups = [g for g in self.groups if any(r["truncated"] is None for r in g["responses"])]
        counts["waiting_groups"] = len(self.groups)
        if not done:
            return None, [], counts
        prompts, responses = zip(*((g["prompt"], r) for g in done for r in g["responses"]))
        rollouts = _collect(prompts, responses).to(model.device)
        age = (version - rollouts.versions)[rollouts.mask].float()
        resumed = (rollouts.versions > rollouts.versions[:, :1]) & rollouts.mask
        counts |= {
            "token_age_mean": age.mean().item(),
            "token_age_max": age.max().item(),
            "resumed_tokens": (resumed.sum() / rollouts.mask.sum()).item(),
            "mixed_trajectories": resumed.any(1).float().mean().item(),
        }
        return rollouts, [type(rows[0])(*group["row"]) for group in done], counts

    def _extend(self, model, tokenizer, unfinished: list[tuple[list[int], dict]], version: int) -> dict[str, int]:
        """Add this policy's tokens to the responses, each given with its prompt; returns counts for the log."""
        counts = {"new_tokens": 0, "resumed_responses": sum(bool(r["response_ids"]) for _, r in unfinished), "cut_by_age": 0}
        prompts = [prompt + response["response_ids"] for prompt, response in unfinished]
        missing = self.max_new_tokens - min(len(response["response_ids"]) for _, response in unfinished)
        limit = min(self.budget, missing)  # no position is used that the longest response could not have
        new = sample_rollouts(model, tokenizer, prompts, max_new_tokens=limit, **self.sampling).to("cpu")
        new.versions = torch.full_like(new.response_ids, version)
        for i, (_, response) in enumerate(unfinished):
            drawn = int(new.mask[i].sum())
            used = min(drawn, self.max_new_tokens - len(response["response_ids"]))
            for name in PER_TOKEN:
                response[name] += getattr(new, name)[i, :used].tolist()
            counts["new_tokens"] += used
            at_limit = len(response["response_ids"]) == self.max_new_tokens
            if used == drawn and not new.truncated[i]:
                response["truncated"] = False
            elif at_limit or version - response["versions"][0] >= self.max_age:
                response["truncated"] = True
                counts["cut_by_age"] += not at_limit
        return counts
