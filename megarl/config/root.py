"""The roots: the sections of each kind of run, and the keys that follow other keys.

A key that follows another key is an interpolation below the user's files, so that a value of the user wins.
"""

from collections.abc import Iterator, Mapping
from dataclasses import field, fields, replace

from megarl.algorithms.config import EXACT, AlgorithmSection, KLEstimator
from megarl.config.policy import ONE_SEED, UNTRAINED, ActorSection, CriticSection, RefSection
from megarl.data.config import DataSection, PreferenceDataSection, SFTDataSection
from megarl.environments.config import EnvironmentSection
from megarl.learner.config import MegatronSection, OptimSection
from megarl.mark import MICRO, OPTIMIZER, REWARD, Change, Effect, key, never, when
from megarl.models.config import CheckpointSection, ModelSection, ReferenceModelSection, RewardCheckpointSection
from megarl.rewards.config import CustomRewardSection, RulesSection
from megarl.rollout.config import RolloutSection
from megarl.section import Bound, Count, Length, Weight, section
from megarl.tracking.config import TrainerSection

COMPARED = when(
    "has_reference",
    words="the reward or the loss has a divergence from the reference",
    why="as nothing asks for a reference",
)
VALUED = when(
    "has_critic",
    words="`algorithm.adv_estimator` is `gae`, or is `custom` and `custom_estimator.needs` has `values`",
    because=("algorithm.adv_estimator",),
)
OF_REWARDS = never(
    "by a run that learns from files",
    *("critic_warmup", "log_val_generations", "rollout_data_dir"),
    *("save_best", "val_before_train", "val_only"),
)


@section()
class ActorRolloutRefSection:
    """`actor_rollout_ref.*`: the policy in its three roles."""

    model: ModelSection
    """The checkpoint that actor, engine and reference share."""
    actor: ActorSection = field(default_factory=ActorSection)
    """The policy that learns."""
    ref: RefSection = key(RefSection, read_if=COMPARED)
    """The policy that the actor is kept close to."""
    rollout: RolloutSection = field(default_factory=RolloutSection)
    """The engine that samples."""


MODEL_SCORE = "model"  # the reward model among `reward_model.weights`
ENABLED = when("reward_model.enable", True)


@section(REWARD)
class RewardModelSection(RulesSection):
    """`reward_model.*`: the score of a response, by rules and by a neural model."""

    enable: bool = False
    """Let a neural model score the responses."""
    model: RewardCheckpointSection = key(RewardCheckpointSection, read_if=ENABLED)
    """The neural model."""
    megatron: MegatronSection = key(MegatronSection, read_if=(ONE_SEED, UNTRAINED, ENABLED))
    """The split of the neural model over the ranks."""
    micro_batch_size: Count | None = key(64, MICRO, read_if=ENABLED)
    """Most sequences per forward pass; null = the actor's token budget alone."""
    max_length: Length | None = key(None, read_if=ENABLED)
    """Most tokens of prompt and response; a longer text loses its beginning. null = the model's positions."""

    @property
    def model_weight(self) -> float | None:
        """Return the weight of the model's score; None if there is no model or no weight."""
        if not self.enable:
            return None
        return 1.0 if self.weights is None else self.weights.get(MODEL_SCORE)

    @property
    def rules(self) -> RulesSection | None:
        """Return the rules; None if the model scores alone."""
        if not self.enable:
            return self
        others = {name: weight for name, weight in (self.weights or {}).items() if name != MODEL_SCORE}
        return replace(self, weights=others) if others else None


@section()
class Config:
    """The root of a run that learns from rewards."""

    data: DataSection
    """The prompts."""
    actor_rollout_ref: ActorRolloutRefSection
    """The policy."""
    critic: CriticSection = key(CriticSection, read_if=VALUED)
    """The value model of adv_estimator=gae, or of an estimator of the user that needs values."""
    algorithm: AlgorithmSection = field(default_factory=AlgorithmSection)
    """Advantages and the KL penalty."""
    reward_model: RewardModelSection = field(default_factory=RewardModelSection)
    """The score of a response."""
    custom_reward_function: CustomRewardSection = key(CustomRewardSection, read_if=when("custom_reward_function.path"))
    """A reward function of the user."""
    environment: EnvironmentSection = key(EnvironmentSection, read_if=when("environment.name"))
    """The environment that responses are turns of."""
    trainer: TrainerSection = field(default_factory=TrainerSection)
    """Length, ranks, records and checkpoints of the run."""

    @property
    def rules(self) -> RulesSection | None:
        """Return the rules that score single responses; None if a model or an environment scores alone."""
        return None if self.environment.name else self.reward_model.rules

    @property
    def has_critic(self) -> bool:
        """Tell whether the advantages need a critic."""
        return self.algorithm.estimator.critic

    @property
    def tokenizer_of_critic(self) -> str | None:
        """Return the place of the critic's own tokenizer; None if the critic reads the policy's tokens."""
        own = self.critic.model.tokenizer_path
        return None if own in (self.data.tokenizer, self.actor_rollout_ref.model.path) else own

    @property
    def critic_shares_base(self) -> bool:
        """Tell whether actor and critic are adapters on the same frozen weights, which are in memory once."""
        actor = self.actor_rollout_ref.model
        critic = self.critic.model
        ours = self.actor_rollout_ref.actor.megatron
        theirs = self.critic.megatron
        return (
            self.has_critic
            and actor.has_adapters
            and critic.has_adapters
            and (actor.path, actor.override_config) == (critic.path, critic.override_config)
            and (ours.dtype, ours.param_offload) == (theirs.dtype, theirs.param_offload)
        )

    @property
    def kl_of_reward(self) -> KLEstimator | None:
        """Return the estimator of the divergence in the reward; None if there is no such term."""
        algorithm = self.algorithm
        return algorithm.kl_penalty if algorithm.use_kl_in_reward and algorithm.kl_ctrl.kl_coef > 0.0 else None

    @property
    def kl_of_loss(self) -> KLEstimator | None:
        """Return the estimator of the divergence in the loss; None if there is no such term."""
        actor = self.actor_rollout_ref.actor
        return actor.kl_loss_type if actor.use_kl_loss else None

    @property
    def max_staleness(self) -> int:
        """Return the most steps that may finish between the weights of a token and the step that learns from it."""
        partial = self.actor_rollout_ref.rollout.partial
        return partial.max_staleness if partial.enable else 0

    @property
    def num_drawn(self) -> int:
        """Return the number of prompts that the engine draws at once."""
        partial = self.actor_rollout_ref.rollout.partial
        num_prompts = self.data.train_batch_size
        return partial.num_drawn(num_prompts) if partial.enable else num_prompts

    @property
    def num_in_flight(self) -> int:
        """Return the most prompts that continue in the next step."""
        partial = self.actor_rollout_ref.rollout.partial
        num_prompts = self.data.train_batch_size
        if partial.enable and partial.num_engine_steps:
            return num_prompts - 1
        return self.num_drawn - num_prompts

    @property
    def fused_old_log_probs(self) -> bool:
        """Return True if the forward pass of the actor's update can also tell its log-probabilities before the step.

        The actor then takes one optimizer step on all samples without dropout, and nothing before this step needs the
        numbers.
        """
        actor = self.actor_rollout_ref.actor
        algorithm = self.algorithm
        takes_one_step = actor.ppo_epochs == 1 and actor.ppo_mini_batch_size >= self.data.train_batch_size
        correction = algorithm.rollout_correction
        mode = actor.policy_loss.loss_mode
        is_needed = (
            self.kl_of_reward or correction.rollout_is or correction.rollout_rs or mode in ("clip_cov", "kl_cov")
        )
        model = self.actor_rollout_ref.model
        has_dropout = actor.megatron.has_dropout or (model.has_adapters and model.lora_dropout > 0.0)
        return takes_one_step and not is_needed and not has_dropout and not algorithm.mask_truncated_completions

    @property
    def has_token_budget(self) -> bool:
        """Tell whether a number of tokens bounds the micro-batches of a model."""
        model = self.reward_model
        return self.actor_rollout_ref.actor.use_dynamic_bsz or (model.enable and model.micro_batch_size is None)

    @property
    def draws_order(self) -> bool:
        """Tell whether the order of prompts, samples or supervised pairs is drawn."""
        actor = self.actor_rollout_ref.actor
        return bool(self.data.shuffle or actor.shuffle or actor.ptx_files)

    @property
    def validates(self) -> bool:
        """Tell whether the run validates."""
        trainer = self.trainer
        return bool(self.data.val_files) and (trainer.val_only or trainer.val_before_train or trainer.test_freq > 0)

    @property
    def validates_after_steps(self) -> bool:
        """Tell whether the run validates while it learns."""
        return bool(self.data.val_files) and self.trainer.test_freq > 0

    @property
    def num_supervised(self) -> int:
        """Return the number of supervised pairs in every optimizer step of the actor."""
        actor = self.actor_rollout_ref.actor
        per_step = actor.ptx_batch_size or actor.ppo_mini_batch_size * self.actor_rollout_ref.rollout.n
        return per_step if actor.ptx_files else 0

    @property
    def has_reference(self) -> bool:
        """Tell whether the reward or the loss has a divergence from the reference."""
        return bool(self.kl_of_reward or self.kl_of_loss)

    @property
    def teachers(self) -> dict[str | None, ReferenceModelSection]:
        """Return the checkpoints of references that are not the actor's start, by data source; None is all others."""
        if not self.has_reference:
            return {}
        ref = self.actor_rollout_ref.ref
        named = {source: replace(ref.model, path=path) for source, path in ref.teachers.items()}
        return ({None: ref.model} if ref.model.path else {}) | named

    @property
    def checkpoints(self) -> Iterator[tuple[str, CheckpointSection]]:
        """Yield the checkpoint of each model that the run reads, with the key that names it."""
        yield "actor_rollout_ref.model.path", self.actor_rollout_ref.model
        if self.has_critic:
            yield "critic.model.path", self.critic.model
        for source, teacher in self.teachers.items():
            yield f"actor_rollout_ref.ref.{'model.path' if source is None else 'teachers'}", teacher
        if self.reward_model.enable:
            yield "reward_model.model.path", self.reward_model.model

    @property
    def divergence_kinds(self) -> set[KLEstimator]:
        """Return the estimators of the divergence from the reference, in the reward and in the loss."""
        return {kind for kind in (self.kl_of_reward, self.kl_of_loss) if kind}

    @property
    def estimates_divergence(self) -> bool:
        """Tell whether the reference has passes of its own; an exact divergence is taken in those of the actor."""
        return bool(self.divergence_kinds - {*EXACT})

    @property
    def passes_of_reference(self) -> dict[str, int]:
        """Return the passes of a reference over its samples in a step, by phase of the timers.

        An estimate takes a pass of its own. An exact divergence is taken in the passes of the actor.
        """
        passes = {
            "ref": int(self.estimates_divergence),
            "old_log_prob": int(self.kl_of_reward in EXACT),
            "update_actor": self.actor_rollout_ref.actor.ppo_epochs * (self.kl_of_loss in EXACT),
        }
        return {phase: number for phase, number in passes.items() if number}


@section()
class SupervisedConfig:
    """The keys of every run that learns from files alone."""

    model: ModelSection
    """The checkpoint to start from."""
    optim: OptimSection = field(default_factory=lambda: OptimSection(lr=1e-5))
    """The optimizer."""
    megatron: MegatronSection = field(default_factory=MegatronSection)
    """The split of the model over the ranks."""
    grad_clip: Bound = key(1.0, OPTIMIZER)
    """Largest gradient norm."""
    max_token_len_per_gpu: Length = key(16384, MICRO)
    """Token budget of a micro-batch."""
    trainer: TrainerSection = key(TrainerSection, read_if=(OF_REWARDS, when("data.val_files", of=("test_freq",))))
    """Length, ranks, records and checkpoints of the run."""

    @property
    def checkpoints(self) -> Iterator[tuple[str, CheckpointSection]]:
        """Yield the checkpoint of the model, with the key that names it."""
        yield "model.path", self.model


@section()
class SFTConfig(SupervisedConfig):
    """The root of a supervised run."""

    data: SFTDataSection
    """Pairs of prompt and response."""


@section()
class RewardTrainConfig(SupervisedConfig):
    """The root of a reward model's training."""

    data: PreferenceDataSection
    """Pairs of responses."""
    center_rewards_coefficient: Weight = key(0.0, Change(Effect.CURVE, "the loss"))
    """Weight of the squared sum of a pair's rewards, which keeps their mean near 0."""


@section()
class VerifiedActorSection:
    """`actor_rollout_ref.actor.*` of `megarl verify`."""

    megatron: MegatronSection = field(default_factory=lambda: MegatronSection(dtype="float32"))
    """The split of the trainer's model. The default is float32, so that rounding neither hides nor feigns a fault."""


@section()
class VerifiedPolicySection:
    """`actor_rollout_ref.*` of `megarl verify`."""

    model: ModelSection
    """The checkpoint to try, or a directory that holds only a config.json."""
    actor: VerifiedActorSection = field(default_factory=VerifiedActorSection)
    """The trainer."""
    rollout: RolloutSection = field(default_factory=RolloutSection)
    """The engine."""


@section()
class VerifyConfig:
    """The root of `megarl verify`: the keys of a run for model, trainer and engine."""

    actor_rollout_ref: VerifiedPolicySection
    """The policy."""
    trainer: TrainerSection = field(default_factory=TrainerSection)
    """The ranks."""

    @property
    def checkpoints(self) -> Iterator[tuple[str, CheckpointSection]]:
        """Yield the checkpoint to try, with the key that names it."""
        yield "actor_rollout_ref.model.path", self.actor_rollout_ref.model


RunConfig = Config | SFTConfig | RewardTrainConfig
"""The configuration of a run that learns."""
AnyConfig = RunConfig | VerifyConfig


def _follow(section_path: str, leader: str) -> Iterator[tuple[str, str]]:
    for one in fields(MegatronSection):
        yield f"{section_path}.{one.name}", f"${{{leader}.{one.name}}}"


CONFIG_NAME = "config_name"
"""A link for the names of the YAML files of a command, without their suffix."""
RUN_NAME = {"trainer.experiment_name": f"${{{CONFIG_NAME}}}"}
RUN_DIRECTORY = {
    **RUN_NAME,
    "trainer.default_local_dir": "checkpoints/${trainer.project_name}/${trainer.experiment_name}",
}

COMMANDS: Mapping[type, str] = {
    Config: "train",
    SFTConfig: "sft",
    RewardTrainConfig: "train-reward",
    VerifyConfig: "verify",
}
"""The command that reads each root."""


def root_of(config: Mapping[str, object]) -> type:
    """Return the root of the resolved configuration of a run, from keys that only it has."""
    if "actor_rollout_ref" in config:
        return Config
    return RewardTrainConfig if "center_rewards_coefficient" in config else SFTConfig


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
