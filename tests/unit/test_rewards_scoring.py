"""Scoring: the user's function or the built-in one, and an error that names the sample for whatever goes wrong."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.batch import Prompt, Rollouts
from megarl.rewards.config import CustomRewardSection
from megarl.rewards.scoring import RewardError, load_reward, score


def rollouts() -> Rollouts:
    prompts = [
        Prompt(
            index=40 + i,
            token_ids=[1],
            text="",
            data_source="countdown",
            ground_truth={"target": 8, "numbers": [3, 5]},
            extra_info={"split": "train"},
        )
        for i in range(2)
    ]
    shape = (4, 1)
    return Rollouts(
        prompts=prompts,
        groups=torch.tensor([0, 0, 1, 1]),
        responses=torch.ones(shape, dtype=torch.int64),
        mask=torch.ones(shape, dtype=torch.bool),
        rollout_log_probs=torch.zeros(shape),
        truncated=torch.zeros(4, dtype=torch.bool),
    )


def custom(tmp_path: Path, source: str, name: str = "compute_score") -> CustomRewardSection:
    (tmp_path / "mine.py").write_text(source)
    return CustomRewardSection(path=str(tmp_path / "mine.py"), name=name)


def scores(*args: Any, **kwargs: Any) -> list[float]:
    return [number for number, _ in score(*args, **kwargs)]


TEXTS = ["3+5", "5-3", "nothing", "5+3"]


def test_built_in_rewards_of_a_share_come_in_its_order() -> None:
    reward = load_reward(CustomRewardSection())
    assert scores(rollouts(), TEXTS, reward) == [1.0, 0.1, 0.0, 1.0]
    assert scores(rollouts(), TEXTS, reward, share=slice(1, None, 2)) == [0.1, 1.0]
    assert scores(rollouts(), TEXTS, reward, share=[3, 2]) == [1.0, 0.0]


def test_a_custom_function_gets_the_fields_arguments(tmp_path: Path) -> None:
    source = """
def by_length(data_source, solution_str, ground_truth, extra_info=None):
    assert (data_source, ground_truth["target"], extra_info["split"]) == ("countdown", 8, "train")
    return len(solution_str)
"""
    reward = load_reward(custom(tmp_path, source, "by_length"))
    assert scores(rollouts(), TEXTS, reward) == [3.0, 3.0, 7.0, 3.0]


@pytest.mark.parametrize(
    ("body", "numbers"),
    [
        ("return 2", (2.0, 2.0)),
        ("return True", (1.0, 1.0)),
        ("return {'score': 0.5, 'acc': 1}", (0.5, 1.0)),
        ("import numpy; return numpy.float32(0.25)", (0.25, 0.25)),
    ],
)
def test_what_field_scripts_return_is_taken(body: str, numbers: tuple[float, float], tmp_path: Path) -> None:
    reward = load_reward(custom(tmp_path, f"def compute_score(**_):\n    {body}\n"))
    assert score(rollouts(), TEXTS, reward, share=[0]) == [numbers]


@pytest.mark.parametrize(
    ("body", "cause"),
    [
        ("raise KeyError('solution')", "KeyError: 'solution'"),
        ("return 'good'", "finite number .* not 'good'"),
        ("return None", "not None"),
        ("return float('nan')", "not nan"),
        ("return float('inf')", "not inf"),
        ("return {'score': '1'}", "not {'score': '1'}"),
        ("return {'accuracy': 1}", "KeyError: 'score'"),
    ],
)
def test_a_failing_reward_names_the_sample(body: str, cause: str, tmp_path: Path) -> None:
    source = f"def compute_score(solution_str, **_):\n    if solution_str != 'nothing':\n        return 0\n    {body}\n"
    reward = load_reward(custom(tmp_path, source))
    where = r"sample 2 \(data source 'countdown', data row 41, response 'nothing'\): "
    with pytest.raises(RewardError, match=where + f".*{cause}"):
        score(rollouts(), TEXTS, reward)
    assert scores(rollouts(), TEXTS, reward, share=[0, 1, 3]) == [0.0, 0.0, 0.0]


def test_a_long_response_is_shown_by_its_start() -> None:
    def reward(**_: object) -> str:
        return "no number"

    with pytest.raises(RewardError) as caught:
        score(rollouts(), ["x" * 5000] * 4, reward)
    assert len(str(caught.value)) < 400


def test_an_unknown_data_source_lists_the_known_ones() -> None:
    record = rollouts()
    record = replace(record, prompts=[replace(prompt, data_source="sudoku") for prompt in record.prompts])
    with pytest.raises(
        RewardError, match=r"'sudoku' \(there are: countdown, .*gsm8k.*\); set custom_reward_function.path"
    ):
        score(record, TEXTS, load_reward(CustomRewardSection()))


def test_a_file_that_does_not_give_the_function_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"custom_reward_function.path: no such file: .*absent.py"):
        load_reward(CustomRewardSection(path=str(tmp_path / "absent.py")))
    source = "from math import sqrt\ndef first(): ...\ndef second(): ...\n"
    with pytest.raises(ValueError, match=r"mine.py has no function 'compute_score'; it has first, second$"):
        load_reward(custom(tmp_path, source))
    with pytest.raises(ValueError, match=r"mine.py fails to load: ModuleNotFoundError: .*absent_package"):
        load_reward(custom(tmp_path, "import absent_package\n"))
    with pytest.raises(ValueError, match="mine.py fails to load: SyntaxError"):
        load_reward(custom(tmp_path, "def compute_score(\n"))
    (tmp_path / "mine.txt").write_text("")
    with pytest.raises(ValueError, match="mine.txt is not a Python file"):
        load_reward(CustomRewardSection(path=str(tmp_path / "mine.txt")))
