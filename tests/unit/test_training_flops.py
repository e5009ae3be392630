"""The FLOPs of a step are those of its phases, and utilization is their share of the peak."""

from dataclasses import replace

import pytest

from benchmarks.cases import MODELS
from megarl.learner.per_data_source import PerDataSource
from megarl.models.architecture import read_architecture
from megarl.models.flops import Tokens, forward_flops
from megarl.training.flops import FlopsCounter
from tests.support.records import alone, answer, prompts

SIZES = read_architecture(MODELS["llama-1m"])
PASSES = {"gen": 1, "old_log_prob": 1, "update_actor": 3, "update_critic": 6}
FLOPS = FlopsCounter(
    passes={phase: [(PerDataSource(other=SIZES), passes)] for phase, passes in PASSES.items()}, peak=4e12
)
SAMPLES = alone(answer(prompts([4, 6]), [3, 1, 2, 2]))
FORWARD = forward_flops(SIZES, Tokens(lengths=[7, 5, 8, 8], num_outputs=8)) / 1e12


def test_only_phases_that_ran_are_counted() -> None:
    warm_up = {"timing_s/gen": 9.0, "timing_s/old_log_prob": 1.0, "timing_s/update_critic": 2.0}
    assert FLOPS.metrics(SAMPLES, warm_up) == {
        "perf/tflop": pytest.approx(8 * FORWARD),
        "perf/mfu/critic": pytest.approx(6 * FORWARD / 2.0 / 4.0),
    }
    later = warm_up | {"timing_s/update_actor": 0.5}
    assert FLOPS.metrics(SAMPLES, later)["perf/mfu/actor"] == pytest.approx(3 * FORWARD / 0.5 / 4.0)
    assert FLOPS.utilization(11.0, 2.0) == {"perf/mfu": 11.0 / 2.0 / 4.0}


def test_without_a_known_peak_there_is_no_utilization() -> None:
    unknown = replace(FLOPS, peak=None)
    assert unknown.metrics(SAMPLES, {"timing_s/update_actor": 1.0}) == {"perf/tflop": pytest.approx(3 * FORWARD)}
    assert unknown.utilization(1.0, 1.0) == {}


def test_each_teacher_is_counted_for_its_own_samples() -> None:
    small, large = SIZES, read_architecture(MODELS["llama-100m"])
    samples = answer(prompts([4, 6]), [3, 1, 2, 2])
    samples = replace(samples, prompts=[replace(samples.prompts[0], data_source="hard"), samples.prompts[1]])
    counter = FlopsCounter(passes={"ref": [(PerDataSource(named={"hard": large, "unused": large}, other=small), 1)]})
    expected = sum(
        forward_flops(architecture, Tokens(lengths=lengths, num_outputs=outputs))
        for architecture, lengths, outputs in ((large, [7, 5], 4), (small, [8, 8], 4))
    )
    assert counter.metrics(alone(samples), {"timing_s/ref": 1.0}) == {"perf/tflop": pytest.approx(expected / 1e12)}


def test_a_phase_may_have_passes_of_several_models() -> None:
    """An exact divergence in the loss: the actor learns, and in the same pass a larger reference reads."""
    large = read_architecture(MODELS["llama-100m"])
    counter = FlopsCounter(
        passes={"update_actor": [(PerDataSource(other=SIZES), 3), (PerDataSource(other=large), 1)]}, peak=4e12
    )
    reading = forward_flops(large, Tokens(lengths=[7, 5, 8, 8], num_outputs=8)) / 1e12
    found = counter.metrics(SAMPLES, {"timing_s/update_actor": 0.5})
    assert found["perf/tflop"] == pytest.approx(3 * FORWARD + reading)
    assert found["perf/mfu/actor"] == pytest.approx((3 * FORWARD + reading) / 0.5 / 4.0)
