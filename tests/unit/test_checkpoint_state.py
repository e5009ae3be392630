"""States that no run has are named and refused, even if their checkpoint is intact."""

import json
from pathlib import Path
from typing import Any

import pytest

from megarl.checkpoint.state import Best, State
from megarl.data.order import Position
from megarl.platform.small_files import Damage

SOUND: dict[str, Any] = {
    "step": 12,
    "kl_coef": 0.1,
    "position": {"epoch": 3, "offset": 0},
    "best": {"score": 0.5, "step": 12},
    "mismatches": [0.0, 1e-4],
}


def read(directory: Path, **changes: Any) -> State:
    (checkpoint := directory / "global_step_12").mkdir(exist_ok=True)
    (checkpoint / "state.json").write_text(json.dumps(SOUND | changes))
    return State.read(checkpoint)


def test_a_sound_state_is_read(tmp_path: Path) -> None:
    expected = State(step=12, kl_coef=0.1, position=Position(3, 0), best=Best(0.5, 12), mismatches=(0.0, 1e-4))
    assert read(tmp_path) == expected
    read(tmp_path, kl_coef=None, position=None, best=None, mismatches=[], metrics={"val/loss": float("nan")})


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ({"step": 17}, "it is of step 17, in the checkpoint of step 12"),
        ({"step": -1}, "step -1"),
        ({"step": 10**17}, "step 1"),
        ({"kl_coef": float("nan")}, "kl_coef nan"),
        ({"kl_coef": float("inf")}, "kl_coef inf"),
        ({"kl_coef": -0.1}, "kl_coef -0.1"),
        ({"position": {"epoch": 0, "offset": -1}}, "position: epoch 0, offset -1"),
        ({"position": {"epoch": 10**15, "offset": 0}}, "position: epoch 1"),
        ({"best": {"score": 0.5, "step": 13}}, "best: score 0.5 at step 13 of 12"),
        ({"best": {"score": float("nan"), "step": 3}}, "best: score nan"),
        ({"mismatches": [0.0, float("nan")]}, "mismatches 0.0, nan"),
        ({"mismatches": [-1.0]}, "mismatches -1.0"),
    ],
    ids=str,
)
def test_an_impossible_state_is_named(tmp_path: Path, changes: dict[str, Any], cause: str) -> None:
    with pytest.raises(Damage) as damage:
        read(tmp_path, **changes)
    assert str(damage.value).startswith(f"{tmp_path}/global_step_12/state.json is damaged: {cause}")


def test_the_name_of_a_link_is_no_step(tmp_path: Path) -> None:
    read(tmp_path)
    (tmp_path / "global_step_3").symlink_to("global_step_12")
    assert State.read(tmp_path / "global_step_3").step == 12
