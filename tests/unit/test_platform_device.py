"""One decision for the device, which everything asks."""

import ast
import os
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock, patch

import pytest
import torch

import megarl
from megarl.platform.device import decide_device, local_device, on_cuda, to_device, to_host

PACKAGE = Path(megarl.__file__).parent
REPORTS = {"commands/doctor.py"}  # what the machine has, and not what a run works on
OF_OBJECTS = {"broadcast_object_list", "all_gather_object", "gather_object", "scatter_object_list", "barrier"}


@pytest.fixture(autouse=True)
def decided_again() -> Iterator[None]:
    yield
    decide_device("cpu")


@pytest.mark.parametrize(("wanted", "kind"), [("auto", "cuda"), ("cuda", "cuda"), ("cpu", "cpu")])
def test_a_run_on_a_machine_with_cuda(monkeypatch: pytest.MonkeyPatch, wanted: str, kind: str) -> None:
    monkeypatch.setenv("LOCAL_RANK", "3")
    with patch.object(torch.cuda, "is_available", lambda: True):
        assert decide_device(wanted) == kind
        assert on_cuda() == (kind == "cuda")
        assert local_device() == (torch.device("cuda", 3) if kind == "cuda" else torch.device("cpu"))


def test_a_run_for_the_cpu_never_asks_cuda() -> None:
    with patch.object(torch.cuda, "is_available", side_effect=AssertionError("this breaks the ranks forked later")):
        assert decide_device("cpu") == "cpu"
        assert not on_cuda()


def test_a_variable_of_the_user_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    for written, found in ((None, "1"), ("8", "8")):
        monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
        if written:
            monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", written)
        decide_device("cpu")
        assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == found


def test_a_run_for_cuda_needs_cuda() -> None:
    with (
        patch.object(torch.cuda, "is_available", lambda: False),
        pytest.raises(ValueError, match="trainer.device=cuda"),
    ):
        decide_device("cuda")


def test_tensors_travel_without_a_wait() -> None:
    device, tensor = torch.device("cuda", 1), Mock()
    to_device(tensor, device)
    tensor.pin_memory.return_value.to.assert_called_once_with(device, non_blocking=True)
    assert to_device(torch.tensor([1, 2]), torch.device("cpu")).tolist() == [1, 2]
    assert to_host(source := torch.tensor([1, 2])).tolist() == [1, 2]
    assert to_host(source).data_ptr() != source.data_ptr()


def calls(*names: str) -> Iterator[tuple[str, ast.Call]]:
    """Yield every call of a function or method of these names in the package, with its file."""
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) in names:
                yield str(path.relative_to(PACKAGE)), node


def test_only_device_module_asks_torch_for_cuda() -> None:
    asking = {path for path, call in calls("is_available") if "cuda" in ast.unparse(call)}
    assert asking - REPORTS == {"platform/device.py"}


def test_what_travels_from_host_memory_names_its_group() -> None:
    """The default group of CUDA is of NCCL alone."""
    found = list(calls(*OF_OBJECTS))
    assert len(found) >= 5
    assert [path for path, call in found if "group" not in {keyword.arg for keyword in call.keywords}] == []
