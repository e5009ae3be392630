"""Reinforcement learning: `python -m megarl.train CONFIG.yaml [MORE.yaml] [a.b.c=value ...] [--replay DIR_OR_FILE]`."""

import argparse
import sys
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from rich.console import Console
from rich.table import Table

from megarl import early  # noqa: F401 - before what takes seconds to import
from megarl.config.faults import ConfigError, Fault
from megarl.config.load import load_config
from megarl.config.report import batch_table, remarks, unread_keys, unwritten_keys
from megarl.config.root import Config
from megarl.distributed.exchange import together
from megarl.distributed.launch import Launch
from megarl.distributed.signals import Stopped, heeding
from megarl.entry import run
from megarl.tracking.config import TrainerSection


@dataclass(frozen=True)
class Arguments:
    """How to train, and on which samples if not on new ones."""

    config: Config
    replay: Path | None

    @property
    def trainer(self) -> TrainerSection:
        """How many ranks there are."""
        return self.config.trainer


def main(argv: Sequence[str] = sys.argv[1:]) -> None:
    """Train as the configuration says, on every rank of the job."""
    run(
        "megarl.train",
        argv,
        read_arguments,
        train,
        remarks=lambda arguments, argv: chain(
            unread_keys(arguments.config, argv), unwritten_keys(arguments.config, argv)
        ),
    )


def read_arguments(argv: Sequence[str], *, world_size: int | None) -> Arguments:
    """Parse the command line.

    Raises:
        ConfigError: naming every fault by its dotted key, with the remedy.
    """
    parser = argparse.ArgumentParser(
        prog="python -m megarl.train",
        usage="%(prog)s CONFIG.yaml [MORE.yaml] [a.b.c=value ...] [--replay DIR_OR_FILE]",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--replay",
        type=Path,
        help="learn again from what a run kept in trainer.rollout_data_dir: one file, or all that follow the weights",
    )
    options, configuration = parser.parse_known_args(argv)
    if options.replay and not options.replay.exists():
        raise ConfigError([Fault(path="--replay", message=f"no such file or directory: {options.replay}")])
    return Arguments(load_config(configuration, world_size=world_size), options.replay)


def train(arguments: Arguments, launch: Launch) -> None:
    """Run the job on this rank."""
    from megarl.build.run import build_run
    from megarl.loop import train as loop
    from megarl.tracking.tracker import recording

    if launch.rank == 0:
        show_plan(arguments.config)
    with ExitStack() as held:
        built = build_run(arguments.config, launch, held, replay=arguments.replay)
        if built is None:
            return
        stopped: Stopped | None = None
        try:
            with heeding() if built.engine else nullcontext(), recording(built.job.tracker):  # a replay keeps nothing
                loop(built.job, built.progress)
        except Stopped as told:
            stopped = told
        if built.engine:
            together(lambda: None)  # a launcher ends the job with its first rank, and rank 0 may still send records
            built.engine.close()
    if stopped:
        raise stopped


def show_plan(config: Config) -> None:
    """Print how an iteration's prompts are divided, and what in the configuration deserves a second look."""
    table = Table(title="one iteration")
    for column in ("stage", "size", "meaning"):
        table.add_column(column)
    for row in batch_table(config):
        table.add_row(*row)
    console = Console()
    console.print(table)
    for remark in remarks(config):
        console.print(f"[yellow]note:[/] {remark}")


if __name__ == "__main__":
    main()
