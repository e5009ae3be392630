"""Write the report of a run, or of several runs side by side: `megarl report RUN_DIR [RUN_DIR ...]`."""

import sys
from collections.abc import Sequence
from pathlib import Path

from megarl.platform.arguments import Arguments
from megarl.platform.errors import UserError
from megarl.platform.files import explained
from megarl.platform.secrets import guard_output, redact
from megarl.platform.terminal import print_message, visible
from megarl.report.page import write_report
from megarl.report.read import read_run
from megarl.report.tracker import REPORT_FILE

EXAMPLE = """\
megarl report checkpoints/gsm8k/grpo
megarl report checkpoints/gsm8k/grpo checkpoints/gsm8k/dapo --out both.html"""


def parser() -> Arguments:
    """Return the options of the command."""
    found = Arguments(
        prog="megarl report",
        description="Write one page about a run, or about several side by side. It needs no network.",
        example=EXAMPLE,
    )
    found.add_argument("runs", type=Path, nargs="+", metavar="RUN_DIR", help="directory of a run")
    found.add_argument(
        "--out", type=Path, metavar="FILE", help=f"the page; by default {REPORT_FILE} in RUN_DIR, or here for several"
    )
    return found


def main(argv: Sequence[str] = sys.argv[1:]) -> int:
    """Write the page and print its path; return 1 if a directory is not that of a run."""
    options = parser().parse_args(argv)
    runs: Sequence[Path] = options.runs
    out = options.out or (runs[0] / REPORT_FILE if len(runs) == 1 else Path(REPORT_FILE))
    try:
        with explained(str(out)):
            write_report([read_run(directory) for directory in runs], out)
    except (OSError, UserError) as error:
        print_message(visible(redact(f"megarl: {error}")))
        return 1
    print(visible(str(out)))
    return 0


if __name__ == "__main__":
    guard_output()
    sys.exit(main())
