"""Supervised runs inside the ranks of a test."""

import torch.distributed as dist

from megarl.distributed.launch import Launch


def here() -> Launch:
    """Return the place of this rank; forget the mesh of an earlier run in this process."""
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    rank, size = dist.get_rank(), dist.get_world_size()
    return Launch(rank=rank, world_size=size, local_rank=rank, local_world_size=size)


def train(argv: list[str]) -> None:
    """Run `megarl train-reward` with `argv` on this rank."""
    from megarl.commands.supervised import train as body
    from megarl.config.load import load_reward_train_config

    launch = here()
    body(load_reward_train_config(argv, world_size=launch.world_size), launch)
