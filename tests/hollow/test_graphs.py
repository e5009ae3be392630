"""A graph does the work that it captured when it is launched, on the numbers that its memory then has."""

import pytest
import torch

pytestmark = pytest.mark.hollow


def test_graph_replay_computes_captured_work_on_new_values() -> None:
    x, weight = torch.zeros(4, device="cuda"), torch.ones(4, device="cuda")
    total = torch.zeros(1, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = x * weight + 1
        zeros = torch.zeros(3, device="cuda")
        zeros += y.sum()
        total.add_(1)
    assert total.item() == 0, "what is captured is not done at once"
    x.fill_(2)
    graph.replay()
    assert (y.tolist(), zeros.tolist()) == ([3.0] * 4, [12.0] * 3)
    weight.fill_(3)
    graph.replay()
    assert (y.tolist(), zeros.tolist(), total.item()) == ([7.0] * 4, [28.0] * 3, 2)


def test_copies_are_captured() -> None:
    x, y = torch.zeros(4, device="cuda"), torch.ones(4, device="cuda")
    kept, pinned = torch.empty(4, device="cuda"), torch.zeros(4).pin_memory()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept.copy_(x)
        x.copy_(y)
        y.copy_(kept)
        pinned.copy_(x, non_blocking=True)
    assert (x.sum().item(), y.sum().item(), pinned.sum().item()) == (0, 4, 0), "what is captured is not done at once"
    graph.replay()
    assert (x.sum().item(), y.sum().item(), pinned.sum().item()) == (4, 0, 4)


def test_work_on_uncaptured_stream_runs_immediately() -> None:
    x, other, graph = torch.ones(4, device="cuda"), torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="relaxed"):
        y = x + 1
        with torch.cuda.stream(other):
            z = x + 2
    assert z.tolist() == [3.0] * 4
    graph.replay()
    assert y.tolist() == [2.0] * 4


def test_a_kernel_of_triton_is_captured() -> None:
    from tests.hollow.kernels import scaled_product

    left, right = (torch.eye(16, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    out = torch.zeros(16, 16, dtype=torch.bfloat16, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        scaled_product[(1,)](left, right, out, SIZE=16)
    assert out.sum().item() == 0
    right.mul_(3)
    graph.replay()
    assert torch.equal(out, 6 * torch.eye(16, dtype=torch.bfloat16, device="cuda"))


def test_work_on_joined_side_stream_belongs_to_graph() -> None:
    x, side, graph = torch.ones(4, device="cuda"), torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            assert torch.cuda.is_current_stream_capturing()
            y = x + 1
        torch.cuda.current_stream().wait_stream(side)
        z = y * 2
    assert not torch.cuda.is_current_stream_capturing()
    graph.replay()
    assert z.tolist() == [4.0] * 4


@pytest.mark.parametrize("wait", [torch.cuda.synchronize, lambda: torch.cuda.current_stream().synchronize()])
def test_waiting_for_capturing_stream_raises_error(wait: object) -> None:
    assert callable(wait)
    with pytest.raises(RuntimeError, match="capturing"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        wait()


def test_uncaptured_stream_can_be_synchronized_during_capture() -> None:
    other, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="relaxed"):
        other.synchronize()
    graph.replay()


def test_operation_with_data_dependent_size_cannot_be_captured() -> None:
    x = torch.ones(4, device="cuda")
    with pytest.raises(RuntimeError, match="nonzero cannot be captured"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        x.nonzero()
