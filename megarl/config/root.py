"""The roots: which sections make up a run that learns from rewards or from files, and which keys follow which.

A key that follows another is an interpolation underneath the user's files, so that whatever a user sets wins.
"""

from collections.abc import Iterator, Mapping
from dataclasses import field, fields, replace

from megarl.algorithms.config import AlgorithmSection
from megarl.config.policy import ActorSection, CriticSection, RefSection
from megarl.data.config import DataSection, PreferenceDataSection, SFTDataSection
from megarl.learner.config import MegatronSection, OptimSection
from megarl.models.config import ModelSection, RewardCheckpointSection
from megarl.rewards.config import CustomRewardSection, RulesSection
from megarl.rollout.config import RolloutSection
from megarl.section import Bound, Count, Length, Weight, section
from megarl.tracking.config import TrainerSection


@section
class ActorRolloutRefSection:
    """`actor_rollout_ref.*`: the policy in its three roles."""

    model: ModelSection
    """The checkpoint that actor, engine and reference share."""
    actor: ActorSection = field(default_factory=ActorSection)
    """The policy that learns."""
    ref: RefSection = field(default_factory=RefSection)
    """The policy it is kept close to."""
    rollout: RolloutSection = field(default_factory=RolloutSection)
    """The engine that samples."""


MODEL_SCORE = "model"  # the reward model among `reward_model.weights`


@section
class RewardModelSection(RulesSection):
    """`reward_model.*`: what a response is worth, by rules and by a neural model."""

    enable: bool = False
    """Let a neural model score the responses."""
    model: RewardCheckpointSection = field(default_factory=RewardCheckpointSection)
    """That model."""
    megatron: MegatronSection = field(default_factory=MegatronSection)
    """Its partition; each key follows the actor's unless set."""
    micro_batch_size: Count | None = 64
    """Sequences per forward pass at most, per rank; null = only the actor's token budget bounds it."""
    max_length: Length | None = None
    """Tokens of a prompt with its answer, in its own vocabulary: of a longer one the beginning is cut off; null = as
    many as it knows positions."""

    @property
    def model_weight(self) -> float | None:
        """What the model's score counts; None: there is no model, or it has no weight."""
        if not self.enable:
            return None
        return 1.0 if self.weights is None else self.weights.get(MODEL_SCORE)

    @property
    def rules(self) -> RulesSection | None:
        """The rules beside the model; None: it scores alone."""
        if not self.enable:
            return self
        others = {name: weight for name, weight in (self.weights or {}).items() if name != MODEL_SCORE}
        return replace(self, weights=others) if others else None


@section
class Config:
    """The root of a run that learns from rewards."""

    data: DataSection
    """Prompts."""
    actor_rollout_ref: ActorRolloutRefSection
    """The policy."""
    critic: CriticSection = field(default_factory=CriticSection)
    """The value model of adv_estimator=gae."""
    algorithm: AlgorithmSection = field(default_factory=AlgorithmSection)
    """Advantages and the KL penalty."""
    reward_model: RewardModelSection = field(default_factory=RewardModelSection)
    """What a response is worth."""
    custom_reward_function: CustomRewardSection = field(default_factory=CustomRewardSection)
    """A reward of the user's own."""
    trainer: TrainerSection = field(default_factory=TrainerSection)
    """The run as a whole."""

    @property
    def has_critic(self) -> bool:
        """Whether the advantages need a value model."""
        return self.algorithm.estimator.critic

    @property
    def tokenizer_of_critic(self) -> str | None:
        """Where the critic's own tokenizer is; None: it reads the policy's tokens."""
        own = self.critic.model.tokenizer_path
        return None if own in (self.data.tokenizer, self.actor_rollout_ref.model.path) else own

    @property
    def kl_of_reward(self) -> str | None:
        """How the divergence from the frozen policy in the reward is measured; None: there is none."""
        algorithm = self.algorithm
        return algorithm.kl_penalty if algorithm.use_kl_in_reward and algorithm.kl_ctrl.kl_coef > 0.0 else None

    @property
    def kl_of_loss(self) -> str | None:
        """How the divergence from the frozen policy in the loss is measured; None: there is none."""
        actor = self.actor_rollout_ref.actor
        return actor.kl_loss_type if actor.use_kl_loss else None

    @property
    def num_supervised(self) -> int:
        """Supervised pairs in every optimizer step of the actor."""
        actor = self.actor_rollout_ref.actor
        per_step = actor.ptx_batch_size or actor.ppo_mini_batch_size * self.actor_rollout_ref.rollout.n
        return per_step if actor.ptx_files else 0

    @property
    def has_reference(self) -> bool:
        """Whether something asks for the divergence from the frozen policy."""
        return bool(self.kl_of_reward or self.kl_of_loss)


@section
class SupervisedConfig:
    """What every run has that learns from files alone."""

    model: ModelSection
    """The checkpoint to start from."""
    optim: OptimSection = field(default_factory=lambda: OptimSection(lr=1e-5))
    """The optimizer."""
    megatron: MegatronSection = field(default_factory=MegatronSection)
    """The partition of the model."""
    grad_clip: Bound = 1.0
    """Largest gradient norm."""
    max_token_len_per_gpu: Length = 16384
    """Token budget of a micro-batch."""
    trainer: TrainerSection = field(default_factory=TrainerSection)
    """The run as a whole."""


@section
class SFTConfig(SupervisedConfig):
    """The root of a supervised run."""

    data: SFTDataSection
    """Pairs of prompt and response."""


@section
class RewardTrainConfig(SupervisedConfig):
    """The root of a reward model's training."""

    data: PreferenceDataSection
    """Pairs of responses."""
    center_rewards_coefficient: Weight = 0.0
    """Weight of the squared sum of a pair's rewards, which keeps their mean near 0."""


@section
class VerifiedActorSection:
    """`actor_rollout_ref.actor.*`, as far as weights go."""

    megatron: MegatronSection = field(default_factory=lambda: MegatronSection(dtype="float32"))
    """The partition of the trainer's model; float32 unless set, so that rounding neither hides nor feigns a fault."""


@section
class VerifiedPolicySection:
    """`actor_rollout_ref.*`, as far as weights go."""

    model: ModelSection
    """The checkpoint to try, or a directory with only its config.json."""
    actor: VerifiedActorSection = field(default_factory=VerifiedActorSection)
    """The trainer."""
    rollout: RolloutSection = field(default_factory=RolloutSection)
    """The engine."""


@section
class VerifyConfig:
    """The root of `megarl.verify`: the keys that a run has for model, trainer and engine."""

    actor_rollout_ref: VerifiedPolicySection
    """The policy."""
    trainer: TrainerSection = field(default_factory=TrainerSection)
    """The ranks."""


def _follow(section_path: str, leader: str) -> Iterator[tuple[str, str]]:
    for key in fields(MegatronSection):
        yield f"{section_path}.{key.name}", f"${{{leader}.{key.name}}}"


RUN_DIRECTORY = {"trainer.default_local_dir": "checkpoints/${trainer.project_name}/${trainer.experiment_name}"}

LINKS: Mapping[type, Mapping[str, str]] = {
    Config: {
        "actor_rollout_ref.rollout.prompt_length": "${data.max_prompt_length}",
        "actor_rollout_ref.rollout.response_length": "${data.max_response_length}",
        "critic.ppo_mini_batch_size": "${actor_rollout_ref.actor.ppo_mini_batch_size}",
        "critic.ppo_epochs": "${actor_rollout_ref.actor.ppo_epochs}",
        # One Megatron mesh serves all models.
        **dict(_follow("actor_rollout_ref.ref.megatron", "actor_rollout_ref.actor.megatron")),
        **dict(_follow("critic.megatron", "actor_rollout_ref.actor.megatron")),
        **dict(_follow("reward_model.megatron", "actor_rollout_ref.actor.megatron")),
        "reward_model.model.input_tokenizer": "${actor_rollout_ref.model.path}",
        "reward_model.model.external_lib": "${actor_rollout_ref.model.external_lib}",
        "algorithm.overlong_buffer.max_resp_len": "${actor_rollout_ref.rollout.response_length}",
        **RUN_DIRECTORY,
    },
    SFTConfig: RUN_DIRECTORY,
    RewardTrainConfig: RUN_DIRECTORY,
    VerifyConfig: {"actor_rollout_ref.rollout.dtype": "${actor_rollout_ref.actor.megatron.dtype}"},
}
