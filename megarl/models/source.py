"""The Hugging Face checkpoint that a run starts from: its architecture, tokenizer and files."""

import importlib
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megarl.data.tokenizer import Tokenizer, load_tokenizer
from megarl.distributed.exchange import in_shares
from megarl.models.architecture import Architecture
from megarl.models.claims import weight_faults
from megarl.models.config import CheckpointSection, ModelSection
from megarl.models.hub import GENERATION, local_directory, place_of, read_config, read_json, read_model, stop_token_ids
from megarl.models.lora import Lora
from megarl.models.overrides import unread_overrides
from megarl.models.peft import lora_of
from megarl.platform.errors import UserError
from megarl.platform.uri import is_uri
from megarl.reshard.files import CheckpointFiles
from megarl.reshard.headers import CONFIG, has_weights
from megarl.reshard.quantised import KEY


@dataclass(frozen=True, kw_only=True)
class Source:
    """A checkpoint to start from."""

    directory: Path
    hf_config: dict[str, Any]  # overrides applied; without the quantisation of the files, which are read dequantised
    overrides: dict[str, object]  # fields that replace those of config.json
    architecture: Architecture
    lora: Lora | None = None  # None: the weights learn

    @classmethod
    def read(cls, section: CheckpointSection) -> "Source":
        """Find a checkpoint and read its architecture. Imports `external_lib` first, which may register classes.

        Collective if there are ranks.

        Raises:
            UserError: the checkpoint is missing, its model is unknown, or its weights are damaged or belong to another
                model.
        """
        libraries = section.external_lib or []
        for library in [libraries] if isinstance(libraries, str) else libraries:
            importlib.import_module(library)
        directory = local_directory(section.path, with_code=section.trust_remote_code)
        try:
            hf_config, architecture = read_model(directory, section.override_config)
            hf_config.pop(KEY, None)
            for fault in unread_overrides(read_config(directory, {}), section.override_config):
                raise UserError(f"override_config: {fault}")
            if has_weights(directory):
                _check_weights(directory, architecture)
        except UserError as error:
            if is_uri(section.path):
                raise UserError(f"{place_of(section.path)}: {error}") from error
            raise
        return cls(
            directory=directory,
            hf_config=hf_config,
            overrides=section.override_config,
            architecture=architecture,
            lora=lora_of(section, architecture) if isinstance(section, ModelSection) else None,
        )

    def tokenizer(self, path: str | None = None, **settings: Any) -> Tokenizer:
        """Return the tokenizer at `path`, by default the checkpoint's own; settings as for `load_tokenizer`.

        Raises:
            UserError: the tokenizer has more tokens than the model.
        """
        tokenizer = load_tokenizer(path or str(self.directory), **settings)
        if tokenizer.vocab_size > self.architecture.vocab_size:
            raise UserError(
                f"the tokenizer has {tokenizer.vocab_size} tokens, the model in {self.directory} only "
                f"{self.architecture.vocab_size}: set data.tokenizer to the tokenizer that the model was trained with"
            )
        return tokenizer

    def as_classifier(self, tokenizer: Tokenizer) -> "Source":
        """Return the source as a model that scores sequences, `...ForSequenceClassification` in transformers.

        Transformers reads the score at the last token that is not the pad token, so the config must name a pad token.
        It lacks such a class for some families: megarl alone reads the model then.
        """
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CLASSES

        causal_lm = CLASSES[self.architecture.family]
        config = self.hf_config | {
            "architectures": [causal_lm.replace("ForCausalLM", "ForSequenceClassification")],
            "num_labels": 1,
            "id2label": {"0": "LABEL_0"},
            "label2id": {"LABEL_0": 0},
            "pad_token_id": self.pad_token_id(tokenizer),
        }
        return replace(self, hf_config=config, architecture=self.architecture.with_scalar_head())

    def pad_token_id(self, tokenizer: Tokenizer) -> int:
        """Return the token that pads batches: of config.json, else of the tokenizer, else end-of-sequence."""
        configured: int | None = self.hf_config.get("pad_token_id")
        known = (configured, tokenizer.pad_token_id)
        return next((pad for pad in known if pad is not None), tokenizer.eos_token_id)

    def write_config_and_tokenizer(self, directory: Path, tokenizer: Tokenizer, *, dtype: str) -> None:
        """Write all files of a Hugging Face checkpoint except weights: config, generation config and tokenizer."""
        self.write_tokenizer(directory, tokenizer)
        (directory / CONFIG).write_text(json.dumps(self.config_in(dtype), indent=2), encoding="utf-8")

    def config_in(self, dtype: str) -> dict[str, object]:
        """Return the content of `config.json` of weights in a dtype."""
        config = {key: value for key, value in self.hf_config.items() if key != "dtype"}  # a newer name of torch_dtype
        return config | {"torch_dtype": dtype}

    def write_tokenizer(self, directory: Path, tokenizer: Tokenizer) -> None:
        """Write the tokenizer and, of a language model, the generation config."""
        directory.mkdir(parents=True, exist_ok=True)
        tokenizer.save(directory)
        if not self.architecture.scalar_head:
            generation = json.dumps(self._generation_config(tokenizer), indent=2)
            (directory / GENERATION).write_text(generation, encoding="utf-8")

    def _generation_config(self, tokenizer: Tokenizer) -> dict[str, object]:
        """Return the checkpoint's own generation config; every token that ends a response in training ends it."""
        file = self.directory / GENERATION
        if file.exists():
            own = read_json(file)
        else:
            special = {name: self.hf_config.get(name) for name in ("bos_token_id", "pad_token_id")}
            own = {name: token for name, token in special.items() if token is not None}
        stops = stop_token_ids(self.directory, tokenizer.eos_token_id)
        return own | {"eos_token_id": stops if len(stops) > 1 else stops[0]}


def _check_weights(directory: Path, architecture: Architecture) -> None:
    for fault in weight_faults(directory, architecture, needs_head=False):
        raise UserError(fault)
    files = CheckpointFiles(directory)
    head = architecture.head_name
    embedding = architecture.embedding_name
    if not architecture.tied_embeddings or head not in files.names:
        return
    if not all(in_shares(architecture.vocab_size, lambda rows: files.are_equal(head, embedding, rows))):
        raise UserError(
            f"{directory} holds {head}, which differs from {embedding}, but its config.json has tie_word_embeddings: "
            "true, which would drop the tensor: write false, or remove the tensor from the files"
        )
