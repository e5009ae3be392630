"""A run, seen from a program: its process, if the program started it, and the files of its directory."""

import contextlib
import os
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.live import Live

from megarl.api.command import TAIL, run_command
from megarl.checkpoint.directory import job_in, process_in
from megarl.commands.watch import SILENT_S, headline, picture_of
from megarl.platform.detached import CONSOLE
from megarl.platform.early import EXIT_CODE
from megarl.platform.errors import UserError
from megarl.platform.log import LOG_DIRECTORY
from megarl.platform.screen import Screen
from megarl.report.page import write_report
from megarl.report.read import read_curves, read_mapping, read_run
from megarl.report.tracker import REPORT_FILE
from megarl.tracking.jsonl import read_jsonl, table_file
from megarl.tracking.samples import GENERATIONS
from megarl.tracking.status import STATUS_FILE

if TYPE_CHECKING:
    from pandas import DataFrame

INTERVAL_S = 1.0


@dataclass(frozen=True, kw_only=True)
class TrainingRun:
    """A run of `megarl train`."""

    directory: Path
    process: subprocess.Popen[bytes] | None = None  # None: somebody else started it

    def __repr__(self) -> str:
        """Return the directory, and the state, the step and the phase of the run."""
        return f"<run {self.directory}: {self._headline()}>"

    @property
    def console(self) -> str:
        """The text that the command has printed, if `megarl.train` or the option --detach started the run."""
        file = self.directory / CONSOLE
        return file.read_text(encoding="utf-8", errors="replace") if file.is_file() else ""

    @property
    def metrics(self) -> "DataFrame":
        """The metrics of each step so far, one column each; the index is the step."""
        from pandas import DataFrame

        rows = read_curves(self.directory)
        return DataFrame(rows).set_index("step") if rows else DataFrame()

    @property
    def samples(self) -> "DataFrame":
        """The validation samples so far: step, prompt, response and score."""
        from pandas import DataFrame

        file = self.directory / table_file(GENERATIONS)
        return DataFrame(read_jsonl(file) if file.is_file() else [])

    def is_running(self) -> bool:
        """Return whether the run has not ended. A run of another program that writes nothing for long has died."""
        if self.process:
            return self.process.poll() is None
        status = read_mapping(self.directory / STATUS_FILE)
        is_silent = time.time() - status.get("time", 0.0) > SILENT_S
        return status.get("state") == "running" and (not is_silent or job_in(self.directory) is not None)

    def wait(self) -> "TrainingRun":
        """Wait for the end, and show the curves meanwhile on a terminal or in a notebook; return this run.

        Raises:
            UserError: the run failed; has the end of what it printed.
        """
        screen = Screen()
        shown = Live(console=screen, auto_refresh=False) if screen.is_terminal or screen.is_jupyter else None
        with shown or contextlib.nullcontext():
            while self.is_running():
                if shown:
                    shown.update(picture_of(self.directory), refresh=True)
                time.sleep(INTERVAL_S)
        code = self.process.wait() if self.process else 0
        if code not in (0, EXIT_CODE):
            raise UserError(f"the run {self.directory} ended with code {code}; it printed\n{self.console[-TAIL:]}")
        if not self.process and read_mapping(self.directory / STATUS_FILE).get("state") == "running":
            raise UserError(
                f"the run {self.directory} has died: no job has the directory, and nothing is written to it"
            )
        return self

    def stop(self) -> "TrainingRun":
        """Ask the run to finish its step, to save and to end. The next `megarl.train` of its directory resumes it.

        Raises:
            UserError: the run is at work on another machine, or has died.
        """
        if self.process:
            self.process.send_signal(signal.SIGTERM)
        elif self.is_running():
            process = process_in(self.directory)
            if process is None:
                job = job_in(self.directory) or "an unknown process"
                raise UserError(f"{job} trains in {self.directory}, and is no process of yours here: stop it there")
            os.kill(process, signal.SIGTERM)
        return self.wait()

    def report(self) -> Path:
        """Write the page about the run, and return its file."""
        page = self.directory / REPORT_FILE
        write_report([read_run(self.directory)], page)
        return page

    def export(self, out: str | Path, *, best: bool = False) -> Path:
        """Write the latest checkpoint, or the best, as a Hugging Face directory, and return that.

        Raises:
            UserError: there is no checkpoint, or it cannot be written.
        """
        run_command("export", str(self.directory), str(out), *(["--best"] if best else []))
        return Path(out)

    def chat(self, text: str, *, temperature: float = 0.7, max_tokens: int = 512) -> str:
        """Return the response of the latest checkpoint to a text. Each call starts an engine, which takes a while."""
        options = ("--temperature", str(temperature), "--max-tokens", str(max_tokens))
        return run_command("chat", str(self.directory), "--prompt", text, *options).strip()

    def _headline(self) -> str:
        status = read_mapping(self.directory / STATUS_FILE)
        try:
            return headline(read_run(self.directory), status, time.time())
        except UserError:  # nothing is recorded yet
            return "starting" if self.is_running() else "nothing is recorded"


def load_run(directory: str | Path) -> TrainingRun:
    """Return the run of a directory.

    Raises:
        UserError: no run has begun there.
    """
    place = Path(directory).expanduser().absolute()
    if not (place / LOG_DIRECTORY).is_dir():
        read_run(place)
    return TrainingRun(directory=place)
