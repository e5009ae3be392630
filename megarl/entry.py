"""What every entry point does first and last: read the configuration, become a rank, and leave with a clear message."""

import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeVar

import torch.distributed as dist

from megarl.config.faults import ConfigError
from megarl.distributed import signals
from megarl.distributed.agreement import agree
from megarl.distributed.exchange import together
from megarl.distributed.launch import COMMAND, Launch, detect, init_process_groups, join_or_launch
from megarl.distributed.watchdog import GRACE_S, note, watching
from megarl.platform.device import device_type
from megarl.platform.secrets import guard_output, redact
from megarl.platform.terminal import outlive_readers
from megarl.platform.versions import running
from megarl.section import flatten
from megarl.tracking.config import TrainerSection


class Configuration(Protocol):
    """What an entry point is told, a dataclass; its trainer section says how many ranks there are, on what device."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def trainer(self) -> TrainerSection:
        """The run as a whole."""


C = TypeVar("C", bound=Configuration)


def run(
    module: str,
    argv: Sequence[str],
    load: Callable[..., C],
    body: Callable[[C, Launch], None],
    *,
    remarks: Callable[[C, Sequence[str]], Iterable[str]] = lambda config, argv: (),
) -> None:
    """Run `body(config, launch)` on every rank of the job that `argv` describes; the first rank shows the `remarks`.

    A fault in the configuration ends the program with code 2 before any process group exists, any other error that a
    user can mend (ValueError) with code 1; both as a message, not as a traceback. A job that was told to end (see
    `signals`) ends with code 75.
    """
    _quieten()
    guard_output()
    outlive_readers()
    signals.listen()
    rank, is_first_here = os.environ.get("RANK", "0"), True
    try:
        if place := detect(os.environ):
            rank, is_first_here = str(place.rank), place.local_rank == 0
        config = load(argv, world_size=place.world_size if place else None)
        trainer = config.trainer
        directory = Path(trainer.default_local_dir)
        launch = join_or_launch(module, argv, num_processes=trainer.n_gpus_per_node, directory=directory)
        # The watchdog says more than a collective that times out, so it comes first.
        init_process_groups(launch, device_type(trainer.device), trainer.phase_timeout_s + 10 * GRACE_S)
        agree(dict(flatten(asdict(config))) | running())
    except ConfigError as error:
        if is_first_here:  # what is a fault may be one on this host alone
            print(error, file=sys.stderr)
        sys.exit(2)
    except ValueError as error:
        sys.exit(redact(f"megarl: rank {rank}: {error}"))
    if launch.rank == 0:
        for remark in remarks(config, argv):
            print(f"note: {remark}")
    name = together(lambda: f"hang-{datetime.now():%Y%m%d-%H%M%S}-{os.getpid()}")[0]
    reports = directory / name
    code = 0
    try:
        with watching(reports, rank=launch.rank, world_size=launch.world_size, timeout_s=trainer.phase_timeout_s):
            try:
                body(config, launch)
            except signals.Stopped as stopped:
                code = signals.EXIT_CODE
                if launch.rank == 0:
                    print(redact(f"megarl: {stopped}; {going_on(trainer, os.environ)}"), file=sys.stderr)
            note(phase="end")
            _part()
    except ValueError as error:
        logging.getLogger(__name__).debug("the error's origin", exc_info=True)
        sys.exit(redact(f"megarl: rank {rank}: {error}"))
    if code:
        sys.exit(code)


def going_on(trainer: TrainerSection, environ: Mapping[str, str]) -> str:
    """Say with which command a run continues from the last checkpoint."""
    changed = "" if trainer.resume_mode == "auto" else " trainer.resume_mode=auto"
    changed += " trainer.resume_from_path=null" if trainer.resume_from_path else ""
    if command := environ.get(COMMAND):
        return f"go on from there with\n  {command}{changed}"
    return f"the same command{' with' if changed else ''}{changed} goes on from there"


def _part() -> None:
    """All ranks are done: none cuts off another that is still in a collective."""
    if dist.is_initialized():  # an engine that was closed has ended it
        dist.barrier()
        dist.destroy_process_group()


def _quieten() -> None:
    """Megatron and vLLM announce at import what they lack; `megarl.doctor` says it where it is asked for."""
    warnings.filterwarnings("ignore", module=r"(megatron|vllm|torch)\b")
    logging.getLogger("megatron").setLevel(logging.ERROR)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
