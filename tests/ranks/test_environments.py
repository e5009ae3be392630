"""Episodes on several ranks: each replica plays and scores its own, and all ranks tell the same of them."""

import json
import logging
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from itertools import count
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megarl.batch import Generation, Prompts, StopReason, Turn, float32, int32
from megarl.distributed.made_prompts import redistribute_prompts
from megarl.distributed.sharded import Shares
from megarl.environments.config import EnvironmentSection
from megarl.environments.episodes import Environments, Episodes
from megarl.environments.host import DONE
from megarl.environments.scoring import EpisodeScorer
from megarl.rewards.collective import RewardError
from megarl.rollout.responses import as_rollouts
from megarl.sandbox.pool import ScoringResult
from tests.support.programs import ROOT
from tests.support.ranks import RankPool
from tests.support.records import prompts
from tests.support.spread import spread

pytestmark = pytest.mark.ranks

ASKED: list[Any] = [*prompts([2, 3]).prompts]
SECTION = EnvironmentSection(name="Count", path=str(ROOT / "tests" / "support" / "own_environments.py"))
OWNERS = [[0, 1, 1, 0], [1] * 4]  # the rank that has each episode; the first may have none


def episode(place: int, *, fault: str | None = None) -> Generation:
    """Return an episode of two turns with an observation of `place + 1` tokens in between."""
    end = 3 + place
    return Generation(
        prompt=place // 2,
        token_ids=int32(range(10 * place, 10 * place + end + 1)),
        log_probs=float32([-1.0] * (end + 1)),
        truncated=False,
        weight_versions=int32([0] * (end + 1)),
        turns=(Turn(0, 2, 1.0, num_observed=place + 1), Turn(end, end + 1, float(place))),
        stop_reason=StopReason.FAILED if fault else StopReason.DONE,
        fault=fault,
    )


def scored(on_failure: Any, owners: Sequence[int] | None) -> Any:
    """Return texts, scores, metrics and warnings of this rank; or the error. The environment fails on two episodes."""
    faults = [None, "lost", "late", None]
    episodes = [episode(place, fault=fault) for place, fault in enumerate(faults)]
    record = as_rollouts(Prompts(prompts=ASKED), [0, 0, 1, 1], episodes, n=2)
    warned = list[str]()
    handler = logging.Handler()
    handler.emit = lambda record: warned.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("megarl.rewards.collective")
    logger.addHandler(handler)
    tokenizer: Any = SimpleNamespace(decode=str)
    try:
        samples, metrics = EpisodeScorer(EnvironmentSection(on_failure=on_failure), tokenizer).score(
            spread(record, owners)
        )
    except RewardError as error:
        return str(error)
    finally:
        logger.removeHandler(handler)
    return list(samples.share.texts), samples.share.scores.tolist(), metrics, warned


@pytest.mark.parametrize("owners", OWNERS)
@pytest.mark.parametrize("on_failure", ["mask", "score"])
def test_ranks_score_own_episodes_and_report_together(pool: RankPool, on_failure: str, owners: list[int]) -> None:
    [(*columns, metrics, warned)] = pool.run(1, scored, on_failure, None)
    ranks = pool.run(2, scored, on_failure, owners)
    assert len(warned) == 2 and metrics["episode/stop/failed"] == 0.5
    for rank, (*found, of_all, _) in enumerate(ranks):
        mine = [sample for sample, owner in enumerate(owners) if owner == rank]
        np.testing.assert_equal(found, [[column[sample] for sample in mine] for column in columns])
        assert of_all == metrics
    assert [of_rank[-1] for of_rank in ranks] == [warned, []]


@pytest.mark.parametrize("owners", OWNERS)
def test_failed_environment_may_stop_every_rank(pool: RankPool, owners: list[int]) -> None:
    [message] = pool.run(1, scored, "stop", None)
    assert message.startswith("the environment failed on sample 1 (data row 0): lost; ")
    assert pool.run(2, scored, "stop", owners) == [message] * 2


class Characters:
    """A tokenizer whose tokens are characters. It counts what it encodes."""

    num_encoded = 0

    def templates(self, prompt: object) -> bool:
        return False

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        self.num_encoded += 1
        return [*map(ord, text)]

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(map(chr, token_ids))


def opened(num_rows: int, name: str) -> tuple[list[int], list[str], list[str], list[str | None], int]:
    """Open rows, and bring all prompts to the last rank.

    Return the lengths of the prompts, their texts as far as this rank knows them then and before, their faults, and how
    many this rank encodes.
    """
    tokenizer: Any = Characters()
    made = Environments(replace(SECTION, name=name), tokenizer, tokenizer, written=str, seed=1)
    rows = [replace(ASKED[0], index=number, extra_info={}, raw_prompt=f"row {number}") for number in range(num_rows)]
    found = made.open(Prompts(prompts=rows), max_tokens=1000)
    last = torch.full((num_rows,), dist.get_world_size() - 1)
    brought = redistribute_prompts(found.prompts, torch.arange(num_rows), last, Shares.blocks(1).ranks)
    told = [[prompt.text for prompt in known] for known in (brought, found.prompts)]
    return found.prompt_lengths().tolist(), *told, [prompt.fault for prompt in brought], tokenizer.num_encoded


def test_one_rank_makes_each_prompt(pool: RankPool) -> None:
    [(lengths, alone, *_)] = pool.run(1, opened, 5, "Count")
    assert lengths == [*map(len, alone)] and len({*alone}) > 1
    first, second = pool.run(2, opened, 5, "Count")
    own, others = [alone[0], "", alone[2], "", alone[4]], ["", alone[1], "", alone[3], ""]
    assert first == (lengths, own, own, [None] * 5, 3)
    assert second == (lengths, alone, others, [None] * 5, 2)


def test_fault_reaches_ranks_that_need_it(pool: RankPool) -> None:
    """The environment fails on odd rows, which the first of three ranks has not asked it about."""
    *_, (lengths, _, _, faults, num_encoded) = pool.run(3, opened, 2, "Busy")
    assert lengths[1] == len(ASKED[0].token_ids)
    assert faults[0] is None and str(faults[1]).startswith("the environment does not begin: OSError: the simulator is")
    assert not num_encoded


def opened_and_answered() -> list[str]:
    """Return the errors of this rank: of rows that an environment cannot get, and of a turn that has no text."""
    found = []

    def written(ids: Sequence[int]) -> str:
        raise ValueError(f"token {ids[0]} has no text")

    tokenizer: Any = Characters()
    made = Environments(SECTION, tokenizer, tokenizer, written=written, seed=1)
    rows = [replace(ASKED[0], index=number, extra_info={"x": {1}} if number == 1 else {}) for number in range(2)]
    episodes = made.begin(max_tokens=20, group=dist.group.WORLD)
    said = [Generation(0, int32([7]), float32([-1.0]), truncated=False, complete=False)]
    if dist.get_rank() == 1:
        episodes.ask(ASKED[0], said[0])
    for ask in (lambda: made.open(Prompts(prompts=rows), max_tokens=20), lambda: episodes.answer(said)):
        try:
            ask()
        except ValueError as error:
            found.append(str(error))
    return found


def test_unreadable_row_or_turn_stops_every_rank(pool: RankPool) -> None:
    errors = ["data row 1: a set cannot be passed to a reward", "token 7 has no text"]
    assert pool.run(2, opened_and_answered) == [errors] * 2


def answered(numbers: Sequence[int]) -> list[tuple[float, str | None]]:
    """Play so many episodes on each replica of one rank; return what this replica's earn, and how they end."""

    def submit(prompt: Any, number: int, responses: list[str], observations: list[str]) -> Future[ScoringResult]:
        answer = Future[ScoringResult]()
        answer.set_result(ScoringResult(seconds=0.0, numbers={"score": float(responses[0]), DONE: 1.0}))
        return answer

    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    here = dist.get_rank()
    environments: Any = SimpleNamespace(section=EnvironmentSection(), written=lambda ids: str(ids[0]), submit=submit)
    episodes = Episodes(environments, count(), max_tokens=20, group=groups[here])
    said = [
        Generation(0, int32([10 * here + sample]), float32([-1.0]), truncated=False, sample=sample, complete=False)
        for sample in range(numbers[here])
    ]
    for each in said:
        episodes.ask(ASKED[0], each)
    return [(each.turns[-1].reward, each.stop_reason) for each in episodes.answer(said)]


def test_each_replica_gets_answers_of_its_own(pool: RankPool) -> None:
    """Episodes of two replicas may have the same numbers."""
    done = StopReason.DONE
    assert pool.run(2, answered, [2, 3]) == [[(0.0, done), (1.0, done)], [(10.0, done), (11.0, done), (12.0, done)]]
    assert pool.run(2, answered, [0, 1]) == [[], [(10.0, done)]]


def conversed() -> tuple[list[Any], list[Any], list[Any], list[list[str]]]:
    """Play three episodes on a replica of two ranks: each asks about some, and in the next step about the others.

    Return the tokens after a turn, the texts of observations that this rank has then, and when the step ends, and
    what it tells its environments in the next step.
    """
    here = dist.get_rank()
    told = list[list[str]]()

    def submit(prompt: Any, number: int, responses: list[str], observations: list[str]) -> Future[ScoringResult]:
        told.append(observations)
        answer = Future[ScoringResult]()
        said = "" if responses[-1] == "2" else f"{responses[-1]}!" * 3
        answer.set_result(ScoringResult(seconds=0.0, numbers={"score": 1.0, DONE: 0.0}, pred=json.dumps(said)))
        return answer

    def play(said: Sequence[Generation], rest: int) -> tuple[Episodes, list[Generation]]:
        episodes = Episodes(environments, count(), max_tokens=99, group=dist.group.WORLD)
        for each in said:
            if each.sample % 2 == rest:
                episodes.ask(ASKED[0], each)
        return episodes, episodes.answer(said)

    observer = SimpleNamespace(encode=lambda observation, prompt, last: [*map(ord, observation)])
    environments: Any = SimpleNamespace(
        section=EnvironmentSection(), written=lambda ids: str(ids[0]), submit=submit, observer=observer
    )
    begun = [Generation(0, int32(), float32(), truncated=False, sample=sample, complete=False) for sample in range(3)]
    said = [each.then(Generation(0, int32([each.sample]), float32([-1.0]), truncated=False)) for each in begun]
    episodes, once = play(said, here)
    carried = episodes.with_texts(once)
    told.clear()
    play([each.then(Generation(0, int32([7]), float32([-1.0]), truncated=False)) for each in carried], 1 - here)
    before, after = ([turn.observation for each in found for turn in each.turns] for found in (once, carried))
    return [each.token_ids.tolist() for each in once], before, after, told


def test_texts_of_observations_travel_when_step_ends(pool: RankPool) -> None:
    tokens = [[0, *map(ord, "0!0!0!")], [1, *map(ord, "1!1!1!")], [2]]
    texts = [json.dumps(text) for text in ("0!0!0!", "1!1!1!", "")]
    first, second = pool.run(2, conversed)
    assert first[0] == second[0] == tokens
    assert (first[1], second[1]) == ([texts[0], None, texts[2]], [None, texts[1], None])
    assert first[2] == second[2] == texts
    assert (first[3], second[3]) == ([[], [texts[1]]], [[], [texts[0]], [], [texts[2]]])
