"""The findings of a host about the hosts of its job; tests/ranks/test_distributed_hosts.py has two that meet."""

import socket
import socketserver
import time
from pathlib import Path
from typing import Any

import pytest

from megarl.distributed.place import Launch
from megarl.platform.finding import Finding
from tools import host_check
from tools.host_check import HostGroup, examine, own_index_of

HERE = socket.gethostname()


def group(*hosts: str, own_index: int = 0, port: int = 29500, directory: Path = Path()) -> HostGroup:
    return HostGroup(hosts=hosts, own_index=own_index, port=port, directory=directory)


def launch(rank: int, world_size: int, local_world_size: int) -> Launch:
    local = rank % local_world_size
    return Launch(rank=rank, world_size=world_size, local_rank=local, local_world_size=local_world_size)


def test_host_index_comes_from_launcher_or_host_name() -> None:
    assert own_index_of(("a", "b"), launch(1, 2, 1)) == 1
    assert own_index_of(("a", "b"), launch(4, 8, 4)) == 1
    assert own_index_of(("elsewhere", f"{HERE}.cluster.example"), None) == 1
    assert own_index_of(("127.0.0.1", "10.254.254.254"), None) == 0


@pytest.mark.parametrize(
    ("hosts", "started", "fault"),
    [
        (("a",), None, "HOSTS names only a: name the hosts of a job"),
        (("a", "b"), launch(0, 4, 1), "HOSTS names 2, but the launcher started 4 processes, 1 on this host"),
        (("a", "b"), None, f"but this host, {HERE}, must be there once"),
        ((HERE, "127.0.0.1"), None, "must be there once"),
    ],
)
def test_a_host_that_has_no_place_is_refused(hosts: tuple[str, ...], started: Launch | None, fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        own_index_of(hosts, started)


def test_the_command_refuses_such_hosts(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        host_check.main(["no.such.invalid,other.invalid"])
    assert "must be there once" in capsys.readouterr().err


def rows(findings: list[Finding], verdict: str) -> dict[str, tuple[str, str]]:
    return {found.name: (found.found, found.advice) for found in findings if found.verdict == verdict}


def test_host_does_not_wait_for_unreachable_first_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nothere7")
    monkeypatch.setattr("megarl.distributed.hosts.REPORT_INTERVAL_S", 0.0)
    [found] = examine(group("no.such.invalid", HERE, own_index=1), pytest.fail).values()
    faults = rows(found, "fault")
    assert faults.keys() == {"name no.such.invalid", "route to no.such.invalid", "GLOO_SOCKET_IFNAME"}
    assert faults["name no.such.invalid"][1].startswith("add it to the name server or to /etc/hosts")
    assert faults["GLOO_SOCKET_IFNAME"][1].startswith("this host has no such interface: unset it, or name one of ")
    [found] = examine(group("localhost", HERE, own_index=1), pytest.fail).values()
    assert rows(found, "fault")["name localhost"][1].startswith("the name leads back to this host")


def test_occupied_port_is_reported_immediately(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        [found] = examine(group(HERE, "127.0.0.2", port=port), print).values()
    assert "waits up to 30 s for the same command on 127.0.0.2" in capsys.readouterr().out
    said, advice = rows(found, "fault")[f"port {port} of {HERE}"]
    assert said.startswith("cannot be opened: ") and advice == "stop what listens there, or choose another --port"


def test_a_host_that_does_not_come_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(host_check, "JOIN_S", 0.2)
    monkeypatch.setattr(host_check, "STEP_S", 0.2)
    [found] = examine(group("localhost", "10.254.254.254", port=0, directory=tmp_path), print).values()
    said, advice = rows(found, "fault")["10.254.254.254"]
    assert said == "did not come to port 0 within 0.2 s" and advice.startswith(
        "start the same command on 10.254.254.254"
    )
    assert rows(found, "good")[f"directory {tmp_path}"] == ("files of 1 host seen", "")
    assert not list(tmp_path.iterdir())


class Ahead(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        self.request.sendall(repr(time.time() + 100.0).encode())


def of(met: dict[int, dict[str, Any]], check: str) -> list[Finding]:
    here = group("localhost", HERE, own_index=1)
    return list(getattr(host_check, check)(here, met))


def test_clocks_that_differ_and_ports_that_are_closed() -> None:
    with host_check._clock() as same, host_check._clock(Ahead) as ahead, socket.socket() as closed:
        closed.bind(("localhost", 0))
        [good] = of({0: {"ports": [same]}}, "_clocks")
        [note] = of({0: {"ports": [ahead]}}, "_clocks")
        [open_] = of({0: {"ports": [same, ahead]}}, "_ports")
        [shut] = of({0: {"ports": [same, closed.getsockname()[1]]}}, "_ports")
    assert good.verdict == "good" and abs(float(good.found.split()[0])) < 0.5
    assert note.verdict == "note" and note.found == "-100.0 s from localhost"
    assert open_ == Finding("ports of localhost", "2 of 2 reached")
    assert shut.verdict == "fault" and "let all ports through" in shut.advice


def test_a_directory_that_is_not_shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_check, "STEP_S", 0.1)
    here = group("a", HERE, own_index=1, directory=tmp_path)
    with host_check._file(tmp_path) as (name, why_not):
        mine = {"file": name, "why_not": why_not}
        [good] = host_check._shared(here, {1: mine})
        [unseen] = host_check._shared(here, {0: {"file": "elsewhere"}, 1: mine})
    assert good.found == "files of 1 host seen"
    assert unseen.verdict == "fault" and unseen.found == "files of a are not seen here"
    (tmp_path / "file").touch()
    with host_check._file(tmp_path / "file") as (name, why_not):
        [fault] = host_check._shared(here, {1: {"file": name, "why_not": why_not}})
    assert fault.verdict == "fault" and "not writable: " in fault.found


def test_inactive_infiniband_ports_and_unequal_hosts_are_reported(tmp_path: Path) -> None:
    for device, state in (("mlx5_0", "4: ACTIVE"), ("mlx5_1", "1: DOWN")):
        (tmp_path / device / "ports" / "1").mkdir(parents=True)
        (tmp_path / device / "ports" / "1" / "state").write_text(f"{state}\n")
    active = host_check._active_devices(tmp_path)
    assert active == ["mlx5_0:1"]
    good, note = host_check._infiniband(active, tmp_path)
    assert (good.found, note.found, note.verdict) == ("mlx5_0:1", "mlx5_1 not active", "note")
    met = {0: {"devices": active}, 1: {"devices": []}}
    [fault] = host_check._same_devices(group("a", "b"), met)
    assert fault.found == "a has 1, b has 0"
    assert not list(host_check._same_devices(group("a", "b", own_index=1), met))
