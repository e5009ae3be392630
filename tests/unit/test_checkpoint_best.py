"""The checkpoint of the best validation of a run."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from megarl.checkpoint.state import Best, State, best_checkpoint
from megarl.platform.errors import UserError


def save(run_dir: Path, step: int, best: Best | None) -> Path:
    (checkpoint := run_dir / f"global_step_{step}").mkdir()
    (checkpoint / "state.json").write_text(json.dumps(asdict(State(step=step, best=best, files={}))))
    return checkpoint


def refusal(run_dir: Path) -> str:
    with pytest.raises(UserError) as error:
        best_checkpoint(run_dir)
    return str(error.value)


def test_the_newest_checkpoint_knows_the_best(tmp_path: Path) -> None:
    third = save(tmp_path, 3, Best(0.6, 3))
    for step in (5, 10):
        save(tmp_path, step, Best(0.6, 3))
        assert best_checkpoint(tmp_path) == third
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("5")  # later checkpoints are of another past
    (tmp_path / "global_step_10" / "state.json").write_text("{}")
    assert best_checkpoint(tmp_path) == third


def test_a_best_without_a_checkpoint_is_explained(tmp_path: Path) -> None:
    assert "is no run with checkpoints" in refusal(tmp_path)
    save(tmp_path, 1, None)
    assert "global_step_1 knows no validation" in refusal(tmp_path)
    save(tmp_path, 2, Best(0.5, 0))
    assert "is 0.5 at step 0: no checkpoint is better than the model that the run started from" in refusal(tmp_path)
    save(tmp_path, 4, Best(0.6, 3))
    assert "there is no global_step_3: copy it from the mirror" in refusal(tmp_path)
