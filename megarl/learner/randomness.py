"""The random generators of a rank: torch's own, and Megatron's, for numbers that a parallel group must draw alike.

Only dropout draws from Megatron's generators, if `override_transformer_config` asks for dropout.
"""

from collections.abc import Mapping, Sequence
from itertools import repeat
from pathlib import Path
from typing import Any, TypeGuard

import torch
import torch.distributed as dist
from megatron.core import tensor_parallel
from torch import Tensor

from megarl.distributed.exchange import host_group, on_each_rank, on_first_rank
from megarl.learner.objects import read_objects
from megarl.platform.device import on_cuda
from megarl.platform.small_files import Damage


def random_states() -> dict[str, object]:
    """Return the state of every generator of this rank, as tensors."""
    states = {
        "cpu": torch.get_rng_state(),
        "megatron": tensor_parallel.get_cuda_rng_tracker().get_states(),
    }
    if on_cuda():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def set_random_states(states: Mapping[str, Any]) -> None:
    """Set the generators to the result of `random_states`; other generators of Megatron's keep their state."""
    torch.set_rng_state(states["cpu"])
    tracker = tensor_parallel.get_cuda_rng_tracker()
    tracker.set_states(tracker.get_states() | states.get("megatron", {}))
    if "cuda" in states and on_cuda():
        torch.cuda.set_rng_state(states["cuda"])


def write_random_states(path: Path) -> None:
    """Write the states of all ranks to a file. Collective; the first rank writes."""
    is_first = dist.get_rank() == 0
    of_ranks: list[object] | None = [None] * dist.get_world_size() if is_first else None
    dist.gather_object(random_states(), of_ranks, group=host_group())

    def write() -> None:
        with path.open("wb") as file:  # given a path, torch does not say why it cannot write
            torch.save(of_ranks, file)

    on_first_rank(write)


def load_random_states(path: Path) -> None:
    """Set the generators of each rank to its states in a file. Collective; the first rank reads, and no other has all.

    A rank beyond those that saved the file keeps its states.

    Raises:
        Damage: on every rank; as `read_random_states` does.
    """
    is_first = dist.get_rank() == 0
    saved = on_each_rank(lambda: read_random_states(path) if is_first else [])
    size = dist.get_world_size()
    of_ranks = [*saved[:size], *repeat(None, size - len(saved))] if is_first else None
    mine: list[Mapping[str, object] | None] = [None]
    dist.scatter_object_list(mine, of_ranks, group=host_group())
    if mine[0]:
        set_random_states(mine[0])


def read_random_states(path: Path) -> Sequence[Mapping[str, Any]]:
    """Return the saved states of each rank. Raises Damage."""
    of_ranks = read_objects(path)
    if not isinstance(of_ranks, list):
        raise Damage.in_content(path, "it is no list of the ranks")
    for states in of_ranks:
        cpu = states.get("cpu") if isinstance(states, dict) else None
        if not (_is_state(cpu) and cpu.shape == torch.get_rng_state().shape and _is_state(states.get("cuda", cpu))):
            raise Damage.in_content(path, "it has no state of torch's generators")
        of_groups = states.get("megatron", {})
        if not (isinstance(of_groups, dict) and all(map(_is_state, of_groups.values()))):
            raise Damage.in_content(path, "it has no states of Megatron's generators")
    return of_ranks


def _is_state(value: object) -> TypeGuard[Tensor]:
    return isinstance(value, Tensor) and value.dtype == torch.uint8 and value.ndim == 1
