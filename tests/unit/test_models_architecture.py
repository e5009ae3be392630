import json
import math
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from transformers import CONFIG_MAPPING

from megarl.models.architecture import hf_shapes, read_architecture
from megarl.models.experts import Experts
from megarl.models.families import FAMILIES
from megarl.models.flops import active_weights
from megarl.models.rotary import OTHER_NAMES, RopeScaling, Yarn
from tests.support.tiny import SIZES, VARIANTS, write_checkpoint

LLAMA = {**SIZES, "model_type": "llama", "hidden_act": "silu"}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {
    "type": "yarn",
    "factor": 40,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 4096,
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_shapes_are_those_of_the_checkpoint_transformers_writes(variant, tmp_path):
    directory = write_checkpoint(tmp_path, variant)
    shapes = hf_shapes(read_architecture(json.loads((directory / "config.json").read_text())))
    stored = load_file(directory / "model.safetensors")
    assert dict(shapes) == {name: tuple(tensor.shape) for name, tensor in stored.items()}
    layers = [name.split(".")[2] for name in shapes if ".layers." in name]
    assert layers == sorted(layers)


FAMILY_NEEDS: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": None},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "deepseek_v3": {"topk_method": "noaux_tc", "scoring_func": "sigmoid"},
    "glm4_moe": {"num_attention_heads": 4, "num_key_value_heads": 2},
    "gpt_neox": {"num_attention_heads": 4},
    "gpt_oss": {"rope_parameters": VARIANTS["gpt_oss"]["rope_parameters"]},
    "phi3": {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0},
    "gemma3_text": {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0},
    "minimax_m2": {
        "bos_token_id": 1,
        "eos_token_id": 2,
        "rotary_dim": 64,
        "scoring_func": "sigmoid",
        "use_routing_bias": True,
    },
    "qwen3_next": {"num_hidden_layers": 4},
    "qwen3_5_text": {"num_hidden_layers": 4},
    "qwen3_5_moe_text": {"num_hidden_layers": 4},
    "olmo2": {"eos_token_id": 2},
    "olmo3": {"eos_token_id": 2},
    "smollm3": {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_silence_means_what_transformers_assumes(family):
    required = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    config: dict[str, Any] = {key: SIZES[key] for key in required} | {"model_type": family, "num_attention_heads": 32}
    config |= FAMILY_NEEDS.get(family, {})
    theirs = CONFIG_MAPPING[family](**config)
    assert read_architecture(config) == read_architecture(theirs.to_dict() | FAMILY_NEEDS.get(family, {}))
    rope = theirs.rope_parameters.get("full_attention", theirs.rope_parameters)
    assert read_architecture(config).rope_theta == rope["rope_theta"]


def test_deepseek_v3_is_what_its_authors_publish():
    """The sizes of DeepSeek-V3's config.json, with its own `type: yarn`."""
    published = CONFIG_MAPPING["deepseek_v3"]().to_dict() | FAMILY_NEEDS["deepseek_v3"]
    published["rope_parameters"] = {"rope_theta": 10000.0, **YARN}
    architecture = read_architecture(published)
    assert architecture.rope_scaling == Yarn(
        factor=40.0, original_max_position_embeddings=4096, mscale=1.0, mscale_all_dim=1.0
    )
    assert architecture.experts == Experts(
        num_experts=256,
        top_k=8,
        ffn_hidden_size=2048,
        shared_ffn_hidden_size=2048,
        first_dense_layers=3,
        score="sigmoid",
        scaling=2.5,
        num_groups=8,
        top_k_groups=4,
        router_bias=True,
    )
    assert sum(math.prod(shape) for shape in hf_shapes(architecture).values()) == 671_026_419_200  # "671 B", no MTP


def test_qwen3_next_is_as_large_as_its_name():
    architecture = read_architecture(CONFIG_MAPPING["qwen3_next"]().to_dict())
    assert [layer for layer in range(48) if architecture.kind(layer).attention == "full"] == list(range(3, 48, 4))
    assert sum(math.prod(shape) for shape in hf_shapes(architecture).values()) == 79_674_391_296  # "80B"
    assert active_weights(architecture) + 2 * 151936 * 2048 == pytest.approx(3.9e9, rel=0.02)  # "A3B", embeddings aside


def test_kimi_k2_is_read_as_deepseek_v3():
    sizes = {"n_routed_experts": 384, "num_attention_heads": 64, "num_key_value_heads": 64, "vocab_size": 163840}
    published = CONFIG_MAPPING["deepseek_v3"](first_k_dense_replace=1, n_group=1, topk_group=1, **sizes).to_dict()
    published |= FAMILY_NEEDS["deepseek_v3"] | {"architectures": ["DeepseekV3ForCausalLM"]}
    architecture = read_architecture(published | {"model_type": "kimi_k2"})
    assert architecture == read_architecture(published)
    assert sum(math.prod(shape) for shape in hf_shapes(architecture).values()) == 1_026_408_232_448  # "1 T"


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 5e5, "rope_scaling": LLAMA3_ROPE},
        {"rope_parameters": {"rope_theta": 5e5, **LLAMA3_ROPE}},
    ],
)
def test_old_and_new_rotary_settings_mean_the_same(rope):
    architecture = read_architecture(LLAMA | rope)
    assert architecture.rope_theta == 5e5
    assert architecture.rope_scaling == RopeScaling(factor=32.0)


SCORES = {"architectures": ["LlamaForSequenceClassification"], "num_labels": 1}


def test_sequence_classifier_replaces_lm_head_with_scalar_head():
    model = read_architecture(LLAMA | SCORES | {"tie_word_embeddings": True})
    policy = read_architecture(LLAMA | {"architectures": ["LlamaForCausalLM"], "num_labels": 1})
    assert model == policy.with_scalar_head()
    assert list(hf_shapes(model).items())[-1] == ("score.weight", (1, model.hidden_size))
    assert list(hf_shapes(policy).items())[-1] == ("lm_head.weight", (model.vocab_size, model.hidden_size))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "gpt2"}, "model_type is gpt2; known are llama, mistral, qwen2, qwen3"),
        ({"sliding_window": 128}, "sliding_window 128"),
        ({"model_type": "mistral", "sliding_window": 0}, "sliding_window 0"),
        ({"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 16}, "sliding_window 16"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_type 'linear'"),
        ({"rope_scaling": LLAMA3_ROPE | {"low_freq_factor": 2.0}}, "Megatron-Core computes only"),
        ({"rope_scaling": {"rope_type": "llama3"}}, "has no 'factor'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"rotary_pct": 0.25}, "rotary_pct: vLLM reads it as partial_rotary_factor"),
        ({"rotary_emb_fraction": 0.25}, "rotary_emb_fraction: vLLM reads it as partial_rotary_factor"),
        ({"rotary_emb_base": 500.0}, "rotary_emb_base: vLLM reads it as rope_theta"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"attention_bias": True}, "attention_bias"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ({"num_key_value_heads": 3}, "does not divide by num_key_value_heads 3"),
        ({"vocab_size": None}, "has no vocab_size"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "num_labels 2"),
        (SCORES | {"id2label": {"0": "bad", "1": "so-so", "2": "good"}}, "num_labels 3"),
    ],
)
def test_what_we_cannot_compute_is_refused_by_name(change, message):
    with pytest.raises(ValueError, match=message):
        read_architecture(LLAMA | change)


@pytest.mark.parametrize(
    ("variant", "change", "message"),
    [
        (
            "glm4_moe",
            {"n_routed_experts": None, "num_local_experts": 8},
            "num_local_experts and n_routed_experts differ",
        ),
        ("gpt_neox", {"attention_bias": False}, "attention_bias: must be true"),
        ("gpt_neox", {"partial_rotary_factor": 0.5}, "write rotary_pct"),
        ("gpt_neox", {"rotary_pct": 0.1}, "must give an even part of the 32 numbers"),
        ("glm4_moe_lite", {"mlp_layer_types": ["sparse", "dense"]}, "mlp_layer_types"),
        ("smollm3", {"no_rope_layers": [1]}, "no_rope_layers"),
        ("phi3", {"rope_scaling": {"type": "longrope"}}, "rope_type 'longrope'"),
        ("qwen3_moe", {"decoder_sparse_step": 2}, "decoder_sparse_step 2"),
        ("qwen3_moe", {"mlp_only_layers": [1]}, r"mlp_only_layers \[1\]: only the first"),
        ("qwen2_moe", {"shared_expert_intermediate_size": 0}, "always has a shared expert"),
        ("deepseek_v2", {"topk_method": "greedy", "n_group": 2}, "n_group 2"),
        ("deepseek_v2", {"topk_method": "noaux_tc"}, "topk_method 'noaux_tc'"),
        ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob"),
        ("deepseek_v2", {"scoring_func": "sigmoid"}, "scoring_func 'sigmoid'"),
        ("deepseek_v2", {"tie_word_embeddings": True}, "tie_word_embeddings"),
        ("deepseek_v2", {"moe_layer_freq": 2}, "moe_layer_freq 2"),
        ("deepseek_v3", {"scoring_func": None}, "scoring_func None: must be 'noaux_tc' and 'sigmoid'"),
        ("deepseek_v3", {"rope_interleave": False}, "rope_interleave"),
        ("deepseek_v3", {"rope_scaling": LLAMA3_ROPE}, "known are 'default', 'yarn'"),
        ("deepseek_v3", {"rope_scaling": {"type": "yarn", "factor": 4.0}}, "has no 'original_max_position_embeddings'"),
        ("deepseek_v3", {"rope_scaling": YARN | {"attention_factor": 1.0}}, "must follow from the yarn rotary scaling"),
    ],
)
def test_unsupported_expert_settings_are_refused_by_name(variant, change, message):
    with pytest.raises(ValueError, match=message):
        read_architecture(SIZES | VARIANTS[variant] | change)


def test_shared_expert_needs_no_config_of_its_own():
    """Qwen3-MoE with a shared expert, besides 8 experts, after 1 dense layer."""
    change = {"shared_expert_intermediate_size": 96, "mlp_only_layers": [0]}
    architecture = read_architecture(SIZES | VARIANTS["qwen3_moe"] | change)
    shapes = hf_shapes(architecture)
    assert shapes["model.layers.1.mlp.shared_expert.down_proj.weight"] == (64, 96)
    assert shapes["model.layers.1.mlp.shared_expert_gate.weight"] == (1, 64)
    assert [kind.is_sparse for kind in architecture.layer_kinds] == [False, True]


@pytest.mark.parametrize(
    "change",
    [
        {"model_type": "mistral", "sliding_window": 256},
        {"model_type": "qwen2", "use_sliding_window": False, "sliding_window": 16},
    ],
)
def test_a_window_that_never_cuts_is_full_attention(change):
    read_architecture(LLAMA | change)


def test_every_rotary_key_read_by_vllm_is_known() -> None:
    package = find_spec("vllm")
    assert package and package.submodule_search_locations
    source = Path(package.submodule_search_locations[0], "transformers_utils", "config.py").read_text()
    lists = re.findall(r'names = \[("(?:rope_theta|partial_rotary_factor)"[^\]]*)\]', source)
    read = {name for line in lists for name in re.findall(r'"(\w+)"', line)}
    assert len(lists) == 2
    assert read == {*OTHER_NAMES, *OTHER_NAMES.values()}
