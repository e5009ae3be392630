"""The composition root: the one file that knows all concrete classes, and puts a run together from its configuration."""

import importlib
import json
import math
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from megarl.algorithms.kl import AdaptiveKL, FixedKL
from megarl.checkpoints import Checkpoints, State, find_checkpoint, read_state
from megarl.config.load import to_dict, to_yaml
from megarl.config.root import Config
from megarl.data.prompts import PromptDataset, PromptStream
from megarl.data.tokenizer import Tokenizer, load_tokenizer
from megarl.distributed.exchange import together
from megarl.distributed.launch import Launch
from megarl.learner.config import ActorSection, ModelSection
from megarl.learner.factory import make_learner
from megarl.learner.learner import Budget, Learner
from megarl.learner.parallel import Mesh, build_mesh
from megarl.loop import Job, Schedule
from megarl.models.architecture import Architecture, hf_shapes, read_architecture
from megarl.models.hub import local_directory, read_config
from megarl.objectives import ActorObjective, CriticObjective
from megarl.platform.device import device_type, local_device
from megarl.reshard.executor import Reshard
from megarl.reshard.planner import make_plan
from megarl.rewards.scoring import load_reward
from megarl.roles import Model, Sampler, Scorer, Updates
from megarl.rollout.engine import RolloutEngine
from megarl.rollout.sampling import stop_token_ids
from megarl.tracking.tracker import make_tracker


@dataclass(frozen=True, kw_only=True)
class Source:
    """A Hugging Face checkpoint to start from."""

    directory: Path
    hf_config: dict[str, Any]  # overrides applied
    architecture: Architecture


@dataclass(frozen=True, kw_only=True)
class Run:
    """A job, and where it stands."""

    job: Job
    kl: FixedKL | AdaptiveKL
    run_dir: Path


def build_run(config: Config, launch: Launch) -> Run:
    """Everything of a training run, in the state of the checkpoint it continues from."""
    policy, trainer, algorithm = config.actor_rollout_ref, config.trainer, config.algorithm
    run_dir = Path(trainer.default_local_dir)
    source = read_source(policy.model)
    tokenizer = policy_tokenizer(config, source)
    prompts, val_prompts = _prompts(config, tokenizer)
    last_step = trainer.total_training_steps or trainer.total_epochs * prompts.steps_per_epoch

    engine = _engine(config, source, tokenizer)
    mesh = build_mesh(policy.actor.megatron)
    actor, reference, critic = _models(config, source, mesh, last_step=last_step)
    checkpoints = Checkpoints(
        directory=run_dir,
        learners={model.name: model.learner for model in (actor, critic) if model},
        keep=trainer.max_ckpt_to_keep,
        write_huggingface=lambda directory: write_huggingface(directory, source, tokenizer),
    )
    resumed = find_checkpoint(run_dir, mode=trainer.resume_mode, path=trainer.resume_from_path)
    state = checkpoints.load(resumed) if resumed else State()
    if launch.rank == 0:
        run_dir.mkdir(parents=True, exist_ok=True)
        (run_dir / "config.yaml").write_text(to_yaml(config))
    job = Job(
        prompts=prompts,
        val_prompts=val_prompts,
        sampler=_sampler(config, engine, actor.learner, launch),
        scorer=Scorer(reward=load_reward(config.custom_reward_function), tokenizer=tokenizer),
        actor=actor,
        reference=reference,
        critic=critic,
        algorithm=algorithm,
        schedule=Schedule(
            first_step=state.step,
            last_step=last_step,
            test_freq=trainer.test_freq,
            save_freq=trainer.save_freq,
            validate_first=trainer.val_before_train and not resumed,
            critic_warmup=trainer.critic_warmup if critic else 0,
        ),
        tracker=make_tracker(
            trainer.logger,
            run_dir=run_dir,
            project=trainer.project_name,
            experiment=trainer.experiment_name,
            params=to_dict(config),
            total_steps=last_step,
            is_main=launch.rank == 0,
            mlflow_tracking_uri=trainer.mlflow_tracking_uri,
            resume_step=state.step if resumed else None,
        ),
        checkpoints=checkpoints,
        num_ranks=launch.world_size,
        log_val_generations=trainer.log_val_generations,
    )
    return Run(job=job, kl=_kl_controller(config, state), run_dir=run_dir)


def read_source(section: ModelSection) -> Source:
    """Find a checkpoint and read what it describes; imports `external_lib` first, which may register its classes."""
    libraries = section.external_lib or []
    for library in [libraries] if isinstance(libraries, str) else libraries:
        importlib.import_module(library)
    directory = local_directory(section.path)
    hf_config = read_config(directory, section.override_config)
    return Source(directory=directory, hf_config=hf_config, architecture=read_architecture(hf_config))


def policy_tokenizer(config: Config, source: Source) -> Tokenizer:
    """The tokenizer of actor, engine and reference.

    Raises:
        ValueError: it knows tokens that the model does not.
    """
    tokenizer = load_tokenizer(
        config.data.tokenizer or str(source.directory),
        chat_template=config.data.chat_template,
        trust_remote_code=config.actor_rollout_ref.model.trust_remote_code,
    )
    if tokenizer.vocab_size > source.architecture.vocab_size:
        raise ValueError(
            f"data.tokenizer has {tokenizer.vocab_size} tokens, the model in {source.directory} only "
            f"{source.architecture.vocab_size}: give the tokenizer that the model was trained with"
        )
    return tokenizer


def write_huggingface(directory: Path, source: Source, tokenizer: Tokenizer) -> None:
    """Write what a checkpoint needs beside its weights: config, generation config and tokenizer."""
    (directory / "config.json").write_text(json.dumps(source.hf_config, indent=2))
    if (generation := source.directory / "generation_config.json").exists():
        shutil.copy(generation, directory)
    tokenizer.save(directory)


def _prompts(config: Config, tokenizer: Tokenizer) -> tuple[PromptStream, PromptStream | None]:
    data = config.data
    train = PromptDataset(data, data.train_files, tokenizer)
    val = PromptDataset(data, data.val_files, tokenizer) if data.val_files else None
    return (
        PromptStream(train, batch_size=data.train_batch_size, shuffle=data.shuffle, seed=data.seed),
        PromptStream(val, batch_size=data.val_batch_size, shuffle=False, seed=data.seed) if val else None,
    )


def _engine(config: Config, source: Source, tokenizer: Tokenizer) -> RolloutEngine:
    policy, rollout = config.actor_rollout_ref, config.actor_rollout_ref.rollout
    overrides = {"hf_overrides": policy.model.override_config} if policy.model.override_config else {}
    num_replicas = torch.distributed.get_world_size() // rollout.tensor_model_parallel_size
    train_samples = math.ceil(config.data.train_batch_size / num_replicas) * rollout.n
    return RolloutEngine(
        replace(rollout, engine_kwargs=rollout.engine_kwargs | overrides),
        model_dir=source.directory,
        shapes=hf_shapes(source.architecture),
        num_key_value_heads=source.architecture.num_key_value_heads,
        stop_token_ids=stop_token_ids(source.directory, tokenizer.eos_token_id),
        max_model_len=rollout.prompt_length + rollout.response_length,
        max_sequences=train_samples,
        trust_remote_code=policy.model.trust_remote_code,
    )


def _sampler(config: Config, engine: RolloutEngine, actor: Learner, launch: Launch) -> Sampler:
    rollout = config.actor_rollout_ref.rollout
    plan = make_plan(
        together(actor.layout),
        together(engine.weights.layout),
        rank=launch.rank,
        ranks_per_node=launch.local_world_size,
        bucket_bytes=rollout.sync.bucket_megabytes << 20,
    )
    return Sampler(engine=engine, actor=actor, reshard=Reshard(plan, device=actor.device), section=rollout)


def _models(
    config: Config, source: Source, mesh: Mesh, *, last_step: int
) -> tuple[Model[Any], Model[Any] | None, Model[Any] | None]:
    """Actor, reference (where the KL is asked for) and critic (where the advantages need one)."""
    policy, algorithm = config.actor_rollout_ref, config.algorithm
    actor, critic, data = policy.actor, config.critic, config.data
    device = local_device(device_type(config.trainer.device))
    common: dict[str, Any] = {"device": device, "balance": config.trainer.balance_batch}
    longest = policy.rollout.prompt_length + policy.rollout.response_length

    def budget(max_sequences: int | None, max_tokens: int | None = None) -> Budget:
        if not actor.use_dynamic_bsz and max_sequences:
            return Budget(max_tokens=max_sequences * longest, max_sequences=max_sequences)
        return Budget(max_tokens=max_tokens or actor.ppo_max_token_len_per_gpu, max_sequences=max_sequences)

    acting = Model[Any](
        name="actor",
        learner=make_learner(
            source.directory,
            source.architecture,
            actor.megatron,
            mesh,
            role="policy",
            temperature=policy.rollout.temperature,
            recompute=policy.model.enable_gradient_checkpointing,
            training=(actor.optim, actor.grad_clip, last_step),
            **common,
        ),
        budget=budget(policy.rollout.log_prob_micro_batch_size or actor.ppo_micro_batch_size),
        updates=Updates(
            objective=ActorObjective(actor, horizon=data.max_response_length),
            budget=budget(actor.ppo_micro_batch_size),
            num_prompts=actor.ppo_mini_batch_size,
            num_epochs=actor.ppo_epochs,
            shuffle=actor.shuffle,
            seed=data.seed,
        ),
    )
    reference = None
    if actor.use_kl_loss or (algorithm.use_kl_in_reward and algorithm.kl_ctrl.kl_coef > 0.0):
        reference = Model[Any](
            name="reference",
            learner=make_learner(
                source.directory,
                source.architecture,
                policy.ref.megatron,
                mesh,
                role="policy",
                temperature=policy.rollout.temperature,
                **common,
            ),
            budget=budget(policy.ref.log_prob_micro_batch_size, policy.ref.log_prob_max_token_len_per_gpu),
        )
    if algorithm.adv_estimator != "gae":
        return acting, reference, None
    value_source = read_source(critic.model)
    valuing = Model[Any](
        name="critic",
        learner=make_learner(
            value_source.directory,
            value_source.architecture,
            critic.megatron,
            mesh,
            role="value",
            recompute=critic.model.enable_gradient_checkpointing,
            training=(critic.optim, critic.grad_clip, last_step),
            **common,
        ),
        budget=budget(critic.forward_micro_batch_size or critic.ppo_micro_batch_size),
        updates=Updates(
            objective=CriticObjective(critic, horizon=data.max_response_length),
            budget=budget(critic.ppo_micro_batch_size),
            num_prompts=critic.ppo_mini_batch_size,
            num_epochs=critic.ppo_epochs,
            shuffle=actor.shuffle,
            seed=data.seed,
        ),
    )
    return acting, reference, valuing


def _kl_controller(config: Config, state: State) -> FixedKL | AdaptiveKL:
    control = config.algorithm.kl_ctrl
    coef = control.kl_coef if state.kl_coef is None else state.kl_coef
    if control.type == "fixed":
        return FixedKL(coef)
    return AdaptiveKL(coef, target=control.target_kl, horizon=control.horizon)
