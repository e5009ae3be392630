"""The sections of the configuration for prompts, supervised examples and their tokenizer."""

from typing import Literal

from megarl.section import Count, Length, Seed, section


@section
class DataSection:
    """`data.*` of PPO and GRPO: the prompts, their lengths and batch sizes."""

    train_files: str | list[str]
    """Parquet or JSON file or files (.jsonl, .json, .gz and .zst of them); a local path or any URI that pyarrow or
    fsspec opens (s3://, hdfs://, ...)."""
    val_files: str | list[str] | None = None
    """File or files for validation, as `train_files`; null = no validation."""
    tokenizer: str | None = None
    """HF directory, HF id or SentencePiece `.model` file, or a URI of one; null = the actor's."""
    prompt_key: str = "prompt"
    """Column with the prompt: a list of messages {role, content}, or a plain string."""
    max_prompt_length: Length = 512
    """Longest prompt, in tokens."""
    max_response_length: Length = 512
    """Longest response, in tokens."""
    train_batch_size: Count = 1024
    """Prompts per step, over all ranks."""
    val_batch_size: Count | None = None
    """Prompts per validation batch, over all ranks; null = all at once."""
    truncation: Literal["error", "left", "right", "middle"] = "error"
    """Treatment of prompts longer than `max_prompt_length`: refuse them (error), or cut them at that place. The token
    that begins a text and the template's beginning of the response stay."""
    filter_overlong_prompts: bool = False
    """Drop over-long prompts from the data set instead."""
    shuffle: bool = True
    """A new order of the prompts in every epoch."""
    seed: Seed = 1
    """Seed of that order."""
    chat_template: str | None = None
    """Jinja file or string that replaces the tokenizer's chat template."""
    apply_chat_template: bool | None = None
    """true = apply the chat template to every prompt, to a string as one user message; false = use the content of the
    messages as it is; null = apply the template to lists of messages, if the tokenizer has one."""
    special_tokens_in_text: Literal["split", "allow", "error"] = "split"
    """Names of special tokens in the text of files and environments: read as letters (split), as the tokens (allow, for
    files that a template has written), or refused in files (error)."""
    reward_fn_key: str = "data_source"
    """Column with the data source, which picks the built-in reward; may be missing if no built-in reward is used."""
    prompt_id_key: str | None = None
    """Column with an id of the prompt, which logs and kept samples show; null = none."""
    max_prompt_id_length: Length | None = None
    """Longest id, in characters; a longer id is an error. null = no limit."""
    return_raw_chat: bool = False
    """Pass the prompt as it is in the file to reward functions, as `extra_info["raw_chat"]`."""
    return_raw_input_ids: bool = False
    """Pass the prompt's ids without the chat template to reward functions, as `extra_info["raw_input_ids"]`."""


@section
class SupervisedDataSection:
    """`data.*` of runs that learn from files alone."""

    train_files: str | list[str]
    """Parquet or JSON file or files; a local path or any URI that pyarrow or fsspec opens."""
    val_files: str | list[str] | None = None
    """File or files for validation, as `train_files`; null = no validation."""
    tokenizer: str | None = None
    """HF directory, HF id or SentencePiece `.model` file, or a URI of one; null = the model's."""
    prompt_key: str = "prompt"
    """Column with the prompt: a list of messages {role, content}, or a plain string."""
    train_batch_size: Count = 256
    """Rows per optimizer step, over all ranks."""
    micro_batch_size: Count | None = None
    """Most rows per forward pass, per rank; null = only the token budget is a limit."""
    shuffle: bool = True
    """A new order of the rows in every epoch."""
    seed: Seed = 1
    """Seed of that order."""
    chat_template: str | None = None
    """Jinja file or string that replaces the tokenizer's chat template."""
    apply_chat_template: bool | None = None
    """true = apply the chat template to every prompt, to a string as one user message; false = use the content of the
    messages as it is; null = apply the template to lists of messages, if the tokenizer has one."""
    special_tokens_in_text: Literal["split", "allow", "error"] = "split"
    """Names of special tokens in the text of files and environments: read as letters (split), as the tokens (allow, for
    files that a template has written), or refused in files (error)."""


@section
class SFTDataSection(SupervisedDataSection):
    """`data.*` of supervised fine-tuning: pairs of prompt and response."""

    response_key: str = "response"
    """Column with the response, a plain string; only its tokens have a loss."""
    max_length: Length = 1024
    """Most tokens of a prompt with its response."""


@section
class PreferenceDataSection(SupervisedDataSection):
    """`data.*` of a reward model's training: a preferred and a rejected response to each prompt."""

    chosen_key: str = "chosen"
    """Column with the preferred response, a plain string."""
    rejected_key: str = "rejected"
    """Column with the rejected response, a plain string."""
    margin_key: str | None = None
    """Column with a number: the least difference between preferred and rejected reward; null = none."""
    max_length: Length = 1024
    """Most tokens of a prompt with a response; a longer sequence is cut on the left."""
