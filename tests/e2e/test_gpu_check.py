"""A rehearsal of the check of a GPU machine runs the real commands on the CPU."""

import json
from pathlib import Path

import pytest

from tests.support.programs import run_python

pytestmark = [pytest.mark.e2e, pytest.mark.long]

STAGES = ("doctor", "tests-learner", "quickstart", "verify-deepseek_v3", "train-0.5b-ppo", "phases-30b-a3b", "resume")


@pytest.mark.timeout(1500)  # a dozen programs that import torch, vLLM and Megatron-Core
def test_every_stage_succeeds_and_is_not_repeated(tmp_path: Path) -> None:
    command = ["scripts/gpu_check.py", "--out", tmp_path, "--rehearse", "--stages", ",".join(STAGES)]
    printed = run_python(*command, timeout_s=1400)
    results = {name: json.loads((tmp_path / "results" / f"{name}.json").read_text()) for name in STAGES}
    assert [name for name in STAGES if not results[name]["done"]] == []
    assert (tmp_path / "gpu.md").read_text() in printed
    found = results["tests-learner"]["found"]
    assert found["tests"] == found["skipped"] > 0
    assert results["verify-deepseek_v3"]["found"]["ok"]
    trained = results["train-0.5b-ppo"]["found"]
    assert [step["step"] for step in trained["steps"]] == [1, 2, 3]
    assert trained["steps"][-1]["perf/total_num_tokens"] == 4 * (16 + 16)
    assert (tmp_path / "traces" / "train-0.5b-ppo" / "step_3_rank_0.json.gz").stat().st_size > 0
    assert results["phases-30b-a3b"]["found"]["seconds"].keys() == {"wake", "sync", "KV wake", "sleep"}
    assert results["resume"]["found"]["stopped_after"] < results["resume"]["found"]["killed_after"] <= 4
    again = run_python(*command, timeout_s=60)
    assert "..." not in again.partition("# On a GPU")[0]  # no stage started
