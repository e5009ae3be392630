"""Transformer layers whose projections have biases, for machines with and without Transformer Engine."""

from typing import Any

from megatron.core.tensor_parallel import checkpoint
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor


class BiasedLayer(TransformerLayer):
    """Megatron's layer, which adds the bias of the feed-forward layer before a checkpoint of activations ends.

    Megatron returns the bias from the checkpoint, and autograd then takes the parameter for a result of itself.
    """

    has_parallel_residual = False

    def forward(self, hidden_states: Tensor, **inputs: Any) -> tuple[Tensor, Tensor | None]:
        """Map [N, 1, hidden_size] to the same shape; also return the context of Megatron's layer."""
        attended, context = self._forward_attention(hidden_states, **inputs)
        normalised = self._forward_pre_mlp_layernorm(hidden_states if self.has_parallel_residual else attended)
        fed = checkpoint(self._feed, False, normalised) if self.recompute_mlp else self._feed(normalised)
        return self._forward_post_mlp((fed, None), attended), context

    def _feed(self, normalised: Tensor) -> Tensor:
        out: Tensor
        out, bias = self.mlp(normalised)
        return out if bias is None else out + bias


class ParallelResidualLayer(BiasedLayer):
    """A layer that computes `x + attention(norm(x)) + feed_forward(other_norm(x))` (Wang and Komatsuzaki, GPT-J, 2021).

    Megatron's layer gives the feed-forward layer the sum of the first two terms.
    """

    has_parallel_residual = True
