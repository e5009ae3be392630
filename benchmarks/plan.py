"""`python -m benchmarks plan`: the time that one rank of thousands takes to plan its part of a sync, and its size.

Everything is computed from sizes, as every rank does at the start of a job; no ranks, weights or devices are needed.
"""

import json
import pickle
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from benchmarks.options import NUM_RANKS, plan_parser
from benchmarks.report import describe, origin
from megarl.models.architecture import read_architecture
from megarl.models.engine import engine_layout, engine_placement
from megarl.models.grid import Grid
from megarl.models.trainer import trainer_layout, trainer_placement
from megarl.platform.screen import Screen
from megarl.reshard.planner import TransferSchedule, lower_bound, make_plan

DTYPE = torch.bfloat16
RANKS_PER_NODE = 8
BUCKET_BYTES = 512 << 20
COLUMNS = ("model", "split", "ranks", "seconds", "pickled MB", "pieces", "received GB", "bound GB", "busiest sender")

MODELS = Path(__file__).resolve().parents[1] / "configs" / "models"


@dataclass(frozen=True, kw_only=True)
class PlanCase:
    """A job of thousands of ranks."""

    model: str
    directory: str  # of `configs/models`
    split: str
    grid: Grid
    engine_tp: int


CASES = (
    PlanCase(
        model="Kimi-K2",
        split="PP16 EP64 -> TP64",
        directory="kimi-k2",
        # 61 layers as in DeepSeek-V3
        grid=Grid(num_ranks=10240, pp=16, ep=64, num_layers_in_first_stage=3, num_layers_in_last_stage=2),
        engine_tp=64,
    ),
    PlanCase(
        model="DeepSeek-V3",
        split="PP16 EP16 -> TP32",
        directory="deepseek-v3",
        # 61 layers: 3 in the first stage, 2 in the last, 4 in each other stage
        grid=Grid(num_ranks=NUM_RANKS, pp=16, ep=16, num_layers_in_first_stage=3, num_layers_in_last_stage=2),
        engine_tp=32,
    ),
    PlanCase(
        model="Llama-3-70B",
        split="TP8 PP4 -> TP8",
        directory="llama-3-70b",
        grid=Grid(num_ranks=NUM_RANKS, tp=8, pp=4),
        engine_tp=8,
    ),
)


@dataclass(frozen=True, kw_only=True)
class Planned:
    """The cost and the result of planning one rank."""

    model: str
    split: str
    num_ranks: int
    rank: int
    seconds_placements: float  # for the placements of all ranks
    seconds_plan: float  # for the proven plan of this rank
    pickled_bytes: int  # of the plan, without its two layouts
    num_pieces: int  # copied, sent and received
    bytes_received: int
    bytes_lower_bound: int
    busiest_sender_ratio: float  # bytes sent by the busiest rank over the mean

    @property
    def seconds(self) -> float:
        """The seconds that a rank waits at its start."""
        return self.seconds_placements + self.seconds_plan


def main(argv: Sequence[str]) -> int:
    """Plan one rank of every case, and print the cost."""
    options = plan_parser().parse_args(argv)
    planned = [plan(case, options.rank) for case in CASES]
    found = origin("plan", argv)
    if options.json:
        print(json.dumps(found | {"jobs": [asdict(one) | {"seconds": one.seconds} for one in planned]}))
        return 0
    table = Table(*COLUMNS)
    for one in planned:
        table.add_row(
            one.model,
            one.split,
            str(one.num_ranks),
            f"{one.seconds:.2f}",
            f"{one.pickled_bytes / 1e6:.2f}",
            str(one.num_pieces),
            f"{one.bytes_received / 1e9:.2f}",
            f"{one.bytes_lower_bound / 1e9:.2f}",
            f"{one.busiest_sender_ratio:.3f}",
        )
    describe(table, found, Screen())
    return 0


def plan(case: PlanCase, rank: int) -> Planned:
    """Plan one rank of a case."""
    config = (MODELS / case.directory / "config.json").read_text(encoding="utf-8")
    architecture = read_architecture(json.loads(config))
    start = time.perf_counter()
    source = trainer_placement(architecture, case.grid, dtype=DTYPE)
    destination = engine_placement(
        architecture, num_ranks=case.grid.num_ranks, tp_size=case.engine_tp, expert_parallel=False, dtype=DTYPE
    )
    held = trainer_layout(architecture, case.grid, rank, dtype=DTYPE)
    needed = engine_layout(
        architecture,
        tp_rank=rank % case.engine_tp,
        tp_size=case.engine_tp,
        expert_parallel=False,
        dtype=DTYPE,
        latent_fused=True,
    )
    placed = time.perf_counter()
    sizes: dict[str, Any] = {
        "world_size": case.grid.num_ranks,
        "ranks_per_node": RANKS_PER_NODE,
        "bucket_bytes": BUCKET_BYTES,
    }
    rank_plan = make_plan(source, destination, held=held, needed=needed, rank=rank, **sizes)
    done = time.perf_counter()
    sent = TransferSchedule(source, destination, **sizes).traffic().sent
    return Planned(
        model=case.model,
        split=case.split,
        num_ranks=case.grid.num_ranks,
        rank=rank,
        seconds_placements=placed - start,
        seconds_plan=done - placed,
        pickled_bytes=len(pickle.dumps((rank_plan.templates, rank_plan.steps, rank_plan.ends))),
        num_pieces=len(rank_plan.steps),
        bytes_received=rank_plan.bytes_received,
        bytes_lower_bound=lower_bound(source, destination, rank=rank),
        busiest_sender_ratio=float(sent.max() / sent.mean()),
    )
