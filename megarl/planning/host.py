"""The host memory that a run needs on a node: offloaded parts, copies for saves, and samples.

Counted for the fullest rank, as if all ranks of its node were like it. Not counted: the processes themselves (Python,
CUDA and the libraries take a few GB a rank), files that the system caches, and what torch's allocator adds to pinned
memory, which it takes in powers of two.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from megarl.config.root import Config
from megarl.models.grid import Grid
from megarl.planning.engine import route_bytes
from megarl.planning.memory import RankMemory, own_weights
from megarl.planning.samples import SampleMemory, sample_memory
from megarl.planning.states import copied_bytes
from megarl.planning.workload import TrainerModel, Workload
from megarl.rewards.config import isolation_of


@dataclass(frozen=True, kw_only=True)
class HostMemory:
    """Bytes of host memory on a node."""

    parts: Mapping[str, int]  # bytes that a run needs, by name; of samples those of their fullest phase
    samples: tuple[SampleMemory, ...]  # on one rank
    rewards: int  # limit of the private memory of the processes of rewards, in addition; they seldom reach it

    @property
    def total(self) -> int:
        """Return all bytes that a run needs."""
        return sum(self.parts.values())


def host_memory(workload: Workload, memory: RankMemory) -> HostMemory:
    """Return the host memory that the ranks of one node need together.

    Megatron keeps no gradients on the host: it frees those that are offloaded, as the next update begins with zeros.
    """
    num_ranks = workload.config.trainer.n_gpus_per_node
    parts: dict[str, int] = {}
    for model in workload.models:
        states = memory.states[model.name]
        if model.section.param_offload:
            parts[f"{model.name} weights"] = num_ranks * own_weights(model, states)
        if model.section.optimizer_offload and model.updates:
            parts[f"{model.name} optimizer"] = num_ranks * states.optimizer
    parts["copies for a save"] = save_bytes(workload.models, workload.grid, rank=memory.rank, num_ranks=num_ranks)
    phases = sample_memory(workload.config, num_shares=workload.grid.dp)
    fullest = max(phases, key=lambda phase: phase.total)  # D431
    parts |= {name: num_ranks * num_bytes for name, num_bytes in fullest.parts.items()}
    parts["routes"] = num_ranks * routes_bytes(workload)
    num_processes, most_gb = reward_processes(workload.config)
    return HostMemory(
        parts={name: num_bytes for name, num_bytes in parts.items() if num_bytes},
        samples=tuple(phases),
        rewards=num_ranks * num_processes * int(most_gb * 1e9),
    )


def routes_bytes(workload: Workload) -> int:
    """Return the bytes of the routes of a step on one rank, with the longest prompts and responses.

    A rank of a replica has those of all layers, and a rank that learns those of its stage.
    """
    config, grid = workload.config, workload.grid
    rollout = config.actor_rollout_ref.rollout
    num_replicas = config.trainer.nnodes * config.trainer.n_gpus_per_node // rollout.tensor_model_parallel_size
    places = config.data.train_batch_size * rollout.n * (rollout.prompt_length + rollout.response_length)
    total = places * route_bytes(workload.policy, rollout)
    return total // num_replicas + total // (grid.dp * grid.pp)


def reward_processes(config: Config) -> tuple[int, float]:
    """Return how many processes of rewards a rank may have, and the limit of the private memory of each, in 10^9 bytes.

    They call rules, or they play the episodes of an environment. A process that scores one response is forked from one
    that has loaded the user's file and stays: two processes for each worker.
    """
    if config.environment.name:
        return config.environment.num_workers, config.environment.max_memory_gb
    if config.rules is None:
        return 0, 0.0
    is_forked = isolation_of(config.rules, config.custom_reward_function) == "response"
    return config.rules.num_workers * (1 + is_forked), config.rules.max_memory_gb


def save_bytes(models: Iterable[TrainerModel], grid: Grid, *, rank: int, num_ranks: int) -> int:
    """Return the bytes that saves copy to the host, asynchronously or while training waits.

    Every run saves at some time, because a run that is asked to end does.
    """
    learning = [model for model in models if model.updates]
    return num_ranks * sum(copied_bytes(model.learning_shapes(grid, rank), model.section, grid) for model in learning)
