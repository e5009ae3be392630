"""A run that is killed and resumed ends like one that was not, to the last bit of every metric, token and weight.

The ranks are forked from a process that has imported everything. SIGKILL ends them all at once in their fourth step.
"""

import signal
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
import yaml
from _pytest.mark import ParameterSet
from mlflow import MlflowClient

from megarl.checkpoint.state import State
from megarl.commands import train
from megarl.samples.in_flight import IN_FLIGHT_FILES
from megarl.tracking.jsonl import read_jsonl
from megarl.tracking.tracker import Trackers
from tests.support.forked import Job
from tests.support.outcomes import PASSING, metrics_of, mlflow_runs, samples_in
from tests.support.programs import ROOT
from tests.support.shards import tensors_of
from tests.support.tiny import write_checkpoint
from tests.support.workspace import Workspace, train_arguments, with_many_ends

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1800)]

RUN_S = 600
TOKENIZER = "tokenizer.model"
ENVIRONMENTS = ROOT / "tests" / "support" / "own_environments.py"
NUM_STEPS, SAVED, RECORDED = 4, 2, 3  # steps in all; the last saved and the last recorded before the kill
SPLITS = {
    "tensor": [
        "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=2",
    ],
    "data": [],
}
PIPELINE = [
    "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=1",
    "actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=2",
    "actor_rollout_ref.rollout.tensor_model_parallel_size=2",
]
CHECKED = {"sync/check_probs_diff_max", "sync/check_probs_diff_mean", "timing_s/sync_check"}  # of the start of a run
CASES = [(algorithm, split) for algorithm in ("ppo", "grpo") for split in SPLITS]
EPISODES, PARTIAL, PARTIAL_STEPS = ("episodes", "data"), ("partial", "data"), ("partial_steps", "tensor")
PARTIAL_EPISODES = ("partial_episodes", "tensor")
ADAPTERS = ("adapters", "tensor")
EXPERTS = ("experts", "tensor")
CASES += [EPISODES, PARTIAL, PARTIAL_STEPS, PARTIAL_EPISODES, ADAPTERS, EXPERTS]
LONG = {("grpo", "tensor"), PARTIAL_STEPS}  # PPO with the same split, and other ends of a step, are always tested
GOES_ON = [
    "actor_rollout_ref.rollout.partial={enable: true, max_staleness: 3, stop_when: 0.5}",
    "algorithm.rollout_correction.rollout_is=token",
]


@dataclass(frozen=True)
class Runs:
    """An undisturbed run, and one that was killed and resumed."""

    arguments: list[str]  # without the directory
    whole: Path
    killed: Path


def algorithm_arguments(name: str, workspace: Workspace, root: Path) -> list[str]:
    """Return arguments for every part of an algorithm that keeps state."""
    if name == "partial":
        return [
            *algorithm_arguments("grpo", workspace, root),
            f"actor_rollout_ref.model.path={with_many_ends(workspace.model, root / 'model', one_of=32)}",
            *GOES_ON,
            "data.max_response_length=96",
        ]
    if name == "partial_episodes":
        return [
            *algorithm_arguments("turns", workspace, root),
            *GOES_ON,
            "environment.kwargs={words: ' 7'}",
            "data.max_prompt_length=72",
        ]
    if name == "partial_steps":
        partial = "actor_rollout_ref.rollout.partial.stop_when"
        return [*algorithm_arguments("partial", workspace, root), f"{partial}=16"]
    if name == "adapters":
        return [
            *algorithm_arguments("ppo", workspace, root),
            "actor_rollout_ref.model.lora_rank=4",
            "actor_rollout_ref.model.lora_dropout=0.1",
            "critic.model.lora_rank=2",
            "actor_rollout_ref.actor.optim.lr=1e-2",
        ]
    if name == "experts":
        return [
            *algorithm_arguments("adapters", workspace, root),
            "actor_rollout_ref.model.lora_dropout=0",  # experts have none
            f"actor_rollout_ref.model.path={model_with_experts(workspace, root / 'experts')}",
            f"critic.model.path={root / 'experts'}",
            "actor_rollout_ref.actor.megatron.expert_model_parallel_size=2",
            "actor_rollout_ref.actor.megatron.expert_tensor_parallel_size=1",
            "actor_rollout_ref.rollout.routing_replay=engine",
            *GOES_ON,
            "data.max_response_length=48",
        ]
    if name == "episodes":
        return [
            *algorithm_arguments("turns", workspace, root),
            "actor_rollout_ref.rollout.n=2",
            "algorithm.filter_groups.enable=true",
        ]
    if name == "turns":
        return [
            *algorithm_arguments("ppo", workspace, root),
            f"actor_rollout_ref.model.path={with_many_ends(workspace.model, root / 'model')}",
            f"environment.path={ENVIRONMENTS}",
            "environment.name=Digits",
            "environment.max_turns=4",
            "environment.num_workers=1",
            "custom_reward_function.path=null",
            "data.max_response_length=48",
        ]
    if name == "grpo":
        return [
            "algorithm.adv_estimator=grpo",
            "actor_rollout_ref.rollout.n=2",
            "actor_rollout_ref.actor.use_kl_loss=true",
        ]
    return [
        f"critic.model.path={workspace.model}",
        "critic.optim.lr=1e-3",
        "critic.optim.warmup_style=cosine",
        "actor_rollout_ref.actor.ppo_epochs=2",
        "actor_rollout_ref.actor.ptx_coef=0.1",
        f"actor_rollout_ref.actor.ptx_files={workspace.pairs}",
        "algorithm.kl_ctrl={type: adaptive, kl_coef: 0.1, target_kl: 0.01, horizon: 100}",
    ]


def model_with_experts(workspace: Workspace, path: Path) -> Path:
    """Write a model with experts whose responses end at many tokens, with the tokenizer of the other tests."""
    source = write_checkpoint(path.with_name("whole"), "qwen3_moe")
    (source / TOKENIZER).write_bytes((workspace.model / TOKENIZER).read_bytes())
    return with_many_ends(source, path)


def placed(arguments: list[str], run_dir: Path) -> list[str]:
    return [
        *arguments,
        f"trainer.default_local_dir={run_dir}",
        f"trainer.rollout_data_dir={run_dir / 'samples'}",
    ]


def in_flight_files(run_dir: Path) -> list[Path]:
    return sorted((run_dir / f"global_step_{SAVED}").glob(IN_FLIGHT_FILES))


def stand_still(marker: Path, arguments: list[str]) -> None:
    """On each rank: train until step RECORDED is recorded, create `marker`, and wait to be killed."""
    log = Trackers.log

    def log_and_wait(self: Trackers, metrics: Mapping[str, float], *, step: int) -> None:
        log(self, metrics, step=step)
        if step == RECORDED:
            marker.touch()
            signal.pause()

    Trackers.log = log_and_wait  # type: ignore[method-assign]
    train.main(arguments)


def marked(*cases: tuple[str, str]) -> list[ParameterSet]:
    """Return cases as parameters of tests; leave the cases in `LONG` to `make test-long`."""
    return [pytest.param(case, marks=[pytest.mark.long] if case in LONG else [], id="-".join(case)) for case in cases]


@pytest.fixture(scope="module", params=marked(*CASES))
def runs(request: pytest.FixtureRequest, workspace: Workspace, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    algorithm, split = request.param
    root = tmp_path_factory.mktemp(f"{algorithm}-{split}")
    arguments = [
        *train_arguments(workspace, root / "nowhere"),
        *algorithm_arguments(algorithm, workspace, root),
        *SPLITS[split],
        "trainer.logger=[jsonl,mlflow]",
        "trainer.save_freq=2",
        "trainer.save_best=false",
        "trainer.test_freq=2",
        f"trainer.total_training_steps={NUM_STEPS}",
    ]
    whole, killed, marker = root / "whole", root / "killed", root / "recorded"
    Job(2, train.main, placed(arguments, whole), log=root / "whole").finish(timeout_s=RUN_S)
    job = Job(2, stand_still, marker, placed(arguments, killed), log=root / "killed")
    job.kill_when(marker.exists, timeout_s=RUN_S)
    assert [line["step"] for line in read_jsonl(killed / "metrics.jsonl")] == list(range(RECORDED + 1))
    assert not (killed / f"global_step_{NUM_STEPS}").exists()
    Job(2, train.main, placed(arguments, killed), log=root / "resumed").finish(timeout_s=RUN_S)
    return Runs(arguments, whole, killed)


def mlflow_run(run_dir: Path) -> tuple[MlflowClient, Any]:
    client, [run] = mlflow_runs(run_dir)
    return client, run


def test_every_metric_is_the_same(runs: Runs) -> None:
    whole, killed = metrics_of(runs.whole), metrics_of(runs.killed)
    assert list(whole) == list(killed) == list(range(NUM_STEPS + 1))
    for step, metrics in whole.items():
        assert killed[step] == metrics, f"step {step}"
    assert whole[NUM_STEPS]["val/best_step"] in (0, 2, 4)


def test_every_sample_is_the_same(runs: Runs) -> None:
    names = sorted(path.name for path in (runs.whole / "samples").iterdir())
    assert {f"step_{step}.parquet" for step in range(1, NUM_STEPS + 1)} < {*names}
    assert sorted(path.name for path in (runs.killed / "samples").iterdir()) == names
    for name in names:
        whole, killed = (samples_in(run_dir / "samples" / name) for run_dir in (runs.whole, runs.killed))
        assert whole.num_rows > 0
        assert killed.equals(whole), name


def test_every_weight_and_every_moment_is_the_same(runs: Runs) -> None:
    whole, killed = (run_dir / f"global_step_{NUM_STEPS}" for run_dir in (runs.whole, runs.killed))
    models = [name for name in ("actor", "critic") if (whole / name).is_dir()]
    for model in models:
        expected, found = tensors_of(whole / model), tensors_of(killed / model)
        assert found.keys() == expected.keys()
        assert sum("exp_avg" in name for name in expected) > 0
        for name, tensor in expected.items():
            assert torch.equal(found[name], tensor), f"{model}: {name}"
        before = tensors_of(runs.whole / f"global_step_{SAVED}" / model)
        assert any(not torch.equal(before[name], tensor) for name, tensor in expected.items())
    assert State.read(killed) == _timeless(State.read(whole), like=State.read(killed))


@pytest.mark.parametrize("runs", marked(PARTIAL, PARTIAL_STEPS, PARTIAL_EPISODES), indirect=True)
def test_checkpoint_contains_unfinished_responses(runs: Runs) -> None:
    whole, killed = map(in_flight_files, (runs.whole, runs.killed))
    assert [file.read_bytes() for file in whole] == [file.read_bytes() for file in killed]
    started = pq.read_table(whole, filters=[("complete", "=", False)])
    assert any(started["token_ids"].to_pylist()), "unfinished responses keep their tokens"
    ages = [metrics["rollout/staleness/max"] for metrics in metrics_of(runs.whole).values() if "actor/lr" in metrics]
    assert 0.0 < max(ages) <= 3.0
    versions = samples_in(runs.killed / "samples" / f"step_{SAVED + 1}.parquet")["weight_versions"].to_pylist()
    assert any(len({*of_sample} - {0}) > 1 for of_sample in versions), "some responses were drawn by two weights"


@pytest.mark.parametrize("runs", [PARTIAL_EPISODES], indirect=True, ids="-".join)
def test_episodes_that_go_on_keep_their_turns(runs: Runs) -> None:
    in_flight = pq.read_table(in_flight_files(runs.killed)).to_pylist()
    in_a_turn = [row for row in in_flight if row["turns"] and not row["complete"]]
    assert any(row["turns"][-1]["observation"] for row in in_a_turn)
    rows = samples_in(runs.killed / "samples" / f"step_{SAVED + 1}.parquet").to_pylist()
    said = [
        {version for version, seen in zip(row["weight_versions"], row["observed"], strict=True) if not seen}
        for row in rows
    ]
    assert any(len(versions) > 1 and row["num_turns"] > 1 for versions, row in zip(said, rows, strict=True))


@pytest.mark.parametrize("runs", [EPISODES], indirect=True, ids="-".join)
def test_replay_of_multi_turn_episodes_gives_same_update(runs: Runs, tmp_path: Path) -> None:
    samples, original = runs.whole / "samples", metrics_of(runs.whole)
    rows = [row for step in range(1, NUM_STEPS + 1) for row in samples_in(samples / f"step_{step}.parquet").to_pylist()]
    assert {metrics.get("train/num_gen_batches", 1.0) for metrics in original.values()} > {1.0}, "prompts are refilled"
    assert {row["stop_reason"] for row in rows} >= {"done", "turns"}
    assert {row["num_turns"] for row in rows} >= {1, 2, 4}
    for row in rows:
        shown = row["response"].split("\n>>> ")
        assert len(shown) == row["num_turns"]
        assert sum(row["turn_rewards"]) == pytest.approx(row["score"], abs=1e-6)
        rewarded = [place for place, reward in enumerate(row["turn_rewards"]) if reward]
        assert not any(row["observed"][place] for place in rewarded)
    assert max(metrics.get("val/episode/turns/max", 0.0) for metrics in original.values()) > 1.0

    arguments = [*placed(runs.arguments, runs.whole), "trainer.resume_mode=disable", "trainer.logger=[jsonl]"]
    replay = [*arguments, "--replay", str(samples / "step_1.parquet")]
    Job(2, train.main, replay, log=tmp_path / "replay").finish(timeout_s=RUN_S)
    [again] = metrics_of(runs.whole / "replay").values()
    assert again["actor/grad_norm"] > 0.0
    assert again.items() <= original[1].items()


def _timeless(state: State, *, like: State) -> State:
    """Return the state with the PASSING metrics of another."""
    said = {name: value for name, value in like.metrics.items() if name.startswith(PASSING)}
    kept = {name: value for name, value in state.metrics.items() if not name.startswith(PASSING)}
    return replace(state, metrics=kept | said)


def test_mlflow_has_every_step_once(runs: Runs) -> None:
    (whole, of_whole), (killed, of_killed) = mlflow_run(runs.whole), mlflow_run(runs.killed)
    assert of_killed.info.status == "FINISHED"
    # MLflow samples the host by the clock, not by steps.
    names, others = (
        {name for name in run.data.metrics if not name.startswith("system/")} - CHECKED for run in (of_whole, of_killed)
    )
    assert names == others
    for name in names:
        steps = [point.step for point in whole.get_metric_history(of_whole.info.run_id, name)]
        assert [point.step for point in killed.get_metric_history(of_killed.info.run_id, name)] == steps, name
    tables = [
        Path(client.download_artifacts(run.info.run_id, "val/generations.json")).read_text()
        for client, run in ((whole, of_whole), (killed, of_killed))
    ]
    assert tables[0] == tables[1]


def test_a_checkpoint_says_what_it_was_saved_under(runs: Runs) -> None:
    checkpoint = runs.killed / f"global_step_{NUM_STEPS}"
    config = yaml.safe_load((checkpoint / "config.yaml").read_text())
    assert config["trainer"]["total_training_steps"] == NUM_STEPS
    _, run = mlflow_run(runs.killed)
    assert (checkpoint / "mlflow_run_id").read_text() == run.info.run_id


@pytest.mark.parametrize("runs", CASES[:1], indirect=True, ids="-".join)
def test_finished_run_reports_nothing_left_to_do(runs: Runs, tmp_path: Path) -> None:
    before = {path: path.read_bytes() for path in runs.killed.glob("*.jsonl")}
    client, run = mlflow_run(runs.killed)
    printed = Job(2, train.main, placed(runs.arguments, runs.killed), log=tmp_path / "again").finish(timeout_s=RUN_S)
    assert f"nothing left to do: {runs.killed} is at step {NUM_STEPS} of {NUM_STEPS}. To continue this run, " in printed
    assert "raise trainer.total_training_steps" in printed
    assert "To start anew, with what has changed since, name another trainer.experiment_name or" in printed
    assert {path: path.read_bytes() for path in runs.killed.glob("*.jsonl")} == before
    for name in ("actor/grad_norm", "timing_s/step"):
        history = client.get_metric_history(run.info.run_id, name)
        assert [point.step for point in history] == list(range(1, NUM_STEPS + 1)), name
    assert mlflow_run(runs.killed)[1].info.status == "FINISHED"


@pytest.mark.parametrize("runs", [EXPERTS], indirect=True, ids="-".join)
def test_trainer_takes_the_experts_of_the_engine(runs: Runs) -> None:
    """Complete responses keep their routes if other responses to their prompt are not complete."""
    agreements = [line.get("actor/router_agreement") for line in metrics_of(runs.killed).values()]
    assert len(agreements) == NUM_STEPS + 1
    assert all(0.5 < agreement <= 1.0 for agreement in agreements if agreement is not None)
    rows = [row for file in in_flight_files(runs.killed) for row in pq.read_table(file).to_pylist()]
    assert any(row["routes"] for row in rows)


@pytest.mark.parametrize("runs", CASES[:1], indirect=True, ids="-".join)
def test_another_split_resumes_alike(runs: Runs, tmp_path: Path) -> None:
    other = tmp_path / "other"
    arguments = [
        *placed(runs.arguments, other),
        *PIPELINE,
        "trainer.resume_mode=resume_path",
        f"trainer.resume_from_path={runs.whole / f'global_step_{SAVED}'}",
        f"trainer.total_training_steps={RECORDED}",
        f"critic.optim.total_training_steps={NUM_STEPS}",
    ]
    printed = Job(2, train.main, arguments, log=tmp_path / "other").finish(timeout_s=RUN_S)
    key = "actor_rollout_ref.actor.megatron.pipeline_model_parallel_size"
    assert f"{key}: 1 -> 2 (rounding: another split)" in printed
    assert "the curve will differ" in printed  # the critic's schedule has another length
    name = f"step_{RECORDED}.parquet"
    whole, found = (samples_in(run_dir / "samples" / name) for run_dir in (runs.whole, other))
    assert found["prompt"].equals(whole["prompt"])  # the order of the data
    assert found["response"].equals(whole["response"])  # and the weights in the engine, whose split is the same
    expected, metrics = metrics_of(runs.whole)[RECORDED], metrics_of(other)[RECORDED]
    for name in ("actor/pg_loss", "actor/grad_norm", "critic/vf_loss", "actor/ptx_loss", "critic/score/mean"):
        assert metrics[name] == pytest.approx(expected[name], rel=5e-3, abs=1e-5), name
    assert metrics["training/rollout_probs_diff_max"] < 1e-5
