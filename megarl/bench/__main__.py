"""Measurements: `python -m megarl.bench {step,reshard,phases,plan,checkpoint} [...]`.

Each command prints a table for people or, with `--json`, one JSON object.
"""

import sys
from collections.abc import Callable, Sequence
from importlib import import_module

from megarl.platform.secrets import guard_output

COMMANDS = ("step", "reshard", "phases", "plan", "checkpoint")


def main(argv: Sequence[str] = sys.argv[1:]) -> int:
    """Run one measurement."""
    if not argv or argv[0] not in COMMANDS:
        print(f"usage: python -m megarl.bench {{{','.join(COMMANDS)}}} [--help] [...]", file=sys.stderr)
        return 0 if argv and argv[0] in ("-h", "--help") else 2
    command: Callable[[Sequence[str]], int] = import_module(f"megarl.bench.{argv[0]}").main
    return command(argv[1:])


if __name__ == "__main__":
    guard_output()
    sys.exit(main())
