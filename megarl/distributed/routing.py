"""Brings samples to the ranks that learn from them: point to point, with sizes that every rank knows from the index.

One rank of each old share sends. One rank of each new share receives, and passes the samples on to the others of its
share along a tree. So a token crosses once from the ranks that drew it to the ranks that learn from it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.batch import PER_PLACE, PER_TOKEN, Rollouts
from megarl.columns import spans_of_choices
from megarl.distributed.exchange import begin_receiving, begin_sending, host_group
from megarl.distributed.sharded import Sharded, Shares, assembled, places_of

R = TypeVar("R", bound=Rollouts)


def route(samples: Sharded[Rollouts], record: type[R], owners: Tensor, shares: Shares) -> Sharded[R]:
    """Bring every sample to the ranks of its new share. Collective.

    Args:
        samples: `B` samples, as they are spread now.
        record: the fields that travel. Only tensors do, and no routes; other fields are None afterwards.
        owners: `[B]` int64, the new share of each sample.
        shares: the new shares.
    """
    index = samples.index
    samples = samples.with_share(replace(samples.share, routes=None))
    layout = _Layout.of(samples.share, record)
    sending = _send(samples, layout, owners, shares)
    if shares.reports or samples.shares.number == 1:
        share = assembled(_receive(samples, layout, owners, shares))
    if samples.shares.number > 1 and len(shares.ranks[shares.here]) > 1:
        places = places_of(owners, shares.here)
        content = (
            next(layout.pack(share, [torch.arange(len(share))]))
            if shares.reports
            else torch.empty(layout.num_bytes(index.num_tokens[places]), dtype=torch.uint8)
        )
        pass_on(content, shares.ranks[shares.here], shares.rank)
        share = layout.unpack(content, samples, places)
    for each in sending:
        each.wait()
    return Sharded(index=replace(index, owners=owners), share=share, shares=shares)


@dataclass(frozen=True)
class _Layout(Generic[R]):
    """The tensors of a record as bytes: one tensor behind the other, those with the widest numbers first."""

    record: type[R]
    columns: dict[str, tuple[torch.dtype, bool]]  # by name: the type of a number, and whether each token has one

    @cached_property
    def nothing(self) -> dict[str, None]:
        """A value of each field that does not travel."""
        return {field.name: None for field in fields(self.record)}

    @classmethod
    def of(cls, example: Rollouts, record: type[R]) -> "_Layout[R]":
        found = {}
        for field in fields(record):
            value = getattr(example, field.name)
            known = field.name in ("groups", "num_tokens") or PER_PLACE in field.metadata
            if isinstance(value, Tensor) and not known:
                found[field.name] = (value.dtype, PER_TOKEN in field.metadata)
        return cls(record, dict(sorted(found.items(), key=lambda column: -column[1][0].itemsize)))

    def num_bytes(self, num_tokens: Tensor) -> int:
        """Return the bytes of samples with so many tokens."""
        return sum(self._sizes(num_tokens))

    def pack(self, share: Rollouts, choices: Sequence[Tensor]) -> Iterator[Tensor]:
        """Yield the bytes of each choice of samples (int64 indices `[b]`) of a share: uint8. A token is copied once."""
        chosen = torch.cat(list(choices))
        columns = []
        for name, (dtype, is_per_token) in self.columns.items():
            column = getattr(share, name) if is_per_token else getattr(share, name)[chosen]
            columns.append((column.contiguous().view(torch.uint8), dtype.itemsize, is_per_token))
        first = 0
        for choice, tokens in zip(choices, spans_of_choices(choices, share.num_tokens), strict=True):
            places = [slice(first, first + len(choice))]
            first += len(choice)
            yield torch.cat(
                [
                    column[span.start * width : span.stop * width]
                    for column, width, is_per_token in columns
                    for span in (tokens if is_per_token else places)
                ]
            )

    def unpack(self, content: Tensor, samples: Sharded[Rollouts], places: Tensor) -> R:
        """Return the record of the samples at the given places (int64 `[b]`), whose bytes are given."""
        parts = zip(self.columns.items(), content.split(self._sizes(samples.index.num_tokens[places])), strict=True)
        return self.of_tensors({name: part.view(dtype) for (name, (dtype, _)), part in parts}, samples, places)

    def keep(self, samples: Sharded[Rollouts], places: Tensor) -> R:
        """Return the record of samples of this rank at the given places (int64 `[b]`)."""
        share = samples.share.select(samples.local(places))
        return self.of_tensors({name: getattr(share, name) for name in self.columns}, samples, places)

    def of_tensors(self, tensors: dict[str, Tensor], samples: Sharded[Rollouts], places: Tensor) -> R:
        """Return the record of the samples at the given places (int64 `[b]`), with these columns."""
        values: dict[str, Any] = {
            **self.nothing,
            **tensors,
            "prompts": samples.index.prompts,
            "groups": samples.index.groups[places],
            "num_tokens": samples.index.num_tokens[places],
        }
        return self.record(**values)

    def _sizes(self, num_tokens: Tensor) -> list[int]:
        """Return the bytes of each tensor, of samples with so many tokens."""
        counts = (len(num_tokens), int(num_tokens.sum()))
        return [dtype.itemsize * counts[is_per_token] for dtype, is_per_token in self.columns.values()]


def _send(samples: Sharded[Rollouts], layout: _Layout[R], owners: Tensor, shares: Shares) -> list[dist.Work]:
    """Begin to send the samples of this rank's old share to the first rank of each new share that has none of them."""
    old = samples.shares
    choices = {
        shares.ranks[share][0]: local
        for share, local in (by_share(owners[samples.mine]) if old.reports else ())
        if shares.ranks[share][0] not in old.ranks[old.here]
    }
    contents = layout.pack(samples.share, list(choices.values())) if choices else ()
    return [begin_sending(content, target) for target, content in zip(choices, contents, strict=True)]


def _receive(samples: Sharded[Rollouts], layout: _Layout[R], owners: Tensor, shares: Shares) -> list[tuple[Tensor, R]]:
    """Return the samples of this rank's new share, by the share that they come from: their places, and a record."""
    index = samples.index
    old = samples.shares
    needed = places_of(owners, shares.here)
    kept = needed[index.owners[needed] == old.here]
    parts = [(kept, layout.keep(samples, kept))]  # also without a sample: the example
    coming = []
    for source, chosen in by_share(index.owners[needed]):
        if source != old.here:
            places = needed[chosen]
            content = torch.empty(layout.num_bytes(index.num_tokens[places]), dtype=torch.uint8)
            coming.append((places, content, begin_receiving(content, old.ranks[source][0])))
    for places, content, transfer in coming:
        transfer.wait()
        parts.append((places, layout.unpack(content, samples, places)))
    return parts


def by_share(owners: Tensor) -> list[tuple[int, Tensor]]:
    """Return the shares among `owners`, int64 `[b]`, ascending, each with its places, int64 and ascending.

    The cost depends on the given samples alone, and not on the number of shares.
    """
    found, counts = owners.unique(return_counts=True)
    places = owners.argsort(stable=True).split(counts.tolist())
    return list(zip(found.tolist(), places, strict=True))


def pass_on(content: Tensor, ranks: Sequence[int], rank: int) -> None:
    """Bring bytes from the first of these ranks to the others: number `i` gets them from `i` less its first bit.

    `rank` is this rank.
    """
    place = ranks.index(rank)
    if not len(content):
        return
    if place:
        source = place - (1 << (place.bit_length() - 1))
        dist.recv(content, ranks[source], group=host_group())
    targets = [place + (1 << bit) for bit in range(place.bit_length(), len(ranks).bit_length())]
    sending = [begin_sending(content, ranks[target]) for target in targets if target < len(ranks)]
    for each in sending:
        each.wait()
