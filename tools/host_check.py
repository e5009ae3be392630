"""Check whether hosts can train together: names, interfaces, ports, InfiniBand, the shared directory, and clocks.

    python tools/host_check.py HOST,HOST,... [--port 29500] [--directory DIR]    # once on each of the hosts

The hosts meet at a store of torch on the first host, as ranks do, and the first host prints the tables. A failure on
another host becomes a row. Exit code 1: the hosts cannot train together. Exit code 2: the arguments are faulty.
"""

import json
import os
import secrets
import socket
import socketserver
import sys
import threading
import time
from argparse import ArgumentTypeError
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
from torch.distributed import TCPStore

from megarl.distributed.hosts import INTERFACES, addresses_of, interface_of, is_loopback, route_to
from megarl.distributed.place import Launch, detect
from megarl.platform.errors import UserError
from megarl.platform.finding import Finding, show
from megarl.platform.screen import Screen, plain
from megarl.platform.secrets import guard_output

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.arguments import Arguments  # noqa: E402

JOIN_S = 30.0
"""Seconds that a host waits for the others to start the same command."""
STEP_S = 5.0
"""Seconds that each check waits for other hosts."""
NUM_PORTS = 3
MAX_SKEW_S = 1.0
DEVICES = Path("/sys/class/infiniband")
POLL_S = 0.05


@dataclass(frozen=True, kw_only=True)
class HostGroup:
    """The hosts of a job, and where they meet."""

    hosts: tuple[str, ...]
    own_index: int  # the place of this host among them
    port: int  # of the first host
    directory: Path  # that all hosts should see

    @property
    def others(self) -> list[int]:
        """Return the places of the other hosts."""
        return [place for place in range(len(self.hosts)) if place != self.own_index]


def main(argv: Sequence[str] = sys.argv[1:]) -> int:
    """Print what the hosts lack to train together, on the first host; return 1 if they lack anything, else 0."""
    parser = _parser()
    options = parser.parse_args(argv)
    launch = detect(os.environ)
    if launch and launch.local_rank:
        return 0  # one process checks the host
    hosts = tuple(options.hosts.split(","))
    try:
        own_index = own_index_of(hosts, launch)
    except UserError as error:
        parser.error(str(error))
    group = HostGroup(hosts=hosts, own_index=own_index, port=options.port, directory=options.directory)
    found = examine(group, print)
    if group.own_index == 0 or len(found) == 1:
        for host, findings in found.items():
            show(f"host check of {host}", [findings])
    num_faults = sum(finding.verdict == "fault" for findings in found.values() for finding in findings)
    if group.own_index == 0:
        Screen().print(
            plain(f"These hosts cannot train together: {num_faults} fault(s), remedies above.", "red")
            if num_faults
            else plain(f"These {len(hosts)} hosts can train together.", "green")
        )
    return 1 if num_faults else 0


def _parser() -> Arguments:
    parser = Arguments(prog="host_check", description=__doc__)
    parser.add_argument("hosts", metavar="HOST,HOST,...", help="the hosts of the job, in the order of the launcher")
    parser.add_argument("--port", type=_port, default=29500, help="of the first host, for the meeting")
    parser.add_argument("--directory", type=Path, default=Path(), help="of the runs, which all hosts should share")
    return parser


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) not in range(1, 65536):
        raise ArgumentTypeError(f"a port is a number from 1 to 65535, not {text}")
    return int(text)


def own_index_of(hosts: Sequence[str], launch: Launch | None) -> int:
    """Return the place of this host among `hosts`: the launcher's number of it, else the place of its name.

    Raises:
        UserError: `hosts` has fewer than two names or lacks this host, or the launcher has started another number of
            processes.
    """
    if len(hosts) < 2:
        raise UserError(f"HOSTS names only {', '.join(hosts)}: name the hosts of a job, with commas between them")
    if launch:
        if launch.world_size != len(hosts) * launch.local_world_size:
            raise UserError(
                f"HOSTS names {len(hosts)}, but the launcher started {launch.world_size} processes, "
                f"{launch.local_world_size} on this host: start one on each of the hosts"
            )
        return launch.rank // launch.local_world_size
    name = socket.gethostname()
    own = {entry.address for known in psutil.net_if_addrs().values() for entry in known}
    found = [place for place, host in enumerate(hosts) if host in own or _short(host) == _short(name)]
    if len(found) != 1:
        raise UserError(f"HOSTS names {', '.join(hosts)}, but this host, {name}, must be there once")
    return found[0]


def _short(host: str) -> str:
    return host if ":" in host or host.replace(".", "").isdecimal() else host.partition(".")[0]


def examine(group: HostGroup, say: Callable[[str], None]) -> dict[str, list[Finding]]:
    """Return the findings by host: of all hosts that meet, or of this host alone if it does not reach the first.

    `say` tells a person what the host waits for.
    """
    here = group.hosts[group.own_index]
    names = list(_names(group))
    alone = [*names, *_interfaces(group), *_infiniband(_active_devices())]
    if group.own_index and names[0].verdict == "fault":
        return {here: alone}  # nothing leads to the first host
    others = ", ".join(group.hosts[place] for place in group.others)
    say(f"{here} waits up to {JOIN_S:g} s for the same command on {others}")
    try:
        store = TCPStore(
            group.hosts[0] if group.own_index else "localhost",
            group.port,
            is_master=group.own_index == 0,
            wait_for_workers=False,
            timeout=timedelta(seconds=JOIN_S),
        )
        return _compare(group, store, alone)
    except RuntimeError as error:
        return {here: [*alone, _no_meeting(group, error)]}


def _compare(group: HostGroup, store: TCPStore, alone: Sequence[Finding]) -> dict[str, list[Finding]]:
    """Check this host against the others that have met at `store`, and return the findings of all. Raises RuntimeError.

    `alone` are the findings that need no other host.
    """
    with ExitStack() as kept:
        ports = [kept.enter_context(_clock()) for _ in range(NUM_PORTS)]
        file, why_not = kept.enter_context(_file(group.directory))
        me = {"ports": ports, "devices": _active_devices(), "file": file, "why_not": why_not}
        met = _exchange(store, "met", group, me, timeout_s=JOIN_S)
        together = [check(group, met) for check in (_joined, _ports, _clocks, _shared, _same_devices)]
        rows = [asdict(finding) for finding in (*alone, *(row for found in together for row in found))]
        everywhere = _exchange(store, "found", group, rows, timeout_s=JOIN_S)
    store.set(f"read/{group.own_index}", "")
    if group.own_index == 0:  # keeps the store
        _await(store, [f"read/{place}" for place in everywhere], timeout_s=STEP_S)
    return {group.hosts[place]: [Finding(**row) for row in rows] for place, rows in everywhere.items()}


def _exchange(store: TCPStore, name: str, group: HostGroup, mine: Any, *, timeout_s: float) -> dict[int, Any]:
    """Give `mine` to all hosts, and return what each has given, by place; without hosts that are too late."""
    store.set(f"{name}/{group.own_index}", json.dumps(mine))
    keys = {place: f"{name}/{place}" for place in range(len(group.hosts))}
    _await(store, list(keys.values()), timeout_s=timeout_s)
    return {place: json.loads(store.get(key)) for place, key in keys.items() if store.check([key])}


def _await(store: TCPStore, keys: list[str], *, timeout_s: float) -> None:
    until = time.monotonic() + timeout_s
    while not store.check(keys) and time.monotonic() < until:
        time.sleep(POLL_S)


def _names(group: HostGroup) -> Iterator[Finding]:
    """Yield the addresses of each host's name, in the order of the hosts."""
    for place, host in enumerate(group.hosts):
        try:
            addresses = addresses_of(host)
        except (OSError, UnicodeError) as error:
            advice = "add it to the name server or to /etc/hosts; in Slurm, give the node a NodeAddr that resolves"
            yield Finding(f"name {host}", f"no address: {error}", advice, "fault")
            continue
        found = ", ".join(addresses)
        loops = any(map(is_loopback, addresses))
        if loops and place != group.own_index:
            advice = f"the name leads back to this host: give {host} its own address in /etc/hosts"
            yield Finding(f"name {host}", found, advice, "fault")
        elif loops:
            yield Finding(f"name {host}", found, "loopback: megarl takes the interface of the route instead", "note")
        else:
            yield Finding(f"name {host}", found)


def _interfaces(group: HostGroup) -> Iterator[Finding]:
    """Yield the interface that leads to another host, and faults of the interfaces that the user has named."""
    towards = group.hosts[0 if group.own_index else 1]
    try:
        address = route_to(towards)
    except UserError:
        address = ""
    name = interface_of(address)
    if name:
        yield Finding(f"route to {towards}", f"{name}, {address}")
    else:
        yield Finding(f"route to {towards}", "none", "no interface leads there: check addresses and routes", "fault")
    known = list(psutil.net_if_addrs())
    for variable in INTERFACES:
        wanted = os.environ.get(variable)
        if wanted and not any(name.startswith(wanted.lstrip("=^")) for name in known):
            advice = f"this host has no such interface: unset it, or name one of {', '.join(known)}"
            yield Finding(variable, wanted, advice, "fault")


def _infiniband(active: Sequence[str], directory: Path = DEVICES) -> Iterator[Finding]:
    yield Finding("InfiniBand", ", ".join(active) or "none")
    inactive = sorted({path.name for path in directory.glob("*")} - {port.partition(":")[0] for port in active})
    if inactive:
        shown = f"{', '.join(inactive)} not active"
        yield Finding("InfiniBand", shown, "check the cable and the subnet manager", "note")


def _active_devices(directory: Path = DEVICES) -> list[str]:
    """Return `NAME:PORT` of each port whose state is active."""
    states = sorted(directory.glob("*/ports/*/state"))
    return [f"{state.parts[-4]}:{state.parts[-2]}" for state in states if "ACTIVE" in state.read_text(encoding="utf-8")]


def _no_meeting(group: HostGroup, error: Exception) -> Finding:
    first = group.hosts[0]
    reason = str(error).strip().splitlines()[0]
    if group.own_index == 0:
        advice = "stop what listens there, or choose another --port"
        return Finding(f"port {group.port} of {first}", f"cannot be opened: {reason}", advice, "fault")
    advice = f"start the same command on {first}; if it runs there, open the port in its firewall, or choose --port"
    return Finding(f"port {group.port} of {first}", f"no meeting there: {reason}", advice, "fault")


def _joined(group: HostGroup, met: Mapping[int, Any]) -> Iterator[Finding]:
    """Yield that this host has reached the first; or, on the first, which hosts have not come."""
    if group.own_index:
        yield Finding(f"port {group.port} of {group.hosts[0]}", "reached")
        return
    for host in (group.hosts[place] for place in group.others if place not in met):
        advice = f"start the same command on {host}; if it runs there, its own table has the reason"
        yield Finding(host, f"did not come to port {group.port} within {JOIN_S:g} s", advice, "fault")


def _ports(group: HostGroup, met: Mapping[int, Any]) -> Iterator[Finding]:
    """Yield whether this host reaches ports that the other hosts have just opened, as gloo and NCCL open theirs."""
    for place in (place for place in group.others if place in met):
        host = group.hosts[place]
        ports = met[place]["ports"]
        closed = [str(port) for port in ports if _ask(host, port) is None]
        if closed:
            advice = "gloo and NCCL choose their own ports: let all ports through between the hosts"
            yield Finding(f"ports of {host}", f"{', '.join(closed)} cannot be reached", advice, "fault")
        else:
            yield Finding(f"ports of {host}", f"{len(ports)} of {len(ports)} reached")


def _clocks(group: HostGroup, met: Mapping[int, Any]) -> Iterator[Finding]:
    """Yield how far this host's clock is from that of the first host, by the quickest of a few answers."""
    asked = [_ask(group.hosts[0], port) for port in met[0]["ports"]] if group.own_index and 0 in met else []
    answers = [answer for answer in asked if answer]
    if not answers:
        return
    ahead = -min(answers)[1]
    if abs(ahead) > MAX_SKEW_S:
        advice = "times of records do not compare, and signed requests may fail: run chrony or ntpd on all hosts"
        yield Finding("clock", f"{ahead:+.1f} s from {group.hosts[0]}", advice, "note")
    else:
        yield Finding("clock", f"{ahead:+.3f} s from {group.hosts[0]}")


def _shared(group: HostGroup, met: Mapping[int, Any]) -> Iterator[Finding]:
    """Yield whether this host sees the files that all hosts keep in the directory."""
    subject = f"directory {group.directory}"
    directory = group.directory
    why_not = met[group.own_index]["why_not"]
    if why_not:
        yield Finding(subject, f"not writable: {why_not}", "name another with --directory", "fault")
        return
    files = {met[place]["file"]: group.hosts[place] for place in met if met[place]["file"]}
    until = time.monotonic() + STEP_S  # a network file system may show another host's files late
    while (unseen := files.keys() - {path.name for path in directory.iterdir()}) and time.monotonic() < until:
        time.sleep(POLL_S)
    if unseen:
        hosts = ", ".join(files[name] for name in sorted(unseen))
        advice = "the run's directory must be on a file system that all hosts share: name a directory of it"
        yield Finding(subject, f"files of {hosts} are not seen here", advice, "fault")
    else:
        yield Finding(subject, f"files of {len(files)} host{'s' * (len(files) > 1)} seen")


def _same_devices(group: HostGroup, met: Mapping[int, Any]) -> Iterator[Finding]:
    """Yield, on the first host, that the hosts have different numbers of InfiniBand ports."""
    numbers = {group.hosts[place]: len(met[place]["devices"]) for place in met}
    if group.own_index == 0 and len(set(numbers.values())) > 1:
        shown = ", ".join(f"{host} has {number}" for host, number in numbers.items())
        advice = "the hosts of a job should have the same number: check those with fewer"
        yield Finding("InfiniBand ports", shown, advice, "fault")


@contextmanager
def _file(directory: Path) -> Iterator[tuple[str, str]]:
    """Keep a file of this host in the directory. Yield its name and an empty text; or no name and the reason."""
    name = f".megarl-host-check-{secrets.token_hex(8)}"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / name).touch(exist_ok=False)
    except OSError as error:
        yield "", str(error)
        return
    try:
        yield name, ""
    finally:
        (directory / name).unlink(missing_ok=True)


class _TimeHandler(socketserver.BaseRequestHandler):
    """Answers a connection with the time of this host, in seconds since 1970."""

    def handle(self) -> None:
        """Send the time as text."""
        self.request.sendall(repr(time.time()).encode())


class _Server(socketserver.ThreadingTCPServer):
    """A server for IPv4 and, if the system has both, IPv6."""

    address_family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET

    def server_bind(self) -> None:
        """Listen to both families."""
        if self.address_family == socket.AF_INET6:
            self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        super().server_bind()


@contextmanager
def _clock(handler: type[socketserver.BaseRequestHandler] = _TimeHandler) -> Iterator[int]:
    """Tell this host's time at a port that the system chooses, and yield the port."""
    with _Server(("", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=[POLL_S], name="megarl-clock", daemon=True)
        thread.start()
        yield server.server_address[1]
        server.shutdown()


def _ask(host: str, port: int) -> tuple[float, float] | None:
    """Return how long a host takes to tell its time, and how far it is ahead of ours, in seconds; None: no answer."""
    try:
        start = time.time()
        with socket.create_connection((host, port), timeout=STEP_S) as connection:
            theirs = float(connection.recv(64))
        end = time.time()
    except (OSError, ValueError):
        return None
    return end - start, theirs - (start + end) / 2


if __name__ == "__main__":
    guard_output()
    sys.exit(main())
