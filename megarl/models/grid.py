"""Where the ranks of a Megatron run stand: which layers, and which part of their matrices, each of them holds.

The order is Megatron's default, tp-cp-ep-dp-pp: the ranks of a pipeline stage are neighbours; inside a stage the tensor
coordinate runs fastest, then context, then data. Expert layers cut the same stage anew: expert tensor fastest, then
expert, then their replicas.
"""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Cut:
    """Which part of a layer's matrices a rank holds."""

    tp_rank: int = 0
    tp_size: int = 1
    ep_rank: int = 0
    ep_size: int = 1
    etp_rank: int = 0
    etp_size: int = 1


@dataclass(frozen=True, kw_only=True)
class Grid:
    """How the ranks of a run are laid out."""

    num_ranks: int
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 0  # 0: as many as tp
    vpp: int = 1  # model chunks per stage
    num_layers_in_first_stage: int | None = None  # None: as many as the stages between
    num_layers_in_last_stage: int | None = None

    def __post_init__(self) -> None:
        if not self.etp:
            object.__setattr__(self, "etp", self.tp)
        assert self.num_ranks % (self.tp * self.cp * self.pp) == 0, self
        assert self.num_ranks % (self.etp * self.ep * self.pp) == 0, self

    @property
    def dp(self) -> int:
        """Ranks, or groups of them, that have samples of their own."""
        return self.num_ranks // (self.tp * self.cp * self.pp)

    def stage(self, rank: int) -> int:
        """The pipeline stage of `rank`."""
        return rank // (self.num_ranks // self.pp)

    def cut(self, rank: int) -> Cut:
        """The part of each matrix that `rank` holds."""
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
        """The layers of each model chunk of a stage.

        The chunks of one turn follow each other over the stages, then comes the next turn. First and last stage have
        the given numbers of layers; the stages between share the rest equally.
        """
        sizes = self._stage_sizes(num_layers)
        chunk_sizes = [size // self.vpp for size in sizes]
        first = sum(chunk_sizes[:stage])
        turns = [turn * sum(chunk_sizes) + first for turn in range(self.vpp)]
        return [range(start, start + chunk_sizes[stage]) for start in turns]

    def _stage_sizes(self, num_layers: int) -> list[int]:
        first, last = self.num_layers_in_first_stage, self.num_layers_in_last_stage
        between = self.pp - (first is not None) - (last is not None)
        rest = num_layers - (first or 0) - (last or 0)
        sizes = [rest // between if between else 0] * self.pp
        if first is not None:
            sizes[0] = first
        if last is not None:
            sizes[-1] = last
        assert sum(sizes) == num_layers and all(size % self.vpp == 0 for size in sizes), (self, num_layers)
        return sizes
