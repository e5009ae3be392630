"""Adapters through every command: supervised learning, a reward model, export, a run that starts from both, evaluation.

Two ranks share each model.
"""

import json
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from megarl.commands import evaluate, export, sft, train, train_reward
from megarl.data.parquet import write_rows
from megarl.tracking.jsonl import read_jsonl
from tests.support.forked import run_job
from tests.support.outcomes import metrics_of, samples_in
from tests.support.programs import run_python
from tests.support.workspace import Workspace, train_arguments

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

JOB_S = 300
NUM_STEPS = 2  # of reinforcement learning
MEGATRON = ("actor_rollout_ref.actor.megatron", "actor_rollout_ref.ref.megatron", "reward_model.megatron")
WEIGHTS = "model.safetensors"


def supervised_arguments(workspace: Workspace, data: Path, run_dir: Path) -> list[str]:
    return [
        f"data={{train_files: {data}, val_files: {data}, train_batch_size: 4, max_length: 128}}",
        f"model={{path: {workspace.model}, lora_rank: 4, lora_dropout: 0.1, target_modules: [q_proj, down_proj]}}",
        "megatron={dtype: float32, tensor_model_parallel_size: 2}",
        "optim.lr=1e-2",
        f"trainer.default_local_dir={run_dir}",
        "trainer.total_training_steps=4",
        "trainer.test_freq=4",
        "trainer.n_gpus_per_node=2",
        "trainer.logger=[jsonl]",
    ]


@pytest.fixture(scope="module")
def tuned(workspace: Workspace, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the run of `megarl sft`, with its adapters alone in `alone`."""
    run_dir = tmp_path_factory.mktemp("sft") / "run"
    arguments = supervised_arguments(workspace, workspace.pairs, run_dir)
    run_job(2, sft.main, *arguments, log=run_dir.with_name("sft"), timeout_s=JOB_S)
    alone = (run_dir, run_dir / "alone", "--adapter")
    run_job(1, export.main, *alone, log=run_dir.with_name("export"), timeout_s=JOB_S)
    return run_dir


@pytest.fixture(scope="module")
def judge(workspace: Workspace, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the run of `megarl train-reward`."""
    run_dir = tmp_path_factory.mktemp("reward") / "run"
    pairs = run_dir.with_name("pairs.parquet")
    write_rows(pairs, [{"prompt": f"{n} :", "chosen": " 1 + 2", "rejected": " 1 * 2"} for n in range(8)])
    arguments = supervised_arguments(workspace, pairs, run_dir)
    run_job(2, train_reward.main, *arguments, log=run_dir.with_name("train"), timeout_s=JOB_S)
    return run_dir


@pytest.fixture(scope="module")
def trained(workspace: Workspace, tuned: Path, judge: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run whose policy starts from the tuned adapters and learns from the judge."""
    run_dir = tmp_path_factory.mktemp("rl") / "run"
    run_job(
        *(2, train.main, *train_arguments(workspace, run_dir)),
        f"actor_rollout_ref.model.lora_adapter_path={tuned / 'alone'}",
        f"{MEGATRON[0]}.tensor_model_parallel_size=2",
        "actor_rollout_ref.actor.optim.lr=1e-2",
        "actor_rollout_ref.rollout.n=2",
        "algorithm.adv_estimator=grpo",
        "reward_model={enable: true, weights: {model: 1.0, custom: 0.0}}",
        f"reward_model.model={{path: {judge / 'huggingface'}, input_tokenizer: null}}",
        f"trainer.total_training_steps={NUM_STEPS}",
        f"trainer.test_freq={NUM_STEPS}",
        f"trainer.rollout_data_dir={run_dir / 'samples'}",
        log=run_dir.with_name("train"),
        timeout_s=JOB_S,
    )
    return run_dir


def test_tuned_adapters_and_base_make_exported_model(workspace: Workspace, tuned: Path) -> None:
    losses = [line["sft/loss"] for line in read_jsonl(tuned / "metrics.jsonl") if "sft/loss" in line]
    assert losses[-1] < losses[0]
    base, found = (load_file(directory / WEIGHTS) for directory in (workspace.model, tuned / "huggingface"))
    assert found.keys() == base.keys()
    for name, weight in found.items():
        assert torch.equal(weight, base[name]) != name.endswith(("q_proj.weight", "down_proj.weight")), name
    model = AutoModelForCausalLM.from_pretrained(workspace.model, dtype=torch.float32)
    merged = PeftModel.from_pretrained(model, tuned / "alone").merge_and_unload().state_dict()
    for name, weight in found.items():
        torch.testing.assert_close(merged[name], weight)


def test_vllm_serves_exported_adapters(workspace: Workspace, tuned: Path) -> None:
    tokens = [5, 6, 7, 8, 9, 10]
    program = ("-m", "tests.support.served_adapters", workspace.model, tuned / "alone", json.dumps(tokens))
    printed = run_python(*program, timeout_s=JOB_S).splitlines()
    found = json.loads(next(line for line in printed if line.startswith("[[")))
    for path, log_probs in zip((workspace.model, tuned / "huggingface"), found, strict=True):
        with torch.no_grad():
            logits = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)(torch.tensor([tokens])).logits
        expected = logits[0, :-1].log_softmax(-1).gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(log_probs), expected, atol=1e-4, rtol=0)
    assert max(abs(one - other) for one, other in zip(*found, strict=True)) > 1e-2


def test_trained_judge_scores_responses_as_transformers_do(trained: Path, judge: Path) -> None:
    [validation] = [line for line in read_jsonl(judge / "metrics.jsonl") if "val/accuracy" in line]
    assert validation["val/accuracy"] == 1.0
    model = AutoModelForSequenceClassification.from_pretrained(judge / "huggingface", dtype=torch.float32)
    rows = samples_in(trained / "samples" / f"step_{NUM_STEPS}.parquet").to_pylist()
    assert len({row["score"] for row in rows}) > 1
    for row in rows:
        with torch.no_grad():
            score = model(torch.tensor([row["prompt_ids"] + row["response_ids"]])).logits
        assert row["score"] == pytest.approx(float(score), abs=1e-4)


def test_evaluate_scores_adapters_under_another_split(trained: Path, tmp_path: Path) -> None:
    split = [f"{section}.tensor_model_parallel_size=1" for section in MEGATRON]
    output = run_job(2, evaluate.main, trained, *split, log=tmp_path / "evaluate", timeout_s=JOB_S)
    found, metrics = json.loads(output.splitlines()[-1]), metrics_of(trained)
    assert found["step"] == NUM_STEPS
    for name in ("val/test_score/countdown/bare", "val/reward/model/min", "val/reward/custom/mean"):
        assert found[name] == pytest.approx(metrics[NUM_STEPS][name], abs=1e-4)
        assert metrics[NUM_STEPS][name] != pytest.approx(metrics[0][name], abs=1e-3), "the adapters learnt"
