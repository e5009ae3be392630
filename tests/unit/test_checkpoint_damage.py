"""A run resumes from a checkpoint only if it is intact, whatever happens to its files, else from the one before.

One real checkpoint of a tiny model is spoilt in every way, file by file, and mended again.
"""

import json
import os
import random
import shutil
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megarl.assembly.resume import checkpoint_texts
from megarl.checkpoint.background import run_blocking
from megarl.checkpoint.contents import Contents
from megarl.checkpoint.directory import LATEST_FILE, MANIFEST_FILE
from megarl.checkpoint.find import find_checkpoint
from megarl.checkpoint.manifest import sealing
from megarl.checkpoint.state import State
from megarl.checkpoint.store import CheckpointStore
from megarl.config.load import load_config
from megarl.data.order import Position
from megarl.platform.small_files import Damage
from megarl.tracking.run_id import RUN_ID_FILE
from tests.support.checkpoint_models import ConfigOnly
from tests.support.learners import make_test_learner
from tests.support.ranks import world_of_one
from tests.support.tiny import write_checkpoint

SIZES = {"vocab_size": 32, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "head_dim": 8}
SHORTENED = {"config.yaml": "trainer: {project_name: x}\n"}  # as the whole takes YAML most of the time
FILES = (
    *(
        "state.json",
        "config.yaml",
        "code.json",
        "inputs.json",
        "versions.json",
        "models.json",
        RUN_ID_FILE,
        MANIFEST_FILE,
    ),
    *("actor/.metadata", "actor/common.pt", "actor/metadata.json", "actor/__0_0.distcp", "random_states.pt"),
    *("huggingface/config.json", "huggingface/model.safetensors.index.json"),
)
HOSTILE = {
    "empty": b"",
    "object": b"{}",
    "array": b"[]",
    "null": b"null",
    "number": b"5",
    "text": b'"x"',
    "array of names": b'["state.json"]',
    "deep arrays": b"[" * 100_000,
    "deep arrays that end": b"[" * 100_000 + b"]" * 100_000,
    "deep objects": b'{"a":' * 100_000,
    "giant float": b'{"step": 1e999}',
    "giant integer": b'{"step": ' + b"9" * 5000 + b"}",
    "not a number": b'{"step": NaN}',
    "negative": b'{"step": -1, "kl_coef": "x"}',
    "twice": b'{"step": "1", "step": []}',
    "wrong types": b'{"step": true, "position": [], "best": 3, "metrics": 5}',
    "unknown key": b'{"step": 2, "unknown": 1}',
    "NUL": b'{"a\\u0000b": [0, 0]}',
    "surrogate": b'{"\\ud800": [0, 0]}',
    "raw surrogate": b'{"\xed\xa0\x80": [0, 0]}',
    "no UTF-8": b"\xff\xfe\x00\x80",
    "zeros": bytes(4096),
    "megabytes": b'{"a": "' + b"x" * (3 << 20) + b'"}',
    "YAML of aliases": b"a: &a [x, x]\nb: &b [*a, *a]\nc: [*b, *b]\n",
    "pickle that calls": b"cposix\nsystem\n(S'false'\ntR.",
    "pickle that asks for memory": b"\x80\x04\x8e\xff\xff\xff\xff\xff\xff\xff\x7f",
}


INPUTS = {"data.train_files": {"train.parquet": "3 rows, 12 bytes, CRC-32 01234567"}}


def sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 42)


PLACES: dict[str, Callable[[Path], None]] = {
    "nothing": lambda path: None,
    "directory": Path.mkdir,
    "pipe": os.mkfifo,
    "endless device": lambda path: path.symlink_to("/dev/zero"),
    "link to itself": lambda path: path.symlink_to(path.name),
    "link to nowhere": lambda path: path.symlink_to("nowhere"),
    "link to a name too long": lambda path: path.symlink_to("x" * 300),
    "input/output error": lambda path: path.symlink_to("/proc/self/mem"),  # a regular file, whose first byte is none
    "terabytes": sparse,
}


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Checkpoints of the steps 1 and 2, with every file that a run writes."""
    root = tmp_path_factory.mktemp("damage")
    source, run_dir = write_checkpoint(root / "model", "llama", **SIZES), root / "run"
    run_dir.mkdir()
    (run_dir / RUN_ID_FILE).write_text("0123456789abcdef0123456789abcdef")
    config = load_config(
        [
            *("data.train_files=train.parquet", f"actor_rollout_ref.model.path={source}"),
            *(f"trainer.default_local_dir={run_dir}", "algorithm.adv_estimator=grpo", "data.max_response_length=8"),
            *("data.max_prompt_length=8", "actor_rollout_ref.rollout.n=2"),
        ],
        world_size=None,
        check_paths=False,
    )

    class Indexed(ConfigOnly):
        """A model with an index of no weights."""

        def write_config(self, directory: Path) -> None:
            shutil.copy(source / "config.json", directory)
            (directory / "model.safetensors.index.json").write_text('{"weight_map": {}}')

    with world_of_one():
        learners = {"actor": make_test_learner(source, {})}
        checkpoints = CheckpointStore(
            directory=run_dir,
            learners=learners,
            keep=None,
            models=[Indexed()],
            texts=checkpoint_texts(config, learners, {"reward": "f of x.py (0123456789ab)"}, INPUTS) | SHORTENED,
        )
        for step in (1, 2):
            checkpoints.save(State(step=step, kl_coef=0.1, position=Position(1, 2), metrics={"a": float("nan")}))
        yield run_dir


@pytest.fixture
def newest(run_dir: Path, caplog: pytest.LogCaptureFixture) -> Path:
    """Return the newest checkpoint; messages about it are in the log."""
    assert found(run_dir) == run_dir / "global_step_2"
    caplog.clear()
    return run_dir / "global_step_2"


def found(run_dir: Path) -> Path | None:
    return find_checkpoint(run_dir, mode="auto", path=None)


def before(newest: Path) -> Path:
    return newest.with_name("global_step_1")


@contextmanager
def spoilt(*paths: Path) -> Iterator[None]:
    """Allow damage to files inside the block, and repair them after it."""
    contents = {path: path.read_bytes() for path in paths}
    try:
        yield
    finally:
        for path, content in contents.items():
            remove(path)
            path.write_bytes(content)


def remove(path: Path) -> None:
    if os.path.isdir(path) and not path.is_symlink():  # noqa: PTH112 - Path raises for links too long
        path.rmdir()
    else:
        path.unlink(missing_ok=True)


def assert_named(newest: Path, name: str, caplog: pytest.LogCaptureFixture) -> None:
    """Check that the newest checkpoint is skipped because of this file, and the one before it is used."""
    assert found(newest.parent) == before(newest)
    assert f"{newest} is damaged and skipped: {newest / name} " in caplog.text
    caplog.clear()


def test_every_file_is_spoilt_here(newest: Path) -> None:
    assert sorted(FILES) == sorted(str(path.relative_to(newest)) for path in newest.rglob("*") if path.is_file())


@pytest.mark.parametrize("name", FILES)
def test_altered_or_replaced_file_is_named(newest: Path, name: str, caplog: pytest.LogCaptureFixture) -> None:
    path = newest / name
    for content in HOSTILE.values():
        with spoilt(path):
            path.write_bytes(content)
            assert_named(newest, name, caplog)
    for put in PLACES.values():
        with spoilt(path):
            remove(path)
            put(path)
            assert_named(newest, name, caplog)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(name=st.sampled_from(FILES), seed=st.integers(0, 1 << 32), way=st.sampled_from(["flip", "cut", "add", "swap"]))
def test_random_changes(newest: Path, caplog: pytest.LogCaptureFixture, name: str, seed: int, way: str) -> None:
    path, rng = newest / name, random.Random(seed)
    content = bytearray((newest / name).read_bytes())
    place = rng.randrange(len(content))
    if way == "flip":
        content[place] ^= 1 << rng.randrange(8)
    elif way == "cut":
        del content[place:]
    elif way == "add":
        content[place:place] = rng.randbytes(rng.randint(1, 64))
    else:
        length = rng.randint(1, 64)
        content[place : place + length] = rng.randbytes(len(content[place : place + length]))
    with spoilt(path):
        was, _ = path.read_bytes(), path.write_bytes(content)
        if was == content:
            assert found(newest.parent) == newest
        else:
            assert_named(newest, name, caplog)


@pytest.mark.parametrize("name", [name for name in FILES if name not in (MANIFEST_FILE, "actor/__0_0.distcp")])
def test_content_matching_manifest_is_loaded_or_named(
    newest: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Contents that a faulty program, or another version, may have written."""
    original = (newest / name).read_bytes()
    entries, rng, changed = json.loads((newest / MANIFEST_FILE).read_text()), random.Random(name), []
    for _ in range(12):
        content = bytearray(original)
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        changed.append(bytes(content))
    for content in (*HOSTILE.values(), *changed):
        with spoilt(newest / name, newest / MANIFEST_FILE):
            (newest / name).write_bytes(content)
            seals = {name: (len(content), zlib.crc32(content))}
            (newest / MANIFEST_FILE).write_bytes(manifest_of({**entries, **seals}))
            if found(newest.parent) == newest:
                Contents.read(newest)
                assert content != HOSTILE["deep arrays"]
            else:
                assert f"{newest} is damaged and skipped: {newest / name} " in caplog.text
            caplog.clear()


def manifest_of(entries: dict[str, Any]) -> bytes:
    """Return a manifest that confirms its own entries, whatever they are."""
    entries.pop(MANIFEST_FILE, None)
    return json.dumps({**entries, MANIFEST_FILE: (len(entries), zlib.crc32(json.dumps(entries).encode()))}).encode()


@pytest.mark.parametrize(
    "entries",
    [
        {},
        {"actor/metadata.json": [119, 0]},
        {"state.json": [10**18, 0]},
        {"state.json": [10**4000, 0]},
        {"state.json": [-1, 0]},
        {"state.json": [1.5, 0]},
        {"state.json": [1, 0, 0]},
        {"state.json": ["1", "0"]},
        {"state.json": None},
        {"state.json": [0, 0], "x" * 5000: [0, 0]},
        {"state.json": [0, 0], "a\0b": [0, 0]},
        {"state.json": [0, 0], "../global_step_1/state.json": [0, 0]},
        {"state.json": [0, 0], "/etc/passwd": [0, 0]},
        {"state.json": [0, 0], "": [0, 0]},
        {"state.json": [0, 0], "state.json/state.json": [0, 0]},
        {"state.json": [0, 0], "actor": [0, 0]},
    ],
    ids=lambda entries: str(entries)[:40],
)
def test_manifests_that_confirm_themselves(
    newest: Path, entries: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    with spoilt(newest / MANIFEST_FILE):
        (newest / MANIFEST_FILE).write_bytes(manifest_of(entries))
        assert found(newest.parent) == before(newest)
        assert f"{newest} is damaged and skipped: {newest}/" in caplog.text


def test_a_missing_entry_is_noticed(newest: Path, caplog: pytest.LogCaptureFixture) -> None:
    entries = json.loads((newest / MANIFEST_FILE).read_text())
    for name in entries:
        with spoilt(newest / MANIFEST_FILE):
            rest = {other: seal for other, seal in entries.items() if other != name}
            (newest / MANIFEST_FILE).write_text(json.dumps(rest))
            assert_named(newest, MANIFEST_FILE, caplog)


def test_a_sector_that_cannot_be_read(newest: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The size is correct, but reading fails with EIO, at once or in the middle of the content."""
    path = newest / "huggingface/config.json"
    with spoilt(path, newest / MANIFEST_FILE):
        path.write_bytes(b"")
        run_blocking(sealing(newest))
        path.unlink()
        path.symlink_to("/proc/self/mem")
        assert_named(newest, "huggingface/config.json", caplog)


@pytest.mark.parametrize("content", [*HOSTILE.values(), b"9" * 5000, b"-3", "\u0662".encode(), b"2\x00", b"007"])
def test_damaged_pointer_is_named_and_newest_checkpoint_used(
    newest: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    pointer = newest.parent / LATEST_FILE
    for put in (lambda path: path.write_bytes(content), *PLACES.values()):
        pointer.unlink()
        try:
            put(pointer)
            assert found(newest.parent) == newest
            if os.path.lexists(pointer) and content != HOSTILE["number"]:
                assert f"{pointer} is damaged" in caplog.text
        finally:
            remove(pointer)
            pointer.write_text("2")
        caplog.clear()


def test_a_flipped_bit_of_the_pointer_is_reported(newest: Path, caplog: pytest.LogCaptureFixture) -> None:
    pointer = newest.parent / LATEST_FILE
    for bit in range(8):
        pointer.write_bytes(bytes([ord("2") ^ (1 << bit)]))
        assert found(newest.parent) in (newest, before(newest))
        assert str(pointer) in caplog.text or f"{newest.parent}/global_step_" in caplog.text
        caplog.clear()
    pointer.write_text("2")


def test_a_damaged_checkpoint_that_is_named_is_refused(newest: Path) -> None:
    for name in ("state.json", MANIFEST_FILE, "actor/.metadata"):
        with spoilt(newest / name), pytest.raises(ValueError, match=rf"resume_from_path=.*{newest / name} "):
            (newest / name).write_bytes(b"{}")
            find_checkpoint(newest.parent, mode="resume_path", path=str(newest))
    with pytest.raises(ValueError, match="is not a checkpoint"):
        find_checkpoint(newest.parent, mode="resume_path", path="x" * 5000)


def test_damage_between_check_and_load_is_named(newest: Path, tmp_path: Path) -> None:
    from megarl.learner.checkpoint import load_learner

    learner = make_test_learner(newest.parents[1] / "model", {})
    for name in ("__0_0.distcp", ".metadata", "common.pt"):
        with spoilt(newest / "actor" / name), pytest.raises(Damage, match=str(newest / "actor")):
            (newest / "actor" / name).write_bytes(b"\x80\x04.")
            load_learner(learner, newest / "actor")
