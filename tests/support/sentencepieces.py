"""Small SentencePiece models, trained on made-up text in a fraction of a second."""

import random
from pathlib import Path
from typing import Any

import sentencepiece

_RANDOM = random.Random(0)
WORDS = ["".join(_RANDOM.choice("abcdefghijk") for _ in range(_RANDOM.randint(1, 7))) for _ in range(200)]
WORDS += [str(number) for number in range(100)] + list("+-*/=():")


def train_sentencepiece(path: Path, **options: Any) -> Path:
    """Train a model on sentences of `WORDS`; write it to `path`."""
    rng = random.Random(1)
    sentences = (" ".join(rng.choices(WORDS, k=rng.randint(1, 12))) for _ in range(1000))
    with path.open("wb") as file:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=sentences,
            model_writer=file,
            minloglevel=2,
            **{"model_type": "bpe", "vocab_size": 400, "character_coverage": 1.0, **options},
        )
    return path
