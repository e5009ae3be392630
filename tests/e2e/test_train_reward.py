"""The command that trains a reward model: the model learns an easy preference, and transformers reads it."""

import random
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from megarl.commands import train_reward
from megarl.data.parquet import write_rows
from megarl.tracking.jsonl import read_jsonl
from tests.support.forked import run_job
from tests.support.workspace import Workspace

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

STEPS = 16


def write_pairs(path: Path, number: int, seed: int) -> list[dict[str, str]]:
    """Write pairs in which a sum is preferred to a product; return the pairs."""
    rng = random.Random(seed)
    rows = []
    for _ in range(number):
        a, b, c = (str(rng.randint(1, 20)) for _ in range(3))
        rows.append({"prompt": f"{a} {b} {c} :", "chosen": f" {a} + {b} + {c}", "rejected": f" {a} * {b} * {c}"})
    write_rows(path, rows)
    return rows


def test_it_learns_saves_and_writes_a_classifier(workspace: Workspace, tmp_path: Path) -> None:
    write_pairs(tmp_path / "train.parquet", 128, seed=1)
    held_out = write_pairs(tmp_path / "val.parquet", 32, seed=2)
    run_dir = tmp_path / "run"
    run_job(
        *(2, train_reward.main),
        f"data.train_files={tmp_path / 'train.parquet'}",
        f"data.val_files={tmp_path / 'val.parquet'}",
        "data.train_batch_size=16",
        "data.max_length=32",
        "data.micro_batch_size=4",
        f"model.path={workspace.model}",
        "megatron={dtype: float32, tensor_model_parallel_size: 2}",
        "optim.lr=1e-3",
        "center_rewards_coefficient=0.01",
        f"trainer.default_local_dir={run_dir}",
        f"trainer.total_training_steps={STEPS}",
        "trainer.test_freq=8",
        "trainer.save_freq=8",
        "trainer.n_gpus_per_node=2",
        "trainer.logger=[jsonl]",
        log=tmp_path / "train",
        timeout_s=300,
    )
    lines = read_jsonl(run_dir / "metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    assert lines[0]["reward_model/loss"] == pytest.approx(0.6931, abs=1e-3)  # a new head scores everything 0
    assert lines[0]["reward_model/accuracy"] == 0.5
    assert lines[-1]["val/accuracy"] >= 0.8
    assert (run_dir / f"global_step_{STEPS}" / "reward_model" / ".metadata").is_file()

    model = AutoModelForSequenceClassification.from_pretrained(run_dir / "huggingface", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(run_dir / "huggingface")
    differences = []
    for row in held_out:
        scores = []
        for response in (row["chosen"], row["rejected"]):
            ids = tokenizer.encode(row["prompt"] + response)
            with torch.no_grad():
                scores.append(float(model(torch.tensor([ids])).logits[0, 0]))
        differences.append(scores[0] - scores[1])
    assert sum(difference > 0 for difference in differences) / len(differences) == lines[-1]["val/accuracy"]
    assert sum(differences) / len(differences) == pytest.approx(lines[-1]["val/margin/mean"], abs=1e-4)
