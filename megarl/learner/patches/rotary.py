"""Rotary position embeddings of packed rows."""

import torch.distributed as dist
from torch import Tensor

from megarl.learner.patches.megatron import declare_megatron
from megarl.platform.patching import replace

PACKED = declare_megatron(
    "megatron.core.models.common.embeddings.rope_utils",
    "_apply_rotary_pos_emb_thd",
    reason="each layer cuts the row into sequences, gathers the angles of each, and computes their cosines again",
    upstream="megatron/core/models/common/embeddings/rope_utils.py: _apply_rotary_pos_emb_thd",
    until="the cosines and sines of a packed row are computed once",
)


def rotate_packed_rows_at_once() -> None:
    """Rotate all sequences of a row together, by cosines and sines that all layers share."""

    def rotated(
        x: Tensor,
        bounds: Tensor,
        angles: Tensor,
        rotary_interleaved: bool = False,
        multi_latent_attention: bool = False,
        mscale: float = 1.0,
        *,
        cp_group: dist.ProcessGroup,
        mla_rotary_interleaved: bool = False,
    ) -> Tensor:
        from megarl.learner.rotary import rotate

        return rotate(
            x,
            bounds,
            angles,
            cp_rank=cp_group.rank(),
            cp_size=cp_group.size(),
            scale=mscale,
            neighbours=rotary_interleaved or multi_latent_attention or mla_rotary_interleaved,
        )

    replace(PACKED, _apply_rotary_pos_emb_thd=rotated)
