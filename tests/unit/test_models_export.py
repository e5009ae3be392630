"""A written model names its dtype, and every token that ended a response in training."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, GenerationConfig

from megarl.models.config import ModelSection
from megarl.models.hub import stop_token_ids
from megarl.models.source import Source
from tests.support.sentencepieces import train_sentencepiece
from tests.support.tiny import write_checkpoint

OF_TOKENIZER = 2


def written(root: Path, config: dict[str, Any], generation: dict[str, Any] | None) -> tuple[Path, list[int]]:
    """Write a model whose files say this, and return the directory and the tokens that end its responses in a run."""
    start = write_checkpoint(root / "start", "llama")
    train_sentencepiece(start / "tokenizer.model", vocab_size=200)
    own = json.loads((start / "config.json").read_text())
    own = {key: value for key, value in own.items() if key not in ("dtype", "torch_dtype", "eos_token_id")}
    (start / "config.json").write_text(json.dumps(own | config))
    (start / "generation_config.json").unlink(missing_ok=True)
    if generation is not None:
        (start / "generation_config.json").write_text(json.dumps(generation))
    source = Source.read(ModelSection(path=str(start)))
    tokenizer = source.tokenizer()
    assert tokenizer.eos_token_id == OF_TOKENIZER
    source.write_config_and_tokenizer(root / "written", tokenizer, dtype="float32")
    return root / "written", stop_token_ids(start, tokenizer.eos_token_id)


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [
        ({}, None, [2]),
        ({"eos_token_id": 7}, None, [2, 7]),
        ({"eos_token_id": 2}, {}, [2]),
        ({"eos_token_id": 7}, {"eos_token_id": [9, 2]}, [2, 9]),
        ({"eos_token_id": 7}, {"eos_token_id": 9}, [2, 9]),
        ({"eos_token_id": [7, 8]}, {"temperature": 0.6, "do_sample": True}, [2, 7, 8]),
    ],
    ids=str,
)
def test_exported_model_keeps_every_training_stop_token(
    tmp_path: Path, config: dict[str, Any], generation: dict[str, Any] | None, expected: list[int]
) -> None:
    directory, in_training = written(tmp_path, config | {"bos_token_id": 1, "pad_token_id": 3}, generation)
    assert in_training == expected
    read = GenerationConfig.from_pretrained(directory)
    ends = [read.eos_token_id] if isinstance(read.eos_token_id, int) else read.eos_token_id
    assert sorted(ends) == expected
    assert stop_token_ids(directory, OF_TOKENIZER) == expected  # a run that starts from it
    if generation is None:
        assert (read.bos_token_id, read.pad_token_id) == (1, 3)
    else:
        assert json.loads((directory / "generation_config.json").read_text()).items() >= (
            {key: value for key, value in generation.items() if key != "eos_token_id"}.items()
        )


@pytest.mark.parametrize("config", [{"dtype": "bfloat16"}, {"torch_dtype": "bfloat16"}, {}], ids=str)
def test_a_written_config_names_one_dtype(tmp_path: Path, config: dict[str, Any]) -> None:
    directory, _ = written(tmp_path, config, None)
    named = [key for key in json.loads((directory / "config.json").read_text()) if key in ("dtype", "torch_dtype")]
    assert named == ["torch_dtype"]
    assert AutoConfig.from_pretrained(directory).dtype == torch.float32


def test_a_model_that_scores_generates_nothing(tmp_path: Path) -> None:
    written(tmp_path, {"eos_token_id": 7}, {"eos_token_id": 9})
    source = Source.read(ModelSection(path=str(tmp_path / "start")))
    tokenizer = source.tokenizer()
    source.as_classifier(tokenizer).write_config_and_tokenizer(tmp_path / "critic", tokenizer, dtype="float32")
    assert not (tmp_path / "critic" / "generation_config.json").exists()
