"""Messages between ranks in a step: nothing that every rank receives grows with the tokens of the samples.

Torch hands each message to a process group, which counts it: no call of a rank goes unseen.
"""

import inspect
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
from megarl.samples.reading import read_rows
from tests.support.forked import Job
from tests.support.programs import ROOT
from tests.support.workspace import Workspace, train_arguments, with_many_ends

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1800)]

RUN_S = 600
NUM_STEPS = 2
NUM_PROMPTS = 8
PACKAGE = f"{Path(megarl.__file__).parent}/"
TO_ONE_RANK = {
    *("send of redistribution.py:_send", "send of validation.py:_shown"),
    *("send of scoring.py:_results", "send of made_prompts.py:redistribute_prompts"),
}
"""Messages with tokens or texts, from the rank that has them to the one that needs them."""
IN_A_REPLICA = {
    *(f"{method} of replica_queue.py:_take_step among 2" for method in ("allreduce", "all_gather_single")),
    "send of episodes.py:_exchanged",
    "allgather of episodes.py:with_texts among 2",
}
"""Messages that all ranks of an engine replica need: activations of the model, the observations that it reads, and the
texts of those whose episodes continue in the next step."""
NAMES_BYTES = 100
"""By how much names of files and times may differ between two runs."""
EXCHANGES_BYTES = 2000
"""By how much messages may grow in a run whose responses take more engine steps: each exchange tells of the steps."""
INDEX_BYTES = 100
"""More than every rank has of a sample that other ranks hold."""
ENVIRONMENTS = ROOT / "tests" / "support" / "own_environments.py"
OF_TWO_REPLICAS = (
    "trainer.n_gpus_per_node=4",
    "actor_rollout_ref.rollout.tensor_model_parallel_size=2",
    "actor_rollout_ref.rollout.n=4",
)
"""Settings of four ranks."""


def place_of_call() -> str | None:
    """Return the function of the package that talks; None if it is no code of the package."""
    outwards = traceback.walk_stack(inspect.currentframe())
    codes = (frame.f_code for frame, _ in outwards)
    names = (f"{Path(code.co_filename).name}:{code.co_name}" for code in codes if code.co_filename.startswith(PACKAGE))
    callers = (name for name in names if not name.startswith(("exchange.py", "sharded.py")) and "<" not in name)
    return next(callers, None)


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
    """On each rank: train, and write the bytes that each function of the package hands to methods of process groups.

    The names of groups that not all ranks are in end with their sizes.
    """
    found = Counter[str]()

    def counted(method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def call(group: dist.ProcessGroup, *args: Any, **settings: Any) -> Any:
            among = "" if group.size() == dist.get_world_size() else f" among {group.size()}"
            place = f"{method.__name__} of {place_of_call()}{among}"
            found[place] += sum(each.nbytes for each in tensors_in([*args, *settings.values()]))
            return method(group, *args, **settings)

        return call

    for name in talking_methods():
        setattr(dist.ProcessGroup, name, counted(getattr(dist.ProcessGroup, name)))
    train.main(arguments)
    file.with_suffix(f".{os.environ['RANK']}").write_text(json.dumps(found))


def arguments_of(workspace: Workspace, run_dir: Path, *settings: str, length: int) -> list[str]:
    """Return arguments of a run that keeps the samples of its steps."""
    return [
        *train_arguments(workspace, run_dir),
        f"data.train_batch_size={NUM_PROMPTS}",
        f"data.max_response_length={length}",
        f"trainer.rollout_data_dir={run_dir.with_name('samples')}",
        "trainer.save_freq=-1",
        "trainer.save_last=false",
        "trainer.save_best=false",
        "trainer.val_before_train=false",
        "trainer.test_freq=2",
        f"trainer.total_training_steps={NUM_STEPS}",
        *settings,
    ]


def counted_run(directory: Path, arguments: list[str], *, num_ranks: int = 2) -> Counter[str]:
    """Return the bytes that a rank sends in a run, by method and function: those of the rank with the most."""
    directory.mkdir(exist_ok=True)
    Job(num_ranks, train_and_count, directory / "bytes", arguments, log=directory / "log").finish(timeout_s=RUN_S)
    of_ranks = (json.loads((directory / f"bytes.{rank}").read_text()) for rank in range(num_ranks))
    return reduce(Counter.__or__, map(Counter, of_ranks))


def grown(few: Counter[str], run: Counter[str], limit: int) -> dict[str, tuple[int, int]]:
    """Return the bytes of messages to every rank that are larger in `run` than in `few` by more than `limit`."""
    found = {place: (few[place], num) for place, num in run.items() if num > few[place] + limit}
    return {place: numbers for place, numbers in found.items() if place not in TO_ONE_RANK | IN_A_REPLICA}


@pytest.mark.parametrize(("estimator", "loss_mode"), [("gae", "clip_cov"), ("grpo", "kl_cov")])
def test_messages_grow_by_the_index_alone(workspace: Workspace, tmp_path: Path, estimator: str, loss_mode: str) -> None:
    def counted(name: str, *, length: int, num_samples: int) -> Counter[str]:
        settings = (
            f"algorithm.adv_estimator={estimator}",
            f"actor_rollout_ref.actor.policy_loss.loss_mode={loss_mode}",
            f"actor_rollout_ref.rollout.n={num_samples}",
            "actor_rollout_ref.rollout.ignore_eos=true",
            f"critic.model.path={workspace.model}",
        )
        return counted_run(tmp_path / name, arguments_of(workspace, tmp_path / name / "run", *settings, length=length))

    few = counted("few", length=16, num_samples=4)
    longer = counted("longer", length=64, num_samples=4)
    more = counted("more", length=16, num_samples=8)
    assert {
        "send of redistribution.py:_send",
        "send of all_gather.py:all_gather",
        "send of sums.py:exact_sums",
    } <= {*few}
    assert not grown(few, longer, NAMES_BYTES)
    num_further = NUM_STEPS * NUM_PROMPTS * (8 - 4)
    assert not grown(few, more, INDEX_BYTES * num_further)


def test_messages_of_replicas_of_several_ranks(workspace: Workspace, tmp_path: Path) -> None:
    """Groups are drawn until they differ; then their samples are replayed."""

    def counted(name: str, *, length: int) -> tuple[Counter[str], Counter[str]]:
        settings = (
            *OF_TWO_REPLICAS,
            "algorithm.adv_estimator=grpo",
            "algorithm.filter_groups.enable=true",
            "actor_rollout_ref.rollout.ignore_eos=true",
        )
        arguments = arguments_of(workspace, tmp_path / name / "run", *settings, length=length)
        run = counted_run(tmp_path / name, arguments, num_ranks=4)
        replay = [*arguments, "trainer.resume_mode=disable", "--replay", str(tmp_path / name / "samples")]
        return run, counted_run(tmp_path / f"{name}-replay", replay, num_ranks=4)

    few, few_replayed = counted("few", length=16)
    longer, longer_replayed = counted("longer", length=96)
    assert "send of scoring.py:_results" in few
    assert not grown(few, longer, EXCHANGES_BYTES)
    assert not grown(few_replayed, longer_replayed, NAMES_BYTES)


def test_messages_of_episodes(workspace: Workspace, tmp_path: Path) -> None:
    """An environment makes prompts and observations; a step leaves some episodes to the next step."""
    model = with_many_ends(workspace.model, tmp_path / "model")

    def counted(name: str, *, num_words: int) -> Counter[str]:
        settings = (
            *OF_TWO_REPLICAS,
            "algorithm.adv_estimator=grpo",
            f"actor_rollout_ref.model.path={model}",
            "actor_rollout_ref.rollout.partial={enable: true, stop_when: 0.8}",
            "algorithm.rollout_correction.rollout_is=token",
            f"environment.path={ENVIRONMENTS}",
            "environment.name=Wordy",
            f"environment.kwargs={{words: {num_words}}}",
            "environment.num_workers=1",
            "custom_reward_function.path=null",
            "data.max_prompt_length=128",
        )
        arguments = arguments_of(workspace, tmp_path / name / "run", *settings, length=128)
        found = counted_run(tmp_path / name, arguments, num_ranks=4)
        assert all(row["prompt"] for row in read_rows(tmp_path / name / "samples" / "step_2.parquet"))
        return found

    few = counted("few", num_words=1)
    longer = counted("longer", num_words=20)
    assert {"send of made_prompts.py:redistribute_prompts", *IN_A_REPLICA} <= {*few}
    assert not grown(few, longer, EXCHANGES_BYTES)
