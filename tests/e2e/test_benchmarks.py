"""The benchmarks run as commands, and their counts equal counts by hand."""

import json
from math import prod

import pytest

from benchmarks.cases import MODELS
from megarl.models.architecture import hf_shapes, read_architecture
from tests.support.programs import run_python

pytestmark = [pytest.mark.e2e, pytest.mark.long]

BYTES_PER_ELEMENT = 2  # bfloat16
SECONDS = {"megarl", "mbridge", "copy", "exchange", "repack"}


@pytest.mark.timeout(600)  # two jobs of two ranks, each with trainer, engine and peer
def test_reshard_benchmark_counts_bytes_of_layout() -> None:
    pytest.importorskip("mbridge")
    arguments = ["reshard", "--model", "llama-1m", "--layout", "tp2-tp2", "--repeats", "2", "--device", "cpu", "--json"]
    printed = run_python("-m", "benchmarks", *arguments, timeout_s=560)
    found = json.loads(printed.splitlines()[-1])
    assert found["command"] == f"python -m benchmarks {' '.join(arguments)}"
    assert {"torch", "megatron-core", "mbridge"} < found["versions"].keys()
    [case] = found["cases"]
    shapes = hf_shapes(read_architecture(MODELS["llama-1m"]))
    model_bytes = BYTES_PER_ELEMENT * sum(map(prod, shapes.values()))
    norm_bytes = BYTES_PER_ELEMENT * sum(prod(shape) for shape in shapes.values() if len(shape) == 1)
    assert case["num_ranks"] == 2
    assert case["engine_bytes_max"] == (model_bytes - norm_bytes) / 2 + norm_bytes
    # Equal splits: nothing has to move; mbridge gathers the other half of every matrix.
    assert case["bytes_received_max"] == {"megarl": 0, "mbridge": (model_bytes - norm_bytes) / 2}
    assert case["bytes_lower_bound_max"] == 0
    assert case["seconds"].keys() == SECONDS
    assert all(seconds > 0 for seconds in case["seconds"].values())
    assert case["times_faster"] == case["seconds"]["mbridge"] / case["seconds"]["megarl"]
    assert case["mean_probability_difference"] < 0.01


@pytest.mark.timeout(600)
def test_checkpoint_benchmark_counts_bytes_of_state() -> None:
    arguments = ["checkpoint", "--model", "llama-1m", "--repeats", "1", "--device", "cpu", "--json"]
    found = json.loads(run_python("-m", "benchmarks", *arguments, timeout_s=560).splitlines()[-1])
    shapes = hf_shapes(read_architecture(MODELS["llama-1m"]))
    state_bytes = (BYTES_PER_ELEMENT + 12) * sum(map(prod, shapes.values()))  # float32 weights and two moments
    assert state_bytes < found["bytes"] < 1.1 * state_bytes
    assert found["seconds"].keys() == {"waits at once", "waits beside", "copies", "whole", "check", "load"}
    assert all(0 < times["min"] <= times["median"] <= times["max"] for times in found["seconds"].values())


@pytest.mark.timeout(600)  # two trainings
def test_slow_environments_change_no_engine_step() -> None:
    arguments = ["episodes", "--seconds", "0.2", "--overlap", "1", "--repeats", "1", "--json"]
    arguments.append("data.max_response_length=128")
    found = json.loads(run_python("-m", "benchmarks", *arguments, timeout_s=560).splitlines()[-1])
    quick, slow = found["cases"]
    assert (quick["seconds"], slow["seconds"]) == (0.0, 0.2)
    assert quick["occupancy"] == slow["occupancy"] > 0.5
    assert quick["turns"] == slow["turns"] > 1.0
