"""A rank reads the prompts that it draws or learns from, and no others, in training and in validation."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from unittest.mock import patch

import pytest

from megarl.batch import Prompt
from megarl.commands import train
from megarl.data.prompts import PromptDataset
from tests.support.forked import Job
from tests.support.workspace import Workspace, train_arguments

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

NUM_RANKS = 4
NUM_PROMPTS = 16
NUM_VALIDATED = 8
SHOWN_FIRST = 2
"""Prompts that are read before the first step."""


def train_and_count(file: Path, arguments: Sequence[str]) -> None:
    """On each rank: train, and write the rows whose prompts it has read, each with the size of its data set."""
    read, rows = PromptDataset.__getitem__, set[tuple[int, int]]()

    def noted(dataset: PromptDataset, place: int) -> Prompt:
        rows.add((len(dataset), place))
        return read(dataset, place)

    with patch.object(PromptDataset, "__getitem__", noted):
        train.main(list(arguments))
    file.with_suffix(f".{os.environ['RANK']}").write_text(json.dumps(sorted(rows)))


@pytest.mark.parametrize("keeps", [False, True])
def test_a_rank_reads_its_own_prompts_alone(workspace: Workspace, tmp_path: Path, keeps: bool) -> None:
    """Ranks also divide the prompts that name what a step keeps."""
    arguments = [
        *train_arguments(workspace, tmp_path / "run"),
        "algorithm.adv_estimator=grpo",
        f"trainer.n_gpus_per_node={NUM_RANKS}",
        f"data.train_batch_size={NUM_PROMPTS}",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={NUM_PROMPTS}",
        "actor_rollout_ref.rollout.n=2",
        f"actor_rollout_ref.rollout.keep_complete={str(keeps).lower()}",
        f"trainer.rollout_data_dir={tmp_path / 'samples'}",
        "trainer.save_freq=-1",
        "trainer.save_last=false",
        "trainer.test_freq=1",
        "trainer.val_before_train=false",
        "trainer.total_training_steps=1",
    ]
    Job(NUM_RANKS, train_and_count, tmp_path / "rows", arguments, log=tmp_path / "log").finish(timeout_s=600)
    rows = [json.loads((tmp_path / f"rows.{rank}").read_text()) for rank in range(NUM_RANKS)]
    drawn_and_learnt = (2 + keeps) * NUM_PROMPTS // NUM_RANKS
    of_validation = [[place for size, place in of_rank if size == NUM_VALIDATED] for of_rank in rows]
    of_training = [[place for size, place in of_rank if size != NUM_VALIDATED] for of_rank in rows]
    assert max(map(len, of_training)) <= drawn_and_learnt + SHOWN_FIRST
    assert len(set().union(*of_training)) >= NUM_PROMPTS
    assert max(map(len, of_validation)) <= NUM_VALIDATED // NUM_RANKS
    assert len(set().union(*of_validation)) == NUM_VALIDATED
