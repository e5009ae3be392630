"""The findings of a host about the hosts of its job; tests/ranks/test_distributed_hosts.py has two that meet."""

import socket
import socketserver
import time
from pathlib import Path
from typing import Any

import pytest

from megarl.commands import doctor
from megarl.distributed import neighbours
from megarl.distributed.neighbours import Circle, examine, place_of
from megarl.distributed.place import Launch
from megarl.platform.finding import Finding

HERE = socket.gethostname()


def circle(*hosts: str, mine: int = 0, port: int = 29500, directory: Path = Path()) -> Circle:
    return Circle(hosts=hosts, mine=mine, port=port, directory=directory)


def launch(rank: int, world_size: int, local_world_size: int) -> Launch:
    local = rank % local_world_size
    return Launch(rank=rank, world_size=world_size, local_rank=local, local_world_size=local_world_size)


def test_the_place_is_that_of_the_launcher_or_of_the_name() -> None:
    assert place_of(("a", "b"), launch(1, 2, 1)) == 1
    assert place_of(("a", "b"), launch(4, 8, 4)) == 1
    assert place_of(("elsewhere", f"{HERE}.cluster.example"), None) == 1
    assert place_of(("127.0.0.1", "10.254.254.254"), None) == 0


@pytest.mark.parametrize(
    ("hosts", "started", "fault"),
    [
        (("a",), None, "--hosts names only a: name the hosts of a job"),
        (("a", "b"), launch(0, 4, 1), "--hosts names 2, but the launcher started 4 processes, 1 on this host"),
        (("a", "b"), None, f"but this host, {HERE}, must be there once"),
        ((HERE, "127.0.0.1"), None, "must be there once"),
    ],
)
def test_a_host_that_has_no_place_is_refused(hosts: tuple[str, ...], started: Launch | None, fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        place_of(hosts, started)


def test_the_command_refuses_such_hosts(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        doctor.main(["--hosts", "no.such.invalid,other.invalid"])
    assert "must be there once" in capsys.readouterr().err


def rows(findings: list[Finding], verdict: str) -> dict[str, tuple[str, str]]:
    return {found.name: (found.found, found.advice) for found in findings if found.verdict == verdict}


def test_a_host_that_cannot_find_the_first_does_not_wait_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nothere7")
    monkeypatch.setattr("megarl.distributed.hosts.REPORT_INTERVAL_S", 0.0)
    [found] = examine(circle("no.such.invalid", HERE, mine=1), pytest.fail).values()
    faults = rows(found, "fault")
    assert faults.keys() == {"name no.such.invalid", "route to no.such.invalid", "GLOO_SOCKET_IFNAME"}
    assert faults["name no.such.invalid"][1].startswith("add it to the name server or to /etc/hosts")
    assert faults["GLOO_SOCKET_IFNAME"][1].startswith("this host has no such interface: unset it, or name one of ")
    [found] = examine(circle("localhost", HERE, mine=1), pytest.fail).values()
    assert rows(found, "fault")["name localhost"][1].startswith("the name leads back to this host")


def test_a_port_that_is_taken_is_said_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        [found] = examine(circle(HERE, "127.0.0.2", port=port), print).values()
    assert "waits up to 30 s for the same command on 127.0.0.2" in capsys.readouterr().out
    said, advice = rows(found, "fault")[f"port {port} of {HERE}"]
    assert said.startswith("cannot be opened: ") and advice == "stop what listens there, or choose another --port"


def test_a_host_that_does_not_come_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(neighbours, "JOIN_S", 0.2)
    monkeypatch.setattr(neighbours, "STEP_S", 0.2)
    [found] = examine(circle("localhost", "10.254.254.254", port=0, directory=tmp_path), print).values()
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
    here = circle("localhost", HERE, mine=1)
    return list(getattr(neighbours, check)(here, met))


def test_clocks_that_differ_and_ports_that_are_closed() -> None:
    with neighbours._clock() as same, neighbours._clock(Ahead) as ahead, socket.socket() as closed:
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
    monkeypatch.setattr(neighbours, "STEP_S", 0.1)
    here = circle("a", HERE, mine=1, directory=tmp_path)
    with neighbours._file(tmp_path) as (name, why_not):
        mine = {"file": name, "why_not": why_not}
        [good] = neighbours._shared(here, {1: mine})
        [unseen] = neighbours._shared(here, {0: {"file": "elsewhere"}, 1: mine})
    assert good.found == "files of 1 host seen"
    assert unseen.verdict == "fault" and unseen.found == "files of a are not seen here"
    (tmp_path / "file").touch()
    with neighbours._file(tmp_path / "file") as (name, why_not):
        [fault] = neighbours._shared(here, {1: {"file": name, "why_not": why_not}})
    assert fault.verdict == "fault" and "not writable: " in fault.found


def test_infiniband_ports_that_are_active_and_hosts_that_have_fewer(tmp_path: Path) -> None:
    for device, state in (("mlx5_0", "4: ACTIVE"), ("mlx5_1", "1: DOWN")):
        (tmp_path / device / "ports" / "1").mkdir(parents=True)
        (tmp_path / device / "ports" / "1" / "state").write_text(f"{state}\n")
    active = neighbours._active_devices(tmp_path)
    assert active == ["mlx5_0:1"]
    good, note = neighbours._infiniband(active, tmp_path)
    assert (good.found, note.found, note.verdict) == ("mlx5_0:1", "mlx5_1 not active", "note")
    met = {0: {"devices": active}, 1: {"devices": []}}
    [fault] = neighbours._same_devices(circle("a", "b"), met)
    assert fault.found == "a has 1, b has 0"
    assert not list(neighbours._same_devices(circle("a", "b", mine=1), met))
