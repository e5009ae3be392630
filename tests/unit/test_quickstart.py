"""The quickstart fits its runs to the machine, hands keys to its commands, and asks for packages before it starts."""

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from unittest.mock import patch

import pytest
import torch
from matplotlib.image import imread

from megarl.config.load import load_config, load_sft_config
from megarl.config.root import Config, SFTConfig
from megarl.tracking.jsonl import Jsonl
from tests.support.programs import ROOT


@pytest.fixture
def quickstart(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import quickstart  # type: ignore[import-not-found]

    yield quickstart
    del sys.modules["quickstart"]


@pytest.mark.parametrize(("num_devices", "ranks"), [(1, 1), (2, 2), (8, 2)])
def test_cuda_processes_have_one_device_and_half_precision(
    quickstart: ModuleType, num_devices: int, ranks: int
) -> None:
    with patch.object(torch.cuda, "device_count", lambda: num_devices):
        keys = quickstart.keys_of_machine("cuda")
    load = {"world_size": None, "check_paths": False}
    sft = load_sft_config(["configs/quickstart_sft.yaml", *quickstart.known_to(SFTConfig, keys)], **load)
    ppo = load_config(["configs/quickstart_ppo.yaml", *quickstart.known_to(Config, keys)], **load)
    policy = ppo.actor_rollout_ref
    assert {run.trainer.n_gpus_per_node for run in (sft, ppo)} == {ranks}
    assert {part.tensor_model_parallel_size for part in (policy.actor.megatron, policy.rollout)} == {1}
    parts = (sft.megatron, policy.actor.megatron, policy.ref.megatron, policy.rollout, ppo.critic.megatron)
    assert {part.dtype for part in parts} == {"bfloat16"}


def test_cpu_keeps_configurations_unchanged(quickstart: ModuleType) -> None:
    assert quickstart.keys_of_machine("cpu") == {}


def test_each_key_reaches_commands_defining_it(quickstart: ModuleType) -> None:
    keys = quickstart.read_keys(["trainer.logger=[console]", "optim.lr=0.1", "critic.optim.lr=a=b"])
    assert quickstart.known_to(SFTConfig, keys) == ["trainer.logger=[console]", "optim.lr=0.1"]
    assert quickstart.known_to(Config, keys) == ["trainer.logger=[console]", "critic.optim.lr=a=b"]
    with pytest.raises(SystemExit, match=r"trainer.loger is no key"):
        quickstart.read_keys(["trainer.loger=console"])


def test_a_missing_package_ends_it_at_once(quickstart: ModuleType) -> None:
    gone = ModuleNotFoundError("No module named 'contourpy'", name="contourpy")
    with (
        patch.object(quickstart.importlib, "import_module", side_effect=gone),
        pytest.raises(SystemExit, match="install contourpy"),
    ):
        quickstart.check_packages(loggers="mlflow")
    quickstart.check_packages(loggers="[console]")


def test_the_picture_has_both_curves(quickstart: ModuleType, tmp_path: Path) -> None:
    tracker = Jsonl(tmp_path)
    for step in range(20):
        tracker.log({"critic/score/mean": step / 20}, step=step)
        if step % 5 == 0:
            tracker.log({"val-core/a/mean@1": step / 30, "val-core/b/mean@1": 0.1}, step=step)
    quickstart.plot_curves(tmp_path / "metrics.jsonl", tmp_path / "curves.png")
    left, right = (imread(tmp_path / "curves.png")[:, part] for part in (slice(0, 700), slice(800, 1500)))
    for half in (left, right):
        assert ((half[..., 2] - half[..., 0]) > 0.3).any()  # the blue of the first curve
    Jsonl(tmp_path).log({"actor/lr": 1.0}, step=1)
    with pytest.raises(ValueError, match="has neither critic/score/mean nor a validation score"):
        quickstart.plot_curves(tmp_path / "metrics.jsonl", tmp_path / "curves.png")
