"""Traces of chosen steps by torch's profiler: RUN_DIR/profile/step_3_rank_0.json.gz, for https://ui.perfetto.dev."""

import shutil
import tempfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from megarl.distributed.launch import Launch
from megarl.platform.device import on_cuda
from megarl.platform.files import replacing
from megarl.tracking.config import TrainerSection

DIRECTORY = "profile"


@dataclass(frozen=True, kw_only=True)
class Traces:
    """The steps to trace, counted from 1, and the place of the traces of this rank."""

    steps: Collection[int]
    run_dir: Path
    rank: int

    def path(self, step: int) -> Path:
        """Return the file of a step."""
        return self.run_dir / DIRECTORY / f"step_{step}_rank_{self.rank}.json.gz"

    @contextmanager
    def of_step(self, step: int) -> Iterator[None]:
        """Trace the block if the step is to be traced. An error within the block leaves no file."""
        if step not in self.steps:
            yield
            return
        from torch.profiler import ProfilerActivity, profile

        on_device = [ProfilerActivity.CUDA] if on_cuda() else []
        with profile(activities=[ProfilerActivity.CPU, *on_device]) as trace:
            yield
        path = self.path(step)
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(suffix=".json.gz") as written, replacing(path) as file:
            trace.export_chrome_trace(written.name)
            with Path(written.name).open("rb") as source:
                shutil.copyfileobj(source, file)


def make_traces(trainer: TrainerSection, launch: Launch) -> Traces:
    """Return the traces that a run asks of this rank."""
    return Traces(steps=trainer.profile_steps, run_dir=Path(trainer.default_local_dir), rank=launch.rank)
