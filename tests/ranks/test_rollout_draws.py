"""The draws of an engine if few tokens are possible, if a prompt takes several of its steps, and if samples wait."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from megarl.batch import Generation, Group, float32, int32
from megarl.rollout.config import SamplingSection
from megarl.rollout.session import SamplingSession
from tests.support.engines import PROMPTS, generating, log_probs, start, tear_down, tensors_of, write_two_checkpoints
from tests.support.ranks import RankPool

pytestmark = pytest.mark.ranks

RESPONSE = 12
TWO = SamplingSection(n=2, do_sample=True, temperature=0.7)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return write_two_checkpoints(tmp_path_factory.mktemp("checkpoints"), "llama")


def answers_with_few_tokens(paths: list[Path], step_tokens: int) -> list[Generation]:
    """Return the responses of an engine that draws from the 5 likeliest tokens, with steps of so many tokens."""
    section = {"top_k": 5, "n": 2}
    engine = start(paths[-1], tp_size=1, max_num_batched_tokens=step_tokens, **section)
    with generating(engine, tensors_of(paths[0]), version=7):
        sampling = SamplingSection(do_sample=True, temperature=1.0, **section)
        generations = engine.generate(PROMPTS, sampling, max_tokens=RESPONSE, step=7)
    tear_down(engine)
    return generations


def test_log_probs_cover_all_tokens_under_restricted_sampling(pool: RankPool, checkpoints: list[Path]) -> None:
    [generations] = pool.run(1, answers_with_few_tokens, checkpoints, 1024)
    model = AutoModelForCausalLM.from_pretrained(checkpoints[0], dtype=torch.float32)
    for generation in generations:
        expected = log_probs(model, PROMPTS[generation.prompt], generation.token_ids, 1.0)
        torch.testing.assert_close(torch.tensor(generation.log_probs), expected, rtol=0.0, atol=1e-4)
        assert list(generation.weight_versions) == [7] * RESPONSE


def test_chunked_prefill_gives_same_responses(pool: RankPool, checkpoints: list[Path]) -> None:
    """The token that vLLM draws after each part but the last is not used, and must not change the next one."""
    (uncut,), (cut,) = (pool.run(1, answers_with_few_tokens, checkpoints, tokens) for tokens in (1024, 48))
    assert [generation.token_ids for generation in cut] == [generation.token_ids for generation in uncut]


def drawn_with_room_for_two(paths: list[Path]) -> list[tuple[dict[int, Group], float]]:
    """Return the groups of a step and its occupancy, first as the groups were dealt, then shared.

    Even groups have 40 tokens to go. Odd groups have 3, and began on the second of two replicas; so the first replica
    gets all even groups.
    """
    engine = start(paths[-1], tp_size=1, max_num_seqs=2)
    assert engine.room == 2
    groups = {number: to_go(3 if number % 2 else 40, index=number, here=engine.replica) for number in range(6)}
    found = []
    with generating(engine, tensors_of(paths[0])):
        for room in (len(groups) * TWO.n, engine.room):
            engine.room = room
            session = SamplingSession(engine, engine.open_queue(TWO, max_tokens=40, step=2), num_slots=2)
            session.add(groups)
            found.append((session.advance(None), session.occupancy()))
    tear_down(engine)
    return found


def to_go(num_tokens: int, *, index: int, here: int) -> Group:
    """Return a group as replica `here` knows it. Its samples lack so many of 40 tokens; the second has the others."""
    group = Group.new(replace(PROMPTS[0], index=index), range(TWO.n), started=1)
    started = 40 - num_tokens
    drawn = Generation(
        0,
        int32([7]) * started,
        float32([-1.0]) * started,
        truncated=False,
        weight_versions=int32([1]) * started,
        complete=False,
    )
    samples = [replace(drawn, sample=sample.sample) for sample in group.samples]
    return replace(group, samples=tuple(each if here == 1 else each.as_remote(1) for each in samples))


def test_idle_replica_takes_groups_from_another(pool: RankPool, checkpoints: list[Path]) -> None:
    """The first replica would take 3 x 40 steps. After 16 steps the second takes one of its groups."""
    ranks = pool.run(2, drawn_with_room_for_two, checkpoints)
    num_drawn = 3 * TWO.n * (40 + 3)
    for (_, before), (_, after) in ranks:
        assert (before, after) == pytest.approx((num_drawn / (120 * 4), num_drawn / (80 * 4)))
    dealt, shared = ([found[turn][0] for found in ranks] for turn in (0, 1))
    assert [replica_of(number, dealt) for number in range(6)] == [0, 1, 0, 1, 0, 1]
    assert [replica_of(number, shared) for number in range(6)] == [0, 1, 0, 1, 1, 1]
    for number in range(6):
        before, after = (found[replica_of(number, found)][number].samples for found in (dealt, shared))
        for one, other in zip(before, after, strict=True):
            assert (one.token_ids, len(one.token_ids)) == (other.token_ids, 40)
            assert one.log_probs == pytest.approx(other.log_probs, abs=1e-5)


def replica_of(number: int, found: list[dict[int, Group]]) -> int:
    """Return the replica that has the tokens of a complete group. The other knows how many there are."""
    assert all(sorted(groups) == list(range(6)) for groups in found)
    [(replica, samples)] = [
        (replica, groups[number].samples)
        for replica, groups in enumerate(found)
        if all(isinstance(sample, Generation) for sample in groups[number].samples)
    ]
    assert found[1 - replica][number].samples == tuple(sample.as_remote(replica) for sample in samples)
    return replica
