"""Mistakes of users end with a message that names the fault, the place and the remedy; no traceback, no rank waits."""

import json
import os
import shutil
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch.distributed as dist

from megarl.commands.train import main
from tests.support.forked import Job
from tests.support.hollow import write_hollow
from tests.support.places import without_places
from tests.support.programs import run_program
from tests.support.workspace import Workspace

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]

TRAIN = (sys.executable, "-m", "megarl", "train")
CONFIGURATION_FAULT, USER_ERROR = 2, 1


def arguments(workspace: Workspace, run_dir: Path, *more: str) -> list[str]:
    """Return sound arguments for two ranks, then `more`."""
    return [
        f"data.train_files={workspace.train}",
        "data.train_batch_size=8",
        "data.max_prompt_length=64",
        "data.max_response_length=8",
        f"actor_rollout_ref.model.path={workspace.model}",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "actor_rollout_ref.rollout.n=2",
        "algorithm.adv_estimator=grpo",
        "reward_model.trial_rows=0",
        "trainer.n_gpus_per_node=2",
        "trainer.logger=[jsonl]",
        f"trainer.default_local_dir={run_dir}",
        *more,
    ]


def test_configuration_faults_are_reported_together_before_ranks_start(workspace: Workspace, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    config = json.loads((workspace.model / "config.json").read_text())
    (bare / "config.json").write_text(json.dumps(config | {"model_type": "mamba"}))
    code, output = run_program(
        *(*TRAIN, *arguments(workspace, tmp_path / "run")),
        "actor_rollout_ref.actor.ppo_mini_batchsize=4",
        "data.shuffle=sometimes",
        "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=3",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=8",
        f"critic.model.path={bare}",
        "algorithm.adv_estimator=gae",
        timeout_s=120,
    )
    assert code == CONFIGURATION_FAULT, output
    text = " ".join(output.split())  # lines are wrapped
    for message in (
        "actor_rollout_ref.actor.ppo_mini_batchsize",
        "actor_rollout_ref.actor.ppo_mini_batch_size",  # the nearest key
        "data.shuffle",
        "not 'sometimes'",
        "3 does not divide the world of 2 ranks",
        "3 does not divide the 4 attention heads",
        "8 does not divide the world of 2 ranks",
        f"{bare} has no weights (*.safetensors)",
        f"{bare}/config.json: model_type is mamba; known are llama",
    ):
        assert message in text, output
    assert "Traceback" not in output
    assert "rank" not in output.replace("ranks", "")
    assert not (tmp_path / "run").exists()


def test_fault_on_one_host_is_reported_there(
    workspace: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    place = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    lacking = f"data.train_files={tmp_path / 'elsewhere.parquet'}"
    with pytest.raises(SystemExit) as ending:
        main(arguments(workspace, tmp_path / "run", lacking))
    assert ending.value.code == CONFIGURATION_FAULT
    assert "elsewhere.parquet" in capsys.readouterr().err


def without_a_column(workspace: Workspace, directory: Path) -> tuple[str, str]:
    table = pq.read_table(workspace.train).drop_columns(["reward_model"])
    pq.write_table(table, path := directory / "short.parquet")
    return f"data.train_files={path}", f"{path} has no column 'reward_model' (not needed with"


def empty(workspace: Workspace, directory: Path) -> tuple[str, str]:
    pq.write_table(pq.read_table(workspace.train).slice(0, 0), path := directory / "empty.parquet")
    return f"data.train_files={path}", f"{path} is empty"


def no_parquet(workspace: Workspace, directory: Path) -> tuple[str, str]:
    path = directory / "prose.parquet"
    path.write_text("Once upon a time")
    return f"data.val_files={path}", f"{path} cannot be read as parquet"


def too_long(workspace: Workspace, directory: Path) -> tuple[str, str]:
    rows = pq.read_table(workspace.train).slice(0, 8).to_pylist()
    rows[5]["prompt"] = "1 + " * 80
    pq.write_table(pa.Table.from_pylist(rows), path := directory / "long.parquet")
    return f"data.train_files={path}", f"{path}, row 5, column prompt: the prompt has "


def too_few(workspace: Workspace, directory: Path) -> tuple[str, str]:
    pq.write_table(pq.read_table(workspace.train).slice(0, 5), path := directory / "few.parquet")
    return f"data.train_files={path}", "data.train_batch_size: 8 rows a step, but data.train_files has 5"


def small_vocabulary(workspace: Workspace, directory: Path) -> tuple[str, str]:
    model = shutil.copytree(workspace.model, directory / "model")
    config = json.loads((model / "config.json").read_text())
    write_hollow(model, config | {"vocab_size": 150})
    return (
        f"actor_rollout_ref.model.path={model}",
        f"the tokenizer has 200 tokens, the model in {model} only 150: set data.tokenizer",
    )


def reward_of_other_arguments(workspace: Workspace, directory: Path) -> tuple[str, str]:
    (path := directory / "mine.py").write_text("def score(prompt): ...\ncompute_score = score\n")
    return f"custom_reward_function.path={path}", f"{path}: compute_score does not accept data_source, solution_str, "


def out_of_reach(workspace: Workspace, directory: Path) -> tuple[str, str]:
    return "data.train_files=file://ann:Swordf1sh@nowhere/a.parquet", "file://***@nowhere/a.parquet cannot be opened"


@pytest.mark.parametrize("spoil", [out_of_reach, empty, too_few])
def test_rows_fewer_than_a_step_are_faults(
    workspace: Workspace, tmp_path: Path, spoil: Callable[[Workspace, Path], tuple[str, str]]
) -> None:
    argument, message = spoil(workspace, tmp_path)
    code, output = run_program(*TRAIN, *arguments(workspace, tmp_path / "run", argument), timeout_s=120)
    assert code == CONFIGURATION_FAULT
    assert message in output
    assert "Swordf1sh" not in output
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "spoil",
    [
        without_a_column,
        no_parquet,
        too_long,
        small_vocabulary,
        reward_of_other_arguments,
    ],
)
def test_bad_files_are_named_before_any_engine_starts(
    workspace: Workspace,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    spoil: Callable[[Workspace, Path], tuple[str, str]],
) -> None:
    """Run as the only rank of a launcher in this process, because a launch takes longer than finding the fault."""
    argument, message = spoil(workspace, tmp_path)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        place = {
            "RANK": 0,
            "WORLD_SIZE": 1,
            "LOCAL_RANK": 0,
            "LOCAL_WORLD_SIZE": 1,
            "MASTER_PORT": free.getsockname()[1],
        }
    for name, value in (place | {"MASTER_ADDR": "127.0.0.1"}).items():
        monkeypatch.setenv(name, str(value))
    try:
        with pytest.raises(SystemExit) as ending:
            main(arguments(workspace, tmp_path / "run", "trainer.n_gpus_per_node=1", argument))
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    assert isinstance(ending.value.code, str), "a message, which makes the exit code 1"
    assert ending.value.code.startswith("megarl: rank 0: ")
    assert message in ending.value.code
    assert "Swordf1sh" not in ending.value.code
    assert {path.name for path in (tmp_path / "run").iterdir()} == {"errors", "log"}


def main_with_late_first_rank(argv: list[str]) -> None:
    if os.environ["RANK"] == "0":
        time.sleep(1)
    main(argv)


def test_first_rank_reports_faults_although_others_are_faster(workspace: Workspace, tmp_path: Path) -> None:
    argv = arguments(workspace, tmp_path / "run", "data.shuffle=sometimes")
    job = Job(2, main_with_late_first_rank, argv, log=tmp_path / "train")
    assert job.end(timeout_s=300) == CONFIGURATION_FAULT, "as by a launcher, all ranks end with the first that fails"
    assert "data.shuffle" in job.printed()


def test_always_raising_reward_is_found_before_rendezvous(workspace: Workspace, tmp_path: Path) -> None:
    reward = tmp_path / "reward.py"
    reward.write_text("def compute_score(**_):\n    raise KeyError('answer')\n")
    argv = arguments(
        *(workspace, tmp_path / "run", "trainer.n_gpus_per_node=1", "reward_model.trial_rows=1"),
        f"custom_reward_function.path={reward}",
    )
    job = Job(1, main, argv, log=tmp_path / "train")
    codes, output = job.end_alone(timeout_s=300), job.printed()
    assert codes == [2], output
    assert "1 fault in the configuration:" in output
    assert "train.parquet, row 0: the reward fails if the response is \"{'target'" in output
    assert "KeyError: 'answer': mend the reward or the row" in without_places(output)
    assert not (tmp_path / "run").exists()


def test_always_raising_reward_stops_every_rank(workspace: Workspace, tmp_path: Path) -> None:
    reward = tmp_path / "reward.py"
    reward.write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        "    print('looking for it')\n"
        "    raise KeyError('answer')\n"
    )
    argv = arguments(
        *(workspace, tmp_path / "run", "trainer.total_epochs=1", "trainer.val_before_train=false"),
        *("trainer.save_freq=1", f"custom_reward_function.path={reward}"),
    )
    job = Job(2, main, argv, log=tmp_path / "train")
    codes, output = job.end_alone(timeout_s=300), job.printed()
    assert codes == [USER_ERROR, USER_ERROR], output
    assert f"KeyError: 'answer' ({reward}:3, `raise KeyError('answer')`); it printed 'looking for it'" in output
    assert "Traceback" not in output
    message = (
        "16 of 16 responses have no score, more than half, so the others would teach something else: "
        "the reward failed on sample 0 (data source 'countdown/bare', data row "
    )
    assert f"megarl: rank 0: {message}" in output
    assert output.count(message) == 1
