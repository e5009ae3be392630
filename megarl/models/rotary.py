"""The scaling of rotary positions in a `config.json`."""

from dataclasses import MISSING, dataclass, fields
from typing import Any, TypeVar

from megarl.errors import UserError
from megarl.models.fields import Fields


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Llama 3's stretching of the low rotary frequencies (`rope_type: llama3`)."""

    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192


@dataclass(frozen=True, kw_only=True)
class Yarn:
    """YaRN as DeepSeek applies it (`rope_type: yarn`): `mscale` scales the rotary part, `mscale_all_dim` the logits."""

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 0.0


S = TypeVar("S", RopeScaling, Yarn)


def rope_parameters(config: Fields) -> Fields:
    """Return the rotary settings, from `rope_parameters` (new) or `rope_theta` and `rope_scaling` (old)."""
    old = {"rope_theta": config.values["rope_theta"]} if "rope_theta" in config else {}
    rope = Fields({**old, **config.table("rope_scaling").values, **config.table("rope_parameters").values})
    fraction = rope.values.get("partial_rotary_factor", config.values.get("partial_rotary_factor", 1.0))
    if fraction != 1.0:
        raise UserError(f"config.json: partial_rotary_factor {fraction}: every dimension of a head is rotated here")
    return rope


def rope_scaling(rope: Fields, *, latent: bool) -> RopeScaling | Yarn | None:
    """Return the scaling of a family with or without latent attention. Raises UserError if it is not supported."""
    kind = rope.values.get("rope_type", rope.values.get("type", "default"))
    if kind == "default":
        return None
    if kind != (known := "yarn" if latent else "llama3"):
        raise UserError(f"config.json: rope_type {kind!r}; known are 'default' and {known!r}")
    return _yarn(rope) if latent else _llama3(rope)


def _llama3(rope: Fields) -> RopeScaling:
    scaling = _read(RopeScaling, rope, kind="llama3", required=[trait.name for trait in fields(RopeScaling)])
    if scaling != (fixed := RopeScaling(factor=scaling.factor)):
        raise UserError(f"config.json: the rotary scaling is {scaling}; Megatron-Core computes only {fixed}")
    return scaling


def _yarn(rope: Fields) -> Yarn:
    required = [trait.name for trait in fields(Yarn) if trait.default is MISSING]
    scaling = _read(Yarn, rope, kind="yarn", required=required)
    if "attention_factor" in rope or (scaling.mscale != 1.0 and not scaling.mscale_all_dim):
        raise UserError("config.json: the yarn rotary scaling must be given by mscale and mscale_all_dim together")
    return scaling


def _read(scaling: type[S], rope: Fields, *, kind: str, required: list[str]) -> S:
    if missing := [name for name in required if name not in rope]:
        raise UserError(f"config.json: the {kind} rotary scaling has no {missing[0]!r}")
    given = [trait.name for trait in fields(scaling) if trait.name in rope]
    values: dict[str, Any] = {name: _value(rope, name) for name in given}
    return scaling(**values)


def _value(rope: Fields, name: str) -> float:
    if name == "original_max_position_embeddings":
        return rope.size(name)
    if name == "mscale_all_dim" and rope.values[name] == 0:
        return 0.0
    return rope.number(name)
