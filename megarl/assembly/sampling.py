"""Builds what a run samples and scores with: prompts, engine, sampler, reward and validation."""

import json
import logging
import math
from dataclasses import replace
from pathlib import Path

from megarl.assembly.models import make_budget
from megarl.assembly.resume import ResumePoint
from megarl.assembly.reward import Reward, make_reward
from megarl.checkpoint.directory import STEP_PREFIX
from megarl.config.load import to_dict
from megarl.config.root import Config
from megarl.config.schema import Schema
from megarl.data.prompts import PromptStream
from megarl.data.tokenizer import Tokenizer
from megarl.distributed.launch import Launch
from megarl.distributed.sharded import Shares
from megarl.environments.episodes import Environments
from megarl.environments.scoring import EpisodeScorer
from megarl.learner.learner import Learner
from megarl.learner.parallel import Mesh
from megarl.mark import Effect
from megarl.models.hub import stop_token_ids
from megarl.models.source import Source
from megarl.reshard.executor import Reshard
from megarl.rewards.scoring import RuleScorer
from megarl.rollout.engine import RolloutEngine
from megarl.rollout.limits import Limits
from megarl.rollout.start import start_engine
from megarl.samples.step_cache import StepCache
from megarl.samples.store import SampleStore
from megarl.section import flatten
from megarl.tracking.protocol import Tracker
from megarl.training.collect import Collector, SampleSource
from megarl.training.partial import Partial
from megarl.training.replay import Recorder
from megarl.training.roles import EngineSampler
from megarl.training.validation import Validation
from megarl.weight_sync.plan import plan_sync
from megarl.weight_sync.selfcheck import SelfCheck
from megarl.weight_sync.transfer import Sync

logger = logging.getLogger(__name__)


def make_engine(config: Config, source: Source, tokenizer: Tokenizer) -> RolloutEngine:
    """Start this rank's part of a vLLM engine. It has no weights yet."""
    policy = config.actor_rollout_ref
    rollout = config.actor_rollout_ref.rollout
    num_ranks = config.trainer.nnodes * config.trainer.n_gpus_per_node
    logger.info("starting: the engine")
    prompts_per_replica = math.ceil(config.num_drawn * rollout.tensor_model_parallel_size / num_ranks)
    return start_engine(
        source,
        rollout,
        stop_token_ids=stop_token_ids(source.directory, tokenizer.eos_token_id),
        max_model_len=rollout.prompt_length + rollout.response_length,
        max_sequences=prompts_per_replica * rollout.n,
        trust_remote_code=policy.model.trust_remote_code,
    )


def make_sampler(
    config: Config,
    engine: RolloutEngine,
    actor: Learner,
    scorer: Reward,
    launch: Launch,
    environments: Environments | None,
    step_cache: StepCache | None = None,
) -> EngineSampler:
    """Plan the sync from actor to engine, and make the sampler that uses it. `step_cache` None: none is kept."""
    policy = config.actor_rollout_ref
    rollout = config.actor_rollout_ref.rollout
    budget = make_budget(config, rollout.log_prob_micro_batch_size or policy.actor.ppo_micro_batch_size)
    plan = plan_sync(
        actor.architecture,
        policy.actor.megatron,
        rollout,
        held=actor.layout(),
        needed=engine.weights.layout(),
        launch=launch,
    )
    check = SelfCheck(make_limits(config), engine, actor, budget, check_every=rollout.sync.check_every)
    return EngineSampler(
        engine=engine,
        sync=Sync(engine=engine, actor=actor, reshard=Reshard(plan, device=actor.device), check=check),
        section=rollout,
        finished=scorer.begin,
        environments=environments,
        step_cache=step_cache,
    )


def make_step_cache(config: Config, resume_point: ResumePoint) -> StepCache | None:
    """Make the files of complete responses. Return None if the run keeps none."""
    if not config.actor_rollout_ref.rollout.keep_complete:
        return None
    run_dir = Path(config.trainer.default_local_dir)
    first_step = resume_point.state.step
    schema = Schema.of(Config)
    what_matters = {
        path: value
        for path, value in flatten(to_dict(config))
        if schema.changes[schema.leaf(path)].effect is not Effect.NONE
    }

    def checkpoint_of(step: int) -> Path | None:
        return resume_point.checkpoint if step == first_step else run_dir / f"{STEP_PREFIX}{step}"

    return StepCache(
        run_dir,
        config=json.dumps(what_matters),
        checkpoint_of=checkpoint_of,
        shares=Shares.blocks(config.actor_rollout_ref.rollout.tensor_model_parallel_size),
    )


def make_limits(config: Config) -> Limits:
    """Return the limits of the differences between engine and trainer."""
    policy = config.actor_rollout_ref
    return Limits.of(policy.rollout.sync, policy.rollout.dtype, policy.actor.megatron.dtype)


def make_scorer(config: Config, rules: RuleScorer | None, mesh: Mesh, tokenizer: Tokenizer, source: Source) -> Reward:
    """Make the reward: rules, a reward model, both, or that of an environment."""
    if config.environment.name:
        return EpisodeScorer(config.environment, tokenizer)
    section = config.reward_model
    return make_reward(
        rules,
        section,
        tokenizer,
        source,
        mesh,
        policy_path=config.actor_rollout_ref.model.path,
        budget=make_budget(config, section.micro_batch_size),
        balance=config.trainer.balance_batch,
    )


def make_sample_store(config: Config) -> SampleStore | None:
    """Open the directory of samples. Return None if the samples are not kept."""
    directory = config.trainer.rollout_data_dir
    return SampleStore(Path(directory)) if directory else None


def make_samples(config: Config, prompts: PromptStream, sampler: EngineSampler, scorer: Reward) -> SampleSource:
    """Make the source of new samples. It keeps them in files if `trainer.rollout_data_dir` names a directory."""
    rollout = config.actor_rollout_ref.rollout
    partial = Partial(wanted=config.data.train_batch_size, num_samples=rollout.n, section=rollout.partial)
    collector = Collector(
        prompts=prompts,
        sampler=sampler,
        scorer=scorer,
        algorithm=config.algorithm,
        partial=partial if rollout.partial.enable else None,
    )
    store = make_sample_store(config)
    return Recorder(samples=collector, store=store) if store else collector


def make_validation(
    config: Config, prompts: PromptStream, sampler: EngineSampler, scorer: Reward, tracker: Tracker, *, replaces: bool
) -> Validation:
    """Make the validation on held-out prompts. `replaces`: its kept samples may replace earlier files."""
    store = make_sample_store(config)
    return Validation(
        prompts=prompts,
        sampler=sampler,
        scorer=scorer,
        tracker=tracker,
        num_shown=config.trainer.log_val_generations,
        store=store and replace(store, replaces=replaces),
    )
