"""Fields of `override_config` that nothing would read: silence about them would be taken for consent."""

from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from typing import Any

from megarl.models.architecture import Architecture, read_architecture


class _Probe:
    """A value that no field may have."""


def unread_overrides(own: Mapping[str, Any], overrides: Mapping[str, Any]) -> Iterator[str]:
    """Yield what is wrong with each override of a parsed config.json, `own`, that changes nothing.

    A field is read if `read_architecture` refuses it, or finds another architecture, with a value that no field may
    have. Overrides that repeat config.json, or that say that there is no dropout, are let pass; those of a model that
    cannot be read are left to whoever reads it.
    """
    config = {**own, **overrides}
    try:
        architecture = read_architecture(config)
    except ValueError:
        return
    for name, value in overrides.items():
        is_dropout = "dropout" in name
        if own.get(name) == value or (is_dropout and not value) or _is_read(name, config, architecture):
            continue
        if is_dropout:
            yield f"{name}={value} is not read: dropout is a field of megatron.override_transformer_config"
        else:
            meant = get_close_matches(name, [one for one in own if _is_read(one, config, architecture)], n=1)
            yield f"{name} is not read: " + (f"did you mean {meant[0]}?" if meant else "leave it out")


def _is_read(name: str, config: Mapping[str, Any], architecture: Architecture) -> bool:
    try:
        return read_architecture({**config, name: _Probe()}) != architecture
    except (ValueError, TypeError, AttributeError, KeyError):
        return True
