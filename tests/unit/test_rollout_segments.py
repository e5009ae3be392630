"""Shared memory of a dead job goes, of a living one stays, whoever asks."""

import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from megarl.rollout import segments

HOLDER = """
import sys, time
from pathlib import Path
from megarl.rollout import segments
descriptor = segments._hold(Path(sys.argv[1]))
print("held", flush=True)
time.sleep(600)
"""


TALKER = """
import os, sys
from multiprocessing import resource_tracker, shared_memory
from pathlib import Path
from megarl.rollout import patches, segments
segments._hold(segments.SHARED_MEMORY / f"{sys.argv[1]}.lock")
patches.name_message_queues(sys.argv[1])
segment = shared_memory.SharedMemory(create=True, size=16)
os.kill(resource_tracker._resource_tracker._pid, 9)  # a launcher that kills all of a job kills this too
print(segment.name, flush=True)
os.kill(os.getpid(), 9)
"""


def job(directory: Path, name: str) -> "subprocess.Popen[str]":
    """A process that holds the lock of job `name`, and one of its segments and sockets."""
    (directory / f"{name}-tp:0-0-1-cpushm_0").touch()
    (directory / f"{name}-sockets").mkdir()
    (directory / f"{name}-sockets" / "3f1c").touch()
    command = [sys.executable, "-c", HOLDER, str(directory / f"{name}.lock")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def test_sweep_removes_segments_of_killed_jobs_only(tmp_path: Path) -> None:
    (tmp_path / "-tp:0-[0-1]-cpushm_0").touch()  # another program's
    living, killed = job(tmp_path, "megarl-0123456789ab"), job(tmp_path, "megarl-ba9876543210")
    try:
        assert segments.sweep(tmp_path) == []
        killed.send_signal(signal.SIGKILL)
        killed.wait()
        swept = segments.sweep(tmp_path)
        assert sorted(swept) == [
            "megarl-ba9876543210-sockets",
            "megarl-ba9876543210-tp:0-0-1-cpushm_0",
            "megarl-ba9876543210.lock",
        ]
        assert sorted(file.name for file in tmp_path.iterdir()) == [
            "-tp:0-[0-1]-cpushm_0",
            "megarl-0123456789ab-sockets",
            "megarl-0123456789ab-tp:0-0-1-cpushm_0",
            "megarl-0123456789ab.lock",
        ]
    finally:
        for process in (living, killed):
            process.kill()
            process.communicate()


def link(path: Path) -> None:
    path.symlink_to(path.name)


def socket_at(path: Path) -> None:
    os.mknod(path, stat.S_IFSOCK)  # unlike `bind`, it takes a path of any length


def of_another_user(path: Path) -> None:
    path.touch()
    os.chown(path, 12345, 12345)


HOSTILE = {
    "megarl-x.lock": Path.touch,
    "megarl-*.lock": Path.touch,
    "megarl-[0-9a-f]*.lock": Path.touch,
    "megarl-000000000000.lock\n": Path.touch,
    "megarl-000000000000-x.lock": Path.touch,
    "megarl-000000000001.lock": Path.mkdir,
    "megarl-000000000002.lock": link,
    "megarl-000000000003.lock": socket_at,
    "megarl-000000000004.lock": os.mkfifo,
    "megarl-000000000005.lock": of_another_user,
}


def test_hostile_file_names_do_not_affect_sweep(tmp_path: Path) -> None:
    if os.geteuid():
        pytest.skip("only root makes files of another user")
    living = job(tmp_path, "megarl-0123456789ab")
    try:
        for name, make in HOSTILE.items():
            make(tmp_path / name)  # type: ignore[operator]
        there = {file.name for file in tmp_path.iterdir()}
        assert segments.sweep(tmp_path) == []
        assert {file.name for file in tmp_path.iterdir()} == there
    finally:
        living.kill()
        living.communicate()


def test_dead_job_sweep_removes_no_foreign_files(tmp_path: Path) -> None:
    treasure = tmp_path / "treasure"
    treasure.mkdir()
    (treasure / "gold").touch()
    shared = tmp_path / "shm"
    shared.mkdir()
    dead = "megarl-ba9876543210"
    (shared / f"{dead}.lock").touch()
    (shared / f"{dead}-link").symlink_to(treasure)
    (shared / f"{dead}-own").touch()
    (shared / f"{dead}x-other").touch()
    assert sorted(segments.sweep(shared)) == [f"{dead}-link", f"{dead}-own", f"{dead}.lock"]
    assert [file.name for file in shared.iterdir()] == [f"{dead}x-other"]
    assert (treasure / "gold").exists()


@pytest.mark.skipif(not segments.SHARED_MEMORY.is_dir(), reason="no /dev/shm")
def test_message_queue_of_killed_job_is_swept() -> None:
    prefix = f"{segments.PREFIX}{os.getpid():012x}"
    command = [sys.executable, "-c", TALKER, prefix]
    name = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False).stdout.strip()
    assert name.startswith(f"{prefix}-")
    assert (segments.SHARED_MEMORY / name).exists()
    assert {name, f"{prefix}.lock"} <= set(segments.sweep(segments.SHARED_MEMORY))
    assert not (segments.SHARED_MEMORY / name).exists()


def test_swept_lock_is_created_again_by_waiting_job(tmp_path: Path) -> None:
    lock = tmp_path / "megarl-00000000000a.lock"
    lock.touch()
    sweeper = segments._try_lock(lock)
    assert sweeper is not None
    lock.unlink()
    descriptor = segments._hold(lock)
    assert lock.exists()
    assert segments._try_lock(lock) is None
    segments._release(lock, descriptor)
    assert not lock.exists()
