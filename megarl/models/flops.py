"""The floating-point operations that a decoder needs, counted from its sizes: two for each multiplication and addition.

Counted are the products of matrices: the weights that a token meets (of the experts only the chosen ones), queries with
keys and probabilities with values (each token with itself and the tokens before it, as far as the window of the layer
reaches), tokens with the memories of linear attention, and the head. Norms, rotations, activations and the optimizer
are left out, and so is what recomputation repeats: the count does not depend on how a model is run, and is that of
model FLOPs utilization (Chowdhery et al. 2022, "PaLM", appendix B).
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from math import prod

import numpy as np
from numpy.typing import NDArray

from megarl.models.architecture import EMBEDDING, HEAD, SCORE, Architecture, Shapes, llama_shapes
from megarl.models.linear import PREFIX
from megarl.models.lora import Lora, adapter_shapes

UPDATE = 3
"""Forward passes that a forward and a backward pass cost: for each product, the gradients of both of its factors."""
FROZEN_UPDATE = 2
"""The same of a product with frozen weights: the gradient of its other factor alone."""
EXPERT = ".experts."
ATTENTION = (".self_attn.", f".{PREFIX}")


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """The tokens that a model reads."""

    lengths: Sequence[int] | NDArray[np.int64]  # of the sequences
    num_outputs: int  # tokens whose logits or value the head computes

    @property
    def num_tokens(self) -> int:
        """The tokens of all sequences."""
        return int(np.sum(self.lengths))

    def num_pairs(self, window: int | None = None) -> int:
        """Return the pairs of a token with itself or an earlier token of its sequence.

        A token sees `window` tokens, itself included; None: all up to itself.
        """
        lengths = np.asarray(self.lengths, dtype=np.int64)
        near = lengths if window is None else np.minimum(lengths, window)
        return int(np.sum(near * (near + 1) // 2 + (lengths - near) * near))


def forward_flops(architecture: Architecture, tokens: Tokens, lora: Lora | None = None) -> int:
    """Return the FLOPs of a forward pass, and of a generation that keeps keys and values of earlier tokens.

    Adapters of `lora` are counted with the weights; the engine has none.
    """
    return _of_weights(architecture, tokens) + _of_learning(architecture, tokens, lora)


def update_flops(architecture: Architecture, tokens: Tokens, lora: Lora | None = None) -> int:
    """Return the FLOPs of a forward and a backward pass. With `lora`, weights other than adapters are frozen."""
    frozen = FROZEN_UPDATE if lora else UPDATE
    return frozen * _of_weights(architecture, tokens) + UPDATE * _of_learning(architecture, tokens, lora)


def _of_weights(a: Architecture, tokens: Tokens) -> int:
    """Return the FLOPs of a forward pass in products with weights that adapters leave as they are."""
    head = 0 if a.scalar_head else 2 * a.hidden_size * a.vocab_size
    return 2 * active_weights(a) * tokens.num_tokens + head * tokens.num_outputs


def _of_learning(a: Architecture, tokens: Tokens, lora: Lora | None) -> int:
    """Return the FLOPs of a forward pass in the other products: of activations, adapters and a scalar head."""
    kinds = Counter(kind.attention for kind in a.layer_kinds)
    attention = sum(count * _of_attention(a, kind, tokens) for kind, count in kinds.items())
    head = 2 * a.hidden_size if a.scalar_head else 0
    adapters = 2 * active_adapters(a, lora) if lora else 0
    return attention + head * tokens.num_outputs + adapters * tokens.num_tokens


def _of_attention(a: Architecture, kind: str, tokens: Tokens) -> int:
    """Return the FLOPs of one layer's attention in products of activations.

    Linear attention reads its memory twice for each token, for the correction and for the result, and adds one product
    of a key and a correction to it.
    """
    if a.linear and kind == "linear":
        return 3 * 2 * a.linear.num_value_heads * a.linear.key_dim * a.linear.value_dim * tokens.num_tokens
    value_dim = a.latent.v_head_dim if a.latent else a.head_dim
    pair = 2 * a.num_attention_heads * (a.head_dim + value_dim)
    return pair * tokens.num_pairs(a.window if kind == "sliding" else None)


def feed_forward_share(architecture: Architecture, tokens: Tokens) -> float:
    """Return the share of a forward pass's FLOPs that the feed-forward layers and experts need."""
    weights = active_weights(architecture, left_out=ATTENTION)
    return 2 * weights * tokens.num_tokens / forward_flops(architecture, tokens)


@cache
def active_weights(architecture: Architecture, *, left_out: tuple[str, ...] = ()) -> int:
    """Return the elements of the matrices of all layers that one token meets; embedding and head are none of them.

    A convolution counts as a matrix. Matrices whose names in Llama contain a part of `left_out` are not counted.
    """

    def is_counted(name: str) -> bool:
        return name not in (EMBEDDING, HEAD, SCORE) and not any(part in name for part in left_out)

    shapes = llama_shapes(architecture)
    matrices = {name: shape for name, shape in shapes.items() if len(shape) > 1 and is_counted(name)}
    return _active(architecture, matrices)


@cache
def active_adapters(architecture: Architecture, lora: Lora) -> int:
    """Return the elements of the adapters that one token meets."""
    return _active(architecture, adapter_shapes(architecture, lora))


def _active(architecture: Architecture, shapes: Shapes) -> int:
    """Return the elements of the matrices that one token meets."""
    dense = sum(prod(shape) for name, shape in shapes.items() if EXPERT not in name)
    routed = sum(prod(shape) for name, shape in shapes.items() if EXPERT in name)
    experts = architecture.experts
    return dense + (routed * experts.top_k // experts.num_experts if experts else 0)
