"""Builds the models of a run as configured: actor, reference and critic, with their budgets and objectives."""

import logging
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from megarl.algorithms.config import EXACT, KLEstimator
from megarl.algorithms.kl import Divergence
from megarl.config.learning_checks import actor_updates
from megarl.config.policy import ActorSection, CriticSection
from megarl.config.root import Config
from megarl.data.tokenizer import Tokenizer, load_tokenizer
from megarl.data.translation import Translation
from megarl.learner.batching import Budget, Replays
from megarl.learner.factory import make_learner
from megarl.learner.forward import ReferenceDivergence
from megarl.learner.learner import Learner
from megarl.learner.parallel import Mesh, build_mesh
from megarl.learner.per_data_source import PerDataSource
from megarl.learner.terms import Objective
from megarl.models.architecture import Architecture
from megarl.models.source import Source
from megarl.platform.errors import UserError
from megarl.rollout.config import RoutingReplay
from megarl.training.custom import CustomLoss
from megarl.training.marks import mark
from megarl.training.minibatches import MiniBatches
from megarl.training.objectives import ActorObjective, CriticObjective
from megarl.training.ptx import Supervision
from megarl.training.roles import FrozenPolicies, Model, Updates
from megarl.training.skips import Skips

logger = logging.getLogger(__name__)

REPLAYS: dict[RoutingReplay, Replays] = {"none": "none", "engine": "experts", "engine_scores": "scores"}


@dataclass(frozen=True, kw_only=True)
class Models:
    """The models of a run, and this rank's place among the ranks that share them."""

    mesh: Mesh
    actor: Model[Any]
    reference: FrozenPolicies | None
    critic: Model[Any] | None


def make_models(
    config: Config,
    source: Source,
    tokenizer: Tokenizer,
    *,
    supervision: Supervision | None,
    custom_loss: CustomLoss | None,
    last_step: int,
) -> Models:
    """Build the models that the configuration needs. `tokenizer` is the policy's, `custom_loss` the user's, if chosen.

    Raises what `make_critic` and `make_reference` do.
    """
    mesh = build_mesh(config.actor_rollout_ref.actor.megatron)
    learner = make_actor_learner(config, source, mesh, last_step=last_step)
    reference = make_reference(config, source, mesh, tokenizer, learner)
    actor = make_actor(config, learner, reference, supervision, custom_loss)
    critic = make_critic(config, mesh, tokenizer, learner, last_step=last_step)
    return Models(mesh=mesh, actor=actor, reference=reference, critic=critic)


def make_actor_learner(config: Config, source: Source, mesh: Mesh, *, last_step: int) -> Learner:
    """Build this rank's part of the policy that learns."""
    policy = config.actor_rollout_ref
    actor = config.actor_rollout_ref.actor
    logger.info("starting: the actor")
    return make_learner(
        source.directory,
        source.architecture,
        actor.megatron,
        mesh,
        role="policy",
        temperature=policy.rollout.temperature,
        recompute=policy.model.enable_gradient_checkpointing,
        balance=config.trainer.balance_batch,
        freeze_routers=policy.model.freeze_moe_router,
        training=(actor.optim, actor.grad_clip, actor_updates(config, last_step)),
        lora=source.lora,
        replays=REPLAYS["engine" if actor.routing_replay == "recompute" else policy.rollout.routing_replay],
    )


def make_actor(
    config: Config,
    learner: Learner,
    reference: FrozenPolicies | None,
    supervision: Supervision | None,
    custom_loss: CustomLoss | None,
) -> Model[Any]:
    """Make the policy that learns, with the configured parts of its loss."""
    policy = config.actor_rollout_ref
    actor = config.actor_rollout_ref.actor
    objective = ActorObjective(actor, horizon=config.data.max_response_length, custom=custom_loss)
    return Model(
        name="actor",
        learner=learner,
        against=_against(reference, config.kl_of_reward, config.algorithm.kl_penalty_js_beta),
        with_entropy=True,
        keeps_routes=actor.routing_replay == "recompute",
        reads_everywhere=reads_everywhere(config),
        budget=make_budget(config, policy.rollout.log_prob_micro_batch_size or actor.ppo_micro_batch_size),
        updates=replace(
            _updates(config, "actor", actor, objective),
            prepare=partial(mark, settings=actor.policy_loss),
            against=_against(reference, config.kl_of_loss, actor.kl_loss_js_beta),
            supervision=supervision,
        ),
    )


def reads_everywhere(config: Config) -> bool:
    """Return whether every pipeline stage needs all tokens of its samples."""
    models = [config.actor_rollout_ref.model, *([config.critic.model] if config.has_critic else [])]
    has_dropout = any(model.has_adapters and model.lora_dropout > 0.0 for model in models)
    return has_dropout or (config.has_critic and config.tokenizer_of_critic is not None)


def _against(reference: FrozenPolicies | None, kind: KLEstimator | None, beta: float) -> ReferenceDivergence | None:
    """Return the exact divergence of this kind from the reference; None if it is estimated, or if there is none."""
    return reference.against(Divergence(kind, beta)) if reference and kind in EXACT else None


def make_reference(
    config: Config, source: Source, mesh: Mesh, tokenizer: Tokenizer, actor: Learner
) -> FrozenPolicies | None:
    """Make the frozen policies: the actor's start in `source`, or teachers. Return None if no KL to them is needed.

    The start of an actor with adapters is the actor without them, in the same memory.

    Raises:
        UserError: the tokenizer of a teacher is not `tokenizer`, the policy's.
    """
    if not config.has_reference:
        return None
    models = dict[str | None, Model[Any]]()
    if None not in config.teachers:
        replays = replays_of_frozen(config, source.architecture, actor.architecture)
        start = actor.without_adapters(replays=replays) if actor.lora else _frozen(config, source, mesh, actor)
        models[None] = make_frozen(config, start)
    for data_source, section in config.teachers.items():
        teacher = Source.read(section)
        theirs = teacher.tokenizer(trust_remote_code=section.trust_remote_code)
        differing = tokenizer.differences(theirs)
        if differing:
            key = "model.path" if data_source is None else f"teachers.{data_source}"
            raise UserError(
                f"{teacher.directory} (actor_rollout_ref.ref.{key}) has other tokens than the policy: {differing}. "
                "A teacher reads the policy's tokens as they are: name a model that was trained with the same tokenizer"
            )
        models[data_source] = make_frozen(config, _frozen(config, teacher, mesh, actor))
    other = models.pop(None)
    return FrozenPolicies(PerDataSource(named={str(name): model for name, model in models.items()}, other=other))


def _frozen(config: Config, source: Source, mesh: Mesh, actor: Learner) -> Learner:
    """Build this rank's part of a policy that never learns."""
    logger.info("starting: the reference")
    return make_learner(
        source.directory,
        source.architecture,
        config.actor_rollout_ref.ref.megatron,
        mesh,
        role="policy",
        temperature=config.actor_rollout_ref.rollout.temperature,
        balance=config.trainer.balance_batch,
        replays=replays_of_frozen(config, source.architecture, actor.architecture),
    )


def replays_of_frozen(config: Config, architecture: Architecture, of_actor: Architecture) -> Replays:
    """Return what a policy that never learns takes of the routes of samples.

    These are the engine's experts, if it has the actor's routers: its scores are others, and the experts that the actor
    chooses are those of the actor's updates alone.
    """
    is_replayed = config.actor_rollout_ref.rollout.routing_replay != "none"
    return "experts" if is_replayed and architecture.has_routers_of(of_actor) else "none"


def make_frozen(config: Config, learner: Learner) -> Model[Any]:
    """Make a policy that never learns."""
    policy = config.actor_rollout_ref
    ref = config.actor_rollout_ref.ref
    max_sequences = ref.log_prob_micro_batch_size or policy.actor.ppo_micro_batch_size
    budget = make_budget(config, max_sequences, ref.log_prob_max_token_len_per_gpu)
    return Model(name="reference", learner=learner, budget=budget)


def make_critic(
    config: Config, mesh: Mesh, tokenizer: Tokenizer, actor: Learner, *, last_step: int
) -> Model[Any] | None:
    """Make the value model. Return None if the advantages need no critic. `tokenizer` is the policy's.

    If it has adapters on the weights that the actor's adapters belong to, both share the memory of these weights.

    Raises:
        UserError: the critic has no tokenizer of its own, and does not know all of the policy's tokens.
    """
    critic = config.critic
    if not config.has_critic:
        return None
    source = Source.read(critic.model)
    own = config.tokenizer_of_critic
    if own is None and tokenizer.vocab_size > source.architecture.vocab_size:
        raise UserError(
            f"critic.model.path: {source.directory} knows {source.architecture.vocab_size} tokens, the policy writes "
            f"{tokenizer.vocab_size}: name the critic's own tokenizer in critic.model.tokenizer_path"
        )
    reader = own and load_tokenizer(
        own,
        apply_chat_template=config.data.apply_chat_template,
        special_tokens_in_text=config.data.special_tokens_in_text,
        now=tokenizer.now,
        trust_remote_code=critic.model.trust_remote_code,
    )
    logger.info("starting: the critic")
    learner = make_learner(
        source.directory,
        source.architecture,
        critic.megatron,
        mesh,
        role="value",
        recompute=critic.model.enable_gradient_checkpointing,
        balance=config.trainer.balance_batch,
        freeze_routers=critic.model.freeze_moe_router,
        training=(critic.optim, critic.grad_clip, last_step),
        lora=source.lora,
        base=actor if config.critic_shares_base else None,
    )
    return Model(
        name="critic",
        learner=learner,
        budget=make_budget(config, critic.forward_micro_batch_size or critic.ppo_micro_batch_size),
        updates=_updates(config, "critic", critic, CriticObjective(critic, horizon=config.data.max_response_length)),
        translate=Translation(writer=tokenizer, reader=reader) if reader else None,
    )


def _updates(config: Config, name: str, section: ActorSection | CriticSection, objective: Objective) -> Updates:
    """Return how the actor or the critic goes through a batch."""
    return Updates(
        objective=objective,
        budget=make_budget(config, section.ppo_micro_batch_size),
        skips=Skips(name, config.trainer),
        minibatches=MiniBatches(
            num_prompts=section.ppo_mini_batch_size,
            num_epochs=section.ppo_epochs,
            shuffle=config.actor_rollout_ref.actor.shuffle,
            seed=config.data.seed,
        ),
    )


def make_budget(config: Config, max_sequences: int | None, max_tokens: int | None = None) -> Budget:
    """Return the size of a forward pass: a number of tokens, or `max_sequences` sequences without dynamic batches."""
    policy = config.actor_rollout_ref
    if policy.actor.use_dynamic_bsz or max_sequences is None:
        return Budget(max_tokens=max_tokens or policy.actor.ppo_max_token_len_per_gpu, max_sequences=max_sequences)
    longest = policy.rollout.prompt_length + policy.rollout.response_length
    return Budget(max_tokens=max_sequences * longest, max_sequences=max_sequences)
