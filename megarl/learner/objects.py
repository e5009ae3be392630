"""Reading of small objects that torch wrote: tensors and plain values, never code."""

import io
import re
from pathlib import Path
from typing import Any

import torch
from torch.serialization import UNSAFE_MESSAGE

from megarl.platform.small_files import Damage, read_bytes


def read_objects(path: Path) -> Any:
    """Return what `torch.save` wrote to a small file, in host memory.

    Raises:
        Damage: the file cannot be read, or it names types that are not data.
    """
    content = io.BytesIO(read_bytes(path))
    try:
        return torch.load(content, weights_only=True, map_location="cpu")
    except Exception as error:  # a damaged pickle may raise anything
        raise Damage.in_content(path, f"torch cannot read it: {first_words(error)}") from error


def first_words(error: Exception) -> str:
    """Return the type of an error of torch's and its message, without the advice that follows."""
    message = str(error).rpartition("WeightsUnpickler error: ")[2].removeprefix("Weights only load failed.")
    first, *_ = re.split(r"[.] |[.]?\n", message.replace(UNSAFE_MESSAGE, "").strip())
    return f"{type(error).__name__}: {first[:200]}"
