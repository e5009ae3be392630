import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from megarl.models.architecture import RopeScaling, hf_shapes, read_architecture
from tests.tiny import SIZES, VARIANTS

LLAMA = {**SIZES, "model_type": "llama", "hidden_act": "silu"}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_shapes_are_those_of_the_model_transformers_builds(variant):
    config = CONFIG_MAPPING[VARIANTS[variant]["model_type"]](**SIZES | VARIANTS[variant])
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    shapes = hf_shapes(read_architecture(config.to_dict()))
    assert dict(shapes) == {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    layers = [name.split(".")[2] for name in shapes if ".layers." in name]
    assert layers == sorted(layers)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_silence_means_what_transformers_assumes(family):
    required = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    config = {key: SIZES[key] for key in required} | {"model_type": family, "num_attention_heads": 32}
    if family == "mistral":
        config |= {"sliding_window": None}
    theirs = CONFIG_MAPPING[family](**config)
    ours = read_architecture(config)
    assert ours.num_key_value_heads == theirs.num_key_value_heads
    assert ours.head_dim == (getattr(theirs, "head_dim", None) or theirs.hidden_size // 32)
    assert ours.rms_norm_eps == theirs.rms_norm_eps
    assert ours.max_position_embeddings == theirs.max_position_embeddings
    assert ours.tied_embeddings == theirs.tie_word_embeddings
    assert ours.rope_theta == theirs.rope_parameters["rope_theta"]
    assert ours.rope_scaling is None


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


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "gpt2"}, "model_type is gpt2; known are llama, mistral, qwen2, qwen3"),
        ({"model_type": "mistral", "sliding_window": 128}, "sliding_window 128"),
        ({"model_type": "mistral", "max_position_embeddings": 32768}, "sliding_window 4096"),
        ({"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 16}, "sliding_window 16"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_type 'linear'"),
        ({"rope_scaling": LLAMA3_ROPE | {"low_freq_factor": 2.0}}, "Megatron-Core computes only"),
        ({"rope_scaling": {"rope_type": "llama3"}}, "has no 'factor'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"attention_bias": True}, "attention_bias"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ({"num_key_value_heads": 3}, "does not divide by num_key_value_heads 3"),
        ({"vocab_size": None}, "has no vocab_size"),
    ],
)
def test_what_we_cannot_compute_is_refused_by_name(change, message):
    with pytest.raises(ValueError, match=message):
        read_architecture(LLAMA | change)


@pytest.mark.parametrize(
    "change",
    [
        {"model_type": "mistral", "sliding_window": 256},
        {"model_type": "qwen2", "use_sliding_window": False, "sliding_window": 16},
    ],
)
def test_a_window_that_never_cuts_is_full_attention(change):
    read_architecture(LLAMA | change)
