"""Checkpoints of models of images and text: the tensors of the text model in them, by their names in a text checkpoint.

`config.json` of such a checkpoint has the sizes of the text model in `text_config`. The files have its tensors below a
prefix, and those of the other parts. They may have the matrices of all experts in one tensor: `X.experts.gate_up_proj`
[experts, gate rows and up rows, columns] and `X.experts.down_proj` [experts, rows, columns]. Torch is not needed here.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from megarl.platform.errors import UserError
from megarl.reshard.headers import Stored, config_field

TEXT = "text_config"  # of config.json
PREFIXES = (
    ("model.language_model.", "model."),  # transformers 5, Qwen
    ("language_model.model.", "model."),  # Gemma, Mistral
    ("language_model.lm_head.", "lm_head."),
)
"""The beginning of names in the files, and in a text checkpoint."""
OTHER_PART = re.compile(r"(model\.)?(visual|vision_tower|multi_modal_projector)\.")
STACKED = re.compile(r"(?P<experts>.+\.experts)\.(?P<matrix>gate_up|down)_proj")


@dataclass(frozen=True, kw_only=True)
class TextPlace:
    """The place of a tensor of the text model in the files."""

    name: str  # in the files
    tensor: Stored  # its shape is that of the text model's tensor
    expert: int | None = None  # if the stored tensor has the matrices of all experts
    row: int = 0  # the first in the expert's stored matrix


def is_wrapped(directory: Path) -> bool:
    """Return whether a directory has a model of images and text. Raises UserError if `config.json` is damaged."""
    return isinstance(config_field(directory, TEXT), dict)


def text_places(stored: Mapping[str, Stored]) -> dict[str, TextPlace]:
    """Return the places of the text model's tensors among all tensors of a checkpoint.

    Raises:
        UserError: two tensors are the same tensor of the text model.
    """
    found: dict[str, TextPlace] = {}
    for name, tensor in stored.items():
        if OTHER_PART.match(name):
            continue
        for own, place in _parts(name, tensor):
            if own in found:
                both = f"{found[own].name} and {name} in {tensor.file}"
                raise UserError(f"{both} are both {own} of the text model: remove one from the files")
            found[own] = place
    return found


def _parts(name: str, tensor: Stored) -> Iterator[tuple[str, TextPlace]]:
    """Yield the tensors of the text model in a stored tensor."""
    own = next((new + name.removeprefix(old) for old, new in PREFIXES if name.startswith(old)), name)
    stacked = STACKED.fullmatch(own)
    if not stacked or len(tensor.shape) != 3:  # experts, rows, columns
        yield own, TextPlace(name=name, tensor=tensor)
        return
    num_experts, rows, columns = tensor.shape
    matrices = stacked["matrix"].split("_")
    size = rows // len(matrices)
    part = Stored(tensor.file, tensor.dtype, (size, columns))
    for expert in range(num_experts):
        for number, matrix in enumerate(matrices):
            place = TextPlace(name=name, tensor=part, expert=expert, row=number * size)
            yield f"{stacked['experts']}.{expert}.{matrix}_proj.weight", place
