"""The runs of `scripts/results.py` and `scripts/curves.py` are those of files in `configs/`, all with one budget."""

import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

from megarl.config.load import load_config
from megarl.config.root import Config

ROOT = Path(__file__).parents[2]


@pytest.fixture
def results(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    monkeypatch.delitem(sys.modules, "results", raising=False)
    return import_module("results")


def load(*argv: str) -> Config:
    return load_config(argv, world_size=None, check_paths=False)


def test_every_run_keeps_to_its_file_and_budget(
    results: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    base = load(results.BASE)
    for name, file in results.ALGORITHMS.items():
        ours = load(*results.command_of(name, 1, tmp_path, steps=40)[3:])
        theirs = load(f"configs/{file}") if file else base
        inert = {} if theirs.algorithm.use_kl_in_reward else {"kl_ctrl": theirs.algorithm.kl_ctrl}
        shorter = {"overlong_buffer": theirs.algorithm.overlong_buffer}
        assert replace(ours.algorithm, **inert, **shorter) == theirs.algorithm, name
        assert ours.algorithm.overlong_buffer.enable == theirs.algorithm.overlong_buffer.enable
        policy, wanted = ours.actor_rollout_ref, theirs.actor_rollout_ref
        for key in ("policy_loss", "loss_agg_mode", "use_kl_loss", "kl_loss_type", "clip_ratio_low", "clip_ratio_high"):
            assert getattr(policy.actor, key) == getattr(wanted.actor, key), f"{name}: {key}"
        answers = policy.rollout.n + (ours.algorithm.adv_estimator == "remax")
        assert answers * ours.data.train_batch_size == results.SAMPLES
        assert policy.actor.ppo_mini_batch_size * results.UPDATES == ours.data.train_batch_size
        assert (policy.actor.optim, policy.rollout.temperature) == (base.actor_rollout_ref.actor.optim, 1.0)
        assert ours.trainer.n_gpus_per_node == 1


def test_result_belongs_only_to_its_own_command(results: ModuleType, tmp_path: Path) -> None:
    read_result = import_module("seeded").read_result
    assert read_result(tmp_path, ["-m", "megarl", "train"]) is None
    (tmp_path / "result.json").write_text(
        '{"algorithm": "PPO", "seed": 1, "command": ["-m", "megarl", "train"], "seconds": 1.0, "curve": [[0, 0.1]]}'
    )
    assert read_result(tmp_path, ["-m", "megarl", "train"]).seed == 1
    assert read_result(tmp_path, ["-m", "megarl", "train", "data.seed=2"]) is None


@pytest.mark.parametrize("study", ["partial", "guess", "replay"])
def test_study_runs_are_valid_and_differ_in_settings(
    results: ModuleType, study: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    curves = import_module("curves")
    settings = curves.STUDIES[study].settings
    runs = [load(*curves.command_of(its, 2, tmp_path, name, steps=12)[3:]) for name, its in settings.items()]
    assert {run.data.seed for run in runs} == {run.actor_rollout_ref.rollout.seed for run in runs} == {2}
    samples = {run.data.train_batch_size * run.actor_rollout_ref.rollout.n for run in runs}
    assert samples == {curves.STUDIES[study].measure.samples}
    assert len({run.actor_rollout_ref.actor.optim for run in runs}) == 1
    assert len({run.trainer.default_local_dir for run in runs}) == len(runs)
