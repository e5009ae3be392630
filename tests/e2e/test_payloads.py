"""Messages between ranks in a step: nothing that every rank receives grows with the tokens of the samples.

Torch hands each message to a process group, which counts it: no call of a rank goes unseen.
"""

import json
import os
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from functools import reduce, wraps
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import megarl
from megarl.commands import train
from tests.support.forked import Job
from tests.support.workspace import Workspace, train_arguments

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1800)]

RUN_S = 600
NUM_RANKS = 2
NUM_STEPS = 2
NUM_PROMPTS = 8
PACKAGE = f"{Path(megarl.__file__).parent}/"
TO_ONE_RANK = {"send of routing.py:_send", "send of validation.py:_shown"}
"""Messages with tokens or texts, from the rank that has them to the one that needs them."""
NAMES_BYTES = 100
"""By how much names of files and times may differ between two runs."""
INDEX_BYTES = 100
"""More than every rank has of a sample that other ranks hold."""


def place_of_call() -> str | None:
    """Return the function of the package that talks; None if it is no code of the package."""
    frames = [frame for frame in traceback.extract_stack() if frame.filename.startswith(PACKAGE)]
    names = [f"{Path(frame.filename).name}:{frame.name}" for frame in frames]
    callers = [name for name in names if not name.startswith(("exchange.py", "sharded.py")) and "<" not in name]
    return callers[-1] if callers else None


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from tensors_in(each)


def talking_methods() -> set[str]:
    """Return the methods of a process group that send something of their caller."""
    names = {name for name in vars(dist.ProcessGroup) if "all" in name or "reduce" in name}
    return names | {"send", "broadcast", "gather", "scatter"}


def train_and_count(file: Path, arguments: list[str]) -> None:
    """On each rank: train, and write the bytes that each function of the package hands to methods of process groups."""
    found = Counter[str]()

    def counted(method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def call(*args: Any, **settings: Any) -> Any:
            place = f"{method.__name__} of {place_of_call()}"
            found[place] += sum(each.nbytes for each in tensors_in([*args, *settings.values()]))
            return method(*args, **settings)

        return call

    for name in talking_methods():
        setattr(dist.ProcessGroup, name, counted(getattr(dist.ProcessGroup, name)))
    train.main(arguments)
    file.with_suffix(f".{os.environ['RANK']}").write_text(json.dumps(found))


def counted_run(workspace: Workspace, directory: Path, *settings: str, length: int, num_samples: int) -> Counter[str]:
    """Return the bytes that a rank of two sends in a run, by method and function: those of the rank with the most."""
    arguments = [
        *train_arguments(workspace, directory / "run"),
        *settings,
        f"critic.model.path={workspace.model}",
        f"data.train_batch_size={NUM_PROMPTS}",
        f"actor_rollout_ref.rollout.n={num_samples}",
        "actor_rollout_ref.rollout.ignore_eos=true",
        f"data.max_response_length={length}",
        f"trainer.rollout_data_dir={directory / 'samples'}",
        "trainer.save_freq=-1",
        "trainer.save_last=false",
        "trainer.test_freq=2",
        f"trainer.total_training_steps={NUM_STEPS}",
    ]
    directory.mkdir()
    Job(NUM_RANKS, train_and_count, directory / "bytes", arguments, log=directory / "log").finish(timeout_s=RUN_S)
    of_ranks = (json.loads((directory / f"bytes.{rank}").read_text()) for rank in range(NUM_RANKS))
    return reduce(Counter.__or__, map(Counter, of_ranks))


@pytest.mark.parametrize(("estimator", "loss_mode"), [("gae", "clip_cov"), ("grpo", "kl_cov")])
def test_messages_grow_by_the_index_alone(workspace: Workspace, tmp_path: Path, estimator: str, loss_mode: str) -> None:
    settings = (
        f"algorithm.adv_estimator={estimator}",
        f"actor_rollout_ref.actor.policy_loss.loss_mode={loss_mode}",
    )
    few = counted_run(workspace, tmp_path / "few", *settings, length=16, num_samples=4)
    longer = counted_run(workspace, tmp_path / "longer", *settings, length=96, num_samples=4)
    more = counted_run(workspace, tmp_path / "more", *settings, length=16, num_samples=8)
    assert {*TO_ONE_RANK, "send of all_gather.py:all_gather", "allreduce of sums.py:exact_sums"} <= few.keys()
    num_further = NUM_STEPS * NUM_PROMPTS * (8 - 4)
    for run, limit in ((longer, NAMES_BYTES), (more, INDEX_BYTES * num_further)):
        grown = {place: (few[place], num) for place, num in run.items() if num > few[place] + limit}
        assert grown.keys() <= TO_ONE_RANK, grown
