"""Reinforcement learning: `python -m megarl.train CONFIG.yaml [MORE.yaml] [a.b.c=value ...]`."""

import sys
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from megarl.config.load import load_config
from megarl.config.report import batch_table, remarks
from megarl.config.root import Config
from megarl.distributed.launch import Launch
from megarl.entry import run


def main(argv: Sequence[str] = sys.argv[1:]) -> None:
    """Train as the configuration says, on every rank of the job."""
    run("megarl.train", argv, load_config, train)


def train(config: Config, launch: Launch) -> None:
    """Run the job on this rank."""
    from megarl.build import build_run
    from megarl.loop import train as loop

    if launch.rank == 0:
        show_plan(config)
    built = build_run(config, launch)
    failed = True
    try:
        loop(built.job, built.progress)
        failed = False
    finally:
        built.job.tracker.close(failed=failed)
    built.engine.close()


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
