"""Brings the routes of samples to the ranks that replay them: each rank gets those of its own layers, and each once.

One rank of each old share sends. Of the ranks that need the same routes, the first receives and passes them on along a
tree.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.batch import Rollouts
from megarl.columns import cut, spans
from megarl.distributed.exchange import begin_receiving, begin_sending, together
from megarl.distributed.redistribution import by_share, pass_on
from megarl.distributed.runs import Runs
from megarl.distributed.sharded import Sharded, Shares


@dataclass(frozen=True, kw_only=True)
class Holders:
    """The ranks that replay the same routes: they have the same samples, and the same layers with routers."""

    share: int  # of this rank
    layers: tuple[int, ...]  # of this rank, by their places among the layers with routers
    ranks: Mapping[tuple[int, tuple[int, ...]], tuple[int, ...]]  # by share and layers, without those that have none

    @classmethod
    def of(cls, shares: Shares, layers: tuple[int, ...]) -> "Holders":
        """Return the holders of all ranks; this rank has `layers`. Collective."""
        ranks = dict[tuple[int, tuple[int, ...]], tuple[int, ...]]()
        for key, rank in together(lambda: ((shares.here, layers), shares.rank)):
            ranks[key] = (*ranks.get(key, ()), rank)
        return cls(share=shares.here, layers=layers, ranks={key: ranks[key] for key in sorted(ranks) if key[1]})

    @property
    def here(self) -> tuple[int, ...]:
        """The ranks that replay the same routes as this rank; none if it has no layer with a router."""
        return self.ranks.get((self.share, self.layers), ())


def redistribute_routes(samples: Sharded[Rollouts], runs: Runs, holders: Holders) -> Tensor:
    """Bring the routes of every sample to the ranks of its new share. Collective.

    Args:
        samples: `B` samples, as they are spread now, with the routes of all layers.
        runs: the new share of each sample.
        holders: the new shares.

    Returns:
        `[M, L, k]`, the routes of this rank's layers, of the samples of its new share in their order.
    """
    routes = samples.share.routes
    old = samples.shares
    assert routes is not None, "samples without routes"
    needed = runs.places(holders.share)
    layers = list(holders.layers)
    if old.number == 1:
        return _routes(samples, needed, layers)
    sending = _send(samples, runs, holders)
    num_places = int((samples.index.lengths[needed] - 1).sum())
    found = torch.empty(num_places, len(layers), routes.shape[2], dtype=routes.dtype)
    if holders.here:
        if holders.here[0] == old.rank:
            _receive(samples, needed, layers, found)
        pass_on(_as_bytes(found), holders.here, old.rank)
    for each in sending:
        each.wait()
    return found


def _send(samples: Sharded[Rollouts], runs: Runs, holders: Holders) -> list[dist.Work]:
    """Begin to send the routes of this rank's old share to the first of the ranks that need each of them."""
    old = samples.shares
    sending = []
    for share, local in by_share(runs.owners_of(samples.mine)) if old.reports else ():
        for (of_share, layers), ranks in holders.ranks.items():
            if of_share == share and ranks[0] not in old.ranks[old.here]:
                content = _as_bytes(_routes(samples, local, list(layers)))
                sending.append(begin_sending(content, ranks[0]))
    return sending


def _receive(samples: Sharded[Rollouts], needed: Tensor, layers: list[int], found: Tensor) -> None:
    """Fill `found` with the routes of the samples at the places `needed`, of all old shares."""
    old = samples.shares
    counts = samples.index.lengths - 1
    places = dict(zip(needed.tolist(), found.split(counts[needed].tolist()), strict=True))
    coming = []
    for source, chosen in by_share(samples.index.runs.owners_of(needed)):
        of_source = needed[chosen]
        if source == old.here:
            content = _routes(samples, samples.local(of_source), layers)
            transfer = None
        else:
            content = found.new_empty(int(counts[of_source].sum()), *found.shape[1:])
            transfer = begin_receiving(_as_bytes(content), old.ranks[source][0])
        coming.append((of_source, content, transfer))
    for of_source, content, transfer in coming:
        if transfer:
            transfer.wait()
        for sample, part in zip(of_source.tolist(), content.split(counts[of_source].tolist()), strict=True):
            places[sample].copy_(part)


def _routes(samples: Sharded[Rollouts], local: Tensor, layers: list[int]) -> Tensor:
    """Return the routes of samples of this rank's old share, by their places in it, on the given layers."""
    share = samples.share
    assert share.routes is not None, "samples without routes"
    routes = share.routes if share.are_all(local) else cut(share.routes, spans(local, share.num_places()))
    return routes[:, layers]


def _as_bytes(routes: Tensor) -> Tensor:
    return routes.contiguous().view(torch.uint8).flatten()
