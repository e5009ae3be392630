"""The grid of the ranks of a Megatron run: the layers, and the part of their matrices, that each rank holds.

The order is Megatron's default, tp-cp-ep-dp-pp: the ranks of a pipeline stage are neighbours; inside a stage the tensor
coordinate varies fastest, then context, then data. Expert layers divide the same stage differently: the expert tensor
coordinate varies fastest, then the expert block, then the replicas.
"""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Cut:
    """The part of a layer's matrices that a rank holds."""

    tp_rank: int = 0
    tp_size: int = 1
    ep_rank: int = 0
    ep_size: int = 1
    etp_rank: int = 0
    etp_size: int = 1


@dataclass(frozen=True, kw_only=True)
class Grid:
    """The arrangement of the ranks of a run."""

    num_ranks: int
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 0  # 0: as many as tp
    vpp: int = 1  # model chunks per stage
    num_layers_in_first_stage: int | None = None  # None: as many as a stage between
    num_layers_in_last_stage: int | None = None

    def __post_init__(self) -> None:
        if not self.etp:
            object.__setattr__(self, "etp", self.tp)
        assert self.num_ranks % (self.tp * self.cp * self.pp) == 0, self
        assert self.num_ranks % (self.etp * self.ep * self.pp) == 0, self

    @property
    def dp(self) -> int:
        """The number of ranks, or groups of ranks, with samples of their own."""
        return self.num_ranks // (self.tp * self.cp * self.pp)

    def stage(self, rank: int) -> int:
        """Return the pipeline stage of `rank`."""
        return rank // (self.num_ranks // self.pp)

    def cut(self, rank: int) -> Cut:
        """Return the part of each matrix that `rank` holds."""
        place = rank % (self.num_ranks // self.pp)
        return Cut(
            tp_rank=place % self.tp,
            tp_size=self.tp,
            ep_rank=place // self.etp % self.ep,
            ep_size=self.ep,
            etp_rank=place % self.etp,
            etp_size=self.etp,
        )

    def layers(self, stage: int, num_layers: int) -> list[range]:
        """Return the layers of each model chunk of a stage.

        The first chunks of all stages come first, in the order of the stages, then the second chunks, and so on. First
        and last stage have the given numbers of layers; the stages between share the rest equally.
        """
        sizes = self._stage_sizes(num_layers)
        chunk_sizes = [size // self.vpp for size in sizes]
        first = sum(chunk_sizes[:stage])
        turns = [turn * sum(chunk_sizes) + first for turn in range(self.vpp)]
        return [range(start, start + chunk_sizes[stage]) for start in turns]

    def _stage_sizes(self, num_layers: int) -> list[int]:
        first = self.num_layers_in_first_stage
        last = self.num_layers_in_last_stage
        between = self.pp - (first is not None) - (last is not None)
        rest = num_layers - (first or 0) - (last or 0)
        sizes = [rest // between if between else 0] * self.pp
        if first is not None:
            sizes[0] = first
        if last is not None:
            sizes[-1] = last
        assert sum(sizes) == num_layers and all(size % self.vpp == 0 for size in sizes), (self, num_layers)
        return sizes
