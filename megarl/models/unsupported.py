"""Settings of a `config.json` that change the model's function and are not supported."""

from collections.abc import Iterator

from megarl.models.fields import Fields

DTYPES = ("float16", "bfloat16", "float32", "float64")


def unsupported(config: Fields) -> Iterator[str]:
    """Yield a sentence for each unsupported setting."""
    family = config.values["model_type"]
    faults = [_window_fault(config), *_block_faults(config), _dtype_fault(config)]
    if family.startswith("qwen"):
        faults += _qwen_expert_faults(config)
    elif family.startswith("deepseek"):
        faults += _deepseek_faults(config)
    for is_unsupported, fault in faults:
        if is_unsupported:
            yield f"config.json: {fault}"


Faults = list[tuple[bool, str]]


def _window_fault(config: Fields) -> tuple[bool, str]:
    window = config.values.get("sliding_window")
    default = config.values["model_type"] in ("mistral", "mixtral")
    if config.flag("use_sliding_window", default=default) and window is not None:
        windowed = config.size("sliding_window") < config.size("max_position_embeddings", most=1 << 40)
    else:
        windowed = "sliding_attention" in config.items("layer_types")
    return windowed, f"sliding_window {window}: attention is always full here; null turns it off"


def _block_faults(config: Fields) -> Faults:
    activation = config.values.get("hidden_act", "silu")
    return [
        (activation not in ("silu", "swish"), f"hidden_act {activation!r}: the feed-forward layer is SwiGLU here"),
        (config.flag("attention_bias"), "attention_bias: the output projection has no bias here"),
        (config.flag("mlp_bias"), "mlp_bias: the feed-forward layer has no bias here"),
        ("quantization_config" in config, "quantization_config: training starts from the unquantised checkpoint"),
    ]


def _dtype_fault(config: Fields) -> tuple[bool, str]:
    key = "dtype" if "dtype" in config else "torch_dtype"
    dtype = config.values.get(key, DTYPES[0])
    return dtype not in DTYPES, f"{key} {dtype!r}: must be one of {', '.join(DTYPES)}"


def _qwen_expert_faults(config: Fields) -> Faults:
    step, dense = config.values.get("decoder_sparse_step", 1), config.items("mlp_only_layers")
    alone = config.values["model_type"] == "qwen2_moe" and not config.values.get("shared_expert_intermediate_size")
    return [
        (step != 1, f"decoder_sparse_step {step}: every layer after the dense layers has experts here"),
        (dense != list(range(len(dense))), f"mlp_only_layers {dense}: only the first layers may be dense here"),
        (alone, "shared_expert_intermediate_size is 0: a qwen2_moe model always has a shared expert"),
    ]


def _deepseek_faults(config: Fields) -> Faults:
    method, groups = config.values.get("topk_method"), config.size("n_group", 1)
    score, frequency = config.values.get("scoring_func"), config.values.get("moe_layer_freq", 1)
    faults = [
        (frequency != 1, f"moe_layer_freq {frequency}: every layer after the dense layers has experts here"),
        (not config.flag("rope_interleave", default=True), "rope_interleave false: rotary pairs are neighbours here"),
        (config.flag("tie_word_embeddings"), "tie_word_embeddings: the engine does not tie this family"),
    ]
    if config.values["model_type"] == "deepseek_v3":
        # The engine takes both from config.json and silently assumes other values if they are missing.
        found = f"topk_method {method!r} and scoring_func {score!r}: must be 'noaux_tc' and 'sigmoid'"
        return [*faults, ((method, score) != ("noaux_tc", "sigmoid"), found)]
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
