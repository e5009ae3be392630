"""`python -m benchmarks checkpoint`: the time that training waits for a save, asynchronous or not, and for a load.

Its own ranks save and load the state of one model in turn. Training only advances the save every `STEP_S` seconds
meanwhile. The waiting time is all time that training spends in the save, from the first copy to the last rename. Files
are flushed to the disk in both cases.
"""

import json
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from benchmarks.cases import MODELS
from benchmarks.options import checkpoint_parser
from benchmarks.report import command_line
from megarl.commands.entry import JobProgram, run
from megarl.distributed.launch import Launch
from megarl.tracking.config import TrainerSection

if TYPE_CHECKING:
    from megarl.checkpoint.store import CheckpointStore
    from megarl.learner.learner import Learner

STEP_S = 2.0


@dataclass(frozen=True)
class Arguments:
    """The measurement: model, ranks, repeats."""

    model: str
    tp: int
    pp: int
    repeats: int
    directory: Path
    is_json: bool
    command: str
    trainer: TrainerSection


def main(argv: Sequence[str] = sys.argv[1:]) -> int:
    """Measure, and print the results."""
    imports = ("megarl.learner.imported",)
    run(JobProgram(module="benchmarks.checkpoint", load=read_arguments, body=measure, imports=imports), argv)
    return 0


def read_arguments(argv: Sequence[str], *, world_size: int | None) -> Arguments:
    """Parse the command line."""
    options = checkpoint_parser().parse_args(argv)
    return Arguments(
        model=options.model,
        tp=options.tensor,
        pp=options.pipeline,
        repeats=options.repeats,
        directory=options.directory,
        is_json=options.json,
        command=command_line("checkpoint", argv),
        trainer=TrainerSection(n_gpus_per_node=options.ranks, device=options.device),
    )


def measure(arguments: Arguments, launch: Launch) -> None:
    """Save and load in turn, and print the times of the slowest rank."""
    from benchmarks.report import machine, spread
    from megarl.checkpoint.find import find_checkpoint
    from megarl.checkpoint.store import CheckpointStore
    from megarl.distributed.exchange import together
    from megarl.platform.screen import Screen
    from megarl.platform.versions import versions

    learner = _learner(arguments)
    root = Path(together(lambda: _make_directory(arguments) if launch.rank == 0 else "")[0])
    seconds: dict[str, list[float]] = {}
    stores = {
        name: CheckpointStore(
            directory=root / name,
            learners={"actor": learner},
            keep=1,
            is_async=name == "beside",
        )
        for name in ("at once", "beside")
    }
    try:
        for repeat in range(arguments.repeats + 1):  # the first asynchronous save also allocates memory for its copies
            mine = _save(stores["at once"], repeat) | _save_async(stores["beside"], repeat)
            for store in stores.values():
                start = time.perf_counter()
                checkpoint = find_checkpoint(store.directory, mode="auto", path=None)
                assert checkpoint
                mine["check"] = time.perf_counter() - start
                store.load(checkpoint)
                mine["load"] = time.perf_counter() - start - mine["check"]
            everyone = together(lambda mine=mine: mine)  # type: ignore[misc]
            for name in mine:
                seconds.setdefault(name, []).append(max(one[name] for one in everyone))
        num_bytes = sum(path.stat().st_size for path in root.glob("beside/*/**/*") if path.is_file())
    finally:
        together(lambda: shutil.rmtree(root, ignore_errors=True) if launch.rank == 0 else None)
    if launch.rank == 0:
        found = {
            "command": arguments.command,
            "machine": machine(learner.device.type),
            "versions": versions(),
            "ranks": launch.world_size,
            "bytes": num_bytes,
            "first_seconds": {name: values[0] for name, values in seconds.items()},
            "seconds": {name: spread(values[1:]) for name, values in seconds.items()},
            "waits_beside_share": median(seconds["waits beside"][1:]) / median(seconds["waits at once"][1:]),
        }
        if arguments.is_json:
            print(json.dumps(found), flush=True)
        else:
            _show(found, Screen())


def _make_directory(arguments: Arguments) -> str:
    return tempfile.mkdtemp(prefix="megarl-bench-", dir=arguments.directory)


def _save(store: "CheckpointStore", step: int) -> dict[str, float]:
    from benchmarks.case import timed
    from megarl.checkpoint.state import State

    return {"waits at once": timed(lambda: store.save(State(step=step)))}


def _save_async(store: "CheckpointStore", step: int) -> dict[str, float]:
    """Return the seconds that training waits, those of its copies, and those until the checkpoint is complete."""
    from benchmarks.case import timed
    from megarl.checkpoint.directory import STEP_PREFIX
    from megarl.checkpoint.state import State
    from megarl.distributed.exchange import together

    copies = timed(lambda: store.save(State(step=step)))
    waits = copies
    start = time.perf_counter()
    while not all(together((store.directory / f"{STEP_PREFIX}{step}").exists)):
        time.sleep(STEP_S)
        waits += timed(store.advance)
    whole = copies + time.perf_counter() - start
    store.close()
    return {"waits beside": waits, "copies": copies, "whole": whole}


def _learner(arguments: Arguments) -> "Learner":
    """Return a model with an optimizer whose state is random."""
    import torch

    from megarl.learner.config import MegatronSection, OptimSection
    from megarl.learner.factory import make_learner
    from megarl.learner.optimizer import torch_optimizers
    from megarl.learner.parallel import build_mesh
    from megarl.models.architecture import read_architecture

    section = MegatronSection(tensor_model_parallel_size=arguments.tp, pipeline_model_parallel_size=arguments.pp)
    learner = make_learner(
        None,
        read_architecture(MODELS[arguments.model]),
        section,
        build_mesh(section),
        role="policy",
        training=(OptimSection(), 1.0, 1),
    )
    with torch.no_grad():
        for optimizer in torch_optimizers(learner.optimizer and learner.optimizer.megatron):
            for values in optimizer.state.values():
                for name in ("exp_avg", "exp_avg_sq"):
                    values[name].uniform_()
    return learner


def _show(found: dict[str, Any], console: Any) -> None:
    from rich.table import Table

    table = Table(title=f"seconds; {found['bytes'] / 1e9:.2f} GB on {found['ranks']} ranks")
    for column in ("", "first", "min", "median", "max"):
        table.add_column(column, justify="right" if column else "left")
    for name, values in found["seconds"].items():
        row = (found["first_seconds"][name], *values.values())
        table.add_row(name, *(f"{value:.2f}" for value in row))
    console.print(table)
    console.print(f"with asynchronous saves, training waits for {found['waits_beside_share']:.1%} of the time")


if __name__ == "__main__":
    main()
