"""Hugging Face checkpoints (safetensors) as an end of a reshard: files hold boxes like any rank.

Reading takes only a rank's own slices from the files. Writing is a plan whose destination is files: the boxes travel to
the ranks that write them, and no rank holds more than the full parameters that one bucket touches. A checkpoint is
complete when it has its `config.json`: one that was there goes before the first new file has its name, and the new one
comes last. What one rank cannot write is an error of all.
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
from megarl.platform.files import explained, replacing, reserve, write_whole
from megarl.reshard.executor import Reshard, SyncReport
from megarl.reshard.headers import CONFIG, FLOATS, INDEX, SINGLE, opened, read_index
from megarl.reshard.layout import Layout, Piece, row_major, whole
from megarl.reshard.planner import plan_between

DTYPES = dict(zip(FLOATS, (torch.float64, torch.float32, torch.float16, torch.bfloat16), strict=True))
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}

ROWS = 1024  # of a matrix, that are compared at a time

Shapes = Mapping[str, tuple[int, ...]]


class CheckpointFiles:
    """The weights in a directory, `model.safetensors` or the shards that `model.safetensors.index.json` lists.

    Raises:
        ValueError: the directory has no such weights, or its index lists files of other directories.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        if (single := directory / SINGLE).is_file():
            with opened(single) as file:
                self._file_of = dict.fromkeys(file.keys(), single)
        elif (index := directory / INDEX).is_file():
            self._file_of = {name: directory / file for name, file in read_index(index).items()}
        else:
            raise ValueError(f"{directory} has no weights: neither {SINGLE} nor {INDEX} is there")

    @property
    def names(self) -> Collection[str]:
        """The stored tensors."""
        return self._file_of.keys()

    def layout(self) -> Layout:
        """One piece per stored tensor, as it is stored; `param` is the tensor's name."""
        return [
            _whole_piece(name, tuple(stored.get_shape()), _dtype(stored, name))
            for _, name, stored in self._stored({name: [name] for name in self._file_of})
        ]

    @torch.no_grad()
    def load(self, layout: Layout, tensors: Mapping[str, Tensor], *, shapes: Shapes | None = None) -> None:
        """Read the boxes of a layout into its local tensors, cast to their types; padding is left as it is.

        Args:
            layout: what this rank needs.
            tensors: its local tensors by `Piece.param`, on any device.
            shapes: what the full parameters must look like; without it a file may hold larger ones.

        Raises:
            ValueError: a tensor is not there or has another shape, named with its file.
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
                    raise ValueError(f"{name} in {file} has shape {shape}; the model needs {needed}")
                box = tuple(slice(low, high) for low, high in zip(piece.box.lo, piece.box.hi, strict=True))
                piece.view(tensors[piece.param]).copy_(stored[box])

    @torch.no_grad()
    def are_equal(self, one: str, other: str, rows: range) -> bool:
        """Whether two stored matrices have the same numbers in some of their rows."""
        with opened(self._file_of[one], framework="pt") as left, opened(self._file_of[other], framework="pt") as right:
            a, b = left.get_slice(one), right.get_slice(other)
            return a.get_shape() == b.get_shape() and all(
                torch.equal(*(each[row : min(row + ROWS, rows.stop)].double() for each in (a, b)))
                for row in range(rows.start, rows.stop, ROWS)
            )

    def _stored(self, names: Mapping[str, Any]) -> Iterator[tuple[Path, str, Any]]:
        """File, name and lazy slice of each named tensor, file by file."""
        by_file: dict[Path, list[str]] = defaultdict(list)
        for name in names:
            if name not in self._file_of:
                hint = "; if its output layer is the embedding, config.json must say tie_word_embeddings: true"
                raise ValueError(f"{self._directory} has no tensor {name}" + hint * (name == "lm_head.weight"))
            by_file[self._file_of[name]].append(name)
        for file, stored in by_file.items():
            if not file.is_file():
                raise ValueError(f"{self._directory / INDEX} lists {file.name}, which is not there")
            with opened(file, framework="pt") as tensors:
                for name in stored:
                    yield file, name, tensors.get_slice(name)


def export(
    directory: Path,
    shapes: Shapes,
    sources: Sequence[Layout],
    tensors: Mapping[str, Tensor],
    *,
    config: Mapping[str, Any],
    dtype: torch.dtype,
    ranks_per_node: int,
    device: torch.device,
    bucket_bytes: int = 1 << 28,
    max_shard_bytes: int = 5 * 10**9,
    group: dist.ProcessGroup | None = None,
) -> SyncReport:
    """Write a Hugging Face checkpoint from what the ranks of `group` hold. All of them must call this.

    The files are spread over the ranks, so all must see the same `directory`. Weights that were there are replaced.

    Args:
        directory: made where it is missing.
        shapes: the full parameters to write, in the order of the files.
        sources: what each rank holds.
        tensors: this rank's local tensors by `Piece.param`.
        config: what `config.json` says; its dtype becomes `dtype`.
        dtype: of the written tensors.
        ranks_per_node: as for the planner.
        device: where the buckets live, see `Reshard`.
        bucket_bytes: the most that travels from or to a rank at once.
        max_shard_bytes: of a file, unless one tensor is larger.
        group: by default the world.

    Raises:
        ValueError: some parameter is held by nobody.
        WriteError: some rank could not write, on all ranks. Until all bytes are written nothing that was there changes;
            later it may be incomplete, and has no `config.json`.
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
    """Open a rank's files, with all the room that they need, so that a full disk is known before anything travels."""
    directory.mkdir(parents=True, exist_ok=True)
    for file, pieces in share.items():
        stream = stack.enter_context(replacing(directory / file))
        writer.add(stream, pieces)
        reserve(stream, stream.tell() + sum(piece.box.numel * piece.dtype.itemsize for piece in pieces))


class ShardWriter:
    """Safetensors files as a `Destination`: a parameter is in memory from its first box to its last.

    What cannot be written is told by `finish`: before, other ranks wait for this one.
    """

    def __init__(self) -> None:
        self._failure: OSError | None = None
        self._places: dict[str, tuple[Piece, BinaryIO, int]] = {}
        self._opened: dict[str, Tensor] = {}

    def add(self, file: BinaryIO, pieces: Sequence[Piece]) -> None:
        """Give the parameters (whole ones) their places in an empty file, and write its header."""
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        ends = list(accumulate(piece.box.numel * piece.dtype.itemsize for piece in pieces))
        for piece, begin, end in zip(pieces, [0, *ends], ends, strict=False):
            header[piece.name] = {
                "dtype": DTYPE_NAMES[piece.dtype],
                "shape": piece.box.shape,
                "data_offsets": (begin, end),
            }
        encoded = json.dumps(header).encode()
        encoded += b" " * (-len(encoded) % 8)  # readers map the data that follows, so it has to begin aligned
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for piece, begin in zip(pieces, [0, *ends], strict=False):
            self._places[piece.name] = piece, file, file.tell() + begin

    def layout(self) -> Layout:
        """Every parameter of every file."""
        return [piece for piece, _, _ in self._places.values()]

    def open(self, param: str) -> Tensor:
        """A new tensor for the parameter."""
        piece, _, _ = self._places[param]
        self._opened[param] = torch.empty(piece.box.shape, dtype=piece.dtype)
        return self._opened[param]

    def close(self, param: str) -> None:
        """Write it to its place and forget it."""
        _, file, offset = self._places[param]
        tensor = self._opened.pop(param)
        try:
            file.seek(offset)
            file.write(tensor.view(-1).view(torch.uint8).numpy().data)
        except OSError as error:
            self._failure = self._failure or error

    def finish(self) -> None:
        """Have the files take all that was written. Raises the first OSError that there was."""
        if self._failure:
            raise self._failure
        for _, file, _ in self._places.values():
            file.flush()


def _finish(
    directory: Path,
    files: Mapping[str, Sequence[str]],
    shapes: Shapes,
    config: Mapping[str, Any],
    dtype: torch.dtype,
) -> None:
    """Remove what an earlier export left, and write what makes this one complete."""
    _remove_others(directory, files)
    if len(files) > 1:
        _write_index(directory, shapes, files, dtype)
    config = {key: value for key, value in config.items() if key != "dtype"}  # the newer name of torch_dtype
    _write_json(directory / CONFIG, config | {"torch_dtype": str(dtype).removeprefix("torch.")})


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    write_whole(path, json.dumps(content, indent=2).encode())


def _write_index(directory: Path, shapes: Shapes, files: Mapping[str, Sequence[str]], dtype: torch.dtype) -> None:
    num_bytes = sum(math.prod(shape) for shape in shapes.values()) * dtype.itemsize
    weight_map = {name: file for file, names in files.items() for name in names}
    _write_json(directory / INDEX, {"metadata": {"total_size": num_bytes}, "weight_map": weight_map})


def _remove_others(directory: Path, files: Container[str]) -> None:
    """Remove the weights of an earlier export, which a reader could take for these."""
    for path in [*directory.glob("model*.safetensors"), directory / INDEX]:
        if path.name not in files:
            path.unlink(missing_ok=True)


def _split(shapes: Shapes, dtype: torch.dtype, max_shard_bytes: int) -> dict[str, list[str]]:
    """File names and the parameters in each: as many as fit, in order."""
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
    """The files that each rank writes, neighbouring ones together, with their parameters."""
    shares: list[dict[str, list[Piece]]] = [{} for _ in range(num_writers)]
    for number, (file, names) in enumerate(files.items()):
        shares[number * num_writers // len(files)][file] = [_whole_piece(name, shapes[name], dtype) for name in names]
    return shares


def _whole_piece(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Piece:
    return Piece(name, whole(shape), name, 0, row_major(shape), dtype)


def _dtype(stored: Any, name: str) -> torch.dtype:
    if (kind := stored.get_dtype()) not in DTYPES:
        raise ValueError(f"{name} is stored as {kind}; weights must be plain floats ({', '.join(DTYPES)})")
    return DTYPES[kind]
