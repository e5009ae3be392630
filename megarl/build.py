"""The composition root: the one file that knows all concrete classes and puts a run together as configured."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from megarl.algorithms.config import KLControlSection
from megarl.algorithms.kl import AdaptiveKL, FixedKL
from megarl.archive import Archive
from megarl.checkpoints import Checkpoints, State, find_checkpoint
from megarl.collect import Collector, SampleSource
from megarl.config.load import to_dict, to_yaml
from megarl.config.root import Config, SupervisedConfig
from megarl.data.prompts import PromptDataset, PromptStream
from megarl.data.tokenizer import Tokenizer
from megarl.distributed.launch import Launch
from megarl.learner.checkpoint import load_learner
from megarl.learner.config import ActorSection, CriticSection
from megarl.learner.factory import make_learner
from megarl.learner.learner import Budget, Learner, Objective
from megarl.learner.parallel import Mesh, build_mesh
from megarl.loop import KL, Job, Progress, Schedule
from megarl.objectives import ActorObjective, CriticObjective, mark
from megarl.planning.ends import plan_sync
from megarl.platform.device import device_type, local_device
from megarl.ptx import Supervision
from megarl.replay import Recorder, Replay, replaying
from megarl.reshard.executor import Reshard
from megarl.reward_model import Reward, make_reward, make_rules
from megarl.rewards.scoring import Scorer
from megarl.roles import Model, Sampler, Updates
from megarl.rollout.engine import RolloutEngine
from megarl.rollout.sampling import stop_token_ids
from megarl.selfcheck import SelfCheck
from megarl.source import Source
from megarl.tracking.config import TrainerSection
from megarl.tracking.tracker import Tracker, make_tracker
from megarl.validation import Validation


@dataclass(frozen=True, kw_only=True)
class Run:
    """A job, where it stands, and what it holds on to."""

    job: Job
    progress: Progress
    engine: RolloutEngine | None  # None: nothing is sampled


def build_run(config: Config, launch: Launch, *, replay: Path | None = None) -> Run:
    """Everything of a training run, in the state of the checkpoint it continues from.

    `replay` names samples of an earlier run, which then stand in for engine, reward and validation.
    """
    trainer, policy = config.trainer, config.actor_rollout_ref
    source = Source.read(policy.model)
    tokenizer = _tokenizer(config, source)
    prompts, val_prompts = _prompts(config, tokenizer), _val_prompts(config, tokenizer)
    rules = make_rules(config.reward_model, config.custom_reward_function, tokenizer)
    last_step = trainer.total_training_steps or trainer.total_epochs * prompts.steps_per_epoch

    engine = None if replay else _engine(config, source, tokenizer)
    mesh = build_mesh(policy.actor.megatron)
    reference = _reference(config, source, mesh)
    anchor, supervision = reference.learner if reference else None, Supervision.of(config, tokenizer)
    actor = _actor(config, source, mesh, anchor, supervision, last_step=last_step)
    critic = _critic(config, mesh, last_step=last_step)
    checkpoints = _checkpoints(config, source, tokenizer, [model for model in (actor, critic) if model])
    resumed = find_checkpoint(checkpoints.directory, mode=trainer.resume_mode, path=trainer.resume_from_path)
    state = checkpoints.load(resumed) if resumed else State()
    first_step, validation = state.step, None
    samples: SampleSource
    if replay:
        config = replaying(config)
        samples = Replay.find(replay, after=state.step)
        first_step, last_step = samples.first_step, samples.last_step
    tracker = run_tracker(config, launch, last_step=last_step, resume_step=state.step if resumed else None)
    if config.data.filter_overlong_prompts:
        _log_sizes(tracker, {"train": prompts, "validation": val_prompts}, step=state.step)
    if engine:
        scorer = _scorer(config, rules, mesh, tokenizer)
        sampler = _sampler(config, engine, actor.learner, scorer, launch)
        collector = Collector(prompts=prompts, sampler=sampler, scorer=scorer, algorithm=config.algorithm)
        samples = Recorder(samples=collector, archive=archive) if (archive := _archive(config)) else collector
        validation = _validation(config, val_prompts, sampler, scorer, tracker) if val_prompts else None
    job = Job(
        samples=samples,
        actor=actor,
        reference=reference if {config.kl_of_reward, config.kl_of_loss} - {None, "full"} else None,
        critic=critic,
        algorithm=replace(config.algorithm, use_kl_in_reward=config.kl_of_reward is not None),
        schedule=make_schedule(config.trainer, first_step=first_step, last_step=last_step, resumed=resumed is not None),
        validation=validation,
        checkpoints=checkpoints,
        tracker=tracker,
        num_ranks=launch.world_size,
    )
    if launch.rank == 0:
        (Path(config.trainer.default_local_dir) / "config.yaml").write_text(to_yaml(config))
    progress = Progress(
        kl=make_kl_controller(config.algorithm.kl_ctrl, state),
        position=state.position or prompts.position_of(state.step),
    )
    return Run(job=job, progress=progress, engine=engine)


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
    run_dir = Path(trainer.default_local_dir)
    source = Source.read(policy.model)
    tokenizer = _tokenizer(config, source)
    prompts = _val_prompts(config, tokenizer)
    if prompts is None:
        raise ValueError("data.val_files is not set: name the parquet files to evaluate on")
    rules = make_rules(config.reward_model, config.custom_reward_function, tokenizer)
    engine = _engine(config, source, tokenizer)
    mesh = build_mesh(policy.actor.megatron)
    actor = make_learner(
        source.directory,
        source.architecture,
        policy.actor.megatron,
        mesh,
        role="policy",
        device=_device(config),
    )
    scorer = _scorer(config, rules, mesh, tokenizer)
    step = 0
    if checkpoint := find_checkpoint(run_dir, mode=trainer.resume_mode, path=trainer.resume_from_path):
        load_learner(actor, checkpoint / "actor")
        step = State.read(checkpoint).step
    tracker = make_tracker(
        ["console"], run_dir=run_dir, project="", experiment="", params={}, total_steps=step, is_main=launch.rank == 0
    )
    sampler = _sampler(config, engine, actor, scorer, launch)
    return _validation(config, prompts, sampler, scorer, tracker), engine, step


def _device(config: Config) -> Any:
    return local_device(device_type(config.trainer.device))


def _tokenizer(config: Config, source: Source) -> Tokenizer:
    return source.tokenizer(
        config.data.tokenizer,
        chat_template=config.data.chat_template,
        trust_remote_code=config.actor_rollout_ref.model.trust_remote_code,
    )


def _prompts(config: Config, tokenizer: Tokenizer) -> PromptStream:
    data = config.data
    dataset = PromptDataset(data, data.train_files, tokenizer)
    return PromptStream(dataset, batch_size=data.train_batch_size, shuffle=data.shuffle, seed=data.seed)


def _val_prompts(config: Config, tokenizer: Tokenizer) -> PromptStream | None:
    data = config.data
    if data.val_files is None:
        return None
    dataset = PromptDataset(data, data.val_files, tokenizer)
    return PromptStream(dataset, batch_size=data.val_batch_size, shuffle=False, seed=data.seed)


def _log_sizes(tracker: Tracker, streams: Mapping[str, PromptStream | None], *, step: int) -> None:
    sizes = [{"files": name} | stream.sizes for name, stream in streams.items() if stream]
    tracker.log_table("data/prompts", sizes, step=step)


def _validation(
    config: Config, prompts: PromptStream, sampler: Sampler, scorer: Reward, tracker: Tracker
) -> Validation:
    return Validation(
        prompts=prompts,
        sampler=sampler,
        scorer=scorer,
        tracker=tracker,
        num_shown=config.trainer.log_val_generations,
        archive=_archive(config),
    )


def _archive(config: Config) -> Archive | None:
    directory = config.trainer.rollout_data_dir
    return Archive(Path(directory)) if directory else None


def _scorer(config: Config, rules: Scorer | None, mesh: Mesh, tokenizer: Tokenizer) -> Reward:
    section = config.reward_model
    return make_reward(
        rules,
        section,
        tokenizer,
        mesh,
        policy_path=config.actor_rollout_ref.model.path,
        device=_device(config),
        budget=_budget(config, section.micro_batch_size),
        balance=config.trainer.balance_batch,
    )


def _engine(config: Config, source: Source, tokenizer: Tokenizer) -> RolloutEngine:
    policy, rollout = config.actor_rollout_ref, config.actor_rollout_ref.rollout
    num_ranks = config.trainer.nnodes * config.trainer.n_gpus_per_node
    prompts_per_replica = math.ceil(config.data.train_batch_size * rollout.tensor_model_parallel_size / num_ranks)
    return source.start_engine(
        rollout,
        stop_token_ids=stop_token_ids(source.directory, tokenizer.eos_token_id),
        max_model_len=rollout.prompt_length + rollout.response_length,
        max_sequences=prompts_per_replica * rollout.n,
        trust_remote_code=policy.model.trust_remote_code,
    )


def _sampler(config: Config, engine: RolloutEngine, actor: Learner, scorer: Reward, launch: Launch) -> Sampler:
    policy, rollout = config.actor_rollout_ref, config.actor_rollout_ref.rollout
    plan = plan_sync(
        actor.architecture,
        policy.actor.megatron,
        rollout,
        held=actor.layout(),
        needed=engine.weights.layout(),
        launch=launch,
    )
    return Sampler(
        engine=engine,
        actor=actor,
        reshard=Reshard(plan, device=actor.device),
        section=rollout,
        check=SelfCheck(rollout.sync, engine, actor, _budget(config, None)),
        finished=scorer.begin,
    )


def _checkpoints(config: Config, source: Source, tokenizer: Tokenizer, models: Sequence[Model[Any]]) -> Checkpoints:
    dtype = config.actor_rollout_ref.actor.megatron.dtype
    return Checkpoints(
        directory=Path(config.trainer.default_local_dir),
        learners={model.name: model.learner for model in models},
        keep=config.trainer.max_ckpt_to_keep,
        write_huggingface=lambda directory: source.write_companions(directory, tokenizer, dtype=dtype),
    )


def _actor(
    config: Config,
    source: Source,
    mesh: Mesh,
    reference: Learner | None,
    supervision: Supervision | None,
    *,
    last_step: int,
) -> Model[Any]:
    policy, actor = config.actor_rollout_ref, config.actor_rollout_ref.actor
    learner = make_learner(
        source.directory,
        source.architecture,
        actor.megatron,
        mesh,
        role="policy",
        device=_device(config),
        temperature=policy.rollout.temperature,
        recompute=policy.model.enable_gradient_checkpointing,
        balance=config.trainer.balance_batch,
        training=(actor.optim, actor.grad_clip, last_step),
    )
    return Model(
        name="actor",
        learner=learner,
        against=reference if config.kl_of_reward == "full" else None,
        budget=_budget(config, policy.rollout.log_prob_micro_batch_size or actor.ppo_micro_batch_size),
        updates=replace(
            _updates(config, actor, ActorObjective(actor, horizon=config.data.max_response_length)),
            prepare=partial(mark, section=actor),
            against=reference if config.kl_of_loss == "full" else None,
            beside=supervision.parts if supervision else None,
        ),
    )


def _reference(config: Config, source: Source, mesh: Mesh) -> Model[Any] | None:
    """The frozen policy, where something asks for the KL to it."""
    policy = config.actor_rollout_ref
    if not config.has_reference:
        return None
    learner = make_learner(
        source.directory,
        source.architecture,
        policy.ref.megatron,
        mesh,
        role="policy",
        device=_device(config),
        temperature=policy.rollout.temperature,
        balance=config.trainer.balance_batch,
    )
    ref = policy.ref
    max_tokens = ref.log_prob_max_token_len_per_gpu
    return Model(
        name="reference",
        learner=learner,
        budget=_budget(config, ref.log_prob_micro_batch_size or policy.actor.ppo_micro_batch_size, max_tokens),
    )


def _critic(config: Config, mesh: Mesh, *, last_step: int) -> Model[Any] | None:
    """The value model, where the advantages need one."""
    critic = config.critic
    if not config.has_critic:
        return None
    source = Source.read(critic.model)
    learner = make_learner(
        source.directory,
        source.architecture,
        critic.megatron,
        mesh,
        role="value",
        device=_device(config),
        recompute=critic.model.enable_gradient_checkpointing,
        balance=config.trainer.balance_batch,
        training=(critic.optim, critic.grad_clip, last_step),
    )
    return Model(
        name="critic",
        learner=learner,
        budget=_budget(config, critic.forward_micro_batch_size or critic.ppo_micro_batch_size),
        updates=_updates(config, critic, CriticObjective(critic, horizon=config.data.max_response_length)),
    )


def _updates(config: Config, section: ActorSection | CriticSection, objective: Objective) -> Updates:
    """How the actor or the critic goes through a batch."""
    return Updates(
        objective=objective,
        budget=_budget(config, section.ppo_micro_batch_size),
        num_prompts=section.ppo_mini_batch_size,
        num_epochs=section.ppo_epochs,
        shuffle=config.actor_rollout_ref.actor.shuffle,
        seed=config.data.seed,
    )


def _budget(config: Config, max_sequences: int | None, max_tokens: int | None = None) -> Budget:
    """What one forward pass takes: tokens, or without dynamic batches exactly so many sequences of any length."""
    policy = config.actor_rollout_ref
    if policy.actor.use_dynamic_bsz or max_sequences is None:
        return Budget(max_tokens=max_tokens or policy.actor.ppo_max_token_len_per_gpu, max_sequences=max_sequences)
    longest = policy.rollout.prompt_length + policy.rollout.response_length
    return Budget(max_tokens=max_sequences * longest, max_sequences=max_sequences)


def run_tracker(
    config: Config | SupervisedConfig, launch: Launch, *, last_step: int, resume_step: int | None
) -> Tracker:
    """What `trainer.logger` asks for, on the rank that tracks."""
    trainer = config.trainer
    return make_tracker(
        trainer.logger,
        run_dir=Path(trainer.default_local_dir),
        project=trainer.project_name,
        experiment=trainer.experiment_name,
        params=to_dict(config),
        total_steps=last_step,
        is_main=launch.rank == 0,
        mlflow_tracking_uri=trainer.mlflow_tracking_uri,
        resume_step=resume_step,
    )
