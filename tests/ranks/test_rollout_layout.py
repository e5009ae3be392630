"""The layout is what vLLM's loaders do, and a loader that does more than copy is refused by name."""

import math
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megarl.reshard.layout import Box, Piece
from megarl.rollout import patches
from megarl.rollout.fields import OURS, engine_arguments

patches.prepare_environment()

from vllm import EngineArgs  # noqa: E402
from vllm.model_executor.model_loader.reload import record_metadata_for_reloading  # noqa: E402

from megarl.rollout.layout import trace  # noqa: E402 (imports vLLM, which reads its environment then)

Loader = Callable[[Tensor, Tensor], Any]


class Model(nn.Module):
    """One 4 x 3 parameter and the loader under test, in a model as vLLM keeps it once it is loaded."""

    def __init__(self, loader: Loader) -> None:
        super().__init__()
        self.layer = nn.Module()
        self.layer.weight = nn.Parameter(torch.ones(4, 3), requires_grad=False)
        self.loader = loader
        record_metadata_for_reloading(self)

    def load_weights(self, weights: list[tuple[str, Tensor]]) -> None:
        for _, tensor in weights:
            self.loader(self.layer.weight.data, tensor)


def test_arguments_parsed_from_source_match_engine_class() -> None:
    assert engine_arguments() == {field.name for field in fields(EngineArgs)} >= OURS


def traced(loader: Loader, shape: tuple[int, ...] = (8, 3)) -> Any:
    return trace(Model(loader), {"w": shape}, torch.device("cpu"))


def test_trace_records_rows_and_padding_without_writing() -> None:
    model = Model(lambda param, full: (param[:3].copy_(full[5:8]), param[3:].fill_(0)))
    layout = trace(model, {"w": (8, 3)}, torch.device("cpu"))
    assert layout.pieces == [Piece("w", Box((5, 0), (8, 3)), "layer.weight", 0, (3, 1), torch.float32)]
    [padding] = layout.padding["layer.weight"]
    assert (padding.offset, padding.shape) == (9, (1, 3))
    assert layout.params == {"layer": ["layer.weight"]}
    assert layout.in_place == {"layer"}
    assert torch.equal(model.layer.weight, torch.ones(4, 3))


def test_column_shard_is_box_on_second_axis() -> None:
    [piece] = traced(lambda param, full: param.copy_(full.narrow(1, 6, 3)), (4, 12)).pieces
    assert piece.box == Box((0, 6), (4, 9))


def test_a_fused_half_keeps_its_place() -> None:
    def load(param: Tensor, full: Tensor) -> None:
        param.narrow(0, 2, 2).copy_(full[:2])
        param.narrow(0, 0, 2).copy_(full[4:6])

    assert [(piece.box.lo, piece.offset) for piece in traced(load).pieces] == [((0, 0), 6), ((4, 0), 0)]


@pytest.mark.parametrize(
    "loader",
    [
        lambda param, full: param.copy_(full[:, 2:6].t()),
        lambda param, full: param.copy_(full[:, 2:6].t().contiguous()),
    ],
)
def test_transposed_box_has_transposed_strides(loader: Loader) -> None:
    [piece] = traced(loader, (3, 8)).pieces
    assert (piece.box, piece.offset, piece.stride) == (Box((0, 2), (3, 6)), 0, (1, 3))


def test_the_only_row_fills_a_vector() -> None:
    [piece] = traced(lambda param, full: param.view(-1).copy_(full.squeeze(0)), (1, 12)).pieces
    assert (piece.box, piece.stride) == (Box((0, 0), (1, 12)), (0, 1))


def test_a_zeroed_source_leaves_padding() -> None:
    layout = traced(lambda param, full: (param[:2].copy_(full[:2]), full.zero_(), param[2:].copy_(full[2:])), (4, 3))
    assert [piece.box for piece in layout.pieces] == [Box((0, 0), (2, 3))]
    assert [(part.offset, part.shape) for part in layout.padding["layer.weight"]] == [(6, (2, 3))]


def test_filling_no_element_leaves_no_padding() -> None:
    """Accept that vLLM's loader of sinks writes -inf after the heads of a rank if no element is there."""
    layout = traced(lambda param, full: (param.copy_(full), param[4:].fill_(-math.inf)), (4, 3))
    assert [piece.box for piece in layout.pieces] == [Box((0, 0), (4, 3))]
    assert not layout.padding


@pytest.mark.parametrize(
    ("loader", "shape", "message"),
    [
        (lambda param, full: param.copy_(full * 2), (4, 3), "computes what it writes"),
        (lambda param, full: param.copy_(full[::2]), (8, 3), "skips elements of what it writes"),
        (lambda param, full: param.copy_(full.t()[::2]), (3, 8), "skips elements of what it writes"),
        (lambda param, full: param.copy_(full.t().contiguous() * 2), (3, 4), "computes what it writes"),
        (lambda param, full: param.copy_(full.t().contiguous()[:4]), (3, 8), "computes what it writes"),
        (lambda param, full: param.copy_(full.reshape(4, 3)), (12,), "reshapes what it writes"),
        (lambda param, full: param.copy_(full), (1, 3), "reshapes what it writes"),
        (lambda param, full: (full[2:].zero_(), param.copy_(full)), (4, 3), r"calls aten\.zero_"),
        (lambda param, full: param.add_(full), (4, 3), r"calls aten\.add_"),
        (lambda param, full: param.fill_(1.0), (4, 3), r"calls aten\.fill_"),
        (lambda param, full: (param.copy_(full), param[3:].fill_(-math.inf)), (4, 3), r"calls aten\.fill_"),
        (
            lambda param, full: param[:3].copy_(full[:3]),
            (4, 3),
            r"layer\.weight \(4, 3\): 3 elements are never written",
        ),
        (lambda param, full: (param.copy_(full), param[0].fill_(0)), (4, 3), "0 elements are never written, 3 more"),
        (lambda param, full: torch.empty(4, 3, device="meta").copy_(full), (4, 3), "a tensor that is no parameter"),
    ],
)
def test_anything_but_a_plain_copy_is_refused(loader: Loader, shape: tuple[int, ...], message: str) -> None:
    model = Model(loader)
    with pytest.raises(RuntimeError, match=message):
        trace(model, {"w": shape}, torch.device("cpu"))
    assert torch.equal(model.layer.weight, torch.ones(4, 3))  # the engine is as it was


def test_shared_parameter_belongs_to_first_module() -> None:
    model = Model(lambda param, full: param.copy_(full[:4]))
    model.gate, model.experts = nn.Module(), nn.Module()
    bias = nn.Parameter(torch.ones(8), requires_grad=False)
    for module in (model.gate, model.experts):  # as DeepSeek-V3's gate and its experts
        module.register_parameter("e_score_correction_bias", bias)
    model.experts.w2 = nn.Parameter(torch.ones(2), requires_grad=False)
    record_metadata_for_reloading(model)
    targets = {"w": "layer.weight", "b": "gate.e_score_correction_bias", "e": "experts.w2"}
    model.load_weights = lambda weights: [  # type: ignore[method-assign]
        model.get_parameter(targets[name]).data.copy_(tensor) for name, tensor in weights
    ]
    layout = trace(model, {"w": (4, 3), "b": (8,), "e": (2,)}, torch.device("cpu"))
    assert [piece.param for piece in layout.pieces] == [*targets.values()]
    assert layout.params == {module: [param] for param in targets.values() for module in [param.split(".")[0]]}
    assert layout.tied == frozenset()
    assert model.gate.e_score_correction_bias is model.experts.e_score_correction_bias is bias
    assert torch.equal(bias, torch.ones(8))
