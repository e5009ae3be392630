"""A Hugging Face architecture as a Megatron-Core GPTModel: the same trunk for policy and value, another head.

The trunk ends at the final norm: `output_layer` hands the hidden states through, and `heads.py` turns the few that are
asked for into log-probabilities or values. So no logits of a whole micro-batch ever exist.
"""

from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from typing import Any, Literal

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megarl.learner.attention import PackedAttention
from megarl.learner.config import MegatronSection
from megarl.learner.norm import RMSNorm
from megarl.learner.parallel import Mesh
from megarl.models.architecture import Architecture
from megarl.platform.cpu import megatron_platform

Role = Literal["policy", "value"]


def build_model(
    architecture: Architecture, section: MegatronSection, mesh: Mesh, *, role: Role, recompute: bool
) -> GPTModel:
    """This rank's part of the model, in `section.dtype`, every parameter zero: the weights come from elsewhere."""
    config = transformer_config(architecture, section, mesh, recompute=recompute)
    tied = architecture.tied_embeddings and role == "policy"
    with megatron_platform():
        model = GPTModel(
            config,
            block_spec(architecture, config),
            vocab_size=padded_vocab_size(architecture.vocab_size, mesh.tp_size),
            max_sequence_length=architecture.max_position_embeddings,
            pre_process=mesh.pp_rank == 0,
            post_process=mesh.is_last_stage,
            share_embeddings_and_output_weights=tied,
            position_embedding_type="rope",
            rotary_base=architecture.rope_theta,
            rope_scaling=architecture.rope_scaling is not None,
            rope_scaling_factor=architecture.rope_scaling.factor if architecture.rope_scaling else 1.0,
        )
        if mesh.is_last_stage and role == "value":
            model.output_layer = ValueHead(config)
        elif mesh.is_last_stage:
            model.output_layer.forward = hand_through
    # Megatron marks tensor-parallel parameters only while it initialises them, so it has to, although for nothing.
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    return model


class ValueHead(torch.nn.Module):
    """One number per token, the same on every tensor-parallel rank; starts at zero, a value nobody has to unlearn."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        device = "cuda" if torch.cuda.is_available() else "cpu"
        self.weight = torch.nn.Parameter(torch.zeros(1, config.hidden_size, dtype=config.params_dtype, device=device))

    def forward(self, hidden: Tensor, **_: Any) -> tuple[Tensor, None]:
        """As any output layer here."""
        return hand_through(hidden)


def hand_through(hidden: Tensor, **_: Any) -> tuple[Tensor, None]:
    """What `output_layer` does instead of computing logits."""
    return hidden, None


def padded_vocab_size(vocab_size: int, tp_size: int) -> int:
    """Rows of the embedding: the vocabulary rounded up to whole slices of a multiple of 64 rows per rank."""
    step = 64 * tp_size
    return -(-vocab_size // step) * step


def block_spec(architecture: Architecture, config: TransformerConfig) -> Any:
    """Transformer Engine's layers where they can run, else Megatron's local ones with our norm and attention."""
    if has_transformer_engine():
        return get_gpt_layer_with_transformer_engine_spec(qk_layernorm=architecture.qk_norm)
    layer = get_gpt_layer_local_spec(normalization="RMSNorm", qk_layernorm=architecture.qk_norm)
    attention = layer.submodules.self_attention
    qk_norms = {"q_layernorm": RMSNorm, "k_layernorm": RMSNorm} if architecture.qk_norm else {}
    attention.submodules = replace(attention.submodules, core_attention=PackedAttention, **qk_norms)
    layer.submodules = replace(layer.submodules, input_layernorm=RMSNorm, pre_mlp_layernorm=RMSNorm)
    return TransformerBlockSubmodules(layer_specs=[layer] * get_num_layers_to_build(config), layer_norm=RMSNorm)


@cache
def has_transformer_engine() -> bool:
    """True where Transformer Engine is installed and has a device to run on."""
    return torch.cuda.is_available() and find_spec("transformer_engine") is not None


@cache
def has_apex_gradient_fusion() -> bool:
    """True where apex's fused weight-gradient kernel is installed."""
    return torch.cuda.is_available() and find_spec("fused_weight_gradient_mlp_cuda") is not None


def transformer_config(
    architecture: Architecture, section: MegatronSection, mesh: Mesh, *, recompute: bool
) -> TransformerConfig:
    """Megatron's configuration of this architecture; `section.override_transformer_config` has the last word."""
    dtype = getattr(torch, section.dtype)
    cuda = torch.cuda.is_available()
    settings: dict[str, Any] = {
        "num_layers": architecture.num_layers,
        "hidden_size": architecture.hidden_size,
        "ffn_hidden_size": architecture.ffn_hidden_size,
        "num_attention_heads": architecture.num_attention_heads,
        "num_query_groups": architecture.num_key_value_heads,
        "kv_channels": architecture.head_dim,
        "layernorm_epsilon": architecture.rms_norm_eps,
        "qk_layernorm": architecture.qk_norm,
        "add_qkv_bias": architecture.qkv_bias,
        "add_bias_linear": False,
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "tensor_model_parallel_size": mesh.tp_size,
        "pipeline_model_parallel_size": mesh.pp_size,
        "sequence_parallel": section.sequence_parallel and mesh.tp_size > 1,
        "variable_seq_lengths": mesh.pp_size > 1,
        "moe_token_dispatcher_type": "alltoall",  # the one Megatron accepts beside variable lengths, dense models too
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        # Our objectives divide by global counts themselves, so Megatron must add micro-batches and ranks, not average.
        "calculate_per_token_loss": True,
        # torch.compile on the CPU costs more than these fusions bring there.
        "bias_activation_fusion": cuda,
        "bias_dropout_fusion": cuda,
        "masked_softmax_fusion": False,
        "apply_rope_fusion": has_transformer_engine(),
        "gradient_accumulation_fusion": has_apex_gradient_fusion(),
    }
    if recompute:
        settings |= {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    return TransformerConfig(**settings | section.override_transformer_config)
