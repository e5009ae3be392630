"""vLLM's private weight-reload names, all of them behind one small door.

vLLM keeps every tensor of a layer in one of two shapes. *Load format* is what weight loaders write to; *kernel format*
is what the forward pass reads. The two are the same tensor for a plain CUDA linear layer, and differ on CPU (packed
weights, `weight` becomes empty) and under quantisation. A layer's load format is known only as meta tensors, which
vLLM records when it builds the model.

Everything here is private to vLLM and may move between releases: `check_version` refuses a release that nobody tried.
Invariant: kernel tensors keep their storage through every change, so captured CUDA graphs stay valid.
"""

from typing import Any

import torch
import vllm
from torch import Tensor, nn
from vllm.model_executor.layers.attention import Attention, MLAAttention
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.reload import layerwise, meta
from vllm.model_executor.model_loader.reload.utils import get_layer_params_buffers

OLDEST, NEWEST = (0, 26), (0, 32)
Layer = Any  # an nn.Module with methods of vLLM's own


def check_version() -> None:
    """Refuse a vLLM whose reload internals this file was not tried with (RuntimeError)."""
    release = tuple(int(part) for part in vllm.__version__.split(".")[:2])
    if not OLDEST <= release <= NEWEST:
        raise RuntimeError(
            f"vLLM {vllm.__version__} is installed; megarl writes weights through internals of vLLM "
            f"{OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}. Install one of these, or check "
            "megarl/rollout/reload.py against the new release and widen its range."
        )


def to_load_format(module: nn.Module) -> None:
    """Put the module's load-format tensors in place as meta tensors, remembering its kernel tensors."""
    info = layerwise.get_layerwise_info(module)
    info.kernel_tensors = get_layer_params_buffers(module)
    info.kernel_non_persistent_buffers = set(module._non_persistent_buffers_set)
    meta.restore_layer_on_meta(module, info)


def materialize(module: nn.Module) -> None:
    """Give the module's meta tensors memory on the engine's device, contents undefined."""
    meta.materialize_layer(module, layerwise.get_layerwise_info(module))


def to_kernel_format(module: nn.Module) -> None:
    """Put the remembered kernel tensors back and forget the load-format ones."""
    info = layerwise.get_layerwise_info(module)
    layerwise._place_kernel_tensors(module, info)
    info.reset()


def process(module: Layer) -> None:
    """Turn the filled load-format tensors into kernel tensors (pack, quantise) inside the storage of the old ones."""
    if hasattr(module, "_already_called_process_weights_after_loading"):
        del module._already_called_process_weights_after_loading
    if has_quant_method(module):
        repack(module)
        if hasattr(module, "update_param_tp_status"):
            module.update_param_tp_status()
    info = layerwise.get_layerwise_info(module)
    layerwise._copy_and_restore_kernel_tensors(module, info)
    info.reset()


def repack(module: Layer) -> None:
    """Derive again what the module's method keeps beside its parameters (on CPU the packed weight)."""
    module.quant_method.process_weights_after_loading(module)


def finish_attention(model: nn.Module, dtype: torch.dtype) -> None:
    """Derive the attention layers' own tensors, which vLLM does after all other layers."""
    layers: list[Layer] = [module for module in model.modules() if isinstance(module, Attention | MLAAttention)]
    for layer in layers:
        layer.process_weights_after_loading(dtype)


def has_quant_method(module: nn.Module) -> bool:
    """Whether something must run on the module's tensors once they are loaded."""
    return isinstance(getattr(module, "quant_method", None), QuantizeMethodBase)


def is_written_in_place(module: nn.Module, device: torch.device) -> bool:
    """Whether load and kernel format are one tensor: no method, or a plain one on CUDA, where it has nothing to do."""
    plain = (UnquantizedLinearMethod, UnquantizedEmbeddingMethod)
    return not has_quant_method(module) or (device.type == "cuda" and type(module.quant_method) in plain)


def parameters(module: nn.Module) -> dict[str, Tensor]:
    """The module's own parameters by name, in whichever format is in place."""
    return get_layer_params_buffers(module)[0]
