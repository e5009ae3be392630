"""One device of gloo for all groups of a process.

A device has a thread that waits for messages, and wakes a hundred times a second without any. Megatron-Core and vLLM
make sixty groups on a rank. Sixty such threads take 7 % of a core, and interrupt what computes.

A group that connects its ranks only when they talk (TORCH_GLOO_LAZY_INIT) needs a device of its own: the connections of
two groups on one device would be mistaken for each other, and the second group would wait without end.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache

from torch.distributed import ProcessGroupGloo

from megarl.platform.patching import declare, replace

INTERFACES = "GLOO_SOCKET_IFNAME"
LAZY_INIT = "TORCH_GLOO_LAZY_INIT"
TRUE = ("1", "y", "yes", "t", "true")  # as torch reads it
RECONFIGURED = "enable_reconfigure"  # an argument that torch 2.14 adds
DEVICE = declare(
    "torch.distributed:ProcessGroupGloo",
    "__init__",
    library="torch",
    versions=">=2.11,<2.15",
    reason="2.11 - 2.14 make a device for each group, whose thread wakes a hundred times a second, and polls for locks",
    upstream="torch/csrc/distributed/c10d/init.cpp: ProcessGroupGloo; gloo/transport/tcp/loop.cc: Loop::run",
    until="groups share a device, or its thread sleeps until a message arrives; and it waits for locks without polling",
)


def share_device() -> None:
    """Give later groups of gloo one device for each network interface, and threads that do not preempt. Idempotent."""
    create = DEVICE.original("__init__")

    def create_on_shared_device(group: object, *place: object, **how: object) -> None:
        is_usual = how.keys() - {RECONFIGURED} == {"timeout"} and not how.get(RECONFIGURED)
        with _threads_that_do_not_preempt():
            if not is_usual or os.environ.get(LAZY_INIT, "").lower() in TRUE:
                return create(group, *place, **how)
            options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # D257
            options._timeout = how["timeout"]
            options._devices = list(_devices(os.getpid(), os.environ.get(INTERFACES, "")))
            options._threads = 2 * len(options._devices)  # as torch counts them
            return create(group, *place, options)

    replace(DEVICE, __init__=create_on_shared_device)


@cache
def _devices(process: int, interfaces: str) -> tuple[object, ...]:
    """Return the devices of a process, because a thread does not survive a fork; `interfaces` is as torch reads it."""
    if not interfaces:
        return (ProcessGroupGloo.create_default_device(),)
    return tuple(ProcessGroupGloo.create_device(interface=name) for name in interfaces.split(","))


@contextmanager
def _threads_that_do_not_preempt() -> Iterator[None]:
    """Let the threads that the block starts wait for a core when they wake, rather than preempt what runs there.

    A thread that writes holds the lock of its connection. If the device's thread preempts it to read the answer, that
    thread polls for the lock until its time slice ends, and the writer cannot go on (D449).
    """
    if not hasattr(os, "SCHED_BATCH") or os.sched_getscheduler(0) != os.SCHED_OTHER:
        yield
        return
    _schedule(os.SCHED_BATCH)
    try:
        yield
    finally:
        _schedule(os.SCHED_OTHER)


def _schedule(policy: int) -> None:
    with suppress(OSError):  # sandboxes such as gVisor refuse; then threads poll, and nothing else changes
        os.sched_setscheduler(0, policy, os.sched_param(0))
