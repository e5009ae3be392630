"""Verify that weights reach the engine: `megarl verify MODEL_DIR [a.b.c=value ...] [--json]`.

Loads a checkpoint into the given Megatron split, syncs it to the given engine split, and compares the probabilities
that trainer, engine and `transformers` give the same tokens. Then changes every weight and repeats. If MODEL_DIR holds
only a `config.json`, the weights are random. The keys are those of a training run for model, trainer and engine
(`actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2`); the default type is float32. Works under any
launcher. Exit code 1: a check failed. Exit code 2: the configuration is faulty.
"""

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from megarl.platform import early  # noqa: F401 - before what takes seconds to import
from megarl.commands.cli.command import parse
from megarl.commands.cli.table import VERIFY
from megarl.commands.entry import JobProgram, run
from megarl.config.layers import override
from megarl.config.load import load_verify_config
from megarl.config.root import VerifyConfig
from megarl.config.trial import try_out
from megarl.distributed.place import Launch
from megarl.platform.errors import UserError
from megarl.platform.screen import Screen, labelled
from megarl.platform.terminal import ignore_broken_pipe
from megarl.tracking.config import TrainerSection


@dataclass(frozen=True)
class VerifyArguments:
    """The configuration to verify, and the format of the report."""

    config: VerifyConfig
    as_json: bool

    @property
    def trainer(self) -> TrainerSection:
        """The section that gives the number of ranks."""
        return self.config.trainer


def main(argv: Sequence[str] = sys.argv[1:]) -> None:
    """Verify on every rank of the job."""
    run(PROGRAM, argv)


def keep_stdout_for_the_report() -> None:
    """Redirect everything that libraries print, from any language, to the standard error."""
    report = os.dup(1)
    os.dup2(2, 1)
    sys.stdout = os.fdopen(report, "w", encoding="utf-8")
    ignore_broken_pipe()


def read_arguments(argv: Sequence[str], *, world_size: int | None) -> VerifyArguments:
    """Parse the command line.

    Raises:
        ConfigError: lists every fault with its dotted key and the remedy.
    """
    typed = parse(VERIFY, argv)
    keys = [override("actor_rollout_ref.model.path", typed["model_dir"]), *typed["overrides"]]
    return VerifyArguments(load_verify_config(keys, world_size=world_size), typed["as_json"])


def verify(arguments: VerifyArguments, launch: Launch) -> None:
    """Verify, print the report on rank 0, and end the program with code 1 if a check failed."""
    from megarl.distributed.exchange import on_first_rank
    from megarl.weight_sync.verification import VerifySetup, probability_limit, run_checks

    if arguments.as_json:
        keep_stdout_for_the_report()
    with scratch_directory() as scratch:
        setup = VerifySetup.build(arguments.config, scratch, launch)
        found = run_checks(setup, scratch)
        limit = probability_limit(arguments.config)
        report = on_first_rank(lambda: found.report(probability_limit=limit))  # which alone ran transformers
    if launch.rank == 0:
        if arguments.as_json:
            print(json.dumps(report), flush=True)
        else:
            show(report)
    setup.engine.close()
    if not report["ok"]:
        sys.exit(1)


@contextmanager
def scratch_directory() -> Iterator[Path]:
    """Make an empty directory that all ranks see, and remove it afterwards.

    Raises:
        UserError: a rank does not see the directory that rank 0 made.
    """
    import torch.distributed as dist

    from megarl.distributed.exchange import on_first_rank, together, wait_for_all

    path = Path(on_first_rank(lambda: tempfile.mkdtemp(prefix="megarl-verify-")))

    def see() -> None:
        if not path.is_dir():
            raise UserError(
                f"rank {dist.get_rank()} does not see {path}: set TMPDIR to a directory that all hosts share"
            )

    try:
        together(see)
        yield path
        wait_for_all()
    finally:
        if dist.get_rank() == 0:
            shutil.rmtree(path, ignore_errors=True)


def show(report: Mapping[str, Any]) -> None:
    """Print the report as a table, and the faults below it."""
    table = Table("check", "result")
    for pair, difference in report["differences"].items():
        one, other = pair.split("-")
        table.add_row(
            f"{one} and {other}",
            f"log-probabilities differ by at most {difference['max_abs_logprob']:.1e}, "
            f"probabilities differ by {difference['mean_prob']:.1e} on average",
        )
    table.add_row("loaded and exported again", "bit for bit equal" if report["roundtrip_exact"] else "changed")
    table.add_row(
        "bytes received by a rank",
        f"{report['bytes_received_max']:,} at most, {report['bytes_received_mean']:,.0f} on average; "
        f"lower bound {report['bytes_lower_bound']:,}",
    )
    table.add_row("memory of a sync", f"{report['peak_extra_bytes']:,} bytes in addition to both models")
    table.add_row("seconds of a sync", f"{report['seconds']:.4f}")
    console = Screen()
    console.print(table)
    for fault in report["faults"]:
        console.print(labelled("wrong:", fault, "red"))
    console.print("ok" if report["ok"] else "not ok")


PROGRAM = JobProgram(
    module="megarl.commands.verify",
    load=read_arguments,
    body=verify,
    trial=lambda arguments: try_out(arguments.config),
    imports=("megarl.weight_sync.verification", "megarl.rollout.imported"),
    has_directory=False,
)


if __name__ == "__main__":
    main()
