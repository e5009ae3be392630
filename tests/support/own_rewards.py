"""Rewards of a user in each form; the response names what to do."""

import asyncio
import os
import time
from typing import Any

CONSTRUCTED: list[int] = []
running = 0


class Counter:
    """Counts its calls, and knows how often it was constructed in its process."""

    def __init__(self, first: int, step: int = 1) -> None:
        """Begin at `first`."""
        CONSTRUCTED.append(first)
        self.next, self.step, self.constructor = first, step, os.getpid()

    def compute_score(self, solution_str: str, **_: Any) -> dict[str, float]:
        """Return the number of the call, the processes of call and constructor, and how many objects there are."""
        self.next += self.step
        return {
            "score": self.next - self.step,
            "process": os.getpid(),
            "constructor": self.constructor,
            "objects": len(CONSTRUCTED),
        }


def with_ids(solution_str: str, solution_ids: list[int], **others: Any) -> dict[str, float]:
    """Return the number of tokens."""
    assert "solution_ids" not in others
    return {"score": len(solution_ids), "last": solution_ids[-1]}


def batch_with_ids(solution_strs: list[str], solution_ids: list[list[int]], **_: Any) -> list[float]:
    """Return the numbers of tokens."""
    assert len(solution_strs) == len(solution_ids)
    return [float(len(ids)) for ids in solution_ids]


async def later_with_ids(solution_ids: list[int], **_: Any) -> float:
    """Return the number of tokens."""
    await asyncio.sleep(0)
    return float(len(solution_ids))


class Meeting:
    """Lets all calls of a process wait for each other."""

    def __init__(self) -> None:
        """Begin with no call."""
        self.present = 0

    async def __call__(self, solution_str: str, ground_truth: Any, **_: Any) -> float:
        """Return the number of calls that were here together, as soon as the expected number is."""
        self.present += 1
        while self.present < ground_truth:
            await asyncio.sleep(0.01)
        return float(self.present)


async def act(solution_str: str, extra_info: Any, bonus: float = 0.0, **_: Any) -> Any:
    """Do what the response says."""
    match solution_str:
        case "raises":
            raise KeyError("answer")
        case "raises a timeout":
            raise TimeoutError("of its own")
        case "waits":
            await asyncio.sleep(1000)
        case "blocks":
            time.sleep(1000)
        case "dies":
            os._exit(3)
        case "leaves":
            raise SystemExit("enough")
        case "nan":
            return float("nan")
        case "tells how many run":
            global running
            running += 1
            await asyncio.sleep(0.05)
            most, running = running, running - 1
            return float(most)
    return 1.0 + bonus


def by_batch(
    data_sources: list[str], solution_strs: list[str], ground_truths: list[Any], extra_infos: list[Any], **kwargs: Any
) -> Any:
    """Return the number of responses for each; some responses spoil the batch."""
    assert len({len(data_sources), len(solution_strs), len(ground_truths), len(extra_infos)}) == 1
    if "raises" in solution_strs:
        raise KeyError("answer")
    if "blocks" in solution_strs:
        time.sleep(1000)
    if "is short" in solution_strs:
        return [1.0] * (len(solution_strs) - 1)
    if "is a text" in solution_strs:
        return "1.0"
    scores = [float("nan") if text == "nan" else float(len(solution_strs)) for text in solution_strs]
    return [{"score": score, "bonus": kwargs.get("bonus", 0.0)} for score in scores]


class Batches:
    """Scores batches asynchronously."""

    async def compute_score_batch(self, **lists: Any) -> list[float]:
        """Return the lengths of the responses."""
        await asyncio.sleep(0)
        return [float(len(text)) for text in lists["solution_strs"]]
