"""Responses of the engines, and episodes, as the record that the rest of a step works with."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

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
    responses = [torch.tensor(generation.token_ids) for generation in generations]
    lengths = torch.tensor([len(response) for response in responses])
    padded = pad_sequence(responses, batch_first=True)
    present = torch.arange(padded.shape[1]) < lengths[:, None]
    episodes = _episodes(generations, present) if any(generation.turns for generation in generations) else {}
    return prompts.extend(
        Rollouts,
        groups=torch.tensor(groups),
        responses=padded,
        mask=present & ~episodes["observed"] if episodes else present,
        rollout_log_probs=_log_probs(generations),
        truncated=torch.tensor([generation.truncated for generation in generations]),
        weight_versions=pad_sequence(
            [torch.tensor(generation.weight_versions, dtype=torch.int32) for generation in generations],
            batch_first=True,
        ),
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


def _episodes(generations: Sequence[Generation], present: Tensor) -> dict[str, Any]:
    """Return the fields of `Rollouts` that only episodes have, all of them. `present` is `[B, T]` bool."""
    in_turn = torch.zeros_like(present)
    rewards = torch.zeros(present.shape)
    for row, generation in enumerate(generations):
        for turn in generation.turns:
            in_turn[row, turn.start : turn.end] = True
            rewards[row, turn.end - 1] = turn.reward
    return {
        "observed": present & ~in_turn,
        "turn_rewards": rewards,
        "num_turns": torch.tensor([len(generation.turns) for generation in generations]),
        "stop_reasons": [str(generation.stop_reason) for generation in generations],
        "faults": [generation.fault for generation in generations],
    }


def _log_probs(generations: Sequence[Generation]) -> Tensor | None:
    known = [torch.tensor(generation.log_probs) for generation in generations if generation.log_probs is not None]
    return pad_sequence(known, batch_first=True) if len(known) == len(generations) else None
