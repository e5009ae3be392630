"""The complete responses of a running step, in files of the run's directory: a run that is killed draws only the rest.

RUN_DIR/kept/step_40-0f3a.../00007-2.parquet   samples of replica 2 in groups that became complete at an exchange

The name of the directory has a digest of everything that the responses follow from: the configuration, and the
checkpoint that the step starts from. So a run reads only what itself would draw. A step that starts from no checkpoint
keeps nothing, because no run can resume at it. A file is there completely or not at all, and the files of a step are
removed when another step begins. A group is drawn again if one of its files is missing or damaged.
"""

import hashlib
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from megarl.batch import Group
from megarl.checkpoint.directory import STATE_FILE
from megarl.distributed.exchange import on_each_rank, on_first_rank
from megarl.distributed.sharded import Shares
from megarl.platform.files import write_whole
from megarl.platform.small_files import Damage
from megarl.samples.in_flight import PromptOf, SampleRow, joined, rows_of, to_bytes

KEPT = "kept"
DIGITS = 16  # of the digest


class StepCache:
    """The files of one step at a time."""

    def __init__(
        self,
        run_dir: Path,
        *,
        config: str,
        checkpoint_of: Callable[[int], Path | None],
        prompt_of: PromptOf,
        shares: Shares,
    ) -> None:
        """Keep files in `run_dir`.

        Args:
            run_dir: the directory of the run.
            config: the settings that the responses follow from.
            checkpoint_of: returns the place of the checkpoint that a step starts from; None: the start of the run.
            prompt_of: returns the prompt of a row of the data set.
            shares: of the engine replicas.
        """
        self._directory = run_dir / KEPT
        self._config = config
        self._checkpoint_of = checkpoint_of
        self._prompt_of = prompt_of
        self._shares = shares
        self._place: Path | None = None  # of the step; None: nothing is kept
        self._number = 0  # of the next file

    def begin(self, step: int, groups: Sequence[Group]) -> dict[int, Group]:
        """Begin a step, counted from 0. Return those of its groups that an earlier job kept, by number. Collective."""
        self._place, files = on_first_rank(lambda: self._begin(step))
        self._number = 1 + max((int(file.stem.partition("-")[0]) for file in files), default=-1)
        taken = files[self._shares.here :: self._shares.number]
        mine = on_each_rank(lambda: [row for file in taken for row in _rows_if_intact(file)])
        found = joined(mine, self._shares, self._prompt_of)
        return {
            number: group
            for number, group in found.items()
            if number < len(groups)
            and group.prompt.index == groups[number].prompt.index
            and len(group.samples) == len(groups[number].samples)
        }

    def keep(self, groups: Mapping[int, Group]) -> None:
        """Write groups that are complete, by number. Collective."""
        on_each_rank(lambda: self._keep(groups))

    def _begin(self, step: int) -> tuple[Path | None, list[Path]]:
        place = self._place_of(step)
        for other in self._directory.glob("step_*"):
            if other != place:
                shutil.rmtree(other)
        return place, sorted(place.glob("*.parquet")) if place else []

    def _keep(self, groups: Mapping[int, Group]) -> None:
        if self._place and groups and self._shares.reports:
            self._place.mkdir(parents=True, exist_ok=True)
            name = f"{self._number:05}-{self._shares.here}.parquet"
            write_whole(self._place / name, to_bytes(groups, self._shares))
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


def _rows_if_intact(path: Path) -> list[SampleRow]:
    """Return the rows of a file; none if the disk has damaged it."""
    with suppress(Damage):
        return rows_of(path)
    return []
