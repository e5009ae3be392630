"""TensorBoard: event files, read back as TensorBoard itself reads them."""

import logging
from pathlib import Path
from typing import Any

import pytest

from megarl.tracking.protocol import Tracker
from tests.support.trackers import tracker_of


def tracker(run_dir: Path, **options: Any) -> Tracker:
    return tracker_of("tensorboard", run_dir, **{"params": {"data": {"seed": 1}}} | options)


def read(run_dir: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run_dir / "tensorboard"), size_guidance={"scalars": 0, "tensors": 0})
    events.Reload()
    return events


def losses(run_dir: Path) -> list[tuple[int, float]]:
    return [(event.step, event.value) for event in read(run_dir).Scalars("actor/loss")]


def text(run_dir: Path, name: str) -> str:
    return read(run_dir).Tensors(f"{name}/text_summary")[-1].tensor_proto.string_val[0].decode()


def test_scalars_tables_and_configuration_are_written_immediately(tmp_path: Path) -> None:
    run = tracker(tmp_path)
    run.log({"actor/loss": 0.25, "val-core/countdown/mean@4": 1.0}, step=1)
    run.log_table("val/generations", [{"prompt": "a|b\n<i>", "score": 1.0}, {"prompt": "c", "score": 0.5}], step=1)
    assert losses(tmp_path) == [(1, 0.25)]  # before any close
    assert [event.value for event in read(tmp_path).Scalars("val-core/countdown/mean@4")] == [1.0]
    assert text(tmp_path, "val/generations").splitlines() == [
        "| prompt | score |",
        "| --- | --- |",
        "| a&#124;b<br>&lt;i> | 1 |",
        "| c | 0.5 |",
    ]
    assert text(tmp_path, "config").split() == ["data:", "seed:", "1"]
    run.close([{"exported": "runs/hf"}], ending="stopped")
    assert text(tmp_path, "summary").split() == ["run", "stopped", "exported=runs/hf"]


def test_steps_that_are_taken_again_are_shown_once(tmp_path: Path) -> None:
    first = tracker(tmp_path)  # never closed, as in a run that was killed
    for step in (1, 2, 3, 4):
        first.log({"actor/loss": float(step)}, step=step)
    again = tracker(tmp_path, resume_step=2, resume_metrics={"actor/loss": 2.0})
    again.log({"actor/loss": 30.0}, step=3)
    assert losses(tmp_path) == [(1, 1.0), (2, 2.0), (3, 30.0)]
    again.close()
    tracker(tmp_path).close()  # a new run in the same place
    assert "actor/loss" not in read(tmp_path).Tags()["scalars"]


def test_saved_step_without_record_is_recorded_on_resume(tmp_path: Path) -> None:
    run = tracker(tmp_path)
    run.log({"actor/loss": 1.0}, step=1)
    tracker(tmp_path, resume_step=2, resume_metrics={"actor/loss": 2.0}).close()
    assert losses(tmp_path) == [(1, 1.0), (2, 2.0)]


def test_a_writer_that_fails_ends_no_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from torch.utils.tensorboard import SummaryWriter

    run = tracker(tmp_path)
    with caplog.at_level(logging.WARNING), monkeypatch.context() as broken:
        broken.setattr(SummaryWriter, "flush", lambda self: (_ for _ in ()).throw(OSError("no space left")))
        run.log({"actor/loss": 1.0}, step=1)
        run.log({"actor/loss": 2.0}, step=2)
    run.log({"actor/loss": 3.0}, step=3)
    run.close()
    assert caplog.text.count("tensorboard accepts no records") == 1
    assert losses(tmp_path)[-1] == (3, 3.0)
