"""The commands that learn from files alone, `megarl sft` and `megarl train-reward`."""

from collections.abc import Sequence
from typing import TypeVar

from megarl.commands.cli.command import Command, parse
from megarl.commands.entry import JobProgram
from megarl.config.load import load_supervised
from megarl.config.report import start_notes
from megarl.config.root import RewardTrainConfig, SFTConfig
from megarl.config.trial import try_out
from megarl.distributed.place import Launch

C = TypeVar("C", SFTConfig, RewardTrainConfig)


def program_of(command: Command, root: type[C]) -> JobProgram[C]:
    """Return the parts of a command, whose configuration has this root."""

    def read(argv: Sequence[str], *, world_size: int | None) -> C:
        return load_supervised(root, parse(command, argv)["configuration"], world_size=world_size)

    return JobProgram(
        module=command.module,
        load=read,
        body=train,
        trial=try_out,
        notes=start_notes,
        imports=("megarl.assembly.supervised", "megarl.learner.imported"),
        keeps_log=True,
    )


def train(config: SFTConfig | RewardTrainConfig, launch: Launch) -> None:
    """Run the job on this rank."""
    from megarl.assembly.supervised import learn

    learn(config, launch)
