"""Reads a Hugging Face `config.json` into the sizes everything else computes with, and refuses what it cannot do.

A setting that changes the model's function and is not carried by `Architecture` is an error, never ignored: weights
that load into the wrong function train and sample without a sign.
"""

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, replace
from functools import lru_cache
from types import MappingProxyType
from typing import Any, Literal

from megarl.models.families import FAMILIES, ExpertNames, Family

SCORE = "score.weight"  # the scalar head in a checkpoint


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


@dataclass(frozen=True, kw_only=True)
class Experts:
    """The mixture of experts that stands for the feed-forward of every layer but the first few."""

    num_experts: int
    top_k: int
    ffn_hidden_size: int  # of one expert
    shared_ffn_hidden_size: int = 0  # of all shared experts together; 0: none
    shared_gate: bool = False  # a sigmoid gate scales what the shared expert adds
    first_dense_layers: int = 0  # layers 0 to n-1 have a plain feed-forward
    score: Literal["softmax", "sigmoid"] = "softmax"
    normalize_top_k: bool = True  # the weights of the chosen experts sum to one (before `scaling`)
    scaling: float = 1.0
    num_groups: int = 1  # of experts, of which a token chooses `top_k_groups` before it chooses experts
    top_k_groups: int = 1
    router_bias: bool = False  # a bias per expert that takes part in the choice and not in the weights


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
    tied_embeddings: bool  # the output layer is the embedding: the checkpoint has no `lm_head.weight`
    qkv_bias: bool
    qk_norm: bool
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | Yarn | None
    max_position_embeddings: int
    experts: Experts | None = None  # None: every layer is dense
    latent: LatentAttention | None = None  # None: every head has keys and values of its own, or its group's
    scalar_head: bool = False  # one number per token (`score.weight`) instead of the vocabulary's; ties nothing

    def is_sparse(self, layer: int) -> bool:
        """Whether a layer has experts."""
        return self.experts is not None and layer >= self.experts.first_dense_layers

    def with_scalar_head(self) -> "Architecture":
        """The decoder of a value or reward model."""
        return replace(self, scalar_head=True, tied_embeddings=False)

    @property
    def expert_names(self) -> ExpertNames:
        """How the checkpoint calls the parts of a layer with experts."""
        names = FAMILIES[self.family].experts
        assert names is not None, self.family
        return names


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

    num_heads = _size(config, "num_attention_heads")
    # Latent attention gives every head keys and values of its own.
    num_key_value_heads = num_heads if traits.latent else _size(config, "num_key_value_heads", num_heads)
    if num_heads % num_key_value_heads:
        raise ValueError(
            f"config.json: num_attention_heads {num_heads} does not divide by num_key_value_heads {num_key_value_heads}"
        )
    scalar_head = _is_classifier(config)
    rope = _rope_parameters(config)
    latent = _latent(config) if traits.latent else None
    head_dim = latent.qk_nope_head_dim + latent.qk_rope_head_dim if latent else _size(config, "head_dim", 0)
    return Architecture(
        family=family,
        num_layers=_size(config, "num_hidden_layers"),
        hidden_size=_size(config, "hidden_size"),
        ffn_hidden_size=_size(config, "intermediate_size"),
        num_attention_heads=num_heads,
        num_key_value_heads=num_key_value_heads,
        head_dim=head_dim or _size(config, "hidden_size") // num_heads,
        vocab_size=_size(config, "vocab_size"),
        tied_embeddings=bool(config.get("tie_word_embeddings", False)) and not scalar_head,
        qkv_bias=traits.qkv_bias and bool(config.get("qkv_bias", True)),
        qk_norm=traits.qk_norm,
        rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        rope_theta=float(rope.get("rope_theta", 10000.0)),
        rope_scaling=_rope_scaling(rope, traits),
        max_position_embeddings=_size(config, "max_position_embeddings"),
        experts=_experts(config) if traits.experts else None,
        latent=latent,
        scalar_head=scalar_head,
    )


@lru_cache(maxsize=16)
def hf_shapes(architecture: Architecture) -> Mapping[str, tuple[int, ...]]:
    """The shape of every parameter of the Hugging Face checkpoint, in canonical order.

    The order is embedding, layers from the first to the last, final norm, and the head: `score` of a scalar one, else
    `lm_head` unless it is tied.
    """
    a = architecture
    attention: Shapes = {"input_layernorm.weight": (a.hidden_size,)}
    attention |= _latent_shapes(a, a.latent) if a.latent else _attention_shapes(a)
    attention["post_attention_layernorm.weight"] = (a.hidden_size,)
    dense = attention | _swiglu_shapes("mlp.", a.hidden_size, a.ffn_hidden_size)
    sparse = attention | _expert_shapes(a, a.experts) if a.experts else {}
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (a.vocab_size, a.hidden_size)}
    for number in range(a.num_layers):
        layer = sparse if a.is_sparse(number) else dense
        shapes.update({f"model.layers.{number}.{name}": shape for name, shape in layer.items()})
    shapes["model.norm.weight"] = (a.hidden_size,)
    if a.scalar_head:
        shapes[SCORE] = (1, a.hidden_size)
    elif not a.tied_embeddings:
        shapes["lm_head.weight"] = (a.vocab_size, a.hidden_size)
    return MappingProxyType(shapes)


Shapes = dict[str, tuple[int, ...]]


def _attention_shapes(a: Architecture) -> Shapes:
    query, key_value = a.num_attention_heads * a.head_dim, a.num_key_value_heads * a.head_dim
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


def _is_classifier(config: Mapping[str, Any]) -> bool:
    """Whether the checkpoint scores sequences instead of predicting tokens."""
    if not any(name.endswith("ForSequenceClassification") for name in config.get("architectures", ())):
        return False
    num_labels = len(config["id2label"]) if "id2label" in config else config.get("num_labels", 2)  # as transformers
    if num_labels != 1:
        raise ValueError(
            f"config.json: num_labels {num_labels}: a model that scores sequences here gives one number (num_labels 1)"
        )
    return True


def _size(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    if (value := config.get(key, default)) is None:
        raise ValueError(f"config.json of a {config['model_type']} model has no {key}")
    return int(value)


def _latent(config: Mapping[str, Any]) -> LatentAttention:
    return LatentAttention(
        q_lora_rank=config.get("q_lora_rank"),
        **{key: _size(config, key) for key in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")},
    )


def _experts(config: Mapping[str, Any]) -> Experts:
    family = config["model_type"]
    top_k = _size(config, "num_experts_per_tok")
    if family == "mixtral":
        return Experts(
            num_experts=_size(config, "num_local_experts"),
            top_k=top_k,
            ffn_hidden_size=_size(config, "intermediate_size"),
        )
    ffn_hidden_size = _size(config, "moe_intermediate_size")
    normalize_top_k = bool(config.get("norm_topk_prob", False))
    if family.startswith("qwen"):
        shared = _size(config, "shared_expert_intermediate_size", 0)
        return Experts(
            # transformers 5 writes the second name for what it reads under the first.
            num_experts=_size(config, "num_local_experts" if "num_local_experts" in config else "num_experts"),
            top_k=top_k,
            ffn_hidden_size=ffn_hidden_size,
            shared_ffn_hidden_size=shared,
            shared_gate=shared > 0,
            first_dense_layers=len(config.get("mlp_only_layers", ())),
            normalize_top_k=normalize_top_k,
        )
    grouped = family == "deepseek_v3" or config["topk_method"] == "group_limited_greedy"
    return Experts(
        num_experts=_size(config, "n_routed_experts"),
        top_k=top_k,
        ffn_hidden_size=ffn_hidden_size,
        shared_ffn_hidden_size=_size(config, "n_shared_experts", 0) * ffn_hidden_size,
        first_dense_layers=_size(config, "first_k_dense_replace", 0),
        score="sigmoid" if family == "deepseek_v3" else "softmax",
        normalize_top_k=normalize_top_k,
        scaling=float(config.get("routed_scaling_factor", 1.0)),
        num_groups=_size(config, "n_group") if grouped else 1,
        top_k_groups=_size(config, "topk_group") if grouped else 1,
        router_bias=family == "deepseek_v3",
    )


def _refuse_unsupported(config: Mapping[str, Any]) -> None:
    family = config["model_type"]
    window = config.get("sliding_window")
    if config.get("use_sliding_window", family in ("mistral", "mixtral")) and window is not None:
        windowed = window < config["max_position_embeddings"]
    else:
        windowed = "sliding_attention" in config.get("layer_types", ())
    activation = config.get("hidden_act", "silu")
    faults = [
        (windowed, f"sliding_window {window}: attention is always full here; null turns it off"),
        (activation not in ("silu", "swish"), f"hidden_act {activation!r}: the feed-forward layer is SwiGLU here"),
        (config.get("attention_bias", False), "attention_bias: the output projection has no bias here"),
        (config.get("mlp_bias", False), "mlp_bias: the feed-forward layer has no bias here"),
        ("quantization_config" in config, "quantization_config: training starts from the unquantised checkpoint"),
    ]
    if family.startswith("qwen"):
        faults += _qwen_expert_faults(config)
    elif family.startswith("deepseek"):
        faults += _deepseek_faults(config)
    for unsupported, fault in faults:
        if unsupported:
            raise ValueError(f"config.json: {fault}")


def _qwen_expert_faults(config: Mapping[str, Any]) -> list[tuple[bool, str]]:
    step, dense = config.get("decoder_sparse_step", 1), list(config.get("mlp_only_layers", ()))
    alone = config["model_type"] == "qwen2_moe" and not config.get("shared_expert_intermediate_size")
    return [
        (step != 1, f"decoder_sparse_step {step}: every layer behind the dense ones has experts here"),
        (dense != list(range(len(dense))), f"mlp_only_layers {dense}: only the first layers may be dense here"),
        (alone, "shared_expert_intermediate_size is 0: a qwen2_moe model always has a shared expert"),
    ]


def _deepseek_faults(config: Mapping[str, Any]) -> list[tuple[bool, str]]:
    method, groups = config.get("topk_method"), config.get("n_group", 1)
    score, frequency = config.get("scoring_func"), config.get("moe_layer_freq", 1)
    faults = [
        (frequency != 1, f"moe_layer_freq {frequency}: every layer behind the dense ones has experts here"),
        (not config.get("rope_interleave", True), "rope_interleave false: rotary pairs are neighbours here"),
        (config.get("tie_word_embeddings", False), "tie_word_embeddings: the engine does not tie this family"),
    ]
    if config["model_type"] == "deepseek_v3":
        # The engine takes both from config.json and silently assumes others where it is silent.
        found = f"topk_method {method!r} and scoring_func {score!r}: must be 'noaux_tc' and 'sigmoid'"
        return [*faults, ((method, score) != ("noaux_tc", "sigmoid"), found)]
    return [
        *faults,
        (method not in ("greedy", "group_limited_greedy"), f"topk_method {method!r}: known are greedy ones"),
        (method == "greedy" and groups > 1, f"n_group {groups} with topk_method 'greedy': the engine would use groups"),
        (score not in (None, "softmax"), f"scoring_func {score!r}: this family's is 'softmax'"),
        (config.get("norm_topk_prob", False), "norm_topk_prob: implementations of this family disagree on it"),
    ]


def _rope_parameters(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The rotary settings, from `rope_parameters` (new) or `rope_theta` and `rope_scaling` (old)."""
    old = {"rope_theta": config["rope_theta"]} if "rope_theta" in config else {}
    rope = {**old, **config.get("rope_scaling", {}), **config.get("rope_parameters", {})}
    fraction = rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    if fraction != 1.0:
        raise ValueError(f"config.json: partial_rotary_factor {fraction}: every dimension of a head is rotated here")
    return rope


def _rope_scaling(rope: Mapping[str, Any], traits: Family) -> RopeScaling | Yarn | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    if kind != (known := "yarn" if traits.latent else "llama3"):
        raise ValueError(f"config.json: rope_type {kind!r}; known are 'default' and {known!r}")
    try:
        return _yarn(rope) if traits.latent else _llama3(rope)
    except KeyError as missing:
        raise ValueError(f"config.json: the {kind} rotary scaling has no {missing}") from None


def _llama3(rope: Mapping[str, Any]) -> RopeScaling:
    scaling = RopeScaling(**{trait.name: rope[trait.name] for trait in fields(RopeScaling)})
    if scaling != (fixed := RopeScaling(factor=scaling.factor)):
        raise ValueError(f"config.json: the rotary scaling is {scaling}; Megatron-Core computes only {fixed}")
    return scaling


def _yarn(rope: Mapping[str, Any]) -> Yarn:
    scaling = Yarn(
        **{trait.name: rope[trait.name] for trait in fields(Yarn) if trait.name in rope or trait.default is MISSING}
    )
    if "attention_factor" in rope or (scaling.mscale != 1.0 and not scaling.mscale_all_dim):
        raise ValueError("config.json: the yarn rotary scaling must be given by mscale and mscale_all_dim together")
    return scaling
