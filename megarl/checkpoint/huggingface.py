"""Exports a model as a Hugging Face directory, for transformers, vLLM and other runs."""

import shutil
from pathlib import Path
from typing import Literal

from megarl.data.tokenizer import Tokenizer
from megarl.distributed.exchange import together
from megarl.distributed.launch import Launch
from megarl.learner.learner import Learner
from megarl.models.architecture import hf_shapes
from megarl.models.source import Source
from megarl.platform.files import explained
from megarl.reshard.files import export

POLICY_ROLE: tuple[str, Literal["policy"]] = ("actor", "policy")
VALUE_ROLE: tuple[str, Literal["value"]] = ("reward_model", "value")
"""Name of a model in checkpoints, and its role."""


def export_model(learner: Learner, source: Source, tokenizer: Tokenizer, out: Path, launch: Launch) -> None:
    """Write a model with its tokenizer as a Hugging Face directory. Collective; all ranks see the same `out`.

    Adapters are merged. A policy is written as a language model, a value or reward model as a sequence classifier with
    one label.

    Raises:
        UserError: `out` cannot be written; if it did not exist before, it is removed.
    """
    if not learner.is_policy:
        source = source.as_classifier(tokenizer)
    dtype = learner.modules[0].config.params_dtype
    is_new = together(lambda: not out.exists())[0]

    def write_config_and_tokenizer() -> None:
        if launch.rank == 0:
            with explained(str(out)):
                source.write_config_and_tokenizer(out, tokenizer, dtype=str(dtype).removeprefix("torch."))
                (out / "config.json").unlink()  # `export` writes it last, so a directory that has it has weights too

    try:
        together(write_config_and_tokenizer)
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
    except Exception:
        if is_new and launch.rank == 0:
            shutil.rmtree(out, ignore_errors=True)
        raise
