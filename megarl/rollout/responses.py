"""Responses of the engines, and episodes, as the record that the rest of a step works with."""

from array import array
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megarl.batch import Generation, Group, Prompts, Rollouts

MOST_NAMED = 8  # rows of the data set


def as_rollouts(prompts: Prompts, groups: Sequence[int], generations: Sequence[Generation], *, n: int) -> Rollouts:
    """Return the record of generated samples, `n` of each prompt. Sample `i` responds to prompt `groups[i]`.

    Raises:
        RuntimeError: prompts have more or fewer samples; names their rows in the data set.
    """
    counts = Counter(groups)
    wrong = {prompt.index: counts[place] for place, prompt in enumerate(prompts.prompts) if counts[place] != n}
    if wrong:
        named = ", ".join(f"row {index} has {count}" for index, count in list(wrong.items())[:MOST_NAMED])
        raise RuntimeError(
            f"the engines were asked for {n} samples of each prompt, and {len(wrong)} prompts have others: {named}"
        )
    num_tokens = torch.tensor([len(generation.token_ids) for generation in generations])
    mask = torch.ones(int(num_tokens.sum()), dtype=torch.bool)
    episodes = {}
    if any(generation.turns for generation in generations):
        mask, rewards = _turns(generations, num_tokens)
        episodes = {
            "turn_rewards": rewards,
            "num_turns": torch.tensor([len(generation.turns) for generation in generations]),
            "stop_reasons": [str(generation.stop_reason) for generation in generations],
            "faults": [generation.fault for generation in generations],
        }
    log_probs = [generation.log_probs for generation in generations if generation.log_probs is not None]
    return prompts.extend(
        Rollouts,
        groups=torch.tensor(groups),
        num_tokens=num_tokens,
        responses=_joined([generation.token_ids for generation in generations]),
        mask=mask,
        rollout_log_probs=_joined(log_probs) if len(log_probs) == len(generations) else None,
        truncated=torch.tensor([generation.truncated for generation in generations]),
        weight_versions=_joined([generation.weight_versions for generation in generations]),
        **episodes,
    )


def of_groups(groups: Sequence[Group]) -> Rollouts:
    """Return the record of complete groups with equally many samples, in their order."""
    return as_rollouts(
        Prompts(prompts=[group.prompt for group in groups]),
        [place for place, group in enumerate(groups) for _ in group.samples],
        [sample for group in groups for sample in group.samples],
        n=len(groups[0].samples),
    )


def _turns(generations: Sequence[Generation], num_tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Return which tokens of episodes the policy said, `[N]` bool, and the reward of each turn on its last token."""
    mask = torch.zeros(int(num_tokens.sum()), dtype=torch.bool)
    rewards = torch.zeros(len(mask))
    for generation, start in zip(generations, (num_tokens.cumsum(0) - num_tokens).tolist(), strict=True):
        for turn in generation.turns:
            mask[start + turn.start : start + turn.end] = True
            rewards[start + turn.end - 1] = turn.reward
    return mask, rewards


def _joined(columns: Sequence["array[Any]"]) -> Tensor:
    """Return the numbers of all columns, end to end, with their type."""
    return torch.from_numpy(np.concatenate([np.asarray(column) for column in columns]))
