"""The resume points of runs, from real checkpoints without models."""

import json
from pathlib import Path

import pytest

from megarl.assembly.records import make_checkpoints
from megarl.assembly.resume import ResumePoint
from megarl.checkpoint.background import run_blocking
from megarl.checkpoint.directory import LATEST_FILE
from megarl.checkpoint.manifest import sealing
from megarl.checkpoint.state import Best, State
from megarl.commands.entry import how_to_resume
from megarl.config.report import custom_code
from megarl.platform.errors import UserError
from megarl.platform.terminal import COMMAND
from megarl.tracking.run_id import RUN_ID_FILE
from tests.support.resumes import configured, configured_sft, save, told

pytestmark = pytest.mark.usefixtures("world", "news_captured")


def test_unchanged_run_resumes_without_messages(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = configured(tmp_path)
    assert ResumePoint.find(config) == ResumePoint(checkpoint=None, state=State(step=0))
    checkpoint = save(config, step=3)
    resume_point = ResumePoint.find(config)
    assert resume_point == ResumePoint(checkpoint=checkpoint, state=State(step=3), same_curve=True)
    assert [resume_point.is_at(step) for step in (3, 4)] == [True, False]
    assert told(caplog) == ""


def test_changed_keys_are_reported_with_their_effect(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    checkpoint = save(configured(tmp_path), step=3)
    assert ResumePoint.find(configured(tmp_path, "trainer.save_freq=2")).same_curve
    assert told(caplog) == "changed without effect on the curve: trainer.save_freq\n"
    changed = configured(tmp_path, "trainer.n_gpus_per_node=4", "algorithm.gamma=0.5")
    assert not ResumePoint.find(changed).same_curve
    assert told(caplog).splitlines() == [
        f"changes since {checkpoint}:",
        "  algorithm.gamma: 1.0 -> 0.5 (another curve: the algorithm)",
        "  trainer.n_gpus_per_node: 8 -> 4 (rounding: another split)",
        "note: the curve will differ from that of an uninterrupted run",
    ]


@pytest.mark.parametrize("value", ["true", "false"])
def test_the_other_optimizer_cannot_resume(tmp_path: Path, value: str) -> None:
    key = "actor_rollout_ref.actor.megatron.use_distributed_optimizer"
    checkpoint = save(configured(tmp_path, f"{key}={value}"), step=3)
    other = configured(tmp_path, f"{key}={'false' if value == 'true' else 'true'}")
    with pytest.raises(
        UserError, match=f"^{checkpoint} has the optimizer states of {key}={value}.*: write {value}, or"
    ):
        ResumePoint.find(other)
    unread = configured(tmp_path, f"{key}={value}", "reward_model.megatron.use_distributed_optimizer=false")
    assert ResumePoint.find(unread).is_resumed


@pytest.mark.parametrize("value", ["true", "false"])
def test_states_of_other_weights_cannot_resume(tmp_path: Path, value: str) -> None:
    key = "actor_rollout_ref.model.freeze_moe_router"
    save(configured(tmp_path, f"{key}={value}"), step=3)
    with pytest.raises(UserError, match=f"optimizer states of {key}={value}, which no other"):
        ResumePoint.find(configured(tmp_path, f"{key}={'false' if value == 'true' else 'true'}"))


def test_run_of_another_command_is_refused(tmp_path: Path) -> None:
    checkpoint = save(configured_sft(tmp_path), step=3)
    assert ResumePoint.find(configured_sft(tmp_path)).is_resumed
    with pytest.raises(
        UserError,
        match=f"^{checkpoint} was saved by `megarl sft`, which `megarl train` cannot continue.* `megarl export "
        f"{checkpoint} DIRECTORY`, then actor_rollout_ref.model.path=DIRECTORY",
    ):
        ResumePoint.find(configured(tmp_path))


def test_changed_reward_file_changes_curve(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    reward, run_dir = tmp_path / "reward.py", tmp_path / "run"
    reward.write_text("def compute_score(**_): return 1\n")
    config = configured(run_dir, f"custom_reward_function.path={reward}")
    checkpoint = save(config, step=3, best=Best(0.5, 3))
    (moved := tmp_path / "moved.py").write_bytes(reward.read_bytes())
    assert ResumePoint.find(config) == ResumePoint(checkpoint=checkpoint, state=State(step=3, best=Best(0.5, 3)))
    assert told(caplog) == ""
    reward.write_text("def compute_score(**_): return 2\n")
    assert ResumePoint.find(config) == ResumePoint(checkpoint=checkpoint, state=State(step=3), same_curve=False)
    said = told(caplog)
    assert "  custom_reward_function.path: compute_score of " in said
    was, now = (custom_code(configured(run_dir, f"custom_reward_function.path={path}")) for path in (moved, reward))
    for digest in (text[-len("0123456789ab)") :] for code in (was, now) for text in code.values()):
        assert digest in said
    assert "(another curve: another file content)\n" in said
    assert "the best starts anew: custom_reward_function.path\n" in said
    (checkpoint / "code.json").unlink()  # of an earlier version
    (checkpoint / "manifest.json").unlink()
    run_blocking(sealing(checkpoint))
    assert ResumePoint.find(config).same_curve


def test_checkpoint_keeps_initial_code_after_reward_file_changes(tmp_path: Path) -> None:
    reward = tmp_path / "reward.py"
    reward.write_text("def compute_score(**_): return 1\n")
    config = configured(tmp_path, f"custom_reward_function.path={reward}")
    run = make_checkpoints(config, {}, [])
    began_with = custom_code(config)
    reward.write_text("def compute_score(**_): return 2\n")
    run.save(State(step=3))
    assert json.loads((tmp_path / "global_step_3" / "code.json").read_text()) == began_with


@pytest.mark.parametrize(
    ("change", "best"),
    [
        ("data.val_files=other.parquet", None),
        ("actor_rollout_ref.rollout.val_kwargs={do_sample: true, temperature: 1.0}", None),
        ("reward_model.timeout_s=3", None),
        ("data.val_batch_size=7", Best(0.5, 3)),
        ("reward_model.num_workers=3", Best(0.5, 3)),
    ],
)
def test_best_score_is_reset_if_scores_are_incomparable(
    tmp_path: Path, change: str, best: Best | None, caplog: pytest.LogCaptureFixture
) -> None:
    save(configured(tmp_path, "data.val_files=val.parquet"), step=3, best=Best(0.5, 3))
    assert ResumePoint.find(configured(tmp_path, "data.val_files=val.parquet", change)).state.best == best
    assert ("the best starts anew" in told(caplog)) == (best is None)


def test_changed_package_version_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = configured(tmp_path)
    checkpoint = save(config, step=3)
    path = checkpoint / "versions.json"
    was = json.loads(path.read_text())
    path.write_text(json.dumps(was | {"torch": "1.0"}))
    run_blocking(sealing(checkpoint))
    assert ResumePoint.find(config).same_curve
    assert f"  torch: 1.0 -> {was['torch']} (another version" in told(caplog)


def test_mlflow_run_continues_in_empty_directory_if_unrenamed(tmp_path: Path) -> None:
    config = configured(tmp_path / "run")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / RUN_ID_FILE).write_text("of the first")
    checkpoint = save(config, step=3)
    fork = ("trainer.resume_mode=resume_path", f"trainer.resume_from_path={checkpoint}")
    ResumePoint.find(configured(tmp_path / "moved", *fork))
    assert (tmp_path / "moved" / RUN_ID_FILE).read_text() == "of the first"
    ResumePoint.find(configured(tmp_path / "renamed", *fork, "trainer.experiment_name=other"))
    assert not (tmp_path / "renamed" / RUN_ID_FILE).exists()
    (tmp_path / "moved" / RUN_ID_FILE).write_text("its own")
    ResumePoint.find(configured(tmp_path / "moved", *fork))
    assert (tmp_path / "moved" / RUN_ID_FILE).read_text() == "its own"


def test_other_mlflow_run_changes_curve(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (run_id := tmp_path / "run" / RUN_ID_FILE).write_text("of the first")
    config = configured(tmp_path / "run")
    checkpoint = save(config, step=3)
    back = ("trainer.resume_mode=resume_path", f"trainer.resume_from_path={checkpoint}")
    assert ResumePoint.find(configured(tmp_path / "run", *back)).same_curve
    run_id.write_text("begun anew on the way")
    assert not ResumePoint.find(configured(tmp_path / "run", *back)).same_curve
    assert ResumePoint.find(config).same_curve  # its own, from before MLflow lost the first


def test_job_without_records_takes_over_no_mlflow_run(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / RUN_ID_FILE).write_text("of the first")
    checkpoint = save(configured(tmp_path / "run"), step=3)
    fork = ("trainer.resume_mode=resume_path", f"trainer.resume_from_path={checkpoint}")
    assert ResumePoint.find(configured(tmp_path / "moved", *fork), continues=False).checkpoint == checkpoint
    assert not (tmp_path / "moved").exists()


def holds(run_dir: Path) -> list[str]:
    return sorted(path.name for path in run_dir.iterdir())


def pointer(run_dir: Path) -> str:
    return (run_dir / LATEST_FILE).read_text()


def test_fresh_start_sets_old_checkpoints_aside(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for step in (3, 12):
        save(configured(tmp_path), step=step)
    afresh = configured(tmp_path, "trainer.resume_mode=disable")
    assert not ResumePoint.find(afresh, continues=False).is_resumed
    assert holds(tmp_path) == [
        "global_step_12",
        "global_step_3",
        LATEST_FILE,
    ]
    assert not ResumePoint.find(afresh).is_resumed
    [aside] = tmp_path.iterdir()
    assert aside.name.startswith("set_aside-")
    assert holds(aside) == ["global_step_12", "global_step_3", LATEST_FILE]
    said = f"moved 2 checkpoints that this run does not continue from {tmp_path} to {aside}; you may delete them\n"
    assert told(caplog) == said
    assert not ResumePoint.find(configured(tmp_path)).is_resumed  # a crash before its first save brings nothing back
    save(afresh, step=1)
    assert ResumePoint.find(configured(tmp_path)).state.step == 1


def test_resume_from_earlier_step_sets_later_checkpoints_aside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (1, 3, 12):
        save(configured(tmp_path), step=step)
    monkeypatch.chdir(tmp_path.parent)
    (tmp_path / "back").symlink_to("global_step_3")
    for name in (tmp_path / "global_step_3", f"{tmp_path.name}/global_step_3/", tmp_path / "back"):
        back = configured(tmp_path, "trainer.resume_mode=resume_path", f"trainer.resume_from_path={name}")
        assert ResumePoint.find(back).state.step == 3
        assert pointer(tmp_path) == "3"
        [aside] = tmp_path.glob("set_aside-*")
        assert holds(aside) == ["global_step_12"]
    assert holds(tmp_path) == ["back", "global_step_1", "global_step_3", LATEST_FILE, aside.name]


@pytest.mark.parametrize("is_chosen", [True, False])
def test_abandoned_steps_never_come_back(tmp_path: Path, is_chosen: bool) -> None:
    """A checkpoint later than the resumed step has another past, though the run may pass that step later."""
    config = configured(tmp_path)
    for step in (2, 4, 6):
        save(config, step=step)
    if is_chosen:  # a person has edited the pointer
        (tmp_path / LATEST_FILE).write_text("2")
    else:
        for step in (4, 6):
            (tmp_path / f"global_step_{step}" / "state.json").write_text("{}")
    assert ResumePoint.find(config).state.step == 2
    assert pointer(tmp_path) == "2"
    [aside] = tmp_path.glob("set_aside-*")
    assert holds(aside) == ["global_step_4", "global_step_6"]
    (save(config, step=7) / "state.json").write_text("{}")
    assert ResumePoint.find(config).state.step == 2


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_resume_from_elsewhere_sets_local_checkpoints_aside(tmp_path: Path, scheme: str) -> None:
    here = tmp_path / "here"
    for step in (1, 7):
        save(configured(here), step=step)
    elsewhere = save(configured(tmp_path / "there"), step=3)
    fork = ("trainer.resume_mode=resume_path", f"trainer.resume_from_path={scheme}{elsewhere}")
    assert ResumePoint.find(configured(here, *fork)).state.step == 3
    [aside] = here.glob("set_aside-*")
    brought = ["global_step_3", LATEST_FILE] if scheme else []
    assert holds(here) == [*brought, aside.name]
    assert holds(aside) == ["global_step_1", "global_step_7", *([] if scheme else [LATEST_FILE])]
    assert not brought or pointer(here) == "3"


@pytest.mark.parametrize("launcher", ["TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"])
def test_restarted_job_resumes_from_its_own_last_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, launcher: str
) -> None:
    run_dir, elsewhere = tmp_path / "run", save(configured(tmp_path / "there"), step=3)
    afresh = configured(run_dir, "trainer.resume_mode=disable")
    fork = configured(run_dir, "trainer.resume_mode=resume_path", f"trainer.resume_from_path={elsewhere}")
    monkeypatch.setenv(launcher, "1")
    assert ResumePoint.find(afresh).state.step == 0  # it died before its first save
    assert ResumePoint.find(fork).state.step == 3
    last = save(fork, step=4)
    (save(fork, step=5) / "state.json").write_text("{}")
    for config in (afresh, fork):
        assert ResumePoint.find(config).checkpoint == last
        assert f"restarted by its launcher: resumes from {last}, although trainer.resume_mode" in told(caplog)
    assert ResumePoint.find(fork, continues=False).state.step == 3
    [aside] = run_dir.glob("set_aside-*")
    assert holds(run_dir) == ["global_step_4", LATEST_FILE, aside.name]
    monkeypatch.setenv(launcher, "0")
    assert ResumePoint.find(fork).state.step == 3


@pytest.mark.parametrize(
    "arguments",
    [[], ["trainer.resume_mode=disable"], ["trainer.resume_mode=resume_path", "trainer.resume_from_path=a"]],
)
def test_signalled_job_shows_how_to_resume(tmp_path: Path, arguments: list[str]) -> None:
    trainer = configured(tmp_path, *arguments).trainer
    said = how_to_resume(trainer, {}).removeprefix("the same command").removesuffix(" resumes the run")
    changes = said.removeprefix(" with").split()
    assert configured(tmp_path, *arguments, *changes).trainer.resume_mode == "auto"
    assert bool(changes) == bool(arguments)
    command = "python -m megarl train a.yaml"
    assert how_to_resume(trainer, {COMMAND: command}).endswith(" ".join([f"\n  {command}", *changes]))
