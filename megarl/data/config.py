"""What a user may say about prompts, supervised examples and their tokenizer."""

from typing import Literal

from megarl.section import Count, Length, Seed, section


@section
class DataSection:
    """`data.*` of PPO and GRPO: which prompts, how long, how many at a time."""

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
    """Prompts per iteration, over all ranks."""
    val_batch_size: Count | None = None
    """Prompts per validation batch, over all ranks; null = all at once."""
    truncation: Literal["error", "left", "right", "middle"] = "error"
    """What happens to a prompt longer than `max_prompt_length`: refused, or cut at that end."""
    filter_overlong_prompts: bool = False
    """Leave over-long prompts out of the data set instead."""
    shuffle: bool = True
    """A new order of the prompts in every epoch."""
    seed: Seed = 1
    """Seed of that order."""
    chat_template: str | None = None
    """Jinja file or string that replaces the tokenizer's chat template."""
    apply_chat_template: bool | None = None
    """true = every prompt goes through the chat template, a string as one message of a user; false = the content of
    the messages is read as it is; null = lists of messages go through the template, if the tokenizer has one."""
    reward_fn_key: str = "data_source"
    """Column whose value picks the rule-based reward; it may be missing if something else scores."""
    prompt_id_key: str | None = None
    """Column with an id of the prompt, carried to logs and dumps; null = none."""
    max_prompt_id_length: Length | None = None
    """Longest id, in characters; a longer one is an error. null = any."""
    return_raw_chat: bool = False
    """Give reward functions the prompt as it stands in the file, as `extra_info["raw_chat"]`."""
    return_raw_input_ids: bool = False
    """Give reward functions the prompt's ids without the chat template, as `extra_info["raw_input_ids"]`."""


@section
class SupervisedDataSection:
    """`data.*` of every run that learns from files alone."""

    train_files: str | list[str]
    """Parquet or JSON file or files; a local path or any URI that pyarrow or fsspec opens."""
    val_files: str | list[str] | None = None
    """File or files that are reported on, as `train_files`; null = none."""
    tokenizer: str | None = None
    """HF directory, HF id or SentencePiece `.model` file, or a URI of one; null = the model's."""
    prompt_key: str = "prompt"
    """Column with the prompt: a list of messages {role, content}, or a plain string."""
    train_batch_size: Count = 256
    """Rows per optimizer step, over all ranks."""
    micro_batch_size: Count | None = None
    """Rows per forward pass at most, per rank; null = only the token budget bounds it."""
    shuffle: bool = True
    """A new order of the rows in every epoch."""
    seed: Seed = 1
    """Seed of that order."""
    chat_template: str | None = None
    """Jinja file or string that replaces the tokenizer's chat template."""
    apply_chat_template: bool | None = None
    """true = every prompt goes through the chat template, a string as one message of a user; false = the content of
    the messages is read as it is; null = lists of messages go through the template, if the tokenizer has one."""


@section
class SFTDataSection(SupervisedDataSection):
    """`data.*` of supervised fine-tuning: pairs of prompt and response."""

    response_key: str = "response"
    """Column with the response, a plain string; only its tokens carry loss."""
    max_length: Length = 1024
    """Longest prompt with its response, in tokens."""


@section
class PreferenceDataSection(SupervisedDataSection):
    """`data.*` of a reward model's training: two responses to a prompt, of which one is preferred."""

    chosen_key: str = "chosen"
    """Column with the response that is preferred, a plain string."""
    rejected_key: str = "rejected"
    """Column with the other one."""
    margin_key: str | None = None
    """Column with a number: by how much the first reward should exceed the second; null = none."""
    max_length: Length = 1024
    """Longest prompt with a response, in tokens; longer ones are cut on the left."""
