"""Builds a run of reinforcement learning, or a replay of one, as configured."""

import logging
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from megarl.algorithms.config import KLControlSection
from megarl.algorithms.kl import AdaptiveKL, FixedKL
from megarl.assembly.models import Models, make_models
from megarl.assembly.prompts import make_tokenizer, training_prompts, validation_prompts
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
from megarl.assembly.reward import make_environments, make_rules
from megarl.assembly.sampling import (
    make_engine,
    make_limits,
    make_sampler,
    make_samples,
    make_scorer,
    make_step_cache,
    make_validation,
)
from megarl.checkpoint.directory import HUGGINGFACE
from megarl.checkpoint.huggingface import SavedModel
from megarl.checkpoint.manifest import listed
from megarl.checkpoint.occupancy import occupy
from megarl.checkpoint.state import State
from megarl.checkpoint.store import CheckpointStore
from megarl.checkpoint.template_time import record_time
from megarl.config.root import Config
from megarl.data.prompts import PromptStream
from megarl.data.tokenizer import Tokenizer
from megarl.distributed.exchange import on_first_rank
from megarl.distributed.launch import Launch
from megarl.distributed.sharded import Shares
from megarl.environments.episodes import Environments
from megarl.learner.learner import Learner
from megarl.learner.per_data_source import PerDataSource
from megarl.models.flops import FROZEN_UPDATE, UPDATE
from megarl.models.source import Source
from megarl.platform.peaks import published_flops
from megarl.rewards.scoring import RuleScorer
from megarl.rollout.engine import RolloutEngine
from megarl.samples.in_flight import IN_FLIGHT_FILES, NOTHING, InFlight
from megarl.tracking.protocol import Tracker
from megarl.training.collect import SampleSource
from megarl.training.custom import CustomEstimator, CustomLoss, load_estimator, load_loss
from megarl.training.flops import TERA, FlopsCounter
from megarl.training.gate import Gate
from megarl.training.loop import KL, Job, Progress
from megarl.training.ptx import Supervision
from megarl.training.replay import Replay, replaying
from megarl.training.steps import Schedule
from megarl.training.validation import Validation

logger = logging.getLogger(__name__)

MODEL_KEYS = {"actor": "actor_rollout_ref.model.path", "critic": "critic.model.path"}


@dataclass(frozen=True, kw_only=True)
class Training:
    """A job, its progress so far, and the engine to close after it."""

    job: Job
    progress: Progress
    engine: RolloutEngine


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """Everything that a run reads before its models: data, tokenizer, rewards and the user's code."""

    source: Source
    tokenizer: Tokenizer
    prompts: PromptStream
    val_prompts: PromptStream | None
    supervision: Supervision | None  # the pairs of the actor's updates
    rules: RuleScorer | None  # None: a model or an environment scores alone
    environments: Environments | None
    estimator: CustomEstimator | None  # the user's
    loss: CustomLoss | None  # the user's
    last_step: int

    @classmethod
    def read(cls, config: Config) -> "Inputs":
        """Read the inputs of a run. Collective. Raises UserError and ConfigError, as each of the parts does."""
        policy = config.actor_rollout_ref
        source = Source.read(policy.model)
        tokenizer = make_tokenizer(config.data, policy.model, source, now=template_time(config.trainer))
        prompts = training_prompts(config, tokenizer)
        if not config.trainer.val_only:
            prompts.require(config.num_drawn)  # the files may have had enough before long prompts were left out
        return cls(
            source=source,
            tokenizer=tokenizer,
            prompts=prompts,
            val_prompts=validation_prompts(config, tokenizer),
            supervision=Supervision.of(config, tokenizer),
            rules=make_rules(config, tokenizer, source),
            environments=make_environments(config, tokenizer, source, prompts.prompt_of(0)),
            estimator=load_estimator(config.algorithm),
            loss=load_loss(policy.actor.policy_loss),
            last_step=last_step_of(config, prompts.steps_per_epoch),
        )

    def preview_prompt(self, state: State) -> str:
        """Describe for people the prompt that a run in this state reads first."""
        remark = f"\nvalidation:{self.val_prompts.remark}" if self.val_prompts and self.val_prompts.remark else ""
        return self.prompts.preview_prompt(state.position or self.prompts.position_of(state.step)) + remark


def build_training(config: Config, launch: Launch, resources: ExitStack) -> Training | None:
    """Build a training run in the state of the checkpoint that it resumes from. Return None if no steps are left.

    `resources` holds the lock of the run's directory.
    """
    run_dir = Path(config.trainer.default_local_dir)
    name_custom_code(config)
    check_directories(config.trainer)
    inputs = Inputs.read(config)
    resources.enter_context(occupy(run_dir))
    resume_point = ResumePoint.find(config)
    if resume_point.is_at(inputs.last_step):
        finish_records(config, launch, resume_point, last_step=inputs.last_step)
        return None
    on_first_rank(lambda: record_time(run_dir, inputs.tokenizer.now))
    if launch.rank == 0:
        logger.info(inputs.preview_prompt(resume_point.state))
    engine = make_engine(config, inputs.source, inputs.tokenizer)
    models, checkpoints = _make_models(config, launch, inputs, resume_point, mirrored=True)
    tracker = run_tracker(config, launch, resume_point, last_step=inputs.last_step)
    _log_sizes(config, resume_point, tracker, inputs)
    scorer = make_scorer(config, inputs.rules, models.mesh, inputs.tokenizer, inputs.source)
    step_cache = make_step_cache(config, resume_point)
    sampler = make_sampler(config, engine, models.actor.learner, scorer, launch, inputs.environments, step_cache)
    validation = (
        make_validation(config, inputs.val_prompts, sampler, scorer, tracker, replaces=True)
        if inputs.val_prompts
        else None
    )
    schedule = make_schedule(
        config.trainer,
        launch,
        first_step=resume_point.state.step,
        last_step=inputs.last_step,
        resumed=resume_point.is_resumed,
    )
    samples = make_samples(config, inputs.prompts, sampler, scorer)
    job = make_job(
        config,
        launch,
        models,
        inputs,
        samples,
        schedule,
        checkpoints,
        tracker,
        gate=_make_gate(config, launch),
        validation=validation,
    )
    return Training(job=job, progress=make_progress(config, inputs, resume_point), engine=engine)


def build_replay(config: Config, launch: Launch, resources: ExitStack, recorded: Path) -> tuple[Job, Progress]:
    """Build a run that learns from the `recorded` samples of a run, which replace engine, reward and validation.

    It starts from the checkpoint that the run would resume from, writes to a directory of its own, and leaves that of
    the run unchanged. `resources` holds the lock of its directory.
    """
    replay_config = replaying(config)
    name_custom_code(config)
    check_directories(replay_config.trainer)
    inputs = Inputs.read(config)
    resources.enter_context(occupy(Path(replay_config.trainer.default_local_dir)))
    resume_point = ResumePoint.find(config, continues=False)
    models, checkpoints = _make_models(config, launch, inputs, resume_point, mirrored=False)
    found = Replay.find(recorded, after=resume_point.state.step)
    samples = replace(found, routing_replay=config.actor_rollout_ref.rollout.routing_replay)
    unrecorded = replace(resume_point, state=replace(resume_point.state, metrics={}))  # the run recorded the metrics
    tracker = run_tracker(replay_config, launch, unrecorded, last_step=samples.last_step)
    _log_sizes(config, resume_point, tracker, inputs)
    schedule = make_schedule(
        replay_config.trainer,
        launch,
        first_step=samples.first_step,
        last_step=samples.last_step,
        resumed=resume_point.is_resumed,
    )
    job = make_job(replay_config, launch, models, inputs, samples, schedule, checkpoints, tracker)
    return job, make_progress(replay_config, inputs, resume_point)


def _make_models(
    config: Config, launch: Launch, inputs: Inputs, resume_point: ResumePoint, *, mirrored: bool
) -> tuple[Models, CheckpointStore]:
    """Make the models of a run and their checkpoints, in the state of the resume point."""
    source = inputs.source
    tokenizer = inputs.tokenizer
    models = make_models(
        config,
        source,
        tokenizer,
        supervision=inputs.supervision,
        custom_loss=inputs.loss,
        last_step=inputs.last_step,
    )
    learners = {models.actor.name: models.actor.learner}
    saved = [SavedModel(learner=models.actor.learner, source=source, tokenizer=tokenizer, launch=launch)]
    critic = models.critic
    if critic:
        learners[critic.name] = critic.learner
        saved.append(
            SavedModel(
                learner=critic.learner,
                source=Source.read(config.critic.model),
                tokenizer=critic.translate.reader if critic.translate else tokenizer,
                launch=launch,
                folder=f"{HUGGINGFACE}_{critic.name}",
            )
        )
    checkpoints = make_checkpoints(config, learners, saved, mirrored=mirrored)
    resume_point.restore(checkpoints, MODEL_KEYS)
    return models, checkpoints


def make_job(
    config: Config,
    launch: Launch,
    models: Models,
    inputs: Inputs,
    samples: SampleSource,
    schedule: Schedule,
    checkpoints: CheckpointStore,
    tracker: Tracker,
    *,
    gate: Gate | None = None,
    validation: Validation | None = None,
) -> Job:
    """Put the parts of a run together."""
    return Job(
        samples=samples,
        actor=models.actor,
        reference=models.reference if "ref" in config.passes_of_reference else None,
        critic=models.critic,
        gate=gate,
        algorithm=replace(config.algorithm, use_kl_in_reward=config.kl_of_reward is not None),
        custom_estimator=inputs.estimator,
        critic_warmup=config.trainer.critic_warmup,
        schedule=schedule,
        validation=validation,
        checkpoints=checkpoints,
        tracker=tracker,
        num_ranks=launch.world_size,
        flops=make_flops_counter(config, models, num_ranks=launch.world_size),
        max_staleness=config.max_staleness,
        fused_old_log_probs=config.fused_old_log_probs,
    )


def make_flops_counter(config: Config, models: Models, *, num_ranks: int) -> FlopsCounter:
    """Return the passes of the models in each phase, and the peak speed of all devices."""
    actor = models.actor.learner
    critic = models.critic
    trainer = config.trainer
    policy = PerDataSource(other=actor.architecture)
    passes = {phase: [(policy, 1)] for phase in ("gen", "old_log_prob")}
    passes["update_actor"] = [(policy, _passes_of_update(actor) * config.actor_rollout_ref.actor.ppo_epochs)]
    if models.reference:
        references = models.reference.models.map(lambda model: model.learner.architecture)
        for phase, num_passes in config.passes_of_reference.items():
            passes.setdefault(phase, []).append((references, num_passes))
    if critic:
        value = PerDataSource(other=critic.learner.architecture)
        num_passes = _passes_of_update(critic.learner) * config.critic.ppo_epochs
        passes |= {"values": [(value, 1)], "update_critic": [(value, num_passes)]}
    known = published_flops(actor.device, config.actor_rollout_ref.actor.megatron.dtype)
    peak = trainer.peak_tflops * TERA if trainer.peak_tflops else known
    return FlopsCounter(passes=passes, peak=peak and peak * num_ranks)


def _passes_of_update(learner: Learner) -> int:
    """Return the forward passes that cost as much as an update; adapters themselves cost nearly nothing."""
    return FROZEN_UPDATE if learner.lora else UPDATE


def _make_gate(config: Config, launch: Launch) -> Gate | None:
    """Make the gate for new samples. Return None if the engine's log-probabilities cannot be compared."""
    if not config.actor_rollout_ref.rollout.compares:
        return None
    gate = Gate(limits=make_limits(config))
    if launch.rank == 0:
        logger.info(gate)
    return gate


def make_progress(config: Config, inputs: Inputs, resume_point: ResumePoint) -> Progress:
    """Return the progress that the first step starts from. Raises what `samples.in_flight.read` does."""
    rollout = config.actor_rollout_ref.rollout
    state = resume_point.state
    checkpoint = resume_point.checkpoint
    shares = Shares.blocks(rollout.tensor_model_parallel_size)
    opened = partial(inputs.environments.open, max_tokens=rollout.prompt_length) if inputs.environments else None
    in_flight = NOTHING
    if checkpoint and rollout.partial.enable:
        files = on_first_rank(lambda: listed(checkpoint, IN_FLIGHT_FILES))
        in_flight = InFlight.read(files, shares, inputs.prompts.prompt_of, opened)
    return Progress(
        kl=make_kl_controller(config.algorithm.kl_ctrl, state),
        position=state.position or inputs.prompts.position_of(state.step),
        best=state.best,
        mismatches=state.mismatches,
        in_flight=in_flight,
    )


def make_kl_controller(section: KLControlSection, state: State) -> KL:
    """Make the controller of the KL coefficient. An adaptive one continues from the saved coefficient."""
    if section.type == "fixed":
        return FixedKL(section.kl_coef)
    coef = section.kl_coef if state.kl_coef is None else state.kl_coef
    return AdaptiveKL(coef, target=section.target_kl, horizon=section.horizon)


def _log_sizes(config: Config, resume_point: ResumePoint, tracker: Tracker, inputs: Inputs) -> None:
    """Record how many prompts are too long, if the run is new and filters them."""
    if config.data.filter_overlong_prompts and not resume_point.is_resumed:
        streams = {"train": inputs.prompts, "validation": inputs.val_prompts}
        sizes = [{"files": name} | stream.sizes for name, stream in streams.items() if stream]
        tracker.log_table("data/prompts", sizes, step=resume_point.state.step)
