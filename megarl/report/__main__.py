"""Write the report of a run, or of several runs side by side: `megarl report RUN_DIR [RUN_DIR ...]`."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from megarl.report.page import write_report
from megarl.report.read import read_run
from megarl.report.tracker import REPORT_FILE


def main(argv: Sequence[str] | None = None) -> None:
    """Write the page and print its path."""
    parser = argparse.ArgumentParser(prog="megarl report", description=__doc__)
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN_DIR", help="directory of a run")
    parser.add_argument(
        "--out", type=Path, help=f"the page; by default {REPORT_FILE} in RUN_DIR, or here for several runs"
    )
    options = parser.parse_args(argv)
    out = options.out or (options.runs[0] / REPORT_FILE if len(options.runs) == 1 else Path(REPORT_FILE))
    try:
        write_report([read_run(directory) for directory in options.runs], out)
    except (OSError, ValueError) as error:
        sys.exit(f"megarl: {error}")
    print(out)


if __name__ == "__main__":
    main()
