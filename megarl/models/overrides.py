"""A check for fields of `override_config` that are refused, or that nothing reads: the user believes that they work."""

from collections.abc import Iterator, Mapping
from difflib import get_close_matches

from megarl.models.architecture import Architecture, read_architecture
from megarl.platform.errors import UserError
from megarl.reshard.quantised import KEY


class _Probe:
    """A value that is invalid for every field."""


def unread_overrides(own: Mapping[str, object], overrides: Mapping[str, object]) -> Iterator[str]:
    """Yield a message for each override of the parsed config.json `own` that changes nothing, or that is refused.

    A field counts as read if an invalid value makes `read_architecture` fail or return another architecture. Overrides
    that repeat config.json, or that turn dropout off, are accepted. If `own` itself cannot be read, there is no
    message: reading the model will report the error.
    """
    config = {**own, **overrides}
    try:
        read_architecture(own)
    except UserError:
        return
    try:
        architecture = read_architecture(config)
    except UserError as error:
        yield str(error).removeprefix("config.json: ")
        return
    if own.get(KEY) != config.get(KEY):
        yield f"{KEY} describes the files, and cannot be overridden: leave it out"
    for name, value in overrides.items():
        is_dropout = "dropout" in name
        if own.get(name) == value or (is_dropout and not value) or _is_read(name, config, architecture):
            continue
        if is_dropout:
            yield f"{name}={value} is not read: dropout is a field of megatron.override_transformer_config"
        elif name == "moe_config":
            yield f"{name} is not read: freeze_moe_router is a key of the section of the model"
        else:
            meant = get_close_matches(name, [one for one in own if _is_read(one, config, architecture)], n=1)
            yield f"{name} is not read: " + (f"did you mean {meant[0]}?" if meant else "leave it out")


def _is_read(name: str, config: Mapping[str, object], architecture: Architecture) -> bool:
    try:
        return read_architecture({**config, name: _Probe()}) != architecture
    except (ValueError, TypeError, AttributeError, KeyError):
        return True
