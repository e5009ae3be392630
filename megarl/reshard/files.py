"""Hugging Face checkpoints (safetensors) as an end of a reshard: files hold boxes as ranks do.

A rank reads only its own slices of the files, and dequantises those in FP8 or MXFP4. Writing is a plan whose
destination is files: boxes travel to the ranks that write them, and a rank holds only the full parameters that one
bucket touches. A checkpoint is complete when it has its `config.json`, and a directory of adapters when it has its
`adapter_config.json`: an old one is removed before the first new file gets its name, and the new one is written last.
If a rank cannot write, all ranks raise an error.
"""

import json
import math
import sys
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain
from pathlib import Path
from typing import Any, BinaryIO

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.distributed.exchange import on_first_rank, together
from megarl.platform.errors import UserError
from megarl.platform.files import explained, replacing, reserve, write_whole
from megarl.reshard.executor import Reshard, SyncReport
from megarl.reshard.headers import (
    ADAPTERS,
    ADAPTERS_CONFIG,
    CONFIG,
    INDEX,
    SINGLE,
    Shape,
    Stored,
    opened,
    read_index,
    stored_tensors,
)
from megarl.reshard.layout import Layout, Piece, rows_of, whole
from megarl.reshard.planner import plan_between
from megarl.reshard.quantised import (
    FP8,
    MXFP4_BLOCKS,
    MXFP4_SCALES,
    SCALE,
    Block,
    matrix_fault,
    matrix_of,
    mxfp4_fault,
    mxfp4_of,
    stored_block,
)
from megarl.reshard.stored import DTYPES, ExpertSlice, Fp8Matrix, Mxfp4Experts, PlainTensor, StoredTensor
from megarl.reshard.wrapped import TextPlace, is_wrapped, text_places

DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}

ROWS = 1024  # of a matrix that are compared at a time

Shapes = Mapping[str, Shape]


@dataclass(frozen=True, kw_only=True)
class ExportNames:
    """The names of the files of an export."""

    weights: str  # if they are in one file
    config: str
    max_shard_bytes: int  # of a file, unless one tensor is larger


OF_MODEL = ExportNames(weights=SINGLE, config=CONFIG, max_shard_bytes=5 * 10**9)
OF_ADAPTERS = ExportNames(weights=ADAPTERS, config=ADAPTERS_CONFIG, max_shard_bytes=sys.maxsize)


class CheckpointFiles:
    """The weights in a directory, in one file or in the shards that `model.safetensors.index.json` lists.

    Raises:
        UserError: the directory has no such weights, or its index lists files outside of the directory.
    """

    def __init__(self, directory: Path, *, single: str = SINGLE) -> None:
        """Take the directory, and the name of a file that has all weights."""
        self._directory = directory
        self._places: Mapping[str, TextPlace] = {}  # if the text model is only a part
        if single == SINGLE and is_wrapped(directory):
            self._places = text_places(stored_tensors(directory))
            self._file_of = {name: place.tensor.file for name, place in self._places.items()}
        elif (directory / single).is_file():
            with opened(directory / single) as file:
                self._file_of = dict.fromkeys(file.keys(), directory / single)
        elif (directory / INDEX).is_file():
            self._file_of = {name: directory / file for name, file in read_index(directory / INDEX).items()}
        else:
            raise UserError(f"{directory} has no weights: neither {single} nor {INDEX} exists")

    @property
    def names(self) -> Collection[str]:
        """The names of the stored tensors, without scales. Matrices in MXFP4 have the names that they have in bf16."""
        stored = [name for name in self._file_of if matrix_of(name) not in self._file_of]
        return list(dict.fromkeys(self._matrices(name) or name for name in stored))

    def layout(self) -> Layout:
        """Return one piece per tensor of `names`, in the dtype that is read; `param` is the name of the tensor."""
        return [Piece.complete(name, stored.shape, stored.dtype) for _, name, stored in self._stored(self.names)]

    @torch.no_grad()
    def load(self, layout: Layout, tensors: Mapping[str, Tensor], *, shapes: Shapes | None = None) -> None:
        """Read the boxes of a layout into local tensors, cast to their dtypes; leave padding unchanged.

        Args:
            layout: the boxes that this rank needs.
            tensors: the local tensors by `Piece.param`, on any device.
            shapes: of the full parameters; without it stored parameters may be larger.

        Raises:
            UserError: a tensor is missing or has another shape. The message names the tensor and its file.
        """
        pieces_of: dict[str, list[Piece]] = defaultdict(list)
        for piece in layout:
            pieces_of[piece.name].append(piece)
        for file, name, stored in self._stored(pieces_of):
            expected = shapes[name] if shapes else None
            for piece in pieces_of[name]:
                fits = len(stored.shape) == len(piece.box.lo) and whole(stored.shape).contains(piece.box)
                if not fits or stored.shape != (expected or stored.shape):
                    needed = expected or f"at least {piece.box}"
                    raise UserError(f"{name} in {file} has shape {stored.shape}; the model needs {needed}")
                for box, numbers in stored.read(piece.box):
                    piece.part(box).view(tensors[piece.param]).copy_(numbers)

    @torch.no_grad()
    def are_equal(self, one: str, other: str, rows: range) -> bool:
        """Return whether two stored matrices have equal numbers in the given rows."""
        with self._one(one) as a, self._one(other) as b:
            parts = (range(row, min(row + ROWS, rows.stop)) for row in range(rows.start, rows.stop, ROWS))
            return a.shape == b.shape and all(torch.equal(_rows(a, part), _rows(b, part)) for part in parts)

    @contextmanager
    def _one(self, name: str) -> Iterator[StoredTensor]:
        for _, _, stored in self._stored([name]):
            yield stored

    def _stored(self, names: Iterable[str]) -> Iterator[tuple[Path, str, StoredTensor]]:
        """Yield file, name and content of each named tensor, file by file. The file is open until the next one."""
        by_file: dict[Path, list[str]] = defaultdict(list)
        for name in names:
            file = self._file_of.get(name) or self._file_of.get(name + MXFP4_BLOCKS)
            if file is None:
                hint = "; if its output layer is the embedding, config.json must have tie_word_embeddings: true"
                raise UserError(f"{self._directory} has no tensor {name}" + hint * (name == "lm_head.weight"))
            by_file[file].append(name)
        for file, stored in by_file.items():
            with ExitStack() as stack:
                files = _OpenFiles(self._directory, stack)
                for name in stored:
                    yield file, name, self._tensor(name, files)

    def _tensor(self, name: str, files: "_OpenFiles") -> StoredTensor:
        """Return a tensor of an open file; scales may be in another file."""
        if name not in self._file_of:
            return self._experts(name, files)
        file = self._file_of[name]
        numbers = self._slice(name, files)
        if numbers.get_dtype() != FP8:
            return PlainTensor(name, numbers)
        scale = name + (self._block.scale if self._block else SCALE)
        home = self._file_of.get(scale)
        scales = self._slice(scale, files) if home else None
        found = _described(home, scales) if home else None
        fault = matrix_fault(name, _described(file, numbers), found, self._block)
        if fault or self._block is None:
            raise UserError(fault)
        return Fp8Matrix(numbers, scales, self._block)

    def _slice(self, name: str, files: "_OpenFiles") -> Any:
        """Return a lazy slice of a tensor."""
        place = self._places.get(name)
        numbers = files[self._file_of[name]].get_slice(place.name if place else name)
        return ExpertSlice(numbers, place) if place and place.expert is not None else numbers

    def _experts(self, name: str, files: "_OpenFiles") -> StoredTensor:
        """Return matrices in MXFP4."""
        file = self._file_of[name + MXFP4_BLOCKS]
        home = self._file_of.get(name + MXFP4_SCALES)
        blocks = self._slice(name + MXFP4_BLOCKS, files)
        scales = self._slice(name + MXFP4_SCALES, files) if home else None
        fault = mxfp4_fault(name, _described(file, blocks), _described(home, scales) if home else None)
        if fault:
            raise UserError(fault)
        return Mxfp4Experts(blocks, scales)

    def _matrices(self, name: str) -> str | None:
        """Return the matrices in MXFP4 that a stored tensor belongs to."""
        own = mxfp4_of(name)
        return own if own is not None and own + MXFP4_BLOCKS in self._file_of else None

    @cached_property
    def _block(self) -> Block | None:
        return stored_block(self._directory)


class _OpenFiles(dict[Path, Any]):
    """The files of a directory that are open; a file is opened when it is first asked for."""

    def __init__(self, directory: Path, stack: ExitStack) -> None:
        super().__init__()
        self._directory = directory
        self._stack = stack

    def __missing__(self, file: Path) -> Any:
        if not file.is_file():
            raise UserError(f"{self._directory / INDEX} lists {file.name}, which does not exist")
        self[file] = self._stack.enter_context(opened(file, framework="pt"))
        return self[file]


def _described(file: Path, stored: Any) -> Stored:
    return Stored(file, stored.get_dtype(), tuple(stored.get_shape()))


def _rows(stored: StoredTensor, rows: range) -> Tensor:
    """Return some rows of a stored tensor in float64."""
    box = rows_of(stored.shape, rows.start, rows.stop)
    return torch.cat([numbers.double() for _, numbers in stored.read(box)])


def export(
    directory: Path,
    shapes: Shapes,
    sources: Sequence[Layout],
    tensors: Mapping[str, Tensor],
    *,
    config: Mapping[str, object],
    dtype: torch.dtype,
    ranks_per_node: int,
    device: torch.device,
    bucket_bytes: int = 1 << 28,
    names: ExportNames = OF_MODEL,
) -> SyncReport:
    """Write a Hugging Face checkpoint from the local tensors of all ranks. Collective.

    The ranks share the files, so all must see the same `directory`. An earlier export of a model or of adapters is
    replaced.

    Args:
        directory: to write to; created if it is missing.
        shapes: the full parameters to write, in the order of the files.
        sources: the layout of each rank.
        tensors: the local tensors of this rank by `Piece.param`.
        config: the content of the configuration.
        dtype: of the written tensors.
        ranks_per_node: as for the planner.
        device: of the buckets, see `Reshard`.
        bucket_bytes: the most bytes that travel from or to a rank at once.
        names: of the files.

    Raises:
        UserError: nobody holds some parameter.
        WriteError: on all ranks, if a rank could not write. Existing files stay unchanged until all bytes are written;
            after that the directory may be incomplete, and has no configuration.
    """
    rank = dist.get_rank()
    files = _split(shapes, dtype, names)
    shares = _shares(files, shapes, dtype, num_writers=dist.get_world_size())
    destinations = [list(chain.from_iterable(share.values())) for share in shares]
    plan = plan_between(sources, destinations, rank=rank, ranks_per_node=ranks_per_node, bucket_bytes=bucket_bytes)
    with explained(str(directory)), ExitStack() as stack:
        writer = ShardWriter()
        together(lambda: _make_files(directory, shares[rank], writer, stack))
        report = Reshard(plan, device=device).run(tensors, writer)
        together(writer.finish)
        on_first_rank(lambda: _remove_configs(directory))
        together(stack.close)
        on_first_rank(lambda: _finish(directory / names.config, files, shapes, config, dtype))
    return report


def _make_files(directory: Path, share: Mapping[str, Sequence[Piece]], writer: "ShardWriter", stack: ExitStack) -> None:
    """Open a rank's files and reserve their space, so that a full disk is detected before anything travels."""
    directory.mkdir(parents=True, exist_ok=True)
    for file, pieces in share.items():
        stream = stack.enter_context(replacing(directory / file))
        writer.add(stream, pieces)
        reserve(stream, stream.tell() + sum(piece.box.numel * piece.dtype.itemsize for piece in pieces))


class ShardWriter:
    """Safetensors files as a `Destination`: a parameter is in memory from its first box to its last.

    `finish` raises errors of writing, because before it other ranks wait for this rank.
    """

    def __init__(self) -> None:
        self._failure: OSError | None = None
        self._places: dict[str, tuple[Piece, BinaryIO, int]] = {}
        self._opened: dict[str, Tensor] = {}

    def add(self, file: BinaryIO, pieces: Sequence[Piece]) -> None:
        """Assign full parameters their offsets in an empty file, and write its header."""
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        ends = list(accumulate(piece.box.numel * piece.dtype.itemsize for piece in pieces))
        for piece, begin, end in zip(pieces, [0, *ends], ends, strict=False):
            header[piece.name] = {
                "dtype": DTYPE_NAMES[piece.dtype],
                "shape": piece.box.shape,
                "data_offsets": (begin, end),
            }
        encoded = json.dumps(header).encode()
        encoded += b" " * (-len(encoded) % 8)  # readers map the following data, which must begin aligned
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for piece, begin in zip(pieces, [0, *ends], strict=False):
            self._places[piece.name] = piece, file, file.tell() + begin

    def layout(self) -> Layout:
        """Return every parameter of every file."""
        return [piece for piece, _, _ in self._places.values()]

    def open(self, param: str) -> Tensor:
        """Return a new tensor for the parameter."""
        piece, _, _ = self._places[param]
        self._opened[param] = torch.empty(piece.box.shape, dtype=piece.dtype)
        return self._opened[param]

    def close(self, param: str) -> None:
        """Write the parameter to its file and release it."""
        _, file, offset = self._places[param]
        tensor = self._opened.pop(param)
        try:
            file.seek(offset)
            file.write(tensor.view(-1).view(torch.uint8).numpy().data)
        except OSError as error:
            self._failure = self._failure or error

    def finish(self) -> None:
        """Flush the files. Raise the first OSError of writing."""
        if self._failure:
            raise self._failure
        for _, file, _ in self._places.values():
            file.flush()


def _remove_configs(directory: Path) -> None:
    for name in (CONFIG, ADAPTERS_CONFIG):
        (directory / name).unlink(missing_ok=True)


def _finish(
    config_file: Path,
    files: Mapping[str, Sequence[str]],
    shapes: Shapes,
    config: Mapping[str, object],
    dtype: torch.dtype,
) -> None:
    """Remove files of an earlier export, and write the index and the configuration, which completes this export."""
    directory = config_file.parent
    for path in [*directory.glob("model*.safetensors"), directory / ADAPTERS, directory / INDEX]:
        if path.name not in files:  # a reader could mistake it for a new one
            path.unlink(missing_ok=True)
    if len(files) > 1:
        _write_index(directory, shapes, files, dtype)
    _write_json(config_file, config)


def _write_json(path: Path, content: Mapping[str, object]) -> None:
    write_whole(path, json.dumps(content, indent=2).encode())


def _write_index(directory: Path, shapes: Shapes, files: Mapping[str, Sequence[str]], dtype: torch.dtype) -> None:
    num_bytes = sum(math.prod(shape) for shape in shapes.values()) * dtype.itemsize
    weight_map = {name: file for file, names in files.items() for name in names}
    _write_json(directory / INDEX, {"metadata": {"total_size": num_bytes}, "weight_map": weight_map})


def _split(shapes: Shapes, dtype: torch.dtype, of: ExportNames) -> dict[str, list[str]]:
    """Return file names with the parameters of each: as many as fit, in order."""
    shards: list[list[str]] = []
    used = 0
    for name, shape in shapes.items():
        size = math.prod(shape) * dtype.itemsize
        used += size
        if not shards or used > of.max_shard_bytes:
            shards.append([])
            used = size
        shards[-1].append(name)
    if len(shards) == 1:
        return {of.weights: shards[0]}
    return {f"model-{number:05}-of-{len(shards):05}.safetensors": names for number, names in enumerate(shards, 1)}


def _shares(
    files: Mapping[str, Sequence[str]], shapes: Shapes, dtype: torch.dtype, *, num_writers: int
) -> list[dict[str, list[Piece]]]:
    """Return the files that each rank writes, adjacent files together, with their parameters."""
    shares: list[dict[str, list[Piece]]] = [{} for _ in range(num_writers)]
    for number, (file, names) in enumerate(files.items()):
        shares[number * num_writers // len(files)][file] = [Piece.complete(name, shapes[name], dtype) for name in names]
    return shares
