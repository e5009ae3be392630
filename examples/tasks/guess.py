"""Numbers to guess in several turns, for `examples/environments/guess.py`."""

import random
from types import SimpleNamespace
from typing import Any

from megarl.data.prepare.options import option
from megarl.platform.errors import UserError

MOST_TURNS = 6  # of a demonstration


OPTIONS = (
    option("--train", "training episodes", default=2048),
    option("--val", "validation episodes; numbers repeat", default=256),
    option("--sft", "demonstrated episodes for supervised warm-up: sft.parquet", default=0),
    option("--largest", "largest number; the smallest is 1", default=16),
    option("--careless", "share of the demonstrated guesses that ignore what the environment has said", default=0.5),
    option("--seed", default=1),
)


def build(arguments: SimpleNamespace) -> dict[str, list[dict[str, Any]]]:
    """Return the rows of `train`, `val` and, if asked for, `sft`. Raises UserError for impossible options."""
    if arguments.largest < 2 or not 0.0 <= arguments.careless <= 1.0:
        raise UserError(f"--largest {arguments.largest}, --careless {arguments.careless}: give 2 or more, and 0 to 1")
    rng = random.Random(arguments.seed)
    splits = {
        split: [_row(rng.randint(1, arguments.largest), arguments.largest, split, index) for index in range(count)]
        for split, count in (("train", arguments.train), ("val", arguments.val))
    }
    if arguments.sft:
        episodes = (demonstration(rng, arguments.largest, arguments.careless) for _ in range(arguments.sft))
        splits["sft"] = [turn for episode in episodes for turn in episode]
    return splits


def demonstration(rng: random.Random, largest: int, careless: float) -> list[dict[str, Any]]:
    """Return the turns of an episode, each as a prompt with all turns before it and a response.

    A guess is anywhere in what is still possible, or, if it is `careless`, anywhere at all.
    """
    number = rng.randint(1, largest)
    low = 1
    high = largest
    messages = _messages(largest)
    turns = list[dict[str, Any]]()
    guess = 0
    while guess != number and len(turns) < MOST_TURNS:
        guess = rng.randint(1, largest) if rng.random() < careless else rng.randint(low, high)
        turns.append({"prompt": list(messages), "response": str(guess)})
        low, high = (max(low, guess + 1), high) if guess < number else (low, min(high, guess - 1))
        answer = {"role": "user", "content": "higher" if guess < number else "lower"}
        messages += [{"role": "assistant", "content": str(guess)}, answer]
    return turns


def _messages(largest: int) -> list[dict[str, Any]]:
    return [{"role": "user", "content": f"1-{largest}"}]


def _row(number: int, largest: int, split: str, index: int) -> dict[str, Any]:
    return {
        "data_source": "guess",
        "prompt": _messages(largest),
        "ability": "search",
        "reward_model": {"style": "environment", "ground_truth": number},
        "extra_info": {"split": split, "index": index},
    }
