"""The sizes of a model, read from a Hugging Face `config.json`.

A setting that changes the model's function and has no field in `Architecture` is an error, never ignored: weights that
load into the wrong function train and sample without any sign of it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from types import MappingProxyType

from megarl.models.experts import Experts, read_experts
from megarl.models.families import FAMILIES, ExpertNames
from megarl.models.fields import LONGEST, MOST_LAYERS, SHOWN, Fields, wrong
from megarl.models.rotary import RopeScaling, Yarn, rope_parameters, rope_scaling
from megarl.models.unsupported import unsupported
from megarl.platform.errors import UserError

ODD = "must be even, because positions rotate pairs of numbers"
EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
SCORE = "score.weight"  # the scalar head in a checkpoint
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
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | Yarn | None
    max_position_embeddings: int
    experts: Experts | None = None  # None: every layer is dense
    latent: LatentAttention | None = None  # None: every head or group of heads has its own keys and values
    scalar_head: bool = False  # one number per token (`score.weight`) instead of logits; ties nothing

    def is_sparse(self, layer: int) -> bool:
        """Return whether a layer has experts."""
        return self.experts is not None and layer >= self.experts.first_dense_layers

    def with_scalar_head(self) -> "Architecture":
        """Return the decoder of a value or reward model."""
        return replace(self, scalar_head=True, tied_embeddings=False)

    @property
    def expert_names(self) -> ExpertNames:
        """The names of the parts of a layer with experts, in the checkpoint."""
        names = FAMILIES[self.family].experts
        assert names is not None, self.family
        return names


def read_architecture(hf_config: Mapping[str, object]) -> Architecture:
    """Return the architecture that a parsed `config.json` describes.

    Raises:
        UserError: the family is unknown, a size is missing or impossible, or the model needs something unsupported.
    """
    family = str(hf_config.get("model_type"))
    if family not in FAMILIES:
        raise UserError(f"config.json: model_type is {family[:SHOWN]}; known are {', '.join(FAMILIES)}")
    traits = FAMILIES[family]
    # A null overrides the family's default and then counts as missing, as in transformers.
    config = Fields.of({**traits.defaults, **hf_config})
    for fault in unsupported(hf_config, config):
        raise UserError(fault)
    scalar_head = _is_classifier(config)
    rope = rope_parameters(config)
    latent = _latent(config) if traits.latent else None
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
        qkv_bias=traits.qkv_bias,
        qk_norm=traits.qk_norm,
        rms_norm_eps=config.number("rms_norm_eps", 1e-6),
        rope_theta=rope.number("rope_theta", 10000.0),
        rope_scaling=rope_scaling(rope, latent=traits.latent),
        max_position_embeddings=config.size("max_position_embeddings", most=LONGEST),
        experts=read_experts(config) if traits.experts else None,
        latent=latent,
        scalar_head=scalar_head,
    )
    for key, least in (("bos_token_id", -1), ("eos_token_id", 0), ("pad_token_id", -1)):
        config.tokens(key, architecture.vocab_size, least=least)
    return architecture


def padded_vocabulary(rows: int) -> int:
    """Return the rows of the engine's embedding, which its ranks share."""
    return -(-rows // VOCAB_MULTIPLE) * VOCAB_MULTIPLE


@lru_cache(maxsize=16)
def hf_shapes(architecture: Architecture) -> Mapping[str, tuple[int, ...]]:
    """Return the shape of every parameter of the Hugging Face checkpoint, in canonical order.

    The order is embedding, layers from the first to the last, final norm, and head. The head is `score` if it is
    scalar, else `lm_head`; a tied head is missing.
    """
    a = architecture
    attention: Shapes = {"input_layernorm.weight": (a.hidden_size,)}
    attention |= _latent_shapes(a, a.latent) if a.latent else _attention_shapes(a)
    attention["post_attention_layernorm.weight"] = (a.hidden_size,)
    dense = attention | _swiglu_shapes("mlp.", a.hidden_size, a.ffn_hidden_size)
    sparse = attention | _expert_shapes(a, a.experts) if a.experts else {}
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (a.vocab_size, a.hidden_size)}
    for number in range(a.num_layers):
        layer = sparse if a.is_sparse(number) else dense
        shapes.update({f"model.layers.{number}.{name}": shape for name, shape in layer.items()})
    shapes["model.norm.weight"] = (a.hidden_size,)
    if a.scalar_head:
        shapes[SCORE] = (1, a.hidden_size)
    elif not a.tied_embeddings:
        shapes[HEAD] = (a.vocab_size, a.hidden_size)
    return MappingProxyType(shapes)


Shapes = dict[str, tuple[int, ...]]


def _attention_shapes(a: Architecture) -> Shapes:
    query = a.num_attention_heads * a.head_dim
    key_value = a.num_key_value_heads * a.head_dim
    projections = {"q": query, "k": key_value, "v": key_value}
    shapes: Shapes = {f"self_attn.{x}_proj.weight": (rows, a.hidden_size) for x, rows in projections.items()}
    if a.qkv_bias:
        shapes |= {f"self_attn.{x}_proj.bias": (rows,) for x, rows in projections.items()}
    if a.qk_norm:
        shapes |= {f"self_attn.{x}_norm.weight": (a.head_dim,) for x in "qk"}
    return shapes | {"self_attn.o_proj.weight": (a.hidden_size, query)}


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
    shapes: Shapes = {f"{names.block}.gate.weight": (experts.num_experts, a.hidden_size)}
    if experts.router_bias:
        shapes[f"{names.block}.gate.e_score_correction_bias"] = (experts.num_experts,)
    for number in range(experts.num_experts):
        shapes |= _swiglu_shapes(
            f"{names.block}.experts.{number}.",
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
