"""The keys of the models of a run: actor, reference and critic."""

from dataclasses import field
from typing import Annotated

from pydantic import Field

from megarl.algorithms.config import KLEstimator, LossAggregation, Mixture, PolicyLossSection
from megarl.learner.config import MegatronSection, OptimSection
from megarl.models.config import CriticModelSection, ReferenceModelSection
from megarl.section import Bound, Count, Fraction, Length, Weight, section


@section
class ActorSection:
    """`actor_rollout_ref.actor.*`: the update of the policy."""

    ppo_mini_batch_size: Count = 256
    """Prompts per optimizer step, over all ranks."""
    ppo_micro_batch_size: Count | None = None
    """Most sequences per forward pass, per rank; null = only the token budget limits them."""
    use_dynamic_bsz: bool = True
    """Fill micro-batches up to a token budget; false = exactly ppo_micro_batch_size sequences each."""
    ppo_max_token_len_per_gpu: Length = 16384
    """Token budget of a micro-batch, per rank."""
    grad_clip: Bound = 1.0
    """Largest gradient norm."""
    clip_ratio: Fraction = 0.2
    """Policy ratios outside [1 - clip_ratio, 1 + clip_ratio] give no gradient."""
    clip_ratio_low: Fraction | None = None
    """Distance of the lower bound from 1; null = clip_ratio."""
    clip_ratio_high: Annotated[float, Field(ge=0.0, le=1e30)] | None = None
    """Distance of the upper bound from 1; null = clip_ratio."""
    clip_ratio_c: Annotated[float, Field(gt=1.0, le=1e30)] = 3.0
    """Dual clip: largest ratio that counts if the advantage is negative."""
    policy_loss: PolicyLossSection = field(default_factory=PolicyLossSection)
    """The policy loss."""
    loss_agg_mode: LossAggregation = "token-mean"
    """The mean that turns the losses of tokens into one number."""
    entropy_coeff: Annotated[float, Field(ge=-1e6, le=1e6)] = 0.001
    """Weight of the entropy bonus; a negative weight penalises entropy."""
    use_kl_loss: bool = False
    """Add the divergence from the reference to the loss, as GRPO does."""
    kl_loss_coef: Weight = 0.001
    """Weight of that divergence."""
    kl_loss_type: KLEstimator = "low_var_kl"
    """Estimator of that divergence; k1 = kl, k2 = mse, k3 = low_var_kl. Exact, over the vocabulary: full = from the
    actor's side, full_forward = from the reference's side, full_js = Jensen-Shannon."""
    kl_loss_k3_bound: Bound | None = 10.0
    """Largest k3 (low_var_kl) estimate of a token, in nats. A larger estimate has no gradient; null = no bound."""
    kl_loss_js_beta: Mixture = 0.5
    """full_js: the share of the reference in the mixture."""
    ptx_coef: Weight = 0.0
    """Weight of the loss of supervised pairs in every update (PPO-ptx)."""
    ptx_files: str | list[str] | None = None
    """Parquet or JSON file or files with the pairs: prompts in the column data.prompt_key, responses in `response`."""
    ptx_batch_size: Count | None = None
    """Pairs per optimizer step, over all ranks; null = as many as a mini-batch has samples."""
    ppo_epochs: Count = 1
    """Passes over the samples of a step."""
    shuffle: bool = True
    """Draw the mini-batches in random order."""
    optim: OptimSection = field(default_factory=OptimSection)
    """The optimizer."""
    megatron: MegatronSection = field(default_factory=MegatronSection)
    """The split of the actor over the ranks; the other models follow it."""


@section
class RefSection:
    """`actor_rollout_ref.ref.*`: the frozen reference policy."""

    model: ReferenceModelSection = field(default_factory=ReferenceModelSection)
    """The checkpoint of the reference."""
    teachers: dict[str, str] = field(default_factory=dict)
    """Further references by data source: Hugging Face directories, URIs or ids, as in ref.model.path. A reference reads
    the samples of its data source, and ref.model reads all others."""
    log_prob_micro_batch_size: Count | None = None
    """Most sequences per forward pass, per rank; null = only the token budget limits them."""
    log_prob_max_token_len_per_gpu: Length | None = None
    """Token budget of a forward pass; null = actor.ppo_max_token_len_per_gpu."""
    megatron: MegatronSection = field(default_factory=MegatronSection)
    """The split over the ranks."""


@section
class CriticSection:
    """`critic.*`: the value model and its update."""

    optim: OptimSection = field(default_factory=lambda: OptimSection(lr=1e-5))
    """The optimizer."""
    model: CriticModelSection = field(default_factory=CriticModelSection)
    """The checkpoint that the critic starts from."""
    megatron: MegatronSection = field(default_factory=MegatronSection)
    """The split over the ranks."""
    ppo_mini_batch_size: Count = 256
    """Prompts per optimizer step, over all ranks."""
    ppo_micro_batch_size: Count | None = None
    """Most sequences per forward pass of the update, per rank; null = only the token budget limits them."""
    forward_micro_batch_size: Count | None = None
    """Most sequences per forward pass of the estimate, per rank; null = ppo_micro_batch_size."""
    ppo_epochs: Count = 1
    """Passes over the samples of a step."""
    grad_clip: Bound = 1.0
    """Largest gradient norm."""
    cliprange_value: Bound = 0.5
    """Values that differ from the old values by more than this give no gradient; 1e30 = no limit."""
    loss_agg_mode: LossAggregation = "token-mean"
    """The mean that turns the losses of tokens into one number."""
