"""Low-rank adapters (LoRA) on Megatron's linear layers, and the weights that they add up to.

The layers compute as before, with frozen weights; a hook adds what the adapter computes from the same input. Of a
column-parallel layer, every rank has the whole A and its rows of B; of a row-parallel layer, its columns of A and the
whole B. Only the `rank` numbers between A and B travel among tensor-parallel ranks. To merge a weight, a rank needs
nothing of the others.
"""

import math
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from torch import Tensor, nn
from torch.nn.functional import linear

from megarl.learner.dropout import TokenDropout
from megarl.learner.layout import ROUTER_BIAS, chunk_parameters, global_name, is_adapter, local_name
from megarl.learner.parallel import Mesh
from megarl.learner.together import ProductByExpert
from megarl.models.architecture import Architecture
from megarl.models.lora import EXPERTS, HEAD_OF_ADAPTERS, Adapted, Lora, adapted, adapter_pieces
from megarl.platform.device import local_device
from megarl.reshard.layout import Layout, Piece, row_major, whole

Output = tuple[Tensor, Tensor | None]
"""The result of a linear layer of Megatron: its output, and a bias that is added later."""


class Adapter(nn.Module):
    """The matrices A and B of one linear layer, or of one projection of all experts of this rank."""

    def __init__(
        self, parts: Mapping[str, Adapted], lora: Lora, dtype: torch.dtype, mesh: Mesh, *, is_stacked: bool = False
    ) -> None:
        """Make adapters that add nothing: B is zero.

        Args:
            parts: the weights with these adapters, by name in the chunk: one, or one for each local expert.
            lora: rank and scale.
            dtype: of A and B.
            mesh: this rank's place.
            is_stacked: whether A and B have a first dimension, one place for each part, all of experts.
        """
        super().__init__()
        self.parts = parts
        self.rank = lora.rank
        self.scale = lora.scale
        self.is_stacked = is_stacked
        self.is_active = True
        self._mesh = mesh
        self._part = next(iter(parts.values()))  # others have the same shapes, and are cut the same
        a, b = self._part.shapes(lora.rank)
        stack = (len(parts),) if is_stacked else ()
        device = local_device()
        self.lora_a = nn.Parameter(torch.zeros(*stack, *a, dtype=dtype, device=device))
        self.lora_b = nn.Parameter(torch.zeros(*stack, *b, dtype=dtype, device=device))
        self._of_projection = _rows_of_projections(self._part, self.lora_b)

    @torch.no_grad()
    def draw(self, seed: int) -> None:
        """Draw A from U(-1 / sqrt(columns), 1 / sqrt(columns)) as PEFT does, the same under every split."""
        for part, a in zip(
            self.parts.values(), self.lora_a.view(len(self.parts), -1, self.lora_a.shape[-1]), strict=True
        ):
            for projection, own in zip(part.projections, a.split(self.rank), strict=True):
                generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {projection}".encode()))
                bound = 1 / math.sqrt(part.num_columns)
                whole = torch.empty(self.rank, part.num_columns).uniform_(-bound, bound, generator=generator)
                own.copy_(whole[:, part.first_column : part.first_column + own.shape[1]])

    def added(self, out: Tensor, *inputs: object) -> Tensor:
        """Return the output of a layer with frozen weights, plus what the adapter computes from the layer's inputs."""
        return torch.add(out, self(*inputs), alpha=self.scale) if self.is_active else out

    def wide_b(self) -> Tensor:
        """Return [..., rows, projections * rank]: B, with zeros for the columns of other projections."""
        b = self.lora_b.flatten(-3, -2)
        return b if self._of_projection is None else (b.unsqueeze(-2) * self._of_projection).flatten(-2)

    def _matrices(self) -> tuple[tuple[nn.Parameter, bool], ...]:
        """Return A and B, each with whether ranks have different parts of it."""
        return (self.lora_a, self._part.cuts_columns), (self.lora_b, self._part.cuts_rows)

    def cut(self, matrix: str) -> tuple[list[tuple[int, int, int]], int, int]:
        """Return how ranks share `lora_a` or `lora_b`, as Megatron's checkpoints describe it.

        Returns:
            For each dimension that is cut: its number, the number of this rank's part, and the number of parts. Then
            the number of this rank among those with the same part in a group, and among the data-parallel groups.
        """
        place = self._mesh.cut
        if self.is_stacked:
            shared = [(0, place.ep_rank, place.ep_size)]
            rank = place.etp_rank
            size = place.etp_size
            replica = parallel_state.get_expert_data_parallel_rank()
        else:
            shared = []
            rank = place.tp_rank
            size = place.tp_size
            replica = parallel_state.get_data_parallel_rank(with_context_parallel=True)
        if self._part.cuts_columns if matrix == "lora_a" else self._part.cuts_rows:
            # The columns of [rows, columns], or the rows of [blocks, rows, rank].
            return [*shared, (len(shared) + 1, rank, size)], 0, replica
        return shared, rank, replica

    @torch.no_grad()
    def merged(self, weight: Tensor, place: int | None) -> Tensor:
        """Return a new tensor: the weight with its adapter, computed in float32. `place` is that of its expert."""
        a = self.lora_a.detach()
        b = self.wide_b()
        if place is not None:
            a = a[place]
            b = b[place]
        return torch.addmm(weight.float(), b.float(), a.float(), alpha=self.scale).to(weight.dtype)


def _rows_of_projections(part: Adapted, like: Tensor) -> Tensor | None:
    """Return [rows, projections, 1] ones and zeros: the projection of each row; None if all rows have the same."""
    found = like.new_zeros(part.shape[0], len(part.projections), 1)
    for region in part.regions:
        found[region.row : region.row + region.box.shape[0], part.number_of(region)] = 1
    return None if found.shape[1] == 1 and bool(found.all()) else found


class LinearAdapter(Adapter):
    """The adapter of a linear layer outside the experts."""

    def __init__(
        self,
        parts: Mapping[str, Adapted],
        lora: Lora,
        dtype: torch.dtype,
        mesh: Mesh,
        *,
        sequence_parallel: bool,
        seed: int,
    ) -> None:
        super().__init__(parts, lora, dtype, mesh)
        first = self._part.first_column
        count = self._part.shape[1]
        self.dropout: TokenDropout | None = None
        if lora.dropout:
            self.dropout = TokenDropout(
                lora.dropout,
                f"{seed} {self._part.linear}",
                torch.arange(first, first + count, dtype=torch.int32, device=local_device()),
                tp_rank=mesh.cut.tp_rank,
                tp_size=mesh.cut.tp_size,
            )
        self._group = mesh.tp_group if mesh.tp_size > 1 else None
        self._sequence_parallel = sequence_parallel
        for matrix, is_cut in self._matrices():
            matrix.tensor_model_parallel = is_cut  # type: ignore[attr-defined]
            matrix.sequence_parallel = sequence_parallel and not is_cut  # type: ignore[attr-defined]

    def forward(self, hidden: Tensor) -> Tensor:
        """Map the input of the linear layer to B A times the input, in the shape of its output."""
        if self.dropout:
            hidden = self.dropout(hidden, is_training=self.training)
        return linear(self._exchanged(linear(hidden, self.lora_a)), self.wide_b())

    def _exchanged(self, low: Tensor) -> Tensor:
        """Exchange [..., projections * rank] numbers among tensor-parallel ranks as the layer does its own."""
        if self._group is None or not (self._part.cuts_rows or self._part.cuts_columns):
            return low
        exchange: Callable[..., Tensor]
        if self._sequence_parallel:
            exchange = gather_from_sequence_parallel_region
            if self._part.cuts_columns:
                exchange = reduce_scatter_to_sequence_parallel_region
        else:
            exchange = copy_to_tensor_model_parallel_region
            if self._part.cuts_columns:
                exchange = reduce_from_tensor_model_parallel_region
        return exchange(low, group=self._group)


class ExpertsAdapter(Adapter):
    """The adapters of one projection of all experts of this rank.

    The ranks that share an expert exchange its tokens and outputs, not this module. So each of them has a part of the
    gradient of a matrix that they all hold.
    """

    def __init__(self, parts: Mapping[str, Adapted], lora: Lora, dtype: torch.dtype, mesh: Mesh) -> None:
        super().__init__(parts, lora, dtype, mesh, is_stacked=True)
        for matrix, is_cut in self._matrices():
            is_shared = mesh.cut.etp_size > 1 and not is_cut
            matrix.allreduce = False  # type: ignore[attr-defined] # as `mark_experts` marks the experts' weights
            matrix.is_summed_over_etp = is_shared  # type: ignore[attr-defined]
            # For the norm of the gradient: Megatron counts a marked matrix on every rank, and a shared one on none.
            matrix.tensor_model_parallel = True  # type: ignore[attr-defined]
            matrix.shared = is_shared and mesh.cut.etp_rank > 0  # type: ignore[attr-defined]

    def forward(self, hidden: Tensor, counts: Sequence[int]) -> Tensor:
        """Map [N, columns] states, `counts[e]` of each expert e in turn, to B A times the states."""
        low = ProductByExpert.apply(hidden, counts, *self.lora_a)
        out: Tensor = ProductByExpert.apply(low, counts, *self.wide_b())
        return out


def add_adapters(modules: Sequence[GPTModel], architecture: Architecture, lora: Lora, mesh: Mesh, *, seed: int) -> None:
    """Freeze the chunks of a GPTModel, except a scalar head, and give its linear layers adapters."""
    for chunk in modules:
        for name, parameter in chunk.named_parameters():
            parameter.requires_grad_(architecture.scalar_head and name == "output_layer.weight")
        if chunk.pre_process:
            chunk.embedding.register_forward_hook(_needing_gradient)
        config = chunk.config
        experts: dict[tuple[str, str], dict[str, Adapted]] = defaultdict(dict)
        for name, parameter in list(chunk_parameters(chunk)):
            shape = tuple(parameter.shape)
            part = adapted(architecture, lora, global_name(name, chunk), shape, cut=mesh.cut)
            place = EXPERTS.fullmatch(name)
            if part and place:
                experts[place["experts"], place["linear"]][name] = part
            elif part:
                layer = chunk.get_submodule(name.removesuffix(".weight"))
                layer.adapter = LinearAdapter(
                    {name: part},
                    lora,
                    config.params_dtype,
                    mesh,
                    sequence_parallel=config.sequence_parallel,
                    seed=seed,
                )
                layer.register_forward_hook(partial(_hook_of(layer), layer.adapter))
        for (path, projection), parts in experts.items():
            block = chunk.get_submodule(path)
            block.adapters = getattr(block, "adapters", nn.ModuleDict())
            block.adapters[projection] = ExpertsAdapter(parts, lora, config.params_dtype, mesh)
            if hasattr(block, projection):
                getattr(block, projection).register_forward_hook(partial(_add, block.adapters[projection]))
        for adapter in adapters_of([chunk]):
            adapter.draw(seed)


def _needing_gradient(module: nn.Module, inputs: object, embedded: Tensor) -> Tensor:
    """Mark the first layer's input: Megatron recomputes a layer in the backward pass only if its input is marked."""
    return embedded.requires_grad_() if torch.is_grad_enabled() else embedded


def _hook_of(layer: Any) -> Callable[..., Output]:
    """Return the hook that adds an adapter to a layer's output.

    A layer of Transformer Engine that begins with a norm returns the output of the norm too.
    """
    if not hasattr(layer, "return_layernorm_output"):
        return _add
    layer.return_layernorm_output = True
    layer.return_layernorm_output_gathered = False  # with sequence parallelism, this rank's tokens alone
    return _add_behind_norm


def _add(adapter: Adapter, module: nn.Module, inputs: tuple[object, ...], output: Output) -> Output:
    out, bias = output
    return adapter.added(out, *inputs), bias


def _add_behind_norm(adapter: Adapter, module: nn.Module, inputs: object, output: tuple[Any, ...]) -> Output:
    if module.te_return_bias:
        out, bias, normed = output
    else:
        (out, normed), bias = output
    return adapter.added(out, normed), bias


def adapters_of(modules: Iterable[nn.Module]) -> Iterator[Adapter]:
    """Yield the adapters of the chunks of a model."""
    return (part for module in modules for part in module.modules() if isinstance(part, Adapter))


def adapter_weights(modules: Sequence[nn.Module]) -> dict[str, Tensor]:
    """Return the matrices of the local adapters, and a scalar head, by name; they share the memory of the chunks."""
    return {
        f"{number}.{name}": parameter.detach()
        for number, chunk in enumerate(modules)
        for name, parameter in chunk.named_parameters()
        if parameter.requires_grad
    }


def adapter_layout(modules: Sequence[nn.Module]) -> Layout:
    """Return the boxes of PEFT's parameters in `adapter_weights`."""
    layout = list[Piece]()
    for number, chunk in enumerate(modules):
        for path, adapter in chunk.named_modules():
            if not isinstance(adapter, Adapter):
                continue
            a = f"{number}.{path}.lora_a"
            b = f"{number}.{path}.lora_b"
            for place, part in enumerate(adapter.parts.values()):
                layout += adapter_pieces(part, adapter.rank, a=a, b=b, place=place, dtype=adapter.lora_a.dtype)
    for param, tensor in adapter_weights(modules).items():
        if not is_adapter(param):
            shape = tuple(tensor.shape)
            layout.append(Piece(HEAD_OF_ADAPTERS, whole(shape), param, 0, row_major(shape), tensor.dtype))
    return layout


def trained_shards(chunk: GPTModel) -> dict[str, ShardedTensor]:
    """Return what changes in a chunk with adapters, as shards of a checkpoint, by name in the chunk.

    Besides the adapters, these are a scalar head and the biases of routers.
    """
    adapters = {path: module for path, module in chunk.named_modules() if isinstance(module, Adapter)}
    learning = {name: parameter for name, parameter in chunk.named_parameters() if parameter.requires_grad}
    biases = {name: buffer for name, buffer in chunk.named_buffers() if name.endswith(ROUTER_BIAS)}
    shards = {}
    for name, tensor in (learning | biases).items():
        path, _, matrix = name.rpartition(".")
        cut, *replica = adapters[path].cut(matrix) if path in adapters else _whole()
        key = global_name(name, chunk)
        shards[name] = ShardedTensor.from_rank_offsets(key, tensor, *cut, replica_id=(0, *replica))
    return shards


def _whole() -> tuple[list[tuple[int, int, int]], int, int]:
    """Return how ranks share a tensor that each of them holds complete, as `Adapter.cut` does."""
    replica = parallel_state.get_data_parallel_rank(with_context_parallel=True)
    return [], parallel_state.get_tensor_model_parallel_rank(), replica


@contextmanager
def adapters_off(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Let the chunks compute with their frozen weights alone within the block."""
    adapters = list(adapters_of(modules))
    for adapter in adapters:
        adapter.is_active = False
    try:
        yield
    finally:
        for adapter in adapters:
            adapter.is_active = True


@contextmanager
def dropping(chunk: nn.Module, keys: Tensor | None) -> Iterator[None]:
    """Let the adapters of a chunk drop numbers by `keys`, as in `Packed`, in the forward pass within the block."""
    with ExitStack() as stack:
        for dropout in _dropouts_of([chunk]):
            stack.enter_context(dropout.keys.set_to(keys))
        yield


def begin_dropout(modules: Iterable[nn.Module], update: str) -> None:
    """Let the adapters of the chunks draw what they drop in a forward and backward pass; `update` names the pass."""
    for dropout in _dropouts_of(modules):
        dropout.begin(update)


def _dropouts_of(modules: Iterable[nn.Module]) -> Iterator[TokenDropout]:
    found = (each.dropout for each in adapters_of(modules) if isinstance(each, LinearAdapter))
    return (dropout for dropout in found if dropout)


def add_over_expert_tensor_ranks(models: Iterable[nn.Module]) -> None:
    """Sum the gradients of experts' matrices that the ranks of an expert-tensor group all hold; other sums are done."""
    for model in models:
        for parameter in model.parameters():
            if getattr(parameter, "is_summed_over_etp", False):
                gradient: Tensor = parameter.main_grad  # type: ignore[attr-defined]
                dist.all_reduce(gradient, group=parallel_state.get_expert_tensor_parallel_group())


class MergedWeights(Mapping[str, Tensor]):
    """The local weights by name. One that has an adapter is merged each time it is asked for, and not kept."""

    def __init__(self, weights: Mapping[str, Tensor], modules: Sequence[nn.Module]) -> None:
        self._weights = weights
        self._adapters = dict[str, tuple[Adapter, int | None]]()
        for number, chunk in enumerate(modules):
            for adapter in adapters_of([chunk]):
                for place, name in enumerate(adapter.parts):
                    param = local_name(name, number, modules)
                    self._adapters[param] = (adapter, place if adapter.is_stacked else None)

    def __getitem__(self, param: str) -> Tensor:
        weight = self._weights[param]
        adapter, place = self._adapters.get(param, (None, None))
        return weight if adapter is None else adapter.merged(weight, place)

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)
