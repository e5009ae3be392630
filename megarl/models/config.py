"""The configuration of the checkpoints that models start from."""

import re
from dataclasses import field
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from megarl.mark import Change, Effect, key, when
from megarl.section import CountFromZero, section

MODEL = Change(Effect.CURVE, "the model: its tokenizer, and the frozen models that it is compared with")

_DECIDING = (".lora_rank", ".lora_adapter_path")
ADAPTED = when(".has_adapters", words="adapters learn", because=_DECIDING)
WITHOUT_ADAPTERS = when(".has_adapters", False, words="no adapters learn", because=_DECIDING)
NEW = when(".has_new_adapters", words="`lora_rank` is set and `lora_adapter_path` is not", because=_DECIDING)

ALL_LINEAR = "all-linear"

Recompute = bool | Literal["selective"]
"""The activations that the backward pass computes again: none, all of a layer, or those of the feed-forward layers."""


def _empty_if_none(value: object) -> object:
    return "" if value is None else value


def _none_if_empty(value: object) -> object:
    return None if value == [] else value


def _selecting(value: str | list[str] | None) -> str | list[str] | None:
    """Refuse what selects nothing, and an expression that is none."""
    if isinstance(value, list) and not value:
        raise ValueError("selects no projection: name some, or leave the key out")
    if value == [ALL_LINEAR]:
        return ALL_LINEAR
    if isinstance(value, str):
        try:
            re.compile(value)
        except re.error as error:
            raise ValueError(f"is no regular expression ({error}): name projections in a list") from error
    return value


@section(MODEL)
class CheckpointSection:
    """`*.model.*`: a checkpoint to start from."""

    path: str
    """Hugging Face directory, its URI or id."""
    external_lib: str | list[str] | None = None
    """Modules to import first, to register models or tokenizers."""
    override_config: dict[str, Any] = field(default_factory=dict)
    """Fields of config.json to replace, such as {num_hidden_layers: 4}."""
    trust_remote_code: bool = key(False, Change(Effect.NONE, "which code may be loaded"))
    """Allow a checkpoint's own Python code to run."""


@section(MODEL)
class ModelSection(CheckpointSection):
    """`actor_rollout_ref.model.*`: the checkpoint of the actor."""

    enable_gradient_checkpointing: Recompute = key(False, Change(Effect.ROUNDING, "what is recomputed"))
    """Recompute activations in the backward pass: all, or those of feed-forward layers and experts (selective)."""
    freeze_moe_router: bool = key(False, Change(Effect.CURVE, "the weights that learn"), read_if=WITHOUT_ADAPTERS)
    """Keep the routers of experts as they are."""
    lora_rank: CountFromZero = 0
    """Rank of adapters (LoRA), which learn instead of the weights; 0 = the weights learn."""
    lora_alpha: Annotated[float, Field(gt=0.0, le=1e6)] = key(16.0, read_if=NEW)
    """Scale of the adapters, divided by lora_rank."""
    lora_dropout: Annotated[float, Field(ge=0.0, lt=1.0)] = key(
        0.0, Change(Effect.CURVE, "what updates leave out"), read_if=ADAPTED
    )
    """Share of an adapter's input that each update leaves out."""
    target_modules: Annotated[str | list[str], AfterValidator(_selecting)] = key(ALL_LINEAR, read_if=NEW)
    """Projections with adapters: names or ends of names, a regular expression, or all-linear."""
    exclude_modules: Annotated[str | list[str] | None, BeforeValidator(_none_if_empty), AfterValidator(_selecting)] = (
        key(None, read_if=NEW)
    )
    """Projections of target_modules without adapters."""
    lora_adapter_path: str | None = None
    """PEFT directory to start from, which also gives rank, scale and targets; null = new adapters."""

    @property
    def has_adapters(self) -> bool:
        """Tell whether adapters learn instead of the weights."""
        return bool(self.lora_rank or self.lora_adapter_path)

    @property
    def has_new_adapters(self) -> bool:
        """Tell whether the adapters are those of the keys, not those of files."""
        return bool(self.lora_rank) and not self.lora_adapter_path


@section(MODEL)
class ReferenceModelSection(CheckpointSection):
    """`actor_rollout_ref.ref.model.*`: the checkpoint of the reference, if it is not that of the actor."""

    path: Annotated[str, BeforeValidator(_empty_if_none)] = ""
    """Teacher with the actor's tokenizer: Hugging Face directory, its URI or id; empty = the actor's start."""


@section(MODEL)
class CriticModelSection(ModelSection):
    """`critic.model.*`: the checkpoint of the critic; a scalar head replaces the head of a language model."""

    path: str = ""
    """Hugging Face directory, its URI or id; required."""
    tokenizer_path: str | None = None
    """Tokenizer of the critic; null = the policy's."""


@section(MODEL)
class RewardCheckpointSection(CheckpointSection):
    """`reward_model.model.*`: the model that scores responses, a sequence classifier with one label."""

    path: Annotated[str, BeforeValidator(_empty_if_none)] = ""
    """Hugging Face directory, its URI or id; required."""
    input_tokenizer: str | None = None
    """Tokenizer of the tokens that the model receives; null = it reads them as they are."""
