"""Messages between ranks in a step: nothing that every rank receives grows with the tokens of the samples."""

import json
import os
import pickle
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed import distributed_c10d

import megarl
from megarl.commands import train
from tests.support.forked import Job
from tests.support.workspace import Workspace, train_arguments

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1800)]

RUN_S = 600
PACKAGE = f"{Path(megarl.__file__).parent}/"
MODELS = ("megatron/core", "megarl/learner", "megarl/reshard", "megarl/weight_sync", "megarl/checkpoint")
ROUTING = "megarl/distributed/routing"
"""Code whose messages carry weights, gradients, activations and files, and the code that brings tokens to ranks."""


def place_of_call() -> str | None:
    """Return the function of the package that called a collective; None if it is one of `MODELS`."""
    stack = traceback.extract_stack()
    if any(part in frame.filename for frame in stack for part in (*MODELS, ROUTING)):
        return None
    callers = [frame for frame in stack if frame.filename.startswith(PACKAGE) and frame.name != "begin_sending"]
    return f"{Path(callers[-1].filename).name}:{callers[-1].name}" if callers else None


def train_and_count(file: Path, arguments: list[str]) -> None:
    """On each rank: train, and write the bytes of the largest message by the function that sends it."""
    found, gather, reduce, send = Counter[str](), dist.all_gather_object, dist.all_reduce, dist.isend

    def note(num_bytes: int) -> None:
        place = place_of_call()
        if place:
            found[place] = max(found[place], num_bytes)

    def gather_and_note(results: list[Any], mine: Any, group: Any = None) -> None:
        note(len(pickle.dumps(mine)))
        gather(results, mine, group=group)

    def reduce_and_note(tensor: Any, *args: Any, **settings: Any) -> Any:
        note(tensor.nbytes)
        return reduce(tensor, *args, **settings)

    def send_and_note(tensor: Any, *args: Any, **settings: Any) -> Any:
        note(tensor.nbytes)
        return send(tensor, *args, **settings)

    dist.all_gather_object, dist.all_reduce, dist.isend = gather_and_note, reduce_and_note, send_and_note
    distributed_c10d.isend = send_and_note  # `P2POp` takes no other
    train.main(arguments)
    file.with_suffix(f".{os.environ['RANK']}").write_text(json.dumps(found))


@pytest.mark.parametrize(("estimator", "loss_mode"), [("gae", "clip_cov"), ("grpo", "kl_cov")])
def test_no_collective_grows_with_the_tokens(
    workspace: Workspace, tmp_path: Path, estimator: str, loss_mode: str
) -> None:
    found = []
    for length in (16, 96):
        run_dir = tmp_path / f"{length}"
        arguments = [
            *train_arguments(workspace, run_dir),
            f"algorithm.adv_estimator={estimator}",
            f"actor_rollout_ref.actor.policy_loss.loss_mode={loss_mode}",
            f"critic.model.path={workspace.model}",
            "actor_rollout_ref.rollout.n=4",
            "actor_rollout_ref.rollout.ignore_eos=true",
            f"data.max_response_length={length}",
            f"trainer.rollout_data_dir={run_dir / 'samples'}",
            "trainer.save_freq=-1",
            "trainer.test_freq=2",
            "trainer.total_training_steps=2",
        ]
        Job(2, train_and_count, tmp_path / f"bytes-{length}", arguments, log=tmp_path / f"log-{length}").finish(
            timeout_s=RUN_S
        )
        found.append(json.loads((tmp_path / f"bytes-{length}.0").read_text()))
    short, long = found
    assert {"sharded.py:_gather", "exchange.py:_gathered", "all_gather.py:all_gather"} <= short.keys()
    grown = {place: (short.get(place, 0), num) for place, num in long.items() if num > 1.1 * short.get(place, 0)}
    assert not grown
