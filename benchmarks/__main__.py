"""Measurements: `python -m benchmarks MEASUREMENT [...]`.

Each command prints a table for people or, with `--json`, one JSON object.
"""

import sys
from collections.abc import Callable, Sequence
from importlib import import_module

from benchmarks.options import PARSERS, parser
from megarl.platform.imports import silence_imports
from megarl.platform.secrets import guard_output

HELP = ("-h", "--help")


def main(argv: Sequence[str] = sys.argv[1:]) -> int:
    """Run one measurement."""
    if not argv or argv[0] not in PARSERS:
        parser().parse_args(argv)  # ends with the help or a message
    if set(HELP) & set(argv):
        PARSERS[argv[0]][1]().print_help()
        return 0
    silence_imports()
    command: Callable[[Sequence[str]], int] = import_module(f"benchmarks.{argv[0]}").main
    return command(argv[1:])


if __name__ == "__main__":
    guard_output()
    sys.exit(main())
