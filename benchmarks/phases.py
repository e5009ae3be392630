"""`python -m benchmarks phases`: the time between training and generation, phase by phase.

Trainer and engine have random weights. In every repeat the engine wakes for its weights (`wake`), receives them
(`sync`), makes room for keys and values (`KV wake`) and returns all memory (`sleep`). Before it sleeps, its responses
must have the trainer's probabilities.
"""

import json
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.cases import MODELS, Case, Split
from benchmarks.options import phases_parser
from benchmarks.report import command_line
from benchmarks.reshard import BUCKET_MEGABYTES
from megarl.commands.entry import JobProgram, run
from megarl.distributed.launch import Launch
from megarl.platform.device import decide_device
from megarl.platform.errors import UserError
from megarl.tracking.config import TrainerSection

if TYPE_CHECKING:
    import torch

    from benchmarks.subject import TrainerAndEngine
    from megarl.reshard.executor import Reshard

WARM_UP = 1
GROWTH = 1.01  # of all weights between two repeats
LARGEST_DIFFERENCE = 0.01  # mean difference between the probabilities of a token in trainer and engine
PHASES = ("wake", "sync", "KV wake", "sleep")


@dataclass(frozen=True)
class Arguments:
    """The measurement, and its form."""

    case: Case
    is_json: bool
    command: str
    trainer: TrainerSection


@dataclass(kw_only=True)
class Clock:
    """The seconds since the last note, and the device's bytes in use at its end."""

    device: "torch.device"
    seconds: dict[str, float] = field(default_factory=dict)
    bytes_in_use: dict[str, int] = field(default_factory=dict)
    start: float = field(default_factory=time.perf_counter)

    def note(self, phase: str) -> None:
        """Note the end of a phase, after the device has finished it."""
        import torch

        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            free, total = torch.cuda.mem_get_info(self.device)
            self.bytes_in_use[phase] = total - free
        self.seconds[phase] = time.perf_counter() - self.start
        self.start = time.perf_counter()


def main(argv: Sequence[str] = sys.argv[1:]) -> int:
    """Measure, and print the results."""
    imports = ("benchmarks.subject", "megarl.rollout.imported")
    run(JobProgram(module="benchmarks.phases", load=read_arguments, body=measure, imports=imports), argv)
    return 0


def read_arguments(argv: Sequence[str], *, world_size: int | None) -> Arguments:
    """Parse the command line. Raises UserError if the layout is none."""
    options = phases_parser().parse_args(argv)
    device = decide_device(options.device)
    case = Case(
        model=options.model,
        layout=options.layout,
        device="cuda" if device == "cuda" else "cpu",
        dtype=options.dtype,
        repeats=options.repeats,
        bucket_megabytes=BUCKET_MEGABYTES[device],
        sleeps=True,
    )
    return Arguments(
        case=case,
        is_json=options.json,
        command=command_line("phases", argv),
        trainer=TrainerSection(n_gpus_per_node=Split.read(case.layout).num_ranks, device=options.device),
    )


def measure(arguments: Arguments, launch: Launch) -> None:
    """Measure on every rank, and print the times of the slowest.

    Raises:
        UserError: at the end the weights of engine and trainer differ.
    """
    from benchmarks.report import machine, spread
    from benchmarks.subject import TrainerAndEngine
    from benchmarks.ways import Direct
    from megarl.distributed.exchange import together
    from megarl.platform.versions import versions

    case = arguments.case
    is_main = launch.rank == 0
    directory = Path(together(lambda: _write_config(case) if is_main else "")[0])
    try:
        subject = TrainerAndEngine.build(case, directory)
        direct = Direct(subject, bucket_bytes=case.bucket_megabytes << 20, ranks_per_node=launch.local_world_size)
        clocks = [_round(subject, direct.reshard) for _ in range(WARM_UP + case.repeats)][WARM_UP:]
        ranks = together(lambda: [(clock.seconds, clock.bytes_in_use) for clock in clocks])
        slowest = {
            phase: spread([max(rank[repeat][0][phase] for rank in ranks) for repeat in range(case.repeats)])
            for phase in PHASES
        }
        received = together(lambda: direct.bytes_received)
    finally:
        together(lambda: shutil.rmtree(directory, ignore_errors=True) if is_main else None)
    subject.engine.close()
    if is_main:
        found = {
            "command": arguments.command,
            "machine": machine(case.device),
            "versions": versions(),
            "case": asdict(case),
            "seconds": slowest,
            "bytes_in_use": ranks[0][-1][1],  # of the first rank's device; nothing on a CPU
            "bytes_received_max": max(received),
        }
        if arguments.is_json:
            print(json.dumps(found))
        else:
            show(found)


def show(found: dict[str, Any]) -> None:
    """Print the times as a table."""
    from rich.table import Table

    from benchmarks.report import describe
    from megarl.platform.screen import Screen

    table = Table("phase", "median s", "min s", "max s", "GB in use after it")
    for phase, seconds in found["seconds"].items():
        in_use = found["bytes_in_use"].get(phase)
        times = (f"{seconds[key]:.3f}" for key in ("median", "min", "max"))
        table.add_row(phase, *times, f"{in_use / 1e9:.1f}" if in_use else "-")
    describe(table, found, Screen())


def _round(subject: "TrainerAndEngine", reshard: "Reshard") -> Clock:
    """Change the weights, sync once, and compare trainer and engine. Collective."""
    from megarl.distributed.exchange import together

    learner = subject.learner
    subject.scale(GROWTH)
    together(lambda: None)
    clock = Clock(device=learner.device)
    with subject.engine.receive_weights() as destination:
        clock.note("wake")
        with learner.weights() as tensors:
            reshard.run(tensors, destination)
        clock.note("sync")
    with subject.engine.generating():
        clock.note("KV wake")
        answers = subject.ask()
        clock.start = time.perf_counter()
    clock.note("sleep")
    difference = subject.difference(answers)
    if difference > LARGEST_DIFFERENCE:
        raise UserError(f"engine and trainer give the same tokens probabilities that differ by {difference:.3f}")
    return clock


def _write_config(case: Case) -> str:
    directory = tempfile.mkdtemp(prefix="megarl-bench-")
    Path(directory, "config.json").write_text(json.dumps(MODELS[case.model]), encoding="utf-8")
    return directory


if __name__ == "__main__":
    main()
