"""Stand-ins for the interfaces of the loop. They write into a diary how the loop calls them."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from megarl.algorithms.losses import PolicyOutputs
from megarl.batch import Experience, Group, Prompts, Rewarded, Rollouts, Scored
from megarl.checkpoint.state import State
from megarl.data.order import Position
from megarl.distributed.redistribution import redistribute
from megarl.distributed.sharded import Sharded
from megarl.tracking.protocol import NullTracker
from megarl.tracking.timers import Timers
from megarl.training.interfaces import Session
from tests.support.records import alone, answer, prompts

LENGTHS = [3, 1, 2, 2]  # of the responses, two to each of two prompts


class Diary:
    """Record the calls, in order, and what was logged and saved after each step."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.logged: dict[int, Mapping[str, float]] = {}
        self.saved: dict[int, State] = {}
        self.learned: list[Experience] = []
        self.advances = 0

    def steps_of(self, call: str) -> list[int]:
        return [int(entry.split()[-1]) for entry in self.calls if entry.startswith(call)]


class World:
    """Prompts, engine and reward: two prompts, two answers to each, the score of a sample is its number."""

    def __init__(self, diary: Diary) -> None:
        self.diary = diary

    def take(self, position: Position, count: int | None = None) -> tuple[Prompts, Position]:
        self.diary.calls.append(f"take {position.offset}")
        return prompts([4, 6]), Position(position.epoch, position.offset + 1)

    def batches(self) -> Iterator[Prompts]:
        yield prompts([4, 6])

    @contextmanager
    def awake(self, timers: Timers, *, step: int) -> Iterator[dict[str, float]]:
        self.diary.calls.append("wake")
        yield {"sync/check_probs_diff_mean": step / 100}
        self.diary.calls.append("sleep")

    def open(self, *, step: int, keeps_stopped: bool = False) -> Session:
        raise AssertionError("every step takes one batch here")

    def groups(self, prompts: Prompts, *, step: int, batch: int = 0) -> list[Group]:
        raise AssertionError("every step takes one batch here")

    def record(self, groups: Sequence[Group]) -> Sharded[Rollouts]:
        raise AssertionError("every step takes one batch here")

    def generate(self, prompts: Prompts, *, step: int) -> tuple[Sharded[Rollouts], dict[str, float]]:
        self.diary.calls.append(f"generate {step}")
        return alone(answer(prompts, LENGTHS, version=step)), {}

    def greedy(self, prompts: Prompts, *, step: int) -> Sharded[Rollouts]:
        self.diary.calls.append(f"greedy {step}")
        return alone(answer(prompts, [1, 2]))

    def validate(self, prompts: Prompts, *, step: int) -> Sharded[Rollouts]:
        self.diary.calls.append(f"validate {step}")
        return alone(answer(prompts, LENGTHS))

    def forget(self) -> None:
        pass

    def score(self, samples: Sharded[Rollouts]) -> tuple[Sharded[Scored], dict[str, float]]:
        self.diary.calls.append("score")
        scores = torch.arange(float(len(samples)))
        scored = samples.share.extend(Scored, texts=[""] * len(samples), scores=scores, accuracies=scores)
        return samples.with_share(scored), {"reward/error_rate": 0.25}


class OneFails(World):
    """The reward fails on the second sample."""

    def score(self, samples: Sharded[Rollouts]) -> tuple[Sharded[Scored], dict[str, float]]:
        scored, metrics = super().score(samples)
        scores = scored.share.scores.where(scored.share.scores != 1.0, math.nan)
        failures = [None, "timeout", None, None]
        return scored.with_share(replace(scored.share, scores=scores, accuracies=scores, failures=failures)), metrics


class Learner:
    """A model that only says what it was asked, and that it says `says` of every token."""

    def __init__(self, diary: Diary, name: str, says: float) -> None:
        self.diary, self.name, self.says = diary, name, says

    def update(self, experience: Sharded[Experience], *, step: int, gradient: Any = None) -> dict[str, float]:
        assert gradient is None or gradient.experience is experience
        self.diary.calls.append(f"{self.name}.update {step}")
        self.diary.learned.append(experience.share)
        return {f"{self.name}/lr": 0.5}

    def outputs(self, batch: Rollouts) -> PolicyOutputs | Tensor:
        """Return what the model says of the batch."""
        return self.says * batch.mask


@dataclass
class Gradient:
    """The gradient of a policy on an experience."""

    diary: Diary
    experience: Sharded[Experience]
    outputs: PolicyOutputs

    def discard(self) -> None:
        self.diary.calls.append("discard")


class Policy(Learner):
    exact_kl: float | None = None

    def take(self, samples: Sharded[Rewarded], *, step: int) -> Sharded[Rewarded]:
        return redistribute(samples, Rewarded, samples.index.runs, samples.shares)

    def forward_backward(self, experience: Sharded[Experience], *, step: int) -> Gradient:
        self.diary.calls.append(f"{self.name}.forward_backward {step}")
        return Gradient(self.diary, experience, self.outputs(experience.share))

    def infer(self, batch: Sharded[Rollouts]) -> PolicyOutputs:
        self.diary.calls.append(f"{self.name}.infer")
        return self.outputs(batch.share)

    def infer_first(self, samples: Sharded[Rewarded]) -> tuple[PolicyOutputs, Sharded[Rewarded]]:
        return self.infer(samples), samples

    def outputs(self, batch: Rollouts) -> PolicyOutputs:
        kl = None if self.exact_kl is None else self.exact_kl * batch.mask
        return PolicyOutputs(log_probs=self.says * batch.mask, entropy=2.0 * batch.mask, kl=kl)


class Measured(Policy):
    """Knows how far it is from the reference."""

    exact_kl = 0.5


class Critic(Learner):
    def infer(self, batch: Sharded[Rollouts]) -> Tensor:
        self.diary.calls.append(f"{self.name}.infer")
        return self.says * batch.share.mask


class Records(NullTracker):
    """Tracker and checkpoints."""

    def __init__(self, diary: Diary) -> None:
        self.diary = diary

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        assert step not in self.diary.logged, "a step is logged once"
        self.diary.logged[step] = metrics

    def save(self, state: State) -> None:
        self.diary.calls.append(f"save {state.step}")
        self.diary.saved[state.step] = state

    def advance(self) -> dict[str, float]:
        self.diary.advances += 1
        return {"advances": float(self.diary.advances)}

    def close(self, *_: object, **__: object) -> None:
        self.diary.calls.append("close")
