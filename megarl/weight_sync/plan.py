"""Plans the sync of a configured run: what each rank of the actor holds, what each engine needs, and the plan."""

import torch

from megarl.distributed.launch import Launch
from megarl.learner.config import MegatronSection
from megarl.learner.grid import grid_of
from megarl.models.architecture import Architecture
from megarl.models.engine import engine_placement
from megarl.models.trainer import trainer_placement
from megarl.reshard.layout import Layout, Placement
from megarl.reshard.plan import RankPlan
from megarl.reshard.planner import make_plan
from megarl.rollout.config import RolloutSection


def actor_placement(architecture: Architecture, section: MegatronSection, *, num_ranks: int) -> Placement:
    """Return the trainer ranks that hold each part of the policy."""
    return trainer_placement(architecture, grid_of(section, num_ranks), dtype=getattr(torch, section.dtype))


def sampler_placement(architecture: Architecture, section: RolloutSection, *, num_ranks: int) -> Placement:
    """Return the engine ranks that need each part of the policy. The ranks form as many engines as fit."""
    return engine_placement(
        architecture,
        num_ranks=num_ranks,
        tp_size=section.tensor_model_parallel_size,
        expert_parallel=section.has_whole_experts,
        dtype=getattr(torch, section.dtype),
    )


def plan_sync(
    architecture: Architecture,
    megatron: MegatronSection,
    rollout: RolloutSection,
    *,
    held: Layout,
    needed: Layout,
    launch: Launch,
) -> RankPlan:
    """Make this rank's plan from sizes alone, except its own two layouts.

    Raises:
        UserError: the layouts differ from what the sizes predict for this rank, or the bucket is too small.
    """
    return make_plan(
        actor_placement(architecture, megatron, num_ranks=launch.world_size),
        sampler_placement(architecture, rollout, num_ranks=launch.world_size),
        held=held,
        needed=needed,
        rank=launch.rank,
        world_size=launch.world_size,
        ranks_per_node=launch.local_world_size,
        bucket_bytes=rollout.sync.bucket_megabytes << 20,
        two_level=rollout.sync.two_level,
    )
