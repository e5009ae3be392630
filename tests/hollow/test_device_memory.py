"""Mistakes with memory are errors on the hollow device. Each is planted; what ends a process, in one of its own."""

import ctypes
import gc
import mmap
import os
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch

pytestmark = pytest.mark.hollow

MIB = 1 << 20
TO_DEVICE, TO_HOST = 1, 2
OK, INVALID = 0, 1


def runtime() -> ctypes.CDLL:
    library = ctypes.CDLL("libcudart.so.13")
    for name in ("cudaMemcpy", "cudaMemset"):
        getattr(library, name).argtypes = None
    return library


def allocate(size: int) -> ctypes.c_void_p:
    place = ctypes.c_void_p()
    assert runtime().cudaMalloc(ctypes.byref(place), ctypes.c_size_t(size)) == OK
    return place


def behind(place: ctypes.c_void_p, offset: int) -> ctypes.c_void_p:
    return ctypes.c_void_p((place.value or 0) + offset)


def copy(to: object, source: object, size: int, kind: int) -> int:
    status: int = runtime().cudaMemcpy(to, source, ctypes.c_size_t(size), kind)
    return status


def copy_behind_the_end() -> int:
    return copy(behind(allocate(1000), 1), ctypes.create_string_buffer(1000), 1000, TO_DEVICE)


def copy_from_before_the_end() -> int:
    return copy(ctypes.create_string_buffer(2000), allocate(1000), 1001, TO_HOST)


def copy_to_freed() -> int:
    place = allocate(MIB)
    assert runtime().cudaFree(place) == OK
    return copy(place, ctypes.create_string_buffer(8), 8, TO_DEVICE)


def copy_to_the_host_as_if_it_were_the_device() -> int:
    return copy(ctypes.create_string_buffer(8), ctypes.create_string_buffer(8), 8, TO_DEVICE)


def fill_behind_the_end() -> int:
    status: int = runtime().cudaMemset(allocate(1000), 0, ctypes.c_size_t(1001))
    return status


def free_twice() -> int:
    place = allocate(MIB)
    assert runtime().cudaFree(place) == OK
    status: int = runtime().cudaFree(place)
    return status


def free_the_middle() -> int:
    status: int = runtime().cudaFree(behind(allocate(MIB), 256))
    return status


def free_pinned_memory_as_that_of_the_device() -> int:
    place = ctypes.c_void_p()
    assert runtime().cudaMallocHost(ctypes.byref(place), ctypes.c_size_t(MIB)) == OK
    status: int = runtime().cudaFree(place)
    return status


def free_memory_of_the_device_as_pinned() -> int:
    status: int = runtime().cudaFreeHost(allocate(MIB))
    return status


def free_memory_of_the_host() -> int:
    status: int = runtime().cudaFree(ctypes.create_string_buffer(8))
    return status


MISTAKES: list[tuple[Callable[[], int], str]] = [
    (copy_behind_the_end, "touches bytes 1 to 1001 of a device block of 1000 bytes"),
    (copy_from_before_the_end, "touches bytes 0 to 1001 of a device block of 1000 bytes"),
    (copy_to_freed, "a block of 1048576 bytes that is freed"),
    (copy_to_the_host_as_if_it_were_the_device, "which is memory of the host"),
    (fill_behind_the_end, "a fill touches bytes 0 to 1001"),
    (free_twice, "which is freed"),
    (free_the_middle, "which is byte 256 of a block"),
    (free_memory_of_the_host, "which is no memory of the device"),
    (free_pinned_memory_as_that_of_the_device, "which is a pinned block"),
    (free_memory_of_the_device_as_pinned, "which is a device block"),
]


@pytest.mark.parametrize(("mistake", "message"), MISTAKES, ids=lambda x: getattr(x, "__name__", ""))
def test_a_mistake_is_refused_and_explained(
    mistake: Callable[[], int], message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert mistake() == INVALID
    assert message in capfd.readouterr().err
    assert runtime().cudaGetLastError() == INVALID
    assert runtime().cudaGetLastError() == OK


def test_a_handle_of_virtual_memory_is_released_once(capfd: pytest.CaptureFixture[str]) -> None:
    driver = ctypes.CDLL("libcuda.so.1")
    handle, properties = ctypes.c_uint64(), ctypes.create_string_buffer(64)  # zeros: device 0
    assert driver.cuMemCreate(ctypes.byref(handle), ctypes.c_size_t(2 * MIB), properties, ctypes.c_uint64(0)) == OK
    assert driver.cuMemRelease(handle) == OK
    assert driver.cuMemRelease(handle) == INVALID
    assert "a handle of 2097152 bytes is used, which was released" in capfd.readouterr().err


def test_a_fill_of_registered_memory_that_is_shared() -> None:
    shared = mmap.mmap(-1, 4 * MIB)
    shared.write(b"x" * (4 * MIB))
    place = ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(shared)))
    assert runtime().cudaHostRegister(place, ctypes.c_size_t(4 * MIB), 0) == OK
    assert runtime().cudaMemset(place, 0, ctypes.c_size_t(4 * MIB)) == OK
    assert bytes(shared) == bytes(4 * MIB)
    assert runtime().cudaHostUnregister(place) == OK


def test_what_is_copied_to_the_device_comes_back() -> None:
    place, found = allocate(1000), ctypes.create_string_buffer(1000)
    assert copy(place, ctypes.create_string_buffer(bytes(range(250)) * 4, 1000), 1000, TO_DEVICE) == OK
    assert copy(found, place, 1000, TO_HOST) == OK
    assert found.raw == bytes(range(250)) * 4


ACCESS_OF_THE_PROCESSOR = """
import ctypes, torch
from tests.hollow.solid.mode import alias
from vllm.device_allocator.cumem import CuMemAllocator
{program}
"""
FREED = "x = torch.ones(4 << 20, device='cuda'); y = alias(x); del x; torch.cuda.empty_cache(); print(y[0])"
ASLEEP = """
pool = CuMemAllocator.get_instance()
with pool.use_memory_pool(tag="weights"):
    x = torch.ones(4 << 20, device="cuda")
print(x[0].item(), flush=True)
pool.sleep(offload_tags=())
print(alias(x)[0])
"""
PASSED_BY = """
place = ctypes.c_void_p()
ctypes.CDLL("libcudart.so.13").cudaMalloc(ctypes.byref(place), ctypes.c_size_t(4096))
ctypes.memset(place, 1, 4097)
"""


@pytest.mark.parametrize(
    ("program", "message"),
    [
        (FREED, "freed"),
        (ASLEEP, "asleep"),
        (PASSED_BY, "byte 4096 of a device block of 4096 bytes, whose end is passed"),
    ],
    ids=["freed", "asleep", "passed_by"],
)
def test_host_access_to_device_memory_faults_with_explanation(program: str, message: str) -> None:
    command = [sys.executable, "-c", ACCESS_OF_THE_PROCESSOR.format(program=program)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert ended.returncode == -11, ended.stderr
    assert "hollow: illegal access" in ended.stderr
    assert message in ended.stderr


def test_memory_that_wakes_up_can_be_used_again() -> None:
    from vllm.device_allocator.cumem import CuMemAllocator

    gc.collect()  # what other tests have left
    torch.cuda.empty_cache()
    pool = CuMemAllocator.get_instance()
    with pool.use_memory_pool(tag="weights"):
        kept = torch.arange(1 << 20, device="cuda")
    free = torch.cuda.mem_get_info()[0]
    pool.sleep(offload_tags=("weights",))
    assert torch.cuda.mem_get_info()[0] - free >= 8 * MIB
    pool.wake_up()
    assert torch.cuda.mem_get_info()[0] == free
    assert torch.equal(kept.cpu(), torch.arange(1 << 20))


MAPPED_IN_PIECES = """
import torch
from tests.hollow.test_device_memory import INVALID, MIB, behind, ctypes, runtime
x = torch.ones(64 * MIB, dtype=torch.uint8, device="cuda").zero_().add_(2)
assert x.sum().item() == 128 * MIB
mapped = torch.cuda.memory_reserved()
assert runtime().cudaMemset(behind(ctypes.c_void_p(x.data_ptr()), mapped - MIB), 0, ctypes.c_size_t(2 * MIB)) == INVALID
"""


def test_memory_mapped_in_pieces_is_one_bounded_range() -> None:
    """Torch maps a segment that can grow in pieces of 20 MiB."""
    settings = os.environ | {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    command = [sys.executable, "-c", MAPPED_IN_PIECES]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=280, env=settings)
    assert ended.returncode == 0, ended.stderr


def test_a_device_runs_out_of_memory() -> None:
    total = torch.cuda.mem_get_info()[1]
    with pytest.raises(torch.cuda.OutOfMemoryError):
        torch.empty(total, dtype=torch.uint8, device="cuda")


def test_every_device_has_memory_of_its_own() -> None:
    free = [torch.cuda.mem_get_info(device)[0] for device in range(2)]
    kept = torch.empty(64 * MIB, dtype=torch.uint8, device="cuda:1")
    assert torch.cuda.mem_get_info(0)[0] == free[0]
    assert torch.cuda.mem_get_info(1)[0] == free[1] - len(kept)
    with pytest.raises(RuntimeError, match="same device"):
        torch.ones(1, device="cuda:0") + torch.ones(1, device="cuda:1")


def test_device_memory_cannot_be_shared_between_processes() -> None:
    from torch.multiprocessing.reductions import reduce_tensor

    with pytest.raises(RuntimeError, match="not supported by the hollow device"):
        reduce_tensor(torch.ones(1, device="cuda"))
