"""Dynamic sampling of episodes over several replicas: a step learns from the same ones, however they are split."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from megarl.algorithms.config import FilterGroupsSection
from megarl.batch import Group, Prompts, Scored
from megarl.data.order import Position
from megarl.distributed.sharded import Sharded, Shares
from megarl.rollout.responses import of_groups
from megarl.rollout.session import SamplingSession
from megarl.training.dynamic import Queue, draw_differing
from tests.support.replicas import Engine, Environment, Replicas, TurnQueue, group, summing

ROWS = [11, 3, 40, 7, 9, 18, 2, 27, 5, 16, 1, 6]  # tokens of a turn; the rewards to those above 10 never differ
BATCH = 4


class Source:
    """Prompts and sampler: batches of four rows."""

    def take(self, position: Position) -> tuple[Prompts, Position]:
        rows = ROWS[position.offset : position.offset + BATCH]
        return Prompts(prompts=[group(row).prompt for row in rows]), replace(position, offset=position.offset + BATCH)

    def groups(self, prompts: Prompts, *, step: int, batch: int) -> list[Group]:
        return [group(prompt.index, samples=2) for prompt in prompts.prompts]


def judge(groups: list[Group], shares: Shares) -> Sharded[Scored]:
    rollouts = of_groups(groups, shares)
    share = rollouts.share
    rows = torch.tensor([share.prompt_of(place).index for place in range(len(share))])
    scores = (rollouts.mine % 2 * (rows < 10)).to(torch.float32)
    return rollouts.with_share(share.extend(Scored, texts=[""] * len(share), scores=scores, accuracies=scores))


def measure(scored: Sharded[Scored]) -> torch.Tensor:
    return scored.gather(scored.share.scores)


def draw(num_replicas: int, *, overlap: int) -> tuple[list[Any], list[TurnQueue]]:
    """Return what each replica finds, and its engine."""
    queues, replicas = [TurnQueue() for _ in range(num_replicas)], Replicas(num_replicas)

    def work(engine: Engine) -> Any:
        episodes = Environment(overlap)
        session = SamplingSession(engine, queues[engine.replica], num_slots=64, episodes=episodes)  # type: ignore[arg-type]
        queue = Queue(Source(), Source(), Position(), step=0)  # type: ignore[arg-type]
        score = partial(judge, shares=engine.shares)
        return draw_differing(session, queue, score, measure, FilterGroupsSection(enable=True))

    with ThreadPoolExecutor(num_replicas) as pool, summing(replicas):
        return list(pool.map(work, replicas.engines)), queues


@pytest.mark.parametrize("overlap", [0, 1, 3])
@pytest.mark.parametrize("num_replicas", [1, 2, 3])
def test_step_trains_same_episodes_on_any_replica_count(num_replicas: int, overlap: int) -> None:
    found, queues = draw(num_replicas, overlap=overlap)
    for replica, (scored, position, metrics) in enumerate(found):
        index, share = scored.index, scored.share
        assert [prompt.index for prompt in index.prompts] == [3, 7, 9, 2]
        assert index.groups.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
        assert index.num_learnt.tolist() == [9, 9, 21, 21, 27, 27, 6, 6]  # three turns
        assert (index.num_tokens - index.num_learnt).tolist() == [4] * 8  # two answers of two tokens
        assert share.num_learnt().tolist() == index.num_learnt[index.owners == replica].tolist()
        assert share.num_turns.tolist() == [3] * len(share)
        assert share.sums(~share.mask).tolist() == [4] * len(share)
        assert share.sums(share.turn_rewards).tolist() == [3.0] * len(share)
        assert position == Position(0, 8)
        assert metrics == found[0][2]
    assert sum(len(scored.share) for scored, _, _ in found) == 8
    assert found[0][2]["train/num_gen_batches"] == 2.0
    assert not any(queue.open for queue in queues), "what is drawn in vain is stopped"
