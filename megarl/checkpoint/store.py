"""A run's checkpoints on disk: whole or not at all, the latest by name, the oldest removed.

    RUN_DIR/global_step_40/{actor,critic}/   Megatron's shards: weights, optimizer, schedule
                          /rng/rank_0.pt     generator states of each rank
                          /huggingface/      config and tokenizer, for export; with `save_huggingface` the weights too
                          /huggingface_critic/  with `save_huggingface`, the critic as a classifier
                          /state.json        what the run knows beside its models (`State`)
                          /config.yaml ...   what the run was, as texts
                          /manifest.json     size and checksum of every file
    RUN_DIR/latest_checkpointed_iteration.txt

A checkpoint is written under another name, brought to the disk, given its manifest and renamed, so a crash leaves the
one before; one that is damaged later is passed over. All ranks see the same RUN_DIR. What is written beside training is
the state of when it was saved, and the one before stays the latest until it is whole. A save that a disk does not take
is tried again with the next one; only at the end it is an error. An old one that cannot be removed is never one.
"""

import json
import logging
import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property, partial
from pathlib import Path

import torch
import torch.distributed as dist

from megarl.checkpoint.background import Background, Task, run_blocking
from megarl.checkpoint.contents import RNG
from megarl.checkpoint.directory import STEP_PREFIX, latest_step, name_latest, publish, remove, saved_steps
from megarl.checkpoint.failures import Failures, require_space, with_write_errors
from megarl.checkpoint.manifest import STATE_FILE, sealing
from megarl.checkpoint.mirror import Mirror
from megarl.checkpoint.state import State
from megarl.distributed import watchdog
from megarl.distributed.exchange import on_first_rank, together
from megarl.learner.checkpoint import Writing, load_learner, save_learner
from megarl.learner.learner import Learner
from megarl.learner.randomness import random_states, read_random_states, set_random_states, states_file
from megarl.learner.staging import Staging
from megarl.models.architecture import hf_shapes
from megarl.platform.files import explained, remedy, write_whole

logger = logging.getLogger(__name__)

HUGGINGFACE = "huggingface"


@dataclass(frozen=True, kw_only=True)
class CheckpointStore:
    """The checkpoints of one run."""

    directory: Path
    learners: Mapping[str, Learner]
    keep: int | None  # None: all
    write_huggingface: Callable[[Path], None]  # writes config and tokenizer to a directory
    export: Callable[[Path], None] | None = None  # writes weights for others too, into a checkpoint; collective
    texts: Callable[[], Mapping[str, str]] = dict  # further texts by the names of their files
    is_async: bool = False
    mirror: Mirror | None = None
    background: Background = field(default_factory=Background)
    failures: Failures = field(default_factory=Failures)
    needed: set[Path] = field(default_factory=set)  # what the run goes on from, until one of its own is whole

    @cached_property
    def _staging(self) -> Staging:
        return Staging(is_pinned=self.is_async)

    @property
    def num_bytes(self) -> int:
        """About what a checkpoint takes: weights and, where something learns, those in float32 and two moments."""
        return sum(
            sum(map(math.prod, hf_shapes(learner.architecture).values()))
            * (learner.modules[0].config.params_dtype.itemsize + (12 if learner.optimizer else 0))
            for learner in self.learners.values()
        )

    def save(self, state: State) -> None:
        """Write the checkpoint of a run in `state`, or begin to, when the one before is whole. Collective."""
        with self.failures.tolerated(self.directory):
            self.background.finish()
        task = with_write_errors(self._saving(state), f"the checkpoint of step {state.step}")
        with self.failures.tolerated(self.directory):
            if self.is_async:
                self.background.start(task)
            else:
                run_blocking(task)

    def advance(self) -> dict[str, float]:
        """Bring what is done beside training further, without waiting for it; once after every step. Collective.

        Returns metrics of what could not be saved, and of what the mirror has come to.
        """
        with self.failures.tolerated(self.directory):
            self.background.advance()
        return self.failures.metrics() | (self.mirror.advance() if self.mirror else {})

    def close(self) -> None:
        """Wait for what is done beside training, at the end of a run that did not fail. Collective.

        Raises:
            WriteError: the save that came last could not be written.
        """
        watchdog.note(phase="save_checkpoint")
        with self.failures.tolerated(self.directory):
            self.background.finish()
        if self.mirror:
            self.mirror.close()
            on_first_rank(self._remove_old)
        self.failures.raise_last()

    def _saving(self, state: State) -> Task:
        final = self.directory / f"{STEP_PREFIX}{state.step}"
        part = self.directory / f".{final.name}.part"
        on_first_rank(lambda: _make_empty(part, list(self.learners)))
        require_space(part, self.num_bytes)
        writings = [save_learner(learner, part / name, self._staging) for name, learner in self.learners.items()]
        together(lambda: _write_random_states(states_file(part / RNG, rank=dist.get_rank())))
        on_first_rank(lambda: self._write_small_files(part, state))
        if self.export:
            self.export(part)
        yield partial(_write_all, writings)
        for writing in writings:
            writing.finish()
        if not self.is_async:
            self._staging.release()
        yield from sealing(part)
        yield lambda: self._publish(part, final, state.step) if dist.get_rank() == 0 else None
        self.failures.over()
        if self.mirror:
            self.mirror.follow(state.step)

    def load(self, checkpoint: Path) -> State:
        """Bring the learners and generators to the state of `checkpoint`. Collective. Raises Damage."""
        for name, learner in self.learners.items():
            load_learner(learner, checkpoint / name)
        if states := read_random_states(checkpoint / RNG, rank=dist.get_rank()):
            set_random_states(states)
        self.needed.add(checkpoint)
        if self.mirror:
            self.mirror.remember(checkpoint)
        return State.read(checkpoint)

    def _write_small_files(self, part: Path, state: State) -> None:
        with explained(str(part)):
            self.write_huggingface(part / HUGGINGFACE)
        for name, text in self.texts().items():
            write_whole(part / name, text.encode())
        write_whole(part / STATE_FILE, json.dumps(asdict(state)).encode())

    def _publish(self, part: Path, final: Path, step: int) -> None:
        """Give a whole checkpoint its name, and remove the oldest."""
        publish(part, final)
        name_latest(self.directory, step)
        self.needed.clear()
        self._remove_old()

    def _remove_old(self) -> None:
        """Remove what is more than to be kept; what is being uploaded, or cannot be removed now, the next time."""
        steps, latest = sorted(saved_steps(self.directory)), latest_step(self.directory)
        for step in steps[: -self.keep] if self.keep else []:
            checkpoint = self.directory / f"{STEP_PREFIX}{step}"
            if step in (latest, self.mirror and self.mirror.under_way) or checkpoint in self.needed:
                continue
            try:
                remove(self.directory, step)
            except OSError as error:  # the new one is whole all the same
                logger.warning("%s is not removed, though there are newer ones: %s", checkpoint, remedy(error))


def _write_all(writings: Sequence[Writing]) -> None:
    for writing in writings:
        writing.write()


def _make_empty(part: Path, names: list[str]) -> None:
    shutil.rmtree(part, ignore_errors=True)
    for name in (*names, RNG, HUGGINGFACE):
        (part / name).mkdir(parents=True)


def _write_random_states(path: Path) -> None:
    with path.open("wb") as file:  # given a path, torch does not say why it cannot write
        torch.save(random_states(), file)
