"""TransferQueue at the samples of `python -m benchmarks samples`, in the environment of `make setup-peers`.

`python -m benchmarks.peer_transferqueue SETTINGS` prints a JSON object: versions, the seconds of each put and get, and
memory. One actor of Ray puts the samples into SimpleStorage, another gets them; either is a process. Columns are
rectangles, which is the faster way, and the storage has TransferQueue's own settings.
"""

import json
import os
import sys
import tempfile
import time
from importlib.metadata import version
from typing import Any

from benchmarks.samples_meter import begin_peak, peak_of

PACKAGES = ("TransferQueue", "ray", "tensordict", "torch")
ENVIRONMENT = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
STORE_BYTES = 100 << 20  # of Ray's own object store, which the samples do not enter
PARTITION = "samples"


class Client:
    """A process that puts samples, or gets them."""

    def __init__(self, num_samples: int, num_tokens: int) -> None:
        import transfer_queue

        transfer_queue.init()  # joins the queue that the first process has made
        self._queue = transfer_queue
        self._shape = (num_samples, num_tokens)
        self._keys = [str(number) for number in range(num_samples)]
        self._samples = self._drawn()

    def put(self) -> float:
        """Put the samples, and return the seconds."""
        start = time.perf_counter()
        self._queue.kv_batch_put(keys=self._keys, partition_id=PARTITION, fields=self._samples)
        return time.perf_counter() - start

    def get(self) -> float:
        """Get the samples, and return the seconds. Then check them, and make room for the next."""
        start = time.perf_counter()
        found = self._queue.kv_batch_get(keys=self._keys, partition_id=PARTITION)
        seconds = time.perf_counter() - start
        for name, column in self._samples.items():
            assert all(ours.equal(theirs) for ours, theirs in zip(column, found[name].unbind(), strict=True)), name
        del found
        self._queue.kv_clear(keys=self._keys, partition_id=PARTITION)
        return seconds

    def _drawn(self) -> Any:
        """Return the columns that an engine draws: 13 bytes of each token."""
        import torch
        from tensordict import TensorDict

        columns = {
            "responses": torch.arange(self._shape[0] * self._shape[1], dtype=torch.int32).view(self._shape),
            "rollout_log_probs": torch.rand(self._shape, generator=torch.Generator().manual_seed(0)),
            "weight_versions": torch.ones(self._shape, dtype=torch.int32),
            "mask": torch.ones(self._shape, dtype=torch.bool),
        }
        return TensorDict(columns, batch_size=self._shape[:1])


def main(settings: dict[str, int]) -> dict[str, Any]:
    """Put and get the samples some times, after a time that is not counted."""
    import ray
    import transfer_queue

    os.environ |= ENVIRONMENT
    with tempfile.TemporaryDirectory(prefix="megarl-ray-") as directory:
        ray.init(
            num_cpus=4,  # for Ray's own schedule; all processes share the cores
            include_dashboard=False,
            object_store_memory=STORE_BYTES,
            log_to_driver=False,
            _temp_dir=directory,
        )
        try:
            transfer_queue.init()
            return {"versions": {name: version(name) for name in PACKAGES}} | _measured(settings)
        finally:
            transfer_queue.close()
            ray.shutdown()


def _measured(settings: dict[str, int]) -> dict[str, Any]:
    import ray

    actor = ray.remote(num_cpus=0)(Client)
    writer, reader = (actor.remote(settings["num_samples"], settings["num_tokens"]) for _ in range(2))
    ray.get([writer.__ray_ready__.remote(), reader.__ray_ready__.remote()])
    processes = {process: begin_peak(process) for process in _processes()}
    seconds = [
        {"put": ray.get(writer.put.remote()), "get": ray.get(reader.get.remote())}
        for _ in range(1 + settings["repeats"])
    ]
    rise = sum(peak_of(process) - before for process, before in processes.items())
    return {"seconds": seconds[1:], "peak_bytes": rise}


def _processes() -> list[int]:
    """Return the processes of the queue: its controller, its storage, and both clients."""
    import psutil  # type: ignore[import-untyped]

    names = {"ray::TransferQueueController", "ray::SimpleStorageUnit", "ray::Client"}
    found = {child.pid: child.cmdline()[0] for child in psutil.Process().children(recursive=True) if child.cmdline()}
    found = {process: name for process, name in found.items() if name in names}
    assert {*found.values()} == names, f"TransferQueue's processes have other names: {found}"
    return list(found)


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))))
