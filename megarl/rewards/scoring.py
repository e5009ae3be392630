"""Turn responses into scores, by a built-in reward or the user's own; whatever goes wrong names the sample."""

import importlib.util
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from pathlib import Path
from types import ModuleType
from typing import Any

from megarl.batch import Rollouts
from megarl.rewards import REWARDS, reward_of
from megarl.rewards.config import CustomRewardSection

RewardFn = Callable[..., Any]
"""f(data_source, solution_str, ground_truth, extra_info) -> a number, or a mapping with `score` and perhaps `acc`."""

SHOWN_CHARACTERS = 120


class RewardError(ValueError):
    """A reward function raised, or returned what is no finite number."""


def load_reward(section: CustomRewardSection) -> RewardFn:
    """The reward of a run: the user's function, or the built-in one of each row's data source.

    Raises ValueError where the file does not load or has no such function.
    """
    if section.path is None:
        return score_by_data_source
    module = _load_module(Path(section.path))
    reward = getattr(module, section.name, None)
    if not callable(reward):
        own = [name for name, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__]
        raise ValueError(
            f"custom_reward_function.name: {section.path} has no function {section.name!r}; "
            f"it has {', '.join(own) or 'none'}"
        )
    loaded: RewardFn = reward
    return loaded


def score_by_data_source(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any]
) -> float:
    """Score by the built-in reward of `data_source`."""
    reward = reward_of(data_source)
    if reward is None:
        raise ValueError(
            f"no built-in reward for data source {data_source!r} (there are: {', '.join(sorted(REWARDS))}); "
            "set custom_reward_function.path"
        )
    return reward(data_source, solution_str, ground_truth, extra_info)


def score(
    rollouts: Rollouts,
    texts: Sequence[str] | Mapping[int, str],
    reward: RewardFn,
    *,
    share: slice | Sequence[int] = slice(None),
) -> list[tuple[float, float]]:
    """Scores and accuracies of the samples in `share`, in its order; `texts[i]` is the decoded response of sample `i`.

    Raises RewardError for the first sample whose reward fails.
    """
    samples = range(len(rollouts))[share] if isinstance(share, slice) else share
    return [_score_one(rollouts, sample, texts[sample], reward) for sample in samples]


def _score_one(rollouts: Rollouts, sample: int, text: str, reward: RewardFn) -> tuple[float, float]:
    prompt = rollouts.prompt_of(sample)
    try:
        result = reward(
            data_source=prompt.data_source,
            solution_str=text,
            ground_truth=prompt.ground_truth,
            extra_info=prompt.extra_info,
        )
        return _numbers(result)
    except Exception as error:  # the user's code may raise anything; it is passed on with the sample's name
        shown = text if len(text) <= SHOWN_CHARACTERS else text[:SHOWN_CHARACTERS] + "..."
        raise RewardError(
            f"the reward failed on sample {sample} (data source {prompt.data_source!r}, data row {prompt.index}, "
            f"response {shown!r}): {type(error).__name__}: {error}"
        ) from error


def _numbers(result: Any) -> tuple[float, float]:
    values: Mapping[str, Any] = result if isinstance(result, Mapping) else {"score": result}
    score = values["score"]
    numbers = (score, values.get("acc", score))
    if not all(isinstance(number, Real) and math.isfinite(number) for number in numbers):
        raise TypeError(f"a reward returns a finite number or a dict with one under 'score', not {result!r}")
    return float(numbers[0]), float(numbers[1])


def _load_module(path: Path) -> ModuleType:
    if not path.is_file():
        raise ValueError(f"custom_reward_function.path: no such file: {path}")
    spec = importlib.util.spec_from_file_location(f"custom_reward_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise ValueError(f"custom_reward_function.path: {path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickle look a class up through its module
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # the user's code may raise anything; it is passed on with the file's name
        raise ValueError(
            f"custom_reward_function.path: {path} fails to load: {type(error).__name__}: {error}"
        ) from error
    return module
