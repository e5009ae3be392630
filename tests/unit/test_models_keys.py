"""Every key of config.json that an engine or transformers reads is read here, refused, or changes nothing."""

import ast
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from megarl.models.architecture import read_architecture
from megarl.models.families import FAMILIES
from megarl.platform.errors import UserError
from tests.support.tiny import SIZES, VARIANTS

ENGINE_FILES = {  # family -> files of vLLM with its classes
    "llama": ("llama",),
    "mistral": ("mistral", "llama"),
    "ministral3": ("mistral", "llama"),
    "qwen2": ("qwen2",),
    "qwen3": ("qwen3", "qwen2"),
    "mixtral": ("mixtral",),
    "qwen2_moe": ("qwen2_moe",),
    "qwen3_moe": ("qwen3_moe",),
    "qwen3_next": ("qwen3_next",),
    "qwen3_5_text": ("qwen3_5", "qwen3_next"),
    "qwen3_5_moe_text": ("qwen3_5", "qwen3_next"),
    "deepseek_v2": ("deepseek_v2",),
    "deepseek_v3": ("deepseek_v2",),
    "glm4_moe": ("glm4_moe",),
    "glm4_moe_lite": ("glm4_moe_lite", "glm4_moe", "deepseek_v2"),
    "smollm3": (),  # transformers' own classes
    "phi3": ("phi3", "llama"),
    "ernie4_5": ("ernie45", "llama"),
    "ernie4_5_moe": ("ernie45_moe",),
    "seed_oss": (),  # transformers' own classes
    "gpt_neox": (),
    "gemma3_text": ("gemma3",),
    "granite": ("granite",),
    "minimax_m2": ("minimax_m2",),
    "hunyuan_v1_dense": (),
    "olmo2": (),
    "olmo3": (),
    "gpt_oss": ("gpt_oss",),
}
ENGINE_GENERAL = {  # keys that vLLM reads of every model, in `vllm.config`
    *("sliding_window", "layer_types", "attention_chunk_size", "is_causal", "use_bidirectional_attention"),
    *("text_config", "is_encoder_decoder", "quantization_config", "compression_config", "architectures"),
    *("attn_logit_softcapping", "final_logit_softcapping"),
}
INERT = {  # key -> why another value changes no logit
    "ada_rms_norm_t_cond_dim": "read with ada_rms_norm_t_cond alone, which is refused",
    "attn_implementation": "chooses a kernel",
    "chunk_size_feed_forward": "computes the same in pieces",
    "get_text_config": "a method",
    "id2label": "names of classes; their number is read of a classifier",
    "index_head_dim": "read with index_topk alone, which is refused",
    "index_n_heads": "read with index_topk alone, which is refused",
    "index_skip_topk_offset": "read with index_topk alone, which is refused",
    "index_topk_freq": "read with index_topk alone, which is refused",
    "index_topk_pattern": "read with index_topk alone, which is refused",
    "indexer_rope_interleave": "read with index_topk alone, which is refused",
    "initializer_range": "the initial weights are those of the checkpoint",
    "label2id": "names of classes",
    "max_window_layers": "read with a window alone, which is refused",
    "name_or_path": "a name",
    "num_labels": "read of a classifier",
    "num_nextn_predict_layers": "these layers are left out, and `claims` reads their number",
    "num_mtp_layers": "another name of num_nextn_predict_layers in transformers",
    "output_attentions": "returns more",
    "output_hidden_states": "returns more",
    "output_router_logits": "returns more",
    "pretraining_tp": "computed the same in pieces, in old releases",
    "problem_type": "the loss of a classifier in transformers",
    "return_dict": "the form of the result",
    "router_aux_loss_coef": "a loss of transformers; here it is a key of the run",
    "transformers_version": "a note",
    "use_cache": "keeps keys",
}
OF_IMAGES = {
    **dict.fromkeys(("depth", "in_channels", "num_heads", "num_position_embeddings"), "read by the model of images"),
    **dict.fromkeys(("out_hidden_size", "patch_size", "spatial_merge_size"), "read by the model of images"),
    **dict.fromkeys(("temporal_patch_size", "image_token_id", "video_token_id"), "read by the model of images"),
    "vision_config": "read by the model of images",
}
INERT_IN = {
    "deepseek_v2": {
        "num_key_value_heads": "every head has its own keys; transformers fails at another number",
        "topk_group": "read with group_limited_greedy alone",
    },
    "deepseek_v3": {"num_key_value_heads": "every head has its own keys; transformers fails at another number"},
    "glm4_moe_lite": {
        "num_key_value_heads": "every head has its own keys",
        "scoring_func": "read by the engine's experts of DeepSeek alone",
        "topk_method": "read by the engine's experts of DeepSeek alone",
        "use_qk_norm": "read by the engine's attention of glm4_moe alone",
    },
    "phi3": {"original_max_position_embeddings": "read with rope_type longrope alone, which is refused"},
    "qwen3_5_text": {
        **OF_IMAGES,
        **dict.fromkeys(("moe_intermediate_size", "num_experts", "num_experts_per_tok"), "read by another class"),
        **dict.fromkeys(("norm_topk_prob", "shared_expert_intermediate_size"), "read by another class"),
    },
    "qwen3_5_moe_text": OF_IMAGES,
    "smollm3": {"use_sliding_window": "read with a window alone, which is refused"},
    "gemma3_text": {
        "image_token_id": "read by the model with images",
        "mm_tokens_per_image": "read by the model with images",
        "vision_config": "read by the model with images",
    },
    "hunyuan_v1_dense": {"eod_token_id": "a token that no class reads"},
    "minimax_m2": {
        "max_model_len": "bounds the positions that are computed ahead",
        "num_mtp_modules": "these layers are left out, and `claims` reads their number",
    },
    "seed_oss": {
        "attention_dropout": "dropout in training",
        "residual_dropout": "dropout in training",
    },
    "gpt_neox": {
        "classifier_dropout": "read by a classifier of tokens",
        "is_decoder": "a note of old releases of transformers",
    },
}


class Wrong:
    """A value that no key accepts."""


def config_of(family: str) -> dict[str, Any]:
    variant = next(name for name, changes in VARIANTS.items() if changes["model_type"] == family)
    window = {"use_sliding_window": True, "sliding_window": 4096} if family.startswith("qwen") else {}
    return SIZES | VARIANTS[variant] | window


def reads_of(file: Path) -> Iterator[str]:
    """Yield the attributes of configurations that the code of a file reads."""
    for node in ast.walk(ast.parse(file.read_text())):
        match node:
            case ast.Attribute(value=ast.Name(id=owner) | ast.Attribute(attr=owner), attr=key):
                pass
            case ast.Call(
                func=ast.Name(id="getattr" | "hasattr"),
                args=[ast.Name(id=owner) | ast.Attribute(attr=owner), ast.Constant(value=str(key)), *_],
            ):
                pass
            case _:
                continue
        if owner in ("config", "hf_config", "hf_text_config", "text_config"):
            yield key


def package(name: str) -> Path:
    spec = importlib.util.find_spec(name)
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent


def keys_of(family: str) -> set[str]:
    """Return the keys that vLLM's classes and transformers' classes of a family read."""
    engine = package("vllm") / "model_executor" / "models"
    files = [engine / f"{name}.py" for name in ENGINE_FILES[family]]
    folder = family.removesuffix("_text")
    files.append(package("transformers") / "models" / folder / f"modeling_{folder}.py")
    keys = {key for file in files for key in reads_of(file)} | CONFIG_MAPPING[family]().to_dict().keys()
    return {key.removeprefix("_") for key in keys | ENGINE_GENERAL | CONFIG_MAPPING[family].attribute_map.keys()}


def is_read(config: dict[str, Any], key: str) -> bool:
    try:
        return read_architecture(config | {key: Wrong()}) != read_architecture(config)
    except (UserError, TypeError, AttributeError):
        return True


@pytest.mark.parametrize("family", FAMILIES)
def test_every_config_key_is_read_refused_or_inert(family: str) -> None:
    config = config_of(family)
    inert = INERT | INERT_IN.get(family, {})
    keys = keys_of(family)
    assert len(keys) > 30
    assert sorted(key for key in keys if key not in inert and not is_read(config, key)) == []


def test_no_inert_key_is_read() -> None:
    reads = {
        (family, key) for family in FAMILIES for key in INERT_IN.get(family, {}) if is_read(config_of(family), key)
    }
    reads |= {(family, key) for family in FAMILIES for key in INERT if is_read(config_of(family), key)}
    assert reads == set()
    known = set().union(*(keys_of(family) for family in FAMILIES))
    assert INERT.keys() <= known


@pytest.mark.parametrize("family", FAMILIES)
def test_inert_keys_change_no_logit_of_transformers(family: str) -> None:
    values = {
        "chunk_size_feed_forward": 1,
        "max_window_layers": 1,
        "num_nextn_predict_layers": 1,
        "pretraining_tp": 2,
        "router_aux_loss_coef": 0.5,
        "use_cache": False,
    }

    def logits(changes: dict[str, Any]) -> torch.Tensor:
        settings = config_of(family) | changes
        config = CONFIG_MAPPING[settings.pop("model_type")](**settings)
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        with torch.no_grad():
            return model(torch.arange(24).view(2, 12) % config.vocab_size).logits

    assert torch.equal(logits({}), logits(values))
    assert not torch.equal(logits({}), logits({FAMILIES[family].key("rms_norm_eps"): 0.5}))


LLAMA = config_of("llama")
NEW_ROPE = {"rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}}
LONG = VARIANTS["ministral3"]["rope_parameters"]
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "mscale_all_dim": 1.0}


@pytest.mark.parametrize(
    ("family", "change", "named"),
    [
        ("llama", {"logit_scale": 2}, "logit_scale 2"),
        ("llama", {"logit_scale": "1.0"}, "logit_scale 1.0"),
        ("llama", {"bias": True}, "bias True"),
        ("llama", {"mlp_bias": True}, "mlp_bias"),
        ("llama", {"is_causal": False}, "is_causal False"),
        ("llama", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping 50"),
        ("llama", {"final_logit_softcapping": 30.0}, "final_logit_softcapping 30"),
        ("llama", {"attention_dropout": 0.5}, "attention_dropout 0.5"),
        ("llama", {"eos_token_id": -1}, "eos_token_id -1"),
        ("llama", {"eos_token_id": [2, -1]}, "eos_token_id"),
        ("llama", {"sliding_window": 16}, "sliding_window 16"),
        ("llama", {"index_topk": None}, "index_topk None"),
        ("llama", {"layer_types": ["chunked_attention"] * 2}, "layer_types"),
        ("llama", {"architectures": ["GemmaForCausalLM"]}, "architectures"),
        ("llama", {"rope_theta": 0}, "rope_theta 0"),
        ("llama", {"rope_theta": -1}, "rope_theta -1"),
        ("llama", {"rope_theta": "10000"}, "rope_theta '10000'"),
        ("llama", NEW_ROPE | {"rope_theta": 0}, "rope_theta is 0, and 10000.0 in the rotary settings"),
        ("llama", NEW_ROPE | {"rope_theta": "10000"}, "rope_theta is '10000'"),
        ("llama", {"rope_parameters": {"rope_theta": "10000"}}, "rope_theta '10000'"),
        ("llama", {"rope_parameters": {"rope_theta": 1e4, "mrope_section": [1]}}, "rope_parameters.mrope_section"),
        ("llama", {"rope_parameters": {"rope_theta": 1e4, "use_fope": True}}, "use_fope is not read"),
        ("llama", {"rope_parameters": {"rope_theta": 1e4, "factor": 8.0}}, "factor is not read"),
        ("llama", {"rope_scaling": {"type": "linear", "factor": -1}}, "rope_type 'linear'"),
        ("llama", {"rope_scaling": {"rope_type": "evil"}}, "rope_type 'evil'"),
        ("llama", NEW_ROPE | {"rope_scaling": {"rope_type": "evil"}}, "rope_scaling and rope_parameters differ"),
        ("llama", {"rope_scaling": {"rope_type": "default", "type": "linear"}}, "type and rope_type"),
        ("smollm3", {"use_sliding_window": False, "sliding_window": 16}, "sliding_window 16"),
        ("mistral", {"sliding_window": 16, "layer_types": ["full_attention"] * 2}, "layer_types"),
        ("gemma3_text", {"layer_types": ["full_attention"]}, "must have one kind for each of the 2 layers"),
        ("gemma3_text", {"layer_types": ["linear_attention"] * 2}, "layer_types"),
        ("gemma3_text", {"sliding_window": None, "rope_parameters": {"other": {}}}, "rope_parameters.other"),
        ("gemma3_text", {"rope_parameters": {"sliding_attention": {"rope_type": "linear"}}}, "not scaled"),
        ("mistral", {"llama_4_scaling": {"beta": 1.0}}, "llama_4_scaling"),
        ("qwen2", {"qk_norm": True}, "qk_norm True"),
        ("qwen2", {"dual_chunk_attention_config": {}}, "dual_chunk_attention_config"),
        ("mixtral", {"num_experts": 5}, "differ: both are the number of experts"),
        ("granite", {"layer_types": ["full_attention"] * 2}, "layer_types"),
        ("ministral3", {"rope_parameters": {"rope_type": "default"}}, "no llama_4_scaling_beta"),
        ("ministral3", {"rope_parameters": LONG | {"attention_factor": 1.5}}, "must follow from the yarn"),
        ("ministral3", {"rope_parameters": {**LONG, "mscale": None}}, "mscale and mscale_all_dim together"),
        ("ernie4_5_moe", {"moe_layer_interval": 2}, "moe_layer_interval 2"),
        ("ernie4_5_moe", {"moe_layer_end_index": 0}, "moe_layer_end_index 0"),
        ("ernie4_5_moe", {"moe_norm_min": 0.5}, "moe_norm_min 0.5: the engine computes no other; write 1e-12"),
        ("ernie4_5_moe", {"num_experts_per_tok": 3}, "num_experts_per_tok 3: must be 2"),
        ("ernie4_5_moe", {"num_experts": 4}, "differ: both are the number of experts"),
        ("minimax_m2", {"use_routing_bias": False}, "use_routing_bias"),
        ("minimax_m2", {"scoring_func": None}, "scoring_func None"),
        ("minimax_m2", {"rotary_dim": None}, "rotary_dim"),
        ("minimax_m2", {"partial_rotary_factor": 0.25}, "partial_rotary_factor is not 0.5"),
        ("qwen3_next", {"output_gate_type": "sigmoid"}, "output_gate_type sigmoid"),
        ("qwen3_next", {"attn_output_gate": False}, "attn_output_gate False"),
        ("qwen3_next", {"layer_scale": True}, "layer_scale True"),
        ("qwen3_next", {"layer_types": ["linear_attention"] * 2}, "at least one full_attention"),
        ("qwen3_next", {"linear_num_value_heads": 3}, "does not divide by linear_num_key_heads 2"),
        ("qwen3_5_moe_text", {"norm_topk_prob": False}, "norm_topk_prob False"),
        ("qwen3_5_moe_text", {"mlp_only_layers": [0]}, "mlp_only_layers [0]"),
        ("qwen3_next", {"shared_expert_intermediate_size": 0}, "shared_expert_intermediate_size is 0"),
        ("mixtral", {"router_jitter_noise": 0.1}, "router_jitter_noise 0.1"),
        ("deepseek_v3", {"num_local_experts": 4}, "differ: both are the number of experts"),
        ("deepseek_v3", {"head_dim": 16}, "head_dim 16: must be 32"),
        ("deepseek_v3", {"moe_router_dtype": "float32"}, "moe_router_dtype float32"),
        ("deepseek_v3", {"rope_scaling": YARN | {"factor": 0}}, "factor 0"),
        ("deepseek_v3", {"rope_scaling": YARN | {"truncate": False}}, "truncate false"),
    ],
)
def test_unsupported_config_value_is_refused_by_name(family: str, change: dict[str, Any], named: str) -> None:
    with pytest.raises(UserError) as refused:
        read_architecture(config_of(family) | change)
    assert named in str(refused.value)


@pytest.mark.parametrize(
    "change",
    [
        NEW_ROPE | {"rope_theta": 10000},
        {"rope_scaling": {"type": "default"}, "rope_theta": 1e4},
        {"logit_scale": 1, "attention_dropout": 0, "is_causal": True, "bias": None},
        {"architectures": ["LlamaForCausalLM"], "layer_types": ["full_attention"] * 2, "pad_token_id": -1},
    ],
)
def test_a_value_that_changes_nothing_is_accepted(change: dict[str, Any]) -> None:
    assert read_architecture(LLAMA | change) == read_architecture(LLAMA | {"rope_theta": 1e4})


@pytest.mark.parametrize("family", [name for name, traits in FAMILIES.items() if isinstance(traits.qkv_bias, bool)])
def test_attention_biases_follow_model_family(family: str) -> None:
    """vLLM's class of llama makes biases if the key is there, and that of qwen2 makes them always."""
    other = not FAMILIES[family].qkv_bias
    with pytest.raises(UserError, match=f"qkv_bias {other}: biases of queries, keys and values follow from model_type"):
        read_architecture(config_of(family) | {"qkv_bias": other})
