"""Reads a Hugging Face `config.json` into the sizes everything else computes with, and refuses what it cannot do.

A setting that changes the model's function and is not carried by `Architecture` is an error, never ignored: weights
that load into the wrong function train and sample without a sign.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import lru_cache
from types import MappingProxyType
from typing import Any


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Llama 3's stretching of the low rotary frequencies (`rope_type: llama3`)."""

    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """The sizes and switches of one dense decoder."""

    family: str  # a key of FAMILIES
    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int  # rows of the embedding in the checkpoint, before any padding
    tied_embeddings: bool  # the output layer is the embedding: the checkpoint has no `lm_head.weight`
    qkv_bias: bool
    qk_norm: bool
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    max_position_embeddings: int


@dataclass(frozen=True, kw_only=True)
class Family:
    """What a `model_type` implies; `defaults` are the values transformers assumes where config.json is silent."""

    qkv_bias: bool = False
    qk_norm: bool = False
    defaults: Mapping[str, Any] = field(default_factory=dict)


QWEN_DEFAULTS = {"num_key_value_heads": 32, "max_position_embeddings": 32768}

FAMILIES: Mapping[str, Family] = {
    "llama": Family(defaults={"max_position_embeddings": 2048}),
    "mistral": Family(
        defaults={"num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096},
    ),
    "qwen2": Family(qkv_bias=True, defaults=QWEN_DEFAULTS),
    "qwen3": Family(qk_norm=True, defaults=QWEN_DEFAULTS | {"head_dim": 128}),
}


def read_architecture(hf_config: Mapping[str, Any]) -> Architecture:
    """The architecture that a parsed `config.json` describes.

    Raises:
        ValueError: the family is unknown, a size is missing, or the model computes something we do not.
    """
    family = str(hf_config.get("model_type"))
    if family not in FAMILIES:
        raise ValueError(f"config.json: model_type is {family}; known are {', '.join(FAMILIES)}")
    traits = FAMILIES[family]
    # A null overrides the family's default and then counts as absent, as it does in transformers.
    config = {key: value for key, value in {**traits.defaults, **hf_config}.items() if value is not None}
    _refuse_unsupported(config)

    def size(key: str, default: int | None = None) -> int:
        if (value := config.get(key, default)) is None:
            raise ValueError(f"config.json of a {family} model has no {key}")
        return int(value)

    num_heads = size("num_attention_heads")
    num_key_value_heads = size("num_key_value_heads", num_heads)
    if num_heads % num_key_value_heads:
        raise ValueError(
            f"config.json: num_attention_heads {num_heads} does not divide by num_key_value_heads {num_key_value_heads}"
        )
    rope = _rope_parameters(config)
    return Architecture(
        family=family,
        num_layers=size("num_hidden_layers"),
        hidden_size=size("hidden_size"),
        ffn_hidden_size=size("intermediate_size"),
        num_attention_heads=num_heads,
        num_key_value_heads=num_key_value_heads,
        head_dim=size("head_dim", size("hidden_size") // num_heads),
        vocab_size=size("vocab_size"),
        tied_embeddings=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=traits.qkv_bias,
        qk_norm=traits.qk_norm,
        rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        rope_theta=float(rope.get("rope_theta", 10000.0)),
        rope_scaling=_rope_scaling(rope),
        max_position_embeddings=size("max_position_embeddings"),
    )


@lru_cache(maxsize=16)
def hf_shapes(architecture: Architecture) -> Mapping[str, tuple[int, ...]]:
    """The shape of every parameter of the Hugging Face checkpoint, in canonical order.

    The order is embedding, layers from the first to the last, final norm, and `lm_head` unless it is tied.
    """
    a = architecture
    query, key_value = a.num_attention_heads * a.head_dim, a.num_key_value_heads * a.head_dim
    projections = {"q": query, "k": key_value, "v": key_value}
    layer: dict[str, tuple[int, ...]] = {"input_layernorm.weight": (a.hidden_size,)}
    layer |= {f"self_attn.{x}_proj.weight": (rows, a.hidden_size) for x, rows in projections.items()}
    if a.qkv_bias:
        layer |= {f"self_attn.{x}_proj.bias": (rows,) for x, rows in projections.items()}
    if a.qk_norm:
        layer |= {f"self_attn.{x}_norm.weight": (a.head_dim,) for x in "qk"}
    layer |= {
        "self_attn.o_proj.weight": (a.hidden_size, query),
        "post_attention_layernorm.weight": (a.hidden_size,),
        "mlp.gate_proj.weight": (a.ffn_hidden_size, a.hidden_size),
        "mlp.up_proj.weight": (a.ffn_hidden_size, a.hidden_size),
        "mlp.down_proj.weight": (a.hidden_size, a.ffn_hidden_size),
    }
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (a.vocab_size, a.hidden_size)}
    for number in range(a.num_layers):
        shapes |= {f"model.layers.{number}.{name}": shape for name, shape in layer.items()}
    shapes["model.norm.weight"] = (a.hidden_size,)
    if not a.tied_embeddings:
        shapes["lm_head.weight"] = (a.vocab_size, a.hidden_size)
    return MappingProxyType(shapes)


def _refuse_unsupported(config: Mapping[str, Any]) -> None:
    window = config.get("sliding_window")
    if config.get("use_sliding_window", config["model_type"] == "mistral") and window is not None:
        windowed = window < config["max_position_embeddings"]
    else:
        windowed = "sliding_attention" in config.get("layer_types", ())
    activation = config.get("hidden_act", "silu")
    for unsupported, fault in (
        (windowed, f"sliding_window {window}: attention is always full here; null turns it off"),
        (activation not in ("silu", "swish"), f"hidden_act {activation!r}: the feed-forward layer is SwiGLU here"),
        (config.get("attention_bias", False), "attention_bias: the output projection has no bias here"),
        (config.get("mlp_bias", False), "mlp_bias: the feed-forward layer has no bias here"),
        ("quantization_config" in config, "quantization_config: training starts from the unquantised checkpoint"),
    ):
        if unsupported:
            raise ValueError(f"config.json: {fault}")


def _rope_parameters(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The rotary settings, from `rope_parameters` (new) or `rope_theta` and `rope_scaling` (old)."""
    old = {"rope_theta": config["rope_theta"]} if "rope_theta" in config else {}
    rope = {**old, **config.get("rope_scaling", {}), **config.get("rope_parameters", {})}
    fraction = rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    if fraction != 1.0:
        raise ValueError(f"config.json: partial_rotary_factor {fraction}: every dimension of a head is rotated here")
    return rope


def _rope_scaling(rope: Mapping[str, Any]) -> RopeScaling | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    if kind != "llama3":
        raise ValueError(f"config.json: rope_type {kind!r}; known are 'default' and 'llama3'")
    try:
        scaling = RopeScaling(**{trait.name: rope[trait.name] for trait in fields(RopeScaling)})
    except KeyError as missing:
        raise ValueError(f"config.json: the llama3 rotary scaling has no {missing}") from None
    if scaling != (fixed := RopeScaling(factor=scaling.factor)):
        raise ValueError(f"config.json: the rotary scaling is {scaling}; Megatron-Core computes only {fixed}")
    return scaling
