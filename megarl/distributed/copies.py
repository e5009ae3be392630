"""Remote directories as local ones: copied once a node, and the same for as long as this process lives."""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from megarl.distributed.nodes import once_a_node
from megarl.platform.cache import Count, copy_of
from megarl.platform.remote import RemoteDirectory

_copies: dict[tuple[str, str], Path] = {}  # a run goes on with what it began with, whatever the remote becomes


def local_copy(uri: str, kind: str, choose: Callable[[RemoteDirectory], Sequence[str]]) -> Path:
    """Where this node has a copy of the files that `choose` picks of the directory at `uri`; `kind` names the choice.

    Collective where there are ranks, for the first call with the same `uri` and `kind`.

    Raises:
        ValueError: as `copy_of` and `choose` do.
    """

    def bring(count: Count) -> Path:
        remote = RemoteDirectory(uri)  # a new one: nothing of it is remembered
        place = copy_of(remote, choose(remote), count)
        print(f"{remote}: its {kind} is copied to {place}", file=sys.stderr)
        return place

    if (uri, kind) not in _copies:
        _copies[uri, kind] = once_a_node(bring, phase="fetch")
    return _copies[uri, kind]
