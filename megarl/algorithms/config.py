"""What a user may say about rewards over time: advantages and the penalty for leaving the reference."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import Field

from megarl.section import Bound, CountFromZero, Fraction, Length, Weight, section

AdvantageEstimator = Literal[
    "gae", "grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "remax", "opo", "gpg", "grpo_passk"
]
LossMode = Literal["vanilla", "gspo", "cispo", "gpg", "clip_cov", "kl_cov"]
LossAggregation = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
SampledKL = Literal["kl", "abs", "mse", "low_var_kl", "k1", "k2", "k3"]
KLEstimator = Literal[SampledKL, "full"]
Covariance = Annotated[float, Field(ge=-1e30, le=1e30)]


@dataclass(frozen=True, kw_only=True)
class Estimator:
    """What an advantage estimator asks of a run."""

    critic: bool = False  # the values of a critic
    compares: bool = False  # several responses to each prompt
    greedy: bool = False  # a greedy response to each prompt
    reads: tuple[str, ...] = ()  # the keys of `algorithm` that not all estimators read


ESTIMATORS: Mapping[AdvantageEstimator, Estimator] = {
    "gae": Estimator(critic=True, reads=("gamma", "lam")),
    "grpo": Estimator(compares=True, reads=("norm_adv_by_std_in_grpo",)),
    "rloo": Estimator(compares=True),
    "reinforce_plus_plus": Estimator(reads=("gamma",)),
    "reinforce_plus_plus_baseline": Estimator(compares=True),
    "remax": Estimator(greedy=True),
    "opo": Estimator(compares=True),
    "gpg": Estimator(compares=True),
    "grpo_passk": Estimator(compares=True, reads=("norm_adv_by_std_in_grpo",)),
}

_CLIP = ("clip_ratio", "clip_ratio_low", "clip_ratio_high")
LOSS_READS: Mapping[LossMode, tuple[str, ...]] = {
    "vanilla": (*_CLIP, "clip_ratio_c"),
    "gspo": _CLIP,
    "cispo": _CLIP,
    "gpg": (),
    "clip_cov": (*_CLIP, *(f"policy_loss.clip_cov_{name}" for name in ("ratio", "lb", "ub"))),
    "kl_cov": ("policy_loss.kl_cov_ratio", "policy_loss.ppo_kl_coef"),
}
"""The keys of `actor_rollout_ref.actor` that a policy loss reads and not all policy losses read."""
K3: tuple[KLEstimator, ...] = ("low_var_kl", "k3")
"""The estimators that `kl_penalty_k3_bound` and `kl_loss_k3_bound` bound."""


@section
class KLControlSection:
    """`algorithm.kl_ctrl.*`: the coefficient of the KL penalty in the reward."""

    type: Literal["fixed", "adaptive"] = "fixed"
    """A constant, or a controller that steers the divergence to target_kl."""
    kl_coef: Weight = 0.005
    """The coefficient, or its first value."""
    horizon: Length = 10000
    """Samples over which the adaptive controller corrects."""
    target_kl: Bound = 0.1
    """Divergence the adaptive controller aims at."""


@section
class FilterGroupsSection:
    """`algorithm.filter_groups.*`: dynamic sampling, until the responses of a whole batch of prompts differ (DAPO)."""

    enable: bool = False
    """Leave out prompts whose responses are all equally good, and sample further ones in their place."""
    metric: Literal["acc", "score", "seq_reward", "seq_final_reward"] = "acc"
    """What they must differ in: the reward's acc (its score where it gives none), its score, or that with penalties."""
    max_num_gen_batches: CountFromZero = 10
    """Batches sampled in an iteration at most, after which the run stops; 0 = no limit."""


@section
class OverlongBufferSection:
    """`algorithm.overlong_buffer.*`: a penalty in the reward that grows towards the length limit (DAPO)."""

    enable: bool = False
    """Add the penalty to the scores."""
    len: CountFromZero = 0
    """Over how many tokens before the limit it grows."""
    penalty_factor: Weight = 1.0
    """The penalty at the limit."""
    max_resp_len: Length = 512
    """The limit, in tokens; follows actor_rollout_ref.rollout.response_length unless set."""


@section
class RolloutCorrectionSection:
    """`algorithm.rollout_correction.*`: what to do where the engine's probabilities differ from the trainer's."""

    rollout_is: Literal["token", "sequence"] | None = None
    """Weigh the policy gradient by the ratio of a token's or a sequence's probabilities; null = not at all."""
    rollout_is_threshold: Bound = 2.0
    """The largest such weight."""
    rollout_rs: Literal["token", "sequence", "geometric"] | None = None
    """Leave tokens, or sequences by their ratio or its mean per token, out of the policy gradient; null = none."""
    rollout_rs_threshold: Bound | None = None
    """The largest ratio that is kept; null = rollout_is_threshold."""
    rollout_rs_threshold_lower: Fraction | None = None
    """The smallest ratio that is kept; null = 1 / rollout_rs_threshold."""


@section
class AlgorithmSection:
    """`algorithm.*`."""

    adv_estimator: AdvantageEstimator = "gae"
    """From a critic (gae), rewards to go (reinforce_plus_plus), a greedy response (remax), or the group (the rest)."""
    gamma: Fraction = 1.0
    """Discount per token."""
    lam: Fraction = 1.0
    """Lambda of GAE."""
    norm_adv_by_std_in_grpo: bool = True
    """Divide the advantages of grpo and grpo_passk by the group's standard deviation; false = Dr.GRPO."""
    use_kl_in_reward: bool | None = None
    """Subtract the divergence from the reference from the reward; null = not actor.use_kl_loss."""
    kl_penalty: KLEstimator = "kl"
    """Its estimator; k1 = kl, k2 = mse, k3 = low_var_kl; full = exact, over the whole vocabulary."""
    kl_penalty_k3_bound: Bound | None = 10.0
    """The largest k3 (low_var_kl) estimate of a token in nats; null = no bound."""
    kl_ctrl: KLControlSection = field(default_factory=KLControlSection)
    """Its coefficient."""
    filter_groups: FilterGroupsSection = field(default_factory=FilterGroupsSection)
    """Prompts whose responses teach nothing make room for others."""
    overlong_buffer: OverlongBufferSection = field(default_factory=OverlongBufferSection)
    """A penalty for long responses."""
    mask_truncated_completions: bool = False
    """Leave responses that met the length limit out of the updates; they still count in their group."""
    rollout_correction: RolloutCorrectionSection = field(default_factory=RolloutCorrectionSection)
    """Importance weights between engine and trainer."""

    @property
    def estimator(self) -> Estimator:
        """What `adv_estimator` asks of the run."""
        return ESTIMATORS[self.adv_estimator]


@section
class PolicyLossSection:
    """`actor_rollout_ref.actor.policy_loss.*`: which loss the advantages go into."""

    loss_mode: LossMode = "vanilla"
    """vanilla = PPO's clipped surrogate with dual clip."""
    clip_cov_ratio: Fraction = 0.0002
    """clip_cov: share of the tokens that get no gradient."""
    clip_cov_lb: Covariance = 1.0
    """clip_cov: they are drawn where the covariance of log-probability and advantage is above this."""
    clip_cov_ub: Covariance = 5.0
    """clip_cov: and below this."""
    kl_cov_ratio: Fraction = 0.0002
    """kl_cov: share of the tokens, those of the largest covariance, that are penalised."""
    ppo_kl_coef: Weight = 1.0
    """kl_cov: weight of the penalty on their divergence from the old policy."""
