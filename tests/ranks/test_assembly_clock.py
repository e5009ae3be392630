"""All ranks of a run give templates the same time, which is that of the first start after every resume."""

from datetime import datetime
from pathlib import Path

import pytest
import torch.distributed as dist

from megarl.assembly.resume import template_time
from megarl.checkpoint.state import State
from megarl.checkpoint.store import CheckpointStore
from megarl.checkpoint.template_time import TIME_FILE, record_time
from megarl.distributed.exchange import on_first_rank
from megarl.tracking.config import TrainerSection
from tests.support.ranks import RankPool

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(600)]
FIRST, OTHER = datetime(2024, 2, 29, 23, 59, 58), datetime(2025, 1, 1)


def times(directory: Path) -> dict[str, datetime]:
    """Return the times that this rank reads when jobs start in different ways."""
    here, other = directory / "here", directory / "other"
    new = template_time(TrainerSection(default_local_dir=str(here)))
    on_first_rank(here.mkdir)
    on_first_rank(lambda: record_time(here, FIRST))
    texts = {TIME_FILE: OTHER.isoformat()}
    run = CheckpointStore(directory=other, learners={}, keep=None, texts=texts)
    run.save(State(step=2))
    found = {
        "new": new,
        "resumed": template_time(TrainerSection(default_local_dir=str(here))),
        "afresh": template_time(TrainerSection(default_local_dir=str(here), resume_mode="disable")),
        "from another": template_time(
            TrainerSection(
                default_local_dir=str(here), resume_mode="resume_path", resume_from_path=str(other / "global_step_2")
            )
        ),
        "without its own file": template_time(TrainerSection(default_local_dir=str(other))),
    }
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(dist.get_rank()))
        found["restarted"] = template_time(TrainerSection(default_local_dir=str(here), resume_mode="disable"))
    return found


def test_templates_see_one_time(pool: RankPool, tmp_path: Path) -> None:
    one, other = pool.run(2, times, tmp_path)
    assert one == other
    assert {name for name, time in one.items() if abs((datetime.now() - time).total_seconds()) < 3600} == {
        "new",
        "afresh",
    }
    assert one["resumed"] == one["restarted"] == FIRST
    assert one["from another"] == one["without its own file"] == OTHER
