"""Places that a configuration names: chat templates that do not parse, directories that take no files."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megarl.config.faults import ConfigError
from megarl.config.load import load_config, load_reward_train_config, load_sft_config
from tests.support.configs import faults, make_model, sound_arguments

DIRECTORY, SAMPLES, TEMPLATE = "trainer.default_local_dir", "trainer.rollout_data_dir", "data.chat_template"
LOADERS = (load_config, load_sft_config, load_reward_train_config)


@pytest.fixture
def argv(tmp_path: Path) -> list[str]:
    return sound_arguments(tmp_path)


def supervised(directory: Path) -> list[str]:
    make_model(directory / "base")
    (directory / "pairs.jsonl").touch()
    return [f"model.path={directory}/base", f"data.train_files={directory}/pairs.jsonl", "trainer.n_gpus_per_node=1"]


@pytest.mark.parametrize("load", LOADERS)
@pytest.mark.parametrize("template", ["/no/such.jinja", "'{% for m in'", "'{{ m | nonesuch }}'", "'{{ m | random }}'"])
def test_bad_template_and_directory_are_reported_together(
    load: Callable[..., Any], template: str, argv: list[str], tmp_path: Path
) -> None:
    sound = argv if load is load_config else supervised(tmp_path)
    place = tmp_path / "pairs.jsonl" if load is not load_config else tmp_path / "train.parquet"
    with pytest.raises(ConfigError) as caught:
        load([*sound, f"{TEMPLATE}={template}", f"{DIRECTORY}={place}"], world_size=None)
    assert {TEMPLATE, DIRECTORY} <= {fault.path for fault in caught.value.faults}


@pytest.mark.parametrize("key", [DIRECTORY, SAMPLES])
@pytest.mark.parametrize("below", ["", "/run", "/a/b"])
def test_uncreatable_directory_is_configuration_fault(key: str, below: str, argv: list[str], tmp_path: Path) -> None:
    (tmp_path / "circle").symlink_to("circle")
    (tmp_path / "nowhere").symlink_to("/proc/none")
    names = [tmp_path / "train.parquet", tmp_path / "circle", tmp_path / "nowhere", tmp_path / ("x" * 300)]
    for name in [*names, *([Path("/proc"), Path("/proc/none")] if Path("/proc/self").is_dir() else [])]:
        found = faults(argv, f"{key}={name}{below}")
        assert found.keys() == {key}
        assert found[key].startswith(f"{name}{below} cannot be written: ")
        assert faults(argv, f"{key}={name}{below}", check_paths=False) == {}


def test_a_sound_directory_is_left_as_it_was(argv: list[str], tmp_path: Path) -> None:
    before = sorted(tmp_path.iterdir())
    assert faults(argv, f"{DIRECTORY}={tmp_path}/a/b", f"{SAMPLES}={tmp_path}") == {}
    assert sorted(tmp_path.iterdir()) == before


def test_command_without_run_ignores_run_directory(argv: list[str], tmp_path: Path) -> None:
    load_config([*argv, f"{DIRECTORY}={tmp_path}/train.parquet/x"], world_size=None, writes=False)
