"""The most memory that this process has held, and the memory of a device that is left."""

import resource

import torch

from megarl.platform.device import on_cuda


def peak_memory() -> dict[str, float]:
    """Return metrics in GB: of the host since the process began, and on CUDA of torch since the last call."""
    host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9  # Linux counts KiB
    if not on_cuda():
        return {"perf/max_host_memory_gb": host}
    device = torch.cuda.max_memory_allocated() / 1e9
    torch.cuda.reset_peak_memory_stats()
    return {"perf/max_host_memory_gb": host, "perf/max_memory_allocated_gb": device}


def unused_memory(device: torch.device) -> int:
    """Return the bytes of a CUDA device that torch can still give out: free ones, and those in its cache."""
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
