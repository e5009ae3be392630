"""Learning from files, with no engine: what supervised fine-tuning and the training of a reward model share."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from megarl.assembly.resume import Standing
from megarl.assembly.run import check_directories, finish_records, make_checkpoints, name_own_code, run_tracker
from megarl.batch import Rollouts
from megarl.checkpoint import manifest
from megarl.checkpoint.huggingface import EXPORT_DIRECTORY, export_model
from megarl.checkpoint.occupancy import occupy
from megarl.checkpoint.state import State
from megarl.checkpoint.store import HUGGINGFACE, CheckpointStore
from megarl.config.root import SupervisedConfig
from megarl.data.tokenizer import Tokenizer
from megarl.distributed import watchdog
from megarl.distributed.exchange import together
from megarl.distributed.launch import Launch
from megarl.distributed.signals import Stopped, graceful_stop, stop_requested
from megarl.learner.batching import Budget
from megarl.learner.factory import make_learner
from megarl.learner.learner import Learner, Objective
from megarl.learner.parallel import build_mesh
from megarl.models.source import Source
from megarl.platform.device import device_type, local_device
from megarl.tracking.timers import Timers
from megarl.tracking.tracker import recording
from megarl.training.loop import is_due
from megarl.training.skips import Skips


class Batches(Protocol):
    """Training data in an order that is a pure function of the step."""

    @property
    def steps_per_epoch(self) -> int:
        """Full batches in one pass."""

    def take(self, step: int) -> Rollouts:
        """The batch of a step, counted from 0 over all epochs."""

    def first_as_read(self, step: int) -> str:
        """Describe for people how the model reads the first row of a step."""


@dataclass(frozen=True, kw_only=True)
class Lessons:
    """What a model learns, and from what."""

    role: Literal["policy", "value"]
    name: str  # of the model in checkpoints
    batches: Batches
    objective: Objective
    budget: Budget
    validate: Callable[[Learner], dict[str, float]] | None  # None: nothing to validate on


def learn(
    config: SupervisedConfig, launch: Launch, source: Source, tokenizer: Tokenizer, lessons: Lessons
) -> Learner | None:
    """Train on this rank until the last step, from the run's latest checkpoint on.

    Returns the trained model, which is to be exported; None where that was done after the last step already.

    Raises:
        ValueError: the run's directory cannot be written, or another job works there.
        Stopped: the job was told to end; the last finished step is saved.
    """
    name_own_code(config)
    check_directories(config.trainer)
    with occupy(Path(config.trainer.default_local_dir)):
        return _learn(config, launch, source, tokenizer, lessons)


def _learn(
    config: SupervisedConfig, launch: Launch, source: Source, tokenizer: Tokenizer, lessons: Lessons
) -> Learner | None:
    trainer, run_dir = config.trainer, Path(config.trainer.default_local_dir)
    last_step = trainer.total_training_steps or trainer.total_epochs * lessons.batches.steps_per_epoch
    standing = Standing.find(config)
    if standing.is_at(last_step):
        finish_records(config, launch, standing, last_step=last_step)
        if together(lambda: is_exported(run_dir / EXPORT_DIRECTORY, standing))[0]:
            return None
    if launch.rank == 0:
        print(lessons.batches.first_as_read(standing.state.step))
    learner = make_learner(
        source.directory,
        source.architecture,
        config.megatron,
        build_mesh(config.megatron),
        role=lessons.role,
        device=local_device(device_type(trainer.device)),
        recompute=config.model.enable_gradient_checkpointing,
        balance=trainer.balance_batch,
        training=(config.optim, config.grad_clip, last_step),
    )
    checkpoints = _checkpoints(config, launch, source, tokenizer, {lessons.name: learner})
    standing.require_sizes(checkpoints.learners, {lessons.name: "model.path"})
    if standing.checkpoint:
        checkpoints.load(standing.checkpoint)
    if standing.is_at(last_step):
        return learner
    tracker = run_tracker(config, launch, standing, last_step=last_step)
    skips = Skips(lessons.name, trainer)
    with graceful_stop(), recording(tracker):
        for step in range(standing.state.step, last_step):
            watchdog.note(step=step, phase="step")
            timers = Timers()
            with timers("step"):
                batches, on_minibatch = [lessons.batches.take(step)], skips.of_step(step + 1)
                metrics = learner.update(batches, lessons.objective, lessons.budget, on_minibatch=on_minibatch)
            if lessons.validate and is_due(trainer.test_freq, step + 1, last_step=last_step):
                metrics |= lessons.validate(learner)
            stops = stop_requested() and step + 1 < last_step
            if stops or is_due(trainer.save_freq, step + 1, last_step=last_step):
                with timers("save_checkpoint"):
                    checkpoints.save(State(step=step + 1, metrics=metrics))
            metrics |= checkpoints.advance()
            tracker.log(metrics | timers.seconds(), step=step + 1)
            if stops:
                checkpoints.close()
                raise Stopped(step + 1)
        checkpoints.close()
    return learner


def _checkpoints(
    config: SupervisedConfig, launch: Launch, source: Source, tokenizer: Tokenizer, learners: dict[str, Learner]
) -> CheckpointStore:
    (learner,) = learners.values()
    written = source if learner.is_policy else source.as_classifier(tokenizer)
    return make_checkpoints(
        config,
        learners,
        write_huggingface=lambda directory: written.write_config_and_tokenizer(
            directory, tokenizer, dtype=config.megatron.dtype
        ),
        export=lambda checkpoint: export_model(learner, source, tokenizer, checkpoint / HUGGINGFACE, launch),
    )


def is_exported(directory: Path, standing: Standing) -> bool:
    """Whether a whole model lies in `directory` that was written after the checkpoint at which the run stands."""
    if standing.checkpoint is None:
        return False
    weights = [path.stat().st_mtime for path in directory.glob("model*.safetensors")]
    is_whole = bool(weights) and (directory / "config.json").is_file()  # written last
    return is_whole and min(weights) >= (standing.checkpoint / manifest.MANIFEST_FILE).stat().st_mtime
