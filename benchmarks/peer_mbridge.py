"""The usual way to gather weights, for comparison: mbridge's `export_weights`.

It yields every full Hugging Face tensor on every rank: a broadcast over the pipeline, then a gather over the tensor
ranks. Written for mbridge 0.15.1 with Megatron-Core 0.16.1; nothing of it is changed but what is listed here.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.learner.patches.cpu import CPU, megatron_platform
from megarl.platform.device import on_cuda
from megarl.platform.patching import declare, replaced

DEVICE = declare(
    "torch.cuda",
    "current_device",
    library="mbridge",
    versions="==0.15.1",
    reason="makes its receive buffers on the current CUDA device, also without CUDA",
    upstream="mbridge/core/bridge.py: Bridge.export_weights",
    until="it makes them on the device of the weights",
)
COLLECTIVES = declare(
    "torch.distributed",
    "all_gather",
    "broadcast",
    library="mbridge",
    versions="==0.15.1",
    reason="its traffic is counted",
    upstream="none needed: a measurement",
    until="the comparison with mbridge is dropped",
)
EXPERT = re.compile(r"\.mlp\.experts\.local_experts\.(\d+)\.(linear_fc[12])\.weight$")


class TransformerEngineNames:
    """A GPTModel of Megatron's local layers with the parameter names of Transformer Engine's layers.

    mbridge 0.15.1 knows only those. It asks a model for nothing but what is here.
    """

    def __init__(self, module: Any, *, has_experts: bool) -> None:
        self.decoder = module.decoder
        self._module = module
        self._has_experts = has_experts

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """As in the module."""
        return ((self._name(name), parameter) for name, parameter in self._module.named_parameters())

    def state_dict(self) -> dict[str, Tensor]:
        """As in the module."""
        return {self._name(name): tensor for name, tensor in self._module.state_dict().items()}

    def _name(self, name: str) -> str:
        name = name.replace(".input_layernorm.weight", ".self_attention.linear_qkv.layer_norm_weight")
        if not self._has_experts:
            name = name.replace(".pre_mlp_layernorm.weight", ".mlp.linear_fc1.layer_norm_weight")
        return EXPERT.sub(r".mlp.experts.\2.weight\1", name)


class Exporter:
    """mbridge's bridge for one model.

    Args:
        hf_config: the parsed config.json.
        dtype: of the parameters.
        padded_vocab_size: rows of the trainer's embedding over all tensor ranks; mbridge has another rule.
    """

    def __init__(self, hf_config: dict[str, Any], *, dtype: torch.dtype, padded_vocab_size: int) -> None:
        from mbridge import AutoBridge
        from transformers import CONFIG_MAPPING

        config = CONFIG_MAPPING[hf_config["model_type"]].from_dict(hf_config)
        with megatron_platform():
            self._bridge = AutoBridge.from_config(config, dtype=dtype)
        # mbridge's own model builder would set these.
        self._bridge.make_vocab_size_divisible_by = padded_vocab_size
        self._bridge.vocab_size = hf_config["vocab_size"]
        self._bridge.padded_vocab_size = padded_vocab_size
        self._has_experts = "num_experts" in hf_config

    def export(self, modules: Sequence[Any]) -> Iterator[tuple[str, Tensor]]:
        """Yield every full Hugging Face parameter of the chunks of a model. Collective, within `on_this_platform`."""
        named = [TransformerEngineNames(module, has_experts=self._has_experts) for module in modules]
        exported: Iterator[tuple[str, Tensor]] = self._bridge.export_weights(named)
        return exported


def on_this_platform() -> AbstractContextManager[None]:
    """Return the block in which mbridge may run."""
    return nullcontext() if on_cuda() else replaced(DEVICE, current_device=lambda: CPU)


class Counter:
    """A counter of the tensor bytes that collectives bring to this rank within the block."""

    def __init__(self) -> None:
        self.bytes_received = 0
        self._stack = ExitStack()

    def __enter__(self) -> "Counter":
        gather = self._counted(dist.all_gather, self._of_gather)
        broadcast = self._counted(dist.broadcast, self._of_broadcast)
        self._stack.enter_context(replaced(COLLECTIVES, all_gather=gather, broadcast=broadcast))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _counted(self, collective: Callable[..., Any], count: Callable[..., int]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.bytes_received += count(*args, **kwargs)
            return collective(*args, **kwargs)

        return call

    @staticmethod
    def _of_gather(tensor_list: Iterable[Tensor], tensor: Tensor, **_: Any) -> int:
        return sum(part.nbytes for part in tensor_list) - tensor.nbytes

    @staticmethod
    def _of_broadcast(tensor: Tensor, src: int, **_: Any) -> int:
        return 0 if src == dist.get_rank() else tensor.nbytes
