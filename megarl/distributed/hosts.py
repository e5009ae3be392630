"""How the hosts of a job find each other: the address of rank 0, and the network interface that leads there."""

import json
import logging
import os
import socket
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from ipaddress import ip_address
from pathlib import Path

import psutil  # type: ignore[import-untyped]
from torch._C._distributed_c10d import Store

from megarl.distributed.place import Launch
from megarl.platform.errors import UserError
from megarl.platform.files import write_whole

logger = logging.getLogger(__name__)

REPORT_INTERVAL_S = 20.0
"""Seconds that a job waits for a host before it reports that, and between two reports."""
_ROUND_S = 0.2
_CONNECT_S = 3.0
ELSEWHERE = "192.0.2.1"
"""An address of no host (RFC 5737). The route to it is the default route."""
INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")  # D112
REMEDY = (
    "set MASTER_ADDR to an address of rank 0's host that all hosts reach, MASTER_PORT to a port that is open there, "
    "and GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME to the network interface between the hosts "
    "(docs/cluster.md, Networks)"
)


@dataclass(frozen=True)
class Seat:
    """The host that a rank runs on."""

    host: str
    address: str  # of the interface through which it reaches rank 0; empty if no network is needed


class WaitReports:
    """The schedule of reports of a waiting job: every REPORT_INTERVAL_S seconds, on one rank per host."""

    def __init__(self, launch: Launch) -> None:
        self._reports = launch.local_rank == 0
        self._next = time.monotonic() + REPORT_INTERVAL_S

    def wait(self) -> bool:
        """Sleep for a moment; return whether a report is due."""
        time.sleep(_ROUND_S)
        is_due = self._reports and time.monotonic() > self._next
        self._next += REPORT_INTERVAL_S if is_due else 0.0
        return is_due


def resolve(host: str) -> list[str]:
    """Return the addresses of `host`; wait up to REPORT_INTERVAL_S seconds for a name server to know a new host.

    Raises:
        UserError: the host has no known address.
    """
    until = time.monotonic() + REPORT_INTERVAL_S
    while True:
        try:
            return addresses_of(host)
        except (OSError, UnicodeError) as error:
            if time.monotonic() > until:
                raise UserError(
                    f"{socket.gethostname()} finds no address of the host {host!r} ({error}): {REMEDY}; in Slurm, give "
                    "the node a NodeAddr that resolves"
                ) from None
        time.sleep(_ROUND_S)


def addresses_of(host: str) -> list[str]:
    """Return the addresses that `host` has now. Raises OSError or UnicodeError if it has none."""
    return list(dict.fromkeys(str(found[4][0]) for found in socket.getaddrinfo(host, None)))


def is_loopback(address: str) -> bool:
    """Return whether an address leads back to the host that uses it."""
    return ip_address(address.partition("%")[0]).is_loopback


def await_listener(host: str, port: int, launch: Launch, *, timeout_s: float) -> str:
    """Wait until rank 0 listens on `port` of `host`, and return its address.

    Raises:
        UserError: the name has no address, or leads to this host and nobody listens here, or nobody listens within
            `timeout_s` seconds.
    """
    reports = WaitReports(launch)
    since = time.monotonic()
    while True:
        addresses = resolve(host)
        if launch.rank == launch.local_rank:  # on rank 0's own host the name may lead to a loopback address
            own = own_address(host, launch)
            if own not in addresses:
                addresses.append(own)
        for address in addresses:
            if _listens(address, port):
                return address
        waited = time.monotonic() - since
        if all(map(is_loopback, addresses)) and launch.rank != launch.local_rank and waited > REPORT_INTERVAL_S:
            raise UserError(
                f"{socket.gethostname()} finds itself under the name of rank 0's host, {host} "
                f"({', '.join(addresses)}), and nobody listens on port {port} here; {REMEDY}"
            )
        if waited > timeout_s:
            raise UserError(f"rank 0 does not listen at {host}:{port} ({', '.join(addresses)}): {REMEDY}")
        if reports.wait():
            shown = ", ".join(addresses)
            logger.warning("waiting for rank 0 at %s:%d (%s); if rank 0 is running: %s", host, port, shown, REMEDY)


def _listens(address: str, port: int) -> bool:
    try:
        socket.create_connection((address, port), timeout=_CONNECT_S).close()
    except OSError:
        return False
    return True


def own_address(host: str, launch: Launch) -> str:
    """Return an address of this host, rank 0's, that the other ranks find under the name `host`.

    If the job spans hosts and `host` is a loopback address here (127.0.1.1 of Debian), or an address that a network
    translates, it is the address of the interface that the user has named, else of the default route.
    """
    known = addresses_of(host)
    local = set(_local_addresses(include_loopback=True))
    if launch.local_world_size == launch.world_size:
        usable = [address for address in known if address in local or is_loopback(address)]
    else:
        usable = [address for address in known if address in local and not is_loopback(address)]
    return usable[0] if usable else main_address()


def main_address() -> str:
    """Return the address of the interface that the user has named, else of the default route, else any address."""
    addresses = _local_addresses(include_loopback=False)
    named = [address for address in addresses if interface_of(address) == os.environ.get(INTERFACES[0])]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((ELSEWHERE, 9))  # sends nothing
            default = [probe.getsockname()[0]]
        except OSError:
            default = []
    usable = [address for address in default if address in addresses]
    return [*named, *usable, *addresses, "127.0.0.1"][0]


def _local_addresses(*, include_loopback: bool) -> list[str]:
    """Return the IPv4 and IPv6 addresses of the interfaces that are up; IPv4 first."""
    found = [
        entry
        for name, interface in psutil.net_if_addrs().items()
        if psutil.net_if_stats()[name].isup
        for entry in interface
        if entry.family in (socket.AF_INET, socket.AF_INET6)
    ]
    ordered = sorted(found, key=lambda entry: (entry.family != socket.AF_INET, entry.address))
    return [entry.address for entry in ordered if include_loopback or not is_loopback(entry.address)]


def announce(path: Path, port: int) -> tuple[str, int]:
    """Write the address and the port of this process, rank 0, to `path`, which all hosts see; return both."""
    address = main_address()
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps([address, port]).encode())
    return address, port


def find_announced(path: Path, launch: Launch, *, timeout_s: float) -> tuple[str, int]:
    """Return address and port of rank 0 as announced in `path`, once rank 0 listens there.

    Raises:
        UserError: rank 0 does not listen within `timeout_s` seconds.
    """
    reports = WaitReports(launch)
    until = time.monotonic() + timeout_s
    found = ""
    while time.monotonic() < until:
        try:
            found = path.read_text(encoding="utf-8")
        except OSError:
            found = ""
        if found:
            address, port = json.loads(found)
            if _listens(address, port):
                return address, port
        if reports.wait():
            written = found or "nothing yet"
            logger.warning("waiting for rank 0, which writes its address to %s (%s); %s", path, written, REMEDY)
    raise UserError(f"rank 0 does not listen at the address in {path} ({found or 'none'}): {REMEDY}")


def gather(store: Store, host: str, launch: Launch, *, timeout_s: float) -> Seat:
    """Put the host of this rank into `store`, wait until all ranks have done so, and return this rank's entry.

    Raises:
        UserError: some ranks did not join within `timeout_s` seconds.
    """
    mine = Seat(socket.gethostname(), route_to(host))
    store.set(_seat(launch.rank), json.dumps(asdict(mine)))
    store.add("megarl/seated", 1)
    reports = WaitReports(launch)
    until = time.monotonic() + timeout_s
    while store.add("megarl/seated", 0) < launch.world_size:
        if time.monotonic() > until:
            raise UserError(f"{_describe_missing(store, launch)}; {REMEDY}")
        if reports.wait():
            logger.warning("waiting at %s: %s", host, _describe_missing(store, launch))
    return mine


def _seat(rank: int) -> str:
    return f"megarl/seat/{rank}"


def _describe_missing(store: Store, launch: Launch) -> str:
    size = launch.local_world_size
    missing = [rank for rank in range(launch.world_size) if not store.check([_seat(rank)])]
    hosts = sorted({rank // size for rank in missing})
    shown = ", ".join(map(str, missing[:8])) + (" ..." if len(missing) > 8 else "")
    return (
        f"{launch.world_size - len(missing)} of {launch.world_size} ranks have joined; missing: {shown} (host number "
        f"{', '.join(map(str, hosts[:8]))} of {max(1, launch.world_size // size)}, counted from 0)"
    )


def route_to(host: str) -> str:
    """Return this host's address on the route to `host`; empty if the route does not leave this host."""
    for address in resolve(host):
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect((address, 9))  # sends nothing
            except OSError:
                continue
            mine = str(probe.getsockname()[0])
            if not is_loopback(mine):
                return mine
    return ""


def choose_interface(store: Store, mine: Seat, launch: Launch) -> None:
    """Make gloo and NCCL use the interface that leads to the first host, unless the user has named an interface.

    By default gloo uses the address of this host's name, which Debian and Ubuntu set to 127.0.1.1.
    """
    if launch.local_world_size == launch.world_size:
        return
    address = mine.address
    for rank in reversed(range(launch.world_size)):
        if address:
            break
        seat = Seat(**json.loads(store.get(_seat(rank))))
        address = route_to(seat.address) if seat.host != mine.host and seat.address else ""
    name = interface_of(address)
    if name:
        for variable in INTERFACES:
            os.environ.setdefault(variable, name)
    else:
        logger.warning("no network interface leads to the first host: %s", REMEDY)


def describe_failure(error: Exception, host: str, port: int) -> str:
    """Return a message for a person about an error that torch raised while the ranks connected."""
    first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    interfaces = ", ".join(f"{name}={os.environ.get(name, '')}" for name in INTERFACES)
    addresses = list[str]()
    with suppress(OSError, UnicodeError):  # the name may be unknown by now, which would hide the error
        addresses = addresses_of(host)
    return (
        f"{socket.gethostname()} cannot reach the other ranks at MASTER_ADDR={host} ({', '.join(addresses)}), "
        f"MASTER_PORT={port}, with {interfaces}: {first}. Remedy: {REMEDY}"
    )


def interface_of(address: str) -> str | None:
    """Return the name of this host's network interface that has `address`; None if none has."""
    interfaces = psutil.net_if_addrs().items()
    plain = address.partition("%")[0]
    names = [name for name, known in interfaces if plain in (entry.address.partition("%")[0] for entry in known)]
    return names[0] if names else None
