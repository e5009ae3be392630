"""`python -m benchmarks samples --peer transferqueue`: the samples of one rank on their way to another.

Here the rank sends them point to point, as in a run. TransferQueue, in an environment of its own
(`peer_transferqueue.py`), puts them into its storage, and the other rank gets them from there.
"""

import json
import subprocess
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from benchmarks.samples_meter import DRAWN_BYTES, peak
from benchmarks.step_trl import PYTHON, ROOT
from megarl.batch import Prompt, Rollouts
from megarl.distributed.exchange import join_world, largest
from megarl.distributed.redistribution import redistribute
from megarl.distributed.sharded import Sharded, Shares, shard
from megarl.platform.errors import UserError

REPEATS = 5
MICROSECONDS = 1e6


def check() -> None:
    """Check that the environment of the peer exists.

    Raises:
        UserError: it is missing.
    """
    if not PYTHON.exists():
        raise UserError(f"--peer transferqueue: {PYTHON} is missing; run `make setup-peers` in {ROOT}")


def measure(*, num_samples: int, num_tokens: int) -> dict[str, Any]:
    """Return gigabytes a second and memory of both ways, and the ratio of their gigabytes a second.

    Raises:
        UserError: the peer ended; its messages are on standard error.
    """
    ours = _ours(num_samples, num_tokens)
    theirs = _theirs({"num_samples": num_samples, "num_tokens": num_tokens, "repeats": REPEATS})
    num_bytes = num_samples * num_tokens * DRAWN_BYTES
    return beside(ours, theirs, num_bytes)


def beside(ours: dict[str, Any], theirs: dict[str, Any], num_bytes: int) -> dict[str, Any]:
    """Return the comparison of both ways at so many bytes."""
    put, get = (median(each[name] for each in theirs["seconds"]) for name in ("put", "get"))
    whole = median(each["put"] + each["get"] for each in theirs["seconds"])
    here = median(ours["seconds"])
    return {
        "bytes": num_bytes,
        "megarl": {"gb_per_second": num_bytes / here / 1e9, "peak_over_samples": ours["peak_bytes"] / num_bytes},
        "transferqueue": {
            "gb_per_second": num_bytes / whole / 1e9,
            "peak_over_samples": theirs["peak_bytes"] / num_bytes,
            "put_s": put,
            "get_s": get,
            "versions": theirs["versions"],
        },
        "over_transferqueue": whole / here,
    }


def _theirs(settings: dict[str, int]) -> dict[str, Any]:
    command = [str(PYTHON), "-m", "benchmarks.peer_transferqueue", json.dumps(settings)]
    done = subprocess.run(command, stdout=subprocess.PIPE, encoding="utf-8", cwd=ROOT, check=False)
    if done.returncode:
        raise UserError(f"TransferQueue ended with exit code {done.returncode}; its messages are above")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def _ours(num_samples: int, num_tokens: int) -> dict[str, Any]:
    """Send the samples from one process to another; return the seconds, and the memory of both."""
    with tempfile.TemporaryDirectory(prefix="megarl-bench-") as name:
        directory = Path(name)
        mp.start_processes(_work, (num_samples, num_tokens, directory), nprocs=2, start_method="fork")
        ranks = [json.loads((directory / f"{rank}.json").read_text()) for rank in range(2)]
    return {"seconds": ranks[0]["seconds"], "peak_bytes": sum(rank["peak_bytes"] for rank in ranks)}


def _work(rank: int, num_samples: int, num_tokens: int, directory: Path) -> None:
    """Send or receive as one rank, and write what it costs."""
    torch.set_num_threads(1)
    join_world(timeout=timedelta(seconds=300), init_method=f"file://{directory}/rendezvous", rank=rank, world_size=2)
    samples = _drawn(num_samples, num_tokens)
    target = samples.index.runs.owned_by(torch.ones_like(samples.index.runs.owners))
    seconds = []
    with peak() as rise:
        for _ in range(1 + REPEATS):
            dist.barrier()
            start = time.perf_counter()
            found = redistribute(samples, Rollouts, target, samples.shares)
            took = time.perf_counter() - start
            assert rank == 0 or int(found.share.responses[-1]) == num_samples * num_tokens - 1
            del found
            seconds.append(largest(int(took * MICROSECONDS)) / MICROSECONDS)
    found_here = {"seconds": seconds[1:], "peak_bytes": rise["bytes"]}
    (directory / f"{rank}.json").write_text(json.dumps(found_here))
    dist.destroy_process_group()


def _drawn(num_samples: int, num_tokens: int) -> Sharded[Rollouts]:
    """Return samples that the first of two ranks has."""
    total = num_samples * num_tokens
    prompt = Prompt(index=0, token_ids=[1], text="", data_source="", ground_truth=None, extra_info={})
    record = Rollouts(
        prompts=[prompt],
        groups=torch.zeros(num_samples, dtype=torch.int64),
        num_tokens=torch.full((num_samples,), num_tokens),
        responses=torch.arange(total, dtype=torch.int32),
        mask=torch.ones(total, dtype=torch.bool),
        rollout_log_probs=torch.rand(total, generator=torch.Generator().manual_seed(0)),
        truncated=torch.zeros(num_samples, dtype=torch.bool),
        weight_versions=torch.ones(total, dtype=torch.int32),
    )
    return shard(record, torch.zeros(num_samples, dtype=torch.int64), Shares.blocks(1))
