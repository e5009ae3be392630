"""A transformer layer whose two halves read the same hidden states."""

from typing import Any

from megatron.core.tensor_parallel import checkpoint
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor


class ParallelResidualLayer(TransformerLayer):
    """A layer that computes `x + attention(norm(x)) + feed_forward(other_norm(x))` (Wang and Komatsuzaki, GPT-J, 2021).

    Megatron's layer gives the feed-forward layer the sum of the first two terms.
    """

    def forward(self, hidden_states: Tensor, **inputs: Any) -> tuple[Tensor, Tensor | None]:
        """Map [N, 1, hidden_size] to the same shape; also return the context of Megatron's layer."""
        attended, context = self._forward_attention(hidden_states, **inputs)
        normalised = self._forward_pre_mlp_layernorm(hidden_states)
        fed = checkpoint(self.mlp, False, normalised) if self.recompute_mlp else self.mlp(normalised)
        return self._forward_post_mlp(fed, attended), context
