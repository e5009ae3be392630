"""The plan's bytes of a token in vLLM are those of the objects that a real engine has while it draws."""

import gc
import tracemalloc
from pathlib import Path

import pytest

from megarl.batch import Group, int32
from megarl.planning.samples import (
    LOG_PROB_TOKEN_BYTES,
    REQUEST_BYTES,
    REQUEST_PROMPT_TOKEN_BYTES,
    REQUEST_TOKEN_BYTES,
)
from megarl.rollout.config import SamplingSection
from tests.support.engines import generating, prompt, start, tear_down, tensors_of, write_two_checkpoints
from tests.support.ranks import RankPool

pytestmark = pytest.mark.ranks

NUM_SAMPLES, FEW, MANY = 8, 4, 404
PROMPT_TOKENS = 1000
SHARED = 257
"""Python has each smaller number once, whatever the lists that it is in."""
NOISE = 16  # bytes a token, which other threads allocate
SAMPLING = SamplingSection(n=1, do_sample=True)


def groups(num_tokens: int) -> list[Group]:
    """Return a sample of each of some prompts, which share no cached keys."""
    found = []
    for place in range(NUM_SAMPLES):
        tokens = int32((SHARED + (place * 911 + 31 * token + num_tokens) % 3000) for token in range(num_tokens))
        found.append(Group.new(prompt(place, tokens), range(1), started=0, place=place))  # type: ignore[arg-type]
    return found


def measured(paths: list[Path]) -> dict[str, float]:
    """Return the bytes of a request, of a response token and its log-probability, and of a token of a prompt."""
    engine = start(paths[-1], tp_size=1, max_model_len=PROMPT_TOKENS + MANY + FEW)

    def traced(num_prompt_tokens: int, num_steps: int, *, log_probs: bool = False) -> float:
        """Return the bytes of each request after so many steps."""
        queue = engine.open_queue(SAMPLING, max_tokens=MANY + FEW, step=0, log_probs=log_probs)
        gc.collect()
        tracemalloc.start()
        queue.add(groups(num_prompt_tokens))
        queue.run(num_steps)
        gc.collect()
        num_bytes, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        queue.stop()
        return num_bytes / NUM_SAMPLES

    def least(num_prompt_tokens: int, num_steps: int, *, log_probs: bool = False) -> float:
        """Return the smaller of two measurements: other threads may allocate too."""
        return min(traced(num_prompt_tokens, num_steps, log_probs=log_probs) for _ in range(2))

    with generating(engine, tensors_of(paths[0])):
        traced(3, FEW, log_probs=True)  # a first request fills caches that stay
        few, many = least(3, FEW), least(3, MANY)
        few_numbers, many_numbers = (least(3, num_steps, log_probs=True) for num_steps in (FEW, MANY))
        with_prompt = least(PROMPT_TOKENS, FEW)
    tear_down(engine)
    of_token = (many - few) / (MANY - FEW)
    return {
        "request": few,
        "token": of_token,
        "log-probability": (many_numbers - few_numbers) / (MANY - FEW) - of_token,
        "prompt": (with_prompt - few) / (PROMPT_TOKENS - 3),
    }


def test_tokens_of_requests_take_planned_bytes(pool: RankPool, tmp_path: Path) -> None:
    paths = write_two_checkpoints(tmp_path, "llama", vocab_size=4000, max_position_embeddings=2048)
    [found] = pool.run(1, measured, paths)
    planned = {
        "request": REQUEST_BYTES,
        "token": REQUEST_TOKEN_BYTES,
        "prompt": REQUEST_PROMPT_TOKEN_BYTES,
    }
    assert found.pop("log-probability") == pytest.approx(LOG_PROB_TOKEN_BYTES, abs=NOISE)
    assert found == pytest.approx(planned, rel=0.2)
