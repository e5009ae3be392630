"""Checkpoints in the mirror: complete or absent, whatever fails, and the local checkpoints untouched."""

import tempfile
from collections.abc import Iterator
from pathlib import Path
from zlib import crc32

import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.checkpoint.contents import find_damage
from megarl.checkpoint.directory import LATEST_FILE, MANIFEST_FILE, set_aside
from megarl.checkpoint.mirror import Mirror
from megarl.checkpoint.remote import Remote, share_of
from megarl.checkpoint.state import Best, State
from megarl.checkpoint.store import CheckpointStore
from megarl.platform.remote import RemoteDirectory
from tests.support.checkpoint_models import ConfigOnly
from tests.support.faulty_filesystem import FaultyFileSystem

FILES = ["huggingface/config.json", "random_states.pt", "state.json"]


@pytest.fixture(scope="module", autouse=True)
def world_of_one(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    store = tmp_path_factory.mktemp("store") / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(autouse=True)
def armed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("megarl.checkpoint.remote.WAITS_S", (0.0, 0.0))
    FaultyFileSystem.arm()
    yield
    FaultyFileSystem.arm()


def start(tmp_path: Path, *, keep: int | None = None, is_async: bool = False) -> CheckpointStore:
    """The checkpoints of a run without models, in `here`, mirrored to `there`."""
    (here := tmp_path / "here").mkdir(exist_ok=True)
    return CheckpointStore(
        directory=here,
        learners={},
        keep=keep,
        models=[ConfigOnly()],
        is_async=is_async,
        mirror=Mirror(Remote(f"faulty://{tmp_path / 'there'}"), here, keep=keep),
    )


def settle(run: CheckpointStore) -> dict[str, float]:
    """Continue training until nothing is being uploaded; return the metrics."""
    metrics = run.advance()
    while run.mirror and run.mirror.uploading is not None:
        metrics |= run.advance()
    return metrics


def save(run: CheckpointStore, *steps: int, kl_coef: float | None = None) -> dict[str, float]:
    """Save at each of the steps and wait for the uploads; return the metrics of the last."""
    metrics = {}
    for step in steps:
        run.save(State(step=step, kl_coef=kl_coef))
        metrics = settle(run)
    return metrics


def intact(directory: Path) -> list[str]:
    """Return the intact checkpoints of a directory."""
    return [path.name for path in sorted(directory.glob("global_step_*")) if not find_damage(path)]


def written() -> list[str]:
    return [path.partition("/there/")[2] for path in FaultyFileSystem.written]


def test_mirror_uploads_manifest_and_pointer_last(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "megarl")
    run, there = start(tmp_path), tmp_path / "there"
    (tmp_path / "here" / "metrics.jsonl").write_text("the records\n")
    metrics = save(run, 3)
    assert intact(there) == ["global_step_3"]
    assert (there / LATEST_FILE).read_text() == "3"
    assert (there / "metrics.jsonl").read_text() == "the records\n"
    assert sorted(written()[:-3]) == [f"global_step_3/{file}" for file in FILES]
    assert written()[-3:] == ["metrics.jsonl", f"global_step_3/{MANIFEST_FILE}", LATEST_FILE]
    num_bytes = sum((there / "global_step_3" / file).stat().st_size for file in FILES)
    assert metrics.pop("checkpoint/mirror_s") >= 0.0
    assert metrics == {
        "checkpoint/mirrored_step": 3.0,
        "checkpoint/mirror_bytes": num_bytes,
        "checkpoint/mirror_failures": 0.0,
    }
    assert f"global_step_3 is mirrored to faulty://{there}, {num_bytes} bytes" in caplog.text
    assert run.advance() == {}


@pytest.mark.parametrize("is_async", [False, True])
def test_closing_run_waits_for_mirror(tmp_path: Path, is_async: bool) -> None:
    run = start(tmp_path, is_async=is_async)
    run.save(State(step=1))
    run.close()
    assert intact(tmp_path / "there") == ["global_step_1"]


def test_transient_upload_failure_is_retried(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    FaultyFileSystem.arm(
        faults={"state.json": 2, MANIFEST_FILE: 1, LATEST_FILE: 2},
        shortened={"there/global_step_1/random_states.pt": 2},
    )
    assert save(start(tmp_path), 1)["checkpoint/mirror_failures"] == 0.0
    assert intact(tmp_path / "there") == ["global_step_1"]
    assert FaultyFileSystem.shortened.total() == 0  # both times the size was asked for
    assert not caplog.records


@pytest.mark.parametrize("file", ["random_states.pt", MANIFEST_FILE, LATEST_FILE])
def test_failing_upload_is_reported_and_retried_after_save(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, file: str
) -> None:
    run, here, there = start(tmp_path), tmp_path / "here", tmp_path / "there"
    FaultyFileSystem.arm(faults={f"there/{file}" if file == LATEST_FILE else f"global_step_1/{file}": 3})
    metrics = save(run, 1)
    assert metrics == {"checkpoint/mirror_failures": 1.0}
    assert "global_step_1 could not be mirrored to" in caplog.text
    assert "OSError: no connection" in caplog.text
    assert not (there / LATEST_FILE).exists()
    assert intact(there) == (["global_step_1"] if file == LATEST_FILE else [])
    assert intact(here) == ["global_step_1"]
    metrics = save(run, 2)
    assert (metrics["checkpoint/mirrored_step"], metrics["checkpoint/mirror_failures"]) == (1.0, 1.0)
    assert intact(there) == intact(here) == ["global_step_1", "global_step_2"]
    assert (there / LATEST_FILE).read_text() == "2"
    assert sorted(name for name in written() if name.startswith("global_step_1/") and MANIFEST_FILE not in name) == [
        f"global_step_1/{name}"
        for name in FILES  # none twice
    ]


def test_damaged_local_file_is_not_mirrored(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = start(tmp_path)
    FaultyFileSystem.gate.clear()
    run.save(State(step=1))
    (tmp_path / "here" / "global_step_1" / "state.json").write_text("{}")
    FaultyFileSystem.gate.set()
    assert settle(run) == {"checkpoint/mirror_failures": 1.0}
    assert "state.json has another content than its manifest says" in caplog.text
    assert intact(tmp_path / "there") == []


def test_unreachable_mirror_is_reported_at_end_only(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "there").write_text("a file where the directory should be")
    run = start(tmp_path, keep=2)
    assert save(run, 1, 2, 3) == {"checkpoint/mirror_failures": 5.0}  # the older ones again each time
    run.close()
    assert "lacks global_step_2, global_step_3." in caplog.text
    assert intact(tmp_path / "here") == ["global_step_2", "global_step_3"]
    (tmp_path / "there").unlink()  # the same command again, when the mirror is back
    run = start(tmp_path, keep=2)
    run.load(tmp_path / "here" / "global_step_3")
    run.close()
    assert intact(tmp_path / "there") == ["global_step_3"]


def test_stalled_mirror_does_not_block_end_forever(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = start(tmp_path)
    mirror = Mirror(Remote(f"faulty://{tmp_path / 'there'}"), tmp_path / "here", keep=None)
    run.save(State(step=1))
    settle(run)
    FaultyFileSystem.gate.clear()
    (tmp_path / "there" / "global_step_1" / MANIFEST_FILE).unlink()
    mirror.follow(1, best=None)
    monkeypatch.setattr("megarl.checkpoint.mirror.STALLED_S", 0.0)
    mirror.close()
    assert "lacks global_step_1." in caplog.text


@given(
    scores=st.lists(st.integers(0, 3), min_size=1, max_size=8),
    keep=st.integers(1, 3),
    restarts=st.sets(st.integers(0, 7)),
    is_async=st.booleans(),
)
@settings(max_examples=25, deadline=None)
def test_best_checkpoint_exists_locally_and_in_mirror(
    scores: list[int], keep: int, restarts: set[int], is_async: bool
) -> None:
    with tempfile.TemporaryDirectory() as directory:
        place, best = Path(directory), None
        run = start(place, keep=keep, is_async=is_async)
        for step, score in enumerate(scores, start=1):
            best = Best(float(score), step).or_better(best)
            run.save(State(step=step, best=best))
            run.close()
            newest = {*range(step - keep + 1, step + 1)} & {*range(1, step + 1)}
            for root in ("here", "there"):
                expected = sorted(f"global_step_{kept}" for kept in newest | {best.step})
                assert sorted(intact(place / root)) == expected, root
            if step in restarts:
                run = start(place, keep=keep, is_async=is_async)
                best = run.load(place / "here" / f"global_step_{step}").best


def test_old_best_stays_mirrored_until_new_one_arrives(tmp_path: Path) -> None:
    run, there = start(tmp_path, keep=1), tmp_path / "there"
    run.save(State(step=1, best=Best(0.5, 1)))
    settle(run)
    FaultyFileSystem.arm(faults={"global_step_2/state.json": 3})
    for state in (State(step=2, best=Best(0.6, 2)), State(step=3, best=Best(0.6, 2))):
        run.save(state)
        settle(run)
    assert intact(there) == ["global_step_2", "global_step_3"]
    FaultyFileSystem.arm(faults={"global_step_4/state.json": 300})
    run.save(State(step=4, best=Best(0.7, 4)))
    settle(run)
    run.save(State(step=5, best=Best(0.7, 4)))
    settle(run)
    assert intact(there) == ["global_step_2", "global_step_5"]


@pytest.mark.parametrize("name", ["merges.txt.gz", "vocab.json.bz2", "codes.zst", "codes.lz4"])
def test_compressed_file_arrives_as_it_is(tmp_path: Path, name: str) -> None:
    remote, content = Remote(f"file://{tmp_path / 'there'}"), b"compressed or not" * 100
    (tmp_path / name).write_bytes(content)
    remote.put(tmp_path / name, name, (len(content), crc32(content)), lambda num_bytes: None)
    assert (tmp_path / "there" / name).read_bytes() == remote.read(name) == content
    remote.get(name, tmp_path / "back")
    RemoteDirectory(f"file://{tmp_path / 'there'}").download(name, tmp_path / "copy", lambda num_bytes: None)
    assert (tmp_path / "back").read_bytes() == (tmp_path / "copy").read_bytes() == content


def test_resumed_run_keeps_old_best_until_new_arrives(tmp_path: Path) -> None:
    run, there = start(tmp_path, keep=1), tmp_path / "there"
    run.save(State(step=1, best=Best(0.5, 1)))
    settle(run)
    resumed = start(tmp_path, keep=1)
    resumed.load(tmp_path / "here" / "global_step_1")
    FaultyFileSystem.arm(faults={"global_step_2/state.json": 300})
    for state in (State(step=2, best=Best(0.6, 2)), State(step=3, best=Best(0.6, 2))):
        resumed.save(state)
        settle(resumed)
    assert intact(there) == ["global_step_1", "global_step_3"]


def test_mirror_removes_oldest_but_keeps_last_complete_checkpoint(tmp_path: Path) -> None:
    run, there = start(tmp_path, keep=2), tmp_path / "there"
    save(run, 8, 9, 10)
    assert intact(there) == ["global_step_10", "global_step_9"]
    FaultyFileSystem.arm(faults={"global_step_11/state.json": 3, "global_step_12/state.json": 3})
    save(run, 11, 12)
    assert intact(there) == ["global_step_10", "global_step_11"]


def test_a_mirror_without_permission_to_delete_still_works(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = start(tmp_path, keep=1)
    FaultyFileSystem.undeletable = True
    assert save(run, 1, 2)["checkpoint/mirrored_step"] == 2.0
    assert intact(tmp_path / "there") == ["global_step_1", "global_step_2"]
    assert "old checkpoints in" in caplog.text
    assert "not allowed to delete" in caplog.text


def test_run_resumed_earlier_replaces_later_mirrored_checkpoints(tmp_path: Path) -> None:
    there = tmp_path / "there"
    save(start(tmp_path), 1, 2, 3, kl_coef=0.5)
    run = start(tmp_path)
    run.load(tmp_path / "here" / "global_step_1")
    FaultyFileSystem.arm(faults={"global_step_2/state.json": 3})
    save(run, 2, kl_coef=0.7)
    assert intact(there) == ["global_step_1", "global_step_3"]  # the old manifest of step 2 is gone
    assert (there / LATEST_FILE).read_text() == "1"  # steps 2 and 3 are not of this run
    run.close()
    assert intact(there) == ["global_step_1", "global_step_2", "global_step_3"]
    assert State.read(there / "global_step_2").kl_coef == 0.7
    assert (there / LATEST_FILE).read_text() == "2"


@pytest.mark.parametrize("name", ["global_step_2", "back"])
def test_mirrored_checkpoints_of_another_past_never_come_back(tmp_path: Path, name: str) -> None:
    there = tmp_path / "there"
    save(start(tmp_path), 1, 2, 4, 6)
    set_aside(tmp_path / "here", [4, 6], latest=2)
    run = start(tmp_path, keep=3)
    (tmp_path / "here" / "back").symlink_to("global_step_2")
    run.load(tmp_path / "here" / name)
    save(run, 5)
    assert intact(there) == ["global_step_1", "global_step_2", "global_step_5", "global_step_6"]
    assert Remote(str(there)).resumable_steps() == [1, 2, 5]
    save(run, 7)
    assert intact(there) == ["global_step_2", "global_step_5", "global_step_7"]


def test_resumed_run_keeps_its_own_mirrored_checkpoints(tmp_path: Path) -> None:
    save(start(tmp_path), 2)
    run = start(tmp_path)
    run.load(tmp_path / "here" / "global_step_2")
    FaultyFileSystem.arm(faults={LATEST_FILE: 3})
    save(run, 4, 6)  # step 4 arrives without the pointer to it
    assert intact(tmp_path / "there") == ["global_step_2", "global_step_4", "global_step_6"]


def test_new_run_leaves_older_mirrored_checkpoints(tmp_path: Path) -> None:
    save(start(tmp_path), 2, 4)
    set_aside(tmp_path / "here", [2, 4], latest=None)
    save(start(tmp_path), 3, 5)
    assert intact(tmp_path / "there") == [f"global_step_{step}" for step in (2, 3, 4, 5)]


def test_failed_removal_of_abandoned_checkpoint_is_repeated(tmp_path: Path) -> None:
    there = tmp_path / "there"
    save(start(tmp_path), 2, 4)
    set_aside(tmp_path / "here", [4], latest=2)
    run = start(tmp_path)
    run.load(tmp_path / "here" / "global_step_2")
    FaultyFileSystem.undeletable = True
    save(run, 5)
    assert intact(there) == ["global_step_2", "global_step_4", "global_step_5"]
    FaultyFileSystem.undeletable = False
    save(run, 7)
    assert intact(there) == ["global_step_2", "global_step_5", "global_step_7"]


def test_checkpoint_under_upload_is_removed_afterwards(tmp_path: Path) -> None:
    run, here, there = start(tmp_path, keep=1), tmp_path / "here", tmp_path / "there"
    FaultyFileSystem.gate.clear()
    for step in (1, 2, 3):
        run.save(State(step=step))
        run.advance()
    assert intact(here) == ["global_step_1", "global_step_3"]
    FaultyFileSystem.gate.set()
    run.close()
    assert intact(here) == ["global_step_3"]
    assert intact(there) == ["global_step_3"]
    assert "global_step_2" not in " ".join(written())  # overtaken


def test_checkpoint_removed_during_upload_is_no_longer_pending(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run, here, there = start(tmp_path), tmp_path / "here", tmp_path / "there"
    FaultyFileSystem.gate.clear()
    run.save(State(step=1))
    (here / "global_step_1").rename(here / "elsewhere")
    FaultyFileSystem.gate.set()
    assert settle(run) == {"checkpoint/mirror_failures": 0.0}
    save(run, 2)
    assert [path.name for path in sorted(there.glob("global_step_*"))] == ["global_step_2"]
    assert not caplog.records


def test_failed_upload_of_removed_checkpoint_leaves_no_files(tmp_path: Path) -> None:
    run, there = start(tmp_path, keep=1), tmp_path / "there"
    FaultyFileSystem.arm(faults={"global_step_1/state.json": 3, f"global_step_2/{MANIFEST_FILE}": 3})
    save(run, 1, 2)
    assert [path.name for path in sorted(there.glob("global_step_*"))] == ["global_step_1", "global_step_2"]
    assert intact(there) == []
    save(run, 3)
    assert [path.name for path in there.glob("global_step_*")] == ["global_step_3"]


def test_complete_mirrored_checkpoint_survives_local_removal(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    save(start(tmp_path), 1, 2)
    run = start(tmp_path)
    run.load(here / "global_step_2")
    (here / "global_step_2").rename(here / "elsewhere")
    save(run, 3)
    assert intact(there) == ["global_step_1", "global_step_2", "global_step_3"]


def test_a_mirrored_checkpoint_is_not_uploaded_again(tmp_path: Path) -> None:
    save(start(tmp_path), 1, 2)
    FaultyFileSystem.arm()
    run = start(tmp_path)
    run.load(tmp_path / "here" / "global_step_2")
    run.close()
    assert written() == []


def test_resumed_checkpoint_stays_until_next_save(tmp_path: Path) -> None:
    save(start(tmp_path), 1, 2)
    here, run = tmp_path / "here", start(tmp_path, keep=1)
    (here / "global_step_2" / "state.json").write_text("{}")  # damaged, but the pointer still names it
    run.load(here / "global_step_1")
    run.close()
    assert intact(here) == ["global_step_1"]
    save(run, 2)
    assert intact(here) == ["global_step_2"]


def test_files_are_divided_evenly_among_ranks() -> None:
    files = {f"{number}.distcp": (100 + number, 0) for number in range(8)} | {"small.json": (1, 0)}
    shares = [share_of(files, rank, 4) for rank in range(4)]
    assert sorted(item for share in shares for item in share) == sorted(files.items())
    loads = [sum(size for _, (size, _) in share) for share in shares]
    assert max(loads) - min(loads) <= 7


def test_a_mirror_is_named_without_password_and_query() -> None:
    assert str(Remote("s3://ann:Sword?f1sh@bucket/mirror/?region=x")) == "s3://***@bucket/mirror"
