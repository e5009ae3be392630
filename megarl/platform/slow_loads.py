"""Reports of a user's file that loads for long, so that nobody waits for it without a word."""

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

logger = logging.getLogger(__name__)

SILENT_S = 5.0
"""Seconds that a file of a user may load without a record."""


@contextmanager
def reported(key: str, path: str | None) -> Iterator[None]:
    """Report the file `path`, which the block loads and `key` names, if that takes long; None: there is no file.

    Processes that fork for each response must not import this module: they would copy its libraries.
    """
    if path is None:
        yield
        return
    message = f"{key}: {path} is still loading after {SILENT_S:g} s: everything waits for what it does when imported"
    timer = threading.Timer(SILENT_S, logger.info, ["%s", message])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()  # who loads the file may fork afterwards
