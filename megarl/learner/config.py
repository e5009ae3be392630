"""What a user may say about the models that Megatron-Core trains: actor, reference and critic."""

from dataclasses import field
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from megarl.section import Bound, Count, CountFromZero, Fraction, Interval, Length, Seed, Weight, section

DecayRate = Annotated[float, Field(ge=0.0, lt=1.0)]
Covariance = Annotated[float, Field(ge=-1e30, le=1e30)]
LossAggregation = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]


def _none_if_negative(value: object) -> object:
    return None if value == -1 else value


def _empty_if_none(value: object) -> object:
    return "" if value is None else value


@section
class MegatronSection:
    """`*.megatron.*`: how one model is cut over the ranks and where its parts live."""

    tensor_model_parallel_size: Count = 1
    """Ranks that share every layer."""
    pipeline_model_parallel_size: Count = 1
    """Stages that the layers are divided into."""
    virtual_pipeline_model_parallel_size: Annotated[int, Field(ge=2, le=1_000_000)] | None = None
    """Chunks of layers that each stage holds in turns, which shortens the pipeline's bubble; null = one."""
    context_parallel_size: Count = 1
    """Ranks that share the tokens of every sequence."""
    expert_model_parallel_size: Count = 1
    """Ranks that the experts of a layer are divided among; cut out of the data-parallel and context-parallel ranks."""
    expert_tensor_parallel_size: Count | None = None
    """Ranks that share every expert; null = tensor_model_parallel_size."""
    sequence_parallel: bool = True
    """Split the activations between tensor-parallel layers too; acts where tensor_model_parallel_size > 1."""
    use_distributed_optimizer: bool = True
    """Shard the optimizer state over the data-parallel ranks."""
    param_offload: bool = False
    """Keep the parameters in host memory between phases; of a model that learns, with use_distributed_optimizer."""
    grad_offload: bool = False
    """Release the gradient buffers between phases."""
    optimizer_offload: bool = False
    """Keep the optimizer state in host memory between phases."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Type of parameters and activations; the optimizer always keeps float32."""
    seed: Seed = 1
    """Seed of new parameters (the critic's head) and of dropout."""
    override_transformer_config: dict[str, Any] = field(default_factory=dict)
    """Fields of Megatron's TransformerConfig: recompute_granularity, attention_backend, ..."""


@section
class OptimSection:
    """`*.optim.*`: AdamW and its schedule."""

    lr: Annotated[float, Field(gt=0.0, le=10.0)] = 1e-6
    """Peak learning rate, at most 10."""
    lr_warmup_steps: Annotated[CountFromZero | None, BeforeValidator(_none_if_negative)] = None
    """Iterations of linear warm-up; null or -1 = lr_warmup_steps_ratio of all iterations."""
    lr_warmup_steps_ratio: Fraction = 0.0
    """Share of all iterations spent in warm-up."""
    min_lr_ratio: Fraction | None = None
    """Last learning rate as a share of the peak, for cosine and linear; null = 0."""
    warmup_style: Literal["constant", "cosine", "linear"] = "constant"
    """What follows the warm-up: a constant rate, or a cosine or linear decay."""
    total_training_steps: Interval = -1
    """Length of the schedule in iterations; -1 or 0 = filled in from the data and the epochs."""
    weight_decay: Weight = 0.01
    """Decoupled weight decay; norms and biases have none."""
    betas: tuple[DecayRate, DecayRate] = (0.9, 0.999)
    """Adam's decay rates, less than 1."""


@section
class CheckpointSection:
    """`*.model.*`: a checkpoint to start from."""

    path: str
    """HF directory, its URI (s3://, gs://, hdfs://, anything that fsspec opens) or HF id."""
    external_lib: str | list[str] | None = None
    """Module or modules imported first, to register models or tokenizers."""
    override_config: dict[str, Any] = field(default_factory=dict)
    """Fields of the HF config to replace: {attention_dropout: 0.0, num_hidden_layers: 4}."""
    trust_remote_code: bool = False
    """Let a checkpoint's own Python code run."""


@section
class ModelSection(CheckpointSection):
    """`actor_rollout_ref.model.*`: the checkpoint that the actor and the reference start from."""

    enable_gradient_checkpointing: bool = False
    """Recompute activations in the backward pass instead of keeping them."""


@section
class CriticModelSection(ModelSection):
    """`critic.model.*`: the checkpoint that the critic starts from; a language model's head becomes a scalar."""

    path: str = ""
    """HF directory, its URI or HF id; required by algorithm.adv_estimator=gae, unused by the others."""
    tokenizer_path: str | None = None
    """Tokenizer that the critic was trained with; null = the policy's. With another one the critic reads the policy's
    text in its own tokens."""


@section
class RewardCheckpointSection(CheckpointSection):
    """`reward_model.model.*`: the model that scores responses, a sequence classifier with one label."""

    path: Annotated[str, BeforeValidator(_empty_if_none)] = ""
    """HF directory, its URI or HF id; required by reward_model.enable."""
    input_tokenizer: str | None = None
    """Tokenizer of the tokens it is given, the policy's unless set: they are decoded, and encoded again under its own
    chat template. null = vocabulary and chat template are the policy's, and tokens pass as they are."""


@section
class PolicyLossSection:
    """`actor_rollout_ref.actor.policy_loss.*`: which loss the advantages go into."""

    loss_mode: Literal["vanilla", "gspo", "cispo", "gpg", "clip_cov", "kl_cov"] = "vanilla"
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
    kl_loss_type: Literal["kl", "abs", "mse", "low_var_kl", "k1", "k2", "k3", "full"] = "low_var_kl"
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
