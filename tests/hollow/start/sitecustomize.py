"""The start of every Python process on the hollow device: torch and Triton are prepared as soon as they are imported.

Python imports a module of this name when it starts; `tests/hollow/run` puts this folder on its path.
"""

import importlib.abc
import importlib.machinery
import os
import sys
from importlib import import_module
from types import ModuleType
from typing import Any

PREPARED = {  # modules, and the functions that take them after their import
    "torch": ("tests.hollow.solid.mode", "enter_everywhere"),
    "triton.runtime.interpreter": ("tests.hollow.solid.interpreted", "interpret_in_place"),
    "vllm.model_executor.kernels.linear.cute_dsl.ll_fp32w": (
        "tests.hollow.solid.cute_kernels",
        "multiply_by_router_without",
    ),
    "vllm.model_executor.layers.fused_moe.fused_moe": (
        "tests.hollow.solid.triton_kernels",
        "multiply_by_experts_in_torch",
    ),
    "vllm.model_executor.layers.fused_qk_norm_rope": (
        "tests.hollow.solid.triton_kernels",
        "normalize_and_rotate_in_torch",
    ),
    "vllm.model_executor.layers.mamba.ops.causal_conv1d": (
        "tests.hollow.solid.linear_attention",
        "convolve_in_torch",
    ),
    "vllm.third_party.flash_linear_attention.ops.chunk": (
        "tests.hollow.solid.linear_attention",
        "run_gated_delta_rule_in_torch",
    ),
    "vllm.third_party.flash_linear_attention.ops.fused_gdn_prefill_post_conv": (
        "tests.hollow.solid.linear_attention",
        "prepare_gated_delta_rule_in_torch",
    ),
    "vllm.third_party.flash_linear_attention.ops.fused_recurrent": (
        "tests.hollow.solid.linear_attention",
        "step_gated_delta_rule_in_torch",
    ),
    "vllm.third_party.flash_linear_attention.ops.layernorm_guard": (
        "tests.hollow.solid.triton_kernels",
        "normalize_and_gate_in_torch",
    ),
    "vllm.v1.sample.ops.topk_topp_triton": ("tests.hollow.solid.triton_kernels", "filter_tokens_in_torch"),
}


class Prepared(importlib.abc.Loader):
    """Loads a module as its own loader does, and prepares it."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        """Let the module's own loader make it."""
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Import the module, then prepare it."""
        self._loader.exec_module(module)
        home, function = PREPARED[module.__name__]
        getattr(import_module(home), function)(module)


class Finder(importlib.abc.MetaPathFinder):
    """Finds modules as ever, and has those of PREPARED prepared."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        """Return the spec of a module that is prepared, and None for every other module."""
        if name not in PREPARED:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec:
            spec.loader = Prepared(spec.loader)
        return spec


if file := os.environ.get("HOLLOW_LINES"):
    import_module("tests.hollow.lines").record(file)
if os.environ.get("HOLLOW_SOLID") == "1":
    sys.meta_path.insert(0, Finder())
