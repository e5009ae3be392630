"""The complete responses of a running step, in files of the run's directory: a run that is killed draws only the rest.

RUN_DIR/kept/step_40-0f3a.../00007.parquet   groups that became complete between two exchanges, as in `in_flight`

The name of the directory has a digest of everything that the responses follow from: the configuration, and the
checkpoint that the step starts from. So a run reads only what itself would draw. A step that starts from no checkpoint
keeps nothing, because no run can resume at it. A file is there completely or not at all, and the files of a step are
removed when another step begins.
"""

import hashlib
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from megarl.batch import Group, Prompt
from megarl.checkpoint.directory import STATE_FILE
from megarl.distributed.exchange import on_first_rank
from megarl.platform.errors import UserError
from megarl.platform.files import write_whole
from megarl.platform.small_files import Damage
from megarl.samples.in_flight import read, to_bytes

KEPT = "kept"
DIGITS = 16  # of the digest


class StepCache:
    """The files of one step at a time. The first rank reads and writes them."""

    def __init__(
        self,
        run_dir: Path,
        *,
        config: str,
        checkpoint_of: Callable[[int], Path | None],
        prompt_of: Callable[[int], Prompt],
    ) -> None:
        """Keep files in `run_dir`.

        Args:
            run_dir: the directory of the run.
            config: the settings that the responses follow from.
            checkpoint_of: returns the place of the checkpoint that a step starts from; None: the start of the run.
            prompt_of: returns the prompt of a row of the data set.
        """
        self._directory = run_dir / KEPT
        self._config = config
        self._checkpoint_of = checkpoint_of
        self._prompt_of = prompt_of
        self._place: Path | None = None  # of the step; None: nothing is kept
        self._number = 0  # of the next file

    def begin(self, step: int) -> dict[int, Group]:
        """Begin a step, counted from 0. Return the groups that an earlier job kept, by row of the data. Collective."""
        return on_first_rank(lambda: self._begin(step))

    def keep(self, groups: Sequence[Group]) -> None:
        """Write groups that are complete. Collective."""
        on_first_rank(lambda: self._keep(groups))

    def _begin(self, step: int) -> dict[int, Group]:
        self._place = self._place_of(step)
        self._number = 0
        for other in self._directory.glob("step_*"):
            if other != self._place:
                shutil.rmtree(other)
        found = dict[int, Group]()
        for file in sorted(self._place.glob("*.parquet")) if self._place else ():
            self._number += 1
            with suppress(Damage, UserError):  # of a damaged disk or of other data: these are drawn again
                found |= {group.prompt.index: group for group in read(file, self._prompt_of)}
        return found

    def _keep(self, groups: Sequence[Group]) -> None:
        if self._place and groups:
            self._place.mkdir(parents=True, exist_ok=True)
            write_whole(self._place / f"{self._number:05}.parquet", to_bytes(groups))
            self._number += 1

    def _place_of(self, step: int) -> Path | None:
        digest = hashlib.sha256(self._config.encode())
        checkpoint = self._checkpoint_of(step)
        if checkpoint:
            try:
                digest.update((checkpoint / STATE_FILE).read_bytes())
            except FileNotFoundError:
                return None
        return self._directory / f"step_{step}-{digest.hexdigest()[:DIGITS]}"
