"""Make the parquet files of a task: `python -m megarl.data.prepare countdown --out DIR`."""

import argparse
from pathlib import Path

from megarl.data.parquet import write_rows
from megarl.data.prepare import countdown, gsm8k


def main() -> None:
    """Read the command line, build the rows of every split and write `DIR/SPLIT.parquet`."""
    parser = argparse.ArgumentParser(prog="python -m megarl.data.prepare", description=__doc__)
    tasks = parser.add_subparsers(dest="task", required=True)
    for name, task in (("countdown", countdown), ("gsm8k", gsm8k)):
        task_parser = tasks.add_parser(
            name, help=task.__doc__, description=task.__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
        )
        task_parser.add_argument("--out", type=Path, required=True, help="directory of the parquet files")
        task.add_arguments(task_parser)
        task_parser.set_defaults(build=task.build)
    arguments = parser.parse_args()
    try:
        splits = arguments.build(arguments)
    except ValueError as error:
        parser.exit(2, f"{parser.prog}: {error}\n")
    for split, rows in splits.items():
        path = arguments.out / f"{split}.parquet"
        write_rows(path, rows)
        print(f"{path}: {len(rows)} rows")


if __name__ == "__main__":
    main()
