"""Copies of remote directories: complete or absent, and made again only if the remote or the copy changed."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

from megarl.platform import cache
from megarl.platform.cache import RECORD, cache_directory, copy_of
from megarl.platform.remote import RemoteDirectory, ReportProgress
from tests.support.programs import ROOT

FILES = {"config.json": b"{}", "a.safetensors": b"a" * 100_000, "b.safetensors": b"b" * 200_000, "other.bin": b"pickle"}
WANTED = ["config.json", "a.safetensors", "b.safetensors"]


@pytest.fixture
def there(tmp_path: Path) -> Path:
    """The directory of `local://`, which fsspec opens like any store."""
    (directory := tmp_path / "there").mkdir()
    for name, content in FILES.items():
        (directory / name).write_bytes(content)
    return directory


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MEGARL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(cache, "WAITS_S", ())
    return tmp_path / "cache"


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The copied files, in order."""
    names: list[str] = []
    download = RemoteDirectory.download

    def noting(self: RemoteDirectory, name: str, *rest: object) -> str:
        names.append(name)
        return download(self, name, *rest)

    monkeypatch.setattr(RemoteDirectory, "download", noting)
    return names


def bring(uri: str, names: list[str] = WANTED) -> Path:
    return copy_of(RemoteDirectory(uri), names, lambda _: None)


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir() if path.name != RECORD}


def test_copy_is_made_once_with_requested_files_only(there: Path, here: Path, copied: list[str]) -> None:
    place = bring(f"local://{there}")
    assert place.parent == here
    assert place.name.startswith("there-")
    assert contents(place) == {name: FILES[name] for name in WANTED}
    assert copied[0] == "config.json", "the smallest one"
    assert sorted(copied) == sorted(WANTED)
    assert bring(f"local://{there}") == place
    assert len(copied) == 3
    assert {path.name for path in here.iterdir()} == {place.name, f".{place.name}.lock"}


def test_changed_directory_gets_new_copy_beside_old_one(there: Path, copied: list[str]) -> None:
    old = bring(f"local://{there}")
    time.sleep(0.01)
    (there / "a.safetensors").write_bytes(b"A" * 100_000)
    new = bring(f"local://{there}")
    assert new != old
    assert contents(new) == contents(old) | {"a.safetensors": b"A" * 100_000}
    assert contents(old)["a.safetensors"] == FILES["a.safetensors"]


def cut(file: Path) -> None:
    os.truncate(file, 10)


def change(file: Path) -> None:
    file.write_bytes(b"x" * file.stat().st_size)


@pytest.mark.parametrize("spoil", [cut, change, Path.unlink])
def test_only_damaged_file_is_copied_again(there: Path, copied: list[str], spoil) -> None:
    place = bring(f"local://{there}")
    copied.clear()
    spoil(place / "b.safetensors")
    assert bring(f"local://{there}") == place
    assert contents(place) == {name: FILES[name] for name in WANTED}
    assert copied == ["b.safetensors"]


@pytest.mark.parametrize("record", [b"", b"[]", b"{", b'{"config.json": 5}', None])
def test_without_a_sound_record_all_is_copied_again(there: Path, copied: list[str], record: bytes | None) -> None:
    place = bring(f"local://{there}")
    copied.clear()
    (place / RECORD).unlink() if record is None else (place / RECORD).write_bytes(record)
    bring(f"local://{there}")
    assert sorted(copied) == sorted(WANTED)
    assert contents(place) == {name: FILES[name] for name in WANTED}


SLOWLY = """
import sys, time
from megarl.platform.cache import copy_of
from megarl.platform.remote import RemoteDirectory
uri, log, pause, *names = sys.argv[1:]
download = RemoteDirectory.download
def slowly(self, name, file, count):
    with open(log, "a") as notes:
        notes.write(name + "\\n")
    if name != "config.json":
        time.sleep(float(pause))
    return download(self, name, file, count)
RemoteDirectory.download = slowly
moved = []
place = copy_of(RemoteDirectory(uri), names, moved.append)
print(place, sum(moved))
"""


def start(there: Path, log: Path, pause: float) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", SLOWLY, f"local://{there}", str(log), str(pause), *WANTED]
    return subprocess.Popen(command, env=os.environ | {"PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, text=True)


def test_concurrent_processes_copy_directory_once(there: Path, here: Path, tmp_path: Path) -> None:
    processes = [start(there, tmp_path / "log", 1.0) for _ in range(3)]
    answers = [process.communicate(timeout=100)[0].rsplit(maxsplit=1) for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0]
    assert len({place for place, _ in answers}) == 1
    assert sorted((tmp_path / "log").read_text().split()) == sorted(WANTED)
    assert contents(Path(answers[0][0])) == {name: FILES[name] for name in WANTED}


def test_killed_copy_is_resumed(there: Path, here: Path, tmp_path: Path, copied: list[str]) -> None:
    process = start(there, tmp_path / "log", 60.0)
    while not list(here.glob(f".*.part/{RECORD}")):
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert not [path for path in here.iterdir() if not path.name.startswith(".")], "half a copy has no name"
    place = bring(f"local://{there}")
    assert sorted(copied) == ["a.safetensors", "b.safetensors"], "config.json had arrived"
    assert contents(place) == {name: FILES[name] for name in WANTED}
    assert not list(here.glob(".*.part"))


def test_first_finished_copy_wins_without_file_locks(there: Path, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError("no locks available")

    monkeypatch.setattr("megarl.platform.cache.fcntl.flock", refuse)
    download = RemoteDirectory.download
    other: list[Path] = []

    def overtaken(self: RemoteDirectory, name: str, *rest: object) -> str:
        if not other:
            other.append(Path())
            other[0] = bring(f"local://{there}")
        return download(self, name, *rest)

    monkeypatch.setattr(RemoteDirectory, "download", overtaken)
    place = bring(f"local://{there}")
    assert other == [place]
    assert contents(place) == {name: FILES[name] for name in WANTED}
    assert not list(here.glob(".*.part"))


def test_insufficient_disk_space_is_reported_before_copying(
    there: Path, copied: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megarl.platform.cache.shutil.disk_usage", lambda _: type("Usage", (), {"free": 1000}))
    with pytest.raises(ValueError, match=r"needs 300,002 more bytes in .*cache, which has 1,000 free: .*MEGARL_CACHE"):
        bring(f"local://{there}")
    assert copied == []


def test_a_cache_that_cannot_be_written_is_named(there: Path, here: Path) -> None:
    here.write_text("a file")
    with pytest.raises(ValueError, match=r"MEGARL_CACHE=.*cache cannot be written: "):
        bring(f"local://{there}")


def test_truncated_download_is_named(there: Path, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    download = RemoteDirectory.download

    def short(self: RemoteDirectory, name: str, file: Path, count: ReportProgress) -> str:
        digest = download(self, name, file, count)
        if name == "b.safetensors":
            os.truncate(file, 5)
        return digest

    monkeypatch.setattr(RemoteDirectory, "download", short)
    with pytest.raises(
        ValueError, match=r"local://.*there cannot be opened: b.safetensors arrived with 5 bytes instead of"
    ):
        bring(f"local://{there}")
    assert not [path for path in here.iterdir() if not path.name.startswith(".")]


def test_missing_files_and_directories_are_named(there: Path) -> None:
    with pytest.raises(ValueError, match=r"local://.*there cannot be opened: gone.json does not exist"):
        bring(f"local://{there}", ["config.json", "gone.json"])
    with pytest.raises(ValueError, match=r"no directory local://.*nowhere"):
        assert RemoteDirectory(f"local://{there}/nowhere").sizes


@pytest.fixture
def in_memory() -> Iterator[str]:
    memory = fsspec.filesystem("memory")
    for name, content in FILES.items():
        memory.pipe(f"/models/tiny/{name}", content)
    yield "memory://models/tiny"
    memory.rm("/models", recursive=True)


def test_any_scheme_of_fsspec_will_do(in_memory: str) -> None:
    assert contents(bring(in_memory)) == {name: FILES[name] for name in WANTED}


def test_secrets_are_neither_in_names_nor_in_messages(in_memory: str, here: Path) -> None:
    secret = "Tr0ub4dor-and-3"
    uri = f"{in_memory}?secret_key={secret}&token={secret}"
    remote = RemoteDirectory(uri)
    assert secret not in str(remote)
    assert str(RemoteDirectory(f"s3://ann:{secret}@bucket/model?region=x")) == "s3://***@bucket/model"
    with pytest.raises(ValueError, match="no directory|cannot be opened") as raised:
        bring(f"nowhere://ann:{secret}@bucket/model?secret_key={secret}")
    assert secret not in str(raised.value)
    assert cache_directory() == here
