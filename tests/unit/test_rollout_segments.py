"""Shared memory of a dead job goes, of a living one stays, whoever asks."""

import os
import signal
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


def test_a_killed_job_is_swept_and_a_living_one_is_not(tmp_path: Path) -> None:
    (tmp_path / "-tp:0-[0-1]-cpushm_0").touch()  # another program's
    living, killed = job(tmp_path, "megarl-living"), job(tmp_path, "megarl-killed")
    try:
        assert segments.sweep(tmp_path) == []
        killed.send_signal(signal.SIGKILL)
        killed.wait()
        swept = segments.sweep(tmp_path)
        assert sorted(swept) == ["megarl-killed-sockets", "megarl-killed-tp:0-0-1-cpushm_0", "megarl-killed.lock"]
        assert sorted(file.name for file in tmp_path.iterdir()) == [
            "-tp:0-[0-1]-cpushm_0",
            "megarl-living-sockets",
            "megarl-living-tp:0-0-1-cpushm_0",
            "megarl-living.lock",
        ]
    finally:
        for process in (living, killed):
            process.kill()
            process.communicate()


@pytest.mark.skipif(not segments.SHARED_MEMORY.is_dir(), reason="no /dev/shm")
def test_a_message_queue_of_a_killed_job_is_swept() -> None:
    prefix = f"{segments.PREFIX}test-{os.getpid()}"
    command = [sys.executable, "-c", TALKER, prefix]
    name = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False).stdout.strip()
    assert name.startswith(f"{prefix}-")
    assert (segments.SHARED_MEMORY / name).exists()
    assert {name, f"{prefix}.lock"} <= set(segments.sweep(segments.SHARED_MEMORY))
    assert not (segments.SHARED_MEMORY / name).exists()


def test_a_lock_that_was_swept_while_it_was_waited_for_is_made_again(tmp_path: Path) -> None:
    lock = tmp_path / "megarl-new.lock"
    lock.touch()
    sweeper = segments._take(lock)
    assert sweeper is not None
    lock.unlink()
    descriptor = segments._hold(lock)
    assert lock.exists()
    assert segments._take(lock) is None
    segments._release(lock, descriptor)
    assert not lock.exists()
