"""The samples of a step are measured by a command, and its results become a page."""

import json
from pathlib import Path

import pytest

from benchmarks.step_trl import PYTHON
from tests.support.programs import run_python

pytestmark = [pytest.mark.e2e, pytest.mark.long]

SIZES = ["samples", "--samples", "32", "--tokens", "16", "--json"]


@pytest.mark.timeout(600)
def test_samples_cross_once_and_exchanges_take_rounds(tmp_path: Path) -> None:
    arguments = [*SIZES, "--processes", "2", "--exchange", "2", "4", "8", "--simulate", "4", "--log-probs", "2"]
    printed = run_python("-m", "benchmarks", *arguments, timeout_s=560).splitlines()[-1]
    found = json.loads(printed)
    assert found["command"] == f"python -m benchmarks {' '.join(arguments)}"
    assert [case["estimator"] for case in found["cases"]] == ["grpo", "gae"]
    assert 1.0 < found["times_each_token_crosses"] < 1.05  # a sample has a few bytes besides its tokens
    assert [each["messages"] for each in found["exchange"]] == [2, 4, 6]
    assert found["growth_of_exchange"] == found["exchange"][2]["cpu_us"] / found["exchange"][0]["cpu_us"]
    assert [each["num_ranks"] for each in found["simulated"]][:1] == [4]
    assert [each["num_requests"] for each in found["log_probs"]] == [2]
    (tmp_path / "samples.json").write_text(printed)
    page = run_python("-m", "benchmarks", "samples", "--page", str(tmp_path / "samples.json"), timeout_s=60)
    assert page.startswith("# The samples of a step")
    assert "## Many ranks, simulated" in page
    assert "## Log-probabilities of drawn tokens" in page


@pytest.mark.skipif(not PYTHON.exists(), reason="no environment with TransferQueue: make setup-peers")
@pytest.mark.timeout(600)
def test_samples_travel_through_transferqueue() -> None:
    arguments = [*SIZES, "--processes", "--peer", "transferqueue"]
    found = json.loads(run_python("-m", "benchmarks", *arguments, timeout_s=560).splitlines()[-1])
    peer = found["peer"]
    assert peer["bytes"] == 16 * 16 * 13
    ratio = peer["megarl"]["gb_per_second"] / peer["transferqueue"]["gb_per_second"]
    assert found["over_transferqueue"] == pytest.approx(ratio)
    assert {"TransferQueue", "ray"} < peer["transferqueue"]["versions"].keys()
