"""The proof that a plan does what it must, from the local tensors' point of view, without the planner's reasoning."""

from collections import Counter, defaultdict

import numpy as np
import numpy.typing as npt

from megarl.reshard.layout import Layout, Piece
from megarl.reshard.plan import RankPlan


def check_plan(plan: RankPlan, destination: Layout) -> None:
    """Prove that the plan writes every element that the rank's destination lists exactly once.

    Raises:
        ValueError: two pieces share an element of a local tensor, or some element is not written.
    """
    num_needed: Counter[str] = Counter()
    for piece in destination:
        num_needed[piece.param] += piece.box.numel
    written: dict[str, list[Piece]] = defaultdict(list)
    for wave in plan.waves:
        for piece in wave.written():
            written[piece.param].append(piece)
    for param, needed in num_needed.items():
        num_written = sum(piece.box.numel for piece in written[param])
        if num_written != needed:
            raise ValueError(f"rank {plan.rank}: the plan writes {num_written} of the {needed} elements of {param}")
        _check_disjoint(written[param], plan.rank)


def _check_disjoint(pieces: list[Piece], rank: int) -> None:
    """Raise ValueError where two pieces of one local tensor have an element in common."""
    runs = [_runs(piece) for piece in pieces]
    starts = np.concatenate([first for first, _ in runs])
    ends = np.concatenate([first + length for first, length in runs])
    owners = np.repeat(np.arange(len(pieces)), [len(first) for first, _ in runs])
    order = np.argsort(starts, kind="stable")
    clashes = np.flatnonzero(starts[order][1:] < ends[order][:-1])
    if clashes.size:
        one, other = (pieces[owners[order[clashes[0] + side]]] for side in (0, 1))
        raise ValueError(
            f"rank {rank}: {one.name} {one.box} and {other.name} {other.box} share an element of {one.param}"
        )


def _runs(piece: Piece) -> tuple[npt.NDArray[np.int64], int]:
    """Where in its local tensor the piece's runs of neighbouring elements start, and the length of each run."""
    starts, length = np.array([piece.offset], dtype=np.int64), 1
    for stride, extent in sorted(zip(piece.stride, piece.box.shape, strict=True)):
        if stride == length and len(starts) == 1:
            length *= extent
        elif extent > 1:
            starts = (starts[:, None] + np.arange(extent) * stride).ravel()
    return starts, length
