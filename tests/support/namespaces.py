"""Two hosts on this machine: network namespaces with a cable between them, each with its own name and /etc/hosts."""

import os
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.support.programs import ROOT

ON_HOST = """#!/bin/sh
# on_host HOST COMMAND...: run the command on one of the hosts, as ssh would
host=$1; shift
exec ip netns exec "$host" unshare --uts --mount sh -c '
    hostname "$0" && mount --bind "{root}/$0.hosts" /etc/hosts && exec sh -c "$1"' "$host" "$*"
"""


@dataclass(frozen=True)
class Hosts:
    """The names of two hosts, and a way to run commands there."""

    names: tuple[str, str]
    agent: Path  # runs a command on a host, like ssh

    def start(self, name: str, command: Sequence[object], environ: Mapping[str, str]) -> "subprocess.Popen[str]":
        """Start a command on the host `name`; merge its two outputs."""
        return subprocess.Popen(
            [self.agent, name, shlex.join(map(str, command))],
            cwd=ROOT,
            env={**environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )


def unavailable() -> str:
    """Return why such hosts cannot exist here; empty if they can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "only root on Linux makes network namespaces"
    probe = f"megarl-probe-{os.getpid()}"
    try:
        subprocess.run(["ip", "netns", "add", probe], check=True, capture_output=True)
        subprocess.run(
            ["ip", "netns", "exec", probe, "unshare", "--uts", "--mount", "true"], check=True, capture_output=True
        )
    except (OSError, subprocess.CalledProcessError) as error:
        return f"network namespaces are not permitted here ({error})"
    finally:
        subprocess.run(["ip", "netns", "del", probe], check=False, capture_output=True)
    return ""


@contextmanager
def two_hosts(root: Path, *, names_are_loopback: bool) -> Iterator[Hosts]:
    """Make two hosts, and remove them with all their processes.

    Args:
        root: for the files of the hosts.
        names_are_loopback: each host's own name is 127.0.1.1 there, as Debian and Ubuntu install it.
    """
    names = (f"mg{os.getpid()}a", f"mg{os.getpid()}b")
    with TemporaryDirectory(dir="/tmp") as directory:  # Open MPI splits the name of its agent at blanks
        agent = Path(directory) / "on_host"
        agent.write_text(ON_HOST.replace("{root}", str(root)))
        agent.chmod(0o755)
        with _cabled(root, names, names_are_loopback=names_are_loopback):
            yield Hosts(names, agent)


@contextmanager
def _cabled(root: Path, names: tuple[str, str], *, names_are_loopback: bool) -> Iterator[None]:
    addresses = ("10.77.31.1", "10.77.31.2")
    try:
        for name in names:
            _ip("netns", "add", name)
        _ip("link", "add", "cable-a", "netns", names[0], "type", "veth", "peer", "name", "cable-b", "netns", names[1])
        for name, address, end in zip(names, addresses, ("cable-a", "cable-b"), strict=True):
            _ip("-n", name, "address", "add", f"{address}/24", "dev", end)
            for link in ("lo", end):
                _ip("-n", name, "link", "set", link, "up")
            known = {
                other: "127.0.1.1" if names_are_loopback and other == name else where
                for other, where in zip(names, addresses, strict=True)
            }
            lines = ["127.0.0.1 localhost", *(f"{where} {other}" for other, where in known.items())]
            (root / f"{name}.hosts").write_text("\n".join([*lines, ""]))
        yield
    finally:
        for name in names:
            inside = subprocess.run(["ip", "netns", "pids", name], check=False, capture_output=True, text=True).stdout
            for pid in inside.split():
                subprocess.run(["kill", "-KILL", pid], check=False, capture_output=True)
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)
