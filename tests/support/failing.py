"""The smallest run whose rank 1 fails in step 3: `python -m tests.support.failing DIRECTORY KIND`."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megarl.commands.entry import JobProgram, run
from megarl.distributed.launch import Launch
from megarl.platform.errors import UserError
from megarl.tracking.config import TrainerSection

STEP = 3


@dataclass(frozen=True, kw_only=True)
class Options:
    """The configuration of an entry point."""

    kind: str
    trainer: TrainerSection


def load(argv: Sequence[str], *, world_size: int | None) -> Options:
    directory, kind = argv
    trainer = TrainerSection(n_gpus_per_node=2, device="cpu", default_local_dir=directory)
    return Options(kind=kind, trainer=trainer)


def unequal_zip() -> None:
    list(zip([1, 2], [1], strict=True))


def unpacking() -> None:
    numbers = [1, 2]
    [_only] = numbers


def torch_value_error() -> None:
    torch.distributions.Bernoulli(probs=torch.tensor(2.0))


def user_error() -> None:
    raise UserError("trainer.n_gpus_per_node=3: write 2")


KINDS: dict[str, Callable[[], None]] = {
    "zip": unequal_zip,
    "unpacking": unpacking,
    "torch": torch_value_error,
    "user": user_error,
}


def body(options: Options, launch: Launch) -> None:
    for step in range(1, STEP + 1):
        if step == STEP and launch.rank == 1:
            KINDS[options.kind]()
        dist.barrier()


if __name__ == "__main__":
    run(JobProgram(module="tests.support.failing", load=load, body=body, keeps_log=True), sys.argv[1:])
