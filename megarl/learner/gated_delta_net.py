"""Linear attention by a gated delta rule (Gated DeltaNet, Yang et al., 2024, arXiv:2412.06464) over packed sequences.

The layer is megarl's own on every device: Megatron's layer refuses packed rows (0.16.1) or needs `fla` for them (0.19).
Tensor-parallel ranks have equally many key heads, each with its value heads. Context-parallel ranks divide these heads
once more between the projections.
"""

from collections.abc import Sequence
from functools import partial
from importlib.util import find_spec

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    copy_to_tensor_model_parallel_region,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor
from torch.nn.functional import silu, softplus

from megarl.learner.delta_rule import Chunks, causal_convolution, gated_delta_rule
from megarl.learner.norm import Normalization
from megarl.learner.packed import Bounds
from megarl.learner.per_tensor import PerTensor
from megarl.learner.shared_rows import heads_for_tokens, tokens_for_heads
from megarl.models.linear import LinearAttention
from megarl.platform.determinism import is_deterministic

KINDS = ("qkv", "z", "b", "a")  # of `LinearAttention`, in the rows of a group
NORM_EPS = 1e-6  # of queries and keys; transformers and vLLM know no other value

_chunks = PerTensor[Chunks]()  # by the bounds of the row


class GatedNorm(torch.nn.Module):
    """`weight * normalised(x) * silu(gate)` over the last dimension. Every tensor-parallel rank has the weight."""

    def __init__(self, config: TransformerConfig, size: int) -> None:
        super().__init__()
        self.epsilon = config.layernorm_epsilon
        self.weight = torch.nn.Parameter(torch.ones(size, dtype=config.params_dtype))

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """Normalise [..., size] of the rank's heads."""
        weight = copy_to_tensor_model_parallel_region(self.weight)  # sums the gradients of all heads
        normalised = Normalization.apply(x, weight, self.epsilon)
        return (normalised * silu(gate.float())).to(x.dtype)


class GatedDeltaNet(MegatronModule):
    """Replacement of Megatron's self-attention."""

    def __init__(self, config: TransformerConfig, layer_number: int, *, sizes: LinearAttention, **_: object) -> None:
        super().__init__(config)
        self.sizes = sizes
        self.cp_group = parallel_state.get_context_parallel_group()
        num_ranks = config.tensor_model_parallel_size
        settings = {"config": config, "bias": False, "skip_bias_add": True}
        rows = sizes.size("".join(KINDS))
        self.in_proj = ColumnParallelLinear(config.hidden_size, rows, init_method=config.init_method, **settings)
        self.out_proj = RowParallelLinear(
            sizes.value_size,
            config.hidden_size,
            init_method=config.output_layer_init_method,
            input_is_parallel=True,
            **settings,
        )
        self.out_norm = GatedNorm(config, sizes.value_dim)
        heads = sizes.num_value_heads // num_ranks
        self.conv_weight = _sharded(config, sizes.size("qkv") // num_ranks, 1, sizes.conv_width)
        self.dt_bias = _sharded(config, heads)
        self.A_log = _sharded(config, heads)

    def forward(
        self, hidden_states: Tensor, attention_mask: None = None, *, packed_seq_params: Bounds, **_: object
    ) -> tuple[Tensor, None]:
        """Map the hidden states of a packed row, [N, 1, hidden_size] or a part of the tokens, to the same shape."""
        sizes = self.sizes
        rows = self.in_proj(hidden_states)[0].unflatten(-1, (-1, sizes.rows("".join(KINDS))))[:, 0]
        rows = tokens_for_heads(rows, packed_seq_params, self.cp_group)
        mixed, gate, strength, decay = rows.split([sizes.rows(kinds) for kinds in KINDS], dim=-1)
        device = hidden_states.device
        bounds = packed_seq_params.cu_seqlens_q
        chunks = _chunks.get(bounds, partial(Chunks, packed_seq_params.lengths, device))
        weight = self._own(self.conv_weight)[:, 0].float()
        convolved = causal_convolution(mixed.flatten(1).float(), weight, chunks.positions)
        convolved = silu(convolved).to(mixed.dtype).view_as(mixed)
        query, key, value = convolved.float().split([sizes.rows(kind) for kind in "qkv"], dim=-1)
        query, key = (_unit(each).repeat_interleave(sizes.group_size, dim=1) for each in (query, key))
        out = _delta_rule(
            query * sizes.key_dim**-0.5,
            key,
            value.reshape(len(value), -1, sizes.value_dim),
            -self._own(self.A_log).float().exp() * softplus(decay.flatten(1).float() + self._own(self.dt_bias)),
            strength.flatten(1).sigmoid().float(),
            chunks,
            bounds=bounds,
            dtype=mixed.dtype,
        )
        out = self.out_norm(out.to(mixed.dtype), gate.reshape(out.shape))
        return self.out_proj(heads_for_tokens(out, packed_seq_params, self.cp_group).flatten(1)[:, None])

    def _own(self, parameter: Tensor) -> Tensor:
        """Return the rows of a parameter for the heads whose tokens this rank reads."""
        return parameter.chunk(self.cp_group.size())[self.cp_group.rank()]

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: Sequence[tuple[int, int, int]] = (),
        metadata: object = None,
        **_: object,
    ) -> ShardedStateDict:
        """Return Megatron's description of the parameters; those of this class are cut in the first dimension."""
        shards = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        own = dict(self.named_parameters(recurse=False))
        return shards | make_sharded_tensors_for_checkpoint(own, prefix, dict.fromkeys(own, 0), sharded_offsets)


def _sharded(config: TransformerConfig, *shape: int) -> torch.nn.Parameter:
    """Return this rank's rows of a parameter."""
    parameter = torch.nn.Parameter(torch.zeros(shape, dtype=config.params_dtype))
    set_tensor_model_parallel_attributes(parameter, is_parallel=True, dim=0, stride=1)
    return parameter


def _unit(heads: Tensor) -> Tensor:
    """Return heads of length one."""
    return heads * (heads.square().sum(-1, keepdim=True) + NORM_EPS).rsqrt()


def _delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_decay: Tensor,
    strength: Tensor,
    chunks: Chunks,
    *,
    bounds: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    """Return `gated_delta_rule`, by the kernels of `fla` where these are installed.

    `bounds` [S + 1] are those of the sequences. The kernels take queries, keys and values in half precision, `dtype`.
    """
    if not query.is_cuda or dtype == torch.float32 or is_deterministic() or find_spec("fla") is None:
        return gated_delta_rule(query, key, value, log_decay, strength, chunks)
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule  # only CUDA can run it

    rows = (each[None] for each in (query.to(dtype), key.to(dtype), value.to(dtype), log_decay, strength))
    out, _ = chunk_gated_delta_rule(*rows, scale=1.0, cu_seqlens=bounds)
    return out[0]
