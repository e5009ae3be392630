"""The complete responses of a running step, in files of the run's directory: a run that is killed draws only the rest.

RUN_DIR/kept/step_40-0f3a.../00007-2.parquet   samples of replica 2 in groups that became complete at an exchange

The name of the directory has a digest of everything that the responses follow from: the configuration, the checkpoint
that the step starts from, and the tokens of its prompts. So a run reads only what itself would draw. A step that starts
from no checkpoint keeps nothing, because no run can resume at it. A file is there completely or not at all, and the
files of a step are removed when another step begins. A group is drawn again if one of its files is missing or damaged.
If the disk refuses a file, the run continues, and a rank keeps nothing more of the step.
"""

import hashlib
import logging
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path

import numpy as np

from megarl.batch import Group, Prompt
from megarl.checkpoint.directory import STATE_FILE
from megarl.distributed.exchange import in_shares, on_each_rank, on_first_rank
from megarl.distributed.sharded import Shares
from megarl.platform.files import remedy, write_whole
from megarl.platform.small_files import Damage
from megarl.samples.in_flight import SampleRow, joined, rows_of, to_bytes

logger = logging.getLogger(__name__)

KEPT = "kept"
DIGITS = 16  # of the digest
_NAME = re.compile(r"\d+-\d+\.parquet")


class StepCache:
    """The files of one step at a time."""

    def __init__(
        self,
        run_dir: Path,
        *,
        config: str,
        checkpoint_of: Callable[[int], Path | None],
        shares: Shares,
    ) -> None:
        """Keep files in `run_dir`.

        Args:
            run_dir: the directory of the run.
            config: the settings that the responses follow from.
            checkpoint_of: returns the place of the checkpoint that a step starts from; None: the start of the run.
            shares: of the engine replicas.
        """
        self._directory = run_dir / KEPT
        self._config = config
        self._checkpoint_of = checkpoint_of
        self._shares = shares
        self._place: Path | None = None  # of the step; None: nothing is kept
        self._number = 0  # of the next file

    def begin(self, step: int, groups: Sequence[Group]) -> dict[int, Group]:
        """Begin a step, counted from 0. Return those of its groups that an earlier job kept, by number. Collective."""
        digests = in_shares(len(groups), lambda places: [_digest_of(groups[place].prompt) for place in places])
        prompts_digest = b"".join(chain.from_iterable(digests))
        self._place, files = on_first_rank(lambda: self._begin(step, prompts_digest))
        self._number = 1 + max((int(file.stem.partition("-")[0]) for file in files), default=-1)
        if not files:
            return {}
        taken = files[self._shares.here :: self._shares.number]
        mine = on_each_rank(lambda: [row for file in taken for row in _rows_if_intact(file)])
        prompts = {group.prompt.index: group.prompt for group in groups}
        found = joined(mine, self._shares, prompts.__getitem__)
        return {number: group for number, group in found.items() if len(group.samples) == len(groups[number].samples)}

    def write(self, groups: Mapping[int, Group]) -> None:
        """Write groups that are complete, by number, at least those of this rank's replica. Collective."""
        on_each_rank(lambda: self._write(groups))

    def _begin(self, step: int, prompts_digest: bytes) -> tuple[Path | None, list[Path]]:
        place = self._place_of(step, prompts_digest)
        for other in self._directory.glob("step_*"):
            if other != place:
                shutil.rmtree(other, ignore_errors=True)  # the next step tries again
        files = place.glob("*.parquet") if place else ()
        return place, sorted(file for file in files if _NAME.fullmatch(file.name))

    def _write(self, groups: Mapping[int, Group]) -> None:
        if self._place and groups and self._shares.reports:
            path = self._place / f"{self._number:05}-{self._shares.here}.parquet"
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                write_whole(path, to_bytes(groups, self._shares))
            except OSError as error:
                logger.warning("%s was not written, training continues: %s", path, remedy(error))
                self._place = None
        self._number += 1

    def _place_of(self, step: int, prompts_digest: bytes) -> Path | None:
        digest = hashlib.sha256(self._config.encode())
        digest.update(prompts_digest)
        checkpoint = self._checkpoint_of(step)
        if checkpoint:
            try:
                digest.update((checkpoint / STATE_FILE).read_bytes())
            except FileNotFoundError:
                return None
        return self._directory / f"step_{step}-{digest.hexdigest()[:DIGITS]}"


def _digest_of(prompt: Prompt) -> bytes:
    content = np.asarray([prompt.index, *prompt.token_ids], dtype=np.int64)
    return hashlib.sha256(content.tobytes()).digest()


def _rows_if_intact(path: Path) -> list[SampleRow]:
    """Return the rows of a file; none if the disk has damaged it."""
    with suppress(Damage):
        return rows_of(path)
    return []
