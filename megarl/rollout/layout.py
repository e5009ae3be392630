"""The place of every Hugging Face parameter in the engine, learnt from vLLM's own weight loaders.

vLLM's loaders run once on meta tensors. Each copy is recorded as a `Piece` and not executed, so the result has vLLM's
head replication, vocabulary padding, fused names and everything else that a family does.
Invariant: every element of every parameter is written by exactly one piece or is declared padding. A loader that does
anything except copy a rectangle of the checkpoint's tensor, transposed or not, or zeros, is refused by name (fails
closed).
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

from megarl.reshard.headers import Shape
from megarl.reshard.layout import Box, Layout, Piece, row_major
from megarl.rollout import reload


@dataclass(frozen=True)
class StridedView:
    """A strided part of a parameter, as in `torch.Tensor.as_strided`."""

    shape: Shape
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


def trace(model: nn.Module, shapes: Mapping[str, Shape], device: torch.device) -> EngineLayout:
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
        self._copied: dict[int | None, tuple[Tensor, Tensor]] = {}  # dense copies of views of sources: copy and view
        self._zeros: set[int | None] = set()  # sources that a loader overwrote with zeros

    def watch(self, module_name: str, parameters: Mapping[str, Tensor]) -> None:
        """Record writes to these parameters of a module from now on."""
        for key, tensor in parameters.items():
            assert tensor.is_contiguous(), "pieces and padding count elements from the start of a dense storage"
            assert tensor.storage_offset() == 0, "pieces and padding count elements from the start of a dense storage"
            self._watched[_storage(tensor)] = (f"{module_name}.{key}", tensor)

    def load(self, model: nn.Module, shapes: Mapping[str, Shape]) -> None:
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
            result = function(*args, **(kwargs or {}))
            if function is torch.ops.aten.clone.default and _storage(args[0]) in self._sources:
                self._copied[_storage(result)] = result, args[0]
            return self._follow(args, result)
        if function is torch.ops.aten.zero_.default and self._is_source(args[0]):
            self._zeros.add(_storage(args[0]))
            return args[0]
        param, tensor = self._watched.get(_storage(args[0]), ("a tensor that is no parameter", None))
        if function is torch.ops.aten.copy_.default and tensor is not None:
            self._note(param, tensor.dtype, target=args[0], value=args[1])
        elif function is torch.ops.aten.fill_.Scalar and tensor is not None and (args[1] == 0 or not args[0].numel()):
            self._note_padding(param, args[0])
        else:
            raise self._refusal(param, f"calls {function}", *args)
        return args[0]

    def _is_source(self, tensor: Tensor) -> bool:
        """Return whether a tensor is a Hugging Face parameter, complete and in its own order."""
        _, source = self._sources.get(_storage(tensor), ("", None))
        return source is not None and StridedView.of(tensor) == StridedView.of(source)

    def _follow(self, args: tuple[Any, ...], result: Any) -> Any:
        """Remember the source of a computed tensor, for the message that refuses it."""
        if isinstance(result, Tensor) and _storage(result) not in self._sources:  # else it is a view
            name = self._origin(*args)
            if name is not None:
                self._computed[_storage(result)] = (name, result)  # kept alive: its storage names it
        return result

    def _origin(self, *values: object) -> str | None:
        """Return the Hugging Face parameter behind any of these tensors."""
        for key in map(_storage, values):
            for known in (self._sources, self._computed):
                if key in known:
                    return known[key][0]
        return None

    def _note_padding(self, param: str, target: Tensor) -> None:
        if target.numel():
            self.padding[param].append(StridedView.of(target))
            self._views[param].append(StridedView.of(target))

    def _note(self, param: str, dtype: torch.dtype, *, target: Tensor, value: Tensor) -> None:
        copy, original = self._copied.get(_storage(value), (value, value))
        if StridedView.of(copy) == StridedView.of(value):
            value = original
        if _storage(value) in self._zeros:
            self._note_padding(param, target)
            return
        name, source = self._sources.get(_storage(value), ("", None))
        if source is None:
            raise self._refusal(param, "computes what it writes", value)
        dropped = source.ndim - value.ndim
        if value.shape != target.shape or dropped < 0 or {*source.shape[:dropped]} - {1}:
            raise self._refusal(param, "reshapes what it writes", value)
        if value.numel():
            value = value[(None,) * dropped]
            found = _box(source, value)
            if found is None:
                raise self._refusal(param, "skips elements of what it writes", value)
            box, dimensions = found
            place = StridedView.of(target)
            self._views[param].append(place)
            strides = (0,) * dropped + place.stride
            stride = tuple(strides[dimension] for dimension in dimensions)
            self.pieces.append(Piece(name, box, param, place.offset, stride, dtype))

    def _refusal(self, param: str, deed: str, *values: object) -> RuntimeError:
        name = self._origin(*values) or "a parameter"
        return RuntimeError(f"vLLM's loader of {name} {deed} ({param}); only plain copies can be resharded")


def _box(source: Tensor, value: Tensor) -> tuple[Box, list[int]] | None:
    """Return the box of the (contiguous) source that its view `value` shows, and the dimension of each in `value`.

    None: the view is not a box, or the box is transposed in other ways than by a permutation of its dimensions.
    """
    dimensions = _permutation(source, value)
    lo = []
    rest = int(value.storage_offset())
    for step in source.stride():
        index, rest = divmod(rest, step)
        lo.append(index)
    hi = [low + value.shape[dimension] for low, dimension in zip(lo, dimensions, strict=True)]
    straight = all(
        value.shape[dimension] == 1 or value.stride(dimension) == step
        for dimension, step in zip(dimensions, source.stride(), strict=True)
    )
    inside = all(high <= size for high, size in zip(hi, source.shape, strict=True))
    return (Box(tuple(lo), tuple(hi)), dimensions) if straight and inside else None


def _permutation(source: Tensor, value: Tensor) -> list[int]:
    """Return the dimension of `value` for each of `source`, by their strides; dimensions keep their order if possible.

    Only strides of dimensions with more than one element count.
    """
    free = list(range(value.ndim))
    wide = [dimension for dimension in free if value.shape[dimension] > 1]
    if all(value.stride(dimension) == source.stride(dimension) for dimension in wide):
        return free
    return sorted(free, key=value.stride().__getitem__, reverse=True)


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
