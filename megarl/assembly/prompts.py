"""Builds the tokenizer and the prompts of a run, or of a check before it, which does not import Megatron."""

from datetime import datetime

from megarl.config.ppo_rules import needs_of
from megarl.config.root import Config
from megarl.data.config import TextSection
from megarl.data.prompts import PromptDataset, PromptStream
from megarl.data.tokenizer import Tokenizer
from megarl.models.config import ModelSection
from megarl.models.source import Source


def make_tokenizer(data: TextSection, model: ModelSection, source: Source, *, now: datetime | None = None) -> Tokenizer:
    """Load the tokenizer that `data` names, by default that of the model in `source`. Templates see the time `now`."""
    return source.tokenizer(
        data.tokenizer,
        chat_template=data.chat_template,
        chat_template_kwargs=data.apply_chat_template_kwargs,
        apply_chat_template=data.apply_chat_template,
        special_tokens_in_text=data.special_tokens_in_text,
        now=now,
        trust_remote_code=model.trust_remote_code,
    )


def training_prompts(config: Config, tokenizer: Tokenizer) -> PromptStream:
    """Open the prompts of training."""
    data = config.data
    dataset = PromptDataset(data, data.train_files, tokenizer, needs_of(config))
    return PromptStream(dataset, batch_size=data.train_batch_size, shuffle=data.shuffle, seed=data.seed)


def validation_prompts(config: Config, tokenizer: Tokenizer) -> PromptStream | None:
    """Open the prompts of validation. Return None if no file is named."""
    data = config.data
    if data.val_files is None:
        return None
    dataset = PromptDataset(data, data.val_files, tokenizer, needs_of(config))
    return PromptStream(dataset, batch_size=data.val_batch_size, shuffle=False, seed=data.seed)
