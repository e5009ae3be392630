"""Which operations the device does itself, which need their numbers first, and which are written out."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tests.hollow.solid import attention, engine

LEFT = {  # memory without contents, what the driver does in full, and views that do not say what they are
    "_C::get_cuda_view_from_cpu_tensor",
    "_C::weak_ref_tensor",
    "_vllm_fa3_C::get_scheduler_metadata",
    "aten::_local_scalar_dense",
    "aten::_pin_memory",
    "aten::empty.memory_format",
    "aten::empty_like",
    "aten::empty_strided",
    "aten::is_pinned",
    "aten::new_empty",
    "aten::new_empty_strided",
    "aten::record_stream",
    "aten::resize_",
    "aten::set_.source_Storage",
    "aten::set_.source_Storage_storage_offset",
    "aten::set_.source_Tensor",
}
ZEROS = {"aten::new_zeros", "aten::zero_", "aten::zeros", "aten::zeros_like"}
SIZED_BY_NUMBERS = {  # their results have as many elements as the numbers say
    "aten::_unique2",
    "aten::bincount",
    "aten::masked_select",
    "aten::nonzero",
    "aten::unique_consecutive",
    "aten::unique_dim",
}


REPEATED = "aten::repeat_interleave.Tensor"
INDEXED = {"aten::_index_put_impl_", "aten::index.Tensor", "aten::index_put", "aten::index_put_"}


def is_sized_by_numbers(name: str, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> bool:
    """Return whether the numbers decide how many elements an operation has to do with: also those of a mask."""
    if name == REPEATED:
        return keywords.get("output_size") is None
    masks = arguments[1] if name in INDEXED else ()
    return name in SIZED_BY_NUMBERS or any(mask is not None and not mask.dtype.is_signed for mask in masks)


def mm_wide(left: Tensor, right: Tensor, out_dtype: torch.dtype) -> Tensor:
    """Compute `aten::mm.dtype`: the product of rounded numbers, itself not rounded to their type."""
    return (left.float() @ right.float()).to(out_dtype)


def addmm_wide(
    total: Tensor,
    left: Tensor,
    right: Tensor,
    out_dtype: torch.dtype,
    *,
    beta: float = 1,
    alpha: float = 1,
    out: Tensor,
) -> Tensor:
    """Compute `aten::addmm.dtype_out`, also if `out` is `total`."""
    product = alpha * mm_wide(left, right, out_dtype)
    return out.copy_(beta * total + product if beta else product)  # a factor of 0 ignores what is no number


WRITTEN_OUT: dict[str, Callable[..., Any]] = engine.WRITTEN_OUT | {
    "aten::_scaled_dot_product_efficient_attention": attention.efficient,
    "aten::_scaled_dot_product_efficient_attention_backward": attention.efficient_backward,
    "aten::_scaled_dot_product_flash_attention": attention.flash,
    "aten::_scaled_dot_product_flash_attention_backward": attention.flash_backward,
    "aten::addmm.dtype_out": addmm_wide,
    "aten::mm.dtype": mm_wide,
    "aten::_flash_attention_forward": attention.varlen,
    "aten::_flash_attention_backward": attention.varlen_backward,
}
