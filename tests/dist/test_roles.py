"""The reward, spread over ranks: every rank has every score, and every rank hears of a sample that has none."""

from collections.abc import Iterator
from typing import Any

import pytest

from megarl.batch import Rollouts
from tests.ranks import RankPool
from tests.records import answer, prompts

pytestmark = pytest.mark.dist

BATCH: Rollouts = answer(prompts([1, 1, 1]), [2, 1, 3, 1, 2, 2])  # the response of sample i begins with 10 * (i + 1)


class Words:
    """A tokenizer whose text is the numbers of the tokens."""

    def decode(self, ids: list[int]) -> str:
        return " ".join(map(str, ids))


def length(data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any]) -> float:
    return float(len(solution_str.split()))


def raises_on_sample_3(solution_str: str, **_: Any) -> float:
    if solution_str == "40":
        raise KeyError("answer")
    return 0.0


def says_text_on_sample_3(solution_str: str, **_: Any) -> Any:
    return "0.5" if solution_str == "40" else 0.5


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(2) as pool:
        yield pool


def judged(reward: Any) -> Any:
    from megarl.rewards.scoring import RewardError
    from megarl.roles import Scorer

    try:
        scored, _ = Scorer(reward=reward, tokenizer=Words()).score(BATCH)
    except RewardError as error:
        return str(error)
    return list(scored.texts), scored.scores.tolist()


def test_every_rank_has_every_score_in_the_order_of_the_samples(pool: RankPool) -> None:
    texts = ["10 11", "20", "30 31 32", "40", "50 51", "60 61"]
    assert pool.run(2, judged, length) == [(texts, [2.0, 1.0, 3.0, 1.0, 2.0, 2.0])] * 2


@pytest.mark.parametrize(
    ("reward", "cause"),
    [
        (raises_on_sample_3, "KeyError: 'answer'"),
        (
            says_text_on_sample_3,
            "TypeError: a reward returns a finite number or a dict with one under 'score', not '0.5'",
        ),
    ],
)
def test_a_reward_that_fails_on_one_rank_is_named_on_all(pool: RankPool, reward: Any, cause: str) -> None:
    message = f"the reward failed on sample 3 (data source 'countdown', data row 1, response '40'): {cause}"
    assert pool.run(2, judged, reward) == [message] * 2
