"""The keys of advantages, of the divergence in the reward, and of the policy loss; and what each choice needs."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias, get_args

from pydantic import Field

from megarl.mark import Change, Condition, Effect, key, when
from megarl.section import Bound, CountFromZero, Fraction, Length, Weight, section

Need = Literal["values", "groups", "baselines"]
NEEDS: tuple[Need, ...] = get_args(Need)
LossAggregation = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
StraightThroughKL = Literal["kl+", "abs+", "low_var_kl+", "k1+", "k3+"]
SampledKL = Literal["kl", "abs", "mse", "low_var_kl", "k1", "k2", "k3", StraightThroughKL]
ExactKL = Literal["full", "full_forward", "full_js"]
KLEstimator = Literal[SampledKL, ExactKL]
EXACT: tuple[ExactKL, ...] = get_args(ExactKL)
STRAIGHT_THROUGH: tuple[StraightThroughKL, ...] = get_args(StraightThroughKL)
Mixture = Annotated[float, Field(gt=0.0, lt=1.0)]
Sharpness = Annotated[float, Field(gt=0.0, le=1e6)]
Covariance = Annotated[float, Field(ge=-1e30, le=1e30)]


@dataclass(frozen=True, kw_only=True)
class Estimator:
    """The needs of an advantage estimator. Its function has the estimator's name in `algorithms/advantages.py`."""

    critic: bool = False  # the values of a critic
    compares: bool = False  # several responses to each prompt
    of_batch: bool = False  # the responses to all prompts at once
    greedy: bool = False  # a greedy response to each prompt
    whitens: bool = False  # the advantages are whitened over the complete batch
    reads: tuple[str, ...] = ()  # keys of `algorithm`, which are arguments of the function


ESTIMATORS: Mapping[str, Estimator] = {
    "gae": Estimator(critic=True, whitens=True, reads=("gamma", "lam")),
    "grpo": Estimator(compares=True, reads=("norm_adv_by_std_in_grpo",)),
    "rloo": Estimator(compares=True),
    "reinforce_plus_plus": Estimator(whitens=True, reads=("gamma",)),
    "reinforce_plus_plus_baseline": Estimator(compares=True, whitens=True),
    "remax": Estimator(greedy=True),
    "opo": Estimator(compares=True),
    "gpg": Estimator(compares=True, of_batch=True),
    "grpo_passk": Estimator(compares=True, reads=("norm_adv_by_std_in_grpo",)),
    "none": Estimator(),
    "custom": Estimator(),
}
"""The needs of a custom estimator are in the configuration: see `AlgorithmSection.estimator`."""


@dataclass(frozen=True, kw_only=True)
class Loss:
    """The needs of a policy loss. Its function is in `algorithms/losses.py`."""

    function: str = ""  # its name
    chooses: bool = False  # tokens that it treats differently (`algorithms/covariance.py`)


LOSSES: Mapping[str, Loss] = {
    "vanilla": Loss(function="ppo_clip"),
    "gspo": Loss(function="gspo"),
    "cispo": Loss(function="cispo"),
    "sapo": Loss(function="sapo"),
    "geo_mean": Loss(function="geo_mean"),
    "dppo_tv": Loss(function="dppo_tv"),
    "dppo_kl": Loss(function="dppo_kl"),
    "gpg": Loss(function="gpg"),
    "clip_cov": Loss(function="clip_cov", chooses=True),
    "kl_cov": Loss(function="kl_cov", chooses=True),
    "custom": Loss(),
}
if TYPE_CHECKING:
    AdvantageEstimator: TypeAlias = str
    LossMode: TypeAlias = str
else:
    AdvantageEstimator = Literal[*ESTIMATORS]
    LossMode = Literal[*LOSSES]
K3: tuple[KLEstimator, ...] = ("low_var_kl", "k3", "low_var_kl+", "k3+")
"""The estimators that `kl_penalty_k3_bound` and `kl_loss_k3_bound` bound."""
ALGORITHM = Change(Effect.CURVE, "the algorithm")
ACTOR_LOSS = Change(Effect.CURVE, "the actor's loss")
BOUNDED = when(
    ".needs_is_threshold",
    words="`rollout_is` is set, or `rollout_rs` is set and `rollout_rs_threshold` is null",
    because=(".rollout_is",),
)
IN_REWARD = when(
    ".use_kl_in_reward",
    True,
    words="the divergence is part of the reward",
    because=(".use_kl_in_reward", "actor_rollout_ref.actor.use_kl_loss"),
)
PENALISED = (IN_REWARD, when(".kl_ctrl.kl_coef", words="`algorithm.kl_ctrl.kl_coef` is more than 0"))


def _read_by_estimators(name: str) -> Condition:
    return when(".adv_estimator", *(estimator for estimator, needs in ESTIMATORS.items() if name in needs.reads))


@section(ALGORITHM)
class KLControlSection:
    """`algorithm.kl_ctrl.*`: the coefficient of the KL penalty in the reward."""

    type: Literal["fixed", "adaptive"] = "fixed"
    """A constant, or a controller that steers towards target_kl."""
    kl_coef: Weight = 0.005
    """The coefficient, or its first value."""
    horizon: Length = key(10000, read_if=when(".type", "adaptive"))
    """Samples over which the controller corrects a deviation."""
    target_kl: Bound = key(0.1, read_if=when(".type", "adaptive"))
    """Divergence that the controller aims at, in nats per token."""


@section(ALGORITHM)
class FilterGroupsSection:
    """`algorithm.filter_groups.*`: sample until a full batch of prompts has responses that differ (DAPO)."""

    enable: bool = False
    """Replace prompts whose responses all score the same."""
    metric: Literal["acc", "score", "seq_reward", "seq_final_reward"] = "acc"
    """The number that must differ (docs/algorithms.md)."""
    max_num_gen_batches: CountFromZero = 10
    """Most batches of a step, else the run stops; 0 = no limit."""


@section(ALGORITHM)
class OverlongBufferSection:
    """`algorithm.overlong_buffer.*`: a penalty in the reward for responses near the length limit (DAPO)."""

    enable: bool = False
    """Add the penalty to the scores."""
    len: CountFromZero = 0
    """Tokens before the limit over which the penalty grows."""
    penalty_factor: Weight = 1.0
    """Penalty at the limit."""
    max_resp_len: Length = 512
    """The limit, in tokens."""


@section(ALGORITHM)
class RolloutCorrectionSection:
    """`algorithm.rollout_correction.*`: correct for engine probabilities that differ from the trainer's."""

    bypass_mode: bool = False
    """Take the ratios of an update from the engine's probabilities."""
    rollout_is: Literal["token", "sequence"] | None = None
    """Weight the policy gradient by the probability ratio of each token or sequence."""
    rollout_is_threshold: Bound | None = key(2.0, read_if=BOUNDED)
    """Largest weight; null only if it bounds nothing."""
    rollout_is_threshold_lower: Bound | None = key(None, read_if=when(".rollout_is"))
    """Smallest weight; a ratio that is not between the two counts 0 (IcePop). null = ratios are only bounded above."""
    rollout_is_batch_normalize: bool = key(False, read_if=when(".rollout_is"))
    """Divide the weights by their mean over the batch."""
    rollout_rs: Literal["token", "sequence", "geometric"] | None = None
    """Drop tokens by their ratio, or sequences by their ratio or its geometric mean, from the policy gradient."""
    rollout_rs_threshold: Bound | None = key(None, read_if=when(".rollout_rs"))
    """Largest ratio that is kept; null = rollout_is_threshold."""
    rollout_rs_threshold_lower: Fraction | None = key(None, read_if=when(".rollout_rs"))
    """Smallest ratio that is kept; null = 1 / rollout_rs_threshold."""

    @property
    def needs_is_threshold(self) -> bool:
        """Tell whether weights, or the ratios that are kept, are bounded by `rollout_is_threshold`."""
        return bool(self.rollout_is or (self.rollout_rs and self.rollout_rs_threshold is None))

    @property
    def largest_weight(self) -> float:
        """`rollout_is_threshold`, which a rule demands if it bounds something."""
        assert self.rollout_is_threshold is not None, "weights or ratios without a bound"
        return self.rollout_is_threshold

    @property
    def largest_ratio(self) -> float:
        """The largest ratio that is kept, if ratios are dropped."""
        return self.rollout_rs_threshold or self.largest_weight


@section(ALGORITHM)
class CustomEstimatorSection:
    """`algorithm.custom_estimator.*`: an advantage estimator of the user, for `adv_estimator=custom`."""

    path: str | None = None
    """Python file that defines the estimator."""
    name: str = "compute_advantages"
    """The function (docs/custom_algorithms.md)."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Further arguments of the function, by name."""
    needs: list[Need] = field(default_factory=list)
    """Further tensors for the function: a critic's values, groups of responses to one prompt, greedy responses' scores
    (baselines)."""


@section(ALGORITHM)
class AlgorithmSection:
    """`algorithm.*`: from scores to advantages."""

    adv_estimator: AdvantageEstimator = "gae"
    """Advantage estimator (docs/algorithms.md); none = all advantages are 0, for distillation."""
    custom_estimator: CustomEstimatorSection = key(CustomEstimatorSection, read_if=when(".adv_estimator", "custom"))
    """An advantage estimator of the user."""
    gamma: Fraction = key(1.0, read_if=_read_by_estimators("gamma"))
    """Discount per token."""
    lam: Fraction = key(1.0, read_if=_read_by_estimators("lam"))
    """Lambda of GAE."""
    norm_adv_by_std_in_grpo: bool = key(True, read_if=_read_by_estimators("norm_adv_by_std_in_grpo"))
    """Divide the advantages by the group's standard deviation; false = Dr. GRPO."""
    use_kl_in_reward: bool | None = None
    """Subtract the divergence from the reference from the reward; null = only if actor.use_kl_loss is false."""
    kl_penalty: KLEstimator = key("kl", read_if=PENALISED)
    """Estimator of the divergence, as `actor.kl_loss_type`."""
    kl_penalty_k3_bound: Bound | None = key(10.0, read_if=(*PENALISED, when(".kl_penalty", *K3)))
    """As `actor.kl_loss_k3_bound`."""
    kl_penalty_js_beta: Mixture = key(0.5, read_if=(*PENALISED, when(".kl_penalty", "full_js")))
    """full_js: the share of the reference in the mixture."""
    kl_ctrl: KLControlSection = key(KLControlSection, read_if=IN_REWARD)
    """Coefficient of the divergence in the reward."""
    filter_groups: FilterGroupsSection = key(FilterGroupsSection, read_if=when(".filter_groups.enable", True))
    """Replacement of prompts whose responses teach nothing."""
    overlong_buffer: OverlongBufferSection = key(OverlongBufferSection, read_if=when(".overlong_buffer.enable", True))
    """Penalty for long responses."""
    mask_truncated_completions: bool = False
    """Leave responses at the length limit out of updates, but not out of their group."""
    rollout_correction: RolloutCorrectionSection = field(default_factory=RolloutCorrectionSection)
    """Importance weights between engine and trainer."""

    @property
    def estimator(self) -> Estimator:
        """Return the needs of `adv_estimator`."""
        if self.adv_estimator == "custom":
            critic, compares, greedy = (name in self.custom_estimator.needs for name in NEEDS)
            return Estimator(critic=critic, compares=compares, greedy=greedy)
        return ESTIMATORS[self.adv_estimator]


@section(ACTOR_LOSS)
class PolicyLossSection:
    """`actor_rollout_ref.actor.policy_loss.*`: the policy loss."""

    loss_mode: LossMode = "vanilla"
    """The loss (docs/algorithms.md); custom = a function of yours."""
    path: str | None = key(None, read_if=when(".loss_mode", "custom"))
    """Python file that defines the loss."""
    name: str = key("compute_policy_loss", read_if=when(".loss_mode", "custom"))
    """The function (docs/custom_algorithms.md)."""
    kwargs: dict[str, Any] = key(dict, read_if=when(".loss_mode", "custom"))
    """Further arguments of the function, by name."""
    tau_pos: Sharpness = key(1.0, read_if=when(".loss_mode", "sapo"))
    """How fast the gradient fades as a ratio leaves 1, for positive advantages."""
    tau_neg: Sharpness = key(1.05, read_if=when(".loss_mode", "sapo"))
    """The same for other advantages."""
    clip_cov_ratio: Fraction = key(0.0002, read_if=when(".loss_mode", "clip_cov"))
    """Share of the tokens that get no gradient."""
    clip_cov_lb: Covariance = key(1.0, read_if=when(".loss_mode", "clip_cov"))
    """Least covariance of log-probability and advantage of tokens without a gradient."""
    clip_cov_ub: Covariance = key(5.0, read_if=when(".loss_mode", "clip_cov"))
    """Largest covariance of tokens without a gradient."""
    kl_cov_ratio: Fraction = key(0.0002, read_if=when(".loss_mode", "kl_cov"))
    """Share of the tokens, those of the largest covariance, that are penalised."""
    ppo_kl_coef: Weight = key(1.0, read_if=when(".loss_mode", "kl_cov"))
    """Weight of the penalty on these tokens' divergence from the old policy."""
