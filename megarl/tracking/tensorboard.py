"""TensorBoard: event files in the run's directory, with metrics as scalars and tables as text."""

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import yaml
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from torch.utils.tensorboard import SummaryWriter

from megarl.platform.safe_names import tensorboard_tag
from megarl.platform.terminal import shortened
from megarl.tracking.jsonl import Jsonl
from megarl.tracking.names import Ending
from megarl.tracking.protocol import Row
from megarl.tracking.run import TrackedRun

DIRECTORY = "tensorboard"
PARAMS = "config"
SUMMARY = "summary"
MAX_CELL = 2000  # characters of a sample shown


class TensorBoard:
    """`tensorboard/` in the run's directory; an event is in its file when `log` returns.

    After a resume TensorBoard hides events of steps after `resume_step`, because those steps run again, and
    `resume_metrics` become the events of that step if it has none. Without `resume_step` the files of an
    earlier run are replaced. OSError if the disk accepts no events.
    """

    def __init__(self, run: TrackedRun, records: Jsonl) -> None:
        del records  # its own files have all that it was given
        directory = run.run_dir / DIRECTORY
        resume_step = run.resume_step
        if resume_step is None and directory.exists():
            shutil.rmtree(directory)
        last = _last_step(directory)
        purge = None if resume_step is None else resume_step + 1
        self._writer = SummaryWriter(str(directory), purge_step=purge)
        shown = yaml.safe_dump(dict(run.params), sort_keys=False, allow_unicode=True)
        self._writer.add_text(PARAMS, _indented(shown), resume_step or 0)
        if resume_step is not None and run.resume_metrics and last < resume_step:
            self.log(run.resume_metrics, step=resume_step)
        self._writer.flush()

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Write one scalar per metric."""
        for name, value in metrics.items():
            self._writer.add_scalar(tensorboard_tag(name), value, step)
        self._writer.flush()

    def log_table(self, name: str, rows: Sequence[Row], *, step: int) -> None:
        """Write the rows as one Markdown table."""
        if rows:
            columns = list(rows[0])
            cells = [[_cell(value) for value in row.values()] for row in rows]
            lines = [columns, ["---"] * len(columns), *cells]
            self._writer.add_text(tensorboard_tag(name), "\n".join(f"| {' | '.join(line)} |" for line in lines), step)
            self._writer.flush()

    def close(self, summary_rows: Sequence[Row] = (), *, ending: Ending = "finished") -> None:
        """Write how the run ended, with its summary, and close the file."""
        lines = [f"run {ending}"]
        for row in summary_rows:
            lines.append("  ".join(f"{key}={value}" for key, value in row.items()))
        self._writer.add_text(SUMMARY, _indented("\n".join(lines)))
        self._writer.close()


def _last_step(directory: Path) -> int:
    """Return the last step that earlier event files have, -1 if they have none."""
    files = sorted(directory.glob("events.out.tfevents.*"))
    return max((event.step for file in files[-1:] for event in EventFileLoader(str(file)).Load()), default=-1)


def _indented(text: str) -> str:
    """Return Markdown that shows `text` as it is."""
    return "\n".join(f"    {line}" for line in text.splitlines())


def _cell(value: object) -> str:
    """Return one line of a Markdown cell: what Markdown or HTML would read is escaped, a long text is cut."""
    text = shortened(f"{value:.6g}" if isinstance(value, float) else str(value), MAX_CELL)
    for character, written in (("&", "&amp;"), ("<", "&lt;"), ("|", "&#124;"), ("\n", "<br>")):
        text = text.replace(character, written)
    return text
