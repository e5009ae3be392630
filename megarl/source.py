"""The Hugging Face checkpoint that a run starts from, weights, architecture and tokenizer, and those it leaves."""

import importlib
import json
import math
import shutil
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megarl.data.tokenizer import Tokenizer, load_tokenizer
from megarl.distributed.exchange import in_shares, together
from megarl.distributed.launch import Launch
from megarl.learner.config import CheckpointSection
from megarl.models.architecture import EMBEDDING, HEAD, Architecture, hf_shapes
from megarl.models.claims import weight_faults
from megarl.models.hub import local_directory, place_of, read_config, read_model
from megarl.models.overrides import unread_overrides
from megarl.platform.files import explained, replacing
from megarl.platform.uri import is_uri
from megarl.reshard.files import CheckpointFiles, ShardWriter, export
from megarl.reshard.headers import SINGLE, has_weights
from megarl.reshard.layout import Piece, row_major, whole
from megarl.rollout.config import RolloutSection
from megarl.rollout.engine import RolloutEngine

if TYPE_CHECKING:
    from megarl.learner.learner import Learner


@dataclass(frozen=True, kw_only=True)
class Source:
    """A checkpoint to start from."""

    directory: Path
    hf_config: dict[str, Any]  # overrides applied
    overrides: dict[str, Any]  # what its config.json does not say
    architecture: Architecture

    @classmethod
    def read(cls, section: CheckpointSection) -> "Source":
        """Find a checkpoint and what it describes; imports `external_lib` first, which may register its classes.

        Collective where there are ranks.

        Raises:
            ValueError: it is not there, describes a model that megarl does not know, or has damaged weights or weights
                of another model.
        """
        libraries = section.external_lib or []
        for library in [libraries] if isinstance(libraries, str) else libraries:
            importlib.import_module(library)
        directory = local_directory(section.path, with_code=section.trust_remote_code)
        try:
            hf_config, architecture = read_model(directory, section.override_config)
            for fault in unread_overrides(read_config(directory, {}), section.override_config):
                raise ValueError(f"override_config: {fault}")
            if has_weights(directory):
                _check_weights(directory, architecture)
        except ValueError as error:
            if is_uri(section.path):
                raise ValueError(f"{place_of(section.path)}: {error}") from error
            raise
        return cls(
            directory=directory, hf_config=hf_config, overrides=section.override_config, architecture=architecture
        )

    def tokenizer(
        self,
        path: str | None = None,
        *,
        chat_template: str | None = None,
        apply_chat_template: bool | None = None,
        trust_remote_code: bool = False,
    ) -> Tokenizer:
        """The tokenizer at `path`, by default the checkpoint's own; arguments as for `load_tokenizer`.

        Raises:
            ValueError: it knows tokens that the model does not.
        """
        tokenizer = load_tokenizer(
            path or str(self.directory),
            chat_template=chat_template,
            apply_chat_template=apply_chat_template,
            trust_remote_code=trust_remote_code,
        )
        if tokenizer.vocab_size > self.architecture.vocab_size:
            raise ValueError(
                f"the tokenizer has {tokenizer.vocab_size} tokens, the model in {self.directory} only "
                f"{self.architecture.vocab_size}: set data.tokenizer to the one that the model was trained with"
            )
        return tokenizer

    def start_engine(
        self,
        section: RolloutSection,
        *,
        stop_token_ids: Sequence[int],
        max_model_len: int,
        max_sequences: int,
        trust_remote_code: bool,
    ) -> RolloutEngine:
        """This rank's part of an engine for the model, asleep and without weights; arguments as for `RolloutEngine`."""
        overrides = {"hf_overrides": self.overrides} if self.overrides else {}
        return RolloutEngine(
            replace(section, engine_kwargs=section.engine_kwargs | overrides),
            model_dir=self.directory,
            shapes=hf_shapes(self.architecture),
            num_key_value_heads=self.architecture.num_key_value_heads,
            stop_token_ids=stop_token_ids,
            max_model_len=max_model_len,
            max_sequences=max_sequences,
            trust_remote_code=trust_remote_code,
        )

    def as_classifier(self, tokenizer: Tokenizer) -> "Source":
        """The source as what scores sequences: transformers reads it as `...ForSequenceClassification`.

        There the score stands at the last token that is not the pad token, so one has to be named.
        """
        from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES as CLASSES

        config = self.hf_config | {
            "architectures": [CLASSES[self.architecture.family]],
            "num_labels": 1,
            "id2label": {"0": "LABEL_0"},
            "label2id": {"LABEL_0": 0},
            "pad_token_id": self.pad_token_id(tokenizer),
        }
        return replace(self, hf_config=config, architecture=self.architecture.with_scalar_head())

    def pad_token_id(self, tokenizer: Tokenizer) -> int:
        """What fills up batches: the token that config.json names, else the tokenizer's, else end-of-sequence."""
        configured: int | None = self.hf_config.get("pad_token_id")
        known = (configured, tokenizer.pad_token_id)
        return next((pad for pad in known if pad is not None), tokenizer.eos_token_id)

    def write_companions(self, directory: Path, tokenizer: Tokenizer, *, dtype: str) -> None:
        """Write what a Hugging Face checkpoint has beside its weights: config, generation config and tokenizer."""
        directory.mkdir(parents=True, exist_ok=True)
        tokenizer.save(directory)
        generation = self.directory / "generation_config.json"
        if generation.exists() and not self.architecture.scalar_head:
            shutil.copy(generation, directory)
        (directory / "config.json").write_text(json.dumps({**self.hf_config, "torch_dtype": dtype}, indent=2))


def _check_weights(directory: Path, architecture: Architecture) -> None:
    for fault in weight_faults(directory, architecture, needs_head=False):
        raise ValueError(fault)
    files = CheckpointFiles(directory)
    if not architecture.tied_embeddings or HEAD not in files.names:
        return
    if not all(in_shares(architecture.vocab_size, lambda rows: files.are_equal(HEAD, EMBEDDING, rows))):
        raise ValueError(
            f"{directory} holds {HEAD}, which differs from {EMBEDDING}, and its config.json says tie_word_embeddings: "
            "true, with which it would be dropped: write false, or take the tensor out of the files"
        )


def export_model(learner: "Learner", source: Source, tokenizer: Tokenizer, out: Path, launch: Launch) -> None:
    """Write a model with its tokenizer as a Hugging Face directory. Collective; all ranks see the same `out`.

    A policy is written as a language model, a value or reward model as a sequence classifier with one label.

    Raises:
        ValueError: `out` cannot be written; if it was not there it is not there now.
    """
    if not learner.is_policy:
        source = source.as_classifier(tokenizer)
    dtype = learner.modules[0].config.params_dtype
    is_new = together(lambda: not out.exists())[0]

    def write_companions() -> None:
        if launch.rank == 0:
            with explained(str(out)):
                source.write_companions(out, tokenizer, dtype=str(dtype).removeprefix("torch."))
                (out / "config.json").unlink()  # whoever finds one finds weights too

    try:
        together(write_companions)
        with learner.weights() as tensors:
            export(
                out,
                hf_shapes(learner.architecture),
                together(learner.layout),
                tensors,
                config=source.hf_config,
                dtype=dtype,
                ranks_per_node=launch.local_world_size,
                device=learner.device,
            )
    except ValueError:
        if is_new and launch.rank == 0:
            shutil.rmtree(out, ignore_errors=True)
        raise


# Of random weights: some tokens, and some experts, are then far likelier than others, as in a trained model.
LOGIT_STD = 3.0
CHOOSING = ("embed_tokens.weight", "lm_head.weight", ".gate.weight")


def write_random_weights(architecture: Architecture, directory: Path, *, dtype: torch.dtype) -> None:
    """Write `model.safetensors` with random weights, the same every time; one parameter is in memory at once."""
    pieces = [
        Piece(name, whole(shape), name, 0, row_major(shape), dtype) for name, shape in hf_shapes(architecture).items()
    ]
    writer = ShardWriter()
    with replacing(directory / SINGLE) as file:
        writer.add(file, pieces)
        for piece in pieces:
            writer.open(piece.param).copy_(_draw(piece.name, piece.box.shape))
            writer.close(piece.param)
        writer.finish()


def _draw(name: str, shape: tuple[int, ...]) -> Tensor:
    """Float32 values that keep the size of what goes through a matrix; norms are around one, biases around zero."""
    values = torch.randn(shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode())))
    if len(shape) == 1:
        return values.mul_(0.1).add_(1.0 if "norm" in name else 0.0)
    return values.mul_((LOGIT_STD if name.endswith(CHOOSING) else 1.0) / math.sqrt(shape[-1]))
