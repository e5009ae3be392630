"""The memory of a forward and backward pass on one rank of the trainer: an estimate from the sizes alone.

The counting is that of Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models"
(arXiv:2205.05198), of the tensors that the backward pass reads, adapted to what runs here: a packed row of tokens
instead of sequences, gated or plain feed-forwards, grouped or latent attention in a flash kernel, no dropout, experts
with balanced routing, and a head that sees one chunk of the vocabulary's logits at a time. Not counted: what kernels
and the allocator need for themselves.
"""

from dataclasses import dataclass
from functools import partial

from megarl.learner.config import MegatronSection
from megarl.learner.head_chunks import CHUNK_TOKENS, KEPT_BYTES
from megarl.models.architecture import Architecture, LayerKind
from megarl.models.config import Recompute
from megarl.models.grid import Grid
from megarl.models.linear import CHUNK, LinearAttention
from megarl.planning.states import DTYPE_BYTES, FLOAT32

# Float32 numbers per logit that `learner/heads.py` has at its fullest moment, forward (logits, their exponentials, the
# product of both, the logits before the division) and backward (log p, p, their products and the gradient).
HEAD_FORWARD = 4
HEAD_BACKWARD = 5


@dataclass(frozen=True, kw_only=True)
class PhaseWork:
    """The computation of a model in one phase."""

    num_tokens: int  # of a micro-batch, on one rank
    num_micro_batches: int
    role: str  # policy or value
    recompute: Recompute
    exact_kl: bool = False  # the head takes the divergence from the reference, over the vocabulary


def layer_bytes(
    architecture: Architecture, section: MegatronSection, *, layer: int, num_tokens: int, feed_forward: bool = True
) -> int:
    """Return the bytes that one layer keeps for its backward pass, without `feed_forward` those outside of it.

    Per token, of hidden size h: 4 h (the inputs of both norms and their outputs, which the linear layers read; divided
    by TP under sequence parallelism), then, divided by TP, queries, keys, values and the output of the attention with
    its normaliser, and 3 f of the feed-forward (gate, up and their product; 2 f without a gate).
    """
    a = architecture
    tp = section.tensor_model_parallel_size
    hidden = 4 * a.hidden_size / (tp if section.sequence_parallel else 1)
    kind = a.kind(layer)
    attention, replicated = _attention(a, kind)
    elements = hidden + replicated + attention / tp
    if feed_forward:
        elements += _feed_forward(a, kind, etp=section.expert_tensor_parallel_size or tp) / tp
    normaliser = 0 if kind.attention == "linear" else FLOAT32 * a.num_attention_heads / tp
    return int(num_tokens * (elements * DTYPE_BYTES[section.dtype] + normaliser))


def training_bytes(
    architecture: Architecture, section: MegatronSection, grid: Grid, *, stage: int, work: PhaseWork
) -> int:
    """Return the peak bytes of activations of an update on a pipeline stage.

    The micro-batches whose backward pass is still to come, each with what the layers of the stage keep (with full
    recomputation only their inputs, with selective nothing inside of the feed-forward), and either a layer in the
    middle of its backward pass or the head.
    """
    chunks = grid.layers(stage, architecture.num_layers)
    layers = [layer for chunk in chunks for layer in chunk]
    of_layer = partial(layer_bytes, architecture, section, num_tokens=work.num_tokens)
    complete = [of_layer(layer=layer) for layer in layers]
    if work.recompute == "selective":
        kept = [of_layer(layer=layer, feed_forward=False) for layer in layers]
    elif work.recompute:
        kept = [_hidden_bytes(architecture, section, work.num_tokens)] * len(layers)
    else:
        kept = complete
    in_flight = chunks_in_flight(grid, stage=stage, num_micro_batches=work.num_micro_batches) / len(chunks)
    # The gradients of a layer, and what is computed again; a layer that is computed again has its input a second time.
    again = complete
    if work.recompute is not True:
        again = [of_layer - of_kept for of_layer, of_kept in zip(complete, kept, strict=True)]
    working = max(map(sum, zip(complete, again, strict=True)), default=0)
    if stage == grid.pp - 1:
        working = max(working, head_bytes(architecture, section, work=work, training=True))
    return int(sum(kept) * in_flight) + working


def inference_bytes(
    architecture: Architecture, section: MegatronSection, grid: Grid, *, stage: int, work: PhaseWork
) -> int:
    """Return the peak bytes of a pass without gradients on a pipeline stage: of one layer or of the head."""
    layers = [layer for chunk in grid.layers(stage, architecture.num_layers) for layer in chunk]
    sizes = (layer_bytes(architecture, section, layer=layer, num_tokens=work.num_tokens) for layer in layers)
    working = max(sizes, default=0)
    if stage == grid.pp - 1:
        working = max(working, head_bytes(architecture, section, work=work, training=False))
    return working


def head_bytes(architecture: Architecture, section: MegatronSection, *, work: PhaseWork, training: bool) -> int:
    """Return the peak bytes of the head of the last stage, if it computes every token.

    The hidden states of all tokens, gathered and picked (training: and the gradient of the latter), and the float32
    numbers of one chunk of one rank's slice of the vocabulary. In training with bfloat16, the gradient of that slice of
    the output embedding by one chunk comes before its sum with the others. A value head has one logit. The exact
    divergence adds the hidden states and the logits of the reference, and in training another gradient of the states.
    """
    itemsize = DTYPE_BYTES[section.dtype]
    tp = section.tensor_model_parallel_size
    states = (3 if training else 2) * work.num_tokens * architecture.hidden_size * itemsize
    if work.role == "value":
        return states
    rows = -(-architecture.vocab_size // tp)
    numbers = HEAD_BACKWARD if training else HEAD_FORWARD + work.exact_kl
    chunk = min(CHUNK_TOKENS, work.num_tokens) * rows * FLOAT32 * numbers
    if work.exact_kl:
        states += work.num_tokens * (2 if training else 1) * architecture.hidden_size * itemsize
    kept = work.num_tokens * rows * FLOAT32
    if training and kept <= KEPT_BYTES:
        states += kept
    gradient = rows * architecture.hidden_size * FLOAT32 if training and section.dtype == "bfloat16" else 0
    return states + chunk + gradient


def chunks_in_flight(grid: Grid, *, stage: int, num_micro_batches: int) -> int:
    """Return the most model chunks that await their backward pass in Megatron's schedules.

    One forward, one backward: one micro-batch more than there are stages behind. Interleaved over v chunks: 2 (stages
    behind) + (v - 1) (stages), and one more.
    """
    behind = grid.pp - stage - 1
    warmup = behind if grid.vpp == 1 else 2 * behind + (grid.vpp - 1) * grid.pp
    return min(warmup + 1, num_micro_batches * grid.vpp)


def _feed_forward(a: Architecture, kind: LayerKind, *, etp: int) -> int:
    """Return the elements per token inside of one feed-forward layer; TP divides them.

    Every chosen expert reads a copy of the token; with ETP the ranks that share the experts gather their tokens.
    """
    if a.experts is None or not kind.is_sparse:
        return (3 if a.traits.gated else 2) * a.ffn_hidden_size
    of_experts = a.experts.top_k * (etp * a.hidden_size + 3 * a.experts.ffn_hidden_size)
    return 3 * a.experts.shared_ffn_hidden_size + of_experts


def _attention(a: Architecture, kind: LayerKind) -> tuple[int, int]:
    """Return the elements per token of one attention layer: those that TP divides, and those that every rank has."""
    latent = a.latent
    if a.linear and kind.attention == "linear":
        return _linear_attention(a.linear), 0
    if latent is None:
        norms = (a.num_attention_heads + a.num_key_value_heads) * a.head_dim if a.qk_norm else 0
        gates = 2 * a.num_attention_heads * a.head_dim if a.traits.gated_attention else 0  # and what they multiply
        return 2 * (a.num_attention_heads + a.num_key_value_heads) * a.head_dim + norms + gates, 0
    # Queries and keys of all heads, values and output; the latents before and after their norms.
    per_head = 2 * (latent.qk_nope_head_dim + latent.qk_rope_head_dim) + 2 * latent.v_head_dim
    latents = 2 * ((latent.q_lora_rank or 0) + latent.kv_lora_rank) + latent.qk_rope_head_dim
    return a.num_attention_heads * per_head, latents


def _linear_attention(linear: LinearAttention) -> int:
    """Return the elements per token of linear attention, by a kernel that keeps the memory of each chunk's start.

    They are the outputs of the projections, of the convolution, unit queries and keys for each value head, the read
    values before and after their norm, and the memories.
    """
    projected = linear.size("qkvzba") + linear.size("qkv")
    unit = 2 * linear.num_value_heads * linear.key_dim
    memories = linear.value_size * linear.key_dim // CHUNK
    return projected + unit + 2 * linear.value_size + memories


def _hidden_bytes(architecture: Architecture, section: MegatronSection, num_tokens: int) -> int:
    parts = section.tensor_model_parallel_size if section.sequence_parallel else 1
    return num_tokens * architecture.hidden_size * DTYPE_BYTES[section.dtype] // parts
