"""The engine's weights as the destination of a sync: `open` a parameter, write its pieces, `close` it.

A module that computes with its parameters as they are loaded is written in place. Any other module is staged: its
load-format tensors get memory when its first parameter opens. When its last parameter closes, they are packed into the
kernel tensors and freed, so only open modules are staged.
Invariant: a sync writes every parameter, or it fails.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import set_current_vllm_config

from megarl.reshard.layout import Layout
from megarl.rollout import reload
from megarl.rollout.layout import EngineLayout


class EngineWeights:
    """One rank's share of the engine's weights (`Destination`)."""

    def __init__(self, model: nn.Module, layout: EngineLayout, *, vllm_config: Any) -> None:
        self._modules = dict(model.named_modules())
        self._model = model
        self._layout = layout
        self._vllm_config = vllm_config
        self._module_of = {param: module for module, params in layout.params.items() for param in params}
        self._unwritten: dict[str, set[str]] = {}  # module -> parameters not closed yet; empty between syncs
        self._staged: set[str] = set()

    def layout(self) -> Layout:
        """Return the boxes that this rank must receive."""
        return self._layout.pieces

    def open(self, param: str) -> Tensor:
        """Return the tensor to write the pieces of `param` to. It is valid until the parameter is closed."""
        name, key = param.rsplit(".", 1)
        assert param in self._unwritten[name], f"{param} is written twice in one sync"
        module = self._modules[name]
        if name not in self._layout.in_place and name not in self._staged:
            reload.to_load_format(module, [key.rsplit(".", 1)[1] for key in self._layout.params[name]])
            reload.materialize(module)
            self._staged.add(name)
        return reload.parameters(module)[key].data

    def close(self, param: str) -> None:
        """Finish `param`: all of its pieces are written."""
        for region in self._layout.padding.get(param, ()):
            region.view(self.open(param)).zero_()
        name = self._module_of[param]
        self._unwritten[name].remove(param)
        if not self._unwritten[name]:
            del self._unwritten[name]
            if name in self._staged:
                self._staged.remove(name)
                reload.process(self._modules[name])
            elif reload.has_packed_copy(self._modules[name]):
                reload.repack(self._modules[name])

    @contextmanager
    def update(self) -> Iterator[None]:
        """Open a sync: within the block every parameter must be opened, written and closed.

        Raises:
            RuntimeError: parameters were not; names them.
        """
        assert not self._unwritten, "the last sync did not end"
        self._unwritten = {name: set(params) for name, params in self._layout.params.items()}
        with torch.no_grad(), set_current_vllm_config(self._vllm_config):
            yield
            self._finish()

    def _finish(self) -> None:
        # A rank past the end of the vocabulary holds only padding, which no sender knows.
        received = {piece.param for piece in self._layout.pieces}
        for param in [param for params in self._unwritten.values() for param in params if param not in received]:
            self.open(param)
            self.close(param)
        if self._unwritten:
            missing = sorted(param for params in self._unwritten.values() for param in params)
            raise RuntimeError(f"The sync left {len(missing)} parameters of the engine unwritten: {missing[:3]} ...")
        for name in self._layout.tied:  # vLLM repacks a tied head only when it loads the head itself
            if reload.has_quant_method(self._modules[name]):
                reload.repack(self._modules[name])
        reload.finish(self._model, self._vllm_config.model_config.dtype)
