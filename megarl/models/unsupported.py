"""Settings of a `config.json` that change the model's function and are not supported."""

from collections.abc import Callable, Iterator, Mapping

from megarl.models.families import FAMILIES, Family
from megarl.models.fields import MOST_LAYERS, SHOWN, Fields
from megarl.reshard.quantised import METHODS, quantisation_faults

DTYPES = ("float16", "bfloat16", "float32", "float64")
ABSENT = (
    ("attention_chunk_size", "attention is always full here"),
    ("compression_config", "training starts from the unquantised checkpoint"),
    ("dual_chunk_attention_config", "attention is always full here"),
    ("index_topk", "attention is always full here"),
    ("llama_4_scaling", "queries are not scaled by their position here"),
    ("moe_router_dtype", "the router computes in the precision of the model here"),
    ("rswa_window", "attention is always full here"),
    ("target_layer_count", "a draft model cannot be trained here"),
    ("text_config", "the sizes of a text model are at the top level of its config.json"),
)
"""Keys that have no supported value, and why. vLLM reads them, and some by their presence alone."""
NULL = (
    ("attn_logit_softcapping", "the scores of attention are not capped here"),
    ("final_logit_softcapping", "logits are not capped here"),
)
"""Keys that must be missing or null, and why."""
FIXED = (
    ("ada_rms_norm_t_cond", False, "norms have no condition here"),
    ("attention_dropout", 0.0, "dropout in training is megatron.override_transformer_config.attention_dropout"),
    ("embd_pdrop", 0.0, "dropout in training is megatron.override_transformer_config.hidden_dropout"),
    ("resid_pdrop", 0.0, "dropout in training is megatron.override_transformer_config.hidden_dropout"),
    ("use_bias", False, "the projections of this family have no biases here"),
    ("attention_out_bias", False, "the output projection of this family has no bias here"),
    ("bias", False, "the attention has no bias of this kind here"),
    ("hidden_dropout", 0.0, "dropout in training is megatron.override_transformer_config.hidden_dropout"),
    ("is_causal", True, "a token attends to earlier tokens alone"),
    ("is_encoder_decoder", False, "a model is a decoder alone"),
    ("logit_scale", 1.0, "logits are not scaled here"),
    ("router_jitter_noise", 0.0, "the router has no noise here"),
    ("use_bidirectional_attention", False, "a token attends to earlier tokens alone"),
)
"""Keys that have one supported value, and why."""
EXPERT_COUNTS = ("moe_num_experts", "n_routed_experts", "num_experts", "num_local_experts")


def unsupported(given: Mapping[str, object], config: Fields) -> Iterator[str]:
    """Yield a sentence for each unsupported setting.

    Args:
        given: the parsed config.json, with nulls.
        config: the same without nulls, and with the family's defaults.
    """
    family = config.values["model_type"]
    traits = FAMILIES[family]
    faults = [
        *_block_faults(config, traits),
        _dtype_fault(config),
        _class_fault(config),
        *_key_faults(given, config, traits),
        *((True, fault) for fault in quantisation_faults(given.get("quantization_config"), _methods(traits))),
        *_trait_faults(given, config, traits),
        *(OF_FAMILY[family](config) if family in OF_FAMILY else ()),
    ]
    for is_unsupported, fault in faults:
        if is_unsupported:
            yield f"config.json: {fault}"


def _methods(traits: Family) -> tuple[str, ...]:
    """Return the forms of quantised checkpoints of a family."""
    return METHODS if traits.experts and traits.experts.gate_up else METHODS[:-1]


Faults = list[tuple[bool, str]]


def _key_faults(given: Mapping[str, object], config: Fields, traits: Family) -> Iterator[tuple[bool, str]]:
    """Yield the faults of keys that have one supported value, or none."""
    for key, why in ABSENT:
        yield key in given, f"{key} {str(given.get(key))[:SHOWN]}: {why}; remove the key"
    for key in traits.absent:
        yield key in given, f"{key}: a model with it is not supported; remove the key"
    for key, why in NULL:
        yield key in config, f"{key} {str(given.get(key))[:SHOWN]}: {why}; write null"
    for key, value, why in FIXED:
        if key not in traits.unread:
            yield _fixed_fault(config, key, value, why)


def _trait_faults(given: Mapping[str, object], config: Fields, traits: Family) -> Iterator[tuple[bool, str]]:
    """Yield the faults of keys that contradict a trait of the family."""
    if not isinstance(traits.qkv_bias, str):
        why = "biases of queries, keys and values follow from model_type"
        yield _fixed_fault(config, "qkv_bias", traits.qkv_bias, why)
    if not traits.can_tie:
        yield config.flag("tie_word_embeddings"), "tie_word_embeddings: the engine does not tie this family"
    if traits.norm_eps is not None:
        yield _fixed_fault(config, traits.key("rms_norm_eps"), traits.norm_eps, "the engine computes no other")
    if traits.fused_qkv:
        heads = config.size("num_attention_heads")
        sizes = {"head_dim": config.size("hidden_size") // heads, "num_key_value_heads": heads}
        yield from _size_faults(config, sizes)
    if traits.experts:
        yield _count_fault(given, traits)


def _block_faults(config: Fields, traits: Family) -> Faults:
    key = traits.key("hidden_act")
    activation = config.values.get(key, traits.activations[0])
    activations = " or ".join(traits.activations)
    bias = str(traits.linear_bias).lower()
    return [
        (activation not in traits.activations, f"{key} {activation!r}: must be {activations} in this family"),
        (
            traits.qkv_bias != "attention_bias"
            and config.flag("attention_bias", default=traits.linear_bias) != traits.linear_bias,
            f"attention_bias: must be {bias} in this family",
        ),
        (config.flag("mlp_bias"), "mlp_bias: whether the feed-forward layer has biases follows from model_type"),
    ]


def _dtype_fault(config: Fields) -> tuple[bool, str]:
    key = "dtype" if "dtype" in config else "torch_dtype"
    dtype = config.values.get(key, DTYPES[0])
    return dtype not in DTYPES, f"{key} {dtype!r}: must be one of {', '.join(DTYPES)}"


def _class_fault(config: Fields) -> tuple[bool, str]:
    """Return whether the engine would choose the model class of another family, because it does so by name."""
    model_type = config.values["model_type"]
    ours = (FAMILIES[model_type].model_class or f"{model_type}forcausallm").lower().replace("_", "")
    names = {str(name).lower().replace("_", ""): name for name in config.items("architectures")}
    others = [name for plain, name in names.items() if plain.endswith("forcausallm") and plain != ours]
    return bool(others), f"architectures {others[:1]} is no class of model_type {model_type}"


def _fixed_fault(config: Fields, key: str, supported: bool | float, why: str) -> tuple[bool, str]:
    value = config.values.get(key, supported)
    is_number = type(value) in (int, float) and not isinstance(supported, bool)
    is_supported = value == supported and (is_number or type(value) is type(supported))
    written = str(supported).lower() if isinstance(supported, bool) else f"{supported:g}"
    return not is_supported, f"{key} {str(value)[:SHOWN]}: {why}; write {written}"


def _count_fault(given: Mapping[str, object], traits: Family) -> tuple[bool, str]:
    """Return whether config.json has the number of experts under several names, and transformers reads another one."""
    counts = {name: given[name] for name in EXPERT_COUNTS if given.get(name) is not None}
    for own in EXPERT_COUNTS[:2]:
        if own in traits.defaults:  # transformers reads the other names too, and overrides its default
            counts.setdefault(own, traits.defaults[own])
    differ = any(count != next(iter(counts.values())) for count in counts.values())
    return differ, f"{' and '.join(counts)} differ: both are the number of experts; keep one"


def _qwen_faults(config: Fields) -> Faults:
    step = config.values.get("decoder_sparse_step", 1)
    dense = config.items("mlp_only_layers")
    shared = config.values.get("shared_expert_intermediate_size")
    alone = config.values["model_type"] in ("qwen2_moe", "qwen3_next", "qwen3_5_moe_text") and not shared
    return [
        _fixed_fault(config, "qk_norm", supported=False, why="norms of queries and keys follow from model_type"),
        (step != 1, f"decoder_sparse_step {step}: every layer after the dense layers has experts here"),
        (dense != list(range(len(dense))), f"mlp_only_layers {dense}: only the first layers may be dense here"),
        (alone, "shared_expert_intermediate_size is 0: a model of this family always has a shared expert"),
    ]


def _gated_delta_faults(config: Fields) -> Faults:
    """Return the faults of every family with linear attention."""
    gate = config.values.get("output_gate_type", "silu")
    return [
        (gate not in ("silu", "swish"), f"output_gate_type {str(gate)[:SHOWN]}: must be 'silu' in this family"),
        _fixed_fault(config, "attn_output_gate", supported=True, why="the output of attention has a gate here"),
        _fixed_fault(config, "layer_scale", supported=False, why="branches have no factors here"),
        *_qwen_faults(config),
    ]


def _sparse_gated_delta_faults(config: Fields) -> Faults:
    """Return the faults of Qwen3.5 with experts; transformers reads neither key."""
    dense = config.items("mlp_only_layers")
    return [
        (bool(dense), f"mlp_only_layers {str(dense)[:SHOWN]}: every layer of this family has experts"),
        _fixed_fault(config, "norm_topk_prob", supported=True, why="the weights of chosen experts sum to one here"),
        *_gated_delta_faults(config),
    ]


def _deepseek_faults(config: Fields) -> Faults:
    method = config.values.get("topk_method")
    groups = config.size("n_group", 1)
    score = config.values.get("scoring_func")
    faults = _latent_faults(config)
    if config.values["model_type"] == "deepseek_v3":
        # The engine takes both from config.json and silently assumes other values if they are missing.
        found = f"topk_method {method!r} and scoring_func {score!r}: must be 'noaux_tc' and 'sigmoid'"
        return [*faults, ((method, score) != ("noaux_tc", "sigmoid"), found)]  # D35
    return [
        *faults,
        (
            method not in ("greedy", "group_limited_greedy"),
            f"topk_method {method!r}: must be a greedy method",
        ),
        (method == "greedy" and groups > 1, f"n_group {groups} with topk_method 'greedy': the engine would use groups"),
        (score not in (None, "softmax"), f"scoring_func {score!r}: must be 'softmax' in this family"),
        (config.flag("norm_topk_prob"), "norm_topk_prob: implementations of this family disagree on it"),
    ]


def _ernie_faults(config: Fields) -> Faults:
    last = config.size("num_hidden_layers", most=MOST_LAYERS) - 1
    end = config.values.get("moe_layer_end_index", -1)
    follows = "every layer after the dense layers has experts here"
    return [
        _fixed_fault(config, "use_moe", supported=True, why=follows),
        _fixed_fault(config, "moe_layer_interval", 1, follows),
        (end not in (-1, last), f"moe_layer_end_index {str(end)[:SHOWN]}: {follows}; write {last}"),
        _fixed_fault(config, "moe_norm_min", 1e-12, "the engine computes no other"),
        *_size_faults(config, {"num_experts_per_tok": config.size("moe_k")}),
    ]


def _glm_lite_faults(config: Fields) -> Faults:
    """Return whether the first layers with experts differ: the engine reads their number, transformers a list."""
    dense = config.size("first_k_dense_replace", least=0)
    kinds = config.items("mlp_layer_types") or ["dense"]
    num_layers = config.size("num_hidden_layers", most=MOST_LAYERS)
    expected = ["dense"] * dense + ["sparse"] * (num_layers - dense)
    return [
        (
            kinds != expected[: len(kinds)] or (dense != 1 and len(kinds) != num_layers),
            f"mlp_layer_types {str(kinds)[:SHOWN]}: must be {dense} (first_k_dense_replace) of dense, then sparse",
        ),
        *_latent_faults(config),
    ]


def _minimax_faults(config: Fields) -> Faults:
    """Return whether keys are missing that the engine alone reads, and silently assumes other values without."""
    score = config.values.get("scoring_func")
    return [
        (score != "sigmoid", f"scoring_func {score!r}: must be 'sigmoid' in this family"),
        (not config.flag("use_routing_bias"), "use_routing_bias: must be true in this family"),
        ("rotary_dim" not in config, "there is no rotary_dim: the engine needs it"),
    ]


def _gpt_oss_faults(config: Fields) -> Faults:
    """Return whether keys have values that the engine does not read, or are missing, and the engine needs them."""
    rope = config.table("rope_parameters").values or config.table("rope_scaling").values
    needed = ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow")
    missing = [key for key in needed if key not in rope]
    kind = rope.get("rope_type", rope.get("type"))
    return [
        (kind != "yarn", f"rope_type {kind!r}: must be 'yarn' in this family"),
        (bool(missing), f"the yarn rotary scaling has no {missing[:1]}: the engine needs it"),
        _fixed_fault(config, "swiglu_alpha", 1.702, "the engine computes no other"),
        _fixed_fault(config, "swiglu_limit", 7.0, "the engine computes no other"),
    ]


def _latent_faults(config: Fields) -> Faults:
    """Return the faults of every family with latent attention and experts."""
    frequency = config.values.get("moe_layer_freq", 1)
    rotary = config.values.get("qk_rope_head_dim")
    both = config.size("qk_nope_head_dim") + config.size("qk_rope_head_dim")
    return [
        (frequency != 1, f"moe_layer_freq {frequency}: every layer after the dense layers has experts here"),
        (not config.flag("rope_interleave", default=True), "rope_interleave false: rotary pairs are neighbours here"),
        *_size_faults(config, {"head_dim": rotary, "qk_head_dim": both}),
    ]


def _size_faults(config: Fields, follow: Mapping[str, object]) -> Faults:
    """Return whether sizes disagree that follow from others in this family, and that transformers reads."""
    return [
        (key in config and config.values[key] != value, f"{key} {str(config.values.get(key))[:SHOWN]}: must be {value}")
        for key, value in follow.items()
    ]


OF_FAMILY: Mapping[str, Callable[[Fields], Faults]] = {
    **dict.fromkeys(("qwen2", "qwen3", "qwen2_moe", "qwen3_moe"), _qwen_faults),
    **dict.fromkeys(("qwen3_next", "qwen3_5_text"), _gated_delta_faults),
    "qwen3_5_moe_text": _sparse_gated_delta_faults,
    **dict.fromkeys(("deepseek_v2", "deepseek_v3"), _deepseek_faults),
    "ernie4_5_moe": _ernie_faults,
    "glm4_moe_lite": _glm_lite_faults,
    "minimax_m2": _minimax_faults,
    "gpt_oss": _gpt_oss_faults,
}
"""The further faults of single families."""
