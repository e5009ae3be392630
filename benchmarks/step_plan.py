"""The prediction of `megarl plan` for a measured step, from the speeds of the machine in the same run."""

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from benchmarks.workload import Workload
from megarl.models.flops import Tokens
from megarl.planning.device import Device, own_host_bytes
from megarl.planning.machine import EngineCost, Lengths
from megarl.planning.planner import Planner
from megarl.planning.traffic import Links
from megarl.platform.peaks import Peaks
from megarl.tracking.names import STEP_SECONDS, TIMING

PHASES: Mapping[str, Sequence[str]] = {
    "gen": ("sync", "gen"),
    "old_log_prob": ("infer actor",),
    "ref": ("infer reference",),
    "values": ("infer critic",),
    "update_actor": ("update actor",),
    "update_critic": ("update critic",),
}
"""Phase of the timers -> phases of a plan."""


def predict(arguments: Sequence[str], workload: Workload, peers: Mapping[str, Any]) -> dict[str, float]:
    """Return the planned seconds of each phase and of the step.

    Args:
        arguments: of the training.
        workload: of a step.
        peers: the machine's speeds on all its cores, which its ranks share; the engine's cost on the host; and the
            lengths of the samples.
    """
    from megarl.platform.device import local_device

    on_cpu = local_device().type == "cpu"
    num_ranks = _num_ranks(arguments)
    share = num_ranks if on_cpu else 1
    speeds = peers["machine"]
    peaks = Peaks(
        flops_per_second=speeds["flops_per_second"] / share,
        bytes_per_second=speeds["bytes_per_second"] / share,
        narrow_flops={int(width): flops / share for width, flops in speeds["narrow_flops"].items()},
    )
    memory = own_host_bytes() // share
    read = Tokens(**peers["transformers"]["read"])
    longest = peers["transformers"]["longest"]
    response = round(read.num_outputs / workload.num_samples)
    plan = Planner(
        [*arguments, *(["trainer.device=cpu"] if on_cpu else [])],
        device=Device(
            name="the device", num_bytes=memory if on_cpu else _device_bytes(), peaks=peaks, is_gpu=not on_cpu
        ),
        ranks_per_node=num_ranks,
        # A message between ranks of a CPU is a copy of memory.
        links=Links(inside=peaks.bytes_per_second, between=peaks.bytes_per_second),
        engine=EngineCost(**peers["host"]),
        lengths=Lengths(round(read.num_tokens / workload.num_samples) - response, response, longest),
    ).plan()
    found = {
        phase: sum(plan.time.seconds.get(name, 0.0) for name in names)
        for phase, names in PHASES.items()
        if any(name in plan.time.seconds for name in names)
    }
    return found | {"step": plan.time.total}


def beside(planned: Mapping[str, float], steps: Sequence[Mapping[str, float]]) -> dict[str, dict[str, float]]:
    """Return the planned and the measured seconds of each phase, and their ratio."""
    found = {}
    for phase, seconds in planned.items():
        name = STEP_SECONDS if phase == "step" else TIMING + phase
        measured = median(step.get(name, 0.0) for step in steps)
        found[phase] = {"planned": seconds, "measured": measured, "ratio": seconds / measured if measured else 0.0}
    return found


def _num_ranks(arguments: Sequence[str]) -> int:
    [*_, last] = (text for text in arguments if text.startswith("trainer.n_gpus_per_node="))
    return int(last.partition("=")[2])


def _device_bytes() -> int:
    import torch

    return torch.cuda.get_device_properties(0).total_memory
