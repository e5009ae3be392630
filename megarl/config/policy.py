"""What a user may say about the models of a run: actor, reference and critic."""

from dataclasses import field
from typing import Annotated

from pydantic import Field

from megarl.algorithms.config import KLEstimator, LossAggregation, PolicyLossSection
from megarl.learner.config import MegatronSection, OptimSection
from megarl.models.config import CriticModelSection
from megarl.section import Bound, Count, Fraction, Length, Weight, section


@section
class ActorSection:
    """`actor_rollout_ref.actor.*`: the policy update."""

    ppo_mini_batch_size: Count = 256
    """Prompts per optimizer step, over all ranks."""
    ppo_micro_batch_size: Count | None = None
    """Sequences per forward pass at most, per rank; null = only the token budget bounds it."""
    use_dynamic_bsz: bool = True
    """Pack micro-batches to a token budget; false = exactly ppo_micro_batch_size sequences each."""
    ppo_max_token_len_per_gpu: Length = 16384
    """Token budget of a micro-batch."""
    grad_clip: Bound = 1.0
    """Largest gradient norm."""
    clip_ratio: Fraction = 0.2
    """Policy ratios outside [1 - clip_ratio, 1 + clip_ratio] give no gradient."""
    clip_ratio_low: Fraction | None = None
    """Lower side of that interval; null = clip_ratio."""
    clip_ratio_high: Annotated[float, Field(ge=0.0, le=1e30)] | None = None
    """Upper side of that interval; null = clip_ratio."""
    clip_ratio_c: Annotated[float, Field(gt=1.0, le=1e30)] = 3.0
    """Dual clip: bound on the ratio where the advantage is negative."""
    policy_loss: PolicyLossSection = field(default_factory=PolicyLossSection)
    """The loss."""
    loss_agg_mode: LossAggregation = "token-mean"
    """How per-token losses become one number."""
    entropy_coeff: Annotated[float, Field(ge=-1e6, le=1e6)] = 0.001
    """Weight of the entropy bonus; less than 0 penalises entropy."""
    use_kl_loss: bool = False
    """Add the divergence from the reference to the loss; true for GRPO."""
    kl_loss_coef: Weight = 0.001
    """Weight of that divergence."""
    kl_loss_type: KLEstimator = "low_var_kl"
    """Its estimator; k1 = kl, k2 = mse, k3 = low_var_kl; full = exact, over the whole vocabulary."""
    kl_loss_k3_bound: Bound | None = 10.0
    """The largest k3 (low_var_kl) estimate of a token in nats, which has no gradient; null = no bound."""
    ptx_coef: Weight = 0.0
    """Weight of the loss of supervised pairs that every update learns from too (PPO-ptx)."""
    ptx_files: str | list[str] | None = None
    """Parquet or JSON file or files with those pairs: the prompts in data.prompt_key, the answers in `response`."""
    ptx_batch_size: Count | None = None
    """Pairs per optimizer step, over all ranks; null = as many as ppo_mini_batch_size prompts have samples."""
    ppo_epochs: Count = 1
    """Passes over the samples of one iteration."""
    shuffle: bool = True
    """Draw the mini-batches in random order."""
    optim: OptimSection = field(default_factory=OptimSection)
    """The optimizer."""
    megatron: MegatronSection = field(default_factory=MegatronSection)
    """The partition of the actor; reference and critic follow it."""


@section
class RefSection:
    """`actor_rollout_ref.ref.*`: the frozen reference policy."""

    log_prob_micro_batch_size: Count | None = None
    """Sequences per forward pass at most, per rank; null = only the token budget bounds it."""
    log_prob_max_token_len_per_gpu: Length | None = None
    """Token budget of a forward pass; null = the actor's ppo_max_token_len_per_gpu."""
    megatron: MegatronSection = field(default_factory=MegatronSection)
    """The partition; each key follows the actor's unless set."""


@section
class CriticSection:
    """`critic.*`: the value model and its update."""

    optim: OptimSection = field(default_factory=lambda: OptimSection(lr=1e-5))
    """The optimizer."""
    model: CriticModelSection = field(default_factory=CriticModelSection)
    """The checkpoint it starts from."""
    megatron: MegatronSection = field(default_factory=MegatronSection)
    """The partition; each key follows the actor's unless set."""
    ppo_mini_batch_size: Count = 256
    """Prompts per optimizer step, over all ranks; follows the actor's unless set."""
    ppo_micro_batch_size: Count | None = None
    """Sequences per forward pass of the update at most, per rank; null = only the token budget bounds it."""
    forward_micro_batch_size: Count | None = None
    """Sequences per forward pass of the estimate at most, per rank; null = ppo_micro_batch_size."""
    ppo_epochs: Count = 1
    """Passes over the samples of one iteration; follows the actor's unless set."""
    grad_clip: Bound = 1.0
    """Largest gradient norm."""
    cliprange_value: Bound = 0.5
    """Values further than this from the old ones give no gradient; 1e30 = no limit."""
    loss_agg_mode: LossAggregation = "token-mean"
    """How per-token losses become one number."""
