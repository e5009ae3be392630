"""A small random model with a tokenizer, made without a network: to try a project on a laptop."""

from collections.abc import Iterable
from pathlib import Path

ASCII = ("".join(map(chr, range(ord("!"), ord("~") + 1))), "a b\tc\nd")
"""Texts with every character that a tokenizer for English needs."""


def write_model(directory: Path, texts: Iterable[str] = ASCII, *, length: int = 1024, seed: int = 1) -> str:
    """Write a random Llama of about 1 M parameters, and a tokenizer of characters; return a sentence about both.

    Args:
        directory: is made.
        texts: their characters are the tokens.
        length: the most tokens of a sequence.
        seed: of the weights.
    """
    import sentencepiece
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    directory.mkdir(parents=True, exist_ok=True)
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts),
        model_prefix=str(directory / "tokenizer"),
        model_type="char",
        vocab_size=128,
        hard_vocab_limit=False,
        character_coverage=1.0,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
    )
    tokenizer = sentencepiece.SentencePieceProcessor(model_file=str(directory / "tokenizer.model"))
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=tokenizer.get_piece_size(),
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=length,
        bos_token_id=tokenizer.bos_id(),
        eos_token_id=tokenizer.eos_id(),
        pad_token_id=None,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config)
    model.save_pretrained(directory)
    return f"a model of {model.num_parameters():,} parameters and a tokenizer of {config.vocab_size} tokens"
