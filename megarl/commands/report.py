"""Write the report of a run, or of several runs side by side: `megarl report RUN_DIR [RUN_DIR ...] [--samples]`."""

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from megarl.commands.cli.command import parse, print_error
from megarl.commands.cli.table import REPORT
from megarl.platform.errors import UserError
from megarl.platform.files import explained
from megarl.platform.terminal import print_message, visible
from megarl.report.page import write_report
from megarl.report.read import Run, read_run
from megarl.report.tracker import REPORT_FILE

CACHED_TOKENS = 1 << 18


def main(argv: Sequence[str]) -> int:
    """Write the pages and print their paths; return 1 if a directory is not that of a run, or a page fails."""
    typed = parse(REPORT, argv)
    directories: Sequence[Path] = typed["runs"]
    out = typed["out"] or (directories[0] / REPORT_FILE if len(directories) == 1 else Path(REPORT_FILE))
    try:
        runs = [read_run(directory) for directory in directories]
        pages = [write_samples(run) for run in runs] if typed["samples"] else []
        with explained(str(out)):
            write_report(runs, out)
    except (OSError, UserError) as error:
        print_error(error)
        return 1
    for page in (out, *pages):
        print(visible(str(page)))
    return 0


def write_samples(run: Run) -> Path:
    """Write the pages of the samples that a run kept, and return the first.

    Raises:
        UserError: the run kept none, or a file of samples cannot be read.
        OSError: the disk refuses a page.
    """
    from megarl.report.browser import write_browser
    from megarl.samples.reading import read_rows
    from megarl.samples.store import stored_in

    place = run.config.get("trainer", {}).get("rollout_data_dir")
    files = stored_in(Path(place)) if place else {}
    if not files:
        raise UserError(
            f"{run.directory} has no samples to show: "
            + (f"{place} has no files of them" if place else "the run had no trainer.rollout_data_dir to keep them in")
        )
    samples = ((name, read_rows(path)) for name, path in files.items())
    return write_browser(run.name, samples, run.directory, _texts_of(run.config))


def _texts_of(config: Mapping[str, Any]) -> Callable[[int], str] | None:
    """Return what writes a token as text; None if the tokenizer of the run is not here."""
    from megarl.data.tokenizer import load_tokenizer

    path = config.get("data", {}).get("tokenizer") or config["actor_rollout_ref"]["model"]["path"]
    try:
        tokenizer = load_tokenizer(path)
    except (OSError, UserError) as error:
        print_message(visible(f"note: responses are shown without their tokens, as the tokenizer is missing: {error}"))
        return None

    @lru_cache(CACHED_TOKENS)
    def text_of(token: int) -> str:
        return tokenizer.decode([token], with_special_tokens=True)

    return text_of
