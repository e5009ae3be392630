"""What a user may say about the checkpoints that models start from."""

from dataclasses import field
from typing import Annotated, Any

from pydantic import BeforeValidator

from megarl.section import section


def _empty_if_none(value: object) -> object:
    return "" if value is None else value


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
