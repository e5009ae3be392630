"""The scaling of rotary positions, and of queries by their position, in a `config.json`."""

import math
from collections.abc import Iterable
from dataclasses import MISSING, dataclass, fields
from typing import Any, TypeVar

from megarl.models.families import Family
from megarl.models.fields import Fields, wrong
from megarl.models.windows import FULL, SLIDING
from megarl.platform.errors import UserError


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Llama 3's stretching of the low rotary frequencies (`rope_type: llama3`)."""

    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192


@dataclass(frozen=True, kw_only=True)
class LinearScaling:
    """Positions divided by a factor (`rope_type: linear`)."""

    factor: float


@dataclass(frozen=True, kw_only=True)
class Yarn:
    """YaRN (`rope_type: yarn`; Peng et al., 2023, arXiv:2309.00071).

    With latent attention `mscale` scales the rotary part, and `mscale_all_dim` the logits (DeepSeek). Else rotated
    numbers are multiplied by (1 + 0.1 mscale log(factor)) / (1 + 0.1 mscale_all_dim log(factor)).
    """

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 0.0
    truncate: bool = True  # round the bounds between the scaled and the unscaled frequencies to whole numbers

    @property
    def attention_factor(self) -> float:
        """The factor of rotated numbers, without latent attention."""
        growth = 0.1 * math.log(max(self.factor, 1.0))
        return (1.0 + self.mscale * growth) / (1.0 + self.mscale_all_dim * growth)


@dataclass(frozen=True, kw_only=True)
class QueryScaling:
    """Queries multiplied by 1 + beta log(1 + floor(position / length)), after their rotation (Llama 4)."""

    beta: float
    length: int


S = TypeVar("S", RopeScaling, LinearScaling, Yarn)


ROTARY = ("rope_theta", "partial_rotary_factor")
COMMON = (*ROTARY, "rope_type")  # of every kind of scaling
DYNAMIC = ("alpha", "factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")  # only the first has an effect
BETA = "llama_4_scaling_beta"
OF_IMAGES = ("mrope_section", "mrope_interleaved")
LOCAL_THETA = "rope_local_base_freq"
OTHER_NAMES = {
    "rotary_emb_base": "rope_theta",
    "rotary_pct": "partial_rotary_factor",
    "rotary_emb_fraction": "partial_rotary_factor",
}
"""Keys that vLLM reads as others, in every model."""


def rope_parameters(config: Fields, family: Family) -> Fields:
    """Return the rotary settings, from `rope_parameters` (new) or `rope_theta` and `rope_scaling` (old).

    Raises:
        UserError: a setting has two values or another name, so transformers and the engine might differ.
    """
    if family.places_images:
        config = _of_text(config)
    own = {usual: family.key(usual) for usual in ROTARY}
    for name, meant in (OTHER_NAMES | {usual: usual for usual in ROTARY}).items():
        if name in config and name != own[meant]:
            raise UserError(
                f"config.json: {name}: vLLM reads it as {meant}, and transformers does not: write {own[meant]}"
            )
    outside = {usual: config.values[key] for usual, key in own.items() if key in config}
    if "rotary_dim" in config:
        fraction = config.size("rotary_dim") / config.size("head_dim")
        if outside.setdefault("partial_rotary_factor", fraction) != fraction:
            raise UserError(f"config.json: partial_rotary_factor is not {fraction}, as rotary_dim says: keep one")
    old = _settings(config, "rope_scaling")
    new = _of_full_layers(config) if family.local_rope_theta else _settings(config, "rope_parameters")
    comparable = {key: value for key, value in new.items() if key in old or key != "rope_theta"}
    if old and new and old != comparable:
        raise UserError("config.json: rope_scaling and rope_parameters differ: keep rope_parameters alone")
    settings = old | new
    for key, value in outside.items():
        if key in settings and settings[key] != value:
            raise UserError(f"config.json: {key} is {value!r}, and {settings[key]!r} in the rotary settings: keep one")
    return Fields(outside | settings)


def _of_text(config: Fields) -> Fields:
    """Return the fields without the settings that place images: the three positions of a token of text are equal."""
    values = dict(config.values)
    for table in ("rope_scaling", "rope_parameters"):
        if table in config:
            settings = config.table(table).values
            values[table] = {key: value for key, value in settings.items() if key not in OF_IMAGES}
    return Fields(values)


def rotary_fraction(rope: Fields, family: Family, head_dim: int) -> float:
    """Return the fraction of a head's numbers that are rotated. Raises UserError if it is not supported."""
    fraction = rope.number("partial_rotary_factor", family.rotary_fraction or 1.0)
    if fraction != 1.0 and family.rotary_fraction is None:
        raise UserError(f"config.json: partial_rotary_factor {fraction}: every dimension of a head is rotated here")
    size = int(head_dim * fraction)
    if fraction > 1.0 or size < 2 or size % 2:
        raise wrong("partial_rotary_factor", fraction, f"must give an even part of the {head_dim} numbers of a head")
    return fraction


def _settings(config: Fields, table: str) -> dict[str, Any]:
    """Return the settings of a table, with `rope_type` under this name, which was `type`."""
    settings = dict(config.table(table).values)
    for key, value in settings.items():
        if isinstance(value, dict | list):
            raise wrong(f"{table}.{key}", value, "must be one number or one text")
    old_kind = settings.pop("type", None)
    if old_kind is not None and settings.setdefault("rope_type", old_kind) != old_kind:
        raise UserError(f"config.json: type and rope_type of {table} differ: keep rope_type alone")
    return settings


def rope_scaling(rope: Fields, family: Family) -> RopeScaling | LinearScaling | Yarn | None:
    """Return the scaling of a family. Raises UserError if it is not supported."""
    kind = rope.values.get("rope_type", "default")
    if kind == "default":
        _refuse_unread(rope, kind, COMMON)
        return None
    if kind not in family.rope_types:
        known = ", ".join(map(repr, ("default", *family.rope_types)))
        raise UserError(f"config.json: rope_type {kind!r}; known are {known}")
    if kind == "dynamic":
        _refuse_unread(rope, kind, (*COMMON, *DYNAMIC))
        return None
    if kind == "yarn":
        return _yarn(rope, family)
    if kind == "linear":
        _refuse_unread(rope, kind, [*COMMON, "factor"])
        return _read(LinearScaling, rope, kind=kind, required=["factor"])
    return _llama3(rope)


def rope_theta(rope: Fields, family: Family, head_dim: int) -> float:
    """Return the base of the rotary frequencies. `alpha` raises it (`rope_type: dynamic` of Hunyuan)."""
    theta = rope.number("rope_theta", family.rope_theta)
    if rope.values.get("rope_type") != "dynamic":
        return theta
    return theta * rope.number("alpha") ** (head_dim / (head_dim - 2))


def query_scaling(rope: Fields, family: Family) -> QueryScaling | None:
    """Return the factors of queries. Raises UserError if the family needs them, and their settings are missing."""
    if not family.scaled_queries:
        return None
    if BETA not in rope:
        raise UserError(f"config.json: the rotary settings have no {BETA}, which transformers needs")
    if rope.values[BETA] == 0:
        return None
    return QueryScaling(beta=rope.number(BETA), length=rope.size("original_max_position_embeddings"))


def local_rope_theta(config: Fields, family: Family) -> float | None:
    """Return `rope_theta` of the layers with a window, if it is their own. Raises UserError if they are scaled."""
    if family.local_rope_theta is None:
        return None
    local = Fields(_settings(config.table("rope_parameters"), SLIDING))
    _refuse_unread(local, "default", ("rope_theta", "rope_type"))
    if local.values.get("rope_type", "default") != "default":
        raise UserError("config.json: rotary positions of layers with a window are not scaled here")
    return local.number("rope_theta", config.number(LOCAL_THETA, family.local_rope_theta))


def _of_full_layers(config: Fields) -> dict[str, Any]:
    """Return the rotary settings of layers without a window, if each kind of layer has a table of its own."""
    tables = config.table("rope_parameters")
    others = sorted(tables.values.keys() - {FULL, SLIDING})
    if others:
        raise UserError(f"config.json: rope_parameters.{others[0]}: the tables of this family are {FULL} and {SLIDING}")
    return _settings(tables, FULL)


def _refuse_unread(rope: Fields, kind: str, known: Iterable[str]) -> None:
    """Raise UserError for a setting that the trainer does not read: the engine or transformers may read it."""
    unread = sorted(rope.values.keys() - set(known))
    if unread:
        raise UserError(f"config.json: the rotary setting {unread[0]} is not read with rope_type {kind!r}: remove it")


def _llama3(rope: Fields) -> RopeScaling:
    names = [trait.name for trait in fields(RopeScaling)]
    _refuse_unread(rope, "llama3", [*COMMON, *names])
    scaling = _read(RopeScaling, rope, kind="llama3", required=names)
    fixed = RopeScaling(factor=scaling.factor)
    if scaling != fixed:
        raise UserError(f"config.json: the rotary scaling is {scaling}; Megatron-Core computes only {fixed}")
    return scaling


def _yarn(rope: Fields, family: Family) -> Yarn:
    latent = family.latent
    if latent and not rope.flag("truncate", default=True):
        raise UserError("config.json: truncate false: the bounds of the yarn scaling are whole numbers in this family")
    has_mscale = latent or family.scaled_queries
    known = [trait.name for trait in fields(Yarn) if has_mscale or not trait.name.startswith("mscale")]
    of_queries = [BETA, "max_position_embeddings"] if family.scaled_queries else []  # transformers reads only the first
    _refuse_unread(rope, "yarn", [*COMMON, *known, *of_queries, "attention_factor"])
    required = [trait.name for trait in fields(Yarn) if trait.default is MISSING]
    scaling = _read(Yarn, rope, kind="yarn", required=required)
    is_alone = ("mscale" in rope) != bool(scaling.mscale_all_dim)
    if scaling.mscale != 1.0 and not scaling.mscale_all_dim or (is_alone and not latent):
        raise UserError("config.json: the yarn rotary scaling must be given by mscale and mscale_all_dim together")
    factor = scaling.attention_factor
    if "attention_factor" in rope and (latent or not math.isclose(rope.number("attention_factor"), factor)):
        raise UserError(
            f"config.json: attention_factor: must follow from the yarn rotary scaling ({factor}); remove it"
        )
    return scaling


def _read(scaling: type[S], rope: Fields, *, kind: str, required: list[str]) -> S:
    missing = [name for name in required if name not in rope]
    if missing:
        raise UserError(f"config.json: the {kind} rotary scaling has no {missing[0]!r}")
    given = [trait.name for trait in fields(scaling) if trait.name in rope]
    values: dict[str, Any] = {name: _value(rope, name) for name in given}
    return scaling(**values)


def _value(rope: Fields, name: str) -> float:
    if name == "original_max_position_embeddings":
        return rope.size(name)
    if name == "truncate":
        return rope.flag(name)
    if name == "mscale_all_dim" and rope.values[name] == 0:
        return 0.0
    return rope.number(name)
