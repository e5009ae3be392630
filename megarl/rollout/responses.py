"""Responses of the engines, and episodes, as the record that the rest of a step works with."""

from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megarl.batch import Elsewhere, Generation, Group, Prompt, Prompts, Rollouts, Sample, float32, int32
from megarl.distributed.sharded import Index, Sharded, Shares

MOST_NAMED = 8  # rows of the data set


def as_rollouts(prompts: Prompts, groups: Sequence[int], generations: Sequence[Generation], *, n: int) -> Rollouts:
    """Return the record of generated samples, `n` of each prompt. Sample `i` responds to prompt `groups[i]`.

    Raises:
        RuntimeError: prompts have more or fewer samples; names their rows in the data set.
    """
    _require_counts(prompts.prompts, groups, n=n)
    return _record(prompts, groups, generations, examples=generations)


def of_groups(groups: Sequence[Group], shares: Shares) -> Sharded[Rollouts]:
    """Return the record of complete groups with equally many samples, in their order.

    Args:
        groups: the same on every rank, except that a rank has the tokens of its own replica alone.
        shares: of the engine replicas.

    Raises:
        RuntimeError: prompts have more or fewer samples; names their rows in the data set.
    """
    prompts = [group.prompt for group in groups]
    samples = [sample for group in groups for sample in group.samples]
    places = [place for place, group in enumerate(groups) for _ in group.samples]
    _require_counts(prompts, places, n=len(groups[0].samples))
    owners = [sample.replica if isinstance(sample, Elsewhere) else shares.here for sample in samples]
    of_samples = _int64(places)
    num_tokens = _int64([sample.num_tokens for sample in samples])
    index = Index(
        prompts=prompts,
        groups=of_samples,
        owners=_int64(owners),
        num_tokens=num_tokens,
        num_learnt=_int64([sample.num_learnt for sample in samples]),
        lengths=_int64([len(prompt.token_ids) for prompt in prompts])[of_samples] + num_tokens,
        truncated=_int64([sample.truncated for sample in samples]).to(torch.bool),
    )
    mine = [(place, sample) for place, sample in zip(places, samples, strict=True) if isinstance(sample, Generation)]
    share = _record(
        Prompts(prompts=prompts),
        [place for place, _ in mine],
        [generation for _, generation in mine],
        examples=samples,
    )
    return Sharded(index=index, share=share, shares=shares)


def _require_counts(prompts: Sequence[Prompt], groups: Sequence[int], *, n: int) -> None:
    counts = Counter(groups)
    wrong = {prompt.index: counts[place] for place, prompt in enumerate(prompts) if counts[place] != n}
    if wrong:
        named = ", ".join(f"row {index} has {count}" for index, count in list(wrong.items())[:MOST_NAMED])
        raise RuntimeError(
            f"the engines were asked for {n} samples of each prompt, and {len(wrong)} prompts have others: {named}"
        )


def _record(
    prompts: Prompts, groups: Sequence[int], generations: Sequence[Generation], *, examples: Sequence[Sample]
) -> Rollouts:
    """Return the record of generated samples. `examples`, of all ranks, decide which columns it has."""
    num_tokens = torch.tensor([generation.num_tokens for generation in generations], dtype=torch.int64)
    mask = torch.ones(int(num_tokens.sum()), dtype=torch.bool)
    episodes = {}
    if any(example.num_turns for example in examples):
        mask, rewards = _turns(generations, num_tokens)
        episodes = {
            "turn_rewards": rewards,
            "num_turns": torch.tensor([generation.num_turns for generation in generations], dtype=torch.int64),
            "stop_reasons": [str(generation.stop_reason) for generation in generations],
            "faults": [generation.fault for generation in generations],
        }
    has_log_probs = all(example.has_log_probs for example in examples)
    return prompts.extend(
        Rollouts,
        groups=torch.tensor(groups, dtype=torch.int64),
        num_tokens=num_tokens,
        responses=_joined(int32(), (generation.token_ids for generation in generations)),
        mask=mask,
        rollout_log_probs=_joined(float32(), (generation.log_probs for generation in generations))
        if has_log_probs
        else None,
        truncated=torch.tensor([generation.truncated for generation in generations], dtype=torch.bool),
        weight_versions=_joined(int32(), (generation.weight_versions for generation in generations)),
        **episodes,
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


def _int64(numbers: Sequence[int]) -> Tensor:
    """Return a tensor of integers; torch itself takes seven times as long for a list."""
    return torch.from_numpy(np.fromiter(numbers, dtype=np.int64, count=len(numbers)))


def _joined(empty: "array[Any]", columns: Iterable["array[Any] | None"]) -> Tensor:
    """Return the numbers of all columns, end to end, with the type of `empty`."""
    return torch.from_numpy(np.concatenate([np.asarray(column) for column in (empty, *columns)]))
