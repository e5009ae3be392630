"""Brings samples to the ranks that learn from them: point to point, with sizes that every rank knows from the index.

One rank of each old share sends. One rank of each new share receives, and passes the samples on to the others of its
share along a tree. So a token crosses once from the ranks that drew it to the ranks that learn from it.
"""

from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.batch import PER_TOKEN, Rollouts
from megarl.distributed.exchange import host_group
from megarl.distributed.sharded import Sharded, Shares, assembled

R = TypeVar("R", bound=Rollouts)


def route(samples: Sharded[Rollouts], record: type[R], owners: Tensor, shares: Shares) -> Sharded[R]:
    """Bring every sample to the ranks of its new share. Collective.

    Args:
        samples: `B` samples, as they are spread now.
        record: the fields that travel. Only tensors do; other fields are None afterwards.
        owners: `[B]` int64, the new share of each sample.
        shares: the new shares.
    """
    index = samples.index
    layout = _Layout.of(samples.share, record)
    sending = _send(samples, layout, owners, shares)
    if shares.reports or samples.shares.number == 1:
        share = assembled(_receive(samples, layout, owners, shares))
    if samples.shares.number > 1 and len(shares.ranks[shares.here]) > 1:
        places = (owners == shares.here).nonzero()[:, 0]
        content = (
            layout.pack(share)
            if shares.reports
            else torch.empty(layout.num_bytes(index.num_tokens[places]), dtype=torch.uint8)
        )
        _pass_on(content, shares)
        share = layout.unpack(content, samples, places)
    for each in sending:
        each.wait()
    return Sharded(index=replace(index, owners=owners), share=share, shares=shares)


@dataclass(frozen=True)
class _Layout:
    """The tensors of a record as bytes: one tensor behind the other, those with the widest numbers first."""

    record: type[Any]
    columns: dict[str, tuple[torch.dtype, bool]]  # by name: the type of a number, and whether each token has one

    @classmethod
    def of(cls, example: Rollouts, record: type[Any]) -> "_Layout":
        found = {}
        for field in fields(record):
            value = getattr(example, field.name)
            if isinstance(value, Tensor) and field.name not in ("groups", "num_tokens"):
                found[field.name] = (value.dtype, PER_TOKEN in field.metadata)
        return cls(record, dict(sorted(found.items(), key=lambda column: -column[1][0].itemsize)))

    def num_bytes(self, num_tokens: Tensor) -> int:
        """Return the bytes of samples with so many tokens."""
        return sum(self._sizes(num_tokens))

    def pack(self, record: Rollouts) -> Tensor:
        """Return the bytes of a record: uint8."""
        return torch.cat([getattr(record, name).contiguous().view(torch.uint8) for name in self.columns])

    def unpack(self, content: Tensor, samples: Sharded[Rollouts], places: Tensor) -> Any:
        """Return the record of the samples at the given places (int64 `[b]`), whose bytes are given."""
        num_tokens = samples.index.num_tokens[places]
        parts = zip(self.columns.items(), content.split(self._sizes(num_tokens)), strict=True)
        tensors = {name: part.view(dtype) for (name, (dtype, _)), part in parts}
        absent = {field.name: None for field in fields(self.record)}
        return self.record(
            **absent
            | tensors
            | {
                "prompts": samples.index.prompts,
                "groups": samples.index.groups[places],
                "num_tokens": num_tokens,
            }
        )

    def _sizes(self, num_tokens: Tensor) -> list[int]:
        """Return the bytes of each tensor, of samples with so many tokens."""
        total = int(num_tokens.sum())
        return [
            dtype.itemsize * (total if is_per_token else len(num_tokens))
            for dtype, is_per_token in self.columns.values()
        ]


def _send(samples: Sharded[Rollouts], layout: _Layout, owners: Tensor, shares: Shares) -> list[Any]:
    """Begin to send the samples of this rank's old share to the first rank of each new share that has none of them."""
    old = samples.shares
    sending = []
    for share, local in _by_share(owners[samples.mine]) if old.reports else ():
        target = shares.ranks[share][0]
        if target not in old.ranks[old.here]:
            content = layout.pack(samples.share.select(local))
            sending.append(dist.isend(content, target, group=host_group()))
    return sending


def _receive(samples: Sharded[Rollouts], layout: _Layout, owners: Tensor, shares: Shares) -> list[tuple[Tensor, Any]]:
    """Return the samples of this rank's new share, by the share that they come from: their places, and a record."""
    index = samples.index
    old = samples.shares
    needed = (owners == shares.here).nonzero()[:, 0]
    kept = needed[index.owners[needed] == old.here]
    parts = [(kept, layout.pack(samples.share.select(samples.local(kept))))]  # also without a sample: the example
    coming: list[Any] = []
    for source, chosen in _by_share(index.owners[needed]):
        if source != old.here:
            places = needed[chosen]
            content = torch.empty(layout.num_bytes(index.num_tokens[places]), dtype=torch.uint8)
            coming.append(dist.irecv(content, old.ranks[source][0], group=host_group()))
            parts.append((places, content))
    for each in coming:
        each.wait()
    return [(places, layout.unpack(content, samples, places)) for places, content in parts]


def _by_share(owners: Tensor) -> list[tuple[int, Tensor]]:
    """Return the shares among `owners`, int64 `[b]`, ascending, each with its places, int64 and ascending.

    The cost depends on the given samples alone, and not on the number of shares.
    """
    found, counts = owners.unique(return_counts=True)
    places = owners.argsort(stable=True).split(counts.tolist())
    return list(zip(found.tolist(), places, strict=True))


def _pass_on(content: Tensor, shares: Shares) -> None:
    """Bring the bytes of a share from its first rank to its others: rank `i` gets them from `i` less its first bit."""
    ranks = shares.ranks[shares.here]
    place = ranks.index(shares.rank)
    if not len(content):
        return
    if place:
        source = place - (1 << (place.bit_length() - 1))
        dist.recv(content, ranks[source], group=host_group())
    targets = [place + (1 << bit) for bit in range(place.bit_length(), len(ranks).bit_length())]
    sending: list[Any] = [
        dist.isend(content, ranks[target], group=host_group()) for target in targets if target < len(ranks)
    ]
    for each in sending:
        each.wait()
