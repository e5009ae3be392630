"""The command `megarl`, also `python -m megarl`: chooses a sub-command by its name."""

import sys
from collections.abc import Sequence
from functools import partial

import click

from megarl.platform import early  # noqa: F401 - before what takes seconds to import
from megarl.commands.cli.command import complain
from megarl.commands.cli.table import MEGARL


def main(argv: Sequence[str] | None = None) -> None:
    """Run the sub-command that `argv`, by default the command line, names; end with its exit code."""
    try:
        chosen = MEGARL.main(argv, prog_name="megarl", standalone_mode=False)
    except click.UsageError as error:
        complain(error)
    # The sub-command runs outside of click, which would report an interrupt in its own words.
    sys.exit(chosen() if isinstance(chosen, partial) else chosen)


if __name__ == "__main__":
    main()
