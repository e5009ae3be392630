"""Environments: their protocol, the processes that play them, and what becomes of the turns that they judge."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from examples.environments.calculator import Calculator
from examples.environments.guess import Guess
from megarl.batch import Generation, Prompts, StopReason, Turn, float32, int32
from megarl.environments.config import EnvironmentSection
from megarl.environments.encoding import Observer
from megarl.environments.episodes import Answer, Environments, proceed
from megarl.environments.host import DONE, Host, Players
from megarl.environments.protocol import Environment, Row, Step
from megarl.environments.scoring import EpisodeScorer
from megarl.rewards.collective import RewardError
from megarl.rewards.scoring import first_failures
from megarl.rollout.responses import as_rollouts
from tests.support.own_environments import Count, Fickle
from tests.support.programs import ROOT
from tests.support.ranks import world_of_one
from tests.support.records import alone, prompts

GUESS = str(ROOT / "examples" / "environments" / "guess.py")
OWN = str(ROOT / "tests" / "support" / "own_environments.py")
FIELDS: dict[str, Any] = {"prompt": "p", "ground_truth": 37, "extra_info": {}, "index": 5, "seed": 1}
SECTION = EnvironmentSection(name="Count", path=OWN, max_turns=3, num_workers=2, timeout_s=2.0, default_score=-1.0)


def play(environment: Environment, truth: Any, *responses: str) -> list[Step]:
    environment.reset(Row(data_source="", **FIELDS | {"ground_truth": truth}))
    return [environment.step(response) for response in responses]


def test_guess_tells_the_direction() -> None:
    said = play(Guess(wrong=-0.1), 37, "is it 20?", "50", "no idea", "9" * 30, "37!")
    assert said == [
        ("higher", -0.1, False),
        ("lower", -0.1, False),
        ("?", -0.1, False),
        ("?", -0.1, False),
        (None, 1.0, True),
    ]


def test_calculator_evaluates_until_there_is_an_answer() -> None:
    truth = {"target": 20, "numbers": [3, 18, 5]}
    said = play(Calculator(), truth, "try:\n18 + 5", "18/5", "1/0", "9**9**9", "hm", "<answer>18 + 5 - 3</answer>")
    assert [step.observation for step in said] == ["= 23", "= 3.6", "= ?", "= ?", "= ?", None]
    assert [step.reward for step in said] == [0.0] * 5 + [1.0]
    assert play(Calculator(), truth, "<answer>18 + 5</answer>") == [(None, 0.1, True)]


def ask(players: Players, responses: list[str], observations: list[str], *, episode: str = "1") -> Any:
    return players.answer(data_source="", row=FIELDS, episode=episode, responses=responses, observations=observations)


def test_worker_replays_lost_episode() -> None:
    whole, numbers = Players(Count), [{"score": float(turn), DONE: 0.0} for turn in (1, 2)]
    first = ask(whole, ["a"], [])
    assert first == (numbers[0], '"1:a"')
    second = ask(whole, ["a", "b"], [first.pred])
    assert second == ask(Players(Count), ["a", "b"], [first.pred]) == (numbers[1], '"2:b"')
    assert ask(whole, ["a", "b", "c"], [first.pred, second.pred]) == ({"score": 3.0, DONE: 1.0}, None)
    assert ask(whole, [], []).pred == '"row 5 begins"'


def test_different_observation_in_replayed_turn_is_error() -> None:
    players = Players(Fickle)
    first = ask(players, ["a"], [])
    ask(players, ["a", "b"], [first.pred])
    with pytest.raises(RuntimeError, match="not deterministic"):
        ask(Players(Fickle), ["a", "b"], [first.pred])


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (None, r"step returns \(observation, reward, done\), not None"),
        (("x", 1.0), r"not \('x', 1.0\)"),
        (("x", float("nan"), False), "finite number"),
        ((7, 1.0, False), "neither a text nor a list of messages"),
        (("", 1.0, False), "the text is empty"),
        (("x", 1.0, "no"), "done is true or false, a bool, not 'no'"),
        (("x", 1.0, 0), "done is true or false, a bool, not 0"),
        (("x", 1.0, None), "done is true or false, a bool, not None"),
        (("x", 1.0, np.array([False])), "done is true or false, a bool, not "),
        (("x", 1.0, np.int64(1)), "done is true or false, a bool, not "),
        (([{"role": "assistant", "content": "x"}], 1.0, False), "only the policy speaks"),
    ],
)
def test_answers_that_are_none(answer: Any, message: str) -> None:
    call = Host(name="Says", path=OWN, kwargs={"answer": answer}).load()
    request = {"data_source": "", "row": FIELDS, "episode": "1", "responses": ["a"], "observations": []}
    [outcome] = call([request], math.inf)
    with pytest.raises((TypeError, ValueError), match=message):
        raise outcome if isinstance(outcome, Exception) else AssertionError(outcome)


@pytest.mark.parametrize("done", [True, np.True_, np.array(True), torch.tensor(True)])
def test_end_may_be_of_numpy_or_torch(done: Any) -> None:
    call = Host(name="Says", path=OWN, kwargs={"answer": ("x", np.float32(0.5), done)}).load()
    request = {"data_source": "", "row": FIELDS, "episode": "1", "responses": ["a"], "observations": []}
    assert call([request], math.inf) == [({"score": 0.5, DONE: 1.0}, None)]


@pytest.mark.parametrize(
    ("host", "message"),
    [
        (Host(name="chess"), r"environment.name: 'chess' is not built in \(openenv, python, "),
        (Host(name="Guess", path=GUESS, kwargs={"rihgt": 1}), "environment.kwargs: Guess does not take them: .*rihgt"),
        (Host(name="Mute", path=OWN), "environment.name: .* has no class Mute with the methods"),
        (Host(name="Gymlike", path=OWN), r"the call is Gymlike\.reset\(row\): too many positional arguments"),
        (Host(name="Impatient", path=OWN), r"the call is Impatient\.step\(response\): missing .* 'clock'"),
        (Host(name="Count", path="nowhere.py"), "environment.path: no such file: nowhere.py"),
    ],
)
def test_an_environment_that_cannot_be_made_is_named(host: Host, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        host.load()


def test_decorated_method_may_take_further_arguments() -> None:
    Host(name="Timed", path=OWN).load()


SAID = Generation(2, int32([7, 8]), float32([-1.0, -2.0]), truncated=False, weight_versions=int32([4, 4]), sample=1)
LATER = Generation(0, int32([9]), float32([-3.0]), truncated=False, weight_versions=int32([4]))
GOES_ON = Answer(reward=0.5, observation=[20, 21, 22])


def test_observation_is_appended_after_policy_tokens() -> None:
    once = proceed(SAID, GOES_ON, SECTION, max_tokens=30)
    assert (once.token_ids, once.complete) == (int32([7, 8, 20, 21, 22]), False)
    assert once.log_probs == float32([-1.0, -2.0, 0.0, 0.0, 0.0])
    assert once.turns == (Turn(0, 2, 0.5, num_observed=3),)
    done = proceed(once.then(LATER), Answer(reward=2.0, done=True), SECTION, max_tokens=30)
    assert (done.complete, done.stop_reason) == (True, StopReason.DONE)
    assert done.token_ids == int32([7, 8, 20, 21, 22, 9])
    assert (done.prompt, done.sample, done.turns[1]) == (2, 1, Turn(5, 6, 2.0))
    record = as_rollouts(Prompts(prompts=prompts([1]).prompts), [0], [done], n=1)
    assert record.mask.tolist() == [True, True, False, False, False, True]
    assert record.turn_rewards is not None
    assert record.turn_rewards.tolist() == [0.0, 0.5, 0.0, 0.0, 0.0, 2.0]


TIMED_OUT = Answer(fault=StopReason.TIMEOUT, detail="late")


@pytest.mark.parametrize(
    ("said", "answer", "section", "max_tokens", "reason", "reward"),
    [
        (SAID, GOES_ON, SECTION, 5, StopReason.TOKENS, 0.5),  # no token would be left to say
        (replace(SAID, truncated=True), Answer(), SECTION, 30, StopReason.TOKENS, -1.0),
        (SAID, GOES_ON, replace(SECTION, max_turns=1), 30, StopReason.TURNS, 0.5),
        (SAID, TIMED_OUT, SECTION, 30, StopReason.TIMEOUT, 0.0),
        (SAID, TIMED_OUT, replace(SECTION, on_failure="score"), 30, StopReason.TIMEOUT, -1.0),
    ],
)
def test_episode_records_stop_reason_and_last_turn_reward(
    said: Generation,
    answer: Answer,
    section: EnvironmentSection,
    max_tokens: int,
    reason: StopReason,
    reward: float,
) -> None:
    ended = proceed(said, answer, section, max_tokens=max_tokens)
    assert (ended.complete, ended.stop_reason, ended.token_ids) == (True, reason, int32([7, 8]))
    assert ended.turns == (Turn(0, 2, reward),)
    assert ended.truncated == (reason is StopReason.TOKENS)
    assert ended.fault == answer.detail


class Letters:
    """A tokenizer of texts in which each character is a token."""

    def of_observations(self) -> "Letters":
        return self

    def templates(self, prompt: object) -> bool:
        return False

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return [ord(character) for character in text]

    def decode(self, ids: list[int]) -> str:
        return "".join(map(chr, ids)).replace("\x03", "")


LETTERS: Any = Letters()


def say(text: str, before: Generation | None = None, *, sample: int = 0) -> Generation:
    ids = int32([*map(ord, text), 3])
    started = before or Generation(0, int32(), float32(), truncated=False, sample=sample, complete=False)
    log_probs, versions = float32([-1.0]) * len(ids), int32([0]) * len(ids)
    return started.then(Generation(0, ids, log_probs, truncated=False, weight_versions=versions))


def environments(name: str, **changes: Any) -> Environments:
    return Environments(
        replace(SECTION, name=name, **changes), LETTERS, Observer(LETTERS), written=LETTERS.decode, seed=1
    )


PROMPT = replace(prompts([3]).prompts[0], raw_prompt="p")


def test_episodes_outlive_the_processes_that_played_them(tmp_path: Path) -> None:
    """The second turn of one kills the process that also holds the other. Both are played again."""
    with world_of_one():
        episodes = environments("Dies", num_workers=1).begin(max_tokens=10_000, group=dist.group.WORLD)
        started = [say("a", sample=0), say("b", sample=1)]
        for each in started:
            episodes.ask(PROMPT, each)
        once = episodes.answer(started)
        assert [LETTERS.decode(each.token_ids) for each in once] == ["a1:a", "b1:b"]
        said = [say(f"die {tmp_path / 'mark'}", once[0]), say("c", once[1])]
        for each in said:
            episodes.ask(PROMPT, each)
        twice = episodes.answer(said)
    assert (tmp_path / "mark").exists()
    assert LETTERS.decode(twice[1].token_ids) == "b1:bc2:c"
    assert LETTERS.decode(list(twice[0].token_ids)).endswith(f"2:die {tmp_path / 'mark'}")


def test_an_episode_continues_in_a_later_session() -> None:
    """Another environment plays its earlier turns again, each in a request of its own, and answers the next one.

    Three turns take longer than one may.
    """
    with world_of_one():
        first = environments("Slow", timeout_s=1.0).begin(max_tokens=200, group=dist.group.WORLD)
        started = say("a")
        for turn in ("b", "c"):
            first.ask(PROMPT, started)
            [started] = first.answer([started])
            started = say(turn, started)
        later = environments("Slow", timeout_s=1.0).begin(max_tokens=200, group=dist.group.WORLD)
        later.ask(PROMPT, started)
        [found] = later.answer([started])
    assert (found.stop_reason, found.fault) == ("done", None)
    assert [turn.reward for turn in found.turns] == [1.0, 2.0, 3.0]
    assert [turn.observation for turn in found.turns] == ['"1:a"', '"2:b"', None]


def test_an_environment_that_continues_otherwise_ends_its_episode() -> None:
    with world_of_one():
        first = environments("Fickle").begin(max_tokens=200, group=dist.group.WORLD)
        first.ask(PROMPT, started := say("a"))
        [once] = first.answer([started])
        later = environments("Fickle").begin(max_tokens=200, group=dist.group.WORLD)
        later.ask(PROMPT, said := say("b", once))
        [found] = later.answer([said])
    assert found.stop_reason is StopReason.FAILED
    assert found.fault and "not deterministic" in found.fault


def test_failed_turn_ends_only_its_own_episode() -> None:
    with world_of_one():
        episodes = environments("Hangs", max_observation_length=5).begin(max_tokens=200, group=dist.group.WORLD)
        said = [say("hang", sample=0), say("a", sample=1), say("a long turn", sample=2)]
        for each in said:
            episodes.ask(PROMPT, each)
        hung, fine, long = episodes.answer(said)
        record = as_rollouts(Prompts(prompts=[PROMPT]), [0, 0, 0], [hung, replace(fine, stop_reason="done"), long], n=3)
        samples = alone(record)
        scored, metrics = EpisodeScorer(SECTION, LETTERS).score(samples)
        assert hung.stop_reason is StopReason.TIMEOUT
        assert hung.fault and hung.fault.startswith("it took longer than environment.timeout_s=2")
        assert (fine.complete, LETTERS.decode(fine.token_ids)) == (False, "a1:a")
        assert long.fault == "its observation has 13 tokens, more than environment.max_observation_length=5"
        assert scored.share.has_score().tolist() == [False, True, False]
        assert scored.share.scores.isnan().tolist() == [True, False, True]
        assert first_failures(scored)[0].startswith("the environment failed on sample 0 ")
        assert metrics["episode/stop/timeout"] == metrics["episode/stop/failed"] == pytest.approx(1 / 3)
        with pytest.raises(RewardError, match=r"sample 0 \(data row 0\): it took longer .*on_failure=stop"):
            EpisodeScorer(replace(SECTION, on_failure="stop"), LETTERS).score(samples)
        scored, _ = EpisodeScorer(replace(SECTION, on_failure="score"), LETTERS).score(samples)
        assert scored.share.has_score().all()


def test_the_environment_begins_each_episode() -> None:
    with world_of_one():
        made = environments("Count")
        rows = Prompts(prompts=[replace(PROMPT, index=number) for number in range(3)])
        opened = made.open(rows, max_tokens=20)
        assert [prompt.text for prompt in opened.prompts] == [f"row {number} begins" for number in range(3)]
        assert opened.prompts[1].raw_prompt == "p"  # the environment begins with the row again
        with pytest.raises(ValueError, match="data row 0: the environment's prompt has 12 tokens"):
            made.open(rows, max_tokens=11)
        with pytest.raises(ValueError, match="data row 0: the environment does not begin: .*the text is empty"):
            environments("Silent", on_failure="stop").open(rows, max_tokens=20)


def test_an_environment_may_begin_with_long_prompt() -> None:
    with world_of_one():
        long = replace(PROMPT, raw_prompt="\N{CJK UNIFIED IDEOGRAPH-957F}" * 100_000)
        assert environments("Repeats").open(Prompts(prompts=[long]), max_tokens=20).prompts == [long]


def test_failed_start_is_retried_and_affects_one_row() -> None:
    with world_of_one():
        made = environments("Busy", num_workers=1)
        rows = Prompts(prompts=[replace(PROMPT, index=number) for number in range(3)])
        first, second, third = made.open(rows, max_tokens=20).prompts
        assert (first.text, first.fault, third.text, third.fault) == ("row 0 begins", None, "row 2 begins", None)
        assert (second.text, second.token_ids) == (PROMPT.text, PROMPT.token_ids)
        assert second.fault and second.fault.startswith(
            "the environment does not begin: OSError: the simulator is busy ("
        )
        episodes = made.begin(max_tokens=200, group=dist.group.WORLD)
        said = [say("a", sample=0), say("b", sample=1), replace(say("c", sample=2), truncated=True)]
        for prompt, each in zip((first, second, second), said, strict=True):
            episodes.ask(prompt, each)
        fine, failed, cut = episodes.answer(said)
    assert (fine.complete, fine.fault) == (False, None)
    for each in (failed, cut):
        assert (each.complete, each.stop_reason, each.fault) == (True, StopReason.FAILED, second.fault)
        assert [turn.reward for turn in each.turns] == [0.0]


HUGE = 3e38


@pytest.mark.parametrize(
    ("rewards", "fails"),
    [
        ([HUGE], False),
        ([HUGE, HUGE], True),
        ([-HUGE, -HUGE], True),
        ([HUGE, -HUGE], True),  # in another order, with a third, the sum of two overflows
        ([HUGE, 1.0, -1.0], False),
        ([1e38, 1e38, 1e38], False),
    ],
)
def test_rewards_that_float32_cannot_add_fail_their_episode(rewards: list[float], fails: bool) -> None:
    said = SAID
    for reward in rewards:
        said = proceed(said, Answer(reward=reward, observation=[20]), replace(SECTION, max_turns=9), max_tokens=30)
        if not said.complete:
            said = said.then(LATER)
    assert (said.stop_reason is StopReason.FAILED) == fails
    assert (said.fault or "").startswith("the rewards of its turns add up") == fails
    assert math.isfinite(torch.tensor([turn.reward for turn in said.turns]).abs().sum())


def test_an_episode_as_people_read_it() -> None:
    once = proceed(say("ab"), Answer(observation=[*map(ord, " low ")]), SECTION, max_tokens=30)
    done = proceed(say("c", once), Answer(reward=1.0, done=True), SECTION, max_tokens=30)
    record = as_rollouts(Prompts(prompts=[PROMPT]), [0], [done], n=1)
    with world_of_one():
        scored, metrics = EpisodeScorer(SECTION, LETTERS).score(alone(record))
    assert scored.share.texts == ["ab\n>>> low\nc"]
    assert scored.share.scores.tolist() == [1.0]
    assert (metrics["episode/turns/mean"], metrics["episode/observed_tokens/mean"]) == (2.0, 5.0)
    assert record.stop_reasons == ["done"]
