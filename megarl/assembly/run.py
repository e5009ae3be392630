"""The composition root: builds a run of reinforcement learning, or its validation alone, as configured."""

import logging
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from megarl.algorithms.config import KLControlSection
from megarl.algorithms.kl import AdaptiveKL, FixedKL
from megarl.assembly.models import Models, make_models, make_tokenizer
from megarl.assembly.records import (
    check_directories,
    console_tracker,
    finish_records,
    make_checkpoints,
    name_own_code,
    open_records,
)
from megarl.assembly.resume import ResumePoint, resumed_checkpoint
from megarl.assembly.reward import make_environments, make_rules
from megarl.assembly.sampling import (
    make_engine,
    make_kept,
    make_limits,
    make_sampler,
    make_samples,
    make_scorer,
    make_validation,
    training_prompts,
    validation_prompts,
)
from megarl.checkpoint.directory import HUGGINGFACE
from megarl.checkpoint.huggingface import export_model
from megarl.checkpoint.occupancy import occupy
from megarl.checkpoint.state import State
from megarl.checkpoint.store import CheckpointStore
from megarl.checkpoint.template_time import record_time
from megarl.config.faults import ConfigError
from megarl.config.learning_checks import learning_faults
from megarl.config.root import Config
from megarl.data.order import Position
from megarl.data.prompts import PromptStream
from megarl.data.tokenizer import Tokenizer
from megarl.distributed.exchange import on_first_rank
from megarl.distributed.launch import Launch
from megarl.environments.episodes import Environments
from megarl.errors import UserError
from megarl.learner.by_source import BySource
from megarl.learner.checkpoint import load_learner
from megarl.learner.factory import make_learner
from megarl.learner.parallel import build_mesh
from megarl.models.flops import UPDATE
from megarl.models.source import Source
from megarl.platform.peaks import published_flops
from megarl.rollout.engine import RolloutEngine
from megarl.tracking.config import TrainerSection
from megarl.tracking.profile import make_traces
from megarl.tracking.tracker import Tracker
from megarl.training.carried import CARRIED_FILE
from megarl.training.carried import read as read_carried
from megarl.training.collect import SampleSource
from megarl.training.gate import Gate
from megarl.training.loop import KL, Job, Progress
from megarl.training.own import OwnEstimator, load_estimator, load_loss
from megarl.training.replay import Replay, replaying
from megarl.training.steps import Schedule
from megarl.training.validation import Validation
from megarl.training.work import TERA, Work

logger = logging.getLogger(__name__)

MODEL_KEYS = {"actor": "actor_rollout_ref.model.path", "critic": "critic.model.path"}


@dataclass(frozen=True, kw_only=True)
class Run:
    """A job, its progress so far, and the engine to close after it."""

    job: Job
    progress: Progress
    engine: RolloutEngine | None  # None: a replay, which samples nothing


def build_run(config: Config, launch: Launch, resources: ExitStack, *, replay: Path | None = None) -> Run | None:
    """Build a training run in the state of the checkpoint that it resumes from. Return None if no steps are left.

    `resources` holds the lock of the run's directory. `replay` names the samples of a run: they replace engine, reward
    and validation.
    """
    trainer, policy = config.trainer, config.actor_rollout_ref
    own_trainer = (replaying(config) if replay else config).trainer  # names the directories that this job writes to
    name_own_code(config)
    check_directories(own_trainer)
    source = Source.read(policy.model)
    tokenizer = make_tokenizer(config.data, policy.model, source, trainer)
    prompts, val_prompts = training_prompts(config, tokenizer), validation_prompts(config, tokenizer)
    rules = make_rules(config, tokenizer, source)
    estimator, loss = load_estimator(config.algorithm), load_loss(policy.actor.policy_loss)
    environments = make_environments(config, tokenizer, source, prompts.prompt_of(0))
    last_step = trainer.total_training_steps or trainer.total_epochs * prompts.steps_per_epoch
    if faults := [*learning_faults(config, last_step)]:
        raise ConfigError(faults)
    resources.enter_context(occupy(Path(own_trainer.default_local_dir)))
    continues = not (replay or trainer.val_only)  # otherwise the job leaves the run's directory unchanged
    resume_point = ResumePoint.find(config, continues=continues)
    state = resume_point.state
    if resume_point.is_at(last_step) and continues:
        finish_records(config, launch, resume_point, last_step=last_step)
        return None
    if continues:
        on_first_rank(lambda: record_time(Path(trainer.default_local_dir), tokenizer.now))
    if launch.rank == 0 and not replay:
        logger.info(_first_as_read(config, state, prompts, val_prompts))
    engine = None if replay else make_engine(config, source, tokenizer)
    models = make_models(config, source, tokenizer, own_loss=loss, last_step=last_step)
    checkpoints = _make_checkpoints(config, launch, source, tokenizer, models, mirrored=continues)
    resume_point.require_sizes(checkpoints.learners, MODEL_KEYS)
    if resume_point.checkpoint:
        checkpoints.load(resume_point.checkpoint)
    first_step, validation = state.step, None
    samples: SampleSource
    if replay:
        config = replaying(config)
        resume_point = replace(resume_point, state=replace(state, metrics={}))  # the run itself recorded the metrics
        samples = Replay.find(replay, after=state.step)
        first_step, last_step = samples.first_step, samples.last_step
    tracker = open_records(config, launch, resume_point, last_step=last_step)
    _log_sizes(config, resume_point, tracker, {"train": prompts, "validation": val_prompts})
    if engine:
        scorer = make_scorer(config, rules, models.mesh, tokenizer, source)
        kept = make_kept(config, prompts, resume_point)
        sampler = make_sampler(config, engine, models.actor.learner, scorer, launch, environments, kept)
        samples = make_samples(config, prompts, sampler, scorer)
        if val_prompts:
            validation = make_validation(config, val_prompts, sampler, scorer, tracker, replaces=continues)
    schedule = make_schedule(
        config.trainer, launch, first_step=first_step, last_step=last_step, resumed=resume_point.is_resumed
    )
    gate = _make_gate(config, launch) if engine else None
    job = _make_job(config, launch, models, samples, schedule, validation, checkpoints, tracker, gate, estimator)
    progress = make_progress(config, state, prompts, resume_point.checkpoint, environments)
    return Run(job=job, progress=progress, engine=engine)


def _first_as_read(config: Config, state: State, prompts: PromptStream, val_prompts: PromptStream | None) -> str:
    """Describe for people the prompt that this job reads first."""
    if config.trainer.val_only and val_prompts:
        return val_prompts.first_as_read(Position())
    remark = f"\nvalidation:{val_prompts.remark}" if val_prompts and val_prompts.remark else ""
    return prompts.first_as_read(state.position or prompts.position_of(state.step)) + remark


def _make_job(
    config: Config,
    launch: Launch,
    models: Models,
    samples: SampleSource,
    schedule: Schedule,
    validation: Validation | None,
    checkpoints: CheckpointStore,
    tracker: Tracker,
    gate: Gate | None,
    own_estimator: OwnEstimator | None,
) -> Job:
    """Put the parts of a run together."""
    return Job(
        samples=samples,
        actor=models.actor,
        reference=models.reference if "ref" in config.passes_of_reference else None,
        critic=models.critic,
        gate=gate,
        algorithm=replace(config.algorithm, use_kl_in_reward=config.kl_of_reward is not None),
        own_estimator=own_estimator,
        critic_warmup=config.trainer.critic_warmup,
        schedule=schedule,
        validation=validation,
        checkpoints=checkpoints,
        tracker=tracker,
        num_ranks=launch.world_size,
        work=make_work(config, models, num_ranks=launch.world_size),
        max_staleness=config.max_staleness,
        fused_old_log_probs=config.fused_old_log_probs,
    )


def make_work(config: Config, models: Models, *, num_ranks: int) -> Work:
    """Return the passes of the models in each phase, and the peak speed of all devices."""
    actor, critic, trainer = models.actor.learner, models.critic, config.trainer
    policy = BySource(other=actor.architecture)
    passes = {phase: [(policy, 1)] for phase in ("gen", "old_log_prob")}
    passes["update_actor"] = [(policy, UPDATE * config.actor_rollout_ref.actor.ppo_epochs)]
    if models.reference:
        references = models.reference.models.map(lambda model: model.learner.architecture)
        for phase, num_passes in config.passes_of_reference.items():
            passes.setdefault(phase, []).append((references, num_passes))
    if critic:
        value = BySource(other=critic.learner.architecture)
        passes |= {"values": [(value, 1)], "update_critic": [(value, UPDATE * config.critic.ppo_epochs)]}
    known = published_flops(actor.device, config.actor_rollout_ref.actor.megatron.dtype)
    peak = trainer.peak_tflops * TERA if trainer.peak_tflops else known
    return Work(passes=passes, peak=peak and peak * num_ranks)


def _make_gate(config: Config, launch: Launch) -> Gate | None:
    """Make the gate for new samples. Return None if the engine's log-probabilities cannot be compared."""
    if not config.actor_rollout_ref.rollout.compares:
        return None
    gate = Gate(limits=make_limits(config))
    if launch.rank == 0:
        logger.info(gate)
    return gate


def make_schedule(
    trainer: TrainerSection, launch: Launch, *, first_step: int, last_step: int, resumed: bool
) -> Schedule:
    """Make the schedule of a run that starts at `first_step`."""
    return Schedule(
        first_step=first_step,
        last_step=first_step if trainer.val_only else last_step,
        test_freq=trainer.test_freq,
        save_freq=trainer.save_freq,
        save_last=trainer.save_last,
        save_best=trainer.save_best,
        validate_first=trainer.val_only or (trainer.val_before_train and not resumed),
        traces=make_traces(trainer, launch),
    )


def make_progress(
    config: Config,
    state: State,
    prompts: PromptStream,
    checkpoint: Path | None,
    environments: Environments | None,
) -> Progress:
    """Return the progress that the first step starts from. Raises what `carried.read` does."""
    rollout = config.actor_rollout_ref.rollout
    carried = checkpoint / CARRIED_FILE if checkpoint and rollout.partial.enable else None
    opened = partial(environments.open, max_tokens=rollout.prompt_length) if environments else None
    position = state.position or prompts.position_of(state.step)
    return Progress(
        kl=make_kl_controller(config.algorithm.kl_ctrl, state),
        position=position,
        best=state.best,
        mismatches=state.mismatches,
        carried=read_carried(carried, prompts.prompt_of, opened) if carried and carried.exists() else (),
    )


def make_kl_controller(section: KLControlSection, state: State) -> KL:
    """Make the controller of the KL coefficient. An adaptive one continues from the saved coefficient."""
    if section.type == "fixed":
        return FixedKL(section.kl_coef)
    coef = section.kl_coef if state.kl_coef is None else state.kl_coef
    return AdaptiveKL(coef, target=section.target_kl, horizon=section.horizon)


def build_validation(config: Config, launch: Launch) -> tuple[Validation, RolloutEngine, int]:
    """Build the validation of the checkpoint that a run would resume from. Return its engine and step too.

    Raises:
        UserError: there are no validation files.
    """
    trainer, policy = config.trainer, config.actor_rollout_ref
    name_own_code(config)
    source = Source.read(policy.model)
    tokenizer = make_tokenizer(config.data, policy.model, source, trainer)
    prompts = validation_prompts(config, tokenizer)
    if prompts is None:
        raise UserError("data.val_files is not set: name the parquet files to evaluate on")
    rules = make_rules(config, tokenizer, source)
    environments = make_environments(config, tokenizer, source, prompts.prompt_of(0))
    if launch.rank == 0:
        logger.info(prompts.first_as_read(Position()))
    engine = make_engine(config, source, tokenizer)
    mesh = build_mesh(policy.actor.megatron)
    actor = make_learner(
        source.directory,
        source.architecture,
        policy.actor.megatron,
        mesh,
        role="policy",
    )
    scorer = make_scorer(config, rules, mesh, tokenizer, source)
    step = 0
    if checkpoint := resumed_checkpoint(trainer):
        load_learner(actor, checkpoint / "actor")
        step = State.read(checkpoint).step
    tracker = console_tracker(trainer, launch, total_steps=step)
    sampler = make_sampler(config, engine, actor, scorer, launch, environments)
    return make_validation(config, prompts, sampler, scorer, tracker, replaces=False), engine, step


def _log_sizes(
    config: Config, resume_point: ResumePoint, tracker: Tracker, streams: Mapping[str, PromptStream | None]
) -> None:
    """Record how many prompts are too long, if the run is new and filters them."""
    if config.data.filter_overlong_prompts and not resume_point.is_resumed:
        sizes = [{"files": name} | stream.sizes for name, stream in streams.items() if stream]
        tracker.log_table("data/prompts", sizes, step=resume_point.state.step)


def _make_checkpoints(
    config: Config, launch: Launch, source: Source, tokenizer: Tokenizer, models: Models, *, mirrored: bool
) -> CheckpointStore:
    """Make the checkpoints of the models that learn."""
    actor, critic, dtype = models.actor, models.critic, config.actor_rollout_ref.actor.megatron.dtype

    def export(checkpoint: Path) -> None:
        export_model(actor.learner, source, tokenizer, checkpoint / HUGGINGFACE, launch)
        if critic:
            reader = critic.translate.reader if critic.translate else tokenizer
            start = Source.read(config.critic.model)  # the model that the critic was trained from
            export_model(critic.learner, start, reader, checkpoint / f"{HUGGINGFACE}_{critic.name}", launch)

    return make_checkpoints(
        config,
        {model.name: model.learner for model in (actor, critic) if model},
        write_huggingface=lambda directory: source.write_config_and_tokenizer(directory, tokenizer, dtype=dtype),
        export=export,
        mirrored=mirrored,
    )
