"""Plans of runs that learn from files alone: the parts of an actor, and numbers worked by hand."""

import json
import re
from pathlib import Path

import pytest

from megarl.commands.plan import main

MODEL = "configs/models/llama-3-8b"
ARGUMENTS = [
    *(f"model.path={MODEL}", "data.train_files=pairs.parquet", "data.train_batch_size=64", "data.max_length=2048"),
    *("megatron.tensor_model_parallel_size=4", "trainer.n_gpus_per_node=8", "max_token_len_per_gpu=4096"),
    *("--device", "h100", "--json"),
]


def planned(capsys: pytest.CaptureFixture[str], run: str, *arguments: str, code: int = 0) -> dict:
    assert main(["--run", run, *ARGUMENTS, *arguments]) == code
    return json.loads(capsys.readouterr().out)


def rl_update(capsys: pytest.CaptureFixture[str], *overrides: str) -> dict[str, int]:
    """Return the parts of the actor in the update of a run with equal micro-batches."""
    arguments = (
        *(f"actor_rollout_ref.model.path={MODEL}", "data.train_files=train.parquet", "data.train_batch_size=32"),
        *("data.max_prompt_length=1024", "data.max_response_length=1024", "algorithm.adv_estimator=grpo"),
        *("actor_rollout_ref.actor.megatron.tensor_model_parallel_size=4", "trainer.n_gpus_per_node=8"),
        *("actor_rollout_ref.actor.ppo_max_token_len_per_gpu=4096", "actor_rollout_ref.actor.ppo_mini_batch_size=32"),
        *(
            "actor_rollout_ref.rollout.n=2",
            "algorithm.kl_ctrl.kl_coef=0",
            "actor_rollout_ref.rollout.tensor_model_parallel_size=4",
        ),
        *(f"actor_rollout_ref.{override}" for override in overrides),
    )
    main([*arguments, "--device", "h100", "--json"])
    moments = json.loads(capsys.readouterr().out)["memory"]["moments"]
    [update] = [moment["parts"] for moment in moments if moment["phase"] == "update"]
    return {name.removeprefix("actor "): size for name, size in update.items() if name.startswith("actor ")}


@pytest.mark.parametrize(
    "overrides", [(), ("model.lora_rank=16", "model.lora_dropout=0.1"), ("model.enable_gradient_checkpointing=true",)]
)
def test_fine_tuning_takes_memory_of_an_actor(capsys: pytest.CaptureFixture[str], overrides: tuple[str, ...]) -> None:
    assert planned(capsys, "sft", *overrides)["memory"]["parts"] == rl_update(capsys, *overrides)


def test_reward_training_reads_two_sequences_of_each_pair(capsys: pytest.CaptureFixture[str]) -> None:
    """64 pairs have twice as many sequences as 64 samples, and a score instead of a vocabulary."""
    budget = "max_token_len_per_gpu=4098"
    policy, value = planned(capsys, "sft", budget), planned(capsys, "train-reward", budget)
    embeddings = 128_256 * 4096 // 4
    assert policy["memory"]["parts"]["weights"] - value["memory"]["parts"]["weights"] == pytest.approx(
        2 * (embeddings - 4096), abs=2048
    )
    assert 1.7 < value["time"]["total"] / policy["time"]["total"] < 2.0


def test_time_of_a_step_by_hand(capsys: pytest.CaptureFixture[str]) -> None:
    """Three forward passes on 8 ranks: 6 FLOPs for each of 7.5 billion weights and each token.

    The optimizer takes equally long for each batch.
    """
    small, medium, large = (
        planned(capsys, "sft", f"data.train_batch_size={size}")["time"]["total"] for size in (64, 128, 256)
    )
    least = 6 * 7.5e9 * 64 * 2048 / 8 / 989.4e12
    assert least < medium - small < small < 2 * least
    assert large - medium == pytest.approx(2 * (medium - small))


def test_run_without_room_exits_with_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert not planned(capsys, "sft", "--gpu-memory", "20GB", code=1)["fits"]
    assert not planned(capsys, "sft", "--host-memory", "1GB", code=1)["fits"]


@pytest.mark.parametrize(
    ("options", "lines"),
    [
        (("--host-memory", "900GB"), (r"It fits: \d+\.\d\d GB stay free",)),
        (("--gpu-memory", "20GB", "--host-memory", "900GB"), (r"It does not fit: \d+\.\d\d GB short on the device",)),
        (
            ("--host-memory", "1GB"),
            (r"host: \d+\.\d\d GB short of a node's 1\.00", r"The devices have room: \d+\.\d\d GB stay free"),
        ),
        (
            ("--gpu-memory", "20GB", "--host-memory", "1GB"),
            (r"host: \d+\.\d\d GB short of a node's 1\.00", r"It does not fit: \d+\.\d\d GB short on the device"),
        ),
    ],
)
def test_verdict_names_the_memory_that_is_short(
    capsys: pytest.CaptureFixture[str], options: tuple[str, ...], lines: tuple[str, ...]
) -> None:
    assert main(["--run", "sft", *ARGUMENTS[:-1], *options]) == int("It fits" not in lines[0])
    _, shown = capsys.readouterr().out.split("the least time of a step: ")
    assert re.fullmatch(r"\d+\.\d\d s\n" + "".join(f"{line}\n" for line in lines), shown)


def test_shipped_runs_have_plans(capsys: pytest.CaptureFixture[str]) -> None:
    for run, path in (("sft", "configs/guess_sft.yaml"), ("train-reward", "configs/reward_tinystories.yaml")):
        assert Path(path).exists()
        assert main(["--run", run, path, f"model.path={MODEL}", "--device", "h200", "--json"]) in (0, 1)
        assert json.loads(capsys.readouterr().out)["memory"]["total"] > 0
    assert main(["--run", "sft", "configs/guess_sft.yaml", "model.paht=x"]) == 2
