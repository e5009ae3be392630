"""Reinforcement learning: `megarl train CONFIG.yaml [MORE.yaml] [a.b.c=value ...] [--replay DIR_OR_FILE]`."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from megarl.platform import early  # noqa: F401 - before what takes seconds to import
from megarl.commands.cli.command import parse
from megarl.commands.cli.table import TRAIN
from megarl.commands.entry import JobProgram, run
from megarl.config.faults import ConfigError, Fault
from megarl.config.load import load_config
from megarl.config.report import show_plan, start_notes, unwritten_keys
from megarl.config.root import Config
from megarl.config.trial import try_out
from megarl.config.unread import unread_keys
from megarl.distributed.place import Launch
from megarl.tracking.config import REPLAY, TrainerSection


@dataclass(frozen=True)
class TrainArguments:
    """The configuration, and the samples to replay instead of drawing new ones."""

    config: Config
    replay: Path | None

    @property
    def trainer(self) -> TrainerSection:
        """The section that gives the number of ranks, and the directory of this job."""
        trainer = self.config.trainer
        return replace(trainer, default_local_dir=f"{trainer.default_local_dir}/{REPLAY}") if self.replay else trainer


def main(argv: Sequence[str] = sys.argv[1:]) -> None:
    """Train as configured, on every rank of the job."""
    run(PROGRAM, argv)


def read_arguments(argv: Sequence[str], *, world_size: int | None) -> TrainArguments:
    """Parse the command line.

    Raises:
        ConfigError: lists every fault with its dotted key and the remedy.
    """
    typed = parse(TRAIN, argv)
    replay = typed["replay"]
    if replay and not replay.exists():
        raise ConfigError([Fault("--replay", f"no such file or directory: {replay}")])
    return TrainArguments(load_config(typed["configuration"], world_size=world_size), replay)


def remarks(arguments: TrainArguments, argv: Sequence[str]) -> Iterator[str]:
    """Yield what the run says about its configuration. A replay saves nothing, so it says nothing about that."""
    if arguments.replay:
        yield from unread_keys(arguments.config, argv)
        yield from unwritten_keys(arguments.config, argv)
    else:
        yield from start_notes(arguments.config, argv)


def train(arguments: TrainArguments, launch: Launch) -> None:
    """Run the job on this rank."""
    if launch.rank == 0:
        show_plan(arguments.config)
    if arguments.replay:
        replay(arguments.config, launch, arguments.replay)
    elif arguments.config.trainer.val_only:
        validate(arguments.config, launch)
    else:
        learn(arguments.config, launch)


def learn(config: Config, launch: Launch) -> None:
    """Train until the last step, or until a signal asks to end."""
    from megarl.assembly.run import build_training
    from megarl.distributed.exchange import together
    from megarl.distributed.signals import Stopped, graceful_stop
    from megarl.tracking.tracker import recording
    from megarl.training.loop import train as loop

    with ExitStack() as resources:
        training = build_training(config, launch, resources)
        if training is None:
            return
        stopped: Stopped | None = None
        try:
            with graceful_stop(), recording(training.job.tracker):
                loop(training.job, training.progress)
        except Stopped as error:
            stopped = error
        together(lambda: None)  # a launcher ends the job with its first rank, and rank 0 may still send records
        training.engine.close()
    if stopped:
        raise stopped


def replay(config: Config, launch: Launch, recorded: Path) -> None:
    """Learn from recorded samples. A replay saves nothing, so a signal ends it at once."""
    from megarl.assembly.run import build_replay
    from megarl.tracking.tracker import recording
    from megarl.training.loop import train as loop

    with ExitStack() as resources:
        job, progress = build_replay(config, launch, resources, recorded)
        with recording(job.tracker):
            loop(job, progress)


def validate(config: Config, launch: Launch) -> None:
    """Validate the checkpoint that the run would resume from, and print the scores. Records nothing."""
    from megarl.assembly.validation import build_validation
    from megarl.tracking.tracker import recording

    validation, engine, step = build_validation(config, launch)
    with recording(validation.tracker):
        validation.tracker.log(validation.run(step=step), step=step)
    engine.close()


PROGRAM = JobProgram(
    module="megarl.commands.train",
    load=read_arguments,
    body=train,
    trial=lambda arguments: () if arguments.replay else try_out(arguments.config),
    notes=remarks,
    imports=("megarl.assembly.run", "megarl.learner.imported", "megarl.rollout.imported"),
    keeps_log=True,
)


if __name__ == "__main__":
    main()
