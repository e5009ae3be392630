"""A flipped bit in the newest checkpoint costs the steps since the previous checkpoint, and nothing else."""

from pathlib import Path

import pytest

from megarl.commands import train_reward
from megarl.data.parquet import write_rows
from megarl.tracking.jsonl import read_jsonl
from tests.support.forked import run_job
from tests.support.sentencepieces import train_sentencepiece
from tests.support.tiny import write_checkpoint

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

RUN_S = 400


def test_a_flipped_bit_of_the_newest_manifest(tmp_path: Path) -> None:
    model, run_dir = write_checkpoint(tmp_path / "model", "llama"), tmp_path / "run"
    train_sentencepiece(model / "tokenizer.model", vocab_size=200)
    rows = [{"prompt": f"{i} =", "chosen": f" {i} + 0", "rejected": f" {i} * 0"} for i in range(12)]
    write_rows(tmp_path / "pairs.parquet", rows)
    arguments = [
        *(f"data.train_files={tmp_path / 'pairs.parquet'}", "data.train_batch_size=4", "data.max_length=32"),
        *(f"model.path={model}", "megatron={dtype: float32}", "optim.lr=1e-3"),
        *(f"trainer.default_local_dir={run_dir}", "trainer.total_training_steps=3", "trainer.save_freq=1"),
        *("trainer.n_gpus_per_node=1", "trainer.logger=[jsonl]"),
    ]
    run_job(1, train_reward.main, *arguments, log=tmp_path / "first", timeout_s=RUN_S)
    expected = read_jsonl(run_dir / "metrics.jsonl")
    manifest = run_dir / "global_step_3" / "manifest.json"
    content = bytearray(manifest.read_bytes())
    content[7] ^= 1 << 7
    manifest.write_bytes(content)

    printed = run_job(1, train_reward.main, *arguments, log=tmp_path / "second", timeout_s=RUN_S)
    assert f"{manifest.parent} is damaged and skipped: {manifest} is damaged: " in printed
    found = read_jsonl(run_dir / "metrics.jsonl")
    assert [line["step"] for line in found] == [1, 2, 3]
    assert [line["reward_model/loss"] for line in found] == [line["reward_model/loss"] for line in expected]
    printed = run_job(1, train_reward.main, *arguments, log=tmp_path / "third", timeout_s=RUN_S)
    assert "nothing left to do" in printed  # the step is saved again and intact
