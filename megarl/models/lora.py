"""Low-rank adapters (LoRA, Hu et al., 2021): the weights that have one, and the shapes of its two matrices.

A weight W [rows, columns] with an adapter acts as W + alpha / rank * B A, with A [rank, columns] and B
[rows, rank]. Megatron fuses projections that the checkpoint keeps apart, such as queries, keys and values. Each has an
adapter of its own, as in PEFT: the fused weight has one A for each projection, one above the other, and the rows of its
B are the rows of W.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import torch

from megarl.models.architecture import SCORE, Architecture, Shapes, hf_shapes
from megarl.models.config import ALL_LINEAR
from megarl.models.grid import Cut, Grid
from megarl.models.trainer import parameter_shapes
from megarl.models.weights import Region, held_and_whole
from megarl.platform.errors import UserError
from megarl.reshard.headers import Shape
from megarl.reshard.layout import Box, Piece

LORA_A = "base_model.model.{}.lora_A.weight"
LORA_B = "base_model.model.{}.lora_B.weight"
"""PEFT's names of the two matrices of a projection."""
HEAD_OF_ADAPTERS = f"base_model.model.{SCORE}"
"""PEFT's name of a scalar head, which learns with the adapters."""
LINEAR = re.compile(r"(?P<linear>decoder\.layers\..*linear_\w+)\.weight\d*")
EXPERTS = re.compile(r"(?P<experts>.*\.mlp\.experts)\.(local_experts\.\d+\.)?(?P<linear>linear_fc[12])\.weight\d*")
"""Names of the experts' weights, one module for each expert or one for all."""


@dataclass(frozen=True, kw_only=True)
class Lora:
    """The adapters of a model. `targets` and `excluded` select projections as in PEFT."""

    rank: int
    alpha: float
    targets: str | tuple[str, ...] = ALL_LINEAR  # a regular expression, or names or ends of names; `all-linear`: all
    excluded: str | tuple[str, ...] = ()
    dropout: float = 0.0  # the share of the numbers before A that an update leaves out
    base: str = ""  # the model that they belong to: a directory, its URI or an id
    start: Path | None = None  # a directory of PEFT with their weights; None: new adapters

    @property
    def scale(self) -> float:
        """The factor of B A."""
        return self.alpha / self.rank

    def adapts(self, projection: str, linear: str) -> bool:
        """Return whether a projection has an adapter.

        Args:
            projection: its name in the checkpoint, as in `model.layers.0.self_attn.q_proj`.
            linear: the name of Megatron's layer that computes it, as in `decoder.layers.0.self_attention.linear_qkv`.
        """
        if any(_selects(self.excluded, name) for name in (projection, linear)):
            return False
        return self.targets == ALL_LINEAR or any(_selects(self.targets, name) for name in (projection, linear))


def _selects(names: str | tuple[str, ...], name: str) -> bool:
    if isinstance(names, str):
        return re.fullmatch(names, name) is not None
    return any(name == end or name.endswith(f".{end}") for end in names)


@dataclass(frozen=True, kw_only=True)
class Adapted:
    """A local Megatron weight with an adapter."""

    linear: str  # Megatron's name with the layer's global number, without `.weight`
    projections: tuple[str, ...]  # names in the checkpoint, without `.weight`, of those that have an adapter
    regions: tuple[Region, ...]  # of these projections, in the local weight
    shape: tuple[int, int]  # of the local weight
    first_column: int  # of the local weight, in the whole
    num_columns: int  # of the whole
    num_blocks: int  # 2: the rows are equal parts of two matrices, which are cut apart; else 1
    cuts_rows: bool  # tensor-parallel ranks have different rows
    cuts_columns: bool

    def number_of(self, region: Region) -> int:
        """Return the number of a region's projection."""
        return self.projections.index(_path(region))

    def shapes(self, rank: int) -> tuple[Shape, Shape]:
        """Return the shapes of A, [projections * rank, columns], and of B, [blocks, rows / blocks, rank]."""
        rows, columns = self.shape
        return (len(self.projections) * rank, columns), (self.num_blocks, rows // self.num_blocks, rank)


def adapted(architecture: Architecture, lora: Lora, name: str, shape: Shape, *, cut: Cut) -> Adapted | None:
    """Return the description of a local weight with an adapter; None if it has none.

    Args:
        architecture: the sizes of the model.
        lora: the adapters.
        name: Megatron's name with the layer's global number.
        shape: of the local weight.
        cut: the part of each matrix that the rank holds.
    """
    match = LINEAR.fullmatch(name)
    experts = architecture.traits.experts
    is_stacked = experts is not None and experts.gate_up is not None and EXPERTS.fullmatch(name)
    if match is None or is_stacked:  # experts in one parameter are no linear layers, and PEFT adapts none of them
        return None
    linear = match["linear"]
    held, whole = held_and_whole(architecture, name, shape, cut=cut)
    projections = tuple(path for path in dict.fromkeys(map(_path, whole)) if lora.adapts(path, linear))
    if not projections:
        return None
    rows, columns = shape
    return Adapted(
        linear=linear,
        projections=projections,
        regions=tuple(region for region in held if _path(region) in projections),
        shape=(rows, columns),
        first_column=held[0].box.lo[1],
        num_columns=whole[0].box.shape[1],
        num_blocks=2 if architecture.traits.gated and linear.endswith("linear_fc1") else 1,
        cuts_rows=rows < sum(region.box.shape[0] for region in whole),
        cuts_columns=columns < whole[0].box.shape[1],
    )


def _path(region: Region) -> str:
    return region.name.removesuffix(".weight")


def adapter_pieces(part: Adapted, rank: int, *, a: str, b: str, place: int, dtype: torch.dtype) -> list[Piece]:
    """Return the boxes of PEFT's parameters in the local matrices A and B of an adapter.

    Args:
        part: the weight with the adapter.
        rank: of the adapter.
        a: the key of the local tensor that has A.
        b: the key of the local tensor that has B.
        place: of this adapter, in tensors that hold several of the same shapes.
        dtype: of the local tensors.
    """
    rows, columns = part.shape
    begin = place * len(part.projections) * rank
    last_column = part.first_column + columns
    found = [
        Piece(
            LORA_A.format(projection),
            Box((0, part.first_column), (rank, last_column)),
            a,
            (begin + number * rank) * columns,
            (columns, 1),
            dtype,
        )
        for number, projection in enumerate(part.projections)
    ]
    for region in part.regions:
        box = Box((region.box.lo[0], 0), (region.box.hi[0], rank))
        found.append(Piece(LORA_B.format(_path(region)), box, b, (place * rows + region.row) * rank, (rank, 1), dtype))
    return found


def local_adapters(architecture: Architecture, lora: Lora, weights: Shapes, *, cut: Cut) -> Shapes:
    """Return the shapes of the adapters of a rank's weights, by Megatron's names; experts of a layer share two.

    Args:
        architecture: the sizes of the model.
        lora: the adapters.
        weights: the shapes of the rank's weights, by Megatron's names with the layers' global numbers.
        cut: the part of each matrix that the rank holds.
    """
    found: Shapes = {}
    for name, shape in weights.items():
        part = adapted(architecture, lora, name, shape, cut=cut)
        if part:
            place = EXPERTS.fullmatch(name)
            path = f"{place['experts']}.adapters.{place['linear']}" if place else f"{part.linear}.adapter"
            for matrix, own in zip(("lora_a", "lora_b"), part.shapes(lora.rank), strict=True):
                key = f"{path}.{matrix}"
                found[key] = (found.get(key, (0,))[0] + 1, *own) if place else own
    return found


def adapter_shapes(architecture: Architecture, lora: Lora) -> Shapes:
    """Return the shapes of the adapters' parameters and of a scalar head, by PEFT's names."""
    of_checkpoint = hf_shapes(architecture)
    shapes: Shapes = {}
    for projection, _ in _projections(architecture, lora):
        rows, columns = of_checkpoint[f"{projection}.weight"]
        shapes[LORA_A.format(projection)] = (lora.rank, columns)
        shapes[LORA_B.format(projection)] = (rows, lora.rank)
    if architecture.scalar_head:
        shapes[HEAD_OF_ADAPTERS] = of_checkpoint[SCORE]
    return shapes


def adapted_projections(architecture: Architecture, lora: Lora) -> list[str]:
    """Return names that select the projections with adapters and no others: the ends of their names if possible."""
    adapted = _projections(architecture, lora)
    chosen = {projection for projection, _ in adapted}
    others = {projection for projection, _ in _all_projections(architecture, lora)} - chosen
    ends = _ends(adapted)
    return sorted(chosen) if any(_selects(tuple(ends), other) for other in others) else ends


def require_targets(architecture: Architecture, lora: Lora) -> None:
    """Check that the adapters select projections of a model.

    Raises:
        UserError: a target or an exception selects none, all targets are excepted, or the rank exceeds the hidden
            size; all targets are meant, and the model has linear attention, which has no adapters; or adapters of
            experts have dropout.
    """
    if lora.rank > architecture.hidden_size:
        raise UserError(
            f"lora_rank: {lora.rank} exceeds the model's hidden size {architecture.hidden_size}: its matrices have no "
            "larger rank; 16 is usual"
        )
    known = _all_projections(architecture, lora)
    if lora.targets == ALL_LINEAR and architecture.linear:
        raise UserError(
            f"target_modules: {ALL_LINEAR} means the projections of linear attention too, which have no adapters here: "
            f"name some of {', '.join(_ends(known))}"
        )
    known_names = [name for pair in known for name in pair]
    for key, names in (("target_modules", lora.targets), ("exclude_modules", lora.excluded)):
        for one in [names] if isinstance(names, str) else [(name,) for name in names]:
            is_all = one == ALL_LINEAR and key == "target_modules"
            if not is_all and not any(_selects(one, name) for name in known_names):
                written = one if isinstance(one, str) else one[0]
                found = ", ".join(_ends(known))
                raise UserError(f"{key}: {written} selects no projection of the model, which has {found}")
    if lora.dropout and any(".mlp.experts." in linear for _, linear in _projections(architecture, lora)):
        raise UserError(
            f"lora_dropout: {lora.dropout} has no effect on adapters of experts, which have no dropout, as in PEFT:"
            " leave the experts out by target_modules or exclude_modules, or write 0"
        )
    if not _projections(architecture, lora):
        raise UserError("exclude_modules leaves no projection of target_modules: nothing would learn")


def _ends(projections: Iterable[tuple[str, str]]) -> list[str]:
    return sorted({projection.rpartition(".")[2] for projection, _ in projections})


def _all_projections(architecture: Architecture, lora: Lora) -> tuple[tuple[str, str], ...]:
    return _projections(architecture, replace(lora, targets=ALL_LINEAR, excluded=()))


@cache
def _projections(architecture: Architecture, lora: Lora) -> tuple[tuple[str, str], ...]:
    """Return each projection with an adapter and the layer that computes it, as `Lora.adapts` takes them."""
    [weights] = parameter_shapes(architecture, Grid(num_ranks=1), 0)
    parts = (adapted(architecture, lora, name, shape, cut=Cut()) for name, shape in weights.items())
    return tuple((projection, part.linear) for part in parts if part for projection in part.projections)
