"""Division of a global batch into shares of the data-parallel ranks, and of a share into micro-batches."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megarl.batch import Rollouts
from megarl.distributed.exchange import largest
from megarl.learner.packed import Packed, pack_samples
from megarl.learner.packing import pack, partition
from megarl.learner.parallel import Mesh
from megarl.learner.schedule import num_micro_batches

Replays = Literal["none", "experts", "scores"]
"""The part of the routes of samples that routers take: nothing, the experts, or the scores of these too."""


@dataclass(frozen=True, kw_only=True)
class Budget:
    """Limits of one micro-batch."""

    max_tokens: int  # of all sequences together, per context-parallel rank
    max_sequences: int | None  # None: only the tokens limit it
    num_together: int = 1  # neighbouring samples that a loss compares: they share a micro-batch, in their order

    def holding(self, length: int, mesh: Mesh) -> "Budget":
        """Return the budget, or a larger one if it does not hold a sequence of `length` tokens."""
        return replace(self, max_tokens=max(self.max_tokens, -(-length // mesh.cp_size)))

    def row_length(self, mesh: Mesh) -> int:
        """Return the most tokens of one micro-batch on all context-parallel ranks together."""
        return self.max_tokens * mesh.cp_size


@dataclass(frozen=True, kw_only=True)
class Batching:
    """Division of global batches over data-parallel ranks and micro-batches, for one model."""

    mesh: Mesh
    config: TransformerConfig
    device: torch.device
    balance: bool  # shares have nearly equal numbers of tokens; False: of samples
    replays: Replays  # what rows have of the routes of their samples
    has_keys: bool  # rows have the keys of dropout

    def owners(self, lengths: Tensor, groups: Tensor, counts: Tensor | None = None) -> Tensor:
        """Return the share of each sample or run of samples, `[n]` int64. The samples of a group stay together.

        Args:
            lengths: `[n]` int64, tokens of each.
            groups: `[n]` int64.
            counts: `[n]` int64, samples of each; None: one.
        """
        costs = lengths
        if not self.balance:
            costs = torch.ones_like(lengths) if counts is None else counts
        return partition(costs, groups, self.mesh.dp_size)

    def divide(self, share: Rollouts, budget: Budget) -> list[list[int]]:
        """Return the samples of each micro-batch of this rank's share, the longest first. Collective.

        Every data-parallel rank has the same number of micro-batches, because expert parallelism may span these ranks.
        """
        lengths = share.lengths().tolist()
        size = budget.num_together
        units = [range(first, min(first + size, len(lengths))) for first in range(0, len(lengths), size)]
        tokens = [sum(lengths[sample] for sample in unit) for unit in units]
        most_units = budget.max_sequences and max(1, budget.max_sequences // size)
        packed = partial(pack, tokens, max_tokens=budget.row_length(self.mesh), max_sequences=most_units)
        most = largest(len(packed()))
        bins = packed(num_bins=num_micro_batches(most, self.mesh))
        by_length = [sorted(places, key=lambda place: -tokens[place]) for places in bins]
        return [[sample for place in places for sample in units[place]] for places in by_length]

    def pack(self, share: Rollouts, micro_batches: Iterable[Sequence[int]]) -> list[Packed]:
        """Lay each micro-batch out as the row of tokens that the model's layers take."""
        packed = partial(
            pack_samples,
            replace(share, routes=self._replayed(share.routes)),
            device=self.device,
            num_parts=self.mesh.tp_size if self.config.sequence_parallel else 1,
            cp_rank=self.mesh.cp_rank,
            cp_size=self.mesh.cp_size,
            has_keys=self.has_keys,
        )
        return [packed(samples) for samples in micro_batches]

    def _replayed(self, routes: Tensor | None) -> Tensor | None:
        """Return what routers take of the routes of samples."""
        if routes is None or self.replays == "none":
            return None
        return routes if self.replays == "scores" else routes[..., : self.config.moe_router_topk]
