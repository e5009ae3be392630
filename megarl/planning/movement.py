"""The bytes that a pass on the CPU reads and writes: the operations between the products of matrices, and their ends.

A product of large matrices is bound by arithmetic. Every other operation reads its inputs from memory and writes its
result to it, because the tensors of a micro-batch are larger than the caches. The counts are those of the code that
runs there, in numbers for each token, and each names it. On CUDA, kernels fuse these operations, and nobody has
measured how much of them is left.
"""

from megarl.models.architecture import Architecture, LayerKind
from megarl.models.flops import Tokens
from megarl.models.linear import CHUNK, LinearAttention
from megarl.planning.states import DTYPE_BYTES

NORM = 5  # learner/norm.py: the norm reads x; the scale and the weight each read and write it
ROTATION = 5  # learner/rotary.py: for each half a product reads and writes, and its second term reads two, writes one
RESIDUAL = 3  # reads two, writes one
ACTIVATION = 2  # reads and writes
GATE = 5  # silu reads and writes the gate; its product with the other half reads two, writes one
TAP = 7  # learner/delta_rule.py: a product, a mask and a sum for each token that the convolution sees
SPREAD = 6  # the same: unit length, the copy into chunks, and a product with decay or strength
PAIRS = 16  # the same: decays, scores and the system of two tokens of a chunk
MEMORY = 5  # the same: of each chunk's memory, two reads, a product with the decay and a sum
LOGITS = 7  # learner/heads.py and softmax.py: written; read for the maximum; shifted; exponentials; their sum


def forward_bytes(architecture: Architecture, tokens: Tokens, *, dtype: str) -> float:
    """Return the bytes that a forward pass without gradients reads and writes, weights left out.

    Logits are float32. A backward pass moves twice as much: each operation reads the gradient of its result and its
    inputs, and writes the gradients of its inputs.
    """
    a = architecture
    layers = sum(_of_layer(a, kind) for kind in a.layer_kinds) + NORM * a.hidden_size
    logits = 1 if a.scalar_head else a.vocab_size
    states = a.hidden_size * tokens.num_outputs
    moved = DTYPE_BYTES[dtype] * (layers * tokens.num_tokens + states)
    return moved + DTYPE_BYTES["float32"] * LOGITS * logits * tokens.num_outputs


def _of_layer(a: Architecture, kind: LayerKind) -> int:
    """Return the numbers that a layer reads and writes for a token."""
    hidden = a.hidden_size
    attention = _linear_attention(a, a.linear) if a.linear and kind.attention == "linear" else _attention(a)
    ffn = a.ffn_hidden_size
    moved_to_experts = 0
    if a.experts and kind.is_sparse:
        ffn = a.experts.top_k * a.experts.ffn_hidden_size + a.experts.shared_ffn_hidden_size
        moved_to_experts = 4 * a.experts.top_k * hidden  # tokens travel to their experts and back
    feed_forward = (hidden + 2 * ffn + ffn + hidden) + GATE * ffn
    if not a.traits.gated:
        feed_forward = (hidden + ffn + ffn + hidden) + ACTIVATION * ffn
    return attention + moved_to_experts + feed_forward + 2 * (NORM + RESIDUAL) * hidden


def _linear_attention(a: Architecture, linear: LinearAttention) -> int:
    """Return the numbers that linear attention reads and writes for a token (learner/gated_delta_net.py)."""
    mixed = linear.size("qkv")
    heads = linear.num_value_heads
    projections = 2 * a.hidden_size + linear.size("qkvzba") + linear.value_size
    convolution = (TAP * linear.conv_width + ACTIVATION) * mixed
    heads_of_values = heads * (2 * linear.key_dim + linear.value_dim)  # queries, keys and values
    memories = MEMORY * heads * linear.key_dim * linear.value_dim // CHUNK
    chunks = SPREAD * heads_of_values + PAIRS * heads * CHUNK + memories
    return projections + convolution + chunks + (NORM + GATE) * linear.value_size


def _attention(a: Architecture) -> int:
    """Return the numbers that attention to all tokens reads and writes for a token."""
    hidden = a.hidden_size
    value_dim = a.latent.v_head_dim if a.latent else a.head_dim
    queries, keys, values = (
        heads * size
        for heads, size in (
            (a.num_attention_heads, a.head_dim),
            (a.num_key_value_heads, a.head_dim),
            (a.num_key_value_heads, value_dim),
        )
    )
    out = a.num_attention_heads * value_dim
    products = hidden + queries + keys + values + out + hidden  # read and written by the projections of the attention
    attention = ROTATION * (queries + keys) + 2 * queries + 2 * out  # reads queries, keys, values of all heads
    if a.num_key_value_heads < a.num_attention_heads:  # keys and values are repeated for the heads of a group
        attention += keys + queries + values + out
    if a.qk_norm:
        attention += NORM * (queries + keys)
    if a.traits.gated_attention:
        attention += queries + GATE * out
    return products + attention
