"""Arrays as bytes with their type and their shape, for cells of a table (numpy's format NPY)."""

import io

import numpy as np
import torch
from torch import Tensor


def array_bytes(array: Tensor) -> bytes:
    """Return an array in host memory as bytes."""
    file = io.BytesIO()
    np.save(file, array.numpy(), allow_pickle=False)
    return file.getvalue()


def array_from(content: bytes) -> Tensor:
    """Return the array that bytes hold. Raises ValueError or EOFError if they hold none."""
    return torch.from_numpy(np.load(io.BytesIO(content), allow_pickle=False))
