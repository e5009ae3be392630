"""The course of a run and its records follow from a configuration and a checkpoint."""

import shlex
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks.cases import MODELS
from megarl.algorithms.config import KLControlSection
from megarl.algorithms.kl import AdaptiveKL, FixedKL
from megarl.assembly.models import reads_everywhere, replays_of_frozen
from megarl.assembly.next_steps import next_steps
from megarl.assembly.records import console_tracker, make_schedule, run_tracker
from megarl.assembly.resume import ResumePoint
from megarl.assembly.run import make_flops_counter, make_kl_controller
from megarl.checkpoint.state import State
from megarl.commands.cli.command import parse
from megarl.commands.cli.table import COMMANDS
from megarl.config.load import load_config
from megarl.distributed.launch import Launch
from megarl.learner.per_data_source import PerDataSource
from megarl.models.architecture import read_architecture
from megarl.tracking.config import TrainerSection
from megarl.tracking.jsonl import read_jsonl
from megarl.tracking.run_id import RUN_ID_FILE
from tests.support.ranks import world_of_one
from tests.support.tiny import SIZES, VARIANTS


@pytest.mark.parametrize(
    ("trainer", "resumed", "validates_first"),
    [
        (TrainerSection(), False, True),
        (TrainerSection(val_before_train=False), False, False),
        (TrainerSection(), True, False),  # it was validated when it was at this step before
    ],
)
def test_schedule(trainer: TrainerSection, resumed: bool, validates_first: bool) -> None:
    schedule = make_schedule(
        trainer,
        Launch(rank=0, world_size=1, local_rank=0, local_world_size=1),
        first_step=4,
        last_step=9,
        resumed=resumed,
    )
    assert schedule.first_step == 4
    assert schedule.last_step == 9
    assert schedule.validate_first == validates_first


RECORDS = ("config.yaml", "history.jsonl", "metrics.jsonl", "report.html", "status.json", "val_generations.jsonl")


@pytest.mark.parametrize("step", [None, 1])
def test_val_only_job_shows_scores_and_keeps_records(
    tmp_path: Path, step: int | None, capsys: pytest.CaptureFixture[str]
) -> None:
    resume_point = ResumePoint(
        checkpoint=None if step is None else tmp_path / "checkpoint", state=State(step=step or 0)
    )
    arguments = [
        *("data.train_files=train.parquet", "data.val_files=val.parquet", "actor_rollout_ref.model.path=model"),
        *("critic.model.path=model", f"trainer.default_local_dir={tmp_path}", "trainer.logger=[jsonl]"),
    ]

    def record(*, validates: bool = False) -> None:
        config = load_config(arguments, world_size=None, check_paths=False)
        launch = Launch(rank=0, world_size=1, local_rank=0, local_world_size=1)
        with world_of_one():
            tracker = (
                console_tracker(launch, total_steps=3)
                if validates
                else run_tracker(config, launch, resume_point, last_step=3)
            )
        for number in (resume_point.state.step, 3):
            tracker.log({"val/test_score/gsm8k": 0.25 + number}, step=number)
            tracker.log_table("val/generations", [{"prompt": "2 2", "response": "4", "score": 1.0}], step=number)
        tracker.close()

    def files() -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}

    record()
    records = files()
    assert {path.name for path in records} == {*RECORDS}
    assert "0.25" not in capsys.readouterr().out
    record(validates=True)
    assert files() == records
    assert f"validation gsm8k {0.25 + resume_point.state.step}" in capsys.readouterr().out
    record()  # a job that learns does otherwise
    assert [row["step"] for row in read_jsonl(tmp_path / "metrics.jsonl")] == ([0, 3] if step is None else [1, 1, 3])
    assert files() != records


def test_only_adaptive_kl_coefficient_is_restored_on_resume() -> None:
    adaptive = KLControlSection(type="adaptive", kl_coef=0.1, target_kl=0.02, horizon=50)
    assert make_kl_controller(adaptive, State(step=0)) == AdaptiveKL(0.1, target=0.02, horizon=50)
    assert make_kl_controller(adaptive, State(step=3, kl_coef=0.07)) == AdaptiveKL(0.07, target=0.02, horizon=50)
    fixed = KLControlSection(kl_coef=0.3)
    assert make_kl_controller(fixed, State(step=3, kl_coef=0.07)) == FixedKL(0.3)


@pytest.mark.parametrize("name", ["plain", "with a space"])
def test_final_commands_can_be_typed_as_shown(name: str, tmp_path: Path) -> None:
    run_dir = tmp_path / name
    (run_dir / "global_step_2" / "huggingface").mkdir(parents=True)
    (run_dir / "global_step_2" / "huggingface" / "config.json").write_text("{}")
    arguments = ["data.train_files=a", "actor_rollout_ref.model.path=b", f"trainer.default_local_dir={run_dir}"]
    config = load_config([*arguments, "critic.model.path=b"], world_size=None, check_paths=False)
    shown = dict(next_steps(config, "finished"))
    commands = {str(command.name): command for command in COMMANDS}
    for what in ("evaluate", "export", "chat"):
        program, typed, *rest = shlex.split(shown[what])
        assert (program, typed, rest[0]) == ("megarl", what, str(run_dir))
        assert parse(commands[what], rest)  # else it ends the program
    store, _, page = shown["MLflow"].partition(", then open ")
    assert shlex.split(store) == ["mlflow", "ui", "--backend-store-uri", f"sqlite:///{tmp_path}/mlflow.db"]
    assert page == "http://127.0.0.1:5000"


@pytest.mark.parametrize("server", ["http://host:5000", "https://host/mlflow/"])
def test_page_of_the_run_in_mlflow_is_named(server: str, tmp_path: Path) -> None:
    (tmp_path / RUN_ID_FILE).write_text("0123abcd")
    arguments = ["data.train_files=a", "actor_rollout_ref.model.path=b", f"trainer.default_local_dir={tmp_path}"]
    named = [*arguments, "critic.model.path=b", f"trainer.mlflow_tracking_uri={server}"]
    shown = dict(next_steps(load_config(named, world_size=None, check_paths=False), "finished"))
    assert shown["MLflow"] == f"{server.rstrip('/')}/#/runs/0123abcd"


@pytest.mark.parametrize(
    ("kinds", "passes"),
    [
        ({"loss": "k3"}, {"ref": 1}),
        ({"loss": "full"}, {"update_actor": 2}),
        ({"reward": "full_js"}, {"old_log_prob": 1}),
        ({"loss": "full_forward", "reward": "k1"}, {"ref": 1, "update_actor": 2}),
    ],
    ids=str,
)
def test_reference_passes_are_counted_in_their_phases(kinds: dict[str, str], passes: dict[str, int]) -> None:
    """Two epochs. An exact divergence is taken within the passes of the actor."""
    actor = "actor_rollout_ref.actor"
    arguments = [
        *("data.train_files=train.parquet", "actor_rollout_ref.model.path=model", "algorithm.adv_estimator=grpo"),
        *("actor_rollout_ref.rollout.n=2", f"{actor}.ppo_epochs=2"),
        *(f"{actor}.use_kl_loss={'loss' in kinds}", f"{actor}.kl_loss_type={kinds.get('loss', 'k1')}"),
        *(f"algorithm.use_kl_in_reward={'reward' in kinds}", f"algorithm.kl_penalty={kinds.get('reward', 'k1')}"),
    ]
    config = load_config(arguments, world_size=None, check_paths=False)
    small, large = (read_architecture(MODELS[name]) for name in ("llama-1m", "llama-3m"))
    policy = SimpleNamespace(learner=SimpleNamespace(architecture=small, device=torch.device("cpu"), lora=None))
    teacher = SimpleNamespace(learner=SimpleNamespace(architecture=large))
    models = SimpleNamespace(actor=policy, critic=None, reference=SimpleNamespace(models=PerDataSource(other=teacher)))
    found = make_flops_counter(config, models, num_ranks=1).passes  # type: ignore[arg-type]
    assert {phase: count for phase, all_ in found.items() for of, count in all_ if of.other is large} == passes
    alone = {phase: count for phase, all_ in found.items() for of, count in all_ if of.other is small}
    assert alone == {"gen": 1, "old_log_prob": 1, "update_actor": 6}


@pytest.mark.parametrize(
    ("key", "replays"),
    [
        ("rollout.routing_replay=engine", "experts"),
        ("rollout.routing_replay=engine_scores", "experts"),
        ("actor.routing_replay=recompute", "none"),
    ],
)
def test_a_reference_replays_the_engine_alone(key: str, replays: str) -> None:
    arguments = ["data.train_files=a", "actor_rollout_ref.model.path=org/m", "critic.model.path=org/m"]
    config = load_config([*arguments, f"actor_rollout_ref.{key}"], world_size=None, check_paths=False)
    sparse, dense = (read_architecture(SIZES | VARIANTS[name]) for name in ("qwen3_moe", "llama"))
    assert replays_of_frozen(config, sparse, sparse) == replays
    assert replays_of_frozen(config, dense, sparse) == "none"


LORA = ("lora_rank=8", "lora_dropout=0.1")


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ([], False),
        ([f"actor_rollout_ref.model.{key}" for key in LORA], True),
        ([f"critic.model.{key}" for key in LORA], True),
        (["algorithm.adv_estimator=reinforce_plus_plus", *(f"critic.model.{key}" for key in LORA)], False),
        (["critic.model.tokenizer_path=org/other"], True),
    ],
)
def test_dropout_and_translation_need_tokens_everywhere(keys: list[str], expected: bool) -> None:
    arguments = ["data.train_files=a", "actor_rollout_ref.model.path=org/m", "critic.model.path=org/m"]
    assert reads_everywhere(load_config([*arguments, *keys], world_size=None, check_paths=False)) == expected


@pytest.mark.parametrize(
    ("dropout", "is_fused"),
    [
        ([], True),
        (["actor.megatron.override_transformer_config={hidden_dropout: 0.0}"], True),
        (["actor.megatron.override_transformer_config={hidden_dropout: 0.1}"], False),
        (["actor.megatron.override_transformer_config={attention_dropout: 0.1}"], False),
        (["model.lora_dropout=0.1"], True),  # nobody reads it
        (["model.lora_dropout=0.1", "model.lora_rank=4"], False),
        (["model.lora_dropout=0.1", "model.lora_adapter_path=adapters"], False),
    ],
)
def test_dropout_needs_undropped_log_probs(dropout: list[str], is_fused: bool) -> None:
    arguments = [
        *("data.train_files=a", "actor_rollout_ref.model.path=org/m", "algorithm.adv_estimator=grpo"),
        *("algorithm.use_kl_in_reward=false", "actor_rollout_ref.rollout.n=2", "data.train_batch_size=8"),
        "actor_rollout_ref.actor.ppo_mini_batch_size=8",
        *(f"actor_rollout_ref.{key}" for key in dropout),
    ]
    assert load_config(arguments, world_size=None, check_paths=False).fused_old_log_probs == is_fused
