"""A run's checkpoints on disk: complete or absent, the latest by name, the oldest removed, the best kept.

    RUN_DIR/global_step_40/{actor,critic}/   Megatron's shards: weights, or adapters alone; optimizer, schedule
                          /random_states.pt  generator states of each rank
                          /huggingface/      config and tokenizer, for export; with `save_huggingface` the weights too
                          /huggingface_critic/  with `save_huggingface`, the critic as a classifier
                          /state.json        the state of the run except its models (`State`)
                          /carried-00000.parquet ...  responses of each replica that continue, if any do
                          /config.yaml ...   the run's configuration, versions, models and code, as texts
                          /manifest.json     size and checksum of every file
    RUN_DIR/latest_checkpointed_iteration.txt

A checkpoint is written under another name, flushed to the disk, given its manifest and renamed, so a crash leaves the
checkpoint before it; a checkpoint that is damaged later is skipped. All ranks see the same RUN_DIR. A checkpoint that
is written asynchronously holds the state at the time of the save, and the checkpoint before stays the latest until it
is complete. A save that fails is reported, and the next save tries again; if the last save of a run fails, the run
raises an error. An old checkpoint that cannot be removed is only a warning.
"""

import json
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import cached_property, partial
from pathlib import Path
from types import MappingProxyType

import torch.distributed as dist

from megarl.checkpoint.background import Background, Task, run_blocking
from megarl.checkpoint.contents import RANDOM_STATES
from megarl.checkpoint.directory import (
    HUGGINGFACE,
    STATE_FILE,
    STEP_PREFIX,
    latest_step,
    make_empty,
    name_latest,
    remove,
    saved_steps,
)
from megarl.checkpoint.failures import Failures, require_space, with_write_errors
from megarl.checkpoint.huggingface import SavedModel
from megarl.checkpoint.manifest import sealing
from megarl.checkpoint.mirror import Mirror
from megarl.checkpoint.state import State
from megarl.checkpoint.template_time import TIME_FILE, recorded_time
from megarl.distributed import watchdog
from megarl.distributed.exchange import on_first_rank, together
from megarl.learner.checkpoint import load_learner, save_learner, saved_shapes, write_all
from megarl.learner.learner import Learner
from megarl.learner.randomness import load_random_states, write_random_states
from megarl.learner.staging import Staging
from megarl.models.peft import write_adapter_config
from megarl.platform.files import explained, publish, remedy, write_whole
from megarl.tracking.run_id import known_run_ids

logger = logging.getLogger(__name__)


class CheckpointStore:
    """The checkpoints of one run."""

    def __init__(
        self,
        directory: Path,
        learners: Mapping[str, Learner],
        *,
        keep: int | None,
        models: Sequence[SavedModel] = (),
        with_weights: bool = False,
        texts: Mapping[str, str] = MappingProxyType({}),
        is_async: bool = False,
        mirror: Mirror | None = None,
    ) -> None:
        """Save the state of `learners`, by name, below `directory`.

        Args:
            directory: of the run.
            learners: the models by their names in checkpoints.
            keep: the number of newest checkpoints that stay, besides the best; None: all.
            models: in Hugging Face's format; without weights, config and tokenizer of the first.
            with_weights: whether checkpoints have the weights in Hugging Face's format too.
            texts: further small files, by name.
            is_async: whether files are written asynchronously to training.
            mirror: keeps a second copy of the checkpoints.
        """
        self.directory = directory
        self.learners = learners
        self.mirror = mirror
        self._keep = keep
        self._is_async = is_async
        self._models = models
        self._with_weights = with_weights
        self._texts = texts
        self.background = Background()
        self.failures = Failures(directory)
        self._needed: set[Path] = set()  # the checkpoint that the run resumed from, until the run has saved its own
        self._best: int | None = None  # the step of the best validation, as the newest checkpoint has it

    @cached_property
    def _staging(self) -> Staging:
        return Staging(is_pinned=self._is_async)

    @property
    def num_bytes(self) -> int:
        """The approximate size of a checkpoint: weights, and of trained models float32 weights and two moments."""
        total = 0
        for learner in self.learners.values():
            numel = sum(map(math.prod, saved_shapes(learner).values()))
            of_weight = learner.modules[0].config.params_dtype.itemsize
            of_optimizer = 3 * 4 if learner.optimizer else 0
            total += numel * (of_weight + of_optimizer)
        return total

    def save(self, state: State) -> None:
        """Write a checkpoint, or start to if `is_async`, after the one before is complete. Collective."""
        with self.failures.tolerated():
            self.background.finish()
        task = with_write_errors(self._saving(state), f"the checkpoint of step {state.step}")
        with self.failures.tolerated():
            if self._is_async:
                self.background.start(task)
            else:
                run_blocking(task)

    def advance(self) -> dict[str, float]:
        """Resume asynchronous saves and uploads without waiting for them; called after every step. Collective.

        Returns metrics of failed saves and of finished uploads.
        """
        with self.failures.tolerated():
            self.background.advance()
        return self.failures.metrics() | (self.mirror.advance() if self.mirror else {})

    def close(self) -> None:
        """Wait for asynchronous saves and uploads, at the end of a run that did not fail. Collective.

        Raises:
            WriteError: the last save failed.
        """
        watchdog.note(phase="save_checkpoint")
        with self.failures.tolerated():
            self.background.finish()
        if self.mirror:
            self.mirror.close()
            on_first_rank(self._remove_old)
        self.failures.raise_last()

    def _saving(self, state: State) -> Task:
        final = self.directory / f"{STEP_PREFIX}{state.step}"
        part = self.directory / f".{final.name}.part"
        on_first_rank(lambda: make_empty(part, [*self.learners, HUGGINGFACE]))
        require_space(part, self.num_bytes)
        writings = [save_learner(learner, part / name, self._staging) for name, learner in self.learners.items()]
        write_random_states(part / RANDOM_STATES)
        on_first_rank(lambda: self._write_small_files(part, state))
        together(lambda: _write_files(part, state.files))
        if self._with_weights:
            for model in self._models:
                model.write_weights(part / model.folder)
        yield partial(write_all, writings)
        for writing in writings:
            writing.finish()
        if not self._is_async:
            self._staging.release()
        yield from sealing(part)
        yield lambda: self._publish(part, final, state) if dist.get_rank() == 0 else None
        self.failures.clear()
        if self.mirror:
            self.mirror.follow(state.step, best=state.best_step)

    def load(self, checkpoint: Path) -> State:
        """Load learners and random generators from `checkpoint`; return its state. Collective. Raises Damage."""
        for name, learner in self.learners.items():
            load_learner(learner, checkpoint / name)
        load_random_states(checkpoint / RANDOM_STATES)
        self._needed.add(checkpoint)
        state = State.read(checkpoint)
        self._best = state.best_step
        if self.mirror:
            self.mirror.remember(checkpoint, best=state.best_step)
        return state

    def _write_small_files(self, part: Path, state: State) -> None:
        with explained(str(part)):
            if self._models:
                self._models[0].write_config(part / self._models[0].folder)
            for name, learner in self.learners.items():
                if learner.lora:
                    write_adapter_config(part / name, learner.lora, learner.architecture)
        time = recorded_time(self.directory)
        times = {TIME_FILE: time.isoformat()} if time else {}
        for name, text in {**self._texts, **times, **known_run_ids(self.directory)}.items():
            write_whole(part / name, text.encode())
        write_whole(part / STATE_FILE, json.dumps(asdict(replace(state, files={}))).encode())

    def _publish(self, part: Path, final: Path, state: State) -> None:
        """Give a complete checkpoint its name, and remove the oldest."""
        publish(part, final)
        name_latest(self.directory, state.step)
        self._best = state.best_step
        self._needed.clear()
        self._remove_old()

    def _remove_old(self) -> None:
        """Delete checkpoints beyond `keep`, except that of the best validation.

        Checkpoints that are being uploaded, or cannot be deleted now, are tried again after the next save.
        """
        steps = sorted(saved_steps(self.directory))
        latest = latest_step(self.directory)
        for step in steps[: -self._keep] if self._keep else []:
            checkpoint = self.directory / f"{STEP_PREFIX}{step}"
            if step in (latest, self._best, self.mirror and self.mirror.uploading) or checkpoint in self._needed:
                continue
            try:
                remove(self.directory, step)
            except OSError as error:  # the new checkpoint is complete all the same
                logger.warning("the old checkpoint %s cannot be removed: %s", checkpoint, remedy(error))


def _write_files(part: Path, files: Mapping[str, bytes]) -> None:
    for name, content in files.items():
        write_whole(part / name, content)
