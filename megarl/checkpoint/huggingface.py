"""Exports a model as a Hugging Face directory, for transformers, vLLM and other runs, or its adapters for PEFT."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megarl.checkpoint.directory import HUGGINGFACE
from megarl.data.tokenizer import Tokenizer
from megarl.distributed.exchange import on_first_rank, together
from megarl.distributed.launch import Launch
from megarl.learner.learner import Learner
from megarl.models.architecture import hf_shapes
from megarl.models.lora import Lora, adapter_shapes
from megarl.models.peft import adapter_config
from megarl.models.source import Source
from megarl.platform.files import explained
from megarl.reshard.files import OF_ADAPTERS, export
from megarl.reshard.headers import CONFIG

POLICY_ROLE: tuple[str, Literal["policy"]] = ("actor", "policy")
VALUE_ROLE: tuple[str, Literal["value"]] = ("reward_model", "value")
"""Name of a model in checkpoints, and its role."""


@dataclass(frozen=True, kw_only=True)
class SavedModel:
    """A model as the checkpoints of a run have it in Hugging Face's format."""

    learner: Learner
    source: Source  # that the model was trained from
    tokenizer: Tokenizer
    launch: Launch
    folder: str = HUGGINGFACE  # of a checkpoint

    def write_config(self, directory: Path) -> None:
        """Write config and tokenizer to a directory that exists."""
        source = _source_of(self.learner, self.source, self.tokenizer)
        source.write_config_and_tokenizer(directory, self.tokenizer, dtype=_dtype_of(self.learner))

    def write_weights(self, directory: Path) -> None:
        """Write all files, as `export_model` does. Collective."""
        export_model(self.learner, self.source, self.tokenizer, directory, self.launch)


def export_model(learner: Learner, source: Source, tokenizer: Tokenizer, out: Path, launch: Launch) -> None:
    """Write a model with its tokenizer as a Hugging Face directory. Collective; all ranks see the same `out`.

    Adapters are merged. A policy is written as a language model, a value or reward model as a sequence classifier with
    one label.

    Raises:
        UserError: `out` cannot be written; if it did not exist before, it is removed.
    """
    source = _source_of(learner, source, tokenizer)
    with _with_tokenizer(source, tokenizer, out, launch), learner.weights() as tensors:
        export(
            out,
            hf_shapes(learner.architecture),
            together(learner.layout),
            tensors,
            config=source.config_in(_dtype_of(learner)),
            dtype=learner.modules[0].config.params_dtype,
            ranks_per_node=launch.local_world_size,
            device=learner.device,
        )


def _source_of(learner: Learner, source: Source, tokenizer: Tokenizer) -> Source:
    return source if learner.is_policy else source.as_classifier(tokenizer)


def _dtype_of(learner: Learner) -> str:
    return str(learner.modules[0].config.params_dtype).removeprefix("torch.")


def export_adapters(
    learner: Learner, lora: Lora, source: Source, tokenizer: Tokenizer, out: Path, launch: Launch
) -> None:
    """Write the adapters `lora` of a model as a directory of PEFT, with the tokenizer. Collective as `export_model`.

    Raises:
        UserError: `out` cannot be written; if it did not exist before, it is removed.
    """
    architecture = learner.architecture
    with _with_tokenizer(source, tokenizer, out, launch), learner.adapters() as tensors:
        export(
            out,
            adapter_shapes(architecture, lora),
            together(learner.adapter_layout),
            tensors,
            config=adapter_config(lora, architecture),
            dtype=learner.modules[0].config.params_dtype,
            ranks_per_node=launch.local_world_size,
            device=learner.device,
            names=OF_ADAPTERS,
        )


@contextmanager
def _with_tokenizer(source: Source, tokenizer: Tokenizer, out: Path, launch: Launch) -> Iterator[None]:
    """Write the tokenizer; if the block then fails, remove `out` if it is new."""
    is_new = on_first_rank(lambda: not out.exists())

    def write() -> None:
        with explained(str(out)):
            source.write_tokenizer(out, tokenizer)
            (out / CONFIG).unlink(missing_ok=True)  # a directory that has it has weights of the same model too

    try:
        on_first_rank(write)
        yield
    except Exception:
        if is_new and launch.rank == 0:
            shutil.rmtree(out, ignore_errors=True)
        raise
