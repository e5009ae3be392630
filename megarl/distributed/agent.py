"""torch's elastic agent, changed so that the ranks of this host finish their step when the job gets a signal to stop.

    python -m megarl.distributed.agent [torchrun's arguments] -m megarl.commands.train ...

Unchanged, the agent kills its ranks 30 s after SIGTERM, SIGINT and SIGHUP, dies of SIGUSR1, and always exits with
code 1.
"""

import logging
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.run import parse_args, run

from megarl.distributed.hosts import REMEDY, REPORT_INTERVAL_S, resolve
from megarl.distributed.local import report_first
from megarl.distributed.signals import forward
from megarl.platform.errors import UserError
from megarl.platform.log import show_on_console
from megarl.platform.processes import children

logger = logging.getLogger(__name__)


def serve(arguments: Sequence[str]) -> NoReturn:
    """Run torchrun with `arguments`; exit with the code of the first rank that failed, or with 0."""
    if sys.platform == "linux":
        arguments = ["--signals-to-handle", "SIGQUIT", *arguments]
        forward()
    logging.getLogger("torch.distributed.elastic.multiprocessing.api").setLevel(logging.CRITICAL)  # reported below
    options = parse_args(arguments)
    if options.nnodes not in ("1", "1:1"):
        try:
            resolve(options.master_addr)
        except UserError as error:
            sys.exit(f"megarl: {error}")
        address = f"{options.master_addr}:{options.master_port}"
        threading.Thread(target=_report_waiting, args=[options.nnodes, address], daemon=True).start()
    try:
        run(options)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        sys.exit(report_first(rank, failure.exitcode, _reason(failure)))
    except SignalException as error:
        sys.exit(128 + error.sigval)
    sys.exit(0)


def _reason(failure: ProcessFailure) -> str:
    """Return the line that a failing rank has left; '' if it left none."""
    message = failure.error_file_data["message"] if Path(failure.error_file).is_file() else ""
    return message if isinstance(message, str) else ""


def _report_waiting(num_hosts: str, address: str) -> None:
    """Report from time to time, until the first rank is started, that agents of other hosts are missing."""
    while not any(children()):
        time.sleep(REPORT_INTERVAL_S)
        if not any(children()):
            logger.warning("waiting at %s until all %s hosts have joined; %s", address, num_hosts, REMEDY)


if __name__ == "__main__":
    show_on_console(rank=0)
    serve(sys.argv[1:])
