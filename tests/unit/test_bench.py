"""The cases of the benchmarks, and the summaries of their numbers."""

from math import prod
from typing import Any

import pytest

from megarl.bench.cases import MODELS, Split
from megarl.bench.report import summary
from megarl.bench.step import compare
from megarl.bench.workload import Workload
from megarl.models.architecture import hf_shapes, read_architecture


@pytest.mark.parametrize(
    ("layout", "numbers"),
    [
        ("tp2-tp2", (2, 1, 2, 2)),
        ("tp1pp2-tp2", (1, 2, 2, 2)),
        ("tp2-tp1", (2, 1, 2, 1)),
        ("dp2-dp2", (1, 1, 2, 1)),
        ("tp2pp2-tp2", (2, 2, 4, 2)),
    ],
)
def test_a_layout_says_how_both_sides_are_cut(layout: str, numbers: tuple[int, ...]) -> None:
    split = Split.read(layout)
    assert (split.tp, split.pp, split.num_ranks, split.engine_tp) == numbers


@pytest.mark.parametrize("layout", ["tp2", "tp2-", "tp2-tp4", "tp2-pp2", "2-2", "tp2-tp2-tp2"])
def test_what_is_no_layout_is_refused(layout: str) -> None:
    with pytest.raises(ValueError, match=f"--layout {layout}: "):
        Split.read(layout)


@pytest.mark.parametrize(
    ("name", "millions"),
    [
        *(("llama-100m", 100.7), ("qwen3-moe-100m", 97.0), ("qwen2.5-0.5b", 494.0), ("qwen2.5-1.5b", 1543.7)),
        *(("qwen2.5-3b", 3085.9), ("qwen3-4b", 4022.5), ("qwen3-8b", 8190.7), ("qwen3-30b-a3b", 30532.1)),
    ],
)
def test_models_are_as_large_as_they_are_called(name: str, millions: float) -> None:
    shapes = hf_shapes(read_architecture(MODELS[name]))
    assert sum(map(prod, shapes.values())) / 1e6 == pytest.approx(millions, rel=1e-3)


def test_a_case_is_as_slow_as_its_slowest_rank_and_its_median_repeat() -> None:
    def rank(mine: list[float], received: int) -> dict[str, Any]:
        seconds = {"megarl": mine, "mbridge": [10.0, 10.0, 10.0], "copy": [0.5], "repack": [0.5]}
        ways = {"megarl": received, "mbridge": 40}
        return {
            "seconds": seconds,
            "bytes_received": ways,
            "bytes_lower_bound": received,
            "peak_extra_bytes": ways,
            "engine_bytes": 7,
            "mean_probability_difference": 0.0,
        }

    ranks = [rank([1.0, 2.0, 9.0], 4), rank([2.0, 1.0, 1.0], 8)]
    found = summary({"case": {"model": "m"}, "ranks": ranks})
    assert found["seconds"] == {"megarl": 2.0, "mbridge": 10.0, "copy": 0.5, "repack": 0.5}
    assert (found["times_faster"], found["times_copy_and_repack"]) == (5.0, 2.0)
    assert found["bytes_received_max"] == {"megarl": 8, "mbridge": 40}
    assert found["bytes_received_mean"] == {"megarl": 6, "mbridge": 40}
    assert found["peak_ratio"] == 0.2
    uncounted = [one | {"peak_extra_bytes": {"megarl": None, "mbridge": None}} for one in ranks]
    found = summary({"case": {}, "ranks": uncounted})
    assert found["peak_extra_bytes"] is found["peak_ratio"] is None


def test_throughputs_are_compared_over_all_steps() -> None:
    workload = Workload(model="llama-1m", lengths="long-tail", algorithm="grpo", num_prompts=3, num_responses=4)
    steps, others = ([{"timing_s/step": seconds} for seconds in each] for each in ([1.0, 3.0, 2.0], [1.0, 7.0]))
    assert compare(steps, others, workload) == {
        "mean_samples_per_second": 6.0,
        "samples_per_second_against": 3.0,
        "times_faster": 2.0,
    }
