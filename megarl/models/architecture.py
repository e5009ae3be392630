"""The sizes of a model, read from a Hugging Face `config.json`.

A setting that changes the model's function and has no field in `Architecture` is an error, never ignored: weights that
load into the wrong function train and sample without any sign of it.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from types import MappingProxyType
from typing import Literal

from megarl.models.experts import Experts, read_experts
from megarl.models.families import ALIASES, FAMILIES, OUTPUT_NORMS, ExpertNames, Family
from megarl.models.fields import LONGEST, MOST_LAYERS, SHOWN, Fields, wrong
from megarl.models.linear import LinearAttention, linear_shapes, read_linear
from megarl.models.rotary import (
    LinearScaling,
    QueryScaling,
    RopeScaling,
    Yarn,
    local_rope_theta,
    query_scaling,
    rope_parameters,
    rope_scaling,
    rope_theta,
    rotary_fraction,
)
from megarl.models.unsupported import unsupported
from megarl.models.windows import window_of
from megarl.platform.errors import UserError
from megarl.reshard.headers import Shape

ODD = "must be even, because positions rotate pairs of numbers"
EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
SCORE = "score.weight"  # the scalar head
ROUTER_BIAS = "gate.e_score_correction_bias"
SCORED_ROUTE_BYTES = 8  # of one choice: the expert and its score, float32 both
VOCAB_MULTIPLE = 64  # the rows of a complete engine's padded vocabulary are a multiple of this


@dataclass(frozen=True, kw_only=True)
class LatentAttention:
    """The sizes of multi-head latent attention (DeepSeek)."""

    q_lora_rank: int | None  # None: queries are projected in one step
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int


@dataclass(frozen=True, kw_only=True)
class LayerKind:
    """The differences between layers of one model. Layers of one kind have equal shapes and compute the same."""

    attention: Literal["full", "sliding", "latent", "linear"]
    feed_forward: Literal["dense", "experts"]
    is_rotated: bool  # queries and keys have a position

    @property
    def is_sparse(self) -> bool:
        """Whether the layer has experts."""
        return self.feed_forward == "experts"


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """The sizes and switches of one decoder."""

    family: str  # a key of FAMILIES
    num_layers: int
    hidden_size: int
    ffn_hidden_size: int  # of a dense layer
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int  # of queries and keys
    vocab_size: int  # rows of the embedding in the checkpoint, before any padding
    tied_embeddings: bool  # the output layer is the embedding; the checkpoint has no `lm_head.weight`
    qkv_bias: bool
    qk_norm: bool
    norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | LinearScaling | Yarn | None
    max_position_embeddings: int
    experts: Experts | None = None  # None: every layer is dense
    latent: LatentAttention | None = None  # None: every head or group of heads has its own keys and values
    linear: LinearAttention | None = None  # None: no layer has linear attention
    scalar_head: bool = False  # one number per token (`score.weight`) instead of logits; ties nothing
    rotary_fraction: float = 1.0  # of the numbers of a head, from its first
    activation: str = "silu"  # a key of transformers' ACT2FN
    window: int | None = None  # tokens that a query sees in `windowed_layers`, itself included
    windowed_layers: tuple[int, ...] = ()
    local_rope_theta: float | None = (
        None  # `rope_theta` of `windowed_layers`, without scaling; None: that of all layers
    )
    query_scaling: QueryScaling | None = None  # None: queries have no factors
    embedding_scale: float = 1.0  # of the embeddings
    residual_scale: float = 1.0  # of what a branch adds to the residual stream
    logit_divisor: float = 1.0
    attention_scale: float | None = None  # of the scores of attention; None: 1 / sqrt(head_dim)
    unrotated_layers: tuple[int, ...] = ()  # whose queries and keys have no position
    parallel_residual: bool = False  # attention and feed-forward layer read the same hidden states

    @property
    def traits(self) -> Family:
        """The traits of the family."""
        return FAMILIES[self.family]

    @property
    def qk_norm_sizes(self) -> tuple[int, int]:
        """The numbers of a query and of a key that are normalised together."""
        if self.traits.wide_qk_norm:
            return self.num_attention_heads * self.head_dim, self.num_key_value_heads * self.head_dim
        return self.head_dim, self.head_dim

    @property
    def norms(self) -> tuple[str, ...]:
        """The norms of a layer's hidden states, by the names that they have, or would have, in Llama."""
        before = ("input_layernorm", "post_attention_layernorm") if self.traits.input_norms else ()
        return (*before, *OUTPUT_NORMS) if self.traits.output_norms else before

    @property
    def embedding_name(self) -> str:
        """The name of the embedding in the checkpoint."""
        return self.traits.parameter_name(EMBEDDING)

    @property
    def head_name(self) -> str:
        """The name of the output layer in the checkpoint, also of a model that ties it to the embedding."""
        return self.traits.parameter_name(HEAD)

    def layer_prefix(self, layer: int) -> str:
        """Return the beginning of the names of a layer's parameters in the checkpoint."""
        return self.traits.parameter_name(f"model.layers.{layer}.")

    def route_bytes(self, *, with_scores: bool) -> int:
        """Return the bytes of the routes of one token in all layers, as in `Rollouts`; 0 without experts."""
        experts = self.experts
        if not experts:
            return 0
        num_choices = (self.num_layers - experts.first_dense_layers) * experts.top_k
        return num_choices * (SCORED_ROUTE_BYTES if with_scores else experts.number_bytes)

    def has_routers_of(self, other: "Architecture") -> bool:
        """Return whether the routes of another model have a meaning in this one: layers and experts correspond."""
        return (self.experts, self.num_layers) == (other.experts, other.num_layers)

    @property
    def layer_kinds(self) -> tuple[LayerKind, ...]:
        """The kinds of all layers."""
        return layer_kinds(self)

    def kind(self, layer: int) -> LayerKind:
        """Return the kind of a layer."""
        return self.layer_kinds[layer]

    @property
    def num_caching_layers(self) -> int:
        """The number of layers that keep something of each token for later tokens; linear attention does not."""
        return self.num_layers - (len(self.linear.layers) if self.linear else 0)

    @property
    def layer_of_kind(self) -> dict[LayerKind, int]:
        """One layer of each kind."""
        return {kind: layer for layer, kind in enumerate(self.layer_kinds)}

    def with_scalar_head(self) -> "Architecture":
        """Return the decoder of a value or reward model."""
        return replace(self, scalar_head=True, tied_embeddings=False)

    @property
    def expert_names(self) -> ExpertNames:
        """The names of the parts of a layer with experts, in the checkpoint."""
        names = self.traits.experts
        assert names is not None, self.family
        return names


def read_architecture(hf_config: Mapping[str, object]) -> Architecture:
    """Return the architecture that a parsed `config.json` describes.

    Raises:
        UserError: the family is unknown, a size is missing or impossible, or the model needs something unsupported.
    """
    model_type = str(hf_config.get("model_type"))
    family = ALIASES.get(model_type, model_type)
    if family not in FAMILIES:
        known = ", ".join([*FAMILIES, *ALIASES])
        raise UserError(f"config.json: model_type is {model_type[:SHOWN]}; known are {known}")
    traits = FAMILIES[family]
    # A null overrides the family's default and then counts as missing, as in transformers.
    config = Fields.of({**traits.defaults, **hf_config, "model_type": family})
    for fault in unsupported(hf_config, config):
        raise UserError(fault)
    scalar_head = _is_classifier(config)
    rope = rope_parameters(config, traits)
    latent = _latent(config) if traits.latent else None
    window, windowed_layers = window_of(config, traits)
    num_heads, num_key_value_heads, head_dim = _heads(config, latent)
    architecture = Architecture(
        family=family,
        num_layers=config.size("num_hidden_layers", most=MOST_LAYERS),
        hidden_size=config.size("hidden_size"),
        ffn_hidden_size=config.size("intermediate_size"),
        num_attention_heads=num_heads,
        num_key_value_heads=num_key_value_heads,
        head_dim=head_dim,
        vocab_size=config.size("vocab_size"),
        tied_embeddings=config.flag("tie_word_embeddings") and not scalar_head,
        qkv_bias=_switch(config, traits.qkv_bias),
        qk_norm=_switch(config, traits.qk_norm),
        norm_eps=config.number(traits.key("rms_norm_eps"), 1e-6),
        rope_theta=rope_theta(rope, traits, head_dim),
        rope_scaling=rope_scaling(rope, traits),
        max_position_embeddings=config.size("max_position_embeddings", most=LONGEST),
        experts=read_experts(config, traits) if traits.experts else None,
        latent=latent,
        linear=read_linear(config, traits),
        scalar_head=scalar_head,
        rotary_fraction=rotary_fraction(rope, traits, head_dim),
        activation=str(config.values.get(traits.key("hidden_act"), traits.activations[0])),
        window=window,
        windowed_layers=windowed_layers,
        local_rope_theta=local_rope_theta(config, traits),
        query_scaling=query_scaling(rope, traits),
        unrotated_layers=_unrotated_layers(config) if traits.rotates_by_layer else (),
        parallel_residual=traits.parallel_residual and config.flag("use_parallel_residual", default=True),
        **_scales(config, traits),
    )
    for key, least in (("bos_token_id", -1), ("eos_token_id", 0), ("pad_token_id", -1)):
        config.tokens(key, architecture.vocab_size, least=least)
    return architecture


@lru_cache(maxsize=16)
def layer_kinds(architecture: Architecture) -> tuple[LayerKind, ...]:
    """Return the kinds of all layers."""
    a = architecture
    num_dense = a.experts.first_dense_layers if a.experts else a.num_layers
    unrotated = frozenset(a.unrotated_layers)
    attention: dict[int, Literal["sliding", "linear"]] = {layer: "sliding" for layer in a.windowed_layers}
    if a.linear:
        attention |= {layer: "linear" for layer in a.linear.layers}
    return tuple(
        LayerKind(
            attention="latent" if a.latent else attention.get(layer, "full"),
            feed_forward="dense" if layer < num_dense else "experts",
            is_rotated=layer not in unrotated,
        )
        for layer in range(a.num_layers)
    )


def padded_vocabulary(rows: int) -> int:
    """Return the rows of the engine's embedding, which its ranks share."""
    return -(-rows // VOCAB_MULTIPLE) * VOCAB_MULTIPLE


@lru_cache(maxsize=16)
def hf_shapes(architecture: Architecture) -> Mapping[str, Shape]:
    """Return the shape of every parameter of the Hugging Face checkpoint, in canonical order.

    The order is embedding, layers from the first to the last, final norm, and head. The head is `score` if it is
    scalar; a tied head is missing.
    """
    shapes: Shapes = {}
    for name, shape in llama_shapes(architecture).items():
        place = checkpoint_places(architecture)[name]
        shapes[place.name] = place.shape(shape)
    return MappingProxyType(shapes)


@dataclass(frozen=True)
class CheckpointPlace:
    """The place of a parameter of Llama in a checkpoint whose family names, stacks or transposes it otherwise.

    A vector is its own transpose.
    """

    name: str  # of the checkpoint's parameter
    row: int = 0  # the first row of the parameter of Llama
    index: int | None = None  # in the first dimension of a parameter that has the transposed parameter there

    def shape(self, shape: Shape) -> Shape:
        """Return the shape of the checkpoint's parameter if the one of Llama, of this shape, is the last in it."""
        if self.index is not None:
            return self.index + 1, *reversed(shape)
        return self.row + shape[0], *shape[1:]


STACKED_EXPERT = re.compile(r"(?P<experts>.*\.experts)\.(?P<number>\d+)\.(?P<matrix>\w+)\.(?P<part>weight|bias)")


@lru_cache(maxsize=16)
def checkpoint_places(architecture: Architecture) -> Mapping[str, CheckpointPlace]:
    """Return the place in the checkpoint of every parameter of `llama_shapes`, in the same order."""
    places: dict[str, CheckpointPlace] = {}
    ends: dict[str, int] = {}
    experts = architecture.traits.experts
    for name, shape in llama_shapes(architecture).items():
        own = architecture.traits.parameter_name(name)
        expert = STACKED_EXPERT.fullmatch(own) if experts and experts.gate_up else None
        if expert:
            bias = "_bias" if expert["part"] == "bias" else ""
            places[name] = CheckpointPlace(f"{expert['experts']}.{expert['matrix']}{bias}", index=int(expert["number"]))
            continue
        if architecture.traits.router_bias_is_matrix and name.endswith(ROUTER_BIAS):
            places[name] = CheckpointPlace(own, index=0)
            continue
        places[name] = CheckpointPlace(own, ends.get(own, 0))
        ends[own] = ends.get(own, 0) + shape[0]
    return MappingProxyType(places)


@lru_cache(maxsize=16)
def llama_shapes(architecture: Architecture) -> Mapping[str, Shape]:
    """Return the shape of every parameter by the name that it has, or would have, in Llama."""
    a = architecture
    layers = {kind: _layer_shapes(a, kind) for kind in a.layer_of_kind}
    shapes: Shapes = {EMBEDDING: (a.vocab_size, a.hidden_size)}
    for number, kind in enumerate(a.layer_kinds):
        shapes.update({f"model.layers.{number}.{name}": shape for name, shape in layers[kind].items()})
    shapes |= norm_shapes(a, "model.norm.")
    if a.scalar_head:
        shapes[SCORE] = (1, a.hidden_size)
    elif not a.tied_embeddings:
        shapes[HEAD] = (a.vocab_size, a.hidden_size)
    return MappingProxyType(shapes)


Shapes = dict[str, Shape]


def _layer_shapes(a: Architecture, kind: LayerKind) -> Shapes:
    shapes = _attention_shapes(a)
    if a.latent:
        shapes = _latent_shapes(a, a.latent)
    elif a.linear and kind.attention == "linear":
        shapes = linear_shapes(a.linear, a.traits.linear_sections, a.hidden_size)
    for norm in a.norms:
        shapes |= norm_shapes(a, f"{norm}.")
    return shapes | (_expert_shapes(a, a.experts) if kind.is_sparse and a.experts else _feed_forward_shapes(a))


def _attention_shapes(a: Architecture) -> Shapes:
    query = a.num_attention_heads * a.head_dim
    key_value = a.num_key_value_heads * a.head_dim
    gated_query = query * (1 + a.traits.gated_attention)
    projections = {"q": gated_query, "k": key_value, "v": key_value}
    if a.traits.fused_qkv:
        projections = {"qkv": query + 2 * key_value}
    shapes: Shapes = {f"self_attn.{x}_proj.weight": (rows, a.hidden_size) for x, rows in projections.items()}
    if a.qkv_bias:
        shapes |= {f"self_attn.{x}_proj.bias": (rows,) for x, rows in projections.items()}
    if a.qk_norm:
        shapes |= {f"self_attn.{x}_norm.weight": (size,) for x, size in zip("qk", a.qk_norm_sizes, strict=True)}
    if a.traits.sinks:
        shapes["self_attn.sinks"] = (a.num_attention_heads,)
    return shapes | projection_shapes(a, "self_attn.o_proj", a.hidden_size, query)


def norm_shapes(a: Architecture, prefix: str) -> Shapes:
    """Return the shapes of a norm of hidden states, whose names begin with `prefix`."""
    return {f"{prefix}{part}": (a.hidden_size,) for part in a.traits.norm_parts}


def projection_shapes(a: Architecture, name: str, rows: int, columns: int) -> Shapes:
    """Return the shapes of a projection of the attention or of the feed-forward layer, with a bias if there are any."""
    shapes = {"weight": (rows, columns), "bias": (rows,)}
    return {f"{name}.{part}": shapes[part] for part in a.traits.linear_parts}


def _feed_forward_shapes(a: Architecture) -> Shapes:
    if a.traits.gated:
        return _swiglu_shapes("mlp.", a.hidden_size, a.ffn_hidden_size)
    up = projection_shapes(a, "mlp.up_proj", a.ffn_hidden_size, a.hidden_size)
    return up | projection_shapes(a, "mlp.down_proj", a.hidden_size, a.ffn_hidden_size)


def _latent_shapes(a: Architecture, latent: LatentAttention) -> Shapes:
    query = a.num_attention_heads * a.head_dim
    key_value = a.num_attention_heads * (latent.qk_nope_head_dim + latent.v_head_dim)
    if latent.q_lora_rank is None:
        shapes: Shapes = {"self_attn.q_proj.weight": (query, a.hidden_size)}
    else:
        shapes = {
            "self_attn.q_a_proj.weight": (latent.q_lora_rank, a.hidden_size),
            "self_attn.q_a_layernorm.weight": (latent.q_lora_rank,),
            "self_attn.q_b_proj.weight": (query, latent.q_lora_rank),
        }
    return shapes | {
        "self_attn.kv_a_proj_with_mqa.weight": (latent.kv_lora_rank + latent.qk_rope_head_dim, a.hidden_size),
        "self_attn.kv_a_layernorm.weight": (latent.kv_lora_rank,),
        "self_attn.kv_b_proj.weight": (key_value, latent.kv_lora_rank),
        "self_attn.o_proj.weight": (a.hidden_size, a.num_attention_heads * latent.v_head_dim),
    }


def _swiglu_shapes(
    prefix: str, hidden: int, ffn: int, *, gate: str = "gate_proj", up: str = "up_proj", down: str = "down_proj"
) -> Shapes:
    return {
        f"{prefix}{gate}.weight": (ffn, hidden),
        f"{prefix}{up}.weight": (ffn, hidden),
        f"{prefix}{down}.weight": (hidden, ffn),
    }


def _expert_shapes(a: Architecture, experts: Experts) -> Shapes:
    names = a.expert_names
    shapes = projection_shapes(a, f"{names.block}.gate", experts.num_experts, a.hidden_size)
    if experts.router_bias:
        shapes[f"{names.block}.{ROUTER_BIAS}"] = (experts.num_experts,)
    for number in range(experts.num_experts):
        prefix = f"{names.block}.experts.{number}."
        if names.gate_up:
            shapes |= projection_shapes(a, f"{prefix}{names.gate_up}", 2 * experts.ffn_hidden_size, a.hidden_size)
            shapes |= projection_shapes(a, f"{prefix}{names.down}", a.hidden_size, experts.ffn_hidden_size)
            continue
        shapes |= _swiglu_shapes(
            prefix,
            a.hidden_size,
            experts.ffn_hidden_size,
            gate=names.gate,
            up=names.up,
            down=names.down,
        )
    if experts.shared_ffn_hidden_size:
        shapes |= _swiglu_shapes(f"{names.block}.{names.shared}.", a.hidden_size, experts.shared_ffn_hidden_size)
    if experts.shared_gate:
        shapes[f"{names.block}.{names.shared}_gate.weight"] = (1, a.hidden_size)
    return shapes


def _unrotated_layers(config: Fields) -> tuple[int, ...]:
    num_layers = config.size("num_hidden_layers", most=MOST_LAYERS)
    interval = config.size("no_rope_layer_interval", 4)
    rotated = config.items("no_rope_layers") or [int((layer + 1) % interval != 0) for layer in range(num_layers)]
    if len(rotated) != num_layers or not set(rotated) <= {0, 1}:
        raise wrong("no_rope_layers", rotated, f"must have 1 (rotated) or 0 for each of the {num_layers} layers")
    return tuple(layer for layer in range(num_layers) if not rotated[layer])


def _scales(config: Fields, traits: Family) -> dict[str, float]:
    """Return the factors of a family that has any, by their fields in `Architecture`."""
    scales = {}
    if traits.scaled_embedding:
        scales["embedding_scale"] = math.sqrt(config.size("hidden_size"))
    if traits.score_size:
        scales["attention_scale"] = config.number(traits.score_size) ** -0.5
    if traits.multipliers:
        scales |= {
            "embedding_scale": config.number("embedding_multiplier", 1.0),
            "residual_scale": config.number("residual_multiplier", 1.0),
            "attention_scale": config.number("attention_multiplier", 1.0),
            "logit_divisor": config.number("logits_scaling", 1.0),
        }
    return scales


def _switch(config: Fields, trait: bool | str) -> bool:
    """Return a trait, or what config.json says at the key that decides it."""
    return config.flag(trait) if isinstance(trait, str) else trait


def _is_classifier(config: Fields) -> bool:
    """Return whether the checkpoint scores sequences instead of predicting tokens."""
    if not any(str(name).endswith("ForSequenceClassification") for name in config.items("architectures")):
        return False
    labels = config.table("id2label").values if "id2label" in config else None
    num_labels = config.size("num_labels", 2) if labels is None else len(labels)  # as transformers
    if num_labels != 1:
        raise UserError(
            f"config.json: num_labels {num_labels}: a model that scores sequences here gives one number (num_labels 1)"
        )
    return True


def _heads(config: Fields, latent: LatentAttention | None) -> tuple[int, int, int]:
    """Return the number of query heads and of key/value heads, and the size of a head of queries and keys."""
    num_heads = config.size("num_attention_heads")
    hidden_size = config.size("hidden_size")
    if latent:  # every head has its own keys and values
        return num_heads, num_heads, latent.qk_nope_head_dim + latent.qk_rope_head_dim
    num_key_value_heads = config.size("num_key_value_heads", num_heads)
    if num_heads % num_key_value_heads:
        raise UserError(
            f"config.json: num_attention_heads {num_heads} does not divide by num_key_value_heads {num_key_value_heads}"
        )
    if "head_dim" not in config and hidden_size % num_heads:
        raise UserError(
            f"config.json: hidden_size {hidden_size} does not divide by num_attention_heads {num_heads}, and there is "
            "no head_dim"
        )
    head_dim = config.size("head_dim", hidden_size // num_heads)
    if head_dim % 2:
        raise wrong("head_dim", head_dim, ODD)
    return num_heads, num_key_value_heads, head_dim


def _latent(config: Fields) -> LatentAttention:
    latent = LatentAttention(
        q_lora_rank=config.size("q_lora_rank") if "q_lora_rank" in config else None,
        **{key: config.size(key) for key in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")},
    )
    if latent.qk_rope_head_dim % 2:
        raise wrong("qk_rope_head_dim", latent.qk_rope_head_dim, ODD)
    return latent
