"""The model families by `model_type`: their traits, and the names in their checkpoints."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class ExpertNames:
    """The names of the parts of a layer with experts, in the checkpoint of a family."""

    block: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    shared: str = "shared_expert"
    gate_up: str | None = None  # of the rows of gate and up in turn. Then one parameter has all experts, transposed


@dataclass(frozen=True, kw_only=True)
class Family:
    """The traits that a `model_type` implies. `defaults` are transformers' values of fields missing in config.json."""

    qkv_bias: bool | str = False  # or the key of config.json that decides
    qk_norm: bool | str = False  # the same
    wide_qk_norm: bool = False  # one norm over all heads of the queries, and one over those of the keys
    late_qk_norm: bool = False  # queries and keys are normalised after their rotation
    whole_qk_norm: bool = False  # each rank of an engine has the complete norms
    latent: bool = False
    gated_attention: bool = False  # each head of `q_proj` has a query, then a gate of the head's output
    linear_sections: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Projection of linear attention -> its sections, as in `LinearAttention`. Empty: no layer has linear attention."""
    experts: ExpertNames | None = None
    clamped_glu: bool = False  # experts have biases and compute (up + 1) * quick_gelu(gate), both clamped (gpt-oss)
    sigmoid_router: bool = False  # experts score by a sigmoid, and a bias affects their choice, as in DeepSeek-V3
    router_bias_is_matrix: bool = False  # of one row, in the checkpoint
    float32_router: bool = False  # the engine keeps the router's weight in float32
    predicts_ahead: bool | str = False  # checkpoints may have more layers, which predict several tokens ahead
    """Or the beginning of the names of their tensors."""
    can_tie: bool = True  # the engine can share the embedding with the output layer
    norm: Literal["RMSNorm", "LayerNorm"] = "RMSNorm"  # LayerNorm has a bias
    norm_eps: float | None = None  # the only one that the engine computes; None: that of config.json
    centred_norm: bool = False  # norms multiply by 1 + weight
    input_norms: bool = True  # the inputs of attention and feed-forward layer are normalised
    output_norms: bool = False  # the outputs of attention and feed-forward layer are normalised before they are added
    sinks: bool = False  # each query head has a learnt logit in the denominator of its softmax
    score_size: str | None = None  # the key of config.json whose root divides the scores of attention; None: head_dim
    multipliers: bool = False  # config.json has factors of embeddings, branches, scores and logits (Granite)
    scaled_embedding: bool = False  # embeddings are multiplied by the root of the hidden size
    linear_bias: bool = False  # in both projections of the attention and of the feed-forward layer
    gated: bool = True  # the feed-forward layer is down(act(gate x) * up x), else down(act(up x))
    rope_theta: float = 10000.0  # unless config.json says another
    rope_types: tuple[str, ...] = ("llama3", "yarn")  # supported scalings of positions, besides none
    local_rope_theta: float | None = None  # of layers with a window, if they rotate otherwise
    scaled_queries: bool = False  # queries are multiplied by a factor that grows with their position (Llama 4)
    parallel_residual: bool = False  # unless `use_parallel_residual` is false in config.json
    rotary_fraction: float | None = None  # of a head's numbers, unless config.json says another; None: all, always
    windows: Literal["refused", "all layers", "some layers", "every other layer"] = "refused"  # whose attention has one
    full_every: int = 1  # of "some layers": each such layer has no window, if config.json has no `layer_types`
    rotates_by_layer: bool = False  # `no_rope_layers` of config.json names layers without rotation
    places_images: bool = False  # rotary settings place images, in models that see any; text has plain positions
    rotary_neighbours: bool = False  # neighbouring numbers of a head rotate together, else those of its two halves
    fused_qkv: bool = False  # one parameter holds [query ; key ; value] of each head, head after head
    model_class: str | None = None  # of transformers, if its name does not follow from `model_type`
    activations: tuple[str, ...] = ("silu", "swish")  # possible values of `hidden_act`
    absent: tuple[str, ...] = ()  # keys that the engine takes for a model that is not supported
    unread: tuple[str, ...] = ()  # keys of dropout in training that published files contain
    names_of_keys: Mapping[str, str] = field(default_factory=dict)  # a key of config.json -> its name in this family
    renamed: Mapping[str, str] = field(default_factory=dict)  # part of a parameter's name in Llama -> in this family
    """Parameters of a layer that get one name are stacked in it."""
    engine_names: Mapping[str, str] = field(default_factory=dict)  # part of a parameter's name -> in the engine
    defaults: Mapping[str, object] = field(default_factory=dict)

    @property
    def norm_parts(self) -> tuple[str, ...]:
        """The parameters of a norm."""
        return ("weight", "bias") if self.norm == "LayerNorm" else ("weight",)

    @property
    def linear_parts(self) -> tuple[str, ...]:
        """The parameters of the output projection and of each projection of the feed-forward layer."""
        return ("weight", "bias") if self.linear_bias else ("weight",)

    def key(self, usual: str) -> str:
        """Return the name of a key of config.json, given its name in Llama's."""
        return self.names_of_keys.get(usual, usual)

    def parameter_name(self, usual: str) -> str:
        """Return the name of a parameter in the checkpoint, or its beginning, given the name that Llama has for it."""
        return _renamed(usual, self.renamed)

    def engine_name(self, name: str) -> str:
        """Return the name in the engine of a parameter of the checkpoint."""
        return _renamed(name, self.engine_names)


def _renamed(name: str, parts: Mapping[str, str]) -> str:
    for part, other in parts.items():
        name = name.replace(part, other)
    return name


ALIASES = {"kimi_k2": "deepseek_v3"}
"""Other names of a family. megarl exports models under the name of the family, which transformers knows."""

QWEN_DEFAULTS = {"num_key_value_heads": 32, "max_position_embeddings": 32768}
DEEPSEEK = {
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
LINEAR_HEADS = {
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
LINEAR_EXPERTS = LINEAR_HEADS | {
    "num_key_value_heads": 2,
    "head_dim": 256,
    "max_position_embeddings": 32768,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "norm_topk_prob": True,
}
GLM = {
    "rms_norm_eps": 1e-5,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
}
SHARED_EXPERTS = ExpertNames(shared="shared_experts")
SPARSE_BLOCK = ExpertNames(block="block_sparse_moe", gate="w1", up="w3", down="w2")
LATENT = Family(latent=True, rope_types=("yarn",), can_tie=False, experts=SHARED_EXPERTS)
OUTPUT_NORMS = {
    "attention_output_layernorm": "post_attention_layernorm",
    "feed_forward_output_layernorm": "post_feedforward_layernorm",
}
QWEN3_5 = Family(
    qk_norm=True,
    centred_norm=True,
    gated_attention=True,
    rotary_fraction=0.25,
    places_images=True,
    linear_sections={"in_proj_qkv": ("q", "k", "v"), "in_proj_z": ("z",), "in_proj_b": ("b",), "in_proj_a": ("a",)},
    predicts_ahead="mtp.",
    model_class="Qwen3_5ForCausalLM",
    defaults=LINEAR_HEADS | {"num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 32768},
)
OLMO2 = Family(
    qk_norm=True,
    wide_qk_norm=True,
    whole_qk_norm=True,
    input_norms=False,
    output_norms=True,
    renamed=OUTPUT_NORMS,
    defaults={"max_position_embeddings": 2048, "rms_norm_eps": 1e-5},
)

FAMILIES: Mapping[str, Family] = {
    "llama": Family(defaults={"max_position_embeddings": 2048}),
    "mistral": Family(
        windows="all layers",
        model_class="MistralForCausalLM",
        defaults={"num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096},
    ),
    "qwen2": Family(qkv_bias=True, defaults=QWEN_DEFAULTS),
    "qwen3": Family(qk_norm=True, defaults=QWEN_DEFAULTS | {"head_dim": 128}),
    "mixtral": Family(
        windows="all layers",
        rope_theta=1e6,
        experts=SPARSE_BLOCK,
        defaults={
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
        },
    ),
    "qwen2_moe": Family(
        qkv_bias=True,
        experts=ExpertNames(),
        defaults={
            "num_key_value_heads": 16,
            "max_position_embeddings": 32768,
            "num_experts": 60,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632,
        },
    ),
    "qwen3_moe": Family(
        qk_norm=True,
        experts=ExpertNames(),
        defaults={
            "num_key_value_heads": 4,
            "max_position_embeddings": 32768,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
        },
    ),
    "qwen3_next": replace(
        QWEN3_5,
        places_images=False,
        linear_sections={"in_proj_qkvz": ("qkvz",), "in_proj_ba": ("ba",)},
        model_class=None,
        experts=ExpertNames(),
        defaults=LINEAR_EXPERTS,
    ),
    "qwen3_5_text": QWEN3_5,
    "qwen3_5_moe_text": replace(
        QWEN3_5,
        experts=ExpertNames(),
        model_class="Qwen3_5MoeForCausalLM",
        defaults=LINEAR_EXPERTS
        | {
            "intermediate_size": 512,  # of no layer
            "num_experts": 256,
            "num_experts_per_tok": 8,
        },
    ),
    "deepseek_v2": replace(
        LATENT,
        defaults=DEEPSEEK
        | {
            "max_position_embeddings": 2048,
            "n_routed_experts": 64,
            "n_shared_experts": 2,
            "moe_intermediate_size": 1407,
            "topk_method": "greedy",
        },
    ),
    "deepseek_v3": replace(
        LATENT,
        sigmoid_router=True,
        predicts_ahead=True,
        defaults=DEEPSEEK
        | {
            "max_position_embeddings": 4096,
            "n_routed_experts": 256,
            "n_shared_experts": 1,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 2048,
            "first_k_dense_replace": 3,
            "n_group": 8,
            "topk_group": 4,
            "routed_scaling_factor": 2.5,
            "norm_topk_prob": True,
        },
    ),
    "glm4_moe": Family(
        qkv_bias="attention_bias",
        qk_norm="use_qk_norm",
        rotary_fraction=0.5,
        experts=SHARED_EXPERTS,
        sigmoid_router=True,
        float32_router=True,
        predicts_ahead=True,
        can_tie=False,
        defaults=GLM
        | {
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "n_routed_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 1408,
        },
    ),
    "glm4_moe_lite": replace(
        LATENT,
        sigmoid_router=True,
        float32_router=True,
        predicts_ahead=True,
        defaults=GLM
        | {
            "kv_lora_rank": 512,
            "q_lora_rank": 768,
            "qk_nope_head_dim": 192,
            "qk_rope_head_dim": 64,
            "v_head_dim": 256,
            "max_position_embeddings": 202752,
            "n_routed_experts": 64,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1536,
            "routed_scaling_factor": 1.8,
        },
    ),
    "gemma3_text": Family(
        qk_norm=True,
        centred_norm=True,
        output_norms=True,
        scaled_embedding=True,
        score_size="query_pre_attn_scalar",
        windows="some layers",
        full_every=6,
        rope_theta=1e6,
        local_rope_theta=10000.0,
        rope_types=("linear",),
        model_class="Gemma3ForCausalLM",
        activations=("gelu_pytorch_tanh",),
        names_of_keys={"hidden_act": "hidden_activation"},
        renamed={"post_attention_layernorm": "pre_feedforward_layernorm", **OUTPUT_NORMS},
        defaults={
            "vocab_size": 262208,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "max_position_embeddings": 131072,
            "query_pre_attn_scalar": 256,
            "sliding_window": 4096,
            "tie_word_embeddings": True,
        },
    ),
    "olmo2": OLMO2,
    "olmo3": replace(
        OLMO2,
        windows="some layers",
        full_every=4,
        rope_theta=500000.0,
        local_rope_theta=500000.0,
        rope_types=("yarn",),
        defaults={**OLMO2.defaults, "sliding_window": 4096},
    ),
    "hunyuan_v1_dense": Family(
        qk_norm=True,
        late_qk_norm=True,
        qkv_bias="attention_bias",
        rope_types=("dynamic",),
        model_class="HunYuanDenseV1ForCausalLM",
        renamed={"self_attn.q_norm": "self_attn.query_layernorm", "self_attn.k_norm": "self_attn.key_layernorm"},
        defaults={"max_position_embeddings": 2048, "rms_norm_eps": 1e-5},
    ),
    "granite": Family(
        multipliers=True,
        absent=("layer_types", "layer_rope_theta", "attention_sinks"),
        defaults={"max_position_embeddings": 2048},
    ),
    "minimax_m2": Family(
        qk_norm=True,
        wide_qk_norm=True,
        rotary_fraction=1.0,
        rope_theta=5e6,
        experts=SPARSE_BLOCK,
        sigmoid_router=True,
        float32_router=True,
        predicts_ahead=True,
        renamed={".gate.e_score_correction_bias": ".e_score_correction_bias"},
        defaults={
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 196608,
            "num_experts_per_tok": 8,
            "num_local_experts": 256,
        },
    ),
    "smollm3": Family(
        rotates_by_layer=True,
        rope_theta=2000000.0,
        defaults={"num_key_value_heads": 4, "max_position_embeddings": 32768, "tie_word_embeddings": True},
    ),
    "ministral3": Family(
        windows="all layers",
        rope_theta=1e6,
        rope_types=("yarn",),
        scaled_queries=True,
        model_class="Ministral3ForCausalLM",
        defaults={
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 262144,
            "rms_norm_eps": 1e-5,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e6,
                "factor": 16.0,
                "original_max_position_embeddings": 16384,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.1,
            },
        },
    ),
    "phi3": Family(
        windows="all layers",
        rotary_fraction=1.0,
        renamed={
            "self_attn.q_proj": "self_attn.qkv_proj",
            "self_attn.k_proj": "self_attn.qkv_proj",
            "self_attn.v_proj": "self_attn.qkv_proj",
            "mlp.gate_proj": "mlp.gate_up_proj",
            "mlp.up_proj": "mlp.gate_up_proj",
        },
        defaults={"max_position_embeddings": 4096, "rms_norm_eps": 1e-5},
    ),
    "ernie4_5": Family(
        rotary_neighbours=True,
        rope_theta=500000.0,
        defaults={
            "num_key_value_heads": 2,
            "head_dim": 128,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": True,
        },
    ),
    "ernie4_5_moe": Family(
        rotary_neighbours=True,
        rope_theta=500000.0,
        experts=SHARED_EXPERTS,
        router_bias_is_matrix=True,
        float32_router=True,
        predicts_ahead="model.mtp_",
        names_of_keys={"num_experts_per_tok": "moe_k"},
        renamed={".gate.e_score_correction_bias": ".moe_statics.e_score_correction_bias"},
        engine_names={".moe_statics.": ".gate."},
        defaults={
            "num_key_value_heads": 4,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": True,
            "moe_num_experts": 64,
            "moe_k": 6,
            "moe_num_shared_experts": 2,
            "moe_intermediate_size": 1536,
            "moe_layer_start_index": 1,
        },
    ),
    "seed_oss": Family(
        qkv_bias="attention_bias",
        unread=("attention_dropout", "residual_dropout"),
        defaults={
            "num_key_value_heads": 8,
            "max_position_embeddings": 524288,
            "head_dim": 128,
            "attention_bias": True,
        },
    ),
    "gpt_oss": Family(
        qkv_bias=True,
        linear_bias=True,
        sinks=True,
        clamped_glu=True,
        can_tie=False,
        norm_eps=1e-5,
        windows="every other layer",
        full_every=2,
        rope_theta=150000.0,
        rope_types=("yarn",),
        experts=ExpertNames(gate_up="gate_up_proj"),
        renamed={"mlp.gate.": "mlp.router."},
        engine_names={"self_attn.": "attn.", "embed_tokens": "embedding"},
        defaults={
            "num_key_value_heads": 8,
            "head_dim": 64,
            "max_position_embeddings": 131072,
            "sliding_window": 128,
            "rms_norm_eps": 1e-5,
            "num_local_experts": 128,
            "num_experts_per_tok": 4,
        },
    ),
    "gpt_neox": Family(
        qkv_bias=True,
        norm="LayerNorm",
        linear_bias=True,
        gated=False,
        parallel_residual=True,
        rotary_fraction=0.25,
        fused_qkv=True,
        activations=("gelu", "gelu_fast", "gelu_new", "gelu_pytorch_tanh"),
        names_of_keys={
            "rms_norm_eps": "layer_norm_eps",
            "rope_theta": "rotary_emb_base",
            "partial_rotary_factor": "rotary_pct",
        },
        renamed={
            "model.embed_tokens": "gpt_neox.embed_in",
            "model.layers": "gpt_neox.layers",
            "self_attn.qkv_proj": "attention.query_key_value",
            "self_attn.o_proj": "attention.dense",
            "mlp.up_proj": "mlp.dense_h_to_4h",
            "mlp.down_proj": "mlp.dense_4h_to_h",
            "model.norm": "gpt_neox.final_layer_norm",
            "lm_head": "embed_out",
        },
        defaults={
            "max_position_embeddings": 2048,
            "layer_norm_eps": 1e-5,
        },
    ),
}
