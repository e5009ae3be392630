"""Local copies of remote directories: made once per node, and unchanged while this process runs."""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

from megarl.distributed.nodes import once_a_node
from megarl.platform.cache import copy_of
from megarl.platform.remote import RemoteDirectory, ReportProgress

logger = logging.getLogger(__name__)

_copies: dict[tuple[str, str], Path] = {}  # a run keeps the files it started with, even if the remote changes


def local_copy(uri: str, kind: str, choose: Callable[[RemoteDirectory], Sequence[str]]) -> Path:
    """Return the directory of this node with copies of the files that `choose` picks of `uri`; `kind` names the choice.

    Collective, if there are ranks, on the first call with this `uri` and `kind`.

    Raises:
        UserError: `copy_of` or `choose` raised it.
    """

    def copy(report: ReportProgress) -> Path:
        remote = RemoteDirectory(uri)  # a new object, which has no cached listing
        path = copy_of(remote, choose(remote), report)
        logger.info("%s: its %s is copied to %s", remote, kind, path)
        return path

    if (uri, kind) not in _copies:
        _copies[uri, kind] = once_a_node(copy, phase="fetch")
    return _copies[uri, kind]
