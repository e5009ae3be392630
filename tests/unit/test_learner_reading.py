"""The index of a sharded checkpoint is read whichever Python wrote it, and no code runs."""

import io
import pickle
from typing import Any

import pytest
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, Metadata, TensorProperties

from megarl.learner.patches.reading import load_index


class Early(pickle.Pickler):
    """Writes members of enumerations as Python 3.11.0 to 3.11.3 does."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, _MEM_FORMAT_ENCODING):
            return getattr, (type(value), value.name)
        return NotImplemented


def written(value: Any) -> io.BytesIO:
    file = io.BytesIO()
    Early(file).dump(value)
    file.seek(0)
    return file


def test_index_of_early_python_3_11_is_read() -> None:
    index = Metadata(state_dict_metadata={}, planner_data=_MEM_FORMAT_ENCODING.TORCH_PRESERVE_FORMAT, storage_data={})
    assert load_index(written(index)) == index


class Attribute:
    """Asks for an attribute that is no member of an enumeration."""

    def __reduce__(self) -> Any:
        return getattr, (TensorProperties, "__init__")


def test_another_attribute_is_refused() -> None:
    index = Metadata(state_dict_metadata={}, planner_data=Attribute(), storage_data={})
    with pytest.raises(pickle.UnpicklingError, match="__init__ of .*TensorProperties.*, no enumeration"):
        load_index(written(index))
