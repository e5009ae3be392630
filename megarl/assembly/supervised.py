"""Builds a run that learns from files without an engine: supervised fine-tuning, or training a reward model."""

import logging
from functools import partial
from pathlib import Path

from megarl.assembly.prompts import make_tokenizer
from megarl.assembly.records import (
    check_directories,
    finish_records,
    last_step_of,
    make_checkpoints,
    make_schedule,
    name_custom_code,
    run_tracker,
)
from megarl.assembly.resume import ResumePoint, template_time
from megarl.checkpoint.directory import HUGGINGFACE, MANIFEST_FILE
from megarl.checkpoint.huggingface import POLICY_ROLE, VALUE_ROLE, SavedModel, export_model
from megarl.checkpoint.occupancy import occupy
from megarl.checkpoint.template_time import record_time
from megarl.config.root import RewardTrainConfig, SFTConfig, SupervisedConfig
from megarl.data.conversations import Conversations
from megarl.data.pairs import PairStream
from megarl.data.preferences import PreferenceStream
from megarl.data.tokenizer import Tokenizer
from megarl.distributed.exchange import on_first_rank
from megarl.distributed.launch import Launch
from megarl.distributed.signals import graceful_stop
from megarl.learner.batching import Budget
from megarl.learner.factory import make_learner
from megarl.learner.learner import Learner
from megarl.learner.parallel import build_mesh
from megarl.models.source import Source
from megarl.tracking.tracker import recording
from megarl.training.objectives import PreferenceObjective, SFTObjective
from megarl.training.skips import Skips
from megarl.training.supervised import SupervisedTask, mean_loss, preference_metrics, train

logger = logging.getLogger(__name__)


def learn(config: SFTConfig | RewardTrainConfig, launch: Launch) -> None:
    """Train on this rank from the run's latest checkpoint until the last step, and export the model.

    Raises:
        UserError: a file cannot be read, the run's directory cannot be written, or another job works there.
        Stopped: the job received a signal to end. The last finished step is saved.
    """
    source = Source.read(config.model)
    tokenizer = make_tokenizer(config.data, config.model, source, now=template_time(config.trainer))
    if isinstance(config, SFTConfig):
        task = _learning_of_pairs(config, tokenizer)
    else:
        task = _learning_of_preferences(config, source, tokenizer)
    name_custom_code(config)
    check_directories(config.trainer)
    run_dir = Path(config.trainer.default_local_dir)
    with occupy(run_dir):
        learner = _learn(config, launch, source, tokenizer, task)
        if learner:
            export_model(learner, source, tokenizer, run_dir / HUGGINGFACE, launch)


def _learning_of_pairs(config: SFTConfig, tokenizer: Tokenizer) -> SupervisedTask:
    data = config.data
    budget = Budget(max_tokens=config.max_token_len_per_gpu, max_sequences=data.micro_batch_size)
    val_pairs = PairStream(data, data.val_files, tokenizer) if data.val_files else None
    name, role = POLICY_ROLE
    return SupervisedTask(
        name=name,
        role=role,
        batches=PairStream(data, data.train_files, tokenizer),
        objective=SFTObjective(),
        budget=budget,
        validate=partial(mean_loss, pairs=val_pairs, budget=budget) if val_pairs else None,
    )


def _learning_of_preferences(config: RewardTrainConfig, source: Source, tokenizer: Tokenizer) -> SupervisedTask:
    data = config.data
    reader = Conversations(tokenizer=tokenizer, pad_token_id=source.pad_token_id(tokenizer), max_length=data.max_length)
    budget = Budget(
        max_tokens=config.max_token_len_per_gpu,
        max_sequences=data.micro_batch_size and 2 * data.micro_batch_size,
        num_together=2,
    )
    objective = PreferenceObjective(config.center_rewards_coefficient)
    val_pairs = PreferenceStream(data, data.val_files, reader) if data.val_files else None
    validate = partial(preference_metrics, pairs=val_pairs, objective=objective, budget=budget) if val_pairs else None
    name, role = VALUE_ROLE
    return SupervisedTask(
        name=name,
        role=role,
        batches=PreferenceStream(data, data.train_files, reader),
        objective=objective,
        budget=budget,
        validate=validate,
    )


def _learn(
    config: SupervisedConfig, launch: Launch, source: Source, tokenizer: Tokenizer, task: SupervisedTask
) -> Learner | None:
    """Train, and return the model, or None if it was exported after the last step already."""
    trainer = config.trainer
    run_dir = Path(trainer.default_local_dir)
    last_step = last_step_of(config, task.batches.steps_per_epoch)
    resume_point = ResumePoint.find(config)
    if resume_point.is_at(last_step):
        finish_records(config, launch, resume_point, last_step=last_step)
        if on_first_rank(lambda: is_exported(run_dir / HUGGINGFACE, resume_point)):
            return None
    on_first_rank(lambda: record_time(run_dir, tokenizer.now))
    if launch.rank == 0:
        logger.info(task.batches.preview_prompt(resume_point.state.step))
    logger.info("starting: the model")
    learner = make_learner(
        source.directory,
        source.architecture,
        config.megatron,
        build_mesh(config.megatron),
        role=task.role,
        recompute=config.model.enable_gradient_checkpointing,
        balance=trainer.balance_batch,
        freeze_routers=config.model.freeze_moe_router,
        training=(config.optim, config.grad_clip, last_step),
        lora=source.lora,
    )
    saved = SavedModel(learner=learner, source=source, tokenizer=tokenizer, launch=launch)
    checkpoints = make_checkpoints(config, {task.name: learner}, [saved])
    resume_point.restore(checkpoints, {task.name: "model.path"})
    if resume_point.is_at(last_step):
        return learner
    tracker = run_tracker(config, launch, resume_point, last_step=last_step)
    first_step = resume_point.state.step
    schedule = make_schedule(
        trainer, launch, first_step=first_step, last_step=last_step, resumed=resume_point.is_resumed
    )
    with graceful_stop(), recording(tracker):
        skips = Skips(task.name, trainer)
        train(learner, task, schedule, skips=skips, tracker=tracker, checkpoints=checkpoints)
    return learner


def is_exported(directory: Path, resume_point: ResumePoint) -> bool:
    """Return whether `directory` holds a complete model that was written after the checkpoint of the resume point."""
    if resume_point.checkpoint is None:
        return False
    weights = [path.stat().st_mtime for path in directory.glob("model*.safetensors")]
    is_complete = bool(weights) and (directory / "config.json").is_file()  # written last
    return is_complete and min(weights) >= (resume_point.checkpoint / MANIFEST_FILE).stat().st_mtime
