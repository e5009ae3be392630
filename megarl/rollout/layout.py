"""Where the engine wants every Hugging Face parameter: learnt from vLLM's own weight loaders.

vLLM's loaders are run once on meta tensors. Each copy they would make is recorded as a `Piece` and not executed, so
head replication, vocabulary padding, fused names and whatever else a family does come out as vLLM does them.
Invariant: every element of every parameter is written by exactly one piece or is declared padding; a loader that does
anything but copy a rectangle of the checkpoint's tensor is refused by name (fails closed).
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from megarl.reshard.layout import Box, Layout, Piece
from megarl.rollout import reload


@dataclass(frozen=True)
class Region:
    """A strided part of a parameter, as in `torch.Tensor.as_strided`."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, view: Tensor) -> "Region":
        """The part of its storage that `view` shows."""
        return cls(tuple(view.shape), tuple(view.stride()), int(view.storage_offset()))

    def view(self, tensor: Tensor) -> Tensor:
        """This part of `tensor`."""
        return tensor.as_strided(self.shape, self.stride, self.offset)


@dataclass(frozen=True)
class EngineLayout:
    """What one rank of the engine holds. A parameter is named `module.key`, a module as in `named_modules`."""

    pieces: Layout
    padding: Mapping[str, Sequence[Region]]  # parameter -> parts that no checkpoint fills: vLLM wants zeros there
    params: Mapping[str, Sequence[str]]  # module -> its parameters
    in_place: frozenset[str]  # modules that may be written where they are read
    tied: frozenset[str]  # modules whose parameters all belong to an earlier one


def trace(model: nn.Module, shapes: Mapping[str, tuple[int, ...]], device: torch.device) -> EngineLayout:
    """Ask `model`'s loaders where they would put Hugging Face parameters of these full `shapes`.

    The model must be loaded (dummy weights will do); its weights are untouched. RuntimeError names the parameter that a
    loader changes on the way, that arrives twice, or that nothing fills.
    """
    modules, tied = _owners(model)
    live = {name: _geometry(module) for name, module in modules.items()}
    recorder = _Recorder()
    with torch.no_grad(), _load_format(modules.values()):
        params = {name: [f"{name}.{key}" for key in reload.parameters(module)] for name, module in modules.items()}
        in_place = frozenset(
            name
            for name, module in modules.items()
            if reload.is_written_in_place(module, device) and _geometry(module) == live[name]
        )
        for name, module in modules.items():
            recorder.watch(name, module)
        for name, shape in shapes.items():
            recorder.load(model, name, shape)
    recorder.prove_coverage()
    return EngineLayout(recorder.pieces, recorder.padding, params, in_place, tied)


def _owners(model: nn.Module) -> tuple[dict[str, nn.Module], frozenset[str]]:
    """The modules that own parameters, and the names of those that only borrow them from an earlier module."""
    seen: set[int] = set()
    owners, tied = {}, set()
    for name, module in model.named_modules():
        own = {id(parameter) for parameter in reload.parameters(module).values()}
        if own and own <= seen:
            tied.add(name)
        elif own:
            owners[name] = module
        seen |= own
    return owners, frozenset(tied)


@contextmanager
def _load_format(modules: Iterable[nn.Module]) -> Iterator[None]:
    changed = []
    try:
        for module in modules:
            reload.to_load_format(module)
            changed.append(module)
        yield
    finally:
        for module in changed:
            reload.to_kernel_format(module)


def _geometry(module: nn.Module) -> dict[str, tuple[torch.dtype, Region]]:
    return {key: (tensor.dtype, Region.of(tensor)) for key, tensor in reload.parameters(module).items()}


def _storage(tensor: Any) -> int | None:
    return tensor.untyped_storage()._cdata if isinstance(tensor, Tensor) else None


class _Recorder(TorchDispatchMode):
    """Notes every write to a watched parameter and keeps it from happening."""

    def __init__(self) -> None:
        super().__init__()
        self.pieces: list[Piece] = []
        self.padding: defaultdict[str, list[Region]] = defaultdict(list)
        self._watched: dict[int | None, tuple[str, Tensor]] = {}
        self._name = ""
        self._source = torch.empty(0, device="meta")

    def watch(self, module_name: str, module: nn.Module) -> None:
        """Note what is written to this module's parameters from now on."""
        for key, tensor in reload.parameters(module).items():
            assert tensor.is_contiguous(), "pieces and padding count elements from the start of a dense storage"
            assert tensor.storage_offset() == 0, "pieces and padding count elements from the start of a dense storage"
            self._watched[_storage(tensor)] = (f"{module_name}.{key}", tensor)

    def load(self, model: nn.Module, name: str, shape: tuple[int, ...]) -> None:
        """Let the model's loaders place Hugging Face parameter `name`."""
        self._name, self._source = name, torch.empty(shape, device="meta")
        with self:
            model.load_weights([(name, self._source)])  # type: ignore[operator]

    def prove_coverage(self) -> None:
        """Every element of every watched parameter is written once or is padding; RuntimeError otherwise."""
        parts: defaultdict[str, list[Piece | Region]] = defaultdict(list)
        for piece in self.pieces:
            parts[piece.param].append(piece)
        for param, regions in self.padding.items():
            parts[param].extend(regions)
        for param, tensor in self._watched.values():
            writes = torch.zeros(tensor.numel(), dtype=torch.uint8)
            for part in parts[param]:
                part.view(writes).add_(1)
            missing, twice = int((writes == 0).sum()), int((writes > 1).sum())
            if missing or twice:
                raise RuntimeError(
                    f"The checkpoint does not fill the engine's {param} {tuple(tensor.shape)}: {missing} elements are "
                    f"never written, {twice} more than once. The family's shapes (megarl/models) and vLLM disagree."
                )

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if not function._schema.is_mutable:
            return function(*args, **(kwargs or {}))
        param, tensor = self._watched.get(_storage(args[0]), ("a tensor that is no parameter", None))
        if function is torch.ops.aten.copy_.default and tensor is not None:
            self._note(param, tensor.dtype, target=args[0], value=args[1])
        elif function is torch.ops.aten.fill_.Scalar and tensor is not None and args[1] == 0:
            if args[0].numel():
                self.padding[param].append(Region.of(args[0]))
        else:
            raise self._refusal(param, f"calls {function}")
        return args[0]

    def _note(self, param: str, dtype: torch.dtype, *, target: Tensor, value: Tensor) -> None:
        if _storage(value) != _storage(self._source):
            raise self._refusal(param, "computes what it writes")
        if value.ndim != self._source.ndim or value.shape != target.shape:
            raise self._refusal(param, "reshapes what it writes")
        if value.numel():
            place = Region.of(target)
            self.pieces.append(Piece(self._name, self._box(param, value), param, place.offset, place.stride, dtype))

    def _box(self, param: str, value: Tensor) -> Box:
        """The box of the (contiguous) source that the view `value` shows."""
        steps = self._source.stride()
        lo, rest = [], int(value.storage_offset())
        for step in steps:
            index, rest = divmod(rest, step)
            lo.append(index)
        hi = [low + size for low, size in zip(lo, value.shape, strict=True)]
        straight = all(
            size == 1 or own == whole for size, own, whole in zip(value.shape, value.stride(), steps, strict=True)
        )
        if not straight or any(high > size for high, size in zip(hi, self._source.shape, strict=True)):
            raise self._refusal(param, "permutes what it writes")
        return Box(tuple(lo), tuple(hi))

    def _refusal(self, param: str, deed: str) -> RuntimeError:
        return RuntimeError(f"vLLM's loader of {self._name} {deed} ({param}); only plain copies can be resharded")
