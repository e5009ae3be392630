"""Files with another content under the same name, and a best whose checkpoint is gone, when a run resumes."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from megarl.assembly.inputs import inputs_of
from megarl.assembly.resume import ResumePoint
from megarl.checkpoint.background import run_blocking
from megarl.checkpoint.manifest import sealing
from megarl.checkpoint.state import Best, State
from megarl.config.root import Config
from megarl.data.parquet import write_rows
from megarl.platform.remote import remote_directory
from tests.support.resumes import configured, save, told
from tests.support.s3 import Objects, s3_server

pytestmark = pytest.mark.usefixtures("world", "news_captured")

INPUTS = {
    "data.train_files": "train.parquet",
    "data.val_files": "val.jsonl",
    "data.chat_template": "template.jinja",
    "data.tokenizer": "tokenizer/tokenizer.json",
    "actor_rollout_ref.model.path": "model/generation_config.json",
    "actor_rollout_ref.ref.model.path": "teacher/model.safetensors",
    "actor_rollout_ref.actor.ptx_files": "pairs.parquet",
}


def with_inputs(root: Path) -> Config:
    """Return a run that reads a file of each kind."""
    rows = [{"prompt": f"{number} ="} for number in range(12)]
    for name in ("train.parquet", "pairs.parquet"):
        write_rows(root / name, rows)
    (root / "val.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (root / "template.jinja").write_text("{{ messages }}")
    for directory in ("model", "teacher", "tokenizer"):
        (root / directory).mkdir()
        (root / directory / "config.json").write_text("{}")
    (root / "tokenizer" / "tokenizer.json").write_text("{}")
    (root / "model" / "generation_config.json").write_text("{}")
    (root / "model" / "README.md").write_text("not read")
    (root / "teacher" / "model.safetensors").write_bytes(bytes(8 << 20))
    places = {key: root / (name.partition("/")[0] if "/" in name else name) for key, name in INPUTS.items()}
    arguments = [f"{key}={place}" for key, place in places.items()]
    arguments += ["actor_rollout_ref.actor.ptx_coef=1", "actor_rollout_ref.rollout.n=2"]
    return configured(root / "run", *arguments, "algorithm.adv_estimator=grpo")


@pytest.mark.parametrize(
    ("key", "spoil", "same_curve", "keeps_best"),
    [
        ("data.train_files", lambda path: write_rows(path, [{"prompt": "1 ="}] * 12), False, True),
        ("data.val_files", lambda path: path.write_text(path.read_text().replace("7", "8")), True, False),
        ("data.chat_template", lambda path: path.write_text("{{ message }}"), False, False),
        ("data.tokenizer", lambda path: path.unlink(), False, False),
        ("actor_rollout_ref.model.path", lambda path: path.write_text('{"eos_token_id": 2}'), False, False),
        ("actor_rollout_ref.ref.model.path", lambda path: path.write_bytes(bytes([1]) * (8 << 20)), False, False),
        ("actor_rollout_ref.actor.ptx_files", lambda path: write_rows(path, [{"prompt": "2 ="}]), False, True),
    ],
)
def test_another_content_under_the_same_name_is_named(
    tmp_path: Path,
    key: str,
    spoil: Callable[[Path], None],
    same_curve: bool,
    keeps_best: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    config, best = with_inputs(tmp_path), Best(0.5, 3)
    checkpoint = save(config, step=3, best=best)
    assert inputs_of(config).keys() == {*INPUTS}
    for path in (tmp_path / name for name in INPUTS.values()):
        os.utime(path, (0, 0))  # another time is no other content
    (tmp_path / "model" / "README.md").write_text("as much as it likes")
    assert ResumePoint.find(config) == ResumePoint(checkpoint=checkpoint, state=State(step=3, best=best))
    assert told(caplog) == ""
    spoil(tmp_path / INPUTS[key])
    found = ResumePoint.find(config)
    assert (found.same_curve, found.state.best) == (same_curve, best if keeps_best else None)
    said = told(caplog)
    assert f"{key}: {tmp_path / INPUTS[key]}" in said
    assert ("the best starts anew" in said) != keeps_best


def test_unreadable_file_of_model_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = with_inputs(tmp_path)
    (tmp_path / "model" / "vocab.json").symlink_to("/proc/self/mem")  # whose first byte nobody can read
    assert inputs_of(config).keys() == INPUTS.keys() - {"actor_rollout_ref.model.path"}
    [warning] = caplog.messages
    assert f"a resume will not notice another content of {tmp_path}/model, which cannot be read" in warning


def test_checkpoint_without_input_descriptions_reports_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = with_inputs(tmp_path)
    checkpoint = save(config, step=3)
    for name in ("inputs.json", "manifest.json"):
        (checkpoint / name).unlink()
    run_blocking(sealing(checkpoint))
    write_rows(tmp_path / "train.parquet", [{"prompt": "1 ="}])
    assert ResumePoint.find(config).same_curve
    assert told(caplog) == ""


def test_remote_files_are_identified_without_reading_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = configured(tmp_path, "data.train_files=s3://data/train.parquet")
    with s3_server("data") as environ:
        for name, value in environ.items():
            monkeypatch.setenv(name, value)
        found = []
        for content in (b"one", b"two"):
            remote_directory.cache_clear()
            Objects("data", environ).put("train.parquet", content)
            found.append(inputs_of(config)["data.train_files"])
    before, after = found
    assert before.keys() == after.keys() == {"s3://data/train.parquet"}
    assert before != after
    assert all(text.startswith("3 bytes, ") for text in (*before.values(), *after.values()))


@pytest.mark.parametrize(
    ("step", "arguments", "is_kept"),
    [
        (3, [], True),
        (0, [], True),  # the model that the run started from
        (2, [], False),
        (2, ["trainer.save_best=false"], True),  # it never had to exist
        (2, ["trainer.default_hdfs_dir={root}/mirror"], True),
        (1, ["trainer.default_hdfs_dir={root}/mirror"], False),
    ],
)
def test_a_best_without_a_checkpoint_begins_anew(
    tmp_path: Path, step: int, arguments: list[str], is_kept: bool, caplog: pytest.LogCaptureFixture
) -> None:
    config = configured(tmp_path / "run", *(argument.format(root=tmp_path) for argument in arguments))
    mirrored = save(configured(tmp_path / "mirror"), step=2)
    assert (mirrored / "manifest.json").exists()
    save(config, step=3, best=Best(0.5, step))
    assert ResumePoint.find(config).state.best == (Best(0.5, step) if is_kept else None)
    said = f"the best starts anew: global_step_{step}, whose validation is the best so far, is not in {tmp_path}/run\n"
    assert (said in told(caplog)) != is_kept
