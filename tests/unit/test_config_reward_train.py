"""The configuration of a reward model's training: what it shares with supervised runs, and what a pair asks for."""

from pathlib import Path

import pytest

from megarl.config.faults import ConfigError
from megarl.config.load import load_reward_train_config, to_dict
from tests.support.configs import make_model


@pytest.fixture
def argv(tmp_path: Path) -> list[str]:
    (tmp_path / "pairs.parquet").touch()
    make_model(tmp_path)
    return [
        f"data.train_files={tmp_path}/pairs.parquet",
        f"model.path={tmp_path}",
        "data.max_length=100",
        "trainer.n_gpus_per_node=2",
    ]


def test_a_micro_batch_must_hold_both_answers(argv: list[str]) -> None:
    assert load_reward_train_config([*argv, "max_token_len_per_gpu=202"], world_size=2).center_rewards_coefficient == 0
    with pytest.raises(ConfigError, match="201 tokens cannot hold one pair of data.max_length=100: write at least 202"):
        load_reward_train_config([*argv, "max_token_len_per_gpu=201"], world_size=2)


def test_all_faults_come_together(argv: list[str]) -> None:
    wrong = ["data.train_batch_size=1", "data.response_key=answer", "center_rewards_coefficient=-1", "optim.lr=fast"]
    with pytest.raises(ConfigError) as caught:
        load_reward_train_config([*argv, *wrong], world_size=2)
    assert [fault.path for fault in caught.value.faults] == [
        "center_rewards_coefficient",
        "data.response_key",
        "data.train_batch_size",
        "optim.lr",
    ]


def test_a_resolved_configuration_has_every_key(argv: list[str]) -> None:
    tree = to_dict(load_reward_train_config(argv, world_size=2))
    assert tree["data"]["chosen_key"] == "chosen"
    assert tree["trainer"]["default_local_dir"] == "checkpoints/megarl_examples/run"
