"""`python -m benchmarks step` runs as a command, next to other libraries, and its counts equal counts by hand."""

import json

import pytest

from benchmarks import step_trl
from benchmarks.cases import MODELS
from megarl.models.architecture import read_architecture
from megarl.models.flops import Tokens, forward_flops
from tests.support.programs import run_python

pytestmark = [pytest.mark.e2e, pytest.mark.long]

PHASES = {"gen", "sync", "reward", "old_log_prob", "ref", "values", "adv", "update_actor", "update_critic"}


@pytest.mark.timeout(600)  # a training, vLLM and transformers
def test_a_step_is_measured_beside_vllm_and_transformers() -> None:
    arguments = ["step", "--model", "llama-1m", "--algorithm", "ppo", "--lengths", "ragged", "--prompts", "4"]
    arguments += ["--responses", "2", "--repeats", "2", "--json", "data.max_response_length=16"]
    found = json.loads(run_python("-m", "benchmarks", *arguments, timeout_s=560).splitlines()[-1])
    assert found["command"] == f"python -m benchmarks {' '.join(arguments)}"
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
    host = found["peers"]["host"].values()
    assert 0 <= min(host) < max(host)
    read = Tokens(**found["peers"]["transformers"]["read"])
    flops = forward_flops(read_architecture(MODELS["llama-1m"]), read)
    assert found["floors"]["infer"] == flops / found["peers"]["machine"]["flops_per_second"]


@pytest.mark.timeout(900)  # two trainings of megarl, one of TRL, vLLM and transformers
@pytest.mark.skipif(not step_trl.PYTHON.exists(), reason="no environment with TRL: make setup-peers")
def test_a_step_is_measured_beside_trl() -> None:
    arguments = ["step", "--model", "llama-1m", "--prompts", "4", "--responses", "2", "--repeats", "1"]
    arguments += ["--peer", "trl", "--json"]
    found = json.loads(run_python("-m", "benchmarks", *arguments, timeout_s=860).splitlines()[-1])
    trl = found["trl"]
    assert trl["versions"]["torch"] == found["versions"]["torch"]
    assert trl["seconds"].keys() == trl["times_faster"].keys() == step_trl.PHASES.keys()
    least = {phase: times["min"] for phase, times in trl["seconds"].items()}
    assert (
        0 < least["sync"] < least["gen"] < least["gen"] + least["ref"] + least["update"] < trl["seconds"]["step"]["max"]
    )
    assert trl["tokens"] == found["peers"]["transformers"]["tokens"] == 4 * 2 * (16 + 64)
    assert min(trl["times_faster"].values()) > 0
