"""The sections of the configuration for prompts, supervised examples and their tokenizer."""

from dataclasses import field
from typing import Literal

from megarl.mark import MICRO, RULES, SCORES, VALIDATES, VALIDATION, Change, Effect, key, when
from megarl.section import Count, Length, Seed, section

DATA = Change(Effect.CURVE, "the training data and its order")
DRAWS = when(
    "draws_order",
    words="`data.shuffle` or `actor_rollout_ref.actor.shuffle` is true, or `ptx_files` is set",
    because=(".shuffle", "actor_rollout_ref.actor.shuffle"),
)


@section(DATA)
class TextSection:
    """`data.*` of every run: files of texts, and how texts become tokens."""

    train_files: str | list[str]
    """Parquet or JSON file or files: paths or URIs (docs/data.md)."""
    val_files: str | list[str] | None = key(None, SCORES)
    """Files for validation, as `train_files`; null = none."""
    tokenizer: str | None = None
    """Hugging Face directory or id, SentencePiece `.model`, or a URI; null = the model's."""
    prompt_key: str = "prompt"
    """Column with the prompt."""
    shuffle: bool = True
    """A new order of the rows in every epoch."""
    chat_template: str | None = None
    """Jinja file or text instead of the tokenizer's chat template."""
    apply_chat_template: bool | None = None
    """Prompts that the chat template applies to: true = all; false = none; null = lists of messages, if the tokenizer
    has one."""
    apply_chat_template_kwargs: dict[str, object] = field(default_factory=dict)
    """Variables of the chat template, such as {enable_thinking: false}."""
    special_tokens_in_text: Literal["split", "allow", "error"] = "split"
    """Special tokens' names in texts are letters (split), tokens (allow), or a fault (error)."""


@section(DATA)
class DataSection(TextSection):
    """`data.*` of PPO and GRPO: the prompts, their lengths and batch sizes."""

    max_prompt_length: Length = 512
    """Longest prompt, in tokens."""
    max_response_length: Length = 512
    """Longest response, in tokens."""
    train_batch_size: Count = 1024
    """Prompts per step."""
    val_batch_size: Count | None = key(None, VALIDATION, read_if=VALIDATES)
    """Prompts per validation batch; null = all at once."""
    truncation: Literal["error", "left", "right", "middle"] = key(
        "error", read_if=when(".filter_overlong_prompts", False)
    )
    """Longer prompts are refused (error), or cut at that place."""
    filter_overlong_prompts: bool = False
    """Drop prompts longer than `max_prompt_length`."""
    seed: Seed = key(1, read_if=DRAWS)
    """Seed of these orders."""
    reward_fn_key: str = "data_source"
    """Column with the data source."""
    prompt_id_key: str | None = key(None, Change(Effect.NONE, "names of prompts in records"))
    """Column with an id of the prompt."""
    max_prompt_id_length: Length | None = None
    """Longest id, in characters."""
    return_raw_chat: bool = key(False, read_if=RULES)
    """Pass the prompt to reward functions as `extra_info["raw_chat"]`."""
    return_raw_input_ids: bool = key(False, read_if=RULES)
    """Pass its ids without chat template as `extra_info["raw_input_ids"]`."""


@section(DATA)
class SupervisedDataSection(TextSection):
    """`data.*` of runs that learn from files alone."""

    train_batch_size: Count = 256
    """Rows per optimizer step."""
    micro_batch_size: Count | None = key(None, MICRO)
    """Most rows per forward pass; null = the token budget alone."""
    seed: Seed = key(1, read_if=when(".shuffle", True))
    """Seed of the order of rows."""


@section(DATA)
class SFTDataSection(SupervisedDataSection):
    """`data.*` of supervised fine-tuning: pairs of prompt and response."""

    response_key: str = "response"
    """Column with the response, a plain string; only its tokens have a loss."""
    max_length: Length = 1024
    """Most tokens of a prompt with its response."""


@section(DATA)
class PreferenceDataSection(SupervisedDataSection):
    """`data.*` of a reward model's training: a preferred and a rejected response to each prompt."""

    chosen_key: str = "chosen"
    """Column with the preferred response, a plain string."""
    rejected_key: str = "rejected"
    """Column with the rejected response, a plain string."""
    margin_key: str | None = None
    """Column with the least difference of the two rewards; null = none."""
    max_length: Length = 1024
    """Most tokens of a prompt with a response; a longer sequence is cut on the left."""
