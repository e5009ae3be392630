"""Measurements: `megarl bench {step,episodes,reshard,phases,plan,checkpoint} [...]`.

Each command prints a table for people or, with `--json`, one JSON object.
"""

import sys
from collections.abc import Callable, Sequence
from importlib import import_module

from megarl.bench.options import PARSERS
from megarl.platform.secrets import guard_output

HELP = ("-h", "--help")


def main(argv: Sequence[str] = sys.argv[1:]) -> int:
    """Run one measurement."""
    if not argv or argv[0] not in PARSERS:
        is_help = bool(argv) and argv[0] in HELP
        print(usage(), file=sys.stdout if is_help else sys.stderr)
        return 0 if is_help else 2
    if set(HELP) & set(argv):
        PARSERS[argv[0]][1]().print_help()
        return 0
    command: Callable[[Sequence[str]], int] = import_module(f"megarl.bench.{argv[0]}").main
    return command(argv[1:])


def usage() -> str:
    """Return the help: one line for each measurement."""
    width = max(map(len, PARSERS))
    lines = (f"  {name:{width}}  {text}" for name, (text, _) in PARSERS.items())
    head = ("Usage: megarl bench MEASUREMENT [--help] [...]", "", "Measurements:")
    return "\n".join([*head, *lines, "", "Example:", "  megarl bench step --help", "  megarl bench step --json"])


if __name__ == "__main__":
    guard_output()
    sys.exit(main())
