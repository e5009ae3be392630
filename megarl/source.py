"""The Hugging Face checkpoint that a run starts from: weights, architecture and tokenizer."""

import importlib
import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megarl.data.tokenizer import Tokenizer, load_tokenizer
from megarl.learner.config import ModelSection
from megarl.models.architecture import Architecture, read_architecture
from megarl.models.hub import local_directory, read_config


@dataclass(frozen=True, kw_only=True)
class Source:
    """A checkpoint to start from."""

    directory: Path
    hf_config: dict[str, Any]  # overrides applied
    architecture: Architecture

    @classmethod
    def read(cls, section: ModelSection) -> "Source":
        """Find a checkpoint and what it describes; imports `external_lib` first, which may register its classes.

        Raises:
            ValueError: it is not there, or describes a model that megarl does not know.
        """
        libraries = section.external_lib or []
        for library in [libraries] if isinstance(libraries, str) else libraries:
            importlib.import_module(library)
        directory = local_directory(section.path)
        hf_config = read_config(directory, section.override_config)
        try:
            architecture = read_architecture(hf_config)
        except ValueError as error:  # it begins with the name of the file
            raise ValueError(f"{directory}/{error}") from error
        return cls(directory=directory, hf_config=hf_config, architecture=architecture)

    def tokenizer(
        self, path: str | None = None, *, chat_template: str | None = None, trust_remote_code: bool = False
    ) -> Tokenizer:
        """The tokenizer at `path`, by default the checkpoint's own.

        Raises:
            ValueError: it knows tokens that the model does not.
        """
        tokenizer = load_tokenizer(
            path or str(self.directory), chat_template=chat_template, trust_remote_code=trust_remote_code
        )
        if tokenizer.vocab_size > self.architecture.vocab_size:
            raise ValueError(
                f"the tokenizer has {tokenizer.vocab_size} tokens, the model in {self.directory} only "
                f"{self.architecture.vocab_size}: set data.tokenizer to the one that the model was trained with"
            )
        return tokenizer

    def write_companions(self, directory: Path, tokenizer: Tokenizer, *, dtype: str) -> None:
        """Write what a Hugging Face checkpoint has beside its weights: config, generation config and tokenizer."""
        directory.mkdir(parents=True, exist_ok=True)
        tokenizer.save(directory)
        if (generation := self.directory / "generation_config.json").exists():
            shutil.copy(generation, directory)
        (directory / "config.json").write_text(json.dumps({**self.hf_config, "torch_dtype": dtype}, indent=2))
