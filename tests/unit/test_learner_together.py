"""Experts computed together are the experts one by one: numbers, gradients, and where gradients are added."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megarl.learner.patches.cpu import megatron_platform
from megarl.learner.together import ExpertsTogether, ProductByExpert
from tests.support.ranks import world_of_one

COLUMNS, ROWS = 5, 3
ONE_EXPERT = {"moe_router_topk": 1, "moe_router_pre_softmax": True, "moe_apply_probs_on_input": True}
COUNTS = st.lists(st.integers(0, 6), min_size=1, max_size=7)


def numbers(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def parts(counts: Sequence[int]) -> tuple[Tensor, list[Tensor], Tensor]:
    """Return states, the weight of each expert, and a gradient of the products."""
    hidden = numbers(sum(counts), COLUMNS, seed=0).requires_grad_()
    weights = [numbers(ROWS, COLUMNS, seed=1 + expert).requires_grad_() for expert in range(len(counts))]
    return hidden, weights, numbers(sum(counts), ROWS, seed=99)


def one_by_one(hidden: Tensor, counts: Sequence[int], *weights: Tensor) -> Tensor:
    return torch.cat([rows @ weight.T for rows, weight in zip(hidden.split(list(counts)), weights, strict=True)])


@given(counts=COUNTS)
@settings(deadline=None)
def test_grouped_expert_product_equals_separate_expert_products(counts: list[int]) -> None:
    hidden, weights, slope = parts(counts)
    found, expected = (product(hidden, counts, *weights) for product in (ProductByExpert.apply, one_by_one))
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    ours, theirs = (torch.autograd.grad(out, [hidden, *weights], slope) for out in (found, expected))
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


@given(counts=COUNTS, awaited=st.booleans())
@settings(deadline=None)
def test_expert_gradients_accumulate_into_main_grad(counts: list[int], awaited: bool) -> None:
    hidden, weights, slope = parts(counts)
    before = [numbers(ROWS, COLUMNS, seed=50 + expert) for expert in range(len(counts))]
    for weight, sums in zip(weights, before, strict=True):
        weight.main_grad, weight.is_awaited = sums.clone(), awaited  # type: ignore[attr-defined]
    ProductByExpert.apply(hidden, counts, *weights).backward(slope)
    expected = torch.autograd.grad(one_by_one(hidden, counts, *weights), weights, slope)
    for weight, sums, gradient in zip(weights, before, expected, strict=True):
        assert (weight.grad is not None) == awaited
        torch.testing.assert_close(weight.main_grad, sums + gradient, rtol=1e-6, atol=1e-5)  # type: ignore[attr-defined]


@pytest.mark.parametrize("num_uses", [1, 2])
def test_awaited_gradient_takes_no_memory(num_uses: int) -> None:
    """A weight that is used twice gets one gradient from autograd, which must not add to the weight."""
    hidden, [weight], slope = parts([4])
    start, seen = weight.detach().clone(), list[tuple[bool, bool]]()
    weight.main_grad, weight.is_awaited = torch.zeros_like(weight), True  # type: ignore[attr-defined]

    def hook(*_: Any) -> None:
        assert weight.grad is not None
        seen.append((weight.grad_added_to_main_grad, weight.grad.data_ptr() == weight.data_ptr()))  # type: ignore[attr-defined]
        weight.grad = None

    node = weight.expand_as(weight).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
    node.register_hook(hook)  # type: ignore[union-attr]
    sum(ProductByExpert.apply(hidden, [4], weight) for _ in range(num_uses)).backward(slope)
    assert seen == [(True, num_uses == 1)]
    torch.testing.assert_close(weight.detach(), start, rtol=0, atol=0)
    torch.testing.assert_close(weight.main_grad, num_uses * slope.T @ hidden.detach())  # type: ignore[attr-defined]


def test_embedding_gradient_replaces_that_of_its_tied_head() -> None:
    hidden, [weight], slope = parts([4])
    weight.main_grad, weight.is_awaited = torch.zeros_like(weight), True  # type: ignore[attr-defined]
    weight.zero_out_wgrad = True  # type: ignore[attr-defined]
    (ProductByExpert.apply(hidden, [4], weight) + 2 * weight.sum()).backward(slope)
    assert weight.grad is not None
    torch.testing.assert_close(weight.grad, torch.full_like(weight, 2 * float(slope.sum())))
    assert not hasattr(weight, "grad_added_to_main_grad")


@pytest.mark.parametrize("frozen", ["states", "weights"])
def test_what_needs_no_gradient_gets_none(frozen: str) -> None:
    hidden, weights, slope = parts([2, 0, 3])
    for tensor in [hidden] if frozen == "states" else weights:
        tensor.requires_grad_(False)
    ProductByExpert.apply(hidden, [2, 0, 3], *weights).backward(slope)
    assert (hidden.grad is None) == (frozen == "states")
    assert all((weight.grad is None) == (frozen == "weights") for weight in weights)


def layers(override: dict[str, Any]) -> tuple[Any, Any]:
    """Return Megatron's layer of four experts and ours, with the same weights."""
    settings = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 1, "ffn_hidden_size": 12}
    settings |= {"num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 6, "add_bias_linear": False}
    settings |= {"gated_linear_unit": True, "activation_func": torch.nn.functional.silu}
    config = TransformerConfig(**settings | {"perform_initialization": False} | override)
    groups = SimpleNamespace(ep=dist.group.WORLD, expt_tp=dist.group.WORLD, expt_dp=dist.group.WORLD)
    linear = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    found = [kind(4, config, linear, pg_collection=groups) for kind in (SequentialMLP, ExpertsTogether)]
    for layer in found:
        for number, parameter in enumerate(layer.parameters()):
            parameter.data.copy_(numbers(*parameter.shape, seed=number))
    return found[0], found[1]


@pytest.mark.parametrize("counts", [[3, 0, 5, 1], [0, 0, 0, 0], [0, 9, 0, 0]], ids=str)
@pytest.mark.parametrize("override", [{}, ONE_EXPERT], ids=["two", "one"])
def test_a_layer_is_megatrons_own(counts: list[int], override: dict[str, Any]) -> None:
    with world_of_one(), megatron_platform():
        theirs, ours = layers(override)
        assert [name for name, _ in ours.named_parameters()] == [name for name, _ in theirs.named_parameters()]
        results = list[list[Tensor]]()
        for layer in (theirs, ours):
            hidden = numbers(sum(counts), 8, seed=20).requires_grad_()
            probabilities = numbers(sum(counts), seed=21).sigmoid().requires_grad_()
            out, bias = layer(hidden, torch.tensor(counts), probabilities)
            assert bias is None
            out.backward(numbers(sum(counts), 8, seed=22))
            leaves = [hidden, probabilities, *layer.parameters()]
            results.append([out.detach(), *(leaf.grad for leaf in leaves)])
    torch.testing.assert_close(results[1], results[0], rtol=1e-6, atol=1e-6)


def test_weights_on_their_way_are_awaited() -> None:
    with world_of_one(), megatron_platform():
        layer, called = layers({})[1], list[Any]()
        for module in layer.modules():
            module.register_forward_pre_hook(lambda module, inputs: called.extend(module.parameters(recurse=False)))
        layer(numbers(4, 8, seed=0), torch.tensor([4, 0, 0, 0]), torch.ones(4))
    assert set(called) == set(layer.parameters())
