"""Names and plain types of the fields of `override_transformer_config`, from Megatron-Core's own class."""

from collections.abc import Iterator, Mapping
from dataclasses import fields
from difflib import get_close_matches
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from pydantic import TypeAdapter, ValidationError

PLAIN = (bool, int, float, str, NoneType)


def transformer_faults(overrides: Mapping[str, object]) -> Iterator[str]:
    """Yield a message for each field that `TransformerConfig` does not have, or that cannot have the value.

    Imports Megatron-Core, which takes seconds.
    """
    known = _known()
    for name, value in overrides.items():
        if name not in known:
            meant = get_close_matches(name, known, n=1)
            hint = f"did you mean {meant[0]}?" if meant else "see megatron.core.transformer.TransformerConfig"
            yield f"Megatron-Core has no field {name}: {hint}"
        elif _is_plain(known[name]):
            try:
                TypeAdapter(known[name]).validate_python(value)
            except ValidationError as error:
                wanted = " or ".join(dict.fromkeys(one["msg"].removeprefix("Input ") for one in error.errors()))
                yield f"{name} {wanted}, not {value!r}"


@cache
def _known() -> dict[str, Any]:
    """Return the type of each field by name; `Any` if the annotation cannot be resolved."""
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    try:
        hints = get_type_hints(MLATransformerConfig)
    except NameError:
        hints = {}
    return {field.name: hints.get(field.name, Any) for field in fields(MLATransformerConfig)}


def _is_plain(hint: object) -> bool:
    """Return whether a value from YAML can be checked against the type."""
    if get_origin(hint) in (Union, UnionType, list):
        return all(map(_is_plain, get_args(hint)))
    return get_origin(hint) is Literal or hint in PLAIN
