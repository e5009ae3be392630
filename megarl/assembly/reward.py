"""Builds the reward of a run as configured: rules, a reward model, both, or an environment."""

import logging
from functools import partial

from megarl.batch import Prompt
from megarl.config.root import Config, RewardModelSection
from megarl.data.conversations import Conversations
from megarl.data.tokenizer import Tokenizer, load_tokenizer
from megarl.environments.encoding import Observer
from megarl.environments.episodes import Environments
from megarl.environments.scoring import EpisodeScorer
from megarl.learner.batching import Budget
from megarl.learner.factory import make_learner
from megarl.learner.parallel import Mesh
from megarl.models.hub import stop_token_ids
from megarl.models.source import Source
from megarl.platform.errors import UserError
from megarl.rewards.scoring import Decode, RuleScorer
from megarl.training.reward_model import ModelScorer, RewardModel

logger = logging.getLogger(__name__)

Reward = RuleScorer | ModelScorer | EpisodeScorer


def make_rules(config: Config, policy: Tokenizer, source: Source) -> RuleScorer | None:
    """Make the rules. None if a model or an environment scores alone. UserError if the custom function has a fault."""
    if config.rules is None:
        return None
    skips = config.rules.skip_special_tokens
    decode = _written(policy, source) if skips else partial(policy.decode, with_special_tokens=True)
    return RuleScorer.make(config.rules, config.custom_reward_function, decode)


def make_environments(config: Config, policy: Tokenizer, source: Source, prompt: Prompt) -> Environments | None:
    """Make the environments of the run. None if responses are judged once. `prompt` is any of the data.

    Raises:
        UserError: the environment cannot be made, or the chat template changes earlier turns.
    """
    if not config.environment.name:
        return None
    observer = Observer(policy)
    if policy.templates(prompt.raw_prompt):
        observer.require_appending()
    seed = config.actor_rollout_ref.rollout.seed
    return Environments(config.environment, policy, observer, written=_written(policy, source), seed=seed)


def _written(policy: Tokenizer, source: Source) -> Decode:
    """Return what makes the text of a response: it ends before the token that ends a response of this model."""
    return partial(policy.written, ends=_ends(policy, source))


def _ends(policy: Tokenizer, source: Source) -> list[int]:
    return stop_token_ids(source.directory, policy.eos_token_id)


def make_reward(
    rules: RuleScorer | None,
    section: RewardModelSection,
    policy: Tokenizer,
    policy_source: Source,
    mesh: Mesh,
    *,
    policy_path: str,
    budget: Budget,
    balance: bool,
) -> Reward:
    """Combine the rules with the reward model of `section`, if one is enabled. Each rank loads its part of the model.

    Args:
        rules: from `make_rules`.
        section: the user's settings of the model.
        policy: the tokenizer of the tokens that arrive.
        policy_source: the files of the policy.
        mesh: this rank's place.
        policy_path: the checkpoint of the policy, the default of `input_tokenizer`.
        budget: of a forward pass.
        balance: spread samples by length over data-parallel ranks.

    Raises:
        UserError: the model is no sequence classifier, or lacks tokens of the policy that pass unchanged.
    """
    if section.model_weight is None:
        assert rules is not None, "nothing scores"
        return rules
    source = Source.read(section.model)
    given = section.model.input_tokenizer
    if not source.architecture.scalar_head:
        raise UserError(f"reward_model.model.path: {source.directory} is no sequence classifier")
    if given is None and policy.vocab_size > source.architecture.vocab_size:
        raise UserError(
            f"reward_model.model.input_tokenizer=null passes the policy's {policy.vocab_size} tokens to a model of "
            f"{source.architecture.vocab_size}: leave it out, so that responses are encoded again"
        )
    trusted = section.model.trust_remote_code
    reader = Conversations(
        tokenizer=policy if given is None else source.tokenizer(now=policy.now, trust_remote_code=trusted),
        pad_token_id=source.hf_config.get("pad_token_id"),
        max_length=section.max_length or source.architecture.max_position_embeddings,
    )
    decoder = policy if given == policy_path else given and load_tokenizer(given, trust_remote_code=trusted)
    logger.info("starting: the reward model")
    learner = make_learner(
        source.directory,
        source.architecture,
        section.megatron,
        mesh,
        role="value",
        balance=balance,
    )
    model = RewardModel(
        learner=learner, budget=budget, reader=reader, decoder=decoder or None, ends=_ends(policy, policy_source)
    )
    return ModelScorer(model=model, weight=section.model_weight, rules=rules, decode=_written(policy, policy_source))
