"""`megarl verify` as a user runs it: any family, any split, also with only a config.json."""

import json
import shutil
import sys
from pathlib import Path

import pytest

from megarl.commands import verify
from tests.support.forked import Job, run_job
from tests.support.programs import run_program, succeed
from tests.support.tiny import write_checkpoint

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]

VERIFY = (sys.executable, "-m", "megarl", "verify")
STDOUT_ALONE = ("sh", "-c", 'exec "$0" "$@" 2>/dev/null')
TRAINER, ENGINE = "actor_rollout_ref.actor.megatron", "actor_rollout_ref.rollout"


def without_weights(root: Path, variant: str) -> Path:
    directory = root / f"bare-{variant}"
    directory.mkdir()
    shutil.copy(write_checkpoint(root / variant, variant) / "config.json", directory)
    return directory


def test_a_config_alone_says_whether_a_split_works(tmp_path: Path) -> None:
    output = succeed(
        *(*STDOUT_ALONE, *VERIFY, without_weights(tmp_path, "qwen2"), "--json"),
        f"{TRAINER}.tensor_model_parallel_size=2",
        timeout_s=350,
    )
    report = json.loads(output)
    assert report["ok"], report
    assert report["roundtrip_exact"]
    assert report["max_abs_logprob_diff"] < 1e-4
    assert set(report["differences"]) == {"trainer-engine", "trainer-transformers", "engine-transformers"}
    assert 0 < report["bytes_received_mean"] <= report["bytes_received_max"] == report["bytes_lower_bound"]
    assert report["peak_extra_bytes"] > report["bytes_received_max"]  # at least one bucket
    assert report["seconds"] > 0


@pytest.mark.parametrize("adapters", [[], ["actor_rollout_ref.model.lora_rank=4"]], ids=["weights", "adapters"])
def test_moe_checkpoint_survives_sync_bit_for_bit(tmp_path: Path, adapters: list[str]) -> None:
    output = run_job(
        *(2, verify.main, write_checkpoint(tmp_path / "model", "qwen3_moe")),
        *(f"{TRAINER}.expert_model_parallel_size=2", f"{ENGINE}.tensor_model_parallel_size=2"),
        *adapters,
        log=tmp_path / "verify",
        timeout_s=350,
    )
    assert "bit for bit equal" in output
    assert output.rstrip().endswith("ok")
    assert "not ok" not in output


def test_mismatch_is_reported_and_fails(tmp_path: Path) -> None:
    argv = [str(without_weights(tmp_path, "llama")), f"{ENGINE}.sync.logprob_stop=0"]
    job = Job(1, verify.main, argv, log=tmp_path / "verify")
    code, output = job.end(timeout_s=350), job.printed()
    assert code == 1, output
    assert "trainer-engine: probabilities differ by" in output
    assert "not ok" in output
    assert "Traceback" not in output


def test_invalid_setup_is_reported_before_ranks_start(tmp_path: Path) -> None:
    model = without_weights(tmp_path, "llama")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"model_type": "mamba"}))
    code, output = run_program(*VERIFY, model, f"{TRAINER}.tensor_parallel=2", timeout_s=100)
    assert code == 2, output
    assert "model_type is mamba" in output
    assert f"did you mean {TRAINER}.tensor_model_parallel_size?" in output
    assert "rank" not in output
