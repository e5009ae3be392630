"""Learning from files, with no engine: what supervised fine-tuning and the training of a reward model share."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from megarl.batch import Rollouts
from megarl.build.run import run_tracker
from megarl.checkpoint.find import find_checkpoint
from megarl.checkpoint.state import State
from megarl.checkpoint.store import Checkpoints
from megarl.config.root import SupervisedConfig
from megarl.data.tokenizer import Tokenizer
from megarl.distributed import watchdog
from megarl.distributed.launch import Launch
from megarl.distributed.signals import Stopped, heeding, told
from megarl.learner.factory import make_learner
from megarl.learner.learner import Budget, Learner, Objective
from megarl.learner.parallel import build_mesh
from megarl.loop import is_due
from megarl.platform.device import device_type, local_device
from megarl.skips import Skips
from megarl.source import Source
from megarl.tracking.timers import Timers
from megarl.tracking.tracker import recording


class Batches(Protocol):
    """Training data in an order that is a pure function of the step."""

    @property
    def steps_per_epoch(self) -> int:
        """Full batches in one pass."""

    def take(self, step: int) -> Rollouts:
        """The batch of a step, counted from 0 over all epochs."""


@dataclass(frozen=True, kw_only=True)
class Lessons:
    """What a model learns, and from what."""

    role: Literal["policy", "value"]
    name: str  # of the model in checkpoints
    batches: Batches
    objective: Objective
    budget: Budget
    validate: Callable[[Learner], dict[str, float]] | None  # None: nothing to validate on


def learn(config: SupervisedConfig, launch: Launch, source: Source, tokenizer: Tokenizer, lessons: Lessons) -> Learner:
    """Train on this rank until the last step, from the run's latest checkpoint on; returns the trained model."""
    trainer, run_dir = config.trainer, Path(config.trainer.default_local_dir)
    last_step = trainer.total_training_steps or trainer.total_epochs * lessons.batches.steps_per_epoch
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
    written = source if learner.is_policy else source.as_classifier(tokenizer)
    checkpoints = Checkpoints(
        directory=run_dir,
        learners={lessons.name: learner},
        keep=trainer.max_ckpt_to_keep,
        write_huggingface=lambda directory: written.write_companions(directory, tokenizer, dtype=config.megatron.dtype),
        beside_training=trainer.async_save,
    )
    resumed = find_checkpoint(run_dir, mode=trainer.resume_mode, path=trainer.resume_from_path)
    state = checkpoints.load(resumed) if resumed else State()
    tracker = run_tracker(config, launch, last_step=last_step, resumed=state if resumed else None)
    skips = Skips(lessons.name, trainer)
    with heeding(), recording(tracker):
        for step in range(state.step, last_step):
            watchdog.note(step=step)
            timers = Timers()
            with timers("step"):
                batches, outcome = [lessons.batches.take(step)], skips.of_step(step + 1)
                metrics = learner.update(batches, lessons.objective, lessons.budget, outcome=outcome)
            if lessons.validate and is_due(trainer.test_freq, step + 1, last_step=last_step):
                metrics |= lessons.validate(learner)
            stops = told() and step + 1 < last_step
            if stops or is_due(trainer.save_freq, step + 1, last_step=last_step):
                checkpoints.save(State(step=step + 1, metrics=metrics))
            checkpoints.advance()
            tracker.log(metrics | timers.seconds(), step=step + 1)
            if stops:
                checkpoints.close()
                raise Stopped(step + 1)
        checkpoints.close()
    return learner
