"""Arithmetic on columns: the rows of all samples, end to end, in the order of the samples.

`[n]` is a column of `b` samples, and `counts` `[b]` int64 are the rows of each.
"""

from collections.abc import Sequence
from itertools import chain

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

Integers = npt.NDArray[np.int64]
BLOCK = 1 << 17
"""Places in the rows of a block, which fit into the cache of a processor."""


def int64(numbers: Sequence[int]) -> Tensor:
    """Return a tensor of integers; torch itself takes seven times as long for a list."""
    return torch.from_numpy(np.fromiter(numbers, dtype=np.int64, count=len(numbers)))


def end_to_end(lists: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Return lists of integers end to end, int32, and their lengths, int64."""
    lengths = int64([*map(len, lists)])
    numbers = np.fromiter(chain.from_iterable(lists), dtype=np.int32, count=int(lengths.sum()))
    return torch.from_numpy(numbers), lengths


def cut(column: Tensor, parts: Sequence[slice]) -> Tensor:
    """Return the given parts of a column, end to end."""
    return torch.cat([column[:0], *(column[part] for part in parts)])


def spans(samples: Tensor, counts: Tensor) -> list[slice]:
    """Return the rows of the given samples (int64 indices `[b]`), in their order: neighbours in one slice.

    All samples lie end to end, and have `counts` rows, `[B]` int64.
    """
    [found] = spans_of_choices([samples], counts)
    return found


def spans_of_choices(choices: Sequence[Tensor], counts: Tensor) -> list[list[slice]]:
    """Return the rows of each of several choices of samples (int64 indices `[b]`), as `spans` does."""
    chosen = torch.cat(list(choices)).numpy()
    numbers = np.arange(len(choices)).repeat([len(choice) for choice in choices])
    firsts, starts, ends = _runs(chosen, counts.numpy(), numbers)
    found: list[list[slice]] = [[] for _ in choices]
    for number, start, end in zip(numbers[firsts].tolist(), starts.tolist(), ends.tolist(), strict=True):
        found[number].append(slice(start, end))
    return found


def spans_of_parts(samples: Tensor, counts: Tensor, sizes: Sequence[int]) -> list[tuple[int, slice]]:
    """Return the rows of samples of several parts: the number of a part, and its rows; neighbours in one slice.

    Args:
        samples: int64 indices `[b]` among the samples of all parts, end to end; the result has their order.
        counts: `[B]` int64, the rows of each sample of all parts.
        sizes: the number of samples of each part, whose sum is `B`.
    """
    chosen = samples.numpy()
    lengths = counts.numpy()
    ends_of_parts = np.cumsum(sizes)
    parts = ends_of_parts.searchsorted(chosen, side="right")
    firsts, starts, ends = _runs(chosen, lengths, parts)
    of_runs = parts[firsts]
    rows_before = np.concatenate(([0], lengths.cumsum()))[ends_of_parts - sizes][of_runs]
    found = zip(of_runs.tolist(), (starts - rows_before).tolist(), (ends - rows_before).tolist(), strict=True)
    return [(part, slice(start, end)) for part, start, end in found]


def _runs(samples: Integers, counts: Integers, numbers: Integers) -> tuple[Integers, Integers, Integers]:
    """Return runs of neighbours with the same number: the place where each begins, its first row, and its last row + 1.

    `samples` `[b]` have `numbers` `[b]`; all samples have `counts` `[B]` rows, end to end.
    """
    is_new = (samples[1:] - samples[:-1] != 1) | (numbers[1:] != numbers[:-1])
    firsts = np.concatenate((np.zeros(min(len(samples), 1), dtype=np.int64), np.flatnonzero(is_new) + 1))
    lasts = np.concatenate((firsts[1:], [len(samples)]))[: len(firsts)] - 1
    ends = counts.cumsum()
    return firsts, ends[samples[firsts]] - counts[samples[firsts]], ends[samples[lasts]]


def counted_from(starts: Tensor, counts: Tensor) -> Tensor:
    """Return `starts[i], starts[i] + 1, ...`, `counts[i]` numbers for each `i`, end to end: int64."""
    ends = counts.cumsum(0)
    return torch.arange(int(counts.sum())) + (starts - ends + counts).repeat_interleave(counts)


def without_ends(column: Tensor, counts: Tensor, removed: Tensor) -> Tensor:
    """Return a column without the last `removed` (int64 `[b]`) of the `counts` (int64 `[b]`) rows of each sample."""
    left = (counts - removed).repeat_interleave(counts)
    return column[counted_from(torch.zeros_like(counts), counts) < left]


def reduced(reduce: np.ufunc, column: Tensor, counts: Tensor, *, dtype: type[np.generic] | None = None) -> Tensor:
    """Reduce the numbers of each sample to one, `[b]`; zero without tokens. It depends on no other sample.

    Args:
        reduce: such as `numpy.maximum`.
        column: `[n]`, in host memory.
        counts: `[b]` int64, the tokens of each sample.
        dtype: of the result; None: that of the column.
    """
    numbers = column.numpy()
    lengths = counts.numpy()
    starts = lengths.cumsum() - lengths
    if len(lengths) and lengths.all():
        return torch.from_numpy(reduce.reduceat(numbers, starts, dtype=dtype))
    has_tokens = lengths > 0
    found = np.zeros(len(lengths), dtype=dtype or numbers.dtype)
    if len(numbers):
        found[has_tokens] = reduce.reduceat(numbers, starts[has_tokens], dtype=dtype)
    return torch.from_numpy(found)


def sample_sums(column: Tensor, counts: Tensor) -> Tensor:
    """Return the sum of the numbers of each sample, as `reduced` does: `[b]` float64."""
    if column.dtype == torch.bool:
        marks = column.numpy()
        if marks.all() or not marks.any():
            return counts.double() * bool(len(marks) and marks[0])
        return reduced(np.add, column.view(torch.uint8), counts, dtype=np.int32).double()
    return reduced(np.add, column.double(), counts)


def on_tokens(numbers: Tensor, counts: Tensor) -> Tensor:
    """Return the column `[n]` with a number of each sample, `[b]`, on each of its `counts` (int64 `[b]`) tokens."""
    return torch.from_numpy(np.repeat(numbers.numpy(), counts.numpy()))


def block_cuts(lengths: Sequence[int]) -> list[int]:
    """Return the first samples of blocks whose rows have at most `BLOCK` places, and the number of samples."""
    cuts = [0]
    width = 0
    for place, length in enumerate(lengths):
        width = max(width, length)
        if place > cuts[-1] and width * (place + 1 - cuts[-1]) > BLOCK:
            cuts.append(place)
            width = length
    return [*cuts, len(lengths)]


def in_rows(column: Tensor, num_tokens: Tensor) -> Tensor:
    """Lay a column `[N]` out as `[B, T]`, with zeros behind each sample's `num_tokens`. Keeps the gradient."""
    if not len(num_tokens):
        return column.view(0, 0)
    return pad_sequence(column.split(num_tokens.tolist()), batch_first=True)


def flat(rows: Tensor, num_tokens: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Return the column `[N]` whose samples, of `num_tokens` tokens, lie in `rows` `[B, T]`; fill `out` with it."""
    pieces = [row[:count] for row, count in zip(rows, num_tokens.tolist(), strict=True)]
    return torch.cat([rows.new_empty(0), *pieces], out=out)
