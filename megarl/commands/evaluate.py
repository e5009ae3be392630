"""Score a checkpoint: `megarl evaluate RUN_DIR|CHECKPOINT|CONFIG.yaml [...] [--best]`.

Takes the configuration that the run kept, or another one. Validates the checkpoint that `trainer.resume_mode` and
`trainer.resume_from_path` choose, by default the latest, or the model itself if there is no checkpoint; with `--best`
the checkpoint of the best validation. Prints one JSON line to standard output, and all else to standard error.
"""

import json
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import replace
from itertools import chain
from pathlib import Path

from megarl.platform import early  # noqa: F401 - before what takes seconds to import
from megarl.checkpoint.directory import CONFIG_FILE, step_of_name
from megarl.checkpoint.state import best_checkpoint
from megarl.commands.cli.command import parse
from megarl.commands.cli.kinds import others
from megarl.commands.cli.table import EVALUATE
from megarl.commands.entry import JobProgram, run
from megarl.config.faults import ConfigError, Fault, fault_of
from megarl.config.layers import YAML, is_override, override
from megarl.config.load import load_config
from megarl.config.root import Config
from megarl.distributed.place import Launch
from megarl.platform.files import similar


def main(argv: Sequence[str] = sys.argv[1:]) -> None:
    """Evaluate as configured, on every rank of the job."""
    run(PROGRAM, argv)


def read_configuration(argv: Sequence[str], *, world_size: int | None) -> Config:
    """Parse the command line, and read the configuration as `load_config` does."""
    typed = parse(EVALUATE, argv)
    arguments = list(chain.from_iterable(map(as_configuration, typed["configuration"])))
    config = load_config(arguments, world_size=world_size, writes=False)
    return with_best(config) if typed["best"] else config


def with_best(config: Config) -> Config:
    """Return the configuration that scores the best checkpoint of the run.

    Raises:
        ConfigError: the configuration names another checkpoint, or there is no best one.
    """
    trainer = config.trainer
    if trainer.resume_mode == "resume_path":
        message = f"names the best of a run, but {trainer.resume_from_path} is named too: name the run's directory"
        raise ConfigError([Fault("--best", message)])
    with fault_of("--best"):
        best = best_checkpoint(Path(trainer.default_local_dir))
    return replace(config, trainer=replace(trainer, resume_mode="resume_path", resume_from_path=str(best)))


def as_configuration(argument: str) -> list[str]:
    """Return a run's or checkpoint's directory as the configuration that scores it, any other argument unchanged.

    Raises:
        ConfigError: there is no such directory, or it keeps no configuration.
    """
    directory = Path(argument)
    if is_override(argument) or directory.suffix in YAML:
        return [argument]
    config = directory / CONFIG_FILE
    is_checkpoint = step_of_name(directory.resolve().name) is not None
    if not config.is_file():
        why = f"has no {CONFIG_FILE}" if directory.is_dir() else f"is no directory{others(directory)}"
        remedy = similar(directory) or ": name a run's directory, a checkpoint in it, or a configuration"
        message = f"{why}{remedy}"
        raise ConfigError([Fault(argument, message)])
    if is_checkpoint:
        run_dir = directory.resolve().parent
        start = ["trainer.resume_mode=resume_path", override("trainer.resume_from_path", str(directory))]
    else:
        run_dir = directory
        start = ["trainer.resume_mode=auto", "trainer.resume_from_path=null"]
    return [str(config), override("trainer.default_local_dir", str(run_dir)), *start]


def evaluate(config: Config, launch: Launch) -> None:
    """Run the validation on this rank. Standard output gets nothing but the JSON line, for programs that read it."""
    from megarl.assembly.validation import build_validation

    with redirect_stdout(sys.stderr):
        validation, engine, step = build_validation(config, launch)
        scores = validation.run(step=step)
        validation.tracker.close()
        engine.close()
    if launch.rank == 0:
        print(json.dumps({"step": step, **scores}))


PROGRAM = JobProgram(
    module="megarl.commands.evaluate",
    load=read_configuration,
    body=evaluate,
    imports=("megarl.assembly.validation", "megarl.learner.imported", "megarl.rollout.imported"),
)


if __name__ == "__main__":
    main()
