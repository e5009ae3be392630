"""The samples of a step: real prompts in order, with an engine and a reward that record their calls."""

import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from megarl.algorithms.config import AlgorithmSection, FilterGroupsSection, OverlongBufferSection
from megarl.batch import Group, Prompts, Rollouts, Scored
from megarl.checkpoint.state import State
from megarl.data.config import DataSection
from megarl.data.order import Position
from megarl.data.prompts import PromptDataset, PromptStream
from megarl.data.tokenizer import Tokenizer, load_tokenizer
from megarl.distributed.sharded import Sharded, Shares
from megarl.rewards.collective import RewardError
from megarl.rollout.responses import of_groups
from megarl.samples.store import SampleStore
from megarl.tracking.timers import Timers
from megarl.training.collect import Collected, Collector
from tests.support.kept import read_all
from tests.support.ranks import world_of_one
from tests.support.records import alone, of_rows
from tests.support.sentencepieces import train_sentencepiece
from tests.support.sessions import HandSession, answered

NUM_SAMPLES = 2
Says = Callable[[int, int], tuple[float, float]]  # (row, batch of the step) -> the scores of the two samples


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(str(train_sentencepiece(tmp_path_factory.mktemp("tokenizer") / "small.model")))


@pytest.fixture
def five(tmp_path: Path, tokenizer: Tokenizer) -> PromptStream:
    """Rows 0 to 4 in batches of two, in their order: an epoch is (0, 1), (2, 3)."""
    rows = [
        {"prompt": str(number), "data_source": "countdown", "reward_model": {"ground_truth": "8"}}
        for number in range(5)
    ]
    file = str(tmp_path / "five.parquet")
    pq.write_table(pa.Table.from_pylist(rows), file)
    section = DataSection(train_files=file, train_batch_size=2)
    return PromptStream(PromptDataset(section, file, tokenizer), batch_size=2, shuffle=False, seed=1)


class World:
    """Engine and reward: in batch `b` sample `s` of row `r` is `b + 1` tokens `100 b + 10 r + s`,
    its greedy response three tokens `-r` of score `r / 10`."""

    def __init__(self, says: Says, accuracies: Says | None = None) -> None:
        self.says, self.accuracies = says, accuracies or says
        self.odd_baselines: list[int] = []  # rows
        self.calls: list[str] = []
        self.wait: Callable[[int], int] = lambda number: 1  # exchanges until the group of that number is complete
        self.paid = 0
        self.clock = 0.0  # seconds: waking takes 100, generating 10, scoring 1

    @contextmanager
    def awake(self, timers: Timers, *, step: int) -> Iterator[dict[str, float]]:
        self.calls.append(f"wake {step}")
        self.clock += 100.0
        yield {"sync/check_probs_diff_mean": 0.5}
        self.calls.append("sleep")

    def groups(self, prompts: Prompts, *, step: int, batch: int = 0) -> list[Group]:
        numbers = range(batch * NUM_SAMPLES, (batch + 1) * NUM_SAMPLES)
        return [Group.new(prompt, numbers, started=step) for prompt in prompts.prompts]

    def open(self, *, step: int, keeps_stopped: bool = False) -> HandSession:
        self.session = HandSession(self.answer, self.wait)
        return self.session

    def answer(self, group: Group) -> Group:
        """Complete a group; the first of an exchange pays for it."""
        if self.session.num_exchanges > self.paid:
            self.calls.append("generate")
            self.clock += 10.0
            self.paid = self.session.num_exchanges
        return answered(group, lambda number: self.tokens(group.prompt.index, *divmod(number, NUM_SAMPLES)))

    def record(self, groups: Sequence[Group]) -> Sharded[Rollouts]:
        return of_groups(groups, Shares())

    def tokens(self, row: int, batch: int, sample: int) -> list[int]:
        return [100 * batch + 10 * row + sample] * (batch + 1)

    def generate(self, prompts: Prompts, *, step: int) -> tuple[Sharded[Rollouts], dict[str, float]]:
        rows = [prompt.index for prompt in prompts.prompts]
        self.calls.append(f"generate {rows}")
        self.clock += 10.0
        tokens = [self.tokens(row, 0, sample) for row in rows for sample in range(NUM_SAMPLES)]
        return self._rollouts(prompts, tokens, NUM_SAMPLES), {"rollout/occupancy": 0.5}

    def greedy(self, prompts: Prompts, *, step: int) -> Sharded[Rollouts]:
        rows = [prompt.index for prompt in prompts.prompts]
        self.calls.append(f"greedy {rows}")
        return self._rollouts(prompts, [[-row] * 3 for row in rows], 1)

    def validate(self, prompts: Prompts, *, step: int) -> Sharded[Rollouts]:
        raise AssertionError("nothing is validated here")

    def forget(self) -> None:
        self.calls.append("forget")

    def score(self, samples: Sharded[Rollouts]) -> tuple[Sharded[Scored], dict[str, float]]:
        self.calls.append("score")
        self.clock += 1.0
        rollouts = samples.share
        num_samples = len(rollouts) // len(rollouts.prompts)
        rows = [rollouts.prompt_of(sample).index for sample in range(len(rollouts))]
        first = [int(rollouts.response_ids(sample)[0]) for sample in range(len(rollouts))]
        batches = [max(0, token // 100) for token in first]
        scored: dict[str, Any] = {
            name: torch.tensor(
                [
                    says(row, batch)[sample % NUM_SAMPLES]
                    for sample, (row, batch) in enumerate(zip(rows, batches, strict=True))
                ]
            )
            for name, says in (("scores", self.says), ("accuracies", self.accuracies))
        }
        if num_samples == 1:
            baselines = [
                math.nan if prompt.index in self.odd_baselines else prompt.index / 10 for prompt in rollouts.prompts
            ]
            scored = dict.fromkeys(scored, torch.tensor(baselines))
        texts = [*map(str, first)]
        scored["failures"] = [f"{score} is odd" if math.isnan(score) else None for score in scored["scores"].tolist()]
        metrics = {"reward/error_rate": 1.0 - batches[0], "reward/slowest_s": 7.0 - batches[0]}
        return samples.with_share(rollouts.extend(Scored, texts=texts, **scored)), metrics

    @staticmethod
    def _rollouts(prompts: Prompts, tokens: list[list[int]], num_samples: int) -> Sharded[Rollouts]:
        responses = torch.tensor(tokens)
        return alone(
            of_rows(
                Rollouts,
                prompts=prompts.prompts,
                groups=torch.arange(len(prompts.prompts)).repeat_interleave(num_samples),
                responses=responses,
                mask=torch.ones_like(responses, dtype=torch.bool),
                rollout_log_probs=None,
                truncated=torch.zeros(len(tokens), dtype=torch.bool),
            )
        )


def right_and_wrong(*rows: int) -> Says:
    """Of these rows one sample is right and one is wrong; of other even rows none is right, of other odd ones both."""
    return lambda row, batch: (0.0, 1.0) if row in rows else (float(row % 2), float(row % 2))


def collector(prompts: PromptStream, world: World, *, estimator: str = "grpo", **keys: Any) -> Collector:
    """Dynamic sampling as `keys` say; other sections by their names."""
    sections = {name: keys.pop(name) for name in ("overlong_buffer",) if name in keys}
    filter_groups = FilterGroupsSection(**{"enable": True, **keys})
    algorithm = AlgorithmSection(adv_estimator=estimator, filter_groups=filter_groups, **sections)  # type: ignore[arg-type]
    return Collector(prompts=prompts, sampler=world, scorer=world, algorithm=algorithm)


def rows(collected: Collected) -> list[int]:
    return [prompt.index for prompt in collected.scored.index.prompts]


def test_without_dynamic_sampling_engine_sleeps_before_scoring(five: PromptStream) -> None:
    world = World(right_and_wrong())
    collected = collector(five, world, enable=False).collect(Position(0, 2), Timers(), step=7)
    assert world.calls == ["wake 7", "generate [2, 3]", "sleep", "score"]
    assert rows(collected) == [2, 3]
    assert collected.position == Position(1, 0)
    assert collected.baselines is None
    assert collected.metrics == {
        "reward/error_rate": 1.0,
        "reward/slowest_s": 7.0,
        "sync/check_probs_diff_mean": 0.5,
        "rollout/occupancy": 0.5,
    }


def test_groups_with_equal_scores_are_replaced(five: PromptStream) -> None:
    world = World(right_and_wrong(0, 3))
    collected = collector(five, world).collect(Position(), Timers(), step=7)
    assert world.calls == ["wake 7", "generate", "score", "generate", "score", "forget", "sleep"]
    assert world.session.added == [[0, 1], [2, 3]]
    scored = collected.scored.share
    assert rows(collected) == [0, 3]
    assert scored.groups.tolist() == [0, 0, 1, 1]
    assert scored.scores.tolist() == [0.0, 1.0, 0.0, 1.0]
    assert scored.texts == ["0", "1", "130", "131"]
    assert scored.responses.tolist() == [0, 1, 130, 130, 131, 131]
    assert scored.num_tokens.tolist() == [1, 1, 2, 2]
    assert scored.mask.tolist() == [True] * 6
    assert scored.rollout_log_probs is None
    assert [scored.prompt_of(sample).text for sample in range(4)] == ["0", "0", "3", "3"]
    assert collected.position == Position(1, 0)
    assert collected.metrics == {
        "train/num_gen_batches": 2.0,
        "train/num_groups_kept": 2.0,
        "train/num_groups_alike": 2.0,
        "train/num_groups_surplus": 0.0,
        "train/sampled_score/mean": 0.5,  # of 0 1, 1 1, 0 0, 0 1
        "reward/error_rate": 0.5,
        "reward/slowest_s": 7.0,
        "sync/check_probs_diff_mean": 0.5,
        "rollout/occupancy": 0.75,
    }


def test_equal_score_group_is_replaced_during_generation(five: PromptStream) -> None:
    """Row 1 is slow. Row 0 teaches nothing, so row 2 begins before row 1 is complete; both are learnt.

    After rows 0 and 2 half of the prompts differed, so two are expected to give the one that is missing.
    """
    world = World(right_and_wrong(1, 2))
    world.wait = {0: 1, 1: 6, 2: 1, 3: 1}.__getitem__
    collected = collector(five, world).collect(Position(), Timers(), step=0)
    assert rows(collected) == [1, 2]
    assert world.session.added == [[0, 1], [2], [3]]
    assert world.session.num_exchanges == 6


def test_slow_prompt_is_not_replaced_by_faster_one(five: PromptStream) -> None:
    """Rows 1 and 2 differ before row 0 is complete: the step waits for row 0, and what it learns is not faster."""
    world = World(right_and_wrong(0, 1, 2, 3))
    world.wait = {0: 9, 1: 1, 2: 1, 3: 1}.__getitem__
    assert rows(collector(five, world).collect(Position(), Timers(), step=0)) == [0, 1]
    assert world.session.num_exchanges == 9


def test_of_too_many_groups_the_first_are_kept(five: PromptStream) -> None:
    collected = collector(five, World(right_and_wrong(1, 2, 3))).collect(Position(), Timers(), step=0)
    assert rows(collected) == [1, 2]
    assert len(collected.scored) == 4
    assert collected.position == Position(1, 0)  # the batch is used up
    assert collected.metrics["train/num_groups_surplus"] == 1.0


def test_prompt_repeated_in_next_epoch_gets_new_samples(five: PromptStream) -> None:
    collected = collector(five, World(right_and_wrong(3))).collect(Position(4, 2), Timers(), step=0)
    assert rows(collected) == [3, 3]
    assert collected.scored.share.texts == ["30", "31", "230", "231"]
    assert collected.scored.share.groups.tolist() == [0, 0, 1, 1]  # two groups, each compared within itself
    assert collected.position == Position(6, 0)
    assert collected.metrics["train/num_gen_batches"] == 3.0


def test_run_continues_from_saved_position(five: PromptStream, tmp_path: Path) -> None:
    """Iterations take one batch, two and one: what the position is cannot be told from the step."""

    def run(position: Position, steps: range) -> tuple[list[list[int]], Position]:
        taken = []
        for step in steps:
            world = World(right_and_wrong(0, 1, 2))
            collected = collector(five, world).collect(position, Timers(), step=step)
            position = collected.position
            taken.append(rows(collected))
        return taken, position

    whole, end = run(Position(), range(3))
    assert whole == [[0, 1], [2, 0], [2, 0]]
    first, saved = run(Position(), range(2))
    (tmp_path / "state.json").write_text(json.dumps(asdict(State(step=2, position=saved))))
    state = State.read(tmp_path)
    assert state.position == saved == Position(1, 2)
    rest, reached = run(state.position, range(2, 3))
    assert (first + rest, reached) == (whole, end)


def test_too_few_groups_within_limit_raise_helpful_error(five: PromptStream) -> None:
    message = (
        r"found only 1 of 2 prompts whose responses differ in acc, in 2 batches \(max_num_gen_batches=2\).*"
        r"raise actor_rollout_ref\.rollout\.n or max_num_gen_batches \(0 = no limit\)"
    )
    world = World(right_and_wrong(3))
    with pytest.raises(ValueError, match=message):
        collector(five, world, max_num_gen_batches=2).collect(Position(), Timers(), step=0)
    assert world.calls.count("score") == 2


def test_unlimited_collection_ends_after_epoch_without_new_group(five: PromptStream) -> None:
    late = World(lambda row, batch: (0.0, float(batch > 3)))  # after two epochs
    with pytest.raises(ValueError, match="found only 0 of 2 prompts"):
        collector(five, late, max_num_gen_batches=0).collect(Position(), Timers(), step=0)
    once = World(lambda row, batch: (0.0, float(batch > 8 or (batch, row) == (1, 2))))
    collected = collector(five, once, max_num_gen_batches=0).collect(Position(), Timers(), step=0)
    assert rows(collected) == [2, 2]
    assert collected.metrics["train/num_gen_batches"] == 10.0


@pytest.mark.parametrize(
    ("metric", "kept"),
    [("acc", [0, 1]), ("score", [2, 3]), ("seq_reward", [2, 3]), ("seq_final_reward", [2, 3])],
)
def test_the_metric_is_what_must_differ(five: PromptStream, metric: str, kept: list[int]) -> None:
    world = World(right_and_wrong(2, 3), accuracies=right_and_wrong(0, 1))
    assert rows(collector(five, world, metric=metric).collect(Position(), Timers(), step=0)) == kept


@pytest.mark.parametrize(("metric", "found"), [("score", False), ("seq_reward", True)])
def test_overlong_penalty_distinguishes_groups_only_in_penalised_metric(
    five: PromptStream, metric: str, found: bool
) -> None:
    class Lengths(World):
        def tokens(self, row: int, batch: int, sample: int) -> list[int]:
            return [10 * row + sample] * (sample + 1)

    buffer = OverlongBufferSection(enable=True, len=1, max_resp_len=2)
    collecting = collector(
        five, Lengths(right_and_wrong()), metric=metric, max_num_gen_batches=1, overlong_buffer=buffer
    )
    if found:
        assert rows(collecting.collect(Position(), Timers(), step=0)) == [0, 1]
    else:
        with pytest.raises(ValueError, match="only 0 of 2 prompts whose responses differ in score"):
            collecting.collect(Position(), Timers(), step=0)


def test_greedy_score_is_baseline_of_samples_of_prompt(five: PromptStream) -> None:
    world = World(right_and_wrong())
    collected = collector(five, world, estimator="remax", enable=False).collect(Position(0, 2), Timers(), step=7)
    assert world.calls == ["wake 7", "generate [2, 3]", "greedy [2, 3]", "sleep", "score", "score"]
    assert collected.baselines is not None
    assert collected.baselines.tolist() == pytest.approx([0.2, 0.2, 0.3, 0.3])
    assert collected.scored.share.scores.tolist() == [0.0, 0.0, 1.0, 1.0]

    buffer = OverlongBufferSection(enable=True, len=2, max_resp_len=4)
    penalised = collector(five, World(right_and_wrong()), estimator="remax", enable=False, overlong_buffer=buffer)
    baselines = penalised.collect(Position(0, 2), Timers(), step=7).baselines
    assert baselines is not None
    assert baselines.tolist() == pytest.approx([-0.3, -0.3, -0.2, -0.2])  # three tokens are one of two too many


def test_samples_without_score_are_kept_but_not_trained(five: PromptStream) -> None:
    world = World(lambda row, batch: (math.nan, 0.5) if row == 2 else (0.0, 1.0))
    collected = collector(five, world, enable=False).collect(Position(0, 2), Timers(), step=7)
    assert collected.scored.share.failures == ["nan is odd", None, None, None]
    judged = collected.scored_only().scored.share
    assert judged.scores.tolist() == [0.5, 0.0, 1.0]
    assert (judged.texts, judged.failures) == (["21", "30", "31"], [None] * 3)
    assert (judged.groups.tolist(), rows(collected)) == ([0, 1, 1], [2, 3])


def test_equal_scores_exclude_group_despite_failed_rewards(five: PromptStream) -> None:
    world = World(lambda row, batch: (math.nan, 1.0) if row in (0, 2) else (0.0, 1.0))
    collected = collector(five, world).collect(Position(), Timers(), step=7)
    assert rows(collected) == [1, 3]
    assert collected.metrics["train/sampled_score/mean"] == pytest.approx(4 / 6)


@pytest.mark.parametrize("enable", [True, False])
def test_step_with_mostly_failed_rewards_stops_run(five: PromptStream, enable: bool) -> None:
    world = World(lambda row, batch: (math.nan, math.nan) if row == 0 else (math.nan, 1.0))
    message = (
        r"3 of 4 responses have no score, more than half.*data row 0, response '0'\): nan is odd.*on_failure=score"
    )
    with pytest.raises(RewardError, match=message):
        collector(five, world, enable=enable).collect(Position(), Timers(), step=7)


def test_baseline_without_score_excludes_samples_of_its_prompt(five: PromptStream, tmp_path: Path) -> None:
    world = World(right_and_wrong())
    world.odd_baselines = [3]
    collected = collector(five, world, estimator="remax", enable=False).collect(Position(0, 2), Timers(), step=7)
    reason = "the greedy response to its prompt has no score: nan is odd"
    assert collected.scored.share.failures == [None, None, reason, reason]
    with world_of_one():
        assert SampleStore(tmp_path).save_step(collected.scored, collected.baselines, step=8)
    assert read_all(tmp_path / "step_8.parquet")[0].failures == [None, None, reason, reason]
    kept = collected.scored_only()
    judged, baselines = kept.scored.share, kept.baselines
    assert baselines is not None
    assert judged.texts == ["20", "21"]
    assert baselines.tolist() == pytest.approx([0.2, 0.2])

    world = World(lambda row, batch: (math.nan, 1.0) if row == 2 else (0.0, 1.0))
    world.odd_baselines = [3]
    with pytest.raises(RewardError, match="3 of 4 responses have no score"):
        collector(five, world, estimator="remax", enable=False).collect(Position(0, 2), Timers(), step=7)


def test_only_prompts_that_are_kept_get_greedy_answers(five: PromptStream) -> None:
    world = World(right_and_wrong(1, 2, 3))
    collected = collector(five, world, estimator="remax").collect(Position(), Timers(), step=7)
    assert world.calls[-5:] == ["score", "forget", "greedy [1, 2]", "sleep", "score"]
    assert collected.baselines is not None
    assert collected.baselines.tolist() == pytest.approx([0.1, 0.1, 0.2, 0.2])


def test_scoring_between_batches_is_no_generation(five: PromptStream, monkeypatch: pytest.MonkeyPatch) -> None:
    world, timers = World(right_and_wrong(0, 3)), Timers()
    monkeypatch.setattr("time.perf_counter", lambda: world.clock)
    collector(five, world).collect(Position(), timers, step=0)
    assert timers.seconds() == {"timing_s/gen": 120.0, "timing_s/reward": 2.0}
