"""Problems of reasoning-gym that the policy may try again."""

import pytest

from megarl.environments.protocol import Row, Step
from megarl.environments.reasoning_gym import ReasoningGym
from megarl.rewards.reasoning_gym import load_task, to_json

pytest.importorskip("reasoning_gym", reason="needs reasoning-gym")


def row(name: str) -> Row:
    problem = load_task(name, '{"seed": 1, "size": 1}')[0]
    info = {"config": "{}", "metadata": to_json(problem["metadata"])}
    source = f"reasoning_gym/{name}"
    return Row(
        prompt=problem["question"], data_source=source, ground_truth=problem["answer"], extra_info=info, index=0, seed=1
    )


def test_episode_reward_is_best_score_of_turns() -> None:
    asked = row("chain_sum")
    environment = ReasoningGym(feedback="no")
    assert environment.reset(asked) == asked.prompt
    turns = [environment.step(said) for said in ("?", "<answer>1</answer>", f"<answer>{asked.ground_truth}</answer>")]
    assert [(turn.observation, turn.done) for turn in turns] == [("no", False), ("no", False), ("no", True)]
    assert sum(turn.reward for turn in turns) == pytest.approx(1.0)
    assert all(turn.reward >= 0.0 for turn in turns)


def test_a_turn_that_is_no_better_earns_nothing() -> None:
    environment = ReasoningGym()
    environment.reset(row("chain_sum"))
    first = environment.step("<answer>1</answer>")
    assert environment.step("<answer>1</answer>") == Step(first.observation, 0.0, done=False)


def test_rows_of_other_tasks_are_refused() -> None:
    other = Row(prompt="p", data_source="gsm8k", ground_truth="", extra_info={}, index=0, seed=0)
    with pytest.raises(ValueError, match="'gsm8k' is no task of reasoning-gym"):
        ReasoningGym().reset(other)
