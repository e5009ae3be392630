"""Responses of the engines, and episodes, as the record that the rest of a step works with."""

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megarl.batch import Generation, Group, Prompt, PromptList, Prompts, Rollouts, float32, int32
from megarl.columns import int64
from megarl.distributed.runs import Runs
from megarl.distributed.sharded import Index, Sharded, Shares
from megarl.platform.errors import UserError
from megarl.rollout.table import GroupRows

MOST_NAMED = 8  # rows of the data set


def as_rollouts(prompts: Prompts, groups: Sequence[int], generations: Sequence[Generation], *, n: int) -> Rollouts:
    """Return the record of generated samples, `n` of each prompt. Sample `i` responds to prompt `groups[i]`.

    Raises:
        RuntimeError: prompts have more or fewer samples; names their rows in the data set.
    """
    places = torch.tensor(groups, dtype=torch.int64)
    _require_counts(prompts.prompts, places.bincount(minlength=len(prompts.prompts)), n=n)
    has_turns = any(generation.num_turns for generation in generations)
    has_log_probs = all(generation.has_log_probs for generation in generations)
    return _record(prompts, places, generations, has_turns=has_turns, has_log_probs=has_log_probs)


def of_groups(groups: Sequence[Group], shares: Shares, no_routes: Tensor | None = None) -> Sharded[Rollouts]:
    """Return the record of complete groups with equally many samples, in their order.

    Args:
        groups: the same on every rank, except that a rank has the tokens of its own replica alone.
        shares: of the engine replicas.
        no_routes: `[0, L, k]`, the routes of no place; None: the record has no routes.

    Raises:
        RuntimeError: prompts have more or fewer samples; names their rows in the data set.
        UserError: samples that an earlier job drew have no routes.
    """
    groups = GroupRows.of(groups)
    table = groups.table
    prompts = Prompts(prompts=PromptList.of(groups.prompts))
    size = int(groups.counts[0])
    _require_counts(prompts.prompts, groups.counts, n=size)
    mine = table.mine()
    has_turns = bool(table.column("num_turns").max())
    has_log_probs = bool(table.column("has_log_probs").min())
    num_tokens = table.column("num_tokens").to(torch.int64)
    runs = Runs.of_groups(table.column("replica"), size)
    index = Index(
        prompts=prompts.prompts,
        runs=replace(runs, owners=runs.owners.where(runs.owners != Generation.replica, shares.here)),
        num_tokens=num_tokens,
        num_learnt=table.column("num_learnt").to(torch.int64) if has_turns else num_tokens,
        truncated=table.column("truncated").to(torch.bool),
    )
    generations = [table.own[place] for place in mine.tolist()]
    share = _record(prompts, index.runs.groups_of(mine), generations, has_turns=has_turns, has_log_probs=has_log_probs)
    if no_routes is not None:
        share = replace(share, routes=_routes(generations, no_routes))
    return Sharded(index=index, share=share, shares=shares)


def _require_counts(prompts: Sequence[Prompt], counts: Tensor, *, n: int) -> None:
    is_wrong = counts.numpy() != n
    if is_wrong.any():
        wrong = np.flatnonzero(is_wrong).tolist()
        named = ", ".join(f"row {prompts[place].index} has {int(counts[place])}" for place in wrong[:MOST_NAMED])
        raise RuntimeError(
            f"the engines were asked for {n} samples of each prompt, and {len(wrong)} prompts have others: {named}"
        )


def _record(
    prompts: Prompts, groups: Tensor, generations: Sequence[Generation], *, has_turns: bool, has_log_probs: bool
) -> Rollouts:
    """Return the record of generated samples. `groups` are their prompts, `[B]` int64.

    `has_turns` and `has_log_probs` are those of the samples of all ranks.
    """
    num_tokens = int64([generation.num_tokens for generation in generations])
    mask = torch.ones(int(num_tokens.sum()), dtype=torch.bool)
    episodes = {}
    if has_turns:
        mask, rewards = _turns(generations, num_tokens)
        episodes = {
            "turn_rewards": rewards,
            "num_turns": torch.tensor([generation.num_turns for generation in generations], dtype=torch.int64),
            "stop_reasons": [str(generation.stop_reason) for generation in generations],
            "faults": [generation.fault for generation in generations],
        }
    log_probs = None
    if has_log_probs:
        log_probs = _joined(float32(), (generation.log_probs for generation in generations))
    return prompts.extend(
        Rollouts,
        groups=groups,
        num_tokens=num_tokens,
        responses=_joined(int32(), (generation.token_ids for generation in generations)),
        mask=mask,
        rollout_log_probs=log_probs,
        truncated=torch.tensor([generation.truncated for generation in generations], dtype=torch.bool),
        weight_versions=_joined(int32(), (generation.weight_versions for generation in generations)),
        **episodes,
    )


def _routes(generations: Sequence[Generation], no_routes: Tensor) -> Tensor:
    """Return the routes of samples, end to end."""
    found = [generation.routes for generation in generations if generation.routes is not None]
    alike = [routes for routes in found if routes.shape[1:] == no_routes.shape[1:]]
    if len(alike) < len(generations):
        raise UserError(
            f"{len(generations) - len(alike)} responses that an earlier job drew have other routes or none: resume "
            "with actor_rollout_ref.rollout.partial.enable=false, which drops unfinished groups, or with the earlier "
            "actor_rollout_ref.rollout.routing_replay"
        )
    return torch.cat([no_routes, *alike])


def _turns(generations: Sequence[Generation], num_tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Return which tokens of episodes the policy said, `[N]` bool, and the reward of each turn on its last token."""
    mask = torch.zeros(int(num_tokens.sum()), dtype=torch.bool)
    rewards = torch.zeros(len(mask))
    for generation, start in zip(generations, (num_tokens.cumsum(0) - num_tokens).tolist(), strict=True):
        for turn in generation.turns:
            mask[start + turn.start : start + turn.end] = True
            rewards[start + turn.end - 1] = turn.reward
    return mask, rewards


def _joined(empty: "array[Any]", columns: Iterable["array[Any] | None"]) -> Tensor:
    """Return the numbers of all columns, end to end, with the type of `empty`."""
    return torch.from_numpy(np.concatenate([np.asarray(column) for column in (empty, *columns)]))
