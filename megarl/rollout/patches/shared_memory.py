"""Names of vLLM's shared memory: megarl removes the segments of a crashed job by name."""

from typing import Any

from megarl.platform.patching import replace
from megarl.rollout.patches.releases import declare_vllm

QUEUE_NAMES = declare_vllm(
    "multiprocessing.shared_memory",
    "_SHM_NAME_PREFIX",
    "_SHM_SAFE_NAME_LENGTH",
    reason="message queues (24 MiB each) have names of Python's choice, which do not show the job they belong to",
    upstream="vllm/distributed/device_communicators/shm_broadcast.py: ShmRingBuffer.__init__",
    until="vLLM lets the caller name its message queues",
)
CHANNEL_NAMES = declare_vllm(
    "vllm.distributed.device_communicators.cpu_communicator:_CPUSHMDistributed",
    "make_group_name",
    reason="on CPU segments are named by the ranks of a group alone: two jobs on a host collide (errno 17)",
    upstream="vllm/distributed/device_communicators/cpu_communicator.py: _CPUSHMDistributed.make_group_name",
    until="the name is unique to a job under external_launcher",
)
CHANNEL_USE = declare_vllm(
    "vllm.distributed.device_communicators.cpu_communicator:CpuCommunicator",
    "_all_group_ranks_share_shm_group_name",
    reason="on CPU the ranks use shared memory if their names agree, also on several hosts or with too few cores",
    upstream="https://github.com/vllm-project/vllm/pull/46716",
    until="the use of shared memory can be switched off",
)


def name_message_queues(prefix: str) -> None:
    """Put `prefix` before the names of the shared memory that Python makes from now on in this process.

    Python keeps its names short for systems other than Linux.
    """
    name_prefix = f"/{prefix}-"
    replace(QUEUE_NAMES, _SHM_NAME_PREFIX=name_prefix, _SHM_SAFE_NAME_LENGTH=len(name_prefix) + 8)


def name_channels(prefix: str | None) -> None:
    """Put `prefix` before the names of the CPU communicator's shared-memory segments; None forbids their use."""

    def make_group_name(communicator: Any) -> str:
        return f"{prefix}-{communicator.unique_name}-{'-'.join(map(str, communicator.ranks))}"

    replace(CHANNEL_NAMES, make_group_name=staticmethod(make_group_name))
    replace(CHANNEL_USE, _all_group_ranks_share_shm_group_name=lambda communicator: prefix is not None)
