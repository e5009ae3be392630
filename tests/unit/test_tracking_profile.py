"""A trace is one whole file for a chosen step, and costs the other steps nothing."""

import gzip
import json
from pathlib import Path

import pytest
import torch

from megarl.tracking.profile import Traces


def names_in(path: Path) -> set[str]:
    return {event["name"] for event in json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]}


def test_only_a_chosen_step_is_traced(tmp_path: Path) -> None:
    traces = Traces(steps=[2], run_dir=tmp_path, rank=3)
    for step in (1, 2, 3):
        with traces.of_step(step):
            torch.ones(4, 4) @ torch.ones(4, 4)
    [path] = (path for path in tmp_path.rglob("*") if path.is_file())
    assert path == traces.path(2) == tmp_path / "profile" / "step_2_rank_3.json.gz"
    assert "aten::mm" in names_in(path)


def test_a_step_that_fails_leaves_no_trace(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), Traces(steps=[1], run_dir=tmp_path, rank=0).of_step(1):
        _ = 1 / 0
    assert list(tmp_path.iterdir()) == []
