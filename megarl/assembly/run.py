"""The composition root: everything of a run put together as configured."""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megarl.algorithms.config import KLControlSection
from megarl.algorithms.kl import AdaptiveKL, FixedKL
from megarl.assembly.models import device_of, make_actor, make_critic, make_reference
from megarl.assembly.resume import Standing, checkpoint_texts, mirror_of, nothing_left, resumed_checkpoint
from megarl.assembly.sampling import (
    make_engine,
    make_limits,
    make_sampler,
    make_samples,
    make_scorer,
    make_tokenizer,
    make_validation,
    training_prompts,
    validation_prompts,
)
from megarl.checkpoint.contents import CONFIG_FILE
from megarl.checkpoint.failures import warn_of_space
from megarl.checkpoint.huggingface import export_model
from megarl.checkpoint.occupancy import occupy
from megarl.checkpoint.state import State
from megarl.checkpoint.store import HUGGINGFACE, CheckpointStore
from megarl.config.load import to_dict, to_yaml
from megarl.config.report import own_code
from megarl.config.root import Config, SupervisedConfig
from megarl.data.order import Position
from megarl.data.prompts import PromptStream
from megarl.data.tokenizer import Tokenizer
from megarl.distributed.agreement import agree
from megarl.distributed.exchange import on_first_rank, together
from megarl.distributed.launch import Launch
from megarl.learner.checkpoint import load_learner
from megarl.learner.factory import make_learner
from megarl.learner.learner import Learner
from megarl.learner.parallel import build_mesh
from megarl.models.source import Source
from megarl.platform.files import check_writable, write_whole
from megarl.rollout.engine import RolloutEngine
from megarl.tracking.config import TrainerSection
from megarl.tracking.run import TrackedRun
from megarl.tracking.tracker import Tracker, make_tracker
from megarl.training.collect import SampleSource
from megarl.training.gate import Gate
from megarl.training.loop import KL, Job, Progress, Schedule
from megarl.training.ptx import Supervision
from megarl.training.replay import Replay, replaying
from megarl.training.reward_model import make_rules
from megarl.training.roles import Model
from megarl.training.validation import Validation

MODEL_KEYS = {"actor": "actor_rollout_ref.model.path", "critic": "critic.model.path"}


@dataclass(frozen=True, kw_only=True)
class Run:
    """A job, where it stands, and what it holds on to."""

    job: Job
    progress: Progress
    engine: RolloutEngine | None  # None: nothing is sampled


def build_run(config: Config, launch: Launch, held: ExitStack, *, replay: Path | None = None) -> Run | None:
    """Everything of a training run, in the state of the checkpoint it continues from; None: it has nothing left to do.

    `held` keeps its directory; `replay` names samples of a run that stand in for engine, reward and validation.
    """
    trainer, policy = config.trainer, config.actor_rollout_ref
    kept = (replaying(config) if replay else config).trainer  # where this job writes
    name_own_code(config)
    check_directories(kept)
    source = Source.read(policy.model)
    tokenizer = make_tokenizer(config, source)
    prompts, val_prompts = training_prompts(config, tokenizer), validation_prompts(config, tokenizer)
    rules = make_rules(config.reward_model, config.custom_reward_function, tokenizer)
    last_step = trainer.total_training_steps or trainer.total_epochs * prompts.steps_per_epoch
    held.enter_context(occupy(Path(kept.default_local_dir)))
    goes_on = not (replay or trainer.val_only)  # else the run's directory is left as it is
    standing = Standing.find(config, goes_on=goes_on)
    state = standing.state
    if standing.is_at(last_step) and goes_on:
        finish_records(config, launch, standing, last_step=last_step)
        return None
    if launch.rank == 0 and not replay:
        print(_first_as_read(config, state, prompts, val_prompts))
    engine = None if replay else make_engine(config, source, tokenizer)
    mesh = build_mesh(policy.actor.megatron)
    reference = make_reference(config, source, mesh)
    anchor, supervision = reference.learner if reference else None, Supervision.of(config, tokenizer)
    actor = make_actor(config, source, mesh, anchor, supervision, last_step=last_step)
    critic = make_critic(config, mesh, tokenizer, last_step=last_step)
    checkpoints = _checkpoints(config, launch, source, tokenizer, actor, critic, mirrored=goes_on)
    standing.require_sizes(checkpoints.learners, MODEL_KEYS)
    if standing.checkpoint:
        checkpoints.load(standing.checkpoint)
    first_step, validation = state.step, None
    samples: SampleSource
    if replay:
        config = replaying(config)
        standing = replace(standing, state=replace(state, metrics={}))  # which are in the run's own records
        samples = Replay.find(replay, after=state.step)
        first_step, last_step = samples.first_step, samples.last_step
    tracker = open_records(config, launch, standing, last_step=last_step)
    _log_sizes(config, standing, tracker, {"train": prompts, "validation": val_prompts})
    if engine:
        scorer = make_scorer(config, rules, mesh, tokenizer)
        sampler = make_sampler(config, engine, actor.learner, scorer, launch)
        samples = make_samples(config, prompts, sampler, scorer)
        if val_prompts:
            validation = make_validation(config, val_prompts, sampler, scorer, tracker, replaces=goes_on)
    job = Job(
        samples=samples,
        actor=actor,
        reference=reference if {config.kl_of_reward, config.kl_of_loss} - {None, "full"} else None,
        critic=critic,
        gate=_make_gate(config, launch) if engine else None,
        algorithm=replace(config.algorithm, use_kl_in_reward=config.kl_of_reward is not None),
        schedule=make_schedule(config.trainer, first_step=first_step, last_step=last_step, resumed=standing.is_resumed),
        validation=validation,
        checkpoints=checkpoints,
        tracker=tracker,
        num_ranks=launch.world_size,
    )
    return Run(job=job, progress=make_progress(config, state, prompts), engine=engine)


def _first_as_read(config: Config, state: State, prompts: PromptStream, val_prompts: PromptStream | None) -> str:
    """Describe for people the prompt that this job reads first."""
    if config.trainer.val_only and val_prompts:
        return val_prompts.first_as_read(Position())
    return prompts.first_as_read(state.position or prompts.position_of(state.step))


def _make_gate(config: Config, launch: Launch) -> Gate | None:
    """Make what new samples must pass; None if the engine's log-probabilities cannot be compared."""
    if not config.actor_rollout_ref.rollout.compares:
        return None
    gate = Gate(limits=make_limits(config))
    if launch.rank == 0:
        print(gate)
    return gate


def make_schedule(trainer: TrainerSection, *, first_step: int, last_step: int, resumed: bool) -> Schedule:
    """When a run of the steps from `first_step` on validates, saves and ends."""
    return Schedule(
        first_step=first_step,
        last_step=first_step if trainer.val_only else last_step,
        test_freq=trainer.test_freq,
        save_freq=trainer.save_freq,
        validate_first=trainer.val_only or (trainer.val_before_train and not resumed),
        critic_warmup=trainer.critic_warmup,
    )


def make_progress(config: Config, state: State, prompts: PromptStream) -> Progress:
    """What the first iteration starts from."""
    position = state.position or prompts.position_of(state.step)
    return Progress(
        kl=make_kl_controller(config.algorithm.kl_ctrl, state),
        position=position,
        best=state.best,
        mismatches=state.mismatches,
    )


def make_kl_controller(section: KLControlSection, state: State) -> KL:
    """The controller of the KL coefficient; an adaptive one goes on from the coefficient it had reached."""
    if section.type == "fixed":
        return FixedKL(section.kl_coef)
    coef = section.kl_coef if state.kl_coef is None else state.kl_coef
    return AdaptiveKL(coef, target=section.target_kl, horizon=section.horizon)


def build_validation(config: Config, launch: Launch) -> tuple[Validation, RolloutEngine, int]:
    """The validation of the checkpoint that the configuration would continue from, and its step.

    Raises:
        ValueError: there are no validation files.
    """
    trainer, policy = config.trainer, config.actor_rollout_ref
    name_own_code(config)
    source = Source.read(policy.model)
    tokenizer = make_tokenizer(config, source)
    prompts = validation_prompts(config, tokenizer)
    if prompts is None:
        raise ValueError("data.val_files is not set: name the parquet files to evaluate on")
    rules = make_rules(config.reward_model, config.custom_reward_function, tokenizer)
    if launch.rank == 0:
        print(prompts.first_as_read(Position()))
    engine = make_engine(config, source, tokenizer)
    mesh = build_mesh(policy.actor.megatron)
    actor = make_learner(
        source.directory,
        source.architecture,
        policy.actor.megatron,
        mesh,
        role="policy",
        device=device_of(config),
    )
    scorer = make_scorer(config, rules, mesh, tokenizer)
    step = 0
    if checkpoint := resumed_checkpoint(trainer):
        load_learner(actor, checkpoint / "actor")
        step = State.read(checkpoint).step
    tracker = _console(trainer, launch, total_steps=step)
    sampler = make_sampler(config, engine, actor, scorer, launch)
    return make_validation(config, prompts, sampler, scorer, tracker, replaces=False), engine, step


def open_records(config: Config, launch: Launch, standing: Standing, *, last_step: int) -> Tracker:
    """The run's records, its configuration among them; a job that only validates shows its scores and records nothing.

    Collective.
    """
    trainer = config.trainer
    if trainer.val_only:
        return _console(trainer, launch, total_steps=last_step)
    on_first_rank(lambda: write_whole(Path(trainer.default_local_dir) / CONFIG_FILE, to_yaml(config).encode()))
    return run_tracker(config, launch, standing, last_step=last_step)


def _console(trainer: TrainerSection, launch: Launch, *, total_steps: int) -> Tracker:
    return make_tracker(
        ["console"],
        TrackedRun(run_dir=Path(trainer.default_local_dir), project="", experiment="", params={}),
        total_steps=total_steps,
        is_main=launch.rank == 0,
    )


def _log_sizes(
    config: Config, standing: Standing, tracker: Tracker, streams: Mapping[str, PromptStream | None]
) -> None:
    """Record how many prompts a new run found too long, if it looked."""
    if config.data.filter_overlong_prompts and not standing.is_resumed:
        sizes = [{"files": name} | stream.sizes for name, stream in streams.items() if stream]
        tracker.log_table("data/prompts", sizes, step=standing.state.step)


def _checkpoints(
    config: Config,
    launch: Launch,
    source: Source,
    tokenizer: Tokenizer,
    actor: Model[Any],
    critic: Model[Any] | None,
    *,
    mirrored: bool,
) -> CheckpointStore:
    dtype = config.actor_rollout_ref.actor.megatron.dtype
    learners = {model.name: model.learner for model in (actor, critic) if model}

    def export(checkpoint: Path) -> None:
        export_model(actor.learner, source, tokenizer, checkpoint / HUGGINGFACE, launch)
        if critic:
            reader = critic.translate.reader if critic.translate else tokenizer
            learnt_from = Source.read(config.critic.model)
            export_model(critic.learner, learnt_from, reader, checkpoint / f"{HUGGINGFACE}_{critic.name}", launch)

    return make_checkpoints(
        config,
        learners,
        write_huggingface=lambda directory: source.write_config_and_tokenizer(directory, tokenizer, dtype=dtype),
        export=export,
        mirrored=mirrored,
    )


def make_checkpoints(
    config: Config | SupervisedConfig,
    learners: Mapping[str, Learner],
    *,
    write_huggingface: Callable[[Path], None],
    export: Callable[[Path], None],
    mirrored: bool = True,
) -> CheckpointStore:
    """The checkpoints of a run as `trainer` wants them; says so where the disk has no room for one.

    Args:
        config: of the run.
        learners: what is saved, by name.
        write_huggingface: writes configuration and tokenizer to a directory.
        export: writes the weights for others into a checkpoint. Collective.
        mirrored: where a mirror is asked for.
    """
    trainer, code = config.trainer, own_code(config)
    checkpoints = CheckpointStore(
        directory=Path(trainer.default_local_dir),
        learners=learners,
        keep=trainer.max_ckpt_to_keep,
        write_huggingface=write_huggingface,
        export=export if trainer.save_huggingface else None,
        texts=lambda: checkpoint_texts(config, learners, code),
        is_async=trainer.async_save,
        mirror=mirror_of(trainer) if mirrored else None,
    )
    if trainer.save_freq > 0:
        warn_of_space(checkpoints.directory, checkpoints.num_bytes)
    return checkpoints


def name_own_code(config: Config | SupervisedConfig) -> None:
    """Print which code of the user's own runs: rewards, and what models bring with them. Collective.

    Raises:
        ValueError: it is not the same on all ranks.
    """
    code = own_code(config)
    agree(code)
    if dist.get_rank() == 0:
        for key, what in code.items():
            print(f"code of your own: {key}: {what}")


def check_directories(trainer: TrainerSection) -> None:
    """Find out whether every rank can write what the run keeps, before anything is built. Collective.

    Raises:
        ValueError: one cannot; on every rank, with the key and the remedy.
    """
    directories = {
        "trainer.default_local_dir": trainer.default_local_dir,
        "trainer.rollout_data_dir": trainer.rollout_data_dir,
    }

    def check() -> None:
        for key, name in directories.items():
            if name:
                check_writable(Path(name), key)

    together(check)


def finish_records(config: Config | SupervisedConfig, launch: Launch, standing: Standing, *, last_step: int) -> None:
    """Say that nothing is left to do, and do what the run died before: record the last step, complete the mirror."""
    if launch.rank == 0:
        print(nothing_left(Path(config.trainer.default_local_dir), standing.state.step, last_step))
    run_tracker(config, launch, standing, last_step=last_step).close()
    if standing.checkpoint and (mirror := mirror_of(config.trainer)):
        mirror.remember(standing.checkpoint)
        mirror.close()


def run_tracker(config: Config | SupervisedConfig, launch: Launch, standing: Standing, *, last_step: int) -> Tracker:
    """What `trainer.logger` asks for, on the rank that tracks."""
    trainer = config.trainer
    run = TrackedRun(
        run_dir=Path(trainer.default_local_dir),
        project=trainer.project_name,
        experiment=trainer.experiment_name,
        params=to_dict(config) | ({"code": code} if (code := own_code(config)) else {}),
        resume_step=standing.state.step if standing.is_resumed else None,
        resume_metrics=standing.state.metrics,
        same_curve=standing.same_curve,
    )
    return make_tracker(
        trainer.logger,
        run,
        total_steps=last_step,
        is_main=launch.rank == 0,
        mlflow_tracking_uri=trainer.mlflow_tracking_uri,
    )
