"""Where a run stands when it starts, from real checkpoints of runs without models."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from megarl.build.resume import Standing, companions
from megarl.checkpoint.background import at_once
from megarl.checkpoint.manifest import sealing
from megarl.checkpoint.state import State
from megarl.checkpoint.store import Checkpoints
from megarl.config.load import load_config
from megarl.config.root import Config
from megarl.tracking.mlflow import RUN_ID_FILE
from tests.ranks import world_of_one


@pytest.fixture(scope="module", autouse=True)
def alone() -> Iterator[None]:
    with world_of_one():
        yield


def configured(run_dir: Path, *arguments: str) -> Config:
    model = ["data.train_files=train.parquet", "actor_rollout_ref.model.path=model", "critic.model.path=model"]
    arguments = (*model, f"trainer.default_local_dir={run_dir}", *arguments)
    return load_config(arguments, world_size=None, check_paths=False)


def save(config: Config, *, step: int) -> Path:
    run_dir = Path(config.trainer.default_local_dir)
    run = Checkpoints(
        directory=run_dir,
        learners={},
        keep=None,
        write_huggingface=lambda _: None,
        companions=lambda: companions(config, {}),
    )
    run.save(State(step=step))
    return run_dir / f"global_step_{step}"


def test_a_run_that_is_as_it_was_says_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = configured(tmp_path)
    assert Standing.find(config) == Standing(checkpoint=None, state=State())
    checkpoint = save(config, step=3)
    standing = Standing.find(config)
    assert standing == Standing(checkpoint=checkpoint, state=State(step=3), same_curve=True)
    assert [standing.is_at(step) for step in (3, 4)] == [True, False]
    assert capsys.readouterr().out == ""


def test_what_is_otherwise_is_said_and_whether_it_matters(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint = save(configured(tmp_path), step=3)
    assert Standing.find(configured(tmp_path, "trainer.save_freq=2")).same_curve
    assert capsys.readouterr().out == "changed without effect on the curve: trainer.save_freq\n"
    changed = configured(tmp_path, "trainer.n_gpus_per_node=4", "algorithm.gamma=0.5")
    assert not Standing.find(changed).same_curve
    assert capsys.readouterr().out.splitlines() == [
        f"otherwise than in {checkpoint}:",
        "  algorithm.gamma: 1.0 -> 0.5 (another curve: the algorithm)",
        "  trainer.n_gpus_per_node: 8 -> 4 (rounding: another split)",
        "note: the curve will not be the one of an undisturbed run",
    ]


def test_another_version_of_a_package_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = configured(tmp_path)
    checkpoint = save(config, step=3)
    path = checkpoint / "versions.json"
    was = json.loads(path.read_text())
    path.write_text(json.dumps(was | {"torch": "1.0"}))
    at_once(sealing(checkpoint))
    assert Standing.find(config).same_curve
    assert f"  torch: 1.0 -> {was['torch']} (another version" in capsys.readouterr().out


def test_the_mlflow_run_goes_on_in_an_empty_directory_under_its_own_name_only(tmp_path: Path) -> None:
    config = configured(tmp_path / "run")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / RUN_ID_FILE).write_text("of the first")
    checkpoint = save(config, step=3)
    fork = ("trainer.resume_mode=resume_path", f"trainer.resume_from_path={checkpoint}")
    Standing.find(configured(tmp_path / "moved", *fork))
    assert (tmp_path / "moved" / RUN_ID_FILE).read_text() == "of the first"
    Standing.find(configured(tmp_path / "renamed", *fork, "trainer.experiment_name=other"))
    assert not (tmp_path / "renamed" / RUN_ID_FILE).exists()
    (tmp_path / "moved" / RUN_ID_FILE).write_text("its own")
    Standing.find(configured(tmp_path / "moved", *fork))
    assert (tmp_path / "moved" / RUN_ID_FILE).read_text() == "its own"
