"""Small records made by hand. Tokens count up, so that a test recognises each of them."""

from collections.abc import Sequence
from dataclasses import fields
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.batch import PER_TOKEN, Experience, Prompt, Prompts, Rollouts, int32
from megarl.distributed.exchange import on_first_rank
from megarl.distributed.sharded import Sharded, Shares, shard
from megarl.training.minibatches import MiniBatches

R = TypeVar("R", bound=Rollouts)


def of_rows(record: type[R], *, mask: Tensor, observed: Tensor | None = None, **values: Any) -> R:
    """Return a record whose columns are given as rows `[B, T]`. A token is where `mask` or `observed` is True."""
    present = mask if observed is None else mask | observed
    columns = {each.name for each in fields(record) if PER_TOKEN in each.metadata}
    flat = {
        name: value[present] if name in columns and value is not None else value
        for name, value in (values | {"mask": mask}).items()
    }
    return record(num_tokens=present.sum(-1), **flat | {"responses": flat["responses"].to(torch.int32)})


def in_rows(record: Rollouts) -> dict[str, Tensor]:
    """Return the columns of a record as rows `[B, T]`, by name."""
    return {name: record.rows(column) for name, column in record.columns()}


def prompts(lengths: Sequence[int]) -> Prompts:
    """Return prompts of the given lengths; the tokens of prompt `i` count up from `100 * (i + 1)`."""
    return Prompts(
        prompts=[
            Prompt(
                index=number,
                token_ids=int32(100 * (number + 1) + place for place in range(length)),
                text="",
                data_source="countdown",
                ground_truth=None,
                extra_info={},
            )
            for number, length in enumerate(lengths)
        ]
    )


def answer(asked: Prompts, lengths: Sequence[int], *, version: int = 0) -> Rollouts:
    """Return equally many responses to each prompt, of the given lengths, by weights of `version`.

    The tokens of sample `i` count up from `10 * (i + 1)`.
    """
    per_prompt = len(lengths) // len(asked.prompts)
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    tokens = 10 * (torch.arange(len(lengths))[:, None] + 1) + torch.arange(max(lengths))
    return of_rows(
        Rollouts,
        prompts=asked.prompts,
        groups=torch.arange(len(asked.prompts)).repeat_interleave(per_prompt),
        responses=tokens * mask,
        mask=mask,
        rollout_log_probs=-1.0 * mask,
        truncated=torch.zeros(len(lengths), dtype=torch.bool),
        weight_versions=version * mask.to(torch.int32),
    )


def experience() -> Experience:
    """Return four prompts with two samples each, of very different lengths, from the sources even, odd, even, odd."""
    generator = torch.Generator().manual_seed(1)
    prompts = [
        Prompt(
            index=number,
            token_ids=torch.randint(3, 200, (3 + 4 * number,), generator=generator).tolist(),
            text="",
            data_source="odd" if number % 2 else "even",
            ground_truth=None,
            extra_info={},
        )
        for number in range(4)
    ]
    lengths = torch.tensor([4, 8, 1, 5, 6, 2, 8, 3])
    mask = torch.arange(8) < lengths[:, None]

    def noise() -> Tensor:
        return torch.randn(mask.shape, generator=generator) * mask

    old = -noise().abs() - 4.0 * mask
    return of_rows(
        Experience,
        prompts=prompts,
        groups=torch.arange(4).repeat_interleave(2),
        responses=torch.randint(3, 200, mask.shape, generator=generator) * mask,
        mask=mask,
        rollout_log_probs=old,
        truncated=torch.zeros(8, dtype=torch.bool),
        scores=torch.zeros(8),
        old_log_probs=old,
        ref_log_probs=old + 0.1 * noise(),
        values=0.1 * noise(),
        advantages=noise(),
        weights=mask.to(torch.float32),
        returns=noise(),
    )


def alone(record: R) -> Sharded[R]:
    """Return the samples of a record that every rank has."""
    shares = Shares.everywhere() if dist.is_initialized() else Shares()
    return shard(record, torch.zeros(len(record), dtype=torch.int64), shares)


def on_all_ranks(samples: Sharded[R]) -> R:
    """Return the record of all samples, in their order and without routes, on every rank. Collective."""
    record = samples.to_first_rank()
    found = on_first_rank(lambda: record)
    assert found is not None
    return found


def in_parts(record: R, *, num_prompts: int) -> list[R]:
    """Return mini-batches of so many prompts, in their order."""
    cut = MiniBatches(num_prompts=num_prompts, num_epochs=1, shuffle=False, seed=0)
    return [record.select(samples) for samples in cut.members(record.groups, len(record.prompts), step=0)]
