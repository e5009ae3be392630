"""The checkpoint that a run with a mirror, or with a URI to resume from, uses."""

import json
import shutil
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest
import torch.distributed as dist

from megarl.checkpoint.background import run_blocking
from megarl.checkpoint.contents import RANDOM_STATES, find_damage
from megarl.checkpoint.directory import LATEST_FILE, MANIFEST_FILE
from megarl.checkpoint.find import find_checkpoint
from megarl.checkpoint.manifest import sealing
from megarl.checkpoint.state import State
from megarl.learner.randomness import write_random_states

SHARDS = "__0_0.distcp"


@pytest.fixture(scope="module", autouse=True)
def world_of_one(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    store = tmp_path_factory.mktemp("store") / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(autouse=True)
def without_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megarl.checkpoint.remote.WAITS_S", (0.0,))


@pytest.fixture
def here(tmp_path: Path) -> Path:
    return tmp_path / "here"


@pytest.fixture
def there(tmp_path: Path) -> Path:
    return tmp_path / "there"


def write(directory: Path, *steps: int, kl_coef: float = 0.5) -> Path:
    """Checkpoints of these steps, the last one the latest."""
    for step in steps:
        checkpoint = directory / f"global_step_{step}"
        (checkpoint / "actor").mkdir(parents=True)
        (checkpoint / "actor" / SHARDS).write_bytes(bytes(1000))
        (checkpoint / "state.json").write_text(json.dumps(asdict(State(step=step, kl_coef=kl_coef))))
        write_random_states(checkpoint / RANDOM_STATES)
        run_blocking(sealing(checkpoint))
    (directory / LATEST_FILE).write_text(str(steps[-1]))
    return checkpoint


def found(here: Path, there: Path) -> Path | None:
    return find_checkpoint(here, mode="auto", path=None, mirror=str(there))


def named(here: Path, uri: object) -> Path | None:
    return find_checkpoint(here, mode="resume_path", path=str(uri), mirror=None)


def test_an_empty_disk_gets_the_last_complete_checkpoint(here: Path, there: Path) -> None:
    assert found(here, there) is None  # nothing anywhere
    (write(there, 1, 2, 3) / MANIFEST_FILE).unlink()  # an incomplete upload
    (there / "metrics.jsonl").write_text("the records\n")
    assert found(here, there) == here / "global_step_2"
    assert not find_damage(here / "global_step_2")
    assert State.read(here / "global_step_2").kl_coef == 0.5
    assert (here / LATEST_FILE).read_text() == "2"
    assert (here / "metrics.jsonl").read_text() == "the records\n"
    assert sorted(path.name for path in here.iterdir()) == ["global_step_2", LATEST_FILE, "metrics.jsonl"]
    shutil.rmtree(there)
    there.mkdir()
    assert found(here, there) == here / "global_step_2"  # from now on it is local


def test_newer_checkpoint_wins_and_tie_prefers_local(here: Path, there: Path) -> None:
    write(here, 1, 2)
    write(there, 1, 2, kl_coef=0.7)
    assert found(here, there) == here / "global_step_2"
    assert State.read(here / "global_step_2").kl_coef == 0.5
    write(there, 3, kl_coef=0.7)
    assert found(here, there) == here / "global_step_3"
    write(here, 4)
    assert found(here, there) == here / "global_step_4"
    assert find_checkpoint(here, mode="disable", path=None, mirror=str(there)) is None


def test_mirror_checkpoints_after_pointer_are_ignored(here: Path, there: Path) -> None:
    write(there, 1, 2, 90)
    (there / LATEST_FILE).write_text("2")
    assert found(here, there) == here / "global_step_2"


def test_half_written_pointer_leads_to_newest_checkpoint(here: Path, there: Path) -> None:
    write(there, 1, 2)
    (there / LATEST_FILE).write_text("")
    assert found(here, there) == here / "global_step_2"


def test_damaged_local_checkpoint_is_replaced_from_mirror(here: Path, there: Path) -> None:
    (write(here, 1, 2) / "state.json").unlink()
    (here / "global_step_1" / MANIFEST_FILE).unlink()
    write(there, 1, 2, kl_coef=0.7)
    assert found(here, there) == here / "global_step_2"
    assert State.read(here / "global_step_2").kl_coef == 0.7


def test_damaged_mirror_checkpoint_is_named_and_predecessor_used(
    here: Path, there: Path, caplog: pytest.LogCaptureFixture
) -> None:
    spoilt = write(there, 1, 2) / "actor" / SHARDS
    spoilt.write_bytes(bytes(999) + b"x")
    assert found(here, there) == here / "global_step_1"
    assert "global_step_2 of the mirror is skipped" in caplog.text
    assert f"{SHARDS} has another content than when it was written" in caplog.text
    assert sorted(path.name for path in here.iterdir()) == ["global_step_1", LATEST_FILE]


def test_mirror_without_complete_checkpoint_raises_error(here: Path, there: Path) -> None:
    (write(there, 3) / MANIFEST_FILE).unlink()
    with pytest.raises(ValueError, match=r"no intact checkpoint.*names step 3, but no complete.*resume_mode=disable"):
        found(here, there)
    shutil.copytree(there, here)
    with pytest.raises(ValueError, match=r"no intact checkpoint.*names step 3"):
        found(here, there)


def test_an_unreachable_mirror(here: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    away = tmp_path / "a file"
    away.write_text("")
    with pytest.raises(ValueError, match=r"has no intact checkpoint, and none can be fetched from the mirror .*a file"):
        found(here, away)
    write(here, 2)
    assert found(here, away) == here / "global_step_2"
    assert "may have a newer checkpoint than global_step_2, which is used" in caplog.text


def test_a_manifest_that_leads_elsewhere_is_refused(here: Path, there: Path) -> None:
    manifest = write(there, 1) / MANIFEST_FILE
    manifest.write_text(json.dumps({"../../stolen": [0, 0]}))
    (there / "stolen").write_text("")
    with pytest.raises(ValueError, match="stolen"):
        found(here, there)
    assert not (here.parent / "stolen").exists()


def test_a_checkpoint_named_by_its_uri(here: Path, there: Path) -> None:
    uri = f"file://{write(there, 4, 5)}"
    assert named(here, uri) == here / "global_step_5"
    assert not (here / LATEST_FILE).exists()  # the pointer keeps naming the last checkpoint of the run itself
    (there / "global_step_5" / "state.json").write_bytes(b"")
    assert named(here, uri) == here / "global_step_5"  # the same, as its manifest says
    with pytest.raises(ValueError, match=r"trainer\.resume_from_path: file://.*/there is not a complete checkpoint"):
        named(here, f"file://{there}")
    with pytest.raises(
        ValueError, match=r"trainer\.resume_from_path: file://.*/global_step_9 is not a complete checkpoint"
    ):
        named(here, f"file://{there}/global_step_9")


def test_checkpoint_from_uri_never_replaces_intact_one(here: Path, there: Path) -> None:
    write(here, 4)
    uri = f"file://{write(there, 4, kl_coef=0.7)}"
    with pytest.raises(ValueError, match=r"global_step_4 is intact, but differs from file://.*move it away"):
        named(here, uri)
    assert State.read(here / "global_step_4").kl_coef == 0.5
