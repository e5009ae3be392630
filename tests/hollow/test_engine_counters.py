"""Requests of an engine to the device, counted: a change must not raise the bars in silence."""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import pytest

from megarl.rollout.config import SamplingSection
from tests.hollow.counters import Laps
from tests.support.engines import PROMPTS, start, tear_down, write_two_checkpoints
from tests.support.learners import make_test_learner
from tests.support.pairs import Pair
from tests.support.ranks import RankPool

pytestmark = pytest.mark.hollow

GREEDY = SamplingSection()
Counts = dict[str, Counter[str]]
Bars = dict[str, float]
COUNTED = [
    *("kernels", "products", "graph_launches", "fills", "collectives", "allocations", "pinned_allocations"),
    *("copies_on_device", "copies_to_device", "copies_to_host", "pageable_copies", "blocking_copies"),
    *("waits_for_stream", "waits_for_event", "waits_for_device"),
]
# A request without a bar is a fault. Triton's kernels are interpreted here, and what torch would compile runs operation
# by operation: the numbers of kernels are for comparison with themselves.
PER_ROUND: dict[str, Bars] = {
    # vLLM copies the nine buffers of this model to the host and back, and the memory that it calls runtime: it pins
    # that memory's copy once.
    "sleep": {
        **{"copies_to_host": 10, "pageable_copies": 9, "blocking_copies": 1},
        **{"waits_for_stream": 9, "waits_for_device": 3},
    },
    "wake for weights": {
        **{"allocations": 2, "copies_to_device": 10, "pageable_copies": 9, "blocking_copies": 1},
        **{"waits_for_stream": 9, "waits_for_device": 1},
    },
    "sync": {"kernels": 14, "fills": 2, "waits_for_device": 1},
    "wake to generate": {"allocations": 1, "waits_for_device": 1},
}
OF_ANY_STEP: Bars = {"copies_to_device": 2.2, "copies_to_host": 5, "fills": 1, "waits_for_event": 1}
PER_STEP: dict[str, Bars] = {
    "eager": OF_ANY_STEP | {"kernels": 31, "products": 9},
    "graphs": OF_ANY_STEP | {"kernels": 12, "products": 1, "graph_launches": 1, "copies_on_device": 1},
}


def asked(paths: list[Path], enforce_eager: bool) -> Counts:
    """Return what the third round of sync, generation and sleep asks of the device."""
    first, _, bare = paths
    settings = {"dtype": "bfloat16", "gpu_memory_utilization": 0.2, "enforce_eager": enforce_eager}
    engine = start(bare, tp_size=1, **settings)
    pair = Pair(make_test_learner(first, {"dtype": "bfloat16"}), engine)
    reshard = pair.reshard()
    *_, third = [one_round(pair, reshard) for _ in range(3)]
    tear_down(engine)
    return third


def one_round(pair: Pair, reshard: object) -> Counts:
    from megarl.weight_sync.transfer import send_weights

    engine, laps = pair.engine, Laps()
    with engine.receive_weights() as destination:
        laps.end("wake for weights")
        send_weights(pair.learner, destination, reshard)
    laps.end("sync")
    with engine.generating():
        laps.end("wake to generate")
        for num_tokens in (6, 12):
            engine.generate(PROMPTS, GREEDY, max_tokens=num_tokens, step=0)
            laps.end(f"{num_tokens} tokens")
    laps.end("sleep")
    return laps.found


@pytest.mark.parametrize("mode", PER_STEP)
def test_engine_makes_no_more_device_calls_than_expected(tmp_path: Path, mode: str) -> None:
    paths = write_two_checkpoints(tmp_path, "qwen3")
    with RankPool("cuda") as pool:
        [found] = pool.run(1, asked, paths, mode == "eager")
    step = {name: (found["12 tokens"][name] - found["6 tokens"][name]) / 6 for name in COUNTED}
    excess = {lap: above(bars, found[lap]) for lap, bars in PER_ROUND.items()} | {"step": above(PER_STEP[mode], step)}
    assert not any(excess.values()), excess


def above(bars: Bars, counts: Mapping[str, float]) -> Bars:
    """Return the counts that exceed their bars."""
    return {name: counts[name] for name in COUNTED if counts[name] > bars.get(name, 0)}
