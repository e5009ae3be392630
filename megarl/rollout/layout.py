"""The place of every Hugging Face parameter in the engine, learnt from vLLM's own weight loaders.

vLLM's loaders run once on meta tensors. Each copy is recorded as a `Piece` and not executed, so the result has vLLM's
head replication, vocabulary padding, fused names and everything else that a family does.
Invariant: every element of every parameter is written by exactly one piece or is declared padding. A loader that does
anything except copy a rectangle of the checkpoint's tensor is refused by name (fails closed).
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from megarl.reshard.layout import Box, Layout, Piece, row_major
from megarl.rollout import reload


@dataclass(frozen=True)
class StridedView:
    """A strided part of a parameter, as in `torch.Tensor.as_strided`."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, view: Tensor) -> "StridedView":
        """Return the part of its storage that `view` shows."""
        return cls(tuple(view.shape), tuple(view.stride()), int(view.storage_offset()))

    def view(self, tensor: Tensor) -> Tensor:
        """Return this part of `tensor`."""
        return tensor.as_strided(self.shape, self.stride, self.offset)


@dataclass(frozen=True)
class EngineLayout:
    """The weights of one rank of the engine. Parameters are named `module.key`, modules as in `named_modules`."""

    pieces: Layout
    padding: Mapping[str, Sequence[StridedView]]  # parameter -> parts that no checkpoint fills: zeros in vLLM
    params: Mapping[str, Sequence[str]]  # module -> its parameters, except those of earlier modules
    in_place: frozenset[str]  # modules that may be written in place
    tied: frozenset[str]  # modules whose parameters all belong to an earlier module


def trace(model: nn.Module, shapes: Mapping[str, tuple[int, ...]], device: torch.device) -> EngineLayout:
    """Record where `model`'s loaders put Hugging Face parameters of these full `shapes`.

    The model must be loaded (dummy weights suffice). Its weights do not change.

    Raises:
        RuntimeError: a loader changes a parameter on the way, writes it twice, or nothing fills it; names it.
    """
    modules = dict(model.named_modules())
    own, tied = _ownership(modules)
    live = {name: _geometry(modules[name]) for name in own}
    recorder = _Recorder()
    with torch.no_grad(), _load_format(modules, own):
        in_place = frozenset(
            name
            for name in own
            if reload.is_written_in_place(modules[name], device) and _geometry(modules[name]) == live[name]
        )
        for name, keys in own.items():
            recorder.watch(name, {key: reload.parameters(modules[name])[key] for key in keys})
        recorder.load(model, shapes)
    recorder.prove_coverage()
    params = {name: [f"{name}.{key}" for key in keys] for name, keys in own.items()}
    return EngineLayout(recorder.pieces, recorder.padding, params, in_place, tied)


def _ownership(modules: Mapping[str, nn.Module]) -> tuple[dict[str, list[str]], frozenset[str]]:
    """Return the parameters of each module that no earlier module has, and the modules without any of their own."""
    seen = set[Tensor]()  # whose hashes are their identities
    own = {}
    tied = set()
    for name, module in modules.items():
        live = reload.parameters(module)
        loadable = reload.loadable(module)
        keys = [key for key in loadable if live.get(key) not in seen]
        seen |= {*live.values()}
        if keys:
            own[name] = keys
            assert reload.LEFT_LIVE.issuperset({*loadable} - {*keys}), f"{name} shares parameters that it would lose"
        elif loadable:
            tied.add(name)
    return own, frozenset(tied)


@contextmanager
def _load_format(modules: Mapping[str, nn.Module], own: Mapping[str, Sequence[str]]) -> Iterator[None]:
    changed = []
    try:
        for name, keys in own.items():
            reload.to_load_format(modules[name], keys)
            changed.append(modules[name])
        yield
    finally:
        for module in changed:
            reload.to_kernel_format(module)


def _geometry(module: nn.Module) -> dict[str, tuple[torch.dtype, StridedView]]:
    return {key: (tensor.dtype, StridedView.of(tensor)) for key, tensor in reload.parameters(module).items()}


def _storage(tensor: object) -> int | None:
    return tensor.untyped_storage()._cdata if isinstance(tensor, Tensor) else None


class _Recorder(TorchDispatchMode):
    """A mode that records every write to a watched parameter instead of executing it."""

    def __init__(self) -> None:
        super().__init__()
        self.pieces: list[Piece] = []
        self.padding: defaultdict[str, list[StridedView]] = defaultdict(list)
        self._views: defaultdict[str, list[StridedView]] = defaultdict(list)  # of pieces and padding
        self._watched: dict[int | None, tuple[str, Tensor]] = {}
        self._sources: dict[int | None, tuple[str, Tensor]] = {}  # by storage, which a view shares
        self._computed: dict[int | None, tuple[str, Tensor]] = {}  # tensors that a loader computed from a source

    def watch(self, module_name: str, parameters: Mapping[str, Tensor]) -> None:
        """Record writes to these parameters of a module from now on."""
        for key, tensor in parameters.items():
            assert tensor.is_contiguous(), "pieces and padding count elements from the start of a dense storage"
            assert tensor.storage_offset() == 0, "pieces and padding count elements from the start of a dense storage"
            self._watched[_storage(tensor)] = (f"{module_name}.{key}", tensor)

    def load(self, model: nn.Module, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Let the model's loaders place Hugging Face parameters of these shapes, in one call as from a checkpoint."""
        weights = [(name, torch.empty(shape, device="meta")) for name, shape in shapes.items()]
        self._sources = {_storage(source): (name, source) for name, source in weights}
        with self:
            model.load_weights(weights)  # type: ignore[operator]

    def prove_coverage(self) -> None:
        """Raise RuntimeError unless every element of every watched parameter is written once or is padding."""
        for param, tensor in self._watched.values():
            regions = self._views[param]
            if _tile(regions, tensor.numel()):
                continue
            writes = torch.zeros(tensor.numel(), dtype=torch.uint8)
            for region in regions:
                region.view(writes).add_(1)
            missing = int((writes == 0).sum())
            twice = int((writes > 1).sum())
            if missing or twice:
                raise RuntimeError(
                    f"The checkpoint does not fill the engine's {param} {tuple(tensor.shape)}: {missing} elements are "
                    f"never written, {twice} more than once. The family's shapes (megarl/models) and vLLM disagree."
                )

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if not function._schema.is_mutable:
            return self._follow(args, function(*args, **(kwargs or {})))
        param, tensor = self._watched.get(_storage(args[0]), ("a tensor that is no parameter", None))
        if function is torch.ops.aten.copy_.default and tensor is not None:
            self._note(param, tensor.dtype, target=args[0], value=args[1])
        elif function is torch.ops.aten.fill_.Scalar and tensor is not None and args[1] == 0:
            if args[0].numel():
                self.padding[param].append(StridedView.of(args[0]))
                self._views[param].append(StridedView.of(args[0]))
        else:
            raise self._refusal(param, f"calls {function}", *args)
        return args[0]

    def _follow(self, args: tuple[Any, ...], result: Any) -> Any:
        """Remember the source of a computed tensor, for the message that refuses it."""
        is_view = not isinstance(result, Tensor) or _storage(result) in self._sources
        if not is_view and (name := self._origin(*args)) is not None:
            self._computed[_storage(result)] = (name, result)  # kept alive: its storage names it
        return result

    def _origin(self, *values: object) -> str | None:
        """Return the Hugging Face parameter behind any of these tensors."""
        for key in map(_storage, values):
            for known in (self._sources, self._computed):
                if key in known:
                    return known[key][0]
        return None

    def _note(self, param: str, dtype: torch.dtype, *, target: Tensor, value: Tensor) -> None:
        name, source = self._sources.get(_storage(value), ("", None))
        if source is None:
            raise self._refusal(param, "computes what it writes", value)
        if value.ndim != source.ndim or value.shape != target.shape:
            raise self._refusal(param, "reshapes what it writes", value)
        if value.numel():
            box = _box(source, value)
            if box is None:
                raise self._refusal(param, "permutes what it writes", value)
            place = StridedView.of(target)
            self._views[param].append(place)
            self.pieces.append(Piece(name, box, param, place.offset, place.stride, dtype))

    def _refusal(self, param: str, deed: str, *values: object) -> RuntimeError:
        name = self._origin(*values) or "a parameter"
        return RuntimeError(f"vLLM's loader of {name} {deed} ({param}); only plain copies can be resharded")


def _box(source: Tensor, value: Tensor) -> Box | None:
    """Return the box of the (contiguous) source that its view `value` shows; None if the view is not a box."""
    steps = source.stride()
    lo = []
    rest = int(value.storage_offset())
    for step in steps:
        index, rest = divmod(rest, step)
        lo.append(index)
    hi = [low + size for low, size in zip(lo, value.shape, strict=True)]
    straight = all(
        size == 1 or own == whole for size, own, whole in zip(value.shape, value.stride(), steps, strict=True)
    )
    inside = all(high <= size for high, size in zip(hi, source.shape, strict=True))
    return Box(tuple(lo), tuple(hi)) if straight and inside else None


def _tile(parts: Sequence[StridedView], numel: int) -> bool:
    """Return whether the parts are runs of neighbouring elements that together fill `numel` elements."""
    end = 0
    for part in sorted(parts, key=lambda part: part.offset):
        packed = all(
            size == 1 or step == dense
            for size, step, dense in zip(part.shape, part.stride, row_major(part.shape), strict=True)
        )
        if not packed or part.offset != end:
            return False
        end += math.prod(part.shape)
    return end == numel
