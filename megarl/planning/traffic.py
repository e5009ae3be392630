"""The traffic of a sync of the engine, for the plan of the run and for other plans.

Bytes are those of the plan itself. Seconds are the least they can be: every link is full from the first byte to the
last, links inside and between nodes work at the same time, and reading and writing the memory costs nothing.
"""

import math
from dataclasses import dataclass

from megarl.models.architecture import hf_shapes
from megarl.models.grid import Grid
from megarl.models.placing import placed
from megarl.planning.states import held_bytes
from megarl.planning.workload import Workload
from megarl.reshard.planner import TransferSchedule
from megarl.weight_sync.plan import actor_placement, sampler_placement


@dataclass(frozen=True, kw_only=True)
class Links:
    """The links from a rank to the others: bytes per second and direction, and the seconds of a message of no size."""

    inside: float  # to the ranks of its domain
    between: float  # to other ranks
    domain: int | None = None  # neighbouring ranks that fast links connect; None: those of a node
    inside_latency: float = 0.0
    between_latency: float = 0.0


@dataclass(frozen=True, kw_only=True)
class SyncTraffic:
    """Bytes per rank of one sync."""

    received_max: int
    received_mean: int
    sent_max: int
    inside_max: int  # received from the own domain
    inside_mean: int
    between_max: int  # received from other domains
    between_mean: int
    gathered_mean: int  # what a rank would receive if every rank put all full tensors together
    seconds: float

    @property
    def ratio(self) -> float:
        """Return how many times more bytes a gather of full tensors receives; infinite if nothing has to travel."""
        return self.gathered_mean / self.received_mean if self.received_mean else math.inf


def sync_traffic(workload: Workload, *, ranks_per_node: int, links: Links, data_last: bool = False) -> SyncTraffic:
    """Return the traffic of a run; with `data_last`, in Megatron's rank order tp-cp-ep-pp-dp.

    That order puts the stages of a model next to each other instead of its replicas.
    """
    policy = workload.config.actor_rollout_ref
    grid = workload.grid
    rollout = policy.rollout
    world = grid.num_ranks
    source = actor_placement(workload.policy, policy.actor.megatron, num_ranks=world)
    destination = sampler_placement(workload.policy, rollout, num_ranks=world)
    if data_last:
        source = placed(source, [[rank] for rank in _ranks_with_data_last(grid)])
    traffic = TransferSchedule(
        source,
        destination,
        world_size=world,
        ranks_per_node=ranks_per_node,
        bucket_bytes=rollout.sync.bucket_megabytes << 20,
        two_level=rollout.sync.two_level,
    ).traffic(domain=links.domain)
    inside = traffic.received - traffic.crossing
    full = sum(math.prod(shape) * source[name].dtype.itemsize for name, shape in hf_shapes(workload.policy).items())
    return SyncTraffic(
        received_max=int(traffic.received.max()),
        received_mean=round(traffic.received.mean()),
        sent_max=int(traffic.sent.max()),
        inside_max=int(inside.max()),
        inside_mean=round(inside.mean()),
        between_max=int(traffic.crossing.max()),
        between_mean=round(traffic.crossing.mean()),
        gathered_mean=full - round(held_bytes(source, world).mean()),
        seconds=float(max(inside.max() / links.inside, traffic.crossing.max() / links.between)),
    )


def _ranks_with_data_last(grid: Grid) -> list[int]:
    """Return the number in tp-cp-ep-pp-dp of each rank of the default order tp-cp-ep-dp-pp."""
    inner = grid.tp * grid.cp
    return [
        (rank // inner % grid.dp * grid.pp + rank // (inner * grid.dp)) * inner + rank % inner
        for rank in range(grid.num_ranks)
    ]
