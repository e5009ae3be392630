"""The host memory that a run needs on a node: offloaded parts, copies for saves, and records.

Counted for the fullest rank, as if all ranks of its node were like it. Not counted: the processes themselves (Python,
CUDA and the libraries take a few GB a rank), files that the system caches, and what torch's allocator adds to pinned
memory, which it takes in powers of two.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil
from types import MappingProxyType

from megarl.config.root import Config
from megarl.planning.engine import route_bytes
from megarl.planning.memory import RankMemory, own_weights
from megarl.planning.states import copied_bytes
from megarl.planning.workload import Workload
from megarl.rewards.config import isolation_of

COLLECTED_FIELDS: Mapping[str, int] = MappingProxyType(
    {"responses": 4, "mask": 1, "rollout_log_probs": 4, "weight_versions": 4}
)
"""Bytes of one response token in each column of `megarl.batch.Scored`, on the ranks of the replica that drew it."""
EPISODE_FIELDS: Mapping[str, int] = MappingProxyType({"turn_rewards": 4})
"""The same for the columns that only episodes have."""
LEARNING_FIELDS: Mapping[str, int] = MappingProxyType(
    dict.fromkeys(("old_log_probs", "ref_log_probs", "values", "advantages", "returns", "weights"), 4)
)
"""The same for the columns that `megarl.batch.Experience` adds, on the ranks that learn from the token."""
TEXT_BYTES = 5
"""About the letters of a token."""
PROMPT_TOKEN_BYTES = 4 + 2 * TEXT_BYTES
"""Bytes of a token of a prompt: the token, and the text, as it was given and as a model reads it."""
IN_FLIGHT_TOKEN_BYTES = 4 + 4 + 4
"""Bytes of a response token that continues: the token, its log-probability and its version."""


@dataclass(frozen=True, kw_only=True)
class HostMemory:
    """Bytes of host memory on a node."""

    parts: Mapping[str, int]  # bytes that a run needs, by name
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
    parts["copies for a save"] = _save_bytes(workload, memory, num_ranks=num_ranks)
    parts["records"] = num_ranks * record_bytes(workload.config, num_shares=workload.grid.dp)
    parts["routes"] = num_ranks * routes_bytes(workload)
    num_processes, most_gb = reward_processes(workload.config)
    return HostMemory(
        parts={name: num_bytes for name, num_bytes in parts.items() if num_bytes},
        rewards=num_ranks * num_processes * int(most_gb * 1e9),
    )


def record_bytes(config: Config, *, num_shares: int) -> int:
    """Return the bytes of the records of a step on one rank, with the longest prompts and responses.

    The engine replicas share the samples that are drawn, and those that continue in the next step. `num_shares`
    data-parallel ranks share the samples that models learn from. A rank has the prompts of its samples, or all of them
    if samples are groups that wait or are chosen, or episodes.
    """
    rollout = config.actor_rollout_ref.rollout
    num_prompts = config.data.train_batch_size
    num_replicas = config.trainer.nnodes * config.trainer.n_gpus_per_node // rollout.tensor_model_parallel_size
    collected = sum(COLLECTED_FIELDS.values()) + (sum(EPISODE_FIELDS.values()) if config.environment.name else 0)
    learning = collected + sum(LEARNING_FIELDS.values())
    if not config.max_staleness:
        learning -= COLLECTED_FIELDS["weight_versions"]  # all tokens have the same
    drawn = num_prompts * (collected + TEXT_BYTES) + config.num_in_flight * IN_FLIGHT_TOKEN_BYTES
    responses = drawn // num_replicas + num_prompts * learning // num_shares
    prompts = num_prompts + config.num_in_flight
    needs_all = config.num_in_flight or config.algorithm.filter_groups.enable or config.environment.name
    if not needs_all:
        prompts = min(prompts, ceil(num_prompts / num_replicas) + ceil(num_prompts / num_shares))
    return responses * rollout.n * rollout.response_length + prompts * PROMPT_TOKEN_BYTES * rollout.prompt_length


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


def _save_bytes(workload: Workload, memory: RankMemory, *, num_ranks: int) -> int:
    """Return the bytes that saves copy to the host, asynchronously or while training waits.

    Every run saves at some time, because a run that is asked to end does.
    """
    grid = workload.grid
    learning = [model for model in workload.models if model.updates]
    return num_ranks * sum(
        copied_bytes(model.learning_shapes(grid, memory.rank), model.section, grid) for model in learning
    )
