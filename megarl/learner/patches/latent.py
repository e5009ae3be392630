"""Multi-head latent attention without Transformer Engine, and as DeepSeek computes it."""

from megarl.learner.patches.megatron import declare_megatron
from megarl.platform.patching import replace

DOWN_PROJECTION = declare_megatron(
    "megatron.core.transformer.multi_latent_attention",
    "TELinear",
    reason="a down-projection that every tensor-parallel rank holds complete is accepted only from Transformer Engine",
    upstream="megatron/core/transformer/multi_latent_attention.py: MLASelfAttention.__init__",
    until="it accepts duplicated projections of other classes",
)
QUERY_NORM = declare_megatron(
    "megatron.core.transformer.mla_qk_norm_config:QKNormConfigResolver",
    "_mla_fused_linear_or_default",
    reason="0.19.2 normalises queries that are not compressed; DeepSeek does not",
    upstream="megatron/core/transformer/mla_qk_norm_config.py: QKNormConfigResolver",
    until="`linear_q_proj` stays plain if there is no `q_lora_rank`",
)


def accept_whole_down_projections() -> None:
    """Pass megarl's own down-projection off as Transformer Engine's."""
    from megarl.learner.latent import ReplicatedLinear

    replace(DOWN_PROJECTION, TELinear=ReplicatedLinear)


def leave_uncompressed_queries_alone() -> None:
    """Keep the projection of uncompressed queries free of a normalisation."""
    if not QUERY_NORM.is_present:
        return
    fused_or_default = QUERY_NORM.original("_mla_fused_linear_or_default")

    def fused_or_plain(self: object, module: object, name: str) -> object:
        return module if name == "linear_q_proj" else fused_or_default(self, module, name)

    replace(QUERY_NORM, _mla_fused_linear_or_default=fused_or_plain)
