"""The benchmarks run as commands, and their counts equal counts by hand."""

import json
from math import prod

import pytest

from megarl.bench import step_trl
from megarl.bench.cases import MODELS
from megarl.models.architecture import hf_shapes, read_architecture
from megarl.models.flops import Tokens, forward_flops
from tests.support.programs import run_python

pytestmark = [pytest.mark.e2e, pytest.mark.long]

BYTES_PER_ELEMENT = 2  # bfloat16
PHASES = {"gen", "sync", "reward", "old_log_prob", "ref", "values", "adv", "update_actor", "update_critic"}
SECONDS = {"megarl", "mbridge", "copy", "exchange", "repack"}


@pytest.mark.timeout(600)  # two jobs of two ranks, each with trainer, engine and peer
def test_a_reshard_is_measured_and_its_bytes_are_those_of_the_layout() -> None:
    pytest.importorskip("mbridge")
    arguments = ["reshard", "--model", "llama-1m", "--layout", "tp2-tp2", "--repeats", "2", "--device", "cpu", "--json"]
    printed = run_python("-m", "megarl.bench", *arguments, timeout_s=560)
    found = json.loads(printed.splitlines()[-1])
    assert found["command"] == f"megarl bench {' '.join(arguments)}"
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
def test_saves_are_measured_and_have_the_bytes_of_the_state() -> None:
    arguments = ["checkpoint", "--model", "llama-1m", "--repeats", "1", "--device", "cpu", "--json"]
    found = json.loads(run_python("-m", "megarl.bench", *arguments, timeout_s=560).splitlines()[-1])
    shapes = hf_shapes(read_architecture(MODELS["llama-1m"]))
    state_bytes = (BYTES_PER_ELEMENT + 12) * sum(map(prod, shapes.values()))  # float32 weights and two moments
    assert state_bytes < found["bytes"] < 1.1 * state_bytes
    assert found["seconds"].keys() == {"waits at once", "waits beside", "copies", "whole", "check", "load"}
    assert all(0 < times["min"] <= times["median"] <= times["max"] for times in found["seconds"].values())


@pytest.mark.timeout(600)  # two trainings
def test_slow_environments_change_no_engine_step() -> None:
    arguments = ["episodes", "--seconds", "0.2", "--overlap", "1", "--repeats", "1", "--json"]
    arguments.append("data.max_response_length=128")
    found = json.loads(run_python("-m", "megarl.bench", *arguments, timeout_s=560).splitlines()[-1])
    quick, slow = found["cases"]
    assert (quick["seconds"], slow["seconds"]) == (0.0, 0.2)
    assert quick["occupancy"] == slow["occupancy"] > 0.5
    assert quick["turns"] == slow["turns"] > 1.0


@pytest.mark.timeout(600)  # a training, vLLM and transformers
def test_a_step_is_measured_beside_vllm_and_transformers() -> None:
    arguments = ["step", "--model", "llama-1m", "--algorithm", "ppo", "--lengths", "ragged", "--prompts", "4"]
    arguments += ["--responses", "2", "--repeats", "2", "--json", "data.max_response_length=16"]
    found = json.loads(run_python("-m", "megarl.bench", *arguments, timeout_s=560).splitlines()[-1])
    assert found["command"] == f"megarl bench {' '.join(arguments)}"
    seconds = found["seconds"]
    assert seconds.keys() > PHASES
    assert all(0 < times["min"] <= times["median"] <= times["max"] for times in seconds.values())
    outer = PHASES - {"sync"}  # which is a part of gen
    assert sum(seconds[phase]["min"] for phase in outer) < seconds["step"]["max"]
    assert found["samples_per_second"] == 4 * 2 / seconds["step"]["median"]
    assert 4 * 2 < found["peers"]["transformers"]["tokens"] <= 4 * 2 * (16 + 16)
    assert found["ratios"].keys() == {"generation", "infer", "update", "other_share"}
    assert min(found["ratios"].values()) > 0
    assert found["plan"].keys() == {"gen", "old_log_prob", "ref", "values", "update_actor", "update_critic", "step"}
    assert all(of["planned"] > 0 for of in found["plan"].values())
    assert min(found["peers"]["host"].values()) >= 0 < found["peers"]["host"]["step"]
    read = Tokens(**found["peers"]["transformers"]["read"])
    flops = forward_flops(read_architecture(MODELS["llama-1m"]), read)
    assert found["floors"]["infer"] == flops / found["peers"]["machine"]["flops_per_second"]


@pytest.mark.timeout(900)  # two trainings of megarl, one of TRL, vLLM and transformers
@pytest.mark.skipif(not step_trl.PYTHON.exists(), reason="no environment with TRL: make setup-peers")
def test_a_step_is_measured_beside_trl() -> None:
    arguments = ["step", "--model", "llama-1m", "--prompts", "4", "--responses", "2", "--repeats", "1"]
    arguments += ["--peer", "trl", "--json"]
    found = json.loads(run_python("-m", "megarl.bench", *arguments, timeout_s=860).splitlines()[-1])
    trl = found["trl"]
    assert trl["versions"]["torch"] == found["versions"]["torch"]
    assert trl["seconds"].keys() == trl["times_faster"].keys() == step_trl.PHASES.keys()
    least = {phase: times["min"] for phase, times in trl["seconds"].items()}
    assert (
        0 < least["sync"] < least["gen"] < least["gen"] + least["ref"] + least["update"] < trl["seconds"]["step"]["max"]
    )
    assert trl["tokens"] == found["peers"]["transformers"]["tokens"] == 4 * 2 * (16 + 64)
    assert min(trl["times_faster"].values()) > 0
