"""The solid device has the CPU's numbers: operations, attention and its gradients, kernels of Triton and of vLLM."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

pytestmark = pytest.mark.hollow


def numbers(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def in_place(x: Tensor) -> Tensor:
    x[:, 1:3].mul_(2).add_(1)
    x.t()[0].zero_()
    return x


def through_out(x: Tensor) -> Tensor:
    return torch.cumsum(x, 0, out=torch.empty(0, device=x.device))


def gradient(x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    (x.square().sum() + x.prod()).backward()
    assert x.grad is not None
    return x.grad


def in_inference_mode(x: Tensor) -> Tensor:
    with torch.inference_mode():
        return (x * 10).long().to(torch.float64).contiguous() @ x.double().T


def in_another_thread(x: Tensor) -> Tensor:
    found = list[Tensor]()
    thread = threading.Thread(target=lambda: found.append(x + 1))
    thread.start()
    thread.join()
    return found[0]


def fused_update(x: Tensor) -> Tensor:
    parameter = torch.nn.Parameter(x.clone())
    optimizer = torch.optim.AdamW([parameter], lr=0.1)
    for _ in range(3):
        parameter.grad = parameter.detach().square()
        optimizer.step()
    return parameter.detach()


OPERATIONS: dict[str, Callable[[Tensor], Any]] = {
    "sum": lambda x: x.sum(),
    "in_place": in_place,
    "out": through_out,
    "mask": lambda x: x[x > 0],
    "nonzero": lambda x: (x > 0).nonzero(),
    "unique": lambda x: (x * 2).round().unique(return_counts=True)[1],
    "where": lambda x: torch.where(x > 0)[0],
    "put": lambda x: x.index_put_((torch.tensor([0, 0], device=x.device),), x[1:3].clone(), accumulate=True),
    "put_by_mask": lambda x: torch.index_put(x, (x > 0,), x[x > 0] + 1),
    "set_by_mask": lambda x: x.masked_fill(x > 0, 3.0).index_put_((x > 1,), x[x > 1]),
    "sort": lambda x: x.sort(-1).indices,
    "equal": lambda x: torch.equal(x, x.clone()),
    "item": lambda x: (x.max().item(), x.tolist()),
    "cast": lambda x: x.bfloat16().float(),
    "foreach": lambda x: torch._foreach_mul([x, x + 1], 2.0)[1],
    "zeros": lambda x: (torch.empty_like(x).fill_(7), torch.zeros_like(x))[1],
    "gradient": gradient,
    "inference": in_inference_mode,
    "transpose_in_place": lambda x: x[:, :5].clone().t_() + 1,
    "transpose_other_sizes_in_place": lambda x: x.t_().unsqueeze_(0) + 1,
    "conjugate": lambda x: torch.view_as_real((torch.view_as_complex(x.view(15, 2)).conj() * 2j).resolve_conj()),
    "negative": lambda x: torch.view_as_complex(x.view(15, 2)).conj().imag + 1,
    "repeat": lambda x: x.repeat_interleave(torch.tensor([1, 0, 2, 1, 3], device=x.device), dim=0),
    "causal": lambda x: scaled_dot_product_attention(x[None, :3], x[None], x[None], is_causal=True),
    "scale_of_zero": lambda x: scaled_dot_product_attention(x[None], x[None], x[None], scale=0.0),
    "thread": in_another_thread,
    "optimizer": fused_update,
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_has_the_numbers_of_the_cpu(name: str) -> None:
    found, expected = OPERATIONS[name](numbers(5, 6).cuda()), OPERATIONS[name](numbers(5, 6))
    if isinstance(expected, Tensor):
        assert found.device.type == "cuda"
        assert torch.equal(found.cpu(), expected)
    else:
        assert found == expected


def test_kernel_without_implementation_raises_error() -> None:
    from torch.utils._python_dispatch import _disable_current_modes

    x = torch.ones(4, device="cuda")
    with pytest.raises(RuntimeError, match="nothing computes"), _disable_current_modes():
        x + 1
    assert (x + 1).tolist() == [2.0] * 4


def test_tensor_without_memory_cannot_be_read() -> None:
    x = torch.ones(1000, device="cuda")
    x.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="has lost its memory"):
        x + 1


def test_gradient_of_attention_bias_raises_error() -> None:
    query, key, value = (numbers(1, 2, 8, 16, seed=seed).cuda().requires_grad_() for seed in range(3))
    bias = torch.zeros(1, 2, 8, 8, device="cuda", requires_grad=True)
    out = scaled_dot_product_attention(query, key, value, attn_mask=bias)
    with pytest.raises(NotImplementedError, match="backward has no kernel of the CPU"):
        out.sum().backward()


def test_a_tensor_shows_its_numbers() -> None:
    assert str(torch.arange(3, device="cuda")) == "tensor([0, 1, 2], device='cuda:0')"


def test_random_numbers_depend_on_device_generator_state() -> None:
    torch.manual_seed(1)
    host = torch.get_rng_state()
    first, second = (torch.rand(8, device="cuda") for _ in range(2))
    assert torch.equal(torch.get_rng_state(), host)
    assert not torch.equal(first, second)
    torch.cuda.manual_seed(1)
    assert torch.equal(torch.rand(8, device="cuda"), first)
    state = torch.cuda.get_rng_state()
    assert torch.equal(torch.rand(8, device="cuda"), second)
    torch.cuda.set_rng_state(state)
    assert torch.equal(torch.rand(8, device="cuda"), second)


def test_what_the_cpu_cannot_compute_is_an_error() -> None:
    with torch.library._scoped_library("hollow_test", "DEF") as library:
        library.define("nothing(Tensor x) -> Tensor")
        with pytest.raises(NotImplementedError, match="hollow_test::nothing"):
            torch.ops.hollow_test.nothing(torch.ones(1, device="cuda"))


def attention(device: str, dtype: torch.dtype, is_causal: bool) -> list[Tensor]:
    parts = [numbers(2, 4, 9, 16, dtype=dtype, seed=seed).to(device).requires_grad_() for seed in range(3)]
    query, key, value = parts
    out = scaled_dot_product_attention(query, key, value, is_causal=is_causal)
    out.backward(numbers(2, 4, 9, 16, dtype=dtype, seed=3).to(device))
    return [out.detach().cpu(), *(part.grad.cpu() for part in parts)]


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)], ids=str)
def test_attention_and_its_gradients_match_cpu(dtype: torch.dtype, tolerance: float, is_causal: bool) -> None:
    found, expected = (attention(device, dtype, is_causal) for device in ("cuda", "cpu"))
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def test_varlen_attention_matches_attention_of_each_sequence() -> None:
    from torch.nn.attention.varlen import varlen_attn

    lengths = [3, 1, 5]
    parts = [numbers(sum(lengths), 4, 16, dtype=torch.bfloat16, seed=seed) for seed in range(4)]
    on_device = [part.cuda().requires_grad_() for part in parts[:3]]
    bounds = torch.tensor([0, 3, 4, 9], dtype=torch.int32, device="cuda")
    query, key, value = on_device
    out = varlen_attn(query, key, value, bounds, bounds, 5, 5, window_size=(-1, 0))
    out.backward(parts[3].cuda())
    for pieces in zip(*(part.split(lengths) for part in (*parts, *on_device, out)), strict=True):
        query, key, value = (piece.detach().float().transpose(0, 1) for piece in pieces[:3])
        expected = scaled_dot_product_attention(query, key, value, is_causal=True)
        torch.testing.assert_close(pieces[-1].float().cpu(), expected.transpose(0, 1), rtol=2e-2, atol=2e-2)
    gradients = [part.grad for part in on_device]
    assert all(gradient is not None and bool(gradient.isfinite().all()) for gradient in gradients)


def test_vllm_attention_respects_sliding_window() -> None:
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    lengths, left = [3, 1, 9], 2
    parts = [numbers(sum(lengths), 4, 16, dtype=torch.bfloat16, seed=seed) for seed in range(3)]
    bounds = torch.tensor([0, 3, 4, 13], dtype=torch.int32, device="cuda")
    out = flash_attn_varlen_func(
        *(part.cuda() for part in parts),
        max_seqlen_q=9,
        cu_seqlens_q=bounds,
        max_seqlen_k=9,
        cu_seqlens_k=bounds,
        causal=True,
        window_size=[left, 0],
        fa_version=3,
    )
    for pieces in zip(*(part.split(lengths) for part in (*parts, out)), strict=True):
        query, key, value = (piece.float().transpose(0, 1) for piece in pieces[:3])
        places = torch.arange(len(pieces[0]))
        distances = places[:, None] - places
        expected = scaled_dot_product_attention(query, key, value, attn_mask=(distances >= 0) & (distances <= left))
        torch.testing.assert_close(pieces[-1].float().cpu(), expected.transpose(0, 1), rtol=2e-2, atol=2e-2)


def test_triton_kernel_is_interpreted_in_device_memory() -> None:
    from tests.hollow.kernels import scaled_product

    left, right = (numbers(16, 16, dtype=torch.bfloat16, seed=seed) for seed in range(2))
    out = torch.empty(16, 16, dtype=torch.bfloat16, device="cuda")
    scaled_product[(1,)](left.cuda(), right.cuda(), out, SIZE=16)
    torch.testing.assert_close(out.cpu(), ((left + left).float() @ right.float()).bfloat16(), rtol=1e-2, atol=1e-2)


def test_vllm_fused_experts_equal_sum_over_experts() -> None:
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.fused_moe.fused_moe import fused_experts

    into, out_of = numbers(4, 64, 32) / 8, numbers(4, 32, 32, seed=1) / 8
    x, logits = numbers(7, 32, seed=2), numbers(7, 4, seed=3)
    weights, experts = logits.softmax(-1).topk(2, -1)
    expected = torch.zeros_like(x)
    for row in range(len(x)):
        for weight, expert in zip(weights[row], experts[row], strict=True):
            gate, value = (into[expert] @ x[row]).chunk(2)
            expected[row] += weight * (out_of[expert] @ (torch.nn.functional.silu(gate) * value))
    given = (one.bfloat16().cuda() for one in (x, into, out_of))
    with set_current_vllm_config(VllmConfig()):
        found = fused_experts(*given, weights.cuda(), experts.int().cuda())
    torch.testing.assert_close(found.float().cpu(), expected, rtol=0.05, atol=0.02)
