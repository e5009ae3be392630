"""Multi-head latent attention (DeepSeek) in Megatron's terms, and its parts for machines without Transformer Engine."""

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn.functional import linear, pad

from megarl.learner.attention import PackedAttention
from megarl.models.architecture import Architecture, LatentAttention
from megarl.models.rotary import Yarn


def latent_settings(architecture: Architecture, latent: LatentAttention) -> dict[str, object]:
    """Return the fields of Megatron's MLATransformerConfig."""
    settings: dict[str, object] = {
        "q_lora_rank": latent.q_lora_rank,
        "kv_lora_rank": latent.kv_lora_rank,
        "qk_head_dim": latent.qk_nope_head_dim,
        "qk_pos_emb_head_dim": latent.qk_rope_head_dim,
        "v_head_dim": latent.v_head_dim,
        "qk_layernorm": True,  # on the compressed queries, keys and values
        "rotary_base": architecture.rope_theta,
        "apply_rope_fusion": False,  # Megatron fuses only YaRN, and computes it in the type of the activations
    }
    yarn = architecture.rope_scaling
    if not isinstance(yarn, Yarn):
        # Megatron scales the logits by the YaRN factor for every type; a factor of one has no effect.
        return settings | {"rope_type": "rope", "rotary_scaling_factor": 1.0}
    return settings | yarn_settings(yarn) | {"rope_type": "yarn"}


def yarn_settings(yarn: Yarn) -> dict[str, object]:
    """Return the settings of YaRN by the names that they have in Megatron."""
    names = ("original_max_position_embeddings", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
    return {"rotary_scaling_factor": yarn.factor, **{name: getattr(yarn, name) for name in names}}


class LatentCore(PackedAttention):
    """`PackedAttention` for values of another size than queries and keys, with a given scale of the logits."""

    def __init__(self, config: TransformerConfig, layer_number: int, *, softmax_scale: float, **_: object) -> None:
        super().__init__(config, layer_number)
        self.scale = softmax_scale

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **settings: Any) -> Tensor:
        """Attend as `PackedAttention`, with `value` [N, heads, v_head_dim]; return [N, heads * v_head_dim]."""
        size = value.shape[-1]
        value = pad(value, (0, query.shape[-1] - size))  # the variable-length kernel takes only one size
        out = super().forward(query, key, value, *args, **settings)
        return out.unflatten(-1, (query.shape[1], -1))[..., :size].flatten(-2)


class ReplicatedLinear(torch.nn.Module):
    """A linear layer that every tensor-parallel rank holds completely and applies to its own tokens.

    Transformer Engine's layer does the same. Megatron's local layer splits the rows and gathers the outputs; then each
    rank keeps only its own heads' share of the gradient of the keys' rotary part, although all heads share that part.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: TransformerConfig,
        init_method: Callable[[Tensor], object],
        **_: object,
    ) -> None:
        super().__init__()
        device = torch.cuda.current_device()
        self.weight = torch.nn.Parameter(torch.empty(output_size, input_size, dtype=config.params_dtype, device=device))
        init_method(self.weight)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden: Tensor) -> tuple[Tensor, None]:
        """Map [..., input_size] to [..., output_size]; there is no bias."""
        return linear(hidden, self.weight), None
