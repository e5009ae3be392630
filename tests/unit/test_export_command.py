"""Mistakes in the arguments of `megarl export`: faults before any rank starts, and no file in the current directory."""

import json
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from megarl.checkpoint.state import Best, State
from megarl.commands import export, verify
from megarl.config.faults import ConfigError
from megarl.distributed.failures import report
from megarl.distributed.place import Launch
from megarl.platform.errors import UserError
from tests.support.programs import run_program


def make_run(directory: Path, best: Best) -> Path:
    (checkpoint := directory / "global_step_2").mkdir(parents=True)
    (checkpoint / "state.json").write_text(json.dumps(asdict(State(step=2, best=best, files={}))))
    return directory


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (directory := tmp_path / "here").mkdir()
    monkeypatch.chdir(directory)
    return directory


@pytest.mark.parametrize("name", ["file", "file/x", "/proc/none"])
@pytest.mark.parametrize("best", [Best(0.5, 0), Best(0.5, 1)])
def test_missing_best_checkpoint_and_unwritable_output_are_faults(name: str, best: Best, tmp_path: Path) -> None:
    run_dir, out = make_run(tmp_path / "run", best), tmp_path / name  # an absolute name stays as it is
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError) as caught:
        export.read_arguments([str(run_dir), str(out), "--best"], world_size=None)
    assert [fault.path for fault in caught.value.faults] == ["--best", "OUT"]
    assert f"\n  OUT: {out} cannot be written: " in str(caught.value)


def test_files_of_others_are_not_replaced(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "run", Best(0.5, 2))
    (project := tmp_path / "project").mkdir()
    (project / "README.md").touch()
    for out in (run_dir, run_dir / "global_step_2", project):
        with pytest.raises(ConfigError, match=f"OUT: {out} has files that are no model: name a new directory"):
            export.read_arguments([str(run_dir), str(out)], world_size=None)
    for name in ("config.json", "adapter_config.json"):
        (old := tmp_path / name / "old").mkdir(parents=True)
        (old / name).touch()
        assert export.read_arguments([str(run_dir), str(old)], world_size=None).out == old


def test_argument_mistake_writes_no_file_nor_names_rank(tmp_path: Path, here: Path) -> None:
    run_dir = make_run(tmp_path / "run", Best(0.5, 0))
    command = [sys.executable, "-m", "megarl", "export", run_dir, "out", "--best"]
    code, printed = run_program(*command, timeout_s=60, cwd=here)
    assert code == 2
    assert printed.startswith("1 fault in the configuration:\n  --best: the best validation of ")
    assert "failed first" not in printed
    assert not list(here.iterdir())
    assert {path.name for path in run_dir.iterdir()} == {"global_step_2"}


def test_best_checkpoint_is_exported_with_reports_in_run(tmp_path: Path) -> None:
    run_dir, out = make_run(tmp_path / "run", Best(0.5, 2)), str(tmp_path / "out")
    for named in ([str(run_dir)], [str(run_dir), "--best"]):
        found = export.read_arguments([*named, out], world_size=None)
        assert found.checkpoint == (run_dir / "global_step_2" if "--best" in named else run_dir)
        assert found.trainer.default_local_dir == str(run_dir)
    with pytest.raises(ConfigError, match="global_step_2 is no run with checkpoints|neither"):
        (run_dir / "global_step_2" / "huggingface").mkdir()
        (run_dir / "global_step_2" / "huggingface" / "config.json").touch()
        export.read_arguments([str(run_dir / "global_step_2"), "--best", out], world_size=None)


@pytest.mark.parametrize("directory", [None, Path("missing")])
def test_a_failure_makes_no_directory_of_a_run(directory: Path | None, here: Path) -> None:
    launch = Launch(rank=0, world_size=1, local_rank=0, local_world_size=1)
    assert report(UserError("the model is cut"), directory, launch, None) == "megarl: rank 0: the model is cut"
    assert not list(here.iterdir())


def test_verify_has_no_directory_of_a_run() -> None:
    assert not verify.PROGRAM.has_directory
