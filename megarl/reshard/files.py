"""Hugging Face checkpoints (safetensors) as an end of a reshard: files hold boxes as ranks do.

A rank reads only its own slices of the files. Writing is a plan whose destination is files: boxes travel to the ranks
that write them, and a rank holds only the full parameters that one bucket touches. A checkpoint is complete when it has
its `config.json`: an old one is removed before the first new file gets its name, and the new one is written last. If a
rank cannot write, all ranks raise an error.
"""

import json
import math
from collections import defaultdict
from collections.abc import Collection, Container, Iterator, Mapping, Sequence
from contextlib import ExitStack
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
from megarl.reshard.headers import CONFIG, FLOATS, INDEX, SINGLE, opened, read_index
from megarl.reshard.layout import Layout, Piece, row_major, whole
from megarl.reshard.planner import plan_between

DTYPES = dict(zip(FLOATS, (torch.float64, torch.float32, torch.float16, torch.bfloat16), strict=True))
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}

ROWS = 1024  # of a matrix that are compared at a time

Shapes = Mapping[str, tuple[int, ...]]


class CheckpointFiles:
    """The weights in a directory, `model.safetensors` or the shards that `model.safetensors.index.json` lists.

    Raises:
        UserError: the directory has no such weights, or its index lists files outside of the directory.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        if (single := directory / SINGLE).is_file():
            with opened(single) as file:
                self._file_of = dict.fromkeys(file.keys(), single)
        elif (index := directory / INDEX).is_file():
            self._file_of = {name: directory / file for name, file in read_index(index).items()}
        else:
            raise UserError(f"{directory} has no weights: neither {SINGLE} nor {INDEX} exists")

    @property
    def names(self) -> Collection[str]:
        """The names of the stored tensors."""
        return self._file_of.keys()

    def layout(self) -> Layout:
        """Return one piece per stored tensor, in its stored dtype; `param` is the name of the tensor."""
        return [
            _whole_piece(name, tuple(stored.get_shape()), _dtype(stored, name))
            for _, name, stored in self._stored({name: [name] for name in self._file_of})
        ]

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
            shape = tuple(stored.get_shape())
            expected = shapes[name] if shapes else None
            _dtype(stored, name)
            for piece in pieces_of[name]:
                fits = len(shape) == len(piece.box.lo) and whole(shape).contains(piece.box)
                if not fits or shape != (expected or shape):
                    needed = expected or f"at least {piece.box}"
                    raise UserError(f"{name} in {file} has shape {shape}; the model needs {needed}")
                box = tuple(slice(low, high) for low, high in zip(piece.box.lo, piece.box.hi, strict=True))
                piece.view(tensors[piece.param]).copy_(stored[box])

    @torch.no_grad()
    def are_equal(self, one: str, other: str, rows: range) -> bool:
        """Return whether two stored matrices have equal numbers in the given rows."""
        with opened(self._file_of[one], framework="pt") as left, opened(self._file_of[other], framework="pt") as right:
            a = left.get_slice(one)
            b = right.get_slice(other)
            return a.get_shape() == b.get_shape() and all(
                torch.equal(*(each[row : min(row + ROWS, rows.stop)].double() for each in (a, b)))
                for row in range(rows.start, rows.stop, ROWS)
            )

    def _stored(self, names: Mapping[str, object]) -> Iterator[tuple[Path, str, Any]]:
        """Yield file, name and lazy slice of each named tensor, file by file."""
        by_file: dict[Path, list[str]] = defaultdict(list)
        for name in names:
            if name not in self._file_of:
                hint = "; if its output layer is the embedding, config.json must have tie_word_embeddings: true"
                raise UserError(f"{self._directory} has no tensor {name}" + hint * (name == "lm_head.weight"))
            by_file[self._file_of[name]].append(name)
        for file, stored in by_file.items():
            if not file.is_file():
                raise UserError(f"{self._directory / INDEX} lists {file.name}, which does not exist")
            with opened(file, framework="pt") as tensors:
                for name in stored:
                    yield file, name, tensors.get_slice(name)


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
    max_shard_bytes: int = 5 * 10**9,
    group: dist.ProcessGroup | None = None,
) -> SyncReport:
    """Write a Hugging Face checkpoint from the local tensors of the ranks of `group`. All of them must call this.

    The ranks share the files, so all must see the same `directory`. Weights of an earlier export are replaced.

    Args:
        directory: to write to; created if it is missing.
        shapes: the full parameters to write, in the order of the files.
        sources: the layout of each rank.
        tensors: the local tensors of this rank by `Piece.param`.
        config: the content of `config.json`; its dtype becomes `dtype`.
        dtype: of the written tensors.
        ranks_per_node: as for the planner.
        device: of the buckets, see `Reshard`.
        bucket_bytes: the most bytes that travel from or to a rank at once.
        max_shard_bytes: of a file, unless one tensor is larger.
        group: by default all ranks.

    Raises:
        UserError: nobody holds some parameter.
        WriteError: on all ranks, if a rank could not write. Existing files stay unchanged until all bytes are written;
            after that the directory may be incomplete, and has no `config.json`.
    """
    rank = dist.get_rank(group)
    files = _split(shapes, dtype, max_shard_bytes)
    shares = _shares(files, shapes, dtype, num_writers=dist.get_world_size(group))
    destinations = [list(chain.from_iterable(share.values())) for share in shares]
    plan = plan_between(sources, destinations, rank=rank, ranks_per_node=ranks_per_node, bucket_bytes=bucket_bytes)
    with explained(str(directory)), ExitStack() as stack:
        writer = ShardWriter()
        together(lambda: _make_files(directory, shares[rank], writer, stack), group=group)
        report = Reshard(plan, group=group, device=device).run(tensors, writer)
        together(writer.finish, group=group)
        on_first_rank(lambda: (directory / CONFIG).unlink(missing_ok=True), group=group)
        together(stack.close, group=group)
        on_first_rank(lambda: _finish(directory, files, shapes, config, dtype), group=group)
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
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
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


def _finish(
    directory: Path,
    files: Mapping[str, Sequence[str]],
    shapes: Shapes,
    config: Mapping[str, object],
    dtype: torch.dtype,
) -> None:
    """Remove files of an earlier export, and write the index and `config.json`, which complete this export."""
    _remove_others(directory, files)
    if len(files) > 1:
        _write_index(directory, shapes, files, dtype)
    config = {key: value for key, value in config.items() if key != "dtype"}  # a newer name of torch_dtype
    _write_json(directory / CONFIG, config | {"torch_dtype": str(dtype).removeprefix("torch.")})


def _write_json(path: Path, content: Mapping[str, object]) -> None:
    write_whole(path, json.dumps(content, indent=2).encode())


def _write_index(directory: Path, shapes: Shapes, files: Mapping[str, Sequence[str]], dtype: torch.dtype) -> None:
    num_bytes = sum(math.prod(shape) for shape in shapes.values()) * dtype.itemsize
    weight_map = {name: file for file, names in files.items() for name in names}
    _write_json(directory / INDEX, {"metadata": {"total_size": num_bytes}, "weight_map": weight_map})


def _remove_others(directory: Path, files: Container[str]) -> None:
    """Remove weights of an earlier export, which a reader could mistake for the new ones."""
    for path in [*directory.glob("model*.safetensors"), directory / INDEX]:
        if path.name not in files:
            path.unlink(missing_ok=True)


def _split(shapes: Shapes, dtype: torch.dtype, max_shard_bytes: int) -> dict[str, list[str]]:
    """Return file names with the parameters of each: as many as fit, in order."""
    shards: list[list[str]] = []
    used = 0
    for name, shape in shapes.items():
        size = math.prod(shape) * dtype.itemsize
        used += size
        if not shards or used > max_shard_bytes:
            shards.append([])
            used = size
        shards[-1].append(name)
    if len(shards) == 1:
        return {SINGLE: shards[0]}
    return {f"model-{number:05}-of-{len(shards):05}.safetensors": names for number, names in enumerate(shards, 1)}


def _shares(
    files: Mapping[str, Sequence[str]], shapes: Shapes, dtype: torch.dtype, *, num_writers: int
) -> list[dict[str, list[Piece]]]:
    """Return the files that each rank writes, adjacent files together, with their parameters."""
    shares: list[dict[str, list[Piece]]] = [{} for _ in range(num_writers)]
    for number, (file, names) in enumerate(files.items()):
        shares[number * num_writers // len(files)][file] = [_whole_piece(name, shapes[name], dtype) for name in names]
    return shares


def _whole_piece(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Piece:
    return Piece(name, whole(shape), name, 0, row_major(shape), dtype)


def _dtype(stored: Any, name: str) -> torch.dtype:
    kind = stored.get_dtype()
    if kind not in DTYPES:
        raise UserError(f"{name} is stored as {kind}; weights must be plain floats ({', '.join(DTYPES)})")
    return DTYPES[kind]
