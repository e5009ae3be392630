"""Transformer layers that Megatron does not have, for machines with and without Transformer Engine."""

from collections.abc import Callable
from functools import partial

from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.tensor_parallel import checkpoint
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from megarl.learner.norm import RMSNorm

Change = Callable[[Tensor], Tensor]  # of the output of a branch
Branch = tuple[Tensor, Tensor | None]  # the output of attention or of the feed-forward layer, and its bias


class BiasedLayer(TransformerLayer):
    """Megatron's layer, which adds the bias of the feed-forward layer before a checkpoint of activations ends.

    Megatron returns the bias from the checkpoint, and autograd then takes the parameter for a result of itself.
    """

    has_parallel_residual = False

    def forward(self, hidden_states: Tensor, **inputs: object) -> tuple[Tensor, Tensor | None]:
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


class OutputNormLayer(TransformerLayer):
    """A layer that computes `h = x + norm(attention(...))` and `h + norm(feed_forward(...))` (Gemma 3, OLMo 2)."""

    def __init__(self, config: TransformerConfig, *args: object, **kwargs: object) -> None:
        super().__init__(config, *args, **kwargs)
        self.local_rotary: RotaryEmbedding | None = None  # for queries and keys of this layer, instead of the model's
        self.attention_output_layernorm = RMSNorm(config, config.hidden_size, config.layernorm_epsilon)
        self.feed_forward_output_layernorm = RMSNorm(config, config.hidden_size, config.layernorm_epsilon)
        _change(self, self.attention_output_layernorm, self.feed_forward_output_layernorm)

    def forward(self, *args: object, rotary_pos_emb: Tensor, **inputs: object) -> tuple[Tensor, Tensor | None]:
        """Map [N, 1, hidden_size] to the same shape; also return the context of Megatron's layer."""
        if self.local_rotary is not None:
            rotary_pos_emb = self.local_rotary(len(rotary_pos_emb), packed_seq=True)
        out: tuple[Tensor, Tensor | None] = super().forward(*args, rotary_pos_emb=rotary_pos_emb, **inputs)
        return out


class ScaledLayer(TransformerLayer):
    """A layer that computes `h = x + s * attention(norm(x))` and `h + s * feed_forward(norm(h))` (Granite)."""

    def __init__(self, *args: object, residual_scale: float, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        self.residual_scale = residual_scale
        _change(self, self._scaled, self._scaled)

    def _scaled(self, out: Tensor) -> Tensor:
        return out * self.residual_scale


def _change(layer: TransformerLayer, attention: Change, feed_forward: Change) -> None:
    """Let a layer change the output of each branch before it adds the branch to the residual stream."""
    layer.self_attn_bda = partial(_changed_first, layer.self_attn_bda, attention)
    layer.mlp_bda = partial(_changed_first, layer.mlp_bda, feed_forward)


def _changed_first(
    make_add: Callable[..., Callable[..., Tensor]], change: Change, *switches: bool
) -> Callable[..., Tensor]:
    """Return Megatron's addition of a branch to the residual stream, with a change of the branch before it."""
    add = make_add(*switches)

    def add_changed(branch: Branch, residual: Tensor, dropout: float) -> Tensor:
        out, bias = branch
        return add((change(out if bias is None else out + bias), None), residual, dropout)

    return add_changed
