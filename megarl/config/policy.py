"""The keys of the models of a run: actor, reference and critic."""

from dataclasses import field
from typing import Annotated, Literal

from pydantic import Field

from megarl.algorithms.config import ACTOR_LOSS, K3, KLEstimator, LossAggregation, Mixture, PolicyLossSection
from megarl.learner.config import MegatronSection, OptimSection
from megarl.mark import MICRO, OPTIMIZER, Change, Effect, key, never, when
from megarl.models.config import MODEL, CriticModelSection, ReferenceModelSection
from megarl.section import Bound, Count, Fraction, Length, Weight, section

DPPO = ("dppo_tv", "dppo_kl")
CLIPS = when(".policy_loss.loss_mode", "vanilla", "gspo", "cispo", "clip_cov", "geo_mean", *DPPO)
ONE_CLIP = when(
    ".needs_clip_ratio",
    words="`clip_ratio_low` or `clip_ratio_high` is null",
    because=(".clip_ratio_low", ".clip_ratio_high"),
)
IN_LOSS = when(".use_kl_loss", True)
BUDGET = when(
    "has_token_budget",
    words="`actor_rollout_ref.actor.use_dynamic_bsz` is true, or a reward model has no `micro_batch_size`",
    because=("actor_rollout_ref.actor.use_dynamic_bsz",),
)
ESTIMATED = when(
    "estimates_divergence",
    words="such a divergence is estimated",
    because=("algorithm.kl_penalty", "actor_rollout_ref.actor.kl_loss_type"),
)
TAUGHT = when(
    "teachers",
    words="`actor_rollout_ref.ref.model.path` or `actor_rollout_ref.ref.teachers` names a teacher",
    because=(".model.path", ".teachers"),
)
ONE_SEED = never("as actor_rollout_ref.actor.megatron.seed serves all models", "seed")
UNTRAINED = never("as this model does not learn", "use_distributed_optimizer", "grad_offload", "optimizer_offload")


@section()
class UpdateSection:
    """The update of a model from samples."""

    ppo_mini_batch_size: Count = 256
    """Prompts per optimizer step."""
    ppo_micro_batch_size: Count | None = key(None, MICRO)
    """Most sequences per forward pass; null = the token budget alone."""
    ppo_epochs: Count = 1
    """Passes over the samples of a step."""
    grad_clip: Bound = key(1.0, OPTIMIZER)
    """Largest gradient norm."""
    loss_agg_mode: LossAggregation = "token-mean"
    """The mean of the tokens' losses."""


@section(ACTOR_LOSS)
class ActorSection(UpdateSection):
    """`actor_rollout_ref.actor.*`: the update of the policy."""

    use_dynamic_bsz: bool = key(True, MICRO)
    """Fill micro-batches up to a token budget; false = ppo_micro_batch_size each."""
    ppo_max_token_len_per_gpu: Length = key(16384, MICRO, read_if=BUDGET)
    """Token budget of a micro-batch."""
    clip_ratio: Fraction = key(0.2, read_if=(CLIPS, ONE_CLIP))
    """Ratios outside [1 - clip_ratio, 1 + clip_ratio] give no gradient (geo_mean: the log of the ratio; dppo_tv,
    dppo_kl: a divergence)."""
    clip_ratio_low: Fraction | None = key(None, read_if=CLIPS)
    """Distance of the lower bound; null = clip_ratio."""
    clip_ratio_high: Annotated[float, Field(ge=0.0, le=1e30)] | None = key(None, read_if=CLIPS)
    """Distance of the upper bound; null = clip_ratio."""
    clip_ratio_c: Annotated[float, Field(gt=1.0, le=1e30)] = key(
        3.0, read_if=when(".policy_loss.loss_mode", "vanilla", *DPPO)
    )
    """Dual clip: largest ratio that counts for negative advantages (dppo_tv and dppo_kl: for all)."""
    policy_loss: PolicyLossSection = field(default_factory=PolicyLossSection)
    """The policy loss."""
    routing_replay: Literal["none", "recompute"] = "none"
    """recompute: all updates of a step use the actor's first choice of experts (R2)."""
    entropy_coeff: Annotated[float, Field(ge=-1e6, le=1e6)] = 0.001
    """Weight of the entropy bonus; negative = a penalty."""
    use_kl_loss: bool = False
    """Add the divergence from the reference to the loss."""
    kl_loss_coef: Weight = key(0.001, read_if=IN_LOSS)
    """Weight of the divergence in the loss."""
    kl_loss_type: KLEstimator = key("low_var_kl", read_if=IN_LOSS)
    """Estimator (docs/algorithms.md): k1 = kl, k2 = mse, k3 = low_var_kl; + = with the gradient of k2."""
    kl_loss_k3_bound: Bound | None = key(10.0, read_if=(IN_LOSS, when(".kl_loss_type", *K3)))
    """Largest estimate of a token, in nats; a larger one has no gradient. null = no bound."""
    kl_loss_js_beta: Mixture = key(0.5, read_if=(IN_LOSS, when(".kl_loss_type", "full_js")))
    """full_js: the share of the reference in the mixture."""
    ptx_coef: Weight = 0.0
    """Weight of the loss of supervised pairs (PPO-ptx)."""
    ptx_files: str | list[str] | None = None
    """Files with the pairs: columns data.prompt_key and `response`."""
    ptx_batch_size: Count | None = None
    """Pairs per optimizer step; null = the samples of a mini-batch."""
    shuffle: bool = True
    """Draw the mini-batches in random order."""
    optim: OptimSection = field(default_factory=OptimSection)
    """The optimizer."""
    megatron: MegatronSection = field(default_factory=MegatronSection)
    """The split of the actor over the ranks; the other models follow it."""

    @property
    def needs_clip_ratio(self) -> bool:
        """Tell whether a bound of the policy ratios follows `clip_ratio`."""
        return self.clip_ratio_low is None or self.clip_ratio_high is None


@section()
class RefSection:
    """`actor_rollout_ref.ref.*`: the frozen reference policy."""

    model: ReferenceModelSection = key(ReferenceModelSection, read_if=TAUGHT)
    """The checkpoint of the reference."""
    teachers: dict[str, str] = key(dict, MODEL)
    """References by data source; ref.model reads the samples of all other sources."""
    log_prob_micro_batch_size: Count | None = key(None, MICRO, read_if=ESTIMATED)
    """Most sequences per forward pass; null = the token budget alone."""
    log_prob_max_token_len_per_gpu: Length | None = key(None, MICRO, read_if=(BUDGET, ESTIMATED))
    """Token budget of a forward pass; null = actor.ppo_max_token_len_per_gpu."""
    megatron: MegatronSection = key(MegatronSection, read_if=(ONE_SEED, UNTRAINED))
    """The split over the ranks."""


@section(Change(Effect.CURVE, "the critic's loss"))
class CriticSection(UpdateSection):
    """`critic.*`: the value model and its update."""

    optim: OptimSection = field(default_factory=lambda: OptimSection(lr=1e-5))
    """The optimizer."""
    model: CriticModelSection = field(default_factory=CriticModelSection)
    """The checkpoint that the critic starts from."""
    megatron: MegatronSection = key(MegatronSection, read_if=ONE_SEED)
    """The split over the ranks."""
    forward_micro_batch_size: Count | None = key(None, MICRO)
    """Most sequences per forward pass of the estimate; null = ppo_micro_batch_size."""
    cliprange_value: Bound = 0.5
    """Largest change of a value that has a gradient; 1e30 = no limit."""
