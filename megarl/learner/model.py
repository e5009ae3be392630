"""A Hugging Face architecture as a Megatron-Core GPTModel: policy and value model differ only in the head.

The trunk ends at the final norm: `output_layer` passes the hidden states through. `outputs.py` computes
log-probabilities or values from the few hidden states that predict a response token. So the logits of all tokens never
exist at once.
"""

from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import replace
from functools import partial

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor
from torch.nn.functional import gelu, silu

from megarl.learner.attention import (
    GatedAttention,
    NormedAttention,
    PackedAttention,
    ScaledQueryAttention,
    SinkAttention,
)
from megarl.learner.config import MegatronSection
from megarl.learner.experts import (
    check_expert_settings,
    expert_settings,
    halve_projections,
    mark_experts,
    use_own_parts,
)
from megarl.learner.fused import has_apex_gradient_fusion, has_transformer_engine
from megarl.learner.gated_delta_net import GatedDeltaNet
from megarl.learner.latent import LatentCore, ReplicatedLinear, latent_settings, yarn_settings
from megarl.learner.layer import BiasedLayer, OutputNormLayer, ParallelResidualLayer, ScaledLayer
from megarl.learner.norm import LayerNorm, RMSNorm, WideRMSNorm
from megarl.learner.parallel import Mesh
from megarl.learner.patches.cpu import megatron_platform
from megarl.models.architecture import Architecture
from megarl.models.config import Recompute
from megarl.models.linear import LinearAttention
from megarl.models.rotary import LinearScaling, RopeScaling, Yarn
from megarl.models.trainer import padded_vocab_size
from megarl.platform.determinism import is_deterministic
from megarl.platform.device import local_device, on_cuda

GELU_TANH = partial(gelu, approximate="tanh")
ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "silu": silu,
    "swish": silu,
    "gelu": gelu,
    "gelu_fast": GELU_TANH,
    "gelu_new": GELU_TANH,
    "gelu_pytorch_tanh": GELU_TANH,
}
"""The functions of `hidden_act` in a `config.json`."""
YARN = "yarn_"  # attributes of Megatron's configuration


def build_model(
    architecture: Architecture, section: MegatronSection, mesh: Mesh, *, recompute: Recompute, chunk: int = 0
) -> GPTModel:
    """Build one chunk of this rank's layers in `section.dtype`; every parameter is zero until weights are loaded.

    A stage of a virtual pipeline holds `mesh.vpp_size` chunks, every other stage only chunk 0.
    """
    vp_stage = chunk if mesh.vpp_size > 1 else None
    is_last = mesh.is_last_stage and chunk == mesh.vpp_size - 1
    config = transformer_config(architecture, section, mesh, recompute=recompute)
    scaling = architecture.rope_scaling
    stretch = scaling if isinstance(scaling, RopeScaling) else None
    with megatron_platform():
        model = GPTModel(
            config,
            block_spec(architecture, config, vp_stage=vp_stage),
            vocab_size=padded_vocab_size(architecture.vocab_size, mesh.tp_size),
            max_sequence_length=architecture.max_position_embeddings,
            pre_process=mesh.pp_rank == 0 and chunk == 0,
            post_process=is_last,
            share_embeddings_and_output_weights=architecture.tied_embeddings,
            position_embedding_type="yarn" if _has_yarn(architecture) else "rope",
            rotary_percent=architecture.rotary_fraction,
            rotary_base=architecture.rope_theta,
            rope_scaling=stretch is not None,
            rope_scaling_factor=stretch.factor if stretch else 1.0,
            seq_len_interpolation_factor=scaling.factor if isinstance(scaling, LinearScaling) else None,
            vp_stage=vp_stage,
        )
        if architecture.traits.rotary_neighbours:
            model.rotary_pos_emb.rotary_interleaved = False  # `learner/rotary.py` takes angles of halves
        if architecture.local_rope_theta is not None:
            _rotate_windows(model, architecture, architecture.local_rope_theta)
        if architecture.query_scaling is not None:
            for layer in model.decoder.layers:
                layer.self_attention.core_attention.scaling = architecture.query_scaling
        if architecture.embedding_scale != 1.0 and model.pre_process:
            model.embedding.register_forward_hook(partial(_scaled, architecture.embedding_scale))
        if is_last and architecture.scalar_head:
            model.output_layer = ValueHead(config)
        elif is_last:
            model.output_layer.forward = partial(return_hidden_states, divisor=architecture.logit_divisor)
    if architecture.traits.wide_qk_norm:
        # Megatron would sum the gradients of these norms over tensor-parallel ranks, but each rank has its own part.
        config.qk_layernorm = False
    model.to(local_device())  # Megatron and our own norms make some parameters on the host
    mark_experts(model)
    if architecture.traits.clamped_glu:
        halve_projections(model)
    # Megatron marks tensor-parallel parameters only while it initialises them, so it must, although values are unused.
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    return model


def _rotate_windows(model: GPTModel, architecture: Architecture, theta: float) -> None:
    """Let the layers with a window rotate queries and keys by their own angles, without scaling."""
    local = RotaryEmbedding(architecture.head_dim, 1.0, rotary_base=theta, cp_group=model.pg_collection.cp)
    config = copy(model.config)
    for name in [name for name in vars(config) if name.startswith(YARN)]:
        del vars(config)[name]
    for layer in model.decoder.layers:
        if architecture.kind(layer.layer_number - 1).attention == "sliding":
            layer.local_rotary = local
            layer.self_attention.config = config


def _scaled(scale: float, module: torch.nn.Module, inputs: object, embedded: Tensor) -> Tensor:
    """Return embeddings times a factor that is rounded to their type, as in transformers and in vLLM."""
    return embedded * torch.tensor(scale, dtype=embedded.dtype, device=embedded.device)


class ValueHead(torch.nn.Module):
    """A head with one number per token, equal on all tensor-parallel ranks; it starts at zero, a neutral value."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1, config.hidden_size, dtype=config.params_dtype))

    def forward(self, hidden: Tensor, **_: object) -> tuple[Tensor, None]:
        """Pass the hidden states through, like every output layer here."""
        return return_hidden_states(hidden)


def return_hidden_states(hidden: Tensor, *, divisor: float = 1.0, **_: object) -> tuple[Tensor, None]:
    """Return the hidden states over the divisor of logits: the `forward` of an `output_layer` without logits."""
    return hidden if divisor == 1.0 else hidden / divisor, None


def block_spec(
    architecture: Architecture, config: TransformerConfig, *, vp_stage: int | None
) -> TransformerBlockSubmodules:
    """Return Transformer Engine's layers if they can run, else Megatron's local layers with our norm and attention.

    A learner that is deterministic or computes in float32 has our attention in both. For packed rows on Hopper, that of
    Transformer Engine is then none, or takes memory in the square of their length.
    """
    local = not has_transformer_engine()
    own_attention = local or is_deterministic() or config.params_dtype == torch.float32
    norm = architecture.traits.norm
    own_norm = {"RMSNorm": RMSNorm, "LayerNorm": LayerNorm}[norm]
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=not local, normalization=norm, vp_stage=vp_stage)
    if local:
        spec.layer_norm = own_norm
    core_attention = _core_attention(architecture)
    own_attention = own_attention or core_attention in (NormedAttention, ScaledQueryAttention, SinkAttention)
    for layer in spec.layer_specs:
        _use_own_layer(layer, architecture)
        attention = layer.submodules.self_attention
        if own_attention:
            attention.submodules = replace(attention.submodules, core_attention=core_attention)
        if local:
            attention.submodules = replace(attention.submodules, **_local_attention(architecture))
            layer.submodules = replace(layer.submodules, input_layernorm=own_norm, pre_mlp_layernorm=own_norm)
        if not architecture.traits.input_norms:
            layer.submodules = replace(layer.submodules, input_layernorm=IdentityOp, pre_mlp_layernorm=IdentityOp)
        if architecture.traits.late_qk_norm:
            attention.submodules = replace(attention.submodules, q_layernorm=IdentityOp, k_layernorm=IdentityOp)
        if architecture.traits.wide_qk_norm:
            queries, keys = (
                ModuleSpec(WideRMSNorm, {"heads": heads}) for heads in ("num_attention_heads", "num_query_groups")
            )
            attention.submodules = replace(attention.submodules, q_layernorm=queries, k_layernorm=keys)
        if architecture.experts:
            use_own_parts(layer.submodules.mlp, architecture.experts, local=local)
        if architecture.traits.gated_attention:
            attention.module = GatedAttention
    if architecture.linear:
        first = get_transformer_layer_offset(config, vp_stage=vp_stage)
        spec.layer_specs = [
            _linear_layer(layer, architecture.linear, own_norm) if number in architecture.linear.layers else layer
            for number, layer in enumerate(spec.layer_specs, first)
        ]
    return spec


def _core_attention(architecture: Architecture) -> type[PackedAttention]:
    if architecture.latent:
        return LatentCore
    if architecture.traits.late_qk_norm:
        return NormedAttention
    if architecture.query_scaling is not None:
        return ScaledQueryAttention
    return SinkAttention if architecture.traits.sinks else PackedAttention


def _use_own_layer(layer: ModuleSpec, architecture: Architecture) -> None:
    """Put the layer class of the family into a layer's specification, if Megatron does not have it."""
    if architecture.traits.output_norms:
        layer.module = OutputNormLayer
    elif architecture.residual_scale != 1.0:
        layer.module = ScaledLayer
        layer.params = {**layer.params, "residual_scale": architecture.residual_scale}
    elif architecture.traits.linear_bias and not architecture.experts:
        layer.module = ParallelResidualLayer if architecture.parallel_residual else BiasedLayer


def _linear_layer(layer: ModuleSpec, linear: LinearAttention, norm: type[torch.nn.Module]) -> ModuleSpec:
    """Return a layer with linear attention in place of its attention."""
    attention = ModuleSpec(module=GatedDeltaNet, params={"sizes": linear})
    return replace(layer, submodules=replace(layer.submodules, self_attention=attention, input_layernorm=norm))


def _local_attention(architecture: Architecture) -> dict[str, type[torch.nn.Module]]:
    """Return the replacements of norms and projections in Megatron's local attention, by name."""
    latent = architecture.latent
    if latent:
        compressed = {"linear_kv_down_proj": ReplicatedLinear, "kv_layernorm": RMSNorm}
        if latent.q_lora_rank is None:
            return compressed | {"q_layernorm": IdentityOp}
        return compressed | {"linear_q_down_proj": ReplicatedLinear, "q_layernorm": RMSNorm}
    return {"q_layernorm": RMSNorm, "k_layernorm": RMSNorm} if architecture.qk_norm else {}


def transformer_config(
    architecture: Architecture, section: MegatronSection, mesh: Mesh, *, recompute: Recompute
) -> TransformerConfig:
    """Return Megatron's configuration of the architecture; `section.override_transformer_config` overrides it."""
    dtype = getattr(torch, section.dtype)
    traits = architecture.traits
    settings: dict[str, object] = {
        "num_layers": architecture.num_layers,
        "hidden_size": architecture.hidden_size,
        "ffn_hidden_size": architecture.ffn_hidden_size,
        "num_attention_heads": architecture.num_attention_heads,
        "num_query_groups": architecture.num_key_value_heads,
        "kv_channels": architecture.head_dim,
        "layernorm_epsilon": architecture.norm_eps,
        "qk_layernorm": architecture.qk_norm,
        "add_qkv_bias": architecture.qkv_bias,
        "add_bias_linear": traits.linear_bias,
        "normalization": traits.norm,
        "layernorm_zero_centered_gamma": traits.centred_norm,
        "gated_linear_unit": traits.gated,
        "activation_func": ACTIVATIONS[architecture.activation],
        "hetereogenous_dist_checkpoint": architecture.linear is not None,  # layers do not have the same parameters
        "attention_output_gate": traits.gated_attention,
        "softmax_scale": architecture.attention_scale,
        "window_size": (architecture.window - 1, 0) if architecture.window else None,
        "window_attn_skip_freq": [int(kind.attention == "sliding") for kind in architecture.layer_kinds],
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "tensor_model_parallel_size": mesh.tp_size,
        "pipeline_model_parallel_size": mesh.pp_size,
        "virtual_pipeline_model_parallel_size": section.virtual_pipeline_model_parallel_size,
        "context_parallel_size": mesh.cp_size,
        "expert_model_parallel_size": mesh.grid.ep,
        "expert_tensor_parallel_size": mesh.grid.etp,
        "sequence_parallel": section.sequence_parallel and mesh.tp_size > 1,
        "variable_seq_lengths": mesh.pp_size > 1,
        # Two stages of a virtual pipeline are neighbours on both sides: only these calls keep the two messages apart.
        "overlap_p2p_comm": mesh.vpp_size > 1,
        "batch_p2p_comm": mesh.vpp_size == 1,
        "moe_token_dispatcher_type": "alltoall",  # Megatron accepts no other with variable lengths, even if dense
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        # Objectives divide by global counts themselves, so Megatron must sum over micro-batches and ranks, not average.
        "calculate_per_token_loss": True,
        "transformer_impl": "transformer_engine" if has_transformer_engine() else "local",
        # On the CPU, torch.compile costs more than these fusions gain. Megatron's fused GELU is an approximation.
        "bias_activation_fusion": on_cuda() and ACTIVATIONS[architecture.activation] is silu,
        "bias_dropout_fusion": on_cuda() and not traits.clamped_glu,  # Megatron refuses it for experts with biases
        "masked_softmax_fusion": False,
        "deterministic_mode": is_deterministic(),
        "apply_rope_fusion": has_transformer_engine() and not traits.rotary_neighbours and not _has_yarn(architecture),
        "rotary_interleaved": traits.rotary_neighbours,
        "no_rope_freq": [int(not kind.is_rotated) for kind in architecture.layer_kinds],
        "gradient_accumulation_fusion": has_apex_gradient_fusion(),
    }
    if traits.clamped_glu:
        settings |= {"activation_func": quick_gelu, "glu_linear_offset": 1.0, "activation_func_clamp_value": 7.0}
        settings["bias_activation_fusion"] = False
    settings |= _recomputation(recompute)
    make: type[TransformerConfig] = TransformerConfig
    latent = architecture.latent
    if latent:
        make = MLATransformerConfig
        settings = settings | latent_settings(architecture, latent)
    experts = architecture.experts
    if experts:
        settings |= expert_settings(experts, architecture.num_layers)
        settings["moe_grouped_gemm"] = has_transformer_engine()
        settings["moe_permute_fusion"] = has_transformer_engine()
    config: TransformerConfig = make(**settings | section.override_transformer_config)
    if isinstance(architecture.rope_scaling, Yarn) and not latent:  # latent attention has settings of its own
        _set_yarn(config, architecture.rope_scaling)
    if architecture.experts:
        check_expert_settings(config)
    return config


def quick_gelu(gate: Tensor) -> Tensor:
    """Approximate GELU by a sigmoid. Megatron's function compiles at its first call, which needs a compiler."""
    return gate * torch.sigmoid(1.702 * gate)


def _has_yarn(architecture: Architecture) -> bool:
    """Return whether YaRN scales the positions of attention that is not latent, which has settings of its own."""
    return isinstance(architecture.rope_scaling, Yarn) and architecture.latent is None


def _set_yarn(config: TransformerConfig, yarn: Yarn) -> None:
    """Set attributes that Megatron reads from a configuration, although the configuration has no such fields."""
    settings = yarn_settings(yarn) | {"correction_range_round_to_int": yarn.truncate}
    vars(config).update({YARN + name: value for name, value in settings.items()})


def _recomputation(recompute: Recompute) -> dict[str, object]:
    """Return the fields of Megatron's configuration that make the backward pass compute activations again."""
    if recompute == "selective":
        return {"recompute_granularity": "selective", "recompute_modules": ["mlp", "moe"]}
    if not recompute:
        return {}
    return {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
