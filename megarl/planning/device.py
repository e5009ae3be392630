"""The device that a plan is for: a GPU as its maker publishes it, or what this machine has."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from megarl.platform.peaks import PUBLISHED, Peaks, measure
from megarl.tracking.config import TrainerSection

AUTO = "auto"


@dataclass(frozen=True, kw_only=True)
class Device:
    """The device of a rank, or the rank's share of one."""

    name: str
    num_bytes: int  # of its memory
    peaks: Peaks
    is_gpu: bool = True


GPUS: Mapping[str, Device] = {
    "h100": Device(name="an H100", num_bytes=80 * 10**9, peaks=PUBLISHED["NVIDIA H100 80GB HBM3"]),
    "h200": Device(name="an H200", num_bytes=141 * 10**9, peaks=PUBLISHED["NVIDIA H200"]),
    "b200": Device(name="a B200", num_bytes=180 * 10**9, peaks=PUBLISHED["NVIDIA B200"]),
}
H100 = GPUS["h100"]


def choose_device(wanted: str, trainer: TrainerSection, dtype: str) -> Device:
    """Return the device of a plan.

    Args:
        wanted: a key of `GPUS`, `here`, or `auto`: this machine if the run is for its CPU, if it has GPUs, or if the
            run has one rank; else an H100.
        trainer: the run's section.
        dtype: type of the trainer's weights, such as `bfloat16`. To measure a CPU's speed for it takes seconds.
    """
    if wanted in GPUS:
        return GPUS[wanted]
    num_gpus = 0 if trainer.device == "cpu" else torch.cuda.device_count()
    has_one_rank = trainer.nnodes * trainer.n_gpus_per_node == 1 and trainer.device != "cuda"
    is_for_here = trainer.device == "cpu" or num_gpus > 0 or has_one_rank
    if wanted == AUTO and not is_for_here:
        return H100
    type_of_weights = getattr(torch, dtype)
    return _gpu_of_here(type_of_weights) if num_gpus else _cpu_of_here(trainer, type_of_weights)


def own_host_bytes() -> int:
    """Return the memory of this machine in bytes."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def host_bytes_here(trainer: TrainerSection) -> int | None:
    """Return this machine's host memory if a run of one node may be meant for it; None if its devices are not here."""
    here = trainer.device == "cpu" or torch.cuda.device_count() >= trainer.n_gpus_per_node
    return own_host_bytes() if here and trainer.nnodes == 1 else None


def _gpu_of_here(dtype: torch.dtype) -> Device:
    found = torch.cuda.get_device_properties(0)
    peaks = PUBLISHED.get(found.name) or measure(torch.device("cuda", 0), dtype)
    return Device(name=f"this machine's {found.name}", num_bytes=found.total_memory, peaks=peaks)


def _cpu_of_here(trainer: TrainerSection, dtype: torch.dtype) -> Device:
    """Return a rank's share of this machine."""
    num_ranks = trainer.n_gpus_per_node
    peaks = measure(torch.device("cpu"), dtype)
    shared = replace(
        peaks,
        flops_per_second=peaks.flops_per_second / num_ranks,
        bytes_per_second=peaks.bytes_per_second / num_ranks,
        narrow_flops={width: flops / num_ranks for width, flops in peaks.narrow_flops.items()},
    )
    return Device(name="this machine's CPU", num_bytes=own_host_bytes() // num_ranks, peaks=shared, is_gpu=False)
