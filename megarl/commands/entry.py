"""The first and the last actions of every command: read the configuration, join the job, end with a clear message.

The configuration is read before torch is imported, so that its faults are reported at once.
"""

import logging
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, NoReturn, Protocol, TypeVar

from megarl.platform import early
from megarl.config.faults import ConfigError
from megarl.distributed.place import Launch, WantedRanks, detect
from megarl.distributed.watchdog import GRACE_S, note, watching
from megarl.platform.detached import CONSOLE, start_detached
from megarl.platform.errors import UserError
from megarl.platform.forking import end, run_in_child
from megarl.platform.heap import keep_freed_memory, prefer_huge_pages
from megarl.platform.imports import IMPORTING, import_modules, silence_imports
from megarl.platform.log import log_to_files, show_on_console
from megarl.platform.secrets import guard_output, redact
from megarl.platform.terminal import COMMAND, ignore_broken_pipe, print_message, visible
from megarl.platform.versions import installed_versions
from megarl.section import flatten
from megarl.tracking.config import TrainerSection
from megarl.tracking.on_end import EndCommand

logger = logging.getLogger(__name__)

OPTION = "--detach"  # for a training that outlives its terminal
PRINTING_S = 10.0

if TYPE_CHECKING:
    from torch.distributed import Store


class Configuration(Protocol):
    """The arguments of a command: a dataclass whose trainer section gives the number of ranks and their device."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def trainer(self) -> TrainerSection:
        """The section of the entire run."""


C = TypeVar("C", bound=Configuration)


@dataclass(frozen=True, kw_only=True)
class JobProgram(Generic[C]):
    """The parts of a command that runs on the ranks of a job."""

    module: str  # `python -m` starts it
    load: Callable[..., C]  # reads the arguments, given the `world_size`; raises ConfigError
    body: Callable[[C, Launch], None]  # the work of a rank
    notes: Callable[[C, Sequence[str]], Iterable[str]] = lambda config, argv: ()  # that the first rank reports
    trial: Callable[[C], Iterable[str] | None] = lambda config: ()
    """Tries what the configuration names, in the first process of the job, before ranks meet or are started.

    It yields remarks, and raises ConfigError.
    """
    imports: Sequence[str] = ()  # modules that the body needs; ranks that are forked on this host share them
    keeps_log: bool = False  # of each rank, in the directory of the run; `trainer.on_end` runs there too
    has_directory: bool = True  # which keeps tracebacks, if it exists

    def read(self, argv: Sequence[str], launch: Launch | None) -> C:
        """Read the configuration, and try it if this is the first process of the job. Raises ConfigError."""
        config = self.load(argv, world_size=launch.world_size if launch else None)
        is_first = launch is None or (launch.rank == 0 and COMMAND not in os.environ)  # else the first process did it
        for remark in (self.trial(config) if is_first else None) or ():
            logger.info("note: %s", remark)
        return config


def run(program: JobProgram[C], argv: Sequence[str]) -> None:
    """Run a program on every rank of the job that `argv` describes.

    A program that calls this, such as a notebook, is never forked or ended: the command is then a process of its own,
    and SystemExit has its code.

    A process that is the command, also a rank that is forked on this host (`distributed.launch.start`), ends here.

    With `--detach` in `argv` the command starts itself as a process that outlives the terminal.

    A fault in the configuration ends the program with code 2 before any process group exists. Any other error ends it
    with code 1. An error that a user can mend (ConfigError, UserError) is printed as a message, once if all ranks have
    it; any other error is printed with its traceback (see `distributed.failures`). A job that received a signal to end
    (see `signals`) ends with code 75.
    """
    if not _is_program(program.module) and not _is_launched():
        sys.exit(subprocess.call([sys.executable, "-m", program.module, *argv]))
    _prepare_process()
    try:
        launched = detect(os.environ)
        if OPTION in argv:
            _detach(argv, Path(program.read(argv, None).trainer.default_local_dir), launched)
            return
        launch = launched or _start(program, argv)
    except UserError as error:
        _end_with(error, os.environ.get("RANK", "0"))
    show_on_console(launch.rank)
    try:
        config = program.read(argv, launch)
    except UserError as error:
        _end_with(error, str(launch.rank), is_first_here=launch.local_rank == 0)
    directory = Path(config.trainer.default_local_dir)
    if program.keeps_log:
        log_to_files(directory, launch.rank)
    if launch.rank == 0:
        for remark in program.notes(config, argv):
            logger.info("note: %s", remark)
    if not sys.modules.keys() >= set(program.imports):  # otherwise the ranks were forked with them
        logger.info(IMPORTING)
    with EndCommand(config.trainer.on_end if program.keeps_log and launch.rank == 0 else None, directory) as at_end:
        code = _work(program, config, launch)
        at_end.ending = "stopped" if code else "finished"
    if _is_program(program.module):
        end(code)
    if code:
        sys.exit(code)


def _prepare_process() -> None:
    silence_imports()
    prefer_huge_pages()
    guard_output()
    ignore_broken_pipe()
    early.install_signal_handlers()
    rank = os.environ.get("RANK", "0")
    show_on_console(int(rank) if rank.isdecimal() else 0)


def _end_with(error: UserError, rank: str, *, is_first_here: bool = True) -> NoReturn:
    """End the program with the message of an error. Faults of a configuration are printed once a host.

    A launcher ends all ranks when one ends, so the others leave the first time to print.
    """
    if not isinstance(error, ConfigError):
        sys.exit(visible(redact(f"megarl: rank {rank}: {error}")))
    if is_first_here:  # a fault may concern this host alone
        print_message(str(error))
    else:
        time.sleep(PRINTING_S)
    sys.exit(2)


def _is_program(module: str) -> bool:
    """Return whether this process is the command `module`, and not a program that calls it."""
    program = sys.modules["__main__"]
    spec = program.__spec__
    name = spec.name if spec else Path(getattr(program, "__file__", None) or "").stem
    return name in (module, "megarl", "megarl.__main__")


def _is_launched() -> bool:
    with suppress(UserError):  # half of a launcher's variables: the command reports them
        return detect(os.environ) is not None
    return False


def _start(program: JobProgram[C], argv: Sequence[str]) -> Launch:
    """Start the ranks of this host, and return the place of each. Raises ConfigError before torch is imported."""

    def examine() -> WantedRanks:
        trainer = program.read(argv, None).trainer
        return WantedRanks(trainer.n_gpus_per_node, trainer.device)

    wanted = run_in_child(examine) if sys.platform == "linux" else examine()
    from megarl.distributed.launch import start

    return start(program.module, argv, wanted, imports=program.imports)


def _detach(argv: Sequence[str], directory: Path, launch: Launch | None) -> None:
    """Start this command without --detach in a process of its own, and print how it is watched and ended.

    Raises:
        UserError: a launcher has started this process, and waits for it.
    """
    if launch:
        raise UserError(f"{OPTION} is for a run without a launcher: leave it out under torchrun, mpirun or srun")
    program = sys.orig_argv[1 : len(sys.orig_argv) - len(argv)]  # as typed, because the run says how to resume it
    process = start_detached([sys.executable, *program, *(word for word in argv if word != OPTION)], directory)
    print(visible(f"process {process.pid} trains, also if this terminal closes; it prints into {directory / CONSOLE}"))
    print(visible(f"watch it with\n  megarl watch {shlex.quote(str(directory))}"))
    print(f"let it save and end with\n  kill {process.pid}")


def _meet(launch: Launch, config: Configuration) -> "Store":
    """Join the ranks of the job, and return the store in which they meet.

    Raises:
        UserError: the ranks do not find each other, or their configurations differ.
    """
    from megarl.distributed import signals
    from megarl.distributed.agreement import agree
    from megarl.distributed.launch import init_process_groups, join
    from megarl.platform.determinism import decide_determinism
    from megarl.platform.device import decide_device

    signals.listen()
    trainer = config.trainer
    join(launch, Path(trainer.default_local_dir))
    decide_determinism(trainer.deterministic)
    if decide_device(trainer.device) == "cpu":
        keep_freed_memory()
    # The watchdog's report tells more than the timeout of a collective, so the watchdog acts first.
    store = init_process_groups(launch, trainer.phase_timeout_s + 10 * GRACE_S)
    agree(dict(flatten(asdict(config))) | installed_versions())
    return store


def _work(program: JobProgram[C], config: C, launch: Launch) -> int:
    """Meet the other ranks and run the body; return the exit code, or end the program with a report if it fails."""
    from megarl.distributed import failures

    store = None
    try:
        store = _meet(launch, config)
        return _run_watched(program, config, launch)
    except Exception as error:
        directory = Path(config.trainer.default_local_dir) if program.has_directory else None
        sys.exit(failures.report(error, directory, launch, store))


def _run_watched(program: JobProgram[C], config: C, launch: Launch) -> int:
    """Run the body under the watchdog until all ranks are done with it; return the exit code of the job."""
    from megarl.distributed import signals
    from megarl.distributed.exchange import on_first_rank

    trainer = config.trainer
    code = 0
    name = on_first_rank(lambda: f"hang-{datetime.now():%Y%m%d-%H%M%S}-{os.getpid()}")
    reports = Path(trainer.default_local_dir) / name
    timeout_s = trainer.phase_timeout_s
    with watching(reports, rank=launch.rank, world_size=launch.world_size, timeout_s=timeout_s):
        import_modules(program.imports)
        try:
            program.body(config, launch)
        except signals.Stopped as stopped:
            code = signals.EXIT_CODE
            if launch.rank == 0:
                print_message(redact(f"megarl: {stopped}; {how_to_resume(trainer, os.environ)}"))
        note(phase="end")
        _leave()
    return code


def how_to_resume(trainer: TrainerSection, environ: Mapping[str, str]) -> str:
    """Return the sentence that names the command for resuming a run from its last checkpoint."""
    changed = "" if trainer.resume_mode == "auto" else " trainer.resume_mode=auto"
    changed += " trainer.resume_from_path=null" if trainer.resume_from_path else ""
    command = environ.get(COMMAND)
    if command:
        return f"resume with\n  {command}{changed}"
    return f"the same command{' with' if changed else ''}{changed} resumes the run"


def _leave() -> None:
    """Wait until all ranks are done, so that no rank cuts off another that is still in a collective."""
    import torch.distributed as dist

    from megarl.distributed.exchange import wait_for_all

    if dist.is_initialized():  # an engine that was closed has destroyed the process group
        wait_for_all()
        dist.destroy_process_group()
