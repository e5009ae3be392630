"""vLLM's own way to load new weights while it runs: full Hugging Face tensors, through its loaders.

Training does not use it; `benchmarks` compares the direct way with it.
"""

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from megarl.platform.device import on_cuda
from megarl.rollout.engine import RolloutEngine


def load_full_tensors(engine: RolloutEngine, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Replace all weights of a running engine; every rank of a replica must pass the same tensors.

    On CPU vLLM keeps the old packing of a tied LM head: do not use it for such models there.
    """
    engine._llm.collective_rpc(_forget_packed_experts)
    engine._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": tensors})
    if not engine._llm.reset_prefix_cache():
        raise RuntimeError("vLLM could not drop keys cached under the old weights: a request is still running")


def _forget_packed_experts(worker: Any) -> None:
    """Undo the packing of experts: vLLM 0.26 - 0.32 packs once on CPU, and would overwrite them with unpacked bytes."""
    for module in worker.get_model().modules():
        method: Any = getattr(module, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None and not on_cuda():
            method.moe_kernel = None
